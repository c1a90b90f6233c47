"""What is wrong with the facts of `nvmeio report`, and the command that fixes each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from nvmeio.cli._quantities import binary_size
from nvmeio.cli.measure.machine import Aio, CuFile, Directory, EngineChoice, Facts, MemoryLimits
from nvmeio.engines.base import Options

QUEUE_DEPTH = Options().queue_depth  # what io_setup takes from aio-max-nr, for every lane
COMFORTABLE_AIO_EVENTS = 8 * QUEUE_DEPTH
COMFORTABLE_MEMLOCK_BYTES = 1 << 30
RECOMMENDED_AIO_MAX_NR = 1 << 20  # what databases ask for; the events cost memory only once taken

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """Something that does not work, or works less well than it could.

    Attributes:
        severity: "error" where direct I/O cannot be had (exit status 1), "warning" where it is
            slower or about to fail, "note" where it matters to some uses only.
        what: What is wrong.
        fix: The command that fixes it; advice beside it stands in a shell comment.
    """

    severity: Severity
    what: str
    fix: str


def find_problems(facts: Facts) -> Iterator[Finding]:
    """Everything that is wrong, the gravest first."""
    found = [
        *(problem for directory in facts.directories for problem in _of_directory(directory)),
        *_of_engine(facts.engine, facts.aio),
        *_of_memory(facts.memory),
        *_of_cufile(facts.cufile, facts.software.cuda_available, facts.software.torch_cuda),
    ]
    order: tuple[Severity, ...] = ("error", "warning", "note")
    return iter(sorted(found, key=lambda problem: order.index(problem.severity)))


def _of_directory(directory: Directory) -> Iterator[Finding]:
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


def _of_engine(engine: EngineChoice, aio: Aio) -> Iterator[Finding]:
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


def aio_is_plentiful(aio: Aio) -> bool:
    """Whether several handles can still be opened, or nobody can tell."""
    if aio.nr is None or aio.max_nr is None:
        return True
    return aio.max_nr - aio.nr >= COMFORTABLE_AIO_EVENTS


def _of_memory(memory: MemoryLimits) -> Iterator[Finding]:
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


def _of_cufile(cufile: CuFile, cuda_available: bool, torch_cuda: str | None) -> Iterator[Finding]:
    if cufile.usable:
        if cuda_available and not cufile.udev:
            yield Finding(
                "warning",
                "udev's database (/run/udev/data) is missing: cuFile refuses files on disks",
                "docker run -v /run/udev:/run/udev:ro ...  # in a container",
            )
        return
    if cufile.source == "NVMEIO_CUFILE" and cufile.path is None:
        yield Finding("warning", cufile.reason, "unset NVMEIO_CUFILE")
    elif cufile.path is not None and cuda_available:
        yield Finding(
            "warning",
            f"cuFile is installed and cannot be used: {cufile.reason}",
            "run outside the sandbox: docker run --runtime=runc ..."
            if not cufile.modules
            else "less ~/.local/state/nvmeio/cufile.log  # what cuFile says itself",
        )
    elif cuda_available:
        package = "nvidia-cufile-cu12" if (torch_cuda or "").startswith("12.") else "nvidia-cufile"
        yield Finding(
            "note",
            "there is a CUDA device and no cuFile: CUDA tensors will go through host memory",
            f"pip install {package}",
        )
