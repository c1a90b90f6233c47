"""The zip container of torch checkpoints, read strictly: where each record lies, if it can.

Nothing is trusted. Before anybody allocates for a record, it is known to lie within the file, to
overlap no other, to be stored as it is (neither compressed nor encrypted), and to have a name of
its own. Archives refused here would make other readers read past the end, expand without bound, or
read different bytes depending on which of two headers they believe.

The layout of a file, all integers little-endian:

    local header, name, extra (padding) | data | descriptor    for each record
    central directory: one entry for each record
    zip64 end record, zip64 locator, end record

Source: PKWARE APPNOTE.TXT 6.3.10, sections 4.3.7 (local header), 4.3.9 (descriptor), 4.3.12
(central directory), 4.3.14 to 4.3.16 (end records), 4.5.3 (zip64 extra field).
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from nvmeio.errors import IntegrityError, counted

# A part of a checkpoint that several ranks wrote; see `torch_part`.
PART_MAGIC = b"nvmeio-part-1\n"
LOCAL_MAGIC = b"PK\x03\x04"
DESCRIPTOR_MAGIC = b"PK\x07\x08"
CENTRAL_MAGIC = b"PK\x01\x02"
END_MAGIC = b"PK\x05\x06"
END64_MAGIC = b"PK\x06\x06"
LOCATOR_MAGIC = b"PK\x06\x07"

# flags, method, time, date, CRC, compressed size, size, name and extra length
LOCAL = struct.Struct("<4sHHHHHIIIHH")
# made by, needed, flags, method, time, date, CRC, compressed size, size, name, extra and comment
# length, disk, attributes, attributes, header offset
CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
# disk, directory's disk, entries here, entries, directory size, directory offset, comment length
_END = struct.Struct("<4sHHHHIIH")
# record size, made by, needed, disk, directory's disk, entries here, entries, size, offset
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR = struct.Struct("<4sIQI")

_NO_SUMS = [0, 0, 0]
_FLAG_ENCRYPTED = 1
FLAG_DESCRIPTOR = 1 << 3
_FLAG_STRONG_ENCRYPTION = 1 << 6
_ZIP64_EXTRA = 1

# The offset of the CRC-32 in an entry of the central directory.
CENTRAL_CRC_OFFSET = 16

# A record that TorchScript archives have; they alone compress others (their code).
SCRIPT_MARK = b"constants.pkl"
_MAX16, MAX32 = 0xFFFF, 0xFFFFFFFF
_MAX_COMMENT_BYTES = 0xFFFF

# A file of up to this is read through the page cache: making a handle, and closing it, takes longer
# than that. At 16 MiB a handle's load takes two thirds of its CPU time.
SMALL_BYTES = 8 << 20

# The directory is read as a whole. A record takes about 70 bytes of it: this is four million.
_MAX_DIRECTORY_BYTES = 256 << 20

ReadMany = Callable[[Sequence[tuple[int, int]]], list[bytes]]
"""Reads (offset, nbytes) pairs, all of them within the file."""


class ZipEntry(NamedTuple):
    """One record: `name` has the leading folder, `header_offset` is that of its local header.

    `crc` is the CRC-32 as the directory has it, at `crc_at` in the file; 0 also if none was
    computed. `descriptor` is the length of the data descriptor behind it, 0 if there is none.
    """

    name: str
    header_offset: int
    offset: int
    nbytes: int
    crc: int
    crc_at: int
    descriptor: int

    @property
    def end(self) -> int:
        """The first byte behind it and its descriptor."""
        return self.offset + self.nbytes + self.descriptor


# There may be hundreds of thousands: `ZipEntry()` is a function of Python's.
_new_entry = functools.partial(tuple.__new__, ZipEntry)


class Archive(NamedTuple):
    """The result of `parse`; the entries are in the order of the file."""

    path: str
    nbytes: int
    directory_offset: int
    entries: list[ZipEntry]

    @property
    def is_script(self) -> bool:
        """Whether it is a TorchScript archive, of which some records may be compressed."""
        mark = SCRIPT_MARK.decode()
        return bool([entry for entry in self.entries if entry.name[-len(mark) :] == mark])

    @property
    def prefix(self) -> str:
        """The folder that torch puts every record in, with a slash; "" if there is none."""
        folder, slash, _ = self.entries[0].name.partition("/") if self.entries else ("", "", "")
        return folder + slash if slash else ""

    def storages(self) -> list[ZipEntry]:
        """The records that are storages, in the order of the file."""
        folder = f"{self.prefix}data/"
        return [entry for entry in self.entries if entry.name.startswith(folder)]

    @property
    def is_summed(self) -> bool:
        """Whether its records have CRC-32s.

        Writers compute those of all storages or of none: a 0 among others is the sum of its bytes,
        and another one among zeros a flipped bit. So the larger half decides.
        """
        filled = [entry.crc for entry in self.storages() or self.entries if entry.nbytes]
        return 2 * sum(map(bool, filled)) >= len(filled) > 0

    def records(self) -> dict[str, ZipEntry]:
        """The records by name, as torch calls them: without the leading folder."""
        prefix = self.prefix
        length = len(prefix)
        return {
            entry.name[length:]: entry for entry in self.entries if entry.name[:length] == prefix
        }


class _Central(NamedTuple):
    """An entry of the directory, before its local header is looked at."""

    header_offset: int
    end: int  # of its data, or before
    name: bytes
    kept: tuple[int, int]  # flags and method
    nbytes: int
    crc: int
    crc_at: int
    wide: bool


_new_central = functools.partial(tuple.__new__, _Central)


def parse(read_many: ReadMany, nbytes: int, path: str) -> Archive:
    """Find every record of a zip archive, and check that their entries are possible.

    Raises IntegrityError, which says which record and what is wrong, if it is not an archive, or
    one that no torch.save writes. Cost: three reads, and one of about 60 bytes a record.
    """
    return _Parser(read_many, nbytes, path).archive()


def as_text(name: bytes) -> str:
    """A record's name; torch writes UTF-8, older tools code page 437."""
    try:
        return name.decode("utf-8")
    except UnicodeDecodeError:
        return name.decode("cp437")


class _Parser:
    def __init__(self, read_many: ReadMany, nbytes: int, path: str) -> None:
        self._read_many = read_many
        self._size = nbytes
        self._path = path

    def archive(self) -> Archive:
        offset, size, count = self._end_records()
        centrals = self._directory(self._read(offset, size), offset, count)
        return Archive(self._path, self._size, offset, self._entries(centrals, offset))

    def _read(self, offset: int, nbytes: int) -> bytes:
        return self._read_many([(offset, nbytes)])[0]

    def _wrong(self, what: str, expected: object, found: object) -> IntegrityError:
        return IntegrityError(
            f"{self._path}: {what}: expected {expected}, found {found}",
            expected=expected,
            found=found,
        )

    # The end records

    def _end_records(self) -> tuple[int, int, int]:
        """Offset, size and number of entries of the central directory."""
        if self._size < _END.size:
            raise self._wrong("no zip archive", f"{_END.size} bytes or more", self._size)
        length = min(self._size, _END.size + _MAX_COMMENT_BYTES)
        # Nearly every archive has no comment: one small read will do.
        tail = self._read(self._size - _END.size, _END.size)
        at = self._size - _END.size
        if not (tail.startswith(END_MAGIC) and tail.endswith(b"\0\0")):
            tail = self._read(self._size - length, length)
            found = tail.rfind(END_MAGIC)
            if found < 0 or len(tail) - found < _END.size:
                raise self._wrong("not a zip archive, or truncated", "an end record", "none")
            at = self._size - length + found
            tail = tail[found:]
        _, disk, first_disk, here, count, size, offset, comment = _END.unpack_from(tail)
        if at + _END.size + comment != self._size:
            raise self._wrong(
                "bytes behind the end record", self._size, at + _END.size + int(comment)
            )
        stop = at
        locator_at = at - _LOCATOR.size
        locator = self._read(locator_at, _LOCATOR.size) if locator_at >= 0 else b""
        if locator.startswith(LOCATOR_MAGIC):
            stop, disk, first_disk, here, count, size, offset = self._end64(
                locator, locator_at, (disk, first_disk, here, count, size, offset)
            )
        elif MAX32 in (size, offset) or count == _MAX16:
            raise self._wrong("the zip64 end record is missing", "a zip64 locator", locator[:4])
        if disk or first_disk or here != count:
            raise self._wrong("a zip archive over several disks", "one", (disk, first_disk))
        if offset + size != stop:
            raise self._wrong(
                "the central directory is not where the end record says", stop, offset + size
            )
        if size > _MAX_DIRECTORY_BYTES:
            raise self._wrong(
                "a central directory of absurd size", f"at most {_MAX_DIRECTORY_BYTES}", size
            )
        if count * CENTRAL.size > size:
            raise self._wrong(
                "more records than the central directory has room for",
                f"at most {size // CENTRAL.size}",
                count,
            )
        return offset, size, count

    def _end64(
        self, locator: bytes, locator_at: int, narrow: tuple[int, ...]
    ) -> tuple[int, int, int, int, int, int, int]:
        _, disk, at, _ = _LOCATOR.unpack(locator)
        if disk or at + _END64.size > locator_at:
            raise self._wrong(
                "the zip64 locator points behind itself", f"at most {locator_at - _END64.size}", at
            )
        magic, length, _, _, *wide = _END64.unpack(self._read(at, _END64.size))
        if magic != END64_MAGIC:
            raise self._wrong("the zip64 end record is damaged", END64_MAGIC, magic)
        if at + 12 + length != locator_at:
            raise self._wrong(
                "the zip64 end record does not end at its locator, as in a file that holds several "
                "archives",
                locator_at,
                at + 12 + length,
            )
        limits = (_MAX16, _MAX16, _MAX16, _MAX16, MAX32, MAX32)
        for told, value, limit in zip(narrow, wide, limits, strict=True):
            if told not in (limit, value):
                raise self._wrong("the end record contradicts the zip64 end record", value, told)
        first, second, here, count, size, offset = wide
        return at, first, second, here, count, size, offset

    def _record_is(self, name: bytes, what: str, expected: object, found: object) -> IntegrityError:
        return self._wrong(f"record {as_text(name)!r}{what}", expected, found)

    # The central directory

    def _directory(self, data: bytes, offset: int, count: int) -> list[_Central]:
        """The entries of the directory, which lies at `offset`, in the order of the file."""
        size = len(data)
        found: list[_Central] = []
        compressed: tuple[bytes, int] | None = None
        is_script, mark_length = False, len(SCRIPT_MARK)
        at = 0
        for number in range(count):
            if size - at < CENTRAL.size:
                raise self._wrong(
                    "the central directory ends too early", counted(count, "record"), number
                )
            magic, _, _, flags, method, _, _, crc, packed, nbytes, *rest = CENTRAL.unpack_from(
                data, at
            )
            name_length, extra_length, comment_length, disk, _, _, header_offset = rest
            name_at = at + CENTRAL.size
            extra_at = name_at + name_length
            end = extra_at + extra_length + comment_length
            if magic != CENTRAL_MAGIC or end > size:
                raise self._wrong(
                    f"entry {number} of the central directory is damaged", CENTRAL_MAGIC, magic
                )
            name, wide = data[name_at:extra_at], False
            if MAX32 in (packed, nbytes, header_offset):
                extra = data[extra_at : extra_at + extra_length]
                wide, (nbytes, packed, header_offset) = self._wide(
                    name, extra, (nbytes, packed, header_offset)
                )
            if flags & (_FLAG_ENCRYPTED | _FLAG_STRONG_ENCRYPTION):
                raise self._record_is(name, " is encrypted", "plain bytes", hex(flags))
            if method:
                compressed = compressed or (name, method)
            elif packed != nbytes:
                raise self._record_is(name, " has two sizes", nbytes, packed)
            if disk:
                raise self._record_is(name, " is on another disk", 0, disk)
            reached = header_offset + LOCAL.size + name_length + packed
            if reached > offset:
                raise self._past_the_end(name, offset, packed, header_offset)
            is_script = is_script or name[-mark_length:] == SCRIPT_MARK
            crc_at = offset + at + CENTRAL_CRC_OFFSET
            found.append(
                _new_central(
                    (header_offset, reached, name, (flags, method), packed, crc, crc_at, wide)
                )
            )
            at = end
        if at != size:
            raise self._wrong("bytes behind the central directory's last entry", at, size)
        if len({central.name for central in found}) < count:
            twice, _ = Counter(central.name for central in found).most_common(1)[0]
            raise self._record_is(twice, " is there twice", "one", "two")
        found.sort()
        for before, central in itertools.pairwise(found):
            if central.header_offset < before.end:
                raise self._overlap(before.name, before.end, central)
        if compressed and not is_script:
            raise self._record_is(
                compressed[0], " is compressed", "method 0 (stored)", f"method {compressed[1]}"
            )
        return found

    def _past_the_end(self, name: bytes, limit: int, nbytes: int, offset: int) -> IntegrityError:
        return self._record_is(
            name,
            " lies past the end of the data",
            f"an end at byte {limit} or before",
            f"{nbytes} bytes at {offset}",
        )

    def _overlap(self, before: bytes, end: int, central: _Central) -> IntegrityError:
        return self._record_is(
            central.name,
            f" overlaps {as_text(before)!r}",
            f"a start at byte {end} or later",
            central.header_offset,
        )

    def _wide(
        self, name: bytes, extra: bytes, narrow: tuple[int, int, int]
    ) -> tuple[bool, list[int]]:
        """Size, packed size and offset, of which some may be 64-bit ones in the extra field."""
        is_there, values = self._zip64(name, extra)
        if len(values) < narrow.count(MAX32):
            raise self._record_is(
                name, ": no 64-bit size or offset", "a zip64 extra field", "none, or one too short"
            )
        left = iter(values)
        return is_there, [next(left) if value == MAX32 else value for value in narrow]

    def _zip64(self, name: bytes, extra: bytes) -> tuple[bool, list[int]]:
        at = 0
        while at + 4 <= len(extra):
            kind, length = struct.unpack_from("<HH", extra, at)
            if at + 4 + length > len(extra):
                raise self._record_is(
                    name, ": a broken extra field", f"at most {len(extra) - at - 4}", length
                )
            if kind == _ZIP64_EXTRA:
                return True, list(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            at += 4 + length
        return False, []

    # The local headers

    def _entries(self, centrals: list[_Central], directory_offset: int) -> list[ZipEntry]:
        """The records, after each one's header has been held against its entry."""
        headers = self._read_many([(c.header_offset, LOCAL.size + len(c.name)) for c in centrals])
        found: list[ZipEntry] = []
        before, position = b"", 0
        for central, data in zip(centrals, headers, strict=True):
            header_offset, _, name, kept, nbytes, crc, crc_at, _ = central
            length = len(name)
            magic, _, flags, method, _, _, *sums, name_length, extra_length = LOCAL.unpack_from(
                data
            )
            if (
                magic != LOCAL_MAGIC
                or name_length != length
                or data[LOCAL.size :] != name
                or (flags, method) != kept
                or not flags & FLAG_DESCRIPTOR
                or sums != _NO_SUMS  # CRC and sizes, which torch has in the descriptor alone
            ):
                self._check_header(central, data)
            offset = header_offset + LOCAL.size + name_length + extra_length
            descriptor = 0
            if flags & FLAG_DESCRIPTOR:
                # torch's own rule (miniz): wide where the size or the header's offset needs it.
                descriptor = 24 if nbytes >= MAX32 or header_offset >= MAX32 else 16
            if header_offset < position:
                raise self._overlap(before, position, central)
            before, position = name, offset + nbytes + descriptor
            if position > directory_offset:
                raise self._past_the_end(name, directory_offset, nbytes, offset)
            try:
                text = name.decode()
            except UnicodeDecodeError:
                text = as_text(name)
            found.append(_new_entry((text, header_offset, offset, nbytes, crc, crc_at, descriptor)))
        return found

    def _check_header(self, central: _Central, data: bytes) -> None:
        """Check a header but for CRC and sizes that are in the descriptor or the 64-bit field."""
        name, (flags, method) = central.name, central.kept
        magic, _, *kept, _, _, crc, packed, nbytes, name_length, _ = LOCAL.unpack_from(data)
        if magic != LOCAL_MAGIC:
            what = f" has no header at byte {central.header_offset}"
            raise self._record_is(name, what, LOCAL_MAGIC, magic)
        if name_length != len(name) or data[LOCAL.size :] != name:
            there = data[LOCAL.size :]
            raise self._record_is(name, " has another name in its header", name, there)
        if kept != [flags, method]:
            raise self._record_is(
                name,
                ": header and directory disagree on how it is stored",
                (hex(flags), method),
                (hex(kept[0]), kept[1]),
            )
        follows = flags & FLAG_DESCRIPTOR
        sizes_known = not follows or nbytes or packed
        if (
            method == 0
            and sizes_known
            and not central.wide
            and (packed, nbytes) != (central.nbytes,) * 2
        ):
            what = ": header and directory disagree on its size"
            raise self._record_is(name, what, central.nbytes, (packed, nbytes))
        if (not follows or crc) and crc != central.crc:
            what = ": header and directory disagree on its CRC-32"
            raise self._record_is(name, what, hex(central.crc), hex(crc))


# Writing one


def wide_field(nbytes: int, packed: int, header_offset: int) -> bytes:
    """The extra field for values above 32 bits; b"" if there are none."""
    wide = [nbytes, packed] if nbytes >= MAX32 else []
    if header_offset >= MAX32:
        wide.append(header_offset)
    if not wide:
        return b""
    return struct.pack(f"<HH{len(wide)}Q", _ZIP64_EXTRA, 8 * len(wide), *wide)


def ends(count: int, start: int, end: int) -> bytes:
    """The end records, of both kinds, behind a directory at [start, end), as torch writes them."""
    size = end - start
    few = min(count, _MAX16)
    return b"".join(
        (
            _END64.pack(
                *(END64_MAGIC, _END64.size - 12, _MADE_BY, _NEEDED, 0, 0),
                *(count, count, size, start),
            ),
            _LOCATOR.pack(LOCATOR_MAGIC, 0, end, 1),
            _END.pack(END_MAGIC, 0, 0, few, few, min(size, MAX32), min(start, MAX32), 0),
        )
    )


# Unix and version 3.0 of the format; 4.5, which has 64-bit sizes, is needed.
_MADE_BY, _NEEDED = 0x31E, 45


def descriptor_matches(data: bytes, entry: ZipEntry) -> bool:
    """Whether the data descriptor behind a record agrees with the directory."""
    form = struct.Struct("<4sIQQ" if entry.descriptor == 24 else "<4sIII")
    return form.unpack(data) == (DESCRIPTOR_MAGIC, entry.crc, entry.nbytes, entry.nbytes)
