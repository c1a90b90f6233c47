"""Where torch keeps "this may be resized" is found in every process, whatever lies where."""

from __future__ import annotations

import struct

import pytest

from nvmeio._memory import holds

FLAGS, ALLOCATOR = 56, 72


def storage(*, resizable: bool, size: int, allocator: int) -> bytes:
    """The bytes of a StorageImpl of torch 2.13 (c10/core/StorageImpl.h), as they matter here."""
    data = 0x0000558F7C750740 + 64 * size
    record = struct.pack(
        "<8Q", 0x7FE10A7F4A88, 1, data, 0x7FE10A710EF0, data, 0xFF00, size, resizable << 8
    )
    return record + struct.pack("<2Q", 0, allocator)


@pytest.mark.parametrize("byte", range(8))
def test_a_pointer_with_a_byte_of_one_is_no_flag(byte: int) -> None:
    """Of one process in 85 the allocator lay so: nothing was held, and nobody was told."""
    address = 0x00007FE10A7F7468 & ~(0xFF << 8 * byte) | 1 << 8 * byte
    ones = [storage(resizable=True, size=n, allocator=address) for n in (5, 300, 4099)]
    zeros = [storage(resizable=False, size=n, allocator=0) for n in (5, 300, 4099)]
    assert all(b[ALLOCATOR + byte] == 1 for b in ones)
    assert holds._flags_between(ones, zeros) == [FLAGS + 1]


def test_the_flag_is_found_in_this_torch() -> None:
    assert holds.FLAG_OFFSET is not None
