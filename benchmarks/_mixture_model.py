"""A mixture whose weights route its tokens as a table says, whichever program computes with it.

A token's number is a row of the table. The embedding of a token has one large value, in a column of
its own that no layer writes to: `o_proj` and `down_proj` have rows of zeros for these columns. Each
router reads that column only: it likes the experts of the table's row, all of them alike. The head
reads it too: the likeliest token is the next row's. So a greedy answer counts upwards from its
prompt, and whoever computes it has routed every token as the table says.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

FIRST_ID = 3  # those before have a meaning for llama.cpp
_MARK, _LIKING = 4.0, 4.0


class Table(NamedTuple):
    """Which experts each token of each prompt takes, in each layer.

    Attributes:
        rows: Of each layer, numbers of experts, [prompts * length, top].
        prompts: How many there are.
        prompt: Tokens of each of them.
        length: Tokens of each, with those that are generated.
    """

    rows: list[torch.Tensor]
    prompts: int
    prompt: int
    length: int

    def ids(self) -> torch.Tensor:
        """The prompts, [prompts, prompt]."""
        return self._numbers()[:, : self.prompt]

    def answers(self) -> torch.Tensor:
        """Prompts and what is generated, [prompts, length]."""
        return self._numbers()

    def _numbers(self) -> torch.Tensor:
        count = self.prompts * self.length
        return torch.arange(FIRST_ID, FIRST_ID + count).reshape(self.prompts, self.length)

    def passes(self) -> Iterator[list[set[int]]]:
        """For the pass over the prompts and those of decoding: the experts of each layer."""
        spans = [(0, self.prompt)] + [(at, at + 1) for at in range(self.prompt, self.length - 1)]
        each = [rows.reshape(self.prompts, self.length, -1) for rows in self.rows]
        for begin, end in spans:
            yield [set(rows[:, begin:end].flatten().tolist()) for rows in each]


def traced(routes: Callable[..., torch.Tensor], number: int, prompts: int, length: int) -> Any:
    """The experts of layer `number`, each prompt with a seed of its own: `routes(tokens, seed)`."""
    return torch.cat([routes(length, number + 1000 * prompt) for prompt in range(prompts)])


def at_random(number: int, experts: int, top: int, tokens: int) -> torch.Tensor:
    """Each token takes any, whatever the last one took."""
    generator = torch.Generator().manual_seed(number)
    return torch.rand(tokens, experts, generator=generator).topk(top).indices


def put_into(tensors: dict[str, torch.Tensor], table: Table) -> None:
    """Change the weights of a Qwen3-MoE, as transformers saves them, in place.

    Raises:
        ValueError: The hidden state has too few columns for the table's rows.
    """
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    count, width = len(table.rows[0]), embedding.shape[1]
    if count > width * 3 // 4:
        raise ValueError(
            f"{table.prompts} prompts of {table.length} tokens need {count} columns of a hidden "
            f"state of {width}, of which they get three quarters: fewer tokens, or a larger --width"
        )
    columns = torch.arange(width - count, width)
    ids = torch.arange(FIRST_ID, FIRST_ID + count)
    for weight in (embedding, head):
        weight[:, columns] = 0
    embedding[ids, columns] = _MARK
    head[ids + 1, columns] = _LIKING
    for name, weight in tensors.items():
        if name.endswith("o_proj.weight"):
            weight[columns] = 0
        elif name.endswith("experts.down_proj"):
            weight[:, columns] = 0
        elif name.endswith("mlp.gate.weight"):
            rows = table.rows[int(name.split(".")[2])]
            weight.zero_()
            weight[rows, columns[:, None]] = _LIKING


def oracles_misses(table: Table, kept: int) -> int:
    """Experts that decoding reads if what is asked for last goes, and is known (Belady's rule).

    One cache of `kept` experts for all layers, as it is after what a run does: all tokens, the
    prompts alone, all tokens again, of which the decoded ones are counted.
    """
    once = list(table.passes())
    asked: list[tuple[int, int, bool]] = []
    for repeat, passes in enumerate((once, once[:1], once)):
        for place, layers in enumerate(passes):
            for layer, experts in enumerate(layers):
                asked += [(layer, expert, repeat == 2 and place > 0) for expert in experts]
    return _misses(asked, kept)


def _misses(asked: Sequence[tuple[int, int, bool]], kept: int) -> int:
    never = len(asked)
    later, seen = [never] * len(asked), {}
    for place in range(len(asked) - 1, -1, -1):
        key = asked[place][:2]
        later[place] = seen.get(key, never)
        seen[key] = place
    there: dict[tuple[int, int], int] = {}
    heap: list[tuple[int, tuple[int, int]]] = []  # the one that is asked for last is the first
    misses = 0
    for place, (layer, expert, counted) in enumerate(asked):
        key = (layer, expert)
        if key not in there:
            misses += counted
            if len(there) >= kept:
                while there.get(heap[0][1]) != -heap[0][0]:
                    heapq.heappop(heap)
                if -heap[0][0] <= later[place]:
                    continue  # it is not kept: all others are asked for before it is again
                del there[heapq.heappop(heap)[1]]
        there[key] = later[place]
        heapq.heappush(heap, (-later[place], key))
    return misses


def write_gguf(directory: Path, path: Path) -> None:
    """The same weights for llama.cpp: bfloat16, but for norms and routers, which it wants wide."""
    import gguf
    from safetensors import safe_open
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig.from_pretrained(directory)
    layers = config.num_hidden_layers
    out = gguf.GGUFWriter(str(path), "qwen3moe")
    out.add_block_count(layers)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_expert_feed_forward_length(config.moe_intermediate_size)
    out.add_expert_count(config.num_experts)
    out.add_expert_used_count(config.num_experts_per_tok)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_key_length(config.head_dim)
    out.add_value_length(config.head_dim)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_vocab_size(config.vocab_size)
    out.add_tokenizer_model("llama")  # a token's text is its number
    out.add_token_list([f"\u2581{number}" for number in range(config.vocab_size)])
    out.add_token_scores([0.0] * config.vocab_size)
    out.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, layers)
    bf16 = gguf.GGMLQuantizationType.BF16

    def add(name: str, weight: torch.Tensor) -> None:
        known = names.get_name(name, try_suffixes=(".weight",))
        if weight.ndim == 1 or name.endswith("mlp.gate.weight"):
            out.add_tensor(known, weight.float().numpy())
        else:
            raw = weight.contiguous().view(torch.uint8).numpy()
            out.add_tensor(known, raw, raw_dtype=bf16)

    with safe_open(directory / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            weight = file.get_tensor(name)
            if name.endswith("experts.gate_up_proj"):
                stem = name.removesuffix("gate_up_proj")
                for part, half in zip(("gate", "up"), weight.chunk(2, 1), strict=True):
                    add(f"{stem}{part}_proj.weight", half)
            else:
                add(name if name.endswith(".weight") else f"{name}.weight", weight)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
