"""Rows of one length, gathered and scattered in one call, beside fio at the same depth."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from _files import huge_pages
from _lines import Line, Target, at_least, at_most, compare, cpu_per_gib, kiops, p99_ms
from _measure import Contender, Sample
from _session import Session, calling
from peers import fio

from nvmeio.cli.measure.worker import Worker
from nvmeio.files import probe_direct

PAGE = 4096
SHORT = 256
SECTOR = 512
DEPTH = 128
DEPTHS = (32, 128)
CALLS = 100
# As promised, and with --quick.
BLOCKS = (100_000, 10_000)
MANY = (1_000_000, 50_000)
SPAN_BYTES = (2 << 30, 1 << 26)
IDLE_S = 2.0

Samples = dict[str, list[Sample]]


def measure_gather(session: Session) -> list[Line]:
    return _aligned(session, "gather")


def measure_scatter(session: Session) -> list[Line]:
    return _aligned(session, "scatter")


def _aligned(session: Session, verb: str) -> list[Line]:
    (path,) = session.files(1)
    count, lines = min(_of(session, BLOCKS), session.size // PAGE), []
    work = f"{verb} of {count:,} aligned rows of 4 KiB"
    in_parts = f"the same in {CALLS} calls, into the same {count // CALLS * PAGE >> 10} KiB"
    for depth in DEPTHS:
        contenders = []
        with _rows(session, path, "anywhere", PAGE, count, depth) as worker:
            if worker is not None:
                contenders.append(calling("nvmeio", worker, verb, path=str(path)))
                if verb == "gather":
                    contenders.append(
                        calling("in parts", worker, verb, path=str(path), calls=CALLS)
                    )
            contenders += _fio(session, path, PAGE, depth, write=verb == "scatter")
            samples = session.measure(f"{verb}, depth {depth}", contenders)
        peer, theirs = f"fio libaio, depth {depth}", samples.get("fio", [])
        ours, parts = samples.get("nvmeio", []), samples.get("in parts", [])
        note = f"{count * PAGE >> 20} MiB of memory, fio's over {depth * PAGE >> 10} KiB"
        lines += [
            compare(verb, work, peer, "kIOPS", kiops, ours, theirs, at_least(0.95), note),
            compare(verb, work, f"{peer}, CPU", "s/GiB", cpu_per_gib, ours, theirs, at_most(1.2)),
        ]
        if verb == "gather":
            note = "a call waits for its last row before the next begins"
            lines.append(compare(verb, in_parts, peer, "kIOPS", kiops, parts, theirs, None, note))
    return lines


def measure_short(session: Session) -> list[Line]:
    """Row `short`: a row is a read of fio's."""
    return _beside_reads(
        session,
        "short",
        "anywhere",
        f"gather of {_of(session, MANY):,} rows of {SHORT} bytes at random",
        at_least(0.95),
        "a row is one read of fio's",
    )


def measure_zipf(session: Session) -> list[Line]:
    """Row `zipf`: the table fits 16 times into the batch."""
    return _beside_reads(
        session,
        "zipf",
        "zipf",
        f"the same, Zipf(1.0) over {_of(session, MANY) // 16:,} rows",
        at_least(2),
        "each sector is read once for all rows in it",
    )


def _beside_reads(
    session: Session, row: str, places: str, work: str, target: Target, note: str
) -> list[Line]:
    """Beside fio's reads of a page, and of a sector where the device has such."""
    (path,) = session.files(1)
    blocks = {"fio libaio 4 KiB": PAGE}
    if (probe_direct(path.parent).offset_alignment or PAGE) <= SECTOR:
        blocks["fio libaio 512 bytes"] = SECTOR
    contenders = []
    with _rows(session, path, places, SHORT, _of(session, MANY)) as worker:
        if worker is not None:
            contenders.append(calling("nvmeio", worker, "gather", path=str(path)))
        for name, block in blocks.items():
            contenders += _fio(session, path, block, DEPTH, name=name)
        samples = session.measure(row, contenders)
    ours = samples.get("nvmeio", [])
    return [
        compare(
            row,
            work,
            f"{name}, depth {DEPTH}",
            "k/s",
            kiops,
            ours,
            samples.get(name, []),
            target,
            note,
        )
        for name in blocks
    ]


def measure_sorted(session: Session) -> list[Line]:
    """Row `sorted`: every byte between the first row and the last counts, wanted or not."""
    (path,) = session.files(1)
    span = min(_of(session, SPAN_BYTES), session.size)
    setting = fio.HUGE_PAGES[1]
    lines: list[Line] = []
    with huge_pages(setting.buffer_bytes) as refused:
        if refused:
            setting = fio.DEFAULT_BUFFERS[1]
        for row_bytes in (PAGE, SHORT):
            contenders = []
            with _rows(session, path, "every second", row_bytes, span // row_bytes // 2) as worker:
                if worker is not None:
                    contenders.append(calling("nvmeio", worker, "gather", path=str(path)))
                if session.has_fio():
                    sequential = partial(fio.sequential, path, span, False, setting)
                    contenders.append(Contender("fio", sequential))
                samples = session.measure(f"every second {row_bytes} bytes", contenders)
            lines.append(
                compare(
                    "sorted",
                    f"gather of every second row of {row_bytes} bytes, {span >> 20} MiB",
                    f"{setting.name}, sequential",
                    "GB/s",
                    _spanned_gb_per_s,
                    samples.get("nvmeio", []),
                    samples.get("fio", []),
                    at_least(0.8),
                    "bytes between the rows count too; both read over some 128 MiB of memory",
                )
            )
    return lines


def measure_lag(session: Session) -> list[Line]:
    """Row `lag`: a 1 ms timer's lateness while a million rows are gathered."""
    (path,) = session.files(1)
    count = _of(session, MANY)
    with _rows(session, path, "anywhere", SHORT, count) as worker:
        contenders = []
        if worker is not None:
            contenders = [
                calling("gather", worker, "lag", path=str(path)),
                calling("idle", worker, "idle_lag", seconds=IDLE_S),
            ]
        samples = session.measure("event-loop lag", contenders)
    ours = samples.get("gather", [])
    worst = max((sample.extra["worst_ms"] for sample in ours), default=0.0)
    return [
        compare(
            "lag",
            f"loop lag p99 beside a gather of {count:,} rows",
            "the same loop, idle",
            "ms",
            p99_ms,
            ours,
            samples.get("idle", []),
            at_most(2.0, of="value"),
            f"worst of all {worst:.2f} ms",
        )
    ]


@contextmanager
def _rows(
    session: Session, path: Path, places: str, row_bytes: int, count: int, depth: int = DEPTH
) -> Iterator[Worker | None]:
    """A process that has chosen rows of the file, and has gathered them right; None without one."""
    with session.fresh_worker("gathers") as worker:
        ready = worker is not None and session.attempt(
            "nvmeio",
            worker,
            "prepare",
            path=str(path),
            nbytes=session.size,
            places=places,
            row_bytes=row_bytes,
            count=count,
            depth=depth,
        )
        yield worker if ready else None


def _fio(
    session: Session, path: Path, block: int, depth: int, write: bool = False, name: str = "fio"
) -> list[Contender]:
    """As many random blocks as there are rows of a page."""
    if not session.has_fio():
        return []
    count = min(_of(session, BLOCKS), session.size // block)
    run = partial(fio.random_blocks, path, session.size, count, block, depth, write)
    return [Contender(name, run)]


def _of(session: Session, numbers: tuple[int, int]) -> int:
    return numbers[session.quick]


def _spanned_gb_per_s(sample: Sample) -> float:
    return sample.extra.get("span_bytes", sample.nbytes) / sample.seconds / 1e9
