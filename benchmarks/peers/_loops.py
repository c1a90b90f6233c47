"""What happens on event loops, the same for all: random reads, and how late timers are."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from _measure import Sample, percentile, timed

_new_loop: Callable[[], asyncio.AbstractEventLoop]
try:
    from uvloop import new_event_loop as _new_loop
except ImportError:
    _new_loop = asyncio.new_event_loop
HAS_UVLOOP = _new_loop is not asyncio.new_event_loop

TICK_S = 0.001

T = TypeVar("T")
ReadOne = Callable[[int, int], Awaitable[int]]  # (coroutine's number, file offset) -> bytes


def block_offsets(nbytes: int, count: int, block: int) -> list[int]:
    """Offsets of distinct random blocks, the same for everybody."""
    chosen = random.Random(block).sample(range(nbytes // block), count)
    return [number * block for number in chosen]


def run_on_uvloop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run it on uvloop, or on asyncio's own loop where that is missing (the row says so)."""
    loop = _new_loop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(coroutine)
    finally:
        asyncio.set_event_loop(None)
        loop.close()


async def read_blocks(read: ReadOne, offsets: Sequence[int], block: int, workers: int) -> Sample:
    """`workers` coroutines, each with one read in flight at a time."""

    async def work(number: int) -> None:
        for offset in offsets[number::workers]:
            count = await read(number, offset)
            if count != block:
                raise RuntimeError(f"{count} of {block} bytes at {offset}")

    with timed(len(offsets) * block, len(offsets)) as sample:
        await asyncio.gather(*(work(number) for number in range(workers)))
    return sample


async def lag_during(work: Awaitable[None], nbytes: int, operations: int) -> Sample:
    """How late a timer of 1 ms is while the work goes on, in the sample's `extra`."""
    late_s: list[float] = []
    done = False

    async def tick() -> None:
        while not done:
            start = time.perf_counter()
            await asyncio.sleep(TICK_S)
            late_s.append(time.perf_counter() - start - TICK_S)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(10 * TICK_S)
    late_s.clear()
    with timed(nbytes, operations) as sample:
        await work
    done = True
    await ticking
    sample.extra = {
        "p50_ms": percentile(late_s, 50) * 1e3,
        "p99_ms": percentile(late_s, 99) * 1e3,
        "worst_ms": max(late_s) * 1e3,
    }
    return sample
