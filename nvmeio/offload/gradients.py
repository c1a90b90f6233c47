"""Gradients that leave memory as backward makes them, packed into large writes.

Each subgroup of the optimizer has an area in one file, in the order of its pieces. What backward
makes is copied into a *sheet*, the memory of such an area; a sheet that is full is written at once,
and one that is wanted again (the next micro-batch) is read first and added to.
"""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from nvmeio._io.drives import DriveHandles
from nvmeio._io.rank_store import several
from nvmeio._io.striping import StripedFile
from nvmeio.offload._extents import moves_of
from nvmeio.offload._grad_sentinel import GradSentinel
from nvmeio.offload._params import SwappedParam
from nvmeio.offload._pipeline import Move, failure_of, started
from nvmeio.offload._subgroups import Piece, Subgroup, runs
from nvmeio.offload._swap_dirs import SwapDirs
from nvmeio.offload._tensors import is_sharded, local, part, view
from nvmeio.offload._transactions import Transaction, Transactions
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


class GradientSwapper:
    """Takes gradients to the drive, and tells where they are.

    Args:
        directory: Locked by this process.
        handles: Move the bytes.
        transactions: Whose thread calls all of this; hooks hand over to it from wherever they are.

    Attributes:
        factor: What `clip` found that gradients are to be multiplied with; None for nothing.
        read_bytes: Since it was made, for accumulation only.
        written_bytes: Since it was made.
    """

    def __init__(
        self, directory: SwapDirs, handles: DriveHandles, transactions: Transactions
    ) -> None:
        self._distributed = several()
        self._directory = directory
        self._handles = handles
        self._transactions = transactions
        self._file: StripedFile | None = None
        self._bands: list[int] = []  # of subgroups, in the file
        self._params: dict[int, SwappedParam] = {}
        self._group_of: dict[int, Subgroup] = {}  # by id of the piece
        self._present: set[int] = set()
        self._norms: dict[int, torch.Tensor] = {}
        self._sheets: OrderedDict[int, _Sheet] = OrderedDict()  # open ones, the oldest first
        self._leaving: list[_Sheet] = []  # being written
        self._order: list[Subgroup] = []  # in which they came last time
        self._failure: BaseException | None = None
        self._not_finite = False
        self._grad_sentinel: GradSentinel | None = (
            None  # there as soon as a parameter wants gradients
        )
        self.factor: torch.Tensor | None = None
        self._pool: PinnedPool | None = None
        self._leases: list[Any] = []
        self._free: list[torch.Tensor] = []
        self._hooks: list[Any] = []
        self.read_bytes = 0
        self.written_bytes = 0

    def reserve(self, params: Sequence[SwappedParam], subgroups: Sequence[Subgroup]) -> None:
        """Have space and memory for the gradients of further parameters; none are taken yet.

        Raises:
            TransferError: There is no space for them.
            ValueError: They are of several ranks and not sharded: DistributedDataParallel reduces
                gradients in memory, after they were taken.
        """
        if self._distributed and not all(is_sharded(param.parameter) for param in params):
            raise ValueError(
                "with several ranks only sharded gradients (FSDP2) can be swapped: "
                'DistributedDataParallel reduces them in memory; use gradients="memory"'
            )
        self.flush()
        bands = [*self._bands, *(subgroup.grad_nbytes for subgroup in subgroups)]
        ends = itertools.accumulate(bands[len(self._bands) :], initial=sum(self._bands))
        for subgroup, offset in zip(subgroups, ends, strict=False):
            subgroup.grad_offset = offset
        opened = self._directory.allocate(NAME, bands)
        before, self._file = self._file, opened
        if before is not None:
            before.close()
        self._make_sheets(max((subgroup.grad_nbytes for subgroup in subgroups), default=0))

    def extend(self, params: Sequence[SwappedParam], subgroups: Sequence[Subgroup]) -> None:
        """Take over the gradients of parameters that `reserve` has made room for."""
        self._bands += [subgroup.grad_nbytes for subgroup in subgroups]
        self._params.update({param.number: param for param in params})
        self._group_of.update({id(p): s for s in subgroups for p in s.pieces})
        wanting = [param for param in params if param.parameter.requires_grad]
        if self._grad_sentinel is None and wanting:
            self._grad_sentinel = GradSentinel(min(wanting, key=lambda o: o.parameter.numel()))
            sentinel: Any = self._grad_sentinel.param.parameter
            self._hooks.append(sentinel.register_hook(self._announce))
        for param in wanting:
            take = functools.partial(self._hand_over, param)
            parameter: Any = param.parameter
            self._hooks.append(parameter.register_post_accumulate_grad_hook(take))

    def _make_sheets(self, need: int) -> None:
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

    def _hand_over(self, param: SwappedParam, parameter: torch.Tensor) -> None:
        """The hook: called in autograd's threads, and in the main one."""
        self._transactions.run(lambda _: self._take(param, parameter))

    def _announce(self, _: torch.Tensor) -> None:
        """The hook before the gradient in memory is accumulated."""
        self._transactions.run(lambda _: self._before_the_grad_sentinel())

    def _take(self, param: SwappedParam, parameter: torch.Tensor) -> None:
        if parameter.grad is None or self._file is None:
            return
        if parameter.grad.layout is not torch.strided:
            raise TypeError(
                f"parameter {param.number} has a {parameter.grad.layout} gradient: only dense "
                "ones can be swapped (an embedding wants sparse=False)"
            )
        sentinel = self._watching()
        if param is sentinel.param:
            if sentinel.replaced():
                self.clear()
            sentinel.arrived()
            self._check_not_clipped()
            if self._not_finite:
                sentinel.poison()
            return
        self._look_for_zero_grad()
        self._check_not_clipped()
        gradient = local(parameter.grad).contiguous()
        again = param.number in self._present
        try:
            if again:
                for piece in param.pieces:
                    old = self._open(piece)
                    part(gradient, piece.start, piece.stop, piece.shape).add_(old)
            norm = torch.linalg.vector_norm(gradient)
            self._norms[param.number] = norm
            # A norm may overflow where no element is infinite.
            if not bool(torch.isfinite(norm)) and not bool(torch.isfinite(gradient).all()):
                self._not_finite = True
            for piece in param.pieces:
                place = self._open(piece)
                place.copy_(part(gradient, piece.start, piece.stop, piece.shape))
                self._close_if_full(piece)
        except BaseException as failed:
            self._failure = self._failure or failed
            raise
        self._present.add(param.number)
        parameter.grad = None
        sentinel.stand_in()
        if self._not_finite:
            sentinel.poison()

    def _open(self, piece: Piece) -> torch.Tensor:
        """The place of a piece's gradient in its sheet, with what was there before."""
        subgroup = self._group_of[id(piece)]
        sheet = self._sheets.get(id(subgroup))
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
                self._write(next(iter(self._sheets.values())))
            self._wait_for(self._leaving[0])
        sheet = _Sheet(subgroup, self._free.pop())
        self._sheets[id(subgroup)] = sheet
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
        busy = {id(sheet.subgroup) for sheet in self._leaving} | set(self._sheets)
        if following is None or id(following) in busy or not self._free:
            return
        if any(piece.param in self._present for piece in following.pieces):
            self._new_sheet(following)

    def _close_if_full(self, piece: Piece) -> None:
        sheet = self._sheets[id(self._group_of[id(piece)])]
        sheet.changed.append(piece)
        expected = [
            each
            for each in sheet.subgroup.pieces
            if self._params[each.param].parameter.requires_grad
            and self._params[each.param] is not self._watching().param
        ]
        if len(sheet.changed) >= len(expected):
            self._write(sheet)

    def _write(self, sheet: _Sheet) -> None:
        reading, sheet.reading = sheet.reading, []
        self._check(reading)
        moves = self._moves(sheet.subgroup, sheet.changed, 0)
        sheet.writing = started(self._handles, sheet.memory, moves, writing=True)
        self.written_bytes += sum(move.nbytes for move in moves)
        del self._sheets[id(sheet.subgroup)]
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

    # The gradient in memory

    def _watching(self) -> GradSentinel:
        if self._grad_sentinel is None:
            raise RuntimeError("a gradient came, and no parameter wanted one")
        return self._grad_sentinel

    def _before_the_grad_sentinel(self) -> None:
        self._look_for_zero_grad()
        self._watching().make_way()

    def _look_for_zero_grad(self) -> None:
        """``model.zero_grad()`` knows nothing of the drive; the gradient in memory tells of it."""
        if self._grad_sentinel is not None and self._grad_sentinel.zeroed():
            self.clear()

    def _check_not_clipped(self) -> None:
        if self.factor is not None:
            raise RuntimeError(
                "gradients on the drive were clipped, which the next step does as it reads them, "
                "and backward adds to them: call step() or zero_grad() after clip_grad_norm_"
            )

    def restore(self) -> None:
        """Give the gradient in memory its own values again."""
        if self._grad_sentinel is not None:
            self._grad_sentinel.restore()

    def check(self, scaled: bool = False) -> None:
        """Whether memory and drive agree about the gradients.

        Args:
            scaled: A GradScaler has looked at those in memory.

        Raises:
            RuntimeError: Somebody changed gradients in memory, or put some there, since backward.
        """
        self._look_for_zero_grad()
        if self._grad_sentinel is not None:
            self._grad_sentinel.check(scaled)
        for number in self._present:
            if self._params[number].parameter.grad is not None:
                raise RuntimeError(
                    f"parameter {number} has a gradient on the drive, and another was put into "
                    "its .grad: call zero_grad() before gradients are set by hand"
                )

    # What the optimizer asks

    def has(self, number: int) -> bool:
        """Whether a parameter's gradient is on the drive."""
        return number in self._present

    def stands_in(self, param: SwappedParam) -> bool:
        """Whether what a parameter has in ``.grad`` is no gradient of it."""
        sentinel = self._grad_sentinel
        return sentinel is not None and sentinel.param is param and sentinel.stands_in

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
            TransferError: Some gradients were lost; zero_grad, and run backward again.
        """
        self._look_for_zero_grad()
        while self._sheets:
            self._write(next(iter(self._sheets.values())))
        while self._leaving:
            self._wait_for(self._leaving[0])
        if self._failure is not None:
            raise self._failure

    def clear(self) -> None:
        """Forget all gradients."""
        for sheet in [*self._sheets.values(), *self._leaving]:
            for operation in [*sheet.reading, *sheet.writing]:
                failure_of(operation)  # until the memory is ours; whatever came of it
            self._free.append(sheet.memory)
        self._sheets.clear()
        self._leaving.clear()
        self._present.clear()
        self._norms.clear()
        self._failure = None
        self._not_finite = False
        self.factor = None
        if self._grad_sentinel is not None:
            self._grad_sentinel.forget()

    def clip(
        self, max_norm: float, inverse_scale: torch.Tensor | None, transaction: Transaction
    ) -> torch.Tensor:
        """The norm of all gradients; keeps what to multiply them with, as torch clips.

        Args:
            max_norm: The largest norm allowed.
            inverse_scale: What undoes a GradScaler, or None.
            transaction: Whose clipping it is.
        """
        self.check()
        norms = []
        for param in self._params.values():
            norm = self._norms.get(param.number)
            if norm is None:
                gradient = self._in_memory(param)
                if gradient is None:
                    continue
                norm = torch.linalg.vector_norm(local(gradient))
            norms.append(_over_ranks(param.parameter, norm))
        total = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.tensor(0.0)
        if inverse_scale is not None:
            total = total * inverse_scale
        before = self.factor
        if before is not None:
            total = total * before
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        self.factor = factor if before is None else before * factor

        def undo() -> None:
            self.factor = before

        transaction.on_rollback(undo)
        return total

    def _in_memory(self, param: SwappedParam) -> torch.Tensor | None:
        sentinel = self._grad_sentinel
        if sentinel is not None and sentinel.param is param:
            return sentinel.gradient
        return param.parameter.grad

    @property
    def file_bytes(self) -> int:
        """Length of the file."""
        return sum(self._bands)

    @property
    def memory_bytes(self) -> int:
        """Memory of all sheets."""
        return 0 if self._pool is None else self._pool.budget_bytes

    def close(self) -> None:
        """Leave the parameters alone, and give back memory and file."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.restore()
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


def _over_ranks(parameter: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """The norm of a sharded gradient from those of its shards."""
    if not is_sharded(parameter):
        return norm
    sharded: Any = parameter
    square = norm.square()
    for dimension, placement in enumerate(sharded.placements):
        # Not is_shard(): a strided shard (FSDP over tensor parallelism) does not call itself one.
        if not placement.is_replicate():
            dist.all_reduce(square, group=sharded.device_mesh.get_group(dimension))
    return square.sqrt()
