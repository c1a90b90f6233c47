"""Small mixtures of experts, and which experts the tokens of a batch are routed to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

EXPERTS = 8
WIDTH = 64
VOCABULARY = 64


class Expert(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.nn.functional.silu(self.up(x)))
        return out


class Mixture(torch.nn.Module):
    """Its experts are modules of their own, called where tokens are routed to them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = torch.nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = torch.nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.hit: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, WIDTH)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        self.hit = torch.unique(chosen).tolist()
        out = torch.zeros_like(flat)
        for number in self.hit:
            token, place = torch.where(chosen == number)
            part = self.experts[number](flat[token]) * weights[token, place, None]
            out = out.index_add(0, token, part)
        return out.view_as(x)


class FusedExperts(torch.nn.Module):
    """Experts as rows of parameters, called with the routing."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = torch.nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 8)
        self.down = torch.nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 8)
        self.bias = torch.nn.Parameter(torch.zeros(EXPERTS, WIDTH))  # too small for reads of rows

    def forward(
        self, x: torch.Tensor, top_k_index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        out = torch.zeros_like(x)
        for number in torch.unique(top_k_index).tolist():
            token, place = torch.where(top_k_index == number)
            hidden = torch.nn.functional.silu(x[token] @ self.up[number].T)
            part = torch.nn.functional.linear(hidden, self.down[number], self.bias[number])
            out = out.index_add(0, token, part * weights[token, place, None])
        return out


class FusedMixture(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = torch.nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = FusedExperts()
        self.hit: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, WIDTH)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        self.hit = torch.unique(chosen).tolist()
        return self.experts(flat, chosen, weights).view_as(x)  # type: ignore[no-any-return]


class Layer(torch.nn.Module):
    def __init__(self, mixture: type[Mixture] | type[FusedMixture]) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.attention = torch.nn.Linear(WIDTH, WIDTH)
        self.mixture = mixture()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x).tanh()
        return x + self.mixture(self.norm(x))  # type: ignore[no-any-return]


class Model(torch.nn.Module):
    """`reentrant`: how its layers are checkpointed; None: not at all."""

    def __init__(
        self, mixture: type[Mixture] | type[FusedMixture], reentrant: bool | None = None
    ) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.ModuleList(Layer(mixture) for _ in range(3))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)
        self.reentrant = reentrant

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            if self.reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
        out: torch.Tensor = self.head(x)
        return out


def lists(reentrant: bool | None = None) -> Model:
    """Experts in a list, the same weights each time."""
    torch.manual_seed(0)
    return Model(Mixture, reentrant)


def fused(reentrant: bool | None = None) -> Model:
    """Experts as rows of parameters, the same weights each time."""
    torch.manual_seed(0)
    return Model(FusedMixture, reentrant)


def family(name: str, kernel: str = "grouped_mm", **options: int) -> Any:
    """A small model of transformers, whose experts are fused; the same weights each time."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    sizes = {
        **{"hidden_size": WIDTH, "intermediate_size": WIDTH, "moe_intermediate_size": WIDTH},
        **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"vocab_size": VOCABULARY, "num_experts_per_tok": 2, "head_dim": 16, "pad_token_id": 0},
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERTS),
        **options,
    }
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    config = kind.config_class(**sizes)
    config._experts_implementation = kernel
    return kind(config).float()


def tokens(step: int, number: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCABULARY, (1, number), generator=generator)


def loss_of(made: Any, step: int, number: int = 3) -> torch.Tensor:
    given = tokens(step, number)
    out = made(given)
    logits = getattr(out, "logits", out)
    return torch.nn.functional.cross_entropy(logits.view(-1, VOCABULARY).float(), given.view(-1))


def train(
    made: Any,
    optimizer: Any,
    steps: int,
    number: int = 3,
    after: Callable[[int], None] = lambda step: None,
) -> list[float]:
    losses = []
    for step in range(steps):
        loss = loss_of(made, step, number)
        loss.backward()
        after(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
