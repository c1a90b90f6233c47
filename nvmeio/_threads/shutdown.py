"""The end of resources that an owner thread keeps: closed, dropped, or at the end of the program.

Whichever comes first; and at the end of the program before the engines, which are given to
`at_exit_last`: the order in which modules were imported says nothing. `weakref.finalize` cannot be
relied on for that: its hook is registered when somebody in the process first makes one, which may
be long before anything of ours is imported.

The program's exit reports losses that no caller can learn of any more: with an error on stderr, and
with status 120, which is Python's own for a program that ended and could not write out all it had
(`sys.exit`).
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from nvmeio._threads.closing import do_all
from nvmeio._threads.owner import OwnerThread
from nvmeio._threads.threads import log_failure, logger, unlist
from nvmeio.errors import ClosedError, NvmeioError

Opened = TypeVar("Opened")

_DROPPED_S = 1.0  # as long is waited for the end of what was dropped; it ends anyway


class Ending:
    """Ends something once, in its owner's thread, and the owner with it.

    Keep it where it dies with the object that stands for what ends. Made by what the owner runs.
    `end` must not refer to this object, or to its owner.
    """

    def __init__(self, owner: OwnerThread, end: Callable[[], object]) -> None:
        self._owner = owner
        self._closing = closing = _Closing(owner, end)
        self._claim = owner.claim(closing.run_dropped)
        _open[id(closing)] = closing

    def close(self) -> None:
        """End it now, and wait; raises what the end raised. Idempotent.

        An interrupt is raised when it has ended, a second one at once (and so is the first if one
        is on its way already); then it goes on, and another call of this waits for it.
        """
        if not self._owner.forked:  # in a forked child everything is the parent's
            self._closing.asked = True
            self._closing.end(to_end=True)

    def begin(self) -> None:
        """End it soon; waits for nothing."""
        if not self._owner.forked:
            self._closing.asked = True
            self._owner.post(self._closing.run_dropped)

    @property
    def asked(self) -> bool:
        """Whether it has ended, or is about to."""
        return self._closing.asked

    def __del__(self) -> None:
        # At the end of the interpreter modules may have lost their names; all has ended by then.
        if self._closing.done or self._owner.forked or self._owner.is_here:
            return
        self._closing.asked = True
        # Not for long: the collector may have come here while this thread holds a lock that the
        # end needs.
        self._claim.end()
        gate = _thread.allocate_lock()
        gate.acquire()
        self._owner.post(gate.release)
        gate.acquire(timeout=_DROPPED_S)


class _Closing:
    def __init__(self, owner: OwnerThread, end: Callable[[], object]) -> None:
        self.owner = owner
        self._end = end
        self.asked = False
        self.done = False

    def run(self) -> BaseException | None:
        """End it; returns what that raised, for a `ClosedError` of the owner says that it has."""
        if self.done:
            return None
        self.done = True
        try:
            self._end()
        except BaseException as failed:
            return failed
        finally:
            _open.pop(id(self), None)
            self.owner.close()
            if self.owner.is_here:
                unlist()  # waiters for this are answered last
        return None

    def run_dropped(self) -> None:
        failed = self.run()
        if failed is not None:
            nobody_was_told(failed)

    def end(self, to_end: bool = False) -> None:
        if self.owner.forked:
            return
        failed = None
        with contextlib.suppress(ClosedError):
            failed = self.owner.call(self.run, to_end=to_end)
        if failed is not None:
            try:
                raise failed
            finally:
                del failed  # no cycle with the traceback: what it holds goes at once


_open: dict[int, _Closing] = {}  # in the order in which they were made
_left: deque[weakref.ref[OwnerThread]] = deque(maxlen=64)


def open_owned(owner: OwnerThread, opening: Callable[..., Opened], *args: Any) -> Opened:
    """`owner.call(opening, *args)`, for work that opens something and makes its `Ending`.

    After an interrupt what it opened has ended when that is raised (a second interrupt is raised at
    once): another try must not find the directory in use.
    """
    try:
        return owner.call(opening, *args)
    except KeyboardInterrupt:
        leave(owner)
        owner.drain()  # it had opened, and has ended by now
        raise


def leave(owner: OwnerThread) -> None:
    """Note the owner of what an interrupted call began, so that others can wait for its end."""
    _left.append(weakref.ref(owner))


def those_that_end() -> list[OwnerThread]:
    """Owners of what was closed, dropped or left, and may be ending.

    For a caller that reopens what an interrupted call, or the collector, is about to give back. Ask
    before each try: what gives back just after one is waited for too.
    """
    owners = [mark() for mark in list(_left)]
    owners += [closing.owner for closing in list(_open.values()) if closing.asked]
    return [owner for owner in owners if owner is not None and not owner.forked]


def wait_for(owners: list[OwnerThread]) -> bool:
    """Wait until what these owners keep has ended; whether there are any: then try again."""
    for owner in owners:
        owner.drain()
        with contextlib.suppress(ValueError):
            _left.remove(weakref.ref(owner))
    return bool(owners)


# The exit status


def nobody_was_told(failure: BaseException) -> None:
    """Remember a failure that nobody can be told any more: the program's exit reports it."""
    _untold.append((os.getpid(), f"{type(failure).__name__}: {failure}"))
    log_failure(failure, "what a dropped object had still to do has failed")


_untold: deque[tuple[int, str]] = deque(maxlen=64)  # no errors: their frames keep memory alive


def at_exit(end: Callable[[], object]) -> None:
    """Call `end()` when the program ends; what it raises is printed, and sets the status."""
    atexit.register(_end_of_program, end)


def end_saving(end: Callable[[], object]) -> None:
    """Call `end()`; log what it raises, because nothing awaits the result any more."""
    try:
        end()
    except BaseException as failed:
        logger.error("a save failed, and its result was never awaited: %s", failed)
        raise


def at_exit_first(end: Callable[[], object]) -> None:
    """Call `end()` when the program ends, before what was registered by then."""
    atexit.register(end)


def at_exit_last(end: Callable[[], object]) -> None:
    """Call `end()` when the program ends, after all that `at_exit` was given."""
    _last.append(end)


_last: list[Callable[[], object]] = []


def _end_of_program(end: Callable[[], object]) -> None:
    try:
        end()
    except BaseException:  # Ctrl-C as well: what was waited for may be lost
        _fail_status()
        raise


def _fail_status() -> None:
    """Make the exit status 120, whatever else still runs.

    `Py_FinalizeEx` reports a last flush of stdout or stderr that fails, after all functions of
    `atexit`, and ``python`` makes its status of that. If Python is embedded, its host decides.
    """
    if not isinstance(sys.stderr, _FailsAtLast):
        sys.stderr = _FailsAtLast(sys.stderr)


class _FailsAtLast:
    """A stream whose flush fails if the interpreter itself asks for it, and nobody else."""

    closed = False

    def __init__(self, stream: Any) -> None:
        self._stream = stream  # None where the program has no stderr

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return len(text) if self._stream is None else self._stream.write(text)

    def flush(self) -> None:
        if self._stream is not None and not self._stream.closed:
            self._stream.flush()
        if sys._getframe().f_back is None:
            raise OSError("data to be saved at the end of the program is lost")


def _at_exit() -> None:
    do_all([*(closing.end for closing in reversed(list(_open.values()))), _say_what_was_lost])


def _say_what_was_lost() -> None:
    for pid, untold in _untold:
        if pid == os.getpid():  # not in a forked child: its parent says so
            raise NvmeioError(f"unreported failure: {untold}")


# The step that was registered last is called first.
atexit.register(do_all, _last)
at_exit(_at_exit)
