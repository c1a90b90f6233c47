"""Many tensors into one file, back to back, as few large direct writes.

A large tensor in CPU memory is written from where it lies. All others (small ones, other devices,
what had to be made contiguous) are gathered in aligned chunks, whole pages of the file each, so
that a thousand small tensors are a handful of writes and host memory stays bounded.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from nvmeio import _tensor
from nvmeio._plan import PAGE_BYTES
from nvmeio.checkpoint._flight import Flight
from nvmeio.checkpoint._spans import new_chunk
from nvmeio.files import File
from nvmeio.handle import AioHandle

# From here on a tensor's own memory is written: gathering it as well would only cost a copy.
DIRECT_BYTES = 1 << 20

CHUNK_BYTES = 8 << 20
CHUNKS = 4


def write(
    handle: AioHandle,
    file: File,
    parts: Iterable[torch.Tensor],
    flight: Flight[torch.Tensor | None],
) -> int:
    """Write tensors one behind the other, from the first byte of the file on; blocks.

    Args:
        handle: Moves the bytes.
        file: Open for writing.
        parts: Strided tensors of any device, contiguous or not; each is asked for when its turn
            comes, and stays unchanged until this returns.
        flight: What is in flight; nothing is when this returns or raises.

    Returns:
        How many bytes were written.

    Raises:
        TransferError: A write failed.
        Cancelled: `flight.cancel` was called.

    Cost: at most 32 MiB of host memory, and the contiguous copy of one tensor that is not.
    """
    stream = _Stream(handle, file, flight)
    try:
        for part in parts:
            stream.put(part)
        stream.finish()
    except BaseException:
        flight.stop()
        raise
    return stream.position


class _Stream:
    """Where the file's next byte goes: `position`, and the chunk that is being filled."""

    def __init__(self, handle: AioHandle, file: File, flight: Flight[torch.Tensor | None]) -> None:
        self.position = 0
        self._handle = handle
        self._file = file
        self._flight = flight
        self._free: list[torch.Tensor] = []
        self._chunks = 0
        self._chunk: torch.Tensor | None = None
        self._start = self._end = 0  # what is filled of the chunk

    def put(self, part: torch.Tensor) -> None:
        flat, own = _bytes_of(part)
        if own and flat.nbytes >= DIRECT_BYTES:
            self._flush()
            self._write(flat, self.position, None)
            self.position += flat.nbytes
            return
        done = 0
        while done < flat.nbytes:
            if self._chunk is None:
                self._chunk = self._take(flat.device)
                # A byte's place in its page is the same in memory and file: no bounce.
                self._start = self._end = self.position % PAGE_BYTES
            count = min(flat.nbytes - done, self._chunk.nbytes - self._end)
            self._chunk[self._end : self._end + count].copy_(flat[done : done + count])
            self._end += count
            self.position += count
            done += count
            if self._end == self._chunk.nbytes:
                self._flush()

    def finish(self) -> None:
        self._flush()
        while self._flight:
            self._finish_first()

    def _flush(self) -> None:
        chunk, self._chunk = self._chunk, None
        if chunk is not None:
            filled = chunk[self._start : self._end]
            self._write(filled, self.position - filled.nbytes, chunk)

    def _write(self, memory: torch.Tensor, offset: int, chunk: torch.Tensor | None) -> None:
        while self._flight.is_full(memory.nbytes):
            self._finish_first()
        self._flight.start(lambda: self._handle.async_pwrite(memory, self._file, offset), chunk)

    def _take(self, device: torch.device) -> torch.Tensor:
        if not self._free and self._chunks < CHUNKS:
            self._chunks += 1
            return new_chunk(CHUNK_BYTES, device)
        while not self._free:
            self._finish_first()
        return self._free.pop()

    def _finish_first(self) -> None:
        chunk = self._flight.first()
        self._flight.finish_first()
        if chunk is not None:
            self._free.append(chunk)


def _bytes_of(tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """A tensor as 1-D bytes, and whether they are its own memory, on the CPU."""
    if tensor.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu"), False
    dense = tensor.detach()
    if dense.element_size() == 1:  # torch has no copy for some of the narrow dtypes
        dense = dense.view(torch.uint8)
    dense = dense.resolve_conj().resolve_neg().contiguous()
    own = dense.data_ptr() == tensor.data_ptr() and dense.device.type == "cpu"
    return _tensor.cast_to_byte_tensor(dense), own
