"""Whose turn it is to use the weights, and who uses what needs none.

One caller at a time has the turn: a thread, for as long as it uses one unit, or a lockstep of
micro-batches until all have ended. The others wait in the order in which they came, each on a lock
of its own. What callers get are claims, so that the turn of one that is interrupted goes on.

Units that stay in place are used without a turn, and without asking: a thread that has asked once
has a claim, shared by its uses, that only a close takes back.
"""

from __future__ import annotations

import _thread
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

from nvmeio._threads.future import SLICE_S
from nvmeio._threads.owner import Claim, OwnerThread
from nvmeio.errors import ClosedError

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
    """Have the owner do `ask(waited, *args)` until that gives nothing more to wait for."""
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
    """A thread's uses of what stays in place.

    Attributes:
        claim: Held by each of these, and for the next one.
        times: How many there were; counted by that thread alone.
    """

    claim: Claim
    times: list[int]


class _SharedUses:
    """Which threads have one. Refers neither to claims nor to the owner, whose claims refer here.

    Attributes:
        barred: By how many that close.
        ended: Uses of those that are over.
        live: The caller, and the count of each.
        gates: Of those that wait for their end.
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
    """The state of these; of the owner's thread, but for `shared_use`.

    Attributes:
        closed: Nobody gets the turn any more.
    """

    def __init__(self, owner: OwnerThread) -> None:
        self._owner = owner
        self._turn: Hashable = None  # who has it: a thread's number, or a lockstep
        self._queue: deque[Any] = deque()  # locks of those who wait for it
        self._mine: dict[Hashable, SharedUse] = {}
        self._shared = _SharedUses()
        self.closed = False

    # --- one at a time --------------------------------------------------------------------------

    def has(self, caller: Hashable) -> bool:
        """Whether it is a caller's."""
        return self._turn == caller

    def take(self, caller: Hashable, waited: Waiting | None) -> Waiting | None:
        """Give a caller the turn, or a place in the queue for it.

        Args:
            caller: Who asks.
            waited: What an earlier call returned.
        """
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
        """A caller's turn is over, if it is his."""
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
        """A caller's own, while it has one; from any thread."""
        return self._mine.get(caller)

    def share(self, caller: Hashable) -> bool:
        """Let a caller use what stays without asking; False while somebody closes."""
        if self._shared.barred:
            return False
        if caller not in self._mine:
            count = self._shared.begin(caller)
            self._mine[caller] = SharedUse(self._owner.claim(self._shared.end, count), count)
        return True

    def bar(self) -> Claim:
        """Have everybody ask again, for as long as the claim lives."""
        self._shared.barred += 1
        barred = self._owner.claim(self._shared.unbar)
        self._mine.clear()
        return barred

    def await_shared(self, caller: int) -> Waiting | None:
        """While others use what stays, something to wait on; after `bar`."""
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
        """Refuse whoever waits, and whoever comes."""
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
