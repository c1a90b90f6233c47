"""What the core knows of an operation; `operation.Operation` is the face that the user has of it.

States: pending → finished | failed | cancelled, once. It keeps storage and descriptors alive until
the kernel has reported, whoever else lets go of them.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable
from typing import Any

from nvmeio._plan import Plan
from nvmeio._rows import RowPlaces
from nvmeio._tensor import Memory
from nvmeio.engines.base import CompletionQueue, EngineError, Opcode, Outcome, Request
from nvmeio.errors import ShortTransferError, TransferError
from nvmeio.files import Descriptors

NAMES = {
    Opcode.READ: "pread",
    Opcode.WRITE: "pwrite",
    Opcode.FSYNC: "fsync",
    Opcode.FDATASYNC: "fsync",
}
ROWS_NAMES = {Opcode.READ: "gather", Opcode.WRITE: "scatter"}
_NOTHING = Outcome(0, 0, 0, 0, 0)


class Record:
    """One operation of a core's.

    Args:
        token: Its name in completion queues.
        opcode: What it does.
        memory: What it moves; None for an fsync.
        path: The file, as the caller named it.
        file_offset: Where in the file it begins, in bytes.
        nbytes: How many bytes it moves.
        check: Runs after success, off the event loop.
        places: Of a gather or scatter: where its rows lie.
    """

    __slots__ = (
        "callbacks",
        "check",
        "claimed",
        "error",
        "file_offset",
        "gates",
        "home",
        "memory",
        "nbytes",
        "opcode",
        "opened",
        "path",
        "places",
        "plan",
        "request",
        "rows",
        "state",
        "token",
        "waiters",
    )

    def __init__(
        self,
        token: int,
        opcode: Opcode,
        memory: Memory | None,
        path: str,
        file_offset: int,
        nbytes: int,
        check: Callable[[], None] | None = None,
        places: RowPlaces | None = None,
    ) -> None:
        self.token = token
        self.opcode = opcode
        self.memory = memory
        self.path = path
        self.file_offset = file_offset
        self.nbytes = nbytes
        self.check = check
        self.places = places
        self.rows = None if places is None else places.rows
        self.opened: Descriptors | None = None
        self.plan: Plan | None = None
        self.request: Request | None = None
        self.home: CompletionQueue | None = None  # where its end is reported
        self.state = "pending"
        self.claimed = 0  # the thread that concludes it, or HANDED_ON
        self.error: BaseException | None = None
        # Who is told of the end: event loops, threads (by releasing a lock), anybody.
        self.waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] | None = None
        self.gates: list[threading.Lock] | None = None
        self.callbacks: list[Callable[[], object]] | None = None

    def __repr__(self) -> str:
        span = f" [{self.file_offset}, {self.file_offset + self.nbytes})" if self.nbytes else ""
        if self.rows is not None:
            span = f" {self.rows.number} rows of {self.rows.row_bytes} bytes"
        return f"<{self.name} {self.path}{span} {self.state}>"

    @property
    def name(self) -> str:
        """What the operation is called."""
        return (NAMES if self.rows is None else ROWS_NAMES)[self.opcode]

    def writes_to(self, inode: tuple[int, int]) -> bool:
        """Whether it writes to this file."""
        opened = self.opened
        return self.opcode is Opcode.WRITE and opened is not None and opened.inode == inode

    def outcome(self) -> Outcome:
        """What the engine tells of it, once the kernel is done."""
        return _NOTHING if self.request is None else self.request.outcome()

    def failure(self) -> BaseException | None:
        """The error that the outcome stands for."""
        outcome = self.outcome()
        code = outcome.error
        if not code and outcome.transferred == self.nbytes:
            return None
        about = self._about(outcome.transferred)
        if isinstance(outcome.cause, EngineError):
            return outcome.cause.with_context(**about)
        if outcome.cause is not None:
            return outcome.cause
        if code:
            return TransferError(code, **about)
        ends = self.file_offset + outcome.transferred
        detail = (
            f"the file ends at byte {ends}, the tensor wants bytes up to "
            f"{self.file_offset + self.nbytes}"
            if outcome.transferred
            else "the file ends before the span; nothing could be read"
        )
        return ShortTransferError(errno.ENODATA, detail=detail, **about)

    def last_steps(self) -> None:
        """What follows a transfer that went well, and may take long."""
        memory, check = self.memory, self.check
        if memory is not None and memory.copy_back is not None:
            try:
                memory.copy_back()
            except OSError as failed:
                detail = failed.strerror or ""
                about = self._about(0)
                raise TransferError(failed.errno or errno.EIO, detail=detail, **about) from failed
        if check is not None:
            check()

    def sync_here(self) -> None:
        """fsync(2) in this thread, where the kernel has none for AIO."""
        assert self.opened is not None
        fd = self.opened.any_fd()
        try:
            (os.fsync if self.opcode is Opcode.FSYNC else os.fdatasync)(fd)
        except OSError as failed:
            code = failed.errno or errno.EIO
            raise TransferError(code, operation="fsync", path=self.path) from failed

    def let_go(self) -> TransferError | None:
        """Give memory and file back; the error of closing the file, if there is one."""
        memory, places, opened = self.memory, self.places, self.opened
        if memory is not None:
            memory.end()
        if places is not None:
            places.end()
        self.memory = self.places = self.opened = self.plan = self.check = None
        if opened is not None:
            try:
                opened.release()
            except OSError as failed:  # NFS and friends report lost writes here (man 2 close)
                about = {**self._about(self.outcome().transferred), "operation": "close"}
                return TransferError(failed.errno or errno.EIO, **about)
        return None

    def _about(self, transferred: int) -> dict[str, Any]:
        return {
            "operation": self.name,
            "path": self.path,
            "file_offset": self.file_offset,
            "nbytes": self.nbytes,
            "transferred": transferred,
        }
