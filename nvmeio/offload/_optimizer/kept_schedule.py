"""A learning-rate scheduler whose state is stored with each step of a swapped optimizer."""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from nvmeio._checks import integer

STATE = "scheduler"  # its state, in the first of `param_groups`
STEPS = "scheduler_after"  # the optimizer's complete steps since the scheduler was kept


class KeptSchedule:
    """The hooks around a step that store a scheduler's state.

    Attributes:
        changes_inputs: The step reads `param_groups` after this hook.
    """

    changes_inputs = True

    def __init__(self, scheduler: LRScheduler, every: int) -> None:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise TypeError(
                "ReduceLROnPlateau steps by a metric, which no step of the optimizer has: save "
                "both with Checkpointer and load them with Checkpointer.resume(scheduler=…)"
            )
        if not isinstance(scheduler, LRScheduler):
            raise TypeError(f"scheduler must be one of torch.optim.lr_scheduler, not {scheduler!r}")
        self._every = integer("every", every, 1)
        self._scheduler = weakref.ref(scheduler)  # it holds the optimizer, which holds this
        self._before = 0  # complete steps of runs before, and of a state dict
        self._since = 0  # what `optimizer` had made then

    def attach(self, optimizer: Any, is_loaded: bool) -> None:
        """Bring the scheduler to where it was stored, and store it from now on.

        `is_loaded` says that the optimizer took over a state dict since it resumed: what is stored
        goes with that, and the caller that loaded it brought the scheduler back.
        """
        scheduler = self._scheduler()
        assert scheduler is not None
        made_over: Any = scheduler.optimizer
        if made_over is not optimizer:
            raise ValueError("the scheduler was made over another optimizer: make it over this one")
        mine = optimizer.param_groups[0]
        self._count_from(optimizer)
        if optimizer.resumed and STATE in mine and not is_loaded:
            optimizer.restore_groups()
            scheduler.load_state_dict(mine[STATE])
            if self._before % self._every == 0:
                scheduler.step()  # the stored state is from before this step
        optimizer.register_step_pre_hook(self)
        optimizer.register_load_state_dict_post_hook(self._count_from)

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """The hook before a step."""
        scheduler = self._scheduler()
        if scheduler is not None:
            mine = optimizer.param_groups[0]
            mine[STATE] = scheduler.state_dict()
            mine[STEPS] = self._before + optimizer._steps_made() - self._since + 1

    def _count_from(self, optimizer: Any) -> None:
        """Count on from what `param_groups` say now."""
        self._before = optimizer.param_groups[0].get(STEPS, 0)
        self._since = optimizer._steps_made()
