"""Whether `nvmeio tune` finds what a full grid finds, in a fraction of the time.

    python benchmarks/tune_against_grid.py --dir /mnt/nvme
    python benchmarks/tune_against_grid.py --budget 30s --passes 3

First `nvmeio tune` with its budget. Then every setting of the same grid with full transfers, in
passes of shuffled order, judged by medians. The best of so many noisy figures owes much to luck,
so the grid's best five, tune's choice and the default then run against each other in rounds of
full transfers, and the medians of those are what is compared: tune's choice has to reach 95 % of
the best one. Exit status 1 if it does not.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from nvmeio.cli.measure import parse_size
from nvmeio.cli.measure.disk import scratch
from nvmeio.cli.tune.result import TunePlan
from nvmeio.cli.tune.rig import Rig
from nvmeio.cli.tune.space import DEFAULT, in_words, settings
from nvmeio.engines.base import Options

OPS = ("read", "write")
BEST = 5
REACH = 0.95


def main() -> int:
    options = _parse()
    told = _tune(options.dir, options.budget, options.size)
    chosen = Options(**told["aio"])
    seconds, looked_at = told["search"]["seconds"], told["search"]["looked_at"]
    print(f"tune: {in_words(chosen)}")
    print(f"      {looked_at} of {told['search']['total']} settings in {seconds:.0f} s;", end=" ")
    print(told["verdict"])
    with scratch([options.dir], "grid") as made:
        plan = TunePlan([options.dir], ["read", "write"], {}, options.size, options.budget)
        rig = Rig([made[options.dir]], plan, told["search"]["engine"])
        rig.prepare()
        begun = time.monotonic()
        best = _grid(rig, settings(told["search"]["grid"]), options.size, options.passes)
        print(f"grid: {options.passes} passes in {time.monotonic() - begun:.0f} s")
        duel = list(dict.fromkeys([chosen, DEFAULT, *best[:BEST]]))
        rates = _rounds(rig, duel, options.size, options.rounds)
    merit = {setting: math.prod(statistics.median(r) for r in of) ** 0.5 for setting, of in rates}
    most = max(merit.values())
    print(f"\nmedians of {options.rounds} rounds, {options.size >> 20} MiB; GB = 10^9 bytes\n")
    print(f"{'':52}{'read':>8}{'write':>8}{'of the best':>13}")
    for setting, of in sorted(rates, key=lambda entry: -merit[entry[0]]):
        marks = "<- tune" if setting == chosen else ""
        marks += " (default)" if setting == DEFAULT else ""
        read, write = (statistics.median(r) for r in of)
        share = merit[setting] / most
        print(f"{in_words(setting):52}{read:8.2f}{write:8.2f}{share:12.1%}  {marks}")
    reached = merit[chosen] / most
    print(f"\ntune's choice reaches {reached:.1%} of the best of the full grid", end=" ")
    print(f"({'enough' if reached >= REACH else 'NOT enough'}: {REACH:.0%})")
    return 0 if reached >= REACH else 1


def _tune(directory: Path, budget: str, size: int) -> dict[str, Any]:
    script = "from nvmeio.cli import main; main()"
    flags = ["--budget", budget, "--io-size", str(size), "--json"]
    command = [sys.executable, "-c", script, "tune", str(directory), *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def _grid(rig: Rig, every: list[Options], size: int, passes: int) -> list[Options]:
    """All settings, best first, by the median over the passes of reads and writes together."""
    found: dict[Options, list[float]] = {setting: [] for setting in every}
    for number in range(passes):
        order = random.Random(number).sample(every, len(every))
        for position, setting in enumerate(order):
            if position % 40 == 0:
                where = f"pass {number + 1} of {passes}: {position} of {len(order)}"
                print(where, file=sys.stderr, flush=True)
            found[setting].append(math.prod(_rate(rig, setting, op, size) for op in OPS))
    return sorted(found, key=lambda setting: -statistics.median(found[setting]))


def _rounds(
    rig: Rig, duel: list[Options], size: int, rounds: int
) -> list[tuple[Options, list[list[float]]]]:
    found: dict[Options, list[list[float]]] = {setting: [[], []] for setting in duel}
    for number in range(rounds):
        for setting in random.Random(number).sample(duel, len(duel)):
            for index, op in enumerate(OPS):
                found[setting][index].append(_rate(rig, setting, op, size))
    return list(found.items())


def _rate(rig: Rig, setting: Options, op: Any, size: int) -> float:
    return size / rig.measure(setting, op, size) / 1e9


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="where the files go")
    parser.add_argument("--budget", default="60s", help="of tune (60s)")
    parser.add_argument("--size", type=parse_size, default=400 << 20, help="of a transfer (400M)")
    parser.add_argument("--passes", type=int, default=2, help="over the full grid (2)")
    parser.add_argument("--rounds", type=int, default=15, help="of the last comparison (15)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
