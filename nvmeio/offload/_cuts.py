"""How an optimizer's parameters are cut into pieces, and these put together to subgroups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from nvmeio.offload import _plan
from nvmeio.offload._params import SwappedParam, new_param
from nvmeio.offload._stepping import Stepper
from nvmeio.offload._subgroups import Subgroup


class Cuts(NamedTuple):
    """What decides it; see `SwappedOptimizer`.

    Attributes:
        stepper: Knows the state of a parameter.
        subgroup_bytes: What is read, stepped and written as one.
        buffer_bytes: All buffers together, or None.
        buffers: How many there are.
        master_dtype: Of weights on the drive, or None.
        recoverable: The weights have a copy there.
        on_disk: Gradients are on the drive too.
    """

    stepper: Stepper
    subgroup_bytes: int
    buffer_bytes: int | None
    buffers: int
    master_dtype: torch.dtype | None
    recoverable: bool
    on_disk: bool

    def params(self, first: int, number: int, group: dict[str, Any]) -> list[SwappedParam]:
        """The parameters of a group, cut so that each piece fits into a buffer.

        Args:
            first: The number of the first of them.
            number: Of the group.
            group: As the optimizer has it.
        """
        whole = self._params(first, number, group, 1 << 62)
        return self._params(first, number, group, self._most_bytes(whole))

    def subgroups(self, params: Sequence[SwappedParam]) -> list[Subgroup]:
        """Their pieces in subgroups.

        Raises:
            ValueError: The buffers are too small for one.
        """
        pieces = [piece for param in params for piece in param.pieces]
        subgroups = _plan.make_subgroups(pieces, self._most_bytes(params), self.on_disk)
        with_grads = self.on_disk or any(param.stores_rounded for param in params)
        _plan.check_budget(subgroups, with_grads, self.buffer_bytes, self.buffers)
        return subgroups

    def _params(
        self, first: int, number: int, group: dict[str, Any], most_bytes: int
    ) -> list[SwappedParam]:
        return [
            new_param(
                each,
                parameter,
                number,
                group,
                self.stepper,
                self.master_dtype,
                self.recoverable,
                most_bytes,
                self.on_disk,
            )
            for each, parameter in enumerate(group["params"], first)
        ]

    def _most_bytes(self, params: Sequence[SwappedParam]) -> int:
        pieces = [piece for param in params for piece in param.pieces]
        share = _plan.slot_share(pieces, self.on_disk)
        return _plan.most_record_bytes(self.subgroup_bytes, self.buffer_bytes, self.buffers, share)
