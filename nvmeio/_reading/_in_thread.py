"""Blocking work, awaited: a thread does it, and cancelling waits until it has stopped."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from nvmeio import _device

Value = TypeVar("Value")


async def in_thread(work: Callable[[], Value], cancel: Callable[[], None]) -> Value:
    """Run `work` in a thread of its own and await its value.

    When the awaiting task is cancelled, `cancel` is called, the end of `work` is awaited all the
    same, and only then `CancelledError` goes on. A thread of its own, since a loop's default pool
    may be full of what waits for this. It is on the CUDA device and stream that are current here.
    """
    loop = asyncio.get_running_loop()
    ended: concurrent.futures.Future[Value] = concurrent.futures.Future()

    def run() -> None:
        try:
            value = work()
        except BaseException as failed:
            ended.set_exception(failed)
        else:
            ended.set_result(value)

    work = _device.as_here(work)
    waiter = asyncio.Event()

    def wake(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and its tasks with it
            loop.call_soon_threadsafe(waiter.set)

    ended.add_done_callback(wake)
    threading.Thread(target=run, name="nvmeio-checkpoint", daemon=True).start()
    try:
        await waiter.wait()
    except asyncio.CancelledError:
        cancel()
        while not ended.done():
            with contextlib.suppress(asyncio.CancelledError):
                await waiter.wait()
        ended.exception()
        raise
    except BaseException:  # the coroutine is closed: nobody can wait any more
        cancel()
        raise
    return ended.result()
