"""Work in a thread that has its caller do a part: interrupted anywhere, nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from interrupting import at_places

from nvmeio._io.inflight import Cancelled
from nvmeio._threads.caller import Cancellation, InCaller, at_once, run_with_caller


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_part_is_done_by_the_caller_and_the_rest_is_not() -> None:
    here = threading.get_ident()

    def work(in_caller: InCaller) -> tuple[int, int]:
        return threading.get_ident(), in_caller(threading.get_ident)

    worker, caller = run_with_caller(work)
    assert caller == here and worker != here


def test_in_another_thread_all_of_it_is_done_there() -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(run_with_caller(lambda _: _)))
    thread.start()
    thread.join(100)
    assert found == [at_once]


async def test_where_a_loop_runs_the_work_is_done_elsewhere() -> None:
    def work(in_caller: InCaller) -> bool:
        return in_caller(asyncio._get_running_loop) is not asyncio._get_running_loop()

    assert run_with_caller(work)


def test_what_the_part_raises_is_raised_where_it_was_asked_for() -> None:
    seen: list[str] = []

    def work(in_caller: InCaller) -> None:
        try:
            in_caller(int, "x")
        except ValueError:
            seen.append("undone")
            raise

    with pytest.raises(ValueError, match="invalid literal"):
        run_with_caller(work)
    assert seen == ["undone"]


def test_interrupt_while_the_caller_waits_cancels() -> None:
    stop = Cancellation()
    stopped = threading.Event()
    stop.then(stopped.set)

    def work(in_caller: InCaller) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        stopped.wait(100)
        stop.check()

    with pytest.raises(KeyboardInterrupt) as raised:
        run_with_caller(work, stop.cancel)
    assert isinstance(raised.value.__cause__, Cancelled)


def test_second_interrupt_gets_through_at_once() -> None:
    gate = threading.Event()
    ended = threading.Event()

    def work(in_caller: InCaller) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        gate.wait(100)
        ended.set()

    def cancel() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_with_caller(work, cancel)
    assert not ended.is_set()
    gate.set()
    assert ended.wait(100)


def test_interrupted_at_any_point_the_work_is_undone() -> None:
    """What it holds is given back, and it holds nothing while nobody waits."""
    held: list[int] = []
    both: list[int] = []

    def work(in_caller: InCaller) -> None:
        held.append(1)
        try:
            in_caller(both.append, 1)
            in_caller(both.pop)
        finally:
            held.pop()

    threads = threading.active_count()
    count = 0
    for _ in at_places(lambda: run_with_caller(work), 1000):
        count += 1
        until(lambda: not held)
        both.clear()
    assert count > 20
    until(lambda: threading.active_count() <= threads + 1)  # and the one that starts threads


def test_cancellation_tells_those_who_come_late() -> None:
    stop = Cancellation()
    told: list[int] = []
    stop.then(lambda: told.append(1))
    stop.check()
    stop.cancel()
    stop.then(lambda: told.append(2))
    assert told == [1, 2]
    with pytest.raises(Cancelled):
        stop.check()
