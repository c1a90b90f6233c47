"""The formats in which models are published: FP8 with scales, MXFP4, and packed integers.

The elements are those that transformers' `from_pretrained` makes of them on a CPU, bit for bit:
products in float32 and one rounding. On a CPU torch computes them once for each step and scale that
there may be, and native_shim/packed/lookup.c chooses from that table. Those of compressed-tensors
are what `CompressedTensorsConfig(dequantize=True)` gives (0.20, quantization/lifecycle/forward.py).
Source: `Fp8Dequantize` in
transformers/integrations/finegrained_fp8.py, `convert_moe_packed_tensors` in integrations/mxfp4.py
(5.24).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from nvmeio._bindings import packed as native
from nvmeio._formats.model_directory import Quantisation
from nvmeio._formats.safetensors import headers
from nvmeio._formats.safetensors.open_set import SafetensorsSet, StoredTensor
from nvmeio._memory import devices
from nvmeio.errors import IntegrityError
from nvmeio.inference._plan.quantization import NATIVE_DTYPES
from nvmeio.inference._plan.schemes import Scheme, Shape

_STEPS = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, headers.DTYPES.get("F8_E8M0"))
# Ends of a scale's name, in the place of a weight's ".weight" (DeepSeek, Qwen; others).
_SCALE_NAMES = (".weight_scale_inv", ".weight_scale", ".scale", ".qscale_weight")
_BLOCKS, _BLOCK_SCALES = "_blocks", "_scales"
_WORDS = ".weight_packed"
# Bytes of float32 elements that are made at a time: they stay in a core's second-level cache.
_CHUNK_BYTES = 1 << 20
# Elements of a block from which on a table of its 256 elements costs next to nothing.
_LEAST_BLOCK = 2048
_GROUP = 32  # elements of MXFP4 that share a scale
# The 16 values of four bits (E2M1).
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class BlockFp8(NamedTuple):
    """Steps of 8 bits, and a scale for each block of a matrix; of each expert alike.

    An element is its step times the scale of its block. Blocks at the end of rows or columns may be
    smaller.

    Attributes:
        block: Rows and columns of a block.
        steps: The dtype of steps.
        scales: The dtype of scales; a byte is an exponent, of 2 ** (byte - 127).
    """

    block: tuple[int, int]
    steps: torch.dtype
    scales: torch.dtype

    @property
    def multiplies(self) -> bool:
        return False

    def stored(self, shape: Shape) -> list[tuple[torch.dtype, Shape]]:
        if len(shape) < 2:
            raise ValueError(f"FP8 needs a matrix, or several, not a weight of shape {shape}")
        blocks = (-(-size // of) for size, of in zip(shape[-2:], self.block, strict=True))
        return [(self.steps, shape), (self.scales, (*shape[:-2], *blocks))]

    def shape_of(self, shapes: Sequence[Shape]) -> Shape:
        return shapes[0]

    def widen(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        rows, columns = out.shape[-2:]
        steps, scales = (part.reshape(-1, *part.shape[-2:]) for part in parts)
        is_exponent = scales.dtype is torch.uint8
        scales = scales.to(torch.float32)
        if is_exponent:
            scales = (scales - 127.0).exp2()
        matrices = zip(steps, scales, out.view(-1, rows, columns), strict=True)
        for of_matrix, its_scales, target in matrices:
            for own_rows, blocks, height in _runs(rows, self.block[0]):
                for own_columns, across, width in _runs(columns, self.block[1]):
                    own = of_matrix[own_rows, own_columns], its_scales[blocks, across]
                    if _looks_up(out) and height * width >= _LEAST_BLOCK:
                        _look_up_bytes(*own, height, width, target[own_rows, own_columns])
                    else:
                        _multiply(*own, height, width, target[own_rows, own_columns])

    def described(self) -> dict[str, Any]:
        names = {"steps": headers.NAMES[self.steps], "scales": headers.NAMES[self.scales]}
        return {"scheme": "fp8", "block": list(self.block), **names}


def _looks_up(out: torch.Tensor) -> bool:
    """Whether the shim's loops write a tensor."""
    return out.dtype in NATIVE_DTYPES and devices.device_of(out).type == "cpu"


def _multiply(
    steps: torch.Tensor, scales: torch.Tensor, height: int, width: int, out: torch.Tensor
) -> None:
    """Write blocks of equal size, some of their rows at a time."""
    blocks = max(_CHUNK_BYTES // (4 * height * steps.shape[1]), 1)
    for first in range(0, len(scales), blocks):
        chosen = scales[first : first + blocks, None, :, None]
        own = slice(first * height, (first + len(chosen)) * height)
        values = steps[own].to(torch.float32)
        values.view(len(chosen), height, -1, width).mul_(chosen)
        out[own].copy_(values)


def _look_up_bytes(
    steps: torch.Tensor, scales: torch.Tensor, height: int, width: int, out: torch.Tensor
) -> None:
    """Write blocks of equal size from what each byte stands for in each block."""
    every = torch.arange(256, dtype=torch.uint8).view(steps.dtype).to(torch.float32)
    table = (every * scales.unsqueeze(-1)).to(out.dtype).contiguous()
    call = _call(steps, table, out)
    call.groups, call.group_size, call.block_rows = scales.shape[1], width, height
    native.lib.nv_packed_run(call, torch.get_num_threads())


def _call(steps: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> Any:
    """A call of the shim, over memory that is to stay until it was made."""
    call = native.ffi.new("nv_packed *")
    call.rows, call.steps_stride, call.out_stride = len(steps), steps.stride(0), out.stride(0)
    call.dtype = NATIVE_DTYPES[out.dtype]
    for name, tensor in (("steps", steps), ("table", table), ("out", out)):
        setattr(call, name, native.ffi.cast("void *", tensor.data_ptr()))
    return call


def _runs(size: int, block: int) -> Iterator[tuple[slice, slice, int]]:
    """Runs of elements of one dimension, the blocks that they are in, and how long these are.

    Blocks of one run are equally long.
    """
    whole = size // block
    if whole:
        yield slice(0, whole * block), slice(0, whole), block
    if size % block:
        yield slice(whole * block, size), slice(whole, whole + 1), size % block


class Mxfp4(NamedTuple):
    """Elements of 4 bits, two in a byte, and an exponent for each 32 of them; of each expert alike.

    The parts have the transposed matrix, as gpt-oss stores it: [..., columns, rows / 32, 16] of
    bytes and [..., columns, rows / 32] of exponents for a weight [..., rows, columns].
    """

    @property
    def multiplies(self) -> bool:
        return False

    def stored(self, shape: Shape) -> list[tuple[torch.dtype, Shape]]:
        if len(shape) < 2 or shape[-2] % _GROUP:
            raise ValueError(f"MXFP4 needs groups of {_GROUP} along the rows, not shape {shape}")
        groups = (*shape[:-2], shape[-1], shape[-2] // _GROUP)
        return [(torch.uint8, (*groups, _GROUP // 2)), (torch.uint8, groups)]

    def shape_of(self, shapes: Sequence[Shape]) -> Shape:
        *before, columns, groups = shapes[1]
        return (*before, groups * _GROUP, columns)

    def widen(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        rows, columns = out.shape[-2:]
        # The values of each exponent.
        table = out.new_tensor(_VALUES).repeat(256, 1)
        exponent = torch.arange(256, dtype=torch.int32, device=table.device).view(-1, 1) - 127
        torch.ldexp(table, exponent, out=table)
        blocks = parts[0].reshape(-1, columns, rows // 2)
        exponents = parts[1].reshape(-1, columns, rows // _GROUP)
        matrices = zip(blocks, exponents, out.view(-1, rows, columns), strict=True)
        for matrix, its_exponents, target in matrices:
            if _looks_up(out):
                call = _call(matrix, table, target)
                call.groups, call.group_size = rows // _GROUP, _GROUP
                call.groups_stride = its_exponents.stride(0)
                call.exponents = native.ffi.cast("void *", its_exponents.data_ptr())
                native.lib.nv_packed_run(call, torch.get_num_threads())
                continue
            step = max(_CHUNK_BYTES // (4 * rows), 1)
            for first in range(0, columns, step):
                own = slice(first, first + step)
                halves = torch.stack((matrix[own] & 15, matrix[own] >> 4), -1).view(-1, rows)
                by_group = its_exponents[own].int().repeat_interleave(_GROUP, 1)
                values = table.view(-1).take(by_group.long() * len(_VALUES) + halves)
                target[:, own].copy_(values.t())

    def described(self) -> dict[str, Any]:
        return {"scheme": "mxfp4"}


class PackedInts(NamedTuple):
    """Signed integers of 4 or 8 bits in words of 32, and a scale for each group of a row.

    The first element of a word is in its lowest bits, as its distance from the least integer.

    Attributes:
        bits: Bits of an element.
        group_size: Elements of a row that share a scale; 0 for a whole row.
        scales: The dtype of scales; an element is rounded to it first.
    """

    bits: int
    group_size: int
    scales: torch.dtype

    @property
    def multiplies(self) -> bool:
        return False

    def stored(self, shape: Shape) -> list[tuple[torch.dtype, Shape]]:
        width = shape[-1] if shape else 0
        group = self.group_size or width
        if len(shape) < 2 or not width or width % (32 // self.bits) or width % group:
            raise ValueError(
                f"rows of shape {shape} are not whole words and groups of {group}: the checkpoint "
                "is damaged, or packed in another way; save the model unquantised, and pack that"
            )
        words = (*shape[:-1], width * self.bits // 32)
        return [(torch.int32, words), (self.scales, (*shape[:-1], width // group))]

    def shape_of(self, shapes: Sequence[Shape]) -> Shape:
        return (*shapes[0][:-1], shapes[0][-1] * 32 // self.bits)

    def widen(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        width, half = out.shape[-1], 1 << (self.bits - 1)
        target = out.view(-1, *out.shape[-2:])
        words = parts[0].reshape(-1, *parts[0].shape[-2:])
        scales = parts[1].reshape(-1, *parts[1].shape[-2:])
        step = max(_CHUNK_BYTES // (4 * width), 1)
        for matrix, its_scales, rows in zip(words, scales, target, strict=True):
            for first in range(0, len(rows), step):
                own = slice(first, first + step)
                fields = matrix[own].contiguous().view(torch.uint8)
                if self.bits == 4:
                    fields = torch.stack((fields & 15, fields >> 4), -1)
                values = fields.view(-1, its_scales.shape[1], width // its_scales.shape[1]).float()
                values.sub_(half).mul_(its_scales[own].float().unsqueeze(-1))
                rows[own].copy_(values.to(self.scales).view(-1, width))

    def described(self) -> dict[str, Any]:
        about = {"bits": self.bits, "group": self.group_size}
        return {"scheme": "int", **about, "scales": headers.NAMES[self.scales]}


def described_as(entry: Mapping[str, Any]) -> Scheme:
    """The scheme of an entry in the index of a packed file; ValueError if it is not known."""
    if entry["scheme"] == "mxfp4":
        return Mxfp4()
    if entry["scheme"] == "int":
        ints = PackedInts(entry["bits"], entry["group"], headers.DTYPES[entry["scales"]])
        floats = ints.scales.is_floating_point and ints.scales.itemsize > 1
        if ints.bits not in (4, 8) or type(ints.group_size) is not int or ints.group_size < 0:
            raise ValueError(f"integers must have 4 or 8 bits and groups, not {ints}")
        if not floats:
            raise ValueError(f"scales of integers must be floating-point, not {ints.scales}")
        return ints
    if entry["scheme"] != "fp8":
        raise ValueError(f"a scheme must be 'fp8', 'mxfp4' or 'int', not {entry['scheme']!r}")
    rows, columns = (int(size) for size in entry["block"])
    steps, scales = headers.DTYPES[entry["steps"]], headers.DTYPES[entry["scales"]]
    if min(rows, columns) < 1 or steps not in _STEPS or scales not in _SCALES:
        found = f"{rows} x {columns}, {steps}, {scales}"
        raise ValueError(f"FP8 must have blocks and dtypes of its own, not {found}")
    return BlockFp8((rows, columns), steps, scales)


# In a checkpoint


class HeldWeight(NamedTuple):
    """A weight of a checkpoint: its name, the tensors that hold it, and how.

    Without a scheme it is one tensor.
    """

    name: str
    tensors: tuple[StoredTensor, ...]
    scheme: Scheme | None


def weights_in(checkpoint: SafetensorsSet, named: Quantisation | None) -> dict[str, HeldWeight]:
    """The weights of a checkpoint by name; tensors that are parts of one are not by themselves.

    Args:
        checkpoint: Its names and dtypes show what holds a weight of few bits.
        named: The quantisation in its configuration, if any; with a method that is not read, each
            tensor is by itself.

    Raises:
        IntegrityError: Steps and scales do not fit each other.
    """
    stored = checkpoint.tensors
    if named is not None and not named.is_read:
        return {name: HeldWeight(name, (tensor,), None) for name, tensor in stored.items()}
    block = None if named is None else named.block
    held: dict[str, HeldWeight] = {}
    parts: set[str] = set()
    for name, tensor in stored.items():
        dtype = headers.DTYPES.get(tensor.entry.dtype)
        if dtype in _STEPS:
            stem = name.removesuffix(".weight")
            ends = _SCALE_NAMES if stem != name else ("_scale_inv",)
            scale = next((stored[stem + end] for end in ends if stem + end in stored), None)
            if scale is not None:
                held[name] = _in_fp8(tensor, scale, block, checkpoint)
                # Inputs are not quantised where weights are widened.
                parts |= {scale.name, f"{stem}.activation_scale", f"{stem}.input_scale"}
        elif name.endswith(_WORDS) and dtype is torch.int32:
            stem = name.removesuffix(_WORDS)
            scale = stored.get(f"{stem}.weight_scale")
            if scale is not None and named is not None:
                held[f"{stem}.weight"] = _in_ints(
                    f"{stem}.weight", tensor, scale, named, checkpoint
                )
                parts |= {name, scale.name, f"{stem}.weight_shape"}
        elif name.endswith(_BLOCKS) and dtype is torch.uint8:
            stem = name.removesuffix(_BLOCKS)
            scale = stored.get(stem + _BLOCK_SCALES)
            if scale is not None:
                held[stem] = _in_mxfp4(stem, tensor, scale, checkpoint)
                parts |= {name, scale.name}
    whole = {
        name: HeldWeight(name, (tensor,), None)
        for name, tensor in stored.items()
        if name not in parts and name not in held
    }
    return whole | held


def _in_fp8(
    steps: StoredTensor,
    scale: StoredTensor,
    block: tuple[int, int] | None,
    checkpoint: SafetensorsSet,
) -> HeldWeight:
    """A weight in FP8.

    The blocks are those of transformers: what the number of scales divides the matrix into. Where
    it does not divide it, transformers refuses; the blocks are those of the configuration then.
    """
    if scale.entry.shape in ((), (1,)):  # one for the tensor
        scale = scale._replace(entry=scale.entry._replace(shape=(1,) * len(steps.entry.shape)))
    shape, scales = steps.entry.shape, scale.entry.shape
    of_steps, of_scales = (headers.DTYPES.get(part.entry.dtype) for part in (steps, scale))
    are_known = of_steps in _STEPS and of_scales in _SCALES
    if of_steps and of_scales and are_known and len(shape) == 2 == len(scales) and min(scales) > 0:
        if shape[0] % scales[0] or shape[1] % scales[1]:
            block = block or (128, 128)
        else:
            block = shape[0] // scales[0], shape[1] // scales[1]
        scheme = BlockFp8(block, of_steps, of_scales)
        if scheme.stored(shape)[1][1] == scales:
            return HeldWeight(steps.name, (steps, scale), scheme)
    raise _unfit(steps, scale, checkpoint, "of a matrix, with a scale for each block")


def _in_mxfp4(
    name: str, blocks: StoredTensor, scale: StoredTensor, checkpoint: SafetensorsSet
) -> HeldWeight:
    shape, scales = blocks.entry.shape, scale.entry.shape
    fits = len(shape) == 4 and shape[:3] == scales and shape[3] == _GROUP // 2
    if not fits or headers.DTYPES.get(scale.entry.dtype) is not torch.uint8:
        raise _unfit(blocks, scale, checkpoint, "[experts, rows, groups, 16] bytes and exponents")
    return HeldWeight(name, (blocks, scale), Mxfp4())


def _in_ints(
    name: str,
    words: StoredTensor,
    scale: StoredTensor,
    named: Quantisation,
    checkpoint: SafetensorsSet,
) -> HeldWeight:
    """A weight of integers; of how many bits, and in which groups, the sizes of its parts tell."""
    shape, scales = words.entry.shape, scale.entry.shape
    dtype = headers.DTYPES.get(scale.entry.dtype)
    if dtype in (torch.float32, torch.bfloat16, torch.float16) and len(shape) == len(scales) == 2:
        for bits, group in named.integers:
            width = shape[1] * 32 // bits
            if scales == (shape[0], width // (group or width)):
                scheme = PackedInts(bits, group, dtype)
                try:
                    fits = scheme.stored((shape[0], width)) == [
                        (torch.int32, shape),
                        (dtype, scales),
                    ]
                except ValueError:
                    continue
                if fits:
                    return HeldWeight(name, (words, scale), scheme)
    raise _unfit(
        words, scale, checkpoint, "words of integers, and a scale for each of their groups"
    )


def _unfit(
    steps: StoredTensor, scale: StoredTensor, checkpoint: SafetensorsSet, wanted: str
) -> IntegrityError:
    found = [(each.entry.dtype, each.entry.shape) for each in (steps, scale)]
    return IntegrityError(
        f"{steps.name!r} in {checkpoint.files[steps.file].path} is {found[0][0]} {found[0][1]} and "
        f"{scale.name!r} {found[1][0]} {found[1][1]}: they are not {wanted}. Download the model "
        "again, or use the checkpoint that it was made from",
        expected=wanted,
        found=found,
    )


def check_fused(
    weights: Sequence[HeldWeight], in_rows: bool, name: str, checkpoint: SafetensorsSet
) -> None:
    """Raise IntegrityError if weights cannot become one by putting parts with parts.

    `in_rows`: the rows of one follow those of another in a matrix, and so do their blocks.
    """
    schemes = {weight.scheme for weight in weights}
    scheme = weights[0].scheme
    fits = len(schemes) == 1 and (scheme is None or isinstance(scheme, (BlockFp8, PackedInts)))
    if fits and in_rows and isinstance(scheme, BlockFp8):
        fits = all(weight.tensors[0].entry.shape[0] % scheme.block[0] == 0 for weight in weights)
    if not fits:
        stored = weights[0].tensors[0]
        ways = sorted({"one tensor" if each is None else repr(each) for each in schemes})
        raise IntegrityError(
            f"{name!r} cannot be put together from {stored.name!r} and others in "
            f"{checkpoint.files[stored.file].path}: they are not held in one way, in whole blocks "
            f"of rows, but as {' and '.join(ways)}. Use the checkpoint that it was made from",
            expected="one scheme, in whole blocks of rows",
            found=ways,
        )
