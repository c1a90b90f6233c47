"""`Future`: work that has begun before anybody waits for it, as `asyncio` asks of such a thing.

`KeyboardInterrupt` is raised in the main thread only, there between any two bytecodes, also within
``finally`` and within the `threading` module's own classes, whose locks it can leave held. So a
thread waits here on a raw lock, whose `acquire` is one C call that a signal ends (and that looks up
now and then, for a signal that comes just before the call begins to sleep does not end it).
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import functools
import sys
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from typing import Any, TypeVar

from nvmeio._threads.closing import do_all
from nvmeio._threads.running_loop import resolve, running_loop

Value = TypeVar("Value")


class Begun(Coroutine[Any, Any, Value]):
    """An awaitable of which any number of tasks may be made.

    An awaitable is enough for `await`; `create_task`, TaskGroup and `asyncio.run` need a coroutine.
    `asyncio.wait` refuses coroutines (from Python 3.11 on), and checks for them in the same way.
    """

    __slots__ = ("_driven",)

    def __init__(self) -> None:
        self._driven: dict[asyncio.Task[Any] | None, Generator[Any, Any, Value]] | None = None

    @abstractmethod
    def __await__(self, thrown: BaseException | None = None) -> Generator[Any, Any, Value]:
        """Begin one await of it.

        `thrown` is raised where the await would begin to wait, for a task that was cancelled before
        it began; at once if there is nothing to wait for.
        """

    # Each task drives an await of its own.

    def send(self, value: Any) -> Any:
        """Coroutine protocol, for `asyncio.create_task`."""
        return self._drive(lambda driven: driven.send(value), None)

    def throw(self, typ: Any, val: Any = None, tb: Any = None) -> Any:
        error: BaseException = typ if val is None else val
        if isinstance(error, type):
            error = error()
        if tb is not None:
            error = error.with_traceback(tb)
        return self._drive(lambda driven: driven.throw(error), error)

    def close(self) -> None:
        """Give up awaiting; what has begun goes on."""
        if self._driven:
            driven = self._driven.pop(_current_task(), None)
            if driven is not None:
                driven.close()

    def _drive(
        self, step: Callable[[Generator[Any, Any, Value]], Any], thrown: BaseException | None
    ) -> Any:
        if self._driven is None:
            self._driven = {}
        task = _current_task()
        driven = self._driven.get(task)
        try:
            if driven is None:
                # Thrown into a generator that has not begun, an error would come straight back.
                driven = self._driven[task] = self.__await__(thrown)
                return driven.send(None)
            return step(driven)
        except BaseException:  # StopIteration too: this await is over
            self._driven.pop(task, None)
            raise


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop is running
        return None


SLICE_S = 0.25  # a waiting thread looks up this often


class Future(Begun[Value]):
    """A value that comes once, or an error; from any thread, for any number of others.

    It can be awaited on any loop and by any number of tasks: a task that is cancelled meanwhile
    calls `cancel`, which makes it end soon, awaits the end anyway, and goes on with
    `CancelledError` then, whose cause is the error. Nobody has to await it. `seen` says whether
    somebody got the result.
    """

    __slots__ = ("__weakref__", "_calls", "_cancel", "_gate", "_value", "done", "error", "seen")

    def __init__(self, cancel: Callable[[], object] | None = None) -> None:
        self._driven = None  # all that `Begun.__init__` does
        self._cancel = cancel
        self._value: Any = None
        self.error: BaseException | None = None
        self.done = self.seen = False
        self._calls: deque[Callable[[], object]] = deque()
        self._gate = _thread.allocate_lock()  # held until it has ended
        self._gate.acquire()

    # For the thread that does it

    def set(self, value: Value) -> None:
        """Set the value; called once, or `fail`."""
        self._value = value
        self._end()

    def fail(self, error: BaseException) -> None:
        self.error = error
        self._end()

    def _end(self) -> None:
        self.done = True
        self._gate.release()
        if self._calls:
            do_all(self._taken())

    def _taken(self) -> Iterator[Callable[[], object]]:
        with contextlib.suppress(IndexError):
            while True:
                yield self._calls.popleft()

    # For waiters

    def then(self, call: Callable[[], object]) -> None:
        """Call this, which must not raise, in the thread that ends it; at once if it ended."""
        self._calls.append(call)
        if self.done:
            do_all(self._taken())

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it has ended; False if it has not in time.

        An interrupt ends the waiting at once, and nothing else.
        """
        try:
            until = None if timeout is None else time.monotonic() + timeout
            while not self.done:
                left = SLICE_S if until is None else min(SLICE_S, until - time.monotonic())
                if left <= 0:
                    break
                if self._gate.acquire(timeout=left):
                    self._gate.release()  # for other waiters
            return self.done
        finally:
            del self  # an interrupt's traceback that is kept must not keep the value

    def result(self) -> Value:
        """Its value, once it has ended; raises its error."""
        self.seen = True
        if self.error is not None:
            try:
                raise self.error
            finally:
                del self  # no cycle with the traceback: what it holds goes at once
        value: Value = self._value
        return value

    async def ended(self) -> None:
        """Await its end, whatever that is; a task that is cancelled goes on at once."""
        if self.done:
            return
        loop = running_loop()
        over = loop.create_future()
        self.then(functools.partial(resolve, loop, over))
        await over

    def __await__(self, thrown: BaseException | None = None) -> Generator[Any, Any, Value]:
        return self._awaited(thrown).__await__()

    async def _awaited(self, thrown: BaseException | None) -> Value:
        try:
            if thrown is not None:
                raise thrown
            await self.ended()
        except asyncio.CancelledError as cancelled:
            self.seen = True
            if self._cancel is not None and not self.done:
                self._cancel()
            while not self.done:
                with contextlib.suppress(asyncio.CancelledError):
                    await self.ended()
            raise cancelled from self.error
        return self.result()


def may_be_interrupted() -> bool:
    """Whether an interrupt could cut work of this thread in half, or the work block an event loop.

    True in the main thread, and if an event loop runs: a transfer that is started on a running loop
    reports there.
    """
    main = threading.main_thread().ident == threading.get_ident()
    return main or asyncio._get_running_loop() is not None


def being_interrupted() -> bool:
    """Whether an interrupt passes through here, so that what waits now is cleaning up.

    An interrupt that comes meanwhile is the second one, and is not kept waiting.
    """
    error = sys.exc_info()[1]
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__  # something failed while that one was on its way
    return error is not None
