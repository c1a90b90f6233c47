"""What the core knows of a batch.

Its files are taken in turn, in *waves*. A file that was given as a path is opened when its turn
comes and closed when its wave is over, so that a batch of any number of files has few of them open.
Each wave is one request of the engine's. The first is begun by the call; what follows it (files,
whatever was refused as direct I/O, copies into tensors that are not contiguous) by the core's
finisher.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nvmeio._core import transfers as transfers_module
from nvmeio._core.batches import Batch, BatchMember
from nvmeio._core.record import NOTHING, Record, copy_back, failure_of, refused_once
from nvmeio._files.descriptors import Descriptors
from nvmeio._files.plan import Plan
from nvmeio._memory.tensors import Memory
from nvmeio.engines import base
from nvmeio.engines.base import CompletionQueue, Engine, Opcode, Outcome, Request, Transfer
from nvmeio.errors import BatchError, TransferError

Planner = Callable[[Opcode, Memory, Descriptors, int], tuple[Plan, Transfer]]

logger = logging.getLogger("nvmeio")

NAMES = {Opcode.READ: "pread_batch", Opcode.WRITE: "pwrite_batch"}
# A file may need two descriptors; a batch leaves most of a process's to others.
_FILES_MOST = 128
# The caller waits for the first wave to be opened, 30 us a file. Between two waves the drive does.
_LATER_TIMES = 4
_SHARE_OF_DESCRIPTORS = 8
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


class BatchRecord(Record):
    """A batch of a core's.

    Args:
        token: Its name in completion queues.
        opcode: What it does.
        batch: To what.
        planner: The core's.
    """

    __slots__ = (
        "_again",
        "_batch",
        "_copies",
        "_dropped",
        "_failures",
        "_inodes",
        "_lost",
        "_noted",
        "_planner",
        "_total",
        "_waiting",
        "_wave",
    )

    def __init__(self, token: int, opcode: Opcode, batch: Batch, planner: Planner) -> None:
        parts = batch.parts
        one = len(parts) == 1
        super().__init__(
            token,
            opcode,
            None,
            parts[0].name if one else f"{len(parts)} files",
            min(batch.offsets) if one else 0,
            sum(memory.nbytes for memory in batch.memories),
        )
        self._batch: Batch | None = batch
        self._planner = planner
        self._copies = any(memory.copy_back is not None for memory in batch.memories)
        self._waiting: deque[BatchMember] | None = None
        self._wave: list[tuple[BatchMember, Sequence[int], bool]] = []  # whether direct
        self._again: dict[BatchMember, list[int]] = {}
        self._failures: dict[int, BaseException] = {}
        self._inodes: set[tuple[int, int]] = set()
        self._dropped = False
        self._lost: TransferError | None = None  # what closing a file told first
        self._noted: Request | None = None  # the last one whose outcome is in the total
        self._total = NOTHING

    def __repr__(self) -> str:
        number = 0 if self._batch is None else len(self._batch.memories)
        items = f" {number} items" if number else ""
        return f"<{self.name} {self.path}{items}, {self.nbytes} bytes, {self.state}>"

    @property
    def name(self) -> str:
        return NAMES[self.opcode]

    def writes_to(self, inode: tuple[int, int]) -> bool:
        """Whether it writes to this file, or may: some may not be open yet."""
        return self.opcode is Opcode.WRITE and (bool(self._waiting) or inode in self._inodes)

    def uses(self, storage: int) -> bool:
        batch = self._batch
        return batch is not None and any(m.keep._cdata == storage for m in batch.memories)

    def outcome(self) -> Outcome:
        request = self.request
        if request is None or request is self._noted:
            return self._total
        return base.total([self._total, request.outcome()])

    # --- for the core -----------------------------------------------------------------------

    def prepare(self, engine: Engine, cq: CompletionQueue, transfer: Any) -> Request:
        return base.prepare_batch(engine, cq, self.token, transfer)

    def goes_on(self, moved: int) -> bool:
        return moved != self.nbytes or self._copies or bool(self._waiting) or bool(self._failures)

    def go_on(self) -> tuple[list[Transfer] | None, dict[str, int]]:
        """The next wave; begun by the call, and then by the finisher only."""
        miscounted: Counter[str] = Counter()
        if self.request is not None:
            self._note(miscounted)
        transfers = self._next_wave(miscounted)
        return transfers or None, miscounted

    def touch(self) -> None:
        batch = self._batch
        if batch is None:  # an interrupt came while it was let go
            return
        changed = [each.changed for each in batch.memories if each.changed is not None]
        plain = [tensor for tensor in changed if not tensor.is_inference()]
        if plain:
            torch.autograd.graph.increment_version(plain)

    def dropped(self, moved: int) -> bool:
        return self._dropped

    def failure(self, moved: int) -> BaseException | None:
        if not self._failures:
            return None
        batch = self._batch_now
        failures = sorted(self._failures.items())
        item, first = failures[0]
        items = len(batch.memories)
        code, words = errno.EIO, str(first)
        if isinstance(first, TransferError):
            code, words = first.errno or code, first._detail
        return BatchError(
            code,
            items=items,
            whole=items - len(failures),
            failures=failures,
            operation=self.name,
            path=next(part.name for part in batch.parts if item in part.items),
            file_offset=batch.offsets[item],
            nbytes=batch.memories[item].nbytes,
            transferred=self._total.transferred,
            detail=words,
        )

    def has_last_steps(self, moved: int) -> bool:
        return False  # they are taken as items end

    def let_go(self) -> TransferError | None:
        batch = self._batch
        if batch is not None:
            batch.end()
            for part in batch.parts:
                self._close(part)
            self._batch = None
        return self._lost

    # --- waves ------------------------------------------------------------------------------

    def _next_wave(self, miscounted: Counter[str]) -> list[Transfer]:
        """Open files, and plan what is to be done with them; [] if nothing is left."""
        if self._waiting is None:
            self._waiting = deque(self._parts_to_begin(miscounted))
        for part, _, _ in self._wave:
            if part.is_path and part not in self._again:
                self._close_now(part)
        self._wave = []
        again, self._again = self._again, {}
        if self.stop:
            self._dropped |= bool(again or self._waiting)
            self._waiting.clear()
            return []
        transfers: list[Transfer] = []
        for part, items in again.items():
            transfers += self._begun(part, items, miscounted, again=True) or []
        if transfers:
            return transfers
        most = _files_at_once(1 if self.request is None else _LATER_TIMES)
        while self._waiting and (len(self._wave) < most or not self._waiting[0].is_path):
            part = self._waiting[0]
            planned = self._begun(part, part.items, miscounted)
            if planned is None:  # its turn comes when others are closed
                break
            transfers += planned
            self._waiting.popleft()
        return transfers

    def _parts_to_begin(self, miscounted: Counter[str]) -> list[BatchMember]:
        """All of them, as the caller means them now: files that may be closed, relative paths."""
        batch = self._batch_now
        parts, directory = [], None
        many = len(batch.parts) > _files_at_once()
        for part in batch.parts:
            if not part.is_path:
                try:
                    part.open(self.opcode is Opcode.WRITE)
                except TransferError as failed:
                    self._fail(part.items, failed, miscounted)
                    continue
            elif many and not os.path.isabs(part.name):
                directory = directory or os.getcwd()
                part.file = os.path.join(directory, part.name)
            parts.append(part)
        return parts

    def _begun(
        self, part: BatchMember, items: Sequence[int], miscounted: Counter[str], again: bool = False
    ) -> list[Transfer] | None:
        """What is to be done with a file; None if no more descriptors can be had for now."""
        batch = self._batch_now
        opcode, offsets = self.opcode, batch.offsets
        memories = batch.memories
        if not (len(items) == len(memories) and items[0] == 0):
            memories = [memories[item] for item in items]
            offsets = [offsets[item] for item in items]
        try:
            opened = part.open(opcode is Opcode.WRITE)
            self._inodes.add(opened.inode)
            if self._planner is transfers_module.plan and not again:
                planned = transfers_module.plan_all(opcode, memories, opened, offsets)
            else:
                plan = transfers_module.plan_buffered if again else self._planner
                pairs = zip(memories, offsets, strict=True)
                planned = [plan(opcode, memory, opened, offset)[1] for memory, offset in pairs]
        except TransferError as failed:
            if part.is_path:
                self._close_now(part)
            if failed.errno in _OUT_OF_DESCRIPTORS and self._wave and not again:
                return None
            self._fail(items, failed, miscounted)
            return []
        self._wave.append((part, items, opened.alignment.offset > 0))
        return planned

    def _note(self, miscounted: Counter[str]) -> None:
        """What became of the wave that is over."""
        request: Any = self.request
        if request is self._noted:  # handed on twice
            return
        batch = self._batch_now
        self._noted, self._total = request, self.outcome()
        outcomes = iter(request.outcomes())
        for part, items, direct in self._wave:
            again = []
            for item, outcome in zip(items, outcomes, strict=False):
                code, nbytes = outcome.error, batch.memories[item].nbytes
                if not code and outcome.transferred == nbytes:
                    self._copy_back(part, item)
                elif code == errno.ECANCELED:
                    self._dropped = True
                elif code == errno.EINVAL and direct and self._planner is transfers_module.plan:
                    again.append(item)
                    miscounted.update(refused_once(self.opcode, outcome))
                else:
                    about = self._about_item(part, item, outcome.transferred)
                    self._failures[item] = failure_of(outcome, about)
            if again:
                self._again[part] = again
                logger.warning("%s refused direct I/O (EINVAL): buffered instead", part.name)

    def _copy_back(self, part: BatchMember, item: int) -> None:
        memory = self._batch_now.memories[item]
        if memory.copy_back is not None:
            try:
                copy_back(memory, self._about_item(part, item, 0))
            except Exception as failed:  # torch's, say: this item's
                self._failures[item] = failed

    def _fail(self, items: Sequence[int], failed: TransferError, miscounted: Counter[str]) -> None:
        """None of these is given to the engine."""
        miscounted.update(operations=len(items), errors=len(items))
        self._failures.update(dict.fromkeys(items, failed))

    def _close_now(self, part: BatchMember) -> None:
        """Between two waves."""
        lost = self._close(part)
        if lost is not None:
            self._failures.setdefault(part.items[0], lost)

    def _close(self, part: BatchMember) -> TransferError | None:
        """Close a file; NFS and friends report lost writes here (man 2 close).

        It may be done again: the error is noted before the file counts as closed.
        """
        try:
            part.close()
        except OSError as failed:
            lost = TransferError(failed.errno or errno.EIO, operation="close", path=part.name)
            self._lost = self._lost or lost
            part.opened = None
            return lost
        return None

    def _about_item(self, part: BatchMember, item: int, transferred: int) -> dict[str, Any]:
        batch = self._batch_now
        return {
            "operation": self.name,
            "path": part.name,
            "file_offset": batch.offsets[item],
            "nbytes": batch.memories[item].nbytes,
            "transferred": transferred,
        }

    @property
    def _batch_now(self) -> Batch:
        assert self._batch is not None
        return self._batch


def _files_at_once(times: int = 1) -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = _FILES_MOST * times
    if limit == resource.RLIM_INFINITY:
        return most
    return max(1, min(most, limit // _SHARE_OF_DESCRIPTORS))
