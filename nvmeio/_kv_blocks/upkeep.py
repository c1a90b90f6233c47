"""A store looked after from outside its server: examined, verified, resized, emptied.

A store may be examined beside its writer. To change it takes it alone. Each change goes from one
valid state to the next: a block's record is emptied before its bytes may be overwritten, and
written once they are in place. So it may be killed at any moment, and done again.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from nvmeio import buffers, files
from nvmeio._files.descriptors import open_error
from nvmeio._io.handles import new_handle
from nvmeio._kv_blocks.index import Block, BlockPlace, Index
from nvmeio._kv_blocks.store import DIRECTORY
from nvmeio._kv_blocks.table import NotATable, SlotRecord, Table, sizes_in
from nvmeio._kv_blocks.transfers import SlotPiece, Transfers
from nvmeio._kv_blocks.users import User, users_of
from nvmeio._kv_blocks.whole_names import WholeNames
from nvmeio._pages import round_up
from nvmeio._storage import crc32
from nvmeio._storage.locks import check_unused, open_alone
from nvmeio._storage.untrusted import open_own
from nvmeio._threads.closing import on_error
from nvmeio._threads.interruptible import run_interruptible
from nvmeio.errors import IntegrityError

STAGING_BYTES = 64 << 20


class StoreFacts(NamedTuple):
    """The contents of a store.

    Attributes:
        blocks: The number of blocks.
        nbytes: Their bytes.
        capacity_bytes: The bytes that slots may take.
        file_bytes: The bytes that they take now.
        block_bytes: The unit in which room is given, in whole pages.
        kinds: How many blocks there are of each kind.
        damaged: Records that cannot be used.
        generation: How often its writer changed the names since it was opened.
        tag: The digest of the blocks' origin in hex digits; zeros if that was not said.
        users: Processes that have it open, as far as they can be seen.
    """

    path: str
    blocks: int
    nbytes: int
    capacity_bytes: int
    file_bytes: int
    block_bytes: int
    kinds: dict[int, int]
    damaged: int
    generation: int
    tag: str
    users: list[User]


class DamagedBlock(NamedTuple):
    """A slot whose block is not what was stored; the digest is that of its name, in hex digits."""

    slot: int
    digest: str
    what: str


class StoreVerdict(NamedTuple):
    """The result of `verify`: blocks that were read, their bytes, and those that are damaged.

    `changed` are blocks that made room for others meanwhile.
    """

    path: str
    blocks: int
    nbytes: int
    changed: int
    problems: list[DamagedBlock]


class Resized(NamedTuple):
    """The result of `resize`: capacity before and now, blocks kept, of them moved, and gone."""

    path: str
    capacity_before: int
    capacity_bytes: int
    kept: int
    moved: int
    dropped: int


def stores_in(directory: Path) -> list[Path]:
    """The blocks of each store of a directory, by its path of files or the one that a server has.

    Raises FileNotFoundError if there is none.
    """
    folder = directory if directory.name == DIRECTORY else directory / DIRECTORY
    stores = sorted(path.with_suffix(".blocks") for path in folder.glob("*.table"))
    if not stores:
        raise FileNotFoundError(f"{directory}: there is no block store in it")
    return stores


# Examining


def examine(path: Path) -> StoreFacts:
    """Say what a store holds; reads its table alone."""
    with _reading(path) as table:
        kinds: Counter[int] = Counter()
        nbytes = damaged = 0
        for slot, record in table.records():
            if record is not None:
                kinds[record.kind] += 1
                nbytes += record.nbytes
            else:
                damaged += table.is_damaged(slot)
        return StoreFacts(
            path=os.fspath(path),
            blocks=kinds.total(),
            nbytes=nbytes,
            capacity_bytes=table.slots * table.slot_bytes,
            file_bytes=_size_of(path),
            block_bytes=table.slot_bytes,
            kinds=dict(sorted(kinds.items())),
            damaged=damaged,
            generation=table.generation,
            tag=table.tag.hex(),
            users=users_of(_files_of(path)),
        )


def nbytes_of(path: Path) -> int:
    """How many bytes `verify` will read."""
    with _reading(path) as table:
        return sum(record.nbytes for _, record in table.records() if record is not None)


def verify(path: Path, progress: Callable[[int], object]) -> StoreVerdict:
    """Read every block past the page cache, and compare its checksum; changes nothing.

    A writer empties a record before its slot is overwritten: one that is the same before and after
    tells that the bytes were those that it is of. `progress` is called with bytes that were read.
    """
    with contextlib.ExitStack() as undo:
        table = undo.enter_context(_reading(path))
        records = [record for _, record in table.records() if record is not None]
        records.sort(key=lambda record: record.slot)
        problems = [
            DamagedBlock(slot, "", "its record in the table is damaged")
            for slot, record in table.records()
            if record is None and table.is_damaged(slot)
        ]
        mover = undo.enter_context(_moving(path, table.slot_bytes, writing=False))
        changed = 0
        for batch in _batches(records, table.slot_bytes):
            wrong = mover.read(batch)
            for record in batch:
                progress(record.nbytes)
                if record.slot in wrong and table.record(record.slot) != record:
                    changed += 1
                elif record.slot in wrong:
                    damage = DamagedBlock(record.slot, record.digest.hex(), wrong[record.slot])
                    problems.append(damage)
        nbytes = sum(record.nbytes for record in records)
        problems = [each for each in problems if each.digest or table.is_damaged(each.slot)]
        return StoreVerdict(os.fspath(path), len(records), nbytes, changed, sorted(problems))


# Changing


def purge(path: Path) -> int:
    """Forget all blocks, and give their room back; returns how many there were.

    Raises TransferError (EBUSY) if a living process has the store open.
    """
    with _alone(path) as table:
        records = list(table.records())
        _empty(table, [slot for slot, _ in records])
        _truncate(path, table, 0)
        return sum(record is not None for _, record in records)


def resize(path: Path, capacity_bytes: int) -> Resized:
    """Make a store larger or smaller where it lies.

    In a smaller one the blocks that were stored last are kept, as many as there is room for; those
    behind its new end are moved.

    Raises ValueError if there is no room for one block, or whole names are of an older version;
    TransferError (EBUSY) if a living process
    has the store open, TransferError if the drive fails.
    """
    with _reading(path) as table:
        slots = capacity_bytes // table.slot_bytes
        if not slots:
            raise ValueError(
                f"a capacity of {capacity_bytes} bytes has no room for a block: "
                f"give {table.slot_bytes} bytes or more"
            )
    with _alone(path, slots) as table:
        before = table.slots_before
        names = path.with_suffix(".names")
        if slots < before and _size_of(names) and not table.name_bytes:
            raise ValueError(
                f"{names} was written by an older nvmeio, so the length of its names is unknown: "
                "start the server once first, or remove the file if its server keeps no names"
            )
        kept, moved, dropped = _fit(path, table, slots)
        if slots < before:
            table.cut(slots)
        _truncate(path, table, slots)
        slot_bytes = table.slot_bytes
    sizes = before * slot_bytes, slots * slot_bytes
    return Resized(os.fspath(path), *sizes, kept, moved, dropped)


def _fit(path: Path, table: Table, slots: int) -> tuple[int, int, int]:
    """Have all blocks before a slot; returns how many are kept, moved and dropped."""
    index = _index_of(table, _size_of(path) // table.slot_bytes)
    if slots >= table.slots_before:
        return len(index), 0, 0
    places = placed(index, slots)
    stay = {index.where[digest].slot for digest in places}
    _empty(table, [slot for slot, _ in table.records() if slot not in stay])
    moves = [
        (record, places[record.digest].slot)
        for slot in stay
        if (record := table.record(slot)) and places[record.digest].slot != slot
    ]
    # The one across the new end first: others may be moved to where it begins.
    moves.sort(key=lambda move: move[0].slot)
    targets = {record.slot: to for record, to in moves}
    lost = 0
    with contextlib.ExitStack() as undo:
        mover = undo.enter_context(_moving(path, table.slot_bytes, writing=True))
        names = None
        if table.name_bytes:
            most = max(slots, table.slots_before)
            names = WholeNames(path.with_suffix(".names"), table.name_bytes, most)
            undo.callback(names.close)
        records = [record for record, _ in moves]
        across = [record for record in records[:1] if record.slot < slots]
        for batch in (across, *_batches(records[len(across) :], table.slot_bytes)):
            # To its end, also when interrupted.
            lost += run_interruptible(partial(_move, table, names, mover, batch, targets))
    return len(places) - lost, len(moves) - lost, len(index) - len(places) + lost


def _move(
    table: Table,
    names: WholeNames | None,
    mover: _Mover,
    batch: Sequence[SlotRecord],
    targets: dict[int, int],
) -> int:
    """Move blocks to free slots; returns how many were lost, for they were damaged."""
    wrong = mover.read(batch)
    for record in batch:
        first = targets[record.slot]
        for slot in range(first, first + -(-record.nbytes // table.slot_bytes)):
            table.empty(slot)
    whole = [record for record in batch if record.slot not in wrong]
    mover.write(batch, {record.slot: targets[record.slot] for record in whole})
    for record in whole:
        if names is not None:
            names.put(targets[record.slot], names.get(record.slot))
        table.copy(record.slot, targets[record.slot])
    _empty(table, [record.slot for record in batch])
    return len(wrong)


def placed(index: Index, slots: int) -> dict[bytes, BlockPlace]:
    """The places of blocks in fewer slots, by digest; those that are missing have to go.

    The newest stay, as many as there is room for. Blocks before the new end stay there, unless
    newer blocks of several slots find no slots in a row.
    """
    kept: list[Block] = []
    room = slots
    for digest, place in reversed(index.where.items()):
        room -= index.span(place.nbytes)
        if room < 0:
            break
        kept.append((digest, place))
    ages = {digest: age for age, digest in enumerate(index.where)}
    fitted = Index(slots, index.slot_bytes)
    across: list[Block] = []
    behind: list[Block] = []
    for digest, place in reversed(kept):
        end = place.slot + index.span(place.nbytes)
        if place.slot >= slots:
            behind.append((digest, place))
        elif end <= slots:
            fitted.recover(digest, place)
        else:  # its beginning keeps others away until it is moved
            across.append((digest, place))
            nbytes = (slots - place.slot) * index.slot_bytes
            fitted.recover(digest, place._replace(nbytes=nbytes))
    fitted.grow(slots)
    for digest, place in across + behind[::-1]:
        span = index.span(place.nbytes)
        to = fitted.take(span)
        if to is None and place.slot < slots:
            fitted.forget_slot(place.slot)
            continue
        if to is None and fitted.where and ages[next(iter(fitted.where))] < ages[digest]:
            to, _ = fitted.make_room(span)
        if to is not None:
            fitted.written(digest, place._replace(slot=to))
    return dict(fitted.where)


def _index_of(table: Table, room: int) -> Index:
    """The blocks that count, oldest first; those behind `room` slots have no bytes."""
    index = Index(table.slots, table.slot_bytes)
    for slot, record in table.records():
        if record is None:
            index.forget_slot(slot)
        elif slot + index.span(record.nbytes) <= room:
            place = BlockPlace(slot, record.nbytes, record.crc, record.kind)
            index.recover(record.digest, place)
    for _, place in index.overlapping():
        index.forget_slot(place.slot)
    return index


def _empty(table: Table, slots: Sequence[int]) -> None:
    for slot in slots:
        table.empty(slot)
    if table.is_ahead:
        table.announce()


def _truncate(path: Path, table: Table, slots: int) -> None:
    """Give room back that lies behind so many slots."""
    sizes = {path: slots * table.slot_bytes}
    if table.name_bytes or not slots:
        sizes[path.with_suffix(".names")] = slots * WholeNames.record_bytes(table.name_bytes)
    for file, nbytes in sizes.items():
        if _size_of(file) > nbytes:
            fd = open_own(file)
            try:
                os.ftruncate(fd, nbytes)
            finally:
                os.close(fd)


# Moving


class _Mover:
    """Moves blocks between slots and memory of its own."""

    def __init__(self, transfers: Transfers, slot_bytes: int) -> None:
        self._transfers = transfers
        self._slot_bytes = slot_bytes
        self._memory = buffers.empty_aligned(0, dtype=torch.uint8)

    def read(self, batch: Sequence[SlotRecord]) -> dict[int, str]:
        """Read blocks; returns what is wrong with those that are damaged, by slot."""
        wrong: dict[int, str] = {}

        def check(piece: SlotPiece) -> None:
            record = batch[piece.number]
            if crc32.of_tensor(piece.block) != record.crc:
                wrong[record.slot] = "its bytes are not those that were stored (CRC-32)"

        pieces = self._pieces(batch, {record.slot: record.slot for record in batch})
        failed = self._transfers.move(pieces, False, check) if pieces else {}
        for number, error in failed.items():
            wrong[batch[number].slot] = f"it cannot be read: {error}"
        return wrong

    def write(self, batch: Sequence[SlotRecord], targets: dict[int, int]) -> None:
        """Write what `read` has read of a batch to other slots, as far as there are targets."""
        pieces = self._pieces(batch, targets)
        failed = self._transfers.move(pieces, True, lambda piece: None) if pieces else {}
        for error in failed.values():
            raise error

    def _pieces(self, batch: Sequence[SlotRecord], targets: dict[int, int]) -> list[SlotPiece]:
        spans = [round_up(record.nbytes, self._slot_bytes) for record in batch]
        if self._memory.nbytes < sum(spans):
            nbytes = max(sum(spans), min(STAGING_BYTES, 2 * self._memory.nbytes))
            self._memory = buffers.empty_aligned(nbytes, dtype=torch.uint8)
        pieces, at = [], 0
        for number, (record, span) in enumerate(zip(batch, spans, strict=True)):
            if record.slot in targets:
                block = self._memory[at : at + record.nbytes]
                pieces.append(SlotPiece(number, block, targets[record.slot]))
            at += span
        return pieces


@contextlib.contextmanager
def _moving(path: Path, slot_bytes: int, writing: bool) -> Iterator[_Mover]:
    with (
        files.open(path, "r+" if writing else "r") as file,
        contextlib.closing(new_handle(path)) as handle,
    ):
        yield _Mover(Transfers(handle, file, slot_bytes, None), slot_bytes)


def _batches(records: Sequence[SlotRecord], slot_bytes: int) -> Iterator[list[SlotRecord]]:
    """Records in their order, so many as have room in memory."""
    batch: list[SlotRecord] = []
    nbytes = 0
    for record in records:
        span = round_up(record.nbytes, slot_bytes)
        if batch and nbytes + span > STAGING_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(record)
        nbytes += span
    if batch:
        yield batch


# Opening


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[Table]:
    table_path = path.with_suffix(".table")
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(table_path, flags)
    with on_error(os.close, fd), _damage_named(table_path):
        block_bytes, slots = sizes_in(fd)
        table = Table(fd, block_bytes, slots, new=False, writer=False)
    with contextlib.closing(table):
        yield table


@contextlib.contextmanager
def _alone(path: Path, slots: int = 0) -> Iterator[Table]:
    """The table of a store that nobody else has open, of its own number of slots or more."""
    table_path = path.with_suffix(".table")

    def refusal(_: int = 0) -> Exception:
        users = users_of(_files_of(path))
        who = "; ".join(map(str, users))
        who = who or "a process that cannot be seen from here (another user's or container's)"
        return open_error(errno.EBUSY, os.fspath(path), f"{who}: end it first, then try again")

    if not table_path.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(table_path))
    if users_of(_files_of(path)):
        raise refusal()
    fd = open_alone(os.fspath(table_path), refusal)
    with on_error(os.close, fd):
        if path.exists():
            _check_unused(path, refusal)
        with _damage_named(table_path):
            block_bytes, before = sizes_in(fd)
            table = Table(fd, block_bytes, max(slots, before), new=False)
    with contextlib.closing(table):
        yield table


def _check_unused(path: Path, refusal: Callable[[], Exception]) -> None:
    fd = open_own(path)
    try:
        check_unused(fd)
    except BlockingIOError:
        raise refusal() from None
    except OSError:
        return  # a file system without leases
    finally:
        os.close(fd)


@contextlib.contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except NotATable as what:
        detail = f"{path}: {what}; a server begins with an empty one, or remove the store's files"
        raise IntegrityError(detail, expected="a table of blocks", found=str(what)) from what


def _files_of(path: Path) -> list[Path]:
    return [path, path.with_suffix(".table")]


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
