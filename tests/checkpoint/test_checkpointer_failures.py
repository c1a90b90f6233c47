"""A `Checkpointer` whose saves fail, are cancelled or interrupted; and how it ends."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import random
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint._checkpointers import (
    check_file,
    file_of,
    large_state,
    names,
    state_of,
)
from checkpoint._objects import assert_same, noise
from contract.operating import threads_in
from faults._support import MIB
from inside import saver_of
from support import HeldEngine, spin_until, thread, until

import nvmeio
from nvmeio._memory import mappings
from nvmeio._storage.locks import become_writer, lock_directory, unlock
from nvmeio.checkpoint import SaveReport
from nvmeio.checkpoint._manager import saver
from nvmeio.testing import FakeEngine

# Failures


class Switch:
    """An errno that every write meets, while it is set."""

    def __init__(self) -> None:
        self.errno = 0
        self.engine = FakeEngine(fail=lambda kind, *_: self.errno if kind == "pwrite" else 0)


@pytest.fixture
def switch() -> Switch:
    return Switch()


def spin_until_failed(checkpointer: nvmeio.Checkpointer) -> None:
    job = saver_of(checkpointer).unfinished
    assert job is not None
    spin_until(job.failed)


@pytest.fixture
def failed(new: Any, new_handle: Any, switch: Switch) -> nvmeio.Checkpointer:
    """With steps 0 to 2, and a failed save of step 3 that nobody has seen yet."""
    checkpointer: nvmeio.Checkpointer = new(keep=2, handle=new_handle(switch.engine))
    for step in range(3):
        checkpointer.save_sync(state_of(step), step)
    checkpointer.wait_sync()
    switch.errno = errno.EIO
    checkpointer.save_sync(state_of(3), 3)
    spin_until_failed(checkpointer)
    switch.errno = 0
    return checkpointer


async def save(checkpointer: nvmeio.Checkpointer) -> object:
    return await checkpointer.save(state_of(4), 4)


async def save_sync(checkpointer: nvmeio.Checkpointer) -> object:
    return checkpointer.save_sync(state_of(4), 4)


async def wait(checkpointer: nvmeio.Checkpointer) -> object:
    return await checkpointer.wait()


async def wait_sync(checkpointer: nvmeio.Checkpointer) -> object:
    return checkpointer.wait_sync()


@pytest.mark.parametrize("call", [save, save_sync, wait, wait_sync])
async def test_a_failure_is_raised_at_the_next_call(
    call: Any, failed: nvmeio.Checkpointer, directory: Path
) -> None:
    before = [1, 2]  # the oldest was to be overwritten
    with pytest.raises(nvmeio.TransferError) as raised:
        await call(failed)
    assert raised.value.errno == errno.EIO
    assert failed.steps() == before and failed.latest_step() == 2
    assert names(directory) == ["latest", "step-00000001.pt", "step-00000002.pt"]
    for step in before:
        check_file(file_of(directory, step), step)
    assert await failed.wait() is None  # once
    assert failed.wait_sync() is None
    failed.save_sync(state_of(5), 5)
    report = await failed.wait()
    assert report is not None and report.step == 5
    assert failed.steps() == [1, 2, 5]
    assert_same(failed.restore(), state_of(5))


@pytest.mark.parametrize("look", ["restore", "latest_step", "async_restore"])
def test_a_failure_before_a_restore_is_logged_and_raised_by_the_next_call(
    look: str, failed: nvmeio.Checkpointer, caplog: pytest.LogCaptureFixture
) -> None:
    if look == "latest_step":
        assert failed.latest_step() == 2
    elif look == "restore":
        assert_same(failed.restore(), state_of(2))
    else:
        assert_same(asyncio.run(failed.async_restore()), state_of(2))
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert "step 3 was not saved" in record.getMessage()
    with pytest.raises(nvmeio.TransferError):
        failed.wait_sync()


async def test_everybody_who_waits_learns_of_a_failure(
    new: Any, new_handle: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them got None before, as if all were well."""
    gate = threading.Event()
    engine = FakeEngine(hold=gate, fail=lambda kind, *_: errno.EIO if kind == "pwrite" else 0)
    checkpointer = new(handle=new_handle(engine))
    await checkpointer.save(state_of(0), 0)
    job = saver_of(checkpointer).last
    wait, waited_for = job.wait, threading.Event()

    def noting(timeout: float | None) -> bool:
        waited_for.set()
        return bool(wait(timeout))

    monkeypatch.setattr(job, "wait", noting)
    waiting = [asyncio.create_task(checkpointer.wait()) for _ in range(3)]
    waiting.append(asyncio.create_task(checkpointer.save(state_of(1), 1)))
    await until(waited_for.is_set)  # the save, by a thread; `wait` has noted what it waits for
    gate.set()
    failures = await asyncio.gather(*waiting, return_exceptions=True)
    assert [getattr(each, "errno", each) for each in failures] == [errno.EIO] * 4
    assert await checkpointer.wait() is None and names(directory) == []


@pytest.mark.parametrize("way", ["close", "aclose", "with", "async with"])
async def test_closing_raises_a_failure(way: str, failed: nvmeio.Checkpointer) -> None:
    with pytest.raises(nvmeio.TransferError, match="EIO"):
        if way == "close":
            failed.close()
        elif way == "aclose":
            await failed.aclose()
        elif way == "with":
            with failed:
                pass
        else:
            async with failed:
                pass
    assert failed.closed
    failed.close()
    await failed.aclose()
    assert failed.steps() == [1, 2]


@pytest.mark.parametrize("way", ["with", "async with"])
async def test_a_failure_does_not_hide_another(way: str, failed: nvmeio.Checkpointer) -> None:
    with (
        pytest.warns(ResourceWarning, match="a save failed too.*EIO"),
        pytest.raises(ArithmeticError),
    ):
        if way == "with":
            with failed:
                raise ArithmeticError
        async with failed:
            raise ArithmeticError
    assert failed.closed


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_failures_of_the_drive(
    code: int, new: Any, new_handle: Any, switch: Switch, directory: Path
) -> None:
    checkpointer = new(keep=1, handle=new_handle(switch.engine))
    for step in range(8):
        switch.errno = code if step % 2 else 0
        checkpointer.save_sync(state_of(step), step)
        if step % 2:
            with pytest.raises(nvmeio.TransferError) as raised:
                checkpointer.wait_sync()
            assert raised.value.errno == code
        else:
            checkpointer.wait_sync()
        assert checkpointer.latest_step() == step - step % 2
        assert_same(checkpointer.restore(), state_of(step - step % 2))
        assert not [name for name in names(directory) if "tmp" in name]


@pytest.mark.parametrize("call", ["fdatasync", "rename", "symlink", "fsync", "ftruncate"])
def test_failures_of_the_commit(
    call: str, new: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = new(keep=2)
    checkpointer.save_sync(state_of(0), 0)
    checkpointer.wait_sync()

    def fail(*arguments: Any) -> None:
        raise OSError(errno.EIO, "the drive is gone")

    with monkeypatch.context() as broken:
        broken.setattr(os, call, fail)
        checkpointer.save_sync(state_of(1), 1)
        with pytest.raises(nvmeio.TransferError) as raised:
            checkpointer.wait_sync()
    assert raised.value.errno == errno.EIO and str(directory) in str(raised.value)
    assert not [name for name in names(directory) if "tmp" in name]
    assert checkpointer.latest_step() == 0
    assert_same(checkpointer.restore(), state_of(0))
    checkpointer.save_sync(state_of(2), 2)
    checkpointer.wait_sync()
    assert_same(checkpointer.restore(), state_of(2))


@pytest.mark.parametrize("while_writing", [True, False])
def test_the_directory_is_removed(
    while_writing: bool, held: nvmeio.Checkpointer, engine_held: HeldEngine, directory: Path
) -> None:
    """All later saves failed: a directory was made only once."""
    if not while_writing:
        engine_held.gate.set()
    held.save_sync(state_of(0), 0)
    if while_writing:
        engine_held.wait_until_begun()
        shutil.rmtree(directory)
        engine_held.gate.set()
        with pytest.raises(FileNotFoundError, match="step-00000000"):
            held.wait_sync()
    else:
        held.wait_sync()
        shutil.rmtree(directory)
    held.save_sync(state_of(1), 1)
    held.wait_sync()
    assert held.steps() == [1] and held.latest_step() == 1
    with pytest.raises(nvmeio.TransferError, match="another Checkpointer"):  # it has its lock
        nvmeio.Checkpointer(directory).save_sync({}, 1)


def test_the_directory_turns_into_a_file(new: Any, directory: Path) -> None:
    checkpointer = new()
    directory.rmdir()
    directory.write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        checkpointer.save_sync(state_of(0), 0)
    directory.unlink()
    checkpointer.save_sync(state_of(0), 0)
    checkpointer.wait_sync()
    assert checkpointer.steps() == [0]


@pytest.mark.skipif(os.geteuid() != 0, reason="to be somebody else takes root")
def test_a_directory_that_is_not_writable(new_handle: Any) -> None:
    handle = new_handle("threads")
    folder = Path(tempfile.mkdtemp(prefix="nvmeio-readonly-"))
    try:
        folder.chmod(0o755)
        checkpointer = nvmeio.Checkpointer(folder, handle=handle)
        os.seteuid(65534)
        try:
            checkpointer.save_sync(state_of(0), 0)
            with pytest.raises(PermissionError, match="must be writable"):
                checkpointer.wait_sync()
        finally:
            os.seteuid(0)
        assert names(folder) == []
        checkpointer.save_sync(state_of(1), 1)
        checkpointer.close()
        assert checkpointer.steps() == [1]
    finally:
        shutil.rmtree(folder)


def test_a_state_that_cannot_be_pickled(new: Any, directory: Path) -> None:
    checkpointer = new(keep=1)
    for step in range(2):
        checkpointer.save_sync(state_of(step), step)
    with pytest.raises(Exception, match="pickle"):
        checkpointer.save_sync({"a": noise(MIB), "b": lambda: None}, 2)
    report = checkpointer.wait_sync()
    assert report is not None and report.step == 1
    assert names(directory) == ["latest", "step-00000000.pt", "step-00000001.pt"]
    checkpointer.save_sync(state_of(3), 3)
    checkpointer.wait_sync()
    assert checkpointer.steps() == [1, 3]


def test_no_memory(new: Any, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = new(snapshot="copy")
    checkpointer.save_sync(state_of(0), 0)
    checkpointer.wait_sync()

    def refuse(mapping: mappings.Mapping) -> None:
        raise MemoryError("there is none")

    with monkeypatch.context() as broken:
        broken.setattr(mappings.Mapping, "populate", refuse)
        with pytest.raises(MemoryError, match="there is none"):
            checkpointer.save_sync(state_of(1, 500_000), 1)
    assert checkpointer.steps() == [0] and len(names(directory)) == 2
    checkpointer.save_sync(state_of(1, 500_000), 1)
    checkpointer.wait_sync()
    assert checkpointer.steps() == [0, 1]


def test_a_handle_that_its_owner_closes(new: Any, new_handle: Any, directory: Path) -> None:
    handle = new_handle("threads")
    checkpointer = new(handle=handle)
    checkpointer.save_sync(state_of(0), 0)
    checkpointer.wait_sync()
    handle.close()
    checkpointer.save_sync(state_of(1), 1)
    checkpointer.wait_sync()
    assert names(directory) == ["latest", "step-00000000.pt", "step-00000001.pt"]
    check_file(file_of(directory, 1), 1)
    assert_same(checkpointer.restore(0), state_of(0))


def test_a_handle_that_is_closed_while_a_save_is_written(
    new: Any, directory: Path, engine_held: HeldEngine
) -> None:
    """The save was lost: its next write was refused, and a line of the log said so."""
    handle = nvmeio.AioHandle(engine=engine_held)
    checkpointer = new(handle=handle)
    checkpointer.save_sync(state_of(1, 30_000_000), 1)
    closing = threading.Thread(target=handle.close)
    closing.start()
    spin_until(lambda: handle.closed)
    engine_held.gate.set()
    closing.join(60)
    checkpointer.close()
    check_file(file_of(directory, 1), 1, 30_000_000)


@pytest.mark.parametrize("numel", [1000, 20 * MIB], ids=["in memory", "streaming"])
def test_no_more_threads(
    numel: int, new: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that streamed hung: it waited for a thread that had not begun."""
    checkpointer = new(memory_bytes=1, snapshot="copy")
    state = state_of(0, numel)
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name == "nvmeio-checkpointer":
            raise RuntimeError("can't start new thread")
        start(self)

    with monkeypatch.context() as broken:
        broken.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            checkpointer.save_sync(state, 0)
    assert names(directory) == [] and checkpointer.wait_sync() is None
    checkpointer.save_sync(state_of(1), 1)
    checkpointer.wait_sync()
    assert checkpointer.steps() == [1]


def test_fewer_threads_for_the_copies(new: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = new(snapshot="copy")
    start = threading.Thread.start
    refused: list[str] = []

    def refuse(self: threading.Thread) -> None:
        if self.name == "nvmeio-snapshot":
            refused.append(self.name)
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    checkpointer.save_sync(state_of(0, 20 * MIB), 0)
    checkpointer.wait_sync()
    assert refused
    assert_same(checkpointer.restore(), state_of(0, 20 * MIB))


# Cancelling, Ctrl-C


async def test_cancelling_a_save_that_waits(
    held: nvmeio.Checkpointer, engine_held: HeldEngine
) -> None:
    await held.save(state_of(0), 0)
    second = asyncio.create_task(held.save(state_of(1), 1))
    await until(lambda: threads_in("save") > 0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    engine_held.gate.set()
    report = await held.wait()
    assert report is not None and report.step == 0
    assert held.steps() == [0]
    await held.save(state_of(2), 2)
    await held.wait()
    assert held.steps() == [0, 2]


async def test_cancelling_a_save_that_streams(
    new: Any, engine_held: HeldEngine, new_handle: Any, directory: Path
) -> None:
    """While the snapshot is taken: nothing of it is left."""
    engine_held.gate.set()
    checkpointer = new(
        keep=1,
        memory_bytes=64 * MIB,
        snapshot="copy",
        handle=new_handle(engine_held, block_size=MIB),
    )
    for step in range(2):
        await checkpointer.save(state_of(step), step)
    await checkpointer.wait()
    engine_held.gate.clear()
    begun = engine_held.begun
    saving = asyncio.create_task(checkpointer.save(large_state(), 2))
    await until(lambda: engine_held.begun > begun)
    saving.cancel()
    await asyncio.sleep(0.02)
    assert not saving.done()  # the kernel still has what was begun
    engine_held.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await saving
    assert names(directory) == ["latest", "step-00000001.pt"]
    report = await checkpointer.wait()
    assert report is not None and report.step == 1
    await checkpointer.save(state_of(3), 3)
    await checkpointer.wait()
    assert checkpointer.steps() == [1, 3]


async def test_cancelling_a_wait_cancels_no_save(
    held: nvmeio.Checkpointer, engine_held: HeldEngine
) -> None:
    await held.save(state_of(0), 0)
    for _ in range(3):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(held.wait(), 0.01)
    engine_held.gate.set()
    report = await held.wait()
    assert report is not None and report.durable
    assert held.steps() == [0]


async def test_cancelling_a_close_closes(
    held: nvmeio.Checkpointer, engine_held: HeldEngine
) -> None:
    await held.save(state_of(0), 0)
    closing = asyncio.create_task(held.aclose())
    await until(lambda: held.closed)
    closing.cancel()
    await asyncio.sleep(0.02)
    assert not closing.done()
    engine_held.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert held.closed and held.steps() == [0]


async def test_cancelled_at_random_moments(new: Any, directory: Path) -> None:
    """Each is there wholly or not at all, and the next one works."""
    checkpointer = new(keep=1)
    moments = random.Random(1)
    cancelled = 0
    for step in range(40):
        saving = asyncio.create_task(checkpointer.save(state_of(step, 200_000), step))
        await asyncio.sleep(moments.choice((0, moments.uniform(0, 0.006))))
        saving.cancel()
        try:
            await saving
        except asyncio.CancelledError:
            cancelled += 1
        if moments.random() < 0.5:
            await checkpointer.wait()
            if directory.exists():  # else the first one was cancelled before it began
                assert not [name for name in names(directory) if "tmp" in name]
            for found in checkpointer.steps():
                check_file(file_of(directory, found), found, 200_000)
    assert cancelled > 5
    await checkpointer.save(state_of(99), 99)
    await checkpointer.wait()
    assert checkpointer.latest_step() == 99 and len(checkpointer.steps()) <= 2


def test_interrupted_while_it_streams(
    new: Any, new_handle: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of the copying."""
    sent: list[bool] = []

    def interrupt(kind: str, offset: int, nbytes: int) -> int:
        if kind == "pwrite" and offset >= 40 * MIB and not sent:
            sent.append(True)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            spin_until(cancelled.is_set)  # so nothing more is written before it is noticed
        return 0

    cancel, cancelled = saver.SaveCall.cancel, threading.Event()

    def noting(call: saver.SaveCall) -> None:
        cancel(call)
        cancelled.set()

    monkeypatch.setattr(saver.SaveCall, "cancel", noting)
    handle = new_handle(FakeEngine(fail=interrupt), block_size=MIB)
    checkpointer = new(keep=1, memory_bytes=64 * MIB, snapshot="copy", handle=handle)
    checkpointer.save_sync(state_of(0), 0)
    with pytest.raises(KeyboardInterrupt):
        checkpointer.save_sync(large_state(400 * MIB), 1)
    assert names(directory) == ["latest", "step-00000000.pt"]
    checkpointer.save_sync(state_of(2), 2)
    checkpointer.wait_sync()
    assert checkpointer.steps() == [0, 2]


def test_interrupted_while_closing(held: nvmeio.Checkpointer, engine_held: HeldEngine) -> None:
    """The next `close` returned at once, with the save under way and the directory locked."""
    held.save_sync(state_of(0), 0)

    def interrupt() -> None:
        spin_until(lambda: held.closed)  # so the main thread is within `close`, and stays there
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with thread(interrupt), pytest.raises(KeyboardInterrupt):
        held.close()
    with pytest.raises(nvmeio.ClosedError):
        held.save_sync(state_of(1), 1)
    threading.Timer(0.05, engine_held.gate.set).start()
    held.close()
    assert held.steps() == [0]
    with nvmeio.Checkpointer(held.directory) as another:
        another.save_sync(state_of(1), 1)


# The end


async def test_use_after_close(new: Any, directory: Path) -> None:
    checkpointer = new()
    checkpointer.save_sync(state_of(0), 0)
    checkpointer.close()
    checkpointer.close()
    assert checkpointer.closed and "closed" in repr(checkpointer)
    with pytest.raises(nvmeio.ClosedError, match="make a new one"):
        checkpointer.save_sync(state_of(1), 1)
    with pytest.raises(nvmeio.ClosedError):
        await checkpointer.save(state_of(1), 1)
    report = checkpointer.wait_sync()
    assert report == await checkpointer.wait() and report is not None and report.durable
    assert checkpointer.steps() == [0] and checkpointer.latest_step() == 0
    assert_same(checkpointer.restore(), state_of(0))
    assert_same(await checkpointer.async_restore(0), state_of(0))


def test_closing_without_a_save(new: Any, directory: Path) -> None:
    new().close()
    assert names(directory) == []


async def test_closing_beside_saves(new: Any) -> None:
    """Each save is either refused or durable."""
    checkpointer = new(keep=100)
    saving = [asyncio.create_task(checkpointer.save(state_of(i), i)) for i in range(8)]
    await asyncio.sleep(0.01)
    await checkpointer.aclose()
    ended = await asyncio.gather(*saving, return_exceptions=True)
    saved = [each.step for each in ended if isinstance(each, SaveReport)]
    refused = [each for each in ended if isinstance(each, nvmeio.ClosedError)]
    assert len(saved) + len(refused) == 8 and checkpointer.steps() == saved


def test_dropped_while_it_writes(directory: Path, engine_held: HeldEngine, new_handle: Any) -> None:
    checkpointer = nvmeio.Checkpointer(directory, handle=new_handle(engine_held))
    checkpointer.save_sync(state_of(0), 0)
    with pytest.warns(
        ResourceWarning, match="step 0 is being written, and will be finished"
    ) as told:
        del checkpointer
        spin_until(lambda: gc.collect() >= 0 and bool(told.list))
    engine_held.gate.set()
    with nvmeio.Checkpointer(directory) as another:  # once nobody else has the directory
        assert another.latest_step() == 0
        another.save_sync(state_of(1), 1)
        another.wait_sync()
        assert another.steps() == [0, 1]
        assert_same(another.restore(0), state_of(0))


@pytest.fixture
def dropped(directory: Path, engine_held: HeldEngine, new_handle: Any) -> Iterator[threading.Event]:
    """A directory whose Checkpointer was dropped while it writes step 0, until this is set."""
    checkpointer = nvmeio.Checkpointer(directory, handle=new_handle(engine_held))
    checkpointer.save_sync(state_of(0), 0)
    with pytest.warns(ResourceWarning, match="will be finished") as told:
        del checkpointer
        spin_until(lambda: gc.collect() >= 0 and bool(told.list))
    yield engine_held.gate
    engine_held.gate.set()


def test_dropped_one_ends_just_after_the_directory_was_tried(
    directory: Path, dropped: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = []

    def tried(path: str, hint: str = "") -> int:
        try:
            return lock_directory(path, hint)
        except nvmeio.TransferError as busy:
            refused.append(busy)
            if len(refused) == 3:
                dropped.set()
                spin_until(lambda: is_free(directory))
            raise

    monkeypatch.setattr(saver, "lock_directory", tried)
    with nvmeio.Checkpointer(directory) as another:
        assert another.latest_step() == 0
    assert len(refused) == 3


def test_dropped_one_is_late_to_give_the_directory_back(
    directory: Path, dropped: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def tried(path: str, hint: str = "") -> int:
        tries.append(path)
        return lock_directory(path, hint)

    def late(fd: int) -> None:
        before = len(tries)
        spin_until(lambda: len(tries) > before + 3)
        unlock(fd)

    monkeypatch.setattr(saver, "lock_directory", tried)
    with monkeypatch.context() as patched:
        patched.setattr(saver, "unlock", late)
        dropped.set()
        another = nvmeio.Checkpointer(directory)
    with another:
        assert another.latest_step() == 0


def is_free(directory: Path) -> bool:
    fd = os.open(directory, os.O_RDONLY)
    try:
        return become_writer(fd)
    finally:
        os.close(fd)


def test_dropped_with_a_failure(
    directory: Path, switch: Switch, new_handle: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody will ask: so it is in the log."""
    switch.errno = errno.EIO
    checkpointer = nvmeio.Checkpointer(directory, handle=new_handle(switch.engine))
    checkpointer.save_sync(state_of(0), 0)
    spin_until_failed(checkpointer)
    with pytest.warns(ResourceWarning, match="step 0 failed") as told:
        del checkpointer
        spin_until(lambda: gc.collect() >= 0 and bool(told.list))
    spin_until(lambda: "step 0 was not saved" in caplog.text)
    assert "EIO" in caplog.text
    assert any(record.levelno == logging.ERROR for record in caplog.records)


def test_dropped_when_all_is_well(directory: Path) -> None:
    checkpointer = nvmeio.Checkpointer(directory)
    checkpointer.save_sync(state_of(0), 0)
    checkpointer.wait_sync()
    del checkpointer
    with nvmeio.Checkpointer(directory) as another:
        another.save_sync(state_of(1), 1)
    assert another.steps() == [0, 1]
