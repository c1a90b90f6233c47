"""fsync: what it waits for, and what it says."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest
from contract.operating import SIZE, WAIT_S, Make, rounds, target, threads_in
from support import HeldEngine, on_every_loop, spin_until, thread

import nvmeio
from nvmeio.testing import FakeEngine


@on_every_loop
async def test_fsync(handle: nvmeio.AioHandle, file: Path) -> None:
    await handle.fsync(file)
    await handle.fsync(str(file), data_only=True)
    with nvmeio.open(file) as opened, open(file, "rb") as descriptor:
        await handle.fsync(opened)
        await handle.fsync(descriptor.fileno())
    assert handle.stats.errors == 0


def test_sync_fsync(handle: nvmeio.AioHandle, file: Path) -> None:
    handle.sync_fsync(file)
    handle.sync_fsync(file, data_only=True)
    with pytest.raises(FileNotFoundError):
        handle.sync_fsync(f"{file}.missing")


@pytest.mark.parametrize("named", ["path", "other-path", "descriptor", "file"])
@on_every_loop
async def test_fsync_waits_for_the_writes_before_it(
    handle_held: nvmeio.AioHandle,
    engine_held: HeldEngine,
    file: Path,
    named: str,
) -> None:
    """Whatever the file was called: writes are found by device and inode."""
    link = file.with_name("link")
    link.symlink_to(file)
    with nvmeio.open(file, "r+") as opened, open(file, "rb") as descriptor:
        names: dict[str, Any] = {
            "path": file,
            "other-path": link,
            "descriptor": descriptor.fileno(),
            "file": opened,
        }
        writes = [handle_held.async_pwrite(target(), file, n * SIZE) for n in range(3)]
        syncing = asyncio.create_task(handle_held.fsync(names[named]))
        await rounds()
        assert not syncing.done()
        engine_held.gate.set()
        await syncing
        assert all(write.done() for write in writes)


def test_sync_fsync_waits_for_the_writes_before_it(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    write = handle_held.async_pwrite(target(), file)
    with thread(handle_held.sync_fsync, file) as ended:
        spin_until(lambda: threads_in("wait_for_writes_to") == 1)
        assert not ended
        engine_held.gate.set()
    assert ended == [None]
    assert write.done()


@on_every_loop
async def test_fsync_does_not_wait_for_other_files(
    handle_held: nvmeio.AioHandle, engine_held: HeldEngine, file: Path
) -> None:
    write = handle_held.async_pwrite(target(4096), f"{file}.other")  # held; workers are left
    await asyncio.wait_for(handle_held.fsync(file), WAIT_S)
    assert not write.done()
    engine_held.gate.set()
    assert await write == 4096


@on_every_loop
async def test_a_failed_write_is_not_fsyncs_to_report(new_handle: Make, file: Path) -> None:
    handle = new_handle(FakeEngine(fail=lambda kind, *_: errno.EIO if kind == "pwrite" else 0))
    write = handle.async_pwrite(target(), file)
    await handle.fsync(file)
    with pytest.raises(nvmeio.TransferError) as caught:
        await write
    assert caught.value.errno == errno.EIO


@on_every_loop
async def test_fsync_of_what_is_not_there(handle: nvmeio.AioHandle, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        await handle.fsync(tmp_path / "missing")
    assert isinstance(caught.value, nvmeio.TransferError)
    assert caught.value.operation == "open"
    with pytest.raises(nvmeio.TransferError) as closed:
        await handle.fsync(9999)
    assert closed.value.errno == errno.EBADF
