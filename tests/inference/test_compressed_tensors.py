"""Checkpoints of compressed-tensors: FP8 and packed integers, widened as transformers can do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from inference._model_budget import Make, least
from inference._models import llama, loaded, prompt, tokens, transformers, weights_file
from inference._published import configure, in_compressed, qwen3_moe, rewrite
from safetensors.torch import load_file

from nvmeio.errors import IntegrityError
from nvmeio.inference import pack

Weights = dict[str, torch.Tensor]

WAYS = ["channel", "tensor", "block", "int4", "int8", "int4-channel"]
MODELS: dict[str, Callable[[], Any]] = {"llama": lambda: llama(width=128), "qwen3_moe": qwen3_moe}


def stored(kind: str, way: str, directory: Path) -> Path:
    torch.manual_seed(0)
    MODELS[kind]().bfloat16().save_pretrained(directory)
    in_compressed(directory, way)
    return directory


def widened(directory: Path, to: Path) -> Path:
    """The same model with plain weights: products in the scales' dtype."""

    def change(weights: Weights) -> Weights:
        plain = {}
        for name, scales in weights.items():
            if not name.endswith(".weight_scale"):
                continue
            stem = name.removesuffix(".weight_scale")
            if f"{stem}.weight" in weights:
                steps = weights[f"{stem}.weight"].float()
                blocks = scales.view(1, 1) if scales.dim() == 1 else scales
                for dim in (0, 1):
                    times = steps.shape[dim] // blocks.shape[dim]
                    blocks = blocks.repeat_interleave(times, dim)
                plain[f"{stem}.weight"] = (steps * blocks).bfloat16()
                continue
            rows, columns = weights[f"{stem}.weight_shape"].tolist()
            words = weights[f"{stem}.weight_packed"]
            count = columns // words.shape[1]
            bits = 32 // count
            fields = [(words >> (bits * n)) & ((1 << bits) - 1) for n in range(count)]
            steps = torch.stack(fields, -1).view(rows, columns) - (1 << (bits - 1))
            by_element = scales.repeat_interleave(columns // scales.shape[1], 1)
            plain[f"{stem}.weight"] = steps.to(scales.dtype) * by_element
        ends = (".weight_scale", ".weight_packed", ".weight_shape")
        return {n: t for n, t in weights.items() if not n.endswith(ends)} | plain

    shutil.copytree(directory, to)
    rewrite(to, change)
    configure(to, quantization_config=None)
    return to


@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", MODELS)
def test_tokens_are_those_of_the_widened_model(
    kind: str, way: str, tmp_path: Path, stream: Make
) -> None:
    """At the smallest budget and with all in memory; as published, and packed."""
    directory = stored(kind, way, tmp_path / "model")
    whole = loaded(widened(directory, tmp_path / "widened"))
    ids = prompt(batch=1, length=5)
    expected = tokens(whole, ids, 200)
    few = stream(directory, resident_bytes=least(stream, directory))
    assert tokens(few, ids, 200).equal(expected)
    assert tokens(stream(directory, compute="widened"), ids, 40).equal(expected[:, :45])
    pack(directory, tmp_path / "packed")
    assert tokens(stream(tmp_path / "packed"), ids, 40).equal(expected[:, :45])
    pack(directory, tmp_path / "plain", dtype="bfloat16", keep_fused=True)
    assert tokens(loaded(tmp_path / "plain"), ids, 40).equal(expected[:, :45])
    # The stored bytes are what is packed.
    size, wide = (weights_file(tmp_path / n).stat().st_size for n in ("packed", "plain"))
    assert size < 0.8 * wide


@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", MODELS)
def test_weights_are_those_that_transformers_widens(
    kind: str, way: str, tmp_path: Path, stream: Make
) -> None:
    """Where the package is installed; it refuses blocks of experts."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    if (kind, way) == ("qwen3_moe", "block"):
        pytest.skip("transformers cannot put the scales of blocks together for experts")
    directory = stored(kind, way, tmp_path / "model")
    how = transformers.CompressedTensorsConfig(dequantize=True)
    cls = type(MODELS[kind]())
    whole = cls.from_pretrained(directory, dtype=torch.bfloat16, quantization_config=how).eval()
    ids = prompt(batch=1, length=5)
    assert tokens(stream(directory), ids, 200).equal(tokens(whole, ids, 200))


def test_inputs_stay_as_they_are_where_their_scales_are_stored(
    tmp_path: Path, stream: Make
) -> None:
    directory = stored("llama", "tensor", tmp_path / "model")
    whole = loaded(widened(directory, tmp_path / "widened"))

    def change(weights: Weights) -> Weights:
        names = [name.removesuffix("weight_scale") for name in weights if "weight_scale" in name]
        return weights | {f"{name}input_scale": torch.ones(1) for name in names}

    rewrite(directory, change)
    ids = prompt(batch=1, length=5)
    assert tokens(stream(directory), ids, 20).equal(tokens(whole, ids, 20))


@pytest.mark.parametrize(
    "change",
    [
        {"weights": {"symmetric": False}},
        {"weights": {"actorder": "group"}},
        {"weights": {"num_bits": 3}},
        {"weights": {"strategy": "tensor_group"}},
        {"weights": {"group_size": 0}},
        {"group": {"format": "nvfp4-pack-quantized"}},
        {"group": {"weights": None}},
        {"config": {"kv_cache_scheme": {"num_bits": 8}}},
        {"config": {"sparsity_config": {"format": "sparse-bitmask"}}},
        {"config": {"transform_config": {"groups": 1}}},
        {"config": {"quantization_status": "frozen"}},
        {"config": {"config_groups": {}}},
    ],
)
def test_other_forms_are_refused_by_name(
    change: dict[str, dict[str, Any]], tmp_path: Path, stream: Make
) -> None:
    directory = stored("llama", "int4", tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    for key, values in change.items():
        {"weights": group["weights"], "group": group, "config": config}[key].update(values)
    configure(directory, quantization_config=config)
    with pytest.raises(ValueError, match="is quantised by compressed-tensors, which nvmeio does"):
        stream(directory)


def test_words_and_scales_that_do_not_fit_are_refused(tmp_path: Path, stream: Make) -> None:
    directory = stored("llama", "int4", tmp_path / "model")
    name = "model.layers.1.mlp.up_proj.weight_scale"
    rewrite(directory, lambda weights: {**weights, name: weights[name][:, :3].contiguous()})
    with pytest.raises(IntegrityError, match=r"up_proj\.weight_scale' BF16") as refused:
        stream(directory)
    assert load_file(weights_file(directory))[name].shape == (256, 3)
    assert "words of integers" in str(refused.value)
