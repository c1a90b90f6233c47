"""A training's state to save: a transformers model and its Adam, with the moments of real steps."""

from __future__ import annotations

from typing import Any

import torch

from nvmeio.cli.measure.worker import PeerUnavailable

BYTES_A_PARAMETER = 12  # the weight and Adam's two moments, in 32 bits
LARGE = 1 << 30


def make(nbytes: int) -> dict[str, Any]:
    """At least `nbytes` of a GPT-2 with as many layers as that takes."""
    return make_with_optimizer(nbytes)[0]


def make_with_optimizer(nbytes: int) -> tuple[dict[str, Any], torch.optim.Optimizer]:
    """The same, and the optimizer that the state is of; it has no gradients."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError as error:
        raise PeerUnavailable(str(error), "pip install transformers") from error
    width, words = (1024, 50257) if nbytes >= LARGE else (512, 8000)
    rest = nbytes / BYTES_A_PARAMETER - (words + 1024) * width
    layers = max(1, -int(-rest // (12 * width * width)))
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=words, n_embd=width, n_layer=layers, n_head=8)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.01
    optimizer.step()
    optimizer.zero_grad()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
    return state, optimizer


def make_small(count: int, least: int = 4 << 10, most: int = 256 << 10) -> dict[str, torch.Tensor]:
    """So many tensors of `least` to `most` bytes each."""
    sizes = torch.linspace(least / 4, most / 4, count).to(torch.int64)[torch.randperm(count)]
    return {f"layer.{i}.weight": torch.full((int(n),), float(i)) for i, n in enumerate(sizes)}


def tensors(state: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """All tensors of a state by their path, tied ones once."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()

    def visit(value: Any, path: str) -> None:
        if isinstance(value, torch.Tensor):
            if value.data_ptr() not in seen:
                seen.add(value.data_ptr())
                found[path] = value.detach()
        elif isinstance(value, dict):
            for key, inner in value.items():
                visit(inner, f"{path}.{key}" if path else str(key))
        elif isinstance(value, (list, tuple)):
            for index, inner in enumerate(value):
                visit(inner, f"{path}.{index}")

    visit(state, prefix)
    return found


def nbytes_of(state: Any) -> int:
    """Bytes of all tensors."""
    return sum(tensor.nbytes for tensor in tensors(state).values())


def touch(state: Any) -> int:
    """Have every page of every tensor read, as any use of it would."""
    total = 0
    for tensor in tensors(state).values():
        if tensor.numel():
            total += int(tensor.reshape(-1).view(torch.uint8)[::4096].sum())
    return total
