"""Policy: from memory and an open file to the transfer that an engine is given."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from nvmeio import buffers
from nvmeio._files.descriptors import Descriptors
from nvmeio._files.plan import PAGE_BYTES, Plan, plan_read, plan_write
from nvmeio._memory.tensors import Memory
from nvmeio.engines.base import DeviceTransfer, Opcode, Transfer
from nvmeio.errors import TransferError

# Aligned memory on 4 KiB pages was read at 1.4 to 2.8 GB/s and written at 2.7 to 5.1, as its pages
# happened to lie; through a ring of huge-page blocks at 2.5 and 4.7, always. Short transfers are
# better off without the copy.
BOUNCE_FROM_BYTES = 1 << 20

_new = tuple.__new__
_WRITE = Opcode.WRITE  # a look at a class of enums costs as much as a step of the plan


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
            direct and nbytes >= BOUNCE_FROM_BYTES and not buffers.on_huge_pages(address, nbytes),
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
        planned.append(
            Transfer(
                opcode,
                opened.direct_fd,
                -1,
                memory.address,
                nbytes,
                offset,
                offset,
                offset + nbytes,
                unit,
                memory_unit or 1,
                False,
                writing,
                memory.foreign,
            )
        )
    return planned


def plan_device(
    opcode: Opcode, memory: Memory, opened: Descriptors, file_offset: int
) -> tuple[Plan, Transfer]:
    """The same for device memory, as the ring and cuFile take it.

    Which bytes go direct is planned as ever: the unaligned edges of a write are not left to
    anybody who would read, change and write back a block that another writer may share. What the
    engine does with the plan is its own; there is nothing to demote for the core.

    Raises:
        TransferError: The file's second descriptor is needed and cannot be opened.
    """
    planned, transfer = plan(opcode, memory, opened, file_offset)
    return planned._replace(direct=False), DeviceTransfer.make(transfer, memory, opened)


def not_there(operation: str, file: object, failed: OSError) -> TransferError:
    """What torch would copy from is not there."""
    code, detail = failed.errno or errno.EFAULT, failed.strerror or ""
    return TransferError(code, operation=operation, path=str(file), detail=detail)


def plan_rows(
    opcode: Opcode, memory: Memory, opened: Descriptors, file_offset: int
) -> tuple[Plan, Transfer]:
    """A gather or scatter; the engine finds out which bytes of which row go direct.

    Raises:
        TransferError: The file's second descriptor is needed and cannot be opened.
    """
    direct = opened.direct_fd >= 0 and opened.alignment.offset > 0
    buffered = opcode is Opcode.WRITE or not direct
    start = file_offset
    transfer = Transfer(
        opcode,
        opened.direct_fd if direct else -1,
        opened.buffered_fd() if buffered else -1,
        memory.address,
        memory.nbytes,
        file_offset,
        start,
        start,
        opened.alignment.offset or 1,
        opened.alignment.memory or 1,
        False,
        False,
        memory.foreign,
    )
    if memory.device is not None:  # as for `plan_device`
        return Plan(start, start, False, buffered), DeviceTransfer.make(transfer, memory, opened)
    return Plan(start, start, direct, buffered), transfer


def plan_buffered(
    opcode: Opcode, memory: Memory, opened: Descriptors, file_offset: int
) -> tuple[Plan, Transfer]:
    """The same transfer through the page cache, for a file that refused direct I/O after all.

    Raises:
        TransferError: The plain descriptor cannot be opened.
    """
    opened.demote()
    end = file_offset + memory.nbytes
    return Plan(file_offset, end, False, True), Transfer(
        opcode,
        -1,
        opened.buffered_fd(),
        memory.address,
        memory.nbytes,
        file_offset,
        file_offset,
        end,
        1,
        1,
        False,
        False,
        memory.foreign,
    )


def plan_sync(opcode: Opcode, opened: Descriptors) -> tuple[Plan, Transfer]:
    """An fsync or fdatasync."""
    return Plan(0, 0, False, True), Transfer(
        opcode, -1, opened.any_fd(), 0, 0, 0, 0, 0, 1, 1, False, False
    )
