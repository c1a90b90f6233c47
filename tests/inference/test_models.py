"""Streamed models compute what they compute when they are loaded whole, bit for bit."""

from __future__ import annotations

import inspect
import os
import pickle
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from inference._model_budget import Make, least, weights_of
from inference._models import (
    MODELS,
    inputs,
    llama,
    loaded,
    logits,
    prompt,
    saved,
    t5,
    tokens,
    transformers,
)
from torch import nn
from torch.nn.utils import prune

import nvmeio
from nvmeio.checkpoint.safetensors import load_safetensors, save_safetensors
from nvmeio.inference import WeightStream
from nvmeio.inference import weight_stream as weight_stream_module
from nvmeio.inference._plan import units as units_module
from nvmeio.integrations.transformers import save_pretrained


@pytest.mark.parametrize("budget", ["least", "half", "all"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_tokens_are_those_of_the_loaded_model(
    name: str, budget: str, tmp_path: Path, stream: Make
) -> None:
    saved(MODELS[name], tmp_path)
    whole = loaded(tmp_path)
    total = weights_of(whole)
    nbytes = {"least": least(stream, tmp_path), "half": total * 6 // 10, "all": 2 * total}[budget]
    model = stream(tmp_path, resident_bytes=nbytes)
    assert isinstance(model, type(whole))
    assert type(model).__name__ == type(whole).__name__
    assert all(p.is_meta for p in model.parameters() if p.nbytes > 1024)
    ids = prompt()
    assert logits(model, ids).equal(logits(whole, ids))
    assert tokens(model, ids).equal(tokens(whole, ids))
    other = prompt(batch=1, length=3, seed=1)
    assert tokens(model, other).equal(tokens(whole, other))
    stats = model.weight_stream.stats
    assert stats.resident_bytes + stats.window_bytes + stats.work_bytes <= nbytes
    if budget == "all":
        # Read once, never again; experts that no token needed not even once.
        assert stats.bytes_read <= 1.2 * total
        assert stats.streamed_bytes == 0
    else:
        assert stats.bytes_read > total
        assert stats.streamed_bytes > total // 3


def marian() -> Any:
    """Its positions were missed in its files."""
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "d_model": 64, "vocab_size": 128}
    ffn = {"encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    ends = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.MarianConfig(**sizes, **ffn, **heads, **ends, max_position_embeddings=32)
    return transformers.MarianMTModel(config)


def falcon_h1() -> Any:
    """Multiplies by a vector that its model computes for its layers: it was not set."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    mamba = {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
    config = transformers.FalconH1Config(**sizes, **heads, **mamba, vocab_size=128)
    return transformers.FalconH1ForCausalLM(config)


@pytest.mark.parametrize("make", [marian, falcon_h1])
def test_what_a_class_computes_instead_of_saving_it_is_computed(
    make: Callable[[], Any], tmp_path: Path, stream: Make
) -> None:
    saved(make, tmp_path)
    ids = prompt()
    model = stream(tmp_path)
    assert logits(model, ids).equal(logits(loaded(tmp_path), ids))


def test_parameters_that_a_constructor_makes_on_the_cpu_are_streamed(
    tmp_path: Path, stream: Make
) -> None:
    """DiffLlama's were found on the CPU."""
    config = transformers.DiffLlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
    )
    saved(lambda: transformers.DiffLlamaForCausalLM(config), tmp_path)
    ids = prompt()
    model = stream(tmp_path, resident_bytes=least(stream, tmp_path))
    assert all(p.is_meta for p in model.parameters() if p.nbytes > 1024)
    assert logits(model, ids).equal(logits(loaded(tmp_path), ids))


def test_a_buffer_that_nobody_computes_is_refused(
    tmp_path: Path, stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(llama, tmp_path)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "initialize_weights", lambda self: None)
    with pytest.raises(ValueError, match=r"buffer '.*inv_freq' .* does not set all of it"):
        stream(tmp_path)


def test_ids_that_follow_their_embedding_to_its_device_are_looked_up(
    tmp_path: Path, stream: Make
) -> None:
    """Llama 4 does so; where the embedding is read row by row its weight was on no real device."""
    saved(llama, tmp_path)
    ids = prompt()
    model = stream(tmp_path, resident_bytes=least(stream, tmp_path))
    weight = model.model.embed_tokens.weight
    assert weight.is_meta
    assert weight.device == torch.device("cpu")
    assert logits(model, ids.to(weight.device)).equal(logits(loaded(tmp_path), ids))


@pytest.mark.parametrize("trainable", [False, True])
def test_it_is_not_saved_as_a_whole(trainable: bool, tmp_path: Path, stream: Make) -> None:
    """A trainable one was saved without a word, and without its weights."""
    saved(llama, tmp_path / "model")
    model = stream(tmp_path / "model", resident_bytes=1 << 20, trainable=trainable)
    for save in (
        model.save_pretrained,
        model.model.save_pretrained,
        partial(save_pretrained, model),
    ):
        with pytest.raises(TypeError, match="copy the files that it streams from"):
            save(tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    model.adapter = nn.Linear(4, 4)  # what is trained is saved, of a trainable one
    if trainable:
        model.save_pretrained(tmp_path / "new")
        assert set(load_safetensors(tmp_path / "new")) == {"adapter.weight", "adapter.bias"}


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_shards_are_read_as_one_model(name: str, tmp_path: Path, stream: Make) -> None:
    saved(MODELS[name], tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model = stream(tmp_path, resident_bytes=1 << 20)
    assert tokens(model, prompt()).equal(tokens(loaded(tmp_path), prompt()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "mixtral", "t5"])
def test_weights_are_converted_as_transformers_converts_them(
    name: str, dtype: torch.dtype, tmp_path: Path, stream: Make
) -> None:
    """Of T5 some projections stay in float32 where the rest is in float16."""
    saved(MODELS[name], tmp_path)
    whole = loaded(tmp_path, dtype)
    budget = least(stream, tmp_path, dtype=dtype)
    model = stream(tmp_path, dtype=dtype, resident_bytes=budget)
    assert [p.dtype for p in model.parameters()] == [p.dtype for p in whole.parameters()]
    ids = prompt()
    assert logits(model, ids).equal(logits(whole, ids))
    assert tokens(model, ids).equal(tokens(whole, ids))
    assert model.weight_stream.stats.work_bytes > 0


def test_the_dtype_of_the_files_is_the_dtype_of_the_model(tmp_path: Path, stream: Make) -> None:
    saved(llama, tmp_path, torch.bfloat16)
    model = stream(tmp_path, resident_bytes=200_000)
    assert model.dtype is torch.bfloat16
    assert logits(model, prompt()).equal(logits(loaded(tmp_path), prompt()))
    assert model.weight_stream.stats.work_bytes == 0


def test_a_configuration_and_a_checkpoint_are_enough(tmp_path: Path, stream: Make) -> None:
    saved(llama, tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    model = stream(config, tmp_path / "model.safetensors", resident_bytes=400_000)
    assert logits(model, prompt()).equal(logits(loaded(tmp_path), prompt()))


def test_a_model_on_the_meta_device_is_changed_in_place(tmp_path: Path, stream: Make) -> None:
    saved(llama, tmp_path)
    whole = loaded(tmp_path)
    with torch.device("meta"):
        empty = type(whole)(whole.config)
    empty.eval()
    model = stream(empty, tmp_path, resident_bytes=400_000)
    assert model is empty
    assert logits(model, prompt()).equal(logits(whole, prompt()))


def test_generation_settings_come_with_a_directory(tmp_path: Path, stream: Make) -> None:
    saved(llama, tmp_path)
    whole = loaded(tmp_path)
    model = stream(tmp_path, resident_bytes=400_000)
    assert model.generation_config.to_dict() == whole.generation_config.to_dict()
    assert model.name_or_path == str(tmp_path)
    assert not model.training
    assert isinstance(model.weight_stream, WeightStream)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"do_sample": True, "seed": 7}])
def test_generate_works_unmodified(options: dict[str, Any], tmp_path: Path, stream: Make) -> None:
    saved(llama, tmp_path)

    def generate(model: Any) -> torch.Tensor:
        chosen = dict(options)
        torch.manual_seed(chosen.pop("seed", 0))
        ids = prompt()
        found: torch.Tensor = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, **chosen
        )
        return found

    model = stream(tmp_path, resident_bytes=least(stream, tmp_path))
    assert generate(model).equal(generate(loaded(tmp_path)))


# Other modules


class Block(nn.Module):
    """A layer with a buffer, a view of a parameter and a parameter of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, 2 * width)
        self.second = nn.Linear(2 * width, width)
        self.norm = nn.BatchNorm1d(width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.norm(self.second(self.first(x).relu())) * self.scale
        return found


class Net(nn.Module):
    """No transformer: layers in a list, a leaf before and one behind, a parameter outside."""

    def __init__(self, width: int = 48, layers: int = 4) -> None:
        super().__init__()
        self.enter = nn.Linear(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.bias = nn.Parameter(torch.zeros(width))
        self.exit = nn.Linear(width, 300)

    def forward(self, x: torch.Tensor, backwards: bool = False) -> torch.Tensor:
        x = self.enter(x) + self.bias
        for block in reversed(self.blocks) if backwards else self.blocks:
            x = block(x)
        found: torch.Tensor = self.exit(x)
        return found


def saved_net(path: Path, **options: Any) -> Net:
    torch.manual_seed(0)
    net = Net(**options)
    with torch.no_grad():
        for tensor in net.state_dict().values():
            if tensor.is_floating_point():
                tensor.uniform_(0.1, 0.4)
    save_safetensors(net.state_dict(), path, align=True)  # tests go by the places of tensors
    return net.eval()


def empty_net(**options: Any) -> Net:
    with torch.device("meta"):
        return Net(**options).eval()


@torch.no_grad()
def test_any_module_is_streamed(tmp_path: Path, stream: Make) -> None:
    whole = saved_net(tmp_path / "net.safetensors")
    net = stream(empty_net(), tmp_path / "net.safetensors", resident_bytes=200_000, window=2)
    names = [unit.name for unit in net.weight_stream.units]
    assert names == ["enter", *(f"blocks.{n}" for n in range(4)), "exit"]
    for seed in range(3):
        x = torch.randn(5, 16, generator=torch.Generator().manual_seed(seed))
        assert net(x).equal(whole(x))


@torch.no_grad()
def test_layers_may_be_given(tmp_path: Path, stream: Make) -> None:
    whole = saved_net(tmp_path / "net.safetensors")
    empty = empty_net()
    net = stream(
        empty,
        tmp_path / "net.safetensors",
        layers=["blocks.0.first", empty.blocks[0].second, "blocks.1"],
        resident_bytes=400_000,
    )
    names = [unit.name for unit in net.weight_stream.units]
    assert names[:4] == ["enter", "blocks.0.first", "blocks.0.second", "blocks.1"]
    x = torch.randn(5, 16)
    assert net(x).equal(whole(x))


class Table(nn.Module):
    """As a rotary embedding: no weights, and a buffer that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.linspace(0.5, 1.5, 16, device="cpu")
        self.register_buffer("scale", values, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Sharing(nn.Module):
    """Its layers share an activation and a table, or a matrix."""

    def __init__(self, matrix: bool = False) -> None:
        super().__init__()
        shared = [nn.ReLU(), nn.Linear(16, 16) if matrix else Table()]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), shared[0], nn.Linear(32, 16), shared[1])
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def saved_sharing(path: Path, matrix: bool) -> tuple[Sharing, Sharing]:
    torch.manual_seed(0)
    whole = Sharing(matrix)
    save_safetensors({name: p.data for name, p in whole.named_parameters()}, path)
    with torch.device("meta"):
        return whole, Sharing(matrix)


@torch.no_grad()
def test_layers_may_share_modules_without_weights(tmp_path: Path, stream: Make) -> None:
    """SGLang's rotary embedding is one object for all layers, and was refused."""
    whole, empty = saved_sharing(tmp_path / "net.safetensors", matrix=False)
    net = stream(empty, tmp_path / "net.safetensors", resident_bytes=20_000)
    assert len(net.weight_stream.units) == 4
    x = torch.randn(5, 16)
    for _ in range(3):
        assert net(x).equal(whole(x))


def test_layers_that_share_weights_are_refused(tmp_path: Path, stream: Make) -> None:
    _, empty = saved_sharing(tmp_path / "net.safetensors", matrix=True)
    with pytest.raises(ValueError, match=r"'layers.1' shares 'layers.0.3' and its weights"):
        stream(empty, tmp_path / "net.safetensors")


@pytest.mark.parametrize("layers", [["layers.0", "layers.0.1"], ["layers.0.1", "layers.0"]])
def test_layers_within_layers_are_refused(layers: list[str], tmp_path: Path, stream: Make) -> None:
    _, empty = saved_sharing(tmp_path / "net.safetensors", matrix=False)
    with pytest.raises(ValueError, match="is in or around another: name one"):
        stream(empty, tmp_path / "net.safetensors", layers=layers)


@torch.no_grad()
def test_a_plain_sequential_is_streamed_by_its_members(tmp_path: Path, stream: Make) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 8))
    save_safetensors(whole.state_dict(), tmp_path / "s.safetensors")
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 8))
    model = stream(empty, tmp_path / "s.safetensors", resident_bytes=100_000)
    x = torch.randn(3, 32)
    assert model(x).equal(whole(x))
    assert len(model.weight_stream.units) == 3


class Pair(NamedTuple):
    first: torch.Tensor
    rows: torch.Tensor


@dataclass
class Output(transformers.utils.ModelOutput):  # type: ignore[misc]
    rows: Any = None


@torch.no_grad()
@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda x, rows: rows, lambda found: found),
        (lambda x, rows: (x, [rows]), lambda found: found[1][0]),
        (lambda x, rows: {"rows": rows}, lambda found: found["rows"]),
        (Pair, lambda found: found.rows),
        (lambda x, rows: Output(rows=rows), lambda found: found.rows),
        (lambda x, rows: Output(rows=rows), lambda found: found["rows"]),
    ],
    ids=["tensor", "list", "dict", "named", "output", "item"],
)
@pytest.mark.parametrize("place", ["streams", "is converted", "stays, and is converted"])
@pytest.mark.parametrize("shown", ["weight", "counts"])
def test_an_output_that_is_a_view_of_a_weight_outlives_it(
    shown: str, place: str, wrap: Any, unwrap: Any, tmp_path: Path, stream: Make
) -> None:
    """Of layers that stay the next one was converted over it; a buffer was left as it was."""

    class Shows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(64, 64))
            self.counts: torch.Tensor
            self.register_buffer("counts", torch.empty(64, 64, dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> Any:
            return wrap(x, getattr(self, shown)[:2])

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Shows() for _ in range(4))

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            found = [layer(x) for layer in self.layers]
            return [unwrap(one) for one in found]

    dtype = torch.float32 if place == "streams" else torch.float16
    values = {f"layers.{n}.weight": torch.full((64, 64), float(n), dtype=dtype) for n in range(4)}
    values |= {f"layers.{n}.counts": torch.full((64, 64), n) for n in range(4)}
    save_safetensors(values, tmp_path / "v.safetensors")
    with torch.device("meta"):
        empty = Outer()
    room = 64 << 20 if "stays" in place else 80_000
    model = stream(
        empty, tmp_path / "v.safetensors", resident_bytes=room, window=1, dtype=torch.float32
    )
    assert {unit.resident for unit in model.weight_stream.units} == {"stays" in place}
    found = model(torch.zeros(1))
    assert [int(rows[0, 0]) for rows in found] == [0, 1, 2, 3]


@torch.no_grad()
def test_tensors_at_odd_addresses_in_the_file_compute_the_same(
    tmp_path: Path, stream: Make
) -> None:
    """A matrix product of one row gives other last bits where the matrix lies 8 bytes further."""
    safetensors = pytest.importorskip("safetensors.torch")
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 32))
    for shift in range(0, 16, 4):
        path = tmp_path / f"{shift}.safetensors"
        first = {"0.aaaa": torch.zeros(shift // 4 + 1)} if shift else {}
        safetensors.save_file({**first, **whole.state_dict()}, path)
        with torch.device("meta"):
            empty = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 32))
        model = stream(empty, path, resident_bytes=100_000, strict=False)
        x = torch.randn(1, 64)
        assert model(x).equal(whole(x))


def test_a_gradient_is_refused(tmp_path: Path, stream: Make) -> None:
    saved_net(tmp_path / "net.safetensors")
    net = stream(empty_net(), tmp_path / "net.safetensors", resident_bytes=400_000)
    with pytest.raises(RuntimeError, match="has no gradients"):
        net(torch.randn(5, 16, requires_grad=True))
    assert net(torch.randn(5, 16)).shape == (5, 300)


@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_require_the_grad_that_loaded_ones_do(
    frozen: bool, tmp_path: Path, stream: Make
) -> None:
    """torch chooses the kernel of a matrix product by it, with autograd off as well."""
    saved_net(tmp_path / "net.safetensors")
    empty = empty_net().requires_grad_(not frozen)
    net = stream(empty, tmp_path / "net.safetensors", resident_bytes=150_000)
    seen: set[bool] = set()
    for module in net.modules():
        module.register_forward_hook(
            lambda module, *_: seen.update(p.requires_grad for p in module.parameters(False))
        )
    found = net(torch.randn(5, 16))
    assert seen == {not frozen}
    assert not found.requires_grad  # nor does anything that is computed


def test_moving_and_converting_is_refused_where_it_changes_something(
    tmp_path: Path, stream: Make
) -> None:
    """It was taken silently, and gave other logits."""
    whole = saved_net(tmp_path / "net.safetensors")
    net = stream(empty_net(), tmp_path / "net.safetensors", resident_bytes=150_000)
    x = torch.randn(5, 16)
    for move in (net.half, net.double, net.blocks[0].bfloat16, lambda: net.to("meta")):
        with pytest.raises(RuntimeError, match="cannot be moved or converted"):
            move()
    assert net.to("cpu") is net
    assert net.float().blocks[1].to(torch.float32) is net.blocks[1]
    with torch.no_grad():
        assert net(x).equal(whole(x))


def test_buffers_in_memory_are_converted_where_weights_have_that_dtype(
    tmp_path: Path, stream: Make
) -> None:
    """As torch does: frequencies of a rotary embedding stayed in float32."""
    saved(llama, tmp_path, torch.bfloat16)
    whole, model = loaded(tmp_path), stream(tmp_path)
    ids = prompt()
    assert logits(model, ids).equal(logits(whole, ids))
    before = whole.model.rotary_emb.inv_freq
    for each in (whole, model):
        each.to(torch.bfloat16)
        assert each.model.rotary_emb.inv_freq.equal(before.bfloat16())
    assert logits(model, ids).equal(logits(whole, ids))


@torch.no_grad()
def test_what_is_not_streamed_is_converted_as_in_memory(tmp_path: Path, stream: Make) -> None:
    """Buffers and adapters kept their dtype where the weights had the wanted one already."""
    torch.manual_seed(0)
    whole: Any = Net().bfloat16().eval()
    save_safetensors(whole.state_dict(), tmp_path / "net.safetensors")
    net: Any = stream(empty_net().bfloat16(), tmp_path / "net.safetensors", resident_bytes=150_000)
    for each in (whole, net):
        each.register_buffer("scale", torch.full((16,), 0.3), persistent=False)
        each.blocks[0].adapter = nn.Linear(4, 4)
        each.to(torch.bfloat16)
        dtypes = {t.dtype for t in each.state_dict().values() if t.is_floating_point()}
        assert {*dtypes, each.scale.dtype} == {torch.bfloat16}
    names = [name for name, _ in net.named_parameters()]
    assert names == [name for name, _ in whole.named_parameters()]
    x = torch.randn(5, 16).bfloat16()
    assert net(x * net.scale).equal(whole(x * whole.scale))


@torch.no_grad()
@pytest.mark.parametrize("budget", [150_000, 1 << 20])
def test_weights_that_are_replaced_are_refused(budget: int, tmp_path: Path, stream: Make) -> None:
    """Streamed ones, resident ones, and those outside of the layers."""
    whole = saved_net(tmp_path / "net.safetensors")
    net = stream(empty_net(), tmp_path / "net.safetensors", resident_bytes=budget)
    x = torch.randn(5, 16)
    assert net(x).equal(whole(x))
    for module, name in ((net.blocks[2].second, "weight"), (net, "bias")):
        before = getattr(module, name)
        setattr(module, name, nn.Parameter(torch.zeros(before.shape)))
        with pytest.raises(RuntimeError, match=f"'{name}' of a .* was replaced"):
            net(x)
        setattr(module, name, before)
        assert net(x).equal(whole(x))


def test_the_encoder_may_be_called_alone(tmp_path: Path, stream: Make) -> None:
    saved(t5, tmp_path)
    whole, model = loaded(tmp_path), stream(tmp_path, resident_bytes=500_000)
    ids = prompt()
    with torch.no_grad():
        first, second = (m.get_encoder()(ids).last_hidden_state for m in (whole, model))
    assert first.equal(second)
    assert inputs(model, ids).keys() == {"input_ids", "decoder_input_ids"}


def test_ids_out_of_range_are_refused(tmp_path: Path, stream: Make) -> None:
    saved(llama, tmp_path)
    model = stream(tmp_path, resident_bytes=least(stream, tmp_path))
    with pytest.raises(IndexError, match="128 rows"):
        logits(model, torch.tensor([[128]]))
    assert logits(model, prompt()).equal(logits(loaded(tmp_path), prompt()))


def test_nvmeio_names_it() -> None:
    assert nvmeio.stream_model.__module__ == "nvmeio.inference.streaming"
    parameters = inspect.signature(nvmeio.stream_model).parameters.values()
    assert [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY] == [
        "model_or_config_or_path",
        "checkpoint",
    ]
    assert {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} == {
        "device": "cpu",
        "window": None,
        "resident_bytes": None,
        "host_bytes": None,
        "handle": None,
        "dtype": None,
        "kv_offload": False,
        "layers": None,
        "strict": True,
        "checksum": True,
        "revision": None,
        "progress": None,
        "trainable": False,
        "compute": "auto",
        "process_group": None,
        "tp_plan": None,
        "timeout_s": 120.0,
    }


def doubled(embedding: Any) -> None:
    embedding.forward = lambda ids: nn.functional.embedding(ids, embedding.weight) * 2


def pruned(embedding: Any) -> None:
    mask = torch.ones_like(embedding.weight)
    prune.custom_from_mask(embedding, "weight", mask if mask.is_meta else mask.triu())


@torch.no_grad()
@pytest.mark.parametrize("change", [doubled, pruned])
def test_an_embedding_that_computes_in_its_own_way_goes_on_so(
    change: Callable[[Any], None], tmp_path: Path, stream: Make
) -> None:
    """Its rows were looked up, whatever its forward did."""

    def made() -> Any:
        model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 32), nn.Linear(32, 32))
        change(model[0])
        return model

    whole = made()
    save_safetensors(whole.state_dict(), tmp_path / "m.safetensors")
    with torch.device("meta"):
        model = made()
    model = stream(model, tmp_path / "m.safetensors", layers=["1", "2"], resident_bytes=40_000)
    ids = torch.tensor([[1, 5, 63]])
    assert model(ids).equal(whole(ids))


def _funnel() -> tuple[Any, dict[str, Any]]:
    config = transformers.FunnelConfig(
        **{"block_sizes": [2, 2], "d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 64},
        vocab_size=64,
    )
    return transformers.FunnelModel(config), {"input_ids": torch.arange(3, 19)[None]}


def _glpn() -> tuple[Any, dict[str, Any]]:
    config = transformers.GLPNConfig(
        **{"hidden_sizes": [8, 16, 16, 16], "depths": [2, 1, 1, 1]},
        **{"num_attention_heads": [1, 2, 2, 2], "decoder_hidden_size": 8},
    )
    return transformers.GLPNForDepthEstimation(config), {"pixel_values": torch.rand(1, 3, 64, 64)}


def _modernvbert() -> tuple[Any, dict[str, Any]]:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.ModernVBertConfig(
        text_config={"hidden_size": 32, "vocab_size": 128, "pad_token_id": 0, **sizes},
        vision_config={"hidden_size": 32, "image_size": 64, "patch_size": 16, **sizes},
        **{"image_token_id": 100, "pixel_shuffle_factor": 2},
    )
    ids = torch.arange(3, 15)[None]
    ids[0, 2:6] = 100  # (64 / 16)^2 patches, of which 2 x 2 are one
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return transformers.ModernVBertModel(config), given | {
        "pixel_values": torch.rand(1, 1, 3, 64, 64)
    }


@pytest.mark.parametrize("make", [_funnel, _glpn, _modernvbert])
@torch.no_grad()
def test_models_that_do_not_call_their_layers_as_they_are_listed(make: Any, tmp_path: Path) -> None:
    """Lists of lists of layers, and embeddings that are called past their module: an error."""
    torch.manual_seed(0)
    made, given = make()
    made.save_pretrained(tmp_path)
    whole = type(made).from_pretrained(tmp_path)
    with pytest.raises(nvmeio.inference.BudgetTooSmall) as refused:
        nvmeio.stream_model(tmp_path, resident_bytes=1)
    for resident_bytes in (None, refused.value.least):
        with nvmeio.stream_model(tmp_path, resident_bytes=resident_bytes) as model:
            assert model(**given)[0].equal(whole(**given)[0])


@pytest.mark.timeout(120)
def test_an_interrupt_ends_the_making_of_a_deep_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C waited until a skeleton of 60,000 layers was made: 50 s."""
    saved(lambda: llama(layers=2), tmp_path)
    layers: list[nn.Linear] = []
    most = 1_000_000

    class Deep(nn.Module):
        @classmethod
        def _from_config(cls, config: Any, dtype: Any) -> nn.Module:
            layers.append(nn.Linear(1, 1))
            os.kill(os.getpid(), signal.SIGINT)
            while len(layers) < most:
                layers.append(nn.Linear(1, 1))
            return nn.Sequential()

    monkeypatch.setattr("nvmeio.inference._plan.transformers._class_of", lambda *_: Deep)
    with pytest.raises(KeyboardInterrupt):
        nvmeio.stream_model(tmp_path)
    assert 0 < len(layers) < most
    assert layers[0].weight.is_meta
    assert not torch.empty(1).is_meta


def test_a_streamed_model_is_of_its_own_class_and_of_the_one_for_type_checkers(
    tmp_path: Path,
) -> None:
    """`stream_model` was typed `Any`."""
    saved(lambda: llama(layers=2), tmp_path)
    cls = type(llama(layers=2))
    with nvmeio.stream_model(tmp_path) as model:
        stream: WeightStream = model.weight_stream
        assert isinstance(model, cls)
        assert isinstance(model, nvmeio.inference.StreamedModel)
        assert type(model).__name__ == cls.__name__
        with pytest.raises(TypeError, match="call stream_model in each process"):
            pickle.dumps(model)
    assert stream.closed


@torch.no_grad()
@pytest.mark.parametrize("norm", ["none", "layer_norm"])
def test_a_table_that_is_used_as_a_matrix_is_read_for_each_use(
    norm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeBERTa's relative positions, 1.5 MB in a real one: a pass at a small budget was refused."""
    config = transformers.DebertaV2Config(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        vocab_size=128,
        relative_attention=True,
        position_buckets=16,
        max_relative_positions=32,
        norm_rel_ebd=norm,
        pos_att_type=["p2c", "c2p"],
    )
    torch.manual_seed(0)
    whole = transformers.DebertaV2Model(config).eval()
    whole.save_pretrained(tmp_path)
    ids = torch.arange(3, 19).view(2, 8)
    expected = whole(ids).last_hidden_state
    monkeypatch.setattr(units_module, "SMALL_BYTES", 256)
    model = nvmeio.stream_model(tmp_path, resident_bytes=least(nvmeio.stream_model, tmp_path))
    with model.weight_stream as stream:
        tables = [unit for unit in stream.units if unit.row_modules and not unit.modules]
        assert "encoder.rel_embeddings" in {unit.name for unit in tables}
        for _ in range(2):
            assert torch.equal(model(ids).last_hidden_state, expected)
        # One that is larger than what may lie beside the budget.
        monkeypatch.setattr(weight_stream_module, "_MOST_TABLE_BYTES", 0)
        with pytest.raises(RuntimeError, match=r"Give stream_model layers=\['encoder\.rel_emb"):
            model(ids)
