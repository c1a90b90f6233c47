"""Where the parts of a unit lie in its slot, and the reads that bring them there. No I/O here.

A file's pages are read into the slot's pages: a tensor lies at the same offset within its memory
page as within its file page, so that direct I/O needs no bounce, and at the alignment at which a
memory-mapped file would have it. (Matrix kernels give other last bits at other alignments of 16
bytes: the same alignment is part of "the same logits, bit for bit".) Neighbours in a file are one
read. What is put together from several pieces has an address of its own, aligned as torch's
allocator aligns, and its pieces are bounced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nvmeio._io.span_plan import HOLE_BYTES
from nvmeio._plan import PAGE_BYTES
from nvmeio.inference._weights import Part, Piece


class Read(NamedTuple):
    """One read: [start, end) of a file, to byte `at` of the slot."""

    file: int
    start: int
    end: int
    at: int


class Layout(NamedTuple):
    """The slot of one unit.

    Attributes:
        nbytes: Whole pages.
        starts: For each part, the slot's byte at which it begins.
        reads: What fills every part but those of experts.
        experts: For each expert, the reads that fill its share of those parts.
        all_experts: The same for all of them, as few reads.
    """

    nbytes: int
    starts: tuple[int, ...]
    reads: tuple[Read, ...]
    experts: tuple[tuple[Read, ...], ...] = ()
    all_experts: tuple[Read, ...] = ()


def lay_out(
    parts: Sequence[Part],
    sizes: Sequence[int],
    experts: Sequence[bool] = (),
    count: int = 0,
    own_alignment: bool = False,
) -> Layout:
    """Plan a slot.

    Args:
        parts: What the unit consists of.
        sizes: For each file, its size in bytes.
        experts: For each part, whether its first dimension counts experts, that are read when they
            are needed; all of them none by default.
        count: How many experts there are.
        own_alignment: A tensor that lies on an odd address for 16 bytes in its file is moved to one
            that torch's allocator would give it, which costs a bounce.

    Returns:
        The plan. Reads begin on a page boundary in file and memory wherever file and memory agree.
    """
    marks = list(experts) or [False] * len(parts)
    starts = [0] * len(parts)
    reads: list[Read] = []
    end = 0
    plain = [
        index
        for index, part in enumerate(parts)
        if len(part.pieces) == 1 and not marks[index] and _may_stay(part, own_alignment)
    ]
    plain.sort(key=lambda index: parts[index].pieces[0][:2])
    for index in plain:
        piece = parts[index].pieces[0]
        first, last = _floor(piece.offset), _read_to(piece.offset + piece.nbytes, sizes[piece.file])
        run = reads[-1] if reads else None
        if run is not None and run.file == piece.file and first - run.end <= HOLE_BYTES:
            reads[-1] = run = run._replace(end=max(run.end, last))
        else:
            run = Read(piece.file, first, last, end)
            reads.append(run)
        starts[index] = run.at + piece.offset - run.start
        end = _ceil(run.at + run.end - run.start)
    by_expert: list[list[Read]] = [[] for _ in range(count)]
    together: list[Read] = []
    for index, part in enumerate(parts):
        if index in plain or not part.pieces:
            continue
        whole = len(part.pieces) == 1 and _may_stay(part, own_alignment)
        shift = part.pieces[0].offset % PAGE_BYTES if whole else 0
        starts[index] = end + shift
        moved = [_read(piece, starts[index], sizes, whole) for piece in _joined(part.pieces)]
        if marks[index]:
            together += moved
            share = part.nbytes // count
            for number in range(count):
                pieces = _joined(_cut(part.pieces, number * share, (number + 1) * share))
                by_expert[number] += [_read(piece, starts[index], sizes, whole) for piece in pieces]
        else:
            reads += moved
        end = _ceil(starts[index] + part.nbytes)
    return Layout(
        max(end, PAGE_BYTES),
        tuple(starts),
        tuple(reads),
        tuple(map(tuple, by_expert)),
        tuple(together),
    )


def _may_stay(part: Part, own_alignment: bool) -> bool:
    least = 16 if own_alignment else part.dtype.itemsize
    return part.pieces[0].offset % least == 0


def _read(piece: Piece, start: int, sizes: Sequence[int], agrees: bool) -> Read:
    at = start + piece.at
    if not agrees:
        return Read(piece.file, piece.offset, piece.offset + piece.nbytes, at)
    # In whole pages, which is no more work for the drive. What lies beside in memory is then what
    # lies beside in the file: the same bytes again, or room that nobody uses.
    first = _floor(piece.offset)
    last = _read_to(piece.offset + piece.nbytes, sizes[piece.file])
    return Read(piece.file, first, last, at - (piece.offset - first))


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Pieces that follow each other in file and memory as one."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if (
            last is not None
            and last.file == piece.file
            and last.offset + last.nbytes == piece.offset
            and last.at + last.nbytes == piece.at
        ):
            found[-1] = last._replace(nbytes=last.nbytes + piece.nbytes)
        else:
            found.append(piece)
    return found


def _cut(pieces: Sequence[Piece], first: int, last: int) -> list[Piece]:
    """What of the pieces lies in [first, last) of their part."""
    found = []
    for piece in pieces:
        start, end = max(piece.at, first), min(piece.at + piece.nbytes, last)
        if start < end:
            offset = piece.offset + start - piece.at
            found.append(Piece(piece.file, offset, end - start, start))
    return found


def _floor(position: int) -> int:
    return position // PAGE_BYTES * PAGE_BYTES


def _ceil(position: int) -> int:
    return -(-position // PAGE_BYTES) * PAGE_BYTES


def _read_to(end: int, size: int) -> int:
    return min(_ceil(end), size)
