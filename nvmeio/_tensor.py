"""Tensors as memory: address and length of what a transfer moves, and what must happen after.

The common case, a contiguous CPU tensor, costs nothing: its own memory is read and written.
Everything else (non-contiguous, lazily conjugated, another device) goes through a contiguous CPU
copy of itself, made before a write and copied back after a read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_CPU = torch.device("cpu")


class Memory(NamedTuple):
    """A transfer's memory.

    Attributes:
        address: First byte.
        nbytes: Length in bytes.
        keep: What must stay alive until the kernel is done.
        copy_back: For a read through a copy: moves the bytes on into the tensor; else None.
    """

    address: int
    nbytes: int
    keep: Any
    copy_back: Callable[[], None] | None


def source(tensor: torch.Tensor) -> Memory:
    """The memory to write to a file: the tensor's own where that is contiguous, else a copy.

    Raises:
        TypeError: Not a tensor, or one without plain memory (sparse, meta, a wrapper subclass).
    """
    if not _is_plain(tensor):
        _check(tensor)
        tensor = _copyable(tensor.detach()).resolve_conj().resolve_neg().contiguous().cpu()
    return Memory(tensor.data_ptr(), _nbytes(tensor), tensor, None)


def destination(tensor: torch.Tensor) -> Memory:
    """The memory to read into, with autograd's rules for an in-place change (`Tensor.copy_`).

    Raises:
        TypeError: Not a tensor, or one without plain memory.
        RuntimeError: As `copy_` would: a leaf that requires grad outside `torch.no_grad`, an
            inference tensor outside `torch.inference_mode`.
    """
    if _is_plain(tensor) and not tensor.requires_grad and not tensor.is_inference():
        return Memory(tensor.data_ptr(), _nbytes(tensor), tensor, None)
    _check(tensor)
    grad = torch.is_grad_enabled()
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            "cannot read into an inference tensor outside torch.inference_mode(): "
            "enter the mode, or read into tensor.clone()"
        )
    if tensor.requires_grad and grad and tensor.is_leaf:
        raise RuntimeError(
            "cannot read into a leaf tensor that requires grad: "
            "wrap the call in torch.no_grad(), or read into tensor.detach()"
        )
    if _is_plain(tensor) and (tensor.is_inference() or not grad):
        return Memory(tensor.data_ptr(), _nbytes(tensor), tensor, None)
    inference = tensor.is_inference()
    target = tensor if tensor.requires_grad else _copyable(tensor)
    staging = torch.empty_like(target.detach(), device=_CPU, memory_format=torch.contiguous_format)
    staging = staging.resolve_conj().resolve_neg()

    def copy_back() -> None:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            target.copy_(staging)

    return Memory(staging.data_ptr(), _nbytes(staging), (tensor, staging), copy_back)


def cast_to_byte_tensor(
    tensor: torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor, ...],
) -> Any:
    """Zero-copy aliases as bytes.

    Args:
        tensor: A contiguous tensor of any shape and dtype, on CPU or CUDA; or a list of them.

    Returns:
        A 1-D uint8 tensor of `tensor.nbytes` elements that shares the memory; for a list, a list.

    Raises:
        ValueError: A tensor is not contiguous (or lazily conjugated), so no alias can exist.
        TypeError: Not a tensor, or one without plain memory.

    Cost: no copy, no allocation of data.
    """
    if isinstance(tensor, (list, tuple)):
        return [cast_to_byte_tensor(each) for each in tensor]
    _check(tensor)
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not "
            "contiguous and has no byte alias; call .contiguous() first, which copies"
        )
    start = tensor.storage_offset() * tensor.element_size()
    alias = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return alias.set_(tensor.untyped_storage(), start, (_nbytes(tensor),), (1,))


def touch(tensor: torch.Tensor) -> None:
    """Tell autograd that the tensor was changed in place, as `copy_` does.

    A backward pass that had saved the tensor then raises instead of computing with other bytes.
    """
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in _PLAIN_TYPES
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _copyable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, as bytes where its elements are bytes: torch cannot copy int1 to uint7."""
    if tensor.element_size() > 1 or tensor.is_quantized:
        return tensor
    return tensor.view(torch.uint8)


def _nbytes(tensor: torch.Tensor) -> int:
    nbytes: int = tensor.nbytes
    if tensor.is_quantized:  # quint4x2 and quint2x4 pack several elements into a byte
        start = tensor.storage_offset() * tensor.element_size()
        nbytes = min(nbytes, int(tensor.untyped_storage().nbytes()) - int(start))
    return nbytes


def _check(tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"expected a torch.Tensor, not {type(tensor).__name__}; torch.from_numpy and "
            "torch.frombuffer wrap other memory without a copy"
        )
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"a {tensor.layout} tensor has no single memory; transfer its indices() and values()"
        )
    if tensor.is_meta:
        raise TypeError(
            "a meta tensor has no memory; make one with torch.empty_like(tensor, device='cpu')"
        )
    if torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor):
        raise TypeError(
            f"{type(tensor).__name__} wraps other tensors and has no memory of its own; "
            "transfer the inner tensors (for a DTensor, its to_local())"
        )
