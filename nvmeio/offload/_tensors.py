"""Parameters as local, flat memory; sharded ones (DTensor) by their own shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nvmeio.offload._subgroups import SlotSpan


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor, of which this process has a part."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "device_mesh")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's own memory in this process, without autograd."""
    if not is_sharded(tensor):
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
        parameter.data = tensor


def view(memory: torch.Tensor, span: SlotSpan, base: int = 0) -> torch.Tensor:
    """The tensor that lies at a span of byte memory, `base` bytes in."""
    start = base + span.offset
    if not span.nbytes:
        return torch.empty(span.shape, dtype=span.dtype, device=memory.device)
    return memory[start : start + span.nbytes].view(span.dtype).view(span.shape)


def part(tensor: torch.Tensor, start: int, stop: int, shape: Sequence[int]) -> torch.Tensor:
    """Elements [start, stop) in row-major order; the tensor itself where that is all of it.

    Shares memory where the tensor is contiguous, and else is a copy.
    """
    if tuple(tensor.shape) == tuple(shape) and stop - start == tensor.numel():
        return tensor
    return tensor.reshape(-1)[start:stop]
