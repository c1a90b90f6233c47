"""Lightning with optimizer state on the drive: real fits, equal to those in memory."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from integrations import _lightning
from integrations._lightning import new_module

pl = _lightning.pl  # a fixture


def fit(
    pl: ModuleType, folder: Path, callbacks: list[Any], module: Any = None, **options: Any
) -> Any:
    module = module or new_module(pl)
    checkpoint = options.pop("ckpt_path", None)
    trainer = pl.Trainer(
        **{
            "max_epochs": 2,
            "accelerator": "cpu",
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "default_root_dir": folder,
            "callbacks": callbacks,
            "gradient_clip_val": 0.5,
            "accumulate_grad_batches": 2,
            **options,
        }
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few workers and the like
        trainer.fit(module, ckpt_path=checkpoint)
    return module, trainer


def test_a_fit_with_the_callback_equals_one_without(pl: ModuleType, tmp_path: Path) -> None:
    from nvmeio.integrations.lightning_offload import SwapOptimizers

    swap = tmp_path / "swap"
    swap.mkdir()
    ours, _ = fit(pl, tmp_path, [SwapOptimizers(swap, subgroup_bytes=4096)])
    theirs, _ = fit(pl, tmp_path, [])
    assert ours.losses == theirs.losses
    assert list(swap.iterdir()) == []


def test_checkpoints_go_both_ways(pl: ModuleType, tmp_path: Path) -> None:
    from nvmeio.integrations.lightning_offload import SwapOptimizers

    swap = tmp_path / "swap"
    swap.mkdir()

    class Saving(pl.Callback):  # type: ignore[name-defined,misc]
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            trainer.save_checkpoint(folder / "epoch.ckpt")

    results = []
    for first, second in ((True, False), (False, True), (False, False)):
        folder = tmp_path / f"{first}{second}"
        folder.mkdir()
        callbacks = [SwapOptimizers(swap)] if first else []
        fit(pl, folder, [*callbacks, Saving()], max_epochs=1)
        callbacks = [SwapOptimizers(swap)] if second else []
        module, _ = fit(pl, folder, callbacks, max_epochs=3, ckpt_path=folder / "epoch.ckpt")
        results.append(module.losses)
    assert results[0] == results[1] == results[2]


def test_the_optimizer_is_returned_by_the_module(pl: ModuleType, tmp_path: Path) -> None:
    from nvmeio.integrations.lightning_offload import LightningSwappedOptimizer

    made: list[Any] = []

    def swapped(module: Any) -> Any:
        made.append(
            LightningSwappedOptimizer(
                torch.optim.SGD, module.parameters(), swap_dir=tmp_path, lr=1e-2, momentum=0.9
            )
        )
        return made[0]

    ours, _ = fit(pl, tmp_path, [], new_module(pl, swapped))
    made[0].close()
    plain = new_module(pl, lambda m: torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9))
    theirs, _ = fit(pl, tmp_path, [], plain)
    assert ours.losses == theirs.losses


def test_clipping_what_lightning_cannot_reach_is_refused(pl: ModuleType, tmp_path: Path) -> None:
    from nvmeio.integrations.lightning_offload import SwapOptimizers

    with pytest.raises(ValueError, match="gradient_clip_val"):
        fit(pl, tmp_path, [SwapOptimizers(tmp_path, gradients="disk")])
    ours, _ = fit(pl, tmp_path, [SwapOptimizers(tmp_path, gradients="disk")], gradient_clip_val=0)
    theirs, _ = fit(pl, tmp_path, [], gradient_clip_val=0)
    assert ours.losses == theirs.losses


def test_a_fit_says_what_becomes_of_an_earlier_one(pl: ModuleType, tmp_path: Path) -> None:
    """The state of a fit that was killed was removed without a word."""
    from nvmeio.integrations.lightning_offload import SwapOptimizers

    swap = tmp_path / "swap"
    fit(pl, tmp_path, [SwapOptimizers(swap, resume=True)], max_epochs=1)
    with pytest.raises(FileExistsError, match="overwrite=True removes it"):
        fit(pl, tmp_path, [SwapOptimizers(swap)])
    callback = SwapOptimizers(swap, resume="must")
    resumed: list[bool] = []

    class Looking(pl.Callback):  # type: ignore[name-defined,misc]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            for each in callback.optimizers:
                resumed.append(each.resumed)
                each.restore_groups()

    refused = SwapOptimizers(swap, resume="must")
    with pytest.raises(RuntimeError, match="restore_groups"):  # the schedule would begin anew
        fit(pl, tmp_path, [refused], max_epochs=1)
    for each in refused.optimizers:
        each.close()
    fit(pl, tmp_path, [callback, Looking()], max_epochs=1)
    assert resumed == [True]
    fit(pl, tmp_path, [SwapOptimizers(swap, overwrite=True)])
    assert list(swap.iterdir()) == []
