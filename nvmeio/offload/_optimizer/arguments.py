"""The arguments of `SwappedOptimizer`, `SwappedModule` and their like, checked in words."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nvmeio._checks import dtype as dtype
from nvmeio._checks import size as size
from nvmeio._checks import switch as switch
from nvmeio.errors import nearest
from nvmeio.handle import AioHandle


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """The arguments of `SwappedOptimizer` that say how it works; see there.

    `on_disk`: gradients are on the drive too. `must_resume`: raise where there is nothing to
    resume.
    """

    subgroup_bytes: int
    buffer_bytes: int | None
    master_dtype: torch.dtype | None
    on_disk: bool
    ratio: float
    recoverable: bool
    durable: bool
    checksum: bool
    resume: bool
    must_resume: bool
    overwrite: bool
    read_ahead: bool
    write_behind: bool
    device: torch.device
    device_bytes: int | None

    def __post_init__(self) -> None:
        ratio(self.ratio)
        if self.resume and self.overwrite:
            raise ValueError(
                "resume goes on from the state in the directory, and overwrite=True removes it: "
                "give one, not both"
            )
        if self.resume and not (self.ratio == 1.0 and self.recoverable):
            raise ValueError(
                "resume=True needs all state and weights on the drive: leave ratio at 1.0 and "
                "recoverable at True"
            )

    @property
    def buffers(self) -> int:
        """The number of buffers: one for each stage that goes on at a time."""
        return 1 + self.read_ahead + self.write_behind + (self.device.type != "cpu")


def check_names(optimizer_class: Any, given: Mapping[str, Any], ours: type) -> None:
    """Refuse a keyword that neither the optimizer's class nor ours takes; says which was meant."""
    if not isinstance(optimizer_class, type):
        return
    takes = inspect.signature(optimizer_class).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes.values()):
        return
    for name in given:
        if name not in takes:
            known = [*takes, *inspect.signature(ours).parameters]
            raise TypeError(
                f"neither {optimizer_class.__name__} nor {ours.__name__} takes {name!r}"
                f"{nearest(name, known)}"
            )


MUST = "must"  # resume, or raise


def made_for_inference(name: str) -> ValueError:
    """The error for a parameter that torch allows nobody to change or train."""
    return ValueError(
        f"{name} was made in torch.inference_mode(), and no pass or step outside can use it: make "
        "the model outside of that mode, or take copy.deepcopy(model) there"
    )


def handle(value: AioHandle | None) -> None:
    if value is not None and not isinstance(value, AioHandle):
        raise TypeError(f"handle must be an nvmeio.AioHandle, not {value!r:.80}")


def master_dtype(value: torch.dtype | str | None) -> torch.dtype | None:
    """None or a floating-point dtype, which may be given by its name."""
    found = dtype("master_dtype", value)
    if found is not None and not found.is_floating_point:
        raise ValueError(f"master_dtype must be a floating-point dtype, not {found}")
    return found


def choice(name: str, value: str, among: tuple[str, ...]) -> None:
    if value not in among:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, among))}, not {value!r}")


def resume(value: bool | str) -> bool | str:
    """A switch, or "must"."""
    if isinstance(value, str) and value == MUST:
        return MUST
    try:
        return switch("resume", value)
    except TypeError:
        raise TypeError(f"resume must be true or false, or {MUST!r}, not {value!r:.80}") from None


def ratio(value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"ratio must be a number, not {value!r:.80}")
    if not 0 <= value <= 1:
        raise ValueError(f"ratio must lie between 0 and 1, not {value}")


def buffer_bytes(value: int | str | None) -> int | None:
    """A budget of memory for buffers; None for no limit."""
    return None if value is None else size("buffer_bytes", value, 4096)


def device_bytes(value: int | str | None, device: torch.device) -> int | None:
    """A budget of a device's memory; None where there is no device, or none was asked for."""
    if value is None:
        return None
    if device.type == "cpu":
        raise ValueError(
            "device_bytes is memory of a CUDA device, and device is 'cpu': leave it out"
        )
    return size("device_bytes", value, 4096)
