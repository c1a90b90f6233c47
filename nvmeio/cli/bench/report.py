"""The report of `nvmeio bench`: a table for people, JSON for programs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nvmeio.cli._terminal import GB, Column, Row, binary_size, counted, fitted, trimmed
from nvmeio.cli.bench.engines import REFERENCE
from nvmeio.cli.bench.workload import Workload
from nvmeio.cli.measure import UNIT, Op, machine
from nvmeio.cli.measure.disk import DiskBytes
from nvmeio.cli.measure.worker import why_missing
from nvmeio.errors import BackendUnavailableError

_REFERENCE_LABEL = "plain loop"


# A file of which more lies in the page cache was not read from the drive.
CACHED = 0.05


@dataclass(frozen=True)
class Loop:
    """One loop of one engine, all tasks together.

    Attributes:
        task_s: How long each task's transfer took.
        end_to_end_s: The time from the first task's start to the last task's end.
        nbytes: Bytes that all tasks moved.
        cpu_s: User and system time of all processes.
        disk: Bytes that the drives moved meanwhile, for anybody; None if they do not report it.
        cached: The largest part of a file that lay in the page cache before a read.
    """

    task_s: list[float]
    end_to_end_s: float
    nbytes: int
    cpu_s: float
    disk: DiskBytes | None
    cached: float | None

    @property
    def slowest_task_s(self) -> float:
        """The task latency of the loop."""
        return max(self.task_s)

    @property
    def gb_per_s(self) -> float:
        """End to end."""
        return self.nbytes / self.end_to_end_s / GB


@dataclass
class Series:
    """All loops of one engine and direction."""

    engine: str
    op: Op
    warmup: list[Loop] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """The bytes that all tasks move in a loop."""
        return self.loops[0].nbytes

    @property
    def end_to_end_s(self) -> float:
        """Median of the loops."""
        return statistics.median(loop.end_to_end_s for loop in self.loops)

    @property
    def task_s(self) -> float:
        """Median of the loops, of the slowest task in each."""
        return statistics.median(loop.slowest_task_s for loop in self.loops)

    @property
    def gb_per_s(self) -> float:
        """End to end, from the median latency."""
        return self.nbytes / self.end_to_end_s / GB

    @property
    def task_gb_per_s(self) -> float:
        """From the median task latency."""
        return self.nbytes / self.task_s / GB

    @property
    def range_gb_per_s(self) -> tuple[float, float]:
        """The slowest and the fastest loop."""
        rates = [loop.gb_per_s for loop in self.loops]
        return min(rates), max(rates)

    @property
    def spread(self) -> float:
        """Half the distance between them, as a part of the median: 0.05 stands for ± 5 %."""
        low, high = self.range_gb_per_s
        return (high - low) / 2 / self.gb_per_s

    @property
    def cpu_s_per_gb(self) -> float:
        """User and system time per 10**9 bytes, median."""
        return statistics.median(loop.cpu_s / (loop.nbytes / GB) for loop in self.loops)

    @property
    def disk_per_byte(self) -> float | None:
        """Bytes that the drives moved in this direction per byte asked for, median."""
        moved = [
            (loop.disk.read if self.op == "read" else loop.disk.written) / loop.nbytes
            for loop in self.loops
            if loop.disk is not None
        ]
        return statistics.median(moved) if moved else None

    @property
    def cached(self) -> float | None:
        """How much of the files lay in the page cache before a read, median."""
        parts = [loop.cached for loop in self.loops if loop.cached is not None]
        return statistics.median(parts) if parts else None


@dataclass(frozen=True)
class BenchResult:
    """The measurements, with their place and conditions.

    Attributes:
        workload: With the user's own directories.
        series: One per engine and direction.
        ops: In their order.
        resolved: The engine that "auto" stands for, and why.
        buffered: Engines whose transfers went through the page cache.
        fio_memory: The memory of fio's buffers, "" if fio did not run.
        missing: Engines that cannot be had here, and why.
        failed: Engines that began and did not do the work, and why.
    """

    workload: Workload
    series: Sequence[Series]
    ops: Sequence[Op]
    resolved: tuple[str, str]
    buffered: Sequence[str]
    fio_memory: str
    missing: Mapping[str, BackendUnavailableError] = field(default_factory=dict)
    failed: Mapping[str, Exception] = field(default_factory=dict)

    def of(self, op: Op) -> list[Series]:
        """The series of one direction, the reference last."""
        return [series for series in self.series if series.op == op]

    def ratio(self, series: Series) -> float | None:
        """Throughput relative to the first engine of its direction; None where memory did it."""
        first = self.of(series.op)[0]
        if self._was_cached(series) or self._was_cached(first):
            return None
        return series.gb_per_s / first.gb_per_s

    def _was_cached(self, series: Series) -> bool:
        """Whether the page cache may have done the work in the drive's place."""
        if series.op == "write":
            return series.engine in self.buffered and not self.workload.fsync
        return series.cached is not None and series.cached > CACHED

    def not_measured(self) -> list[str]:
        """The engines that were asked for and have no figures, with the reason, and the remedy."""
        lines = []
        for engine, missing in self.missing.items():
            remedy = f" ({missing.remedy})" if missing.remedy else ""
            lines.append(f"not measured: {engine}: {why_missing(missing)}{remedy}")
        lines += [f"failed: {engine}: {why}" for engine, why in self.failed.items()]
        return lines

    def conditions(self) -> list[str]:
        """The conditions that a reader needs to compare the figures with others."""
        workload = self.workload
        tasks = len(workload.places)
        lines = [
            f"{binary_size(workload.nbytes)} per task and loop, {counted(tasks, 'task')}, "
            f"{self._loops()} after "
            f"{workload.warmup_loops} to warm up; medians; {UNIT}",
            f"engine {self.resolved[0]} ({self.resolved[1]}), {self._options()}",
        ]
        direct = [label(s.engine) for s in self.of(self.ops[0])]
        direct = [name for name in direct if name not in map(label, self.buffered)]
        if direct:
            lines.append(f"direct: {', '.join(direct)}; without the page cache")
        if self.buffered:
            lines.append(self._through_the_cache())
        if "write" in self.ops:
            what = "new files" if workload.new_files else "blocks that were written before"
            torch = "" if workload.new_files else " (torch's engines: new files)"
            durable = "with" if workload.fsync else "without"
            lines.append(f"writes go to {what}{torch}, {durable} fsync within the timing")
        on_gpu = ", and copied to and from the GPU" if workload.gpu else ""
        lines.append(f"memory: {_MEMORY[workload.memory]}{on_gpu}")
        if self.fio_memory:
            lines.append(f"fio: one buffer per block in flight, on {self.fio_memory}")
        lines.append(
            "CPU: user and system time of the processes; disk: bytes that the drive moved in this "
            "direction, for anybody, per byte asked for (/proc/diskstats)"
        )
        return lines

    def _loops(self) -> str:
        counts = [len(series.loops) for series in self.series]
        fewest, most = min(counts), max(counts)
        if most < self.workload.loops or fewest < most:
            return f"interrupted after {fewest} to {most} of {counted(self.workload.loops, 'loop')}"
        return counted(self.workload.loops, "loop")

    def _options(self) -> str:
        o = self.workload.options
        words = [
            f"block size {binary_size(o.block_size)}",
            f"queue depth {o.queue_depth}",
            counted(o.intra_op_parallelism, "lane"),
        ]
        words += ["single submit"] if o.single_submit else []
        words += [] if o.overlap_events else ["sequential requests"]
        return ", ".join(words)

    def _through_the_cache(self) -> str:
        text = f"through the page cache: {', '.join(map(label, self.buffered))}"
        if "read" in self.ops:
            cached = {s.engine: s.cached for s in self.of("read") if s.cached is not None}
            told = ", ".join(f"{label(e)} {part:.0%}" for e, part in cached.items())
            text += f"; cached before a read: {told}" if told else ""
            if any(part > CACHED for part in cached.values()) and not self.workload.drop_caches:
                text += " (without --cached reads are cold)"
        if "write" in self.ops and not self.workload.fsync:
            text += "; their writes may never have reached the drive (they do without --cached)"
        return text


def label(engine: str) -> str:
    """An engine's name for people."""
    return _REFERENCE_LABEL if engine == REFERENCE else engine


_MEMORY = {
    "aligned": "aligned huge pages (nvmeio.empty_aligned), not page-locked",
    "pinned": "page-locked (new_cpu_locked_tensor)",
    "ordinary": "ordinary torch.empty tensors",
    "accelerator": "page-locked by torch (pin_memory)",
}


# For people


def render(result: BenchResult, console: Console) -> None:
    """Shows the result; in a pipe each engine keeps to one line."""
    several = any(len(result.of(op)) - 1 > 1 for op in result.ops)
    with trimmed(console, 200):
        for op in result.ops:
            console.print(_table(result, op, several, console.width))
            console.print()
        for line in result.conditions():
            console.print(Text(line, "dim"), soft_wrap=not console.is_terminal)


_COLUMNS = (
    Column("task ms", 8),
    Column("task GB/s", 7),
    Column("end-to-end ms", 6),
    Column("end-to-end GB/s", 1),
    Column("loops GB/s", 3),
    Column("CPU s/GB", 4),
    Column("disk", 5),
    Column("ratio", 2),
)


def _table(result: BenchResult, op: Op, several: bool, width: int) -> Table:
    rows = [
        Row(
            label(series.engine),
            _cells(result, series, several),
            "dim" if series.engine == REFERENCE else None,
        )
        for series in result.of(op)
    ]
    return fitted(op, _COLUMNS, rows, width)


def _cells(result: BenchResult, series: Series, several: bool) -> dict[str, str]:
    low, high = series.range_gb_per_s
    cells = {
        "task ms": f"{series.task_s * 1e3:.1f}",
        "task GB/s": f"{series.task_gb_per_s:.2f}",
        "end-to-end ms": f"{series.end_to_end_s * 1e3:.1f}",
        "end-to-end GB/s": f"{series.gb_per_s:.2f}",
        "loops GB/s": f"{low:.2f} - {high:.2f} (±{series.spread:.0%})",
        "CPU s/GB": f"{series.cpu_s_per_gb:.3f}",
        "disk": "-" if series.disk_per_byte is None else f"{series.disk_per_byte:.2f}",
    }
    ratio = result.ratio(series)
    return cells | ({"ratio": "cached" if ratio is None else f"{ratio:.2f}x"} if several else {})


# For programs


def as_json(result: BenchResult) -> dict[str, Any]:
    """The same as plain data; times in seconds, rates in GB/s of 10**9 bytes."""
    workload = result.workload
    versions = machine.versions()
    directories = dict.fromkeys(place.directory for place in workload.places)
    return {
        "unit": UNIT,
        "nvmeio": versions.pop("nvmeio"),
        "machine": {**versions, "directories": [_directory(path) for path in directories]},
        "engine": {"auto": result.resolved[0], "why": result.resolved[1]},
        "settings": {
            **workload.options._asdict(),
            "io_size": workload.nbytes,
            "loops": workload.loops,
            "warmup_loops": workload.warmup_loops,
            "memory": workload.memory,
            "gpu": workload.gpu,
            "fsync": workload.fsync,
            "drop_caches": workload.drop_caches,
            "validate": workload.validate,
            "different_file_each_iteration": workload.new_files,
            "tasks": [
                {"folder": str(place.directory), "device": place.device}
                for place in workload.places
            ],
        },
        "conditions": result.conditions(),
        "not_measured": result.not_measured(),
        "results": [_series(result, series) for series in result.series],
    }


def _series(result: BenchResult, series: Series) -> dict[str, Any]:
    low, high = series.range_gb_per_s
    return {
        "engine": series.engine,
        "op": series.op,
        "nbytes_per_loop": series.nbytes,
        "task": {
            "latency_s": series.task_s,
            "total_s": sum(loop.slowest_task_s for loop in series.loops),
            "gb_per_s": series.task_gb_per_s,
        },
        "end_to_end": {
            "latency_s": series.end_to_end_s,
            "total_s": sum(loop.end_to_end_s for loop in series.loops),
            "gb_per_s": series.gb_per_s,
            "gb_per_s_min": low,
            "gb_per_s_max": high,
            "spread": series.spread,
        },
        "cpu_s_per_gb": series.cpu_s_per_gb,
        "disk_bytes_per_byte": series.disk_per_byte,
        "cached_before": series.cached,
        "ratio": result.ratio(series),
        "warmup": [_loop(loop) for loop in series.warmup],
        "loops": [_loop(loop) for loop in series.loops],
    }


def _loop(loop: Loop) -> dict[str, Any]:
    return {
        "end_to_end_s": loop.end_to_end_s,
        "task_s": loop.task_s,
        "gb_per_s": loop.gb_per_s,
        "cpu_s": loop.cpu_s,
        "disk_bytes_read": loop.disk.read if loop.disk else None,
        "disk_bytes_written": loop.disk.written if loop.disk else None,
        "cached_before": loop.cached,
    }


def _directory(path: Path) -> dict[str, Any]:
    found = machine.look_at(path)
    device = found.device
    return {
        "path": found.path,
        "file_system": found.file_system,
        "mount_point": found.mount_point,
        "device": device.name if device else None,
        "model": device.model if device else None,
        "direct": found.direct.supported,
    }
