"""`safe_open`, beside the one of the safetensors package: the same tensors, slices and errors."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support import spin_until

import nvmeio
from nvmeio import safe_open

package = pytest.importorskip("safetensors", reason="safetensors is not installed")
save_file = pytest.importorskip("safetensors.torch").save_file

NewHandle = Callable[..., nvmeio.AioHandle]

TENSORS = {
    "b": torch.arange(24.0).reshape(2, 3, 4),
    "a": torch.arange(6),
    "0-d": torch.tensor(3.5),
    "empty": torch.empty(0, 3),
    "bf16": torch.randn(3, 4, dtype=torch.bfloat16),
    "fp8": torch.arange(12.0).reshape(3, 4).to(torch.float8_e4m3fn),
    "c64": torch.randn(2, 2, dtype=torch.complex64),
    "odd": torch.arange(7, dtype=torch.uint8),
    "large": torch.randn(12, 3, 1100),  # rows with more than a block between them
}


class Picker:
    """The index that stands in brackets: ``AT[1, ..., 0:2]``."""

    def __getitem__(self, index: Any) -> Any:
        return index


AT = Picker()

# fmt: off
INDICES = [
    AT[:], AT[...], AT[()], AT[0], AT[-1], AT[1, ...], AT[..., 0], AT[0:1], AT[1:2], AT[None],
    AT[:, 1], AT[:, 1:2], AT[:, :, ::2], AT[:, :, 7], AT[:, 0:2], AT[:, -2:], AT[2:11:5],
    AT[0, 1, 2], AT[0, 1, 2, 3], AT[5], AT[-3], AT[0:100], AT[5:3], AT[3:5], AT[-100:1], AT[1:-5],
    AT[::2], AT[::-1], AT[1:2:0], AT[..., None], AT[..., ...], AT[None, 0], AT[1:9:4, 1, 5:600],
    AT[numpy.int64(1)], AT[torch.tensor(1)], AT[0 : numpy.int64(1)], AT[True], AT[1.0],
    AT[[0, 1]], AT[:, [0, 2]], AT[torch.tensor([0, 1])], AT[numpy.array([0, 1])],
]
# fmt: on


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path / "model.safetensors"


def outcome(get: Callable[[], Any]) -> Any:
    """What is got, or the kind of error."""
    try:
        found = get()
    except (IndexError, ValueError, TypeError) as failed:
        return type(failed)
    return found.dtype, tuple(found.shape), found.to(torch.complex128).numpy().tobytes()


def test_names_and_metadata_are_the_packages(file: Path) -> None:
    with safe_open(file, framework="pt") as ours, package.safe_open(file, framework="pt") as theirs:
        assert ours.keys() == theirs.keys()
        assert ours.offset_keys() == theirs.offset_keys()
        assert ours.metadata() == theirs.metadata() == {"format": "pt"}
    save_file(TENSORS, file)
    with safe_open(file, "pt", "cpu", backend="mmap") as opened:
        assert opened.metadata() is None


def test_tensors_are_the_packages(file: Path, handle: nvmeio.AioHandle) -> None:
    with safe_open(file, "pt", handle=handle) as ours, package.safe_open(file, "pt") as theirs:
        for name in theirs.offset_keys():
            wanted = outcome(lambda name=name: theirs.get_tensor(name))
            assert outcome(lambda name=name: ours.get_tensor(name)) == wanted
        found = ours.get_tensors()
    assert list(found) == ours_keys(file)
    assert all(torch.equal(found[name], TENSORS[name]) for name in ("a", "b", "large", "odd"))


def ours_keys(file: Path) -> list[str]:
    with package.safe_open(file, "pt") as theirs:
        names: list[str] = theirs.offset_keys()
        return names


@pytest.mark.parametrize("name", TENSORS)
def test_slices_are_the_packages(file: Path, name: str) -> None:
    """Every index, errors included."""
    with safe_open(file, "pt") as ours, package.safe_open(file, "pt") as theirs:
        mine, wanted = ours.get_slice(name), theirs.get_slice(name)
        assert mine.get_shape() == wanted.get_shape()
        assert mine.get_dtype() == wanted.get_dtype()
        for index in INDICES:
            found = outcome(lambda index=index: mine[index])
            assert found == outcome(lambda index=index: wanted[index]), index


def test_sizes_of_packed_pairs_are_those_that_an_index_counts(tmp_path: Path) -> None:
    """`get_shape` of F4 counted single elements, and an index pairs: of the columns dealt to two
    ranks by it, the first had all and the second none, without an error."""
    pairs = torch.arange(48, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).reshape(6, 8)
    save_file({"w": pairs}, tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors") as opened:
        weight = opened.get_slice("w")
        rows, columns = weight.get_shape()
        assert [rows, columns] == list(opened.get_tensor("w").shape)
        halves = [weight[:, : columns // 2], weight[:, columns // 2 :]]
    joined = torch.cat([half.view(torch.uint8) for half in halves], dim=1)
    assert joined.equal(pairs.view(torch.uint8))


@pytest.mark.parametrize("engine", ["libaio", "threads"])
def test_a_slice_reads_what_it_names(direct_path: Path, new_handle: NewHandle, engine: str) -> None:
    weight = torch.randn(64, 4096)
    nvmeio.save_safetensors({"weight": weight}, direct_path, align=True)
    handle = new_handle(engine)
    with safe_open(direct_path, backend="mmap", handle=handle) as opened:  # all read directly
        part = opened.get_slice("weight")
        before = handle.stats.bytes_read
        assert torch.equal(part[8:12], weight[8:12])
        assert handle.stats.bytes_read - before == 4 * 16384
        columns = part[:, 1024:2048]
        assert torch.equal(columns, weight[:, 1024:2048])
        assert columns.is_contiguous()
        assert columns.untyped_storage().nbytes() == 64 * 4096
        assert handle.stats.rows == 64


def test_arrays_of_numpy(file: Path) -> None:
    with safe_open(file, framework="np") as ours, package.safe_open(file, "np") as theirs:
        for name in ("a", "b", "0-d", "empty", "c64", "odd", "large"):
            found, wanted = ours.get_tensor(name), theirs.get_tensor(name)
            assert isinstance(found, numpy.ndarray)
            assert found.dtype == wanted.dtype
            assert numpy.array_equal(found, wanted)
        assert numpy.array_equal(ours.get_slice("b")[:, 1:], theirs.get_slice("b")[:, 1:])
        with pytest.raises(TypeError, match=r"'bf16' has dtype torch\.bfloat16, which numpy lacks"):
            ours.get_tensor("bf16")


# fmt: off
ARRAY_INDICES = [
    AT[:], AT[...], AT[()], AT[0], AT[-1], AT[1, ...], AT[..., 0], AT[0:1], AT[:, 1], AT[:, 1:2],
    AT[:, :, ::2], AT[:, :, 7], AT[:, 0:2], AT[0, 1, 2], AT[0, 1, 2, 3], AT[5], AT[-3], AT[0:100],
    AT[3:5], AT[-100], AT[::-1], AT[::0], AT[..., ...], AT[1:9:4, 1, 5:600], AT[[]], AT[[0, 1]],
    AT[:, [0, 2]], AT[1.0], AT["a"], AT[numpy.array([0, 1])], AT[numpy.int64(1)], AT[True],
    AT[0 : numpy.int64(1)], AT[2:2], AT[100:], AT[:, 100:], AT[:, 3], AT[..., :100], AT[2:],
]
# fmt: on


@pytest.mark.parametrize("name", ["a", "b", "large", "0-d"])
def test_slices_of_arrays_are_the_packages(file: Path, name: str) -> None:
    """What reaches beyond an array was cut short in silence, as numpy does; the package refuses."""

    def part(opened: Any, index: Any) -> Any:
        try:
            found = opened.get_slice(name)[index]
        except package.SafetensorError as failed:
            return str(failed)
        return found.dtype, found.shape, found.tobytes()

    with safe_open(file, "np") as ours, package.safe_open(file, "np") as theirs:
        for index in ARRAY_INDICES:
            assert part(ours, index) == part(theirs, index), index


def test_slices_of_arrays_that_the_package_lacks(file: Path) -> None:
    """Places that are counted from the end, a new dimension, all of nothing."""
    with safe_open(file, "np") as opened:
        for index in (AT[-2:], AT[:-1], AT[None, 1], AT[:, None]):
            found = opened.get_slice("b")[index]
            assert numpy.array_equal(found, TENSORS["b"].numpy()[index])
        assert opened.get_slice("empty")[:].shape == (0, 3)
        assert opened.get_slice("b")[1:0].shape == (0, 3, 4)


def test_other_devices(file: Path, handle: nvmeio.AioHandle) -> None:
    """Columns for the meta device were read, and dropped."""
    with safe_open(file, device="meta", handle=handle) as opened:
        before = handle.stats.bytes_read
        assert opened.get_tensor("b").is_meta
        assert opened.get_slice("b")[1:].shape == (1, 3, 4)
        columns = opened.get_slice("large")[:, 0]
        assert columns.is_meta and columns.shape == (12, 1100) and columns.is_contiguous()
        assert handle.stats.bytes_read == before
    with safe_open(file, "pt", None) as opened:
        assert opened.get_tensor("a").device.type == "cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_slices_on_a_gpu(file: Path) -> None:
    with safe_open(file, device=0) as opened:
        for index in (slice(3, 9), (slice(None), 1, slice(5, 600))):
            part = opened.get_slice("large")[index]
            assert part.is_cuda
            assert torch.equal(part.cpu(), TENSORS["large"][index])
        assert torch.equal(opened.get_tensor("b").cpu(), TENSORS["b"])


def test_shards_and_directories(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(300), "b": torch.randn(300)}
    nvmeio.save_safetensors(tensors, tmp_path, max_shard_size=1200)
    with safe_open(tmp_path) as opened:
        assert opened.keys() == ["a", "b"]
        assert torch.equal(opened.get_tensor("b"), tensors["b"])
        assert torch.equal(opened.get_slice("a")[7:9], tensors["a"][7:9])


# What cannot be


def test_missing_tensor_file_and_header_are_errors(file: Path, tmp_path: Path) -> None:
    with safe_open(file) as opened:
        with pytest.raises(KeyError, match="does not contain tensor 'c'"):
            opened.get_tensor("c")
        with pytest.raises(KeyError, match="does not contain tensor 'c'"):
            opened.get_slice("c")
    with pytest.raises(FileNotFoundError):
        safe_open(tmp_path / "none.safetensors", framework="pt")
    (tmp_path / "bad.safetensors").write_bytes(b"bad")
    with pytest.raises(nvmeio.IntegrityError):
        safe_open(tmp_path / "bad.safetensors", framework="pt")


def test_a_file_that_is_missing_is_told_in_the_packages_words(tmp_path: Path) -> None:
    """The words were others; what to do is a note now, where Python has notes."""
    path = str(tmp_path / "none.safetensors")
    for call in (safe_open, nvmeio.load_safetensors):
        with pytest.raises(FileNotFoundError) as failed:
            call(path)
        assert str(failed.value) == f"No such file or directory: {path}"
        assert isinstance(failed.value, nvmeio.TransferError)
        assert failed.value.errno == errno.ENOENT
        if sys.version_info >= (3, 11):
            assert failed.value.__notes__ == ["check the path, and that its directory is there"]


def closed(opened: Any) -> Any:
    with opened:
        return opened


BROKEN: dict[str, tuple[type[Exception], Callable[[Any, Path], Any]]] = {
    "closed": (nvmeio.ClosedError, lambda open_, file: closed(open_(file, "pt")).keys()),
    "no such tensor": (KeyError, lambda open_, file: open_(file, "pt").get_tensor("none")),
    "no such slice": (KeyError, lambda open_, file: open_(file, "pt").get_slice("none")),
    "framework": (ValueError, lambda open_, file: open_(file, "bogus")),
    "backend": (ValueError, lambda open_, file: open_(file, "pt", backend="bogus")),
    "device": (RuntimeError, lambda open_, file: open_(file, "pt", "bogus")),
    "device of numpy": (ValueError, lambda open_, file: open_(file, "np", "cuda:0")),
    "header": (nvmeio.IntegrityError, lambda open_, file: open_(cut(file), "pt")),
    "dtype": (TypeError, lambda open_, file: open_(six_bits(file), "pt").get_tensor("x")),
    "index": (IndexError, lambda open_, file: open_(file, "np").get_slice("a")[9]),
}


def cut(file: Path) -> Path:
    file.write_bytes(file.read_bytes()[:-1])
    return file


def six_bits(file: Path) -> Path:
    text = b'{"x":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}'
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"abc")
    return file


@pytest.mark.parametrize("what", BROKEN)
def test_errors_are_the_packages_as_well(file: Path, what: str) -> None:
    """`except SafetensorError`, which is right for the package's safe_open, did not take them."""
    kind, use = BROKEN[what]
    with pytest.raises(package.SafetensorError):
        use(package.safe_open, file)
    with pytest.raises(package.SafetensorError) as failed:
        use(safe_open, file)
    assert isinstance(failed.value, kind)
    again = pickle.loads(pickle.dumps(failed.value))
    assert (type(again), str(again)) == (type(failed.value), str(failed.value))


def test_errors_need_no_package(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(nvmeio.ClosedError) as failed:
        closed(safe_open(file)).keys()
    assert type(failed.value) is nvmeio.ClosedError


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"framework": "tf"}, "framework 'tf'"),
        ({"backend": "rdma"}, "backend must be"),
        ({"framework": "np", "device": "meta"}, "numpy has no arrays on meta"),
    ],
)
def test_what_there_is_not_is_refused(file: Path, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        safe_open(file, **arguments)


def test_a_file_that_is_written_to_is_noticed(file: Path) -> None:
    with safe_open(file) as opened:
        with file.open("r+b") as other:
            other.seek(-1, os.SEEK_END)
            other.write(b"\xff")
        os.utime(file, ns=(1, 1))
        with pytest.raises(nvmeio.IntegrityError):
            opened.get_tensor("b")
        with pytest.raises(nvmeio.IntegrityError):
            opened.get_slice("b")[0]


def test_a_file_that_is_replaced_is_read_as_it_was(file: Path) -> None:
    with safe_open(file) as opened:
        nvmeio.save_safetensors({"b": torch.zeros(1)}, file)
        assert torch.equal(opened.get_tensor("b"), TENSORS["b"])


# Closing


def test_closed_means_closed(file: Path, handle: nvmeio.AioHandle) -> None:
    opened = safe_open(file, handle=handle)
    part = opened.get_slice("b")
    with opened as same:
        assert same is opened
    opened.close()
    for use in (opened.keys, opened.metadata, lambda: part[0], opened.__enter__):
        with pytest.raises(nvmeio.ClosedError, match="open it again with safe_open"):
            use()
    assert "closed" in repr(opened)
    assert handle.sync_pread(torch.empty(8, dtype=torch.uint8), file) == 8  # which stays open


def test_no_descriptor_or_thread_is_left(file: Path) -> None:
    before = set(threading.enumerate())
    with safe_open(file) as opened:
        opened.get_slice("b")[0]
    spin_until(lambda: str(file) not in descriptors())
    spin_until(lambda: not set(threading.enumerate()) - before)


def descriptors() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return found
