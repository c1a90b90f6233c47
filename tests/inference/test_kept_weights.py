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
from nvmeio._residency.window import LentPool
from nvmeio.inference import BudgetTooSmall

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
    kind: type[Net], window: int, directory: Path, stream: Make, dtype: torch.dtype = torch.float32
) -> tuple[Net, Net]:
    """A model in memory, and the same streamed, from a file in `dtype`, with no room to spare."""
    torch.manual_seed(0)
    whole = kind().to(dtype)
    save_safetensors(whole.state_dict(), directory / "net.safetensors")

    def streamed(room: int) -> Any:
        with torch.device("meta"):
            empty = kind()
        source = directory / "net.safetensors"
        return stream(empty, source, dtype=torch.float32, resident_bytes=room, window=window)

    with pytest.raises(BudgetTooSmall) as small:
        streamed(1)
    net = streamed(small.value.least)
    assert not any(unit.resident for unit in net.weight_stream.units)
    return whole.float(), net


def looked_at(layer: Any) -> list[torch.Tensor]:
    weight = layer.linear.weight
    return [weight, weight.T, weight[3:5], layer.linear.bias, layer.scale]


def keep(kept: list[torch.Tensor]) -> Callable[..., None]:
    return lambda layer, *_: kept.extend(looked_at(layer))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["as stored", "converted"])
@pytest.mark.parametrize("window", [1, 2])
def test_what_a_hook_keeps_stays_what_it_was(
    window: int, dtype: torch.dtype, tmp_path: Path, stream: Make
) -> None:
    """Its memory was the next layer's. What is kept comes on top of `resident_bytes`."""
    whole, net = made(Net, window, tmp_path, stream, dtype)
    x = torch.randn(3, WIDTH)
    kept: list[torch.Tensor] = []
    with net.layers[1].register_forward_hook(keep(kept)):
        for _ in range(3):
            assert net(x).equal(whole(x))
    wanted = looked_at(whole.layers[1]) * 3
    assert all(tensor.equal(one) for tensor, one in zip(kept, wanted, strict=True))
    kept.clear()
    assert net(x).equal(whole(x))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["as stored", "converted"])
def test_an_error_that_is_kept_refuses_no_later_pass(
    dtype: torch.dtype, tmp_path: Path, stream: Make
) -> None:
    """Its traceback keeps weights: as a prompt's last error does, or that of a future."""
    whole, net = made(Net, 1, tmp_path, stream, dtype)
    x = torch.randn(3, WIDTH)

    def fails(layer: Any, *_: Any) -> None:
        weight, scale = layer.linear.weight, layer.scale
        raise ArithmeticError(weight.shape, scale.shape)

    errors = []
    for layer in net.layers:
        with layer.register_forward_hook(fails), pytest.raises(ArithmeticError) as failed:
            net(x)
        errors.append(failed)
        assert net(x).equal(whole(x))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["as stored", "converted"])
def test_autocast_keeps_no_layer_in_memory(
    dtype: torch.dtype, tmp_path: Path, stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cache has each weight, and a copy in bfloat16, until the end of its block."""
    whole, net = made(Net, 1, tmp_path, stream, dtype)
    beyond: list[int] = []
    take = LentPool.take_beyond
    monkeypatch.setattr(LentPool, "take_beyond", lambda *a: beyond.append(a[2]) or take(*a))
    x = torch.randn(3, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            assert net(x).equal(whole(x))
    assert not beyond


@torch.no_grad()
def test_a_weight_that_is_used_when_its_layers_call_has_ended_is_read_for_that(
    tmp_path: Path, stream: Make
) -> None:
    """Whether it was there still was a matter of microseconds; then the next layer came over it."""
    whole, net = made(Late, 2, tmp_path, stream)
    for _ in range(100):
        x = torch.randn(3, WIDTH)
        assert net(x).equal(whole(x))


@torch.no_grad()
def test_a_weight_that_is_replaced_when_its_layers_call_has_ended_is_refused(
    tmp_path: Path, stream: Make
) -> None:
    """The replacement was gone, without a word, when the layer's memory went."""
    whole, net = made(Net, 2, tmp_path, stream)
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
