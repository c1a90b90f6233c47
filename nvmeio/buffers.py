"""Tensors on memory that nvmeio owns: aligned, on huge pages, touched once, locked where asked.

Every buffer is an anonymous private mapping of its own. Its first byte lies on a huge-page boundary
(2 MiB on x86-64) where it is that large, else on a page boundary, so any offset that is a multiple
of the device's block size can go through O_DIRECT without a copy. Direct reads into huge pages run
1.6 times as fast as into 4 KiB pages, for the kernel pins and walks 512 times fewer of them.
Page-locking adds nothing to that: Linux pins the pages of a direct transfer itself. It matters to
copies between host and GPU only.

`PinnedPool` (pool.py) reuses such memory; _memory/mappings.py has the mappings and which addresses
they have.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from nvmeio import _checks
from nvmeio._memory import mappings
from nvmeio._memory.mappings import on_huge_pages, owns, span
from nvmeio._memory.tensors import check_tensor

__all__ = [
    "empty_aligned",
    "empty_pinned",
    "free_pinned",
    "is_pinned",
    "new_locked",
    "on_huge_pages",
    "owns",
    "span",
]


def empty_aligned(
    *shape: int | tuple[int, ...] | list[int], dtype: torch.dtype | str = torch.float32
) -> torch.Tensor:
    """An uninitialised CPU tensor on memory that direct I/O reaches without a copy.

    This is nvmeio's own memory, and the buffer to prefer for every transfer: huge pages, already
    backed by memory, not page-locked (which direct I/O does not need). Its bytes happen to be zero.

    Args:
        shape: Sizes as separate ints or as one tuple, as for `torch.empty`. None at all, or
            ``()``, gives a 0-d tensor; a size may be 0.
        dtype: Any dtype of whole bytes that torch can lay over a buffer, bool, bfloat16,
            complex and float8 included, or its name ("bfloat16"); not the quantised ones, which
            need a scale as well.

    Returns:
        A contiguous tensor. Its address is a multiple of the huge-page size (2 MiB on x86-64)
        where it has that many bytes, else of the page size (4096 or more).

    Raises:
        MemoryError: The memory is not there; says how much was asked for and is available.
        TypeError, ValueError: The shape or dtype is not one.

    Cost:
        One mapping, touched once: 11 GB/s on huge pages and 2.9 GB/s on small ones where the
        kernel has the pages at hand, less on a virtual machine that has to ask its host first
        (0.4 GB/s). 20 us for the smallest. Allocate once and reuse, or use `PinnedPool`.
        Memory is taken in whole pages, from about 16 MiB on in whole huge pages. Other threads
        run meanwhile (no GIL held).

    Source:
        man 2 madvise; Documentation/admin-guide/mm/transhuge.rst in the kernel tree.
    """
    sizes = _sizes(shape)
    dtype = _checks.dtype("dtype", dtype)
    mapping = mappings.Mapping(_nbytes(sizes, dtype))
    mapping.populate()
    return mapping.tensor(0, sizes, dtype)


def empty_pinned(
    *shape: int | tuple[int, ...] | list[int], dtype: torch.dtype | str = torch.float32
) -> torch.Tensor:
    """As `empty_aligned`, and page-locked: for copies to and from a GPU that run beside compute.

    If this process has a CUDA context already, the memory is registered with it too
    (`cudaHostRegister`), so `tensor.is_pinned()` holds and `non_blocking=True` copies are
    asynchronous. Memory that was made earlier is never registered: its copies wait, and are as slow
    as those of any other. So use the device first; ``torch.zeros(1, device="cuda")`` will do.
    Unlocked by `free_pinned`, or when the last view of the tensor goes.

    Args:
        shape: As for `empty_aligned`. An empty tensor locks one page.
        dtype: As for `empty_aligned`.

    Returns:
        A contiguous CPU tensor, aligned as `empty_aligned` says. A child made by `fork` has it
        too, but not locked: locks are not inherited.

    Raises:
        OSError: The process may not lock that much (errno ENOMEM, EAGAIN or EPERM: the limit
            RLIMIT_MEMLOCK), or CUDA refused the memory (EIO). Says the limit and how to raise
            it. Nothing else in nvmeio needs locked memory: `empty_aligned` is as fast.
        MemoryError, TypeError, ValueError: As for `empty_aligned`.

    Cost:
        As `empty_aligned`; a refusal comes before the memory is touched. Registering with CUDA
        ran at 27 to 45 GB/s beside an H100, with huge pages; others report 1 to 2. It never starts
        CUDA.

    Source:
        man 2 mlock, man 2 getrlimit; CUDA Runtime API, "Memory Management", cudaHostRegister.
    """
    sizes = _sizes(shape)
    dtype = _checks.dtype("dtype", dtype)
    mapping = mappings.Mapping(_nbytes(sizes, dtype))
    mapping.lock()
    mapping.populate()
    mapping.register_with_cuda()
    return mapping.tensor(0, sizes, dtype)


def new_locked(num_elem: int, example_tensor_or_dtype: torch.Tensor | torch.dtype) -> torch.Tensor:
    """A page-locked 1-D tensor of `num_elem` elements: `AioHandle.new_cpu_locked_tensor`.

    Args:
        num_elem: Number of elements, 0 or more.
        example_tensor_or_dtype: The dtype, or a tensor (of any device) to take it from.

    Raises:
        TypeError: `num_elem` is not an int, or the example neither tensor nor dtype.
        ValueError: `num_elem` is negative.
        OSError, MemoryError: As for `empty_pinned`.
    """
    count = _checks.integer("num_elem", num_elem, 0)
    return empty_pinned(count, dtype=dtype_of(example_tensor_or_dtype))


def dtype_of(example: torch.Tensor | torch.dtype) -> torch.dtype:
    """A dtype, or that of a tensor.

    Raises:
        TypeError: It is neither.
    """
    dtype = example.dtype if isinstance(example, torch.Tensor) else example
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"example must be a torch.Tensor or a torch.dtype, not {dtype!r:.80}")
    return dtype


def free_pinned(tensor: torch.Tensor) -> None:
    """Unlock the memory of a tensor from `empty_pinned` or `new_locked` now.

    The tensor stays valid, on ordinary memory from here on, and the memory itself goes with its
    last view. Without this call the last view's end unlocks too.

    Args:
        tensor: The tensor, or any view (another shape, dtype or length) that starts where it
            starts. No copy to or from a GPU may be under way in it.

    Raises:
        ValueError: It was never locked here, was freed already, or is a view into the middle.
        OSError: CUDA refused to let go of the memory (EIO).
        TypeError: It is not a tensor.
    """
    check_tensor(tensor)
    address = span(tensor)[0]
    if not mappings.unpin(address):
        raise ValueError(_why_not_freeable(tensor, address))


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether all of the tensor's memory is page-locked, by nvmeio or by CUDA through torch.

    Args:
        tensor: Any tensor, view or not, strided or not.

    Returns:
        True for a CPU tensor that lies wholly in memory from `empty_pinned`, `new_locked` or a
        locked `PinnedPool`, whichever handle it came from, and for one whose own `is_pinned()`
        says so. False for every other, tensors on a device included.

    Raises:
        TypeError: It is not a tensor.

    Cost:
        3 us.
    """
    check_tensor(tensor)
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    if mappings.locked.covers(*span(tensor)):
        return True
    # torch has pinned memory of its own only where CUDA is up; asking must not bring it up.
    cuda: Any = torch.cuda
    return bool(cuda.is_initialized()) and tensor.is_pinned()


def _sizes(shape: tuple[int | tuple[int, ...] | list[int], ...]) -> tuple[int, ...]:
    given: Any = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    try:
        sizes = tuple(operator.index(size) for size in given)
    except TypeError:
        raise TypeError(f"shape must be ints or one tuple of ints, not {given!r:.80}") from None
    if any(size < 0 for size in sizes):
        raise ValueError(f"shape {sizes} has a negative size: sizes must be 0 or more")
    return sizes


def _nbytes(sizes: tuple[int, ...], dtype: torch.dtype) -> int:
    if str(dtype).startswith(("torch.qint", "torch.quint")):
        # torch makes one without a quantizer over a buffer, and crashes when it is reshaped.
        raise TypeError(
            f"a {dtype} tensor needs a scale and a zero point: allocate its bytes (torch.uint8) "
            "or its integers (torch.int8, torch.int32) instead"
        )
    return max(math.prod(sizes), 1) * dtype.itemsize


def _why_not_freeable(tensor: torch.Tensor, address: int) -> str:
    what = f"a {tuple(tensor.shape)} {tensor.dtype} tensor at {address:#x} on {tensor.device}"
    if address and mappings.locked.covers(address, 1):
        return f"{what} is a view into the middle of page-locked memory: free the whole tensor"
    if address and mappings.mapped.covers(address, 1):
        return f"{what} is not page-locked (any more): it was freed before, or is empty_aligned's"
    return f"{what} was not page-locked by nvmeio (new_cpu_locked_tensor, empty_pinned)"
