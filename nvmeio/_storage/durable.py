"""Room for files, and what makes bytes and names survive a loss of power.

A directory that somebody names and that does not exist is made, one level. One that is missing
above it is refused: mostly a name is misspelt then, or a drive is not mounted, and the data would
fill the system's disk. Replacements for a part of another library (DCP's writer, Lightning's
plugins, transformers' Trainer, fsspec) make those above as well, as that library does.

Source: man 2 fallocate, man 2 fsync (NOTES, on directories), man 2 renameat2.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
from collections.abc import Callable, Sequence

from nvmeio import files
from nvmeio._threads.closing import opened
from nvmeio._threads.interruptible import run_interruptible
from nvmeio.errors import TransferError, naming, transfer_error
from nvmeio.files import File

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_PLACE = (ctypes.c_int, ctypes.c_char_p)
_libc.renameat2.argtypes = [*_PLACE, *_PLACE, ctypes.c_uint]
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_IOV_MAX = 1024  # parts of one writev

# The kernel, the file system or a sandbox lacks the feature. If room is not allocated ahead, the
# writes report that it is missing.
_CANNOT = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM)


def allocate(fd: int, nbytes: int, path: str) -> bool:
    """Allocate room for a file's `nbytes` bytes: a full disk is known before anything is written.

    False if the file system cannot allocate ahead. Raises TransferError if there is no room
    (ENOSPC, EDQUOT), or the file may not become so large (EFBIG). Then the file is as long as it
    was: what ext4 had found for it till then is free.
    """
    if not nbytes:
        return True
    before = os.fstat(fd).st_size
    while _libc.fallocate(fd, 0, 0, nbytes) != 0:
        code = ctypes.get_errno()
        if code in _CANNOT:
            return False
        if code != errno.EINTR:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, before)
            raise TransferError(code, operation="fallocate", path=path, nbytes=nbytes)
    return True


def reserve(fd: int, nbytes: int, path: str) -> None:
    """Give a file at least this size, and blocks if the file system can allocate ahead.

    Raises as `allocate`.
    """
    if os.fstat(fd).st_size >= nbytes or allocate(fd, nbytes, path):
        return
    try:
        os.ftruncate(fd, nbytes)
    except OSError as failed:
        raise transfer_error(failed, "truncate", path, nbytes=nbytes) from failed


def free_bytes(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Free bytes for this user on the file system of a path, and its size."""
    facts = os.statvfs(path)
    return facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize


def sync_directory(directory: str | os.PathLike[str]) -> None:
    """Make the names in a directory durable; one on a file system without that (EINVAL) is fine."""
    _sync(directory, os.O_DIRECTORY)


def sync_file(path: str | os.PathLike[str]) -> None:
    """Make a file's bytes durable, whichever process wrote them."""
    _sync(path, os.O_NOFOLLOW)


def _sync(path: str | os.PathLike[str], flags: int) -> None:
    try:
        run_interruptible(lambda: _open_and_sync(path, flags))
    except OSError as failed:
        if failed.errno != errno.EINVAL or not flags & os.O_DIRECTORY:
            raise transfer_error(failed, "fsync", path) from failed


def _open_and_sync(path: str | os.PathLike[str], flags: int) -> None:
    with opened(path, os.O_RDONLY | flags) as fd:
        os.fsync(fd)


def rename(old: str | os.PathLike[str], new: str | os.PathLike[str]) -> None:
    """Give a file or a directory another name on its file system, at once and durably.

    The owner of the new name is replaced: a file by a file, an empty directory by a directory.

    Raises:
        OSError: The kernel could not, and all is as it was.
        TransferError: The name is given, but it is not known to be durable.
    """
    os.rename(old, new)
    sync_directory(os.path.dirname(os.path.abspath(new)))


def sync_data(file: File) -> None:
    """Make an open file's bytes durable (fdatasync)."""
    with files.in_use(file, True) as opened, naming("fsync", file.path):
        os.fdatasync(opened.any_fd())


def exchange(one: str, other: str) -> None:
    """Let two paths change places, at once; after OSError both are as they were."""
    names = os.fsencode(os.path.abspath(one)), os.fsencode(os.path.abspath(other))
    if _libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), one)


def write_all(fd: int, parts: Sequence[memoryview], offset: int = 0) -> None:
    """Write what lies in several places, one behind the other."""
    left = [part for part in parts if part.nbytes]
    while left:
        written = os.pwritev(fd, left[:_IOV_MAX], offset)
        offset += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]


def write_small(
    fd: int, data: bytes, sync: Callable[[int], object] | None, offset: int = 0
) -> None:
    """Write bytes of a small file, make them durable (but not its name), and close it.

    `sync` makes it durable, as `os.fsync`; None leaves that to others.
    """
    try:
        write_all(fd, [memoryview(data)], offset)
        if sync is not None:
            sync(fd)
    finally:
        os.close(fd)


def make_directory(
    path: str | os.PathLike[str],
    *,
    above: bool = False,
    mode: int = 0o777,
    durable: bool = True,
    wanted: str | None = None,
) -> None:
    """Make a directory; fine if it is there.

    `above` makes those that are missing above it, too. `mode` is before the umask. `durable` makes
    the names survive a loss of power. `wanted` is what is to lie in it, if that was named; for
    messages. Raises TransferError also if it is not a directory, or one above it is missing.
    """
    name = os.path.abspath(path)
    missing: list[str] = []
    try:
        while not os.path.isdir(name) and name != os.path.dirname(name):
            missing.append(name)
            name = os.path.dirname(name)
        for each in reversed(missing if above else missing[:1]):
            _check_not_home(each, wanted or path)
            with contextlib.suppress(FileExistsError):
                os.mkdir(each, mode)
            if durable:
                sync_directory(os.path.dirname(each))
        if missing and not os.path.isdir(missing[0]):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    except TransferError:
        raise
    except OSError as failed:
        if failed.errno == errno.ENOENT and len(missing) > 1:
            raise _nothing_above(wanted or path, missing[-1]) from failed
        raise transfer_error(failed, "mkdir", wanted or os.fspath(path)) from failed


def _check_not_home(directory: str, path: str | os.PathLike[str]) -> None:
    """Refuse to make a directory with a name that a shell would have expanded, such as "~"."""
    name = os.path.basename(directory)
    if os.path.expanduser(name) != name:
        detail = (
            f"{directory} is not there, and no directory of this name is made: a shell expands "
            f"{name!r}, Python does not; give os.path.expanduser(path)"
        )
        raise TransferError(errno.ENOENT, operation="mkdir", path=os.fspath(path), detail=detail)


def remove_directory(path: str | os.PathLike[str]) -> None:
    """Remove a directory with all that is in it, as far as that is possible.

    Not in the main thread: an interrupt within `shutil.rmtree` closes a descriptor twice.
    """
    run_interruptible(lambda: shutil.rmtree(path, ignore_errors=True), closes=True)


def check_above(path: str | os.PathLike[str]) -> None:
    """Check that a directory can be made later, so that a misspelt name is an error now."""
    above = os.path.dirname(os.path.abspath(path))
    try:
        os.stat(above)
    except FileNotFoundError as failed:
        while not os.path.lexists(os.path.dirname(above)):
            above = os.path.dirname(above)
        raise _nothing_above(path, above) from failed
    except OSError:
        pass  # making the directory reports it


def _nothing_above(path: str | os.PathLike[str], missing: str) -> TransferError:
    _check_not_home(missing, path)
    detail = (
        f"{missing} does not exist either, and one level is made: make it first (mkdir -p), or "
        "check the name and that the drive is mounted"
    )
    return TransferError(errno.ENOENT, operation="mkdir", path=os.fspath(path), detail=detail)
