"""The windows that a swapped module's units come through, and which units stay there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from typing import Any, TypeVar

from nvmeio._residency.on_device import DeviceWindow
from nvmeio._residency.window import Window
from nvmeio._threads.owner import Claim, OwnerThread
from nvmeio.offload._module.stages import ParamUnit
from nvmeio.offload._module.unit_memory import ParamSlot, UnitMemory

Needed = TypeVar("Needed")


class UnitWindows:
    """A window in host memory, and one on a device once parameters are computed with there.

    It belongs to the store's owner thread; other threads read `top` and `settled` only.

    Args:
        owner: The owner's thread.
        memory: The state of units that the windows ask for.
        host: The window in host memory.
        settled: Claims of units that stay, for users that do not ask the owner.

    Attributes:
        on_device: The window on the device; None where parameters lie in host memory.
    """

    def __init__(
        self,
        owner: OwnerThread,
        memory: UnitMemory,
        host: Window[ParamUnit, ParamSlot],
        settled: MutableMapping[ParamUnit, Claim],
    ) -> None:
        self.host = host
        self.on_device: DeviceWindow[ParamUnit] | None = None
        self.settled = settled
        self._owner = owner
        self._memory = memory
        self._experts_bytes = 0  # read by themselves

    @property
    def top(self) -> Window[ParamUnit, Any]:
        """The window that parameters lie over."""
        return self.host if self.on_device is None else self.on_device

    @property
    def bytes_read(self) -> int:
        above = self.on_device
        read = self.host.bytes_read + self._experts_bytes
        return read + (above.bytes_read if above is not None else 0)

    # Coming

    def have(self, need: Callable[[], Needed]) -> Needed:
        """Call `need`; if it finds no room, again without what stays."""
        with self.failing():
            try:
                return need()
            except MemoryError:
                if not self.settled:
                    raise
            self.unsettle()
            return need()

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Drop what was read ahead if a unit cannot be read: those reads may have failed as well.

        They are made again when needed, so that a retry meets no old error.
        """
        try:
            yield
        except BaseException:
            self.top.drop_ahead()
            self.host.drop_ahead()
            raise

    def bring(self, slot: ParamSlot, experts: Collection[int] | None) -> None:
        """Read what is missing of some experts, or of all, into a unit that is in memory."""
        missing = self._memory.missing(slot, experts)
        if not missing or slot.shares is None:
            return
        try:
            with self.failing():
                fill = self._memory.fill_experts(slot, missing)
                self._experts_bytes += self.host.read_more(slot, fill)
        except BaseException:
            self._memory.show_nothing(slot, missing)
            raise
        slot.shares |= missing
        if len(slot.shares) == slot.unit.fused:
            slot.shares = None

    # Staying and going

    def settle(self, held: Sequence[ParamSlot]) -> None:
        """Have units that are held, and whole, stay in memory."""
        for slot in held:
            if slot.unit not in self.settled and slot.shares is None:
                slot.holds += 1
                self.settled[slot.unit] = self._owner.claim(self.top.let_go, [slot])

    def unsettle(self) -> None:
        """Have every user ask again, before units that nobody uses go or change."""
        self.settled.clear()
        self._owner.release_dropped()

    def drop_idle(self) -> None:
        """Drop all units that nobody uses."""
        self.unsettle()
        self.top.drop_idle()
        self.host.drop_idle()

    def close(self) -> None:
        """Drop everything; nothing is in flight then."""
        if self.on_device is not None:
            self.on_device.close()
        self.host.drop_all()
