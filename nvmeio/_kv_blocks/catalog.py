"""What lies where in a store: its two files, and which slot holds which block. No block is moved.

Asked through `locked`, by whoever has a turn of the store and cannot be interrupted: under a lock
that is held while records are written to the page cache, or the file grows. `Index.where` alone is
read without it: one look into a dict.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from nvmeio._files.descriptors import open_error
from nvmeio._kv_blocks.table import WRITER_BYTES, NotATable, Table
from nvmeio._pages import round_up
from nvmeio._storage.durable import free_bytes, make_directory, reserve
from nvmeio._storage.locks import open_alone
from nvmeio._storage.untrusted import open_own
from nvmeio._threads.closing import on_error
from nvmeio.errors import TransferError, naming


class BlockPlace(NamedTuple):
    """The slot of a block, its length and its CRC-32."""

    slot: int
    nbytes: int
    crc: int


class Index:
    """Blocks by digest, least recently used first; slots up to a `limit`, as the file grows."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.limit = 0
        self.where: OrderedDict[bytes, BlockPlace] = OrderedDict()
        self.evictions = 0
        self._holds: dict[int, bytes] = {}
        self._free: list[int] = []
        self._pins: dict[int, int] = {}
        self._writing: set[int] = set()

    def recover(self, digest: bytes, place: BlockPlace) -> None:
        """Take over what the table says, before `grow`; later records count more."""
        self.forget_slot(place.slot)
        self.written(digest, place)

    def grow(self, limit: int) -> None:
        """Allow slots up to `limit`."""
        taken = self._holds.keys() | self._writing
        self._free += [slot for slot in range(self.limit, limit) if slot not in taken]
        self._free.sort(reverse=True)  # from the beginning of the file on
        self.limit = max(self.limit, limit)

    def take(self) -> int | None:
        """A slot to write into; what it held is forgotten. None if all are in use."""
        if self._free:
            slot = self._free.pop()
        else:
            found = next((p.slot for p in self.where.values() if p.slot not in self._pins), None)
            if found is None:
                return None
            slot = found
            self._forget(slot)
            self.evictions += 1
        self._writing.add(slot)
        return slot

    def written(self, digest: bytes, place: BlockPlace) -> None:
        """Note that a slot that was taken holds a block now."""
        self._writing.discard(place.slot)
        before = self.where.get(digest)
        if before is not None:
            self.forget_slot(before.slot)
        self.where[digest] = place
        self._holds[place.slot] = digest

    def give_up(self, slot: int) -> None:
        """Note that a slot that was taken was not written; or was, and does not count."""
        self._writing.discard(slot)
        self._free.append(slot)

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    def touch(self, digest: bytes) -> BlockPlace | None:
        """A block's place; it is the most recently used now."""
        place = self.where.get(digest)
        if place is not None:
            self.where.move_to_end(digest)
        return place

    def pin(self, slot: int) -> None:
        """Keep a slot from being taken while it is read."""
        self._pins[slot] = self._pins.get(slot, 0) + 1

    def unpin(self, slot: int) -> None:
        count = self._pins.pop(slot) - 1
        if count:
            self._pins[slot] = count
        elif slot not in self._holds and slot not in self._writing and slot < self.limit:
            self.give_up(slot)

    def forget_slot(self, slot: int) -> None:
        """Note that a block does not count any more; its slot is free once nobody reads it."""
        if self._forget(slot) and slot not in self._pins and slot < self.limit:
            self.give_up(slot)

    def _forget(self, slot: int) -> bool:
        digest = self._holds.pop(slot, None)
        if digest is None:
            return False
        place = self.where.get(digest)
        if place is not None and place.slot == slot:
            del self.where[digest]
        return True

    def __len__(self) -> int:
        return len(self.where)


logger = logging.getLogger("nvmeio")

# The file is allocated in steps of this size, so that a small cache takes little.
STEP_BYTES = 1 << 30
# So much of the file system is left to others; of a small one the twentieth part.
FLOOR_BYTES = 1 << 30
_FLOOR_SHARE = 20

Value = TypeVar("Value")


class Catalog:
    """Names, slots and files of a store; raises as `BlockStore`.

    Attributes:
        index: Which slot holds which block; `index.where` may be read by anybody.
        stored: Blocks that were written since it was opened.
        refused: Blocks that were not.
        damaged: Blocks that were dropped, when they were read or for what the table says of them.
    """

    def __init__(
        self, path: Path, block_bytes: int, slot_bytes: int, slots: int, writer: bool
    ) -> None:
        self._path = path
        self._block_bytes = block_bytes
        self._slot_bytes = slot_bytes
        self._writer = writer
        self.index = Index(slots)
        self.stored = self.refused = self.damaged = 0
        self._seen = 0
        self._is_full = False
        self._is_failing = False
        self._lock = threading.Lock()  # never taken by who may be interrupted
        self._made: list[str] = []  # files that were not there; an opening that fails removes them
        with contextlib.ExitStack() as undo:
            self._table, blocks = self._open()
            undo.callback(self._table.close)
            undo.callback(self._remove_made)  # while the table is locked
            # Closes it, should nobody else.
            self._blocks = undo.enter_context(os.fdopen(blocks, "rb", buffering=0))
            self._recover()
            if writer:
                self._grow_to(1)
                self._table.sign(secrets.token_bytes(WRITER_BYTES), None)
            self._made.clear()
            self.close = undo.pop_all().close

    def locked(self, change: Callable[..., Value], *args: Any) -> Value:
        """Call `change(*args)`, with nobody else's beside it."""
        with self._lock:
            return change(*args)

    @property
    def is_behind(self) -> bool:
        """Whether the process that writes the store has changed it."""
        return not self._writer and self._table.latest != self._seen

    def follow(self) -> None:
        """Take over what another process has changed."""
        if self.is_behind:
            self._recover()

    @property
    def signature(self) -> bytes:
        return self._table.writer

    def sign(self, tag: bytes | None) -> None:
        """Write into the table what later blocks are of; None if that is not known."""
        before = self._table.tag
        if tag is not None and before != tag and len(self.index):
            logger.warning(
                "%s: its %d blocks were stored with other weights, adapters or settings (layout, "
                "dtype, parallel ranks, version of the server, hash seed): they are not used now, "
                "and make room for new ones",
                *(self._path, len(self.index)),
            )
        self._table.sign(self.signature, tag)

    # Opening

    def _open(self) -> tuple[Table, int]:
        path = os.fspath(self._path.with_suffix(".table"))
        if not self._writer:
            blocks = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with on_error(os.close, blocks):
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    with on_error(os.close, fd):
                        return self._table_of(fd, new=False), blocks
                except NotATable as what:
                    raise FileNotFoundError(f"{path}: {what}") from what
        make_directory(self._path.parent.parent)
        detail = "another process writes this store: end it, or take another directory"
        fd = open_alone(path, lambda _: open_error(errno.EBUSY, path, detail))
        with on_error(os.close, fd), on_error(self._remove_made), naming("write", path):
            if not os.fstat(fd).st_size:
                self._made.append(path)
            table = self._table_in(fd, path)
        with on_error(table.close), on_error(self._remove_made):
            blocks = open_own(self._path)
        if not os.fstat(blocks).st_size:
            self._made.append(os.fspath(self._path))
        return table, blocks

    def _remove_made(self) -> None:
        for path in self._made:
            with contextlib.suppress(OSError):
                os.unlink(path)
        self._made.clear()

    def _table_in(self, fd: int, path: str) -> Table:
        if os.fstat(fd).st_size:
            try:
                return self._table_of(fd, new=False)
            except NotATable as what:
                logger.warning("not using %s: %s; beginning with an empty one", path, what)
        return self._table_of(fd, new=True)

    def _table_of(self, fd: int, new: bool) -> Table:
        table = Table(fd, self._block_bytes, self.index.slots, new=new, writer=self._writer)
        self.index.slots = table.slots  # a reader's are its writer's
        if table.slots_before != table.slots:
            logger.warning(
                "%s: room for %d blocks instead of %d%s",
                *(self._path, table.slots, table.slots_before),
                "; those that lay behind are gone" if table.slots < table.slots_before else "",
            )
        return table

    def _recover(self) -> None:
        """Take over what the table says, as far as there is a file for it."""
        room = self.index.slots
        if self._writer:
            if os.fstat(self._blocks.fileno()).st_size > room * self._slot_bytes:
                os.ftruncate(self._blocks.fileno(), room * self._slot_bytes)
            room = min(room, os.fstat(self._blocks.fileno()).st_size // self._slot_bytes)
        latest, lost, damaged = self._table.latest, 0, 0
        for slot, record in self._table.records(self._seen):
            if record is None or record.nbytes > self._slot_bytes:
                self.index.forget_slot(slot)
                damaged += self._table.is_damaged(slot)
            elif slot >= room:
                lost += 1
            else:
                self.index.recover(record.digest, BlockPlace(slot, record.nbytes, record.crc))
        self._seen = latest
        if self._writer:
            self.index.grow(room)
        if lost:
            logger.warning("%s was cut: %d blocks of its table are gone", self._path, lost)
        if damaged and self._writer:  # for who follows one, it is being written
            self.damaged += damaged
            what = "their blocks are dropped"
            logger.warning("%s: %d records of its table are damaged: %s", self._path, damaged, what)

    def _grow_to(self, slots: int) -> bool:
        """Make room for so many slots, and for the rest of the step; False if there is none."""
        index = self.index
        if slots <= index.limit:
            return True
        if slots > index.slots or self._is_full:
            return False
        limit = min(round_up(slots, max(STEP_BYTES // self._slot_bytes, 1)), index.slots)
        try:
            limit = min(limit, self._fitting(slots))
            reserve(self._blocks.fileno(), limit * self._slot_bytes, os.fspath(self._path))
        except TransferError as full:
            if not index.limit:
                raise
            self._is_full = True
            logger.warning("%s stays at %d blocks: %s", self._path, index.limit, full)
            return False
        index.grow(limit)
        return True

    def _fitting(self, slots: int) -> int:
        """How many slots the free space allows; TransferError (ENOSPC) if not as many as these."""
        free, size = free_bytes(self._path.parent)
        floor = min(FLOOR_BYTES, size // _FLOOR_SHARE)
        fitting = self.index.limit + max(free - floor, 0) // self._slot_bytes
        if fitting < slots:
            raise TransferError(
                errno.ENOSPC,
                operation="fallocate",
                path=os.fspath(self._path),
                nbytes=(slots - self.index.limit) * self._slot_bytes,
                detail=f"{free} bytes are free there, of which {floor} are left to others: make "
                "room, or take another drive",
            )
        return fitting

    # Storing

    def reserve(self, digests: Sequence[bytes]) -> list[int | None]:
        """Reserve a slot for each block that is not there; None also if there is no room."""
        slots: list[int | None] = []
        new: set[bytes] = set()
        self.touch(digests)  # before any of them makes room for another
        for digest in digests:
            if digest in new or digest in self.index.where:
                slots.append(None)
                continue
            if not self.index.has_free:
                self._grow_to(self.index.limit + 1)
            slot = self.index.take()
            if slot is not None and not self._noted(self._table.empty, slot):
                self.index.give_up(slot)
                slot = None
            if slot is None:
                self.refused += 1
            else:
                new.add(digest)
            slots.append(slot)
        self._announce()
        return slots

    def commit(
        self,
        digests: Sequence[bytes],
        slots: Sequence[int | None],
        places: dict[int, BlockPlace],
        failed: dict[int, BaseException],
    ) -> None:
        """Count what was written to reserved slots from now on; as in `touch`."""
        for number, slot in reversed(list(enumerate(slots))):
            if slot is None:
                continue
            digest, place = digests[number], places.get(number)
            if (
                place is None
                or number in failed
                or not self._noted(self._table.put, slot, digest, place.nbytes, place.crc)
            ):
                self.refused += 1
                self.index.give_up(slot)
                continue
            self.index.written(digest, place)
            self.stored += 1
        self._announce()
        for error in list(failed.values())[:1]:
            logger.warning("%d blocks are not stored: %s", len(failed), error)

    # Loading

    def pin(self, digests: Sequence[bytes]) -> list[BlockPlace | None]:
        """Find blocks, and keep their slots from being taken until `unpin`."""
        self.follow()
        places = self.touch(digests)
        for place in places:
            if place is not None:
                self.index.pin(place.slot)
        return places

    def unpin(self, places: Sequence[BlockPlace | None]) -> None:
        for place in places:
            if place is not None:
                self.index.unpin(place.slot)

    def touch(self, digests: Sequence[bytes]) -> list[BlockPlace | None]:
        """Count blocks as used just now, and return where they lie.

        A batch is of blocks one behind the other, of which one is of no use without those before:
        the last is the first to make room.
        """
        return [self.index.touch(digest) for digest in reversed(digests)][::-1]

    # Forgetting

    def drop(
        self, bad: Sequence[tuple[bytes, BlockPlace | None]], why: BaseException | None
    ) -> None:
        """Forget blocks that are not what the table says."""
        dropped = 0
        for digest, place in bad:
            if place is None or self.index.where.get(digest) != place:
                continue
            dropped += 1
            self._forget(digest, place)
        self._announce()
        self.damaged += dropped
        if dropped and (self._writer or why is not None):
            what = why or "they are not what was stored (a crash of the machine, or another writer)"
            logger.warning("%s: %d blocks are dropped: %s", self._path, dropped, what)

    def remove(self, digests: Sequence[bytes]) -> None:
        for digest in digests:
            place = self.index.where.get(digest)
            if place is not None:
                self._forget(digest, place)
        self._announce()

    def clear(self) -> None:
        self.remove(list(self.index.where))

    def _forget(self, digest: bytes, place: BlockPlace) -> None:
        self.index.forget_slot(place.slot)
        if self._writer:
            self._noted(self._table.empty, place.slot)

    def _announce(self) -> None:
        if self._writer and self._table.is_ahead:
            self._noted(self._table.announce)

    def _noted(self, write: Callable[..., object], *args: Any) -> bool:
        """Whether the table could be written. A failure is logged once, until it succeeds again."""
        try:
            write(*args)
        except OSError as failed:
            if not self._is_failing:
                logger.warning("%s: its table cannot be written: %s", self._path, failed)
            self._is_failing = True
            return False
        self._is_failing = False
        return True
