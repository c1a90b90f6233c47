"""CRC-32 of memory, as zlib computes it."""

from __future__ import annotations

import ctypes
import gc
import zlib

import torch
from support import random_bytes

from nvmeio._storage import crc32


def test_sums_of_memory_are_zlibs() -> None:
    data = random_bytes(70_000)
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    for nbytes in (0, 1, 7, 4096, 69_999, 70_000):
        expected = zlib.crc32(data[:nbytes], 5)
        assert crc32.of_memory(tensor.data_ptr(), nbytes, 5) == expected
        assert crc32.of_tensor(tensor[:nbytes], 5) == expected
        rest = crc32.of_tensor(tensor[nbytes:])
        assert crc32.combine(expected, rest, 70_000 - nbytes) == zlib.crc32(data, 5)


def test_a_new_length_makes_no_class() -> None:
    """Each was an array class of ctypes', made for 30 us and kept: a third of a save's time."""
    tensor = torch.zeros(70_000, dtype=torch.uint8)
    for nbytes in range(61_001, 61_101):
        crc32.of_tensor(tensor[:nbytes])
    arrays = type(ctypes.c_char * 1)  # the class of such classes
    names = {each.__name__ for each in gc.get_objects() if type(each) is arrays}
    assert not names & {f"c_char_Array_{nbytes}" for nbytes in range(61_001, 61_101)}
