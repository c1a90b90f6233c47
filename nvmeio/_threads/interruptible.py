"""Blocking work in a thread of its own: waited for, or awaited.

Work that must not be cut in half runs in another thread than the main one, where no interrupt
comes.
"""

from __future__ import annotations

import _thread
import sys
from collections.abc import Callable
from typing import TypeVar

from nvmeio._memory import devices
from nvmeio._threads.closing import do_all
from nvmeio._threads.future import Future, being_interrupted, may_be_interrupted
from nvmeio._threads.threads import start, unlist

Value = TypeVar("Value")


class Cancelled(Exception):
    """The work was cancelled; the canceller knows."""


class Cancellation:
    """Cancels some work from another thread, and tells its parts."""

    def __init__(self) -> None:
        self.cancelled = False
        self._told: list[Callable[[], object]] = []

    def cancel(self) -> None:
        """Cancel it: `check` raises from now on, and all waiters are woken. From any thread."""
        self.cancelled = True
        do_all(list(self._told))

    def then(self, tell: Callable[[], object]) -> None:
        """Call this when it is cancelled; at once if it was."""
        self._told.append(tell)
        if self.cancelled:
            tell()

    def check(self) -> None:
        if self.cancelled:
            raise Cancelled


class Job(Future[Value]):
    """Work that a thread of its own does, on the device and stream that are current here.

    `name` is the thread's, "" as for `threads.start`. With `closes` the work gives something back,
    and does it on no device: one that failed refuses its stream to new threads. `began` says
    whether a thread took it up.
    """

    __slots__ = ("_claim", "_name", "_work", "began")

    def __init__(
        self,
        work: Callable[[], Value],
        name: str = "nvmeio-work",
        cancel: Callable[[], object] | None = None,
        closes: bool = False,
    ) -> None:
        super().__init__(cancel)
        self._work: Callable[[], Value] | None = work if closes else devices.as_here(work)
        self._name = name
        self.began = False
        self._claim = _thread.allocate_lock()  # taken by the thread that decides whether it runs

    def start(self) -> None:
        """Begin it; a second time, it does nothing."""
        start(self._run, self._name, self._refused)

    def withdraw(self) -> bool:
        """Keep it from beginning; False if it has begun or ended, or was withdrawn before."""
        return self._claim.acquire(False)

    def _run(self) -> None:
        if not self._claim.acquire(False):
            return
        self.began = True
        work, self._work = self._work, None
        assert work is not None
        try:
            self._value = work()
        except BaseException as failed:
            self.error = failed
        del work
        if self._name:
            unlist()
        self._end()

    def _refused(self, error: BaseException) -> None:
        if self._claim.acquire(False):
            self._work = None  # and with it what it would have worked on
            self.fail(error)


def begun(
    work: Callable[[], Value],
    name: str,
    cancel: Callable[[], object] | None = None,
    closes: bool = False,
) -> Job[Value]:
    job = Job(work, name, cancel, closes)
    job.start()
    return job


def run_interruptible(
    work: Callable[[], Value], cancel: Callable[[], object] | None = None, closes: bool = False
) -> Value:
    """Do blocking work so that Ctrl-C can neither cut it in half nor be kept waiting.

    In the main thread, and if an event loop runs here (a transfer that is started on a running loop
    reports there, and would wait forever for a loop that waits for it), the work is done in a
    thread of its own; elsewhere in place, for no interrupt comes there. In place, too, if the
    program is at its end: new threads are refused, and those that there are never run again.

    The first interrupt calls `cancel` and is raised when the work has ended: half of it must not go
    on behind its caller's back. A second one is raised at once; the work still ends by itself.
    `closes` is as for `Job`.
    """
    if sys.is_finalizing() or not may_be_interrupted():
        return work()
    job = Job(work, closes=closes)
    second = being_interrupted()
    try:
        job.start()
        job.wait()
    except BaseException as interrupt:
        if not job.withdraw():
            if cancel is not None:
                cancel()
            if not second:
                job.wait()
        elif _no_more_threads(interrupt):
            return work()
        raise interrupt from job.error
    return work() if not job.began and _no_more_threads(job.error) else job.result()


def _no_more_threads(error: BaseException | None) -> bool:
    """Whether the program is at its end, and Python (from 3.12 on) refuses to start threads."""
    return isinstance(error, RuntimeError) and "interpreter shutdown" in str(error)


async def in_thread(work: Callable[[], Value], cancel: Callable[[], object] | None = None) -> Value:
    """Do blocking work in a thread of its own and await its value, as a `Future`.

    A loop's default pool may be full of what waits for this. When the awaiting task is cancelled
    again, its end is awaited still: under `asyncio.run` the first Ctrl-C cancels, the second ends
    the run, which cancels again and waits for its tasks, and the third ends that waiting.
    """
    job = Job(work, cancel=cancel)
    try:
        job.start()
        return await job
    except BaseException:  # the coroutine is closed, or interrupted: nobody can wait any more
        if not (job.withdraw() or job.done) and cancel is not None:
            cancel()
        raise
