"""safetensors files: what the package reads and writes, what it refuses, shards, atomicity."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import pickle
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint._safetensors_states import SafetensorError, Tensors, package, write_file
from support import HeldEngine, cut_before_reads, on_every_loop, raw, run_python, until
from torch._subclasses.fake_tensor import FakeTensorMode

import nvmeio
from nvmeio._formats.safetensors import headers, shards
from nvmeio.checkpoint import saving
from nvmeio.checkpoint.safetensors import (
    SMALL_BYTES,
    async_load_safetensors,
    async_save_safetensors,
    load_safetensors,
    read_header,
    save_safetensors,
)
from nvmeio.testing import FakeEngine


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


NewHandle = Callable[..., nvmeio.AioHandle]


def every_dtype() -> Tensors:
    return {
        name: torch.randint(0, 2, (48,), dtype=torch.uint8).view(dtype)
        for name, dtype in headers.DTYPES.items()
    }


def every_form() -> Tensors:
    base = torch.randn(40, 30)
    return {
        **every_dtype(),
        "0-d": torch.tensor(3.5),
        "empty": torch.empty(0, 5, dtype=torch.bfloat16),
        "odd": torch.arange(4097, dtype=torch.uint8),
        "page": torch.arange(4096, dtype=torch.int32),
        "large": torch.randn(1200, 1001),
        "transposed": torch.randn(700, 900).t(),
        "strided fp8": torch.randint(0, 255, (30, 40), dtype=torch.uint8)
        .view(torch.float8_e4m3fn)
        .t(),
        "conjugate": torch.randn(100, dtype=torch.complex64).conj(),
        "parameter": torch.nn.Parameter(torch.randn(8, 8)),
        "expanded": torch.randn(3, 1).expand(3, 5),
        "rows 1": base[:20],  # of one storage, but not the same bytes of it
        "rows 2": base[20:],
        "näme/with.dots \N{SNOWMAN}": torch.ones(3),
    }


def bytes_of(tensor: torch.Tensor) -> bytes:
    dense = tensor.detach().resolve_conj()
    dense = dense.view(torch.uint8) if dense.element_size() == 1 else dense
    return raw(dense.contiguous())


def assert_same(found: Tensors, wanted: Tensors) -> None:
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert found[name].is_contiguous(), name
        assert bytes_of(found[name]) == bytes_of(tensor), name


# Both ways


def test_the_package_reads_what_is_saved(file: Path, handle: nvmeio.AioHandle) -> None:
    tensors = every_form()
    save_safetensors(tensors, file, handle=handle)
    assert_same(package.load_file(file), tensors)
    assert_same(load_safetensors(file, handle=handle), tensors)
    assert os.listdir(file.parent) == [file.name]


def test_what_the_package_saved_is_loaded(file: Path, handle: nvmeio.AioHandle) -> None:
    tensors = {name: tensor.detach().clone() for name, tensor in every_dtype().items()}
    tensors |= {"a": torch.randn(100, 100), "b": torch.empty(3, 0), "c": torch.tensor(7)}
    package.save_file(tensors, file)
    assert_same(load_safetensors(file, handle=handle), tensors)


@on_every_loop
async def test_saving_and_loading_are_awaited(file: Path, handle: nvmeio.AioHandle) -> None:
    tensors = every_form()
    await async_save_safetensors(tensors, file, handle=handle)
    assert_same(await async_load_safetensors(file, handle=handle), tensors)


def test_no_handle_is_needed(file: Path) -> None:
    tensors = {"a": torch.randn(10)}
    save_safetensors(tensors, str(file))
    assert_same(load_safetensors(str(file)), tensors)


# Small ones, without a handle


def test_a_small_file_needs_no_handle_and_no_thread(file: Path) -> None:
    """It is slower than the package where most people try it first, if it makes either."""
    ran = run_python(
        f"""
        import _thread, torch
        from nvmeio import load_safetensors, save_safetensors
        from nvmeio._io import handles
        from nvmeio.checkpoint.safetensors import read_header

        handles.new_handle = None
        save_safetensors({{"a": torch.arange(1000)}}, {str(file)!r})
        assert torch.equal(load_safetensors({str(file)!r})["a"], torch.arange(1000))
        assert load_safetensors({str(file)!r}, "meta")["a"].shape == (1000,)
        assert list(read_header({str(file)!r}).tensors) == ["a"]
        assert not _thread._count()
        """
    )
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("align", [False, True])
def test_a_small_file_has_the_bytes_of_any_other(
    align: bool, file: Path, handle: nvmeio.AioHandle
) -> None:
    tensors = every_form()
    save_safetensors(tensors, file, {"a": "b"}, align=align)
    small = file.read_bytes()
    save_safetensors(tensors, file, {"a": "b"}, align=align, handle=handle)
    assert file.read_bytes() == small
    assert_same(load_safetensors(file), tensors)


@pytest.mark.parametrize("mode", [FakeTensorMode, torch.inference_mode])
def test_modes_of_the_thread_change_nothing(mode: Callable[[], Any], file: Path) -> None:
    """As for larger files, which another thread reads and writes."""
    tensors = {"a": torch.arange(10.0)}
    with mode():
        save_safetensors(tensors, file)
        found = load_safetensors(file)
    assert type(found["a"]) is torch.Tensor
    assert not found["a"].is_inference()
    assert_same(found, tensors)


@on_every_loop
async def test_a_small_file_is_awaited_too(file: Path) -> None:
    tensors = every_form()
    await async_save_safetensors(tensors, file)
    assert_same(await async_load_safetensors(file), tensors)


@pytest.mark.parametrize("more", [0, 1])
def test_files_around_the_largest_that_is_read_so(more: int, file: Path) -> None:
    tensors = {"a": torch.randint(0, 256, (SMALL_BYTES - 256 + 256 * more,), dtype=torch.uint8)}
    save_safetensors(tensors, file)
    assert (file.stat().st_size > SMALL_BYTES) == bool(more)
    assert_same(load_safetensors(file), tensors)


def test_progress_of_a_small_file_is_told(file: Path) -> None:
    told: list[tuple[str, int, int]] = []
    save_safetensors({"a": torch.ones(1000)}, file, progress=lambda *now: told.append(now))
    nbytes = file.stat().st_size
    assert told[-1] == ("save model.safetensors", nbytes, nbytes)
    assert load_safetensors(file, progress=lambda *now: told.append(now))["a"].sum() == 1000
    assert told[-1] == ("load model.safetensors", 4000, 4000)


def test_a_small_file_that_is_cut_while_it_is_read_names_the_tensor(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_safetensors({"a": torch.ones(1000), "b": torch.ones(300_000)}, file)
    cut_before_reads(monkeypatch, file, 5000)
    with pytest.raises(nvmeio.TransferError, match=r"was cut.*'b'|'b'.*was cut"):
        load_safetensors(file)


def test_a_file_that_is_cut_while_it_is_read_whole_names_the_tensor(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_safetensors({"a": torch.ones(1000), "b": torch.ones(30_000)}, file)
    cut_before_reads(monkeypatch, file, 5000)
    with pytest.raises(nvmeio.IntegrityError, match="truncated: tensor 'b'"):
        load_safetensors(file)


def test_a_small_file_is_read_once_into_tensors_that_can_grow(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {
        "a": torch.randn(3, 5),
        "b": torch.arange(7, dtype=torch.int8),
        "c": torch.tensor(2.0, dtype=torch.bfloat16),
        "d": torch.empty(0, 4),
    }
    save_safetensors(state, file)
    preadv, reads = os.preadv, []

    def noted(fd: int, buffers: Any, offset: int) -> int:
        reads.append(offset)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", noted)
    found = load_safetensors(file)
    assert reads == [0]
    assert found.keys() == state.keys()
    for name, tensor in found.items():
        assert tensor.dtype == state[name].dtype and tensor.shape == state[name].shape
        assert torch.equal(tensor, state[name]), name
        tensor.resize_(100)
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == len(found)


def test_a_storage_that_was_given_back_is_not_saved(file: Path) -> None:
    state = {"a": torch.ones(10)}
    state["a"].untyped_storage().resize_(0)
    with pytest.raises(nvmeio.IntegrityError, match="'a'"):
        save_safetensors(state, file)
    assert not file.exists()


def test_a_small_save_that_fails_is_the_packages_error_and_leaves_the_old_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_safetensors({"a": torch.ones(10)}, file)

    def fail(path: Any, parts: Any, durable: bool = True) -> None:
        raise nvmeio.TransferError(errno.ENOSPC, operation="pwrite", path=os.fspath(path))

    with monkeypatch.context() as patched:
        patched.setattr(saving, "replace_from", fail)
        with pytest.raises(SafetensorError) as failed:
            save_safetensors({"a": torch.zeros(10)}, file)
    assert isinstance(failed.value, nvmeio.TransferError)
    assert load_safetensors(file)["a"].sum() == 10


def test_every_dtype_of_the_package_is_known() -> None:
    assert set(headers.DTYPES.values()) == {dtype for dtype in package._SIZE if dtype}


def test_a_file_without_tensors(file: Path) -> None:
    save_safetensors({}, file, {"a": "b"})
    assert package.load_file(file) == load_safetensors(file) == {}
    assert read_header(file).metadata == {"a": "b"}


def test_metadata_is_written_and_read(file: Path) -> None:
    save_safetensors({"a": torch.ones(1)}, file, {"step": "7", "ключ": "значение"})
    with pytest.importorskip("safetensors").safe_open(file, "pt") as opened:
        assert opened.metadata() == {"step": "7", "ключ": "значение"}
    assert read_header(file).metadata == {"step": "7", "ключ": "значение"}
    save_safetensors({"a": torch.ones(1)}, file)  # none, as the package
    assert read_header(file).metadata == {}
    assert b"__metadata__" not in file.read_bytes()


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, {'\x00\x7f\t"': "é\n\\/"}])
def test_the_file_is_the_packages_byte_for_byte(file: Path, metadata: Any) -> None:
    """It was padded to 4 KiB unless told otherwise; whoever compares files saw a difference."""
    tensors = every_dtype() | {
        "b": torch.randn(700, 901),
        "a": torch.randn(3),
        "0-d": torch.tensor(3.5),
        "empty": torch.empty(0, 5, dtype=torch.bfloat16),
        "näme/with.dots \N{SNOWMAN}": torch.ones(3),
    }
    save_safetensors(tensors, file, metadata)
    assert file.read_bytes() == package.save(tensors, metadata)
    assert_same(load_safetensors(file), tensors)


def test_a_file_of_the_package_without_tensors(file: Path) -> None:
    save_safetensors({}, file)
    assert file.read_bytes() == package.save({})


def test_shards_are_files_of_the_package(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(300), "a": torch.randn(300)}
    save_safetensors(tensors, tmp_path, max_shard_size=1200)
    assert (tmp_path / "model-00002-of-00002.safetensors").read_bytes() == package.save(
        {"a": tensors["a"]}
    )


def test_shards_make_their_directory(tmp_path: Path) -> None:
    """It failed with a bare FileNotFoundError where one file made it."""
    tensors = {name: torch.randn(100) for name in "abc"}
    path = tmp_path / "new" / "model.safetensors"
    save_safetensors(tensors, path, max_shard_size=500)
    assert load_safetensors(path.parent).keys() == tensors.keys()
    with pytest.raises(nvmeio.TransferError, match="one level is made"):
        save_safetensors(
            tensors, tmp_path / "no" / "such" / "model.safetensors", max_shard_size=500
        )


def test_shards_into_a_directory_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"shards is not a directory, .*: make the directory"):
        save_safetensors({"a": torch.ones(3)}, tmp_path / "shards", max_shard_size="1MB")
    assert os.listdir(tmp_path) == []


def test_tensors_lie_on_blocks_of_the_drive_where_asked(file: Path) -> None:
    save_safetensors(every_form(), file, align=True)
    for name, entry in read_header(file).tensors.items():
        if entry.nbytes % 4096 == 0:
            assert entry.start % 4096 == 0, name
        dtype, _ = entry.for_torch()
        assert entry.start % dtype.itemsize == 0, name


def test_saving_and_loading_are_direct(direct_path: Path, new_handle: NewHandle) -> None:
    handle = new_handle("auto")
    save_safetensors(
        {"w": torch.randn(1024, 1024), "b": torch.randn(1024)}, direct_path, handle=handle
    )
    assert handle.stats.buffered_bytes == 0
    loaded = load_safetensors(direct_path, handle=handle)
    assert handle.stats.buffered_bytes == 0
    assert nvmeio.buffers.owns(loaded["w"].data_ptr(), loaded["w"].nbytes)


def test_tensors_on_odd_addresses_are_moved(file: Path) -> None:
    """The format does not ask for alignment; torch's kernels do."""
    text = (
        b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        b'"y":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}}'
    )
    write_file(file, text, b"\1" + struct.pack("<2f", 1.5, -2.0))
    found = load_safetensors(file)
    assert found["y"].tolist() == [1.5, -2.0]
    assert found["y"].data_ptr() % 4 == 0


def test_loaded_tensors_are_nobodys_views(file: Path) -> None:
    save_safetensors({"a": torch.randn(3, 4), "b": torch.randn(5)}, file)
    loaded = load_safetensors(file)
    assert not any(tensor._is_view() for tensor in loaded.values())
    assert loaded["a"].untyped_storage().nbytes() == 48
    loaded["a"].requires_grad_().sum().backward()
    with torch.device("meta"), torch.inference_mode():
        assert load_safetensors(file)["b"].tolist() == loaded["b"].tolist()


def test_loading_to_meta_reads_headers_only(file: Path, new_handle: NewHandle) -> None:
    tensors = every_form() | {"large": torch.zeros(1 << 20)}
    save_safetensors(tensors, file)
    handle = new_handle("threads")
    loaded = load_safetensors(file, "meta", handle=handle)
    assert handle.stats.bytes_read == 0
    assert {name: (t.shape, t.dtype, t.is_meta) for name, t in loaded.items()} == {
        name: (t.shape, t.dtype, True) for name, t in tensors.items()
    }


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gpu_tensors_are_saved_and_loaded(file: Path) -> None:
    tensors = {name: tensor.detach().cuda() for name, tensor in every_form().items()}
    save_safetensors(tensors, file)
    loaded = load_safetensors(file, "cuda")
    assert all(tensor.is_cuda for tensor in loaded.values())
    on_cpu = {name: tensor.cpu() for name, tensor in tensors.items()}
    assert_same({name: tensor.cpu() for name, tensor in loaded.items()}, on_cpu)
    assert_same(package.load_file(file), on_cpu)


# What cannot be saved


def test_shared_memory_is_refused(file: Path) -> None:
    weight = torch.randn(4, 4)
    for tensors in (
        {"embed": weight, "head": weight},
        {"all": weight, "row": weight[1]},
        {"all": weight, "turned": weight.t()},
    ):
        with pytest.raises(RuntimeError, match="share memory"):
            save_safetensors(tensors, file)
        with pytest.raises((RuntimeError, ValueError)):
            package.save_file(tensors, file)
    assert not file.exists()


@pytest.mark.parametrize(
    ("tensors", "error", "told"),
    [
        ([1], TypeError, "Expected a dict"),
        ([1], ValueError, "Expected a dict"),  # which the package raises
        ({1: torch.ones(1)}, TypeError, "must be a str"),
        ({"a": 1}, TypeError, "Key `a` is invalid, .*received <class 'int'>"),
        ({"a": 1}, ValueError, "Key `a` is invalid, .*received <class 'int'>"),
        ({"__metadata__": torch.ones(1)}, ValueError, "cannot be a tensor's name"),
        ({"a": torch.ones(2, 2).to_sparse()}, ValueError, "to_dense"),
        ({"a": torch.ones(2, device="meta")}, TypeError, "'a' cannot be saved.*meta"),
        ({"a": torch.ones(2, device="meta")}, RuntimeError, "Cannot copy out of meta tensor"),
        ({"a": torch.ones(2, dtype=torch.complex128)}, TypeError, "complex128"),
        ({"\ud800": torch.ones(1)}, ValueError, "not valid Unicode"),
    ],
)
def test_what_the_format_cannot_hold_is_refused(
    file: Path, tensors: Any, error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        save_safetensors(tensors, file)
    assert os.listdir(file.parent) == []


@pytest.mark.parametrize(
    "tensors", ["no dict", {"a": {"b": 1}}, {"a": torch.eye(2).to_sparse(), "b": torch.ones(2)}]
)
def test_what_the_package_refuses_is_refused_in_its_words(file: Path, tensors: Any) -> None:
    """The words were others: whoever looks for them in a message did not find them."""
    with pytest.raises(ValueError) as theirs:
        package.save_file(tensors, file)
    with pytest.raises(ValueError) as ours:
        save_safetensors(tensors, file)
    assert str(ours.value) == str(theirs.value)


def test_no_name_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty name was the current directory: model.safetensors was written there."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError):
        save_safetensors({"a": torch.ones(1)}, "")
    assert os.listdir(tmp_path) == []


def test_a_save_that_fails_is_the_packages_error_as_well(file: Path, new_handle: NewHandle) -> None:
    """`except SafetensorError` around a save did not take what a full disk raised."""
    failing = new_handle(FakeEngine(fail=lambda kind, offset, nbytes: errno.ENOSPC))
    with pytest.raises(SafetensorError) as failed:
        save_safetensors({"a": torch.ones(5000)}, file, handle=failing)
    assert isinstance(failed.value, nvmeio.TransferError)
    assert failed.value.errno == errno.ENOSPC
    again = pickle.loads(pickle.dumps(failed.value))
    assert (type(again), str(again)) == (type(failed.value), str(failed.value))


def test_quantised_tensors_are_refused(file: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8)
    with pytest.raises(TypeError, match="qint8"):
        save_safetensors({"q": tensor}, file)


@pytest.mark.parametrize("metadata", [{"a": 1}, {1: "a"}, {"a": None}, 5, "a"])
def test_metadata_is_texts(file: Path, metadata: Any) -> None:
    with pytest.raises(TypeError, match="metadata must be a dict of str to str"):
        save_safetensors({}, file, metadata)


# Replacing


def test_a_failed_save_leaves_the_old_file(file: Path, new_handle: NewHandle) -> None:
    old = {"a": torch.randn(1000)}
    save_safetensors(old, file)
    failing = new_handle(
        FakeEngine(fail=lambda kind, offset, nbytes: errno.ENOSPC if offset > 1 << 20 else 0)
    )
    with pytest.raises(nvmeio.TransferError) as caught:
        save_safetensors({"a": torch.randn(1 << 20)}, file, handle=failing)
    assert caught.value.errno == errno.ENOSPC
    assert_same(load_safetensors(file), old)
    assert os.listdir(file.parent) == [file.name]


async def test_a_cancelled_save_leaves_the_old_file(
    file: Path, handle_held: nvmeio.AioHandle, engine_held: HeldEngine
) -> None:
    old = {"a": torch.randn(1000)}
    save_safetensors(old, file)
    task = asyncio.create_task(
        async_save_safetensors({"a": torch.randn(1 << 20)}, file, handle=handle_held)
    )
    await until(lambda: engine_held.begun > 0)
    task.cancel()
    engine_held.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert handle_held.stats.in_flight == 0
    assert_same(load_safetensors(file), old)
    assert os.listdir(file.parent) == [file.name]


async def test_a_cancelled_load_leaves_nothing_in_flight(
    file: Path, handle_held: nvmeio.AioHandle, engine_held: HeldEngine
) -> None:
    save_safetensors({"a": torch.randn(1 << 20)}, file)
    task = asyncio.create_task(async_load_safetensors(file, handle=handle_held))
    await until(lambda: engine_held.begun > 0)
    task.cancel()
    engine_held.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert handle_held.stats.in_flight == 0


def test_a_file_replaced_while_it_is_loaded_is_never_mixed(
    file: Path, handle_held: nvmeio.AioHandle, engine_held: HeldEngine
) -> None:
    old = {"a": torch.zeros(1 << 20)}
    save_safetensors(old, file)

    async def main() -> Tensors:
        task = asyncio.create_task(async_load_safetensors(file, handle=handle_held))
        await until(lambda: engine_held.begun > 0)
        save_safetensors({"b": torch.ones(5)}, file)
        engine_held.gate.set()
        return await task

    assert_same(asyncio.run(main()), old)


# Shards


def ten() -> Tensors:
    return {f"layer.{n}": torch.full((300, 10 + n), float(n)) for n in range(10)}


def test_a_set_of_shards_is_saved_and_loaded(tmp_path: Path) -> None:
    tensors = ten()
    save_safetensors(tensors, tmp_path, max_shard_size="50kB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(t.nbytes for t in tensors.values())}
    assert set(index["weight_map"]) == set(tensors)
    files = sorted(set(index["weight_map"].values()))
    assert files == [
        f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))
    ]
    assert len(files) > 2
    for name, file_name in index["weight_map"].items():
        assert package.load_file(tmp_path / file_name)[name].equal(tensors[name])
    assert_same(load_safetensors(tmp_path), tensors)
    assert_same(load_safetensors(tmp_path / "model.safetensors.index.json"), tensors)


def test_index_and_shards_are_of_one_directory_though_a_link_to_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index was read through the link, and so were its shards, a moment later."""
    for step in (1, 2):
        (tmp_path / str(step)).mkdir()
        tensors = {name: torch.full((4,), step) for name in "ab"}
        nvmeio.save_safetensors(tensors, tmp_path / str(step), max_shard_size=32)
    latest = tmp_path / "latest"
    read_index = shards.read_index

    def read_then_change(path: Path) -> dict[Path, list[str]]:
        found = read_index(path)
        latest.unlink()
        latest.symlink_to("2")
        return found

    monkeypatch.setattr(shards, "read_index", read_then_change)
    for path in (latest, latest / "model.safetensors.index.json"):
        latest.unlink(missing_ok=True)
        latest.symlink_to("1")
        found = nvmeio.load_safetensors(path)
        assert [found[name].tolist() for name in "ab"] == [[1] * 4, [1] * 4]


def test_a_tensor_larger_than_a_shard_is_not_divided(tmp_path: Path) -> None:
    tensors = ten()
    save_safetensors(tensors, tmp_path, max_shard_size=min(t.nbytes for t in tensors.values()) // 2)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == len(tensors)
    for name, file_name in index["weight_map"].items():
        assert package.load_file(tmp_path / file_name)[name].equal(tensors[name])


def test_small_tensors_need_no_shards(tmp_path: Path) -> None:
    save_safetensors(ten(), tmp_path / "x.safetensors", max_shard_size="1GB")
    assert os.listdir(tmp_path) == ["x.safetensors"]
    assert_same(load_safetensors(tmp_path), ten())


def test_a_set_replaces_a_set_and_a_whole(tmp_path: Path) -> None:
    other = tmp_path / "other-00001-of-00002.safetensors"
    other.write_bytes(b"not ours")
    contents: list[set[str]] = []
    for number, limit in enumerate(["50kB", "50kB", "60kB", "1GB", "50kB"]):
        tensors = {name: tensor + number for name, tensor in ten().items()}
        save_safetensors(tensors, tmp_path, max_shard_size=limit)
        assert_same(load_safetensors(tmp_path), tensors)
        contents.append(set(os.listdir(tmp_path)))
    assert other.read_bytes() == b"not ours"
    assert contents[3] == {other.name, "model.safetensors"}
    assert all(len(found) > 3 for number, found in enumerate(contents) if number != 3)
    # The same names may not be replaced one by one, while the old index still leads to them.
    assert contents[0] & contents[1] == {other.name, "model.safetensors.index.json"}


@pytest.mark.parametrize("steps", range(4))
def test_a_set_that_fails_leaves_the_old_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """At whichever of its files: the third and last is the index."""
    from nvmeio.checkpoint import safetensors

    old = ten()
    save_safetensors(old, tmp_path, max_shard_size="70kB")
    before = set(os.listdir(tmp_path))
    commit = safetensors.Replacement.commit
    done = 0

    def fail(self: Any) -> None:
        nonlocal done
        done += 1
        if done > steps:
            raise nvmeio.TransferError(errno.EIO, operation="fsync", path=self.path)
        commit(self)

    monkeypatch.setattr(safetensors.Replacement, "commit", fail)
    with pytest.raises(nvmeio.TransferError):
        save_safetensors({"new": torch.ones(3, 40000), **ten()}, tmp_path, max_shard_size="150kB")
    monkeypatch.undo()
    assert set(os.listdir(tmp_path)) == before
    assert_same(load_safetensors(tmp_path), old)


def test_a_shard_may_hold_more_than_the_index_names(tmp_path: Path) -> None:
    save_safetensors({"a": torch.ones(1), "b": torch.ones(2)}, tmp_path / "s.safetensors")
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"b": "s.safetensors"}}))
    assert set(load_safetensors(index)) == {"b"}
    index.write_text(json.dumps({"weight_map": {"c": "s.safetensors"}}))
    with pytest.raises(nvmeio.IntegrityError, match=r"'c' is in .*s\.safetensors, which lacks it"):
        load_safetensors(index)
    index.write_text(json.dumps({"weight_map": {"c": "t.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"t\.safetensors"):
        load_safetensors(index)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": ""}}',
        '{"weight_map": {"a": "../s.safetensors"}}',
        '{"weight_map": {"a": "x\\ud800.safetensors"}}',
        '{"weight_map": {"a": "/etc/passwd"}}',
        '{"weight_map": {"a": "s\\u0000"}}',
        '{"weight_map": {"a": "s.safetensors", "a": "t.safetensors"}}',
        "[" * 100_000,
    ],
)
def test_a_bad_index_is_refused(tmp_path: Path, text: str) -> None:
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(text)
    for name in ("s.safetensors", "t.safetensors"):
        save_safetensors({"a": torch.ones(1)}, tmp_path / name)
    with pytest.raises(nvmeio.IntegrityError, match="not a valid safetensors index"):
        load_safetensors(index)


def test_an_index_names_a_tensor_that_no_text_can_be(tmp_path: Path) -> None:
    save_safetensors({"a": torch.ones(1)}, tmp_path / "s.safetensors")
    index = tmp_path / "m.safetensors.index.json"
    index.write_text('{"weight_map": {"\\ud800": "s.safetensors"}}')
    module = torch.nn.Linear(1, 1, device="meta")
    for read in (load_safetensors, lambda path: nvmeio.stream_model(module, path)):
        with pytest.raises(nvmeio.IntegrityError, match="which lacks it") as failed:
            read(index)
        assert str(index) in str(failed.value)
        str(failed.value).encode()  # can be printed


def test_a_directory_holds_one_set_at_most(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no"):
        load_safetensors(tmp_path)
    save_safetensors({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    assert set(load_safetensors(tmp_path)) == {"a"}
    save_safetensors({"b": torch.ones(1)}, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match="several"):
        load_safetensors(tmp_path)
    save_safetensors({"m": torch.ones(1)}, tmp_path / "model.safetensors")
    assert set(load_safetensors(tmp_path)) == {"m"}


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [(5, 5), ("5", 5), ("5GB", 5 * 10**9), ("1.5 kb", 1500), ("2MiB", 2 << 20), ("7B", 7)],
)
def test_sizes_are_understood(size: int | str, nbytes: int) -> None:
    assert shards.parse_size(size) == nbytes


@pytest.mark.parametrize("size", ["", "GB", "5 QB", "-5", 0, -1, "0GB", "1e9"])
def test_sizes_that_are_none_are_refused(size: int | str) -> None:
    with pytest.raises(ValueError, match="max_shard_size"):
        shards.parse_size(size)
