"""Tasks, here or in processes of their own.

One task runs here; several run in a process each, and so does DeepSpeed, which ends its process
when something goes wrong. Processes start each loop together, at a barrier, and time it themselves:
their clock (CLOCK_MONOTONIC) is the machine's.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Protocol

from nvmeio.cli._bench.task import Task
from nvmeio.cli._bench.workload import Op, Timing, Turn, Workload
from nvmeio.cli._exits import Failed, Refused
from nvmeio.errors import BackendUnavailableError

_PATIENCE_S = 0.2


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
        # Not fork: CUDA does not survive it, and neither do threads of libraries.
        context = multiprocessing.get_context("spawn")
        barrier = context.Barrier(len(workload.places))
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        try:
            for index in range(len(workload.places)):
                near, far = context.Pipe()
                process = context.Process(
                    target=_serve,
                    args=(far, barrier, workload, index),
                    name=f"nvmeio-bench-{index}",
                    daemon=True,
                )
                process.start()
                far.close()
                self._pipes.append(near)
                self._processes.append(process)
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
        timings: list[Timing] = self._all("turn", turn)
        return timings

    def close(self) -> None:
        """Ends the processes, in the middle of a transfer too."""
        for pipe in self._pipes:
            pipe.close()  # a process that waits for work ends at that
        for process in self._processes:
            process.join(_PATIENCE_S)
            if process.is_alive():
                process.kill()
                process.join()

    def _all(self, method: str, *arguments: Any) -> Any:
        for pipe in self._pipes:
            with suppress(OSError):  # it ended: its obituary is what `_collect` raises
                pipe.send((method, arguments))
        return self._collect()

    def _collect(self) -> list[Any]:
        """An answer from each; the first failure ends the others' wait at the barrier."""
        values: list[Any] = []
        failure: Exception | None = None
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            try:
                while not pipe.poll(_PATIENCE_S):
                    self._check_alive()
                values.append(_opened(pipe.recv()))
            except (EOFError, ConnectionError):
                process.join()
                failure = failure or _ended(process)
            except (Failed, Refused, BackendUnavailableError) as failed:
                if failure is None or isinstance(failure, _BarrierBroken):
                    failure = failed
        if failure is not None:
            raise failure
        return values

    def _check_alive(self) -> None:
        """Nobody comes to a barrier for a process that is gone."""
        for process in self._processes:
            if not process.is_alive():
                raise _ended(process)


def _ended(process: Any) -> Failed:
    code = process.exitcode
    how = f"signal {signal.Signals(-code).name}" if code and code < 0 else f"status {code}"
    return Failed(f"the process {process.name} ended with {how}")


class _BarrierBroken(Failed):
    """Another task failed, and this one waited for it."""


def _opened(answer: tuple[str, Any]) -> Any:
    kind, value = answer
    if kind == "value":
        return value
    if kind == "unavailable":
        message, attempts, remedy = value
        raise BackendUnavailableError(message, attempts=attempts, remedy=remedy)
    raise {"refused": Refused, "broken": _BarrierBroken}.get(kind, Failed)(value)


# The other end


def _serve(pipe: Connection, barrier: Any, workload: Workload, index: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(2, 1)  # results are the parent's; DeepSpeed prints
    task: Task | None = None
    request: tuple[str, Sequence[Any]] = ("start", ())
    while True:
        try:
            if task is None:
                task = Task(workload, index)
            pipe.send(("value", _answer(task, barrier, *request)))
        except threading.BrokenBarrierError:
            pipe.send(("broken", "another task failed"))
        except BackendUnavailableError as missing:
            first = str(missing).splitlines()[0]
            pipe.send(("unavailable", (first, missing.attempts, missing.remedy)))
        except Refused as refused:
            pipe.send(("refused", str(refused)))
        except Exception as failed:
            barrier.abort()
            known = isinstance(failed, (Failed, OSError))
            pipe.send(("failed", str(failed) if known else f"{type(failed).__name__}: {failed}"))
        try:
            request = pipe.recv()
        except (EOFError, OSError):
            break
    # Not by way of the interpreter's end: DeepSpeed's threads do not survive it in order.
    os._exit(0)


def _answer(task: Task, barrier: Any, method: str, arguments: Sequence[Any]) -> Any:
    if method == "open":
        return task.open(*arguments)
    if method == "make_files":
        return task.make_files(*arguments)
    if method == "turn":
        (turn,) = arguments
        cached = task.before(turn)
        barrier.wait()
        timing = task.run(turn, cached)
        barrier.wait()  # nobody compares or deletes beside a transfer that is being timed
        task.after(turn)
        return timing
    return None
