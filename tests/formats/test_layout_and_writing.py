"""The layout of a checkpoint, and writing it in parts."""

from __future__ import annotations

import itertools
import os
import random
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint._objects import SAFE, assert_same, noise
from hypothesis import given, settings
from hypothesis import strategies as st

import nvmeio
from nvmeio._formats.torch_archives import torch_layout, torch_writing
from nvmeio._formats.torch_archives.torch_writing import (
    Crc,
    finish,
    join_crcs,
    padded_nbytes,
    write_part,
)
from nvmeio._io.inflight import InFlight
from nvmeio._memory import holds, mappings
from nvmeio._storage import crc32
from nvmeio._threads.interruptible import Cancelled

PAGE = 4096


def contents() -> dict[str, Any]:
    """Bodies, small records, and ends of bodies within pages, in turns."""
    sizes = (2_000_003, 10, 4096, 5_000_000, 1, 1_048_576 + 4096, 300, 17_000_000, 3)
    return {str(i): noise(n, dtype=torch.uint8, seed=i) for i, n in enumerate(sizes)}


# The layout


def test_pieces_and_records_make_up_the_file() -> None:
    layout = torch_layout.plan_layout(contents())
    spans = sorted(
        [(p.offset, p.end) for p in layout.pieces] + [(r.offset, r.end) for r in layout.records]
    )
    position = 0
    for start, end in spans:
        assert start == position
        position = end
    assert position == layout.nbytes
    assert layout.data_nbytes == sum(t.nbytes for t in contents().values())
    assert all(record.offset % PAGE == 0 for record in layout.records)


def test_storages_are_not_copied() -> None:
    wanted = contents()
    layout = torch_layout.plan_layout(wanted)
    for record, tensor in zip(layout.records, wanted.values(), strict=True):
        assert isinstance(record.data, torch.Tensor)
        assert record.data.data_ptr() == tensor.data_ptr()


def test_records_beyond_4_gib() -> None:
    """Sizes and places of 64 bits; the memory is never touched."""
    layout = torch_layout.plan_layout([torch.empty(5 << 30, dtype=torch.uint8), torch.empty(4)])
    assert [record.nbytes for record in layout.records] == [5 << 30, 16]
    by_offset = {piece.offset: piece for piece in layout.pieces}
    for record in layout.records:
        piece = by_offset[record.end]
        magic, crc, packed, nbytes = struct.unpack_from("<4sIQQ", piece.data)
        assert (magic, crc, packed, nbytes) == (b"PK\x07\x08", 0, record.nbytes, record.nbytes)
        assert record.crc_at[0] == record.end + 4
        assert layout.pieces[-1].offset < record.crc_at[1] < layout.nbytes


@pytest.mark.stress
def test_a_file_beyond_4_gib(path: Path) -> None:
    wanted = [torch.ones((4 << 30) + 5, dtype=torch.uint8), noise(1000)]
    nvmeio.save(wanted, path)
    wanted[0][-1] = 2
    assert zipfile.ZipFile(path).testzip() is None
    for found in (nvmeio.load(path), torch.load(path, mmap=True)):
        assert int(found[0][-1]) == 1 and found[0].numel() == wanted[0].numel()
        assert_same(found[1], wanted[1])
    path.unlink()


def test_the_layout_lets_go_of_the_object() -> None:
    """torch's pickler class is garbage in a cycle: it must not keep the storages until then."""
    import gc
    import weakref

    gc.collect()
    gc.disable()
    try:
        tensor = noise(1000)
        alive = weakref.ref(tensor.untyped_storage())
        layout = torch_layout.plan_layout([tensor])
        del tensor, layout
        assert alive() is None
    finally:
        gc.enable()


# Parts


@given(
    cuts=st.lists(st.integers(0, 7200), max_size=5),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=8)
def test_parts_in_any_order_make_the_same_file(
    cuts: list[int], order: random.Random, tmp_path: Path
) -> None:
    wanted = contents()
    layout = torch_layout.plan_layout(wanted)
    total = padded_nbytes(layout)
    bounds = sorted({0, total, *(min(cut * PAGE, total) for cut in cuts)})
    parts = list(itertools.pairwise(bounds))
    shuffled = order.sample(parts, len(parts))
    path = tmp_path / "parts.pt"
    path.unlink(missing_ok=True)
    crcs: list[Crc] = []
    with nvmeio.AioHandle(engine="threads") as handle, nvmeio.open(path, "rw") as file:
        for start, end in shuffled:
            crcs += write_part(handle, file, layout, start, end)
        finish(handle, file, layout, parts, crcs)
    os.truncate(path, layout.nbytes)
    nvmeio.save(wanted, tmp_path / "whole.pt")
    assert path.read_bytes() == (tmp_path / "whole.pt").read_bytes()


def test_over_a_file_full_of_other_bytes(path: Path) -> None:
    """What is recycled: every byte is written."""
    layout = torch_layout.plan_layout(contents())
    path.write_bytes(b"\xff" * (padded_nbytes(layout) + 100_000))
    with nvmeio.AioHandle() as handle, nvmeio.open(path, "r+") as file:
        write_part(handle, file, layout)
    os.truncate(path, layout.nbytes)
    assert zipfile.ZipFile(path).testzip() is None
    assert_same(torch.load(path), contents())


def test_records_that_are_asked_for_bit_by_bit(path: Path, new_handle: Any) -> None:
    """What a snapshot in pieces is: a function of (offset, nbytes)."""
    wanted = contents()
    layout = torch_layout.plan_layout(wanted)
    asked: list[int] = []

    def lazily(record: torch_layout.StorageRecord) -> torch_layout.StorageRecord:
        whole = record.data
        assert isinstance(whole, torch.Tensor)

        def data(offset: int, nbytes: int) -> torch.Tensor:
            asked.append(nbytes)
            return whole[offset : offset + nbytes].clone()

        return record._replace(data=data)

    layout = layout._replace(records=[lazily(record) for record in layout.records])
    with nvmeio.open(path, "rw") as file:
        write_part(new_handle("threads"), file, layout)
    os.truncate(path, layout.nbytes)
    assert_same(torch.load(path), wanted)
    assert zipfile.ZipFile(path).testzip() is None
    assert sum(asked) == layout.data_nbytes and max(asked) <= torch_writing.CHUNK_BYTES


def test_large_storages_gathered_or_written_from_where_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same file, whichever way its memory is better off."""
    files = []
    for gathered in (True, False):
        monkeypatch.setattr(torch_writing, "is_gathered", lambda _, told=gathered: told)
        files.append(tmp_path / f"{gathered}.pt")
        nvmeio.save(contents(), files[-1])
    assert files[0].read_bytes() == files[1].read_bytes()
    assert_same(torch.load(files[0]), contents())


def test_memory_of_nvmeios_own_or_of_others_is_not_gathered() -> None:
    assert not torch_writing.is_gathered(nvmeio.empty_aligned(2 << 20, dtype=torch.uint8))
    assert not torch_writing.is_gathered(torch.frombuffer(bytearray(2 << 20), dtype=torch.uint8))


def test_parts_that_are_none(path: Path, new_handle: Any) -> None:
    layout = torch_layout.plan_layout(contents())
    handle = new_handle("threads")
    with nvmeio.open(path, "rw") as file:
        for start, end in ((1, None), (0, 5000), (8192, 4096), (-4096, 0)):
            with pytest.raises(ValueError, match="whole pages"):
                write_part(handle, file, layout, start, end)
        crcs = write_part(handle, file, layout)
        for parts in ([(0, 4096)], [(4096, padded_nbytes(layout))], []):
            with pytest.raises(ValueError, match="parts"):
                finish(handle, file, layout, parts, crcs)
        with pytest.raises(ValueError, match="missing"):
            finish(handle, file, layout, [(0, padded_nbytes(layout))], crcs[1:])


def test_crcs_of_pieces_join() -> None:
    layout = torch_layout.plan_layout([noise(1000)])
    data = layout.records[0].data
    assert isinstance(data, torch.Tensor)
    first, second = data[:1234], data[1234:]
    crcs = [
        Crc(0, 1234, second.nbytes, crc32.of_tensor(second)),
        Crc(0, 0, 1234, crc32.of_tensor(first)),
    ]
    assert join_crcs(layout, crcs) == [crc32.of_tensor(data)]
    assert join_crcs(layout, []) == []
    for broken in (crcs[:1], crcs[1:], [crcs[0]._replace(offset=1233), crcs[1]]):
        with pytest.raises(ValueError, match="archive/data/0"):
            join_crcs(layout, broken)


def test_a_cancelled_part_leaves_nothing_in_flight(path: Path, new_handle: Any) -> None:
    handle = new_handle("threads")
    flight = InFlight()
    flight.cancel()
    with nvmeio.open(path, "rw") as file, pytest.raises(Cancelled):
        write_part(handle, file, torch_layout.plan_layout(SAFE["tied"]()), flight=flight)
    assert handle.stats.in_flight == 0


@pytest.mark.parametrize("huge", [False, True], ids=["small pages", "huge pages"])
def test_memory_that_is_given_back_is_not_read(
    handle: nvmeio.AioHandle, path: Path, monkeypatch: pytest.MonkeyPatch, huge: bool
) -> None:
    """It killed the process."""
    monkeypatch.setattr(mappings, "on_huge_pages", lambda address, nbytes: huge)
    tensor = torch.ones(2 << 20, dtype=torch.uint8)
    hold = holds.hold

    def give_back(storage: torch.UntypedStorage) -> Any:
        tensor.untyped_storage().resize_(0)  # as another thread may, at that moment
        return hold(storage)

    monkeypatch.setattr(holds, "hold", give_back)
    with (
        nvmeio.open(path, "w") as file,
        pytest.raises(nvmeio.IntegrityError, match=r"record '.*/data/0' was given back"),
    ):
        write_part(handle, file, torch_layout.plan_layout({"weight": tensor}))


@pytest.mark.parametrize("nbytes", [100_000, 20 << 20])
def test_memory_that_was_given_back_is_told_of_in_the_middle_of_a_record(
    handle: nvmeio.AioHandle, path: Path, nbytes: int
) -> None:
    tensor = torch.ones(nbytes, dtype=torch.uint8)
    layout = torch_layout.plan_layout({"weight": tensor})
    tensor.untyped_storage().resize_(0)
    with (
        nvmeio.open(path, "w") as file,
        pytest.raises(nvmeio.IntegrityError, match=r"record '.*/data/0' was given back"),
    ):
        write_part(handle, file, layout, 8192, nbytes // 8192 * 8192)
