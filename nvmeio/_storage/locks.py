"""Locks on a checkpoint: readers share it, a writer that overwrites it has it alone.

A `Checkpointer` overwrites its oldest file in place, under another name. A reader that has opened
that file before must not find other bytes in it. So readers hold a shared flock for as long as they
read, and a file is recycled only under an exclusive one. Other programs hold none, and nobody does
for what is mapped: a file is left alone, too, if the kernel knows of anybody else who has it open
(`check_unused`). Source: man 2 flock, man 2 fcntl (leases).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator

from nvmeio import files
from nvmeio._files.descriptors import open_error
from nvmeio._files.system import is_local
from nvmeio._storage.untrusted import make_private_directory, open_own
from nvmeio._threads.closing import on_error, opened
from nvmeio.errors import TransferError, naming
from nvmeio.files import File

# To rename a file takes its lock for a moment, while it still has its name.
_PATIENCE_S = 2.0
_PAUSE_S = 0.001
_ATTEMPTS = 5


@contextlib.contextmanager
def open_reading(path: str | os.PathLike[str]) -> Iterator[File]:
    """Open a file that will not be recycled while the body reads it; two more system calls.

    Raises TransferError if it was recycled again and again, or, if locks do not work, while the
    body read it.
    """
    for _ in range(_ATTEMPTS):
        with (
            files.open(path) as file,
            files.in_use(file) as opened,
            reading(opened.any_fd(), path) as is_it,
        ):
            if is_it:
                yield file
                return
    raise _recycled(path)


@contextlib.contextmanager
def reading(fd: int, path: str | os.PathLike[str]) -> Iterator[bool]:
    """Keep an open file or directory from being recycled while the body reads it.

    Yields False if it was recycled before it could be locked: open `path` once more, then. Raises
    TransferError if locks do not work there, and it was recycled while the body read it.
    """
    locked = _lock_shared(fd, path)
    try:
        if _is_recycled(fd, path):
            yield False
            return
        yield True
        if not locked and _is_recycled(fd, path):
            raise _recycled(path)
    finally:
        if locked:
            unlock(fd)


def _is_recycled(fd: int, path: str | os.PathLike[str]) -> bool:
    """Whether an open file has another name now. With none at all it is the reader's own."""
    return bool(os.fstat(fd).st_nlink) and not leads_to(path, fd)


def leads_to(path: str | os.PathLike[str], fd: int) -> bool:
    """Whether a path leads to what is open, not to something else or to nothing."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except OSError:
        return False


def _recycled(path: str | os.PathLike[str]) -> TransferError:
    detail = "the checkpoint was recycled while it was being read; open the latest one"
    return open_error(errno.ESTALE, os.fspath(path), detail)


def _lock_shared(fd: int, path: str | os.PathLike[str]) -> bool:
    """Take a shared lock; if False, the caller has to look again when it has read."""
    patience = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            pass
        except OSError:
            return False  # no locks on this file system
        # Else somebody else's lock, for reasons of their own, or a writer that is just done.
        if _is_recycled(fd, path) or time.monotonic() > patience:
            return False
        time.sleep(_PAUSE_S)


def lock_alone(fd: int) -> bool:
    """Take an exclusive lock if nobody has one; False if locks do not work."""
    with contextlib.suppress(OSError):
        return become_writer(fd, must_lock=True)
    return False


def check_unused(fd: int) -> None:
    """Raise BlockingIOError if anybody else has the file open, or mapped.

    Servers of files do not know that. `fd` is to be this process's only one, and the file's name to
    be nobody's: an opener at this moment waits, and the kernel sends us a signal.
    """
    with contextlib.suppress(PermissionError):  # another user's file
        if is_local(fd):
            fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # SIGIO would end this process
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def become_writer(fd: int, must_lock: bool = False) -> bool:
    """Become the one writer of a file or directory; False if there is one.

    The lock goes with the process. On a file system without locks everybody becomes one, or it is
    an OSError.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        if must_lock:
            raise
    return True


def open_alone(path: str, refusal: Callable[[int], BaseException], must_lock: bool = False) -> int:
    """Open a file of this user's, made with its directory where missing, and be its one writer.

    If something of this process has it that was closed, dropped or left, that is waited for; if
    its owner removes it, it is made anew. Raises `refusal(fd)` if another one writes it, and
    TransferError where locks do not work and it `must_lock`.
    """
    from nvmeio._threads.shutdown import those_that_end, wait_for  # owners, which no save needs

    while True:
        ending = those_that_end()  # before the try: what gives it back just after that counts too
        make_private_directory(os.path.dirname(path))
        try:
            fd = open_own(path)
        except FileNotFoundError:
            continue  # its owner removed the directory meanwhile
        with on_error(os.close, fd), naming("lock", path):
            alone = become_writer(fd, must_lock)
            if alone and leads_to(path, fd):
                hold(fd)
                return fd
            if not (alone or wait_for(ending)):
                raise refusal(fd)
        os.close(fd)


# Locks of this process. A child that it forks shares them: it must not go on holding what its
# parent gives back, or leaves behind when it is killed.
_held: dict[int, os.stat_result] = {}


def hold(fd: int) -> None:
    """Let children that this process forks have no part in a lock.

    There the descriptor leads to nothing from then on; its number stays until its owner closes it.
    """
    _held[fd] = os.fstat(fd)


def _let_go_in_child() -> None:
    while _held:
        fd, facts = _held.popitem()
        # It may be closed meanwhile, or no descriptor may be left.
        with contextlib.suppress(OSError), opened(os.devnull, os.O_RDWR) as nothing:
            if os.path.samestat(os.fstat(fd), facts):
                os.dup2(nothing, fd, inheritable=False)


os.register_at_fork(after_in_child=_let_go_in_child)


def lock_directory(directory: str, hint: str = "") -> int:
    """Become the only one that saves into a directory that is there.

    The descriptor holds the lock until `unlock`, or until this process ends. Its owner closes it.
    Raises TransferError with `hint` if somebody else has the lock (EBUSY).
    """
    with naming("open", directory):
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if not become_writer(fd):
        os.close(fd)
        raise open_error(
            errno.EBUSY,
            directory,
            "another Checkpointer saves into this directory, in this process or in another: "
            "close it, choose another directory, or restore from this one with read_only=True"
            + hint,
        )
    hold(fd)
    return fd


def unlock(fd: int) -> None:
    """Let go of a lock. Closing is not enough: a child that was forked meanwhile has it too."""
    _held.pop(fd, None)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(fd, fcntl.LOCK_UN)
