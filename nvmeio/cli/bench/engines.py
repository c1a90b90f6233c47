"""The contenders that can move a tensor: nvmeio, plain Python, torch, DeepSpeed, and fio on files.

An engine does one transfer on request; files, buffers and clocks are the task's (`task.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import nvmeio
from nvmeio import engines
from nvmeio._io.inflight import WriteBehind
from nvmeio._pages import PAGE_BYTES, round_up
from nvmeio._storage.durable import sync_file
from nvmeio._threads.closing import on_error, opened
from nvmeio.checkpoint.file_objects import FastFileReader
from nvmeio.cli._terminal import Failed, Refused
from nvmeio.cli.bench.workload import Lap, Timing, Workload
from nvmeio.cli.measure import Op, peers
from nvmeio.cli.measure.disk import buffer_of, fill, free_huge_pages
from nvmeio.files import probe_direct

REFERENCE_BLOCK_BYTES = 8 << 20
HUGE_PAGE_BYTES = 2 << 20
MOST_BYTES_A_CALL = 1 << 30  # Linux moves less than 2 GiB in a system call

OURS = engines.NAMES
NAMES = (*OURS, "aio_basic", "python", "torch_save", "torch_fast", "deepspeed", "fio")
# The names in ds_io, with "_" for "-".
ALIASES = {"aio_handle": "auto", "torch_io": "torch_save", "torch_fastio": "torch_fast"}
RAW = frozenset({*OURS, "aio_basic", "python", "deepspeed", "fio"})
REFERENCE = "reference"

Move = Callable[[int, list[memoryview], int], int]


class BenchEngine:
    """One way to move a tensor.

    Args:
        workload: The work to do.
        directory: The directory of the task's files.
        name: The engine's name.

    Attributes:
        suffix: The suffix of its files: engines with the same one share them.
        direct: It goes past the page cache where the directory's file system can.
        buffered: Its transfers go through the page cache.
    """

    suffix = "bin"
    direct = True

    def __init__(self, workload: Workload, directory: Path, name: str) -> None:
        self._workload = workload
        self.buffered = not (self.direct and probe_direct(directory).supported)

    def read(self, tensor: torch.Tensor, path: Path) -> torch.Tensor:
        """Reads the file; the tensor with its bytes, which is another one for torch's engines."""
        raise NotImplementedError

    def write(self, tensor: torch.Tensor, path: Path) -> None:
        """Writes the tensor to the file."""
        raise NotImplementedError

    def sync(self, path: Path) -> None:
        """Makes the file durable."""
        sync_file(path)

    def close(self) -> None:
        """Gives everything back."""


class Nvmeio(BenchEngine):
    """`AioHandle` (or `GdsHandle`), one operation for the whole tensor."""

    def __init__(self, workload: Workload, directory: Path, name: str) -> None:
        super().__init__(workload, directory, name)
        made = nvmeio.GdsHandle if workload.gds and name in OURS else nvmeio.AioHandle
        engine = name if name in OURS else "auto"
        self._handle: nvmeio.AioHandle = made(*workload.options, engine=engine)

    def read(self, tensor: torch.Tensor, path: Path) -> torch.Tensor:
        _finish(self._handle.async_pread(tensor, path))
        return tensor

    def write(self, tensor: torch.Tensor, path: Path) -> None:
        _finish(self._handle.async_pwrite(tensor, path))

    def sync(self, path: Path) -> None:
        self._handle.sync_fsync(path)

    def close(self) -> None:
        self._handle.close()


class FreshHandle(BenchEngine):
    """`AioHandle`, made and closed within the timing, as ds_io's aio_basic does it."""

    def read(self, tensor: torch.Tensor, path: Path) -> torch.Tensor:
        with nvmeio.AioHandle(*self._workload.options) as handle:
            _finish(handle.async_pread(tensor, path))
        return tensor

    def write(self, tensor: torch.Tensor, path: Path) -> None:
        with nvmeio.AioHandle(*self._workload.options) as handle:
            _finish(handle.async_pwrite(tensor, path))


def _finish(operation: nvmeio.Operation) -> None:
    with on_error(operation.cancel):  # Ctrl-C: what the kernel does not have yet, it need not get
        operation.result()


class Reference(BenchEngine):
    """The rate of a drive with the plainest direct loop: 8 MiB at a time, in and out of one buffer.

    Like dd with direct I/O: neither the tensor nor an engine has a part in it, so it tells what
    the machine was doing beside.
    """

    suffix = "ref"

    def __init__(self, workload: Workload, directory: Path, name: str) -> None:
        super().__init__(workload, directory, name)
        self._block = nvmeio.empty_aligned(REFERENCE_BLOCK_BYTES, dtype=torch.uint8)
        fill(self._block, 0)

    def read(self, tensor: torch.Tensor, path: Path) -> torch.Tensor:
        self._move(path, os.O_RDONLY, tensor.numel(), os.preadv)
        return tensor

    def write(self, tensor: torch.Tensor, path: Path) -> None:
        self._move(path, os.O_WRONLY, tensor.numel(), os.pwritev)

    def _move(self, path: Path, flags: int, nbytes: int, move: Move) -> None:
        with opened(path, flags | (0 if self.buffered else os.O_DIRECT)) as descriptor:
            block = buffer_of(self._block)
            for offset in range(0, nbytes, len(block)):
                # Whole pages are written, or the last of an odd length would not go direct.
                wanted = min(len(block), round_up(nbytes - offset, PAGE_BYTES))
                move(descriptor, [block[:wanted]], offset)


class Python(BenchEngine):
    """System calls from Python over the whole tensor, through the page cache."""

    direct = False

    def read(self, tensor: torch.Tensor, path: Path) -> torch.Tensor:
        self._move(path, os.O_RDONLY, tensor, os.preadv)
        return tensor

    def write(self, tensor: torch.Tensor, path: Path) -> None:
        self._move(path, os.O_WRONLY | os.O_CREAT, tensor, os.pwritev)

    def _move(self, path: Path, flags: int, tensor: torch.Tensor, move: Move) -> None:
        memory = buffer_of(tensor)
        with opened(path, flags, 0o600) as descriptor:
            done = 0
            while done < len(memory):
                moved = move(descriptor, [memory[done : done + MOST_BYTES_A_CALL]], done)
                if not moved:
                    raise Failed(f"{path} ends at {done} of {len(memory)} bytes")
                done += moved


class TorchSave(BenchEngine):
    """`torch.save` and `torch.load`, as most programs do it."""

    suffix = "pt"
    direct = False

    def read(self, tensor: torch.Tensor, path: Path) -> torch.Tensor:
        loaded: torch.Tensor = torch.load(path, map_location=tensor.device, weights_only=True)
        return loaded

    def write(self, tensor: torch.Tensor, path: Path) -> None:
        torch.save(tensor, path, _use_new_zipfile_serialization=not self._workload.legacy_save)


class TorchFast(Nvmeio):
    """`torch.save` and `torch.load` over a file object that moves its bytes through nvmeio."""

    suffix = "pt"

    def __init__(self, workload: Workload, directory: Path, name: str) -> None:
        super().__init__(workload, directory, name)
        self._staging = nvmeio.empty_aligned(workload.staging_bytes, dtype=torch.uint8)

    def read(self, tensor: torch.Tensor, path: Path) -> torch.Tensor:
        with FastFileReader(path, handle=self._handle) as reader:
            file: Any = reader  # has what torch asks of a file, and not all that IO[bytes] has
            loaded: torch.Tensor = torch.load(file, map_location=tensor.device, weights_only=True)
        return loaded

    def write(self, tensor: torch.Tensor, path: Path) -> None:
        """Write as `FastFileWriter`, without its commit: --fsync is the user's choice here."""
        with nvmeio.open(path, "w") as target:
            stream = WriteBehind(self._handle, target, self._staging)
            file: Any = stream
            with on_error(stream.abandon):
                torch.save(
                    tensor, file, _use_new_zipfile_serialization=not self._workload.legacy_save
                )
                stream.finish()


class DeepSpeed(BenchEngine):
    """DeepSpeed's own `aio_handle`, with page-locked memory of its own (see `memory`)."""

    def __init__(self, workload: Workload, directory: Path, name: str) -> None:
        super().__init__(workload, directory, name)
        block, depth, single, overlap, lanes = workload.options
        self._handle = peers.load_deepspeed().aio_handle(block, depth, single, overlap, lanes)
        alignment = self._handle.get_alignment()
        if workload.nbytes % alignment:
            raise Refused(
                f"DeepSpeed moves multiples of {alignment} bytes only: a file of "
                f"{workload.nbytes} would be cut short"
            )

    def memory(self, nbytes: int) -> torch.Tensor:
        """Page-locked by DeepSpeed: tensors that are not, it copies."""
        locked: torch.Tensor = self._handle.new_cpu_locked_tensor(
            nbytes, torch.empty(0, dtype=torch.uint8)
        )
        return locked

    def read(self, tensor: torch.Tensor, path: Path) -> torch.Tensor:
        self._check(self._handle.async_pread(tensor, str(path), 0), path)
        return tensor

    def write(self, tensor: torch.Tensor, path: Path) -> None:
        self._check(self._handle.async_pwrite(tensor, str(path), 0), path)

    def _check(self, status: int, path: Path) -> None:
        if status != 0 or self._handle.wait() != 1:
            raise Failed(f"DeepSpeed did not transfer {path}")


def make(name: str, workload: Workload, task: int) -> BenchEngine:
    """An engine for one task.

    Raises:
        BackendUnavailableError: It cannot be had here.
    """
    return _ENGINES[name](workload, workload.places[task].directory, name)


_ENGINES: dict[str, type[BenchEngine]] = {
    **dict.fromkeys(OURS, Nvmeio),
    REFERENCE: Reference,
    "aio_basic": FreshHandle,
    "python": Python,
    "torch_save": TorchSave,
    "torch_fast": TorchFast,
    "deepspeed": DeepSpeed,
}


class FioPool:
    """fio on the files of a workload's tasks; as a `ProcessPool` of others.

    It does the work of an `AioHandle` with the same parameters: libaio, direct, a whole file from
    its first block to its last. Its memory is one buffer per block in flight, on reserved huge
    pages where there are enough of them.

    Raises:
        BackendUnavailableError: It is not installed.
        Refused: The work cannot be put to it.
    """

    def __init__(self, workload: Workload) -> None:
        peers.require_fio()
        if workload.validate:
            raise Refused("--validate cannot look into fio: leave out one of them")
        if workload.gpu:
            raise Refused("fio has no CUDA tensors: leave out --gpu or fio")
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
        passing = paths if lap.op == "write" and self._workload.new_files else []
        try:
            for path in passing:
                path.unlink(missing_ok=True)
            jobs = peers.run_fio(paths, self._common(lap))
        finally:
            for path in passing:
                path.unlink(missing_ok=True)
        timings = []
        for first in range(0, len(jobs), self._lanes):
            found = peers.fio_figures(jobs[first : first + self._lanes])
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
        return free_huge_pages() >= tasks * self._lanes * -(-per_job // HUGE_PAGE_BYTES)
