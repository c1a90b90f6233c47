"""Who may use the weights: one thread at a time, or the micro-batches of a schedule in turn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")

# How often whoever waits looks whether the turn was left behind.
_LOOK_S = 0.1


class Abandoned(Exception):
    """Another micro-batch of the schedule failed; it has the reason."""


class Turns:
    """The turn to use the weights.

    `take` and `give` frame each use. Within a `Schedule` the turn belongs to the schedule, and goes
    round among its members: whoever arrives at the next unit hands it on first, so that all have
    used one unit before the first uses the next.

    Ctrl-C ends a module's forward without its hooks, and so without `give`: a turn whose caller's
    frame is not executing any more was left behind, and goes to whoever waits.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._owner: object = None  # a thread's number, or a schedule
        self._depth = 0
        self._caller: FrameType | None = None  # of the thread that has the turn

    def take(self, unit: object, caller: FrameType | None = None) -> None:
        """Wait for the turn.

        Args:
            unit: What is going to be used; None for a use between units, which hands nothing on.
            caller: The frame within which it is used; None where `give` is certain to be called.
        """
        owner = self._owner
        if isinstance(owner, Schedule) and owner.is_member():
            if unit is not None:
                owner.hand_on()
            return
        me = threading.get_ident()
        with self._condition:
            if self._owner == me:
                # A pass that was interrupted (Ctrl-C runs no hooks) never gave it back.
                self._depth = self._depth + 1 if unit is None else 1
                if unit is not None:
                    self._caller = caller
                return
            self._wait_for_it()
            self._owner, self._depth, self._caller = me, 1, caller

    def give(self, unit: object) -> None:
        """End a use."""
        with self._condition:
            if self._owner != threading.get_ident():
                return  # a schedule's; it keeps the turn
            self._depth -= 1
            if self._depth <= 0:
                self._owner = self._caller = None
                self._condition.notify_all()

    def mine(self) -> bool:
        """Whether this thread has the turn."""
        owner = self._owner
        if isinstance(owner, Schedule):
            return owner.is_member()
        return bool(owner == threading.get_ident())

    def shared(self) -> bool:
        """Whether others are to use the same unit before the next one."""
        owner = self._owner
        return isinstance(owner, Schedule) and owner.count > 1

    def _hold(self, schedule: Schedule[Any]) -> None:
        with self._condition:
            if self._owner != threading.get_ident():  # this thread's own was left behind
                self._wait_for_it()
            self._owner, self._caller = schedule, None

    def _let_go(self) -> None:
        with self._condition:
            self._owner = None
            self._condition.notify_all()

    def _wait_for_it(self) -> None:
        while self._owner is not None and not self._is_left_behind():
            self._condition.wait(_LOOK_S)

    def _is_left_behind(self) -> bool:
        if self._caller is None:
            return False
        try:
            self._caller.clear()  # which an executing frame refuses, in whatever thread
        except RuntimeError:
            return False
        return True


class Schedule(Generic[Value]):
    """Pieces of work that use the same units in the same order, run in lockstep.

    Each has a thread of its own, but only one runs at any moment: they take turns at every unit, in
    the order in which they were given, so that a unit is brought once for all of them. One that
    ends early leaves the round.

    Args:
        turns: Of the stream that they use.
        works: What to run.
    """

    def __init__(self, turns: Turns, works: Sequence[Callable[[], Value]]) -> None:
        self._turns = turns
        self._works = works
        self._condition = threading.Condition()
        self._round: list[int] = list(range(len(works)))  # members that are not done
        self._now = 0  # the member that runs
        self._here = threading.local()
        self._failed: BaseException | None = None

    def run(self) -> list[Value]:
        """Run them all and return their values, in order.

        Raises: What the first of them raised that failed; the others are stopped at their next
            unit.
        """
        values: dict[int, Value] = {}
        threads = [
            threading.Thread(
                target=self._member, args=(n, values), name=f"nvmeio-batch-{n}", daemon=True
            )
            for n in range(len(self._works))
        ]
        self._turns._hold(self)
        try:
            for thread in threads:
                thread.start()
            try:
                for thread in threads:
                    thread.join()
            except BaseException as interrupted:
                with self._condition:
                    self._failed = self._failed or interrupted
                    self._condition.notify_all()
                for thread in threads:
                    thread.join()
                raise
        finally:
            self._turns._let_go()
        if self._failed is not None:
            raise self._failed
        return [values[number] for number in range(len(self._works))]

    def is_member(self) -> bool:
        """Whether this thread is one of them."""
        return getattr(self._here, "number", None) is not None

    @property
    def count(self) -> int:
        """How many are not done."""
        return len(self._round)

    def hand_on(self) -> None:
        """Let the next one run, and wait until the turn comes back.

        Raises:
            Abandoned: Another one failed.
        """
        number = self._here.number
        with self._condition:
            if self._failed is not None:
                raise Abandoned
            self._now = self._follower(number)
            self._condition.notify_all()
            self._wait(number)

    def _wait(self, number: int) -> None:
        while self._now != number and self._failed is None:
            self._condition.wait()
        if self._failed is not None:
            raise Abandoned

    def _follower(self, number: int) -> int:
        later = [member for member in self._round if member > number]
        return later[0] if later else min(self._round, default=-1)

    def _member(self, number: int, values: dict[int, Value]) -> None:
        self._here.number = number
        try:
            with self._condition:
                self._wait(number)
            values[number] = self._works[number]()
        except Abandoned:
            pass
        except BaseException as failed:
            with self._condition:
                self._failed = self._failed or failed
        finally:
            with self._condition:
                self._round.remove(number)
                self._now = self._follower(number)
                self._condition.notify_all()
