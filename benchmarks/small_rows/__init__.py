"""The rows of the benchmark of small pieces, by the key that `--only` takes."""

from __future__ import annotations

from _program import Row
from rows import many

from small_rows import coroutines, gathers

ROWS: dict[str, Row] = {
    "gather": Row("aligned rows of 4 KiB, read", gathers.measure_gather, lambda size, _: size),
    "scatter": Row(
        "aligned rows of 4 KiB, overwritten", gathers.measure_scatter, lambda size, _: size
    ),
    "short": Row("rows of 256 bytes at random", gathers.measure_short, lambda size, _: size),
    "zipf": Row(
        "rows of 256 bytes, some far more popular", gathers.measure_zipf, lambda size, _: size
    ),
    "sorted": Row("every second row", gathers.measure_sorted, lambda size, _: size),
    "coroutines": Row("4 KiB reads by coroutines", coroutines.measure, lambda size, _: size),
    "many": Row(
        "1,000 tensors of all sizes",
        many.measure,
        lambda size, quick: size + many.total_bytes(quick),
    ),
    "lag": Row("event-loop lag beside a gather", gathers.measure_lag, lambda size, _: size),
}
