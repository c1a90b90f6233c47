"""What a swapped step costs in Python, in calls: they do not depend on the machine's speed."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import nvmeio
from nvmeio.offload import SwappedOptimizer

_OURS = str(Path(nvmeio.__file__).parent)


def _calls_of_a_step(tmp_path: Path, tensors: int, subgroup_bytes: int) -> int:
    """How many functions of nvmeio a step calls, in all threads, once all state is there."""
    calls: Counter[str] = Counter()
    counting = False

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if counting and event == "call" and frame.f_code.co_filename.startswith(_OURS):
            calls[frame.f_code.co_name] += 1

    parameters = [torch.nn.Parameter(torch.ones(2048)) for _ in range(tensors)]
    threading.setprofile(note)  # of the threads that begin now: the optimizer's own
    try:
        optimizer = SwappedOptimizer(
            torch.optim.AdamW,
            parameters,
            swap_dir=tmp_path,
            subgroup_bytes=subgroup_bytes,
            pipeline_read=False,  # the first reads of the next step would be counted, or not
            lr=0.1,
        )
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    with optimizer:
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        before = sys.getprofile()
        sys.setprofile(note)
        counting = True
        try:
            optimizer.step()
        finally:
            counting = False
            sys.setprofile(before)
    return calls.total()


def test_a_step_of_more_tensors_costs_in_proportion(tmp_path: Path) -> None:
    """Each tensor was once looked at for each tensor: 400 calls more for each of 200."""
    few = _calls_of_a_step(tmp_path / "few", 40, 64 << 20)
    many = _calls_of_a_step(tmp_path / "many", 320, 64 << 20)
    assert many < 8 * few, "not in proportion to the tensors"


def test_a_step_of_more_subgroups_costs_in_proportion(tmp_path: Path) -> None:
    """At each subgroup all those before it were once looked at."""
    record = 4 * 3 * 2048
    few = _calls_of_a_step(tmp_path / "few", 40, 4 * record)
    many = _calls_of_a_step(tmp_path / "many", 320, 4 * record)
    assert many < 8 * few, "not in proportion to the subgroups"
