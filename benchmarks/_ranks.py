"""Ranks with a rate-limited drive each, as processes of one script, against a single one."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from _loop_devices import drive, need_root

TURN_TIMEOUT_S = 900


def parser(about: str, size: float, of: str, **hidden: Any) -> argparse.ArgumentParser:
    """The options of such a script; those that only its ranks are given are not shown."""
    made = argparse.ArgumentParser(description=about.split("\n")[0])
    made.add_argument("--dir", type=Path, default=Path("."), help="where the images lie")
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--rate", type=float, default=60, help="MB/s of each drive (60)")
    made.add_argument("--size", type=float, default=size, help=f"MB of the {of} ({size:.0f})")
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--json", action="store_true")
    for name, kind in {"rank": int, "rendezvous": str, **hidden}.items():
        made.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    return made


@contextlib.contextmanager
def group(options: argparse.Namespace) -> Iterator[Any]:
    """The group of a rank's process; None for a single one."""
    if not options.rendezvous:
        yield None
        return
    import torch.distributed as dist

    store = dist.FileStore(options.rendezvous, options.ranks)
    dist.init_process_group("gloo", store=store, rank=options.rank, world_size=options.ranks)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def drives(options: argparse.Namespace, room: int) -> Iterator[tuple[Path, list[tuple[Path, str]]]]:
    """A directory, and in it a drive for each rank, not limited yet."""
    need_root()
    with contextlib.ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="nvmeio-ranks-", dir=options.dir))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        room += 256 << 20
        yield (
            directory,
            [stack.enter_context(drive(directory, n, room)) for n in range(options.ranks)],
        )


def turns(options: argparse.Namespace, directory: Path) -> Iterator[tuple[int, Path | None]]:
    """One rank and all of them, in turn and in either order; with the file by which they meet."""
    for repeat in range(options.repeats):
        for ranks in sorted({1, options.ranks}, reverse=bool(repeat % 2)):
            yield ranks, directory / f"rendezvous-{repeat}" if ranks > 1 else None


def run_ranks(
    script: str, given: Sequence[Iterable[object]], rendezvous: Path | None
) -> list[dict[str, Any]]:
    """What each rank printed, as JSON; `given` has the arguments of each."""
    ranks = []
    for rank, arguments in enumerate(given):
        command = [sys.executable, script, "--rank", str(rank), "--ranks", str(len(given))]
        command += map(str, arguments)
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
    return [json.loads(text) for text in told]
