"""One step of a swapped optimizer as a time line: when it reads, computes, sums and writes.

    python benchmarks/step_timeline.py --dir /mnt/nvme
    python benchmarks/step_timeline.py --dir /mnt/nvme --size 768M --subgroup 64M --no-checksum

AdamW in fp32, stepped some times; the step with the median time is drawn. Each line is one kind of
work, each column the same part of the step. A letter names the turn that works there for most of
the column, "." is nobody. The last two lines are the requests of the drive in flight, from the
kernel's `/sys/dev/block/*/inflight`, read every 0.5 ms by a process of its own: 0 to 9 for tenths
of the most that was seen.
"""

from __future__ import annotations

import argparse
import os
import statistics
import string
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _machine import machine

import nvmeio.offload._swap_files.pipeline as pipeline
from nvmeio.cli.measure import parse_size
from nvmeio.cli.measure.disk import scratch
from nvmeio.offload import SwappedOptimizer

WIDTH = 2048
LETTERS = string.ascii_letters + string.digits
KINDS = ("read", "verify", "compute", "seal", "write")
SAMPLER = """
import sys, time
with open(sys.argv[1]) as file:
    while True:
        file.seek(0)
        reads, writes = file.read().split()
        print(time.perf_counter(), reads, writes)
        time.sleep(0.0005)
"""


class Span(NamedTuple):
    """A part of a turn's work, in seconds of `perf_counter`."""

    kind: str
    turn: int
    start: float
    end: float


class Step(NamedTuple):
    start: float
    end: float
    cpu_s: float
    spans: Sequence[Span]


class Recorder:
    """Notes when each part of each turn begins and ends, by wrapping what the pipeline calls."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._here = threading.local()
        self._turns: dict[int, int] = {}
        self._started, self._run = pipeline.started, pipeline.Pipeline.run
        pipeline.started = self._transfers
        recorder = self

        def run(made: Any, turns: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            wrapped = [recorder._wrapped(number, turn) for number, turn in enumerate(turns)]
            return recorder._run(made, wrapped, *args, **kwargs)

        pipeline.Pipeline.run = run  # type: ignore[method-assign]

    def _wrapped(self, number: int, turn: Any) -> Any:
        def timed(kind: str, work: Callable[..., Any] | None) -> Any:
            if work is None:
                return None

            def call(slot: torch.Tensor) -> Any:
                start = time.perf_counter()
                done = work(slot)
                self.spans.append(Span(kind, number, start, time.perf_counter()))
                if kind == "compute":
                    self._turns[id(done)] = number
                    self._here.turn = number
                return done

            return call

        reads = list(turn.reads)
        self._turns[id(reads)] = number
        return turn._replace(
            reads=reads,
            compute=timed("compute", turn.compute),
            verify=timed("verify", turn.verify),
            seal=timed("seal", turn.seal),
        )

    def _transfers(self, handles: Any, slot: Any, moves: Any, writing: bool) -> Any:
        number = getattr(self._here, "turn", 0) if writing else self._turns.get(id(moves), 0)
        kind, start = "write" if writing else "read", time.perf_counter()
        operations = self._started(handles, slot, moves, writing)
        for operation in operations:
            operation.add_done_callback(
                lambda _: self.spans.append(Span(kind, number, start, time.perf_counter()))
            )
        return operations


def drawn(step: Step, inflight: Sequence[tuple[float, int, int]], columns: int) -> str:
    """The step as text."""
    each = (step.end - step.start) / columns
    lines = []
    for kind in KINDS:
        mine = [span for span in step.spans if span.kind == kind]
        if not mine:
            continue
        rows: list[list[str]] = []
        for span in sorted(mine, key=lambda span: span.start):  # those beside it get a row more
            letter = LETTERS[span.turn % len(LETTERS)]
            first = int((span.start - step.start) / each + 0.5)
            last = min(columns, int((span.end - step.start) / each + 0.5))
            cells = range(min(first, columns - 1), max(last, first + 1))
            row = next((r for r in rows if all(r[c] == "." for c in cells if c < columns)), None)
            if row is None:
                row = ["."] * columns
                rows.append(row)
            for cell in cells:
                if cell < columns:
                    row[cell] = letter
        busy = sum(span.end - span.start for span in mine)
        for number, row in enumerate(rows):
            label = f"{kind} {busy * 1e3:4.0f} ms" if not number else ""
            lines.append(f"{label:>16} {''.join(row)}")
    for place, name in ((1, "reads"), (2, "writes")):
        seen = [(at[0], at[place]) for at in inflight if step.start <= at[0] <= step.end]
        most = max((count for _, count in seen), default=0)
        cells_of: list[list[int]] = [[] for _ in range(columns)]
        for at, count in seen:
            cells_of[min(columns - 1, int((at - step.start) / each))].append(count)
        row = [
            " " if not c else str(min(9, round(statistics.mean(c) / max(1, most) * 9)))
            for c in cells_of
        ]
        lines.append(f"{f'{name} 9={most}':>16} {''.join(row)}")
        idle = sum(count == 0 for _, count in seen) / max(1, len(seen))
        lines[-1] += f"  none for {idle:.0%}"
    during = [reads + writes for at, reads, writes in inflight if step.start <= at <= step.end]
    idle = sum(count == 0 for count in during) / max(1, len(during))
    lines.append(f"{'':>16} the drive has nothing to do for {idle:.0%} of the step")
    return "\n".join(lines)


def main() -> int:
    options = _parse(sys.argv[1:])
    torch.set_num_threads(options.threads)
    parameters = options.size // 12
    weights = []
    for _ in range(max(1, parameters // WIDTH**2)):
        weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=options.dtype))
        weight.grad = torch.full_like(weight, 1e-3)
        weights.append(weight)
    half = options.dtype != torch.float32
    recorder = Recorder()
    steps: list[Step] = []
    device = os.stat(options.dir).st_dev
    counters = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/inflight"
    with (
        scratch([options.dir], "step-timeline") as made,
        SwappedOptimizer(
            torch.optim.AdamW,
            weights,
            swap_dir=str(made[options.dir]),
            subgroup_bytes=options.subgroup,
            checksum=options.checksum,
            fused=True,
            master_dtype=torch.float32 if half else None,
        ) as optimizer,
        subprocess.Popen(
            [sys.executable, "-c", SAMPLER, counters], stdout=subprocess.PIPE, text=True
        ) as sampler,
    ):
        try:
            text: list[str] = []
            reader = threading.Thread(target=lambda: text.extend(sampler.stdout or ()))
            reader.start()
            for _ in range(options.steps + 2):
                optimizer._swapper.store.settle()  # type: ignore[union-attr]
                recorder.spans.clear()
                cpu, start = time.process_time(), time.perf_counter()
                optimizer.step()
                end, cpu = time.perf_counter(), time.process_time() - cpu
                time.sleep(0.05)  # the last callbacks
                steps.append(Step(start, end, cpu, tuple(recorder.spans)))
        finally:
            sampler.kill()
            reader.join()
        moved = optimizer.last_step
    ordered = sorted(steps[2:], key=lambda step: step.end - step.start)
    step = ordered[len(ordered) // 2]
    samples = [line.split() for line in text if line.count(" ") == 2 and line.endswith("\n")]
    inflight = [(float(at), int(reads), int(writes)) for at, reads, writes in samples]
    print(", ".join(f"{key} {value}" for key, value in machine(options.dir).items()))
    taken = [each.end - each.start for each in ordered]
    print(
        f"{moved.read_bytes / 1e9:.2f} GB read and {moved.written_bytes / 1e9:.2f} written in "
        f"{step.end - step.start:.3f} s ({taken[0]:.3f} to {taken[-1]:.3f}), {step.cpu_s:.3f} s of "
        f"CPU; a column is {(step.end - step.start) / options.columns * 1e3:.1f} ms"
    )
    print(drawn(step, inflight, options.columns))
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="where the files go")
    parser.add_argument("--size", type=parse_size, default=768 << 20, help="12 bytes each, 768M")
    parser.add_argument("--subgroup", type=parse_size, default=64 << 20, help="64M")
    parser.add_argument("--steps", type=int, default=7, help="of which one is drawn, 7")
    parser.add_argument("--threads", type=int, default=1, help="torch's, 1")
    parser.add_argument("--columns", type=int, default=100, help="100")
    parser.add_argument("--no-checksum", dest="checksum", action="store_false")
    parser.add_argument(
        "--bf16", dest="dtype", action="store_const", const=torch.bfloat16, default=torch.float32
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
