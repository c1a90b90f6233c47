"""Event loops, from any thread: waking those who wait on one, and work that must not block it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

logger = logging.getLogger("nvmeio")


def wake(loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[None]) -> None:
    """Resolve a future of this loop; nobody is left to be woken if the loop is closed."""
    if asyncio._get_running_loop() is loop:
        _resolve(waiter)
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
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def run() -> None:
        try:
            step()
        finally:
            wake(loop, done)

    threading.Thread(target=run, name="nvmeio-step", daemon=True).start()
    await done
