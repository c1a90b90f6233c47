"""Which accesses to memory have an order: what streams, the host and drives do with it.

Each stream has a vector clock (`torch.cuda._sanitizer` keeps them), and so have the events that are
recorded there. Whatever is asked of a stream reads or writes spans of addresses, of a device or of
the host. Two accesses to a byte, one of which writes, are in order if the later one was asked for
by somebody who had waited for the earlier one: a stream by an event, the host by an event or by
synchronising. Everything else is a fault that names both sides, whatever the values came out as.

The host counts as one: what one of its threads has waited for, all know. Transfers of drives, and
of a cuFile, are the host's from their start until their end is noticed.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch.cuda._sanitizer import StreamSynchronizations

from nvmeio._core.short_transfers import ShortTransfers
from nvmeio.engines import _queued, libaio
from nvmeio.engines.cufile.engine import CuFileEngine, TaskMover
from nvmeio.engines.cufile.library import Library
from nvmeio.engines.libaio import LibaioEngine
from nvmeio.engines.threads import ThreadsEngine
from nvmeio.testing import FakeEngine

_HERE = Path(__file__).parent
_FAKES = {str(path) for path in _HERE.glob("fake_*.py")}
_ROOT = str(_HERE.parent)


class Access(NamedTuple):
    """Somebody reads or writes."""

    stream: int
    number: int  # of what the stream was asked
    what: str
    writes: bool
    place: str

    def __str__(self) -> str:
        return f"{'write' if self.writes else 'read'} by {self.what} ({self.place})"


@dataclass
class _Cell:
    """Bytes with the same past."""

    end: int
    written: Access | None = None
    read: dict[int, Access] = field(default_factory=dict)  # the last of each stream since then


class _Spans:
    """The past of every byte, in cells that do not overlap."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._cells: list[_Cell] = []

    def _split(self, at: int) -> None:
        index = bisect_right(self._starts, at) - 1
        if index < 0 or self._starts[index] == at or self._cells[index].end <= at:
            return
        cell = self._cells[index]
        self._starts.insert(index + 1, at)
        self._cells.insert(index + 1, _Cell(cell.end, cell.written, dict(cell.read)))
        cell.end = at

    def past(self, start: int, end: int) -> Iterator[_Cell]:
        """The cells that have a byte of the span."""
        index = max(bisect_right(self._starts, start) - 1, 0)
        while index < len(self._starts) and self._starts[index] < end:
            if self._cells[index].end > start:
                yield self._cells[index]
            index += 1

    def note(self, start: int, end: int, access: Access) -> None:
        self._split(start)
        self._split(end)
        first, last = bisect_left(self._starts, start), bisect_left(self._starts, end)
        if access.writes:
            self._starts[first:last] = [start]
            self._cells[first:last] = [_Cell(end, access)]
            return
        at = start
        for begin, cell in [*zip(self._starts[first:last], self._cells[first:last], strict=True)]:
            if begin > at:
                self._add(at, begin, access)
            cell.read[access.stream] = access
            at = cell.end
        if at < end:
            self._add(at, end, access)

    def _add(self, start: int, end: int, access: Access) -> None:
        index = bisect_left(self._starts, start)
        self._starts.insert(index, start)
        self._cells.insert(index, _Cell(end, None, {access.stream: access}))


class Order:
    """The clocks and the memory.

    Attributes:
        faults: Pairs of accesses without an order, in words.
        host_spans: The lowest and highest address of the host that copies went to or from.
    """

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.host_spans: tuple[int, int] | None = None
        self._clocks = StreamSynchronizations()
        self._numbers = itertools.count(1)
        self._spans = _Spans()
        self._transfers: dict[int, tuple[int, int, Access]] = {}
        self.watched: dict[Any, weakref.ref[Any]] = {}  # requests by queue and token
        self._lock = threading.RLock()

    # Who waits for whom

    def new_stream(self) -> int:
        with self._lock:
            number = next(self._numbers)
            self._clocks.create_stream(number)
            return number

    def record(self, stream: int) -> int:
        """A new event that was recorded there."""
        with self._lock:
            event = next(self._numbers)
            self._clocks.create_event(event)
            self._clocks.record_state(event, stream)
            return event

    def wait(self, stream: int, event: int) -> None:
        with self._lock:
            self._clocks.stream_wait_for_event(stream, event)

    def host_waits(self, event: int) -> None:
        """Or has seen that the event was reached."""
        with self._lock:
            self._clocks.all_streams_wait_for_event(event)

    def host_waits_for_stream(self, stream: int) -> None:
        with self._lock:
            self._clocks.all_streams_wait_for_stream(stream)

    def host_waits_for_all(self) -> None:
        with self._lock:
            self._clocks.sync_all_streams()

    # Who reads and writes

    def asked(
        self, stream: int, what: str, reads: list[tuple[int, int]], writes: list[tuple[int, int]]
    ) -> None:
        """A stream is asked for something with these spans, each an address and a length."""
        with self._lock:
            number, place = next(self._numbers), here()
            self._clocks.update_seq_num(stream, number)
            for spans, is_write in ((reads, False), (writes, True)):
                access = Access(stream, number, what, is_write, place)
                for start, nbytes in spans:
                    if nbytes:
                        self._check(start, start + nbytes, access)
                        self._spans.note(start, start + nbytes, access)

    def forget(self, start: int, nbytes: int, streams: set[int]) -> None:
        """What these streams did there is done, for whoever has the memory next."""
        with self._lock:
            for cell in self._spans.past(start, start + nbytes):
                if cell.written is not None and cell.written.stream in streams:
                    cell.written = None
                cell.read = {s: access for s, access in cell.read.items() if s not in streams}

    def note_host(self, start: int, nbytes: int) -> None:
        """A copy goes to or from there."""
        lowest, highest = self.host_spans or (start, start)
        self.host_spans = min(lowest, start), max(highest, start + nbytes)

    def host(self, what: str, start: int, nbytes: int, writes: bool) -> None:
        """The host reads or writes now."""
        with self._lock:
            self._check(start, start + nbytes, Access(0, 0, what, writes, here()))

    def began(self, transfer: int, what: str, start: int, nbytes: int, writes: bool) -> None:
        """A drive reads or writes memory from now on."""
        with self._lock:
            access = Access(0, 0, what, writes, here())
            self._check(start, start + nbytes, access)
            self._transfers[transfer] = (start, start + nbytes, access)

    def ended(self, transfer: int) -> None:
        """The host knows that it no longer does."""
        with self._lock:
            self._transfers.pop(transfer, None)

    def noticed(self, key: Any) -> None:
        """A token of a completion queue tells that a request is done."""
        request = self.watched.get(key, lambda: None)()
        if request is not None:
            request.ended()

    def _check(self, start: int, end: int, access: Access) -> None:
        for cell in self._spans.past(start, end):
            others = [cell.written, *(cell.read.values() if access.writes else ())]
            for other in others:
                if other is not None and not self._is_after(access, other):
                    self._tell(access, other)
        if access.stream:
            for first, last, other in list(self._transfers.values()):
                if first < end and start < last and (access.writes or other.writes):
                    self._tell(access, other)

    def _is_after(self, access: Access, other: Access) -> bool:
        if access.stream == other.stream:
            return True
        if access.stream:
            return self._clocks.is_ordered_after(access.stream, other.number, other.stream)
        return other.number <= self._clocks.host_sync_state.get(other.stream, -1)

    def _tell(self, access: Access, other: Access) -> None:
        fault = f"no order: {access}, after {other}"
        if fault not in self.faults and len(self.faults) < 20:
            self.faults.append(fault)


def here() -> str:
    """The nearest lines that asked, but for those of the stand-in."""
    frame: Any = sys._getframe(1)
    lines: list[str] = []
    while frame is not None and len(lines) < 3:
        name = frame.f_code.co_filename
        if name.startswith(_ROOT) and name not in _FAKES and "/site-packages/" not in name:
            lines.append(f"{name[len(_ROOT) + 1 :]}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines) or "of torch"


class _Watched:
    """A request of an engine's, whose memory is the drive's until its end is noticed."""

    def __init__(self, order: Order, request: Any, transfers: list[Any], key: Any) -> None:
        self._order = order
        self._calls: list[int] = []  # of cuFile
        self._request = request
        self._transfers = transfers
        self._key = key  # its completion queue, and its token there
        order.watched[key] = weakref.ref(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    def start(self) -> None:
        if not self._request.started():
            for number, each in enumerate(self._transfers):
                writes = each.opcode == 0
                self._order.began(id(self) + number, "the drive", each.address, each.nbytes, writes)
        self._request.start()

    def called(self, call: int) -> None:
        """A call of cuFile for it has returned; nobody knows of it yet."""
        self._calls.append(call)

    def move(self, cq: Any) -> None:
        self._order.watched.pop(self._key, None)
        self._key = id(cq), self._key[1]
        self._order.watched[self._key] = weakref.ref(self)
        self._request.move(cq)

    def wait(self, timeout_s: float) -> bool:
        is_done = bool(self._request.wait(timeout_s))
        if is_done:
            self.ended()
        return is_done

    def moved(self) -> Any:
        self.ended()
        return self._request.moved()

    def outcome(self) -> Any:
        self.ended()
        return self._request.outcome()

    def ended(self) -> None:
        for number in range(len(self._transfers)):
            self._order.ended(id(self) + number)
        while self._calls:
            self._order.ended(self._calls.pop())

    def __del__(self) -> None:
        self.ended()
        self._order.watched.pop(self._key, None)


def watch_drives(patch: pytest.MonkeyPatch, order: Order) -> None:
    """Whatever engines of host memory read and write is known to the order.

    Short transfers go the general way: requests of theirs are not watched.
    """
    patch.setattr(ShortTransfers, "are_cheaper", lambda core: False)
    for engine in (LibaioEngine, ThreadsEngine, FakeEngine):
        for name in ("prepare", "prepare_rows", "prepare_batch"):
            if name in vars(engine):
                patch.setattr(engine, name, _watched(order, vars(engine)[name]))
    for queue in (libaio.LibaioQueue, _queued.EventfdQueue):
        for name in ("peek", "reap", "peek_ends"):
            if name in vars(queue):
                patch.setattr(queue, name, _noticing(order, vars(queue)[name]))


def watch_cufile(patch: pytest.MonkeyPatch, order: Order, reached: Callable[[int], int]) -> None:
    """cuFile's calls reach a device's memory, and are known to the order.

    From the call on, until its request's end is noticed; of a call that is nobody's request, until
    it returns.

    Args:
        patch: Undoes it.
        order: Which is told.
        reached: Where the byte is that a tensor has at an address.
    """
    here, numbers = threading.local(), itertools.count(-1, -1)

    def prepare(self: Any, cq: Any, token: int, transfer: Any) -> Any:
        request: Any = own_prepare(self, cq, token, transfer)
        watched = _Watched(order, request, [], (id(cq), token))
        request.watched = weakref.ref(watched)
        return watched

    def run(self: Any, task: Any) -> None:
        here.request = task.request
        try:
            own_run(self, task)
        finally:
            here.request = None

    def moving(name: str) -> Callable[..., int]:
        own = vars(Library)[name]

        def move(self: Any, handle: Any, base: int, size: int, at: int, offset: int) -> int:
            call = next(numbers)
            order.began(call, "cuFile", base + offset, size, name == "read")
            try:
                moved: int = own(self, handle, reached(base), size, at, offset)
            finally:
                request = getattr(here, "request", None)
                watched = request.watched() if request is not None else None
                order.ended(call) if watched is None else watched.called(call)
            return moved

        return move

    def registering(name: str) -> Callable[..., None]:
        own = vars(Library)[name]
        return lambda self, address, *rest: own(self, reached(address), *rest)

    own_prepare, own_run = CuFileEngine.prepare, TaskMover.run
    for name in ("register_memory", "unregister_memory"):
        patch.setattr(Library, name, registering(name))
    patch.setattr(CuFileEngine, "prepare", prepare)
    patch.setattr(TaskMover, "run", run)
    for name in ("read", "write"):
        patch.setattr(Library, name, moving(name))


def _noticing(order: Order, look: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def looked(queue: Any) -> Any:
        found = look(queue)
        for token in found[0] if isinstance(found, tuple) else found:
            order.noticed((id(queue), token))
        return found

    return looked


def _watched(order: Order, prepare: Callable[..., Any]) -> Callable[..., Any]:
    def watched(self: Any, cq: Any, token: int, given: Any, *rest: Any) -> Any:
        transfers = [given] if hasattr(given, "opcode") else list(given)
        moving = [each for each in transfers if each.opcode < 2 and each.nbytes]
        request = prepare(self, cq, token, given, *rest)
        return _Watched(order, request, moving, (id(cq), token))

    return watched
