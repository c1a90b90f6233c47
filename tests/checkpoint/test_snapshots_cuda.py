"""CUDA tensors in `Checkpointer.save`, on a model of `torch.cuda`: no GPU runs them here.

The model's streams work beside the host, may be held, and fail; its memory kills whoever touches it
from the CPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint._checkpointers import file_of
from checkpoint._objects import assert_same
from fake_cuda import FakeCuda, asynchronous
from faults._support import MIB
from inside import saver_of
from support import PATIENCE_S, HeldEngine, needs_protection, spin_until, thread, until

import nvmeio
from nvmeio._memory.mappings import Mapping

SIDE = 600  # a weight of 1.4 MB, which is written by an operation of its own


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """It is there before any Checkpointer, and goes after it."""
    with asynchronous(monkeypatch) as made:
        made.set_device(0)
        yield made


class DeviceOptimizer(torch.optim.Optimizer):
    """Its steps are kernels: the host does not wait for them."""

    def __init__(self, cuda: FakeCuda, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.cuda = cuda

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            for tensor in (parameter, self.state[parameter]["momentum"]):
                with torch.no_grad():
                    self.cuda.kernel(tensor, lambda inside: inside.add_(1))


class Training:
    """Weights and momenta in device memory, and a few tensors here."""

    def __init__(
        self, cuda: FakeCuda, numels: tuple[int, ...] = (SIDE * SIDE, 3000, 77, 1)
    ) -> None:
        self.cuda = cuda
        self.values = [torch.arange(numel, dtype=torch.float32) for numel in numels]
        self.weights = [torch.nn.Parameter(cuda.tensor(value)) for value in self.values]
        self.optimizer = DeviceOptimizer(cuda, self.weights)
        for weight, value in zip(self.weights, self.values, strict=True):
            self.optimizer.state[weight] = {"momentum": cuda.tensor(value * 3)}
        self.here = torch.arange(5000.0)

    def state(self) -> dict[str, Any]:
        momenta = [self.optimizer.state[weight]["momentum"] for weight in self.weights]
        return {"weights": list(self.weights), "momenta": momenta, "here": self.here}

    def as_saved(self, added: float = 0.0) -> dict[str, Any]:
        """What has to be in the file, after so many steps."""
        weights = [torch.nn.Parameter(value + added) for value in self.values]
        return {
            "weights": weights,
            "momenta": [value * 3 + added for value in self.values],
            "here": self.here.clone(),
        }

    def inside(self, weight: int = 0) -> torch.Tensor:
        return self.cuda.inside(self.weights[weight].data)

    @property
    def nbytes(self) -> int:
        """Of what is on the device."""
        return 2 * sum(value.nbytes for value in self.values)


@contextlib.contextmanager
def holding(cuda: FakeCuda) -> Iterator[Callable[[], None]]:
    """Streams that are made meanwhile do nothing before the end, or before what is given."""
    before = len(cuda.streams)
    cuda.is_held = True

    def release() -> None:
        cuda.is_held = False
        for stream in cuda.streams[before:]:
            stream.gate.set()

    try:
        yield release
    finally:
        release()


def check(checkpointer: nvmeio.Checkpointer, step: int, wanted: Any) -> None:
    path = file_of(Path(checkpointer.directory), step)
    assert_same(torch.load(path), wanted)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def called(cuda: FakeCuda) -> set[str]:
    return {name for name, _ in cuda.calls}


def test_what_the_caller_asked_before_is_saved(new: Any, cuda: FakeCuda) -> None:
    training, checkpointer = Training(cuda), new()
    stream = cuda.current_stream()
    stream.gate.clear()
    training.optimizer.step()  # not done yet, and saved as if it were
    report = checkpointer.save_sync(training.state(), 1)  # waits for nothing of the device
    assert not stream.gate.is_set()
    assert report.guarded_bytes == training.nbytes and report.protected_bytes == 0
    stream.gate.set()
    checkpointer.wait_sync()
    check(checkpointer, 1, training.as_saved(1.0))
    assert "stream.synchronize" not in called(cuda)
    assert cuda.copies and stream not in cuda.copies


def test_a_step_on_the_device_comes_after_the_copies(new: Any, cuda: FakeCuda) -> None:
    """The host goes on at once; the step's stream waits for the copies' event."""
    training, checkpointer = Training(cuda), new()
    with holding(cuda):
        checkpointer.save_sync(training.state(), 1)
        training.optimizer.step()  # begun, and returned, with nothing copied
        done = cuda.current_stream().record_event()
        assert not done.query()
        assert float(training.inside()[7]) == 7.0
    report = checkpointer.wait_sync()
    assert report is not None and report.durable and report.moved_bytes == 0
    check(checkpointer, 1, training.as_saved())
    done.wait_here()
    assert float(training.inside()[7]) == 8.0
    for step in (2, 3):  # and again, on the memory that there is
        checkpointer.save_sync(training.state(), step)
        training.optimizer.step()
    checkpointer.wait_sync()
    check(checkpointer, 2, training.as_saved(1.0))
    check(checkpointer, 3, training.as_saved(2.0))
    assert "stream.synchronize" not in called(cuda)


@pytest.mark.parametrize("is_counted", [True, False], ids=["counted", "not counted"])
def test_whatever_kernels_change_after_the_save_is_not_in_the_file(
    is_counted: bool, new: Any, cuda: FakeCuda
) -> None:
    """An average of the weights was swapped in after a save, by no optimizer: that save failed."""
    training, checkpointer = Training(cuda), new()
    with holding(cuda):
        checkpointer.save_sync(training.state(), 1)
        for weight in training.weights:
            cuda.kernel(weight, lambda inside: inside.mul_(0.5).sub_(3), is_counted)
        training.optimizer.step()
        assert len(cuda.copies) >= 2 * len(training.values) and float(training.inside()[7]) == 7.0
    checkpointer.wait_sync()
    check(checkpointer, 1, training.as_saved())
    cuda.synchronize()
    assert float(training.inside()[7]) == 7 * 0.5 - 3 + 1


def test_a_coroutine_that_saves_has_its_stream_wait_for_the_copies(
    new: Any, cuda: FakeCuda
) -> None:
    """`save` works in a thread of its own there, and it is the caller's stream that goes on."""
    training, checkpointer = Training(cuda), new()
    mine = cuda.Stream(torch.device("cuda", 0))

    async def main() -> None:
        with cuda.stream(mine), holding(cuda):
            training.optimizer.step()
            await checkpointer.save(training.state(), 1)
            training.optimizer.step()
            done = mine.record_event()
            assert not done.query()
        await checkpointer.wait()

    asyncio.run(main())
    check(checkpointer, 1, training.as_saved(1.0))


@needs_protection
def test_host_and_device_tensors_of_one_state(
    held: nvmeio.Checkpointer, engine_held: HeldEngine, cuda: FakeCuda
) -> None:
    """What is on the host is protected, and both change with nothing in the file yet."""
    training = Training(cuda)
    host = torch.arange(SIDE * SIDE, dtype=torch.float32)
    wanted = host.clone()
    with holding(cuda):
        report = held.save_sync({**training.state(), "host": host}, 1)
        training.optimizer.step()
        host.zero_()
    assert report.guarded_bytes == training.nbytes + host.nbytes
    assert report.protected_bytes == host.nbytes
    engine_held.gate.set()
    done = held.wait_sync()
    assert done is not None and done.moved_bytes > 0  # the device's came first, and was held
    check(held, 1, {**training.as_saved(), "host": wanted})


@pytest.mark.parametrize("first", ["device", "host"])
def test_a_window_moves_over_what_does_not_fit(
    first: str, new: Any, new_handle: Any, engine_held: HeldEngine, cuda: FakeCuda
) -> None:
    """`save` waits until the last copy is begun, and that is when the drive has come so far.

    With what is copied from the host before it in the file, each waited for the other.
    """
    training = Training(cuda, (9 * MIB + 3, 3000))  # 72 MiB in all
    held = new(handle=new_handle(engine_held, block_size=MIB), memory_bytes=1)

    def state(found: dict[str, Any]) -> dict[str, Any]:
        return found if first == "device" else {"here": found.pop("here"), **found}

    async def main() -> nvmeio.SaveReport:
        saving = asyncio.ensure_future(held.save(state(training.state()), 1))
        if first == "device":
            await until(lambda: engine_held.begun > 0)
            assert not saving.done()
        engine_held.gate.set()
        return await asyncio.wait_for(saving, PATIENCE_S)

    report = asyncio.run(main())
    training.optimizer.step()
    assert report.stalled_s > 0 and report.guarded_bytes == training.nbytes
    assert saver_of(held).setup.snapshots.staging.nbytes <= 64 * MIB < training.nbytes
    done = held.wait_sync()
    assert done is not None and done.durable
    check(held, 1, state(training.as_saved()))


# What goes wrong


def test_a_device_that_fails(new: Any, cuda: FakeCuda) -> None:
    training, checkpointer = Training(cuda), new()
    checkpointer.save_sync(training.state(), 1)
    checkpointer.wait_sync()
    cuda.failure = RuntimeError("CUDA error: unspecified launch failure")
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        checkpointer.save_sync(training.state(), 2)
    training.optimizer.step()  # is not held by what failed
    cuda.failure = None
    assert checkpointer.steps() == [1]
    checkpointer.save_sync(training.state(), 3)
    checkpointer.wait_sync()
    check(checkpointer, 3, training.as_saved(1.0))


def test_a_device_that_fails_with_the_copies_begun(new: Any, cuda: FakeCuda) -> None:
    """The save's end waited for the bus once more, which failed: nobody heard of its end."""
    training, checkpointer = Training(cuda), new()
    host = torch.zeros(SIDE * SIDE)
    with holding(cuda):
        checkpointer.save_sync({**training.state(), "host": host}, 1)
        cuda.failure = RuntimeError("CUDA error: unspecified launch failure")
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        checkpointer.wait_sync(PATIENCE_S)
    host.add_(1)  # is its owner's
    host.untyped_storage().resize_(0)
    cuda.failure = None
    assert checkpointer.steps() == []
    checkpointer.save_sync(training.state(), 2)
    checkpointer.wait_sync()
    check(checkpointer, 2, training.as_saved())


def test_no_memory_to_copy_to(new: Any, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    training, checkpointer = Training(cuda), new()
    host = torch.zeros(SIDE * SIDE)

    def refuse(_: Any) -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as broken:
        broken.setattr(Mapping, "populate", refuse)
        with pytest.raises(MemoryError, match="no memory"):
            checkpointer.save_sync({**training.state(), "host": host}, 1)
    host.untyped_storage().resize_(0)  # nothing of it is held
    training.optimizer.step()
    checkpointer.save_sync(training.state(), 2)
    checkpointer.wait_sync()
    check(checkpointer, 2, training.as_saved(1.0))


def test_memory_that_may_not_be_locked_is_used_all_the_same(
    new: Any, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Any) -> bool:
        raise OSError(errno.EIO, "cudaHostRegister")

    monkeypatch.setattr(Mapping, "register_with_cuda", refuse)
    training, checkpointer = Training(cuda), new()
    for step in (1, 2):
        checkpointer.save_sync(training.state(), step)
        saved = training.as_saved(float(step - 1))
        training.optimizer.step()
        checkpointer.wait_sync()
        check(checkpointer, step, saved)


def test_memory_is_locked_once_the_first_save_is_durable(new: Any, cuda: FakeCuda) -> None:
    """The caller of the first one waited until all of the state's size was locked, at 1 GB/s."""

    def locks() -> int:
        return [name for name, _ in cuda.calls].count("cudaHostRegister")

    training, checkpointer = Training(cuda), new()
    with holding(cuda) as release:
        checkpointer.save_sync(training.state(), 1)
        assert locks() == 0
        release()
        checkpointer.wait_sync()
    spin_until(lambda: locks() == 1)
    for step in (2, 3):
        checkpointer.save_sync(training.state(), step)
        checkpointer.wait_sync()
    assert locks() == 1


def test_a_save_that_is_called_off_waits_for_what_is_on_the_bus(new: Any, cuda: FakeCuda) -> None:
    """The memory that it is copied to is the next save's."""
    training, checkpointer = Training(cuda), new()
    with holding(cuda) as release:
        checkpointer.save_sync(training.state(), 1)
        job = saver_of(checkpointer).last
        assert job is not None and job.snapshot is not None
        job.cancel()
        with thread(job.snapshot.over) as ended:
            spin_until(lambda: len(cuda.copies) > 0)
            assert not ended and not job.done()
            release()
    assert checkpointer.wait_sync() is None
    assert checkpointer.steps() == []
    checkpointer.save_sync(training.state(), 2)
    checkpointer.wait_sync()
    check(checkpointer, 2, training.as_saved())


def test_a_save_that_waits_for_room_is_called_off(
    new: Any, new_handle: Any, engine_held: HeldEngine, cuda: FakeCuda
) -> None:
    training = Training(cuda, (9 * MIB + 3, 3000))
    held = new(handle=new_handle(engine_held, block_size=MIB), memory_bytes=1)

    async def main() -> None:
        saving = asyncio.ensure_future(held.save(training.state(), 1))
        await until(lambda: engine_held.begun > 0)
        saving.cancel()
        engine_held.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await saving

    asyncio.run(main())
    assert held.steps() == []
    training.optimizer.step()
    held.save_sync(training.state(), 2)
    held.wait_sync()
    check(held, 2, training.as_saved(1.0))
