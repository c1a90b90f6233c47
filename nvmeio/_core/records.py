"""Records: a core's own view of its operations. `operation.Operation` is the users' view.

A record's `State` changes once. It keeps storage and descriptors alive until the kernel has
reported, whoever else lets go of them. `LiveRecords` has those of one core that are in flight.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import threading
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch

from nvmeio._files.descriptors import Descriptors
from nvmeio._memory.tensors import Memory, touch
from nvmeio.engines import base, transfers
from nvmeio.engines.transfers import Plan, RowPlaces
from nvmeio.errors import ClosedError, ShortTransferError, TransferError, counted, errno_of, naming

NAMES = {
    base.Opcode.READ: "pread",
    base.Opcode.WRITE: "pwrite",
    base.Opcode.FSYNC: "fsync",
    base.Opcode.FDATASYNC: "fsync",
}
ROWS_NAMES = {base.Opcode.READ: "gather", base.Opcode.WRITE: "scatter"}
NOTHING = base.Outcome(0, 0, 0, 0, 0)

logger = logging.getLogger("nvmeio")


class State(Enum):
    """The state of an operation. It leaves PENDING once; states are compared by identity."""

    PENDING = "pending"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


# Names of the module: until Python 3.12 each look at a member of a class is slow.
PENDING, FINISHED, FAILED, CANCELLED = State


class Record:
    """One operation of a core.

    `memory` is None for an fsync. `check` runs after success, off the event loop. `places` says
    where the rows of a gather or scatter lie.
    """

    # Attributes that most records never set are looked up here: to set them in each cost 0.4 us.
    memory: Memory | None = None
    changed: torch.Tensor | None = None  # by it, without torch's knowledge
    check: Callable[[], None] | None = None
    places: RowPlaces | None = None
    rows: base.Rows | None = None
    opened: Descriptors | None = None
    is_plain = False  # nothing follows, but for telling torch, if all of it was moved
    plan: Plan | None = None
    request: base.Request | None = None
    home: base.CompletionQueue | None = None  # where its end is reported
    state = PENDING
    stop = False
    claimed = 0  # the thread that concludes it, or HANDED_ON
    error: BaseException | None = None
    is_spoken_for = False  # its caller asks for its error, and the handle reports it to nobody else
    # Those notified of the end: event loops, threads (by releasing a lock), anybody. The first may
    # be added to without a lock; the thread that ends the record sets its state before it looks
    # there.
    waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]]
    gates: list[threading.Lock] | None = None
    callbacks: list[Callable[[], object]] | None = None

    def __init__(
        self,
        token: int,
        opcode: base.Opcode,
        memory: Memory | None,
        path: str,
        file_offset: int,
        nbytes: int,
        check: Callable[[], None] | None = None,
        places: RowPlaces | None = None,
    ) -> None:
        self.token = token
        self.opcode = opcode
        self.waiters = []
        self.path = path
        self.file_offset = file_offset
        self.nbytes = nbytes
        if memory is not None:
            self.memory = memory
            self.changed = memory.changed
            self.is_plain = memory.copy_back is None and check is None
        if check is not None:
            self.check = check
        if places is not None:
            self.places = places
            self.rows = places.rows

    def __repr__(self) -> str:
        span = f" [{self.file_offset}, {self.file_offset + self.nbytes})" if self.nbytes else ""
        if self.rows is not None:
            span = f" {counted(self.rows.number, 'row')} of {self.rows.row_bytes} bytes"
        return f"<{self.name} {self.path}{span} {self.state.value}>"

    @property
    def name(self) -> str:
        return (NAMES if self.rows is None else ROWS_NAMES)[self.opcode]

    def writes_to(self, inode: tuple[int, int]) -> bool:
        opened = self.opened
        return self.opcode is base.Opcode.WRITE and opened is not None and opened.inode == inode

    def outcome(self) -> base.Outcome:
        """The engine's result, once the kernel is done."""
        return NOTHING if self.request is None else self.request.outcome()

    # --- for the core, in this order --------------------------------------------------------

    def prepare(self, engine: base.Engine, cq: base.CompletionQueue, transfer: Any) -> base.Request:
        if self.rows is None:
            return engine.prepare(cq, self.token, transfer)
        return base.prepare(engine, cq, self.token, transfer, self.rows)

    def cancel(self) -> None:
        """Issue no further block."""
        self.stop = True  # what is only about to be asked of the engine is cancelled right after
        request = self.request
        if request is not None:
            request.cancel()

    def goes_on(self, moved: int) -> bool:
        """Whether more is to be done by the finisher, now that the request has moved so much."""
        return moved == -errno.EINVAL and self.plan is not None and self.plan.direct

    def go_on(self) -> tuple[base.Transfer | list[base.Transfer] | None, dict[str, int]]:
        """The engine's next step, if any, and the correction of its counters.

        Here that is a direct transfer that was refused, done again as a buffered one.
        """
        opened, memory = self.opened, self.memory
        assert opened is not None and memory is not None
        try:
            self.plan, transfer = transfers.plan_buffered(
                self.opcode, memory, opened, self.file_offset
            )
        except TransferError:
            return None, {}
        logger.warning("%s refused direct I/O (EINVAL): buffered instead", self.path)
        return transfer, refused_once(self.opcode, self.outcome())

    def uses(self, storage: int) -> bool:
        """Whether it is in flight in a storage, given its `_cdata`."""
        kept = [each.keep for each in (self.memory, self.places) if each is not None]
        return any(keep._cdata == storage for keep in kept)

    def touch(self) -> None:
        """Tell torch that the tensor was changed, however it ended: some bytes may have arrived."""
        if self.changed is not None:
            touch(self.changed)

    def dropped(self, moved: int) -> bool:
        return moved == -errno.ECANCELED

    def failure(self, moved: int) -> BaseException | None:
        if moved == self.nbytes or self._is_no_sync(moved):
            return None
        outcome = self.outcome()
        return failure_of(outcome, self._about(outcome.transferred))

    def _is_no_sync(self, moved: int) -> bool:
        """Whether the kernel has no fsync for AIO: IOCB_CMD_FSYNC came with Linux 4.18."""
        return moved == -errno.EINVAL and self.opcode >= base.Opcode.FSYNC

    def has_last_steps(self, moved: int) -> bool:
        memory = self.memory
        return (
            self.check is not None
            or (memory is not None and memory.copy_back is not None)
            or self._is_no_sync(moved)
        )

    def last_steps(self, moved: int) -> None:
        """Do what follows a transfer that went well; may take long."""
        if self._is_no_sync(moved):
            self._sync_here()
        memory, check = self.memory, self.check
        if memory is not None:
            copy_back(memory, self._about(0))
        if check is not None:
            check()

    def _sync_here(self) -> None:
        """fsync(2) in this thread, if the kernel's AIO lacks it."""
        assert self.opened is not None
        fd = self.opened.any_fd()
        with naming("fsync", self.path):
            (os.fsync if self.opcode is base.Opcode.FSYNC else os.fdatasync)(fd)

    def let_go(self) -> TransferError | None:
        """Give memory and file back, and return the error of closing the file, if there is one.

        Idempotent; returns the same error again.
        """
        memory, places = self.memory, self.places
        if memory is not None:
            memory.end()
        if places is not None:
            places.end()
        self.memory = self.changed = self.places = self.plan = self.check = None
        return self._let_go_of_file()

    def let_go_whole(self) -> TransferError | None:
        """`let_go` of one that was moved whole."""
        return self.let_go()

    def _let_go_of_file(self) -> TransferError | None:
        opened = self.opened
        if opened is not None:
            try:
                opened.let_go(self)
            except OSError as failed:  # NFS and friends report lost writes here (man 2 close)
                about = {**self._about(self.outcome().transferred), "operation": "close"}
                return TransferError(errno_of(failed), **about)
            self.opened = None
        return None

    def _about(self, transferred: int) -> dict[str, Any]:
        return {
            "operation": self.name,
            "path": self.path,
            "file_offset": self.file_offset,
            "nbytes": self.nbytes,
            "transferred": transferred,
        }


def make_room(kind: type[Record], *names: str) -> None:
    """Have records of a class keep their attributes without a dictionary each.

    From 3.11 on, Python lays objects out by the attributes that the first thirty of their class
    were given. In flight together, none of those has what comes last yet: each record then had a
    dictionary made for it, a twentieth of what a short read takes. `names` are the attributes that
    the class itself lacks.
    """
    record = kind.__new__(kind)
    known = [name for name in dir(kind) if not name.startswith("__")]
    for name in (*names, *(name for name in known if not callable(getattr(kind, name)))):
        if not isinstance(getattr(kind, name, None), property):
            setattr(record, name, None)


make_room(Record, "token", "opcode", "path", "file_offset", "nbytes", "waiters")


def let_go_plain(records: list[Record]) -> bool:
    """Let go of records that went well and have no steps of their own, all at once.

    It may be done twice. An error of closing a file becomes its record's. False if torch refused to
    be told of all together: each is to be concluded by itself.
    """
    changed = [record.changed for record in records if record.changed is not None]
    try:
        if changed:
            torch.autograd.graph.increment_version(changed)
    except Exception:  # of one of them, an inference tensor for one
        return False
    for record in records:
        try:
            lost = record.let_go_whole()
        except Exception as failed:
            record.error = failed
        else:
            if lost is not None:
                record.error = lost
    return True


def failure_of(outcome: base.Outcome, about: dict[str, Any]) -> BaseException:
    """The error of a transfer that is not whole; `about` is what `TransferError` takes."""
    if isinstance(outcome.cause, base.EngineError):
        return outcome.cause.with_context(**about)
    if outcome.cause is not None:
        return outcome.cause
    if outcome.error:
        return TransferError(outcome.error, **about)
    start, end = about["file_offset"], about["file_offset"] + about["nbytes"]
    detail = (
        f"the file ends at byte {start + outcome.transferred}, but the read ends at byte {end}"
        if outcome.transferred
        else "the file ends before the span; nothing could be read"
    )
    return ShortTransferError(errno.ENODATA, detail=detail, **about)


def copy_back(memory: Memory, about: dict[str, Any]) -> None:
    """Copy bytes that were read elsewhere into the tensor."""
    if memory.copy_back is None:
        return
    try:
        memory.copy_back()
    except OSError as failed:
        detail = failed.strerror or ""
        raise TransferError(errno_of(failed), detail=detail, **about) from failed


def refused_once(opcode: base.Opcode, refused: base.Outcome) -> dict[str, int]:
    """The correction of the counters for a transfer that was refused and is repeated."""
    return {
        "operations": -1,
        "errors": -1,
        "direct_bytes": -refused.direct_bytes,
        "bounced_bytes": -refused.bounced_bytes,
        "buffered_bytes": -refused.buffered_bytes,
        "bytes_read" if opcode is base.Opcode.READ else "bytes_written": -refused.transferred,
    }


_CLOSED = "the handle is closed: open a new one"
_FORKED = "this process was forked from the handle's owner: open a new handle here"


class LiveRecords:
    """The transfers in flight of a core, by token, and whether it takes more.

    `lock` is held while a record is claimed, moved to another queue or ended; records are taken in
    without it. `refusal` says why none is taken in any more, or is "".
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # the collector may run `__del__` while it is held
        self.records: dict[int, Record] = {}
        self.tokens = itertools.count(1)
        self.refusal = ""
        self._failed: dict[int, Record] = {}  # whose error nobody has seen yet
        self._finished = 0
        self._unissued = base.Counters()  # what the engine's counters lack, or have too much

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
        """Whether all of it belongs to the process that this one was forked from."""
        return self.refusal is _FORKED

    def refuse(self) -> None:
        with self.lock:
            self.refusal = self.refusal or _CLOSED

    def add(self, record: Record) -> None:
        """Take a record in; ClosedError if none is taken any more."""
        # Without the lock: whoever refuses looks for records after that. One sees the other.
        self.records[record.token] = record
        if self.refusal:
            self.records.pop(record.token, None)
            raise ClosedError(self.refusal)

    def drop(self, record: Record) -> None:
        """Remove a record whose start failed: it was never in flight."""
        with self.lock:
            self.records.pop(record.token, None)

    def rename(self, record: Record) -> None:
        """With the lock held: give it a new token. The old token then has no effect."""
        token = next(self.tokens)
        self.records[token] = self.records.pop(record.token)
        record.token = token

    # --- ending -------------------------------------------------------------------------------

    def end(self, record: Record, state: State) -> None:
        """With the lock held: end a record. Idempotent."""
        if state is FAILED and record.state is PENDING and not record.is_spoken_for:
            self._failed[record.token] = record
        record.state = state
        if self.records.pop(record.token, None) is not None:
            self._finished += 1

    def end_all(self, records: list[Record]) -> None:
        """End records as finished, or as failed if they have an error. Idempotent."""
        with self.lock:
            for record in records:
                if record.error is not None:
                    self.end(record, FAILED)
                    continue
                record.state = FINISHED
                if self.records.pop(record.token, None) is not None:
                    self._finished += 1

    def end_at_once(self, record: Record, failure: BaseException | None) -> Record:
        """End a record that was never in flight, and return it."""
        with self.lock:
            record.error, record.state = failure, FINISHED if failure is None else FAILED
            self._finished += 1
            if failure is not None:
                self._failed[record.token] = record
        return record

    def retrieved(self, record: Record) -> None:
        """Somebody has seen the record's error; `take` need not report it again."""
        if self._failed:
            self._failed.pop(record.token, None)

    def speak_for(self, record: Record) -> None:
        """The caller that began the record will see its error; `take` never reports it."""
        with self.lock:
            record.is_spoken_for = True
            self.retrieved(record)

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
        """Any record that is in flight."""
        with self.lock:
            while self.records:
                try:
                    record = next(iter(self.records.values()))
                except (RuntimeError, StopIteration):  # another came in, or went, in between
                    continue
                if record.state is PENDING:
                    return record
                self.end(record, record.state)  # an interrupt came before it was taken out
        return None

    def at(self, cq: base.CompletionQueue) -> list[Record]:
        """With the lock held: the records whose end is to be reported at a completion queue."""
        return [record for record in list(self.records.values()) if record.home is cq]

    def writes_to(self, inode: tuple[int, int]) -> list[Record]:
        """The writes to a file that have been started up to now, and are not over."""
        with self.lock:
            return [record for record in list(self.records.values()) if record.writes_to(inode)]

    def user_of(self, storage: int) -> Record | None:
        """The record in flight that uses a storage, given its `_cdata`."""
        return next((r for r in list(self.records.values()) if r.uses(storage)), None)

    def __len__(self) -> int:
        return len(self.records)

    # --- counting -----------------------------------------------------------------------------

    def count(self, **more: int) -> None:
        """Add to the corrections of the engine's counters, which may be negative."""
        with self.lock:
            self._unissued = self._unissued.plus(**more)

    def corrected(self, counters: base.Counters) -> base.Counters:
        """The engine's counters with their corrections."""
        with self.lock:
            return counters.plus(**self._unissued._asdict())._replace(in_flight=len(self.records))

    def after_fork(self) -> None:
        """In the child: the lock may have been copied while held."""
        self.lock = threading.RLock()
        self.refusal = _FORKED
