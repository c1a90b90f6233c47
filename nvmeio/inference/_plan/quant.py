"""Weight-only group quantisation: 4 or 8 bits an element, a scale and a minimum a group.

A row (the last dimension) is cut into groups of `group_size` elements. Of each group the minimum
and (maximum - minimum) / (2**bits - 1) are kept in float32, and each element as its distance from
the minimum in such steps, rounded. Back: ``step * scale + minimum``, computed in float32 and
rounded to the model's dtype; the error of an element is at most half a step, and that rounding.

Four-bit elements lie two in a byte: the first half of a group in the low halves, the second half in
the high ones, so that taking them apart writes two contiguous runs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

# Elements that are converted at once: float32 of them stay in a core's second-level cache.
_CHUNK_ELEMENTS = 1 << 18


class Quantised(NamedTuple):
    """How a tensor is quantised.

    Attributes:
        bits: 4 or 8.
        group_size: Elements of a row that share a scale and a minimum; even.
    """

    bits: int
    group_size: int

    def packed_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the uint8 tensor that holds the steps."""
        return (*shape[:-1], shape[-1] * self.bits // 8)

    def groups_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales and of the minima."""
        return (*shape[:-1], shape[-1] // self.group_size)


def check_setting(bits: int, group_size: int) -> Quantised:
    """A setting from what a user gave.

    Raises:
        ValueError: There is no such setting.
    """
    if bits not in (4, 8):
        raise ValueError(f"quant_bits must be 4 or 8, not {bits!r}")
    if not isinstance(group_size, int) or group_size < 2 or group_size % 2:
        raise ValueError(f"quant_group_size must be an even number of elements, not {group_size!r}")
    return Quantised(bits, group_size)


def can_quantise(shape: tuple[int, ...], dtype: torch.dtype, setting: Quantised) -> bool:
    """Whether a tensor is one that is quantised: a matrix (or several) of whole groups."""
    return (
        dtype.is_floating_point
        and dtype.itemsize >= 2
        and len(shape) >= 2
        and math.prod(shape) > 0
        and shape[-1] % setting.group_size == 0
    )


def quantise(
    tensor: torch.Tensor, setting: Quantised
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Steps (uint8, packed), scales and minima (float32) of a tensor.

    Args:
        tensor: Floating point, of whole groups, without infinities and NaN.
        setting: How.

    Raises:
        ValueError: It holds a value that is not finite.
    """
    shape = tuple(tensor.shape)
    groups = tensor.reshape(-1, setting.group_size).float()
    low, high = groups.aminmax(dim=1, keepdim=True)
    if not bool(torch.isfinite(low).all() and torch.isfinite(high).all()):
        raise ValueError("infinities and NaN cannot be quantised")
    most = (1 << setting.bits) - 1
    scale = (high - low) / most
    # A group of equal elements has no width: any divisor but 0 gives step 0.
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
    steps = ((groups - low) / divisor).round_().clamp_(0, most).to(torch.uint8)
    if setting.bits == 4:
        half = setting.group_size // 2
        steps = steps[:, :half] | (steps[:, half:] << 4)
    sizes = setting.groups_shape(shape)
    packed = steps.reshape(setting.packed_shape(shape)).contiguous()
    return packed, scale.reshape(sizes), low.reshape(sizes)


def dequantise(
    packed: torch.Tensor,
    scale: torch.Tensor,
    low: torch.Tensor,
    setting: Quantised,
    out: torch.Tensor,
) -> None:
    """Write the tensor that these stand for into `out`, which has its shape and dtype.

    Cost: on a CPU chunk by chunk, each staying in the cache; nothing but a chunk is allocated.
    """
    size = setting.group_size
    width = size * setting.bits // 8
    steps, target = packed.reshape(-1, width), out.view(-1, size)
    scales, lows = scale.reshape(-1, 1), low.reshape(-1, 1)
    count = target.shape[0]
    at_once = count if out.device.type != "cpu" else max(1, _CHUNK_ELEMENTS // size)
    room = out.new_empty((min(at_once, count), size), dtype=torch.float32)
    for start in range(0, count, at_once):
        end = min(start + at_once, count)
        values, taken = room[: end - start], steps[start:end]
        if setting.bits == 4:
            values[:, : size // 2].copy_(taken & 15)
            values[:, size // 2 :].copy_(taken >> 4)
        else:
            values.copy_(taken)
        target[start:end].copy_(values.mul_(scales[start:end]).add_(lows[start:end]))
