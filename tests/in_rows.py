"""What a linear layer in tiles computes, written down plainly."""

from __future__ import annotations

import torch
from torch import nn


class InRows(nn.Module):
    """A layer of so many rows each, one after another.

    Args:
        layer: The whole; its values are copied.
        rows: Of each part but the last.
    """

    def __init__(self, layer: nn.Linear, rows: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        for first in range(0, layer.out_features, rows):
            last = min(first + rows, layer.out_features)
            part = nn.Linear(layer.in_features, last - first, bias=layer.bias is not None)
            for name, parameter in layer.named_parameters():
                setattr(part, name, nn.Parameter(parameter.detach()[first:last].clone()))
            self.parts.append(part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)
