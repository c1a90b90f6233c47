"""How an optimizer's parameters are cut into pieces, and these put together to subgroups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from nvmeio._memory import devices
from nvmeio.offload._module.absent import is_absent
from nvmeio.offload._module.param_store import store_of
from nvmeio.offload._optimizer import memory_plans
from nvmeio.offload._optimizer.params import SwappedParam
from nvmeio.offload._optimizer.settings import OptimizerSettings
from nvmeio.offload._step.device_turns import BUFFERS
from nvmeio.offload._step.stepping import Stepper
from nvmeio.offload._swap_files.subgroups import Piece, Subgroup, cut
from nvmeio.offload._swap_files.tensors import local, own_strides, strides_of


class Cuts(NamedTuple):
    """How it is done.

    Attributes:
        stepper: Knows the state of a parameter.
        settings: Say how long a buffer may be, and what is on the drive.
    """

    stepper: Stepper
    settings: OptimizerSettings

    def params(self, first: int, number: int, group: dict[str, Any]) -> list[SwappedParam]:
        """The parameters of a group, cut so that each piece fits into a buffer.

        Args:
            first: The number of the first of them.
            number: Of the group.
            group: As the optimizer has it.

        Raises:
            TypeError: One is complex with master weights, or not dense, or the optimizer cannot be
                probed with it.
            ValueError: One is elsewhere than the device that steps, or has no values.
        """
        whole = self._params(first, number, group, 1 << 62)
        return self._params(first, number, group, self._most_bytes(whole))

    def subgroups(self, params: Sequence[SwappedParam]) -> list[Subgroup]:
        """Their pieces in subgroups.

        Raises:
            ValueError: The buffers are too small for one.
        """
        pieces = [piece for param in params for piece in param.pieces]
        subgroups = memory_plans.make_subgroups(
            pieces, self._most_bytes(params), self.settings.on_disk
        )
        how = self.settings
        with_grads = how.on_disk or any(param.stores_rounded for param in params)
        for name, budget, buffers in (
            ("buffer_bytes", how.buffer_bytes, how.buffers),
            ("device_bytes", how.device_bytes, BUFFERS),
        ):
            memory_plans.check_budget(subgroups, with_grads, name, budget, buffers)
        return subgroups

    def _params(
        self, first: int, number: int, group: dict[str, Any], most_bytes: int
    ) -> list[SwappedParam]:
        return [
            self._param(each, parameter, number, group, most_bytes)
            for each, parameter in enumerate(group["params"], first)
        ]

    def _param(
        self,
        number: int,
        parameter: torch.Tensor,
        group_number: int,
        group: dict[str, Any],
        most_bytes: int,
    ) -> SwappedParam:
        """A parameter with its pieces, none of which has a record longer than `most_bytes`."""
        tensor = local(parameter)
        param_store = store_of(parameter)
        param = SwappedParam(
            number,
            parameter,
            group_number,
            param_store,
            tuple(tensor.shape),
            tensor.dtype,
            tensor.device,
        )
        if param_store is None and is_absent(tensor):
            raise ValueError(
                f"parameter {number} has no values: its SwappedModule is closed, or has its layer "
                "in tiles. Take module.parameters() as they are once the module is swapped"
            )
        if tensor.layout is not torch.strided:
            raise TypeError(
                f"parameter {number} is {tensor.layout}: only dense parameters are swapped"
            )
        how = self.settings
        where = devices.device_of(tensor) if param_store is None else param_store.device
        if how.device.type != "cpu" and where != how.device:
            raise ValueError(
                f"parameter {number} is on {where}, and is to be stepped on {how.device}: bring "
                f"the model there first (where it does not fit, SwappedModule(..., device="
                f"{str(how.device)!r}) does), or leave out device="
            )
        step_dtype = how.master_dtype or tensor.dtype
        if how.master_dtype is not None and not tensor.dtype.is_floating_point:
            step_dtype = tensor.dtype
        if param_store is None:
            strides, grad_strides = strides_of(tensor), own_strides(tensor)
            in_order = tensor.is_contiguous()
        else:
            strides = grad_strides = param_store.strides_of(parameter)
            in_order = not strides
        staged = step_dtype != tensor.dtype or param_store is not None or where != how.device
        kinds = self.stepper.kinds(group, group_number, step_dtype, param.shape)
        stored = staged or how.recoverable
        whole = Piece(
            number,
            0,
            tensor.numel(),
            param.shape,
            step_dtype,
            tensor.dtype,
            kinds,
            staged,
            stored,
            strides,
            grad_strides,
        )
        nbytes = whole.record_nbytes + (
            whole.numel * tensor.dtype.itemsize if self.settings.on_disk else 0
        )
        if self.stepper.splits(step_dtype) and in_order and nbytes > most_bytes:
            each = nbytes / max(1, whole.numel)
            for start, stop in cut(whole.numel, each, most_bytes):
                param.pieces.append(
                    Piece(
                        number,
                        start,
                        stop,
                        (stop - start,),
                        step_dtype,
                        tensor.dtype,
                        kinds,
                        staged,
                        stored,
                    )
                )
        else:
            param.pieces.append(whole)
        for piece in param.pieces:
            piece.lent = param_store is not None and not param.stores_rounded
        return param

    def _most_bytes(self, params: Sequence[SwappedParam]) -> int:
        how = self.settings
        pieces = [piece for param in params for piece in param.pieces]
        share = memory_plans.slot_share(pieces, how.on_disk)
        most = memory_plans.most_record_bytes(
            how.subgroup_bytes, how.buffer_bytes, how.buffers, share
        )
        return memory_plans.most_record_bytes(most, how.device_bytes, BUFFERS, share)
