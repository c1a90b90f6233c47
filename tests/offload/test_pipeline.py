"""The pipeline of a step whose helping threads have ended, and what a failed run leaves behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import thread

from nvmeio._io.drives import DriveHandles, FileSpan
from nvmeio._threads.owner import OwnerThread
from nvmeio.errors import ClosedError, TransferError
from nvmeio.files import File
from nvmeio.handle import AioHandle
from nvmeio.offload._swap_files import pipeline as pipeline_module
from nvmeio.offload._swap_files.pipeline import DeviceTurns, Pipeline, SlotTurn

NBYTES = 4096


@pytest.fixture
def handles() -> Iterator[DriveHandles]:
    with AioHandle() as handle:
        yield DriveHandles(handle, [])


@pytest.fixture
def helper() -> Iterator[OwnerThread]:
    owner = OwnerThread("helper")
    yield owner
    owner.close()


def ended(owner: OwnerThread) -> None:
    owner.close()
    owner.drain()


def idle(slot: torch.Tensor) -> list[FileSpan]:
    return []


def test_a_run_whose_reading_thread_has_ended_says_so(
    handles: DriveHandles, helper: OwnerThread
) -> None:
    """It waited for ever for a slot that nobody filled."""
    pipeline = Pipeline(handles, read_ahead=True, write_behind=True, helper=helper)
    pipeline.make(NBYTES, 3)
    ended(helper)

    def run() -> None:
        with pytest.raises(ClosedError):
            pipeline.run([SlotTurn([], idle), SlotTurn([], idle)])

    with thread(run):
        pass
    pipeline.close()


def test_a_run_that_found_no_memory_to_begin_with_keeps_no_reader_waiting(
    handles: DriveHandles, helper: OwnerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reads that it had begun waited for ever for a slot, and so did the next step for them."""
    pipeline = Pipeline(handles, read_ahead=True, write_behind=True, helper=helper)
    pipeline.make(NBYTES, 3)
    turns = [SlotTurn([], idle) for _ in range(8)]
    begin, begun = helper.begin, iter(range(6))

    def refused(*work: Any) -> Any:
        if next(begun, None) is None:
            raise MemoryError
        return begin(*work)

    def run() -> None:
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(helper, "begin", refused)
            pipeline.run(turns)
        pipeline.run(turns)

    with thread(run):
        pass
    pipeline.close()


def test_results_that_no_thread_writes_are_not_taken_for_written(
    handles: DriveHandles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose writing thread had ended was taken for whole, and nothing had been written."""
    helpers: dict[str, OwnerThread] = {}

    def new(name: str) -> OwnerThread:
        return helpers.setdefault(name, OwnerThread(name))

    monkeypatch.setattr(pipeline_module, "new_helper", new)
    device = DeviceTurns(torch.device("cpu"))
    pipeline = Pipeline(handles, read_ahead=False, write_behind=True, device=device)
    pipeline.make(NBYTES, 3)
    device.make(NBYTES, 2)
    ended(helpers["nvmeio-offload-write"])
    sealed: list[bool] = []

    def run() -> None:
        with pytest.raises(ClosedError):
            turn = SlotTurn([], idle, seal=lambda slot: sealed.append(True))
            pipeline.run([turn], on_device=True)

    with thread(run):
        pass
    assert not sealed
    pipeline.close()


@pytest.mark.parametrize("fails", ["read", "look", "write"])
def test_a_failed_run_keeps_no_memory_alive(
    fails: str, handles: DriveHandles, helper: OwnerThread, tmp_path: Path
) -> None:
    """The failure of a read and its traceback held each other, and the slots with them."""
    (tmp_path / "empty").touch()
    pipeline = Pipeline(handles, read_ahead=True, write_behind=True, helper=helper)

    def look(slot: torch.Tensor) -> None:
        if fails == "look":
            raise ValueError("not what was written")

    with File(tmp_path / "empty") as file:
        move = FileSpan(file, 0, 0, NBYTES)
        first = SlotTurn(
            [move] if fails == "read" else [],
            lambda slot: [move] if fails == "write" else [],
            verify=look,
        )
        gc.collect()
        gc.disable()
        try:
            pipeline.make(NBYTES, 3)
            slots = [weakref.ref(slot.untyped_storage()) for slot in pipeline.slots]
            with pytest.raises(ValueError if fails == "look" else TransferError):
                pipeline.run([first, *[SlotTurn([], idle)] * 5])
            helper.drain()
            pipeline.close()
            assert [each() for each in slots] == [None] * 3
        finally:
            gc.enable()
