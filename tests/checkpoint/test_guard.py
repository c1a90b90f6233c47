"""`Checkpointer.guard`: what is written from where it lies is what it was when it was saved."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import errno
import gc
import os
import signal
import threading
import warnings
import weakref
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint._checkpointers import file_of, large_state, names
from checkpoint._objects import assert_same
from faults._support import MIB
from support import HeldEngine, spin_until, thread, until

import nvmeio
from nvmeio._formats import torch_writing
from nvmeio.checkpoint import _guarded_snapshot
from nvmeio.offload import SwappedOptimizer
from nvmeio.testing import FakeEngine

# What is trained

SIDE = 640  # a weight of 1.6 MB, which is written by an operation of its own


class Model(torch.nn.Module):
    """Weights that are written each by itself, small ones, and buffers that forward changes."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(SIDE, SIDE) for _ in range(layers))
        self.norm = torch.nn.BatchNorm1d(SIDE)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 30)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = torch.tanh(layer(rows))
        result: torch.Tensor = self.norm(rows)
        return result


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9),
    "adam": lambda given: torch.optim.Adam(given, amsgrad=True, foreach=False),
    "adamw foreach": lambda given: torch.optim.AdamW(given, foreach=True),
    "adamw fused": lambda given: torch.optim.AdamW(given, fused=True),
    "adafactor": lambda given: torch.optim.Adafactor(given),
}


class Training:
    """A model, its optimizer and what is saved of them; stepped once, so that there is state."""

    def __init__(self, kind: str = "adamw fused", layers: int = 3) -> None:
        self.model = Model(layers)
        self.optimizer = OPTIMIZERS[kind](self.model.named_parameters())
        self.batches = 0
        self.backward()
        self.optimizer.step()

    def backward(self) -> None:
        generator = torch.Generator().manual_seed(self.batches)
        self.batches += 1
        self.model(torch.randn(4, SIDE, generator=generator)).square().sum().backward()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "batches": self.batches,
        }


@pytest.fixture(autouse=True)
def few_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two operations, so that most is left when a step comes."""
    monkeypatch.setattr(_guarded_snapshot, "_MOST_IN_FLIGHT_BYTES", 1)
    monkeypatch.setattr(torch_writing, "STAGING_BYTES", MIB // 2)


@pytest.fixture
def training() -> Training:
    return Training()


def live_of(checkpointer: nvmeio.Checkpointer) -> Any:
    """What of the save that is being written is still left where it lies."""
    job = checkpointer._saver.last
    assert job is not None and job.snapshot is not None
    (live,) = job.snapshot.lives
    return live


def begun(checkpointer: nvmeio.Checkpointer) -> Any:
    """The same, once some of it is being written: a step has to wait for that, however quick."""
    live = live_of(checkpointer)
    spin_until(lambda: live._claimed > 0)
    return live


@contextlib.contextmanager
def stepping(checkpointer: nvmeio.Checkpointer, step: Callable[[], Any]) -> Iterator[Any]:
    """The body runs while a step waits, out of whose way what can be was copied already."""
    live = begun(checkpointer)
    with thread(step) as ended:
        spin_until(lambda: live._moved <= live._claimed)
        assert not ended
        yield live


def save_while_stepping(
    checkpointer: nvmeio.Checkpointer, engine: HeldEngine, state: Any, step: Callable[[], Any]
) -> Any:
    """Save, step before anything is written; what comes of it. As it was saved, and durable."""
    wanted = copy.deepcopy(state)
    report = checkpointer.save_sync(state, 1)
    assert report.guarded_bytes > 0
    with stepping(checkpointer, step) as live:
        engine.gate.set()
    assert not live.again()  # nobody can read it once more
    done = checkpointer.wait_sync()
    assert done is not None and done.durable
    assert done.guarded_bytes == report.guarded_bytes
    assert done.moved_bytes > 0 and done.step_held_s > 0
    check(checkpointer, 1, wanted)
    return done


def check(checkpointer: nvmeio.Checkpointer, step: int, wanted: Any) -> None:
    """A checkpoint is whole, said by torch and by the sums in it."""
    path = file_of(Path(checkpointer.directory), step)
    assert_same(torch.load(path), wanted)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


# What is written


def test_the_file_is_that_of_a_save_without_guard(
    new: Any, tmp_path: Path, training: Training
) -> None:
    guarded = new()
    guarded.guard(training.optimizer)
    report = guarded.save_sync(training.state(), 1)
    guarded.wait_sync()
    with nvmeio.Checkpointer(tmp_path / "other") as plain:
        plain.save_sync(training.state(), 1)
    assert (
        file_of(Path(guarded.directory), 1).read_bytes()
        == (tmp_path / "other" / "step-00000001.pt").read_bytes()
    )
    owned = 3 * sum(each.nbytes for each in training.model.parameters() if each.nbytes >= 4096)
    assert report.guarded_bytes == owned
    assert report.copied_bytes < MIB


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_goes_on_once_the_rest_is_copied(
    kind: str, held: nvmeio.Checkpointer, engine_held: HeldEngine
) -> None:
    training = Training(kind)
    held.guard(training.optimizer)
    before = copy.deepcopy(training.state())
    training.backward()
    save_while_stepping(held, engine_held, training.state(), training.optimizer.step)
    weights = training.model.state_dict()
    assert not torch.equal(weights["layers.0.weight"], before["model"]["layers.0.weight"])
    for step in (2, 3):  # and again, on the memory that there is now
        wanted = copy.deepcopy(training.state())
        held.save_sync(training.state(), step)
        training.optimizer.step()
        held.wait_sync()
        check(held, step, wanted)


def test_a_step_after_all_is_written_does_not_wait(new: Any, training: Training) -> None:
    checkpointer = new()
    checkpointer.guard(training.optimizer)
    for step in (1, 2):
        checkpointer.save_sync(training.state(), step)
        checkpointer.wait_sync()
        training.optimizer.step()
    report = checkpointer._saver.last.result()
    assert (report.moved_bytes, report.step_held_s) == (0, 0.0)
    assert checkpointer._saver.setup.guard.refuge.nbytes == 0


def test_without_memory_a_step_waits_for_the_drive(
    held: nvmeio.Checkpointer,
    engine_held: HeldEngine,
    monkeypatch: pytest.MonkeyPatch,
    training: Training,
) -> None:
    held.guard(training.optimizer)
    asked = threading.Event()

    def refuse(*_: Any) -> None:
        asked.set()
        raise MemoryError

    monkeypatch.setattr(held._saver.setup.guard.refuge, "arena", refuse)
    wanted = copy.deepcopy(training.state())
    held.save_sync(training.state(), 1)
    with thread(training.optimizer.step) as ended:
        assert asked.wait(60)
        assert not ended
        engine_held.gate.set()
    report = held.wait_sync()
    assert report is not None and report.moved_bytes == 0 and report.step_held_s > 0
    check(held, 1, wanted)


@pytest.mark.parametrize("budget", [0, 4096, 3 * MIB + 4096, 7 * MIB])
def test_what_memory_there_is_is_used(
    budget: int, held: nvmeio.Checkpointer, engine_held: HeldEngine, training: Training
) -> None:
    held.guard(training.optimizer)
    guard = held._saver.setup.guard
    wanted = copy.deepcopy(training.state())
    held.save_sync(training.state(), 1)
    guard.refuge._budget = held._saver.setup.memory.nbytes + budget
    live = live_of(held)
    with thread(training.optimizer.step) as ended:
        spin_until(lambda: live._moving.locked())
        if budget:
            spin_until(lambda: live.moved.nbytes > budget - 4096)
        assert not ended
        assert guard.refuge.nbytes <= budget
        engine_held.gate.set()
    report = held.wait_sync()
    assert report is not None and report.moved_bytes <= budget
    check(held, 1, wanted)


def test_less_memory_than_the_rest_of_the_state(new: Any, training: Training) -> None:
    """Everything that is not guarded streams, and what is guarded is among it."""
    checkpointer = new(memory_bytes=1)
    checkpointer.guard(training.optimizer)
    state: dict[str, Any] = {
        "before": large_state(80 * MIB),
        **training.state(),
        "after": large_state(9 * MIB),
    }
    wanted = copy.deepcopy(state)
    report = checkpointer.save_sync(state, 1)
    assert report.snapshot_bytes == 64 * MIB < report.copied_bytes
    training.optimizer.step()
    checkpointer.wait_sync()
    check(checkpointer, 1, wanted)


def test_what_forward_changes_is_copied_first(
    held: nvmeio.Checkpointer, engine_held: HeldEngine, training: Training
) -> None:
    """With gradient accumulation: several passes before a step."""
    held.guard(training.optimizer)
    wanted = copy.deepcopy(training.state())
    held.save_sync(training.state(), 1)
    for _ in range(3):
        training.backward()
    assert not torch.equal(training.model.norm.running_mean, wanted["model"]["norm.running_mean"])
    engine_held.gate.set()
    report = held.wait_sync()
    assert report is not None and report.moved_bytes == 0
    check(held, 1, wanted)
    training.optimizer.step()


def test_memory_that_something_else_shares_is_copied(
    held: nvmeio.Checkpointer, engine_held: HeldEngine
) -> None:
    """A buffer in the same storage may change at any time; parameters that fill it may be left."""
    shared, full = torch.zeros(400_000), torch.zeros(400_000)
    first = torch.nn.Parameter(shared[:300_000])
    buffer = shared[300_000:]
    halves = [torch.nn.Parameter(full[:200_000]), torch.nn.Parameter(full[200_000:])]
    image = torch.nn.Parameter(torch.zeros(8, 32, 32, 32).to(memory_format=torch.channels_last))
    strided = torch.nn.Parameter(torch.zeros(200, 200)[::2])
    optimizer = torch.optim.SGD([first, *halves, image, strided], lr=1.0)
    held.guard(optimizer)
    state = {"all": [first, buffer, *halves, image, strided]}
    wanted = [each.detach().clone() for each in state["all"]]
    report = held.save_sync(state, 1)
    assert report.guarded_bytes == full.nbytes + image.nbytes
    with torch.no_grad():
        buffer.add_(1)
    engine_held.gate.set()
    held.wait_sync()
    found = torch.load(file_of(Path(held.directory), 1))["all"]
    assert all(map(torch.equal, found, wanted))


def test_several_optimizers_wait_for_all_that_is_guarded(
    held: nvmeio.Checkpointer, engine_held: HeldEngine
) -> None:
    one, other, alone = Training("sgd", 2), Training("adam", 1), Training("sgd", 1)
    held.guard(one.optimizer, other.optimizer)
    held.guard(one.optimizer)
    state = {"one": one.state(), "other": other.state(), "alone": alone.state()}
    wanted = copy.deepcopy(state)
    held.save_sync(state, 1)
    alone.optimizer.step()  # not guarded: it was copied
    live = begun(held)
    with thread(one.optimizer.step) as first, thread(other.optimizer.step) as second:
        spin_until(lambda: live._moved <= live._claimed)
        assert not first and not second
        engine_held.gate.set()
    held.wait_sync()
    check(held, 1, wanted)


def test_two_checkpointers_guard_one_optimizer(
    new: Any, tmp_path: Path, held: nvmeio.Checkpointer, engine_held: HeldEngine, training: Training
) -> None:
    wanted = copy.deepcopy(training.state())
    with nvmeio.Checkpointer(tmp_path / "other") as other:
        for each in (other, held):
            each.guard(training.optimizer)
        other.save_sync(training.state(), 1)
        save_while_stepping(held, engine_held, training.state(), training.optimizer.step)
        other.wait_sync()
        check(other, 1, wanted)


def test_a_scaler_that_skips_a_step_moves_nothing(
    held: nvmeio.Checkpointer, engine_held: HeldEngine
) -> None:
    training = Training("sgd")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    held.guard(training.optimizer)
    state = {**training.state(), "scaler": scaler.state_dict()}
    wanted = copy.deepcopy(state)
    held.save_sync(state, 1)
    live = live_of(held)
    scaler.scale(training.model(torch.full((4, SIDE), torch.inf)).sum()).backward()
    scaler.step(training.optimizer)  # returns at once: nothing is written yet
    scaler.update()
    assert scaler.get_scale() == 1.0 and not live._moving.locked()
    engine_held.gate.set()
    held.wait_sync()
    check(held, 1, wanted)


def test_gradients_that_accumulate_move_nothing(
    held: nvmeio.Checkpointer, engine_held: HeldEngine, training: Training
) -> None:
    held.guard(training.optimizer)
    training.backward()
    wanted = copy.deepcopy(training.state())
    held.save_sync(training.state(), 1)
    live = live_of(held)
    for _ in range(2):  # what forward changes beside it, the norm's averages, was copied
        training.backward()
    assert not live._moving.locked()
    with stepping(held, training.optimizer.step):
        engine_held.gate.set()
    held.wait_sync()
    check(held, 1, wanted)


def test_averages_of_weights_are_copied_first(
    held: nvmeio.Checkpointer, engine_held: HeldEngine, training: Training
) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(
        training.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    averaged.update_parameters(training.model)
    held.guard(training.optimizer)
    training.backward()
    state = {**training.state(), "averaged": averaged.state_dict()}
    wanted = copy.deepcopy(state)
    held.save_sync(state, 1)
    averaged.update_parameters(training.model)
    with stepping(held, training.optimizer.step):
        engine_held.gate.set()
    averaged.update_parameters(training.model)
    held.wait_sync()
    check(held, 1, wanted)


def test_a_second_save_waits_for_the_first(
    held: nvmeio.Checkpointer, engine_held: HeldEngine, training: Training
) -> None:
    held.guard(training.optimizer)
    wanted = [copy.deepcopy(training.state())]
    held.save_sync(training.state(), 1)
    with stepping(held, training.optimizer.step):
        engine_held.gate.set()
    wanted.append(copy.deepcopy(training.state()))
    held.save_sync(training.state(), 2)  # the first may still be written
    training.optimizer.step()
    held.wait_sync()
    check(held, 1, wanted[0])
    check(held, 2, wanted[1])


async def test_saves_that_are_awaited(new: Any, training: Training) -> None:
    checkpointer = new()
    checkpointer.guard(training.optimizer)
    for step in range(3):
        wanted = copy.deepcopy(training.state())
        await checkpointer.save(training.state(), step)
        training.optimizer.step()
        await checkpointer.wait()
        check(checkpointer, step, wanted)


# Swapped optimizers


def swapped_training(folder: Path) -> tuple[Model, SwappedOptimizer, dict[str, Any]]:
    model = Model()
    optimizer = SwappedOptimizer(torch.optim.AdamW, model.parameters(), swap_dir=folder)
    model(torch.ones(4, SIDE)).square().sum().backward()
    optimizer.step()
    return model, optimizer, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def test_the_weights_of_a_swapped_optimizer(
    held: nvmeio.Checkpointer, engine_held: HeldEngine, tmp_path: Path
) -> None:
    _, optimizer, state = swapped_training(tmp_path)
    held.guard(optimizer)
    save_while_stepping(held, engine_held, state, optimizer.step)
    optimizer.close()


async def test_an_awaited_step_of_a_swapped_optimizer_leaves_the_loop_free(
    held: nvmeio.Checkpointer, engine_held: HeldEngine, tmp_path: Path
) -> None:
    model, optimizer, state = swapped_training(tmp_path)
    held.guard(optimizer)
    wanted = copy.deepcopy(state)
    await held.save(state, 1)
    live = begun(held)
    stepping = asyncio.create_task(optimizer.async_step())
    await until(lambda: live._moved <= live._claimed)  # by this loop
    assert not stepping.done()
    assert_same(model.state_dict(), wanted["model"])
    engine_held.gate.set()
    await stepping
    await held.wait()
    check(held, 1, wanted)
    optimizer.close()


# What is changed meanwhile


def in_place(training: Training) -> None:
    with torch.no_grad():
        training.model.layers[1].weight.zero_()


def of_the_state(training: Training) -> None:
    training.optimizer.state[training.model.layers[1].weight]["exp_avg"].mul_(2)


def through_data(training: Training) -> None:
    training.model.layers[1].weight.data.add_(1)


def through_numpy(training: Training) -> None:
    training.model.layers[1].weight.detach().numpy()[:] += 1


def by_another_optimizer(training: Training) -> None:
    """Its kernel is not counted, and nobody guards it."""
    torch.optim.SGD([training.model.layers[1].weight], lr=1.0, fused=True).step()


def other_memory(training: Training) -> None:
    weight = training.model.layers[1].weight
    weight.data = torch.ones_like(weight)


def model_loaded(training: Training) -> None:
    weight = "layers.1.weight"
    training.model.load_state_dict({weight: torch.ones(SIDE, SIDE)}, strict=False)


def optimizer_loaded(training: Training) -> None:
    training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))


def state_forgotten(training: Training) -> None:
    training.optimizer.state.pop(training.model.layers[1].weight)


CHANGES = {
    in_place: r"parameter 2 \('layers.1.weight'\) was changed",
    of_the_state: r"state 'exp_avg' of parameter 2 \('layers.1.weight'\) was changed",
    through_data: r"parameter 2 \('layers.1.weight'\) was changed",
    through_numpy: r"parameter 2 \('layers.1.weight'\) was changed",
    by_another_optimizer: r"parameter 2 \('layers.1.weight'\) was changed",
    other_memory: r"parameter 2 \('layers.1.weight'\) was given other memory",
    model_loaded: r"parameter 2 \('layers.1.weight'\) was changed",
    optimizer_loaded: r"state 'exp_avg' of parameter 0 .* was given other memory",
    state_forgotten: r"state 'exp_avg' of parameter 2 .* was given other memory",
}


@pytest.mark.parametrize("stepped", [False, True], ids=["written", "then stepped"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_fails_the_save_and_nothing_else(
    change: Callable[[Training], None],
    stepped: bool,
    held: nvmeio.Checkpointer,
    engine_held: HeldEngine,
    training: Training,
) -> None:
    held.guard(training.optimizer)
    training.backward()
    engine_held.gate.set()
    before = copy.deepcopy(training.state())
    held.save_sync(training.state(), 1)
    held.wait_sync()
    engine_held.gate.clear()
    held.save_sync(training.state(), 2)
    engine_held.wait_until_begun(1)
    change(training)
    with contextlib.ExitStack() as stack:
        if stepped:
            stack.enter_context(stepping(held, training.optimizer.step))
        engine_held.gate.set()
    with pytest.raises(nvmeio.IntegrityError, match=f"step 2 was not saved: {CHANGES[change]}"):
        held.wait_sync()
    assert held.steps() == [1]
    assert not [name for name in names(Path(held.directory)) if name.endswith("tmp")]
    check(held, 1, before)
    after = copy.deepcopy(training.state())
    held.save_sync(training.state(), 3)
    held.wait_sync()
    check(held, 3, after)


def test_memory_that_is_given_back_is_not_read(
    held: nvmeio.Checkpointer, engine_held: HeldEngine, training: Training
) -> None:
    held.guard(training.optimizer)
    held.save_sync(training.state(), 1)
    engine_held.wait_until_begun(1)
    live = live_of(held)
    record, _, _ = live._records[-1]  # of the state of the last weight
    assert live.spans.places[-1] >= live._claimed
    record.data.untyped_storage().resize_(0)
    engine_held.gate.set()
    with pytest.raises(nvmeio.IntegrityError, match="was given other memory"):
        held.wait_sync()


def test_restoring_while_it_is_written(
    held: nvmeio.Checkpointer, engine_held: HeldEngine, training: Training
) -> None:
    held.guard(training.optimizer)
    engine_held.gate.set()
    wanted = [copy.deepcopy(training.state())]
    held.save_sync(training.state(), 1)
    training.optimizer.step()
    held.wait_sync()
    wanted.append(copy.deepcopy(training.state()))
    engine_held.gate.clear()
    held.save_sync(training.state(), 2)
    engine_held.wait_until_begun(1)
    found = nvmeio.load(file_of(Path(held.directory), 1))
    assert_same(found, wanted[0])
    engine_held.gate.set()
    assert held.restore(1).keys() == found.keys()
    held.wait_sync()
    check(held, 2, wanted[1])


# How it ends


def test_closing_while_it_is_written(
    held: nvmeio.Checkpointer, engine_held: HeldEngine, training: Training
) -> None:
    held.guard(training.optimizer)
    wanted = copy.deepcopy(training.state())
    held.save_sync(training.state(), 1)
    with stepping(held, training.optimizer.step), thread(held.close) as closed:
        assert not closed
        engine_held.gate.set()
    assert held.closed
    check(held, 1, wanted)
    training.optimizer.step()
    with pytest.raises(nvmeio.ClosedError):
        held.guard(training.optimizer)


def test_a_step_that_is_interrupted_while_it_waits_is_not_made(
    held: nvmeio.Checkpointer, engine_held: HeldEngine, training: Training
) -> None:
    held.guard(training.optimizer)
    wanted = copy.deepcopy(training.state())
    held.save_sync(training.state(), 1)
    live = begun(held)

    def interrupt() -> None:
        spin_until(lambda: live._asked_at and live._moved <= live._claimed)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with thread(interrupt), pytest.raises(KeyboardInterrupt):
        training.optimizer.step()
    assert_same(training.state(), wanted)
    with stepping(held, training.optimizer.step):  # the next one waits as well
        engine_held.gate.set()
    held.wait_sync()
    check(held, 1, wanted)


def test_one_that_is_dropped_while_it_is_written(
    directory: Path, new_handle: Any, engine_held: HeldEngine, training: Training
) -> None:
    dropped = nvmeio.Checkpointer(directory, handle=new_handle(engine_held, block_size=MIB))
    dropped.guard(training.optimizer)
    wanted = copy.deepcopy(training.state())
    dropped.save_sync(training.state(), 1)
    saver, live = dropped._saver, begun(dropped)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del dropped
        gc.collect()
    with thread(training.optimizer.step) as ended:
        spin_until(lambda: live._moved <= live._claimed)
        assert not ended
        engine_held.gate.set()
    spin_until(lambda: saver.released)
    assert_same(torch.load(file_of(directory, 1)), wanted)


def test_guarding_keeps_nothing_alive(new: Any, training: Training) -> None:
    checkpointer = new()
    checkpointer.guard(training.optimizer)
    checkpointer.save_sync(training.state(), 1)
    checkpointer.wait_sync()
    optimizer, weight = weakref.ref(training.optimizer), weakref.ref(training.model.norm.weight)
    vars(training).clear()
    spin_until(lambda: gc.collect() >= 0 and optimizer() is None and weight() is None)
    other = Training("sgd", 1)
    with nvmeio.Checkpointer(Path(checkpointer.directory).with_name("other")) as passing:
        passing.guard(other.optimizer)
        guard = weakref.ref(passing._saver.setup.guard)
    del passing
    spin_until(lambda: gc.collect() >= 0 and guard() is None)
    other.optimizer.step()


@pytest.mark.parametrize("stepped", [False, True], ids=["written", "stepped"])
def test_a_write_that_fails_lets_the_step_go_on(
    stepped: bool, new: Any, new_handle: Any, training: Training
) -> None:
    gate = threading.Event()
    failing = [errno.EIO]
    engine = FakeEngine(hold=gate, fail=lambda kind, *_: failing[0] if kind == "pwrite" else 0)
    checkpointer = new(handle=new_handle(engine, block_size=MIB))
    checkpointer.guard(training.optimizer)
    checkpointer.save_sync(training.state(), 1)
    with contextlib.ExitStack() as stack:
        if stepped:
            stack.enter_context(stepping(checkpointer, training.optimizer.step))
        gate.set()
    with pytest.raises(nvmeio.TransferError, match="EIO"):
        checkpointer.wait_sync()
    training.optimizer.step()
    assert checkpointer.steps() == []
    failing[0] = 0
    wanted = copy.deepcopy(training.state())
    checkpointer.save_sync(training.state(), 2)
    training.optimizer.step()
    checkpointer.wait_sync()
    check(checkpointer, 2, wanted)


def test_a_step_that_fails_leaves_the_checkpoint_whole(
    held: nvmeio.Checkpointer, engine_held: HeldEngine, training: Training
) -> None:
    held.guard(training.optimizer)

    def fail(*_: Any) -> None:
        with torch.no_grad():
            training.model.layers[0].weight.zero_()  # half a step
        raise RuntimeError("a hook of the user's")

    hook = training.optimizer.register_step_pre_hook(fail)
    failed: list[BaseException] = []

    def step() -> None:
        with pytest.raises(RuntimeError, match="a hook of the user's") as raised:
            training.optimizer.step()
        failed.append(raised.value)

    save_while_stepping(held, engine_held, training.state(), step)
    assert len(failed) == 1
    hook.remove()
    wanted = copy.deepcopy(training.state())
    held.save_sync(training.state(), 2)
    training.optimizer.step()
    held.wait_sync()
    check(held, 2, wanted)


def test_a_handle_that_its_owner_closes(
    directory: Path, new_handle: Any, engine_held: HeldEngine, training: Training
) -> None:
    """All is written again with another one, while it is where it was."""
    handle = new_handle(engine_held, block_size=MIB)
    with nvmeio.Checkpointer(directory, handle=handle) as checkpointer:
        checkpointer.guard(training.optimizer)
        wanted = copy.deepcopy(training.state())
        checkpointer.save_sync(training.state(), 1)
        engine_held.wait_until_begun(1)
        with thread(handle.close):
            spin_until(lambda: handle.closed)
            engine_held.gate.set()
        checkpointer.wait_sync()
        check(checkpointer, 1, wanted)


# What may be guarded


class Wrapping(torch.optim.Optimizer):
    """As accelerate's: it is an optimizer in name, and asks another one."""

    def __init__(self) -> None:
        self.param_groups = []


@pytest.mark.parametrize("wrong", [None, "adam", torch.nn.Linear(2, 2), Wrapping()], ids=str)
def test_what_is_no_optimizer_is_refused(wrong: Any, new: Any, training: Training) -> None:
    with pytest.raises(TypeError, match="the one within"):
        new().guard(training.optimizer, wrong)


def test_small_tensors_are_copied(new: Any) -> None:
    model = torch.nn.Linear(8, 8)
    checkpointer = new()
    checkpointer.guard(torch.optim.SGD(model.parameters(), lr=1.0))
    report = checkpointer.save_sync(model.state_dict(), 1)
    assert report.guarded_bytes == 0 and report.copied_bytes == 8 * 8 * 4 + 8 * 4


def test_a_step_in_a_forked_child_does_not_wait(
    held: nvmeio.Checkpointer, engine_held: HeldEngine
) -> None:
    training = Training("sgd", 1)
    held.guard(training.optimizer)
    held.save_sync(training.state(), 1)
    door = next(iter(training.optimizer._optimizer_step_pre_hooks.values()))
    held._saver.setup.guard._pid = os.getppid()  # as a child sees it
    assert door(training.optimizer, (), {}) is None
    assert not live_of(held)._moving.locked()
    held._saver.setup.guard._pid = os.getpid()
    engine_held.gate.set()


@pytest.mark.filterwarnings("ignore")  # torch's own, of what it compiles with
def test_a_compiled_step_waits(held: nvmeio.Checkpointer, engine_held: HeldEngine) -> None:
    training = Training("sgd")
    held.guard(training.optimizer)
    compiled = torch.compile(lambda: training.optimizer.step(), backend="eager")
    save_while_stepping(held, engine_held, training.state(), compiled)
