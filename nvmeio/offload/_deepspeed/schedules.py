"""The learning-rate schedule that a configuration names: DeepSpeed's five, and torch's.

DeepSpeed's are torch schedulers here, with the same learning rates to the last bit. Each is a
function of the number of steps made; DeepSpeed counts them from -1.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from nvmeio.errors import nearest
from nvmeio.offload._deepspeed.keys import known
from nvmeio.offload._deepspeed.refusals import Refusals

_SECTION = ("type", "params")


class _Schedule(LRScheduler):
    """The common part of DeepSpeed's schedules: their count of steps."""

    @property
    def _iteration(self) -> int:
        return self.last_epoch - 1


class LRRangeTest(_Schedule):
    """A learning rate that grows evenly, or in stairs, to find the largest one that works."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: float | list[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
    ) -> None:
        _check_steps("lr_range_test_step_size", lr_range_test_step_size)
        self.min_lrs = _for_groups(optimizer, "lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = lr_range_test_step_size
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """See `_Schedule`."""
        interval = float(self._iteration + 1) / self.step_size
        if self.staircase:
            interval = math.floor(interval)
        increase = 1 + self.step_rate * interval
        return [lr * increase for lr in self.min_lrs]


class OneCycle(_Schedule):
    """A learning rate that rises and falls once, then decays; momentum the other way round."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: float | list[float],
        cycle_max_lr: float | list[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | list[float] = 0.8,
        cycle_max_mom: float | list[float] = 0.9,
        decay_mom_rate: float = 0.0,
    ) -> None:
        first, second = cycle_first_step_size, cycle_second_step_size
        self.first_size = float(first)
        self.second_size = self.first_size if second is None else float(second)
        if self.first_size <= 0 or self.second_size < 0:
            raise ValueError(
                f"OneCycle: cycle_first_step_size must be positive, and cycle_second_step_size "
                f"not negative: they are {first} and {second}"
            )
        self.total_size = self.first_size + self.second_size
        self.step_ratio = self.first_size / self.total_size
        self.first_stairs = cycle_first_stair_count
        self.second_stairs = (
            cycle_first_stair_count
            if cycle_second_stair_count is None
            else cycle_second_stair_count
        )
        self.min_lrs = _for_groups(optimizer, "cycle_min_lr", cycle_min_lr)
        self.max_lrs = _for_groups(optimizer, "cycle_max_lr", cycle_max_lr)
        self.min_moms = _for_groups(optimizer, "cycle_min_mom", cycle_min_mom)
        self.max_moms = _for_groups(optimizer, "cycle_max_mom", cycle_max_mom)
        self.decay_step_size = decay_step_size
        self.decay_lr_rate = decay_lr_rate
        self.decay_mom_rate = decay_mom_rate
        self.cycle_momentum = cycle_momentum
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """See `_Schedule`."""
        if self.cycle_momentum:
            for group, momentum in zip(self.optimizer.param_groups, self._momenta(), strict=True):
                group["betas"] = (momentum, 0.99)
        ends = zip(self.min_lrs, self.max_lrs, strict=True)
        if self._iteration < self.total_size:
            scale = self._scale()
            return [low + (high - low) * scale for low, high in ends]
        factor = self._decay(self.decay_lr_rate)
        return [low if factor is None else low / factor for low in self.min_lrs]

    def _momenta(self) -> list[float]:
        if self._iteration < 0:
            return self.min_moms  # DeepSpeed's first step has the smallest one
        if self._iteration < self.total_size:
            scale = self._scale()
            ends = zip(self.min_moms, self.max_moms, strict=True)
            return [high - (high - low) * scale for low, high in ends]
        factor = self._decay(self.decay_mom_rate)
        return [high if factor is None else high * factor for high in self.max_moms]

    def _scale(self) -> float:
        """The position between the ends of the cycle."""
        position = self._iteration + 1
        cycle = math.floor(1 + position / self.total_size)
        x = 1.0 + position / self.total_size - cycle
        rises = x <= self.step_ratio
        stairs = self.first_stairs if rises else self.second_stairs
        if stairs <= 0:
            return x / self.step_ratio if rises else (x - 1) / (self.step_ratio - 1)
        within = position % self.total_size
        if within <= self.first_size:
            return math.floor(within * stairs / self.first_size) / stairs
        return math.floor((self.total_size - within) * stairs / self.second_size) / stairs

    def _decay(self, rate: float) -> float | None:
        """The factor of the decay behind the cycle; None where there is none."""
        if math.isclose(self.decay_step_size, 0) or math.isclose(rate, 0):
            return None
        interval = (self._iteration - self.total_size + 1) / self.decay_step_size
        return 1 + rate * interval


class WarmupLR(_Schedule):
    """A learning rate that rises to its full value, and stays there."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: float | list[float] = 0.0,
        warmup_max_lr: float | list[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
    ) -> None:
        if warmup_max_lr is None:
            warmup_max_lr = [float(group["lr"]) for group in optimizer.param_groups]
        self.min_lrs = _for_groups(optimizer, "warmup_min_lr", warmup_min_lr)
        max_lrs = _for_groups(optimizer, "warmup_max_lr", warmup_max_lr)
        self.spans = [high - low for high, low in zip(max_lrs, self.min_lrs, strict=True)]
        _check_steps("warmup_num_steps", warmup_num_steps)
        _check_type(warmup_type)
        self.warmup_num_steps = max(2, warmup_num_steps)
        self.warmup_type = warmup_type
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """See `_Schedule`."""
        if self._iteration < 0:
            return self.min_lrs
        if self._iteration < self.warmup_num_steps:
            gamma = _warmed(self.warmup_type, self._iteration, self.warmup_num_steps)
        else:
            gamma = self._behind()
        return [low + (span * gamma) for low, span in zip(self.min_lrs, self.spans, strict=True)]

    def _behind(self) -> float:
        """The part of the full value that is left behind the warm-up."""
        return 1.0


class WarmupDecayLR(WarmupLR):
    """A learning rate that rises to its full value, and falls evenly to zero."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: float | list[float] = 0.0,
        warmup_max_lr: float | list[float] = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)

    def _behind(self) -> float:
        falling = float(max(1.0, self.total_num_steps - self.warmup_num_steps))
        return max(0.0, float(self.total_num_steps - self._iteration) / falling)


class WarmupCosineLR(_Schedule):
    """The optimizer's learning rate times a ratio that rises to 1, and falls as a cosine."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
    ) -> None:
        _check_steps("warmup_num_steps", warmup_num_steps)
        _check_type(warmup_type)
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio = warmup_min_ratio
        self.warmup_num_steps = max(2, warmup_num_steps)
        self.cos_min_ratio = cos_min_ratio
        self.warmup_type = warmup_type
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """See `_Schedule`."""
        if self._iteration < 0:
            return [0.0 for _ in self.base_lrs]
        ratio = self._ratio()
        return [lr * ratio for lr in self.base_lrs]

    def _ratio(self) -> float:
        if self._iteration < self.warmup_num_steps:
            ratio = _warmed(self.warmup_type, self._iteration, self.warmup_num_steps)
            return self.warmup_min_ratio + ratio * (1.0 - self.warmup_min_ratio)
        step = self._iteration - self.warmup_num_steps + 1
        progress = min(1.0, step / max(1, self.total_num_steps - self.warmup_num_steps))
        ratio = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * ratio)


DEEPSPEEDS = {
    each.__name__: each for each in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


def named_scheduler(
    section: Any, optimizer_class: Any, refusals: Refusals
) -> Callable[[torch.optim.Optimizer], LRScheduler] | None:
    """The maker of the scheduler that "scheduler" names.

    Args:
        section: The section of the config.
        optimizer_class: The class that it will be over; None if that is not known yet.
        refusals: Refused settings are added to it.

    Returns:
        None if the section names none, or what it names was refused.
    """
    section = known("scheduler", section, _SECTION, refusals)
    name, params = section.get("type"), section.get("params")
    params = {} if params is None else params
    if name is None and not params:
        return None
    if not isinstance(name, str) or not isinstance(params, Mapping):
        refusals.add(
            'scheduler must be {"type": "WarmupLR", "params": {…}}, with a name and a mapping, '
            f"not {dict(section)!r:.80}"
        )
        return None
    kind = DEEPSPEEDS.get(name) or getattr(torch.optim.lr_scheduler, name, None)
    if not (isinstance(kind, type) and issubclass(kind, LRScheduler)):
        refusals.add(
            f"scheduler: unknown type {name!r}{nearest(name, _names())}; write one of "
            f"{', '.join(DEEPSPEEDS)}, or a class of torch.optim.lr_scheduler"
        )
        return None
    if kind is torch.optim.lr_scheduler.ReduceLROnPlateau:
        refusals.add(
            "scheduler: ReduceLROnPlateau steps by a loss. Make it over the optimizer: "
            "torch.optim.lr_scheduler.ReduceLROnPlateau(made.optimizer, …)"
        )
        return None
    before = len(refusals)
    params = _checked(name, kind, params, refusals)
    if (
        kind is OneCycle
        and params.get("cycle_momentum", True)
        and optimizer_class is not None
        and "betas" not in inspect.signature(optimizer_class).parameters
    ):
        refusals.add(
            f"scheduler: params: {optimizer_class.__name__} has no betas for OneCycle to "
            'change: write "cycle_momentum": false'
        )
    if len(refusals) > before:
        return None
    return lambda optimizer: kind(optimizer, **params)


def _checked(name: str, kind: Any, params: Mapping[str, Any], refusals: Refusals) -> dict[str, Any]:
    params = dict(params)
    if params.pop("last_batch_iteration", -1) != -1:
        refusals.add(
            'scheduler: params: last_batch_iteration is stored with each step: write "resume": '
            "true at the top"
        )
    takes = dict(inspect.signature(kind).parameters)
    takes.pop("optimizer", None)
    for key, value in params.items():
        if key not in takes:
            refusals.add(
                f"scheduler: params: {name} takes no {key!r}{nearest(key, takes)}; it takes "
                f"{', '.join(takes)}"
            )
        elif value == "auto":
            refusals.add(
                f'scheduler: params: {key} is "auto", which only transformers\' Trainer fills '
                "in: write the number, or leave it out"
            )
    for key, parameter in takes.items():
        if parameter.default is inspect.Parameter.empty and key not in params:
            refusals.add(f'scheduler: params: {name} needs {key}: write "{key}": …')
    return params


def _names() -> list[str]:
    classes = vars(torch.optim.lr_scheduler).items()
    torchs = [k for k, v in classes if isinstance(v, type) and issubclass(v, LRScheduler)]
    return [*DEEPSPEEDS, *torchs]


def _for_groups(
    optimizer: torch.optim.Optimizer, name: str, value: float | list[float]
) -> list[float]:
    """A value for each group: the same, or one of a list of as many."""
    number = len(optimizer.param_groups)
    if not isinstance(value, (list, tuple)):
        return [value] * number
    if len(value) != number:
        raise ValueError(
            f"{name} has {len(value)} values, and the optimizer has {number} groups: give one "
            "number, or one for each group"
        )
    return list(value)


def _check_steps(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"{name} must be a whole number of steps, 1 or more, not {value!r}")


def _check_type(warmup_type: str) -> None:
    if warmup_type not in ("log", "linear"):
        raise ValueError(f'warmup_type must be "log" or "linear", not {warmup_type!r}')


def _warmed(warmup_type: str, iteration: int, steps: int) -> float:
    """The part of the full value that a warm-up has reached."""
    if warmup_type == "log":
        return (1.0 / math.log(steps)) * math.log(iteration + 1)
    return iteration / steps
