"""The division of parameters into pieces and subgroups, and the memory that it takes.

Buffers, memory, disk, and bytes moved in each step.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from nvmeio._memory import devices
from nvmeio.errors import binary_size, counted
from nvmeio.offload._module.param_store import store_of
from nvmeio.offload._optimizer.arguments import OptimizerSettings, made_for_inference
from nvmeio.offload._optimizer.arithmetic import Stepper
from nvmeio.offload._optimizer.params import SwappedParam
from nvmeio.offload._optimizer.turns import Swapped
from nvmeio.offload._swap_files.pipeline import BUFFERS
from nvmeio.offload._swap_files.subgroups import (
    WEIGHTS,
    Piece,
    Subgroup,
    cut,
    cut_rows,
    pack,
    place,
)
from nvmeio.offload._swap_files.tensors import is_absent, local, own_strides, strides_of

_SPARE = 0.9  # of a buffer: what alignment takes is not known before the pieces are placed


class MemoryPlan(NamedTuple):
    """The sizes that a swapped optimizer has computed; all in bytes where not said otherwise.

    Attributes:
        parameters: Elements of this process's parameters.
        subgroups: How many there are.
        buffers: How many buffers there are: one for each stage that goes on at a time.
        buffer_bytes: Each of them.
        memory_bytes: All buffers, gradient staging, and state that stays in memory (`ratio`).
        state_bytes: State on the drive, one generation.
        disk_bytes: The swap files: two generations, and gradients.
        read_bytes: Bytes that a step reads when every parameter has a gradient.
        written_bytes: Bytes that it writes, gradients included.
        device_bytes: Buffers in memory of the device that computes the step; 0 for the CPU.
    """

    parameters: int
    subgroups: int
    buffers: int
    buffer_bytes: int
    memory_bytes: int
    state_bytes: int
    disk_bytes: int
    read_bytes: int
    written_bytes: int
    device_bytes: int = 0

    def __str__(self) -> str:
        each = max(1, self.parameters)
        buffer, memory, state, disk, read, written, device = map(binary_size, self[3:])
        there = f" and {device} of the device's" if self.device_bytes else ""
        return (
            f"{counted(self.parameters, 'parameter')} in {counted(self.subgroups, 'subgroup')}; "
            f"{counted(self.buffers, 'buffer')} of {buffer}, {memory} of memory in all{there}; "
            f"{state} of state, {disk} on the drive; a step reads {read} and writes {written} "
            f"({self.read_bytes / each:.1f} and {self.written_bytes / each:.1f} bytes a parameter)"
        )


def hold(subgroups: Sequence[Subgroup], ratio: float, bound: set[int]) -> None:
    """Let the last subgroups stay in memory, so that about `ratio` of the state is on the drive.

    ValueError if some must stay, and there are `bound` parameters, whose home is the state files.
    """
    if ratio < 1 and bound:
        raise ValueError(
            f"ratio={ratio} is impossible: the SwappedModule keeps its parameters ({len(bound)} of "
            "them) in the state files, so all state is on the drive. Leave ratio at "
            "1.0, or step in another dtype than theirs (master_dtype), which gives them files of "
            "their own"
        )
    total = sum(subgroup.nbytes for subgroup in subgroups)
    kept = 0.0
    for subgroup in reversed(subgroups):
        if kept + subgroup.nbytes / 2 > (1 - ratio) * total:
            break
        subgroup.resident = True
        kept += subgroup.nbytes


def plan_of(state: Swapped) -> MemoryPlan:
    """The memory and disk that an optimizer's state takes."""
    gradients, slots, params = state.gradients, state.pipeline.slots, state.params
    swapped = [subgroup for subgroup in state.subgroups if not subgroup.resident]
    reads = writes = 0
    for piece in (piece for subgroup in swapped for piece in subgroup.pieces):
        weights = piece.spans[WEIGHTS].nbytes if piece.stored else 0
        writes += piece.record_nbytes
        reads += piece.record_nbytes - (0 if piece.staged else weights)
        if params[piece.param].stores_rounded:
            writes += piece.numel * piece.grad_dtype.itemsize
    gradient_bytes = 0 if gradients is None else gradients.file_bytes
    kept = sum(memory.nbytes for memory in state.resident.values())
    kept += 0 if gradients is None else gradients.memory_bytes
    state_bytes = sum(subgroup.nbytes for subgroup in swapped)
    each = slots[0].nbytes if slots else 0
    return MemoryPlan(
        parameters=sum(piece.numel for param in params for piece in param.pieces),
        subgroups=len(state.subgroups),
        buffers=len(slots),
        buffer_bytes=each,
        memory_bytes=len(slots) * each + kept,
        state_bytes=state_bytes,
        disk_bytes=2 * state_bytes + gradient_bytes,
        read_bytes=reads + gradient_bytes,
        written_bytes=writes + gradient_bytes,
        device_bytes=0 if state.device is None else state.device.nbytes,
    )


class Cuts(NamedTuple):
    """Cuts parameters into pieces, and packs those into subgroups."""

    stepper: Stepper
    settings: OptimizerSettings

    def params(self, first: int, number: int, group: dict[str, Any]) -> list[SwappedParam]:
        """The parameters of group `number`, cut so that each piece fits into a buffer.

        The first of them gets the number `first`. TypeError if one is not dense or cannot be
        probed, ValueError if one is elsewhere than the device that steps, or has no values.
        """
        whole = self._params(first, number, group, 1 << 62)
        return self._params(first, number, group, self._most_bytes(whole))

    def subgroups(self, params: Sequence[SwappedParam]) -> list[Subgroup]:
        """The pieces of parameters in subgroups; ValueError if the buffers are too small."""
        how = self.settings
        pieces = [piece for param in params for piece in param.pieces]
        subgroups = pack(pieces, self._most_bytes(params), how.on_disk)
        for subgroup in subgroups:
            place(subgroup)
        gradients = how.on_disk or any(param.stores_rounded for param in params)
        largest = max(subgroups, key=lambda each: each.slot_nbytes(gradients), default=None)
        for name, budget, buffers in (
            ("buffer_bytes", how.buffer_bytes, how.buffers),
            ("device_bytes", how.device_bytes, BUFFERS),
        ):
            needed = 0 if largest is None else largest.slot_nbytes(gradients)
            if largest is None or budget is None or needed * buffers <= budget:
                continue
            piece = max(largest.pieces, key=lambda piece: piece.record_nbytes)
            raise ValueError(
                f"{name}={budget} is too small: {buffers} buffers are needed, and "
                f"{self._described(piece, params)} takes {needed} bytes of one with all its state; "
                f"give {name}={needed * buffers} or more"
            )
        return subgroups

    def _described(self, piece: Piece, params: Sequence[SwappedParam]) -> str:
        """A piece in words, and what would make it smaller."""
        param = next(param for param in params if param.number == piece.param)
        whole = f"parameter {param.number} of shape {param.shape}"
        if len(param.pieces) > 1:
            return f"a part of {whole}, {piece.numel} elements,"
        if self.stepper.splits(torch.float32) and not self.stepper.splits(piece.step_dtype):
            return f"{whole} (not cut in {piece.step_dtype}; master_dtype=torch.float32 has it cut)"
        return f"{whole} (stepped as a whole)"

    def _params(
        self, first: int, number: int, group: dict[str, Any], most_bytes: int
    ) -> list[SwappedParam]:
        return [
            self._param(each, parameter, number, group, most_bytes)
            for each, parameter in enumerate(group["params"], first)
        ]

    def _param(
        self,
        number: int,
        parameter: torch.Tensor,
        group_number: int,
        group: dict[str, Any],
        most_bytes: int,
    ) -> SwappedParam:
        """A parameter with its pieces, none of which has a record longer than `most_bytes`."""
        tensor, param_store = local(parameter), store_of(parameter)
        shape, dtype, device = tuple(tensor.shape), tensor.dtype, tensor.device
        param = SwappedParam(number, parameter, group_number, param_store, shape, dtype, device)
        if param_store is None and is_absent(tensor):
            raise ValueError(
                f"parameter {number} has no values: its SwappedModule is closed, or has its layer "
                "in tiles. Take module.parameters() as they are once the module is swapped"
            )
        if tensor.is_inference():
            raise made_for_inference(f"parameter {number}")
        if tensor.layout is not torch.strided:
            raise TypeError(
                f"parameter {number} is {tensor.layout}: only dense parameters are swapped"
            )
        how = self.settings
        where = devices.device_of(tensor) if param_store is None else param_store.device
        if how.device.type != "cpu" and where != how.device:
            raise ValueError(
                f"parameter {number} is on {where}, and is to be stepped on {how.device}: bring "
                f"the model there first (where it does not fit, SwappedModule(..., device="
                f"{str(how.device)!r}) does), or leave out device="
            )
        step_dtype = how.master_dtype or tensor.dtype
        if how.master_dtype is not None and not tensor.dtype.is_floating_point:
            step_dtype = tensor.dtype
        if param_store is None:
            strides, grad_strides = strides_of(tensor), own_strides(tensor)
            in_order = tensor.is_contiguous()
        else:
            strides = grad_strides = param_store.strides_of(parameter)
            in_order = not strides
        staged = step_dtype != tensor.dtype or param_store is not None or where != how.device
        piece = functools.partial(
            Piece,
            number,
            step_dtype=step_dtype,
            grad_dtype=tensor.dtype,
            kinds=self.stepper.kinds(group, group_number, step_dtype, param.shape),
            staged=staged,
            stored=staged or how.recoverable,
        )
        whole = piece(0, tensor.numel(), param.shape, strides=strides, grad_strides=grad_strides)
        nbytes = whole.record_nbytes + (whole.numel * tensor.dtype.itemsize if how.on_disk else 0)
        param.pieces.append(whole)
        if self.stepper.splits(step_dtype) and in_order and nbytes > most_bytes:
            runs = cut(whole.numel, nbytes / max(1, whole.numel), most_bytes)
            param.pieces = [piece(start, stop, (stop - start,)) for start, stop in runs]
        if self._by_rows(param, group, step_dtype) and in_order:
            runs = cut_rows(whole.numel, param.shape[0], nbytes / whole.numel, most_bytes)
            param.pieces = [piece(start, stop, (stop - start,)) for start, stop in runs]
        for each in param.pieces:
            each.lent = param_store is not None and not param.stores_rounded
        return param

    def _by_rows(self, param: SwappedParam, group: dict[str, Any], step_dtype: torch.dtype) -> bool:
        """Whether a step may leave some rows, such as fused experts without tokens, alone."""
        rows = len(param.shape) > 2 and param.shape[0] > 1 and min(param.shape) > 0
        return (
            rows
            and param.param_store is not None
            and self.stepper.leaves_zeros_alone(group, step_dtype)
        )

    def _most_bytes(self, params: Sequence[SwappedParam]) -> int:
        """How long the records of a subgroup may be together."""
        how, share = self.settings, 1.0  # how much longer a buffer is than the state in it, at most
        down = how.device.type == "cpu" and any(p.computes_on.type != "cpu" for p in params)
        for piece in (piece for param in params for piece in param.pieces):
            if piece.numel and piece.record_nbytes:
                wide = piece.staged and piece.grad_dtype != piece.step_dtype
                extra = piece.numel * piece.step_dtype.itemsize if wide else 0
                extra += piece.numel * piece.grad_dtype.itemsize if how.on_disk or down else 0
                share = max(share, 1 + extra / piece.record_nbytes)
        most = how.subgroup_bytes
        for budget, buffers in ((how.buffer_bytes, how.buffers), (how.device_bytes, BUFFERS)):
            if budget is not None:
                most = max(4096, min(most, int(budget / buffers / share * _SPARE)))
        return most
