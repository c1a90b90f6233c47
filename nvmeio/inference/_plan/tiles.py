"""Matrices that are too large for the window: their rows in tiles, read one after another.

A linear layer computes each of its outputs from one row of its weight, so some rows at a time give
some of the outputs. A tile is streamed like any other unit: the window, its reader and its order
know of nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from nvmeio._residency.tiled_linear import row_bounds
from nvmeio._storage import crc32
from nvmeio.inference._plan.slot_layout import CutSums, Weight, WeightPart, extents_within


class Tile(nn.Module):
    """Some rows of a linear layer.

    Args:
        weight: The whole, on the meta device.
        first: The first row.
        last: The one behind the last.
    """

    weight: nn.Parameter

    def __init__(self, weight: torch.Tensor, first: int, last: int) -> None:
        super().__init__()
        self.first, self.last = first, last
        empty = torch.empty(last - first, weight.shape[1], dtype=weight.dtype, device="meta")
        self.weight = nn.Parameter(empty, requires_grad=weight.requires_grad)

    def forward(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """These rows' part of the output."""
        own = None if bias is None else bias[self.first : self.last]
        return functional.linear(input, self.weight, own)


class TileRows(NamedTuple):
    """Rows [first, last) of a weight, as a weight."""

    first: int
    last: int
    weight: Weight


def rows_of(weight: Weight, most: int) -> list[TileRows]:
    """Cut a matrix.

    Args:
        weight: Of a linear layer.
        most: Bytes of a tile, its conversion included; 64 rows are one all the same.

    Returns:
        Tiles of about the same size; none where it is smaller than two, or does not lie in rows.
    """
    count = weight.shape[0]
    by_row = all(part.shape[:1] == (count,) and len(part.shape) == 2 for part in weight.parts)
    if len(weight.shape) != 2 or weight.order is not None or not by_row:
        return []
    a_row = (weight.nbytes + weight.converted_bytes) // count
    bounds = row_bounds(count, a_row, most)
    if len(bounds) < 2:
        return []
    sums = [_sums_of(part, bounds) for part in weight.parts]
    return [
        TileRows(
            first,
            last,
            weight._replace(
                name=f"{weight.name}[{first}:{last}]",
                shape=(last - first, weight.shape[1]),
                parts=tuple(
                    cut_rows(part, first, last, None if cut is None else (cut, number))
                    for part, cut in zip(weight.parts, sums, strict=True)
                ),
            ),
        )
        for number, (first, last) in enumerate(bounds)
    ]


def _sums_of(part: WeightPart, bounds: list[tuple[int, int]]) -> CutSums | None:
    if not part.sums:
        return None
    whole = 0
    for value in part.sums:
        whole = crc32.combine(whole, value, part.nbytes // len(part.sums))
    a_row = part.nbytes // part.shape[0]
    return CutSums(whole, [(last - first) * a_row for first, last in bounds])


def cut_rows(
    part: WeightPart, first: int, last: int, cut: tuple[CutSums, int] | None = None
) -> WeightPart:
    """Rows [first, last) of a part; `cut` has their checksums."""
    a_row = part.nbytes // part.shape[0]
    begin, behind = first * a_row, last * a_row
    extents = [
        extent._replace(at=extent.at - begin)
        for extent in extents_within(part.extents, begin, behind)
    ]
    shape = (last - first, *part.shape[1:])
    return WeightPart(part.dtype, shape, tuple(extents), (), cut)
