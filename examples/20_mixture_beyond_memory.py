"""A mixture of experts that does not fit: a quarter of its experts in memory, token by token.

    python examples/20_mixture_beyond_memory.py --dir /mnt/nvme
    python examples/20_mixture_beyond_memory.py --dir /mnt/nvme --experts 128 --share 0.12

The weights are random, and random routers send each token somewhere else. Those of trained models
come back to the same experts. So the routing is made here: each token keeps most of the last one's
preferences, as published traces of Qwen3-30B-A3B do. Tokens are compared with those of the model in
memory that is routed in the same way.
"""

import time
import warnings
from pathlib import Path
from typing import Any

import _common
import torch
from _common import say, verify

import nvmeio

TOP, PROMPT, LAYERS, VOCABULARY = 8, 16, 8, 4096


def make_model(folder: Path, experts: int, width: int) -> int:
    """A mixture in bfloat16; returns the bytes of its experts."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = transformers.Qwen3MoeConfig(
        hidden_size=width,
        intermediate_size=width,
        moe_intermediate_size=width,
        num_hidden_layers=LAYERS,
        num_experts=experts,
        num_experts_per_tok=TOP,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=VOCABULARY,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    folder.mkdir()
    nvmeio.save_safetensors(model.state_dict(), folder / "model.safetensors")
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    return sum(p.nbytes for n, p in model.named_parameters() if ".experts." in n)


def routes(tokens: int, experts: int, layer: int) -> torch.Tensor:
    """The experts of each token, [tokens, TOP], in one layer."""
    generator = torch.Generator().manual_seed(layer)
    likes = torch.randn(experts, generator=generator) * 1.7
    wander = torch.randn(experts, generator=generator) * 2.0
    chosen = []
    for _ in range(tokens):
        step = torch.randn(experts, generator=generator)
        wander = 0.75 * wander + (1 - 0.75**2) ** 0.5 * 2.0 * step
        noise = 0.3 * torch.randn(experts, generator=generator)
        chosen.append((likes + wander + noise).topk(TOP).indices)
    return torch.stack(chosen)


def route(model: Any, tokens: int, experts: int) -> None:
    """Replace what the routers choose."""
    for number, layer in enumerate(model.model.layers):
        rows, place = routes(tokens, experts, number), [0]

        def routed(_: Any, __: Any, out: Any, rows: Any = rows, place: Any = place) -> Any:
            count = len(out[2])
            place[0] = 0 if count > 1 else place[0]  # a prompt begins anew
            first, place[0] = place[0], place[0] + count
            return out[0], torch.full_like(out[1], 1 / TOP), rows[first : place[0]]

        layer.mlp.gate.register_forward_hook(routed)


def generated(model: Any, ids: torch.Tensor, count: int) -> tuple[torch.Tensor, float]:
    began = time.perf_counter()
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
    with torch.no_grad():
        found = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
    return found, time.perf_counter() - began


def main(folder: Path, experts: int, width: int, share: float, count: int) -> None:
    import transformers

    directory = folder / "model"
    of_experts = make_model(directory, experts, width)
    ids = torch.arange(3, 3 + PROMPT).reshape(1, PROMPT)
    whole = transformers.Qwen3MoeForCausalLM.from_pretrained(directory).eval()
    others = sum(p.nbytes for p in whole.parameters()) - of_experts
    route(whole, PROMPT + count, experts)
    expected, in_memory_s = generated(whole, ids, count)
    del whole

    budget = int(of_experts * share) + 2 * others + (1 << 20)
    with nvmeio.stream_model(directory, resident_bytes=budget) as model:
        route(model, PROMPT + count, experts)
        tokens, took = generated(model, ids, count)
        stats, counted = model.weight_stream.stats, model.weight_stream.stats.experts
    asked = counted.hits + counted.misses
    say("experts", f"{of_experts / 1e6:.0f} MB, of which {stats.expert_bytes / 1e6:.0f} MB fit")
    say("asked for", f"{asked} times; {counted.hits / asked:.0%} were in memory")
    say("read", f"{counted.bytes_read / 1e6:.0f} MB, {counted.evictions} experts went for others")
    say("tokens", f"{count / took:.1f} a second; all in memory {count / in_memory_s:.1f}")
    verify(tokens.equal(expected), "the tokens are those of the model in memory")
    verify(counted.hits > counted.misses, "most experts were in memory when they were needed")
    _common.verified(f"{count} tokens with {share:.0%} of the experts in memory")


if __name__ == "__main__":
    parser = _common.arguments(__doc__)
    parser.add_argument("--experts", type=int, default=64, help="in each of 8 layers (64)")
    parser.add_argument("--width", type=int, default=512, help="of the model (512)")
    parser.add_argument("--share", type=float, default=0.25, help="of the experts in memory (0.25)")
    parser.add_argument("--tokens", type=int, default=48, help="to generate (48)")
    options = parser.parse_args()
    _common.require("transformers")
    needed = 2 * LAYERS * options.experts * 6 * options.width**2
    with _common.scratch(options.dir, needed) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what transformers imports
        main(folder, options.experts, options.width, options.share, options.tokens)
