"""The process that trains with its activations in memory, computed again, or on the drive."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from _measure import Sample, timed
from torch.utils.checkpoint import checkpoint

from nvmeio.offload import SwappedActivations

WIDTH = 768
LAYERS = 12
# What a block saves, in units of its input: normed, wide and its activation (4 each), and that.
SAVED_UNITS = 10


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.wide = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.back = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.back(torch.nn.functional.gelu(self.wide(self.norm(x))))
        return found


class Activations:
    """One model and one batch; gradients are compared, to the bit, before anything is timed."""

    def __init__(self) -> None:
        self._swapped: SwappedActivations | None = None

    def prepare(self, directory: str, nbytes: int) -> None:
        if self._swapped is not None:
            return
        ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: what is freed is given back
        torch.manual_seed(0)
        self._blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        tokens = max(64, nbytes // (LAYERS * SAVED_UNITS * 4 * WIDTH))
        self._batch = torch.randn(tokens, WIDTH)
        # As much as checkpointing keeps: the regions' inputs, and what one of them saves.
        window = (LAYERS + SAVED_UNITS) * self._batch.nbytes
        self._swapped = SwappedActivations(
            swap_dir=Path(directory) / "activations", resident_bytes=window
        )
        wanted = self._gradients(self._in_memory)
        for forward in (self._checkpointed, self._on_drive):
            for found, each in zip(self._gradients(forward), wanted, strict=True):
                if not torch.equal(found, each):
                    raise AssertionError("gradients differ")

    def sizes(self) -> dict[str, float]:
        """Of a step: bytes on the drive, and floating-point operations of forward."""
        assert self._swapped is not None
        before = self._swapped.bytes_written
        self._pass(self._on_drive)
        tokens = self._batch.shape[0]
        return {
            "written": float(self._swapped.bytes_written - before),
            "flops": 16.0 * LAYERS * tokens * WIDTH**2,
            "window": float(self._swapped.resident_bytes),
        }

    # Forward, in three ways

    def _in_memory(self) -> torch.Tensor:
        x = self._batch
        for block in self._blocks:
            x = block(x)
        return x.square().mean()

    def _checkpointed(self) -> torch.Tensor:
        x = self._batch
        for block in self._blocks:
            x = checkpoint(block, x, use_reentrant=False)  # type: ignore[no-untyped-call]
        return x.square().mean()

    def _on_drive(self) -> torch.Tensor:
        assert self._swapped is not None
        with self._swapped.saving():
            return self._in_memory()

    # Timed

    def in_memory(self) -> Sample:
        return self._sample(self._in_memory)

    def checkpointed(self) -> Sample:
        return self._sample(self._checkpointed)

    def on_drive(self) -> Sample:
        assert self._swapped is not None
        sample = self._sample(self._on_drive)
        # What is read ahead goes through memory that is there from the first step on.
        sample.extra["peak_mib"] += self._swapped.resident_bytes / 2 / (1 << 20)
        return sample

    def _sample(self, forward: Any) -> Sample:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew (man 5 proc)
        before = _status("VmRSS")
        with timed() as sample:
            self._pass(forward)
        sample.extra["peak_mib"] = (_status("VmHWM") - before) / (1 << 20)
        return sample

    def _pass(self, forward: Any) -> None:
        for parameter in self._blocks.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()  # its memory is there in all three
        forward().backward()

    def _gradients(self, forward: Any) -> list[torch.Tensor]:
        self._pass(forward)
        return [p.grad.clone() for p in self._blocks.parameters() if p.grad is not None]

    def release(self) -> None:
        if self._swapped is not None:
            self._swapped.close()
            self._swapped = None

    def close(self) -> None:
        self.release()


def resident_bytes() -> int:
    """The process's memory as the kernel counts it."""
    return _status("VmRSS")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))
