"""Checking a checkpoint: the CRC-32 of every record, and that the archive agrees with itself.

A torch archive is read from its first byte to its last, as one stream of large direct reads in a
ring of buffers, and each byte is looked at once: a header is compared with the directory's entry, a
record's bytes go into its CRC-32, its descriptor must say what the directory says. Of a safetensors
file, which has no checksums, the structure is checked; of one that `nvmeio pack` wrote, which has
them in its index, every byte.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from nvmeio._formats import packed_index
from nvmeio._formats.packed_index import Share
from nvmeio._formats.safetensors.headers import Header
from nvmeio._formats.safetensors.open_set import header_of
from nvmeio._formats.sniff import Kind, NoCheckpointError, kind_of, open_checkpoint
from nvmeio._formats.torch_archives import torch_zip
from nvmeio._formats.torch_archives.torch_file import TorchFile, scan_pickle, spans_of
from nvmeio._formats.torch_archives.torch_part import HEAD_BYTES, head_of
from nvmeio._formats.torch_archives.torch_zip import ZipEntry
from nvmeio._io.handles import CallHandle
from nvmeio._io.inflight import InFlight, Stagings
from nvmeio._io.spans import Load
from nvmeio._storage import crc32
from nvmeio._threads.interruptible import run_interruptible
from nvmeio.errors import IntegrityError
from nvmeio.files import File, read_buffered
from nvmeio.handle import AioHandle

_CHUNK_BYTES = 8 << 20
_CHUNKS = 8

_PADDING = 0x4246  # torch's extra field "FB", filled with Z
_ZIP64 = 1
_TORCHS_MARK = "/.data/serialization_id"


class Problem(NamedTuple):
    """Something that is wrong.

    Attributes:
        record: The record's name, or "" where it is the archive itself.
        what: What is wrong with it.
    """

    record: str
    what: str


class Verdict(NamedTuple):
    """What `verify` found.

    Attributes:
        path: The file.
        kind: Its format.
        nbytes: Its size.
        records: How many records (of safetensors: tensors) it has; 0 if nobody can tell.
        unchecked: How many of them have no checksum.
        problems: What is wrong; empty if nothing is.
        what: Of a rank's part on its own drive, or of a packed model in parts: which.
    """

    path: str
    kind: Kind
    nbytes: int
    records: int
    unchecked: int
    problems: list[Problem]
    what: str = ""


def verify(
    path: str | os.PathLike[str],
    *,
    handle: AioHandle | None = None,
    progress: Callable[[int], None] | None = None,
) -> Verdict:
    """Check every byte of a checkpoint that can be checked; blocks.

    Args:
        path: A torch archive, of nvmeio.save or torch.save, a safetensors file, or what a
            Checkpointer with ``shared=False`` wrote on the drive of one rank.
        handle: Moves the bytes, and stays open; None makes one for this call.
        progress: Called with the number of bytes done since the last call.

    Returns:
        What was found; damage is no error here.

    Raises:
        NoCheckpointError: The file is none of these, or one that has nothing to check: torch's
            format from before its zip files, a TorchScript archive.
        TransferError: It cannot be opened or read.

    Cost: one read of the file, in 64 MiB of memory.
    """
    flight = InFlight()
    return run_interruptible(
        lambda: _verify(path, handle, progress or (lambda nbytes: None), flight), flight.cancel
    )


def _verify(
    path: str | os.PathLike[str],
    handle: AioHandle | None,
    progress: Callable[[int], None],
    flight: InFlight,
) -> Verdict:
    kinds = {"safetensors": _verify_safetensors, "part": _verify_part, "torch": _verify_archive}
    with open_checkpoint(path) as file, CallHandle(handle, path) as call_handle:
        kind = kind_of(file)
        if kind == "torch legacy":
            raise NoCheckpointError(
                f"{path} is in torch's format from before its zip files, which has no checksums"
            )
        return kinds[kind](file, call_handle, partial(_stream, file, call_handle, progress, flight))


Feed = Callable[[int, int], None]
"""Is called with address and length of the next bytes of a file."""

Stream = Callable[[Feed | None], None]
"""Reads a file from its first byte to its last; without reading where nobody is to be called."""


def _stream(
    file: File,
    call_handle: CallHandle,
    progress: Callable[[int], None],
    flight: InFlight,
    feed: Feed | None,
) -> None:
    size = file.size()
    if feed is None:
        progress(size)
        return
    handle = call_handle.get()
    stagings = Stagings(min(_CHUNK_BYTES, size), _CHUNKS, torch.device("cpu"))

    def take(chunk: torch.Tensor, nbytes: int) -> None:
        feed(chunk.data_ptr(), nbytes)
        progress(nbytes)
        stagings.give_back(chunk)

    with flight:
        for offset in range(0, size, _CHUNK_BYTES):
            chunk, nbytes = stagings.take(flight), min(_CHUNK_BYTES, size - offset)
            begin = partial(handle.async_pread, chunk[:nbytes], file, offset)
            flight.start(begin, nbytes, partial(take, chunk, nbytes))


def _verify_safetensors(file: File, handle: CallHandle, stream: Stream) -> Verdict:
    """Check every byte of what `nvmeio pack` wrote; other files have no checksums."""
    nbytes, problems = file.size(), []
    count = unchecked = 0
    try:
        header = header_of(file)
        count = unchecked = len(header.tensors)
        begin = min((entry.start for entry in header.tensors.values()), default=nbytes)
        shares = _packed_shares(read_buffered(file, 0, begin), header, file.path)
    except IntegrityError as wrong:
        problems.append(Problem("", str(wrong)))
        shares = None
    if shares is None:
        stream(None)
    else:
        problems += _check_shares(stream, shares)
        unchecked = 0
    what = "" if problems else packed_index.part_in_words(header.metadata)
    return Verdict(file.path, "safetensors", nbytes, count, unchecked, problems, what)


def _verify_part(file: File, handle: CallHandle, stream: Stream) -> Verdict:
    """Check one rank's part of a checkpoint, which has one checksum."""
    nbytes = file.size()
    try:
        head = head_of(file)
    except IntegrityError as wrong:
        stream(None)
        return Verdict(file.path, "part", nbytes, 0, 0, [Problem("", str(wrong))])
    if head.sum is None:
        stream(None)
        return Verdict(file.path, "part", nbytes, 1, 1, [], head.what)
    problems = _check_shares(stream, [Share(head.what, HEAD_BYTES, nbytes, head.sum)])
    return Verdict(file.path, "part", nbytes, 1, 0, problems, head.what)


def _packed_shares(prefix: bytes, header: Header, path: str) -> list[Share] | None:
    """The ranges of a packed file that have a checksum; None if it has none."""
    if not packed_index.may_be_packed(prefix):
        return None
    text = header.metadata.get(packed_index.KEY)
    try:
        index = None if text is None else packed_index.read(text)
        whole = packed_index.is_whole(prefix, index)
        sums = None if index is None else packed_index.sums_in(index, header.tensors)
        of_part = header.metadata.get(packed_index.PART)
        part = None if of_part is None else packed_index.read_part(of_part)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as failed:
        whole, told = False, f"its index cannot be read ({type(failed).__name__}: {failed})"
    else:
        told = f"bytes [0, {len(prefix)}), its header, are not what was packed there"
    if not whole:
        raise IntegrityError(f"{path}: {told}", expected="what nvmeio pack writes", found=told)
    if part is not None:
        return [
            Share(packed_index.in_words(part), len(prefix) + start, len(prefix) + end, value)
            for start, end, value in packed_index.spans_of(part)
            if start < end
        ]
    return None if sums is None else packed_index.shares_of(header.tensors, sums)


class _Stretch(NamedTuple):
    """A part of the file, [start, end), with one meaning.

    `conclude` is called at its end, with the CRC-32 of its bytes, or with the bytes if `kept`: they
    are a few, and wanted as they are.
    """

    start: int
    end: int
    conclude: Callable[[int, bytes], object]
    kept: bool = False


class _Walk:
    """Looks at the bytes of a file as they come by, from first to last."""

    def __init__(self, stretches: Iterable[_Stretch]) -> None:
        self._left = deque(stretches)
        self._position = 0
        self._crc = 0
        self._part = bytearray()

    def feed(self, address: int, nbytes: int) -> None:
        """Look at the next bytes of the file."""
        begin, end = self._position, self._position + nbytes
        self._position = end
        while self._left:
            stretch = self._left[0]
            low, high = max(stretch.start, begin), min(stretch.end, end)
            if low < high and stretch.kept:
                self._part += ctypes.string_at(address + low - begin, high - low)
            elif low < high:
                self._crc = crc32.of_memory(address + low - begin, high - low, self._crc)
            if stretch.end > end:
                return
            stretch.conclude(self._crc, bytes(self._part))
            self._left.popleft()
            self._crc = 0
            self._part.clear()


def _check_shares(stream: Stream, shares: Sequence[Share]) -> list[Problem]:
    """Read a file, and compare the CRC-32 of each share."""
    problems: list[Problem] = []

    def conclude(share: Share, crc: int, _: bytes) -> None:
        if crc != share.sum:
            told = f"bytes [{share.start}, {share.end}) are not what was written there: "
            told += f"their CRC-32 is {crc:#010x} and should be {share.sum:#010x}"
            problems.append(Problem(share.name, told))

    stream(_Walk(_Stretch(s.start, s.end, partial(conclude, s)) for s in shares).feed)
    return problems


def _verify_archive(file: File, handle: CallHandle, stream: Stream) -> Verdict:
    nbytes = file.size()
    try:
        checkpoint = TorchFile(file, handle.get, Load())
    except IntegrityError as wrong:
        return Verdict(file.path, "torch", nbytes, 0, 0, [Problem("", str(wrong))])
    archive = checkpoint.archive
    if archive.is_script:
        raise NoCheckpointError(f"{file.path} is a TorchScript archive")
    at = archive.directory_offset
    check = _ArchiveCheck(archive, read_buffered(file, at, archive.nbytes - at))
    stream(_Walk(check.stretches()).feed)
    problems = check.problems
    try:
        spans_of(checkpoint, file, scan_pickle(checkpoint))
    except IntegrityError as wrong:
        # A problem of the pickle's own bytes has been told, with the record's name.
        if not any(problem.record.endswith("data.pkl") for problem in problems):
            problems.append(Problem("", str(wrong)))
    return Verdict(file.path, "torch", nbytes, len(archive.entries), check.unchecked, problems)


class _ArchiveCheck:
    """Compares the records of an archive with its directory."""

    def __init__(self, archive: torch_zip.Archive, directory: bytes) -> None:
        self.problems: list[Problem] = []
        self.unchecked = 0
        self._archive = archive
        self._directory = directory
        self._is_summed = archive.is_summed
        # Not one that somebody has packed with another tool, whose fields nobody here knows.
        self._is_torchs = any(entry.name.endswith(_TORCHS_MARK) for entry in archive.entries)

    def stretches(self) -> Iterator[_Stretch]:
        """Header, data and descriptor of each record."""
        for entry in self._archive.entries:
            data, end = entry.offset, entry.offset + entry.nbytes
            found = (
                _Stretch(entry.header_offset, data, partial(self._header, entry), kept=True),
                _Stretch(data, end, partial(self._data, entry)),
                _Stretch(end, entry.end, partial(self._descriptor, entry), kept=True),
            )
            yield from (stretch for stretch in found if stretch.start < stretch.end)

    def _header(self, entry: ZipEntry, _: int, header: bytes) -> None:
        self.problems += [Problem(entry.name, x) for x in self._wrong_in_header(entry, header)]

    def _data(self, entry: ZipEntry, crc: int, _: bytes) -> None:
        if entry.crc == 0 and crc != 0 and not self._is_summed:
            self.unchecked += 1  # nobody computed one: checksum=False, or torch told not to
        elif entry.crc != crc:
            told = f"its CRC-32 is {crc:#010x} and should be {entry.crc:#010x}"
            self.problems.append(Problem(entry.name, told))

    def _descriptor(self, entry: ZipEntry, _: int, descriptor: bytes) -> None:
        if not torch_zip.descriptor_matches(descriptor, entry):
            told = "its data descriptor contradicts the central directory"
            self.problems.append(Problem(entry.name, told))

    def _wrong_in_header(self, entry: ZipEntry, header: bytes) -> Iterator[str]:
        """Compare what `parse` has not: it refuses what misleads, not every flipped bit."""
        central_at = entry.crc_at - torch_zip.CENTRAL_CRC_OFFSET - self._archive.directory_offset
        # Version needed, flags, method, time and date are the same in both.
        mine = header[4:14]
        theirs = self._directory[central_at + 6 : central_at + 16]
        if mine != theirs:
            yield "its header contradicts the central directory"
        name_length, extra_length = struct.unpack_from("<HH", header, 26)
        extra = header[30 + name_length :]
        at = 0
        while at < extra_length:
            if at + 4 > extra_length:
                yield "its header ends within a field"
                return
            kind, length = struct.unpack_from("<HH", extra, at)
            field = extra[at + 4 : at + 4 + length]
            if len(field) < length:
                yield "a field of its header is longer than the header"
                return
            if kind == _PADDING and field.strip(b"Z"):
                yield "the padding before its data is damaged"
            elif kind == _ZIP64 and not self._is_zip64(field, entry):
                yield "its 64-bit size or offset contradicts the central directory"
            elif kind not in (_PADDING, _ZIP64) and self._is_torchs:
                yield "its header has a field that torch does not write"
            at += 4 + length

    @staticmethod
    def _is_zip64(field: bytes, entry: ZipEntry) -> bool:
        if len(field) % 8:
            return False
        values = struct.unpack(f"<{len(field) // 8}Q", field)
        return all(value in (entry.nbytes, entry.header_offset) for value in values)
