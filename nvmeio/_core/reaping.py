"""The end of operations: noticed, claimed, concluded, and reported to their waiters.

The first thread that notices that the kernel is done claims the record, and only the claimer
concludes it, so every record is settled exactly once.

An interrupt (Ctrl-C) may come between any two steps of the main thread, but in no other. So a
completion stays in its queue until what follows from it is done, and whatever a thread leaves half
done is handed to the *finisher*, a thread of the core's, which begins it again: every step here may
be run twice.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
import warnings
from collections.abc import Callable

from nvmeio._core.completion_queues import CompletionQueues, QueueThread, wake
from nvmeio._core.records import (
    CANCELLED,
    FAILED,
    FINISHED,
    PENDING,
    LiveRecords,
    Record,
    State,
    let_go_plain,
)
from nvmeio._threads.running_loop import running_loop
from nvmeio._threads.threads import log_failure
from nvmeio.engines.base import CompletionQueue, Engine, Request
from nvmeio.errors import counted

_HANDED_ON = -1  # claimed by no thread in particular
_SLICE_S = 0.1  # a blocked thread looks up this often
_running_loop = asyncio._get_running_loop


class Reaper:
    """Settles the records of a core."""

    def __init__(self, engine: Engine, live: LiveRecords) -> None:
        self._engine = engine
        self._live = live
        self._finisher = QueueThread("nvmeio-finish", self._finish_again)

    def reap(self, cq: CompletionQueue, may_block: bool) -> None:
        """Conclude what arrived at a queue; without `may_block`, long work is handed on."""
        tokens, moved = cq.peek_ends()
        if not tokens:
            return
        mine, plain, others = list[Record](), list[Record](), list[Record]()
        here = threading.get_ident()
        try:
            with self._live.lock:
                records = self._live.records
                for token, bytes_moved in zip(tokens, moved, strict=False):
                    record = records.get(token)
                    if record is None or record.claimed:
                        continue
                    mine.append(record)
                    record.claimed = here
                    if bytes_moved == record.nbytes and record.is_plain:
                        plain.append(record)
                    else:
                        others.append(record)
            if plain and not let_go_plain(plain):
                plain, others = [], mine
            self._live.end_all(plain)
            loop = _running_loop()
            for record in plain:
                waiters = record.waiters
                if record.callbacks is not None or record.gates:
                    try:
                        self._tell(record)
                    except Exception as failed:
                        self._settle(record, FAILED, failed)
                    continue
                while waiters:  # as `_tell` does
                    its_loop, waiter = waiters[0]
                    if its_loop is not loop:
                        wake(its_loop, waiter)
                    elif not waiter.done():
                        waiter.set_result(None)
                    del waiters[0]
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
        if self._live.refusal:
            self._live.check_process()
        request = record.request
        if request is not None and request.wait(0.0):
            self.claim(record, request, asyncio._get_running_loop() is None)

    def claim(self, record: Record, ended: Request, may_block: bool) -> None:
        """Conclude a record whose request has ended, unless somebody else does."""
        here = threading.get_ident()
        try:
            with self._live.lock:
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
        """Settle a record for its claimer; idempotent."""
        if record.state is not PENDING:
            self.publish(record, record.state)
            return
        try:
            self._conclude(record, may_block)
        except Exception as failed:  # torch's, say: this operation's error, not the others'
            self._settle(record, FAILED, failed)

    def _finish_again(self, record: Record) -> None:
        """Do the finisher's work on one record."""
        request = record.request
        while record.state is PENDING and request is not None and not request.wait(_SLICE_S):
            continue  # handed on twice by an interrupt, and begun again in between
        try:
            self._finish(record, True)
        except BaseException as failed:  # a done callback's: it is not called a third time
            log_failure(failed, "a done callback of %r failed", record)
            if record.callbacks:
                record.callbacks.pop(0)
            self._finish_again(record)

    def _hand_on(self, record: Record) -> None:
        """Let the finisher go on with a claimed operation, if it is not over."""
        if record.state is not PENDING and not (record.waiters or record.gates or record.callbacks):
            return
        record.claimed = _HANDED_ON
        self._finisher.hand(record)

    def _conclude(self, record: Record, may_block: bool) -> None:
        request = record.request
        assert request is not None
        moved = request.moved()
        if moved == record.nbytes and record.is_plain:  # as most are: nothing below says otherwise
            record.touch()
            self._settle(record, FINISHED, None)
            return
        if record.goes_on(moved):
            if record.claimed != _HANDED_ON:  # an interrupt must not come between the steps
                return self._hand_on(record)
            if self._gone_on(record):
                return
        record.touch()
        if record.dropped(moved):
            self._settle(record, CANCELLED, None)
            return
        failure = record.failure(moved)
        if failure is not None:
            self._settle(record, FAILED, failure)
            return
        if record.has_last_steps(moved):
            if not may_block:
                self._hand_on(record)
                return
            record.last_steps(moved)
        self._settle(record, FINISHED, None)

    def _gone_on(self, record: Record) -> bool:
        """Let the engine do the operation's next step; False if there is none."""
        transfer, miscounted = record.go_on()
        with self._live.lock:
            self._live.count(**miscounted)
            if transfer is None:
                return False
            cq = record.home
            assert cq is not None
            self._live.rename(record)
            record.request = record.prepare(self._engine, cq, transfer)
            record.claimed = 0
            record.request.start()
            if record.stop:
                record.request.cancel()
            while record.gates:  # who waits there may wait for the request itself again
                record.gates.pop().release()
        return True

    def _settle(self, record: Record, state: State, error: BaseException | None) -> None:
        """End an operation; called by its claimer."""
        lost = record.let_go()
        if lost is not None:
            state, error = FAILED, error or lost
        record.error = error
        self.publish(record, state)

    def publish(self, record: Record, state: State) -> None:
        """Set the final state of a record, and wake everybody who waits for it."""
        with self._live.lock:
            self._live.end(record, state)
        self._tell(record)

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

    def close(self) -> None:
        """End the finisher. Nothing may be in flight; may be called again."""
        self._finisher.close()


class Watchers:
    """Knows the waiters of a core's records, and wakes them."""

    def __init__(self, engine: Engine, live: LiveRecords, reaper: Reaper) -> None:
        self._live = live
        self._reaper = reaper
        self.queues = CompletionQueues(engine, reaper.reap, self._adopt)
        self.poll = reaper.poll
        self.retrieved = live.retrieved
        self.speak_for = live.speak_for

    def watch(self, record: Record, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """A future of this (running) loop that is resolved when the operation is settled."""
        if self._live.refusal:
            self._live.check_process()
        waiter = loop.create_future()
        latest, cq = self.queues.latest
        if latest is not loop:
            cq = self.queues.of(loop)
        if record.home is cq:
            record.waiters.append((loop, waiter))
            if record.state is not PENDING:  # it may have been told, or not
                for each in list(record.waiters):
                    wake(*each)
                record.waiters = []  # whoever tells them too has the other list
            return waiter
        with self._live.lock:
            if record.state is not PENDING:
                waiter.set_result(None)
                return waiter
            lonely = not record.waiters and not record.callbacks
            record.waiters.append((loop, waiter))
            if record.home is cq:
                return waiter
            default = self.queues.default
            target = cq if lonely and record.home is default else default
            self._move(record, target)
        if target is default:
            self.queues.dispatch()
        return waiter

    def on_settled(
        self, record: Record, callback: Callable[[], object], anywhere: bool = False
    ) -> bool:
        """Have a pending record call back; False if it is settled already.

        With `anywhere`, no event loop is relied on to notice the end.
        """
        if self._live.refusal:
            self._live.check_process()
        with self._live.lock:
            if record.state is not PENDING:
                return False
            if record.callbacks is None:
                record.callbacks = []
            record.callbacks.append(callback)
            if anywhere and record.home is not self.queues.default:
                self._move(record, self.queues.default)
            nobody_watches = record.home is self.queues.default
        if nobody_watches:
            self.queues.dispatch()
        return True

    def wait_settled(self, record: Record, deadline: float | None) -> bool:
        """Block until an operation is settled, concluding it here if nobody else does."""
        self._reaper.poll(record)
        gate: threading.Lock | None = None
        while record.state is PENDING:
            if self._live.refusal:
                self._live.check_process()
            patience = _SLICE_S
            if deadline is not None:
                patience = min(patience, deadline - time.monotonic())
                if patience <= 0:
                    return False
            request = record.request
            if not record.claimed and request is not None:
                if request.wait(patience):
                    self._reaper.claim(record, request, True)
                continue
            gate = gate or self._gate_of(record)
            if gate.acquire(timeout=patience):
                gate = None
        return True

    def _gate_of(self, record: Record) -> threading.Lock:
        """A lock that can be acquired once an operation is settled; Ctrl-C ends waiting for it."""
        gate = threading.Lock()
        gate.acquire()
        with self._live.lock:
            if record.state is not PENDING:
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
        """Report records of a closed loop's queue at the default queue."""
        with self._live.lock:
            orphans = self._live.at(cq)
            for record in orphans:
                self._move(record, self.queues.default)
        if orphans:
            warnings.warn(
                f"an event loop was closed with {counted(len(orphans), 'operation')} in flight, "
                f"e.g. {orphans[0]!r}; await them (or handle.drain()) before the loop ends",
                ResourceWarning,
                stacklevel=6,
            )
        self._reaper.reap(self.queues.default, False)

    def wait_for_live(self, deadline: float | None) -> None:
        """Block until nothing is in flight, whatever became of it."""
        self._live.check_process()
        while (record := self._live.any()) is not None:
            if not self.wait_settled(record, deadline):
                raise concurrent.futures.TimeoutError(
                    f"{counted(len(self._live), 'operation')} still in flight, e.g. {record!r}"
                )

    async def settle_live(self) -> None:
        """`wait_for_live`, awaited."""
        loop = running_loop()
        while (record := self._live.any()) is not None:
            await self.watch(record, loop)
