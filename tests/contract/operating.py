"""What the tests of operations share."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
from inside import record_of
from support import PATIENCE_S, HeldEngine, random_bytes, until

import nvmeio

Make = Callable[..., nvmeio.AioHandle]
SIZE = 100_000
CONTENT = random_bytes(SIZE, seed=5)  # of the fixture `file`
WAIT_S = PATIENCE_S

needs_3_11 = pytest.mark.skipif(sys.version_info < (3, 11), reason="came with Python 3.11")


def target(nbytes: int = SIZE) -> torch.Tensor:
    """Aligned, so that an engine writes straight into it; filled with a pattern."""
    return nvmeio.empty_aligned(nbytes, dtype=torch.uint8).fill_(0xA5)


def untouched(tensor: torch.Tensor) -> bool:
    return bool((tensor == 0xA5).all())


def builtin_of(error: BaseException) -> type:
    """The built-in class that an error of ours is too."""
    return next(base for base in type(error).__mro__ if base.__module__ == "builtins")


def aio_contexts() -> int:
    """AIO contexts of this process: the kernel maps a ring for each."""
    return Path("/proc/self/maps").read_text().count("/[aio]")


async def rounds() -> None:
    """Let the loop go round: every task that can go on has done so, and waits for something."""
    for _ in range(20):
        await asyncio.sleep(0)


async def open_once_cancelled(engine: HeldEngine, operation: nvmeio.Operation) -> None:
    """Open the gate when the loop has gone round after the operation was cancelled.

    On the loop of who cancels, and not after some time: on a busy machine that would be before.
    """
    await until(lambda: record_of(operation).stop)
    await rounds()
    engine.gate.set()


def threads_in(function: str) -> int:
    """How many threads are in a function of this name."""
    # A collection within the call deadlocks it with a thread that begins or ends (gh-106883).
    gc.disable()
    try:
        innermost = list(sys._current_frames().values())
    finally:
        gc.enable()
    found = 0
    for frame in innermost:
        above: FrameType | None = frame
        while above is not None and above.f_code.co_name != function:
            above = above.f_back
        found += above is not None
    return found
