"""Names of Lightning's checkpoints that are written while training goes on."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from integrations import _lightning
from integrations._lightning import new_module, quiet_trainer
from support import PATIENCE_S

from nvmeio.checkpoint import background
from nvmeio.integrations import lightning as plugins
from nvmeio.integrations.lightning import AsyncNvmeCheckpointIO

pl = _lightning.pl  # a fixture


class Late(AsyncNvmeCheckpointIO):
    """No file gets its name before somebody waits for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.gate = threading.Event()
        commit = background.Replacement.commit

        def late(*arguments: Any) -> None:
            assert self.gate.wait(PATIENCE_S)
            commit(*arguments)

        monkeypatch.setattr(background.Replacement, "commit", late)

    def wait(self) -> None:
        self.gate.set()
        super().wait()

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.wait()
        self.gate.clear()
        super().save_checkpoint(checkpoint, path, storage_options)


def kept(
    pl: ModuleType, folder: Path, kind: Any, plugin: Any, options: dict[str, Any]
) -> tuple[dict[str, int], list[str]]:
    """The step in each file behind a training of eight steps, and the callback's best files."""

    class Logging(type(new_module(pl))):  # type: ignore[misc]
        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            self.log("number", float(len(self.losses)))
            found: torch.Tensor = super().training_step(batch, index)
            return found

    callback = kind(dirpath=folder, filename="same", every_n_train_steps=1, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few workers and the like
        trainer = quiet_trainer(pl, 2, plugin, callback)
        trainer.fit(Logging())
    steps = {
        name: torch.load(folder / name, weights_only=False)["global_step"]
        for name in os.listdir(folder)
    }
    return steps, [os.path.basename(path) for path in callback.best_k_models]


@pytest.mark.parametrize(
    "options",
    [
        {"save_top_k": -1, "monitor": "number"},
        {"save_top_k": 3, "monitor": "number", "mode": "max"},
        {"save_top_k": 2, "monitor": "number", "mode": "max", "save_last": "link"},
    ],
    ids=str,
)
def test_a_name_is_taken_while_its_file_is_written(
    pl: ModuleType, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next save of the same name was written over it."""
    stock = pl.callbacks.ModelCheckpoint
    wanted = kept(pl, tmp_path / "stock", stock, None, options)

    class Ours(plugins.NvmeModelCheckpointMixin, stock):  # type: ignore[misc,valid-type]
        pass

    assert kept(pl, tmp_path / "ours", Ours, Late(monkeypatch), options) == wanted


def test_a_relative_name_is_that_of_the_call(
    pl: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was found when the file was written, and removed, where the program was by then."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        (folder / "old.ckpt").write_text(folder.name)
    monkeypatch.chdir(here)
    plugin = Late(monkeypatch)
    plugin.save_checkpoint({"weight": torch.ones(3)}, "new.ckpt")
    plugin.remove_checkpoint("old.ckpt")
    monkeypatch.chdir(there)
    plugin.teardown()
    assert os.listdir(here) == ["new.ckpt"]
    assert os.listdir(there) == ["old.ckpt"]


def test_an_absolute_name_needs_no_current_directory(
    pl: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone() -> str:
        raise FileNotFoundError("the current directory was removed")

    monkeypatch.setattr(os, "getcwd", gone)
    plugins.NvmeCheckpointIO().save_checkpoint({"weight": torch.ones(3)}, tmp_path / "a.ckpt")
    assert os.listdir(tmp_path) == ["a.ckpt"]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_a_save_behind_the_fit_is_there_when_it_returns(
    pl: ModuleType, given: bool, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who loaded it at once found the file of before."""

    class Fails(type(new_module(pl))):  # type: ignore[misc]
        def on_train_batch_end(self, *_: Any) -> None:
            if fails and self.trainer.global_step == 3:
                raise ArithmeticError("of the third step")

    class Ours(plugins.NvmeModelCheckpointMixin, pl.callbacks.ModelCheckpoint):  # type: ignore[misc,name-defined]
        pass

    path = tmp_path / "behind.ckpt"
    torch.save({"global_step": "of before"}, path)
    late = Late(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few workers and the like
        ours = Ours(dirpath=tmp_path / "run", every_n_train_steps=1)
        trainer = quiet_trainer(pl, 1, late if given else None, ours)
        late.gate.set()
        with pytest.raises(ArithmeticError) if fails else contextlib.nullcontext():
            trainer.fit(Fails())
    late.gate.clear()
    if not given:
        threading.Timer(0.2, late.gate.set).start()
    trainer.save_checkpoint(path)
    assert torch.load(path, weights_only=False)["global_step"] == (3 if fails else 4)
