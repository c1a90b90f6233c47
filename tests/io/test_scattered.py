"""A few bytes at many places: whichever pages they lie in, and when they cannot be read."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from support import random_bytes

import nvmeio
from nvmeio import files
from nvmeio._io.inflight import InFlight
from nvmeio._io.spans import read_scattered
from nvmeio._threads.interruptible import Cancelled


def test_bytes_at_any_place_and_in_any_order(path: Path) -> None:
    data = random_bytes(64 * 4096)
    path.write_bytes(data)
    rng = random.Random(3)
    places = [(rng.randrange(60 * 4096), rng.choice((1, 30, 4096, 9000))) for _ in range(300)]
    places += [(4090, 10), (4090, 10), (0, 1), (len(data) - 5, 5)]
    with nvmeio.AioHandle() as handle, files.open(path) as file:
        found = read_scattered(handle, file, places, InFlight(), "headers")
    assert found == [data[offset : offset + nbytes] for offset, nbytes in places]


def test_a_file_that_was_cut_is_named_with_what_was_read(path: Path) -> None:
    path.write_bytes(bytes(8 * 4096))
    with nvmeio.AioHandle() as handle, files.open(path) as file:
        os.truncate(path, 4096)
        with pytest.raises(nvmeio.TransferError, match=r"read for headers") as caught:
            read_scattered(handle, file, [(5 * 4096, 10)], InFlight(), "headers")
    assert str(path) in str(caught.value)


def test_nothing_is_read_for_one_who_has_cancelled(path: Path) -> None:
    path.write_bytes(bytes(4096))
    flight = InFlight()
    flight.cancel()
    with (
        nvmeio.AioHandle() as handle,
        files.open(path) as file,
        pytest.raises(Cancelled),
    ):
        read_scattered(handle, file, [(0, 10)], flight, "headers")
