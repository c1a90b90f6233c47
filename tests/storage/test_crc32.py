"""CRC-32 of memory, as zlib computes it."""

from __future__ import annotations

import ctypes
import gc
import mmap
import zlib

import numpy
import pytest
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


@pytest.mark.parametrize("at_once", [True, False], ids=["one loop", "a copy, then the sum"])
def test_what_is_copied_is_summed(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any length, from and to any address; and nothing beside it is written to."""
    if not at_once:
        monkeypatch.setattr(crc32, "CAN_COPY", False)
    data = random_bytes(20_000)
    source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    for nbytes in (*range(140), 4096, 19_967):
        for at in (0, 1, 13, 32):
            target = bytearray(b"x" * (nbytes + 40))
            to = torch.frombuffer(target, dtype=torch.uint8).data_ptr() + at % 7
            found = crc32.copy(to, source.data_ptr() + at, nbytes, 7 * nbytes)
            wanted = data[at : at + nbytes]
            assert found == zlib.crc32(wanted, 7 * nbytes)
            assert target == b"x" * (at % 7) + wanted + b"x" * (40 - at % 7)


@pytest.mark.parametrize("nbytes", [(256 << 10) - 1, 256 << 10, (256 << 10) + 77, 3_000_001])
@pytest.mark.parametrize("at", [0, 1, 16, 48])
def test_much_is_copied_past_the_caches(nbytes: int, at: int) -> None:
    """Where the target allows it; the sum, the bytes and what lies beside them are the same."""
    data = random_bytes(nbytes)
    source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    target = torch.full((nbytes + 200,), 120, dtype=torch.uint8)
    at += -target.data_ptr() % 64
    assert crc32.copy(target.data_ptr() + at, source.data_ptr(), nbytes, 9) == zlib.crc32(data, 9)
    found = target.numpy().tobytes()
    assert found == b"x" * at + data + b"x" * (200 - at)
    assert crc32.copy(source.data_ptr(), source.data_ptr(), nbytes) == zlib.crc32(data)


def test_memory_that_nobody_may_write_to_is_summed_where_it_lies() -> None:
    """From a place to itself nothing is stored: it may be write-protected."""
    if not crc32.CAN_COPY:
        pytest.skip("this processor has no instruction for it")
    with mmap.mmap(-1, 1 << 20, prot=mmap.PROT_READ) as zeros:
        address = numpy.frombuffer(zeros, dtype=numpy.uint8).ctypes.data
        for nbytes in (1, 63, 64, 1000, 1 << 20):
            assert crc32.copy(address, address, nbytes, 5) == zlib.crc32(bytes(nbytes), 5)


def test_a_new_length_makes_no_class() -> None:
    """Each was an array class of ctypes', made for 30 us and kept: a third of a save's time."""
    tensor = torch.zeros(70_000, dtype=torch.uint8)
    for nbytes in range(61_001, 61_101):
        crc32.of_tensor(tensor[:nbytes])
    arrays = type(ctypes.c_char * 1)  # the class of such classes
    names = {each.__name__ for each in gc.get_objects() if type(each) is arrays}
    assert not names & {f"c_char_Array_{nbytes}" for nbytes in range(61_001, 61_101)}
