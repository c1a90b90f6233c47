"""CUDA tensors to and from files on this machine, and training with them: right, and how fast?

    python benchmarks/gpu_check.py --dir /mnt/nvme --json gpu.json --table gpu.md

Needs torch with CUDA, cffi, numpy and this repository with its shim built in place
(`python setup.py build_ext --inplace`); `gpu_day.sh` brings them to a machine without a network.
Four parts: A is it alive, B is it right, C cuFile, D how fast (`gpu_steps`). `--parts` and `--only`
choose; without a GPU, the steps are listed with what each would do. Each step is a process of its
own with a time limit, so one that hangs or crashes is a line in the table and not the end of the
run; **a wrong byte is**. All of it ends after `--minutes`, of which each part gets its share, and
what was not reached is named. `--json`, `--table` (the results as docs/gds.md has them) and
`--summary` (one page: what of "no GPU has run this" may go) are written after each step, so that a
run which is cut short leaves what it knows. `--dry-run` runs what needs no GPU on any machine, with
little data: it tells whether the steps work, and no figure.

Reads are measured with the file out of the page cache (posix_fadvise); figures are the median of
three turns, in GB/s (10**9 bytes). "mode" is `GdsHandle.mode`: in mode compat nothing is DMA.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from gpu_steps import alive, common, correctness, cufile, speed  # noqa: E402
from gpu_steps.common import Plan, Step, make_file  # noqa: E402

MINUTES = 6.5  # below the ten that some machines give a command
MOST_ERRORS = 60  # lines of a failed step's that the JSON keeps


class Part(NamedTuple):
    """Steps that are worth having alone, and the minutes for all of them."""

    title: str
    minutes: float
    steps: Callable[[bool], dict[str, Plan]]


PARTS = {
    "A": Part("is it alive", 4, alive.steps),
    "B": Part("is it right", 8, correctness.steps),
    "C": Part("cuFile", 6, cufile.steps),
    "D": Part("how fast", 6, speed.steps),
}


class Claim(NamedTuple):
    """What pages say that a GPU has run, or that none has.

    Attributes:
        pages: They say it.
        steps: All of them have to be right before a page may say that a GPU has run it; none where
            one GPU alone cannot show it.
        shown: Where it was shown; "" as long as the pages say that no GPU has run it.
        by_dma: The steps show it only if cuFile's mode is "gds" or "p2p".
    """

    pages: tuple[str, ...]
    steps: tuple[str, ...] = ()
    shown: str = ""
    by_dma: bool = False


H100 = "one H100, 2026-11-26"  # benchmarks/measured/gpu/h100.json
CLAIMS = {
    "CUDA tensors are read and written through the ring": Claim(
        ("README.md", "docs/gds.md", "docs/transfers.md", "docs/deepspeed.md"),
        (
            "correctness aio",
            "aio ring",
            "40 streams of the user's",
            "a graph captured beside reads",
            "a fork between reads",
            "expandable segments",
        ),
        H100,
    ),
    "checkpoints of CUDA tensors are snapshots": Claim(
        ("docs/how/checkpoints.md",),
        ("checkpoint, protected", "checkpoint, copied", "save", "load and safe_open"),
        H100,
    ),
    "models stream to a GPU": Claim(
        ("docs/inference.md", "docs/how/inference.md"),
        ("stream", "stream, adapters trained", "KV cache"),
        H100,
    ),
    "SwappedModule and SwappedOptimizer train on a GPU": Claim(
        ("docs/offload.md", "docs/comparison.md"),
        (
            "train, gradients in memory",
            "train, gradients on the drive",
            "train, stepped on the device",
            "activations",
            "bf16 and autocast",
            "gradient checkpointing",
            "a full device",
            "torch's sanitizer",
        ),
        H100,
    ),
    "FSDP2 gathers shards from the drive, one rank": Claim(("docs/offload.md",), ("FSDP2",), H100),
    "cuFile moves CUDA tensors, in compat mode at least": Claim(
        ("docs/gds.md", "docs/deepspeed.md", "docs/comparison.md"),
        ("correctness gds", "train, gds"),
        H100,
    ),
    "GPUDirect Storage moves them by DMA": Claim(
        ("README.md", "docs/gds.md", "docs/comparison.md", "docs/offload.md", "docs/deepspeed.md"),
        ("correctness gds", "train, gds"),
        by_dma=True,
    ),
    "experts of a mixture stay on a GPU, and below it": Claim(
        ("docs/inference.md",), ("experts of a mixture",)
    ),
    "several ranks have a GPU each": Claim(
        ("README.md", "docs/gds.md", "docs/inference.md", "docs/offload.md")
    ),
    "servers load, keep and swap on a GPU": Claim(
        ("README.md", "docs/gds.md", "docs/serving.md", "docs/frameworks/sglang.md")
    ),
}


def steps(on_gpu: bool, parts: str = "ABCD") -> dict[str, Plan]:
    """All steps of some parts by name, in the order in which they run."""
    return {name: plan for part in parts for name, plan in PARTS[part].steps(on_gpu).items()}


# The run


def run_step(
    name: str, plan: Plan, arguments: argparse.Namespace, directory: Path, limit: float
) -> Any:
    """The step's result, from a process of its own."""
    command = [sys.executable, __file__, "--step", name, "--dir", str(directory)]
    command += ["--size", str(arguments.size)] + ["--dry-run"] * arguments.dry_run
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=output, stderr=errors, env={**os.environ, **plan.environment}
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {limit:.0f} s"}
        finally:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)  # one that hangs in a driver may not end at all
        output.seek(0)
        errors.seek(0)
        lines = output.read().strip().splitlines()
        if process.returncode or not lines:
            told = [line.rstrip() for line in errors if line.strip()]
            said = [line for line in told if not line.startswith(" ")] or ["no output"]
            failed = f"status {process.returncode}: {said[-1]}"
            return {"failed": failed, "errors": told[-MOST_ERRORS:]}
        return json.loads(lines[-1])


def chosen(arguments: argparse.Namespace, on_gpu: bool) -> dict[str, dict[str, Plan]]:
    """The steps to run, by part."""
    found = {}
    for part in arguments.parts:
        plans = PARTS[part].steps(on_gpu)
        found[part] = {
            name: plan
            for name, plan in plans.items()
            if not arguments.only or any(word in name for word in arguments.only)
        }
    if any(plan.needs_cufile for plans in found.values() for plan in plans.values()):
        first = {"facts": alive.steps(on_gpu)["facts"]}  # whether it can be used
        part = arguments.parts[0]
        found[part] = {**first, **found[part]}
    return {part: plans for part, plans in found.items() if plans}


def run_all(
    arguments: argparse.Namespace, on_gpu: bool, directory: Path, began: float
) -> dict[str, Any]:
    """The results by step, which are written after each; up to the first wrong byte."""
    results: dict[str, Any] = {}
    parts = chosen(arguments, on_gpu)
    whole, ends, stopped = sum(PARTS[part].minutes for part in parts), began, ""
    for part, plans in parts.items():
        print(f"{part}: {PARTS[part].title}", flush=True)
        # What an earlier part has left over is this one's too.
        ends += 60 * arguments.minutes * PARTS[part].minutes / whole
        for name, plan in plans.items():
            left = ends - time.monotonic()
            refusal = cufile_refusal(results) if plan.needs_cufile else ""
            if stopped or refusal:
                results[name] = {"skipped": stopped or refusal}
            elif left < 1:
                why = (
                    f"the share of part {part} of {arguments.minutes:g} minutes is over: --minutes"
                )
                results[name] = {"skipped": why}
            else:
                at = time.monotonic()
                limit = min(plan.limit_s, left)
                results[name] = run_step(name, plan, arguments, directory, limit)
                results[name]["seconds"] = round(time.monotonic() - at, 1)
            results[name]["part"] = part
            if "WRONG" in str(results[name].get("failed")) and not arguments.keep_going:
                stopped = f"{name} was wrong: --keep-going"
            show(name, results[name])
            write(arguments, on_gpu, results)
    return results


def cufile_refusal(results: dict[str, Any]) -> str:
    """Why steps that need cuFile are pointless, or ""."""
    if "cufile" not in results["facts"]:
        return "it is not known whether cuFile can be used: see the facts"
    cufile = results["facts"]["cufile"]
    return "" if cufile["usable"] else cufile["reason"]


def write(arguments: argparse.Namespace, on_gpu: bool, results: dict[str, Any]) -> None:
    """What is known so far."""
    if arguments.table:
        replace(arguments.table, table(results))
    if arguments.summary:
        replace(arguments.summary, summary({**earlier(arguments), **results}))
    if arguments.json:
        told = verdicts(results)
        whole = {"gpu": on_gpu, "size": arguments.size, "results": results, "verdicts": told}
        replace(arguments.json, json.dumps(whole, indent=2) + "\n")


def earlier(arguments: argparse.Namespace) -> dict[str, Any]:
    """The results of parts that ran before, but for what was not reached."""
    found: dict[str, Any] = {}
    for path in arguments.earlier:
        if path.exists():
            told = json.loads(path.read_text())["results"]
            found |= {name: each for name, each in told.items() if "skipped" not in each}
    return found


def summary(results: dict[str, Any]) -> str:
    """One page: the machine, what of "no GPU has run this" may go, what failed, the verdicts."""
    facts = results.get("facts", {})
    lines = ["# What a GPU has shown", ""]
    names = ("gpu", "driver", "kernel", "torch", "python", "file_system")
    lines += [f"- {name}: {facts[name]}" for name in names if name in facts]
    lines += ["", '## "No GPU has run this"', ""]
    for name, claim in CLAIMS.items():
        lines.append(f"- {name} ({', '.join(claim.pages)}): **{state_of(claim, results)}**")
    bad = {name: result["failed"] for name, result in results.items() if "failed" in result}
    lines += ["", "## Failed", "", *(f"- {name}: {why}" for name, why in bad.items())]
    left = [name for name, result in results.items() if "skipped" in result]
    lines += ["", f"Skipped: {', '.join(left) or 'nothing'}.", "", "## Verdicts", ""]
    lines += [f"- {name}: {value}" for name, value in verdicts(results).items()]
    return "\n".join(lines) + "\n"


def state_of(claim: Claim, results: dict[str, Any]) -> str:
    """Whether the sentence may go or stays; if it has gone, whether this run says the same."""
    shown = [name for name in claim.steps if is_shown(results.get(name, {}), claim.by_dma)]
    left = ", ".join(name for name in claim.steps if name not in shown)
    if claim.shown:
        return f"shown on {claim.shown}; {f'not here: {left}' if left else 'right here too'}"
    return f"stays: {left}" if left else "may go" if shown else "stays: not in these steps"


def is_shown(result: dict[str, Any], by_dma: bool = False) -> bool:
    """Whether a step has run to its end; one that was wrong has not."""
    if by_dma and result.get("mode") not in ("gds", "p2p"):
        return False
    return "checked" in result or "read" in result


def replace(path: Path, text: str) -> None:
    """At once: whoever ends the run finds one whole file."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)


def verdicts(results: dict[str, Any]) -> dict[str, Any]:
    """What must hold: the ring against its parts, gds against the best raw loop, the loop's lag."""

    def read(name: str) -> float:
        return float(results.get(name, {}).get("read", {}).get("gb_per_s", 0.0))

    told: dict[str, Any] = {}
    parts = min(read("aio to page-locked CPU"), read("host to device alone"))
    if parts and read("aio ring"):
        told["aio ring / min(drive, host to device), >= 0.95"] = round(read("aio ring") / parts, 3)
    raw = max((read(name) for name in results if name.startswith("raw cuFile")), default=0.0)
    gds = max((read(name) for name in results if name.startswith("gds,")), default=0.0)
    if raw and gds:
        told["gds / best raw cuFile loop, >= 0.9"] = round(gds / raw, 3)
    if read("rows of 4096 bytes, aio") and read("aio ring"):
        told["gather of 4096 bytes / aio ring"] = round(
            read("rows of 4096 bytes, aio") / read("aio ring"), 3
        )
    train = "train, gradients in memory"
    ways = [results.get(name, {}).get("passes_s", 0.0) for name in (train, "train, gds")]
    if all(ways) and results["train, gds"]["straight_to_the_device"]:
        told["passes through host memory / by gds, >= 1"] = round(ways[0] / ways[1], 3)
    lags = [result.get("loop_lag_p99_ms") for result in results.values()]
    known = [lag for lag in lags if lag is not None]
    if known:
        told["loop lag p99 in ms, <= 2"] = max(known)
    return told


def show(name: str, result: dict[str, Any]) -> None:
    for state in ("failed", "skipped"):
        if state in result:
            print(f"  {name:36} {state}: {result[state]}", flush=True)
            return
    parts = []
    for op in ("read", "write"):
        if op in result:
            figures = result[op]
            parts.append(
                f"{op} {figures['gb_per_s']:6.2f} GB/s ({figures['cpu_s_per_gb']} CPU s/GB)"
            )
    if "host_mib" in result:
        parts.append(f"{result['host_mib']} MiB of host memory")
    if "mode" in result:
        parts.append(f"mode {result['mode']}")
    if result.get("loop_lag_p99_ms") is not None:
        parts.append(f"lag p99 {result['loop_lag_p99_ms']} ms")
    if not parts or "checked" in result:
        parts = [json.dumps(result)]
    print(f"  {name:36} {', '.join(parts)}", flush=True)


def table(results: dict[str, Any]) -> str:
    """As docs/gds.md has it."""
    lines = ["| step | result |", "|---|---|"]
    for name, result in results.items():
        told = {key: value for key, value in result.items() if key not in ("cufile", "errors")}
        if "read" in told and isinstance(told["read"], dict):
            told["read"] = f"{told['read']['gb_per_s']} GB/s"
        if "write" in told and isinstance(told["write"], dict):
            told["write"] = f"{told['write']['gb_per_s']} GB/s"
        lines.append(f"| {name} | {', '.join(f'{k} {v}' for k, v in told.items())} |")
    return "\n".join(lines) + "\n"


def explain(parts: dict[str, dict[str, Plan]]) -> None:
    """Say what each step would do."""
    for part, plans in parts.items():
        print(f"{part}: {PARTS[part].title}, {PARTS[part].minutes:g} minutes")
        for name, plan in plans.items():
            work = plan.work.func if isinstance(plan.work, functools.partial) else plan.work
            needs = " (needs cuFile)" if plan.needs_cufile else ""
            variables = "".join(f" {key}={value}" for key, value in plan.environment.items())
            first = (inspect.getdoc(work) or "").split("\n")[0]
            print(f"  {name:38} {plan.limit_s:3.0f} s{needs}{variables}: {first}")


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="on the drive to measure")
    parser.add_argument("--size", type=int, default=4 << 30, help="bytes of the file (4 GiB)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--table", type=Path, help="and here as a table")
    parser.add_argument("--summary", type=Path, help="and here what they mean, on one page")
    parser.add_argument(
        "--with",
        dest="earlier",
        type=Path,
        nargs="*",
        default=[],
        metavar="JSON",
        help="of parts that ran before; the summary is of them too",
    )
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help=f"for all of it ({MINUTES:g})"
    )
    parser.add_argument("--parts", default="ABCD", help="some of A, B, C and D")
    parser.add_argument("--only", nargs="+", help="steps whose names have one of these in them")
    parser.add_argument("--keep-going", action="store_true", help="after a wrong byte, too")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with 64 MiB")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if not arguments.parts or set(arguments.parts) - set(PARTS):
        raise SystemExit(f"--parts: some of {', '.join(PARTS)}")
    on_gpu = torch.cuda.is_available() and not arguments.dry_run
    if arguments.dry_run:
        arguments.size = 64 * common.MIB
    if arguments.step:
        step = Step(arguments.dir, arguments.size, "cuda" if on_gpu else "cpu")
        print(json.dumps(steps(on_gpu)[arguments.step].work(step)))
        return
    if arguments.size < 64 * common.MIB or arguments.size % 4096:
        raise SystemExit("--size: a multiple of 4096, and 64 MiB or more")
    if not on_gpu and not arguments.dry_run:
        print(
            "No GPU here. With one, these would run (--dry-run: what needs none, on little data):"
        )
        explain(chosen(arguments, True))
        return
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="nvmeio-gpu-check-", dir=arguments.dir) as made:
        make_file(Step(Path(made), arguments.size, "cpu"))
        results = run_all(arguments, on_gpu, Path(made), began)
    for name, value in verdicts(results).items():
        print(f"{name}: {value}")
    if arguments.summary:
        print(arguments.summary.read_text())
    optional = {name for name, plan in steps(on_gpu).items() if plan.is_optional}
    if any("failed" in result for name, result in results.items() if name not in optional):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
