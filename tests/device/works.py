"""Everything that works on a device, once each on the stand-in: right numbers, in any order.

Each takes the stand-in, a folder, and the device; what is wrong raises. The tests of orders, of
devices and of planted faults go through them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fake_accelerator import Accelerator
from inference.test_training import adapted, data, empty, saved, unit_bytes
from offload.test_activations_on_device import gradients_in_memory, step, window
from offload.test_module_on_device import LARGEST, WIDTH, in_memory, losses_of, model, swapped

import nvmeio
from nvmeio.inference.kv_cache import KVStore
from nvmeio.offload import SwappedModule, SwappedOptimizer


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


def trained(made: Any, optimizer: Any, place: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Two steps of two passes each."""
    dtype = next(made.parameters()).dtype
    for number in range(4):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(3, WIDTH, generator=generator).to(dtype)
        made(place(x)).float().square().mean().backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def on_device(cuda: Accelerator, made: torch.nn.Module) -> torch.nn.Module:
    """The module with its parameters on the current device."""
    for module in made.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not cuda.has(parameter):
                module._parameters[name] = torch.nn.Parameter(cuda.tensor(parameter))
    return made


def optimizes(
    cuda: Accelerator, folder: Path, device: str, steps_there: bool = True, **options: Any
) -> None:
    """Parameters of a device, stepped there or by the CPU: those that the CPU has alone."""
    options |= {"lr": 1e-2, "subgroup_bytes": 16 << 10, "durable": False}
    dtype = torch.bfloat16 if "master_dtype" in options else torch.float32
    theirs, ours = model(2, dtype), model(2, dtype)
    for name in ("theirs", "ours"):
        (folder / name).mkdir()
    with SwappedOptimizer(
        torch.optim.AdamW, theirs.parameters(), swap_dir=folder / "theirs", **options
    ) as optimizer:
        trained(theirs, optimizer, lambda x: x)
    if steps_there:
        options["device"] = device
    with torch.cuda.device(device):
        on_device(cuda, ours)
        with SwappedOptimizer(
            torch.optim.AdamW, ours.parameters(), swap_dir=folder / "ours", **options
        ) as optimizer:
            trained(ours, optimizer, cuda.tensor)
        same = [
            torch.equal(cuda.value(mine), other.detach())
            for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True)
        ]
        assert all(same), same


def steps_on_the_device(cuda: Accelerator, folder: Path, device: str = "cuda:0") -> None:
    optimizes(cuda, folder, device)


def steps_on_the_cpu(cuda: Accelerator, folder: Path, device: str = "cuda:0") -> None:
    optimizes(cuda, folder, device, steps_there=False)


def gradients_on_the_drive(cuda: Accelerator, folder: Path, device: str = "cuda:0") -> None:
    optimizes(cuda, folder, device, gradients="disk")


def master_weights(cuda: Accelerator, folder: Path, device: str = "cuda:0") -> None:
    optimizes(cuda, folder, device, master_dtype=torch.float32, gradients="disk")


def tiles(cuda: Accelerator, folder: Path, device: str = "cuda:0") -> None:
    """A layer that is larger than a part may be: gradients of the same one on the CPU."""

    def made() -> Any:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(WIDTH, 512), torch.nn.Linear(512, WIDTH))

    found = []
    for where, place in (("cpu", lambda x: x), (device, cuda.tensor)):
        (folder / where).mkdir()
        options: dict[str, Any] = {"device": where, "stage_bytes": LARGEST}
        options |= {"device_bytes": 3 * LARGEST} if where == device else {}
        with (
            SwappedModule(
                made(), swap_dir=folder / where, resident_bytes=3 * LARGEST, **options
            ) as module,
            torch.cuda.device(device),
        ):
            assert len(list(module.parameters())) > 4, "nothing was cut"
            module(place(data_of(3))).square().mean().backward()
            found.append([cuda.value(p.grad) for p in module.parameters() if p.grad is not None])
    assert found[0] and all(map(torch.equal, *found))


def data_of(rows: int) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(0))


def changes_parameters(cuda: Accelerator, folder: Path, device: str = "cuda:0") -> None:
    """Within a `gather`, after a pass: the next pass computes with what they are then."""
    theirs, ours = model(), model()
    with torch.no_grad():
        theirs[2].up.weight.mul_(2)
    losses = losses_of(theirs, lambda x: x)
    with swapped(ours, folder, device=device) as module, torch.cuda.device(device):
        losses_of(module, cuda.tensor, passes=1)
        weight = ours[2].up.weight
        with module.gather(weight), torch.no_grad():
            weight.mul_(2)
        found = losses_of(module, cuda.tensor)
        same = [torch.equal(cuda.value(a), b) for a, b in zip(found, losses, strict=True)]
        assert all(same), same


def trains_adapters(
    cuda: Accelerator, folder: Path, device: str = "cuda:0", dtype: torch.dtype = torch.float32
) -> None:
    path = folder / "base.safetensors"
    whole = saved(path, 4).to(dtype)
    streamed = nvmeio.stream_model(
        empty(4),
        path,
        device=device,
        trainable=True,
        dtype=dtype,
        resident_bytes=3 * unit_bytes(),
    )
    try:
        with torch.cuda.device(device):
            found = []
            for made, place in ((whole, lambda x: x), (streamed, cuda.tensor)):
                parameters = [parameter.to(dtype) for parameter in adapted(made)]
                there = [torch.nn.Parameter(place(each.detach())) for each in parameters]
                replace(made, there)
                for number in range(2):
                    made(place(data(number).to(dtype))).float().square().mean().backward()
                found.append([cuda.value(each.grad) for each in there if each.grad is not None])
            assert found[0] and all(map(torch.equal, *found))
    finally:
        streamed.weight_stream.close()


def replace(made: torch.nn.Module, parameters: list[torch.nn.Parameter]) -> None:
    """Put these in the place of what is trained, in order."""
    left = iter(parameters)
    for module in made.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                module._parameters[name] = next(left)


def trains_adapters_in_bfloat16(cuda: Accelerator, folder: Path, device: str = "cuda:0") -> None:
    trains_adapters(cuda, folder, device, torch.bfloat16)


def streams_and_converts(cuda: Accelerator, folder: Path, device: str = "cuda:0") -> None:
    """Weights of float32 that are computed with in bfloat16, by two streams in turn."""
    path = folder / "base.safetensors"
    whole = saved(path, 5).to(torch.bfloat16)
    for units in (4, 40):
        with torch.cuda.device(device), torch.no_grad():
            streamed = nvmeio.stream_model(
                empty(5),
                path,
                device=device,
                dtype=torch.bfloat16,
                resident_bytes=units * unit_bytes(),
            )
            side: Any = torch.cuda.Stream(device)
            try:
                for number, on in enumerate([torch.cuda.current_stream(), side] * 2):
                    x = data(number).to(torch.bfloat16)
                    with torch.cuda.stream(on):
                        found = streamed(cuda.tensor(x))
                    assert torch.equal(cuda.value(found), whole(x))
            finally:
                streamed.weight_stream.close()


def loads_where_others_computed(cuda: Accelerator, folder: Path, device: str = "cuda:0") -> None:
    """Memory of tensors that kernels may still read is that of what is loaded."""
    state = some_state()
    nvmeio.save_safetensors(state, folder / "state.safetensors")
    with torch.cuda.device(device):
        there = {name: value.to(device) for name, value in state.items()}
        doubled = {name: value * 2 for name, value in there.items()}
        del there
        with nvmeio.safe_open(folder / "state.safetensors", device=device) as opened:
            found = {name: opened.get_tensor(name) for name in state}
        assert_same(cuda, found, state, device)
        assert_same(cuda, doubled, {name: value * 2 for name, value in state.items()}, device)


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    from torch.testing._internal.distributed import fake_pg

    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def gathers_shards(cuda: Accelerator, folder: Path) -> None:
    """FSDP2, whose shards are on the drive: gradients of the module in memory."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    theirs, ours = model(3), model(3)
    losses_of(theirs, lambda x: x)
    torch.cuda.set_device(0)
    with one_rank():
        options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()}
        options["mesh"] = init_device_mesh("cuda", (1,))
        for part in dict.fromkeys(ours):
            fully_shard(part, **options)
        fully_shard(ours, **options)
        with SwappedModule(ours, swap_dir=folder, resident_bytes=3 * LARGEST) as module:
            assert ours.seen.device.type == "cuda"  # FSDP's, which was refused, and taken back
            losses_of(module, lambda x: x.to("cuda"))
            for mine, other in zip(module.parameters(), theirs.parameters(), strict=True):
                shard: Any = mine.grad
                torch.testing.assert_close(shard.to_local(), other.grad)


# On whatever device they are told; and on the one that a process of a mesh has.
WORKS: list[Callable[..., None]] = [
    streams,
    streams_and_converts,
    trains_adapters,
    trains_adapters_in_bfloat16,
    trains,
    changes_parameters,
    tiles,
    steps_on_the_device,
    steps_on_the_cpu,
    gradients_on_the_drive,
    master_weights,
    saves_activations,
    saves,
    loads,
    loads_where_others_computed,
    checkpoints,
    gathers_and_scatters,
    keeps_keys_and_values,
]
WORKS_OF_A_MESH: list[Callable[..., None]] = [gathers_shards] if dist.is_available() else []
