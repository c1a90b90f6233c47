"""Batches ahead of a loop: in order, at most so many, and none left behind however it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupting import everywhere
from support import PATIENCE_S, HeldEngine, on_every_loop, raw, spin_until, thread, until

import nvmeio
from nvmeio.data import Prefetch, Records

ROWS = torch.arange(200 * 5, dtype=torch.int64).view(200, 5)
ORDER = [[number * 37 % 200 for number in range(at, at + 10)] for at in range(0, 200, 10)]
Make = Callable[..., nvmeio.AioHandle]


@pytest.fixture
def file(path: Path) -> Path:
    path.write_bytes(raw(ROWS))
    return path


@pytest.fixture
def records(file: Path, handle: nvmeio.AioHandle) -> Iterator[Records]:
    with Records(file, torch.int64, 5, handle=handle) as opened:
        yield opened


@pytest.fixture
def held(file: Path, handle_held: nvmeio.AioHandle) -> Iterator[Records]:
    """Whose batches stay on their way until the gate opens."""
    with Records(file, torch.int64, 5, handle=handle_held) as opened:
        yield opened


def is_idle(handle: nvmeio.AioHandle) -> bool:
    return handle.stats.in_flight == 0


def with_six_held(records: Records, handle: nvmeio.AioHandle, engine: HeldEngine) -> Prefetch:
    """Six batches were handed out, and the six behind them are on their way."""

    def asked() -> Iterator[list[int]]:
        yield from ORDER[:6]
        assert handle.wait(PATIENCE_S) == 6
        engine.gate.clear()
        engine.begun = 0
        yield from ORDER[6:]

    engine.gate.set()
    batches = records.prefetch(asked(), depth=6)
    for _ in range(6):
        next(batches)
    assert handle.stats.in_flight == 6
    return batches


# In order


@pytest.mark.parametrize("depth", [1, 2, 7, 100])
def test_every_batch_comes_once_and_in_order(records: Records, depth: int) -> None:
    with records.prefetch(ORDER, depth) as batches:
        found = list(batches)
        assert list(batches) == []  # behind the last as often as one asks
    assert torch.equal(torch.stack(found), ROWS[torch.tensor(ORDER)])
    assert is_idle(records.handle)


@on_every_loop
async def test_every_batch_comes_once_and_in_order_on_a_loop(
    handle: nvmeio.AioHandle, file: Path
) -> None:
    async with Records(file, torch.int64, 5, handle=handle) as records:
        async with records.prefetch(ORDER) as batches:
            found = [batch async for batch in batches]
            with pytest.raises(StopAsyncIteration):
                await batches.__anext__()
        assert torch.equal(torch.stack(found), ROWS[torch.tensor(ORDER)])
        found = list(records.prefetch(ORDER))  # without awaiting, on a loop
        assert torch.equal(torch.stack(found), ROWS[torch.tensor(ORDER)])


def test_batches_are_asked_for_when_there_is_room(
    held: Records, handle_held: nvmeio.AioHandle, engine_held: HeldEngine
) -> None:
    asked: list[int] = []

    def numbered() -> Iterator[list[int]]:
        for number, batch in enumerate(ORDER):
            asked.append(number)
            yield batch

    batches = held.prefetch(numbered(), depth=3)
    assert not asked
    with thread(next, batches) as first:
        # Three beside the one that is waited for.
        spin_until(lambda: handle_held.stats.in_flight == 4)
        engine_held.gate.set()
    assert torch.equal(first[0], ROWS[ORDER[0]])
    assert asked == [0, 1, 2, 3]
    next(batches)
    assert asked == [0, 1, 2, 3, 4]
    assert "3 ahead" in repr(batches)
    batches.close()


def test_no_batches_at_all(records: Records) -> None:
    assert list(records.prefetch([])) == []
    assert [len(batch) for batch in records.prefetch([[], [1], []])] == [0, 1, 0]


def test_batches_and_depth_of_the_wrong_kind_are_refused(records: Records) -> None:
    with pytest.raises(TypeError, match="not iterable"):
        records.prefetch(5)
    for depth, error in ((0, ValueError), (True, TypeError), (1.5, TypeError)):
        with pytest.raises(error, match="depth must be"):
            records.prefetch(ORDER, depth)


@pytest.mark.parametrize("asking", [2, 5])
def test_threads_share_the_batches(records: Records, asking: int) -> None:
    batches = records.prefetch(ORDER, depth=3)
    found: list[torch.Tensor] = []

    def ask() -> None:
        for batch in batches:
            found.append(batch)

    threads = [threading.Thread(target=ask) for _ in range(asking)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    rows = torch.cat(found)
    assert torch.equal(rows[rows[:, 0].argsort()], ROWS)


@on_every_loop
async def test_tasks_share_the_batches(handle: nvmeio.AioHandle, file: Path) -> None:
    async with Records(file, torch.int64, 5, handle=handle) as records:
        batches = records.prefetch(ORDER)

        async def ask() -> list[torch.Tensor]:
            return [batch async for batch in batches]

        shares = await asyncio.gather(ask(), ask(), ask())
        rows = torch.cat([batch for share in shares for batch in share])
        assert torch.equal(rows[rows[:, 0].argsort()], ROWS)


# Errors have their turn


def test_a_wrong_number_raises_when_its_turn_has_come(records: Records) -> None:
    batches = records.prefetch([[0], [1], [200], [3]], depth=3)
    assert [int(next(batches)[0, 0]) for _ in range(2)] == [0, 5]
    with pytest.raises(IndexError, match=r"indices\[0\] is 200"):
        next(batches)
    with pytest.raises(nvmeio.ClosedError, match="begin another one"):
        next(batches)
    assert batches.closed
    batches.close()
    assert is_idle(records.handle)


def test_an_error_of_the_iterable_raises_when_its_turn_has_come(records: Records) -> None:
    def failing() -> Iterator[list[int]]:
        yield [1]
        yield [2]
        raise LookupError("no more of these")

    batches = records.prefetch(failing(), depth=5)
    assert [int(next(batches)[0, 0]) for _ in range(2)] == [5, 10]
    with pytest.raises(LookupError, match="no more of these"):
        next(batches)
    with pytest.raises(nvmeio.ClosedError):
        next(batches)


def test_a_file_that_is_cut_short_in_between(records: Records) -> None:
    """A batch that cannot be read ends it: never the one behind the lost one."""
    assert torch.equal(records[199], ROWS[199])
    os.truncate(records.path, 40 * 100)
    batches = records.prefetch([[0], [199], [1]], depth=1)
    assert torch.equal(next(batches), ROWS[:1])
    with pytest.raises(nvmeio.RowsError, match="the file ends before the row does"):
        next(batches)
    with pytest.raises(nvmeio.ClosedError, match="begin another one"):
        next(batches)


def test_records_that_are_closed_in_between(records: Records) -> None:
    batches = records.prefetch(ORDER, depth=2)
    next(batches)
    records.close()
    assert torch.equal(next(batches), ROWS[ORDER[1]])  # they were on their way
    assert torch.equal(next(batches), ROWS[ORDER[2]])
    with pytest.raises(nvmeio.ClosedError, match="are closed"):
        next(batches)


def test_an_iterable_that_asks_the_prefetch_is_told(records: Records) -> None:
    made: list[Any] = []

    def asking() -> Iterator[list[int]]:
        yield next(made[0])

    made.append(records.prefetch(asking()))
    with pytest.raises(nvmeio.ClosedError):
        next(made[0])
    made.clear()


# The end


def test_a_dropped_prefetch_cancels_what_has_not_begun(
    held: Records, handle_held: nvmeio.AioHandle, engine_held: HeldEngine
) -> None:
    batches = with_six_held(held, handle_held, engine_held)
    del batches
    spin_until(lambda: bool(threading_named("nvmeio-prefetch")))
    engine_held.gate.set()
    spin_until(lambda: is_idle(handle_held))
    spin_until(lambda: not threading_named("nvmeio-prefetch"))
    assert handle_held.wait(0) == 6


def threading_named(name: str) -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == name]


def test_closing_waits_for_what_is_in_flight(
    held: Records, handle_held: nvmeio.AioHandle, engine_held: HeldEngine
) -> None:
    batches = with_six_held(held, handle_held, engine_held)
    engine_held.wait_until_begun()
    with thread(batches.close) as closed:
        spin_until(lambda: batches.closed)
        assert not closed
        engine_held.gate.set()
    assert is_idle(handle_held)
    with pytest.raises(nvmeio.ClosedError, match="is closed"):
        next(batches)
    batches.close()


@on_every_loop
async def test_closing_on_a_loop_waits_however_often_it_is_cancelled(
    held: Records, handle_held: nvmeio.AioHandle, engine_held: HeldEngine
) -> None:
    batches = with_six_held(held, handle_held, engine_held)
    closing = asyncio.ensure_future(batches.aclose())
    for _ in range(3):
        await asyncio.sleep(0)
        closing.cancel()
    await asyncio.sleep(0)
    if engine_held.begun:
        assert not closing.done()
    engine_held.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert is_idle(handle_held)
    await batches.aclose()


@on_every_loop
async def test_a_cancelled_task_ends_it(
    held: Records, handle_held: nvmeio.AioHandle, engine_held: HeldEngine
) -> None:
    batches = held.prefetch(ORDER)

    async def ask() -> torch.Tensor:
        return await batches.__anext__()

    asking = asyncio.ensure_future(ask())
    await until(lambda: engine_held.begun > 0)
    asking.cancel()
    await asyncio.sleep(0)
    engine_held.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await asking
    with pytest.raises(nvmeio.ClosedError):
        await batches.__anext__()
    await batches.aclose()
    assert is_idle(handle_held)
    async for batch in held.prefetch(ORDER):
        assert torch.equal(batch, ROWS[ORDER[0]])
        break
    await handle_held.drain()


def test_an_interrupted_loop_leaves_nothing_in_flight(
    held: Records, handle_held: nvmeio.AioHandle, engine_held: HeldEngine
) -> None:
    """A real signal, while the main thread waits for a batch."""
    batches = held.prefetch(ORDER)

    def interrupt() -> None:
        engine_held.wait_until_begun()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with thread(interrupt), pytest.raises(KeyboardInterrupt):
        next(batches)
    with pytest.raises(nvmeio.ClosedError):
        next(batches)
    engine_held.gate.set()
    batches.close()
    handle_held.wait(PATIENCE_S)
    assert is_idle(handle_held)
    assert torch.equal(next(held.prefetch(ORDER)), ROWS[ORDER[0]])


def test_an_interrupt_anywhere_loses_no_batch_without_a_word(file: Path, new_handle: Make) -> None:
    """Who asks on after it gets the next one in order, or is told."""
    with Records(file, torch.int64, 5, handle=new_handle("threads")) as records:
        found: list[torch.Tensor] = []
        kept: list[Any] = []

        def work() -> None:
            found.clear()
            kept.clear()
            kept[:] = [records.prefetch(ORDER[:4])]
            for batch in kept[0]:
                found.append(batch)

        told = 0
        for where in everywhere(work, step=5):
            for batch, numbers in zip(found, ORDER, strict=False):
                assert torch.equal(batch, ROWS[numbers]), where
            if not kept:
                continue
            try:
                found.extend(kept[0])
                assert torch.equal(torch.stack(found), ROWS[torch.tensor(ORDER[:4])]), where
            except nvmeio.ClosedError:
                told += 1
            kept[0].close()
        assert told > 20
        records.handle.wait(PATIENCE_S)
        assert is_idle(records.handle)
