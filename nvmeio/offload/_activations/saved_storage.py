"""A storage that autograd has saved: who else has it, and where its bytes are."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from nvmeio._residency.reader import Fill
from nvmeio.operation import Operation


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
