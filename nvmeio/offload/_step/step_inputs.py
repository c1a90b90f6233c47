"""What a step is to work with, as it was when somebody asked for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from nvmeio.offload._optimizer.params import SwappedParam


class Scaled(NamedTuple):
    """What a GradScaler has found out about the gradients of a step."""

    found_inf: Any
    scale: torch.Tensor | None

    def inverse(self) -> torch.Tensor:
        """What the gradients are to be multiplied with."""
        if self.scale is None:
            raise RuntimeError(
                "GradScaler.unscale_ cannot reach gradients on the drive: leave it out, and "
                "clip with optimizer.clip_grad_norm_(max_norm, scaler=scaler)"
            )
        return self.scale.double().reciprocal().float()


class StepInputs(NamedTuple):
    """Options and gradients of one step.

    Attributes:
        groups: The parameter groups.
        grads: The gradients in memory by the numbers of their parameters; None for those that are
            there when the step begins.
        scaled: What a GradScaler says of them.
    """

    groups: list[dict[str, Any]]
    grads: Mapping[int, torch.Tensor] | None
    scaled: Scaled | None


def grads_of(params: Sequence[SwappedParam]) -> dict[int, torch.Tensor]:
    """The gradients that are in memory, by the numbers of their parameters."""
    parameters = ((param.number, param.parameter) for param in params)
    return {number: p.grad for number, p in parameters if p.grad is not None}


def check_groups(groups: Sequence[dict[str, Any]], params: Sequence[SwappedParam]) -> None:
    """Whether parameter groups have the parameters that they were given.

    Raises:
        RuntimeError: Somebody changed them by hand.
    """
    mine: list[list[int]] = [[] for _ in groups]
    for param in params:
        if param.group < len(mine):
            mine[param.group].append(id(param.parameter))
    for number, (group, wanted) in enumerate(zip(groups, mine, strict=True)):
        if [id(parameter) for parameter in group["params"]] != wanted:
            raise RuntimeError(
                f"param_groups[{number}]['params'] was changed by hand, and the state on the "
                "drive was not: parameters are added with add_param_group, and left out of a "
                "step by having no gradient"
            )
    if params and params[-1].group >= len(mine):
        raise RuntimeError(
            "a group was taken out of param_groups by hand: leave it, and give its parameters "
            "no gradient (requires_grad=False)"
        )
