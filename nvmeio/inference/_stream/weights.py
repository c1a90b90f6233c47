"""Reads a stream's weights and shows them: units, single weights, rows.

`Weights` keeps the units of the stream's window: their memory, reads, checks, and what shows them.
Rows of an embedding that stays in its file come by themselves: those that a pass asks for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from nvmeio._formats.safetensors.open_set import SafetensorsSet
from nvmeio._io.drives import DriveHandles
from nvmeio._residency.reader import Fill, Reader
from nvmeio._residency.window import Keeper
from nvmeio._threads.closing import collect, do_all
from nvmeio.errors import RowsError, TransferError, counted, with_context
from nvmeio.inference._parallel.rank_reader import RankReader, SharedFill
from nvmeio.inference._plan.slot_layout import FileExtent, WeightPart
from nvmeio.inference._plan.units import Unit
from nvmeio.inference._stream import stand_ins
from nvmeio.inference._stream.packed_weights import Packed
from nvmeio.inference._stream.slots import Conversions, SlotPools, WeightSlot


class Resources(NamedTuple):
    """The resources that opening a stream makes and closing releases.

    It closes a model that is dropped, so nothing in it may lead to the model (as a slot does, by
    its unit and the modules that show it): the model would never go.
    """

    handles: DriveHandles
    checkpoint: SafetensorsSet
    memory: SlotPools
    reader: Reader

    def close(self) -> None:
        do_all((self.reader.stop, self.memory.close, self.checkpoint.close, self.handles.close))


class Weights(Keeper[Unit, WeightSlot]):
    """Memory and reads of a stream's units, for its window."""

    def __init__(self, resources: Resources, units: Sequence[Unit], trainable: bool) -> None:
        self._resources = resources
        self._memory = resources.memory
        self._checkpoint = resources.checkpoint
        reader = resources.reader
        self._ranks = reader if isinstance(reader, RankReader) else None
        self._numbers = {unit: number for number, unit in enumerate(units)}
        self.beside_bytes = 0  # read past the queue
        self._trainable = trainable
        self._converted: WeightSlot | None = None  # that was bound last, if the room is not shared
        # Storages that may go while autograd refers to them, by address: the unit, and whether it
        # is the converted one.
        self.places: dict[int, tuple[Unit, bool]] = {}

    def take(self, unit: Unit) -> WeightSlot | None:
        return self._memory.take(unit, unit.resident)

    def fill(self, slot: WeightSlot) -> Fill:
        unit = slot.unit
        if self._ranks is not None and unit in self._numbers:
            return self._memory.fill_together(slot, self._numbers[unit], self._ranks)
        return self._memory.fill(slot, unit.layout.reads, self._checkpoint.files)

    def check(self, slot: WeightSlot) -> None:
        """Raise if a file was written to."""
        for index in slot.files:
            self._checkpoint.check(index, f"layer {slot.unit.name!r}")
        if isinstance(slot.fill, SharedFill):
            slot.event = slot.fill.event

    def explain(self, slot: WeightSlot, error: BaseException) -> BaseException:
        """Add the names of the tensors to an error."""
        unit, at = slot.unit, None if slot.fill is None else slot.fill.failed_at
        if not isinstance(error, TransferError):
            return error
        names = unit.name if at is None else stand_ins.names_in(unit, at.at, at.memory.nbytes)
        return with_context(error, f"weights {names} of {unit.name}")

    def bind(self, slot: WeightSlot) -> None:
        """Show the weights, converted where that is needed."""
        if self._trainable:
            stand_ins.check_frozen(slot.unit.targets)
            self._put_away_converted(slot)
        self._memory.ready(slot)
        slot.tensors = self._memory.tensors(slot)
        if not slot.unit.as_stored:
            self._memory.converted(slot)
        if self._trainable:
            self._note_places(slot)
        slot.shown = stand_ins.install(slot.unit.targets, slot.tensors)
        slot.storages = {slot.memory.untyped_storage().data_ptr()}
        if not slot.unit.as_stored:
            kept = [tensor for tensor in slot.shown if not stand_ins.is_meta(tensor)]
            slot.storages |= {tensor.untyped_storage().data_ptr() for tensor in kept}

    def unbind(self, slot: WeightSlot) -> None:
        """Show nothing; the room for conversions is the next one's."""
        if slot.shown:
            stand_ins.uninstall(slot.unit.targets)
        slot.tensors, slot.shown, slot.conversions = [], [], Conversions()
        if self._trainable:
            for memory in (slot.memory, slot.work):
                if memory is not None:
                    self.places.pop(memory.untyped_storage().data_ptr(), None)
        slot.work = None
        self._memory.let_go(slot)

    def _put_away_converted(self, slot: WeightSlot) -> None:
        if not slot.unit.converted_bytes:
            return
        before, self._converted = self._converted, slot
        if before is not None and before is not slot and before.bound and not before.holds:
            before.bound = False
            self.unbind(before)

    def _note_places(self, slot: WeightSlot) -> None:
        if not slot.unit.resident:
            self.places[slot.memory.untyped_storage().data_ptr()] = (slot.unit, False)
        if slot.work is not None:
            self.places[slot.work.untyped_storage().data_ptr()] = (slot.unit, True)

    def rest(self, slot: WeightSlot) -> bool:
        """Release streamed units; resident ones remain in place, unless all share their room."""
        if slot.bound and not self.settled(slot):
            slot.bound = False
            self.unbind(slot)
        return not slot.unit.resident

    def settled(self, slot: WeightSlot) -> bool:
        """Whether a unit stays in place between its uses."""
        unit = slot.unit
        return slot.bound and unit.resident and not unit.converted_bytes

    def give_back(self, slot: WeightSlot) -> None:
        self._memory.give_back(slot)

    def take_anyway(self, unit: Unit) -> WeightSlot:
        """Memory beside what somebody keeps: raises where so much may be kept as backward does."""
        if self._trainable:
            collect()  # memory held by a tensor in a cycle
        slot = self._memory.take(unit, unit.resident, beyond=not self._trainable)
        if slot is None:
            raise MemoryError(
                f"there is no room for {unit.name} in the window: its memory is held by layers "
                "that run now, or by references to weights. Drop these references, raise "
                "resident_bytes, or give a larger window="
            ) from self._memory.refused
        return slot

    # Past the queue, for somebody who waits

    def alone(self, unit: Unit, number: int) -> WeightSlot:
        """A slot for a copy of one weight, in memory of its own that lasts as long as it.

        It lies at the same offset in its page as in the window: kernels give other last bits at
        others.
        """
        alone = Unit(unit.name)
        alone.weights = [unit.weights[number]._replace(compute=None)]
        alone.plan(self._checkpoint, unit.own_alignment)
        return self._memory.apart(alone)


class EmbeddingRows:
    """Reads rows, and counts them, their bytes and the time that reading took."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.number = 0
        self.nbytes = 0
        self.waited_s = 0.0

    def read(
        self, resources: Resources, unit: Unit, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of a unit's only weight, each once, and for each id its number among them.

        IndexError if an id is out of range, as of torch's own embedding.
        """
        weight = unit.weights[0]
        unique, places = torch.unique(ids.reshape(-1).cpu(), return_inverse=True)
        rows = weight.shape[0]
        if unique.numel() and not 0 <= int(unique[0]) <= int(unique[-1]) < rows:
            raise IndexError(
                f"index out of range: {weight.name!r} has {counted(rows, 'row')}, ids are "
                f"{int(unique[0])} to {int(unique[-1])}"
            )
        began = time.perf_counter()
        parts = [self._part(resources, unit, part, unique) for part in weight.parts]
        self.number += len(unique)
        self.nbytes += sum(part.nbytes for part in parts)
        self.waited_s += time.perf_counter() - began
        found = parts[0]
        if weight.quantised is not None:
            found = Packed.of(weight, parts).widened()
        return found.to(self._device, weight.dtype), places.view(ids.shape).to(self._device)

    def _part(
        self, resources: Resources, unit: Unit, part: WeightPart, unique: torch.Tensor
    ) -> torch.Tensor:
        """Rows of a part that a weight is read from."""
        extent, width = part.extents[0], part.shape[1]
        offsets = extent.offset + unique * (width * part.dtype.itemsize)
        found = torch.empty(len(unique), width, dtype=part.dtype, device="cpu")
        checkpoint = resources.checkpoint
        chosen: Any = slice(None)
        what = f"weight {unit.weights[0].name!r} of {unit.name}"
        try:
            for file, chosen in _by_file(checkpoint, extent, offsets):
                source, rows = checkpoint.files[file], found[chosen]
                resources.handles.of(source).sync_gather(rows, source, file_offsets=offsets[chosen])
                found[chosen] = rows
                checkpoint.check(file, what)
        except TransferError as failed:
            if isinstance(failed, RowsError):
                what = f"row {int(unique[chosen][failed.row])} of {what}"
            raise with_context(failed, what) from failed
        return found


def _by_file(
    checkpoint: SafetensorsSet, extent: FileExtent, offsets: torch.Tensor
) -> Iterator[tuple[int, Any]]:
    """Which rows, as an index, are read from which file. A row lies where it begins."""
    spans = checkpoint.spans(extent.file, extent.offset, extent.offset + extent.nbytes)
    if len(spans) == 1:
        yield spans[0].file, slice(None)
        return
    starts = torch.tensor([span.start for span in spans])
    files = torch.tensor([span.file for span in spans])
    of_rows = files[torch.searchsorted(starts, offsets, right=True) - 1]
    for file in torch.unique(of_rows).tolist():
        yield file, torch.nonzero(of_rows == file).reshape(-1)
