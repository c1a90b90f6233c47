"""Open files: which descriptors a transfer goes through, and who closes them.

A file has up to two descriptors on one inode: one with O_DIRECT for the aligned span, one without
for unaligned edges. `Descriptors` owns both and counts its users, so that closing a `File` (or
dropping a path) with transfers in flight closes nothing under the kernel's feet.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import stat
import tempfile
import threading
from collections.abc import Callable
from typing import NamedTuple, NoReturn, Protocol

from nvmeio import _checks
from nvmeio._closing import Closing
from nvmeio._mounts import file_system_of
from nvmeio._plan import PAGE_BYTES, Alignment
from nvmeio._shim import FileFacts, OwnFds, file_facts
from nvmeio.errors import ClosedError, TransferError

logger = logging.getLogger("nvmeio")

_NO_DIRECT = Alignment(0, 0)
# Files of these live in memory: their O_DIRECT, where accepted, is the page cache all the same.
_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
_MODES = {
    "r": os.O_RDONLY,
    "r+": os.O_RDWR,
    "rw": os.O_RDWR | os.O_CREAT,
    "w": os.O_RDWR | os.O_CREAT | os.O_TRUNC,
    "x": os.O_RDWR | os.O_CREAT | os.O_EXCL,
}
# What must not be repeated when the same inode is opened a second time.
_ONCE = os.O_CREAT | os.O_TRUNC | os.O_EXCL


class User(Protocol):
    """Who releases descriptors, and remembers that."""

    released: bool


class Descriptors:
    """The descriptors of one open file, closed when their last user has released them.

    Attributes:
        path: The file as the caller named it, for messages.
        direct_fd: Opened with O_DIRECT, or -1.
        alignment: What direct I/O needs here; ``(0, 0)`` without it.
        inode: Device and inode number: which file this is, whatever it was called.
    """

    __slots__ = (
        "_before_close",
        "_buffered_fd",
        "_closing",
        "_fds",
        "_flags",
        "_lock",
        "_users",
        "alignment",
        "direct_fd",
        "holders",
        "inode",
        "path",
    )

    def __init__(
        self,
        path: str,
        flags: int,
        fds: OwnFds,
        alignment: Alignment,
        facts: FileFacts,
    ) -> None:
        self.path = path
        self.inode = (facts.device, facts.inode)
        self.direct_fd = fds.direct
        self.alignment = alignment
        self._flags = flags
        self._fds = fds
        self._buffered_fd = fds.buffered
        self._users = 1
        self.holders: set[object] = set()
        self._before_close: tuple[Callable[[], None], ...] = ()
        self._lock = threading.Lock()
        self._closing = threading.RLock()  # the collector may let a holder go meanwhile

    @classmethod
    def open(cls, path: str, flags: int) -> Descriptors:
        """Open a path, with O_DIRECT where the file system takes it.

        Raises:
            TransferError: The open failed, or the path is no regular file or block device.
        """
        # O_NONBLOCK: opening a FIFO without a peer would block for ever. Regular files ignore it.
        flags |= os.O_CLOEXEC | os.O_NONBLOCK
        fds = OwnFds()
        try:
            try:
                fds.open(True, path, flags | os.O_DIRECT)
            except OSError as refused:
                if refused.errno != errno.EINVAL:
                    raise _open_error(refused.errno or errno.EIO, path) from refused
                # The refusal came after the file was created: with O_EXCL it would be in the way.
                try:
                    fds.open(False, path, flags & ~os.O_EXCL)
                except OSError as failed:
                    raise _open_error(failed.errno or errno.EIO, path) from failed
            fd = max(fds.direct, fds.buffered)
            facts = _checked_facts(fd, path)
            alignment = _NO_DIRECT if fds.direct < 0 else _alignment(fd, facts, path)
            if fds.direct >= 0 and not alignment.offset:
                # Accepted, but not for this file: one plain descriptor will do.
                fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
                fds.demote()
            return cls(path, flags, fds, alignment, facts)
        except BaseException:
            with contextlib.suppress(OSError):
                fds.close()
            raise

    @classmethod
    def borrow(cls, fd: int, writing: bool | None) -> Descriptors:
        """Duplicate (and reopen with O_DIRECT where that works) a descriptor of the caller's.

        Raises:
            TransferError: It is closed, of the wrong direction, or has no offsets (a pipe).
        """
        path = f"descriptor {fd}"
        try:
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            path = f"{os.readlink(f'/proc/self/fd/{fd}')} (descriptor {fd})"
        except (OSError, OverflowError, ValueError) as failed:
            raise _open_error(errno.EBADF, path) from failed
        access = flags & os.O_ACCMODE
        if writing is not None and access == (os.O_RDONLY if writing else os.O_WRONLY):
            direction = "writing" if writing else "reading"
            raise _open_error(errno.EBADF, path, f"the descriptor is not open for {direction}")
        facts = _checked_facts(fd, path)
        # O_APPEND would make pwrite(2) ignore its offset (man 2 pwrite, BUGS): reopen without.
        access |= os.O_CLOEXEC | os.O_NONBLOCK
        plain = not flags & (os.O_DIRECT | os.O_APPEND)
        fds = OwnFds()
        try:
            if plain:
                fds.duplicate(fd)
            _reopen(fds, True, fd, access | os.O_DIRECT)
        except OSError as refused:
            if fds.buffered < 0:
                try:
                    _reopen(fds, False, fd, access)
                except OSError:
                    raise _open_error(refused.errno or errno.EIO, path) from refused
        opened = cls(path, access, fds, _NO_DIRECT, facts)
        try:
            if fds.direct >= 0:
                opened.alignment = _alignment(fds.direct, facts, path)
                if not opened.alignment.offset:
                    opened.demote()
        except BaseException:
            with contextlib.suppress(OSError):
                opened.release()
            raise
        return opened

    def retain(self, user: User | None = None) -> Descriptors:
        """Count one more user, who remembers that it has not released them."""
        with self._lock:
            if not self._users:
                raise ClosedError(f"{self.path} is closed; open it again with nvmeio.open")
            self._users += 1
            if user is not None:
                user.released = False  # no call since the line above: both, or none
        return self

    def hold(self, holder: object) -> None:
        """As `retain`, without a lock: for who calls `let_go`, and that any number of times.

        Raises:
            ClosedError: As `retain`.
        """
        # Whoever releases last looks for holders after that: one of both sees the other.
        self.holders.add(holder)
        if not self._users:
            with contextlib.suppress(OSError):
                self.let_go(holder)  # who released last may have left the closing to this holder
            raise ClosedError(f"{self.path} is closed; open it again with nvmeio.open")

    def let_go(self, holder: object) -> None:
        """Undo `hold`; the last user closes.

        Raises:
            OSError: As `release`, and the same one whenever it is done again.
        """
        self.holders.discard(holder)
        if not self._users:
            self._close_unused()

    def release(self, user: User | None = None) -> None:
        """One user less; the last one closes.

        Args:
            user: May release it once more where an interrupt (Ctrl-C) came between, and is told of
                the same error then.

        Raises:
            OSError: Closing failed, and data may be lost.
        """
        with self._lock:
            if user is None:
                self._users -= 1
            elif not user.released:
                user.released = True  # and no call from here to the next line: it may not be cut
                self._users -= 1
        if not self._users:
            self._close_unused()

    def _close_unused(self) -> None:
        with self._lock:
            if self._users or self.holders:
                return
            # Nulled before they are closed: the number may be somebody else's right after.
            self.direct_fd = self._buffered_fd = -1
        # The last user and the last holder may both come here: the steps are through, and the
        # descriptors closed once, before either goes on.
        with self._closing:
            steps, self._before_close = self._before_close, ()
            for step in steps:
                step()
            self._fds.close()

    def before_close(self, step: Callable[[], None]) -> None:
        """Have something undone once the last user is gone, while the descriptors are open."""
        self._before_close = (*self._before_close, step)

    def buffered_fd(self) -> int:
        """The descriptor without O_DIRECT, opened at its first use.

        Raises:
            TransferError: It could not be opened.
        """
        if self._buffered_fd < 0:
            with self._lock:
                if self._buffered_fd < 0:
                    try:
                        flags = self._flags & ~_ONCE
                        self._buffered_fd = _reopen(self._fds, False, self.direct_fd, flags)
                    except OSError as failed:
                        raise _open_error(failed.errno or errno.EIO, self.path) from failed
        return self._buffered_fd

    def any_fd(self) -> int:
        """Whichever descriptor is open, for calls that concern the inode."""
        return self.direct_fd if self.direct_fd >= 0 else self._buffered_fd

    def demote(self) -> None:
        """From now on buffered: the kernel refused direct I/O that it had announced."""
        self.buffered_fd()
        self.alignment = _NO_DIRECT

    @property
    def users(self) -> int:
        """How many transfers (and files) hold this open."""
        return self._users + len(self.holders)


class File(Closing):
    """An open file that keeps its descriptors for repeated transfers; see `open`.

    Usable with any handle, from any thread. Closing it while transfers are in flight is safe:
    they finish, and the descriptors go with the last of them.
    """

    def __init__(self, path: str | os.PathLike[str], mode: str = "r") -> None:
        if not isinstance(mode, str):
            raise TypeError(f"mode must be a str, not {mode!r}")
        flags = _MODES.get(mode.replace("b", ""))
        if flags is None:
            raise ValueError(f"mode {mode!r} is not one of {', '.join(map(repr, _MODES))}")
        self._path = checked_path(path)
        self._mode = mode
        self._read_only = flags == os.O_RDONLY
        self._descriptors = Descriptors.open(self._path, flags)
        self._closed = False

    def acquire(self, writing: bool) -> Descriptors:
        """The descriptors, with one more user; release it when the transfer is done."""
        if self._closed:
            raise ClosedError(f"{self._path} is closed; open it again with nvmeio.open")
        if writing and self._read_only:
            raise _open_error(errno.EBADF, self._path, 'the file was opened with mode "r"')
        return self._descriptors.retain()

    def close(self) -> None:
        """Close; transfers in flight keep the descriptors until they are done. Idempotent."""
        if not self._closed:
            self._closed = True
            self._descriptors.release()

    def __del__(self) -> None:
        # Descriptors are counted, so nothing can be lost here: like a path, a dropped file closes.
        if not getattr(self, "_closed", True):
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
        if self._closed:
            raise ClosedError(f"{self._path} is closed; open it again with nvmeio.open")
        return os.fstat(self._descriptors.any_fd()).st_size

    def __reduce__(self) -> NoReturn:
        _checks.refuse_pickling(
            self,
            "keep its path, and call nvmeio.open in each process (in a dataset, on first "
            "use or in worker_init_fn)",
        )

    def __repr__(self) -> str:
        users = self._descriptors.users - (not self._closed)
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
        ValueError: The mode is none of these.

    Cost: open(2) and statx(2), saved for every transfer that then uses the file.
    """
    return File(path, mode)


def acquire(file: str | os.PathLike[str] | int | File, writing: bool | None) -> Descriptors:
    """The descriptors for one transfer; the caller releases them when it is done.

    Args:
        file: What the user named.
        writing: The direction; None for calls that have none (fsync).

    Raises:
        TypeError: `file` is none of path, descriptor and `File`.
        ClosedError: The `File` is closed.
        TransferError: It cannot be opened.
    """
    if isinstance(file, File):
        return file.acquire(writing is True)
    if isinstance(file, (str, os.PathLike)):
        flags = os.O_WRONLY | os.O_CREAT if writing else os.O_RDONLY
        return Descriptors.open(checked_path(file), flags)
    if isinstance(file, int) and not isinstance(file, bool):
        return Descriptors.borrow(file, writing)
    raise TypeError(f"file must be a path, an open descriptor or an nvmeio.File, not {file!r}")


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
                does = "keeps files in memory" if name in _MEMORY_FILE_SYSTEMS else "takes none"
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
            opened.release()


def _reopen(fds: OwnFds, direct: bool, fd: int, flags: int) -> int:
    # The kernel's magic link leads to the inode itself, renamed or unlinked as it may be.
    return fds.open(direct, f"/proc/self/fd/{fd}", flags)


def _open_error(code: int, path: str, detail: str = "") -> TransferError:
    return TransferError(code, operation="open", path=path, detail=detail)


def _checked_facts(fd: int, path: str) -> FileFacts:
    try:
        facts = file_facts(fd)
    except OSError as failed:
        raise _open_error(failed.errno or errno.EIO, path) from failed
    if stat.S_ISDIR(facts.mode):
        raise _open_error(errno.EISDIR, path)
    if not (stat.S_ISREG(facts.mode) or stat.S_ISBLK(facts.mode)):
        raise _open_error(errno.ESPIPE, path, "not a regular file or block device")
    return facts


# Where the kernel does not tell (before 6.1, or the file system does not say): found by trying,
# once a file system. Its number alone does not do: where it is no drive's (btrfs, overlay, tmpfs),
# the next one that is mounted may have it.
_probed: dict[tuple[int, int], Alignment] = {}


# What the kernel answers where a file system takes no direct I/O. Anything else (EIO, EMFILE, …) is
# this file's or this moment's, and says nothing of the device.
_NO_DIRECT_IO = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


def _alignment(fd: int, facts: FileFacts, path: str) -> Alignment:
    """What direct I/O needs on an open file.

    Raises:
        TransferError: It had to be tried, and failed for another reason than that there is none.
    """
    if facts.offset_alignment is not None and facts.memory_alignment is not None:
        return Alignment(facts.offset_alignment, facts.memory_alignment)
    file_system = facts.device, os.fstatvfs(fd).f_fsid
    known = _probed.get(file_system)
    if known is not None:
        return known
    try:
        readable = OwnFds()
        _reopen(readable, True, fd, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except PermissionError:
        return Alignment(PAGE_BYTES, PAGE_BYTES)  # unreadable: assume; EINVAL demotes later
    except OSError as failed:
        if failed.errno in _NO_DIRECT_IO:
            return _NO_DIRECT
        raise _open_error(failed.errno or errno.EIO, path, "opened again to try it") from failed
    try:
        known = _probed[file_system] = _try_direct_read(readable.direct, facts.device)
    except OSError as failed:
        raise _open_error(failed.errno or errno.EIO, path, "a direct read was tried") from failed
    finally:
        readable.close()
    return known


def _try_direct_read(fd: int, device: int) -> Alignment:
    if file_system_of(device) in _MEMORY_FILE_SYSTEMS:
        return _NO_DIRECT
    with mmap.mmap(-1, PAGE_BYTES) as page:
        try:
            os.preadv(fd, [page], 0)
        except OSError as refused:
            if refused.errno not in _NO_DIRECT_IO:
                raise
            logger.info("no direct I/O on device %x: %s", device, refused)
            return _NO_DIRECT
    return Alignment(PAGE_BYTES, PAGE_BYTES)
