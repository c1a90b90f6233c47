"""CUDA tensors on the host's engine: a ring of page-locked chunks between drive and device.

A transfer is cut into parts, each of a chunk at most. While one part goes between its chunk and
the device on a stream beside, the next ones are on their way between drive and memory, in both
directions:

    read    a free chunk → the host engine reads into it → upload → free
    write   a free chunk → download into it → the host engine writes it → free

There is never a copy of a whole tensor in host memory: the ring's size is all that it takes, made
once, at the first transfer. Transfers take turns, part by part, so a small one does not wait
behind a large one. A chunk is cut into cells for small ones, so that many of them are under way at
once; it is whole again when a large one needs it and its cells are free. `_device_ring_requests`
defines a part, also for gathers and scatters.

One thread (the pump) does all of this. It sleeps on the eventfds of the host engine and of
arriving transfers. CUDA's events cannot be slept on beside these, so while copies are under way it
looks at them every ms (poll(2) knows no less), or, with nothing going on at the drive, waits for
the oldest.
"""

from __future__ import annotations

import errno
import logging
import os
import select
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from nvmeio._memory.devices import Copier, Copy, Mark
from nvmeio._memory.tensors import Memory
from nvmeio._pages import PAGE_BYTES, round_down
from nvmeio._threads.threads import Thread
from nvmeio.engines import base, transfers
from nvmeio.engines._device_ring_requests import (
    PROMPT_BYTES,
    Chunks,
    RingPart,
    RingRequest,
    RingRowsRequest,
)
from nvmeio.engines._queued import QueuedEngine, counted
from nvmeio.errors import DeviceTimeoutError

logger = logging.getLogger("nvmeio")

# Four chunks keep the drive busy with two or three while one is copied. 16 MiB are 1.6 ms at
# 10 GB/s, long against a thread's waking up.
CHUNKS = 4
CHUNK_BYTES_MOST = 16 << 20
DEFAULT_BYTES = CHUNKS * CHUNK_BYTES_MOST
LEAST_BYTES = CHUNKS * 2 * PAGE_BYTES

# The cells of a chunk. By arithmetic, 64 reads of 64 KiB under way allow 4 GB/s, looked at once in
# a ms.
CELLS = 16

_LOOK_MS = 1  # how often copies under way are looked at


class RingEngine(QueuedEngine[RingRequest]):
    """Moves device memory through a host engine.

    Args:
        host: A started engine of host memory; outlives this one.
        copier: The device's copies.
        ring_bytes: Page-locked memory, `LEAST_BYTES` or more; cut into `CHUNKS` chunks of 16 MiB
            at most.
    """

    name = "ring"
    capabilities = base.Capabilities(rows=True, batches=True, works_through_another=True)

    def __init__(self, host: base.Engine, copier: Copier, ring_bytes: int = DEFAULT_BYTES) -> None:
        super().__init__()
        self._host = host
        self._copier = copier
        chunk = round_down(min(CHUNK_BYTES_MOST, ring_bytes // CHUNKS), PAGE_BYTES)
        if chunk < 2 * PAGE_BYTES:
            raise ValueError(f"a ring takes {LEAST_BYTES} bytes or more, not {ring_bytes}")
        self.chunk_bytes = chunk
        self.chunks = ring_bytes // chunk
        cell = round_down(chunk // CELLS, PAGE_BYTES)
        self.cell_bytes = cell if cell >= 2 * PAGE_BYTES else 0
        self._pump: Thread | None = None
        self._closed = False
        self.wake_fd = -1  # readable while there is something new
        self._inside = base.Counters()

    def start(self, options: base.Options) -> None:
        """Start the pump; the ring itself is made for the first transfer."""
        if self._pump is not None:
            raise RuntimeError("this engine was started before: one engine serves one handle")
        cq = base.open_gil_keeping_queue(self._host)
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        pump = Thread(_Pump(self, self._host, self._copier, cq).run, "nvmeio-ring")
        try:
            pump.start()
        except BaseException:  # no more threads in this process
            self.stop()
            if self.finished():
                cq.close()
            raise
        self._pump = pump

    def prepare(
        self, cq: base.CompletionQueue, token: int, transfer: base.Transfer
    ) -> base.Request:
        """A request that the pump takes up once it is started."""
        return RingRequest(self, token, transfer, cq)

    def prepare_rows(
        self, cq: base.CompletionQueue, token: int, transfer: base.Transfer, rows: base.Rows
    ) -> base.Request:
        """The same for rows.

        Raises:
            BackendUnavailableError: The host engine moves no rows.
        """
        base.check_rows(self._host)
        return RingRowsRequest(self, token, transfer, cq, rows)

    def conclude(self, request: RingRequest) -> None:
        """Count a request out; for rows, only those that the host engine has not counted."""
        if isinstance(request, RingRowsRequest) and request.pieces:
            self._counters = self._counters.plus(rows=request.large_rows, row_blocks=request.pieces)
        super().conclude(request)

    def nudge(self) -> None:
        with self.lock:
            if not self._closed:
                os.eventfd_write(self.wake_fd, 1)

    def stop(self) -> None:
        """Tell the pump to return once nothing is in flight."""
        self.stopping = True
        self.nudge()

    def join(self) -> None:
        """Wait for the pump."""
        if self._pump is not None:
            self._pump.join()

    def inside(self) -> base.Counters:
        """The host engine's counts of this one's transfers."""
        with self.lock:
            return self._inside

    # --- for the pump -----------------------------------------------------------------------

    def count_inside(self, opcode: int, nbytes: int, outcome: base.Outcome) -> None:
        """Note down one transfer of the host engine."""
        with self.lock:
            self._inside = counted(self._inside, opcode, nbytes, outcome)

    def finished(self) -> bool:
        """Whether the pump may return; the eventfd goes with it."""
        with self.lock:
            if not self.stopping or self.in_flight or self.arrivals:
                return False
            self._closed = True
            os.close(self.wake_fd)
            return True


_Stream = tuple[torch.device, int]  # of one direction, by its opcode


class _Copies(NamedTuple):
    """Parts that are copied together, and where the device is done with them."""

    mark: Mark
    parts: list[RingPart]


@dataclass(eq=False)
class _Pump:
    """The ring and its content; all of it belongs to the pump's thread."""

    engine: RingEngine
    host: base.Engine
    copier: Copier
    cq: base.CompletionQueue
    chunks: Chunks | None = None
    unready: list[RingRequest] = field(default_factory=list)
    ready: deque[RingRequest] = field(default_factory=deque)
    at_drive: dict[int, RingPart] = field(default_factory=dict)  # by their tokens
    last_token: int = 0
    some_ended: bool = False  # of these; the completion queue is readable
    landed: list[RingPart] = field(default_factory=list)  # read, and to be copied to the device
    # By stream, on which copies end in their order: it is enough to look at the oldest ones.
    at_device: dict[_Stream, deque[_Copies]] = field(default_factory=dict)
    broken: DeviceTimeoutError | None = None

    def run(self) -> None:
        """Run until the engine is stopped and nothing is in flight."""
        poller = select.poll()
        poller.register(self.engine.wake_fd, select.POLLIN)
        poller.register(self.cq.fileno(), select.POLLIN)
        try:
            while not self.engine.finished():
                if self._step():
                    continue
                if self.at_device and not (self.at_drive or self.unready):
                    self._wait_for_device()
                    continue
                looks = self.at_device or self.unready
                for fd, _ in poller.poll(_LOOK_MS if looks else None):
                    if fd != self.engine.wake_fd:
                        self.some_ended = True
                        continue
                    with suppress(BlockingIOError):
                        os.eventfd_read(fd)
        finally:
            self.cq.close()

    # --- one round --------------------------------------------------------------------------

    def _step(self) -> bool:
        """Move everything on that can be; whether anything was."""
        with self.engine.lock:
            arrived = self.engine.admitted()
        self.unready += arrived
        moved = bool(arrived)
        moved |= self._look_at_unready()
        moved |= self._look_at_drive()
        moved |= self._look_at_device()
        return self._begin_parts() or moved

    def _look_at_unready(self) -> bool:
        """Begin transfers whose memory the device is done with; end cancelled ones."""
        moved = False
        for request in list(self.unready):
            ready = request.transfer.memory.ready
            if not request.checked():
                continue
            if not request.exhausted and not request.reached(ready):
                continue
            self.unready.remove(request)
            self.ready.append(request)
            moved = True
        return moved

    def _look_at_drive(self) -> bool:
        # One call for all: each lets go of the GIL, which a busy thread keeps for 5 ms.
        ended = self.cq.reap() if self.some_ended else []
        self.some_ended = False
        for token in ended:
            self._guard(self.at_drive.pop(token), self._after_drive)
        self._upload_landed()
        for part in self.at_drive.values():
            if part.request.stop and not part.cancelled:
                assert part.host is not None
                part.cancelled = True
                part.host.cancel()
        return bool(ended)

    def _look_at_device(self) -> bool:
        moved = False
        for stream, copies in list(self.at_device.items()):
            while copies and self._reached(copies[0]):
                for part in copies.popleft().parts:
                    self._guard(part, self._after_device)
                moved = True
            if not copies:
                del self.at_device[stream]
        return moved

    def _reached(self, copies: _Copies, wait: bool = False) -> bool:
        """Whether these are made, or failed with the device's error."""
        try:
            if wait:
                copies.mark.wait()
            return copies.mark.done()
        except Exception as failed:
            for part in copies.parts:
                part.request.fail(errno.EIO, failed)
            return True

    def _wait_for_device(self) -> None:
        self._reached(next(iter(self.at_device.values()))[0], wait=True)

    def _begin_parts(self) -> bool:
        moved = False
        while self.ready:
            request = self.ready[0]
            if request.exhausted:
                self.ready.popleft()
                self._retire(request)
                moved = True
                continue
            chunk = self._chunk_for(request)
            if request.exhausted:  # there is no memory for the ring
                continue
            if chunk is None:
                return moved
            self.ready.popleft()
            moved = True
            part = self._cut(request, chunk)
            if part is None:
                continue
            if not request.exhausted:
                self.ready.append(request)
            self._guard(part, self._begin)
        return moved

    # --- parts -----------------------------------------------------------------------------

    def _chunk_for(self, request: RingRequest) -> torch.Tensor | None:
        """A chunk, or a cell of one if that is enough; None if none is free."""
        engine = self.engine
        if self.broken is not None:
            request.fail(errno.EIO, self.broken)
            return None
        if self.chunks is None:
            try:
                device = request.transfer.memory.device
                assert device is not None
                ring = self.copier.page_locked(engine.chunks * engine.chunk_bytes, device.device)
            except Exception as failed:
                request.fail(getattr(failed, "errno", None) or errno.ENOMEM, failed)
                return None
            self.chunks = Chunks(ring, engine.chunk_bytes, engine.cell_bytes)
        return self.chunks.take(request.wanted_bytes)

    def _cut(self, request: RingRequest, chunk: torch.Tensor) -> RingPart | None:
        """The next part; None if there can be none, and the transfer is over with it."""
        try:
            part = request.cut(chunk)
        except ValueError as failed:
            request.fail(errno.ERANGE, failed)
            self._give_back(chunk)
            self._retire(request)
            return None
        request.parts_out += 1
        return part

    def _begin(self, part: RingPart) -> None:
        if part.request.transfer.opcode == base.Opcode.READ:
            self._to_drive(part)
        else:
            self._at_device([part], self.copier.download(self._copy(part)))

    def _to_drive(self, part: RingPart, buffered: bool = False) -> None:
        transfer = part.request.transfer
        assert self.chunks is not None
        address = part.chunk.data_ptr() + part.shift
        memory = Memory(address, part.nbytes, self.chunks.storage, None)
        plan = transfers.plan if part.rows is None else transfers.plan_rows
        if buffered:
            plan = transfers.plan_buffered
        opcode = base.Opcode(transfer.opcode)
        part.plan, planned = plan(opcode, memory, transfer.opened, part.file_offset)
        self._submit(part, planned)

    def _submit(self, part: RingPart, planned: base.Transfer) -> None:
        self.last_token = part.token = self.last_token + 1
        part.host = base.prepare(self.host, self.cq, part.token, planned, part.rows)
        part.host.start()
        self.at_drive[part.token] = part

    def _after_drive(self, part: RingPart) -> None:
        assert part.host is not None and part.plan is not None
        request, outcome = part.request, part.host.outcome()
        transfer = request.transfer
        self.engine.count_inside(transfer.opcode, part.nbytes, outcome)
        if outcome.error == errno.EINVAL and part.plan.direct and not request.stop:
            logger.warning("%s refused direct I/O: buffered instead", transfer.opened.path)
            self._to_drive(part, buffered=True)
            return
        reads = transfer.opcode == base.Opcode.READ
        if reads and request.cancelled:
            self._drop(part)  # not counted as moved: the device does not have it, nor will it
            return
        request.landed(part, outcome)
        request.buffered += outcome.buffered_bytes
        request.bounced += outcome.direct_bytes + outcome.bounced_bytes
        if not reads or not part.nbytes:
            self._drop(part)
            return
        self.landed.append(part)

    def _upload_landed(self) -> None:
        """Copy all that has landed, with one mark for each device: it costs as much as a copy."""
        by_device: defaultdict[torch.device, list[RingPart]] = defaultdict(list)
        landed, self.landed = self.landed, []
        for part in landed:
            by_device[part.device].append(part)
        for parts in by_device.values():
            try:
                self._upload(parts)
            except Exception:  # whose it is, each tells alone
                for part in parts:
                    self._guard(part, lambda part: self._upload([part]))

    def _upload(self, parts: list[RingPart]) -> None:
        self._at_device(parts, self.copier.upload([self._copy(part) for part in parts]))

    def _copy(self, part: RingPart) -> Copy:
        device = part.request.transfer.memory.device
        assert device is not None and self.chunks is not None
        prompt = self.chunks.are_prompt and part.nbytes >= PROMPT_BYTES
        return Copy(device, part.start, part.chunk, part.shift, part.nbytes, prompt)

    def _at_device(self, parts: list[RingPart], mark: Mark) -> None:
        opcode = parts[0].request.transfer.opcode
        self.at_device.setdefault((parts[0].device, opcode), deque()).append(_Copies(mark, parts))

    def _after_device(self, part: RingPart) -> None:
        if part.request.transfer.opcode == base.Opcode.READ or part.request.stop:
            self._drop(part)
        else:
            self._to_drive(part)

    def _drop(self, part: RingPart) -> None:
        """Free the chunk of a part, which may have been its transfer's last."""
        if isinstance(part.request.cause, DeviceTimeoutError):
            self.broken = part.request.cause  # the device may write to the chunk even now
        else:
            self._give_back(part.chunk)
        part.request.parts_out -= 1
        self._retire(part.request)

    def _give_back(self, chunk: torch.Tensor) -> None:
        assert self.chunks is not None
        self.chunks.give_back(chunk)

    def _retire(self, request: RingRequest) -> None:
        if request.parts_out or not request.exhausted or request.done:
            return
        with self.engine.lock:
            self.engine.conclude(request)

    # --- the device's errors ------------------------------------------------------------------

    def _guard(self, part: RingPart, step: Callable[[RingPart], None]) -> None:
        """Do a step whose failure (torch's, say) is its transfer's, not the pump's end."""
        try:
            step(part)
        except Exception as failed:
            part.request.fail(errno.EIO, failed)
            if part.token not in self.at_drive:
                self._drop(part)
