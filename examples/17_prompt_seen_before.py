"""A long prompt that was seen before: its keys and values from the drive, not computed again.

    python examples/17_prompt_seen_before.py --dir /mnt/nvme
    python examples/17_prompt_seen_before.py --dir /mnt/nvme --tokens 4096 --width 1024

One process computes the prompt and saves what its cache holds, by name. Another has the same model
and asks something about the same prompt: it loads the cache, and its first token comes as soon as
that is read and the question computed. Its tokens are those that the first process gets, bit for
bit. The weights are random, so the text means nothing.
"""

import inspect
import multiprocessing
import time
import warnings
from pathlib import Path
from typing import Any

import _common
import torch
from _common import say, verify

from nvmeio.inference import PrefixCache

VOCABULARY, QUESTION = 4096, 16


def make_model(width: int, layers: int) -> Any:
    """The same in every process."""
    warnings.simplefilter("ignore")  # of what transformers imports
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=1 << 17,
    )
    return transformers.LlamaForCausalLM(config).eval()


def prompts(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What was seen before, and the same with a question behind it."""
    ids = torch.randint(3, VOCABULARY, (1, tokens + QUESTION), generator=torch.manual_seed(1))
    return ids[:, :tokens], ids


def cache_name(model: Any) -> str:
    """The name of a model's cache, in and out: another one before transformers 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def generated(model: Any, ids: torch.Tensor, cache: Any, count: int) -> torch.Tensor:
    found: torch.Tensor = model.generate(
        ids,
        **{cache_name(model): cache},
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
    return found


def computed(model: Any, ids: torch.Tensor) -> Any:
    with torch.no_grad():
        return getattr(model(ids, logits_to_keep=1), cache_name(model))


def first(folder: Path, tokens: int, width: int, layers: int, answers: Any) -> None:
    """The process that sees the prompt first: what it saved is all that it leaves."""
    model = make_model(width, layers)
    seen, ids = prompts(tokens)
    prefixes = PrefixCache(model, folder, capacity_bytes="256M")
    answers.put(prefixes.load("manual", ids))
    cache = computed(model, seen)
    began = time.perf_counter()
    prefixes.save("manual", seen, cache)
    answers.put(time.perf_counter() - began)
    answers.put(generated(model, ids, cache, 8).tolist())


def main(folder: Path, tokens: int, width: int, layers: int) -> None:
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.SimpleQueue()
    process = spawn.Process(target=first, args=(folder, tokens, width, layers, answers))
    process.start()
    process.join()
    verify(process.exitcode == 0, "the first process ends")
    verify(answers.get() is None, "nothing is there before it is saved")
    say("first", f"computed {tokens} tokens, saved them in {answers.get():.2f} s, and ended")
    expected = torch.tensor(answers.get())

    model = make_model(width, layers)
    seen, ids = prompts(tokens)
    prefixes = PrefixCache(model, folder, capacity_bytes="256M")
    computed(model, seen[:, :64])  # whatever is done once
    began = time.perf_counter()
    cache = computed(model, seen)
    generated(model, ids, cache, 1)
    say("computed", f"the first token after {time.perf_counter() - began:.3f} s")
    began = time.perf_counter()
    found = prefixes.load("manual", ids)
    loaded = time.perf_counter() - began
    verify(found is not None and found.get_seq_length() == tokens, "all of it is there")
    generated(model, ids, found, 1)
    took = time.perf_counter() - began
    nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in found.layers)
    say("loaded", f"the first token after {took:.3f} s: {nbytes / 1e6:.1f} MB in {loaded:.3f} s")

    found = prefixes.load("manual", ids)
    verify(generated(model, ids, found, 8).equal(expected), "the tokens are the first process's")
    other = ids.clone()
    other[0, 5] += 1
    try:
        prefixes.load("manual", other)
    except ValueError as refused:
        say("refused", str(refused))
    else:
        verify(False, "another prompt is refused")
    _common.verified(f"{tokens} tokens of a prompt, from another process, to the bit")


if __name__ == "__main__":
    parser = _common.arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=2048, help="of the prompt (2048)")
    parser.add_argument("--width", type=int, default=512, help="of the model (512)")
    parser.add_argument("--layers", type=int, default=8, help="of the model (8)")
    options = parser.parse_args()
    _common.require("transformers")
    with _common.scratch(options.dir, 512 << 20) as scratch:
        main(scratch, options.tokens, options.width, options.layers)
