"""Weights into the modules that show them, and out; their names, for what goes wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from nvmeio.inference._units import Target, Unit

# Tensors that an error names; a layer is read as one and rarely has more.
_NAMED = 16


def install(targets: Sequence[Target], tensors: Sequence[torch.Tensor]) -> None:
    """Let modules show tensors."""
    shown: dict[int, nn.Parameter] = {}
    for module, attribute, is_buffer, number, _ in targets:
        if is_buffer:
            module._buffers[attribute] = tensors[number]
            continue
        if number not in shown:  # tied parameters are one
            shown[number] = nn.Parameter(tensors[number], requires_grad=False)
        module._parameters[attribute] = shown[number]


def uninstall(targets: Sequence[Target]) -> None:
    """Let them show nothing again."""
    for module, attribute, is_buffer, _, empty in targets:
        shown: dict[str, Any] = module._buffers if is_buffer else module._parameters
        shown[attribute] = empty


def names_in(unit: Unit, at: int, nbytes: int) -> str:
    """The weights that have bytes in a part of a unit's slot, for messages."""
    found: list[str] = []
    number = 0
    for weight in unit.weights:
        for part in weight.parts:
            start = unit.layout.starts[number]
            number += 1
            if start < at + nbytes and at < start + part.nbytes and weight.name not in found:
                found.append(weight.name)
    named = ", ".join(repr(name) for name in found[:_NAMED])
    return named + (f" and {len(found) - _NAMED} more" if len(found) > _NAMED else "")
