"""Who does the loads of a store, or its stores: its caller where that may be, else a thread.

A switch of thread waits for a core that may sleep (0.2 ms), which is as long as a drive takes for a
small block. So a caller that no interrupt can reach, and who waits anyway, does the work itself.
What the main thread asks for, and what is done in the background, a thread does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from nvmeio._threads.future import may_be_interrupted
from nvmeio._threads.owner import OwnerThread

Value = TypeVar("Value")


class StoreWorker:
    """Does one thing after the other, whoever asks.

    Args:
        name: Of its thread.
        closed: What a call after `close` is told.

    Must not refer to what owns it: it ends when that is dropped.
    """

    def __init__(self, name: str, closed: str) -> None:
        self.owner = OwnerThread(name, closed)
        self._turn = threading.Lock()  # the main thread never takes it
        self._counting = threading.Lock()
        self._asked = self._ended = 0  # of its thread, on the memory of others

    def call(self, check: Callable[[], object], work: Callable[..., Value], *args: Any) -> Value:
        """Do `work(*args)`, or have it done; an interrupt is raised when it has ended.

        Args:
            check: Raises where the store was closed meanwhile.
            work: What is done.
            args: Given to it.
        """
        if may_be_interrupted():
            self._count()
            value: Value = self.owner.call(self._in_turn, work, args, to_end=True)
            return value
        with self._turn:
            check()
            return work(*args)

    def post(
        self,
        work: Callable[..., Value],
        args: tuple[Any, ...],
        done: Callable[[Value], object],
        otherwise: Value,
    ) -> None:
        """Have `work(*args)` done in the background, and `done` called with what comes of it.

        Args:
            work: What is done.
            args: Given to it.
            done: Called by the worker's thread.
            otherwise: Given to it where `work` raises, which is logged.
        """
        self._count()
        self.owner.post(self._answer, work, args, done, otherwise)

    def _answer(
        self,
        work: Callable[..., Value],
        args: tuple[Any, ...],
        done: Callable[[Value], object],
        found: Value,
    ) -> None:
        try:
            with self._turn:
                found = work(*args)
        finally:
            try:
                done(found)  # which may ask for another turn
            finally:
                self._ended += 1

    def _count(self) -> None:
        with self._counting:
            # Where an interrupt comes next, `drain` asks for ever what it need not have asked.
            self._asked += 1

    def _in_turn(self, work: Callable[..., Value], args: tuple[Any, ...]) -> Value:
        """In its thread."""
        try:
            with self._turn:
                return work(*args)
        finally:
            self._ended += 1

    def drain(self) -> None:
        """Wait until its thread has done what it was asked before."""
        if self._asked != self._ended:
            self.owner.drain()

    def finish(self) -> None:
        """Wait until all has ended that was asked before, or is being done by its caller."""
        self.owner.call(self.rest)

    def rest(self) -> None:
        """`finish`, asked in its thread."""
        with self._turn:
            pass

    @property
    def is_here(self) -> bool:
        """Whether this is its thread."""
        return self.owner.is_here

    def close(self) -> None:
        """End its thread once it has done what it was asked before; does not wait."""
        self.owner.close()
