"""`GuardingStager`: what an optimizer owns is written from where it lies, by `dcp.async_save`."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support import HeldEngine, run_python, spin_until, thread
from test_dcp_ranks import run_steps
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import AsyncStager

import nvmeio
from nvmeio.checkpoint import _guarded_snapshot
from nvmeio.integrations.dcp import GuardingStager, NvmeStorageReader, NvmeStorageWriter

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]

SIDE = 640  # 1.6 MB a weight, which is written by an operation of its own


class Training:
    """A model with buffers, and an optimizer that has been stepped once."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            *(torch.nn.Linear(SIDE, SIDE) for _ in range(3)), torch.nn.BatchNorm1d(SIDE)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.backward()
        self.optimizer.step()

    def backward(self) -> None:
        self.model(torch.randn(4, SIDE)).square().sum().backward()

    def state(self) -> dict[str, Any]:
        moments = {
            str(number): dict(self.optimizer.state[parameter])
            for number, parameter in enumerate(self.model.parameters())
        }
        return {"moments": moments, "model": self.model.state_dict(), "seen": [1, {"step": 7}]}


@pytest.fixture
def training() -> Training:
    return Training()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldEngine]:
    """Nothing is written until its gate is set; two operations at once."""
    monkeypatch.setattr(_guarded_snapshot, "_MOST_IN_FLIGHT_BYTES", 1)
    made = HeldEngine()
    yield made
    made.gate.set()


@pytest.fixture
def handle(engine: HeldEngine) -> Iterator[nvmeio.AioHandle]:
    with nvmeio.AioHandle(block_size=1 << 20, engine=engine) as made:
        yield made
        engine.gate.set()


@pytest.fixture
def stager(training: Training) -> Iterator[GuardingStager]:
    made = GuardingStager(training.optimizer)
    yield made


def begin(stager: Any, state: Any, writer: Any, planner: Any = None) -> Any:
    return dcp.async_save(
        state, storage_writer=writer, async_stager=stager, no_dist=True, planner=planner
    )


def check(path: Path, wanted: dict[str, Any]) -> None:
    found = copy.deepcopy(wanted)
    tensors: list[torch.Tensor] = []

    def note(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            tensors.append(value.zero_())
        elif isinstance(value, dict):
            for part in value.values():
                note(part)

    note(found)
    dcp.load(found, storage_reader=NvmeStorageReader(path), no_dist=True)
    same(found, wanted)


def same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted)
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key in wanted:
            same(found[key], wanted[key])
    else:
        assert found == wanted


def live_of(stager: GuardingStager) -> Any:
    held = stager._guard._last
    assert held is not None and held._live is not None
    return held._live


def test_it_is_a_stager_of_torchs_protocol(stager: GuardingStager) -> None:
    assert isinstance(stager, AsyncStager)
    assert not stager.should_synchronize_after_execute
    stager.synchronize_staging()
    stager.close()


def test_what_the_optimizer_owns_is_not_copied(
    stager: GuardingStager, training: Training, tmp_path: Path
) -> None:
    state = training.state()
    staged = stager.stage(state)
    # Biases of 2,560 bytes are less than what is worth watching; so are the numbers of steps.
    assert stager.guarded_bytes == 3 * 3 * SIDE * SIDE * 4
    for name, tensor in state["model"].items():
        kept = staged["model"][name].data_ptr() == tensor.data_ptr()
        assert kept == (name.endswith("weight") and tensor.dim() == 2), name
    state["seen"][1]["step"] = 8
    training.model[3].running_mean.zero_()  # type: ignore[union-attr,operator]
    assert staged["seen"] == [1, {"step": 7}]
    assert staged["model"]["3.running_mean"].any()
    del staged
    spin_until(lambda: gc.collect() >= 0 and stager._guard._last.ended.done)  # type: ignore[union-attr]


def test_the_files_are_those_of_a_save_without_it(
    stager: GuardingStager, training: Training, tmp_path: Path
) -> None:
    begin(stager, training.state(), NvmeStorageWriter(tmp_path / "guarded")).result(60)
    dcp.save(training.state(), storage_writer=NvmeStorageWriter(tmp_path / "stock"), no_dist=True)
    found, wanted = (tmp_path / name / "__0_0.distcp" for name in ("guarded", "stock"))
    assert found.read_bytes() == wanted.read_bytes()


def test_a_step_that_comes_early_waits_for_what_is_in_flight_only(
    stager: GuardingStager,
    training: Training,
    engine: HeldEngine,
    handle: nvmeio.AioHandle,
    tmp_path: Path,
) -> None:
    wanted = copy.deepcopy(training.state())
    training.backward()
    future = begin(stager, training.state(), NvmeStorageWriter(tmp_path, handle=handle))
    live = live_of(stager)
    spin_until(lambda: live._claimed > 0)
    wanted["model"] = {  # forward has changed the buffers before the save
        name: value.clone() for name, value in training.model.state_dict().items()
    }
    with thread(training.optimizer.step) as ended:
        spin_until(lambda: live._moved <= live._claimed)
        assert not ended
        engine.gate.set()
    future.result(60)
    assert live.moved.nbytes > 0 and live.moved.held_s > 0
    check(tmp_path, wanted)


def test_a_step_before_the_save_has_begun_has_all_of_it_copied(
    stager: GuardingStager, training: Training, tmp_path: Path
) -> None:
    """Then torch's thread finds copies; whoever writes them."""
    wanted = copy.deepcopy(training.state())
    staged = stager.stage(training.state())
    training.optimizer.step()  # at once: nobody reads it yet
    assert live_of(stager).free
    for number, writer in enumerate((NvmeStorageWriter, dcp.FileSystemWriter)):
        if number:
            wanted = copy.deepcopy(training.state())
            staged = stager.stage(training.state())
            training.optimizer.step()
        place = tmp_path / str(number)
        save = partial(dcp.save, staged, storage_writer=writer(place), no_dist=True)
        with thread(save):
            pass
        check(place, wanted)
    stager.close()


class Halving(DefaultSavePlanner):
    """Makes tensors anew."""

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        return data * 1 if isinstance(data, torch.Tensor) else data


WRITERS: dict[str, Callable[[Path, Any], Any]] = {
    "several files": lambda path, handle: NvmeStorageWriter(path, thread_count=2, handle=handle),
    "a planner": lambda path, handle: NvmeStorageWriter(path, handle=handle),
    "torch's": lambda path, _: dcp.FileSystemWriter(path),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_writer_that_cannot_tell_holds_the_step(
    kind: str,
    stager: GuardingStager,
    training: Training,
    engine: HeldEngine,
    handle: nvmeio.AioHandle,
    tmp_path: Path,
) -> None:
    wanted = copy.deepcopy(training.state())
    planner = Halving() if kind == "a planner" else DefaultSavePlanner()
    future = begin(stager, training.state(), WRITERS[kind](tmp_path, handle), planner)
    engine.gate.set()
    training.optimizer.step()
    future.result(60)
    check(tmp_path, wanted)
    stager.close()


def test_a_change_fails_the_save_and_keeps_the_checkpoint_before(
    stager: GuardingStager,
    training: Training,
    engine: HeldEngine,
    handle: nvmeio.AioHandle,
    tmp_path: Path,
) -> None:
    engine.gate.set()
    before = copy.deepcopy(training.state())
    begin(stager, training.state(), NvmeStorageWriter(tmp_path, handle=handle)).result(60)
    names = set(os.listdir(tmp_path))
    engine.gate.clear()
    future = begin(stager, training.state(), NvmeStorageWriter(tmp_path, handle=handle))
    with torch.no_grad():
        training.model[1].weight.zero_()  # type: ignore[union-attr,operator]
    engine.gate.set()
    with pytest.raises(dcp.CheckpointException) as told:
        future.result(60)
    failed = told.value.failures[0][0]
    assert isinstance(failed, nvmeio.IntegrityError)
    assert "the distributed checkpoint was not saved: parameter 2 was changed" in str(failed)
    assert set(os.listdir(tmp_path)) == names
    check(tmp_path, before)
    training.optimizer.step()
    wanted = copy.deepcopy(training.state())
    begin(stager, training.state(), NvmeStorageWriter(tmp_path, handle=handle)).result(60)
    check(tmp_path, wanted)


class Waiting(dcp.FileSystemWriter):
    """Torch's, until it is told."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.gate = threading.Event()

    def write_data(self, plan: Any, planner: Any) -> Any:
        self.gate.wait()
        return super().write_data(plan, planner)


def test_a_change_that_another_writer_cannot_be_told_of_is_raised_later(
    stager: GuardingStager, training: Training, tmp_path: Path
) -> None:
    writer = Waiting(tmp_path)
    future = begin(stager, training.state(), writer)
    spin_until(lambda: stager._guard._last.taken)  # type: ignore[union-attr]
    with torch.no_grad():
        training.model[1].weight.zero_()  # type: ignore[union-attr,operator]
    writer.gate.set()
    future.result(60)
    with pytest.raises(nvmeio.IntegrityError, match="parameter 2 was changed"):
        stager.stage(training.state())
    stager.stage(training.state())


class Failing(DefaultSavePlanner):
    def create_local_plan(self) -> Any:
        raise ArithmeticError("no plan")


def test_a_save_that_fails_before_it_writes_lets_the_step_go_on(
    stager: GuardingStager, training: Training, tmp_path: Path
) -> None:
    """Although its error, which is kept, has all that it was to save."""
    future = begin(stager, training.state(), NvmeStorageWriter(tmp_path), Failing())
    with pytest.raises(dcp.CheckpointException) as kept:
        future.result(60)
    training.optimizer.step()
    assert kept.value.failures and live_of(stager).free
    wanted = copy.deepcopy(training.state())
    begin(stager, training.state(), NvmeStorageWriter(tmp_path)).result(60)
    check(tmp_path, wanted)


def test_saves_one_after_the_other_and_several_optimizers(
    training: Training, tmp_path: Path
) -> None:
    parts = list(training.model.children())
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in parts]
    stager = GuardingStager(*optimizers[:2])
    stager.guard(*optimizers[2:])
    for number in range(4):
        training.backward()
        wanted = {"model": copy.deepcopy(training.model.state_dict())}
        writer = NvmeStorageWriter(tmp_path / str(number))
        future = begin(stager, {"model": training.model.state_dict()}, writer)
        for each in optimizers:
            each.step()
        future.result(60)
        check(tmp_path / str(number), wanted)


def test_a_stager_that_is_dropped_keeps_what_is_being_saved(
    training: Training, engine: HeldEngine, handle: nvmeio.AioHandle, tmp_path: Path
) -> None:
    wanted = copy.deepcopy(training.state())
    stager = GuardingStager(training.optimizer)
    future = begin(stager, training.state(), NvmeStorageWriter(tmp_path, handle=handle))
    live = live_of(stager)
    spin_until(lambda: live._claimed > 0)
    del stager
    gc.collect()
    with thread(training.optimizer.step) as ended:
        spin_until(lambda: live._moved <= live._claimed)
        assert not ended
        engine.gate.set()
    future.result(60)
    check(tmp_path, wanted)


def test_little_memory_makes_the_step_wait_for_the_drive(
    training: Training, tmp_path: Path
) -> None:
    stager = GuardingStager(training.optimizer, memory_bytes="1M")
    wanted = copy.deepcopy(training.state())
    future = begin(stager, training.state(), NvmeStorageWriter(tmp_path))
    training.optimizer.step()
    future.result(60)
    check(tmp_path, wanted)


def test_what_cannot_be_is_refused(stager: GuardingStager, training: Training) -> None:
    with pytest.raises(TypeError, match="the one within"):
        GuardingStager(training.model)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"AsyncCheckpointerType\.THREAD"):
        pickle.dumps(stager.stage(training.state()))


def test_interrupts_at_random_moments_leave_whole_checkpoints(tmp_path: Path) -> None:
    """Real signals in stage, save and step: whatever is there is of one step, and all goes on."""
    done = run_python(
        f"""
        import logging, random, signal, threading, time, warnings, torch
        import torch.distributed.checkpoint as dcp
        from nvmeio.integrations.dcp import GuardingStager, NvmeStorageReader, NvmeStorageWriter
        logging.disable(logging.CRITICAL)
        warnings.simplefilter("ignore")
        armed = False
        def interrupt(*_):
            global armed
            if armed:
                armed = False
                raise KeyboardInterrupt
        signal.signal(signal.SIGALRM, interrupt)
        moments = random.Random(5)
        place = {str(tmp_path)!r}
        weights = [torch.nn.Parameter(torch.zeros(200_000)) for _ in range(3)]
        optimizer = torch.optim.SGD(weights, lr=1.0)
        for weight in weights:
            weight.grad = -torch.ones_like(weight)
        stager = GuardingStager(optimizer)
        def state():
            return {{str(n): weight.detach() for n, weight in enumerate(weights)}}
        def check():
            found = {{str(n): torch.zeros(200_000) for n in range(3)}}
            dcp.load(found, storage_reader=NvmeStorageReader(place), no_dist=True)
            values = {{float(v) for tensor in found.values() for v in (tensor.min(), tensor.max())}}
            assert len(values) == 1, values
        def train():
            future = dcp.async_save(
                state(), storage_writer=NvmeStorageWriter(place), async_stager=stager, no_dist=True
            )
            optimizer.step()
            future.result(60)
        train()
        took, trial, interrupted = 0.05, 0, 0
        while trial < 12 or interrupted < 4:
            trial += 1
            try:
                armed = True
                began = time.perf_counter()
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(0.0005, 1.2 * took))
                train()
                armed = False
                took = time.perf_counter() - began
            except (KeyboardInterrupt, dcp.CheckpointException):
                armed = False
                interrupted += 1
            finally:
                armed = False
                signal.setitimer(signal.ITIMER_REAL, 0)
            # Until what is under way has ended: its future was lost, perhaps.
            while any("Executor" in each.name for each in threading.enumerate()):
                time.sleep(0.001)
            stager.close()
            with torch.no_grad():  # half a step may have been made
                for weight in weights:
                    weight.copy_(weights[0])
            check()
        train()
        check()
        """
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch is built without gloo"
)
@pytest.mark.parametrize("world", [1, 2])
def test_shards_of_fsdp_are_guarded(world: int, tmp_path: Path) -> None:
    """Each rank's own; the losses that follow are those of a training that went on."""
    run_steps(world, tmp_path, "save_guarded", "load_fsdp")
