"""A short run of blocks to or from its slots by the thread that asks: one system call, one wait.

Handing it to a lane and waiting for that costs two switches of thread, which is more than the
drive takes. Longer runs, and blocks that lie here and there, are what the engine is for: it has
many pieces in flight together.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from nvmeio import _tensor, buffers
from nvmeio._plan import PAGE_BYTES
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
            aligned = all(self._fits(block, memory_unit or 1) for block in blocks)
            memory = blocks if aligned else self._staging(len(blocks))
            if writing and not aligned:
                for block, row in zip(blocks, memory, strict=True):
                    row[: block.nbytes] = _bytes(block)
            views = [memory_at(row.data_ptr(), row.nbytes) for row in memory]
            call = os.pwritev if writing else os.preadv
            moved = call(opened.direct_fd, views, first * self._slot_bytes)
            if moved != sum(row.nbytes for row in memory):
                return False
        except OSError:
            return False
        finally:
            opened.release()
        if not writing:
            for block, row in zip(blocks, memory, strict=True):
                if not aligned:
                    _bytes(block).copy_(row[: block.nbytes])
                _tensor.touch(block)
        return True

    def _fits(self, block: torch.Tensor, unit: int) -> bool:
        return block.nbytes == self._slot_bytes and not block.data_ptr() % unit

    def _staging(self, rows: int) -> list[torch.Tensor]:
        if self._room is None:
            shape = (min(MOST_BYTES // self._slot_bytes, _MOST_BLOCKS), self._slot_bytes)
            self._room = buffers.empty_aligned(shape, dtype=torch.uint8)
        return list(self._room[:rows])


def _bytes(block: torch.Tensor) -> torch.Tensor:
    return block.detach().view(-1).view(torch.uint8)
