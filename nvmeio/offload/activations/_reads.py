"""Reads of activations that are on the drive alone: ahead of backward, within half of the budget.

A window over saved storages. Backward goes the other way round: when it asks for one, those that
were saved before it are read ahead, as far as there is memory for them. A storage that was handed
out leaves the window, and its memory is free with the last tensor over it. All of it is in the
thread that owns the store.
"""

from __future__ import annotations

import bisect
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from nvmeio._io.drives import DriveHandles, ScratchFile
from nvmeio._residency.reader import Fill, Reader, WantedBytes
from nvmeio._residency.window import Keeper, LentPool, Slot, Window
from nvmeio._storage import crc32
from nvmeio._torch_private import storage_of_weak_pointer, storage_use_count
from nvmeio.errors import IntegrityError
from nvmeio.operation import Operation

Saved = TypeVar("Saved", bound="SavedStorage")


class LastSavedFirst(Generic[Saved]):
    """The order in which backward needs saved storages; an `Order`.

    `saved` is what has to be brought, by number: the last saved has the highest. `here` is the
    number that backward has reached.
    """

    stays = True

    def __init__(self) -> None:
        self.saved: list[Saved] = []
        self.here = 0

    def add(self, saved: Saved) -> None:
        """Note that this storage has to be brought from now on."""
        bisect.insort(self.saved, saved, key=_number)

    def remove(self, saved: Saved) -> None:
        """Note that nobody wants it any more."""
        del self.saved[bisect.bisect_left(self.saved, saved.number, key=_number)]

    def note(self, unit: Saved, backward: bool = True) -> None:
        self.here = unit.number

    def upcoming(self) -> Iterator[Saved]:
        """Storages saved before `here` that nobody holds, the last saved first."""
        for at in range(bisect.bisect_left(self.saved, self.here, key=_number) - 1, -1, -1):
            saved = self.saved[at]
            if saved.out is None or saved.out.expired():
                yield saved

    def may_go(self, units: Iterable[Saved], expected: Saved | None) -> Sequence[Saved]:
        """The storages saved first go first, and only for a request that waits now."""
        return () if expected is not None else sorted(units, key=_number)

    def forget(self) -> None:
        """Do nothing: no pass follows from another."""


class ActivationReads(Keeper["SavedStorage", Slot["SavedStorage"]]):
    """The storages that are on the drive alone, and the reads that bring them back.

    `budget_bytes` is for what is read, until the last tensor over it is gone. `nbytes` are all that
    is on the drive alone.
    """

    def __init__(self, file: ScratchFile, handles: DriveHandles, budget_bytes: int) -> None:
        self.nbytes = self.read_bytes = 0
        self._file = file
        self._budget_bytes = budget_bytes
        self._pool: LentPool | None = None
        self._order: LastSavedFirst[SavedStorage] = LastSavedFirst()
        self._window: Window[SavedStorage, Slot[SavedStorage]] = Window(
            Reader(handles), self, self._order
        )

    def add(self, saved: SavedStorage) -> None:
        """Note that a storage's bytes are on the drive alone from now on."""
        self.nbytes += saved.nbytes
        self._order.add(saved)

    def remove(self, saved: SavedStorage) -> None:
        """Free a storage's place in the file: nobody wants its bytes any more."""
        self._window.drop(saved)
        self._order.remove(saved)
        self.nbytes -= saved.nbytes
        self._file.give_back(saved.place, saved.nbytes)

    def close(self) -> None:
        try:
            self._window.reader.stop()
        finally:
            if self._pool is not None:
                self._pool.close()

    def bring(self, saved: SavedStorage) -> torch.UntypedStorage:
        """A storage's bytes in memory, as somebody still has them or as read.

        IntegrityError if they differ from the written ones.
        """
        if saved.out is not None:
            alive = locked(saved.out)
            if alive is not None:
                return alive
        memory = self._window.need(saved).memory
        self._window.drop(saved)
        self.read_bytes += saved.nbytes
        storage = memory.untyped_storage()
        saved.out = mark_of(storage)
        return storage

    def arrived(self, saved: SavedStorage) -> bool:
        """Whether `bring` would find its bytes in memory."""
        return self._window.arrived(saved) is not None

    def look_ahead(self, number: int) -> None:
        """Begin to read storages that were saved before this number, the last first."""
        self._order.here = number
        self._window.look_ahead()

    # For the window

    def take(self, unit: SavedStorage) -> Slot[SavedStorage] | None:
        if self._pool is None:
            self._pool = LentPool(self._budget_bytes)
        return self._pool.take(unit, unit.nbytes)

    def take_anyway(self, unit: SavedStorage) -> Slot[SavedStorage]:
        """Memory beside the budget: backward cannot go on without."""
        memory = torch.empty(unit.nbytes, dtype=torch.uint8)
        return Slot(unit, memory, memory)

    def fill(self, slot: Slot[SavedStorage]) -> Fill:
        spans = self._file.spans(slot.unit.place, slot.unit.nbytes)
        return Fill([WantedBytes.of(span, slot.host) for span in spans])

    def check(self, slot: Slot[SavedStorage]) -> None:
        saved = slot.unit
        found = saved.sum if saved.sum is None else crc32.of_tensor(slot.host)
        if found != saved.sum:
            raise IntegrityError(
                f"{self._file.describe(saved.place, saved.nbytes)}: saved activations are not what "
                "was written there: look at `dmesg` and `smartctl -a`, and run the pass again "
                "(checksum=False takes them as they are)",
                expected=f"CRC-32 {saved.sum:08x}",
                found=f"{found:08x}",
            )


@dataclass(eq=False, slots=True)
class SavedStorage:
    """A storage that autograd has saved, and where its bytes are.

    In memory (`storage`), being written (`storage` and `writing`), or on the drive (`place` alone).
    """

    number: int
    storage: torch.UntypedStorage | None
    nbytes: int
    holds: int = 0  # how many saved tensors lie over it
    place: int = 0  # in the file
    writing: list[Operation] | None = None
    begun_in: int = 0  # the round of `_make_room` of its last write
    failed_in: int = 0
    wanted: bool = False  # while it was being written: it stays
    sum: int | None = None  # the CRC-32 of what is in the file
    out: Any = None  # of what was handed out

    def is_alone(self) -> bool:
        """Whether nobody else has the storage, so that its bytes cannot change."""
        storage = self.storage
        if storage is None:
            return False
        tensors: int = storage_use_count(storage._cdata)
        return tensors == 1 and sys.getrefcount(storage) == _ALONE


def _number(saved: SavedStorage) -> int:
    return saved.number


def _references_of_one_alone() -> int:
    """The result of `sys.getrefcount` in `is_alone` if nobody else has the storage."""

    class Holder:
        storage: Any

    holder = Holder()
    holder.storage = torch.empty(1).untyped_storage()
    storage = holder.storage
    return sys.getrefcount(storage)


_ALONE = _references_of_one_alone()


def bytes_over(storage: torch.UntypedStorage | None) -> torch.Tensor:
    """All bytes of a storage, as a tensor."""
    assert storage is not None
    memory = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return memory.set_(storage, 0, (storage.nbytes(),), (1,))


mark_of: Any = StorageWeakRef  # has no types


def locked(mark: Any) -> torch.UntypedStorage | None:
    """The storage, if anybody still has it."""
    found: torch.UntypedStorage | None = storage_of_weak_pointer(mark.cdata)
    return found
