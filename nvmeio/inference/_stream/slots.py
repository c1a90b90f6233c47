"""The memory of weights: slots leased from page-locked pools, and their content.

A slot is a lease of a `PinnedPool`, as long as its unit is needed. For another device than the CPU
it has a twin of the same size there, filled chunk by chunk on a stream of its own as the chunks
arrive, and the lease is only the way in. If backward follows, memory in use is lent: it is used
again once the last tensor over it is gone.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from nvmeio import buffers
from nvmeio._memory import devices
from nvmeio._memory.devices import Mark
from nvmeio._pages import PAGE_BYTES, TENSOR_ALIGNMENT, round_up
from nvmeio._residency import window
from nvmeio._residency.on_device import DevicePool
from nvmeio._residency.reader import Fill, WantedBytes
from nvmeio._residency.window import LentPool, laid_over, lease_now
from nvmeio._threads.closing import collect, on_error
from nvmeio.files import File
from nvmeio.inference._parallel.rank_reader import RankReader, SharedFill
from nvmeio.inference._plan.budget import Shares
from nvmeio.inference._plan.checksums import Arriving, verify
from nvmeio.inference._plan.quantization import dequantise
from nvmeio.inference._plan.slot_layout import Read, Weight
from nvmeio.inference._plan.units import Unit
from nvmeio.inference._stream.packed_weights import Packed
from nvmeio.pool import Lease, PinnedPool


class Conversions(dict[int, tuple[Any, ...]]):
    """Arguments of `_convert`: the weights that the computing thread has to convert first.

    The owner of the window does not: its OpenMP threads would spin beside those that compute.
    """

    def make(self, memory: Any = None) -> Any:
        """Make them; several threads may at once. An interrupt leaves the rest to the next use."""
        for conversion in tuple(self.values()):
            _convert(*conversion)
            self.pop(id(conversion), None)
        return memory


class WeightSlot(window.Slot[Unit]):
    """The memory of a unit of weights.

    Attributes:
        host: Page-locked memory, as long as `Unit.layout` says.
        memory: The bytes on the device that computes; `host` itself on a CPU.
        files: Indices of the files that its reads are of.
        tensors: The weights, while they are bound.
        shown: The tensors that the modules show, for each target, while they are bound.
        storages: Addresses of the memory that it lies in.
        conversions: The conversions that are still to be made.
        work: The memory of converted weights, if they have their own.
        streams: On a GPU: those that compute with the weights since they were bound.
        used: On a GPU: when streams of earlier uses are done with them.
    """

    def __init__(
        self, unit: Unit, lease: Lease | None, host: torch.Tensor, memory: torch.Tensor
    ) -> None:
        super().__init__(unit, host, memory)
        self.lease = lease
        self.files: set[int] = set()
        self.event: Mark | None = None  # on a GPU, once all copies were begun: when they are made
        self.converted: Mark | None = None  # and when what is bound is converted
        self.streams: list[Any] = []
        self.used: list[Mark] = []
        self.tensors: list[Any] = []
        self.shown: list[torch.Tensor] = []
        self.storages: set[int] = set()
        self.conversions = Conversions()
        self.work: torch.Tensor | None = None


class _WorkRoom:
    """Room for converted weights, lent to each unit until the last tensor over it is gone.

    `copies`, on a GPU, comes between what streams do there. Without `lent` there is one place for
    all units there.
    """

    def __init__(
        self, nbytes: int, device: torch.device, copies: devices.Beside | None, lent: bool
    ) -> None:
        self._device = device
        self._copies = copies
        self._within_budget = lent
        self._host: LentPool | None = None
        self._there: DevicePool | None = None
        self._shared: torch.Tensor | None = None
        self._used: list[Mark] = []  # of shared memory: marks of its former users
        if copies is None:
            self._host = LentPool(nbytes)
        elif lent:
            self._there = DevicePool(device, nbytes, copies)
        else:
            self._shared = devices.empty(nbytes, device)
            self._used = [devices.now(device)]  # by the former user of this memory

    def take(self, slot: WeightSlot) -> torch.Tensor:
        """Room that this thread may convert a unit's weights into from now on."""
        if self._shared is not None:
            for mark in self._used:
                devices.come_after(devices.stream_here(self._device), mark)
            return self._shared
        memory = self._lend(slot.unit)
        if memory is None:
            collect()  # memory held by a tensor in a cycle
            memory = self._lend(slot.unit)
        if memory is None:
            raise MemoryError(
                f"there is no room to convert the weights of {slot.unit.name}: references to the "
                "weights of another layer hold it. Drop these references, or pack the "
                "model in the dtype in which it computes"
            ) from (None if self._there is None else self._there.refused)
        if self._copies is not None:
            self._copies.precede()  # which follows its former user
            devices.record_use(memory, devices.stream_here(self._device))
        slot.work = memory
        return memory

    def _lend(self, unit: Unit) -> torch.Tensor | None:
        if self._there is not None:
            self._there.refused = None
            return self._there.take(unit.converted_bytes)
        assert self._host is not None
        lent = self._host.take(unit, unit.converted_bytes)
        if lent is None and not self._within_budget:
            lent = self._host.take_beyond(unit, unit.converted_bytes)
        return None if lent is None else lent.memory

    def used_by(self, stream: Any) -> None:
        """Note that a stream works there from now on."""
        if self._there is not None:
            self._there.used_by(stream)

    def used_until(self, marks: Sequence[Mark]) -> None:
        """Note until when streams use the shared room."""
        if self._shared is not None:
            self._used = [*_not_done(self._used), *marks]

    def close(self) -> None:
        """Let go of it; tensors that are out stay valid."""
        self._shared = None
        if self._host is not None:
            self._host.close()


class SlotPools:
    """The pools of one stream, for weights that are used on `device`.

    Streamed or converted weights keep their memory until the last tensor over it is gone, on a GPU
    with `lent` only: backward, a user's hook or a traceback may have one. MemoryError says how much
    memory there is.
    """

    def __init__(self, shares: Shares, device: torch.device, lent: bool = False) -> None:
        self.device = device
        self._resident: PinnedPool | None = None
        self._window: PinnedPool | None = None
        self._lent: LentPool | None = None  # of a CPU, in place of the window
        self._largest = shares.window // max(shares.layers, 1)  # unit of the window
        self._work: _WorkRoom | None = None
        # For resident units that a failure gave up: their place is kept for them. The pool has just
        # enough for all, and another order might cut it into pieces that are too small. By name:
        # see `Resources`.
        self._places: dict[str, tuple[Lease, torch.Tensor]] = {}
        # On a GPU: twins, and marks of the streams that may still be at work there.
        self._free: list[tuple[torch.Tensor, list[Mark]]] = []
        self._there: DevicePool | None = None  # of a GPU: the pool of lent memory
        # As `_places`, where backward may look at them.
        self._twins: dict[str, tuple[torch.Tensor, list[Mark]]] = {}
        self._out: dict[int, Lease] = {}  # outlive the slots of a model that is dropped
        on_gpu = device.type == "cuda"
        self._copies = devices.Beside(device, "weights") if on_gpu else None
        if lent and on_gpu:
            self._there = DevicePool(device, shares.window, self._copies)
        with on_error(self.close):
            if shares.resident:
                self._resident = PinnedPool(shares.resident)
            if shares.window and not on_gpu:
                self._lent = LentPool(shares.window)
            elif shares.window:
                self._window = PinnedPool(shares.window)
            if shares.work:
                self._work = _WorkRoom(shares.work, device, self._copies, lent)

    @property
    def locked(self) -> bool:
        pools = (self._resident, self._window, self._lent)
        return all(pool.locked for pool in pools if pool is not None)

    # Slots

    def take(self, unit: Unit, stays: bool, beyond: bool = False) -> WeightSlot | None:
        """A slot for a unit, or None where none is free now; on a CPU, `beyond` the budget then."""
        if self._copies is not None:
            devices.check_answers(self.device)
        if self._lent is not None and not stays:
            nbytes = unit.layout.nbytes
            # In like parts of the largest: layers whose sizes differ by pages leave no odd pieces.
            like = self._largest // (self._largest // nbytes)
            lent = self._lent.take(unit, like - like % PAGE_BYTES)
            lent = lent or (self._lent.take_beyond(unit, nbytes) if beyond else None)
            if lent is None:
                return None
            return WeightSlot(unit, None, lent.host[:nbytes], lent.memory[:nbytes])
        pool = self._resident if stays else self._window
        if pool is None:
            raise RuntimeError(f"no memory was set aside for {unit!r}")
        if unit.name in self._places:
            lease, host = self._places.pop(unit.name)
        else:
            memory: torch.Tensor | None = None
            if self._there is not None and not stays:
                memory = self._there.take(unit.layout.nbytes)
                if memory is None:
                    return None
            leased = lease_now(pool, unit.layout.nbytes)
            if leased is None:
                return None
            lease, host = leased
            self._out[id(lease)] = lease
            if memory is not None:
                return WeightSlot(unit, lease, host, memory)
        with on_error(self._give_back_host, unit, lease, host):  # the device has no room
            there = host if self._copies is None else self._twin(unit)
        return WeightSlot(unit, lease, host, there)

    def _give_back_host(self, unit: Unit, lease: Lease, host: torch.Tensor) -> None:
        if unit.resident:
            self._places[unit.name] = (lease, host)
        else:
            del self._out[id(lease)]
            lease.__exit__(None, None, None)

    def give_back(self, slot: WeightSlot) -> None:
        if self._copies is not None:
            # The mark of the copies out of the lease, not of the computation; or it was given up
            # halfway.
            (self._copies.mark() if slot.event is None else slot.event).wait()
            if self._there is None:
                # Work queued on the device still reads it; its next user waits for that.
                self._free.append((slot.memory, slot.used))
            elif slot.unit.resident:
                self._twins[slot.unit.name] = (slot.memory, slot.used)
        if slot.lease is None or (self._there is not None and not slot.unit.resident):
            slot.memory = slot.host.new_empty(0)
        if slot.lease is not None:
            self._give_back_host(slot.unit, slot.lease, slot.host)

    def apart(self, unit: Unit) -> WeightSlot:
        """A slot in memory of its own, which goes with the last tensor over it."""
        host = buffers.empty_aligned(unit.layout.nbytes, dtype=torch.uint8)
        if self._copies is None:
            return WeightSlot(unit, None, host, host)
        memory = devices.empty(unit.layout.nbytes, self.device)
        self._copies.follow()  # as for a twin
        return WeightSlot(unit, None, host, memory)

    def _twin(self, unit: Unit) -> torch.Tensor:
        assert self._copies is not None
        nbytes = unit.layout.nbytes
        fitting = [pair for pair in self._free if pair[0].nbytes >= nbytes]
        if unit.name in self._twins:
            found = self._twins.pop(unit.name)
        elif fitting:
            found = min(fitting, key=lambda pair: pair[0].nbytes)
            self._free = [pair for pair in self._free if pair is not found]
        else:
            twin = devices.empty(nbytes, self.device)
            # Its memory may still be read by work that was queued before it was freed.
            self._copies.follow()
            return twin
        for mark in found[1]:
            self._copies.after(mark)
        return found[0]

    # Filling

    def fill(self, slot: WeightSlot, reads: Sequence[Read], files: Sequence[File]) -> Fill:
        """The reads that fill a slot, followed by copies to the device."""
        host = slot.host
        wanted = [
            WantedBytes(files[number], start, host[at : at + end - start], at)
            for number, start, end, at in reads
        ]
        slot.files = {read.file for read in reads}
        sums = slot.unit.sums
        arriving = Arriving(sums, files) if sums else None
        copies = self._copies
        if copies is None:
            steps = () if arriving is None else (arriving.arrived, arriving.finished)
            return Fill(wanted, *steps)

        def arrived(chunk: WantedBytes) -> None:
            copies.copy(slot.memory[chunk.at : chunk.at + chunk.memory.nbytes], chunk.memory)
            if arriving is not None:
                arriving.arrived(chunk)

        def finished() -> None:
            slot.event = copies.mark()
            if arriving is not None:
                arriving.finished()

        return Fill(wanted, arrived, finished)

    def fill_together(self, slot: WeightSlot, number: int, ranks: RankReader) -> SharedFill:
        """`fill` with other ranks, each a part; checked and copied once all are there."""
        host, memory, copies = slot.host, slot.memory, self._copies  # not the slot: see `Resources`
        sums = slot.unit.sums

        def arrived() -> None:
            verify(host, sums, ranks.files)
            if copies is not None:
                copies.copy(memory, host)
                fill.event = copies.mark()

        fill = ranks.shared(number, host, arrived)
        slot.files = {read.file for read in ranks.own_reads(number)}
        return fill

    # Streams of a GPU. Nobody waits but they, for each other, and nothing of that depends on which
    # one is current when a unit goes: those that were let at it are remembered before they are
    # asked anything, so that a failure in between forgets none.

    def ready(self, slot: WeightSlot) -> None:
        """Order this thread's computation after copies and conversions; does not block."""
        if self._copies is None:
            return
        stream = devices.stream_here(self.device)
        if stream not in slot.streams:
            slot.streams.append(stream)
            for memory in (slot.memory, slot.work):
                # This memory goes with the last tensor over it; twins are kept until nothing
                # computes.
                goes = self._there is not None or slot.lease is None
                if memory is not None and memory.nbytes and goes:
                    devices.record_use(memory, stream)
        if self._there is not None:
            self._there.used_by(stream)
        if self._work is not None:
            self._work.used_by(stream)
        for mark in (slot.event, slot.converted):
            if mark is not None:
                devices.come_after(stream, mark)

    def converted(self, slot: WeightSlot) -> None:
        """Order its users after the conversions as well, which this thread has asked for."""
        if self._copies is not None and slot.unit.converted_bytes:
            slot.converted = devices.now(self.device)

    def arrived(self, slot: WeightSlot) -> bool:
        """Whether its copies are made, so that no stream has to wait for them."""
        return slot.event is None or slot.event.done()

    def let_go(self, slot: WeightSlot) -> None:
        """Note that its weights are not shown any more; streams may still read them."""
        if self._copies is None:
            return
        streams, slot.streams, slot.converted = slot.streams, [], None
        marks = [devices.asked_of(stream) for stream in streams]
        slot.used = _not_done(slot.used) + marks
        if self._work is not None and slot.unit.converted_bytes:
            self._work.used_until(marks)

    def settle(self) -> None:
        """Wait until nothing on the device is at work with weights.

        Streams that use what stays tell nobody. A device that failed is not told of here.
        """
        if self._copies is not None:
            with contextlib.suppress(RuntimeError):  # a device that failed stops computing
                devices.synchronize(self.device)

    # Tensors

    def tensors(self, slot: WeightSlot, keep: bool = False) -> list[Any]:
        """The weights of a unit whose reads are done, in the order of `Unit.weights`.

        They have the model's dtypes and shapes; those that modules compute with while packed are
        `Packed`. On a CPU `WeightSlot.conversions` are to be made before they are used. With
        `keep`, converted ones get memory of their own, instead of the room that all units share.
        """
        unit = slot.unit
        if unit.as_stored:
            return laid_over(slot.memory, unit.places)
        found: list[Any] = []
        at = 0
        room: torch.Tensor | None = None
        if unit.converted_bytes and not keep and self._work is not None:
            room = self._work.take(slot)
        for weight, parts in _weights_in(slot):
            if weight.compute is not None:
                found.append(Packed.of(weight, parts))
                continue
            if not weight.converted_bytes:
                found.append(parts[0] if weight.order is None else parts[0].permute(weight.order))
                continue
            memory, start = room, at
            if keep:
                memory, start = devices.empty(weight.converted_bytes, self.device), 0
            elif memory is None:
                raise RuntimeError(f"no room was set aside to convert {weight.name!r}")
            (out,) = laid_over(memory, [(start, weight.dtype, weight.shape, ())])
            at += round_up(weight.converted_bytes, TENSOR_ALIGNMENT)
            self._convert(slot, weight, parts, out)
            found.append(out)
        return found

    def _convert(self, slot: WeightSlot, *conversion: Any) -> None:
        """A device does it in the order of its requests; on a CPU, the computing thread does."""
        if self._copies is None:
            slot.conversions[id(conversion)] = conversion
        else:
            _convert(*conversion)

    @property
    def refused(self) -> BaseException | None:
        """The device's error if it had no memory for streamed weights."""
        return None if self._there is None else self._there.refused

    def close(self) -> None:
        """Let go of everything; a lease that is out keeps its own."""
        self.settle()
        for lease, _ in self._places.values():
            lease.__exit__(None, None, None)
        self._places.clear()
        for pool in (self._resident, self._window, self._lent, self._work):
            if pool is not None:
                pool.close()
        self._out.clear()
        self._work = None
        self._free.clear()
        self._twins.clear()


def _not_done(marks: list[Mark]) -> list[Mark]:
    return [mark for mark in marks if not mark.done()]


def _weights_in(slot: WeightSlot) -> Iterator[tuple[Weight, list[torch.Tensor]]]:
    """Each weight of a unit, with its parts as they lie in the slot."""
    unit = slot.unit
    laid = iter(laid_over(slot.memory, unit.places))
    for weight in unit.weights:
        yield weight, list(itertools.islice(laid, len(weight.parts)))


def _convert(weight: Weight, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    if weight.quantised is None:
        out.copy_(parts[0].view(out.shape))
    else:
        dequantise(parts, weight.quantised, out)
