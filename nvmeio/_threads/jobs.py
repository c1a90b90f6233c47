"""Blocking work in a thread of its own: waited for, or awaited.

`KeyboardInterrupt` is raised in the main thread only, there between any two bytecodes, also within
``finally`` and within the `threading` module's own classes, whose locks it can leave held. So here

- work that must not be cut in half runs in another thread, and the main thread waits for it on a
  raw lock, whose `acquire` is one C call that a signal ends (and that looks up now and then, for a
  signal that comes just before the call begins to sleep does not end it);
- other threads are started by a thread, for an interrupted `Thread.start` leaves a thread that
  waits for ever;
- whether a job began is decided by a lock that both sides try to take, never by how far its
  starter got.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from nvmeio._memory import devices
from nvmeio._threads.running_loop import running_loop

Value = TypeVar("Value")

SLICE_S = 0.25  # a waiting thread looks up this often
_BIRTH_LOOK_S = 0.05  # who waits for a new thread looks this often whether it is still coming
_BIRTH_S = 60.0  # a thread that has not begun by then counts as failed, and does nothing if it does


class Thread(threading.Thread):
    """A thread that has begun when `start` returns, or never does anything.

    One that gets no memory for its first step (RLIMIT_AS, a container's limit) ends without a word,
    and `threading.Thread.start` would wait for its sign of life for ever. And an interrupt within
    that `start` leaves a thread that nobody knows of.

    Args:
        run: What it does.
        name: Of the thread.
        args: For `run`.
        daemon: Whether the end of the program does not wait for it.
    """

    def __init__(
        self,
        run: Callable[..., object],
        name: str,
        args: tuple[object, ...] = (),
        daemon: bool = True,
    ) -> None:
        super().__init__(target=run, name=name, args=args, daemon=daemon)
        self._started: _SignOfLife = _SignOfLife()
        self._claim = _thread.allocate_lock()  # taken by who decides whether it runs

    @property
    def _bootstrap(self) -> Callable[[], None]:
        """What `threading` hands to the new thread, which alone keeps it."""
        birth = functools.partial(super()._bootstrap)  # type: ignore[misc]
        self._started.birth = weakref.ref(birth)
        return birth

    def start(self) -> None:
        """Begin it; in the main thread by another one, which no interrupt cuts short.

        Raises:
            RuntimeError: The process may have no more threads.
            MemoryError: There is no memory for it.
        """
        if threading.main_thread().ident == threading.get_ident():
            run_interruptible(self._start)
        else:
            self._start()

    def _start(self) -> None:
        try:
            super().start()
        except BaseException:
            if self._claim.acquire(False):
                # `threading.enumerate` would list it for ever.
                vars(threading).get("_limbo", {}).pop(self, None)
                raise
            # It has begun: it was only the waiting for it that failed.

    def run(self) -> None:
        """What the thread does, unless it was given up before it began."""
        if self._claim.acquire(False):
            super().run()

    def _delete(self) -> None:
        """Leave the list of threads, at the end, or before it by `unlist`; called by the thread."""
        with contextlib.suppress(KeyError):
            super()._delete()  # type: ignore[misc]


def unlist() -> None:
    """Take the calling thread out of `threading.enumerate()`, if it is one of ours.

    For one that is about to say that all is done: whoever is told of that, and counts the threads
    that there are, is to find none that has a moment to live.
    """
    # Not `current_thread`, which lists a thread that is none of `threading`'s.
    thread = vars(threading).get("_active", {}).get(_thread.get_ident())
    if isinstance(thread, Thread):
        thread._delete()


class _SignOfLife(threading.Event):
    birth: weakref.ref[Any] | None = None  # dies with the thread, whether or not it ever began

    def wait(self, timeout: float | None = None) -> bool:
        _await_birth(super().wait, self.birth, _BIRTH_S if timeout is None else timeout)
        return True


def _await_birth(
    seen: Callable[[float], bool], birth: weakref.ref[Any] | None, timeout_s: float
) -> None:
    """Wait until `seen`, which takes how long it may look, has seen the sign of life."""
    until = time.monotonic() + timeout_s
    while not seen(_BIRTH_LOOK_S):
        dead = birth is not None and birth() is None
        if dead or time.monotonic() >= until:
            if seen(0):
                return
            raise MemoryError("a new thread did not begin: is there memory left for it?")


def start(run: Callable[[], object], name: str, failed: Callable[[BaseException], object]) -> None:
    """Have a daemon thread run `run`; one C call as far as an interrupt is concerned.

    Args:
        run: Must not raise.
        name: Of the thread; "" for one that is not in `threading.enumerate()`: it may call nothing
            that asks which thread it is in, such as `logging`.
        failed: Called in its place where no thread can be had, with the reason.

    Raises:
        RuntimeError, MemoryError: Not even the thread that starts the others can be had.
    """
    queue = _launches
    if queue is None:
        queue = _new_launcher()
    queue.put((run, name, failed))


_launches: SimpleQueue[Any] | None = None


def _new_launcher() -> SimpleQueue[Any]:
    """Two callers may come here at once: either launcher will do, and one is forgotten."""
    global _launches
    queue: SimpleQueue[Any] = SimpleQueue()
    silent = _thread.allocate_lock()  # until it lives; this may be the main thread
    silent.acquire()
    launch = functools.partial(_launch, queue, silent)
    birth = weakref.ref(launch)
    _thread.start_new_thread(launch, ())
    del launch
    try:
        _await_birth(lambda seconds: silent.acquire(timeout=seconds), birth, _BIRTH_S)
    except BaseException:
        queue.put(None)
        raise
    _launches = queue
    return queue


def _launch(queue: SimpleQueue[Any], silent: _thread.LockType) -> None:
    silent.release()
    del silent
    while (asked := queue.get()) is not None:
        run, name, failed = asked
        try:
            if name:
                Thread(run, name).start()
            else:
                _thread.start_new_thread(run, ())
        except BaseException as error:  # no thread or memory left; the interpreter is ending
            failed(error)
        asked = run = failed = None


def _forget() -> None:
    global _launches
    _launches = None  # a forked child has no launcher


os.register_at_fork(after_in_child=_forget)


class Job(Generic[Value]):
    """Work that a thread does and another waits for.

    Args:
        work: What is done, on the device and stream that are current here.
        name: Of its thread; "" as for `start`.
        ended: Called by the thread when it has ended, whatever came of it; must not raise.

    Attributes:
        done: Whether it has ended.
        began: Whether a thread took it up.
    """

    def __init__(
        self,
        work: Callable[[], Value],
        name: str = "nvmeio-work",
        ended: Callable[[], object] | None = None,
    ) -> None:
        self._work: Callable[[], Value] | None = devices.as_here(work)
        self._name = name
        self._ended = ended
        self._value: Any = None
        self._error: BaseException | None = None
        self.done = self.began = False
        self._claim = _thread.allocate_lock()  # taken by who decides whether it runs
        self._gate = _thread.allocate_lock()  # held until it has ended
        self._gate.acquire()

    def start(self) -> None:
        """Begin it; called once."""
        start(self._run_listed if self._name else self._run, self._name, self._fail)

    def withdraw(self) -> bool:
        """Keep it from beginning; False where it has begun or ended, or was withdrawn before."""
        return self._claim.acquire(False)

    def wait(self) -> None:
        """Block until it has ended; an interrupt ends the waiting at once, and not the work."""
        while not self.done:
            self._gate.acquire(timeout=SLICE_S)

    @property
    def error(self) -> BaseException | None:
        """What it raised."""
        return self._error

    def result(self) -> Value:
        """What it returned, once it has ended; raises what it raised."""
        if self._error is not None:
            try:
                raise self._error
            finally:
                del self
        value: Value = self._value
        return value

    def _run_listed(self) -> None:
        self._run(unlist)

    def _run(self, last: Callable[[], object] | None = None) -> None:
        if not self._claim.acquire(False):
            return
        self.began = True
        work, self._work = self._work, None
        try:
            assert work is not None
            self._value = work()
        except BaseException as failed:
            self._error = failed
        del work
        if last is not None:
            last()
        self._end()

    def _fail(self, error: BaseException) -> None:
        if self._claim.acquire(False):
            self._error = error
            self._work = None  # and with it what it would have worked on
            self._end()

    def _end(self) -> None:
        ended, self._ended = self._ended, None
        self.done = True
        self._gate.release()
        if ended is not None:
            ended()


def being_interrupted() -> bool:
    """Whether an interrupt is on its way out of here: what waits now is part of tidying up.

    So one that comes meanwhile is the second, and is not kept waiting.
    """
    error = sys.exc_info()[1]
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__  # something failed while that one was on its way
    return error is not None


def run_interruptible(
    work: Callable[[], Value], cancel: Callable[[], object] | None = None
) -> Value:
    """Do blocking work so that Ctrl-C can neither cut it in half nor be kept waiting.

    In the main thread, and where an event loop runs here (a transfer that is started on a running
    loop reports there, and would wait for ever for a loop that waits for it), the work is done in a
    thread of its own; elsewhere in place, for no interrupt comes there. In place, too, where the
    program is at its end: new threads are refused, and those that there are never run again.

    The first interrupt calls `cancel` and is raised when the work has ended: half of it must not go
    on behind its caller's back. A second one is raised at once; the work still ends by itself.
    """
    main = threading.main_thread().ident == threading.get_ident()
    if sys.is_finalizing() or (not main and asyncio._get_running_loop() is None):
        return work()
    job = Job(work)
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
    if not job.began and _no_more_threads(job.error):
        return work()
    return job.result()


def _no_more_threads(error: BaseException | None) -> bool:
    """Whether the program is at its end, and Python (from 3.12 on) refuses to start threads."""
    return isinstance(error, RuntimeError) and "interpreter shutdown" in str(error)


async def in_thread(work: Callable[[], Value], cancel: Callable[[], object] | None = None) -> Value:
    """Do blocking work in a thread of its own and await its value.

    A thread of its own, since a loop's default pool may be full of what waits for this. When the
    awaiting task is cancelled, `cancel` is called if there is one, the end of `work` is awaited all
    the same, and only then `CancelledError` goes on; what `work` raised is its cause. So it is when
    the task is cancelled again: under `asyncio.run` the first Ctrl-C cancels, the second ends the
    run, which cancels again and waits for its tasks, and the third ends that waiting.
    """
    loop = running_loop()
    waiter = asyncio.Event()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and its tasks with it
            loop.call_soon_threadsafe(waiter.set)

    job = Job(work, ended=wake)
    try:
        job.start()
        await waiter.wait()
    except asyncio.CancelledError as cancelled:
        if cancel is not None:
            cancel()
        while not job.done:
            with contextlib.suppress(asyncio.CancelledError):
                await waiter.wait()
        raise cancelled from job.error
    except BaseException:  # the coroutine is closed, or interrupted: nobody can wait any more
        if not job.withdraw() and cancel is not None:
            cancel()
        raise
    return job.result()
