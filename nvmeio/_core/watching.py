"""Who is told of the end of operations: tasks that await them, callbacks, blocked threads.

A completion is noticed by whoever watches the completion queue at which it arrives
(`_core.completions`). A record started on a running event loop reports at that loop's queue. One
started with no loop reports at the default queue, where nobody watches: `result`, `done` and `wait`
look at the record itself. Only when somebody asks to be told does it move to a loop's queue (an
await), or does a thread begin to watch the default queue (a callback).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
import warnings
from collections.abc import Callable

from nvmeio._core.completions import CompletionQueues
from nvmeio._core.live_records import LiveRecords
from nvmeio._core.loops import wake
from nvmeio._core.record import Record
from nvmeio._core.settling import Settler
from nvmeio._threads.running_loop import running_loop
from nvmeio.engines.base import CompletionQueue, Engine

_SLICE_S = 0.1  # a blocked thread looks up this often, so that Ctrl-C is served


class Watchers:
    """Those who wait for records of a core.

    Args:
        engine: Makes the completion queues.
        live: Has the records that are in flight.
        settler: Settles them.

    Attributes:
        queues: Where completions arrive.
        poll: See `Settler.poll`.
        retrieved: See `LiveRecords.retrieved`.
    """

    def __init__(self, engine: Engine, live: LiveRecords, settler: Settler) -> None:
        self._live = live
        self._settler = settler
        self.queues = CompletionQueues(engine, settler.reap, self._adopt)
        self.poll = settler.poll
        self.retrieved = live.retrieved

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
            if record.state != "pending":  # it may have been told, or not
                for each in list(record.waiters):
                    wake(*each)
                record.waiters = []  # whoever tells them too has the other list
            return waiter
        with self._live.lock:
            if record.state != "pending":
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
        self,
        record: Record,
        callback: Callable[[], object],
        anywhere: bool = False,
    ) -> bool:
        """Have a pending record call back; False if it is settled already.

        With `anywhere`, no event loop is relied on to notice the end.
        """
        if self._live.refusal:
            self._live.check_process()
        with self._live.lock:
            if record.state != "pending":
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
        self._settler.poll(record)
        gate: threading.Lock | None = None
        while record.state == "pending":
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
                    self._settler.claim(record, request, True)
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
        with self._live.lock:
            orphans = self._live.at(cq)
            for record in orphans:
                self._move(record, self.queues.default)
        if orphans:
            warnings.warn(
                f"an event loop was closed with {len(orphans)} operations in flight, e.g. "
                f"{orphans[0]!r}; await them (or handle.drain()) before the loop ends",
                ResourceWarning,
                stacklevel=6,
            )
        self._settler.reap(self.queues.default, False)

    def wait_for_live(self, deadline: float | None) -> None:
        """Block until nothing is in flight, whatever became of it."""
        self._live.check_process()
        while (record := self._live.any()) is not None:
            if not self.wait_settled(record, deadline):
                raise concurrent.futures.TimeoutError(
                    f"{len(self._live)} operations are still in flight, e.g. {record!r}"
                )

    async def settle_live(self) -> None:
        """`wait_for_live`, awaited."""
        loop = running_loop()
        while (record := self._live.any()) is not None:
            await self.watch(record, loop)
