"""Room for files, and what makes bytes and names survive a loss of power.

Source: man 2 fallocate, man 2 fsync (NOTES, on directories), man 2 renameat2.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os

from nvmeio.errors import TransferError
from nvmeio.files import File

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_libc.renameat2.argtypes = [
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_uint,
]
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2

# The kernel or the file system cannot allocate ahead: the writes will tell what does not fit.
_CANNOT_ALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM)


def allocate(fd: int, nbytes: int, path: str) -> bool:
    """Allocate room for a file's `nbytes` bytes: a full disk is known before anything is written.

    Returns:
        False where the file system cannot allocate ahead; the file is as it was then.

    Raises:
        TransferError: There is no such room (ENOSPC, EDQUOT), or the file may not become so large
            (EFBIG). The file is as long as it was: what ext4 had found for it till then is free.
    """
    if not nbytes:
        return True
    before = os.fstat(fd).st_size
    while _libc.fallocate(fd, 0, 0, nbytes) != 0:
        code = ctypes.get_errno()
        if code in _CANNOT_ALLOCATE:
            return False
        if code != errno.EINTR:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, before)
            raise TransferError(code, operation="fallocate", path=path, nbytes=nbytes)
    return True


def reserve(fd: int, nbytes: int, path: str) -> None:
    """Give a file at least this size, and blocks where the file system can allocate ahead.

    Raises:
        TransferError: As `allocate`.
    """
    if os.fstat(fd).st_size >= nbytes or allocate(fd, nbytes, path):
        return
    try:
        os.ftruncate(fd, nbytes)
    except OSError as failed:
        raise TransferError(
            failed.errno or errno.EIO, operation="truncate", path=path, nbytes=nbytes
        ) from failed


def free_bytes(path: str | os.PathLike[str]) -> tuple[int, int]:
    """What is free for this user on the file system of a path, and how large that is."""
    facts = os.statvfs(path)
    return facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize


def sync_directory(directory: str | os.PathLike[str]) -> None:
    """Make the names in a directory durable.

    Raises:
        TransferError: The kernel could not; a file system that has no such thing (EINVAL) is fine.
    """
    _sync(directory, os.O_DIRECTORY)


def sync_file(path: str | os.PathLike[str]) -> None:
    """Make a file's bytes durable, whoever wrote them.

    Raises:
        TransferError: The kernel could not.
    """
    _sync(path, os.O_NOFOLLOW)


def _sync(path: str | os.PathLike[str], flags: int) -> None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as failed:
        if failed.errno != errno.EINVAL or not flags & os.O_DIRECTORY:
            raise TransferError(
                failed.errno or errno.EIO, operation="fsync", path=os.fspath(path)
            ) from failed


def rename(old: str | os.PathLike[str], new: str | os.PathLike[str]) -> None:
    """Give a file or a directory another name on its file system, at once and durably.

    What has the new name is replaced: a file by a file, an empty directory by a directory.

    Raises:
        OSError: The kernel could not, and all is as it was.
        TransferError: The name is given, but it is not known to be durable.
    """
    os.rename(old, new)
    sync_directory(os.path.dirname(os.path.abspath(new)))


def sync_data(file: File) -> None:
    """Make an open file's bytes durable (fdatasync).

    Raises:
        TransferError: The kernel could not.
    """
    opened = file.acquire(True)
    try:
        os.fdatasync(opened.any_fd())
    except OSError as failed:
        raise TransferError(
            failed.errno or errno.EIO, operation="fsync", path=file.path
        ) from failed
    finally:
        opened.release()


def exchange(one: str, other: str) -> None:
    """Let two paths change places, at once.

    Raises:
        OSError: The kernel could not; both are as they were.
    """
    names = os.fsencode(os.path.abspath(one)), os.fsencode(os.path.abspath(other))
    if _libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), one)


def write_all(fd: int, data: bytes | bytearray) -> None:
    """Write all of `data` at the file's position.

    Raises:
        OSError: As write(2) fails.
    """
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
