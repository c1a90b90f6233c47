"""The life of operations: started, in flight, claimed, settled; and who notices.

A completion is noticed by whoever watches the completion queue at which it arrives
(`_completions`). An record started on a running event loop reports at that loop's queue. One
started with no loop reports at the default queue, where nobody watches: `result`, `done` and `wait`
look at the record itself. Only when somebody asks to be told does it move to a loop's queue (an
await), or does a thread begin to watch the default queue (a callback).

Whoever notices first claims the operation, and only the claimer concludes it, so every operation
is settled exactly once.

An interrupt (Ctrl-C) may come between any two steps of the main thread, but in no other. So a
completion stays in its queue until what follows from it is done, and whatever a thread leaves half
done is handed to the *finisher*, a thread of the core's, which begins it again: every step here may
be run twice.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable

from nvmeio import _transfer, _unreleased, files
from nvmeio._batch import Batch
from nvmeio._batch_record import BatchRecord, Planner
from nvmeio._completions import CompletionQueues
from nvmeio._io.threads import run_interruptible
from nvmeio._loops import Beside, in_a_thread, wake
from nvmeio._record import Record, let_go_plain
from nvmeio._row_places import RowPlaces
from nvmeio._tensor import Memory
from nvmeio.engines import base
from nvmeio.engines.base import CompletionQueue, Counters, Engine, Opcode, Request, Transfer
from nvmeio.errors import ClosedError, TransferError
from nvmeio.files import Descriptors, File

logger = logging.getLogger("nvmeio")

# A blocked thread looks up this often, so that Ctrl-C is served.
_SLICE_S = 0.1
# Without a loop nobody reaps; a submission in so many does it in passing.
REAP_EVERY = 64
_HANDED_ON = -1  # claimed by no thread in particular
_FORKED = "this process was forked from the handle's owner: open a new handle here"
_CLOSED = "the handle is closed: open a new one"


class Core:
    """What an `AioHandle` and its operations share; outlives the handle while one is in flight.

    Args:
        engine: Is started, and this core's alone.
        planner: Makes the transfer that the engine is given.
        below: The core whose engine this one's works through; it has to be closed later.
    """

    def __init__(
        self, engine: Engine, planner: Planner = _transfer.plan, below: Core | None = None
    ) -> None:
        self.engine = engine
        self.below = below
        self.planner = planner
        self._lock = threading.RLock()  # the collector may run `__del__` while it is held
        self._refusal = ""  # why no record is accepted any more
        self._shut = False
        self._releasing = threading.RLock()  # as above
        self._live: dict[int, Record] = {}
        self._failed: dict[int, Record] = {}  # whose error nobody has seen yet
        self._finished = 0
        self._unissued = Counters()  # what the engine's counters lack, or have too much
        self._tokens = itertools.count(1)
        self._completions = CompletionQueues(engine, self.reap, self._adopt)
        self._finisher = Beside("nvmeio-finish", self._finish_again)
        _unreleased.cores.add(self)

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
        planner = self.planner if places is None else _transfer.plan_rows
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
        token, nbytes = next(self._tokens), memory.nbytes
        record = Record(token, opcode, memory, opened.path, file_offset, nbytes, check, places)
        record.opened, record.plan = opened, planned
        return self._submit(record, transfer)

    def start_batch(self, opcode: Opcode, batch: Batch) -> Record:
        """Start reads or writes of many; failures of theirs are the record's, not the call's."""
        record = BatchRecord(next(self._tokens), opcode, batch, self.planner)
        try:
            transfers, miscounted = record.go_on()
        except BaseException:
            record.let_go()
            raise
        self._count(**miscounted)
        if transfers is not None:
            return self._submit(record, transfers)
        failure = record.failure(0)
        lost = record.let_go()
        return self._over_at_once(record, failure or lost)

    def start_sync(self, opcode: Opcode, opened: Descriptors) -> Record:
        """Start an fsync or fdatasync; takes over the caller's use of `opened`."""
        record = Record(next(self._tokens), opcode, None, opened.path, 0, 0)
        record.opened = opened
        record.plan, transfer = _transfer.plan_sync(opcode, opened)
        return self._submit(record, transfer)

    def _submit(self, record: Record, transfer: Transfer | list[Transfer]) -> Record:
        token = record.token
        try:
            record.home = cq = self._completions.here()
            record.request = request = record.prepare(self.engine, cq, transfer)
            with self._lock:
                self.check_open()
                self._live[token] = record
            request.start()
        except BaseException:
            self._withdraw(record)
            raise
        if cq is self._completions.default and not token % REAP_EVERY:
            self.reap(cq, True)
        return record

    def _withdraw(self, record: Record) -> None:
        """The start failed or was interrupted; one that has begun after all goes on."""
        request = record.request
        if request is not None and request.started():
            request.start()  # whoever is to be woken by that may not have been
            return
        with self._lock:
            self._live.pop(record.token, None)
        record.let_go()
        self._publish(record, "cancelled")  # to whoever waits for all that is live

    def _failed_at_once(
        self, opcode: Opcode, memory: Memory, failed: TransferError, file_offset: int
    ) -> Record:
        path, nbytes = failed.path, memory.nbytes
        record = Record(next(self._tokens), opcode, None, path, file_offset, nbytes)
        memory.end()
        self._count(operations=1, errors=1)
        return self._over_at_once(record, failed)

    def _over_at_once(self, record: Record, failure: BaseException | None) -> Record:
        with self._lock:
            record.error, record.state = failure, "finished" if failure is None else "failed"
            self._finished += 1
            if failure is not None:
                self._failed[record.token] = record
        return record

    def _count(self, **more: int) -> None:
        with self._lock:
            sums = {name: getattr(self._unissued, name) + n for name, n in more.items()}
            self._unissued = self._unissued._replace(**sums)

    # --- noticing and concluding --------------------------------------------------------------

    def reap(self, cq: CompletionQueue, may_block: bool) -> None:
        """Conclude what has arrived at a queue; without `may_block`, long work is handed on."""
        tokens, moved = base.peek_ends(cq)
        if not tokens:
            return
        mine, mine_moved = list[Record](), list[int | None]()
        here = threading.get_ident()
        try:
            with self._lock:
                for token, bytes_moved in zip(tokens, moved, strict=False):
                    record = self._live.get(token)
                    if record is not None and not record.claimed:
                        mine.append(record)
                        mine_moved.append(bytes_moved)
                        record.claimed = here
            plain, others = let_go_plain(mine, mine_moved)
            with self._lock:
                for record in plain:
                    self._end(record, "finished" if record.error is None else "failed")
            for record in plain:
                if record.waiters is not None or record.callbacks is not None or record.gates:
                    try:
                        self._tell(record)
                    except Exception as failed:
                        self._settle(record, "failed", failed)
            for record in others:
                if record.claimed == here:  # a callback before it may have waited for it
                    self._finish(record, may_block)
            cq.acknowledge(tokens)
        except BaseException:  # Ctrl-C
            for record in mine:
                self._hand_on(record)
            raise

    def poll(self, record: Record) -> None:
        """Conclude an operation here and now if the kernel is done with it."""
        if self._refusal is _FORKED:
            raise ClosedError(_FORKED)
        request = record.request
        if request is not None and request.wait(0.0):
            self._claim_and_finish(record, request, asyncio._get_running_loop() is None)

    def _claim_and_finish(self, record: Record, ended: Request, may_block: bool) -> None:
        here = threading.get_ident()
        try:
            with self._lock:
                # One's own claim is of what ended together with it, and was to be next: a done
                # callback waits for that. A request that was refused may have another one by now.
                if record.claimed not in (0, here) or record.request is not ended:
                    return
                record.claimed = here
            self._finish(record, may_block)
        except BaseException:  # Ctrl-C
            if record.claimed == here:
                self._hand_on(record)
            raise

    def _finish(self, record: Record, may_block: bool) -> None:
        """For the claimer, once or again."""
        if record.state != "pending":
            self._publish(record, record.state)
            return
        try:
            self._conclude(record, may_block)
        except Exception as failed:  # torch's, say: this operation's error, not the others'
            self._settle(record, "failed", failed)

    def _finish_again(self, record: Record) -> None:
        """The finisher's work."""
        request = record.request
        while record.state == "pending" and request is not None and not request.wait(_SLICE_S):
            continue  # handed on twice by an interrupt, and begun again in between
        try:
            self._finish(record, True)
        except BaseException:  # a done callback's: it is not called a third time
            logger.exception("a done callback of %r failed", record)
            if record.callbacks:
                record.callbacks.pop(0)
            self._finish_again(record)

    def _hand_on(self, record: Record) -> None:
        """Have the finisher go on with a claimed operation; nothing if it is through with."""
        if record.state != "pending" and not (record.waiters or record.gates or record.callbacks):
            return
        record.claimed = _HANDED_ON
        self._finisher.hand(record)

    def _conclude(self, record: Record, may_block: bool) -> None:
        """What follows when the kernel is done with an operation."""
        request = record.request
        assert request is not None
        moved = request.moved()
        if record.goes_on(moved):
            if record.claimed != _HANDED_ON:  # an interrupt must not come between the steps
                return self._hand_on(record)
            if self._gone_on(record):
                return
        record.touch()
        if record.dropped(moved):
            self._settle(record, "cancelled", None)
            return
        failure = record.failure(moved)
        if failure is not None:
            self._settle(record, "failed", failure)
            return
        if record.has_last_steps(moved):
            if not may_block:
                self._hand_on(record)
                return
            record.last_steps(moved)
        self._settle(record, "finished", None)

    def _gone_on(self, record: Record) -> bool:
        """Have the engine do what is next of an operation; False if nothing is."""
        transfer, miscounted = record.go_on()
        with self._lock:
            self._count(**miscounted)
            if transfer is None:
                return False
            # A token of its own: who has the old one still is to take that off the queue only.
            token, cq = next(self._tokens), record.home
            assert cq is not None
            record.token, self._live[token] = token, self._live.pop(record.token)
            record.request = record.prepare(self.engine, cq, transfer)
            record.claimed = 0
            record.request.start()
            if record.stop:
                record.request.cancel()
            while record.gates:  # who waits there may wait for the request itself again
                record.gates.pop().release()
        return True

    # --- for operations -----------------------------------------------------------------------

    def _settle(self, record: Record, state: str, error: BaseException | None) -> None:
        """The end of an operation; for its claimer."""
        lost = record.let_go()
        if lost is not None:
            state, error = "failed", error or lost
        record.error = error
        self._publish(record, state)

    def _publish(self, record: Record, state: str) -> None:
        with self._lock:
            self._end(record, state)
        self._tell(record)

    def _end(self, record: Record, state: str) -> None:
        if state == "failed" and record.state == "pending":
            self._failed[record.token] = record
        record.state = state
        if self._live.pop(record.token, None) is not None:
            self._finished += 1

    def _tell(self, record: Record) -> None:
        # Nobody is added any more. Struck off only once told: told twice is better than never.
        waiters, gates, callbacks = record.waiters, record.gates, record.callbacks
        while waiters:
            wake(*waiters[0])
            waiters.pop(0)
        while gates:
            if gates[0].locked():
                gates[0].release()
            gates.pop(0)
        while callbacks:
            callbacks[0]()
            callbacks.pop(0)

    def retrieved(self, record: Record) -> None:
        """Somebody has seen the operation's error; `wait` need not raise it again."""
        if self._failed:
            self._failed.pop(record.token, None)

    def watch(self, record: Record, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """A future of this (running) loop that is resolved when the operation is settled."""
        if self._refusal is _FORKED:
            raise ClosedError(_FORKED)
        waiter = loop.create_future()
        cq = self._completions.of(loop)
        with self._lock:
            if record.state != "pending":
                waiter.set_result(None)
                return waiter
            lonely = not record.waiters and not record.callbacks
            if record.waiters is None:
                record.waiters = [(loop, waiter)]
            else:
                record.waiters.append((loop, waiter))
            if record.home is cq:
                return waiter
            default = self._completions.default
            target = cq if lonely and record.home is default else default
            self._move(record, target)
        if target is default:
            self._completions.dispatch()
        return waiter

    def on_settled(
        self,
        record: Record,
        callback: Callable[[], object],
        anywhere: bool = False,
    ) -> bool:
        """Have a pending record call back; False if it is settled already.

        With `anywhere`, no event loop is relied on to notice the end.
        """
        if self._refusal is _FORKED:
            raise ClosedError(_FORKED)
        with self._lock:
            if record.state != "pending":
                return False
            if record.callbacks is None:
                record.callbacks = []
            record.callbacks.append(callback)
            if anywhere and record.home is not self._completions.default:
                self._move(record, self._completions.default)
            nobody_watches = record.home is self._completions.default
        if nobody_watches:
            self._completions.dispatch()
        return True

    def wait_settled(self, record: Record, deadline: float | None) -> bool:
        """Block until an operation is settled, concluding it here if nobody else does."""
        self.poll(record)
        gate: threading.Lock | None = None
        while record.state == "pending":
            if self._refusal is _FORKED:
                raise ClosedError(_FORKED)
            patience = _SLICE_S
            if deadline is not None:
                patience = min(patience, deadline - time.monotonic())
                if patience <= 0:
                    return False
            request = record.request
            if not record.claimed and request is not None:
                if request.wait(patience):
                    self._claim_and_finish(record, request, True)
                continue
            gate = gate or self._gate_of(record)
            if gate.acquire(timeout=patience):
                gate = None
        return True

    def _gate_of(self, record: Record) -> threading.Lock:
        """A lock that can be acquired once an operation is settled; Ctrl-C ends waiting for it."""
        gate = threading.Lock()
        gate.acquire()
        with self._lock:
            if record.state != "pending":
                gate.release()
            elif record.gates is None:
                record.gates = [gate]
            else:
                record.gates.append(gate)
        return gate

    def _move(self, record: Record, cq: CompletionQueue) -> None:
        """With the lock held: report an unsettled operation at this completion queue."""
        record.home = cq
        if record.request is not None:
            record.request.move(cq)

    def _adopt(self, cq: CompletionQueue) -> None:
        """A loop was closed with its queue: what was to report there reports at the default."""
        with self._lock:
            orphans = [o for o in self._live.values() if o.home is cq]
            for record in orphans:
                self._move(record, self._completions.default)
        if orphans:
            warnings.warn(
                f"an event loop was closed with {len(orphans)} operations in flight, e.g. "
                f"{orphans[0]!r}; await them (or handle.drain()) before the loop ends",
                ResourceWarning,
                stacklevel=6,
            )
        self.reap(self._completions.default, False)

    # --- waiting for all ------------------------------------------------------------------------

    def wait_for_live(self, deadline: float | None) -> None:
        """Block until nothing is in flight, whatever became of it."""
        if self._refusal is _FORKED:
            raise ClosedError(_FORKED)
        while (record := self._any_live()) is not None:
            if not self.wait_settled(record, deadline):
                raise concurrent.futures.TimeoutError(
                    f"{len(self._live)} operations are still in flight, e.g. {record!r}"
                )

    def live_writes(self, inode: tuple[int, int]) -> list[Record]:
        """The writes to a file that have been started up to now, and are not over."""
        with self._lock:
            return [record for record in self._live.values() if record.writes_to(inode)]

    async def settle_live(self) -> None:
        """`wait_for_live`, awaited."""
        loop = asyncio.get_running_loop()
        while (record := self._any_live()) is not None:
            await self.watch(record, loop)

    def _any_live(self) -> Record | None:
        with self._lock:
            while self._live:
                record = next(iter(self._live.values()))
                if record.state == "pending":
                    return record
                self._live.pop(record.token)  # interrupted half way through `settled`
        return None

    def take(self) -> tuple[int, list[BaseException]]:
        """How many have finished since the last call, and the errors that nobody has seen."""
        if self._refusal is _FORKED:
            return 0, []
        with self._lock:
            finished, self._finished = self._finished, 0
            failed, self._failed = self._failed, {}
        return finished, [o.error for o in failed.values() if o.error is not None]

    # --- closing --------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise `ClosedError` once operations are refused."""
        if self._refusal:
            raise ClosedError(self._refusal)

    def refuse(self, reason: str = _CLOSED) -> None:
        """Accept no record from now on."""
        with self._lock:
            self._refusal = self._refusal or reason

    def close(self) -> None:
        """Refuse, drain, release; failures that nobody has seen are left to `take`."""
        if self._refusal is _FORKED:
            return
        self.refuse()
        self.wait_for_live(None)
        run_interruptible(self.release)
        self.engine.join()

    async def aclose(self) -> None:
        """`close` without blocking the loop."""
        if self._refusal is _FORKED:
            return
        self.refuse()
        await self.settle_live()
        self.release()
        await in_a_thread(self.engine.join)

    def close_quietly(self) -> None:
        """`close`, where nobody is left to be told; for Cores and the end of the program."""
        self.close()
        for failed in self.take()[1]:
            logger.error("an record of a dropped handle failed: %s", failed)

    def release(self) -> None:
        """Give back what the kernel gave; nothing is in flight."""
        # On a loop an interrupt may come after each of these: each may be done again.
        with self._releasing:
            if self._shut:
                return
            self._finisher.close()
            self.engine.stop()
            self._completions.release()
            _unreleased.let_go(self)
            self._shut = True

    @property
    def released(self) -> bool:
        """Whether all is given back, or another process's."""
        return self._shut or self._refusal is _FORKED

    @property
    def closed(self) -> bool:
        return bool(self._refusal)

    @property
    def in_flight(self) -> int:
        return len(self._live)

    def counters(self) -> Counters:
        """The engine's counters, corrected for what it never saw and what was done twice."""
        with self._lock:
            pairs = zip(self.engine.counters(), self._unissued, strict=True)
            return Counters(*(sum(pair) for pair in pairs))._replace(in_flight=len(self._live))

    # --- fork and exit --------------------------------------------------------------------------

    def after_fork(self) -> None:
        # Locks may have been copied while held, lanes do not exist here: only refuse.
        self._lock = threading.RLock()  # the collector may run `__del__` while it is held
        self._completions.after_fork()
        self._refusal = _FORKED

    def at_exit(self) -> None:
        if self._refusal is _FORKED:
            return
        try:
            if self._live:
                warnings.warn(
                    f"the interpreter exits with {len(self._live)} operations in flight, waiting "
                    "for them; close the handle (or use it in a with statement)",
                    ResourceWarning,
                    stacklevel=2,
                )
        finally:  # warnings may be errors
            # Idle ones too: the interpreter freezes daemon threads, with whatever lock they hold.
            self.close_quietly()
