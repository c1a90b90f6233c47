"""Bytes of a state that are written from where they lie, until they have to be out of the way.

What the caller will leave alone for a while need not be copied. The writer reads it in the order of
the file; when the caller wants it back, the rest is copied, from the far end, and the two meet:

    0                  written          claimed              moved                    end
      ├─ in the file ─────┼─ being written ─┼─ not read yet ─────┼─ copied ──────────────┤
                                              writer ─▶        ◀─ mover

The caller has it back when what was claimed is in the file, and nothing is left between `claimed`
and `moved`. With less memory than that, the mover copies the last bytes only, and the writer does
the rest. At that one moment it is checked that nothing was changed meanwhile (`_watched`): from
then on nobody reads the caller's memory any more.

Places are counted in these bytes alone (`Spans`), not in the file.
"""

from __future__ import annotations

import _thread
import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from nvmeio import _memory
from nvmeio._formats.torch_layout import Layout, Record
from nvmeio._io import threads
from nvmeio._io.inflight import Cancelled
from nvmeio._plan import PAGE_BYTES
from nvmeio.checkpoint._ended import Ended
from nvmeio.checkpoint._snapshot import (
    COPY_BYTES,
    Copy,
    Snapshot,
    SnapshotMemory,
    bytes_in_pages,
    copy_all,
    overlap,
)
from nvmeio.checkpoint._watched import Watched

logger = logging.getLogger("nvmeio")

# What may be in flight: who wants his memory back waits for it. It keeps a drive busy.
_MOST_IN_FLIGHT_BYTES = 64 << 20

# The mover copies so much, and looks how far the writer has come.
_MOVE_BYTES = 64 << 20


class Spans:
    """Pieces of a file, one after the other: each on the same place of its page as in the file.

    Args:
        spans: (start, end) in the file, in its order, disjoint.
    """

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
        """How far one is here who has come to a position in the file."""
        index = bisect_left(self._starts, position) - 1
        if index < 0:
            return 0
        start, end = self.spans[index]
        return self.places[index] + min(position, end) - start


class Moved(NamedTuple):
    """What a step has cost that came before all was written.

    Attributes:
        nbytes: Bytes that were copied out of its way.
        held_s: How long it waited, in seconds.
    """

    nbytes: int = 0
    held_s: float = 0.0


class Live:
    """Records that are read where they lie.

    Args:
        records: Each with where its bytes are (`Record.data`) and its span of the file to be read.
        watched: What belongs to whom, and must not change.
        memory: Where the rest is copied to.
        beside_bytes: What the snapshot of everything else takes of its budget.
        step: Of the checkpoint; for errors.
    """

    def __init__(
        self,
        records: Sequence[tuple[Record, int, int]],
        watched: Sequence[Watched],
        memory: SnapshotMemory,
        beside_bytes: int,
        step: int,
    ) -> None:
        self._records = list(records)
        self._watched = list(watched)
        self._memory = memory
        self._beside_bytes = beside_bytes
        self._step = step
        self.spans = Spans([(low, high) for _, low, high in records])
        self.nbytes = sum(high - low for _, low, high in records)
        self._lock = threading.Lock()  # of all that follows; never taken by the one who waits
        self._claimed = self._written = 0
        self._moved = self.spans.end
        self._arena: torch.Tensor | None = None
        self._base = 0  # the place of the arena's first byte
        self._stopped = False
        self._released = False
        self._error: BaseException | None = None
        self._copying = threading.Lock()  # while the mover uses the arena
        self._moving = _thread.allocate_lock()  # taken by the one mover
        self._free = Ended()
        self._asked_at = 0.0  # 0: nobody wants it back yet
        self.moved = Moved()

    # Whoever wants it back

    def leave(self) -> None:
        """Block until nobody reads the caller's memory any more; an interrupt ends the waiting."""
        if self._free.done:
            return
        self._asked_at = self._asked_at or time.perf_counter()
        if not self._moving.locked():
            threads.start(self._move, "nvmeio-guard", _no_thread)
        self._free.wait(None)

    # The writer

    def read(self, number: int, offset: int, nbytes: int) -> torch.Tensor:
        """Bytes of a record, by its number here; in the order of the file.

        Raises:
            Cancelled: `stop` was called.
            IntegrityError: They were changed.
        """
        record, low, _ = self._records[number]
        place = self.spans.places[number] + record.offset + offset - low
        with self._lock:
            if self._stopped:
                raise Cancelled
            self._raise_error()
            if self._released or place >= self._moved:
                assert self._arena is not None
                at = place - self._base
                assert self._moved <= place, "bytes were read again that are the caller's now"
                return self._arena[at : at + nbytes]
            self._check_there(record)
            self._claimed = max(self._claimed, place + nbytes)
            return record.data[offset : offset + nbytes]  # type: ignore[index]

    def written(self, position: int) -> None:
        """All before a position of the file is in the file, with its sums."""
        with self._lock:
            self._written = max(self._written, self.spans.reached(position))
            self._release_if_free()

    def again(self) -> bool:
        """Whether it can be read once more from its start; nothing is in flight."""
        with self._lock:
            if self._released:
                return False
            self._claimed = self._written = 0
            return True

    def check(self) -> None:
        """Raise if what was read is not what it was at first; once all was read."""
        with self._lock:
            self._raise_error()

    def stop(self) -> None:
        """Give no more bytes out: `read` raises `Cancelled`."""
        self._stopped = True

    def over(self) -> None:
        """Nobody reads or writes any of it any more."""
        with self._lock:
            self._released = True
        with self._copying:  # the arena is the next one's, then
            self._forget()
        self._open()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    # The end of it

    def _release_if_free(self) -> None:
        """With the lock."""
        if self._released or self._written < self._claimed or self._claimed < self._moved:
            return
        self._released = True
        self._check_watched()
        self._watched = []
        self._records = [
            (record._replace(data=_gone), low, high) for record, low, high in self._records
        ]
        self._open()

    def _check_watched(self) -> None:
        try:
            for each in self._watched:
                each.check(self._step)
        except BaseException as changed:
            self._error = changed

    def _check_there(self, record: Record) -> None:
        """With the lock. Memory that was given back (`resize_`) must not be read."""
        assert isinstance(record.data, torch.Tensor)  # a layout that was just planned
        if record.data.untyped_storage().nbytes() < record.nbytes:
            self._check_watched()
            self._raise_error()
            raise AssertionError("unreachable: its storage was resized")

    def _open(self) -> None:
        if self._free.done:
            return
        if self._asked_at:
            self.moved = self.moved._replace(held_s=time.perf_counter() - self._asked_at)
        self._free.set()

    def _forget(self) -> None:
        self._arena, self._watched, self._records = None, [], []

    # The mover

    def _move(self) -> None:
        if not self._moving.acquire(False):
            return
        try:
            while self._move_some():
                pass
        except Exception as failed:  # the writer brings it to an end all the same
            logger.warning("a step waits for the drive: no memory to copy to: %s", failed)

    def _move_some(self) -> bool:
        with self._copying:
            with self._lock:
                high = self._moved
                left = 0 if self._released else high - self._claimed
            if self._arena is None and left > 0:
                self._take_arena(left)
            with self._lock:
                low = max(self._claimed, self._base, high - _MOVE_BYTES)
                arena, records = self._arena, self._records
                if self._released or low >= high or arena is None:
                    return False
                for record, _, _ in records:
                    self._check_there(record)
            copy_all(list(self._tasks(arena, records, low, high)), lambda: self._released)
            with self._lock:
                if self._released:
                    return False
                self._moved = low
                self.moved = self.moved._replace(nbytes=self.moved.nbytes + high - low)
                self._release_if_free()
        return True

    def _take_arena(self, nbytes: int) -> None:
        """Memory for the last bytes, as many as there may be of them."""
        memory, budget = self._memory, self._memory.budget_bytes
        if budget is not None:
            nbytes = min(nbytes, budget - self._beside_bytes)
            if memory.nbytes + self._beside_bytes > budget:
                memory.release()
        if nbytes < PAGE_BYTES:
            return
        arena = memory.arena(nbytes + PAGE_BYTES if budget is None else nbytes, False)
        end = _memory.round_up(self.spans.end, PAGE_BYTES)
        self._base = max(end - arena.nbytes // PAGE_BYTES * PAGE_BYTES, 0)
        self._arena = arena

    def _tasks(
        self,
        arena: torch.Tensor,
        records: Sequence[tuple[Record, int, int]],
        low: int,
        high: int,
    ) -> Iterator[Copy]:
        """The copies of the places in [low, high)."""
        for (record, start, end), place in zip(records, self.spans.places, strict=False):
            position, stop = max(place, low), min(place + end - start, high)
            while position < stop:
                nbytes = min(stop - position, COPY_BYTES)
                offset = start - record.offset + position - place
                yield Copy(arena, position - self._base, record, offset, nbytes)
                position += nbytes


class GuardedSnapshot:
    """As `Snapshot`, of a state of which a part is left where it lies.

    Args:
        memory: Of the copy of everything else.
        refuge: Where the rest of what is left is copied to, when its owner wants it back.
        source: The layout, with the storages themselves.
        start: First byte of the part of the file; a multiple of 4096.
        end: First byte behind it.
        also: As for `Snapshot`.
        live: What is left where it lies: what watches it, by the record's index.
        step: Of the checkpoint; for errors.
    """

    def __init__(
        self,
        memory: SnapshotMemory,
        refuge: SnapshotMemory,
        source: Layout,
        start: int,
        end: int,
        also: Sequence[int],
        live: dict[int, list[Watched]],
        step: int,
    ) -> None:
        aside = bytes_in_pages(source.records, also)
        copied: list[tuple[Record, int, int]] = []
        left: list[tuple[Record, int, int]] = []
        numbers: dict[int, int] = {}  # the record's index → its number among its like
        for index, record in enumerate(source.records):
            if not overlap(record, start, end):
                continue
            kind = left if index in live else copied
            numbers[index] = len(kind)
            kind.append((record, max(record.offset, start), min(record.end, end)))
        self._spans = Spans([(low, high) for _, low, high in copied])
        budget = refuge.budget_bytes
        if budget is not None and refuge.nbytes + self._spans.end > budget:
            refuge.release()
        self._copied = Snapshot(memory, _packed(copied, self._spans), 0, self._spans.end)
        watched = [each for index in live if index in numbers for each in live[index]]
        self.live = Live(left, watched, refuge, memory.nbytes, step)
        readers = [record.data for record in self._copied.layout.records]

        def reader(index: int, record: Record) -> Callable[[int, int], torch.Tensor]:
            name, number = record.name, numbers.get(index, -1)
            low = max(record.offset, start) - record.offset
            data = None if index in live or number < 0 else readers[number]

            def read(at: int, nbytes: int) -> torch.Tensor:
                for first, known in aside.get(index, ()):
                    if first <= at and at + nbytes <= first + known.nbytes:
                        return known[at - first : at - first + nbytes]
                if number < 0:
                    raise ValueError(f"{name} is not of the part [{start}, {end})")
                if data is None:
                    return self.live.read(number, at, nbytes)
                assert not isinstance(data, torch.Tensor)
                return data(at - low, nbytes)

            return read

        self.layout = source._replace(
            records=[
                record._replace(data=reader(index, record))
                for index, record in enumerate(source.records)
            ]
        )

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
        return min(self._copied.most_in_flight_bytes, _MOST_IN_FLIGHT_BYTES)

    def take(self, progress: Callable[[], None] = lambda: None) -> None:
        """Copy what is not left where it lies; see `Snapshot.take`."""
        self._copied.take(progress)

    def written(self, end: int) -> None:
        """All of the file's bytes before `end` are in the file."""
        self._copied.written(self._spans.reached(end))
        self.live.written(end)

    def check(self) -> None:
        """Raise `IntegrityError` if what was left where it lies was changed; all was read."""
        self.live.check()

    def again(self) -> bool:
        """Whether all of it can be read once more, from its start; nothing is in flight."""
        return self.fits and self.live.again()

    def stop(self) -> None:
        """Wake whoever waits, with `Cancelled`; from any thread."""
        self._copied.stop()
        self.live.stop()

    def over(self) -> None:
        """Nobody reads it any more: the caller's memory is the caller's again."""
        self.live.over()


def _packed(records: Sequence[tuple[Record, int, int]], spans: Spans) -> Layout:
    """Spans of records as a file of their own."""
    packed: list[Record] = []
    for (record, low, high), place in zip(records, spans.places, strict=True):
        assert isinstance(record.data, torch.Tensor)  # a layout that was just planned
        data = record.data[low - record.offset : high - record.offset]
        packed.append(record._replace(offset=place, nbytes=high - low, data=data))
    return Layout(spans.end, [], packed)


def _gone(offset: int, nbytes: int) -> torch.Tensor:
    raise AssertionError("bytes were read again that are the caller's now")


def _no_thread(failed: BaseException) -> None:
    logger.warning("a step waits for the drive: %s", failed)
