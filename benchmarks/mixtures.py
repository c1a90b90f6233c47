"""Mixtures of experts: tokens a second with a share of the experts in memory, and what is read.

    python benchmarks/mixtures.py --dir /mnt/nvme
    python benchmarks/mixtures.py --dir /mnt/nvme --width 1024 --shares 0.12,0.5 --turns 5

The model and its routing are those of examples/20_mixture_beyond_memory.py: 8 layers, random
weights, and routing with the locality of published traces. Each run is a process of its own, in
turns, with the files dropped from the page cache before. A run generates once to fill the cache of
experts, and is timed the second time. `read` is the share of the routed bytes that was read while
decoding. `bound` is the slower of two: all in memory, and the missed bytes at the rate of a plain
sequential read.
The model is read as transformers saves it (gate and up fused, down apart), as `nvmeio pack
--keep-fused` writes it, and as `nvmeio pack` does, which puts an expert's weights side by side;
`--kinds` chooses. "disk offload" is accelerate's: layers that do not fit are read in each pass,
through the page cache, which may be as large as it likes.
`x` is the median of each turn's tokens/s over those of the first kind in the same turn.
`--python` adds an interpreter with another nvmeio (an older one), whose rows say "before".
"""

from __future__ import annotations

import argparse
import json
import operator
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
EXAMPLE = ROOT / "examples/20_mixture_beyond_memory.py"
MEMORY, OFFLOAD = "memory", "disk offload"
KINDS = ["saved", "fused", "packed", OFFLOAD]


def run(
    directory: Path, kind: str, share: float, experts: int, tokens: int, layers: int
) -> dict[str, float]:
    """One contender in this process; share 0 is the model in memory."""
    sys.path.insert(0, str(EXAMPLE.parent))
    example = runpy.run_path(str(EXAMPLE))
    import torch
    import transformers

    import nvmeio

    example["route"].__globals__["LAYERS"] = layers
    prompt = example["PROMPT"]
    ids = torch.arange(3, 3 + prompt).reshape(1, prompt)
    facts = json.loads((directory / "sizes.json").read_text())
    budget = int(facts["experts"] * share) + 2 * facts["others"] + (1 << 20)
    cls = transformers.Qwen3MoeForCausalLM
    with tempfile.TemporaryDirectory(dir=directory.parent) as offload_folder:
        if not share:
            model = cls.from_pretrained(directory / "saved").eval()
        elif kind == OFFLOAD:
            places = {"device_map": "auto", "max_memory": {"cpu": budget}}
            model = cls.from_pretrained(
                directory / "saved", offload_folder=offload_folder, **places
            ).eval()
        else:
            model = nvmeio.stream_model(directory / kind, resident_bytes=budget)
        example["route"](model, prompt + tokens, experts)
        read = [_read_by(model)]
        for count in (tokens, 1, tokens):  # to fill the cache; the prompt alone; what is timed
            _, took = example["generated"](model, ids, count)
            read.append(_read_by(model))
    decoded = [
        max(0, (after - mid) - (mid - before)) for before, mid, after in zip(*read[1:], strict=True)
    ]
    return {"tokens_per_s": tokens / took, "decoded_bytes": decoded[0], "reads": decoded[1]}


def _read_by(model: Any) -> tuple[int, int]:
    """Bytes that a model has read, and reads of experts."""
    stream = getattr(model, "weight_stream", None)
    if stream is None:
        return 0, 0
    each = [len((*e.direct[0].reads, *e.staged[0].reads)) for e in stream.experts]
    counts = [c.misses + c.read_ahead for c in stream.expert_stats]
    return int(stream.stats.bytes_read), sum(map(operator.mul, each, counts))


def measured(
    python: str, directory: Path, kind: str, share: float, options: Any
) -> dict[str, float]:
    """`run` in a process of its own, from a cold cache."""
    from _files import drop_from_cache

    for file in directory.glob("*/*.safetensors"):
        drop_from_cache(file)
    command = [python, __file__, "--run", str(share), "--kinds", kind, "--dir", str(directory)]
    command += ["--experts", str(options.experts), "--tokens", str(options.tokens)]
    command += ["--layers", str(options.layers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
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


def compare(folder: Path, options: argparse.Namespace) -> None:
    from nvmeio.inference import pack

    sys.path.insert(0, str(EXAMPLE.parent))
    example = runpy.run_path(str(EXAMPLE))
    example["make_model"].__globals__["LAYERS"] = options.layers
    directory = folder / "model"
    directory.mkdir()
    of_experts = example["make_model"](directory / "saved", options.experts, options.width)
    file = directory / "saved" / "model.safetensors"
    for kind in {"fused", "packed"} & set(options.kinds):
        pack(directory / "saved", directory / kind, keep_fused=kind == "fused")
    sizes = {"experts": of_experts, "others": file.stat().st_size - of_experts}
    (directory / "sizes.json").write_text(json.dumps(sizes))
    one = of_experts / (options.layers * options.experts)
    routed = one * options.layers * example["TOP"] * (options.tokens - 1)
    contenders = [(MEMORY, sys.executable, MEMORY, 0.0)]
    for share in options.shares:
        for kind in options.kinds:
            contenders.append((f"{share:.0%} {kind}", sys.executable, kind, share))
        if options.python:
            contenders.append((f"{share:.0%} before", options.python, options.kinds[0], share))
    samples: dict[str, list[dict[str, float]]] = {name: [] for name, *_ in contenders}
    rates = []
    for turn in range(options.turns):
        rates.append(drive_rate(file))
        first = turn % len(contenders)
        for name, python, kind, share in contenders[first:] + contenders[:first]:
            samples[name].append(measured(python, directory, kind, share, options))
    rate = statistics.median(rates)
    print(f"experts of {one / 1e6:.2f} MB, {options.experts} in each of {options.layers} layers")
    head = ("tokens/s", "x", "read", "reads", "bound", "of it")
    print(f"{'in memory':18}" + "".join(f" {word:>8}" for word in head))
    in_memory = statistics.median(each["tokens_per_s"] for each in samples[MEMORY])
    first_of = {share: samples[f"{share:.0%} {options.kinds[0]}"] for share in options.shares}
    for name, _, _, share in contenders:
        found = samples[name]
        speed = statistics.median(each["tokens_per_s"] for each in found)
        read = statistics.median(each["decoded_bytes"] for each in found)
        reading = options.tokens * rate / read if read else in_memory
        bound = min(in_memory, reading)
        times = [
            own["tokens_per_s"] / other["tokens_per_s"]
            for own, other in zip(found, first_of.get(share, found), strict=True)
        ]
        reads = statistics.median(each["reads"] for each in found)
        print(
            f"{name:18} {speed:8.1f} {statistics.median(times):8.2f} {read / routed:8.2f}"
            f" {reads:8.0f} {bound:8.1f} {speed / bound:8.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="a folder on the drive")
    parser.add_argument("--experts", type=int, default=64, help="in each layer (64)")
    parser.add_argument("--width", type=int, default=512, help="of the model (512)")
    parser.add_argument("--tokens", type=int, default=48, help="to generate (48)")
    parser.add_argument("--layers", type=int, default=8, help="of the model (8)")
    parser.add_argument(
        "--kinds",
        type=lambda text: text.split(","),
        default=["saved", "packed", OFFLOAD],
        help=f"of {', '.join(KINDS)} (saved,packed,{OFFLOAD})",
    )
    parser.add_argument("--turns", type=int, default=3, help="of each contender (3)")
    parser.add_argument("--python", help="an interpreter with another nvmeio")
    parser.add_argument(
        "--shares",
        type=lambda text: [float(part) for part in text.split(",")],
        default=[0.12, 0.25, 0.5],
        help="of the experts in memory (0.12,0.25,0.5)",
    )
    parser.add_argument("--run", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run is not None:
        shape = (options.experts, options.tokens, options.layers)
        print(json.dumps(run(options.dir, options.kinds[0], options.run, *shape)))
        return
    with tempfile.TemporaryDirectory(prefix="nvmeio-mixtures-", dir=options.dir) as folder:
        compare(Path(folder), options)


if __name__ == "__main__":
    main()
