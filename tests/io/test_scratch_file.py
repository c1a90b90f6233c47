"""Room without a name: taken, given back, taken again before the files grow."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import nvmeio
from nvmeio._io import drives
from nvmeio._io.drives import ScratchFile
from nvmeio._storage import durable


@pytest.fixture(autouse=True)
def grows_by_what_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drives, "_LEAST_GROWTH_BYTES", 4096)


def made(*directories: Path) -> ScratchFile:
    for each in directories:
        each.mkdir()
    return ScratchFile([str(each) for each in directories])


def sizes(file: ScratchFile) -> list[int]:
    found = []
    for each in file.files:
        opened = each.acquire("test")
        found.append(os.fstat(opened.any_fd()).st_size)
        opened.let_go("test")
    return found


def test_room_that_was_given_back_is_taken_again(tmp_path: Path) -> None:
    file = made(tmp_path / "a")
    first = file.take(10_000)
    file.give_back(first, 10_000)
    assert file.take(12_288) == first
    assert (file.used_bytes, sizes(file)) == (12_288, [12_288])
    file.close()


def test_a_full_drive_leaves_the_others_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = made(tmp_path / "a", tmp_path / "b")
    place = file.take(100_000)
    before = sizes(file)
    reserve = durable.reserve

    def full(fd: int, nbytes: int, path: str) -> None:
        if os.path.dirname(path) == str(tmp_path / "b"):
            raise nvmeio.TransferError(errno.ENOSPC, operation="fallocate", path=path)
        reserve(fd, nbytes, path)

    with monkeypatch.context() as patch:
        patch.setattr(durable, "reserve", full)
        with pytest.raises(nvmeio.TransferError):
            file.take(30 << 20)
    assert (sizes(file), file.nbytes) == (before, sum(before))
    assert file.used_bytes == 102_400
    file.give_back(place, 100_000)
    assert file.take(30 << 20) >= 0  # now there is room
    assert sum(sizes(file)) == file.nbytes
    file.close()
