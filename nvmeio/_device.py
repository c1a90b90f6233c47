"""Devices: the one place that talks to `torch.cuda` about tensors on the way to and from files.

What engines need of a device is a `Copier` with a few small verbs, so that everything above it is
tested without a device: tests hand in a copier whose "device" is other host memory.

Order. A transfer must come after whatever the caller has asked of the device before it, on the
stream that was current at the call: `now` marks that point, and engines begin with the tensor's
memory once the mark is reached. They report a transfer when the device is done with it, so nobody
has to synchronise after an await.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

from nvmeio import _memory, buffers

logger = logging.getLogger("nvmeio")


class Mark(Protocol):
    """A point in a device's work."""

    def done(self) -> bool:
        """Whether it is reached; never blocks."""

    def wait(self) -> None:
        """Block, without the GIL, until it is."""


class Copier(Protocol):
    """A device's copies to and from host memory. Targets and sources are 1-D uint8 tensors."""

    def now(self, device: torch.device) -> Mark:
        """Everything that the calling thread's current stream was asked so far."""

    def page_locked(self, nbytes: int) -> torch.Tensor:
        """Host memory for the copies, a multiple of the page long; lives as long as its views."""

    def upload(self, target: torch.Tensor, chunk: torch.Tensor) -> Mark:
        """Begin to copy host memory to the device, behind the copies begun before."""

    def download(self, chunk: torch.Tensor, source: torch.Tensor) -> Mark:
        """Begin to copy from the device to host memory, behind the copies begun before."""

    def finish(self, device: torch.device, step: Callable[[], None]) -> None:
        """Run a step that works on the device, and wait for that work."""

    def enter(self, device: torch.device) -> None:
        """Make the device the calling thread's own; libraries look at its current context."""


class CudaCopier:
    """CUDA through torch: copies on one private stream a device.

    `torch.cuda` is touched at the first use, so one may be made where there is no CUDA.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._lock = threading.Lock()
        self._entered = threading.local()

    def now(self, device: torch.device) -> Mark:
        return _CudaMark(torch.cuda.current_stream(device))

    def page_locked(self, nbytes: int) -> torch.Tensor:
        try:
            return buffers.empty_pinned(nbytes, dtype=torch.uint8)
        except OSError as refused:
            # The limit is mlock's; CUDA page-locks by itself, and does not count against it.
            logger.info("page-locking through CUDA alone: %s", refused)
        mapping = _memory.Mapping(nbytes)
        mapping.populate()
        mapping.register_with_cuda()
        return mapping.tensor(0, (nbytes,), torch.uint8)

    def upload(self, target: torch.Tensor, chunk: torch.Tensor) -> Mark:
        return self._copy(target, chunk, target.device)

    def download(self, chunk: torch.Tensor, source: torch.Tensor) -> Mark:
        return self._copy(chunk, source, source.device)

    def finish(self, device: torch.device, step: Callable[[], None]) -> None:
        stream = self._stream(device)
        with torch.cuda.stream(stream):
            step()
            _CudaMark(stream).wait()

    def enter(self, device: torch.device) -> None:
        if getattr(self._entered, "device", None) == device:
            return
        torch.cuda.set_device(device)
        torch.cuda.mem_get_info(device)  # any call of the runtime's makes the context current
        self._entered.device = device

    def _copy(self, target: torch.Tensor, source: torch.Tensor, device: torch.device) -> Mark:
        stream = self._stream(device)
        # Grad mode is a thread's own: these are raw bytes, in a thread of nvmeio's.
        with torch.no_grad(), torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            return _CudaMark(stream)

    def _stream(self, device: torch.device) -> Any:
        with self._lock:
            if device not in self._streams:
                cuda: Any = torch.cuda
                self._streams[device] = cuda.Stream(device)
            return self._streams[device]


class _CudaMark:
    def __init__(self, stream: Any) -> None:
        cuda: Any = torch.cuda
        # "blocking": whoever waits sleeps instead of spinning (cudaEventBlockingSync).
        self._event = cuda.Event(blocking=True)
        self._event.record(stream)

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


def is_device(tensor: object) -> bool:
    """Whether it is a tensor in a device's memory that engines reach through a `Copier`."""
    return getattr(tensor, "is_cuda", False) is True


def new_copier() -> Copier:
    """The copier of this process's devices."""
    return CudaCopier()
