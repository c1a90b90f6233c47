"""The parameters of a swapped module: their file, and the window of memory that they come through.

All that changes belongs to one thread (`OwnerThread`); methods without an underscore are for
callers and hand their work to it. What a caller holds is a lease, which ends with the call, the
block or the frame that it is for. Units come in the order in which forward first needed them, and
in backward the other way round (`ThereAndBack`).

Memory is never taken from under a tensor: a unit that goes only loses the parameters' views of it
(`LentPool`).
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from nvmeio._io.drives import DriveHandles
from nvmeio._io.ending import Ending, leave
from nvmeio._io.owner import Lease, OwnerThread
from nvmeio._io.profiling import profiled
from nvmeio._io.striping import FileSpan, StripedFile
from nvmeio._residency.lent import LentPool, LentSlot, laid_over
from nvmeio._residency.order import ThereAndBack
from nvmeio._residency.reader import Fill, Reader, WantedBytes
from nvmeio._residency.saved import in_backward
from nvmeio._residency.window import Keeper, Window
from nvmeio.errors import ClosedError
from nvmeio.handle import AioHandle
from nvmeio.offload._extents import Extent, extents_of, moves_of, parts_of
from nvmeio.offload._file_tensors import file_tensor
from nvmeio.offload._pipeline import Move, move_all
from nvmeio.offload._rank_steps import directory_name
from nvmeio.offload._stages import Unit
from nvmeio.offload._subgroups import SlotSpan
from nvmeio.offload._swap_dirs import Paths, SwapDirs

NAME = "weights"
_CLOSED = "the swapped module is closed"

# Reads under way: two units, since one is waited for while the next is being read, and of small
# units as many as keep a fast drive busy while a unit is computed with. More would wait in line.
_AHEAD = 2
_AHEAD_BYTES = 64 << 20


Slot = LentSlot[Unit]
_ATTRIBUTE = "_nvmeio_param_store"


class Gathered(NamedTuple):
    """Units that a block changes.

    Attributes:
        lease: Ends the block. What was not written by then has the values of the drive again.
        slots: Their memory.
        written: Not empty once they were.
    """

    lease: Lease
    slots: list[Slot]
    written: list[bool]


class ParamStore(Keeper[Unit, Slot]):
    """Keeps parameters on the drive.

    Args:
        units: All of them.
        resident_bytes: The window.
    """

    def __init__(self, units: Sequence[Unit], resident_bytes: int) -> None:
        self.units = list(units)
        self.resident_bytes = resident_bytes
        self.closed = False
        self.locked = False
        self._pid = os.getpid()
        self._unit_of = {id(p): unit for unit in units for p in unit.parameters}
        self._elsewhere: dict[int, Callable[[], Sequence[Extent]]] = {}
        self._by_address: dict[int, Unit] = {}
        self._absent = {unit: [absent(span) for span in unit.spans] for unit in units}
        self._gathered_now: list[list[Slot]] = []  # by blocks that have not ended
        self._resources = contextlib.ExitStack()
        self._owner = OwnerThread("nvmeio-parameters", _CLOSED)

    def open(self, swap_dir: Paths, handle: AioHandle | None) -> Ending:
        """Make the file and the window; returns what closes them.

        An interrupted one has ended when that is raised (a second interrupt is raised at once): who
        tries again must not find the directory in use.
        """
        try:
            return self._owner.call(self._open, swap_dir, handle)
        except KeyboardInterrupt:
            leave(self._owner)
            with contextlib.suppress(ClosedError):  # it had opened, and has ended by now
                self._owner.call(bool)
            raise

    def _open(self, swap_dir: Paths, handle: AioHandle | None) -> Ending:
        ending = Ending(self._owner, self._close)
        name = directory_name("parameters")
        directory = SwapDirs(swap_dir, name, writes=0.0)
        self._resources.callback(directory.release, remove=True)
        self._file: StripedFile = directory.allocate(NAME, [unit.nbytes for unit in self.units])
        self._resources.callback(self._file.close)
        self._handles = DriveHandles(handle, directory.paths)
        self._resources.callback(self._handles.close)
        self._pool = LentPool(self.resident_bytes)
        self._resources.callback(self._pool.close)
        self.resident_bytes, self.locked = self._pool.budget_bytes, self._pool.locked
        reader = Reader(self._handles)
        self._resources.callback(reader.stop)
        order: ThereAndBack[Unit] = ThereAndBack(lambda unit: len(unit.stages) == 1)
        self._window: Window[Unit, Slot] = Window(reader, self, order, _AHEAD, _AHEAD_BYTES)
        return ending

    # What computing asks for

    def hold(self, units: Sequence[Unit]) -> Lease:
        """Have units in memory for as long as the lease lives.

        Raises:
            MemoryError: The budget is taken by what cannot go.
            TransferError: They could not be read.
        """
        with profiled("wait", units[0].stages[0].name if units else ""):
            return self._owner.call(self._hold, units, in_backward())

    def _hold(self, units: Sequence[Unit], backward: bool) -> Lease:
        held = self._window.hold(units, backward=backward)
        return self._owner.lease(self._window.let_go, held)

    def memory_of(self, unit: Unit) -> torch.Tensor:
        """A unit's bytes; they stay what they are for as long as this storage lives.

        Where they have arrived the owner is told, and not waited for.
        """
        backward = in_backward()
        slot = self._window.arrived(unit)
        memory = None if slot is None else slot.memory
        if memory is None:
            with profiled("wait", unit.stages[0].name):
                return self._owner.call(self._memory_of, unit, backward)
        self._owner.post(self._window.note, unit, backward)
        return memory

    def _memory_of(self, unit: Unit, backward: bool) -> torch.Tensor:
        memory = self._window.need(unit, backward=backward).memory
        assert memory is not None
        return memory

    def unit_at(self, address: int) -> Unit | None:
        """The unit whose memory begins at an address."""
        return self._by_address.get(address)

    def evict(self) -> None:
        """Let go of all copies in memory that are not in use."""
        self._owner.call(self._window.drop_idle)

    def make_way(self, parameters: Sequence[torch.Tensor]) -> None:
        """Let go of all copies in memory that are not in use: these change on the drive.

        Raises:
            RuntimeError: A block gathered some of them.
        """
        self._owner.call(self._make_way, [self._unit_of[id(p)] for p in parameters])

    def _make_way(self, changing: Sequence[Unit]) -> None:
        gathered = {slot.unit for slots in self._gathered_now for slot in slots}
        if not gathered.isdisjoint(changing):
            raise RuntimeError(
                "the parameters are gathered: at its end the block of gather() would write its "
                "values over those of the optimizer. Step, load and resume outside of the block"
            )
        self._window.drop_idle()

    # Changing

    def first(self, unit: Unit) -> Gathered:
        """Memory for a unit that was never on the drive, with its values where it has some."""
        return self._owner.call(self._first, unit)

    def _first(self, unit: Unit) -> Gathered:
        values = [p.data for p in unit.parameters]
        slot = self._window.blank(unit)
        slot.holds += 1
        for parameter, value, tensor in zip(unit.parameters, values, _over(slot), strict=True):
            if not value.is_meta and value.device.type == "cpu" and value.numel():
                tensor.copy_(value)
            setattr(parameter, _ATTRIBUTE, self)
        return self._gathered([slot])

    def gather(self, units: Sequence[Unit]) -> Gathered:
        """Have units in memory to be changed."""
        return self._owner.call(self._gather, units)

    def _gather(self, units: Sequence[Unit]) -> Gathered:
        return self._gathered(self._window.hold(units, computing=False))

    def _gathered(self, slots: list[Slot]) -> Gathered:
        written: list[bool] = []
        self._gathered_now.append(slots)
        return Gathered(self._owner.lease(self._scatter, slots, written), slots, written)

    def write(self, gathered: Gathered) -> None:
        """Write what was gathered to where it lives."""
        self._owner.call(self._write, gathered.slots, gathered.written)

    def _write(self, slots: Sequence[Slot], written: list[bool]) -> None:
        for slot in slots:
            move_all(self._handles, slot.host, self._moves(slot.unit), writing=True)
        written.append(True)

    def _scatter(self, slots: Sequence[Slot], written: list[bool]) -> None:
        """A block that changed units is over. If it failed they have the values of the drive."""
        self._gathered_now = [each for each in self._gathered_now if each is not slots]
        self._window.let_go(slots)
        if written:
            return
        for slot in slots:
            if slot.holds and self._window.slot(slot.unit) is slot:
                try:
                    move_all(self._handles, slot.host, self._moves(slot.unit), writing=False)
                    continue
                except Exception:
                    slot.holds = 0  # whoever has it computes NaN
            self._window.drop(slot.unit)

    def load(self, unit: Unit, given: Mapping[int, torch.Tensor]) -> None:
        """Change parameters on the drive.

        Args:
            unit: Which hold them.
            given: Their values, by id.
        """
        self._owner.call(self._load, unit, given)

    def _load(self, unit: Unit, given: Mapping[int, torch.Tensor]) -> None:
        slots = self._window.hold([unit], computing=False)
        written: list[bool] = []
        try:
            with torch.no_grad():
                for parameter in unit.parameters:
                    if id(parameter) in given:
                        parameter.copy_(given[id(parameter)])
            self._write(slots, written)
        finally:
            self._scatter(slots, written)

    # What the window asks for

    def take(self, unit: Unit) -> Slot | None:
        """Memory of the budget."""
        return self._pool.take(unit, unit.nbytes)

    def fill(self, slot: Slot) -> Fill:
        """From where the parameters are now."""
        return Fill(
            [
                WantedBytes(
                    move.file,
                    move.file_offset,
                    slot.host[move.slot_offset : move.slot_offset + move.nbytes],
                    move.slot_offset,
                )
                for move in self._moves(slot.unit)
            ]
        )

    def bind(self, slot: Slot) -> None:
        """Lay the parameters over their bytes."""
        self._by_address[slot.host.data_ptr()] = slot.unit
        for parameter, tensor in zip(slot.unit.parameters, _over(slot), strict=True):
            parameter.data = tensor

    def unbind(self, slot: Slot) -> None:
        """Let them lie over nothing."""
        self._by_address.pop(slot.host.data_ptr(), None)
        for parameter, nothing in zip(slot.unit.parameters, self._absent[slot.unit], strict=True):
            parameter.data = nothing

    def rest(self, slot: Slot) -> bool:
        """It stays until its room is needed."""
        return False

    def give_back(self, slot: Slot) -> None:
        """With the last tensor over it, if there is one."""
        slot.memory = None

    def take_anyway(self, unit: Unit) -> Slot:
        """What looks free may be held by a tensor in a cycle."""
        gc.collect()
        slot = self.take(unit)
        if slot is not None:
            return slot
        raise MemoryError(
            f"resident_bytes={self.resident_bytes} is too small: {unit.nbytes} bytes are "
            f"needed for one more unit, and {self._pool.in_use_bytes} are held by the modules that "
            "run now or by tensors over parameters (of a checkpointed region, for one): raise "
            "resident_bytes, or checkpoint smaller regions"
        )

    # Where they are

    def _moves(self, unit: Unit) -> list[Move]:
        if not any(id(p) in self._elsewhere for p in unit.parameters):
            return moves_of(self._file, unit.file_offset, 0, unit.nbytes)
        found: list[Move] = []
        for parameter, span in zip(unit.parameters, unit.spans, strict=True):
            size = span.dtype.itemsize
            for extent in self.where(parameter):
                nbytes = (extent.stop - extent.start) * size
                move = Move(
                    extent.file,
                    extent.file_offset,
                    span.offset + extent.start * size,
                    nbytes,
                )
                last = found[-1] if found else None
                if last is not None and _follows(last, move):
                    found[-1] = last._replace(
                        nbytes=move.slot_offset + move.nbytes - last.slot_offset
                    )
                elif nbytes:
                    found.append(move)
        return found

    def where(self, parameter: torch.Tensor) -> Sequence[Extent]:
        """Where the parameter's elements are now; from any thread."""
        locate = self._elsewhere.get(id(parameter))
        if locate is not None:
            return locate()
        unit = self._unit_of[id(parameter)]
        for each, span in zip(unit.parameters, unit.spans, strict=True):
            if each is parameter:
                offset = unit.file_offset + span.offset
                return extents_of(self._file, offset, 0, each.numel(), span.dtype.itemsize)
        raise KeyError(parameter)

    def relocate(self, parameter: torch.Tensor, locate: Callable[[], Sequence[Extent]]) -> None:
        """From now on the parameter is read from where `locate` says, which waits for nobody."""
        self._owner.call(self._relocate, parameter, locate)

    def _relocate(self, parameter: torch.Tensor, locate: Callable[[], Sequence[Extent]]) -> None:
        self._elsewhere[id(parameter)] = locate
        if all(id(p) in self._elsewhere for unit in self.units for p in unit.parameters):
            for file in self._file.files:
                opened = file.acquire(True)
                try:
                    os.ftruncate(opened.any_fd(), 0)  # nobody reads it any more
                finally:
                    opened.release()

    def has(self, parameter: torch.Tensor) -> bool:
        """Whether it is one of these."""
        return id(parameter) in self._unit_of

    def on_file(self, parameter: torch.Tensor) -> torch.Tensor:
        """The parameter over the file, unread."""
        size = parameter.dtype.itemsize
        spans = [
            FileSpan(file, offset, start * size, (stop - start) * size)
            for file, offset, start, stop in self.where(parameter)
        ]
        return file_tensor(parts_of(spans), parameter.dtype, tuple(parameter.shape))

    # The end

    def check_open(self) -> None:
        """Raise if it cannot be used here."""
        if self.closed:
            raise ClosedError(_CLOSED)
        if os.getpid() != self._pid:
            raise ClosedError("this process was forked from the module's owner: swap one here")

    def _close(self) -> None:
        self.closed = True
        for unit in self.units:
            for parameter in unit.parameters:
                vars(parameter).pop(_ATTRIBUTE, None)
        try:
            if hasattr(self, "_window"):
                self._window.drop_all()
        finally:
            self._resources.close()

    @property
    def held(self) -> list[Unit]:
        """What somebody holds."""
        return self._owner.call(lambda: [s.unit for s in self._window.there if s.holds])

    @property
    def in_use_bytes(self) -> int:
        """What is taken of the budget, by units and by tensors that outlive them."""
        return self._owner.call(lambda: self._pool.in_use_bytes)

    @property
    def bytes_read(self) -> int:
        """Read from the drive since this was made."""
        return self._window.bytes_read


def store_of(parameter: torch.Tensor) -> ParamStore | None:
    """The store that keeps this parameter on the drive; None where it is in memory."""
    found: ParamStore | None = getattr(parameter, _ATTRIBUTE, None)
    return found


def _over(slot: Slot) -> list[torch.Tensor]:
    """The parameters' tensors over the unit's memory."""
    assert slot.memory is not None
    return laid_over(slot.memory, ((s.offset, s.dtype, s.shape) for s in slot.unit.spans))


def absent(span: SlotSpan) -> torch.Tensor:
    """What stands for a parameter that is on the drive: of its shape, and NaN where it can be.

    One element of memory. Reading it gives no result that could pass for one, and writing to it is
    refused by torch, since its elements share their memory.
    """
    fill = float("nan") if span.dtype.is_floating_point or span.dtype.is_complex else 0
    return torch.full((), fill, dtype=span.dtype).expand(span.shape)


def is_absent(parameter: torch.Tensor) -> bool:
    """Whether such a thing stands there."""
    return parameter.numel() > 1 and not any(parameter.stride()) and not parameter.is_meta


def _follows(last: Move, move: Move) -> bool:
    """Whether two moves are one: neighbours in the file and in memory, with the same gap."""
    gap = move.file_offset - (last.file_offset + last.nbytes)
    return (
        last.file is move.file
        and 0 <= gap < 4096
        and move.slot_offset - (last.slot_offset + last.nbytes) == gap
    )
