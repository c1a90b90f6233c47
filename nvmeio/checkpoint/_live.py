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
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from nvmeio._formats.torch_layout import StorageRecord
from nvmeio._io import threads
from nvmeio._io.inflight import Cancelled
from nvmeio._plan import PAGE_BYTES, round_down, round_up
from nvmeio.checkpoint._ended import Ended
from nvmeio.checkpoint._snapshot import COPY_BYTES, Copy, SnapshotMemory, copy_all
from nvmeio.checkpoint._watched import Told, Watched

logger = logging.getLogger("nvmeio")

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
        records: Each with where its bytes are (`StorageRecord.data`) and its span of the file to be
            read.
        watched: What belongs to whom, and must not change.
        memory: Where the rest is copied to.
        beside_bytes: What the snapshot of everything else takes of its budget.
        told: Of the save; for errors.
    """

    def __init__(
        self,
        records: Sequence[tuple[StorageRecord, int, int]],
        watched: Sequence[Watched],
        memory: SnapshotMemory,
        beside_bytes: int,
        told: Told,
    ) -> None:
        self._records = list(records)
        self._watched = list(watched)
        self._memory = memory
        self._beside_bytes = beside_bytes
        self._told = told
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
        self._unseen = 0  # the thread that may read without asking
        self._copying = threading.Lock()  # while the mover uses the arena
        self._moving = _thread.allocate_lock()  # taken by the one mover
        self._free = Ended()
        self._asked_at = 0.0  # 0: nobody wants it back yet
        self.moved = Moved()

    # Whoever wants it back

    def leave(self) -> None:
        """Block until nobody reads the caller's memory any more; an interrupt ends the waiting."""
        self.ask()
        self._free.wait(None)

    def ask(self) -> None:
        """Begin to get out of the way; who has several asks all of them before it waits."""
        if self._free.done:
            return
        if self._unseen == _thread.get_ident():
            self.seen()  # who reads is who steps: it has read
        self._asked_at = self._asked_at or time.perf_counter()
        if not self._moving.locked():
            threads.start(self._move, "nvmeio-guard", _no_thread)

    @property
    def free(self) -> bool:
        """Whether nobody reads the caller's memory any more."""
        return self._free.done

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

    def begin_unseen(self) -> bool:
        """From now on this thread may read the memory itself, not by `read`, until `seen`.

        False where it is the caller's again, who may have changed it: then all was copied.
        """
        with self._lock:
            if self._released:
                return False
            self._unseen = _thread.get_ident()
            return True

    def seen(self) -> None:
        """Whoever reads asks for each byte from now on, or has read all."""
        with self._lock:
            self._unseen = 0
            self._release_if_free()

    def all_read(self) -> None:
        """Nothing that was not read will be: of what is here, not all may be wanted.

        Raises:
            IntegrityError: What was read was changed.
        """
        with self._lock:
            self._unseen = 0
            self._claimed = self._written = self.spans.end
            self._release_if_free()
            self._raise_error()

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
        if self._released or self._unseen:
            return
        if self._written < self._claimed or self._claimed < self._moved:
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
                each.check(self._told)
        except BaseException as changed:
            self._error = changed

    def _check_there(self, record: StorageRecord) -> None:
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
            copy_all(list(self._tasks(arena, records, low, high)), lambda: self._released, {})
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
        arena = memory.arena(nbytes + PAGE_BYTES if budget is None else nbytes)
        end = round_up(self.spans.end, PAGE_BYTES)
        self._base = max(end - round_down(arena.nbytes, PAGE_BYTES), 0)
        self._arena = arena

    def _tasks(
        self,
        arena: torch.Tensor,
        records: Sequence[tuple[StorageRecord, int, int]],
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


def _gone(offset: int, nbytes: int) -> torch.Tensor:
    raise AssertionError("bytes were read again that are the caller's now")


def _no_thread(failed: BaseException) -> None:
    logger.warning("a step waits for the drive: %s", failed)
