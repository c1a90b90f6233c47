"""Every byte of a file, looked at once as it comes by, and a torch archive compared with itself.

`stream` reads the file in a ring of buffers, `Walk` gives each stretch of it to whoever knows what
must be there, `ArchiveCheck` knows that of an archive, which may be a part of a larger file.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from nvmeio._formats.torch_archives import torch_zip
from nvmeio._formats.torch_archives.torch_zip import ZipEntry
from nvmeio._io.handles import CallHandle
from nvmeio._io.inflight import InFlight, Stagings
from nvmeio._storage import crc32
from nvmeio.files import File

_CHUNK_BYTES = 8 << 20
_CHUNKS = 8

_PADDING = 0x4246  # torch's extra field "FB", filled with Z
_ZIP64 = 1
_TORCHS_MARK = "/.data/serialization_id"


class Problem(NamedTuple):
    """Something that is wrong.

    Attributes:
        record: The record's name, or "" where it is the archive itself.
        what: The error in it.
    """

    record: str
    what: str


Feed = Callable[[int, int], None]
"""Is called with address and length of the next bytes of a file."""

Stream = Callable[[Feed | None], None]
"""Reads a file from its first byte to its last; without reading where nobody is to be called."""


def stream(
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


class Stretch(NamedTuple):
    """A part of the file, [start, end), with one meaning.

    `conclude` is called at its end, with the CRC-32 of its bytes, or with the bytes if `kept`: they
    are a few, and wanted as they are.
    """

    start: int
    end: int
    conclude: Callable[[int, bytes], object]
    kept: bool = False


class Walk:
    """Looks at the bytes of a file as they come by, from first to last.

    Args:
        stretches: In the order of the file, without overlaps; the next one is asked for at the end
            of the one before.
    """

    def __init__(self, stretches: Iterable[Stretch]) -> None:
        self._left = iter(stretches)
        self._stretch = next(self._left, None)
        self._position = 0
        self._crc = 0
        self._part = bytearray()

    def feed(self, address: int, nbytes: int) -> None:
        """Look at the next bytes of the file."""
        begin, end = self._position, self._position + nbytes
        self._position = end
        while (stretch := self._stretch) is not None:
            low, high = max(stretch.start, begin), min(stretch.end, end)
            if low < high and stretch.kept:
                self._part += ctypes.string_at(address + low - begin, high - low)
            elif low < high:
                self._crc = crc32.of_memory(address + low - begin, high - low, self._crc)
            if stretch.end > end:
                return
            stretch.conclude(self._crc, bytes(self._part))
            self._stretch = next(self._left, None)
            self._crc = 0
            self._part.clear()


class ArchiveCheck:
    """Compares the records of an archive with its directory.

    Args:
        archive: The archive, parsed.
        directory: All bytes from its central directory on.
        base: The archive's first byte in its file.
    """

    def __init__(self, archive: torch_zip.Archive, directory: bytes, base: int = 0) -> None:
        self._base = base
        self.problems: list[Problem] = []
        self.unchecked = 0
        self._archive = archive
        self._directory = directory
        self._is_summed = archive.is_summed
        # Not one that somebody has packed with another tool, whose fields nobody here knows.
        self._is_torchs = any(entry.name.endswith(_TORCHS_MARK) for entry in archive.entries)

    def stretches(self) -> Iterator[Stretch]:
        """Header, data and descriptor of each record."""
        for entry in self._archive.entries:
            data, end = entry.offset, entry.offset + entry.nbytes
            found = (
                Stretch(entry.header_offset, data, partial(self._header, entry), kept=True),
                Stretch(data, end, partial(self._data, entry)),
                Stretch(end, entry.end, partial(self._descriptor, entry), kept=True),
            )
            for stretch in found:
                if stretch.start < stretch.end:
                    start, end = stretch.start + self._base, stretch.end + self._base
                    yield stretch._replace(start=start, end=end)

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
