"""The background of a save where each rank has a drive of its own.

    write the part under a temporary name      each rank, on its drive
    tell its checksums, patch those of others  all
    make it durable, say so                    all; nobody goes on before all have said it
    give it its name, say so                   all; who has heard it of all knows: it is whole
    delete what it replaces                    each

Up to the third line nothing has a name, and the saves before are as they were. After a crash within
the fourth some parts are named, with a token that no other save has: it is not whole, and the one
before is. A rank that gives up before it has given the name says that it never will; the others
take theirs back.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import struct
import time
from collections.abc import Sequence
from typing import Any

from nvmeio import files
from nvmeio._distributed.rank_store import pauses
from nvmeio._formats.torch_archives.torch_layout import FileLayout
from nvmeio._formats.torch_archives.torch_part import HEAD_BYTES, PartHead, pack, sum_of
from nvmeio._formats.torch_archives.torch_writing import Crc, finish, join_crcs, unfinished_pages
from nvmeio._storage.durable import sync_data
from nvmeio._storage.replace import Replacement
from nvmeio._threads.closing import unlink
from nvmeio._threads.interruptible import Cancelled
from nvmeio.checkpoint._manager.job import SaveJob, SaveReport
from nvmeio.checkpoint._multi_rank.agreement import Disagreement
from nvmeio.checkpoint._multi_rank.drives import (
    Decision,
    DriveMark,
    OwnDrives,
    Save,
    Survey,
    decide,
)
from nvmeio.errors import TransferError, naming
from nvmeio.files import File

_CRC = struct.Struct("<QQQI")

# A rank that says it will never name its part gives its failure next.
NEXT_WORD_S = 5.0


class PartOfEachRank(SaveJob):
    """A save of one archive, of which each rank has a part on its own drive."""

    LAYOUT = "one"
    KIND = "part"

    def __init__(self, *arguments: Any) -> None:
        self._decision: Decision | None = None
        self._number: int | None = None  # of this rank's part
        self._mark: DriveMark | None = None
        super().__init__(*arguments)

    @property
    def path(self) -> str:
        """The path of this rank's part; before the ranks agree, the beginning of its name."""
        directory = self._drives.directories[0]
        if self._decision is None:
            return os.path.join(directory, f"step-{self.step:08d}")
        save = self._decision.save
        name = save.name if self._number is None else save.part_name(self._number)
        return os.path.join(directory, name)

    @property
    def _drives(self) -> OwnDrives:
        drives = self.setup.drives
        assert drives is not None
        return drives

    def pages_beside(self, layout: FileLayout) -> list[int]:
        """The pages of this part with CRCs that it does not know alone: they are written twice."""
        if not self.setup.checksum:
            return []
        parts = self.parts(layout)
        return unfinished_pages(layout, parts, parts[self.messages.rank])

    # Agreeing

    def take(self, *arguments: Any) -> SaveReport:
        try:
            return super().take(*arguments)
        finally:
            mark, self._mark = self._mark, None
            if mark is not None:
                mark.remove()

    def claim(self) -> None:
        """Let the others see whether this rank's directory is theirs."""
        if self.messages.size > 1 and not self._drives.apart:
            self._mark = DriveMark(self._drives.directories[0])

    def plan(self) -> dict[str, Any]:
        """The parts that this rank has, and the mark by which others recognise it."""
        mark = None if self._mark is None else self._mark.name
        told = {"shared": False, "mark": mark, "token": secrets.token_hex(8)}
        goes_on = self.setup.lineage is None or self.setup.lineage.goes_on
        return told | self._drives.has() | {"goes_on": goes_on}

    def settle(self, plans: Sequence[dict[str, Any]]) -> None:
        """Decide the fate of existing parts, the same on all ranks."""
        if any(each["mark"] for each in plans):
            self._see_that_drives_differ(plans)
        self.setup.claim()
        survey = Survey(plans)
        newest = max(survey.whole(), default=None)
        if self.setup.lineage is not None:
            latest = None if newest is None else newest.step
            self.setup.lineage.check(plans, latest, self.step, self._drives.directories[0])
        if self.messages.rank in self.writing:
            self._number = self.writing.index(self.messages.rank)
        new = Save(0, plans[0]["token"], self.step, self.KIND, len(self.writing))
        self._decision = decide(survey, new, self.setup.keep, self.setup.recycle)

    def _see_that_drives_differ(self, plans: Sequence[dict[str, Any]]) -> None:
        mine, own = self._drives.directories[0], self.messages.rank
        seen = [
            rank
            for rank, each in enumerate(plans)
            if rank != own and each["mark"] and os.path.lexists(os.path.join(mine, each["mark"]))
        ]
        told = self.messages.agree("same", seen)
        for rank, others in enumerate(told):
            if others:
                raise Disagreement(
                    f"{plans[rank]['where']}: ranks {min(rank, others[0])} and "
                    f"{max(rank, others[0])} save into the same directory, with shared=False: give "
                    "each rank one of its own, or leave shared=False out where all ranks see one"
                )
        self._drives.apart = True

    # In the background

    def wait_until_agreed(self) -> None:
        """Wait until all ranks have agreed: none waits for rank 0's first message here."""
        if self.messages.size > 1:
            self.messages.gather("agreed")

    def write(self) -> bool | None:
        try:
            if self._number is None:
                recycled = None
                self._wait_for_parts()
            else:
                recycled = self._write_part()
        except BaseException as failed:
            self._never_name(failed)
            raise
        self._wait_until_named()
        for save in self._decided.replaced:
            self._drives.remove(save)
        return recycled

    @property
    def _decided(self) -> Decision:
        assert self._decision is not None
        return self._decision

    def _write_part(self) -> bool:
        setup, layout = self.setup, self.layout()
        start, end = self.parts(layout)[self.messages.rank]
        old = self._make_room()
        with Replacement(self.path, recycle=old) as replacement:
            if old is not None and not replacement.recycled:
                unlink(old)  # somebody reads it: let them, and have its blocks later
            head = self._head(layout, start, end)
            replacement.reserve(head.file_nbytes)
            self.shift = HEAD_BYTES - start
            mine = self.write_bytes(replacement.file, start, end)
            self.messages.put("part", self._packed(mine))
            if setup.checksum:
                if self.pages_beside(layout):
                    heard = self.messages.gather("part")
                    crcs = [Crc._make(crc) for each in heard for crc in _CRC.iter_unpack(each)]
                    parts, own = self.parts(layout), (start, end)
                    handle = setup.get_handle()
                    finish(handle, replacement.file, layout, parts, crcs, own, self.shift)
                    joined = join_crcs(layout, crcs)
                else:
                    known = {crc.record: crc.crc for crc in mine}
                    joined = [known.get(index, 0) for index in range(len(layout.records))]
                head = head._replace(sum=sum_of(layout, start, end, mine, joined))
            _write_head(replacement.file, head)
            replacement.truncate(head.file_nbytes)
            sync_data(replacement.file)
            self.check_cancelled()
            self.messages.tell_all("durable", 1)
            replacement.commit()
        return replacement.recycled

    def _wait_for_parts(self) -> None:
        """Wait, on a rank without a part, until the others' parts are durable."""
        old = self._make_room()
        if old is not None:  # this rank has nothing to write over it
            unlink(old)
        self.messages.put("part", b"")
        self.check_cancelled()
        self.messages.tell_all("durable", 1)

    def _make_room(self) -> str | None:
        """Delete surplus parts; returns the path of the one to be overwritten."""
        decision, drives = self._decided, self._drives
        for save in decision.removed:
            drives.remove(save)
        if decision.recycled is None:
            return None
        here = drives.directories[0]
        old = drives.paths(decision.recycled).values()
        taken = next((path for path in old if os.path.dirname(path) == here), None)
        drives.remove(decision.recycled, but=taken)
        return taken

    def _head(self, layout: FileLayout, start: int, end: int) -> PartHead:
        assert self._number is not None
        return PartHead(*self._decided.save.part(self._number), layout.nbytes, start, end, None)

    def _packed(self, crcs: Sequence[Crc]) -> bytes:
        return b"".join(_CRC.pack(*crc) for crc in crcs)

    # The commit

    def _never_name(self, failed: BaseException) -> None:
        """Tell all ranks that this rank's part will never have a name."""
        if self._number is not None:
            unlink(self.path)
        with contextlib.suppress(TransferError):
            self.messages.put("named", b"")
        self.messages.fail(failed)

    def _wait_until_named(self) -> None:
        """Wait until all parts have their names: from then on the checkpoint is whole."""
        if self.messages.size == 1:
            return
        self.messages.put("named", b"1")
        try:
            if not all(self.messages.gather("named")):
                self.raise_cause()
        except (TransferError, Cancelled):
            if self._number is not None and self.messages.has_told("named", b""):
                unlink(self.path)
            raise
        with contextlib.suppress(TransferError):  # nobody waits for us
            self.messages.put("seen", b"")

    def raise_cause(self) -> None:
        """Raise why another rank gave up, as soon as it says so."""
        until = time.monotonic() + NEXT_WORD_S
        for _ in pauses():
            self.messages.check()
            self.check_cancelled()
            self.messages.beat()
            if time.monotonic() > until:
                break
        detail = (
            "another rank could not name its part, and did not say why; older checkpoints are as "
            "they were"
        )
        raise TransferError(errno.ECANCELED, operation="save", path=self.path, detail=detail)


class OwnFileOfEachRank(PartOfEachRank):
    """A save of an archive of each rank, of its own state, on its own drive."""

    LAYOUT = "per_rank"
    KIND = "rank"

    def pages_beside(self, layout: FileLayout) -> list[int]:
        """None: it knows all of its own CRCs."""
        return []

    def _packed(self, crcs: Sequence[Crc]) -> bytes:
        return b""  # nobody else has a use for them


def _write_head(file: File, head: PartHead) -> None:
    with files.in_use(file, True) as opened, naming("pwrite", file.path):
        os.pwrite(opened.buffered_fd(), pack(head), 0)
