"""The calls that nvmeio's and DeepSpeed's handles share, made and timed the same way for both."""

from __future__ import annotations

import os
import random
import resource
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, ClassVar

import torch
from _files import BLOCK, incompressible
from _measure import Sample, timed

CHECKED_SPOTS = 64
PAGEMAP_ENTRY = 8  # bytes, proc(5)
FRAME_MASK = (1 << 55) - 1


class TensorPeer:
    """A handle, and the tensor that it moves.

    Files are named by path in every call, as DeepSpeed requires, so both open and close them
    within the timing.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        # DeepSpeed keeps one descriptor open per operation in flight.
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._handle: Any = None
        self._tensor: torch.Tensor | None = None
        self._locked = False
        self._parts: list[torch.Tensor] = []

    def make_handle(self, **options: Any) -> Any:
        raise NotImplementedError

    @property
    def handle(self) -> Any:
        if self._handle is None:
            self._handle = self.make_handle()
        return self._handle

    @property
    def tensor(self) -> torch.Tensor:
        if self._tensor is None:
            raise RuntimeError("prepare() comes first")
        return self._tensor

    def prepare(self, locked: bool, nbytes: int) -> None:
        """Own one tensor, page-locked by the peer or from `torch.empty`, every page touched."""
        self.release()
        if locked:
            self._tensor = self.handle.new_cpu_locked_tensor(
                nbytes, torch.empty(0, dtype=torch.uint8)
            )
        else:
            self._tensor = torch.empty(nbytes, dtype=torch.uint8)
        self._locked = locked
        fill(self.tensor)

    def release(self) -> None:
        self._parts = []
        if self._tensor is not None and self._locked:
            self.handle.free_cpu_locked_tensor(self._tensor)
        self._tensor = None

    def close(self) -> None:
        self.release()
        self._handle = None

    def contiguous_kib(self) -> float | None:
        """How long the runs of physically adjacent pages under the tensor are, on average.

        What a drive sees is these runs: 4 KiB pages of a machine with much free memory may lie
        in long ones and then cost little, which explains a peer's good day. Needs root
        (/proc/self/pagemap hides frame numbers from others): None without.
        """
        page = os.sysconf("SC_PAGE_SIZE")
        first, count = self.tensor.data_ptr() // page, self.tensor.nbytes // page
        with open("/proc/self/pagemap", "rb") as pagemap:
            pagemap.seek(first * PAGEMAP_ENTRY)
            entries = bytearray(pagemap.read(count * PAGEMAP_ENTRY))
        frames = torch.frombuffer(entries, dtype=torch.int64) & FRAME_MASK
        if not frames.any():
            return None
        runs = 1 + int((frames.diff() != 1).sum())
        return count * page / 1024 / runs

    # One transfer of the whole tensor

    def read(self, path: str) -> Sample:
        with timed(self.tensor.nbytes) as sample:
            result = self.handle.sync_pread(self.tensor, path, 0)
        return _done(result, sample)

    def write(self, path: str) -> Sample:
        with timed(self.tensor.nbytes) as sample:
            result = self.handle.sync_pwrite(self.tensor, path, 0)
        return _done(result, sample)

    def check(self, path: str) -> None:
        """Read into a cleared tensor and compare spots: fast and wrong does not count."""
        self.tensor.zero_()
        self.read(path)
        self._compare(self.tensor, path, 0)
        fill(self.tensor)

    # Many transfers, all started before the first is waited for

    def split(self, sizes: Sequence[int]) -> None:
        """Cut the tensor into tensors of these sizes."""
        ends = accumulate(sizes)
        self._parts = [self.tensor[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def read_many(self, paths: Sequence[str], offsets: Sequence[int]) -> Sample:
        start, wait = self.handle.async_pread, self.handle.wait
        with timed(self.tensor.nbytes, len(self._parts)) as sample:
            results = [
                start(part, path, offset)
                for part, path, offset in zip(self._parts, paths, offsets, strict=True)
            ]
            finished = wait()
        return self._all_done(results, finished, sample)

    def write_many(self, paths: Sequence[str], offsets: Sequence[int]) -> Sample:
        start, wait = self.handle.async_pwrite, self.handle.wait
        with timed(self.tensor.nbytes, len(self._parts)) as sample:
            results = [
                start(part, path, offset)
                for part, path, offset in zip(self._parts, paths, offsets, strict=True)
            ]
            finished = wait()
        return self._all_done(results, finished, sample)

    def check_many(self, paths: Sequence[str], offsets: Sequence[int]) -> None:
        self.tensor.zero_()
        self.read_many(paths, offsets)
        for part, path, offset in zip(self._parts, paths, offsets, strict=True):
            self._compare(part, path, offset, spots=2)
        fill(self.tensor)

    def _all_done(self, results: list[Any], finished: int, sample: Sample) -> Sample:
        if finished != len(self._parts):
            raise RuntimeError(f"{finished} of {len(self._parts)} operations finished")
        for result in results:
            _done(result, sample)
        return sample

    @staticmethod
    def _compare(tensor: torch.Tensor, path: str, base: int, spots: int = CHECKED_SPOTS) -> None:
        fd = os.open(path, os.O_RDONLY)
        try:
            last = max(0, tensor.nbytes - 4096)
            places = {0, last, *random.Random(base).sample(range(last + 1), min(spots, last + 1))}
            for place in places:
                here = tensor[place : place + 4096].numpy().tobytes()
                if here != os.pread(fd, len(here), base + place):
                    raise RuntimeError(f"wrong bytes at {base + place} of {path}")
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def fill(tensor: torch.Tensor) -> None:
    """Incompressible bytes, and the first touch of every page."""
    block = torch.frombuffer(bytearray(incompressible()), dtype=torch.uint8)
    for start in range(0, tensor.numel(), BLOCK):
        piece = tensor[start : start + BLOCK]
        piece.copy_(block[: piece.numel()])


def _done(result: Any, sample: Sample) -> Sample:
    # DeepSpeed reports failure as -1; nvmeio raises, and its operations are no numbers.
    if isinstance(result, int) and result < 0:
        raise RuntimeError(f"the handle returned {result}")
    return sample
