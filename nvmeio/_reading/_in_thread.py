"""Blocking work in a thread of its own: awaited, or waited for where an event loop runs.

A thread of its own, since a loop's default pool may be full of what waits for this. It is on the
CUDA device and stream that are current where it is begun. Nobody goes on before the work has
ended: a cancelled await and an interrupted wait are told afterwards.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from nvmeio import _device

Value = TypeVar("Value")

_SLICE_S = 0.1  # a blocked thread looks up this often, so that Ctrl-C is served


async def in_thread(work: Callable[[], Value], cancel: Callable[[], None] | None = None) -> Value:
    """Run `work` in a thread of its own and await its value.

    When the awaiting task is cancelled, `cancel` is called if there is one, the end of `work` is
    awaited all the same, and only then `CancelledError` goes on; what `work` raised is its cause.
    """
    loop = asyncio.get_running_loop()
    waiter = asyncio.Event()

    def wake(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and its tasks with it
            loop.call_soon_threadsafe(waiter.set)

    ended = _begin(work)
    ended.add_done_callback(wake)
    try:
        await waiter.wait()
    except asyncio.CancelledError as cancelled:
        if cancel is not None:
            cancel()
        while not ended.done():
            with contextlib.suppress(asyncio.CancelledError):
                await waiter.wait()
        raise cancelled from ended.exception()
    except BaseException:  # the coroutine is closed: nobody can wait any more
        if cancel is not None:
            cancel()
        raise
    return ended.result()


def off_loop(work: Callable[[], Value]) -> Value:
    """Run `work` here, or in a thread where an event loop runs here.

    A transfer that is started on a running loop reports there; one that blocks the loop to wait for
    it would wait for ever. An interrupt (Ctrl-C) is raised when `work` has ended: half of it must
    not go on behind its caller's back.
    """
    if asyncio._get_running_loop() is None:
        return work()
    ended = _begin(work)
    interrupt: BaseException | None = None
    while True:
        try:
            while not ended.done():
                concurrent.futures.wait([ended], timeout=_SLICE_S)
            break
        except BaseException as asked:
            interrupt = asked
    if interrupt is not None:
        raise interrupt from ended.exception()
    return ended.result()


def _begin(work: Callable[[], Value]) -> concurrent.futures.Future[Value]:
    ended: concurrent.futures.Future[Value] = concurrent.futures.Future()
    work = _device.as_here(work)

    def run() -> None:
        try:
            value = work()
        except BaseException as failed:
            ended.set_exception(failed)
        else:
            ended.set_result(value)

    threading.Thread(target=run, name="nvmeio-work", daemon=True).start()
    return ended
