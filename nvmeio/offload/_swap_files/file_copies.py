"""Copies of swap files within the kernel: shared blocks where the file system has them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable
from typing import Any

from nvmeio import _checks
from nvmeio._checks import Paths
from nvmeio._storage import durable, guarded
from nvmeio._storage.durable import make_directory
from nvmeio._threads.with_statement import on_error
from nvmeio.errors import TransferError, transfer_error
from nvmeio.offload._generations import manifests
from nvmeio.offload._generations.manifests import Manifest
from nvmeio.offload._generations.transactions import Transaction
from nvmeio.offload._swap_files.swap_dirs import LOCK, OURS, SwapDirs

_FICLONE = 0x40049409  # linux/fs.h
_STRIDE_BYTES = 64 << 20  # between two looks whether the copy is still wanted
# What copy_file_range says where it cannot: between file systems, to a network, on an old kernel.
_NOT_RANGES = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM})


def copy(
    source: SwapDirs,
    names: tuple[str, ...],
    manifest: Manifest,
    directories: Paths,
    transaction: Transaction,
) -> None:
    """Copy swap files that nobody writes to just now, durably; the manifest comes last.

    Args:
        source: The swap directories; each copy has its name, in one of `directories`.
        names: Of the files of state.
        manifest: Of the generation that they hold. In the copy it is durable, so it counts on
            another machine too.
        directories: As many; made where they are missing.
        transaction: Whose copy it is: none is left if nobody wants it any more.

    Raises:
        TransferError: The copy exists (EEXIST), or cannot be written; nothing is left of it then.
        ValueError: There are not as many directories.

    Source: man 2 ioctl_ficlone, man 2 copy_file_range, man 2 sendfile.
    """
    above = _checks.directory_paths("directory", directories)
    if len(above) != len(source.paths):
        raise ValueError(
            f"the state lies in {len(source.paths)} directories, {source.paths}: name as many for "
            f"its copy, not {len(above)}"
        )
    targets = [
        os.path.join(each, os.path.basename(path))
        for each, path in zip(above, source.paths, strict=True)
    ]
    made: list[str] = []
    with on_error(_remove, made):
        for each, target in zip(above, targets, strict=True):
            _make(each, target)
            made.append(target)
        for drive, target in enumerate(targets):
            try:
                for name in names:
                    path = os.path.join(target, name)
                    copy_file(source.file(name, drive), path, transaction.check)
            except OSError as failed:
                raise _wrapped(failed, target) from failed
            if len(targets) > 1:
                source.write_record(drive, target, targets)
        # What the manifest speaks of must be durable before it, on all drives.
        for each, target in list(zip(above, targets, strict=True))[1:]:
            _sync(each, target)
        manifests.store(targets[0], manifest)
        manifests.mark_durable(targets[0], manifest)
        _sync(above[0], targets[0])
    transaction.on_rollback(lambda: _remove(made))


def _make(above: str, target: str) -> None:
    try:
        make_directory(above, mode=guarded.DIRECTORY_MODE)
        guarded.make_private_directory(target)
        if any(entry != LOCK for entry in os.listdir(target)):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
    except OSError as failed:
        raise _wrapped(failed, target) from failed


def _sync(above: str, target: str) -> None:
    for path in (target, above, os.path.dirname(os.path.abspath(above))):
        durable.sync_directory(path)


def _remove(targets: list[str]) -> None:
    for target in targets:
        with contextlib.suppress(OSError):
            for each in set(os.listdir(target)).intersection(OURS):
                os.unlink(os.path.join(target, each))
            os.rmdir(target)


def _wrapped(failed: OSError, target: str) -> OSError:
    if isinstance(failed, TransferError):
        return failed
    return transfer_error(failed, "copy", target)


def copy_file(source: str, target: str, check: Callable[[], None] = lambda: None) -> None:
    """One file, durable; its blocks shared where the file system can.

    `check` is called now and then, and ends it by what it raises.
    """
    reading = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        writing = guarded.create(target)
        try:
            try:
                fcntl.ioctl(writing, _FICLONE, reading)
            except OSError:
                _copy_bytes(reading, writing, check)
            os.fsync(writing)
        finally:
            os.close(writing)
    finally:
        os.close(reading)


def _copy_bytes(reading: int, writing: int, check: Callable[[], None]) -> None:
    left = os.fstat(reading).st_size
    move: Any = os.copy_file_range
    while left:
        check()
        try:
            count = move(reading, writing, min(left, _STRIDE_BYTES))
        except OSError as failed:
            if move is _send or failed.errno not in _NOT_RANGES:
                raise
            move = _send  # goes on where the descriptors stand
            continue
        if not count:
            raise OSError(errno.ENODATA, "a swap file became shorter while it was copied")
        left -= count


def _send(reading: int, writing: int, nbytes: int) -> int:
    return os.sendfile(writing, reading, None, nbytes)
