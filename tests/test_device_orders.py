"""Work on a device in random orders that it may choose, and on a device that is not the first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_accelerator import Accelerator, Pace, accelerator
from inference.test_training import data, empty, saved, unit_bytes
from offload.test_activations_on_device import gradients_in_memory, step, window
from offload.test_module_on_device import in_memory, losses_of, model, swapped
from support import run_ranks

import nvmeio
from nvmeio.inference.kv_cache import KVStore

HERE = Path(__file__).parent


def streams(cuda: Accelerator, folder: Path, device: str = "cuda") -> None:
    path = folder / "base.safetensors"
    whole = saved(path, 4)
    streamed = nvmeio.stream_model(empty(4), path, device=device, resident_bytes=3 * unit_bytes())
    try:
        with torch.cuda.device(device), torch.no_grad():
            found = [streamed(cuda.tensor(data(number))) for number in range(2)]
            assert [
                torch.equal(cuda.value(each), whole(data(number)))
                for number, each in enumerate(found)
            ] == [True, True]
    finally:
        streamed.weight_stream.close()


def trains(cuda: Accelerator, folder: Path, device: str = "cuda") -> None:
    losses, gradients = in_memory()
    made = model()
    with swapped(made, folder, device=device) as module, torch.cuda.device(device):
        found = losses_of(module, cuda.tensor)
        pairs = [*zip(found, losses, strict=True)]
        pairs += zip([p.grad for p in made.parameters()], gradients, strict=True)
        assert all(torch.equal(cuda.value(mine), theirs) for mine, theirs in pairs)


def saves_activations(cuda: Accelerator, folder: Path, device: str = "cuda") -> None:
    with window(folder) as kept, torch.cuda.device(device):
        assert not step(cuda, kept, gradients_in_memory())


def some_state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1,), (1000,), (30, 70), (40_000,)]
    state = {f"t{n}": torch.randn(shape, generator=generator) for n, shape in enumerate(shapes)}
    return {**state, "half": state["t2"].to(torch.bfloat16)}


def assert_same(cuda: Accelerator, found: Any, state: dict[str, torch.Tensor], device: str) -> None:
    for name, wanted in state.items():
        assert found[name].device == torch.device(device), name
        assert torch.equal(cuda.value(found[name]), wanted), name


def saves(cuda: Accelerator, folder: Path, device: str = "cuda:0") -> None:
    """What was asked before `save` is in the file, and what is asked after it is not."""
    state = some_state()
    with torch.cuda.device(device):
        there = {name: value.to(device) for name, value in state.items()}
        there["t3"] += 1
        nvmeio.save(there, folder / "state.pt")
        nvmeio.save_safetensors(there, folder / "state.safetensors")
        there["t3"].zero_()
    state["t3"] = state["t3"] + 1
    for found in (
        torch.load(folder / "state.pt", map_location="cpu", weights_only=True),
        nvmeio.load_safetensors(folder / "state.safetensors"),
    ):
        assert_same(cuda, found, state, "cpu")


def loads(cuda: Accelerator, folder: Path, device: str = "cuda:0") -> None:
    state = some_state()
    archive, tensors = folder / "state.pt", folder / "state.safetensors"
    nvmeio.save(state, archive)
    nvmeio.save_safetensors(state, tensors)
    with torch.cuda.device(device):
        assert_same(cuda, nvmeio.load(archive, map_location=device), state, device)
        assert_same(cuda, nvmeio.load_safetensors(tensors, device=device), state, device)
        with nvmeio.safe_open(tensors, device=device) as opened:
            found = {name: opened.get_tensor(name) for name in state}
            found["part"] = opened.get_slice("t2")[3:9, 5:]
    assert_same(cuda, found, {**state, "part": state["t2"][3:9, 5:]}, device)


def checkpoints(cuda: Accelerator, folder: Path, device: str = "cuda:0") -> None:
    """Steps go on while the state of before is written."""
    state = some_state()
    with torch.cuda.device(device), nvmeio.Checkpointer(folder / "steps") as saver:
        there = {name: value.to(device) for name, value in state.items()}
        for step in range(3):
            there["t3"] += 1
            saver.save_sync(there, step)
            there["t0"] -= 1
        saver.wait_sync()
        found = saver.restore(2)
    wanted = {**state, "t0": state["t0"] - 1 - 1, "t3": state["t3"] + 1 + 1 + 1}
    assert_same(cuda, found, wanted, device)


def gathers_and_scatters(cuda: Accelerator, folder: Path, device: str = "cuda:0") -> None:
    path, places = folder / "rows", torch.randperm(64) * 512
    rows = torch.randint(256, (64, 512), dtype=torch.uint8)
    with torch.cuda.device(device), nvmeio.AioHandle() as handle:
        there = rows.to(device)
        for _ in range(3):
            there += 1
            handle.sync_scatter(there, path, file_offsets=places)
            back = torch.zeros_like(there)
            handle.sync_gather(back, path, file_offsets=places)
            there.add_(back).sub_(back)
        assert torch.equal(cuda.value(back), rows + 3)
        assert torch.equal(cuda.value(there), rows + 3)


def keeps_keys_and_values(cuda: Accelerator, folder: Path, device: str = "cuda:0") -> None:
    with (
        torch.cuda.device(device),
        nvmeio.AioHandle() as handle,
        contextlib.closing(KVStore(folder, handle)) as store,
    ):
        pairs = [torch.randn(2, 1, 2, 16, 64) for _ in range(4)]
        blocks = []
        for pair in pairs:
            there = pair.to(device)
            blocks.append(store.put(there[0], there[1])[0])
            there.zero_()
        store.settle()
        for block, pair in zip(blocks, pairs, strict=True):
            memory = nvmeio.empty_aligned(block.room, dtype=torch.uint8)
            for operation in store.get(block, memory):
                operation.result()
            assert torch.equal(memory[: pair.nbytes].view(torch.float32).view_as(pair), pair)


WORKS: list[Callable[..., None]] = [
    streams,
    trains,
    saves_activations,
    saves,
    loads,
    checkpoints,
    gathers_and_scatters,
    keeps_keys_and_values,
]


@pytest.mark.parametrize("work", [streams, trains, saves_activations])  # told "cuda" alone
def test_the_current_device_is_the_caller_s(
    work: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A model that was streamed to "cuda" went to the first device, whose owner's thread is there.

    So did its contexts.
    """
    with accelerator(monkeypatch) as cuda:
        cuda.set_device(1)
        work(cuda, tmp_path)
        assert cuda.contexts == {1}


@pytest.mark.parametrize("work", WORKS)
def test_work_on_another_device_makes_no_context_on_the_first(
    work: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Some 400 MB of each rank's on GPU 0."""
    with accelerator(monkeypatch, Pace.RANDOM, Pace.RANDOM, 1) as cuda:
        work(cuda, tmp_path, "cuda:1")
        assert cuda.contexts == {1}


def in_random_order(
    work: Callable[..., None], seed: int, monkeypatch: pytest.MonkeyPatch, folder: Any
) -> None:
    folder.mkdir()
    with (
        monkeypatch.context() as patch,
        accelerator(patch, Pace.RANDOM, Pace.RANDOM, seed) as cuda,
    ):
        work(cuda, folder)


@pytest.mark.parametrize("work", WORKS)
def test_work_in_some_random_orders(
    work: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for seed in range(3):
        in_random_order(work, seed, monkeypatch, tmp_path / str(seed))


@pytest.mark.stress
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("work", WORKS)
def test_work_in_hundreds_of_random_orders(
    work: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for seed in range(1000, 1300):
        in_random_order(work, seed, monkeypatch, tmp_path / str(seed))


@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch is built without gloo")
def test_ranks_stream_to_a_device_each(tmp_path: Path) -> None:
    """Each byte is read by one rank; no rank makes a context on another's device."""
    for status, told in run_ranks(HERE / "_device_rank.py", 2, tmp_path):
        assert status == 0, told
