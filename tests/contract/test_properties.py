"""Random transfers compared with what os.pread, os.pwrite and a bytearray say."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import bytes_tensor, misaligned, random_bytes, raw

import nvmeio

MAX_FILE = 200_000
CONTENT = random_bytes(MAX_FILE, seed=3)
PAYLOAD = random_bytes(MAX_FILE, seed=4)

# Interesting positions are at, or one beside, the units of sectors, pages and blocks.
POSITIONS = st.one_of(
    st.integers(0, MAX_FILE),
    st.builds(
        lambda unit, n, beside: min(MAX_FILE, max(0, unit * n + beside)),
        st.sampled_from([512, 4096, 8192, 16384]),
        st.integers(0, 40),
        st.integers(-1, 1),
    ),
)
SHIFTS = st.one_of(st.sampled_from([0, 1, 64, 511, 512, 2048]), st.integers(0, 4095))
# Setting up a context and destroying it take the kernel tens of milliseconds: handles are reused.
OPTIONS: list[dict[str, Any]] = [
    {"block_size": 4096, "queue_depth": 1},
    {"block_size": 4096, "queue_depth": 2, "overlap_events": False},
    {"block_size": 4096, "queue_depth": 9, "single_submit": True},
    {"block_size": 8192, "queue_depth": 4, "intra_op_parallelism": 2},
    {"block_size": 12288, "queue_depth": 3, "single_submit": True, "overlap_events": False},
    {"block_size": 16384, "queue_depth": 5, "intra_op_parallelism": 3, "overlap_events": False},
    {"block_size": 65536, "queue_depth": 2, "single_submit": True, "intra_op_parallelism": 2},
    {"block_size": 1 << 20, "queue_depth": 128},
]
Handles = Callable[[int], nvmeio.AioHandle]
WHICH = st.integers(0, len(OPTIONS) - 1)


@pytest.fixture
def handles(make_handle: Callable[..., nvmeio.AioHandle]) -> Handles:
    """Handles with these options."""
    return functools.cache(lambda which: make_handle(**OPTIONS[which]))


@pytest.fixture
def descriptor(path: Path) -> Iterator[int]:
    """Read and written through the page cache: what the engine is compared with."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def fill(fd: int, size: int) -> None:
    os.ftruncate(fd, size)
    assert os.pwrite(fd, CONTENT[:size], 0) == size


def surroundings_untouched(room: torch.Tensor, shift: int, nbytes: int) -> bool:
    return bool((room[:shift] == 0xA5).all() and (room[shift + nbytes :] == 0xA5).all())


# One transfer


@settings(max_examples=50)
@given(file_offset=POSITIONS, nbytes=POSITIONS, size=POSITIONS, shift=SHIFTS, which=WHICH)
@example(file_offset=4096, nbytes=8192, size=MAX_FILE, shift=0, which=1)
def test_a_read_agrees_with_pread(
    handles: Handles,
    descriptor: int,
    path: Path,
    file_offset: int,
    nbytes: int,
    size: int,
    shift: int,
    which: int,
) -> None:
    fill(descriptor, size)
    expected = os.pread(descriptor, nbytes, file_offset)
    tensor, room = misaligned(nbytes, shift)
    operation = handles(which).async_pread(tensor, path, file_offset)
    failure = operation.exception(100)
    if len(expected) == nbytes:
        assert failure is None
        assert operation.result() == nbytes
    else:
        assert isinstance(failure, nvmeio.ShortTransferError)
        assert (failure.requested, failure.transferred) == (nbytes, len(expected))
    assert raw(tensor)[: len(expected)] == expected
    assert surroundings_untouched(room, shift, nbytes)
    ways = operation.direct_bytes + operation.bounced_bytes + operation.buffered_bytes
    assert ways == operation.transferred == len(expected)


@settings(max_examples=50)
@given(file_offset=POSITIONS, nbytes=POSITIONS, size=POSITIONS, shift=SHIFTS, which=WHICH)
def test_a_write_agrees_with_pwrite(
    handles: Handles,
    descriptor: int,
    path: Path,
    file_offset: int,
    nbytes: int,
    size: int,
    shift: int,
    which: int,
) -> None:
    fill(descriptor, size)
    expected = bytearray(CONTENT[:size])
    if nbytes:
        expected.extend(bytes(max(0, file_offset + nbytes - size)))
        expected[file_offset : file_offset + nbytes] = PAYLOAD[:nbytes]
    tensor, room = misaligned(nbytes, shift)
    tensor.copy_(bytes_tensor(PAYLOAD[:nbytes]))
    operation = handles(which).async_pwrite(tensor, path, file_offset)
    assert operation.result(100) == nbytes
    assert os.pread(descriptor, 2 * MAX_FILE + 1, 0) == expected
    assert raw(tensor) == PAYLOAD[:nbytes]
    assert surroundings_untouched(room, shift, nbytes)
    ways = operation.direct_bytes + operation.bounced_bytes + operation.buffered_bytes
    assert ways == operation.transferred == nbytes


# Several at once on one file, no two on the same byte


class Piece(NamedTuple):
    start: int
    end: int
    role: str  # "write", "read" or "leave"
    shift: int
    named: str


@st.composite
def pieces(draw: st.DrawFn) -> list[Piece]:
    """A partition of a range of the file, in the order in which the pieces are started."""
    cuts = sorted(draw(st.sets(POSITIONS, min_size=2, max_size=14)))
    made = [
        Piece(
            start,
            end,
            draw(st.sampled_from(["write", "write", "read", "leave"])),
            draw(SHIFTS),
            draw(st.sampled_from(["path", "file", "descriptor"])),
        )
        for start, end in itertools.pairwise(cuts)
    ]
    return draw(st.permutations(made))


@settings(max_examples=50)
@given(pieces=pieces(), size=POSITIONS, which=WHICH)
def test_operations_on_different_bytes_of_one_file_do_not_disturb_each_other(
    handles: Handles,
    descriptor: int,
    path: Path,
    pieces: list[Piece],
    size: int,
    which: int,
) -> None:
    """Neighbours share sectors, pages and blocks, in memory copies and in the file."""
    fill(descriptor, size)
    expected = bytearray(CONTENT[:size])
    rooms, operations = {}, []
    handle = handles(which)
    with nvmeio.open(path, "r+") as file:
        names = {"path": path, "file": file, "descriptor": descriptor}
        for piece in pieces:
            start, end, role, shift, named = piece
            if role == "write":
                expected.extend(bytes(max(0, end - len(expected))))
                expected[start:end] = PAYLOAD[start:end]
                tensor, room = misaligned(end - start, shift)
                tensor.copy_(bytes_tensor(PAYLOAD[start:end]))
                operation = handle.async_pwrite(tensor, names[named], start)
            elif role == "read" and end <= size:
                tensor, room = misaligned(end - start, shift)
                operation = handle.async_pread(tensor, names[named], start)
            else:
                continue
            rooms[piece] = (tensor, room)
            operations.append(operation)
        assert [o.result(100) for o in operations] == [p.end - p.start for p in rooms]
        # A page that the kernel could not evict beside a direct write would be reported here.
        handle.sync_fsync(file, data_only=True)
    assert os.pread(descriptor, MAX_FILE + 1, 0) == expected
    for piece, (tensor, room) in rooms.items():
        source = PAYLOAD if piece.role == "write" else CONTENT
        assert raw(tensor) == source[piece.start : piece.end]
        assert surroundings_untouched(room, piece.shift, piece.end - piece.start)


def test_many_writers_of_a_few_bytes_each_share_every_block(
    make_handle: Callable[..., nvmeio.AioHandle], path: Path
) -> None:
    """The worst case of the above: 2,000 writes of 1 to 150 bytes, back to back."""
    handle = make_handle(block_size=4096, queue_depth=32)
    path.write_bytes(CONTENT)
    start, step = 0, 1
    starts: list[tuple[int, int]] = []
    while start + step <= MAX_FILE and len(starts) < 2000:
        starts.append((start, start + step))
        start, step = start + step, step % 150 + 1
    with nvmeio.open(path, "r+") as file:
        for start, end in starts[::2] + starts[1::2]:
            handle.async_pwrite(bytes_tensor(PAYLOAD[start:end]), file, start)
        assert handle.wait(100) == len(starts)
    end = starts[-1][1]
    assert path.read_bytes() == PAYLOAD[:end] + CONTENT[end:]
