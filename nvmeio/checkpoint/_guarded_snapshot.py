"""A snapshot with a part that is not copied: what guarded optimizers own stays where it is."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from functools import partial
from typing import NamedTuple

import torch

from nvmeio._formats.torch_layout import FileLayout, StorageRecord
from nvmeio._formats.torch_writing import is_gathered
from nvmeio.checkpoint._device_live import DeviceLive
from nvmeio.checkpoint._live import Live, Moved, Spans
from nvmeio.checkpoint._snapshot import (
    LEAST_BYTES,
    ReadBytes,
    Snapshot,
    SnapshotMemory,
    SnapshotPart,
    device_of,
    overlap,
    tensor_of,
    with_aside,
)
from nvmeio.checkpoint._watched import Told, Watched

# What may be in flight: who wants his memory back waits for it. It keeps a drive busy.
_MOST_IN_FLIGHT_BYTES = 64 << 20


RecordSpan = tuple[StorageRecord, int, int]
"""A record, and which of its bytes: the first, and the first behind them, in the file."""


class Memories(NamedTuple):
    """What a guarded snapshot may use, all within one budget.

    Attributes:
        copies: Of everything that is not left where it lies.
        refuge: Where the rest of what is left is copied to, when its owner wants it back.
        staging: Where what is left in devices' memory is copied to.
    """

    copies: SnapshotMemory
    refuge: SnapshotMemory
    staging: SnapshotMemory


class GuardedSnapshot:
    """As `Snapshot`, of a state of which a part is left where it lies.

    Args:
        part: What of the file.
        watched: What is left where it lies: what watches it, by the record's index.
        memories: Where the rest goes.
        told: Of the save; for errors.

    Attributes:
        lives: What is left where it lies, and steps wait for.
    """

    def __init__(
        self, part: SnapshotPart, watched: dict[int, list[Watched]], memories: Memories, told: Told
    ) -> None:
        aside = part.aside()
        copied, left, on_device = _sorted(part, watched)
        self._spans = Spans([(low, high) for _, low, high in copied.values()])
        budget = memories.refuge.budget_bytes
        if budget is not None and memories.refuge.nbytes + self._spans.end > budget:
            memories.refuge.release()
        packed = SnapshotPart(_packed(copied.values(), self._spans), 0, self._spans.end)
        self._copied = Snapshot(memories.copies, packed)
        self._device: DeviceLive | None = None
        if on_device:
            most = None if budget is None else max(budget - memories.copies.nbytes, LEAST_BYTES)
            of_each = [watched[index] for index in on_device]
            of_device = list(on_device.values())
            self._device = DeviceLive(of_device, of_each, memories.staging, most, told)
        else:
            memories.staging.release()
        of_all = [each for index in left for each in watched[index]]
        beside_bytes = memories.copies.nbytes + memories.staging.nbytes
        live = Live(list(left.values()), of_all, memories.refuge, beside_bytes, told)
        self.lives: tuple[Live | DeviceLive, ...] = (live,)
        if self._device is not None:
            self.lives = (live, self._device) if left else (self._device,)

        reads: dict[int, ReadBytes] = {}
        for lying, there in ((live, left), (self._device, on_device)):
            if lying is not None:
                reads |= {index: partial(lying.read, n) for n, index in enumerate(there)}
        copies = self._copied.layout.records
        for (index, (record, low, _)), copy in zip(copied.items(), copies, strict=True):
            reads[index] = _shifted(copy, low - record.offset)

        def record_of(index: int, record: StorageRecord) -> StorageRecord:
            read = reads.get(index) or _outside(record, part)
            return record._replace(
                data=with_aside(read, aside.get(index, ())),
                is_gathered=index in left and is_gathered(tensor_of(record)),
            )

        records = [record_of(*each) for each in enumerate(part.source.records)]
        self.layout = part.source._replace(records=records)

    @property
    def guarded_bytes(self) -> int:
        """What is not copied before `take` returns."""
        return sum(each.nbytes for each in self.lives)

    @property
    def moved(self) -> Moved:
        """What a step has cost that came before all was written."""
        held_s = max(each.moved.held_s for each in self.lives)
        return Moved(sum(each.moved.nbytes for each in self.lives), held_s)

    @property
    def copied_bytes(self) -> int:
        """Bytes that `take` has copied."""
        return self._copied.copied_bytes

    @property
    def stalled_s(self) -> float:
        """How long `take` waited for memory, in seconds."""
        return self._copied.stalled_s

    @property
    def fits(self) -> bool:
        """Whether all that is copied is held at once."""
        return self._copied.fits

    @property
    def most_in_flight_bytes(self) -> int:
        """What may be in flight at once."""
        most = min(self._copied.most_in_flight_bytes, _MOST_IN_FLIGHT_BYTES)
        return most if self._device is None else min(most, self._device.most_in_flight_bytes)

    def take(self, progress: Callable[[], None] = lambda: None) -> None:
        """Copy what is not left where it lies; see `Snapshot.take`."""
        if self._device is not None:
            self._device.take()
        self._copied.take(progress)

    def written(self, end: int) -> None:
        """All of the file's bytes before `end` are in the file."""
        self._copied.written(self._spans.reached(end))
        for each in self.lives:
            each.written(end)

    def check(self) -> None:
        """Raise `IntegrityError` if what was left where it lies was changed; all was read."""
        for each in self.lives:
            each.check()

    def again(self) -> bool:
        """Whether all of it can be read once more, from its start; nothing is in flight."""
        return self.fits and all([each.again() for each in self.lives])

    def stop(self) -> None:
        """Wake whoever waits, with `Cancelled`; from any thread."""
        self._copied.stop()
        for each in self.lives:
            each.stop()

    def over(self) -> None:
        """Nobody reads it any more: the caller's memory is the caller's again."""
        for each in self.lives:
            each.over()


def _sorted(part: SnapshotPart, watched: Container[int]) -> tuple[dict[int, RecordSpan], ...]:
    """The records that have bytes in a part, by index: copied, left, left on a device."""
    copied: dict[int, RecordSpan] = {}
    left: dict[int, RecordSpan] = {}
    on_device: dict[int, RecordSpan] = {}
    for index, record in enumerate(part.source.records):
        if not overlap(record, part.start, part.end):
            continue
        kind = copied
        if index in watched:
            kind = left if device_of(record).type == "cpu" else on_device
        kind[index] = (record, max(record.offset, part.start), min(record.end, part.end))
    return copied, left, on_device


def _shifted(copy: StorageRecord, by: int) -> ReadBytes:
    """Reads a copy of a record without its first bytes, by places in all of it."""
    data = copy.data
    assert not isinstance(data, torch.Tensor)  # of a snapshot
    return lambda at, nbytes: data(at - by, nbytes)


def _outside(record: StorageRecord, part: SnapshotPart) -> ReadBytes:
    """Refuses to read a record of which nothing is in the part."""

    def refuse(at: int, nbytes: int) -> torch.Tensor:
        raise ValueError(f"{record.name} is not of the part [{part.start}, {part.end})")

    return refuse


def _packed(records: Iterable[RecordSpan], spans: Spans) -> FileLayout:
    """Spans of records as a file of their own."""
    packed: list[StorageRecord] = []
    for (record, low, high), place in zip(records, spans.places, strict=True):
        data = tensor_of(record)
        if high - low < record.nbytes:
            data = data[low - record.offset : high - record.offset]
        packed.append(StorageRecord(record.name, place, high - low, data, record.crc_at))
    return FileLayout(spans.end, [], packed)
