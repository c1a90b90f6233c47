"""Blocking work of which a part has to be done in the caller's own thread.

Pickling is such a part: what a user's ``__reduce__`` or ``__setstate__`` sees of its thread
(torch's modes, the default device) must be what it would see without us. All the rest belongs in
another thread, where no interrupt comes (`threads`): so that thread asks for the part, and the
caller, who waits anyway, does it.

Where an interrupt or an error ends the part, that is raised where it was asked for, so that what
lies around it is undone there, by ``with`` and ``finally`` that nothing can interrupt.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

from nvmeio._io.inflight import Cancelled
from nvmeio._threads.future import SLICE_S, being_interrupted
from nvmeio._threads.jobs import Job

Value = TypeVar("Value")


class InCaller(Protocol):
    """Has the caller's thread call something; returns or raises what that does."""

    def __call__(self, call: Callable[..., Value], /, *args: Any) -> Value: ...


def at_once(call: Callable[..., Value], /, *args: Any) -> Value:
    """The `InCaller` of work that is in the right thread already."""
    return call(*args)


class Cancellation:
    """What has to be told when some work is cancelled, from another thread."""

    def __init__(self) -> None:
        self.cancelled = False
        self._told: list[Callable[[], object]] = []

    def cancel(self) -> None:
        """Cancel it: `check` raises from now on, and everybody is told. From any thread."""
        self.cancelled = True
        for tell in list(self._told):
            tell()

    def then(self, tell: Callable[[], object]) -> None:
        """Have this called when it is cancelled; at once if it was."""
        self._told.append(tell)
        if self.cancelled:
            tell()

    def check(self) -> None:
        """Raise `Cancelled` if it was."""
        if self.cancelled:
            raise Cancelled


def run_with_caller(
    work: Callable[[InCaller], Value], cancel: Callable[[], object] | None = None
) -> Value:
    """As `threads.run_interruptible`, for work that has parts done by its caller.

    Args:
        work: Called with what has the caller's thread call something.
        cancel: Ends the work soon; called once the caller is interrupted.

    The first interrupt is raised when the work has ended, a second one at once. One that meets the
    caller while it does its part ends that, and the part that it does is what the work sees fail.
    """
    main = threading.main_thread().ident == threading.get_ident()
    if not main and asyncio._get_running_loop() is None:
        return work(at_once)
    parts: SimpleQueue[_Part | None] = SimpleQueue()
    here = _Here()  # until this frame goes
    desk = _Desk(parts, weakref.ref(here))
    job = Job(lambda: work(desk.ask))
    job.then(lambda: parts.put(None))
    second = being_interrupted()
    try:
        job.start()
        while True:
            try:
                part = parts.get(timeout=SLICE_S)  # in slices: see `threads`
            except Empty:
                continue
            if part is None:
                break
            part.carry_out()
    except BaseException as interrupt:
        desk.left = True
        desk.answers.put(None)
        if not job.withdraw():
            if cancel is not None:
                cancel()
            if not second:
                job.wait()
        raise interrupt from (None if job.error is interrupt else job.error)
    return job.result()


class _Part:
    """Something for the caller's thread to do."""

    def __init__(self, call: Callable[..., Any], args: tuple[Any, ...], answers: Any) -> None:
        self._call = call
        self._args = args
        self._answers = answers
        self.value: Any = None
        self.error: BaseException | None = None

    def carry_out(self) -> None:
        try:
            self.value = self._call(*self._args)
        except BaseException as failed:
            self.error = failed
        self._answers.put(self)


class _Here:
    """The caller waits, or does a part."""


class _Desk:
    """Where the thread that works asks, and where it is answered."""

    def __init__(self, parts: SimpleQueue[_Part | None], caller: weakref.ref[_Here]) -> None:
        self._parts = parts
        self._caller = caller
        self.answers: SimpleQueue[_Part | None] = SimpleQueue()
        self.left = False  # nobody is there to answer any more

    def ask(self, call: Callable[..., Value], /, *args: Any) -> Value:
        part = _Part(call, args, self.answers)
        self._parts.put(part)
        answer: _Part | None = None
        while answer is not part:
            if self.left or self._caller() is None:
                raise Cancelled
            try:
                answer = self.answers.get(timeout=SLICE_S)
            except Empty:
                continue
        if part.error is not None:
            try:
                raise part.error
            finally:
                del part, answer  # no cycle with the traceback
        value: Value = part.value
        return value
