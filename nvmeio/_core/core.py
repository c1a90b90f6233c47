"""What an `AioHandle` and its operations share: an engine, and the life of what it moves.

A record is *started* here; it is in flight in `LiveRecords`; its end is noticed and concluded by
the `Settler`, and told to the `Watchers`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import warnings
from collections.abc import Callable

from nvmeio import files
from nvmeio._core import transfers as transfers_module
from nvmeio._core import unreleased
from nvmeio._core.batch_record import BatchRecord, Planner
from nvmeio._core.batches import Batch
from nvmeio._core.live_records import LiveRecords
from nvmeio._core.loops import in_a_thread
from nvmeio._core.record import Record
from nvmeio._core.row_places import RowPlaces
from nvmeio._core.settling import Settler
from nvmeio._core.watching import Watchers
from nvmeio._files.descriptors import Descriptors
from nvmeio._memory.tensors import Memory
from nvmeio._threads.jobs import run_interruptible
from nvmeio.engines.base import Counters, Engine, Opcode, Transfer
from nvmeio.errors import TransferError
from nvmeio.files import File

logger = logging.getLogger("nvmeio")

# Without a loop nobody reaps; a submission in so many does it in passing.
REAP_EVERY = 64


class Core:
    """Starts operations on an engine; outlives its handle while one of them is in flight.

    Args:
        engine: Is started, and this core's alone.
        planner: Makes the transfer that the engine is given.
        below: The core whose engine this one's works through; it has to be closed later.

    Attributes:
        live: What is in flight.
        settler: Ends it.
        watchers: Who is told.
        queues: Where completions arrive.
    """

    def __init__(
        self, engine: Engine, planner: Planner = transfers_module.plan, below: Core | None = None
    ) -> None:
        self.engine = engine
        self.below = below
        self.planner = planner
        self.live = LiveRecords()
        self.settler = Settler(engine, self.live)
        self.watchers = Watchers(engine, self.live, self.settler)
        self.queues = self.watchers.queues
        self._shut = False
        self._releasing = threading.RLock()  # the collector may run `__del__` while it is held
        unreleased.cores.add(self)

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
        """Start a read or write; failures of the open are the record's, not the call's.

        `check` runs after success, off the event loop; what it raises is the record's error. With
        `places` it is a gather or scatter.
        """
        opened: Descriptors | None = None
        planner = self.planner if places is None else transfers_module.plan_rows
        try:
            opened = files.acquire(file, opcode is Opcode.WRITE)
            planned, transfer = planner(opcode, memory, opened, file_offset)
        except BaseException as failed:
            if opened is not None:
                with contextlib.suppress(OSError):  # nothing was written through it
                    opened.release()
            if places is not None:
                places.end()
            if isinstance(failed, TransferError):
                return self._failed_at_once(opcode, memory, failed, file_offset)
            memory.end()
            raise
        token, nbytes = next(self.live.tokens), memory.nbytes
        record = Record(token, opcode, memory, opened.path, file_offset, nbytes, check, places)
        record.opened, record.plan = opened, planned
        return self._submit(record, transfer)

    def start_batch(self, opcode: Opcode, batch: Batch) -> Record:
        """Start reads or writes of many; failures of theirs are the record's, not the call's."""
        record = BatchRecord(next(self.live.tokens), opcode, batch, self.planner)
        try:
            transfers, miscounted = record.go_on()
        except BaseException:
            record.let_go()
            raise
        self.live.count(**miscounted)
        if transfers is not None:
            return self._submit(record, transfers)
        failure = record.failure(0)
        lost = record.let_go()
        return self.live.end_at_once(record, failure or lost)

    def start_sync(self, opcode: Opcode, opened: Descriptors) -> Record:
        """Start an fsync or fdatasync; takes over the caller's use of `opened`."""
        record = Record(next(self.live.tokens), opcode, None, opened.path, 0, 0)
        record.opened = opened
        record.plan, transfer = transfers_module.plan_sync(opcode, opened)
        return self._submit(record, transfer)

    def _submit(self, record: Record, transfer: Transfer | list[Transfer]) -> Record:
        token = record.token
        try:
            record.home = cq = self.queues.here()
            record.request = request = record.prepare(self.engine, cq, transfer)
            self.live.add(record)
            request.start()
        except BaseException:
            try:
                self.withdraw(record)
            except BaseException:  # Ctrl-C once more, before it or within: it may be done again
                self.withdraw(record)
                raise
            raise
        if cq is self.queues.default and not token % REAP_EVERY:
            self.settler.reap(cq, True)
        return record

    def withdraw(self, record: Record) -> None:
        """The start failed or was interrupted; one that has begun after all goes on."""
        request = record.request
        if request is not None and request.started():
            request.start()  # whoever is to be woken by that may not have been
            return
        self.live.drop(record)
        record.let_go()
        self.settler.publish(record, "cancelled")  # to whoever waits for all that is live

    def _failed_at_once(
        self, opcode: Opcode, memory: Memory, failed: TransferError, file_offset: int
    ) -> Record:
        path, nbytes = failed.path, memory.nbytes
        record = Record(next(self.live.tokens), opcode, None, path, file_offset, nbytes)
        memory.end()
        self.live.count(operations=1, errors=1)
        return self.live.end_at_once(record, failed)

    # --- closing --------------------------------------------------------------------------------

    def close(self) -> None:
        """Refuse, drain, release; failures that nobody has seen are left to `take`."""
        if self.live.forked:
            return
        self.live.refuse()
        self.watchers.wait_for_live(None)
        run_interruptible(self.release)
        self.engine.join()

    async def aclose(self) -> None:
        """`close` without blocking the loop."""
        if self.live.forked:
            return
        self.live.refuse()
        await self.watchers.settle_live()
        self.release()
        await in_a_thread(self.engine.join)

    def close_quietly(self) -> None:
        """`close`, of a dropped handle or at the end of the program: nobody is left to be told."""
        self.close()
        for failed in self.live.take()[1]:
            logger.error("an operation of a dropped handle failed: %s", failed)

    def release(self) -> None:
        """Give back what the kernel gave; nothing is in flight."""
        # On a loop an interrupt may come after each of these: each may be done again.
        with self._releasing:
            if self._shut:
                return
            self.settler.close()
            self.engine.stop()
            self.queues.release()
            unreleased.let_go(self)
            self._shut = True

    @property
    def released(self) -> bool:
        """Whether all is given back, or another process's."""
        return self._shut or self.live.forked

    def counters(self) -> Counters:
        """The engine's counters, corrected for what it never saw and what was done twice."""
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
                    f"the interpreter exits with {len(self.live)} operations in flight, waiting "
                    "for them; close the handle (or use it in a with statement)",
                    ResourceWarning,
                    stacklevel=2,
                )
        finally:  # warnings may be errors
            # Idle ones too: the interpreter freezes daemon threads, with whatever lock they hold.
            self.close_quietly()
