"""What has begun before anybody awaits it, and is a coroutine to asyncio all the same."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

Value = TypeVar("Value")


class Begun(Coroutine[Any, Any, Value]):
    """An awaitable of which any number of tasks may be made.

    An awaitable is enough for `await`; `create_task`, TaskGroup and `asyncio.run` want a coroutine.
    `asyncio.wait` wants none (from Python 3.11 on), and asks in the same way whether it is one.
    """

    __slots__ = ("_driven",)

    def __init__(self) -> None:
        self._driven: dict[asyncio.Task[Any] | None, Generator[Any, Any, Value]] | None = None

    @abstractmethod
    def __await__(self, thrown: BaseException | None = None) -> Generator[Any, Any, Value]:
        """One await of it.

        Args:
            thrown: Raised where the await would begin to wait: a task that was cancelled before it
                began. Where there is nothing to wait for, at once.
        """

    # Each task drives an await of its own.

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
        """Coroutine protocol: whoever awaited gives up; what has begun goes on."""
        if self._driven:
            driven = self._driven.pop(_current_task(), None)
            if driven is not None:
                driven.close()

    def _drive(
        self,
        step: Callable[[Generator[Any, Any, Value]], Any],
        thrown: BaseException | None,
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
