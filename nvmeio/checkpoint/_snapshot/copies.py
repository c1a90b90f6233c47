"""A copy of a state's bytes in memory that is kept: what is saved while training goes on.

The snapshot of a part [start, end) of a file is a window that moves over it. Byte `o` of the file
lies at ``(o - start) % capacity`` of one arena, so memory keeps the alignment of the file, and all
that has to be known is how far the copying and the writing have come:

    start        written                  copied                    end
      ├─ free again ─┼─ copied, to be written ─┼─ not copied yet ───────┤
                     └──── at most capacity ────┘

Where the arena holds the whole part nothing is ever waited for. Where it does not, copying goes on
as writes finish: slower, and never with more memory.

The arena is nvmeio's own memory: on huge pages, touched once, and reused by every later snapshot.
Copies are memmoves of some MiB each, without the GIL, by a few threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from nvmeio import buffers
from nvmeio._files.plan import PAGE_BYTES, round_down, round_up
from nvmeio._formats.torch_layout import FileLayout, StorageRecord
from nvmeio._io.inflight import MOST_BYTES, Cancelled
from nvmeio._memory import devices as devices_module
from nvmeio._memory import system
from nvmeio._threads.future import SLICE_S
from nvmeio._threads.threads import Thread

logger = logging.getLogger("nvmeio")

_CPU = torch.device("cpu")

# Two chunks in flight and two being copied (`torch_writing.CHUNK_BYTES`): it needs as much.
LEAST_BYTES = 64 << 20

# Wait for this much free memory before copying on: a smaller step costs more than it brings.
STEP_BYTES = 8 << 20

# One memmove. Smaller ones leave the GIL and take it again too often, larger ones let a thread
# wait for the other at the end.
COPY_BYTES = 16 << 20

# One core copies 10 to 14 GB/s; a few of them reach what the memory gives.
_MOST_THREADS = 8


class SnapshotMemory:
    """The arena of one Checkpointer; grows up to a budget, and is reused.

    Args:
        budget_bytes: What it may take at most; at least `LEAST_BYTES` is used. None: as much as
            the state, but no more than half of what the machine has available then.
    """

    def __init__(self, budget_bytes: int | None) -> None:
        self._budget = None if budget_bytes is None else max(budget_bytes, LEAST_BYTES)
        self._arena: torch.Tensor | None = None
        self._pinned = False

    def arena(self, nbytes: int, device: torch.device = _CPU) -> torch.Tensor:
        """Memory for `nbytes` bytes, or as much as the budget allows, in whole pages.

        That of the snapshot before, where it is large enough.

        Args:
            nbytes: How much would be best.
            device: What is copied to it; from a GPU page-locked, where that is allowed.

        Raises:
            MemoryError: There is not even the least.
        """
        nbytes = round_up(max(nbytes, 1), PAGE_BYTES)
        wanted = self._allowed(nbytes)
        pinned = device.type == "cuda"
        old = self._arena
        if (
            old is not None
            and (self._pinned or not pinned)
            # With no budget the allowance moves with what the machine has available.
            and (old.nbytes >= wanted or wanted < min(nbytes, old.nbytes * 5 // 4))
        ):
            return old
        self._arena = None
        del old  # the old one first, so that there are never two
        self._arena = _new_arena(wanted, device)
        self._pinned = pinned
        return self._arena

    def _allowed(self, nbytes: int) -> int:
        held = 0 if self._arena is None else self._arena.nbytes
        if nbytes <= max(held, LEAST_BYTES):
            return nbytes
        budget = self._budget
        if budget is None:
            # What is held already counts as available: it would be given back first.
            available = system.available_bytes()
            budget = nbytes if available is None else max((available + held) // 2, held)
        budget = max(round_down(budget, PAGE_BYTES), LEAST_BYTES)
        return min(nbytes, budget)

    @property
    def budget_bytes(self) -> int | None:
        """What it may take at most; None for what the machine allows."""
        return self._budget

    @property
    def nbytes(self) -> int:
        """What is held."""
        return 0 if self._arena is None else self._arena.nbytes

    def release(self) -> None:
        """Give the memory back, once its last user is gone."""
        self._arena = None


class SnapshotPart(NamedTuple):
    """What of a file one snapshot is for.

    Attributes:
        source: The file's layout, with the storages themselves.
        start: First byte of the part; a multiple of 4096.
        end: First byte behind it.
        also: Pages (their offsets) outside of the part whose storages' bytes are wanted too.
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
    """Read from what was copied aside where it has all of what is wanted."""
    if not aside:
        return read

    def read_either(at: int, nbytes: int) -> torch.Tensor:
        for low, data in aside:
            if low <= at and at + nbytes <= low + data.nbytes:
                return data[at - low : at - low + nbytes]
        return read(at, nbytes)

    return read_either


class Snapshot:
    """The bytes of a layout's storages in host memory within a part of the file, as they are now.

    One thread calls `take`; another writes `layout`, and tells by `written` how far it is.

    Args:
        memory: Where it may live.
        part: What of the file.

    Attributes:
        layout: The same layout on the snapshot's memory.
        copied_bytes: Bytes that `take` has copied.
        stalled_s: How long `take` waited for memory, in seconds.

    Raises:
        MemoryError: There is no room for it.
    """

    def __init__(self, memory: SnapshotMemory, part: SnapshotPart) -> None:
        source, start, end, _ = part
        self._records = [record for record in source.records if overlap(record, start, end)]
        self._start, self._end = start, end
        self._arena = memory.arena(end - start)
        self._copied = self._written = start
        self._stopped = False
        self._changed = threading.Condition()
        self.copied_bytes = 0
        self.stalled_s = 0.0
        self.layout = source._replace(
            records=[record._replace(data=self._reader(record)) for record in source.records]
        )

    # The copying side

    @property
    def fits(self) -> bool:
        """Whether all of it is held at once; else the writer has to run beside `take`."""
        return self._end - self._start <= self._arena.nbytes

    def take(self, progress: Callable[[], None] = lambda: None) -> None:
        """Copy all of it; waits for memory where not everything fits.

        Args:
            progress: Called now and then.

        Raises:
            Cancelled: `stop` was called.
        """
        while self._copied < self._end:
            window = self._wait_for_room()
            tasks = list(self._tasks(self._copied, window))
            copy_all(tasks, lambda: self._stopped)
            progress()
            with self._changed:
                self._copied = window
                self._changed.notify_all()
        self._records = []  # the state is the caller's again
        if self._stopped:
            raise Cancelled

    def _wait_for_room(self) -> int:
        """Up to where the file's bytes can be copied now."""
        wanted = min(self._end - self._copied, STEP_BYTES)
        with self._changed:
            began = time.perf_counter()
            while not self._stopped:
                free = self._arena.nbytes - (self._copied - self._written)
                if free >= wanted:
                    break
                self._changed.wait(SLICE_S)  # `stop` may have been interrupted
            if self._copied > self._start:
                self.stalled_s += time.perf_counter() - began
            if self._stopped:
                raise Cancelled
            return min(self._copied + free, self._end)

    def _tasks(self, start: int, end: int) -> Iterator[Copy]:
        """The copies of the file's bytes in [start, end)."""
        for record in self._records:
            if not overlap(record, start, end):
                continue
            position, stop = max(record.offset, start), min(record.end, end)
            while position < stop:
                at = self._at(position)
                nbytes = min(stop - position, COPY_BYTES, self._arena.nbytes - at)
                yield Copy(self._arena, at, record, position - record.offset, nbytes)
                self.copied_bytes += nbytes
                position += nbytes

    def stop(self) -> None:
        """Wake whoever waits, with `Cancelled`; from any thread."""
        self._stopped = True
        with self._changed:
            self._changed.notify_all()

    # The writing side

    def written(self, end: int) -> None:
        """All of the file's bytes before `end` are in the file: their memory is free again."""
        with self._changed:
            self._written = max(self._written, min(end, self._end))
            self._changed.notify_all()

    @property
    def most_in_flight_bytes(self) -> int:
        """What may be in flight at once, so that there is memory to copy into beside it."""
        return MOST_BYTES if self.fits else min(self._arena.nbytes // 2, MOST_BYTES)

    def _reader(self, record: StorageRecord) -> ReadBytes:
        offset = record.offset
        return lambda at, nbytes: self._read(offset + at, nbytes)

    def _read(self, position: int, nbytes: int) -> torch.Tensor:
        end = position + nbytes
        if not self._start <= position <= end <= self._end:
            raise ValueError(f"[{position}, {end}) is not of the part [{self._start}, {self._end})")
        with self._changed:
            while self._copied < end and not self._stopped:
                self._changed.wait(SLICE_S)
            if self._stopped:
                raise Cancelled
        at = self._at(position)
        first = self._arena[at : at + nbytes]
        if first.nbytes == nbytes:
            return first
        return torch.cat((first, self._arena[: nbytes - first.nbytes]))  # around the arena's end

    def _at(self, position: int) -> int:
        return (position - self._start) % self._arena.nbytes


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
"""What copies from each device that is not the CPU."""


def copy_all(tasks: Sequence[Copy], stopped: Callable[[], bool]) -> None:
    """Run copies in a few threads."""
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
    started: list[Thread] = []
    try:
        # No more threads in this process: fewer will do.
        with contextlib.suppress(RuntimeError, MemoryError):
            for _ in range(others):
                thread = Thread(work, "nvmeio-snapshot")
                thread.start()
                started.append(thread)
        work()
    finally:
        for thread in started:
            thread.join()


def tensor_of(record: StorageRecord) -> torch.Tensor:
    """A record's bytes, of a layout that was just planned."""
    assert isinstance(record.data, torch.Tensor)
    return record.data


def device_of(record: StorageRecord) -> torch.device:
    """Where its bytes are; of a layout that was just planned."""
    return devices_module.device_of(tensor_of(record))


def streams_of(records: Sequence[StorageRecord]) -> Streams:
    """What copies from each device that has any of these."""
    devices = {device_of(record) for record in records}
    return {device: devices_module.beside(device) for device in devices - {_CPU}}


def locked_for(streams: Streams) -> torch.device:
    """The device for whose copies memory is to be page-locked; the CPU where for none."""
    return next((device for device in streams if device.type == "cuda"), _CPU)


def overlap(record: StorageRecord, start: int, end: int) -> bool:
    """Whether any of a record is in [start, end) of the file."""
    return record.offset < end and start < record.end


def _new_arena(nbytes: int, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        try:
            return devices_module.new_copier().page_locked(nbytes, device)
        except OSError as refused:
            logger.info("copying through memory that is not page-locked: %s", refused)
    return buffers.empty_aligned(nbytes, dtype=torch.uint8)
