"""Weights of 4 or 8 bits: quantised, widened again, and multiplied with as they are.

Quantisation is of weights alone, in groups: 4 or 8 bits an element, a scale and a minimum a group.
A row (the last dimension) is cut into groups of `group_size` elements. The minimum of each group
and (maximum - minimum) / (2**bits - 1) are kept in float32, and each element as its distance from
the minimum in such steps, rounded. Back: ``step * scale + minimum``, computed in float32 and
rounded to the model's dtype; the error of an element is at most half a step, and that rounding.

Four-bit elements lie two in a byte: the first half of a group in the low halves, the second half in
the high ones, so that taking them apart writes two contiguous runs.

On a CPU the loops of native_shim/packed/packed.c widen and multiply, on as many threads as torch
computes with and without the GIL. A product sums the very elements that widening gives, in float32.
A CPU that multiplies bfloat16 itself does so: one row or two by instructions for pairs of elements,
more in its tile registers (native_shim/packed/packed_tiles.c).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch

from nvmeio._bindings import packed as native
from nvmeio._memory import devices
from nvmeio.errors import counted
from nvmeio.inference._plan.schemes import Scheme, Shape

Compute = Literal["auto", "packed", "widened"]

NATIVE_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Quantised(NamedTuple):
    """The setting for quantising a tensor: to 4 or 8 bits, in groups of so many elements of a row.

    A group shares a scale and a minimum; its size is even.
    """

    bits: int
    group_size: int

    def packed_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the uint8 tensor that holds the steps."""
        return (*shape[:-1], shape[-1] * self.bits // 8)

    def groups_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales and of the minima."""
        return (*shape[:-1], shape[-1] // self.group_size)

    @property
    def multiplies(self) -> bool:
        return True

    def stored(self, shape: Shape) -> list[tuple[torch.dtype, Shape]]:
        """Its steps, scales and minima."""
        groups = self.groups_shape(shape)
        steps = self.packed_shape(shape)
        return [(torch.uint8, steps), (torch.float32, groups), (torch.float32, groups)]

    def shape_of(self, shapes: Sequence[Shape]) -> Shape:
        return (*shapes[1][:-1], shapes[1][-1] * self.group_size)

    def widen(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Steps, scales and minima may be rows or columns of larger matrices: of whole groups."""
        if out.dim() > 2 and not all(part.is_contiguous() for part in parts):
            for number in range(len(out)):  # experts with others' weights between them
                self.widen([part[number] for part in parts], out[number])
            return
        width = self.group_size * self.bits // 8
        if out.dtype in NATIVE_DTYPES and devices.device_of(out).type == "cpu":
            flat = [part.reshape(-1, part.shape[-1]) for part in parts]
            _run(flat, self, out.view(-1, out.shape[-1]))
            return
        steps, target = parts[0].reshape(-1, width), out.view(-1, self.group_size)
        values = out.new_empty(target.shape, dtype=torch.float32)
        if self.bits == 4:
            half = self.group_size // 2
            values[:, :half].copy_(steps & 15)
            values[:, half:].copy_(steps >> 4)
        else:
            values.copy_(steps)
        target.copy_(values.mul_(parts[1].reshape(-1, 1)).add_(parts[2].reshape(-1, 1)))

    def described(self) -> dict[str, Any]:
        return {"bits": self.bits, "group_size": self.group_size}


_USUAL_SIZES = (256, 128, 64, 32, 16, 8, 4, 2)


def check_setting(bits: int, group_size: int) -> Quantised:
    """A setting from what a user gave; ValueError if there is no such setting."""
    if bits not in (4, 8):
        raise ValueError(f"quant_bits must be 4 or 8, not {bits!r}")
    if not isinstance(group_size, int) or group_size < 2 or group_size % 2:
        raise ValueError(f"quant_group_size must be an even number of elements, not {group_size!r}")
    return Quantised(bits, group_size)


def sizes_for(lengths: Iterable[int]) -> list[int]:
    """Sizes of groups, usual ones, that cut rows of at least one of these lengths into groups."""
    return [size for size in _USUAL_SIZES if any(length % size == 0 for length in lengths)]


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
    """Steps (uint8, packed), scales and minima (float32) of a floating-point tensor.

    It is of whole groups; ValueError if it holds infinities or NaN.
    """
    shape = tuple(tensor.shape)
    groups = tensor.reshape(-1, setting.group_size).float()
    low, high = groups.aminmax(dim=1, keepdim=True)
    if not bool(torch.isfinite(low).all() and torch.isfinite(high).all()):
        raise ValueError("infinities and NaN cannot be quantised: keep this weight as it is")
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


def dequantise(parts: Sequence[torch.Tensor], scheme: Scheme, out: torch.Tensor) -> None:
    """Write the tensor that these stand for into `out`; see `Scheme.widen`."""
    scheme.widen(parts, out)


def multiply(
    inputs: torch.Tensor,
    parts: Sequence[torch.Tensor],
    setting: Quantised,
    bias: torch.Tensor | None,
    threads: int = 0,
) -> torch.Tensor:
    """``inputs @ weight.T + bias`` without widening the weight.

    Args:
        inputs: [n, width], float32, bfloat16 or float16, in the memory of the CPU.
        parts: Steps, scales and minima of a matrix [rows, width] of that dtype.
        setting: Theirs.
        bias: [rows], or None.
        threads: How many compute; 0: as many as torch computes with.

    Returns:
        [n, rows], in the dtype of `inputs`: sums in float32, rounded once.
    """
    out = torch.empty(len(inputs), len(parts[0]), dtype=inputs.dtype, device="cpu")
    _run(parts, setting, out, inputs, bias, threads)
    return out


def in_halves(rows: int, setting: Quantised, dtype: torch.dtype) -> bool:
    """Whether this CPU itself multiplies so many rows of inputs with a bfloat16 weight."""
    call = native.ffi.new("nv_packed *", {"inputs": rows, "dtype": NATIVE_DTYPES.get(dtype, -1)})
    call.group_size, call.bits = setting.group_size, setting.bits
    return bool(native.lib.nv_packed_has_tiles(call))


def _run(
    parts: Sequence[torch.Tensor],
    setting: Quantised,
    out: torch.Tensor,
    inputs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    threads: int = 0,
) -> None:
    """Call the shim's loops; they take addresses, so all of it is in the memory of the CPU."""
    steps, scales, minima = (part if part.stride(-1) == 1 else part.contiguous() for part in parts)
    call = native.ffi.new("nv_packed *")
    call.rows, call.groups = scales.shape
    call.steps_stride, call.groups_stride = steps.stride(0), scales.stride(0)
    call.out_stride = out.stride(0)
    call.group_size, call.bits = setting.group_size, setting.bits
    call.dtype = NATIVE_DTYPES[out.dtype]
    memory = {"steps": steps, "scales": scales, "minima": minima, "out": out}
    if inputs is not None:
        call.inputs = len(inputs)
        halves = native.lib.nv_packed_has_tiles(call)
        given = inputs if halves else inputs.float()
        memory["halves" if halves else "input"] = given.contiguous()
    if bias is not None:
        memory["bias"] = bias.float().contiguous()
    for name, tensor in memory.items():
        setattr(call, name, native.ffi.cast("void *", tensor.data_ptr()))
    if native.lib.nv_packed_run(call, threads or torch.get_num_threads()):
        raise MemoryError(f"no memory for {counted(call.inputs, 'row')} of inputs")
