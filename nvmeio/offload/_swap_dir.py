"""A swap directory: one process has it, leftovers of dead ones go, space is reserved."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os

from nvmeio import files
from nvmeio.errors import TransferError
from nvmeio.files import File

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]

LOCK = "lock"
# All that is ever made here. Nothing else is removed: the directory may have been somebody's.
OURS = ("state.0", "state.1", "manifest.0", "manifest.1", "gradients", "weights")


class SwapDir:
    """A directory that this process alone swaps into.

    Args:
        parent: The user's directory; must exist.
        name: Of the directory in it that is made and locked.

    Raises:
        TransferError: `parent` is missing, no directory or not writable; somebody else swaps into
            the same place (EBUSY).

    The lock is a flock on a file: it goes with the process, however that ends. Where that did not
    release it, a child that was forked from it holds it as long as it lives.
    """

    def __init__(self, parent: str | os.PathLike[str], name: str) -> None:
        if not isinstance(parent, (str, os.PathLike)):
            raise TypeError(f"swap_dir must be a path, not {type(parent).__name__}: {parent!r:.80}")
        above = os.fspath(parent)
        if not isinstance(above, str):
            raise TypeError(
                f"swap_dir must be a str, not {above!r}; os.fsdecode turns bytes into one"
            )
        if not os.path.isdir(above):
            code = errno.ENOTDIR if os.path.exists(above) else errno.ENOENT
            raise TransferError(
                code,
                operation="open",
                path=above,
                detail="swap_dir must be an existing directory; make it on a fast drive",
            )
        self.path = os.path.join(above, name)
        self._lock_fd = fd = self._locked()
        lock = self.file(LOCK)
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as failed:  # a full disk must not leave the lock behind
            self.release()
            raise _wrapped(failed, "write", lock) from failed

    def _locked(self) -> int:
        lock = self.file(LOCK)
        while True:
            try:
                os.makedirs(self.path, exist_ok=True)
                fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError as failed:
                raise _wrapped(failed, "open", self.path) from failed
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), os.stat(lock)):
                    return fd
            except BlockingIOError:
                holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
                os.close(fd)
                raise TransferError(
                    errno.EBUSY,
                    operation="open",
                    path=self.path,
                    detail=f"process {holder or 'unknown'} swaps into this directory: close what "
                    "it opened, or choose another swap_dir",
                ) from None
            except FileNotFoundError:
                pass
            except OSError as failed:
                os.close(fd)
                raise _wrapped(failed, "lock", lock) from failed
            os.close(fd)  # its owner removed it meanwhile

    def clean(self) -> None:
        """Remove what a dead process left. What is not ours by its name stays.

        Raises:
            TransferError: Something cannot be removed.
        """
        for name in OURS:
            path = self.file(name)
            try:
                os.unlink(path)
            except FileNotFoundError:
                continue
            except OSError as failed:
                raise _wrapped(failed, "remove", path) from failed

    def sync_names(self) -> None:
        """Make the names of the files durable: without, a power cut may take what they name.

        Raises:
            TransferError: The drive failed.
        """
        for path in (self.path, os.path.dirname(self.path) or "."):
            sync_directory(path)

    def file(self, name: str) -> str:
        """The path of a file in it."""
        return os.path.join(self.path, name)

    def allocate(self, name: str, nbytes: int) -> File:
        """Open a file of at least so many bytes, made where it is missing, its blocks reserved.

        Raises:
            TransferError: There is not that much space; nothing new is left then.
        """
        path = self.file(name)
        fresh = not os.path.exists(path)
        file = files.open(path, "rw")
        try:
            held = file.acquire(True)
            try:
                reserve(held.any_fd(), path, nbytes)
            finally:
                held.release()
        except BaseException:
            file.close()
            if fresh:
                with contextlib.suppress(OSError):
                    os.unlink(path)
            raise
        return file

    def release(self, remove: bool = False) -> None:
        """Give up the lock, and with `remove` everything there; idempotent."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd < 0:
            return
        try:
            if remove:
                with contextlib.suppress(OSError):
                    self.clean()
                    # Under the lock: whoever waits for it finds another file, or none.
                    os.unlink(self.file(LOCK))
                    os.rmdir(self.path)
        finally:
            # A forked child (a data loader's worker) has the descriptor too, and with it the lock.
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


def reserve(fd: int, path: str, nbytes: int) -> None:
    """Give a file its size and its blocks, so that no later write can meet a full disk.

    Raises:
        TransferError: ENOSPC, EDQUOT, EFBIG and the like.
    """
    if not nbytes or os.fstat(fd).st_size >= nbytes:
        return
    if _libc.fallocate(fd, 0, 0, nbytes) == 0:
        return
    code = ctypes.get_errno()
    if code in (errno.EOPNOTSUPP, errno.ENOSYS):
        try:
            os.ftruncate(fd, nbytes)  # this file system reserves nothing; a write may meet ENOSPC
            return
        except OSError as failed:
            code = failed.errno or errno.EIO
    raise TransferError(code, operation="fallocate", path=path, file_offset=0, nbytes=nbytes)


def sync_directory(path: str) -> None:
    """Make the names in a directory durable, where the file system can.

    Raises:
        TransferError: The drive failed.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as failed:
        if failed.errno != errno.EINVAL:  # not of directories on this file system
            raise _wrapped(failed, "fsync", path) from failed


def _wrapped(failed: OSError, operation: str, path: str) -> TransferError:
    return TransferError(failed.errno or errno.EIO, operation=operation, path=path)
