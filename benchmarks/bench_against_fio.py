"""Whether `nvmeio bench` tells the truth: its figures beside fio's own, for the same work.

    python benchmarks/bench_against_fio.py --dir /mnt/nvme
    python benchmarks/bench_against_fio.py --rounds 9 --size 4G

Rounds of `nvmeio bench --compare libaio,fio` and of fio on its own command line take turns, so that
both see the same machine. Agreement is the median over the rounds of what bench says of fio
relative to what fio says of itself, and of what bench says of nvmeio; the first has to lie within
5 %. Exit status 1 if it does not. As root the run reserves huge pages for fio's buffers and gives
them back: nvmeio's own always lie on some.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from _files import huge_pages, remove, write_file

from nvmeio.cli.measure import parse_size, peers
from nvmeio.cli.measure.disk import scratch
from nvmeio.files import probe_direct

BLOCK = 1 << 20
DEPTH = 32
LOOPS = 3
TOLERANCE = 0.05
OPS = ("read", "write")


def main() -> int:
    options = _parse()
    if shutil.which("fio") is None:
        sys.exit("fio is not installed: apt-get install fio")
    if not probe_direct(options.dir).supported:
        sys.exit(f"{options.dir} does not take O_DIRECT; name a directory on a drive: --dir")
    # fio counts its buffers a little more generously than the blocks in flight.
    with (
        scratch([options.dir], "truth") as made,
        huge_pages((DEPTH + 8) * BLOCK) as missing,
    ):
        rounds = _measure(made[options.dir], options.size, options.rounds, not missing)
    print(f"{options.size >> 20} MiB, {BLOCK >> 20} MiB blocks, depth {DEPTH}, direct, no fsync;")
    print(f"GB = 10^9 bytes; medians of {options.rounds} rounds of {LOOPS} loops")
    print(f"buffers of fio on {'4 KiB pages: ' + missing if missing else 'huge pages'}\n")
    print(
        f"{'':7}{'fio itself':>12}{'bench: fio':>12}{'bench: libaio':>15}{'fio':>12}{'libaio':>9}"
    )
    faithful = True
    for op in OPS:
        told = {who: [r[op][who] for r in rounds] for who in ("itself", "fio", "libaio")}
        ratios = {
            who: statistics.median(r[op][who] / r[op]["itself"] for r in rounds)
            for who in ("fio", "libaio")
        }
        faithful &= abs(ratios["fio"] - 1) <= TOLERANCE
        middle = {who: statistics.median(rates) for who, rates in told.items()}
        print(
            f"{op:7}{middle['itself']:12.2f}{middle['fio']:12.2f}{middle['libaio']:15.2f}"
            f"{ratios['fio']:11.3f}x{ratios['libaio']:8.3f}x"
        )
    verdict = "within" if faithful else "NOT within"
    print(f"\nwhat bench says of fio is {verdict} {TOLERANCE:.0%} of what fio says of itself")
    if options.json:
        options.json.write_text(json.dumps(rounds, indent=1) + "\n")
    return 0 if faithful else 1


def _measure(
    directory: Path, size: int, rounds: int, huge: bool
) -> list[dict[str, dict[str, float]]]:
    path = directory / "fio.bin"
    found = []
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
        figures: dict[str, dict[str, float]] = {op: {} for op in OPS}
        # Each is first as often as last.
        for who in ("bench", "fio") if number % 2 else ("fio", "bench"):
            if who == "fio":
                write_file(path, size)  # a file of its own for each round, as bench makes one
                os.sync()
                for op in OPS:
                    # bench warms up once too.
                    loops = [_fio(path, size, op, huge) for _ in range(1 + LOOPS)]
                    figures[op]["itself"] = statistics.median(loops[1:])
                remove(path)
            else:
                for entry in _bench(directory, size)["results"]:
                    figures[entry["op"]][entry["engine"]] = entry["end_to_end"]["gb_per_s"]
        found.append(figures)
    return found


def _bench(directory: Path, size: int) -> dict[str, Any]:
    command = [
        sys.executable,
        "-c",
        "from nvmeio.cli import main; main()",
        "bench",
        str(directory),
        "--compare=libaio,fio",
        f"--io-size={size}",
        f"--block-size={BLOCK}",
        f"--queue-depth={DEPTH}",
        f"--loops={LOOPS}",
        "--no-reference",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def _fio(path: Path, size: int, op: str, huge: bool) -> float:
    found = peers.fio_figures(
        peers.run_fio(
            [path],
            [
                f"--rw={op}",
                f"--size={size}",
                f"--bs={BLOCK}",
                f"--iodepth={DEPTH}",
                "--ioengine=libaio",
                "--scramble_buffers=0",
                "--overwrite=1",
                *(["--mem=mmaphuge"] if huge else []),
            ],
        )
    )
    return found.nbytes / found.seconds / 1e9


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="where the files go")
    parser.add_argument("--size", type=parse_size, default=1 << 30, help="of the file (1G)")
    parser.add_argument("--rounds", type=int, default=5, help="(5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
