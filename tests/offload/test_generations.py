"""Generations: what is durable, what an interrupted commit leaves, copies, locks and leftovers."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _offload_models import assert_same_weights, loss_of, model, train
from inside import swapper_of
from support import PATIENCE_S, run_python

import nvmeio
from nvmeio.offload import SwappedOptimizer
from nvmeio.offload._generations import state_files
from nvmeio.offload._swap_files import manifests

SMALL: dict[str, Any] = {"subgroup_bytes": 64 << 10}


def swapped(made: Any, folder: Path, **options: Any) -> SwappedOptimizer:
    return SwappedOptimizer(
        torch.optim.Adam, made.parameters(), swap_dir=folder, **{**SMALL, **options}
    )


def newest(optimizer: SwappedOptimizer) -> Any:
    return manifests.newest(optimizer.swap_dir)


# Durable


def test_data_that_was_lost_is_told_of_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells of it once; a second fdatasync succeeds, and the data is lost all the same.

    The step after the one that failed went on, and what it called durable was not.
    """
    made = model()
    optimizer = swapped(made, tmp_path)
    train(made, optimizer, 1)
    engine: Any = swapper_of(optimizer)
    engine.store.settle()

    lost = threading.Event()

    def lose(file: Any, data_only: bool) -> None:
        lost.set()
        raise nvmeio.TransferError(errno.EIO, operation="fsync", path="state")

    with monkeypatch.context() as patch:
        patch.setattr(engine.handles, "sync_fsync", lose)
        train(made, optimizer, 1, 1)
        assert lost.wait(PATIENCE_S)
    before = [p.detach().clone() for p in made.parameters()]
    for _ in range(2):
        loss_of(made, 2).backward()
        with pytest.raises(nvmeio.TransferError, match="generation 3 may be lost") as told:
            optimizer.step()
        assert told.value.errno == errno.EIO
    assert all(map(torch.equal, made.parameters(), before))
    found = newest(optimizer)  # what is gone on from
    assert (found.generation, found.durable) == (2, True)
    with pytest.raises(nvmeio.TransferError, match="may be lost"):
        optimizer.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("times", [1, 3])
def test_a_mark_that_fails_is_made_before_anything_is_overwritten(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step wrote over the only generation that was durable."""
    made = model()
    left = [times]

    def fail(directory: str, manifest: Any) -> None:
        if left[0]:
            left[0] -= 1
            raise nvmeio.TransferError(errno.ENOSPC, operation="write", path=directory)
        mark(directory, manifest)

    mark = manifests.mark_durable
    with swapped(made, tmp_path) as optimizer:
        engine: Any = swapper_of(optimizer)
        engine.store.settle()
        monkeypatch.setattr(manifests, "mark_durable", fail)
        loss_of(made, 0).backward()
        optimizer.step()
        for _ in range(times - 1):
            with pytest.raises(nvmeio.TransferError):
                optimizer.step()
            assert optimizer.generation == 2
        optimizer.step()
        engine.store.settle()
        assert (newest(optimizer).generation, newest(optimizer).durable) == (3, True)


@pytest.mark.parametrize("resume", [False, True])
def test_a_directory_that_goes_before_its_optimizer_matters_if_it_was_to_be_kept(
    resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a TemporaryDirectory that ended first, the program's status was 0 or 120 by chance."""
    made = model()
    swap_dir = tmp_path / "swap"
    mark, gone = manifests.mark_durable, threading.Event()

    def mark_late(directory: str, manifest: Any) -> None:
        assert gone.wait(PATIENCE_S)
        mark(directory, manifest)

    optimizer = swapped(made, swap_dir, resume=resume)
    swapper_of(optimizer).store.settle()
    monkeypatch.setattr(manifests, "mark_durable", mark_late)
    loss_of(made, 0).backward()
    optimizer.step()
    shutil.rmtree(swap_dir)
    gone.set()
    if not resume:
        optimizer.close()
        return
    with pytest.raises(nvmeio.TransferError) as raised:
        optimizer.close()
    assert raised.value.errno == errno.ENOENT


def test_what_makes_a_generation_durable_makes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It made the manifest anew while `rmtree` removed its directory: "Directory not empty"."""
    made, swap_dir = model(), tmp_path / "swap"
    mark, gone, marked = manifests.mark_durable, threading.Event(), threading.Event()

    def mark_late(directory: str, manifest: Any) -> None:
        assert gone.wait(PATIENCE_S)
        try:
            mark(directory, manifest)
        finally:
            marked.set()

    optimizer = swapped(made, swap_dir)
    swapper_of(optimizer).store.settle()
    monkeypatch.setattr(manifests, "mark_durable", mark_late)
    loss_of(made, 0).backward()
    optimizer.step()
    files = [path for path in swap_dir.rglob("*") if path.is_file()]
    assert any(path.name.startswith("manifest") for path in files)
    for path in files:
        path.unlink()
    gone.set()
    assert marked.wait(PATIENCE_S)
    assert not [path for path in swap_dir.rglob("*") if path.is_file()]
    shutil.rmtree(swap_dir)
    optimizer.close()


def test_settled_at_the_end_of_the_program_a_generation_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The helper's thread runs no more then, and what it had taken up counted as durable."""
    made = model()
    taken_up, gate = threading.Event(), threading.Event()
    with swapped(made, tmp_path) as optimizer:
        engine: Any = swapper_of(optimizer)
        engine.store.settle()
        sync = engine.handles.sync_fsync

        def stop(file: Any, data_only: bool) -> None:
            if threading.current_thread().name == "nvmeio-offload-help":
                taken_up.set()
                gate.wait(PATIENCE_S)
            sync(file, data_only)

        try:
            with monkeypatch.context() as patch:
                patch.setattr(engine.handles, "sync_fsync", stop)
                loss_of(made, 0).backward()
                optimizer.step()
                assert taken_up.wait(PATIENCE_S)
                patch.setattr(sys, "is_finalizing", lambda: True)
                engine.store.settle()
                assert (newest(optimizer).generation, newest(optimizer).durable) == (2, True)
        finally:
            gate.set()


def test_what_was_not_durable_says_so_after_a_reboot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said that no manifest was whole, and they were."""
    made = model()
    with swapped(made, tmp_path, resume=True, durable=False) as optimizer:
        train(made, optimizer, 2)
    monkeypatch.setattr(manifests, "boot_id", lambda: "another boot")
    with pytest.raises(nvmeio.IntegrityError, match="has restarted since"):
        swapped(made, tmp_path, resume=True)


# Commits that fail


def half_written(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data[: len(data) // 2])
    raise nvmeio.TransferError(errno.ENOSPC, operation="write", path=path)


def written_and_interrupted(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
    raise KeyboardInterrupt


@pytest.mark.parametrize("truncates", [True, False])
@pytest.mark.parametrize("broken", [half_written, written_and_interrupted])
def test_a_commit_that_fails_leaves_no_manifest_of_it(
    broken: Any, truncates: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole one stayed, while the next attempt wrote over the data that it spoke of."""
    made, theirs = model(), model()

    def refuse(*args: Any) -> None:
        raise OSError(errno.EIO, "truncate")

    with swapped(made, tmp_path, resume=True) as optimizer:
        train(made, optimizer, 2)
        engine: Any = swapper_of(optimizer)
        engine.store.settle()
        loss_of(made, 2).backward()
        before = [p.detach().clone() for p in made.parameters()]
        with monkeypatch.context() as patch:
            patch.setattr(manifests, "_write", broken)
            if not truncates:
                patch.setattr("os.truncate", refuse)
                engine.store.prepare = engine.store.settle  # it would refuse before
            with pytest.raises((nvmeio.TransferError, KeyboardInterrupt)):
                optimizer.step()
        vars(engine.store).pop("prepare", None)
        assert all(map(torch.equal, made.parameters(), before))
        assert optimizer.generation == 3
        # The next attempt: no data has been written yet, and the manifest is gone.
        engine.store.prepare()
        assert newest(optimizer).generation == 3
        optimizer.step()
        optimizer.zero_grad()
    train(theirs, torch.optim.Adam(theirs.parameters()), 3)
    assert_same_weights(made, theirs)


def test_the_generation_that_is_written_over_loses_its_manifest_first(tmp_path: Path) -> None:
    """Should the newest manifest get lost, the one before spoke of data that was half there."""
    made = model()
    with swapped(made, tmp_path, resume=True) as optimizer:
        train(made, optimizer, 2)
        engine: Any = swapper_of(optimizer)
        assert len(manifests.read(optimizer.swap_dir).complete) == 2
        engine.store.prepare()
        assert [each.generation for each in manifests.read(optimizer.swap_dir).complete] == [3]


# Options


def test_options_of_numpy_and_of_ones_own_do_not_hinder_resuming(tmp_path: Path) -> None:
    """A learning rate computed with numpy made the manifest one that torch does not load."""
    made = model()
    with swapped(made, tmp_path, resume=True) as optimizer:
        train(made, optimizer, 1)
        group = optimizer.param_groups[0]
        group["lr"] = np.float64(0.25)
        group["initial_lr"] = np.float32(0.5)
        group["note"] = Path("x")
        group["sizes"] = {"a": [1, (2.0, None)]}
        train(made, optimizer, 1, 1)
    with swapped(made, tmp_path, resume=True, lr=7.0) as optimizer:
        group = optimizer.param_groups[0]
        assert optimizer.generation == 3
        assert (group["lr"], type(group["lr"]), group["initial_lr"]) == (0.25, float, 0.5)
        assert group["sizes"] == {"a": [1, (2.0, None)]}
        assert "note" not in group


# Copies


def test_a_snapshot_goes_to_another_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """copy_file_range refuses that (EXDEV), and so did we."""
    calls: list[int] = []

    def refuse(*args: Any) -> int:
        calls.append(1)
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    made, theirs = model(), model()
    with swapped(made, tmp_path) as optimizer:
        train(made, optimizer, 2)
        monkeypatch.setattr("os.copy_file_range", refuse)
        monkeypatch.setattr(state_files, "_FICLONE", 0)
        optimizer.snapshot(tmp_path / "copy")
    assert len(calls) == 2
    with swapped(made, tmp_path / "copy", resume=True) as optimizer:
        assert optimizer.generation == 3
        train(theirs, torch.optim.Adam(theirs.parameters()), 2)
        assert_same_weights(made, theirs)


def test_a_snapshot_counts_on_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With durable=False its manifest counted only until the machine was started anew."""
    made = model()
    with swapped(made, tmp_path, durable=False) as optimizer:
        train(made, optimizer, 2)
        optimizer.snapshot(tmp_path / "copy")
    monkeypatch.setattr(manifests, "boot_id", lambda: "another machine")
    with swapped(made, tmp_path / "copy", resume=True) as optimizer:
        assert optimizer.generation == 3


def test_a_snapshot_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt met what it had left (EEXIST)."""
    made = model()
    with swapped(made, tmp_path) as optimizer:
        train(made, optimizer, 1)

        def full(source: str, target: str, check: Any) -> None:
            copy_file(source, target)
            if target.endswith("state.1"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        copy_file = state_files.copy_file
        with monkeypatch.context() as patch:
            patch.setattr(state_files, "copy_file", full)
            with pytest.raises(nvmeio.TransferError) as told:
                optimizer.snapshot(tmp_path / "copy")
        assert told.value.errno == errno.ENOSPC
        assert list((tmp_path / "copy").iterdir()) == []
        optimizer.snapshot(tmp_path / "copy")


# The directory


def test_foreign_directory_named_optimizer_is_not_touched(tmp_path: Path) -> None:
    """A directory called "optimizer" that had been there lost all its files."""
    theirs = tmp_path / "optimizer"
    theirs.mkdir()
    (theirs / "checkpoint.pt").write_text("precious")
    (theirs / "folder").mkdir()
    made = model()
    with swapped(made, tmp_path) as optimizer:
        train(made, optimizer, 1)
    assert {path.name for path in theirs.iterdir()} == {"checkpoint.pt", "folder"}
    (theirs / "state.0").mkdir()
    with pytest.raises(nvmeio.TransferError) as told:
        swapped(made, tmp_path)
    assert str(theirs / "state.0") in str(told.value)


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """The workers of a data loader did, after their parent had closed the optimizer."""
    done = run_python(
        f"""
        import os, signal, torch, warnings
        warnings.simplefilter("ignore")
        from nvmeio.offload import SwappedOptimizer
        def make():
            return SwappedOptimizer(torch.optim.Adam, [torch.nn.Parameter(torch.ones(9))],
                                    swap_dir={str(tmp_path)!r}, resume=True)
        first = make()
        child = os.fork()
        if not child:
            signal.pause()
        try:
            first.close()
            make().close()
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        """
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no second file system")
def test_a_snapshot_really_crosses(tmp_path: Path) -> None:
    folder = Path(f"/dev/shm/nvmeio-snapshot-{os.getpid()}-{time.monotonic_ns()}")
    made = model()
    try:
        with swapped(made, tmp_path) as optimizer:
            train(made, optimizer, 1)
            optimizer.snapshot(folder)
        with swapped(made, folder, resume=True) as optimizer:
            assert optimizer.generation == 2
    finally:
        shutil.rmtree(folder, ignore_errors=True)
