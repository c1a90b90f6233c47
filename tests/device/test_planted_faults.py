"""Every fault that is planted; the stand-in finds each, and nothing without it.

- `ACCESSES`: two accesses to memory without an order between them. Each is there in order, too.
- `WAITS`: a wait of nvmeio's own, by the line that asks for it: without it the work is told of,
  though its numbers are right, since the device has no choice here (what computes is eager).
- `ORDERS`: other faults that are told so. `NUMBERS`: what goes wrong where the device has a choice.
- `COSTS`, `CONTEXTS`: what may not happen in the steady state, or on another device.

Collectives have theirs in test_fake_collectives.py, FSDP2 in offload/test_sharded_on_device.py.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from device import works
from fake_accelerator import DEVICE, Accelerator, Costs, Pace, accelerator, on, other_stream
from gds._support import ON_NVME, FakeCuFile, compiled, fake_cufile
from offload.test_module_on_device import WIDTH, model
from support import spin_until

import nvmeio
from nvmeio._memory import devices, page_locked, system
from nvmeio._residency.on_device import DevicePool
from nvmeio.offload import SwappedOptimizer

Work = Callable[[Accelerator, Path], None]
PLANTED = pytest.mark.parametrize("waits", [True, False], ids=["in order", "without an order"])


# Two accesses without an order, each beside the same with one


def reads_what_another_stream_writes(cuda: Accelerator, waits: bool) -> None:
    tensor, side = cuda.tensor(torch.zeros(8)), other_stream()
    tensor.add_(1)
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with on(side):
        tensor.sum()


def writes_what_another_stream_reads(cuda: Accelerator, waits: bool) -> None:
    tensor, side = cuda.tensor(torch.zeros(8)), other_stream()
    side.wait_stream(torch.cuda.current_stream())
    with on(side):
        kept = tensor + 1
        event = torch.cuda.current_stream().record_event()
    if waits:
        event.synchronize()
    tensor.zero_()
    del kept


def writes_other_bytes_of_the_same_tensor(cuda: Accelerator, waits: bool) -> None:
    """In order where they are other bytes, and not where they overlap."""
    tensor, side = cuda.tensor(torch.zeros(64)), other_stream()
    side.wait_stream(torch.cuda.current_stream())
    tensor[:32].add_(1)
    with on(side):
        tensor[32 if waits else 31 :].add_(1)


def waits_for_an_event_of_before(cuda: Accelerator, waits: bool) -> None:
    """An event stands for what was asked before it, and not for what came later."""
    tensor, side = cuda.tensor(torch.zeros(8)), other_stream()
    event = torch.cuda.current_stream().record_event()
    tensor.add_(1)
    side.wait_event(torch.cuda.current_stream().record_event() if waits else event)
    with on(side):
        tensor.sum()


def changes_host_memory_under_a_copy(cuda: Accelerator, waits: bool) -> None:
    tensor, chunk = cuda.tensor(torch.zeros(8)), torch.ones(8)
    beside = devices.Beside(DEVICE, "test")
    beside.follow()
    beside.copy(tensor, chunk)
    if waits:
        beside.mark().wait()
    chunk.fill_(2)
    beside.precede()


def looks_at_host_memory_before_the_copy_is_there(cuda: Accelerator, waits: bool) -> None:
    tensor, chunk = cuda.tensor(torch.zeros(8)), torch.ones(8)
    beside = devices.Beside(DEVICE, "test")
    beside.follow()
    beside.copy(chunk, tensor)
    if waits:
        assert beside.mark().done()
    chunk.sum()
    beside.mark().wait()


def looks_at_host_memory_before_torch_s_copy_is_there(cuda: Accelerator, waits: bool) -> None:
    """torch makes page-locked memory for such a copy, and returns before it is done."""
    there = cuda.tensor(torch.zeros(8)).to("cpu", non_blocking=True)
    if waits:
        torch.cuda.current_stream().synchronize()
    there.sum()
    torch.cuda.synchronize()


def frees_memory_that_another_stream_reads(cuda: Accelerator, waits: bool) -> None:
    """What torch asks `record_stream` for: its own stream may have the memory at once."""
    side = other_stream()
    with on(side):
        tensor = cuda.tensor(torch.ones(8))
    torch.cuda.current_stream().wait_stream(side)
    tensor.sum()
    if waits:
        tensor.record_stream(torch.cuda.current_stream())
    del tensor
    with on(side):
        cuda.tensor(torch.zeros(8))


def allocates_where_freed_memory_is_read(cuda: Accelerator, waits: bool) -> None:
    """Any size may get it. A stream that waits before it allocates needs no `record_stream`."""
    here, side = torch.cuda.current_stream(), other_stream()
    with on(side):
        tensor = cuda.tensor(torch.ones(8))
    here.wait_stream(side)
    tensor.sum()
    del tensor
    cuda.take_back()
    if waits:
        side.wait_stream(here)
    with on(side):
        cuda.empty(4096)


def empties_a_storage_that_another_stream_reads(cuda: Accelerator, waits: bool) -> None:
    """As FSDP2 does with what it has gathered."""
    here, side = torch.cuda.current_stream(), other_stream()
    tensor = cuda.tensor(torch.ones(8))
    side.wait_stream(here)
    with on(side):
        tensor.sum()
    tensor.untyped_storage().resize_(0)
    if waits:
        here.wait_stream(side)
    tensor.untyped_storage().resize_(32)


def writes_new_memory_on_another_stream(cuda: Accelerator, waits: bool) -> None:
    """Whose it was before, its stream may still be at work there."""
    tensor, side = cuda.empty(32), other_stream()
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with on(side):
        tensor.zero_()


def takes_what_the_allocator_has_seen_for_its_own(cuda: Accelerator, waits: bool) -> None:
    """That the allocator knows a stream to be done with some memory is no order for others."""
    tensor, other, side = cuda.tensor(torch.zeros(8)), cuda.tensor(torch.zeros(8)), other_stream()
    side.wait_stream(torch.cuda.current_stream())
    with on(side):
        tensor.add_(1)
        other.add_(1)
    other.record_stream(side)
    del other
    cuda.take_back()
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    tensor.sum()


ACCESSES: list[Callable[[Accelerator, bool], None]] = [
    reads_what_another_stream_writes,
    writes_what_another_stream_reads,
    writes_other_bytes_of_the_same_tensor,
    waits_for_an_event_of_before,
    changes_host_memory_under_a_copy,
    looks_at_host_memory_before_the_copy_is_there,
    looks_at_host_memory_before_torch_s_copy_is_there,
    frees_memory_that_another_stream_reads,
    allocates_where_freed_memory_is_read,
    empties_a_storage_that_another_stream_reads,
    writes_new_memory_on_another_stream,
    takes_what_the_allocator_has_seen_for_its_own,
]


@PLANTED
@pytest.mark.parametrize("plant", ACCESSES)
def test_an_access_without_an_order_is_told_and_none_that_has_one(
    plant: Callable[[Accelerator, bool], None], waits: bool, eager: Accelerator
) -> None:
    plant(eager, waits)
    told = eager.forgive()
    assert bool(told) != waits, told
    if not waits:
        assert all(each.startswith("no order: ") for each in told)
        sides = [side for each in told for side in each.split(", after ")]
        assert len(sides) == 2 * len(told)
        assert all(Path(__file__).name in side for side in sides)


@PLANTED
@pytest.mark.parametrize("direction", ["read", "write"])
def test_transfers_of_drives_have_an_order_with_copies(
    direction: str, waits: bool, eager: Accelerator, path: Path
) -> None:
    path.write_bytes(bytes(8192))
    tensor = eager.tensor(torch.zeros(4096, dtype=torch.uint8))
    chunk = nvmeio.empty_aligned(4096, dtype=torch.uint8)
    beside = devices.Beside(DEVICE, "test")
    beside.follow()
    with nvmeio.AioHandle(engine="threads") as handle:
        if direction == "read":
            beside.copy(tensor, chunk)
        else:
            beside.copy(chunk, tensor)
        if waits:
            beside.mark().wait()
        move = handle.sync_pread if direction == "read" else handle.sync_pwrite
        move(chunk, path)
        moving = getattr(handle, f"async_p{direction}")(chunk, path)
        if waits:
            moving.result()
        beside.copy(*((tensor, chunk) if direction == "read" else (chunk, tensor)))
        moving.result()
        beside.mark().wait()
    told = eager.forgive()
    assert bool(told) != waits, told
    if not waits:
        begun = [each for each in told if each.split(", after ")[0].count("the drive")]
        under_way = [each for each in told if each.split(", after ")[1].count("the drive")]
        assert begun and under_way, told


@pytest.fixture(scope="module")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled("fake_cufile.c", tmp_path_factory.mktemp("fakes"))


@pytest.fixture
def cufile(
    eager: Accelerator, fake_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeCuFile]:
    with fake_cufile(fake_library, tmp_path, monkeypatch) as made:
        made.dstatus = made.fflags = ON_NVME
        yield made


def works_during_a_call(cuda: Accelerator, cufile: FakeCuFile, moving: Any, tensor: Any) -> None:
    tensor.add_(1)
    cufile.hold = 0
    moving()


def works_after_a_call_that_nobody_has_noticed(
    cuda: Accelerator, cufile: FakeCuFile, moving: Any, tensor: Any
) -> None:
    cufile.hold = 0
    spin_until(lambda: not cufile.together)
    tensor.add_(1)
    moving()


@PLANTED
@pytest.mark.parametrize("direction", ["read", "write"])
@pytest.mark.parametrize("plant", [works_during_a_call, works_after_a_call_that_nobody_has_noticed])
def test_calls_of_cufile_have_an_order_with_kernels(
    plant: Callable[..., None],
    direction: str,
    waits: bool,
    eager: Accelerator,
    cufile: FakeCuFile,
    path: Path,
) -> None:
    path.write_bytes(bytes(4096))
    tensor = eager.tensor(torch.zeros(1024))
    with nvmeio.GdsHandle() as handle:
        cufile.hold = 1
        moving = getattr(handle, f"async_p{direction}")(tensor, path)
        spin_until(lambda: bool(cufile.together))
        if waits:
            cufile.hold = 0
            moving.result()
        plant(eager, cufile, moving.result, tensor)
    told = eager.forgive()
    assert bool(told) != waits, told
    assert waits or all("cuFile" in each.split(", after ")[1] for each in told)


@PLANTED
def test_a_call_of_cufile_has_an_order_with_what_another_stream_was_asked(
    waits: bool, eager: Accelerator, cufile: FakeCuFile, path: Path
) -> None:
    """A transfer comes after the stream that is current, and after no other."""
    tensor, side = eager.tensor(torch.zeros(1024)), other_stream()
    side.wait_stream(torch.cuda.current_stream())
    with on(side):
        tensor.add_(1)
    with nvmeio.GdsHandle() as handle:
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        handle.sync_pwrite(tensor, path)
    told = eager.forgive()
    assert bool(told) != waits, told
    assert waits or all("cuFile" in each.split(", after ")[0] for each in told)


# A wait of nvmeio's that is not made


class Reached:
    """A mark of nothing."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class Wait(NamedTuple):
    """A wait.

    Attributes:
        call: Of `devices`, or of `devices.Beside`.
        module: Who asks for it: the end of its file's path.
        function: Of that.
        work: That is told of without it.
        copies: Their pace: what has seen an eager one done has waited for it.
    """

    call: str
    module: str
    function: str
    work: Work
    copies: Pace = Pace.EAGER

    def __str__(self) -> str:
        return f"{self.call} of {self.module} {self.function}"


def leave_out(patch: pytest.MonkeyPatch, wait: Wait) -> list[str]:
    """Have nobody wait there; what this returns has an entry for each time."""
    of: Any = devices if hasattr(devices, wait.call) else devices.Beside
    own, left_out = getattr(of, wait.call), list[str]()

    def call(*args: Any, **options: Any) -> Any:
        code = sys._getframe(1).f_code
        if code.co_name != wait.function or not code.co_filename.endswith(wait.module):
            return own(*args, **options)
        left_out.append(str(wait))
        return Reached() if wait.call in ("now", "asked_of") else None

    patch.setattr(of, wait.call, call)
    return left_out


WAITS: list[Wait] = [
    Wait("come_after", "_residency/on_device.py", "let_compute", works.trains),
    Wait("come_after", "_stream/slots.py", "ready", works.streams),
    Wait("come_after", "_swap_files/pipeline.py", "begin", works.steps_on_the_device),
    Wait("come_after", "_residency/on_device.py", "before_compute", works.trains, Pace.LAZY),
    Wait("follow", "_residency/on_device.py", "_new", works.trains),
    Wait("follow", "_residency/on_device.py", "download", works.changes_parameters),
    Wait("follow", "_io/spans.py", "__init__", works.loads_where_others_computed),
    Wait("follow", "_snapshot/copies.py", "take", works.checkpoints),
    Wait("follow", "_swap_files/pipeline.py", "begin", works.steps_on_the_device),
    Wait("follow", "activations/_on_device.py", "_begin_copy", works.saves_activations),
    Wait("follow", "activations/_on_device.py", "_bring", works.saves_activations),
    Wait("follow", "_optimizer/turns.py", "__init__", works.steps_on_the_cpu),
    Wait("follow", "_optimizer/gradients.py", "_add_to", works.gradients_on_the_drive),
    Wait("follow", "_optimizer/gradients.py", "_put", works.gradients_on_the_drive),
    Wait("precede", "_snapshot/copies.py", "take", works.checkpoints),
    Wait("precede", "_optimizer/gradients.py", "_add_to", works.gradients_on_the_drive),
    Wait("after", "_stream/slots.py", "_twin", works.streams),
]


@pytest.mark.parametrize("wait", WAITS, ids=str)
def test_a_wait_that_is_not_made_is_told(
    wait: Wait, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for turn in range(20):  # how far is read ahead, and then not used, depends on threads
        folder = tmp_path / str(turn)
        folder.mkdir()
        with monkeypatch.context() as patch, accelerator(patch, Pace.EAGER, wait.copies) as cuda:
            left_out = leave_out(patch, wait)
            wait.work(cuda, folder)
            told = cuda.forgive()
        if told:
            break
    assert left_out and told
    assert all(each.startswith("no order: ") for each in told), told


# Everything else: what is in the place of what, and the work that is told of with it


class Fault(NamedTuple):
    """What is wrong.

    Attributes:
        what: In words.
        of, name: What is replaced.
        instead: By what.
        work: That it is found in.
    """

    what: str
    of: Any
    name: str
    instead: Any
    work: Work


def forgets_its_source(pool: DevicePool, memory: torch.Tensor, source: torch.Tensor) -> Any:
    beside = devices.Beside(pool.device, "parameters")
    beside.copy(memory, source)
    return beside.mark()


@contextlib.contextmanager
def on_stream_alone(stream: Any) -> Iterator[None]:
    if stream is None:
        yield
        return
    with torch.cuda.stream(stream):
        yield


def waits_for_each(beside: devices.Beside, target: torch.Tensor, source: torch.Tensor) -> None:
    beside.copy_all([(target, source)])
    beside.mark().wait()


def makes_a_stream(device: torch.device, purpose: str) -> Any:
    return torch.cuda.Stream(device)


# Told by accesses without an order.
ORDERS = [
    Fault("nobody waits for a mark", devices.CudaMark, "wait", lambda mark: None, works.streams),
    Fault(
        "a mark is taken to be reached",
        devices.CudaMark,
        "done",
        lambda mark: True,
        works.gathers_and_scatters,
    ),
    Fault(
        "the ring does not come after what the caller asked before",
        devices.CudaCopier,
        "now",
        lambda copier, device: Reached(),
        works.gathers_and_scatters,
    ),
    Fault(
        "memory is read into before it was copied on",
        DevicePool,
        "upload",
        forgets_its_source,
        works.trains,
    ),
]


@pytest.mark.parametrize("fault", ORDERS, ids=lambda fault: fault.what)
def test_a_fault_in_the_order_is_told(
    fault: Fault, eager: Accelerator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fault.of, fault.name, fault.instead)
    fault.work(eager, tmp_path)
    assert eager.forgive()


# Told by other numbers, where the device may choose: who computes when, and who copies.
NUMBERS = [
    (Pace.EAGER, Pace.LAZY, devices, "come_after", lambda stream, mark: None, works.trains),
    (Pace.EAGER, Pace.LAZY, devices, "come_after", lambda stream, mark: None, works.streams),
    (Pace.LAZY, Pace.EAGER, devices.Beside, "follow", lambda *_: None, works.trains),
    (Pace.LAZY, Pace.EAGER, devices.Beside, "after", lambda *_: None, works.streams),
    (Pace.LAZY, Pace.LAZY, DevicePool, "upload", forgets_its_source, works.trains),
    (Pace.LAZY, Pace.LAZY, devices.CudaMark, "wait", lambda mark: None, works.streams),
]


@pytest.mark.parametrize(("compute", "copies", "of", "name", "instead", "work"), NUMBERS)
def test_a_fault_changes_the_numbers_on_a_device_that_chooses_for_it(
    compute: Pace,
    copies: Pace,
    of: Any,
    name: str,
    instead: Any,
    work: Work,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    with monkeypatch.context() as patch, accelerator(patch, compute, copies) as cuda:
        patch.setattr(of, name, instead)
        with pytest.raises(AssertionError):
            work(cuda, tmp_path)
        assert cuda.forgive()


def allocates(cuda: Accelerator, folder: Path) -> None:
    """Work of the CPU's alone."""
    with nvmeio.PinnedPool(1 << 20) as pool:
        assert pool.budget_bytes


# Told by a context that appears.
CONTEXTS = [
    Fault("a stream without its device", devices, "on_stream", on_stream_alone, works.streams),
    Fault("memory is registered in any case", system, "cuda_device", lambda: 0, allocates),
]


@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize("fault", CONTEXTS, ids=lambda fault: fault.what)
def test_a_context_on_another_device_is_told(
    fault: Fault, planted: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with accelerator(monkeypatch, Pace.EAGER, Pace.EAGER) as cuda:
        if planted:
            monkeypatch.setattr(fault.of, fault.name, fault.instead)
        if fault.work is allocates:
            allocates(cuda, tmp_path)
        else:
            fault.work(cuda, tmp_path, "cuda:1")  # type: ignore[call-arg]
        assert (0 in cuda.contexts) == planted


def opens(cuda: Accelerator, folder: Path) -> Costs:
    """A tensor of a file comes to the device."""
    file = folder / "state.safetensors"
    nvmeio.save_safetensors({"x": torch.ones(1000)}, file)
    for _ in range(3):
        with cuda.counted() as costs, nvmeio.safe_open(file, device="cuda") as opened:
            opened.get_tensor("x")
    return costs


def goes_backward(cuda: Accelerator, folder: Path) -> Costs:
    """Gradients go to the drive as backward makes them."""
    module = works.on_device(cuda, model(2))
    with SwappedOptimizer(
        torch.optim.AdamW,
        module.parameters(),
        swap_dir=folder,
        gradients="disk",
        durable=False,
        device="cuda",
    ) as optimizer:
        for _ in range(3):
            loss = module(cuda.tensor(torch.randn(3, WIDTH))).square().mean()
            with cuda.counted() as costs:
                loss.backward()
            optimizer.zero_grad()
    return costs


# Told by what it costs in the steady state.
COSTS = [
    ("page_locks", page_locked, "take", page_locked.new, opens),
    ("streams", devices, "side_stream", makes_a_stream, opens),
    ("waits_beside", devices.Beside, "copy", waits_for_each, goes_backward),
]


@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize(("field", "of", "name", "instead", "work"), COSTS)
def test_a_cost_in_the_steady_state_is_told(
    field: str,
    of: Any,
    name: str,
    instead: Any,
    work: Callable[[Accelerator, Path], Costs],
    planted: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    pace = Pace.LAZY if work is goes_backward else Pace.EAGER
    with accelerator(monkeypatch, pace, pace) as cuda:
        if planted:
            monkeypatch.setattr(of, name, instead)
        costs = work(cuda, tmp_path)
        assert bool(getattr(costs, field)) == planted, costs
