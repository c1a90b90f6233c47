"""`CudaCopier` and its neighbours on a model of `torch.cuda`: no GPU runs them here."""

from __future__ import annotations

import asyncio
import ctypes
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, Tensor, asynchronous, fake_cuda
from support import collect, run_python

import nvmeio
from nvmeio._io import spans as span_reads
from nvmeio._memory import devices, page_locked
from nvmeio._threads.interruptible import in_thread
from nvmeio._threads.threads import Thread
from nvmeio.engines.cufile import driver
from nvmeio.inference._stream.lockstep import Lockstep

GPU = torch.device("cuda:2")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A process that works on device 2, from its main thread."""
    collect()
    made = fake_cuda(monkeypatch)
    made.set_device(2)
    yield made
    collect()  # memory that was locked with it is unlocked with it
    page_locked.forget()


def as_copy(device: Any, host: Any) -> devices.Copy:
    return devices.Copy(device, 0, host, 0, 8192)


def in_new_thread(work: Callable[[], object]) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def test_threads_of_ours_touch_no_other_device(cuda: FakeCuda) -> None:
    """They begin on device 0, where their first call would make a context."""
    copier = devices.CudaCopier()
    host, device = Tensor(cuda, "cpu"), Tensor(cuda, "cuda:2")
    caller = copier.now(GPU)

    def pump() -> None:
        assert caller.done()
        chunk = copier.page_locked(8192, GPU)
        for mark in (
            copier.upload([as_copy(device, host)]),
            copier.download(as_copy(device, host)),
        ):
            assert mark.done()
            mark.wait()
        copier.finish(GPU, lambda: device.copy_(host))
        assert cuda.current_device() == 0  # as it was found
        del chunk

    in_new_thread(pump)
    page_locked.forget()
    assert {name for name, _ in cuda.calls} >= {"copy", "query", "record", "cudaHostRegister"}
    assert cuda.contexts == {2}
    assert ("cudaHostUnregister", 2) in cuda.calls


def test_copies_have_a_stream_for_each_direction_and_device(cuda: FakeCuda) -> None:
    """The bus has two directions. All copiers share the streams, of which torch has 32."""
    host = Tensor(cuda, "cpu")
    for name in ("cuda:2", "cuda:2", "cuda:1"):
        devices.CudaCopier().upload([as_copy(Tensor(cuda, name), host)])
    devices.CudaCopier().download(as_copy(Tensor(cuda, "cuda:1"), host))
    first, second, third, fourth = cuda.copies
    assert first is second and third is not fourth
    assert (first.device.index, third.device.index, fourth.device.index) == (2, 1, 1)
    assert cuda.current_stream() not in cuda.copies
    assert cuda.current_device() == 2
    assert len(cuda.streams) == 3


def test_work_on_the_cpu_alone_starts_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool made a context on the device that was current, and a later fork was spoilt."""
    made = fake_cuda(monkeypatch)
    with nvmeio.PinnedPool(8192) as pool, pool.take(4096):
        tensor = nvmeio.empty_pinned(16)
    assert made.contexts == set() and made.calls == []
    del tensor


def test_memory_is_registered_on_a_device_that_is_in_use(cuda: FakeCuda) -> None:
    """From a thread that is on device 0, on which this process has no context."""

    def work() -> None:
        with nvmeio.PinnedPool(8192):
            pass

    in_new_thread(work)
    collect()
    assert ("cudaHostRegister", 2) in cuda.calls and cuda.contexts == {2}


@pytest.mark.parametrize("ours", [True, False], ids=["a thread of ours", "any other"])
def test_a_capture_of_a_graph_is_not_broken_by_our_threads(cuda: FakeCuda, ours: bool) -> None:
    """In mode "global", the default, any thread's question about an event invalidates it."""
    mark, copier = devices.now(GPU), devices.CudaCopier()
    host, device = Tensor(cuda, "cpu"), Tensor(cuda, "cuda:2")

    def pump() -> None:
        mark.done()
        copier.upload([as_copy(device, host)]).wait()
        devices.Beside(GPU, "load").copy(host, device)  # type: ignore[arg-type]
        copier.page_locked(8192, GPU)

    thread = Thread(pump, "nvmeio-ring") if ours else threading.Thread(target=pump)
    cuda.is_capturing = True
    thread.start()
    thread.join()
    assert bool(cuda.broken_by) != ours
    assert cuda.contexts == {2}


def test_streams_are_made_once_for_each_purpose(cuda: FakeCuda) -> None:
    for _ in range(40):
        devices.Beside(GPU, "load")
        devices.Beside(GPU, "snapshot")
        devices.side_stream(GPU, "reads")
    assert len(cuda.streams) == 3


def test_events_are_made_once(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mark made one and ended it, and the end of an event lets go of the GIL."""
    made, new = [], cuda.Event

    def event() -> Any:
        made.append(new())
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Event", event)
    for _ in range(40):
        first, second, other = map(devices.now, (GPU, GPU, torch.device("cuda:1")))
        assert len({id(mark.event) for mark in (first, second, other)}) == 3  # type: ignore[attr-defined]
        del first, second, other
    assert len(made) == 3


def test_an_event_is_recorded_again_while_a_stream_waits_for_it() -> None:
    """The stream waits for what was recorded when it was told to wait."""
    here = torch.device("cuda", 0)
    with pytest.MonkeyPatch.context() as patch, asynchronous(patch) as cuda:
        slow, waiting, order = cuda.Stream(here), cuda.Stream(here), list[str]()
        slow.gate.clear()
        slow.ask(lambda: order.append("slow"))
        mark: Any = devices.asked_of(slow)
        event = mark.event
        devices.come_after(waiting, mark)
        waiting.ask(lambda: order.append("waiting"))
        del mark
        again: Any = devices.now(here)
        assert again.event is event
        again.wait()
        assert not order
        slow.gate.set()
        devices.asked_of(waiting).wait()
        assert order == ["slow", "waiting"]


def test_a_part_of_a_device_s_memory_has_a_storage_of_its_own() -> None:
    """By torch's own code for `__cuda_array_interface__`, over memory that is the host's here.

    It makes the same tensors of any address, and asks for CUDA first, which is told to be there.
    """
    run_python(
        """
import gc, weakref
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from nvmeio._memory import devices

torch.cuda._lazy_init = lambda: None
there, host = torch.device("cuda", 0), torch.zeros(4096, dtype=torch.uint8)
memory = torch.as_tensor(devices._Part(host, 0, 4096), device=there)
part = devices.part_of(memory, 512, 1024)
assert (part.device, part.dtype, part.shape) == (there, torch.uint8, (1024,))
assert part.data_ptr() == part.untyped_storage().data_ptr() == host.data_ptr() + 512
assert part.untyped_storage().nbytes() == 1024
whole, end = StorageWeakRef(memory.untyped_storage()), StorageWeakRef(part.untyped_storage())
part = part.detach()
del memory
gc.collect()
assert not whole.expired() and not end.expired()  # a part keeps the whole
del part
gc.collect()
assert end.expired() and whole.expired()
"""
    )


def test_work_on_a_stream_makes_a_context_on_its_device_alone(cuda: FakeCuda) -> None:
    """In an owner's thread, which is on device 0: contexts were {0, 2}."""

    def work() -> None:
        with devices.on_stream(cuda.Stream(GPU)):
            devices.now(GPU).wait()
        assert cuda.current_device() == 0

    in_new_thread(work)
    assert cuda.contexts == {2}


def test_copies_beside_the_callers_work_wait_for_streams_alone(cuda: FakeCuda) -> None:
    """From a thread on another device, which stays there; the host waits for nothing."""
    host, device = Tensor(cuda, "cpu"), Tensor(cuda, "cuda:2")

    def save() -> None:
        beside = devices.Beside(GPU, "snapshot")
        beside.follow()
        beside.copy(host, device)  # type: ignore[arg-type]
        beside.precede()
        assert cuda.current_device() == 0
        assert not {name for name, _ in cuda.calls} & {"synchronize", "stream.synchronize"}
        beside.mark().wait()

    in_new_thread(save)
    (stream,) = cuda.copies
    assert stream is not cuda.current_stream(GPU) and stream.device.index == 2
    assert [name for name, _ in cuda.calls].count("wait_stream") == 2
    assert cuda.contexts == {2}


def test_what_is_no_cuda_device_is_copied_in_order() -> None:
    beside = devices.Beside(torch.device("cpu"), "load")
    target = torch.zeros(3)
    beside.follow()
    beside.copy(target, torch.arange(3.0))
    mark = beside.mark()
    assert mark.done()
    mark.wait()
    beside.after(mark)
    beside.precede()
    assert target.tolist() == [0.0, 1.0, 2.0]
    assert beside.empty(3).nbytes == 3


def test_context_is_current_for_libraries_in_any_thread(cuda: FakeCuda) -> None:
    seen: list[tuple[int, tuple[str, int]]] = []

    def register() -> None:
        with devices.current(Tensor(cuda, "cuda:2")):  # type: ignore[arg-type]
            seen.append((cuda.current_device(), cuda.calls[-1]))

    in_new_thread(register)
    assert seen == [(2, ("mem_get_info", 2))]
    assert cuda.contexts == {2}
    with devices.current(torch.zeros(1)):
        assert len(cuda.calls) == 1  # host memory needs none


def test_cufile_is_opened_on_the_callers_device(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Opened:
        path, version, version_text = "libcufile", 1200, "1.20"

        def set_flag(self, parameter: int, value: bool) -> int:
            return 0

        def open_driver(self) -> tuple[int, int]:
            seen.append(cuda.current_device())
            return 0, 0

        def close_driver(self) -> tuple[int, int]:
            return 0, 0

        def properties(self) -> None:
            return None

        def p2p_flags(self) -> None:
            return None

    seen: list[int] = []
    monkeypatch.setattr(driver, "preflight_problem", lambda: ("", "", ""))
    monkeypatch.setattr(driver.library, "load", Opened)
    opened = driver.Driver()
    opened.acquire(driver.DriverSettings())
    opened.release()
    assert seen == [2]
    assert cuda.contexts == {2}


async def test_work_in_a_thread_is_on_the_callers_device_and_stream(cuda: FakeCuda) -> None:
    with cuda.stream(cuda.Stream(GPU)):
        mine = cuda.current_stream()
        where = await in_thread(
            lambda: (cuda.current_device(), cuda.current_stream()), lambda: None
        )
    assert where == (2, mine)
    assert cuda.contexts == {2}


async def test_work_in_a_thread_does_not_begin_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = fake_cuda(monkeypatch)
    assert await in_thread(lambda: 7, lambda: None) == 7
    assert not cuda.contexts


def test_loads_work_on_their_own_device(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Page-locking, copies and events, in a thread that is on another one."""
    data = bytes(range(256)) * 400
    (tmp_path / "file").write_bytes(data)
    copies: list[int] = []
    empty = torch.empty

    def begin_copy(target: torch.Tensor, chunk: torch.Tensor) -> None:
        copies.append(cuda.current_device())
        target.copy_(chunk)

    def on_host(*size: int, device: object = None, **others: Any) -> torch.Tensor:
        return empty(*size, **others)

    monkeypatch.setattr(devices, "begin_copy", begin_copy)
    monkeypatch.setattr(span_reads.torch, "empty", on_host)
    found: list[torch.Tensor] = []
    with nvmeio.AioHandle(engine="threads") as handle:
        spans = [span_reads.Span(str(tmp_path / "file"), 5, 100_000)]
        in_new_thread(lambda: found.extend(span_reads.read(handle, spans, "cuda:2")))
    assert found[0].numpy().tobytes() == data[5:100_005]
    assert copies == [2]
    assert ("cudaHostRegister", 2) in cuda.calls
    assert cuda.contexts == {2}


def openmp_threads() -> int:
    """With how many this thread's next matrix product is made, without torch being asked."""
    maps = Path("/proc/self/maps").read_text().split()
    (path,) = {each for each in maps if re.match(r"lib(g|i|)omp\b.*\.so", Path(each).name)}
    found: int = ctypes.CDLL(path).omp_get_max_threads()
    return found


@pytest.mark.parametrize("way", ["awaited", "lockstep"])
def test_other_threads_compute_with_as_many_threads(way: str) -> None:
    """A matrix product of theirs was made with all cores, whatever `set_num_threads` had said.

    Its last bits depend on that.
    """
    before = torch.get_num_threads()
    with ThreadPoolExecutor(1) as pool:
        wanted = pool.submit(openmp_threads).result() + 1
    try:
        torch.set_num_threads(wanted)
        if way == "awaited":
            found = [asyncio.run(in_thread(openmp_threads))]
        else:
            found = Lockstep([openmp_threads, openmp_threads]).run()
        assert set(found) == {wanted}
    finally:
        torch.set_num_threads(before)
