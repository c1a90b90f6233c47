"""DeepSpeed's configuration, key by key: what its own classes have is taken or refused here."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import nvmeio
from nvmeio.compat.deepspeed import aio_handle
from nvmeio.offload import offload
from nvmeio.offload._deepspeed.schedules import DEEPSPEEDS

PAGE = Path(__file__).parents[2] / "docs" / "deepspeed.md"
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")


def fields(module: str, name: str) -> dict[str, Any]:
    """The keys of a section, as upstream's own class has them, and their defaults."""
    found = getattr(importlib.import_module(f"deepspeed.{module}"), name).model_fields
    return {field.alias or key: field.get_default() for key, field in found.items()}


def sections() -> dict[str, dict[str, Any]]:
    aio = importlib.import_module("deepspeed.runtime.swap_tensor.aio_config")
    saving = importlib.import_module("deepspeed.runtime.model_checkpointing.config")
    engine = importlib.import_module("deepspeed.runtime.constants")
    activations = importlib.import_module("deepspeed.runtime.activation_checkpointing.config")
    return {
        "aio": dict(aio.AIO_DEFAULT_DICT),
        "offload_param": fields("runtime.zero.offload_config", "DeepSpeedZeroOffloadParamConfig"),
        "offload_optimizer": fields(
            "runtime.zero.offload_config", "DeepSpeedZeroOffloadOptimizerConfig"
        ),
        "zero_optimization": fields("runtime.zero.config", "DeepSpeedZeroConfig"),
        # The engine reads three more keys of that section by itself.
        "checkpoint": {
            **{key: None for key in saving.get_checkpoint_config({})},
            engine.LOAD_UNIVERSAL_CHECKPOINT: engine.LOAD_UNIVERSAL_CHECKPOINT_DEFAULT,
            engine.USE_NODE_LOCAL_STORAGE_CHECKPOINT: False,
            engine.CHECKPOINT_PARALLEL_WRITE: {},
        },
        "activation_checkpointing": dict(activations.ACT_CHKPT_DEFAULT),
        "bf16": fields("runtime.precision_config", "DeepSpeedBF16Config"),
        "compile": fields("compile.config", "CompileConfig"),
        # These two are read key by key; their params belong to the classes that they name.
        "optimizer": {
            engine.TYPE: "AdamW",
            engine.OPTIMIZER_PARAMS: {},
            engine.LEGACY_FUSION: engine.LEGACY_FUSION_DEFAULT,
        },
        "scheduler": {engine.TYPE: "WarmupLR", engine.SCHEDULER_PARAMS: {}},
    }


KEYS = [(section, key) for section, keys in sections().items() for key in keys]


def config_of(section: str, content: dict[str, Any], drive: Path) -> dict[str, Any]:
    """A configuration that runs, with this content of a section beside what that needs."""
    nvme = {"device": "nvme", "nvme_path": str(drive)}
    zero: dict[str, Any] = {"stage": 3, "offload_optimizer": nvme}
    if section in ("offload_optimizer", "offload_param"):
        return {"zero_optimization": {**zero, section: {**nvme, "pin_memory": False, **content}}}
    if section == "zero_optimization":
        return {section: {**zero, **content}}
    if section in ("optimizer", "scheduler"):
        content = {"type": "AdamW" if section == "optimizer" else "WarmupLR", **content}
    return {"zero_optimization": zero, section: content}


def run(config: dict[str, Any]) -> None:
    passed = None if "optimizer" in config else torch.optim.AdamW
    made = offload(torch.nn.Linear(8, 8), passed, config, lr=0.1)
    made.close()


@pytest.mark.parametrize(("section", "key"), KEYS)
def test_no_key_of_upstreams_is_unknown(section: str, key: str, tmp_path: Path) -> None:
    """With its default it runs, or it is refused with what to do; the page lists it."""
    if PAGE.exists():
        assert f"| `{section}` | `{key}` |" in PAGE.read_text(encoding="utf-8")
    default = sections()[section][key]
    taken = {"device", "nvme_path", "pin_memory", "stage", "offload_param", "offload_optimizer"}
    if key in taken or type(default).__name__ == "PydanticUndefinedType":
        return
    config = config_of(section, {key: default}, tmp_path)
    if section == "checkpoint":
        with pytest.raises(ValueError, match=r"'checkpoint' does not belong .*: save with nvmeio"):
            run(config)
    elif key == "check_grad_overflow":  # upstream skips steps by default
        with pytest.raises(ValueError, match=r"check_grad_overflow is impossible: .* Write false"):
            run(config)
        run(config_of(section, {key: False}, tmp_path))
    else:
        run(config)
    assert not any(tmp_path.rglob("*.[01]"))


def test_the_page_lists_no_key_that_upstream_lacks() -> None:
    listed = re.findall(
        r"^\| `(\w+)` \| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(listed) == sorted(KEYS)


@pytest.mark.parametrize("word", ["num_threads", "thread_count"])
def test_the_tuners_own_output_is_taken(word: str, tmp_path: Path) -> None:
    """`ds_nvme_tune` prints num_threads, which was unknown everywhere."""
    aio: dict[str, Any] = {"block_size": 1 << 20, "queue_depth": 8, word: 2}
    with nvmeio.AioHandle(**aio) as handle:
        assert handle.get_intra_op_parallelism() == 2
    with aio_handle(**aio).nvmeio as handle:
        assert handle.get_intra_op_parallelism() == 2
    run(config_of("aio", aio, tmp_path))
    with pytest.raises(ValueError, match="are the same"):
        nvmeio.AioHandle(intra_op_parallelism=3, **aio)
    with pytest.raises(ValueError, match="are the same setting"):
        run(config_of("aio", {**aio, "intra_op_parallelism": 3}, tmp_path))
    with pytest.raises(TypeError, match=r"takes no que_depth \(did you mean 'queue_depth'\?\)"):
        nvmeio.AioHandle(que_depth=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"aio_handle takes no blocksize \(did you mean 'block_s"):
        aio_handle(blocksize=1 << 20)  # type: ignore[call-arg]


def test_handles_read_and_write_by_its_names(tmp_path: Path) -> None:
    with nvmeio.AioHandle() as handle:
        assert handle.write(torch.arange(10.0), tmp_path / "a") == 40
        out = torch.empty(10)
        assert handle.read(out, tmp_path / "a", True) == 40
    assert out.equal(torch.arange(10.0))


def test_what_is_pasted_from_a_training_of_its_own_runs(tmp_path: Path) -> None:
    pinned = {"device": "cpu", "pin_memory": True}
    run(
        {
            "train_batch_size": 16,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 4,
            "steps_per_print": 10,
            "torch_autocast": {"enabled": False},
            "zero_optimization": {
                "stage": 3,
                "offload_param": pinned,
                "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)},
                "contiguous_gradients": True,
                "stage3_prefetch_bucket_size": "auto",
            },
        }
    )


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"torch_autocast": {"enabled": True}}, "run forward within torch.autocast"),
        ({"gradient_accumulation_steps": 0}, "must be a positive number"),
        (
            {"train_batch_size": 9, "train_micro_batch_size_per_gpu": 4},
            'write "train_batch_size": 8',
        ),
        ({"zero_optimisation": {}}, r"did you mean 'zero_optimization'\?"),
        ({"zero_optimization": {"overlap_com": True}}, r"did you mean 'overlap_comm'\?"),
    ],
)
def test_what_is_refused_says_what_to_do(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        run(config)


def test_masters_of_the_parameters_own_dtype_are_refused_by_name(tmp_path: Path) -> None:
    """It said "ratio=0.0 is impossible"."""
    config = {
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)},
        },
    }
    with pytest.raises(ValueError, match=r"call module.to\(torch.bfloat16\) first"):
        run(config)


SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("LRRangeTest", {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 3}),
    (
        "LRRangeTest",
        {"lr_range_test_step_size": 4, "lr_range_test_staircase": True},
    ),
    ("OneCycle", {"cycle_min_lr": 1e-3, "cycle_max_lr": 0.7, "cycle_first_step_size": 7}),
    (
        "OneCycle",
        {
            "cycle_min_lr": 1e-3,
            "cycle_max_lr": [0.3, 0.7],
            "cycle_first_step_size": 7,
            "cycle_second_step_size": 5,
            "cycle_first_stair_count": 3,
            "cycle_second_stair_count": 2,
            "decay_step_size": 3,
            "decay_lr_rate": 0.3,
            "decay_mom_rate": 0.01,
            "cycle_min_mom": [0.7, 0.8],
        },
    ),
    (
        "OneCycle",
        {"cycle_min_lr": 0.1, "cycle_max_lr": 1.3, "cycle_momentum": False, "decay_step_size": 2},
    ),
    ("WarmupLR", {"warmup_num_steps": 7}),
    ("WarmupLR", {"warmup_num_steps": 7, "warmup_min_lr": [1e-3, 0.1], "warmup_max_lr": 0.31}),
    ("WarmupLR", {"warmup_num_steps": 1, "warmup_type": "linear"}),
    ("WarmupDecayLR", {"total_num_steps": 20, "warmup_num_steps": 7}),
    (
        "WarmupDecayLR",
        {"total_num_steps": 20, "warmup_num_steps": 30, "warmup_type": "linear"},
    ),
    ("WarmupCosineLR", {"total_num_steps": 20, "warmup_num_steps": 7}),
    (
        "WarmupCosineLR",
        {
            "total_num_steps": 20,
            "warmup_num_steps": 5,
            "warmup_type": "linear",
            "warmup_min_ratio": 0.1,
            "cos_min_ratio": 0.03,
        },
    ),
    ("StepLR", {"step_size": 4}),
]


@pytest.mark.parametrize(("name", "params"), SCHEDULES)
def test_schedules_have_upstreams_learning_rates(
    name: str, params: dict[str, Any], tmp_path: Path
) -> None:
    """To the last bit, for each of two groups and each of 30 steps; momentum too."""
    upstream = importlib.import_module("deepspeed.runtime.lr_schedules")

    def groups(module: torch.nn.Module) -> list[dict[str, Any]]:
        return [
            {"params": [p], "lr": lr} for p, lr in zip(module.parameters(), (0.3, 0.7), strict=True)
        ]

    theirs = torch.optim.AdamW(groups(torch.nn.Linear(8, 8)))
    kind = getattr(upstream, name, None) or getattr(torch.optim.lr_scheduler, name)
    expected = kind(theirs, **params)
    config = config_of("scheduler", {"type": name, "params": params}, tmp_path)
    made = offload(torch.nn.Linear(8, 8), torch.optim.AdamW, config, params=groups)
    assert made.scheduler is not None
    for _ in range(30):
        for ours, upstreams in zip(made.optimizer.param_groups, theirs.param_groups, strict=True):
            assert ours["lr"] == upstreams["lr"]
            assert tuple(ours["betas"]) == tuple(upstreams["betas"])
        made.optimizer.step()
        theirs.step()
        made.scheduler.step()
        expected.step()
    made.close()


def test_names_of_optimizers_and_schedules_are_upstreams() -> None:
    upstream = importlib.import_module("deepspeed.runtime.lr_schedules")
    page = PAGE.read_text(encoding="utf-8")
    assert sorted(DEEPSPEEDS) == sorted(upstream.VALID_LR_SCHEDULES)
    for name, kind in DEEPSPEEDS.items():
        theirs = dict(inspect.signature(getattr(upstream, name)).parameters)
        del theirs["last_batch_iteration"]
        ours = inspect.signature(kind).parameters
        assert [(p.name, p.default) for p in ours.values()] == [
            (p.name, p.default) for p in theirs.values()
        ]
        assert all(f"`{key}`" in page for key in ours if key != "optimizer")
    config = importlib.import_module("deepspeed.runtime.config")
    for name in config.DEEPSPEED_OPTIMIZERS:
        assert f"`{name}`" in page.lower()
        try:
            run({"optimizer": {"type": name}})
        except ValueError as refused:
            assert "is not built here" in str(refused)


@pytest.mark.parametrize("name", ["adam", "adamw", "adagrad"])
def test_defaults_are_those_of_upstreams_class(name: str) -> None:
    """torch's AdamW decays weights by 0.01 unless told otherwise, and DeepSpeed's by nothing."""
    module = "adagrad.cpu_adagrad" if name == "adagrad" else "adam.cpu_adam"
    kind = "DeepSpeedCPUAdagrad" if name == "adagrad" else "DeepSpeedCPUAdam"
    upstream = getattr(importlib.import_module(f"deepspeed.ops.{module}"), kind)
    made = offload(torch.nn.Linear(8, 8), config={"optimizer": {"type": name}})
    group = made.optimizer.param_groups[0]
    for key, parameter in inspect.signature(upstream).parameters.items():
        if key in ("lr", "betas", "eps", "weight_decay"):
            assert group[key] == parameter.default
