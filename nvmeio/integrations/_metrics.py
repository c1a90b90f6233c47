"""What monitoring systems are told: `AioHandle.stats`, of all handles of the process together.

Handles come and go (each load without one of its own has one), so what they have counted is told
as the process's, which never goes back. Nothing is kept alive by it, and nothing runs but when
somebody asks.
"""

from __future__ import annotations

from typing import NamedTuple

from nvmeio._core.core import totals


class Metric(NamedTuple):
    """One number.

    Attributes:
        name: Without the prefix.
        unit: "bytes" or "".
        value: What it is now.
        what: Described.
        grows: Whether it never goes back.
    """

    name: str
    unit: str
    value: int
    what: str
    grows: bool = True


def metrics() -> list[Metric]:
    """All of them, as they are now."""
    counted, handles = totals()
    return [
        Metric("read", "bytes", counted.bytes_read, "Bytes read."),
        Metric("written", "bytes", counted.bytes_written, "Bytes written."),
        Metric("direct", "bytes", counted.direct_bytes, "Bytes moved in place, direct."),
        Metric("bounced", "bytes", counted.bounced_bytes, "Bytes moved through bounce memory."),
        Metric("buffered", "bytes", counted.buffered_bytes, "Bytes through the page cache."),
        Metric("operations", "", counted.operations, "Operations that have ended."),
        Metric("errors", "", counted.errors, "Operations that have failed."),
        Metric("cancelled", "", counted.cancelled, "Operations that were cancelled."),
        Metric("rows", "", counted.rows, "Rows gathered and scattered."),
        Metric("row_blocks", "", counted.row_blocks, "Blocks that rows were moved in."),
        Metric("rows_saved", "bytes", counted.row_bytes_saved, "Bytes that near rows shared."),
        Metric("in_flight", "", counted.in_flight, "Operations in flight.", grows=False),
        Metric("handles", "", handles, "Handles that are open.", grows=False),
    ]
