"""A short run of blocks to or from its slots by the thread that asks: one system call, one wait.

Handing it to a lane and waiting for that costs two switches of thread, which is more than the
drive takes. Longer runs, and blocks that lie here and there, are what the engine is for: it has
many pieces in flight together.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from nvmeio import buffers
from nvmeio._files.plan import PAGE_BYTES
from nvmeio._memory import tensors
from nvmeio._shim import memory_at
from nvmeio.files import File

MOST_BYTES = 1 << 20
_MOST_BLOCKS = 64


class InPlace:
    """Moves blocks of one file; of one thread at a time.

    Args:
        file: The slots.
        slot_bytes: Of a slot; whole pages.
    """

    def __init__(self, file: File, slot_bytes: int) -> None:
        self._file = file
        self._slot_bytes = slot_bytes
        self._room: torch.Tensor | None = None  # for memory that is not aligned

    def move(self, blocks: Sequence[torch.Tensor], first: int, writing: bool) -> bool:
        """Move blocks; False where they have to go through the engine, which tells why.

        Args:
            blocks: Contiguous CPU memory, for slots that follow one another.
            first: Number of the first slot.
            writing: Whether to write them; else they are read.
        """
        if len(blocks) > _MOST_BLOCKS or len(blocks) * self._slot_bytes > MOST_BYTES:
            return False
        opened = self._file.acquire(writing)
        try:
            unit, memory_unit = opened.alignment
            if opened.direct_fd < 0 or not unit or PAGE_BYTES % unit:
                return False
            given = [memory_at(block.data_ptr(), block.nbytes) for block in blocks]
            memory = [
                view if self._fits(block, memory_unit or 1) else self._staged(number)
                for number, (block, view) in enumerate(zip(blocks, given, strict=True))
            ]
            if writing:
                _copy(given, memory)
            call = os.pwritev if writing else os.preadv
            moved = call(opened.direct_fd, memory, first * self._slot_bytes)
            if moved != len(blocks) * self._slot_bytes:
                return False
        except OSError:
            return False
        finally:
            opened.release()
        if not writing:
            _copy(memory, given)
            for block in blocks:
                tensors.touch(block)
        return True

    def _fits(self, block: torch.Tensor, unit: int) -> bool:
        return block.nbytes == self._slot_bytes and not block.data_ptr() % unit

    def _staged(self, number: int) -> memoryview:
        """Memory of a slot's length, for a block that cannot be moved where it lies."""
        if self._room is None:
            shape = (min(MOST_BYTES // self._slot_bytes, _MOST_BLOCKS), self._slot_bytes)
            self._room = buffers.empty_aligned(shape, dtype=torch.uint8)
        address = self._room.data_ptr() + number * self._slot_bytes
        return memory_at(address, self._slot_bytes)


def _copy(source: Sequence[memoryview], target: Sequence[memoryview]) -> None:
    # By this thread alone. torch's copy is several threads' from 32 KiB on, and waits until each
    # has had a core: on a busy machine 15 ms for what takes 10 us.
    for one, other in zip(source, target, strict=True):
        if one is not other:
            nbytes = min(one.nbytes, other.nbytes)
            other[:nbytes] = one[:nbytes]
