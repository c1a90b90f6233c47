"""Random reads by coroutines: the part that is the same for every contender."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from _measure import Sample, timed

_new_loop: Callable[[], asyncio.AbstractEventLoop]
try:
    from uvloop import new_event_loop as _new_loop
except ImportError:
    _new_loop = asyncio.new_event_loop
HAS_UVLOOP = _new_loop is not asyncio.new_event_loop

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
