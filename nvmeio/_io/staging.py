"""Chunks of memory that transfers go through, a few at a time, used again and again.

They are page-locked where a CUDA device copies from or to them and page-locking is allowed (the
copies are as fast as the bus, and run beside the drive), else aligned only.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from nvmeio import buffers
from nvmeio._io.inflight import InFlight

logger = logging.getLogger("nvmeio")


def new_staging(nbytes: int, device: torch.device) -> torch.Tensor:
    """Aligned bytes for copies to or from a device; page-locked for CUDA where allowed."""
    if device.type == "cuda":
        try:
            return buffers.empty_pinned(nbytes, dtype=torch.uint8)
        except OSError as refused:
            logger.info("copying through memory that is not page-locked: %s", refused)
    return buffers.empty_aligned(nbytes, dtype=torch.uint8)


class Stagings:
    """Chunks of one size, made as they are wanted, at most `count` of them.

    Args:
        nbytes: Of each.
        count: Two keep a drive busy while one is copied; four, both sides when they stutter.
        device: What they are copied to or from.
    """

    def __init__(self, nbytes: int, count: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self._left = count
        self._device = device
        self._free: list[torch.Tensor] = []

    @classmethod
    def of(cls, chunks: Sequence[torch.Tensor]) -> Stagings:
        """Chunks that the caller has, all of one size."""
        made = cls(chunks[0].nbytes, 0, chunks[0].device)
        made._free += reversed(chunks)
        return made

    @property
    def has_free(self) -> bool:
        """Whether `take` has one at once."""
        return bool(self._free) or self._left > 0

    def take(self, flight: InFlight) -> torch.Tensor:
        """A chunk that nobody uses; waits for what is in flight until one is given back.

        Raises:
            TransferError: One that was in flight has failed.
            Cancelled: `flight` was cancelled.
        """
        while not self._free:
            if self._left:
                self._left -= 1
                return new_staging(self.nbytes, self._device)
            flight.finish_first()
        return self._free.pop()

    def give_back(self, chunk: torch.Tensor) -> None:
        """Nobody reads or writes it any more."""
        self._free.append(chunk)
