"""DeepSpeed's ZeRO-3 with its optimizer on disk: seconds a step, on nvmeio and on its own op.

    python benchmarks/deepspeed_step.py --dir /mnt/nvme
    python benchmarks/deepspeed_step.py --dir /mnt/nvme --parameters 128M --json out.json

Two processes train the same model from the same seed, one with `nvmeio.compat.deepspeed.install()`
and one as DeepSpeed comes; they take turns within one run, starting with another one each time.
Every step reads and writes the optimizer's state (12 bytes a parameter: the weight and Adam's two
moments, in 32 bits) and the gradients (4). In the end both must have the same parameters, bit by
bit. The ratio is the medians' of the whole step: above 1.0 nvmeio is faster.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from _machine import machine, versions
from _session import start_worker
from rich.console import Console
from rich.table import Table

from nvmeio.cli.measure import parse_size
from nvmeio.cli.measure.worker import Failed, Worker
from nvmeio.errors import BackendUnavailableError

SIDES = {"nvmeio": "peers.zero3:OnNvmeio", "its own op": "peers.zero3:OnItsOwn"}
PARTS = {
    "step": "seconds a step",
    "optimizer": "of that, optimizer.step",
    "cpu": "processor seconds",
}
BYTES_ON_DISK = 16  # a parameter: weight, two moments and gradient, in 32 bits
PIPED_WIDTH = 132


def main() -> int:
    options = _parse(sys.argv[1:])
    needed = 2 * BYTES_ON_DISK * options.parameters
    if shutil.disk_usage(options.dir).free < needed + (1 << 29):
        sys.exit(f"{options.dir}: {needed / 1e9:.1f} GB are needed")
    progress = Console(stderr=True)
    facts = machine(options.dir)
    results = []
    directory = Path(tempfile.mkdtemp(prefix="nvmeio-deepspeed-", dir=options.dir))
    try:
        for pipelined in (False, True):
            results.append(_compare(directory, options, pipelined, progress))
    except BackendUnavailableError as missing:
        sys.exit(f"skipped: {missing}")
    except Failed as failed:
        sys.exit(str(failed))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    report = {
        "machine": facts,
        "versions": versions(),
        "parameters": options.parameters,
        "sub_group_size": options.group,
        "aio": _aio(options),
        "results": results,
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    _show(report)
    return 0 if all(result["same parameters"] for result in results) else 1


def _compare(
    directory: Path, options: argparse.Namespace, pipelined: bool, progress: Console
) -> dict[str, Any]:
    """Both sides in turns; the samples of each and what they come to."""
    workers: dict[str, Worker] = {}
    samples: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    try:
        for side, target in SIDES.items():
            progress.print(f"starting {side}, {'pipelined' if pipelined else 'plain'}")
            files = directory / side.replace(" ", "-")
            files.mkdir(exist_ok=True)
            workers[side] = start_worker(target, directory / f"{files.name}.log")
            workers[side].call(
                "prepare",
                directory=str(files),
                parameters=options.parameters,
                group=options.group,
                pipelined=pipelined,
                aio=_aio(options),
            )
        for turn in range(options.repeats):
            order = list(SIDES) if turn % 2 == 0 else list(reversed(SIDES))
            for side in order:
                samples[side] += workers[side].call("steps", count=options.steps)
            progress.print(f"turn {turn + 1} of {options.repeats}")
        fingerprints = {workers[side].call("fingerprint") for side in SIDES}
        ops = {side: workers[side].call("op") for side in SIDES}
    finally:
        for worker in workers.values():
            worker.close()
    for side in SIDES:
        shutil.rmtree(directory / side.replace(" ", "-"), ignore_errors=True)
    return {
        "way": "pipelined" if pipelined else "plain",
        "ops": ops,
        "same parameters": len(fingerprints) == 1,
        "samples": samples,
        **{
            f"{part} ratio": statistics.median(
                own[part] / ours[part]
                for own, ours in zip(samples["its own op"], samples["nvmeio"], strict=True)
            )
            for part in PARTS
        },
    }


def _aio(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "block_size": options.block_size,
        "queue_depth": options.queue_depth,
        "intra_op_parallelism": options.io_parallel,
        "overlap_events": True,
        "single_submit": False,
    }


def _show(report: dict[str, Any]) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    for title in ("machine", "versions", "aio"):
        text = ", ".join(f"{key} {value}" for key, value in report[title].items())
        console.print(f"[bold]{title}[/] {text}", highlight=False)
    gigabytes = BYTES_ON_DISK * report["parameters"] / 1e9
    console.print(
        f"{report['parameters'] / 1e6:.0f} million parameters, {gigabytes:.2f} GB on disk "
        f"(read and written each step), in groups of {report['sub_group_size'] / 1e6:.0f} million"
    )
    table = Table(caption="medians (lowest to highest); ratio = median of its own op / nvmeio")
    for header in ("", "nvmeio", "its own op", "ratio", "same parameters"):
        table.add_column(header, justify="right" if header == "ratio" else "left")
    for result in report["results"]:
        for part, name in PARTS.items():
            taken = [[sample[part] for sample in result["samples"][side]] for side in SIDES]
            table.add_row(
                f"{result['way']}, {name}",
                *(f"{statistics.median(t):.3f} ({min(t):.3f} to {max(t):.3f})" for t in taken),
                f"{result[f'{part} ratio']:.2f}",
                "yes" if result["same parameters"] else "NO",
            )
    console.print(table)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="where the files go")
    parser.add_argument("--parameters", type=parse_size, default=64 << 20, help="default 64M")
    parser.add_argument("--group", type=parse_size, default=8 << 20, help="sub_group_size, 8M")
    parser.add_argument("--repeats", type=int, default=15, help="turns of each side, 15")
    parser.add_argument("--steps", type=int, default=1, help="steps in a turn, default 1")
    parser.add_argument("--block-size", type=parse_size, default=1 << 20, help="default 1M")
    parser.add_argument("--queue-depth", type=int, default=32, help="default 32")
    parser.add_argument("--io-parallel", type=int, default=1, help="default 1")
    parser.add_argument("--json", type=Path, help="write everything here too")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
