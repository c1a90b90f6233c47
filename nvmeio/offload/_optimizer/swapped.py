"""What belongs to one swapped optimizer: its parameters, their subgroups, files and slots.

And the weights of a piece between its slot, its parameter in memory, and the parameter's store.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from nvmeio._io.drives import DriveHandles
from nvmeio.offload._generations.generations import Generations
from nvmeio.offload._generations.state_files import StateFiles
from nvmeio.offload._module.param_store import ParamStore
from nvmeio.offload._optimizer.gradients import GradientSwapper
from nvmeio.offload._optimizer.params import SwappedParam
from nvmeio.offload._step.device_turns import DeviceTurns
from nvmeio.offload._step.pipeline import Move, Pipeline, move_all
from nvmeio.offload._swap_files.subgroups import WEIGHTS, Piece, Subgroup
from nvmeio.offload._swap_files.tensors import local, part, view

logger = logging.getLogger("nvmeio")


@dataclass(eq=False)
class Swapped:
    """The state of one optimizer, where it is and what it passes through.

    Attributes:
        handles: Move the bytes.
        store: The generations, and their files.
        pipeline: Over the slots that subgroups pass through.
        gradients: Has the gradients, where those are on the drive.
        params: The parameters, by number.
        subgroups: In the order of the parameters.
        resident: By id of a subgroup: its memory, where it stays there (`ratio`).
        device: Computes the steps; None for the CPU.
    """

    handles: DriveHandles
    store: Generations
    pipeline: Pipeline
    gradients: GradientSwapper | None = None
    params: list[SwappedParam] = field(default_factory=list)
    subgroups: list[Subgroup] = field(default_factory=list)
    resident: dict[int, torch.Tensor] = field(default_factory=dict)
    device: DeviceTurns | None = None

    @property
    def files(self) -> StateFiles:
        """Where the pieces lie, and what moves them."""
        return self.store.files

    @property
    def with_grads(self) -> bool:
        """Whether a buffer has room for gradients: of the drive, or rounded weights to it."""
        return self.gradients is not None or any(param.stores_rounded for param in self.params)

    def make_buffers(self) -> None:
        """Have buffers for the largest subgroup; a line in the log where they hold all of it."""
        swapped = [each for each in self.subgroups if not each.resident]
        need = max((each.slot_nbytes(self.with_grads) for each in swapped), default=0)
        self.pipeline.make(need, len(swapped))
        if self.device is not None:
            there = [each.slot_nbytes(self.with_grads) for each in self.subgroups]
            self.device.make(max(there, default=0), len(there))
        if swapped and len(swapped) <= len(self.pipeline.slots):
            logger.info(
                "the state on the drive is %.1f MB, and the buffers it passes through %.1f MB: "
                "without swapping it would need no more memory; a smaller subgroup_bytes makes the "
                "buffers smaller",
                sum(each.slot_nbytes(self.with_grads) for each in swapped) / 1e6,
                sum(slot.nbytes for slot in self.pipeline.slots) / 1e6,
            )

    def param_of(self, piece: Piece) -> SwappedParam:
        """The parameter that a piece is of."""
        return self.params[piece.param]

    def evict_params(self) -> None:
        """What is in memory of parameters that live on the drive is of the past."""
        for store, _ in self._param_stores():
            store.evict()

    def make_way(self) -> None:
        """What is in memory of parameters that live on the drive is about to be of the past.

        Raises:
            RuntimeError: A block of `SwappedModule.gather` would write them back.
        """
        for store, parameters in self._param_stores():
            store.make_way(parameters)

    def _param_stores(self) -> list[tuple[ParamStore, list[torch.Tensor]]]:
        found: dict[int, tuple[ParamStore, list[torch.Tensor]]] = {}
        for param in self.params:
            if param.param_store is not None:
                found.setdefault(id(param.param_store), (param.param_store, []))[1].append(
                    param.parameter
                )
        return list(found.values())

    def param_reads(self, pieces: Iterable[Piece], subgroup: Subgroup) -> list[Move]:
        """The moves that bring the weights of parameters that live on the drive."""
        return [m for p in pieces for m in param_moves(subgroup, p, self.param_of(p))]

    def param_writes(self, subgroup: Subgroup, pieces: Iterable[Piece]) -> list[Move]:
        """The moves that take rounded weights to parameters that live on the drive."""
        return self.param_reads((p for p in pieces if self.param_of(p).stores_rounded), subgroup)

    def read_now(self, slot: torch.Tensor, moves: Sequence[Move]) -> None:
        """Outside of the pipeline; awaited."""
        move_all(self.handles, slot, moves, writing=False)

    def write_now(self, slot: torch.Tensor, moves: Sequence[Move]) -> None:
        """Outside of the pipeline; awaited."""
        move_all(self.handles, slot, moves, writing=True)


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
