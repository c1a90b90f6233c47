"""What work on a device costs once it has begun: counted on the stand-in, for a pass or a step.

Then nothing is page-locked, no stream is made, and no thread that computes waits for the device.
Where the device is done with what it was asked, no memory of it is new either.
"""

from __future__ import annotations

import contextlib
import copy
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_accelerator import DEVICE, Accelerator, Costs, Pace, accelerator
from inference.test_training import data, empty, saved, unit_bytes
from offload._saved_activations import made, small
from offload.test_module_on_device import WIDTH, model, swapped
from support import spin_until

import nvmeio
import nvmeio.testing
from nvmeio._io import spans
from nvmeio._memory import devices
from nvmeio.inference.kv_cache import KVStore
from nvmeio.offload import SwappedOptimizer

LAYERS = 5


@pytest.fixture(params=[Pace.EAGER, Pace.LAZY], ids=lambda pace: pace.name.lower())
def cuda(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    with accelerator(monkeypatch, request.param, request.param) as made:
        yield made


@pytest.fixture(params=[Pace.EAGER, Pace.RANDOM], ids=lambda pace: pace.name.lower())
def asked(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    """For what looks at the device until it is done, which is never where nobody waits."""
    with accelerator(monkeypatch, request.param, request.param) as made:
        yield made


def cost(cuda: Accelerator, work: Callable[[], Any], before: int = 3) -> Costs:
    """That of one more time."""
    for _ in range(before):
        work()
    with cuda.counted() as costs:
        work()
    stream: Any = cuda.current_stream()
    if stream.pace is not Pace.EAGER:
        costs.allocations = 0  # nothing is done there, so nothing is given again
    return costs


def assert_steady(costs: Costs) -> None:
    kept = (costs.page_locks, costs.streams, costs.allocations, costs.host_waits)
    assert kept == (0, 0, 0, 0), costs


def test_a_streamed_pass(cuda: Accelerator, tmp_path: Path) -> None:
    path = tmp_path / "base.safetensors"
    saved(path, LAYERS)
    streamed = nvmeio.stream_model(
        empty(LAYERS), path, device="cuda", resident_bytes=4 * unit_bytes()
    )
    x = cuda.tensor(data(0))
    try:
        with torch.no_grad():
            costs = cost(cuda, lambda: streamed(x))
    finally:
        streamed.weight_stream.close()
    assert_steady(costs)
    assert costs.copies


@pytest.mark.parametrize("steps", ["on the device", "on the CPU"])
@pytest.mark.parametrize("gradients", ["memory", "disk"])
def test_a_pass_and_a_step_of_training(
    gradients: str, steps: str, cuda: Accelerator, tmp_path: Path
) -> None:
    x = cuda.tensor(torch.randn(3, WIDTH))
    options: dict[str, Any] = {"device": "cuda"} if steps == "on the device" else {}
    with (
        swapped(model(3), tmp_path) as module,
        SwappedOptimizer(
            torch.optim.AdamW,
            module.parameters(),
            swap_dir=tmp_path,
            gradients=gradients,
            durable=False,
            subgroup_bytes=64 << 10,
            **options,
        ) as optimizer,
    ):

        def iterate() -> None:
            module(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        costs = cost(cuda, iterate)
    costs.allocations = 0  # a thread beside lets go of them when it gets there
    assert_steady(costs)
    assert costs.copies


def on_device(cuda: Accelerator, module: torch.nn.Module) -> torch.nn.Module:
    """The module with its parameters there."""
    for each in module.modules():
        for key, parameter in each._parameters.items():
            if parameter is not None:
                there = torch.nn.Parameter(cuda.tensor(parameter.detach()))
                each._parameters[key] = there
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_on_the_cpu_waits_no_more_often_for_more_parameters(
    dtype: torch.dtype, cuda: Accelerator, tmp_path: Path
) -> None:
    """Each gradient was copied to memory that was not locked, and waited for: 12 and 48 times."""
    found = []
    for layers in (3, 12):
        module = on_device(cuda, model(layers).to(dtype))
        x = cuda.tensor(torch.randn(3, WIDTH).to(dtype))
        module(x).square().mean().backward()
        with SwappedOptimizer(
            torch.optim.AdamW,
            module.parameters(),
            swap_dir=tmp_path / str(layers),
            durable=False,
            master_dtype=torch.float32,
        ) as optimizer:
            found.append(cost(cuda, optimizer.step))
    few, many = found
    assert_steady(few)
    assert_steady(many)
    assert few.waits_beside == many.waits_beside <= 2
    assert 4 * few.copies == many.copies


@pytest.mark.parametrize("value", [1.0, math.inf], ids=["finite", "infinite"])
def test_backward_waits_for_no_gradient_that_goes_to_the_drive(
    value: float, cuda: Accelerator, tmp_path: Path
) -> None:
    """Each was copied to memory that was not locked, and measured there, while backward waited."""
    module = on_device(cuda, model(3))
    x = cuda.tensor(torch.randn(3, WIDTH) * value)
    with SwappedOptimizer(
        torch.optim.AdamW,
        module.parameters(),
        swap_dir=tmp_path,
        gradients="disk",
        durable=False,
        device="cuda",
    ) as optimizer:
        for _ in range(3):
            loss = module(x).square().mean()
            with cuda.counted() as costs:
                loss.backward()
            kept = [p.grad for p in module.parameters() if p.grad is not None]
            assert len(kept) == 1
            assert bool(cuda.value(kept[0]).isfinite().all()) == (value == 1.0)
            optimizer.zero_grad()
    assert (costs.host_waits, costs.waits_beside, costs.page_locks, costs.streams) == (0, 0, 0, 0)
    assert costs.copies >= 8


def test_what_is_added_to_a_gradient_comes_after_its_copy(
    cuda: Accelerator, tmp_path: Path
) -> None:
    """Where the sheet is not full in between, nobody has waited for that copy."""
    layers = [torch.nn.Linear(64, 64, bias=False) for _ in range(3)]
    inputs = [torch.randn(4, 64) for _ in range(4)]
    there = [on_device(cuda, copy.deepcopy(layer)) for layer in layers]
    for x in inputs:
        layers[2](x).square().sum().backward()
    with SwappedOptimizer(
        torch.optim.SGD,
        [p for layer in there for p in layer.parameters()],
        lr=1e-3,
        swap_dir=tmp_path,
        gradients="disk",
        durable=False,
        device="cuda",
    ) as optimizer:
        for x in inputs:
            there[2](cuda.tensor(x)).square().sum().backward()
        optimizer.step()
    torch.optim.SGD(layers[2].parameters(), lr=1e-3).step()
    assert torch.equal(cuda.value(there[2].weight), layers[2].weight)


def have_room(nbytes: int, blocks: int, *streams: Any) -> None:
    """Let torch's allocator have so many free blocks of each of these streams."""
    for stream in streams:
        with devices.on_stream(stream):
            kept = [devices.empty(nbytes, DEVICE) for _ in range(blocks)]
        del kept


def test_a_pass_with_activations_on_the_drive(cuda: Accelerator, tmp_path: Path) -> None:
    """Passes differ in how many are on the device at once: it depends on when the drive is done.

    So there is room beforehand for as many as may be: for two passes of which nothing goes down,
    and for the window of what comes up.
    """
    module, x = made("mlp")
    on_device(cuda, module)
    x, window = cuda.tensor(x), 65536
    with small(tmp_path, resident_bytes=window, device_bytes=window) as swapped_ones:

        def iterate() -> None:
            with swapped_ones.saving():
                loss = module(x).square().mean()
            loss.backward()
            module.zero_grad()

        everything = [module(x).square().mean() for _ in range(2)]
        del everything
        up = devices.side_stream(DEVICE, "activations up")
        have_room(x.nbytes, window // x.nbytes, cuda.current_stream(), up)
        assert_steady(cost(cuda, iterate))
        for _ in range(20):
            costs = cost(cuda, iterate, before=0)
            assert_steady(costs)
            assert costs.copies
        assert swapped_ones.bytes_written


@pytest.mark.parametrize("handles", ["one handle", "a handle each"])
@pytest.mark.parametrize("rows", [False, True], ids=["whole", "rows"])
def test_transfers_through_the_ring(
    rows: bool, handles: str, asked: Accelerator, direct_path: Path
) -> None:
    tensor = asked.tensor(torch.zeros(16, 8192, dtype=torch.uint8))
    direct_path.write_bytes(bytes(tensor.nbytes))
    places = torch.arange(16) * 8192

    def move(handle: nvmeio.AioHandle) -> None:
        if rows:
            handle.sync_scatter(tensor, direct_path, file_offsets=places)
            handle.sync_gather(tensor, direct_path, file_offsets=places)
        else:
            handle.sync_pwrite(tensor, direct_path)
            handle.sync_pread(tensor, direct_path)

    def with_own() -> None:
        with nvmeio.AioHandle() as handle:
            move(handle)

    with nvmeio.AioHandle() as one:
        costs = cost(asked, with_own if handles == "a handle each" else lambda: move(one))
    assert_steady(costs)
    assert costs.copies >= 2


def test_a_small_transfer_takes_a_part_of_a_chunk(asked: Accelerator, direct_path: Path) -> None:
    """Each took a chunk of 16 MiB, of which there are four: four were under way, and not 64."""
    data = bytes(range(256)) * 256
    direct_path.write_bytes(data * 64)
    rooms = [asked.tensor(torch.zeros(len(data), dtype=torch.uint8)) for _ in range(64)]
    gate = threading.Event()
    engine = nvmeio.testing.FakeEngine(hold=gate)
    with asked.counted() as costs, nvmeio.AioHandle(engine=engine) as handle:
        reading = [
            handle.async_pread(each, direct_path, each.nbytes * number)
            for number, each in enumerate(rooms)
        ]
        try:
            spin_until(lambda: engine.counters().in_flight == 64)  # at the drive, all at once
        finally:
            gate.set()
        assert [operation.result() for operation in reading] == [len(data)] * 64
    assert costs.page_locks == 1  # the ring
    assert all(asked.value(each).numpy().tobytes() == data for each in rooms)


def test_a_load(asked: Accelerator, direct_path: Path) -> None:
    """It made chunks of 32 MiB and a stream for each tensor."""
    direct_path.write_bytes(bytes(range(256)) * 256)

    def load() -> None:
        with nvmeio.AioHandle() as handle, nvmeio.open(direct_path) as file:
            wanted = [spans.Span(file, 0, 40_000), spans.Span(file, 50_000, 10_000)]
            found = spans.Load().run(handle, wanted, DEVICE)
        assert [asked.value(each).sum().item() for each in found] == [
            sum(direct_path.read_bytes()[start : start + nbytes])
            for start, nbytes in ((0, 40_000), (50_000, 10_000))
        ]

    costs = cost(asked, load)
    costs.host_waits = 0  # it returns when its bytes are there
    assert_steady(costs)
    assert costs.copies


def test_a_token_s_keys_and_values(asked: Accelerator, tmp_path: Path) -> None:
    """Each token mapped, locked and registered all of a layer's past."""
    with (
        nvmeio.AioHandle() as handle,
        contextlib.closing(KVStore(tmp_path, handle)) as store,
    ):
        pair = [asked.tensor(torch.randn(1, 2, 16, 64)) for _ in range(2)]

        def put() -> None:
            block, _ = store.put(*pair)
            store.settle()
            memory = nvmeio.empty_aligned(block.room, dtype=torch.uint8)
            for operation in store.get(block, memory):
                operation.result()

        costs = cost(asked, put)
    assert (costs.page_locks, costs.streams) == (0, 0), costs
