"""A net whose widest matrix is larger than the budget, for the tests of tiles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nvmeio.checkpoint.safetensors import save_safetensors

Make = Callable[..., Any]

WIDE, NARROW = 250, 64
OUTPUTS = 2000  # no multiple of the rows of a tile


class Net(nn.Module):
    """Sums of whole numbers, which are exact in any order: the same bits whatever the kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(NARROW, WIDE), nn.ReLU(), nn.Linear(WIDE, NARROW, bias=False))
            for _ in range(2)
        )
        self.head = nn.Linear(NARROW, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).clamp(-2, 2)
        found: torch.Tensor = self.head(x)
        return found


def saved_net(path: Path, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    net = Net().requires_grad_(False)
    for parameter in net.parameters():
        parameter.copy_(torch.randint(-2, 3, parameter.shape))
    save_safetensors(net.to(dtype).state_dict(), path, align=True)  # tests go by places in it
    return net.float()


def empty_net() -> Net:
    with torch.device("meta"):
        return Net()


def whole_numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).float()


BUDGET = 200_000  # the head has 512,000 bytes, a layer 129,000


def tiles_of(model: Any, name: str) -> list[Any]:
    return [tile for unit in model.weight_stream.units if unit.name == name for tile in unit.tiles]
