"""`offload`: DeepSpeed's words, each understood or refused."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from _gpt import Gpt, train
from inside import swapper_of

import nvmeio
from nvmeio.offload import SwappedModule, SwappedOptimizer, offload


def gpt(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return Gpt().to(dtype)


def test_all_three_together(tmp_path: Path) -> None:
    ours, theirs = gpt(), gpt()
    config = {
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 20_000,
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": str(tmp_path),
                "buffer_count": 4,
                "pipeline_read": True,
                "pipeline_write": True,
                "pin_memory": False,
                "fast_init": False,
            },
            "offload_param": {
                "device": "nvme",
                "nvme_path": str(tmp_path),
                "buffer_count": 3,
                "buffer_size": 15_000,
                "max_in_cpu": 1e3,
            },
        },
        "aio": {"block_size": 65536, "queue_depth": 16, "thread_count": 2, "use_gds": False},
    }
    made = offload(ours, torch.optim.AdamW, config, lr=1e-2)
    module, optimizer = made
    assert isinstance(module, SwappedModule)
    assert isinstance(optimizer, SwappedOptimizer)
    assert 180_000 <= module.resident_bytes < 190_000
    assert optimizer.plan.subgroups > 5
    assert train(module, optimizer, 4) == train(
        theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2), 4
    )
    assert sum(p.grad is not None for p in ours.parameters()) <= 1
    assert made.last_step is not None
    assert made.last_step.written_bytes > 0
    made.close()
    assert list(tmp_path.iterdir()) == []


def test_switches_as_strings_are_what_they_say(tmp_path: Path) -> None:
    """DeepSpeed's tuner prints them so; "false" is true to Python."""
    state = {"device": "nvme", "nvme_path": str(tmp_path), "pin_memory": "false"}
    config = {
        "bf16": {"enabled": "false"},
        "zero_optimization": {"sub_group_size": 10_000},
        "offload_optimizer": {**state, "pipeline_read": "False", "pipeline_write": "true"},
        "aio": {"use_gds": "false", "single_submit": "false", "overlap_events": "true"},
    }
    made = offload(gpt(), torch.optim.AdamW, config)
    optimizer: Any = made.optimizer
    assert optimizer.plan.buffers == 2
    made.close()
    with pytest.raises(ValueError, match="pipeline_read must be true or false, not 'no'"):
        offload(gpt(), torch.optim.AdamW, {"offload_optimizer": {**state, "pipeline_read": "no"}})


def test_only_the_optimizer(tmp_path: Path) -> None:
    ours, theirs = gpt(torch.bfloat16), gpt(torch.bfloat16)
    (tmp_path / "theirs").mkdir()
    config = {
        "bf16": {"enabled": True},
        "offload_optimizer": {"device": "nvme", "nvme_path": tmp_path, "ratio": 0.5},
    }
    made = offload(ours, torch.optim.Adam, config, lr=1e-2)
    assert made.module is ours
    reference = SwappedOptimizer(
        torch.optim.Adam,
        theirs.parameters(),
        swap_dir=tmp_path / "theirs",
        master_dtype=torch.float32,
        lr=1e-2,
    )
    assert train(ours, made.optimizer, 4) == train(theirs, reference, 4)
    made.close()
    reference.close()


def test_in_memory(tmp_path: Path) -> None:
    for device in ("none", "cpu"):
        ours, theirs = gpt(), gpt()
        made = offload(ours, torch.optim.Adam, {"offload_optimizer": {"device": device}})
        losses = train(ours, made.optimizer, 3)
        assert losses == train(theirs, torch.optim.Adam(theirs.parameters()), 3)
        made.close()
    plain = offload(gpt(), torch.optim.SGD, {}, lr=0.1)
    assert type(plain.optimizer) is torch.optim.SGD
    assert plain.last_step is None


NVME = {"device": "nvme", "nvme_path": "/nowhere/at/all"}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"offload_optimiser": {}}, "unknown key 'offload_optimiser'"),
        ({"zero_optimization": {"stage3_max_live_parameters": 1}}, "set the window instead"),
        ({"zero_optimization": {"overlap_comm": False}}, "FSDP2"),
        ({"zero_optimization": {"stage": 2, "overlap_comm": True}}, "FSDP2"),
        ({"offload_optimizer": {**NVME, "device": "auto"}}, "device must be one of"),
        ({"zero_optimization": {"cpu_offload": True}}, "an older name: write offload_optimizer"),
        ({"zero_optimization": {"stage4": 1}}, "unknown key 'stage4'"),
        ({"offload_optimizer": {**NVME, "super_offload": True}}, "writing overlap anyway"),
        ({"offload_optimizer": {**NVME, "cpuadam_cores_perc": 0.5}}, "torch.set_num_threads"),
        ({"activation_checkpointing": {"cpu_checkpoint": True}}, "unknown key 'cpu_checkpoint'"),
        ({"activation_checkpointing": {"partition_activations": True}}, "no model parallelism"),
        ({"activation_checkpointing": {"profile": "true"}}, "profile is impossible: torch.prof"),
        (
            {"activation_checkpointing": {"contiguous_memory_optimization": True}},
            "SwappedActivations has them contiguous",
        ),
        (
            {"activation_checkpointing": {"synchronize_checkpoint_boundary": True}},
            "synchronize_checkpoint_boundary is impossible",
        ),
        ({"activation_checkpointing": {"number_checkpoints": 0}}, "must be a positive number"),
        ({"activation_checkpointing": {"cpu_checkpointing": 3}}, "true or false"),
        ({"activation_checkpointing": 3}, "must be a mapping"),
        ({"offload_optimizer": {"device": "gpu"}}, "device must be one of"),
        ({"offload_optimizer": {"device": "nvme"}}, "needs an nvme_path"),
        ({"offload_optimizer": {**NVME, "nvme_path": 3}}, "must be a path"),
        ({"offload_optimizer": {**NVME, "buffer_cout": 4}}, "unknown key 'buffer_cout'"),
        ({"offload_optimizer": {**NVME, "buffer_count": 2}}, "buffer_count 2 is impossible"),
        ({"offload_optimizer": {**NVME, "buffer_count": 2.5}}, "positive number"),
        ({"offload_optimizer": {**NVME, "pipeline_read": 1}}, "true or false"),
        ({"offload_optimizer": {"device": "cpu", "ratio": 0.3}}, "ratio is for"),
        ({"offload_param": NVME}, "offload_param: device"),
        ({"offload_param": NVME, "offload_optimizer": {"device": "cpu"}}, "offload_param"),
        ({"offload_param": {**NVME, "max_in_cpu": -1}, "offload_optimizer": NVME}, "max_in_cpu"),
        ({"zero_optimization": {"stage": 2, "offload_param": NVME}}, "needs stage 3"),
        ({"aio": {"use_gds": True}, "offload_optimizer": NVME}, "its checksums are computed"),
        ({"aio": {"block_size": 1000}, "offload_optimizer": NVME}, "aio: block_size"),
        ({"aio": {"queue_deph": 8}, "offload_optimizer": NVME}, "unknown key 'queue_deph'"),
        (
            {"aio": {"thread_count": 1, "intra_op_parallelism": 2}, "offload_optimizer": NVME},
            "are the same",
        ),
        ({"gradient_clipping": "auto"}, 'write the norm, "gradient_clipping": 1.0'),
        ({"gradient_clipping": -1.0}, "a number >= 0, not -1.0"),
        ({"aio": {"queue_deph": 8}}, "unknown key 'queue_deph'"),
        ({"resume": "no", "offload_optimizer": NVME}, "resume must be true or false"),
        ({"resume": True, "offload_optimizer": {"device": "cpu"}}, "resume: true needs"),
        ({"zero_optimization": {"stage": 7}}, "stage must be 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": 0}, "offload_optimizer": NVME}, "needs stage 1, 2 or 3"),
        ({"offload_optimizer": []}, "must be a mapping"),
        ({"offload_param": {"device": "cpu", "max_in_cpu": 5}}, "max_in_cpu is for device"),
        ({"offload_param": {"buffer_count": 5}}, "buffer_count is for device"),
        ({"fp16": {"enabled": True}}, "GradScaler"),
        ({"bf16": {"enabled": True}}, "master weights need"),
        ({"bf16": {"enabled": "yes"}}, "true or false"),
        ({"offload_optimizer": 3}, "must be a mapping"),
        (
            {"offload_optimizer": NVME, "zero_optimization": {"offload_optimizer": NVME}},
            "given twice",
        ),
    ],
)
def test_unknown_and_impossible_keys_are_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        offload(gpt(), torch.optim.Adam, config)


def test_auto_asks_for_nothing_where_a_word_is_known_too(tmp_path: Path) -> None:
    """Transformers' own example was refused: "sub_group_size must be a positive number"."""
    nvme = {"device": "nvme", "nvme_path": str(tmp_path), "pin_memory": "auto"}
    config = {
        "bf16": {"enabled": "auto"},
        "aio": {"block_size": "auto", "use_gds": "auto"},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": "auto",
            "overlap_comm": True,
            "stage3_gather_16bit_weights_on_model_save": True,
            "offload_optimizer": {**nvme, "buffer_count": "auto", "ratio": "auto"},
            "offload_param": {**nvme, "buffer_size": "auto", "max_in_cpu": "auto"},
        },
    }
    left_out = {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)},
            "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)},
        }
    }
    plans = []
    for each in (config, left_out):
        made = offload(gpt(), torch.optim.Adam, each)
        assert isinstance(made.module, SwappedModule)
        assert isinstance(made.optimizer, SwappedOptimizer)
        plans.append((made.module.resident_bytes, made.optimizer.plan))
        made.close()
    assert plans[0] == plans[1]


def test_words_that_ask_for_nothing_are_taken(tmp_path: Path) -> None:
    """As configurations for DeepSpeed have them, with its defaults written out."""
    config = {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
        "offload_optimizer": {"device": "cpu", "super_offload": False},
        "activation_checkpointing": {
            "partition_activations": False,
            "cpu_checkpointing": True,
            "contiguous_memory_optimization": False,
            "number_checkpoints": None,
            "synchronize_checkpoint_boundary": False,
            "profile": False,
        },
    }
    ours, theirs = gpt(), gpt()
    made = offload(ours, torch.optim.Adam, config)
    assert made.module is ours
    losses = train(ours, made.optimizer, 2)
    assert losses == train(theirs, torch.optim.Adam(theirs.parameters()), 2)
    made.close()


def test_parameters_on_the_drive_and_their_state_in_memory(tmp_path: Path) -> None:
    """With masters, which are state; without them the two are one on the drive."""
    ours, theirs = gpt(torch.bfloat16), gpt(torch.bfloat16)
    config: dict[str, Any] = {
        "bf16": {"enabled": True},
        "zero_optimization": {"sub_group_size": 20_000},
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "nvme", "nvme_path": str(tmp_path), "max_in_cpu": 5e4},
    }
    made = offload(ours, torch.optim.Adam, config, lr=1e-2)
    assert isinstance(made.module, SwappedModule)
    assert isinstance(made.optimizer, SwappedOptimizer)
    assert made.optimizer.plan.state_bytes == 0
    losses = train(made.module, made.optimizer, 4)
    assert made.module.bytes_read > 0
    made.close()
    (tmp_path / "theirs").mkdir()
    reference = SwappedOptimizer(
        torch.optim.Adam,
        theirs.parameters(),
        swap_dir=tmp_path / "theirs",
        master_dtype=torch.float32,
        lr=1e-2,
    )
    assert losses == train(theirs, reference, 4)
    reference.close()
    with pytest.raises(ValueError, match="needs master weights"):
        offload(gpt(), torch.optim.Adam, {**config, "bf16": {}})
    plain = {**config, "bf16": {}, "offload_optimizer": {"device": "none"}}
    with pytest.raises(ValueError, match="finds no parameters in memory to step"):
        offload(gpt(), torch.optim.Adam, plain)


def test_a_module_on_a_device_is_told_what_is_not_done() -> None:
    """A stand-in for one: only the devices of its parameters are looked at."""

    class There(torch.nn.Module):
        def parameters(self, recurse: bool = True) -> Any:
            return iter([type("Parameter", (), {"device": torch.device("cuda")})()])

    for config in (
        {"offload_param": {"device": "cpu"}},
        {"activation_checkpointing": {"cpu_checkpointing": True}},
    ):
        with pytest.raises(ValueError, match="is not supported"):
            offload(There(), torch.optim.Adam, config)


def test_a_path_that_is_missing_leaves_the_module_as_it_was(tmp_path: Path) -> None:
    ours, theirs = gpt(), gpt()
    with pytest.raises(FileNotFoundError):
        offload(ours, torch.optim.Adam, {"offload_optimizer": NVME})
    assert train(ours, torch.optim.Adam(ours.parameters()), 2) == train(
        theirs, torch.optim.Adam(theirs.parameters()), 2
    )
    with pytest.raises(TypeError):
        offload(ours, torch.optim.Adam, 3)  # type: ignore[arg-type]


def test_a_ratio_beside_parameters_on_the_drive_is_refused(tmp_path: Path) -> None:
    """It was taken, and all state was on the drive. With masters it is honoured."""
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    config: dict[str, Any] = {
        "offload_optimizer": {**nvme, "ratio": 0.5},
        "offload_param": {**nvme, "max_in_cpu": 1e6},
        "zero_optimization": {"sub_group_size": 10_000},
    }
    with pytest.raises(ValueError, match=r"ratio=0\.5 is impossible"):
        offload(gpt(), torch.optim.Adam, config)
    assert list(tmp_path.iterdir()) == []
    made = offload(gpt(torch.bfloat16), torch.optim.Adam, {**config, "bf16": {"enabled": True}})
    whole = 12 * sum(p.numel() for p in made.module.parameters())
    assert isinstance(made.optimizer, SwappedOptimizer)
    assert made.optimizer.plan.state_bytes == pytest.approx(whole / 2, rel=0.25)
    assert isinstance(made.module, SwappedModule)
    assert 2e6 <= made.module.resident_bytes < 2e6 + 4096  # a million elements of bf16
    made.close()


def test_pinning_that_is_not_allowed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For parameters it was taken without a word."""
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    for section in ("offload_optimizer", "offload_param"):
        config: dict[str, dict[str, object]] = {
            "offload_optimizer": dict(nvme),
            "offload_param": dict(nvme),
        }
        config[section]["pin_memory"] = True
        monkeypatch.setattr("nvmeio._memory.mappings.Mapping.lock_if_allowed", lambda arena: False)
        config["offload_param"]["max_in_cpu"] = 1e6
        with pytest.raises(OSError, match=f"{section}: pin_memory"):
            offload(gpt(), torch.optim.Adam, config)
        assert list(tmp_path.iterdir()) == []


def test_closing_closes_the_handle_that_was_made(tmp_path: Path) -> None:
    """It was left to the garbage collector."""
    config = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    made = offload(gpt(), torch.optim.Adam, config)
    engine: Any = swapper_of(made.optimizer)  # type: ignore[attr-defined]
    its = engine.handles.of(engine.store.files.opened([0])[0])
    made.close()
    assert its.closed
    with nvmeio.AioHandle() as handle:
        offload(gpt(), torch.optim.Adam, config, handle=handle).close()
        assert not handle.closed


def test_a_refused_optimizer_leaves_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(TypeError, match="no_such_word"):
        offload(gpt(), torch.optim.Adam, {"offload_optimizer": {"device": "cpu"}}, no_such_word=1)
    assert list(tmp_path.iterdir()) == []
