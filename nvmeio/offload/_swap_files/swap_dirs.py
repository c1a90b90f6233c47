"""Swap directories: each of one process alone; several, on several drives, count as one.

A directory is locked, leftovers of dead processes go, and space is reserved in it. Each of several
has a record, a file that names the set and all of its directories, and says how bytes are dealt to
them (`Striping`). The manifests lie in the first alone, so a step is complete at one moment;
records are there, durably, before the first of them. Later the directories may be named in any
order, and by other paths: what counts is the record.

One directory has no record, and its files are those of any version.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
import time
import uuid
from collections.abc import Sequence
from typing import NamedTuple

from nvmeio import _checks, files
from nvmeio._checks import Paths
from nvmeio._distributed.rank_store import several
from nvmeio._io.drives import StripedFile, Striping, weights_of
from nvmeio._storage import durable, untrusted
from nvmeio._storage.locks import open_alone, unlock
from nvmeio._storage.untrusted import SETTINGS_BYTES, read_small
from nvmeio._threads.closing import do_all, on_error, unlink
from nvmeio.errors import IntegrityError, TransferError, counted, naming, transfer_error
from nvmeio.files import File
from nvmeio.offload._swap_files import manifests

_REMOVES = "overwrite=True removes it"

LOCK = "lock"
# All that is ever made here. Nothing else is removed: the directory may have been somebody's.
RECORD = "drives"  # of one that is part of a set
OURS = ("state.0", "state.1", "manifest.0", "manifest.1", "gradients", "weights", "parked", RECORD)


class SwapDir:
    """The directory `name` in the user's `parent`, which this process alone swaps into.

    No other user may enter it. `parent` is made where it is missing, but not those above it. The
    lock is a flock on a file: it goes with the process, however that ends.

    Raises:
        TransferError: `parent` is missing, no directory or not writable; somebody swaps into the
            same place (EBUSY); it is another user's, or a link to anywhere (EPERM, ELOOP, ENOTDIR).
    """

    def __init__(self, parent: str | os.PathLike[str], name: str) -> None:
        above = _checks.directory_path("swap_dir", parent)
        self._above = ""  # that was made for this
        if not os.path.lexists(above):
            durable.make_directory(above, mode=untrusted.DIRECTORY_MODE)
            self._above = above
        elif not os.path.isdir(above):
            raise TransferError(
                errno.ENOTDIR,
                operation="open",
                path=above,
                detail="swap_dir must be a directory on a fast drive",
            )
        self.path = os.path.join(above, name)
        lock = self.file(LOCK)
        self._lock_fd = fd = open_alone(lock, self._refusal, must_lock=True)
        with on_error(self.release):  # a full disk must not leave the lock behind
            with naming("write", lock):
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            self._check_ours()

    def _refusal(self, fd: int) -> TransferError:
        with naming("read", self.file(LOCK)):
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
        detail = (
            f"process {holder or 'unknown'} swaps into this directory: close its optimizer or "
            "module, or choose another swap_dir"
        )
        return TransferError(errno.EBUSY, operation="open", path=self.path, detail=detail)

    def _check_ours(self) -> None:
        """Raise if a file is a link or another user's; nobody can put one there after this."""
        for name in OURS:
            if os.path.lexists(self.file(name)):
                os.close(untrusted.open_own(self.file(name)))

    def clean(self, names: Sequence[str] = OURS) -> None:
        """Remove a dead process's files. Files with other names than ours stay."""
        for name in names:
            path = self.file(name)
            with naming("remove", path), contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def sync_names(self) -> None:
        """Make the names of the files durable: without, a power cut may take what they name."""
        for path in (self.path, os.path.dirname(self.path) or "."):
            durable.sync_directory(path)

    def file(self, name: str) -> str:
        return os.path.join(self.path, name)

    def allocate(self, name: str, nbytes: int) -> File:
        """Open a file of at least `nbytes`, made where it is missing, its blocks reserved.

        If there is not that much space, nothing new is left.
        """
        path = self.file(name)
        fresh = [] if os.path.lexists(path) else [path]
        with on_error(_unlink, fresh), os.fdopen(untrusted.open_own(path), "rb") as file:
            durable.reserve(file.fileno(), nbytes, path)
            return files.open(path, "r+")

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
                    # Under the lock: a waiter for it finds another file, or none.
                    os.unlink(self.file(LOCK))
                    os.rmdir(self.path)
        finally:
            unlock(fd)
            os.close(fd)

    def remove_above(self) -> None:
        """Remove the user's directory as well, if it was made for this and nothing is in it."""
        if self._above:
            with contextlib.suppress(OSError):
                os.rmdir(self._above)


def _unlink(paths: Sequence[str]) -> None:
    for path in paths:
        unlink(path)


class _DriveRecord(NamedTuple):
    set_id: str
    number: int
    directories: list[str]
    weights: list[int]


class SwapDirs:
    """The directories that this process alone swaps into.

    Args:
        parents: The user's directories, one on each drive; as for `SwapDir`. None: a temporary one,
            which goes with `release`.
        name: As for `SwapDir`.
        resume: Take up the existing state.
        overwrite: Remove existing state; without it, state that a run has left there is refused.
        writes: As for `weights_of`, beside reads of 1.

    Raises:
        TransferError: As `SwapDir`; or there is the state of another run (EEXIST).
        ValueError: One is named twice, or none.
        IntegrityError: The state there lies in other directories too; names the missing ones.
    """

    def __init__(
        self,
        parents: Paths | None,
        name: str,
        resume: bool = False,
        *,
        overwrite: bool = False,
        writes: float = 1.0,
    ) -> None:
        self._dirs: list[SwapDir] = []
        self._set_id = ""
        self._weights = [1]
        self._temporary = ""
        with on_error(self.release):
            if parents is None:
                parents = self._temporary = tempfile.mkdtemp(prefix="nvmeio-swap-")
            above = _checks.directory_paths("swap_dir", parents)
            for each in above:
                self._dirs.append(SwapDir(each, name))
            if not (resume and self._found()):
                if not overwrite:
                    self._check_free()
                self.clean()
                if len(above) > 1:
                    self._begin(weights_of(self.paths, 1.0, writes))

    # Directories that belong together

    def _begin(self, weights: list[int]) -> None:
        """Make the records of a new set."""
        self._set_id, self._weights = uuid.uuid4().hex, weights
        for index, each in enumerate(self._dirs):
            self.write_record(index, each.path, self.paths)

    def write_record(self, index: int, path: str, paths: Sequence[str]) -> None:
        """Make a record, durably, in the directory of number `index` of those at `paths`."""
        record = {
            "set": self._set_id,
            "index": index,
            "directories": [os.path.abspath(each) for each in paths],
            "weights": self._weights,
        }
        place = os.path.join(path, RECORD)
        with naming("write", place):
            durable.write_small(untrusted.create(place), json.dumps(record).encode(), os.fsync)

    def _found(self) -> bool:
        """Take up the existing state; False if nothing was completed."""
        records = [_read(each.path) for each in self._dirs]
        begun = [_has_manifest(each.path) for each in self._dirs]
        known = [record for record in records if record is not None]
        if not known:
            if len(self._dirs) == 1:
                return True
            if any(begun):
                alone = self._dirs[begun.index(True)].path
                raise IntegrityError(
                    f"the state in {alone} lies in that directory alone: pass it alone as "
                    "swap_dir, or start afresh with overwrite=True",
                    expected=[os.path.dirname(alone)],
                    found=[os.path.dirname(path) for path in self.paths],
                )
            return False
        first = known[0]
        for each, record in zip(self._dirs, records, strict=True):
            if record is not None and record.set_id != first.set_id:
                raise self._not_these(f"{each.path} belongs to another one", first)
        by_index = {
            record.number: each
            for each, record in zip(self._dirs, records, strict=True)
            if record is not None
        }
        if len(by_index) < len(known):
            raise self._not_these("one of them is there twice", first)
        if 0 in by_index and not _has_manifest(by_index[0].path):
            return False  # killed before anything was complete
        missing = [path for i, path in enumerate(first.directories) if i not in by_index]
        strange = [e.path for e, record in zip(self._dirs, records, strict=True) if record is None]
        if missing or strange:
            told = [f"{', '.join(missing)} is missing"] if missing else []
            if strange:
                told.append(f"{', '.join(strange)} holds nothing of it (is its drive mounted?)")
            raise self._not_these("; ".join(told), first)
        self._dirs = [by_index[index] for index in range(len(by_index))]
        self._set_id, self._weights = first.set_id, first.weights
        return True

    def _not_these(self, what: str, record: _DriveRecord) -> IntegrityError:
        return IntegrityError(
            f"the state lies in {counted(len(record.directories), 'directory')} that belong "
            f"together, and {what}: pass all directories as swap_dir, in any order, or start "
            "afresh with overwrite=True",
            expected=[os.path.dirname(path) for path in record.directories],
            found=[os.path.dirname(path) for path in self.paths],
        )

    # Directories of others

    def _check_free(self) -> None:
        """Raise TransferError (EEXIST) if state would be removed that a run could go on from."""
        for looked_for in (self._state_in, self._part_in):
            for path in self.paths:
                found = looked_for(path)
                if found:
                    raise TransferError(
                        errno.EEXIST,
                        operation="open",
                        path=path,
                        detail=f"another run has left {found}; or name another swap_dir",
                    )

    def _state_in(self, path: str) -> str:
        """The state that another run has left in a directory, and the ways out; "" for none.

        State that a process alone began without a step does not count. With several ranks it does:
        another rank may have made the first step, and go on from the others' initial state.
        """
        try:
            complete, unusable = manifests.read(path)
        except IntegrityError as damaged:
            return f"its state, which is damaged ({damaged}): {_REMOVES}"
        last = max(complete, key=lambda each: each.generation, default=None)
        if last is None or (last.generation == 1 and not unusable and not several()):
            return ""
        written = time.localtime(os.path.getmtime(manifests.place(path, last.generation)))
        return (
            f"its state, {last}, written {time.strftime('%Y-%m-%d %H:%M', written)}: resume=True "
            'goes on from it, or begins if there is none; resume="must" goes on from it, or '
            f"raises; {_REMOVES}"
        )

    def _part_in(self, path: str) -> str:
        """The same for a part of a state that lies in several directories."""
        try:
            record = _read(path)
        except IntegrityError as damaged:
            return f"a part of its state, whose record is damaged ({damaged}): {_REMOVES}"
        if record is None or not self._is_alive(path, record):
            return ""
        return (
            f"a part of its state, which lies in {', '.join(record.directories)}: name all of them "
            f'with resume=True or resume="must" to go on from it; {_REMOVES}, this part alone'
        )

    def _is_alive(self, path: str, record: _DriveRecord) -> bool:
        """Whether the state that a directory is a part of may exist: the set's first one tells."""
        if not os.path.exists(os.path.join(path, "state.0")):
            return False  # killed while it was made
        for first in (*self.paths, record.directories[0]):
            with contextlib.suppress(IntegrityError, TransferError):
                beginning = _read(first)
                if beginning is not None and beginning[:2] == (record.set_id, 0):
                    return bool(self._state_in(first))
        return True  # it is not here to be asked

    def hint(self) -> str:
        """A hint at a state near by that may be meant: of other ranks, or in the parent."""
        kind = os.path.basename(self.path).split("-")[0]
        mine = _world(os.path.basename(self.path))
        near: list[str] = []
        for above in map(os.path.dirname, self.paths):
            for name in (".", *sorted(os.listdir(above or "."))):
                path = os.path.normpath(os.path.join(above, name))
                other = name == "." or (name.split("-")[0] == kind and _world(name) != mine)
                if other and _has_manifest(path):
                    near.append(path)
        return (
            f". There is a state in {', '.join(near)}: swap_dir is the directory above it, and a "
            "state of several ranks is that of as many"
            if near
            else ""
        )

    def withdraw(self) -> None:
        """Remove everything that was made here, as if the directories had not been named."""
        self.release(remove=True)
        for each in self._dirs:
            each.remove_above()

    @property
    def layout(self) -> str:
        """The set and its weights, for the signature in manifests; "" for one directory."""
        return f"{self._set_id} {self._weights}" if self._set_id else ""

    # As `SwapDir`

    @property
    def path(self) -> str:
        """The directory of the manifests."""
        return self._dirs[0].path

    @property
    def paths(self) -> list[str]:
        """All directories, in the order of the striping."""
        return [each.path for each in self._dirs]

    def clean(self) -> None:
        """Remove a dead process's files; manifests first, for they refer to all the rest."""
        for each in self._dirs:
            each.clean(manifests.NAMES)
        for each in self._dirs:
            each.clean()

    def sync_names(self) -> None:
        for each in self._dirs:
            each.sync_names()

    def file(self, name: str, drive: int = 0) -> str:
        return self._dirs[drive].file(name)

    def striping(self, bands: Sequence[int]) -> Striping:
        """The division of bands of bytes over the drives; the same after a restart."""
        return Striping(self._weights, bands)

    def allocate(self, name: str, bands: Sequence[int]) -> StripedFile:
        """Open a file of at least these bands; nothing new is left if a drive has no room."""
        striping = self.striping(bands)
        opened: list[File] = []
        fresh: list[str] = []
        with on_error(_unlink, fresh), on_error(do_all, (file.close for file in opened)):
            for each, length in zip(self._dirs, striping.lengths, strict=True):
                path = each.file(name)
                missing = not os.path.lexists(path)
                opened.append(each.allocate(name, length))
                fresh += [path] * missing
        return StripedFile(opened, striping)

    def release(self, remove: bool = False) -> None:
        """Give up the locks, and with `remove` everything there; idempotent."""
        remove = remove or bool(self._temporary)
        try:
            if remove:
                for each in self._dirs:
                    each.clean_if_locked(manifests.NAMES)
        finally:
            for each in self._dirs:
                each.release(remove)
            if self._temporary:
                with contextlib.suppress(OSError):
                    os.rmdir(self._temporary)


def _has_manifest(path: str) -> bool:
    places = [os.path.join(path, name) for name in manifests.NAMES]
    return any(os.path.isfile(each) and os.path.getsize(each) for each in places)


def _world(name: str) -> str:
    """The number of ranks in a directory's name; see `directory_name`."""
    return name.partition("-of-")[2]


def _read(directory: str) -> _DriveRecord | None:
    """The record of a directory; None if it lacks one, or has a torn one before the first step.

    Raises:
        IntegrityError: It is damaged.
    """
    path = os.path.join(directory, RECORD)
    try:
        told = json.loads(read_small(path, SETTINGS_BYTES))
        weights = list(told["weights"])
        record = _DriveRecord(str(told["set"]), told["index"], list(told["directories"]), weights)
        whole = all(type(each) is int and each > 0 for each in weights)
        if not whole or record.number not in range(len(weights)):
            raise ValueError("impossible numbers: a drive's, or weights")
        if len(record.directories) != len(weights):
            raise ValueError(f"not as many weights as directories: {weights}")
    except FileNotFoundError:
        return None
    except OSError as failed:
        raise transfer_error(failed, "open", path) from failed
    except (ValueError, KeyError, TypeError, RecursionError) as wrong:
        state = os.path.join(directory, "state.0")
        if not _has_manifest(directory) and not os.path.exists(state):
            return None  # killed while it was made
        raise IntegrityError(
            f"{path} is damaged ({wrong}): it says which directories belong together; go on from "
            "a checkpoint or a snapshot",
            expected="the record of a swap directory on one of several drives",
            found="something else",
        ) from wrong
    return record
