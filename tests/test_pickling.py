"""What belongs to a process is not sent to another one, and says what to do instead."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nvmeio


def made_stream(path: Path) -> Any:
    nvmeio.save_safetensors({"0.weight": torch.ones(4, 4)}, path / "model.safetensors")
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4, bias=False))
    return nvmeio.stream_model(model, path / "model.safetensors").weight_stream


def made_file(path: Path) -> Any:
    (path / "data.bin").write_bytes(b"data")
    return nvmeio.open(path / "data.bin")


def made_lazy(path: Path) -> Any:
    nvmeio.save_safetensors({"weight": torch.ones(4)}, path / "model.safetensors")
    return nvmeio.safe_open(path / "model.safetensors")


MADE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "AioHandle": (lambda path: nvmeio.AioHandle(), "on first use or in worker_init_fn"),
    "File": (made_file, "call nvmeio.open in each process"),
    "PinnedPool": (lambda path: nvmeio.PinnedPool(1 << 20), "make one in each process"),
    "Checkpointer": (nvmeio.Checkpointer, "keep its directory"),
    "LazyTensors": (made_lazy, "call nvmeio.safe_open in each process"),
    "WeightStream": (made_stream, "call stream_model in each process"),
}


@pytest.mark.parametrize("kind", MADE)
def test_pickling_is_refused_with_the_way_out(kind: str, tmp_path: Path) -> None:
    """The messages were those of a lock, or of cffi, somewhere inside of it."""
    make, instead = MADE[kind]
    made = make(tmp_path)
    try:
        with pytest.raises(TypeError, match=f"a {kind} belongs to the process .* {instead}"):
            pickle.dumps({"dataset": [made]})
    finally:
        made.close()
