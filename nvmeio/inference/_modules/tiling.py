"""A linear layer whose tiles are streamed."""

from __future__ import annotations

from typing import Any

import torch

from nvmeio._residency import tiled_linear
from nvmeio.errors import IntegrityError
from nvmeio.inference._plan.cut_sums import CutSums
from nvmeio.inference._plan.units import Unit


def linear(unit: Unit, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`torch.nn.functional.linear` with the weight that a unit's tiles are the rows of.

    Raises:
        TransferError, IntegrityError: As for `WeightStream.use`.
    """
    failures = _failures(unit)
    output = tiled_linear.compute(
        input, unit.weights[0].shape[0], [_rows(tile, bias) for tile in unit.tiles]
    )
    _check_sums(unit, failures)
    return output


def _rows(tile: Unit, bias: torch.Tensor | None) -> tiled_linear.Rows:
    module: Any = tile.modules[0]
    return tiled_linear.Rows(module.first, module.last, lambda given: module(given, bias))


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
