"""Transfers on every engine: any size, offset, address, dtype and shape, and only those bytes."""

from __future__ import annotations

import itertools
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import (
    ALL_DTYPES,
    PATIENCE_S,
    PLAIN_DTYPES,
    QUANTISED,
    SUB_BYTE,
    bytes_tensor,
    dtype_id,
    make_tensor,
    misaligned,
    on_every_loop,
    random_bytes,
    raw,
)

import nvmeio

Make = Callable[..., nvmeio.AioHandle]

OPTIONS: dict[str, dict[str, Any]] = {
    "small-blocks": {"block_size": 4096, "queue_depth": 3},
    "one-at-a-time": {"block_size": 8192, "queue_depth": 1},
    "odd-block-size": {"block_size": 12288, "queue_depth": 5},
    "single-submit": {"block_size": 4096, "queue_depth": 16, "single_submit": True},
    "no-overlap": {"block_size": 4096, "queue_depth": 4, "overlap_events": False},
    "single-submit-no-overlap": {
        "block_size": 16384,
        "queue_depth": 2,
        "single_submit": True,
        "overlap_events": False,
    },
    "three-lanes": {"block_size": 4096, "queue_depth": 4, "intra_op_parallelism": 3},
    "defaults": {"block_size": 1 << 20, "queue_depth": 128},
}
SIZES = [0, 1, 511, 512, 513, 4095, 4096, 4097, 65535, 65536, 65537, 131072, 300_001]
EDGES = 1 << 16  # bytes of known neighbours before and behind a write


@pytest.fixture(params=list(OPTIONS))
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return OPTIONS[request.param]


# Sizes, offsets, addresses


def test_every_size_comes_back(make_handle: Make, options: dict[str, Any], path: Path) -> None:
    handle = make_handle(**options)
    for nbytes in SIZES:
        data = random_bytes(nbytes)
        assert handle.sync_pwrite(bytes_tensor(data), path) == nbytes
        assert path.read_bytes() == data
        tensor = torch.full((nbytes,), 0xA5, dtype=torch.uint8)
        assert handle.sync_pread(tensor, path) == nbytes
        assert raw(tensor) == data
        path.unlink()
    stats = handle.stats
    assert stats.bytes_written == stats.bytes_read == sum(SIZES)
    assert stats.direct_bytes + stats.bounced_bytes + stats.buffered_bytes == 2 * sum(SIZES)
    assert (stats.operations, stats.errors, stats.in_flight) == (2 * len(SIZES), 0, 0)


def test_several_mib_come_back(make_handle: Make, options: dict[str, Any], path: Path) -> None:
    handle = make_handle(**options)
    data = random_bytes((5 << 20) + 4097)
    assert handle.sync_pwrite(bytes_tensor(data), path) == len(data)
    tensor = nvmeio.empty_aligned(len(data), dtype=torch.uint8)
    assert handle.sync_pread(tensor, path) == len(data)
    assert raw(tensor) == data


SPAN_OFFSETS = (0, 1, 511, 512, 4095, 4096, 4097, 65535, EDGES)
SPANS = tuple(itertools.product(SPAN_OFFSETS, (1, 100, 4096, 70_000)))


def test_a_write_changes_its_span_and_nothing_else(handle: nvmeio.AioHandle, path: Path) -> None:
    for file_offset, nbytes in SPANS:
        before = random_bytes(file_offset + nbytes + EDGES, seed=1)
        path.write_bytes(before)
        data = random_bytes(nbytes, seed=2)
        assert handle.sync_pwrite(bytes_tensor(data), path, file_offset) == nbytes
        expected = before[:file_offset] + data + before[file_offset + nbytes :]
        assert path.read_bytes() == expected, (file_offset, nbytes)


def test_a_read_takes_its_span_and_nothing_else(handle: nvmeio.AioHandle, path: Path) -> None:
    for file_offset, nbytes in SPANS:
        content = random_bytes(file_offset + nbytes + 5000)
        path.write_bytes(content)
        tensor, room = misaligned(nbytes, 1000)
        assert handle.sync_pread(tensor, path, file_offset) == nbytes
        assert raw(tensor) == content[file_offset : file_offset + nbytes], (file_offset, nbytes)
        assert (room[:1000] == 0xA5).all(), (file_offset, nbytes)
        assert (room[1000 + nbytes :] == 0xA5).all(), (file_offset, nbytes)


def test_any_address_does(handle: nvmeio.AioHandle, path: Path) -> None:
    for shift in (0, 1, 64, 511, 512, 513, 4095):
        data = random_bytes(50_000, seed=shift)
        source, source_room = misaligned(len(data), shift)
        source.copy_(bytes_tensor(data))
        room_before = source_room.clone()
        assert handle.sync_pwrite(source, path) == len(data)
        assert path.read_bytes() == data, shift
        assert torch.equal(source_room, room_before), shift
        tensor, room = misaligned(len(data), shift)
        assert handle.sync_pread(tensor, path) == len(data)
        assert raw(tensor) == data, shift
        assert (room[:shift] == 0xA5).all(), shift
        assert (room[shift + len(data) :] == 0xA5).all(), shift


@pytest.mark.parametrize("file_offset", [(1 << 31) - 100, (1 << 32) + 7, 5 << 30])
def test_offsets_beyond_32_bits(handle: nvmeio.AioHandle, path: Path, file_offset: int) -> None:
    data = random_bytes(10_000)
    assert handle.sync_pwrite(bytes_tensor(data), path, file_offset) == len(data)
    assert path.stat().st_size == file_offset + len(data)
    assert path.stat().st_blocks * 512 < 1 << 20  # the hole before stays one
    tensor = torch.zeros(10_050, dtype=torch.uint8)
    assert handle.sync_pread(tensor, path, file_offset - 50) == 10_050
    assert raw(tensor) == bytes(50) + data


def test_a_write_past_the_end_leaves_a_hole(handle: nvmeio.AioHandle, path: Path) -> None:
    path.write_bytes(b"head")
    assert handle.sync_pwrite(bytes_tensor(b"tail"), path, 10_000) == 4
    assert path.read_bytes() == b"head" + bytes(9_996) + b"tail"


@pytest.mark.parametrize("nbytes", [0, 10, 4096, 20_000])
def test_a_write_never_truncates(handle: nvmeio.AioHandle, path: Path, nbytes: int) -> None:
    before = random_bytes(100_000)
    path.write_bytes(before)
    handle.sync_pwrite(torch.zeros(nbytes, dtype=torch.uint8), path)
    assert path.read_bytes() == bytes(nbytes) + before[nbytes:]


def test_a_write_of_nothing_creates_the_file(handle: nvmeio.AioHandle, path: Path) -> None:
    assert handle.sync_pwrite(torch.empty(0), path) == 0
    assert path.read_bytes() == b""


def test_a_read_of_nothing_reads_nothing_anywhere(handle: nvmeio.AioHandle, path: Path) -> None:
    path.write_bytes(b"some")
    for file_offset in (0, 2, 4, 100, 1 << 40):
        assert handle.sync_pread(torch.empty(0), path, file_offset) == 0


def test_a_page_after_the_files_last_byte_is_not_read(handle: nvmeio.AioHandle, path: Path) -> None:
    """The aligned span of the last block reaches beyond the end of the file."""
    content = random_bytes(4096 * 3 + 17)
    path.write_bytes(content)
    tensor, room = misaligned(4096 + 17, 512)
    assert handle.sync_pread(tensor, path, 4096 * 2) == 4096 + 17
    assert raw(tensor) == content[4096 * 2 :]
    assert (room[512 + 4096 + 17 :] == 0xA5).all()


# What the file is named by


def test_every_way_to_name_a_file(handle: nvmeio.AioHandle, path: Path) -> None:
    data = random_bytes(30_000)
    tensor = bytes_tensor(data)
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        with nvmeio.open(path, "r+") as file:
            for named in (str(path), path, fd, file):
                os.ftruncate(fd, 0)
                assert handle.sync_pwrite(tensor, named, 77) == len(data)
                assert path.read_bytes() == bytes(77) + data
                got = torch.zeros(len(data), dtype=torch.uint8)
                assert handle.sync_pread(got, named, 77) == len(data)
                assert raw(got) == data
        assert os.fstat(fd).st_size == 77 + len(data)  # the caller's descriptor stays open
    finally:
        os.close(fd)


def test_one_file_for_many_transfers(handle: nvmeio.AioHandle, path: Path) -> None:
    parts = [random_bytes(nbytes, seed=nbytes) for nbytes in range(1, 20_000, 701)]
    with nvmeio.open(path, "w") as file:
        file_offset = 0
        for part in parts:
            handle.async_pwrite(bytes_tensor(part), file, file_offset)
            file_offset += len(part)
        assert handle.wait() == len(parts)
        assert path.read_bytes() == b"".join(parts)
        tensors = [torch.zeros(len(part), dtype=torch.uint8) for part in parts]
        file_offset = 0
        for tensor in tensors:
            handle.async_pread(tensor, file, file_offset)
            file_offset += tensor.numel()
        assert handle.wait() == len(parts)
    assert [raw(tensor) for tensor in tensors] == parts


# dtypes


def test_every_dtype(handle: nvmeio.AioHandle, path: Path) -> None:
    for dtype in ALL_DTYPES:
        data = random_bytes(16 * 1111, seed=dtype.itemsize)
        if dtype is torch.bool:
            data = bytes(byte & 1 for byte in data)
        path.write_bytes(b"")
        tensor = make_tensor(dtype, data)
        assert tensor.dtype == dtype
        assert handle.sync_pwrite(tensor, path) == len(data)
        assert path.read_bytes() == data, dtype
        got = make_tensor(dtype, bytes(len(data)))
        assert handle.sync_pread(got, path) == len(data)
        assert raw(got) == data, dtype


def test_the_dtypes_are_all_there() -> None:
    """The list above is torch's own; these must not be lost from it."""
    named = "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32"
    named += " float64 complex32 complex64 complex128 float8_e4m3fn float8_e5m2 qint8 quint8"
    named += " qint32 quint4x2"
    assert {getattr(torch, name) for name in named.split()} <= set(ALL_DTYPES)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_dtype_not_contiguous(handle: nvmeio.AioHandle, path: Path) -> None:
    for dtype in (d for d in PLAIN_DTYPES if d not in SUB_BYTE):
        check_transposed(handle, path, dtype)


def test_sub_byte_dtypes_not_contiguous(new_handle: Make, path: Path) -> None:
    """torch has no copy for int1 to uint7; their elements are bytes like any other."""
    handle = new_handle("threads")
    for dtype in SUB_BYTE:
        check_transposed(handle, path, dtype)


def check_transposed(handle: nvmeio.AioHandle, path: Path, dtype: torch.dtype) -> None:
    path.write_bytes(b"")
    item = dtype.itemsize
    data = random_bytes(30 * item) if dtype is not torch.bool else bytes([0, 1, 1] * 10)
    tensor = make_tensor(dtype, data).view(5, 6).t()
    items = [data[at : at + item] for at in range(0, len(data), item)]
    transposed = b"".join(items[row * 6 + column] for column in range(6) for row in range(5))
    assert handle.sync_pwrite(tensor, path) == len(data)
    assert path.read_bytes() == transposed
    base = make_tensor(dtype, bytes(len(data))).view(5, 6)
    assert handle.sync_pread(base.t(), path) == len(data)
    moved = raw(base)
    columns = [transposed[at : at + item] for at in range(0, len(data), item)]
    assert moved == b"".join(columns[c * 5 + r] for r in range(5) for c in range(6))


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32], ids=dtype_id)
def test_quantised_tensors_move_their_integers(
    handle: nvmeio.AioHandle, path: Path, dtype: torch.dtype
) -> None:
    values = torch.arange(12, dtype=torch.float32).view(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates quantised tensors
        tensor = torch.quantize_per_tensor(values, 0.5, 3, dtype)
        assert handle.sync_pwrite(tensor, path) == 12 * dtype.itemsize
        assert path.read_bytes() == tensor.int_repr().numpy().tobytes()
        got = torch.quantize_per_tensor(torch.zeros(3, 4), 0.5, 3, dtype)
        assert handle.sync_pread(got, path) == 12 * dtype.itemsize
        assert torch.equal(got.int_repr(), tensor.int_repr())
        # Transposed: written in the order of its elements, read back into them.
        assert handle.sync_pwrite(tensor.t(), path) == 12 * dtype.itemsize
        assert path.read_bytes() == tensor.int_repr().t().numpy().tobytes()
        turned = torch.quantize_per_tensor(torch.zeros(3, 4), 0.5, 3, dtype)
        assert handle.sync_pread(turned.t(), path) == 12 * dtype.itemsize
        assert torch.equal(turned.int_repr(), tensor.int_repr())


@pytest.mark.parametrize("dtype", QUANTISED, ids=dtype_id)
def test_a_packed_tensor_moves_its_storage(
    handle: nvmeio.AioHandle, path: Path, dtype: torch.dtype
) -> None:
    """quint4x2 and quint2x4 hold several elements in a byte: fewer bytes than `nbytes` says."""
    tensor = make_tensor(dtype, random_bytes(40))
    stored = tensor.untyped_storage().nbytes()
    assert stored == 40
    assert handle.sync_pwrite(tensor, path) == 40
    assert path.stat().st_size == 40


# Shapes and views


def views() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Views of a (6, 8, 10) tensor."""
    return {
        "whole": lambda t: t,
        "row": lambda t: t[2],
        "rows": lambda t: t[1:4],
        "element": lambda t: t[3, 4, 5],
        "empty-slice": lambda t: t[2:2],
        "flat": lambda t: t.view(-1)[7:333],
        "transposed": lambda t: t.transpose(0, 2),
        "permuted": lambda t: t.permute(1, 2, 0),
        "strided": lambda t: t[::2, 1::3, ::5],
        "column": lambda t: t[:, 3, 4],
        "diagonal": lambda t: t.diagonal(0, 1, 2),
        "narrowed": lambda t: t.narrow(2, 3, 4),
        "unsqueezed": lambda t: t[:, None, 2:3].unsqueeze(-1),
        "as-strided": lambda t: t.as_strided((3, 7), (100, 11), 5),
        "channels-last": lambda t: t[None].contiguous(memory_format=torch.channels_last),
    }


def test_views_are_written_in_the_order_of_their_elements(
    handle: nvmeio.AioHandle, path: Path
) -> None:
    for name, view in views().items():
        tensor = view(torch.randn(6, 8, 10))
        before = tensor.clone()
        path.write_bytes(b"")
        assert handle.sync_pwrite(tensor, path, 5) == tensor.nbytes
        assert path.read_bytes()[5:] == tensor.numpy().tobytes(), name
        assert torch.equal(tensor, before), name


def test_views_are_read_into_and_their_neighbours_are_not(
    handle: nvmeio.AioHandle, path: Path
) -> None:
    for name, view in views().items():
        base = torch.randn(6, 8, 10)
        expected = base.clone()
        target = view(base)
        values = np.random.default_rng(0).random(target.numel(), dtype=np.float32)
        path.write_bytes(b"skip." + values.tobytes())
        assert handle.sync_pread(target, path, 5) == target.nbytes
        assert torch.equal(target, torch.from_numpy(values).view(target.shape)), name
        if target.untyped_storage().data_ptr() == base.untyped_storage().data_ptr():
            view(expected).copy_(torch.from_numpy(values).view(target.shape))
            assert torch.equal(base, expected), name


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 5), (1,), (1, 1, 1)], ids=str)
def test_shapes_without_extent(
    handle: nvmeio.AioHandle, path: Path, shape: tuple[int, ...]
) -> None:
    tensor = torch.full(shape, 1.25, dtype=torch.float64)
    assert handle.sync_pwrite(tensor, path) == tensor.nbytes
    got = torch.zeros(shape, dtype=torch.float64)
    assert handle.sync_pread(got, path) == tensor.nbytes
    assert torch.equal(got, tensor)


def test_an_expanded_tensor_is_written_in_full(handle: nvmeio.AioHandle, path: Path) -> None:
    tensor = torch.tensor([[1.0], [2.0]]).expand(2, 3000)
    assert handle.sync_pwrite(tensor, path) == 24_000
    assert path.read_bytes() == tensor.numpy().tobytes()


def test_an_expanded_tensor_cannot_be_read_into(handle: nvmeio.AioHandle, path: Path) -> None:
    """As `copy_`: several elements share one memory location."""
    path.write_bytes(bytes(4096))
    base = torch.ones(1)
    with pytest.raises(RuntimeError, match="more than one element"):
        base.expand(8).copy_(torch.zeros(8))
    with pytest.raises(RuntimeError, match="more than one element"):
        handle.sync_pread(base.expand(8), path)
    assert base.item() == 1.0


def test_conjugate_and_negative_views(handle: nvmeio.AioHandle, path: Path) -> None:
    tensor = torch.randn(50, dtype=torch.complex64)
    conjugate, negative = tensor.conj(), tensor.conj().imag
    assert conjugate.is_conj()
    assert negative.is_neg()
    assert handle.sync_pwrite(conjugate, path) == 400
    assert path.read_bytes() == np.conj(tensor.numpy()).tobytes()
    got = torch.zeros(50, dtype=torch.complex64)
    assert handle.sync_pread(got.conj(), path) == 400
    assert torch.equal(got, tensor)  # conjugated once on the way out, once on the way in
    assert handle.sync_pwrite(negative, path) == 200
    assert path.read_bytes()[:200] == (-tensor.numpy().imag).tobytes()
    got = torch.zeros(50, dtype=torch.complex64)
    assert handle.sync_pread(got.conj().imag, path) == 200
    assert torch.equal(got.imag, tensor.imag)
    assert (got.real == 0).all()


def test_a_storage_shared_by_two_tensors(handle: nvmeio.AioHandle, path: Path) -> None:
    storage = torch.zeros(1000, dtype=torch.int32)
    left, right = storage[:500], storage[500:]
    path.write_bytes(np.arange(1000, dtype=np.int32).tobytes())
    operations = [handle.async_pread(right, path, 2000), handle.async_pread(left, path, 0)]
    assert [operation.result(100) for operation in operations] == [2000, 2000]
    assert torch.equal(storage, torch.arange(1000, dtype=torch.int32))


# Autograd


def values_file(path: Path, count: int = 12) -> torch.Tensor:
    values = torch.arange(100, 100 + count, dtype=torch.float32)
    path.write_bytes(values.numpy().tobytes())
    return values


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_leaf_that_requires_grad_is_read_into_under_no_grad_only(
    handle: nvmeio.AioHandle, path: Path, contiguous: bool
) -> None:
    values = values_file(path)
    base = torch.zeros(3, 4) if contiguous else torch.zeros(4, 3).t()
    leaf = base.requires_grad_()
    with pytest.raises(RuntimeError, match="leaf"):
        leaf.copy_(values.view(3, 4))
    with pytest.raises(RuntimeError, match=r"leaf.*no_grad"):
        handle.async_pread(leaf, path)
    assert (leaf == 0).all()
    with torch.no_grad():
        assert handle.sync_pread(leaf, path) == 48
    assert torch.equal(leaf.detach(), values.view(3, 4))
    assert leaf.requires_grad
    assert leaf.is_leaf


def test_the_mode_of_the_call_counts_not_that_of_its_end(
    handle: nvmeio.AioHandle, path: Path
) -> None:
    values = values_file(path)
    leaf = torch.zeros(4, 3, requires_grad=True)
    with torch.no_grad():
        contiguous, turned = handle.async_pread(leaf, path), torch.zeros(3, 4, requires_grad=True)
        other = handle.async_pread(turned.t(), path)
    assert (contiguous.result(100), other.result(100)) == (48, 48)
    assert torch.equal(leaf.detach(), values.view(4, 3))
    assert torch.equal(turned.detach().t(), values.view(4, 3))


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_parameter(handle: nvmeio.AioHandle, path: Path, contiguous: bool) -> None:
    layer = torch.nn.Linear(4, 3)
    weight = layer.weight if contiguous else torch.nn.Parameter(layer.weight.detach().t())
    assert handle.sync_pwrite(weight, path) == 48
    assert path.read_bytes() == weight.detach().numpy().tobytes()
    before = weight.detach().clone()
    with torch.no_grad():
        weight.zero_()
        assert handle.sync_pread(weight, path) == 48
    assert torch.equal(weight.detach(), before)


def test_a_result_of_a_computation_is_read_into_as_copy_does_it(
    handle: nvmeio.AioHandle, path: Path
) -> None:
    values = values_file(path)

    def replace(read: Callable[[torch.Tensor], object]) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = torch.ones(12, requires_grad=True)
        middle = leaf * 2
        read(middle)
        (middle * middle).sum().backward()
        assert leaf.grad is not None
        return middle.detach(), leaf.grad

    torch_says = replace(lambda t: t.copy_(values))
    we_say = replace(lambda t: handle.sync_pread(t, path))
    assert torch.equal(we_say[0], values)
    assert torch.equal(torch_says[1], we_say[1])  # zero: the old values have no part in it


def test_a_view_of_a_leaf_is_refused_as_copy_does_it(handle: nvmeio.AioHandle, path: Path) -> None:
    values = values_file(path)
    leaf = torch.zeros(12, requires_grad=True)
    with pytest.raises(RuntimeError, match="a view of a leaf"):
        leaf.view(3, 4).copy_(values.view(3, 4))
    with pytest.raises(RuntimeError, match="a view of a leaf"):
        handle.sync_pread(leaf.view(3, 4), path)


def test_tensors_that_require_grad_are_written(handle: nvmeio.AioHandle, path: Path) -> None:
    leaf = torch.randn(12, requires_grad=True)
    assert handle.sync_pwrite(leaf, path) == 48
    assert path.read_bytes() == leaf.detach().numpy().tobytes()
    middle = (leaf * 3).view(3, 4).t()
    assert handle.sync_pwrite(middle, path) == 48
    assert path.read_bytes() == middle.detach().numpy().tobytes()


@pytest.mark.parametrize("contiguous", [True, False])
def test_autograd_notices_that_a_saved_tensor_was_read_into(
    handle: nvmeio.AioHandle, path: Path, contiguous: bool
) -> None:
    values_file(path)
    weight = torch.ones(3, 4, requires_grad=True)
    data = torch.ones(3, 4) if contiguous else torch.ones(4, 3).t()
    loss = (weight * data).sum()
    version = data._version
    assert handle.sync_pread(data, path) == 48
    assert data._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autograd_notices_a_read_under_no_grad(handle: nvmeio.AioHandle, path: Path) -> None:
    values_file(path)
    weight = torch.ones(12, requires_grad=True)
    factor = torch.ones(12, requires_grad=True)
    loss = (weight * factor).sum()
    with torch.no_grad():
        assert handle.sync_pread(weight, path) == 48
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autograd_notices_a_read_into_a_view_of_a_saved_tensor(
    handle: nvmeio.AioHandle, path: Path
) -> None:
    values_file(path)
    weight, data = torch.ones(24, requires_grad=True), torch.ones(24)
    loss = (weight * data).sum()
    assert handle.sync_pread(data[6:18], path) == 48
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autograd_notices_a_read_that_ended_short(handle: nvmeio.AioHandle, path: Path) -> None:
    """The bytes up to the end of the file are in the tensor, so it was changed in place."""
    values_file(path)
    weight, data = torch.ones(24, requires_grad=True), torch.ones(24)
    loss = (weight * data).sum()
    with pytest.raises(nvmeio.ShortTransferError):
        handle.sync_pread(data, path)
    assert data[0] == 100
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_write_is_no_change(handle: nvmeio.AioHandle, path: Path) -> None:
    weight, data = torch.ones(12, requires_grad=True), torch.ones(12)
    loss = (weight * data).sum()
    version = data._version
    handle.sync_pwrite(data, path)
    assert data._version == version
    loss.backward()


# Inference mode


@pytest.mark.parametrize("contiguous", [True, False])
def test_inference_tensors(handle: nvmeio.AioHandle, path: Path, contiguous: bool) -> None:
    values = values_file(path).view(3, 4)
    with torch.inference_mode():
        tensor = torch.zeros(3, 4) if contiguous else torch.zeros(4, 3).t()
    assert tensor.is_inference()
    with pytest.raises(RuntimeError, match="inference"):
        tensor.copy_(values)
    with pytest.raises(RuntimeError, match="inference tensor outside"):
        handle.async_pread(tensor, path)
    with torch.inference_mode():
        assert handle.sync_pread(tensor, path) == 48
        assert torch.equal(tensor, values)
        tensor.zero_()
        operation = handle.async_pread(tensor, path)
    assert operation.result(100) == 48
    assert torch.equal(tensor, values)
    assert handle.sync_pwrite(tensor, path, 1) == 48  # writing changes nothing, so it is allowed
    assert path.read_bytes()[1:] == values.numpy().tobytes()


@pytest.mark.parametrize("contiguous", [True, False])
def test_ordinary_tensors_in_inference_mode(
    handle: nvmeio.AioHandle, path: Path, contiguous: bool
) -> None:
    values = values_file(path).view(3, 4)
    tensor = torch.zeros(3, 4) if contiguous else torch.zeros(4, 3).t()
    version = tensor._version
    with torch.inference_mode():
        assert handle.sync_pread(tensor, path) == 48
        first = tensor._version
        operation = handle.async_pread(tensor, path)
    assert operation.result(100) == 48
    assert version < first < tensor._version
    assert not tensor.is_inference()
    assert torch.equal(tensor, values)


# Many at once


@on_every_loop
async def test_a_hundred_transfers_at_once(handle: nvmeio.AioHandle, tmp_path: Path) -> None:
    parts = [random_bytes(97 * n, seed=n) for n in range(50)]
    for n, part in enumerate(parts):
        handle.async_pwrite(bytes_tensor(part), tmp_path / f"{n}.bin", n)
    assert await handle.drain() == 50
    tensors = [torch.zeros(len(part), dtype=torch.uint8) for part in parts]
    operations = [handle.async_pread(t, tmp_path / f"{n}.bin", n) for n, t in enumerate(tensors)]
    for operation, part in zip(reversed(operations), reversed(parts), strict=True):
        assert await operation == len(part)
    assert [raw(tensor) for tensor in tensors] == parts


def test_a_small_read_does_not_wait_for_a_large_one(make_handle: Make, direct_path: Path) -> None:
    """Requests take turns block by block, so what came last may well end first.

    One attempt suffices, of however many: a queue that serves one request after the other never
    does it, and to be late for it takes a busy machine only.
    """
    large = nvmeio.empty_aligned(32 << 20, dtype=torch.uint8)
    handle = make_handle(block_size=4096, queue_depth=1)
    with open(direct_path, "wb") as file:
        file.truncate(large.nbytes)
    patience = time.monotonic() + PATIENCE_S
    while time.monotonic() < patience:
        behind = handle.async_pread(large, direct_path)
        small = handle.async_pread(torch.zeros(4096, dtype=torch.uint8), direct_path, 8 << 20)
        assert small.result(100) == 4096
        first = not behind.done()
        behind.cancel()
        handle.wait(100)
        if first:
            return
    raise AssertionError("the small read was last every time")


# Which way the bytes went


def test_aligned_memory_goes_direct(make_handle: Make, direct_path: Path) -> None:
    handle = make_handle()
    tensor = nvmeio.empty_aligned(1 << 18, dtype=torch.uint8)
    handle.sync_pwrite(tensor, direct_path)
    handle.sync_pread(tensor, direct_path)
    stats = handle.stats
    assert (stats.direct_bytes, stats.bounced_bytes, stats.buffered_bytes) == (2 << 18, 0, 0)


def test_misaligned_memory_is_bounced(make_handle: Make, direct_path: Path) -> None:
    handle = make_handle()
    tensor, _ = misaligned(1 << 18, 1)
    handle.sync_pwrite(tensor, direct_path)
    handle.sync_pread(tensor, direct_path)
    stats = handle.stats
    assert (stats.direct_bytes, stats.bounced_bytes, stats.buffered_bytes) == (0, 2 << 18, 0)


def test_the_edges_of_a_write_are_buffered(make_handle: Make, direct_path: Path) -> None:
    handle = make_handle()
    operation = handle.async_pwrite(torch.zeros(1 << 18, dtype=torch.uint8), direct_path, 100)
    assert operation.result(100) == 1 << 18
    assert operation.buffered_bytes == (1 << 18) - (63 * 4096)
    assert operation.direct_bytes + operation.bounced_bytes == 63 * 4096
    assert operation.transferred == 1 << 18


def test_an_operation_and_the_handle_count_the_same(handle: nvmeio.AioHandle, path: Path) -> None:
    operations = [
        handle.async_pwrite(torch.zeros(n * 1009, dtype=torch.uint8), path, n * 20_001)
        for n in range(20)
    ]
    handle.wait()
    stats = handle.stats
    for way in ("direct_bytes", "bounced_bytes", "buffered_bytes"):
        assert getattr(stats, way) == sum(getattr(operation, way) for operation in operations)
    assert stats.bytes_written == sum(operation.transferred for operation in operations)
