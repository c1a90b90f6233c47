"""The memory of a swapped module's units, and their parameters over it: what a window asks for."""

from __future__ import annotations

from collections.abc import Callable, Collection, MutableMapping, Sequence

import torch

from nvmeio._residency.on_device import DevicePool, DeviceSlot
from nvmeio._residency.reader import Fill, WantedBytes
from nvmeio._residency.window import Keeper, LentPool, Slot, laid_over
from nvmeio._threads.closing import collect
from nvmeio._threads.owner import Claim
from nvmeio.errors import ClosedError
from nvmeio.offload._module.stages import ParamPlaces, ParamUnit, Versions
from nvmeio.offload._swap_files.tensors import absent, lay, nothing

TAKEN_ALONG = (
    "the parameters are in the files of a SwappedOptimizer that is closed (without master weights "
    "it keeps them): keep it open as long as the module is used"
)

ParamSlot = Slot[ParamUnit]  # a DeviceSlot on a device


class Routed:
    """The experts of a fused unit that passes have used.

    Attributes:
        last: Those of the last call in forward. If these were all, the next pass expects all.
        saved: Those of the calls in forward that backward has not reached: it expects these.
    """

    def __init__(self) -> None:
        self.last: frozenset[int] = frozenset()
        self.saved: frozenset[int] = frozenset()
        self._returned = False

    def note(self, experts: frozenset[int], recording: bool, backward: bool) -> None:
        if backward:
            self._returned = True
            return
        self.last = experts
        if recording:
            self.saved = experts if self._returned else self.saved | experts
            self._returned = False


class UnitMemory(Keeper[ParamUnit, ParamSlot]):
    """Gives units memory, and lays their parameters over it or over nothing.

    It belongs to the store's owner thread, as the windows do. The store sets `places` and `pool`
    when it opens, and `device_pool` once parameters are on a device; they lie over that one then.
    `routed` has the units of which only those experts are read that tokens are routed to;
    `backward` says where a pass is.

    Args:
        units: All of them.
        device: The device that computes with them.
        versions: The versions of the parameters when they were laid.
        settled: Claims of units that stay; a unit that goes is taken out.
        check: Raises if a unit was changed in memory, where the change would be lost.
    """

    places: ParamPlaces
    pool: LentPool

    def __init__(
        self,
        units: Sequence[ParamUnit],
        device: torch.device,
        versions: Versions,
        settled: MutableMapping[ParamUnit, Claim],
        check: Callable[[ParamUnit], None],
    ) -> None:
        self.device = device
        self.device_pool: DevicePool | None = None
        self.routed: dict[ParamUnit, Routed] = {}
        self.backward = False
        self.by_address: dict[int, ParamUnit] = {}
        self.closed = False
        self._absent = {unit: [absent(span, device) for span in unit.spans] for unit in units}
        self._versions = versions
        self._settled = settled
        self._check = check

    @property
    def on_device(self) -> DevicePool:
        """The pool of the device, once parameters are there."""
        assert self.device_pool is not None
        return self.device_pool

    def take(self, unit: ParamUnit) -> ParamSlot | None:
        return self.pool.take(unit, unit.nbytes)

    def take_anyway(self, unit: ParamUnit) -> ParamSlot:
        """Memory beyond the budget: what looks free may be held by a tensor in a cycle."""
        while self.device_pool is not None and self.device_pool.wait_for_one():
            slot = self.take(unit)
            if slot is not None:
                return slot
        slot = self.pool.take_apart(unit, unit.nbytes)
        if slot is None:
            collect()
            slot = self.take(unit) or self.pool.take_apart(unit, unit.nbytes)
        if slot is not None:
            return slot
        held_bytes = self.pool.in_use_bytes
        raise MemoryError(
            f"resident_bytes={self.pool.budget_bytes} is too small: {unit.nbytes} bytes are "
            f"needed for one more unit, and {held_bytes} are held by the modules that "
            "run now or by tensors over parameters (of a checkpointed region, or of a backward "
            f"pass with create_graph=True): give resident_bytes={held_bytes + unit.nbytes} or more "
            "(further units may come), or checkpoint smaller regions"
        )

    def fill(self, slot: ParamSlot) -> Fill:
        memory, after = slot.host, None
        if isinstance(slot, DeviceSlot):
            memory, after = slot.memory, self.on_device.free()
        if not slot.bound:
            self._expect(slot)
        spans = self.places.moves(slot.unit)
        if slot.shares is not None:
            spans = self.places.moves_of_experts(slot.unit, slot.shares, beside=True)
        return Fill([WantedBytes.of(span, memory) for span in spans], after=after)

    def missing(self, slot: ParamSlot, experts: Collection[int] | None) -> set[int]:
        """Those of some experts, or of all, that are not there."""
        if slot.shares is None:
            return set()
        wanted = range(slot.unit.fused) if experts is None else experts
        return set(wanted) - slot.shares

    def fill_experts(self, slot: ParamSlot, experts: Collection[int]) -> Fill:
        """The reads of experts that are missing."""
        spans = self.places.moves_of_experts(slot.unit, experts, beside=False)
        return Fill([WantedBytes.of(span, slot.host) for span in spans])

    def show_nothing(self, slot: ParamSlot, experts: Collection[int]) -> None:
        """Have experts that are not there look like it."""
        for parameter, tensor in zip(slot.unit.parameters, over(slot), strict=True):
            if slot.unit.rows_of(parameter):
                for expert in experts:
                    tensor[expert].fill_(nothing(tensor.dtype))

    def _expect(self, slot: ParamSlot) -> None:
        """Say which experts a unit that comes is to have."""
        routed = self.routed.get(slot.unit)
        if routed is None:
            return
        expected = routed.saved if self.backward else routed.last
        if not self.backward and len(expected) < slot.unit.fused:
            expected = frozenset()
        if len(expected) < slot.unit.fused:
            slot.shares = set(expected)
            self.show_nothing(slot, self.missing(slot, None))

    def explain(self, slot: ParamSlot, error: BaseException) -> BaseException:
        """Name the closed optimizer whose files a parameter was in."""
        if not isinstance(error, ClosedError) or self.closed:
            return error
        return ClosedError(TAKEN_ALONG)

    def bind(self, slot: ParamSlot) -> None:
        """Lay the parameters over their bytes, where they are computed with."""
        if not self._is_on_top(slot):
            return
        self.by_address[slot.memory.data_ptr()] = slot.unit
        for parameter, tensor in zip(slot.unit.parameters, over(slot), strict=True):
            lay(parameter, tensor)
        self._versions.note(slot.unit.parameters)

    def unbind(self, slot: ParamSlot) -> None:
        """Lay the parameters over nothing."""
        if not self._is_on_top(slot):
            return
        self._settled.pop(slot.unit, None)
        self.by_address.pop(slot.memory.data_ptr(), None)
        for parameter, gone in zip(slot.unit.parameters, self._absent[slot.unit], strict=True):
            lay(parameter, gone)

    def may_go(self, slot: ParamSlot, needed: bool) -> bool:
        """Whether memory has no changes of it; RuntimeError if its room is needed."""
        changed = self._is_on_top(slot) and self._versions.changed(slot.unit) is not None
        if changed and needed:
            self._check(slot.unit)
        return not changed

    def _is_on_top(self, slot: ParamSlot) -> bool:
        return self.device_pool is None or isinstance(slot, DeviceSlot)


def over(slot: ParamSlot) -> list[torch.Tensor]:
    """The parameters' tensors over the unit's memory."""
    places = ((s.offset, s.dtype, s.shape, s.strides) for s in slot.unit.spans)
    return laid_over(slot.memory, places)
