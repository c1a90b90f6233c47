"""Handles, operations and pools, disturbed."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from pathlib import Path
from typing import Any

import torch
from interrupts._trials import Scenario
from support import PATIENCE_S, random_tensor

import nvmeio

NBYTES = 300_001


def noise(seed: int, nbytes: int = NBYTES) -> torch.Tensor:
    return random_tensor(nbytes, seed)


class SyncOperations(Scenario):
    """Write, flush, read."""

    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        super().__init__(folder, handle)
        self.handle = handle or nvmeio.AioHandle(block_size=16384, queue_depth=8)
        self.written = noise(1)
        self.path = folder / "file"

    def prepare(self) -> None:
        self.path.unlink(missing_ok=True)

    def work(self) -> Any:
        found = torch.zeros_like(self.written)
        assert self.handle.sync_pwrite(self.written, self.path) == NBYTES
        self.handle.sync_fsync(self.path)
        assert self.handle.sync_pread(found, self.path) == NBYTES
        return found

    def check(self, found: Any) -> None:
        assert torch.equal(found, self.written)
        assert self.path.read_bytes() == self.written.numpy().tobytes()
        self.handle.wait(PATIENCE_S)
        assert self.handle.stats.in_flight == 0

    def close(self) -> None:
        if self.given is None:
            self.handle.close()


class Submitted(SyncOperations):
    """Operations without a loop: submitted, waited for, and some cancelled."""

    def work(self) -> Any:
        found = torch.zeros_like(self.written)
        assert self.handle.async_pwrite(self.written, self.path).result(PATIENCE_S) == NBYTES
        parts = found.split(70_000)
        operations = [
            self.handle.async_pread(part, self.path, 70_000 * number)
            for number, part in enumerate(parts)
        ]
        aside = self.handle.async_pread(torch.empty_like(self.written), self.path)
        aside.cancel()
        assert [o.result(PATIENCE_S) for o in operations] == [len(part) for part in parts]
        with contextlib.suppress(concurrent.futures.CancelledError):
            assert aside.exception(PATIENCE_S) is None
        return found


class AsyncOperations(SyncOperations):
    """The same on an event loop, at once; a handle that lives through many loops."""

    modes = ("timer", "opcodes", "cancel", "cancel-later", "twice")

    def work(self) -> Any:
        return Scenario.work(self)

    async def awork(self) -> Any:
        found = torch.zeros_like(self.written)
        parts, whole = found.split(70_000), self.written.split(70_000)
        await asyncio.gather(
            *(
                self.handle.async_pwrite(part, self.path, 70_000 * number)
                for number, part in enumerate(whole)
            )
        )
        await self.handle.fsync(self.path)
        for number, part in enumerate(parts):
            await self.handle.async_pread(part, self.path, 70_000 * number)
        return found


class BoundFiles(AsyncOperations):
    """Short pieces through files of the handle's."""

    async def awork(self) -> Any:
        found = torch.zeros_like(self.written)
        whole = self.written.split(4096)
        with self.handle.open(self.path, "rw") as file:
            await asyncio.gather(
                *(file.pwrite(part, 4096 * number) for number, part in enumerate(whole))
            )
            for number, part in enumerate(found.split(8192)):
                await file.pread(part, 8192 * number)
        return found


class Rows(SyncOperations):
    """A scatter, and a gather of what it wrote, more rows than are sorted in passing."""

    order = torch.randperm(3000, generator=torch.Generator().manual_seed(3))

    def work(self) -> Any:
        rows = self.written[:300_000].view(3000, 100)
        places = self.order * 101
        assert self.handle.sync_scatter(rows, self.path, file_offsets=places) == 300_000
        found = torch.zeros_like(rows)
        assert self.handle.sync_gather(found, self.path, file_offsets=places) == 300_000
        return found

    def check(self, found: Any) -> None:
        assert torch.equal(found.view(-1), self.written[:300_000])
        self.handle.wait(PATIENCE_S)
        assert self.handle.stats.in_flight == 0


class AsyncRows(Rows):
    """The same on an event loop."""

    modes = ("timer", "opcodes", "cancel", "cancel-later", "twice")

    def work(self) -> Any:
        return Scenario.work(self)

    async def awork(self) -> Any:
        rows = self.written[:300_000].view(3000, 100)
        places = self.order * 101
        assert await self.handle.async_scatter(rows, self.path, file_offsets=places) == 300_000
        found = torch.zeros_like(rows)
        assert await self.handle.async_gather(found, self.path, file_offsets=places) == 300_000
        return found


class Batches(SyncOperations):
    """Tensors into two files of their own and one that is shared, and back."""

    def places(self) -> tuple[list[torch.Tensor], list[Any]]:
        parts = list(self.written[:280_000].split(70_000))
        return parts, [self.path, f"{self.path}-1", f"{self.path}-2", f"{self.path}-2"]

    def work(self) -> Any:
        parts, files = self.places()
        offsets = [0, 0, 5, 100_000]
        assert self.handle.sync_pwrite_batch(parts, files, offsets) == 280_000
        found = [torch.zeros_like(part) for part in parts]
        assert self.handle.sync_pread_batch(found, files, offsets) == 280_000
        return torch.cat(found)

    def check(self, found: Any) -> None:
        assert torch.equal(found, self.written[:280_000])
        self.handle.wait(PATIENCE_S)
        assert self.handle.stats.in_flight == 0


class AsyncBatches(Batches):
    """The same on an event loop."""

    modes = ("timer", "opcodes", "cancel", "cancel-later", "twice")

    def work(self) -> Any:
        return Scenario.work(self)

    async def awork(self) -> Any:
        parts, files = self.places()
        offsets = [0, 0, 5, 100_000]
        assert await self.handle.async_pwrite_batch(parts, files, offsets) == 280_000
        found = [torch.zeros_like(part) for part in parts]
        assert await self.handle.async_pread_batch(found, files, offsets) == 280_000
        return torch.cat(found)


class Handles(Scenario):
    """A handle from its making to its end."""

    modes = ("timer", "opcodes", "cancel", "cancel-later")

    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        super().__init__(folder, handle)
        self.written = noise(2)
        (folder / "file").write_bytes(self.written.numpy().tobytes())

    async def awork(self) -> Any:
        found = torch.zeros_like(self.written)
        async with nvmeio.AioHandle(block_size=16384, queue_depth=8) as handle:
            await handle.async_pread(found, self.folder / "file")
        with nvmeio.AioHandle(block_size=16384, queue_depth=8, engine="threads") as handle:
            handle.sync_pread(found[:1000], self.folder / "file")
        return found

    def check(self, found: Any) -> None:
        assert torch.equal(found, self.written)


class Pool(Scenario):
    """Leases, on a loop and without one."""

    modes = ("timer", "opcodes", "cancel", "cancel-later")

    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        super().__init__(folder, handle)
        self.pool = nvmeio.PinnedPool(1 << 20)

    async def awork(self) -> Any:
        pool = self.pool

        async def use(nbytes: int) -> int:
            async with pool.take(nbytes) as lease:
                await asyncio.sleep(0)
                return len(lease)

        with pool.take(400_000) as first, pool.take(300_000) as second:
            first.fill_(1)
            second.fill_(2)
            assert int(first[0]) == 1
        sizes = [600_000, 500_000, 1 << 20]
        assert await asyncio.gather(*(use(nbytes) for nbytes in sizes)) == sizes

    def check(self, found: Any) -> None:
        with self.pool.take(1 << 20, timeout=PATIENCE_S):  # all of it is there
            assert self.pool.waiting == 0
        assert self.pool.in_use_bytes == 0

    def close(self) -> None:
        self.pool.close()


SCENARIOS: dict[str, type[Scenario]] = {
    "operations": SyncOperations,
    "operations-submitted": Submitted,
    "operations-async": AsyncOperations,
    "rows": Rows,
    "rows-async": AsyncRows,
    "batches": Batches,
    "batches-async": AsyncBatches,
    "bound-files": BoundFiles,
    "handles": Handles,
    "pool": Pool,
}
