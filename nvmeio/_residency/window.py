"""The window: the units in memory, their holders, the units on their way; their memory.

All methods are called in the thread that owns it; a caller hands over a request and gets a claim.
So nothing here is ever cut in half by an interrupt: a unit is bound when all of its bytes are there
and have been checked, and not before; one whose read fails goes.

A `Keeper` and an `Order` make the difference between uses: the sources of memory and bytes and the
way that parameters lie over them; the next unit to read, and the units that may go.
"""

from __future__ import annotations

import abc
import itertools
import math
import operator
import time
import weakref
from collections.abc import Hashable, Iterable
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from nvmeio._bindings import memory_at
from nvmeio._memory.leases import FreeBlocks
from nvmeio._memory.mappings import Mapping
from nvmeio._pages import PAGE_BYTES, round_up
from nvmeio._residency.order import Order
from nvmeio._residency.reader import Fill, Reader
from nvmeio.buffers import empty_aligned
from nvmeio.errors import ClosedError
from nvmeio.pool import Lease, PinnedPool

Unit = TypeVar("Unit", bound=Hashable)


class Slot(Generic[Unit]):
    """The memory of a unit, while it has any.

    Attributes:
        unit: The unit of this memory.
        host: The memory that is read into: its bytes, or their way to a device. It does not count
            as a use of `memory`, since reads may refer to it for a moment longer.
        memory: Its bytes for computing; empty once they were given back.
        fill: The reads under way; None when they are done and checked.
        holds: How many callers hold it.
        bound: Whether its parameters lie over it.
        shares: Experts of a mixture whose bytes are there; None where nothing is missing.
    """

    def __init__(self, unit: Unit, host: torch.Tensor, memory: torch.Tensor) -> None:
        self.unit = unit
        self.host = host
        self.memory = memory
        self.fill: Fill | None = None
        self.holds = 0
        self.bound = False
        self.shares: set[int] | None = None


# The place of a tensor in memory: its first byte, dtype, shape and strides.
Place = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]

SomeSlot = TypeVar("SomeSlot", bound=Slot)  # type: ignore[type-arg]


class Keeper(abc.ABC, Generic[Unit, SomeSlot]):
    """The keeper of a window's units: their memory, reads and parameters."""

    @abc.abstractmethod
    def take(self, unit: Unit) -> SomeSlot | None:
        """Memory for a unit; None if none is free now."""

    @abc.abstractmethod
    def take_anyway(self, unit: Unit) -> SomeSlot:
        """Memory for a unit that is needed while none is free; raises if there is no way."""

    @abc.abstractmethod
    def fill(self, slot: SomeSlot) -> Fill:
        """The reads that bring its bytes."""

    def check(self, slot: SomeSlot) -> None:
        """Raise if what was read must not be used."""

    def explain(self, slot: SomeSlot, error: BaseException) -> BaseException:
        """The error to raise for a read that failed."""
        return error

    def bind(self, slot: SomeSlot) -> None:
        """Lay the parameters over their bytes."""

    def unbind(self, slot: SomeSlot) -> None:
        """Let them show nothing again."""

    def may_go(self, slot: SomeSlot, needed: bool) -> bool:
        """Whether memory may lose a unit that nobody holds; may raise if its room is needed."""
        return True

    def rest(self, slot: SomeSlot) -> bool:
        """Whether a unit goes that nobody holds, and whose order lets it go. May unbind."""
        return True

    def give_back(self, slot: SomeSlot) -> None:
        """Release its memory, which is free with the last tensor over it."""
        slot.memory = slot.memory.new_empty(0)


class Window(Generic[Unit, SomeSlot]):
    """Units in memory.

    At most `ahead_units` are read at a time before they are needed, or `ahead_bytes` if that is
    more; None: as many as find room.

    Attributes:
        reader: The reader that brings the bytes.
        units_read: How many were begun.
        bytes_read: Their bytes.
        mispredicted: Needed and not on their way, the very first aside.
        dropped: Read, in whole or in part, and not used.
        waited_s: How long reads were waited for.
    """

    def __init__(
        self,
        reader: Reader,
        keeper: Keeper[Unit, SomeSlot],
        order: Order[Unit],
        ahead_units: int | None = None,
        ahead_bytes: int = 0,
    ) -> None:
        self.reader = reader
        self._keeper = keeper
        self._order = order
        self._most = None if ahead_units is None else (ahead_units, ahead_bytes)
        self._slots: dict[Unit, SomeSlot] = {}
        self._ahead: list[Unit] = []  # begun and not needed yet, in the order of their reads
        self.units_read = self.bytes_read = self.mispredicted = self.dropped = 0
        self.waited_s = 0.0

    # Requested by computing callers

    def need(self, unit: Unit, computing: bool = True, backward: bool = False) -> SomeSlot:
        """Have a unit in memory, whole and bound, and begin to read what comes next.

        The model computes with it now if `computing`; else that does not count for the order, and
        begins nothing else.
        """
        slot = self._slots.get(unit)
        if computing:
            self._order.note(unit, backward)
            self._expected(unit, slot)
        if slot and not slot.holds and slot.fill and isinstance(slot.fill.error, MemoryError):
            self.drop(unit)  # read ahead when there was none; now it is needed
            slot = None
        if slot is None:
            slot = self._begin(unit, self._room(unit))
        if computing:
            slot.holds += 1  # what comes next may not have the room of this one
            try:
                self.look_ahead()
            finally:
                slot.holds -= 1
        self._arrive(slot)
        return slot

    def hold(
        self, units: Iterable[Unit], computing: bool = True, backward: bool = False
    ) -> list[SomeSlot]:
        """`need` of several units, which stay until `let_go`."""
        held: list[SomeSlot] = []
        try:
            for unit in units:
                slot = self.need(unit, computing, backward)
                slot.holds += 1
                held.append(slot)
        except BaseException:
            self.let_go(held)
            raise
        return held

    def let_go(self, slots: Iterable[SomeSlot]) -> None:
        """Release these."""
        for slot in slots:
            slot.holds -= 1
            if not slot.holds and self._slots.get(slot.unit) is slot:
                self._rest(slot)

    def _rest(self, slot: SomeSlot) -> bool:
        """Drop a unit that does not stay after its use; returns whether it was dropped."""
        if self._order.stays or not self._keeper.rest(slot):
            return False
        self.drop(slot.unit)
        return True

    def blank(self, unit: Unit) -> SomeSlot:
        """Memory for a unit whose bytes are about to be made; bound."""
        self.drop(unit)
        slot = self._slots[unit] = self._room(unit)
        self._bind(slot)
        return slot

    @property
    def there(self) -> list[SomeSlot]:
        """The slots of all units in memory or on their way."""
        return list(self._slots.values())

    def slot(self, unit: Unit) -> SomeSlot | None:
        return self._slots.get(unit)

    def arrived(self, unit: Unit) -> SomeSlot | None:
        """The slot of a unit whose bytes are all there, bound or not; None: ask the owner.

        From any thread, for a keeper that checks nothing. The slot may go at any moment, so only
        memory that is never taken from under a tensor (`LentPool`) can be used then.
        """
        slot = self._slots.get(unit)
        if slot is None:
            return None
        fill = slot.fill
        return slot if slot.bound or (fill is not None and fill.whole) else None

    def let_compute(self, slots: Iterable[SomeSlot], stream: Any) -> None:
        """Order a stream's work from now on after the arrival of these. From any thread."""

    def to_write(self, slot: SomeSlot, stream: Any) -> torch.Tensor:
        """The bytes that a stream has left in a slot, where they can be written from."""
        return slot.host

    def note(self, unit: Unit, backward: bool = False) -> None:
        """Note the use of a unit that `arrived` found, and begin to read what comes next."""
        self._order.note(unit, backward)
        self._expected(unit, self._slots.get(unit))
        self.look_ahead()

    # Coming

    def look_ahead(self) -> None:
        """Begin to read what comes next, as far as there is room."""
        units = nbytes = 0
        if self._most is not None:
            under_way = [s.fill for s in self._slots.values() if s.fill and s.fill.under_way]
            units, nbytes = len(under_way), sum(fill.nbytes for fill in under_way)
        for unit in self._order.upcoming():
            if self._most is not None and units >= self._most[0] and nbytes >= self._most[1]:
                return
            if unit in self._slots:
                continue
            memory = self._try_room(unit, needed=False)
            if memory is None:
                return
            slot = self._begin(unit, memory)
            self._ahead.append(unit)
            units += 1
            nbytes += slot.fill.nbytes if slot.fill else 0

    def _expected(self, unit: Unit, slot: SomeSlot | None) -> None:
        """Drop what was expected before this unit: it is not used."""
        if unit in self._ahead:
            place = self._ahead.index(unit)
            passed, self._ahead = self._ahead[:place], self._ahead[place + 1 :]
        elif slot is None:
            passed, self._ahead = self._ahead, []
            if self.units_read:
                self.mispredicted += 1
        else:
            return
        for each in passed:
            found = self._slots.get(each)
            if found is not None and not found.holds:
                self.dropped += self._rest(found)

    def _begin(self, unit: Unit, slot: SomeSlot) -> SomeSlot:
        self._slots[unit] = slot
        try:
            slot.fill = self._fill(slot)
            self.reader.submit(slot.fill)
        except BaseException:
            self.drop(unit)
            raise
        self.units_read += 1
        self.bytes_read += slot.fill.nbytes
        return slot

    def _fill(self, slot: SomeSlot) -> Fill:
        return self._keeper.fill(slot)

    def _arrive(self, slot: SomeSlot) -> None:
        if slot.fill is not None:
            began = time.perf_counter()
            self.reader.wait(slot.fill)
            self.waited_s += time.perf_counter() - began
            try:
                self._check(slot)
            except BaseException:
                self.drop(slot.unit)
                raise
        if not slot.bound:
            self._bind(slot)

    def _check(self, slot: SomeSlot) -> None:
        """Raise if a unit whose reads have ended must not be used."""
        fill = slot.fill
        assert fill is not None
        if fill.error is not None:
            error = self._keeper.explain(slot, fill.error)
            if error is not fill.error:
                error.__cause__ = fill.error
            raise error
        if not fill.whole:
            raise ClosedError(
                "the reads were stopped: the model or module that they were for was closed"
            )
        self._keeper.check(slot)
        slot.fill = None

    def read_now(self, slot: SomeSlot) -> int:
        """Read into a slot that is held, or that is in no window; returns how many bytes."""
        return self.read_more(slot, self._fill(slot))

    def read_more(self, slot: SomeSlot, fill: Fill) -> int:
        """Read more into such a slot; returns how many bytes.

        After an error nothing writes there, and it may be tried again.
        """
        slot.fill = fill
        try:
            self.reader.submit(fill)
            self.reader.wait(fill)
            self._check(slot)
        except BaseException:
            self.reader.cancel(fill)
            slot.fill = None
            raise
        return fill.nbytes

    def _bind(self, slot: SomeSlot) -> None:
        slot.bound = True
        try:
            self._keeper.bind(slot)
        except BaseException:
            self.drop(slot.unit)
            raise

    # Going

    def _room(self, unit: Unit) -> SomeSlot:
        """Memory for a unit that is needed now, whatever has to go."""
        slot = self._try_room(unit, needed=True)
        return self._keeper.take_anyway(unit) if slot is None else slot

    def _try_room(self, unit: Unit, needed: bool) -> SomeSlot | None:
        slot = self._keeper.take(unit)
        if slot is not None:
            return slot
        if not self._order.stays:  # used ones went at once
            return None
        idle = [each.unit for each in self._slots.values() if not each.holds]
        for each in self._order.may_go(idle, None if needed else unit):
            if self._keeper.may_go(self._slots[each], needed):
                self.drop(each)
            slot = self._keeper.take(unit)
            if slot is not None:
                return slot
        return None

    def drop(self, unit: Unit) -> None:
        """Drop a unit even if it is held; nothing is in flight into its memory then."""
        slot = self._slots.pop(unit, None)
        if slot is None:
            return
        if unit in self._ahead:
            self._ahead.remove(unit)
        if slot.fill is not None:
            self.reader.cancel(slot.fill)
        if slot.bound:
            slot.bound = False
            self._keeper.unbind(slot)
        self._keeper.give_back(slot)

    def drop_idle(self) -> None:
        """Drop all units that nobody holds."""
        for slot in self.there:
            if not slot.holds and self._keeper.may_go(slot, needed=False):
                self.drop(slot.unit)

    def drop_ahead(self) -> None:
        """Drop what was read ahead and not needed yet."""
        for unit in [each for each in self._ahead if not self._slots[each].holds]:
            self.drop(unit)

    def drop_all(self) -> None:
        self._order.forget()
        for unit in list(self._slots):
            self.drop(unit)


class _Lent(NamedTuple):
    """Memory that is out.

    Attributes:
        mark: Tells its end; kept for that.
        start: Its place in the arena; None for memory of its own.
        nbytes: The bytes that the budget counts.
    """

    mark: weakref.ref[Any]
    start: int | None
    nbytes: int


class LentPool:
    """Memory of a fixed budget that is lent: free again with the last tensor over `Slot.memory`.

    Page-locked where the process may lock that much. For owners of their own threads: one thread
    takes, or several in turn, and no interrupt comes there; others lease from a `PinnedPool`.

    Nothing is taken from under a tensor: autograd, a user, an error's traceback may still have one.
    The end of a storage is told by a weak reference whose callback is `SimpleQueue.put` itself, a C
    function, so no interrupt loses it; what came back is looked at before memory is given.

    Attributes:
        budget_bytes: Size of the arena, in whole pages.
        locked: Whether it is page-locked (and known to CUDA, if CUDA was used before).
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = round_up(budget_bytes, PAGE_BYTES)
        arena = Mapping(self.budget_bytes)
        self.locked = arena.lock_if_allowed()
        self._arena: Mapping | None = arena
        self._free = FreeBlocks(self.budget_bytes)
        self._ended: SimpleQueue[weakref.ref[Any]] = SimpleQueue()
        self._out: dict[int, _Lent] = {}  # by the id of the mark
        self._apart_bytes = 0
        self._refused_bytes = math.inf  # so much was not free, and nothing has come back since

    def take(self, unit: Unit, nbytes: int) -> Slot[Unit] | None:
        """Memory for a unit, page-aligned; None if none is free now."""
        arena = self._arena
        if arena is None:
            raise ClosedError("the pool is closed: make a new one")
        if not self._ended.empty():
            self._take_back()
        elif nbytes >= self._refused_bytes:
            return None
        if self._apart_bytes and self.in_use_bytes + nbytes > self.budget_bytes:
            return None
        charged = nbytes + -nbytes % PAGE_BYTES  # `round_up`: each layer comes this way
        start = self._free.take(charged)
        if start is None:
            self._refused_bytes = nbytes
            return None
        try:
            # The arena stays mapped for as long as the storage lives, whatever is closed.
            return self._lend(unit, arena.tensor(start, (nbytes,), torch.uint8), start, charged)
        except BaseException:
            self._refused_bytes = math.inf
            self._free.put(start, charged)
            raise

    def take_apart(self, unit: Unit, nbytes: int) -> Slot[Unit] | None:
        """Memory outside of the pool, for a unit that finds enough free bytes only in pieces.

        It counts against the budget; None if too few bytes are free.
        """
        if self.in_use_bytes + nbytes > self.budget_bytes:
            return None
        memory = empty_aligned(nbytes, dtype=torch.uint8)
        self._apart_bytes += nbytes
        return self._lend(unit, memory, None, nbytes)

    def take_beyond(self, unit: Unit, nbytes: int) -> Slot[Unit]:
        """Memory that no budget counts, where tensors that somebody keeps have the pool's."""
        return self._lend(unit, empty_aligned(nbytes, dtype=torch.uint8), None, 0)

    def _lend(self, unit: Unit, lent: torch.Tensor, start: int | None, nbytes: int) -> Slot[Unit]:
        room = memory_at(lent.data_ptr(), lent.nbytes, lent)
        slot = Slot(unit, lent, torch.frombuffer(room, dtype=torch.uint8))
        # Last: once it is there its end gives the memory back, and a caller that catches an error
        # may not do so, too.
        mark = weakref.ref(room, self._ended.put)
        self._out[id(mark)] = _Lent(mark, start, nbytes)
        return slot

    def _take_back(self) -> None:
        while not self._ended.empty():
            self._refused_bytes = math.inf
            _, start, nbytes = self._out.pop(id(self._ended.get()))
            if start is None:
                self._apart_bytes -= nbytes
            else:
                self._free.put(start, nbytes)

    def close(self) -> None:
        """Refuse new requests; tensors that are out stay valid, and their memory mapped."""
        self._arena = None

    @property
    def in_use_bytes(self) -> int:
        """Bytes of the budget that are out, in whole pages."""
        self._take_back()
        return self.budget_bytes - self._free.nbytes + self._apart_bytes


def lease_now(pool: PinnedPool, nbytes: int) -> tuple[Lease, torch.Tensor] | None:
    """A lease that was entered, and its memory; None if none is free now."""
    if pool.in_use_bytes + nbytes > pool.budget_bytes:
        return None  # the usual case of a full window; to queue and fail takes six times as long
    lease = pool.take(nbytes, timeout=0)
    try:
        return lease, lease.__enter__()
    except TimeoutError:  # in pieces that are too small
        return None


def laid_over(memory: torch.Tensor, places: Iterable[Place]) -> list[torch.Tensor]:
    """Lay tensors over memory: each has its first byte, dtype, shape and strides there.

    Strides of () are row-major order. Each takes one call of torch: with every call a thread gives
    up the interpreter's lock, and waits for it again in the middle of the model's computation.
    """
    found: list[torch.Tensor] = []
    typed: dict[torch.dtype, torch.Tensor] = {}
    for start, dtype, shape, strides in places:
        if 0 in shape:
            found.append(torch.empty(shape, dtype=dtype, device=memory.device))
            continue
        if dtype not in typed:
            typed[dtype] = memory.view(dtype)
        first = start // dtype.itemsize
        found.append(typed[dtype].as_strided(shape, strides or row_major(shape), first))
    return found


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor in row-major order."""
    return (*itertools.accumulate(shape[:0:-1], operator.mul, initial=1),)[::-1] if shape else ()
