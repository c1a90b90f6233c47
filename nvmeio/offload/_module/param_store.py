"""The parameters of a swapped module, and the windows that they come through.

All that changes belongs to one thread (`OwnerThread`); methods without an underscore are for
callers and hand their work to it. What a caller holds is a claim, which ends with the call, the
block or the frame that it is for. Units come in the order in which forward first needed them, and
in backward the other way round (`ThereAndBack`).

Memory is never taken from under a tensor: a unit that goes only loses the parameters' views of it
(`LentPool`).

For a device there is a second window above the one in host memory, and parameters lie over that
one. Whoever computes hands over his stream, which then waits for the copies; he does not. Where
units come straight from the drive, that window is the only one as soon as all have been made.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from nvmeio._checks import Paths
from nvmeio._io.drives import DriveHandles, FileSpan
from nvmeio._io.long_call import profiled
from nvmeio._memory import devices
from nvmeio._residency.calls import in_backward
from nvmeio._residency.on_device import (
    DevicePool,
    DeviceWindow,
    OrderedReads,
    WindowAbove,
)
from nvmeio._residency.order import Limited, ThereAndBack
from nvmeio._residency.reader import Reader
from nvmeio._residency.window import LentPool, Window
from nvmeio._threads.closing import on_error
from nvmeio._threads.owner import Claim, OwnerThread, owned
from nvmeio._threads.shutdown import Ending, open_owned
from nvmeio.errors import ClosedError
from nvmeio.gds import GdsHandle
from nvmeio.handle import AioHandle
from nvmeio.offload._generations.rank_steps import directory_name
from nvmeio.offload._module.stages import ParamPlaces, ParamUnit, Versions, refused
from nvmeio.offload._module.unit_memory import TAKEN_ALONG, ParamSlot, Routed, UnitMemory, over
from nvmeio.offload._swap_files.pipeline import move_all
from nvmeio.offload._swap_files.swap_dirs import SwapDirs
from nvmeio.offload._swap_files.tensors import is_absent, laid, local, strides_of

NAME = "weights"
_CLOSED = "the swapped module is closed"

# Reads under way: two units, since one is waited for while the next is being read, and of small
# units as many as keep a fast drive busy while a unit is computed with. More would wait in line.
_AHEAD = 2
_AHEAD_BYTES = 64 << 20

logger = logging.getLogger("nvmeio")
Needed = TypeVar("Needed")
_ATTRIBUTE = "_nvmeio_param_store"


class Gathered(NamedTuple):
    """Units that a block changes, as slots that hold them.

    `claim` ends the block: what was not written by then gets the values of the drive again.
    `written` is not empty once they were.
    """

    claim: Claim
    slots: Sequence[ParamSlot]
    written: list[bool]


class ParamStore:
    """Keeps parameters on the drive.

    Args:
        units: All of them.
        resident_bytes: The window in host memory.
        device: Where they are computed with.
        device_bytes: The window there; 0 for the CPU, which needs no other.
        direct: Units go straight from the drive to the device once all have been made, one at a
            time, in host memory; then `resident_bytes` is not taken.
    """

    def __init__(
        self,
        units: Sequence[ParamUnit],
        resident_bytes: int,
        device: torch.device,
        device_bytes: int,
        direct: bool,
    ) -> None:
        self.units = list(units)
        self.direct = direct
        if direct and units:
            resident_bytes = max(unit.nbytes for unit in units)
        self.resident_bytes = resident_bytes
        self.device = device
        self.device_bytes = device_bytes
        # As soon as all have been made.
        self._on_device: DeviceWindow[ParamUnit] | None = None
        self.closed = False
        self.locked = False
        self._experts_bytes = 0  # read by themselves
        self._unit_of = {id(p): unit for unit in units for p in unit.parameters}
        self._gathered_now: list[Sequence[ParamSlot]] = []  # in blocks
        self._settled: dict[ParamUnit, Claim] = {}  # which stay, for users that do not ask
        self._versions = Versions([p for unit in units for p in unit.parameters])
        self._memory = UnitMemory(units, device, self._versions, self._settled, self._check_changed)
        self._resources = contextlib.ExitStack()
        self._owner = OwnerThread("nvmeio-parameters", _CLOSED)

    def open(self, swap_dir: Paths, handle: AioHandle | None) -> Ending:
        """Make the file and the window; returns what closes them."""
        return open_owned(self._owner, self._open, swap_dir, handle)

    def _open(self, swap_dir: Paths, handle: AioHandle | None) -> Ending:
        ending = Ending(self._owner, self._close)
        # What a dead process left of this kind has no steps in it, and nobody can go on from it.
        directory = SwapDirs(swap_dir, directory_name("parameters"), overwrite=True, writes=0.0)
        self._resources.callback(directory.release, remove=True)
        file = directory.allocate(NAME, [unit.nbytes for unit in self.units])
        self._resources.callback(file.close)
        self._places = self._memory.places = ParamPlaces(self._unit_of, file)
        self._handles = DriveHandles(handle, directory.paths)
        self._resources.callback(self._handles.close)
        self._memory.pool = pool = LentPool(self.resident_bytes)
        self._resources.callback(pool.close)
        self.resident_bytes, self.locked = pool.budget_bytes, pool.locked
        window_bytes = self.device_bytes or self.resident_bytes
        self._fits = sum(unit.nbytes for unit in self.units) <= window_bytes
        streams = self.device if self.direct else torch.device("cpu")
        self._ordered = OrderedReads(self._handles, streams)
        self._reader = reader = Reader(self._ordered if self.direct else self._handles)
        self._resources.callback(reader.stop)
        order: Limited[ParamUnit] | ThereAndBack[ParamUnit] = _new_order(self.units)
        if self.device_bytes:
            order = Limited(order, self._not_on_device)
        self._window = Window(reader, self._memory, order, _AHEAD, _AHEAD_BYTES)
        return ending

    # The device

    @owned
    def go_on_device(self, handle: AioHandle | None) -> None:
        """Have parameters on the device from now on; all were made in host memory."""
        if not self.device_bytes:
            return
        self._window.drop_all()
        pool = DevicePool(self.device, self.device_bytes)
        if not isinstance(handle, GdsHandle) or not self.direct:
            self._memory.device_pool = pool
            self._on_device = WindowAbove(self._window, pool, _new_order(self.units), self._memory)
            return
        try:
            arena = pool.reserve([unit.nbytes for unit in self.units])
        except torch.OutOfMemoryError as full:
            asked = f"device_bytes={self.device_bytes}: lower it, or what else is kept there"
            raise MemoryError(f"{self.device} has less than {asked}") from full
        handle.pin_device_tensor(arena)

        def unpin() -> None:
            with contextlib.suppress(ValueError):  # the handle is closed, or a call of it hangs
                handle.unpin_device_tensor(arena)

        self._resources.callback(unpin)
        self._memory.pool.close()
        self._memory.device_pool = pool
        self.resident_bytes, self.locked = 0, False
        self._on_device = DeviceWindow(
            self._reader, pool, _new_order(self.units), self._memory, _AHEAD, _AHEAD_BYTES
        )

    def _not_on_device(self, upcoming: Iterator[ParamUnit]) -> Iterator[ParamUnit]:
        there = self._on_device
        return (u for u in upcoming if there is None or there.slot(u) is None)

    @property
    def _top(self) -> Window[ParamUnit, Any]:
        """The window that parameters lie over."""
        return self._window if self._on_device is None else self._on_device

    @property
    def _device_pool(self) -> DevicePool:
        pool = self._memory.device_pool
        assert pool is not None
        return pool

    @property
    def by_address(self) -> Mapping[int, ParamUnit]:
        """The units that parameters lie over, by the address of their memory."""
        return self._memory.by_address

    # What computing asks for

    def hold(self, units: Sequence[ParamUnit]) -> object:
        """Keep units in memory for as long as the returned object lives.

        MemoryError if the budget is taken by what cannot go; TransferError if they cannot be read.
        """
        stream = devices.stream_here(self.device)
        self.check_unchanged(units)
        claims = [self._settled.get(unit) for unit in units]
        try:
            if None not in claims:
                slots = map(self._top.slot, units)
                self._top.let_compute([slot for slot in slots if slot is not None], stream)
                return claims
        finally:
            del claims  # an interrupt's traceback must hold nothing: a step may follow
        with profiled("wait", units[0].stages[0].name if units else ""):
            return self._owner.call(self._hold, units, in_backward(), stream)

    def _hold(self, units: Sequence[ParamUnit], backward: bool, stream: Any) -> Claim:
        top = self._top
        self._memory.backward = backward
        held = self._have(lambda: top.hold(units, backward=backward))
        claim = self._owner.claim(top.let_go, held)
        top.let_compute(held, stream)
        if self._fits and not self._gathered_now:
            for slot in held:
                if slot.unit not in self._settled and slot.shares is None:
                    slot.holds += 1
                    self._settled[slot.unit] = self._owner.claim(top.let_go, [slot])
        return claim

    def _have(self, need: Callable[[], Needed]) -> Needed:
        """Call `need`; if it finds no room, again without what stays."""
        with self._failing():
            try:
                return need()
            except MemoryError:
                if not self._settled:
                    raise
            self._unsettle()
            return need()

    def _unsettle(self) -> None:
        """Have every user ask again, before units that nobody uses go or change."""
        self._settled.clear()
        self._owner.release_dropped()

    # Experts

    @owned
    def read_by_expert(self, unit: ParamUnit) -> None:
        """Read from now on only those experts of a unit that somebody needs.

        What is in memory of others is NaN. Not for units that go to a device.
        """
        self._memory.routed[unit] = Routed()

    def need_experts(self, unit: ParamUnit, experts: frozenset[int]) -> None:
        """Have experts of a unit in memory, which the caller holds.

        TransferError if they cannot be read.
        """
        slot, used = self._top.slot(unit), (torch.is_grad_enabled(), in_backward())
        if slot is not None and not self._memory.missing(slot, experts):
            self._owner.post(self._memory.routed[unit].note, experts, *used)
            return
        with profiled("wait", unit.stages[0].name):
            self._owner.call(self._need_experts, unit, experts, *used)

    def _need_experts(
        self, unit: ParamUnit, experts: frozenset[int], recording: bool, backward: bool
    ) -> None:
        self._memory.routed[unit].note(experts, recording, backward)
        slot = self._top.slot(unit)
        assert slot is not None
        self._bring(slot, experts)

    def _bring(self, slot: ParamSlot, experts: Collection[int] | None) -> None:
        """Read what is missing of some experts, or of all, into a unit that is in memory."""
        missing = self._memory.missing(slot, experts)
        if not missing or slot.shares is None:
            return
        try:
            with self._failing():
                fill = self._memory.fill_experts(slot, missing)
                self._experts_bytes += self._window.read_more(slot, fill)
        except BaseException:
            self._memory.show_nothing(slot, missing)
            raise
        slot.shares |= missing
        if len(slot.shares) == slot.unit.fused:
            slot.shares = None

    def memory_of(self, unit: ParamUnit, experts: frozenset[int] | None = None) -> torch.Tensor:
        """A unit's bytes, which do not change for as long as the storage lives.

        Of fused experts those that are named, and maybe others; None stands for all. If they have
        arrived, the owner is told and not waited for; nor told if they stay.
        """
        backward = in_backward()
        top, stream = self._top, devices.stream_here(self.device)
        slot = top.arrived(unit)
        if slot is not None and not self._memory.missing(slot, experts):
            top.let_compute([slot], stream)  # before its memory is taken, which may go meanwhile
            memory: torch.Tensor = slot.memory
            if memory.nbytes:
                if unit not in self._settled:
                    self._owner.post(self._note, unit, backward)
                return memory
        with profiled("wait", unit.stages[0].name):
            return self._owner.call(self._memory_of, unit, experts, backward, stream)

    def _note(self, unit: ParamUnit, backward: bool) -> None:
        self._memory.backward = backward
        if unit in self._memory.routed:
            self._memory.routed[unit].note(frozenset(), False, backward)
        self._top.note(unit, backward)

    def _memory_of(
        self, unit: ParamUnit, experts: frozenset[int] | None, backward: bool, stream: Any
    ) -> torch.Tensor:
        self._memory.backward = backward
        if unit in self._memory.routed:
            self._memory.routed[unit].note(frozenset(), False, backward)
        slot: ParamSlot = self._have(lambda: self._top.need(unit, backward=backward))
        self._bring(slot, experts)
        self._top.let_compute([slot], stream)
        return slot.memory

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Drop what was read ahead if a unit cannot be read: those reads may have failed as well.

        They are made again when needed, so that a retry meets no old error.
        """
        try:
            yield
        except BaseException:
            self._top.drop_ahead()
            self._window.drop_ahead()
            raise

    @owned
    def evict(self) -> None:
        """Drop all copies in memory that are not in use; RuntimeError if some were changed."""
        self._evict()
        self.check_unchanged(self.units)

    def _evict(self) -> None:
        self._unsettle()
        self._top.drop_idle()
        self._window.drop_idle()

    @owned
    def make_way(self, parameters: Sequence[torch.Tensor]) -> None:
        """Drop all copies in memory that are not in use, before these change on the drive.

        RuntimeError if a block has gathered some of them.
        """
        if not self._gathered_units.isdisjoint(self._unit_of[id(p)] for p in parameters):
            raise RuntimeError(
                "the parameters are gathered: at its end the block of gather() would write its "
                "values over those of the optimizer. Step, load and resume outside of the block"
            )
        self.evict()

    @owned
    def follow_drive(self) -> None:
        """Take the new values of parameters that have changed on the drive since `make_way`.

        Whoever computed meanwhile has brought old ones, or holds them still.
        """
        self._evict()
        for slot in self._top.there:
            if slot.unit not in self._gathered_units:
                self._follow(slot)

    # Changing

    def check_unchanged(self, units: Sequence[ParamUnit]) -> None:
        """Raise if somebody else changed these in memory, where the change would be lost."""
        for unit in units:
            if self._versions.changed(unit) is not None:
                self._owner.call(self._check_changed, unit)  # it may be a change of the owner's

    def _check_changed(self, unit: ParamUnit) -> None:
        self._owner.release_dropped()
        changed, slot = self._versions.changed(unit), self._top.slot(unit)
        if changed is None or unit in self._gathered_units:
            return
        if slot is None or not slot.bound:  # torch lets one of a single element be written to
            self._versions.undo(changed)
        raise refused(unit, changed)

    @owned
    def count_changes(self, parameters: Iterable[torch.Tensor]) -> None:
        """Raise the version of parameters that have changed on the drive; backward looks at it."""
        self._versions.count(parameters)

    @owned
    def first(self, unit: ParamUnit) -> Gathered:
        """Memory for a unit that is not on the drive yet, with the values that it has."""
        values = [local(p) for p in unit.parameters]
        slot = self._window.blank(unit)
        slot.holds += 1
        for parameter, value, tensor in zip(unit.parameters, values, over(slot), strict=True):
            if not value.is_meta and value.numel() and not is_absent(value):
                tensor.copy_(devices.on_host(value))
            setattr(parameter, _ATTRIBUTE, self)
        return self._gathered([slot])

    def gather(self, units: Sequence[ParamUnit]) -> Gathered:
        """Have units in memory to be changed."""
        return self._owner.call(self._gather, units, devices.stream_here(self.device))

    def _gather(self, units: Sequence[ParamUnit], stream: Any) -> Gathered:
        self._unsettle()
        with self._failing():
            slots = self._top.hold(units, computing=False)
        with on_error(self._top.let_go, slots):
            for slot in slots:
                self._bring(slot, None)
        gathered = self._gathered(slots)
        self._top.let_compute(slots, stream)
        return gathered

    @owned
    def is_gathered(self, parameter: torch.Tensor) -> bool:
        return self._unit_of[id(parameter)] in self._gathered_units

    @property
    def _gathered_units(self) -> set[ParamUnit]:
        return {slot.unit for slots in self._gathered_now for slot in slots}

    def _gathered(self, slots: Sequence[ParamSlot]) -> Gathered:
        written: list[bool] = []
        self._gathered_now.append(slots)
        return Gathered(self._owner.claim(self._scatter, slots, written), slots, written)

    def write(self, gathered: Gathered) -> None:
        stream = devices.stream_here(self.device)
        self._owner.call(lambda: self._write(self._top, gathered.slots, gathered.written, stream))

    def _write(
        self,
        window: Window[ParamUnit, Any],
        slots: Sequence[ParamSlot],
        written: list[bool],
        stream: Any,
    ) -> None:
        for slot in slots:
            memory = window.to_write(slot, stream)
            moves = self._places.moves(slot.unit, writing=True)
            with self._ordered.on_stream():
                move_all(self._handles, memory, moves, writing=True)
        written.append(True)

    def _scatter(self, slots: Sequence[ParamSlot], written: list[bool]) -> None:
        """End a block that changes units. Those not written get the values of the drive."""
        self._gathered_now = [each for each in self._gathered_now if each is not slots]
        top = self._top
        top.let_go(slots)
        for slot in slots:
            self._versions.note(slot.unit.parameters)
            if not written:
                self._follow(slot)

    def _follow(self, slot: ParamSlot) -> None:
        """The drive has other values than memory: drop these, or read again where they are used."""
        top = self._top
        if top is not self._window:
            self._window.drop(slot.unit)
        self._versions.note(slot.unit.parameters)
        if slot.holds and top.slot(slot.unit) is slot:
            try:
                top.read_now(slot)
                return
            except Exception as failed:
                slot.holds = 0  # whoever has it computes NaN
                logger.warning("%r is NaN until read again: %s", slot.unit.stages[0].name, failed)
        top.drop(slot.unit)

    def undo(self, gathered: Gathered) -> None:
        """End a failed block; its units have the values of the drive when this returns."""
        gathered.claim.end()
        self._owner.drain()

    def load(self, unit: ParamUnit, given: Mapping[int, torch.Tensor]) -> None:
        """Change parameters of a unit on the drive, to values given by their id."""
        here = {key: devices.on_host(local(tensor)) for key, tensor in given.items()}
        self._owner.call(self._load, unit, here)

    def _load(self, unit: ParamUnit, given: Mapping[int, torch.Tensor]) -> None:
        self._unsettle()
        window = self._top if self.direct else self._window
        slots = window.hold([unit], computing=False)
        written: list[bool] = []
        try:
            self._bring(slots[0], None)
            with torch.no_grad():
                if self.direct:
                    self._device_pool.after_compute()
                tensors = zip(unit.parameters, over(slots[0]), strict=True)
                for parameter, tensor in tensors:
                    if id(parameter) in given:
                        self._put(tensor, given[id(parameter)])
                        self.count_changes([parameter])
            self._write(window, slots, written, None)
        finally:
            self._loaded(window, slots, written)

    def _put(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        if not self.direct:
            tensor.copy_(value)
        elif tensor.numel():
            like = laid(value.to(tensor.dtype), strides_of(tensor))
            self._device_pool.upload(tensor, like).wait()

    def _loaded(
        self, window: Window[ParamUnit, Any], slots: Sequence[ParamSlot], written: list[bool]
    ) -> None:
        if window is self._top:
            self._scatter(slots, written)
            return
        window.let_go(slots)
        for slot in slots:
            above = self._top.slot(slot.unit)
            if above is not None:
                self._follow(above)
            elif not written:
                window.drop(slot.unit)  # of its values and those of the drive, some of each

    # Where they are

    def where(self, parameter: torch.Tensor) -> Sequence[FileSpan]:
        """Where the parameter's elements are now; from any thread.

        ClosedError if they are in files of an optimizer that is closed.
        """
        found = self._places.where(parameter)
        if not self.closed and any(span.file.closed for span in found):
            raise ClosedError(TAKEN_ALONG)
        return found

    def strides_of(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """How its elements lie there, without gaps; () for row-major order."""
        return self._places.span_of(parameter).strides

    def relocate(self, parameter: torch.Tensor, locate: Callable[[], Sequence[FileSpan]]) -> None:
        """Read the parameter from where `locate` says from now on; `locate` waits for nobody."""
        self._owner.call(self._places.relocate, parameter, locate)

    def on_file(self, parameter: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        """The parameter as a tensor over the file, unread, followed by the rows of others."""
        self.check_unchanged([self._unit_of[id(each)] for each in (parameter, *rest)])
        try:
            return self._places.on_file(parameter, *rest)
        except ClosedError as closed:
            self.check_open()
            raise ClosedError(TAKEN_ALONG) from closed

    # The end

    def check_open(self) -> None:
        """Raise if it is closed, or this process was forked from its owner's."""
        if self.closed:
            raise ClosedError(_CLOSED)
        if self._owner.forked:
            raise ClosedError("this process was forked from the module's owner: swap one here")

    def _close(self) -> None:
        self.closed = self._memory.closed = True
        self._unsettle()  # not when the thread ends: a program that exits would not wait for that
        for unit in self.units:
            for parameter in unit.parameters:
                vars(parameter).pop(_ATTRIBUTE, None)
        try:
            if self._on_device is not None:
                self._on_device.close()
            if hasattr(self, "_window"):
                self._window.drop_all()
        finally:
            self._resources.close()

    @property
    def bytes_read(self) -> int:
        there = self._on_device
        read = self._window.bytes_read + self._experts_bytes
        return read + (there.bytes_read if there is not None else 0)


def store_of(parameter: torch.Tensor) -> ParamStore | None:
    """The store that keeps this parameter on the drive; None where it is in memory."""
    found: ParamStore | None = getattr(parameter, _ATTRIBUTE, None)
    return found


def _new_order(units: Sequence[ParamUnit]) -> ThereAndBack[ParamUnit]:
    layers: Counter[Hashable] = Counter(unit.experts for unit in units)
    return ThereAndBack(lambda unit: len(unit.stages) == 1, lambda unit: unit.experts, layers)
