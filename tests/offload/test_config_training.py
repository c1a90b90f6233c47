"""A usual DeepSpeed configuration, taken whole: optimizer, clipping, scheduler, batch sizes."""

from __future__ import annotations

import asyncio
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from _gpt import Gpt, loss_of

from nvmeio.offload import Offloaded, SwappedModule, offload

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.8, 0.99], "weight_decay": 0.1}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 0.02}}


def gpt(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return Gpt().to(dtype)


def usual(drive: Path, **more: Any) -> dict[str, Any]:
    nvme = {"device": "nvme", "nvme_path": str(drive)}
    return {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": ADAMW,
        "scheduler": WARMUP,
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 20_000,
            "offload_optimizer": nvme,
            "offload_param": {**nvme, "max_in_cpu": 1e5},
        },
        "steps_per_print": 10,
        "zero_allow_untested_optimizer": True,
        **more,
    }


def train(made: Offloaded, steps: range, in_loop: bool = False) -> list[float]:
    """As a loop written for DeepSpeed's engine does it, with accumulation."""
    count = made.batch_sizes.accumulation_steps
    optimizer: Any = made.optimizer
    losses = []
    for step in steps:
        for micro in range(count):
            loss = loss_of(made.module, step * count + micro)
            (loss / count).backward()
            losses.append(loss.item())
        if in_loop:
            asyncio.run(optimizer.async_step())
        else:
            optimizer.step()
        if made.scheduler is not None:
            made.scheduler.step()
        optimizer.zero_grad()
    return losses


def rate(step: int) -> float:
    """What `WARMUP` has in a step: DeepSpeed begins with two steps of nothing."""
    done = max(0, step - 1)
    return 0.02 * ((1.0 / math.log(6)) * math.log(done + 1)) if done < 6 else 0.02


def in_memory(steps: int) -> list[float]:
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.99), weight_decay=0.1)
    losses = []
    for step in range(steps):
        for micro in range(2):
            loss = loss_of(model, step * 2 + micro)
            (loss / 2).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("parameters", ["nvme", "none"])
def test_it_trains_as_in_memory(parameters: str, tmp_path: Path) -> None:
    config = usual(tmp_path)
    if parameters == "none":
        del config["zero_optimization"]["offload_param"]
    made = offload(gpt(), config=config)
    assert made.batch_sizes == (4, 2, 2)
    assert made.grad_norm is None
    losses = train(made, range(8))
    assert losses == in_memory(8)
    assert made.grad_norm is not None
    assert made.grad_norm > 0.5  # it clipped
    assert made.optimizer.param_groups[0]["lr"] == 0.02
    made.close()


def test_an_optimizer_in_memory_is_clipped_and_scheduled_too() -> None:
    config = {"optimizer": ADAMW, "scheduler": WARMUP, "gradient_clipping": 0.5}
    made = offload(gpt(), config={**config, "gradient_accumulation_steps": 2})
    assert type(made.optimizer) is torch.optim.AdamW
    assert train(made, range(5)) == in_memory(5)
    made.close()


@pytest.mark.parametrize(
    ("section", "kind", "options"),
    [
        ({"type": "Adam"}, torch.optim.AdamW, {"weight_decay": 0.0, "lr": 1e-3}),
        (
            {"type": "AdamW", "params": {"torch_adam": True}},
            torch.optim.AdamW,
            {"weight_decay": 0.01},
        ),
        (
            {"type": "Adam", "params": {"adam_w_mode": "false", "weight_decay": 0.3}},
            torch.optim.Adam,
            {"weight_decay": 0.3},
        ),
        ({"type": "AdamW", "params": {"adam_w_mode": False}}, torch.optim.AdamW, {}),
        ({"type": "Adagrad", "params": {"lr": 0.3}}, torch.optim.Adagrad, {"lr": 0.3}),
        ({"type": "NAdam"}, torch.optim.NAdam, {}),
    ],
)
def test_names_are_deepspeeds(section: dict[str, Any], kind: type, options: dict[str, Any]) -> None:
    made = offload(gpt(), config={"optimizer": section})
    assert type(made.optimizer) is kind
    for key, value in options.items():
        assert made.optimizer.param_groups[0][key] == value


def test_arguments_fill_what_is_auto() -> None:
    section = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.2}}
    made = offload(gpt(), config={"optimizer": section}, lr=0.3, fused=True)
    group = made.optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["fused"]) == (0.3, 0.2, True)


def test_all_refusals_come_in_one_error(tmp_path: Path) -> None:
    """There were as many runs as keys; nothing is made, and the module is as it was."""
    config = usual(tmp_path)
    config |= {
        "train_batch_size": 5,
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "lrr": 3, "max_grad_norm": 1.0}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_type": "log", "steps": 3}},
        "fp16": {"enabled": True, "loss_scale_window": 1000},
        "compile": {"deepcompile": True},
        "checkpoint": {"tag_validation": "Warn"},
        "aio": {"block_size": 1000},
        "nonsense": 1,
        "overwrite": "maybe",
    }
    config["zero_optimization"] |= {"stage3_max_live_parameters": 5, "overlap_comm": False}
    module = gpt()
    with pytest.raises(ValueError, match="refused settings") as refused:
        offload(module, config=config)
    lines = str(refused.value).splitlines()[1:]
    wanted = [
        "config: 'checkpoint' does not belong to offloading: save with nvmeio.Checkpointer",
        "config: unknown key 'nonsense'",
        "'stage3_max_live_parameters' does not belong to offloading: set the window instead",
        "'overlap_comm' does not belong",
        "fp16: scale losses",
        "compile: deepcompile is impossible",
        "overwrite must be true or false",
        'optimizer: params: lr is "auto"',
        'max_grad_norm does not clip. Write it at the top: "gradient_clipping": 1.0',
        "AdamW takes no 'lrr' (did you mean 'lr'?)",
        "WarmupDecayLR takes no 'steps'",
        "WarmupDecayLR needs total_num_steps",
        'gradient_clipping is "auto"',
        'write "train_batch_size": 4',
        "aio: block_size",
    ]
    for each in wanted:
        assert sum(each in line for line in lines) == 1, each
    assert len(lines) == len(wanted)
    assert str(refused.value).startswith(f"the configuration has {len(lines)} ")
    assert list(tmp_path.iterdir()) == []
    assert all(not p.isnan().any() for p in module.parameters())


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"optimizer": {"type": "Lamb"}}, '"Lamb" is not built here'),
        ({"optimizer": {"type": "AdmW"}}, r"did you mean 'AdamW'\?"),
        ({"optimizer": {"params": {}}}, "type must be the name"),
        ({"optimizer": {"type": "Adam", "params": 3}}, "params must be a mapping"),
        ({"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}, "always on"),
        ({"optimizer": {"type": "Adam", "params": {"fp32_optimizer_states": False}}}, "in bf16"),
        ({"optimizer": {"type": "Adam", "legacy_fusion": True}}, "legacy_fusion is for apex"),
        ({"scheduler": {"type": "WarmupLr"}}, r"did you mean 'WarmupLR'\?"),
        ({"scheduler": {"type": "ReduceLROnPlateau"}}, "steps by a loss"),
        ({"scheduler": {"params": {"a": 1}}}, "with a name and a mapping"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}, "fills in"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": 3}}},
            'write "resume"',
        ),
        (
            {
                "optimizer": {"type": "SGD"},
                "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1}},
            },
            'SGD has no betas for OneCycle to change: write "cycle_momentum": false',
        ),
        ({"bf16": {"check_grad_overflow": True}}, "no step is skipped. Write false"),
        ({"bf16": {"bf16_optimizer_states": True}}, r"call module.to\(torch.bfloat16\)"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cosine"}}}, "log.*linear"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}, "1 or more"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [1, 2]}}}, "has 2 values"),
    ],
)
def test_each_refusal_says_what_to_write(config: dict[str, Any], says: str, tmp_path: Path) -> None:
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    with pytest.raises(ValueError, match=says):
        offload(gpt(), config={"optimizer": ADAMW, "offload_optimizer": nvme, **config})
    assert list(tmp_path.iterdir()) == []


def test_a_class_and_a_name_are_one_too_many() -> None:
    with pytest.raises(ValueError, match=r"offload\(\) was given SGD too: leave out the class"):
        offload(gpt(), torch.optim.SGD, {"optimizer": ADAMW})
    with pytest.raises(ValueError, match=r"lr is 0.01, and offload\(\) was given lr=0.3"):
        offload(gpt(), config={"optimizer": ADAMW}, lr=0.3)
    with pytest.raises(TypeError, match="there is no optimizer"):
        offload(gpt(), config={})
    with pytest.raises(TypeError, match=r"such as offload\(module, config=config\), not {'opt"):
        offload(gpt(), {"optimizer": ADAMW})


@pytest.mark.parametrize("in_loop", [False, True])
def test_a_resumed_run_goes_on_with_its_schedule(in_loop: bool, tmp_path: Path) -> None:
    """Groups, scheduler and the scheduler's step come back by themselves."""
    config = usual(tmp_path, resume=True)
    losses: list[float] = []
    for steps in (range(3), range(3, 4), range(4, 7)):
        made = offload(gpt(), config=config)
        optimizer: Any = made.optimizer
        assert optimizer.generation - 1 == steps.start
        losses += train(made, steps, in_loop)
        made.close()
    assert losses == in_memory(7)


@pytest.mark.parametrize("parameters", ["nvme", "none"])
def test_a_step_that_is_made_again_clips_once(parameters: str, tmp_path: Path) -> None:
    """Clipping gradients of the norm 0.5 to 0.5 changes their last bits."""
    config = usual(tmp_path)
    if parameters == "none":
        del config["zero_optimization"]["offload_param"]
    made = offload(gpt(), config=config)
    failing = [True]

    def fail(*_: object) -> None:
        if failing:
            failing.clear()
            raise RuntimeError("a hook of somebody's")

    made.optimizer.register_step_pre_hook(fail)
    losses = []
    for step in range(4):
        failing.append(True)
        for micro in range(2):
            loss = loss_of(made.module, step * 2 + micro)
            (loss / 2).backward()
            losses.append(loss.item())
        with pytest.raises(RuntimeError, match="a hook of somebody's"):
            made.optimizer.step()
        norm = made.grad_norm
        made.optimizer.step()
        assert made.grad_norm is norm
        made.scheduler.step()  # type: ignore[union-attr]
        made.optimizer.zero_grad()
    assert losses == in_memory(4)
    # Other gradients are clipped again, after a step that failed as well.
    failing.append(True)
    loss_of(made.module, 0).backward()
    with pytest.raises(RuntimeError, match="a hook of somebody's"):
        made.optimizer.step()
    made.optimizer.zero_grad()
    norm = made.grad_norm
    loss_of(made.module, 0).backward()
    made.optimizer.step()
    assert made.grad_norm is not norm
    assert made.grad_norm == norm
    made.close()


def test_gradients_that_a_scaler_scaled_are_not_clipped(tmp_path: Path) -> None:
    """With gradients on the drive the scaler leaves the scaling to the step."""
    made = offload(gpt(), config=usual(tmp_path))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss_of(made.module, 0)).backward()
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_\(max_norm, scaler=scaler\) before"):
        scaler.step(made.optimizer)
    made.close()
    config = usual(tmp_path, gradient_accumulation_steps=1, train_batch_size=2)
    del config["zero_optimization"]["offload_param"]
    made = offload(gpt(), config=config)
    expected = offload(gpt(), config={**config, "zero_optimization": {}})
    for each, scale in ((made, scaler), (expected, torch.amp.GradScaler("cpu", enabled=False))):
        for step in range(3):
            scale.scale(loss_of(each.module, step)).backward()
            scale.step(each.optimizer)
            scale.update()
            each.scheduler.step()  # type: ignore[union-attr]
            each.optimizer.zero_grad()
    for ours, theirs in zip(made.module.parameters(), expected.module.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    made.close()


def test_a_dropped_optimizer_goes_without_the_collector(tmp_path: Path) -> None:
    """Its hooks do not keep it: the files go with the last reference."""
    config = usual(tmp_path)
    del config["zero_optimization"]["offload_param"], config["scheduler"]
    made = offload(gpt(), config=config)
    kept = weakref.ref(made.optimizer)
    del made
    assert kept() is None


def test_an_error_closes_what_was_made_and_nothing_else(tmp_path: Path) -> None:
    """A module that was swapped by its owner stays open."""
    (tmp_path / "module").mkdir()
    module = SwappedModule(gpt(), swap_dir=tmp_path / "module", resident_bytes=400_000)
    config = usual(tmp_path, scheduler={**WARMUP, "params": {"warmup_max_lr": [1, 2]}})
    del config["zero_optimization"]["offload_param"]
    with pytest.raises(ValueError, match="warmup_max_lr has 2 values, and the optimizer has 1"):
        offload(module, config=config)
    assert not module.closed
    assert [each.name for each in tmp_path.iterdir()] == ["module"]
    module.close()


def test_sizes_of_batches_agree_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    config: dict[str, Any] = {"optimizer": ADAMW, "train_micro_batch_size_per_gpu": 4}
    assert offload(gpt(), config=config).batch_sizes == (4, 4, 1)
    assert offload(gpt(), config={"optimizer": ADAMW}).batch_sizes == (None, None, 1)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    assert offload(gpt(), config={**config, "train_batch_size": 24}).batch_sizes == (24, 4, 2)
    with pytest.raises(ValueError, match=r"4 a backward pass × 2 passes × 3 ranks = 24: write"):
        offload(gpt(), config={**config, "train_batch_size": 25, "gradient_accumulation_steps": 2})
