"""A swapped optimizer in the place of one in memory."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from nvmeio._checks import Paths
from nvmeio.offload.optimizer import SwappedOptimizer


def swapped_like(
    optimizer: torch.optim.Optimizer,
    swap_dir: Paths,
    *,
    as_class: type[SwappedOptimizer] = SwappedOptimizer,
    **options: Any,
) -> SwappedOptimizer:
    """A swapped optimizer of the same class, with the same groups, options and state.

    Args:
        optimizer: In memory; not to be used any more.
        swap_dir: As for `SwappedOptimizer`, like `options`.
        as_class: What to make, `SwappedOptimizer` or a subclass.
        options: ``master_dtype=torch.float32`` and the like.

    Raises:
        TypeError: It is swapped already, or its class takes other arguments than its defaults say.
        Exception: As for `SwappedOptimizer`.

    Learning-rate schedulers of `optimizer` go on if they are given the new one (`follow`).
    """
    if isinstance(optimizer, SwappedOptimizer):
        raise TypeError(f"{optimizer!r} is swapped already")
    kind = type(optimizer)
    takes = inspect.signature(kind.__init__).parameters
    arguments = {k: v for k, v in optimizer.defaults.items() if k in takes}
    made = as_class(
        kind,
        [dict(group) for group in optimizer.param_groups],
        swap_dir=swap_dir,
        **options,
        **arguments,
    )
    if optimizer.state and not made.resumed:
        made.load_state_dict(optimizer.state_dict())
    return made


def follow(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Let a learning-rate scheduler go on with another optimizer that has the same groups."""
    scheduler.optimizer = optimizer
    for inner in getattr(scheduler, "_schedulers", ()):
        follow(inner, optimizer)
    stepping = optimizer.step
    if getattr(stepping, "_wrapped_by_lr_sched", False):
        return

    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return stepping(*args, **kwargs)

    # Schedulers want to see that the optimizer steps before they do (lr_scheduler.py in torch).
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]
