"""Spans of a file that all ranks want, each byte read by one of them: `spans.read`, together.

The memory that `spans.plan_reads` lays out is cut into rounds, each round into even parts, one a
rank. A rank reads its parts ahead (a few rounds of them are in flight), and once all have read
those of a round, each sends its own to the others (`exchange`). So the drives and the connections
work at the same time, and of each byte that is wanted there is one read in all.

To host memory there is nothing in between: a part is read to where it is wanted, sent from there,
and received into its place. For another device there are two rings of chunks.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import zip_longest
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from nvmeio._distributed.exchange import Exchange
from nvmeio._io.inflight import InFlight, Stagings
from nvmeio._io.long_call import LongCall
from nvmeio._io.spans import ChunkCopies, Region, Run, Span, in_mappings, inside, named, plan_reads
from nvmeio._memory import devices, mappings, system
from nvmeio._memory.mappings import Prefault
from nvmeio._pages import PAGE_BYTES, round_up
from nvmeio.files import File
from nvmeio.handle import AioHandle

# A rank's part of a round: large enough that to agree once a round costs nothing.
PART_BYTES = 16 << 20

# For other devices: parts that are read ahead, and parts on their way between ranks.
_READ_CHUNKS = 3
_SENT_CHUNKS = 3


class SharedPart(NamedTuple):
    """The bytes that one rank reads: [start, end) of a region's memory, in whole pages."""

    rank: int
    region: int
    start: int
    end: int


class RankSpan(NamedTuple):
    """Bytes [start, end) of what is read, in whole pages, in a file that one rank has.

    `file` is None on other ranks. `shift` is added to offsets of what is read to have the file's.
    """

    start: int
    end: int
    rank: int
    file: File | None
    shift: int


class _Shared(NamedTuple):
    """The spans that all ranks want, their memory, and the ranks."""

    spans: Sequence[Span]
    regions: Sequence[Region]
    exchange: Exchange

    def label(self, run: Run, region: Region) -> str:
        names = [named(self.spans[index]) for index, _ in inside(run, region, self.spans)]
        return f"read for {', '.join(names[:3])}" + (" and more" if len(names) > 3 else "")


class _LocalFiles(NamedTuple):
    """The files that this rank reads, and its handle."""

    handle: AioHandle
    file: File
    sources: Sequence[RankSpan]

    def place(self, run: Run) -> tuple[File, int]:
        """The file that has a run of a part of this rank, and where in it."""
        if not self.sources:
            return self.file, run.start
        source = self.sources[_index_of(self.sources, run.start)]
        assert source.file is not None  # a part is of a source that its rank has
        return source.file, run.start + source.shift


def _index_of(sources: Sequence[RankSpan], at: int) -> int:
    return bisect_right(sources, at, key=attrgetter("start")) - 1


def rounds(sizes: Sequence[int], ranks: int, most: int) -> Iterator[list[SharedPart]]:
    """Cut regions into rounds of even parts, in whole pages; `most` bytes of a rank in a round.

    Yields the parts of a round, in the order of the memory; a rank has several if it meets the end
    of a region. All rounds together are all of the regions, once.
    """
    total, at, region, begin = sum(sizes), 0, 0, 0
    while at < total:
        nbytes = min(total - at, ranks * most)
        cuts = [at + nbytes // PAGE_BYTES * rank // ranks * PAGE_BYTES for rank in range(ranks)]
        parts: list[SharedPart] = []
        for rank, (low, high) in enumerate(zip(cuts, [*cuts[1:], at + nbytes], strict=True)):
            while low < high:
                while begin + sizes[region] <= low:
                    begin += sizes[region]
                    region += 1
                end = min(high, begin + sizes[region])
                parts.append(SharedPart(rank, region, low - begin, end - begin))
                low = end
        yield parts
        at += nbytes


def rounds_by_source(
    regions: Sequence[Region], sources: Sequence[RankSpan], ranks: int, most: int
) -> Iterator[list[SharedPart]]:
    """Cut regions into rounds if each rank can read only what it has.

    `sources` say who has what, in ascending order and without a gap; all of it once. Yields the
    parts of a round, one at most of each rank: each has something to do for as long as it has bytes
    that are not read yet.
    """
    queues: list[list[SharedPart]] = [[] for _ in range(ranks)]
    before = -1  # the source of the part that was last
    for number, region in enumerate(regions):
        for run in region.runs:
            low, end = run.start, round_up(run.end, PAGE_BYTES)
            while low < end:
                index = _index_of(sources, low)
                source, queue = sources[index], queues[sources[index].rank]
                at, stop = run.at + low - run.start, run.at + min(end, source.end) - run.start
                low += stop - at
                last = queue[-1] if queue else None
                if last and before == index and (last.region, last.end) == (number, at):
                    at = queue.pop().start
                for start in range(at, stop, most):
                    queue.append(SharedPart(source.rank, number, start, min(start + most, stop)))
                before = index
    for parts in zip_longest(*queues):
        yield [part for part in parts if part is not None]


def read_together(
    spans: Sequence[Span],
    device: torch.device,
    exchange: Exchange,
    *,
    handle: AioHandle,
    file: File,
    call: LongCall,
    sources: Sequence[RankSpan] = (),
) -> list[torch.Tensor]:
    """Read spans of one file, each rank its parts; the same spans on all of them. As `spans.read`.

    `device` is where this rank wants them; others may want them elsewhere. `file` is as this rank
    has it. `sources` say who has what of the file, unless all ranks have all of it. All ranks raise
    if one does.
    """
    flight = InFlight()
    call.then(flight.cancel)
    with contextlib.ExitStack() as opened, flight:
        with exchange.agreeing():
            regions = plan_reads(spans, [0] * len(spans), [file.size()])
            sizes = [region.nbytes for region in regions]
            parts = list(
                rounds_by_source(regions, sources, exchange.size, PART_BYTES)
                if sources
                else rounds(sizes, exchange.size, PART_BYTES)
            )
            mine = [[part for part in each if part.rank == exchange.rank] for each in parts]
            if not on_host(device) and device.type != "meta":
                opened.enter_context(devices.on(device))
            shared = _Shared(spans, regions, exchange)
            at_once = max(map(len, mine), default=0)
            places = _InHost(shared) if on_host(device) else _OnDevice(shared, device, at_once)
            opened.enter_context(places)
            ahead = _ReadAhead(shared, mine, _LocalFiles(handle, file, sources), flight)
        call.expect(sum(sizes))
        for each, of_me in zip(parts, mine, strict=True):
            with exchange.agreeing():
                ahead.read(len(of_me), places)
            for part in each:
                places.send(part)
            call.moved(sum(part.end - part.start for part in each))
        with exchange.agreeing():
            places.finish()
        return places.found()


class _ReadAhead:
    """The parts that this rank reads, in their order, as early as there is room for them."""

    def __init__(
        self,
        shared: _Shared,
        parts: Sequence[Sequence[SharedPart]],
        files: _LocalFiles,
        flight: InFlight,
    ) -> None:
        self._shared, self._files, self._flight = shared, files, flight
        self._waiting = deque(part for each in parts for part in each)
        self._there = self._due = 0

    def read(self, parts: int, places: _InHost | _OnDevice) -> None:
        """Wait until so many more are there, and begin later ones."""
        self._due += parts
        while True:
            while self._waiting and self._flight.has_room(PART_BYTES):
                memory = places.to_read(self._waiting[0])
                if memory is None:
                    break
                self._begin(self._waiting.popleft(), memory)
            if self._there >= self._due:
                return
            self._flight.finish_first()

    def _begin(self, part: SharedPart, memory: torch.Tensor) -> None:
        region = self._shared.regions[part.region]
        reads = list(_reads(part, region))
        if not reads:  # behind the end of the file
            self._arrived()
            return
        places = [self._files.place(run) for run in reads]
        begin = partial(
            self._files.handle.async_pread_batch,
            [memory[run.at - part.start :][: run.end - run.start] for run in reads],
            [file for file, _ in places],
            [offset for _, offset in places],
        )
        nbytes = sum(run.end - run.start for run in reads)
        label = self._shared.label
        self._flight.start(begin, nbytes, self._arrived, lambda i: label(reads[i], region))

    def _arrived(self) -> None:
        self._there += 1


def on_host(device: torch.device) -> bool:
    return device.type == "cpu"


def _reads(part: SharedPart, region: Region) -> Iterator[Run]:
    """The parts of the region's runs that lie in one part of it."""
    for run in region.runs:
        low, high = max(run.at, part.start), min(run.at + run.end - run.start, part.end)
        if low < high:
            yield run._replace(
                start=run.start + low - run.at, end=run.start + high - run.at, at=low
            )


class _InHost:
    """A region in host memory: read, sent and received in its place."""

    def __init__(self, shared: _Shared) -> None:
        spans, regions, _ = shared
        self._spans, self._regions, self._exchange = shared
        nbytes = sum(region.nbytes for region in regions)
        system.check_available(sum(span.nbytes for span in spans), nbytes)
        self._mappings = [mappings.Mapping(region.nbytes) for region in regions]
        self._prefault = Prefault(self._mappings)
        self._works: deque[Any] = deque()

    def __enter__(self) -> _InHost:
        self._prefault.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._prefault.__exit__(*raised)

    def to_read(self, part: SharedPart) -> torch.Tensor:
        return self._mappings[part.region].tensor(part.start, (part.end - part.start,), torch.uint8)

    def send(self, part: SharedPart) -> None:
        """Begin to send it, or to receive it."""
        while len(self._works) >= self._exchange.size + 1:
            self._exchange.wait(self._works.popleft())
        self._works.append(self._exchange.start(self.to_read(part), part.rank))
        self._prefault.check()

    def finish(self) -> None:
        """Wait until everything is there."""
        while self._works:
            self._exchange.wait(self._works.popleft())

    def found(self) -> list[torch.Tensor]:
        return in_mappings(self._spans, self._regions, self._mappings)


class _OnDevice:
    """A region on a device, reached in chunks; nothing on the meta device."""

    def __init__(self, shared: _Shared, device: torch.device, at_once: int) -> None:
        spans, regions, _ = shared
        self._regions, self._exchange = regions, shared.exchange
        self._found = [torch.empty(s.nbytes, dtype=torch.uint8, device=device) for s in spans]
        self._is_meta = device.type == "meta"
        most = min(PART_BYTES, max((region.nbytes for region in regions), default=0))
        staged = torch.device("cpu") if self._is_meta else device
        self._reading = Stagings(most, max(_READ_CHUNKS, at_once), staged)
        self._receiving = Stagings(most, _SENT_CHUNKS, staged)
        self._copies = ChunkCopies(device, spans, self._found)
        self._read: dict[SharedPart, torch.Tensor] = {}
        self._sent: deque[tuple[Any, SharedPart, torch.Tensor]] = deque()

    def __enter__(self) -> _OnDevice:
        return self

    def __exit__(self, *_: Any) -> None:
        self._copies.finish()

    def to_read(self, part: SharedPart) -> torch.Tensor | None:
        """The memory to read a part to; None if another one has to be sent before."""
        if not self._reading.has_free:
            return None
        chunk = self._taken(self._reading)
        self._read[part] = chunk
        return chunk[: part.end - part.start]

    def send(self, part: SharedPart) -> None:
        """Begin to send it, or to receive it, as soon as there is a chunk for it."""
        while len(self._sent) >= _SENT_CHUNKS:
            self._pass_on()
        chunk = self._read.pop(part, None)
        mine = chunk is not None
        if chunk is None:
            chunk = self._taken(self._receiving)
        work = self._exchange.start(chunk[: part.end - part.start], part.rank)
        self._sent.append((work, part, chunk))
        if mine:
            while self._sent:  # the next round's reads want it
                self._pass_on()

    def finish(self) -> None:
        """Wait until everything is there."""
        while self._sent:
            self._pass_on()
        self._copies.finish()

    def found(self) -> list[torch.Tensor]:
        return self._found

    def _taken(self, ring: Stagings) -> torch.Tensor:
        chunk = ring.take(InFlight())
        self._copies.wait_for(chunk)
        return chunk

    def _pass_on(self) -> None:
        work, part, chunk = self._sent.popleft()
        self._exchange.wait(work)
        if not self._is_meta:
            run = Run(0, part.start, part.end, part.start)
            self._copies.begin(chunk, run, self._regions[part.region])
        is_mine = part.rank == self._exchange.rank
        (self._reading if is_mine else self._receiving).give_back(chunk)
