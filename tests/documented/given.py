"""What a reader of the documentation has already, made small: models, batches, directories."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 128


def network(width: int = 64, layers: int = 4) -> torch.nn.Sequential:
    """A module in which every layer maps (batch, width) to (batch, width)."""
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))


def batches(count: int = 3, width: int = 64) -> list[torch.Tensor]:
    return [torch.randn(8, width) for _ in range(count)]


def llama(**options: Any) -> Any:
    """A Llama with random weights."""
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | options)).eval()


def llama_directory(name: str = "Llama-3-70B", **options: Any) -> Path:
    """The same as `save_pretrained` leaves it. With several ranks the first one writes it."""
    return _saved(lambda: llama(**options), name)


def mixture_directory(name: str = "Qwen3-30B-A3B") -> Path:
    """A mixture with random weights, as `save_pretrained` leaves it."""
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
    sizes |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": VOCABULARY, "num_experts": 8, "num_experts_per_tok": 2}
    sizes |= {"head_dim": 16, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.Qwen3MoeConfig(**sizes)
    return _saved(lambda: transformers.Qwen3MoeForCausalLM(config).eval(), name)


def _saved(make: Callable[[], Any], name: str) -> Path:
    ranks = torch.distributed.is_initialized()
    if not ranks or torch.distributed.get_rank() == 0:
        make().save_pretrained(name)
    if ranks:
        torch.distributed.barrier()
    return Path(name)


def prompt(tokens: int = 8) -> torch.Tensor:
    return torch.arange(3, 3 + tokens)[None] % VOCABULARY


class Tokenizer:
    """Bytes for tokens: a real one is a download."""

    eos_token_id = 2

    def __call__(self, text: str, return_tensors: str = "pt") -> dict[str, torch.Tensor]:
        ids = torch.tensor([[3 + ord(letter) % (VOCABULARY - 3) for letter in text]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def decode(self, ids: torch.Tensor, **_: Any) -> str:
        return " ".join(map(str, ids.tolist()))


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples for a Trainer."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(16) * (number + 1)) % VOCABULARY
        return {"input_ids": ids, "labels": ids}
