"""Tasks, here or in processes of their own.

One task runs here; several run in a process each, and so does DeepSpeed, which ends its process
when something goes wrong. Each loop has three steps that nobody begins before everybody has ended
the one before: prepare, transfer, check. The transfers begin at the same moment, and each process
times its own: the clock (CLOCK_MONOTONIC) is the machine's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import nvmeio
from nvmeio.cli._bench.task import Task
from nvmeio.cli._bench.workload import Op, Timing, Turn, Workload
from nvmeio.cli._exits import Failed, Refused
from nvmeio.errors import BackendUnavailableError

_PATIENCE_S = 0.2
# Long enough for every process to be awake, so that all begin at once.
_HEAD_START_S = 0.005
_SPIN_S = 0.001


class Pool(Protocol):
    """All tasks of a workload."""

    def open(self, engine: str) -> bool:
        """Sets an engine up in every task; whether it goes through the page cache in one."""

    def make_files(self, suffix: str, op: Op) -> None:
        """Has every task write the files of this suffix that are to be read or overwritten."""

    def run(self, turn: Turn) -> list[Timing]:
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

    def run(self, turn: Turn) -> list[Timing]:
        """One loop."""
        timing = self._task.run(turn, self._task.before(turn))
        self._task.after(turn)
        return [timing]


class ProcessPool:
    """A process for each task.

    Raises:
        Failed: A process did not come up.
    """

    def __init__(self, workload: Workload) -> None:
        self._workers: list[_Worker] = []
        try:
            for index in range(len(workload.places)):
                self._workers.append(_Worker(workload, index))
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

    def run(self, turn: Turn) -> list[Timing]:
        """One loop, started together."""
        cached = self._all("before", turn)
        at = time.perf_counter() + _HEAD_START_S
        for worker, part in zip(self._workers, cached, strict=True):
            worker.send("run_at", at, turn, part)
        timings: list[Timing] = self._collect()
        self._all("after", turn)
        return timings

    def close(self) -> None:
        """Ends the processes, in the middle of a transfer too."""
        for worker in self._workers:
            worker.pipe.close()  # one that waits for work ends at that
        for worker in self._workers:
            worker.end()

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        for worker in self._workers:
            worker.send(method, *arguments)
        return self._collect()

    def _collect(self) -> list[Any]:
        """An answer from each; then the first failure is raised."""
        answers = [worker.answer() for worker in self._workers]
        return [_opened(kind, value) for kind, value in answers]


class _Worker:
    """The near end: a process of its own session, so that Ctrl-C comes to us alone."""

    def __init__(self, workload: Workload, index: int) -> None:
        self._name = f"the process of task {index}"
        self.pipe, far = Pipe()
        # Where this very package lies, installed or not.
        root = str(Path(nvmeio.__file__).parent.parent)
        script = (
            f"import sys; sys.path.insert(0, {root!r}); "
            f"from nvmeio.cli._bench import pools; pools.serve({far.fileno()})"
        )
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", script],
                pass_fds=[far.fileno()],
                stdin=subprocess.DEVNULL,
                # Results are the parent's to print, and DeepSpeed prints too.
                stdout=sys.__stderr__ and sys.__stderr__.fileno(),
                start_new_session=True,
            )
        except BaseException:
            self.pipe.close()
            raise
        finally:
            far.close()
        self.send("start", workload, index)

    def send(self, method: str, *arguments: Any) -> None:
        with suppress(OSError):  # it ended: `answer` tells how
            self.pipe.send((method, arguments))

    def answer(self) -> tuple[str, Any]:
        try:
            kind, value = self.pipe.recv()
        except (EOFError, OSError):
            code = self.process.wait()
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"
            return "failed", f"{self._name} ended with {how}"
        return kind, value

    def end(self) -> None:
        try:
            self.process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _opened(kind: str, value: Any) -> Any:
    if kind == "value":
        return value
    if kind == "unavailable":
        message, attempts, remedy = value
        raise BackendUnavailableError(message, attempts=attempts, remedy=remedy)
    raise (Refused if kind == "refused" else Failed)(value)


# The far end


def serve(descriptor: int) -> None:
    """Answers what comes through a pipe until it is closed."""
    pipe = Connection(descriptor)
    task: Task | None = None
    while True:
        try:
            method, arguments = pipe.recv()
        except (EOFError, OSError):
            break
        try:
            if method == "start":
                task = Task(*arguments)
                answer: tuple[str, Any] = ("value", None)
            else:
                answer = ("value", _do(task, method, arguments))
        except BackendUnavailableError as missing:
            first = str(missing).splitlines()[0]
            answer = ("unavailable", (first, missing.attempts, missing.remedy))
        except Refused as refused:
            answer = ("refused", str(refused))
        except Exception as failed:
            known = isinstance(failed, (Failed, OSError))
            answer = ("failed", str(failed) if known else f"{type(failed).__name__}: {failed}")
        pipe.send(answer)
    # Not by way of the interpreter's end: DeepSpeed's threads do not survive it in order.
    os._exit(0)


def _do(task: Task | None, method: str, arguments: Sequence[Any]) -> Any:
    if task is None:
        raise Failed("the task did not come up")
    if method == "run_at":
        at, turn, cached = arguments
        time.sleep(max(0.0, at - time.perf_counter() - _SPIN_S))
        while time.perf_counter() < at:
            pass
        return task.run(turn, cached)
    return getattr(task, method)(*arguments)
