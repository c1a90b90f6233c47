"""Which bytes of a packed model lie on which of several drives. No I/O here.

Each drive has a file with the header and the places of a whole one, and holds of each record what
it is dealt (`Striping`), the rest being holes. Headers differ in the drive's number alone, and say
how everything is dealt, with a CRC-32 of each piece. Of a table that is looked up by its rows a
piece goes on for a row more, so that each row lies on one drive.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from nvmeio._io.drives import Striping


class Piece(NamedTuple):
    """A run of bytes behind the header.

    Attributes:
        drive: Who is asked for it.
        start: First byte.
        end: Behind the last that this drive is asked for.
        held_end: Behind the last that lies there.
    """

    drive: int
    start: int
    end: int
    held_end: int


class Dealing:
    """What each drive holds.

    Args:
        weights: Of the drives; positive integers.
        records: [start, end) behind the header, one behind the other from 0 on, in whole pages; and
            how far a piece of it goes on beyond its end.

    Raises:
        ValueError, TypeError: They are none.

    Attributes:
        weights: As given.
        records: As given.
        pieces: All of them, in the order of the file.
    """

    def __init__(self, weights: Sequence[int], records: Sequence[tuple[int, int, int]]) -> None:
        if len(weights) < 2 or any(type(each) is not int or each < 1 for each in weights):
            raise ValueError(f"{weights!r} are no weights of several drives")
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
        """Who is asked for bytes behind the header: drive, first byte and behind the last."""
        found: list[tuple[int, int, int]] = []
        for piece in self.pieces[max(0, bisect.bisect_right(self._starts, start) - 1) :]:
            if piece.start >= end:
                break
            low, high = max(piece.start, start), min(piece.end, end)
            if low < high:
                found.append((piece.drive, low, high))
        return found

    def describe(self, drive: int, sums: Sequence[int]) -> str:
        """What the file of a drive says; as long on all drives, whatever the checksums are."""
        return json.dumps(
            {
                "drive": f"{drive:05d}",
                "weights": self.weights,
                "records": self.records,
                "crc32": [f"{value:08x}" for value in sums],
            }
        )


class DrivePart(NamedTuple):
    """What the file of one drive holds.

    Attributes:
        drive: Which.
        dealing: What all of them hold.
        sums: The CRC-32 of each piece.
    """

    drive: int
    dealing: Dealing
    sums: tuple[int, ...]

    @property
    def drives(self) -> int:
        """How many there are."""
        return len(self.dealing.weights)


def read(told: dict[str, Any]) -> DrivePart | None:
    """What `Dealing.describe` wrote, parsed; None if it speaks of no drive.

    Raises:
        ValueError, KeyError, TypeError: It is damaged.
    """
    if "drive" not in told:
        return None
    dealing = Dealing(told["weights"], [(start, end, more) for start, end, more in told["records"]])
    drive = int(told["drive"])
    if not 0 <= drive < len(dealing.weights):
        raise ValueError(f"there is no drive {drive} of {len(dealing.weights)}")
    sums = tuple(int(value, 16) for value in told["crc32"])
    if len(sums) != len(dealing.pieces):
        raise ValueError(f"{len(dealing.pieces)} pieces have {len(sums)} checksums")
    return DrivePart(drive, dealing, sums)
