"""A checkpoint without its storages: what torch writes into holes' place, and where all of it is.

torch's own writer of zip files makes every byte here, once (`written`). Of a second object whose
records have the same names and sizes nothing but some contents differ: those are put in
(`KeptSkeleton`). Both are of records that torch told (`Records`) when it was asked to save.
"""

from __future__ import annotations

import functools
import inspect
import struct
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from nvmeio._formats import torch_pickling, torch_zip
from nvmeio._storage import crc32
from nvmeio.errors import BackendUnavailableError

# The parameters of `torch.serialization._save` in every torch so far that can skip storages.
_SEAM = ["obj", "zip_file", "pickle_module", "pickle_protocol", "_disable_byteorder_record"]

# Where torch's writer puts the digits that it makes of all names, and of all CRCs.
_NUMBER = ".data/serialization_id"
_DIGITS = 20

# What may be kept from one save to the next: headers, padding and the pickle.
_MOST_KEPT_BYTES = 32 << 20


class UnknownWriterError(BackendUnavailableError):
    """torch writes its files in a way that is not known here: it has to save by itself."""


def unknown_torch(reason: str) -> UnknownWriterError:
    """What is raised where torch does what it never did."""
    return UnknownWriterError(
        f"torch {torch.__version__} writes checkpoints in a way that is not known here",
        attempts=[("skip_data", reason)],
    )


@functools.cache
def has_seam() -> bool:
    """Whether torch says to a writer of ours which records it wants, and can write them after."""
    save = getattr(torch.serialization, "_save", None)
    if save is None or not hasattr(torch.serialization, "_open_zipfile_writer_buffer"):
        return False
    return list(inspect.signature(save).parameters) == _SEAM


class Sink:
    """A file for torch.save that keeps what is written, and holes where it seeks over."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._at = 0
        self._starts: list[int] = []
        self._chunks: list[bytearray] = []

    def write(self, data: Any) -> int:
        """As for any file."""
        view = memoryview(data).cast("B")
        if self._chunks and self._starts[-1] + len(self._chunks[-1]) == self._at:
            self._chunks[-1] += view
        else:
            self._starts.append(self._at)
            self._chunks.append(bytearray(view))
        self._at += len(view)
        self.nbytes = max(self.nbytes, self._at)
        return len(view)

    def seek(self, offset: int, whence: int = 0) -> int:
        """As for any file, forward only."""
        position = offset if whence == 0 else self._at + offset
        if whence not in (0, 1) or position < self._at:
            raise unknown_torch(f"it seeks to {offset} from {whence} at byte {self._at}")
        self._at = position
        return position

    def tell(self) -> int:
        """As for any file."""
        return self._at

    def flush(self) -> None:
        """As for any file."""

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes of one chunk; fewer where it ends."""
        index = bisect_right(self._starts, offset) - 1
        if index < 0:
            return b""
        at = offset - self._starts[index]
        return bytes(self._chunks[index][at : at + nbytes])

    def pieces(self) -> list[tuple[int, bytes]]:
        """All that was written, and where."""
        return list(zip(self._starts, map(bytes, self._chunks), strict=True))


class Entry(NamedTuple):
    """A record.

    Attributes:
        name: With the archive's folder.
        offset: Of its first byte.
        nbytes: Its size.
        crc_at: Where its CRC-32 stands.
        is_hole: Whether its bytes are not here.
    """

    name: str
    offset: int
    nbytes: int
    crc_at: tuple[int, ...]
    is_hole: bool


class Skeleton(NamedTuple):
    """A checkpoint without its storages.

    Attributes:
        nbytes: The size of the file.
        pieces: All bytes that are known, and where; with the CRCs of all records that are here.
        entries: All records, in the order of the file.
    """

    nbytes: int
    pieces: list[tuple[int, bytes]]
    entries: list[Entry]

    def read(self, entry: Entry) -> bytes:
        """A record that is here."""
        start, piece = self.pieces[self._piece_with(entry.offset)]
        return piece[entry.offset - start : entry.offset - start + entry.nbytes]

    def with_records(self, contents: Sequence[tuple[Entry, bytes]]) -> Skeleton:
        """The same with other contents of some records, and their CRCs."""
        changed: dict[int, bytearray] = {}
        for entry, data in contents:
            sum_of_it = struct.pack("<I", crc32.of_bytes(data))
            for at, new in ((entry.offset, data), *((at, sum_of_it) for at in entry.crc_at)):
                index = self._piece_with(at)
                start, piece = self.pieces[index]
                changed.setdefault(index, bytearray(piece))[at - start : at - start + len(new)] = (
                    new
                )
        pieces = list(self.pieces)
        for index, piece_now in changed.items():
            pieces[index] = (pieces[index][0], bytes(piece_now))
        return self._replace(pieces=pieces)

    def _piece_with(self, offset: int) -> int:
        return bisect_right(self.pieces, offset, key=_start) - 1


def _start(piece: tuple[int, bytes]) -> int:
    return piece[0]


def skeleton_of(sink: Sink) -> Skeleton:
    """What torch wrote, understood.

    Raises:
        BackendUnavailableError: It is not what torch's writer has written so far.
    """

    def read_many(wanted: Sequence[tuple[int, int]]) -> list[bytes]:
        return [sink.read(offset, nbytes) for offset, nbytes in wanted]

    archive = torch_zip.parse(read_many, sink.nbytes, "the skeleton of the checkpoint")
    pieces = sink.pieces()
    starts = [start for start, _ in pieces]
    entries: list[Entry] = []
    for name, _, offset, nbytes, _, crc_at, descriptor in archive.entries:
        places: tuple[int, ...] = (crc_at,)
        end = offset + nbytes
        if descriptor:
            start, piece = pieces[bisect_right(starts, end) - 1]
            if not piece.startswith(torch_zip.DESCRIPTOR_MAGIC, end - start):
                raise unknown_torch(f"record {name!r} has no data descriptor")
            places = (end + 4, crc_at)
        start, piece = pieces[bisect_right(starts, offset) - 1]
        is_hole = end - start > len(piece)
        if is_hole and offset - start < len(piece):
            raise unknown_torch(f"record {name!r} is there in part")
        entries.append(Entry(name, offset, nbytes, places, is_hole))
    skeleton = Skeleton(sink.nbytes, pieces, entries)
    # torch leaves CRCs out where the user told it to.
    here = [(entry, skeleton.read(entry)) for entry in entries if not entry.is_hole]
    return skeleton.with_records(here)


# From one save to the next


class Records:
    """What torch tells in place of its own writer of zip files."""

    def __init__(self) -> None:
        self.sizes: list[tuple[str, int]] = []
        self.own: dict[str, bytes] = {}

    def write_record(self, name: str, data: Any, nbytes: int) -> None:
        """A record with its contents."""
        own = data.encode() if isinstance(data, str) else bytes(data)
        if len(own) != nbytes or name in self.own:
            raise unknown_torch(f"it has {len(own)} bytes for the {nbytes} of {name!r}")
        self.sizes.append((name, nbytes))
        self.own[name] = own

    def write_record_metadata(self, name: str, nbytes: int) -> None:
        """A record that is skipped."""
        self.sizes.append((name, nbytes))

    def written(self) -> Skeleton:
        """All of them, as torch writes them."""
        sink = Sink()
        opener: Any = torch.serialization._open_zipfile_writer_buffer
        with opener(sink) as writer:
            for name, nbytes in self.sizes:
                own = self.own.get(name)
                if own is None:
                    writer.write_record_metadata(name, nbytes)
                else:
                    writer.write_record(name, own, nbytes)
        return skeleton_of(sink)


class KeptSkeleton:
    """The skeleton of the last save, for the next one.

    An object is pickled anew each time. Where its records have the names and sizes that they had,
    all places, headers and ends are the same, and what differs is put in: the pickle, the CRCs, and
    torch's number of the archive. So no value can be an old one. Of one thread at a time.
    """

    def __init__(self) -> None:
        self._sizes: list[tuple[str, int]] = []
        self._options: object = None
        self._own: dict[str, bytes] = {}
        self._skeleton: Skeleton | None = None

    def skeleton(self, told: Records) -> Skeleton:
        """The skeleton of a save, which is kept for the next."""
        last = self._skeleton
        same = self._sizes == told.sizes and self._own.keys() == told.own.keys()
        if last is not None and same and self._options == _options():
            made = _with_number(last, self._entries_of(last, told))
        else:
            self._skeleton, self._sizes, self._options = None, told.sizes, _options()
            made = told.written()
            size = sum(len(piece) for _, piece in made.pieces)
            if size > _MOST_KEPT_BYTES or _with_number(made, []) != made:
                return made
        self._own, self._skeleton = told.own, made
        return made

    def _entries_of(self, last: Skeleton, told: Records) -> list[tuple[Entry, bytes]]:
        """What has other contents than it had."""
        changed = {name: own for name, own in told.own.items() if own != self._own[name]}
        if not changed:
            return []
        here = [entry for entry in last.entries if not entry.is_hole]
        by_name = {entry.name.partition("/")[2]: entry for entry in here}
        return [(by_name[name], own) for name, own in changed.items()]

    def forget(self) -> None:
        """Give the memory back."""
        self._skeleton = None


def _with_number(skeleton: Skeleton, contents: list[tuple[Entry, bytes]]) -> Skeleton:
    """Other contents of some records, and torch's number to them."""
    skeleton = skeleton.with_records(contents) if contents else skeleton
    mixed = 0
    for entry in skeleton.entries:
        if entry.name.endswith(_NUMBER):
            number = skeleton.read(entry)[:_DIGITS] + b"%020d" % mixed
            return skeleton.with_records([(entry, number)])
        if not entry.nbytes:  # torch leaves these out
            continue
        crc = 0 if entry.is_hole else crc32.of_bytes(skeleton.read(entry))
        # c10::hash_combine, of 64 bits.
        mixed ^= (crc + 0x9E3779B9 + (mixed << 6) + (mixed >> 2)) & 0xFFFFFFFFFFFFFFFF
    return skeleton


def _options() -> tuple[object, ...]:
    """What of torch's settings has a say in what it writes."""
    crc = getattr(torch.serialization, "get_crc32_options", bool)
    return crc(), getattr(torch_pickling.save_settings(), "storage_alignment", None)
