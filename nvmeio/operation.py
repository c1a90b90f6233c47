"""An operation: one transfer that has been started, as an awaitable and as a future.

States: pending → finished | failed | cancelled, once. It keeps tensor and descriptors alive until
the kernel has reported, whoever else lets go of them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import logging
import time
from collections.abc import Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any

from nvmeio._loops import wake
from nvmeio._plan import Plan
from nvmeio._tensor import Memory
from nvmeio.engines.base import CompletionQueue, EngineError, Opcode, Outcome, Request
from nvmeio.errors import ShortTransferError, TransferError
from nvmeio.files import Descriptors

if TYPE_CHECKING:
    from nvmeio._core import Core

logger = logging.getLogger("nvmeio")

_NAMES = {
    Opcode.READ: "pread",
    Opcode.WRITE: "pwrite",
    Opcode.FSYNC: "fsync",
    Opcode.FDATASYNC: "fsync",
}
_NOTHING = Outcome(0, 0, 0, 0, 0)


class Operation(Coroutine[Any, Any, int]):
    """A transfer in flight, or what became of it.

    Await it (any number of times, on any loop), hand it to `asyncio.create_task`, `gather`,
    `wait_for` or a TaskGroup, or use it with no loop at all through `result`, `done`,
    `exception`, `cancel` and `add_done_callback`. The value is the number of bytes moved.

    Cancelling (of the operation, or of a task that awaits it) drops the blocks that the kernel has
    not yet taken and waits for those that it has. Only then is `CancelledError` raised: after it
    nobody touches the tensor's memory any more. What part of a cancelled read or write has
    happened is unknown.

    Attributes:
        file_offset: Where in the file it begins, in bytes.
        nbytes: How many bytes it moves.
    """

    __slots__ = (
        "__weakref__",
        "_callbacks",
        "_check",
        "_claimed",
        "_core",
        "_driven",
        "_error",
        "_home",
        "_memory",
        "_opcode",
        "_opened",
        "_path",
        "_plan",
        "_request",
        "_state",
        "_token",
        "_waiters",
        "file_offset",
        "nbytes",
    )

    def __init__(
        self,
        core: Core,
        token: int,
        opcode: Opcode,
        memory: Memory | None,
        path: str,
        file_offset: int,
        nbytes: int,
    ) -> None:
        self._core = core
        self._token = token
        self._opcode = opcode
        self._memory = memory
        self._path = path
        self.file_offset = file_offset
        self.nbytes = nbytes
        self._opened: Descriptors | None = None
        self._plan: Plan | None = None
        self._request: Request | None = None
        self._home: CompletionQueue | None = None
        self._state = "pending"
        self._claimed = 0  # the thread that concludes it, or HANDED_ON
        self._check: Callable[[], None] | None = None
        self._error: BaseException | None = None
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] | None = None
        self._callbacks: list[Callable[[Operation], object]] | None = None
        self._driven: dict[asyncio.Task[Any] | None, Generator[Any, Any, int]] | None = None

    # --- awaiting -------------------------------------------------------------------------

    def __await__(self) -> Generator[Any, Any, int]:
        return self._await(None)

    def _await(self, thrown: BaseException | None) -> Generator[Any, Any, int]:
        if self._state == "pending":
            loop = asyncio.get_running_loop()
            try:
                if thrown is not None:
                    raise thrown
                yield from self._core.watch(self, loop)
            except asyncio.CancelledError:
                self.cancel()
                while self._state == "pending":
                    try:
                        yield from self._core.watch(self, loop)
                    except asyncio.CancelledError:
                        continue  # asked again; the kernel is not done all the same
                self._core.retrieved(self)
                raise
        elif thrown is not None:
            raise thrown
        if self._state == "cancelled":
            raise asyncio.CancelledError(f"{self!r} was cancelled")
        return self._value()

    # An awaitable is enough for `await`; create_task and TaskGroup want a coroutine. Several tasks
    # may be made of one operation, and each of them drives an await of its own.

    def send(self, value: Any) -> Any:
        """Coroutine protocol, for `asyncio.create_task`."""
        return self._drive(lambda driven: driven.send(value), None)

    def throw(self, typ: Any, val: Any = None, tb: Any = None) -> Any:
        """Coroutine protocol, for `asyncio.create_task`."""
        error: BaseException = typ if val is None else val
        if isinstance(error, type):
            error = error()
        if tb is not None:
            error = error.with_traceback(tb)
        return self._drive(lambda driven: driven.throw(error), error)

    def close(self) -> None:
        """Coroutine protocol: whoever awaited gives up; the transfer goes on."""
        if self._driven:
            driven = self._driven.pop(_current_task(), None)
            if driven is not None:
                driven.close()

    def _drive(
        self,
        step: Callable[[Generator[Any, Any, int]], Any],
        thrown: BaseException | None,
    ) -> Any:
        if self._driven is None:
            self._driven = {}
        task = _current_task()
        driven = self._driven.get(task)
        try:
            if driven is None:
                # Thrown into a generator that has not begun, an error would come straight back.
                driven = self._driven[task] = self._await(thrown)
                return driven.send(None)
            return step(driven)
        except BaseException:  # StopIteration too: this await is over
            self._driven.pop(task, None)
            raise

    # --- the future's face ------------------------------------------------------------------

    def done(self) -> bool:
        """Whether it has finished, failed, or been cancelled. Never blocks."""
        if self._state == "pending":
            self._core.poll(self)
        return self._state != "pending"

    def result(self, timeout: float | None = None) -> int:
        """Block until done; the number of bytes moved.

        Args:
            timeout: Seconds to wait at most; None waits for as long as it takes.

        Raises:
            TransferError: The transfer failed.
            concurrent.futures.CancelledError: It was cancelled.
            concurrent.futures.TimeoutError: Not done in time; it goes on.
        """
        self._wait(timeout)
        if self._state == "cancelled":
            raise concurrent.futures.CancelledError(f"{self!r} was cancelled")
        return self._value()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Block until done; the error, or None. Parameters and other errors as for `result`."""
        self._wait(timeout)
        if self._state == "cancelled":
            raise concurrent.futures.CancelledError(f"{self!r} was cancelled")
        self._core.retrieved(self)
        return self._error

    def cancel(self) -> bool:
        """Ask for cancellation; whether there was still something to cancel.

        Returns at once. The operation is over when `done` says so, and may have finished after
        all.
        """
        if self.done():
            return False
        request = self._request
        if request is not None:
            request.cancel()
        return True

    def cancelled(self) -> bool:
        """Whether it ended by cancellation."""
        return self.done() and self._state == "cancelled"

    def add_done_callback(self, callback: Callable[[Operation], object]) -> None:
        """Call ``callback(operation)`` once it is done; at once if it is.

        It runs in the thread that notices the end: of the event loop on which the operation was
        started, else a thread of the handle. An exception in it is logged.
        """
        if not self._core.on_settled(self, callback):
            self._call(callback)

    # --- what happened ------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """The file, as the caller named it."""
        return self._path

    @property
    def transferred(self) -> int:
        """Bytes that got through; like the three below, 0 while it is pending."""
        return 0 if self._state == "pending" else self._outcome().transferred

    @property
    def direct_bytes(self) -> int:
        """Bytes that went between the drive and the tensor itself."""
        return 0 if self._state == "pending" else self._outcome().direct_bytes

    @property
    def bounced_bytes(self) -> int:
        """Bytes that went direct, through an aligned block of the engine."""
        return 0 if self._state == "pending" else self._outcome().bounced_bytes

    @property
    def buffered_bytes(self) -> int:
        """Bytes that went through the page cache."""
        return 0 if self._state == "pending" else self._outcome().buffered_bytes

    def __repr__(self) -> str:
        span = f" [{self.file_offset}, {self.file_offset + self.nbytes})" if self.nbytes else ""
        return f"<{_NAMES[self._opcode]} {self._path}{span} {self._state}>"

    # --- for the core -------------------------------------------------------------------------

    def _wait(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._state == "pending" and not self._core.wait_settled(self, deadline):
            raise concurrent.futures.TimeoutError(f"{self!r} is not done after {timeout} s")

    def _value(self) -> int:
        if self._error is not None:
            self._core.retrieved(self)
            raise self._error
        return self.nbytes

    def _outcome(self) -> Outcome:
        """What the engine tells of it, once the kernel is done."""
        return _NOTHING if self._request is None else self._request.outcome()

    def _failure(self) -> BaseException | None:
        """The error that the outcome stands for."""
        outcome = self._outcome()
        code = outcome.error
        if not code and outcome.transferred == self.nbytes:
            return None
        about: dict[str, Any] = {
            "operation": _NAMES[self._opcode],
            "path": self._path,
            "file_offset": self.file_offset,
            "nbytes": self.nbytes,
            "transferred": outcome.transferred,
        }
        if isinstance(outcome.cause, EngineError):
            return outcome.cause.with_context(**about)
        if outcome.cause is not None:
            return outcome.cause
        if code:
            return TransferError(code, **about)
        ends = self.file_offset + outcome.transferred
        detail = (
            f"the file ends at byte {ends}, the tensor wants bytes up to "
            f"{self.file_offset + self.nbytes}"
            if outcome.transferred
            else "the file ends before the span; nothing could be read"
        )
        return ShortTransferError(errno.ENODATA, detail=detail, **about)

    def _telling(self, step: Callable[[], None]) -> None:
        """Run a step, and say of its failure which file and span it concerned."""
        try:
            step()
        except OSError as failed:
            raise TransferError(
                failed.errno or errno.EIO,
                operation=_NAMES[self._opcode],
                path=self._path,
                file_offset=self.file_offset,
                nbytes=self.nbytes,
                detail=failed.strerror or "",
            ) from failed

    def _settle(self, state: str, error: BaseException | None) -> None:
        """Publish the end; called once, by whoever claimed the operation."""
        opened, self._opened = self._opened, None
        memory, self._memory = self._memory, None
        self._plan = self._check = None
        if memory is not None:
            memory.end()
        if opened is not None:
            try:
                opened.release()
            except OSError as failed:  # NFS and friends report lost writes here (man 2 close)
                state = "failed"
                error = error or TransferError(
                    failed.errno or errno.EIO,
                    operation="close",
                    path=self._path,
                    file_offset=self.file_offset,
                    nbytes=self.nbytes,
                    transferred=self._outcome().transferred,
                )
        self._error = error
        waiters, callbacks = self._core.settled(self, state)
        for loop, waiter in waiters:
            wake(loop, waiter)
        for callback in callbacks:
            self._call(callback)

    def _call(self, callback: Callable[[Operation], object]) -> None:
        try:
            callback(self)
        except Exception:
            logger.exception("a done callback of %r failed", self)


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop is running
        return None


class _OperationFuture(concurrent.futures.Future[int]):
    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self._operation = operation
        # Whoever waits for this may have no event loop, or outlive the one it was made on.
        if not operation._core.on_settled(operation, self._follow, anywhere=True):
            self._follow(operation)

    def cancel(self) -> bool:
        """Cancel the operation; the future is cancelled once the kernel has let go."""
        return self._operation.cancel() or self.cancelled()

    def _follow(self, operation: Operation) -> None:
        if operation.cancelled():
            super().cancel()
            self.set_running_or_notify_cancel()
            return
        error = operation.exception()
        if error is not None:
            self.set_exception(error)
        else:
            self.set_result(operation.result())


def as_future(operation: Operation) -> concurrent.futures.Future[int]:
    """A `concurrent.futures.Future` that follows an operation.

    For `concurrent.futures.wait` and `as_completed`, `asyncio.wrap_future`, and every interface
    that insists on that class. Its `cancel` cancels the operation.

    Cost: one future; the handle starts a thread to resolve it if no event loop does.
    """
    if not isinstance(operation, Operation):
        raise TypeError(f"expected an nvmeio operation, not {type(operation).__name__}")
    return _OperationFuture(operation)
