"""Replacing a file at once: all of the new one or all of the old one, whatever happens meanwhile.

    1. a temporary file is made beside the target and locked            (flock)
    2. its bytes are written                                            whoever uses it
    3. they are made durable                                            fdatasync
    4. it takes the target's name                                       rename: atomic
    5. the name is made durable                                         fsync of the directory

Until 4 the target is what it was, to every reader and after a crash. After 4 every reader finds the
new file; after 5 a crash does, too.

For a small file one call of the shim does all five (`replace_file`): no interrupt comes in between,
so no thread is needed. If a journal keeps the order of 2 and 4
(`_files.system.journal_keeps_order`), it only sends the bytes to the drive in 3, and 5 makes both
durable: two flushes of the drive in place of four, as many as writing over the old file takes.

The temporary file's name ends in ``.nvmeio-tmp`` and its writer holds an flock on it for as long as
it lives, so a file of that name which nobody has locked is what a killed writer left: the next save
into the directory removes it. (The lock is that of the open file, which a forked child shares: what
a killed writer left is removed once its children are gone too. One that ends gives the lock back
itself, whatever children it has.)

Owner, mode, ACL and other attributes of the old file are carried over. In no case does anybody get
more than before: of what cannot be carried over, the narrower is taken.

Source: man 2 rename, man 2 fsync (NOTES, on directories), man 2 flock; man 5 acl (the mask stands
where the mode has the group's permissions), man 7 xattr, linux/posix_acl_xattr.h.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import struct
from array import array
from collections.abc import Sequence

from nvmeio import files
from nvmeio._bindings import ffi, lib, memory_at
from nvmeio._files.descriptors import open_error
from nvmeio._files.system import is_local, journal_keeps_order
from nvmeio._storage.durable import allocate, make_directory, sync_directory, write_all
from nvmeio._storage.locks import become_writer, check_unused, hold, unlock
from nvmeio._storage.untrusted import create, open_again
from nvmeio._threads.closing import on_error, opened, unlink
from nvmeio._threads.interruptible import run_interruptible
from nvmeio.errors import ClosedError, TransferError, errno_of, naming, transfer_error

_ACL = "system.posix_acl_access"
_ACL_HEADER = struct.Struct("<I")
_ACL_ENTRY = struct.Struct("<HHI")  # tag, permissions, id
_GROUP_OBJ = 0x04

# Attributes that the kernel and its security modules keep for themselves, of this file alone.
_NOT_OURS = ("security.capability", "security.evm", "security.ima", "trusted.overlay.", "btrfs.")


def take_over(fd: int, old: str | os.PathLike[str]) -> None:
    """Copy another file's owner, mode and attributes to an open one, as far as permitted."""
    facts, mine = os.stat(old), os.fstat(fd)
    mode = stat.S_IMODE(facts.st_mode)
    # Each alone: a member of the group may give a file to it, though not to another user.
    for owner, group in ((-1, facts.st_gid), (facts.st_uid, -1)):
        if (owner, group) not in ((-1, mine.st_gid), (mine.st_uid, -1)):
            with contextlib.suppress(OSError):
                os.fchown(fd, owner, group)
    mine = os.fstat(fd)
    if (mine.st_uid, mine.st_gid) != (facts.st_uid, facts.st_gid):
        mode &= 0o777  # set-user-ID of somebody else
    theirs = _attributes(old)
    acl = theirs.pop(_ACL, None)
    if acl is None:
        _remove(fd, _ACL)  # from the directory's default
    elif not _set(fd, _ACL, acl):
        mode = mode & ~0o070 | (_group_of(acl) << 3 & mode)
    if mine.st_gid != facts.st_gid:
        mode &= ~0o070 | (mode & 0o007) << 3  # the permissions were another group's
    with contextlib.suppress(OSError):
        os.fchmod(fd, mode)
    for name in _attributes(fd).keys() - theirs.keys() - {_ACL}:
        _remove(fd, name)
    for name, value in theirs.items():
        _set(fd, name, value)


def _attributes(file: int | str | os.PathLike[str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    with contextlib.suppress(OSError):
        for name in os.listxattr(file):
            if not name.startswith(_NOT_OURS):
                with contextlib.suppress(OSError):
                    found[name] = os.getxattr(file, name)
    return found


def _set(fd: int, name: str, value: bytes) -> bool:
    try:
        os.setxattr(fd, name, value)
    except OSError:
        return False
    return True


def _remove(fd: int, name: str) -> None:
    with contextlib.suppress(OSError):
        os.removexattr(fd, name)


def _group_of(acl: bytes) -> int:
    """The owning group's permissions in an ACL; none if it cannot be read."""
    if (len(acl) - _ACL_HEADER.size) % _ACL_ENTRY.size:
        return 0
    for tag, permissions, _ in _ACL_ENTRY.iter_unpack(acl[_ACL_HEADER.size :]):
        if tag == _GROUP_OBJ:
            return int(permissions) & 0o7
    return 0


SUFFIX = ".nvmeio-tmp"
_TEMPORARY = re.compile(r"\..+\.\d+-[0-9a-f]{8}" + re.escape(SUFFIX))
_MOST_NAME_BYTES = 255  # NAME_MAX of every usual file system
_ATTEMPTS = 100


class Replacement:
    """A new file that will take the place of `path`: written, then committed or discarded.

    A symbolic link is followed: it stays, and the file that it leads to is replaced. The new file
    has what the old one had of owner, permissions, ACL and other attributes (`take_over`), or what
    umask and directory leave. Other names of the old file (hard links) keep the old file.

    `recycle` is a file in the same directory that is not wanted any more. It becomes the temporary
    one (then `recycled` is set), under a temporary name that is durable before this returns, and
    with all its bytes: overwriting allocated blocks is 1.5 to 2 times as fast as allocating new
    ones. One that is locked by a reader (flock), is open or mapped elsewhere, has a second name (a
    hard link) or is gone is left alone.

    `temporary` is the path of the new file, for other processes that write parts of it. Nothing was
    changed if this raises TransferError: the directory is missing or cannot be written in; the
    target is a directory, a device, a pipe, or may not be written. Used with ``with``, it is
    discarded at the end unless it was committed.
    """

    def __init__(self, path: str | os.PathLike[str], recycle: str | None = None) -> None:
        self.path = _checked(path)
        # torch.save writes through a link; so does this.
        self._target = os.path.realpath(self.path)
        replaces = _check_target(self.path, self._target)
        self._directory = os.path.dirname(self._target)
        make_directory(self._directory, wanted=self.path)
        remove_leftovers(self._directory)
        taken = None if recycle is None else _take(recycle, self._target)
        self.recycled = taken is not None
        self.temporary, self._fd = taken or _make_temporary(self.path, self._target)
        with on_error(self._undo), naming("open", self.path):
            if replaces:
                take_over(self._fd, self._target)
        self._pid = os.getpid()
        self._held = [self._fd]  # a forked child must not have it open when it is to be recycled
        hold(self._fd)
        self.closed = False
        self._file: files.File | None = None

    @property
    def file(self) -> files.File:
        """The temporary file, open for transfers by a handle; opened when first asked for.

        Raises TransferError also if another file was put in its place.
        """
        if self._file is None:
            with naming("open", self.path):
                self._file = open_again(self.temporary, self._fd)
            with files.in_use(self._file, True) as opened:
                self._held.append(opened.any_fd())
                hold(opened.any_fd())
        return self._file

    def _undo(self) -> None:
        unlink(self.temporary)
        os.close(self._fd)

    def reserve(self, nbytes: int) -> None:
        """Allocate room for `nbytes` bytes; see `allocate`."""
        allocate(self._fd, nbytes, self.path)

    def write(self, parts: Sequence[memoryview]) -> None:
        """Write the bytes of a small file, through the page cache; blocks."""
        with naming("pwrite", self.path):
            write_all(self._fd, parts)

    def truncate(self, nbytes: int) -> None:
        with naming("truncate", self.path):
            os.ftruncate(self._fd, nbytes)

    def commit(self, durable: bool = True) -> None:
        """Make the new file durable and put it in its place; all writes must be done.

        If not `durable`, both fsyncs are left out: after a loss of power there may be the old file,
        or a new one without all of its bytes.

        Raises:
            TransferError: The file could not be made durable or renamed: the target is untouched,
                and the temporary file is gone. Or the directory could not be synchronised: the new
                file is in its place, but a crash of the machine may bring the old one back.
            ClosedError: It was committed or discarded before, or belongs to the parent of this
                forked process.
        """
        if self.closed:
            raise ClosedError(f"the replacement of {self.path} is over")
        if os.getpid() != self._pid:
            raise ClosedError(f"the replacement of {self.path} belongs to the parent process")
        with on_error(self.discard):
            if durable:
                with naming("fsync", self.path):
                    os.fdatasync(self._fd)
            with naming("rename", self.path):
                os.rename(self.temporary, self._target)
        self._close()
        if durable:
            try:
                sync_directory(self._directory)
            except OSError as failed:
                raise transfer_error(failed, "fsync", self.path) from failed

    def discard(self) -> None:
        """Remove the temporary file; the target stays. Idempotent, and nothing after `commit`.

        In a forked child the file is the parent's, and stays.
        """
        if self.closed:
            return
        if os.getpid() == self._pid:
            unlink(self.temporary)
        self._close()

    def _close(self) -> None:
        self.closed = True
        if os.getpid() == self._pid:
            for fd in self._held:
                unlock(fd)
        if self._file is not None:
            self._file.close()
        os.close(self._fd)

    def __enter__(self) -> Replacement:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()


def replace_file(
    path: str | os.PathLike[str], parts: Sequence[memoryview], durable: bool = True
) -> None:
    """Replace a small file at once, by the bytes of all parts; see `replace_from`."""
    own = [array("B", part) for part in parts]
    places = array("Q")
    for part in own:
        places.extend(part.buffer_info())
    replace_from(path, places, durable)


def replace_from(path: str | os.PathLike[str], places: array[int], durable: bool = True) -> None:
    """Replace a small file at once, through the page cache; raises as `Replacement` does.

    `places` say where its bytes lie, in the order of the file: address, length, address, and so on.
    The caller keeps them alive.

    One call of the shim does it, and an interrupt comes before or after it. But a server may keep a
    file of its own waiting for long, an old file may have attributes that are to be carried over,
    and a killed writer may have left something: then a thread does it, as for a large file.
    """
    name = _checked(path)
    if not _replace_in_one_call(name, places, durable):
        run_interruptible(lambda: _replace_by_steps(name, places, durable))


def _replace_by_steps(path: str, places: array[int], durable: bool) -> None:
    parts = [memory_at(*place) for place in zip(places[::2], places[1::2], strict=True)]
    with Replacement(path) as replacement:
        replacement.write(parts)
        replacement.commit(durable)


def _replace_in_one_call(path: str, places: array[int], durable: bool) -> bool:
    """Do it, and return True; False if nothing was done because it takes more than that."""
    target = os.path.realpath(path) if os.path.islink(path) else path
    folder, name = os.path.split(target)
    directory = folder or "."
    try:
        if not (name and is_local(directory)) or _leftovers(directory):
            return False
        _check_target(path, target)
        sent = durable and journal_keeps_order(directory)
    except OSError:
        return False  # which says why
    # No `ffi.from_buffer`: where garbage is a cycle with a memoryview's, cffi 2.1 crashes.
    address, numbers = places.buffer_info()
    each, count = ffi.cast("nv_bytes *", address), numbers // 2
    for _ in range(_ATTEMPTS):
        temporary = temporary_name(directory, name)
        names = [ffi.new("char[]", os.fsencode(n)) for n in (temporary, target, directory)]
        asked = ffi.new("nv_replacement *", (*names, each, count, durable, sent, 0))
        code = -lib.nv_replace(asked)
        if asked.step != lib.NV_REPLACE_TAKE:
            break
    if code and asked.step <= lib.NV_REPLACE_ATTRIBUTES:
        return False
    if code:
        raise TransferError(code, operation=_STEPS[asked.step], path=path)
    return True


_STEPS = ("open", "open", "open", "pwrite", "fsync", "rename", "fsync")  # as in decl.h


def check_writable(directory: str, otherwise: str) -> None:
    """Make and remove an empty file in a directory; TransferError says what to do `otherwise`."""
    path = temporary_name(directory, "writable")
    try:
        os.close(create(path, 0o600))
        with contextlib.suppress(FileNotFoundError):  # somebody who removes leftovers was here
            os.unlink(path)
    except OSError as failed:
        code = errno_of(failed)
        detail = f"{os.strerror(code)}: no file can be made in this directory; {otherwise}"
        raise open_error(code, directory, detail) from failed


def remove_leftovers(directory: str) -> list[str]:
    """Remove the temporary files of dead writers, as far as possible; returns their names."""
    removed: list[str] = []
    for name in _leftovers(directory):
        path = os.path.join(directory, name)
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
        with contextlib.suppress(OSError), opened(path, flags) as fd:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                continue
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while its writer lives
            if is_named(fd, path):  # not renamed, or made anew, in between
                os.unlink(path)
                removed.append(name)
    return removed


def _leftovers(directory: str) -> list[str]:
    """The names of temporary files, of writers that live or not; none if it cannot be read."""
    with contextlib.suppress(OSError):
        names = os.listdir(directory)
        return [name for name in names if name.endswith(SUFFIX) and _TEMPORARY.fullmatch(name)]
    return []


def _checked(path: str | os.PathLike[str]) -> str:
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(
            f"expected a path, not {type(path).__name__}; for an open file use torch.save, "
            "or torch.save(obj, nvmeio.FastFileWriter(path))"
        )
    name = files.checked_path(path)
    if name.endswith("/"):
        raise open_error(errno.EISDIR, name)
    return name


def _check_target(path: str, target: str) -> bool:
    """Whether the target is there, and may be replaced."""
    try:
        facts = os.stat(target)
    except FileNotFoundError:
        return False
    except OSError as failed:
        raise transfer_error(failed, "open", path) from failed
    if stat.S_ISDIR(facts.st_mode):
        raise open_error(errno.EISDIR, path)
    if not stat.S_ISREG(facts.st_mode):
        detail = "not a regular file: it would be replaced by one; torch.save writes into it"
        raise open_error(errno.EINVAL, path, detail)
    if not os.access(target, os.W_OK):
        raise open_error(errno.EACCES, path)
    return True


def temporary_name(directory: str, name: str) -> str:
    """A path beside `name` that nobody has, as `remove_leftovers` knows it."""
    end = f".{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"
    room = _MOST_NAME_BYTES - len(end) - 1
    stem = os.fsdecode(os.fsencode(name)[:room])
    return os.path.join(directory, f".{stem}{end}")


def _take(recycle: str, target: str) -> tuple[str, int] | None:
    """Lock a file and give it a durable temporary name; None if it must be left alone.

    If the name were not durable before the first byte is overwritten, a crash of the machine could
    bring the old name back, with half of a new file behind it.
    """
    temporary = temporary_name(*os.path.split(target))
    with contextlib.suppress(OSError):
        fd = os.open(recycle, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with on_error(os.close, fd):
            facts = os.fstat(fd)
            # A lock that the file system does not know is none: a reader could not be seen.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1 and is_named(fd, recycle):
                os.rename(recycle, temporary)
                with on_error(os.rename, temporary, recycle):
                    check_unused(fd)
                    sync_directory(os.path.dirname(target))
                    return temporary, fd
        unlock(fd)
        os.close(fd)
    return None


def _make_temporary(path: str, target: str) -> tuple[str, int]:
    """Create and lock a temporary file beside the target."""
    directory, name = os.path.split(target)
    if not name:
        raise open_error(errno.EISDIR, path)
    for _ in range(_ATTEMPTS):
        temporary = temporary_name(directory, name)
        try:
            fd = create(temporary, 0o666)
        except FileExistsError:
            continue
        except OSError as failed:
            raise _creation_error(failed, path, directory) from failed
        with on_error(os.close, fd), on_error(os.unlink, temporary):
            # Nobody can lock it to remove it where there are no locks, either.
            if become_writer(fd) and is_named(fd, temporary):
                return temporary, fd
        # Another save took it for a leftover before it was locked; or something else locked it, and
        # leaves it there.
        with contextlib.suppress(OSError):
            if is_named(fd, temporary):
                os.unlink(temporary)
        os.close(fd)
    raise open_error(errno.EEXIST, path, "no temporary file could be made")


def _creation_error(failed: OSError, path: str, directory: str) -> TransferError:
    code = errno_of(failed)
    detail = ""
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        detail = (
            f"{os.strerror(code)}: {directory} must be writable, for the new file is written "
            "beside the old one and then renamed"
        )
    return open_error(code, path, detail)


def is_named(fd: int, path: str) -> bool:
    """Whether a path leads to the file that is open, not to another one or to none."""
    try:
        named = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(fd))
