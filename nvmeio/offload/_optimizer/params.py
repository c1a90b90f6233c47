"""The parameters of an optimizer, and the input of a step.

Their values when they were handed over, and their pieces; options and gradients as they were when a
step was requested.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from nvmeio.offload._module.param_store import ParamStore, store_of
from nvmeio.offload._swap_files.subgroups import Piece
from nvmeio.offload._swap_files.tensors import local

_PLACES = ("a SwappedModule", "memory")


@dataclass(eq=False)
class SwappedParam:
    """A parameter, as it was handed over; `shape` is that of this process's part.

    `param_store` keeps it on the drive; None where it is in memory. `stepped_version` is what torch
    counted of its changes behind the last step.
    """

    number: int
    parameter: torch.Tensor
    group: int
    param_store: ParamStore | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    pieces: list[Piece] = field(default_factory=list)
    stepped_version: int | None = None

    @property
    def stores_rounded(self) -> bool:
        """Whether its store gets rounded weights, which its step has in another dtype."""
        return self.param_store is not None and any(p.step_dtype != self.dtype for p in self.pieces)

    def has_rounded_of_last_step(self) -> bool:
        """Whether its store has rounded weights that nobody has changed since they were stepped."""
        return self.stores_rounded and self.parameter._version == self.stepped_version

    @property
    def computes_on(self) -> torch.device:
        """The device of its model's weights and gradients."""
        return self.device if self.param_store is None else self.param_store.device

    def check_unchanged(self) -> None:
        """Raise RuntimeError if it was resized, converted, moved or laid out otherwise."""
        now, store = local(self.parameter), store_of(self.parameter)
        there = now.shape == self.shape and (store is None) == (self.param_store is None)
        alike = there and now.dtype == self.dtype and now.device == self.device
        if alike and (len(self.pieces) == 1 or self._in_order(now)):
            return
        for what, was, found in (
            ("shape", self.shape, tuple(now.shape)),
            ("dtype", self.dtype, now.dtype),
            ("device", self.device, now.device),
            ("contiguity", True, len(self.pieces) == 1 or self._in_order(now)),
            ("place", _PLACES[self.param_store is None], _PLACES[store is None]),
        ):
            if was != found:
                raise RuntimeError(
                    f"parameter {self.number} of shape {self.shape} has changed since the "
                    f"optimizer was made: its {what} was {was} and is {found}. Its state on the "
                    "drive does not fit any more: make a new optimizer"
                )

    def _in_order(self, now: torch.Tensor) -> bool:
        """Whether its pieces are where they were, if there are several: runs of elements."""
        return self.param_store is not None or now.is_contiguous()


class Scaled(NamedTuple):
    """The findings of a GradScaler about the gradients of a step."""

    found_inf: Any
    scale: torch.Tensor | None

    def inverse(self) -> torch.Tensor:
        """The factor that undoes the scale."""
        if self.scale is None:
            raise RuntimeError(
                "GradScaler.unscale_ cannot reach gradients on the drive: leave it out, and "
                "clip with optimizer.clip_grad_norm_(max_norm, scaler=scaler)"
            )
        return self.scale.double().reciprocal().float()


class StepInputs(NamedTuple):
    """Options and gradients of one step.

    `grads` are those in memory, by the numbers of their parameters; None for those that are there
    when the step begins.
    """

    groups: list[dict[str, Any]]
    grads: Mapping[int, torch.Tensor] | None
    scaled: Scaled | None


def grads_of(params: Sequence[SwappedParam]) -> dict[int, torch.Tensor]:
    """The gradients that are in memory, by the numbers of their parameters."""
    return {
        param.number: gradient for param in params if (gradient := param.parameter.grad) is not None
    }


def check_groups(groups: Sequence[dict[str, Any]], params: Sequence[SwappedParam]) -> None:
    """Raise RuntimeError if somebody changed the parameters of groups by hand."""
    # With few calls for each: there may be 10,000 of them.
    given = [parameter for group in groups for parameter in group["params"]]
    numbers = [number for number, group in enumerate(groups) for _ in group["params"]]
    if numbers == [param.group for param in params] and all(
        map(operator.is_, given, [param.parameter for param in params])
    ):
        return
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


def scheduled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a learning-rate scheduler was made over it: torch's mark the `step` they wrap."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def follow(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Make a learning-rate scheduler go on with another optimizer that has the same groups."""
    scheduler.optimizer = optimizer
    for inner in getattr(scheduler, "_schedulers", ()):
        follow(inner, optimizer)
    if scheduled(optimizer):
        return
    stepping = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return stepping(*args, **kwargs)

    # Schedulers want to see that the optimizer steps before they do (lr_scheduler.py in torch).
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]
