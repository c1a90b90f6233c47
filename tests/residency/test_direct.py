"""Reads straight into a device's memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_cuda import fake_cuda

from nvmeio._residency.direct import OrderedReads


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
