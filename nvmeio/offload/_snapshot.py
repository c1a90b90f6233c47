"""Copies of swap files within the kernel: shared blocks where the file system has them."""

from __future__ import annotations

import errno
import fcntl
import os

from nvmeio.errors import TransferError
from nvmeio.offload import _manifest
from nvmeio.offload._swap_dir import LOCK

_FICLONE = 0x40049409  # linux/fs.h
_SKIP = frozenset({LOCK, "gradients"})
_PIECE_BYTES = 1 << 30


def copy(source: str, name: str, directory: str | os.PathLike[str]) -> None:
    """Copy a swap directory that nobody writes to just now, durably; the manifest comes last.

    Args:
        source: The directory.
        name: Of the copy, in `directory`.
        directory: Made where it is missing.

    Raises:
        TransferError: The copy exists (EEXIST), or cannot be written; nothing complete is left.

    Source: man 2 ioctl_ficlone, man 2 copy_file_range.
    """
    target = os.path.join(os.fspath(directory), name)
    try:
        os.makedirs(target, exist_ok=True)
        if any(entry != LOCK for entry in os.listdir(target)):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        names = sorted(set(os.listdir(source)) - _SKIP)
        for each in sorted(names, key=lambda name: name in _manifest.NAMES):
            copy_file(os.path.join(source, each), os.path.join(target, each))
        fd = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except TransferError:
        raise
    except OSError as failed:
        raise TransferError(failed.errno or errno.EIO, operation="copy", path=target) from failed


def copy_file(source: str, target: str) -> None:
    """One file, durable; its blocks shared where the file system can."""
    reading = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.ioctl(writing, _FICLONE, reading)
            except OSError:
                _copy_bytes(reading, writing)
            os.fsync(writing)
        finally:
            os.close(writing)
    finally:
        os.close(reading)


def _copy_bytes(reading: int, writing: int) -> None:
    left = os.fstat(reading).st_size
    while left:
        count = os.copy_file_range(reading, writing, min(left, _PIECE_BYTES))
        if not count:
            raise OSError(errno.ENODATA, "a swap file became shorter while it was copied")
        left -= count
