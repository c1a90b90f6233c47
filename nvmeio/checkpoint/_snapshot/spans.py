"""Spans of a file that are kept together: where each lies among them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from nvmeio._files.plan import PAGE_BYTES
from nvmeio._formats.torch_layout import StorageRecord

RecordSpan = tuple[StorageRecord, int, int]
"""A record, and which of its bytes: the first, and the first behind them, in the file."""


class Spans:
    """Pieces of a file, one after the other: each on the same place of its page as in the file.

    Args:
        spans: (start, end) in the file, in its order, disjoint.
    """

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        self.spans = spans
        self.places: list[int] = []
        self.end = 0
        self._starts = [start for start, _ in spans]
        for start, end in spans:
            place = self.end + (start - self.end) % PAGE_BYTES
            self.places.append(place)
            self.end = place + end - start

    def reached(self, position: int) -> int:
        """How far one is here who has come to a position in the file."""
        index = bisect_left(self._starts, position) - 1
        if index < 0:
            return 0
        start, end = self.spans[index]
        return self.places[index] + min(position, end) - start
