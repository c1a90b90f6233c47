"""An operation: one transfer that has been started, as an awaitable and as a future.

Its state is in `_core.records`; `_core.reaping` changes that, and tells whoever waits for it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import time
from collections.abc import Callable, Generator
from typing import Any, NoReturn

from nvmeio._checks import NotPickled
from nvmeio._core.reaping import Watchers
from nvmeio._core.records import CANCELLED, PENDING, Record
from nvmeio._threads.future import Begun
from nvmeio._threads.running_loop import not_running
from nvmeio._threads.threads import log_failure

_running_loop = asyncio._get_running_loop


class Operation(NotPickled, Begun[int]):
    """A transfer that has started. Await it, or use it as a future.

    It may be awaited any number of times, on any loop of asyncio or uvloop, and handed to
    `asyncio.create_task`, `gather`, `wait_for` or a TaskGroup. Without a loop use `result`, `done`,
    `exception`, `cancel` and `add_done_callback`. The value is the number of bytes moved.
    `asyncio.wait` needs tasks: ``asyncio.wait([asyncio.ensure_future(operation)])``.

    Cancelling the operation, or a task that awaits it, drops the blocks that the kernel does not
    have yet and waits for the others. Then `CancelledError` is raised, and nobody touches the
    tensor's memory any more. Any part of a cancelled read or write may have happened.
    """

    _elsewhere = "wait for it here, and send the tensor"

    __slots__ = ("__weakref__", "_record", "_watchers")

    def __init__(self, watchers: Watchers, record: Record) -> None:
        self._watchers = watchers
        self._record = record
        self._driven = None  # as `Begun.__init__` does it

    @property
    def _condition(self) -> NoReturn:
        """The interface that `concurrent.futures` asks of its own futures; an operation is none."""
        raise TypeError(
            "concurrent.futures.wait and as_completed take futures of their own class: pass "
            "nvmeio.as_future(operation) instead of the operation"
        )

    # --- awaiting -------------------------------------------------------------------------

    def __await__(self, thrown: BaseException | None = None) -> Generator[Any, Any, int]:
        record = self._record
        if record.state is PENDING:
            loop = _running_loop()
            if loop is None:
                raise not_running()
            try:
                if thrown is not None:
                    raise thrown
                # As `yield from` does it, without an object of its own for that.
                waiter = self._watchers.watch(record, loop)
                if not waiter.done():
                    waiter._asyncio_future_blocking = True
                    yield waiter
                    if record.state is PENDING:  # as asyncio's future says it
                        raise RuntimeError("await wasn't used with future")
            except asyncio.CancelledError:
                self.cancel()
                while record.state is PENDING:
                    try:
                        yield from self._watchers.watch(record, loop)
                    except asyncio.CancelledError:
                        continue  # asked again; the kernel is still not done
                self._watchers.retrieved(record)
                raise
        elif thrown is not None:
            raise thrown
        if record.state is CANCELLED:
            raise asyncio.CancelledError(f"{self!r} was cancelled")
        return record.nbytes if record.error is None else self._value()

    # --- the future's face ------------------------------------------------------------------

    def done(self) -> bool:
        """Whether it has finished, failed, or been cancelled; does not wait for the drive.

        Without an event loop the call that sees the end first also finishes the operation: it
        copies into memory that is not contiguous, or compares for ``validate=True``.
        """
        if self._record.state is PENDING:
            self._watchers.poll(self._record)
        return self._record.state is not PENDING

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
        return self._value()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Block until done; the error, or None. Parameters and other errors as for `result`."""
        self._wait(timeout)
        self._watchers.retrieved(self._record)
        return self._record.error

    def _speak_for(self) -> None:
        """Keep its failure from `wait` and `close` of the handle: who began it looks at it."""
        self._watchers.speak_for(self._record)

    def cancel(self) -> bool:
        """Ask for cancellation; whether there was still something to cancel.

        Returns at once. The operation is over when `done` says so, and may have finished after
        all.
        """
        if self.done():
            return False
        self._record.cancel()
        return True

    def cancelled(self) -> bool:
        """Whether it ended by cancellation."""
        return self.done() and self._record.state is CANCELLED

    def add_done_callback(self, callback: Callable[[Operation], object]) -> None:
        """Call ``callback(operation)`` once it is done; at once if it is.

        It runs in the thread that notices the end: of the event loop on which the operation was
        started, else a thread of the handle. An exception in it is logged.
        """
        if not self._watchers.on_settled(self._record, functools.partial(self._call, callback)):
            self._call(callback)

    # --- what happened ------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """The file, as the caller named it."""
        return self._record.path

    @property
    def file_offset(self) -> int:
        """The offset of its first byte in the file."""
        return self._record.file_offset

    @property
    def nbytes(self) -> int:
        """How many bytes it moves."""
        return self._record.nbytes

    @property
    def transferred(self) -> int:
        """Bytes that got through; 0 while it is pending, as the three below."""
        return 0 if self._record.state is PENDING else self._record.outcome().transferred

    @property
    def direct_bytes(self) -> int:
        """Bytes that went between the drive and the tensor itself."""
        return 0 if self._record.state is PENDING else self._record.outcome().direct_bytes

    @property
    def bounced_bytes(self) -> int:
        """Bytes that went direct, through an aligned block of the engine."""
        return 0 if self._record.state is PENDING else self._record.outcome().bounced_bytes

    @property
    def buffered_bytes(self) -> int:
        """Bytes that went through the page cache."""
        return 0 if self._record.state is PENDING else self._record.outcome().buffered_bytes

    def __repr__(self) -> str:
        return repr(self._record)

    # --- steps ------------------------------------------------------------------------------

    def _wait(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        record = self._record
        if record.state is PENDING and not self._watchers.wait_settled(record, deadline):
            raise concurrent.futures.TimeoutError(f"{self!r} is not done after {timeout} s")
        if record.state is CANCELLED:
            raise concurrent.futures.CancelledError(f"{self!r} was cancelled")

    def _value(self) -> int:
        error = self._record.error
        if error is not None:
            self._watchers.retrieved(self._record)
            raise error
        return self.nbytes

    def _call(self, callback: Callable[[Operation], object]) -> None:
        try:
            callback(self)
        except Exception as failed:
            log_failure(failed, "a done callback of %r failed", self)


class _OperationFuture(concurrent.futures.Future[int]):
    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self._operation = operation
        # A waiter may have no event loop, or outlive the one it was made on.
        follow = functools.partial(self._follow, operation)
        if not operation._watchers.on_settled(operation._record, follow, anywhere=True):
            self._follow(operation)

    def cancel(self) -> bool:
        """Cancel the operation; the future is cancelled once the kernel has let go."""
        return self._operation.cancel() or self.cancelled()

    def _follow(self, operation: Operation) -> None:
        if self.done():
            return  # told before
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
