"""CUDA tensors in `Checkpointer.save`, on a model of `torch.cuda`: no GPU runs them here.

The model's streams work beside the host, may be held, and fail; its memory kills whoever touches it
from the CPU.
"""

from __future__ import annotations

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
from support import HeldEngine, spin_until, thread

import nvmeio
from nvmeio import _device

SIDE = 600  # a weight of 1.4 MB, which is written by an operation of its own


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """It is there before any Checkpointer, and goes after it."""

    def page_locked(_: Any, nbytes: int, device: torch.device) -> torch.Tensor:
        assert device == torch.device("cuda", 0)
        return nvmeio.empty_aligned(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(_device.CudaCopier, "page_locked", page_locked)
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


@pytest.mark.parametrize("guarded", [False, True], ids=["plain", "guarded"])
def test_what_the_caller_asked_before_is_saved(guarded: bool, new: Any, cuda: FakeCuda) -> None:
    training, checkpointer = Training(cuda), new()
    if guarded:
        checkpointer.guard(training.optimizer)
    stream = cuda.current_stream()
    stream.gate.clear()
    training.optimizer.step()  # not done yet, and saved as if it were
    if guarded:
        report = checkpointer.save_sync(training.state(), 1)  # waits for nothing of the device
        assert not stream.gate.is_set()
        stream.gate.set()
        owned = 2 * sum(value.nbytes for value in training.values)
        assert report.guarded_bytes == owned
    else:
        with thread(lambda: checkpointer.save_sync(training.state(), 1)) as ended:
            spin_until(lambda: len(cuda.copies) > 0)
            assert not ended
            stream.gate.set()
    checkpointer.wait_sync()
    check(checkpointer, 1, training.as_saved(1.0))
    assert "stream.synchronize" not in called(cuda)
    assert stream not in cuda.copies


def test_a_step_on_the_device_comes_after_the_copies(new: Any, cuda: FakeCuda) -> None:
    """The host goes on at once; the step's stream waits for the copies' event."""
    training, checkpointer = Training(cuda), new()
    checkpointer.guard(training.optimizer)
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


def test_two_optimizers_wait_for_all_that_is_copied(new: Any, cuda: FakeCuda) -> None:
    first, second, checkpointer = Training(cuda), Training(cuda, (4000, 2000)), new()
    checkpointer.guard(first.optimizer, second.optimizer)
    with holding(cuda):
        checkpointer.save_sync({"first": first.state(), "second": second.state()}, 1)
        first.optimizer.step()
        second.optimizer.step()
    checkpointer.wait_sync()
    check(checkpointer, 1, {"first": first.as_saved(), "second": second.as_saved()})


def test_host_and_device_tensors_of_one_optimizer(
    held: nvmeio.Checkpointer, engine_held: HeldEngine, cuda: FakeCuda
) -> None:
    training = Training(cuda)
    host = torch.nn.Parameter(torch.arange(SIDE * SIDE, dtype=torch.float32))
    host.grad = torch.ones_like(host)
    held.guard(training.optimizer, other := torch.optim.SGD([host], lr=1.0))
    report = held.save_sync({"host": host, **training.state()}, 1)
    engine_held.wait_until_begun()  # with the host's, which comes first in the file
    with thread(lambda: (training.optimizer.step(), other.step())) as ended:
        assert not ended
        engine_held.gate.set()
    held.wait_sync()
    owned = 2 * sum(value.nbytes for value in training.values)
    assert report.guarded_bytes == owned + host.nbytes
    saved = torch.nn.Parameter(torch.arange(SIDE * SIDE, dtype=torch.float32))
    check(held, 1, {"host": saved, **training.as_saved()})


def test_a_window_moves_over_what_does_not_fit(
    held: nvmeio.Checkpointer, engine_held: HeldEngine, cuda: FakeCuda
) -> None:
    """A step is held until the last copy is begun, and that is when the drive has come so far."""
    training = Training(cuda, (9 * MIB + 3, 3000))  # 72 MiB in all
    held._saver.setup.guard._staging._budget = 64 * MIB
    held._saver.setup.guard.refuge._budget = 64 * MIB
    held.guard(training.optimizer)
    report = held.save_sync(training.state(), 1)
    assert report.guarded_bytes > 64 * MIB
    with thread(training.optimizer.step) as ended:
        spin_until(lambda: engine_held.begun > 0)
        assert not ended
        assert held._saver.setup.guard._staging.nbytes <= 64 * MIB
        engine_held.gate.set()
    done = held.wait_sync()
    assert done is not None and done.step_held_s > 0
    check(held, 1, training.as_saved())


# What goes wrong


def test_a_change_by_hand_fails_the_save(new: Any, cuda: FakeCuda) -> None:
    training, checkpointer = Training(cuda), new()
    checkpointer.guard(training.optimizer)
    with holding(cuda):
        checkpointer.save_sync(training.state(), 1)
        cuda.kernel(training.weights[1], lambda inside: inside.zero_())
    with pytest.raises(nvmeio.IntegrityError, match="parameter 1 was changed"):
        checkpointer.wait_sync()
    assert checkpointer.steps() == []
    checkpointer.save_sync(training.state(), 2)
    checkpointer.wait_sync()
    wanted = training.as_saved()
    wanted["weights"][1].data.zero_()
    check(checkpointer, 2, wanted)


def test_a_change_that_a_step_would_hide_is_seen_before_it(new: Any, cuda: FakeCuda) -> None:
    training, checkpointer = Training(cuda), new()
    checkpointer.guard(training.optimizer)
    with holding(cuda):
        checkpointer.save_sync(training.state(), 1)
        cuda.kernel(training.weights[0], lambda inside: inside.zero_())
        training.optimizer.step()
    with pytest.raises(nvmeio.IntegrityError, match="parameter 0 was changed"):
        checkpointer.wait_sync()


def test_a_change_that_torch_does_not_count_is_seen_by_its_words(new: Any, cuda: FakeCuda) -> None:
    training, checkpointer = Training(cuda), new()
    checkpointer.guard(training.optimizer)
    watched = 2 * len(training.values)

    def change(number: int) -> None:
        if number == 2 * watched:  # the words were copied, two times each; nothing else was
            training.inside().add_(1)

    cuda.before_copy = change
    checkpointer.save_sync(training.state(), 1)
    with pytest.raises(nvmeio.IntegrityError, match="parameter 0 was changed"):
        checkpointer.wait_sync()
    assert checkpointer.steps() == []


@pytest.mark.parametrize("guarded", [False, True], ids=["plain", "guarded"])
def test_a_device_that_fails(guarded: bool, new: Any, cuda: FakeCuda) -> None:
    training, checkpointer = Training(cuda), new()
    if guarded:
        checkpointer.guard(training.optimizer)
    checkpointer.save_sync(training.state(), 1)
    checkpointer.wait_sync()
    cuda.failure = RuntimeError("CUDA error: unspecified launch failure")
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        checkpointer.save_sync(training.state(), 2)
        training.optimizer.step()  # is not held by what failed
        checkpointer.wait_sync()
    cuda.failure = None
    assert checkpointer.steps() == [1]
    checkpointer.save_sync(training.state(), 3)
    checkpointer.wait_sync()
    check(checkpointer, 3, training.as_saved(1.0 if guarded else 0.0))


def test_no_memory_to_copy_to(new: Any, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    training, checkpointer = Training(cuda), new()
    checkpointer.guard(training.optimizer)

    def refuse(_: Any, nbytes: int, device: torch.device) -> torch.Tensor:
        raise MemoryError("no page-locked memory")

    with monkeypatch.context() as broken:
        broken.setattr(_device.CudaCopier, "page_locked", refuse)
        with pytest.raises(MemoryError, match="no page-locked memory"):
            checkpointer.save_sync(training.state(), 1)
    training.optimizer.step()
    checkpointer.save_sync(training.state(), 2)
    checkpointer.wait_sync()
    check(checkpointer, 2, training.as_saved(1.0))


def test_memory_that_may_not_be_locked_is_used_all_the_same(
    new: Any, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Any, nbytes: int, device: torch.device) -> torch.Tensor:
        raise OSError(errno.ENOMEM, "RLIMIT_MEMLOCK")

    monkeypatch.setattr(_device.CudaCopier, "page_locked", refuse)
    training, checkpointer = Training(cuda), new()
    checkpointer.guard(training.optimizer)
    checkpointer.save_sync(training.state(), 1)
    training.optimizer.step()
    checkpointer.wait_sync()
    check(checkpointer, 1, training.as_saved())


def test_a_save_that_is_called_off_waits_for_what_is_on_the_bus(new: Any, cuda: FakeCuda) -> None:
    """The memory that it is copied to is the next save's."""
    training, checkpointer = Training(cuda), new()
    checkpointer.guard(training.optimizer)
    with holding(cuda) as release:
        checkpointer.save_sync(training.state(), 1)
        job = checkpointer._saver.last
        assert job is not None and job.snapshot is not None
        device = job.snapshot.lives[-1]
        device.stop()
        with thread(device.over) as ended:
            spin_until(lambda: len(cuda.copies) > 0)
            assert not ended and not device.free
            release()
    assert checkpointer.wait_sync() is None
    assert checkpointer.steps() == []
    checkpointer.save_sync(training.state(), 2)
    checkpointer.wait_sync()
    check(checkpointer, 2, training.as_saved())
