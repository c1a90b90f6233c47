"""Bytes of a guarded state in a device's memory: copied to the host while training goes on.

They have to cross the bus in any case, so they are copied once, by a stream of their own
(`_device.beside`): behind what the caller's stream was asked before the save, beside what it is
asked after it. The page-locked memory that they come to is a window that moves over them, as in
`_snapshot`; the writer takes from it what has arrived.

    0        written           arrived             begun                            end
      ├─ free ──┼─ being written ──┼─ on the bus ─────┼─ to be copied ────────────────┤
                └────────────── at most the window's size ──┘

Nobody waits for the caller's stream. A step waits on the host until the last copy is *begun*: then
the step's stream waits for the copies (`_device.Beside.precede`), and the host goes on. Where the
window holds all of it, that is at once; where not, it is when the writer has come so far.

What was changed meanwhile is found as in `_live`: the facts are compared when the last copy is
begun and somebody wants to step, or when it has ended; and words of each storage, which the same
stream copies before and after all others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import torch

from nvmeio._device import Mark
from nvmeio._formats.torch_layout import StorageRecord
from nvmeio._io import threads
from nvmeio._io.inflight import MOST_BYTES, Cancelled
from nvmeio._io.threads import SLICE_S
from nvmeio._plan import PAGE_BYTES, round_down
from nvmeio.checkpoint._ended import Ended
from nvmeio.checkpoint._live import Moved, Spans
from nvmeio.checkpoint._snapshot import (
    COPY_BYTES,
    LEAST_BYTES,
    STEP_BYTES,
    Copy,
    SnapshotMemory,
    device_of,
    locked_for,
    streams_of,
    tensor_of,
)
from nvmeio.checkpoint._watched import Told, Watched, sampled, sampled_words

# The least window: two operations on their way to the drive, one read, and a step (`_snapshot`);
# beside it there is room for some words.
_LEAST_BYTES = LEAST_BYTES - (4 << 20)


class DeviceLive:
    """Records in device memory that are read while the caller goes on.

    Args:
        records: Each with its storage, and its span of the file to be read.
        watched: Of each record, what belongs to whom, and must not change.
        memory: Where they are copied to.
        most_bytes: What may be used of that; None for what it allows.
        told: Of the save; for errors.

    Raises:
        MemoryError: There is no room.
    """

    def __init__(
        self,
        records: Sequence[tuple[StorageRecord, int, int]],
        watched: Sequence[Sequence[Watched]],
        memory: SnapshotMemory,
        most_bytes: int | None,
        told: Told,
    ) -> None:
        self._records = list(records)
        self._offsets = [record.offset for record, _, _ in records]
        self._watched = [list(each) for each in watched]
        self._told = told
        self.spans = Spans([(low, high) for _, low, high in records])
        self.nbytes = sum(high - low for _, low, high in records)
        self._streams = streams_of([record for record, _, _ in records])
        words = sum(sampled_words(record.nbytes) for record, _, _ in records)
        nbytes = self.spans.end + PAGE_BYTES + 16 * words
        if most_bytes is not None and most_bytes < nbytes:
            nbytes = most_bytes
            if memory.nbytes > most_bytes:
                memory.release()
        self._arena = memory.arena(nbytes, locked_for(self._streams))
        self._size = round_down(self._arena.nbytes - 16 * words, PAGE_BYTES)
        if self._size < min(self.spans.end, _LEAST_BYTES):
            raise MemoryError(f"{self._arena.nbytes} bytes are too few to copy {self.nbytes} to")
        of_words = self._arena[self._size : self._size + 16 * words].view(torch.int64)
        self._before, self._after = of_words[:words], of_words[words:]
        self._marks: list[tuple[int, list[Mark]]] = []  # behind the copies up to a place
        self._changed = threading.Condition()
        self._begun = self._written = 0
        self._all_begun = False
        self._taken = self._stopped = False
        self._error: BaseException | None = None
        self._releasing = threading.Lock()
        self._asked_at = 0.0
        self._free = Ended()
        self._ended = Ended()
        self.moved = Moved()

    # Whoever wants it back

    def ask(self) -> None:
        """Somebody wants to change it; who has several asks all of them before it waits."""
        if self._free.done or self._asked_at:
            return
        self._asked_at = time.perf_counter()
        threads.start(self._let_go, "nvmeio-guard", lambda failed: None)  # else at the end

    def leave(self) -> None:
        """Block until all copies are begun; what the calling thread's stream does comes after."""
        self.ask()
        self._free.wait(None)
        if not self._ended.done:
            for stream in self._streams.values():
                stream.precede()

    @property
    def free(self) -> bool:
        """Whether nobody reads the device's memory any more."""
        return self._ended.done

    def _let_go(self) -> None:
        with self._changed:
            while not self._all_begun:
                self._changed.wait(SLICE_S)
        self._release()

    def _release(self) -> None:
        """All copies are begun: the last moment to see what was changed by other than a step."""
        with self._releasing:
            if self._free.done:
                return
            try:
                for each in self._watched:
                    for watched in each:
                        watched.check(self._told)
            except BaseException as changed:
                self._error = self._error or changed
            if self._asked_at:
                held_s = time.perf_counter() - self._asked_at
                self.moved = self.moved._replace(held_s=held_s)
            self._free.set()

    # The copying side

    def take(self) -> None:
        """Begin: everything that the calling thread's stream was asked so far comes first."""
        for stream in self._streams.values():
            stream.follow()
        self._taken = True
        threads.start(self._run, "nvmeio-guard", self._fail)

    def _run(self) -> None:
        try:
            self._copy_words(self._before)
            while self._begun < self.spans.end:
                self._copy_some()
            self._copy_words(self._after)
        except BaseException as failed:
            self._error = failed
        self._finish()

    def _fail(self, failed: BaseException) -> None:
        self._error = failed
        self._finish()

    def _finish(self) -> None:
        with self._changed:
            self._all_begun = True
            self._changed.notify_all()
        if self._asked_at or self._error is not None:
            self._release()
        try:
            for stream in self._streams.values():
                stream.mark().wait()  # also after an error: the memory is the next one's, then
            self._compare_words()
        except BaseException as failed:
            self._error = self._error or failed
        self._release()
        self._watched, self._records = [], []
        self._ended.set()

    def _copy_some(self) -> None:
        begun, until = self._begun, self._wait_for_room()
        for copy in self._tasks(begun, until):
            copy.run(self._streams)
        marks = [stream.mark() for stream in self._streams.values()]
        with self._changed:
            self._begun = until
            self._marks.append((until, marks))
            self._changed.notify_all()

    def _wait_for_room(self) -> int:
        """Up to where it can be copied now."""
        begun, end = self._begun, self.spans.end
        wanted = min(end - begun, STEP_BYTES)
        with self._changed:
            while not self._stopped:
                free = self._size - (begun - self._written)
                if free >= wanted:
                    return min(begun + free, begun + COPY_BYTES, end)
                self._changed.wait(SLICE_S)  # `stop` may have been interrupted
        raise Cancelled

    def _tasks(self, low: int, high: int) -> Iterator[Copy]:
        """The copies of the places in [low, high)."""
        for (record, start, end), place in zip(self._records, self.spans.places, strict=True):
            position, stop = max(place, low), min(place + end - start, high)
            if position < stop:
                self._check_there(record)
            while position < stop:
                at = position % self._size
                nbytes = min(stop - position, self._size - at)
                yield Copy(
                    self._arena, at, record, start - record.offset + position - place, nbytes
                )
                position += nbytes

    def _check_there(self, record: StorageRecord) -> None:
        """Memory that was given back (`resize_`) must not be read."""
        if tensor_of(record).untyped_storage().nbytes() >= record.nbytes:
            return
        for each in self._watched:
            for watched in each:
                watched.check(self._told)
        raise AssertionError("unreachable: its storage was resized")

    def _copy_words(self, to: torch.Tensor) -> None:
        at = 0
        for record, _, _ in self._records:
            self._check_there(record)
            if not sampled_words(record.nbytes):
                continue
            for words in sampled(tensor_of(record)):
                stream = self._streams[device_of(record)]
                stream.copy(to[at : at + words.numel()], words)
                at += words.numel()

    def _compare_words(self) -> None:
        if self._error is not None or torch.equal(self._before, self._after):
            return
        at = 0
        for (record, _, _), watched in zip(self._records, self._watched, strict=True):
            end = at + sampled_words(record.nbytes)
            if not torch.equal(self._before[at:end], self._after[at:end]):
                raise watched[0].changed(self._told)
            at = end

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
            IntegrityError: They were changed.
        """
        low, place = self.spans.spans[number][0], self.spans.places[number]
        place += offset - (low - self._offsets[number])
        end = place + nbytes
        with self._changed:
            while self._begun < end and not self._stopped and self._error is None:
                self._changed.wait(SLICE_S)
            if self._error is not None:
                raise self._error
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

    def check(self) -> None:
        """Raise if what was read is not what it was at first; once all was read."""
        self._ended.wait(None)
        if self._error is not None:
            raise self._error

    def again(self) -> bool:
        """Whether it can be read once more from its start; nothing is in flight."""
        return self.fits

    def stop(self) -> None:
        """Give no more bytes out: `read` raises `Cancelled`."""
        self._stopped = True
        with self._changed:
            self._changed.notify_all()

    def over(self) -> None:
        """Nobody reads or writes any of it any more; waits for what is on the bus."""
        self.stop()
        if not self._taken:
            self._taken = True
            self._fail(Cancelled())
        self._ended.wait(None)
