"""FP8 with scales of blocks, and MXFP4: read as they are stored, widened as transformers does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from inference._model_budget import Make, least
from inference._models import loaded, transformers, weights_file
from inference._published import KINDS, configure, fp8_of, in_fp8, published, rewrite
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import nvmeio
from nvmeio._formats.packed_index import KEY, SEAL
from nvmeio.checkpoint.safetensors import read_header
from nvmeio.cli import app
from nvmeio.inference import pack
from nvmeio.inference._plan.published import BlockFp8, Mxfp4

IDS = torch.arange(3, 12).reshape(1, 9)
TOKENS = 200


def generated(model: Any, count: int = TOKENS) -> torch.Tensor:
    """The logits of each of some tokens, [count, vocabulary]."""
    done = model.generate(
        IDS,
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.cat(done.logits)


# Elements


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("steps", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize(
    "scales", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e8m0fnu]
)
@pytest.mark.parametrize("block", [(128, 128), (64, 32), (1, 96), (192, 384), (192, 1)])
def test_fp8_is_widened_as_transformers_does(
    dtype: torch.dtype, steps: torch.dtype, scales: torch.dtype, block: tuple[int, int]
) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    shape = (3, 384, 384) if block == (128, 128) else (3, 192, 384)
    scheme = BlockFp8(block, steps, scales)
    parts = []
    for part_dtype, sizes in scheme.stored(shape):
        if part_dtype.is_floating_point and part_dtype.itemsize > 1:
            parts.append((torch.rand(sizes) * 0.01).to(part_dtype))
        else:  # any byte, of a scale those that are not too far from 1
            low, high = (0, 256) if part_dtype is steps else (100, 140)
            parts.append(torch.randint(low, high, sizes, dtype=torch.uint8).view(part_dtype))
    assert scheme.shape_of([part.shape for part in parts]) == shape
    expected = Fp8Dequantize(None)._dequantize_one(*parts, output_dtype=dtype)
    widened = torch.full(shape, 7.0, dtype=dtype)
    scheme.widen(parts, widened)
    assert torch.equal(widened.nan_to_num(-1.0), expected.nan_to_num(-1.0))
    one = torch.full(shape[1:], 7.0, dtype=dtype)
    scheme.widen([part[1:2] for part in parts], one)
    assert torch.equal(one.nan_to_num(-1.0), expected[1].nan_to_num(-1.0))


def test_blocks_at_the_edges_of_a_matrix_are_smaller() -> None:
    """As of DeepSeek-V3's `kv_a_proj_with_mqa`, [576, 7168], which transformers refuses."""
    torch.manual_seed(0)
    weight = torch.randn(576, 200)
    steps, scales = fp8_of(weight, (128, 128))
    assert scales.shape == (5, 2)
    everywhere = scales.repeat_interleave(128, 0)[:576].repeat_interleave(128, 1)[:, :200]
    widened = torch.empty_like(weight)
    BlockFp8((128, 128), steps.dtype, scales.dtype).widen([steps, scales], widened)
    assert torch.equal(widened, steps.float() * everywhere)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mxfp4_is_widened_as_transformers_does(dtype: torch.dtype) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.randint(0, 256, (2, 256, 3, 16), dtype=torch.uint8)
    exponents = torch.randint(0, 256, (2, 256, 3), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, exponents, dtype=dtype)
    scheme = Mxfp4()
    shape = scheme.shape_of([blocks.shape, exponents.shape])
    assert shape == expected.shape
    assert scheme.stored(shape) == [
        (torch.uint8, tuple(blocks.shape)),
        (torch.uint8, tuple(exponents.shape)),
    ]
    widened = torch.full(shape, 7.0, dtype=dtype)
    scheme.widen([blocks, exponents], widened)
    assert torch.equal(widened.nan_to_num(-1.0), expected.nan_to_num(-1.0))


# Models


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, torch.Tensor]]:
    """Directories, and the logits that transformers computes; each made once."""
    made: dict[str, tuple[Path, torch.Tensor]] = {}

    def get(kind: str) -> tuple[Path, torch.Tensor]:
        if kind not in made:
            directory = published(kind, tmp_path_factory.mktemp(kind) / "model")
            torch.set_num_threads(1)
            made[kind] = directory, generated(loaded(directory))
        return made[kind]

    return get


Models = Callable[[str], tuple[Path, torch.Tensor]]


@pytest.mark.parametrize("budget", ["default", "least"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_model_that_transformers_widens(
    models: Models, stream: Make, kind: str, budget: str
) -> None:
    directory, expected = models(kind)
    options = {} if budget == "default" else {"resident_bytes": least(stream, directory)}
    model = stream(directory, **options)
    assert torch.equal(generated(model), expected)
    assert getattr(model.config, "quantization_config", None) is None


@pytest.mark.parametrize("compute", ["packed", "widened"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_every_way_to_compute_gives_the_same_logits(
    models: Models, stream: Make, kind: str, compute: str
) -> None:
    directory, expected = models(kind)
    model = stream(directory, compute=compute, resident_bytes=least(stream, directory) * 3)
    assert torch.equal(generated(model, 20), expected[:20])


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_another_dtype_is_widened_to_at_once(models: Models, stream: Make, kind: str) -> None:
    directory, _ = models(kind)
    expected = generated(loaded(directory, torch.float32), 10)
    assert torch.equal(generated(stream(directory, dtype="float32"), 10), expected)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_the_stored_bytes_are_what_is_kept(models: Models, stream: Make, kind: str) -> None:
    """With less memory than the model takes in bfloat16, nothing is read twice."""
    directory, _ = models(kind)
    budget = sum(p.nbytes for p in loaded(directory).parameters()) * 9 // 10
    model = stream(directory, resident_bytes=budget)
    with torch.no_grad():
        model(IDS)
        before = model.weight_stream.stats.bytes_read
        assert 0 < before < budget
        model(IDS)
    assert model.weight_stream.stats.bytes_read == before


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [(16, 16), (64, 64), (1, 64), None])
def test_blocks_of_all_sizes_and_one_scale_for_a_matrix(
    tmp_path: Path, stream: Make, block: tuple[int, int] | None, scales: torch.dtype
) -> None:
    directory = published("qwen3_moe", tmp_path / "model")
    if block is not None:
        transformers.Qwen3MoeForCausalLM(loaded(directory).config).save_pretrained(directory)
        in_fp8(directory, block, scales)
    else:

        def one_scale(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            ends = "_scale_inv"
            return {
                name: weight.amax().to(scales) if name.endswith(ends) else weight
                for name, weight in weights.items()
            }

        rewrite(directory, one_scale)
        about = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None}
        configure(directory, quantization_config=about)
    expected = generated(loaded(directory), 10)
    assert torch.equal(generated(stream(directory), 10), expected)


def test_a_module_of_ones_own_is_widened_too(tmp_path: Path, stream: Make) -> None:
    """Names and dtypes show what holds a weight, without a configuration."""
    path = tmp_path / "weights.safetensors"
    steps, scales = fp8_of(torch.randn(64, 32), (16, 16))
    save_file({"0.weight": steps, "0.weight_scale_inv": scales}, path)
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(32, 64, bias=False))
    weight = torch.empty(64, 32)
    BlockFp8((16, 16), steps.dtype, scales.dtype).widen([steps, scales], weight)
    x = torch.randn(5, 32)
    assert torch.equal(stream(module, path)(x), x @ weight.T)


def test_adapters_learn_the_same_on_it(tmp_path: Path) -> None:
    """Autograd keeps no widened matrix: it is widened again in backward."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    directory = published("llama", tmp_path / "model")

    def gradients(model: Any) -> list[torch.Tensor]:
        torch.manual_seed(1)
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        adapted = peft.get_peft_model(model, lora)
        adapted(IDS, labels=IDS).loss.backward()
        return [p.grad for p in adapted.parameters() if p.requires_grad]

    expected = gradients(loaded(directory))
    with nvmeio.stream_model(directory, trainable=True) as model:
        for one, other in zip(gradients(model), expected, strict=True):
            assert torch.equal(one, other)


# Refusals


@pytest.mark.parametrize(
    "scales", [torch.ones(3, 2), torch.ones(2), torch.ones(4, 2, dtype=torch.int32)]
)
def test_scales_that_do_not_fit_are_refused(tmp_path: Path, scales: torch.Tensor) -> None:
    path = tmp_path / "weights.safetensors"
    steps, _ = fp8_of(torch.randn(64, 32), (16, 16))
    save_file({"0.weight": steps, "0.weight_scale_inv": scales}, path)
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(32, 64, bias=False))
    with pytest.raises(nvmeio.IntegrityError, match=r"'0\.weight_scale_inv' .* a scale for each"):
        nvmeio.stream_model(module, path)


def test_exponents_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    directory = published("gpt_oss", tmp_path / "model")
    rewrite(
        directory,
        lambda weights: {
            name: weight[:, 1:].clone() if name.endswith("_scales") else weight
            for name, weight in weights.items()
        },
    )
    with pytest.raises(nvmeio.IntegrityError, match=r"_blocks' .* and exponents"):
        nvmeio.stream_model(directory)


def test_experts_of_one_tensor_in_different_schemes_are_refused(tmp_path: Path) -> None:
    directory = published("qwen3_moe", tmp_path / "model")

    def one_is_wide(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        name = "model.layers.1.mlp.experts.3.up_proj.weight"
        weights[name] = weights[name].bfloat16()
        del weights[f"{name}_scale_inv"]
        return weights

    rewrite(directory, one_is_wide)
    with pytest.raises(nvmeio.IntegrityError, match="not held in one way"):
        nvmeio.stream_model(directory)


# Packing


@pytest.mark.parametrize("kind", KINDS)
def test_pack_carries_the_stored_bytes_over(
    models: Models, stream: Make, tmp_path: Path, kind: str
) -> None:
    directory, expected = models(kind)
    report = pack(directory, tmp_path / "packed")
    stored = weights_file(directory).stat().st_size
    packed = weights_file(tmp_path / "packed")
    assert packed.name == "model-packed.safetensors"
    assert packed.stat().st_size < stored + (256 << 10)
    assert report.quantised == 0
    assert "quantization_config" not in json.loads((tmp_path / "packed/config.json").read_text())
    model = stream(tmp_path / "packed", resident_bytes=least(stream, tmp_path / "packed"))
    assert torch.equal(generated(model, 50), expected[:50])
    with pytest.raises(OSError, match=r"model\.safetensors"):
        loaded(tmp_path / "packed")


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_pack_widens_where_a_dtype_is_asked_for(
    models: Models, stream: Make, tmp_path: Path, kind: str
) -> None:
    directory, expected = models(kind)
    pack(directory, tmp_path / "packed", dtype="bfloat16")
    pack(directory, tmp_path / "fused", dtype="bfloat16", keep_fused=True)
    assert torch.equal(generated(loaded(tmp_path / "fused"), 20), expected[:20])
    assert torch.equal(generated(stream(tmp_path / "packed"), 20), expected[:20])


@pytest.mark.parametrize("kind", ["deepseek_v3", "gpt_oss"])
def test_pack_quantises_anew_what_it_is_asked_to(
    models: Models, stream: Make, tmp_path: Path, kind: str
) -> None:
    """As the model that transformers widens, and what is left out stays as it is stored."""
    directory, _ = models(kind)
    loaded(directory).save_pretrained(tmp_path / "widened")
    left = ["o_proj", "experts"]
    options: Any = {"quant_bits": 8, "quant_group_size": 32, "modules_to_not_convert": left}
    report = pack(directory, tmp_path / "packed", **options)
    other = pack(tmp_path / "widened", tmp_path / "from widened", **options)
    assert report.quantised == other.quantised > 0
    assert report.relative_error == other.relative_error
    size, wide = (weights_file(tmp_path / n).stat().st_size for n in ("packed", "from widened"))
    assert size < wide
    with torch.no_grad():
        logits = [
            stream(tmp_path / name, compute="widened")(IDS).logits
            for name in ("packed", "from widened")
        ]
    assert torch.equal(*logits)


def test_a_packed_expert_that_has_rotted_is_found(
    models: Models, stream: Make, tmp_path: Path
) -> None:
    directory, _ = models("qwen3_moe")
    pack(directory, tmp_path / "packed")
    path = weights_file(tmp_path / "packed")
    assert CliRunner().invoke(app, ["verify", str(path)]).exit_code == 0
    assert CliRunner().invoke(app, ["inspect", str(path)]).exit_code == 0
    content = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    entry = json.loads(content[8:header])["model.layers.1.mlp.experts.nvmeio_experts"]
    content[header + entry["data_offsets"][1] - 1] ^= 1
    path.write_bytes(content)
    assert CliRunner().invoke(app, ["verify", str(path)]).exit_code == 1
    with pytest.raises(nvmeio.IntegrityError, match=r"expert \d+ of .*experts"), torch.no_grad():
        stream(tmp_path / "packed")(torch.arange(64).reshape(1, 64))


@pytest.mark.parametrize(
    "change",
    [
        {"scheme": "fp9"},
        {"scheme": "fp8", "block": [0, 16]},
        {"scheme": "fp8", "steps": "F32"},
        {"scheme": "mxfp4"},
    ],
)
def test_an_index_with_another_scheme_is_refused(
    models: Models, tmp_path: Path, change: dict[str, Any]
) -> None:
    directory, _ = models("llama")
    pack(directory, tmp_path / "packed")
    path = weights_file(tmp_path / "packed")
    metadata = dict(read_header(path).metadata)
    index = json.loads(metadata[KEY])
    assert index["version"] == 2
    for entry in index["quantised"].values():
        entry.update(change)
    index["sealed"] = False
    del metadata[SEAL]
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata | {KEY: json.dumps(index)})
    with pytest.raises(nvmeio.IntegrityError, match="is not a valid packed model"):
        nvmeio.stream_model(tmp_path / "packed")
