"""Parameters as local, flat memory; sharded ones (DTensor) by their own shard.

Tensors in files and buffers have no gaps, and the order that torch gives a tensor's likes: that of
the tensor itself (channels_last, transposed). Torch's fused kernels on the CPU take the memory of
weights, gradient and state element by element, whatever the strides; others round bf16 differently
where the orders differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from nvmeio._memory import devices
from nvmeio.offload._swap_files.subgroups import SlotSpan

_WORDS_AT_ONCE = 128 << 10
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor, of which this process has a part."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "device_mesh")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's own memory in this process, without autograd."""
    if type(tensor) in _PLAIN_TYPES or not is_sharded(tensor):
        return tensor.detach()
    sharded: Any = tensor
    shard: torch.Tensor = sharded.to_local().detach()  # not within no_grad: see `calls`
    return shard


def like(parameter: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """A local tensor as a tensor that is sharded as the parameter is."""
    if not is_sharded(parameter):
        return shard
    from torch.distributed.tensor import DTensor

    whole: Any = parameter
    return DTensor.from_local(
        shard,
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def sharded_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether this process has the same part of both, or all of both."""
    if not is_sharded(one) or not is_sharded(other):
        return is_sharded(one) == is_sharded(other)
    first: Any = one
    second: Any = other
    same_ranks: bool = first.device_mesh == second.device_mesh
    return same_ranks and tuple(first.placements) == tuple(second.placements)


def lay(parameter: torch.Tensor, tensor: torch.Tensor) -> None:
    """Let a parameter, or this process's part of it, be another tensor of the same shape."""
    if is_sharded(parameter):
        sharded: Any = parameter
        sharded._local_tensor = tensor  # as FSDP itself changes it
    else:
        torch.Tensor.data.__set__(parameter, tensor)  # type: ignore[attr-defined]


def view(memory: torch.Tensor, span: SlotSpan, base: int = 0) -> torch.Tensor:
    """The tensor that lies at a span of byte memory, `base` bytes in."""
    start = base + span.offset
    if not span.nbytes:
        return torch.empty(span.shape, dtype=span.dtype, device=memory.device)
    flat = memory[start : start + span.nbytes].view(span.dtype)
    return flat.as_strided(span.shape, span.strides) if span.strides else flat.view(span.shape)


def strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides that torch gives a tensor like this one, without gaps; () for row-major order."""
    if tensor.is_contiguous():
        return ()
    like = torch.empty_like(tensor, device="meta")
    return () if like.is_contiguous() else tuple(like.stride())


def own_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides that autograd gives a parameter's gradient: its own, but () if it has gaps.

    Row-major order is () too.
    """
    strides = strides_of(tensor)
    return strides if strides == tensor.stride() else ()


def fits(strides: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether elements of a shape with these strides fill memory, each with a place of its own."""
    if not strides:
        return True
    reach = 1
    for step, size in sorted(zip(strides, shape, strict=False)):
        if size != 1 and step != reach:
            return False
        reach *= size
    return len(strides) == len(shape)


def laid(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """A tensor with these strides, () for row-major order: itself, or a copy without gaps."""
    if not strides:
        return tensor.contiguous()
    lies = zip(tensor.stride(), strides, tensor.shape, strict=True)
    if all(step == wanted or size == 1 for step, wanted, size in lies):
        return tensor
    copied = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return copied.copy_(tensor)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor without gaps, as they lie."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def part(tensor: torch.Tensor, start: int, stop: int, shape: Sequence[int]) -> torch.Tensor:
    """Elements [start, stop) in row-major order; the tensor itself where that is all of it.

    Shares memory where the tensor is contiguous, and else is a copy.
    """
    if tuple(tensor.shape) == tuple(shape) and stop - start == tensor.numel():
        return tensor
    return tensor.reshape(-1)[start:stop]


def is_positive_zero(tensor: torch.Tensor) -> bool:
    """Whether all bits of a tensor in host memory, without gaps, are 0.

    It looks at few of them where they are not. Words of 8 bytes: torch looks at them seven times
    as fast as at those of 4.
    """
    if not tensor.numel() or bool(flat(tensor)[0]):
        return False
    raw = flat(tensor).view(torch.uint8)
    head = min(-raw.storage_offset() % 8, raw.numel())
    tail = head + (raw.numel() - head) // 8 * 8
    if bool(raw[:head].any()) or bool(raw[tail:].any()):
        return False
    words = raw[head:tail].view(torch.int64)
    each = range(0, words.numel(), _WORDS_AT_ONCE)
    return not any(bool(words[at : at + _WORDS_AT_ONCE].any()) for at in each)


# Stand-ins for parameters that are on the drive and not in memory

_MARK = 1  # where the element of a shape of one lies in its storage: strides do not tell of it


def absent(span: SlotSpan, device: torch.device) -> torch.Tensor:
    """A stand-in for a parameter that is on the drive: of its shape, NaN where the dtype has it.

    It takes one element of memory. Torch refuses to write to it, since its elements share memory.
    """
    mark = _MARK if math.prod(span.shape) == 1 else 0
    value = torch.full((1 + mark,), nothing(span.dtype), dtype=span.dtype, device="cpu")
    there = value if device.type == "cpu" else devices.moved(value, device)
    return there[mark].expand(span.shape)


def is_absent(parameter: torch.Tensor) -> bool:
    """Whether a parameter is such a stand-in."""
    if parameter.is_meta or not parameter.numel():
        return False
    if parameter.numel() > 1:
        return not any(parameter.stride())
    nbytes = (1 + _MARK) * parameter.element_size()
    if parameter.storage_offset() != _MARK or parameter.untyped_storage().nbytes() != nbytes:
        return False
    return is_nothing(parameter)  # torch does let one be written to


def is_nothing(tensor: torch.Tensor) -> bool:
    """Whether every element is what an absent one reads as."""
    value = tensor.detach()
    if not nothing(tensor.dtype):
        return not bool(value.any())
    return bool((value.float() if value.element_size() == 1 else value).isnan().all())


def nothing(dtype: torch.dtype) -> float:
    """The value of an element that has none: NaN, or 0 where the dtype has no NaN."""
    return float("nan") if dtype.is_floating_point or dtype.is_complex else 0
