"""The table of slots in a file: a record of 64 bytes for each slot.

A record is written in place, through the page cache, once the slot's bytes are on the drive, and
emptied before they are overwritten. So a killed process loses what it was writing and nothing else:
the next one reads the table, and goes on from the newest record, announced or not. After a crash of
the machine, records and bytes may be of different moments; every record has a checksum of itself
and of the slot's bytes, so that such a slot is found out when it is read, and is a miss.

Other processes may read a table while its writer changes it: they look at a counter in the header,
and then at the records that are newer than what they saw. It is written once for a batch of
records (`announce`), behind them, and before the bytes of those slots that were emptied.

A record names its block by a digest. A server names a block by the tokens in it, whatever weights
it computes with. So other causes of different blocks go into the digest: if one changes, nothing is
found, and nothing has to be removed first. Blocks that cannot outlive their process get a number of
that process as well; readers of its store take it from the table.
"""

from __future__ import annotations

import hashlib
import io
import mmap
import os
import struct
from collections.abc import Iterator
from typing import NamedTuple

import torch

from nvmeio._pages import round_up
from nvmeio._storage import crc32
from nvmeio._storage.locks import unlock

# Slots are whole pages, so that neither edge of a block is written through the page cache.
PAGE_BYTES = 4096
HEADER_BYTES = 4096
RECORD_BYTES = 64
DIGEST_BYTES = 32

_MAGIC = b"nvmeio blocks 1\0"
_HEADER = struct.Struct("<16sQQ")  # magic, bytes of a block, slots
_HEADER_CRC_AT = _HEADER.size
_LATEST_AT = 64  # of the header: the sequence number of the newest change
_WRITER_AT = 128  # a number of the process that has it open for writing
_TAG_AT = 160  # what the blocks are of, as far as it was said when they were last written
_GENERATION_AT = 192  # of the process that has it open for writing: how often names changed
_NAME_BYTES_AT = 200  # the longest whole name that is kept beside it; 0 keeps none
WRITER_BYTES = 16
TAG_BYTES = 32
# Digest, sequence number, nbytes, checksum of the block, checksum of the record; behind that the
# kind, which the checksum covers if there is one.
_RECORD = struct.Struct("<32sQQII")
_KIND = struct.Struct("<Q")
_SEQUENCE_WORD = DIGEST_BYTES // 8
_NBYTES_AT = DIGEST_BYTES + 8
_WORDS = RECORD_BYTES // 8


class SlotRecord(NamedTuple):
    """A slot that holds a block: the digest of its name, its length, its CRC-32 and its kind.

    `sequence` grows with every record that is written.
    """

    slot: int
    digest: bytes
    sequence: int
    nbytes: int
    crc: int
    kind: int


class NotATable(Exception):
    """A file is foreign, damaged, or of blocks of another size; says which."""


class Table:
    """A table that is open; it owns the descriptor.

    With `new` it writes an empty table, whatever the file holds. A writer's table of another number
    of slots gets this one, and keeps the records for which there is room; a reader takes it as it
    is. `slots_before` is how many there were. Raises NotATable if not `new`, and the file is none,
    or another's.
    """

    def __init__(
        self, fd: int, block_bytes: int, slots: int, new: bool, writer: bool = True
    ) -> None:
        self.slots = slots
        self._block_bytes = block_bytes
        header = _header(block_bytes, slots)
        if new:
            # Not truncated to nothing: a reader that has it mapped would be killed (SIGBUS).
            os.ftruncate(fd, max(os.fstat(fd).st_size, self.nbytes))
            _fill(fd, self.nbytes)
            os.pwrite(fd, header, 0)
        blocks_of, self.slots_before = sizes_in(fd)
        least = HEADER_BYTES + self.slots_before * RECORD_BYTES
        if blocks_of != block_bytes or os.fstat(fd).st_size < least:
            raise NotATable("its blocks have another size, or it is truncated")
        if not writer:
            self.slots = self.slots_before
        elif slots != self.slots_before:
            if slots > self.slots_before:
                # Bytes behind it may be of a time when it was larger.
                _fill(fd, self.nbytes, least)
            os.pwrite(fd, header, 0)
        # Never written through. Private, so that torch may have a buffer that counts as writable;
        # Linux shows what others write to the file anyway.
        flags, access = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
        # Opened once more: a mapping of what has the lock would keep it in a forked child.
        self._file = io.FileIO(f"/proc/self/fd/{fd}", "r+" if writer else "r")
        self._map = mmap.mmap(self._file.fileno(), self.nbytes, flags=flags, prot=access)
        self._latest = self._newest()
        self._lock = os.fdopen(fd, "rb", buffering=0)  # closes it, should nobody else

    @property
    def nbytes(self) -> int:
        return HEADER_BYTES + self.slots * RECORD_BYTES

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: those of a block, in whole pages."""
        return round_up(self._block_bytes, PAGE_BYTES)

    @property
    def latest(self) -> int:
        """The sequence number of the newest change, by any process."""
        (found,) = struct.unpack_from("<Q", self._map, _LATEST_AT)
        return int(found)

    @property
    def writer(self) -> bytes:
        """The number of the process that writes it, or did last."""
        return self._map[_WRITER_AT : _WRITER_AT + WRITER_BYTES]

    @property
    def tag(self) -> bytes:
        """The tag of its blocks; zeros if none was ever written."""
        return self._map[_TAG_AT : _TAG_AT + TAG_BYTES]

    def sign(self, writer: bytes, tag: bytes | None) -> None:
        """Record the writer, and the blocks' origin; None leaves that as it was."""
        os.pwrite(self._file.fileno(), writer, _WRITER_AT)
        if tag is not None:
            os.pwrite(self._file.fileno(), tag, _TAG_AT)

    @property
    def generation(self) -> int:
        """How often its writer has changed the names since it was opened."""
        (number,) = struct.unpack_from("<Q", self._map, _GENERATION_AT)
        return int(number)

    @property
    def name_bytes(self) -> int:
        """The longest whole name that is kept beside it; 0 if none are."""
        (nbytes,) = struct.unpack_from("<Q", self._map, _NAME_BYTES_AT)
        return int(nbytes)

    def set_generation(self, generation: int) -> None:
        os.pwrite(self._file.fileno(), struct.pack("<Q", generation), _GENERATION_AT)

    def set_name_bytes(self, nbytes: int) -> None:
        os.pwrite(self._file.fileno(), struct.pack("<Q", nbytes), _NAME_BYTES_AT)

    def put(self, slot: int, digest: bytes, nbytes: int, crc: int, kind: int = 0) -> None:
        record = _RECORD.pack(digest, self._latest + 1, nbytes, crc, 0)[:-4]
        last = _KIND.pack(kind)
        own = crc32.of_bytes(record + last if kind else record)
        self._write(slot, record + struct.pack("<I", own) + last)

    def empty(self, slot: int) -> None:
        """Say that a slot holds nothing that counts."""
        (nbytes,) = struct.unpack_from("<Q", self._map, self._at(slot) + _NBYTES_AT)
        if nbytes:
            # With a number, for readers to see that it changed; its checksum is that of no record.
            record = _RECORD.pack(bytes(DIGEST_BYTES), self._latest + 1, 0, 0, 0)
            self._write(slot, record + bytes(8))

    def copy(self, slot: int, to: int) -> None:
        """Say of another slot what is said of this one, as of the same age.

        Readers do not see it: for a table that nobody else has open.
        """
        at = self._at(slot)
        os.pwrite(self._file.fileno(), self._map[at : at + RECORD_BYTES], self._at(to))

    def cut(self, slots: int) -> None:
        """End behind fewer slots; the file keeps its size."""
        os.pwrite(self._file.fileno(), _header(self._block_bytes, slots), 0)
        self.slots = slots

    def _write(self, slot: int, record: bytes) -> None:
        os.pwrite(self._file.fileno(), record, self._at(slot))
        self._latest += 1

    @property
    def is_ahead(self) -> bool:
        """Whether there are records that were not announced."""
        return self._latest != self.latest

    def announce(self) -> None:
        """Tell readers to look at the records that were written since."""
        os.pwrite(self._file.fileno(), struct.pack("<Q", self._latest), _LATEST_AT)

    def _newest(self) -> int:
        """The number of the newest record; one that is damaged may have any."""
        latest, sequences = self.latest, self._sequences()
        possible = sequences[(sequences > latest) & (sequences <= latest + 2 * self.slots)]
        return int(possible.max()) if possible.numel() else latest

    @staticmethod
    def _at(slot: int) -> int:
        return HEADER_BYTES + slot * RECORD_BYTES

    def _sequences(self) -> torch.Tensor:
        words = torch.frombuffer(self._map, dtype=torch.int64, offset=HEADER_BYTES)
        return words.view(-1, _WORDS)[: self.slots, _SEQUENCE_WORD].clone()

    def records(self, since: int = 0) -> Iterator[tuple[int, SlotRecord | None]]:
        """Every slot that changed after `since`, oldest change first, and what it holds."""
        sequences = self._sequences()
        changed = (sequences > since).nonzero().flatten()
        for slot in changed[sequences[changed].argsort()].tolist():
            yield slot, self.record(slot)

    def record(self, slot: int) -> SlotRecord | None:
        """The record of a slot; None where it is empty or damaged."""
        at = self._at(slot)
        found = self._map[at : at + RECORD_BYTES]
        digest, sequence, nbytes, crc, own = _RECORD.unpack_from(found)
        (kind,) = _KIND.unpack_from(found, _RECORD.size)
        checked = found[: _RECORD.size - 4] + (found[_RECORD.size :] if kind else b"")
        if not nbytes or own != crc32.of_bytes(checked):
            return None
        return SlotRecord(slot, digest, sequence, nbytes, crc, kind)

    def is_damaged(self, slot: int) -> bool:
        """Whether there is a record of a slot that cannot be used; or one that is being written."""
        (nbytes,) = struct.unpack_from("<Q", self._map, self._at(slot) + _NBYTES_AT)
        return bool(nbytes) and self.record(slot) is None

    def close(self) -> None:
        """Close the file; the lock on it goes. Idempotent."""
        self._map.close()
        if not self._lock.closed:
            unlock(self._lock.fileno())
        self._lock.close()
        self._file.close()


def sizes_in(fd: int) -> tuple[int, int]:
    """Bytes of a block and number of slots, by the header of a table.

    Raises NotATable if the file is foreign or damaged.
    """
    header = os.pread(fd, _HEADER_CRC_AT + 4, 0)
    if header[:16] != _MAGIC:
        raise NotATable("it is not a table of blocks")
    if header[_HEADER_CRC_AT:] != struct.pack("<I", crc32.of_bytes(header[:_HEADER_CRC_AT])):
        raise NotATable("its header is damaged")
    _, block_bytes, slots = _HEADER.unpack(header[: _HEADER.size])
    return block_bytes, slots


def _header(block_bytes: int, slots: int) -> bytes:
    header = _HEADER.pack(_MAGIC, block_bytes, slots)
    return header + struct.pack("<I", crc32.of_bytes(header))


def _fill(fd: int, nbytes: int, at: int = 0) -> None:
    zeros = bytes(1 << 20)
    while at < nbytes:
        at += os.pwrite(fd, zeros[: nbytes - at], at)


Key = str | bytes


class Names(NamedTuple):
    """The way from names to digests.

    `key` goes into each digest; it is empty if names say all. `tag` is what the table says that its
    blocks are of; None says nothing. `generation` says how often that changed since the store was
    opened. `writer` is the number of the process that writes the store, if that matters.
    """

    key: bytes
    tag: bytes | None
    generation: int
    writer: bytes | None = None

    def is_of_another(self, writer: bytes) -> bool:
        """Whether they went with a process that wrote the store before."""
        return self.writer is not None and self.writer != writer

    def digest(self, name: Key) -> bytes:
        data = name.encode() if isinstance(name, str) else name
        return hashlib.blake2b(data, digest_size=DIGEST_BYTES, key=self.key).digest()


def names_of(identity: str | None, writer: bytes, generation: int) -> Names:
    """The names of the blocks of a store.

    `identity` is their origin; None if that is not known: they serve this opening alone; empty
    if their names say it all. `generation` 0 finds what earlier openings stored.
    """
    if generation or identity is None:
        text = f"{identity or ''}\0{generation}".encode() + writer
        key = hashlib.blake2b(text, digest_size=TAG_BYTES).digest()
        return Names(key, None, generation, writer)
    if not identity:
        return Names(b"", None, 0)
    tag = hashlib.blake2b(identity.encode(), digest_size=TAG_BYTES).digest()
    return Names(tag, tag, 0)
