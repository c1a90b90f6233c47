"""DeepSpeed's two functions on tensors that its I/O comes with.

Source: csrc/aio/py_lib/deepspeed_py_copy.cpp and csrc/utils/tensor_cast.cpp of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import torch

from nvmeio._memory.tensors import cast_to_byte_tensor as cast_to_byte_tensor


def deepspeed_memcpy(dest: torch.Tensor, src: torch.Tensor) -> int:
    """Copy `src` into `dest`, element by element in memory order.

    Args:
        dest: Is filled; any shape.
        src: Of the same dtype, any shape with at least as many elements; the rest is ignored.

    Returns:
        0.

    Raises:
        TypeError: The dtypes differ.
        ValueError: `src` has fewer elements than `dest`.
    """
    if dest.dtype != src.dtype:
        raise TypeError(f"cannot copy {src.dtype} into {dest.dtype}: convert it first (src.to)")
    if src.numel() < dest.numel():
        raise ValueError(f"cannot fill {dest.numel()} elements from {src.numel()}")
    # Not within no_grad, which Ctrl-C may leave in force.
    dest.detach().copy_(src.detach().reshape(-1)[: dest.numel()].view(dest.shape))
    return 0
