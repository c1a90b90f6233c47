"""Checkpoints that lack something, for the tests of streams."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nvmeio.checkpoint.safetensors import load_safetensors, save_safetensors

Make = Callable[..., Any]


# Bad checkpoints


def changed_checkpoint(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    state = {name: t.clone() for name, t in load_safetensors(path / "model.safetensors").items()}
    change(state)
    save_safetensors(state, path / "model.safetensors")


NAME = "model.layers.2.mlp.up_proj.weight"
