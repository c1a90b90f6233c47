"""Which slot holds which block, which is free, and which goes next. No I/O here.

All of it is changed under the lock of its `Catalog`. `Index.where` alone is read without: one look
into a dict.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple


class BlockPlace(NamedTuple):
    """Where a block lies.

    Attributes:
        slot: Number of its slot.
        nbytes: Its length.
        crc: Its CRC-32.
    """

    slot: int
    nbytes: int
    crc: int


class Index:
    """Blocks by digest, least recently used first.

    Args:
        slots: How many slots there are room for; `limit` may be less while the file grows.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.limit = 0
        self.where: OrderedDict[bytes, BlockPlace] = OrderedDict()
        self.evictions = 0
        self._holds: dict[int, bytes] = {}
        self._free: list[int] = []
        self._pins: dict[int, int] = {}
        self._writing: set[int] = set()

    def recover(self, slot: int, digest: bytes, place: BlockPlace) -> None:
        """Take over what the table says, before `grow`; later records count more."""
        self.forget_slot(slot)
        before = self.where.get(digest)
        if before is not None:
            self.forget_slot(before.slot)
        self.where[digest] = place
        self._holds[slot] = digest

    def grow(self, limit: int) -> None:
        """There is room for slots up to `limit` now."""
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
        """A slot that was taken holds a block now."""
        self._writing.discard(place.slot)
        before = self.where.get(digest)
        if before is not None:
            self.forget_slot(before.slot)
        self.where[digest] = place
        self._holds[place.slot] = digest

    def give_up(self, slot: int) -> None:
        """A slot that was taken was not written; or was, and does not count."""
        self._writing.discard(slot)
        self._free.append(slot)

    @property
    def has_free(self) -> bool:
        """Whether there is a slot that holds nothing."""
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
        """Undo one `pin`."""
        count = self._pins.pop(slot) - 1
        if count:
            self._pins[slot] = count
        elif slot not in self._holds and slot not in self._writing and slot < self.limit:
            self.give_up(slot)

    def forget_slot(self, slot: int) -> None:
        """A block does not count any more; its slot is free once nobody reads it."""
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
