"""The process that parks a model with its optimizer, and moves as many bytes by a handle alone."""

from __future__ import annotations

from pathlib import Path

import torch
from _measure import Sample, timed

import nvmeio
from nvmeio.offload import Parked, park
from peers.activations import resident_bytes

WIDTH = 1024


class Parking:
    """Weights, gradients and AdamW's moments; compared, to the bit, before anything is timed."""

    def __init__(self) -> None:
        self._model: torch.nn.Module | None = None
        self._parked: Parked | None = None

    def prepare(self, directory: str, nbytes: int) -> None:
        if self._model is not None:
            return
        self._directory = Path(directory)
        torch.manual_seed(0)
        layers = max(2, nbytes // (16 * WIDTH**2))
        self._model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), fused=True)
        self._model(torch.ones(1, WIDTH)).sum().backward()
        self._optimizer.step()
        wanted = [each.detach().clone() for each in self._model.parameters()]
        # From the first time on pages are there twice: for what is read, and in the machine below.
        self.park()
        self.restore()
        for found, each in zip(self._model.parameters(), wanted, strict=True):
            if not torch.equal(found, each):
                raise AssertionError("weights differ")
        self._handle = nvmeio.AioHandle()
        self._memory = nvmeio.empty_aligned(64 << 20, dtype=torch.uint8).fill_(1)

    def park(self) -> Sample:
        """Needs `restore` before it is called again."""
        assert self._model is not None
        before = resident_bytes()
        with timed() as sample:
            parked = park(self._model, self._optimizer, swap_dir=self._directory / "parked")
        self._parked = parked
        sample.nbytes = parked.nbytes
        sample.extra["freed_mib"] = (before - resident_bytes()) / (1 << 20)
        return sample

    def restore(self) -> Sample:
        """Needs `park` before it is called."""
        assert self._parked is not None
        nbytes = self._parked.nbytes
        with timed() as sample:
            self._parked.restore()
        self._parked = None
        sample.nbytes = nbytes
        return sample

    def settle(self, parked: bool) -> None:
        """Have it parked, or not."""
        if parked and self._parked is None:
            self.park()
        elif not parked and self._parked is not None:
            self.restore()

    def parked_bytes(self) -> int:
        self.settle(True)
        assert self._parked is not None
        return self._parked.nbytes

    def write(self, nbytes: int) -> Sample:
        """As many bytes to a new file, by a handle alone, from memory on huge pages."""
        path = self._directory / "raw"
        path.unlink(missing_ok=True)
        with timed() as sample, nvmeio.open(path, "w") as file:
            operations = []
            for at in range(0, nbytes, self._memory.nbytes):
                part = self._memory[: min(self._memory.nbytes, nbytes - at)]
                operations.append(self._handle.async_pwrite(part, file, at))
            for each in operations:
                each.result()
            self._handle.sync_fsync(file, data_only=True)
        sample.nbytes = nbytes
        return sample

    def read(self, nbytes: int) -> Sample:
        """As many bytes from that file, by a handle alone, into new memory."""
        path = self._directory / "raw"
        if not path.exists():
            self.write(nbytes)
        with timed() as sample:
            self._handle.read(nvmeio.empty_aligned(nbytes, dtype=torch.uint8), path)
        sample.nbytes = nbytes
        return sample

    def release(self) -> None:
        if self._model is not None:
            self.settle(False)
            self._handle.close()
            (self._directory / "raw").unlink(missing_ok=True)
            self._model = None

    def close(self) -> None:
        self.release()
