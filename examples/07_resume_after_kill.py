"""A training that checkpoints every step, is killed with SIGKILL, and loses nothing but a step.

    python examples/07_resume_after_kill.py --dir /mnt/nvme
    python examples/07_resume_after_kill.py --kills 10 --steps 60

A process trains a small model and saves its state after every step, beside the next one. Another
one kills it at random moments and starts it again, until it is through. Its losses must be those of
a training that nobody has disturbed, to the last bit. The training itself is `train`, below.

A save is a snapshot of its moment. Where the kernel protects memory nothing is copied for it: what
that gains is measured at the end, on a larger model, by turns with saves that copy.
"""

import argparse
import asyncio
import functools
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import _common
import torch
from _common import say, verify
from torch import nn

import nvmeio

WIDTH, BATCH, KEEP = 512, 64, 2


async def train(directory: Path, steps: int, tell: Callable[[int, str], None]) -> None:
    """Train up to `steps`, from the latest checkpoint on if there is one; tell each loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    async with nvmeio.Checkpointer(directory, keep=KEEP) as checkpointer:
        # Weights, moments and random states of the latest checkpoint, or nothing and 0.
        first = await checkpointer.async_resume(model=model, optimizer=optimizer)
        for step in range(first, steps):
            batch = torch.randn(BATCH, WIDTH)
            loss = (model(batch) - batch.roll(1, 1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            tell(step, loss.item().hex())
            # As it is now; the writing goes on beside.
            await checkpointer.save(checkpointer.training_state(), step)


class Gain(NamedTuple):
    """What saves cost the training.

    Attributes:
        held_ms: How long `save` held it, and the step after it, for each save.
        copied_bytes: What was copied before `save` returned.
        snapshot: How it was taken: "protect" or "copy".
        saved: The last checkpoint.
    """

    held_ms: list[float]
    copied_bytes: int
    snapshot: str
    saved: dict[str, torch.Tensor]


def with_saves(directory: Path, how: str, steps: int) -> Gain:
    """Train a larger model, and save every step of it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2 * WIDTH, 2 * WIDTH) for _ in range(3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    held_ms: list[float] = []
    copied_bytes, snapshot = 0, ""
    with nvmeio.Checkpointer(directory, keep=KEEP, snapshot=how) as checkpointer:
        for step in range(steps):
            model(torch.randn(4 * BATCH, 2 * WIDTH)).square().mean().backward()
            optimizer.step()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            before = checkpointer.wait_sync()  # of the step before: its step was held as well
            report = checkpointer.save_sync(state, step)
            copied_bytes, snapshot = report.copied_bytes, report.snapshot
            held_ms.append(1e3 * report.held_s)
            if before is not None:
                held_ms[-2] += 1e3 * before.step_held_s
        checkpointer.wait_sync()
        saved: dict[str, torch.Tensor] = checkpointer.restore()["model"]
    return Gain(held_ms[2:], copied_bytes, snapshot, saved)  # the first ones make memory and files


def show_gain(folder: Path, saves: int) -> None:
    """Saves with a copy and, where the kernel protects memory, without one, by turns."""
    found: dict[str, list[Gain]] = {"copy": [], "auto": []}
    for turn in range(4):
        how = ("copy", "auto")[turn % 2]
        found[how].append(with_saves(folder / f"turn-{turn}", how, saves))
        shutil.rmtree(folder / f"turn-{turn}")
    for gains in found.values():
        name = {"copy": "with a copy", "protect": "protected"}[gains[0].snapshot]
        held_ms = statistics.median(ms for gain in gains for ms in gain.held_ms)
        copied_mb = gains[0].copied_bytes / 1e6
        say(name, f"a save holds training for {held_ms:.1f} ms, and copies {copied_mb:.1f} MB")
    copied, left = found["copy"][0], found["auto"][0]
    if left.snapshot == "protect":
        verify(left.copied_bytes < copied.copied_bytes / 20, "next to nothing is copied")
    for key, tensor in copied.saved.items():
        verify(torch.equal(tensor, left.saved[key]), f"{key} is the same in both checkpoints")


def training(directory: Path, steps: int) -> "subprocess.Popen[str]":
    """`train` in a process of its own, which prints a step and its loss on each line."""
    command = [sys.executable, __file__, "--train", str(directory), "--steps", str(steps)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def losses(printed: str) -> dict[int, str]:
    """What a training printed; the last line may be torn."""
    whole = [line.split() for line in printed.split("\n")[:-1]]
    return {int(step): loss for step, loss in whole}


def undisturbed(directory: Path, steps: int) -> dict[int, str]:
    found: dict[int, str] = {}
    asyncio.run(train(directory, steps, found.__setitem__))
    return found


def killed_and_resumed(directory: Path, steps: int, kills: int) -> dict[int, str]:
    """Start it again and again; the last time it may finish."""
    seen: dict[int, str] = {}
    chance = random.Random(0)
    for number in range(kills + 1):
        with training(directory, steps) as process:
            assert process.stdout is not None
            printed = ""
            if number < kills:
                for _ in range(chance.randint(1, max(1, steps // (kills + 1)))):
                    printed += process.stdout.readline()
                time.sleep(chance.random() * 0.02)  # in the middle of a step, a copy or a write
                process.send_signal(signal.SIGKILL)
            printed += process.stdout.read()
        now = losses(printed)
        began = f"at step {min(now)}" if now else "and took no step"
        ended = "killed" if process.returncode == -signal.SIGKILL else "done"
        say(f"process {number}", f"went on {began}, {ended} after step {max(now, default='none')}")
        for step, loss in now.items():
            verify(seen.setdefault(step, loss) == loss, f"step {step} has the same loss again")
    return seen


def main(options: argparse.Namespace) -> None:
    with _common.scratch(options.dir, 400 << 20) as folder:
        expected = undisturbed(folder / "undisturbed", options.steps)
        found = killed_and_resumed(folder / "killed", options.steps, options.kills)
        verify(found == expected, "the losses are those of an undisturbed training")
        with nvmeio.Checkpointer(folder / "killed", keep=KEEP) as checkpointer:
            steps = checkpointer.steps()
        verify(steps[-1] == options.steps - 1, "the last step was saved")
        say("on disk", f"steps {', '.join(map(str, steps))}, each a file for torch.load")
        show_gain(folder, options.saves)
        _common.verified(
            f"killed {options.kills} times, and every loss of {options.steps} steps is that of an "
            "undisturbed training, bit for bit"
        )


if __name__ == "__main__":
    parser = _common.arguments(__doc__)
    parser.add_argument("--steps", type=int, default=30, help="of the training (default: 30)")
    parser.add_argument("--kills", type=int, default=3, help="how often (default: 3)")
    parser.add_argument("--saves", type=int, default=6, help="of each turn at the end (default: 6)")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        asyncio.run(train(options.train, options.steps, functools.partial(print, flush=True)))
    else:
        main(options)
