"""Drives that ranks do not share: whose part of which save lies where, and which saves are whole.

    step-00000012.00000007-3fa9c1d25b60e714.part-00001-of-00004
         │        │        │                └ of an archive of all ranks, or `rank-…`: of one
         │        │        └ of this save, and of no other
         │        └ how many saves were before it
         └ its step

A part gets that name when all parts of its save are durable. So a save is whole if all of them are
named, and needs no other record. Each rank tells all others which parts it has, and every rank
draws the same conclusions: which save is the newest, and which is one too many.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from nvmeio._files.descriptors import open_error
from nvmeio._storage.durable import make_directory
from nvmeio._storage.locks import become_writer
from nvmeio._storage.replace import temporary_name
from nvmeio._storage.untrusted import create
from nvmeio._threads.closing import unlink
from nvmeio.checkpoint._directory import retention
from nvmeio.errors import counted, naming

_PART = re.compile(
    r"step-([0-9]{8,})\.([0-9]{8,})-([0-9a-f]{16})\.(part|rank)-([0-9]{5,})-of-([0-9]{5,})"
)
_MARK = "which-directory"

# More is not told of in an error.
_FEW = 8


class Save(NamedTuple):
    """One save. They sort in the order in which they were made: `order` is how many were before.

    `kind` is "part" or "rank"; see `PartHead`. `parts` is how many it has.
    """

    order: int
    token: str
    step: int
    kind: str
    parts: int

    @property
    def name(self) -> str:
        """The beginning of its parts' names."""
        return f"step-{self.step:08d}.{self.order:08d}-{self.token}"

    def part(self, number: int) -> tuple[int, str, str, int, int]:
        """The first entries in the head of one of its parts."""
        return self.step, self.token, self.kind, number, self.parts

    def part_name(self, number: int) -> str:
        return f"{self.name}.{self.kind}-{number:05d}-of-{self.parts:05d}"


def parsed(name: str) -> tuple[Save, int] | None:
    """Which save and which of its parts a file is, by its name."""
    match = _PART.fullmatch(name)
    if match is None:
        return None
    step, order, token, kind, number, count = match.groups()
    save = Save(int(order), token, int(step), kind, int(count))
    return (save, int(number)) if int(number) < save.parts else None


def parts_in(directories: Iterable[str]) -> list[str]:
    """The paths of all parts; a missing directory has no parts."""
    found: list[str] = []
    for directory in directories:
        with (
            naming("open", directory),
            contextlib.suppress(FileNotFoundError),
            os.scandir(directory) as entries,
        ):
            found += [each.path for each in entries if parsed(each.name) and each.is_file()]
    return sorted(found)


class OwnDrives:
    """The directories of one rank; it saves into the first. `apart`: no other rank has them."""

    def __init__(self, directories: Sequence[str]) -> None:
        self.directories = list(directories)
        self.apart = False

    def has(self) -> dict[str, Any]:
        """This rank's directories and the names of the parts there, for the others."""
        names = [os.path.basename(path) for path in parts_in(self.directories)]
        shared = any(retention.generations(directory) for directory in self.directories)
        return {"where": ", ".join(self.directories), "names": names, "of_all": shared}

    def paths(self, save: Save) -> dict[int, str]:
        """Its parts that are here, by their number."""
        found: dict[int, str] = {}
        for path in parts_in(self.directories):
            known = parsed(os.path.basename(path))
            if known is not None and known[0] == save:
                found.setdefault(known[1], path)
        return found

    def remove(self, save: Save, but: str | None = None) -> None:
        """Delete its parts that are here, as far as that is possible."""
        for path in self.paths(save).values():
            if path != but:
                unlink(path)


class DriveMark:
    """An empty file by which other ranks see whether a directory, made if missing, is theirs."""

    def __init__(self, directory: str) -> None:
        make_directory(directory)
        self._path = temporary_name(directory, _MARK)
        self.name = os.path.basename(self._path)
        with naming("open", self._path):
            self._fd = create(self._path, 0o600)
        become_writer(self._fd)  # nobody takes it for leftovers to remove

    def remove(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            unlink(self._path)
            os.close(fd)


class Survey:
    """The parts that all ranks have, from their messages (`OwnDrives.has`); the same on all."""

    def __init__(self, told: Sequence[dict[str, Any]]) -> None:
        self._where = [str(each["where"]) for each in told]
        self._of_all = any(each["of_all"] for each in told)
        self.saves: dict[Save, dict[int, list[int]]] = {}  # → number of a part → ranks that have it
        for rank, each in enumerate(told):
            for name in each["names"]:
                known = parsed(name)
                if known is not None:
                    save, number = known
                    self.saves.setdefault(save, {}).setdefault(number, []).append(rank)

    def whole(self) -> list[Save]:
        """The saves whose parts are all there, the oldest first."""
        return sorted(save for save, parts in self.saves.items() if len(parts) == save.parts)

    def next_order(self) -> int:
        """The order of a save that comes after all of them."""
        return max((save.order for save in self.saves), default=0) + 1

    def surplus(self, keep: int) -> tuple[list[Save], list[Save]]:
        """The saves to delete before a new one is whole: whole saves, oldest first; and remains.

        The newest `keep` whole ones stay, and so do all that are newer than the oldest of these: a
        drive that is missing may come back.
        """
        whole = self.whole()
        stay = whole[max(len(whole) - keep, 0) :]
        rest = sorted(set(self.saves) - set(whole))
        remains = [save for save in rest if len(stay) == keep and save < stay[0]]
        return whole[: len(whole) - len(stay)], remains

    def chosen(self, step: int | None) -> tuple[Save, str]:
        """The save to restore (`step` None is the newest), and a warning of a newer one not whole.

        Raises TransferError if there is none; says what is missing, and what can be restored.
        """
        whole = self.whole()
        found = [save for save in whole if step in (None, save.step)]
        newer = sorted(save for save in set(self.saves) - set(whole) if step in (None, save.step))
        if found:
            save = found[-1]
            newer = [each for each in newer if each > save]
            if not newer:
                return save, ""
            told = f"{self.missing(newer[-1])}; going on from step {save.step}, which is complete"
            return save, told
        steps = sorted({save.step for save in whole})
        can = f"what can be restored: step {', '.join(map(str, steps))}" if steps else ""
        if newer:
            what = f"{self.missing(newer[-1])}; {can or 'no other step is complete, either'}"
        elif step is None:
            what = "no rank's drive holds a complete checkpoint yet"
        else:
            what = f"there is no step {step}; {can or 'there are no checkpoints'}"
        if self._of_all:
            what += "; but checkpoints that ranks with one directory have saved: a Checkpointer "
            what += "without shared=False restores these"
        where = self._where[0] if len(self._where) == 1 else f"{self._where[0]} (of rank 0)"
        raise open_error(errno.ENOENT, where, what)

    def missing(self, save: Save) -> str:
        """Name the parts that are on no drive, and the ranks without any part."""
        parts = self.saves[save]
        lost = [number for number in range(save.parts) if number not in parts]
        numbers = ", ".join(map(str, lost[:_FEW])) + (" and more" if len(lost) > _FEW else "")
        last = save.parts - 1
        told = f"step {save.step} is incomplete: of parts 0 to {last}, no rank has {numbers}"
        having = {rank for ranks in parts.values() for rank in ranks}
        without = [rank for rank in range(len(self._where)) if rank not in having]
        size = len(self._where)
        for rank in without[:_FEW]:
            told += f"; rank {rank} of {size} has no part of it in {self._where[rank]}"
        if without:
            told += " (another drive, or one that is not mounted?)"
        elif size < save.parts:
            told += f"; {counted(save.parts, 'rank')} have written it, and these are {size}: "
            told += "give each of them"
            told += " several directories, so that all are seen"
        return told


class Decision(NamedTuple):
    """The fate of the existing saves; the same on all ranks.

    The blocks of `recycled` are overwritten, unless it is None. `removed` are deleted before the
    save, `replaced` after it: those of the same step, and without recycling beyond `keep`.
    """

    save: Save
    recycled: Save | None
    removed: list[Save]
    replaced: list[Save]


def decide(survey: Survey, new: Save, keep: int, recycle: bool) -> Decision:
    """Decide the fate of existing saves, and of a new one once it is whole."""
    new = new._replace(order=survey.next_order())
    going, remains = survey.surplus(keep)
    recycled = going[0] if going and recycle else None
    whole = survey.whole()
    replaced = [save for save in whole if save.step == new.step]
    if not recycle:
        others = [save for save in whole if save not in replaced]
        replaced += others[: max(len(others) + 1 - keep, 0)]
    removed = [save for save in (*going, *remains) if save != recycled]
    return Decision(new, recycled, removed, replaced)
