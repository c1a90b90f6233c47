"""What the tests of `Checkpointer` save, and how they look at what is there."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from checkpoint._objects import assert_same, noise
from faults._support import MIB

import nvmeio
from nvmeio._formats.torch_archives.torch_layout import plan_layout


def state_of(step: int, numel: int = 5000) -> dict[str, Any]:
    return {"step": step, "a": torch.full((numel,), float(step)), "b": noise(7, seed=step)}


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def file_of(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}.pt"


def check_file(path: Path, step: int, numel: int = 5000) -> None:
    """Whole, and what was saved: said by torch and by zipfile."""
    assert_same(torch.load(path), state_of(step, numel))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def scramble(state: Any) -> None:
    """Other bytes into every storage, in place, and other Python objects."""
    for record in plan_layout(state).records:
        assert isinstance(record.data, torch.Tensor)
        record.data.fill_(0x5A)
    if isinstance(state, dict):
        state.clear()


def large_state(nbytes: int = 150 * MIB) -> dict[str, Any]:
    """Storages of odd sizes, large and small, as they lie around the end of the memory."""
    state: dict[str, Any] = {"small": [noise(i, seed=i) for i in range(200)]}
    piece = 0
    while nbytes > 0:
        size = min((37 * MIB + 5, MIB - 1, 7 * MIB + 4096, 300_001)[piece % 4], nbytes)
        state[f"piece {piece}"] = noise(size, dtype=torch.uint8, seed=piece)
        nbytes -= size
        piece += 1
    return state


def three_generations(checkpointer: nvmeio.Checkpointer) -> None:
    for step in range(3):
        checkpointer.save_sync(state_of(step, 100_000), step)
    checkpointer.wait_sync()


def make_link(pointer: Path, target: str) -> None:
    pointer.unlink()
    pointer.symlink_to(target)


def make_text(pointer: Path, data: bytes) -> None:
    pointer.unlink()
    pointer.write_bytes(data)
