"""Steps that run one after another: each whatever the others fail of, or from any thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable


def do_all(
    steps: Iterable[Callable[[], object]], caught: type[BaseException] = BaseException
) -> None:
    """Do each of these, whatever the ones before failed of, and raise the first failure.

    Args:
        steps: In their order.
        caught: What does not keep the others from being done.
    """
    failure: BaseException | None = None
    for step in steps:
        try:
            step()
        except caught as failed:
            failure = failure or failed
    if failure is not None:
        raise failure


class Serial:
    """Runs short steps one after another, whichever thread they come from.

    A plain lock will not do: the steps are also called by destructors, and the garbage collector
    may run one at any moment, in a thread that is in the middle of a step. Such a call leaves its
    step to the one under way and returns; every other call returns once its step has run. Steps
    must not raise and must not wait. One that an interrupt (Ctrl-C) cuts short is run again from
    its beginning, and must be written for that.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._steps: deque[Callable[[], None]] = deque()
        self._running = False

    @property
    def was_cut_short(self) -> bool:
        """Whether interrupts left steps that nobody runs."""
        return bool(self._steps) and not self._running

    def run(self, step: Callable[[], None]) -> None:
        self._steps.append(step)
        try:
            self._run_all()
        except BaseException:  # Ctrl-C, in the middle of a step: once more
            self._run_all()
            raise

    def _run_all(self) -> None:
        with self._lock:
            if self._running:
                return
            while self._steps:
                self._running = True
                try:
                    while self._steps:
                        self._steps[0]()
                        self._steps.popleft()
                finally:
                    self._running = False
