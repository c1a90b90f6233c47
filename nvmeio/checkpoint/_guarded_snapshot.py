"""A snapshot with a part that is not copied: what guarded optimizers own stays where it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from nvmeio._formats.torch_layout import FileLayout, StorageRecord
from nvmeio._formats.torch_writing import is_gathered
from nvmeio.checkpoint._device_live import DeviceLive
from nvmeio.checkpoint._live import Live, Moved, Spans
from nvmeio.checkpoint._snapshot import (
    LEAST_BYTES,
    Snapshot,
    SnapshotMemory,
    bytes_in_pages,
    device_of,
    overlap,
    tensor_of,
)
from nvmeio.checkpoint._watched import Told, Watched

# What may be in flight: who wants his memory back waits for it. It keeps a drive busy.
_MOST_IN_FLIGHT_BYTES = 64 << 20


class GuardedSnapshot:
    """As `Snapshot`, of a state of which a part is left where it lies.

    Args:
        memory: Of the copy of everything else.
        refuge: Where the rest of what is left is copied to, when its owner wants it back.
        staging: Where what is left in devices' memory is copied to.
        source: The layout, with the storages themselves.
        start: First byte of the part of the file; a multiple of 4096.
        end: First byte behind it.
        also: As for `Snapshot`.
        live: What is left where it lies: what watches it, by the record's index.
        told: Of the save; for errors.

    Attributes:
        lives: What is left where it lies, and steps wait for.
    """

    def __init__(
        self,
        memory: SnapshotMemory,
        refuge: SnapshotMemory,
        staging: SnapshotMemory,
        source: FileLayout,
        start: int,
        end: int,
        also: Sequence[int],
        live: dict[int, list[Watched]],
        told: Told,
    ) -> None:
        aside = bytes_in_pages(source.records, also)
        copied: list[tuple[StorageRecord, int, int]] = []
        left: list[tuple[StorageRecord, int, int]] = []
        on_device: list[tuple[StorageRecord, int, int]] = []
        numbers: dict[int, int] = {}  # the record's index → its number among its like
        of_device: list[int] = []
        for index, record in enumerate(source.records):
            if not overlap(record, start, end):
                continue
            kind = copied
            if index in live:
                kind = left if device_of(record).type == "cpu" else on_device
            if kind is on_device:
                of_device.append(index)
            numbers[index] = len(kind)
            kind.append((record, max(record.offset, start), min(record.end, end)))
        self._spans = Spans([(low, high) for _, low, high in copied])
        budget = refuge.budget_bytes
        if budget is not None and refuge.nbytes + self._spans.end > budget:
            refuge.release()
        self._copied = Snapshot(memory, _packed(copied, self._spans), 0, self._spans.end)
        self._device: DeviceLive | None = None
        if on_device:
            most = None if budget is None else max(budget - memory.nbytes, LEAST_BYTES)
            of_each = [live[index] for index in of_device]
            self._device = DeviceLive(on_device, of_each, staging, most, told)
        else:
            staging.release()
        theirs = set(of_device)
        mine = [index for index in live if index in numbers and index not in theirs]
        watched = [each for index in mine for each in live[index]]
        self.live = Live(left, watched, refuge, memory.nbytes + staging.nbytes, told)
        self.lives: tuple[Live | DeviceLive, ...] = (self.live,)
        if self._device is not None:
            self.lives = (self.live, self._device) if left else (self._device,)
        readers = [record.data for record in self._copied.layout.records]

        def reader(index: int, record: StorageRecord) -> Callable[[int, int], torch.Tensor]:
            name, number = record.name, numbers.get(index, -1)
            left_at = self._device if index in theirs else self.live
            low = max(record.offset, start) - record.offset
            data = None if index in live or number < 0 else readers[number]

            def read(at: int, nbytes: int) -> torch.Tensor:
                for first, known in aside.get(index, ()):
                    if first <= at and at + nbytes <= first + known.nbytes:
                        return known[at - first : at - first + nbytes]
                if number < 0:
                    raise ValueError(f"{name} is not of the part [{start}, {end})")
                if data is None:
                    assert left_at is not None
                    return left_at.read(number, at, nbytes)
                assert not isinstance(data, torch.Tensor)
                return data(at - low, nbytes)

            return read

        self.layout = source._replace(
            records=[
                StorageRecord(
                    *record[:3],
                    reader(index, record),
                    record.crc_at,
                    index in live and index not in theirs and is_gathered(tensor_of(record)),
                )
                for index, record in enumerate(source.records)
            ]
        )

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


def _packed(records: Sequence[tuple[StorageRecord, int, int]], spans: Spans) -> FileLayout:
    """Spans of records as a file of their own."""
    packed: list[StorageRecord] = []
    for (record, low, high), place in zip(records, spans.places, strict=True):
        assert isinstance(record.data, torch.Tensor)  # a layout that was just planned
        data = record.data
        if high - low < record.nbytes:
            data = data[low - record.offset : high - record.offset]
        packed.append(StorageRecord(record.name, place, high - low, data, record.crc_at))
    return FileLayout(spans.end, [], packed)
