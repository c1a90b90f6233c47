"""Copies of a state's bytes in memory that is kept, to be saved while training goes on.

The copies of some spans of a file are a window that moves over them, packed one behind the other
(`Spans`), so memory keeps the pages of the file. Place `o` lies at ``o % size`` of one arena, and
all that has to be known is how far the copying and the writing have come:

    0         written                  copied                     end
    ├─ free again ─┼─ copied, to be written ─┼─ not copied yet ───────┤
                   └───── at most the size ──────┘

If the arena holds all of it, nothing is ever waited for. Otherwise copying goes on as writes
finish: slower, and never with more memory.

From host memory (`HostCopies`) they are memmoves of some MiB each, without the GIL, by a few
threads. A device's memory has to cross the bus in any case: a second stream copies it
(`DeviceCopies`), after the work that the caller's stream had before the save, and before its later
work. So the bytes are those of the save, whatever kernels come next, and the host waits for none of
it but for room.

The arena is nvmeio's own memory: on huge pages, touched once, and reused by every later snapshot;
for a device page-locked once the first save is durable.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from nvmeio._formats.torch_archives.torch_layout import FileLayout, StorageRecord
from nvmeio._io.inflight import MOST_BYTES
from nvmeio._memory import devices as devices_module
from nvmeio._memory import mappings, system
from nvmeio._pages import PAGE_BYTES, round_down, round_up
from nvmeio._threads.future import SLICE_S
from nvmeio._threads.interruptible import Cancelled
from nvmeio._threads.threads import helped

logger = logging.getLogger("nvmeio")

_CPU = torch.device("cpu")

# Two chunks in flight and two being copied (`torch_writing.CHUNK_BYTES`): it needs as much.
LEAST_BYTES = 64 << 20

# On a device: two operations on their way to the drive, one read, and a step.
_LEAST_DEVICE_BYTES = LEAST_BYTES - (4 << 20)

# Wait for this much free memory before copying on: a smaller step costs more than it brings.
STEP_BYTES = 8 << 20

# One memmove. Smaller ones leave the GIL and take it again too often, larger ones let a thread
# wait for the other at the end.
COPY_BYTES = 16 << 20

# One core copies 10 to 14 GB/s; a few of them reach the limit of the memory.
_MOST_THREADS = 8


class SnapshotMemory:
    """The arena of one Checkpointer; grows up to a budget, and is reused.

    At least `LEAST_BYTES` are used. Without a budget it takes as much as the state, but no more
    than half of what the machine has available then.
    """

    def __init__(self, budget_bytes: int | None) -> None:
        self.budget_bytes = None if budget_bytes is None else max(budget_bytes, LEAST_BYTES)
        self._arena: torch.Tensor | None = None
        self._mapping: mappings.Mapping | None = None  # of a GPU's, as long as it is not locked

    def arena(self, nbytes: int, device: torch.device = _CPU) -> torch.Tensor:
        """Memory for `nbytes` bytes, or as much as the budget allows, in whole pages.

        It is that of the snapshot before, if it is large enough. `lock` page-locks memory for
        copies from a GPU. Raises MemoryError if there is not even the least.
        """
        nbytes = round_up(max(nbytes, 1), PAGE_BYTES)
        wanted = self._allowed(nbytes)
        old = self._arena
        # Without a budget the allowance follows the machine's available memory.
        if old is not None and (old.nbytes >= wanted or wanted < min(nbytes, old.nbytes * 5 // 4)):
            return old
        self.release()
        del old  # the old one first, so that there are never two
        mapping = _new_arena(wanted)
        self._arena = mapping.tensor(0, (wanted,), torch.uint8)
        if device.type == "cuda":
            self._mapping = mapping
        return self._arena

    def lock(self) -> None:
        """Page-lock what copies from a GPU go to, for the next ones; after a save, beside training.

        Locking may run at 1 to 2 GB/s and copying to memory that is not locked at several, so the
        first save, whose caller waits for its copies, does not lock.
        """
        mapping, self._mapping = self._mapping, None
        if mapping is None:
            return
        try:
            mapping.register_with_cuda()
        except (OSError, RuntimeError) as refused:  # CUDA, or a device that has failed
            logger.info("copying through memory that is not page-locked: %s", refused)

    def _allowed(self, nbytes: int) -> int:
        held = 0 if self._arena is None else self._arena.nbytes
        if nbytes <= max(held, LEAST_BYTES):
            return nbytes
        budget = self.budget_bytes
        if budget is None:
            # Memory that is held already counts as available: it would be given back first.
            available = system.available_bytes()
            budget = nbytes if available is None else max((available + held) // 2, held)
        budget = max(round_down(budget, PAGE_BYTES), LEAST_BYTES)
        return min(nbytes, budget)

    @property
    def nbytes(self) -> int:
        return 0 if self._arena is None else self._arena.nbytes

    def release(self) -> None:
        """Give the memory back, once its last user is gone."""
        self._arena = self._mapping = None


class SnapshotPart(NamedTuple):
    """The part of a file that one snapshot is for: [start, end), from a multiple of 4096 on.

    `source` is the file's layout, with the storages themselves. `also` are pages (their offsets)
    outside of the part whose storages' bytes are wanted too.
    """

    source: FileLayout
    start: int
    end: int
    also: Sequence[int] = ()

    def aside(self) -> Mapping[int, Aside]:
        """Copies of the bytes of `also`, by the record's index."""
        found: dict[int, list[tuple[int, torch.Tensor]]] = {}
        records = self.source.records
        ends = [record.end for record in records]
        for page in self.also:
            for index in range(bisect_right(ends, page), len(records)):
                record = records[index]
                if record.offset >= page + PAGE_BYTES:
                    break
                low = max(page - record.offset, 0)
                high = min(page + PAGE_BYTES, record.end) - record.offset
                data = tensor_of(record)[low:high].to("cpu", copy=True)
                found.setdefault(index, []).append((low, data))
        return found


ReadBytes = Callable[[int, int], torch.Tensor]
"""Bytes of a record: where they begin in it, and how many."""

Aside = Sequence[tuple[int, torch.Tensor]]
"""Copies of some of a record's bytes, each with where they begin in it."""


def with_aside(read: ReadBytes, aside: Aside) -> ReadBytes:
    """Read from the copies if they hold all requested bytes."""
    if not aside:
        return read

    def read_either(at: int, nbytes: int) -> torch.Tensor:
        for low, data in aside:
            if low <= at and at + nbytes <= low + data.nbytes:
                return data[at - low : at - low + nbytes]
        return read(at, nbytes)

    return read_either


RecordSpan = tuple[StorageRecord, int, int]
"""A record, and which of its bytes: the first, and the first behind them, in the file."""


class Spans:
    """Disjoint (start, end) of a file, packed: each on the same place of its page."""

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        self.spans = spans
        self.places: list[int] = []
        self.end = 0
        self._starts = [start for start, _ in spans]
        for start, end in spans:
            place = self.end + (start - self.end) % PAGE_BYTES
            self.places.append(place)
            self.end = place + end - start

    def reached(self, position: int) -> int:
        """The place here that belongs to a position in the file."""
        index = bisect_left(self._starts, position) - 1
        if index < 0:
            return 0
        start, end = self.spans[index]
        return self.places[index] + min(position, end) - start


class Copies(ABC):
    """Spans of records in host memory, as they are now.

    One thread calls `take`, which waits `stalled_s` for memory; another reads, and says by
    `written` how far it is.
    """

    def __init__(self, records: Sequence[RecordSpan], arena: torch.Tensor) -> None:
        self._records = list(records)
        self._offsets = [record.offset for record, _, _ in records]
        self.spans = Spans([(low, high) for _, low, high in records])
        self.nbytes = sum(high - low for _, low, high in records)
        self._arena = arena
        self._size = round_down(arena.nbytes, PAGE_BYTES)
        self._copied = self._written = 0
        self._stopped = False
        self._changed = threading.Condition()
        self.stalled_s = 0.0

    # The copying side

    @property
    def fits(self) -> bool:
        """Whether all of it is held at once; else the writer has to run beside `take`."""
        return self.spans.end <= self._size

    @abstractmethod
    def take(self, progress: Callable[[], None] = lambda: None) -> None:
        """Copy all of it as there is room, calling `progress`; Cancelled after `stop`."""

    def _wait_for_room(self) -> int:
        """Wait until something can be copied; the place up to which it can."""
        copied, end = self._copied, self.spans.end
        wanted = min(end - copied, STEP_BYTES)
        with self._changed:
            while not self._stopped:
                free = self._size - (copied - self._written)
                if free >= wanted:
                    return min(copied + free, end)
                began = time.perf_counter()
                self._changed.wait(SLICE_S)  # `stop` may have been interrupted
                self.stalled_s += time.perf_counter() - began
        raise Cancelled

    def _tasks(self, low: int, high: int) -> Iterator[Copy]:
        """The copies of the places in [low, high)."""
        for (record, start, end), place in zip(self._records, self.spans.places, strict=True):
            position, stop = max(place, low), min(place + end - start, high)
            while position < stop:
                at = position % self._size
                nbytes = min(stop - position, COPY_BYTES, self._size - at)
                offset = start - record.offset + position - place
                yield Copy(self._arena, at, record, offset, nbytes)
                position += nbytes

    def _came_to(self, place: int) -> None:
        with self._changed:
            self._copied = place
            self._changed.notify_all()

    def stop(self) -> None:
        """Wake all waiters with `Cancelled`; from any thread."""
        self._stopped = True
        with self._changed:
            self._changed.notify_all()

    # The writing side

    def written(self, position: int) -> None:
        """Note that all before a position of the file is in the file: its memory is free again."""
        with self._changed:
            self._written = max(self._written, self.spans.reached(position))
            self._changed.notify_all()

    @property
    def most_in_flight_bytes(self) -> int:
        """The most bytes in flight at once, so that memory to copy into is left."""
        return MOST_BYTES if self.fits else min(self._size // 2, MOST_BYTES)

    def read(self, number: int, offset: int, nbytes: int) -> torch.Tensor:
        """Bytes of a record, by its number here; waits for them, or raises Cancelled."""
        low, high = self.spans.spans[number]
        first = self._offsets[number] + offset
        if not low <= first <= first + nbytes <= high:
            raise ValueError(f"[{first}, {first + nbytes}) is not of the span [{low}, {high})")
        place = self.spans.places[number] + first - low
        self._wait_for(place + nbytes)
        at = place % self._size
        found = self._arena[at : min(at + nbytes, self._size)]
        if found.nbytes == nbytes:
            return found
        return torch.cat((found, self._arena[: nbytes - found.nbytes]))  # around the end

    def _wait_for(self, end: int) -> None:
        with self._changed:
            while self._copied < end and not self._stopped:
                self._changed.wait(SLICE_S)
            if self._stopped:
                raise Cancelled


class HostCopies(Copies):
    """Copies of host memory."""

    def __init__(self, records: Sequence[RecordSpan], memory: SnapshotMemory) -> None:
        end = Spans([(low, high) for _, low, high in records]).end
        super().__init__(records, memory.arena(end))

    def take(self, progress: Callable[[], None] = lambda: None) -> None:
        while self._copied < self.spans.end:
            until = self._wait_for_room()
            copy_all(list(self._tasks(self._copied, until)), lambda: self._stopped)
            progress()
            self._came_to(until)
        self._records = []  # the state is the caller's again
        if self._stopped:
            raise Cancelled


class DeviceCopies(Copies):
    """Copies of device memory, to at most `most_bytes`; MemoryError if there is no room."""

    def __init__(
        self, records: Sequence[RecordSpan], memory: SnapshotMemory, most_bytes: int | None
    ) -> None:
        self._streams = _streams_of(record for record, _, _ in records)
        end = Spans([(low, high) for _, low, high in records]).end
        nbytes = end + PAGE_BYTES
        if most_bytes is not None and most_bytes < nbytes:
            nbytes = most_bytes
            if memory.nbytes > most_bytes:
                memory.release()
        super().__init__(records, memory.arena(nbytes, _locked_for(self._streams)))
        if self._size < min(end, _LEAST_DEVICE_BYTES):
            raise MemoryError(f"{self._arena.nbytes} bytes are too few to copy {self.nbytes} to")
        self._marks: list[tuple[int, list[devices_module.Mark]]] = []  # behind copies up to a place

    def take(self, progress: Callable[[], None] = lambda: None) -> None:
        """Begin all copies, behind the work of the calling thread's stream; it waits for them.

        Waits for room if the window does not hold all of it.
        """
        for stream in self._streams.values():
            stream.follow()
        try:
            while self._copied < self.spans.end:
                until = min(self._wait_for_room(), self._copied + COPY_BYTES)
                for copy in self._tasks(self._copied, until):
                    copy.begin(self._streams)
                self._marks.append((until, [stream.mark() for stream in self._streams.values()]))
                self._came_to(until)
        finally:
            self._records = []
            for stream in self._streams.values():
                stream.precede()

    def _wait_for(self, end: int) -> None:
        super()._wait_for(end)
        for mark in next(marks for until, marks in list(self._marks) if until >= end):
            mark.wait()

    def over(self) -> None:
        """Wait for copies on the bus: the memory is the next one's. Nobody reads it any more.

        A device that has failed stops copying. Reads of bytes that it had not copied raise its
        error.
        """
        self.stop()
        for stream in self._streams.values():
            with contextlib.suppress(RuntimeError):
                stream.mark().wait()


class Copy(NamedTuple):
    """A piece of a record on its way into an arena."""

    arena: torch.Tensor
    at: int
    record: StorageRecord
    offset: int
    nbytes: int

    def run(self) -> None:
        """Copy it, from host memory; lets go of the GIL."""
        source = tensor_of(self.record).data_ptr() + self.offset
        ctypes.memmove(self.arena.data_ptr() + self.at, source, self.nbytes)

    def begin(self, streams: Streams) -> None:
        """Have the stream beside its device copy it."""
        data = tensor_of(self.record)
        to = self.arena[self.at : self.at + self.nbytes]
        streams[devices_module.device_of(data)].copy(
            to, data[self.offset : self.offset + self.nbytes]
        )


Streams = Mapping[torch.device, devices_module.Beside]
"""The stream that copies from each device other than the CPU."""


def copy_all(tasks: Sequence[Copy], stopped: Callable[[], bool]) -> None:
    queue = iter(tasks)
    taking = threading.Lock()

    def work() -> None:
        while not stopped():
            with taking:
                task = next(queue, None)
            if task is None:
                return
            task.run()

    large = sum(task.nbytes for task in tasks) // COPY_BYTES
    others = min(torch.get_num_threads(), _MOST_THREADS, large) - 1
    with helped(others, work, "nvmeio-snapshot"):
        work()


def tensor_of(record: StorageRecord) -> torch.Tensor:
    """A record's bytes, of a layout that was just planned."""
    assert isinstance(record.data, torch.Tensor)
    return record.data


def device_of(record: StorageRecord) -> torch.device:
    """The device of its bytes; for a layout that was just planned."""
    return devices_module.device_of(tensor_of(record))


def _streams_of(records: Iterable[StorageRecord]) -> Streams:
    devices = {device_of(record) for record in records}
    return {device: devices_module.Beside(device, "snapshot") for device in devices - {_CPU}}


def _locked_for(streams: Streams) -> torch.device:
    """The device for whose copies memory is to be page-locked; the CPU if for none."""
    return next((device for device in streams if device.type == "cuda"), _CPU)


def _new_arena(nbytes: int) -> mappings.Mapping:
    mapping = mappings.Mapping(nbytes)
    mapping.populate()
    return mapping
