"""A training whose state is saved while it goes on."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from checkpoint._checkpointers import file_of
from checkpoint._objects import assert_same

import nvmeio

SIDE = 640  # a weight of 1.6 MB


class Model(torch.nn.Module):
    """Weights that are protected, small ones, and buffers that forward changes."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(SIDE, SIDE) for _ in range(layers))
        self.norm = torch.nn.BatchNorm1d(SIDE)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 30)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = torch.tanh(layer(rows))
        result: torch.Tensor = self.norm(rows)
        return result


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9),
    "adam": lambda given: torch.optim.Adam(given, amsgrad=True, foreach=False),
    "adamw foreach": lambda given: torch.optim.AdamW(given, foreach=True),
    "adamw fused": lambda given: torch.optim.AdamW(given, fused=True),
    "adagrad fused": lambda given: torch.optim.Adagrad(given, fused=True),
    "adafactor": lambda given: torch.optim.Adafactor(given),
    "adamax": lambda given: torch.optim.Adamax(given),
    "radam": lambda given: torch.optim.RAdam(given),
}


class Training:
    """A model, its optimizer and what is saved of them; stepped once, so that there is state."""

    def __init__(self, kind: str = "adamw fused", layers: int = 3) -> None:
        self.model = Model(layers)
        self.optimizer = OPTIMIZERS[kind](self.model.named_parameters())
        self.batches = 0
        self.backward()
        self.optimizer.step()

    @property
    def weight(self) -> torch.Tensor:
        weight: torch.Tensor = self.model.layers[1].weight  # type: ignore[assignment]
        return weight

    def backward(self) -> None:
        generator = torch.Generator().manual_seed(self.batches)
        self.batches += 1
        self.model(torch.randn(4, SIDE, generator=generator)).square().sum().backward()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "batches": self.batches,
        }


def check(checkpointer: nvmeio.Checkpointer, step: int, wanted: Any) -> None:
    """A checkpoint is whole, said by torch and by the sums in it."""
    path = file_of(Path(checkpointer.directory), step)
    assert_same(torch.load(path), wanted)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def averages_in(training: Training) -> None:
    for parameter in training.model.parameters():
        parameter.data.copy_(parameter.data * 0.5 + 7)
