"""Memory of a budget that is free again when the last tensor over it is gone.

Nothing is taken from under a tensor: autograd, a user, an error's traceback may still have one. The
end of a storage is told by a weak reference whose callback is `SimpleQueue.put` itself, a C
function, so that it is lost to no interrupt; what came back is looked at before memory is given.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Hashable, Iterable
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from nvmeio._bindings import memory_at
from nvmeio._residency.window import Slot
from nvmeio.buffers import empty_aligned
from nvmeio.pool import Lease, PinnedPool

Unit = TypeVar("Unit", bound=Hashable)


class LentPool:
    """A `PinnedPool` that lends storages: free again with the last tensor over `Slot.memory`.

    One thread takes, or several in turn.

    Args:
        budget_bytes: Of the pool.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._pool = PinnedPool(budget_bytes)
        self._ended: SimpleQueue[weakref.ref[Any]] = SimpleQueue()
        # By the id of the reference; without a lease where it is memory of its own.
        self._out: dict[int, tuple[weakref.ref[Any], Lease | None, int]] = {}
        self._apart_bytes = 0

    def take(self, unit: Unit, nbytes: int) -> Slot[Unit] | None:
        """Memory for a unit, page-aligned; None where it is not free now."""
        self._take_back()
        if self._apart_bytes and self.in_use_bytes + nbytes > self.budget_bytes:
            return None
        lease, lent = lease_now(self._pool, nbytes) or (None, None)
        if lease is None or lent is None:
            return None
        return self._lend(unit, lent, lease)

    def take_apart(self, unit: Unit, nbytes: int) -> Slot[Unit] | None:
        """Memory outside of the pool, for a unit that finds enough free bytes only in pieces.

        It counts against the budget; None if too few bytes are free.
        """
        if self.in_use_bytes + nbytes > self.budget_bytes:
            return None
        lent = empty_aligned(nbytes, dtype=torch.uint8)
        self._apart_bytes += nbytes
        return self._lend(unit, lent, None)

    def _lend(self, unit: Unit, lent: torch.Tensor, lease: Lease | None) -> Slot[Unit]:
        room = memory_at(lent.data_ptr(), lent.nbytes, lent)
        # The arena stays mapped for as long as the storage lives, whatever is closed
        mark = weakref.ref(room, self._ended.put)
        self._out[id(mark)] = mark, lease, lent.nbytes
        return Slot(unit, lent, torch.frombuffer(room, dtype=torch.uint8))

    def _take_back(self) -> None:
        while not self._ended.empty():
            _, lease, nbytes = self._out.pop(id(self._ended.get()))
            if lease is None:
                self._apart_bytes -= nbytes
            else:
                lease.__exit__(None, None, None)

    def close(self) -> None:
        """Take no more requests; tensors that are out stay valid."""
        self._take_back()
        self._pool.close()

    @property
    def budget_bytes(self) -> int:
        """The budget of the pool."""
        return self._pool.budget_bytes

    @property
    def in_use_bytes(self) -> int:
        """What tensors hold of it."""
        self._take_back()
        return self._pool.in_use_bytes + self._apart_bytes

    @property
    def locked(self) -> bool:
        """Whether it is page-locked."""
        return self._pool.locked


def lease_now(pool: PinnedPool, nbytes: int) -> tuple[Lease, torch.Tensor] | None:
    """A lease that was entered, and its memory; None where it is not free now."""
    if pool.in_use_bytes + nbytes > pool.budget_bytes:
        return None  # the usual case of a full window; to queue and fail takes six times as long
    lease = pool.take(nbytes, timeout=0)
    try:
        return lease, lease.__enter__()
    except TimeoutError:  # in pieces that are too small
        return None


def laid_over(
    memory: torch.Tensor,
    places: Iterable[tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]],
) -> list[torch.Tensor]:
    """Lay tensors over memory: each has its first byte, dtype, shape and strides there.

    Strides of () are row-major order. Each takes one call of torch: with every call a thread gives
    up the interpreter's lock, and waits for it again in the middle of the model's computation.
    """
    found: list[torch.Tensor] = []
    typed: dict[torch.dtype, torch.Tensor] = {}
    for start, dtype, shape, strides in places:
        if 0 in shape:
            found.append(torch.empty(shape, dtype=dtype, device=memory.device))
            continue
        if dtype not in typed:
            typed[dtype] = memory.view(dtype)
        first = start // dtype.itemsize
        found.append(typed[dtype].as_strided(shape, strides or _strides(shape), first))
    return found


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*itertools.accumulate(shape[:0:-1], operator.mul, initial=1),)[::-1] if shape else ()
