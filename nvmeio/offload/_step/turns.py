"""What the pipeline's turns do: a step; weights to the drive and back; a state dict to it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from nvmeio._memory import devices
from nvmeio.offload._optimizer.params import SwappedParam
from nvmeio.offload._optimizer.swapped import Swapped, weights_in, weights_out
from nvmeio.offload._step.device_turns import DeviceTurns
from nvmeio.offload._step.pipeline import Move, SlotTurn
from nvmeio.offload._step.stepping import Stepper, Work
from nvmeio.offload._swap_files.subgroups import WEIGHTS, Piece, SlotRun, Subgroup
from nvmeio.offload._swap_files.tensors import laid, local, part, strides_of, view

MASTER = "master"


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
                weights_out(subgroup, work.piece, param, slot)
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


class StoredWeights:
    """Takes the weights of parameters to the drive, and gives them back.

    Args:
        swapped: The state that they are a part of.
    """

    def __init__(self, swapped: Swapped) -> None:
        self._swapped = swapped

    def take(
        self,
        subgroups: Sequence[Subgroup],
        groups: list[dict[str, Any]],
        check: Callable[[], None] | None = None,
    ) -> None:
        """Take parameters as they are now for the weights on the drive: a generation of its own.

        Args:
            subgroups: Those of the parameters.
            groups: The options of all parameter groups.
            check: Raises if nobody wants it any more.
        """
        swapped = self._swapped
        swapped.store.prepare()
        turns, moved = [], {}
        sums: dict[int, dict[str, int]] = {}

        def seal(pieces: Sequence[Piece], slot: torch.Tensor) -> None:
            for piece in pieces:
                sums.update(swapped.files.sum_up(slot, [piece], piece.begun))

        for subgroup in subgroups:
            pieces = [p for p in subgroup.pieces if p.stored and self._can_differ(p)]
            reads = swapped.param_reads(pieces, subgroup)
            compute = functools.partial(self._take, subgroup, pieces)
            if subgroup.resident:
                memory = swapped.resident[id(subgroup)]
                swapped.read_now(memory, reads)
                compute(memory)
                continue
            begun = [piece for piece in pieces if piece.begun]
            reads += swapped.files.reads(subgroup, begun, weights=False)
            verify = swapped.files.verifying([], begun)
            turns.append(SlotTurn(reads, compute, verify, functools.partial(seal, pieces)))
            moved.update({piece.number: piece.begun for piece in pieces})
        swapped.pipeline.run(turns, check)
        swapped.store.commit(set(moved), moved, {}, groups, sums)

    def _can_differ(self, piece: Piece) -> bool:
        """Whether the parameter can differ from the drive: one that lives there does not."""
        param = self._swapped.param_of(piece)
        at_first = not self._swapped.store.generation
        return param.param_store is None or param.stores_rounded or at_first

    def _take(self, subgroup: Subgroup, pieces: Sequence[Piece], slot: torch.Tensor) -> list[Move]:
        for piece in pieces:
            weights_in(subgroup, piece, self._swapped.param_of(piece), slot)
        old = [piece for piece in pieces if piece.begun]
        new = [piece for piece in pieces if not piece.begun]
        files = self._swapped.files
        return files.writes(subgroup, old) + files.writes(subgroup, new, False)

    def give_back(self, subgroups: Sequence[Subgroup]) -> None:
        """Bring the weights of the last complete step back into the parameters."""
        files, turns = self._swapped.files, []
        for subgroup in subgroups:
            if not subgroup.resident:
                pieces = [piece for piece in subgroup.pieces if piece.stored]
                compute = functools.partial(self._give_back, subgroup, pieces)
                verify = files.verifying(pieces, [])
                turns.append(SlotTurn(files.weights(subgroup, pieces), compute, verify))
        self._swapped.pipeline.run(turns)

    def _give_back(
        self, subgroup: Subgroup, pieces: Sequence[Piece], slot: torch.Tensor
    ) -> list[Move]:
        for piece in pieces:
            weights_out(subgroup, piece, self._swapped.param_of(piece), slot)
        return self._swapped.param_writes(subgroup, pieces)


class StateLoad:
    """Takes over states by parameter number; None for one without.

    Args:
        swapped: The optimizer's state.
        states: As a state dict has them.

    Attributes:
        turns: For the pipeline.
        moved: The numbers of the pieces that are written to their other place.
        small: The state outside of the files, by piece number.
        begun: Whether the state of a piece exists, by its number.
        sums: The checksums of the pieces, by number.
        strides: Of their state, by number and name.
    """

    def __init__(self, swapped: Swapped, states: Mapping[int, dict[str, Any] | None]) -> None:
        self._swapped = swapped
        self._states = states
        self.turns: list[SlotTurn] = []
        self.moved: set[int] = set()
        self.small: dict[int, dict[str, Any]] = {}
        self.begun: dict[int, bool] = {}
        self.sums: dict[int, dict[str, int]] = {}
        self.strides: dict[int, dict[str, tuple[int, ...]]] = {}
        self._resident: list[Subgroup] = []
        for subgroup in swapped.subgroups:
            if subgroup.resident:
                self._resident.append(subgroup)
                continue
            in_stores = [p for p in subgroup.pieces if swapped.param_of(p).param_store is not None]
            reads = swapped.files.weights(subgroup, in_stores)
            self.turns.append(
                SlotTurn(
                    reads,
                    functools.partial(self._take_over, subgroup),
                    swapped.files.verifying(in_stores, []),
                    functools.partial(self._seal, subgroup),
                )
            )
            self.moved.update(piece.number for piece in subgroup.pieces if piece.spans)

    @property
    def has_masters(self) -> bool:
        """Whether there are master weights, which the parameters have to follow."""
        return any(entry and MASTER in entry for entry in self._states.values())

    def load_resident(self) -> None:
        """Take over what stays in memory."""
        for subgroup in self._resident:
            self._take_over(subgroup, self._swapped.resident[id(subgroup)])

    def follow_resident_masters(self) -> None:
        """Bring the master weights that stay in memory into their parameters."""
        for subgroup in self._resident:
            slot = self._swapped.resident[id(subgroup)]
            stored = [piece for piece in subgroup.pieces if piece.stored]
            for piece in stored:
                weights_out(subgroup, piece, self._swapped.param_of(piece), slot)
            self._swapped.write_now(slot, self._swapped.param_writes(subgroup, stored))

    def _take_over(self, subgroup: Subgroup, slot: torch.Tensor) -> list[Move]:
        for piece in subgroup.pieces:
            entry = self._states.get(piece.param)
            if piece.stored:
                self._take_weights(subgroup, piece, entry, slot)
            self.begun[piece.number] = bool(entry)
            self.small[piece.number] = self._take_state(piece, entry, slot) if entry else {}
        # Both sorts move, or a piece without state would be left behind by its weights.
        old = [p for p in subgroup.pieces if self.begun[p.number]]
        new = [p for p in subgroup.pieces if not self.begun[p.number]]
        files = self._swapped.files
        return files.writes(subgroup, old) + files.writes(subgroup, new, False)

    def _seal(self, subgroup: Subgroup, slot: torch.Tensor) -> None:
        for piece in subgroup.pieces:
            begun = self.begun[piece.number]
            self.sums.update(self._swapped.files.sum_up(slot, [piece], begun))

    def _take_weights(
        self, subgroup: Subgroup, piece: Piece, entry: dict[str, Any] | None, slot: torch.Tensor
    ) -> None:
        param = self._swapped.param_of(piece)
        if entry and MASTER in entry:
            given = part(local(entry[MASTER]), piece.start, piece.stop, piece.shape)
            view(slot, piece.spans[WEIGHTS]).copy_(given)
        elif param.param_store is None:
            weights_in(subgroup, piece, param, slot)

    def _take_state(
        self, piece: Piece, entry: dict[str, Any], slot: torch.Tensor
    ) -> dict[str, Any]:
        """Copy what is swapped into the slot; what is not."""
        small: dict[str, Any] = {}
        strides = self.strides[piece.number] = {}
        for name, value in entry.items():
            if name in piece.spans:
                kind = next(kind for kind in piece.kinds if kind.name == name)
                given = local(value)
                if kind.shape is None:
                    given = part(given, piece.start, piece.stop, piece.shape)
                strides[name] = strides_of(given)
                span = piece.spans[name]._replace(strides=strides[name])
                view(slot, span).copy_(given)
            elif name != MASTER:
                small[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
        return small
