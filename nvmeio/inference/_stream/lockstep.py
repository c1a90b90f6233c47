"""Threads that use the same units: one runs at a time, and all take turns at every unit.

`block_schedule` runs the micro-batches of a large batch so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from nvmeio._memory import devices
from nvmeio._threads.threads import Thread

Value = TypeVar("Value")


class Abandoned(Exception):
    """Another micro-batch failed, or all were stopped; the error is raised there."""


class Lockstep(Generic[Value]):
    """Pieces of work that use the same units in the same order.

    Each has a thread of its own, but only one runs at any moment: they take turns at every unit, in
    the order in which they were given, so that a unit is brought once for all of them. One that
    ends early leaves the others.

    Args:
        works: The functions to run.
    """

    def __init__(self, works: Sequence[Callable[[], Value]]) -> None:
        self._works = works
        self._condition = threading.Condition()  # of these threads: none is one that is interrupted
        self._members: list[int] = list(range(len(works)))  # members that are not done
        self._now = 0  # the member that runs
        self._failed: BaseException | None = None
        self._stopped = False

    def run(self) -> list[Value]:
        """Run them all, as the calling thread computes, and return their values, in order.

        Called in a thread of its own.

        Raises: The error of the first one that failed; the others are stopped at their next unit.
        """
        values: dict[int, Value] = {}
        threads: list[Thread] = []
        try:
            for number in range(len(self._works)):
                work = devices.as_here(self._works[number])
                thread = Thread(self._member, f"nvmeio-batch-{number}", (number, work, values))
                thread.start()
                threads.append(thread)
        except BaseException as failed:  # no more threads in this process
            with self._condition:
                self._failed = self._failed or failed
                self._condition.notify_all()
        for thread in threads:
            thread.join()
        if self._failed is not None:
            raise self._failed
        if self._stopped:
            raise Abandoned
        return [values[number] for number in range(len(self._works))]

    def stop(self) -> None:
        """Have them end at their next unit; from any thread."""
        self._stopped = True  # the running thread sees it, and then those that wait for it

    @property
    def shared(self) -> bool:
        """Whether others are to use the same unit before the next one."""
        return len(self._members) > 1

    def hand_on(self) -> None:
        """Let the next one run, and wait until the turn comes back; called by a member.

        Raises:
            Abandoned: They are to end.
        """
        number = _membership.number
        with self._condition:
            if self._failed is not None or self._stopped:
                raise Abandoned
            self._now = self._follower(number)
            self._condition.notify_all()
            self._wait(number)

    def _wait(self, number: int) -> None:
        while self._now != number and self._failed is None:
            self._condition.wait()
        if self._failed is not None or self._stopped:
            raise Abandoned

    def _follower(self, number: int) -> int:
        later = [member for member in self._members if member > number]
        return later[0] if later else min(self._members, default=-1)

    def _member(self, number: int, work: Callable[[], Value], values: dict[int, Value]) -> None:
        _membership.lockstep, _membership.number = self, number
        try:
            with self._condition:
                self._wait(number)
            values[number] = work()
        except Abandoned:
            pass
        except BaseException as failed:
            with self._condition:
                self._failed = self._failed or failed
        finally:
            with self._condition:
                self._members.remove(number)
                self._now = self._follower(number)
                self._condition.notify_all()


class _Membership(threading.local):
    lockstep: Lockstep[Any] | None = None
    number: int = -1


_membership = _Membership()


def lockstep_here() -> Lockstep[Any] | None:
    """The lockstep of which this thread is a member."""
    return _membership.lockstep
