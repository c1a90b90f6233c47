"""Where past keys and values go: blocks of tokens in a file without a name, or in memory."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from nvmeio._files.plan import PAGE_BYTES, round_up
from nvmeio._io.drives import LEAST_CHUNK_BYTES, DriveHandles, StripedFile, Striping, weights_of
from nvmeio._io.inflight import new_staging
from nvmeio._storage import crc32
from nvmeio._storage.guarded import open_nameless
from nvmeio.errors import IntegrityError
from nvmeio.files import File
from nvmeio.handle import AioHandle
from nvmeio.operation import Operation

# Of a file over several drives, for each: blocks of a few of them are brought back by all at once.
_BAND_BYTES = 4 * LEAST_CHUNK_BYTES


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
            page-locked memory. Or one on each of several drives, which get parts of the bytes in
            proportion to how fast they are.
        handle: Moves the bytes, and stays open.
        checksum: Compare what comes back from the file with what was put there.

    Attributes:
        written_bytes: Bytes that were put away so far.
        read_bytes: Bytes that were brought back.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None,
        handle: AioHandle | DriveHandles | None,
        checksum: bool = True,
    ) -> None:
        self._checksum = checksum
        self.written_bytes = 0
        self.read_bytes = 0
        self._end = 0
        self._free: list[tuple[int, int]] = []  # offset and bytes, ascending, not adjacent
        one = directory is None or isinstance(directory, (str, os.PathLike))
        given: Any = [directory] if one else directory
        directories = [os.fspath(each) for each in given if each is not None]
        if isinstance(handle, AioHandle):
            handle = DriveHandles(handle, directories)
        self._handles = handle
        self._flying: list[Operation] = []
        self._weights = weights_of(directories, reads=1.0, writes=1.0)
        self._bands = 0
        self._files: list[File] = []
        self._file: StripedFile | None = None
        try:
            for each in directories:
                self._files.append(open_nameless(each))
        except BaseException:
            for file in self._files:
                file.close()
            raise
        if self._files:
            self._reach(1)

    def _reach(self, nbytes: int) -> None:
        """Have a striping of at least so many bytes. What lies where does not change."""
        band = _BAND_BYTES * len(self._files)
        if self._file is None or self._bands * band < nbytes:
            self._bands = max(2 * self._bands, -(-nbytes // band))
            self._file = StripedFile(self._files, Striping(self._weights, [band] * self._bands))

    def _begun(self, memory: torch.Tensor, offset: int, writing: bool) -> list[Operation]:
        """Begin to move bytes from `offset` of the file on."""
        begun: list[Operation] = []
        if self._file is None or self._handles is None:
            raise RuntimeError("there is no file")
        begin = self._handles.async_pwrite if writing else self._handles.async_pread
        for span in self._file.spans(offset, memory.nbytes):
            part = memory[span.start : span.start + span.nbytes]
            operation = begin(part, span.file, span.file_offset)
            self._started(operation)
            begun.append(operation)
        return begun

    def put(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[KVBlock, list[Operation]]:
        """Begin to put tokens away."""
        shape = (2, *keys.shape)
        nbytes = 2 * keys.nbytes
        self.written_bytes += nbytes
        memory = room_for(nbytes, keys.device.type == "cuda")
        both = memory[:nbytes].view(keys.dtype).view(shape)
        both[0].copy_(keys)
        both[1].copy_(values)
        if self._file is None or self._handles is None:
            return KVBlock(shape, 0, 0, memory), []
        offset = self._place(memory.nbytes)
        writing = self._begun(memory, offset, writing=True)
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
        self._reach(self._end)
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

    def get(self, block: KVBlock, memory: torch.Tensor) -> list[Operation]:
        """Begin to bring a block back into `memory`; nothing where it is there at once."""
        self.read_bytes += memory.nbytes
        if block.memory is not None:
            memory.copy_(block.memory)
            return []
        return self._begun(memory, block.offset, writing=False)

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
                f"{self._file.describe(block.offset, memory.nbytes)}: {what}, is not what was "
                "written there: look at `dmesg` and `smartctl -a`, and start again with a new "
                "cache (checksum=False takes it as it is)",
                expected=f"CRC-32 {block.sum:08x}",
                found=f"{found:08x}",
            )

    def close(self) -> None:
        """Let go of the file, and with it of its blocks."""
        self.settle()
        for file in self._files:
            file.close()


def room_for(nbytes: int, for_cuda: bool) -> torch.Tensor:
    return new_staging(round_up(nbytes, PAGE_BYTES), torch.device("cuda" if for_cuda else "cpu"))
