"""`Gather`: a batch of records on its way into memory."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from concurrent.futures import CancelledError
from typing import Any, NoReturn

import torch

from nvmeio import _checks
from nvmeio._threads.future import Begun
from nvmeio.handle import AioHandle
from nvmeio.operation import Operation


class Gather(Begun[torch.Tensor]):
    """Records that are being read; the value is the tensor that holds them.

    Made by `Records.gather`. Await it, or call `result` where there is no event loop.

    Attributes:
        operation: The gather itself: bytes, ways, callbacks.
        out: Where the records arrive; what it holds is unknown before the end, and after an error.
    """

    __slots__ = ("_handle", "operation", "out")

    def __init__(self, operation: Operation, out: torch.Tensor, handle: AioHandle) -> None:
        super().__init__()
        self.operation = operation
        self.out = out
        self._handle = handle  # stays open, though the records be dropped

    def __await__(self, thrown: BaseException | None = None) -> Generator[Any, Any, torch.Tensor]:
        yield from self.operation.__await__(thrown)
        return self.out

    def result(self, timeout: float | None = None) -> torch.Tensor:
        """Block until the records are there; `out`.

        Args:
            timeout: Seconds to wait at most; None waits for as long as it takes.

        Raises:
            RowsError: Some could not be read: the file was cut short, or the drive failed.
            concurrent.futures.CancelledError: It was cancelled.
            concurrent.futures.TimeoutError: Not done in time; it goes on.
        """
        self.operation.result(timeout)
        return self.out

    def done(self) -> bool:
        """Whether it has finished, failed, or been cancelled; does not wait for the drive.

        Where no event loop runs, whoever sees the end first does what is left to do: a copy into
        memory that is not contiguous, the comparison of ``validate=True``.
        """
        return self.operation.done()

    def cancel(self) -> bool:
        """Ask for cancellation; whether there was still something to cancel."""
        return self.operation.cancel()

    def wait(self) -> None:
        """Block until it is over, whatever became of it."""
        with contextlib.suppress(CancelledError):
            self.operation.exception()

    def __reduce__(self) -> NoReturn:
        _checks.refuse_pickling(self, "pickle the tensor that it is awaited for")

    def __repr__(self) -> str:
        return f"<nvmeio.data.Gather {self.operation!r}>"
