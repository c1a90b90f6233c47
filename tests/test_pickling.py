"""What belongs to a process is not sent to another one, and says what to do instead."""

from __future__ import annotations

import errno
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nvmeio
from nvmeio._kv_blocks.store import BlockStore
from nvmeio.checkpoint.background import BackgroundSaver
from nvmeio.integrations.dcp import SnapshotStager


def made_stream(path: Path) -> Any:
    nvmeio.save_safetensors({"0.weight": torch.ones(4, 4)}, path / "model.safetensors")
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4, bias=False))
    return nvmeio.stream_model(model, path / "model.safetensors").weight_stream


def made_file(path: Path) -> Any:
    (path / "data.bin").write_bytes(b"data")
    return nvmeio.open(path / "data.bin")


HANDLES: list[nvmeio.AioHandle] = []  # that a test has to close


def made_bound(path: Path) -> Any:
    (path / "data.bin").write_bytes(b"data")
    HANDLES.append(nvmeio.AioHandle())
    return HANDLES[-1].open(path / "data.bin")


def made_lazy(path: Path) -> Any:
    nvmeio.save_safetensors({"weight": torch.ones(4)}, path / "model.safetensors")
    return nvmeio.safe_open(path / "model.safetensors")


def made_writer(path: Path) -> Any:
    return nvmeio.FastFileWriter(path / "new.pt")


def made_reader(path: Path) -> Any:
    nvmeio.save({"a": 1}, path / "a.pt")
    return nvmeio.FastFileReader(path / "a.pt")


def made_lease(path: Path) -> Any:
    return nvmeio.PinnedPool(1 << 20).take(4096)


def made_optimizer(path: Path) -> Any:
    parameters = nn.Linear(4, 4).parameters()
    return nvmeio.SwappedOptimizer(torch.optim.AdamW, parameters, swap_dir=path)


def made_module(path: Path) -> Any:
    layers = nn.Sequential(nn.Linear(4, 4))
    return nvmeio.SwappedModule(layers, swap_dir=path, resident_bytes=1 << 20)


def made_stager(path: Path) -> Any:
    return SnapshotStager()


MADE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "AioHandle": (lambda path: nvmeio.AioHandle(), "on first use or in worker_init_fn"),
    "File": (made_file, "call nvmeio.open in each process"),
    "BoundFile": (made_bound, "make an AioHandle in each process, and call its open there"),
    "PinnedPool": (lambda path: nvmeio.PinnedPool(1 << 20), "make one in each process"),
    "Checkpointer": (nvmeio.Checkpointer, "keep its directory"),
    "LazyTensors": (made_lazy, "call nvmeio.safe_open in each process"),
    "WeightStream": (made_stream, "call stream_model in each process"),
    "FastFileWriter": (made_writer, "keep its path"),
    "FastFileReader": (made_reader, "keep its path"),
    "Lease": (made_lease, "send the tensor"),
    "SwappedOptimizer": (made_optimizer, r"send its state_dict\(\)"),
    "SwappedModule": (made_module, r"send its state_dict\(\)"),
    "BackgroundSaver": (lambda path: BackgroundSaver(), "make one in each process"),
    "BlockStore": (
        lambda path: BlockStore(path, "kv", 4096, 1 << 20),
        "open it with writer=False in other processes",
    ),
    "SnapshotStager": (made_stager, "make one in each process"),
}


@pytest.mark.parametrize("kind", MADE)
def test_pickling_is_refused_with_the_way_out(kind: str, tmp_path: Path) -> None:
    """The messages were those of a lock, or of cffi, somewhere inside of it."""
    make, instead = MADE[kind]
    made = make(tmp_path)
    try:
        with pytest.raises(TypeError, match=f"an? {kind} belongs to the process .* {instead}"):
            pickle.dumps({"dataset": [made]})
    finally:
        getattr(made, "close", lambda: None)()
        while HANDLES:
            HANDLES.pop().close()


def test_an_operation_is_not_pickled_whether_it_is_over_or_not(tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(bytes(1 << 14))
    with nvmeio.AioHandle(engine="threads") as handle:
        operation = handle.async_pread(nvmeio.empty_aligned(4096), tmp_path / "data.bin")
        for _ in range(2):
            with pytest.raises(TypeError, match="an Operation belongs to the process"):
                pickle.dumps(operation)
            operation.result()


@pytest.mark.parametrize("make", [nvmeio.empty_aligned, nvmeio.empty_pinned])
def test_tensors_are_pickled_with_their_bytes(make: Any) -> None:
    """What they are of here, an aligned or locked block, is of no matter there."""
    made = make(4096).fill_(7)
    found = pickle.loads(pickle.dumps(made))
    assert found.equal(made) and found.data_ptr() != made.data_ptr()


def test_an_error_is_pickled_as_what_it_is() -> None:
    error = nvmeio.TransferError(errno.EIO, operation="pread", path="x", nbytes=7)
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error) and str(found) == str(error) and found.nbytes == 7
