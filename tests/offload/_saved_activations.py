"""Modules whose activations are saved on drives, and their gradients in memory to compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import nvmeio
from nvmeio.offload import SwappedActivations

Loss = Callable[[], torch.Tensor]


def small(folder: Any, handle: nvmeio.AioHandle | None = None, **options: Any) -> Any:
    options = {"resident_bytes": 8192, "min_bytes": 1024, **options}
    return SwappedActivations(swap_dir=folder, handle=handle, **options)


class Scaled(torch.autograd.Function):
    """A user's own, which saves an input and an output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.sin() * x
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        x, y = ctx.saved_tensors
        found: torch.Tensor = grads[0] * (x.cos() * x + y)
        return found


class Doubles(torch.autograd.Function):
    """Its backward changes what was saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        x.mul_(2)
        return grads[0] * x


class Custom(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Scaled.apply(x)  # type: ignore[no-untyped-call]
        return found


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: torch.Tensor = x + self.out(mixed.transpose(1, 2).flatten(2))
        return found


def mlp(layers: int = 6) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(layers)))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (64, 32)),
    "dropout": (lambda: nn.Sequential(mlp(2), nn.Dropout(0.5), mlp(2)), (64, 32)),
    "custom": (lambda: nn.Sequential(mlp(1), Custom(), mlp(1), Custom()), (64, 32)),
    "attention": (lambda: nn.Sequential(*(Attention(32, 4) for _ in range(3))), (2, 24, 32)),
    "convolutions": (
        lambda: nn.Sequential(
            *(m for _ in range(3) for m in (nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())),
            nn.MaxPool2d(2),
        ),
        (3, 4, 16, 16),
    ),
    "recurrent": (lambda: First(nn.LSTM(32, 32, 2)), (12, 4, 32)),
}


class First(nn.Module):
    """What a module gives first."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x)[0]
        return found


def made(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    return make(), torch.randn(shape)


def gradients(module: nn.Module, backward: Callable[[], object]) -> list[torch.Tensor]:
    module.zero_grad()
    torch.manual_seed(1)
    backward()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def assert_same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert wanted
    for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(a, b), f"gradient {number} differs"


def loss_within(swapped: SwappedActivations, loss: Loss) -> torch.Tensor:
    with swapped.saving():
        return loss()
