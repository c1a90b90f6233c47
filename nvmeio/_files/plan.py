"""Transfer planning: which bytes go direct, which through the page cache. No I/O here.

A transfer covers the file range [file_offset, file_offset + nbytes). Direct I/O moves whole
units of the file's alignment, so

- a *read* fetches the enclosing aligned span; blocks that reach beyond the range, or whose memory
  is misaligned, land in a bounce block and are copied from there;
- a *write* may not touch its neighbours, so only the enclosed aligned span goes direct, and the
  head and tail go through a buffered descriptor. No read-modify-write: two writers may share
  a block. The unit for writes is at least the page, because the page cache reads, dirties and
  writes back whole pages: a smaller unit would let the write-back of a head overwrite direct
  bytes beside it.

A file without direct I/O (alignment 0) is one buffered span of single bytes.
"""

from __future__ import annotations

from typing import NamedTuple

from nvmeio._pages import PAGE_BYTES

_new = tuple.__new__


class Alignment(NamedTuple):
    """What a file asks of direct I/O, in bytes; ``Alignment(0, 0)`` where there is none."""

    offset: int
    memory: int


class Plan(NamedTuple):
    """A transfer's direct span in the file, and whether the buffered descriptor is needed.

    Attributes:
        span_start: First byte of the span given to the engine's blocks.
        span_end: End of it. For a write, [file_offset, span_start) and
            [span_end, file_offset + nbytes) are the buffered head and tail.
        direct: The span goes through the O_DIRECT descriptor.
        buffered: Some bytes go through the buffered descriptor.
    """

    span_start: int
    span_end: int
    direct: bool
    buffered: bool


def plan_read(file_offset: int, nbytes: int, alignment: int) -> Plan:
    """Plan a read of `nbytes` at `file_offset` from a file of this offset alignment."""
    end = file_offset + nbytes
    if not alignment or not nbytes:
        return Plan(file_offset, end, False, True)
    before, behind = file_offset % alignment, -end % alignment
    # Not by Plan(): its __new__ is a function of Python's.
    return _new(Plan, (file_offset - before, end + behind, True, False))


def plan_write(file_offset: int, nbytes: int, alignment: int) -> Plan:
    """Plan a write of `nbytes` at `file_offset` to a file of this offset alignment."""
    end = file_offset + nbytes
    if not alignment or not nbytes:
        return Plan(file_offset, end, False, True)
    unit = max(alignment, PAGE_BYTES)
    start = -(-file_offset // unit) * unit
    stop = end // unit * unit
    if start >= stop:
        return Plan(end, end, False, True)  # all of it is head
    return Plan(start, stop, True, start > file_offset or stop < end)
