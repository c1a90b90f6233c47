"""The index of a packed file, and the checksums in it. No I/O here.

It is a text in the metadata of a safetensors file: how weights were quantised, and a CRC-32 of each
tensor's bytes, or one for each of several shares of equal length (fused experts). Padding between
tensors is zeros. The fused experts of a module are one tensor of bytes, [experts, bytes of each]:
what an expert has of each weight lies side by side, and the index says where. The header's own
CRC-32 stands beside the index, computed as if it were ``00000000``, and the index says that it
does. Files of before lack it, or all checksums.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nvmeio._formats.safetensors.headers import TensorEntry
from nvmeio._io.drives import Striping
from nvmeio._pages import PAGE_BYTES, round_down
from nvmeio._storage import crc32
from nvmeio.errors import counted

KEY = "nvmeio.pack"
VERSION = 1
# The version of files with weights in schemes of others (FP8, MXFP4); earlier releases refuse it.
_WITH_SCHEMES = 2
# The version of files whose fused experts lie side by side; earlier releases refuse it.
_WITH_EXPERTS = 3
_VERSIONS = (VERSION, _WITH_SCHEMES, _WITH_EXPERTS)
# The ends of the names of tensors that have the experts of a module.
EXPERTS = ".nvmeio_experts"
PADDING = "nvmeio.padding."
SEAL = "nvmeio.pack.header"
OPEN_SEAL = "00000000"

# The key for a part: the file of one rank or drive, with the places of a whole file and a part of
# its bytes.
PART = "nvmeio.pack.part"
PART_NAME = "model.safetensors.part"  # which nobody takes for the whole

# A quantised weight is several tensors, of these names: three, or two without minima. Transformers
# ignores them, and begins with random weights: so a file that has some does not have the name that
# transformers opens.
SUFFIXES = (".nvmeio_steps", ".nvmeio_scales", ".nvmeio_minima")
QUANTISED_NAME = "model-packed.safetensors"

# Quotes within a text are written \", so that this stands nowhere else in a header.
_BEFORE_SEAL = f'"{SEAL}":"'.encode()


class PackedPart(NamedTuple):
    """The file of one rank: its [start, end) spans behind the header, and the CRC-32 of each."""

    rank: int
    ranks: int
    spans: tuple[tuple[int, int], ...]
    sums: tuple[int, ...]


class Share(NamedTuple):
    """Bytes of a tensor, [start, end) in the packed file, and their CRC-32."""

    name: str
    start: int
    end: int
    sum: int


def version_for(is_ours: bool, has_experts: bool) -> int:
    """The version of an index.

    `is_ours`: nvmeio quantised all that is quantised. `has_experts`: fused ones, side by side.
    """
    if has_experts:
        return _WITH_EXPERTS
    return VERSION if is_ours else _WITH_SCHEMES


def read(text: str) -> dict[str, Any]:
    """Parse the index; ValueError, KeyError or TypeError if it is none, or of a later version."""
    index: dict[str, Any] = json.loads(text)
    if index["version"] not in _VERSIONS:
        known = " or ".join(map(str, _VERSIONS))
        raise ValueError(f"it is of version {index['version']}, not {known}")
    return index


class ExpertsFacts(NamedTuple):
    """The experts of a module in a packed file: how many, and bytes of each, in whole pages."""

    module: str
    number: int
    nbytes: int


def experts_of(metadata: Mapping[str, str]) -> list[ExpertsFacts]:
    """The experts that lie side by side, in the order of the file; none if it says nothing."""
    try:
        told = read(metadata[KEY]).get("experts", {})
        return [ExpertsFacts(m, int(of["number"]), int(of["nbytes"])) for m, of in told.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []


def sums_in(
    index: Mapping[str, Any], entries: Mapping[str, TensorEntry]
) -> dict[str, tuple[int, ...]] | None:
    """The checksums of each tensor's shares, or None; raises as `read`, also for other tensors."""
    given = index.get("crc32")
    if given is None:
        return None
    sums = {}
    for name, entry in entries.items():
        if name.startswith(PADDING):
            continue
        texts = given[name]
        if not isinstance(texts, list) or not texts or entry.nbytes % len(texts):
            raise ValueError(f"{name!r} lacks checksums of equal shares")
        if any(not isinstance(text, str) or len(text) != 8 for text in texts):
            raise ValueError(f"{name!r} has a malformed checksum")
        sums[name] = tuple(int(text, 16) for text in texts)
    return sums


def cuts(nbytes: int, ranks: int) -> list[int]:
    """Cuts of bytes into even parts of whole pages, one a rank: `ranks` + 1 places."""
    return [*(round_down(nbytes * rank // ranks, PAGE_BYTES) for rank in range(ranks)), nbytes]


def describe_part(
    rank: int, ranks: int, records: Sequence[tuple[int, int, bool]], sums: Sequence[int]
) -> str:
    """Describe the file of one rank; the text is as long on all ranks, whatever the checksums are.

    Each record is [start, end) behind the header, and whether each rank has all of it. `sums` are
    of what this rank has of each.
    """
    return json.dumps(
        {
            "rank": f"{rank:05d}",
            "ranks": f"{ranks:05d}",
            "records": [[start, end, int(whole)] for start, end, whole in records],
            "crc32": [f"{value:08x}" for value in sums],
        }
    )


def read_part(text: str) -> PackedPart | DrivePart:
    """Parse what `describe_part` or `Dealing.describe` wrote; raises as `read`."""
    told = json.loads(text)
    of_drive = drive_part(told)
    if of_drive is not None:
        return of_drive
    rank, ranks = int(told["rank"]), int(told["ranks"])
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} must be from 0 to {ranks - 1}")
    spans = []
    for start, end, whole in told["records"]:
        if not 0 <= start <= end:
            raise ValueError(f"a record is at [{start}, {end})")
        places = cuts(end - start, ranks)
        low, high = (start, end) if whole else (start + places[rank], start + places[rank + 1])
        spans.append((low, high))
    sums = tuple(int(value, 16) for value in told["crc32"])
    if len(sums) != len(spans):
        raise ValueError(f"{counted(len(spans), 'record')} with {counted(len(sums), 'checksum')}")
    return PackedPart(rank, ranks, tuple(spans), sums)


def in_words(part: PackedPart | DrivePart) -> str:
    if isinstance(part, DrivePart):
        return f"part {part.drive} of {counted(part.drives, 'directory')}"
    return f"the part of rank {part.rank} of {part.ranks}"


def part_in_words(metadata: Mapping[str, str]) -> str:
    """Which part of a packed model a file with this metadata holds; "" for none."""
    try:
        return in_words(read_part(metadata[PART]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ""


def spans_of(part: PackedPart | DrivePart) -> list[tuple[int, int, int]]:
    """The contents of a part's file behind the header: [start, end), and the CRC-32."""
    if isinstance(part, DrivePart):
        pieces = zip(part.dealing.pieces, part.sums, strict=True)
        return [(p.start, p.held_end, value) for p, value in pieces if p.drive == part.drive]
    return [(*span, value) for span, value in zip(part.spans, part.sums, strict=True)]


def shares_of(
    entries: Mapping[str, TensorEntry], sums: Mapping[str, tuple[int, ...]]
) -> list[Share]:
    """The ranges that have a checksum, in the order of the file; padding is zeros."""
    found = []
    for name, entry in entries.items():
        of = sums.get(name) or (crc32.of_bytes(bytes(entry.nbytes)),)
        nbytes = entry.nbytes // len(of)
        for number, value in enumerate(of):
            start = entry.start + number * nbytes
            found.append(Share(name, start, start + nbytes, value))
    return sorted(found, key=lambda share: share.start)


def sealed(prefix: bytes) -> bytes:
    """A header, its length before it, with its checksum put in the place kept for it."""
    at = prefix.index(_BEFORE_SEAL) + len(_BEFORE_SEAL)
    end = at + len(OPEN_SEAL)
    opened = prefix[:at] + OPEN_SEAL.encode() + prefix[end:]
    return opened[:at] + f"{crc32.of_bytes(opened):08x}".encode() + opened[end:]


def is_whole(prefix: bytes, index: Mapping[str, Any] | None) -> bool:
    """Whether a header (its length before it) equals the written one, as far as it has a checksum.

    `index` is None if the header seems to hold none.
    """
    if _BEFORE_SEAL not in prefix:
        return index is None or not index.get("sealed", False)
    return prefix == sealed(prefix)


def may_be_packed(prefix: bytes) -> bool:
    """Whether a header holds an index, or did before it was damaged."""
    return _BEFORE_SEAL in prefix or f'"{KEY}":"'.encode() in prefix


# The key for several drives. Each has a file with the header and the places of a whole one, and
# holds its pieces of each record (`Striping`); the rest are holes. Headers differ in the drive's
# number alone, and describe the whole division, with a CRC-32 of each piece. In a table that is
# looked up by its rows, a piece goes on for a row more: each row lies on one drive.


class Piece(NamedTuple):
    """A run behind the header: a drive has [start, held_end), and is asked for [start, end)."""

    drive: int
    start: int
    end: int
    held_end: int


class Dealing:
    """The share of each drive: `pieces` has all pieces in the order of the file.

    `weights` are positive integers, one a drive. `records` are [start, end) behind the header, one
    behind the other from 0 on, in whole pages, each with how far a piece of it goes on beyond its
    end. Raises ValueError or TypeError if they are not.
    """

    def __init__(self, weights: Sequence[int], records: Sequence[tuple[int, int, int]]) -> None:
        if len(weights) < 2 or any(type(each) is not int or each < 1 for each in weights):
            raise ValueError(
                f"{weights!r} is not a list of two or more positive weights, one for each drive"
            )
        self.weights = tuple(weights)
        self.records = [(start, end, more) for start, end, more in records]
        at = 0
        for start, end, more in self.records:
            if start != at or end < start or more < 0:
                raise ValueError(f"a record is at [{start}, {end}), behind one that ends at {at}")
            at = end
        striping = Striping(self.weights, [end - start for start, end, _ in self.records])
        self.pieces: list[Piece] = []
        for start, end, more in self.records:
            for chunk in striping.spans(start, end - start):
                low = start + chunk.start
                high = low + chunk.nbytes
                self.pieces.append(Piece(chunk.drive, low, high, min(high + more, end)))
        after: dict[int, int] = {}  # of each drive, where its next piece begins
        for at in reversed(range(len(self.pieces))):
            piece = self.pieces[at]
            held_end = min(piece.held_end, after.get(piece.drive, piece.held_end))
            self.pieces[at] = piece._replace(held_end=held_end)
            after[piece.drive] = piece.start
        self._starts = [piece.start for piece in self.pieces]

    def spans(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """The drive, first byte and end of each run in [start, end) behind the header."""
        found: list[tuple[int, int, int]] = []
        for piece in self.pieces[max(0, bisect.bisect_right(self._starts, start) - 1) :]:
            if piece.start >= end:
                break
            low, high = max(piece.start, start), min(piece.end, end)
            if low < high:
                found.append((piece.drive, low, high))
        return found

    def describe(self, drive: int, sums: Sequence[int]) -> str:
        """Describe a drive's file; the text is as long on all drives, whatever the checksums."""
        return json.dumps(
            {
                "drive": f"{drive:05d}",
                "weights": self.weights,
                "records": self.records,
                "crc32": [f"{value:08x}" for value in sums],
            }
        )


class DrivePart(NamedTuple):
    """The number of a drive, what all drives hold, and the CRC-32 of each piece."""

    drive: int
    dealing: Dealing
    sums: tuple[int, ...]

    @property
    def drives(self) -> int:
        return len(self.dealing.weights)


def drive_part(told: dict[str, Any]) -> DrivePart | None:
    """Interpret what `Dealing.describe` wrote; None if that is not a drive's. Raises as `read`."""
    if "drive" not in told:
        return None
    dealing = Dealing(told["weights"], [(start, end, more) for start, end, more in told["records"]])
    drive = int(told["drive"])
    if not 0 <= drive < len(dealing.weights):
        raise ValueError(f"there is no drive {drive} of {len(dealing.weights)}")
    sums = tuple(int(value, 16) for value in told["crc32"])
    if len(sums) != len(dealing.pieces):
        raise ValueError(
            f"{counted(len(dealing.pieces), 'piece')} with {counted(len(sums), 'checksum')}"
        )
    return DrivePart(drive, dealing, sums)
