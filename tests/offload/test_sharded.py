"""`SwappedModule` of modules that FSDP2 shards: one rank in this process, two in real ones."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from nvmeio.errors import BackendUnavailableError, ClosedError, TransferError
from nvmeio.offload import SwappedModule, SwappedOptimizer
from nvmeio.offload._module import sharded as sharded_module

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("torch is built without gloo", allow_module_level=True)
fsdp = pytest.importorskip("torch.distributed.fsdp")
if not hasattr(fsdp, "fully_shard"):
    pytest.skip("torch has no FSDP2", allow_module_level=True)

WINDOW = 1 << 16


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """Of a group that starts no threads; alone a rank sends nothing."""
    fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def plain() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.GELU(), torch.nn.Linear(33, 5))


def sharded(**options: Any) -> Any:
    made = plain()
    options["mesh"] = init_device_mesh("cpu", (1,))
    fsdp.fully_shard(made[2], **options)
    return fsdp.fully_shard(made, **options)


def losses(module: Any, optimizer: Any) -> list[float]:
    found = []
    for step in range(3):
        loss = module(torch.ones(2, 7) * step).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("drives", [1, 2])
def test_one_rank_alone_equals_the_module_in_memory(drives: int, tmp_path: Path) -> None:
    theirs = plain()
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    swap_dir = [tmp_path / f"drive-{number}" for number in range(drives)]
    with SwappedModule(sharded(), swap_dir=swap_dir, resident_bytes=WINDOW) as ours:
        made = ours.parameters()
        with SwappedOptimizer(torch.optim.AdamW, made, swap_dir=swap_dir, lr=1e-2) as optimizer:
            assert all(list(each.glob("parameters*/weights*")) for each in swap_dir)
            assert losses(ours, optimizer) == losses(theirs, reference)
    with pytest.raises(ClosedError):
        ours(torch.ones(2, 7))
    with pytest.raises(ClosedError):
        ours.module(torch.ones(2, 7))


def wide() -> Any:
    made = torch.nn.Sequential(torch.nn.Linear(64, 64))
    return fsdp.fully_shard(made, mesh=init_device_mesh("cpu", (1,)))


def with_ignored() -> Any:
    made = plain()
    mesh = init_device_mesh("cpu", (1,))
    return fsdp.fully_shard(made, mesh=mesh, ignored_params={made[0].weight})


def on_meta() -> Any:
    with torch.device("meta"):
        made = plain()
    return fsdp.fully_shard(made, mesh=init_device_mesh("cpu", (1,)))


def distributed_only() -> Any:
    from torch.distributed.tensor import Replicate, distribute_tensor

    made = torch.nn.Linear(3, 3)
    mesh = init_device_mesh("cpu", (1,))
    whole = distribute_tensor(made.weight, mesh, [Replicate()])
    made.weight = torch.nn.Parameter(whole)
    return made


@pytest.mark.parametrize(
    ("make", "options", "why"),
    [
        (sharded, {"stage_bytes": 4096}, "leave out stage_bytes"),
        (wide, {"resident_bytes": 4096}, "FSDPSequential needs 20480 bytes"),
        (with_ignored, {}, "not sharded.*without ignored_params"),
        (on_meta, {}, "on the meta device"),
        (distributed_only, {}, "not by fully_shard"),
    ],
)
def test_what_cannot_be_swapped_is_refused_by_name(
    make: Callable[[], Any], options: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"(?s){why}"):
        SwappedModule(make(), **{"swap_dir": tmp_path, "resident_bytes": WINDOW, **options})
    assert not list(tmp_path.iterdir())


def test_a_module_is_swapped_once(tmp_path: Path) -> None:
    made = sharded()
    with (
        SwappedModule(made, swap_dir=tmp_path, resident_bytes=WINDOW),
        pytest.raises(ValueError, match="swapped by another"),
    ):
        SwappedModule(made, swap_dir=tmp_path, resident_bytes=WINDOW)
    with pytest.raises(ValueError, match="swapped by another"):
        SwappedModule(made, swap_dir=tmp_path, resident_bytes=WINDOW)


def test_another_fsdp_than_the_known_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharded_module, "_GROUP", ("fsdp_params", "gathers_by_magic"))
    with pytest.raises(BackendUnavailableError, match="no gathers_by_magic"):
        SwappedModule(sharded(), swap_dir=tmp_path, resident_bytes=WINDOW)


def test_a_parameter_that_was_replaced_is_refused(tmp_path: Path) -> None:
    with SwappedModule(sharded(), swap_dir=tmp_path, resident_bytes=WINDOW) as ours:
        made: Any = ours.module
        made[2].bias = torch.nn.Parameter(torch.zeros(5))
        with pytest.raises(RuntimeError, match=r"bias of a swapped .*Linear was replaced"):
            ours(torch.ones(2, 7))


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_failed_gather_ends_the_module(backward: bool, tmp_path: Path) -> None:
    """FSDP would go on from the middle of the pass that failed, with gradients that are wrong."""
    with SwappedModule(sharded(), swap_dir=tmp_path, resident_bytes=WINDOW) as ours:
        found = ours(torch.ones(2, 7)).sum() if backward else None
        ours.evict()
        for file in tmp_path.glob("parameters*/weights*"):
            os.truncate(file, 0)
        with pytest.raises(TransferError):
            ours(torch.ones(2, 7)) if found is None else found.backward()
        with pytest.raises(ClosedError, match=r"in the middle.*The failure was \w*Error"):
            ours(torch.ones(2, 7))


def test_two_ranks_equal_those_in_memory_and_resume_when_one_was_killed(tmp_path: Path) -> None:
    assert _run("killed", tmp_path) == [0, -signal.SIGKILL]
    assert _run("resumed", tmp_path) == [0, 0]
    done = sorted(each.name for each in tmp_path.glob("done-*"))
    assert done == ["done-killed-0", "done-resumed-0", "done-resumed-1"]


def _run(kind: str, folder: Path) -> list[int]:
    codes, outputs = zip(
        *run_ranks(Path(__file__).parent / "_module_rank.py", 2, folder, kind), strict=True
    )
    if kind == "killed" and codes[1] == -signal.SIGKILL:
        assert not codes[0], outputs[0]
    else:
        assert codes == (0, 0), "\n".join(outputs)
    return list(codes)


@pytest.mark.parametrize("gradients", ["memory", "disk"])
def test_a_shard_that_lies_column_by_column_is_stepped_as_a_whole_tensor(
    gradients: str, tmp_path: Path
) -> None:
    """A fused step took the shard's memory in one order for its gradient's in another."""
    tensor = dist.tensor
    mesh = init_device_mesh("cpu", (1,))
    weights = torch.arange(77.0).reshape(11, 7).sin().T
    of_each = torch.arange(77.0).reshape(7, 11).cos()
    mine = tensor.distribute_tensor(weights, mesh, [tensor.Shard(0)])
    ours: Any = torch.nn.Parameter(mine)
    theirs = torch.nn.Parameter(weights.clone())
    reference = torch.optim.Adam([theirs], fused=True)
    with SwappedOptimizer(
        torch.optim.Adam, [ours], swap_dir=tmp_path, fused=True, gradients=gradients
    ) as optimizer:
        for _ in range(3):
            (ours * tensor.distribute_tensor(of_each, mesh, [tensor.Shard(0)])).sum().backward()
            (theirs * of_each).sum().backward()
            for each in (optimizer, reference):
                each.step()
                each.zero_grad()
        torch.testing.assert_close(ours.to_local(), theirs, rtol=1e-6, atol=1e-7)
