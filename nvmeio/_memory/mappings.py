"""The memory behind nvmeio's buffers: mappings on huge pages.

Who keeps what alive: tensor → torch storage → `Mapping` (a `mmap.mmap`) → the pages. The mapping
goes when the last view of it goes; nothing here holds one. `_memory.registry` knows their
addresses.

Sources: man 2 mmap, man 2 madvise (MADV_HUGEPAGE, MADV_POPULATE_WRITE), man 2 mlock.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import math
import mmap
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from nvmeio._files.plan import PAGE_BYTES, round_up
from nvmeio._memory import registry
from nvmeio._memory.registry import Alive, Pin, unpin
from nvmeio._memory.system import (
    check_available,
    cuda_refusal,
    cuda_runtime,
    huge_page_bytes,
    libc,
    no_memory,
    not_lockable,
)

_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ = 22  # Linux 5.14; linux/mman.h
_MADV_POPULATE_WRITE = 23
_MLOCK_ONFAULT = 1  # Linux 4.4

# The kernel holds the process's memory map for the whole of one populate call, and every other
# thread that maps or unmaps memory waits for it. Populating 1 GiB in one call stalled such a thread
# for 88 ms, or 1.2 s where a virtual machine's host had to find the pages first; 64 MiB at a time
# for 5 to 60 ms; 16 MiB at a time for 1 to 2 ms, at the same 11 to 12 GB/s.
_POPULATE_BYTES = 16 << 20

# A tail shorter than a huge page lies on small pages. It is rounded up to a whole huge page where
# that costs at most this fraction of the buffer.
_ROUNDING_SHARE = 8


class Mapping(mmap.mmap):
    """An anonymous private mapping that knows its aligned start and leaves the registry in time.

    The steps are separate so that a lock that is refused costs no touching: create, `lock` where
    wanted, `populate` once, `register_with_cuda` where wanted, `tensor` as often as needed.

    A `__del__` rather than `weakref.finalize`: it runs before the memory is unmapped, whereas
    mmap's own deallocator calls weak references after that, when another thread may have been
    given the same address already. What Ctrl-C takes of a `__del__` nobody does again, so there is
    a net below it: Python drops a subclass's slots between the two, and the weak reference to what
    lies in one puts itself in a queue (`died`), in C.
    """

    __slots__ = ("_alive", "address", "base", "nbytes")

    _alive: Alive

    base: int  # of the first byte
    address: int  # of the first usable byte
    nbytes: int  # usable from there, whole pages

    def __new__(cls, nbytes: int) -> Mapping:
        """Reserve at least `nbytes` bytes (and at least a page) of address space.

        Raises:
            MemoryError: The kernel refused, or more is asked for than is available.
        """
        huge = huge_page_bytes()
        align = huge if nbytes >= huge else PAGE_BYTES
        length = round_up(max(nbytes, 1), PAGE_BYTES)
        rounded = round_up(length, align)
        if (rounded - length) * _ROUNDING_SHARE <= length:
            length = rounded
        check_available(nbytes, length)
        try:
            # Linux aligns a mapping of whole huge pages by itself from 6.7 on; where it did not,
            # a longer one contains an aligned span. What is left over is never touched.
            self = _anonymous(cls, length)
            if self.address % align:
                self = _anonymous(cls, length + align)
                self.address = round_up(self.address, align)
        except (OSError, OverflowError, ValueError) as error:
            raise MemoryError(no_memory(nbytes, str(error))) from None
        if align == huge:
            # Refused (EINVAL) only by a kernel without huge pages, where small ones must do.
            libc.madvise(self.address, length, _MADV_HUGEPAGE)
        registry.take_out_dead()  # one of them may have had this address
        self._alive = Alive()
        self.nbytes = length
        registry.alive[self.address] = weakref.ref(self._alive, registry.died.put)
        registry.mapped.add(self.address, length)
        return self

    def lock(self) -> None:
        """Page-lock all of it; see `buffers.empty_pinned` for the errors.

        On fault: what `populate` brings in is locked as it comes, so that a refusal is known
        at once and `mlock` does not populate in one long call (see _POPULATE_BYTES).
        """
        registry.pinned[self.address] = Pin(self.nbytes)  # first: what is interrupted can be undone
        if libc.mlock2(self.address, self.nbytes, _MLOCK_ONFAULT) != 0:
            code = ctypes.get_errno()
            if code != errno.ENOSYS or libc.mlock(self.address, self.nbytes) != 0:
                code = ctypes.get_errno()
                unpin(self.address)
                raise OSError(code, not_lockable(self.nbytes, code))
        registry.locked.add(self.address, self.nbytes)

    def populate(self) -> None:
        """Back every page with memory.

        Raises:
            MemoryError: There is not enough.
        """
        for start in range(0, self.nbytes, _POPULATE_BYTES):
            length = min(_POPULATE_BYTES, self.nbytes - start)
            if libc.madvise(self.address + start, length, _MADV_POPULATE_WRITE) == 0:
                continue
            code = ctypes.get_errno()
            if code not in (errno.EINVAL, errno.ENOSYS):
                raise MemoryError(no_memory(self.nbytes, os.strerror(code)))
            ctypes.memset(self.address + start, 0, length)  # Linux before 5.14; no GIL either

    def register_with_cuda(self) -> None:
        """Make it known to CUDA where CUDA can be used; call after `lock` (or not) and `populate`.

        CUDA page-locks what is not locked yet.
        """
        runtime = cuda_runtime()
        if runtime is None:
            return
        if self.address not in registry.pinned:
            registry.pinned[self.address] = Pin(self.nbytes)
            registry.locked.add(self.address, self.nbytes)
        pin = registry.pinned[self.address]
        pin.device = torch.cuda.current_device()
        pin.runtime = runtime  # before the call: what is interrupted after it can be undone
        # 0, cudaHostRegisterDefault: with unified addressing it is page-locked to every device.
        error = runtime.cudaHostRegister(self.address, self.nbytes, 0)
        if int(error) != 0:
            pin.runtime = None
            unpin(self.address)
            raise OSError(errno.EIO, cuda_refusal(runtime, "cudaHostRegister", self.nbytes, error))

    def tensor(self, offset: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor from byte `offset` on, with a storage of exactly its size.

        It holds this mapping: torch keeps the object that it was given a buffer of.
        """
        start = self.address - self.base + offset
        # frombuffer makes no empty tensor; one element of storage stands behind it instead.
        count = max(math.prod(sizes), 1)
        flat = torch.frombuffer(self, dtype=dtype, count=count, offset=start)
        # Not view(): the tensor should not be another one's view. It never grows, so no copy.
        return flat if sizes == (count,) else flat.resize_(sizes)

    def lend(
        self, offset: int, nbytes: int, died: Callable[[weakref.ref[Any]], object]
    ) -> tuple[torch.Tensor, weakref.ref[memoryview]]:
        """As `tensor`, of bytes; `died` is called when nobody has its storage any more.

        Returns:
            The tensor, and what has to be kept for that.
        """
        start = self.address - self.base + offset
        part = memoryview(self)[start : start + max(nbytes, 1)]
        flat = torch.frombuffer(part, dtype=torch.uint8)  # keeps the part, and that the mapping
        return (flat if nbytes else flat.resize_(0)), weakref.ref(part, died)

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the end of the interpreter the globals may be gone; so is the process, soon.
        if finalizing() or not hasattr(self, "nbytes"):
            return
        registry.leave(self.address)


def _anonymous(cls: type[Mapping], length: int) -> Mapping:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    self: Mapping = mmap.mmap.__new__(cls, -1, length, flags=flags)
    self.base = self.address = _address_of(self)
    return self


def _address_of(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def accessible(address: int, nbytes: int, writing: bool) -> bool:
    """Whether memory can be read (or written), found by having the kernel bring it in.

    Before Linux 5.14, which has no such call, all memory is taken to be accessible.
    """
    advice = _MADV_POPULATE_WRITE if writing else _MADV_POPULATE_READ
    start = address - address % PAGE_BYTES
    if not nbytes or libc.madvise(start, address + nbytes - start, advice) == 0:
        return True
    code = ctypes.get_errno()
    if code == errno.EINVAL:  # read-only, or an advice that this kernel does not know
        return not _knows_populate()
    return code not in (errno.EFAULT, errno.ENOMEM)


@functools.cache
def _knows_populate() -> bool:
    page = mmap.mmap(-1, PAGE_BYTES)
    return bool(libc.madvise(_address_of(page), PAGE_BYTES, _MADV_POPULATE_READ) == 0)
