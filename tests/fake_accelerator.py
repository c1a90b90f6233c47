"""A device to train on where there is none: its memory, its streams and its kernels.

Memory is what the CPU must not touch (SIGSEGV). Every operation of torch on a tensor there is a
*kernel*: its result is allocated at once, and the work is asked of the current stream. Freed
memory is given again to whoever allocates on the same stream, as CUDA's allocator does; new memory
is full of NaN.

Streams have no threads. Each does its work as early as it can (`EAGER`) or not before somebody
waits for it (`LAZY`): the two ends of what a device may do. So a wait that is missing shows in the
numbers, always or never, and not now and then:

- compute that does not wait for the copy of its weights finds NaN, or the unit before, with lazy
  copies;
- a copy that does not wait for the compute over the memory it goes into changes the weights under
  it, with eager copies and lazy compute;
- memory that is read from the drive again before it was copied on gives other weights, with lazy
  copies.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import functools
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import fake_cuda
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from nvmeio import _checks
from nvmeio._memory import devices, mappings
from nvmeio._shim import memory_at

_ADDRESSES = 256 << 20  # touched as far as it is used
_ALIGNMENT = 512
DEVICE = torch.device("cuda", 0)


class Pace(enum.Enum):
    """When a stream does what it was asked."""

    EAGER = enum.auto()
    LAZY = enum.auto()


class Stream:
    """Work in order.

    Attributes:
        pace: When it is done.
        done: How much is.
    """

    def __init__(self, cuda: Accelerator, index: int, pace: Pace) -> None:
        self.device = torch.device("cuda", index)
        self.pace = pace
        self.done = 0
        self._asked: deque[Callable[[], None]] = deque()
        self._cuda = cuda

    @property
    def asked(self) -> int:
        """How much it was asked."""
        return self.done + len(self._asked)

    def ask(self, work: Callable[[], None]) -> None:
        with self._cuda.lock:
            self._asked.append(work)
            if self.pace is Pace.EAGER:
                self.run_to(self.asked)

    def run_to(self, position: int) -> None:
        with self._cuda.lock:
            while self.done < position:
                work = self._asked[0]
                work()
                self._asked.popleft()
                self.done += 1

    def wait_event(self, event: Event) -> None:
        self._cuda.call("wait_event")
        stream, position = event.stream, event.position
        assert stream is not None, "an event that nobody recorded"
        self.ask(lambda: stream.run_to(position))

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self) -> Event:
        event = Event(self._cuda)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._cuda.call("stream.synchronize")
        self.run_to(self.asked)

    def stop(self) -> None:
        self._asked.clear()


class Event:
    def __init__(self, cuda: Accelerator, blocking: bool = False) -> None:
        self._cuda = cuda
        self.stream: Stream | None = None
        self.position = 0

    def record(self, stream: Stream) -> None:
        self._cuda.call("record")
        self.stream, self.position = stream, stream.asked

    def query(self) -> bool:
        return self.stream is None or self.stream.done >= self.position

    def synchronize(self) -> None:
        self._cuda.call("synchronize")
        if self.stream is not None:
            self.stream.run_to(self.position)
        if self._cuda.failure is not None:
            raise self._cuda.failure


class Accelerator(fake_cuda.FakeCuda):
    """`torch.cuda` with kernels.

    Attributes:
        compute: The pace of the streams that are current by themselves.
        copies: That of streams which somebody makes.
        limit_bytes: Of its memory.
        in_use_bytes: Of it.
        most_bytes: In use at once so far.
        before_begin: Called with each copy before it is begun, with its number; may raise.
    """

    def __init__(self, compute: Pace, copies: Pace) -> None:
        super().__init__()
        self.lock = threading.RLock()
        self.copies_pace = copies
        self.limit_bytes = _ADDRESSES
        self.in_use_bytes = self.most_bytes = 0
        self.before_begin: Callable[[int], None] = lambda number: None
        made: Any = {index: Stream(self, index, compute) for index in range(2)}
        self._default = made
        self._base, self._inside = _mapped_twice()
        _protect(self._base, 0)
        self._end = 0
        self._free: dict[tuple[int, int], list[int]] = {}  # by stream and length
        self._died: SimpleQueue[tuple[int, int, int]] = SimpleQueue()
        self._users: dict[int, set[Stream]] = {}  # by start, that were recorded
        self._pending: list[tuple[list[tuple[Stream, int]], int, int, int]] = []

    # --- memory

    def empty(self, nbytes: int) -> torch.Tensor:
        """Bytes of its memory, of the current stream's."""
        with self.lock:
            self._take_back()
            length = -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
            if self.in_use_bytes + length > self.limit_bytes:
                raise torch.OutOfMemoryError(f"the device has no {nbytes} bytes")
            self.in_use_bytes += length
            self.most_bytes = max(self.most_bytes, self.in_use_bytes)
            stream = id(self.current_stream())
            free = self._free.get((stream, length))
            if free:
                start = free.pop()
            else:
                start, self._end = self._end, self._end + length
                assert self._end <= _ADDRESSES
                self._inside[start : start + length] = 0xFF
            room = memory_at(self._base + start, length, self)
            weakref.finalize(room, self._died.put, (stream, length, start)).atexit = False
            return torch.frombuffer(room, dtype=torch.uint8)[:nbytes]

    def _take_back(self) -> None:
        while not self._died.empty():
            stream, length, start = self._died.get()
            others = [u for u in self._users.pop(start, ()) if id(u) != stream]
            users = [(user, user.asked) for user in others]
            self._pending.append((users, stream, length, start))
            self.in_use_bytes -= length
        pending, self._pending = self._pending, []
        for users, stream, length, start in pending:
            if all(user.done >= asked for user, asked in users):
                self._free.setdefault((stream, length), []).append(start)
            else:
                self._pending.append((users, stream, length, start))

    def record_use(self, memory: torch.Tensor, stream: Any) -> None:
        """`record_stream`: freed, it is nobody's before the stream is done with it."""
        with self.lock:
            start = memory.untyped_storage().data_ptr() - self._base
            assert 0 <= start < _ADDRESSES
            self._users.setdefault(start, set()).add(stream)

    def like(self, meta: torch.Tensor) -> torch.Tensor:
        """Memory for what a kernel makes."""
        extent = sum((n - 1) * s for n, s in zip(meta.shape, meta.stride(), strict=True)) + 1
        size = meta.dtype.itemsize
        flat = self.empty(extent * size if meta.numel() else 0)
        if flat.nbytes < size:
            return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype)
        return flat.view(meta.dtype).as_strided(meta.shape, meta.stride())

    def tensor(self, data: torch.Tensor) -> torch.Tensor:
        made = self.like(torch.empty_like(data.detach(), device="meta"))
        if data.numel():
            values = data.detach().clone()
            inside = self.inside(made)
            self.current_stream().ask(lambda: _quietly(lambda: inside.copy_(values)))
        return made

    def has(self, tensor: object) -> bool:
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta or not tensor.numel():
            return False
        if tensor.layout is not torch.strided:
            return False
        return 0 <= tensor.untyped_storage().data_ptr() - self._base < _ADDRESSES

    def inside(self, tensor: torch.Tensor) -> torch.Tensor:
        start = tensor.untyped_storage().data_ptr() - self._base
        start += int(tensor.storage_offset()) * tensor.dtype.itemsize
        strides = zip(tensor.shape, tensor.stride(), strict=True)
        extent = (sum((n - 1) * s for n, s in strides) + 1) * tensor.dtype.itemsize
        flat = self._inside[start : start + extent].view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset())

    def reached(self, address: int) -> int:
        """Where hardware finds the byte that tensors have at an address; any other stays."""
        at = address - self._base
        return self._inside.data_ptr() + at if 0 <= at < _ADDRESSES else address

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """What it holds, when all work before is done: like `cpu()`."""
        if not self.has(tensor):
            return tensor.detach().clone()
        for stream in [self.current_stream(), *self.streams]:
            stream.synchronize()
        return self.inside(tensor.detach()).clone()

    # --- work

    def begin_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Of the current stream, in either direction; host memory is looked at when it is done."""
        self.call("copy")
        self.before_begin(len(self.copies))
        stream: Any = self.current_stream()
        self.copies.append(stream)
        to, of = (self.inside(t) if self.has(t) else _bare(t) for t in (target, source))
        stream.ask(lambda: _quietly(lambda: to.copy_(of)))

    def stop(self) -> None:
        streams: Any = [*self._default.values(), *self.streams]
        for stream in streams:
            stream.stop()
        _protect(self._base, mmap.PROT_READ | mmap.PROT_WRITE)

    def new_stream(self, index: int) -> Any:
        return Stream(self, index, self.copies_pace)

    def Event(self, blocking: bool = False) -> Any:
        return Event(self, blocking)


class Kernels(TorchDispatchMode):
    """Operations on the accelerator's memory are asked of its current stream."""

    def __init__(self, cuda: Accelerator) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        cuda, kwargs = self._cuda, kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if not any(cuda.has(t) for t in tensors):
            return func(*args, **kwargs)
        schema = func._schema
        returns = [r.alias_info for r in schema.returns]
        if any(info is not None and not info.is_write for info in returns):
            return func(*args, **kwargs)  # a view
        written = _written(schema, args, kwargs)
        stream: Any = cuda.current_stream()
        if func is torch.ops.aten.copy_.default and not cuda.has(args[0]):
            stream.synchronize()
            return func(args[0], cuda.inside(args[1]))
        strangers = [t for t in tensors if t.dim() and t.numel() and not cuda.has(t)]
        if strangers and func is not torch.ops.aten.copy_.default:
            raise RuntimeError(f"{func}: expected all tensors on the same device")
        read = [id(t) for t in written]

        def there(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if cuda.has(value):
                return cuda.inside(value.detach())
            return value if id(value) in read else value.detach().clone()

        there_args, there_kwargs = tree_map(there, (args, kwargs))
        kept = (args, kwargs)  # a kernel's memory is not given away before it was asked

        def call() -> Any:
            return _quietly(lambda: func(*there_args, **there_kwargs))

        if written:
            stream.ask(lambda: (call(), None)[1])
            if not all(cuda.has(t) for t in written):  # a number that the host looks at
                stream.synchronize()
            found = [t for info, t in zip(returns, written, strict=False) if info is not None]
            return found[0] if len(found) == 1 else tuple(found) or None
        if not any(isinstance(r.type, (torch.TensorType, torch.ListType)) for r in schema.returns):
            stream.synchronize()
            return call()
        made = tree_map(lambda t: cuda.like(t) if _real(t) else t, self._shapes(func, kept))
        targets = [cuda.inside(t) if cuda.has(t) else t for t in tree_leaves(made) if _real(t)]

        def work() -> None:
            results = [t for t in tree_leaves(call()) if _real(t)]
            for target, result in zip(targets, results, strict=True):
                if target.numel():
                    _quietly(lambda t=target, r=result: t.copy_(r))

        stream.ask(work)
        return made

    def _shapes(self, func: Any, given: Any) -> Any:
        def meta(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device="meta"
            )

        args, kwargs = tree_map(meta, given)
        if isinstance(kwargs.get("device"), torch.device):
            kwargs["device"] = torch.device("meta")
        return func(*args, **kwargs)


def _real(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _written(schema: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for number, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        found += [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
    return found


def _bare(host: torch.Tensor) -> torch.Tensor:
    """The same bytes, which a copy that is under way does not keep."""
    assert host.is_contiguous()
    flat = torch.frombuffer(memory_at(host.data_ptr(), host.nbytes), dtype=host.dtype)
    return flat.view(host.shape)


def _quietly(work: Callable[[], Any]) -> Any:
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        return work()


_libc = ctypes.CDLL(None, use_errno=True)
_MAPPED_SHARED_NO_FILE = 0x21 | 0x4000  # and no room is set aside
_MAY_MOVE = 1


@functools.cache
def _mapped_twice() -> tuple[int, torch.Tensor]:
    """The same memory at two addresses: what tensors show, and what kernels work on."""
    size, address = ctypes.c_size_t, ctypes.c_void_p
    _libc.mmap.restype = _libc.mremap.restype = address
    first = _libc.mmap(None, size(_ADDRESSES), 3, _MAPPED_SHARED_NO_FILE, -1, ctypes.c_long(0))
    second = _libc.mremap(address(first), size(0), size(_ADDRESSES), _MAY_MOVE)
    assert first not in (None, -1) and second not in (None, -1), "no addresses"
    return first, torch.frombuffer(memory_at(second, _ADDRESSES), dtype=torch.uint8)


def _protect(base: int, how: int) -> None:
    size = ctypes.c_size_t(_ADDRESSES)
    assert _libc.mprotect(ctypes.c_void_p(base), size, how) == 0, "mprotect"


@contextlib.contextmanager
def accelerator(
    patch: pytest.MonkeyPatch, compute: Pace = Pace.LAZY, copies: Pace = Pace.LAZY
) -> Iterator[Accelerator]:
    """`torch.cuda` and the seam to it are the stand-in's.

    Kernels are this thread's, and of threads that work as it does (`_memory.devices.as_here`).
    """
    cuda = Accelerator(compute, copies)
    cpu = torch.device("cpu")
    for name in fake_cuda.NAMES:
        made: Any = getattr(cuda, name)
        patch.setattr(torch.cuda, name, made)

    def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if device.type == "cuda":
            return cuda.tensor(cuda.value(tensor))
        return cuda.value(tensor)

    def as_here(work: Callable[[], Any]) -> Callable[[], Any]:
        def there() -> Any:
            with Kernels(cuda):
                return work()

        return there

    its_on_stream = devices.on_stream

    @contextlib.contextmanager
    def on_stream(stream: Any) -> Iterator[None]:
        kernels = contextlib.nullcontext() if stream is None else Kernels(cuda)
        with its_on_stream(stream), kernels:
            yield

    patch.setattr(devices, "as_here", as_here)
    patch.setattr(devices, "on_stream", on_stream)
    patch.setattr(_checks, "device", lambda name, device: cpu if str(device) == "cpu" else DEVICE)
    patch.setattr(devices, "is_device", cuda.has)
    patch.setattr(devices, "is_torchs", cuda.has)
    patch.setattr(devices, "device_of", lambda t: DEVICE if cuda.has(t) else t.device)
    patch.setattr(devices, "usable", lambda name, device: cpu if str(device) == "cpu" else DEVICE)
    patch.setattr(devices, "moved", moved)
    patch.setattr(devices, "_begin_copy", cuda.begin_copy)
    patch.setattr(devices, "_side_streams", {})
    patch.setattr(torch._C, "_cuda_hasPrimaryContext", cuda.contexts.__contains__, raising=False)
    patch.setattr(devices, "record_use", cuda.record_use)
    patch.setattr(devices, "empty", lambda nbytes, device: cuda.empty(nbytes))
    try:
        with Kernels(cuda):
            yield cuda
    finally:
        cuda.stop()
        # Memory may outlive the stand-in (in the traceback of an error, say), and ends without it.
        for pin in list(mappings.pinned.values()):
            with pin.lock:
                if pin.runtime is cuda:
                    pin.runtime = None
