"""The thread that keeps the drive busy: reads of layers, first come first served.

The engine below serves its requests fairly, a block of each in turn. That is right for strangers
and wrong here, where the layer that is needed next should have the drive to itself. So the reads of
a job are submitted piece by piece, those of the next job behind them, and never more at once than
fill the queue: a layer arrives as early as it can, and the drive has the next one in its queue by
then.

Of a file that lies in the page cache (it was just downloaded, say) the drive is given less at a
time, and the thread copies pieces from the cache instead of waiting: the two rates add up.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from nvmeio import _page_cache
from nvmeio.errors import ClosedError
from nvmeio.files import File
from nvmeio.handle import AioHandle
from nvmeio.operation import Operation

logger = logging.getLogger("nvmeio")

PIECE_BYTES = 32 << 20
# The queue of a lane (128 blocks of 1 MiB) and one piece more, so that it never runs empty.
FLIGHT_BYTES = 160 << 20
FLIGHT_OPERATIONS = 64
# Of what the page cache holds: enough to keep the drive busy, and the rest is there to be copied.
CACHED_FLIGHT_BYTES = 64 << 20


class Wanted(NamedTuple):
    """Bytes from `start` of a file on, into a tensor that lies at byte `at` of the slot."""

    file: File
    start: int
    memory: torch.Tensor
    at: int


class Job:
    """The reads of one unit.

    Args:
        reads: What is read, in order; any lengths.
        arrived: Called by the feeder's thread with each piece that has arrived, in order; for
            copies on to a device.
        finished: Called once by the feeder's thread when all have.
    """

    def __init__(
        self,
        reads: Sequence[Wanted],
        arrived: Callable[[Wanted], None] | None = None,
        finished: Callable[[], None] | None = None,
    ) -> None:
        self.pieces = deque(_pieces(reads))
        self.nbytes = sum(piece.memory.nbytes for piece in self.pieces)
        self.left = len(self.pieces)
        self.arrived = arrived
        self.finished = finished
        self.error: BaseException | None = None
        self.failed_at: Wanted | None = None
        self.cancelled = False
        self.done = threading.Event()

    def wait(self) -> None:
        """Block until it is done; raises what went wrong."""
        self.done.wait()
        if self.error is not None:
            raise self.error


class Feeder:
    """Carries out jobs in the order of `submit`, in a thread of its own.

    Args:
        handle: Moves the bytes; stays open.
    """

    def __init__(self, handle: AioHandle) -> None:
        self._handle = handle
        self._condition = threading.Condition()
        self._queue: deque[Job] = deque()
        self._flying: deque[tuple[Operation, Job, Wanted]] = deque()
        self._flying_bytes = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="nvmeio-stream", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Begin a job as soon as those before it have been submitted."""
        with self._condition:
            if self._stopping:
                raise ClosedError("the stream of weights is closed")
            if not job.left:
                self._conclude(job)
                return
            self._queue.append(job)
            self._fill()  # here and now: the thread may be waiting for the end of a piece
            self._condition.notify()

    def cancel(self, job: Job) -> None:
        """End a job, finished or not; when this returns nobody touches its memory any more."""
        with self._condition:
            job.cancelled = True
            with contextlib.suppress(ValueError):
                self._queue.remove(job)
            job.left -= len(job.pieces)
            job.pieces.clear()
            flying = [operation for operation, owner, _ in self._flying if owner is job]
            for operation in flying:
                operation.cancel()
            if not job.left and not job.done.is_set():
                self._conclude(job)
        job.done.wait()

    def stop(self) -> None:
        """Cancel everything and end the thread."""
        with self._condition:
            self._stopping = True
            jobs = {id(job): job for _, job, _ in self._flying} | {id(j): j for j in self._queue}
        for job in jobs.values():
            self.cancel(job)
        with self._condition:
            self._condition.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # In the thread

    def _run(self) -> None:
        while True:
            with self._condition:
                self._fill()
                while not self._flying:
                    if self._stopping:
                        return
                    self._condition.wait()
                    self._fill()
                beside = None if self._flying[0][0].done() else self._next_cached()
                operation, job, wanted = self._flying[0]
            if beside is not None:
                self._land(*beside, self._copy(*beside))
                continue
            error: BaseException | None = None
            try:
                error = operation.exception()
            except concurrent.futures.CancelledError:
                job.cancelled = True
            except BaseException as failed:
                error = failed
            with self._condition:
                self._flying.popleft()
                self._flying_bytes -= wanted.memory.nbytes
            self._land(job, wanted, error)

    def _copy(self, job: Job, wanted: Wanted) -> BaseException | None:
        """Bring a piece from the page cache; by a read of its own where that does not work."""
        try:
            opened = wanted.file.acquire(False)
            try:
                if _page_cache.copy(opened.buffered_fd(), wanted.start, wanted.memory):
                    return None
            finally:
                opened.release()
            return self._handle.async_pread(wanted.memory, wanted.file, wanted.start).exception()
        except BaseException as failed:
            return failed

    def _land(self, job: Job, wanted: Wanted, error: BaseException | None) -> None:
        """A piece is there, or never will be."""
        if error is None and not job.cancelled and job.arrived is not None:
            try:
                job.arrived(wanted)
            except BaseException as failed:
                error = failed
        with self._condition:
            job.left -= 1
            if error is not None:
                self._fail(job, error, wanted)
            if not job.left:
                self._conclude(job)

    # With the condition held

    def _fill(self) -> None:
        while self._queue:
            job = self._queue[0]
            nbytes = job.pieces[0].memory.nbytes if job.pieces else 0
            if self._flying and (
                self._flying_bytes + nbytes > FLIGHT_BYTES
                or len(self._flying) >= FLIGHT_OPERATIONS
                or (self._flying_bytes + nbytes > CACHED_FLIGHT_BYTES and self._cached(job))
            ):
                return
            if job.pieces:
                wanted = job.pieces.popleft()
                try:
                    operation = self._handle.async_pread(wanted.memory, wanted.file, wanted.start)
                except Exception as failed:  # a closed handle, a descriptor that cannot be had
                    job.left -= 1
                    self._fail(job, failed, wanted)
                    if not job.left:
                        self._conclude(job)
                else:
                    self._flying.append((operation, job, wanted))
                    self._flying_bytes += nbytes
            if not job.pieces:
                with contextlib.suppress(ValueError):
                    self._queue.remove(job)

    def _cached(self, job: Job) -> bool:
        """Whether the page cache holds the next piece of a job."""
        if not job.pieces:
            return False
        piece = job.pieces[0]
        try:
            opened = piece.file.acquire(False)
        except Exception:
            return False  # its read will say so
        try:
            return _page_cache.holds(opened.any_fd(), piece.start, piece.memory.nbytes)
        finally:
            opened.release()

    def _next_cached(self) -> tuple[Job, Wanted] | None:
        """Take the next piece off the queue if the page cache holds it."""
        if not self._queue or not self._cached(self._queue[0]):
            return None
        job = self._queue[0]
        wanted = job.pieces.popleft()
        if not job.pieces:
            self._queue.popleft()
        return job, wanted

    def _fail(self, job: Job, error: BaseException, wanted: Wanted) -> None:
        if job.error is None:
            job.error, job.failed_at = error, wanted
        job.left -= len(job.pieces)
        job.pieces.clear()
        for operation, owner, _ in self._flying:
            if owner is job:
                operation.cancel()

    def _conclude(self, job: Job) -> None:
        if job.error is None and not job.cancelled and job.finished is not None:
            try:
                job.finished()
            except BaseException as failed:
                job.error = failed
        job.finished = job.arrived = None
        job.done.set()


def finish(close: Callable[[], None]) -> None:
    """Close what a feeder belongs to when its owner is dropped; for `weakref.finalize`.

    Garbage is collected by whatever thread allocates next, which may be the feeder itself, or one
    of the engine below that it waits for. Closing waits for both, and gets a thread of its own
    there.
    """
    if threading.current_thread().name.startswith("nvmeio"):
        threading.Thread(target=close, name="nvmeio-close", daemon=True).start()
    else:
        close()


def _pieces(reads: Sequence[Wanted]) -> list[Wanted]:
    found = []
    for read in reads:
        nbytes = read.memory.nbytes
        for first in range(0, nbytes, PIECE_BYTES):
            memory = read.memory[first : min(first + PIECE_BYTES, nbytes)]
            found.append(Wanted(read.file, read.start + first, memory, read.at + first))
    return found
