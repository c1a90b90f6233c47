"""The loop is never blocked."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.operating import Make, target
from support import LOOPS, HeldEngine, run_on


def longest_pass(kind: str, main: Callable[[], Any]) -> float:
    """The most CPU time that the loop's thread took between two of its passes.

    Time on a clock would count what the machine does beside, and with the collector it would be
    that of whatever else is in this process.
    """
    worst_s = 0.0

    async def watched() -> None:
        nonlocal worst_s
        work, last = asyncio.create_task(main()), time.thread_time()
        while not work.done():
            await asyncio.sleep(0)
            now = time.thread_time()
            worst_s = max(worst_s, now - last)
            last = now
        await work

    gc.disable()
    try:
        run_on(kind, watched())
    finally:
        gc.enable()
    return worst_s


@pytest.mark.parametrize("kind", [kind for kind in LOOPS if kind != "debug"])
def test_submissions_to_a_held_engine_do_not_block_the_loop(
    new_handle: Make, file: Path, kind: str
) -> None:
    """Far more than the queue takes, none of which moves: whoever waited would wait for ever."""

    async def main() -> None:
        engine = HeldEngine()
        handle = new_handle(engine, block_size=4096, queue_depth=2)
        try:
            for _ in range(50):
                handle.async_pread(target(4096 * 8), file)
                await asyncio.sleep(0)
            assert handle.stats.in_flight == 50
        finally:
            engine.gate.set()
        assert await handle.drain() == 50
        await handle.aclose()

    run_on(kind, main())


@pytest.mark.parametrize("kind", [kind for kind in LOOPS if kind != "debug"])
def test_long_endings_do_not_block_the_loop(new_handle: Make, path: Path, kind: str) -> None:
    """Copying back what was read into a non-contiguous tensor is done by another thread."""
    base = torch.zeros(16384, 4096)  # 256 MiB
    before = time.thread_time()
    base.t().copy_(torch.zeros(4096, 16384))
    copying_s = time.thread_time() - before
    with open(path, "wb") as opened:
        opened.truncate(base.nbytes)
    handle = new_handle("threads", block_size=8 << 20)

    async def main() -> None:
        assert await handle.async_pread(base.t(), path) == base.nbytes

    assert longest_pass(kind, main) < copying_s / 4
