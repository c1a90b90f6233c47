"""Operations in flight: a bounded number, first in first out, cancelled as one."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from nvmeio.operation import Operation

# Enough for the queue of a lane (128 MiB by default) and its refill.
FLIGHT_BYTES = 512 << 20
FLIGHT_OPERATIONS = 256

Tag = TypeVar("Tag")


class Cancelled(Exception):
    """`Flight.cancel` was called; whoever called it knows."""


class Flight(Generic[Tag]):
    """The operations of one load or save, each with what its owner wants to know of it.

    One thread starts and finishes; `cancel` alone may come from another.

    Args:
        most_bytes: What may be in flight at once.
        finished: Called with each operation that ended well, in the order they were started.
    """

    def __init__(
        self,
        most_bytes: int = FLIGHT_BYTES,
        finished: Callable[[Operation], None] | None = None,
    ) -> None:
        self._most_bytes = most_bytes
        self._finished = finished
        self._flying: deque[tuple[Operation, Tag]] = deque()
        self._nbytes = 0
        self._lock = threading.Lock()  # of _flying, against `cancel`
        self._stopping = False

    def start(self, begin: Callable[[], Operation], tag: Tag) -> None:
        """Begin an operation.

        Raises:
            Cancelled: `cancel` was called; nothing was begun.
        """
        with self._lock:
            if self._stopping:
                raise Cancelled
            operation = begin()
            self._flying.append((operation, tag))
        self._nbytes += operation.nbytes

    def is_full(self, nbytes: int) -> bool:
        """Whether something must finish before so many bytes more."""
        return bool(self._flying) and (
            self._nbytes + nbytes > self._most_bytes or len(self._flying) >= FLIGHT_OPERATIONS
        )

    def first(self) -> Tag:
        """What goes with the operation that was started first."""
        return self._flying[0][1]

    def finish_first(self) -> None:
        """Wait for the operation that was started first.

        Raises:
            TransferError: It failed; it stays the first, for `first` to tell which it was.
            Cancelled: It was cancelled.
        """
        operation, _ = self._flying[0]
        try:
            operation.result()
        except concurrent.futures.CancelledError:
            raise Cancelled from None
        with self._lock:
            self._flying.popleft()
        self._nbytes -= operation.nbytes
        if self._finished is not None:
            self._finished(operation)

    def cancel(self) -> None:
        """Begin no more, and end soon what has begun; from any thread."""
        with self._lock:
            self._stopping = True
            for operation, _ in self._flying:
                operation.cancel()

    def stop(self) -> None:
        """Cancel, and wait until nothing is in flight."""
        self.cancel()
        while self._flying:
            with contextlib.suppress(concurrent.futures.CancelledError):
                self._flying[0][0].exception()
            with self._lock:
                self._flying.popleft()

    def __len__(self) -> int:
        return len(self._flying)
