"""What handle=None means: tuned where it can be, never a reason to fail, made and closed beside."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import run_program

import nvmeio
from nvmeio import tuned
from nvmeio._io import handles
from nvmeio._io.handles import CallHandle, handle_for, new_handle
from nvmeio.engines.base import Options
from nvmeio.errors import ClosedError


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of tuned settings, which is not there yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "none"))
    monkeypatch.setattr(handles, "_warned", set())
    (tmp_path / "config" / "nvmeio").mkdir(parents=True)
    return tmp_path / "config" / "nvmeio" / "tuned.json"


def test_it_is_tuned_for_the_file_system(tmp_path: Path) -> None:
    options = Options()._replace(block_size=512 << 10, queue_depth=32)
    tuned.save(tmp_path, tuned.Tuned(options))
    with new_handle(tmp_path / "not" / "there") as handle:
        assert (handle.get_block_size(), handle.get_queue_depth()) == (512 << 10, 32)


def damaged(settings: Path, how: str) -> None:
    if how == "garbage":
        settings.write_text("{")
    elif how == "directory":
        settings.mkdir()
    elif how == "binary":
        settings.write_bytes(b"\xff\xfe\x00")
    elif how == "nested":
        settings.write_text("[" * 100_000)
    elif how == "loop":
        settings.symlink_to(settings)
    else:
        values = {**Options()._asdict(), "block_size": -1, "queue_depth": 10**9}
        key = tuned.file_system_key(settings.parent)
        text = json.dumps({"format": tuned.FORMAT, "file_systems": {key: {"aio": values}}})
        settings.write_text(text)


@pytest.mark.parametrize("how", ["garbage", "directory", "binary", "nested", "loop", "values"])
def test_settings_that_cannot_be_used_are_warned_of_once(
    settings: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    damaged(settings, how)
    with caplog.at_level(logging.WARNING, "nvmeio"):
        for _ in range(3):
            with new_handle(settings.parent) as handle:
                assert handle.get_block_size() == Options().block_size
    assert caplog.text.count("not using the stored settings") == 1


def uses(tmp_path: Path) -> dict[str, Any]:
    """Public calls without a handle."""
    tensors = {"a": torch.arange(12e6)}  # smaller ones take no handle
    torch_file, safetensors_file = tmp_path / "a.pt", tmp_path / "a.safetensors"

    def checkpointer() -> None:
        with nvmeio.Checkpointer(tmp_path / "checkpoints") as mine:
            mine.save_sync(tensors, 1)

    def writer() -> None:
        torch.save(tensors, nvmeio.FastFileWriter(torch_file))
        torch.load(nvmeio.FastFileReader(torch_file))

    def optimizer() -> None:
        parameter = torch.nn.Parameter(torch.ones(100))
        (tmp_path / "swap").mkdir()
        mine = nvmeio.offload.SwappedOptimizer(
            torch.optim.AdamW, [parameter], swap_dir=tmp_path / "swap"
        )
        parameter.grad = torch.ones(100)
        mine.step()
        mine.close()

    return {
        "save": lambda: nvmeio.save(tensors, torch_file),
        "load": lambda: (nvmeio.save(tensors, torch_file), nvmeio.load(torch_file)),
        "safetensors": lambda: (
            nvmeio.save_safetensors(tensors, safetensors_file),
            nvmeio.load_safetensors(safetensors_file),
        ),
        "checkpointer": checkpointer,
        "file objects": writer,
        "optimizer": optimizer,
    }


@pytest.mark.parametrize("what", uses(Path()))
def test_damaged_settings_fail_nobody(
    settings: Path, tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings.write_text("{")
    uses(tmp_path)[what]()
    assert "not using the stored settings" in caplog.text


def test_a_given_handle_stays_open_and_an_own_one_does_not(
    tmp_path: Path, handle: nvmeio.AioHandle
) -> None:
    with handle_for(handle, tmp_path) as same:
        assert same is handle
    assert not handle.closed
    call = CallHandle(None, tmp_path)
    with call:
        own = call.get()
        call.done()
        with pytest.raises(ClosedError):
            call.get()
    assert own.closed


def test_what_goes_wrong_in_making_it_is_raised_by_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: object) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr(handles, "new_handle", fail)
    with CallHandle(None, tmp_path) as call, pytest.raises(MemoryError, match="none left"):
        call.get()


def test_interrupts_at_random_moments_leave_nothing_open_and_nothing_hangs(tmp_path: Path) -> None:
    """In a process of its own, which has to end: an interrupted join left a lock held for ever."""
    script = tmp_path / "script.py"
    script.write_text(
        """
import os, random, signal, sys, threading, time
from nvmeio._io.handles import CallHandle
moments = random.Random(int(sys.argv[1]))
interrupted = 0
calls = []
while interrupted < 60:
    call = None
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, moments.uniform(0.00005, 0.004))
            with CallHandle(None, sys.argv[2]) as call:
                call.get()
        finally:  # within the outer `try`: the signal may come just before
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        interrupted += 1
    if call is not None:
        call.done()
del call
print(interrupted)
""".replace("\nmoments", "\nsignal.signal(signal.SIGALRM, signal.default_int_handler)\nmoments", 1)
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = run_program(
        [sys.executable, str(script), "1", str(tmp_path)], timeout=500, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "60\n"
