"""The file that parked storages lie in: laid out, written, read, its checksums."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from nvmeio._io.drives import DriveHandles, FileSpan, StripedFile
from nvmeio._io.inflight import InFlight
from nvmeio._memory import devices
from nvmeio._pages import PAGE_BYTES, TENSOR_ALIGNMENT, round_up
from nvmeio._storage import crc32, durable
from nvmeio.errors import IntegrityError
from nvmeio.offload._parking.members import STATE, Member, ParkedStorage
from nvmeio.offload._swap_files.swap_dirs import SwapDirs
from nvmeio.operation import Operation

NAME = "parked"
# Bytes moved and summed as one: enough for a drive's full rate, and sums are made beside it.
PART_BYTES = 16 << 20


def gathered(small: Sequence[ParkedStorage]) -> ParkedStorage:
    """Small storages as one, which is a copy; each is given its place there."""
    at = 0
    for each in small:
        each.place = at
        at += round_up(each.nbytes, TENSOR_ALIGNMENT)
    copy = torch.zeros(max(at, 1), dtype=torch.uint8, device="cpu")
    for each in small:
        copy[each.place : each.place + each.nbytes] = devices.on_host(each.memory())
    member = Member(STATE, "small tensors", copy)
    return ParkedStorage(STATE, copy.untyped_storage(), copy.nbytes, [member])


def place(storages: Sequence[ParkedStorage]) -> list[int]:
    """Give each storage its place in the file; returns the file's bands."""
    at, bands = 0, []
    for each in storages:
        each.place = at
        for _, length in _parts(each.nbytes):
            bands.append(round_up(length, PAGE_BYTES))
            at += bands[-1]
    return bands


def _parts(nbytes: int) -> Iterator[tuple[int, int]]:
    """The begin and the length of each part of a storage."""
    for start in range(0, nbytes, PART_BYTES):
        yield start, min(PART_BYTES, nbytes - start)


def number_of_parts(nbytes: int) -> int:
    """How many sums a storage has."""
    return -(-nbytes // PART_BYTES)


class ParkedFile:
    """The file in a swap directory, and on each of several."""

    def __init__(self, directory: SwapDirs, bands: Sequence[int], checksum: bool) -> None:
        self._file: StripedFile = directory.allocate(NAME, bands)
        self._checksum = checksum

    def write(
        self, storages: Sequence[ParkedStorage], handles: DriveHandles, flight: InFlight
    ) -> None:
        """Write storages, and sum those in host memory beside it; durable when it returns.

        Raises:
            TransferError: The drive failed.
        """
        for parked in storages:
            parked.sums = []
            memory = parked.memory()
            for start, length in _parts(parked.nbytes):
                part = memory[start : start + length]
                for span in self._file.spans(parked.place + start, length):
                    begin = partial(_write, handles, span, part)
                    flight.start(begin, span.nbytes, label=_label(parked))
                parked.sums.append(self._sum(part))
        flight.drain()
        for file in self._file.files:
            durable.sync_data(file)

    def read(
        self,
        storages: Sequence[ParkedStorage],
        memory_of: Callable[[ParkedStorage], torch.Tensor],
        done: Callable[[ParkedStorage], None],
        handles: DriveHandles,
        flight: InFlight,
    ) -> None:
        """Read storages in their order, and compare their sums.

        Args:
            storages: Which.
            memory_of: Makes the memory of one.
            done: Called with each that is whole, in order, in the thread that reads.
            handles: Move the bytes.
            flight: Cancels it.

        Raises:
            TransferError: The drive failed.
            IntegrityError: A part differs from the written one.
        """
        for parked in storages:
            memory = memory_of(parked)
            for number, (start, length) in enumerate(_parts(parked.nbytes)):
                part = memory[start : start + length]
                spans = self._file.spans(parked.place + start, length)
                for span in spans:
                    ended = None
                    if span is spans[-1]:
                        is_whole = start + length == parked.nbytes
                        then = partial(done, parked) if is_whole else None
                        ended = partial(self._ended, parked, number, part, then)
                    begin = partial(_read, handles, span, part)
                    flight.start(begin, span.nbytes, ended, _label(parked))
        flight.drain()

    def _ended(
        self,
        parked: ParkedStorage,
        number: int,
        part: torch.Tensor,
        then: Callable[[], None] | None,
    ) -> None:
        wanted, found = parked.sums[number], self._sum(part)
        if -1 not in (wanted, found) and wanted != found:
            where = self._file.describe(parked.place + number * PART_BYTES, part.nbytes)
            raise IntegrityError(
                f"the parked {parked.name} (of {parked.kind}) is not what was written: {where}; go "
                "on from a checkpoint",
                expected=f"CRC-32 {wanted:08x}",
                found=f"CRC-32 {found:08x}",
            )
        if then is not None:
            then()

    def _sum(self, part: torch.Tensor) -> int:
        """The CRC-32 of a part in host memory; -1 for none."""
        if not self._checksum or part.device.type != "cpu":
            return -1
        return crc32.of_tensor(part)

    def close(self) -> None:
        """Close the files."""
        self._file.close()


def _write(handles: DriveHandles, span: FileSpan, part: torch.Tensor) -> Operation:
    return handles.async_pwrite(span.part(part), span.file, span.file_offset)


def _read(handles: DriveHandles, span: FileSpan, part: torch.Tensor) -> Operation:
    return handles.async_pread(span.part(part), span.file, span.file_offset)


def _label(parked: ParkedStorage) -> Callable[[int], str]:
    return lambda _: f"for the parked {parked.name} (of {parked.kind})"
