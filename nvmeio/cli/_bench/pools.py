"""Tasks, here or in processes of their own.

One task runs here; several run in a process each, and so does DeepSpeed, which ends its process
when something goes wrong. Each loop has three steps that nobody begins before everybody has ended
the one before: prepare, transfer, check. The transfers begin at the same moment, and each process
times its own: the clock (CLOCK_MONOTONIC) is the machine's.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

from nvmeio.cli._bench.task import Task
from nvmeio.cli._bench.workload import Lap, Op, Timing, Workload
from nvmeio.cli.measure.worker import Worker, opened

_PATIENCE_S = 0.2
# Long enough for every process to be awake, so that all begin at once.
_HEAD_START_S = 0.005
_TASK = f"{Task.__module__}:{Task.__name__}"


class Pool(Protocol):
    """All tasks of a workload."""

    def open(self, engine: str) -> bool:
        """Sets an engine up in every task; whether it goes through the page cache in one."""

    def make_files(self, suffix: str, op: Op) -> None:
        """Has every task write the files of this suffix that are to be read or overwritten."""

    def run(self, lap: Lap) -> list[Timing]:
        """One loop of every task, started together; their timings in the order of the tasks."""

    def close(self) -> None:
        """Closes the engines and ends the processes."""


class LocalPool:
    """One task, in this process."""

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
        """One loop, started together."""
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
        answers = [worker.answer() for worker in self._workers]
        return [opened(answer) for answer in answers]
