"""One step: what is read, computed and written, subgroup by subgroup."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nvmeio._memory import devices
from nvmeio.offload._optimizer.params import SwappedParam
from nvmeio.offload._optimizer.swapped import Swapped
from nvmeio.offload._step import piece_weights
from nvmeio.offload._step.device_turns import DeviceTurns
from nvmeio.offload._step.pipeline import Move, SlotTurn
from nvmeio.offload._step.stepping import Stepper, Work
from nvmeio.offload._swap_files.subgroups import WEIGHTS, Piece, SlotRun, Subgroup
from nvmeio.offload._swap_files.tensors import laid, local, part, strides_of, view


class Step:
    """A step of every parameter that has a gradient.

    Args:
        swapped: The optimizer's state.
        stepper: Does the arithmetic.
        groups: The parameter groups, as they were when the step was asked for.
        grads: The gradients that are in memory, by the numbers of their parameters.
        factor: What gradients are multiplied with; None for nothing.

    Attributes:
        turns: For the pipeline.
        touched: Subgroups that were computed, and whose weights may have changed in memory.
        in_memory: State that stays in memory was stepped: this cannot be undone.
        small: The state outside of the files of the pieces that were stepped, by number.
        sums: Their checksums, by number.
        strides: Of the state that was made anew, by number and name.
    """

    def __init__(
        self,
        swapped: Swapped,
        stepper: Stepper,
        groups: Sequence[dict[str, Any]],
        grads: Mapping[int, torch.Tensor],
        factor: torch.Tensor | None,
    ) -> None:
        self._swapped = swapped
        self._stepper = stepper
        self._groups = groups
        self._grads = grads
        self._factor = None if factor is None else devices.on_host(factor)
        self._device = None if swapped.device is None else swapped.device.device
        self.turns: list[SlotTurn] = []
        self.touched: list[Subgroup] = []
        self.in_memory = False
        self.small: dict[int, dict[str, Any]] = {}
        self.sums: dict[int, dict[str, int]] = {}
        self.strides: dict[int, dict[str, tuple[int, ...]]] = {}
        self._moved: list[Piece] = []
        self._resident: list[tuple[Subgroup, list[Piece]]] = []
        for subgroup in swapped.subgroups:
            pieces = [p for p in subgroup.pieces if self._has_gradient(swapped.param_of(p))]
            if not pieces:
                continue
            if subgroup.resident:
                self._resident.append((subgroup, pieces))
                continue
            self._moved += pieces
            self.turns.append(
                SlotTurn(
                    self._reads(subgroup, pieces),
                    functools.partial(self._turn, subgroup, pieces),
                    swapped.files.verifying([p for p in pieces if p.staged], pieces),
                    functools.partial(self._seal, pieces),
                )
            )

    @property
    def is_empty(self) -> bool:
        """Whether no parameter has a gradient."""
        return not self.turns and not self._resident

    @property
    def moved(self) -> set[int]:
        """The numbers of the pieces that are written to their other place."""
        return {piece.number for piece in self._moved}

    @property
    def begun(self) -> dict[int, bool]:
        """The numbers of the pieces whose state exists after this step."""
        resident = [piece for _, pieces in self._resident for piece in pieces]
        return {piece.number: True for piece in [*self._moved, *resident]}

    def stepped_params(self) -> list[SwappedParam]:
        """The parameters whose weights are others after this step."""
        touched = [*self.touched, *(subgroup for subgroup, _ in self._resident)]
        numbers = dict.fromkeys(piece.param for each in touched for piece in each.pieces)
        params = [self._swapped.params[number] for number in numbers]
        return [param for param in params if self._has_gradient(param)]

    def step_resident(self) -> None:
        """Step what stays in memory: last, for it cannot be undone."""
        device = self._swapped.device
        for subgroup, pieces in self._resident:
            slot = self._swapped.resident[id(subgroup)]
            if self._swapped.gradients is not None:
                base = subgroup.nbytes + subgroup.scratch_nbytes
                moves = self._swapped.gradients.reads(subgroup, pieces, base)
                self._swapped.read_now(slot, moves)
            self.in_memory = True
            if device is None:
                self._compute(subgroup, pieces, slot)
            else:
                self._compute_there(device, subgroup, pieces, slot)
            self._swapped.write_now(slot, self._swapped.param_writes(subgroup, pieces))

    def _compute_there(
        self, device: DeviceTurns, subgroup: Subgroup, pieces: Sequence[Piece], slot: torch.Tensor
    ) -> None:
        """Step pieces that stay in host memory on a device; they are back when it returns."""
        base = subgroup.nbytes + subgroup.scratch_nbytes
        whole = [SlotRun(0, subgroup.nbytes), SlotRun(base, slot.nbytes - base)]

        def compute(memory: torch.Tensor) -> list[SlotRun]:
            self._compute(subgroup, pieces, memory)
            return whole

        try:
            device.begin(slot, whole, compute).wait()
        except BaseException:
            device.settle()
            raise

    def _has_gradient(self, param: SwappedParam) -> bool:
        gradients = self._swapped.gradients
        if gradients is not None:
            if gradients.has(param.number):
                return True
            if gradients.stands_in(param):
                return False
        return param.number in self._grads

    def _reads(self, subgroup: Subgroup, pieces: list[Piece]) -> list[Move]:
        """State, weights where the step works on them, gradients where they are on the drive."""
        staged = [piece for piece in pieces if piece.staged]
        plain = [piece for piece in pieces if not piece.staged]
        files = self._swapped.files
        reads: list[Move] = []
        if staged:
            reads += files.reads(subgroup, staged, weights=True)
        if plain:
            reads += files.reads(subgroup, [p for p in plain if p.begun], weights=False)
        if self._swapped.gradients is not None:
            base = subgroup.nbytes + subgroup.scratch_nbytes
            reads += self._swapped.gradients.reads(subgroup, pieces, base)
        return reads

    def _turn(self, subgroup: Subgroup, pieces: Sequence[Piece], slot: torch.Tensor) -> list[Move]:
        self.touched.append(subgroup)
        self._compute(subgroup, pieces, slot)
        writes = self._swapped.files.writes(subgroup, pieces)
        return writes + self._swapped.param_writes(subgroup, pieces)

    def _seal(self, pieces: Sequence[Piece], slot: torch.Tensor) -> None:
        self.sums.update(self._swapped.files.sum_up(slot, pieces))

    def _compute(self, subgroup: Subgroup, pieces: Sequence[Piece], slot: torch.Tensor) -> None:
        """Step some pieces of a subgroup in a slot."""
        works: list[Work] = []
        places: list[torch.Tensor | None] = []
        for piece in pieces:
            param = self._swapped.param_of(piece)
            place = weights = (
                view(slot, piece.spans[WEIGHTS])
                if piece.staged
                else part(local(param.parameter), piece.start, piece.stop, piece.shape)
            )
            gradient, alike = self._gradient(subgroup, piece, param, slot), None
            if self._groups[param.group].get("fused"):
                alike = strides_of(weights)
                weights, gradient = laid(weights, alike), laid(gradient, alike)
            stepped = torch.nn.Parameter(weights)
            stepped.grad = gradient
            works.append(Work(piece, param.group, stepped, slot, alike))
            places.append(None if weights is place else place)
        small = self._stepper.step(works, self._groups, self._swapped.store.small)
        for work, copied_to in zip(works, places, strict=True):
            self.strides[work.piece.number] = work.strides
            param = self._swapped.param_of(work.piece)
            if copied_to is not None:
                copied_to.copy_(work.weights.detach())
            if work.piece.staged:
                piece_weights.weights_out(subgroup, work.piece, param, slot)
            elif work.piece.stored:
                view(slot, work.piece.spans[WEIGHTS]).copy_(work.weights.detach())
        self.small.update(small)

    def _gradient(
        self, subgroup: Subgroup, piece: Piece, param: SwappedParam, slot: torch.Tensor
    ) -> torch.Tensor:
        """The piece's gradient, in the dtype of the step."""
        base = subgroup.nbytes + subgroup.scratch_nbytes
        gradients, factor = self._swapped.gradients, self._factor
        if gradients is not None and gradients.has(param.number) and piece.grad is not None:
            gradient = view(slot, piece.grad, base)
            if factor is not None:
                gradient.mul_(factor)
        else:
            given = self._grads[param.number]
            if given.layout is not torch.strided:
                raise TypeError(
                    f"parameter {param.number} has a {given.layout} gradient: only dense ones "
                    "can be stepped (an embedding wants sparse=False)"
                )
            mine = part(local(given), piece.start, piece.stop, piece.shape)
            gradient = devices.on_host(mine) if self._device is None else mine
            if param.param_store is not None:  # backward saw no strides where it was on the drive
                gradient = laid(gradient, piece.grad_strides)
            if factor is not None:
                gradient = gradient * factor
        if gradient.dtype == piece.step_dtype:
            return gradient
        if piece.scratch is None:
            return gradient.to(piece.step_dtype)
        scratch = piece.scratch._replace(strides=strides_of(gradient))
        wide = view(slot, scratch, subgroup.nbytes)
        wide.copy_(gradient)
        return wide
