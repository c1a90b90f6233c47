"""One rule for a directory that is named and missing: whatever makes files makes one level."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nvmeio
from nvmeio._kv_blocks.store import BlockStore
from nvmeio._storage.durable import make_directory
from nvmeio.inference.spilling import Spiller

STATE = {"weight": torch.ones(40, 30)}


def checkpointer(path: Path) -> None:
    with nvmeio.Checkpointer(path, overwrite=True) as made:
        made.save_sync(STATE, 1)


def optimizer(path: Path) -> None:
    model = nn.Linear(4, 4)
    nvmeio.SwappedOptimizer(torch.optim.AdamW, model.parameters(), swap_dir=path).close()


def snapshot(path: Path) -> None:
    model = nn.Linear(4, 4)
    with (
        tempfile.TemporaryDirectory() as swap,
        nvmeio.SwappedOptimizer(torch.optim.AdamW, model.parameters(), swap_dir=swap) as made,
    ):
        model(torch.ones(4)).sum().backward()
        made.step()
        made.snapshot(path)


def module(path: Path) -> None:
    nvmeio.SwappedModule(
        nn.Sequential(nn.Linear(4, 4)), swap_dir=path, resident_bytes=1 << 20
    ).close()


def blocks(path: Path) -> None:
    BlockStore(path, "blocks", 4096, 1 << 20).close()


def spilled(path: Path) -> None:
    Spiller(path).close()


def from_torch(path: Path) -> None:
    with nvmeio.FastFileWriter(path / "a.pt") as file:
        torch.save(STATE, file)


MAKERS: dict[str, Callable[[Path], Any]] = {
    "save": lambda path: nvmeio.save(STATE, path / "a.pt"),
    "save_safetensors": lambda path: nvmeio.save_safetensors(STATE, path / "a.safetensors"),
    "FastFileWriter": from_torch,
    "Checkpointer": checkpointer,
    "SwappedOptimizer": optimizer,
    "snapshot": snapshot,
    "SwappedModule": module,
    "BlockStore": blocks,
    "Spiller": spilled,
}


@pytest.mark.parametrize("maker", MAKERS)
def test_one_level_is_made_and_what_is_missing_above_is_named(maker: str, tmp_path: Path) -> None:
    """Checkpointers and stores made all levels, on the system's disk where a drive was missing."""
    MAKERS[maker](tmp_path / "made")
    assert (tmp_path / "made").is_dir()
    if maker != "snapshot":  # a copy is not overwritten
        MAKERS[maker](tmp_path / "made")
    nowhere = tmp_path / "nowhere"
    with pytest.raises(nvmeio.TransferError) as told:
        MAKERS[maker](nowhere / "below")
    assert told.value.errno == errno.ENOENT and isinstance(told.value, FileNotFoundError)
    assert f"{nowhere} does not exist either" in str(told.value)
    assert "mkdir -p" in str(told.value)
    assert not nowhere.exists()


@pytest.mark.parametrize("name", ["~", "~root"])
@pytest.mark.parametrize("maker", MAKERS)
def test_no_directory_is_made_that_a_shell_would_have_expanded(
    maker: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "~/x" made a directory named "~" here, without a word; torch.save refuses it."""
    monkeypatch.chdir(tmp_path)
    for path in (Path(name), Path(name, "below")):
        with pytest.raises(FileNotFoundError, match=r"os\.path\.expanduser\(path\)"):
            MAKERS[maker](path)
    with pytest.raises(FileNotFoundError, match=r"os\.path\.expanduser\(path\)"):
        make_directory(Path(name, "below"), above=True)
    assert not Path(name).exists()
    Path(name).mkdir()
    MAKERS[maker](Path(name, "below"))  # what is there is taken as it is


def test_directories_above_are_made_where_that_is_asked_for(tmp_path: Path) -> None:
    make_directory(tmp_path / "a" / "b" / "c", above=True, mode=0o700)
    assert (tmp_path / "a/b/c").stat().st_mode & 0o777 == 0o700
    make_directory(tmp_path / "a" / "b" / "c", above=True)
    make_directory(str(tmp_path / "a"))


@pytest.mark.parametrize("above", [False, True])
def test_file_in_place_of_a_directory_is_an_error(above: bool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nothing")
    for name in ("file", "file/below", "link"):
        with pytest.raises(nvmeio.TransferError) as told:
            make_directory(tmp_path / name, above=above)
        assert told.value.errno == errno.ENOTDIR
        assert told.value.path == str(tmp_path / name)
