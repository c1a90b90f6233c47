"""fio as an engine of `nvmeio bench`: one process a loop, a job for each task."""

from __future__ import annotations

from nvmeio.cli._bench.workload import Lap, Op, Timing, Workload
from nvmeio.cli._exits import Refused
from nvmeio.cli.measure import fio
from nvmeio.cli.measure.disk import free_huge_pages

HUGE_PAGE_BYTES = 2 << 20


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
        fio.require()
        if workload.validate:
            raise Refused("--validate cannot look into fio: leave one of them away")
        if workload.gpu:
            raise Refused("fio has no CUDA tensors: leave --gpu or fio away")
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

    def run(self, lap: Lap) -> list[Timing]:
        """One loop: a job for each task, all started at once by fio."""
        paths = [
            self._workload.file(index, lap.loop, "bin")
            for index in range(len(self._workload.places))
        ]
        if lap.op == "write" and self._workload.new_files:
            for path in paths:
                path.unlink(missing_ok=True)
        try:
            jobs = fio.run(paths, self._common(lap))
        finally:
            if lap.op == "write" and self._workload.new_files:
                for path in paths:
                    path.unlink(missing_ok=True)
        timings = []
        for first in range(0, len(jobs), self._lanes):
            found = fio.figures(jobs[first : first + self._lanes])
            timings.append(Timing(0.0, found.seconds, found.cpu_s))
        return timings

    def close(self) -> None:
        """Nothing is kept between loops."""

    def _common(self, lap: Lap) -> list[str]:
        options, workload = self._workload.options, self._workload
        share = lap.nbytes // self._lanes
        batch = 1 if options.single_submit else options.queue_depth
        arguments = [
            "--ioengine=libaio",
            f"--rw={lap.op}",
            f"--bs={options.block_size}",
            f"--size={share}",
            f"--iodepth={options.queue_depth}",
            f"--iodepth_batch={batch}",
            f"--mem={'mmaphuge' if self.memory == 'huge pages' else 'malloc'}",
            # nvmeio does not touch what it writes either.
            "--scramble_buffers=0",
            f"--end_fsync={int(workload.fsync and lap.op == 'write')}",
            f"--invalidate={int(workload.drop_caches)}",
            f"--overwrite={int(not workload.new_files)}",
            *(["--readonly"] if lap.op == "read" else []),
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
        return free_huge_pages() >= wanted
