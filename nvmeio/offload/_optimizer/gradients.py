"""Gradients that leave memory as backward makes them: taken, summed, measured, clipped.

Hooks hand each over to the optimizer's thread, which puts it into `GradSheets` and takes it
away from its parameter. One small gradient stays, and tells what others do to ``.grad``
(`GradSentinel`).

In the file each subgroup has an area, in the order of its pieces. A *sheet* is the memory of such
an area: one that is full is written at once, and one that is wanted again (the next micro-batch) is
read first.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from nvmeio._distributed.rank_store import several
from nvmeio._io.drives import DriveHandles, FileSpan, StripedFile
from nvmeio._memory import devices
from nvmeio._memory.devices import Mark
from nvmeio._threads.closing import on_error
from nvmeio.offload._generations.transactions import Transaction, Transactions
from nvmeio.offload._optimizer.grad_sentinel import GradSentinel
from nvmeio.offload._optimizer.params import SwappedParam
from nvmeio.offload._swap_files import tensors
from nvmeio.offload._swap_files.pipeline import failure_of, leased, started
from nvmeio.offload._swap_files.subgroups import Piece, Subgroup, runs
from nvmeio.offload._swap_files.swap_dirs import SwapDirs
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
        self.copied: dict[torch.device, Mark] = {}  # the last copies to it


class GradSheets:
    """Gradients by piece, on the drive and on their way there.

    After a failure every call raises it until `clear`: what was to be written is lost. `read_bytes`
    are for accumulation only.
    """

    def __init__(self, directory: SwapDirs, handles: DriveHandles) -> None:
        self._directory = directory
        self._handles = handles
        self._file: StripedFile | None = None
        self._bands: list[int] = []  # of subgroups, in the file
        self._group_of: dict[int, Subgroup] = {}  # by id of the piece
        self._present: set[int] = set()
        self._zeros: set[int] = set()  # pieces of these whose gradients are +0: not on the drive
        self._open: OrderedDict[int, _Sheet] = OrderedDict()  # the oldest first
        self._leaving: list[_Sheet] = []  # being written
        self._order: list[Subgroup] = []  # in which they came last time
        self._failure: BaseException | None = None
        self._pool: PinnedPool | None = None
        self._leases = contextlib.ExitStack()
        self._free: list[torch.Tensor] = []
        self.read_bytes = 0
        self.written_bytes = 0

    # Room

    def _reserve(self, subgroups: Sequence[Subgroup]) -> None:
        """Have space and memory for further subgroups; none of them is used before `_extend`."""
        bands = [*self._bands, *(subgroup.grad_nbytes for subgroup in subgroups)]
        ends = itertools.accumulate(bands[len(self._bands) :], initial=sum(self._bands))
        for subgroup, offset in zip(subgroups, ends, strict=False):
            subgroup.grad_offset = offset
        opened = self._directory.allocate(NAME, bands)
        before, self._file = self._file, opened
        if before is not None:
            before.close()
        self._make_memory(max((subgroup.grad_nbytes for subgroup in subgroups), default=0))

    def _extend(self, subgroups: Sequence[Subgroup]) -> None:
        """Take on subgroups that `_reserve` has made room for."""
        self._bands += [subgroup.grad_nbytes for subgroup in subgroups]
        self._group_of.update({id(p): s for s in subgroups for p in s.pieces})

    def _make_memory(self, need: int) -> None:
        if not need or (self._pool is not None and self._free[0].nbytes >= need):
            return
        leases = contextlib.ExitStack()
        with on_error(leases.close):
            pool, sheets = leased(leases, SHEETS, need)
        self._free_memory()
        self._leases, self._pool, self._free = leases, pool, sheets

    # Gradients of backward

    def _add_to(self, param: SwappedParam, gradient: torch.Tensor) -> None:
        """Add the part of a parameter's gradient that is here to another one, in place."""
        if param.number not in self._present:
            return
        for piece in param.pieces:
            mine = tensors.part(gradient, piece.start, piece.stop, piece.shape)
            old = self._place(piece)
            if devices.is_device(gradient):
                device = devices.device_of(gradient)
                up, copied = devices.Beside(device, "gradients up"), self._sheet_of(piece).copied
                alike = tensors.laid(mine, tensors.strides_of(old))
                there = torch.empty_like(alike, dtype=old.dtype)
                up.follow()
                if device in copied:
                    up.after(copied[device])
                up.copy(tensors.flat(there), tensors.flat(old))
                copied[device] = up.mark()  # the sheet of another piece may take this one's memory
                up.precede()
                old = there
            mine.add_(old)

    def _put(self, param: SwappedParam, gradient: torch.Tensor) -> None:
        """Take a parameter's gradient, in the place of the one before."""
        for piece in param.pieces:
            mine = tensors.part(gradient, piece.start, piece.stop, piece.shape)
            place, sheet = self._place(piece), self._sheet_of(piece)
            if devices.is_device(gradient):
                device = devices.device_of(gradient)
                down = devices.Beside(device, "gradients down")
                mine = tensors.laid(mine.to(place.dtype), tensors.strides_of(place))
                down.follow()
                devices.record_use(mine, devices.side_stream(device, "gradients down"))
                down.copy(tensors.flat(place), tensors.flat(mine))
                sheet.copied[device] = down.mark()
            else:
                place.copy_(mine)
            self._note_zeros(piece, place)
            sheet.changed.append(piece)
            if len(sheet.changed) >= sum(map(self._is_awaited, sheet.subgroup.pieces)):
                self._write(sheet)
        self._begin_writes()
        self._present.add(param.number)

    def _note_zeros(self, piece: Piece, place: torch.Tensor) -> None:
        """Know a gradient of zeros, as experts without tokens have: it is not moved.

        Those that devices copy are not looked at: that would wait for them.
        """
        if not self._sheet_of(piece).copied and tensors.is_positive_zero(place):
            self._zeros.add(piece.number)
        else:
            self._zeros.discard(piece.number)

    def _is_awaited(self, piece: Piece) -> bool:
        """Whether backward brings the piece's gradient here; with all of these a sheet is full."""
        raise NotImplementedError

    def _sheet_of(self, piece: Piece) -> _Sheet:
        return self._open[id(self._group_of[id(piece)])]

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
        return tensors.view(sheet.memory, piece.grad)

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
        for piece in filter(self.is_zero, there):
            assert piece.grad is not None
            tensors.view(sheet.memory, piece.grad).zero_()
        sheet.reading = started(self._handles, sheet.memory, moves, writing=False)
        self.read_bytes += sum(move.nbytes for move in moves)
        return sheet

    def _look_ahead(self, subgroup: Subgroup) -> None:
        """Begin to read the sheet that came after this one last time, if there is room."""
        if not self._present:
            return
        at = self._order.index(subgroup) + 1
        following = self._order[at] if at < len(self._order) else None
        for sheet in list(self._leaving):
            if not sheet.copied and all(op.done() for op in sheet.writing):
                self._wait_for(sheet)
        busy = {id(sheet.subgroup) for sheet in self._leaving} | set(self._open)
        if following is None or id(following) in busy or not self._free:
            return
        if any(piece.param in self._present for piece in following.pieces):
            self._new_sheet(following)

    def _write(self, sheet: _Sheet) -> None:
        reading, sheet.reading = sheet.reading, []
        self._check(reading)
        del self._open[id(sheet.subgroup)]
        self._leaving.append(sheet)
        if not sheet.copied:
            self._begin_write(sheet)

    def _begin_writes(self) -> None:
        """Begin the writes of sheets to which devices have finished copying."""
        for sheet in self._leaving:
            if sheet.copied and all(mark.done() for mark in sheet.copied.values()):
                self._begin_write(sheet)

    def _begin_write(self, sheet: _Sheet) -> None:
        for mark in sheet.copied.values():
            mark.wait()
        sheet.copied.clear()
        changed = [piece for piece in sheet.changed if not self.is_zero(piece)]
        moves = self._moves(sheet.subgroup, changed, 0)
        sheet.writing = started(self._handles, sheet.memory, moves, writing=True)
        self.written_bytes += sum(move.nbytes for move in moves)

    def _wait_for(self, sheet: _Sheet) -> None:
        """Wait until a sheet is written, and have its memory back, whatever came of it."""
        self._leaving.remove(sheet)
        try:
            if sheet.copied:
                self._begin_write(sheet)
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

    # Queries

    def has(self, number: int) -> bool:
        return number in self._present

    def is_zero(self, piece: Piece) -> bool:
        """Whether all of a gradient is known to be +0: then it has no bytes on the drive."""
        return piece.number in self._zeros

    def reads(self, subgroup: Subgroup, pieces: Sequence[Piece], base: int) -> list[FileSpan]:
        """The moves that bring gradients into a slot, from byte `base` on; none for zeros."""
        there = [p for p in pieces if p.param in self._present and not self.is_zero(p)]
        return self._moves(subgroup, there, base)

    def _moves(self, subgroup: Subgroup, pieces: Sequence[Piece], base: int) -> list[FileSpan]:
        if self._file is None:
            return []
        spans = [piece.grad for piece in pieces if piece.grad is not None]
        whole = len(spans) == len(subgroup.pieces)
        return [
            move
            for run in runs(spans, subgroup.grad_nbytes, whole)
            for move in self._file.spans(
                subgroup.grad_offset + run.offset, run.nbytes, base + run.offset
            )
        ]

    def flush(self) -> None:
        """Write what is in memory, and wait for it; raises if some gradients were lost."""
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
            with contextlib.suppress(RuntimeError):  # a device that failed stops copying
                for mark in sheet.copied.values():
                    mark.wait()
            self._free.append(sheet.memory)
        self._open.clear()
        self._leaving.clear()
        self._present.clear()
        self._zeros.clear()
        self._failure = None

    @property
    def file_bytes(self) -> int:
        return sum(self._bands)

    @property
    def memory_bytes(self) -> int:
        return 0 if self._pool is None else self._pool.budget_bytes

    def close(self) -> None:
        """Give back memory and file."""
        self.clear()
        self._free_memory()
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _free_memory(self) -> None:
        self._free, self._pool = [], None
        self._leases.close()


class GradientSwapper(GradSheets):
    """Takes gradients to the drive, and tells where they are.

    The thread of `transactions` calls all of this; hooks hand over to it from wherever they run.
    Gradients are to be multiplied with `factor`, which `clip` sets; None for nothing.
    """

    def __init__(
        self, directory: SwapDirs, handles: DriveHandles, transactions: Transactions
    ) -> None:
        super().__init__(directory, handles)
        self._distributed = several()
        self._transactions = transactions
        self._params: dict[int, SwappedParam] = {}
        self._norms: dict[int, torch.Tensor] = {}
        self._not_finite: bool | torch.Tensor = False  # on a device, where nobody waits to know
        self._looked: dict[torch.device, Mark] = {}  # the last work of hooks on each device
        self._grad_sentinel: GradSentinel | None = None  # once a parameter wants gradients
        self.factor: torch.Tensor | None = None
        self._hooks: list[Any] = []

    def reserve(self, params: Sequence[SwappedParam], subgroups: Sequence[Subgroup]) -> None:
        """Have space and memory for the gradients of further parameters; none are taken yet.

        ValueError for several ranks' that are not sharded: DistributedDataParallel reduces
        gradients in memory, after they were taken.
        """
        if self._distributed and not all(tensors.is_sharded(param.parameter) for param in params):
            raise ValueError(
                "with several ranks only sharded gradients (FSDP2) can be swapped: "
                'DistributedDataParallel reduces them in memory; use gradients="memory"'
            )
        self.flush()
        self._reserve(subgroups)

    def extend(self, params: Sequence[SwappedParam], subgroups: Sequence[Subgroup]) -> None:
        """Take over the gradients of parameters that `reserve` has made room for."""
        self._extend(subgroups)
        self._params.update({param.number: param for param in params})
        wanting = [param for param in params if param.parameter.requires_grad]
        if self._grad_sentinel is None and wanting:
            self._grad_sentinel = GradSentinel(min(wanting, key=lambda o: o.parameter.numel()))
            sentinel: Any = self._grad_sentinel.param.parameter
            self._hooks.append(sentinel.register_hook(self._announce))
        for param in wanting:
            take = functools.partial(self._hand_over, param)
            parameter: Any = param.parameter
            self._hooks.append(parameter.register_post_accumulate_grad_hook(take))

    # Gradients of backward

    def _hand_over(self, param: SwappedParam, parameter: torch.Tensor) -> None:
        """The hook that takes a gradient: called in autograd's threads, and in the main one."""
        self._transactions.run(lambda _: self._take_in_order(param, parameter))

    def _announce(self, _: torch.Tensor) -> None:
        """The hook before the gradient in memory is accumulated."""
        self._transactions.run(lambda _: self._before_the_grad_sentinel())

    def _take_in_order(self, param: SwappedParam, parameter: torch.Tensor) -> None:
        """Take a gradient after the hooks before it, whichever stream autograd is on."""
        device = devices.device_of(parameter)
        self._follow_hooks(device)
        self._take(param, parameter)
        self._looked[device] = devices.now(device)

    def _follow_hooks(self, device: torch.device) -> None:
        if device in self._looked:
            devices.come_after(devices.stream_here(device), self._looked[device])

    def _take(self, param: SwappedParam, parameter: torch.Tensor) -> None:
        if parameter.grad is None or not self._hooks:  # closed meanwhile
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
            self._poison()
            return
        self._look_for_zero_grad()
        self._check_not_clipped()
        gradient = tensors.laid(tensors.local(parameter.grad), param.pieces[0].grad_strides)
        try:
            self._add_to(param, gradient)
            self._norms[param.number] = norm = torch.linalg.vector_norm(gradient)
            # A norm may overflow where no element is infinite.
            if devices.is_device(gradient):
                most = torch.linalg.vector_norm(gradient, math.inf) if gradient.numel() else norm
                before = self._not_finite
                if isinstance(before, torch.Tensor):
                    before = before.to(most.device, non_blocking=True)
                self._not_finite = ~torch.isfinite(most) | before
            elif not bool(torch.isfinite(norm)) and not bool(torch.isfinite(gradient).all()):
                self._not_finite = True
            self._put(param, gradient)
        except BaseException as failed:
            self._failure = self._failure or failed  # it was lost on its way
            raise
        parameter.grad = None
        sentinel.stand_in()
        self._poison()

    def _poison(self) -> None:
        if self._not_finite is not False:
            self._watching().poison(self._not_finite)

    def _is_awaited(self, piece: Piece) -> bool:
        """Whether backward brings a gradient for it that goes to the drive."""
        param = self._params[piece.param]
        return param.parameter.requires_grad and param is not self._watching().param

    # The gradient in memory

    def _watching(self) -> GradSentinel:
        if self._grad_sentinel is None:
            raise RuntimeError("a gradient came, and no parameter wanted one")
        return self._grad_sentinel

    def _before_the_grad_sentinel(self) -> None:
        self._look_for_zero_grad()
        self._watching().make_way()

    def _look_for_zero_grad(self) -> None:
        """Notice ``model.zero_grad()``, which only reaches the gradient in memory."""
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
        """Raise if gradients in memory were changed, or put there, since backward.

        `scaled` says that a GradScaler has looked at those in memory.
        """
        self._look_for_zero_grad()
        if self._grad_sentinel is not None:
            self._grad_sentinel.check(scaled)
        for number, param in self._params.items():
            if param.parameter.grad is not None and self.has(number):
                raise RuntimeError(
                    f"parameter {number} has a gradient on the drive, and another was put into "
                    "its .grad: call zero_grad() before gradients are set by hand"
                )

    # For the optimizer

    def stands_in(self, param: SwappedParam) -> bool:
        """Whether a parameter's ``.grad`` is not a gradient of it."""
        sentinel = self._grad_sentinel
        return sentinel is not None and sentinel.param is param and sentinel.stands_in

    def flush(self) -> None:
        """As `GradSheets.flush`; after an error zero_grad, and run backward again."""
        self._look_for_zero_grad()
        super().flush()

    def clear(self) -> None:
        """Forget all gradients."""
        super().clear()
        self._norms.clear()
        self._not_finite = False
        self.factor = None
        if self._grad_sentinel is not None:
            self._grad_sentinel.forget()

    def clip(
        self, max_norm: float, inverse_scale: torch.Tensor | None, transaction: Transaction
    ) -> torch.Tensor:
        """The norm of all gradients; keeps the factor that clips them to `max_norm`, as torch does.

        `inverse_scale` undoes a GradScaler. A rollback brings the factor before back.
        """
        self.check()
        norms: dict[torch.device, list[torch.Tensor]] = {}
        for device in self._looked:
            self._follow_hooks(device)
        for param in self._params.values():
            norm = self._norms.get(param.number)
            if norm is None:
                gradient = self._in_memory(param)
                if gradient is None:
                    continue
                norm = torch.linalg.vector_norm(tensors.local(gradient))
            norm = _over_ranks(param.parameter, norm)
            norms.setdefault(devices.device_of(norm), []).append(norm)
        found = [devices.on_host(torch.stack(each)) for each in norms.values()]
        total = torch.linalg.vector_norm(torch.cat(found)) if found else torch.tensor(0.0)
        if inverse_scale is not None:
            total = total * devices.on_host(inverse_scale)
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

    def close(self) -> None:
        """Leave the parameters alone, and give back memory and file."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.restore()
        self.clear()
        super().close()


def _over_ranks(parameter: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """The norm of a sharded gradient from those of its shards."""
    if not tensors.is_sharded(parameter):
        return norm
    sharded: Any = parameter
    square = norm.square().to(sharded.device)  # where the ranks' collectives are
    for dimension, placement in enumerate(sharded.placements):
        # Not is_shard(): a strided shard (FSDP over tensor parallelism) does not call itself one.
        if not placement.is_replicate():
            dist.all_reduce(square, group=sharded.device_mesh.get_group(dimension))
    return square.sqrt()
