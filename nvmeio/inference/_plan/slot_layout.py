"""The layout of a slot: the source of each weight, and its place. No I/O here.

A weight is one tensor of a checkpoint, or put together from several, or quantised.

A file's pages are read into the slot's pages: a tensor lies at the same offset within its memory
page as within its file page, so that direct I/O needs no bounce, and at the alignment at which a
memory-mapped file would have it. (Matrix kernels give other last bits at other alignments of 16
bytes: the same alignment is part of "the same logits, bit for bit".) Neighbours in a file are one
read. A tensor put together from several extents has an address of its own, aligned as torch's
allocator aligns, and its extents are bounced. Experts that `pack` wrote side by side lie in the
slot as in the file: all of a layer's are one read, and their weights have a stride.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from nvmeio._formats.safetensors.open_set import SafetensorsSet, StoredTensor
from nvmeio._io.spans import HOLE_BYTES, read_to
from nvmeio._pages import PAGE_BYTES, round_down, round_up
from nvmeio._residency.tiled_linear import row_bounds
from nvmeio._storage import crc32
from nvmeio.errors import IntegrityError
from nvmeio.inference._plan.quantization import Compute
from nvmeio.inference._plan.schemes import Scheme


class Read(NamedTuple):
    """One read: [start, end) of a file, to byte `at` of the slot."""

    file: int
    start: int
    end: int
    at: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    def part(self, slot: torch.Tensor) -> torch.Tensor:
        """Its bytes of the slot."""
        return slot[self.at : self.at + self.nbytes]


class SlotLayout(NamedTuple):
    """The slot of one unit, in whole pages.

    `starts` has the byte at which each part begins; `reads` fill them.
    """

    nbytes: int
    starts: tuple[int, ...]
    reads: tuple[Read, ...]


def lay_out(
    parts: Sequence[WeightPart],
    sizes: Sequence[int],
    own_alignment: bool = False,
) -> SlotLayout:
    """Plan a slot. Reads begin on a page boundary in file and memory wherever these agree.

    Args:
        parts: The unit's.
        sizes: The size of each file in bytes.
        own_alignment: A tensor that lies on an odd address for 16 bytes in its file is moved to one
            that torch's allocator would give it, which costs a bounce.
    """
    starts = [0] * len(parts)
    reads: list[Read] = []
    end = 0
    plain = [
        index
        for index, part in enumerate(parts)
        if len(part.extents) == 1 and part.region is None and _may_stay(part, own_alignment)
    ]
    plain.sort(key=lambda index: parts[index].extents[0][:2])
    for index in plain:
        extent = parts[index].extents[0]
        first = round_down(extent.offset, PAGE_BYTES)
        last = read_to(extent.offset + extent.nbytes, sizes[extent.file])
        run = reads[-1] if reads else None
        if run is not None and run.file == extent.file and first - run.end <= HOLE_BYTES:
            reads[-1] = run = run._replace(end=max(run.end, last))
        else:
            run = Read(extent.file, first, last, end)
            reads.append(run)
        starts[index] = run.at + extent.offset - run.start
        end = round_up(run.at + run.nbytes, PAGE_BYTES)
    region_starts: dict[ExpertRegion, int] = {}
    for index, part in enumerate(parts):
        if index in plain or not part.extents:
            continue
        region = part.region
        if region is not None:
            if region not in region_starts:
                region_starts[region] = end
                reads.append(region.read_of(range(region.number), end))
                end = round_up(end + region.number * region.nbytes, PAGE_BYTES)
            starts[index] = region_starts[region] + part.start_in_region
            continue
        whole = len(part.extents) == 1 and _may_stay(part, own_alignment)
        shift = part.extents[0].offset % PAGE_BYTES if whole else 0
        starts[index] = end + shift
        reads += [_read(extent, starts[index], sizes, whole) for extent in _joined(part.extents)]
        end = round_up(starts[index] + part.nbytes, PAGE_BYTES)
    return SlotLayout(max(end, PAGE_BYTES), tuple(starts), tuple(reads))


def dealt(
    layout: SlotLayout, spans: Callable[[int, int, int], Sequence[tuple[int, int, int]]]
) -> SlotLayout:
    """The same with reads of the files in which the bytes really lie (`SafetensorsSet.spans`)."""
    reads = (
        Read(file, start, end, read.at + start - read.start)
        for read in layout.reads
        for file, start, end in spans(read.file, read.start, read.end)
    )
    return layout._replace(reads=tuple(reads))


def _may_stay(part: WeightPart, own_alignment: bool) -> bool:
    return part.extents[0].offset % (16 if own_alignment else part.dtype.itemsize) == 0


def _read(extent: FileExtent, start: int, sizes: Sequence[int], agrees: bool) -> Read:
    at = start + extent.at
    if not agrees:
        return Read(extent.file, extent.offset, extent.offset + extent.nbytes, at)
    # Whole pages are as fast for the drive. The neighbouring bytes in memory are then the
    # neighbours in the file: the same bytes again, or unused room.
    first = round_down(extent.offset, PAGE_BYTES)
    last = read_to(extent.offset + extent.nbytes, sizes[extent.file])
    return Read(extent.file, first, last, at - (extent.offset - first))


def _joined(extents: Sequence[FileExtent]) -> list[FileExtent]:
    """Extents, joined where they follow each other in file and memory."""
    found: list[FileExtent] = []
    for file, offset, nbytes, at in extents:
        last = found[-1] if found else FileExtent(-1, 0, 0, 0)
        if (file, offset, at) == (last.file, last.offset + last.nbytes, last.at + last.nbytes):
            found[-1] = last._replace(nbytes=last.nbytes + nbytes)
        else:
            found.append(FileExtent(file, offset, nbytes, at))
    return found


def extents_within(extents: Sequence[FileExtent], first: int, last: int) -> list[FileExtent]:
    """The parts of extents that lie in [first, last) of their part."""
    found = []
    for extent in extents:
        start, end = max(extent.at, first), min(extent.at + extent.nbytes, last)
        if start < end:
            offset = extent.offset + start - extent.at
            found.append(FileExtent(extent.file, offset, end - start, start))
    return found


class FileExtent(NamedTuple):
    """Bytes [offset, offset + nbytes) of a file, which go to byte `at` of a part."""

    file: int
    offset: int
    nbytes: int
    at: int


class CutSums:
    """The checksums of a tensor's tiles: noted until all are known, and compared from then on.

    `whole` is the CRC-32 of the tensor, `sizes` are the bytes of each tile. `failures` counts wrong
    tiles: whoever uses several tiles in turn compares it before and after, since somebody else may
    have read a wrong tile again meanwhile.
    """

    def __init__(self, whole: int, sizes: Sequence[int]) -> None:
        self.whole = whole
        self._sizes = tuple(sizes)
        self.failures = 0
        self._noted: dict[int, int] = {}
        self._last: dict[int, int] = {}  # not noted anew with the others: it may be in memory yet
        self._right: dict[int, int] | None = None

    def agrees(self, tile: int, found: int) -> bool:
        """Whether a tile's checksum may be right; one thread at a time.

        False for the last tile to arrive means that one of them is wrong: all are noted anew.
        """
        if self._right is not None:
            return self._right[tile] == found
        if self._last.setdefault(tile, found) != found:
            self.failures += 1
        self._noted[tile] = self._last[tile] = found
        if len(self._noted) < len(self._sizes):
            return True
        total = 0
        for number, nbytes in enumerate(self._sizes):
            total = crc32.combine(total, self._noted[number], nbytes)
        noted, self._noted = self._noted, {}
        if total != self.whole:
            self.failures += 1
            return False
        self._right = noted
        return True

    @property
    def settled(self) -> bool:
        """Whether all tiles were there once, and were right together."""
        return self._right is not None


class ExpertRegion(NamedTuple):
    """The experts of a set, as `pack` writes them: each in whole pages, one behind the other.

    Attributes:
        name: The name of the tensor in the file that holds them.
        file: Index of the file.
        start: First byte there.
        number: How many experts there are.
        nbytes: Bytes of each.
        sums: The CRC-32 of each; none where they are not known.
    """

    name: str
    file: int
    start: int
    number: int
    nbytes: int
    sums: tuple[int, ...] = ()

    def read_of(self, experts: range, at: int) -> Read:
        """The read of some experts into a slot that has the whole region from byte `at` on."""
        first, last = experts.start * self.nbytes, experts.stop * self.nbytes
        return Read(self.file, self.start + first, self.start + last, at + first)


class WeightPart(NamedTuple):
    """One tensor that is read for a weight: contiguous, or with a stride between experts.

    Attributes:
        dtype: As stored.
        extents: The places of its bytes, ascending in `at`, without a hole.
        sums: CRC-32s of its bytes, in shares of equal length; none where they are not known. Only
            of a part of one extent.
        cut: For rows of another part: that part's checksums, and which of its tiles this is.
        region: The place of each expert's share of all weights, side by side; an extent each.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    extents: tuple[FileExtent, ...]
    sums: tuple[int, ...] = ()
    cut: tuple[CutSums, int] | None = None
    region: ExpertRegion | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def slot_nbytes(self) -> int:
        """Bytes from its first to its last in a slot, with those of others between its experts."""
        if self.region is None:
            return self.nbytes
        share = self.nbytes // self.region.number
        return (self.region.number - 1) * self.region.nbytes + share

    @property
    def start_in_region(self) -> int:
        """The first byte of the first expert's share in its region."""
        return 0 if self.region is None else self.extents[0].offset - self.region.start

    @property
    def strides(self) -> tuple[int, ...]:
        """The tensor's strides in its unit's slot, in elements; () for row-major order."""
        if self.region is None:
            return ()
        within = [math.prod(self.shape[place + 1 :]) for place in range(1, len(self.shape))]
        return (self.region.nbytes // self.dtype.itemsize, *within)


class Weight(NamedTuple):
    """One tensor of the model, with dtype and shape as the model wants it.

    Attributes:
        name: The model's name for it (of tied ones, the first).
        parts: The tensors that are read: the weight itself, or the parts that `quantised` combines.
        sources: Names in the checkpoint.
        order: The dimensions of the tensor that is read, in the model's order; None if equal.
        compute: How modules compute with it while it is packed; None where it is widened for them.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[WeightPart, ...]
    quantised: Scheme | None
    sources: tuple[str, ...]
    order: tuple[int, ...] | None = None
    compute: Compute | None = None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def lies_in_rows(self) -> bool:
        """Whether it is a matrix, and some rows of each part are those rows of it."""
        return len(self.shape) == 2 and all(
            part.shape[:1] == self.shape[:1] and len(part.shape) == 2 for part in self.parts
        )

    @property
    def widened_bytes(self) -> int:
        """Bytes of a matrix that is widened for a product, and let go after it; 0 for others."""
        if self.compute is None or self.quantised is None or self.quantised.multiplies:
            return 0
        return math.prod(self.shape[-2:]) * self.dtype.itemsize

    @property
    def converted_bytes(self) -> int:
        """Bytes that a conversion needs; 0 if weights are used as they are read."""
        if self.compute is not None:
            return 0
        if self.quantised is None and self.parts[0].dtype == self.dtype:
            return 0
        return math.prod(self.shape) * self.dtype.itemsize


class FoundWeight(NamedTuple):
    """One weight as a checkpoint holds it: its parts, their names, and their scheme."""

    parts: tuple[WeightPart, ...]
    sources: tuple[str, ...]
    quantised: Scheme | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        shapes = [part.shape for part in self.parts]
        return shapes[0] if self.quantised is None else self.quantised.shape_of(shapes)


def found_in(tensors: Sequence[StoredTensor], scheme: Scheme | None) -> FoundWeight:
    """A weight that is whole tensors of the checkpoint."""
    names = tuple(stored.name for stored in tensors)
    return FoundWeight(tuple(map(part_of, tensors)), names, scheme)


def part_of(stored: StoredTensor) -> WeightPart:
    """A whole tensor of the checkpoint."""
    dtype, shape = stored.entry.for_torch()
    extent = FileExtent(stored.file, stored.entry.start, stored.entry.nbytes, 0)
    return WeightPart(dtype, shape, (extent,) if extent.nbytes else ())


def stacked(
    lists: Sequence[Sequence[StoredTensor]], name: str, checkpoint: SafetensorsSet
) -> WeightPart:
    """`torch.cat([torch.stack(tensors) for tensors in lists], dim=1)`, as a place for each extent.

    `lists` are one list of tensors, or several of the same length (gate and up projections): the
    i-th of each lie one behind the other in the i-th row of the result. IntegrityError, which names
    the model's tensor, if lengths, dtypes or shapes do not fit each other.
    """
    counts = {len(tensors) for tensors in lists}
    first = part_of(lists[0][0])
    rows = 0
    for tensors in lists:
        shapes = {part_of(stored).shape for stored in tensors}
        dtypes = {part_of(stored).dtype for stored in tensors}
        tails = {shape[1:] for shape in shapes}
        if len(shapes) > 1 or dtypes != {first.dtype} or tails != {first.shape[1:]}:
            raise _mismatch(name, checkpoint, lists, "of one dtype and shape", (dtypes, shapes))
        rows += next(iter(shapes))[0]
    if len(counts) > 1:
        raise _mismatch(name, checkpoint, lists, "of each kind the same number", counts)
    extents: list[FileExtent] = []
    at = 0
    for number in range(len(lists[0])):
        for tensors in lists:
            entry = tensors[number].entry
            extents.append(FileExtent(tensors[number].file, entry.start, entry.nbytes, at))
            at += entry.nbytes
    shape = (len(lists[0]), rows, *first.shape[1:])
    return WeightPart(first.dtype, shape, tuple(extents))


def concatenated(
    tensors: Sequence[StoredTensor], name: str, checkpoint: SafetensorsSet
) -> WeightPart:
    """`torch.cat(tensors, dim=0)`, as a place for each extent; errors if they do not fit."""
    parts = [part_of(stored) for stored in tensors]
    tails = {(part.dtype, part.shape[1:]) for part in parts}
    if len(tails) > 1:
        raise _mismatch(name, checkpoint, [tensors], "of one dtype and width", tails)
    extents, at = [], 0
    for stored in tensors:
        extents.append(FileExtent(stored.file, stored.entry.start, stored.entry.nbytes, at))
        at += stored.entry.nbytes
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return WeightPart(parts[0].dtype, shape, tuple(extents))


def _mismatch(
    name: str,
    checkpoint: SafetensorsSet,
    lists: Sequence[Sequence[StoredTensor]],
    expected: object,
    found: object,
) -> IntegrityError:
    stored = lists[0][0]
    return IntegrityError(
        f"{name!r} cannot be put together from {stored.name!r} and others in "
        f"{checkpoint.files[stored.file].path}: they are not {expected} (found {found})",
        expected=expected,
        found=found,
    )


# Rows of a matrix that is too large for the window


class TileRows(NamedTuple):
    """Rows [first, last) of a weight, as a weight."""

    first: int
    last: int
    weight: Weight


def rows_of(weight: Weight, most: int) -> list[TileRows]:
    """Cut a linear layer's weight into tiles of about the same size.

    A tile has at most `most` bytes, its conversion included; 64 rows are one anyway. There
    are none where the matrix is smaller than two, or does not lie in rows.
    """
    count = weight.shape[0]
    if weight.order is not None or not weight.lies_in_rows:
        return []
    bounds = row_bounds(count, (weight.nbytes + weight.converted_bytes) // count, most)
    if len(bounds) < 2:
        return []
    sums = [_sums_of(part, bounds) for part in weight.parts]
    return [
        TileRows(
            first,
            last,
            weight._replace(
                name=f"{weight.name}[{first}:{last}]",
                shape=(last - first, weight.shape[1]),
                parts=tuple(
                    cut_rows(part, first, last, None if cut is None else (cut, number))
                    for part, cut in zip(weight.parts, sums, strict=True)
                ),
            ),
        )
        for number, (first, last) in enumerate(bounds)
    ]


def _sums_of(part: WeightPart, bounds: list[tuple[int, int]]) -> CutSums | None:
    if not part.sums:
        return None
    whole = 0
    for value in part.sums:
        whole = crc32.combine(whole, value, part.nbytes // len(part.sums))
    a_row = part.nbytes // part.shape[0]
    return CutSums(whole, [(last - first) * a_row for first, last in bounds])


def cut_rows(
    part: WeightPart, first: int, last: int, cut: tuple[CutSums, int] | None = None
) -> WeightPart:
    """Rows [first, last) of a part; `cut` has their checksums."""
    a_row = part.nbytes // part.shape[0]
    begin, behind = first * a_row, last * a_row
    extents = [
        extent._replace(at=extent.at - begin)
        for extent in extents_within(part.extents, begin, behind)
    ]
    shape = (last - first, *part.shape[1:])
    return WeightPart(part.dtype, shape, tuple(extents), (), cut)
