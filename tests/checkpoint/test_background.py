"""`BackgroundSaver`: files of any name, whole or not there, while what they are of goes on."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoint._objects import assert_same
from support import HeldEngine, needs_protection, run_python

import nvmeio
from nvmeio._formats.torch_archives import torch_writing
from nvmeio.checkpoint.background import BackgroundSaver
from nvmeio.testing import FakeEngine


@pytest.fixture
def engine() -> Iterator[HeldEngine]:
    made = HeldEngine()
    yield made
    made.gate.set()


@pytest.fixture
def saver(engine: HeldEngine) -> Iterator[BackgroundSaver]:
    with nvmeio.AioHandle(engine=engine) as handle:
        made = BackgroundSaver(handle=handle)
        yield made
        engine.gate.set()
        made.wait()


def trained(side: int = 700) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layer = torch.nn.Linear(side, side)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0, momentum=0.9)
    layer(torch.ones(1, side)).sum().backward()
    optimizer.step()
    return layer, optimizer


@needs_protection
@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_what_is_saved_is_the_state_of_the_call(
    kind: str,
    saver: BackgroundSaver,
    engine: HeldEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever writes to it: most of it has not been read when they do."""
    monkeypatch.setattr(torch_writing, "STAGING_BYTES", 1 << 20)
    monkeypatch.setattr(torch_writing, "STAGINGS", 1)
    layer, optimizer = trained(1500)
    wanted = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    path = str(tmp_path / "weights")
    if kind == "torch":
        report = saver.save(layer.state_dict(), path)
    else:
        report = saver.save_safetensors(layer.state_dict(), path, {"format": "pt"})
    assert report.protected_bytes == report.guarded_bytes == 1500 * 1500 * 4
    assert report.copied_bytes < 1500 * 4 + 4096
    optimizer.step()
    layer.weight.data.mul_(2)
    layer.weight.detach().numpy()[:] -= 1
    engine.gate.set()
    saver.wait()
    found: Any = torch.load(path) if kind == "torch" else safetensors.torch.load_file(path)
    assert_same(dict(found), wanted)
    done = saver.last
    assert done is not None and done.durable
    assert done.moved_bytes > 0 and done.step_held_s > 0


def test_a_failure_is_raised_once_and_by_the_next_call(tmp_path: Path) -> None:
    failures = [errno.ENOSPC]

    def fail(kind: str, offset: int, nbytes: int) -> int:
        return failures[0] if kind == "pwrite" else 0

    layer, _ = trained()
    with nvmeio.AioHandle(engine=FakeEngine(fail=fail)) as handle:
        saver = BackgroundSaver(handle=handle)
        saver.save(layer.state_dict(), str(tmp_path / "a"))
        with pytest.raises(nvmeio.TransferError, match="ENOSPC"):
            saver.save(layer.state_dict(), str(tmp_path / "b"))
        assert os.listdir(tmp_path) == [] and saver.idle
        failures[0] = 0
        saver.save(layer.state_dict(), str(tmp_path / "b"))
        saver.wait()
    assert_same(dict(torch.load(tmp_path / "b")), dict(layer.state_dict()))


def test_a_failure_that_nobody_has_asked_for_is_told_by_the_exit(tmp_path: Path) -> None:
    done = run_python(
        f"""
        import errno, gc, os
        import torch
        from nvmeio import AioHandle
        from nvmeio.checkpoint.background import BackgroundSaver
        from nvmeio.testing import FakeEngine

        def full(kind, offset, nbytes):
            return errno.ENOSPC if kind == "pwrite" else 0

        handle = AioHandle(engine=FakeEngine(fail=full))
        dropped, kept, asked = (BackgroundSaver(handle=handle) for _ in range(3))
        for name, saver in {{"dropped": dropped, "kept": kept, "asked": asked}}.items():
            saver.save({{"weight": torch.ones(4)}}, os.path.join({str(tmp_path)!r}, name))
        del dropped, saver
        gc.collect()
        try:
            asked.wait()
        except OSError:
            print("told", flush=True)
        """
    )
    assert (done.returncode, done.stdout) == (120, "told\n"), done.stderr
    told = [name for name in ("dropped", "kept", "asked") if f".{name}." in done.stderr]
    assert told == ["dropped", "kept"] and "ENOSPC" in done.stderr
    assert os.listdir(tmp_path) == []


def test_what_comes_after_a_save_waits_for_it(
    saver: BackgroundSaver, engine: HeldEngine, tmp_path: Path
) -> None:
    seen: list[bool] = []
    path = tmp_path / "a"
    saver.save({"weight": torch.ones(4)}, str(path))
    saver.after(lambda: seen.append(path.exists()))
    assert seen == []
    engine.gate.set()
    saver.wait()
    assert seen == [True]


def test_a_state_that_cannot_be_pickled_leaves_nothing(
    saver: BackgroundSaver, tmp_path: Path
) -> None:
    with pytest.raises((AttributeError, pickle.PicklingError), match="local"):
        saver.save({"made here": lambda: None}, str(tmp_path / "a"))
    assert saver.idle and os.listdir(tmp_path) == []
