"""Saves on slow drives while everybody writes to the state; a short form runs every time.

Each file is compared with a deep copy of the moment of its save, and summed by `verify`'s rule.
"""

from __future__ import annotations

import copy
import ctypes
import os
import random
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faults._support import finish, start_python
from support import needs_protection

import nvmeio
from nvmeio._formats.torch_archives import torch_writing
from nvmeio.testing import FakeEngine

MIB = 1 << 20
LONG = [pytest.mark.stress, pytest.mark.timeout(7200)]
TRIALS = int(os.environ.get("NVMEIO_SNAPSHOT_TRIALS", "3000"))  # 0.45 s each
KILLS = int(os.environ.get("NVMEIO_SNAPSHOT_KILLS", "300"))  # 0.3 s each

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


def aligned(value: Any) -> Any:
    """A tensor in nvmeio's memory, unless it is small."""
    if not isinstance(value, torch.Tensor) or value.numel() < 2:
        return value
    return nvmeio.empty_aligned(value.shape, dtype=value.dtype).copy_(value)


class Trial:
    """A model, an optimizer and who writes; all by chance."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        torch.manual_seed(chance.randrange(1 << 30))
        # Small for the most part, or most of the time went by in waiting for the drive.
        sides = [chance.choice([64, 96, 150, 300]) for _ in range(3)]
        if chance.random() < 0.1:
            sides.append(777)
        self.weights = [torch.nn.Parameter(torch.randn(side, 600)) for side in sides]
        self.optimizer = chance.choice(OPTIMIZERS)(self.weights)
        self.step()
        self.on_huge_pages = chance.random() < 0.5
        if self.on_huge_pages:  # the drive reads it where it lies
            for weight in self.weights:
                weight.data = aligned(weight.data)
            for values in self.optimizer.state.values():
                values.update((name, aligned(value)) for name, value in values.items())

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


@pytest.mark.parametrize("trials", [8, pytest.param(TRIALS, marks=LONG, id="many")])
def test_every_file_is_the_moment_of_its_save(
    trials: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_writing, "STAGINGS", 2)  # more would take in all of a small state
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    moved = saves = moving = in_place = 0
    for number in range(trials):
        staging = chance.choice([64 << 10, 256 << 10, 8 * MIB])
        monkeypatch.setattr(torch_writing, "STAGING_BYTES", staging)
        rate = chance.choice([20, 60, 150]) * MIB
        monkeypatch.setattr(torch_writing, "BODY_BYTES", chance.choice([64 << 10, MIB]))
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
                saves += 1
                moving += report.moved_bytes > 0
                in_place += report.moved_bytes > 0 and trial.on_huge_pages
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
    what = f"{moved / MIB:.0f} MiB copied aside in {moving} of {saves} saves, "
    what += f"{in_place} of them from huge pages"
    print(f"{trials} trials, {what}, 0 wrong, {seed=}")


# One process forks writers, kills each while somebody writes to what it saves, and looks at it.
# A writer tells by a byte that a save has begun ("b"), or is durable ("d"; "m" where pages
# were copied aside for it).
KILLED = """
import os, random, signal, sys, threading, time
from pathlib import Path
import torch, nvmeio
from nvmeio._formats.torch_archives import torch_writing
from nvmeio.testing import FakeEngine

torch_writing.STAGING_BYTES, torch_writing.STAGINGS = 256 << 10, 2  # else it takes in all of it
folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
chance = random.Random(seed)
RATE = 100 << 20
torch.set_num_threads(1)

def saves_for_ever(tell):
    tensors = [torch.zeros(300_000) for _ in range(6)]
    engine = FakeEngine(delay_s=lambda kind, offset, nbytes: nbytes / RATE)
    handle = nvmeio.AioHandle(engine=engine, queue_depth=1, block_size=128 << 10)
    saver = nvmeio.Checkpointer(folder, keep=2, overwrite=True, handle=handle, snapshot="protect")
    step = saver.latest_step() or 0
    def spoil(over):
        while not over.is_set():
            for tensor in reversed(tensors):  # the drive takes them in their order
                tensor.data[:: chance.randrange(1, 1000)] = -1.0
    while True:
        step += 1
        for tensor in tensors:
            tensor.fill_(step)
        report = saver.save_sync({"tensors": tensors}, step)
        assert report.protected_bytes == sum(tensor.nbytes for tensor in tensors), report
        os.write(tell, b"b")
        over = threading.Event()
        writer = threading.Thread(target=spoil, args=(over,))
        writer.start()
        report = saver.wait_sync()
        over.set()
        os.write(tell, b"m" if report.moved_bytes else b"d")
        writer.join()

within = looked_at = last = moved = 0
for turn in range(kills):
    told, tell = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            chance = random.Random(seed + turn)
            saves_for_ever(tell)
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(tell)
    said = b""
    for _ in range(2 * chance.randint(0, 1) + 1):  # to within its first save, or its second
        said += os.read(told, 1)
    time.sleep(chance.random() * 0.15)
    os.kill(pid, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1]), "the writer failed"
    said += os.read(told, 100)
    os.close(told)
    within += said.endswith(b"b")
    moved += said.count(b"m")
    steps = []
    for path in folder.glob("step-*.pt"):
        steps.append(step := int(path.stem.removeprefix("step-")))
        found = torch.load(path)["tensors"]
        assert all(bool((tensor == step).all()) for tensor in found), (path, turn)
        looked_at += 1
    durable = last + said.count(b"d") + said.count(b"m")
    # A writer goes on from here, if the kill came between a name and the pointer to it.
    pointer = folder / "latest"
    last = int(os.readlink(pointer)[5:13]) if pointer.is_symlink() else 0
    assert last in (durable, durable + 1) and (not last or last in steps), (steps, last, said)
assert within > kills // 4 and looked_at > 0, within
print(f"{kills} kills, {within} of them within a save that was written to, {moved} saves before "
      f"with pages copied aside, {looked_at} files, 0 wrong")
"""


@pytest.mark.parametrize("kills", [6, pytest.param(KILLS, marks=LONG, id="many")])
def test_killed_while_pages_are_copied_aside(kills: int, tmp_path: Path) -> None:
    """Every file that has a name is of one moment."""
    seed = random.randrange(1 << 32)
    ran = finish(start_python(KILLED, tmp_path / "saved", kills, seed), 3600)
    assert ran.returncode == 0, f"seed {seed}: {ran.stderr}"
    print(ran.stdout, f"{seed=}")
