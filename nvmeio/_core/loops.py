"""Event loops, from any thread: waking those who wait on one, and work that must not block it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from nvmeio._threads.jobs import start, unlist
from nvmeio._threads.running_loop import running_loop

logger = logging.getLogger("nvmeio")

_running_loop = asyncio._get_running_loop


def wake(loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[None]) -> None:
    """Resolve a future of this loop; nobody is left to be woken if the loop is closed."""
    if _running_loop() is loop:
        if not waiter.done():
            waiter.set_result(None)
        return
    try:
        loop.call_soon_threadsafe(_resolve, waiter)
    except RuntimeError:
        logger.debug("an event loop was closed while it awaited an operation")


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


async def in_a_thread(step: Callable[[], None]) -> None:
    """Run a step beside the loop, which goes on if whoever awaits it is cancelled.

    In a thread of its own: the loop's executor may be full of work that waits for this step.
    """
    loop = running_loop()
    done = loop.create_future()

    def run() -> None:
        try:
            step()
        finally:
            unlist()
            wake(loop, done)

    start(run, "nvmeio-step", lambda _: run())
    await done


class QueueThread:
    """A thread that works off what others hand it, one after the other; begun with the first.

    Args:
        name: The thread's.
        work: Called with each; must not raise.
    """

    def __init__(self, name: str, work: Callable[[Any], None]) -> None:
        self._name = name
        self._work = work
        self._handed: SimpleQueue[Any] = SimpleQueue()
        self._lock = threading.RLock()
        self._begun = False

    def hand(self, item: object) -> None:
        """Have something worked off. No interrupt comes between the call and its being handed."""
        self._handed.put(item)
        with self._lock:
            if not self._begun:  # an interrupt in between: one is begun too many, and ends too
                start(self._run, self._name, self._work_off)
                self._begun = True

    def close(self) -> None:
        """End once all is done; may be called again."""
        self._handed.put(None)
        if not self._begun:
            self._work = _nothing

    def _work_off(self, _: BaseException) -> None:
        """No thread can be had: what there is, in the place of one."""
        self._begun = False
        while not self._handed.empty():
            if (item := self._handed.get()) is not None:
                self._work(item)

    def _run(self) -> None:
        while (item := self._handed.get()) is not None:
            self._work(item)
            del item  # waiting for the next one, it would keep this one's memory alive
        self._handed.put(None)  # for another of this kind, made by a call that was interrupted
        self._work = _nothing  # no cycle with whoever made this


def _nothing(_: object) -> None:
    pass
