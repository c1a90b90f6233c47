"""A model that does not fit: 2 GB of weights under 0.5 GB of memory, token by token.

    python examples/12_larger_than_memory.py --dir /mnt/nvme
    python examples/12_larger_than_memory.py --dir /mnt/nvme --size 6G --memory 1536M --batch 8

Packed to 4 bits it is a third of that, and stays packed in memory: less of it is read.

The weights are random, so the tokens mean nothing; what counts is that they are those of the whole
model, which is checked where it fits. Memory is what the kernel says that the process grew by
(VmHWM), not an estimate.
"""

import json
import time
import warnings
from pathlib import Path
from typing import Any

import _common
import torch
from _common import say, verify

import nvmeio
from nvmeio.inference import generate_in_blocks, pack

# A whole copy is loaded for comparison up to this size.
COMPARED_BYTES = 512 << 20


def make_model(folder: Path, nbytes: int) -> tuple[Path, int]:
    """A Llama of about that size in bfloat16, written layer by layer, never whole in memory."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    width = 2048 if nbytes >= 1 << 30 else 512
    a_layer = 2 * (4 * width * width + 3 * width * 4 * width)
    layers = max(4, nbytes // a_layer)
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=4096,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
        architectures=["LlamaForCausalLM"],
    )
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    groups: dict[str, dict[str, torch.Size]] = {}
    for name, parameter in empty.named_parameters():
        parts = name.split(".")
        group = ".".join(parts[:3]) if parts[1] == "layers" else "rest"
        groups.setdefault(group, {})[name] = parameter.shape
    where, total = {}, 0
    for number, (_, tensors) in enumerate(groups.items()):
        file = f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors"
        state = {
            name: torch.ones(shape, dtype=torch.bfloat16)
            if len(shape) == 1
            else (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).bfloat16()
            for name, shape in tensors.items()
        }
        nvmeio.save_safetensors(state, folder / file)
        where.update(dict.fromkeys(state, file))
        total += sum(tensor.nbytes for tensor in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.save_pretrained(folder)
    return folder, total


def process_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"the kernel tells no {field}")


def forget_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return process_bytes("VmRSS")


def generated(model: Any, ids: torch.Tensor, count: int, micro_batches: int = 1) -> torch.Tensor:
    return generate_in_blocks(
        model,
        ids,
        micro_batches=micro_batches,
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )


def timed(
    label: str, model: Any, ids: torch.Tensor, count: int, parts: int = 1
) -> tuple[torch.Tensor, float, float]:
    """The tokens, how many a second, and the CPU seconds of each."""
    before, began, computed = model.weight_stream.stats, time.perf_counter(), time.process_time()
    found = generated(model, ids, count, parts)
    took, cpu = time.perf_counter() - began, time.process_time() - computed
    after, made = model.weight_stream.stats, ids.shape[0] * count
    read = after.bytes_read - before.bytes_read
    say(
        label,
        f"{made / took:.2f} tokens/s ({took:.1f} s), {cpu / made:.2f} s of CPU each; "
        f"{read / 1e9:.2f} GB read at {read / took / 1e9:.2f} GB/s, waited for it "
        f"{after.waited_s - before.waited_s:.1f} s",
    )
    return found, made / took, cpu / made


def main(folder: Path, size: int, memory: int, count: int, batch: int, bits: int) -> None:
    original = folder / "model"
    original.mkdir()
    directory, total = make_model(original, size)
    say("model", f"{total / 1e9:.2f} GB of weights, {memory / 1e9:.2f} GB of memory for them")
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 4096, (batch, 16), generator=generator)

    before = forget_peak()
    model = nvmeio.stream_model(directory, resident_bytes=memory)
    one, unpacked, unpacked_cpu = timed("one prompt", model, ids[:1], count)
    grown = process_bytes("VmHWM") - before
    stats = model.weight_stream.stats
    weights = stats.resident_bytes + stats.window_bytes + stats.work_bytes
    say("memory", f"{weights / 1e6:.0f} MB of weights; the process grew by {grown / 1e6:.0f} MB")
    verify(weights <= memory, "the weights stay within their memory")
    verify(grown < memory + (192 << 20), "the process grew by little more than the weights")
    many, _, _ = timed(f"{batch} prompts", model, ids, count, parts=min(2, batch))
    model.weight_stream.close()
    if total <= COMPARED_BYTES:
        import transformers

        whole = transformers.LlamaForCausalLM.from_pretrained(directory)
        halves = zip(many.tensor_split(2), ids.tensor_split(2), strict=True)
        for found, given in ((one, ids[:1]), *halves):
            expected = whole.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
            verify(found.equal(expected), "the tokens are those of the model loaded whole")
        del whole

    if bits:
        report = pack(directory, folder / "packed", quant_bits=bits)
        say("packed", f"{bits} bits a weight: {report.bytes_written / 1e9:.2f} GB")
        model = nvmeio.stream_model(folder / "packed", resident_bytes=memory)
        _, rate, cpu = timed(f"one prompt, {bits} bits", model, ids[:1], count)
        verify(model.weight_stream.stats.bytes_read > 0, "weights were streamed")
        say(
            "ahead",
            f"{bits} bits give {rate / unpacked:.1f} times as many tokens/s as bfloat16, for "
            f"{cpu / unpacked_cpu:.2f} of the CPU time of each",
        )
        model.weight_stream.close()
    _common.verified(
        f"{count} tokens for {batch} prompts, with {total / memory:.1f} times the memory"
    )


if __name__ == "__main__":
    parser = _common.arguments(__doc__)
    parser.add_argument("--size", type=_common.nbytes, default="2G", help="of the weights (2G)")
    parser.add_argument("--memory", type=_common.nbytes, default="512M", help="for them (512M)")
    parser.add_argument("--tokens", type=int, default=8, help="to generate (8)")
    parser.add_argument("--batch", type=int, default=4, help="prompts at once (4)")
    parser.add_argument("--bits", type=int, default=4, choices=(0, 4, 8), help="then pack (4)")
    options = parser.parse_args()
    _common.require("transformers")
    with _common.scratch(options.dir, 2 * options.size) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what transformers imports
        main(folder, options.size, options.memory, options.tokens, options.batch, options.bits)
