"""Policy: from memory, rows and an open file to the transfer that an engine is given.

A transfer covers the file range [file_offset, file_offset + nbytes). Direct I/O moves whole
units of the file's alignment, so

- a *read* fetches the enclosing aligned span; blocks that reach beyond the range, or whose memory
  is misaligned, land in a bounce block and are copied from there;
- a *write* may not touch its neighbours, so only the enclosed aligned span goes direct, and the
  head and tail go through a buffered descriptor. No read-modify-write: two writers may share
  a block. The unit for writes is at least the page, because the page cache reads, dirties and
  writes back whole pages: a smaller unit would let the write-back of a head overwrite direct
  bytes beside it.

A file without direct I/O (alignment 0) is one buffered span of single bytes.

Transferred bytes are compared with the file here too, if requested.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import torch

from nvmeio import _checks, files
from nvmeio._files.descriptors import Descriptors
from nvmeio._memory import holds, mappings
from nvmeio._memory.tensors import Memory
from nvmeio._pages import PAGE_BYTES
from nvmeio.engines.base import DeviceTransfer, Opcode, Rows, Transfer
from nvmeio.errors import IntegrityError, an, counted, transfer_error

if TYPE_CHECKING:
    import numpy

# Aligned memory on 4 KiB pages was read at 1.4 to 2.8 GB/s and written at 2.7 to 5.1, as its pages
# happened to lie; through a ring of huge-page blocks at 2.5 and 4.7, always. Short transfers are
# better off without the copy.
BOUNCE_FROM_BYTES = 1 << 20

FileOffsets = Union[torch.Tensor, "numpy.ndarray[Any, Any]", Sequence[int]]

_MOST_ROWS = (1 << 32) - 1
_INTEGERS = frozenset(
    (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32)
)

_COMPARED_BYTES = 4 << 20  # at once

_new = tuple.__new__
_WRITE = Opcode.WRITE  # a look at a class of enums costs as much as a step of the plan


# Which bytes go direct; no I/O, no file


class Plan(NamedTuple):
    """A transfer's direct span in the file, and whether the buffered descriptor is needed.

    Attributes:
        span_start: First byte of the span given to the engine's blocks.
        span_end: End of it. For a write, [file_offset, span_start) and
            [span_end, file_offset + nbytes) are the buffered head and tail.
        direct: The span goes through the O_DIRECT descriptor.
        buffered: Some bytes go through the buffered descriptor.
    """

    span_start: int
    span_end: int
    direct: bool
    buffered: bool


def plan_read(file_offset: int, nbytes: int, alignment: int) -> Plan:
    """Plan a read of `nbytes` at `file_offset` from a file of this offset alignment."""
    end = file_offset + nbytes
    if not alignment or not nbytes:
        return Plan(file_offset, end, False, True)
    before, behind = file_offset % alignment, -end % alignment
    # Not by Plan(): its __new__ is a function of Python's.
    return _new(Plan, (file_offset - before, end + behind, True, False))


def plan_write(file_offset: int, nbytes: int, alignment: int) -> Plan:
    """Plan a write of `nbytes` at `file_offset` to a file of this offset alignment."""
    end = file_offset + nbytes
    if not alignment or not nbytes:
        return Plan(file_offset, end, False, True)
    unit = max(alignment, PAGE_BYTES)
    start = -(-file_offset // unit) * unit
    stop = end // unit * unit
    if start >= stop:
        return Plan(end, end, False, True)  # all of it is head
    return Plan(start, stop, True, start > file_offset or stop < end)


# The transfer


def plan(
    opcode: Opcode, memory: Memory, opened: Descriptors, file_offset: int
) -> tuple[Plan, Transfer]:
    """A read or write, as direct as the file and the memory allow.

    Raises:
        TransferError: The file's second descriptor is needed and cannot be opened.
    """
    writing = opcode is _WRITE
    address, nbytes = memory.address, memory.nbytes
    unit, memory_unit = opened.alignment
    planned = (plan_write if writing else plan_read)(file_offset, nbytes, unit)
    start, end, direct, buffered = planned
    # Not by Transfer(): its __new__ is a function of Python's.
    return planned, _new(
        Transfer,
        (
            opcode,
            opened.direct_fd if direct else -1,
            opened.buffered_fd() if buffered else -1,
            address,
            nbytes,
            file_offset,
            start,
            end,
            unit or 1,
            memory_unit or 1,
            direct and nbytes >= BOUNCE_FROM_BYTES and not mappings.on_huge_pages(address, nbytes),
            # The lane looks whether the file grows. Allocated first, new files were written 1.3 to
            # 3 times as fast, from 1 GiB in one file down to 4 KiB in each of 600.
            writing and direct,
            memory.foreign,
        ),
    )


def plan_all(
    opcode: Opcode, memories: Sequence[Memory], opened: Descriptors, offsets: Sequence[int]
) -> list[Transfer]:
    """`plan` for many pieces of one file.

    Raises:
        TransferError: The file's second descriptor is needed and cannot be opened.
    """
    unit, memory_unit = opened.alignment
    writing = opcode is Opcode.WRITE
    # Aligned and short, a piece is its own span: nothing is to be planned.
    whole = max(unit, PAGE_BYTES) if writing else unit
    planned = []
    for memory, offset in zip(memories, offsets, strict=True):
        nbytes = memory.nbytes
        if not unit or nbytes >= BOUNCE_FROM_BYTES or (offset | nbytes) % whole or not nbytes:
            planned.append(plan(opcode, memory, opened, offset)[1])
            continue
        span = offset, offset + nbytes, unit, memory_unit or 1
        planned.append(_transfer(opcode, memory, offset, (opened.direct_fd, -1), span, writing))
    return planned


def _transfer(
    opcode: Opcode,
    memory: Memory,
    file_offset: int,
    fds: tuple[int, int],
    span: tuple[int, int, int, int],
    preallocate: bool = False,
) -> Transfer:
    """A transfer that needs no bounce memory, through a direct and a plain descriptor.

    `span` is its start and end in the file, and the alignments of offsets and of memory.
    """
    where = memory.address, memory.nbytes, file_offset
    return Transfer(opcode, *fds, *where, *span, False, preallocate, memory.foreign)


def plan_device(
    opcode: Opcode, memory: Memory, opened: Descriptors, file_offset: int
) -> tuple[Plan, Transfer]:
    """The same for device memory, as the ring and cuFile take it.

    Which bytes go direct is planned as ever: the unaligned edges of a write are not left to
    anybody who would read, change and write back a block that another writer may share. The engine
    carries out the plan in its own way; there is nothing to demote for the core.

    Raises:
        TransferError: The file's second descriptor is needed and cannot be opened.
    """
    return _on_device(*plan(opcode, memory, opened, file_offset), memory, opened)


def _on_device(
    planned: Plan, transfer: Transfer, memory: Memory, opened: Descriptors
) -> tuple[Plan, Transfer]:
    return planned._replace(direct=False), DeviceTransfer.make(transfer, memory, opened)


def plan_rows(
    opcode: Opcode, memory: Memory, opened: Descriptors, file_offset: int
) -> tuple[Plan, Transfer]:
    """A gather or scatter; the engine finds out which bytes of which row go direct.

    Raises:
        TransferError: The file's second descriptor is needed and cannot be opened.
    """
    direct = opened.direct_fd >= 0 and opened.alignment.offset > 0
    buffered = opcode is Opcode.WRITE or not direct
    fds = opened.direct_fd if direct else -1, opened.buffered_fd() if buffered else -1
    unit, memory_unit = opened.alignment
    span = file_offset, file_offset, unit or 1, memory_unit or 1
    planned = Plan(file_offset, file_offset, direct, buffered)
    transfer = _transfer(opcode, memory, file_offset, fds, span)
    if memory.device is not None:
        return _on_device(planned, transfer, memory, opened)
    return planned, transfer


def plan_buffered(
    opcode: Opcode, memory: Memory, opened: Descriptors, file_offset: int
) -> tuple[Plan, Transfer]:
    """The same transfer through the page cache, for a file that refused direct I/O after all.

    Raises:
        TransferError: The plain descriptor cannot be opened.
    """
    opened.demote()
    end = file_offset + memory.nbytes
    fds = -1, opened.buffered_fd()
    transfer = _transfer(opcode, memory, file_offset, fds, (file_offset, end, 1, 1))
    return Plan(file_offset, end, False, True), transfer


def plan_sync(opcode: Opcode, opened: Descriptors) -> tuple[Plan, Transfer]:
    """An fsync or fdatasync."""
    return Plan(0, 0, False, True), Transfer(
        opcode, -1, opened.any_fd(), 0, 0, 0, 0, 0, 1, 1, False, False
    )


class RowPlaces(NamedTuple):
    """The places of rows, kept in memory for an operation.

    Attributes:
        rows: For the engine.
        lowest: The least of the offsets.
        keep: The storage of the offsets.
        held: The hold on it. Last, so that it goes before the memory that it holds.
    """

    rows: Rows
    lowest: int
    keep: torch.UntypedStorage
    held: Any

    def end(self) -> None:
        """The engine is done with the offsets."""
        holds.end(self.held)


def row_places(
    tensor: torch.Tensor, file_offsets: FileOffsets, allow_overlap: bool
) -> RowPlaces | None:
    """One place in the file for each row of a tensor; None where there is no byte to move.

    Args:
        tensor: The rows.
        file_offsets: In bytes.
        allow_overlap: By a part of an element too.

    Raises:
        TypeError: `file_offsets` are not integers.
        ValueError: There are not as many as rows, or a row would lie outside of any file; or two
            overlap by a part of an element.
    """
    if not tensor.dim():
        raise ValueError("a tensor of no dimensions has no rows; tensor.unsqueeze(0) has one")
    count = tensor.shape[0]
    offsets = as_integers("file_offsets", file_offsets)
    if offsets.dim() != 1 or len(offsets) != count:
        raise ValueError(
            f"file_offsets must be one for each of the {counted(count, 'row')}, not of shape "
            f"{tuple(offsets.shape)}"
        )
    row_bytes = tensor.nbytes // count if count else 0
    if not row_bytes:
        return None
    if count > _MOST_ROWS:
        raise ValueError(
            f"{counted(count, 'row')} are too many for one operation: {_MOST_ROWS} at most"
        )
    if tensor.is_quantized:
        raise TypeError("a quantized tensor has no rows of bytes; gather its int_repr()")
    lowest, highest = (int(end) for end in torch.aminmax(offsets))
    if lowest < 0 or highest > _checks.OFFSET_MAX - row_bytes:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(
            f"file_offsets must lie between 0 and 2**63 - 1 - {row_bytes} (a row's bytes), "
            f"not {wrong}"
        )
    if not allow_overlap:
        _check_elements(offsets, row_bytes, tensor.itemsize)
    held = holds.hold(offsets.untyped_storage())
    if held is None:  # a mapped file, which may be cut short; numpy's, which may be freed
        offsets = offsets.clone()
        held = holds.hold(offsets.untyped_storage())
    rows = Rows(count, row_bytes, offsets.data_ptr())
    return RowPlaces(rows, lowest, offsets.untyped_storage(), held)


def _check_elements(offsets: torch.Tensor, row_bytes: int, itemsize: int) -> None:
    """Refuse rows that have a part of an element in common, as numbers in offsets' place do."""
    within = offsets & (itemsize - 1)
    if itemsize == 1 or bool((within == within[0]).all()):
        return
    ordered = offsets.sort().values
    apart = ordered.diff()
    wrong = (apart < row_bytes) & (apart % itemsize != 0)
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise ValueError(
            f"file_offsets are in bytes, and rows of {row_bytes} bytes from {int(ordered[at])} and "
            f"from {int(ordered[at + 1])} on have a part of an element in common: multiply the "
            "numbers of rows by their bytes, or use nvmeio.data.Records, which takes numbers; "
            "allow_overlap=True reads them anyway"
        )


def as_integers(name: str, given: FileOffsets) -> torch.Tensor:
    """A tensor of int64 on the CPU, contiguous: the given one where it is that.

    Args:
        name: The argument's name.
        given: A tensor, a numpy array or a sequence of integers.

    Raises:
        TypeError: It is not one of these, or holds strings, or bools, which torch takes for 0 and
            1.
    """
    if isinstance(given, torch.Tensor):
        found = given
    elif hasattr(given, "__array_interface__"):  # numpy's, which torch warns of if read-only
        array: Any = given
        if array.dtype.kind not in "iu" or array.dtype == "uint64":
            raise TypeError(f"{name} must be integers, not {array.dtype}")
        found = torch.from_numpy(array.astype("int64"))
    elif isinstance(given, range):
        return torch.arange(given.start, given.stop, given.step)
    elif isinstance(given, Sequence) and not isinstance(given, (str, bytes)):
        if not len(given):
            return torch.empty(0, dtype=torch.int64)
        for kind in {bool, str, bytes, type(None)}.intersection(map(type, given)):
            raise TypeError(f"{name} must be integers, and there is {an(kind.__name__)} among them")
        try:
            found = torch.tensor(given)
        except (TypeError, ValueError, RuntimeError, OverflowError) as failed:
            raise TypeError(f"{name} must be integers below 2**63: {failed}") from failed
    else:
        raise TypeError(
            f"{name} must be a tensor, a numpy array or a sequence of integers, not "
            f"{type(given).__name__}"
        )
    if found.dtype not in _INTEGERS:
        raise TypeError(f"{name} must be integers, not {found.dtype} (mask: nonzero().flatten())")
    return found.detach().to("cpu", torch.int64).contiguous()


def comparison(
    memory: Memory, file: str | os.PathLike[str] | int | files.File, file_offset: int
) -> Callable[[], None]:
    """A function that compares memory with the file, and raises where they differ.

    Raises (when called):
        IntegrityError: With the file offset of the first difference and both bytes.
        TransferError: The file could not be read back.
    """

    def compare() -> None:
        readable = file
        if isinstance(file, int):
            readable = f"/proc/self/fd/{file}"  # it may be open for writing only
        with files.in_use(readable) as opened:
            _compare(memory, opened, file_offset)

    return compare


def _compare(memory: Memory, opened: Descriptors, file_offset: int) -> None:
    fd = opened.buffered_fd()
    for start in range(0, memory.nbytes, _COMPARED_BYTES):
        wanted = min(_COMPARED_BYTES, memory.nbytes - start)
        mine = memory.read(start, wanted)
        try:
            found = os.pread(fd, wanted, file_offset + start)
        except OSError as failed:
            span: Any = {"file_offset": file_offset, "nbytes": memory.nbytes, "transferred": start}
            raise transfer_error(failed, "pread", opened.path, **span) from failed
        if found == mine:
            continue
        at = next((i for i, (a, b) in enumerate(zip(mine, found, strict=False)) if a != b), None)
        at = len(found) if at is None else at
        expected, there = mine[at : at + 1].hex(), found[at : at + 1].hex() or "end of file"
        raise IntegrityError(
            f"{opened.path}: byte {file_offset + start + at} is 0x{there} in the page cache, "
            f"0x{expected} in the tensor",
            expected=mine[at : at + 16],
            found=found[at : at + 16],
        )
