"""Checkpoints of N ranks with a rate-limited drive each, against one rank with one such drive.

    python benchmarks/rank_checkpoints.py --dir /mnt/nvme
    python benchmarks/rank_checkpoints.py --ranks 4 --rate 40 --size 400 --json

With `shared=False` each rank writes its part of the archive to its own drive, and reads it from
there; the rest comes through gloo. The turns alternate; what is told is the median of the seconds
from the call until all is durable, with recycled files, and of a restore. Needs root: see
`_loop_devices.py`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _ranks
from _loop_devices import MB, limited

SAVES = 3


def work(options: argparse.Namespace) -> None:
    """A rank: save, the last time over old blocks, and restore; tell how long each took."""
    import torch

    import nvmeio

    torch.set_num_threads(1)
    tensor = torch.arange(int(options.size * MB) // 40, dtype=torch.int32)
    state = {str(number): tensor + number for number in range(10)}
    with (
        _ranks.group(options) as group,
        nvmeio.Checkpointer(options.drive, 1, None, group, shared=False) as checkpointer,
    ):
        for step in range(SAVES):
            began = time.perf_counter()
            checkpointer.save_sync(state, step)
            checkpointer.wait_sync()
            saved = time.perf_counter() - began
        began = time.perf_counter()
        found = checkpointer.restore()
        restored = time.perf_counter() - began
    right = all(torch.equal(found[name], state[name]) for name in state)
    print(json.dumps({"saved": saved, "restored": restored, "right": right}))


def turn(
    drives: Sequence[Path], options: argparse.Namespace, rendezvous: Path | None
) -> dict[str, float]:
    """What the slowest of so many ranks told."""
    places = [place / f"of-{len(drives)}" for place in drives]
    for place in places:
        shutil.rmtree(place, ignore_errors=True)
    given = [("--drive", place, "--size", options.size) for place in places]
    told = _ranks.run_ranks(__file__, given, rendezvous)
    for place in places:
        shutil.rmtree(place)
    if not all(each["right"] for each in told):
        sys.exit("what was restored is not what was saved")
    return {what: max(each[what] for each in told) for what in ("saved", "restored")}


def main() -> None:
    options = _ranks.parser(__doc__, 240, "state", drive=Path).parse_args()
    if options.rank is not None:
        return work(options)
    found: dict[int, list[dict[str, float]]] = {1: [], options.ranks: []}
    with _ranks.drives(options, int(3.5 * options.size * MB)) as (directory, made):
        places = [place for place, _ in made]
        with limited([number for _, number in made], int(options.rate * MB)):
            for ranks, rendezvous in _ranks.turns(options, directory):
                found[ranks].append(turn(places[:ranks], options, rendezvous))
    rows: list[dict[str, Any]] = []
    for what in ("saved", "restored"):
        first = 0.0
        for ranks, runs in found.items():
            seconds = statistics.median(each[what] for each in runs)
            first = first or seconds
            rows.append(
                {
                    "what": what,
                    "ranks": ranks,
                    "seconds": round(seconds, 3),
                    "mb_per_s": round(options.size / seconds, 1),
                    "ratio": round(first / seconds, 2),
                }
            )
    if options.json:
        told = {"rate_mb_per_s": options.rate, "size_mb": options.size, "rows": rows}
        print(json.dumps(told, indent=2))
        return None
    print(f"{options.size:.0f} MB, drives of {options.rate:.0f} MB/s each")
    for row in rows:
        print("{what:>9}, {ranks} ranks: {seconds} s, {mb_per_s} MB/s, {ratio} x".format(**row))
    return None


if __name__ == "__main__":
    main()
