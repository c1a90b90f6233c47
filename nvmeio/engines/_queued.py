"""What engines written in Python have in common: completion queues, requests, counting.

`EventfdQueue` and `Batch` serve all of them. `QueuedEngine` and `QueuedRequest` are the base of the
engines that move device memory: the ring (`nvmeio.engines.ring`) and cuFile
(`nvmeio.engines.cufile`).
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Protocol

from nvmeio._io.threads import SLICE_S
from nvmeio.engines.base import (
    BatchRequest,
    CompletionQueue,
    Counters,
    DeviceTransfer,
    Opcode,
    Outcome,
    Request,
    Transfer,
    total,
)


class Linkable(Protocol):
    """What an `EventfdQueue` reports."""

    token: int
    linked: bool


class End:
    """An end that threads wait for.

    On a raw lock: an `Event` that the main thread is interrupted in may leave its own held, and
    whoever sets it waits for ever. Those who wait look up now and then, so it may stay taken.
    """

    def __init__(self) -> None:
        self._reached = False
        self._gate = threading.Lock()
        self._gate.acquire()

    def set(self) -> None:
        """It is reached; called once."""
        self._reached = True
        self._gate.release()

    def is_set(self) -> bool:
        """Whether it is reached."""
        return self._reached

    def wait(self, timeout_s: float) -> bool:
        """Block until then, for so long at most."""
        deadline = time.monotonic() + timeout_s
        while not self._reached and (left := deadline - time.monotonic()) > 0:
            if self._gate.acquire(timeout=min(left, SLICE_S)):
                self._gate.release()
        return self._reached


class EventfdQueue:
    """A list of finished requests behind an eventfd.

    Args:
        lock: The engine's; `link` and `unlink` are called with it held.
    """

    def __init__(self, lock: AbstractContextManager[bool]) -> None:
        self._lock = lock
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._finished: list[Linkable] = []

    def fileno(self) -> int:
        return self._fd

    def reap(self) -> list[int]:
        with self._lock:
            if self._fd < 0:
                return []
            with suppress(BlockingIOError):
                os.eventfd_read(self._fd)
            taken, self._finished = self._finished, []
            for request in taken:
                request.linked = False
        return [request.token for request in taken]

    def peek(self) -> list[int]:
        with self._lock:
            if self._fd >= 0 and not self._finished:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._fd)
            return [request.token for request in self._finished]

    def acknowledge(self, tokens: list[int]) -> None:
        with self._lock:
            for token in tokens:
                for request in self._finished:
                    if request.token == token:
                        self.unlink(request)
                        break
            if self._fd >= 0 and not self._finished:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._fd)

    def wake(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        # A loop that ends in this moment forgets that it was to close the completion queue.
        fd = getattr(self, "_fd", -1)
        if fd >= 0:
            os.close(fd)

    def link(self, request: Linkable) -> None:
        """Report a request; with the lock held."""
        if self._fd >= 0:
            request.linked = True
            self._finished.append(request)
            self.wake()

    def unlink(self, request: Linkable) -> None:
        """Take back what was not yet reaped; with the lock held."""
        request.linked = False
        self._finished.remove(request)


class QueuedRequest:
    """A transfer in the hands of a `QueuedEngine`.

    The engine's threads change it with the engine's condition held; `stop` alone is read without.
    """

    def __init__(
        self, engine: QueuedEngine, token: int, transfer: DeviceTransfer, cq: EventfdQueue
    ) -> None:
        self.engine = engine
        self.token = token
        self.transfer = transfer
        self.linked = False
        self.stop = False
        self.cancelled = False
        self.error = 0
        self.cause: BaseException | None = None
        self.direct = self.bounced = self.buffered = 0
        self.parts_out = 0
        self._cq = cq
        self.begun = False
        self._finished = End()

    # --- the contract ---------------------------------------------------------------------

    def start(self) -> None:
        self.engine.enqueue(self)

    def started(self) -> bool:
        return self.begun

    def cancel(self) -> None:
        self.cancelled = self.stop = True
        self.engine.nudge()

    def wait(self, timeout_s: float) -> bool:
        return self._finished.wait(timeout_s)

    def move(self, cq: CompletionQueue) -> None:
        assert isinstance(cq, EventfdQueue)
        with self.engine.lock:
            if self._finished.is_set() and not self.linked:
                return  # reaped already
            if self.linked:
                self._cq.unlink(self)
            self._cq = cq
            if self._finished.is_set():
                cq.link(self)

    def moved(self) -> int:
        outcome = self.outcome()
        return -outcome.error if outcome.error else outcome.transferred

    def outcome(self) -> Outcome:
        error = self.error
        if not error and self.cancelled and self.transferred < self.transfer.nbytes:
            error = errno.ECANCELED
        return Outcome(
            error, self.transferred, self.direct, self.bounced, self.buffered, self.cause
        )

    # --- for the engine -------------------------------------------------------------------

    @property
    def transferred(self) -> int:
        """Bytes that got through."""
        return self.direct + self.bounced + self.buffered

    @property
    def done(self) -> bool:
        """Whether it is over."""
        return self._finished.is_set()

    def fail(self, code: int, cause: BaseException | None = None) -> None:
        """The first failure counts; no further part begins."""
        if not self.error:
            self.error, self.cause = code, cause
        self.stop = True

    def let_go(self) -> None:
        """Memory and file are their owners' alone again; the numbers stay."""
        self.transfer = DeviceTransfer(*self.transfer)

    def finish(self) -> None:
        """Report the end; with the condition held."""
        self._finished.set()
        self._cq.link(self)


class _Landing(EventfdQueue):
    """In the place of a completion queue: counts a batch's transfers down."""

    def __init__(self, landed: Callable[[], None]) -> None:
        self._landed = landed
        self._fd = -1

    def link(self, request: Linkable) -> None:
        self._landed()


class Batch:
    """Many transfers as one request.

    Args:
        lock: The engine's; with it held, transfers end.
        cq: Where its end is reported.
        token: Its name there.
        prepare: The engine's.
        transfers: What it moves.
    """

    def __init__(
        self,
        lock: AbstractContextManager[bool],
        cq: EventfdQueue,
        token: int,
        prepare: Callable[[CompletionQueue, int, Transfer], Request],
        transfers: Sequence[Transfer],
    ) -> None:
        self.token = token
        self.linked = False
        self._lock = lock
        self._cq = cq
        self._left = len(transfers)
        self._finished = End()
        landing = _Landing(self._landed)
        self._requests = [prepare(landing, 0, transfer) for transfer in transfers]

    def start(self) -> None:
        for request in self._requests:
            request.start()

    def started(self) -> bool:
        return self._requests[0].started()

    def cancel(self) -> None:
        for request in self._requests:
            request.cancel()

    def wait(self, timeout_s: float) -> bool:
        return self._finished.wait(timeout_s)

    def move(self, cq: CompletionQueue) -> None:
        assert isinstance(cq, EventfdQueue)
        with self._lock:
            if self._finished.is_set() and not self.linked:
                return  # reaped already
            if self.linked:
                with suppress(ValueError):
                    self._cq.unlink(self)
            self._cq = cq
            if self._finished.is_set():
                cq.link(self)

    def moved(self) -> int:
        outcome = self.outcome()
        return -outcome.error if outcome.error else outcome.transferred

    def outcome(self) -> Outcome:
        return total(self.outcomes())

    def outcomes(self) -> list[Outcome]:
        return [request.outcome() for request in self._requests]

    def _landed(self) -> None:
        self._left -= 1
        if not self._left:
            self._finished.set()
            self._cq.link(self)


class QueuedEngine:
    """An engine whose work is done by Python threads that look into a queue.

    Subclasses bring the threads, which ask for what was `admitted`; they override `nudge` where a
    thread sleeps elsewhere than on the condition.
    """

    def __init__(self) -> None:
        # Held by `with self.lock`, in C: a Condition's own can be left held by an interrupt.
        self.lock = threading.RLock()
        self.condition = threading.Condition(self.lock)
        self.in_flight = 0
        self.arrivals: deque[QueuedRequest] = deque()
        self.stopping = False
        self._counters = Counters()

    def open_completion_queue(self) -> CompletionQueue:
        """A list with an eventfd."""
        return EventfdQueue(self.lock)

    def prepare(self, cq: CompletionQueue, token: int, transfer: Transfer) -> Request:
        """A request that is not started yet."""
        assert isinstance(cq, EventfdQueue)
        assert isinstance(transfer, DeviceTransfer)
        return QueuedRequest(self, token, transfer, cq)

    def prepare_batch(
        self, cq: CompletionQueue, token: int, transfers: Sequence[Transfer]
    ) -> BatchRequest:
        """A request for each, and one for all of them."""
        assert isinstance(cq, EventfdQueue)
        return Batch(self.lock, cq, token, self.prepare, transfers)

    def enqueue(self, request: QueuedRequest) -> None:
        """For `QueuedRequest.start`: the engine's threads take it from here.

        An interrupt may come before, or after it is handed over, but not between.
        """
        if not request.begun:
            request.begun = True
            self.arrivals.append(request)
        self.nudge()

    def admitted(self) -> list[QueuedRequest]:
        """What has arrived, counted in; with the condition held, by a thread of the engine's."""
        taken: list[QueuedRequest] = []
        while self.arrivals:
            taken.append(self.arrivals.popleft())
            self.in_flight += 1
        return taken

    def nudge(self) -> None:
        """Have the threads look again."""
        with self.lock:
            self.condition.notify_all()

    def counters(self) -> Counters:
        """Counted as requests finish."""
        with self.lock:
            return self._counters._replace(in_flight=self.in_flight + len(self.arrivals))

    def conclude(self, request: QueuedRequest) -> None:
        """Count a request out and report it; with the condition held."""
        transfer = request.transfer
        self._counters = counted(
            self._counters, transfer.opcode, transfer.nbytes, request.outcome()
        )
        self.in_flight -= 1
        if not request.parts_out:
            request.let_go()  # operations outlive their transfers, and hold their requests
        request.finish()
        if not self.in_flight:
            self.condition.notify_all()  # a stopping engine is done now


def counted(counters: Counters, opcode: int, nbytes: int, outcome: Outcome) -> Counters:
    """The counters after one more transfer."""
    moved = "bytes_read" if opcode == Opcode.READ else "bytes_written"
    cancelled = outcome.error == errno.ECANCELED
    added = {
        moved: outcome.transferred,
        "operations": 1,
        "direct_bytes": outcome.direct_bytes,
        "bounced_bytes": outcome.bounced_bytes,
        "buffered_bytes": outcome.buffered_bytes,
        "cancelled": int(cancelled),
        "errors": int(not cancelled and (bool(outcome.error) or outcome.transferred < nbytes)),
    }
    return counters._replace(**{name: getattr(counters, name) + n for name, n in added.items()})
