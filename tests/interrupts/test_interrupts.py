"""After Ctrl-C, a raising hook or a cancelled task, the same call gives the same bits.

Or the object says plainly that it is closed or broken. Nothing hangs, and nothing is left behind.
Each system is disturbed many times in a process of its own (`_process`); `-k swapped` picks some
of them. NVMEIO_INTERRUPT_SEED chooses other moments, NVMEIO_INTERRUPT_TRIALS how many for each way.

`make test-slow` makes some 380 trials in all, `make stress` 13,000, `make interrupts` 5,000 each.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from interrupts._scenarios import SCENARIOS
from programs import Program

import nvmeio

pytestmark = pytest.mark.slow

TRIALS = 2  # of each way to disturb each of these
STRESS_TRIALS = 70
TRIAL_LIMIT_S = 240  # only for what hangs


Run = Callable[[list[str], float], tuple[int | None, str, str]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a scenario in a process of its own, forked from one that has everything imported."""
    root, tests = Path(nvmeio.__file__).parents[1], Path(__file__).parents[1]
    process = Program[str](
        [sys.executable, "-m", "interrupts._process"],
        env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{tests}", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    asks, hears = process.stdin, process.stdout

    def ask(arguments: list[str], limit_s: float) -> tuple[int | None, str, str]:
        asks.write(json.dumps({"arguments": arguments, "limit_s": limit_s}) + "\n")
        asks.flush()
        status = json.loads(hears.readline())["status"]
        folder = Path(arguments[1])
        return status, (folder / "output").read_text(), (folder / "errors").read_text()

    yield ask
    process.communicate(timeout=60)


def trials(
    run: Run, name: str, folder: Path, count: int, seed: int, limit_s: float
) -> list[dict[str, Any]]:
    """What the trials of one scenario showed, in every mode that it has."""
    count = int(os.environ.get("NVMEIO_INTERRUPT_TRIALS", count))
    seed = int(os.environ.get("NVMEIO_INTERRUPT_SEED", seed))
    options = ["--trials", count, "--seed", seed, "--limit", TRIAL_LIMIT_S]
    status, output, errors = run([name, str(folder), *map(str, options)], limit_s)
    if status is None:
        pytest.fail(f"seed {seed}: hangs for {limit_s} s\n{output}\n{errors[-8000:]}")
    lines = [line for line in output.splitlines() if line.startswith("{")]
    found = [json.loads(line) for line in lines]
    if "Timeout (" in errors:  # of the watchdog: what follows are the stacks
        stacks = errors[errors.index("Timeout (") :]
        pytest.fail(f"seed {seed}: a trial hung, after {_shown(found)}\n{stacks[:12000]}")
    if status:
        pytest.fail(f"seed {seed}: status {status}\n{output}\n{errors[-8000:]}")
    if found and "skip" in found[0]:
        pytest.skip(found[0]["skip"])
    return found


def _shown(reports: list[dict[str, Any]]) -> str:
    columns = ("mode", "trials", "interrupted", "right", "told", "swallowed", "wrong")
    return "\n".join(" ".join(f"{c}={report[c]}" for c in columns) for report in reports)


def check(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        print(_shown([report]), f"seed={report['seed']}")
        faults = "\n".join(report["faults"])
        assert not report["wrong"], f"{_shown([report])} seed={report['seed']}\n{faults}"
        assert not report["swallowed"], f"{_shown([report])}: a Ctrl-C that nobody was told of"
        assert not report["leaked"], f"{report['mode']}: {report['leaked']}\n{report['grew']}"
    assert sum(report["interrupted"] for report in reports), "nothing was disturbed"


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_same_call_again_is_right(name: str, run: Run, tmp_path: Path) -> None:
    check(trials(run, name, tmp_path, TRIALS, seed=1, limit_s=550))


@pytest.mark.stress
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_same_call_again_is_right_a_thousand_times(name: str, run: Run, tmp_path: Path) -> None:
    """NVMEIO_INTERRUPTS is how many times in all ways together."""
    seed = random.SystemRandom().randrange(1 << 32)
    of_work = int(os.environ.get("NVMEIO_INTERRUPTS", 0))
    each = -(-of_work // len(SCENARIOS[name].modes)) or STRESS_TRIALS
    check(trials(run, name, tmp_path, each, seed, limit_s=6 * 3600 - 100))
