"""The rows of the comparison, by the key that `--only` takes.

Each module measures one or two rows and returns their lines. `bytes_needed` is what its files
take at most, so that free space can be checked before anything starts.
"""

from __future__ import annotations

from _program import Row

from rows import event_loop, many, random_reads, sequential, unpinned

ROWS: dict[str, Row] = {
    "sequential": Row(
        "1 GiB read and overwrite, page-locked",
        sequential.measure,
        lambda size, _: size,
    ),
    "cpu": Row("CPU seconds per GiB", sequential.measure, lambda size, _: size),
    "first-write": Row(
        "first write of a new 1 GiB file",
        sequential.measure_first_write,
        lambda size, _: 2 * size,
    ),
    "unpinned": Row(
        "the same with an ordinary tensor",
        unpinned.measure,
        lambda size, _: size,
    ),
    "random": Row(
        "4 KiB random reads from coroutines",
        random_reads.measure,
        lambda size, _: size,
    ),
    "many": Row(
        "1,000 tensors",
        many.measure,
        lambda size, quick: size + many.total_bytes(quick),
    ),
    "disturbed": Row(
        "reading while Python is busy",
        event_loop.measure_disturbed,
        lambda size, _: event_loop.DISTURBED_FILES * size,
    ),
    "lag": Row(
        "event-loop lag",
        event_loop.measure_lag,
        lambda size, _: event_loop.DISTURBED_FILES * size,
    ),
}
