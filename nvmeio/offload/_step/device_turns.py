"""Turns of a step that are computed on a device: their bytes go up before, and down after.

Nobody waits for a copy but streams, by events: the caller's stream, on which the optimizer's class
computes, for what comes up; the copies down for it; and what comes up into memory that was used
before for what goes down from there. There is a stream for each direction, as the bus has two.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence

import torch

from nvmeio._memory import devices
from nvmeio._memory.devices import Mark
from nvmeio.offload._swap_files.subgroups import SlotRun

BUFFERS = 2  # one is computed in, one comes up or goes down


class DeviceTurns:
    """Computes in a device's memory what lies in the host's.

    One thread begins turns; `BUFFERS` of them may be on the device at once.

    Args:
        device: Which.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._up = devices.beside(device)
        self._down = devices.beside(device)
        self._buffers: list[torch.Tensor] = []
        self._used: list[Mark | None] = []
        self._next = 0

    def make(self, nbytes: int, most: int) -> None:
        """Have the buffers; those there are stay if they are long enough.

        Args:
            nbytes: The length of each.
            most: How many are of use.

        Raises:
            MemoryError: The device has no such memory; what was there is given back.
        """
        count = min(BUFFERS, most)
        if not nbytes or (len(self._buffers) >= count and self._buffers[0].nbytes >= nbytes):
            return
        self.free()
        try:
            self._buffers = [self._up.empty(nbytes) for _ in range(count)]
        except torch.OutOfMemoryError as refused:
            self.free()
            raise MemoryError(
                f"{self.device} has no room for {count} buffers of {nbytes} bytes: give a smaller "
                "subgroup_bytes or device_bytes, or make the optimizer before what fills the device"
            ) from refused
        self._used = [None] * count
        self._up.follow()  # whoever had this memory before may still be at work there

    def begin(
        self,
        slot: torch.Tensor,
        reads: Iterable[SlotRun],
        compute: Callable[[torch.Tensor], Sequence[SlotRun]],
    ) -> Mark:
        """Ask for a turn.

        Args:
            slot: Host memory.
            reads: What `compute` needs of it.
            compute: Called at once with memory of the device in the slot's place, to ask the
                calling thread's stream for its work there; tells what of it goes back.

        Returns:
            When that is in the slot, which is the device's until then.
        """
        number = self._next
        memory, before = self._buffers[number], self._used[number]
        self._next = (number + 1) % len(self._buffers)
        if before is not None:
            self._up.after(before)
        for start, nbytes in _joined(reads):
            self._up.copy(memory[start : start + nbytes], slot[start : start + nbytes])
        devices.come_after(devices.stream_here(self.device), self._up.mark())
        results = compute(memory)
        self._down.follow()
        for start, nbytes in _joined(results):
            self._down.copy(slot[start : start + nbytes], memory[start : start + nbytes])
        mark = self._down.mark()
        self._used[number] = mark
        return mark

    def settle(self) -> None:
        """Wait until no copy is under way; never raises.

        What a turn that failed has asked for may still be computed in a buffer: copies into it
        come after that.
        """
        with contextlib.suppress(RuntimeError):  # a device that failed copies no more
            self._up.follow()
            self._up.mark().wait()
            self._down.mark().wait()

    def free(self) -> None:
        """Give the memory back; nothing is under way."""
        self._buffers, self._used, self._next = [], [], 0

    @property
    def nbytes(self) -> int:
        """Memory of the device."""
        return sum(buffer.nbytes for buffer in self._buffers)


def _joined(runs: Iterable[SlotRun]) -> list[SlotRun]:
    """As few runs as hold the same bytes: a copy costs microseconds to ask for."""
    found: list[SlotRun] = []
    for start, nbytes in sorted(runs):
        if not nbytes:
            continue
        if found and start <= found[-1].offset + found[-1].nbytes:
            end = max(start + nbytes, found[-1].offset + found[-1].nbytes)
            found[-1] = SlotRun(found[-1].offset, end - found[-1].offset)
        else:
            found.append(SlotRun(start, nbytes))
    return found
