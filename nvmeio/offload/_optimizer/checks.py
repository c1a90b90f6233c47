"""Arguments, checked in words."""

from __future__ import annotations

import torch

from nvmeio._checks import dtype as dtype
from nvmeio._checks import integer as integer
from nvmeio._checks import refuse_pickling as refuse_pickling
from nvmeio._checks import size as size
from nvmeio._checks import switch as switch
from nvmeio.handle import AioHandle

MUST = "must"  # resume, or raise


def handle(value: AioHandle | None) -> None:
    """None or a handle."""
    if value is not None and not isinstance(value, AioHandle):
        raise TypeError(f"handle must be an nvmeio.AioHandle, not {value!r:.80}")


def master_dtype(value: torch.dtype | str | None) -> torch.dtype | None:
    """None or a floating-point dtype, which may be given by its name."""
    found = dtype("master_dtype", value)
    if found is not None and not found.is_floating_point:
        raise ValueError(f"master_dtype must be a floating-point dtype, not {found}")
    return found


def choice(name: str, value: str, among: tuple[str, ...]) -> None:
    """One of some words."""
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
    """A number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"ratio must be a number, not {value!r:.80}")
    if not 0 <= value <= 1:
        raise ValueError(f"ratio must lie between 0 and 1, not {value}")


def device_bytes(value: int | str | None, device: torch.device) -> int | None:
    """A budget of a device's memory; None where there is no device, or none was asked for."""
    nbytes = size("device_bytes", value)
    if nbytes is None:
        return None
    if device.type == "cpu":
        raise ValueError(
            "device_bytes is memory of a CUDA device, and device is 'cpu': leave it out"
        )
    return integer("device_bytes", nbytes, 4096)
