"""The names of blocks, kept whole: a file beside the table, with a record for each slot.

The table has digests, which lead nowhere back. A server that is to be told which blocks went, or
which are there after a restart, needs their names. A record is written before the table's, so a
block that counts has its name; readers compare its digest with the table's, so a record
that is damaged, or of another time, is found out.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

from nvmeio._storage.untrusted import open_own

_LENGTH = struct.Struct("<H")
_CHUNK_BYTES = 1 << 20


class WholeNames:
    """Names of up to `most_bytes` bytes, by slot."""

    def __init__(self, path: Path, most_bytes: int, slots: int) -> None:
        self._record_bytes = self.record_bytes(most_bytes)
        self._file = os.fdopen(open_own(path), "r+b", buffering=0)
        if os.fstat(self._file.fileno()).st_size > slots * self._record_bytes:
            self._file.truncate(slots * self._record_bytes)

    @staticmethod
    def record_bytes(most_bytes: int) -> int:
        """Bytes of the record of a slot."""
        return _LENGTH.size + most_bytes

    def clear(self) -> None:
        """Forget all names."""
        self._file.truncate(0)

    def put(self, slot: int, name: bytes) -> None:
        os.pwrite(self._file.fileno(), _LENGTH.pack(len(name)) + name, self._at(slot))

    def get(self, slot: int) -> bytes:
        """The name that was put last for a slot; anything if that is damaged."""
        return self._of(os.pread(self._file.fileno(), self._record_bytes, self._at(slot)))

    def among(self, slots: list[int]) -> Iterator[bytes]:
        """The names for slots in ascending order, a MiB of the file at a time."""
        per_chunk = max(_CHUNK_BYTES // self._record_bytes, 1)
        first, chunk = 0, b""
        for slot in slots:
            if not chunk or slot >= first + per_chunk:
                first = slot
                chunk = os.pread(
                    self._file.fileno(), per_chunk * self._record_bytes, self._at(slot)
                )
            at = (slot - first) * self._record_bytes
            yield self._of(chunk[at : at + self._record_bytes])

    def _at(self, slot: int) -> int:
        return slot * self._record_bytes

    @staticmethod
    def _of(record: bytes) -> bytes:
        if len(record) < _LENGTH.size:
            return b""
        (length,) = _LENGTH.unpack_from(record)
        return record[_LENGTH.size : _LENGTH.size + length]

    def close(self) -> None:
        self._file.close()
