"""A linear layer whose tiles are streamed: their outputs, one behind the other in one tensor."""

from __future__ import annotations

from typing import Any

import torch

from nvmeio.errors import IntegrityError
from nvmeio.inference._units import Unit

_NARROW = (torch.bfloat16, torch.float16)


def linear(unit: Unit, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`torch.nn.functional.linear` with the weight that a unit's tiles are the rows of.

    Raises:
        TransferError, IntegrityError: As for `WeightStream.use`.
    """
    rows = unit.weights[0].shape[0]
    output: torch.Tensor | None = None
    recorded: list[torch.Tensor] = []
    given = input
    if torch.is_grad_enabled() and input.requires_grad and input.dtype in _NARROW:
        given = input.float()  # so that backward adds the tiles' gradients in float32
    for tile in unit.tiles:
        module: Any = tile.modules[0]
        part = module(given.to(input.dtype), bias)
        if part.requires_grad:
            recorded.append(part)
            continue
        if output is None:
            output = part.new_empty(*part.shape[:-1], rows)
        output[..., module.first : module.last] = part
        del part  # the next one is computed without it
    _check_sums(unit)
    if recorded:
        return torch.cat(recorded, dim=-1)
    assert output is not None
    return output


def _check_sums(unit: Unit) -> None:
    """Raise where the tiles, of which the file has one checksum, were not right together."""
    for tile in unit.tiles:
        for part in tile.weights[0].parts:
            if part.cut is not None and not part.cut[0].settled:
                raise IntegrityError(
                    f"the rows of {unit.weights[0].name!r} were not all what was packed, when they "
                    "were read: model.weight_stream.close() and reopen() read them anew",
                    expected=f"CRC-32 {part.cut[0].whole:08x} of the whole",
                    found="another one",
                )
