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
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _loop_devices import MB, drive, limited, need_root

TURN_TIMEOUT_S = 900
SAVES = 3


def work(options: argparse.Namespace) -> None:
    """A rank: save, the last time over old blocks, and restore; tell how long each took."""
    import torch
    import torch.distributed as dist

    import nvmeio

    torch.set_num_threads(1)
    group = None
    if options.rendezvous:
        store = dist.FileStore(options.rendezvous, options.ranks)
        dist.init_process_group("gloo", store=store, rank=options.rank, world_size=options.ranks)
        group = dist.group.WORLD
    tensor = torch.arange(int(options.size * MB) // 40, dtype=torch.int32)
    state = {str(number): tensor + number for number in range(10)}
    with nvmeio.Checkpointer(options.drive, 1, None, group, shared=False) as checkpointer:
        for step in range(SAVES):
            began = time.perf_counter()
            checkpointer.save_sync(state, step)
            checkpointer.wait_sync()
            saved = time.perf_counter() - began
        began = time.perf_counter()
        found = checkpointer.restore()
        restored = time.perf_counter() - began
    right = all(torch.equal(found[name], state[name]) for name in state)
    if group is not None:
        dist.destroy_process_group()
    print(json.dumps({"saved": saved, "restored": restored, "right": right}))


def turn(drives: Sequence[Path], options: argparse.Namespace, rendezvous: Path | None) -> Any:
    """What each of so many ranks told."""
    ranks = []
    for rank, place in enumerate(drives):
        directory = place / f"of-{len(drives)}"
        shutil.rmtree(directory, ignore_errors=True)
        command = [sys.executable, __file__, "--rank", str(rank), "--ranks", str(len(drives))]
        command += ["--drive", str(directory), "--size", str(options.size)]
        command += ["--rendezvous", str(rendezvous)] if rendezvous else []
        ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    try:
        told = [rank.communicate(timeout=TURN_TIMEOUT_S)[0] for rank in ranks]
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    if any(rank.returncode for rank in ranks):
        sys.exit("a rank failed; its error is above")
    for place in drives:
        shutil.rmtree(place / f"of-{len(drives)}")
    return [json.loads(text) for text in told]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dir", type=Path, default=Path("."), help="where the images lie")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", type=float, default=60, help="MB/s of each drive (60)")
    parser.add_argument("--size", type=float, default=240, help="MB of the state (240)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    for name, kind in (("rank", int), ("drive", Path), ("rendezvous", str)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        return work(options)
    need_root()
    with contextlib.ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="nvmeio-ranks-", dir=options.dir))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        room = int(3.5 * options.size * MB) + (256 << 20)
        made = [stack.enter_context(drive(directory, n, room)) for n in range(options.ranks)]
        found: dict[int, list[dict[str, float]]] = {1: [], options.ranks: []}
        with limited([number for _, number in made], int(options.rate * MB)):
            for repeat in range(options.repeats):
                for ranks in sorted(found, reverse=bool(repeat % 2)):
                    rendezvous = directory / f"rendezvous-{repeat}" if ranks > 1 else None
                    told = turn([place for place, _ in made[:ranks]], options, rendezvous)
                    if not all(each["right"] for each in told):
                        sys.exit("what was restored is not what was saved")
                    slowest = {
                        what: max(each[what] for each in told) for what in ("saved", "restored")
                    }
                    found[ranks].append(slowest)
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
        return
    print(f"{options.size:.0f} MB, drives of {options.rate:.0f} MB/s each")
    for row in rows:
        print("{what:>9}, {ranks} ranks: {seconds} s, {mb_per_s} MB/s, {ratio} x".format(**row))


if __name__ == "__main__":
    main()
