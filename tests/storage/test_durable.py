"""What makes names durable."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from interrupting import everywhere
from support import new_descriptors, open_descriptors, spin_until

from nvmeio._storage import durable


def test_a_new_name_is_durable_when_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    rename, fsync = os.rename, os.fsync

    def note_rename(old: str, new: str) -> None:
        steps.append("rename")
        rename(old, new)

    def note_fsync(fd: int) -> None:
        steps.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "rename", note_rename)
    monkeypatch.setattr(os, "fsync", note_fsync)
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    (tmp_path / "from" / "old").write_bytes(b"new")
    (tmp_path / "to" / "name").write_bytes(b"old")
    durable.rename(tmp_path / "from" / "old", tmp_path / "to" / "name")
    assert steps == ["rename", os.path.realpath(tmp_path / "to")]
    assert (tmp_path / "to" / "name").read_bytes() == b"new"


def test_a_name_without_a_directory_lies_in_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("old").write_bytes(b"x")
    durable.rename("old", "new")
    assert os.listdir() == ["new"]


def test_a_name_that_cannot_be_given_leaves_both_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_bytes(b"kept")
    (tmp_path / "other").mkdir()
    with pytest.raises(OSError, match="not empty"):
        durable.rename(tmp_path / "other", tmp_path / "full")
    assert sorted(os.listdir(tmp_path)) == ["full", "other"]


def test_an_interrupted_sync_leaves_no_descriptor(tmp_path: Path) -> None:
    """One came between `os.open` and what closes it."""
    durable.sync_directory(tmp_path)
    before, places = open_descriptors(), 0
    for _ in everywhere(lambda: durable.sync_directory(tmp_path)):
        places += 1
        spin_until(lambda: str(tmp_path) not in new_descriptors(before).values())
    assert places > 5
