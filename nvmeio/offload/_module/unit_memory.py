"""The memory of a swapped module's units, and their parameters over it: what a window asks for."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence

import torch

from nvmeio._residency.on_device import DevicePool, DeviceSlot
from nvmeio._residency.reader import Fill, WantedBytes
from nvmeio._residency.window import Keeper, LentPool, Slot, laid_over
from nvmeio._threads.closing import collect
from nvmeio._threads.owner import Claim
from nvmeio.errors import ClosedError
from nvmeio.offload._module.stages import ParamPlaces, ParamUnit, Versions
from nvmeio.offload._swap_files.tensors import absent, lay

TAKEN_ALONG = (
    "the parameters are in the files of a SwappedOptimizer that is closed (without master weights "
    "it keeps them): keep it open as long as the module is used"
)

ParamSlot = Slot[ParamUnit]  # a DeviceSlot on a device


class UnitMemory(Keeper[ParamUnit, ParamSlot]):
    """Gives units memory, and lays their parameters over it or over nothing.

    It belongs to the store's owner thread, as the windows do. The store sets `places` and `pool`
    when it opens, and `device_pool` once parameters are on a device; they lie over that one then.

    Args:
        units: All of them.
        device: Where they are computed with.
        versions: Of the parameters, as they were laid.
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
        self.device_pool: DevicePool | None = None
        self.by_address: dict[int, ParamUnit] = {}
        self.closed = False
        self._absent = {unit: [absent(span, device) for span in unit.spans] for unit in units}
        self._versions = versions
        self._settled = settled
        self._check = check

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
        raise MemoryError(
            f"resident_bytes={self.pool.budget_bytes} is too small: {unit.nbytes} bytes are "
            f"needed for one more unit, and {self.pool.in_use_bytes} are held by the modules that "
            "run now or by tensors over parameters (of a checkpointed region, for one): raise "
            "resident_bytes, or checkpoint smaller regions"
        )

    def fill(self, slot: ParamSlot) -> Fill:
        memory, after = slot.host, None
        if isinstance(slot, DeviceSlot):
            assert self.device_pool is not None
            memory, after = slot.memory, self.device_pool.free()
        reads = [WantedBytes.of(span, memory) for span in self.places.moves(slot.unit)]
        return Fill(reads, after=after)

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
