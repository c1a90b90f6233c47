"""What stands for a parameter that is on the drive and not in memory."""

from __future__ import annotations

import math

import torch

from nvmeio._memory import devices
from nvmeio.offload._swap_files.subgroups import SlotSpan

_MARK = 1  # where the element of a shape of one lies in its storage: strides do not tell of it


def absent(span: SlotSpan, device: torch.device) -> torch.Tensor:
    """What stands for a parameter that is on the drive: of its shape, and NaN where it can be.

    One element of memory. Reading it gives no result that could pass for one, and writing to it is
    refused by torch, since its elements share their memory.
    """
    mark = _MARK if math.prod(span.shape) == 1 else 0
    value = torch.full((1 + mark,), _fill(span.dtype), dtype=span.dtype)
    there = value if device.type == "cpu" else devices.moved(value, device)
    return there[mark].expand(span.shape)


def is_absent(parameter: torch.Tensor) -> bool:
    """Whether such a thing stands there."""
    if parameter.is_meta or not parameter.numel():
        return False
    if parameter.numel() > 1:
        return not any(parameter.stride())
    nbytes = (1 + _MARK) * parameter.element_size()
    if parameter.storage_offset() != _MARK or parameter.untyped_storage().nbytes() != nbytes:
        return False
    value, fill = parameter.detach(), _fill(parameter.dtype)  # torch does let one be written to
    return bool(value.isnan().all() if fill else (value == fill).all())


def _fill(dtype: torch.dtype) -> float:
    return float("nan") if dtype.is_floating_point or dtype.is_complex else 0
