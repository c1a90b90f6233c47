"""`Checkpointer.save` of memory of many kinds: protected, or copied at once, and always exact."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint._checkpointers import file_of, names
from checkpoint._snapshot_training import check
from protecting import give_away, page_tables_tell
from support import HeldEngine, needs_protection
from torch.utils.data import DataLoader, Dataset

import nvmeio
from nvmeio._io import inflight

pytestmark = [needs_protection, pytest.mark.usefixtures("little_staging")]

NUMEL = 600_000


def numbers() -> torch.Tensor:
    return torch.arange(NUMEL, dtype=torch.float32)


# Memory that others than this process's threads write to


class Rows(Dataset[torch.Tensor]):
    """One batch, which a worker makes and sends."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        return numbers()


def from_a_worker(folder: Path) -> torch.Tensor:
    """A worker puts its batch into shared memory."""
    [batch] = DataLoader(Rows(), batch_size=None, num_workers=1)
    assert batch.is_shared()
    return torch.as_tensor(batch)


def loaded_mapped(folder: Path) -> torch.Tensor:
    torch.save(numbers(), folder / "kept.pt")
    return torch.as_tensor(torch.load(folder / "kept.pt", mmap=True))


def mapped_for_itself(folder: Path) -> torch.Tensor:
    numbers().numpy().tofile(folder / "kept")
    return torch.from_file(str(folder / "kept"), shared=False, size=NUMEL)


def from_a_buffer(folder: Path) -> torch.Tensor:
    return torch.frombuffer(bytearray(numbers().numpy().tobytes()), dtype=torch.float32)


@pytest.mark.parametrize(
    "make",
    [from_a_worker, loaded_mapped, mapped_for_itself, from_a_buffer],
    ids=lambda make: make.__name__,
)
def test_memory_that_is_not_torchs_own_is_copied(
    make: Callable[[Path], torch.Tensor],
    held: nvmeio.Checkpointer,
    engine_held: HeldEngine,
    tmp_path: Path,
) -> None:
    tensor = make(tmp_path)
    report = held.save_sync({"a": tensor}, 1)
    assert (report.protected_bytes, report.copied_bytes) == (0, tensor.nbytes)
    tensor.zero_()
    engine_held.gate.set()
    held.wait_sync()
    check(held, 1, {"a": numbers()})


# Memory that changes its owner


def test_memory_that_malloc_would_give_back(
    held: nvmeio.Checkpointer, engine_held: HeldEngine
) -> None:
    """Nobody has the tensors any more but the save; what malloc gives next is other memory."""
    tensors = [numbers() + i for i in range(4)]
    addresses = {tensor.data_ptr() for tensor in tensors}
    report = held.save_sync({"a": tensors}, 1)
    assert report.protected_bytes == 16 * NUMEL
    del tensors
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    others = [torch.full((NUMEL,), -1.0) for _ in range(4)]
    assert addresses.isdisjoint(other.data_ptr() for other in others)
    engine_held.gate.set()
    held.wait_sync()
    check(held, 1, {"a": [numbers() + i for i in range(4)]})


def test_memory_that_is_used_again_after_a_save(new: Any) -> None:
    """It went back to malloc, unprotected; the next save of it is one like any other."""
    checkpointer = new()
    for step in range(5):
        state = {"a": numbers() + step}
        checkpointer.save_sync(state, step)
        del state
        checkpointer.wait_sync()
        again = torch.full((NUMEL,), float(step))
        checkpointer.save_sync({"a": again}, step + 100)
        wanted = again.clone()
        again.zero_()
        checkpointer.wait_sync()
        check(checkpointer, step, {"a": numbers() + step})
        check(checkpointer, step + 100, {"a": wanted})


@pytest.mark.parametrize("written", [False, True])
def test_memory_that_is_given_away_by_its_address(
    written: bool, new: Any, held: nvmeio.Checkpointer, engine_held: HeldEngine
) -> None:
    """The file held zeros, or what came next; the checkpoint before stays the newest."""
    if not page_tables_tell():
        pytest.skip("this kernel cannot be asked for what was written")
    engine_held.gate.set()
    held.save_sync({"a": numbers()}, 1)
    held.wait_sync()
    engine_held.gate.clear()
    tensor = numbers()
    held.save_sync({"a": tensor}, 2)
    give_away(tensor.view(torch.uint8)[1 << 20 :])
    if written:
        tensor.fill_(3)
    engine_held.gate.set()
    with pytest.raises(nvmeio.TransferError, match="lost its protection"):
        held.wait_sync()
    assert held.steps() == [1]
    held.save_sync({"a": numbers()}, 3)
    held.wait_sync()
    check(held, 3, {"a": numbers()})


def test_a_program_that_closes_what_it_has_not_opened(
    held: nvmeio.Checkpointer, engine_held: HeldEngine, directory: Path
) -> None:
    """Writers go on, the save fails, nothing of it has a name, and the next one is protected."""
    tensor = numbers()
    held.save_sync({"a": tensor}, 1)
    for name in os.listdir("/proc/self/fd"):
        if "userfaultfd" in _target_of(name):
            os.close(int(name))
    tensor.zero_()
    engine_held.gate.set()
    with pytest.raises(nvmeio.TransferError, match="lost its protection"):
        held.wait_sync()
    assert "step-00000001.pt" not in names(directory)
    tensor = numbers()
    report = held.save_sync({"a": tensor}, 2)
    assert report.protected_bytes == tensor.nbytes
    tensor.zero_()
    held.wait_sync()
    check(held, 2, {"a": numbers()})


def _target_of(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


# Forks


def test_workers_that_are_forked_in_the_middle(
    held: nvmeio.Checkpointer, engine_held: HeldEngine
) -> None:
    """They have the tensors as these are, write to them, and the parent's save is exact."""
    tensor = numbers()

    class Writing(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> torch.Tensor:
            same = torch.equal(tensor[1:], numbers()[1:])
            tensor.fill_(index)
            return torch.tensor([same or index > 1, bool((tensor == index).all())])

    held.save_sync({"a": tensor}, 1)
    tensor[0] = 7  # in the parent
    seen = list(DataLoader(Writing(), batch_size=None, num_workers=2))
    assert all(bool(each.all()) for each in seen)
    tensor[1:] = -1
    engine_held.gate.set()
    held.wait_sync()
    check(held, 1, {"a": numbers()})


# Shards


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Of this process alone."""
    fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_shards_of_fsdp(mesh: Any, held: nvmeio.Checkpointer, engine_held: HeldEngine) -> None:
    """What a rank has of them is protected where it lies."""
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(600, 600)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(2, 600)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    wanted = [_local(tensor).clone() for tensor in _tensors(state)]
    report = held.save_sync(state, 1)
    assert report.protected_bytes == 3 * 4 * 600 * 600
    optimizer.step()
    for parameter in model.parameters():
        parameter.data.mul_(2)
    engine_held.gate.set()
    held.wait_sync()
    loaded = torch.load(file_of(Path(held.directory), 1), weights_only=False)
    found = [_local(tensor) for tensor in _tensors(loaded)]
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def _tensors(state: Any) -> list[Any]:
    from torch.utils import _pytree

    return [leaf for leaf in _pytree.tree_leaves(state) if isinstance(leaf, torch.Tensor)]


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


# Memory of nvmeio's own


def test_what_records_are_gathered_in_is_kept_for_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To make it anew took a tenth of a save's CPU time on a busy machine."""
    made: list[int] = []
    new_staging = inflight.new_staging

    def counted(nbytes: int, device: torch.device) -> torch.Tensor:
        made.append(nbytes)
        return new_staging(nbytes, device)

    monkeypatch.setattr(inflight, "new_staging", counted)
    state = {"weight": numbers()}
    with nvmeio.Checkpointer(tmp_path, keep=1, snapshot="protect") as checkpointer:
        for step in range(3):
            state["weight"].add_(1)
            checkpointer.save_sync(state, step)
            checkpointer.wait_sync()
            if step == 0:
                assert made
                made.clear()
            check(checkpointer, step, state)
    assert not made
