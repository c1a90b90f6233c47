"""`nvmeio report`: what of direct I/O works here, what does not, and the command that fixes it.

`run` gathers facts, `_problems` judges them, `render` shows both to a person and `to_json` to a
program.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from nvmeio._memory.copy_on_write import HOW_TO_ALLOW
from nvmeio.cli._terminal import binary_size, trimmed
from nvmeio.cli.measure import machine
from nvmeio.cli.tune.space import in_words
from nvmeio.engines.base import Options
from nvmeio.tuned import Tuned

QUEUE_DEPTH = Options().queue_depth  # what io_setup takes from aio-max-nr, for every lane
COMFORTABLE_AIO_EVENTS = 8 * QUEUE_DEPTH
COMFORTABLE_MEMLOCK_BYTES = 1 << 30
RECOMMENDED_AIO_MAX_NR = 1 << 20  # what databases ask for; the events cost memory only once taken

Severity = Literal["error", "warning", "note"]
# Fine, or not, or neither; label, value, remark.
_Row = tuple[bool | None, str, str, str]


@dataclass(frozen=True)
class Report:
    """The facts and the problems in them."""

    facts: machine.Facts
    problems: list[Finding]

    @property
    def exit_status(self) -> int:
        """1 when direct I/O cannot be had, else 0."""
        return int(any(problem.severity == "error" for problem in self.problems))


def run(directories: Sequence[Path]) -> Report:
    """Gathers and judges.

    Args:
        directories: The directories to look at. A small file is made in each and removed.

    Raises:
        OSError: One of them is missing, no directory, or cannot be written in.
    """
    for directory in directories:
        machine.check_directory(directory)
    facts = machine.gather(directories)
    return Report(facts, list(find_problems(facts)))


# Showing


def to_json(report: Report) -> str:
    """The report as one JSON object, for programs: facts by subject, then problems."""
    return json.dumps({**_plain(report.facts), "problems": _plain(report.problems)}, indent=2)


def _plain(value: Any) -> Any:
    """Dataclasses and named tuples as dicts; `dataclasses.asdict` would leave the latter be."""
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def render(report: Report, console: Console) -> None:
    """Shows the report to a person, as wide as the console is."""
    facts, software = report.facts, report.facts.software
    versions: list[_Row] = [
        (None, "kernel", software.kernel, ""),
        (None, "python", software.python, ""),
        (None, "torch", software.torch, software.cuda_detail),
        (None, "uvloop", software.uvloop or "not installed", ""),
    ]
    with trimmed(console):
        console.print(Text(f"nvmeio {software.nvmeio}", style="bold"), _table(versions))
        console.print(_heading("this machine"), _table(_machine(facts)))
        gds = _gds(facts.cufile, software.cuda_available)
        console.print(_heading("GPUDirect Storage"), _table(gds))
        for directory in facts.directories:
            console.print(_heading(directory.path), _table(_directory(directory)))
        console.print(_problems(report.problems))


def _heading(title: str) -> RenderableType:
    return Text(f"\n{title}", style="bold")


def _table(rows: Iterable[_Row]) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=1)
    table.add_column(width=12)  # fixed, so that the values of all sections stand in one column
    table.add_column(overflow="fold")
    marks = {True: Text("✓", "green"), False: Text("✗", "bold red"), None: Text("")}
    for fine, label, value, remark in rows:
        shown = Text.assemble(value, (f"  {remark}" if remark else "", "dim"))
        table.add_row(marks[fine], Text(label, "dim"), shown)
    return table


def _problems(problems: Sequence[Finding]) -> RenderableType:
    if not problems:
        return Text("\nNo problems found.", style="bold green")
    marks = {
        "error": Text("✗", "bold red"),
        "warning": Text("!", "bold yellow"),
        "note": Text("i", "bold blue"),
    }
    table = Table.grid(padding=(0, 1))
    table.add_column(width=1)
    table.add_column(overflow="fold")
    for problem in problems:
        table.add_row(marks[problem.severity], Text(problem.what))
        table.add_row("", Text(problem.fix, "cyan"))
    return Group(
        _heading("what to fix" if any(p.severity != "note" for p in problems) else "worth knowing"),
        table,
    )


def _machine(facts: machine.Facts) -> Iterator[_Row]:
    engine, aio, memory = facts.engine, facts.aio, facts.memory
    if engine.auto is None:
        yield False, "engine", "none can be started", engine.reason
    else:
        others = (attempt for attempt in engine.attempts if attempt.name != engine.auto)
        remarks = (f"{a.name} works too" if a.ok else f"not {a.name}: {a.detail}" for a in others)
        yield True, "engine", engine.auto, ", ".join(remarks)
    if aio.library == "libaio":
        yield True, "libaio", aio.path or "found", ""
    elif aio.library == "syscalls":
        yield True, "libaio", "not found: the kernel's calls are made directly, as fast", ""
    else:
        yield False, "libaio", "cannot be loaded", aio.reason
    if aio.nr is None or aio.max_nr is None:
        yield True, "AIO events", "unknown", "/proc/sys/fs/aio-nr cannot be read"
    else:
        taken = f"{aio.nr} of {aio.max_nr} taken"
        yield aio_is_plentiful(aio), "AIO events", taken, "fs.aio-nr of fs.aio-max-nr"
    if memory.huge_pages is None:
        yield True, "huge pages", "unknown", "/sys/kernel/mm/transparent_hugepage cannot be read"
    else:
        yield memory.huge_pages != "never", "huge pages", memory.huge_pages, ""
    limit = "unlimited" if memory.memlock_bytes is None else binary_size(memory.memlock_bytes)
    if memory.memlock_exempt and memory.memlock_bytes is not None:
        yield None, "page-locking", "unlimited", f"by CAP_IPC_LOCK; the limit is {limit}"
    else:
        yield None, "page-locking", limit, ""
    if memory.protection == "any":
        yield None, "snapshots", "protect", "saves leave the state where it lies, write-protected"
    else:
        yield None, "snapshots", "copy", f"{memory.protection_reason}; {HOW_TO_ALLOW}"


_MODES = {
    "gds": "DMA between drive and GPU, through nvidia-fs",
    "p2p": "DMA between drive and GPU, through the kernel's P2PDMA",
    "compat": "no DMA to the GPU: cuFile goes through host memory",
    "host": "no GPU: cuFile moves host memory only",
}


def _gds(cufile: machine.CuFile, has_gpu: bool) -> Iterator[_Row]:
    if not has_gpu:  # nothing of it matters then; --json tells it anyway
        yield None, "no GPU", "cuFile is not needed", f"cuFile: {cufile.path or 'not found'}"
        return
    if cufile.path is None:
        yield None, "cuFile", "not found", cufile.reason
    else:
        version = f"version {cufile.version}" if cufile.version else ""
        remarks = ", ".join(filter(None, (version, cufile.source)))
        yield cufile.usable or None, "cuFile", cufile.path, remarks
        opens = cufile.driver == "opens"
        shown = "opens" if opens else "does not open"
        reason = "" if opens else cufile.driver or cufile.reason
        yield opens or None, "driver", shown if reason or opens else "not tried", reason
        yield None, "mode", cufile.mode or "none", _MODES.get(cufile.mode or "", "")
    yield None, "nvidia-fs", cufile.nvidia_fs or "not loaded", ""
    p2pdma = {True: "in the kernel", False: "not in the kernel", None: "unknown"}[cufile.p2pdma]
    yield None, "P2PDMA", p2pdma, ""
    yield None, "udev", "there" if cufile.udev else "missing", "/run/udev/data"
    yield None, "modules", "there" if cufile.modules else "missing", "/proc/modules"
    yield None, "cufile.json", cufile.json or "none", "" if cufile.json else "cuFile's defaults"


def _directory(directory: machine.Directory) -> Iterator[_Row]:
    direct, device, stored = directory.direct, directory.device, directory.tuned
    if direct.supported:
        offsets, memory = map(binary_size, (direct.offset_alignment, direct.memory_alignment))
        yield True, "direct I/O", "works", f"aligned to {offsets} in the file, {memory} in memory"
    else:
        yield False, "direct I/O", "no", direct.reason
    if directory.file_system is None:
        yield None, "file system", "unknown", ""
    else:
        where = f"{directory.source} on {directory.mount_point}"
        yield None, "file system", directory.file_system, where
    if device is None:
        yield None, "device", "none", "not a local disk, or hidden"
    else:
        remarks = [device.model]
        if device.logical_block_size is not None:
            remarks.append(f"{device.logical_block_size} B blocks")
        if device.rotational:
            remarks.append("reported as rotational")
        yield None, "device", device.name, ", ".join(filter(None, remarks))
    free, total = map(binary_size, (directory.free_bytes, directory.total_bytes))
    yield None, "free", f"{free} of {total}", ""
    if stored is not None:
        yield None, "tuned", in_words(stored.aio), _measured(stored)
    elif directory.tuned_problem:
        yield None, "tuned", "unknown", "the file of settings cannot be read"
    else:
        yield None, "tuned", "not yet", f"nvmeio tune --save {directory.path}"


def _measured(stored: Tuned) -> str:
    rates = [
        f"{op} {rate:.2f}"
        for op, rate in (("read", stored.read_gb_per_s), ("write", stored.write_gb_per_s))
        if rate is not None
    ]
    when = stored.tuned_at.partition("T")[0]
    if not rates:
        return when
    return f"{', '.join(rates)} GB/s" + (f" on {when}" if when else "")


@dataclass(frozen=True)
class Finding:
    """Something that does not work, or works less well than it could.

    Attributes:
        severity: "error" where direct I/O cannot be had (exit status 1), "warning" where it is
            slower or about to fail, "note" where it matters to some uses only.
        what: The problem.
        fix: The command that fixes it; further advice is a shell comment.
    """

    severity: Severity
    what: str
    fix: str


def find_problems(facts: machine.Facts) -> Iterator[Finding]:
    """Everything that is wrong, the gravest first."""
    found = [
        *(problem for directory in facts.directories for problem in _of_directory(directory)),
        *_of_torch(facts.software),
        *_of_engine(facts.engine, facts.aio),
        *_of_memory(facts.memory),
        *_of_cufile(facts.cufile, facts.software.cuda_available, facts.software.torch_cuda),
    ]
    return iter(sorted(found, key=lambda problem: get_args(Severity).index(problem.severity)))


def _of_directory(directory: machine.Directory) -> Iterator[Finding]:
    if not directory.direct.supported:
        reason = f": {directory.direct.reason}" if directory.direct.reason else ""
        yield Finding(
            "error",
            f"no direct I/O in {directory.path}{reason}; transfers there go through the page cache",
            "df -h -t ext4 -t xfs -t btrfs  # then choose a directory on one of these",
        )
    if directory.tuned_problem:
        yield Finding(
            "warning",
            directory.tuned_problem,
            f"nvmeio tune --save {directory.path}  # once that file is deleted",
        )


def _of_torch(software: machine.Software) -> Iterator[Finding]:
    if software.torch_lacks:
        lacks = "; ".join(software.torch_lacks)
        yield Finding(
            "warning",
            f"torch {software.torch} lacks names that nvmeio uses: {lacks}",
            "pip install 'torch>=2.6,<2.14'  # the releases that nvmeio was tested with",
        )


def _of_engine(engine: machine.EngineChoice, aio: machine.Aio) -> Iterator[Finding]:
    if engine.auto is None:
        remedy = "unset NVMEIO_LIBAIO" if aio.library is None else engine.remedy
        yield Finding("error", f"no handle can be opened: {engine.reason}", remedy)
        return
    for attempt in engine.attempts:
        if attempt.name == "libaio" and not attempt.ok:
            yield Finding(
                "warning",
                f"Linux AIO cannot be used ({attempt.detail}); the {engine.auto} engine stands in",
                "docker run --security-opt seccomp=unconfined ...  # or allow io_setup in it",
            )
    if aio.max_nr is not None and not aio_is_plentiful(aio):
        yield Finding(
            "warning",
            f"{aio.nr} of {aio.max_nr} AIO events (fs.aio-max-nr) are taken on this machine; "
            f"a handle takes its queue depth, {QUEUE_DEPTH} by default, for every lane",
            f"sudo sysctl -w fs.aio-max-nr={max(RECOMMENDED_AIO_MAX_NR, 2 * aio.max_nr)}",
        )


def aio_is_plentiful(aio: machine.Aio) -> bool:
    """Whether several handles can still be opened, or nobody can tell."""
    if aio.nr is None or aio.max_nr is None:
        return True
    return aio.max_nr - aio.nr >= COMFORTABLE_AIO_EVENTS


def _of_memory(memory: machine.MemoryLimits) -> Iterator[Finding]:
    if memory.huge_pages == "never":
        yield Finding(
            "warning",
            "transparent huge pages are off: transfers reach about two thirds of their speed",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        )
    limit, hard = memory.memlock_bytes, memory.memlock_hard_bytes
    if memory.memlock_exempt or limit is None or limit >= COMFORTABLE_MEMLOCK_BYTES:
        return
    raisable = hard is None or hard > limit
    yield Finding(
        "note",
        f"at most {binary_size(limit)} can be page-locked; only new_cpu_locked_tensor and "
        "empty_pinned need more, transfers are as fast without",
        f"ulimit -l {'unlimited' if hard is None else hard // 1024}"
        if raisable
        else 'echo "$USER - memlock unlimited" | sudo tee /etc/security/limits.d/nvmeio.conf'
        "  # then log in again",
    )


_LOG = "less ~/.local/state/nvmeio/cufile.log  # what cuFile says itself"


def _of_cufile(
    cufile: machine.CuFile, cuda_available: bool, torch_cuda: str | None
) -> Iterator[Finding]:
    if cufile.usable:
        for directory, reason in cufile.refused.items() if cuda_available else ():
            yield Finding("warning", f"cuFile refuses files in {directory}: {reason}", _LOG)
        return
    if cufile.source == "NVMEIO_CUFILE" and cufile.path is None:
        yield Finding("warning", cufile.reason, "unset NVMEIO_CUFILE")
    elif cufile.path is not None and cuda_available:
        yield Finding(
            "warning",
            f"cuFile is installed and cannot be used: {cufile.reason}",
            "run outside the sandbox: docker run --runtime=runc ..."
            if not cufile.modules
            else _LOG,
        )
    elif cuda_available:
        package = "nvidia-cufile-cu12" if (torch_cuda or "").startswith("12.") else "nvidia-cufile"
        yield Finding(
            "note",
            "there is a CUDA device and no cuFile: CUDA tensors will go through host memory",
            f"pip install {package}",
        )
