"""Work in a thread of its own: what interrupts its wait comes after its end."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import pytest

from nvmeio._reading._in_thread import in_thread, off_loop


def test_off_loop_runs_beside_a_running_loop() -> None:
    async def main() -> int:
        return off_loop(threading.get_ident)

    assert off_loop(threading.get_ident) == threading.get_ident()
    assert asyncio.run(main()) != threading.get_ident()


def test_an_interrupt_is_raised_when_the_work_is_done() -> None:
    begun, done = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        time.sleep(1)
        done.set()

    def interrupt() -> None:
        begun.wait()
        time.sleep(0.2)  # until the other thread has begun to wait
        os.kill(os.getpid(), signal.SIGUSR1)

    def interrupted(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    async def main() -> None:
        off_loop(work)

    before = signal.signal(signal.SIGUSR1, interrupted)
    pressing = threading.Thread(target=interrupt)
    pressing.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(main())
    finally:
        pressing.join()
        signal.signal(signal.SIGUSR1, before)
    assert done.is_set()


def test_a_cancelled_wait_tells_what_failed() -> None:
    go_on = threading.Event()

    def work() -> None:
        go_on.wait()
        raise ValueError("the drive is full")

    async def main() -> BaseException | None:
        task = asyncio.create_task(in_thread(work))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.sleep(0.05)
        assert not task.done()
        go_on.set()
        try:
            await task
        except asyncio.CancelledError as cancelled:
            return cancelled.__cause__ or cancelled.__context__
        return None

    assert isinstance(asyncio.run(main()), ValueError)


def test_a_cancelled_wait_whose_work_succeeded_has_no_cause() -> None:
    async def main() -> BaseException | None:
        task = asyncio.create_task(in_thread(lambda: time.sleep(0.2)))
        await asyncio.sleep(0.05)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError as cancelled:
            return cancelled.__cause__
        return ValueError("not cancelled")

    assert asyncio.run(main()) is None
