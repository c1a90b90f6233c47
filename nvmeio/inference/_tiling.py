"""A linear layer whose tiles are streamed: their outputs, one behind the other in one tensor."""

from __future__ import annotations

from typing import Any

import torch

from nvmeio.errors import IntegrityError
from nvmeio.inference._cut_sums import CutSums
from nvmeio.inference._units import Unit

_NARROW = (torch.bfloat16, torch.float16)


def linear(unit: Unit, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`torch.nn.functional.linear` with the weight that a unit's tiles are the rows of.

    Raises:
        TransferError, IntegrityError: As for `WeightStream.use`.
    """
    rows = unit.weights[0].shape[0]
    failures = _failures(unit)
    output: torch.Tensor | None = None
    spans: list[tuple[int, int]] = []
    recorded: list[torch.Tensor] = []
    given = input
    if torch.is_grad_enabled() and input.requires_grad and input.dtype in _NARROW:
        given = input.float()  # so that backward adds the tiles' gradients in float32
    for tile in unit.tiles:
        module: Any = tile.modules[0]
        part = module(given.to(input.dtype), bias)
        if output is None:
            output = part.new_empty(*part.shape[:-1], rows)
        place = output[..., module.first : module.last]
        if part.requires_grad:
            spans.append((module.first, module.last))
            recorded.append(_Put.apply(part, place))  # type: ignore[no-untyped-call]
        else:
            place.copy_(part)
        del part, place  # the next one is computed without it
    _check_sums(unit, failures)
    assert output is not None
    if recorded:
        joined: torch.Tensor = _Joined.apply(output, spans, *recorded)  # type: ignore[no-untyped-call]
        return joined
    return output


class _Put(torch.autograd.Function):
    """Copies a tile's part of the output to its place there, and stands for it: it may go then.

    `torch.cat` of the parts would have all of them in memory beside the whole.
    """

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        place.copy_(part)
        return part.new_empty(()).expand(part.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class _Joined(torch.autograd.Function):
    """An output that has what was put there; its gradient goes to the parts."""

    @staticmethod
    def forward(
        ctx: Any, output: torch.Tensor, spans: list[tuple[int, int]], *parts: torch.Tensor
    ) -> torch.Tensor:
        ctx.spans = spans
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, None, *(grad[..., first:last] for first, last in ctx.spans)


def _sums_of(unit: Unit) -> list[CutSums]:
    """Of its parts of which the file has one checksum for all tiles; once for each tile."""
    parts = (part for tile in unit.tiles for part in tile.weights[0].parts)
    return [part.cut[0] for part in parts if part.cut is not None]


def _failures(unit: Unit) -> int:
    return sum(sums.failures for sums in _sums_of(unit))


def _check_sums(unit: Unit, failures: int) -> None:
    """Raise where the tiles that were used may not have been right together.

    Args:
        unit: Of the tiles.
        failures: `_failures`, before the first of them was used.
    """
    found = _sums_of(unit)
    wrong = next((sums for sums in found if not sums.settled), None)
    if wrong is None and _failures(unit) != failures:
        wrong = found[0]  # right by now, and maybe not when it was used
    if wrong is not None:
        raise IntegrityError(
            f"the rows of {unit.weights[0].name!r} were not all what was packed, when they "
            "were read: model.weight_stream.close() and reopen() read them anew",
            expected=f"CRC-32 {wrong.whole:08x} of the whole",
            found="another one",
        )
