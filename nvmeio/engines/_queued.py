"""The common part of engines written in Python: completion queues, requests, counting.

`QueuedEngine` and `QueuedRequest` are the base of all of them: the portable engine
(`nvmeio.engines.threads`), and those that move device memory (`DeviceRequest`), which are the ring
(`nvmeio.engines.device_ring`) and cuFile (`nvmeio.engines.cufile`).
"""

from __future__ import annotations

import errno
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Generic, TypeVar

from nvmeio._memory.devices import Mark
from nvmeio._threads.future import Future
from nvmeio.engines.base import (
    BatchRequest,
    Capabilities,
    CompletionQueue,
    Counters,
    DeviceTransfer,
    Opcode,
    Outcome,
    Request,
    Transfer,
    total,
)


class EventfdQueue:
    """A list of finished requests behind an eventfd; `lock` is the engine's."""

    def __init__(self, lock: AbstractContextManager[bool]) -> None:
        self._lock = lock
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._finished: dict[Reported, None] = {}  # in their order

    def fileno(self) -> int:
        return self._fd

    def reap(self) -> list[int]:
        with self._lock:
            if self._fd < 0:
                return []
            with suppress(BlockingIOError):
                os.eventfd_read(self._fd)
            taken, self._finished = self._finished, {}
        return [request.token for request in taken]

    def peek(self) -> list[int]:
        with self._lock:
            self._hush()
            return [request.token for request in self._finished]

    def peek_ends(self) -> tuple[list[int], list[int]]:
        with self._lock:
            self._hush()
            ended = list(self._finished)
        return [request.token for request in ended], [request.moved() for request in ended]

    def acknowledge(self, tokens: list[int]) -> None:
        with self._lock:
            known = set(tokens)
            for request in [each for each in self._finished if each.token in known]:
                self.unlink(request)
            self._hush()

    def _hush(self) -> None:
        """Make it not readable if there is nothing to reap."""
        if self._fd >= 0 and not self._finished:
            with suppress(BlockingIOError):
                os.eventfd_read(self._fd)

    def wake(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        with self._lock:
            fd, self._fd = self._fd, -1  # at once: an interrupt may follow the call
            if fd >= 0:
                os.close(fd)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # A loop that ends in this moment forgets that it was to close the completion queue.
        fd = getattr(self, "_fd", -1)
        if fd >= 0:
            close(fd)

    def link(self, request: Reported) -> None:
        """Report a request; with the lock held. Idempotent."""
        if self._fd >= 0:
            readable = bool(self._finished)
            self._finished[request] = None
            if not readable:
                self.wake()

    def unlink(self, request: Reported) -> None:
        """Take back a request that was not yet reaped, if it is there; with the lock held."""
        self._finished.pop(request, None)

    def reports(self, request: Reported) -> bool:
        """Whether a request is linked and was not yet reaped; with the lock held."""
        return request in self._finished


class Reported(ABC):
    """Something that ends once, and is reported at one completion queue after the other.

    It ends with the engine's `lock` held. `token` is its name at `cq`.
    """

    def __init__(self, lock: AbstractContextManager[bool], cq: CompletionQueue, token: int) -> None:
        assert isinstance(cq, EventfdQueue)
        self.token = token
        self._lock = lock
        self._cq = cq
        self._finished: Future[None] = Future()

    @property
    def done(self) -> bool:
        return self._finished.done

    def wait(self, timeout_s: float) -> bool:
        return self._finished.wait(timeout_s)

    def move(self, cq: CompletionQueue) -> None:
        # Interrupted anywhere, it is reported at one of them at least, and can be moved again.
        assert isinstance(cq, EventfdQueue)
        with self._lock:
            before = self._cq
            if self.done:
                if not before.reports(self):
                    return  # reaped already
                cq.link(self)
            self._cq = cq
            if before is not cq:
                before.unlink(self)

    def moved(self) -> int:
        outcome = self.outcome()
        return -outcome.error if outcome.error else outcome.transferred

    @abstractmethod
    def outcome(self) -> Outcome: ...

    def finish(self) -> None:
        """Report the end; with the lock held."""
        self._finished.set(None)
        self._cq.link(self)


class QueuedRequest(Reported):
    """A transfer of a `QueuedEngine`, changed with its lock held; `stop` is read without."""

    def __init__(
        self, engine: QueuedEngine[Any], token: int, transfer: Transfer, cq: CompletionQueue
    ) -> None:
        super().__init__(engine.lock, cq, token)
        self.engine = engine
        self.transfer = transfer
        self.begun = False
        self.stop = False
        self.cancelled = False
        self.error = 0
        self.cause: BaseException | None = None
        self.direct = self.bounced = self.buffered = 0
        self.parts_out = 0

    # --- the contract ---------------------------------------------------------------------

    def start(self) -> None:
        self.engine.enqueue(self)

    def started(self) -> bool:
        return self.begun

    def cancel(self) -> None:
        self.cancelled = self.stop = True
        self.engine.nudge()

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
        return self.direct + self.bounced + self.buffered

    def fail(self, code: int, cause: BaseException | None = None) -> None:
        """Note a failure; the first counts, and no further part begins."""
        if not self.error:
            self.error, self.cause = code, cause
        self.stop = True


class DeviceRequest(QueuedRequest):
    """A transfer of device memory: it holds the memory and the file."""

    transfer: DeviceTransfer

    def reached(self, mark: Mark | None) -> bool:
        """Whether the device is done with earlier work; fails with the device's error."""
        try:
            return mark is None or mark.done()
        except Exception as failed:
            self.fail(errno.EIO, failed)
            return True

    def let_go(self) -> None:
        """Let go of memory and file; the numbers stay."""
        self.transfer = DeviceTransfer(*self.transfer)

    def finish(self) -> None:
        if not self.parts_out:
            self.let_go()  # operations outlive their transfers, and hold their requests
        super().finish()


class _Landing(EventfdQueue):
    """Counts a batch's transfers down, in place of a completion queue."""

    def __init__(self, landed: Callable[[], None]) -> None:
        self._landed = landed
        self._fd = -1

    def link(self, request: Reported) -> None:
        self._landed()


class QueuedBatch(Reported):
    """Many transfers as one request; they end with the engine's `lock` held."""

    def __init__(
        self,
        lock: AbstractContextManager[bool],
        cq: CompletionQueue,
        token: int,
        prepare: Callable[[CompletionQueue, int, Transfer], Request],
        transfers: Sequence[Transfer],
    ) -> None:
        super().__init__(lock, cq, token)
        self._left = len(transfers)
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

    def outcome(self) -> Outcome:
        return total(self.outcomes())

    def outcomes(self) -> list[Outcome]:
        return [request.outcome() for request in self._requests]

    def _landed(self) -> None:
        self._left -= 1
        if not self._left:
            self.finish()


RequestT = TypeVar("RequestT", bound=QueuedRequest)


class QueuedEngine(ABC, Generic[RequestT]):
    """An engine whose work is done by Python threads that look into a queue.

    Subclasses bring the threads, which ask for what was `admitted`; they override `nudge` if one of
    them is enough, or sleeps elsewhere than on the condition.
    """

    capabilities = Capabilities(batches=True)

    def __init__(self) -> None:
        # Held by `with self.lock`, in C: a Condition's own can be left held by an interrupt.
        self.lock = threading.RLock()
        self.condition = threading.Condition(self.lock)
        self.in_flight = 0
        self.arrivals: deque[RequestT] = deque()
        self.stopping = False
        self._counters = Counters()

    def open_completion_queue(self) -> CompletionQueue:
        return EventfdQueue(self.lock)

    @abstractmethod
    def prepare(self, cq: CompletionQueue, token: int, transfer: Transfer) -> Request:
        """A request that is not started yet."""

    def prepare_batch(
        self, cq: CompletionQueue, token: int, transfers: Sequence[Transfer]
    ) -> BatchRequest:
        return QueuedBatch(self.lock, cq, token, self.prepare, transfers)

    def enqueue(self, request: RequestT) -> None:
        """Hand a request to the engine's threads, for `QueuedRequest.start`.

        An interrupt may come before, or after it is handed over, but not between.
        """
        if not request.begun:
            request.begun = True
            self.arrivals.append(request)
        self.nudge()

    def admitted(self) -> list[RequestT]:
        """Count arrived requests; with the lock held, in a thread of the engine's."""
        taken: list[RequestT] = []
        while self.arrivals:
            taken.append(self.arrivals.popleft())
            self.in_flight += 1
        return taken

    def nudge(self) -> None:
        """Make the threads look again."""
        with self.lock:
            self.condition.notify_all()

    def stop(self) -> None:
        """Tell the threads to return once nothing is in flight."""
        with self.lock:
            self.stopping = True
            self.condition.notify_all()

    def counters(self) -> Counters:
        with self.lock:
            return self._counters._replace(in_flight=self.in_flight + len(self.arrivals))

    def conclude(self, request: RequestT) -> None:
        """Count a request out and report it; with the lock held."""
        transfer = request.transfer
        self._counters = counted(
            self._counters, transfer.opcode, transfer.nbytes, request.outcome()
        )
        self.in_flight -= 1
        request.finish()
        if not self.in_flight:
            self.condition.notify_all()  # a stopping engine is done now


def counted(counters: Counters, opcode: int, nbytes: int, outcome: Outcome) -> Counters:
    read, written, operations, direct, bounced, buffered, errors, cancelled, *others = counters
    error, moved, *_ = outcome  # one of each part: no names are made for it
    is_cancelled, is_read = error == errno.ECANCELED, opcode == Opcode.READ
    return Counters(
        read + (moved if is_read else 0),
        written + (0 if is_read else moved),
        operations + 1,
        direct + outcome.direct_bytes,
        bounced + outcome.bounced_bytes,
        buffered + outcome.buffered_bytes,
        errors + (not is_cancelled and (bool(error) or moved < nbytes)),
        cancelled + is_cancelled,
        *others,
    )
