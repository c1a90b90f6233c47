"""Bytes of a state in a device's memory: copied to the host beside whatever the host does next.

They have to cross the bus in any case, so they are copied once, by a stream of their own
(`_memory.devices.beside`): behind what the caller's stream was asked before the save, and before
what it is asked after it. So the bytes are those of the save, whatever kernels come next, and the
host waits for none of it. The page-locked memory that they come to is a window that moves over
them, as in `copies`; the writer takes from it what has arrived.

    0        written           arrived             begun                            end
      ├─ free ──┼─ being written ──┼─ on the bus ─────┼─ to be copied ────────────────┤
                └────────────── at most the window's size ──┘

Where the window holds all of it, every copy is begun at once. Where not, the host waits until the
writer has made room for the last one.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

import torch

from nvmeio._files.plan import PAGE_BYTES, round_down
from nvmeio._io.inflight import MOST_BYTES, Cancelled
from nvmeio._memory.devices import Mark
from nvmeio._threads.future import SLICE_S
from nvmeio.checkpoint._snapshot.copies import (
    COPY_BYTES,
    LEAST_BYTES,
    STEP_BYTES,
    Copy,
    SnapshotMemory,
    locked_for,
    streams_of,
)
from nvmeio.checkpoint._snapshot.spans import RecordSpan, Spans

# The least window: two operations on their way to the drive, one read, and a step (`_snapshot`).
_LEAST_BYTES = LEAST_BYTES - (4 << 20)


class DeviceCopies:
    """Records in device memory.

    Args:
        records: Each with its span of the file to be read.
        memory: Where they are copied to.
        most_bytes: What may be used of that; None for what it allows.

    Raises:
        MemoryError: There is no room.
    """

    def __init__(
        self, records: Sequence[RecordSpan], memory: SnapshotMemory, most_bytes: int | None
    ) -> None:
        self._records = list(records)
        self._offsets = [record.offset for record, _, _ in records]
        self.spans = Spans([(low, high) for _, low, high in records])
        self.nbytes = sum(high - low for _, low, high in records)
        self._streams = streams_of([record for record, _, _ in records])
        nbytes = self.spans.end + PAGE_BYTES
        if most_bytes is not None and most_bytes < nbytes:
            nbytes = most_bytes
            if memory.nbytes > most_bytes:
                memory.release()
        self._arena = memory.arena(nbytes, locked_for(self._streams))
        self._size = round_down(self._arena.nbytes, PAGE_BYTES)
        if self._size < min(self.spans.end, _LEAST_BYTES):
            raise MemoryError(f"{self._arena.nbytes} bytes are too few to copy {self.nbytes} to")
        self._marks: list[tuple[int, list[Mark]]] = []  # behind the copies up to a place
        self._changed = threading.Condition()
        self._begun = self._written = 0
        self._stopped = False
        self.stalled_s = 0.0

    # The copying side

    def take(self) -> None:
        """Begin all copies, behind what the calling thread's stream was asked; it waits for them.

        Waits for room where the window does not hold all of it.

        Raises:
            Cancelled: `stop` was called.
        """
        for stream in self._streams.values():
            stream.follow()
        try:
            while self._begun < self.spans.end:
                self._copy_some(self._wait_for_room())
        finally:
            self._records = []
            for stream in self._streams.values():
                stream.precede()

    def _copy_some(self, until: int) -> None:
        for copy in self._tasks(self._begun, until):
            copy.begin(self._streams)
        marks = [stream.mark() for stream in self._streams.values()]
        with self._changed:
            self._begun = until
            self._marks.append((until, marks))
            self._changed.notify_all()

    def _wait_for_room(self) -> int:
        """Up to where it can be copied now."""
        begun, end = self._begun, self.spans.end
        wanted = min(end - begun, STEP_BYTES)
        began = time.perf_counter()
        with self._changed:
            while not self._stopped:
                free = self._size - (begun - self._written)
                if free >= wanted:
                    self.stalled_s += time.perf_counter() - began
                    return min(begun + free, begun + COPY_BYTES, end)
                self._changed.wait(SLICE_S)  # `stop` may have been interrupted
        raise Cancelled

    def _tasks(self, low: int, high: int) -> Iterator[Copy]:
        """The copies of the places in [low, high)."""
        for (record, start, end), place in zip(self._records, self.spans.places, strict=True):
            position, stop = max(place, low), min(place + end - start, high)
            while position < stop:
                at = position % self._size
                nbytes = min(stop - position, self._size - at)
                yield Copy(
                    self._arena, at, record, start - record.offset + position - place, nbytes
                )
                position += nbytes

    # The writing side

    @property
    def fits(self) -> bool:
        """Whether all of it is held at once."""
        return self.spans.end <= self._size

    @property
    def most_in_flight_bytes(self) -> int:
        """What may be in flight at once, so that there is memory to copy into beside it."""
        return MOST_BYTES if self.fits else self._size // 2

    def read(self, number: int, offset: int, nbytes: int) -> torch.Tensor:
        """Bytes of a record, by its number here, in host memory; waits until they are there.

        Raises:
            Cancelled: `stop` was called.
        """
        low, place = self.spans.spans[number][0], self.spans.places[number]
        place += offset - (low - self._offsets[number])
        end = place + nbytes
        with self._changed:
            while self._begun < end and not self._stopped:
                self._changed.wait(SLICE_S)
            if self._stopped:
                raise Cancelled
            marks = next(marks for until, marks in self._marks if until >= end)
        for mark in marks:
            mark.wait()
        at = place % self._size
        first = self._arena[at : min(at + nbytes, self._size)]
        if first.nbytes == nbytes:
            return first
        return torch.cat((first, self._arena[: nbytes - first.nbytes]))  # around the window's end

    def written(self, position: int) -> None:
        """All before a position of the file is in the file: its memory is free again."""
        with self._changed:
            self._written = max(self._written, self.spans.reached(position))
            self._changed.notify_all()

    def stop(self) -> None:
        """Give no more bytes out: `read` and `take` raise `Cancelled`."""
        self._stopped = True
        with self._changed:
            self._changed.notify_all()

    def over(self) -> None:
        """Nobody reads it any more; waits for what is on the bus: the memory is the next one's.

        A device that has failed copies no more. Whoever reads what it had not copied has its error.
        """
        self.stop()
        for stream in self._streams.values():
            with contextlib.suppress(RuntimeError):
                stream.mark().wait()
