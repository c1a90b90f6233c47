"""A small model's weights in a directory, and what may become of them there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

NAME = "model.safetensors"


def made(directory: Path, seed: int = 0) -> Path:
    """The directory of a model, whose weights depend on the seed alone."""
    directory.mkdir(exist_ok=True)
    chance = torch.Generator().manual_seed(seed)
    weights = {
        f"layers.{number}.{name}": torch.randn(shape, generator=chance).to(torch.bfloat16)
        for number in range(3)
        for name, shape in (("q", (64, 256)), ("up", (512, 256)), ("norm", (256,)))
    }
    save_file(weights, directory / NAME)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "rope_theta": 1e4}))
    return directory


def _train(weights: dict[str, torch.Tensor]) -> None:
    """A step so small that bfloat16 rounds most of it away."""
    chance = torch.Generator().manual_seed(9)
    for weight in weights.values():
        step = torch.randn(weight.shape, generator=chance) * 1e-4
        weight.copy_((weight.float() + step).to(weight.dtype))


def _merge(weights: dict[str, torch.Tensor]) -> None:
    weight = weights["layers.1.up"]
    weight.add_((torch.ones(512, 1) @ torch.randn(1, 256) * 0.01).to(weight.dtype))


def _edit(weights: dict[str, torch.Tensor]) -> None:
    weights["layers.2.up"][301, 77] += 1


_ON_WEIGHTS: dict[str, Callable[[dict[str, torch.Tensor]], None]] = {
    "a step of training": _train,
    "a merged adapter": _merge,
    "one element": _edit,
}
CHANGES = [*_ON_WEIGHTS, "half of a file", "the configuration", "one more file"]


def change(directory: Path, what: str) -> None:
    """Change the weights in place."""
    file = directory / NAME
    if what == "the configuration":
        (directory / "config.json").write_text(json.dumps({"rope_theta": 5e5}))
    elif what == "one more file":
        save_file({"more": torch.ones(3)}, directory / "more.safetensors")
    elif what == "half of a file":
        os.truncate(file, file.stat().st_size // 2)
    else:
        weights = load_file(file)
        _ON_WEIGHTS[what](weights)
        save_file(weights, file)


def adapter(directory: Path) -> Path:
    """The directory of a LoRA adapter, as PEFT saves it."""
    directory.mkdir()
    save_file({"q.lora_A.weight": torch.ones(4, 256)}, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8}))
    return directory


def train(directory: Path) -> None:
    """Train an adapter on, in place."""
    weights = load_file(directory / "adapter_model.safetensors")
    weights["q.lora_A.weight"][2, 7] += 1
    save_file(weights, directory / "adapter_model.safetensors")


def scale(directory: Path) -> None:
    """Have an adapter count for more."""
    found = json.loads((directory / "adapter_config.json").read_text())
    found["lora_alpha"] += 1
    (directory / "adapter_config.json").write_text(json.dumps(found))


ADAPTER_CHANGES = [train, scale]
