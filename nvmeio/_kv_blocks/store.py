"""Blocks to and from the drive: a cache that outlives its process, whose blocks stay within a size.

A store is two files in a private directory: ``NAME.blocks``, slots of one size, allocated ahead in
large steps and read and written direct; and ``NAME.table``, what lies in them (`table`). Blocks of
several sizes take as many slots in a row as they need. ``NAME.names`` has their whole names, for a
server that wants to know them (`whole_names`). One process writes a store, having locked its table;
others may read it meanwhile. A reader's bytes are checked against the block's CRC-32, so a slot
that is overwritten meanwhile is a miss.

All blocks of a batch are in flight together, and checksums are made while others go on. Loads and
stores take turns among themselves, and neither waits for the other's drive. Each turn is done by
its caller, or by a thread that nobody can interrupt where the caller's can be, or does not wait
(`worker`). The places of blocks change under a lock (`catalog`), in threads that nobody can
interrupt: one of its own for that would cost two more switches of thread, which take longer than a
small block. A few small blocks in a row are moved by the turn itself (`in_place`): a load by a
server's thread waits once, for the drive.

It is a cache. A block that cannot be stored is a miss later; so is one that cannot be read or is
damaged, which the log says. Nothing is synchronised with the drive: after a crash of the machine
the checksums tell what is whole.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from nvmeio import files
from nvmeio._checks import NotPickled
from nvmeio._io.handles import new_handle
from nvmeio._kv_blocks.catalog import LISTED_SLOTS, Catalog, OnChange, Sizes
from nvmeio._kv_blocks.index import BlockPlace
from nvmeio._kv_blocks.pins import Pins
from nvmeio._kv_blocks.table import PAGE_BYTES, Key, names_of
from nvmeio._kv_blocks.transfers import (
    Batch,
    InPlace,
    Move,
    SlotPiece,
    StoreJob,
    StoreWorker,
    Transfers,
)
from nvmeio._pages import round_up
from nvmeio._storage import crc32
from nvmeio._threads.closing import Closing
from nvmeio._threads.future import being_interrupted, may_be_interrupted
from nvmeio._threads.shutdown import Ending, leave
from nvmeio.errors import ClosedError
from nvmeio.handle import AioHandle

DIRECTORY = "nvmeio-blocks"
# Slots of jobs that are moved together at most: stores are answered when all of them are there.
TOGETHER_BYTES = 256 << 20

Value = TypeVar("Value")


class Stats(NamedTuple):
    """The work of a store since it was opened.

    `blocks` are those it holds now, `evicted` those that made room for others, `refused` those that
    were not stored (no room, or the drive failed), `damaged` those that were dropped when they were
    read, or for what the table says of them. `absent` were to be loaded and were not there,
    `unlike` had another length or kind.
    """

    blocks: int
    stored: int
    loaded: int
    evicted: int
    refused: int
    damaged: int
    absent: int
    unlike: int


class Usage(NamedTuple):
    """The contents of a store: bytes of blocks, of `capacity_bytes`; names with pins."""

    nbytes: int
    capacity_bytes: int
    pinned: int


class ListedBlock(NamedTuple):
    """A block that is there: its whole name, and its length."""

    name: bytes
    nbytes: int


class BlockStore(NotPickled, Closing):
    """Blocks of bytes by name, on the drive.

    Args:
        directory: On the drive. The files lie in ``nvmeio-blocks`` in it, which is made private.
        name: The store's name; one process at a time writes it.
        block_bytes: The most bytes of a block, unless `largest_bytes` is given. In whole pages, it
            is the unit in which room is given to blocks.
        capacity_bytes: The bytes that the blocks may take on the drive, rounded down to whole
            slots. With another size than before, the files become larger or smaller; blocks behind
            the new end are gone, which the log says. A reader's is as its writer's.
        writer: False reads what another process stores; nothing can be stored or removed.
        handle: Moves the bytes and stays open; None makes one.
        identity: The origin of the blocks besides their names, such as weights: blocks stored with
            another identity are not found, which the log says. None: the origin is unknown, so
            blocks are found until the store is closed.
        largest_bytes: The most bytes of a block; None takes `block_bytes`. Larger blocks take
            several slots in a row. If none are free, the block that was used longest ago makes
            room, and those that lie behind it.
        name_bytes: Keep names whole, of up to so many bytes, for `listed` and `on_change`; 0 does
            not. Takes that much for each slot, beside `capacity_bytes`.
        on_change: Called with a list of `catalog.Change`: which blocks are there from now on, and
            which went (to make room, removed, damaged, replaced), in that order. Any thread may
            call it, one at a time, before a store or removal is answered; unless another thread is
            calling it just then, which goes on with these. It may ask what is there and remove
            blocks; to store or load it uses another thread.

    Raises ValueError for a size that is not positive, no room for one block, or a name with a "/";
    FileNotFoundError for a reader, if nobody has made the store; TransferError if there is no room
    for one block (ENOSPC), beside what is left to others, or another process writes it (EBUSY).
    Files that were not there before are gone again.

    Every call may be made by any thread. An interrupted one raises that when its work has ended,
    and a second interrupt at once; then, and with `begin_load` and `begin_store`, the tensors are
    in use for as long as `drain` waits.
    """

    _elsewhere = "keep its directory and name, and open it with writer=False in other processes"

    def __init__(
        self,
        directory: str | os.PathLike[str],
        name: str,
        block_bytes: int,
        capacity_bytes: int,
        *,
        writer: bool = True,
        handle: AioHandle | None = None,
        identity: str | None = "",
        largest_bytes: int | None = None,
        name_bytes: int = 0,
        on_change: OnChange | None = None,
    ) -> None:
        if block_bytes < 1:
            raise ValueError(f"block_bytes must be positive, not {block_bytes}")
        largest_bytes = block_bytes if largest_bytes is None else largest_bytes
        if largest_bytes < block_bytes:
            raise ValueError(
                f"largest_bytes must be block_bytes ({block_bytes}) or more, not {largest_bytes}"
            )
        if on_change is not None and not (writer and name_bytes):
            raise ValueError("on_change is for a writer that keeps names: give name_bytes as well")
        self.slot_bytes = round_up(block_bytes, PAGE_BYTES)
        slots = capacity_bytes // self.slot_bytes
        least_bytes = round_up(largest_bytes, self.slot_bytes)
        if capacity_bytes < least_bytes:
            raise ValueError(
                f"capacity_bytes must be {least_bytes} or more, for one block: {capacity_bytes}"
            )
        if "/" in name or name.startswith("."):
            raise ValueError(f"{name!r} is not a name for a store: it becomes part of file names")
        self.block_bytes = block_bytes
        self.largest_bytes = largest_bytes
        self._name_bytes = name_bytes
        self._on_change = on_change
        self.path = Path(directory) / DIRECTORY / f"{name}.blocks"
        self.is_writer = writer
        self._identity = identity
        self._loaded = self._absent = self._unlike = 0  # of the loads' turn
        self._closed_message = f"the block store {self.path} is closed"
        self._loads = StoreWorker("nvmeio-blocks-loads", self._closed_message)
        self._stores = StoreWorker("nvmeio-blocks-stores", self._closed_message)
        self._closed = False
        self._left: set[StoreWorker] = set()  # which do what a second interrupt left to itself
        self._gate = threading.Lock()  # held to begin something, and while it becomes closed
        try:
            self._ending = self._stores.owner.call(self._open, slots, handle)
        except KeyboardInterrupt:
            leave(self._stores.owner)
            _finish(self._stores)  # another try must not find it in use
            raise

    def _open(self, slots: int, handle: AioHandle | None) -> Ending:
        """Open the files; called in the stores' thread."""
        with contextlib.ExitStack() as undo:
            undo.callback(self._stores.owner.close)
            undo.callback(self._loads.owner.close)
            self._loads.finish()  # or there is no thread to be had, and nobody would answer
            sizes = Sizes(
                *(self.block_bytes, self.slot_bytes, slots, self.largest_bytes, self._name_bytes)
            )
            self._catalog = Catalog(self.path, sizes, self.is_writer, self._on_change)
            undo.callback(self._catalog.close)
            self._pins = Pins(self._catalog)
            self._name(0)
            if self.is_writer:
                self._catalog.sign(self._names.tag)
            self._file = undo.enter_context(files.open(self.path, "r+" if self.is_writer else "r"))
            moves: list[InPlace | None] = [None, None]
            if handle is None:
                handle = undo.enter_context(new_handle(self.path))
                moves = [InPlace(self._file, self.slot_bytes) for _ in moves]
            self._reads, self._writes = (
                Transfers(handle, self._file, self.slot_bytes, each) for each in moves
            )
            undo.callback(_finish, self._loads)
            undo.callback(self._stores.rest)
            return Ending(self._stores.owner, undo.pop_all().close)

    # Asking

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """For each name, whether its block is there now; a hash and a look into a dict each."""
        self._check_open()
        if self._catalog.is_behind:
            self._change(self._loads, self._catalog.follow)
        where = self._catalog.index.where
        return [digest in where for digest in self._digests(keys)]

    def touch(self, keys: Sequence[Key]) -> None:
        if keys:
            self._change(self._stores, self._catalog.touch, self._digests(keys), wait=False)

    @property
    def generation(self) -> int:
        return self._names.generation

    @property
    def stats(self) -> Stats:
        known = self._catalog
        evicted = known.index.evictions
        return Stats(
            *(len(self), known.stored, self._loaded, evicted, known.refused, known.damaged),
            *(self._absent, self._unlike),
        )

    @property
    def usage(self) -> Usage:
        index = self._catalog.index
        return Usage(index.nbytes, index.slots * self.slot_bytes, len(self._pins))

    def listed(self, first: int = 0, most: int = 500) -> tuple[list[ListedBlock], int | None]:
        """Up to `most` blocks with their whole names, and where the next ones begin; None: nowhere.

        `first` is 0, or what the call before returned. Blocks that come or go meanwhile may be
        among them or not. A hash for each, and reads of the page cache, a MiB at a time. Nothing of
        another identity or generation is listed; nor anything without `name_bytes`.
        """
        self._check_open()
        if most < 1 or first < 0:
            raise ValueError(f"list 1 block or more, from 0 on; not {most} from {first} on")
        index, found = self._catalog.index, list[ListedBlock]()
        while first < (index.limit or index.slots):
            blocks = self._change(self._loads, self._catalog.listed, first, self._names.digest)
            for slot, name, nbytes in blocks:
                if len(found) == most:
                    return found, slot
                found.append(ListedBlock(name, nbytes))
            first = (first // LISTED_SLOTS + 1) * LISTED_SLOTS
        return found, None

    def tell_of(self, prefix: bytes) -> None:
        """Tell `on_change` of the blocks that are there whose names begin with `prefix`.

        It is told as if they were stored now, in its order among other changes: for a server that
        counts what is there, after a restart. Others wait meanwhile, about a second for a million.
        """
        self._check_open()
        if self._on_change is not None:
            self._change(self._stores, self._catalog.tell_of, prefix, self._names.digest)

    # Pinning

    def pin(self, keys: Sequence[Key]) -> list[bool]:
        """Do `contains` and `touch`, and keep what is there from making room until `unpin`.

        Pins are counted by name, and end with the store or its process. If all blocks have one,
        nothing is stored any more. A block that cannot be read goes anyway.
        """
        self._check_writer()
        self._check_open()
        found: list[bool] = self._change(self._loads, self._pins.take, self._digests(keys))
        return found

    def unpin(self, keys: Sequence[Key]) -> None:
        """End one pin of each block; a name without one, or a closed store, is fine."""
        if not self._closed:
            with contextlib.suppress(ClosedError):
                self._change(self._loads, self._pins.give_back, self._digests(keys))

    def __len__(self) -> int:
        return len(self._catalog.index)

    def _digests(self, keys: Sequence[Key]) -> list[bytes]:
        names = self._names
        if not self.is_writer and names.is_of_another(self._catalog.signature):
            self._name(names.generation)
            names = self._names
        return [names.digest(key) for key in keys]

    def _name(self, generation: int) -> None:
        self._names = names_of(self._identity, self._catalog.signature, generation)
        self._catalog.digest_of = self._names.digest

    # Storing

    def store(
        self,
        keys: Sequence[Key],
        blocks: Sequence[torch.Tensor],
        kinds: Sequence[int] | None = None,
    ) -> list[bool]:
        """Write blocks, CPU tensors of 1 to `largest_bytes` bytes; those that are there are left.

        `kinds` are numbers of 64 bits for what the blocks are besides their names, such as a
        layout: a block of another kind is replaced, and not loaded. None stands for 0.

        Returns for each whether it is there now. It is not if there is no room (all slots are being
        read or written, or pinned), or the drive failed, which the log says. Raises ValueError for
        a block that is too large or empty, a name that is too long to be kept, or unequal numbers;
        ClosedError if the store is closed, or open for reading.
        """
        return self._call(self._stores, self._store, self._checked(keys, blocks, kinds), _nobody)

    def begin_store(
        self,
        keys: Sequence[Key],
        blocks: Sequence[torch.Tensor],
        done: Callable[[list[bool]], object],
        kinds: Sequence[int] | None = None,
    ) -> None:
        """Do `store` in the background; `done` is called with the answer, by another thread."""
        self._begin(self._stores, self._store, self._checked(keys, blocks, kinds), done)

    def _checked(
        self,
        keys: Sequence[Key],
        blocks: Sequence[torch.Tensor],
        kinds: Sequence[int] | None,
    ) -> Batch:
        self._check_writer()
        self._check(keys, blocks, kinds)
        names: list[bytes] = []
        if self._name_bytes:
            names = [key.encode() if isinstance(key, str) else key for key in keys]
            longest = max(map(len, names), default=0)
            if longest > self._name_bytes:
                raise ValueError(
                    f"a name has {longest} bytes; up to {self._name_bytes} are kept (name_bytes)"
                )
        contiguous = [block.contiguous() for block in blocks]
        return Batch(self._digests(keys), contiguous, _kinds(kinds, keys), names)

    def _check(
        self,
        keys: Sequence[Key],
        blocks: Sequence[torch.Tensor],
        kinds: Sequence[int] | None,
    ) -> None:
        self._check_open()
        if len(keys) != len(blocks):
            raise ValueError(f"each block has one name: {len(keys)} are given for {len(blocks)}")
        if kinds is not None and len(kinds) != len(blocks):
            raise ValueError(f"each block has one kind: {len(kinds)} are given for {len(blocks)}")
        for key, block in zip(keys, blocks, strict=True):
            if not 0 < block.nbytes <= self.largest_bytes:
                most = self.largest_bytes
                raise ValueError(
                    f"block {key!r} has {block.nbytes} bytes; 1 to {most} are possible"
                )

    def _store(self, batch: Batch, ended: Callable[[int], object]) -> list[bool]:
        """Write blocks; none has `ended` before all have, and the table says so."""
        catalog = self._catalog
        slots = catalog.locked(catalog.reserve, batch)
        taken = [
            SlotPiece(number, block, slot)
            for number, (slot, block) in enumerate(zip(slots, batch.blocks, strict=True))
            if slot is not None
        ]
        places: dict[int, BlockPlace] = {}
        failed: dict[int, BaseException] = {}

        def note(piece: SlotPiece) -> None:
            crc, kind = crc32.of_tensor(piece.block), batch.kinds[piece.number]
            places[piece.number] = BlockPlace(piece.slot, piece.block.nbytes, crc, kind)

        try:
            if taken:
                failed = self._writes.move(taken, True, note)
        except BaseException as error:  # nothing of it is in flight any more
            failed = {piece.number: error for piece in taken}
            raise
        finally:
            catalog.locked(catalog.commit, batch, slots, places, failed)
        where = catalog.index.where
        return [
            (place := where.get(digest)) is not None and place.kind == kind
            for digest, kind in zip(batch.digests, batch.kinds, strict=True)
        ]

    # Loading

    def load(
        self,
        keys: Sequence[Key],
        blocks: Sequence[torch.Tensor],
        kinds: Sequence[int] | None = None,
    ) -> list[bool]:
        """Read blocks into contiguous CPU tensors, each with as many bytes as were stored.

        Returns for each whether it is filled. If not, its bytes are unknown: the block is not
        there, has another length or kind, or was damaged, which the log says. Raises ValueError for
        a tensor that is not contiguous, or unequal numbers.
        """
        batch = self._checked_targets(keys, blocks, kinds)
        return self._call(self._loads, self._load, batch, _nobody)

    def begin_load(
        self,
        keys: Sequence[Key],
        blocks: Sequence[torch.Tensor],
        done: Callable[[list[bool]], object],
        kinds: Sequence[int] | None = None,
    ) -> None:
        """Do `load` in the background; `done` is called with the answer, by another thread."""
        self._begin(self._loads, self._load, self._checked_targets(keys, blocks, kinds), done)

    def _checked_targets(
        self,
        keys: Sequence[Key],
        blocks: Sequence[torch.Tensor],
        kinds: Sequence[int] | None,
    ) -> Batch:
        self._check(keys, blocks, kinds)
        if not all(block.is_contiguous() for block in blocks):
            raise ValueError("a block is read into contiguous memory only")
        return Batch(self._digests(keys), list(blocks), _kinds(kinds, keys), [])

    def _load(self, batch: Batch, ended: Callable[[int], object]) -> list[bool]:
        """Read blocks; `ended` is called with each that was read and is right."""
        catalog, digests = self._catalog, batch.digests
        places = catalog.locked(catalog.pin, digests)
        failed: dict[int, BaseException] = {}
        damaged: list[int] = []
        found = [False] * len(digests)

        def check(piece: SlotPiece) -> None:
            place = places[piece.number]
            assert place is not None
            found[piece.number] = crc32.of_tensor(piece.block) == place.crc
            if found[piece.number]:
                ended(piece.number)
            else:  # the caller finds it dropped, and may store it again
                damaged.append(piece.number)

        try:
            there = [
                SlotPiece(number, block, place.slot)
                for number, (place, block, kind) in enumerate(
                    zip(places, batch.blocks, batch.kinds, strict=True)
                )
                if place is not None and place.nbytes == block.nbytes and place.kind == kind
            ]
            absent = places.count(None)
            self._absent += absent
            self._unlike += len(places) - absent - len(there)
            if there:
                failed = self._reads.move(there, False, check)
        finally:
            catalog.locked(catalog.unpin, places)
        if damaged or failed:
            bad = [(digests[number], places[number]) for number in (*damaged, *failed)]
            catalog.locked(catalog.drop, bad, next(iter(failed.values()), None))
        self._loaded += sum(found)
        return found

    # Forgetting

    def remove(self, keys: Sequence[Key], *, spare_pinned: bool = False) -> None:
        """Forget blocks, for a server that evicts itself; with `spare_pinned` none with a pin."""
        self._check_writer()
        # A load that failed says so before it answers, and whoever is told of a change may have the
        # stores' turn; others wait for the stores before.
        digests = self._digests(keys)
        if self._loads.owner.is_here or self._catalog.is_telling_here:
            self._catalog.locked(self._catalog.remove, digests, spare_pinned)
        else:
            remove = self._catalog.remove
            self._call(self._stores, self._catalog.locked, remove, digests, spare_pinned)

    def clear(self) -> None:
        """Forget all blocks; the files keep their size."""
        self._check_writer()
        self._call(self._stores, self._catalog.locked, self._catalog.clear)

    def new_generation(self) -> None:
        """Find nothing of what was stored before, because the weights are others now.

        Blocks stored from now on are found until the store is closed, or this is called again; the
        next opening finds the blocks stored before the first call. Only the generation's number is
        written: the blocks make room as others do, pinned or not. Processes that read the store
        call this as often as its writer.
        """
        self._check_open()
        self._name(self._names.generation + 1)
        if self.is_writer:
            set_generation = self._catalog.set_generation
            self._change(self._stores, set_generation, self._names.generation, wait=False)
        if len(self._pins):
            self._change(self._stores, self._pins.clear, wait=False)

    def _check_writer(self) -> None:
        if not self.is_writer:
            raise ClosedError(f"the block store {self.path} is open for reading only")

    # Life

    def _call(self, worker: StoreWorker, work: Callable[..., Value], *args: Any) -> Value:
        """Ask the owner, and wait for the end, or for a second interrupt."""
        try:
            value = worker.call(self._check_open, work, *args)
        except KeyboardInterrupt as interrupt:
            if isinstance(interrupt.__context__, KeyboardInterrupt):
                self._left.add(worker)
            raise
        self._left.discard(worker)
        return value

    def _change(
        self, worker: StoreWorker, change: Callable[..., Any], *args: Any, wait: bool = True
    ) -> Any:
        """Ask or change the catalog, beside whatever is moved; None if nobody waits."""
        if not may_be_interrupted():
            return self._catalog.locked(change, *args)
        if wait:
            return worker.owner.call(self._catalog.locked, change, *args)
        worker.owner.post(self._catalog.locked, change, *args)
        return None

    def _begin(
        self,
        worker: StoreWorker,
        move: Move,
        batch: Batch,
        done: Callable[[list[bool]], object],
    ) -> None:
        slots = len(batch.blocks)
        if self.largest_bytes > self.slot_bytes:
            slots = sum(self._catalog.index.span(block.nbytes) for block in batch.blocks)
        # An eighth: what is moved together cannot make room for one another. Slots, not bytes of
        # blocks, which may be smaller.
        most_slots = min(self._catalog.index.slots // 8, TOGETHER_BYTES // self.slot_bytes)
        with self._gate:  # behind the end of the thread nobody would answer
            self._check_open()
            worker.post(move, StoreJob(batch, slots, done), most_slots)

    def _check_open(self) -> None:
        if self._stores.owner.forked:
            raise ClosedError(f"the block store {self.path} is of another process: open it here")
        if self._closed:
            raise ClosedError(self._closed_message)

    def drain(self) -> None:
        """Wait until nothing that was begun before is under way."""
        for worker in (self._stores, self._loads):
            worker.drain()

    def close(self) -> None:
        """Refuse new work, finish what was begun, close the files.

        Idempotent; after an interrupt the next call goes on. At the end of a with statement that a
        second interrupt ends it waits for nothing: the rest is done later.
        """
        if self._stores.owner.forked:
            return
        with self._gate:
            self._closed = True
        if self._left and being_interrupted():
            self._ending.begin()
            return
        _finish(self._loads)
        self._loads.owner.close()
        self._ending.close()

    def __repr__(self) -> str:
        state = "closed, " if self._closed else ""
        return f"<BlockStore {self.path} {state}{len(self)} of {self._catalog.index.slots} blocks>"


def _kinds(kinds: Sequence[int] | None, keys: Sequence[Key]) -> list[int]:
    return [0] * len(keys) if kinds is None else list(kinds)


def _nobody(number: int) -> None:
    """Tell nobody: the caller waits for all."""


def _finish(worker: StoreWorker) -> None:
    """Wait until all is done that it was asked before."""
    with contextlib.suppress(ClosedError):
        worker.finish()
