"""A model of `torch.cuda`, for the few lines that no machine without a GPU runs.

It knows what is easily got wrong: which device each thread is on (0 at first), and that CUDA makes
a context on that device at the thread's first call, whatever the call is about. `contexts` is what
came of it. Modelled after torch 2.6 to 2.13 on CUDA 12: `device` puts a thread back without a
call, `stream` does so with cudaSetDevice.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch


class Stream:
    def __init__(self, cuda: FakeCuda, device: torch.device | int) -> None:
        self.device = torch.device("cuda", cuda.index_of(device))
        self._cuda = cuda

    def wait_stream(self, stream: Stream) -> None:
        self._cuda.call("wait_stream")

    def record_event(self) -> Event:
        event = Event(self._cuda)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._cuda.call("stream.synchronize")


class Event:
    def __init__(self, cuda: FakeCuda, blocking: bool = False) -> None:
        self._cuda = cuda

    def record(self, stream: Stream) -> None:
        self._cuda.call("record")

    def query(self) -> bool:
        self._cuda.call("query")
        return True

    def synchronize(self) -> None:
        self._cuda.call("synchronize")


class Tensor:
    """Device memory, as far as copies look at it."""

    def __init__(self, cuda: FakeCuda, device: str) -> None:
        self.device = torch.device(device)
        self.is_cuda = self.device.type == "cuda"
        self._cuda = cuda

    def copy_(self, source: Tensor, non_blocking: bool = False) -> None:
        self._cuda.call("copy")
        self._cuda.copies.append(self._cuda.current_stream())


class FakeCuda:
    """Stands in for the functions of `torch.cuda`.

    Attributes:
        contexts: Devices on which a context was made.
        calls: What was called, with the device that the thread was on.
        copies: The stream of each copy.
    """

    def __init__(self) -> None:
        self.contexts: set[int] = set()
        self.calls: list[tuple[str, int]] = []
        self.copies: list[Stream] = []
        self._thread = threading.local()
        self._default = {index: Stream(self, index) for index in range(4)}

    def index_of(self, device: torch.device | int | str | None) -> int:
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return self.current_device() if index is None else index

    def call(self, name: str) -> None:
        """Any call of the runtime's."""
        self.contexts.add(self.current_device())
        self.calls.append((name, self.current_device()))

    # --- torch.cuda's names

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return bool(self.contexts)

    def current_device(self) -> int:
        return getattr(self._thread, "device", 0)

    def set_device(self, device: torch.device | int) -> None:
        self._thread.device = self.index_of(device)
        self.contexts.add(self._thread.device)

    @contextlib.contextmanager
    def device(self, device: torch.device | int) -> Iterator[None]:
        before, self._thread.device = self.current_device(), self.index_of(device)
        try:
            yield
        finally:
            self._thread.device = before

    def current_stream(self, device: torch.device | int | None = None) -> Stream:
        streams = getattr(self._thread, "streams", {})
        index = self.index_of(device)
        return streams.get(index, self._default[index])

    def set_stream(self, stream: Stream) -> None:
        if self.current_device() != stream.device.index:
            self.set_device(stream.device)
        self._thread.streams = {
            **getattr(self._thread, "streams", {}),
            stream.device.index: stream,
        }

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, there = self.current_stream(), self.current_stream(stream.device)
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(there)
            self.set_stream(before)

    def Stream(self, device: torch.device) -> Stream:
        return Stream(self, device)

    def Event(self, blocking: bool = False) -> Event:
        return Event(self, blocking)

    def mem_get_info(self, device: torch.device | int | None = None) -> tuple[int, int]:
        with self.device(self.index_of(device)):
            self.call("mem_get_info")
        return 0, 0

    def cudart(self) -> FakeCuda:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.call("cudaHostRegister")
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.call("cudaHostUnregister")
        return 0


NAMES = [
    "Event",
    "Stream",
    "cudart",
    "current_device",
    "current_stream",
    "device",
    "is_available",
    "is_initialized",
    "mem_get_info",
    "set_device",
    "set_stream",
    "stream",
]


def fake_cuda(patch: pytest.MonkeyPatch) -> FakeCuda:
    """`torch.cuda` is the model from now on."""
    cuda = FakeCuda()
    for name in NAMES:
        made: Any = getattr(cuda, name)
        patch.setattr(torch.cuda, name, made)
    return cuda
