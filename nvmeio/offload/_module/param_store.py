"""The parameters of a swapped module, and the windows that they come through.

All that changes belongs to one thread (`OwnerThread`); methods without an underscore are for
callers and hand their work to it. A caller holds a claim, which ends with the call, the block or
the frame that it is for. Units come in the order in which forward first needed them, and in
backward the other way round (`ThereAndBack`).

Memory is never taken from under a tensor: a unit that goes only loses the parameters' views of it
(`LentPool`).

For a device there is a second window above the one in host memory, and parameters lie over that
one. A caller hands over its stream, which then waits for the copies; the caller does not. If units
come straight from the drive, that window is the only one as soon as all have been made.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

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
from nvmeio._threads.owner import Claim, OwnerThread, owned
from nvmeio._threads.shutdown import Ending, open_owned
from nvmeio.errors import ClosedError
from nvmeio.gds import GdsHandle
from nvmeio.handle import AioHandle
from nvmeio.offload._generations.rank_steps import directory_name
from nvmeio.offload._module.stages import ParamPlaces, ParamUnit, Versions, refused
from nvmeio.offload._module.unit_changes import Gathered, UnitChanges
from nvmeio.offload._module.unit_memory import TAKEN_ALONG, ParamSlot, Routed, UnitMemory
from nvmeio.offload._module.unit_windows import UnitWindows
from nvmeio.offload._swap_files.swap_dirs import SwapDirs

NAME = "weights"
_CLOSED = "the swapped module is closed"

# Reads under way: two units, since one is waited for while the next is being read, and of small
# units as many as keep a fast drive busy while a unit is computed with. More would wait in line.
_AHEAD = 2
_AHEAD_BYTES = 64 << 20

_ATTRIBUTE = "_nvmeio_param_store"


class ParamStore:
    """Keeps parameters on the drive.

    Args:
        units: All of them.
        resident_bytes: The window in host memory.
        device: The device that computes with them.
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
        self.closed = False
        self.locked = False
        self._unit_of = {id(p): unit for unit in units for p in unit.parameters}
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
        # The remains of a dead process of this kind hold no steps, so nobody can go on from them.
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
        self._reader = reader = Reader(self._ordered if self.direct else self._handles.mover)
        self._resources.callback(reader.stop)
        order: Limited[ParamUnit] | ThereAndBack[ParamUnit] = _new_order(self.units)
        if self.device_bytes:
            order = Limited(order, self._not_on_device)
        host = Window(reader, self._memory, order, _AHEAD, _AHEAD_BYTES)
        self._windows = UnitWindows(self._owner, self._memory, host, self._settled)
        self.changes = UnitChanges(
            self._owner,
            self._windows,
            self._memory,
            self._places,
            self._versions,
            self._handles,
            self._ordered,
            self.direct,
        )
        return ending

    # The device

    @owned
    def go_on_device(self, handle: AioHandle | None) -> None:
        """Have parameters on the device from now on; all were made in host memory."""
        if not self.device_bytes:
            return
        windows = self._windows
        windows.host.drop_all()
        pool = DevicePool(self.device, self.device_bytes)
        if not isinstance(handle, GdsHandle) or not self.direct:
            self._memory.device_pool = pool
            order = _new_order(self.units)
            windows.on_device = WindowAbove(windows.host, pool, order, self._memory)
            return
        try:
            arena = pool.reserve([unit.nbytes for unit in self.units])
        except torch.OutOfMemoryError as full:
            asked = f"device_bytes={self.device_bytes}: lower it, or free other memory there"
            raise MemoryError(f"{self.device} has less than {asked}") from full
        handle.pin_device_tensor(arena)

        def unpin() -> None:
            with contextlib.suppress(ValueError):  # the handle is closed, or a call of it hangs
                handle.unpin_device_tensor(arena)

        self._resources.callback(unpin)
        self._memory.pool.close()
        self._memory.device_pool = pool
        self.resident_bytes, self.locked = 0, False
        windows.on_device = DeviceWindow(
            self._reader, pool, _new_order(self.units), self._memory, _AHEAD, _AHEAD_BYTES
        )

    def _not_on_device(self, upcoming: Iterator[ParamUnit]) -> Iterator[ParamUnit]:
        there = self._windows.on_device
        return (u for u in upcoming if there is None or there.slot(u) is None)

    @property
    def by_address(self) -> Mapping[int, ParamUnit]:
        """The units that parameters lie over, by the address of their memory."""
        return self._memory.by_address

    # For computing

    def hold(self, units: Sequence[ParamUnit]) -> object:
        """Keep units in memory for as long as the returned object lives.

        MemoryError if the budget is taken by what cannot go; TransferError if they cannot be read.
        """
        stream = devices.stream_here(self.device)
        self.check_unchanged(units)
        claims = [self._settled.get(unit) for unit in units]
        try:
            if None not in claims:
                top = self._windows.top
                slots = map(top.slot, units)
                top.let_compute([slot for slot in slots if slot is not None], stream)
                return claims
        finally:
            del claims  # an interrupt's traceback must hold nothing: a step may follow
        with profiled("wait", units[0].stages[0].name if units else ""):
            return self._owner.call(self._hold, units, in_backward(), stream)

    def _hold(self, units: Sequence[ParamUnit], backward: bool, stream: Any) -> Claim:
        windows, top = self._windows, self._windows.top
        self._memory.backward = backward
        held = windows.have(lambda: top.hold(units, backward=backward))
        claim = self._owner.claim(top.let_go, held)
        top.let_compute(held, stream)
        if self._fits and not self.changes.units:
            windows.settle(held)
        return claim

    # Experts

    @owned
    def read_by_expert(self, unit: ParamUnit) -> None:
        """Read from now on only those experts of a unit that somebody needs.

        The memory of other experts is NaN. Not for units that go to a device.
        """
        self._memory.routed[unit] = Routed()

    def need_experts(self, unit: ParamUnit, experts: frozenset[int]) -> None:
        """Have experts of a unit in memory, which the caller holds.

        TransferError if they cannot be read.
        """
        slot, used = self._windows.top.slot(unit), (torch.is_grad_enabled(), in_backward())
        if slot is not None and not self._memory.missing(slot, experts):
            self._owner.post(self._memory.routed[unit].note, experts, *used)
            return
        with profiled("wait", unit.stages[0].name):
            self._owner.call(self._need_experts, unit, experts, *used)

    def _need_experts(
        self, unit: ParamUnit, experts: frozenset[int], recording: bool, backward: bool
    ) -> None:
        self._memory.routed[unit].note(experts, recording, backward)
        slot = self._windows.top.slot(unit)
        assert slot is not None
        self._windows.bring(slot, experts)

    def memory_of(self, unit: ParamUnit, experts: frozenset[int] | None = None) -> torch.Tensor:
        """A unit's bytes, which do not change for as long as the storage lives.

        Fused experts: at least those that are named; None stands for all. If they have arrived, the
        owner is notified and not waited for; if they stay, it is not even notified.
        """
        backward = in_backward()
        top, stream = self._windows.top, devices.stream_here(self.device)
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
        self._windows.top.note(unit, backward)

    def _memory_of(
        self, unit: ParamUnit, experts: frozenset[int] | None, backward: bool, stream: Any
    ) -> torch.Tensor:
        self._memory.backward = backward
        if unit in self._memory.routed:
            self._memory.routed[unit].note(frozenset(), False, backward)
        windows, top = self._windows, self._windows.top
        slot: ParamSlot = windows.have(lambda: top.need(unit, backward=backward))
        windows.bring(slot, experts)
        top.let_compute([slot], stream)
        return slot.memory

    @owned
    def evict(self) -> None:
        """Drop all copies in memory that are not in use; RuntimeError if some were changed."""
        self._windows.drop_idle()
        self.check_unchanged(self.units)

    @owned
    def make_way(self, parameters: Sequence[torch.Tensor]) -> None:
        """Drop all copies in memory that are not in use, before these change on the drive.

        RuntimeError if a block has gathered some of them.
        """
        if not self.changes.units.isdisjoint(self._unit_of[id(p)] for p in parameters):
            raise RuntimeError(
                "the parameters are gathered: at its end the block of gather() would write its "
                "values over those of the optimizer. Step, load and resume outside of the block"
            )
        self.evict()

    @owned
    def follow_drive(self) -> None:
        """Take the new values of parameters that have changed on the drive since `make_way`.

        A caller that computed meanwhile has brought old ones, or holds them still.
        """
        self._windows.drop_idle()
        self.changes.follow_drive()

    # Changing

    def check_unchanged(self, units: Sequence[ParamUnit]) -> None:
        """Raise if somebody else changed these in memory, where the change would be lost."""
        for unit in units:
            if self._versions.changed(unit) is not None:
                self._owner.call(self._check_changed, unit)  # it may be a change of the owner's

    def _check_changed(self, unit: ParamUnit) -> None:
        self._owner.release_dropped()
        changed, slot = self._versions.changed(unit), self._windows.top.slot(unit)
        if changed is None or unit in self.changes.units:
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
        """Memory for a unit that is not on the drive yet; its parameters are this store's now."""
        gathered = self.changes.first(unit)
        for parameter in unit.parameters:
            setattr(parameter, _ATTRIBUTE, self)
        return gathered

    @owned
    def is_gathered(self, parameter: torch.Tensor) -> bool:
        return self._unit_of[id(parameter)] in self.changes.units

    # Places

    def where(self, parameter: torch.Tensor) -> Sequence[FileSpan]:
        """The present place of the parameter's elements; from any thread.

        ClosedError if they are in files of an optimizer that is closed.
        """
        found = self._places.where(parameter)
        if not self.closed and any(span.file.closed for span in found):
            raise ClosedError(TAKEN_ALONG)
        return found

    def strides_of(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """The strides of its elements there, without gaps; () for row-major order."""
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
        # Not when the thread ends: a program that exits would not wait for that.
        self._settled.clear()
        self._owner.release_dropped()
        for unit in self.units:
            for parameter in unit.parameters:
                vars(parameter).pop(_ATTRIBUTE, None)
        try:
            if hasattr(self, "_windows"):
                self._windows.close()
        finally:
            self._resources.close()

    @property
    def bytes_read(self) -> int:
        """Read from the drive since this was made."""
        return self._windows.bytes_read


def store_of(parameter: torch.Tensor) -> ParamStore | None:
    """The store that keeps this parameter on the drive; None where it is in memory."""
    found: ParamStore | None = getattr(parameter, _ATTRIBUTE, None)
    return found


def _new_order(units: Sequence[ParamUnit]) -> ThereAndBack[ParamUnit]:
    layers: Counter[Hashable] = Counter(unit.experts for unit in units)
    return ThereAndBack(lambda unit: len(unit.stages) == 1, lambda unit: unit.experts, layers)
