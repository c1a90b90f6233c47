"""Eight tensors of a given size together, saved and loaded by nvmeio or torch."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from _files import drop_from_cache
from _measure import Sample, timed

import nvmeio
from peers.checkpoints import _fsync

TENSORS = 8

_FIRST = """
import time
started = time.perf_counter()
import torch
imported = time.perf_counter()
state = {str(number): torch.zeros(%(elements)d) for number in range(%(tensors)d)}
begun = time.perf_counter()
%(call)s
print(time.perf_counter() - begun)
"""
_FIRST_CALLS = {
    "nvmeio.save": "import nvmeio\nnvmeio.save(state, path)",
    "torch.save": "import os\ntorch.save(state, path)\nos.fsync(os.open(path, os.O_RDONLY))",
    "nvmeio.load": "import nvmeio\nnvmeio.load(path)",
    "torch.load": "torch.load(path)",
}


class Sizes:
    """The process that saves and loads; what is imported at a first call is imported before."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/first.pt"
            for save, load in ((torch.save, torch.load), (nvmeio.save, nvmeio.load)):
                save(self._state(1 << 10), path)
                load(path)

    def save(self, how: str, path: str, nbytes: int, count: int) -> Sample:
        """So many saves over the same file, each durable."""
        state = self._state(nbytes)
        with timed(nbytes * count, count) as sample:
            for _ in range(count):
                if how == "nvmeio.save":
                    nvmeio.save(state, path)
                else:
                    torch.save(state, path)
                    _fsync(path)
        return sample

    def load(self, how: str, path: str, nbytes: int, count: int) -> Sample:
        """So many loads, each with the file out of the page cache."""
        whole = Sample(nbytes=nbytes * count, operations=count)
        load = nvmeio.load if how == "nvmeio.load" else torch.load
        for _ in range(count):
            drop_from_cache(Path(path))
            with timed() as sample:
                load(path)
            whole.seconds += sample.seconds
            whole.cpu_seconds += sample.cpu_seconds
        return whole

    def first(self, how: str, path: str, nbytes: int) -> Sample:
        """The first call of a process that has torch, and imports what else it needs."""
        program = _FIRST % {
            "elements": nbytes // TENSORS // 4,
            "tensors": TENSORS,
            "call": _FIRST_CALLS[how],
        }
        program = f"path = {path!r}\n{program}"
        run = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        )
        return Sample(seconds=float(run.stdout), nbytes=nbytes, operations=1)

    def release(self) -> None:
        """Nothing is kept between calls."""

    @staticmethod
    def _state(nbytes: int) -> dict[str, torch.Tensor]:
        elements = nbytes // TENSORS // 4
        return {str(number): torch.randn(elements) for number in range(TENSORS)}
