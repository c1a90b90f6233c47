"""Starts the ranks of the tests: see `_rank_program`."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from faults._support import environment
from programs import Program

KILLED = -signal.SIGKILL


@contextlib.contextmanager
def running_ranks(script: str) -> Iterator[Callable[..., None]]:
    """Yields what runs a function of a script beside this file on so many ranks."""
    process = Program[str](
        [sys.executable, str(Path(__file__).parent / script)],
        env=environment(OMP_NUM_THREADS="1"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    numbers = itertools.count()

    def run(
        world: int,
        work: str,
        folder: Path,
        layout: str = "one",
        *,
        store: str = "tcp",
        limit_s: float = 400,
        victim: int = -1,
        **arguments: Any,
    ) -> None:
        if victim >= 0:
            arguments["victim"] = victim
        order = {
            "world": world,
            "work": work,
            "folder": str(folder),
            "layout": layout,
            "store": store,
            "limit_s": limit_s,
            "number": next(numbers),
            "arguments": arguments,
        }
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        ended = json.loads(process.stdout.readline())
        codes = [KILLED if rank == victim else 0 for rank in range(world)]
        said = (f"rank {rank}: {log}" for rank, log in enumerate(ended["logs"]))
        assert ended["codes"] == codes, "\n".join([f"exit codes {ended['codes']}", *said])

    yield run
    process.terminate()
    process.communicate(timeout=60)
