"""kill -9 between each two steps of the protocol: a complete step is never lost nor half there."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from _kill_points import BEFORE, digest
from _offload_models import model, train
from programs import run_program

import nvmeio

pytestmark = pytest.mark.slow


def in_memory(kind: str, steps: int) -> str:
    made = model()
    train(made, getattr(torch.optim, kind)(made.parameters(), lr=1e-2), steps)
    return digest(made)


@pytest.mark.parametrize(
    ("drives", "stride", "kind"),
    [
        *((1, 2, "AdamW"), (2, 3, "AdamW")),
        *(
            pytest.param(drives, 1, kind, marks=pytest.mark.stress)
            for drives, kind in ((1, "AdamW"), (2, "AdamW"), (3, "Adamax"), (3, "RAdam"))
        ),
    ],
)
def test_killed_at_every_point(drives: int, stride: int, kind: str, tmp_path: Path) -> None:
    """Of one drive at every second one, and of two at every third; at all of them in stress."""
    here = Path(__file__).parent
    root = str(Path(nvmeio.__file__).parent.parent)
    done = run_program(
        [
            *(sys.executable, str(here / "_kill_points.py"), str(tmp_path)),
            *(str(drives), str(stride), kind),
        ],
        timeout=550,
        env={**os.environ, "PYTHONPATH": f"{root}:{here.parent}", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    told: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    weights = [in_memory(kind, steps) for steps in range(BEFORE + 4)]
    for number, each in enumerate(told):
        steps = each["generation"] - 1
        complete = {0} if each["from_the_start"] else {BEFORE, BEFORE + 1}
        if each["stepped"]:
            complete = {BEFORE + 1}  # step() had returned
        assert steps in complete, (number, each)
        assert each["resumed"] or each["from_the_start"], (number, each)
        assert each["weights"] == weights[steps], (number, each)
        assert each["after"] == weights[steps + 2], (number, each)
    print(f"{len(told)} kills of {kind} on {drives} drives")
    step, start = (each["events"] for each in told if "events" in each)
    # Data, of the one file that was written; manifest and mark: each made durable before the next.
    assert step[0] == "ftruncate"
    assert step.count("pwrite") >= 6
    data = ["fdatasync"] * drives
    before, *last = step[-4 - len(data) :]
    assert before != "fdatasync"
    assert last == [*data, "fdatasync", "pwrite", "fdatasync"]
    # Of each directory that is made, and of the names in it and above; and of the records of what
    # belongs together.
    assert start.count("fsync") == 3 * drives + (drives if drives > 1 else 0)
    assert {each["generation"] for each in told} == {1, BEFORE + 1, BEFORE + 2}
