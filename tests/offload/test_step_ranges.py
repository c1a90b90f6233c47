"""Steps and waits of swapped training in a profile."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import profile

from nvmeio.offload import SwappedModule, SwappedOptimizer


def test_steps_and_waits_for_weights_are_ranges(tmp_path: Path) -> None:
    layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    module = SwappedModule(
        torch.nn.Sequential(*layers), resident_bytes=128 << 10, swap_dir=tmp_path / "weights"
    )
    with (
        module,
        SwappedOptimizer(
            torch.optim.Adam, module.parameters(), swap_dir=tmp_path / "state", durable=False
        ) as optimizer,
    ):
        with profile() as found:
            module(torch.randn(2, 64)).sum().backward()
            optimizer.step()
        names = [event.name for event in found.events()]
    assert names.count("nvmeio::step") == 1
    assert {f"nvmeio::wait {n}" for n in range(4)} <= set(names)
