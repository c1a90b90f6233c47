"""Which slots hold which block, and which block makes room for the next ones. No I/O."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import NamedTuple

from nvmeio._kv_blocks.free_slots import FreeSlots

# So many blocks are looked at for one that can make room: those beside it may be in use.
_MOST_VICTIMS = 4096


class BlockPlace(NamedTuple):
    """The first slot of a block, its length, its CRC-32, and what it is besides its name."""

    slot: int
    nbytes: int
    crc: int
    kind: int = 0


Block = tuple[bytes, BlockPlace]


class Index:
    """Blocks by digest, least recently used first; slots up to a `limit`, as the file grows.

    A block takes as many slots in a row as its bytes need; it is known by the first.
    """

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.limit = 0
        self.nbytes = 0
        self.where: OrderedDict[bytes, BlockPlace] = OrderedDict()
        self.evictions = 0
        self._holds: dict[int, bytes] = {}
        self._free = FreeSlots()
        self._pins: dict[int, int] = {}
        self._writing: dict[int, int] = {}  # how many slots from the first one on

    def span(self, nbytes: int) -> int:
        """How many slots so many bytes take."""
        return -(-nbytes // self.slot_bytes)

    def recover(self, digest: bytes, place: BlockPlace) -> None:
        """Take over what the table says, before `grow`; later records count more."""
        self.forget_slot(place.slot)
        self.written(digest, place)

    def overlapping(self) -> list[Block]:
        """Recovered blocks whose slots a later one has; a crash of the machine may leave such."""
        ages = None
        lost: list[Block] = []
        last: Block | None = None
        for slot in sorted(self._holds):
            block = (self._holds[slot], self.where[self._holds[slot]])
            if last is not None and last[1].slot + self.span(last[1].nbytes) > slot:
                ages = ages or {digest: age for age, digest in enumerate(self.where)}
                if ages[last[0]] > ages[block[0]]:
                    lost.append(block)
                    continue
                lost.append(last)
            last = block
        return lost

    def grow(self, limit: int) -> None:
        """Allow slots up to `limit`."""
        at = self.limit
        taken = [*self._writing.items()]
        for slot, digest in self._holds.items():
            if slot >= at:
                taken.append((slot, self.span(self.where[digest].nbytes)))
        for slot, count in sorted(taken):
            if slot > at:
                self._free.add(at, min(slot, limit) - at)
            at = max(at, slot + count)
        if at < limit:
            self._free.add(at, limit - at)
        self.limit = max(self.limit, limit)

    def take(self, count: int) -> int | None:
        """The first of free slots in a row, to write into."""
        slot = self._free.take(count)
        if slot is not None:
            self._writing[slot] = count
        return slot

    def make_room(self, count: int) -> tuple[int | None, list[Block]]:
        """Slots to write into that blocks held, and these blocks, which are forgotten.

        The block that was used longest ago makes room. If it is too small, those behind it do,
        too: the one that was used last is spared where others can go. None if all are in use.
        """
        newest = next(reversed(self.where.values()), None)
        found: tuple[BlockPlace, list[Block], list[int], int] | None = None
        for place in itertools.islice(self.where.values(), len(self._pins) + _MOST_VICTIMS):
            if place.slot in self._pins:
                continue
            blocks, runs, end = self._behind(place.slot, count)
            if not end:
                continue
            spares = newest is None or not place.slot <= newest.slot < end
            if found is None or spares:
                found = place, blocks, runs, end
            if spares:
                break
        if found is None:
            return None, []
        place, blocks, runs, end = found
        for first in runs:
            self._free.remove(first)
        for _, block in blocks:
            self._forget(block.slot)
        self.evictions += len(blocks)
        if end > place.slot + count:
            self._free.add(place.slot + count, end - place.slot - count)
        self._writing[place.slot] = count
        return place.slot, blocks

    def _behind(self, first: int, count: int) -> tuple[list[Block], list[int], int]:
        """Blocks and free runs from a slot on, and where they end; 0 if others are in between."""
        self._free.settle()
        blocks: list[Block] = []
        runs: list[int] = []
        at = first
        while at < first + count:
            digest = self._holds.get(at)
            if digest is not None and at not in self._pins:
                blocks.append((digest, self.where[digest]))
                at += self.span(self.where[digest].nbytes)
            elif free := self._free.count_at(at):
                runs.append(at)
                at += free
            else:
                return [], [], 0
        return blocks, runs, at

    def written(self, digest: bytes, place: BlockPlace) -> None:
        """Note that slots that were taken hold a block now."""
        self._writing.pop(place.slot, None)
        before = self.where.get(digest)
        if before is not None:
            self.forget_slot(before.slot)
        self.where[digest] = place
        self._holds[place.slot] = digest
        self.nbytes += place.nbytes

    def give_up(self, slot: int) -> None:
        """Note that slots that were taken were not written; or were, and do not count."""
        self._free.add(slot, self._writing.pop(slot))

    def touch(self, digest: bytes) -> BlockPlace | None:
        """A block's place; it is the most recently used now."""
        place = self.where.get(digest)
        if place is not None:
            self.where.move_to_end(digest)
        return place

    def pin(self, slot: int) -> None:
        """Keep a block's slots from being taken while it is read, or will be."""
        self._pins[slot] = self._pins.get(slot, 0) + 1

    def unpin(self, place: BlockPlace) -> None:
        slot = place.slot
        count = self._pins.pop(slot) - 1
        if count:
            self._pins[slot] = count
        elif slot not in self._holds and slot not in self._writing and slot < self.limit:
            self._free.add(slot, self.span(place.nbytes))

    def is_pinned(self, slot: int) -> bool:
        return slot in self._pins

    def forget_slot(self, slot: int) -> None:
        """Note that a block does not count any more; its slots are free once nobody reads it."""
        count = self._forget(slot)
        if count and slot not in self._pins and slot < self.limit:
            self._free.add(slot, count)

    def _forget(self, slot: int) -> int:
        """How many slots the block has that began there; 0 for none."""
        digest = self._holds.pop(slot, None)
        if digest is None:
            return 0
        place = self.where.pop(digest)
        self.nbytes -= place.nbytes
        return self.span(place.nbytes)

    def held(self, first: int, count: int) -> list[Block]:
        """Blocks whose first slots are among these."""
        holds = self._holds
        digests = [holds[slot] for slot in range(first, first + count) if slot in holds]
        return [(digest, self.where[digest]) for digest in digests]

    def __len__(self) -> int:
        return len(self.where)
