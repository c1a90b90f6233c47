"""Devices: the one place that talks to `torch.cuda` about tensors on the way to and from files.

Engines need only a `Copier` of a device, with a few small verbs, so that everything above it is
tested without a device: tests hand in a copier whose "device" is other host memory.

Order. A transfer must come after whatever the caller has asked of the device before it, on the
stream that was current at the call: `now` marks that point, and engines begin with the tensor's
memory once the mark is reached. They report a transfer when the device is done with it, so nobody
has to synchronise after an await.

Streams. torch hands out 32 streams of a device in turn, so none is private: after 32 of his own a
user has ours. We make one for each purpose and device, once. Memory that one stream allocated and
another one uses is recorded (`record_use`), so that it is not given away while it is in use.

Which device. Threads begin on device 0, and CUDA makes a context (some 300 MB of its memory) on the
device that a thread is on at its first call, even one about another device's event. So every call
here is made with its own device current, and the thread is put back as it was found.

Time limits. CUDA waits forever, for a kernel that never ends and for a rank that is gone. We look,
and give up after half an hour, as torch's process groups do. Then the device is `silent`: whatever
is asked of it here fails at once, and page-locked memory is kept, since copies may still come.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from nvmeio import _checks
from nvmeio._memory import page_locked, system
from nvmeio._threads.future import Future
from nvmeio._threads.threads import Thread
from nvmeio.errors import DeviceTimeoutError

PATIENCE_S = 1800.0
_LEAST_PAUSE_S, _MOST_PAUSE_S = 50e-6, 1e-3  # between two looks of who waits

Value = TypeVar("Value")


class Mark(Protocol):
    """A point in a device's work."""

    def done(self) -> bool:
        """Whether it is reached; never blocks."""

    def wait(self) -> None:
        """Block, without the GIL, until it is."""


class Copy(NamedTuple):
    """Bytes of a device's tensor, and their place in a chunk: both are 1-D, of uint8, contiguous.

    No part of either is made where the address does: a tensor that ends lets go of the GIL.
    """

    device: torch.Tensor
    start: int  # in it
    chunk: torch.Tensor
    shift: int  # in that
    nbytes: int
    is_prompt: bool = False  # large, and in memory that CUDA has locked: it is begun with the GIL

    @property
    def on_device(self) -> torch.Tensor:
        return self.device[self.start : self.start + self.nbytes]

    @property
    def on_host(self) -> torch.Tensor:
        return self.chunk[self.shift : self.shift + self.nbytes]


class Copier(Protocol):
    """A device's copies to and from chunks of host memory."""

    def now(self, device: torch.device) -> Mark:
        """Everything that the calling thread's current stream was asked so far."""

    def page_locked(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Host memory for copies with any device, a multiple of the page long.

        Others get it when its last view is gone: no copy may be under way then. `device` is one
        that is in use already.
        """

    def upload(self, copies: list[Copy]) -> Mark:
        """Begin to copy to one device, behind the copies begun before; one mark behind all."""

    def download(self, copy: Copy) -> Mark:
        """Begin to copy from the device, behind the copies begun before."""

    def finish(self, device: torch.device, step: Callable[[], None]) -> None:
        """Run a step that works on the device, and wait for that work."""

    def enter(self, device: torch.device) -> None:
        """Make the device the calling thread's own; libraries look at its current context."""


class CudaCopier:
    """CUDA through torch: copies on two streams of ours a device, one for each direction.

    `torch.cuda` is touched at the first use, so one may be made without CUDA.
    """

    def __init__(self) -> None:
        self._entered = threading.local()

    def now(self, device: torch.device) -> Mark:
        return CudaMark(torch.cuda.current_stream(device))

    def page_locked(self, nbytes: int, device: torch.device) -> torch.Tensor:
        with torch.cuda.device(device):
            _tolerate_captures()
            return page_locked.take(nbytes)

    def upload(self, copies: list[Copy]) -> Mark:
        return self._begin(copies, "ring up", system.TO_DEVICE)

    def download(self, copy: Copy) -> Mark:
        return self._begin([copy], "ring down", system.TO_HOST)

    def _begin(self, copies: list[Copy], purpose: str, kind: int) -> Mark:
        device, is_up = device_of(copies[0].device), kind == system.TO_DEVICE
        prompt = system.prompt_runtime() if all(copy.is_prompt for copy in copies) else None
        if prompt is None:
            side = Beside(device, purpose)
            pairs = [(copy.on_device, copy.on_host) for copy in copies]
            side.copy_all(pairs if is_up else [(host, its) for its, host in pairs])
            return side.mark()
        check_answers(device)
        stream = side_stream(device, purpose)
        handle = stream.cuda_stream
        with torch.cuda.device(device):
            _tolerate_captures()
            for its, start, chunk, shift, nbytes, _ in copies:
                there, here = its.data_ptr() + start, chunk.data_ptr() + shift
                target, source = (there, here) if is_up else (here, there)
                prompt.copy(target, source, nbytes, kind, handle)
        return CudaMark(stream, prompt)

    def finish(self, device: torch.device, step: Callable[[], None]) -> None:
        stream = side_stream(device, "ring up")
        # The device first: a stream's context manager puts a thread back on its old device in a
        # way that makes a context there.
        with torch.cuda.device(device), torch.cuda.stream(stream):
            step()
            CudaMark(stream).wait()

    def enter(self, device: torch.device) -> None:
        if getattr(self._entered, "device", None) == device:
            return
        enter(device)
        self._entered.device = device


class Beside:
    """Copies to and from one device's memory, on a stream of ours beside the caller's work.

    Those of one purpose share a stream. Nobody waits for the caller or his stream: `follow` and
    `precede` let streams wait for each other. Made and used by threads of any device. On devices
    that are not CUDA's a copy is done when it has begun.
    """

    def __init__(self, device: torch.device, purpose: str) -> None:
        self._device = device
        self._stream = side_stream(device, purpose)

    def follow(self, stream: Any = None) -> None:
        """Order what is begun from now on behind what a stream was asked; None is the thread's."""
        if self._stream is None:
            torch.get_device_module(self._device).synchronize(self._device)
            return
        with torch.cuda.device(self._device):
            there = torch.cuda.current_stream(self._device) if stream is None else stream
            self._stream.wait_stream(there)

    def precede(self) -> None:
        """Order what the calling thread's stream is asked from now on behind what was begun."""
        if self._stream is not None:
            with torch.cuda.device(self._device):
                torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def after(self, mark: Mark) -> None:
        """Order what is begun from now on behind a mark."""
        come_after(self._stream, mark)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin to copy, host memory best page-locked; both of the same shape and dtype."""
        self.copy_all([(target, source)])

    def copy_all(self, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """The same for several targets and sources."""
        if self._stream is None:
            for target, source in copies:
                target.detach().copy_(source.detach())
            return
        with on_stream(self._stream):
            _tolerate_captures()
            for target, source in copies:
                begin_copy(target, source)

    def mark(self) -> Mark:
        """A mark behind what was begun so far."""
        return asked_of(self._stream)

    def empty(self, nbytes: int) -> torch.Tensor:
        """Memory of the device for copies into it.

        Its former content may still be read: `follow` its readers. Others use it after a `mark`.
        """
        with on_stream(self._stream):
            return empty(nbytes, self._device)


class _Reached:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


_thread = threading.local()


def _tolerate_captures() -> None:
    """Once in each thread of ours, never in the user's: that one may be capturing."""
    if not getattr(_thread, "tolerates", False):
        _thread.tolerates = True
        if isinstance(threading.current_thread(), Thread):
            system.tolerate_captures()


class CudaMark:
    def __init__(self, stream: Any, prompt: system.PromptRuntime | None = None) -> None:
        cuda: Any = torch.cuda
        self.device = stream.device
        check_answers(self.device)
        self._until = time.monotonic() + PATIENCE_S
        # One that no mark has any more: the end of an event lets go of the GIL.
        free = _events.setdefault(self.device, [])
        try:
            self.event = free.pop()
        except IndexError:
            self.event = cuda.Event()
        self._give_back = functools.partial(free.append, self.event)
        with torch.cuda.device(self.device):
            _tolerate_captures()
            if prompt is not None and self.event.cuda_event:
                prompt.record(self.event.cuda_event, stream.cuda_stream)
            else:  # its first time: torch makes it then
                self.event.record(stream)

    def done(self) -> bool:
        with torch.cuda.device(self.device):
            _tolerate_captures()
            if self.event.query():
                return True
        if time.monotonic() > self._until:
            system.silent_devices.add(self.device)
        check_answers(self.device)
        return False

    def wait(self) -> None:
        pause = _LEAST_PAUSE_S
        while not self.done():
            pause_for(pause, self)
            pause = min(1.5 * pause, _MOST_PAUSE_S)

    # Streams that wait for its event wait for what was recorded when they were told to: it may be
    # recorded again. No function of Python's, in which an interrupt would be lost.
    __del__ = property(operator.attrgetter("_give_back"))


_events: dict[torch.device, list[Any]] = {}  # that no mark has


def pause_for(seconds: float, mark: CudaMark) -> None:
    time.sleep(seconds)


def check_answers(device: torch.device) -> None:
    """Raise DeviceTimeoutError if this device, once in this process, did not answer in time."""
    if device in system.silent_devices:
        raise DeviceTimeoutError(
            f"{device} has not finished its work in {PATIENCE_S:.0f} s: a kernel does not end, a "
            "collective waits for a rank that is gone, or the device has failed (look at "
            "`nvidia-smi` and for Xid in `dmesg`). Nothing works with it in this process any more: "
            "end it, and go on from a checkpoint"
        )


def is_device(tensor: object) -> bool:
    """Whether it is a tensor in a device's memory that engines reach through a `Copier`."""
    return getattr(tensor, "is_cuda", False) is True


def is_torchs(tensor: torch.Tensor) -> bool:
    """Whether a device tensor's memory is of torch's allocator, whose streams it may wait for.

    Memory of other processes and libraries is not, nor is any while a CUDA graph is captured.
    """
    return tensor.untyped_storage().resizable() and not torch.cuda.is_current_stream_capturing()


def device_of(tensor: torch.Tensor) -> torch.device:
    return tensor.device


def stream_here(device: torch.device) -> Any:
    """The stream of the calling thread's work on a device; None for one without streams."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def side_stream(device: torch.device, purpose: str) -> Any:
    """The stream of ours for a purpose, made once; None for a device without streams."""
    if device.type != "cuda":
        return None
    stream = _side_streams.get((device, purpose))
    if stream is None:
        cuda: Any = torch.cuda
        with torch.cuda.device(device):
            stream = _side_streams.setdefault((device, purpose), cuda.Stream(device))
    return stream


_side_streams: dict[tuple[torch.device, str], Any] = {}


def record_use(memory: torch.Tensor, stream: Any) -> None:
    """Note that a stream uses memory that may be another stream's.

    When its last tensor is gone, the allocator gives it to nobody before the stream has done what
    it was asked until then.
    """
    if stream is not None:
        memory.record_stream(stream)


def on_stream(stream: Any) -> contextlib.AbstractContextManager[None]:
    """Queue the calling thread's work on a device on a stream of `stream_here` meanwhile."""
    return _AS_EVER if stream is None else _on_stream(stream)


_AS_EVER = contextlib.nullcontext()


@contextlib.contextmanager
def _on_stream(stream: Any) -> Iterator[None]:
    # The device first: put back on another one, a thread would make a context there.
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


def now(device: torch.device) -> Mark:
    """All that the calling thread's stream of a device was asked so far."""
    return CudaMark(stream_here(device)) if device.type == "cuda" else _Reached()


def asked_of(stream: Any) -> Mark:
    """All that a stream of `stream_here` was asked so far."""
    return _Reached() if stream is None else CudaMark(stream)


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all that anybody asked of it, or raise DeviceTimeoutError."""
    check_answers(device)
    ended: Future[None] = Future()

    def wait() -> None:
        try:
            ended.set(torch.get_device_module(device).synchronize(device))
        except BaseException as failed:
            ended.fail(failed)

    Thread(wait, "nvmeio-synchronize").start()
    if not ended.wait(PATIENCE_S):
        system.silent_devices.add(device)
        check_answers(device)
    ended.result()


def empty(nbytes: int, device: torch.device) -> torch.Tensor:
    """Bytes of a device's memory, for the calling thread's stream."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


class _Part:
    """Some memory, by the protocol with which libraries share it, and what it is a part of."""

    def __init__(self, memory: torch.Tensor, start: int, nbytes: int) -> None:
        self._memory = memory
        kind = {"shape": (nbytes,), "typestr": "|u1", "version": 2}
        self.__cuda_array_interface__ = {**kind, "data": (memory.data_ptr() + start, False)}


def part_of(memory: torch.Tensor, start: int, nbytes: int) -> torch.Tensor:
    """Some bytes of a device's memory, with a storage of their own.

    The use ends with the last tensor over it. The allocator knows nothing of it: `record_use` is
    for the whole.
    """
    if not nbytes:
        return memory.new_empty(0)
    return torch.as_tensor(_Part(memory, start, nbytes), device=memory.device)


def is_expandable(tensor: torch.Tensor) -> bool:
    """Whether torch has mapped a tensor's memory in pieces (`expandable_segments`)."""
    cuda: Any = torch.cuda
    address = tensor.data_ptr()
    there = (s for s in cuda.memory_snapshot() if 0 <= address - s["address"] < s["total_size"])
    return any(segment.get("is_expandable", False) for segment in there)


def come_after(stream: Any, mark: Mark) -> None:
    """Order the later work of a stream of `stream_here` behind a mark; nobody waits."""
    if isinstance(mark, CudaMark):
        with torch.cuda.device(mark.device):
            stream.wait_event(mark.event)


def usable(name: str, value: str | int | torch.device) -> torch.device:
    """The CPU, or a CUDA device that is there, with its number; ValueError if it is neither."""
    found = _checks.device(name, value)
    if found.type == "cpu":
        return torch.device("cpu")
    if found.type != "cuda":
        raise ValueError(f"{name} must be the CPU or a CUDA device, not {str(found)!r}")
    with torch.cuda.device(found):
        torch.cuda.mem_get_info(found)  # has a context: what is page-locked is from now on for it
    return found


def left_on(device: torch.device) -> int:
    """Bytes that a CUDA device has free; torch's allocator may keep more that it has not lent."""
    with torch.cuda.device(device):
        return int(torch.cuda.mem_get_info(device)[0])


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor's values in new memory of a device, or of the CPU, which waits for them."""
    return tensor.detach().to(device, copy=True)


def move_buffers(module: torch.nn.Module, device: torch.device) -> None:
    """Move the buffers of a module that have memory; one that several modules have stays one."""
    there: dict[int, torch.Tensor] = {}
    for each in module.modules():
        for name, buffer in each._buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.device != device:
                if id(buffer) not in there:
                    there[id(buffer)] = moved(buffer, device)
                each._buffers[name] = there[id(buffer)]


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy of device memory in the host's, which the CPU waits for."""
    if not is_device(tensor):
        return tensor
    now(device_of(tensor)).wait()  # the copy itself knows no limit
    return moved(tensor, torch.device("cpu"))


def begin_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    # Not within no_grad, which Ctrl-C may leave in force in a thread of the caller's.
    target.detach().copy_(source.detach(), non_blocking=True)


def new_copier() -> Copier:
    return CudaCopier()


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The calling thread is on this device meanwhile, if it is one of CUDA's."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def enter(device: torch.device | int) -> None:
    """Make a device the calling thread's own, and its context current, which libraries look at."""
    torch.cuda.set_device(device)
    torch.cuda.mem_get_info(device)  # any call of the runtime's makes the context current


@contextlib.contextmanager
def current(tensor: torch.Tensor) -> Iterator[None]:
    """The context of a tensor's device is the calling thread's meanwhile; no step for the CPU."""
    with on(tensor.device):
        # A thread that has called nothing of CUDA yet has no context, not even on its own device.
        if tensor.is_cuda:
            torch.cuda.mem_get_info(tensor.device)
        yield


def as_here(work: Callable[[], Value]) -> Callable[[], Value]:
    """The same work for a new thread, which computes as the calling one does.

    It has as many threads of torch's, so that results are the same to the last bit, this thread's
    autocast, and its CUDA device and stream: "cuda" means that device, and what is asked of it
    comes after what this thread has asked.
    """
    cuda: Any = torch.cuda
    count = torch.get_num_threads()
    stream = cuda.current_stream() if cuda.is_initialized() else None  # else nobody chose a device
    for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
        work = torch.autocast(kind, torch.get_autocast_dtype(kind))(work)

    def there() -> Value:
        # A new thread's matrix products know nothing of `set_num_threads` before it was asked.
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)
        if stream is not None:
            cuda.set_stream(stream)  # and its device
        return work()

    return there
