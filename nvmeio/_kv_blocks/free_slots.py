"""Free slots of a store's file, as runs: a block may take several slots in a row."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator


class FreeSlots:
    """Runs of free slots, each as long as it can be.

    Slots are taken from the beginning of one run until that is used up, so blocks that are stored
    one after the other lie in a row.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}  # of each run, by its first slot
        self._firsts: dict[int, int] = {}  # of each run, by the slot behind it
        self._sizes: list[int] = []  # the counts that there are, sorted
        self._of_size: dict[int, dict[int, None]] = {}  # first slots, by count
        self._at = self._end = 0  # the run that is being used up; it is not among the others

    def add(self, first: int, count: int) -> None:
        """Give slots back."""
        if first == self._end and self._at < self._end:
            self._end += count
            return
        if first in self._firsts:
            before = self._firsts[first]
            count += self._remove(before)
            first = before
        if first + count in self._counts:
            count += self._remove(first + count)
        self._counts[first] = count
        self._firsts[first + count] = first
        of_size = self._of_size.get(count)
        if of_size is None:
            of_size = self._of_size[count] = {}
            insort(self._sizes, count)
        of_size[first] = None

    def take(self, count: int) -> int | None:
        """The first of `count` slots in a row; None if there is no such run."""
        if self._end - self._at < count:
            self.settle()
            fitting = bisect_left(self._sizes, count)
            if fitting == len(self._sizes):
                return None
            self._at = next(iter(self._of_size[self._sizes[fitting]]))
            self._end = self._at + self._remove(self._at)
        first = self._at
        self._at += count
        return first

    def settle(self) -> None:
        """Count the run that is being used up among the others."""
        at, end = self._at, self._end
        self._at = self._end = 0
        if at < end:
            self.add(at, end - at)

    def count_at(self, first: int) -> int:
        """How long the run is that begins at a slot; 0 if none does. Call `settle` before."""
        return self._counts.get(first, 0)

    def remove(self, first: int) -> None:
        """Take a whole run, by its first slot."""
        self._remove(first)

    def _remove(self, first: int) -> int:
        count = self._counts.pop(first)
        del self._firsts[first + count]
        of_size = self._of_size[count]
        del of_size[first]
        if not of_size:
            del self._of_size[count]
            del self._sizes[bisect_left(self._sizes, count)]
        return count

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """First slot and count of each run."""
        self.settle()
        return iter(list(self._counts.items()))
