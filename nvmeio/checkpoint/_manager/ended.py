"""That something is over, and how; waited for by anybody, also by a main thread."""

from __future__ import annotations

import _thread
import contextlib
import time
from collections import deque
from collections.abc import Callable

from nvmeio._threads.jobs import SLICE_S, unlist


class Ended:
    """That a save is over, and how; waited for on a raw lock (see `nvmeio._threads.jobs`)."""

    def __init__(self) -> None:
        self.done = False
        self.error: BaseException | None = None
        self.at = 0.0
        self._gate = _thread.allocate_lock()
        self._gate.acquire()
        self._calls: deque[Callable[[], None]] = deque()

    def set(self, error: BaseException | None = None) -> None:
        """It is over; once. Wakes and calls everybody."""
        unlist()
        self.error, self.at, self.done = error, time.perf_counter(), True
        self._gate.release()
        self._call_all()

    def wait(self, timeout: float | None) -> bool:
        """Block until it is over; False if it is not in time. An interrupt ends the waiting."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self.done:
            left = SLICE_S if until is None else min(SLICE_S, until - time.monotonic())
            if left <= 0:
                break
            if self._gate.acquire(timeout=left):
                self._gate.release()  # who waits beside this one
        return self.done

    def then(self, call: Callable[[], None]) -> None:
        """Call something once it is over, at once if it is; in whatever thread."""
        self._calls.append(call)
        if self.done:
            self._call_all()

    def _call_all(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._calls.popleft()()
