"""A process that is killed, and a child of it that lives on: what it had open is free at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import run_python
from torch import nn

from nvmeio._kv_blocks.store import BlockStore
from nvmeio.inference.spilling import Spiller
from nvmeio.offload import SwappedModule, SwappedOptimizer

pytestmark = pytest.mark.slow


def optimizer(folder: Path) -> SwappedOptimizer:
    parameters = [nn.Parameter(torch.ones(1000))]
    return SwappedOptimizer(torch.optim.SGD, parameters, swap_dir=folder, lr=0.1, momentum=0.9)


def module(folder: Path) -> SwappedModule:
    layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    return SwappedModule(layers, resident_bytes="64 KiB", swap_dir=folder)


def blocks(folder: Path) -> BlockStore:
    return BlockStore(folder, "kv", 4096, 1 << 20)


def spilled(folder: Path) -> Spiller:
    """One that is made removes what killed processes have left."""
    spiller = Spiller(folder)
    spiller.write(nn.Linear(64, 64))
    assert list(folder.iterdir()) == [spiller.path]
    return spiller


# It is killed once its child is there: a child that has not yet run has let go of nothing.
KILLED = """
    import os, signal, sys
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from ends import test_killed
    kept = test_killed.{made}(Path({folder!r}))
    there, tell = os.pipe()
    child = os.fork()
    if not child:
        os.close(1), os.close(2)
        signal.alarm(300)
        os.write(tell, b"1")
        signal.pause()
    os.read(there, 1)
    print(child, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("made", [optimizer, module, blocks, spilled])
def test_a_child_that_lives_on_holds_nothing(made: Callable[[Path], Any], tmp_path: Path) -> None:
    """The next run was refused (EBUSY), or left what the killed one had spilled, until it ended."""
    tests = str(Path(__file__).parents[1])
    killed = run_python(KILLED.format(tests=tests, made=made.__name__, folder=str(tmp_path)))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    try:
        made(tmp_path).close()
    finally:
        os.kill(int(killed.stdout), signal.SIGKILL)
