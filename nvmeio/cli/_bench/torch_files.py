"""File objects for `torch.save` and `torch.load` whose bytes go through nvmeio."""

from __future__ import annotations

import ctypes
import io
import os
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

import nvmeio
from nvmeio._plan import PAGE_BYTES
from nvmeio.cli._scratch import buffer_of

_READ_AHEAD_BYTES = 1 << 20


class Writer:
    """Takes what is written into one half of a buffer while the other half goes to the file.

    Args:
        handle: Does the writing; stays open.
        path: Replaced.
        staging: A CPU byte tensor.
    """

    def __init__(self, handle: nvmeio.AioHandle, path: Path, staging: torch.Tensor) -> None:
        # Whole pages, so that every drain but the last begins and ends where direct I/O can.
        half = max(staging.numel() // 2 // PAGE_BYTES * PAGE_BYTES, 1)
        self._halves = [staging[:half], staging[half : 2 * half]]
        self._views = [buffer_of(part) for part in self._halves]
        self._pending: list[nvmeio.Operation | None] = [None, None]
        self._now = 0
        self._filled = 0
        self._offset = 0
        self._handle = handle
        self._file = nvmeio.open(path, "w")

    def write(self, data: Any) -> int:
        """Takes any bytes; returns how many."""
        taken = memoryview(data).cast("B")
        done = 0
        while done < len(taken):
            view = self._views[self._now]
            step = min(len(taken) - done, len(view) - self._filled)
            view[self._filled : self._filled + step] = taken[done : done + step]
            self._filled += step
            done += step
            if self._filled == len(view):
                self._drain()
        return done

    def flush(self) -> None:
        """Torch calls it before the end; what is in the buffer can wait."""

    def fileno(self) -> int:
        """There is none to write to: torch then hands everything to `write`."""
        raise io.UnsupportedOperation("fileno")

    def _drain(self) -> None:
        half = self._halves[self._now][: self._filled]
        self._pending[self._now] = self._handle.async_pwrite(half, self._file, self._offset)
        self._offset += self._filled
        self._filled = 0
        self._now = 1 - self._now
        self._settle(self._now)

    def _settle(self, which: int) -> None:
        operation, self._pending[which] = self._pending[which], None
        if operation is not None:
            operation.result()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if exc is None and self._filled:
                self._drain()
            for which in (0, 1):
                self._settle(which)
        finally:
            self._file.close()


class Reader:
    """Reads large pieces straight into the caller's memory, small ones ahead.

    Args:
        handle: Does the reading; stays open.
        path: The file.
    """

    def __init__(self, handle: nvmeio.AioHandle, path: Path) -> None:
        self._handle = handle
        self._size = path.stat().st_size
        self._file = nvmeio.open(path, "r")
        self._position = 0
        self._ahead = b""
        self._ahead_at = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As for any file."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """As for any file."""
        return self._position

    def readinto(self, buffer: Any) -> int:
        """As for any file."""
        view = memoryview(buffer).cast("B")
        wanted = max(0, min(len(view), self._size - self._position))
        if wanted >= _READ_AHEAD_BYTES:
            into = torch.frombuffer(view[:wanted], dtype=torch.uint8)
            self._handle.sync_pread(into, self._file, self._position)
        elif wanted:
            view[:wanted] = self._small(wanted)
        self._position += wanted
        return wanted

    def read(self, nbytes: int = -1) -> bytes:
        """As for any file."""
        left = max(0, self._size - self._position)
        data = bytearray(left if nbytes < 0 else min(nbytes, left))
        self.readinto(data)
        return bytes(data)

    def readline(self) -> bytes:
        """As for any file; what is read by lines is small."""
        line = b""
        while piece := self.read(256):
            head, newline, _ = piece.partition(b"\n")
            line += head + newline
            if newline:
                self._position -= len(piece) - len(head) - 1
                break
        return line

    def _small(self, wanted: int) -> bytes:
        start = self._position - self._ahead_at
        if not 0 <= start <= len(self._ahead) - wanted:
            ahead = nvmeio.empty_aligned(
                min(_READ_AHEAD_BYTES, self._size - self._position), dtype=torch.uint8
            )
            self._handle.sync_pread(ahead, self._file, self._position)
            self._ahead = ctypes.string_at(ahead.data_ptr(), ahead.numel())
            self._ahead_at = self._position
            start = 0
        return self._ahead[start : start + wanted]

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()
