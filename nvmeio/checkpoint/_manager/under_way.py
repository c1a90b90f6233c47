"""Work that began when it was asked for: awaited, or waited for, or left to whoever closes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator
from typing import Any

from nvmeio._threads.begun import Begun, Value
from nvmeio._threads.jobs import Job
from nvmeio._threads.running_loop import running_loop


class UnderWay(Begun[Value]):
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
        super().__init__()
        self.seen = False
        self._cancel = cancel
        self._wakes: list[Callable[[], None]] = []
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

    async def _result(self, thrown: BaseException | None) -> Value:
        if self._job.done:  # on any loop, and on none
            if thrown is not None:
                raise thrown
            return self.result()
        loop = running_loop()
        ended = asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and its tasks with it
                loop.call_soon_threadsafe(ended.set)

        self._wakes.append(wake)
        try:
            if thrown is not None:
                raise thrown
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

    def __await__(self, thrown: BaseException | None = None) -> Generator[Any, Any, Value]:
        return self._result(thrown).__await__()
