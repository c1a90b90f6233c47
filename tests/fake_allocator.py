"""Who has the stand-in's memory: an allocator that gives it as CUDA's does.

Freed memory is given again to whoever allocates on the same stream, in whatever other streams are
at work there: they are waited for by who frees it, by `record_stream`, or by whoever has that
stream wait before it allocates again. Until then nothing happens to it, so it is spoilt (with NaN)
not when it is freed, but by the next allocation on its stream, of any size: CUDA's allocator cuts
and joins blocks. An allocation is a write of its stream's (`fake_order`), for what is new as well:
whose memory it was before is chance.
"""

from __future__ import annotations

import dataclasses
import weakref
from queue import SimpleQueue
from typing import Any

import fake_cuda
import fake_memory
import fake_order
import torch
from fake_kernels import quietly

from nvmeio._bindings import memory_at

_ALIGNMENT = 512
DEVICES = 2


@dataclasses.dataclass(eq=False)
class _Block:
    """Memory that was allocated.

    Attributes:
        stream: Which may have it again at once.
        others: That work there too (`record_stream`), and how far until once it is freed.
    """

    start: int
    length: int
    stream: Any
    place: str
    others: dict[Any, int] = dataclasses.field(default_factory=dict)


class Allocator(fake_cuda.FakeCuda):
    """`torch.cuda` with memory.

    Attributes:
        order: Of all accesses to memory.
        limit_bytes: Of its memory, each device's.
        in_use_bytes: Of it.
        most_bytes: In use at once so far.
        emptied: Addresses of storages without memory.
    """

    lock: Any

    def __init__(self) -> None:
        super().__init__()
        self.order = fake_order.Order()
        self.limit_bytes = fake_memory.NBYTES // DEVICES
        self.in_use_bytes = self.most_bytes = 0
        self.emptied: set[int] = set()
        self._addresses = fake_memory.addresses()
        self._addresses.forget(0)  # what the report of a failed test has touched
        self._base, self._inside = self._addresses.shown, self._addresses.inside
        self._half = fake_memory.NBYTES // DEVICES
        self._ends = [index * self._half for index in range(DEVICES)]
        self._blocks: dict[int, _Block] = {}  # the last one at each start
        self._free: dict[tuple[Any, int], list[_Block]] = {}  # by stream and length
        self._whole: dict[Any, list[_Block]] = {}  # freed, and not spoilt yet; by stream
        self._used_by_others: list[_Block] = []  # freed, and other streams are at work there
        self._died: SimpleQueue[_Block] = SimpleQueue()

    # --- given, and given back

    def empty(self, nbytes: int) -> torch.Tensor:
        """Bytes of the current device's memory, of the current stream's."""
        with self.lock:
            self.take_back()
            length = -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
            if self.in_use_bytes + length > self.limit_bytes:
                self.take_back(waits=True)
            if self.in_use_bytes + length > self.limit_bytes:
                raise torch.OutOfMemoryError(f"the device has no {nbytes} bytes")
            self.in_use_bytes += length
            self.most_bytes = max(self.most_bytes, self.in_use_bytes)
            stream: Any = self.current_stream()
            free = self._free.get((stream, length))
            block = free.pop() if free else self._new_block(length, stream)
            block.place = fake_order.here()
            self.emptied.discard(self._base + block.start)
            self._spoil_by(stream, block)
            room = memory_at(self._base + block.start, max(nbytes, 1), self)
            weakref.finalize(room, self._died.put, block).atexit = False
            return torch.frombuffer(room, dtype=torch.uint8)[:nbytes]

    def _new_block(self, length: int, stream: Any) -> _Block:
        self.cost("allocations")
        index = stream.device.index
        start, self._ends[index] = self._ends[index], self._ends[index] + length
        assert self._ends[index] <= (index + 1) * self._half, "no addresses are left"
        self._inside[start : start + length] = 0xFF
        self._blocks[start] = _Block(start, length, stream, "")
        return self._blocks[start]

    def _spoil_by(self, stream: Any, given: _Block) -> None:
        """An allocation on a stream, which may get any of the memory that was freed there."""
        for block in dict.fromkeys([given, *self._whole.pop(stream, ())]):
            inside = self._inside[block.start : block.start + block.length]
            span = self._base + block.start, block.length
            self.order.asked(stream.number, f"an allocation on {stream}", [], [span])
            stream.ask(lambda inside=inside: quietly(lambda: inside.fill_(0xFF)))

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """`Tensor.record_stream`."""
        block = self._blocks[tensor.untyped_storage().data_ptr() - self._base]
        if stream is not block.stream:
            block.others[stream] = -1

    def take_back(self, waits: bool = False) -> None:
        """Memory that nobody has any more; `waits`: for streams that are at work there."""
        with self.lock:
            while not self._died.empty():
                block = self._died.get()
                block.others = {stream: stream.asked for stream in block.others}
                self._used_by_others.append(block)
            left, self._used_by_others = self._used_by_others, []
            for block in left:
                for stream, position in block.others.items() if waits else ():
                    stream.run_to(position)
                if any(stream.done < position for stream, position in block.others.items()):
                    self._used_by_others.append(block)
                    continue
                # The allocator has seen them done; nobody else knows of it.
                streams = {stream.number for stream in block.others}
                self.order.forget(self._base + block.start, block.length, streams)
                block.others.clear()
                self.in_use_bytes -= block.length
                self._free.setdefault((block.stream, block.length), []).append(block)
                self._whole.setdefault(block.stream, []).append(block)

    def resize(self, address: int, nbytes: int) -> None:
        """The memory of a storage is freed, or given again to the storage that had it."""
        with self.lock:
            block: Any = self._blocks[address - self._base]
            if not nbytes:
                self.emptied.add(address)
                self._whole.setdefault(block.stream, []).append(block)
                return
            stream = self.current_stream()
            assert stream is block.stream, "it would have other addresses, those of another stream"
            self.emptied.discard(address)
            self._spoil_by(stream, block)

    # --- where it is

    def is_inside(self, address: int) -> bool:
        """Whether it is one of the devices' memory."""
        return 0 <= address - self._base < fake_memory.NBYTES

    def place_at(self, address: int) -> torch.device:
        """Whose memory it is."""
        return torch.device("cuda", (address - self._base) // self._half)

    def reached(self, address: int) -> int:
        """Where hardware finds the byte that tensors have at an address; any other stays."""
        at = address - self._base
        return self._inside.data_ptr() + at if 0 <= at < fake_memory.NBYTES else address

    def touched_by_cpu(self) -> list[str]:
        """What of it the CPU has touched, in words."""
        places = {}
        for page in self._addresses.touched():
            for block in list(self._blocks.values()):
                if block.start < page + 4096 and page < block.start + block.length:
                    places[block.start] = block.place
        return [
            f"the CPU has touched the device's memory at {start:#x}, allocated in {place}"
            for start, place in places.items()
        ]

    def memory_snapshot(self) -> list[dict[str, Any]]:
        """Segments of torch's allocator: a device's memory is one."""
        return [
            {
                "address": self._base + index * self._half,
                "total_size": self._half,
                "is_expandable": self.is_expandable,
            }
            for index in range(DEVICES)
        ]

    is_expandable = False

    def cost(self, name: str) -> None:
        """Something was done that costs."""
