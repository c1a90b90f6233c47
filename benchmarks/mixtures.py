"""Mixtures of experts: tokens a second with a share of the experts in memory, and what is read.

    python benchmarks/mixtures.py --dir /mnt/nvme
    python benchmarks/mixtures.py --dir /mnt/nvme --width 768 --shares 0.12,0.5 --turns 5
    python benchmarks/mixtures.py --dir /mnt/nvme --routing random --kinds packed,llama.cpp

The model is that of examples/20_mixture_beyond_memory.py with a routing that its weights prescribe
(`_mixture_model`), so that every program routes each token alike: with the locality of published
traces, or at random. Random routing is the worst case, which no trained model has. An answer that
is not the prescribed one ends the run.

Each run is a process of its own, in turns, with the files dropped from the page cache before. A run
generates once to fill the cache of experts, and is timed the second time.

    tokens/s  decoded tokens a second, all prompts together, without the pass over the prompts
    x         the median of each turn's tokens/s over those of the first kind in the same turn
    prompt    seconds of the pass over the prompts
    read      share of the routed bytes that was read while decoding
    reads     reads of experts for it, where they are counted
    peak      MB that the process had at most, mapped files included
    bound     tokens/s of the slower of two: all in memory; the bytes that were read, at the rate
              of a plain sequential read in the same turns
    of it     tokens/s as a share of that
    oracle    the same bound with the bytes that Belady's rule reads with as much memory

Kinds: the model as transformers saves it ("saved": gate and up fused, down apart), as `nvmeio pack
--keep-fused` writes it ("fused"), and as `nvmeio pack` does, which puts an expert's weights side by
side ("packed"). "alone" behind a kind waits for all reads of a layer before it computes, and reads
nothing ahead. "disk offload" is accelerate's, which reads layers that do not fit in each pass; it
generates few tokens. "llama.cpp" maps the same weights as GGUF, one prompt only. These two have as
much memory by a control group, page cache included; where none can be made, a line says that their
page cache was as large as it likes.
`--python` adds an interpreter with another nvmeio (an older one), whose rows say "before"; it
reads what transformers saves.
"""

from __future__ import annotations

import argparse
import json
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from _mixture_model import Table, at_random, oracles_misses, put_into, traced, write_gguf
from peers.mixtures import ALONE, LLAMA, MEMORY, OFFLOAD, run

EXAMPLE = Path(__file__).resolve().parent.parent / "examples/20_mixture_beyond_memory.py"
STORED = ("saved", "fused", "packed")
KINDS = [*STORED, *(kind + ALONE for kind in STORED), OFFLOAD, LLAMA]
BEFORE = "before"


class Contender(NamedTuple):
    """One row of the table."""

    name: str
    python: str
    kind: str
    share: float


class Made(NamedTuple):
    """A model on the drive."""

    directory: Path
    table: Table
    expert_bytes: int
    others_bytes: int

    def budget(self, share: float) -> int:
        """Bytes for weights, with that share of the experts."""
        return int(self.expert_bytes * share) + 2 * self.others_bytes + (1 << 20)


def make(directory: Path, options: argparse.Namespace) -> Made:
    """Write the model in all kinds that are asked for."""
    from safetensors.torch import load_file, save_file

    from nvmeio.inference import pack

    sys.path.insert(0, str(EXAMPLE.parent))
    example = runpy.run_path(str(EXAMPLE))
    own = example["make_model"].__globals__
    own["LAYERS"], own["TOP"] = options.layers, options.top
    length = options.prompt + options.tokens

    def rows(number: int) -> Any:
        if options.routing == "random":
            return at_random(number, options.experts, options.top, options.prompts * length)
        routes = example["routes"]
        return traced(
            lambda n, seed: routes(n, options.experts, seed), number, options.prompts, length
        )

    table = Table([rows(n) for n in range(options.layers)], options.prompts, options.prompt, length)
    directory.mkdir()
    saved = directory / "saved"
    expert_bytes = example["make_model"](saved, options.experts, options.width)
    file = saved / "model.safetensors"
    tensors = load_file(file)
    put_into(tensors, table)
    save_file(tensors, file)
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"norm_topk_prob": True}))
    del tensors
    stored = {kind.removesuffix(ALONE) for kind in options.kinds}
    for kind in {"fused", "packed"} & stored:
        pack(saved, directory / kind, keep_fused=kind == "fused")
    if LLAMA in stored:
        write_gguf(saved, directory / "model.gguf")
    facts = {
        "prompts": options.prompts,
        "length": length,
        "layer_bytes": file.stat().st_size // options.layers,
    }
    (directory / "facts.json").write_text(json.dumps(facts))
    return Made(directory, table, expert_bytes, file.stat().st_size - expert_bytes)


def measured(made: Made, contender: Contender, tokens: int) -> dict[str, Any]:
    """`run` in a process of its own, from a cold cache."""
    from _files import drop_from_cache

    drop_from_cache(made.directory)
    command = [contender.python, __file__, "--run", str(made.budget(contender.share))]
    command += ["--kinds", contender.kind, "--dir", str(made.directory), "--tokens", str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if not found["right"]:
        raise SystemExit(f"{contender.name} does not answer what the weights prescribe")
    return found


def drive_rate(path: Path) -> float:
    """Bytes a second of one direct sequential read of a file."""
    import torch

    import nvmeio

    nbytes = path.stat().st_size // 4096 * 4096
    memory = nvmeio.empty_aligned(min(nbytes, 256 << 20), dtype=torch.uint8)
    with nvmeio.AioHandle() as handle:
        handle.sync_pread(memory, path)
        began = time.perf_counter()
        handle.sync_pread(memory, path)
    return memory.nbytes / (time.perf_counter() - began)


def contenders(options: argparse.Namespace) -> Iterator[Contender]:
    yield Contender("in memory", sys.executable, MEMORY, 0.0)
    for share in options.shares:
        for kind in options.kinds:
            if kind != LLAMA or options.prompts == 1:
                yield Contender(f"{share:.0%} {kind}", sys.executable, kind, share)
        if options.python:
            yield Contender(f"{share:.0%} {BEFORE}", options.python, "saved", share)


def compare(folder: Path, options: argparse.Namespace) -> None:
    made = make(folder / "model", options)
    rows = list(contenders(options))
    samples: dict[str, list[dict[str, Any]]] = {each.name: [] for each in rows}
    rates = []
    for turn in range(options.turns):
        rates.append(drive_rate(made.directory / "saved" / "model.safetensors"))
        first = turn % len(rows)
        for each in rows[first:] + rows[:first]:
            samples[each.name].append(measured(made, each, options.tokens))
    show(made, rows, samples, statistics.median(rates), options)


def show(
    made: Made,
    rows: list[Contender],
    samples: dict[str, list[dict[str, Any]]],
    rate: float,
    options: argparse.Namespace,
) -> None:
    """The table."""
    decoded = options.prompts * (options.tokens - 1)
    one = made.expert_bytes / (options.layers * options.experts)
    passes = list(made.table.passes())[1:]
    # An expert that several prompts share is read once in a pass.
    routed = one * sum(len(experts) for layers in passes for experts in layers)
    print(
        f"{options.layers} layers of {options.experts} experts of {one / 1e6:.2f} MB, top "
        f"{options.top}, {options.routing}, {options.prompts} x {options.prompt} + "
        f"{options.tokens} tokens, {options.turns} turns; the drive reads {rate / 1e9:.2f} GB/s"
    )
    head = ("tokens/s", "x", "prompt", "read", "reads", "peak", "bound", "of it", "oracle")
    print(f"{'':24}" + "".join(f" {word:>8}" for word in head))

    def median(name: str, key: str) -> float:
        return statistics.median(each[key] for each in samples[name])

    in_memory = median(rows[0].name, "tokens_per_s")
    for name, _, kind, share in rows:
        own = f"{share:.0%} {options.kinds[0]}" if share else name
        times = [
            one_of["tokens_per_s"] / other["tokens_per_s"]
            for one_of, other in zip(samples[name], samples[own], strict=True)
        ]
        speed = median(name, "tokens_per_s")
        read = median(name, "token_bytes")
        bound = min(in_memory, rate / read if read else in_memory)
        kept = max(median(own, "kept_bytes"), made.expert_bytes * share)
        wanted = one * oracles_misses(made.table, int(kept / one)) if share else 0
        best = min(in_memory, decoded * rate / wanted if wanted else in_memory)
        times_first = statistics.median(times)
        print(
            f"{name:24} {speed:8.1f} {times_first:8.2f} {median(name, 'prompt_s'):8.2f}"
            f" {read * decoded / routed:8.2f} {median(name, 'reads'):8.0f}"
            f" {median(name, 'peak_bytes') / 1e6:8.0f}",
            # The limits are those of torch's arithmetic.
            f"{bound:8.1f} {speed / bound:8.2f} {best:8.1f}" if kind != LLAMA else "",
        )
    for name in (each.name for each in rows if each.kind in (OFFLOAD, LLAMA)):
        if not all(each["limited"] for each in samples[name]):
            print(
                f"{name}: no control group could be made; its page cache was as large as it likes"
            )
    for name in (each.name for each in rows if each.name.endswith(BEFORE)):
        print(f"{name}: {samples[name][0]['nvmeio']}")


def kinds(text: str) -> list[str]:
    """The names that a user gives; raises for what is not one."""
    names = text.split(",")
    for name in names:
        if name not in (*KINDS, MEMORY):
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(KINDS)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="a folder on the drive")
    parser.add_argument("--experts", type=int, default=64, help="in each layer (64)")
    parser.add_argument("--top", type=int, default=8, help="experts of a token (8)")
    parser.add_argument(
        "--width", type=int, default=512, help="of the model; an expert has 6 x width² bytes (512)"
    )
    parser.add_argument("--routing", choices=("traces", "random"), default="traces")
    parser.add_argument("--prompts", type=int, default=1, help="at once (1)")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of each (16)")
    parser.add_argument("--tokens", type=int, default=48, help="to generate for each (48)")
    parser.add_argument("--layers", type=int, default=8, help="of the model (8)")
    parser.add_argument(
        "--kinds",
        type=kinds,
        default=["saved", "packed", OFFLOAD],
        help=f"split by commas: {', '.join(KINDS)} (saved,packed,{OFFLOAD})",
    )
    parser.add_argument("--turns", type=int, default=3, help="of each contender (3)")
    parser.add_argument("--python", help="an interpreter with another nvmeio")
    parser.add_argument(
        "--shares",
        type=lambda text: [float(part) for part in text.split(",")],
        default=[0.12, 0.25, 0.5],
        help="of the experts in memory (0.12,0.25,0.5)",
    )
    parser.add_argument("--run", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run is not None:
        print(json.dumps(run(options.dir, options.kinds[0], options.run, options.tokens)))
        return
    with tempfile.TemporaryDirectory(prefix="nvmeio-mixtures-", dir=options.dir) as folder:
        compare(Path(folder), options)


if __name__ == "__main__":
    main()
