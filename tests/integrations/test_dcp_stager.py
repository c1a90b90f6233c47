"""`SnapshotStager`: `dcp.async_save` saves the state of its call, whoever writes afterwards."""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from programs import run_program
from support import (
    PATIENCE_S,
    HeldEngine,
    collect,
    needs_protection,
    run_python,
    run_ranks,
    thread,
)
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import AsyncStager

import nvmeio
from nvmeio._memory import mappings
from nvmeio.checkpoint import frozen
from nvmeio.integrations.dcp import (
    GuardingStager,
    NvmeStorageReader,
    NvmeStorageWriter,
    SnapshotStager,
)
from nvmeio.testing import FakeEngine

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]

NUMEL = 1 << 20
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
def engine() -> Iterator[HeldEngine]:
    """Nothing is written until its gate is set."""
    made = HeldEngine()
    yield made
    made.gate.set()


@pytest.fixture
def handle(engine: HeldEngine) -> Iterator[nvmeio.AioHandle]:
    with nvmeio.AioHandle(block_size=1 << 20, engine=engine) as made:
        yield made
        engine.gate.set()


@pytest.fixture
def stager() -> SnapshotStager:
    return SnapshotStager()


class Copying:
    """What copies what is protected: it waits for `gate`, and notes what writers had copied."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.moved: list[int] = []

    def fill(self, protected: Any, spans: Any, copies: Any) -> None:
        assert self.gate.wait(PATIENCE_S)
        true_fill(protected, spans, copies)
        self.moved.append(protected.aside_bytes)


true_fill = frozen.fill


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copying]:
    """Nothing that is protected is copied until its gate is set."""
    made = Copying()
    monkeypatch.setattr(frozen, "fill", made.fill)
    yield made
    made.gate.set()


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


def by_step(training: Training) -> None:
    training.optimizer.step()


def by_data(training: Training) -> None:
    for parameter in training.model.parameters():
        parameter.data.mul_(3)


def by_swap(training: Training) -> None:
    """As averages of weights are swapped in: other memory, and the old is written to."""
    for parameter in training.model.parameters():
        old, parameter.data = parameter.data, torch.zeros_like(parameter)
        old.zero_()


def by_numpy(training: Training) -> None:
    for parameter in training.model.parameters():
        parameter.detach().numpy()[:] = 7


WRITES = [by_step, by_data, by_swap, by_numpy]


def test_it_is_a_stager_of_torchs_protocol(stager: SnapshotStager) -> None:
    assert isinstance(stager, AsyncStager)
    assert not stager.should_synchronize_after_execute
    stager.synchronize_staging()
    stager.close()


def test_the_stager_before_it_warns_and_does_the_same(training: Training, tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match="GuardingStager is SnapshotStager now"):
        stager = GuardingStager(training.optimizer, memory_bytes="1M")
    wanted = copy.deepcopy(training.state())
    future = begin(stager, training.state(), NvmeStorageWriter(tmp_path))
    training.optimizer.step()
    future.result(PATIENCE_S)
    check(tmp_path, wanted)


@needs_protection
def test_what_is_large_is_not_copied_before_training_goes_on(
    stager: SnapshotStager, training: Training, copying: Copying
) -> None:
    state = training.state()
    staged = stager.stage(state)
    # Biases of 2,560 bytes are less than what is worth protecting; so are the numbers of steps.
    assert stager.protected_bytes == 3 * 3 * SIDE * SIDE * 4
    wanted = copy.deepcopy(dict(state))  # reads, which stop nobody
    state["seen"][1]["step"] = 8
    by_data(training)
    training.model[3].running_mean.zero_()  # type: ignore[union-attr,operator]
    with thread(lambda: dict(staged.items())) as found:
        assert not found
        copying.gate.set()
    same(found[0], wanted | {"seen": [1, {"step": 7}]})
    assert copying.moved[0] > 0


@pytest.mark.parametrize("kind", ["nvmeio's", "torch's"])
def test_the_files_are_those_of_a_save_without_it(
    kind: str, stager: SnapshotStager, training: Training, tmp_path: Path
) -> None:
    def writer(name: str) -> Any:
        return WRITERS[kind](tmp_path / name, None)

    begin(stager, training.state(), writer("staged")).result(PATIENCE_S)
    dcp.save(training.state(), storage_writer=writer("stock"), no_dist=True)
    found, wanted = (tmp_path / name / "__0_0.distcp" for name in ("staged", "stock"))
    assert found.read_bytes() == wanted.read_bytes()


class Halving(DefaultSavePlanner):
    """Makes tensors anew."""

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        return data * 1 if isinstance(data, torch.Tensor) else data


WRITERS: dict[str, Callable[[Path, Any], Any]] = {
    "several files": lambda path, handle: NvmeStorageWriter(path, thread_count=2, handle=handle),
    "nvmeio's": lambda path, handle: NvmeStorageWriter(path, handle=handle),
    "a planner": lambda path, handle: NvmeStorageWriter(path, handle=handle),
    "torch's": lambda path, _: dcp.FileSystemWriter(path),
}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("write", WRITES)
def test_whatever_writes_afterwards_is_not_in_the_checkpoint(
    write: Callable[[Training], None],
    kind: str,
    stager: SnapshotStager,
    training: Training,
    copying: Copying,
    tmp_path: Path,
) -> None:
    """Before a byte of what is protected was copied; for every writer."""
    training.backward()
    wanted = copy.deepcopy(training.state())
    planner = Halving() if kind == "a planner" else DefaultSavePlanner()
    future = begin(stager, training.state(), WRITERS[kind](tmp_path, None), planner)
    write(training)
    copying.gate.set()
    future.result(PATIENCE_S)
    assert copying.moved[0] > 0
    check(tmp_path, wanted)


def test_a_write_while_the_drive_has_nothing_yet(
    stager: SnapshotStager,
    training: Training,
    engine: HeldEngine,
    handle: nvmeio.AioHandle,
    tmp_path: Path,
) -> None:
    wanted = copy.deepcopy(training.state())
    future = begin(stager, training.state(), NvmeStorageWriter(tmp_path, handle=handle))
    engine.wait_until_begun()
    for write in WRITES[1:]:
        write(training)
    assert not future.done()
    engine.gate.set()
    future.result(PATIENCE_S)
    check(tmp_path, wanted)


class Failing(DefaultSavePlanner):
    def create_local_plan(self) -> Any:
        raise ArithmeticError("no plan")


@pytest.mark.parametrize("when", ["planning", "writing"])
def test_a_save_that_fails_keeps_the_checkpoint_before_and_holds_nothing(
    when: str, stager: SnapshotStager, training: Training, tmp_path: Path
) -> None:
    """Although its error, which is kept, has all that it was to save."""
    before = copy.deepcopy(training.state())
    begin(stager, training.state(), NvmeStorageWriter(tmp_path)).result(PATIENCE_S)
    names = set(os.listdir(tmp_path))

    def fail(kind: str, offset: int, nbytes: int) -> int:
        return errno.EIO if kind == "pwrite" else 0

    with nvmeio.AioHandle(engine=FakeEngine(fail=fail)) as broken:
        writer = NvmeStorageWriter(tmp_path, handle=broken if when == "writing" else None)
        planner = Failing() if when == "planning" else None
        future = begin(stager, training.state(), writer, planner)
        with pytest.raises(dcp.CheckpointException) as kept:
            future.result(PATIENCE_S)
    expected = ArithmeticError if when == "planning" else nvmeio.TransferError
    assert isinstance(kept.value.failures[0][0], expected)
    assert set(os.listdir(tmp_path)) == names
    check(tmp_path, before)
    training.optimizer.step()
    for parameter in training.model.parameters():
        parameter.untyped_storage().resize_(parameter.nbytes)  # refused while it is protected
    wanted = copy.deepcopy(training.state())
    begin(stager, training.state(), NvmeStorageWriter(tmp_path)).result(PATIENCE_S)
    check(tmp_path, wanted)


def test_saves_one_after_the_other(
    stager: SnapshotStager, training: Training, tmp_path: Path
) -> None:
    for number in range(4):
        training.backward()
        wanted = copy.deepcopy(training.state())
        future = begin(stager, training.state(), NvmeStorageWriter(tmp_path / str(number)))
        training.optimizer.step()
        future.result(PATIENCE_S)
        check(tmp_path / str(number), wanted)


def test_a_save_that_begins_before_the_one_before_has_ended(
    stager: SnapshotStager, training: Training, copying: Copying, tmp_path: Path
) -> None:
    """What one protects the other cannot; it copies it, of its own moment."""
    first = copy.deepcopy(training.state())
    begun = begin(stager, training.state(), NvmeStorageWriter(tmp_path / "first"))
    by_data(training)
    second = copy.deepcopy(training.state())
    also = begin(stager, training.state(), NvmeStorageWriter(tmp_path / "second"))
    by_numpy(training)
    copying.gate.set()
    for future in (begun, also):
        future.result(PATIENCE_S)
    check(tmp_path / "first", first)
    check(tmp_path / "second", second)


def test_a_stager_that_is_dropped_keeps_what_is_being_saved(
    training: Training, copying: Copying, tmp_path: Path
) -> None:
    wanted = copy.deepcopy(training.state())
    future = begin(SnapshotStager(), training.state(), NvmeStorageWriter(tmp_path))
    gc.collect()
    by_data(training)
    copying.gate.set()
    future.result(PATIENCE_S)
    check(tmp_path, wanted)


# Its memory


def addresses(staged: Any) -> set[int]:
    """Of the copies of what was protected."""
    parts = [staged["model"], *staged.get("moments", {}).values()]
    tensors = [tensor for part in parts for tensor in part.values()]
    return {tensor.data_ptr() for tensor in tensors if tensor.nbytes >= SIDE * SIDE}


@needs_protection
def test_the_memory_of_a_save_is_that_of_the_one_before(
    stager: SnapshotStager, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each save took new memory, which the kernel had to find and clear."""
    made: list[int] = []

    class Counted(mappings.Mapping):
        def __new__(cls, nbytes: int) -> Counted:
            made.append(nbytes)
            return super().__new__(cls, nbytes)  # type: ignore[return-value]

    monkeypatch.setattr(frozen, "Mapping", Counted)
    before: set[int] = set()
    for number in range(3):
        wanted = copy.deepcopy(training.state())
        staged = stager.stage(training.state())
        by_data(training)
        same(dict(staged.items()), wanted)
        assert not before or addresses(staged) == before, number
        before = addresses(staged)
        del staged, wanted
        collect()
        assert len(made) == 3 * 3  # three layers' weights, each with two moments


@needs_protection
def test_memory_that_somebody_still_has_is_left_alone(
    stager: SnapshotStager, training: Training
) -> None:
    staged = stager.stage(training.state())
    kept = staged["model"]["0.weight"]
    wanted = kept.clone()
    others = addresses(staged) - {kept.data_ptr()}
    del staged
    collect()
    by_data(training)
    again = stager.stage(training.state())
    assert kept.data_ptr() not in addresses(again) and others <= addresses(again)
    assert torch.equal(kept, wanted)
    assert torch.equal(again["model"]["0.weight"], wanted * 3)


@needs_protection
def test_memory_that_is_not_needed_any_more_is_given_back(
    stager: SnapshotStager, training: Training
) -> None:
    """Of a save with more tensors by the next one, and all of it by `close`."""
    staged = stager.stage({"model": training.state()["model"], "more": torch.ones(NUMEL)})
    assert staged["more"].sum() == NUMEL
    was, weights = staged["more"].data_ptr(), addresses(staged)
    del staged
    collect()
    assert mappings.owns(was, 4 * NUMEL)
    staged = stager.stage({"model": training.state()["model"]})
    assert addresses(staged) == weights and not mappings.owns(was, 4 * NUMEL)
    stager.close()
    assert all(mappings.owns(address, SIDE * SIDE) for address in weights)  # it is in use
    del staged
    collect()
    assert not any(mappings.owns(address, SIDE * SIDE) for address in weights)
    stager.stage(training.state())
    stager.close()


def test_a_staged_state_that_is_dropped_holds_nothing(
    stager: SnapshotStager, training: Training
) -> None:
    staged = stager.stage(training.state())
    assert staged["model"]
    del staged
    collect()
    for parameter in training.model.parameters():
        parameter.untyped_storage().resize_(parameter.nbytes)


def test_stager_and_its_copies_refuse_to_be_pickled(
    stager: SnapshotStager, training: Training
) -> None:
    with pytest.raises(TypeError, match=r"AsyncCheckpointerType\.THREAD"):
        pickle.dumps(stager.stage(training.state()))
    with pytest.raises(TypeError, match="make one in each process"):
        pickle.dumps(stager)


@pytest.mark.slow
def test_interrupts_at_random_moments_leave_whole_checkpoints(tmp_path: Path) -> None:
    """Real signals in stage, save and step: whatever is there is of one step, and all goes on."""
    done = run_python(
        f"""
        import gc, logging, random, signal, threading, time, warnings, torch
        import torch.distributed.checkpoint as dcp
        from nvmeio.integrations.dcp import NvmeStorageReader, NvmeStorageWriter, SnapshotStager
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
        stager = SnapshotStager()
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
            gc.collect()
            limit = time.monotonic() + 60
            while not all(weight.untyped_storage().resizable() for weight in weights):
                assert time.monotonic() < limit, "the weights are held for good"
                time.sleep(0.001)
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
def test_shards_of_fsdp_are_saved_as_they_were(world: int, tmp_path: Path) -> None:
    """Each rank's own; the losses that follow are those of a training that went on."""
    program = Path(__file__).parent / "_dcp_stager_rank.py"
    ended = run_ranks(program, world, tmp_path, "save_staged", "load_fsdp")
    assert [status for status, _ in ended] == [0] * world, "\n".join(out for _, out in ended)


@needs_protection
@pytest.mark.parametrize(
    "look",
    [
        lambda staged: staged.copy()["a"],
        lambda staged: (staged | {})["a"],
        lambda staged: ({} | staged)["a"],
        lambda staged: dict(staged)["a"],
        lambda staged: {**staged}["a"],
        lambda staged: staged.pop("a"),
        lambda staged: staged.popitem()[1],
        lambda staged: staged.setdefault("a"),
    ],
    ids=["copy", "or", "ror", "dict", "unpacked", "pop", "popitem", "setdefault"],
)
def test_whoever_looks_waits_for_the_bytes(
    look: Callable[[Any], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several ways to a value did not wait, and had zeros."""
    began, gate, fill = threading.Event(), threading.Event(), frozen.fill

    def late(*given: Any) -> None:
        assert gate.wait(PATIENCE_S)
        fill(*given)

    monkeypatch.setattr(frozen, "fill", late)
    tensor = torch.ones(SIDE, SIDE)
    staged = SnapshotStager().stage({"a": tensor})

    def found() -> bool:
        began.set()
        return bool((look(staged) == 1).all())

    with thread(found) as values:
        assert began.wait(PATIENCE_S)
        for _ in range(100):
            os.sched_yield()
        gate.set()
    assert values == [True]


_IN_THE_DEFAULT_GROUP = """
import sys
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from nvmeio.integrations.dcp import NvmeStorageWriter, SnapshotStager

store, rank = "file://" + sys.argv[2], int(sys.argv[1])
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
own = dist.new_group(backend="gloo")
stager, state = SnapshotStager(), {"a": torch.ones(3)}
for group in (own, None):
    print("own" if group else "default", file=sys.stderr, flush=True)
    writer = NvmeStorageWriter(sys.argv[3])
    dcp.async_save(state, storage_writer=writer, async_stager=stager, process_group=group).result()
stager.close()
dist.barrier()
dist.destroy_process_group()
"""


def test_a_stager_warns_of_a_save_in_the_group_that_trains(tmp_path: Path) -> None:
    """Ranks that trained meanwhile aborted in gloo, where collectives of the two met."""

    def run_rank(rank: int) -> Any:
        store, folder = str(tmp_path / "store"), str(tmp_path / "checkpoint")
        command = [sys.executable, "-c", _IN_THE_DEFAULT_GROUP, str(rank), store, folder]
        return run_program(command, timeout=300)

    with ThreadPoolExecutor(2) as pool:
        for ran in pool.map(run_rank, range(2)):
            assert ran.returncode == 0, ran.stderr
            own, default = ran.stderr.split("default\n", 1)
            assert "uses the default group" in default
            assert "uses the default group" not in own
