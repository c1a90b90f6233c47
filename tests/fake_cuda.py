"""A model of `torch.cuda`, for the few lines that no machine without a GPU runs.

It knows what is easily got wrong: which device each thread is on (0 at first), and that CUDA makes
a context on that device at the thread's first call, whatever the call is about. `contexts` is what
came of it. Modelled after torch 2.6 to 2.13 on CUDA 12: `device` puts a thread back without a
call, `stream` does so with cudaSetDevice.

`asynchronous()` makes its streams streams: each does what it was asked in order, in a thread of its
own, while the host goes on. `tensor` gives real tensors in memory that the CPU must not touch:
whoever does dies of it (SIGSEGV). Only what a stream does reaches it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from nvmeio._memory import devices, page_locked, system

_PATIENCE_S = 30.0
STREAMS = 32  # of a device: c10/cuda/CUDAStream.h


class Stream:
    """What it is asked, one after the other.

    Attributes:
        gate: While it is not set, an asynchronous one does nothing.
    """

    def __init__(self, cuda: FakeCuda, device: torch.device | int) -> None:
        self.device = torch.device("cuda", cuda.index_of(device))
        self.gate = threading.Event()
        self.gate.set()
        self._cuda = cuda
        self._asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def cuda_stream(self) -> int:
        self._cuda.handles[id(self)] = self
        return id(self)

    def ask(self, work: Callable[[], None]) -> None:
        """A kernel: the host does not wait for it."""
        if not self._cuda.is_asynchronous:
            work()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fake-stream", daemon=True)
            self._thread.start()
        self._asked.put(work)

    def _run(self) -> None:
        while (work := self._asked.get()) is not None:
            assert self.gate.wait(_PATIENCE_S)
            work()

    def stop(self) -> None:
        self.gate.set()
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join()
            self._thread = None

    def wait_stream(self, stream: Stream) -> None:
        self._cuda.call("wait_stream")
        self.wait_event(stream.record_event())

    def wait_event(self, event: Event) -> None:
        """What was recorded until now, whatever is recorded later."""
        self.ask(event.what_was_recorded())

    def record_event(self) -> Event:
        event = Event(self._cuda)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._cuda.call("stream.synchronize")
        self.record_event().wait_here()


class Event:
    def __init__(self, cuda: FakeCuda, blocking: bool = False) -> None:
        self._cuda = cuda
        self._reached = threading.Event()
        self.cuda_event = 0  # before it is recorded for the first time

    def record(self, stream: Stream, name: str = "record") -> None:
        self._cuda.call(name)
        self.cuda_event = id(self)
        self._cuda.handles[id(self)] = self
        self._reached = reached = threading.Event()
        stream.ask(reached.set)

    def query(self) -> bool:
        self._cuda.call("query")
        if self._cuda.failure is not None:
            raise self._cuda.failure
        return self._reached.is_set()

    def synchronize(self) -> None:
        self._cuda.call("synchronize")
        self.wait_here()
        if self._cuda.failure is not None:
            raise self._cuda.failure

    def wait_here(self) -> None:
        self.what_was_recorded()()

    def what_was_recorded(self) -> Callable[[], None]:
        """Waits for it."""
        reached = self._reached

        def wait() -> None:
            assert reached.wait(_PATIENCE_S)

        return wait


class Tensor:
    """Device memory, as far as copies look at it."""

    def __init__(self, cuda: FakeCuda, device: str) -> None:
        self.device = torch.device(device)
        self.is_cuda = self.device.type == "cuda"
        self._cuda = cuda

    def detach(self) -> Tensor:
        return self

    def __getitem__(self, part: slice) -> Tensor:
        return self

    def copy_(self, source: Tensor, non_blocking: bool = False) -> None:
        self._cuda.call("copy")
        self._cuda.copies.append(self._cuda.current_stream())


@dataclasses.dataclass
class Costs:
    """What was asked of CUDA's runtime.

    Attributes:
        page_locks: Calls of cudaHostRegister.
        allocations: Of the device's memory; what is given again is none.
        streams: That torch was asked for.
        host_waits: Of threads that compute, for work that was not done.
        waits_beside: Of others.
        copies: That were begun on streams.
    """

    page_locks: int = 0
    allocations: int = 0
    streams: int = 0
    host_waits: int = 0
    waits_beside: int = 0
    copies: int = 0


class PromptRuntime:
    """`system.PromptRuntime`, of the model: it knows addresses and handles alone."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def copy(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        self._cuda.call("cudaMemcpyAsync")
        if self._cuda.failure is not None:
            raise self._cuda.failure
        to, of = (self._cuda.bytes_at(address, nbytes) for address in (target, source))
        assert self._cuda.is_on_device(target) == (kind == system.TO_DEVICE)
        assert self._cuda.is_on_device(source) == (kind == system.TO_HOST)
        asked = self._cuda.handles[stream]
        self._cuda.copies.append(asked)
        asked.ask(lambda: to.copy_(of))

    def record(self, event: int, stream: int) -> None:
        self._cuda.handles[event].record(self._cuda.handles[stream], "cudaEventRecord")


class FakeCuda:
    """Stands in for the functions of `torch.cuda`.

    Attributes:
        contexts: Devices on which a context was made.
        calls: What was called, with the device that the thread was on.
        copies: The stream of each copy.
        streams: All that were made.
        before_copy: Called by the stream before each copy, with its number.
        is_held: Whether new streams wait for their gates.
        is_asynchronous: Whether streams work while the host goes on.
        is_capturing: A CUDA graph is captured in mode "global".
        broken_by: Calls that invalidated the capture.
        failure: What every look at an event raises, every wait for one, and every copy from now on.
    """

    def __init__(self) -> None:
        self.before_copy: Callable[[int], None] = lambda number: None
        self.is_held = self.is_asynchronous = False
        self.failure: Exception | None = None
        self.streams: list[Stream] = []
        self.handles: dict[int, Any] = {}
        self._memory: list[tuple[torch.Tensor, torch.Tensor, mmap.mmap]] = []
        self.contexts: set[int] = set()
        self.calls: list[tuple[str, int]] = []
        self.copies: list[Stream] = []
        self._thread = threading.local()
        self.is_capturing = False
        self.broken_by: list[str] = []
        self._pools: dict[int, list[Any]] = {}
        self._handed_out: dict[int, int] = {}
        self._default = {index: Stream(self, index) for index in range(4)}

    def tolerate_captures(self) -> None:
        self._thread.tolerates = True
        self.call("cudaThreadExchangeStreamCaptureMode")

    def index_of(self, device: torch.device | int | str | None) -> int:
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return self.current_device() if index is None else index

    def call(self, name: str) -> None:
        """Any call of the runtime's."""
        if self.is_capturing and not getattr(self._thread, "tolerates", False):
            self.broken_by.append(f"{name} in {threading.current_thread().name}")
        self.contexts.add(self.current_device())
        self.calls.append((name, self.current_device()))

    # --- memory

    def tensor(self, data: torch.Tensor) -> torch.Tensor:
        """A tensor on the device with these contents: the CPU must not touch it."""
        nbytes = -(-data.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = os.memfd_create("device")
        try:
            os.ftruncate(fd, nbytes)
            hidden, inside = mmap.mmap(fd, nbytes), mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
        seen = torch.frombuffer(hidden, dtype=data.dtype, count=data.numel())
        behind = torch.frombuffer(inside, dtype=torch.uint8)
        behind[: data.nbytes] = data.contiguous().flatten().view(torch.uint8)
        assert _libc.mprotect(ctypes.c_void_p(seen.data_ptr()), nbytes, 0) == 0, "mprotect"
        self._memory.append((seen, behind, hidden))
        return seen.view(data.shape)

    def has(self, tensor: object) -> bool:
        """Whether it lies in memory that `tensor` has made."""
        return isinstance(tensor, torch.Tensor) and self._behind(tensor) is not None

    def inside(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, for what a stream does."""
        found = self._behind(tensor)
        assert found is not None
        behind, at = found
        flat = behind[at:].view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset())

    def _behind(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int] | None:
        for seen, behind, _ in self._memory:
            at = tensor.data_ptr() - seen.data_ptr()
            if 0 <= at < behind.nbytes:
                return behind, at
        return None

    def is_on_device(self, address: int) -> bool:
        return any(0 <= address - s.data_ptr() < b.nbytes for s, b, _ in self._memory)

    def bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        """Of either memory, for what a stream does."""
        for seen, behind, _ in self._memory:
            at = address - seen.data_ptr()
            if 0 <= at < behind.nbytes:
                return behind[at : at + nbytes]
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)

    def kernel(
        self,
        tensor: torch.Tensor,
        change: Callable[[torch.Tensor], object],
        is_counted: bool = True,
    ) -> None:
        """Change a tensor by work of the current stream's; torch counts most of that."""
        if is_counted:
            torch.autograd.graph.increment_version(tensor)
        inside = self.inside(tensor)
        self.current_stream().ask(lambda: change(inside))

    def begin_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """`copy_` to or from the device, on the current stream."""
        self.call("copy")
        if self.failure is not None:
            raise self.failure
        stream, number = self.current_stream(), len(self.copies)
        self.copies.append(stream)

        def copy() -> None:
            self.before_copy(number)
            there, here = self._behind(source), self._behind(target)
            to = target if here is None else self.inside(target)
            to.copy_(source if there is None else self.inside(source))

        stream.ask(copy)

    def stop(self) -> None:
        """End the streams' threads, and let the CPU at the memory again."""
        for stream in [*self._default.values(), *self.streams]:
            stream.gate.set()
        for stream in [*self._default.values(), *self.streams]:
            stream.stop()
        for seen, behind, _ in self._memory:
            _libc.mprotect(ctypes.c_void_p(seen.data_ptr()), behind.nbytes, 3)
        self._memory.clear()
        self.before_copy = lambda number: None

    # --- torch.cuda's names

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return bool(self.contexts)

    def device_count(self) -> int:
        return 4

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

    def Stream(self, device: torch.device) -> Any:
        """One of a pool, in turn, as torch does it."""
        index = self.index_of(device)
        number = self._handed_out.get(index, 0)
        self._handed_out[index] = number + 1
        pool = self._pools.setdefault(index, [])
        if number < STREAMS:
            made = self.new_stream(index)
            if self.is_held:
                made.gate.clear()
            pool.append(made)
            self.streams.append(made)
        return pool[number % STREAMS]

    def new_stream(self, index: int) -> Any:
        return Stream(self, index)

    def Event(self, blocking: bool = False) -> Event:
        return Event(self, blocking)

    def synchronize(self, device: torch.device | int | None = None) -> None:
        self.call("synchronize")
        for stream in [*self._default.values(), *self.streams]:
            stream.synchronize()

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


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

NAMES = [
    "Event",
    "Stream",
    "cudart",
    "current_device",
    "current_stream",
    "device",
    "device_count",
    "is_available",
    "is_initialized",
    "mem_get_info",
    "set_device",
    "set_stream",
    "stream",
    "synchronize",
]


def synchronized(seconds: float, mark: Any) -> None:
    """In the place of a pause between two looks at a mark."""
    with torch.cuda.device(mark.device):
        mark.event.synchronize()


def begin_anew(patch: pytest.MonkeyPatch) -> None:
    """What nvmeio keeps of a device is this one's; a wait for it is no sleep."""
    patch.setattr(devices, "_side_streams", {})
    patch.setattr(devices, "_events", {})
    patch.setattr(devices, "pause_for", synchronized)
    # A torch that is built with CUDA has a runtime, which knows nothing of this device.
    patch.setattr(system, "prompt_runtime", lambda: None)


def fake_cuda(patch: pytest.MonkeyPatch) -> FakeCuda:
    """`torch.cuda` is the model from now on."""
    page_locked.forget()
    cuda = FakeCuda()
    begin_anew(patch)
    patch.setattr(system, "tolerate_captures", cuda.tolerate_captures)
    has_context = cuda.contexts.__contains__
    patch.setattr(torch._C, "_cuda_hasPrimaryContext", has_context, raising=False)
    for name in NAMES:
        made: Any = getattr(cuda, name)
        patch.setattr(torch.cuda, name, made)
    return cuda


@contextlib.contextmanager
def asynchronous(patch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """The model, with streams that work beside the host, and tensors in their memory."""
    cuda = fake_cuda(patch)
    cuda.is_asynchronous = True
    there = torch.device("cuda", 0)
    patch.setattr(devices, "is_device", cuda.has)
    patch.setattr(devices, "device_of", lambda t: there if cuda.has(t) else torch.device("cpu"))
    patch.setattr(devices, "begin_copy", cuda.begin_copy)
    try:
        yield cuda
    finally:
        cuda.stop()
