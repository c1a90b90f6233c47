"""Windows on a device: straight from the drive, or above one in host memory.

`DeviceWindow` has no host memory below it. GPUDirect Storage reads into the device's memory and
knows nothing of streams, so waiting threads make all order. A read begins once what was computed in
its memory is over: the reader's thread waits for that, by an event. A caller that computes with a
unit has waited for its bytes, so its work on any stream finds them there. cuFile goes through
memory of its own for any that is not registered with it, so units lie in one arena that is
(`DevicePool.reserve`).

`WindowAbove` has its units from the window below it, by copies beside work. A unit that is needed
is requested from the one below first; the next unit is begun as soon as it has arrived there.
Nobody waits for a copy: the stream that computes does, by an event, and the copies wait for what
was computed in the memory that they go into.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from nvmeio._memory import devices
from nvmeio._memory.devices import Mark
from nvmeio._memory.leases import FreeBlocks
from nvmeio._pages import PAGE_BYTES, round_up
from nvmeio._residency.order import Limited, Order
from nvmeio._residency.reader import Fill, Reader, Reads
from nvmeio._residency.window import Keeper, Slot, Window
from nvmeio._threads.closing import collect
from nvmeio.files import File
from nvmeio.operation import Operation


class SizedUnit(Hashable, Protocol):
    """A unit that says how many bytes it takes."""

    nbytes: int


Unit = TypeVar("Unit", bound=SizedUnit)
_AHEAD = 2
_End: Any = StorageWeakRef
_GPU_PAGE_BYTES = 64 << 10  # what cuFile registers begins on one


class DeviceSlot(Slot[Unit]):
    """A unit's memory on a device, and the streams that compute with it.

    `copied` says when its bytes are there, for streams of the device; None before the copy was
    begun.
    """

    def __init__(self, unit: Unit, memory: torch.Tensor) -> None:
        super().__init__(unit, memory.new_empty(0), memory)
        self.copied: Mark | None = None
        self.streams: list[Any] = []


class DevicePool:
    """A budget of a device's memory, which is free again with the last tensor over it.

    torch's allocator gives it to the next one then. So it is allocated on the stream that computes
    with it, which may have it again at once; other streams are recorded (`devices.record_use`). One
    thread takes and copies. `copies` fill it, if others than its own do.

    Memory that cuFile reads into must be registered with it, once: `reserve` has parts come from
    one arena. Its memory is the pool's until nobody has a part of it, and no allocator's meanwhile.
    """

    def __init__(
        self, device: torch.device, budget_bytes: int, copies: devices.Beside | None = None
    ) -> None:
        self.device = device
        self.budget_bytes = budget_bytes
        self.refused: BaseException | None = None  # the device had less than the budget
        self._copies = copies or devices.Beside(device, "parameters")
        self._streams: list[Any] = []  # that have worked on it
        self._arena: torch.Tensor | None = None
        self._free = FreeBlocks(0)  # of the arena
        # The end of a storage, its bytes, and what it has of the arena: where, and how much.
        self._lent: list[tuple[Any, int, int, int]] = []
        self._sources: deque[tuple[Mark, torch.Tensor]] = deque()  # host memory under way

    def reserve(self, parts: Sequence[int]) -> torch.Tensor:
        """Take an arena for parts of these lengths, or for as many as the budget allows."""
        pages = sum(round_up(nbytes, PAGE_BYTES) for nbytes in parts)
        pages = min(pages, round_up(self.budget_bytes, PAGE_BYTES) + PAGE_BYTES * len(parts))
        memory = self._new(pages + _GPU_PAGE_BYTES)
        start = -memory.data_ptr() % _GPU_PAGE_BYTES
        self._arena, self._free = memory[start : start + pages], FreeBlocks(pages)
        return self._arena

    def close(self) -> None:
        """Take nothing any more; an arena goes with the last tensor over a part of it."""
        self._arena = None

    def take(self, nbytes: int) -> torch.Tensor | None:
        """Memory for copies to go into, on whole pages of an arena; None if none is free now."""
        self.take_back()
        if self._arena is None:
            return self.take_apart(nbytes)
        pages = round_up(nbytes, PAGE_BYTES)
        is_free = self.in_use_bytes + nbytes <= self.budget_bytes
        start = self._free.take(pages) if is_free else None
        if start is None:  # or in pieces that are too small
            return None
        return self._lend(devices.part_of(self._arena, start, nbytes), start, pages)

    def take_apart(self, nbytes: int) -> torch.Tensor | None:
        """Memory of torch's allocator; it counts against the budget."""
        if self.in_use_bytes + nbytes > self.budget_bytes:
            return None
        try:
            return self._lend(self._new(nbytes), 0, 0)
        except torch.OutOfMemoryError as refused:
            self.refused = refused.with_traceback(None)
            return None

    def _new(self, nbytes: int) -> torch.Tensor:
        # On the last stream that computed.
        stream = self._streams[-1] if self._streams else devices.stream_here(self.device)
        with devices.on_stream(stream):
            memory = devices.empty(nbytes, self.device)
        # Its former user may still be at work there, though no tensor is over it.
        self._copies.follow(stream)
        return memory

    def _lend(self, memory: torch.Tensor, start: int, pages: int) -> torch.Tensor:
        self._lent.append((_End(memory.untyped_storage()), memory.nbytes, start, pages))
        return memory

    def take_back(self) -> None:
        """Release what nobody uses any more: memory of the device, and sources of copies."""
        self._free_lent(lambda end: bool(end.expired()))
        while self._sources and self._sources[0][0].done():
            self._sources.popleft()

    def forget(self, memory: torch.Tensor) -> None:
        """Stop counting what only an ended read used; a traceback may refer to it still."""
        self._free_lent(_End(memory.untyped_storage()).__eq__)

    def _free_lent(self, goes: Callable[[Any], bool]) -> None:
        for each in [each for each in self._lent if goes(each[0])]:
            self._lent.remove(each)
            self._free.put(*each[2:])

    def free(self) -> Mark:
        """All that streams were asked so far: memory taken now may be written to after it."""
        self.after_compute()
        return self._copies.mark()

    def upload(self, memory: torch.Tensor, source: torch.Tensor) -> Mark:
        """Begin a copy to the device; its source is kept until it is done."""
        self._copies.copy(memory, source)
        mark = self._copies.mark()
        self._sources.append((mark, source))
        return mark

    def download(self, target: torch.Tensor, memory: torch.Tensor, stream: Any) -> None:
        """Copy to the host what a stream computes in memory, and wait."""
        self._copies.follow(stream)
        self._copies.copy(target, memory)
        self._copies.mark().wait()

    def used_by(self, stream: Any) -> None:
        """Note that a stream works with the pool's memory. From any thread."""
        if stream not in self._streams:
            self._streams.append(stream)
            if self._arena is not None:
                devices.record_use(self._arena, stream)

    def record_use(self, memory: torch.Tensor, stream: Any) -> None:
        """Note that a stream works with memory that may go before it is done. From any thread."""
        arena = self._arena  # recorded as a whole
        if arena is None or not 0 <= memory.data_ptr() - arena.data_ptr() < arena.nbytes:
            devices.record_use(memory, stream)

    def after_compute(self) -> None:
        """Order copies from now on after all that streams were asked."""
        for stream in tuple(self._streams):
            self._copies.follow(stream)

    def before_compute(self, mark: Mark) -> None:
        """Order what streams are asked from now on after a mark."""
        for stream in (*self._streams, devices.stream_here(self.device)):
            devices.come_after(stream, mark)

    def wait_for_one(self) -> bool:
        """Wait for the oldest copy under way, and release its source; False if there is none."""
        if not self._sources:
            return False
        self._sources[0][0].wait()
        self._sources.popleft()
        return True

    @property
    def in_use_bytes(self) -> int:
        return sum(nbytes for _, nbytes, _, _ in self._lent)


class DeviceKeeper(Keeper[Unit, DeviceSlot[Unit]]):
    """Keeps the units of another keeper, in memory of a device."""

    def __init__(self, pool: DevicePool, units: Keeper[Unit, Slot[Unit]]) -> None:
        self._pool = pool
        self._units = units

    def fill(self, slot: DeviceSlot[Unit]) -> Fill:
        return self._units.fill(slot)

    def explain(self, slot: DeviceSlot[Unit], error: BaseException) -> BaseException:
        return self._units.explain(slot, error)

    def bind(self, slot: DeviceSlot[Unit]) -> None:
        self._units.bind(slot)

    def unbind(self, slot: DeviceSlot[Unit]) -> None:
        self._units.unbind(slot)

    def may_go(self, slot: DeviceSlot[Unit], needed: bool) -> bool:
        return self._units.may_go(slot, needed)

    def take(self, unit: Unit) -> DeviceSlot[Unit] | None:
        memory = self._pool.take(unit.nbytes)
        return None if memory is None else DeviceSlot(unit, memory)

    def take_anyway(self, unit: Unit) -> DeviceSlot[Unit]:
        """Take it outside of an arena too; the error says what is too small, budget or device."""
        collect()  # what looks free may be held by a tensor in a cycle
        nbytes, pool = unit.nbytes, self._pool
        pool.refused = None
        memory = pool.take(nbytes)
        if memory is None:
            memory = pool.take_apart(nbytes)
        if memory is not None:
            return DeviceSlot(unit, memory)
        if pool.refused is not None:
            raise MemoryError(
                f"{pool.device} has no {nbytes} bytes for one more part, although device_bytes="
                f"{pool.budget_bytes} would allow it ({pool.in_use_bytes} are in use): lower "
                "device_bytes, or free other memory there (batch, activations)"
            ) from pool.refused
        raise MemoryError(
            f"device_bytes={pool.budget_bytes} is too small: {nbytes} bytes are needed for one "
            f"more part, and {pool.in_use_bytes} are held by the modules that run now or by "
            f"tensors over parameters: give device_bytes={pool.in_use_bytes + nbytes} or more "
            "(further parts may come), or checkpoint smaller regions"
        )

    def give_back(self, slot: DeviceSlot[Unit]) -> None:
        fill = slot.fill
        if fill is not None and fill.on_device and not fill.whole:
            self._pool.forget(slot.memory)
        if slot.copied is not None and not slot.streams:
            self._pool.before_compute(slot.copied)  # in the memory's next user, maybe
        super().give_back(slot)


class DeviceWindow(Window[Unit, DeviceSlot[Unit]], Generic[Unit]):
    """Units on a device; a window of its own has a reader with `OrderedReads`."""

    def __init__(
        self,
        reader: Reader,
        pool: DevicePool,
        order: Order[Unit],
        units: Keeper[Unit, Slot[Unit]],
        ahead_units: int,
        ahead_bytes: int,
    ) -> None:
        super().__init__(reader, DeviceKeeper(pool, units), order, ahead_units, ahead_bytes)
        self._pool = pool

    def let_compute(self, slots: Iterable[DeviceSlot[Unit]], stream: Any) -> None:
        self._pool.used_by(stream)
        for slot in slots:
            memory = slot.memory  # which may go meanwhile
            if memory.nbytes and stream not in slot.streams:
                slot.streams.append(stream)
                self._pool.record_use(memory, stream)
            if slot.copied is not None:
                devices.come_after(stream, slot.copied)

    def to_write(self, slot: DeviceSlot[Unit], stream: Any) -> torch.Tensor:
        devices.asked_of(stream).wait()
        return slot.memory

    def close(self) -> None:
        """Let everything go, and wait until nothing is under way."""
        self.drop_all()
        with contextlib.suppress(RuntimeError):  # a device that failed stops copying
            while self._pool.wait_for_one():
                pass
        self._pool.close()


class WindowAbove(DeviceWindow[Unit]):
    """Units on a device that come from a window in host memory.

    The order of the window below leaves out what is on the device; `order` is one of its own.
    """

    def __init__(
        self,
        below: Window[Unit, Slot[Unit]],
        pool: DevicePool,
        order: Order[Unit],
        units: Keeper[Unit, Slot[Unit]],
    ) -> None:
        limited = Limited(order, self._arrived_below)
        super().__init__(below.reader, pool, limited, units, _AHEAD, 0)
        self._below = below

    def _arrived_below(self, upcoming: Iterator[Unit]) -> Iterator[Unit]:
        return takewhile(lambda unit: self.slot(unit) or self._below.arrived(unit), upcoming)

    def need(self, unit: Unit, computing: bool = True, backward: bool = False) -> DeviceSlot[Unit]:
        """See `Window.need`; `let_compute` says when it may be used."""
        if unit not in self._slots:
            self._below.need(unit, computing, backward)
        elif computing:
            self._below.note(unit, backward)
        return super().need(unit, computing, backward)

    def note(self, unit: Unit, backward: bool = False) -> None:
        self._below.note(unit, backward)
        super().note(unit, backward)

    def _fill(self, slot: DeviceSlot[Unit]) -> Fill:
        below = self._below.need(slot.unit, computing=False).memory
        return Fill((), finished=partial(self._copy, slot, below))

    def _copy(self, slot: DeviceSlot[Unit], below: torch.Tensor) -> None:
        slot.copied = self._pool.upload(slot.memory, below)

    def read_now(self, slot: DeviceSlot[Unit]) -> int:
        """Copy a unit that has changed below again, into the same memory."""
        self._pool.after_compute()
        mark = self._pool.upload(slot.memory, self._below.need(slot.unit, computing=False).memory)
        slot.copied = mark
        self._pool.before_compute(mark)  # in a pass that goes on, nobody asks for it again
        return 0

    def to_write(self, slot: DeviceSlot[Unit], stream: Any) -> torch.Tensor:
        """Copy it into the window below."""
        host = self._below.need(slot.unit, computing=False).host
        self._pool.download(host, slot.memory, stream)
        return host


class OrderedReads:
    """Reads that wait for no stream: their caller has waited.

    A handle orders a transfer after the work of the current stream. Here that is a stream without
    any. Host memory is as ever.
    """

    def __init__(self, handle: Reads, device: torch.device) -> None:
        self._handle = handle
        self._stream = devices.side_stream(device, "reads")

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Begin transfers in the block that wait for no stream either."""
        with devices.on_stream(self._stream):
            yield

    def async_pread(self, memory: torch.Tensor, file: File, file_offset: int = 0, /) -> Operation:
        with self.on_stream():
            return self._handle.async_pread(memory, file, file_offset)
