"""The records of a core: which are in flight, which failed unseen, and how many are over."""

from __future__ import annotations

import itertools
import threading

from nvmeio._core.record import Record
from nvmeio.engines.base import CompletionQueue, Counters
from nvmeio.errors import ClosedError

_CLOSED = "the handle is closed: open a new one"
_FORKED = "this process was forked from the handle's owner: open a new handle here"


class LiveRecords:
    """What a core has in flight, and whether it takes more.

    Attributes:
        lock: Held while a record is claimed, moved to another queue or ended.
        records: In flight, by token. Others may be taken in at any time, also with the lock held.
        tokens: Names for records.
        refusal: Why none is taken in any more, or "".
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # the collector may run `__del__` while it is held
        self.records: dict[int, Record] = {}
        self.tokens = itertools.count(1)
        self.refusal = ""
        self._failed: dict[int, Record] = {}  # whose error nobody has seen yet
        self._finished = 0
        self._unissued = Counters()  # what the engine's counters lack, or have too much

    # --- taking in --------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise `ClosedError` once records are refused."""
        if self.refusal:
            raise ClosedError(self.refusal)

    def check_process(self) -> None:
        """Raise `ClosedError` in a fork of the process: nothing in flight ends there."""
        if self.refusal is _FORKED:
            raise ClosedError(_FORKED)

    @property
    def forked(self) -> bool:
        """Whether all of it is another process's."""
        return self.refusal is _FORKED

    def refuse(self) -> None:
        """Take no record in from now on."""
        with self.lock:
            self.refusal = self.refusal or _CLOSED

    def add(self, record: Record) -> None:
        """Take a record in.

        Raises:
            ClosedError: None is taken any more.
        """
        # Without the lock: whoever refuses looks for records after that. One sees the other.
        self.records[record.token] = record
        if self.refusal:
            self.records.pop(record.token, None)
            raise ClosedError(self.refusal)

    def drop(self, record: Record) -> None:
        """Its start failed: it was never in flight."""
        with self.lock:
            self.records.pop(record.token, None)

    def rename(self, record: Record) -> None:
        """With the lock held: a new token, for who has the old one is to do nothing with it."""
        token = next(self.tokens)
        self.records[token] = self.records.pop(record.token)
        record.token = token

    # --- ending -------------------------------------------------------------------------------

    def end(self, record: Record, state: str) -> None:
        """With the lock held: a record is over. It may be done again."""
        if state == "failed" and record.state == "pending":
            self._failed[record.token] = record
        record.state = state
        if self.records.pop(record.token, None) is not None:
            self._finished += 1

    def end_all(self, records: list[Record]) -> None:
        """Records are over, as their errors say. It may be done again."""
        with self.lock:
            for record in records:
                if record.error is not None:
                    self.end(record, "failed")
                    continue
                record.state = "finished"
                if self.records.pop(record.token, None) is not None:
                    self._finished += 1

    def end_at_once(self, record: Record, failure: BaseException | None) -> Record:
        """A record is over that was never in flight; the same record."""
        with self.lock:
            record.error, record.state = failure, "finished" if failure is None else "failed"
            self._finished += 1
            if failure is not None:
                self._failed[record.token] = record
        return record

    def retrieved(self, record: Record) -> None:
        """Somebody has seen the record's error; `take` need not tell it again."""
        if self._failed:
            self._failed.pop(record.token, None)

    def take(self) -> tuple[int, list[BaseException]]:
        """How many have finished since the last call, and the errors that nobody has seen."""
        if self.forked:
            return 0, []
        with self.lock:
            finished, self._finished = self._finished, 0
            failed, self._failed = self._failed, {}
        return finished, [o.error for o in failed.values() if o.error is not None]

    # --- looking ------------------------------------------------------------------------------

    def any(self) -> Record | None:
        """One that is in flight."""
        with self.lock:
            while self.records:
                try:
                    record = next(iter(self.records.values()))
                except (RuntimeError, StopIteration):  # another came in, or went, in between
                    continue
                if record.state == "pending":
                    return record
                self.end(record, record.state)  # an interrupt came before it was taken out
        return None

    def at(self, cq: CompletionQueue) -> list[Record]:
        """With the lock held: those whose end is to be reported at a completion queue."""
        return [record for record in list(self.records.values()) if record.home is cq]

    def writes_to(self, inode: tuple[int, int]) -> list[Record]:
        """The writes to a file that have been started up to now, and are not over."""
        with self.lock:
            return [record for record in list(self.records.values()) if record.writes_to(inode)]

    def user_of(self, storage: int) -> Record | None:
        """What is in flight in a storage, given its `_cdata`."""
        return next((r for r in list(self.records.values()) if r.uses(storage)), None)

    def __len__(self) -> int:
        return len(self.records)

    # --- counting -----------------------------------------------------------------------------

    def count(self, **more: int) -> None:
        """What the engine's counters lack (or, negative, have too much)."""
        with self.lock:
            sums = {name: getattr(self._unissued, name) + n for name, n in more.items()}
            self._unissued = self._unissued._replace(**sums)

    def corrected(self, counters: Counters) -> Counters:
        """The engine's counters with that."""
        with self.lock:
            pairs = zip(counters, self._unissued, strict=True)
            return Counters(*(sum(pair) for pair in pairs))._replace(in_flight=len(self.records))

    def after_fork(self) -> None:
        """In the child: the lock may have been copied while held."""
        self.lock = threading.RLock()
        self.refusal = _FORKED
