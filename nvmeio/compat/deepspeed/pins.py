"""Page-locked memory by DeepSpeed's names: `pin_handle`, and what every other handle has of it.

Whether memory is locked is known process-wide, as in DeepSpeed: each handle sees what any other has
locked. Unlike there, memory lives as long as a tensor on it does; freeing only unlocks.

Source: csrc/pin_memory/*.cpp of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import torch

from nvmeio import _checks, buffers
from nvmeio._memory import mappings


class pin_handle:
    """What DeepSpeed's ``DS_PIN_MEMORY_BACKEND=native`` takes page-locked memory from.

    Its tensors are locked but not registered with CUDA, because DeepSpeed registers them itself.
    A second cudaHostRegister of the same memory fails (cudaErrorHostMemoryAlreadyRegistered), and
    the failure would stay behind for the next kernel launch to report.
    """

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """A 1-D page-locked CPU tensor; see `nvmeio.AioHandle.new_cpu_locked_tensor`.

        Args:
            num_elem: Number of elements, >= 0.
            example_tensor: A tensor whose dtype is taken.

        Raises:
            OSError: The limit for locked memory is reached; says which, and how to raise it.
            ValueError: `num_elem` is negative.
        """
        count = _checks.integer("num_elem", num_elem, 0)
        mapping = mappings.Mapping(max(count, 1) * example_tensor.dtype.itemsize)
        mapping.lock()
        mapping.populate()
        return mapping.tensor(0, (count,), example_tensor.dtype)

    def free_cpu_locked_tensor(self, locked_tensor: torch.Tensor) -> bool:
        """Unlock; False where the tensor is not (any more) one of `new_cpu_locked_tensor`."""
        return free(locked_tensor)

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        """`free_cpu_locked_tensor` for the tensor that begins at this address."""
        return mappings.unpin(address)

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Whether all of it is page-locked, by any handle or by torch; true for views as well."""
        return buffers.is_pinned(buffer)


def free(tensor: torch.Tensor) -> bool:
    """Unlock the memory that begins where the tensor does; False where there is none."""
    try:
        buffers.free_pinned(tensor)
    except ValueError:
        return False
    return True
