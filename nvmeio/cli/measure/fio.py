"""fio, the field's measure: one process a run, timed by its own clock."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nvmeio._memory.system import proc_bytes
from nvmeio._threads.closing import on_error
from nvmeio.cli._terminal import Failed
from nvmeio.errors import BackendUnavailableError

INSTALL = "apt-get install fio"

JobReport = dict[str, Any]
Written = Callable[[], int]


class Figures(NamedTuple):
    """What fio says of its jobs together.

    Attributes:
        seconds: From first submission to last completion, of the slowest job: the start of fio's
            process is not in it, nor are opening files and touching buffers; an end_fsync is.
        cpu_s: User and system time of all jobs.
        nbytes: What they moved.
        operations: In how many requests.
    """

    seconds: float
    cpu_s: float
    nbytes: int
    operations: int


def require() -> str:
    """Fio's program.

    Raises:
        BackendUnavailableError: It is not installed.
    """
    program = shutil.which("fio")
    if program is None:
        raise BackendUnavailableError(
            "the engine fio cannot be had", attempts=[("fio", "not on PATH")], remedy=INSTALL
        )
    return program


def run(
    paths: Sequence[Path], options: Sequence[str], timeout_s: float | None = None
) -> list[JobReport]:
    """Runs fio with a job for each file, all at once; its report of each.

    Raises:
        Failed: It did not do the work; with its own words.
    """
    process = _start(paths, options)
    with on_error(_kill, process):
        output, errors = process.communicate(timeout=timeout_s)
    if process.returncode:
        raise _failed(process, output, errors)
    jobs: list[JobReport] = json.loads(output[output.index("{") :])["jobs"]
    return jobs


@contextlib.contextmanager
def beside(path: Path, options: Sequence[str], timeout_s: float = 60.0) -> Iterator[Written]:
    """Fio at work on a file while the body runs; it is there with all its bytes.

    Yields:
        Tells what it has written so far: some, already.

    Raises:
        Failed: It did not begin, or came to an end before the body did; with its own words.
    """
    process = _start([path], ["--thread", *options])  # the bytes are that process's own

    def written() -> int:
        if process.poll() is not None:
            raise _failed(process, *process.communicate())
        return written_by(process.pid)

    try:
        until = time.monotonic() + timeout_s
        while not written():
            if time.monotonic() > until:
                raise Failed(f"fio: nothing was written in {timeout_s:g} s")
            time.sleep(0.01)
        yield written
        written()
    finally:
        _kill(process)


def written_by(pid: int) -> int:
    """Bytes that a process has sent to drives; 0 of one that has ended."""
    # A count, without the unit that `proc_bytes` takes it for.
    return (proc_bytes(f"/proc/{pid}/io", "write_bytes") or 0) >> 10


def _start(paths: Sequence[Path], options: Sequence[str]) -> subprocess.Popen[str]:
    # It runs in the files' directory, for it leaves state files where it runs: names are absolute.
    files = [Path(os.path.abspath(path)) for path in paths]
    command = [require(), "--output-format=json", "--direct=1", "--fsync_on_close=0", *options]
    for index, file in enumerate(files):
        # A colon separates files, unless it is escaped.
        name = str(file).replace("\\", "\\\\").replace(":", "\\:")
        command += [f"--name=task{index}", f"--filename={name}"]
    # A session of its own, so that its job processes can be ended together with it.
    return subprocess.Popen(
        command,
        cwd=files[0].parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _failed(process: subprocess.Popen[str], output: str, errors: str) -> Failed:
    lines = (errors or output).strip().splitlines() or [f"status {process.returncode}"]
    return Failed(f"fio: {lines[0]}")


def figures(jobs: Sequence[JobReport]) -> Figures:
    """The figures of jobs that ran beside each other, all reading or all writing."""
    seconds = cpu_s = 0.0
    nbytes = operations = 0
    for job in jobs:
        side = job["read"] if job["read"]["io_bytes"] else job["write"]
        seconds = max(seconds, side["io_bytes"] / side["bw_bytes"] if side["bw_bytes"] else 0.0)
        cpu_s += (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
        nbytes += side["io_bytes"]
        operations += side["total_ios"]
    return Figures(seconds, cpu_s, nbytes, operations)
