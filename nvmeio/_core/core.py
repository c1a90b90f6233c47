"""The core that an `AioHandle` and its operations share: an engine, and the life of its transfers.

A record is *started* here; it is in flight in `LiveRecords`; its end is noticed and concluded by
the `Reaper`, and told to the `Watchers`. `Cores` are those of one handle: host memory's, and
device memory's once it has met any.

Cores that have not given back what the kernel gave are `unreleased`: kept, ended at exit, refused
in a fork. So these are all that move bytes in this process, and what they and those before them
have counted is what it has moved: `totals`, and as numbers for monitoring `metrics`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from nvmeio import files
from nvmeio._core.batches import Batch, BatchRecord, Planner
from nvmeio._core.reaping import Reaper, Watchers
from nvmeio._core.records import CANCELLED, LiveRecords, Record
from nvmeio._files.descriptors import Descriptors
from nvmeio._memory import holds
from nvmeio._memory.devices import Copier
from nvmeio._memory.tensors import Memory
from nvmeio._threads import shutdown
from nvmeio._threads.closing import do_all
from nvmeio._threads.interruptible import begun, run_interruptible
from nvmeio._threads.running_loop import running_loop
from nvmeio._threads.threads import start
from nvmeio.engines import transfers
from nvmeio.engines.base import Counters, Engine, Opcode, Options, Transfer, own_counters
from nvmeio.engines.device_ring import RingEngine
from nvmeio.engines.transfers import RowPlaces
from nvmeio.errors import TransferError, counted
from nvmeio.files import File

logger = logging.getLogger("nvmeio")

# Without a loop nobody reaps; a submission in so many does it in passing.
REAP_EVERY = 64

# Strong references. In a cycle, the collector finalises the shim's objects together with the handle
# whose `__del__` hands them on; what is reachable from here it leaves alone until it is released.
unreleased: set[Core] = set()

# The collector may release a core while it is held, or while some core's own lock is: whoever holds
# this one waits for no core.
_lock = threading.RLock()
_inherited: set[Core] = set()  # those of the process that this one was forked from
_gone: list[Counters] = []  # of cores that are not there any more
_MOST_GONE = 256  # then they are added up


class Core:
    """Starts operations on a started engine of its own; outlives its handle while one is in flight.

    `planner` makes the engine's transfers. `below` is the core whose engine this one works through;
    it is closed after this one.
    """

    def __init__(
        self, engine: Engine, planner: Planner = transfers.plan, below: Core | None = None
    ) -> None:
        self.engine = engine
        self.below = below
        self.planner = planner
        self.live = LiveRecords()
        self.reaper = Reaper(engine, self.live)
        self.watchers = Watchers(engine, self.live, self.reaper)
        self.queues = self.watchers.queues
        self._shut = False
        self._releasing = threading.RLock()  # the collector may run `__del__` while it is held
        unreleased.add(self)

    # --- starting -----------------------------------------------------------------------------

    def start(
        self,
        opcode: Opcode,
        memory: Memory,
        file: str | os.PathLike[str] | int | File,
        file_offset: int,
        check: Callable[[], None] | None = None,
        places: RowPlaces | None = None,
    ) -> Record:
        """Start a read or write. If the file cannot be opened, the record fails, not the call.

        `check` runs after success, off the event loop; what it raises is the record's error. With
        `places` it is a gather or scatter.
        """
        planner = self.planner if places is None else transfers.plan_rows
        token, nbytes = next(self.live.tokens), memory.nbytes
        record = Record(token, opcode, memory, "", file_offset, nbytes, check, places)
        try:
            try:
                opened = files.acquire(file, record, opcode is Opcode.WRITE)
                record.opened, record.path = opened, opened.path
                record.plan, transfer = planner(opcode, memory, opened, file_offset)
            except TransferError as failed:
                record.let_go()
                record.path = failed.path
                self.live.count(operations=1, errors=1)
                # Its frames have the record and the memory, which would live until a collection.
                return self.live.end_at_once(record, failed.with_traceback(None))
            self._submit(record, transfer)
        except BaseException:
            if record.opened is None:
                files.give_up(file, None, record)
            self.undo(record)
            raise
        return self._reaped(record)

    def start_batch(self, opcode: Opcode, batch: Batch) -> Record:
        """Start a batch. If a file cannot be opened, the record fails, not the call."""
        record = BatchRecord(next(self.live.tokens), opcode, batch, self.planner)
        try:
            transfers, miscounted = record.go_on()
            self.live.count(**miscounted)
            if transfers is not None:
                self._submit(record, transfers)
        except BaseException:
            self.undo(record)
            raise
        if transfers is not None:
            return self._reaped(record)
        failure = record.failure(0)
        lost = record.let_go()
        return self.live.end_at_once(record, failure or lost)

    def start_sync(self, opcode: Opcode, opened: Descriptors) -> Record:
        """Start an fsync or fdatasync of a file that the caller keeps open meanwhile."""
        record = Record(next(self.live.tokens), opcode, None, opened.path, 0, 0)
        record.opened = opened
        try:
            opened.share(record)
            record.plan, transfer = transfers.plan_sync(opcode, opened)
            self._submit(record, transfer)
        except BaseException:
            self.undo(record)
            raise
        return self._reaped(record)

    def _submit(self, record: Record, transfer: Transfer | list[Transfer]) -> None:
        """Hand it to the engine; after an error its caller is to `undo`."""
        record.home = cq = self.queues.here()
        record.request = request = record.prepare(self.engine, cq, transfer)
        self.live.add(record)
        request.start()

    def _reaped(self, record: Record) -> Record:
        """The record that was started; others that have ended are concluded in passing."""
        cq = self.queues.default
        if not record.token % REAP_EVERY and record.home is cq:
            self.reaper.reap(cq, True)
        return record

    def undo(self, record: Record) -> None:
        """`withdraw`, to its end also where an interrupt comes."""
        try:
            self.withdraw(record)
        except BaseException:  # Ctrl-C once more, before it or within: it may be done again
            self.withdraw(record)
            raise

    def withdraw(self, record: Record) -> None:
        """Undo a start that failed or was interrupted; requests that did begin go on."""
        request = record.request
        if request is not None and request.started():
            request.start()  # whoever is to be woken by that may not have been
            return
        self.live.drop(record)
        record.let_go()
        self.reaper.publish(record, CANCELLED)  # to waiters for all live records

    # --- closing --------------------------------------------------------------------------------

    def close(self) -> None:
        """Refuse, drain, release; `take` still has the failures that nobody has seen."""
        if self.live.forked:
            return
        self.live.refuse()
        self.watchers.wait_for_live(None)
        run_interruptible(self.release, closes=True)
        self.engine.join()

    async def aclose(self) -> None:
        """`close` without blocking the loop."""
        if self.live.forked:
            return
        self.live.refuse()
        await self.watchers.settle_live()
        self.release()
        # Beside the loop, and to its end if the awaiting task is cancelled.
        joining = begun(self.engine.join, "nvmeio-step", closes=True)
        await joining.ended()
        if joining.began:
            joining.result()
        else:  # no thread can be had
            self.engine.join()

    def close_quietly(self) -> None:
        """`close`, of a dropped handle or at the end of the program: nobody is left to be told."""
        self.close()
        for failed in self.live.take()[1]:
            logger.error("an operation of a dropped handle failed: %s", failed)

    def release(self) -> None:
        """Give back the kernel's resources. Nothing may be in flight."""
        # On a loop an interrupt may come after each of these: each may be done again.
        with self._releasing:
            if self._shut:
                return
            self.reaper.close()
            self.engine.stop()
            self.queues.release()
            _forget(self)
            self._shut = True

    @property
    def released(self) -> bool:
        """Whether everything is given back, or belongs to the process this one was forked from."""
        return self._shut or self.live.forked

    def counters(self) -> Counters:
        """The engine's counters, corrected for unseen and repeated operations."""
        return self.live.corrected(self.engine.counters())

    # --- fork and exit --------------------------------------------------------------------------

    def after_fork(self) -> None:
        """In the child, where there are no lanes: only refuse."""
        self.queues.after_fork()
        self.live.after_fork()

    def at_exit(self) -> None:
        if self.live.forked:
            return
        try:
            if self.live:
                warnings.warn(
                    f"the interpreter exits with {counted(len(self.live), 'operation')} in flight, "
                    "which it waits for; close the handle (or use it in a with statement)",
                    ResourceWarning,
                    stacklevel=2,
                )
        finally:  # warnings may be errors
            # Idle ones too: the interpreter freezes daemon threads, with whatever lock they hold.
            self.close_quietly()


def _forget(core: Core) -> None:
    counted = _counted(core)._replace(in_flight=0)
    with _lock:
        if core not in unreleased:
            return
        # An interrupt in between loses one handle's part of the totals, and nothing else.
        unreleased.discard(core)
        _gone.append(counted)
        number = len(_gone)
        if number > _MOST_GONE:
            _gone[:number] = [_added_up(_gone[:number])]


def totals() -> tuple[Counters, int]:
    """The counters of all handles of this process, closed ones too; how many are open."""
    with _lock:
        while True:
            here, gone = list(unreleased), list(_gone)
            if len(here) == len(unreleased):  # else the collector has released one in between
                break
    here = [core for core in here if core not in _inherited]
    return _added_up([*gone, *map(_counted, here)]), sum(core.below is None for core in here)


class Metric(NamedTuple):
    """A number for monitoring: `name` has no prefix, `unit` is "bytes" or ""."""

    name: str
    unit: str
    value: int
    what: str
    grows: bool = True


def metrics() -> list[Metric]:
    """The numbers for monitoring systems; those with `grows` never go back."""
    moved, handles = totals()
    return [
        Metric("read", "bytes", moved.bytes_read, "Bytes read."),
        Metric("written", "bytes", moved.bytes_written, "Bytes written."),
        Metric("direct", "bytes", moved.direct_bytes, "Bytes moved in place, direct."),
        Metric("bounced", "bytes", moved.bounced_bytes, "Bytes moved through bounce memory."),
        Metric("buffered", "bytes", moved.buffered_bytes, "Bytes through the page cache."),
        Metric("operations", "", moved.operations, "Operations that have ended."),
        Metric("errors", "", moved.errors, "Operations that have failed."),
        Metric("cancelled", "", moved.cancelled, "Operations that were cancelled."),
        Metric("rows", "", moved.rows, "Rows gathered and scattered."),
        Metric("row_blocks", "", moved.row_blocks, "Blocks that rows were moved in."),
        Metric("rows_saved", "bytes", moved.row_bytes_saved, "Bytes that near rows shared."),
        Metric("in_flight", "", moved.in_flight, "Operations in flight.", grows=False),
        Metric("handles", "", handles, "Handles that are open.", grows=False),
    ]


def _added_up(counters: Iterable[Counters]) -> Counters:
    return Counters(*map(sum, zip(Counters(), *counters, strict=True)))


def _counted(core: Core) -> Counters:
    """A core's own counters: the host's engine counts the pieces that a ring moves through it."""
    return core.live.corrected(own_counters(core.engine))


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.RLock()  # it may have been copied while held
    _gone.clear()  # the parent's
    _inherited.update(unreleased)
    for core in list(unreleased):
        core.after_fork()


def _at_exit() -> None:
    # Users of another core's engine come first. Warnings may be errors.
    do_all(core.at_exit for core in sorted(unreleased, key=lambda core: core.below is None))


os.register_at_fork(after_in_child=_after_fork_in_child)
shutdown.at_exit_last(_at_exit)


class Cores:
    """A handle's cores: `host` for host memory and syncs, up to two more for device memory.

    `make_device` makes the second from the host's at the first such transfer, `make_rows` the one
    for gathers and scatters of device memory; None if the device's core moves these as well.
    """

    def __init__(
        self,
        host: Core,
        make_device: Callable[[Core], Core],
        make_rows: Callable[[Core], Core] | None = None,
    ) -> None:
        self.host = host
        self._make_device = make_device
        self._make_rows = make_rows
        self._above: dict[str, Core] = {}  # of device memory, and of its rows
        self._lock = threading.Lock()

    @property
    def device(self) -> Core:
        """The core for device memory, made if need be; ClosedError if the handle is closed."""
        return self._above.get("device") or self.make_device()

    def make_device(self) -> Core:
        return run_interruptible(partial(self._made, "device", self._make_device))

    def _made(self, moves: str, make: Callable[[Core], Core]) -> Core:
        with self._lock:
            self.host.live.check_open()
            if moves not in self._above:
                self._above[moves] = make(self.host)
            return self._above[moves]

    @property
    def device_rows(self) -> Core:
        """The core for rows in device memory, made if need be; errors as `device`."""
        if self._make_rows is None:
            return self.device
        make = partial(self._made, "rows", self._make_rows)
        return self._above.get("rows") or run_interruptible(make)

    def _all(self) -> list[Core]:
        return [*self._above.copy().values(), self.host]

    def check_open(self) -> None:
        """Raise `ClosedError` once operations are refused."""
        live = self.host.live
        if live.refusal:
            live.check_open()

    # --- waiting --------------------------------------------------------------------------

    def wait_all(self, timeout: float | None) -> int:
        """See `AioHandle.wait`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for core in self._all():
            core.watchers.wait_for_live(deadline)
        return self._collect()

    async def drain(self) -> int:
        """See `AioHandle.drain`."""
        for core in self._all():
            await core.watchers.settle_live()
        return self._collect()

    def _collect(self) -> int:
        """How many have finished; raises the first error that nobody has seen, with the others."""
        finished: int = 0
        errors: list[BaseException] = []
        for core in self._all():
            more, failed = core.live.take()
            finished += more
            errors += failed
        if errors:
            first: Any = errors[0]
            first.others = tuple(errors[1:])  # torch's errors take attributes as ours do
            raise first
        return finished

    async def writes_to(self, inode: tuple[int, int]) -> None:
        """Await the writes to a file that have been started up to now."""
        loop = running_loop()
        for core in self._all():
            for record in core.live.writes_to(inode):
                await core.watchers.watch(record, loop)

    def wait_for_writes_to(self, inode: tuple[int, int]) -> None:
        """`writes_to`, blocking."""
        for core in self._all():
            for record in core.live.writes_to(inode):
                core.watchers.wait_settled(record, None)

    # --- closing --------------------------------------------------------------------------

    def close(self) -> None:
        """Refuse, drain, release; then raise the first failure that nobody has seen."""
        for core in self._refusing():
            core.close()
        self._collect()

    async def aclose(self) -> None:
        """`close` without blocking the loop."""
        running_loop()  # before anything is refused
        for core in self._refusing():
            await core.aclose()
        self._collect()

    def _refusing(self) -> list[Core]:
        with self._lock:  # no device core is made any more
            for core in self._all():
                core.live.refuse()
        return self._all()

    def abandon(self) -> None:
        """The handle was dropped: finish operations in flight in the background."""
        cores = self._all()
        for core in cores:
            core.live.refuse()
        if not self.in_flight:
            for core in cores:
                core.release()
            return

        def close() -> None:  # nothing of the handle: in a cycle, it would live on
            do_all(core.close_quietly for core in cores)

        start(close, "nvmeio-close", lambda _: close())

    # --- what is going on -------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return bool(self.host.live.refusal)

    @property
    def released(self) -> bool:
        """Whether nothing is left to be given back; an interrupted `close` leaves something."""
        return all(core.released for core in self._all())

    @property
    def in_flight(self) -> int:
        return sum(len(core.live) for core in self._all())

    def counters(self) -> Counters:
        return _added_up(map(_counted, self._all()))


def ring_core(copier: Copier, ring_bytes: int, options: Options, host: Core) -> Core:
    """The core of CUDA tensors that go through host memory."""
    engine = RingEngine(host.engine, copier, ring_bytes)
    engine.start(options)
    return Core(engine, transfers.plan_device, below=host)


def _user_of(storage: int) -> Record | None:
    """The record in flight that uses a storage, given its `_cdata`."""
    users = (core.live.user_of(storage) for core in list(unreleased))
    return next((user for user in users if user is not None), None)


holds.refuse_sharing(_user_of)
