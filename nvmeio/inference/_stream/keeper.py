"""Who keeps a stream's units for its window: their memory, reads, checks, what shows them."""

from __future__ import annotations

import gc
from collections.abc import Sequence

from nvmeio._residency.reader import Fill
from nvmeio._residency.window import Keeper
from nvmeio.errors import TransferError, with_context
from nvmeio.inference._plan.units import Unit
from nvmeio.inference._ranks.rank_reader import RankReader, SharedFill
from nvmeio.inference._stream.binding import check_frozen, install, names_in, uninstall
from nvmeio.inference._stream.resources import Resources
from nvmeio.inference._stream.slots import Slot


class Weights(Keeper[Unit, Slot]):
    """Memory and reads of a stream's units, for its window."""

    def __init__(self, resources: Resources, units: Sequence[Unit], trainable: bool) -> None:
        self._memory = resources.memory
        self._checkpoint = resources.checkpoint
        reader = resources.reader
        self._ranks = reader if isinstance(reader, RankReader) else None
        self._numbers = {unit: number for number, unit in enumerate(units)}
        self.dense = False
        self._trainable = trainable
        self._converted: Slot | None = None  # that was bound last, if the room is not shared
        # Where what goes from under autograd lies now: by the address of its storage, which unit
        # it is of, and whether it is converted.
        self.places: dict[int, tuple[Unit, bool]] = {}

    def take(self, unit: Unit) -> Slot | None:
        """A slot, of what stays or of the window."""
        return self._memory.take(unit, unit.resident)

    def fill(self, slot: Slot) -> Fill:
        """Everything but experts; these too where the last token needed most of them.

        With several ranks, whose tokens differ, never: each reads those that it needs.
        """
        unit = slot.unit
        if self._ranks is not None and unit in self._numbers:
            return self._memory.fill_together(slot, self._numbers[unit], self._ranks)
        reads = unit.layout.reads
        if self.dense and unit.experts is not None:
            reads += unit.layout.all_experts
            slot.experts = bytearray(b"\1" * unit.experts.number)
        return self._memory.fill(slot, reads, self._checkpoint.files)

    def check(self, slot: Slot) -> None:
        """Raise if a file was written to."""
        for index in slot.files:
            self._checkpoint.check(index, f"layer {slot.unit.name!r}")
        if isinstance(slot.fill, SharedFill):
            slot.event = slot.fill.event

    def explain(self, slot: Slot, error: BaseException) -> BaseException:
        """With the names of the tensors."""
        unit, at = slot.unit, None if slot.fill is None else slot.fill.failed_at
        if not isinstance(error, TransferError):
            return error
        names = unit.name if at is None else names_in(unit, at.at, at.memory.nbytes)
        return with_context(error, f"weights {names} of {unit.name}")

    def bind(self, slot: Slot) -> None:
        """Show the weights, converted where that is needed."""
        if self._trainable:
            check_frozen(slot.unit.targets)
            self._put_away_converted(slot)
        self._memory.ready(slot)
        slot.tensors = self._memory.tensors(slot)
        self._memory.converted(slot)
        if self._trainable:
            self._note_places(slot)
        slot.shown = install(slot.unit.targets, slot.tensors)

    def unbind(self, slot: Slot) -> None:
        """Show nothing; the room for conversions is the next one's."""
        uninstall(slot.unit.targets)
        slot.tensors, slot.shown = [], []
        if self._trainable:
            for memory in (slot.memory, slot.work):
                if memory is not None:
                    self.places.pop(memory.untyped_storage().data_ptr(), None)
            slot.work = None
        self._memory.let_go(slot)

    def _put_away_converted(self, slot: Slot) -> None:
        if not slot.unit.converted_bytes:
            return
        before, self._converted = self._converted, slot
        if before is not None and before is not slot and before.bound and not before.holds:
            before.bound = False
            self.unbind(before)

    def _note_places(self, slot: Slot) -> None:
        if not slot.unit.resident:
            self.places[slot.memory.untyped_storage().data_ptr()] = (slot.unit, False)
        if slot.work is not None:
            self.places[slot.work.untyped_storage().data_ptr()] = (slot.unit, True)

    def rest(self, slot: Slot) -> bool:
        """What streams goes. What stays remains in place, unless it is in room that all share.

        Where backward comes, all stays until there is need of its room.
        """
        if self._trainable:
            return False
        if slot.bound and not self.settled(slot):
            slot.bound = False
            self.unbind(slot)
        return not slot.unit.resident

    def settled(self, slot: Slot) -> bool:
        """Whether a unit stays in place between its uses."""
        unit = slot.unit
        return slot.bound and unit.resident and not unit.converted_bytes and unit.experts is None

    def give_back(self, slot: Slot) -> None:
        """To its pool."""
        self._memory.give_back(slot)

    def take_anyway(self, unit: Unit) -> Slot:
        """Cannot be, the budget was shared out for this; unless tensors of others keep memory."""
        if not self._trainable:
            raise RuntimeError(f"no slot for {unit!r}")
        gc.collect()  # what is held by a tensor in a cycle
        slot = self.take(unit)
        if slot is None:
            raise MemoryError(
                f"there is no room for {unit.name} in the window: its memory is held by layers "
                "that run now, or by tensors over weights that somebody keeps. Let go of these, "
                "raise resident_bytes, or give a larger window="
            ) from self._memory.refused
        return slot
