"""A part of a checkpoint on the drive of one rank: a page that says which, then its bytes.

The bytes are those of a torch archive, [start, end) of it in whole pages. No part is an archive by
itself: one that looked like it would be loaded with zeros in place of what other drives have.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import NamedTuple

from nvmeio._formats.torch_archives.torch_layout import FileLayout, KnownBytes
from nvmeio._formats.torch_archives.torch_writing import Crc
from nvmeio._formats.torch_archives.torch_zip import PART_MAGIC
from nvmeio._pages import PAGE_BYTES
from nvmeio._storage import crc32
from nvmeio.errors import IntegrityError
from nvmeio.files import File, read_buffered

HEAD_BYTES = PAGE_BYTES

_SUM_AND_LENGTH = struct.Struct("<II")


class PartHead(NamedTuple):
    """The first page of a part.

    Attributes:
        step: The step of the checkpoint.
        save: The id of its save; the same on all of its parts, and on no other's.
        kind: "part" of one archive that all ranks have, or "rank": all of an archive of one rank.
        number: Which part, from 0.
        parts: How many there are.
        nbytes: The size of the archive.
        start: The first of its bytes that are here.
        end: The first behind them; a page boundary, at or past the end of the archive.
        sum: The CRC-32 of the bytes here; None if none was computed.
    """

    step: int
    save: str
    kind: str
    number: int
    parts: int
    nbytes: int
    start: int
    end: int
    sum: int | None

    @property
    def file_nbytes(self) -> int:
        return HEAD_BYTES + self.end - self.start

    @property
    def what(self) -> str:
        if self.kind == "rank":
            return f"the state of rank {self.number} of {self.parts} of step {self.step}"
        return (
            f"part {self.number} of 0 to {self.parts - 1} of step {self.step}, bytes "
            f"[{self.start}, {min(self.end, self.nbytes)}) of {self.nbytes}"
        )


def pack(head: PartHead) -> bytes:
    text = json.dumps(head._asdict()).encode()
    page = PART_MAGIC + _SUM_AND_LENGTH.pack(crc32.of_bytes(text), len(text)) + text
    return page.ljust(HEAD_BYTES, b"\0")


def unpack(page: bytes, file_nbytes: int, path: str) -> PartHead:
    """Parse a part's first page (or all of a shorter file); IntegrityError if it is damaged."""
    at = len(PART_MAGIC) + _SUM_AND_LENGTH.size
    wrong = "its first page is not that of a part"
    try:
        if page.startswith(PART_MAGIC) and len(page) == HEAD_BYTES:
            crc, length = _SUM_AND_LENGTH.unpack_from(page, len(PART_MAGIC))
            text = page[at : at + length]
            wrong = "its first page is damaged"
            if crc32.of_bytes(text) == crc:
                head = PartHead(**json.loads(text))
                if head.file_nbytes == file_nbytes and 0 <= head.start <= head.end:
                    return head
                wrong = f"it has {file_nbytes} bytes, and should have {head.file_nbytes}"
    except (ValueError, TypeError, struct.error) as failed:
        wrong = f"its first page cannot be read: {failed}"
    raise IntegrityError(f"{path}: {wrong}", expected="a part of a checkpoint", found=wrong)


def head_of(file: File) -> PartHead:
    """The first page of an open part; IntegrityError if it is damaged."""
    nbytes = file.size()
    return unpack(read_buffered(file, 0, min(nbytes, HEAD_BYTES)), nbytes, file.path)


def sum_of(
    layout: FileLayout, start: int, end: int, mine: Sequence[Crc], joined: Sequence[int]
) -> int:
    """The CRC-32 of [start, end) of a file, from those of the records' pieces in it.

    `start` is on a page. `mine` has the CRC of each piece of a record in it (`write_part`),
    `joined` that of each record whose CRC's place lies in it, by the record's index.
    """
    crcs = {each.record: each.crc for each in mine}
    total, position = 0, start
    for begin, stop, content in layout.with_crcs(joined).contents():
        low, high = max(begin, start), min(stop, end)
        if low >= high:
            continue
        total = crc32.of_bytes(bytes(low - position), total)
        if isinstance(content, KnownBytes):
            part = content.data[low - content.offset : high - content.offset]
            total = crc32.of_bytes(part, total)
        else:
            total = crc32.combine(total, crcs[content[0]], high - low)
        position = high
    return crc32.of_bytes(bytes(end - position), total)
