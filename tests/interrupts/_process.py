"""The process in which one scenario is disturbed: `python -m interrupts._process NAME FOLDER`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
