"""Gradients that leave memory as backward makes them: taken, summed, measured, clipped.

Hooks hand each over to the optimizer's thread, which puts it into `GradSheets` and takes it
away from its parameter. One small gradient stays, and tells what others do to ``.grad``
(`GradSentinel`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from nvmeio._io.drives import DriveHandles
from nvmeio._memory import devices
from nvmeio._ranks.rank_store import several
from nvmeio.offload._generations.transactions import Transaction, Transactions
from nvmeio.offload._gradients.grad_sentinel import GradSentinel
from nvmeio.offload._gradients.grad_sheets import GradSheets
from nvmeio.offload._optimizer.params import SwappedParam
from nvmeio.offload._step.pipeline import Move
from nvmeio.offload._swap_files.subgroups import Piece, Subgroup
from nvmeio.offload._swap_files.swap_dirs import SwapDirs
from nvmeio.offload._swap_files.tensors import is_sharded, laid, local


class GradientSwapper:
    """Takes gradients to the drive, and tells where they are.

    Args:
        directory: Locked by this process.
        handles: Move the bytes.
        transactions: Whose thread calls all of this; hooks hand over to it from wherever they are.

    Attributes:
        factor: What `clip` found that gradients are to be multiplied with; None for nothing.
    """

    def __init__(
        self, directory: SwapDirs, handles: DriveHandles, transactions: Transactions
    ) -> None:
        self._distributed = several()
        self._transactions = transactions
        self._sheets = GradSheets(directory, handles, self._is_awaited)
        self._params: dict[int, SwappedParam] = {}
        self._norms: dict[int, torch.Tensor] = {}
        self._not_finite = False
        self._grad_sentinel: GradSentinel | None = None  # once a parameter wants gradients
        self.factor: torch.Tensor | None = None
        self._hooks: list[Any] = []

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
        self._sheets.reserve(subgroups)

    def extend(self, params: Sequence[SwappedParam], subgroups: Sequence[Subgroup]) -> None:
        """Take over the gradients of parameters that `reserve` has made room for."""
        self._sheets.extend(subgroups)
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

    # What backward made

    def _hand_over(self, param: SwappedParam, parameter: torch.Tensor) -> None:
        """The hook: called in autograd's threads, and in the main one."""
        self._transactions.run(lambda _: self._take(param, parameter))

    def _announce(self, _: torch.Tensor) -> None:
        """The hook before the gradient in memory is accumulated."""
        self._transactions.run(lambda _: self._before_the_grad_sentinel())

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
            if self._not_finite:
                sentinel.poison()
            return
        self._look_for_zero_grad()
        self._check_not_clipped()
        gradient = laid(devices.on_host(local(parameter.grad)), param.pieces[0].grad_strides)
        try:
            self._sheets.add_to(param, gradient)
            norm = torch.linalg.vector_norm(gradient)
            self._norms[param.number] = norm
            # A norm may overflow where no element is infinite.
            if not bool(torch.isfinite(norm)) and not bool(torch.isfinite(gradient).all()):
                self._not_finite = True
            self._sheets.put(param, gradient)
        except BaseException as failed:
            self._sheets.lose(failed)
            raise
        parameter.grad = None
        sentinel.stand_in()
        if self._not_finite:
            sentinel.poison()

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
        for number, param in self._params.items():
            if param.parameter.grad is not None and self._sheets.has(number):
                raise RuntimeError(
                    f"parameter {number} has a gradient on the drive, and another was put into "
                    "its .grad: call zero_grad() before gradients are set by hand"
                )

    # What the optimizer asks

    def has(self, number: int) -> bool:
        """Whether a parameter's gradient is on the drive."""
        return self._sheets.has(number)

    def stands_in(self, param: SwappedParam) -> bool:
        """Whether what a parameter has in ``.grad`` is no gradient of it."""
        sentinel = self._grad_sentinel
        return sentinel is not None and sentinel.param is param and sentinel.stands_in

    def reads(self, subgroup: Subgroup, pieces: Sequence[Piece], base: int) -> list[Move]:
        """The moves that bring gradients into a slot, from byte `base` on."""
        return self._sheets.reads(subgroup, pieces, base)

    def flush(self) -> None:
        """Write what is in memory, and wait until all is written.

        Raises:
            TransferError: Some gradients were lost; zero_grad, and run backward again.
        """
        self._look_for_zero_grad()
        self._sheets.flush()

    def clear(self) -> None:
        """Forget all gradients."""
        self._sheets.clear()
        self._norms.clear()
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
                norm = torch.linalg.vector_norm(devices.on_host(local(gradient)))
            norms.append(_over_ranks(param.parameter, norm))
        total = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.tensor(0.0)
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

    @property
    def file_bytes(self) -> int:
        """Length of the file."""
        return self._sheets.file_bytes

    @property
    def memory_bytes(self) -> int:
        """Memory that they are filled in."""
        return self._sheets.memory_bytes

    @property
    def read_bytes(self) -> int:
        """Since it was made, for accumulation only."""
        return self._sheets.read_bytes

    @property
    def written_bytes(self) -> int:
        """Since it was made."""
        return self._sheets.written_bytes

    def close(self) -> None:
        """Leave the parameters alone, and give back memory and file."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.restore()
        self.clear()
        self._sheets.close()


def _over_ranks(parameter: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """The norm of a sharded gradient from those of its shards."""
    if not is_sharded(parameter):
        return norm
    sharded: Any = parameter
    square = norm.square().to(sharded.device)  # where the ranks' collectives are
    for dimension, placement in enumerate(sharded.placements):
        # Not is_shard(): a strided shard (FSDP over tensor parallelism) does not call itself one.
        if not placement.is_replicate():
            dist.all_reduce(square, group=sharded.device_mesh.get_group(dimension))
    return devices.on_host(square.sqrt())
