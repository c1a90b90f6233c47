"""The checksum of a tensor that is read in tiles, where its file has that of the whole only."""

from __future__ import annotations

from collections.abc import Sequence

from nvmeio._storage import crc32


class CutSums:
    """Notes what tiles have until all are known, and then holds each of them to that.

    Args:
        whole: CRC-32 of the tensor.
        sizes: Bytes of each tile, in the order of the tensor.

    Attributes:
        failures: How often a tile was found to be, or to have been, another than what was packed.
            Whoever uses several tiles one after the other compares it: one that he had used may
            have been read anew by somebody else, and be right by now.
    """

    def __init__(self, whole: int, sizes: Sequence[int]) -> None:
        self.whole = whole
        self._sizes = tuple(sizes)
        self.failures = 0
        self._noted: dict[int, int] = {}
        self._last: dict[int, int] = {}  # not noted anew with the others: it may be in memory yet
        self._right: dict[int, int] | None = None

    def agrees(self, tile: int, found: int) -> bool:
        """Whether what a tile has now may be what the whole is made of; one thread at a time.

        False of the last tile to arrive tells that one of them is wrong: all are noted anew.
        """
        if self._right is not None:
            return self._right[tile] == found
        if self._last.setdefault(tile, found) != found:
            self.failures += 1
        self._noted[tile] = self._last[tile] = found
        if len(self._noted) < len(self._sizes):
            return True
        total = 0
        for number, nbytes in enumerate(self._sizes):
            total = crc32.combine(total, self._noted[number], nbytes)
        noted, self._noted = self._noted, {}
        if total != self.whole:
            self.failures += 1
            return False
        self._right = noted
        return True

    @property
    def settled(self) -> bool:
        """Whether all tiles were there once, and were right together."""
        return self._right is not None
