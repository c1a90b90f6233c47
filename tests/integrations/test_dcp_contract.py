"""DCP: the contract with torch, checkpoints without waiting, memory and devices."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from integrations._dcp_states import (
    Failing,
    assert_same,
    blank,
    every_form,
    files_of,
    load,
    refused,
    save,
)
from support import run_python
from torch.distributed import _state_dict_utils
from torch.distributed.checkpoint import staging

from nvmeio.integrations.dcp import NvmeStorageReader, NvmeStorageWriter

pytestmark = [
    # torch's, of every save and load without a process group, and of saving over a checkpoint
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]


# The contract with torch


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(NvmeStorageWriter, dcp.FileSystemWriter), (NvmeStorageReader, dcp.FileSystemReader)],
)
def test_arguments_and_attributes_are_those_of_torch(
    ours: Any, theirs: Any, tmp_path: Path
) -> None:
    wanted = list(inspect.signature(theirs).parameters)
    assert list(inspect.signature(ours).parameters)[: len(wanted)] == wanted
    mine, stock = ours(tmp_path), theirs(tmp_path)
    public = {name for name in dir(stock) if not name.startswith("_")}
    assert not public - set(dir(mine))
    for name in public - set(vars(stock)):
        expected = getattr(theirs, name)
        if callable(expected):
            wanted = list(inspect.signature(expected).parameters)
            assert list(inspect.signature(getattr(ours, name)).parameters) == wanted, name
    for name in vars(stock):
        found, expected = getattr(mine, name), getattr(stock, name)
        assert type(found) is type(expected), name
        if isinstance(expected, (bool, int, Path, dict, type(None))):
            assert found == expected, name
    assert len(mine.save_id if "save_id" in vars(stock) else mine.load_id) == 36


def test_ids_are_those_of_torch(tmp_path: Path) -> None:
    writer, reader = NvmeStorageWriter(tmp_path / "a"), NvmeStorageReader(tmp_path / "a")
    first = writer.storage_meta()
    assert first.checkpoint_id == tmp_path / "a" == reader.checkpoint_id
    state = {"w": torch.randn(5)}
    dcp.save(state, storage_writer=writer, checkpoint_id=tmp_path / "b")
    assert writer.storage_meta().save_id != first.save_id
    assert files_of(tmp_path) == {"b"}
    found = blank(state)
    dcp.load(found, storage_reader=reader, checkpoint_id=tmp_path / "b")
    assert_same(found, state)
    metadata = reader.read_metadata()
    assert metadata.storage_meta.save_id == writer.storage_meta().save_id
    assert metadata.storage_meta.load_id
    assert NvmeStorageWriter.validate_checkpoint_id(tmp_path)
    assert not NvmeStorageReader.validate_checkpoint_id("s3://bucket/x")


def test_metadata_is_that_of_torchs_writer(tmp_path: Path) -> None:
    state = every_form()
    ours = save(state, tmp_path / "ours")
    theirs = dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "theirs"))
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    assert ours.storage_data.keys() == theirs.storage_data.keys()
    assert getattr(ours, "version", None) == getattr(theirs, "version", None)
    assert {type(info) for info in ours.storage_data.values()} == {
        type(info) for info in theirs.storage_data.values()
    }


def test_a_writer_can_be_sent_to_another_process(tmp_path: Path) -> None:
    """What AsyncCheckpointerType.PROCESS does with it."""
    writer = pickle.loads(pickle.dumps(NvmeStorageWriter(tmp_path, thread_count=2)))
    state = {"w": torch.randn(5), "v": torch.randn(6)}
    dcp.save(state, storage_writer=writer)
    assert_same(load(state, tmp_path), state)


def test_async_save_writes_what_was_there_when_it_was_called(tmp_path: Path) -> None:
    state: dict[str, Any] = {"w": torch.randn(900, 900), "b": torch.randn(3), "step": 7}
    kept = {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in state.items()}
    future = dcp.async_save(state, storage_writer=NvmeStorageWriter(tmp_path), no_dist=True)
    state["w"].zero_()
    future.result(timeout=60)
    assert_same(load(kept, tmp_path), kept)


@pytest.mark.parametrize("kind", [NvmeStorageWriter, dcp.FileSystemWriter])
def test_staged_memory_is_kept_where_that_is_asked_for(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was refused, with the way to torch's own stager."""
    if not torch.cuda.is_available():  # what torch asks for is page-locked
        monkeypatch.setattr(staging, "_create_cpu_state_dict", unlocked)
    writer = kind(tmp_path / "none", cache_staged_state_dict=True)
    assert writer.state_dict_cache is None
    kept = None
    for step in range(2):
        state = {"w": torch.full((300, 300), float(step))}
        future = dcp.async_save(
            state, storage_writer=writer, checkpoint_id=tmp_path / str(step), no_dist=True
        )
        state["w"].fill_(7)
        future.result(timeout=60)
        found = load(state, tmp_path / str(step))
        assert_same(found, {"w": torch.full((300, 300), float(step))})
        assert kept is None or writer.state_dict_cache["w"].data_ptr() == kept
        kept = writer.state_dict_cache["w"].data_ptr()


def unlocked(state: Any, pin_memory: bool) -> Any:
    """Torch's own function without page-locking."""
    return _state_dict_utils._create_cpu_state_dict(state)


def test_a_failed_async_save_is_told(tmp_path: Path) -> None:
    state = {f"w{number}": torch.randn(5) for number in range(4)}
    future = dcp.async_save(
        state, storage_writer=NvmeStorageWriter(tmp_path), planner=Failing(), no_dist=True
    )
    with refused(ArithmeticError):
        future.result(timeout=60)
    assert ".metadata" not in files_of(tmp_path)


def test_ranks_may_save_without_each_other(tmp_path: Path) -> None:
    """``use_collectives=False``: metadata of its own for each rank."""
    if "use_collectives" not in inspect.signature(dcp.save).parameters:
        pytest.skip("this torch saves with collectives only")
    for step in range(2):
        state = {"w": torch.randn(300, 300) + step}
        dcp.save(state, storage_writer=NvmeStorageWriter(tmp_path), use_collectives=False)
        assert len(files_of(tmp_path)) == 2
        assert "__0.metadata" in files_of(tmp_path)
        for reader in (NvmeStorageReader, dcp.FileSystemReader):
            found = blank(state)
            dcp.load(found, storage_reader=reader(tmp_path))
            assert_same(found, state)


def test_memory_of_a_save_is_bounded(tmp_path: Path) -> None:
    done = run_python(
        """
        import sys, warnings
        import torch
        import torch.distributed.checkpoint as dcp
        from nvmeio.integrations.dcp import NvmeStorageReader, NvmeStorageWriter
        warnings.simplefilter("ignore")
        # Not ru_maxrss: that begins with what the process had which started this one.
        def peak():
            with open("/proc/self/status") as status:
                return next(int(line.split()[1]) for line in status if "VmHWM" in line) >> 10
        dcp.save({"w": torch.ones(1 << 18)}, storage_writer=NvmeStorageWriter(sys.argv[1] + "/1"))
        state = {f"w{n}": torch.ones(1 << 24) for n in range(8)}  # 512 MiB
        before = peak()
        dcp.save(state, storage_writer=NvmeStorageWriter(sys.argv[1] + "/2"))
        after_save = peak()
        dcp.load(state, storage_reader=NvmeStorageReader(sys.argv[1] + "/2"))
        print(after_save - before, peak() - before)
        """.replace("sys.argv[1]", repr(str(tmp_path))),
        fresh=True,
    )
    assert done.returncode == 0, done.stderr
    save_mib, both_mib = map(int, done.stdout.split())
    assert save_mib <= 256
    assert both_mib <= 256


@pytest.mark.gpu
def test_tensors_of_a_gpu_come_and_go(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    state = {"w": torch.randn(3000, 3000, device="cuda"), "b": torch.randn(3, device="cuda")}
    save(state, tmp_path)
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(found, storage_reader=NvmeStorageReader(tmp_path))
    assert all(torch.equal(found[name], state[name]) for name in state)
