"""The blocks of a pool under random use, by many tasks, loops and threads at once."""

from __future__ import annotations

import asyncio
import functools
import random
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import new_loop, spin_until_collected

from nvmeio._memory.leases import FreeBlocks
from nvmeio._pages import PAGE_BYTES
from nvmeio.pool import PinnedPool

PAGE = PAGE_BYTES


def run_on(kind: str, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    loop = new_loop(kind)
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


# The free blocks


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=120))
@settings(deadline=None)
def test_free_blocks_are_best_fit_lowest_address_and_merge(steps: list[tuple[bool, int]]) -> None:
    capacity = 40
    blocks = FreeBlocks(capacity)
    cells = [False] * capacity  # the model: True where taken
    held: list[tuple[int, int]] = []

    def free_runs() -> list[tuple[int, int]]:
        runs, start = [], None
        for index, taken in enumerate([*cells, True]):
            if not taken and start is None:
                start = index
            elif taken and start is not None:
                runs.append((index - start, start))
                start = None
        return runs

    for take, number in steps:
        if take or not held:
            fitting = [run for run in free_runs() if run[0] >= number]
            start = blocks.take(number)
            if number == 0:
                assert start == 0
                continue
            assert start == (min(fitting)[1] if fitting else None)
            if start is not None:
                assert not any(cells[start : start + number])
                cells[start : start + number] = [True] * number
                held.append((start, number))
        else:
            start, size = held.pop(number % len(held))
            cells[start : start + size] = [False] * size
            blocks.put(start, size)
        assert blocks.nbytes == cells.count(False)
        for size, _ in free_runs():  # each is found whole
            start = blocks.take(size)
            assert start == min(run for run in free_runs() if run[0] >= size)[1]
            blocks.put(start, size)
    for start, size in held:
        blocks.put(start, size)
    assert blocks.take(capacity) == 0


# Stress


class Overlaps:
    """Notes which addresses are out on lease, and whether two ever met."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.live: dict[int, int] = {}
        self.met: list[tuple[int, int]] = []
        self.served = 0

    def enter(self, tensor: torch.Tensor) -> None:
        start, size = tensor.untyped_storage().data_ptr(), tensor.numel()
        with self.lock:
            self.served += 1
            if size == 0:
                return
            for other, length in self.live.items():
                if start < other + length and other < start + size:
                    self.met.append((start, other))
            self.live[start] = size

    def leave(self, tensor: torch.Tensor) -> None:
        if tensor.numel():
            with self.lock:
                del self.live[tensor.data_ptr()]


async def random_leases(pool: PinnedPool, seen: Overlaps, seed: int, rounds: int) -> None:
    """Takes of every size, some cancelled or timed out at any point, the bytes checked."""
    chance = random.Random(seed)

    async def one(tag: int) -> None:
        nbytes = chance.choice([0, 1, PAGE, 3 * PAGE + 5, pool.budget_bytes])
        if chance.random() < 0.7:
            nbytes = chance.randrange(pool.budget_bytes // 4)
        timeout = chance.choice([None, None, 0, 0.001, 0.05])
        try:
            async with pool.take(nbytes, timeout=timeout) as tensor:
                seen.enter(tensor)
                try:
                    tensor.fill_(tag)
                    for _ in range(chance.randrange(4)):
                        await asyncio.sleep(0)
                    if not bool((tensor == tag).all()):
                        seen.met.append((tensor.data_ptr(), -tag))
                finally:
                    seen.leave(tensor)
        except TimeoutError:
            pass

    for _ in range(rounds):
        tasks = [asyncio.ensure_future(one(chance.randrange(256))) for _ in range(24)]
        for _ in range(chance.randrange(12)):
            await asyncio.sleep(0)
            chance.choice(tasks).cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                raise result


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_random_takes_and_cancels_never_overlap_and_all_bytes_come_back(kind: str) -> None:
    pool, seen = PinnedPool(64 * PAGE), Overlaps()
    run_on(kind, lambda: random_leases(pool, seen, seed=1, rounds=60))
    assert seen.met == []
    assert seen.served > 200  # the first in line each time; how many more is a matter of time
    assert (pool.in_use_bytes, pool.waiting, seen.live) == (0, 0, {})
    with pool.take(pool.budget_bytes, timeout=0):
        pass  # in one piece again


def test_loops_and_threads_at_once_never_overlap_and_all_bytes_come_back() -> None:
    pool, seen = PinnedPool(64 * PAGE), Overlaps()

    def blocking(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(150):
            try:
                nbytes = chance.randrange(pool.budget_bytes // 2)
                with pool.take(nbytes, timeout=chance.choice([None, 0.001, 0.1])) as tensor:
                    seen.enter(tensor)
                    tensor.fill_(seed)
                    time.sleep(0)
                    if not bool((tensor == seed).all()):
                        seen.met.append((tensor.data_ptr(), -seed))
                    seen.leave(tensor)
            except TimeoutError:
                pass

    kinds = ["asyncio", "uvloop", "asyncio"]
    pytest.importorskip("uvloop")
    with ThreadPoolExecutor(7) as executor:
        futures = [executor.submit(blocking, seed) for seed in (1, 2, 3, 4)]
        for seed, kind in enumerate(kinds, start=10):
            futures.append(
                executor.submit(
                    run_on, kind, functools.partial(random_leases, pool, seen, seed, rounds=15)
                )
            )
        for future in futures:
            future.result(500)
    assert seen.met == []
    assert (pool.in_use_bytes, pool.waiting, seen.live) == (0, 0, {})
    with pool.take(pool.budget_bytes, timeout=0):
        pass


def test_a_task_that_waits_keeps_no_other_of_a_closed_loop() -> None:
    """As after Ctrl-C within `asyncio.run`: whoever waited kept the task that had the bytes."""

    async def use() -> None:
        async with pool.take(PAGE):
            await asyncio.sleep(3600)

    async def both() -> None:
        await asyncio.gather(use(), use())

    pool = PinnedPool(PAGE)
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # it would tell of the tasks
    task = loop.create_task(both())
    while not pool.waiting:
        loop.run_until_complete(asyncio.sleep(0))
    assert pool.in_use_bytes
    loop.close()
    del task
    spin_until_collected(lambda: pool.in_use_bytes == 0 and pool.waiting == 0)
    pool.close()


def test_the_lease_of_a_task_whose_loop_was_dropped_comes_back() -> None:
    """As after Ctrl-C within `asyncio.run`: the pool itself kept the loop, and so the lease."""
    closed = []

    class Loop(asyncio.SelectorEventLoop):
        def __del__(self) -> None:
            self.close()
            closed.append(True)

    async def use() -> None:
        async with pool.take(PAGE):
            await asyncio.sleep(3600)

    pool = PinnedPool(PAGE)
    loop = Loop()
    loop.set_exception_handler(lambda *_: None)  # it would tell of the task
    task = loop.create_task(use())
    while not pool.in_use_bytes:
        loop.run_until_complete(asyncio.sleep(0))
    del loop, task
    spin_until_collected(lambda: bool(closed) and pool.in_use_bytes == 0)
    pool.close()
