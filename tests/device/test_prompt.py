"""The ring's copies and records that keep the GIL: on a model of CUDA, and on a GPU."""

from __future__ import annotations

import ctypes
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, PromptRuntime, asynchronous
from support import random_bytes

import nvmeio
from nvmeio._memory import system
from nvmeio.engines import device_ring

SMALL = 1 << 16


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with asynchronous(monkeypatch) as made:
        prompt = PromptRuntime(made)
        monkeypatch.setattr(system, "prompt_runtime", lambda: prompt)
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
        monkeypatch.setattr(device_ring, "PROMPT_BYTES", 1)
        yield made


def both_ways(path: Path, target: torch.Tensor, rows: torch.Tensor, data: bytes) -> bytes:
    """Write what `data` was read into, large and small; what is in the file then."""
    path.write_bytes(data)
    copy = path.with_suffix(".copy")
    with nvmeio.AioHandle(ring_bytes=1 << 20) as handle:
        for _ in range(2):
            assert handle.sync_pread(target, path) == len(data)
        handle.sync_pwrite(target, copy)
        count = len(rows)
        with nvmeio.open(copy, "r+") as file:
            reading = [handle.async_pread(rows[n], file, n * SMALL) for n in range(count)]
            assert [each.result() for each in reading] == [SMALL] * count
            back = [handle.async_pwrite(rows[n], file, n * SMALL) for n in range(count)]
            assert [each.result() for each in back] == [SMALL] * count
    return copy.read_bytes()


def test_copies_and_records_keep_the_gil(cuda: FakeCuda, tmp_path: Path) -> None:
    data = random_bytes(40 * SMALL + 777)
    target = cuda.tensor(torch.zeros(len(data), dtype=torch.uint8))
    rows = cuda.tensor(torch.zeros(40, SMALL, dtype=torch.uint8))
    assert both_ways(tmp_path / "file", target, rows, data) == data
    assert bytes(cuda.inside(target).numpy()) == data
    assert bytes(cuda.inside(rows).numpy().reshape(-1)) == data[: 40 * SMALL]
    calls = Counter(name for name, _ in cuda.calls)
    assert not calls["copy"] and calls["cudaMemcpyAsync"] >= 80
    assert calls["cudaEventRecord"]
    assert {index for _, index in cuda.calls} == {0} == cuda.contexts


def test_memory_that_cuda_has_not_locked_is_copied_without_the_gil(
    cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a copy waits for the device: with the GIL, all of Python would."""
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: False)
    data = random_bytes(20 * SMALL)
    target = cuda.tensor(torch.zeros(len(data), dtype=torch.uint8))
    rows = cuda.tensor(torch.zeros(20, SMALL, dtype=torch.uint8))
    assert both_ways(tmp_path / "file", target, rows, data) == data
    calls = Counter(name for name, _ in cuda.calls)
    assert calls["copy"] and not calls["cudaMemcpyAsync"] + calls["cudaEventRecord"]


def test_small_copies_are_begun_beside_python(
    cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be more of them than a stream takes, and then a call waits for the device."""
    monkeypatch.setattr(device_ring, "PROMPT_BYTES", SMALL + 1)
    data = random_bytes(20 * SMALL)
    target = cuda.tensor(torch.zeros(len(data), dtype=torch.uint8))
    rows = cuda.tensor(torch.zeros(20, SMALL, dtype=torch.uint8))
    assert both_ways(tmp_path / "file", target, rows, data) == data
    calls = Counter(name for name, _ in cuda.calls)
    assert calls["copy"] >= 40 and 0 < calls["cudaMemcpyAsync"] <= 20


def test_a_copy_that_is_refused_is_its_transfers_error(
    cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise RuntimeError("CUDA error: invalid argument")

    path = tmp_path / "file"
    path.write_bytes(bytes(SMALL))
    target = cuda.tensor(torch.zeros(SMALL, dtype=torch.uint8))
    with nvmeio.AioHandle(ring_bytes=1 << 20) as handle:
        handle.sync_pread(target, path)
        with monkeypatch.context() as patch:
            patch.setattr(PromptRuntime, "copy", refuse)
            with pytest.raises(RuntimeError, match="CUDA error: invalid argument"):
                handle.sync_pread(target, path)
        handle.sync_pread(target, path)


def library(version: int, code: int = 0) -> Any:
    """A runtime's functions, as ctypes shows them."""

    def tell_version(place: Any) -> int:
        ctypes.cast(place, ctypes.POINTER(ctypes.c_int))[0] = version
        return 0

    return types.SimpleNamespace(
        cudaMemcpyAsync=lambda *arguments: code,
        cudaEventRecord=lambda *arguments: code,
        cudaGetErrorString=lambda code: b"invalid argument",
        cudaRuntimeGetVersion=tell_version,
    )


@pytest.fixture
def torch_of_cuda_13(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    system.prompt_runtime.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    yield
    system.prompt_runtime.cache_clear()


@pytest.mark.usefixtures("torch_of_cuda_13")
@pytest.mark.parametrize(("version", "is_torchs"), [(13020, True), (12080, False)])
def test_only_the_runtime_of_torch_is_taken(
    version: int, is_torchs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "PyDLL", lambda name: library(version))
    assert (system.prompt_runtime() is not None) == is_torchs


@pytest.mark.usefixtures("torch_of_cuda_13")
def test_without_its_functions_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "PyDLL", lambda name: types.SimpleNamespace())
    assert system.prompt_runtime() is None


@pytest.mark.usefixtures("torch_of_cuda_13")
def test_its_errors_are_told_in_cudas_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "PyDLL", lambda name: library(13000, code=1))
    runtime = system.PromptRuntime()
    with pytest.raises(RuntimeError, match=r"CUDA error: invalid argument \(cudaMemcpyAsync\)"):
        runtime.copy(0, 0, 1, system.TO_HOST, 0)
    with pytest.raises(RuntimeError, match=r"CUDA error: invalid argument \(cudaEventRecord\)"):
        runtime.record(0, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_on_a_gpu_bytes_are_right_and_come_in_order(tmp_path: Path) -> None:
    assert system.prompt_runtime() is not None
    data = random_bytes(200 * SMALL + 777)
    target = torch.zeros(len(data), dtype=torch.uint8, device="cuda")
    rows = torch.zeros(200, SMALL, dtype=torch.uint8, device="cuda")
    assert both_ways(tmp_path / "file", target, rows, data) == data
    assert bytes(target.cpu().numpy()) == data
    assert bytes(rows.cpu().numpy().reshape(-1)) == data[: 200 * SMALL]
    with nvmeio.AioHandle() as handle:
        for byte in range(1, 9):  # a write comes after the kernels before it, a read too
            torch.cuda._sleep(20_000_000)
            target.fill_(byte)
            handle.sync_pwrite(target, tmp_path / "file")
            torch.cuda._sleep(20_000_000)
            target.zero_()
            handle.sync_pread(target, tmp_path / "file")
            assert target.eq(byte).all().item()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_on_a_gpu_errors_are_told_and_not_left_behind() -> None:
    runtime = system.prompt_runtime()
    assert runtime is not None
    device, host = torch.zeros(4096, device="cuda"), torch.zeros(4096).pin_memory()
    with pytest.raises(RuntimeError, match="CUDA error: invalid"):
        runtime.copy(device.data_ptr(), host.data_ptr(), 4096, 99, 0)
    assert torch.ones(3, device="cuda").sum().item() == 3  # no kernel is told of it
    torch.cuda.synchronize()
