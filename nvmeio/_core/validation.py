"""Comparing a transfer with what the page cache says: the `validate` of `pread` and `pwrite`."""

from __future__ import annotations

import os
from collections.abc import Callable

from nvmeio import files
from nvmeio._files.descriptors import Descriptors
from nvmeio._memory.tensors import Memory
from nvmeio.errors import IntegrityError, TransferError

_CHUNK_BYTES = 4 << 20


def comparison(
    memory: Memory, file: str | os.PathLike[str] | int | files.File, file_offset: int
) -> Callable[[], None]:
    """A function that compares memory with the file, and raises where they differ.

    Raises (when called):
        IntegrityError: With the file offset of the first difference and both bytes.
        TransferError: The file could not be read back.
    """

    def compare() -> None:
        readable = file
        if isinstance(file, int):
            readable = f"/proc/self/fd/{file}"  # it may be open for writing only
        opened = files.acquire(readable, False)
        try:
            _compare(memory, opened, file_offset)
        finally:
            opened.release()

    return compare


def _compare(memory: Memory, opened: Descriptors, file_offset: int) -> None:
    fd = opened.buffered_fd()
    for start in range(0, memory.nbytes, _CHUNK_BYTES):
        wanted = min(_CHUNK_BYTES, memory.nbytes - start)
        mine = memory.read(start, wanted)
        try:
            found = os.pread(fd, wanted, file_offset + start)
        except OSError as failed:
            raise TransferError(
                failed.errno or 5,
                operation="pread",
                path=opened.path,
                file_offset=file_offset,
                nbytes=memory.nbytes,
                transferred=start,
            ) from failed
        if found == mine:
            continue
        at = next((i for i, (a, b) in enumerate(zip(mine, found, strict=False)) if a != b), None)
        at = len(found) if at is None else at
        expected, there = mine[at : at + 1].hex(), found[at : at + 1].hex() or "end of file"
        raise IntegrityError(
            f"{opened.path}: byte {file_offset + start + at} is 0x{there} in the page cache, "
            f"0x{expected} in the tensor",
            expected=mine[at : at + 16],
            found=found[at : at + 16],
        )
