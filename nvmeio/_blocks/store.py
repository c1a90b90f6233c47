"""Blocks to and from the drive: a cache that outlives its process and never grows past its size.

A store is two files in a private directory: ``NAME.blocks``, slots of one size, allocated ahead in
large steps and read and written direct; and ``NAME.table``, what lies in them (`table`). One
process writes a store, having locked its table; others may read it meanwhile. What a reader gets is
checked against the block's CRC-32, so a slot that is overwritten under its hands is a miss.

A batch of blocks is one operation: all its transfers are in flight together, and checksums are made
while others go on. Loads and stores have a thread each, so that neither waits for the other's
drive. What lies where is changed by these two alone, which nobody can interrupt (`_io.owner`), and
under a lock that is held for no I/O; a thread of its own for that would cost a load two more
switches of thread, which on a busy machine take longer than a small block.

It is a cache. What cannot be stored is not there later; what cannot be read or is damaged is a miss
and said so in the log. Nothing is synchronised with the drive: after a crash of the machine the
checksums tell what is whole.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from nvmeio import files
from nvmeio._blocks.slots import Index, Place
from nvmeio._blocks.table import DIGEST_BYTES, NotATable, Table, lock
from nvmeio._blocks.transfers import Transfers
from nvmeio._closing import Closing
from nvmeio._io.handles import new_handle
from nvmeio._io.owner import OwnerThread
from nvmeio._storage import crc32
from nvmeio._storage.durable import reserve
from nvmeio._storage.private import make_private_directory, open_own
from nvmeio.errors import ClosedError, TransferError
from nvmeio.handle import AioHandle

logger = logging.getLogger("nvmeio")

# Slots are whole pages, so that neither edge of a block is written through the page cache.
PAGE_BYTES = 4096
# The file is allocated in steps of this size, so that a small cache takes little.
STEP_BYTES = 1 << 30
_DIRECTORY = "nvmeio-blocks"

Value = TypeVar("Value")
Key = str | bytes


class Stats(NamedTuple):
    """What a store did since it was opened.

    Attributes:
        blocks: Those it holds now.
        stored: Blocks written.
        loaded: Blocks read.
        evicted: Blocks that made room for others.
        refused: Blocks that were not stored: no room, or the drive failed.
        damaged: Blocks that were dropped when they were read.
    """

    blocks: int
    stored: int
    loaded: int
    evicted: int
    refused: int
    damaged: int


class BlockStore(Closing):
    """Blocks of bytes by name, on the drive.

    Args:
        directory: On the drive. The files lie in ``nvmeio-blocks`` in it, which is made private.
        name: Of the store; one process at a time writes it.
        block_bytes: What a block has at most.
        capacity_bytes: What the blocks may take on the drive, rounded down to whole slots.
        writer: False reads what another process stores; nothing can be stored or removed.
        handle: Moves the bytes and stays open; None makes one.

    Raises:
        ValueError: A size is not positive, or there is no room for one block; the name has a "/".
        TransferError: The directory or the files cannot be made or read; there is no room for the
            first step of the file (ENOSPC); another process writes this store (EBUSY).
        FileNotFoundError: `writer` is False, and nobody has made the store.

    Every call may be made by any thread. A call that is interrupted ends at once; its work goes on,
    and the tensors it was given are in use until then (`drain` waits).
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        name: str,
        block_bytes: int,
        capacity_bytes: int,
        *,
        writer: bool = True,
        handle: AioHandle | None = None,
    ) -> None:
        if block_bytes < 1:
            raise ValueError(f"block_bytes must be positive, not {block_bytes}")
        self.slot_bytes = -(-block_bytes // PAGE_BYTES) * PAGE_BYTES
        slots = capacity_bytes // self.slot_bytes
        if slots < 1:
            raise ValueError(
                f"capacity_bytes {capacity_bytes} has no room for a block of {block_bytes} bytes"
            )
        if "/" in name or name.startswith("."):
            raise ValueError(f"{name!r} is no name for a store: it becomes part of file names")
        self.block_bytes = block_bytes
        self.path = Path(directory) / _DIRECTORY / f"{name}.blocks"
        self._writer = writer
        self._index = Index(slots)
        self._counts = dict.fromkeys(("stored", "loaded", "refused", "damaged"), 0)
        self._seen = 0
        self._is_full = False
        self._table, blocks = self._open(slots)
        self._blocks = os.fdopen(blocks, "rb", buffering=0)  # closes it, should nobody else
        self._own_handle = handle is None
        try:
            self._file = files.open(self.path, "r+" if writer else "r")
            self._recover()
            if writer:
                self._grow_to(1)
            self._handle = new_handle(self.path) if handle is None else handle
        except BaseException:
            self._table.close()
            self._blocks.close()
            raise
        closed = f"the block store {self.path} is closed"
        self._lock = threading.Lock()  # of index, table and counts; taken by our threads only
        self._loads = OwnerThread("nvmeio-blocks-loads", closed)
        self._stores = OwnerThread("nvmeio-blocks-stores", closed)
        self._closed = False

    # Opening

    def _open(self, slots: int) -> tuple[Table, int]:
        path = os.fspath(self.path.with_suffix(".table"))
        if not self._writer:
            blocks = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    return Table(fd, self.block_bytes, slots, new=False), blocks
                except BaseException:
                    os.close(fd)
                    raise
            except BaseException as failed:
                os.close(blocks)
                if isinstance(failed, NotATable):
                    raise FileNotFoundError(f"{path}: {failed}") from failed
                raise
        self.path.parent.parent.mkdir(parents=True, exist_ok=True)
        make_private_directory(self.path.parent)
        fd = open_own(path)
        try:
            if not lock(fd):
                raise TransferError(
                    errno.EBUSY,
                    operation="open",
                    path=path,
                    detail="another process writes this store: name another one, or end it",
                )
            table = self._table_in(fd, slots, path)
        except BaseException:
            os.close(fd)
            raise
        try:
            return table, open_own(self.path)
        except BaseException:
            table.close()
            raise

    def _table_in(self, fd: int, slots: int, path: str) -> Table:
        if os.fstat(fd).st_size:
            try:
                return Table(fd, self.block_bytes, slots, new=False)
            except NotATable as what:
                logger.warning("not using %s: %s; beginning with an empty one", path, what)
        return Table(fd, self.block_bytes, slots, new=True)

    def _recover(self) -> None:
        """Take over what the table says, as far as there is a file for it."""
        room = self._index.slots
        if self._writer:
            room = min(room, os.fstat(self._blocks.fileno()).st_size // self.slot_bytes)
        latest, lost = self._table.latest, 0
        for slot, record in self._table.records(self._seen):
            if record is None or record.nbytes > self.slot_bytes:
                self._index.forget_slot(slot)
            elif slot >= room:
                lost += 1
            else:
                place = Place(slot, record.nbytes, record.crc)
                self._index.recover(slot, record.digest, place)
        self._seen = latest
        if self._writer:
            self._index.grow(room)
        if lost:
            logger.warning("%s was cut: %d blocks of its table are gone", self.path, lost)

    def _grow_to(self, slots: int) -> bool:
        """Have room for so many slots, and the rest of the step; False if there is none."""
        index = self._index
        if slots <= index.limit:
            return True
        if slots > index.slots or self._is_full:
            return False
        step = max(STEP_BYTES // self.slot_bytes, 1)
        limit = min(-(-slots // step) * step, index.slots)
        try:
            reserve(self._blocks.fileno(), limit * self.slot_bytes, os.fspath(self.path))
        except TransferError as full:
            if not index.limit:
                raise
            self._is_full = True
            logger.warning("%s stays at %d blocks: %s", self.path, index.limit, full)
            return False
        index.grow(limit)
        return True

    # Asking

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """For each name, whether its block is there now. Costs a look into a dict each."""
        if self._closed:
            raise ClosedError(f"the block store {self.path} is closed")
        if not self._writer and self._table.latest != self._seen:
            self._loads.call(self._locked, self._recover)
        where = self._index.where
        return [_digest(key) in where for key in keys]

    def prefix(self, keys: Sequence[Key]) -> int:
        """How many of the names, from the first on, are there."""
        found = self.contains(keys)
        return found.index(False) if False in found else len(found)

    def touch(self, keys: Sequence[Key]) -> None:
        """Have blocks count as used just now."""
        self._stores.post(self._locked, self._touch, [_digest(key) for key in keys])

    def _locked(self, change: Callable[..., Value], *args: Any) -> Value:
        """In our own threads only."""
        with self._lock:
            return change(*args)

    def _touch(self, digests: list[bytes]) -> None:
        for digest in digests:
            self._index.touch(digest)

    @property
    def is_writer(self) -> bool:
        """Whether this process writes the store."""
        return self._writer

    @property
    def stats(self) -> Stats:
        """What it did."""
        counts = self._counts
        return Stats(
            len(self._index),
            counts["stored"],
            counts["loaded"],
            self._index.evictions,
            counts["refused"],
            counts["damaged"],
        )

    def __len__(self) -> int:
        return len(self._index)

    # Storing

    def store(self, keys: Sequence[Key], blocks: Sequence[torch.Tensor]) -> list[bool]:
        """Write blocks; those that are there already are left as they are.

        Args:
            keys: Their names.
            blocks: CPU tensors of `block_bytes` bytes at most and one at least.

        Returns:
            For each, whether it is there now. Not: there is no room (all slots are being read or
            written), or the drive failed, which the log says.

        Raises:
            ValueError: A block is too large or empty, or there is not one for each name.
            ClosedError: The store is closed, or open for reading.
        """
        return self._stores.call(self._store, *self._checked(keys, blocks))

    def begin_store(
        self,
        keys: Sequence[Key],
        blocks: Sequence[torch.Tensor],
        done: Callable[[list[bool]], object],
    ) -> None:
        """`store`, in the background; `done` is called with the answer, by another thread."""
        if self._closed:
            raise ClosedError(f"the block store {self.path} is closed")
        self._stores.post(self._answered, self._store, *self._checked(keys, blocks), done)

    def _answered(
        self,
        work: Callable[[list[bytes], list[torch.Tensor]], list[bool]],
        digests: list[bytes],
        blocks: list[torch.Tensor],
        done: Callable[[list[bool]], object],
    ) -> None:
        found = [False] * len(digests)
        try:
            found = work(digests, blocks)
        finally:
            done(found)

    def _checked(
        self, keys: Sequence[Key], blocks: Sequence[torch.Tensor]
    ) -> tuple[list[bytes], list[torch.Tensor]]:
        if not self._writer:
            raise ClosedError(f"the block store {self.path} is open for reading only")
        self._check(keys, blocks)
        return [_digest(key) for key in keys], [block.contiguous() for block in blocks]

    def _check(self, keys: Sequence[Key], blocks: Sequence[torch.Tensor]) -> None:
        if len(keys) != len(blocks):
            raise ValueError(f"{len(keys)} names for {len(blocks)} blocks")
        for key, block in zip(keys, blocks, strict=True):
            if not 0 < block.nbytes <= self.block_bytes:
                raise ValueError(
                    f"block {key!r} has {block.nbytes} bytes; 1 to {self.block_bytes} are possible"
                )

    def _store(self, digests: list[bytes], blocks: list[torch.Tensor]) -> list[bool]:
        """In the stores' thread."""
        slots = self._locked(self._reserve, digests)
        places: dict[int, Place] = {}
        failed: dict[int, BaseException] = {}
        try:
            with Transfers(self._handle, self._file, self.slot_bytes) as transfers:
                for number, (slot, block) in enumerate(zip(slots, blocks, strict=True)):
                    if slot is None:
                        continue
                    transfers.write(block, slot, partial(_note, failed, number))
                    # Beside the write.
                    places[number] = Place(slot, block.nbytes, crc32.of_tensor(block))
        except BaseException as error:  # nothing of it is in flight any more
            failed |= {n: error for n, slot in enumerate(slots) if slot is not None}
            raise
        finally:
            self._locked(self._commit, digests, slots, places, failed)
        return [digest in self._index.where for digest in digests]

    def _reserve(self, digests: list[bytes]) -> list[int | None]:
        """A slot for each block that is not there."""
        slots: list[int | None] = []
        new: set[bytes] = set()
        for digest in digests:
            if digest in new or self._index.touch(digest) is not None:
                slots.append(None)
                continue
            if not self._index.has_free:
                self._grow_to(self._index.limit + 1)
            slot = self._index.take()
            if slot is None:
                self._counts["refused"] += 1
            else:
                new.add(digest)
                self._table.empty(slot)
            slots.append(slot)
        return slots

    def _commit(
        self,
        digests: list[bytes],
        slots: list[int | None],
        places: dict[int, Place],
        failed: dict[int, BaseException],
    ) -> None:
        """What was written counts from now on."""
        for number, slot in enumerate(slots):
            if slot is None:
                continue
            if number in failed or number not in places:
                self._counts["refused"] += 1
                self._index.give_up(slot)
                continue
            place = places[number]
            self._table.put(slot, digests[number], place.nbytes, place.crc)
            self._index.written(digests[number], place)
            self._counts["stored"] += 1
        for error in list(failed.values())[:1]:
            logger.warning("%d blocks are not stored: %s", len(failed), error)

    # Loading

    def load(self, keys: Sequence[Key], blocks: Sequence[torch.Tensor]) -> list[bool]:
        """Read blocks into memory.

        Args:
            keys: Their names.
            blocks: Contiguous CPU tensors, each with as many bytes as were stored.

        Returns:
            For each, whether it is filled. Where not, its bytes are unknown: the block is not
            there, has another length, or was damaged, which the log says.

        Raises:
            ValueError: A tensor is not contiguous, or there is not one for each name.
            ClosedError: The store is closed.
        """
        return self._loads.call(self._load, *self._checked_targets(keys, blocks))

    def begin_load(
        self,
        keys: Sequence[Key],
        blocks: Sequence[torch.Tensor],
        done: Callable[[list[bool]], object],
    ) -> None:
        """`load`, in the background; `done` is called with the answer, by another thread."""
        if self._closed:
            raise ClosedError(f"the block store {self.path} is closed")
        self._loads.post(self._answered, self._load, *self._checked_targets(keys, blocks), done)

    def _checked_targets(
        self, keys: Sequence[Key], blocks: Sequence[torch.Tensor]
    ) -> tuple[list[bytes], list[torch.Tensor]]:
        self._check(keys, blocks)
        if not all(block.is_contiguous() for block in blocks):
            raise ValueError("a block is read into contiguous memory only")
        return [_digest(key) for key in keys], list(blocks)

    def _load(self, digests: list[bytes], blocks: list[torch.Tensor]) -> list[bool]:
        """In the loads' thread."""
        places = self._locked(self._find, digests)
        failed: dict[int, BaseException] = {}
        damaged: list[int] = []
        found = [False] * len(digests)

        def check(number: int, block: torch.Tensor, crc: int, error: BaseException | None) -> None:
            _note(failed, number, error)
            if error is None:
                found[number] = crc32.of_tensor(block) == crc
                if not found[number]:
                    damaged.append(number)

        try:
            with Transfers(self._handle, self._file, self.slot_bytes) as transfers:
                for number, (place, block) in enumerate(zip(places, blocks, strict=True)):
                    if place is not None and place.nbytes == block.nbytes:
                        transfers.read(block, place.slot, partial(check, number, block, place.crc))
        finally:
            self._locked(self._unpin, places)
        if damaged or failed:
            bad = [(digests[number], places[number]) for number in (*damaged, *failed)]
            self._locked(self._drop, bad, next(iter(failed.values()), None))
        self._counts["loaded"] += sum(found)
        return found

    def _find(self, digests: list[bytes]) -> list[Place | None]:
        """Where blocks lie; none of these slots is taken until `_unpin`."""
        if not self._writer and self._table.latest != self._seen:
            self._recover()
        places = [self._index.touch(digest) for digest in digests]
        for place in places:
            if place is not None:
                self._index.pin(place.slot)
        return places

    def _unpin(self, places: list[Place | None]) -> None:
        for place in places:
            if place is not None:
                self._index.unpin(place.slot)

    def _drop(self, bad: list[tuple[bytes, Place | None]], why: BaseException | None) -> None:
        """Blocks that are not what the table says are not there."""
        dropped = 0
        for digest, place in bad:
            if place is None or self._index.where.get(digest) != place:
                continue
            dropped += 1
            self._index.forget_slot(place.slot)
            if self._writer:
                self._table.empty(place.slot)
        self._counts["damaged"] += dropped
        if dropped and (self._writer or why is not None):
            what = why or "they are not what was stored (a crash of the machine, or another writer)"
            logger.warning("%s: %d blocks are dropped: %s", self.path, dropped, what)

    # Forgetting

    def remove(self, keys: Sequence[Key]) -> None:
        """Forget blocks; the server evicts itself, then."""
        self._check_writer()
        # A load that failed says so before it answers; others wait for the stores before.
        digests = [_digest(key) for key in keys]
        if self._loads.is_here:
            self._locked(self._remove, digests)
        else:
            self._stores.call(self._locked, self._remove, digests)

    def clear(self) -> None:
        """Forget all blocks; the files keep their size."""
        self._check_writer()
        self._stores.call(self._locked, lambda: self._remove(list(self._index.where)))

    def _check_writer(self) -> None:
        if not self._writer:
            raise ClosedError(f"the block store {self.path} is open for reading only")

    def _remove(self, digests: list[bytes]) -> None:
        for digest in digests:
            place = self._index.where.get(digest)
            if place is not None:
                self._index.forget_slot(place.slot)
                self._table.empty(place.slot)

    # Life

    def drain(self) -> None:
        """Wait until nothing that was begun before is under way."""
        for owner in (self._stores, self._loads):
            owner.call(_nothing)

    def close(self) -> None:
        """Refuse new work, finish what was begun, close the files.

        Idempotent; one that was interrupted is gone on with by the next call.
        """
        self._closed = True
        with contextlib.suppress(ClosedError):
            self._loads.call(_nothing)
        self._loads.close()
        with contextlib.suppress(ClosedError):
            self._stores.call(self._close_files)
        self._stores.close()
        if self._own_handle:
            self._handle.close()

    def _close_files(self) -> None:
        self._file.close()
        self._table.close()
        self._blocks.close()

    def __repr__(self) -> str:
        state = "closed, " if self._closed else ""
        return f"<BlockStore {self.path} {state}{len(self)} of {self._index.slots} blocks>"


def _note(failed: dict[int, BaseException], number: int, error: BaseException | None) -> None:
    if error is not None:
        failed[number] = error


def _digest(key: Key) -> bytes:
    data = key.encode() if isinstance(key, str) else key
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def _nothing() -> None:
    """What is asked to know that all before it is done."""
