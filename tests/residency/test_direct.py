"""Reads straight into a device's memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import fake_cuda
from fake_device import Mark
from support import PATIENCE_S

import nvmeio
from nvmeio._residency.on_device import OrderedReads
from nvmeio._residency.reader import Fill, Reader, WantedBytes
from nvmeio.files import File

DATA = bytes(range(256)) * 64


def test_reads_come_after_no_stream_of_others_and_make_no_context_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = fake_cuda(monkeypatch)
    there = torch.device("cuda", 1)
    streams = []

    class Handle:
        def async_pread(self, *_: Any) -> Any:
            streams.append(cuda.current_stream(there))

    nothing: Any = None
    reads = OrderedReads(Handle(), there)
    for _ in range(2):
        reads.async_pread(nothing, nothing)
    assert streams == [cuda.streams[0]] * 2
    assert 0 not in cuda.contexts


@pytest.fixture
def data(tmp_path: Path) -> Iterator[File]:
    (tmp_path / "data").write_bytes(DATA)
    with nvmeio.open(tmp_path / "data", "r") as file:
        yield file


@pytest.fixture
def reader() -> Iterator[Reader]:
    with nvmeio.AioHandle() as handle:
        made = Reader(handle)
        yield made
        made.stop()


class Noted(Mark):
    """Tells when the reader begins to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_for = threading.Event()

    def wait(self) -> None:
        self.waited_for.set()
        super().wait()


def fill_of(file: File, after: Mark | None) -> tuple[Fill, torch.Tensor]:
    memory = torch.zeros(len(DATA), dtype=torch.uint8)
    return Fill([WantedBytes(file, 0, memory, 0)], after=after), memory


def test_memory_that_is_still_used_is_waited_for_by_the_thread_alone(
    reader: Reader, data: File
) -> None:
    mark = Noted()
    fill, memory = fill_of(data, mark)
    reader.submit(fill)
    assert mark.waited_for.wait(PATIENCE_S)
    assert not fill.done.is_set()
    assert not memory.any()
    mark.reached.set()
    assert fill.done.wait(PATIENCE_S)
    assert fill.whole
    assert memory.numpy().tobytes() == DATA


def test_a_fill_that_waits_for_memory_is_cancelled_at_once(reader: Reader, data: File) -> None:
    mark = Noted()
    fill, memory = fill_of(data, mark)
    reader.submit(fill)
    assert mark.waited_for.wait(PATIENCE_S)
    reader.cancel(fill)
    mark.reached.set()
    later, there = fill_of(data, None)
    reader.submit(later)
    reader.wait(later)
    assert there.numpy().tobytes() == DATA
    assert not memory.any()


def test_a_device_that_fails_fails_the_fill_that_waits_for_it(reader: Reader, data: File) -> None:
    mark = Mark(RuntimeError("CUDA error"))
    mark.reached.set()
    fill, memory = fill_of(data, mark)
    reader.submit(fill)
    assert fill.done.wait(PATIENCE_S)
    assert fill.error is mark.failure
    assert not memory.any()
    later, there = fill_of(data, None)
    reader.submit(later)
    reader.wait(later)
    assert there.numpy().tobytes() == DATA
