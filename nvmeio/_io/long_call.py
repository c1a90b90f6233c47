"""A public call that moves many bytes: how far it is, what is logged of it, its range in a profile.

A profile sees the thread that began it. So a range lies around a public call in its caller's
thread, and around what that thread waits for; not around what our own threads do.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from nvmeio._threads.interruptible import Cancellation

if TYPE_CHECKING:
    from nvmeio.operation import Operation
    from nvmeio.progress import Progress

logger = logging.getLogger("nvmeio")

_autograd: Any = torch.autograd
_NOTHING = contextlib.nullcontext()
_DONE = {"load": "loaded", "save": "saved", "restore": "restored", "pack": "packed"}


def profiled(what: str, of: str = "") -> AbstractContextManager[object]:
    """A range ``nvmeio::what of``; 0.25 us if this thread is not profiled."""
    if not _autograd._profiler_enabled():
        return _NOTHING
    return torch.profiler.record_function(f"nvmeio::{what} {of}" if of else f"nvmeio::{what}")


class LongCall(Cancellation):
    """One load, save, restore or pack of `path`, whose progress somebody may watch.

    `finished` counts an operation that has ended well, for `InFlight`; None if nobody watches.
    """

    def __init__(self, what: str, path: Any, progress: Progress | None = None) -> None:
        super().__init__()
        self._what = what
        self._path = path
        self._progress = checked(progress)
        self._done = self._total = 0
        self._began = time.perf_counter()
        self._range: AbstractContextManager[object] = _NOTHING
        self.finished: Callable[[Operation], None] | None = None
        if progress is not None:
            self.finished = lambda operation: self.moved(operation.nbytes)

    # In the thread that moves the bytes

    def expect(self, nbytes: int) -> None:
        """Note that so many bytes more are going to be moved."""
        self._total += nbytes
        self._tell()

    def moved(self, nbytes: int, what: str | None = None) -> None:
        """Note that so many bytes more were moved; `what` they were, if that is of interest."""
        self._done += nbytes
        self._tell(what)

    def again(self) -> None:
        """Begin anew: nothing is moved, and nothing expected."""
        self._done = self._total = 0

    def _tell(self, what: str | None = None) -> None:
        if self._progress is not None:
            told = what or f"{self._what} {os.path.basename(os.fsdecode(self._path))}"
            self._progress(told, self._done, self._total)

    # In the caller's

    def __enter__(self) -> LongCall:
        self._range = profiled(self._what)
        self._range.__enter__()
        return self

    def __exit__(self, kind: object, exc: BaseException | None, traceback: object) -> None:
        self._range.__exit__(None, None, None)
        if exc is None:
            self.log(time.perf_counter() - self._began)

    def log(self, seconds: float, detail: str = "") -> None:
        completed(_DONE[self._what], self._path, self._total, seconds, detail)


def checked(progress: Progress | None) -> Progress | None:
    """Check that progress can be called, or is None; else TypeError."""
    if progress is None or callable(progress):
        return progress
    raise TypeError(
        "progress must be something to call with (what, done_bytes, total_bytes), such as "
        f"nvmeio.progress.rich_bar(); it is {progress!r:.80}"
    )


def completed(done: str, path: Any, nbytes: int, seconds: float, detail: str = "") -> None:
    """Log that something is complete, with its numbers as attributes of the record too."""
    if not logger.isEnabledFor(logging.INFO):
        return
    moved = f"{nbytes} bytes in " if nbytes else ""
    rate = f", {nbytes / max(seconds, 1e-9) / 1e9:.2f} GB/s" if nbytes else ""
    logger.info(
        "%s %s: %s%.3f s%s%s",
        done,
        os.fsdecode(path),
        moved,
        seconds,
        rate,
        f"; {detail}" if detail else "",
        extra={"nvmeio": {"done": done, "nbytes": nbytes, "seconds": seconds}},
    )
