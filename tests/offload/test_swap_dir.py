"""A swap directory is ours alone: nobody else may have put anything there, or come to look."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from _offload_models import model, train
from support import new_descriptors, open_descriptors

import nvmeio
from nvmeio.offload import SwappedModule, SwappedOptimizer

OURS = ("lock", "state.0", "state.1", "manifest.0", "manifest.1", "gradients")


def swapped(folder: Path, **options: Any) -> SwappedOptimizer:
    return SwappedOptimizer(
        torch.optim.Adam, model().parameters(), swap_dir=folder, gradients="disk", **options
    )


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("name", OURS)
def test_a_planted_link_leads_nowhere(name: str, resume: bool, tmp_path: Path) -> None:
    """The file that it led to was emptied and overwritten."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious" * 4096)
    (tmp_path / "swap" / "optimizer").mkdir(parents=True)
    (tmp_path / "swap" / "optimizer" / name).symlink_to(victim)
    try:
        with swapped(tmp_path / "swap", resume=resume) as optimizer:
            train(model(), optimizer, 1)
    except nvmeio.TransferError as told:
        assert told.errno == errno.ELOOP
        assert name in str(told)
    assert victim.read_bytes() == b"precious" * 4096


def test_a_directory_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "optimizer").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(nvmeio.TransferError, match="symbolic link"):
        swapped(tmp_path)
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.root
@pytest.mark.parametrize("what", ["optimizer", "optimizer/lock", "optimizer/state.0"])
def test_what_belongs_to_another_user_is_refused(what: str, tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    (tmp_path / "optimizer").mkdir()
    if what != "optimizer":
        (tmp_path / what).write_bytes(b"theirs")
    os.chown(tmp_path / what, 65534, 65534)
    with pytest.raises(nvmeio.TransferError) as told:
        swapped(tmp_path, resume=True)
    assert told.value.errno == errno.EPERM
    assert "65534" in str(told.value)


def test_swap_directories_are_private(tmp_path: Path) -> None:
    """Also where the directory was there before, open to everybody."""
    (tmp_path / "swap" / "optimizer").mkdir(parents=True)
    (tmp_path / "swap" / "optimizer").chmod(0o777)
    before = os.umask(0)
    try:
        with (
            SwappedModule(model(), swap_dir=tmp_path / "swap", resident_bytes=1 << 20) as module,
            SwappedOptimizer(
                torch.optim.Adam,
                module.parameters(),
                swap_dir=tmp_path / "swap",
                gradients="disk",
                master_dtype=torch.float64,
            ) as optimizer,
        ):
            train(module, optimizer, 2)
            optimizer.snapshot(tmp_path / "copy")
            made = [tmp_path / "swap" / "optimizer", tmp_path / "swap" / "parameters"]
            for folder in [*made, tmp_path / "copy" / "optimizer"]:
                assert stat.S_IMODE(folder.stat().st_mode) == 0o700
                files = list(folder.iterdir())
                assert files
                assert {stat.S_IMODE(each.stat().st_mode) for each in files} == {0o600}
    finally:
        os.umask(before)


def test_a_directory_that_is_missing_is_made_one_level(tmp_path: Path) -> None:
    with swapped(tmp_path / "new"):
        assert (tmp_path / "new" / "optimizer").is_dir()
    with pytest.raises(FileNotFoundError):
        swapped(tmp_path / "neither" / "nor")
    assert not (tmp_path / "neither").exists()


def test_a_lock_whose_holder_cannot_be_read_is_closed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptor stayed open, and the error was one without a path."""

    def fails(fd: int, nbytes: int, offset: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with swapped(tmp_path / "swap"):
        before = open_descriptors()
        with monkeypatch.context() as patch:
            patch.setattr(os, "pread", fails)
            with pytest.raises(nvmeio.TransferError) as told:
                swapped(tmp_path / "swap")
        assert told.value.errno == errno.EIO and "lock" in str(told.value)
        left = new_descriptors(before).values()  # the first one's thread may have others
        assert not [path for path in left if path.endswith("/lock")]
