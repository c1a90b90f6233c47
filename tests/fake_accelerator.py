"""A device to train on where there is none: its memory, its streams and its kernels.

Memory is what the CPU must not touch (`fake_memory`), and is given and taken back as CUDA's
allocator does it (`fake_allocator`). Every operation of torch on a tensor there is a *kernel*: its
result is allocated at once, and the work is asked of the current stream. Backward works in a thread
of its own, as autograd's for a device does. Streams come from a pool of three, as torch's from one
of 32: who takes a fourth has the first again, and its memory.

Streams have no threads. Each does its work as early as it can (`EAGER`), not before somebody waits
for it (`LAZY`), which are the two ends of what a device may do, or in any order between them that
a device may choose (`RANDOM`, by a seed):

- compute that does not wait for the copy of its weights finds NaN, or the unit before, with lazy
  copies;
- a copy that does not wait for the compute over the memory it goes into changes the weights under
  it, with eager copies and lazy compute;
- memory that is read from the drive again before it was copied on gives other weights, with lazy
  copies.

And whatever the numbers are, two accesses without an order between them are a fault (`fake_order`),
of which the test is told at the end of `accelerator`. `contexts` and `counted` tell on which
devices something was called, and what it cost.
"""

from __future__ import annotations

import contextlib
import enum
import random
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import fake_allocator
import fake_collectives
import fake_cuda
import fake_memory
import fake_order
import fake_tensors
import pytest
import torch
from fake_allocator import DEVICES
from fake_cuda import Costs as Costs
from fake_kernels import Kernels as Kernels
from fake_kernels import is_wrapper, quietly, span
from torch.overrides import _get_current_function_mode_stack

from nvmeio._bindings import memory_at
from nvmeio._memory import devices, mappings, page_locked
from nvmeio._threads import threads

_STREAMS = 3  # of a device, handed out in turn
_MOST_POLLS = 2000  # of an event of a lazy stream: seconds, where it is looked at every ms
DEVICE = torch.device("cuda", 0)


class Pace(enum.Enum):
    """When a stream does what it was asked."""

    EAGER = enum.auto()
    LAZY = enum.auto()
    RANDOM = enum.auto()


# Of what computes, and of copies.
EVERY_PACE = [
    (Pace.EAGER, Pace.EAGER),
    (Pace.EAGER, Pace.LAZY),
    (Pace.LAZY, Pace.EAGER),
    (Pace.LAZY, Pace.LAZY),
    (Pace.RANDOM, Pace.RANDOM),
]


class Stream:
    """Work in order.

    Attributes:
        pace: When it is done.
        done: How much is.
        number: Among the clocks.
    """

    def __init__(self, cuda: Accelerator, index: int, name: str, pace: Pace) -> None:
        self.device = torch.device("cuda", index)
        self.pace = pace
        self.done = 0
        self.number = cuda.order.new_stream()
        self._name = name
        self._asked: deque[Callable[[], None]] = deque()
        self._cuda = cuda

    def __repr__(self) -> str:
        return f"{self._name} of {self.device}"

    @property
    def asked(self) -> int:
        """How much it was asked."""
        return self.done + len(self._asked)

    @property
    def is_idle(self) -> bool:
        return not self._asked

    def ask(self, work: Callable[[], None]) -> None:
        with self._cuda.lock:
            self._cuda.take_back()
            self._asked.append(work)
            if self.pace is Pace.EAGER:
                self.run_to(self.asked)
            self._cuda.wander()

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
        assert stream is not None and event.number is not None, "an event that nobody recorded"
        self._cuda.order.wait(self.number, event.number)
        self.ask(lambda: stream.run_to(position))

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self) -> Event:
        event = Event(self._cuda)
        event.record(self)
        return event

    def query(self) -> bool:
        return self.record_event().query()

    def synchronize(self) -> None:
        with self._cuda.device(self.device):
            self._cuda.call("stream.synchronize")
        self._cuda.host_waits(self.is_idle)
        self.run_to(self.asked)
        self._cuda.order.host_waits_for_stream(self.number)

    def stop(self) -> None:
        self._asked.clear()


class Event:
    def __init__(self, cuda: Accelerator, blocking: bool = False) -> None:
        self._cuda = cuda
        self.stream: Stream | None = None
        self.number: int | None = None
        self.position = 0
        self._polls = 0

    def record(self, stream: Any = None) -> None:
        self._cuda.call("record")
        stream = self._cuda.current_stream() if stream is None else stream
        with self._cuda.lock:
            self.stream, self.position, self._polls = stream, stream.asked, 0
            self.number = self._cuda.order.record(stream.number)

    def query(self) -> bool:
        self._cuda.wander()
        reached = self.stream is None or self.stream.done >= self.position
        if reached and self.number is not None:
            self._cuda.order.host_waits(self.number)
        if not reached and self.stream is not None and self.stream.pace is Pace.LAZY:
            self._polls += 1
            if self._polls > _MOST_POLLS:
                self._cuda.fail_poll(self.stream, self._polls)
        return reached

    def synchronize(self) -> None:
        self._cuda.call("synchronize")
        if self.stream is not None:
            self._cuda.host_waits(self.stream.done >= self.position)
            self.stream.run_to(self.position)
            assert self.number is not None
            self._cuda.order.host_waits(self.number)
        if self._cuda.failure is not None:
            self._cuda.order.host_waits_for_all()  # nothing is done there any more
            raise self._cuda.failure


class Accelerator(fake_allocator.Allocator):
    """`torch.cuda` with kernels.

    Attributes:
        collectives: That were asked for.
        compute: The pace of the streams that are current by themselves.
        copies: That of streams which somebody makes.
        is_expandable: Whether torch maps its memory in pieces.
        before_begin: Called with each copy before it is begun, with its number; may raise.
        problems: What was wrong, whatever the numbers: accesses without an order, memory that the
            CPU has touched.
    """

    def __init__(self, compute: Pace, copies: Pace, seed: int = 0) -> None:
        super().__init__()
        self.lock = threading.RLock()
        self.collectives = fake_collectives.Collectives(self)
        self.copies_pace = copies
        self.random = random.Random(seed)
        self.before_begin: Callable[[int], None] = lambda number: None
        self.stopped = False
        made: Any = {
            index: Stream(self, index, "the default stream", compute) for index in range(DEVICES)
        }
        self._default = made
        self._pools: dict[int, list[Stream]] = {index: [] for index in range(DEVICES)}
        self._handed_out: Counter[int] = Counter()
        self._costs: Counter[str] = Counter()
        self._computing = {threading.get_ident()}
        self._wandering = False

    # --- memory

    def like(self, meta: torch.Tensor) -> torch.Tensor:
        """Memory for what a kernel makes."""
        if not meta.numel():  # takes no memory
            return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype)
        extent = sum((n - 1) * s for n, s in zip(meta.shape, meta.stride(), strict=True)) + 1
        flat = self.empty(extent * meta.dtype.itemsize)
        return flat.view(meta.dtype).as_strided(meta.shape, meta.stride())

    def tensor(self, data: torch.Tensor) -> torch.Tensor:
        made = self.like(torch.empty_like(data.detach(), device="meta"))
        if data.numel():
            values = data.detach().clone()
            inside = self.inside(made)
            stream: Any = self.current_stream()
            self.order.asked(stream.number, f"a copy on {stream}", [], [span(made)])
            stream.ask(lambda: quietly(lambda: inside.copy_(values)))
        return made

    def has(self, tensor: object) -> bool:
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta or not tensor.numel():
            return False
        if is_wrapper(type(tensor)) or tensor.layout is not torch.strided:
            return False
        return self.is_inside(tensor.untyped_storage().data_ptr())

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        """`Tensor.device`."""
        return self.place(tensor) if self.has(tensor) else tensor.device

    def place(self, tensor: torch.Tensor) -> torch.device:
        """Of a tensor here."""
        return self.place_at(tensor.untyped_storage().data_ptr())

    def inside(self, tensor: torch.Tensor) -> torch.Tensor:
        start = tensor.untyped_storage().data_ptr() - self._base
        start += int(tensor.storage_offset()) * tensor.dtype.itemsize
        flat = self._inside[start : start + span(tensor)[1]].view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset())

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """What it holds, when all work before is done: like `cpu()`."""
        if not self.has(tensor):
            return tensor.detach().clone()
        for stream in self._all_streams():
            stream.run_to(stream.asked)
        self.order.host_waits_for_all()
        return self.inside(tensor.detach()).clone()

    # --- work

    def begin_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Of the current stream, in either direction; host memory is looked at when it is done."""
        where = self.device_of(target if self.has(target) else source)
        with self.device(where):
            self.call("copy")
        self.before_begin(len(self.copies))
        stream: Any = self.current_stream(where)
        self.copies.append(stream)
        for each in (target, source):
            if not self.has(each):
                self.order.note_host(*span(each))
        to, of = (self.inside(t) if self.has(t) else fake_memory.bare(t) for t in (target, source))
        self.order.asked(stream.number, f"a copy on {stream}", [span(source)], [span(target)])
        stream.ask(lambda: quietly(lambda: to.copy_(of)))

    def wander(self) -> None:
        """Streams with a pace of their own do some of their work, in an order that is legal."""
        with self.lock:
            if self._wandering:
                return
            self._wandering = True
            try:
                for _ in range(self.random.randrange(4)):
                    streams = self._all_streams()
                    busy = [s for s in streams if s.pace is Pace.RANDOM and not s.is_idle]
                    if not busy:
                        return
                    chosen = self.random.choice(busy)
                    chosen.run_to(chosen.done + 1)
            finally:
                self._wandering = False

    def run_backward(self, run: Callable[[], Any]) -> Any:
        """In autograd's own thread, on the streams that are current here, to its end."""
        if threading.get_ident() == self._backward_thread:
            return run()  # within a backward: reentrant checkpoints
        result: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        count, modes = torch.get_num_threads(), _get_current_function_mode_stack()
        streams, index = getattr(self._thread, "streams", {}), self.current_device()

        def there() -> None:
            self._thread.streams, self._thread.device = dict(streams), index
            try:
                if torch.get_num_threads() != count:
                    torch.set_num_threads(count)
                with contextlib.ExitStack() as stack:
                    stack.enter_context(Kernels(self))
                    for mode in modes:
                        stack.enter_context(mode)
                    result.put((run(), None))
            except BaseException as failed:
                result.put((None, failed))

        with self.lock:
            if self._backward_work is None:
                self._backward_work = SimpleQueue()
                thread = threading.Thread(target=self._work_backward, daemon=True)
                thread.start()
        self._backward_work.put(there)
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                found, failed = result.get(timeout=60.0)
                break
            except KeyboardInterrupt as stopped:  # autograd goes on to its end
                interrupt = stopped
        if interrupt is not None:
            raise interrupt
        if failed is not None:
            raise failed
        return found

    _backward_work: SimpleQueue[Callable[[], None] | None] | None = None
    _backward_thread: int | None = None

    def _work_backward(self) -> None:
        self._backward_thread = threading.get_ident()
        self._computing.add(self._backward_thread)
        assert self._backward_work is not None
        while (work := self._backward_work.get()) is not None:
            work()
            del work

    def _all_streams(self) -> list[Any]:
        return [*self._default.values(), *self.streams]

    def stop(self) -> None:
        self.stopped = True
        if self._backward_work is not None:
            self._backward_work.put(None)
        for stream in self._all_streams():
            stream.stop()
        self._addresses.forget(0)

    # --- what it cost, and what was wrong

    def cost(self, name: str) -> None:
        self._costs[name] += 1

    def call(self, name: str) -> None:
        super().call(name)
        costs = {"cudaHostRegister": "page_locks", "copy": "copies"}
        if name in costs:
            self._costs[costs[name]] += 1

    def host_waits(self, is_done: bool = False) -> None:
        """A thread waits for work of a device."""
        if not is_done:
            computes = threading.get_ident() in self._computing
            self._costs["host_waits" if computes else "waits_beside"] += 1

    @contextlib.contextmanager
    def counted(self) -> Iterator[Costs]:
        """What it costs meanwhile; known at the end."""
        costs, before = Costs(), self._costs.copy()
        yield costs
        for name, number in self._costs.items():
            setattr(costs, name, number - before[name])

    def fail_poll(self, stream: Stream, times: int) -> None:
        """Somebody looks at a stream again and again, which does nothing before it is waited for.

        Raises:
            AssertionError: Always; the test is told at its end, too.
        """
        seen = f"{stream} was looked at {times} times and never waited for ({fake_order.here()})"
        fault = f"{seen}: it is lazy, and does nothing meanwhile. Take Pace.RANDOM for what polls"
        if fault not in self.order.faults:
            self.order.faults.append(fault)
        raise AssertionError(fault)

    def problems(self) -> list[str]:
        return [*self.order.faults, *self.touched_by_cpu()]

    def forgive(self) -> list[str]:
        """What was wrong so far, which was meant to be."""
        found = self.problems()
        self.order.faults.clear()
        self._addresses.forget(0)
        return found

    # --- torch.cuda's names

    def device_count(self) -> int:
        return DEVICES

    def mem_get_info(self, device: torch.device | int | None = None) -> tuple[int, int]:
        super().mem_get_info(device)
        self.take_back()
        return max(self.limit_bytes - self.in_use_bytes, 0), self.limit_bytes

    def Stream(self, device: Any = None, **options: Any) -> Any:
        index = self.index_of(device)
        with self.lock:
            self._costs["streams"] += 1
            pool, number = self._pools[index], self._handed_out[index] % _STREAMS
            self._handed_out[index] += 1
            if number == len(pool):
                made: Any = Stream(self, index, f"stream {number + 1}", self.copies_pace)
                pool.append(made)
                self.streams.append(made)
            return pool[number]

    def Event(self, blocking: bool = False) -> Any:
        return Event(self, blocking)

    def synchronize(self, device: torch.device | int | None = None) -> None:
        with self.device(self.index_of(device)):
            self.call("synchronize")
        streams = [s for s in self._all_streams() if s.device.index == self.index_of(device)]
        self.host_waits(all(stream.is_idle for stream in streams))
        for stream in streams:
            stream.run_to(stream.asked)
            self.order.host_waits_for_stream(stream.number)


@contextlib.contextmanager
def accelerator(
    patch: pytest.MonkeyPatch,
    compute: Pace = Pace.LAZY,
    copies: Pace = Pace.LAZY,
    seed: int = 0,
    tells: bool = True,
) -> Iterator[Accelerator]:
    """`torch.cuda` and the seam to it are the stand-in's.

    Kernels are this thread's, nvmeio's, and of backward.

    Args:
        patch: Undoes it.
        compute: The pace of the streams that are current by themselves.
        copies: That of others.
        seed: Of what streams do at random.
        tells: Raise at the end if something was wrong (`Accelerator.problems`).
    """
    page_locked.forget()
    cuda = Accelerator(compute, copies, seed)
    for name in (*fake_cuda.NAMES, "memory_snapshot"):
        made: Any = getattr(cuda, name)
        patch.setattr(torch.cuda, name, made)
    # torch's optimizers ask the driver whether a graph is captured, where torch is built with CUDA.
    check = "_accelerator_graph_capture_health_check"
    patch.setattr(torch.optim.Optimizer, check, lambda optimizer: None, raising=False)

    def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        with cuda.device(device if device.type == "cuda" else cuda.device_of(tensor)):
            cuda.host_waits()
            if device.type == "cuda":
                return cuda.tensor(cuda.value(tensor))
            return cuda.value(tensor)

    def empty(nbytes: int, device: torch.device) -> torch.Tensor:
        with cuda.device(device):
            return cuda.empty(nbytes)

    def part_of(memory: torch.Tensor, start: int, nbytes: int) -> torch.Tensor:
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        room = memory_at(memory.data_ptr() + start, nbytes, memory)
        return torch.frombuffer(room, dtype=torch.uint8)

    as_here, run = devices.as_here, threads.Thread.run
    run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def with_kernels(work: Callable[[], Any]) -> Callable[[], Any]:
        def there() -> Any:
            with Kernels(cuda):
                return work()

        return as_here(there)

    def run_with_kernels(thread: threads.Thread) -> None:
        with Kernels(cuda):
            run(thread)

    def backward(outputs: Any, *args: Any, **options: Any) -> Any:
        def work() -> Any:
            return run_backward(outputs, *args, **options)

        return cuda.run_backward(work) if any(map(cuda.has, outputs)) else work()

    def numpy(tensor: torch.Tensor, **options: Any) -> Any:
        if cuda.has(tensor):
            raise TypeError("can't convert a tensor of the stand-in to numpy")
        return to_numpy(tensor, **options)

    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        cuda.record_stream(tensor, stream)

    to_numpy = torch.Tensor.numpy
    fake_cuda.begin_anew(patch)
    patch.setattr(torch._C, "_cuda_hasPrimaryContext", cuda.contexts.__contains__, raising=False)
    patch.setattr(devices, "as_here", with_kernels)
    patch.setattr(threads.Thread, "run", run_with_kernels)
    patch.setattr(torch.autograd, "_engine_run_backward", backward)
    patch.setattr(torch.Tensor, "numpy", numpy)
    patch.setattr(torch.Tensor, "record_stream", record_stream)
    patch.setattr(devices, "is_device", cuda.has)
    patch.setattr(devices, "is_torchs", cuda.has)
    patch.setattr(devices, "device_of", cuda.device_of)
    patch.setattr(devices, "moved", moved)
    patch.setattr(devices, "begin_copy", cuda.begin_copy)
    patch.setattr(devices, "empty", empty)
    patch.setattr(devices, "part_of", part_of)
    fake_tensors.tell_device(patch, cuda)
    fake_collectives.tell_collectives(patch, cuda)
    fake_order.watch_drives(patch, cuda.order)
    fake_order.watch_cufile(patch, cuda.order, cuda.reached)
    problems: list[str] = []
    try:
        with Kernels(cuda):
            yield cuda
    finally:
        if tells:
            problems = cuda.problems()
            if sys.exc_info()[0] is not None:
                print(*problems, sep="\n", file=sys.stderr)
        cuda.stop()
        page_locked.forget()
        # Memory may outlive the stand-in (in the traceback of an error, say), and ends without it.
        for pin in list(mappings.pinned.values()):
            with pin.lock:
                if pin.runtime is cuda:
                    pin.runtime = None
    assert not problems, "\n".join(problems)


def other_stream() -> Any:
    made: Any = torch.cuda.Stream(DEVICE)
    return made


def on(stream: Any) -> Any:
    return torch.cuda.stream(stream)
