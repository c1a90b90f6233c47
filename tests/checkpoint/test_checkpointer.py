"""`Checkpointer` in one process: what is saved and when, how much memory, which arguments."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import io
import os
import threading
import time
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint._checkpointers import (
    check_file,
    file_of,
    large_state,
    names,
    scramble,
    state_of,
)
from checkpoint._objects import SAFE, UNSAFE, assert_same, assert_tied
from contract.operating import threads_in
from faults._support import MIB
from inside import saver_of
from support import PATIENCE_S, HeldEngine, on_every_loop, spin_until, thread, until

import nvmeio
from nvmeio._memory import mappings
from nvmeio.checkpoint._manager.job import SaveJob
from nvmeio.testing import FakeEngine

OBJECTS = {**SAFE, **UNSAFE}


# The state may change


async def test_inference_tensors_are_saved_as_any(directory: Path) -> None:
    with torch.inference_mode():
        state: dict[str, Any] = {"a": torch.arange(5000.0), "b": [torch.ones(1 << 20)]}
        model = torch.nn.Linear(4, 4)
    with nvmeio.Checkpointer(directory) as checkpointer:
        await checkpointer.save(state, 1)
        with torch.inference_mode():
            state["a"].zero_()
        await checkpointer.wait()
        found = checkpointer.restore()
        assert torch.equal(found["a"], torch.arange(5000.0)) and not found["a"].is_inference()
        assert_same(found["b"], state["b"])
    with nvmeio.Checkpointer(directory / "training") as checkpointer:
        assert checkpointer.resume(model=model) == 0
        checkpointer.save_sync(checkpointer.training_state(), 2)
        checkpointer.wait_sync()
        with torch.inference_mode():
            model.weight.zero_()
            assert checkpointer.resume(model=model) == 3
        assert model.weight.any()


@pytest.mark.parametrize("name", OBJECTS)
async def test_the_state_may_change_once_saved(
    name: str, held: nvmeio.Checkpointer, engine_held: HeldEngine
) -> None:
    state = OBJECTS[name]()
    reference = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some layouts are in beta
        torch.save(state, reference)
        await held.save(state, 1)
        scramble(state)
        engine_held.gate.set()
        await held.wait()
        reference.seek(0)
        wanted = torch.load(reference, weights_only=False)
        assert_same(held.restore(weights_only=False), wanted)
        found = torch.load(file_of(Path(held.directory), 1), weights_only=False)
    assert_same(found, wanted)
    if name == "tied":
        assert_tied(found)
        assert_tied(held.restore())


async def test_training_goes_on(new: Any) -> None:
    """What is restored is the model and the optimizer of that very step."""
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []

    def train() -> float:
        loss = model(torch.linspace(0, 1, 300)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    checkpointer = new(keep=3)
    for step in range(6):
        losses.append(train())
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        await checkpointer.save(state, step)
    await checkpointer.wait()
    for step in (2, 3, 4):
        found = checkpointer.restore(step)
        assert found["step"] == step
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        assert train() == losses[step + 1]


def test_the_state_is_let_go_of_before_it_is_durable(
    new: Any, new_handle: Any, engine_held: HeldEngine
) -> None:
    """The whole state was kept until the last byte was written, beside the snapshot."""
    held = new(handle=new_handle(engine_held, block_size=MIB), snapshot="copy")
    tensor = nvmeio.empty_aligned(MIB, dtype=torch.uint8).fill_(7)
    address = tensor.data_ptr()
    held.save_sync({"a": tensor}, 1)
    engine_held.wait_until_begun()
    assert mappings.mapped.covers(address, MIB)
    del tensor
    # A thread that has just handed its work on may still be letting go of it.
    spin_until(lambda: gc.collect() >= 0 and not mappings.mapped.covers(address, MIB))
    assert held.steps() == []
    engine_held.gate.set()
    held.wait_sync()
    assert bool((held.restore()["a"] == 7).all())


# Saving, waiting


@on_every_loop
async def test_save_and_wait(tmp_path: Path) -> None:
    async with nvmeio.Checkpointer(tmp_path / "c") as checkpointer:
        assert await checkpointer.wait() is None
        report = await checkpointer.save(state_of(3), 3)
        assert (report.step, report.durable, report.written_s) == (3, False, None)
        durable = await checkpointer.wait()
        assert durable is not None and durable.durable and durable.recycled is False
        assert durable.written_s is not None and durable.written_s >= 0
        assert report.path == str(file_of(tmp_path / "c", 3))
        assert report.nbytes == os.stat(report.path).st_size
        assert report.copied_bytes == 5000 * 4 + 7 * 4 <= report.snapshot_bytes
        times = report.waited_s + report.planned_s + report.memory_s + report.stalled_s
        assert 0 < times <= report.held_s and report.stalled_s == 0
        assert_same(await checkpointer.async_restore(), state_of(3))


async def test_save_returns_before_anything_is_written(
    held: nvmeio.Checkpointer, engine_held: HeldEngine, directory: Path
) -> None:
    await held.save(state_of(0), 0)
    engine_held.wait_until_begun()
    assert "writing step 0" in repr(held)
    assert held.steps() == []
    (temporary,) = names(directory)
    assert temporary.endswith(".nvmeio-tmp")
    with nvmeio.Checkpointer(directory, read_only=True) as other:
        assert other.latest_step() is None
        with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
            other.restore()
    engine_held.gate.set()
    await held.wait()
    assert names(directory) == ["latest", "step-00000000.pt"]
    assert "writing" not in repr(held) and "open" in repr(held)


class Part:
    """Of a training: a number."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


@pytest.mark.parametrize("how", ["restore", "async_restore", "resume", "async_resume", "latest"])
def test_what_was_just_saved_is_what_comes_back(
    how: str, held: nvmeio.Checkpointer, engine_held: HeldEngine
) -> None:
    """The checkpoint before came back, without a word: a roll-back went further than asked."""
    part = Part(1)
    engine_held.gate.set()
    held.resume(part=part)
    held.save_sync(held.training_state(), 100)
    held.wait_sync()
    engine_held.gate.clear()
    part.value = 2
    held.save_sync(held.training_state(), 200)
    part.value = 3
    engine_held.wait_until_begun()
    opening = threading.Timer(0.2, engine_held.gate.set)
    opening.start()
    if how == "restore":
        assert held.restore()["part"] == {"value": 2}
    elif how == "async_restore":
        assert asyncio.run(held.async_restore())["part"] == {"value": 2}
    elif how == "resume":
        assert held.resume(part=part) == 201 and part.value == 2
    elif how == "async_resume":
        assert asyncio.run(held.async_resume(part=part)) == 201 and part.value == 2
    else:
        assert held.latest_step() == 200
    opening.join()


def test_progress_may_ask_for_the_latest_step(directory: Path) -> None:
    """The thread that writes a save must not wait for its end."""
    seen: list[int | None] = []
    with nvmeio.Checkpointer(directory) as checkpointer:
        checkpointer.save_sync(state_of(1), 1)
        checkpointer.wait_sync()

        def ask(*_: object) -> None:
            seen.append(checkpointer.latest_step())

        checkpointer.save_sync(state_of(2), 2, progress=ask)
        checkpointer.wait_sync()
        assert seen and set(seen) == {1}


def test_a_cancelled_restore_does_not_wait_for_the_save(
    held: nvmeio.Checkpointer, engine_held: HeldEngine
) -> None:
    async def cancelled() -> None:
        await held.save(state_of(1), 1)
        for begin in (held.async_restore(), held.async_resume()):
            waiting = asyncio.create_task(begin)
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        engine_held.gate.set()

    asyncio.run(asyncio.wait_for(cancelled(), 20))


def test_a_plain_loop(directory: Path) -> None:
    with nvmeio.Checkpointer(directory, keep=2) as checkpointer:
        assert checkpointer.wait_sync() is None
        for step in range(5):
            assert not checkpointer.save_sync(state_of(step), step).durable
        report = checkpointer.wait_sync()
        assert report is not None and report.durable and report.step == 4
        assert checkpointer.wait_sync() == report
        checkpointer.save_sync(state_of(5), 5)
    assert checkpointer.closed
    assert checkpointer.steps() == [3, 4, 5]  # durable: the with statement has waited
    for step in (3, 4, 5):
        check_file(file_of(directory, step), step)


async def test_async_with_waits_until_all_is_durable(directory: Path) -> None:
    async with nvmeio.Checkpointer(directory) as checkpointer:
        await checkpointer.save(state_of(0), 0)
    assert checkpointer.closed and checkpointer.steps() == [0]
    check_file(file_of(directory, 0), 0)


def test_waiting_with_a_time_limit(held: nvmeio.Checkpointer, engine_held: HeldEngine) -> None:
    held.save_sync(state_of(0), 0)
    for timeout in (0, 0.01):
        with pytest.raises(TimeoutError, match="step 0 is not durable"):
            held.wait_sync(timeout)
    engine_held.gate.set()
    report = held.wait_sync(PATIENCE_S)
    assert report is not None and report.durable


async def test_a_second_save_waits_for_the_first(
    held: nvmeio.Checkpointer, engine_held: HeldEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the event loop goes on meanwhile."""
    first = await held.save(state_of(0), 0)
    waiting: list[float] = []

    def wait(job: SaveJob, timeout: float | None, real: Any = SaveJob.wait) -> bool:
        waiting.append(time.perf_counter())
        return bool(real(job, timeout))

    monkeypatch.setattr(SaveJob, "wait", wait)
    second = asyncio.create_task(held.save(state_of(1), 1))
    await until(lambda: len(waiting) > 3)
    assert not second.done()
    waited_s = time.perf_counter() - waiting[0]
    assert held.steps() == []
    engine_held.gate.set()
    report = await second
    assert report.waited_s >= waited_s
    assert report.snapshot_bytes == first.snapshot_bytes  # memory of one, not of two
    assert 0 in held.steps()
    await held.wait()
    assert held.steps() == [0, 1]


@on_every_loop
async def test_several_tasks_may_be_made_of_a_save(
    held: nvmeio.Checkpointer, engine_held: HeldEngine
) -> None:
    """Looking up now and then from a long wait failed: the second task drove the first one's."""
    await held.save(state_of(0), 0)
    saving = held.save(state_of(1), 1)
    # Its own tasks, not `shield`'s: whoever finds it ended goes on before those are woken.
    tasks = [asyncio.create_task(saving) for _ in range(2)]
    for task in tasks:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(task), 0.01)
    tasks += [asyncio.create_task(saving) for _ in range(3)]
    engine_held.gate.set()
    reports = await asyncio.gather(*tasks)
    assert reports == [await saving] * 5
    assert reports[0].step == 1


@on_every_loop
async def test_a_task_of_a_save_that_is_cancelled_before_it_began_cancels_the_save(
    held: nvmeio.Checkpointer, engine_held: HeldEngine
) -> None:
    await held.save(state_of(0), 0)
    saving = asyncio.create_task(held.save(state_of(1), 1))
    saving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saving
    engine_held.gate.set()
    await held.wait()
    assert held.steps() == [0]


async def test_waiting_is_for_what_was_saved_before(
    held: nvmeio.Checkpointer, engine_held: HeldEngine
) -> None:
    """`wait` blocked the event loop until the next save was durable, had one begun by then."""
    await held.save(state_of(1), 1)
    first = saver_of(held).last
    waiting = asyncio.create_task(held.wait())
    saving = asyncio.create_task(held.save(state_of(2), 2))
    await until(lambda: threads_in("save") > 0)
    assert first is not None
    engine_held.gate.set()
    spin_until(lambda: saver_of(held).last is not first)  # the loop comes to the end of it later
    report = await waiting
    assert report is not None and report.step == 1
    await saving
    report = await held.wait()
    assert report is not None and report.step == 2


async def test_many_tasks_save_at_once(new: Any) -> None:
    checkpointer = new(keep=100)
    reports = await asyncio.gather(*(checkpointer.save(state_of(i), i) for i in range(12)))
    assert [report.step for report in reports] == list(range(12))
    await checkpointer.wait()
    assert checkpointer.steps() == list(range(12))
    for step in range(12):
        assert_same(checkpointer.restore(step), state_of(step))


def test_many_threads_save_at_once(new: Any) -> None:
    checkpointer = new(keep=100)
    with contextlib.ExitStack() as beside:
        for step in range(6):
            beside.enter_context(thread(checkpointer.save_sync, state_of(step), step))
    checkpointer.wait_sync()
    for step in range(6):
        assert_same(checkpointer.restore(step), state_of(step))


def test_a_handle_of_the_callers_stays_open(directory: Path, new_handle: Any) -> None:
    handle = new_handle("threads", block_size=MIB)
    with nvmeio.Checkpointer(directory, handle=handle) as checkpointer:
        checkpointer.save_sync(state_of(0), 0)
    assert not handle.closed and handle.stats.bytes_written >= 20000
    before = handle.stats.operations
    assert_same(checkpointer.restore(), state_of(0))
    assert handle.stats.operations == before  # a closed one does not use it


def test_without_checksums(new: Any, directory: Path) -> None:
    checkpointer = new(checksum=False)
    checkpointer.save_sync(state_of(0), 0)
    checkpointer.wait_sync()
    assert_same(torch.load(file_of(directory, 0)), state_of(0))
    with zipfile.ZipFile(file_of(directory, 0)) as archive:
        assert archive.getinfo("archive/data/0").CRC == 0


# Memory


async def test_a_state_that_is_larger_than_the_memory_streams(
    new: Any, new_handle: Any, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slow = FakeEngine(delay_s=lambda kind, *_: 0.002 if kind == "pwrite" else 0)
    checkpointer = new(
        keep=1, memory_bytes=64 * MIB, snapshot="copy", handle=new_handle(slow, block_size=MIB)
    )
    for step, nbytes in enumerate((100 * MIB, MIB, 110 * MIB)):  # the last one is recycled
        caplog.clear()
        state = large_state(nbytes) | {"step": step}
        report = await checkpointer.save(state, step)
        scramble(state)
        assert not report.durable
        if nbytes > MIB:
            assert report.snapshot_bytes == 64 * MIB < report.copied_bytes
            assert 0 < report.stalled_s < report.held_s
            assert f"waited {report.stalled_s:.3f} s" in caplog.text
            assert "more than the snapshot memory of 64.0 MiB" in caplog.text
            assert "memory_bytes (64 MiB or more)" in caplog.text
        await checkpointer.wait()
        assert_same(torch.load(file_of(directory, step)), large_state(nbytes) | {"step": step})
        with zipfile.ZipFile(file_of(directory, step)) as archive:
            assert archive.testzip() is None


def test_a_budget_that_is_too_small_to_work_with(new: Any) -> None:
    """64 MiB are used then, as is documented, and no more."""
    checkpointer = new(memory_bytes=1, snapshot="copy")
    report = checkpointer.save_sync(large_state(70 * MIB), 0)
    assert report.snapshot_bytes == 64 * MIB
    checkpointer.wait_sync()
    assert_same(checkpointer.restore(), large_state(70 * MIB))


def test_memory_is_that_of_the_largest_snapshot(new: Any, directory: Path) -> None:
    checkpointer = new(keep=1, snapshot="copy")
    held = [
        checkpointer.save_sync(state_of(step, numel), step).snapshot_bytes
        for step, numel in enumerate((1000, 2_000_000, 10, 1_000_000))
    ]
    assert held[0] < held[1] == held[2] == held[3] < 9 * MIB
    checkpointer.wait_sync()
    check_file(file_of(directory, 3), 3, 1_000_000)
    checkpointer.close()
    assert saver_of(checkpointer).setup.snapshots.copies.nbytes == 0


def test_a_streaming_save_fails_at_once(new: Any, new_handle: Any, directory: Path) -> None:
    """The state is not all copied yet when the drive fails: the call itself says so."""
    failing = [False]

    def fail(kind: str, offset: int, nbytes: int) -> int:
        return errno.ENOSPC if failing[0] and kind == "pwrite" and offset > 50 * MIB else 0

    checkpointer = new(
        keep=1,
        memory_bytes=64 * MIB,
        snapshot="copy",
        handle=new_handle(FakeEngine(fail=fail), block_size=MIB),
    )
    for step in range(2):
        checkpointer.save_sync(state_of(step), step)
    failing[0] = True
    with pytest.raises(nvmeio.TransferError) as raised:
        checkpointer.save_sync(large_state(200 * MIB), 2)
    assert raised.value.errno == errno.ENOSPC
    assert names(directory) == ["latest", "step-00000001.pt"]  # the oldest was recycled
    report = checkpointer.wait_sync()
    assert report is not None and report.step == 1
    failing[0] = False
    checkpointer.save_sync(state_of(3), 3)
    checkpointer.wait_sync()
    assert checkpointer.steps() == [1, 3]


# Arguments


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"keep": 0}, ValueError, "keep must be 1 or more, not 0"),
        ({"keep": -1}, ValueError, "keep must be 1 or more"),
        ({"keep": 1.0}, TypeError, "keep must be an int"),
        ({"keep": True}, TypeError, "keep must be an int"),
        ({"keep": None}, TypeError, "keep must be an int"),
        ({"memory_bytes": 0}, ValueError, "memory_bytes must be 1 or more"),
        ({"memory_bytes": 1.5}, TypeError, "memory_bytes must be an int"),
        ({"layout": "two"}, ValueError, "layout must be 'one' or 'per_rank', not 'two'"),
        ({"timeout_s": 0}, ValueError, "timeout_s must be more than 0"),
        ({"timeout_s": float("nan")}, ValueError, "timeout_s must be more than 0"),
        ({"handle": "libaio"}, TypeError, "handle must be an nvmeio.AioHandle"),
        ({"process_group": "WORLD"}, TypeError, r"torch\.distributed\.group\.WORLD"),
    ],
)
def test_wrong_parameters(options: Any, error: Any, text: str, directory: Path) -> None:
    with pytest.raises(error, match=text):
        nvmeio.Checkpointer(directory, **options)
    assert not directory.exists()


@pytest.mark.parametrize(
    ("path", "error"),
    [(7, TypeError), (None, TypeError), (b"x", TypeError), ("", ValueError), ("a\0b", ValueError)],
)
def test_no_directory(path: Any, error: Any) -> None:
    with pytest.raises(error):
        nvmeio.Checkpointer(path)


def test_a_file_is_no_directory(directory: Path) -> None:
    directory.write_bytes(b"")
    with pytest.raises(NotADirectoryError, match="needs a directory, not a file"):
        nvmeio.Checkpointer(directory)


@pytest.mark.parametrize(
    ("step", "error"),
    [(-1, ValueError), (1.0, TypeError), ("1", TypeError), (None, TypeError), (True, TypeError)],
)
async def test_a_wrong_step(step: Any, error: Any, new: Any, directory: Path) -> None:
    checkpointer = new()
    with pytest.raises(error, match="step must be"):
        checkpointer.save_sync(state_of(0), step)
    with pytest.raises(error, match="step must be"):
        await checkpointer.save(state_of(0), step)
    if step is not None:
        with pytest.raises(error, match="step must be"):
            checkpointer.restore(step)
        with pytest.raises(error, match="step must be"):
            await checkpointer.async_restore(step)
    assert names(directory) == []


def test_steps_of_every_kind(new: Any, directory: Path) -> None:
    """Whatever has `__index__`, and more than eight digits."""
    checkpointer = new(keep=5)
    for step in (0, torch.tensor(7), 123_456_789_012):
        checkpointer.save_sync({"at": int(step)}, step)
    checkpointer.wait_sync()
    assert checkpointer.steps() == [0, 7, 123_456_789_012]
    assert (directory / "step-123456789012.pt").exists()
    assert checkpointer.restore() == {"at": 123_456_789_012}


def test_a_step_whose_name_is_too_long(new: Any, directory: Path) -> None:
    checkpointer = new()
    checkpointer.save_sync({}, 10**300)
    with pytest.raises(nvmeio.TransferError) as raised:
        checkpointer.wait_sync()
    assert raised.value.errno == errno.ENAMETOOLONG and names(directory) == []


def test_a_directory_that_is_deep_relative_or_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative one stays where it was when the process goes elsewhere."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "a/b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with nvmeio.Checkpointer("a/b/c") as checkpointer:
        checkpointer.save_sync(state_of(0), 0)
        checkpointer.wait_sync()
        monkeypatch.chdir("elsewhere")
        checkpointer.save_sync(state_of(1), 1)
    assert names(tmp_path / "a/b/c") == ["latest", "step-00000000.pt", "step-00000001.pt"]
    assert names(tmp_path / "elsewhere") == []
    (tmp_path / "link").symlink_to("a/b/c")
    with nvmeio.Checkpointer(tmp_path / "link", keep=1) as checkpointer:
        for step in (2, 3):
            checkpointer.save_sync(state_of(step), step)
        checkpointer.wait_sync()
        assert checkpointer.steps() == [2, 3]
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(nvmeio.TransferError, match="dangling"):
        nvmeio.Checkpointer(tmp_path / "dangling")


# A save that nobody awaits


async def test_save_that_is_not_awaited_is_done_by_the_end_of_with(
    new: Any, directory: Path
) -> None:
    """It saved nothing, and the program ended with status 0."""
    async with new(keep=5) as checkpointer:
        for step in range(3):
            checkpointer.save(state_of(step), step)
    for step in range(3):
        check_file(file_of(directory, step), step)


def test_save_without_a_loop_has_taken_its_snapshot(new: Any, directory: Path) -> None:
    with new() as checkpointer:
        state = state_of(1)
        checkpointer.save(state, 1)
        scramble(state)
    check_file(file_of(directory, 1), 1)


async def test_error_of_a_save_that_nobody_awaited_is_raised_by_with(new: Any) -> None:
    checkpointer = new()
    with pytest.raises(ArithmeticError, match="mine"):
        async with checkpointer:
            checkpointer.save([Unpicklable()], 1)
    await checkpointer.aclose()  # once


async def test_error_of_a_save_that_nobody_awaited_is_raised_by_wait(new: Any) -> None:
    checkpointer = new()
    checkpointer.save([Unpicklable()], 1)
    with pytest.raises(ArithmeticError, match="mine"):
        await checkpointer.wait()
    assert await checkpointer.wait() is None


async def test_error_that_was_awaited_is_not_raised_again(new: Any) -> None:
    async with new() as checkpointer:
        with pytest.raises(ArithmeticError, match="mine"):
            await checkpointer.save([Unpicklable()], 1)


class Unpicklable:
    def __reduce__(self) -> Any:
        raise ArithmeticError("mine")
