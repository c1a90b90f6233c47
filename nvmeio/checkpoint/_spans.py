"""Many spans of files into memory, as few large direct reads: the machinery of every load.

The caller names spans (file, offset, length); back comes one byte tensor for each, whose storage
has exactly the span's bytes, so that tensors of any dtype are laid over it without a copy.

How it works: file pages are read into memory pages, so a span lies at the same offset within its
memory page as within its file page and direct I/O needs no bounce. `plan` decides what lies where:

- a large span gets a mapping of its own, which goes when its last tensor goes;
- small spans share arenas of limited size, in the order of the file. Neighbours are read in one
  go, and what lies between them (headers, padding) is read along.

The memory is not touched beforehand: the kernel finds the pages while it pins them for the drive,
on the lane's thread, beside the transfers that it has submitted before. Populated first, 2 GiB
loaded at 2.6 GB/s; populated piece by piece ahead of the reads at 3.1; not at all, 3.2 (into memory
that was there already, 3.3).

For another device the same reads go through a ring of page-locked chunks, each copied on as it
arrives, so that host memory stays bounded whatever the size.

Order of reading: `Span`, `plan`, `read`, `async_read`, then `_Load`, which both of these run.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from nvmeio import _memory, buffers, files
from nvmeio._plan import PAGE_BYTES
from nvmeio.errors import ShortTransferError, TransferError
from nvmeio.files import File
from nvmeio.handle import AioHandle
from nvmeio.operation import Operation

logger = logging.getLogger("nvmeio")

# A span from here on has a mapping of its own.
OWN_BYTES = 8 << 20

# What an arena of smaller spans grows to: the most that one small tensor can keep alive.
ARENA_BYTES = 16 << 20

# Bytes between two small spans that are read along rather than cut the run in two. A request costs
# about 30 us of Python and of the kernel, in which a drive moves 100 KiB.
HOLE_BYTES = 64 << 10

# In flight at most: enough for the queue of a lane (128 MiB by default) and its refill.
FLIGHT_BYTES = 512 << 20
FLIGHT_READS = 256

# The ring for other devices: 4 chunks keep both the drive and the copies busy.
CHUNK_BYTES = 32 << 20
CHUNKS = 4


class Span(NamedTuple):
    """A part of a file.

    Attributes:
        file: A path, or a `nvmeio.File` open for reading (which stays open).
        offset: First byte, >= 0; any alignment.
        nbytes: Length in bytes, >= 0.
        name: What it is to the user, for error messages.
    """

    file: str | os.PathLike[str] | File
    offset: int
    nbytes: int
    name: str = ""


class Run(NamedTuple):
    """One read: [start, end) of a file, from a page boundary on, to `at` in its region."""

    file: int
    start: int
    end: int
    at: int


class Region(NamedTuple):
    """One mapping, the reads that fill it, and the spans in it as (index, offset in the region)."""

    nbytes: int
    runs: list[Run]
    places: list[tuple[int, int]]


def read(
    handle: AioHandle,
    spans: Sequence[Span],
    device: str | torch.device = "cpu",
) -> list[torch.Tensor]:
    """Read spans of files; blocks, in any thread, with an event loop or without.

    Args:
        handle: Moves the bytes.
        spans: What to read, in any order; spans of one file must not overlap.
        device: "cpu": memory of nvmeio, on huge pages. "meta": nothing is read. Any other: copied
            there chunk by chunk, through 128 MiB of page-locked memory.

    Returns:
        For each span, in the order given, a contiguous 1-D uint8 tensor of `nbytes` elements. Its
        storage is of exactly that size (`tensor.untyped_storage()`), and on the CPU its address
        equals `offset` modulo the page size. Small spans share an arena of at most 16 MiB that
        lives as long as any of them; a span of 8 MiB or more shares with none.

    Raises:
        ShortTransferError: A span ends beyond its file, known before anything is allocated; or
            the file was cut while it was read.
        TransferError: The file cannot be opened or read; names file and span.
        MemoryError: More is asked for than is available; nothing was allocated.
        ValueError: A span is negative or overlaps another.

    After an error or cancellation: nothing is in flight, and nothing is kept.

    Cost: no copy for the CPU but of the last, partial block of a file. One system call a file to
    open it, about 30 us of Python a read.
    """
    return _Load(handle, spans, torch.device(device)).run()


async def async_read(
    handle: AioHandle,
    spans: Sequence[Span],
    device: str | torch.device = "cpu",
) -> list[torch.Tensor]:
    """`read`, awaited: a thread does it, so that no part of it holds up the event loop.

    Cancelling stops it; `CancelledError` is raised once nothing is in flight any more.
    """
    load = _Load(handle, spans, torch.device(device))
    found: list[torch.Tensor] = await in_thread(load.run, load.cancel)
    return found


async def in_thread(work: Callable[[], Any], cancel: Callable[[], None]) -> Any:
    """Run `work` in a thread of its own and await its value.

    When the awaiting task is cancelled, `cancel` is called, the end of `work` is awaited all the
    same, and only then `CancelledError` goes on. A thread of its own, since a loop's default pool
    may be full of what waits for this.
    """
    loop = asyncio.get_running_loop()
    ended: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            value = work()
        except BaseException as failed:
            ended.set_exception(failed)
        else:
            ended.set_result(value)

    waiter = asyncio.Event()

    def wake(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and its tasks with it
            loop.call_soon_threadsafe(waiter.set)

    ended.add_done_callback(wake)
    threading.Thread(target=run, name="nvmeio-load", daemon=True).start()
    try:
        await waiter.wait()
    except asyncio.CancelledError:
        cancel()
        while not ended.done():
            with contextlib.suppress(asyncio.CancelledError):
                await waiter.wait()
        ended.exception()
        raise
    except BaseException:  # the coroutine is closed: nobody can wait any more
        cancel()
        raise
    return ended.result()


# Planning: no I/O


def plan(spans: Sequence[Span], keys: Sequence[int], sizes: Sequence[int]) -> list[Region]:
    """Where each span lies in memory, and the reads that bring it there.

    Args:
        spans: The spans; `file` is not looked at.
        keys: For each span, the index of its file.
        sizes: For each file, its size in bytes.

    Returns:
        Regions of whole pages. A read begins on a page boundary in file and memory, and ends on
        one or where the file ends. Spans of no bytes are in none.

    Raises:
        ValueError: Two spans of one file overlap.
    """
    order = sorted(
        (index for index, span in enumerate(spans) if span.nbytes),
        key=lambda index: (keys[index], spans[index].offset),
    )
    regions: list[Region] = []
    arena = _Arena()
    before: int | None = None
    for index in order:
        key, span = keys[index], spans[index]
        if before is not None and keys[before] == key:
            previous = spans[before]
            if previous.offset + previous.nbytes > span.offset:
                raise ValueError(
                    f"{_named(previous)} [{previous.offset}, {previous.offset + previous.nbytes}) "
                    f"and {_named(span)} [{span.offset}, {span.offset + span.nbytes}) overlap"
                )
        before = index
        if span.nbytes >= OWN_BYTES:
            start = span.offset // PAGE_BYTES * PAGE_BYTES
            end = span.offset + span.nbytes
            runs = [Run(key, start, _read_to(end, sizes[key]), 0)]
            regions.append(
                Region(_pages(end) - start, runs, [(index, span.offset - start)]),
            )
        elif not arena.add(index, span, key, sizes[key]):
            regions.append(arena.region())
            arena = _Arena()
            arena.add(index, span, key, sizes[key])
    if arena.places:
        regions.append(arena.region())
    return regions


class _Arena:
    """Small spans gathered until they are enough for a region."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.places: list[tuple[int, int]] = []
        self._nbytes = 0

    def add(self, index: int, span: Span, key: int, size: int) -> bool:
        """Take in a span that lies behind all others of its file; False if it is too much."""
        start, end = span.offset // PAGE_BYTES * PAGE_BYTES, span.offset + span.nbytes
        last = self.runs[-1] if self.runs else None
        joins = last is not None and last.file == key and start - last.end <= HOLE_BYTES
        run = Run(key, start, start, self._nbytes)
        if joins and last is not None:
            run = last
        grown = run.at + _pages(end) - run.start
        if self.runs and grown > ARENA_BYTES:
            return False
        if joins:
            self.runs.pop()
        self.runs.append(run._replace(end=max(run.end, _read_to(end, size))))
        self.places.append((index, run.at + span.offset - run.start))
        self._nbytes = max(self._nbytes, grown)
        return True

    def region(self) -> Region:
        return Region(self._nbytes, self.runs, self.places)


def _pages(position: int) -> int:
    return -(-position // PAGE_BYTES) * PAGE_BYTES


def _read_to(end: int, size: int) -> int:
    """Up to a page boundary, which is no more work for the drive and spares a bounce."""
    return min(_pages(end), size)


# Reading


class _Cancelled(Exception):
    """`_Load.cancel` was called; whoever called it knows."""


class _Load:
    """One `read`, from the check of its arguments to its last byte."""

    def __init__(self, handle: AioHandle, spans: Sequence[Span], device: torch.device) -> None:
        for span in spans:
            if span.offset < 0 or span.nbytes < 0:
                raise ValueError(f"{_named(span)} has a negative offset or length: {span}")
        self._handle = handle
        self._spans = spans
        self._device = device
        self._files: list[File] = []
        self._flying: deque[tuple[Operation, Run, Region]] = deque()
        self._flying_bytes = 0
        self._lock = threading.Lock()  # of _flying, which `cancel` looks at from another thread
        self._stopping = False

    def cancel(self) -> None:
        """Stop soon; `run` raises once nothing is in flight."""
        with self._lock:
            self._stopping = True
            for operation, _, _ in self._flying:
                operation.cancel()

    def run(self) -> list[torch.Tensor]:
        """Do it; see `read`."""
        if self._device.type == "meta":
            return [self._new(span.nbytes) for span in self._spans]
        with contextlib.ExitStack() as opened:
            keys = self._open(opened)
            regions = plan(self._spans, keys, [file.size() for file in self._files])
            try:
                return self._to_host(regions) if self._on_host else self._through(regions)
            except BaseException:
                self._stop()
                raise

    @property
    def _on_host(self) -> bool:
        return self._device.type == "cpu"

    def _new(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def _open(self, opened: contextlib.ExitStack) -> list[int]:
        """Open each file once; for each span the index of its file."""
        known: dict[Any, int] = {}
        keys: list[int] = []
        sizes: list[int] = []
        for span in self._spans:
            given = span.file
            name: Any = given if isinstance(given, File) else os.fspath(given)
            if name not in known:
                known[name] = len(self._files)
                if not isinstance(given, File):
                    given = opened.enter_context(files.open(given))
                self._files.append(given)
                sizes.append(given.size())
            keys.append(known[name])
            if span.offset + span.nbytes > sizes[keys[-1]]:
                size = sizes[keys[-1]]
                raise ShortTransferError(
                    errno.ENODATA,
                    operation="pread",
                    path=self._files[keys[-1]].path,
                    file_offset=span.offset,
                    nbytes=span.nbytes,
                    transferred=0,
                    detail=f"the file ends at byte {size}, before the end of {_named(span)}",
                )
        return keys

    # To host memory

    def _to_host(self, regions: list[Region]) -> list[torch.Tensor]:
        # Reserved one by one and never touched here, they would all seem to fit.
        _memory._check_available(
            sum(span.nbytes for span in self._spans), sum(region.nbytes for region in regions)
        )
        found: dict[int, torch.Tensor] = {}
        for region in regions:
            mapping = _memory.Mapping(region.nbytes)
            for run in region.runs:
                self._start(
                    mapping.tensor(run.at, (run.end - run.start,), torch.uint8), run, region
                )
            for index, at in region.places:
                found[index] = mapping.tensor(at, (self._spans[index].nbytes,), torch.uint8)
        while self._flying:
            self._finish_first()
        return [
            found[index] if span.nbytes else self._new(0) for index, span in enumerate(self._spans)
        ]

    # Through a ring of chunks to another device

    def _through(self, regions: list[Region]) -> list[torch.Tensor]:
        found = [self._new(span.nbytes) for span in self._spans]
        copies = _Copies(self._device)
        ring = [_chunk(self._device) for _ in range(min(CHUNKS, sum(1 for _ in _chunks(regions))))]
        waiting: deque[tuple[torch.Tensor, Run, Region]] = deque()

        def pass_on() -> None:
            chunk, run, region = waiting.popleft()
            self._finish_first()
            for span_index, at in _inside(run, region, self._spans):
                span = self._spans[span_index]
                start, end = max(at, run.at), min(at + span.nbytes, run.at + run.end - run.start)
                target = found[span_index][start - at : end - at]
                copies.copy(target, chunk[start - run.at : end - run.at])
            copies.mark(chunk)

        try:
            for number, (run, region) in enumerate(_chunks(regions)):
                chunk = ring[number % len(ring)]
                if number >= len(ring):
                    pass_on()
                copies.wait_for(chunk)
                self._start(chunk[: run.end - run.start], run, region)
                waiting.append((chunk, run, region))
            while waiting:
                pass_on()
        finally:
            copies.finish()
        return found

    # What is in flight

    def _start(self, tensor: torch.Tensor, run: Run, region: Region) -> None:
        while self._flying and (
            self._flying_bytes + tensor.nbytes > FLIGHT_BYTES or len(self._flying) >= FLIGHT_READS
        ):
            self._finish_first()
        with self._lock:
            if self._stopping:
                raise _Cancelled
            operation = self._handle.async_pread(tensor, self._files[run.file], run.start)
            self._flying.append((operation, run, region))
        self._flying_bytes += tensor.nbytes

    def _finish_first(self) -> None:
        operation, run, region = self._flying[0]
        try:
            operation.result()
        except concurrent.futures.CancelledError:
            raise _Cancelled from None
        except TransferError as failed:
            raise self._told(failed, run, region) from failed
        with self._lock:
            self._flying.popleft()
        self._flying_bytes -= run.end - run.start

    def _stop(self) -> None:
        """Cancel what is in flight and wait for it."""
        self.cancel()
        while self._flying:
            with contextlib.suppress(concurrent.futures.CancelledError):
                self._flying[0][0].exception()
            with self._lock:
                self._flying.popleft()

    def _told(self, failed: TransferError, run: Run, region: Region) -> TransferError:
        """The error, with the names of what was to be read."""
        names = [_named(self._spans[index]) for index, _ in _inside(run, region, self._spans)]
        wanted = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        kind = ShortTransferError if isinstance(failed, ShortTransferError) else TransferError
        code = failed.errno or errno.EIO
        return kind(
            code,
            operation=failed.operation,
            path=failed.path,
            file_offset=failed.file_offset,
            nbytes=failed.nbytes,
            transferred=failed.transferred,
            detail=f"{failed._detail or os.strerror(code)} (read for {wanted})",
        )


def _named(span: Span) -> str:
    return span.name or f"the span at byte {span.offset}"


def _chunks(regions: list[Region]) -> Iterator[tuple[Run, Region]]:
    """The reads of all regions, cut to the size of a chunk."""
    for region in regions:
        for run in region.runs:
            for start in range(run.start, run.end, CHUNK_BYTES):
                end = min(start + CHUNK_BYTES, run.end)
                yield run._replace(start=start, end=end, at=run.at + start - run.start), region


def _inside(run: Run, region: Region, spans: Sequence[Span]) -> list[tuple[int, int]]:
    """The spans that have bytes in a run, as (index, offset in the region)."""
    first, last = run.at, run.at + run.end - run.start
    return [
        (index, at) for index, at in region.places if at < last and at + spans[index].nbytes > first
    ]


def _chunk(device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        try:
            return buffers.empty_pinned(CHUNK_BYTES, dtype=torch.uint8)
        except OSError as refused:
            logger.info("loading through memory that is not page-locked: %s", refused)
    return buffers.empty_aligned(CHUNK_BYTES, dtype=torch.uint8)


class _Copies:
    """Copies to a device: on a CUDA stream of their own, or one after another elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = None
        self._marks: dict[int, Any] = {}
        if device.type == "cuda":
            cuda: Any = torch.cuda
            self._stream = cuda.Stream(device)
            # The targets' memory may still be read by work that was queued before it was freed.
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def copy(self, target: torch.Tensor, chunk: torch.Tensor) -> None:
        """Start one copy; `chunk` must stay as it is until `wait_for`."""
        if self._stream is None:
            target.copy_(chunk)
            return
        with torch.cuda.stream(self._stream):
            target.copy_(chunk, non_blocking=True)

    def mark(self, chunk: torch.Tensor) -> None:
        """All copies out of this chunk have been started."""
        if self._stream is not None:
            self._marks[chunk.data_ptr()] = self._stream.record_event()

    def wait_for(self, chunk: torch.Tensor) -> None:
        """Wait until the chunk may be overwritten."""
        mark = self._marks.pop(chunk.data_ptr(), None)
        if mark is not None:
            mark.synchronize()

    def finish(self) -> None:
        """Wait for all copies: their targets may be used on any stream, the chunks freed."""
        if self._stream is not None:
            self._stream.synchronize()
