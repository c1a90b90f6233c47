"""How fast drives are, and which handle serves which of them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import nvmeio
from nvmeio import tuned
from nvmeio._io import drives
from nvmeio._io.drives import DriveHandles, weights_of
from nvmeio.engines.base import Options
from nvmeio.tuned import Tuned


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[float | None, float | None]]:
    """By directory: what was measured for reads and writes; a file system for each first letter."""
    known: dict[str, tuple[float | None, float | None]] = {}

    def find(path: Any) -> Tuned | None:
        if path not in known:
            return None
        read, write = known[path]
        return Tuned(Options(), read_gb_per_s=read, write_gb_per_s=write)

    monkeypatch.setattr(tuned, "find", find)
    monkeypatch.setattr(tuned, "file_system_key", lambda path: str(path)[0])
    return known


def test_the_rates_decide(rates: dict[str, Any]) -> None:
    rates.update(a=(6.0, 3.0), b=(3.0, 3.0), c=(1.0, 0.5))
    assert weights_of(["a", "b", "c"]) == [600, 300, 100]
    assert weights_of(["b", "a"], reads=0.0, writes=1.0) == [500, 500]
    first, second = weights_of(["a", "b"], reads=1.0, writes=1.0)
    assert first / second == pytest.approx((1 / 3 + 1 / 3) / (1 / 6 + 1 / 3), rel=0.01)


def test_directories_of_one_file_system_share_its_rate(rates: dict[str, Any]) -> None:
    rates.update(a1=(6.0, None), a2=(6.0, None), b=(6.0, None))
    assert weights_of(["a1", "a2", "b"]) == [250, 250, 500]


@pytest.mark.parametrize("lacking", [None, (None, 1.0), (0.0, 1.0)])
def test_without_all_rates_they_are_equal(rates: dict[str, Any], lacking: Any) -> None:
    rates["a"] = (6.0, 3.0)
    if lacking is not None:
        rates["b"] = lacking
    assert weights_of(["a", "b"]) == [1, 1]


def test_damaged_settings_make_them_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(path: Any) -> None:
        raise ValueError("not a file of tuned settings")

    monkeypatch.setattr(tuned, "find", damaged)
    assert weights_of(["/", "/tmp"]) == [1, 1]


class OnDevice:
    """`os.stat`, which says that each directory lies on a device of its own."""

    def __init__(self, devices: dict[str, int]) -> None:
        self.devices = devices

    def stat(self, path: str) -> Any:
        class Facts:
            st_dev = self.devices[os.fspath(path)]

        return Facts


def test_each_drive_has_a_handle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow one would hold up the others' requests. Two directories on one share theirs."""
    real = os.stat(tmp_path).st_dev
    devices = {"a": real, "b": real + 1, "c": real}
    monkeypatch.setattr(drives, "os", OnDevice(devices))
    made: dict[str, nvmeio.AioHandle] = {}

    def new_handle(path: str) -> nvmeio.AioHandle:
        made[path] = nvmeio.AioHandle(engine="threads")
        return made[path]

    monkeypatch.setattr(drives, "new_handle", new_handle)
    handles = DriveHandles(None, ["b", "a", "c"])
    assert list(made) == ["b", "a"]
    with nvmeio.open(tmp_path / "file", "rw") as file:
        mine = handles.of(file)
        assert mine is made["a"]
        data = torch.arange(5000)
        handles.async_pwrite(data, file).result()
        handles.sync_fsync(file)
        found = torch.empty_like(data)
        handles.async_pread(found, file).result()
        assert torch.equal(found, data)
        assert mine.stats.bytes_read == mine.stats.bytes_written == data.nbytes
    handles.close()
    handles.close()
    assert all(each.closed for each in made.values())


def test_a_handle_that_cannot_be_made_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drives, "os", OnDevice({"a": 1, "b": 2}))
    made: list[nvmeio.AioHandle] = []

    def new_handle(path: str) -> nvmeio.AioHandle:
        if made:
            raise OSError(errno.EAGAIN, "no contexts are left")
        made.append(nvmeio.AioHandle(engine="threads"))
        return made[0]

    monkeypatch.setattr(drives, "new_handle", new_handle)
    with pytest.raises(OSError, match="no contexts"):
        DriveHandles(None, ["a", "b"])
    assert made[0].closed


def test_a_given_handle_serves_all_and_stays_open(tmp_path: Path) -> None:
    with nvmeio.AioHandle(engine="threads") as handle:
        handles = DriveHandles(handle, [str(tmp_path), "/"])
        with nvmeio.open(tmp_path / "file", "rw") as file:
            assert handles.of(file) is handle
        handles.close()
        assert not handle.closed
