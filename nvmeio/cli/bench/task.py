"""One task: the files, the buffer and the clock of one process's part of the work."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

import nvmeio
from nvmeio.cli._terminal import Failed
from nvmeio.cli.bench import engines
from nvmeio.cli.bench.engines import REFERENCE, BenchEngine, DeepSpeed
from nvmeio.cli.bench.workload import REFERENCE_BYTES_MOST, Lap, Timing, Workload
from nvmeio.cli.measure import Op
from nvmeio.cli.measure.disk import (
    cached_fraction,
    cpu_seconds,
    differs_at,
    drop_from_cache,
    fill,
    write_file,
)
from nvmeio.cli.measure.worker import Worker, opened

_SPIN_S = 0.001  # what sleeping may be late by


class Task:
    """One task of a workload.

    Args:
        workload: With the scratch directories as its places.
        index: Which of its places is this task's.
    """

    def __init__(self, workload: Workload, index: int) -> None:
        self._workload = workload
        self._index = index
        self._device = f"cuda:{workload.places[index].device}" if workload.gpu else "cpu"
        self._engines: dict[str, BenchEngine] = {}
        self._own: dict[str, torch.Tensor] = {}
        # The tensor that engines move, and (on a GPU) the user's: the same one without a GPU.
        self._tensor = _allocate(workload)
        fill(self._tensor, index)
        self._on_device = self._tensor
        if workload.gpu:
            self._on_device = self._tensor.to(self._device)
            if not workload.ready_bounce:
                self._tensor = self._on_device
        self._loaded = self._tensor

    # --- preparing ----------------------------------------------------------------------------

    def open(self, name: str) -> bool:
        """Sets an engine up, with memory of its own where it wants that.

        Returns:
            Whether its transfers go through the page cache.
        """
        engine = engines.make(name, self._workload, self._index)
        self._engines[name] = engine
        if isinstance(engine, DeepSpeed) and self._workload.memory in ("aligned", "pinned"):
            self._own[name] = engine.memory(self._workload.nbytes)
            fill(self._own[name], self._index)
        return engine.buffered

    def make_files(self, suffix: str, op: Op) -> None:
        """Writes the files of this suffix that are to be read or overwritten, once.

        Args:
            suffix: "bin" for plain bytes, "pt" for torch's files, "ref" for the reference.
            op: The operation they are for: a write with `new_files` finds none.
        """
        workload = self._workload
        if op == "write" and (suffix == "pt" or (workload.new_files and suffix != "ref")):
            return  # each loop writes a file that was not there
        loops = workload.total_loops if workload.new_files and suffix != "ref" else 1
        host = self._on_device.cpu()
        for loop in range(loops):
            path = workload.file(self._index, loop, suffix)
            if path.exists():
                continue
            if suffix == "pt":
                torch.save(host, path, _use_new_zipfile_serialization=not workload.legacy_save)
                drop_from_cache(path)
            else:
                write_file(path, host[:REFERENCE_BYTES_MOST] if suffix == "ref" else host)

    def _file(self, engine: BenchEngine, loop: int) -> Path:
        loop = 0 if engine.suffix == "ref" else loop
        return self._workload.file(self._index, loop, engine.suffix)

    # --- one lap ------------------------------------------------------------------------------

    def before(self, lap: Lap) -> float | None:
        """Prepare a lap, untimed; returns the cached share of the file for buffered reads."""
        engine, workload = self._engines[lap.engine], self._workload
        path = self._file(engine, lap.loop)
        if lap.op == "write":
            if engine.suffix == "pt":
                path.unlink(missing_ok=True)  # or cutting the old one short would be timed
            if workload.validate:
                self._set(lap, self._seed(lap))
            return None
        if workload.validate:
            self._set(lap, self._seed(lap) + 1)
        if workload.drop_caches:
            drop_from_cache(path)
        return cached_fraction(path) if engine.buffered else None

    def run(self, lap: Lap, cached: float | None) -> Timing:
        """The transfer itself, timed."""
        engine, workload = self._engines[lap.engine], self._workload
        path = self._file(engine, lap.loop)
        tensor = self._own.get(lap.engine, self._tensor)[: lap.nbytes]
        there = self._on_device[: lap.nbytes] if workload.gpu else tensor
        through_host = there.device != tensor.device
        cpu = cpu_seconds()
        start = time.perf_counter()
        if lap.op == "read":
            self._loaded = engine.read(tensor, path)
            if through_host:
                there.copy_(tensor)
        else:
            if through_host:
                tensor.copy_(there)
            engine.write(tensor, path)
            if workload.fsync:
                engine.sync(path)
        if workload.gpu:
            torch.cuda.synchronize()
        end = time.perf_counter()
        return Timing(start, end, cpu_seconds() - cpu, cached)

    def run_at(self, at: float, lap: Lap, cached: float | None) -> Timing:
        """The same, begun at a moment on the clock that all processes share."""
        time.sleep(max(0.0, at - time.perf_counter() - _SPIN_S))
        while time.perf_counter() < at:
            pass
        return self.run(lap, cached)

    def after(self, lap: Lap) -> None:
        """Compares, and removes what only this loop needed.

        Raises:
            Failed: The bytes are not what they should be.
        """
        engine, workload = self._engines[lap.engine], self._workload
        path = self._file(engine, lap.loop)
        if workload.validate and lap.engine != REFERENCE:
            found = self._loaded if lap.op == "read" else self._read_back(engine, path)
            self._compare(lap, found.cpu()[: lap.nbytes], path)
        if lap.op == "write" and workload.new_files and lap.engine != REFERENCE:
            path.unlink()
        if self._loaded is not self._tensor:
            self._loaded = self._tensor  # torch.load's tensor goes

    def _compare(self, lap: Lap, found: torch.Tensor, path: Path) -> None:
        at = differs_at(found, self._seed(lap)) if found.numel() == lap.nbytes else found.numel()
        if at is not None:
            raise Failed(
                f"{lap.engine} {lap.op}s other bytes than it should: the first difference is at "
                f"byte {at} of {path.name} (task {self._index}, loop {lap.loop})"
            )

    def _read_back(self, engine: BenchEngine, path: Path) -> torch.Tensor:
        engine.sync(path)
        drop_from_cache(path)
        if engine.suffix == "pt":
            loaded: torch.Tensor = torch.load(path, weights_only=True, map_location="cpu")
            return loaded
        back = torch.empty(self._workload.nbytes, dtype=torch.uint8)
        return engines.make("python", self._workload, self._index).read(back, path)

    def _seed(self, lap: Lap) -> int:
        """Reads find what `make_files` wrote; each write has contents of its own."""
        return self._index + (1000 + lap.loop if lap.op == "write" else 0)

    def _set(self, lap: Lap, seed: int) -> None:
        tensor = self._own.get(lap.engine, self._tensor)
        if tensor.device.type == "cpu":
            fill(tensor, seed)
            if self._workload.gpu:
                self._on_device.copy_(tensor)
        else:
            host = torch.empty(self._workload.nbytes, dtype=torch.uint8)
            fill(host, seed)
            tensor.copy_(host)

    def close(self) -> None:
        """Closes the engines."""
        for engine in self._engines.values():
            engine.close()


def _allocate(workload: Workload) -> torch.Tensor:
    nbytes = workload.nbytes
    if workload.memory == "ordinary":
        return torch.empty(nbytes, dtype=torch.uint8)
    if workload.memory == "accelerator":
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    if workload.memory == "pinned" or workload.gpu:
        return nvmeio.empty_pinned(nbytes, dtype=torch.uint8)
    return nvmeio.empty_aligned(nbytes, dtype=torch.uint8)


_PATIENCE_S = 0.2
# Long enough for every process to be awake, so that all begin at once.
_HEAD_START_S = 0.005
_TASK = f"{Task.__module__}:{Task.__name__}"


class LocalPool:
    """One task, in this process; as all pools, it has what `ProcessPool` has."""

    def __init__(self, workload: Workload) -> None:
        self._task = Task(workload, 0)
        self.open = self._task.open
        self.make_files = self._task.make_files
        self.close = self._task.close

    def run(self, lap: Lap) -> list[Timing]:
        """One loop."""
        timing = self._task.run(lap, self._task.before(lap))
        self._task.after(lap)
        return [timing]


class ProcessPool:
    """A process for each task.

    Raises:
        Failed: A process did not come up.
    """

    def __init__(self, workload: Workload) -> None:
        self._workers: list[Worker] = []
        try:
            for index in range(len(workload.places)):
                name = f"the process of task {index}"
                self._workers.append(Worker(_TASK, workload, index, name=name))
            self._collect()
        except BaseException:
            self.close()
            raise

    def open(self, engine: str) -> bool:
        """Sets an engine up in every task; whether it goes through the page cache in one."""
        return any(self._all("open", engine))

    def make_files(self, suffix: str, op: Op) -> None:
        """Has every task write its files, all at once."""
        self._all("make_files", suffix, op)

    def run(self, lap: Lap) -> list[Timing]:
        """One loop, started together; its timings in the order of the tasks."""
        cached = self._all("before", lap)
        at = time.perf_counter() + _HEAD_START_S
        for worker, part in zip(self._workers, cached, strict=True):
            worker.send("run_at", at, lap, part)
        timings: list[Timing] = self._collect()
        self._all("after", lap)
        return timings

    def close(self) -> None:
        """Ends the processes, in the middle of a transfer too."""
        for worker in self._workers:
            worker.hang_up()
        for worker in self._workers:
            worker.close(_PATIENCE_S)

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        for worker in self._workers:
            worker.send(method, *arguments)
        return self._collect()

    def _collect(self) -> list[Any]:
        """An answer from each; then the first failure is raised."""
        return [opened(answer) for answer in [worker.answer() for worker in self._workers]]
