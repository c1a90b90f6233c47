"""DeepSpeed's configuration, key by key: what its own classes have is taken or refused here."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import nvmeio
from nvmeio.compat.deepspeed import aio_handle
from nvmeio.offload import offload

PAGE = Path(__file__).parents[2] / "docs" / "deepspeed.md"
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")


def fields(module: str, name: str) -> dict[str, Any]:
    """The keys of a section, as upstream's own class has them, and their defaults."""
    found = getattr(importlib.import_module(f"deepspeed.runtime.{module}"), name).model_fields
    return {field.alias or key: field.get_default() for key, field in found.items()}


def sections() -> dict[str, dict[str, Any]]:
    aio = importlib.import_module("deepspeed.runtime.swap_tensor.aio_config")
    saving = importlib.import_module("deepspeed.runtime.model_checkpointing.config")
    engine = importlib.import_module("deepspeed.runtime.constants")
    return {
        "aio": dict(aio.AIO_DEFAULT_DICT),
        "offload_param": fields("zero.offload_config", "DeepSpeedZeroOffloadParamConfig"),
        "offload_optimizer": fields("zero.offload_config", "DeepSpeedZeroOffloadOptimizerConfig"),
        "zero_optimization": fields("zero.config", "DeepSpeedZeroConfig"),
        # The engine reads three more keys of that section by itself.
        "checkpoint": {
            **{key: None for key in saving.get_checkpoint_config({})},
            engine.LOAD_UNIVERSAL_CHECKPOINT: engine.LOAD_UNIVERSAL_CHECKPOINT_DEFAULT,
            engine.USE_NODE_LOCAL_STORAGE_CHECKPOINT: False,
            engine.CHECKPOINT_PARALLEL_WRITE: {},
        },
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
    return {"zero_optimization": zero, section: content}


def run(config: dict[str, Any]) -> None:
    made = offload(torch.nn.Linear(8, 8), torch.optim.AdamW, config, lr=0.1)
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
            "train_batch_size": 4,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 1,
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
        ({"gradient_accumulation_steps": 4}, r"call backward\(\) as often"),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4}, "training loop's own"),
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
