"""What a handle was set to, and page-locked memory: by the names of DeepSpeed's handles."""

from __future__ import annotations

import torch

from nvmeio import buffers
from nvmeio._pages import PAGE_BYTES
from nvmeio.engines.base import Options


class HandleSettings:
    """The part of a handle that moves nothing."""

    _options: Options

    def get_block_size(self) -> int:
        """Bytes per kernel request."""
        return self._options.block_size

    def get_queue_depth(self) -> int:
        """Blocks a lane keeps in the kernel at most."""
        return self._options.queue_depth

    def get_single_submit(self) -> bool:
        """Whether blocks are submitted one at a time."""
        return self._options.single_submit

    def get_overlap_events(self) -> bool:
        """Whether the queue is refilled as blocks complete."""
        return self._options.overlap_events

    def get_intra_op_parallelism(self) -> int:
        """Number of lanes."""
        return self._options.intra_op_parallelism

    def get_alignment(self) -> int:
        """Bytes: addresses, sizes and offsets that are multiples of it need no bounce or edge."""
        return PAGE_BYTES

    # --- memory -----------------------------------------------------------------------------

    def new_cpu_locked_tensor(
        self, num_elem: int, example_tensor_or_dtype: torch.Tensor | torch.dtype
    ) -> torch.Tensor:
        """A 1-D page-locked tensor on huge pages, aligned for direct I/O.

        Args:
            num_elem: Number of elements, >= 0.
            example_tensor_or_dtype: A tensor whose dtype is taken, or the dtype.

        Raises:
            OSError: The limit for locked memory is reached; says which, and how to raise it.

        Page-locking matters for copies to and from a GPU. Transfers of this handle are as fast
        with `nvmeio.empty_aligned`.
        """
        return buffers.new_locked(num_elem, example_tensor_or_dtype)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> None:
        """Unlock a tensor of `new_cpu_locked_tensor` now; its memory goes with its last view.

        Raises:
            ValueError: It was not made by `new_cpu_locked_tensor`, or is freed already.
        """
        buffers.free_pinned(tensor)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in page-locked memory, of this handle, another, or CUDA."""
        return buffers.is_pinned(tensor)
