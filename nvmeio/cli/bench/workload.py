"""The workload that is measured, as plain data that goes to other processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nvmeio.cli.measure import Op
from nvmeio.engines.base import Options

MemoryKind = Literal["aligned", "pinned", "ordinary", "accelerator"]

REFERENCE_BYTES_MOST = 1 << 28
DEFAULTS = Options()


@dataclass(frozen=True)
class WorkPlace:
    """The place of one task: its directory, and its GPU if it has one."""

    directory: Path
    device: int = 0


@dataclass(frozen=True)
class Workload:
    """One transfer a loop and task, and everything about it.

    Attributes:
        places: One per task.
        nbytes: Bytes that each task moves in a loop.
        loops: Measured loops.
        warmup_loops: Loops before them, which do not count unless `include_warmup`.
        options: The handle's parameters, for the engines that have them.
        memory: "aligned" (`nvmeio.empty_aligned`), "pinned" (`new_cpu_locked_tensor`), "ordinary"
            (`torch.empty`) or "accelerator" (torch's own pinned memory).
        gpu: The tensor lies on the task's GPU.
        ready_bounce: With `gpu`, a page-locked tensor is kept for the way to and from the GPU;
            otherwise the engine is handed the CUDA tensor.
        gds: With `gpu`: nvmeio's engines take it through cuFile.
        fsync: A write is over once it is durable.
        drop_caches: The file leaves the page cache before each loop.
        validate: After each loop the bytes are compared, outside of the timing.
        new_files: Each loop has a file of its own.
        legacy_save: torch's old format, for the torch engines.
        staging_bytes: The buffer of the torch_fast engine.
    """

    places: tuple[WorkPlace, ...]
    nbytes: int
    loops: int = 3
    warmup_loops: int = 1
    options: Options = DEFAULTS
    memory: MemoryKind = "aligned"
    gpu: bool = False
    ready_bounce: bool = True
    gds: bool = False
    fsync: bool = False
    drop_caches: bool = False
    validate: bool = False
    new_files: bool = False
    legacy_save: bool = False
    staging_bytes: int = 64 << 20

    @property
    def total_loops(self) -> int:
        """Warm-up included."""
        return self.warmup_loops + self.loops

    def file(self, task: int, loop: int, suffix: str) -> Path:
        """The file of one task in one loop; the suffix tells whose it is."""
        part = f".{loop}" if self.new_files else ""
        return self.places[task].directory / f"task{task}{part}.{suffix}"


@dataclass(frozen=True)
class Lap:
    """One loop of one engine, for every task.

    Attributes:
        engine: Its name.
        op: Its operation.
        loop: Which one, from 0, warm-up included.
        nbytes: How much a task moves; the reference moves less than the others.
    """

    engine: str
    op: Op
    loop: int
    nbytes: int


@dataclass(frozen=True)
class Timing:
    """The times of one task's lap.

    Attributes:
        start_s: When its transfer began, on the clock that all processes of a machine share.
        end_s: When it was over.
        cpu_s: User and system time of the process meanwhile.
        cached: How much of the file lay in the page cache before a read, from 0 to 1; None where
            it does not matter or nobody can tell.
    """

    start_s: float
    end_s: float
    cpu_s: float
    cached: float | None = None

    @property
    def seconds(self) -> float:
        """How long the transfer took."""
        return self.end_s - self.start_s


def disk_needs(workload: Workload, ops: Sequence[Op], suffixes: Iterable[str]) -> dict[Path, int]:
    """Bytes that the files of all tasks take at most, by directory.

    Args:
        workload: With the directories of the user.
        ops: The operations to measure.
        suffixes: The suffixes of the engines' files; engines with the same one share them.
    """
    per_loop = workload.total_loops if workload.new_files and "read" in ops else 1
    files = per_loop + (1 if workload.new_files and "write" in ops else 0)
    needs: dict[Path, int] = {}
    for place in workload.places:
        for suffix in suffixes:
            nbytes = files * workload.nbytes
            if suffix == "ref":
                nbytes = min(workload.nbytes, REFERENCE_BYTES_MOST)
            needs[place.directory] = needs.get(place.directory, 0) + nbytes
    return needs
