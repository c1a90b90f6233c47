"""Areas of gradients in one file, and the memory that they are filled in.

Each subgroup has an area, in the order of its pieces. A *sheet* is the memory of such an area: one
that is full is written at once, and one that is wanted again (the next micro-batch) is read first.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nvmeio._io.drives import DriveHandles, StripedFile
from nvmeio.offload._optimizer.params import SwappedParam
from nvmeio.offload._step.pipeline import Move, failure_of, started
from nvmeio.offload._swap_files.extents import moves_of
from nvmeio.offload._swap_files.subgroups import Piece, Subgroup, runs
from nvmeio.offload._swap_files.swap_dirs import SwapDirs
from nvmeio.offload._swap_files.tensors import part, view
from nvmeio.operation import Operation
from nvmeio.pool import PinnedPool

SHEETS = 3  # one is filled, one is written, one is read ahead
NAME = "gradients"


class _Sheet:
    """A subgroup's gradients in memory."""

    def __init__(self, subgroup: Subgroup, memory: torch.Tensor) -> None:
        self.subgroup = subgroup
        self.memory = memory
        self.reading: list[Operation] = []
        self.writing: list[Operation] = []
        self.changed: list[Piece] = []


class GradSheets:
    """Gradients by piece, on the drive and on their way there.

    After a failure every call raises it until `clear`: what was to be written is lost.

    Args:
        directory: Locked by this process.
        handles: Move the bytes.
        awaited: Whether backward brings a piece's gradient here; with all of these a sheet is full.

    Attributes:
        read_bytes: Since it was made, for accumulation only.
        written_bytes: Since it was made.
    """

    def __init__(
        self, directory: SwapDirs, handles: DriveHandles, awaited: Callable[[Piece], bool]
    ) -> None:
        self._directory = directory
        self._handles = handles
        self._awaited = awaited
        self._file: StripedFile | None = None
        self._bands: list[int] = []  # of subgroups, in the file
        self._group_of: dict[int, Subgroup] = {}  # by id of the piece
        self._present: set[int] = set()
        self._open: OrderedDict[int, _Sheet] = OrderedDict()  # the oldest first
        self._leaving: list[_Sheet] = []  # being written
        self._order: list[Subgroup] = []  # in which they came last time
        self._failure: BaseException | None = None
        self._pool: PinnedPool | None = None
        self._leases: list[Any] = []
        self._free: list[torch.Tensor] = []
        self.read_bytes = 0
        self.written_bytes = 0

    # Room

    def reserve(self, subgroups: Sequence[Subgroup]) -> None:
        """Have space and memory for further subgroups; none of them is used before `extend`.

        Raises:
            TransferError: There is no space for them.
        """
        bands = [*self._bands, *(subgroup.grad_nbytes for subgroup in subgroups)]
        ends = itertools.accumulate(bands[len(self._bands) :], initial=sum(self._bands))
        for subgroup, offset in zip(subgroups, ends, strict=False):
            subgroup.grad_offset = offset
        opened = self._directory.allocate(NAME, bands)
        before, self._file = self._file, opened
        if before is not None:
            before.close()
        self._make_memory(max((subgroup.grad_nbytes for subgroup in subgroups), default=0))

    def extend(self, subgroups: Sequence[Subgroup]) -> None:
        """Take subgroups on that `reserve` has made room for."""
        self._bands += [subgroup.grad_nbytes for subgroup in subgroups]
        self._group_of.update({id(p): s for s in subgroups for p in s.pieces})

    def _make_memory(self, need: int) -> None:
        if not need or (self._pool is not None and self._free[0].nbytes >= need):
            return
        pool = PinnedPool(SHEETS * need)
        self._free_memory()
        self._pool = pool
        for _ in range(SHEETS):
            lease = self._pool.take(need)
            self._free.append(lease.__enter__())
            self._leases.append(lease)

    # What backward made

    def add_to(self, param: SwappedParam, gradient: torch.Tensor) -> None:
        """Add what is here of a parameter's gradient to another one, in place."""
        if param.number not in self._present:
            return
        for piece in param.pieces:
            old = self._place(piece)
            part(gradient, piece.start, piece.stop, piece.shape).add_(old)

    def put(self, param: SwappedParam, gradient: torch.Tensor) -> None:
        """Take a parameter's gradient, in the place of the one before."""
        for piece in param.pieces:
            self._place(piece).copy_(part(gradient, piece.start, piece.stop, piece.shape))
            self._write_if_full(piece)
        self._present.add(param.number)

    def lose(self, failed: BaseException) -> None:
        """A gradient was lost on its way here."""
        self._failure = self._failure or failed

    def _place(self, piece: Piece) -> torch.Tensor:
        """The place of a piece's gradient in its sheet, with what was there before."""
        subgroup = self._group_of[id(piece)]
        sheet = self._open.get(id(subgroup))
        if sheet is None:
            sheet = self._new_sheet(subgroup)
            self._look_ahead(subgroup)
        reading, sheet.reading = sheet.reading, []
        self._check(reading)
        if piece.grad is None:
            raise RuntimeError("a piece has no place for its gradient")
        return view(sheet.memory, piece.grad)

    def _new_sheet(self, subgroup: Subgroup) -> _Sheet:
        for sheet in [each for each in self._leaving if each.subgroup is subgroup]:
            self._wait_for(sheet)
        while not self._free:
            if not self._leaving:
                self._write(next(iter(self._open.values())))
            self._wait_for(self._leaving[0])
        sheet = _Sheet(subgroup, self._free.pop())
        self._open[id(subgroup)] = sheet
        if subgroup not in self._order:
            self._order.append(subgroup)
        there = [piece for piece in subgroup.pieces if piece.param in self._present]
        moves = self.reads(subgroup, there, 0)
        sheet.reading = started(self._handles, sheet.memory, moves, writing=False)
        self.read_bytes += sum(move.nbytes for move in moves)
        return sheet

    def _look_ahead(self, subgroup: Subgroup) -> None:
        """Begin to read the sheet that came after this one last time, if there is room."""
        if not self._present:
            return
        at = self._order.index(subgroup) + 1
        following = self._order[at] if at < len(self._order) else None
        for sheet in [each for each in self._leaving if all(op.done() for op in each.writing)]:
            self._wait_for(sheet)
        busy = {id(sheet.subgroup) for sheet in self._leaving} | set(self._open)
        if following is None or id(following) in busy or not self._free:
            return
        if any(piece.param in self._present for piece in following.pieces):
            self._new_sheet(following)

    def _write_if_full(self, piece: Piece) -> None:
        sheet = self._open[id(self._group_of[id(piece)])]
        sheet.changed.append(piece)
        if len(sheet.changed) >= sum(map(self._awaited, sheet.subgroup.pieces)):
            self._write(sheet)

    def _write(self, sheet: _Sheet) -> None:
        reading, sheet.reading = sheet.reading, []
        self._check(reading)
        moves = self._moves(sheet.subgroup, sheet.changed, 0)
        sheet.writing = started(self._handles, sheet.memory, moves, writing=True)
        self.written_bytes += sum(move.nbytes for move in moves)
        del self._open[id(sheet.subgroup)]
        self._leaving.append(sheet)

    def _wait_for(self, sheet: _Sheet) -> None:
        """Wait until a sheet is written, and have its memory back, whatever came of it."""
        self._leaving.remove(sheet)
        try:
            self._check(sheet.writing)
        finally:
            self._free.append(sheet.memory)

    def _check(self, operations: Sequence[Operation]) -> None:
        """Wait for operations; the first failure counts until `clear`."""
        for operation in operations:
            failed = failure_of(operation)
            self._failure = self._failure or failed
        if self._failure is not None:
            raise self._failure

    # What is here

    def has(self, number: int) -> bool:
        """Whether a parameter's gradient is here."""
        return number in self._present

    def reads(self, subgroup: Subgroup, pieces: Sequence[Piece], base: int) -> list[Move]:
        """The moves that bring gradients into a slot, from byte `base` on."""
        return self._moves(subgroup, [p for p in pieces if p.param in self._present], base)

    def _moves(self, subgroup: Subgroup, pieces: Sequence[Piece], base: int) -> list[Move]:
        if self._file is None:
            return []
        spans = [piece.grad for piece in pieces if piece.grad is not None]
        whole = len(spans) == len(subgroup.pieces)
        return [
            move
            for run in runs(spans, subgroup.grad_nbytes, whole)
            for move in moves_of(
                self._file, subgroup.grad_offset + run.offset, base + run.offset, run.nbytes
            )
        ]

    def flush(self) -> None:
        """Write what is in memory, and wait until all is written.

        Raises:
            TransferError: Some gradients were lost.
        """
        while self._open:
            self._write(next(iter(self._open.values())))
        while self._leaving:
            self._wait_for(self._leaving[0])
        if self._failure is not None:
            raise self._failure

    def clear(self) -> None:
        """Forget all gradients."""
        for sheet in [*self._open.values(), *self._leaving]:
            for operation in [*sheet.reading, *sheet.writing]:
                failure_of(operation)  # until the memory is ours; whatever came of it
            self._free.append(sheet.memory)
        self._open.clear()
        self._leaving.clear()
        self._present.clear()
        self._failure = None

    @property
    def file_bytes(self) -> int:
        """Length of the file."""
        return sum(self._bands)

    @property
    def memory_bytes(self) -> int:
        """Memory of all sheets."""
        return 0 if self._pool is None else self._pool.budget_bytes

    def close(self) -> None:
        """Give back memory and file."""
        self.clear()
        self._free_memory()
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _free_memory(self) -> None:
        self._free = []
        for lease in self._leases:
            lease.__exit__(None, None, None)
        self._leases = []
        if self._pool is not None:
            self._pool.close()
            self._pool = None
