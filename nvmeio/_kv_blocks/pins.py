"""Blocks that may not make room between a lookup and the load that follows it."""

from __future__ import annotations

from collections.abc import Sequence

from nvmeio._kv_blocks.catalog import Catalog
from nvmeio._kv_blocks.index import BlockPlace


class Pins:
    """The pins of one owner, counted by name; they end with it, or with the process.

    Asked through `Catalog.locked`. A block that is found to be damaged goes anyway, and one
    that is stored anew under its name is another one: each pin is of the slots it was taken for.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._places: dict[bytes, list[BlockPlace]] = {}

    def take(self, digests: Sequence[bytes]) -> list[bool]:
        """Pin blocks; which are there."""
        places = self._catalog.pin(digests)
        for digest, place in zip(digests, places, strict=True):
            if place is not None:
                self._places.setdefault(digest, []).append(place)
        return [place is not None for place in places]

    def give_back(self, digests: Sequence[bytes]) -> None:
        """End one pin of each block; blocks without a pin are left."""
        for digest in digests:
            places = self._places.get(digest)
            if places:
                self._catalog.unpin([places.pop()])
                if not places:
                    del self._places[digest]

    def clear(self) -> None:
        for places in self._places.values():
            self._catalog.unpin(places)
        self._places.clear()

    def __len__(self) -> int:
        return len(self._places)
