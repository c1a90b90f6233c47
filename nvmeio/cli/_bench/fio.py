"""fio, the field's measure: one process a loop, a job for each task, timed by its own clock."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

from nvmeio.cli._bench.workload import Op, Timing, Turn, Workload
from nvmeio.cli._exits import Failed, Refused
from nvmeio.errors import BackendUnavailableError

HUGE_PAGE_BYTES = 2 << 20
_MEMINFO = Path("/proc/meminfo")


class FioPool:
    """fio on the files of a workload's tasks; a `Pool`.

    It does the work of an `AioHandle` with the same parameters: libaio, direct, a whole file from
    its first block to its last. Its memory is one buffer per block in flight, on reserved huge
    pages where there are enough of them.

    Raises:
        BackendUnavailableError: It is not installed.
        Refused: The work cannot be put to it.
    """

    def __init__(self, workload: Workload) -> None:
        program = shutil.which("fio")
        if program is None:
            raise BackendUnavailableError(
                "the engine fio cannot be had",
                attempts=[("fio", "not on PATH")],
                remedy="apt-get install fio",
            )
        if workload.validate:
            raise Refused("--validate cannot look into fio: leave one of them away")
        if workload.gpu:
            raise Refused("fio has no CUDA tensors: leave --gpu or fio away")
        self._program = program
        self._workload = workload
        self._lanes = workload.options.intra_op_parallelism
        if workload.nbytes % (self._lanes * workload.options.block_size):
            raise Refused(
                "fio moves whole blocks: --io-size must be a multiple of --block-size times "
                "--io-parallel"
            )
        self.memory = "huge pages" if self._huge_pages_suffice() else "4 KiB pages"

    def open(self, engine: str) -> bool:
        """There is nothing to set up; fio is asked for direct I/O and fails without."""
        return False

    def make_files(self, suffix: str, op: Op) -> None:
        """Another pool makes them, for all engines; see `Session`."""

    def run(self, turn: Turn) -> list[Timing]:
        """One loop: a job for each task, all started at once by fio."""
        paths = [
            self._workload.file(index, turn.loop, "bin")
            for index in range(len(self._workload.places))
        ]
        if turn.op == "write" and self._workload.new_files:
            for path in paths:
                path.unlink(missing_ok=True)
        try:
            report = self._run(paths, turn)
        finally:
            if turn.op == "write" and self._workload.new_files:
                for path in paths:
                    path.unlink(missing_ok=True)
        timings = []
        for index in range(len(paths)):
            jobs = report["jobs"][index * self._lanes : (index + 1) * self._lanes]
            timings.append(_timing(jobs, turn))
        return timings

    def close(self) -> None:
        """Nothing is kept between loops."""

    def _run(self, paths: list[Path], turn: Turn) -> dict[str, Any]:
        command = [self._program, *self._common(turn)]
        for index, path in enumerate(paths):
            command += [f"--name=task{index}", f"--filename={path}"]
        # A session of its own, so that its job processes can be ended together with it. The
        # directory is the files': fio leaves state files where it runs.
        process = subprocess.Popen(
            command,
            cwd=paths[0].parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            output, errors = process.communicate()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        if process.returncode:
            lines = (errors or output).strip().splitlines() or [f"status {process.returncode}"]
            raise Failed(f"fio: {lines[0]}")
        parsed: dict[str, Any] = json.loads(output[output.index("{") :])
        return parsed

    def _common(self, turn: Turn) -> list[str]:
        options, workload = self._workload.options, self._workload
        share = turn.nbytes // self._lanes
        batch = 1 if options.single_submit else options.queue_depth
        arguments = [
            "--output-format=json",
            "--ioengine=libaio",
            "--direct=1",
            f"--rw={turn.op}",
            f"--bs={options.block_size}",
            f"--size={share}",
            f"--iodepth={options.queue_depth}",
            f"--iodepth_batch={batch}",
            f"--mem={'mmaphuge' if self.memory == 'huge pages' else 'malloc'}",
            # nvmeio does not touch what it writes either.
            "--scramble_buffers=0",
            "--fsync_on_close=0",
            f"--end_fsync={int(workload.fsync and turn.op == 'write')}",
            f"--invalidate={int(workload.drop_caches)}",
            f"--overwrite={int(not workload.new_files)}",
            *(["--readonly"] if turn.op == "read" else []),
        ]
        if self._lanes > 1:
            arguments += [f"--numjobs={self._lanes}", f"--offset_increment={share}"]
        if not options.overlap_events:
            # Refill when the queue has run empty, not as blocks complete.
            arguments += [f"--iodepth_batch_complete_min={options.queue_depth}"]
        return arguments

    def _huge_pages_suffice(self) -> bool:
        options, tasks = self._workload.options, len(self._workload.places)
        # fio allocates a little more than its blocks, for every job.
        per_job = (options.queue_depth + 8) * options.block_size
        wanted = tasks * self._lanes * -(-per_job // HUGE_PAGE_BYTES)
        with contextlib.suppress(OSError):
            for line in _MEMINFO.read_text().splitlines():
                if line.startswith("HugePages_Free:"):
                    return int(line.split()[1]) >= wanted
        return False


def _timing(jobs: list[dict[str, Any]], turn: Turn) -> Timing:
    """From first submission to last completion: the start of fio's process is not in it."""
    seconds = cpu_s = 0.0
    for job in jobs:
        side = job[turn.op]
        # The end_fsync is in it, opening the file and touching the buffers are not.
        took = side["io_bytes"] / side["bw_bytes"] if side["bw_bytes"] else 0.0
        seconds = max(seconds, took)
        cpu_s += (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return Timing(0.0, seconds, cpu_s)
