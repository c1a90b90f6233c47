"""Whether the ranks that write one file together save the same.

They tell each other a digest of their layouts, and who differs is told in which way.
"""

from __future__ import annotations

import json
import re
import struct
from bisect import bisect_right
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from nvmeio._formats import torch_zip
from nvmeio._formats.torch_layout import FileLayout, KnownBytes

_LENGTH = struct.Struct("<Q")

# Where a tensor was, as the pickle says it: each rank has a device of its own. A str of the
# pickle's protocols 1 to 3, or of 4 and later; the length stands before it.
_LOCATION = re.compile(rb"(?:X.\x00\x00\x00|\x8c.)([a-z]+):\d+", re.DOTALL)


def fingerprint(layout: FileLayout) -> dict[str, Any]:
    """What must be the same on all ranks that write one file, and small.

    Returns:
        "pieces": of all bytes but the storages'; "state": of the storages' number, order and sizes
        and of the pickle, whatever device each tensor was on; "sizes": of the storages alone;
        "records" and "nbytes": how many storages, and of how many bytes.
    """
    pieces = sha256()
    for piece in layout.pieces:
        pieces.update(f"{piece.offset} {len(piece.data)} ".encode())
        pieces.update(piece.data)
    sizes = sha256(repr([record.nbytes for record in layout.records]).encode())
    state = sizes.copy()
    state.update(_LOCATION.sub(rb"\1", _pickle_of(layout)))
    return {
        "pieces": pieces.hexdigest(),
        "state": state.hexdigest(),
        "sizes": sizes.hexdigest(),
        "records": len(layout.records),
        "nbytes": layout.data_nbytes,
    }


def _pickle_of(layout: FileLayout) -> bytes:
    starts = [piece.offset for piece in layout.pieces]

    def read(offset: int, nbytes: int) -> bytes:
        """Bytes of one piece; fewer where it ends."""
        piece = layout.pieces[max(bisect_right(starts, offset) - 1, 0)]
        return piece.data[offset - piece.offset : offset - piece.offset + nbytes]

    def read_many(wanted: Sequence[tuple[int, int]]) -> list[bytes]:
        return [read(offset, nbytes) for offset, nbytes in wanted]

    archive = torch_zip.parse(read_many, layout.nbytes, "the skeleton of the checkpoint")
    entry = archive.records()["data.pkl"]
    return read(entry.offset, entry.nbytes)


def explain(plans: Sequence[dict[str, Any]]) -> str | None:
    """How the ranks' plans for one file differ; None if they save the same."""
    first = plans[0]
    for rank, plan in enumerate(plans[1:], 1):
        for name, what in (
            ("shared", "with shared={}"),
            ("step", "step {}"),
            ("layout", "layout {!r}"),
            ("checksum", "checksum={}"),
            ("writers", "with writers={!r}"),
            ("records", "{} storages"),
            ("nbytes", "{} bytes of storages"),
        ):
            if plan[name] != first[name] and name in _COMPARED[first["layout"]]:
                mine, its = what.format(first[name]), what.format(plan[name])
                return f"rank 0 saves {mine}, rank {rank} {its}"
        if first["layout"] == "one":
            for name, what in (
                ("sizes", "the sizes or the order of its storages"),
                ("state", "its structure, names, shapes, dtypes or values that are no tensors"),
            ):
                if plan[name] != first[name]:
                    return f"rank {rank}'s state differs from rank 0's in {what}"
    return None


_COMPARED = {
    "one": ("shared", "step", "layout", "checksum", "writers", "records", "nbytes"),
    "per_rank": ("shared", "step", "layout", "checksum"),
}


def pieces_to_bytes(layout: FileLayout) -> bytes:
    """All of a layout but the storages' own bytes, for ranks that have the same storages."""
    told = {
        "nbytes": layout.nbytes,
        "pieces": [(piece.offset, len(piece.data)) for piece in layout.pieces],
        "records": [(record.offset, record.crc_at) for record in layout.records],
    }
    head = json.dumps(told).encode()
    return b"".join([_LENGTH.pack(len(head)), head, *(piece.data for piece in layout.pieces)])


def with_pieces(layout: FileLayout, data: bytes) -> FileLayout:
    """A layout with what another rank's `pieces_to_bytes` told in place of its own."""
    (length,) = _LENGTH.unpack_from(data)
    at = _LENGTH.size + length
    told = json.loads(data[_LENGTH.size : at])
    pieces: list[KnownBytes] = []
    for offset, nbytes in told["pieces"]:
        pieces.append(KnownBytes(offset, data[at : at + nbytes]))
        at += nbytes
    records = [
        record._replace(offset=offset, crc_at=tuple(crc_at))
        for record, (offset, crc_at) in zip(layout.records, told["records"], strict=True)
    ]
    return FileLayout(told["nbytes"], pieces, records)
