"""Completion queues: the arrival of completions, their watchers, and the wake-up of event loops.

- The *default* completion queue takes the operations that were started with no event loop running.
  Nobody watches it until somebody asks to be told; then a dispatcher thread does.
- Every event loop that has used the handle has a queue of its own, whose eventfd it watches with
  `add_reader`.
"""

from __future__ import annotations

import asyncio
import logging
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from nvmeio._threads.interruptible import run_interruptible
from nvmeio._threads.running_loop import resolve
from nvmeio._threads.threads import Thread, start
from nvmeio.engines.base import CompletionQueue, Engine

logger = logging.getLogger("nvmeio")


class CompletionQueues:
    """The completion queues of one handle.

    `reap(cq, may_block)` concludes what has arrived at a queue. `orphaned` is called with the queue
    of a closed loop before that is closed.
    """

    def __init__(
        self,
        engine: Engine,
        reap: Callable[[CompletionQueue, bool], None],
        orphaned: Callable[[CompletionQueue], None],
    ) -> None:
        self._engine = engine
        self._reap = reap
        self._orphaned = orphaned
        self._lock = threading.RLock()  # the collector may drop the handle while it is held
        self._loops: dict[asyncio.AbstractEventLoop, _LoopQueue] = {}
        self.latest: tuple[asyncio.AbstractEventLoop | None, CompletionQueue]
        self._dispatcher: threading.Thread | None = None
        self._released = False
        self.default = engine.open_completion_queue()
        self.latest = (None, self.default)

    def here(self) -> CompletionQueue:
        """The completion queue for an operation that is started now, in this thread."""
        loop = asyncio._get_running_loop()
        latest, cq = self.latest
        if latest is loop:
            return cq
        if loop is not None:
            return self.of(loop)
        if latest is not None and latest.is_closed():
            self.forget_closed_loops()
        return self.default

    def of(self, loop: asyncio.AbstractEventLoop) -> CompletionQueue:
        """The completion queue that a loop watches; called in the loop's own thread.

        After `release` it is the default one, at which nothing arrives any more.
        """
        if loop not in self._loops:
            self.forget_closed_loops()
        with self._lock:
            # By another thread: a queue that is opened now nobody would close.
            if self._released:
                return self.default
            known = self._loops.get(loop)
            if known is None:
                # By a thread: an interrupt between its making and its keeping would leave it open.
                cq = run_interruptible(self._engine.open_completion_queue)
                known = self._loops[loop] = _LoopQueue(cq, loop, self._reap)
            known.attach()
            self.latest = (loop, known.cq)
        return known.cq

    def forget_closed_loops(self) -> None:
        """Close the queues of closed loops; the default one takes their remaining records."""
        for loop in [loop for loop in list(self._loops) if loop.is_closed()]:
            with self._lock:
                gone = self._loops.pop(loop, None)
                if self.latest[0] is loop:
                    self.latest = (None, self.default)
            if gone is not None:
                try:
                    self._orphaned(gone.cq)
                finally:
                    gone.cq.close()

    def dispatch(self) -> None:
        """Let a thread watch the default completion queue from now on."""
        with self._lock:
            if self._dispatcher is not None or self._released:
                return
            # By a thread: an interrupt between its start and its keeping would leave it waiting.
            run_interruptible(self._begin_dispatching)

    def _begin_dispatching(self) -> None:
        dispatcher = Thread(self._watch_default, "nvmeio-dispatch")
        dispatcher.start()
        self._dispatcher = dispatcher

    def _watch_default(self) -> None:
        poller = select.poll()
        poller.register(self.default.fileno(), select.POLLIN)
        while not self._released:
            poller.poll()
            self._reap(self.default, True)

    def release(self) -> None:
        """Stop watching, everywhere, and close the completion queues; nothing may be in flight."""
        # An interrupt may come after each of these: each may be done again.
        with self._lock:
            self._released = True
            self.latest = (None, self.default)
        for loop, cq in list(self._loops.items()):
            cq.detach_from_anywhere()
            self._loops.pop(loop, None)
        dispatcher = self._dispatcher
        if dispatcher is not None and dispatcher is not threading.current_thread():
            self.default.wake()
            dispatcher.join()
        self.default.close()
        self._reap = self._orphaned = _nothing  # no cycle: what the kernel gave goes at once

    def after_fork(self) -> None:
        """In the child: locks may have been copied while held, and there is no dispatcher."""
        self._lock = threading.RLock()
        self._released = True


def _nothing(*_: object) -> None:
    pass


@dataclass(eq=False)
class _LoopQueue:
    """A completion queue and the loop that watches it."""

    cq: CompletionQueue
    loop: asyncio.AbstractEventLoop
    reap: Callable[[CompletionQueue, bool], None]
    attached: bool = False
    closed: bool = False

    def attach(self) -> None:
        """Watch from now on; once is enough."""
        if not self.attached:
            self.loop.add_reader(self.cq.fileno(), self.reap, self.cq, False)
            self.attached = True

    def detach_from_anywhere(self) -> None:
        """Stop watching; a running loop does that in its own thread, selectors are not safe."""
        if self.loop.is_running() and asyncio._get_running_loop() is not self.loop:
            with suppress(RuntimeError):  # closed in this moment
                self.loop.call_soon_threadsafe(self._detach)
                return
        self._detach()

    def _detach(self) -> None:
        if not self.closed:
            if not self.loop.is_closed():
                self.loop.remove_reader(self.cq.fileno())
            self.cq.close()
            self.closed = True


def wake(loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[None]) -> None:
    """Resolve a future of this loop; nobody is left to be woken if the loop is closed."""
    if not resolve(loop, waiter):
        logger.debug("an event loop was closed while it awaited an operation")


class QueueThread:
    """A thread, begun with the first item, that calls `work` with each; `work` must not raise."""

    def __init__(self, name: str, work: Callable[[Any], None]) -> None:
        self._name = name
        self._work = work
        self._handed: SimpleQueue[Any] = SimpleQueue()
        self._lock = threading.RLock()
        self._begun = False

    def hand(self, item: object) -> None:
        """Hand something to the thread; no interrupt comes in between."""
        self._handed.put(item)
        with self._lock:
            if self._begun:
                return
            try:
                self._begun = True  # before it may be undone, where no thread can be had
                start(self._run, self._name, self._work_off)
            except BaseException:  # an interrupt: one is begun too many, and ends too
                self._begun = False
                raise

    def close(self) -> None:
        """End once all is done; may be called again."""
        self._handed.put(None)
        if not self._begun:
            self._work = _nothing

    def _work_off(self, _: BaseException) -> None:
        """Work off what there is here, because no thread can be had."""
        self._begun = False
        while not self._handed.empty():
            if (item := self._handed.get()) is not None:
                self._work(item)

    def _run(self) -> None:
        while (item := self._handed.get()) is not None:
            self._work(item)
            del item  # waiting for the next one, it would keep this one's memory alive
        self._handed.put(None)  # for another of this kind, made by a call that was interrupted
        self._work = _nothing  # no cycle with whoever made this
