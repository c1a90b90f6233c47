"""Work that began when it was asked for: awaited, or waited for, or left to whoever closes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

from nvmeio._io.threads import Job

Value = TypeVar("Value")


class UnderWay(Coroutine[Any, Any, Value]):
    """Work in a thread of its own, which has begun; await it, or hand it to `asyncio`.

    Cancelling a task that awaits it cancels the work, and waits for its end. Where nobody awaits
    it, it is done all the same.

    Args:
        work: What is done.
        cancel: Ends it soon; called from another thread.

    Attributes:
        seen: Whether somebody has been told what became of it.
    """

    def __init__(self, work: Callable[[], Value], cancel: Callable[[], object]) -> None:
        self.seen = False
        self._cancel = cancel
        self._wakes: list[Callable[[], None]] = []
        self._awaiting: Coroutine[Any, Any, Value] | None = None
        self._job = Job(work, "nvmeio-save", self._wake_all)
        self._job.start()

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._job.done

    def wait(self) -> None:
        """Block until it has ended; an interrupt ends the waiting only."""
        self._job.wait()

    def result(self) -> Value:
        """What it returned, once it has ended; raises what it raised."""
        self.seen = True
        return self._job.result()

    def _wake_all(self) -> None:
        for wake in list(self._wakes):
            wake()

    async def _result(self) -> Value:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and its tasks with it
                loop.call_soon_threadsafe(ended.set)

        self._wakes.append(wake)
        try:
            while not self._job.done:
                await ended.wait()
        except asyncio.CancelledError as cancelled:
            self.seen = True
            self._cancel()
            while not self._job.done:
                with contextlib.suppress(asyncio.CancelledError):
                    await ended.wait()
            raise cancelled from self._job.error
        return self.result()

    def __await__(self) -> Generator[Any, Any, Value]:
        return self._result().__await__()

    def send(self, value: Any) -> Any:
        """Coroutine protocol, for `asyncio.create_task`."""
        if self._awaiting is None:
            self._awaiting = self._result()
        return self._awaiting.send(value)

    def throw(self, typ: Any, val: Any = None, tb: Any = None) -> Any:
        """Coroutine protocol, for `asyncio.create_task`."""
        if self._awaiting is None:
            self._awaiting = self._result()
            if isinstance(typ, asyncio.CancelledError) or typ is asyncio.CancelledError:
                self._awaiting.send(None)  # a task that is cancelled before it began
        return self._awaiting.throw(typ) if val is None else self._awaiting.throw(typ, val, tb)

    def close(self) -> None:
        """Coroutine protocol: nobody awaits it any more; the work goes on."""
        if self._awaiting is not None:
            self._awaiting.close()
