"""The stand-in's memory, streams, devices and costs. What it finds is in test_planted_faults.py."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_accelerator import DEVICE, Accelerator, Pace, accelerator, on, other_stream

import nvmeio
from nvmeio._memory import devices


@pytest.fixture
def lazy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    with accelerator(monkeypatch) as cuda:
        yield cuda


def test_a_fault_fails_the_test_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(AssertionError, match=r"no order: read by .* after write by"),
        accelerator(monkeypatch, Pace.EAGER, Pace.EAGER) as cuda,
    ):
        tensor = cuda.tensor(torch.zeros(8))
        with on(other_stream()):
            tensor.sum()


def test_a_kernel_computes_alike_in_whichever_thread_does_it(lazy: Accelerator) -> None:
    """A new thread's matrix products have a thread for every core, and round in another way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        sizes = [
            (rows, inner, columns) for rows in (5, 64) for inner in (2, 64) for columns in (64, 128)
        ]
        pairs = [(torch.randn(m, k), torch.randn(k, n)) for m, k, n in sizes]
        there = [(lazy.tensor(a), lazy.tensor(b)) for a, b in pairs]
        stream: Any = lazy.current_stream()
        stream.synchronize()  # a copy would tell the thread
        found = [a @ b for a, b in there]
        other = threading.Thread(target=stream.run_to, args=(stream.asked,))
        other.start()
        other.join(60)
        assert stream.is_idle
        for (a, b), product in zip(pairs, found, strict=True):
            assert torch.equal(lazy.value(product), a @ b)
    finally:
        torch.set_num_threads(before)


# Memory


def test_freed_memory_is_spoilt_by_the_next_allocation_on_its_stream(eager: Accelerator) -> None:
    """It was spoilt when it was freed: as if its stream had not been told to wait, which it was.

    FSDP2 has a stream wait for who reads memory of that stream's before it allocates there again.
    """
    side = other_stream()
    with on(side):
        tensor = eager.tensor(torch.ones(8))
    inside = eager.inside(tensor)
    del tensor
    eager.empty(32)  # of another stream
    assert (inside == 1).all()
    with on(side):
        eager.empty(4096)  # of another size
        assert inside.isnan().all()
        inside.fill_(1)  # by a kernel that came too late
        again = eager.empty(32).view(torch.float32)
    assert eager.inside(again).data_ptr() == inside.data_ptr()
    assert inside.isnan().all()


def test_a_storage_is_emptied_and_has_its_memory_again(eager: Accelerator) -> None:
    tensor = eager.tensor(torch.ones(8))
    inside, storage = eager.inside(tensor), tensor.untyped_storage()
    storage.resize_(0)
    assert storage.size() == 0 and (inside == 1).all()
    eager.empty(4096)
    assert inside.isnan().all()
    storage.resize_(32)
    assert storage.size() == 32 and storage.data_ptr() == tensor.data_ptr()
    assert torch.equal(eager.value(tensor.fill_(2)), torch.full((8,), 2.0))
    eager.empty(4096)
    assert (inside == 2).all(), "it is not free"


def test_a_fourth_stream_is_the_first_one_and_has_its_memory(eager: Accelerator) -> None:
    streams = [other_stream() for _ in range(6)]
    assert streams[:3] == streams[3:] and len(set(map(id, streams))) == 3
    with on(streams[0]):
        address = eager.empty(64).data_ptr()
    for stream, is_same in [(streams[1], False), (streams[3], True)]:
        with on(stream):
            assert (eager.empty(64).data_ptr() == address) == is_same


def test_memory_that_another_stream_was_recorded_for_is_kept_until_it_is_done(
    lazy: Accelerator,
) -> None:
    side = other_stream()
    with on(side):
        tensor = lazy.tensor(torch.ones(8))
    here = torch.cuda.current_stream()
    here.wait_stream(side)
    total = tensor.sum()
    tensor.record_stream(here)
    address = tensor.data_ptr()
    del tensor
    with on(side):
        others = [lazy.empty(32) for _ in range(2)]
    assert address not in {each.data_ptr() for each in others}
    assert total.item() == 8
    with on(side):
        others = [lazy.empty(32) for _ in range(3)]
    assert address in {each.data_ptr() for each in others}


def test_the_cpu_at_the_device_s_memory_is_told_with_the_tensor(lazy: Accelerator) -> None:
    """It was killed for it (SIGSEGV), and the run of all tests with it."""
    tensor = lazy.tensor(torch.ones(8))
    assert ctypes.string_at(tensor.data_ptr(), 4) == bytes(4)
    (told,) = lazy.forgive()
    assert "the CPU has touched" in told and Path(__file__).name in told
    ctypes.memset(tensor.data_ptr(), 7, 4)
    assert lazy.value(tensor).sum() == 8
    assert lazy.forgive()
    with pytest.raises(TypeError, match="numpy"):
        tensor.numpy()


# What a device may do


def differs(cuda: Accelerator) -> bool:
    """A copy that compute does not wait for."""
    tensor = cuda.tensor(torch.zeros(8))
    beside = devices.Beside(DEVICE, "test")
    beside.follow()
    for _ in range(4):
        beside.copy(tensor, torch.ones(8))
    found = tensor * 1
    for _ in range(3):
        torch.cuda.current_stream().query()
    return not bool((cuda.value(found) == 1).all())


def test_random_paces_find_what_depends_on_them_and_a_seed_is_one_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for seed in [*range(20), *range(20)]:
        with (
            monkeypatch.context() as patch,
            accelerator(patch, Pace.RANDOM, Pace.RANDOM, seed) as cuda,
        ):
            found.append(differs(cuda))
            assert cuda.forgive()
    assert found[:20] == found[20:]
    assert {True, False} == set(found)


def test_a_lazy_stream_that_is_only_looked_at_is_told(lazy: Accelerator) -> None:
    """Whoever polled one hung until his test's time was over."""
    lazy.tensor(torch.ones(8)).add_(1)
    mark = devices.now(DEVICE)
    with pytest.raises(AssertionError, match="default stream of cuda:0 was looked at"):
        while not mark.done():
            pass
    (told,) = lazy.forgive()
    assert "is lazy" in told and "test_fake_accelerator.py" in told
    lazy.current_stream(DEVICE).synchronize()
    assert mark.done()


def test_tensors_say_where_they_are_and_are_made_and_moved_there(eager: Accelerator) -> None:
    """They said "cpu", so loads and saves of theirs went the CPU's way."""
    here = torch.arange(6.0).reshape(2, 3).t()
    for there in [
        here.to("cuda"),
        here.cuda(),
        torch.tensor(here.tolist(), device="cuda"),
        torch.zeros(3, 2, device="cuda").copy_(here),
        torch.nn.Parameter(here).to("cuda:0").detach(),
        here.to(torch.ones(1, device="cuda")),
    ]:
        assert (there.device, there.is_cuda, there.is_cpu) == (DEVICE, True, False)
        assert there.untyped_storage().device == DEVICE and there.get_device() == 0
        assert torch.equal(there.cpu(), here) and there.cpu().is_cpu
        assert there.to("cuda") is there and there.to("cuda", copy=True) is not there
        assert there.to(torch.float64).is_cuda and torch.empty_like(there).is_cuda
        assert torch.zeros_like(there, device="cpu").is_cpu
    assert torch.ones(2, device="cuda:1").device == torch.device("cuda", 1)
    assert here.to("cuda").to("cuda:1").device == torch.device("cuda", 1)
    assert torch.empty(2, device="meta").is_meta and here.is_cpu


def test_backward_has_a_thread_of_its_own(lazy: Accelerator) -> None:
    seen: list[Any] = []
    leaf = lazy.tensor(torch.ones(8)).requires_grad_()
    leaf.register_hook(
        lambda gradient: seen.append((threading.get_ident(), torch.cuda.current_stream()))
    )
    side = other_stream()
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(2):
        with on(side):
            (leaf * 2).sum().backward()
    assert len({ident for ident, _ in seen}) == 1
    assert seen[0][0] != threading.get_ident()
    assert {stream for _, stream in seen} == {side}
    here = torch.ones(8, requires_grad=True)
    here.register_hook(lambda gradient: seen.append((threading.get_ident(), None)))
    here.sum().backward()
    assert seen[-1][0] == threading.get_ident(), "the CPU's is the caller's"


def test_an_error_in_backward_is_the_caller_s(lazy: Accelerator) -> None:
    leaf = lazy.tensor(torch.ones(8)).requires_grad_()

    def fail(gradient: torch.Tensor) -> None:
        raise KeyError("a hook")

    leaf.register_hook(fail)
    with pytest.raises(KeyError, match="a hook"):
        leaf.sum().backward()


def test_each_device_has_memory_streams_and_a_context_of_its_own(lazy: Accelerator) -> None:
    with torch.cuda.device(1):
        there = lazy.tensor(torch.ones(8))
        assert lazy.device_of(there) == torch.device("cuda", 1)
    kernel = there + there  # on its own device, wherever the thread is
    assert lazy.device_of(kernel) == torch.device("cuda", 1)
    here = lazy.tensor(torch.ones(8))
    with pytest.raises(RuntimeError, match="same device"):
        here + there
    assert not lazy.contexts
    devices.now(torch.device("cuda", 1)).wait()
    assert lazy.contexts == {1}
    with torch.cuda.stream(torch.cuda.Stream(torch.device("cuda", 1))):
        pass
    assert lazy.contexts == {0, 1}, "a stream's context manager puts a thread back by a call"


def test_costs_are_counted(lazy: Accelerator) -> None:
    memory = nvmeio.empty_aligned(4096, dtype=torch.uint8)
    copier = devices.CudaCopier()
    copier.enter(DEVICE)
    with lazy.counted() as costs:
        torch.cuda.Stream(DEVICE)
        chunk = copier.page_locked(4096, DEVICE)
        tensor = lazy.tensor(memory)
        del tensor
        tensor = lazy.tensor(memory)
        copy = devices.Copy(tensor, 0, chunk, 0, 4096)
        copier.now(DEVICE).wait()
        copier.upload([copy]).wait()
        thread = threading.Thread(target=copier.upload([copy]).wait)
        thread.start()
        thread.join()
        assert tensor[0].item() == 0
    assert (costs.page_locks, costs.copies, costs.allocations) == (1, 2, 1)
    assert costs.streams == 2  # the copier's, too
    assert (costs.host_waits, costs.waits_beside) == (2, 1)
    with lazy.counted() as costs:
        copier.upload([copy])
    assert costs.streams == costs.page_locks == costs.host_waits == 0
    torch.cuda.synchronize()


def test_tests_of_the_stand_in_have_a_time_limit_of_their_own(
    request: pytest.FixtureRequest,
) -> None:
    """One that hung took the ten minutes that any test may take."""
    limits = {}
    for item in request.session.items:
        is_on_stand_in = hasattr(getattr(item, "module", None), "Accelerator")
        if is_on_stand_in and item.get_closest_marker("stress") is None:
            marker = item.get_closest_marker("timeout")
            limits[item.nodeid] = marker.args[0] if marker is not None else None
    assert request.node.nodeid in limits
    assert {nodeid: limit for nodeid, limit in limits.items() if not limit or limit > 240} == {}
