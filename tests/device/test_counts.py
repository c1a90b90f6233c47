"""What docs/gds.md says that work on a device costs is what is counted here (`counts`)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from device import counts

PAGE = Path(__file__).parents[2] / "docs" / "gds.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="nvmeio is installed without its docs/")


def told(row: str) -> list[float]:
    """The numbers in the last column of a row."""
    (line,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {row}")]
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", line.split("|")[-2])]


def test_turns_of_the_gil_for_a_chunk(tmp_path: Path) -> None:
    turns = counts.turns(tmp_path)
    assert sum(turns.values()) <= told("turns of the GIL in nvmeio's own calls")[0], turns


def test_calls_of_cuda_for_a_chunk(tmp_path: Path) -> None:
    calls = counts.cuda_calls(tmp_path)
    copies, records = told("copies; records of an event")
    assert calls.pop("copy") == copies and calls.pop("record") <= records
    assert set(calls) <= {"query", "a new event"}, calls


def test_what_a_step_of_the_cpu_costs() -> None:
    waits, copies = told("waits for the device"), told("copies, down and up")
    for number, (layers, parameters) in enumerate(((3, 12), (12, 48))):
        found, costs = counts.step(layers)
        assert found == parameters
        assert (costs.waits_beside, costs.copies) == (waits[number], copies[number])
        assert (costs.page_locks, costs.streams, costs.host_waits) == (0, 0, 0)
