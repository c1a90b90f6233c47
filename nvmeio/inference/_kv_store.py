"""Where past keys and values go: blocks of tokens in a file without a name, or in memory."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

from nvmeio import files
from nvmeio._io.staging import new_staging
from nvmeio._plan import PAGE_BYTES
from nvmeio._storage import crc32
from nvmeio._storage.private import open_nameless
from nvmeio.errors import IntegrityError
from nvmeio.handle import AioHandle
from nvmeio.operation import Operation


class KVBlock(NamedTuple):
    """A run of tokens of one layer: keys and values, [2, batch, heads, tokens, head size]."""

    shape: tuple[int, ...]
    offset: int  # in the file
    room: int  # bytes there, whole pages
    memory: torch.Tensor | None  # the bytes, where they are kept in memory or still being written
    sum: int | None = None  # the CRC-32 of the bytes, of what is in a file


class KVStore:
    """Where blocks go.

    Args:
        directory: A file in it, which has no name any more once it is open; None keeps the bytes in
            page-locked memory.
        handle: Moves the bytes, and stays open.
        checksum: Compare what comes back from the file with what was put there.

    Attributes:
        written_bytes: Bytes that were put away so far.
        read_bytes: Bytes that were brought back.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        handle: AioHandle | None,
        checksum: bool = True,
    ) -> None:
        self._checksum = checksum
        self.written_bytes = 0
        self.read_bytes = 0
        self._end = 0
        self._free: list[tuple[int, int]] = []  # offset and bytes, ascending, not adjacent
        self._handle = handle
        self._flying: list[Operation] = []
        self._file: files.File | None = None
        if directory is not None:
            self._file = open_nameless(directory)

    def put(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[KVBlock, Operation | None]:
        """Begin to put tokens away."""
        shape = (2, *keys.shape)
        nbytes = 2 * keys.nbytes
        self.written_bytes += nbytes
        memory = room_for(nbytes, keys.device.type == "cuda")
        both = memory[:nbytes].view(keys.dtype).view(shape)
        both[0].copy_(keys)
        both[1].copy_(values)
        if self._file is None or self._handle is None:
            return KVBlock(shape, 0, 0, memory), None
        offset = self._place(memory.nbytes)
        writing = self._handle.async_pwrite(memory, self._file, offset)
        self._started(writing)
        # While it is written: it only reads the memory.
        found = crc32.of_memory(memory.data_ptr(), nbytes) if self._checksum else None
        return KVBlock(shape, offset, memory.nbytes, None, found), writing

    def _place(self, nbytes: int) -> int:
        """Where in the file there is room: where blocks were forgotten, or at its end."""
        for number, (offset, room) in enumerate(self._free):
            if room >= nbytes:
                left = [(offset + nbytes, room - nbytes)] if room > nbytes else []
                self._free[number : number + 1] = left
                return offset
        offset, self._end = self._end, self._end + nbytes
        return offset

    def forget(self, blocks: Sequence[KVBlock]) -> None:
        """Let the room of blocks be written again; nothing of them may be in flight.

        Beam search writes all of a cache anew for each token: without this, the file would grow by
        as much each time.
        """
        free = sorted([*self._free, *((b.offset, b.room) for b in blocks if b.room)])
        self._free = []
        for offset, room in free:
            if self._free and sum(self._free[-1]) == offset:
                offset, room = self._free[-1][0], self._free.pop()[1] + room
            self._free.append((offset, room))

    def _started(self, operation: Operation) -> None:
        # A failure is told by the layer whose tokens they are; the handle need not tell it again.
        left = (o for o in self._flying if not o.done() or o.exception() is not None)
        self._flying = [*left, operation]

    def settle(self) -> None:
        """Wait for whatever was started, wanted or not: it holds descriptors and memory."""
        flying, self._flying = self._flying, []
        for operation in flying:
            with contextlib.suppress(concurrent.futures.CancelledError):
                operation.exception()

    def get(self, block: KVBlock, memory: torch.Tensor) -> Operation | None:
        """Begin to bring a block back into `memory`; None where it is there at once."""
        self.read_bytes += memory.nbytes
        if block.memory is not None or self._file is None or self._handle is None:
            memory.copy_(block.memory)  # type: ignore[arg-type]
            return None
        reading = self._handle.async_pread(memory, self._file, block.offset)
        self._started(reading)
        return reading

    def check(self, block: KVBlock, memory: torch.Tensor, what: str) -> None:
        """Compare what came back with what was put away.

        Args:
            block: Which one.
            memory: What is there now.
            what: The block, for the message.

        Raises:
            IntegrityError: They differ.
        """
        found = None if block.sum is None else crc32.of_tensor(memory)
        if found != block.sum and self._file is not None:
            raise IntegrityError(
                f"{self._file.path}: {what}, bytes [{block.offset}, "
                f"{block.offset + memory.nbytes}), is not what was written there: look at "
                "`dmesg` and `smartctl -a`, and start again with a new cache (checksum=False takes "
                "it as it is)",
                expected=f"CRC-32 {block.sum:08x}",
                found=f"{found:08x}",
            )

    def close(self) -> None:
        """Let go of the file, and with it of its blocks."""
        self.settle()
        if self._file is not None:
            self._file.close()


def room_for(nbytes: int, for_cuda: bool) -> torch.Tensor:
    whole = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
    return new_staging(whole, torch.device("cuda" if for_cuda else "cpu"))
