"""`nvmeio.load` of small files: in its caller's thread, from front to end."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint._objects import assert_same, noise
from support import cut_before_reads, run_python

import nvmeio
from nvmeio.checkpoint import _unpickling as unpickling
from nvmeio.checkpoint import loading as loading_module


@pytest.fixture(autouse=True)
def through_nvmeio(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test of this module may pass because torch.load stood in."""

    def not_by_torch(path: Any, options: Any) -> Any:
        raise AssertionError(f"torch.load stood in for {path}")

    monkeypatch.setattr(unpickling, "load_through_torch", not_by_torch)


def test_a_small_file_is_read_without_a_handle_or_a_thread(path: Path) -> None:
    """In place of torch.load it is slower where most people try it first, if it makes either."""
    torch.save({"a": torch.arange(1000), "b": torch.zeros(0)}, path)
    ran = run_python(
        f"""
        import _thread, sys, torch
        import nvmeio
        assert torch.equal(nvmeio.load({str(path)!r})["a"], torch.arange(1000))
        assert not _thread._count()
        assert "nvmeio.handle" not in sys.modules
        assert not [name for name in sys.modules if name.startswith("nvmeio.engines")]
        """
    )
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_small_file_is_read_whatever_the_default_device(device: str, path: Path) -> None:
    """It is read in its caller's thread, which may be told to make tensors elsewhere."""
    wanted = {"a": noise(100), "none": torch.zeros(0)}
    nvmeio.save(wanted, path)
    with torch.device(device):
        found = nvmeio.load(path)
    assert_same(found, wanted)


@pytest.mark.parametrize("more", [0, 1])
def test_files_around_the_largest_small_one(more: int, path: Path) -> None:
    wanted = {"a": noise(loading_module.SMALL_BYTES - 65536 * (1 - more), dtype=torch.uint8)}
    nvmeio.save(wanted, path)
    assert (path.stat().st_size > loading_module.SMALL_BYTES) == bool(more)
    assert_same(nvmeio.load(path), wanted)


def test_a_small_file_is_read_from_front_to_end(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who skips from header to header, or asks for all of it at once, gets half of a drive."""
    wanted = {str(number): noise(50_000 + number) for number in range(8)}
    nvmeio.save(wanted, path)
    ends = [0]
    preadv = os.preadv

    def watched(fd: int, buffers: Any, offset: int) -> int:
        assert offset == ends[-1]
        ends.append(offset + sum(map(len, buffers)))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", watched)
    found = nvmeio.load(path)
    assert ends[-1] > sum(tensor.nbytes for tensor in wanted.values()) and len(ends) > 8
    assert_same(found, wanted)
    assert not any(tensor.data_ptr() % 64 for tensor in found.values())


def test_a_small_file_whose_last_record_is_a_storage(path: Path) -> None:
    wanted = {"a": noise(1000), "b": noise(2000)}
    torch.save(wanted, path)
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name in sorted(records, key=lambda name: "/data/" in name):
            archive.writestr(name, records[name])
    assert_same(nvmeio.load(path), wanted)


def test_a_small_file_that_is_cut_while_it_is_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"a": noise(10_000)}, path)
    cut_before_reads(monkeypatch, path, 20_000)
    with pytest.raises(nvmeio.TransferError, match="cut"):
        nvmeio.load(path)
