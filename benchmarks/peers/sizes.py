"""Eight tensors of a given size together, saved and loaded by nvmeio, torch or safetensors."""

from __future__ import annotations

import gc
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _files import drop_from_cache
from _measure import Sample, timed

import nvmeio
from peers._model_state import touch
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


def _torch_save(state: dict[str, torch.Tensor], path: str) -> None:
    torch.save(state, path)
    _fsync(path)


def _safetensors_save(state: dict[str, torch.Tensor], path: str) -> None:
    from safetensors.torch import save_file

    save_file(state, path)
    _fsync(path)


def _safetensors_load(path: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


_CALLS: dict[str, tuple[Callable[..., None], Callable[[str], Any]]] = {
    "nvmeio": (nvmeio.save, nvmeio.load),
    "torch": (_torch_save, torch.load),
    "nvmeio.safetensors": (nvmeio.save_safetensors, nvmeio.load_safetensors),
    "safetensors": (_safetensors_save, _safetensors_load),
}


class Sizes:
    """The process that saves and loads; what is imported at a first call is imported before."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/first.pt"
            for save, load in _CALLS.values():
                save(self._state(1 << 10), path)
                load(path)

    def save(self, how: str, path: str, nbytes: int, count: int) -> Sample:
        """So many saves over the same file, each durable."""
        state = self._state(nbytes)
        with timed(nbytes * count, count) as sample:
            for _ in range(count):
                _CALLS[how][0](state, path)
        return sample

    def load(self, how: str, path: str, nbytes: int, count: int) -> Sample:
        """So many loads, each with the file out of the page cache."""
        whole = Sample(nbytes=nbytes * count, operations=count)
        for _ in range(count):
            gc.collect()  # what maps the file keeps its pages
            drop_from_cache(Path(path))
            with timed() as sample:
                touch(_CALLS[how][1](path))  # safetensors maps the file and reads nothing itself
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
