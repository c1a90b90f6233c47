"""The window of units: nothing is bound of which a byte is missing."""

from __future__ import annotations

import concurrent.futures
from pathlib import Path

import pytest
import torch
from support import PATIENCE_S, HeldEngine

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


def test_a_read_that_somebody_cancelled_is_not_taken_for_the_bytes(tmp_path: Path) -> None:
    """Whose handle it is may close it meanwhile."""
    (tmp_path / "units").write_bytes(b"\x07" * (128 << 10))
    engine = HeldEngine()
    with (
        nvmeio.AioHandle(engine=engine, block_size=4096, queue_depth=1) as handle,
        nvmeio.open(tmp_path / "units") as file,
        concurrent.futures.ThreadPoolExecutor(1) as other,
    ):
        reader, keeper = Reader(handle), Units(file)
        window = Window(reader, keeper, Cyclic([0, 1]))
        needing = other.submit(window.need, 0)
        engine.wait_until_begun()
        reader._flying[0][0].cancel()
        engine.gate.set()
        with pytest.raises(nvmeio.ClosedError, match="a read was cancelled"):
            needing.result(PATIENCE_S)
        assert keeper.bound == []
        assert window.slot(0) is None
        window.need(0)
        assert keeper.bound == [0]
        reader.stop()
