"""Threads that have begun when they are asked to, or never do anything.

An interrupted `threading.Thread.start` leaves a thread that waits forever, and one that gets no
memory for its first step is waited for without end. So threads are started by a thread of ours,
which no interrupt reaches, and whether one runs is decided by a lock that both sides try to take,
never by how far its starter got.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

from nvmeio._threads.future import Future, being_interrupted

logger = logging.getLogger("nvmeio")

_BIRTH_LOOK_S = 0.05  # a waiter for a new thread checks this often whether it is still coming
_BIRTH_S = 60.0  # a thread that has not begun by then counts as failed, and does nothing if it does


@contextlib.contextmanager
def helped(by: int, work: Callable[[], object], name: str) -> Iterator[None]:
    """Have threads do the work too while the body runs, and until they are done with it."""
    started: list[Thread] = []
    try:
        # No more threads in this process: fewer will do.
        with contextlib.suppress(RuntimeError, MemoryError):
            for _ in range(by):
                thread = Thread(work, name)
                thread.start()
                started.append(thread)
        yield
    finally:
        for thread in started:
            thread.join()


class Thread(threading.Thread):
    """A thread that has begun when `start` returns, or never does anything.

    One that gets no memory for its first step (RLIMIT_AS, a container's limit) ends without a word,
    and `threading.Thread.start` would wait for its sign of life forever. And an interrupt within
    that `start` leaves a thread that nobody knows of.
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
        self._claim = _thread.allocate_lock()  # taken by the thread that decides whether it runs

    @property
    def _bootstrap(self) -> Callable[[], None]:
        """The callable that `threading` gives the new thread, which alone keeps it."""
        birth = functools.partial(super()._bootstrap)  # type: ignore[misc]
        self._started.birth = weakref.ref(birth)
        return birth

    def start(self) -> None:
        """Begin it; in the main thread by another one, which no interrupt cuts short.

        Raises RuntimeError if the process may have no more threads, MemoryError if there is none
        for it.
        """
        main = threading.main_thread().ident == threading.get_ident()
        if not main or sys.is_finalizing():
            self._start()
            return
        begun: Future[None] = Future()
        second = being_interrupted()
        try:
            start(functools.partial(self._start_for, begun), "", begun.fail)
            begun.wait()
        except BaseException:
            if not self._claim.acquire(False) and not second:
                begun.wait()
            raise
        begun.result()

    def _start_for(self, begun: Future[None]) -> None:
        try:
            self._start()
        except BaseException as refused:
            begun.fail(refused)
        else:
            begun.set(None)

    def _start(self) -> None:
        try:
            super().start()
        except BaseException:
            if self._claim.acquire(False):
                # `threading.enumerate` would list it forever.
                vars(threading).get("_limbo", {}).pop(self, None)
                raise
            # It has begun: it was only the waiting for it that failed.

    def run(self) -> None:
        """The thread's work, unless it was given up before it began."""
        if self._claim.acquire(False):
            super().run()

    def _delete(self) -> None:
        """Leave the list of threads, at the end, or before it by `unlist`; called by the thread."""
        with contextlib.suppress(KeyError):
            super()._delete()  # type: ignore[misc]


def unlist() -> None:
    """Take the calling thread out of `threading.enumerate()`, if it is one of ours.

    For one that is about to say that all is done: whoever is told, and counts the threads that
    there are, is to find none that has a moment to live.
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

    `run` must not raise. `name` "" makes one that is not in `threading.enumerate()`: it may call
    nothing that asks which thread it is in, such as `logging`. `failed` is called with the reason
    if no thread can be had. Raises RuntimeError or MemoryError if not even the one that starts the
    others can be had.
    """
    queue = _launches
    if queue is None:
        queue = _new_launcher()
    queue.put((run, name, failed))


_launches: SimpleQueue[Any] | None = None


def _new_launcher() -> SimpleQueue[Any]:
    """Make a launcher. Two callers may do so at once; one of them is forgotten."""
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
            try:
                failed(error)
            except BaseException as another:
                log_failure(another, "unexpected error where %s could not begin", name)
        asked = run = failed = None


def log_failure(failed: BaseException, message: str, *args: object) -> None:
    """Log an error in a thread of ours: a log handler that raises must not end that."""
    with contextlib.suppress(Exception):
        logger.error(message, *args, exc_info=failed)


def _forget() -> None:
    global _launches
    _launches = None  # a forked child has no launcher


os.register_at_fork(after_in_child=_forget)
