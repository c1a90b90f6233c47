"""The thread that owns state: it alone changes it, and everybody else asks.

`KeyboardInterrupt` comes between any two bytecodes of the main thread, within ``finally`` and
``__exit__`` as well, so what is changed there can be left half changed whatever one writes. trio's
`_core/_ki.py` says why that cannot be got right place by place. Here it cannot happen:

- A request is handed over with one C call (`SimpleQueue.put`), and waited for on a raw lock. An
  interrupt ends the waiting. The work goes on, the next request queues behind it, and nobody ever
  sees state that is half changed.
- What a caller holds is a `Claim`. It ends when the caller says so, or when the last reference to
  it goes: as the frame is unwound, or with the answer that an interrupted caller never took. The
  callback of its weak reference is `SimpleQueue.put` itself, in C, so that this cannot be cut in
  half either. No counter has to be put right by anybody. A claim that died is given back before
  the requests that wait; one that was ended, in its turn.

So keep a claim where it dies with what it is for: in a local, or in an object that belongs to one
pass. torch runs ``always_call`` hooks for `Exception` only; let nothing depend on them.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Concatenate, ParamSpec, TypeVar

from nvmeio._threads import threads
from nvmeio._threads.future import SLICE_S, Future, being_interrupted
from nvmeio._threads.threads import log_failure
from nvmeio.errors import ClosedError

Value = TypeVar("Value")
Taken = ParamSpec("Taken")

_CLOSED = "it is closed"
_FORKED = "this process was forked from its owner's: make a new one here"


def owned(
    work: Callable[Concatenate[Any, Taken], Value],
) -> Callable[Concatenate[Any, Taken], Value]:
    """A method that runs in the thread of its object's `_owner`, for any caller."""

    @functools.wraps(work)
    def call(self: Any, /, *args: Taken.args, **kwargs: Taken.kwargs) -> Value:
        owner: OwnerThread = self._owner
        return owner.call(functools.partial(work, self, *args, **kwargs))

    return call


class Claim:
    """A caller's part of an owner's state; ends with `end`, or when nobody has it any more."""

    __slots__ = ("__weakref__", "_mark", "_requests")

    def __init__(self, requests: SimpleQueue[Any]) -> None:
        self._requests = requests
        self._mark: weakref.ref[Claim] = weakref.ref(self, requests.put)

    def end(self) -> None:
        """Give it back now. Idempotent, from any thread; requests that come after see it gone."""
        self._requests.put((self._mark,))


class OwnerThread:
    """Runs what it is asked, one after the other, in a thread of its own.

    A call after `close` raises ClosedError with the text `closed`. A function that it runs may call
    it: the inner call runs at once. It must not wait for another thread that calls it. Grad mode,
        CUDA device and stream are the thread's, not the caller's.
    """

    def __init__(self, name: str, closed: str = _CLOSED) -> None:
        self._state = _State(closed)
        self._requests = self._state.requests
        self._pid = os.getpid()
        self.closed = False
        # No reference to self: an owner that is dropped ends its thread, by C alone as above.
        self._state.dropped = weakref.ref(self, self._requests.put)
        threads.start(self._state.serve, name, self._state.end)

    def wait_for_start(self) -> None:
        """Wait until the thread runs; ClosedError if no thread can be had."""
        self.call(_nothing)

    def call(self, work: Callable[..., Value], *args: Any, to_end: bool = False) -> Value:
        """Run `work(*args)` in the thread, and wait for its result.

        With `to_end`, for work on what is the caller's, an interrupt is raised when it has ended, a
        second one at once, and so is the first if one is on its way already. Else an interrupt is
        raised at once; the work is done anyway, and its value dropped. Raises ClosedError if
        the owner is closed, or another process's.
        """
        # `is_here` and `_check_process`, without a call: each layer of a model comes this way.
        if self._state.ident == _thread.get_ident():
            return work(*args)
        if self._pid != os.getpid():
            raise ClosedError(_FORKED)
        second = to_end and being_interrupted()
        request: _Request[Value] = _Request(work, args)
        try:
            self._requests.put(request)
            return self.answer(request)
        except BaseException:
            if to_end and not (second or request.done):
                self.drain()
            raise
        finally:
            del request  # a traceback that is kept must not keep the claim that an answer may hold

    def begin(self, work: Callable[..., Value], *args: Any) -> Future[Value]:
        """Ask the thread to run `work(*args)`; `answer` waits for its result."""
        request: _Request[Value] = _Request(work, args)
        self._requests.put(request)
        return request

    def answer(self, begun: Future[Value]) -> Value:
        """Wait for what was begun; its value, once. ClosedError if the thread ended before."""
        try:
            wait_s = 0.0 if self._state.ended else SLICE_S
            while not begun.wait(wait_s):
                # It came too late to be answered, or when the program ends and no thread runs.
                if (self._state.ended or sys.is_finalizing()) and not begun.done:
                    raise ClosedError(self._state.closed)
            return begun.result()
        finally:
            del begun  # a traceback that is kept must not keep the claim that an answer may hold

    async def async_call(self, work: Callable[..., Value], *args: Any) -> Value:
        """`call`, awaited; a cancelled task goes on at once, and the work is done."""
        self._check_process()
        request: _Request[Value] = _Request(work, args)
        self._requests.put(request)
        if self._state.ended and not request.done:  # it came too late to be answered
            raise ClosedError(self._state.closed)
        await request.ended()
        return request.result()

    def drain(self) -> None:
        """Wait until all earlier requests are done and dropped claims are given back.

        Returns at once if the owner is closed, or another process's.
        """
        with contextlib.suppress(ClosedError):
            self.call(_nothing)

    def post(self, work: Callable[..., object], *args: Any) -> None:
        """Ask the thread to run `work(*args)`; what it raises is logged."""
        self._requests.put(_Request(work, args, posted=True))

    def claim(self, release: Callable[..., object], *args: Any) -> Claim:
        """Make a claim whose end calls `release(*args)`; called by what the owner runs.

        Neither may refer to the claim.
        """
        if not self.is_here:
            raise RuntimeError("claims are given by their owner: use call()")
        claim = Claim(self._requests)
        self._state.claims[claim._mark] = (release, args)
        return claim

    def release_dropped(self) -> None:
        """Give back the claims that were dropped by now; called by what the owner runs."""
        self._state.take_requests()

    @property
    def is_here(self) -> bool:
        return self._state.ident == _thread.get_ident()

    def close(self) -> None:
        """End the thread once it has done what it was asked before. Idempotent; does not wait."""
        self.closed = True
        self._requests.put(None)

    @property
    def forked(self) -> bool:
        """Whether it is another process's, from which this one was forked."""
        return self._pid != os.getpid()

    def _check_process(self) -> None:
        if self.forked:
            raise ClosedError(_FORKED)


class _Request(Future[Value]):
    __slots__ = ("_args", "_posted", "_work")

    def __init__(
        self, work: Callable[..., Value], args: tuple[Any, ...], posted: bool = False
    ) -> None:
        super().__init__()
        self._work: Callable[..., Value] | None = work
        self._args = args
        self._posted = posted

    def carry_out(self) -> None:
        work, args = self._work, self._args
        self._work, self._args = None, ()
        assert work is not None
        try:
            self._value = work(*args)
        except BaseException as failed:
            if self._posted:
                _log(failed)
            else:
                self.error = failed
        del work, args
        self._end()
        del self  # the error's traceback has this frame: else they would keep each other

    def refuse(self, message: str) -> None:
        self._work, self._args = None, ()
        self.fail(ClosedError(message))


def _nothing() -> None:
    """Do nothing: asked to learn that all before it is done."""


class _State:
    """The state that thread and owner share; the thread must not keep the owner alive."""

    def __init__(self, closed: str) -> None:
        self.closed = closed
        self.requests: SimpleQueue[Any] = SimpleQueue()
        self.claims: dict[weakref.ref[Claim], tuple[Callable[..., object], tuple[Any, ...]]] = {}
        self.dropped: weakref.ref[OwnerThread] | None = None
        self.ident: int | None = None
        self.ended = False
        self._taken: deque[Any] = deque()

    def serve(self) -> None:
        self.ident = _thread.get_ident()
        try:
            while True:
                request = self._next()
                if request is None or request is self.dropped:
                    break
                if isinstance(request, _Request):
                    request.carry_out()
                else:
                    self._release(*request)
                request = None  # the answer is its caller's alone
        finally:  # the caller is answered, whatever ended this
            self.end()

    def _next(self) -> Any:
        """The next request; claims that died go first.

        The answer of an interrupted call may die behind the call that comes after it.
        """
        taken = self._taken
        while not taken or not self.requests.empty():
            self._take(self.requests.get())
        return taken.popleft()

    def take_requests(self) -> None:
        while not self.requests.empty():
            self._take(self.requests.get())

    def _take(self, request: Any) -> None:
        if isinstance(request, weakref.ref) and request is not self.dropped:
            self._release(request)
        else:
            self._taken.append(request)

    def _release(self, mark: weakref.ref[Claim]) -> None:
        found = self.claims.pop(mark, None)
        if found is not None:
            self._quietly(*found)

    def end(self, _: BaseException | None = None) -> None:
        self.ident = None
        self.ended = True
        while self._taken or not self.requests.empty():
            request = self._taken.popleft() if self._taken else self.requests.get()
            if isinstance(request, _Request):
                request.refuse(self.closed)
            request = None
        for release, args in list(self.claims.values()):
            self._quietly(release, args)
        self.claims.clear()

    def _quietly(self, release: Callable[..., object], args: tuple[Any, ...]) -> None:
        try:
            release(*args)
        except BaseException as failed:
            _log(failed)


def _log(failed: BaseException) -> None:
    log_failure(failed, "unexpected error in %s", threading.current_thread().name)
