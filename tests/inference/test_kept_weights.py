"""Weights that somebody took from a streamed layer: in its call, or when that had ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from inference._stream_parts import Make
from torch import nn

from nvmeio import save_safetensors

LAYERS = 6
WIDTH = 64


class Layer(nn.Module):
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * self.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Late(Net):
    """Looks at its layers' weights when their calls have ended."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        taken = []
        for layer in self.layers:
            x = layer(x)
            taken.append((layer.scale, layer.linear.bias))
        for scale, bias in taken:
            x = x * scale + bias
        return x


def made(
    kind: type[Net], directory: Path, stream: Make, dtype: torch.dtype = torch.float32, **room: Any
) -> tuple[Net, Net]:
    """A model in memory, and the same one streamed, from a file in `dtype`."""
    torch.manual_seed(0)
    whole = kind().to(dtype)
    save_safetensors(whole.state_dict(), directory / "net.safetensors")
    with torch.device("meta"):
        empty = kind()
    streamed = stream(empty, directory / "net.safetensors", dtype=torch.float32, **room)
    assert not any(unit.resident for unit in streamed.weight_stream.units)
    return whole.float(), streamed


def looked_at(layer: Any) -> list[torch.Tensor]:
    weight = layer.linear.weight
    return [weight, weight.T, weight[3:5], layer.linear.bias, layer.scale]


def keep(kept: list[torch.Tensor]) -> Callable[..., None]:
    return lambda layer, *_: kept.extend(looked_at(layer))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["as stored", "converted"])
def test_what_a_hook_keeps_stays_what_it_was(
    dtype: torch.dtype, tmp_path: Path, stream: Make
) -> None:
    """Its memory was the next layer's."""
    room = {"resident_bytes": 50_000, "window": 2}
    whole, net = made(Net, tmp_path, stream, dtype, **room)
    kept: list[torch.Tensor] = []
    with net.layers[1].register_forward_hook(keep(kept)):
        x = torch.randn(3, WIDTH)
        if dtype == torch.float32:
            assert net(x).equal(whole(x))
        else:  # there is room for the conversion of one layer, and that is kept
            with pytest.raises(MemoryError, match=r"no room to convert .* which somebody keeps"):
                net(x)
    for tensor, wanted in zip(kept, looked_at(whole.layers[1]), strict=True):
        assert tensor.equal(wanted)
    del tensor
    kept.clear()
    for _ in range(2):
        assert net(x).equal(whole(x))


@torch.no_grad()
def test_without_room_for_what_is_kept_a_pass_is_refused(tmp_path: Path, stream: Make) -> None:
    whole, net = made(Net, tmp_path, stream, resident_bytes=25_000, window=1)
    x = torch.randn(3, WIDTH)
    kept: list[torch.Tensor] = []
    with net.layers[1].register_forward_hook(keep(kept)):
        for _ in range(2):
            with pytest.raises(MemoryError, match=r"no room for layers.* tensors over weights"):
                net(x)
    assert kept[0].equal(whole.layers[1].linear.weight)
    kept.clear()
    assert net(x).equal(whole(x))


@torch.no_grad()
def test_a_weight_is_not_looked_at_when_its_layers_call_has_ended(
    tmp_path: Path, stream: Make
) -> None:
    """Whether it was there still was a matter of microseconds; then the next layer came over it."""
    _, net = made(Late, tmp_path, stream, resident_bytes=50_000, window=2)
    for _ in range(100):
        with pytest.raises(RuntimeError, match="a weight of a streamed model is used"):
            net(torch.randn(3, WIDTH))


@torch.no_grad()
def test_a_weight_that_is_replaced_when_its_layers_call_has_ended_is_refused(
    tmp_path: Path, stream: Make
) -> None:
    """The replacement was gone, without a word, when the layer's memory went."""
    whole, net = made(Net, tmp_path, stream, resident_bytes=50_000, window=2)
    x = torch.randn(3, WIDTH)
    layer: Any = net.layers[2]
    before = layer.linear.bias
    for _ in range(100):
        layer(x)
        layer.linear.bias = nn.Parameter(torch.zeros(WIDTH))
        with pytest.raises(RuntimeError, match="'bias' of a Linear was replaced"):
            net(x)
        layer.linear.bias = before
    assert net(x).equal(whole(x))
