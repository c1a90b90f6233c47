"""Weights of a piece between its slot, its parameter in memory, and the parameter's own store."""

from __future__ import annotations

import torch

from nvmeio.offload._optimizer.params import SwappedParam
from nvmeio.offload._step.pipeline import Move
from nvmeio.offload._swap_files.subgroups import WEIGHTS, Piece, Subgroup
from nvmeio.offload._swap_files.tensors import local, part, view


def weights_out(subgroup: Subgroup, piece: Piece, param: SwappedParam, slot: torch.Tensor) -> None:
    """From the slot into the parameter, or, rounded, to where its store is written from."""
    weights = view(slot, piece.spans[WEIGHTS])
    if param.param_store is None:
        part(local(param.parameter), piece.start, piece.stop, piece.shape).copy_(weights)
    elif param.stores_rounded and piece.grad is not None:
        base = subgroup.nbytes + subgroup.scratch_nbytes
        view(slot, piece.grad, base).copy_(weights)


def weights_in(subgroup: Subgroup, piece: Piece, param: SwappedParam, slot: torch.Tensor) -> None:
    """From the parameter (or what was read of its store) into the slot."""
    weights = view(slot, piece.spans[WEIGHTS])
    if param.param_store is None:
        weights.copy_(part(local(param.parameter), piece.start, piece.stop, piece.shape))
    elif param.stores_rounded and piece.grad is not None:
        base = subgroup.nbytes + subgroup.scratch_nbytes
        weights.copy_(view(slot, piece.grad, base))


def param_moves(subgroup: Subgroup, piece: Piece, param: SwappedParam) -> list[Move]:
    """Between a parameter's store and the slot: into the weights, or, rounded, beside them."""
    if param.param_store is None or piece.grad is None:
        return []
    base = subgroup.nbytes + subgroup.scratch_nbytes + piece.grad.offset
    if not param.stores_rounded:
        base = piece.spans[WEIGHTS].offset
    size = param.dtype.itemsize
    found = []
    for extent in param.param_store.where(param.parameter):
        start, stop = max(piece.start, extent.start), min(piece.stop, extent.stop)
        if start < stop:
            offset = extent.file_offset + (start - extent.start) * size
            into = base + (start - piece.start) * size
            found.append(Move(extent.file, offset, into, (stop - start) * size))
    return found
