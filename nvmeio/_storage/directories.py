"""The rule for a directory that somebody names and that does not exist: it is made, one level.

A directory that is missing above it is refused: mostly a name is misspelt then, or a drive is not
mounted, and what is meant for the drive would fill the system's disk. What stands in for a part of
another library (DCP's writer, Lightning's plugins, transformers' Trainer, fsspec) makes those above
as well, as that library does.
"""

from __future__ import annotations

import contextlib
import errno
import os

from nvmeio._storage.durable import sync_directory
from nvmeio.errors import TransferError


def make_directory(
    path: str | os.PathLike[str],
    *,
    above: bool = False,
    mode: int = 0o777,
    durable: bool = True,
    wanted: str | None = None,
) -> None:
    """Make a directory; fine if it is there.

    Args:
        path: As the caller named it.
        above: Make those that are missing above it, too.
        mode: Of those that are made, before the umask.
        durable: Make their names survive a loss of power.
        wanted: What is to lie in it, where it was that which was named; for messages.

    Raises:
        TransferError: It cannot be made, is something else than a directory, or one above it is
            missing.
    """
    name = os.path.abspath(path)
    missing: list[str] = []
    try:
        while not os.path.isdir(name) and name != os.path.dirname(name):
            missing.append(name)
            name = os.path.dirname(name)
        for each in reversed(missing if above else missing[:1]):
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
        raise TransferError(
            failed.errno or errno.EIO, operation="mkdir", path=wanted or os.fspath(path)
        ) from failed


def check_above(path: str | os.PathLike[str]) -> None:
    """Whether a directory that is made later has one to be made in: a misspelt name is told now.

    Raises:
        TransferError: It has none.
    """
    above = os.path.dirname(os.path.abspath(path))
    try:
        os.stat(above)
    except FileNotFoundError as failed:
        while not os.path.lexists(os.path.dirname(above)):
            above = os.path.dirname(above)
        raise _nothing_above(path, above) from failed
    except OSError:
        pass  # it is told when the directory is made


def _nothing_above(path: str | os.PathLike[str], missing: str) -> TransferError:
    return TransferError(
        errno.ENOENT,
        operation="mkdir",
        path=os.fspath(path),
        detail=f"{missing} does not exist either, and one level is made: make it first (mkdir -p), "
        "or check the name and that the drive is mounted",
    )
