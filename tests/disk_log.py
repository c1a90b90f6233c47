"""A loss of power that no machine suffers: what is written is logged, and images made of the log.

`DiskLog` stands between the process and the calls of `os` that change files, and notes each of
them. `image` then makes what a drive may hold if the power goes at some moment: what was
synchronised before it is there; of the rest each write, size and name may have arrived or not, a
write may be torn between two sectors. Names of one directory arrive in their order, as a journal
keeps them, and nothing else is in any order.

The engine has to be the portable one (`engine="threads"`, or nvmeio.testing's): it moves bytes with
calls of `os`, too.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nvmeio._bindings import OwnFds
from nvmeio._storage import replace

_SECTOR_BYTES = 512


class Event(NamedTuple):
    """One call: `began` counts what had been noted when it began."""

    kind: str
    target: Any  # the file's number; of names, the directory
    began: int
    what: tuple[Any, ...]


class DiskLog:
    """Notes what happens to files below a folder that is empty when it begins.

    Args:
        folder: Everything outside of it is left alone.
        before_sync: Called with the path of what is about to be synchronised: a slow drive.
    """

    def __init__(
        self, folder: Path, before_sync: Callable[[str], None] = lambda path: None
    ) -> None:
        self.folder = os.path.realpath(folder)
        self.events: list[Event] = []
        self._before_sync = before_sync
        self._lock = threading.RLock()
        self._numbers: dict[int, int] = {}  # inode → number of the file, of those that are there
        self._count = 0

    def __len__(self) -> int:
        with self._lock:
            return len(self.events)

    # Noting

    @contextmanager
    def recording(self, patch: pytest.MonkeyPatch) -> Iterator[DiskLog]:
        with patch.context() as patched:
            for name in ("write", "pwrite", "pwritev"):
                patched.setattr(os, name, self._writing(name, getattr(os, name)))
            for name in ("fsync", "fdatasync"):
                patched.setattr(os, name, self._syncing(getattr(os, name)))
            for name in ("truncate", "ftruncate"):
                patched.setattr(os, name, self._sizing(getattr(os, name)))
            for name in ("unlink", "remove", "rmdir", "mkdir"):
                patched.setattr(os, name, self._naming(name, getattr(os, name)))
            patched.setattr(os, "open", self._opening(os.open))
            patched.setattr(OwnFds, "open", self._owning(OwnFds.open))
            patched.setattr(os, "symlink", self._linking(os.symlink))
            for name in ("rename", "replace"):
                patched.setattr(os, name, self._moving(getattr(os, name)))
            patched.setattr(replace, "is_local", lambda path: False)  # by steps, which are seen
            yield self

    def note(self, kind: str, target: Any, *what: Any, began: int | None = None) -> None:
        with self._lock:
            begun = len(self.events) if began is None else began
            self.events.append(Event(kind, target, begun, what))

    def _inside(self, path: Any, dir_fd: int | None = None) -> str | None:
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        above = os.getcwd() if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
        full = os.path.join(above, os.fspath(path))
        full = os.path.join(os.path.realpath(os.path.dirname(full)), os.path.basename(full))
        return full if full.startswith(self.folder + os.sep) else None

    def _number(self, fd: int) -> int | None:
        try:
            facts = os.fstat(fd)
        except OSError:
            return None
        return self._numbers.get(facts.st_ino)

    def _born(self, path: str) -> int:
        self._count += 1
        self._numbers[os.lstat(path).st_ino] = self._count
        return self._count

    def _writing(self, name: str, call: Any) -> Any:
        def write(fd: int, data: Any, *rest: Any) -> int:
            with self._lock:
                number = self._number(fd)
                if number is not None:
                    given = b"".join(map(bytes, data)) if name == "pwritev" else bytes(data)
                    at = rest[0] if rest else os.lseek(fd, 0, os.SEEK_CUR)
                    self.note("write", number, at, given)
            done: int = call(fd, data, *rest)
            return done

        return write

    def _syncing(self, call: Any) -> Any:
        def sync(fd: int) -> None:
            path = self._inside(fd)
            if path is None and os.readlink(f"/proc/self/fd/{fd}") != self.folder:
                return call(fd)  # type: ignore[no-any-return]
            began = len(self)
            self._before_sync(path or self.folder)
            call(fd)
            number = self._number(fd)
            if number is not None:
                self.note("sync", number, os.fstat(fd).st_size, began=began)
            else:
                self.note("sync names", path or self.folder, began=began)
            return None

        return sync

    def _sizing(self, call: Any) -> Any:
        def resize(path: Any, nbytes: int) -> None:
            with self._lock:
                fd = path if isinstance(path, int) else os.open(path, os.O_RDONLY)
                number = self._number(fd)
                if not isinstance(path, int):
                    os.close(fd)
                if number is not None:
                    self.note("size", number, nbytes)
                call(path, nbytes)

        return resize

    def _opening(self, call: Any) -> Any:
        def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            if not flags & os.O_CREAT:
                return int(call(path, flags, mode, dir_fd=dir_fd))
            with self._making(path, dir_fd):
                return int(call(path, flags, mode, dir_fd=dir_fd))

        return opened

    def _owning(self, call: Any) -> Any:
        """The shim opens files as well: what it has opened, no interrupt can lose."""

        def opened(fds: OwnFds, direct: bool, path: str, flags: int) -> int:
            if not flags & os.O_CREAT:
                return int(call(fds, direct, path, flags))
            with self._making(path, None):
                return int(call(fds, direct, path, flags))

        return opened

    @contextmanager
    def _making(self, path: Any, dir_fd: int | None) -> Iterator[None]:
        """Around a call that may make a file."""
        with self._lock:
            full = self._inside(path, dir_fd)
            fresh = full is not None and not os.path.lexists(full)
            yield
            if full is not None and fresh:
                self.note("name", os.path.dirname(full), full, ("file", self._born(full)))

    def _naming(self, name: str, call: Any) -> Any:
        def change(path: Any, *args: Any, dir_fd: int | None = None) -> None:
            with self._lock:
                full = self._inside(path, dir_fd)
                call(path, *args, dir_fd=dir_fd)
                if full is not None:
                    thing = ("directory", None) if name == "mkdir" else None
                    if thing is not None:  # it may have the inode of a file that was removed
                        self._numbers.pop(os.lstat(full).st_ino, None)
                    self.note("name", os.path.dirname(full), full, thing)

        return change

    def _linking(self, call: Any) -> Any:
        def link(source: Any, path: Any) -> None:
            with self._lock:
                call(source, path)
                full = self._inside(path)
                if full is not None:
                    self.note("name", os.path.dirname(full), full, ("link", os.fspath(source)))

        return link

    def _moving(self, call: Any) -> Any:
        def move(source: Any, path: Any) -> None:
            with self._lock:
                before, after = self._inside(source), self._inside(path)
                call(source, path)
                if before is not None and after is not None:
                    assert os.path.dirname(before) == os.path.dirname(after)
                    self.note("move", os.path.dirname(before), before, after)

        return move

    # What a loss of power leaves

    def image(self, at: int, target: Path, chance: random.Random) -> None:
        """Make what may be left when the power goes after the first `at` events.

        Args:
            at: How many events have been.
            target: Made; what was in `folder` is in it.
            chance: Decides about what was not synchronised; a share of it, from none to all.
        """
        events = self.events[:at]
        share = chance.choice((0.0, 0.3, 0.7, 1.0))
        names = self._names(events, chance, share)
        target.mkdir(parents=True)
        contents: dict[int, bytes] = {}
        for path, (kind, what) in sorted(names.items()):
            to = target / os.path.relpath(path, self.folder)
            if not to.parent.is_dir():
                continue  # its directory's own name did not arrive
            if kind == "directory":
                to.mkdir()
            elif kind == "link":
                to.symlink_to(what)
            else:
                if what not in contents:
                    contents[what] = self._content(events, what, chance, share)
                to.write_bytes(contents[what])

    def _names(
        self, events: list[Event], chance: random.Random, share: float
    ) -> dict[str, tuple[str, Any]]:
        """What each path is, of a prefix of each directory's changes."""
        changes = [(n, e) for n, e in enumerate(events) if e.kind in ("name", "move")]
        kept: dict[str, int] = {}
        for directory in {event.target for _, event in changes}:
            there = [n for n, event in changes if event.target == directory]
            synced = max(
                (e.began for e in events if e.kind == "sync names" and e.target == directory),
                default=0,
            )
            pending = [n for n in there if n >= synced]
            kept[directory] = sum(n < synced for n in there) + sum(
                1 for _ in range(len(pending)) if chance.random() < share
            )
        names: dict[str, tuple[str, Any]] = {}
        for _, event in changes:
            if not kept[event.target]:
                continue
            kept[event.target] -= 1
            if event.kind == "move":
                self._move(names, *event.what)
            elif event.what[1] is None:
                names.pop(event.what[0], None)
            else:
                names[event.what[0]] = event.what[1]
        return names

    @staticmethod
    def _move(names: dict[str, tuple[str, Any]], before: str, after: str) -> None:
        below = [path for path in names if path == before or path.startswith(before + os.sep)]
        for path in below:
            names[after + path[len(before) :]] = names.pop(path)

    @staticmethod
    def _content(events: list[Event], number: int, chance: random.Random, share: float) -> bytes:
        mine = [(n, e) for n, e in enumerate(events) if e.target == number]
        syncs = [e for _, e in mine if e.kind == "sync"]
        synced = max((e.began for e in syncs), default=0)
        data = bytearray()
        for position, event in mine:
            if event.kind == "sync":
                if event.began <= synced and len(data) < event.what[0]:
                    data.extend(bytes(event.what[0] - len(data)))
                continue
            pending = position >= synced
            if pending and chance.random() >= share:
                continue
            if event.kind == "size":
                del data[event.what[0] :]
                data.extend(bytes(event.what[0] - len(data)))
                continue
            at, given = event.what
            if pending and len(given) > _SECTOR_BYTES and chance.random() < 0.5:
                sectors = -(-len(given) // _SECTOR_BYTES)
                given = given[: chance.randrange(1, sectors) * _SECTOR_BYTES]
            if len(data) < at:
                data.extend(bytes(at - len(data)))
            data[at : at + len(given)] = given
        return bytes(data)
