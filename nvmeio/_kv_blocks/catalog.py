"""The places in a store: its two files, and which slot holds which block. No block is moved.

Asked through `locked`, by the thread that has a turn of the store and cannot be interrupted: under
a lock that is held while records are written to the page cache, or the file grows. `Index.where`
alone is read without it: one look into a dict.

`on_change` is called with blocks that come and go: in their order, and never under the lock.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from nvmeio._files.descriptors import open_error
from nvmeio._kv_blocks.index import BlockPlace, Index
from nvmeio._kv_blocks.table import WRITER_BYTES, NotATable, Table
from nvmeio._kv_blocks.transfers import Batch
from nvmeio._kv_blocks.whole_names import WholeNames
from nvmeio._pages import round_up
from nvmeio._storage.durable import free_bytes, make_directory, reserve
from nvmeio._storage.locks import open_alone
from nvmeio._storage.untrusted import open_own
from nvmeio._threads.closing import on_error
from nvmeio._threads.threads import log_failure
from nvmeio.errors import TransferError, naming

logger = logging.getLogger("nvmeio")

# The file is allocated in steps of this size, so that a small cache takes little.
STEP_BYTES = 1 << 30
# So much of the file system is left to others; of a small one the twentieth part.
FLOOR_BYTES = 1 << 30
_FLOOR_SHARE = 20
# So many slots are looked at under the lock when blocks are listed.
LISTED_SLOTS = 4096

Value = TypeVar("Value")


class Sizes(NamedTuple):
    """The sizes in a store.

    `slots` are of `slot_bytes`, which is `block_bytes` in whole pages. A block has at most
    `largest_bytes`. Whole names have at most `name_bytes`; 0 keeps none.
    """

    block_bytes: int
    slot_bytes: int
    slots: int
    largest_bytes: int
    name_bytes: int = 0


class Change(NamedTuple):
    """A block that is there from now on (`is_stored`), or is not any more, by its whole name."""

    name: bytes
    nbytes: int
    is_stored: bool


DigestOf = Callable[[bytes], bytes]
OnChange = Callable[[list[Change]], object]


class Catalog:
    """Names, slots and files of a store; raises as `BlockStore`.

    `on_change` is called with blocks that come and go, in that order; it needs their whole names.

    Attributes:
        index: Which slot holds which block; `index.where` may be read by anybody.
        stored: Blocks that were written since it was opened.
        refused: Blocks that were not.
        damaged: Blocks that were dropped, when they were read or for what the table says of them.
        digest_of: Under which digest a name is found now; set before anything is stored.
    """

    digest_of: DigestOf

    def __init__(
        self, path: Path, sizes: Sizes, writer: bool, on_change: OnChange | None = None
    ) -> None:
        self._path = path
        self._sizes = sizes
        self._writer = writer
        self.index = Index(sizes.slots, sizes.slot_bytes)
        self.stored = self.refused = self.damaged = 0
        self._seen = 0
        self._is_full = False
        self._is_failing = False
        self._lock = threading.Lock()  # never taken by who may be interrupted
        self._on_change = on_change
        self._changes: deque[Change] = deque()  # that nobody was told of
        self._telling = threading.Lock()
        self._teller = 0  # the thread that has it
        self._names: WholeNames | None = None
        self._made: list[str] = []  # files that were not there; an opening that fails removes them
        with contextlib.ExitStack() as undo:
            self._table, blocks = self._open()
            undo.callback(self._table.close)
            undo.callback(self._remove_made)  # while the table is locked
            # Closes it, should nobody else.
            self._blocks = undo.enter_context(os.fdopen(blocks, "rb", buffering=0))
            if sizes.name_bytes:
                self._names = self._open_names()
                undo.callback(self._names.close)
            self._recover()
            if writer:
                self._grow_to(1)
                self._table.sign(secrets.token_bytes(WRITER_BYTES), None)
                self._table.set_generation(0)
                self._table.set_name_bytes(sizes.name_bytes)
            self._made.clear()
            self.close = undo.pop_all().close

    def locked(self, change: Callable[..., Value], *args: Any) -> Value:
        """Call `change(*args)`, with nobody else's beside it; then tell of what it changed."""
        with self._lock:
            value = change(*args)
        if self._changes:
            self._tell()
        return value

    def _tell(self) -> None:
        """Tell of changes in their order; if a thread is doing that, it goes on with these."""
        while self._changes and self._telling.acquire(blocking=False):
            try:
                self._teller = threading.get_ident()
                changes = [self._changes.popleft() for _ in range(len(self._changes))]
                assert self._on_change is not None
                self._on_change(changes)
            except BaseException as failed:
                log_failure(failed, "unexpected error in %s", threading.current_thread().name)
            finally:
                self._teller = 0
                self._telling.release()

    @property
    def is_telling_here(self) -> bool:
        """Whether it is this thread that tells of changes just now."""
        return self._teller == threading.get_ident()

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

    def set_generation(self, generation: int) -> None:
        """Write into the table how often the names changed, for outside observers."""
        self._noted(self._table.set_generation, generation)

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

    def _open_names(self) -> WholeNames:
        path = self._path.with_suffix(".names")
        if not path.exists():
            self._made.append(os.fspath(path))
        names = WholeNames(path, self._sizes.name_bytes, self.index.slots)
        if self._writer and self._table.name_bytes != self._sizes.name_bytes:
            names.clear()  # records of another length, or some of blocks that went meanwhile
        return names

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
        table = Table(fd, self._sizes.block_bytes, self.index.slots, new=new, writer=self._writer)
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
        room, slot_bytes = self.index.slots, self._sizes.slot_bytes
        largest_bytes = max(slot_bytes, self._sizes.largest_bytes)
        if self._writer:
            if os.fstat(self._blocks.fileno()).st_size > room * slot_bytes:
                os.ftruncate(self._blocks.fileno(), room * slot_bytes)
            room = min(room, os.fstat(self._blocks.fileno()).st_size // slot_bytes)
        latest, lost, damaged = self._table.latest, 0, 0
        for slot, record in self._table.records(self._seen):
            if record is None or record.nbytes > largest_bytes:
                self.index.forget_slot(slot)
                damaged += self._table.is_damaged(slot)
            elif slot + self.index.span(record.nbytes) > room:
                lost += 1
            else:
                place = BlockPlace(slot, record.nbytes, record.crc, record.kind)
                self.index.recover(record.digest, place)
        self._seen = latest
        if self._writer:
            if largest_bytes > slot_bytes:
                for _, place in self.index.overlapping():
                    self.index.forget_slot(place.slot)
                    self._noted(self._table.empty, place.slot)
                    damaged += 1
            self.index.grow(room)
        if lost:
            logger.warning("%s was cut: %d blocks of its table are gone", self._path, lost)
        if damaged and self._writer:  # for a follower, it is being written
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
        limit = min(round_up(slots, max(STEP_BYTES // self._sizes.slot_bytes, 1)), index.slots)
        try:
            limit = min(limit, self._fitting(slots))
            reserve(self._blocks.fileno(), limit * self._sizes.slot_bytes, os.fspath(self._path))
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
        fitting = self.index.limit + max(free - floor, 0) // self._sizes.slot_bytes
        if fitting < slots:
            raise TransferError(
                errno.ENOSPC,
                operation="fallocate",
                path=os.fspath(self._path),
                nbytes=(slots - self.index.limit) * self._sizes.slot_bytes,
                detail=f"{free} bytes are free there, of which {floor} are left to others: make "
                "room, or take another drive",
            )
        return fitting

    # Storing

    def reserve(self, batch: Batch) -> list[int | None]:
        """Reserve slots for each block that is not there yet.

        Returns the first slot of each; None for a block that is there or has no room.
        """
        slots: list[int | None] = []
        new: set[bytes] = set()
        self.touch(batch.digests)  # before any of them makes room for another
        where = self.index.where
        for digest, block, kind in zip(batch.digests, batch.blocks, batch.kinds, strict=True):
            place = where.get(digest)
            if digest in new or (place is not None and place.kind == kind):
                slots.append(None)
                continue
            slot = self._take(self.index.span(block.nbytes))
            if slot is None:
                self.refused += 1
            else:
                new.add(digest)
            slots.append(slot)
        self._announce()
        return slots

    def _take(self, count: int) -> int | None:
        """Take slots in a row; what they held is forgotten, and the table says so."""
        index, table = self.index, self._table
        slot = index.take(count)
        if slot is None:
            most = min(index.limit + count, index.slots)
            if most > index.limit and self._grow_to(most):
                slot = index.take(count)
        if slot is None:
            slot, gone = index.make_room(count)
            for _, place in gone if self._on_change else ():
                self._note_gone(place)
        if slot is None:
            return None
        # A record within would be found after a restart, and be of bytes that are others now.
        for each in range(slot, slot + count):
            if not self._noted(table.empty, each):
                index.give_up(slot)
                return None
        return slot

    def commit(
        self,
        batch: Batch,
        slots: Sequence[int | None],
        places: dict[int, BlockPlace],
        failed: dict[int, BaseException],
    ) -> None:
        """Count what was written to reserved slots from now on; as in `touch`."""
        for number, slot in reversed(list(enumerate(slots))):
            if slot is None:
                continue
            digest, place = batch.digests[number], places.get(number)
            name = batch.names[number] if batch.names else b""
            if place is None or number in failed or not self._put(digest, place, name):
                self.refused += 1
                self.index.give_up(slot)
                continue
            if self._on_change:
                before = self.index.where.get(digest)
                if before is not None:
                    self._changes.append(Change(name, before.nbytes, False))
                if self.digest_of(name) == digest:  # else the names changed meanwhile
                    self._changes.append(Change(name, place.nbytes, True))
            self.index.written(digest, place)
            self.stored += 1
        self._announce()
        for error in list(failed.values())[:1]:
            logger.warning("%d blocks are not stored: %s", len(failed), error)

    def _put(self, digest: bytes, place: BlockPlace, name: bytes) -> bool:
        if self._names is not None and not self._noted(self._names.put, place.slot, name):
            return False
        put, slot = self._table.put, place.slot
        return self._noted(put, slot, digest, place.nbytes, place.crc, place.kind)

    def _note_gone(self, place: BlockPlace) -> None:
        """Note that a block went that was there; its name is still in the file.

        One of other weights, or of a generation before, may have the name of one that is there.
        """
        if self._names is not None and self._on_change:
            try:
                name = self._names.get(place.slot)
            except OSError as failed:
                logger.warning("%s: the name of a block cannot be read: %s", self._path, failed)
                return
            if name and self.digest_of(name) not in self.index.where:
                self._changes.append(Change(name, place.nbytes, False))

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
                self.index.unpin(place)

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
            what = why or "they differ from what was stored (a crash, or another writer)"
            logger.warning("%s: %d blocks are dropped: %s", self._path, dropped, what)

    def remove(self, digests: Sequence[bytes], spare_pinned: bool = False) -> None:
        for digest in digests:
            place = self.index.where.get(digest)
            if place is not None and not (spare_pinned and self.index.is_pinned(place.slot)):
                self._forget(digest, place)
        self._announce()

    def clear(self) -> None:
        self.remove(list(self.index.where))

    def _forget(self, digest: bytes, place: BlockPlace) -> None:
        self.index.forget_slot(place.slot)
        if self._writer:
            self._noted(self._table.empty, place.slot)
            self._note_gone(place)

    # Listing

    def listed(self, first: int, digest_of: DigestOf) -> list[tuple[int, bytes, int]]:
        """First slot, whole name and length of blocks from a slot to the end of `LISTED_SLOTS`."""
        if self._names is None:
            return []
        blocks = self.index.held(first, LISTED_SLOTS - first % LISTED_SLOTS)
        names = self._names.among([place.slot for _, place in blocks])
        return [
            (place.slot, name, place.nbytes)
            for (digest, place), name in zip(blocks, names, strict=True)
            if digest_of(name) == digest
        ]

    def tell_of(self, prefix: bytes, digest_of: DigestOf) -> None:
        """Tell of blocks whose names begin with `prefix` as if they were stored now."""
        for first in range(0, self.index.limit, LISTED_SLOTS):
            self._changes += [
                Change(name, nbytes, True)
                for _, name, nbytes in self.listed(first, digest_of)
                if name.startswith(prefix)
            ]

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
