"""The window of units: nothing is bound of which a byte is missing."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterator
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

    def __init__(self, file: nvmeio.File, at_most: int = 2) -> None:
        self.file = file
        self.bound: list[int] = []
        self.free = at_most

    def take(self, unit: int) -> Slot[int] | None:
        if not self.free:
            return None
        self.free -= 1
        return Slot(unit, nvmeio.empty_aligned(64 << 10, dtype=torch.uint8))

    def take_anyway(self, unit: int) -> Slot[int]:
        raise AssertionError

    def fill(self, slot: Slot[int]) -> Fill:
        return Fill([WantedBytes(self.file, (64 << 10) * slot.unit, slot.host, 0)])

    def bind(self, slot: Slot[int]) -> None:
        self.bound.append(slot.unit)

    def give_back(self, slot: Slot[int]) -> None:
        self.free += 1


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


Later = list[Callable[[], None]]


@pytest.fixture
def three_units(tmp_path: Path) -> Iterator[tuple[Window[int, Slot[int]], Later]]:
    """A window of them, and what it has asked to be called later."""
    (tmp_path / "units").write_bytes(b"\x07" * (3 * (64 << 10)))
    later: Later = []
    with nvmeio.AioHandle() as handle, nvmeio.open(tmp_path / "units") as file:
        reader = Reader(handle)
        window = Window(reader, Units(file, at_most=2), Cyclic([0, 1, 2]), later=later.append)
        yield window, later
        reader.stop()


def arrive(window: Window[int, Slot[int]], unit: int) -> None:
    slot = window.slot(unit)
    assert slot is not None and slot.fill is not None
    assert slot.fill.done.wait(PATIENCE_S)


def test_a_unit_that_is_there_is_given_before_the_next_one_is_begun(
    three_units: tuple[Window[int, Slot[int]], Later],
) -> None:
    """Who computes waited for the submission of a read that nobody needed yet."""
    window, later = three_units
    first = window.hold([0])  # nothing to answer with, so the drive gets the next one at once
    assert (window.units_read, later) == (2, [])
    arrive(window, 1)
    window.let_go(first)
    window.need(1)
    assert window.units_read == 2
    (look_ahead,) = later
    look_ahead()
    assert window.units_read == 3


def test_nothing_is_begun_later_for_a_window_that_let_everything_go(
    three_units: tuple[Window[int, Slot[int]], Later],
) -> None:
    window, later = three_units
    window.let_go(window.hold([0]))
    arrive(window, 1)
    window.need(1)
    window.drop_all()
    (look_ahead,) = later
    look_ahead()
    assert (window.units_read, window.there) == (2, [])


def test_what_was_to_be_begun_later_is_no_surprise(
    three_units: tuple[Window[int, Slot[int]], Later],
) -> None:
    """A unit that was needed before it had been begun counted as one that nobody expected."""
    window, later = three_units
    first = window.hold([0])
    arrive(window, 1)
    window.let_go(first)
    window.let_go(window.hold([1]))
    assert later
    window.need(2)
    assert (window.units_read, window.mispredicted) == (4, 0)  # 0 comes after it
