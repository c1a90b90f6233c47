"""Host memory of a state that is not copied: it is written from where it lies.

The kernel's write protection (`_memory.copy_on_write`) stops writers to it, until the bytes
of the moment of the save are copied aside. So they are the file's, despite later writes, and
however.

Protected is what torch or nvmeio allocated: private memory of this process, which stays for as long
as a save holds its storage. Everything else is copied: memory that others share or write to behind
the processor's back (shared memory, mapped files, what is page-locked for a device), whose writers
the kernel does not stop.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Sequence
from itertools import compress

from nvmeio import buffers
from nvmeio._formats.torch_archives.torch_layout import StorageRecord
from nvmeio._memory import holds, mappings, system
from nvmeio._memory.copy_on_write import LEAST_BYTES, MOST_RANGES, WriteProtection, whole_pages
from nvmeio._memory.mappings import Mapping
from nvmeio._pages import PAGE_BYTES
from nvmeio._storage import crc32
from nvmeio.checkpoint._snapshot.copies import Aside, RecordSpan, tensor_of
from nvmeio.errors import naming


class AsideMemory:
    """The memory for copies of protected bytes before a write to them; kept for the next snapshot.

    Its pages come when they are used: if nobody writes before the drive has the bytes, none do.
    """

    def __init__(self) -> None:
        self._mapping: Mapping | None = None

    def take(self, nbytes: int, most_bytes: int | None) -> Mapping | None:
        """Memory for so much, or as much as there may be; None for none.

        `most_bytes` None is half of what the machine has available.
        """
        mapping, held = self._mapping, 0 if self._mapping is None else self._mapping.nbytes
        if most_bytes is None:
            available = system.available_bytes()
            most_bytes = nbytes if available is None else max((available + held) // 2, held)
        wanted = min(nbytes, most_bytes)
        if mapping is not None and (held > most_bytes or held < wanted):
            self._mapping = mapping = None
        if mapping is None and wanted > 0:
            try:
                self._mapping = mapping = Mapping(wanted)
            except MemoryError:
                return None  # a file takes the copies
        return mapping

    def release(self) -> None:
        """Give the memory back, once its last user is gone."""
        self._mapping = None


class Protected:
    """Records that are left where they lie.

    `taken` has the indices of `spans` that are protected from `begin` on; the others have to be
    copied. Copies without room in that memory go into a file without a name in `directory`.
    """

    def __init__(self, spans: Sequence[RecordSpan], directory: str) -> None:
        self._directory = directory
        large = [index for index, span in enumerate(spans) if _may_be_protected(span)]
        large.sort(key=lambda index: spans[index][1] - spans[index][2])  # the largest first
        large = sorted(large[:MOST_RANGES])
        # `resize_` and `share_memory_` free the memory: refused to everybody until the end.
        storages = [tensor_of(spans[index][0]).untyped_storage() for index in large]
        self._storages = {storage._cdata: storage for storage in storages}
        _in_use[id(self)] = self
        self._held, unheld = holds.hold_all(storages)
        kept = [
            index
            for place, index in enumerate(large)
            if place not in unheld or mappings.owns(*_memory_of(spans[index]))
        ]
        self._protection = WriteProtection([_memory_of(spans[index]) for index in kept], directory)
        self.taken = list(compress(kept, self._protection.taken))
        self.nbytes = sum(spans[index][2] - spans[index][1] for index in self.taken)

    def begin(self, memory: AsideMemory, most_bytes: int | None) -> bool:
        """Keep the bytes of this moment, copied to `memory` when somebody writes.

        False if the kernel refuses. `most_bytes` None is what the machine allows.
        """
        if self._protection.protect(memory.take(self.nbytes, most_bytes)):
            return True
        self.end()
        return False

    def read(self, address: int, nbytes: int, to: int, crc: int | None) -> int:
        """See `WriteProtection.read`; TransferError if there was no room to copy bytes aside."""
        with self._naming():
            return self._protection.read(address, nbytes, to, crc)

    def settle(self, address: int, nbytes: int) -> list[tuple[int, int]]:
        """See `WriteProtection.settle`; raises as `read`."""
        with self._naming():
            return self._protection.settle(address, nbytes)

    def _naming(self) -> contextlib.AbstractContextManager[None]:
        return naming(
            "write",
            self._directory,
            "training changed state that was not saved yet, and the memory for copies of it was "
            "full, so a file here had to take them. Give "
            "the Checkpointer more memory_bytes, or wait() before the state changes",
        )

    def end(self) -> None:
        """Give the memory back to its owner, because nobody reads it any more. Idempotent."""
        self._protection.end()
        self._storages = {}
        held, self._held = self._held, None
        holds.end(held)

    @property
    def aside_bytes(self) -> int:
        return self._protection.aside_bytes

    @property
    def held_s(self) -> float:
        return self._protection.held_s

    def uses(self, cdata: int) -> bool:
        """Whether the memory of a storage, by its ``_cdata``, is to stay where it is."""
        return cdata in self._storages

    def __repr__(self) -> str:
        return f"<a save into {self._directory}>"


class ProtectedBytes:
    """The bytes of one record that is protected; see `torch_layout.ReadOnce`.

    `aside` are bytes of it that are wanted a second time. On huge pages they are written from where
    they lie, if that is on the same place of its page as in the file: 0.16 s of CPU time for 1.6 GB
    in place of 0.24. On small pages the kernel needs as much to find them one by one as the copy
    does.
    """

    def __init__(self, protected: Protected, record: StorageRecord, aside: Aside) -> None:
        data = tensor_of(record)
        self._protected = protected
        self._address = address = data.data_ptr()
        self._aside = aside
        may = crc32.CAN_COPY and mappings.on_huge_pages(address, data.nbytes)
        self.in_place = data if may and (address - record.offset) % PAGE_BYTES == 0 else None

    def sum(self, offset: int, nbytes: int, crc: int) -> int:
        return self._protected.read(self._address + offset, nbytes, 0, crc)

    def settle(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        again = self._protected.settle(self._address + offset, nbytes)
        return [(address - self._address, size) for address, size in again]

    def read(self, offset: int, nbytes: int, to: int, crc: int | None) -> int:
        for low, data in self._aside:
            if low <= offset and offset + nbytes <= low + data.nbytes:
                return crc32.copy(to, data.data_ptr() + offset - low, nbytes, crc or 0)
        summing = crc is not None and crc32.CAN_COPY
        total = self._protected.read(self._address + offset, nbytes, to, crc if summing else None)
        return total if summing or crc is None else crc32.of_memory(to, nbytes, crc)


def _may_be_protected(span: RecordSpan) -> bool:
    """Whether it is large enough, and only threads of this process write there."""
    record, low, high = span
    if high - low < LEAST_BYTES:
        return False  # for most records nothing else is asked
    data = tensor_of(record)
    return (
        data.is_cpu
        and whole_pages(*_memory_of(span)) >= LEAST_BYTES
        and not data.untyped_storage().is_shared()
        and not data.is_pinned()
        and not buffers.is_pinned(data)
    )


def _memory_of(span: RecordSpan) -> tuple[int, int]:
    record, low, high = span
    return tensor_of(record).data_ptr() + low - record.offset, high - low


# By their own numbers: several may be in one storage. A dropped one has ended.
_in_use: weakref.WeakValueDictionary[int, Protected] = weakref.WeakValueDictionary()


def _user_of(cdata: int) -> Protected | None:
    users = (refer() for refer in _in_use.valuerefs())
    return next((user for user in users if user is not None and user.uses(cdata)), None)


holds.refuse_sharing(_user_of)
os.register_at_fork(after_in_child=_in_use.clear)  # its parent's
