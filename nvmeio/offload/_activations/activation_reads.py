"""What autograd saved and is on the drive alone: read ahead of backward, within half of the budget.

Backward goes the other way round. When it asks for one storage, those that were saved before it are
read ahead, as far as there is memory for them. All of it is in the thread that owns the store.
"""

from __future__ import annotations

import bisect
import sys
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from nvmeio._io.drives import DriveHandles, ScratchFile
from nvmeio._residency.lent import LentPool
from nvmeio._residency.reader import Fill, Reader, WantedBytes
from nvmeio._storage import crc32
from nvmeio.errors import ClosedError, IntegrityError
from nvmeio.operation import Operation


class ActivationReads:
    """The storages that are on the drive alone, and those of them that are being read.

    Args:
        file: Where they are.
        handles: What reads it.
        budget_bytes: For what is read, and until the last tensor over it is gone.
        closed: What is told of a read that the end has cut off.

    Attributes:
        read_bytes: So far.
    """

    def __init__(
        self, file: ScratchFile, handles: DriveHandles, budget_bytes: int, closed: str
    ) -> None:
        self.read_bytes = 0
        self._file = file
        self._reader = Reader(handles)
        self._budget_bytes = budget_bytes
        self._closed = closed
        self._pool: LentPool | None = None
        self._numbers: list[int] = []  # in order: the last saved has the highest
        self._saved: dict[int, SavedStorage] = {}

    @property
    def nbytes(self) -> int:
        """Of all that is on the drive alone."""
        return sum(saved.nbytes for saved in self._saved.values())

    def add(self, saved: SavedStorage) -> None:
        """Its bytes are on the drive alone, from now on."""
        self._saved[saved.number] = saved
        bisect.insort(self._numbers, saved.number)

    def remove(self, saved: SavedStorage) -> None:
        """Nobody wants its bytes any more; its place in the file is free."""
        self._drop(saved)
        del self._saved[saved.number]
        del self._numbers[bisect.bisect_left(self._numbers, saved.number)]
        self._file.give_back(saved.place, saved.nbytes)

    def close(self) -> None:
        """Stop reading."""
        try:
            self._reader.stop()
        finally:
            if self._pool is not None:
                self._pool.close()

    def bring(self, saved: SavedStorage) -> torch.UntypedStorage:
        """Its bytes in memory: those that somebody still has, or read.

        Raises:
            TransferError: They could not be read.
            IntegrityError: They are not what was written.
        """
        if saved.out is not None:
            alive = locked(saved.out)
            if alive is not None:
                return alive
        if saved.ahead is None:
            self._begin(saved, needed=True)
        self.look_ahead(saved.number)
        fill, memory = saved.fill, saved.ahead
        assert fill is not None and memory is not None
        self._reader.wait(fill)
        try:
            if not fill.whole:
                raise fill.error or ClosedError(self._closed)
            if saved.sum is not None:
                self._check(saved, crc32.of_tensor(memory))
        finally:
            _forget(saved)
        self.read_bytes += saved.nbytes
        storage = memory.untyped_storage()
        saved.out = mark_of(storage)
        return storage

    def _check(self, saved: SavedStorage, found: int) -> None:
        if found != saved.sum:
            raise IntegrityError(
                f"{self._file.describe(saved.place, saved.nbytes)}: saved activations are not what "
                "was written there: look at `dmesg` and `smartctl -a`, and run the pass again "
                "(checksum=False takes them as they are)",
                expected=f"CRC-32 {saved.sum:08x}",
                found=f"{found:08x}",
            )

    def look_ahead(self, number: int) -> None:
        """Begin to read what was saved before this one, the last first."""
        for at in range(bisect.bisect_left(self._numbers, number) - 1, -1, -1):
            saved = self._saved[self._numbers[at]]
            if saved.ahead is not None or (saved.out is not None and not saved.out.expired()):
                continue
            if not self._begin(saved, needed=False):
                return

    def _begin(self, saved: SavedStorage, needed: bool) -> bool:
        """Whether there was memory for it."""
        memory = self._room(saved)
        if memory is None and needed:
            for number in self._numbers:  # those that are needed last
                if self._saved[number].ahead is not None:
                    self._drop(self._saved[number])
                    memory = self._room(saved)
                    if memory is not None:
                        break
            else:
                memory = torch.empty(saved.nbytes, dtype=torch.uint8)
        if memory is None:
            return False
        wanted = [
            WantedBytes(
                span.file,
                span.file_offset,
                memory[span.start : span.start + span.nbytes],
                span.start,
            )
            for span in self._file.spans(saved.place, saved.nbytes)
        ]
        saved.ahead, saved.fill = memory, Fill(wanted)
        self._reader.submit(saved.fill)
        return True

    def _room(self, saved: SavedStorage) -> torch.Tensor | None:
        """Memory of the budget, free with the last tensor over it; None where there is none."""
        if self._pool is None:
            self._pool = LentPool(self._budget_bytes)
        slot = self._pool.take(saved, saved.nbytes)
        return None if slot is None else slot.memory

    def _drop(self, saved: SavedStorage) -> None:
        """What was read is not wanted; nothing touches its memory any more."""
        if saved.fill is not None:
            self._reader.cancel(saved.fill)
        _forget(saved)


def _forget(saved: SavedStorage) -> None:
    saved.fill = saved.ahead = None


class SavedStorage:
    """A storage that autograd has saved, and where its bytes are.

    In memory (`storage`), being written (`storage` and `writing`), or on the drive (`place` alone).
    """

    __slots__ = (
        "ahead",
        "begun_in",
        "failed_in",
        "fill",
        "holds",
        "nbytes",
        "number",
        "out",
        "place",
        "storage",
        "sum",
        "wanted",
        "writing",
    )

    def __init__(self, number: int, storage: torch.UntypedStorage) -> None:
        self.number = number
        self.nbytes = storage.nbytes()
        self.storage: torch.UntypedStorage | None = storage
        self.holds = 0  # how many saved tensors lie over it
        self.place = 0  # in the file
        self.writing: list[Operation] | None = None
        self.begun_in = self.failed_in = 0  # the round of `_make_room` of its last write
        self.wanted = False  # while it was being written: it stays
        self.sum: int | None = None  # the CRC-32 of what is in the file
        self.fill: Fill | None = None  # while it is read
        self.ahead: torch.Tensor | None = None  # what it is, or was, read into; not handed out yet
        self.out: Any = None  # of what was handed out

    def is_alone(self) -> bool:
        """Whether nobody else has the storage, so that its bytes cannot change any more."""
        storage = self.storage
        if storage is None:
            return False
        tensors: int = torch._C._storage_Use_Count(storage._cdata)
        return tensors == 1 and sys.getrefcount(storage) == _ALONE


def _references_of_one_alone() -> int:
    """What `sys.getrefcount` says in `is_alone`."""

    class Holder:
        storage: Any

    holder = Holder()
    holder.storage = torch.empty(1).untyped_storage()
    storage = holder.storage
    return sys.getrefcount(storage)


_ALONE = _references_of_one_alone()


def bytes_over(storage: torch.UntypedStorage | None) -> torch.Tensor:
    """All of a storage."""
    assert storage is not None
    memory = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return memory.set_(storage, 0, (storage.nbytes(),), (1,))


mark_of: Any = StorageWeakRef  # has no types


def locked(mark: Any) -> torch.UntypedStorage | None:
    """The storage, if anybody still has it."""
    found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(mark.cdata)
    return found
