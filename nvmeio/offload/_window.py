"""The window of memory that parameters pass through: what is in it, what comes next, what goes.

Units come in the order in which forward first needed them, and in backward the other way round.
What lies behind in that direction goes first; a few units ahead are being read meanwhile.

Memory is never taken from under a tensor: a unit that goes only loses the parameters' views of it.
Its bytes are free when the last tensor over them is gone (autograd may still hold one), which the
object that the storage was made from tells by its end.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nvmeio.handle import AioHandle
from nvmeio.offload._layout import Span
from nvmeio.offload._pipeline import Move
from nvmeio.offload._stages import Unit
from nvmeio.operation import Operation
from nvmeio.pool import Lease, PinnedPool

# Reads under way: two units, since one is waited for while the next is being read, and of small
# units as many as keep a fast drive busy while a unit is computed with. More would wait in line.
_AHEAD = 2
_AHEAD_BYTES = 64 << 20


class Window:
    """Brings units into a fixed budget of memory and lets them go again.

    Args:
        handle: Moves the bytes.
        budget_bytes: Memory for all units that are there at a time.
        moves: Where the bytes of a unit come from, now.

    Attributes:
        read_bytes: Since it was made.
        waited_s: How long computing waited for reads.
    """

    def __init__(
        self, handle: AioHandle, budget_bytes: int, moves: Callable[[Unit], Sequence[Move]]
    ) -> None:
        self._handle = handle
        self._pool = PinnedPool(budget_bytes)
        self._moves = moves
        self._lock = threading.RLock()
        self._memory: dict[int, torch.Tensor] = {}  # by id of the unit: there, or being read
        self._reading: dict[int, list[Operation]] = {}
        self._pins: dict[int, int] = {}
        self._units: dict[int, Unit] = {}  # by id: those that are or were there
        self._order: list[Unit] = []
        self._at: dict[int, int] = {}  # a unit's place in the order
        self._position = 0  # where computing is in it
        self._by_address: dict[int, Unit] = {}
        self.read_bytes = 0

    # What computing asks for

    def need(self, unit: Unit, pin: bool = False, computing: bool = True) -> torch.Tensor:
        """Have a unit in memory, waiting for it; the next ones are begun.

        Args:
            unit: Which.
            pin: It stays until `unpin`.
            computing: It is the model's turn that wants it; False tells nothing of the order, and
                begins nothing.

        Raises:
            MemoryError: The budget is taken by what cannot go.
            TransferError: It could not be read.
        """
        with self._lock:
            if computing:
                self._note(unit)
            if pin:
                self._pins[id(unit)] = self._pins.get(id(unit), 0) + 1
            try:
                if id(unit) not in self._memory:
                    self._begin(unit, self._room(unit))
                self._finish(unit)
            except BaseException:
                if pin:
                    self.unpin(unit)
                raise
            if computing:
                self._look_ahead()
            return self._memory[id(unit)]

    def _note(self, unit: Unit) -> None:
        if id(unit) not in self._at:
            self._at[id(unit)] = len(self._order)
            self._order.append(unit)
        # One that several stages need (tied weights) comes at several places: it tells nothing.
        if len(unit.stages) == 1:
            self._position = self._at[id(unit)]

    def unpin(self, unit: Unit) -> None:
        """A stage that pinned the unit is done."""
        with self._lock:
            left = self._pins.get(id(unit), 0) - 1
            if left > 0:
                self._pins[id(unit)] = left
            else:
                self._pins.pop(id(unit), None)

    def blank(self, unit: Unit) -> torch.Tensor:
        """Memory for a unit whose bytes are about to be made; bound to its parameters."""
        with self._lock:
            self.drop(unit)
            self._memory[id(unit)] = memory = self._room(unit)
            self._units[id(unit)] = unit
            self._bind(unit, memory)
            return memory

    def unit_at(self, address: int) -> Unit | None:
        """The unit whose memory begins at an address."""
        return self._by_address.get(address)

    def drop(self, unit: Unit) -> None:
        """Let a unit go; one that is being read first arrives."""
        with self._lock:
            for operation in self._reading.pop(id(unit), []):
                operation.exception()  # nobody wants it any more, whatever came of it
            memory = self._memory.pop(id(unit), None)
            if memory is None:
                return
            self._by_address.pop(memory.data_ptr(), None)
            for parameter, span in zip(unit.parameters, unit.spans, strict=True):
                parameter.data = absent(span)

    def drop_all(self) -> None:
        """Let everything go that is not in use."""
        with self._lock:
            for unit in self._there():
                if id(unit) not in self._pins:
                    self.drop(unit)

    # Coming

    def _begin(self, unit: Unit, memory: torch.Tensor) -> None:
        self._memory[id(unit)] = memory
        self._units[id(unit)] = unit
        started: list[Operation] = []
        self._reading[id(unit)] = started
        for move in self._moves(unit):
            part = memory[move.slot_offset : move.slot_offset + move.nbytes]
            started.append(self._handle.async_pread(part, move.file, move.file_offset))
            self.read_bytes += move.nbytes

    def _finish(self, unit: Unit) -> None:
        operations = self._reading.pop(id(unit), None)
        if operations is None:
            return
        failures = [failed for each in operations if (failed := each.exception()) is not None]
        if failures:
            del self._memory[id(unit)]
            raise failures[0]
        self._bind(unit, self._memory[id(unit)])

    def _bind(self, unit: Unit, memory: torch.Tensor) -> None:
        self._by_address[memory.data_ptr()] = unit
        for parameter, span in zip(unit.parameters, unit.spans, strict=True):
            parameter.data = over(memory, span)

    def _look_ahead(self) -> None:
        """Begin to read what comes next in this direction, into memory that is behind or free."""
        step = -1 if _in_backward() else 1
        here = self._position
        units, nbytes = self._under_way()
        at = here + step
        while 0 <= at < len(self._order) and (units < _AHEAD or nbytes < _AHEAD_BYTES):
            ahead = self._order[at]
            if id(ahead) not in self._memory:
                memory = self._try_room(ahead, here, step)
                if memory is None:
                    return
                self._begin(ahead, memory)
                units += 1
                nbytes += ahead.nbytes
            at += step

    def _under_way(self) -> tuple[int, int]:
        """How many units the drive has still to bring, and their bytes."""
        coming = [
            self._units[key].nbytes
            for key, operations in self._reading.items()
            if not all(operation.done() for operation in operations)
        ]
        return len(coming), sum(coming)

    # Going

    def _room(self, unit: Unit) -> torch.Tensor:
        """Memory for a unit that is needed now, whatever unpinned one has to go for it."""
        step = -1 if _in_backward() else 1
        memory = self._try_room(unit, self._position, step)
        if memory is not None:
            return memory
        for ahead in sorted(self._there(), key=lambda u: -step * self._at.get(id(u), -1)):
            if id(ahead) not in self._pins:
                self.drop(ahead)
                memory = self._take(unit)
                if memory is not None:
                    return memory
        gc.collect()  # a tensor in a cycle may hold what looks free
        memory = self._take(unit)
        if memory is not None:
            return memory
        held = self._pool.in_use_bytes
        raise MemoryError(
            f"resident_bytes={self._pool.budget_bytes} is too small: {unit.nbytes} bytes are "
            f"needed for one more unit, and {held} are held by the modules that run now or by "
            "tensors over parameters (of a checkpointed region, for one): raise resident_bytes, "
            "or checkpoint smaller regions"
        )

    def _try_room(self, unit: Unit, here: int, step: int) -> torch.Tensor | None:
        """Memory that is free, or becomes it as units behind go, the farthest first."""
        memory = self._take(unit)
        if memory is not None:
            return memory
        gone = [u for u in self._there() if step * (self._at.get(id(u), here) - here) < 0]
        for each in sorted(gone, key=lambda u: step * self._at[id(u)]):
            if id(each) in self._pins:
                continue
            self.drop(each)
            memory = self._take(unit)
            if memory is not None:
                return memory
        return None

    def _there(self) -> list[Unit]:
        return [self._units[key] for key in self._memory]

    def _take(self, unit: Unit) -> torch.Tensor | None:
        lease = self._pool.take(unit.nbytes, timeout=0)
        try:
            lent = lease.__enter__()
        except TimeoutError:
            return None
        return _owned(lease, lent)

    # The end

    def close(self) -> None:
        """Let everything go and give the memory back."""
        with self._lock:
            for unit in self._there():
                self.drop(unit)
            self._pool.close()

    @property
    def budget_bytes(self) -> int:
        """The budget."""
        return self._pool.budget_bytes

    @property
    def in_use_bytes(self) -> int:
        """What is taken of it, by units and by tensors that outlive them."""
        return self._pool.in_use_bytes


def _owned(lease: Lease, lent: torch.Tensor) -> torch.Tensor:
    """The bytes of a lease as a storage of their own, with whose end the lease ends."""
    room = (ctypes.c_char * lent.nbytes).from_address(lent.data_ptr())
    weakref.finalize(room, _give_back, lease, lent)
    return torch.frombuffer(room, dtype=torch.uint8)


def _give_back(lease: Lease, lent: torch.Tensor) -> None:
    lease.__exit__(None, None, None)


def _in_backward() -> bool:
    """Whether this thread is in the middle of a backward pass."""
    ask: Any = getattr(torch._C, "_current_graph_task_id", None)
    return ask is not None and bool(ask() != -1)


def over(memory: torch.Tensor, span: Span) -> torch.Tensor:
    """The parameter's tensor over the unit's memory."""
    if not span.nbytes:
        return torch.empty(span.shape, dtype=span.dtype)
    return memory[span.offset : span.offset + span.nbytes].view(span.dtype).view(span.shape)


def absent(span: Span) -> torch.Tensor:
    """What stands for a parameter that is on the drive: of its shape, and NaN where it can be.

    One element of memory. Reading it gives no result that could pass for one, and writing to it is
    refused by torch, since its elements share their memory.
    """
    fill = float("nan") if span.dtype.is_floating_point or span.dtype.is_complex else 0
    return torch.full((), fill, dtype=span.dtype).expand(span.shape)
