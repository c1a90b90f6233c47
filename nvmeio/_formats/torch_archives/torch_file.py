"""A torch checkpoint, opened and understood: where its records lie, before any of them is read."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from nvmeio import files
from nvmeio._formats.torch_archives import pickle_calls, pickle_values, torch_unpickler, torch_zip
from nvmeio._formats.torch_archives.pickle_values import Scan
from nvmeio._memory import system
from nvmeio._memory.tensors import aligned_as
from nvmeio._pages import PAGE_BYTES, round_down
from nvmeio.errors import IntegrityError
from nvmeio.files import File, read_buffered, read_each, read_into

if TYPE_CHECKING:
    from nvmeio._io.spans import Load, Span
    from nvmeio.handle import AioHandle

# More reads than this go to the drive together; a few are made through the page cache meanwhile.
_FEW = 16

_PICKLE = "data.pkl"

# The records that are neither storages nor the pickle are a few words. The pickle has all that is
# no tensor, arrays among it, and may be of any size.
_MAX_TEXT_BYTES = 1 << 20
_LENGTH = struct.Struct("<Q")


class TorchFile:
    """The records of one open torch archive; `file` stays open.

    `get_handle` is called when many reads are wanted at once, which `load` can cancel; with None
    they are made one by one, through the page cache, and `whole` reads the records with them, for
    `memory_of`. `told` is what `told()` of another rank returned: nothing of that is read here.
    Raises IntegrityError, which names file and record, if it is not an archive or damaged.
    """

    def __init__(
        self,
        file: File,
        get_handle: Callable[[], AioHandle] | None,
        load: Load | None,
        told: bytes | None = None,
        whole: bool = False,
    ) -> None:
        self._file = file
        self.path = file.path
        self._whole = whole
        self._read: dict[int, memoryview] = {}
        self._get_handle = get_handle
        self._load = load
        self._texts: dict[str, bytes] = {}
        if told is None:
            self.archive = torch_zip.parse(self._read_many, file.size(), file.path)
        else:
            self.archive = self._learn(told)
        self.records = self.archive.records()

    def told(self) -> bytes:
        """All but the storages, for another rank; no pickle, which could make objects there."""
        archive, texts = self.archive, self.texts()
        lengths = [(name, len(text)) for name, text in texts.items()]
        places = json.dumps([archive.nbytes, archive.directory_offset, archive.entries, lengths])
        return b"".join((_LENGTH.pack(len(places)), places.encode(), *texts.values()))

    def _learn(self, told: bytes) -> torch_zip.Archive:
        at = _LENGTH.size + _LENGTH.unpack_from(told)[0]
        nbytes, directory, entries, lengths = json.loads(told[_LENGTH.size : at])
        for name, length in lengths:
            self._texts[name] = told[at : at + length]
            at += length
        found = [torch_zip.ZipEntry(*entry) for entry in entries]
        return torch_zip.Archive(self._file.path, nbytes, directory, found)

    def texts(self) -> dict[str, bytes]:
        """The records that torch asks for beside the storages, by name."""
        return {
            name: self.read(name)
            for name, record in self.records.items()
            if name[:5] != "data/" and is_asked_for(name, record.nbytes)
        }

    def read(self, name: str) -> bytes:
        """Read a record that is not a storage, such as "data.pkl".

        Raises:
            IntegrityError: It is missing, or of absurd size.
            MemoryError: There is less memory than it needs; nothing was allocated.
        """
        if name in self._texts:
            return self._texts[name]
        entry = self.entry(name, ": not written by torch.save")
        if name == _PICKLE:
            system.check_available(entry.nbytes, entry.nbytes)
        elif entry.nbytes > _MAX_TEXT_BYTES:
            raise IntegrityError(
                f"{self.path}: record {name!r} of absurd size: expected at most "
                f"{_MAX_TEXT_BYTES} bytes, found {entry.nbytes}",
                expected=_MAX_TEXT_BYTES,
                found=entry.nbytes,
            )
        return read_buffered(self._file, entry.offset, entry.nbytes)

    def entry(self, name: str, why: str) -> torch_zip.ZipEntry:
        """The place of a record; IntegrityError, which says `why` it should be there."""
        found = self.records.get(name)
        if found is None:
            missing = f"{self.path}: there is no record {name!r}{why}"
            raise IntegrityError(missing, expected=name, found=None)
        return found

    def memory_of(self, name: str, nbytes: int) -> memoryview:
        """The first bytes of a record, in memory that is its alone; errors as `read_buffered`."""
        entry = self.records[name]
        at, read = entry.offset - entry.header_offset, self._read.get(entry.header_offset, b"")
        if at + nbytes > len(read):
            at, read = 0, self._read_apart(entry.offset, nbytes)
        return memoryview(read)[at : at + nbytes]

    def _read_apart(self, offset: int, nbytes: int) -> memoryview:
        memory = aligned_as(offset, nbytes)
        read_into(self._file, offset, [memory])
        return memory

    def _read_many(self, wanted: Sequence[tuple[int, int]]) -> list[bytes]:
        if self._whole and len(wanted) > 1:
            # The headers, in the file's order. The kernel reads ahead of who reads from header to
            # header, twice as fast as all of it at once (large folios), and not of who skips.
            for (start, _), (stop, _) in itertools.pairwise(wanted):
                self._read[start] = aligned_as(start, stop - start)
            read_each(self._file, self._read.items())
            found = [bytes(self._read[start][:nbytes]) for start, nbytes in wanted[:-1]]
            return [*found, read_buffered(self._file, *wanted[-1])]
        read: list[bytes] = []
        if len(wanted) > _FEW and self._get_handle is not None and self._load is not None:
            last_page = round_down(self._file.size(), PAGE_BYTES)  # which is none, if it is there
            many = [place for place in wanted if place[0] + place[1] <= last_page]
            read = self._load.scattered(self._get_handle(), self._file, many, "headers")
        rest = wanted[len(read) :]  # `wanted` is in the file's order
        return [*read, *(read_buffered(self._file, *place) for place in rest)]


def is_asked_for(name: str, nbytes: int) -> bool:
    """Whether torch asks for a record beside the storages: the pickle, and small ones."""
    return name == _PICKLE or (not name.startswith("data/") and nbytes <= _MAX_TEXT_BYTES)


def scan_pickle(checkpoint: TorchFile) -> Scan:
    """The names in the pickle, found without running it; IntegrityError if it is damaged."""
    try:
        return torch_unpickler.scan(checkpoint.read(_PICKLE))
    except pickle_values.PickleError as wrong:
        raise IntegrityError(
            f"{checkpoint.path}: record 'data.pkl' is not a pickle of torch.save: {wrong}",
            expected="a pickle",
            found=str(wrong),
        ) from wrong


def check_calls(checkpoint: TorchFile, scan: Scan) -> None:
    """Refuse a pickle whose calls make far more than it holds: UnpicklingError; torch would not."""
    why = None if scan.plain else pickle_calls.refused(scan)
    if why is not None:
        raise pickle.UnpicklingError(
            f"{checkpoint.path}: record 'data.pkl' calls {why}; torch.save writes no such call. "
            "weights_only=False makes it, and any other: only for files of a source that you trust"
        )


def spans_of(checkpoint: TorchFile, file: File, scan: Scan) -> dict[str, Span]:
    """The bytes to read for each storage in the pickle, by key; errors as `places_of`."""
    from nvmeio._io.spans import Span

    places = places_of(checkpoint, scan).items()
    new = functools.partial(tuple.__new__, Span)
    return {key: new((file, *place, f"record 'data/{key}'")) for key, place in places}


def places_of(checkpoint: TorchFile, scan: Scan) -> dict[str, tuple[int, int]]:
    """Offset and length of each storage that the pickle refers to, by key.

    Raises IntegrityError if a record is missing, or of another size than the pickle says.
    """
    places: dict[str, tuple[int, int]] = {}
    records, kinds = checkpoint.records, {ref.kind: ref for ref in scan.storages.values()}
    dtypes = {kind: ref.dtype for kind, ref in kinds.items()}
    for key, ref in scan.storages.items():
        name = f"data/{key}"
        if name not in records:
            checkpoint.entry(name, ", to which data.pkl refers")  # which raises
        entry, dtype = records[name], dtypes[ref.kind]
        itemsize = 1 if dtype is None else dtype.itemsize
        nbytes = entry.nbytes if dtype is None else ref.numel * itemsize
        # A storage need not be a whole number of elements; a remainder is not loaded.
        if not 0 <= entry.nbytes - nbytes < itemsize:
            raise size_error(checkpoint, name, nbytes)
        places[key] = entry.offset, nbytes
    return places


def unsafe_globals(file: File) -> list[str]:
    """The names in the pickle that ``weights_only=True`` refuses, by torch's own account."""
    with same_file(file) as same:
        try:
            return torch.serialization.get_unsafe_globals_in_checkpoint(same)
        except pickle.UnpicklingError as refused:  # an opcode that torch does not read
            return [str(refused)]


@contextlib.contextmanager
def same_file(file: File) -> Iterator[str]:
    """A path to the open file itself: another one may lie at its own path by now."""
    with files.in_use(file) as opened:
        yield f"/proc/self/fd/{opened.any_fd()}"


def size_error(checkpoint: TorchFile, name: str, nbytes: int) -> IntegrityError:
    there = checkpoint.records[name].nbytes
    return IntegrityError(
        f"{checkpoint.path}: record {name!r} has another size than data.pkl says: expected "
        f"{nbytes} bytes, found {there}",
        expected=nbytes,
        found=there,
    )
