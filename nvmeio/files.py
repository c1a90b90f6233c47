"""Open files: `open`, `File`, what else can be named as a file, and whether direct I/O works."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from nvmeio._checks import NotPickled
from nvmeio._files.descriptors import MEMORY_FILE_SYSTEMS, Descriptors, open_error
from nvmeio._files.system import file_system_of
from nvmeio._pages import PAGE_BYTES
from nvmeio._threads.closing import Closing
from nvmeio.errors import ClosedError, transfer_error

_IOV_MAX = 1024  # man 2 readv

_MODES = {
    "r": os.O_RDONLY,
    "r+": os.O_RDWR,
    "rw": os.O_RDWR | os.O_CREAT,
    "w": os.O_RDWR | os.O_CREAT | os.O_TRUNC,
    "x": os.O_RDWR | os.O_CREAT | os.O_EXCL,
}


class File(NotPickled, Closing):
    """An open file that keeps its descriptors for repeated transfers; see `open`.

    Usable with any handle, from any thread. Closing it while transfers are in flight is safe:
    they finish, and the descriptors go with the last of them.
    """

    _elsewhere = (
        "keep its path, and call nvmeio.open in each process (in a dataset, on first use or "
        "in worker_init_fn)"
    )

    def __init__(self, path: str | os.PathLike[str], mode: str = "r") -> None:
        if not isinstance(mode, str):
            raise TypeError(f"mode must be a str, not {mode!r}")
        flags = _MODES.get(mode.replace("b", ""))
        if flags is None:
            raise ValueError(f"mode must be one of {', '.join(map(repr, _MODES))}, not {mode!r}")
        self._path = checked_path(path)
        self._mode = mode
        self._read_only = flags == os.O_RDONLY
        self._descriptors = Descriptors.open(self._path, flags)
        self._closed = False
        # Ways that `_core.short_transfers` has prepared for this file, by handle.
        self.ways: dict[Any, Any] = {}

    def acquire(self, user: object, writing: bool = False) -> Descriptors:
        """The descriptors, which stay open until `user` lets go of them.

        Raises:
            ClosedError: The file is closed.
            TransferError: It cannot be written.
        """
        self._check_open()
        if writing:
            self.check_writable()
        self._descriptors.hold(user)
        return self._descriptors

    def let_go(self, user: object) -> None:
        """Undo `acquire`, also one that an interrupt (Ctrl-C) kept from returning."""
        self._descriptors.let_go(user)

    def check_writable(self) -> None:
        """Raise `TransferError` (EBADF) if the file was opened for reading only."""
        if self._read_only:
            raise open_error(errno.EBADF, self._path, 'the file was opened with mode "r", not "r+"')

    def close(self) -> None:
        """Close; transfers in flight keep the descriptors until they are done. Idempotent."""
        if not self._closed:
            self._closed = True
            self.ways = {}
            self._descriptors.close()

    def __del__(self, finalizing: Any = sys.is_finalizing) -> None:
        # Descriptors are counted, so nothing can be lost here: like a path, a dropped file closes.
        # At the end of the program the kernel does it, when modules have lost their names.
        if not (getattr(self, "_closed", True) or finalizing()):
            self.close()

    @property
    def path(self) -> str:
        """The path as given."""
        return self._path

    @property
    def mode(self) -> str:
        """The mode as given."""
        return self._mode

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def alignment(self) -> int:
        """Offsets and sizes that are multiples of this many bytes go direct; 0: none do."""
        return self._descriptors.alignment.offset

    def size(self) -> int:
        """The file's size in bytes (fstat)."""
        self._check_open()
        return os.fstat(self._descriptors.any_fd()).st_size

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self._path} is closed; open it again with nvmeio.open")

    def __repr__(self) -> str:
        users = len(self._descriptors.users)
        state = "closed" if self._closed else "open"
        return f"<nvmeio.File {self._path!r} mode={self._mode!r} {state}, {users} in flight>"


def open(path: str | os.PathLike[str], mode: str = "r") -> File:
    """Open a file once for many transfers.

    Args:
        path: A regular file or a block device.
        mode: "r" read; "r+" read and write an existing file; "rw" the same, created if it is
            missing (what a path given to `AioHandle.async_pwrite` does); "w" created or emptied;
            "x" created, an error if it exists. A "b" is accepted and means nothing.

    Raises:
        TransferError: As open(2) fails, also as the matching built-in (`FileNotFoundError`, …).
        ValueError: The mode is not one of these.

    Cost: open(2) and statx(2), saved for every transfer that then uses the file.
    """
    return File(path, mode)


def acquire(
    file: str | os.PathLike[str] | int | File, user: object, writing: bool | None
) -> Descriptors:
    """The descriptors for one transfer, which stay open until `user` lets go of them.

    Args:
        file: The file that the caller named.
        user: Any hashable object that no other transfer uses.
        writing: The direction; None for calls without one (fsync).

    Raises:
        TypeError: `file` is not a path, a descriptor or a `File`.
        ClosedError: The `File` is closed.
        TransferError: It cannot be opened.
    """
    if isinstance(file, File):
        return file.acquire(user, writing is True)
    if isinstance(file, (str, os.PathLike)):
        flags = os.O_WRONLY | os.O_CREAT if writing else os.O_RDONLY
        opened = Descriptors.open(checked_path(file), flags)
    elif isinstance(file, int) and not isinstance(file, bool):
        opened = Descriptors.borrow(file, writing)
    else:
        raise TypeError(f"file must be a path, an open descriptor or an nvmeio.File, not {file!r}")
    opened.hold(user)
    opened.close()  # nobody else can name them: they go with this user
    return opened


def give_up(
    file: str | os.PathLike[str] | int | File, opened: Descriptors | None, user: object
) -> None:
    """Undo `acquire` after an error; `opened` is None where an interrupt kept it from returning.

    It is idempotent. An error of closing is dropped: the error that led here goes on.
    """
    with contextlib.suppress(OSError):
        if opened is not None:
            opened.let_go(user)
        elif isinstance(file, File):
            file.let_go(user)


@contextlib.contextmanager
def in_use(
    file: str | os.PathLike[str] | int | File, writing: bool | None = False
) -> Iterator[Descriptors]:
    """The descriptors of a file, open for the body even if it is closed; see `acquire`."""
    user, opened = object(), None
    try:
        opened = acquire(file, user, writing)
        yield opened
    except BaseException:
        give_up(file, opened, user)
        raise
    try:
        opened.let_go(user)
    except BaseException:  # Ctrl-C, before it or within: it may be done again
        give_up(file, opened, user)
        raise


def read_buffered(file: File, offset: int, nbytes: int) -> bytes:
    """A few bytes of a file, through the page cache; TransferError also if the file ends before."""
    with in_use(file) as opened, contextlib.suppress(OSError):  # met and named below
        data = os.pread(opened.buffered_fd(), nbytes, offset)
        if len(data) == nbytes:
            return data
    parts = bytearray(nbytes)  # more than 2 GiB, or a signal
    read_into(file, offset, [memoryview(parts)])
    return bytes(parts)


def read_into(file: File, offset: int, memories: Sequence[memoryview]) -> None:
    """Fill memories with the bytes that follow one another in a file, through the page cache.

    Errors as of `read_buffered`. Cost: a preadv(2) for 1024 memories.
    """
    left = [memory for memory in memories if memory.nbytes]
    nbytes = sum(memory.nbytes for memory in left)
    at = offset
    with in_use(file) as opened:
        try:
            while left:
                count = os.preadv(opened.buffered_fd(), left[:_IOV_MAX], at)
                if not count:
                    raise OSError(errno.ENODATA, "the file was cut")
                at += count
                while left and count >= left[0].nbytes:
                    count -= left.pop(0).nbytes
                if count:
                    left[0] = left[0][count:]
        except OSError as failed:
            span: Any = {"file_offset": offset, "nbytes": nbytes}
            raise transfer_error(failed, "pread", file.path, **span) from failed


def read_each(file: File, parts: Iterable[tuple[int, memoryview]]) -> None:
    """`read_into` of many parts, each at an offset of its own, with one preadv(2) for each."""
    with in_use(file) as opened:
        fd = opened.buffered_fd()
        for offset, memory in parts:
            try:
                if os.preadv(fd, [memory], offset) == memory.nbytes:
                    continue
            except OSError:  # met again and named below
                pass
            read_into(file, offset, [memory])


def checked_path(path: str | os.PathLike[str]) -> str:
    """A path as text.

    Raises:
        TypeError: It is none, or bytes.
        ValueError: No file can have that name.
    """
    name = os.fspath(path)
    if not isinstance(name, str):
        raise TypeError(f"a path must be a str, not {name!r}; os.fsdecode turns bytes into one")
    if "\0" in name:
        raise ValueError(f"file name {name!r} contains a null character")
    return name


def absolute_path(path: str | os.PathLike[str]) -> str:
    """The same from the root on, which chdir does not move; one that ends in "/" still does."""
    name = checked_path(path)
    whole = os.path.abspath(name)
    return os.path.join(whole, "") if name.endswith("/") else whole


class DirectSupport(NamedTuple):
    """Whether direct I/O works in a directory, found by doing it.

    Attributes:
        supported: A direct write and read of one block went through; on a full file system, the
            kernel says that it would.
        offset_alignment: Bytes that offsets and sizes must be a multiple of; 0 if unsupported.
        memory_alignment: Bytes that addresses must be a multiple of; 0 if unsupported.
        reason: Why not (or why untried), or "".
    """

    supported: bool
    offset_alignment: int
    memory_alignment: int
    reason: str


def probe_direct(directory: str | os.PathLike[str]) -> DirectSupport:
    """Write and read one block with O_DIRECT in a temporary file, which is removed again.

    Raises:
        OSError: The directory is missing or cannot be written.
    """
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".nvmeio-probe-") as probe:
        opened = Descriptors.open(probe.name, os.O_RDWR)
        try:
            if opened.direct_fd < 0:
                name = file_system_of(os.fstat(probe.fileno()).st_dev) or "the file system"
                in_memory = name in MEMORY_FILE_SYSTEMS
                does = "keeps files in memory" if in_memory else "refuses O_DIRECT here"
                return DirectSupport(False, 0, 0, f"{name} {does}")
            unit = max(opened.alignment.offset, PAGE_BYTES)
            with mmap.mmap(-1, unit) as block:
                os.pwritev(opened.direct_fd, [block], 0)
                os.preadv(opened.direct_fd, [block], 0)
            return DirectSupport(True, opened.alignment.offset, opened.alignment.memory, "")
        except OSError as refused:
            if refused.errno in (errno.ENOSPC, errno.EDQUOT):
                return DirectSupport(True, *opened.alignment, "untried: no space is left")
            return DirectSupport(False, 0, 0, f"a direct write failed: {refused}")
        finally:
            opened.close()
