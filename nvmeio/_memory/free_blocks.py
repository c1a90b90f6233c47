"""Which parts of a memory are free: arithmetic, for `PinnedPool`."""

from __future__ import annotations

from bisect import bisect_left, insort


class FreeBlocks:
    """The free parts of [0, nbytes): best fit, lowest address among equals, merged on return.

    Finding is a binary search; each change moves one list by one place.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = 0
        self._by_size: list[tuple[int, int]] = []  # (size, start), sorted
        self._size_at: dict[int, int] = {}  # start → size
        self._start_before: dict[int, int] = {}  # end → start
        self.put(0, nbytes)

    def take(self, nbytes: int) -> int | None:
        """The start of a block of `nbytes` bytes, or None where no free part is that long."""
        if nbytes == 0:
            return 0
        at = bisect_left(self._by_size, (nbytes, 0))
        if at == len(self._by_size):
            return None
        size, start = self._by_size[at]
        self._remove(size, start)
        if size > nbytes:
            self._insert(size - nbytes, start + nbytes)
        return start

    def take_at(self, start: int, nbytes: int) -> None:
        """Take this very block, of which all is free."""
        for size, first in list(self._by_size):
            if first <= start and start + nbytes <= first + size:
                self._remove(size, first)
                if first < start:
                    self._insert(start - first, first)
                if start + nbytes < first + size:
                    self._insert(first + size - start - nbytes, start + nbytes)
                return

    def put(self, start: int, nbytes: int) -> None:
        """Take a block back."""
        if nbytes == 0:
            return
        before = self._start_before.get(start)
        if before is not None:
            self._remove(start - before, before)
            start, nbytes = before, nbytes + start - before
        after = self._size_at.get(start + nbytes)
        if after is not None:
            self._remove(after, start + nbytes)
            nbytes += after
        self._insert(nbytes, start)

    def _insert(self, size: int, start: int) -> None:
        insort(self._by_size, (size, start))
        self._size_at[start] = size
        self._start_before[start + size] = start
        self.nbytes += size

    def _remove(self, size: int, start: int) -> None:
        del self._by_size[bisect_left(self._by_size, (size, start))]
        del self._size_at[start]
        del self._start_before[start + size]
        self.nbytes -= size
