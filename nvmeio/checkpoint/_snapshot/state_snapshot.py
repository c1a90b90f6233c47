"""The snapshot of one save: every byte as it was when `save` was called.

Most of it is not copied. The way of a record depends on the place of its bytes:

- host memory that the kernel can write-protect stays where it is (`protected`);
- other host memory, and what is small, is copied at once (`copies.HostCopies`);
- a device's memory is copied by a stream beside (`copies.DeviceCopies`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from nvmeio._formats.torch_archives.torch_layout import Data, StorageRecord
from nvmeio._io.inflight import Stagings
from nvmeio._memory import system
from nvmeio._memory.copy_on_write import HOW_TO_ALLOW, support
from nvmeio._threads.closing import on_error
from nvmeio._threads.interruptible import begun
from nvmeio.checkpoint._snapshot.copies import (
    LEAST_BYTES,
    DeviceCopies,
    HostCopies,
    ReadBytes,
    RecordSpan,
    SnapshotMemory,
    SnapshotPart,
    device_of,
    with_aside,
)
from nvmeio.checkpoint._snapshot.protected import AsideMemory, Protected, ProtectedBytes
from nvmeio.errors import BackendUnavailableError, binary_size

WAYS = ("auto", "protect", "copy")


def checked_way(way: object, name: str = "snapshot") -> str:
    """Check how snapshots are to be taken, and that it is possible here.

    Raises BackendUnavailableError for "protect" if the kernel protects no memory for this process.
    """
    if not isinstance(way, str) or way not in WAYS:
        raise ValueError(f"{name} must be 'auto', 'protect' or 'copy', not {way!r:.80}")
    if way == "protect" and support().kind == "none":
        raise BackendUnavailableError(
            f"{name}='protect' needs userfaultfd with write protection, which this process lacks",
            attempts=support().attempts,
            remedy=f"{HOW_TO_ALLOW}; or take {name}='auto', which copies where it has to",
        )
    return way


def pinned_by_others() -> str | None:
    """Why memory is copied though its protection works; None if it need not be.

    A device writes to pinned memory past the protection. An older pin can be anywhere.
    """
    nbytes = system.pinned_bytes()
    if not nbytes:
        return None
    return (
        f"{binary_size(nbytes)} of this process are pinned by others (io_uring, RDMA), which write "
        "past the protection; snapshot='protect' protects anyway: take it if none of the "
        "state is registered there"
    )


class Snapshots:
    """The snapshots of one Checkpointer, and the memory that is kept between them.

    `way` is one of `WAYS`; "auto" protects memory if all writes are seen.
    """

    def __init__(self, memory_bytes: int | None, way: str, directory: str) -> None:
        self.copies = SnapshotMemory(memory_bytes)
        self.staging = SnapshotMemory(memory_bytes)
        self.aside = AsideMemory()
        self.on_the_way: dict[int, Stagings] = {}  # bytes gathered for writes
        self.way = way
        self.directory = directory

    @property
    def why_copied(self) -> str | None:
        """Why host memory is copied; None if it is protected."""
        kind = support().kind
        if self.way == "copy":
            return "snapshot='copy'"
        if self.way == "protect" and kind != "none":
            return None
        if kind == "any":
            return pinned_by_others()
        return f"no write protection: {support().reason}; {HOW_TO_ALLOW}"

    def release(self) -> None:
        self.copies.release()
        self.staging.release()
        self.aside.release()
        self.on_the_way.clear()


class StateSnapshot:
    """The bytes of a layout's storages within a part of the file.

    One thread makes it and calls `take`; the state must not change before that returns. Another
    writes `layout`, the same on the snapshot's memory, and says by `written` how far it is. Raises
    MemoryError if there is no room for what has to be copied.
    """

    def __init__(self, part: SnapshotPart, memories: Snapshots) -> None:
        self._memories = memories
        spans = {}
        for index, record in enumerate(part.source.records):
            low, high = max(record.offset, part.start), min(record.end, part.end)
            if low < high:
                spans[index] = record, low, high
        on_host = [index for index, span in spans.items() if device_of(span[0]).type == "cpu"]
        self._protected: Protected | None = None
        if memories.why_copied is None:
            self._protected = Protected([spans[index] for index in on_host], memories.directory)
        with on_error(self._end_protection):
            self._arrange(part, spans, on_host)
            if self._protected is not None and not self._protected.begin(
                memories.aside, self._most_aside()
            ):
                self._protected = None
                self._arrange(part, spans, on_host)  # all of it is copied, then
        if self._protected is None:
            memories.aside.release()

    def _arrange(
        self, part: SnapshotPart, spans: Mapping[int, RecordSpan], on_host: Sequence[int]
    ) -> None:
        """Decide the way of each record, and find memory for copies.

        Nothing of the state is kept here: what was copied is its owner's alone again.
        """
        memories, protected = self._memories, self._protected
        stays = set() if protected is None else {on_host[index] for index in protected.taken}
        copied = [index for index in on_host if index not in stays]
        on_device = sorted(spans.keys() - set(on_host))
        self._copied = HostCopies([spans[index] for index in copied], memories.copies)
        self._device: DeviceCopies | None = None
        if on_device:
            budget = memories.copies.budget_bytes
            most = None if budget is None else max(budget - memories.copies.nbytes, LEAST_BYTES)
            there = [spans[index] for index in on_device]
            self._device = DeviceCopies(there, memories.staging, most)
        else:
            memories.staging.release()
        self._copies = [each for each in (self._copied, self._device) if each is not None]

        aside = part.aside()
        data: dict[int, Data] = {}
        for index in stays:
            assert protected is not None
            data[index] = ProtectedBytes(protected, spans[index][0], aside.get(index, ()))
        for copies, indices in zip(self._copies, (copied, on_device), strict=False):
            for number, index in enumerate(indices):
                data[index] = with_aside(partial(copies.read, number), aside.get(index, ()))
        records = [
            StorageRecord(
                *record[:3],
                data.get(index) or with_aside(_outside(record.name), aside.get(index, ())),
                record.crc_at,
            )
            for index, record in enumerate(part.source.records)
        ]
        self.layout = part.source._replace(records=records)

    def _most_aside(self) -> int | None:
        budget = self._memories.copies.budget_bytes
        if budget is None:
            return None
        return max(budget - self._memories.copies.nbytes - self._memories.staging.nbytes, 0)

    # Properties

    @property
    def left_bytes(self) -> int:
        """The bytes that were not copied before `take` returned."""
        return (0 if self._device is None else self._device.nbytes) + self.protected_bytes

    @property
    def protected_bytes(self) -> int:
        """How much of `left_bytes` is in protected host memory."""
        return 0 if self._protected is None else self._protected.nbytes

    @property
    def copied_bytes(self) -> int:
        return self._copied.nbytes

    @property
    def stalled_s(self) -> float:
        return sum(copies.stalled_s for copies in self._copies)

    @property
    def fits(self) -> bool:
        """Whether all that is copied is held at once; else the writer has to run beside `take`."""
        return all(copies.fits for copies in self._copies)

    @property
    def most_in_flight_bytes(self) -> int:
        return min(copies.most_in_flight_bytes for copies in self._copies)

    # Its life

    def take(self, progress: Callable[[], None] = lambda: None) -> None:
        """Copy records that are neither protected nor on a device; see `Copies.take`."""
        if self._device is None:
            self._copied.take(progress)
        elif self.fits:
            self._device.take()
            self._copied.take(progress)
        else:  # the writer, who makes room, may ask for either first
            beside = begun(lambda: self._copied.take(progress), "nvmeio-snapshot")
            try:
                self._device.take()
            except BaseException:
                self.stop()
                raise
            finally:
                beside.wait()
            beside.result()

    def written(self, end: int) -> None:
        """Note that all of the file's bytes before `end` are in the file."""
        for copies in self._copies:
            copies.written(end)

    def stop(self) -> None:
        """Wake all waiters with `Cancelled`; from any thread."""
        for copies in self._copies:
            copies.stop()

    def _end_protection(self) -> None:
        if self._protected is not None:
            self._protected.end()

    def over(self) -> tuple[int, float]:
        """Give the caller's memory back, because nobody reads it any more.

        Returns how much of `protected_bytes` was copied aside, because somebody wrote there, and
        how long those who wrote were stopped for that, in seconds.
        """
        self._end_protection()
        if self._device is not None:
            self._device.over()
        protected = self._protected
        return (0, 0.0) if protected is None else (protected.aside_bytes, protected.held_s)


def _outside(name: str) -> ReadBytes:
    def refuse(at: int, nbytes: int) -> torch.Tensor:
        raise ValueError(f"{name} is not of this part of the file")

    return refuse
