"""Blocks to and from the drive: a cache that outlives its process, whose blocks stay within a size.

A store is two files in a private directory: ``NAME.blocks``, slots of one size, allocated ahead in
large steps and read and written direct; and ``NAME.table``, what lies in them (`table`). One
process writes a store, having locked its table; others may read it meanwhile. What a reader gets is
checked against the block's CRC-32, so a slot that is overwritten under its hands is a miss.

All blocks of a batch are in flight together, and checksums are made while others go on. Loads and
stores take turns among themselves, and neither waits for the other's drive. Each turn is done by
its caller, or by a thread that nobody can interrupt where the caller's can be, or does not wait
(`worker`). What lies where is changed under a lock (`catalog`), by threads that nobody can
interrupt: one of its own for that would cost two more switches of thread, which take longer than a
small block. A few small blocks in a row are moved by the turn itself (`in_place`): a load by a
server's thread waits once, for the drive.

It is a cache. What cannot be stored is not there later; what cannot be read or is damaged is a miss
and said so in the log. Nothing is synchronised with the drive: after a crash of the machine the
checksums tell what is whole.
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
from nvmeio._kv_blocks.catalog import BlockPlace, Catalog
from nvmeio._kv_blocks.table import Key, names_of
from nvmeio._kv_blocks.transfers import InPlace, Move, SlotPiece, StoreJob, StoreWorker, Transfers
from nvmeio._pages import round_up
from nvmeio._storage import crc32
from nvmeio._threads.closing import Closing
from nvmeio._threads.future import being_interrupted, may_be_interrupted
from nvmeio._threads.shutdown import Ending, leave
from nvmeio.errors import ClosedError
from nvmeio.handle import AioHandle

# Slots are whole pages, so that neither edge of a block is written through the page cache.
PAGE_BYTES = 4096
DIRECTORY = "nvmeio-blocks"
# Slots of jobs that are moved together at most: stores are answered when all of them are there.
TOGETHER_BYTES = 256 << 20

Value = TypeVar("Value")


class Stats(NamedTuple):
    """What a store did since it was opened.

    `blocks` are those it holds now, `evicted` those that made room for others, `refused` those that
    were not stored (no room, or the drive failed), `damaged` those that were dropped when they were
    read, or for what the table says of them.
    """

    blocks: int
    stored: int
    loaded: int
    evicted: int
    refused: int
    damaged: int


class BlockStore(NotPickled, Closing):
    """Blocks of bytes by name, on the drive.

    Args:
        directory: On the drive. The files lie in ``nvmeio-blocks`` in it, which is made private.
        name: Of the store; one process at a time writes it.
        block_bytes: What a block has at most.
        capacity_bytes: What the blocks may take on the drive, rounded down to whole slots. With
            another size than before, the files become larger or smaller; blocks that lay behind the
            new end are gone, which the log says. A reader's is as its writer's.
        writer: False reads what another process stores; nothing can be stored or removed.
        handle: Moves the bytes and stays open; None makes one.
        identity: What the blocks are of besides their names, such as weights: what was stored with
            another is not found, which the log says. None: nobody can tell, so what is stored is
            found until the store is closed.

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
    ) -> None:
        if block_bytes < 1:
            raise ValueError(f"block_bytes must be positive, not {block_bytes}")
        self.slot_bytes = round_up(block_bytes, PAGE_BYTES)
        slots = capacity_bytes // self.slot_bytes
        if slots < 1:
            raise ValueError(
                f"capacity_bytes must be {self.slot_bytes} or more, for one block: {capacity_bytes}"
            )
        if "/" in name or name.startswith("."):
            raise ValueError(f"{name!r} is no name for a store: it becomes part of file names")
        self.block_bytes = block_bytes
        self.path = Path(directory) / DIRECTORY / f"{name}.blocks"
        self.is_writer = writer
        self._identity = identity
        self._loaded = 0
        self._closed_message = f"the block store {self.path} is closed"
        self._loads = StoreWorker("nvmeio-blocks-loads", self._closed_message)
        self._stores = StoreWorker("nvmeio-blocks-stores", self._closed_message)
        self._closed = False
        self._left: set[StoreWorker] = set()  # which do what a second interrupt left to itself
        self._gate = threading.Lock()  # held by who begins something, and while it becomes closed
        try:
            self._ending = self._stores.owner.call(self._open, slots, handle)
        except KeyboardInterrupt:
            leave(self._stores.owner)
            _finish(self._stores)  # who tries again must not find it in use
            raise

    def _open(self, slots: int, handle: AioHandle | None) -> Ending:
        """Open the files; called in the stores' thread."""
        with contextlib.ExitStack() as undo:
            undo.callback(self._stores.owner.close)
            undo.callback(self._loads.owner.close)
            self._loads.finish()  # or there is no thread to be had, and nobody would answer
            self._catalog = Catalog(
                self.path, self.block_bytes, self.slot_bytes, slots, self.is_writer
            )
            undo.callback(self._catalog.close)
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
        return Stats(len(self), known.stored, self._loaded, evicted, known.refused, known.damaged)

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

    # Storing

    def store(self, keys: Sequence[Key], blocks: Sequence[torch.Tensor]) -> list[bool]:
        """Write blocks, CPU tensors of 1 to `block_bytes` bytes; those that are there are left.

        Returns for each whether it is there now. It is not if there is no room (all slots are being
        read or written), or the drive failed, which the log says. Raises ValueError for a block
        that is too large or empty, or unequal numbers; ClosedError if the store is closed, or open
        for reading.
        """
        return self._call(self._stores, self._store, *self._checked(keys, blocks), _nobody)

    def begin_store(
        self,
        keys: Sequence[Key],
        blocks: Sequence[torch.Tensor],
        done: Callable[[list[bool]], object],
    ) -> None:
        """Do `store` in the background; `done` is called with the answer, by another thread."""
        self._begin(self._stores, self._store, StoreJob(*self._checked(keys, blocks), done))

    def _checked(
        self, keys: Sequence[Key], blocks: Sequence[torch.Tensor]
    ) -> tuple[list[bytes], list[torch.Tensor]]:
        self._check_writer()
        self._check(keys, blocks)
        return self._digests(keys), [block.contiguous() for block in blocks]

    def _check(self, keys: Sequence[Key], blocks: Sequence[torch.Tensor]) -> None:
        self._check_open()
        if len(keys) != len(blocks):
            raise ValueError(f"each block has one name: {len(keys)} are given for {len(blocks)}")
        for key, block in zip(keys, blocks, strict=True):
            if not 0 < block.nbytes <= self.block_bytes:
                raise ValueError(
                    f"block {key!r} has {block.nbytes} bytes; 1 to {self.block_bytes} are possible"
                )

    def _store(
        self,
        digests: list[bytes],
        blocks: list[torch.Tensor],
        ended: Callable[[int], object],
    ) -> list[bool]:
        """Write blocks; none has `ended` before all have, and the table says so."""
        catalog = self._catalog
        slots = catalog.locked(catalog.reserve, digests)
        taken = [
            SlotPiece(number, block, slot)
            for number, (slot, block) in enumerate(zip(slots, blocks, strict=True))
            if slot is not None
        ]
        places: dict[int, BlockPlace] = {}
        failed: dict[int, BaseException] = {}

        def note(piece: SlotPiece) -> None:
            crc = crc32.of_tensor(piece.block)
            places[piece.number] = BlockPlace(piece.slot, piece.block.nbytes, crc)

        try:
            if taken:
                failed = self._writes.move(taken, True, note)
        except BaseException as error:  # nothing of it is in flight any more
            failed = {piece.number: error for piece in taken}
            raise
        finally:
            catalog.locked(catalog.commit, digests, slots, places, failed)
        return [digest in catalog.index.where for digest in digests]

    # Loading

    def load(self, keys: Sequence[Key], blocks: Sequence[torch.Tensor]) -> list[bool]:
        """Read blocks into contiguous CPU tensors, each with as many bytes as were stored.

        Returns for each whether it is filled. If not, its bytes are unknown: the block is not
        there, has another length, or was damaged, which the log says. Raises ValueError for a
        tensor that is not contiguous, or unequal numbers.
        """
        return self._call(self._loads, self._load, *self._checked_targets(keys, blocks), _nobody)

    def begin_load(
        self,
        keys: Sequence[Key],
        blocks: Sequence[torch.Tensor],
        done: Callable[[list[bool]], object],
    ) -> None:
        """Do `load` in the background; `done` is called with the answer, by another thread."""
        self._begin(self._loads, self._load, StoreJob(*self._checked_targets(keys, blocks), done))

    def _checked_targets(
        self, keys: Sequence[Key], blocks: Sequence[torch.Tensor]
    ) -> tuple[list[bytes], list[torch.Tensor]]:
        self._check(keys, blocks)
        if not all(block.is_contiguous() for block in blocks):
            raise ValueError("a block is read into contiguous memory only")
        return self._digests(keys), list(blocks)

    def _load(
        self,
        digests: list[bytes],
        blocks: list[torch.Tensor],
        ended: Callable[[int], object],
    ) -> list[bool]:
        """Read blocks; `ended` is told of each that was read and is right."""
        catalog = self._catalog
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
            else:  # whoever is told finds it dropped, and may store it again
                damaged.append(piece.number)

        try:
            there = [
                SlotPiece(number, block, place.slot)
                for number, (place, block) in enumerate(zip(places, blocks, strict=True))
                if place is not None and place.nbytes == block.nbytes
            ]
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

    def remove(self, keys: Sequence[Key]) -> None:
        """Forget blocks, for a server that evicts itself."""
        self._check_writer()
        # A load that failed says so before it answers; others wait for the stores before.
        digests = self._digests(keys)
        if self._loads.owner.is_here:
            self._catalog.locked(self._catalog.remove, digests)
        else:
            self._call(self._stores, self._catalog.locked, self._catalog.remove, digests)

    def clear(self) -> None:
        """Forget all blocks; the files keep their size."""
        self._check_writer()
        self._call(self._stores, self._catalog.locked, self._catalog.clear)

    def new_generation(self) -> None:
        """Find nothing of what was stored before, because the weights are others now.

        What is stored from now on is found until the store is closed, or this is called again; the
        next opening finds what was stored before the first call. Nothing is written: the blocks
        make room as others do. Processes that read the store call this as often as its writer.
        """
        self._check_open()
        self._name(self._names.generation + 1)

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
        self, worker: StoreWorker, change: Callable[..., object], *args: Any, wait: bool = True
    ) -> None:
        """Change the catalog, beside whatever is moved."""
        if not may_be_interrupted():
            self._catalog.locked(change, *args)
        elif wait:
            worker.owner.call(self._catalog.locked, change, *args)
        else:
            worker.owner.post(self._catalog.locked, change, *args)

    def _begin(self, worker: StoreWorker, move: Move, job: StoreJob) -> None:
        # An eighth: what is moved together cannot make room for one another. Slots, not bytes of
        # blocks, which may be smaller.
        most_blocks = min(self._catalog.index.slots // 8, TOGETHER_BYTES // self.slot_bytes)
        with self._gate:  # behind the end of the thread nobody would answer
            self._check_open()
            worker.post(move, job, most_blocks)

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


def _nobody(number: int) -> None:
    """Tell nobody: the caller waits for all."""


def _finish(worker: StoreWorker) -> None:
    """Wait until all is done that it was asked before."""
    with contextlib.suppress(ClosedError):
        worker.finish()
