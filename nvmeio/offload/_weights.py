"""Weights of a piece between its slot, its parameter in memory, and its home on the drive."""

from __future__ import annotations

import torch

from nvmeio.offload._layout import WEIGHTS, Piece, Subgroup
from nvmeio.offload._params import SwappedParam
from nvmeio.offload._pipeline import Move
from nvmeio.offload._tensors import local, part, view


def weights_out(subgroup: Subgroup, piece: Piece, param: SwappedParam, slot: torch.Tensor) -> None:
    """From the slot into the parameter, or, rounded, to where its home is written from."""
    weights = view(slot, piece.spans[WEIGHTS])
    if param.home is None:
        part(local(param.parameter), piece.start, piece.stop, piece.shape).copy_(weights)
    elif param.casts_home and piece.grad is not None:
        base = subgroup.nbytes + subgroup.scratch_nbytes
        view(slot, piece.grad, base).copy_(weights)


def weights_in(subgroup: Subgroup, piece: Piece, param: SwappedParam, slot: torch.Tensor) -> None:
    """From the parameter (or what was read of its home) into the slot."""
    weights = view(slot, piece.spans[WEIGHTS])
    if param.home is None:
        weights.copy_(part(local(param.parameter), piece.start, piece.stop, piece.shape))
    elif param.casts_home and piece.grad is not None:
        base = subgroup.nbytes + subgroup.scratch_nbytes
        weights.copy_(view(slot, piece.grad, base))


def home_moves(subgroup: Subgroup, piece: Piece, param: SwappedParam) -> list[Move]:
    """Between a piece's home and the slot: into the weights, or, rounded, beside them."""
    if param.home is None or piece.grad is None:
        return []
    base = subgroup.nbytes + subgroup.scratch_nbytes + piece.grad.offset
    if not param.casts_home:
        base = piece.spans[WEIGHTS].offset
    size = param.dtype.itemsize
    found = []
    for extent in param.home.where(param.parameter):
        start, stop = max(piece.start, extent.start), min(piece.stop, extent.stop)
        if start < stop:
            offset = extent.file_offset + (start - extent.start) * size
            into = base + (start - piece.start) * size
            found.append(Move(extent.file, offset, into, (stop - start) * size))
    return found
