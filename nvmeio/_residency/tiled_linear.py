"""A linear layer some of whose rows are in memory at a time: its outputs, one run behind the other.

A linear layer computes each of its outputs from one row of its weight, so some rows give some of
the outputs. This module does not know the owner of the rows, or when they come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from nvmeio._pages import round_up

# Tiles are of a multiple of so many rows. Matrix kernels take rows in blocks: products of whole
# blocks have the whole's last bits more often than others (of one token, with blocks of 16 rows
# and more, nearly always).
ROWS = 64

_NARROW = (torch.bfloat16, torch.float16)


class LinearRows(NamedTuple):
    """Rows [first, last) of a linear layer.

    `compute` makes their part of the output, [..., last - first], from the input.
    """

    first: int
    last: int
    compute: Callable[[torch.Tensor], torch.Tensor]


def can_be_tiled(module: nn.Module) -> bool:
    """Whether a module is a linear layer that computes as torch's own does, and has no more.

    A hook may need another parameter or buffer when the layer is called.
    """
    names = {*module._parameters, *module._buffers}
    stock = type(module) is nn.Linear and "forward" not in module.__dict__
    return stock and names <= {"weight", "bias"}


def row_bounds(count: int, row_nbytes: int, most: int) -> list[tuple[int, int]]:
    """The [first, last) of even tiles of at most `most` bytes, or of `ROWS` rows."""
    at_most = max(most // max(row_nbytes, 1) // ROWS, 1) * ROWS
    tiles = -(-count // at_most)
    rows = round_up(-(-count // tiles), ROWS)
    return [(first, min(first + rows, count)) for first in range(0, count, rows)]


def compute(input: torch.Tensor, outputs: int, tiles: Iterable[LinearRows]) -> torch.Tensor:
    """Compute `torch.nn.functional.linear`, tile by tile: [..., inputs] to [..., outputs].

    The tiles are computed in this order, and in backward in the other. Cost: the output, and once
    more what one tile adds to it. In backward the gradient of the input is added up in float32, and
    rounded once.
    """
    input = _autocast(input)
    widened = None
    if torch.is_grad_enabled() and input.requires_grad and input.dtype in _NARROW:
        widened = _Widened.apply(input)  # type: ignore[no-untyped-call]
    output: torch.Tensor | None = None
    spans: list[tuple[int, int]] = []
    recorded: list[torch.Tensor] = []
    for tile in tiles:
        given = input if widened is None else _Narrowed.apply(widened, input.detach())  # type: ignore[no-untyped-call]
        part = tile.compute(given)
        if output is None:
            output = part.new_empty(*part.shape[:-1], outputs)
        place = output[..., tile.first : tile.last]
        if part.requires_grad:
            spans.append((tile.first, tile.last))
            recorded.append(_Put.apply(part, place))  # type: ignore[no-untyped-call]
        else:
            place.copy_(part)
        del given, part, place  # the next one is computed without them
    assert output is not None
    if recorded:
        joined: torch.Tensor = _WholeOutput.apply(output, spans, *recorded)  # type: ignore[no-untyped-call]
        return joined
    return output


def _autocast(input: torch.Tensor) -> torch.Tensor:
    """Convert as autocast would, once instead of for every tile."""
    where = input.device.type
    if not torch.is_autocast_enabled(where) or input.dtype == torch.float64:
        return input
    return input.to(torch.get_autocast_dtype(where)) if input.is_floating_point() else input


class _Widened(torch.autograd.Function):
    """Stands for an input, in float32: its gradient is added up in that. Without memory."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor) -> torch.Tensor:
        ctx.dtype = input.dtype
        return input.new_empty((), dtype=torch.float32).expand(input.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.to(ctx.dtype)


class _Narrowed(torch.autograd.Function):
    """The input that one of those stands for, for one tile."""

    @staticmethod
    def forward(ctx: Any, widened: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.float(), None


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


class _WholeOutput(torch.autograd.Function):
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
