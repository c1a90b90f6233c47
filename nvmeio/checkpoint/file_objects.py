"""File objects for `torch.save` and `torch.load` whose bytes go through nvmeio.

For code that can change no more than the file it names. `nvmeio.save` and `nvmeio.load` are faster:
they know where the storages lie, where these see one write or read after another.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import struct
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from nvmeio import buffers
from nvmeio._checks import NotPickled
from nvmeio._formats.sniff import open_file
from nvmeio._formats.torch_archives import torch_zip
from nvmeio._io.handles import new_handle
from nvmeio._io.inflight import WriteBehind
from nvmeio._storage.replace import Replacement
from nvmeio._threads.closing import Closing, Discarding, on_error
from nvmeio._threads.interruptible import run_interruptible
from nvmeio._threads.owner import OwnerThread
from nvmeio._threads.shutdown import Ending, open_owned
from nvmeio.errors import ClosedError, TransferError
from nvmeio.handle import AioHandle

BUFFER_BYTES = 32 << 20

_READ_AHEAD_BYTES = 1 << 20


class FastFileWriter(NotPickled, Discarding):
    """A file for `torch.save` that replaces `path` at once, durably, at the drive's speed.

        torch.save(obj, nvmeio.FastFileWriter(path))

        with nvmeio.FastFileWriter(path) as file:  # for all else that writes from start to end
            file.write(data)

    The bytes go to a temporary file beside `path`. It takes the name `path` when torch.save has
    written a complete archive, else when it is closed; it is durable then. An error in the body of
    ``with`` or in torch.save leaves `path` as it was, and so does a writer that is dropped before.

    Args:
        path: The file to replace; as for `nvmeio.save`.
        handle: Does the writing, and stays open; None makes one.

    Raises:
        TransferError: As for `nvmeio.save`; here, when writing, or when closing.

    Cost: one copy of every byte into 32 MiB of huge pages; torch computes the CRCs, if any.
    """

    _elsewhere = "keep its path, and write the file in one process"

    def __init__(self, path: str | os.PathLike[str], *, handle: AioHandle | None = None) -> None:
        self._archive = ArchiveWatch()
        self._failed: BaseException | None = None
        self._kept: BaseException | None = None  # a failure that was not reported yet
        self._inside = False  # a call; one that an interrupt has ended leaves it so
        # A thread of its own opens, writes, commits and gives up, one after the other: an interrupt
        # ends the waiting, and later calls wait behind the begun one.
        self._owner = OwnerThread("nvmeio-writer")
        self._parts, self._ending = open_owned(self._owner, _open_parts, self._owner, path, handle)
        self._stream, self._replacement = self._parts.stream, self._parts.replacement

    def write(self, data: Any) -> int:
        """Take any bytes; returns how many.

        Raises:
            ClosedError: The file is complete, or closed.
            TransferError: Earlier bytes could not be written. In torch.save `flush` raises it.
        """
        if self._failed is not None:
            return self._after_failure(data)
        if self._replacement.closed and not self._inside:
            raise ClosedError(f"{self._replacement.path} is complete; open another writer")
        self._enter()
        try:
            self._archive.see(data)
            written = self._stream.write(data)
        except BaseException as failed:
            self._failed = self._kept = failed
            self._ending.close()
            self._inside = False
            return self._after_failure(data)
        self._inside = False
        return written

    def _enter(self) -> None:
        """Begin a call; ClosedError after an interrupted one: nobody knows how far it came."""
        if self._inside:
            self._ending.close()
            raise ClosedError(
                f"writing {self._replacement.path} was interrupted: it is as it was before; open "
                "another writer"
            )
        self._inside = True

    def _after_failure(self, data: Any) -> int:
        """Take to nowhere what torch writes after a failure.

        Torch closes its archive then, fails at that, and raises nothing else: `flush` raises the
        failure.
        """
        assert self._failed is not None
        ours = isinstance(self._failed, TransferError) and self._archive.is_save()
        # One that interrupts may come before the name of the first record.
        if ours or (isinstance(self._failed, KeyboardInterrupt) and self._archive.is_archive()):
            return memoryview(data).nbytes
        self._kept = None
        raise self._failed

    def flush(self) -> None:
        """Commit a complete archive; torch.save calls this at its end.

        Raises:
            TransferError: As for `close`.
        """
        self._tell()
        if self._replacement.closed:
            return
        if self._archive.broken_off(self._stream.position):
            self._ending.close()
        elif self._archive.complete(self._stream.position):
            self._commit()

    def fileno(self) -> int:
        """There is none to write to: torch then hands everything to `write`."""
        raise io.UnsupportedOperation("fileno")

    def close(self) -> None:
        """Commit the written bytes: durable, and in the place of `path`. Idempotent.

        Raises:
            TransferError: It could not be written or renamed; `path` is as it was.
        """
        self._tell()
        if not self._replacement.closed:
            self._commit()
        self._inside = False

    def _tell(self) -> None:
        """Raise the failure that `write` kept to itself."""
        kept, self._kept = self._kept, None
        if kept is not None:
            raise kept

    def discard(self) -> None:
        """Give up the written bytes; `path` is unchanged. Does nothing after a commit."""
        if self._ending.asked:
            self._ending.begin()  # after an interrupt it goes on, and nobody waits again
        else:
            self._ending.close()

    def _commit(self) -> None:
        self._enter()
        try:
            self._owner.call(self._parts.finish)
        finally:
            self._ending.close()
        self._inside = False

    def __del__(self, warn: Callable[..., None] = warnings.warn) -> None:
        # `Ending` gives it up.
        if hasattr(self, "_replacement") and not (self._ending.asked or self._replacement.closed):
            warn(
                f"{self!r} was dropped, not closed: the file is as it was before",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    @property
    def closed(self) -> bool:
        """Whether it was committed or discarded."""
        return self._replacement.closed

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self._stream.position} bytes so far"
        return f"<nvmeio.FastFileWriter {self._replacement.path!r} {state}>"


class _Parts:
    """A writer's open files, changed by its thread alone; see `WriteBehind.write`."""

    def __init__(
        self,
        replacement: Replacement,
        handle: AioHandle,
        own: bool,
        run: Callable[[Callable[[], None]], None],
    ) -> None:
        staging = buffers.empty_aligned(BUFFER_BYTES, dtype=torch.uint8)
        self.replacement = replacement
        self.stream = WriteBehind(handle, replacement.file, staging, run)
        self._handle = handle
        self._own = own

    def finish(self) -> None:
        self.stream.finish()
        self.replacement.commit()

    def end(self) -> None:
        """Give back everything; uncommitted bytes are given up."""
        try:
            self.stream.abandon()
        finally:
            self.replacement.discard()
            # torch keeps a file object for good whose `write` an interrupt has ended.
            self.stream.release()
            if self._own:
                self._handle.close()


def _open_parts(
    owner: OwnerThread, path: str | os.PathLike[str], handle: AioHandle | None
) -> tuple[_Parts, Ending]:
    with contextlib.ExitStack() as undo:
        undo.callback(owner.close)
        replacement = undo.enter_context(Replacement(path))
        own = handle is None
        used = undo.enter_context(new_handle(path)) if handle is None else handle
        parts = _Parts(replacement, used, own, owner.call)
        undo.pop_all()
    return parts, Ending(owner, parts.end)


class FastFileReader(NotPickled, Closing):
    """A file for `torch.load`: large pieces straight into the caller's memory, small ones ahead.

        torch.load(nvmeio.FastFileReader(path))

    Reads from the drive, past the page cache, whatever lies there when it is opened.

    Args:
        path: The file.
        handle: Does the reading, and stays open; None makes one.

    Raises:
        TransferError: The file cannot be opened; here, or read, later.
    """

    _elsewhere = "keep its path, and make one in each process"

    def __init__(self, path: str | os.PathLike[str], *, handle: AioHandle | None = None) -> None:
        self._own = handle is None
        self._position = 0
        self._ahead = (0, b"")  # its offset, and the bytes
        # By a thread: where an interrupt comes meanwhile, `__del__` finds all of it.
        run_interruptible(lambda: self._open(path, handle))

    def _open(self, path: str | os.PathLike[str], handle: AioHandle | None) -> None:
        opened = contextlib.ExitStack()  # no Checkpointer recycles it meanwhile
        with on_error(opened.close):
            self._file = opened.enter_context(open_file(path))
            self._size = self._file.size()
            self._handle = new_handle(path) if handle is None else handle
        self._reading = opened
        weakref.finalize(self, self._reading.close)  # also as the program ends, before modules go

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As for any file."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"cannot seek to byte {base + offset}: 0 is the first")
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
            self._read_into(torch.frombuffer(view[:wanted], dtype=torch.uint8))
        elif wanted:
            view[:wanted] = self._small(wanted)
        self._position += wanted
        return wanted

    def read(self, nbytes: int = -1) -> bytes:
        """As for any file."""
        left = max(0, self._size - self._position)
        data = bytearray(left if nbytes is None or nbytes < 0 else min(nbytes, left))
        self.readinto(data)
        return bytes(data)

    def readline(self) -> bytes:
        """As for any file; files read by lines are small."""
        line = b""
        while piece := self.read(256):
            head, newline, _ = piece.partition(b"\n")
            line += head + newline
            if newline:
                self._position -= len(piece) - len(head) - 1
                break
        return line

    def _small(self, wanted: int) -> bytes:
        at, data = self._ahead
        if not 0 <= self._position - at <= len(data) - wanted:
            ahead = buffers.empty_aligned(
                min(_READ_AHEAD_BYTES, self._size - self._position), dtype=torch.uint8
            )
            self._read_into(ahead)
            at, data = self._position, ctypes.string_at(ahead.data_ptr(), ahead.numel())
            self._ahead = (at, data)
        start = self._position - at
        return data[start : start + wanted]

    def _read_into(self, memory: torch.Tensor) -> None:
        position = self._position
        run_interruptible(lambda: self._handle.sync_pread(memory, self._file, position))

    def close(self) -> None:
        """Close the file. Idempotent."""
        run_interruptible(self._close, closes=True)

    def _close(self) -> None:
        self._reading.close()
        if self._own:
            self._handle.close()

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "_reading") and not finalizing():  # else the kernel closes, and modules go
            self._close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._file.closed

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"at byte {self._position} of {self._size}"
        return f"<nvmeio.FastFileReader {self._file.path!r} {state}>"


class ArchiveWatch:
    """Knows when a complete torch archive has been written, from its first and last bytes.

    torch.save says nothing at its end but `flush`, and that after a failure too: it then closes
    the archive behind whatever was written. A failure that came while torch.save ran is being
    handled at that moment, and was not when the first bytes came; and an object that could not be
    pickled leaves an archive that does not begin with ``data.pkl``.
    """

    _HEAD_BYTES = 30 + 256
    _END64 = struct.Struct("<4sQHHIIQQQQ")
    _TAIL_BYTES = _END64.size + 20 + 22  # zip64 end record, locator, end record

    def __init__(self) -> None:
        self._head = b""
        self._tail = b""
        self._handled: BaseException | None = None
        self._begun = False

    def see(self, data: Any) -> None:
        """More bytes of it, in order."""
        view = memoryview(data).cast("B")
        if not self._begun:
            self._begun = True
            self._handled = sys.exc_info()[1]
        if len(self._head) < self._HEAD_BYTES:
            self._head += bytes(view[: self._HEAD_BYTES - len(self._head)])
        self._tail = (self._tail + bytes(view[-self._TAIL_BYTES :]))[-self._TAIL_BYTES :]

    def broken_off(self, nbytes: int) -> bool:
        """Whether torch.save has failed, and now closes the archive of `nbytes` bytes."""
        handled = sys.exc_info()[1]
        if not self._begun or handled is None:
            return False
        return handled is not self._handled or (not self.is_save() and self._ends(nbytes))

    def complete(self, nbytes: int) -> bool:
        """Whether `nbytes` bytes are all of what torch.save writes."""
        return self.is_save() and self._ends(nbytes)

    def is_archive(self) -> bool:
        """Whether it begins as a zip archive does."""
        return self._head.startswith(torch_zip.LOCAL_MAGIC)

    def is_save(self) -> bool:
        """Whether it is torch.save that writes."""
        name = self._head[30 : 30 + int.from_bytes(self._head[26:28], "little")]
        return self._head.startswith(torch_zip.LOCAL_MAGIC) and name.endswith(b"/data.pkl")

    def _ends(self, nbytes: int) -> bool:
        if len(self._tail) < self._TAIL_BYTES or self._tail[-22:-18] != torch_zip.END_MAGIC:
            return False
        magic, *_, size, offset = self._END64.unpack_from(self._tail)
        return bool(magic == torch_zip.END64_MAGIC and offset + size + self._TAIL_BYTES == nbytes)
