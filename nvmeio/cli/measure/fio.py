"""fio, the field's measure: one process a run, timed by its own clock."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nvmeio.cli._exits import Failed
from nvmeio.errors import BackendUnavailableError

INSTALL = "apt-get install fio"

JobReport = dict[str, Any]


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
    # It runs in the files' directory, for it leaves state files where it runs: names are absolute.
    files = [Path(os.path.abspath(path)) for path in paths]
    command = [require(), "--output-format=json", "--direct=1", "--fsync_on_close=0", *options]
    for index, file in enumerate(files):
        # A colon separates files, unless it is escaped.
        name = str(file).replace("\\", "\\\\").replace(":", "\\:")
        command += [f"--name=task{index}", f"--filename={name}"]
    # A session of its own, so that its job processes can be ended together with it.
    process = subprocess.Popen(
        command,
        cwd=files[0].parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    if process.returncode:
        lines = (errors or output).strip().splitlines() or [f"status {process.returncode}"]
        raise Failed(f"fio: {lines[0]}")
    jobs: list[JobReport] = json.loads(output[output.index("{") :])["jobs"]
    return jobs


def figures(jobs: Sequence[JobReport]) -> Figures:
    """Of jobs that ran beside each other, all reading or all writing."""
    seconds = cpu_s = 0.0
    nbytes = operations = 0
    for job in jobs:
        side = job["read"] if job["read"]["io_bytes"] else job["write"]
        seconds = max(seconds, side["io_bytes"] / side["bw_bytes"] if side["bw_bytes"] else 0.0)
        cpu_s += (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
        nbytes += side["io_bytes"]
        operations += side["total_ios"]
    return Figures(seconds, cpu_s, nbytes, operations)
