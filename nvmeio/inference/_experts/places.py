"""Memory for the experts of one set that are kept: address space for all, pages for some.

Kernels index a tensor [experts, ...]. It lies over address space that is reserved and costs no
memory; only the pages of experts that are kept exist. When one expert takes the place of another,
its predecessor's pages are moved to it (`mremap`), since memory that is there is read into at twice
the rate of memory that is faulted in.

Source: man 2 mremap (MREMAP_DONTUNMAP, Linux 5.7), man 2 madvise (MADV_DONTNEED, MADV_NOHUGEPAGE),
man 2 mmap (MAP_NORESERVE).
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from nvmeio._bindings import memory_at
from nvmeio._memory import system
from nvmeio._residency.window import laid_over, row_major
from nvmeio.inference._experts.sets import ExpertSet, PartPlace
from nvmeio.inference._stream.packed_weights import Packed

_MAP_NORESERVE = 0x4000
_MADV_DONTNEED = 4
_MADV_NOHUGEPAGE = 15
_MAYMOVE_FIXED_DONTUNMAP = 1 | 2 | 4

_mremap = system.libc.mremap
_mremap.restype = ctypes.c_void_p
_mremap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
]


class Lent(NamedTuple):
    """Tensors over the experts of a set, for one call, by their weight's number in the unit.

    `mark` refers to what they lie over, and gives None once nobody has a tensor over it.
    """

    tensors: dict[int, Any]
    mark: Callable[[], Any]


class Kept(Protocol):
    """The memory in which the experts of one set are kept.

    Attributes:
        experts: The set.
        nbytes: The size of an expert's region.
    """

    experts: ExpertSet
    nbytes: int

    def region(self, expert: int) -> torch.Tensor:
        """The bytes of one expert, which its read fills."""

    def take(self, expert: int) -> None:
        """Have memory for an expert."""

    def release(self, expert: int) -> None:
        """Give an expert's memory back."""

    def take_pages(self, expert: int, other: Any, victim: int) -> bool:
        """Have the memory of a victim of `other` in place of new one; False if that cannot be."""

    def lend(self, hit: Sequence[int]) -> Lent:
        """Tensors for a call of some experts, as the model wants them or packed."""


class Places:
    """The address space of one set.

    Raises:
        MemoryError: There is no such address space.
    """

    def __init__(self, experts: ExpertSet) -> None:
        self.experts = experts
        self.nbytes = experts.nbytes
        length = experts.all_nbytes
        try:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            self._mapping = mmap.mmap(-1, length, flags=flags)
        except (OSError, OverflowError, ValueError) as failed:
            raise MemoryError(
                f"{length} bytes of address space for the experts of {experts.name} cannot be "
                f"reserved ({failed}): raise the limit of address space (ulimit -v), or set "
                "vm.overcommit_memory to 0 or 1"
            ) from None
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        # A huge page would belong to several experts, and go with the first of them.
        system.libc.madvise(self.address, length, _MADV_NOHUGEPAGE)
        self._memory = torch.frombuffer(self._mapping, dtype=torch.uint8)

    def region(self, expert: int) -> torch.Tensor:
        """The bytes of one expert."""
        return self._memory[expert * self.nbytes : (expert + 1) * self.nbytes]

    def at(self, expert: int, part: PartPlace) -> int:
        """The address of an expert's share of a part."""
        return self.address + expert * self.nbytes + part.start

    def take(self, expert: int) -> None:
        """Do nothing: the system gives pages to what is written first."""

    def release(self, expert: int) -> None:
        """Give an expert's pages back to the system."""
        system.libc.madvise(self.address + expert * self.nbytes, self.nbytes, _MADV_DONTNEED)

    def take_pages(self, expert: int, other: Places, victim: int) -> bool:
        """Move a victim's pages to an expert's place; False where the system does not.

        An old kernel has no such move (EINVAL), and a process may have too many mappings (ENOMEM,
        vm.max_map_count: each move may leave two).
        """
        target = self.address + expert * self.nbytes
        source = other.address + victim * other.nbytes
        moved = _mremap(source, self.nbytes, self.nbytes, _MAYMOVE_FIXED_DONTUNMAP, target)
        return bool(moved == target)

    def view(self) -> tuple[torch.Tensor, weakref.ref[Any]]:
        """All bytes, and a mark that is dead once nobody has a tensor over them."""
        view = memory_at(self.address, len(self._mapping), self._mapping)
        return torch.frombuffer(view, dtype=torch.uint8), weakref.ref(view)

    def lend(self, hit: Sequence[int]) -> Lent:
        """Tensors for a call of some experts, as the model wants them or packed."""
        memory, mark = self.view()
        return Lent(lay(self.experts, memory, hit), mark)


def lay(experts: ExpertSet, memory: torch.Tensor, hit: Sequence[int]) -> dict[int, Any]:
    """Lay tensors over the memory of a set, for a call of some experts; by weight (`Lent`)."""
    weights = experts.unit.weights
    tensors: dict[int, Any] = {}
    for number, parts in experts.tensors_over(hit, partial(_over, experts, memory)).items():
        weight = weights[number]
        tensors[number] = parts[0] if weight.compute is None else Packed.of(weight, parts)
    return tensors


def _over(
    experts: ExpertSet, memory: torch.Tensor, part: PartPlace, expert: int | None
) -> torch.Tensor:
    """A part of one expert; of all, [experts, ...], if none is named."""
    start, shape, strides = part.start, part.shape, row_major(part.shape)
    if expert is None:
        shape = (experts.number, *shape)
        strides = (experts.nbytes // part.dtype.itemsize, *strides)
    else:
        start += expert * experts.nbytes
    return laid_over(memory, [(start, part.dtype, shape, strides)])[0]
