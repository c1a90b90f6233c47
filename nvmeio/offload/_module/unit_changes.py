"""Blocks that change parameters of a swapped module: gathered into memory, written at their end."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from nvmeio._io.drives import DriveHandles
from nvmeio._memory import devices
from nvmeio._residency.on_device import OrderedReads
from nvmeio._residency.window import Window
from nvmeio._threads.closing import on_error
from nvmeio._threads.owner import Claim, OwnerThread, owned
from nvmeio.offload._module.stages import ParamPlaces, ParamUnit, Versions
from nvmeio.offload._module.unit_memory import ParamSlot, UnitMemory, over
from nvmeio.offload._module.unit_windows import UnitWindows
from nvmeio.offload._swap_files.pipeline import move_all
from nvmeio.offload._swap_files.tensors import is_absent, laid, local, strides_of

logger = logging.getLogger("nvmeio")


class Gathered(NamedTuple):
    """Units that a block changes, as slots that hold them.

    `claim` ends the block: what was not written by then gets the values of the drive again.
    `written` is not empty once they were.
    """

    claim: Claim
    slots: Sequence[ParamSlot]
    written: list[bool]


class UnitChanges:
    """Brings units into memory to be changed, and takes the changes to the drive.

    Methods without an underscore are for callers, and hand their work to the owner thread.

    Args:
        owner: The thread to which all of this belongs.
        windows: The windows through which units come into memory.
        memory: The state of units that the windows ask for.
        places: The places of parameters on the drive.
        versions: The versions of the parameters when they were laid over memory.
        handles: Write to the drive.
        ordered: Orders writes from a device.
        direct: Units go straight between the drive and the device.
    """

    def __init__(
        self,
        owner: OwnerThread,
        windows: UnitWindows,
        memory: UnitMemory,
        places: ParamPlaces,
        versions: Versions,
        handles: DriveHandles,
        ordered: OrderedReads,
        direct: bool,
    ) -> None:
        self._owner = owner
        self._windows = windows
        self._memory = memory
        self._places = places
        self._versions = versions
        self._handles = handles
        self._ordered = ordered
        self._direct = direct
        self._blocks: list[Sequence[ParamSlot]] = []  # that have gathered units now

    @property
    def units(self) -> set[ParamUnit]:
        """The units that are gathered now; asked by the owner."""
        return {slot.unit for slots in self._blocks for slot in slots}

    # A block

    @owned
    def first(self, unit: ParamUnit) -> Gathered:
        """Memory for a unit that is not on the drive yet, with the values that it has."""
        values = [local(p) for p in unit.parameters]
        slot = self._windows.host.blank(unit)
        slot.holds += 1
        for value, tensor in zip(values, over(slot), strict=True):
            if not value.is_meta and value.numel() and not is_absent(value):
                tensor.copy_(devices.on_host(value))
        return self._gathered([slot])

    def gather(self, units: Sequence[ParamUnit]) -> Gathered:
        """Have units in memory to be changed."""
        return self._owner.call(self._gather, units, devices.stream_here(self._memory.device))

    def _gather(self, units: Sequence[ParamUnit], stream: Any) -> Gathered:
        windows = self._windows
        windows.unsettle()
        with windows.failing():
            slots = windows.top.hold(units, computing=False)
        with on_error(windows.top.let_go, slots):
            for slot in slots:
                windows.bring(slot, None)
        gathered = self._gathered(slots)
        windows.top.let_compute(slots, stream)
        return gathered

    def _gathered(self, slots: Sequence[ParamSlot]) -> Gathered:
        written: list[bool] = []
        self._blocks.append(slots)
        return Gathered(self._owner.claim(self._scatter, slots, written), slots, written)

    def write(self, gathered: Gathered) -> None:
        """Take the values in memory to the drive; TransferError if it fails."""
        stream = devices.stream_here(self._memory.device)
        self._owner.call(
            lambda: self._write(self._windows.top, gathered.slots, gathered.written, stream)
        )

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

    def undo(self, gathered: Gathered) -> None:
        """End a failed block; its units have the values of the drive when this returns."""
        gathered.claim.end()
        self._owner.drain()

    def _scatter(self, slots: Sequence[ParamSlot], written: list[bool]) -> None:
        """End a block that changes units. Those not written get the values of the drive."""
        self._blocks = [block for block in self._blocks if block is not slots]
        self._windows.top.let_go(slots)
        for slot in slots:
            self._versions.note(slot.unit.parameters)
            if not written:
                self._follow(slot)

    # Changes of the drive

    def follow_drive(self) -> None:
        """Take the values of the drive for all units in memory but gathered ones.

        The owner calls it.
        """
        for slot in self._windows.top.there:
            if slot.unit not in self.units:
                self._follow(slot)

    def _follow(self, slot: ParamSlot) -> None:
        """The drive has other values than memory: drop these, or read again where they are used."""
        top, host = self._windows.top, self._windows.host
        if top is not host:
            host.drop(slot.unit)
        self._versions.note(slot.unit.parameters)
        if slot.holds and top.slot(slot.unit) is slot:
            try:
                top.read_now(slot)
                return
            except Exception as failed:
                slot.holds = 0  # its holder computes NaN
                logger.warning("%r is NaN until read again: %s", slot.unit.stages[0].name, failed)
        top.drop(slot.unit)

    # A state dict

    def load(self, unit: ParamUnit, given: Mapping[int, torch.Tensor]) -> None:
        """Change parameters of a unit on the drive, to values given by their id."""
        here = {key: devices.on_host(local(tensor)) for key, tensor in given.items()}
        self._owner.call(self._load, unit, here)

    def _load(self, unit: ParamUnit, given: Mapping[int, torch.Tensor]) -> None:
        windows = self._windows
        windows.unsettle()
        window = windows.top if self._direct else windows.host
        slots = window.hold([unit], computing=False)
        written: list[bool] = []
        try:
            windows.bring(slots[0], None)
            with torch.no_grad():
                if self._direct:
                    self._memory.on_device.after_compute()
                tensors = zip(unit.parameters, over(slots[0]), strict=True)
                for parameter, tensor in tensors:
                    if id(parameter) in given:
                        self._put(tensor, given[id(parameter)])
                        self._versions.count([parameter])
            self._write(window, slots, written, None)
        finally:
            self._loaded(window, slots, written)

    def _put(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        if not self._direct:
            tensor.copy_(value)
        elif tensor.numel():
            like = laid(value.to(tensor.dtype), strides_of(tensor))
            self._memory.on_device.upload(tensor, like).wait()

    def _loaded(
        self, window: Window[ParamUnit, Any], slots: Sequence[ParamSlot], written: list[bool]
    ) -> None:
        top = self._windows.top
        if window is top:
            self._scatter(slots, written)
            return
        window.let_go(slots)
        for slot in slots:
            above = top.slot(slot.unit)
            if above is not None:
                self._follow(above)
            elif not written:
                window.drop(slot.unit)  # of its values and those of the drive, some of each
