"""A small transformer with what is awkward about them: tied head, shared norm, buffers, MHA."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

VOCABULARY = 96


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)  # used twice
        self.attention = torch.nn.MultiheadAttention(width, 4, batch_first=True)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Gpt(torch.nn.Module):
    """`reentrant`: None for no checkpointing."""

    def __init__(self, width: int = 32, layers: int = 5, reentrant: bool | None = None) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, width)
        self.position = torch.nn.Parameter(torch.zeros(16, width))  # of the root itself
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(layers))
        self.blocks.append(self.blocks[1])  # a shared module
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight  # tied
        self.register_buffer("seen", torch.zeros(()))
        self.reentrant = reentrant

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen.add_(tokens.numel())
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = (
                block(x)
                if self.reentrant is None
                else checkpoint(block, x, use_reentrant=self.reentrant)
            )
        out: torch.Tensor = self.head(self.norm(x))
        return out


def loss_of(made: torch.nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (2, 12), generator=generator)
    out = made(tokens).float()
    return torch.nn.functional.cross_entropy(out.view(-1, VOCABULARY), tokens.view(-1))


def train(
    made: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0
) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        loss = loss_of(made, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
