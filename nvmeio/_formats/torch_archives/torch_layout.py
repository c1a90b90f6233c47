"""From an object to the layout of its checkpoint: every byte of the file, but for the storages'.

An object is pickled in the thread of its user (`pickled`). Then, in any thread, the archive around
that pickle is made (`Pickling.layout`): names, padding, end records, and holes for storages. What
is left is a list of records, each with its place in the file and the memory that belongs there, and
the places where its CRC-32 stands. No file is touched here.

Every byte is as torch's own writer of zip files makes it. The writer takes 15 us a record, for it
writes into a file of Python's (`Sink`). When torch is asked to save, it names records
(`TorchRecords`), and the same bytes are put together here, in one go (`_laid_out`). Before the
first archive, records of each kind are written in both ways; where a byte differs, torch's own
writer is used from then on.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import io
import pickle
import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import torch

from nvmeio import _torch_private
from nvmeio._formats.torch_archives import torch_pickler, torch_zip
from nvmeio._pages import PAGE_BYTES
from nvmeio._storage import crc32
from nvmeio._threads.interruptible import run_interruptible
from nvmeio.errors import BackendUnavailableError, IntegrityError

DEFAULT_PROTOCOL = 2  # torch.save's


class ReadOnce(Protocol):
    """Bytes that can be copied from where they are kept, each once and in order.

    Or they are written from there, and `settle` says afterwards which have to be written again.
    """

    @property
    def in_place(self) -> torch.Tensor | None:
        """All of them, for a transfer of whole pages; None if they are to be copied."""
        ...

    def sum(self, offset: int, nbytes: int, crc: int) -> int:
        """The CRC-32 of bytes that are still to be read or settled, going on from `crc`."""
        ...

    def settle(self, offset: int, nbytes: int) -> Sequence[tuple[int, int]]:
        """End a transfer of `in_place`: offset and size of each part that is to be read."""
        ...

    def read(self, offset: int, nbytes: int, to: int, crc: int | None) -> int:
        """Copy bytes to an address; the CRC-32 going on from `crc`, or anything for None."""
        ...


Args = ParamSpec("Args")
Made = TypeVar("Made")

Data = torch.Tensor | Callable[[int, int], torch.Tensor] | ReadOnce
"""A record's bytes: a contiguous 1-D uint8 tensor on any device, a function of (offset, nbytes)
that returns that part of them as one, or what copies them. A part that is returned must stay as it
is until the write is done."""


class StorageRecord(NamedTuple):
    """A storage's place in the file.

    `name` is within the archive, such as "archive/data/0". `offset` is a multiple of 4096, with
    torch 2.6 and 2.7 of 64. `crc_at` are the offsets in the file of the little-endian 32-bit places
    that hold its CRC-32.
    """

    name: str
    offset: int
    nbytes: int
    data: Data
    crc_at: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


class KnownBytes(NamedTuple):
    """Bytes that are known when the file is planned: all but the storages are."""

    offset: int
    data: bytes

    @property
    def end(self) -> int:
        return self.offset + len(self.data)


Content = KnownBytes | tuple[int, StorageRecord]
"""A piece of a file: known bytes, or a record with its index."""


class FileLayout(NamedTuple):
    """A checkpoint file before it is written.

    `records` are the storages, and `pieces` everything else, with the CRCs of all records that are
    not storages. Both are in the order of the file, and disjoint.
    """

    nbytes: int
    pieces: list[KnownBytes]
    records: list[StorageRecord]

    @property
    def data_nbytes(self) -> int:
        return sum(record.nbytes for record in self.records)

    def contents(self) -> list[tuple[int, int, Content]]:
        """Pieces and records with their begin and end, in the order of the file."""
        # There may be thousands, and each call of a function is one for each of them.
        each: list[tuple[int, int, Content]] = [
            (piece[0], piece[0] + len(piece[1]), piece) for piece in self.pieces
        ]
        each += [(item[1][1], item[1][1] + item[1][2], item) for item in enumerate(self.records)]
        each.sort(key=itemgetter(0))
        return each

    def with_crcs(self, crcs: Sequence[int]) -> FileLayout:
        """The same, with these CRCs of all records among the bytes that are known."""
        starts = [piece.offset for piece in self.pieces]
        known = [bytearray(piece.data) for piece in self.pieces]
        for record, crc in zip(self.records, crcs, strict=True):
            for at in record.crc_at:
                number = bisect_right(starts, at) - 1
                struct.pack_into("<I", known[number], at - starts[number], crc)
        pieces = [KnownBytes(at, bytes(data)) for at, data in zip(starts, known, strict=True)]
        records = [record._replace(crc_at=()) for record in self.records]
        return FileLayout(self.nbytes, pieces, records)

    def crc_places(self) -> list[tuple[int, int]]:
        """The places of CRCs: (offset in the file, index of the record), in the file's order."""
        return sorted([(at, i) for i, record in enumerate(self.records) for at in record.crc_at])


def _undisturbed(work: Callable[Args, Made]) -> Callable[Args, Made]:
    """Done where no interrupt comes, for it changes torch's settings; here those of the caller."""

    @functools.wraps(work)
    def done(*args: Args.args, **kwargs: Args.kwargs) -> Made:
        here = contextvars.copy_context()
        return run_interruptible(lambda: here.run(work, *args, **kwargs))

    return done


class Pickling(NamedTuple):
    """An object that was pickled, and will not be asked again.

    `storages` are the object's, without a copy, by the key of their record; `sizes` are the bytes
    that each had then, which the pickle has too.
    """

    data: bytes
    storages: torch_pickler.Storages
    sizes: dict[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes of the pickle and of all storages: the file has little more."""
        return len(self.data) + sum(self.sizes.values())

    def layout(self) -> FileLayout:
        """The layout of what `torch.save` would write; once.

        Cost: 10 us a storage.

        Raises:
            UnknownWriterError: This torch's files look unlike what is known here.
            IntegrityError: A storage was resized since it was pickled.
        """
        for key, storage in self.storages.items():
            if storage.nbytes() != self.sizes[key]:
                raise resized(f"archive/data/{key}", self.sizes[key], storage.nbytes())
        return layout_of(self._around(), self.storages)

    def skeleton(self) -> tuple[Skeleton, list[Stored]]:
        """The same without a layout's objects, once: all but the storages, and where these go.

        Whether one was resized is not looked at.
        """
        skeleton = self._around()
        left = dict(self.storages)
        self.storages.clear()
        stored: list[Stored] = []
        for name, offset, nbytes, crc_at, is_hole in skeleton.entries:
            storage = left.pop(name[len(_DATA) :], None) if name.startswith(_DATA) else None
            if storage is None:
                if is_hole:
                    raise unknown_torch(f"record {name!r} was skipped, and is not a storage")
            elif nbytes:
                stored.append((storage, name, offset, nbytes, crc_at))
        if left:
            raise unknown_torch(f"there is no record for storage {next(iter(left))}")
        return skeleton, stored

    def _around(self) -> Skeleton:
        if not has_seam():
            raise unknown_torch("it does not tell its records")
        told = TorchRecords(_alignment(self.nbytes))
        told.own = _own_records(told.alignment) | {_PICKLE: self.data}
        told.sizes = [(name, len(data)) for name, data in told.own.items()]
        told.sizes += [(f"data/{key}", nbytes) for key, nbytes in self.sizes.items()]
        return told.skeleton()


Stored = tuple[torch.UntypedStorage, str, int, int, tuple[int, ...]]
"""A storage, the name of its record, and its offset, size and places of the CRC-32 in the file."""

_DATA = "archive/data/"


def pickled(
    obj: object, pickle_module: Any = pickle, pickle_protocol: int = DEFAULT_PROTOCOL
) -> Pickling:
    """Pickle an object as `torch.save` would, in the thread whose modes its own code must see.

    Raises UnknownWriterError if this torch has no `skip_data`, and what pickling the object raises.
    Cost: 8 us a tensor.
    """
    if getattr(torch.serialization, "skip_data", None) is None:
        raise unknown_torch("torch.serialization.skip_data is missing")
    seen = torch_pickler.Seen({}, {})
    watching: Any = torch_pickler.PickleModule(pickle_module, seen, ends=True)
    nowhere: Any = io.BytesIO()
    try:
        if pickle_module is pickle and has_seam():
            _torch_private.save(obj, nowhere, watching, pickle_protocol, False)
        else:
            torch.save(obj, nowhere, watching, pickle_protocol)
    except torch_pickler.Pickled as ended:
        return Pickling(ended.data, dict(seen.storages), dict(seen.nbytes))
    finally:
        seen.storages.clear()  # as after an error, which leaves the pickler's class in a cycle
        seen.nbytes.clear()
    raise unknown_torch("torch.save pickles nothing")


def plan_layout(obj: object) -> FileLayout:
    """`pickled` and `layout`. The layout holds the object's storages, without a copy."""
    return pickled(obj).layout()


def layout_of(skeleton: Skeleton, storages: torch_pickler.Storages) -> FileLayout:
    """Fill the holes of a skeleton with the memory that belongs there, by the key of each."""
    records: list[StorageRecord] = []
    for name, offset, nbytes, crc_at, is_hole in skeleton.entries:
        _, data, key = name.rpartition("/data/")
        storage = storages.pop(key, None) if data else None
        if storage is None:
            if is_hole:
                raise unknown_torch(f"record {name!r} was skipped, and is not a storage")
            continue
        if storage.nbytes() != nbytes:
            raise unknown_torch(
                f"record {name!r} has {nbytes} bytes, its storage {storage.nbytes()}"
            )
        if nbytes:
            records.append(StorageRecord(name, offset, nbytes, _bytes_of(storage), crc_at))
    if storages:
        raise unknown_torch(f"there is no record for storage {next(iter(storages))}")
    pieces = [KnownBytes(start, piece) for start, piece in skeleton.pieces]
    return FileLayout(skeleton.nbytes, pieces, records)


def resized(name: str, expected: int, found: int) -> IntegrityError:
    return IntegrityError(
        f"the memory of record {name!r} was given back while it was saved (resize_): keep it until "
        "the save has returned",
        expected=expected,
        found=found,
    )


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage as a 1-D uint8 tensor, without a copy."""
    if storage.device.type == "cpu":
        return _EMPTY.data.set_(storage)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


_EMPTY = torch.empty(0, dtype=torch.uint8, device="cpu")


# Torch's bytes around the storages

# The parameters of `torch.serialization._save` in every torch so far that can skip storages.
_SEAM = ["obj", "zip_file", "pickle_module", "pickle_protocol", "_disable_byteorder_record"]

# The record with the digits that torch's writer computes from all names, and from all CRCs.
_NUMBER = ".data/serialization_id"
_DIGITS = 20


class UnknownWriterError(BackendUnavailableError):
    """torch writes its files in a way that is not known here: it has to save by itself."""


def unknown_torch(reason: str) -> UnknownWriterError:
    return UnknownWriterError(
        f"torch {torch.__version__} writes checkpoints in a way that this nvmeio does not know",
        attempts=[("skip_data", reason)],
    )


@functools.cache
def has_seam() -> bool:
    """Whether torch tells a writer of ours its records, and can write them afterwards."""
    save = _torch_private.found("save")
    if save is None or _torch_private.found("open_zip_writer") is None:
        return False
    return list(inspect.signature(save).parameters) == _SEAM


class Sink:
    """A file for torch.save, written forward only; skipped ranges stay holes."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._at = 0
        self._starts: list[int] = []
        self._chunks: list[bytearray] = []

    def write(self, data: Any) -> int:
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
        position = offset if whence == 0 else self._at + offset
        if whence not in (0, 1) or position < self._at:
            raise unknown_torch(f"it seeks to {offset} from {whence} at byte {self._at}")
        self._at = position
        return position

    def flush(self) -> None:
        """Do nothing."""

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes of one chunk; fewer where it ends."""
        index = bisect_right(self._starts, offset) - 1
        at = offset - self._starts[index]
        return bytes(self._chunks[index][at : at + nbytes])

    def put(self, offset: int, data: bytes) -> None:
        """Replace bytes that were written together."""
        index = bisect_right(self._starts, offset) - 1
        at = offset - self._starts[index]
        self._chunks[index][at : at + len(data)] = data

    def pieces(self) -> list[tuple[int, bytes]]:
        return list(zip(self._starts, map(bytes, self._chunks), strict=True))


Entry = tuple[str, int, int, tuple[int, ...], bool]
"""A record: its name with the archive's folder, the offset of its first byte, its size, where its
CRC-32 stands, and whether it is a hole: its bytes are not here. No class of its own, which would be
thousands of objects that Python's collector goes through again and again."""


class Skeleton(NamedTuple):
    """A checkpoint without its storages.

    `pieces` are all bytes that are known and their offsets, with the CRCs of all records that are
    there. `entries` are all records, in the order of the file.
    """

    nbytes: int
    pieces: list[tuple[int, bytes]]
    entries: list[Entry]


def skeleton_of(sink: Sink) -> Skeleton:
    """The skeleton of what torch wrote; UnknownWriterError if it wrote otherwise than so far."""

    def read_many(wanted: Sequence[tuple[int, int]]) -> list[bytes]:
        return [sink.read(offset, nbytes) for offset, nbytes in wanted]

    archive = torch_zip.parse(read_many, sink.nbytes, "the skeleton of the checkpoint")
    entries: list[Entry] = []
    for name, _, offset, nbytes, _, crc_at, descriptor in archive.entries:
        places: tuple[int, ...] = (crc_at,)
        end = offset + nbytes
        if descriptor:
            if sink.read(end, 4) != torch_zip.DESCRIPTOR_MAGIC:
                raise unknown_torch(f"record {name!r} has no data descriptor")
            places = (end + 4, crc_at)
        data = sink.read(offset, nbytes)
        if len(data) == nbytes:
            # torch leaves CRCs out where the user told it to.
            for at in places:
                sink.put(at, struct.pack("<I", crc32.of_bytes(data)))
        elif data:
            raise unknown_torch(f"record {name!r} is there in part")
        entries.append((name, offset, nbytes, places, len(data) < nbytes))
    return Skeleton(sink.nbytes, sink.pieces(), entries)


# The bytes of torch's own writer


class TorchRecords:
    """Takes the records from torch in place of its own writer of zip files."""

    def __init__(self, alignment: int) -> None:
        self.alignment = alignment
        self.sizes: list[tuple[str, int]] = []
        self.own: dict[str, bytes] = {}

    def write_record(self, name: str, data: Any, nbytes: int) -> None:
        own = data.encode() if isinstance(data, str) else bytes(data)
        if len(own) != nbytes or name in self.own:
            raise unknown_torch(f"it has {len(own)} bytes for the {nbytes} of {name!r}")
        self.sizes.append((name, nbytes))
        self.own[name] = own

    def write_record_metadata(self, name: str, nbytes: int) -> None:
        """Take a record that is skipped."""
        self.sizes.append((name, nbytes))

    def skeleton(self) -> Skeleton:
        """All of them, as torch writes them; 1 us a record, 5 for new sizes, 10 for new names."""
        crc32_options = getattr(torch.serialization, "get_crc32_options", bool)
        if not agrees(crc32_options(), self.alignment):
            return self.written()
        return _laid_out(self)

    @_undisturbed
    def written(self) -> Skeleton:
        """All of them, by torch's own writer: 15 us a record."""
        sink = Sink()
        opener: Any = _torch_private.open_zip_writer
        with torch_pickler.aligned_storages(self.alignment), opener(sink) as writer:
            for name, nbytes in self.sizes:
                own = self.own.get(name)
                if own is None:
                    writer.write_record_metadata(name, nbytes)
                else:
                    writer.write_record(name, own, nbytes)
        return skeleton_of(sink)


@functools.cache
@_undisturbed
def _own_records(alignment: int) -> dict[str, bytes]:
    """The records that torch writes before those of storages, with an empty pickle."""
    told: Any = TorchRecords(alignment)
    replay: Any = torch_pickler.Replay(b"")
    storages = {"0": torch.empty(5, dtype=torch.uint8, device="cpu").untyped_storage()}
    with torch_pickler.aligned_storages(alignment), torch.serialization.skip_data():
        _torch_private.save(storages, told, replay, DEFAULT_PROTOCOL, False)
    if told.own.get(_PICKLE) != b"" or told.sizes[len(told.own) :] != [("data/0", 5)]:
        raise unknown_torch(f"its records are {told.sizes}")
    own: dict[str, bytes] = told.own
    return own


def _laid_out(told: TorchRecords) -> Skeleton:
    """The archive of these records as torch's writer makes it (`PyTorchStreamWriter`, miniz)."""
    own = {**told.own, "version": _VERSION}
    sizes = (*told.sizes, ("version", len(_VERSION)), (_NUMBER, 2 * _DIGITS))
    blank = _blank(sizes, frozenset((*own, _NUMBER)), told.alignment)
    ends = [offset for _, offset, _, _, is_hole in blank.entries if is_hole] + [blank.nbytes]
    pieces = [
        (start, bare.ljust(end - start, _PADDING))
        for (start, bare), end in zip(blank.pieces, ends, strict=True)
    ]
    starts = [start for start, _ in pieces]
    filled: dict[int, bytearray] = {}

    def put(at: int, data: bytes) -> None:
        index = bisect_right(starts, at) - 1
        if index not in filled:
            filled[index] = bytearray(pieces[index][1])
        at -= starts[index]
        filled[index][at : at + len(data)] = data

    mixed = 0
    for (name, nbytes), (_, offset, _, crc_at, _) in zip(sizes, blank.entries, strict=True):
        if name == _NUMBER:
            own[name] = b"%s%020d" % (_number_of_names(tuple([n for n, _ in told.sizes])), mixed)
        data, crc = own.get(name), 0
        if data is not None:
            crc = crc32.of_bytes(data)
            put(offset, data)
            for at in crc_at:
                put(at, struct.pack("<I", crc))
        if nbytes:  # c10::hash_combine, of 64 bits
            mixed ^= (crc + 0x9E3779B9 + (mixed << 6) + (mixed >> 2)) & 0xFFFFFFFFFFFFFFFF
    for index, piece in filled.items():
        pieces[index] = starts[index], bytes(piece)
    return blank._replace(pieces=pieces)


@functools.lru_cache(maxsize=1)
def _blank(sizes: tuple[tuple[str, int], ...], own: frozenset[str], alignment: int) -> Skeleton:
    """The same with zeros for all contents and CRCs: equal for all saves of one state.

    Its pieces lack the padding at their end: half a KiB a record is kept.
    """
    pieces: list[tuple[int, bytes]] = []
    known: list[bytes] = []  # of the piece that is made
    started = at = 0
    places: list[tuple[bytes, int, int, int, int, bool]] = []
    for name, nbytes in sizes:
        full = b"archive/" + name.encode()
        wide = torch_zip.wide_field(nbytes, 0, at)  # as in the descriptor alone
        offset = at + torch_zip.LOCAL.size + len(full) + len(wide) + 4
        padding = -offset % alignment
        offset += padding
        flags = _UTF8 | torch_zip.FLAG_DESCRIPTOR if nbytes else _UTF8
        extra = len(wide) + 4 + padding
        known += (
            torch_zip.LOCAL.pack(
                *(torch_zip.LOCAL_MAGIC, 0, flags, 0, 0, 0, 0, 0, 0, len(full), extra)
            ),
            full,
            wide,
            b"FB" + padding.to_bytes(2, "little"),
            _PADDING * padding,
        )
        places.append((full, at, offset, nbytes, flags, name not in own and nbytes > 0))
        at = offset + nbytes
        if name in own:
            known.append(bytes(nbytes))
        elif nbytes:
            pieces.append((started, b"".join(known).rstrip(_PADDING)))
            started, known = at, []
        if nbytes:
            form = "<4sIQQ" if wide else "<4sIII"
            known.append(struct.pack(form, torch_zip.DESCRIPTOR_MAGIC, 0, nbytes, nbytes))
            at += 24 if wide else 16
    directory = at
    entries: list[Entry] = []
    most = torch_zip.MAX32
    for full, header, offset, nbytes, flags, is_hole in places:
        small = min(nbytes, most)
        wide = torch_zip.wide_field(nbytes, nbytes, header)
        known += (
            torch_zip.CENTRAL.pack(
                *(torch_zip.CENTRAL_MAGIC, 0, 0, flags, 0, 0, 0, 0, small, small),
                *(len(full), len(wide), 0, 0, 0, 0, min(header, most)),
            ),
            full,
            wide,
        )
        crc_at = at + torch_zip.CENTRAL_CRC_OFFSET
        places_of_crc = (offset + nbytes + 4, crc_at) if nbytes else (crc_at,)
        entries.append((full.decode(), offset, nbytes, places_of_crc, is_hole))
        at += torch_zip.CENTRAL.size + len(full) + len(wide)
    known.append(torch_zip.ends(len(places), directory, at))
    at += len(known[-1])
    pieces.append((started, b"".join(known)))
    return Skeleton(at, pieces, entries)


_PICKLE = "data.pkl"
_PADDING = b"Z"
_UTF8 = 1 << 11  # what names are in
_VERSION = b"3\n"  # of torch's format


@functools.lru_cache(maxsize=4)
@_undisturbed
def _number_of_names(names: tuple[str, ...]) -> bytes:
    """The digits that torch makes of all names, by C++'s hash of strings."""
    archive = io.BytesIO()
    opener: Any = _torch_private.open_zip_writer
    with torch_pickler.aligned_storages(_LEAST_ALIGNMENT), opener(archive) as writer:
        for name in names:
            writer.write_record(name, b"", 0)
    archive.seek(0)
    record: bytes = _torch_private.FileReader(archive).get_record(_NUMBER)
    return record[:_DIGITS]


@functools.cache
def agrees(sums: bool, alignment: int) -> bool:
    """Whether this torch's writer makes what `_laid_out` does, of records of each kind.

    `sums` says whether torch makes CRCs; its number of an archive is made of them.
    """
    told = TorchRecords(alignment)
    for name, own in (("data.pkl", b"1" * 70), ("byteorder", b"little"), ("empty", b"")):
        told.write_record(name, own, len(own))
    for number, nbytes in enumerate((100, 0, 4096, (5 << 30) + 1, 7, 0)):
        told.write_record_metadata(f"data/{number}", nbytes)
    told.write_record("\u00e9", b"behind 4 GiB", 12)
    try:
        return _laid_out(told) == told.written()
    except (AttributeError, TypeError, ValueError, RuntimeError, BackendUnavailableError):
        return False  # private to torch, all of it


# torch's own.
_LEAST_ALIGNMENT = 64


def _alignment(nbytes: int) -> int:
    """The alignment of records in a file of about so many bytes: pages, where it is read direct.

    Through the page cache they are only more to move: of 1 KB in 8 tensors they make 57 KiB, not 4.
    """
    is_small = nbytes <= torch_zip.SMALL_BYTES or torch_pickler.save_settings() is None
    return _LEAST_ALIGNMENT if is_small else PAGE_BYTES
