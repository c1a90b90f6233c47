"""Others that are measured beside: fio, a process a run timed by its own clock; DeepSpeed's op."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nvmeio._memory.system import proc_bytes
from nvmeio._threads.closing import on_error
from nvmeio.cli._terminal import Failed
from nvmeio.errors import BackendUnavailableError

FIO_INSTALL = "apt-get install fio"
DEEPSPEED_INSTALL = "DS_BUILD_OPS=0 pip install deepspeed==0.19.8"
DEEPSPEED_BUILD = "apt-get install libaio-dev ninja-build g++"

JobReport = dict[str, Any]


class FioFigures(NamedTuple):
    """fio's figures for its jobs together.

    Attributes:
        seconds: From first submission to last completion, of the slowest job: the start of fio's
            process is not in it, nor are opening files and touching buffers; an end_fsync is.
        cpu_s: User and system time of all jobs.
        nbytes: Bytes that they moved.
        operations: The number of requests.
    """

    seconds: float
    cpu_s: float
    nbytes: int
    operations: int


def require_fio() -> str:
    """Fio's program.

    Raises:
        BackendUnavailableError: It is not installed.
    """
    program = shutil.which("fio")
    if program is None:
        raise BackendUnavailableError(
            "the engine fio is not available", attempts=[("fio", "not on PATH")], remedy=FIO_INSTALL
        )
    return program


def run_fio(
    paths: Sequence[Path], options: Sequence[str], timeout_s: float | None = None
) -> list[JobReport]:
    """Runs fio with a job for each file, all at once; its report of each.

    Raises:
        Failed: It did not do the work; with its own words.
    """
    process = start_fio(paths, options)
    with on_error(kill, process):
        output, errors = process.communicate(timeout=timeout_s)
    if process.returncode:
        raise fio_failed(process, output, errors)
    jobs: list[JobReport] = json.loads(output[output.index("{") :])["jobs"]
    return jobs


def written_by(pid: int) -> int:
    """Bytes that a process has sent to drives; 0 of one that has ended."""
    # A count, without the unit that `proc_bytes` takes it for.
    return (proc_bytes(f"/proc/{pid}/io", "write_bytes") or 0) >> 10


def start_fio(paths: Sequence[Path], options: Sequence[str]) -> subprocess.Popen[str]:
    """Fio at work, with a job for each file."""
    # It runs in the files' directory, for it leaves state files where it runs: names are absolute.
    files = [Path(os.path.abspath(path)) for path in paths]
    command = [require_fio(), "--output-format=json", "--direct=1", "--fsync_on_close=0", *options]
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


def kill(process: subprocess.Popen[str]) -> None:
    """Ends fio and its jobs, and waits for that."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def fio_failed(process: subprocess.Popen[str], output: str, errors: str) -> Failed:
    """The reason that fio gives for its end."""
    lines = (errors or output).strip().splitlines() or [f"status {process.returncode}"]
    return Failed(f"fio: {lines[0]}")


def fio_figures(jobs: Sequence[JobReport]) -> FioFigures:
    """The figures of jobs that ran beside each other, all reading or all writing."""
    seconds = cpu_s = 0.0
    nbytes = operations = 0
    for job in jobs:
        side = job["read"] if job["read"]["io_bytes"] else job["write"]
        seconds = max(seconds, side["io_bytes"] / side["bw_bytes"] if side["bw_bytes"] else 0.0)
        cpu_s += (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
        nbytes += side["io_bytes"]
        operations += side["total_ios"]
    return FioFigures(seconds, cpu_s, nbytes, operations)


# DeepSpeed


def load_deepspeed() -> Any:
    """DeepSpeed's async_io module, compiled at first use (minutes once, then cached by torch).

    Raises:
        BackendUnavailableError: It is not installed or does not build; says what is missing.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    os.environ.setdefault("DS_IGNORE_CUDA_DETECTION", "1")
    # ninja installed by pip lies beside the interpreter, which need not be on PATH.
    os.environ["PATH"] = os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"]))
    try:
        builder = importlib.import_module("deepspeed.ops.op_builder").AsyncIOBuilder()
    except ImportError as error:
        raise _no_deepspeed(error, DEEPSPEED_INSTALL) from error
    for tool in ("ninja", "c++"):
        if shutil.which(tool) is None:
            raise _no_deepspeed(f"its op needs {tool} to build", DEEPSPEED_BUILD)
    if not builder.is_compatible(verbose=False):
        raise _no_deepspeed("its op needs libaio's headers to build", DEEPSPEED_BUILD)
    lock = left_by_a_compile(builder.name)
    if lock:
        raise _no_deepspeed(
            "a run that was killed while it compiled its op left a lock", f"rm {lock}"
        )
    try:
        return builder.load(verbose=False)
    except Exception as error:
        raise _no_deepspeed(error, DEEPSPEED_BUILD) from error


def left_by_a_compile(name: str) -> str:
    """The lock of a compile that was killed, for which torch waits forever; "" if there is none.

    Compilers, and ninja, run in the directory where it lies.
    """
    from torch.utils import cpp_extension

    lock = Path(cpp_extension._get_build_directory(name, False)).resolve() / "lock"
    with contextlib.suppress(FileNotFoundError):
        if time.time() - lock.stat().st_mtime < _BEFORE_NINJA_S:
            return ""
        for place in Path("/proc").glob("[0-9]*/cwd"):
            with contextlib.suppress(OSError):
                if place.samefile(lock.parent):
                    return ""
        return str(lock)
    return ""


_BEFORE_NINJA_S = 10


def _no_deepspeed(reason: object, remedy: str) -> BackendUnavailableError:
    first = (str(reason).strip().splitlines() or [repr(reason)])[0]
    return BackendUnavailableError(
        "the engine deepspeed is not available", attempts=[("async_io", first)], remedy=remedy
    )
