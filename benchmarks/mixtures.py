"""Mixtures of experts: tokens a second with a share of the experts in memory, and what is read.

    python benchmarks/mixtures.py --dir /mnt/nvme
    python benchmarks/mixtures.py --dir /mnt/nvme --width 1024 --shares 0.12,0.5 --turns 5

The model and its routing are those of examples/20_mixture_beyond_memory.py: 8 layers, random
weights, and routing with the locality of published traces. Each run is a process of its own, in
turns, with the files dropped from the page cache before. A run generates once to fill the cache of
experts, and is timed the second time. `read` is the share of the routed bytes that was read while
decoding. `bound` is the slower of two: all in memory, and the missed bytes at the rate of a plain
sequential read.
`--python` adds an interpreter with another nvmeio (an older one), whose rows say "before".
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
EXAMPLE = ROOT / "examples/20_mixture_beyond_memory.py"
MEMORY = "memory"


def run(directory: Path, share: float, experts: int, tokens: int) -> dict[str, float]:
    """One contender in this process; share 0 is the model in memory."""
    sys.path.insert(0, str(EXAMPLE.parent))
    example = runpy.run_path(str(EXAMPLE))
    import torch
    import transformers

    import nvmeio

    prompt = example["PROMPT"]
    ids = torch.arange(3, 3 + prompt).reshape(1, prompt)
    if share:
        facts = json.loads((directory / "sizes.json").read_text())
        budget = int(facts["experts"] * share) + 2 * facts["others"] + (1 << 20)
        model = nvmeio.stream_model(directory, resident_bytes=budget)
    else:
        model = transformers.Qwen3MoeForCausalLM.from_pretrained(directory).eval()
    example["route"](model, prompt + tokens, experts)
    read = [_bytes_read(model)]
    for count in (tokens, 1, tokens):  # to fill the cache; the prompt alone; what is timed
        _, took = example["generated"](model, ids, count)
        read.append(_bytes_read(model))
    decoded = (read[3] - read[2]) - (read[2] - read[1])
    return {"tokens_per_s": tokens / took, "decoded_bytes": max(0, decoded)}


def _bytes_read(model: Any) -> int:
    stream = getattr(model, "weight_stream", None)
    return 0 if stream is None else int(stream.stats.bytes_read)


def measured(python: str, directory: Path, share: float, options: Any) -> dict[str, float]:
    """`run` in a process of its own, from a cold cache."""
    from _files import drop_from_cache

    for file in directory.glob("*.safetensors"):
        drop_from_cache(file)
    command = [python, __file__, "--run", str(share), "--dir", str(directory)]
    command += ["--experts", str(options.experts), "--tokens", str(options.tokens)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def drive_rate(path: Path) -> float:
    """Bytes a second of one direct sequential read of a file."""
    import nvmeio

    nbytes = path.stat().st_size // 4096 * 4096
    memory = nvmeio.empty_aligned(min(nbytes, 256 << 20))
    with nvmeio.AioHandle() as handle:
        handle.sync_pread(memory, path)
        began = time.perf_counter()
        handle.sync_pread(memory, path)
    return memory.nbytes / (time.perf_counter() - began)


def compare(folder: Path, options: argparse.Namespace) -> None:
    sys.path.insert(0, str(EXAMPLE.parent))
    example = runpy.run_path(str(EXAMPLE))
    directory = folder / "model"
    of_experts = example["make_model"](directory, options.experts, options.width)
    file = directory / "model.safetensors"
    sizes = {"experts": of_experts, "others": file.stat().st_size - of_experts}
    (directory / "sizes.json").write_text(json.dumps(sizes))
    one = of_experts / (example["LAYERS"] * options.experts)
    routed = one * example["LAYERS"] * example["TOP"] * (options.tokens - 1)
    contenders = [(MEMORY, sys.executable, 0.0)]
    for share in options.shares:
        contenders.append((f"{share:.0%}", sys.executable, share))
        if options.python:
            contenders.append((f"{share:.0%} before", options.python, share))
    samples: dict[str, list[dict[str, float]]] = {name: [] for name, _, _ in contenders}
    rates = []
    for turn in range(options.turns):
        rates.append(drive_rate(file))
        first = turn % len(contenders)
        for name, python, share in contenders[first:] + contenders[:first]:
            samples[name].append(measured(python, directory, share, options))
    rate = statistics.median(rates)
    print(f"experts of {one / 1e6:.2f} MB, {options.experts} in each of {example['LAYERS']} layers")
    print(f"{'in memory':12} {'tokens/s':>9} {'read':>6} {'bound':>9} {'of it':>6}")
    in_memory = statistics.median(each["tokens_per_s"] for each in samples[MEMORY])
    for name, found in samples.items():
        speed = statistics.median(each["tokens_per_s"] for each in found)
        read = statistics.median(each["decoded_bytes"] for each in found)
        reading = options.tokens * rate / read if read else in_memory
        bound = min(in_memory, reading)
        print(f"{name:12} {speed:9.1f} {read / routed:6.2f} {bound:9.1f} {speed / bound:6.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="a folder on the drive")
    parser.add_argument("--experts", type=int, default=64, help="in each layer (64)")
    parser.add_argument("--width", type=int, default=512, help="of the model (512)")
    parser.add_argument("--tokens", type=int, default=48, help="to generate (48)")
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
        print(json.dumps(run(options.dir, options.run, options.experts, options.tokens)))
        return
    with tempfile.TemporaryDirectory(prefix="nvmeio-mixtures-", dir=options.dir) as folder:
        compare(Path(folder), options)


if __name__ == "__main__":
    main()
