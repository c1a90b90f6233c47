"""A full file system in the middle of a write: ENOSPC, what got through, and nobody else hurt.

RLIMIT_FSIZE, which needs no root, is in test_limits.py.
"""

import errno
import os
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from faults._support import (
    MIB,
    aligned,
    bytes_of,
    formatted,
    make_file,
    misaligned,
    mounted,
    noise,
)

import nvmeio
from nvmeio._kv_blocks.store import BlockStore
from nvmeio._storage.durable import free_bytes

BLOCK = 256 << 10


@contextmanager
def _small(kind):
    if kind == "tmpfs":
        with mounted("tmpfs", "none", "size=48m") as folder:
            yield folder
    else:
        with formatted(kind) as folder:
            yield folder


@pytest.fixture(params=["tmpfs", "ext4", "xfs"])
def small(request):
    """A file system with room for little, most of it taken."""
    with _small(request.param) as folder:
        room = os.statvfs(folder)
        free = room.f_bavail * room.f_frsize
        filler = os.open(folder / "filler", os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(filler, 0, free - 20 * MIB)
        finally:
            os.close(filler)
        yield folder


def _free(folder):
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize


@pytest.mark.parametrize("engine", ["libaio", "threads"])
@pytest.mark.parametrize("allocate", [aligned, misaligned])
def test_disk_full_in_mid_write(small, tmp_path, engine, allocate):
    content = noise(64 * MIB, seed=1)
    old = make_file(small / "old", content[: 2 * MIB])
    elsewhere = make_file(tmp_path / "elsewhere", content[: 4 * MIB])
    path = small / "new"
    with nvmeio.AioHandle(block_size=BLOCK, queue_depth=16, engine=engine) as handle:
        tensors = [misaligned(2 * MIB), misaligned(4 * MIB)]
        running = [
            handle.async_pread(tensors[0], old),
            handle.async_pread(tensors[1], elsewhere),
            handle.async_pwrite(content[: 8 * MIB], tmp_path / "copy", 77),
        ]
        before = _free(small)
        failing = handle.async_pwrite(allocate(64 * MIB).copy_(content), path)
        running.append(handle.async_pread(misaligned(100), old, 5))
        failed = failing.exception(100)
        assert isinstance(failed, nvmeio.TransferError)
        assert failed.errno == errno.ENOSPC, failed
        assert (failed.operation, failed.path, failed.nbytes) == ("pwrite", str(path), 64 * MIB)
        assert "df -h" in str(failed)
        # All that was free got through, but for metadata and blocks that were refused as a whole.
        assert 0 < failed.transferred <= before
        assert failed.transferred >= before - 12 * MIB, (failed.transferred, before)
        assert failed.transferred <= path.stat().st_blocks * 512
        assert [operation.result(100) for operation in running] == [2 * MIB, 4 * MIB, 8 * MIB, 100]
        assert bytes_of(tensors[0]) == old.read_bytes() == bytes_of(content[: 2 * MIB])
        assert bytes_of(tensors[1]) == bytes_of(content[: 4 * MIB])
        assert (tmp_path / "copy").read_bytes()[77:] == bytes_of(content[: 8 * MIB])
        stats = handle.stats
        assert (stats.errors, stats.in_flight) == (1, 0)
        assert stats.bytes_written == failed.transferred + 8 * MIB

        # With room made, the same handle writes the same file.
        os.truncate(small / "filler", 0)
        os.truncate(path, 0)
        assert handle.async_pwrite(content[: 16 * MIB], path).result(100) == 16 * MIB
        handle.sync_fsync(path)
    assert path.read_bytes() == bytes_of(content[: 16 * MIB])


@pytest.mark.parametrize("small", ["tmpfs", "ext4"], indirect=True)
async def test_disk_full_among_awaited_writes(small):
    """Several writers compete for the last megabytes: each is told of its own bytes alone."""
    import asyncio

    content = noise(8 * MIB, seed=2)
    async with nvmeio.AioHandle(block_size=BLOCK, queue_depth=8, intra_op_parallelism=2) as handle:
        before = _free(small)
        paths = [small / f"new-{index}" for index in range(6)]
        results = await asyncio.wait_for(
            asyncio.gather(
                *(handle.async_pwrite(content, path, 100) for path in paths),
                return_exceptions=True,
            ),
            60,
        )
        failures = [r for r in results if isinstance(r, nvmeio.TransferError)]
        assert failures and len(failures) == sum(r != 8 * MIB for r in results)
        assert {f.errno for f in failures} == {errno.ENOSPC}
        for result, path in zip(results, paths, strict=True):
            if result == 8 * MIB:
                assert path.read_bytes()[100:] == bytes_of(content)
        got_through = sum(f.transferred for f in failures) + sum(
            r for r in results if isinstance(r, int)
        )
        assert before - 12 * MIB <= got_through <= before
        assert handle.stats.in_flight == 0
        for path in paths:
            path.unlink()
        assert await handle.async_pwrite(content, paths[0]) == 8 * MIB
    assert paths[0].read_bytes() == bytes_of(content)


def test_unaligned_edges_meet_the_end_of_the_disk_too():
    """Head and tail go through the page cache, where space is found missing at another place."""
    with mounted("tmpfs", "none", "size=4m") as folder:
        content = noise(6 * MIB, seed=3)
        with nvmeio.AioHandle(block_size=BLOCK) as handle:
            failed = handle.async_pwrite(content, folder / "new", 1).exception(100)
            assert isinstance(failed, nvmeio.TransferError)
            assert failed.errno == errno.ENOSPC
            assert 3 * MIB < failed.transferred < 4 * MIB
            start = (folder / "new").read_bytes()[1 : 1 + failed.transferred]
            assert start == bytes_of(content[: failed.transferred])


def test_drive_without_room_for_an_inode():
    """The open fails, not the write."""
    with mounted("tmpfs", "none", "nr_inodes=3") as folder, nvmeio.AioHandle() as handle:
        made: list[Any] = []
        refused: list[Any] = []
        for index in range(4):
            operation = handle.async_pwrite(misaligned(5000), folder / f"new-{index}")
            failed = operation.exception(100)
            (made if failed is None else refused).append(failed)
        assert made and refused
        assert {f.errno for f in refused} == {errno.ENOSPC}
        assert {f.operation for f in refused} == {"open"}


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_block_store_leaves_room_and_a_refused_one_takes_none(kind):
    """It took all there was, and where that was too little it failed and kept it."""
    with _small(kind) as folder:
        free, size = free_bytes(folder)
        with BlockStore(folder, "kv", MIB, 3 << 30) as store:
            for number in range(60):
                block = torch.full((MIB,), number, dtype=torch.uint8)
                assert store.store([str(number)], [block]) == [True]
            room = torch.empty(MIB, dtype=torch.uint8)
            for number, there in enumerate(store.contains(list(map(str, range(60))))):
                assert store.load([str(number)], [room]) == [there]
                assert not there or (room == number).all()
            assert free / MIB - size / MIB / 20 - 2 < len(store) < free / MIB
        left, _ = free_bytes(folder)
        assert left > size // 20 - 2 * MIB  # what its table and directories take
        with pytest.raises(nvmeio.TransferError, match="are left to others") as refused:
            BlockStore(folder, "other", MIB, 3 << 30)
        assert refused.value.errno == errno.ENOSPC
        assert free_bytes(folder)[0] == left
        assert {path.stem for path in (folder / "nvmeio-blocks").iterdir()} == {"kv"}
