"""Measuring one setting: handles on real files, a buffer for each directory."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import nvmeio
from nvmeio._files.plan import PAGE_BYTES
from nvmeio.cli._tune.final import Op
from nvmeio.cli._tune.search import Unusable
from nvmeio.cli.measure.disk import drop_from_cache
from nvmeio.cli.measure.scratch import fill, write_file
from nvmeio.engines.base import Options
from nvmeio.errors import BackendUnavailableError
from nvmeio.files import probe_direct

DROP_CACHES = Path("/proc/sys/vm/drop_caches")


class Rig:
    """Files and buffers that stay, handles that come and go.

    Args:
        directories: Scratch directories; each transfer is spread over all of them at once.
        nbytes: Bytes of the largest transfer, all directories together.
        engine: "libaio" or "threads"; "auto" would look for them each time.
        loops: Transfers in a measurement; their median counts.
        gpu: The tensors lie on CUDA devices, that of the first directory on the first one.
        gds: With `gpu`: through cuFile.
        flush: Drop the whole page cache before each read, as root.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        nbytes: int,
        *,
        engine: str,
        loops: int = 1,
        gpu: bool = False,
        gds: bool = False,
        flush: bool = False,
    ) -> None:
        self.engine = engine
        self._handle = nvmeio.GdsHandle if gds else nvmeio.AioHandle
        self.direct = all(probe_direct(directory).supported for directory in directories)
        self._files = [directory / "tune.bin" for directory in directories]
        self._nbytes = nbytes // len(directories)
        self._loops = loops
        self._gpu = gpu
        self._flush = flush
        self._tensors: list[torch.Tensor] = []

    def prepare(self) -> None:
        """Touches the buffers and writes the files; every block of them, so that writes overwrite.

        Raises:
            TransferError: A file cannot be written.
            MemoryError: The buffers do not fit.
        """
        for index, path in enumerate(self._files):
            host = nvmeio.empty_aligned(self._nbytes, dtype=torch.uint8)
            fill(host, index)
            write_file(path, host)
            self._tensors.append(host.to(f"cuda:{index}") if self._gpu else host)

    def measure(self, setting: Options, op: Op, nbytes: int) -> float:
        """Seconds that a transfer takes, all directories at once; making handles is not in it.

        Raises:
            Unusable: The setting cannot be had here.
            TransferError: The drive failed.
        """
        handles = self._open(setting)
        try:
            return statistics.median(
                self._once(handles, op, nbytes // len(self._files)) for _ in range(self._loops)
            )
        finally:
            for handle in handles:
                handle.close()

    def _open(self, setting: Options) -> list[nvmeio.AioHandle]:
        handles: list[nvmeio.AioHandle] = []
        try:
            for path, tensor in zip(self._files, self._tensors, strict=True):
                handle = self._handle(*setting, engine=self.engine)
                handles.append(handle)
                handle.sync_pread(tensor[:PAGE_BYTES], path)  # its threads are up and awake
        except BackendUnavailableError as missing:
            for handle in handles:
                handle.close()
            raise Unusable(str(missing).splitlines()[0]) from missing
        except BaseException:
            for handle in handles:
                handle.close()
            raise
        return handles

    def _once(self, handles: Sequence[nvmeio.AioHandle], op: Op, nbytes: int) -> float:
        if op == "read":
            self._make_cold()
        pieces = [tensor[:nbytes] for tensor in self._tensors]
        operations = []
        start = time.perf_counter()
        try:
            for handle, piece, path in zip(handles, pieces, self._files, strict=True):
                begin = handle.async_pread if op == "read" else handle.async_pwrite
                operations.append(begin(piece, path))
            for operation in operations:
                operation.result()
        except BaseException:
            for operation in operations:
                operation.cancel()  # Ctrl-C: what the kernel does not have yet, it need not get
            raise
        return time.perf_counter() - start

    def _make_cold(self) -> None:
        if self._flush:
            os.sync()
            DROP_CACHES.write_text("1\n")
        elif not self.direct:
            for path in self._files:
                drop_from_cache(path)

    def latencies(self, setting: Options, op: Op, seconds: float) -> list[float]:
        """How long single blocks take, in seconds, with the queue kept full.

        Each of `queue_depth` tasks awaits one block after another, in the first directory. As an
        awaiting task sees it: from the call to being resumed.
        """
        tensor, path = self._tensors[0], self._files[0]
        block = min(setting.block_size, self._nbytes)
        depth = max(1, min(setting.queue_depth, self._nbytes // block))
        found: list[float] = []

        async def work(handle: nvmeio.AioHandle, file: nvmeio.File, first: int) -> None:
            begin = handle.async_pread if op == "read" else handle.async_pwrite
            piece = tensor[first * block : (first + 1) * block]
            blocks = self._nbytes // block
            number = first
            while time.perf_counter() < until:
                start = time.perf_counter()
                await begin(piece, file, number % blocks * block)
                found.append(time.perf_counter() - start)
                number += depth

        async def everybody() -> None:
            async with self._handle(*setting, engine=self.engine) as handle:
                with nvmeio.open(path, "r+") as file:
                    await asyncio.gather(*(work(handle, file, n) for n in range(depth)))

        until = time.perf_counter() + seconds
        asyncio.run(everybody())
        # Those of the first round were all submitted at once, and of the last not all were.
        return found[depth:-depth] if len(found) > 3 * depth else found


def check_flush() -> None:
    """Makes sure that the page cache can be dropped.

    Raises:
        BackendUnavailableError: It takes root.
    """
    if not os.access(DROP_CACHES, os.W_OK):
        raise BackendUnavailableError(
            "--flush-page-cache: this user may not drop the page cache",
            attempts=[(str(DROP_CACHES), "not writable")],
            remedy="run as root, or leave it away: direct reads do not go through the page cache",
        )
