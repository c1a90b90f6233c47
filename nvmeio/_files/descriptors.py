"""The descriptors of a transfer: the needs of direct I/O, and the time to close them.

A file has up to two on one inode: one with O_DIRECT for the aligned span, one without for unaligned
edges. `Descriptors` owns both and knows its users, so that closing a `File` (or dropping a path)
with transfers in flight closes nothing under the kernel's feet.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import stat
import threading
from collections.abc import Callable
from typing import NamedTuple

from nvmeio._bindings import FileFacts, OwnFds, file_facts
from nvmeio._files.system import file_system_of
from nvmeio._pages import PAGE_BYTES
from nvmeio.errors import ClosedError, TransferError, errno_of, naming, transfer_error

logger = logging.getLogger("nvmeio")


class Alignment(NamedTuple):
    """The alignment of direct I/O on a file, in bytes; ``Alignment(0, 0)`` where there is none."""

    offset: int
    memory: int


NO_DIRECT = Alignment(0, 0)
# Files of these live in memory: their O_DIRECT, where accepted, is the page cache anyway.
MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
# The kernel's errors if a file system takes no direct I/O. Anything else (EIO, EMFILE, …) is
# this file's or this moment's, and says nothing of the device.
_REFUSALS = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)

# If the kernel does not tell (before 6.1, or the file system does not say), a trial decides, once a
# file system. The device number alone does not suffice: if it is not a drive's (btrfs, overlay,
# tmpfs), the next one that is mounted may have it.
_probed: dict[tuple[int, int], Alignment] = {}

# Flags that must not be given when the same inode is opened a second time.
_ONCE = os.O_CREAT | os.O_TRUNC | os.O_EXCL


class Descriptors:
    """The descriptors of one open file, closed when their last user has let go of them.

    A user is any hashable object. Until `close`, more users may come; those that are there keep the
    descriptors open beyond it.

    `path` is the caller's, for messages. `direct_fd` is -1 if the file takes no direct I/O, and
    `alignment` is ``(0, 0)`` then. `inode` is device and inode number.
    """

    def __init__(
        self, path: str, flags: int, fds: OwnFds, alignment: Alignment, facts: FileFacts
    ) -> None:
        self.path = path
        self.inode = (facts.device, facts.inode)
        self.direct_fd = fds.direct
        self.alignment = alignment
        self._flags = flags
        self._fds = fds
        self._buffered_fd = fds.buffered
        self.users: set[object] = set()
        self.is_open = True
        self._before_close: tuple[Callable[[], None], ...] = ()
        self._lock = threading.RLock()  # the collector may let a holder go meanwhile

    @classmethod
    def open(cls, path: str, flags: int) -> Descriptors:
        """Open a regular file or block device, with O_DIRECT if the file system takes it."""
        # O_NONBLOCK: opening a FIFO without a peer would block forever. Regular files ignore it.
        flags |= os.O_CLOEXEC | os.O_NONBLOCK
        fds = OwnFds()
        try:
            direct = True
            try:
                fd = fds.open(True, path, flags | os.O_DIRECT)
            except OSError as refused:
                if refused.errno != errno.EINVAL:
                    taken = refused.errno == errno.EEXIST and os.path.isdir(path)
                    code = errno.EISDIR if taken else errno_of(refused)
                    raise open_error(code, path) from refused
                # The refusal came after the file was created: with O_EXCL it would be in the way.
                direct = False
                with naming("open", path):
                    fd = fds.open(False, path, flags & ~os.O_EXCL)
            facts = _checked_facts(fd, path)
            if direct:
                alignment = alignment_of(fd, facts, path)
                if alignment.offset:
                    return cls(path, flags, fds, alignment, facts)
                # Accepted, but not for this file: one plain descriptor will do.
                fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
                fds.demote()
            return cls(path, flags, fds, NO_DIRECT, facts)
        except BaseException:
            with contextlib.suppress(OSError):
                fds.close()
            raise

    @classmethod
    def borrow(cls, fd: int, writing: bool | None) -> Descriptors:
        """Duplicate (and reopen with O_DIRECT if that works) a descriptor of the caller's.

        Raises TransferError if it is closed, of the wrong direction, or has no offsets (a pipe).
        """
        path = f"descriptor {fd}"
        try:
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            path = f"{os.readlink(f'/proc/self/fd/{fd}')} (descriptor {fd})"
        except (OSError, OverflowError, ValueError) as failed:
            raise open_error(errno.EBADF, path) from failed
        access = flags & os.O_ACCMODE
        if writing is not None and access == (os.O_RDONLY if writing else os.O_WRONLY):
            direction = "writing" if writing else "reading"
            raise open_error(errno.EBADF, path, f"the descriptor is not open for {direction}")
        facts = _checked_facts(fd, path)
        # O_APPEND would make pwrite(2) ignore its offset (man 2 pwrite, BUGS): reopen without.
        access |= os.O_CLOEXEC | os.O_NONBLOCK
        plain = not flags & (os.O_DIRECT | os.O_APPEND)
        fds = OwnFds()
        try:
            if plain:
                fds.duplicate(fd)
            fds.reopen(True, fd, access | os.O_DIRECT)
        except OSError as refused:
            if fds.buffered < 0:
                try:
                    fds.reopen(False, fd, access)
                except OSError:
                    raise open_error(errno_of(refused), path) from refused
        opened = cls(path, access, fds, NO_DIRECT, facts)
        try:
            if fds.direct >= 0:
                opened.alignment = alignment_of(fds.direct, facts, path)
                if not opened.alignment.offset:
                    opened.demote()
        except BaseException:
            with contextlib.suppress(OSError):
                opened.close()
            raise
        return opened

    def hold(self, user: object) -> None:
        """Add a user; ClosedError if the file was closed.

        It takes no lock. An interrupt (Ctrl-C) may come anywhere: `let_go` undoes it.
        """
        # First add, then look: `close` first marks the file and then looks for users. So at least
        # one of the two sees the other.
        self.users.add(user)
        if not self.is_open:
            with contextlib.suppress(OSError):
                self.let_go(user)  # whoever closed may have left the descriptors to this user
            raise ClosedError(f"{self.path} is closed; open it again with nvmeio.open")

    def share(self, user: object) -> None:
        """Add a user beside one who holds the descriptors meanwhile; also after `close`."""
        self.users.add(user)

    def let_go(self, user: object) -> None:
        """Remove a user; the last one of a closed file closes the descriptors.

        It may be called any number of times. TransferError: closing failed, data may be lost; each
        call raises the same error.
        """
        self.users.discard(user)
        if not (self.is_open or self.users):
            self._close_unused()

    def close(self) -> None:
        """Refuse further users, and close the descriptors if there are none. Raises as `let_go`."""
        self.is_open = False
        if not self.users:
            self._close_unused()

    def _close_unused(self) -> None:
        with self._lock:
            if self.is_open or self.users:
                return
            # Nulled before they are closed: the number may be somebody else's right after.
            self.direct_fd = self._buffered_fd = -1
            # Two threads may both come here: the steps are through, and the descriptors closed
            # once, before either goes on.
            steps, self._before_close = self._before_close, ()
            for step in steps:
                step()
            try:
                self._fds.close()
            except OSError as failed:
                raise transfer_error(failed, "close", self.path) from failed

    def before_close(self, step: Callable[[], None]) -> None:
        """Call `step` once the last user is gone, while the descriptors are open."""
        self._before_close = (*self._before_close, step)

    def buffered_fd(self) -> int:
        """The descriptor without O_DIRECT, opened at its first use."""
        if self._buffered_fd < 0:
            with self._lock:
                if self._buffered_fd < 0:
                    with naming("open", self.path):
                        flags = self._flags & ~_ONCE
                        self._buffered_fd = self._fds.reopen(False, self.direct_fd, flags)
        return self._buffered_fd

    def any_fd(self) -> int:
        """Whichever descriptor is open, for calls that concern the inode."""
        return self.direct_fd if self.direct_fd >= 0 else self._buffered_fd

    def demote(self) -> None:
        """From now on buffered: the kernel refused direct I/O that it had announced."""
        self.buffered_fd()
        self.alignment = NO_DIRECT


def _checked_facts(fd: int, path: str) -> FileFacts:
    with naming("open", path):
        facts = file_facts(fd)
    if stat.S_ISDIR(facts.mode):
        raise open_error(errno.EISDIR, path)
    if not (stat.S_ISREG(facts.mode) or stat.S_ISBLK(facts.mode)):
        raise open_error(errno.ESPIPE, path, "not a regular file or block device")
    return facts


def open_error(code: int, path: str, detail: str = "") -> TransferError:
    return TransferError(code, operation="open", path=path, detail=detail)


def alignment_of(fd: int, facts: FileFacts, path: str) -> Alignment:
    """The needs of direct I/O on an open file.

    Raises TransferError if it had to be tried, and failed otherwise than by being refused.
    """
    if facts.offset_alignment is not None and facts.memory_alignment is not None:
        return Alignment(facts.offset_alignment, facts.memory_alignment)
    file_system = facts.device, os.fstatvfs(fd).f_fsid
    known = _probed.get(file_system)
    if known is not None:
        return known
    try:
        readable = OwnFds()
        readable.reopen(True, fd, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except PermissionError:
        return Alignment(PAGE_BYTES, PAGE_BYTES)  # unreadable: assume; EINVAL demotes later
    except OSError as failed:
        if failed.errno in _REFUSALS:
            return NO_DIRECT
        raise open_error(errno_of(failed), path, "opened again to try it") from failed
    try:
        known = _probed[file_system] = _try_direct_read(readable.direct, facts.device)
    except OSError as failed:
        raise open_error(errno_of(failed), path, "a direct read was tried") from failed
    finally:
        readable.close()
    return known


def _try_direct_read(fd: int, device: int) -> Alignment:
    if file_system_of(device) in MEMORY_FILE_SYSTEMS:
        return NO_DIRECT
    with mmap.mmap(-1, PAGE_BYTES) as page:
        try:
            os.preadv(fd, [page], 0)
        except OSError as refused:
            if refused.errno not in _REFUSALS:
                raise
            logger.info("no direct I/O on device %x: %s", device, refused)
            return NO_DIRECT
    return Alignment(PAGE_BYTES, PAGE_BYTES)
