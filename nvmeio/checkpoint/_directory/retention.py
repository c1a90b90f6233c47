"""The files of a Checkpointer's directory: which steps are there, which is the latest, which goes.

    step-00000012.pt      a checkpoint of one file
    step-00000012/        one of several ranks: rank-00000.pt … and index.json
    latest -> step-…      the one that was completed last
    .….nvmeio-tmp         being written, or left by a writer that was killed

A name ``step-…`` is given only to what is complete and durable. The order is that of completion,
not of the step numbers: after going back from step 100 to step 50, step 50 is the latest. A file
says itself when it was completed (`complete`), because a copy of the directory may have no link and
other times: the comment at the end of an archive, or the index of a directory.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import stat
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from nvmeio import _checks
from nvmeio._files.descriptors import open_error
from nvmeio._formats.sniff import STEP
from nvmeio._storage.durable import check_above, remove_directory, rename, write_small
from nvmeio._storage.locks import lock_alone
from nvmeio._storage.replace import SUFFIX, remove_leftovers, temporary_name
from nvmeio._storage.untrusted import INDEX_BYTES, create
from nvmeio._threads.closing import on_error, opened, unlink
from nvmeio.errors import TransferError, naming

logger = logging.getLogger("nvmeio")

LATEST = "latest"
INDEX = "index.json"

_DEAD = re.compile(rf"\.({LATEST}|step-[0-9]{{8,}})\.[0-9]+-[0-9a-f]{{8}}{re.escape(SUFFIX)}")
_MOST_POINTER_BYTES = 255


# The comment behind the end record of a zip archive, which all readers skip.
_COMPLETED = re.compile(rb"nvmeio completed ([0-9]{19})")
COMMENT_BYTES = len(b"nvmeio completed ") + 19

# A completion time of this or more (the year 2262) is damage.
_END_OF_TIME_NS = 1 << 63

# The end of an archive, which has the CRC-32s of up to a thousand records: two files are compared
# by it that do not say when they were completed.
_TAIL_BYTES = 64 << 10


class Generation(NamedTuple):
    """A complete checkpoint, a file or a directory of ranks; they sort by their completion."""

    completed_ns: int
    step: int
    path: str
    of_ranks: bool


class Lineage:
    """Whether a Checkpointer goes on from the checkpoints in its directory, or starts over.

    A new run counts its steps from 0. In the directory of an old one each of its saves would
    overwrite a checkpoint that nobody has asked for yet, so the first of them is refused, unless
    the caller has said `overwrite`. `goes_on` says that one was restored or saved, or that.
    """

    def __init__(self, overwrite: bool) -> None:
        self.goes_on = overwrite

    def plan(self, directory: str) -> dict[str, Any]:
        """This rank's message to the others before a save."""
        there = [] if self.goes_on else generations(directory)
        found = latest(directory, there) or (there[-1] if there else None)
        return {"goes_on": self.goes_on, "latest": None if found is None else found.step}

    def check(
        self, plans: Sequence[dict[str, Any]], newest: int | None, step: int, path: str
    ) -> None:
        """Check that a step may be saved, from what all ranks said; the same on all.

        `newest` is the step that `restore` would load. Raises TransferError (EEXIST) if the save
        would start over the existing ones.
        """
        if newest is not None and step <= newest and not any(each["goes_on"] for each in plans):
            detail = (
                f"step {newest} is the latest there, but this Checkpointer has not restored a "
                f"step: saves from step {step} on would overwrite the existing ones, one after the "
                "other. Restore a checkpoint with this Checkpointer first to go on from it; "
                "otherwise choose another directory, or pass overwrite=True"
            )
            raise TransferError(errno.EEXIST, operation="save", path=path, detail=detail)
        self.goes_on = True


def file_path(directory: str, step: int) -> str:
    return os.path.join(directory, f"step-{step:08d}.pt")


def ranks_path(directory: str, step: int) -> str:
    return os.path.join(directory, f"step-{step:08d}")


def generations(directory: str) -> list[Generation]:
    """All complete checkpoints of a directory, the oldest first; [] if there is no directory."""
    found: list[Generation] = []
    with (
        naming("open", directory),
        contextlib.suppress(FileNotFoundError),
        os.scandir(directory) as entries,
    ):
        for entry in entries:
            if not (match := STEP.fullmatch(entry.name)):
                continue
            of_ranks = match[2] is None
            completed_ns = _completed_ns(entry.path, of_ranks)
            if completed_ns is not None:
                found.append(Generation(completed_ns, int(match[1]), entry.path, of_ranks))
    return sorted(found)


def _completed_ns(path: str, of_ranks: bool) -> int | None:
    """When a checkpoint was completed; None if there is none.

    One that does not say it, of an older nvmeio or made by hand, has its time of modification.
    """
    # Renamed meanwhile, a dangling link, or no checkpoint; of a pipe, which would block.
    flags = os.O_RDONLY | os.O_NONBLOCK
    with (
        contextlib.suppress(OSError),
        opened(os.path.join(path, INDEX) if of_ranks else path, flags) as fd,
    ):
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            return None
        said = _said_in_index(fd) if of_ranks else _said_in_archive(fd, facts.st_size)
        return said if said is not None and 0 <= said < _END_OF_TIME_NS else facts.st_mtime_ns
    return None


def _said_in_archive(fd: int, nbytes: int) -> int | None:
    comment = os.pread(fd, COMMENT_BYTES, max(nbytes - COMMENT_BYTES, 0))
    match = _COMPLETED.fullmatch(comment)
    return None if match is None else int(match[1])


def _said_in_index(fd: int) -> int | None:
    with contextlib.suppress(ValueError, RecursionError):
        index = json.loads(os.pread(fd, INDEX_BYTES, 0))
        said = index.get("completed_ns") if isinstance(index, dict) else None
        return said if type(said) is int else None
    return None


def latest(directory: str, there: list[Generation]) -> Generation | None:
    """The checkpoint that the pointer leads to; None if it is missing or leads to none."""
    pointer = os.path.join(directory, LATEST)
    name = _pointer(directory)
    if name:
        path = os.path.normpath(os.path.join(directory, name))
        return next((each for each in there if os.path.normpath(each.path) == path), None)
    copied = [each for each in there if _is_copy(pointer, each)]
    return copied[0] if len(copied) == 1 else None


def _is_copy(pointer: str, of: Generation) -> bool:
    """Whether the pointer has become a copy of a checkpoint, as after ``cp -rL``."""
    with contextlib.suppress(OSError):
        if of.of_ranks:
            names = [os.path.join(path, INDEX) for path in (pointer, of.path)]
            return os.path.isdir(pointer) and _tail(names[0]) == _tail(names[1])
        same_size = os.path.getsize(pointer) == os.path.getsize(of.path)
        return same_size and os.path.isfile(pointer) and _tail(pointer) == _tail(of.path)
    return False


def _tail(path: str) -> bytes:
    with opened(path, os.O_RDONLY | os.O_NONBLOCK) as fd:
        return os.pread(fd, _TAIL_BYTES, max(os.fstat(fd).st_size - _TAIL_BYTES, 0))


def newest(directory: str) -> Generation | None:
    """The checkpoint to go on from: the latest, or, with a warning, the one completed last."""
    there = generations(directory)
    if not there:
        return None
    found = latest(directory, there)
    if found is None:
        found = there[-1]
        name = _pointer(directory)
        if not os.path.lexists(os.path.join(directory, LATEST)):
            wrong = "is missing"
        elif name:
            wrong = f"names {name!r}, which is not there"
        else:
            wrong = "is not a link, and not a copy of one step"
        logger.warning(
            "%s: the pointer %r %s; going on from step %d, which was completed last",
            directory,
            LATEST,
            wrong,
            found.step,
        )
    return found


def check_pointer(directory: str) -> None:
    """Refuse a pointer that a save would have to destroy, though nothing else has its bytes.

    Raises TransferError (EEXIST): it is a file or a directory, and not a copy of a step.
    """
    pointer = os.path.join(directory, LATEST)
    is_link = os.path.islink(pointer) or not os.path.lexists(pointer)
    if is_link or _pointer(directory):
        return
    if not any(_is_copy(pointer, each) for each in generations(directory)):
        raise open_error(
            errno.EEXIST,
            pointer,
            "a save makes this the link to the newest step, and it is a file or directory of its "
            "own, of which no step is a copy: move it away, or name it step-00000012.pt (or "
            "whatever its step is)",
        )


def surplus(directory: str, keep: int, path: str) -> list[Generation]:
    """The checkpoints that may go before a new one is complete at `path`, the oldest first.

    `keep` of them must stay whole. The one at `path` is replaced, and not in the list.
    """
    there = generations(directory)
    pinned = latest(directory, there)
    others = [each for each in there if each.path != path and each != pinned]
    return others[: max(len(there) - keep, 0)]


def remove(generation: Generation) -> None:
    """Delete a checkpoint, as far as that is possible.

    A process that has a file open keeps it. A directory that is being read stays, for a later save.
    """
    if not generation.of_ranks:
        unlink(generation.path)
        return
    away = take_directory(generation.path)
    if away is not None:
        remove_directory(away)


def take_directory(path: str) -> str | None:
    """Give a directory that nobody reads a temporary name, which is durable; its new path.

    Half a directory must not look like a checkpoint: neither now nor after a crash.
    """
    away = temporary_name(*os.path.split(path))
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    with contextlib.suppress(OSError), opened(path, flags) as fd:
        if lock_alone(fd):
            rename(path, away)
            return away
    return None


def remove_dead(directory: str) -> None:
    """Delete the temporary files, directories and pointers of dead writers.

    For the holder of the directory's lock: nobody else makes such directories and pointers here.
    Temporary files have locks of their own.
    """
    remove_leftovers(directory)
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            match = _DEAD.fullmatch(entry.name)
            if match is None:
                continue
            if match[1] == LATEST:
                unlink(entry.path)
            elif entry.is_dir(follow_symlinks=False):
                remove_directory(entry.path)


def completion(directory: str) -> int:
    """A time for a new checkpoint, later than that of every existing one, in ns."""
    there = generations(directory)
    return max(time.time_ns(), there[-1].completed_ns + 1) if there else time.time_ns()


def complete(fd: int, nbytes: int, completed_ns: int) -> None:
    """Let an archive of `nbytes` say when it was completed, in the comment at its end."""
    comment = b"nvmeio completed %019d" % completed_ns
    end = nbytes - 2  # the length of the comment, the last field of the end record
    if os.pread(fd, 2, end) == b"\0\0":  # not one that torch.save wrote, with a comment
        text = len(comment).to_bytes(2, "little") + comment
        if os.pwrite(fd, text, end) != len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    set_time(fd, completed_ns)


def set_time(fd: int, completed_ns: int) -> None:
    """Give an open file a time of modification, for people and for an older nvmeio."""
    with contextlib.suppress(OSError):
        os.utime(fd, ns=(completed_ns, completed_ns))


def set_latest(directory: str, name: str) -> None:
    """Let the pointer lead to a checkpoint, atomically and durably; an error changes nothing."""
    pointer = os.path.join(directory, LATEST)
    temporary = temporary_name(directory, LATEST)
    with naming("rename", pointer), on_error(unlink, temporary):
        try:
            os.symlink(name, temporary)
        except OSError as refused:
            if refused.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                raise
            # A file system without symbolic links.
            write_small(create(temporary, 0o666), name.encode(), os.fsync)
        away = ""
        is_directory = os.path.isdir(pointer) and not os.path.islink(pointer)
        if is_directory and any(_is_copy(pointer, each) for each in generations(directory)):
            away = temporary_name(directory, LATEST)
            rename(pointer, away)
        rename(temporary, pointer)
        if away:
            remove_directory(away)


def _pointer(directory: str) -> str:
    """The name that the pointer says; "" if there is none, or it is a copy of a checkpoint."""
    path = os.path.join(directory, LATEST)
    with contextlib.suppress(OSError):
        return os.readlink(path)
    flags = os.O_RDONLY | os.O_NONBLOCK  # a pipe would block
    with contextlib.suppress(OSError), opened(path, flags) as fd:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            name = os.read(fd, _MOST_POINTER_BYTES).decode(errors="replace").strip()
            return name if STEP.fullmatch(os.path.basename(name)) else ""
    return ""


def checked_directories(directory: Any, shared: bool) -> list[str]:
    """One, or with ``shared=False`` one or several."""
    if not isinstance(shared, bool):
        raise TypeError(f"shared must be True or False, not {shared!r:.80}")
    if not isinstance(directory, (list, tuple)):
        return [_checked_directory(directory)]
    if shared:
        raise TypeError(
            "several directories are for ranks with their own drives: give shared=False as well"
        )
    if not directory:
        raise ValueError("directory must be one or several, not an empty list")
    return list(dict.fromkeys(map(_checked_directory, directory)))


def _checked_directory(directory: str | os.PathLike[str]) -> str:
    path = _checks.directory_path("directory", directory)
    if not path or "\0" in path:
        raise ValueError(f"directory must be the path of a directory, not {path!r}")
    path = os.path.abspath(path)  # os.chdir must not move it between two saves
    if os.path.exists(path) and not os.path.isdir(path):
        raise open_error(errno.ENOTDIR, path, "a Checkpointer needs a directory, not a file")
    check_above(path)
    return path
