"""Directories as others leave them: adapters, quantised weights, weights under two names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from inference._models import llama, transformers, weights_file
from inference._published import configure, in_fp8, rewrite
from safetensors.torch import load_file, save_file
from torch import nn

import nvmeio
import nvmeio.integrations.transformers as integration
from nvmeio._formats import model_directory

IDS = torch.arange(3, 11).reshape(1, 8)


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(IDS).logits
    return logits


def saved(tmp_path: Path, model: Any = None) -> Path:
    directory = tmp_path / "model"
    (llama(layers=2) if model is None else model).save_pretrained(directory)
    return directory


# Every way to read a directory


def by_streaming(directory: Path) -> Any:
    return nvmeio.stream_model(directory)


def by_packing(directory: Path) -> Any:
    packed = directory.parent / "packed"
    nvmeio.inference.pack(directory, packed)
    return nvmeio.stream_model(packed)


def by_the_integration(directory: Path) -> Any:
    return integration.from_pretrained(transformers.LlamaForCausalLM, directory)


def into_a_module(directory: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(config).eval()
    return nvmeio.stream_model(module, directory)


WAYS = [by_streaming, by_packing, by_the_integration, into_a_module]


# Adapters


@pytest.mark.parametrize("read", WAYS)
def test_an_adapter_beside_the_weights_is_refused_and_the_way_out_works(
    tmp_path: Path, read: Callable[[Path], Any]
) -> None:
    """`from_pretrained` adds it; streaming and packing left it out without a word."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    directory = saved(tmp_path)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    base = transformers.LlamaForCausalLM.from_pretrained(directory)
    peft.get_peft_model(base, lora).save_pretrained(directory)
    expected = logits_of(transformers.LlamaForCausalLM.from_pretrained(directory).eval())
    with pytest.raises(ValueError, match=r"adapter_config\.json describes an adapter.* Move"):
        read(directory)
    assert sorted(tmp_path.iterdir()) == [directory]

    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for file in directory.glob("adapter_*"):
        shutil.move(file, adapter)
    model = peft.PeftModel.from_pretrained(read(directory), adapter)
    assert torch.equal(logits_of(model.eval()), expected)


# Quantised by others


QUANTISED = r"is quantised by {}, which nvmeio does not read"


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("given", ["directory", "module"])
def test_a_quantised_checkpoint_is_refused_as_what_it_is(
    tmp_path: Path, given: str, strict: bool
) -> None:
    """It was called another model's, with the advice strict=False, which left the scales out."""
    directory = saved(tmp_path)
    config = transformers.AutoConfig.from_pretrained(directory)
    in_fp8(directory)
    configure(directory, quantization_config={"quant_method": "int7"})
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(config).eval()
    arguments = (directory,) if given == "directory" else (module, directory)
    with pytest.raises(ValueError, match=QUANTISED.format("int7")) as refused:
        nvmeio.stream_model(*arguments, strict=strict)
    assert "strict" not in str(refused.value)


@pytest.mark.parametrize("read", WAYS)
def test_a_checkpoint_in_fp8_is_read_as_transformers_reads_it(
    tmp_path: Path, read: Callable[[Path], Any]
) -> None:
    directory = saved(tmp_path)
    in_fp8(directory)
    expected = logits_of(transformers.LlamaForCausalLM.from_pretrained(directory).eval())
    assert torch.equal(logits_of(read(directory)), expected)


@pytest.mark.parametrize(
    ("names", "method"),
    [
        (["a.weight", "a.weight_scale_inv"], "fp8"),
        (["a.weight", "a.SCB"], "bitsandbytes"),
        (["a.weight", "a.absmax", "a.quant_map"], "bitsandbytes"),
        (["a.qweight", "a.qzeros", "a.scales", "a.g_idx"], "gptq or awq"),
        (["a.weight_packed", "a.weight_scale", "a.weight_shape"], "compressed-tensors"),
        (["a.weight", "a.weight_scale"], "compressed-tensors"),
        (["a.experts.down_proj_blocks", "a.experts.down_proj_scales"], "mxfp4"),
        (["a.weight", "a.bias", "a.scales", "b_blocks", "logit_scale"], None),
    ],
)
def test_names_of_tensors_show_who_quantised_them(names: list[str], method: str | None) -> None:
    found = model_directory.quantisation_among(names, names)
    assert (None if found is None else found.method) == method


def test_a_quantised_file_without_a_configuration_is_refused(tmp_path: Path) -> None:
    """A module of one's own, and a file of weights: only names tell."""
    path = tmp_path / "weights.safetensors"
    steps = torch.zeros(8, 8, dtype=torch.int8)
    save_file({"0.weight": steps, "0.SCB": torch.ones(8)}, path)
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(8, 8, bias=False))
    for strict in (True, False):
        with pytest.raises(ValueError, match=QUANTISED.format("bitsandbytes")):
            nvmeio.stream_model(module, path, strict=strict)


@pytest.mark.parametrize(
    ("file", "content", "method"),
    [
        (
            "hf_quant_config.json",
            {"producer": {"name": "modelopt"}, "quantization": {}},
            "modelopt",
        ),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128}, "awq"),
    ],
)
def test_files_beside_the_configuration_name_a_quantisation(
    tmp_path: Path, file: str, content: dict[str, Any], method: str
) -> None:
    directory = saved(tmp_path)
    (directory / file).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=QUANTISED.format(method)):
        nvmeio.stream_model(directory)


# One weight under two names


def with_gamma(weights: dict[str, torch.Tensor], factor: float) -> dict[str, torch.Tensor]:
    old = {n.replace("LayerNorm.weight", "LayerNorm.gamma"): w * factor for n, w in weights.items()}
    return {**old, **weights}


def with_bare_names(weights: dict[str, torch.Tensor], factor: float) -> dict[str, torch.Tensor]:
    return {**{n.removeprefix("model."): w * factor for n, w in weights.items()}, **weights}


def bert() -> Any:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            hidden_size=64,
            num_attention_heads=4,
            intermediate_size=128,
            num_hidden_layers=2,
            vocab_size=64,
        )
    )


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("make", "twice"), [(bert, with_gamma), (llama, with_bare_names)])
def test_two_values_for_one_weight_are_refused_and_twins_are_not(
    tmp_path: Path, make: Callable[[], Any], twice: Any, strict: bool
) -> None:
    """The last one was taken, where transformers takes another."""
    model = make().eval()
    directory = saved(tmp_path, model)
    plain = load_file(weights_file(directory))
    rewrite(directory, lambda weights: twice(weights, 0.5))
    with pytest.raises(nvmeio.IntegrityError, match="one tensor in the model, with different"):
        nvmeio.stream_model(directory, strict=strict)
    rewrite(directory, lambda _: twice(plain, 1.0))
    with nvmeio.stream_model(directory, strict=strict) as streamed:
        assert torch.equal(logits_of(streamed), logits_of(model))


# Dtypes


@pytest.mark.parametrize("read", [by_streaming, by_packing, by_the_integration])
@pytest.mark.parametrize("shards", [False, True])
def test_mixed_files_have_the_dtype_that_transformers_gives_them(
    tmp_path: Path, read: Callable[[Path], Any], shards: bool
) -> None:
    """The first tensor of the file decided, where the first by name does: float32 came of it."""
    mixed = llama(layers=2)
    for name, parameter in mixed.named_parameters():
        if "norm" not in name:
            parameter.data = parameter.data.bfloat16()
    directory = tmp_path / "model"
    mixed.save_pretrained(directory, max_shard_size="100KB" if shards else "5GB")
    assert len(list(directory.glob("*.safetensors"))) > 1 or not shards
    configure(directory, dtype=None)
    whole = transformers.LlamaForCausalLM.from_pretrained(directory).eval()
    model = read(directory)
    assert model.dtype == whole.dtype == torch.bfloat16
    assert torch.equal(logits_of(model), logits_of(whole))


def test_the_indexs_own_dtype_comes_first(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    llama(layers=2).save_pretrained(directory, max_shard_size="100KB")
    configure(directory, dtype=None)
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"]["dtype"] = "float16"
    path.write_text(json.dumps(index))
    whole = transformers.LlamaForCausalLM.from_pretrained(directory).eval()
    with nvmeio.stream_model(directory) as model:
        assert model.dtype == whole.dtype == torch.float16
        assert torch.equal(logits_of(model), logits_of(whole))


# Buffers that no file has


class TableConfig(transformers.PretrainedConfig):  # type: ignore[misc,name-defined]
    model_type = "nvmeio-table"

    def __init__(self, dtype_of_table: str = "bool", sets: bool = False, **rest: Any) -> None:
        self.dtype_of_table, self.sets = dtype_of_table, sets
        super().__init__(**rest)


class Table(nn.Module):
    def __init__(self, config: TableConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        dtype = getattr(torch, config.dtype_of_table)
        self.register_buffer("seen", torch.ones(8, 8).tril().to(dtype), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.einsum("ts,bsh->bth", self.seen.to(x.dtype), self.linear(x))


class TableModel(transformers.PreTrainedModel):  # type: ignore[misc,name-defined]
    config_class = TableConfig

    def __init__(self, config: TableConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(Table(config) for _ in range(3))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Table) and self.config.sets:
            module.seen.copy_(torch.ones(8, 8).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("sets", [False, True])
@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "int64", "float32"])
def test_a_buffer_that_nothing_computes_is_refused(tmp_path: Path, dtype: str, sets: bool) -> None:
    """One of bool became all False: its content says nothing of whether it was set."""
    whole = TableModel(TableConfig(dtype, sets)).eval()
    whole.save_pretrained(tmp_path / "model")
    with torch.device("meta"):
        empty = TableModel(TableConfig(dtype, sets)).eval()
    if not sets:
        with pytest.raises(ValueError, match=r"buffer 'seen' of Table .* does not set all of it"):
            nvmeio.stream_model(empty, tmp_path / "model")
        return
    x = torch.randn(2, 8, 16)
    with nvmeio.stream_model(empty, tmp_path / "model") as model, torch.no_grad():
        assert torch.equal(model(x), whole(x))


def test_a_buffer_that_is_set_in_part_is_refused(tmp_path: Path) -> None:
    class Partly(TableModel):
        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, Table):
                module.seen[:4].zero_()

    Partly(TableConfig("float32")).save_pretrained(tmp_path / "model")
    with torch.device("meta"):
        empty = Partly(TableConfig("float32")).eval()
    with pytest.raises(ValueError, match=r"buffer 'seen' of Table .* does not set all of it"):
        nvmeio.stream_model(empty, tmp_path / "model")


# What is no checkpoint that can be read as it is


def test_a_model_with_code_of_its_own_is_refused_and_the_way_out_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers asked at the terminal, and named an argument that stream_model has not."""
    dynamic = pytest.importorskip("transformers.dynamic_module_utils")
    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    directory = saved(tmp_path)
    (directory / "configuration_mine.py").write_text(
        "from transformers import LlamaConfig\n"
        "class MineConfig(LlamaConfig):\n    model_type = 'mine'\n"
    )
    (directory / "modeling_mine.py").write_text(
        "from transformers import LlamaForCausalLM\n"
        "from .configuration_mine import MineConfig\n"
        "class Mine(LlamaForCausalLM):\n    config_class = MineConfig\n"
    )
    expected = logits_of(transformers.LlamaForCausalLM.from_pretrained(directory).eval())
    named = {
        "AutoConfig": "configuration_mine.MineConfig",
        "AutoModelForCausalLM": "modeling_mine.Mine",
    }
    configure(directory, model_type="mine", architectures=["Mine"], auto_map=named)
    with pytest.raises(ValueError, match="code of its own") as refused:
        nvmeio.stream_model(directory)
    names: dict[str, Any] = {"torch": torch, "transformers": transformers, "nvmeio": nvmeio}
    names["directory"] = directory
    steps = str(refused.value).partition("empty model yourself: ")[2].split("; ")
    config, model, streamed = steps
    exec(f"{config}\n{model}\nmodel.eval()\nstreamed = {streamed.removeprefix('then ')}", names)
    with names["streamed"].weight_stream:
        assert type(names["streamed"]).__name__ == "Mine"
        assert torch.equal(logits_of(names["streamed"]), expected)


def part_of_a_model(tmp_path: Path) -> tuple[Any, Path]:
    """A class whose configuration has no model_type, and a directory of one."""
    cls = getattr(transformers, "Qwen3OmniMoeCode2Wav", None)
    if cls is None:
        pytest.skip("this version of transformers has no class of this kind")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "decoder_dim": 48}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_quantizers": 4}
    rates = {"upsample_rates": [4, 3], "upsampling_ratios": [2, 2], "codebook_size": 40}
    directory = saved(tmp_path, cls(cls.config_class(**sizes, **heads, **rates)))
    if json.loads((directory / "config.json").read_text()).get("model_type"):
        pytest.skip("this version of transformers names the model_type of this class")
    return cls, directory


def test_a_directory_that_names_no_model_type_is_refused_and_the_way_out_works(
    tmp_path: Path,
) -> None:
    cls, directory = part_of_a_model(tmp_path)
    codes = IDS[:, :6].repeat(1, 4).reshape(1, 4, 6)
    with torch.no_grad():
        expected = cls.from_pretrained(directory).eval()(codes)[0]
    with pytest.raises(ValueError, match=r"config\.json names no model_type") as refused:
        nvmeio.stream_model(directory)
    names: dict[str, Any] = {"torch": torch, "nvmeio": nvmeio, "CLASS": cls}
    names["directory"] = directory
    steps = str(refused.value).partition("of its class yourself: ")[2].split("; ")
    config, model, streamed = steps
    exec(f"{config}\n{model}\nstreamed = {streamed.removeprefix('then ')}", names)
    with names["streamed"].weight_stream, torch.no_grad():
        assert torch.equal(names["streamed"](codes)[0], expected)


def test_a_class_reads_a_directory_that_names_no_model_type(tmp_path: Path) -> None:
    cls, directory = part_of_a_model(tmp_path)
    theirs = cls.from_pretrained(directory).state_dict()
    ours = integration.from_pretrained(cls, directory).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_directory_with_pickled_weights_names_the_way_out(tmp_path: Path) -> None:
    directory = saved(tmp_path)
    torch.save(load_file(weights_file(directory)), directory / "pytorch_model.bin")
    weights_file(directory).unlink()
    with pytest.raises(FileNotFoundError, match=r"pytorch_model\.bin.*save_pretrained"):
        nvmeio.stream_model(directory)
    transformers.LlamaForCausalLM.from_pretrained(directory).save_pretrained(tmp_path / "again")
    nvmeio.stream_model(tmp_path / "again").weight_stream.close()


def test_a_setting_that_unties_is_named_where_it_does(tmp_path: Path) -> None:
    """T5's configuration ties its embeddings whatever it is given."""
    sizes = {
        "vocab_size": 64,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 1,
        "num_heads": 4,
    }
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    t5.save_pretrained(tmp_path / "t5")
    tied = saved(tmp_path, llama(layers=1, tie_word_embeddings=True))
    for directory, other, says in (
        (tmp_path / "t5", "encoder.embed_tokens.weight", False),
        (tmp_path / "t5", "lm_head.weight", False),
        (tied, "lm_head.weight", True),
    ):
        whole = load_file(weights_file(directory))
        first = next(name for name in whole if "shared" in name or "embed_tokens" in name)
        save_file({**whole, other: torch.randn_like(whole[first])}, weights_file(directory))
        with pytest.raises(nvmeio.IntegrityError, match="other values") as refused:
            nvmeio.stream_model(directory)
        assert ("tie_word_embeddings=False" in str(refused.value)) is says, refused.value
        save_file(whole, weights_file(directory))


@pytest.mark.parametrize("save", [nvmeio.save, nvmeio.save_safetensors])
def test_the_state_of_a_streamed_model_is_refused_for_what_it_is(
    save: Callable[[Any, Path], Any], tmp_path: Path
) -> None:
    """It was said to be on the meta device, and that one could make it there."""
    model = nvmeio.stream_model(saved(tmp_path))
    with model.weight_stream, pytest.raises(TypeError, match="a streamed model's weights"):
        save(model.state_dict(), tmp_path / "state.safetensors")
    assert not (tmp_path / "state.safetensors").exists()
