"""``nvmeio://`` for fsspec: local files, read and written through nvmeio.

An installed nvmeio is known to fsspec by itself (its entry point is in the group ``fsspec.specs``),
so that every library that opens its files through fsspec can name them so, with no other change:

    dcp.save(state_dict, checkpoint_id="nvmeio:///data/checkpoint")
    dcp.load(state_dict, checkpoint_id="nvmeio:///data/checkpoint")

A file that is written appears under its name when it is closed, whole and durable; a file that was
there is the old one until then. `nvmeio.integrations.dcp` is faster for distributed checkpoints: it
writes tensors from where they lie, where fsspec's files get one write after another.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import warnings
from functools import partial
from typing import Any, NoReturn

import torch
from fsspec.core import get_compression  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from nvmeio import buffers
from nvmeio._io.handles import CallHandle
from nvmeio._io.inflight import WriteBehind
from nvmeio._storage.durable import sync_directory
from nvmeio._storage.replace import Replacement
from nvmeio._threads.closing import Discarding, on_error
from nvmeio.checkpoint.file_objects import FastFileReader
from nvmeio.errors import ClosedError, TransferError
from nvmeio.handle import AioHandle

PROTOCOL = "nvmeio"

# Up to here a file is written and read in one go through the page cache: a handle costs more.
_SMALL_BYTES = 1 << 20

_STAGING_BYTES = 32 << 20


class NvmeFileSystem(LocalFileSystem):  # type: ignore[misc]
    """Local files under ``nvmeio://``; names are absolute paths.

    Files opened with "rb" are read past the page cache, and those with "wb" or "xb" replace what is
    there when they are closed, durably. Anything else is `LocalFileSystem`.

    An error in the body of ``with fs.open(…)`` leaves the old file, and so does a file that is
    dropped. ``with fsspec.open(…)``, as with any file system, closes the file after an error too,
    which gives it its name: use ``fs.open`` or a transaction where that matters.

    Args:
        auto_mkdir: Make missing directories when a file is opened for writing.
        handle: Moves the bytes, and stays open; None makes one for each file that is not small.
        storage_options: As for any fsspec file system.
    """

    protocol = (PROTOCOL,)

    def __init__(
        self, auto_mkdir: bool = False, handle: AioHandle | None = None, **storage_options: Any
    ) -> None:
        super().__init__(auto_mkdir=auto_mkdir, **storage_options)
        self._handle = handle

    def __reduce__(self) -> Any:
        """A copy in another process opens handles of its own: this one's stays here."""
        if self._handle is None:
            return super().__reduce__()
        options = {**self.storage_options, "auto_mkdir": self.auto_mkdir, "handle": None}
        return partial(type(self), **options), ()

    @property
    def fsid(self) -> str:
        """The id that tells this file system's paths from those of others."""
        return PROTOCOL

    def mv(self, path1: str, path2: str, recursive: bool = True, **kwargs: Any) -> None:
        """Rename, at once and durably where both lie on one file system.

        Raises:
            TransferError: The new name could not be made durable.
        """
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        super().mv(source, target, recursive=recursive, **kwargs)
        for directory in {os.path.dirname(target), os.path.dirname(source)}:
            sync_directory(directory)

    def open(
        self, path: str, mode: str = "rb", *args: Any, compression: str | None = None, **kwargs: Any
    ) -> Any:
        """Open a file, as `_open`; text and compression are fsspec's.

        Raises:
            ValueError: A compressed file is to be written outside of a transaction: its compressor
                would be closed, and the file below it dropped.
        """
        if mode[0] in "wx" and not self._intrans and get_compression(path, compression):
            raise ValueError(
                f"fs.open({path!r}, {mode!r}, compression={compression!r}) would never close the "
                "file below its compressor, and nothing would be written: use `with fsspec.open("
                f"'{PROTOCOL}://…', {mode!r}, compression={compression!r})`, or a transaction"
            )
        return super().open(path, mode, *args, compression=compression, **kwargs)

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        **kwargs: Any,
    ) -> Any:
        path = self._strip_protocol(path)
        if mode == "rb" and os.path.isfile(path) and os.path.getsize(path) > _SMALL_BYTES:
            return _Buffered(self, path)
        if mode not in ("wb", "xb"):
            return super()._open(path, mode, block_size, autocommit=autocommit, **kwargs)
        if self.auto_mkdir:
            self.makedirs(self._parent(path), exist_ok=True)
        if mode == "xb" and os.path.lexists(path):
            raise TransferError(errno.EEXIST, operation="open", path=path)
        return _Writing(path, self._handle, autocommit)


def _opened_again(fs: NvmeFileSystem, path: str, position: int) -> Any:
    file = fs._open(path, "rb")
    file.seek(position)
    return file


class _Buffered(io.BufferedReader):
    """A file that is read through nvmeio, with what fsspec's own local ones have."""

    def __init__(self, fs: NvmeFileSystem, path: str) -> None:
        super().__init__(_Reading(path, fs._handle), _SMALL_BYTES)
        self.fs = fs
        self.path = path
        self.size = os.stat(path).st_size

    @property
    def mode(self) -> str:
        return "rb"

    def __reduce__(self) -> Any:
        """Open it again where it is unpickled, at the same position, by the same name."""
        return _opened_again, (self.fs, self.path, self.tell())


class _Reading(io.RawIOBase):
    def __init__(self, path: str, handle: AioHandle | None) -> None:
        super().__init__()
        self.name = path
        with contextlib.ExitStack() as opened:
            mine = opened.enter_context(CallHandle(handle, path)).get()
            self._reader = opened.enter_context(FastFileReader(path, handle=mine))
            self._opened = opened.pop_all()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._reader.seek(offset, whence)

    def tell(self) -> int:
        return self._reader.tell()

    def readinto(self, buffer: Any) -> int:
        return self._reader.readinto(buffer)

    def close(self) -> None:
        if not self.closed and hasattr(self, "_opened"):
            self._opened.close()
        super().close()


class _Writing(Discarding, io.RawIOBase):
    """A file that takes its name when it is closed, or at the end of a transaction.

    Like any fsspec file it has `commit` and `discard`, which a transaction calls.
    """

    def __init__(self, path: str, handle: AioHandle | None, autocommit: bool) -> None:
        super().__init__()
        self.name = path
        self._handle = handle
        self._autocommit = autocommit
        self._small = bytearray()  # all there is, until it is too much for one write
        self._stream: WriteBehind | None = None
        self._opened = contextlib.ExitStack()
        self._fd: int | None = None
        self._replacement = Replacement(path)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self.closed:
            raise ClosedError(f"{self.name} is closed; open it again")
        view = memoryview(data).cast("B")
        if self._stream is None and len(self._small) + len(view) <= _SMALL_BYTES:
            self._small += view
            return len(view)
        with on_error(self.discard):
            if self._stream is None:
                handle = self._opened.enter_context(CallHandle(self._handle, self.name)).get()
                staging = buffers.empty_aligned(_STAGING_BYTES, dtype=torch.uint8)
                self._stream = WriteBehind(handle, self._replacement.file, staging)
                self._stream.write(self._small)
                self._small.clear()
            return self._stream.write(view)

    def tell(self) -> int:
        return len(self._small) if self._stream is None else self._stream.position

    def flush(self) -> None:
        """Do nothing: the file has no name before it is closed."""

    def fileno(self) -> int:
        """A descriptor to synchronise, and not to write to: the bytes go through `write`.

        torch's checkpoint writer fsyncs each file before it closes it and, where there is no
        descriptor, all file systems of the machine.
        """
        if self.closed:
            raise ClosedError(f"{self.name} is closed; open it again")
        if self._fd is None:
            self._fd = os.open(self._replacement.temporary, os.O_RDONLY | os.O_CLOEXEC)
            self._opened.callback(os.close, self._fd)
        return self._fd

    def close(self) -> None:
        """Write the rest and, outside of a transaction, commit. Idempotent.

        On failure the old file is as it was.
        """
        if self.closed:
            return
        with on_error(self.discard):
            if self._stream is not None:
                self._stream.finish()
            else:
                self._replacement.write([memoryview(self._small)])
            self._opened.close()
            if self._autocommit:
                self._replacement.commit()
        super().close()

    def __reduce__(self) -> NoReturn:
        raise ValueError(
            f"{self.name} is open for writing, and the bytes so far are in this process: close it, "
            "and pickle its name"
        )

    def commit(self) -> None:
        """Give the file its name; for transactions. It is closed before."""
        self.close()
        self._replacement.commit()

    def discard(self) -> None:
        """Give up the written bytes; the old file is unchanged."""
        try:
            if self._stream is not None:
                self._stream.abandon()
        finally:
            self._replacement.discard()
            self._opened.close()
            super().close()

    def __del__(self, warn: Any = warnings.warn, finalizing: Any = sys.is_finalizing) -> None:
        # The one of io.IOBase closes, which would give a broken-off file its name. At the end of
        # the program modules have lost their names: what is left goes with the next save here.
        if not hasattr(self, "_replacement") or self._replacement.closed or finalizing():
            return
        try:
            if not self.closed:
                warn(
                    f"{self.name} was dropped, not closed: the file is as it was before",
                    ResourceWarning,
                    stacklevel=2,
                    source=self,
                )
        finally:  # warnings may be errors
            self.discard()
