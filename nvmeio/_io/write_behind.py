"""A file that is written from its start to its end, while what comes next is being made."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from nvmeio._files.plan import PAGE_BYTES, round_down
from nvmeio._io.inflight import InFlight, Stagings
from nvmeio._shim import memory_at
from nvmeio._threads.jobs import run_interruptible
from nvmeio.errors import ClosedError
from nvmeio.files import File
from nvmeio.handle import AioHandle


class WriteBehind:
    """Takes what is written into one half of a buffer while the other half goes to the file.

    Args:
        handle: Does the writing; stays open.
        file: Where it goes, from the first byte on; stays open.
        staging: A CPU byte tensor.
        run: Has each half written; in another thread than the main one, or one at a time.
    """

    def __init__(
        self,
        handle: AioHandle,
        file: File,
        staging: torch.Tensor,
        run: Callable[[Callable[[], None]], None] = run_interruptible,
    ) -> None:
        # Whole pages, so that every drain but the last begins and ends where direct I/O can.
        half = max(round_down(staging.numel() // 2, PAGE_BYTES), 1)
        self._stagings = Stagings.of([staging[:half], staging[half : 2 * half]])
        self._flight = InFlight()
        self._chunk = self._stagings.take(self._flight)
        self._view = _memory_of(self._chunk)
        self._filled = 0
        self._offset = 0
        self._handle = handle
        self._file = file
        self._run = run

    def write(self, data: Any) -> int:
        """Takes any bytes; returns how many.

        Raises:
            TransferError: An earlier part could not be written.
            ClosedError: It was released meanwhile, by another thread or the end of the program.
        """
        taken = memoryview(data).cast("B")
        done = 0
        while done < len(taken):
            # No local name holds the memory: torch's writer keeps the traceback of what interrupts
            # this (its C++ does not let go of it), and a frame there would keep it for ever.
            size = len(self._view)
            step = min(len(taken) - done, size - self._filled)
            try:
                self._view[self._filled : self._filled + step] = taken[done : done + step]
            except ValueError:
                if self._view:
                    raise
            if not self._view:
                raise ClosedError("the file was closed by another thread while it was written")
            self._filled += step
            done += step
            if self._filled == size:
                self._run(self._drain)
        return done

    def flush(self) -> None:
        """Torch calls it before the end; what is in the buffer can wait."""

    def fileno(self) -> int:
        """There is none to write to: torch then hands everything to `write`."""
        raise io.UnsupportedOperation("fileno")

    def finish(self) -> None:
        """Write what is left, and wait for all of it.

        Raises:
            TransferError: It could not be written.
        """
        if self._filled:
            self._drain()
        self._flight.drain()

    def abandon(self) -> None:
        """Write no more; nothing is in flight after this."""
        self._flight.stop()

    def release(self) -> None:
        """Give the memory up, whoever still has this; nothing is written after this."""
        self._view = memoryview(bytearray())
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._stagings = Stagings.of([self._chunk])

    @property
    def position(self) -> int:
        """Bytes taken so far."""
        return self._offset + self._filled

    def _drain(self) -> None:
        chunk, nbytes = self._chunk, self._filled
        begin = partial(self._handle.async_pwrite, chunk[:nbytes], self._file, self._offset)
        self._flight.start(begin, nbytes, partial(self._stagings.give_back, chunk))
        self._offset += nbytes
        self._filled = 0
        self._chunk = self._stagings.take(self._flight)
        self._view = _memory_of(self._chunk)


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """A CPU tensor's bytes, which it keeps: `release` may come while they are written to."""
    return memory_at(tensor.data_ptr(), tensor.nbytes, tensor)
