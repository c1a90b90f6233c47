"""A batch: many tensors, each at a place of its own in a file of its own, as one operation."""

from __future__ import annotations

import errno
import itertools
import logging
import operator
import os
import resource
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, Union

import torch

from nvmeio import _checks, files
from nvmeio._core.records import NOTHING, Record, copy_back, failure_of, refused_once
from nvmeio._files.descriptors import Descriptors
from nvmeio._memory import holds
from nvmeio._memory import tensors as tensors_module
from nvmeio._memory.tensors import Data, Memory
from nvmeio.engines import base
from nvmeio.engines import transfers as transfers_module
from nvmeio.engines.base import CompletionQueue, Engine, Opcode, Outcome, Request, Transfer
from nvmeio.engines.transfers import Plan
from nvmeio.errors import BatchError, TransferError, an, counted, transfer_error
from nvmeio.files import File

if TYPE_CHECKING:
    import numpy

FileLike = str | os.PathLike[str] | int | File
Files = FileLike | Sequence[FileLike]
BatchOffsets = Union[torch.Tensor, "numpy.ndarray[Any, Any]", Sequence[int], None]
Planner = Callable[[Opcode, Memory, Descriptors, int], tuple[Plan, Transfer]]
Mover = TypeVar("Mover")

logger = logging.getLogger("nvmeio")

NAMES = {Opcode.READ: "pread_batch", Opcode.WRITE: "pwrite_batch"}
# A file may need two descriptors; a batch leaves most of a process's to others.
_FILES_MOST = 128
# The caller waits for the first wave to be opened, 30 us a file. Between two waves the drive does.
_LATER_TIMES = 4
_SHARE_OF_DESCRIPTORS = 8
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_FILES = (str, os.PathLike, int, File)


class BatchMember:
    """One file of a batch, and the numbers of the items that are moved to or from it."""

    __slots__ = ("file", "items", "opened")

    def __init__(self, file: Any, items: Sequence[int]) -> None:
        named = isinstance(file, (str, os.PathLike))
        self.file: FileLike = files.checked_path(file) if named else file
        self.items = items
        self.opened: Descriptors | None = None

    @property
    def is_path(self) -> bool:
        """Whether it may be opened later, and more than once."""
        return isinstance(self.file, str)

    @property
    def name(self) -> str:
        file = self.file
        if isinstance(file, File):
            return file.path
        return f"descriptor {file}" if isinstance(file, int) else str(file)

    def open(self, writing: bool) -> Descriptors:
        """Open the file, unless it is open; raises as `files.acquire` does."""
        if self.opened is None:
            self.opened = files.acquire(self.file, self, writing)
        return self.opened

    def close(self) -> None:
        """Let go of the descriptors. If closing raises OSError, another call raises it again."""
        if self.opened is not None:
            self.opened.let_go(self)
            self.opened = None
        else:  # an interrupt may have come between its beginning to use the file and saying so
            files.give_up(self.file, None, self)


class Batch:
    """The memories of a batch, their offsets in the files, and the files.

    `held` holds the storages of those memories that hold none themselves, until `end`.
    """

    __slots__ = ("held", "memories", "offsets", "parts")

    def __init__(self, memories: list[Memory], held: Any) -> None:
        self.memories = memories
        self.held = held
        self.parts: list[BatchMember] = []
        self.offsets: list[int] = []

    def end(self) -> None:
        holds.end(self.held)
        for memory in self.memories:
            if memory.held is not None:
                memory.end()


def memories_of(
    opcode: Opcode,
    tensors: Sequence[Data],
    memory_of: Callable[[Data], tuple[Mover, Memory]],
    usual: Mover | None,
) -> tuple[Mover | None, list[Memory], Any]:
    """Get the memory of many tensors, and the one mover of all of it.

    `usual` moves memory in place; if it is None, `memory_of` is asked for every tensor. The mover
    is None if there are no tensors. The last thing returned is the hold on all memory used in
    place.

    Raises:
        TypeError: Something has no memory.
        ValueError: The tensors have different movers, because they lie on different kinds of
            devices.
    """
    if isinstance(tensors, (torch.Tensor, bytes, bytearray)) or not isinstance(tensors, Sequence):
        raise TypeError(f"tensors must be a list of them, not {an(type(tensors).__name__)}")
    found: list[Memory | None] = [None] * len(tensors)
    held = None
    if usual is not None:
        found, held = tensors_module.in_place(tensors, opcode is Opcode.READ)
    mover = usual if any(each is not None for each in found) else None
    memories: list[Memory] = []
    try:
        for item, memory in enumerate(found):
            if memory is None:
                moves, memory = _asked(memory_of, tensors[item], item)
                found[item] = memory
                if mover is not None and moves is not mover:
                    raise ValueError(
                        f"item {item} is on another kind of device than those before it: make one "
                        "batch of CUDA tensors, and one of CPU tensors"
                    )
                mover = moves
            memories.append(memory)
    except BaseException:
        holds.end(held)
        for each in found:
            if each is not None:
                each.end()
        raise
    return mover, memories, held


def _asked(
    memory_of: Callable[[Data], tuple[Mover, Memory]], tensor: Data, item: int
) -> tuple[Mover, Memory]:
    try:
        return memory_of(tensor)
    except (TypeError, ValueError, RuntimeError) as failed:
        if type(failed) in (TypeError, ValueError, RuntimeError):
            raise type(failed)(f"item {item}: {failed}") from failed
        raise


def laid_out(
    opcode: Opcode, memories: list[Memory], held: Any, files: Files, file_offsets: BatchOffsets
) -> Batch:
    """Make a batch, which takes over the hold on its memory; the hold ends now if this raises.

    Raises:
        TypeError: A file or the offsets are of a wrong type.
        ValueError: Their numbers differ, or an item lies outside of any file or over another that
            is written.
    """
    batch = Batch(memories, held)
    try:
        batch.offsets, batch.parts = _places(opcode, memories, files, file_offsets)
    except BaseException:
        batch.end()
        raise
    return batch


def _places(
    opcode: Opcode, memories: list[Memory], files: Files, file_offsets: BatchOffsets
) -> tuple[list[int], list[BatchMember]]:
    """The items' places, and which of them belong to which file."""
    number = len(memories)
    one = isinstance(files, _FILES)
    for file in (files,) if one else _one_of_each_type(files):
        if not isinstance(file, _FILES) or isinstance(file, bool):
            raise TypeError(
                f"a file must be a path, an open descriptor or an nvmeio.File, not {file!r}"
            )
    sizes = [memory.nbytes for memory in memories]
    offsets = _offsets(file_offsets, sizes, one)
    highest = max(map(operator.add, offsets, sizes), default=0)
    if min(offsets, default=0) < 0 or highest > _checks.OFFSET_MAX:
        for item, offset in enumerate(offsets):
            _checks.file_offset(f"file_offsets[{item}]", offset, sizes[item])
    parts = [BatchMember(files, range(number))] if one else _parts(files, number)
    if opcode is Opcode.WRITE:
        for part in parts:
            _check_apart(part, offsets, sizes)
    return offsets, parts if number else []


def _one_of_each_type(files: Any) -> list[Any]:
    if isinstance(files, (bytes, bytearray)) or not isinstance(files, Sequence):
        raise TypeError(
            "files must be a path, an open descriptor, an nvmeio.File, or a list of these, not "
            f"{type(files).__name__}"
        )
    return list({type(file): file for file in files}.values())


def _parts(files: Any, number: int) -> list[BatchMember]:
    if len(files) != number:
        raise ValueError(
            f"{counted(number, 'tensor')}, but {counted(len(files), 'file')}: one each"
        )
    items_of: dict[Any, list[int]] = {}
    for item, file in enumerate(files):
        key = os.fspath(file) if isinstance(file, os.PathLike) else file
        found = items_of.get(key)
        if found is None:
            items_of[key] = [item]
        else:
            found.append(item)
    return [BatchMember(files[items[0]], items) for items in items_of.values()]


def _offsets(file_offsets: Any, sizes: list[int], one: bool) -> list[int]:
    number = len(sizes)
    if file_offsets is None:
        return list(itertools.accumulate(sizes, initial=0))[:number] if one else [0] * number
    if hasattr(file_offsets, "tolist"):  # a tensor, or numpy's
        file_offsets = file_offsets.tolist()
    if isinstance(file_offsets, (str, bytes)) or not isinstance(file_offsets, Sequence):
        raise TypeError(
            "file_offsets must be a tensor, a numpy array or a sequence of integers, not "
            f"{type(file_offsets).__name__}"
        )
    if len(file_offsets) != number:
        raise ValueError(
            f"{counted(number, 'tensor')}, but {counted(len(file_offsets), 'offset')}: one for each"
        )
    if set(map(type, file_offsets)) <= {int}:
        return list(file_offsets)
    return [
        _checks.integer(f"file_offsets[{item}]", offset) for item, offset in enumerate(file_offsets)
    ]


def _check_apart(part: BatchMember, offsets: list[int], sizes: list[int]) -> None:
    """Refuse to write two pieces over each other: which of them would remain is unknown."""
    items = [item for item in part.items if sizes[item]]
    items.sort(key=offsets.__getitem__)
    for one, other in itertools.pairwise(items):
        if offsets[one] + sizes[one] > offsets[other]:
            one, other = sorted((one, other))
            raise ValueError(
                f"items {one} and {other} of a batch overlap in {part.name}, so the result would "
                "depend on their order; nothing was written"
            )


class BatchRecord(Record):
    """A batch in flight: opens files in waves, and retries transfers refused as direct I/O."""

    def __init__(self, token: int, opcode: Opcode, batch: Batch, planner: Planner) -> None:
        parts = batch.parts
        one = len(parts) == 1
        super().__init__(
            token,
            opcode,
            None,
            parts[0].name if one else counted(len(parts), "file"),
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
        items = f" {counted(number, 'item')}" if number else ""
        return f"<{self.name} {self.path}{items}, {self.nbytes} bytes, {self.state.value}>"

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
        # Those of files first: torch's refusal of a tensor is not a failure of a drive.
        failures = sorted(
            self._failures.items(),
            key=lambda each: (not isinstance(each[1], TransferError), each[0]),
        )
        item, first = failures[0]
        if not isinstance(first, TransferError):
            return first  # as of the single call
        items = len(batch.memories)
        code, words = first.errno or errno.EIO, first._detail
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
        """Open files, and plan their transfers; [] if nothing is left."""
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
        """Begin with a file; None if no more descriptors can be had for now."""
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
        """Count items that the engine is never given."""
        miscounted.update(operations=len(items), errors=len(items))
        self._failures.update(dict.fromkeys(items, failed))

    def _close_now(self, part: BatchMember) -> None:
        lost = self._close(part)
        if lost is not None:
            self._failures.setdefault(part.items[0], lost)

    def _close(self, part: BatchMember) -> TransferError | None:
        """Close a file; NFS and others report lost writes here (man 2 close).

        It may be done again: the error is noted before the file counts as closed.
        """
        try:
            part.close()
        except OSError as failed:
            lost = transfer_error(failed, "close", part.name)
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
