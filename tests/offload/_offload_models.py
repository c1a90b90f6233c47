"""Small models, and one training loop for both sides of a comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

WIDTH = 48


def model(dtype: torch.dtype = torch.float32, width: int = WIDTH) -> torch.nn.Module:
    """The same weights each time; a parameter of every size, and one that is a single element."""
    torch.manual_seed(0)
    made = torch.nn.Sequential(
        torch.nn.Linear(width, 5 * width + 1),
        torch.nn.LayerNorm(5 * width + 1),
        torch.nn.GELU(),
        torch.nn.Linear(5 * width + 1, 2 * width),
        torch.nn.PReLU(),
        torch.nn.Linear(2 * width, 1),
    )
    return made.to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float32, width: int = WIDTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, width, generator=generator).to(dtype)


def loss_of(made: Any, step: int) -> torch.Tensor:
    parameter = next(made.parameters())
    x = batch(step, parameter.dtype)
    loss: torch.Tensor = (made(x).float().squeeze() - x.float().sum(1)).square().mean()
    return loss


def train(
    made: Any,
    optimizer: Any,
    steps: int,
    first: int = 0,
    before: Callable[[int], None] | None = None,
) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        loss = loss_of(made, step)
        loss.backward()
        if before is not None:
            before(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class WithMasters:
    """What bf16 training with fp32 master weights is, in memory: the reference."""

    def __init__(self, parameters: Any, optimizer_class: Any, **arguments: Any) -> None:
        self.parameters = list(parameters)
        self.masters = [torch.nn.Parameter(p.detach().float()) for p in self.parameters]
        self.optimizer = optimizer_class(self.masters, **arguments)

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.optimizer.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def assert_same_weights(found: Any, wanted: Any) -> None:
    for (name, p), q in zip(found.named_parameters(), wanted.parameters(), strict=True):
        assert torch.equal(p, q), name


def assert_same_state(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["state"].keys() == wanted["state"].keys()
    for key, entry in wanted["state"].items():
        for name, value in entry.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(found["state"][key][name], value), (key, name)
                assert found["state"][key][name].dtype == value.dtype
            else:
                assert found["state"][key][name] == value
