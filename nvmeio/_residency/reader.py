"""The reader, which keeps the drive busy: reads of units, first come first served.

The engine below serves its requests fairly, a block of each in turn. This suits independent callers
and is wrong here: the unit that is needed next should have the drive to itself. So the reads of a
fill are submitted chunk by chunk, those of the next one behind them, and never more at once than
fill the queue: a unit arrives as early as it can, and the drive has the next one in its queue by
then.

A caller that waits for a fill notices the end of its reads itself (`Reader.wait`): a notice from a
thread would cost a switch. A thread does the work while nobody waits: reads that did not find room
in the queue, and fills that want something done with what has arrived. One of the two lands reads
at a time.

If a file lies in the page cache (it was just downloaded, say), the drive gets less at a time, and
the thread copies chunks from the cache instead of waiting: the two rates add up.

Memory of a device may still be read by what was queued there before. Such a fill says after which
mark it is free, and the thread waits for that: neither the owner nor those who compute do.

It is asked by the thread that owns the window, never by one that an interrupt can reach: its locks
are Python's.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from nvmeio import files
from nvmeio._files import system
from nvmeio._io.drives import FileSpan
from nvmeio._io.inflight import MOST_BYTES
from nvmeio._memory.devices import Mark
from nvmeio._threads.threads import Thread
from nvmeio.errors import ClosedError
from nvmeio.files import File
from nvmeio.operation import Operation

logger = logging.getLogger("nvmeio")

CHUNK_BYTES = 32 << 20
FLIGHT_OPERATIONS = 64
# For a file in the page cache: enough to keep the drive busy, while the rest is copied.
CACHED_FLIGHT_BYTES = 64 << 20


class WantedBytes(NamedTuple):
    """Bytes of a file from `start` on, and the tensor for them, at byte `at` of the slot."""

    file: File
    start: int
    memory: torch.Tensor
    at: int

    @classmethod
    def of(cls, span: FileSpan, slot: torch.Tensor) -> WantedBytes:
        """The bytes of a span that are read into its part of a slot."""
        return cls(span.file, span.file_offset, span.part(slot), span.start)


class Reads(Protocol):
    """The mover of bytes: a handle, or one for each drive."""

    def async_pread(self, memory: torch.Tensor, file: File, file_offset: int = 0, /) -> Operation:
        """As `AioHandle.async_pread`."""


class Fill:
    """The reads of one unit, in order, of any length.

    `arrived` is called with each chunk that has arrived, in order, for copies to a device;
    `finished` once all have. `ended` is called when nothing is under way any more, also after a
    failure, and must be brief. `after` is the mark from which a device's memory is free.
    """

    def __init__(
        self,
        reads: Sequence[WantedBytes],
        arrived: Callable[[WantedBytes], None] | None = None,
        finished: Callable[[], None] | None = None,
        ended: Callable[[], None] | None = None,
        after: Mark | None = None,
    ) -> None:
        self.chunks = deque(_chunks(reads))
        self.nbytes = 0
        for chunk in self.chunks:
            self.nbytes += chunk.memory.nbytes
        self.left = self._count = len(self.chunks)
        self.operations: list[Operation] = []  # that were begun
        self.arrived = arrived
        self.finished = finished
        self.ended = ended
        self.after = after
        self.on_device = after is not None
        # Whether the thread sees to it, though nobody waits
        self.attended = bool(self.on_device or not reads or arrived or finished or ended)
        self.error: BaseException | None = None
        self.failed_at: WantedBytes | None = None
        self.cancelled = False
        self.done = threading.Event()

    @property
    def whole(self) -> bool:
        """Whether all of it has arrived, landed or not. From any thread."""
        if self.error is not None or self.cancelled:
            return False
        return self.done.is_set() or (self._has_ended and not any(map(_failed, self.operations)))

    @property
    def under_way(self) -> bool:
        """Whether some of it is still to come. From any thread."""
        return not (self.done.is_set() or self._has_ended)

    @property
    def _has_ended(self) -> bool:
        """Whether all reads have ended, of a fill that nobody has to attend to."""
        begun = tuple(self.operations)
        return (
            not self.attended and len(begun) == self._count and all(each.done() for each in begun)
        )


class Reader:
    """Carries out fills in the order of `submit`; `served_bytes` were read for other ranks."""

    served_bytes = 0

    def __init__(self, handle: Reads) -> None:
        self._handle = handle
        self._condition = threading.Condition()
        self._queue: deque[Fill] = deque()
        self._flying: deque[tuple[Operation, Fill, WantedBytes, int]] = deque()
        self._flying_bytes = 0
        self._landing = False  # somebody does: the thread, or a waiter
        self._stopping = False
        self._thread = Thread(self._run, "nvmeio-stream")
        self._thread.start()

    def submit(self, fill: Fill) -> None:
        """Begin a fill as soon as those before it have been submitted."""
        with self._condition:
            if self._stopping:
                raise ClosedError("the stream of weights is closed: open the model again")
            if not fill.left:
                self._conclude(fill)
                return
            self._queue.append(fill)
            self._fill()  # here and now: the thread may be waiting for the end of a chunk
            self._call_thread()

    def wait(self, fill: Fill) -> None:
        """Block until a fill has ended, successfully or not."""
        with self._condition:
            if fill.done.is_set():
                return
            lands = not self._landing
            if lands:
                self._landing = True
            else:
                fill.attended = True  # the present lander may stop before that
        if not lands:
            fill.done.wait()
            return
        try:
            while not fill.done.is_set():
                self._step()
        finally:
            with self._condition:
                self._landing = False
                self._call_thread()

    def cancel(self, fill: Fill) -> None:
        """End a fill; when this returns nobody uses its memory any more."""
        with self._condition:
            fill.cancelled = True
            with contextlib.suppress(ValueError):
                self._queue.remove(fill)
            self._begin_no_more(fill)
        self.wait(fill)

    def stop(self) -> None:
        """Cancel everything and end the thread."""
        with self._condition:
            self._stopping = True
            fills = dict.fromkeys([*(fill for _, fill, _, _ in self._flying), *self._queue])
        for fill in fills:
            self.cancel(fill)
        with self._condition:
            self._call_thread()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # In the thread, or by a waiter

    def _run(self) -> None:
        while True:
            with self._condition:
                while self._landing or not self._is_needed():
                    if self._stopping and not self._landing:
                        return
                    self._condition.wait()
                self._landing = True
            try:
                while self._step(only_if_needed=True):  # nothing of a step is held between two
                    pass
            except BaseException as failed:  # no memory to note something in, say
                with self._condition:
                    self._landing = False
                    self._fail_all(failed)

    def _is_needed(self) -> bool:
        """Whether the thread has work while nobody waits. With the condition held."""
        if self._queue or not self._flying:
            return bool(self._queue)
        return any([fill.attended for _, fill, _, _ in self._flying])

    def _call_thread(self) -> None:
        if self._landing:
            return
        if self._stopping or self._queue or self._is_needed():
            self._condition.notify()

    def _step(self, only_if_needed: bool = False) -> bool:
        """Land one chunk. `only_if_needed`: stop landing, and return False, if there is no work."""
        with self._condition:
            self._fill()
            if only_if_needed and not self._is_needed():
                self._landing = False
                return False
            if not self._flying and not self._queue:
                return True  # it has failed just now
            late = None if self._flying else self._queue[0]
            if late is None:
                beside = None if self._flying[0][0].done() else self._next_cached()
                operation, fill, wanted, nbytes = self._flying[0]
        if late is not None:
            self._wait_for_memory(late)
            return True
        if beside is not None:
            self._land(*beside, self._copy(*beside))
            return True
        error: BaseException | None = None
        try:
            error = operation.exception()
        except concurrent.futures.CancelledError:
            if not fill.cancelled:  # by us, that is
                error = ClosedError("a read was cancelled: keep the handle open")
        except BaseException as failed:
            error = failed
        with self._condition:
            self._flying_bytes -= nbytes
            self._flying.popleft()
        self._land(fill, wanted, error)
        return True

    def _wait_for_memory(self, fill: Fill) -> None:
        after, error = fill.after, None
        try:
            if after is not None:
                after.wait()
        except BaseException as failed:  # the device's
            error = failed
        with self._condition:
            fill.after = None
            if error is not None and fill in self._queue:
                self._queue.remove(fill)
                self._fail(fill, error, None)

    def _copy(self, fill: Fill, wanted: WantedBytes) -> BaseException | None:
        """Copy a chunk from the page cache, or read it if that does not work."""
        try:
            with files.in_use(wanted.file) as opened:
                if system.copy_cached(opened.buffered_fd(), wanted.start, wanted.memory):
                    return None
            return self._handle.async_pread(wanted.memory, wanted.file, wanted.start).exception()
        except BaseException as failed:
            return failed

    def _land(self, fill: Fill, wanted: WantedBytes, error: BaseException | None) -> None:
        """Note that a chunk has arrived, or has failed."""
        if error is None and not fill.cancelled and fill.arrived is not None:
            try:
                fill.arrived(wanted)
            except BaseException as failed:
                error = failed
        with self._condition:
            fill.left -= 1
            if error is not None:
                self._fail(fill, error, wanted)
            elif not fill.left:
                self._conclude(fill)

    # With the condition held

    def _fill(self) -> None:
        while self._queue:
            fill = self._queue[0]
            if fill.after is not None:
                if not _is_reached(fill.after):
                    return
                fill.after = None
            nbytes = fill.chunks[0].memory.nbytes if fill.chunks else 0
            if self._flying and (
                self._flying_bytes + nbytes > MOST_BYTES
                or len(self._flying) >= FLIGHT_OPERATIONS
                or (self._flying_bytes + nbytes > CACHED_FLIGHT_BYTES and self._cached(fill))
            ):
                return
            if fill.chunks:
                wanted, operation = fill.chunks.popleft(), None
                try:
                    operation = self._handle.async_pread(wanted.memory, wanted.file, wanted.start)
                    fill.operations.append(operation)
                    # A window on a device counts memory there for as long as anybody has it.
                    noted = wanted._replace(memory=_NOTHING) if fill.on_device else wanted
                    self._flying.append((operation, fill, noted, nbytes))
                except Exception as failed:  # a closed handle; no descriptor, or no memory
                    if operation is not None:  # nobody else knows of it
                        operation.cancel()
                        with contextlib.suppress(Exception):
                            operation.exception()
                    fill.left -= 1
                    self._fail(fill, failed, wanted)
                else:
                    self._flying_bytes += nbytes
            if not fill.chunks:
                with contextlib.suppress(ValueError):
                    self._queue.remove(fill)

    def _cached(self, fill: Fill) -> bool:
        """Whether the page cache holds the next chunk of a fill."""
        if not fill.chunks or fill.on_device:
            return False
        chunk = fill.chunks[0]
        try:
            with files.in_use(chunk.file) as opened:
                return system.is_cached(opened.any_fd(), chunk.start, chunk.memory.nbytes)
        except Exception:
            return False  # its read will say so

    def _next_cached(self) -> tuple[Fill, WantedBytes] | None:
        """Take the next chunk off the queue if the page cache holds it."""
        if not self._queue or not self._cached(self._queue[0]):
            return None
        fill = self._queue[0]
        wanted = fill.chunks.popleft()
        if not fill.chunks:
            self._queue.popleft()
        return fill, wanted

    def _fail(self, fill: Fill, error: BaseException, wanted: WantedBytes | None) -> None:
        if fill.error is None:
            fill.error, fill.failed_at = error, wanted
        self._begin_no_more(fill)

    def _begin_no_more(self, fill: Fill) -> None:
        fill.left -= len(fill.chunks)
        fill.chunks.clear()
        for operation, owner, _, _ in self._flying:
            if owner is fill:
                operation.cancel()
        if not fill.left and not fill.done.is_set():
            self._conclude(fill)

    def _fail_all(self, error: BaseException) -> None:
        """Reads in flight still land; the rest has ended."""
        for _, fill, _, _ in self._flying:
            self._fail(fill, error, None)
        while self._queue:
            self._fail(self._queue.popleft(), error, None)

    def _conclude(self, fill: Fill) -> None:
        if fill.error is None and not fill.cancelled and fill.finished is not None:
            try:
                fill.finished()
            except BaseException as failed:
                fill.error = failed
        fill.finished = fill.arrived = None
        fill.done.set()
        if fill.ended is not None:
            fill.ended()


_NOTHING = torch.empty(0, dtype=torch.uint8)


def _failed(operation: Operation) -> bool:
    return operation.cancelled() or operation.exception() is not None


def _is_reached(mark: Mark) -> bool:
    try:
        return mark.done()
    except Exception:
        return False  # the device's; its waiter gets the error


def _chunks(reads: Sequence[WantedBytes]) -> list[WantedBytes]:
    found = []
    for read in reads:
        nbytes = read.memory.nbytes
        if 0 < nbytes <= CHUNK_BYTES:
            found.append(read)
            continue
        for first in range(0, nbytes, CHUNK_BYTES):
            memory = read.memory[first : min(first + CHUNK_BYTES, nbytes)]
            found.append(WantedBytes(read.file, read.start + first, memory, read.at + first))
    return found
