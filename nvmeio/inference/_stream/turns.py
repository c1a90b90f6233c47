"""Turns at using the weights, uses that need no turn, and the pass that a thread makes.

One caller at a time has the turn: a thread, for as long as it uses one unit, or a lockstep of
micro-batches until all have ended. The others wait in the order in which they came, each on a lock
of its own. Callers get claims, so that the turn of an interrupted one goes on.

Units that stay in place are used without a turn, and without asking: a thread that has asked once
has a claim, shared by its uses, that only a close takes back.

A forward pass that fails leaves a cache of past keys and values that some layers have updated and
others not. It is refused from then on.
"""

from __future__ import annotations

import _thread
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

from nvmeio._threads.future import SLICE_S
from nvmeio._threads.owner import Claim, OwnerThread
from nvmeio.errors import ClosedError
from nvmeio.inference._plan.units import Unit
from nvmeio.progress import Progress

Value = TypeVar("Value")

CLOSED = "the stream of weights is closed: model.weight_stream.reopen()"


class Waiting(NamedTuple):
    """Something to wait on; the claim withdraws it."""

    gate: Any
    claim: Claim

    def wait(self) -> None:
        """Block until it is worthwhile to ask again; an interrupt ends it at once."""
        while not self.gate.acquire(timeout=SLICE_S):
            pass


def in_turn(owner: OwnerThread, ask: Callable[..., Value | Waiting], *args: Any) -> Value:
    """Call `ask(waited, *args)` by the owner until there is nothing more to wait for."""
    found: Any = None
    try:
        while True:
            found = owner.call(ask, found, *args)
            if not isinstance(found, Waiting):
                return found  # type: ignore[no-any-return]
            found.wait()
    finally:
        del found  # an error that is kept must not keep the claim


class SharedUse(NamedTuple):
    """A thread's claim on resident units, held during each use and for the next one.

    `times` is the number of uses, counted by that thread alone.
    """

    claim: Claim
    times: list[int]


class _SharedUses:
    """The threads that have a shared use. Refers to no claims and no owner: claims refer to this.

    `barred` counts threads that are closing the stream, `ended` the uses of claims that have ended.
    `live` has the caller and the count of each claim, `gates` locks of those that wait for these.
    """

    def __init__(self) -> None:
        self.barred = 0
        self.ended = 0
        self.live: dict[int, tuple[Hashable, list[int]]] = {}
        self.gates: list[Any] = []

    def begin(self, caller: Hashable) -> list[int]:
        count = [0]
        self.live[id(count)] = (caller, count)
        return count

    def end(self, count: list[int]) -> None:
        del self.live[id(count)]
        self.ended += count[0]
        gates, self.gates = self.gates, []
        for gate in gates:
            gate.release()

    def unbar(self) -> None:
        self.barred -= 1

    def withdraw(self, gate: Any) -> None:
        if gate in self.gates:
            self.gates.remove(gate)


class Turns:
    """Which caller has the turn, and which wait; all but `shared_use` is for the owner's thread."""

    def __init__(self, owner: OwnerThread) -> None:
        self._owner = owner
        self._turn: Hashable = None  # its owner: a thread's number, or a lockstep
        self._queue: deque[Any] = deque()  # locks of those who wait for it
        self._mine: dict[Hashable, SharedUse] = {}
        self._shared = _SharedUses()
        self.closed = False

    # --- one at a time --------------------------------------------------------------------------

    def has(self, caller: Hashable) -> bool:
        return self._turn == caller

    def take(self, caller: Hashable, waited: Waiting | None) -> Waiting | None:
        """Give a caller the turn, or a place in the queue; `waited` is from an earlier call."""
        if self.closed:
            raise ClosedError(CLOSED)
        if self._turn == caller:
            return None
        if waited is not None and waited.gate not in self._queue:
            waited = None  # it was not for the turn
        mine = waited is not None and bool(self._queue) and self._queue[0] is waited.gate
        if self._turn is None and (mine or not self._queue):
            if mine:
                self._queue.popleft()
            self._turn = caller
            return None
        if waited is not None:
            return waited
        gate = _held_lock()
        self._queue.append(gate)
        return Waiting(gate, self._owner.claim(self._withdraw, gate))

    def end(self, caller: Hashable) -> None:
        if self._turn == caller:
            self._turn = None
            self._wake()

    def _withdraw(self, gate: Any) -> None:
        if gate in self._queue:
            self._queue.remove(gate)
            self._wake()

    def _wake(self) -> None:
        if self._turn is None and self._queue and self._queue[0].locked():
            self._queue[0].release()

    # --- side by side ---------------------------------------------------------------------------

    def shared_use(self, caller: Hashable) -> SharedUse | None:
        """A caller's shared use, if it has one; from any thread."""
        return self._mine.get(caller)

    def share(self, caller: Hashable) -> bool:
        """Let a caller use resident units without asking; False while the stream is closing."""
        if self._shared.barred:
            return False
        if caller not in self._mine:
            count = self._shared.begin(caller)
            self._mine[caller] = SharedUse(self._owner.claim(self._shared.end, count), count)
        return True

    def bar(self) -> Claim:
        """Have all callers ask again, for as long as the claim lives."""
        self._shared.barred += 1
        barred = self._owner.claim(self._shared.unbar)
        self._mine.clear()
        return barred

    def await_shared(self, caller: int) -> Waiting | None:
        """Something to wait on while others use resident units; called after `bar`."""
        if all(other == caller for other, _ in self._shared.live.values()):
            return None
        gate = _held_lock()
        self._shared.gates.append(gate)
        return Waiting(gate, self._owner.claim(self._shared.withdraw, gate))

    @property
    def shared_count(self) -> int:
        """Uses without asking, so far."""
        return self._shared.ended + sum(count[0] for _, count in self._shared.live.values())

    def close(self) -> None:
        """Refuse waiting and later callers."""
        self.closed = True
        self._mine.clear()
        for gate in self._queue:
            if gate.locked():  # the first one's may be open: its turn has come
                gate.release()
        self._queue.clear()


def _held_lock() -> Any:
    gate = _thread.allocate_lock()
    gate.acquire()
    return gate


class PassCancelled(Exception):
    """A pass was told to stop; raised in it at the next layer."""


class PassMark:
    """Marks a pass as under way, for as long as its frame holds this."""

    __slots__ = ("__weakref__",)


class OwnPass:
    """The pass of the calling thread, which streams `total_bytes` of weights.

    `progress` is told, in each pass, of the layers that are used.
    """

    def __init__(self, total_bytes: int) -> None:
        self.progress: Progress | None = None
        self._total_bytes = total_bytes
        self._here = threading.local()
        self._marks: dict[int, weakref.ref[PassMark]] = {}  # by the number of the thread
        self._spoilt: weakref.WeakSet[Any] = weakref.WeakSet()

    def begin(self, cache: Any) -> None:
        """Begin a pass; `ready` follows. RuntimeError if a pass that failed left the cache."""
        self.spoil()  # a pass that was interrupted did not reach its `end`
        if cache is not None and cache in self._spoilt:
            raise RuntimeError(
                "this cache of past keys and values was left by a pass that failed, with some "
                "layers updated and others not: start again with a new one"
            )

    def ready(self, cache: Any) -> None:
        """The pass begins to compute: from now on its failure spoils the cache."""
        self._here.cache = None
        self._here.done_bytes = 0
        if self.progress is not None:
            self.progress("pass", 0, self._total_bytes)
        if cache is not None:
            with contextlib.suppress(TypeError):  # tuples, as old models have them
                self._here.cache = weakref.ref(cache)

    def mark(self) -> PassMark:
        mark = PassMark()
        try:
            self._marks[threading.get_ident()] = weakref.ref(mark)
            return mark
        finally:
            del mark  # an interrupt's traceback that is kept must not keep the pass

    @property
    def under_way(self) -> bool:
        """Whether this thread is within a pass that has a mark."""
        reference = self._marks.get(threading.get_ident())
        return reference is not None and reference() is not None

    def any_under_way(self) -> bool:
        """Whether any thread is within a pass that has a mark."""
        return any(mark() is not None for mark in list(self._marks.values()))

    def end(self) -> bool:
        """End a pass that was not interrupted; returns whether it has waited for a unit."""
        self._here.cache = None
        asked = getattr(self._here, "asked", False)
        self._here.asked = False
        return asked

    def waits(self) -> None:
        self._here.asked = True

    def stop_with(self, stop: threading.Event) -> None:
        """Stop passes of this thread at their next layer once `stop` is set."""
        self._here.stop = stop

    def check(self) -> None:
        stop = getattr(self._here, "stop", None)
        if stop is not None and stop.is_set():
            self.spoil()
            raise PassCancelled

    def note(self, unit: Unit) -> None:
        """Report progress: the pass has a unit's weights."""
        progress = self.progress
        if progress is None:
            return
        done = getattr(self._here, "done_bytes", 0) + unit.streamed_bytes
        self._here.done_bytes = done = min(done, self._total_bytes)
        try:
            progress(unit.name, done, self._total_bytes)
        except BaseException:
            self.spoil()
            raise

    def spoil(self) -> None:
        """The pass has failed: refuse its cache from now on."""
        reference = getattr(self._here, "cache", None)
        cache = None if reference is None else reference()
        if cache is not None:
            self._spoilt.add(cache)
