"""Which living processes have a store open, as /proc says.

Processes of other users are seen by root alone, and those of other containers by none. A lock and a
lease know of them, too, but not which they are.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from nvmeio._memory.system import text_of

_MOST_CHARACTERS = 60


class User(NamedTuple):
    """A process that has a store open: its number, its command line, and whether it writes it."""

    pid: int
    command: str
    writes: bool

    def __str__(self) -> str:
        return f"process {self.pid} ({self.command}) {'writes' if self.writes else 'reads'} it"


def users_of(paths: Iterable[Path]) -> list[User]:
    """The other processes that have one of these files open; a few system calls a descriptor."""
    wanted = set()
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            facts = os.stat(path, follow_symlinks=False)
            wanted.add((facts.st_dev, facts.st_ino))
    users = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            modes = list(_modes(process, wanted))
            if modes:
                users.append(User(int(process.name), _command(process), any(modes)))
    return sorted(users)


def _modes(process: Path, wanted: set[tuple[int, int]]) -> Iterable[bool]:
    """For each of its descriptors that lead to one of the files: whether it may write there."""
    try:
        descriptors = os.listdir(process / "fd")
    except OSError:
        return  # it has ended, or is another user's
    for number in descriptors:
        with contextlib.suppress(OSError):
            facts = os.stat(process / "fd" / number)
            if (facts.st_dev, facts.st_ino) in wanted:
                yield _may_write(text_of(process / "fdinfo" / number))


def _may_write(fdinfo: str) -> bool:
    flags = re.search(r"^flags:\s*([0-7]+)", fdinfo, re.MULTILINE)
    return flags is not None and int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY


def _command(process: Path) -> str:
    words = text_of(process / "cmdline").replace("\0", " ").strip()
    words = words or text_of(process / "comm").strip()
    return words if len(words) <= _MOST_CHARACTERS else f"{words[:_MOST_CHARACTERS]}…"
