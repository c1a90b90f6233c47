"""Ctrl-C at any moment of a single operation: nothing hangs, nothing leaks, the same call works."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import interrupting
import pytest
import torch
from support import (
    bytes_tensor,
    collect,
    new_descriptors,
    open_descriptors,
    random_bytes,
    raw,
    spin_until_collected,
)

import nvmeio
from nvmeio import _bindings
from nvmeio._core.records import LiveRecords
from nvmeio._files.descriptors import Descriptors

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="reads 3.11's exception tables")

# Every seventh place of libaio's; all of all where NVMEIO_INTERRUPT_PLACES=all, as `make stress`
# has it. syscalls has the same Python, fake is for tests, and stands on threads, the portable one:
# every few places will do there.
STEPS = {"libaio": 7, "syscalls": 23, "fake": 23, "threads": 13}
Everywhere = Callable[[Callable[[], object]], Iterator[str]]

SIZE = 5000
DATA = random_bytes(SIZE)
PATIENCE_S = 60.0
Make = Callable[..., nvmeio.AioHandle]


@pytest.fixture
def everywhere(request: pytest.FixtureRequest) -> Everywhere:
    """All places of the work where Ctrl-C could be noticed, one after the other."""
    everything = os.environ.get("NVMEIO_INTERRUPT_PLACES") == "all"
    step = 1 if everything else STEPS.get(request.node.callspec.params["new_engine"], 1)
    return lambda work: interrupting.everywhere(work, step=step)


@pytest.fixture
def file(path: Path) -> Path:
    path.write_bytes(DATA)
    return path


def settle(handle: nvmeio.AioHandle) -> None:
    """Whatever went on all the same is over now, and nothing of it is left."""
    try:
        handle.wait(PATIENCE_S)
    except concurrent.futures.TimeoutError as hangs:
        raise AssertionError("an interrupted operation is never done") from hangs
    except nvmeio.NvmeioError:
        pass


def check(handle: nvmeio.AioHandle, file: Path, where: str, before: dict[int, str]) -> None:
    settle(handle)
    try:
        spin_until_collected(lambda: str(file) not in open_descriptors().values())
    except AssertionError as left:
        raise AssertionError(f"the file stays open after an interrupt at {where}") from left
    tensor = torch.zeros(SIZE, dtype=torch.uint8)
    operation = handle.async_pread(tensor, file)
    assert operation.result(PATIENCE_S) == SIZE, where
    assert raw(tensor) == DATA, where
    assert tensor.untyped_storage().resizable(), where


def test_a_read_in_a_thread(handle: nvmeio.AioHandle, file: Path, everywhere: Everywhere) -> None:
    tensor = torch.zeros(SIZE, dtype=torch.uint8)
    before = open_descriptors()
    for where in everywhere(lambda: handle.sync_pread(tensor, file)):
        check(handle, file, where, before)
        assert tensor.untyped_storage().resizable(), where


@pytest.mark.parametrize("bound", [True, False], ids=["handle.open", "nvmeio.open"])
def test_short_transfers_of_an_open_file(
    bound: bool, handle: nvmeio.AioHandle, file: Path, everywhere: Everywhere
) -> None:
    page = torch.zeros(4096, dtype=torch.uint8)
    page[:] = bytes_tensor(DATA[:4096])
    tensor = torch.zeros(512, dtype=torch.uint8)

    def work() -> None:
        with (handle.open if bound else nvmeio.open)(file, "r+") as opened:
            written = handle.async_pwrite(page, opened)
            handle.async_pread(tensor, opened, 4096).result(PATIENCE_S)
            written.result(PATIENCE_S)

    before = open_descriptors()
    for where in everywhere(work):
        check(handle, file, where, before)
        assert tensor.untyped_storage().resizable(), where
        assert page.untyped_storage().resizable(), where
    assert raw(tensor) == DATA[4096 : 4096 + 512]


def test_a_write_in_a_thread(handle: nvmeio.AioHandle, file: Path, everywhere: Everywhere) -> None:
    tensor = bytes_tensor(DATA)
    before = open_descriptors()
    for where in everywhere(lambda: handle.sync_pwrite(tensor, file)):
        check(handle, file, where, before)


def test_a_staged_read(handle: nvmeio.AioHandle, file: Path, everywhere: Everywhere) -> None:
    tensor = torch.zeros(2 * SIZE, dtype=torch.uint8)[::2]
    before = open_descriptors()
    for where in everywhere(lambda: handle.sync_pread(tensor, file)):
        check(handle, file, where, before)
        assert tensor.untyped_storage().resizable(), where


def test_a_gather(handle: nvmeio.AioHandle, file: Path, everywhere: Everywhere) -> None:
    out, places = torch.zeros(50, 60, dtype=torch.uint8), torch.arange(50) * 90
    before = open_descriptors()
    for where in everywhere(lambda: handle.sync_gather(out, file, file_offsets=places)):
        check(handle, file, where, before)
        assert out.untyped_storage().resizable(), where
        assert places.untyped_storage().resizable(), where
    assert raw(out[49]) == DATA[49 * 90 :][:60]


def test_a_batch(handle: nvmeio.AioHandle, file: Path, everywhere: Everywhere) -> None:
    parts = [torch.zeros(50, dtype=torch.uint8) for _ in range(3)]
    with nvmeio.open(file) as opened:
        before = open_descriptors()
        for where in everywhere(
            lambda: handle.sync_pread_batch(parts, [file, opened, file], [9, 100, 7])
        ):
            settle(handle)
            spin_until_collected(lambda: not new_descriptors(before))
            assert handle.sync_pread_batch(parts, opened, [9, 100, 7]) == 150, where
            assert [raw(part) for part in parts] == [DATA[at : at + 50] for at in (9, 100, 7)]
            assert all(part.untyped_storage().resizable() for part in parts), where


def test_a_scatter(handle: nvmeio.AioHandle, file: Path, everywhere: Everywhere) -> None:
    rows = bytes_tensor(DATA).clone().view(50, 100)
    before = open_descriptors()
    for where in everywhere(
        lambda: handle.sync_scatter(rows, file, file_offsets=[100 * row for row in range(50)])
    ):
        check(handle, file, where, before)
        assert rows.untyped_storage().resizable(), where


def test_a_flush(handle: nvmeio.AioHandle, file: Path, everywhere: Everywhere) -> None:
    before = open_descriptors()
    for where in everywhere(lambda: handle.sync_fsync(file)):
        check(handle, file, where, before)


def test_a_wait_for_all(handle: nvmeio.AioHandle, file: Path, everywhere: Everywhere) -> None:
    tensor = torch.zeros(SIZE, dtype=torch.uint8)
    before = open_descriptors()

    def work() -> None:
        handle.async_pread(tensor, file)
        handle.async_pread(tensor, file.parent / "missing")
        with pytest.raises(FileNotFoundError):
            handle.wait()

    for where in everywhere(work):
        check(handle, file, where, before)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in its __del__
def test_a_file_that_is_opened_and_closed(
    handle: nvmeio.AioHandle, file: Path, everywhere: Everywhere
) -> None:
    tensor = torch.zeros(SIZE, dtype=torch.uint8)
    before = open_descriptors()

    def work() -> None:
        with nvmeio.open(file) as opened:
            handle.sync_pread(tensor, opened)

    for where in everywhere(work):
        check(handle, file, where, before)


def test_an_await(handle: nvmeio.AioHandle, file: Path, everywhere: Everywhere) -> None:
    """The loop is run on after the interrupt: whoever awaits is woken."""
    before = open_descriptors()
    loop = asyncio.new_event_loop()
    tensors = [torch.zeros(SIZE, dtype=torch.uint8) for _ in range(3)]

    async def read(tensor: torch.Tensor) -> int:
        return await handle.async_pread(tensor, file)

    async def ends(tasks: list[asyncio.Task[int]]) -> None:
        done, pending = await asyncio.wait(tasks, timeout=PATIENCE_S)
        assert not pending, f"{len(pending)} tasks were never woken"
        for task in done:
            if not task.cancelled() and task.exception() is not None:
                assert isinstance(task.exception(), KeyboardInterrupt)

    try:
        tasks: list[asyncio.Task[int]] = []

        def work() -> None:
            tasks[:] = [loop.create_task(read(tensor)) for tensor in tensors]
            loop.run_until_complete(asyncio.gather(*tasks))

        for where in everywhere(work):
            try:
                loop.run_until_complete(ends(tasks))
            except AssertionError as wrong:
                raise AssertionError(f"after an interrupt at {where}: {wrong}") from wrong
            # A task keeps its exception, and that the frames that it came through.
            assert raw(tensors[0]) == DATA or tasks[0].exception() is not None
            tasks.clear()
            check(handle, file, where, before)
    finally:
        loop.close()


def test_closing(make_handle: Make, file: Path, everywhere: Everywhere) -> None:
    tensor = torch.zeros(SIZE, dtype=torch.uint8)
    made = [make_handle()]

    def work() -> None:
        made[-1].async_pread(tensor, file)
        made[-1].close()

    for where in everywhere(work):
        made[-1].close()
        assert made[-1].closed, where
        with pytest.raises(nvmeio.ClosedError):
            made[-1].async_pread(tensor, file)
        made.append(make_handle())


@pytest.mark.filterwarnings("ignore:.*was dropped, not left:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_lease_of_a_pool() -> None:
    pools = [nvmeio.PinnedPool(1 << 20)]

    def work() -> None:
        with pools[-1].take(1 << 20) as lease:
            lease.fill_(1)

    for where in interrupting.everywhere(work):
        collect()
        if "__exit__" in where and pools[-1].in_use_bytes:
            pools.append(nvmeio.PinnedPool(1 << 20))  # as `take` documents
        with pools[-1].take(1 << 20, timeout=PATIENCE_S):
            pass
        assert pools[-1].in_use_bytes == 0, where
    assert len(pools) < 5
    for pool in pools:
        pool.close()


class Losing:
    """The shim, where close(2) may tell of an error: the descriptor is not open any more."""

    def __init__(self) -> None:
        self.losing = False
        self._lib = _bindings.lib

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lib, name)

    def nv_fds_close(self, raw: Any) -> int:
        for fd in (raw.direct, raw.buffered):
            if self.losing and fd >= 0:
                os.close(fd)
        return int(self._lib.nv_fds_close(raw))


@pytest.mark.parametrize("batch", [False, True], ids=["one", "batch"])
@pytest.mark.parametrize("noticed", ["in a thread", "by the loop"])
def test_what_closing_the_file_told_is_not_lost(
    path: Path, monkeypatch: pytest.MonkeyPatch, noticed: str, batch: bool
) -> None:
    """NFS and friends report lost writes there, and once."""
    started: list[nvmeio.Operation] = []
    tensor = bytes_tensor(DATA)
    shim = Losing()

    def start() -> nvmeio.Operation:
        shim.losing = False
        started.clear()
        if batch:
            others = [path.with_name(name) for name in ("one", "two")]
            started.append(handle.async_pwrite_batch([tensor, tensor], others))
        else:
            started.append(handle.async_pwrite(tensor, path))
        shim.losing = True
        return started[0]

    async def write() -> None:
        with contextlib.suppress(nvmeio.TransferError):
            await start()

    def work() -> None:
        if noticed == "by the loop":
            asyncio.run(write())
        else:
            start().exception(PATIENCE_S)

    tried = 0
    with nvmeio.AioHandle(engine="threads") as handle:
        monkeypatch.setattr(_bindings, "lib", shim)
        for where in interrupting.everywhere(work):
            settle(handle)
            for operation in started:
                failed = operation.exception(PATIENCE_S)
                assert isinstance(failed, nvmeio.TransferError), where
                assert (failed.operation, failed.errno) == ("close", errno.EBADF), where
                tried += 1
        shim.losing = False
    assert tried > 20


@pytest.mark.parametrize("bound", [True, False], ids=["a bound file", "a path"])
def test_a_second_interrupt_as_a_start_is_undone(
    bound: bool,
    handle: nvmeio.AioHandle,
    file: Path,
    everywhere: Everywhere,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The file stayed open, and the operation in flight for ever, though nothing had begun."""
    tensor = torch.zeros(512, dtype=torch.uint8)
    hold, add = Descriptors.hold, LiveRecords.add

    def interrupted(call: Callable[..., None]) -> Callable[..., None]:
        def then(*args: Any) -> None:
            call(*args)
            raise KeyboardInterrupt

        return then

    def work() -> None:
        with handle.open(file) as opened, monkeypatch.context() as patch:
            patch.setattr(Descriptors, "hold", interrupted(hold))
            patch.setattr(LiveRecords, "add", interrupted(add))
            if bound:
                opened.pread(tensor, 0)
            else:
                handle.async_pread(tensor, file)

    before = open_descriptors()
    for where in everywhere(work):
        check(handle, file, where, before)
        assert tensor.untyped_storage().resizable(), where
