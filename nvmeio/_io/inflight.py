"""Operations in flight: a bounded number at once, finished first in first out, ended as one.

::

    with InFlight() as flight:
        for chunk, offset in chunks:
            flight.start(partial(handle.async_pwrite, chunk, file, offset), chunk.nbytes)

- *Bounded*: `start` finishes the operations that were started first until there is room.
- *In order*: `done` of each operation is called by the thread that starts them, in their order.
- *Cancelled from any thread*: `cancel` lets nothing more begin and ends soon what has begun; the
  thread that starts is told by `Cancelled`.
- *Over at the end*: leaving the ``with`` block waits for all, or after an exception cancels all and
  waits. Then no byte of anybody's memory is touched any more.

One thread starts and finishes. Let it not be the main one, where an interrupt could come between
the beginning of an operation and its being noted: public calls are run by
`run_interruptible(work, flight.cancel)`, and what an `OwnerThread` runs is safe as it is.

`Stagings` are chunks for copies to or from other memory: page-locked where a CUDA
device copies and that is allowed (the copies are as fast as the bus, and run beside the drive).
`WriteBehind` is a file written through them from its start to its end, while what comes next is
being made.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from nvmeio import buffers
from nvmeio._bindings import memory_at
from nvmeio._memory import page_locked
from nvmeio._pages import PAGE_BYTES, round_down
from nvmeio._threads.closing import on_error
from nvmeio._threads.interruptible import Cancelled, run_interruptible
from nvmeio.errors import BatchError, ClosedError, TransferError, with_context
from nvmeio.files import File
from nvmeio.handle import AioHandle
from nvmeio.operation import Operation

logger = logging.getLogger("nvmeio")

Item = TypeVar("Item")

# Enough for the queue of a lane (128 blocks of 1 MiB), and 32 MiB more for its refill. 1 GiB was
# read (warm, interleaved, on a busy machine) in operations of 64 KiB, 1, 32 and 128 MiB, in GB/s:
# with these bounds 2.2, 2.5, 2.5, 2.5; with 512 MiB 2.1, 2.5, 2.5, 2.6; with 64 MiB 2.1, 2.5, 2.4,
# 2.4; with 64 operations 1.7, 2.5, 2.5, 2.5. And no more than that, for the engine serves all of
# them at once: what is needed first comes later the more there are.
MOST_BYTES = 160 << 20
MOST_OPERATIONS = 256

# However large they are: the second keeps the drive busy when the first one ends.
LEAST_OPERATIONS = 2


class _Entry(NamedTuple):
    operation: Operation
    nbytes: int
    done: Callable[[], None] | None
    label: Callable[[int], str] | None

    def told(self, failed: BaseException) -> BaseException:
        """The first error, with the label of what failed."""
        item, first = failed.failures[0] if isinstance(failed, BatchError) else (0, failed)
        if self.label is None or not isinstance(first, TransferError):
            return first
        told = with_context(first, self.label(item))
        told.__cause__ = first
        return told


class InFlight:
    """The operations of one load, save or the like.

    `most_bytes` may be in flight at once; two operations may, however large they are. `finished` is
    called with each operation that ended well, before its own `done`.
    """

    def __init__(
        self, most_bytes: int = MOST_BYTES, finished: Callable[[Operation], None] | None = None
    ) -> None:
        self._most_bytes = most_bytes
        self._finished = finished
        self._flying: deque[_Entry] = deque()
        self._nbytes = 0
        self._lock = threading.Lock()  # of _flying, against `cancel`
        self.cancelled = False

    def start(
        self,
        begin: Callable[[], Operation],
        nbytes: int,
        done: Callable[[], None] | None = None,
        label: Callable[[int], str] | None = None,
    ) -> None:
        """Call `begin` as soon as there is room for so many bytes.

        `done` is called when the operation has ended well and all before it are done. `label` says
        what an item of a batch is for (0 if it is not a batch), to be added to its error.

        Raises:
            Cancelled: `cancel` was called; nothing was begun.
            TransferError: One that was started before has failed.
        """
        while not self.has_room(nbytes):
            self.finish_first()
        with self._lock:
            if self.cancelled:
                raise Cancelled
            self._flying.append(_Entry(begin(), nbytes, done, label))
        self._nbytes += nbytes

    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes more can be started without waiting."""
        return len(self._flying) < LEAST_OPERATIONS or (
            self._nbytes + nbytes <= self._most_bytes and len(self._flying) < MOST_OPERATIONS
        )

    def finish_first(self) -> None:
        """Wait for the operation that was started first.

        Raises TransferError with its label if it failed (of a batch, the first item that did), and
        Cancelled.
        """
        entry = self._flying[0]
        try:
            failed = entry.operation.exception()
        except concurrent.futures.CancelledError:
            raise Cancelled from None
        if failed is not None:
            try:
                raise entry.told(failed)
            finally:
                del failed  # or its traceback would keep it, and all that this frame has
        with self._lock:
            self._flying.popleft()
        self._nbytes -= entry.nbytes
        if self._finished is not None:
            self._finished(entry.operation)
        if entry.done is not None:
            entry.done()

    def drain(self) -> None:
        """Wait for all; raises as `finish_first`."""
        while self._flying:
            self.finish_first()

    def cancel(self) -> None:
        """Begin nothing new, and end begun work soon; from any thread."""
        with self._lock:
            self.cancelled = True
            for entry in self._flying:
                entry.operation.cancel()

    def stop(self) -> None:
        """Cancel, and wait until nothing is in flight."""
        self.cancel()
        while self._flying:
            with contextlib.suppress(concurrent.futures.CancelledError):
                self._flying[0].operation.exception()
            with self._lock:
                self._flying.popleft()

    def __enter__(self) -> InFlight:
        return self

    def __exit__(self, kind: object, exc: BaseException | None, traceback: object) -> None:
        with on_error(self.stop):
            if exc is None:
                self.drain()
        if exc is not None:
            self.stop()

    def __len__(self) -> int:
        return len(self._flying)


def in_groups(
    items: Iterable[Item], size_of: Callable[[Item], int], most_bytes: float, most_items: float
) -> Iterator[list[Item]]:
    """Items in their order, together up to a size and a number; one alone may be larger."""
    group: list[Item] = []
    nbytes = 0
    for item in items:
        wanted = size_of(item)
        if group and (nbytes + wanted > most_bytes or len(group) == most_items):
            yield group
            group, nbytes = [], 0
        group.append(item)
        nbytes += wanted
    if group:
        yield group


def new_staging(nbytes: int, device: torch.device) -> torch.Tensor:
    """Aligned bytes for copies to or from a device; page-locked for CUDA if that is allowed.

    When its last tensor is gone others use it: no copy may be under way then.
    """
    if device.type == "cuda":
        try:
            return page_locked.take(nbytes)
        except OSError as refused:
            logger.info("copying through memory that is not page-locked: %s", refused)
    return buffers.empty_aligned(nbytes, dtype=torch.uint8)


class Stagings:
    """Chunks of one size, made as they are wanted, at most `count` of them.

    Two keep a drive busy while one is copied; four keep both sides busy when they stutter. `device`
    is what they are copied to or from.
    """

    def __init__(self, nbytes: int, count: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self._left = count
        self._device = device
        self._free: list[torch.Tensor] = []

    @classmethod
    def of(cls, chunks: Sequence[torch.Tensor]) -> Stagings:
        """Use chunks that the caller has, all of one size."""
        made = cls(chunks[0].nbytes, 0, chunks[0].device)
        made._free += reversed(chunks)
        return made

    @property
    def has_free(self) -> bool:
        return bool(self._free) or self._left > 0

    def take(self, flight: InFlight) -> torch.Tensor:
        """Take a free chunk; finishes what is in flight until there is one, and raises as that."""
        while not self._free:
            if self._left:
                self._left -= 1
                return new_staging(self.nbytes, self._device)
            flight.finish_first()
        return self._free.pop()

    def give_back(self, chunk: torch.Tensor) -> None:
        """Give back a chunk that nobody reads or writes any more."""
        self._free.append(chunk)


class WriteBehind:
    """Collects writes in one half of a buffer while the other half goes to the file.

    Handle and file stay open; the file is written from its first byte on. `staging` is a CPU byte
    tensor. `run` has each half written; in another thread than the main one, or one at a time.
    """

    def __init__(
        self,
        handle: AioHandle,
        file: File,
        staging: torch.Tensor,
        run: Callable[[Callable[[], None]], None] = run_interruptible,
    ) -> None:
        # Whole pages, so that every drain but the last begins and ends where direct I/O can.
        half = max(round_down(staging.numel() // 2, PAGE_BYTES), 1)
        self._stagings = Stagings.of([staging[:half], staging[half : 2 * half]])
        self._flight = InFlight()
        self._chunk = self._stagings.take(self._flight)
        self._view = _memory_of(self._chunk)
        self._filled = 0
        self._offset = 0
        self._handle = handle
        self._file = file
        self._run = run

    def write(self, data: Any) -> int:
        """Take any bytes, and return how many.

        Raises:
            TransferError: An earlier part could not be written.
            ClosedError: It was released meanwhile, by another thread or the end of the program.
        """
        taken = memoryview(data).cast("B")
        done = 0
        while done < len(taken):
            # No local name holds the memory: torch's writer keeps the traceback of what interrupts
            # this (its C++ does not let go of it), and a frame there would keep it forever.
            size = len(self._view)
            step = min(len(taken) - done, size - self._filled)
            try:
                self._view[self._filled : self._filled + step] = taken[done : done + step]
            except ValueError:
                if self._view:
                    raise
            if not self._view:
                raise ClosedError("closed by another thread while it was written: write it again")
            self._filled += step
            done += step
            if self._filled == size:
                self._run(self._drain)
        return done

    def flush(self) -> None:
        """Do nothing: torch calls it before the end, and what is in the buffer can wait."""

    def fileno(self) -> int:
        """There is none to write to: torch then hands everything to `write`."""
        raise io.UnsupportedOperation("fileno")

    def finish(self) -> None:
        """Write what is left, and wait for all of it."""
        if self._filled:
            self._drain()
        self._flight.drain()

    def abandon(self) -> None:
        """Stop writing; nothing is in flight after this."""
        self._flight.stop()

    def release(self) -> None:
        """Give the memory up, even if this is still referenced; nothing is written after this."""
        self._view = memoryview(bytearray())
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._stagings = Stagings.of([self._chunk])

    @property
    def position(self) -> int:
        return self._offset + self._filled

    def _drain(self) -> None:
        chunk, nbytes = self._chunk, self._filled
        begin = partial(self._handle.async_pwrite, chunk[:nbytes], self._file, self._offset)
        self._flight.start(begin, nbytes, partial(self._stagings.give_back, chunk))
        self._offset += nbytes
        self._filled = 0
        self._chunk = self._stagings.take(self._flight)
        self._view = _memory_of(self._chunk)


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """A CPU tensor's bytes, which it keeps: `release` may come while they are written to."""
    return memory_at(tensor.data_ptr(), tensor.nbytes, tensor)
