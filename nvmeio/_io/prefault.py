"""New memory found by several threads, while the drive fills it from the other end.

The first touch of a page makes the kernel find and clear it: 11 GB/s on one core at best, and on a
virtual machine, whose host has to find the page as well, 0.3 to 0.9. A direct read touches pages
when it pins them, on the thread that submits it, which is then what the drive waits for.

So helpers touch the memory from its end backwards, until they meet the reads that come from its
beginning. Pages that are there already cost them nothing, so the order need not be kept exactly.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
from collections.abc import Iterator, Sequence

from nvmeio._memory.mappings import Mapping
from nvmeio._memory.system import libc
from nvmeio._threads.threads import Thread

# Below this the reads are done before a thread has begun.
PREFAULT_FROM_BYTES = 64 << 20

# One call of the kernel; see _memory for what longer ones do to other threads.
_PREFAULT_BYTES = 16 << 20

_PREFAULT_THREADS = max(1, min(4, (os.cpu_count() or 1) - 1))



class Prefault:
    """Touches mappings in the background, for as long as a ``with`` block lasts.

    Args:
        mappings: In the order in which they are filled.
    """

    def __init__(self, mappings: Sequence[Mapping]) -> None:
        self._pieces = _backwards(mappings)
        self._lock = threading.Lock()
        self._stopping = False
        self._refused = 0
        self._count = _PREFAULT_THREADS if sum(m.nbytes for m in mappings) >= PREFAULT_FROM_BYTES else 0
        self._threads: list[Thread] = []

    def check(self) -> None:
        """Raise if there was not enough memory.

        Raises:
            MemoryError: The kernel refused a page.
        """
        if self._refused:
            raise MemoryError(f"cannot allocate memory: {os.strerror(self._refused)}")

    def _run(self) -> None:
        while not self._stopping:
            with self._lock:
                piece = next(self._pieces, None)
            if piece is None:
                return
            if libc.madvise(*piece, _MADV_POPULATE_WRITE) != 0:
                code = ctypes.get_errno()
                if code not in (errno.EINVAL, errno.ENOSYS):  # before 5.14: the reads touch it
                    self._refused = code
                return

    def __enter__(self) -> Prefault:
        # No more threads in this process: fewer will do.
        with contextlib.suppress(RuntimeError, MemoryError):
            for _ in range(self._count):
                thread = Thread(self._run, "nvmeio-prefault")
                thread.start()
                self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        for thread in self._threads:
            thread.join()


def _backwards(mappings: Sequence[Mapping]) -> Iterator[tuple[int, int]]:
    for mapping in reversed(mappings):
        for start in reversed(range(0, mapping.nbytes, _PREFAULT_BYTES)):
            yield mapping.address + start, min(_PREFAULT_BYTES, mapping.nbytes - start)
