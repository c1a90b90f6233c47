"""Checksums of what lies in the state files, made and compared beside the transfers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from nvmeio._io.drives import StripedFile
from nvmeio._storage import crc32
from nvmeio.errors import IntegrityError
from nvmeio.offload._swap_files.subgroups import WEIGHTS, Piece, SlotSpan


class ExpectedSpan(NamedTuple):
    """What a span of a slot should hold after a read.

    Attributes:
        file: It is read from.
        file_offset: Where it lies there.
        piece: Whose it is.
        name: `WEIGHTS`, or a kind of state.
        sum: The CRC-32.
    """

    file: StripedFile
    file_offset: int
    piece: Piece
    name: str
    sum: int


def of_piece(slot: torch.Tensor, piece: Piece, begun: bool) -> dict[str, int]:
    """The checksums of a piece in its slot; of the weights alone where it has not begun."""
    return {
        name: _of_span(slot, span)
        for name, span in piece.spans.items()
        if (not piece.lent if name == WEIGHTS else begun)
    }


def verify(slot: torch.Tensor, expected: Sequence[ExpectedSpan]) -> None:
    """Compare what was read with its checksums.

    Raises:
        IntegrityError: Something is not what was written; names file, parameter and span.
    """
    for each in expected:
        span = each.piece.spans[each.name]
        found = _of_span(slot, span)
        if found != each.sum:
            raise IntegrityError(
                f"{each.name} of parameter {each.piece.param}, elements {each.piece.start} to "
                f"{each.piece.stop}, in {each.file.describe(each.file_offset, span.nbytes)}, are "
                "not what was written there: look at `dmesg` and `smartctl -a`, and go on from a "
                "checkpoint or a snapshot (checksum=False takes them as they are)",
                expected=f"CRC-32 {each.sum:08x}",
                found=f"{found:08x}",
            )


def _of_span(slot: torch.Tensor, span: SlotSpan) -> int:
    return crc32.of_memory(slot.data_ptr() + span.offset, span.nbytes)
