"""A swap directory: one process has it, leftovers of dead ones go, space is reserved."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Sequence

from nvmeio import _checks, files
from nvmeio._storage import durable, guarded
from nvmeio._storage import durable as durable_module
from nvmeio._threads import endings
from nvmeio.errors import TransferError, transfer_error
from nvmeio.files import File

LOCK = "lock"
# All that is ever made here. Nothing else is removed: the directory may have been somebody's.
RECORD = "drives"  # of one that is part of a set; see `_swap_dirs`
OURS = ("state.0", "state.1", "manifest.0", "manifest.1", "gradients", "weights", RECORD)


class SwapDir:
    """A directory that this process alone swaps into, and that no other user may enter.

    Args:
        parent: The user's directory; made where it is missing, but not those above it.
        name: Of the directory in it that is made and locked.

    Raises:
        TransferError: `parent` is missing, no directory or not writable; somebody else swaps into
            the same place (EBUSY), or it is not ours: another user's directory or file, or a link,
            which could lead anywhere (EPERM, ELOOP, ENOTDIR).

    The lock is a flock on a file: it goes with the process, however that ends. Where that did not
    release it, a child that was forked from it holds it as long as it lives.
    """

    def __init__(self, parent: str | os.PathLike[str], name: str) -> None:
        above = _checks.directory_path("swap_dir", parent)
        self._above = ""  # that was made for this
        if not os.path.lexists(above):
            durable_module.make_directory(above, mode=guarded.DIRECTORY_MODE)
            self._above = above
        elif not os.path.isdir(above):
            raise TransferError(
                errno.ENOTDIR,
                operation="open",
                path=above,
                detail="swap_dir must be a directory on a fast drive",
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
        try:
            self._check_ours()
        except BaseException:
            self.release()
            raise

    def _locked(self) -> int:
        lock = self.file(LOCK)
        while True:
            guarded.make_private_directory(self.path)
            try:
                fd = guarded.open_own(lock)
            except FileNotFoundError:
                continue  # its owner removed the directory meanwhile
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), os.stat(lock)):
                    return fd
            except BlockingIOError:
                holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
                if holder == str(os.getpid()) and endings.wait_for_those_that_end():
                    os.close(fd)
                    continue
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

    def _check_ours(self) -> None:
        """Whether what is there is ours. Nobody can put anything else there from now on.

        Raises:
            TransferError: Something is a link, or another user's.
        """
        for name in OURS:
            if os.path.lexists(self.file(name)):
                os.close(guarded.open_own(self.file(name)))

    def clean(self, names: Sequence[str] = OURS) -> None:
        """Remove what a dead process left. What is not ours by its name stays.

        Raises:
            TransferError: Something cannot be removed.
        """
        for name in names:
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
            durable.sync_directory(path)

    def file(self, name: str) -> str:
        """The path of a file in it."""
        return os.path.join(self.path, name)

    def allocate(self, name: str, nbytes: int) -> File:
        """Open a file of at least so many bytes, made where it is missing, its blocks reserved.

        Raises:
            TransferError: There is not that much space; nothing new is left then.
        """
        path = self.file(name)
        fresh = not os.path.lexists(path)
        try:
            fd = guarded.open_own(path)
            try:
                durable.reserve(fd, nbytes, path)
            finally:
                os.close(fd)
            return files.open(path, "r+")
        except BaseException:
            if fresh:
                with contextlib.suppress(OSError):
                    os.unlink(path)
            raise

    def clean_if_locked(self, names: Sequence[str]) -> None:
        """Remove some files as far as that works, unless the lock was given up."""
        if self._lock_fd >= 0:
            with contextlib.suppress(OSError):
                self.clean(names)

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

    def remove_above(self) -> None:
        """Remove the user's directory as well, if it was made for this and nothing is in it."""
        if self._above:
            with contextlib.suppress(OSError):
                os.rmdir(self._above)


def _wrapped(failed: OSError, operation: str, path: str) -> TransferError:
    return transfer_error(failed, operation, path)
