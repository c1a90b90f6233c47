"""Where tests keep their files: room before the first, and nothing of a run that was killed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import disk_room
import pytest


def check(argument: Path, basetemp: Path | None = None) -> None:
    config: Any = SimpleNamespace(
        args=[str(argument)], option=SimpleNamespace(basetemp=basetemp and str(basetemp))
    )
    disk_room.check(config)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_folder_of_tests_needs_room(
    missing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drive was full in the middle of the tests, and not even pytest could say so."""
    asked: list[Path] = []

    def usage(place: Path) -> Any:
        asked.append(Path(place))
        return SimpleNamespace(free=disk_room.NEEDED_BYTES - missing)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    check(Path(__file__))
    assert asked == []
    if missing:
        with pytest.raises(pytest.UsageError, match=r"the tests need .* --basetemp"):
            check(tmp_path)
        with pytest.raises(pytest.UsageError, match=str(tmp_path)):
            check(tmp_path, tmp_path / "base")
    else:
        check(tmp_path)
        check(tmp_path, tmp_path / "base")
    assert asked[1] == tmp_path
    check(tmp_path, tmp_path / "not there" / "base")  # pytest refuses it
    assert len(asked) == 2


def test_what_a_killed_run_has_left_is_removed(tmp_path: Path) -> None:
    def run(name: str) -> tuple[Path, int]:
        directory = tmp_path / name
        directory.mkdir()
        (directory / ".lock").touch()  # as pytest does, until the run has ended
        return directory, disk_room.claim(directory)

    killed, descriptor = run("pytest-0")
    (killed / "popen-gw0" / "test").mkdir(parents=True)
    ended, of_ended = run("pytest-1")
    (ended / ".lock").unlink()
    (tmp_path / "pytest-current").symlink_to(killed)
    others = tmp_path / "pytest-2"
    others.mkdir()
    (others / ".lock").touch()

    beside, of_beside = run("pytest-3")
    assert killed.is_dir(), "it ran"
    os.close(descriptor)
    os.close(of_ended)
    last, of_last = run("pytest-4")
    assert not killed.exists()
    assert all(each.is_dir() for each in (ended, others, beside, last))
    os.close(of_beside)
    os.close(of_last)
