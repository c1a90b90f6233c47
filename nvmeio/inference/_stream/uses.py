"""The state of an open stream: the users of weights, and the weights in memory.

All of it belongs to one thread (`OwnerThread`). Callers take turns (`turns`) and get
claims, so that a unit is released when its use is interrupted. After a failure nothing is in
flight, and reads on their way are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import torch

from nvmeio._memory import devices
from nvmeio._residency.order import Cyclic, Remembered
from nvmeio._residency.window import Window
from nvmeio._threads.closing import on_error
from nvmeio._threads.owner import Claim, OwnerThread
from nvmeio.errors import ClosedError, DeviceTimeoutError
from nvmeio.inference._plan.units import Partition, Unit
from nvmeio.inference._stream import stand_ins
from nvmeio.inference._stream.lockstep import Lockstep
from nvmeio.inference._stream.slots import WeightSlot
from nvmeio.inference._stream.turns import CLOSED, Turns, Waiting
from nvmeio.inference._stream.weights import Resources, Weights


class GradMode(NamedTuple):
    """Whether a caller's autograd records a graph for backward, and whether it is in backward."""

    recording: bool
    backward: bool


class Uses:
    """The requests of a model's callers to the thread that owns its weights.

    `trainable`: backward comes, and needs them again.
    """

    def __init__(
        self, owner: OwnerThread, resources: Resources, partition: Partition, trainable: bool
    ) -> None:
        self._owner = owner
        self.resources = resources
        self._fixed, self._units = partition
        self._keeper = Weights(resources, self._units, trainable)
        streamed = [unit for unit in self._units if unit.modules or unit.resident]
        self._order: Cyclic[Unit] | Remembered[Unit] = (
            Remembered(streamed, lambda unit: not unit.resident) if trainable else Cyclic(streamed)
        )
        self._lent: Unit | None = None  # to backward, the last
        self._window: Window[Unit, WeightSlot] = Window(resources.reader, self._keeper, self._order)
        self.turns = Turns(owner)
        self._use: tuple[WeightSlot, Any] | None = (
            None  # the unit that is used, on which CUDA stream
        )
        self._kept: WeightSlot | None = None  # used, and held for the other micro-batches
        self._fixed_slot: WeightSlot | None = None
        self._fixed_shown: list[torch.Tensor] = []
        self._settled: dict[Unit, list[torch.Tensor]] = {}  # and what their modules show
        self.units_used = 0

    def open(self) -> None:
        """Read the weights that are always in memory."""
        if not self._fixed.weights:
            return
        memory = self.resources.memory
        slot = memory.take(self._fixed, True)
        if slot is None:
            raise RuntimeError(f"no slot for {self._fixed!r}")
        self._window.read_now(slot)
        stream = devices.stream_here(memory.device)
        with devices.on_stream(stream):
            memory.ready(slot)
            shown = stand_ins.install(self._fixed.targets, memory.tensors(slot, keep=True))
            slot.conversions.make()
            devices.now(memory.device).wait()  # for streams of any thread
        self._fixed_slot, self._fixed_shown = slot, shown

    def close(self) -> None:
        """Take all weights away from the modules."""
        self._settled.clear()
        self._use = self._kept = None
        self.resources.memory.settle()  # streams that had no need to ask may still compute
        try:
            self._window.drop_all()
            stand_ins.uninstall(self._fixed.targets)
            if self._fixed_slot is not None:
                self.resources.memory.give_back(self._fixed_slot)
        except DeviceTimeoutError:  # whose copies may still come
            stand_ins.uninstall(self._fixed.targets)
        self.turns.close()

    # --- what stays in place --------------------------------------------------------------------

    def settled_use(self, unit: Unit, caller: int) -> Claim | None:
        """Use a unit that stays in place, in the caller's thread; None: ask the owner."""
        shared = self.turns.shared_use(caller)  # first: while it is had, nothing is taken away
        try:
            shown = self._settled.get(unit)
            if shared is None or shown is None or not stand_ins.shows(unit.targets, shown):
                return None
            shared.times[0] += 1
            return shared.claim
        finally:
            del shared  # the traceback of an interrupt must not keep a close waiting

    def _settle(self, slot: WeightSlot, caller: Hashable) -> None:
        # Streams of others, which do not ask, would not wait for copies that are on their way.
        stays = self._keeper.settled(slot) and self.resources.memory.arrived(slot)
        if stays and not isinstance(caller, Lockstep) and self.turns.share(caller):
            self._settled[slot.unit] = slot.shown

    def bar(self) -> Claim:
        """Have users of resident units ask the owner, for as long as the claim lives."""
        barred = self.turns.bar()
        self._settled.clear()
        return barred

    # --- turns ----------------------------------------------------------------------------------

    def enter(
        self,
        waited: Waiting | None,
        unit: Unit,
        caller: Hashable,
        cuda_stream: Any,
        grad_mode: GradMode,
    ) -> Claim | Waiting:
        """Have a unit's weights in place; `waited` is what an earlier call returned.

        `caller` is a thread's number, or its lockstep; `cuda_stream` is current where it computes,
        if that is a GPU.
        """
        queued = self.turns.take(caller, waited)
        if queued is not None:
            return queued
        try:
            with devices.on_stream(cuda_stream):
                slot = self._bring(unit, grad_mode)
                if cuda_stream is not None:
                    self.resources.memory.ready(slot)  # it may have been bound for another stream
            self._settle(slot, caller)
        except BaseException:
            try:
                self._give_up()
            finally:
                self._end_turn(caller)
            raise
        use = self._use = (slot, cuda_stream)
        self.units_used += 1
        return self._owner.claim(self._leave, use, caller)

    def as_read(self, unit: Unit) -> set[int]:
        """The storages' addresses of the weights that a unit shows; none if it shows nothing.

        Raises if the call that uses it has changed that. In the thread that has the turn, and at
        the call's end. Weights that do not stay leave their modules now: otherwise a caller might
        take one before the owner gives the memory away.
        """
        slot = self._window.slot(unit)
        if slot is None or not slot.shown:
            return set()
        stand_ins.check_as_read(unit.targets, slot.shown)
        if not (self._order.stays or self._keeper.settled(slot)):
            stand_ins.uninstall(unit.targets)
            slot.shown = []
            if torch.is_autocast_enabled(self.resources.memory.device.type):
                torch.clear_autocast_cache()  # keeps weights, and copies, to the end of its block
        return slot.storages

    def convert(self) -> None:
        """Convert the weights in use. In the thread that uses them, and has the turn."""
        if self._use is not None:
            self._use[0].conversions.make()

    def hold(self, waited: Waiting | None, lockstep: Lockstep[Any]) -> Claim | Waiting:
        """Give the turn to micro-batches, until the claim ends."""
        queued = self.turns.take(lockstep, waited)
        return self._owner.claim(self._end_lockstep, lockstep) if queued is None else queued

    def _end_turn(self, caller: Hashable) -> None:
        if not isinstance(caller, Lockstep):
            self.turns.end(caller)

    def _end_lockstep(self, lockstep: Lockstep[Any]) -> None:
        if not self.turns.has(lockstep):
            return
        self._put_away(None)
        if not self.turns.closed:
            self._window.look_ahead()
        self.turns.end(lockstep)

    # --- units ----------------------------------------------------------------------------------

    def _bring(self, unit: Unit, grad_mode: GradMode) -> WeightSlot:
        self._put_away(unit)
        slot = self._window.slot(unit)
        if slot is not None and slot.shown:  # settled
            stand_ins.check(unit.targets, slot.shown)
        elif slot is not None and slot.bound:  # kept for micro-batches
            slot.shown = stand_ins.install(unit.targets, slot.tensors)
        if slot is None or not slot.bound or self._order.stays:
            slot = self._need(unit, grad_mode)
        slot.holds += slot is not self._kept
        self._kept = None
        return slot

    def _need(self, unit: Unit, grad_mode: GradMode) -> WeightSlot:
        if isinstance(self._order, Remembered):
            self._order.recording = grad_mode.recording
        self._lent = unit if grad_mode.backward else None
        return self._window.need(unit, backward=grad_mode.backward)

    # --- what backward needs again --------------------------------------------------------------

    def place_at(self, address: int) -> tuple[Unit, bool] | None:
        """The unit that has a storage of this address now, and whether it is of conversions."""
        return self._keeper.places.get(address)

    def lent(self, unit: Unit, converted: bool) -> torch.Tensor | None:
        """`lend` of a unit that is in memory; None: ask the owner. From any thread."""
        slot = self._window.slot(unit)
        shown = [] if slot is None else slot.shown
        if slot is None or not shown:
            return None
        self.resources.memory.ready(slot)
        memory, conversions = slot.work if converted else slot.memory, slot.conversions
        if memory is None or slot.shown is not shown:  # it may go at any moment, and come again
            return None
        conversions.make()
        return memory

    def note_lent(self, unit: Unit) -> None:
        if self._lent is not unit and not self.turns.closed:
            self._lent = unit
            self._window.note(unit, True)

    def lend(
        self,
        waited: Waiting | None,
        unit: Unit,
        converted: bool,
        caller: Hashable,
        cuda_stream: Any,
        grad_mode: GradMode,
    ) -> Callable[[], torch.Tensor] | Waiting:
        """A function that makes the memory of a unit, which keeps its bytes with its storage."""
        had = self.turns.has(caller)  # backward within a forward
        queued = self.turns.take(caller, waited)
        if queued is not None:
            return queued
        try:
            with on_error(self._give_up), devices.on_stream(cuda_stream):
                slot = self._need(unit, grad_mode)
                self.resources.memory.ready(slot)
            return partial(slot.conversions.make, slot.work if converted else slot.memory)
        finally:
            if not had:
                self._end_turn(caller)

    def _leave(self, use: tuple[WeightSlot, Any], caller: Hashable) -> None:
        if self._use is not use:
            return  # the turn is somebody else's, or the same thread uses another unit by now
        self._use = None
        slot, cuda_stream = use
        try:
            with devices.on_stream(cuda_stream):
                if isinstance(caller, Lockstep) and caller.shared:
                    self._kept = slot
                else:
                    self._window.let_go([slot])
                self._window.look_ahead()
        except BaseException:
            self._give_up()
            raise
        finally:
            self._end_turn(caller)

    def _put_away(self, unit: Unit | None) -> None:
        """Release another unit: kept for micro-batches, or left by a pass that was interrupted."""
        left, self._use = self._use, None
        if left is not None:
            self._window.let_go([left[0]])
        if self._kept is not None and self._kept.unit is not unit:
            kept, self._kept = self._kept, None
            self._window.let_go([kept])

    def _give_up(self) -> None:
        self._use = self._kept = None
        for slot in self._window.there:
            slot.holds = 0
            if not self._keeper.settled(slot):
                self._window.drop(slot.unit)
        self._order.forget()

    # --- one weight -----------------------------------------------------------------------------

    def weight(self, unit: Unit, number: int, cuda_stream: Any) -> Callable[[], torch.Tensor]:
        """A function that copies one weight: from the one that stays, or else from the drive."""
        if self.turns.closed:
            raise ClosedError(CLOSED)
        memory = self.resources.memory
        with devices.on_stream(cuda_stream):
            alone = self._keeper.alone(unit, number)
            if unit.resident and not (unit.converted_bytes or unit.weights[number].compute):
                slot = self._window.need(unit, computing=False)
                memory.ready(slot)
                copy = memory.tensors(alone, keep=True)[0]
                return partial(alone.conversions.make, copy.copy_(slot.tensors[number]))
            self._keeper.beside_bytes += self._window.read_now(alone)
            if alone.event is not None:
                alone.event.wait()  # its host memory goes
            memory.ready(alone)
            return partial(alone.conversions.make, memory.tensors(alone, keep=True)[0])

    # --- what it has done -----------------------------------------------------------------------

    def check_fixed(self) -> None:
        """Raise if something was put in the place of a weight that is always there."""
        stand_ins.check(self._fixed.targets, self._fixed_shown)

    def shows_fixed(self) -> bool:
        """Whether the weights that are always there are in their places. From any thread."""
        return stand_ins.shows(self._fixed.targets, self._fixed_shown)

    def check_fixed_frozen(self) -> None:
        """Raise if gradients are requested of a weight that is always there.

        It would be trained in memory alone, and is in no state dict. From any thread.
        """
        stand_ins.check_frozen(self._fixed.targets, self._fixed_shown)

    def counts(self) -> dict[str, Any]:
        window = self._window
        beside_bytes = self._keeper.beside_bytes + self.resources.reader.served_bytes
        return {
            "bytes_read": window.bytes_read + beside_bytes,
            "units_read": window.units_read,
            "units_used": self.units_used + self.turns.shared_count,
            "mispredicted": window.mispredicted,
            "dropped": window.dropped,
            "waited_s": window.waited_s,
        }
