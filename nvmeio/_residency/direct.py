"""A window on a device whose units come straight from the drive: no host memory holds them.

What reads into the device's memory (GPUDirect Storage) knows nothing of streams, so all order is
made by those who wait. A read begins once what was computed in its memory is over: the reader's
thread waits for that, by an event. Who computes with a unit has waited for its bytes, so what he
asks of any stream then finds them there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic

import torch

from nvmeio._memory import devices
from nvmeio._residency.on_device import DeviceKeeper, DevicePool, DeviceSlot, DeviceUnits, Unit
from nvmeio._residency.order import Order
from nvmeio._residency.reader import Fill, Reader, Reads, WantedBytes
from nvmeio._residency.window import Window
from nvmeio.files import File
from nvmeio.operation import Operation


class OrderedReads:
    """Reads that wait for no stream: whoever asks for them has waited.

    A handle has a transfer come after what the current stream was asked. Here that is a stream
    which is asked nothing.

    Args:
        handle: Moves the bytes.
        device: Whose memory they go into; host memory is as ever.
    """

    def __init__(self, handle: Reads, device: torch.device) -> None:
        self._handle = handle
        self._device = device
        self._stream = devices.new_stream(device)

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Transfers that are begun meanwhile wait for no stream either."""
        # The device first: put back on another one, a thread would make a context there.
        with devices.on(self._device), devices.on_stream(self._stream):
            yield

    def async_pread(self, memory: torch.Tensor, file: File, file_offset: int = 0, /) -> Operation:
        """As `AioHandle.async_pread`."""
        with self.on_stream():
            return self._handle.async_pread(memory, file, file_offset)


class _FromDrive(DeviceKeeper[Unit]):
    def __init__(
        self,
        pool: DevicePool,
        units: DeviceUnits[Unit],
        reads: Callable[[Unit, torch.Tensor], Sequence[WantedBytes]],
        explain: Callable[[BaseException], BaseException],
    ) -> None:
        super().__init__(pool, units)
        self._reads = reads
        self._explain = explain

    def fill(self, slot: DeviceSlot[Unit]) -> Fill:
        assert slot.memory is not None
        return Fill(self._reads(slot.unit, slot.memory), after=self._pool.free())

    def explain(self, slot: DeviceSlot[Unit], error: BaseException) -> BaseException:
        return self._explain(error)

    def give_back(self, slot: DeviceSlot[Unit]) -> None:
        if slot.memory is not None and slot.fill is not None and not slot.fill.whole:
            self._pool.forget(slot.memory)
        super().give_back(slot)


class DirectWindow(Window[Unit, DeviceSlot[Unit]], Generic[Unit]):
    """Units on a device, from the drive.

    Args:
        reader: Brings the bytes, by `OrderedReads`; it is the window's, and stops with it.
        pool: The memory.
        order: Of their use.
        units: How they are laid there.
        reads: What brings a unit into memory.
        explain: What is raised for a read that failed.
        ahead_units: As for `Window`.
        ahead_bytes: As for `Window`.
    """

    def __init__(
        self,
        reader: Reader,
        pool: DevicePool,
        order: Order[Unit],
        units: DeviceUnits[Unit],
        reads: Callable[[Unit, torch.Tensor], Sequence[WantedBytes]],
        explain: Callable[[BaseException], BaseException],
        ahead_units: int,
        ahead_bytes: int,
    ) -> None:
        keeper = _FromDrive(pool, units, reads, explain)
        super().__init__(reader, keeper, order, ahead_units, ahead_bytes)
        self._pool = pool

    def let_compute(self, slots: Iterable[DeviceSlot[Unit]], stream: Any) -> None:
        """A stream works on these from now on; their bytes are there. From any thread."""
        self._pool.used_by(stream)

    def close(self) -> None:
        """Let everything go; nothing is under way then."""
        self.drop_all()
