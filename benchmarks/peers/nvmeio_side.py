"""nvmeio itself, in a worker process like its peers."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from _measure import Sample, timed

import nvmeio
from peers._loops import block_offsets, lag_during, read_blocks, run_on_uvloop
from peers._tensors import TensorPeer

BLOCKED_S = 0.1

Disturbance = Literal["idle", "blocked loop", "GIL hog"]


class NvmeioPeer(TensorPeer):
    name: ClassVar[str] = "nvmeio"

    def make_handle(self, **options: Any) -> Any:
        return nvmeio.AioHandle(**options)

    def use_queue_depth(self, queue_depth: int) -> None:
        """Swap the handle for one of another depth; its own tensors go with it."""
        self.close()
        self._handle = self.make_handle(queue_depth=queue_depth)

    def close(self) -> None:
        handle = self._handle
        super().close()
        if handle is not None:
            handle.close()

    # Many transfers, as one batch: DeepSpeed has a call for each

    def read_many(self, paths: Sequence[str], offsets: Sequence[int]) -> Sample:
        with timed(self.tensor.nbytes, len(self._parts)) as sample:
            moved = self.handle.sync_pread_batch(self._parts, paths, offsets)
        return self._whole(moved, sample)

    def write_many(self, paths: Sequence[str], offsets: Sequence[int]) -> Sample:
        with timed(self.tensor.nbytes, len(self._parts)) as sample:
            moved = self.handle.sync_pwrite_batch(self._parts, paths, offsets)
        return self._whole(moved, sample)

    def _whole(self, moved: int, sample: Sample) -> Sample:
        if moved != self.tensor.nbytes:
            raise RuntimeError(f"{moved} of {self.tensor.nbytes} bytes")
        return sample

    # Memory beside the caller's tensor

    def extra_memory(self, path: str) -> dict[str, int]:
        """Peak growth of resident memory while a fresh handle reads and writes the tensor once.

        Call it first in a fresh process: later handles may reuse what an earlier one touched.
        """
        tensor = self.tensor
        gc.collect()
        before = _resident_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, proc(5)
        handle = self.make_handle()
        handle.sync_pread(tensor, path, 0)
        handle.sync_pwrite(tensor, path, 0)
        peak = _resident_bytes("VmHWM")
        lanes = handle.get_intra_op_parallelism()
        allowed = handle.get_queue_depth() * handle.get_block_size() * lanes
        handle.close()
        return {"extra": peak - before, "allowed": allowed}

    # Random reads

    def random_reads(
        self,
        path: str,
        nbytes: int,
        count: int,
        block: int,
        depth: int,
        slices: bool,
        bound: bool = True,
    ) -> Sample:
        """Coroutines on uvloop, each awaiting reads into its own buffer.

        Args:
            slices: The buffers are slices of one `empty_aligned` tensor, else one each.
            bound: Through a file of the handle's, else by `async_pread` and a `nvmeio.File`.
        """
        empty = nvmeio.empty_aligned
        offsets = block_offsets(nbytes, count, block)
        if slices:
            whole = empty(depth * block, dtype=torch.uint8)
            buffers = [whole[number * block : (number + 1) * block] for number in range(depth)]
        else:
            buffers = [empty(block, dtype=torch.uint8) for _ in range(depth)]
        handle = self.handle

        async def main() -> Sample:
            with handle.open(path, "r") if bound else nvmeio.open(path, "r") as file:

                def read_bound(number: int, offset: int) -> Awaitable[int]:
                    operation: Awaitable[int] = file.pread(buffers[number], offset)
                    return operation

                def read(number: int, offset: int) -> Awaitable[int]:
                    operation: Awaitable[int] = handle.async_pread(buffers[number], file, offset)
                    return operation

                return await read_blocks(read_bound if bound else read, offsets, block, depth)

        return run_on_uvloop(main())

    # Reads while Python is busy elsewhere

    def read_disturbed(self, paths: Sequence[str], disturbance: Disturbance) -> Sample:
        """Read all files into the tensor, one operation each, while Python is disturbed.

        A completion cannot be seen while the loop is blocked, so a single read's time would be
        rounded up to the next 100 ms and the rounding would count as I/O. All operations are
        therefore submitted up front, and the time ends when the last one's callback ran, not when
        the awaiting coroutine got its turn several blocked iterations later. What is left of the
        rounding is at most two blocks (0.2 s) in the total, 50 to 100 ms in the mean, and it is
        charged to us. They all land in the same tensor, whose contents nobody looks at.
        """
        return asyncio.run(self._read_disturbed(paths, disturbance))

    async def _read_disturbed(self, paths: Sequence[str], disturbance: Disturbance) -> Sample:
        finished_at: list[float] = []
        stop = threading.Event()
        hog = threading.Thread(target=_hog, args=(stop,), daemon=True)
        if disturbance == "GIL hog":
            hog.start()
        nbytes = self.tensor.nbytes * len(paths)
        with timed(nbytes, len(paths)) as sample:
            start = time.perf_counter()
            operations = [self.handle.async_pread(self.tensor, path, 0) for path in paths]
            for operation in operations:
                operation.add_done_callback(lambda _: finished_at.append(time.perf_counter()))
            while disturbance == "blocked loop" and len(finished_at) < len(paths):
                time.sleep(BLOCKED_S)
                await asyncio.sleep(0)
            moved = await asyncio.gather(*operations)
        stop.set()
        if hog.is_alive():
            hog.join()
        if sum(moved) != nbytes:
            raise RuntimeError(f"{sum(moved)} of {nbytes} bytes")
        sample.seconds = max(finished_at) - start
        return sample

    # How late the loop's timers are

    def loop_lag(self, paths: Sequence[str], count: int, write: bool) -> Sample:
        """Lag of asyncio's loop while `count` operations share the tensor and the files.

        The tensor is cut into `count` pieces, which are spread evenly over the files; submission
        happens on the loop and is part of what may delay it.
        """
        size = self.tensor.nbytes // count
        pieces = [self.tensor[number * size : (number + 1) * size] for number in range(count)]
        per_file = count // len(paths)
        start = self.handle.async_pwrite if write else self.handle.async_pread

        async def move() -> None:
            operations = [
                start(piece, paths[number // per_file], number % per_file * size)
                for number, piece in enumerate(pieces)
            ]
            await asyncio.gather(*operations)

        return asyncio.run(lag_during(move(), self.tensor.nbytes, count))

    def idle_lag(self, seconds: float) -> Sample:
        """The same clock on a loop with nothing to do: what this machine adds by itself."""
        return asyncio.run(lag_during(asyncio.sleep(seconds), 0, 0))


def _hog(stop: threading.Event) -> None:
    """Hold the GIL: pure Python that gives it up only when the interpreter insists."""
    number = 0
    while not stop.is_set():
        for _ in range(10_000):
            number += 1


def _resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")
