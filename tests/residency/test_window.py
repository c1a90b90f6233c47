"""The window of units: nothing is bound of which a byte is missing."""

from __future__ import annotations

import concurrent.futures
from pathlib import Path
from typing import Any

import pytest
import torch
from support import PATIENCE_S, HeldEngine, spin_until

import nvmeio
from nvmeio._residency.order import Cyclic
from nvmeio._residency.reader import Fill, Reader, WantedBytes
from nvmeio._residency.window import Keeper, Slot, Window


class Units(Keeper[int, Slot[int]]):
    """Of 64 KiB each, in one file."""

    def __init__(self, file: nvmeio.File) -> None:
        self.file = file
        self.bound: list[int] = []

    def take(self, unit: int) -> Slot[int]:
        memory = nvmeio.empty_aligned(64 << 10, dtype=torch.uint8)
        return Slot(unit, memory, memory)

    take_anyway = take

    def fill(self, slot: Slot[int]) -> Fill:
        return Fill([WantedBytes(self.file, (64 << 10) * slot.unit, slot.host, 0)])

    def bind(self, slot: Slot[int]) -> None:
        self.bound.append(slot.unit)

    def give_back(self, slot: Slot[int]) -> None:
        pass


def test_what_was_read_ahead_without_memory_is_read_anew_when_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass failed by an earlier one's want of memory."""
    (tmp_path / "units").write_bytes(bytes(64 << 10) + b"\x07" * (64 << 10))
    with (
        nvmeio.AioHandle(block_size=4096, queue_depth=1) as handle,
        nvmeio.open(tmp_path / "units") as file,
    ):
        reader, keeper = Reader(handle), Units(file)
        window = Window(reader, keeper, Cyclic([0, 1]))
        pread = handle.async_pread
        refused: list[int] = []

        def refuse_the_second(memory: torch.Tensor, file: nvmeio.File, at: int = 0) -> Any:
            if at and not refused:
                refused.append(at)
                raise MemoryError
            return pread(memory, file, at)

        monkeypatch.setattr(handle, "async_pread", refuse_the_second)
        try:
            window.need(0)
            ahead = window.slot(1)
            assert refused and ahead is not None and ahead.fill is not None
            assert isinstance(ahead.fill.error, MemoryError)
            slot = window.need(1)
            assert bool((slot.host == 7).all())
            assert keeper.bound == [0, 1]
        finally:
            reader.stop()


def test_a_read_that_somebody_cancelled_is_not_taken_for_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose handle it is may close it meanwhile."""
    (tmp_path / "units").write_bytes(b"\x07" * (128 << 10))
    engine = HeldEngine()
    with (
        nvmeio.AioHandle(engine=engine, block_size=4096, queue_depth=1) as handle,
        nvmeio.open(tmp_path / "units") as file,
        concurrent.futures.ThreadPoolExecutor(1) as other,
    ):
        pread, begun = handle.async_pread, []

        def noted(*given: Any) -> nvmeio.Operation:
            begun.append(pread(*given))
            return begun[-1]

        monkeypatch.setattr(handle, "async_pread", noted)
        reader, keeper = Reader(handle), Units(file)
        window = Window(reader, keeper, Cyclic([0, 1]))
        needing = other.submit(window.need, 0)
        engine.wait_until_begun()
        spin_until(lambda: bool(begun))
        begun[0].cancel()
        engine.gate.set()
        with pytest.raises(nvmeio.ClosedError, match="a read was cancelled"):
            needing.result(PATIENCE_S)
        assert keeper.bound == []
        assert window.slot(0) is None
        window.need(0)
        assert keeper.bound == [0]
        reader.stop()
