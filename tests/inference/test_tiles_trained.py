"""Tiles: gradients and adapters through them, and weights that are used without their module."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_accelerator import accelerator
from inference._tiled import (
    BUDGET,
    NARROW,
    OUTPUTS,
    WIDE,
    Make,
    empty_net,
    saved_net,
    tiles_of,
    whole_numbers,
)
from torch import nn
from torch.nn import functional

import nvmeio
from nvmeio.checkpoint.safetensors import load_safetensors, save_safetensors
from nvmeio.inference import weight_stream
from nvmeio.inference._plan import units

pytestmark = pytest.mark.usefixtures("small_ones_are_cut")


# Training


def test_gradients_go_through_tiles(tmp_path: Path, stream: Make) -> None:
    whole = saved_net(tmp_path / "net.safetensors")
    net = stream(empty_net(), tmp_path / "net.safetensors", resident_bytes=BUDGET, trainable=True)
    assert len(tiles_of(net, "head")) > 1
    for seed in range(2):
        gradients = []
        for model in (whole, net):
            x = whole_numbers(3, NARROW, seed=seed).requires_grad_()
            output = model(x)
            output.backward(whole_numbers(3, OUTPUTS, seed=seed + 9))
            gradients.append((output.detach(), x.grad))
        assert gradients[0][0].equal(gradients[1][0])
        assert gradients[0][1].equal(gradients[1][1])


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_gradients_of_a_tiled_layer_are_refused(name: str, tmp_path: Path, stream: Make) -> None:
    """The bias, which is always there, was trained, and was in no state dict."""
    saved_net(tmp_path / "net.safetensors")
    net = stream(empty_net(), tmp_path / "net.safetensors", resident_bytes=BUDGET, trainable=True)
    assert tiles_of(net, "head")
    getattr(net.head, name).requires_grad_(True)
    x = whole_numbers(3, NARROW).requires_grad_()
    with pytest.raises(RuntimeError, match=f"'{name}' of a Linear requires gradients"):
        net(x)
    getattr(net.head, name).requires_grad_(False)
    net(x).sum().backward()
    assert x.grad is not None


def test_gradients_of_an_embedding_read_by_rows_are_refused(tmp_path: Path, stream: Make) -> None:
    path = tmp_path / "net.safetensors"
    whole = nn.Sequential(nn.Embedding(OUTPUTS, NARROW), nn.ReLU())
    save_safetensors(whole.state_dict(), path)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Embedding(OUTPUTS, NARROW), nn.ReLU())
    net = stream(empty, path, resident_bytes=BUDGET, trainable=True, layers=[])
    ids = torch.arange(3)
    assert net(ids).equal(whole(ids))
    net[0].weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match="'weight' of an Embedding requires gradients"):
        net(ids)


def test_gradients_of_tiles_are_added_in_float32(tmp_path: Path, stream: Make) -> None:
    """In bfloat16 256 and 1 are 256 again, however often 1 is added."""
    path = tmp_path / "one.safetensors"
    save_safetensors({"0.weight": torch.ones(4 * 256, 64, dtype=torch.bfloat16)}, path)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(64, 4 * 256, bias=False, dtype=torch.bfloat16))
    net = stream(empty, path, resident_bytes=100_000, trainable=True)
    tiles = tiles_of(net, "0")
    assert len(tiles) > 2
    x = torch.ones(1, 64, dtype=torch.bfloat16, requires_grad=True)
    given = torch.zeros(1, 4 * 256, dtype=torch.bfloat16)
    for tile in tiles:
        given[0, tile.modules[0].first] = 1
    given[0, tiles[-1].modules[0].first] = 256  # which backward comes to first
    net(x).backward(given)
    assert x.grad is not None
    wanted = torch.tensor(256.0 + len(tiles) - 1).bfloat16()
    assert wanted > 256
    assert bool((x.grad == wanted).all())


class Adapted(nn.Module):
    """A matrix of low rank beside a layer, as PEFT makes it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        torch.manual_seed(1)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.base(x) + self.up(self.down(x))
        return found


def test_adapters_beside_tiles_have_the_gradients_that_they_have_in_memory(
    tmp_path: Path, stream: Make
) -> None:
    whole: Any = saved_net(tmp_path / "net.safetensors")
    net = stream(empty_net(), tmp_path / "net.safetensors", resident_bytes=BUDGET, trainable=True)
    learned = []
    for model in (whole, net):
        model.head = Adapted(model.head)
        model.layers[0][0] = Adapted(model.layers[0][0])
        trained = [p for p in model.parameters() if p.requires_grad]
        assert len(trained) == 4
        for step in range(2):  # gradients are added
            model(whole_numbers(3, NARROW, seed=step)).square().mean().backward()
        learned.append([p.grad for p in trained])
    for found, wanted in zip(learned[1], learned[0], strict=True):
        scale = float(wanted.abs().max())
        assert scale > 0
        torch.testing.assert_close(found / scale, wanted / scale, rtol=0, atol=1e-4)


def test_gradients_go_through_tiles_on_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = saved_net(tmp_path / "net.safetensors")
    given = whole_numbers(3, OUTPUTS, seed=9)
    with accelerator(monkeypatch) as cuda:
        net = nvmeio.stream_model(
            empty_net(),
            tmp_path / "net.safetensors",
            resident_bytes=BUDGET,
            trainable=True,
            device="cuda",
        )
        try:
            assert len(tiles_of(net, "head")) > 1
            x = cuda.tensor(whole_numbers(3, NARROW)).requires_grad_()
            output = net(x)
            output.backward(cuda.tensor(given))
            found = cuda.value(output.detach()), cuda.value(x.grad)
        finally:
            net.weight_stream.close()
    known = whole_numbers(3, NARROW).requires_grad_()
    wanted = whole(known)
    wanted.backward(given)
    assert found[0].equal(wanted.detach())
    assert found[1].equal(known.grad)


class Uncalled(nn.Module):
    """Uses a weight of a child's, and does not call the child."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.a, self.b = nn.Linear(NARROW, WIDE, bias=False), nn.Linear(WIDE, NARROW, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.a.weight
        between = functional.linear(x, weight) if self.way == "linear" else x @ weight.T.float()
        found: torch.Tensor = self.b(between)
        return found


@pytest.mark.parametrize("way", ["linear", "transposed"])
@pytest.mark.parametrize("trainable", [False, True])
def test_a_weight_that_is_used_without_its_module_is_no_garbage(
    tmp_path: Path, stream: Make, way: str, trainable: bool
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(Uncalled(way), Uncalled(way)).requires_grad_(False)
    save_safetensors(dict(net.state_dict()), tmp_path / "model.safetensors")
    x = torch.randn(3, NARROW)
    with torch.device("meta"):
        empty = nn.Sequential(Uncalled(way), Uncalled(way))
    whole = stream(copy.deepcopy(empty), tmp_path, resident_bytes=BUDGET * 2, trainable=trainable)
    assert torch.equal(whole(x), net(x))
    names = whole.state_dict().keys()
    whole.weight_stream.close()
    cut = stream(empty, tmp_path, resident_bytes=BUDGET // 2, trainable=trainable)
    for _ in range(2):  # read for each use
        assert torch.allclose(cut(x), net(x), atol=1e-5)
    assert cut.state_dict().keys() == names
    assert sum(p.numel() for p in cut.parameters()) == 4 * NARROW * WIDE


def test_a_head_that_takes_the_embeddings_weight_itself_is_no_garbage(
    tmp_path: Path, stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(OUTPUTS, NARROW)
            self.layers = nn.ModuleList(nn.Linear(NARROW, NARROW) for _ in range(2))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            return functional.linear(x, self.embed.weight)

    monkeypatch.setattr(units, "SMALL_BYTES", 0)
    monkeypatch.setattr(weight_stream, "_MOST_TABLE_BYTES", 0)  # a smaller table is copied
    save_safetensors(dict(Tied().state_dict()), tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = Tied()
    model = stream(empty, tmp_path, resident_bytes=100_000)
    ids = torch.tensor([[1, 2, 3]])
    with pytest.raises(RuntimeError, match="was used outside a call of its module") as refused:
        model(ids)
    model.weight_stream.close()
    line = str(refused.value).partition("Give stream_model ")[2]
    assert line == "layers=['embed', *(f'layers.{n}' for n in range(2))]"
    with torch.device("meta"):
        empty = Tied()
    again = stream(empty, tmp_path, resident_bytes=1 << 20, **eval(f"dict({line})"))
    whole = Tied()
    whole.load_state_dict(load_safetensors(tmp_path / "model.safetensors"))
    with torch.no_grad():
        assert again(ids).equal(whole(ids))


class PastTheLayer(nn.Module):
    """Its layers are called, or a child, a weight or a view of a weight of theirs is used.

    As in LightGlue's matching, ModernVBert's embeddings and DiT's first norm.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(NARROW, NARROW)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        views: list[torch.Tensor] = []
        for layer in self.layers:
            inner: Any = layer[0]
            if self.way == "a child":
                x = inner(x)
            elif self.way == "a weight":
                x = functional.linear(x, inner.weight, inner.bias)
            elif self.way == "a view":
                views.append(inner.weight.t())
                x = x @ views[-1] + inner.bias
            else:
                x = layer(x)
        for view in views:  # which all others have gone by
            x = x @ view
        return x


@torch.no_grad()
@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("way", ["a child", "a weight", "a view", "a call"])
def test_what_is_used_past_its_layer_computes_the_same(
    way: str, stays: bool, tmp_path: Path, stream: Make
) -> None:
    """An error in transformers' LightGlue and diffusers' DiT, also where all layers stay."""
    whole = PastTheLayer(way)
    save_safetensors(whole.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = PastTheLayer(way)
    least = 64 << 20 if stays else 3 * (NARROW * NARROW + NARROW) * 4
    model = stream(empty, tmp_path, resident_bytes=least)
    assert {unit.resident for unit in model.weight_stream.units} == {stays}
    x = torch.randn(3, NARROW)
    for _ in range(3):
        assert model(x).equal(whole(x))


@torch.no_grad()
def test_a_weight_that_is_used_within_another_layers_call_is_refused(
    tmp_path: Path, stream: Make
) -> None:
    """It would take that layer's weights away, while it may have looked at them."""
    whole = PastTheLayer("a call")
    save_safetensors(whole.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = PastTheLayer("a call")
    model = stream(empty, tmp_path, resident_bytes=3 * (NARROW * NARROW + NARROW) * 4)
    x = torch.randn(3, NARROW)
    inner = model.layers[2][0]
    hook = model.layers[1].register_forward_pre_hook(lambda _, given: (given[0] @ inner.weight,))
    with pytest.raises(
        RuntimeError, match="Name a module in layers= that is called and holds both"
    ):
        model(x)
    hook.remove()
    assert model(x).equal(whole(x))
