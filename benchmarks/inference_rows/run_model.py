"""One run of one model: prefill, decode, total, tokens/s, memory, and how busy the drive was."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from _measure import median
from rich.console import Console
from rich.table import Table

from nvmeio.cli.measure.disk import Disks

# Sizes for --dummy: width, layers, heads.
DUMMIES = {
    "llama-100m": (768, 12, 12),
    "llama-1b": (2048, 22, 32),
    "llama-3b": (3072, 28, 24),
    "llama-7b": (4096, 32, 32),
}


# Flags of DeepSpeed's run_model.py that mean nothing here, and what to do instead.
REFUSED = (
    (
        "--use-gds",
        "weights go through host memory here; `nvmeio bench --gds` measures GPUDirect Storage",
    ),
    (
        "--pin-kv-cache",
        "--kv-offload chooses the memory: page-locked for a GPU, a file for a CPU; leave it away",
    ),
    (
        "--async-kv-offload",
        "how past keys and values are copied cannot be chosen here; leave it away",
    ),
)


def main(arguments: list[str], description: str | None) -> int:
    options = _parse(arguments, description)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with tempfile.TemporaryDirectory(prefix="nvmeio-inference-", dir=options.dir) as scratch:
            directory = _directory(options, Path(scratch))
            result = _run(options, directory)
    console = Console(stderr=options.json == "-")
    table = Table(title=f"{options.model}, {result['where']}", show_header=False)
    for name, value in result.items():
        table.add_row(name, f"{value:.3f}" if isinstance(value, float) else str(value))
    console.print(table)
    if options.log_file:
        _write_log(options, result)
    if options.json:
        text = json.dumps(result, indent=1) + "\n"
        if options.json == "-":
            sys.stdout.write(text)
        else:
            Path(options.json).write_text(text)
    return 0


def _parse(arguments: list[str], description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help=f"a directory, or with --dummy {[*DUMMIES]}")
    parser.add_argument("--dummy", action="store_true", help="random weights")
    parser.add_argument("--loops", type=int, default=3, help="runs; medians are told (3)")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--micro-batches", type=int, default=1, help="that share each layer (1)")
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--gen-len", type=int, default=32)
    parser.add_argument("--pin-memory", type=int, default=1, help="tell whether it is locked (1)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--cpu-offload", action="store_true", help="all weights in memory")
    where.add_argument("--disk-offload", action="store_true", help="weights on disk, but a window")
    parser.add_argument("--kv-offload", action="store_true", help="past keys and values on disk")
    parser.add_argument("--quant-bits", type=int, default=16, choices=(4, 8, 16))
    parser.add_argument("--quant-group-size", type=int, default=64)
    parser.add_argument("--resident-bytes", type=int, help="memory for weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--dir",
        "--offload-dir",
        type=lambda text: Path(text).expanduser(),
        default=Path("."),
        help="for --dummy and --quant-bits",
    )
    parser.add_argument("--json", metavar="FILE", nargs="?", const="-")
    parser.add_argument("--log-file", metavar="FILE", help="the table as text; auto makes a name")
    parser.add_argument("--verbose", type=int, default=1, help="2 tells every loop as well (1)")
    for flag, _ in REFUSED:
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--local-rank", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args([_dashed(argument) for argument in arguments])
    for flag, instead in REFUSED:
        if getattr(options, flag.removeprefix("--").replace("-", "_")):
            parser.error(f"{flag.replace('-', '_').replace('__', '--', 1)}: {instead}")
    if options.local_rank > 0:
        parser.error("--local_rank: one process runs the model; start it without a launcher")
    for name in ("loops", "batch_size", "micro_batches", "prompt_len", "gen_len"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: at least 1, not {getattr(options, name)}")
    if (options.dummy or options.quant_bits != 16) and not options.dir.is_dir():
        parser.error(
            f"--offload-dir: {options.dir} is not a directory; make it, or name another one"
        )
    if options.dummy and options.model not in DUMMIES:
        parser.error(f"with --dummy --model is one of {', '.join(DUMMIES)}")
    return options


def _dashed(argument: str) -> str:
    """A flag as it is spelled here; DeepSpeed's have underscores in them, some of them."""
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else argument


def _write_log(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """The table as text, into the file of --log-file."""
    name = options.log_file
    if name == "auto":
        kept = "disk" if options.disk_offload else "cpu" if options.cpu_offload else "gpu"
        name = (
            f"nvmeio-{Path(options.model).name}-bs{options.batch_size}-prompt{options.prompt_len}-"
            f"gen{options.gen_len}-{kept}.log"
        )
    Path(name).write_text("".join(f"{each}: {value}\n" for each, value in result.items()))


def _directory(options: argparse.Namespace, scratch: Path) -> Path:
    from peers.inference import write_llama

    directory = Path(options.model)
    if options.dummy:
        width, layers, heads = DUMMIES[options.model]
        directory = scratch / "dummy"
        write_llama(directory, width, layers, heads)
    if options.quant_bits != 16:
        from nvmeio.inference import pack

        packed = scratch / "packed"
        pack(
            directory,
            packed,
            quant_bits=options.quant_bits,
            quant_group_size=options.quant_group_size,
        )
        directory = packed
    return directory


def _memory(options: argparse.Namespace, directory: Path) -> tuple[int | None, str]:
    """Bytes for weights, and what to call it."""
    if options.cpu_offload:
        return 1 << 62, "weights in memory"
    if options.resident_bytes:
        return options.resident_bytes, f"{options.resident_bytes / 1e9:.1f} GB for weights"
    if not options.disk_offload:
        return None, "as many weights in memory as it has room for"
    from transformers import AutoConfig

    total = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    layers = AutoConfig.from_pretrained(directory).get_text_config().num_hidden_layers
    a_layer = total // layers
    converted = 32 // options.quant_bits * a_layer if options.quant_bits != 16 else 0
    return max(total // 8, 5 * a_layer + converted), "weights on disk but for a window"


def _run(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    import torch
    from peers.inference import forget_peak, process_bytes

    import nvmeio
    from nvmeio.inference import generate_in_blocks

    before = forget_peak()
    budget, where = _memory(options, directory)
    model = nvmeio.stream_model(
        directory, device=options.device, resident_bytes=budget, kv_offload=options.kv_offload
    )
    stream = model.weight_stream
    size = model.config.get_text_config().vocab_size
    ids = torch.randint(3, size, (options.batch_size, options.prompt_len)).to(options.device)
    disks = Disks([directory])
    runs: list[dict[str, float]] = []

    def generate(count: int) -> float:
        began = time.perf_counter()
        generate_in_blocks(
            model,
            ids,
            micro_batches=options.micro_batches,
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        return time.perf_counter() - began

    for _ in range(options.loops):
        prefill = generate(1)
        read, waited, moved = stream.stats.bytes_read, stream.stats.waited_s, disks.look()
        total = generate(options.gen_len)
        stats, now = stream.stats, disks.look()
        decode = max(total - prefill, 1e-9)
        runs.append(
            {
                "prefill latency, s": prefill,
                "prefill, tokens/s": ids.numel() / prefill,
                "decode latency, s": decode,
                "decode, tokens/s": options.batch_size * max(options.gen_len - 1, 0) / decode,
                "total latency, s": total,
                "total, tokens/s": options.batch_size * options.gen_len / total,
                "read, GB/s": (stats.bytes_read - read) / total / 1e9,
                "drive, GB/s": now.since(moved).read / total / 1e9 if now and moved else 0.0,
                "computation waited for weights": (stats.waited_s - waited) / total,
            }
        )
    if options.verbose > 1:
        for run in runs:
            print(", ".join(f"{name} {value:.3f}" for name, value in run.items()), file=sys.stderr)
    result: dict[str, Any] = {
        "where": where,
        "batch": options.batch_size,
        "prompt, tokens": options.prompt_len,
        "generated, tokens": options.gen_len,
        **{name: median([run[name] for run in runs]) for name in runs[0]},
        "weights in memory, MB": (stats.resident_bytes + stats.window_bytes + stats.work_bytes)
        / 1e6,
        "peak memory of the process, MB": (process_bytes("VmHWM") - before) / 1e6,
    }
    if options.pin_memory:
        result["page-locked"] = stream.locked
    stream.close()
    return result
