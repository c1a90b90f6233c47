"""`Gather`, a batch of records on its way; `Prefetch`, batches ahead of the one worked on."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import CancelledError
from typing import Any

import torch

from nvmeio import _checks
from nvmeio._checks import NotPickled
from nvmeio._threads import threads
from nvmeio._threads.closing import ClosingWork
from nvmeio._threads.future import Begun
from nvmeio.engines.transfers import FileOffsets
from nvmeio.errors import ClosedError
from nvmeio.handle import AioHandle
from nvmeio.operation import Operation

_CLOSED = "this prefetch is closed: begin another one"
_CUT_SHORT = (
    "this prefetch ended with an error or an interrupt, and a batch of it may be lost: begin "
    "another one"
)


class Prefetch(NotPickled, ClosingWork):
    """Batches of records, in order, read before they are asked for.

    Made by `Records.prefetch`. An iterator with and without an event loop: ``async for`` and
    ``for``. It may be shared: each batch goes to one of the threads or tasks that ask.

    If a batch cannot be read (an index out of range, a file that was cut short, an error in the
    iterable), that raises when the batch is asked for, not before. It ends the prefetch, as an
    interrupt or a cancelled task does: what is in flight is cancelled, and asking again raises
    `ClosedError`. The batch after a lost one is never handed out.

    You may leave the loop early. Operations in flight are cancelled when the prefetch is closed (by
    ``with``, ``async with``, `close` or `aclose`, which wait for it) or dropped.

    Args:
        start: Starts reading a batch.
        batches: The numbers of the records of each batch.
        depth: How many batches are read ahead, beside the one that was handed out.
    """

    _elsewhere = "pickle the records, and begin one in each process"

    _work = "a prefetched batch"

    def __init__(
        self, start: Callable[[FileOffsets], Gather], batches: Iterable[FileOffsets], depth: int
    ) -> None:
        self._pid = os.getpid()
        self._ahead: deque[Gather | Exception] = deque()
        self._depth = _checks.integer("depth", depth, 1)
        self._start = start
        self._batches = iter(batches)
        self._exhausted = False
        self._refusal = ""  # why there are no more batches
        self._turn = threading.RLock()  # of who asks; never held while a batch is waited for

    # --- the next batch -----------------------------------------------------------------------

    def __iter__(self) -> Prefetch:
        return self

    def __next__(self) -> torch.Tensor:
        try:
            gather = self._take()
            if gather is not None:
                return gather.result()
        except BaseException:
            self._end(_CUT_SHORT)
            raise
        raise StopIteration

    def __aiter__(self) -> Prefetch:
        return self

    async def __anext__(self) -> torch.Tensor:
        try:
            gather = self._take()
            if gather is not None:
                return await gather
        except BaseException:
            self._end(_CUT_SHORT)
            raise
        raise StopAsyncIteration

    def _take(self) -> Gather | None:
        """The next batch, with others started behind it; None behind the last."""
        with self._turn:
            if self._refusal:
                raise ClosedError(self._refusal)
            self._refusal = _CUT_SHORT  # a loop that was cut in half stays so
            self._fill()
            gather = None
            if self._ahead:
                first = self._ahead.popleft()
                if isinstance(first, Exception):
                    raise first
                gather = first
                self._fill()
            self._refusal = ""
            return gather

    def _fill(self) -> None:
        while len(self._ahead) < self._depth and not self._exhausted:
            try:
                self._ahead.append(self._start(next(self._batches)))
            except StopIteration:
                self._exhausted = True
            except Exception as failed:  # it has its turn, behind the batches before it
                self._exhausted = True
                self._ahead.append(failed)

    # --- the end ------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel operations in flight, and wait for their end. Idempotent."""
        for gather in self._end(_CLOSED):
            gather.wait()
        self._ahead.clear()

    async def aclose(self) -> None:
        """`close`, awaited; a task that is cancelled meanwhile waits anyway."""
        ends = [asyncio.ensure_future(gather.operation) for gather in self._end(_CLOSED)]
        cancelled: asyncio.CancelledError | None = None
        while not all(end.done() for end in ends):
            try:
                await asyncio.wait(ends)
            except asyncio.CancelledError as again:
                cancelled = again
        for end in ends:
            if not end.cancelled():
                end.exception()  # seen
        self._ahead.clear()
        if cancelled is not None:
            raise cancelled

    def _end(self, why: str) -> list[Gather]:
        """Hand out nothing more; cancel and return the operations in flight."""
        with self._turn:
            self._refusal = self._refusal or why
            if os.getpid() != self._pid:  # in a forked child everything is the parent's
                return []
            gathers = [gather for gather in self._ahead if isinstance(gather, Gather)]
        for gather in gathers:
            gather.cancel()
        return gathers

    def __del__(self, getpid: Callable[[], int] = os.getpid) -> None:
        # By a thread: the collector may have come here from anywhere, and it is to be waited for.
        # Without one nothing is done: operations in flight finish by themselves.
        # `_ahead` is not there where __init__ was interrupted.
        gathers = [each for each in getattr(self, "_ahead", ()) if isinstance(each, Gather)]
        if gathers and getpid() == self._pid:
            with contextlib.suppress(Exception):  # the program is at its end: the handle waits
                threads.start(functools.partial(_drop, gathers), "nvmeio-prefetch", lambda _: None)

    @property
    def closed(self) -> bool:
        """Whether no more batches are handed out."""
        return bool(self._refusal)

    def __repr__(self) -> str:
        state = "closed" if self._refusal else "open"
        return f"<nvmeio.data.Prefetch depth={self._depth} {state}, {len(self._ahead)} ahead>"


def _drop(gathers: list[Gather]) -> None:
    for gather in gathers:
        gather.cancel()
    for gather in gathers:
        gather.wait()


class Gather(NotPickled, Begun[torch.Tensor]):
    """Records that are being read; the value is the tensor that holds them.

    Made by `Records.gather`. Await it, or call `result` where there is no event loop.

    Attributes:
        operation: The gather itself: bytes, ways, callbacks.
        out: The tensor to fill. Its contents are undefined before the end, and after an error.
    """

    _elsewhere = "pickle the tensor that it is awaited for"

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

        Without an event loop the call that sees the end first also finishes the operation: it
        copies into memory that is not contiguous.
        """
        return self.operation.done()

    def cancel(self) -> bool:
        """Ask for cancellation; whether there was still something to cancel."""
        return self.operation.cancel()

    def wait(self) -> None:
        """Block until it is over, whatever became of it."""
        with contextlib.suppress(CancelledError):
            self.operation.exception()

    def __repr__(self) -> str:
        return f"<nvmeio.data.Gather {self.operation!r}>"
