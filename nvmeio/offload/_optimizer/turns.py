"""The passes of a swapped optimizer, and the work of the pipeline's turns.

A step; weights to the drive and back; a state dict to it. And the weights of a piece between its
slot, its parameter in memory, and the parameter's store.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nvmeio._io.drives import DriveHandles, FileSpan
from nvmeio._memory import devices
from nvmeio._threads.closing import on_error
from nvmeio.errors import ClosedError
from nvmeio.offload._generations.generations import Change, Generations
from nvmeio.offload._generations.state_files import StateFiles
from nvmeio.offload._module.param_store import ParamStore
from nvmeio.offload._optimizer.arithmetic import Stepper, Work
from nvmeio.offload._optimizer.gradients import GradientSwapper
from nvmeio.offload._optimizer.params import SwappedParam
from nvmeio.offload._optimizer.turn_plans import TurnPlan, TurnPlans
from nvmeio.offload._swap_files.pipeline import DeviceTurns, Pipeline, SlotTurn, move_all
from nvmeio.offload._swap_files.subgroups import WEIGHTS, Piece, SlotRun, Subgroup
from nvmeio.offload._swap_files.tensors import (
    is_positive_zero,
    laid,
    local,
    part,
    strides_of,
    view,
)

logger = logging.getLogger("nvmeio")

MASTER = "master"
_DOWN = "step down"  # which copies the stream is for
_IN_MEMORY = "the part of the state that is in memory (ratio) was stepped already"
_NOT_STORED = "the weights have no copy on the drive (recoverable=False)"


@dataclass(eq=False)
class Swapped:
    """The state of one optimizer, where it is and what it passes through.

    `gradients` has those that are on the drive; `device` computes the steps, None for the CPU;
    `subgroups` are in the order of the parameters; `resident` is the memory of those that stay
    there (`ratio`), by id.
    """

    handles: DriveHandles
    store: Generations
    pipeline: Pipeline
    gradients: GradientSwapper | None
    device: DeviceTurns | None
    params: list[SwappedParam] = field(default_factory=list)
    subgroups: list[Subgroup] = field(default_factory=list)
    resident: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.plans = TurnPlans(self.files, self.params)

    @property
    def files(self) -> StateFiles:
        return self.store.files

    @property
    def with_grads(self) -> bool:
        """Whether slots have room for gradients: from a drive or device, or rounded weights."""
        rounded = any(param.stores_rounded for param in self.params)
        return rounded or self.copies_beside or self.gradients is not None

    @property
    def copies_beside(self) -> bool:
        """Whether the CPU steps what is on devices: gradients come down, weights go up."""
        if self.device is not None:
            return False
        elsewhere = [p for p in self.params if p.param_store or p.device.type != "cpu"]
        return any(param.computes_on.type != "cpu" for param in elsewhere)

    def make_buffers(self) -> None:
        """Make buffers for the largest subgroup; log it if they hold all state."""
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
        return self.params[piece.param]

    def follow_drive(self) -> None:
        """Give parameters in memory the values that they have on the drive now."""
        for store in self._param_stores(self.params):
            with contextlib.suppress(ClosedError):  # of a module that was closed meanwhile
                store.follow_drive()

    def make_way(self) -> None:
        """Drop what is in memory of parameters that live on the drive, before they change there.

        RuntimeError if a block of `SwappedModule.gather` would write them back.
        """
        for store, parameters in self._param_stores(self.params).items():
            store.make_way(parameters)

    def _param_stores(self, params: Iterable[SwappedParam]) -> dict[ParamStore, list[torch.Tensor]]:
        stores: dict[ParamStore, list[torch.Tensor]] = {}
        for param in params:
            if param.param_store is not None:
                stores.setdefault(param.param_store, []).append(param.parameter)
        return stores

    def param_reads(self, pieces: Iterable[Piece], subgroup: Subgroup) -> list[FileSpan]:
        """The moves that bring the weights of parameters that live on the drive."""
        return [m for p in pieces for m in _param_moves(subgroup, p, self.param_of(p))]

    def rounded_moves(self, subgroup: Subgroup, pieces: Iterable[Piece]) -> list[FileSpan]:
        """The moves between a slot and rounded weights that live on the drive."""
        return self.param_reads((p for p in pieces if self.param_of(p).stores_rounded), subgroup)

    # Weights to the drive, and back

    def take_weights(
        self,
        subgroups: Sequence[Subgroup],
        groups: list[dict[str, Any]],
        check: Callable[[], None] | None = None,
    ) -> None:
        """Write the parameters as they are now to the drive, as a generation of its own.

        `groups` are the options of all parameter groups; `check` raises if nobody wants it any
        more.
        """
        self.store.prepare()
        turns, change = [], Change()

        def seal(pieces: Sequence[Piece], slot: torch.Tensor) -> None:
            for piece in pieces:
                change.sums.update(self.files.sum_up(slot, [piece], piece.begun))

        for subgroup in subgroups:
            pieces = [p for p in subgroup.pieces if p.stored and self._can_differ(p)]
            reads = self.param_reads(pieces, subgroup)
            compute = functools.partial(self._take, subgroup, pieces)
            if subgroup.resident:
                memory = self.resident[id(subgroup)]
                move_all(self.handles, memory, reads, writing=False)
                compute(memory)
                continue
            begun = [piece for piece in pieces if piece.begun]
            reads += self.files.reads(subgroup, begun, weights=False)
            verify = self.files.verifying([], begun)
            turns.append(SlotTurn(reads, compute, verify, functools.partial(seal, pieces)))
            change.begun.update({piece.number: piece.begun for piece in pieces})
        self.pipeline.run(turns, check)
        change.moved.update(change.begun)
        self.store.commit(change, groups)

    def _can_differ(self, piece: Piece) -> bool:
        """Whether the parameter can differ from the drive; one that lives there does not."""
        param = self.param_of(piece)
        return param.param_store is None or param.stores_rounded or not self.store.generation

    def _take(
        self, subgroup: Subgroup, pieces: Sequence[Piece], slot: torch.Tensor
    ) -> list[FileSpan]:
        for piece in pieces:
            weights_in(subgroup, piece, self.param_of(piece), slot)
        return self.files.writes(subgroup, pieces, {p.number: p.begun for p in pieces})

    def give_back(self, subgroups: Sequence[Subgroup]) -> None:
        """Bring the weights of the last complete step back into the parameters."""
        turns = []
        for subgroup in subgroups:
            if not subgroup.resident:
                pieces = [piece for piece in subgroup.pieces if piece.stored]
                compute = functools.partial(self.to_params, subgroup, pieces)
                verify = self.files.verifying(pieces, [])
                turns.append(SlotTurn(self.files.weights(subgroup, pieces), compute, verify))
        self.pipeline.run(turns)
        self.follow_drive()

    def to_params(
        self, subgroup: Subgroup, pieces: Sequence[Piece], slot: torch.Tensor
    ) -> list[FileSpan]:
        """Copy weights of a slot into their parameters; returns what must be written for that."""
        for piece in pieces:
            weights_out(subgroup, piece, self.param_of(piece), slot)
        return self.rounded_moves(subgroup, pieces)


def weights_out(subgroup: Subgroup, piece: Piece, param: SwappedParam, slot: torch.Tensor) -> None:
    """Copy weights from the slot into the parameter, or, rounded, beside them for its store."""
    outside = _outside(subgroup, piece, param, slot)
    if outside is not None:
        outside.copy_(view(slot, piece.spans[WEIGHTS]))


def _grad_in(subgroup: Subgroup, piece: Piece, slot: torch.Tensor) -> torch.Tensor:
    """The slot's room for a piece's gradient, or its rounded weights."""
    assert piece.grad is not None
    return view(slot, piece.grad, subgroup.grads_at)


def weights_in(subgroup: Subgroup, piece: Piece, param: SwappedParam, slot: torch.Tensor) -> None:
    """Copy weights from the parameter, or from what was read of its store, into the slot."""
    outside = _outside(subgroup, piece, param, slot)
    if outside is not None:
        view(slot, piece.spans[WEIGHTS]).copy_(outside)


def _outside(
    subgroup: Subgroup, piece: Piece, param: SwappedParam, slot: torch.Tensor
) -> torch.Tensor | None:
    """A piece's weights as the parameter has them; None if those are the slot's."""
    if param.param_store is None:
        return part(local(param.parameter), piece.start, piece.stop, piece.shape)
    return _grad_in(subgroup, piece, slot) if param.stores_rounded else None


def _param_moves(subgroup: Subgroup, piece: Piece, param: SwappedParam) -> list[FileSpan]:
    """The moves between a parameter's store and the slot: its weights, or, rounded, beside them."""
    if param.param_store is None or piece.grad is None:
        return []
    base = subgroup.grads_at + piece.grad.offset
    if not param.stores_rounded:
        base = piece.spans[WEIGHTS].offset
    first, last = piece.start * param.dtype.itemsize, piece.stop * param.dtype.itemsize
    found = []
    for span in param.param_store.where(param.parameter):
        start, stop = max(first, span.start), min(last, span.start + span.nbytes)
        if start < stop:
            offset = span.file_offset + start - span.start
            found.append(FileSpan(span.file, offset, base + start - first, stop - start))
    return found


class Step:
    """A step of every parameter that has a gradient.

    Args:
        swapped: The optimizer's state.
        stepper: Does the arithmetic.
        groups: The parameter groups, as they were when the step was asked for.
        grads: The gradients that are in memory, by the numbers of their parameters.
        factor: A factor for all gradients; None for none.

    Attributes:
        touched: Subgroups that were computed, and whose weights may have changed in memory.
        why_no_undo: Why what was stepped cannot be undone, or "".
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
        self.turns: list[SlotTurn] = []
        self.touched: list[Subgroup] = []
        self.why_no_undo = ""
        self.change = Change()
        self._unchanged: list[Piece] = []
        self._resident: list[tuple[Subgroup, list[Piece]]] = []
        self._plans: list[TurnPlan] = []
        beside = [param.computes_on for param in swapped.params] if swapped.copies_beside else []
        there = {*beside} - {torch.device("cpu")}
        self._down = {device: devices.Beside(device, _DOWN) for device in there}
        self._up = {device: devices.Beside(device, "step up") for device in there}
        self._beside = (*self._down.values(), *self._up.values())
        for copies in self._beside:
            copies.follow()
        self._stepped: Container[int] = grads
        if swapped.gradients is not None:
            self._stepped = {p.number for p in swapped.params if self._has_gradient(p)}
        for subgroup in swapped.subgroups:
            pieces = [piece for piece in subgroup.pieces if piece.param in self._stepped]
            if not subgroup.resident:
                pieces = [piece for piece in pieces if not self._stays(piece)]
            if not pieces:
                continue
            if subgroup.resident:
                self.change.begun.update(dict.fromkeys([p.number for p in pieces], True))
                self._resident.append((subgroup, pieces))
                continue
            plan = swapped.plans.plan(subgroup, pieces)
            self._plans.append(plan)
            self.change.begun.update(plan.begun)
            self.change.moved.update(plan.begun)
            self.turns.append(
                SlotTurn(
                    [*plan.reads, *self._grad_reads(subgroup, pieces)],
                    functools.partial(self._turn, plan),
                    functools.partial(self._arrived, subgroup, pieces, plan.verify),
                    functools.partial(self._seal, pieces),
                )
            )

    @property
    def is_empty(self) -> bool:
        return not self.turns and not self._resident and not self._unchanged

    def stepped_params(self) -> list[SwappedParam]:
        """The parameters whose weights this step has changed."""
        touched = [*self.touched, *(subgroup for subgroup, _ in self._resident)]
        pieces = [*self._unchanged, *(piece for each in touched for piece in each.pieces)]
        numbers = dict.fromkeys(piece.param for piece in pieces)
        params = [self._swapped.params[number] for number in numbers]
        return [param for param in params if param.number in self._stepped]

    def next_reads(self) -> Iterator[Sequence[FileSpan]]:
        """The first reads of a step like this one, once this one is committed.

        Up to the first whose weights are lent, which their module may change before, or whose
        parameter has rows that this step left alone: the next one may leave others.
        """
        by_rows = {piece.param for piece in self._unchanged}
        for plan in self._plans:
            if any(piece.lent or piece.param in by_rows for piece in plan.pieces):
                return
            yield self._swapped.plans.plan(plan.subgroup, plan.pieces).reads

    def step_resident(self) -> None:
        """Step what stays in memory: last, for it cannot be undone."""
        swapped = self._swapped
        for subgroup, pieces in self._resident:
            slot = swapped.resident[id(subgroup)]
            move_all(swapped.handles, slot, self._grad_reads(subgroup, pieces), writing=False)
            self.why_no_undo = _IN_MEMORY
            if swapped.device is None:
                self._arrived(subgroup, pieces, None, slot)
                self._compute(subgroup, pieces, slot)
            else:
                self._compute_there(swapped.device, subgroup, pieces, slot)
            move_all(swapped.handles, slot, swapped.rounded_moves(subgroup, pieces), writing=True)
        self.settle()

    def settle(self) -> None:
        """Wait until no copy between slots and devices is under way."""
        for copies in self._beside:
            copies.mark().wait()

    def _compute_there(
        self, device: DeviceTurns, subgroup: Subgroup, pieces: Sequence[Piece], slot: torch.Tensor
    ) -> None:
        """Step pieces that stay in host memory on a device; they are back when it returns."""
        base = subgroup.grads_at
        whole = [SlotRun(0, subgroup.nbytes), SlotRun(base, slot.nbytes - base)]

        def compute(memory: torch.Tensor) -> list[SlotRun]:
            self._compute(subgroup, pieces, memory)
            return whole

        with on_error(device.settle):
            device.begin(slot, whole, compute).wait()

    def _has_gradient(self, param: SwappedParam) -> bool:
        """Whether it has one on the drive or in memory."""
        gradients = self._swapped.gradients
        assert gradients is not None
        if gradients.has(param.number):
            return True
        return param.number in self._grads and not gradients.stands_in(param)

    def _stays(self, piece: Piece) -> bool:
        """Leave a piece alone whose step would change nothing but its count; True if it does.

        The weights must be on the drive and nowhere else (`lent`), or be there a second time,
        rounded, as the last step left them: others are copied there by each step.
        """
        swapped = self._swapped
        param = swapped.param_of(piece)
        if not piece.begun or not (piece.lent or param.has_rounded_of_last_step()):
            return False
        if not self._stepper.leaves_zeros_alone(self._groups[param.group], piece.step_dtype):
            return False
        if self._factor is not None and not bool(torch.isfinite(self._factor)):
            return False
        if not self._is_zero(piece):  # its bits: a gradient of -0 makes +0 of weights of -0
            return False
        small = swapped.store.small[piece.number]
        if "step" in small:
            self.change.small[piece.number] = {**small, "step": small["step"] + 1}
        self._unchanged.append(piece)
        return True

    def _is_zero(self, piece: Piece) -> bool:
        """Whether all of a piece's gradient is known to be +0, without a read or a wait."""
        gradients, given = self._swapped.gradients, self._grads.get(piece.param)
        if gradients is not None and gradients.has(piece.param):
            return gradients.is_zero(piece)
        if given is None or devices.is_device(given) or not given.is_contiguous():
            return False
        return is_positive_zero(part(local(given), piece.start, piece.stop, piece.shape))

    def _grad_reads(self, subgroup: Subgroup, pieces: Sequence[Piece]) -> list[FileSpan]:
        gradients = self._swapped.gradients
        return [] if gradients is None else gradients.reads(subgroup, pieces, subgroup.grads_at)

    def _turn(self, plan: TurnPlan, slot: torch.Tensor) -> Sequence[FileSpan]:
        subgroup, pieces = plan.subgroup, plan.pieces
        self.touched.append(subgroup)
        if not plan.stored:
            self.why_no_undo = _NOT_STORED
        self._compute(subgroup, pieces, slot)
        if not plan.rounded:
            return plan.writes
        return [*plan.writes, *self._swapped.param_reads(plan.rounded, subgroup)]

    def _seal(self, pieces: Sequence[Piece], slot: torch.Tensor) -> None:
        self.change.sums.update(self._swapped.files.sum_up(slot, pieces))
        if self._beside:
            self.settle()

    def _arrived(
        self,
        subgroup: Subgroup,
        pieces: Sequence[Piece],
        verify: Callable[[torch.Tensor], None] | None,
        slot: torch.Tensor,
    ) -> None:
        """Look at what was read and bring gradients from devices, beside the turn before."""
        if verify is not None:
            verify(slot)
        if not self._down:
            return
        for piece in pieces:
            given = self._given(piece)
            if given is not None and given.device in self._down:
                self._down[given.device].copy(_grad_in(subgroup, piece, slot), given)
        for copies in self._down.values():
            copies.mark().wait()

    def _given(self, piece: Piece) -> torch.Tensor | None:
        """A piece's gradient in memory; None where it is on the drive."""
        gradients, number = self._swapped.gradients, piece.param
        if gradients is not None and gradients.has(number):
            return None
        given = self._grads[number]
        if given.layout is not torch.strided:
            raise TypeError(
                f"parameter {number} has a {given.layout} gradient: only dense ones "
                "can be stepped (an embedding wants sparse=False)"
            )
        whole = local(given)
        if not self._down:
            return part(whole, piece.start, piece.stop, piece.shape)
        # One whose elements are not in order is copied: by the stream that takes it to the host.
        down = whole.device in self._down
        stream = devices.side_stream(whole.device, _DOWN) if down else None
        with devices.on_stream(stream):
            return part(whole, piece.start, piece.stop, piece.shape)

    def _compute(self, subgroup: Subgroup, pieces: Sequence[Piece], slot: torch.Tensor) -> None:
        """Step some pieces of a subgroup in a slot."""
        works: list[Work] = []
        places: list[torch.Tensor | None] = []
        params = self._swapped.params
        for piece in pieces:
            param = params[piece.param]
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
            self.change.strides[work.piece.number] = work.strides
            if copied_to is not None:
                copied_to.copy_(work.weights.detach())
            if work.piece.staged:
                self._weights_out(subgroup, work.piece, slot)
            elif work.piece.stored:
                view(slot, work.piece.spans[WEIGHTS]).copy_(work.weights.detach())
        self.change.small.update(small)

    def _weights_out(self, subgroup: Subgroup, piece: Piece, slot: torch.Tensor) -> None:
        """Bring weights to the parameter; a device may use the slot until `settle`."""
        param = self._swapped.param_of(piece)
        up = self._up.get(param.computes_on)
        if up is None or param.param_store is not None:
            weights_out(subgroup, piece, param, slot)
            return
        outside, weights = _outside(subgroup, piece, param, slot), view(slot, piece.spans[WEIGHTS])
        assert outside is not None
        if weights.dtype != outside.dtype:  # torch would round into memory that is not locked
            weights = _grad_in(subgroup, piece, slot).copy_(weights)
        up.copy(outside, weights)

    def _gradient(
        self, subgroup: Subgroup, piece: Piece, param: SwappedParam, slot: torch.Tensor
    ) -> torch.Tensor:
        """The piece's gradient, in the dtype of the step."""
        given, factor = self._given(piece), self._factor
        if given is None or given.device in self._down:
            gradient = _grad_in(subgroup, piece, slot)
            on_drive = self._swapped.gradients
            if given is None and on_drive is not None and on_drive.is_zero(piece):
                gradient.zero_()  # it has no bytes there
            if factor is not None:
                gradient.mul_(factor)
        else:
            gradient = given
            if self._swapped.device is None and not given.is_cpu:
                gradient = devices.on_host(given)
            if param.param_store is not None:  # backward saw no strides where it was on the drive
                gradient = laid(gradient, piece.grad_strides)
            if factor is not None:
                gradient = gradient * factor
        if gradient.dtype == piece.step_dtype:
            return gradient
        if piece.scratch is None:
            return gradient.to(piece.step_dtype)
        wide = view(slot, piece.scratch._replace(strides=strides_of(gradient)), subgroup.nbytes)
        wide.copy_(gradient)
        return wide


class StateLoad:
    """Takes over states of a state dict by parameter number; None for one without.

    `turns` are for the pipeline, `change` is what is to be committed.
    """

    def __init__(self, swapped: Swapped, states: Mapping[int, dict[str, Any] | None]) -> None:
        self._swapped = swapped
        self._states = states
        self.turns: list[SlotTurn] = []
        self.change = Change()
        self._resident = [(s, swapped.resident[id(s)]) for s in swapped.subgroups if s.resident]
        for subgroup in swapped.subgroups:
            if subgroup.resident:
                continue
            lent = [piece for piece in subgroup.pieces if piece.lent]
            self.turns.append(
                SlotTurn(
                    swapped.files.weights(subgroup, lent)
                    + swapped.rounded_moves(subgroup, subgroup.pieces),
                    functools.partial(self._take_over, subgroup),
                    swapped.files.verifying(lent, []),
                    functools.partial(self._seal, subgroup),
                )
            )
            self.change.moved.update(p.number for p in subgroup.pieces if p.spans)

    def load_resident(self) -> None:
        for subgroup, memory in self._resident:
            reads = self._swapped.rounded_moves(subgroup, subgroup.pieces)
            move_all(self._swapped.handles, memory, reads, writing=False)
            self._take_over(subgroup, memory)

    def follow_resident_masters(self) -> None:
        """Bring the master weights that stay in memory into their parameters."""
        for subgroup, slot in self._resident:
            stored = [piece for piece in subgroup.pieces if piece.stored]
            writes = self._swapped.to_params(subgroup, stored, slot)
            move_all(self._swapped.handles, slot, writes, writing=True)

    def _take_over(self, subgroup: Subgroup, slot: torch.Tensor) -> list[FileSpan]:
        for piece in subgroup.pieces:
            entry = self._states.get(piece.param)
            if piece.stored:
                self._take_weights(subgroup, piece, entry, slot)
            self.change.begun[piece.number] = bool(entry)
            self.change.small[piece.number] = self._take_state(piece, entry, slot) if entry else {}
        # Both sorts move, or a piece without state would be left behind by its weights.
        return self._swapped.files.writes(subgroup, subgroup.pieces, self.change.begun)

    def _seal(self, subgroup: Subgroup, slot: torch.Tensor) -> None:
        for piece in subgroup.pieces:
            begun = self.change.begun[piece.number]
            self.change.sums.update(self._swapped.files.sum_up(slot, [piece], begun))

    def _take_weights(
        self, subgroup: Subgroup, piece: Piece, entry: dict[str, Any] | None, slot: torch.Tensor
    ) -> None:
        param = self._swapped.param_of(piece)
        master = (entry or {}).get(MASTER)
        # A class in memory rounds it when it loads, and leaves it behind when it steps.
        rounded = 0 if param.dtype == piece.step_dtype else param.dtype.itemsize
        if master is not None and master.dtype.itemsize > rounded:
            given = part(local(master), piece.start, piece.stop, piece.shape)
            view(slot, piece.spans[WEIGHTS]).copy_(given)
        else:
            weights_in(subgroup, piece, param, slot)

    def _take_state(
        self, piece: Piece, entry: dict[str, Any], slot: torch.Tensor
    ) -> dict[str, Any]:
        """Copy swapped state into the slot; returns the rest."""
        small: dict[str, Any] = {}
        strides = self.change.strides[piece.number] = {}
        for name, value in entry.items():
            if name in piece.spans:
                kind = next(kind for kind in piece.kinds if kind.name == name)
                given = local(value)
                if kind.shape is None:
                    given = part(given, piece.start, piece.stop, piece.shape)
                strides[name] = strides_of(given)
                view(slot, piece.spans[name]._replace(strides=strides[name])).copy_(given)
            elif name != MASTER and isinstance(value, torch.Tensor):
                given = local(value).detach()
                if given.shape == self._swapped.param_of(piece).shape:  # of an option set later
                    given = part(given, piece.start, piece.stop, piece.shape)
                small[name] = given.clone()
            elif name != MASTER:
                small[name] = value
        return small
