"""`Protected`: what is left where it lies, and stays there until the end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from pinning import pinned
from support import collect, needs_protection

import nvmeio
from nvmeio._formats.torch_archives.torch_layout import StorageRecord
from nvmeio.checkpoint._snapshot import protected as protected_module
from nvmeio.checkpoint._snapshot.copies import RecordSpan
from nvmeio.checkpoint._snapshot.protected import AsideMemory, Protected

pytestmark = needs_protection


def span_of(tensor: torch.Tensor) -> RecordSpan:
    data = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return StorageRecord("tensor", 0, data.nbytes, data, ()), 0, data.nbytes


def begun(tensor: torch.Tensor) -> Protected:
    protected = Protected([span_of(tensor)], "/tmp")
    assert protected.begin(AsideMemory(), None)
    return protected


def test_the_end_of_a_second_snapshot_frees_no_memory_of_the_first() -> None:
    """`share_memory_` moved the storage then, and the first read what others had made of it."""
    tensor = torch.ones(1 << 20)
    first = begun(tensor)
    second = begun(tensor)
    assert (first.taken, second.taken) == ([0], [])
    second.end()
    with pytest.raises(RuntimeError, match="cannot move a storage to shared memory"):
        tensor.share_memory_()
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.untyped_storage().resize_(0)
    first.end()
    tensor.share_memory_()


@pytest.mark.parametrize("how", ["auto", "copy", "protect"])
def test_memory_that_others_have_pinned_is_copied(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A read into memory that io_uring had registered before the save got into the file."""
    caplog.set_level("INFO", "nvmeio")
    tensor = torch.ones(1 << 20)
    with pinned(tensor):
        with nvmeio.Checkpointer(tmp_path, snapshot=how) as checkpointer:
            report = checkpointer.save_sync({"a": tensor}, 1)
        frozen = nvmeio.snapshot({"a": tensor}, how)
        frozen.result()
        protects = how == "protect"
        assert bool(report.protected_bytes) == bool(frozen.protected_bytes) == protects
        assert ("MiB of this process are pinned by others" in caplog.text) == (how == "auto")
    frozen = nvmeio.snapshot({"a": tensor}, how)
    frozen.result()
    assert bool(frozen.protected_bytes) == (how != "copy")


def test_a_snapshot_names_what_it_does_not_know_and_where_its_overflow_cannot_go(
    tmp_path: Path,
) -> None:
    tensor = torch.ones(1 << 20)
    with pytest.raises(ValueError, match=r"how must be 'auto', 'protect' or 'copy', not 'fast'"):
        nvmeio.snapshot(tensor, "fast")
    with pytest.raises(FileNotFoundError, match="no file can be made in this directory"):
        nvmeio.snapshot(tensor, directory=tmp_path / "none")
    assert torch.equal(nvmeio.snapshot(tensor, directory=tmp_path).result(), tensor)


def test_failed_protection_leaves_storages_resizable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its storages could never be resized or shared again."""
    tensor = torch.ones(1 << 20)

    def refuse(*_: object) -> Any:
        raise MemoryError("no memory for a snapshot's tables")

    monkeypatch.setattr(protected_module, "WriteProtection", refuse)
    with pytest.raises(MemoryError, match="no memory for a snapshot's tables"):
        Protected([span_of(tensor)], "/tmp")
    collect()
    assert tensor.untyped_storage().resizable()
    tensor.share_memory_()


def test_a_forked_child_may_share_its_memory() -> None:
    """It was refused there for ever, for a save of the parent's."""
    tensor = torch.ones(1 << 20)
    protected = begun(tensor)
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)  # which copies: the others are the parent's
            resizable = tensor.untyped_storage().resizable()
            os._exit(0 if resizable and tensor.share_memory_().is_shared() else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    protected.end()
