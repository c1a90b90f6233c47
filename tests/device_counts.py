"""What docs/gds.md says that work on a device costs, counted on the stand-in.

    python tests/device_counts.py

Of the CPU's step of CUDA parameters, by their number, and of a chunk of the ring.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import pytest  # noqa: E402
import torch  # noqa: E402
from fake_accelerator import Accelerator, Costs, Pace, accelerator  # noqa: E402
from offload.test_module_on_device import WIDTH, model  # noqa: E402
from test_device_costs import cost, on_device  # noqa: E402

import nvmeio  # noqa: E402
from nvmeio.offload import SwappedOptimizer  # noqa: E402

CHUNKS = 64


def step(layers: int, cuda: Accelerator, folder: Path) -> tuple[int, Costs]:
    """How many parameters, and what one more step costs."""
    module = on_device(cuda, model(layers))
    module(cuda.tensor(torch.randn(3, WIDTH))).square().mean().backward()
    with SwappedOptimizer(
        torch.optim.AdamW, module.parameters(), swap_dir=folder, durable=False
    ) as optimizer:
        return len(list(module.parameters())), cost(cuda, optimizer.step)


def chunk(cuda: Accelerator, folder: Path) -> dict[str, float]:
    """CUDA's calls by name for each chunk that is read."""
    path = folder / "file"
    path.write_bytes(bytes(CHUNKS * 16384))
    target = cuda.tensor(torch.zeros(CHUNKS * 16384, dtype=torch.uint8))
    with nvmeio.AioHandle(ring_bytes=65536) as handle:
        handle.sync_pread(target, path)
        before = len(cuda.calls)
        handle.sync_pread(target, path)
        names = Counter(name for name, _ in cuda.calls[before:])
    return {name: round(number / CHUNKS, 1) for name, number in names.items() if number > 4}


def counted(pace: Pace, work: Callable[[Accelerator, Path], Any]) -> Any:
    with (
        tempfile.TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patch,
        accelerator(patch, pace, pace) as cuda,
    ):
        return work(cuda, Path(folder))


def main() -> None:
    for layers in (3, 12):
        # A lazy device has done nothing before it is waited for: each wait is one.
        number, costs = counted(Pace.LAZY, functools.partial(step, layers))
        print(f"a step of {number} parameters: {costs}")
    print("a chunk of the ring:", counted(Pace.EAGER, chunk))


if __name__ == "__main__":
    main()
