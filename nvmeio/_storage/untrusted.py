"""Files where others may write, too: private ones, ones read whole, ones that must not change.

Names that we choose can be known beforehand, and where others may write, one of them may have put
a symbolic link, a pipe or a file of his own there. So what is private (swapped state, caches,
spilled weights) lies in a directory that is ours and that nobody else may enter, its files are ours
alone, and no link is ever followed. A file that is read whole (settings, indices, manifests) is a
regular file of limited length: open(2) waits for a pipe, and a device never ends.

Source: man 2 open (O_NOFOLLOW, O_EXCL, O_NONBLOCK on a FIFO), man 2 mkdir, man 7 inode; "sticky"
directories: man 1 chmod.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import tempfile
from typing import Any

from nvmeio import files
from nvmeio._files.descriptors import open_error
from nvmeio._threads.closing import on_error, opened
from nvmeio._threads.interruptible import run_interruptible
from nvmeio.errors import IntegrityError, TransferError, naming, transfer_error
from nvmeio.files import File

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600
_LINK = "it is a symbolic link, which is not followed here: remove it"


def make_private_directory(path: str | os.PathLike[str]) -> None:
    """Make a directory that only this user may enter, or make an existing one of his such.

    Raises TransferError also if it is a link or no directory (ENOTDIR), or somebody else's (EPERM).
    """
    name = os.fspath(path)
    try:
        made, fd = _made_or_found(name)
    except OSError as failed:
        detail = _LINK if os.path.islink(name) else ""
        raise transfer_error(failed, "mkdir", name, detail=detail) from failed
    try:
        with naming("chmod", name):
            facts = os.fstat(fd)
            # Some network file systems give what we make to another user.
            if facts.st_uid != os.geteuid() and not made:
                detail = (
                    f"the directory belongs to user {facts.st_uid}, who could replace the files in "
                    "it: name or make another one"
                )
                raise TransferError(errno.EPERM, operation="mkdir", path=name, detail=detail)
            if stat.S_IMODE(facts.st_mode) & 0o077:
                os.fchmod(fd, DIRECTORY_MODE)
    finally:
        os.close(fd)


def _made_or_found(name: str) -> tuple[bool, int]:
    """Whether it was made here, and its descriptor."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        made = True
        try:
            os.mkdir(name, DIRECTORY_MODE)
        except FileExistsError:
            made = False
        with contextlib.suppress(FileNotFoundError):  # it was just being removed by who had it
            return made, os.open(name, flags)


def create(path: str | os.PathLike[str], mode: int = FILE_MODE) -> int:
    """Make a file, for reading and writing; EEXIST also if a dangling link has its name."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with naming("open", path):
        return os.open(path, flags, mode)


def open_nameless(directory: str | os.PathLike[str]) -> File:
    """Open a new file without a name for reading and writing: closing removes it.

    Not in the main thread, where an interrupt would leave its descriptor, and its name.
    """

    def made() -> File:
        fd, name = tempfile.mkstemp(prefix=".nvmeio-", dir=directory)
        try:
            return open_again(name, fd)
        finally:
            os.close(fd)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)

    return run_interruptible(made)


def open_again(path: str, fd: int) -> File:
    """Open a file that was made here for transfers; never another one in its place (ESTALE)."""
    file = files.open(path, "r+")
    with files.in_use(file, True) as opened:
        if os.path.samestat(os.fstat(opened.any_fd()), os.fstat(fd)):
            return file
    file.close()
    raise open_error(
        errno.ESTALE,
        path,
        "another file was put in the place of the temporary one: others write in "
        f"{os.path.dirname(path)}",
    )


def open_own(path: str | os.PathLike[str]) -> int:
    """Open a file of ours for reading and writing; make it if it is missing.

    Its length and bytes stay. One that others could read becomes private. Raises TransferError, and
    changes nothing, if it is a symbolic link (ELOOP), no regular file, somebody else's, or has a
    second name (EPERM).
    """
    name = os.fspath(path)
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    while True:
        try:
            fd = os.open(name, flags)
            break
        except FileNotFoundError:
            try:
                return create(name)
            except FileExistsError:
                continue  # made by another process meanwhile, or a link that leads nowhere
        except OSError as failed:
            detail = _LINK if failed.errno == errno.ELOOP else ""
            raise transfer_error(failed, "open", name, detail=detail) from failed
    with on_error(os.close, fd):
        facts = os.fstat(fd)
        wrong = ""
        if not stat.S_ISREG(facts.st_mode):
            wrong = "it is not a regular file"
        elif facts.st_uid != os.geteuid():
            wrong = f"it belongs to user {facts.st_uid}"
        elif facts.st_nlink > 1:
            wrong = "it has a second name (a hard link)"
        if wrong:
            raise open_error(errno.EPERM, name, f"{wrong}: remove it")
        if stat.S_IMODE(facts.st_mode) & 0o077:
            os.fchmod(fd, FILE_MODE)
    return fd


SETTINGS_BYTES = 1 << 20
# An index of 100,000 tensors has 10 MB; safetensors has this limit of a header.
INDEX_BYTES = 100_000_000
_CHUNK_BYTES = 1 << 20


def read_small(path: str | os.PathLike[str], most: int) -> bytes:
    """The bytes of a regular file, links followed; never waits for a writer.

    Raises OSError, which says why: it is not a regular file (EINVAL, or EISDIR), or has more than
    `most` bytes (EFBIG).
    """
    return run_interruptible(lambda: _read_small(os.fspath(path), most))


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, for the parser; ValueError if a key occurs more than once.

    Readers differ on which of its values they take.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice!r} occurs more than once")
    return found


def read_json(
    path: str | os.PathLike[str], most: int, named: object = None, *, unique: bool = False
) -> Any:
    """The value in a file of JSON; IntegrityError, which calls the file `named`, if it is not JSON.

    With `unique`, a key that occurs more than once in an object is refused as well.
    """
    try:
        return json.loads(read_small(path, most), object_pairs_hook=unique_keys if unique else None)
    except (ValueError, RecursionError) as failed:
        detail = f"{named or path} is not valid JSON: {failed}"
        raise IntegrityError(detail, expected="JSON", found="other bytes") from None


def read_object(path: str | os.PathLike[str], most: int, named: object = None) -> dict[str, Any]:
    """`read_json` of a file that holds an object; IntegrityError if it holds anything else."""
    value = read_json(path, most, named)
    if not isinstance(value, dict):
        raise IntegrityError(
            f"{named or path} must hold a JSON object, not {json.dumps(value):.40}",
            expected="a JSON object",
            found=type(value).__name__,
        )
    return value


def _read_small(name: str, most: int) -> bytes:
    with opened(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY) as fd:
        facts = os.fstat(fd)
        if stat.S_ISDIR(facts.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
        if not stat.S_ISREG(facts.st_mode):
            kind = "a pipe" if stat.S_ISFIFO(facts.st_mode) else "a device or a socket"
            raise OSError(errno.EINVAL, f"it is {kind}, and no regular file: remove it", name)
        data = bytearray()
        while len(data) <= most and facts.st_size <= most:
            chunk = os.read(fd, min(_CHUNK_BYTES, most + 1 - len(data)))
            if not chunk:
                return bytes(data)
            data += chunk
        detail = f"it has {max(facts.st_size, len(data))} bytes, and such a file at most {most}"
        raise OSError(errno.EFBIG, f"{detail}: it is another file, or damaged", name)


class Unchanged:
    """Remembers the size and time of a file, which stays open, and notices changes."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._before = _facts(file)

    def check(self, what: str) -> None:
        """Raise IntegrityError, which names `what`, if the file was changed; an fstat, 1 us."""
        before, path = self._before, self._file.path
        try:
            now = _facts(self._file)
        except TransferError:
            raise
        except OSError as failed:
            raise transfer_error(failed, "open", path) from failed
        if now != before:
            changed = "its size" if now[0] != before[0] else "its time of modification"
            raise IntegrityError(
                f"{path} changed while weights were streamed from it: {changed} differs from when "
                f"it was opened. The data read for {what} is not used. Write a changed model "
                "under another name, and open that",
                expected=before,
                found=now,
            )


def _facts(file: File) -> tuple[int, int]:
    """An open file's size and time of modification, which writes and cuts change."""
    # A file that is replaced or unlinked is still whole for a process that has it open: its link
    # count and with it st_ctime change, so ctime says nothing here.
    with files.in_use(file) as opened:
        found = os.fstat(opened.any_fd())
    return found.st_size, found.st_mtime_ns
