"""Saves on slow drives while everybody writes to the state; a short form runs every time.

Each file is compared with a deep copy of the moment of its save, and summed by `verify`'s rule.
"""

from __future__ import annotations

import copy
import ctypes
import os
import random
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import needs_protection

import nvmeio
from nvmeio.testing import FakeEngine

MIB = 1 << 20
LONG = [pytest.mark.stress, pytest.mark.timeout(7200)]  # an hour or two, on an idle machine

pytestmark = needs_protection

OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda given: torch.optim.SGD(given, lr=0.01, momentum=0.9),
    lambda given: torch.optim.SGD(given, lr=0.01, fused=True),
    lambda given: torch.optim.Adam(given, amsgrad=True),
    lambda given: torch.optim.AdamW(given, fused=True),
    lambda given: torch.optim.AdamW(given, foreach=True),
    lambda given: torch.optim.Adagrad(given, fused=True),
    lambda given: torch.optim.Adadelta(given),
    lambda given: torch.optim.Adamax(given),
    lambda given: torch.optim.NAdam(given),
    lambda given: torch.optim.RAdam(given),
    lambda given: torch.optim.RMSprop(given, momentum=0.5, centered=True),
    lambda given: torch.optim.Rprop(given),
    lambda given: torch.optim.ASGD(given),
    lambda given: torch.optim.Adafactor(given),
]


class Trial:
    """A model, an optimizer and who writes; all by chance."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        torch.manual_seed(chance.randrange(1 << 30))
        sides = [chance.choice([64, 300, 512, 777]) for _ in range(4)]
        self.weights = [torch.nn.Parameter(torch.randn(side, 600)) for side in sides]
        self.optimizer = chance.choice(OPTIMIZERS)(self.weights)
        self.step()

    def state(self) -> dict[str, Any]:
        return {"weights": list(self.weights), "optimizer": self.optimizer.state_dict()}

    def step(self) -> None:
        for weight in self.weights:
            weight.grad = torch.randn_like(weight)
        self.optimizer.step()

    def tensor(self) -> torch.Tensor:
        """One of the state's, a parameter or an optimizer's."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [t.detach() for t in (*self.weights, *moments) if isinstance(t, torch.Tensor)]
        return self.chance.choice([t for t in tensors if t.numel() > 1])

    def averages_in_and_out(self) -> None:
        kept = [weight.detach().clone() for weight in self.weights]
        for weight in self.weights:
            weight.data.copy_(weight.data * 0.5 + 7)
        if self.chance.random() < 0.7:
            for weight, own in zip(self.weights, kept, strict=True):
                weight.data.copy_(own)

    def some_bytes(self) -> None:
        tensor = self.tensor()
        nbytes = min(self.chance.choice([1, 8, 4096, 8192, 131_072, 1 << 20]), tensor.nbytes)
        at = self.chance.randrange(tensor.nbytes - nbytes + 1)
        ctypes.memset(tensor.data_ptr() + at, self.chance.randrange(256), nbytes)

    def some_rows(self) -> None:
        weight = self.chance.choice(self.weights)
        low = self.chance.randrange(len(weight))
        weight.data[low : low + 64] += 1

    def another_thread(self) -> None:
        writer = threading.Thread(target=self.some_bytes)
        writer.start()
        writer.join(600)
        assert not writer.is_alive()

    def system_call(self) -> None:
        tensor = self.tensor()
        if tensor.is_contiguous():
            memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
            with open("/dev/urandom", "rb") as source:
                os.readv(source.fileno(), [memory])

    def write(self) -> None:
        ways = (
            self.step,
            self.averages_in_and_out,
            self.some_bytes,
            self.some_rows,
            self.another_thread,
            self.system_call,
        )
        for _ in range(self.chance.randint(1, 5)):
            self.chance.choice(ways)()


def equal(one: Any, other: Any) -> bool:
    """Byte for byte: there may be NaNs in it."""
    if not isinstance(other, torch.Tensor):
        return bool(one == other)
    one, other = (t.detach().contiguous().flatten().view(torch.uint8) for t in (one, other))
    return torch.equal(one, other)


@pytest.mark.parametrize("trials", [8, pytest.param(3000, marks=LONG)])
def test_every_file_is_the_moment_of_its_save(trials: int, tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    moved = 0
    for number in range(trials):
        rate = chance.choice([20, 60, 150]) * MIB
        trial = Trial(chance)
        engine = FakeEngine(delay_s=lambda kind, offset, nbytes, rate=rate: nbytes / rate)
        memory_bytes = chance.choice([None, None, 64 * MIB])
        folder = tmp_path / str(number % 2)
        with (
            nvmeio.AioHandle(engine=engine, queue_depth=1, block_size=MIB) as handle,
            nvmeio.Checkpointer(
                folder, keep=1, handle=handle, memory_bytes=memory_bytes, overwrite=True
            ) as checkpointer,
        ):
            for step in range(chance.randint(1, 2)):
                wanted = copy.deepcopy(trial.state())
                checkpointer.save_sync(trial.state(), step)
                trial.write()
                report = checkpointer.wait_sync()
                assert report is not None
                moved += report.moved_bytes
                path = folder / f"step-{step:08d}.pt"
                loaded = torch.load(path)
                pairs = list(zip(loaded["weights"], wanted["weights"], strict=True))
                for key, values in wanted["optimizer"]["state"].items():
                    found = loaded["optimizer"]["state"][key]
                    pairs += [(found[name], value) for name, value in values.items()]
                same = all(equal(*pair) for pair in pairs)
                assert same, f"seed {seed}, trial {number}: {trial.optimizer}"
                with zipfile.ZipFile(path) as archive:
                    assert archive.testzip() is None
    assert moved > 0


KILLED = """
import sys, torch, nvmeio
folder = sys.argv[1]
tensors = [torch.zeros(300_000) for _ in range(16)]
with nvmeio.Checkpointer(folder, keep=2, overwrite=True) as checkpointer:
    step = (checkpointer.latest_step() or 0) + 1
    while True:
        for tensor in tensors:
            tensor.fill_(step)
        checkpointer.save_sync({"tensors": tensors}, step)
        print(step, flush=True)
        for tensor in tensors:  # whoever is first: this, or the reader
            tensor.data[::1000] = -1.0
        step += 1
        checkpointer.wait_sync()
"""


@pytest.mark.parametrize("kills", [3, pytest.param(300, marks=LONG)])
def test_killed_while_pages_are_copied_aside(kills: int, tmp_path: Path) -> None:
    """Every file that has a name is of one moment."""
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    root = str(Path(nvmeio.__file__).parents[1])
    looked_at = 0
    for _ in range(kills):
        command = [sys.executable, "-c", KILLED, str(tmp_path / "saved")]
        environment = {**os.environ, "PYTHONPATH": root}
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
            assert process.stdout is not None
            for _ in range(chance.randint(2, 4)):  # the first of them is durable by the second
                process.stdout.readline()
            time.sleep(chance.random() * 0.05)  # somewhere in a write, or in its end
            process.kill()
        for path in (tmp_path / "saved").glob("step-*.pt"):
            step = float(int(path.stem.removeprefix("step-")))
            assert all(bool((t == step).all()) for t in torch.load(path)["tensors"]), (path, seed)
            looked_at += 1
    assert looked_at > 0
