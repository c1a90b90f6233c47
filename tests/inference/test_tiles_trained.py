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
from nvmeio.checkpoint.safetensors import save_safetensors
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
    for _ in range(2):
        if trainable:  # read for each use, as adapters want it
            assert torch.allclose(cut(x), net(x), atol=1e-5)
        else:
            with pytest.raises(RuntimeError, match="where a layer was cut to fit"):
                cut(x)
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
    save_safetensors(dict(Tied().state_dict()), tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = Tied()
    model = stream(empty, tmp_path, resident_bytes=100_000)
    with pytest.raises(RuntimeError, match="does not call the module that it belongs to"):
        model(torch.tensor([[1, 2, 3]]))
