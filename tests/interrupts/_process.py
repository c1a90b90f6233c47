"""Processes in which a scenario is disturbed: `python -m interrupts._process NAME FOLDER` is one.

Without arguments it imports everything once and then, for each line of JSON that it reads, a list
of such arguments, forks a process that they are for, and prints how that ended. What it told is in
its folder, in `output` and `errors`.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import torch
from interrupts._scenarios import SCENARIOS
from interrupts._trials import MODES, Report, Skip, Trials


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("scenario", choices=list(SCENARIOS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--modes", nargs="*", choices=MODES, help="by default all it has")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that a trial may take")
    chosen = parser.parse_args(arguments)
    warnings.simplefilter("ignore")  # of other libraries; ours are errors in the other tests
    torch.set_num_threads(1)
    make = SCENARIOS[chosen.scenario]
    for mode in chosen.modes or make.modes:
        if mode in ("timer", "twice") and make.awaits and sys.version_info < (3, 11):
            continue  # asyncio.run leaves the signal to the loop's own code, which it breaks
        report = Report(chosen.scenario, mode, chosen.seed)
        folder = chosen.folder / mode
        folder.mkdir()
        try:
            Trials(make, folder, report, chosen.limit).run(chosen.trials, chosen.seed)
        except Skip as reason:
            print(json.dumps({"skip": str(reason)}))
            return 0
        print(json.dumps(dataclasses.asdict(report)), flush=True)
    return 0


def serve() -> list[str]:
    """Forks for each order; returns in the processes, with their arguments."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it goes to all of a terminal's processes
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for number, name in ((1, "output"), (2, "errors")):
                path = os.path.join(order["arguments"][1], name)
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
                os.dup2(descriptor, number)
                os.close(descriptor)
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.close(null)
            return list(order["arguments"])
        print(json.dumps({"status": ended(pid, order["limit_s"])}), flush=True)
    sys.exit(0)


def ended(pid: int, limit_s: float) -> int | None:
    """The status that a process ended with; None where it hung, and was killed."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or serve()))
