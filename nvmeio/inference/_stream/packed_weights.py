"""Weights that are computed with while they are packed: a parameter, and products with it.

The parameter has the shape and dtype of the weight. Linear layers, those of GPT-2, embeddings and
fused experts compute with its steps, scales and minima; whatever else looks at its elements gets a
widened copy.

A product with few rows is made by the shim's loops, on CUDA by torch's kernel for 4 bits if it has
one. For many rows a part of the weight is widened at a time, into memory that stays in the cache
(on CUDA the whole), and multiplied by torch. From how many rows on that is faster is measured once,
for each kind of weight and class of sizes, and remembered; where a CPU's tile registers make the
product, it never is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from nvmeio import _torch_private
from nvmeio._memory import devices
from nvmeio._torch_private import DisableTorchFunctionSubclass, make_subclass
from nvmeio.inference._plan.quantization import Compute, Quantised, dequantise, in_halves, multiply
from nvmeio.inference._plan.schemes import Scheme
from nvmeio.inference._plan.slot_layout import Weight
from nvmeio.inference._stream.stand_ins import Frozen, FrozenElsewhere, Shown

# Bytes of a widened part: it (nearly) stays in a core's second-level cache, and suffices for a
# product.
PART_BYTES = 4 << 20
_FIRST_TRIAL = 8  # rows from which on the other way may be faster, where the CPU has fast loops
TRIALS = 5  # of each way, by turns; the least counts
_MOST_OFF = 0.05  # of the largest output: two ways are that far apart where one of them is wrong


Way = Callable[[torch.Tensor, "Packed", "torch.Tensor | None"], torch.Tensor]


class Packed(NamedTuple):
    """A weight in its parts (of ours: steps, scales and minima), or some rows of it, or an expert.

    `parts` are over memory that comes and goes. A `turned` one is the transposed matrix, of each
    expert.
    """

    parts: tuple[torch.Tensor, ...]
    scheme: Scheme
    dtype: torch.dtype
    compute: Compute
    turned: bool = False

    @classmethod
    def of(cls, weight: Weight, parts: Sequence[torch.Tensor]) -> Packed:
        """A weight of a unit whose parts, or some rows of them, are these."""
        assert weight.quantised is not None
        return cls(tuple(parts), weight.quantised, weight.dtype, weight.compute or "widened")

    def at(self, index: Any) -> Packed:
        return self._replace(parts=tuple(part[index] for part in self.parts))

    @property
    def setting(self) -> Quantised:
        """The scheme, of a weight that is multiplied as it is."""
        assert isinstance(self.scheme, Quantised)
        return self.scheme

    @property
    def lies_in_rows(self) -> bool:
        """Whether some rows of each part are those rows of the weight."""
        return len({part.shape[0] for part in self.parts}) == 1

    def transposed(self) -> Packed:
        """The transposed matrix, of each expert."""
        return self._replace(turned=not self.turned)

    def widened(self) -> torch.Tensor:
        """Its elements, in memory of their own."""
        shape = self.scheme.shape_of([part.shape for part in self.parts])
        found = self.parts[0].new_empty(shape, dtype=self.dtype)
        if found.numel():
            dequantise(self.parts, self.scheme, found)
        return found.mT if self.turned else found

    def shown_as(self, parameter: nn.Parameter) -> nn.Parameter:
        """A parameter like another one, that is this weight."""
        return PackedParameter.over(parameter, self)

    def product(self, inputs: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``inputs @ weight.T + bias``, of one matrix; differentiable in inputs and bias."""
        flat = inputs.reshape(-1, inputs.shape[-1])
        made: torch.Tensor
        if _saves_for_backward(inputs, bias):
            made = _Product.apply(flat, bias, self._replace(parts=()), *self.parts)  # type: ignore[no-untyped-call]
        else:
            made = _multiplied(flat, self, bias)
        return made.view((*inputs.shape[:-1], made.shape[-1]))


class PackedParameter(FrozenElsewhere):
    """A packed weight, while it is in memory."""

    is_here = True
    packed: Packed
    empty: Any  # its stand-in while it is not

    @classmethod
    def over(cls, empty: Any, packed: Packed) -> nn.Parameter:
        """A packed weight, of the shape of what stands for it."""
        with DisableTorchFunctionSubclass():
            shape = empty.detach().as_subclass(torch.Tensor)
            if packed.turned:
                shape = shape.transpose(-2, -1)
            made: PackedParameter = make_subclass(cls, shape, empty.requires_grad)
        made.__dict__.update(empty.__dict__)
        made.empty, made.packed = empty, packed
        made.on_device = devices.device_of(packed.parts[0])
        return made

    def now(self) -> torch.Tensor:
        return self.packed.widened()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        turns = func == _MT or (func == _T and args[0].dim() == 2)
        special = _transpose if turns else _SPECIAL.get(getattr(func, "__name__", ""))
        if special is not None:
            with DisableTorchFunctionSubclass():
                found = special(*args, **kwargs)
            if found is not NotImplemented:
                return found
        return super().__torch_function__(func, types, args, kwargs)


class _Product(torch.autograd.Function):
    """A product whose weight is found again at its place by then, by its caller (`saved`)."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, bias: torch.Tensor | None, what: Packed, *parts: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(*parts)
        ctx.what = what
        return _multiplied(inputs, what._replace(parts=parts), bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        what: Packed = ctx.what
        turned = what._replace(parts=ctx.saved_tensors, turned=not what.turned)
        of_inputs, of_bias, *_ = ctx.needs_input_grad
        return (
            _multiplied(grad, turned, None) if of_inputs else None,
            grad.sum(0) if of_bias else None,
            *[None] * (1 + len(turned.parts)),
        )


# --- what modules do with a weight: a product, or NotImplemented, and then it is widened ---------


def _saves_for_backward(inputs: torch.Tensor, bias: torch.Tensor | None) -> bool:
    wanted = inputs.requires_grad or (bias is not None and bias.requires_grad)
    return torch.is_grad_enabled() and wanted


def _fits(inputs: Any, weight: Any, bias: Any = None) -> bool:
    """Whether it is a plain product, as torch would make it."""
    return (
        isinstance(weight, PackedParameter)
        and type(inputs) in (torch.Tensor, nn.Parameter)
        and type(bias) in (torch.Tensor, nn.Parameter, Shown, Frozen, type(None))
        and inputs.dtype is weight.packed.dtype
        and (bias is None or bias.dtype is inputs.dtype)
        and inputs.dim() > 0
        and weight.dim() == 2
        and inputs.numel() > 0
        # Torch makes the requested product with a widened matrix, unless autograd keeps its inputs:
        # that would keep the matrix.
        and (weight.packed.scheme.multiplies or _saves_for_backward(inputs, bias))
        and not torch.is_autocast_enabled(weight.on_device.type)
    )


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    if not _fits(input, weight, bias) or input.shape[-1] != weight.shape[1]:
        return NotImplemented
    if bias is not None and bias.shape != weight.shape[:1]:
        return NotImplemented
    return weight.packed.product(input, bias)


def _matmul(input: Any, other: Any = None, *, mat2: Any = None) -> Any:
    other = mat2 if other is None else other
    if not _fits(input, other) or input.shape[-1] != other.shape[0]:
        return NotImplemented
    return other.packed.transposed().product(input, None)


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    plain = _fits(mat1, mat2, input) and mat1.dim() == 2 and beta == alpha == 1
    if not plain or mat1.shape[1] != mat2.shape[0] or input.shape != mat2.shape[1:]:
        return NotImplemented
    return mat2.packed.transposed().product(mat1, input)


def _embedding(input: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
    """An embedding's rows, widened; all of it with `max_norm`, which changes the weight."""
    given = dict(zip(("padding_idx", "max_norm"), args, strict=False)) | kwargs
    if not isinstance(weight, PackedParameter) or given.get("max_norm") is not None:
        return NotImplemented
    if weight.packed.turned or weight.dim() != 2 or type(input) is not torch.Tensor:
        return NotImplemented
    if not weight.packed.lies_in_rows:
        return NotImplemented
    if input.numel() and not 0 <= int(input.min()) <= int(input.max()) < len(weight):
        raise IndexError(f"index out of range: the embedding has {len(weight)} rows")
    return weight.packed.at(input.reshape(-1)).widened().view(*input.shape, -1)


def _getitem(weight: Any, index: Any) -> Any:
    """One expert, or some rows."""
    if not isinstance(weight, PackedParameter) or (weight.packed.turned and weight.dim() == 2):
        return NotImplemented
    if weight.dim() == 2 and not weight.packed.lies_in_rows:
        return NotImplemented
    chosen = index
    if isinstance(index, torch.Tensor) and index.dtype is not torch.bool and index.dim() < 2:
        chosen = index if index.dim() else int(index)
    elif not isinstance(index, (int, slice)) or isinstance(index, bool):
        return NotImplemented
    packed = weight.packed.at(chosen)
    if isinstance(chosen, torch.Tensor) or packed.parts[0].dim() < 2:
        return packed.widened()
    stands: Any = weight.empty.detach().as_subclass(torch.Tensor)[chosen]
    return _like(weight, stands, packed)


def _like(weight: Any, stands: torch.Tensor, packed: Packed) -> Any:
    """A parameter that is a part of another one, or the same in another order."""
    empty = FrozenElsewhere(stands, weight.requires_grad)
    empty.source = weight.source
    return PackedParameter.over(empty, packed)


def _transpose(weight: Any, *dims: int, dim0: int = -2, dim1: int = -1) -> Any:
    if not isinstance(weight, PackedParameter) or weight.dim() < 2:
        return NotImplemented
    if {d % weight.dim() for d in dims or (dim0, dim1)} != {weight.dim() - 2, weight.dim() - 1}:
        return NotImplemented
    stands: Any = weight.empty.detach().as_subclass(torch.Tensor)
    return _like(weight, stands, weight.packed.transposed())


def _grouped(input: Any, mat_b: Any, *, offs: Any = None, bias: Any = None, **rest: Any) -> Any:
    """Each expert's rows, one expert behind the other."""
    whole = isinstance(mat_b, PackedParameter) and mat_b.dim() == 3 and input.dim() == 2
    if not whole or offs is None or bias is not None or any(v is not None for v in rest.values()):
        return NotImplemented
    if input.dtype is not mat_b.dtype or torch.is_autocast_enabled(mat_b.on_device.type):
        return NotImplemented
    turned, made, start = mat_b.packed.transposed(), [], 0
    for expert, end in enumerate(offs.tolist()):
        if end > start:
            made.append(turned.at(expert).product(input[start:end], None))
        start = max(start, end)
    made.append(input.new_zeros(len(input) - start, mat_b.shape[-1]))
    return torch.cat(made)


_T, _MT = torch.Tensor.T.__get__, torch.Tensor.mT.__get__  # type: ignore[attr-defined]
_SPECIAL: dict[str, Callable[..., Any]] = {
    "linear": _linear,
    **dict.fromkeys(("matmul", "__matmul__", "mm"), _matmul),
    "addmm": _addmm,
    "embedding": _embedding,
    "__getitem__": _getitem,
    "transpose": _transpose,
    "t": lambda weight: _transpose(weight) if weight.dim() == 2 else NotImplemented,
    **dict.fromkeys(("grouped_mm", "_grouped_mm", "grouped_mm_fallback"), _grouped),
    "detach": lambda weight: weight,
}


# --- products ------------------------------------------------------------------------------------


def _multiplied(inputs: torch.Tensor, what: Packed, bias: torch.Tensor | None) -> torch.Tensor:
    """``inputs @ weight.T + bias``; [n, width] to [n, rows]."""
    if not what.scheme.multiplies:
        return _whole(inputs, what, bias)
    if devices.device_of(what.parts[0]).type != "cpu":
        if not _has_kernel(what):
            return _whole(inputs, what, bias)
        return CHOICES.made((_by_kernel, _whole), inputs, what, bias)
    if what.turned:
        return _in_parts(inputs, what, bias)
    rows = len(inputs)
    if what.compute == "packed" or rows < _FIRST_TRIAL or in_halves(rows, what.setting, what.dtype):
        return _by_loops(inputs, what, bias)
    return CHOICES.made((_by_loops, _in_parts), inputs, what, bias)


def _by_loops(inputs: torch.Tensor, what: Packed, bias: torch.Tensor | None) -> torch.Tensor:
    return multiply(inputs, what.parts, what.setting, bias)


def _whole(inputs: torch.Tensor, what: Packed, bias: torch.Tensor | None) -> torch.Tensor:
    return functional.linear(inputs, what.widened(), bias)


def _has_kernel(what: Packed) -> bool:
    """Whether torch's product with 4 bits on CUDA takes a weight; of 8 it takes one scale a row."""
    rows, groups = what.parts[1].shape
    bits, size = what.setting
    fits = bits == 4 and size in (32, 64, 128, 256) and not rows % 8 and not groups * size % 128
    return fits and what.dtype is torch.bfloat16 and not what.turned


def _by_kernel(inputs: torch.Tensor, what: Packed, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply with torch's kernel, whose layout the steps are put into each time.

    An element is (step - 8) * scale + zero, with scales and zeros in bfloat16. Source:
    aten/src/ATen/native/cuda/int4mm.cu.
    """
    steps, scales, minima = what.parts
    rows, groups = scales.shape
    halves = steps.reshape(rows, groups, -1)
    row = torch.cat((halves & 15, halves >> 4), -1).view(rows, -1)
    tiles = _torch_private.pack_int4(row[:, ::2] << 4 | row[:, 1::2], 8)
    pairs = torch.stack((scales, minima + 8 * scales), -1).transpose(0, 1).to(what.dtype)
    size = what.setting.group_size
    made: torch.Tensor = _torch_private.int4_product(
        inputs.contiguous(), tiles, size, pairs.contiguous()
    )
    return made if bias is None else made + bias


def _in_parts(inputs: torch.Tensor, what: Packed, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply with torch in parts: rows of the weight, or columns of the transposed."""
    (rows, groups), size = what.parts[1].shape, what.setting.group_size
    count, unit, other = (groups, size, rows) if what.turned else (rows, 1, groups * size)
    step = PART_BYTES // (unit * other * inputs.dtype.itemsize)
    step = max(step, 64 // min(unit, 64)) if what.turned else _rows_of_a_part(inputs)
    out = inputs.new_empty(len(inputs), count * unit)
    memory = inputs.new_empty(min(step, count) * unit * other)
    for first in range(0, count, step):
        last = min(first + step, count)
        if what.turned:
            by_group = (part.view(rows, groups, -1) for part in what.parts)
            cut = [part[:, first:last].flatten(1) for part in by_group]
        else:
            cut = [part[first:last] for part in what.parts]
        room = memory[: (last - first) * unit * other].view(len(cut[0]), -1)
        dequantise(cut, what.setting, room)
        own = slice(first * unit, last * unit)
        matrix = room.t() if what.turned else room
        out[:, own] = functional.linear(inputs, matrix, None if bias is None else bias[own])
    return out


def _rows_of_a_part(inputs: torch.Tensor) -> int:
    return max(PART_BYTES // (inputs.shape[1] * inputs.dtype.itemsize) // 64 * 64, 64)


class Choices:
    """Which way was faster, by kind of weight, class of its size, and number of rows.

    It is settled before the first product is given: in a process, a product has the same bits.
    """

    def __init__(self) -> None:
        self._rows: dict[Any, int] = {}  # most for which the packed way was, fewest for which not
        self._lock = threading.Lock()

    def made(
        self, ways: tuple[Way, Way], inputs: torch.Tensor, what: Packed, bias: Any
    ) -> torch.Tensor:
        """A product by the faster of two ways: with the weight packed, or widened."""
        rows = len(inputs)
        sizes = what.parts[0].shape[0].bit_length(), inputs.shape[1].bit_length()
        device = devices.device_of(what.parts[0])
        kind = (what.setting, what.dtype, sizes, device, torch.get_num_threads())
        with self._lock:
            is_packed = rows <= self._rows.get((kind, True), 0)
            if not is_packed and rows < self._rows.get((kind, False), rows + 1):
                is_packed = _is_faster(ways, device, inputs, what, bias)
                self._rows[kind, is_packed] = rows
        return ways[not is_packed](inputs, what, bias)


def _is_faster(
    ways: tuple[Way, Way], device: torch.device, inputs: torch.Tensor, what: Packed, bias: Any
) -> bool:
    """Whether the first of two ways is faster, and a product at all; both leave nothing behind.

    On a CPU a part of the weight is enough, and the CPU time of this thread counts: a clock also
    counts what other programs take. The loops give this thread the rows of threads that come late,
    so they are to do just its share.
    """
    clock = time.perf_counter
    if device.type == "cpu":
        clock, bias = time.thread_time, None
        what = what.at(slice(_rows_of_a_part(inputs)))
        share = what.at(slice(-(-len(what.parts[0]) // torch.get_num_threads())))
        ways = (lambda x, *_: multiply(x, share.parts, share.setting, None, threads=1), ways[1])
    times = [float("inf"), float("inf")]
    outputs = [inputs, inputs]
    for _ in range(TRIALS):
        for number, way in enumerate(ways):
            began = clock()
            try:
                outputs[number] = way(inputs, what, bias)
            except RuntimeError:  # a device that has no such kernel
                if number:
                    raise
                return False
            devices.synchronize(device)
            times[number] = min(times[number], clock() - began)
    wanted = outputs[1][:, : outputs[0].shape[1]]
    off = (outputs[0] - wanted).abs().max()
    return times[0] <= times[1] and bool(off <= _MOST_OFF * wanted.abs().max())


CHOICES = Choices()
