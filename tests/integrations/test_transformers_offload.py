"""A transformers Trainer with optimizer state on the drive: a real model, a real training."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the packages it imports
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate, which Trainer needs, is not installed")
    from nvmeio.integrations.transformers import NvmeTrainerMixin
    from nvmeio.integrations.transformers_offload import (
        NvmeOffloadTrainer,
        NvmeOffloadTrainerMixin,
    )
    from nvmeio.offload import SwappedModule, SwappedOptimizer

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

pytestmark = pytest.mark.filterwarnings("default")


class Both(NvmeOffloadTrainerMixin, NvmeTrainerMixin, transformers.Trainer):  # type: ignore[misc, name-defined]
    """State on the drive, and checkpoints through nvmeio."""


def llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=64,
        )
    )


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def trained(kind: Any, folder: Path, resume: Any = None, steps: int = 6, **options: Any) -> Any:
    arguments = {"max_grad_norm": 1.0, **options.pop("arguments", {})}
    model = llama()
    if "scheduler" in options:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        options["optimizers"] = optimizer, options.pop("scheduler")(optimizer)
    trainer = kind(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(folder),
            max_steps=steps,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            weight_decay=0.1,
            logging_steps=1,
            save_steps=3,
            report_to=[],
            use_cpu=True,
            seed=1,
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **arguments,
        ),
        train_dataset=Tokens(),
        **options,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("kind", [NvmeOffloadTrainer, Both])
def test_training_and_resuming_equal_those_of_transformers(kind: Any, tmp_path: Path) -> None:
    swap = tmp_path / "swap"
    swap.mkdir()
    offload = {"swap_dir": swap, "subgroup_bytes": 16384}
    ours = trained(kind, tmp_path / "ours", nvme_offload=offload)
    assert isinstance(getattr(ours.optimizer, "optimizer", ours.optimizer), SwappedOptimizer)
    ours.close_offload()
    theirs = trained(transformers.Trainer, tmp_path / "theirs")
    assert losses(ours) == losses(theirs)
    for p, q in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(p, q)
    # Each goes on from what the other saved after three steps.
    again = trained(
        kind, tmp_path / "again", str(tmp_path / "theirs/checkpoint-3"), nvme_offload=offload
    )
    again.close_offload()
    assert losses(again) == losses(theirs)
    stock = trained(transformers.Trainer, tmp_path / "stock", str(tmp_path / "ours/checkpoint-3"))
    assert losses(stock) == losses(theirs)
    assert list(swap.iterdir()) == []


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.3])
def test_gradients_on_the_drive(max_grad_norm: float, tmp_path: Path) -> None:
    """They are clipped there, and their norm is what the Trainer logs."""
    swap = tmp_path / "swap"
    swap.mkdir()
    offload = {"swap_dir": swap, "gradients": "disk"}
    clipped = {"arguments": {"max_grad_norm": max_grad_norm}}
    ours = trained(NvmeOffloadTrainer, tmp_path / "ours", nvme_offload=offload, **clipped)
    ours.close_offload()
    theirs = trained(transformers.Trainer, tmp_path / "theirs", **clipped)
    if max_grad_norm:  # norms added in another order may clip to other last bits
        assert losses(ours) == pytest.approx(losses(theirs), rel=1e-5)
    else:
        assert losses(ours) == losses(theirs)
    norms = [
        [entry["grad_norm"] for entry in each.state.log_history if "grad_norm" in entry]
        for each in (ours, theirs)
    ]
    assert len(norms[0]) == 6
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_training_that_was_killed_is_started_again(tmp_path: Path) -> None:
    """From the Trainer's own checkpoint; the swap files of the one before are in the way."""
    swap = tmp_path / "swap"
    offload = {"swap_dir": swap, "subgroup_bytes": 16384}
    killed = trained(
        NvmeOffloadTrainer, tmp_path / "ours", nvme_offload={**offload, "resume": True}
    )
    killed.close_offload()  # and leaves its files
    checkpoint = str(tmp_path / "ours/checkpoint-3")
    with pytest.raises(FileExistsError, match="overwrite=True removes it"):
        trained(NvmeOffloadTrainer, tmp_path / "again", checkpoint, nvme_offload=offload)
    offload["overwrite"] = True
    again = trained(NvmeOffloadTrainer, tmp_path / "again", checkpoint, nvme_offload=offload)
    again.close_offload()
    assert losses(again) == losses(killed)
    assert list(swap.iterdir()) == []


@pytest.mark.parametrize("nested", [False, True])
def test_a_scheduler_of_ones_own_reaches_the_drive(nested: bool, tmp_path: Path) -> None:
    """It went on with the optimizer in memory, and the rate on the drive stayed what it was."""

    def falling(optimizer: Any) -> Any:
        schedulers = torch.optim.lr_scheduler
        made = schedulers.ExponentialLR(optimizer, 0.5)
        return schedulers.ChainedScheduler([made], optimizer) if nested else made

    theirs = trained(transformers.Trainer, tmp_path / "theirs", scheduler=falling)
    offload = {"swap_dir": tmp_path / "swap"}
    ours = trained(NvmeOffloadTrainer, tmp_path / "ours", scheduler=falling, nvme_offload=offload)
    assert losses(ours) == losses(theirs)
    for trainer in (ours, theirs):  # and once more, with what there is
        trainer.train()
    assert losses(ours) == losses(theirs)
    assert ours.optimizer.param_groups[0]["lr"] == theirs.optimizer.param_groups[0]["lr"] < 1e-3
    ours.close_offload()


def test_it_wants_a_directory(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="swap_dir"):
        trained(NvmeOffloadTrainer, tmp_path)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_of_transformers_over_a_swapped_module(
    reentrant: bool, tmp_path: Path
) -> None:
    """It checkpoints the bare forward of a layer: gradients were computed from absent weights."""
    tokens = torch.randint(0, 64, (2, 8))
    grads = []
    for folder in (None, tmp_path):
        torch.manual_seed(0)
        config = llama().config
        config.num_hidden_layers = 10
        model: Any = transformers.LlamaForCausalLM(config)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        model.train()
        layer = sum(p.nbytes for p in model.model.layers[0].parameters())
        swapped = None
        if folder is not None:
            swapped = SwappedModule(model, swap_dir=folder, resident_bytes=6 * (layer + 4096))
        (swapped or model)(input_ids=tokens, labels=tokens).loss.backward()
        grads.append([parameter.grad for parameter in model.parameters()])
        if swapped is not None:
            swapped.close()
    assert all(a.equal(b) for a, b in zip(*grads, strict=True))
