"""Loads and saves as they are seen: their progress, their line in the log, their range."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import profile

import nvmeio

Told = list[tuple[str, int, int]]


def state() -> dict[str, torch.Tensor]:
    return {f"w{n}": torch.full((1 << 19,), float(n)) for n in range(4)}  # 2 MiB each


def assert_told(told: Told, what: str) -> None:
    """From nothing to all of it, and never back."""
    assert {each[0] for each in told} == {what}
    done = [each[1] for each in told]
    assert done == sorted(done)
    assert done[0] == 0
    assert {each[2] for each in told} == {done[-1]}
    assert done[-1] >= sum(tensor.nbytes for tensor in state().values())


def save(path: Path, progress: Any) -> object:
    return nvmeio.save(state(), path, progress=progress)


def async_save(path: Path, progress: Any) -> object:
    return asyncio.run(nvmeio.async_save(state(), path, progress=progress))


def save_safetensors(path: Path, progress: Any) -> object:
    return nvmeio.save_safetensors(state(), path, progress=progress)


def load(path: Path, progress: Any) -> object:
    nvmeio.save(state(), path)
    return nvmeio.load(path, progress=progress)


def async_load(path: Path, progress: Any) -> object:
    nvmeio.save(state(), path)
    return asyncio.run(nvmeio.async_load(path, progress=progress))


def load_safetensors(path: Path, progress: Any) -> object:
    nvmeio.save_safetensors(state(), path)
    return nvmeio.load_safetensors(path, progress=progress)


def load_to_another_device(path: Path, progress: Any) -> object:
    """Through torch.load's own place for it: a callable that keeps what is on the host."""
    nvmeio.save(state(), path)
    return nvmeio.load(path, lambda storage, location: storage, progress=progress)


SAVES = [save, async_save, save_safetensors]
LOADS = [load, async_load, load_safetensors, load_to_another_device]
Verb = Callable[[Path, Any], object]


def name_of(verb: Verb) -> str:
    return verb.__name__


def path_for(verb: Verb, directory: Path) -> Path:
    return directory / ("model" + (".safetensors" if "safetensors" in verb.__name__ else ".pt"))


@pytest.mark.parametrize("verb", [*SAVES, *LOADS], ids=name_of)
def test_progress_goes_from_nothing_to_all(verb: Verb, tmp_path: Path) -> None:
    told: Told = []
    path = path_for(verb, tmp_path)
    verb(path, lambda *event: told.append(event))
    assert_told(told, f"{'save' if verb in SAVES else 'load'} {path.name}")


@pytest.mark.parametrize("verb", [*SAVES, *LOADS], ids=name_of)
def test_progress_is_called_by_one_thread_at_a_time(verb: Verb, tmp_path: Path) -> None:
    inside, together, calls = threading.Lock(), [], 0

    def progress(*event: Any) -> None:
        nonlocal calls
        calls += 1
        if not inside.acquire(blocking=False):
            together.append(event)
            return
        Path(tmp_path, "beside").write_bytes(bytes(100))  # gives the GIL up
        inside.release()

    verb(path_for(verb, tmp_path), progress)
    assert calls > 1
    assert together == []


@pytest.mark.parametrize("call", [1, 2, -1])
@pytest.mark.parametrize("verb", SAVES, ids=name_of)
def test_a_progress_that_raises_ends_a_save_and_leaves_the_old_file(
    verb: Verb, call: int, tmp_path: Path
) -> None:
    """The first call, one on the way, and the last one, when all bytes are written."""
    path, counted = path_for(verb, tmp_path), []
    verb(path, lambda *event: counted.append(event))
    path.write_bytes(b"the old one")
    calls = 0
    last = len(counted) if call < 0 else call

    def progress(*event: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == last:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        verb(path, progress)
    assert calls == last
    assert path.read_bytes() == b"the old one"
    assert os.listdir(tmp_path) == [path.name]
    verb(path, None)
    assert path.stat().st_size > 8 << 20


@pytest.mark.parametrize("verb", LOADS, ids=name_of)
def test_a_progress_that_raises_ends_a_load(verb: Verb, tmp_path: Path) -> None:
    def progress(what: str, done: int, total: int) -> None:
        if done:
            raise KeyError("mine")

    path = path_for(verb, tmp_path)
    with pytest.raises(KeyError, match="mine"):
        verb(path, progress)
    assert verb(path, None)


def test_a_set_of_shards_is_one_work(tmp_path: Path) -> None:
    told: Told = []
    nvmeio.save_safetensors(
        state(), tmp_path, max_shard_size="3MB", progress=lambda *event: told.append(event)
    )
    assert len(list(tmp_path.glob("*.safetensors"))) == 4
    assert_told(told, f"save {tmp_path.name}")


def test_a_failing_progress_leaves_no_shard(tmp_path: Path) -> None:
    def progress(what: str, done: int, total: int) -> None:
        if done > total // 2:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        nvmeio.save_safetensors(state(), tmp_path, max_shard_size="3MB", progress=progress)
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_called_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="progress"):
        nvmeio.save({}, tmp_path / "x.pt", progress=3)  # type: ignore[arg-type]
    with nvmeio.Checkpointer(tmp_path) as checkpointer, pytest.raises(TypeError, match="progress"):
        checkpointer.save_sync({}, 1, progress=3)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == []


# Checkpointers


def test_a_checkpointer_tells_of_its_writing_and_of_a_restore(new: Any) -> None:
    written: Told = []
    restored: Told = []
    checkpointer = new()
    checkpointer.save_sync(state(), 7, progress=lambda *event: written.append(event))
    checkpointer.wait_sync()
    checkpointer.restore(progress=lambda *event: restored.append(event))
    assert_told(written, "save step-00000007.pt")
    assert_told(restored, f"restore {os.path.basename(checkpointer.directory)}")


async def test_the_awaited_ones_tell_as_well(new: Any) -> None:
    written: Told = []
    restored: Told = []
    checkpointer = new()
    await checkpointer.save(state(), 7, progress=lambda *event: written.append(event))
    await checkpointer.wait()
    await checkpointer.async_restore(progress=lambda *event: restored.append(event))
    assert_told(written, "save step-00000007.pt")
    assert_told(restored, f"restore {os.path.basename(checkpointer.directory)}")


def test_a_progress_that_raises_is_why_a_checkpoint_fails(new: Any) -> None:
    """What was there before is the latest, and the next save is one like any other."""

    def progress(what: str, done: int, total: int) -> None:
        if done == total:
            raise KeyError("mine")

    checkpointer = new()
    checkpointer.save_sync(state(), 1)
    checkpointer.wait_sync()
    with pytest.raises(KeyError, match="mine"):
        checkpointer.save_sync(state(), 2, progress=progress)
        checkpointer.wait_sync()
    assert checkpointer.steps() == [1]
    checkpointer.save_sync(state(), 3)
    checkpointer.wait_sync()
    assert checkpointer.latest_step() == 3


# The log


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]


@pytest.mark.parametrize("verb", [*SAVES, *LOADS], ids=name_of)
def test_one_line_for_each_that_is_complete(
    verb: Verb, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = path_for(verb, tmp_path)
    with caplog.at_level(logging.INFO, "nvmeio"):
        verb(path, None)
    *before, last = lines(caplog)
    assert len(before) == (verb in LOADS)  # the save that it begins with
    assert last.startswith(f"{'saved' if verb in SAVES else 'loaded'} {path}: ")
    assert last.endswith(" GB/s")


def test_one_line_for_a_checkpoint_and_one_for_a_restore(
    new: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "nvmeio"):
        checkpointer = new()
        checkpointer.save_sync(state(), 7)
        checkpointer.wait_sync()
        checkpointer.restore()
    saved, restored = lines(caplog)
    assert saved.startswith(f"saved {checkpointer.directory}/step-00000007.pt: ")
    assert restored.startswith(f"restored {checkpointer.directory}: ")


def test_a_handler_that_raises_does_not_undo_a_checkpoint(
    new: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """The line is written by the thread that has just finished the save."""

    class Raises(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise KeyError("mine")

    handler, logger = Raises(), logging.getLogger("nvmeio")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        checkpointer = new()
        checkpointer.save_sync(state(), 1)
        assert checkpointer.wait_sync().durable
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert "KeyError: 'mine'" in capfd.readouterr().err


# Profiles


def test_loads_saves_and_snapshots_are_ranges(new: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    checkpointer = new()
    with profile() as found:
        nvmeio.save(state(), path)
        asyncio.run(nvmeio.async_load(path))
        checkpointer.save_sync(state(), 1)
        checkpointer.wait_sync()
        checkpointer.restore()
    names = {event.name for event in found.events()}
    assert {f"nvmeio::{what}" for what in ("save", "load", "snapshot", "restore")} <= names
