"""`Checkpointer.save`: the state of the moment of the call, whoever writes afterwards."""

from __future__ import annotations

import copy
import ctypes
import errno
import gc
import io
import os
import shutil
import signal
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint._checkpointers import file_of, large_state, names
from checkpoint._snapshot_training import OPTIMIZERS, SIDE, Model, Training, averages_in, check
from faults._support import MIB, mounted
from inside import saver_of
from support import (
    PATIENCE_S,
    HeldEngine,
    needs_protection,
    open_descriptors,
    run_python,
    thread,
)

import nvmeio
from nvmeio.checkpoint._directory import retention
from nvmeio.checkpoint._snapshot import protected, state_snapshot
from nvmeio.checkpoint._snapshot.copies import SnapshotMemory
from nvmeio.checkpoint._snapshot.protected import ProtectedBytes
from nvmeio.offload import SwappedOptimizer

pytestmark = [needs_protection, pytest.mark.usefixtures("little_staging")]


def save_and_write(
    held: nvmeio.Checkpointer, engine: HeldEngine, state: Any, write: Callable[[], object]
) -> nvmeio.checkpoint.SaveReport:
    """Save, have somebody write before the drive has anything, and look at what is in the file."""
    wanted = copy.deepcopy(state)
    report = held.save_sync(state, 1)
    assert report.snapshot == "protect" and report.protected_bytes > report.copied_bytes
    write()
    assert not engine.gate.is_set()  # no write has waited for the drive
    engine.gate.set()
    done = held.wait_sync()
    assert done is not None and done.durable
    check(held, 1, wanted)
    return done


# Who writes


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step(kind: str, held: nvmeio.Checkpointer, engine_held: HeldEngine) -> None:
    training = Training(kind)
    training.backward()
    done = save_and_write(held, engine_held, training.state(), training.optimizer.step)
    assert done.moved_bytes > 0 and done.step_held_s > 0


def averages_in_and_out(training: Training) -> None:
    """As weights' averages are tried: torch counts nothing, and all is as it was in the end."""
    kept = [parameter.detach().clone() for parameter in training.model.parameters()]
    for parameter in training.model.parameters():
        parameter.data.copy_(parameter.data * 0.5 + 7)
    for parameter, own in zip(training.model.parameters(), kept, strict=True):
        parameter.data.copy_(own)


def numpy_view(training: Training) -> None:
    training.weight.detach().numpy()[64, 3] = 9.0


def raw_pointer(training: Training) -> None:
    ctypes.memset(training.weight.data_ptr() + 100_000, 3, 9)


def another_thread(training: Training) -> None:
    with thread(lambda: training.weight.data.zero_()):
        pass


def system_call(training: Training) -> None:
    view = memoryview(training.weight.detach().numpy()).cast("B")
    assert io.BytesIO(bytes(view.nbytes)).readinto(view) == view.nbytes
    with open("/dev/zero", "rb") as zeros:
        assert os.readv(zeros.fileno(), [view]) == view.nbytes


def restored_state(training: Training) -> None:
    training.model.load_state_dict(Model().state_dict())


def other_memory(training: Training) -> None:
    """The tensor's memory goes back to malloc, and is used again."""
    for parameter in training.model.parameters():
        parameter.data = torch.zeros_like(parameter)
    training.optimizer.state.clear()
    gc.collect()
    for _ in range(8):
        torch.full((SIDE, SIDE), 3.0)


def compiled_step(training: Training) -> None:
    training.backward()
    torch.compile(training.optimizer.step, backend="eager")()


def compiled_graph(training: Training) -> None:
    training.backward()
    torch.compile(training.optimizer.step, backend="aot_eager")()


def average_of_all(training: Training) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(training.model)
    averaged.update_parameters(training.model)
    training.model.load_state_dict(averaged.module.state_dict())
    training.weight.data.mul_(2)


def shadow_weights(training: Training) -> None:
    """Averages as diffusers keeps them: a step, then in, and out again."""
    parameters = list(training.model.parameters())
    shadow = [parameter.detach().clone() for parameter in parameters]
    for kept, parameter in zip(shadow, parameters, strict=True):
        kept.sub_(0.1 * (kept - parameter.detach() * 3))
    stored = [parameter.detach().cpu().clone() for parameter in parameters]
    for kept, parameter in zip(shadow, parameters, strict=True):
        parameter.data.copy_(kept.to(parameter.device).data)
    for own, parameter in zip(stored, parameters, strict=True):
        parameter.data.copy_(own.data)


def signal_handler(training: Training) -> None:
    """Python runs it between two instructions of whatever else is going on."""
    before = signal.signal(signal.SIGUSR1, lambda *_: averages_in(training))
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        training.weight.data.add_(1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def compiled_kernel(training: Training) -> None:
    training.backward()
    torch.compile(training.optimizer.step)()


def scaled_step(training: Training) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(training.model(torch.ones(4, SIDE)).square().sum()).backward()
    scaler.step(training.optimizer)
    scaler.update()


COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "write",
    [
        averages_in_and_out,
        averages_in,
        numpy_view,
        raw_pointer,
        another_thread,
        system_call,
        restored_state,
        other_memory,
        compiled_step,
        compiled_graph,
        average_of_all,
        scaled_step,
        shadow_weights,
        signal_handler,
        pytest.param(compiled_kernel, marks=[pytest.mark.stress, COMPILER]),  # a minute
    ],
    ids=lambda write: write.__name__,
)
def test_writes_that_nobody_counts(
    write: Callable[[Training], None],
    held: nvmeio.Checkpointer,
    engine_held: HeldEngine,
    training: Training,
) -> None:
    """A file held a mixture of two states, and verify called it whole."""
    save_and_write(held, engine_held, training.state(), lambda: write(training))


def test_averages_that_are_saved_too(
    held: nvmeio.Checkpointer, engine_held: HeldEngine, training: Training
) -> None:
    """They go on while they are written, as the weights do."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    averaged = AveragedModel(training.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    averaged.update_parameters(training.model)

    def write() -> None:
        training.optimizer.step()
        averaged.update_parameters(training.model)
        averages_in(training)

    training.backward()
    state = {**training.state(), "averaged": averaged.state_dict()}
    assert save_and_write(held, engine_held, state, write).moved_bytes > 2 * 4 * SIDE * SIDE


def test_a_read_of_ours_into_what_is_being_saved(
    held: nvmeio.Checkpointer, engine_held: HeldEngine, training: Training, tmp_path: Path
) -> None:
    zeros = torch.zeros(SIDE, SIDE)
    with nvmeio.AioHandle() as handle:
        handle.sync_pwrite(zeros, tmp_path / "zeros")

        def write() -> None:
            handle.sync_pread(training.weight.detach(), tmp_path / "zeros")

        save_and_write(held, engine_held, training.state(), write)
    assert torch.equal(training.weight.detach(), zeros)


def test_the_weights_of_a_swapped_optimizer(
    held: nvmeio.Checkpointer, engine_held: HeldEngine, tmp_path: Path
) -> None:
    model = Model()
    with SwappedOptimizer(
        torch.optim.AdamW, model.parameters(), swap_dir=tmp_path / "swap", lr=0.1
    ) as optimizer:
        model(torch.randn(4, SIDE)).square().sum().backward()
        save_and_write(held, engine_held, {"model": model.state_dict()}, optimizer.step)


# What of it is protected


def test_a_write_behind_the_reader_costs_nothing(new: Any, training: Training) -> None:
    read, go_on = threading.Event(), threading.Event()

    def progress(what: str, done: int, total: int) -> None:
        if done == total:
            read.set()
            assert go_on.wait(PATIENCE_S)

    checkpointer = new()
    training.backward()
    state = training.state()
    wanted = copy.deepcopy(state)
    checkpointer.save_sync(state, 1, progress=progress)
    assert read.wait(PATIENCE_S)
    training.optimizer.step()
    go_on.set()
    done = checkpointer.wait_sync()
    assert done.moved_bytes == 0 and done.step_held_s == 0 < done.protected_bytes
    check(checkpointer, 1, wanted)


@pytest.mark.parametrize("memory_bytes", [None, 64 * MIB])
def test_memory_on_huge_pages_is_written_from_where_it_lies(
    memory_bytes: int | None, new: Any, engine_held: HeldEngine, new_handle: Any, monkeypatch: Any
) -> None:
    """And once more what changed before the drive was through with it, from aside."""
    found: list[int] = []

    class Recorded(ProtectedBytes):
        def settle(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
            changed = super().settle(offset, nbytes)
            found.append(sum(size for _, size in changed) * 100 // nbytes)
            return changed

    monkeypatch.setattr(state_snapshot, "ProtectedBytes", Recorded)
    held = new(handle=new_handle(engine_held, block_size=MIB), memory_bytes=memory_bytes)
    state = [torch.empty(0), *(nvmeio.empty_aligned(size) for size in (3, 10 * MIB, 2 * MIB + 77))]
    for tensor in state:
        tensor.copy_(torch.arange(tensor.numel()))

    def write() -> None:
        state[2][100_000] = -1.0
        state[2][4 * MIB : 9 * MIB].zero_()

    done = save_and_write(held, engine_held, state, write)
    assert 0 < done.moved_bytes < done.protected_bytes
    assert 0 in found and 100 in found and len({*found} - {0, 100}) > 0
    with zipfile.ZipFile(done.path) as archive:
        assert archive.testzip() is None


def test_the_file_is_that_of_a_save_with_a_copy(
    new: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = large_state(40 * MIB)
    monkeypatch.setattr(retention, "completion", lambda _: 10**18)  # each says when it was made
    for step, how in enumerate(("copy", "protect")):
        with nvmeio.Checkpointer(directory, snapshot=how) as checkpointer:
            checkpointer.save_sync(state, step)
    one, other = (file_of(directory, step).read_bytes() for step in range(2))
    assert one == other


def test_views_tied_weights_and_odd_places(
    held: nvmeio.Checkpointer, engine_held: HeldEngine
) -> None:
    """A storage is protected once, whatever lies in it; its first and last page are copied."""
    whole = torch.arange(400_001, dtype=torch.float32)
    state = {
        "whole": whole,
        "inner": whole[3:300_000],
        "again": whole,
        "strided": whole[::2],
        "parameter": torch.nn.Parameter(whole),
        "empty": torch.empty(0),
    }

    def write() -> None:
        whole.data[:10] = -1
        whole.data[-10:] = -1
        whole.data[200_000] = -1

    done = save_and_write(held, engine_held, state, write)
    assert done.protected_bytes == whole.nbytes
    loaded = held.restore()
    assert loaded["again"].data_ptr() == loaded["whole"].data_ptr()


@pytest.mark.parametrize("kind", ["shared", "mapped", "numpy's", "seen by numpy", "small"])
def test_memory_that_others_may_write_to_is_copied(kind: str, new: Any, tmp_path: Path) -> None:
    """The kernel stops the threads of this process, and for its own memory alone."""
    numel = 300_000
    tensor = torch.arange(numel, dtype=torch.float32)
    if kind == "shared":
        tensor.share_memory_()
    elif kind == "mapped":
        tensor.numpy().tofile(tmp_path / "mapped")
        tensor = torch.from_file(str(tmp_path / "mapped"), shared=True, size=numel)
    elif kind == "numpy's":
        tensor = torch.from_numpy(tensor.numpy().copy())
    elif kind == "seen by numpy":
        tensor.numpy()
    else:
        tensor = tensor[:3000].clone()
    checkpointer = new()
    report = checkpointer.save_sync({"a": tensor}, 1)
    wanted = {"a": tensor.clone()}
    tensor.zero_()
    assert report.protected_bytes == 0 and report.copied_bytes == tensor.nbytes
    assert report.snapshot == "copy"
    checkpointer.wait_sync()
    check(checkpointer, 1, wanted)


def test_page_locked_memory_is_copied(new: Any) -> None:
    """A device may write there, whom the kernel does not stop."""
    tensor = nvmeio.empty_pinned(300_000)
    tensor.fill_(3)
    checkpointer = new()
    report = checkpointer.save_sync({"a": tensor}, 1)
    wanted = {"a": tensor.clone()}
    tensor.zero_()
    assert (report.protected_bytes, report.copied_bytes) == (0, tensor.nbytes)
    checkpointer.wait_sync()
    check(checkpointer, 1, wanted)


class Named(torch.Tensor):
    """A tensor that has a type of its own."""


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("kind", ["strided", "jagged", "subclass"])
def test_tensors_of_other_kinds(
    kind: str, held: nvmeio.Checkpointer, engine_held: HeldEngine
) -> None:
    rows = [torch.full((300, 500), 1.0), torch.full((400, 500), 2.0)]
    if kind == "subclass":
        tensor: torch.Tensor = torch.cat(rows).as_subclass(Named)
        write: Callable[[], object] = tensor.zero_
    else:
        tensor = torch.nested.nested_tensor(rows, layout=getattr(torch, kind))
        write = tensor.values().zero_
    report = held.save_sync({"a": tensor}, 1)
    assert report.protected_bytes == 4 * 700 * 500
    write()
    engine_held.gate.set()
    held.wait_sync()
    loaded = torch.load(file_of(Path(held.directory), 1), weights_only=False)["a"]
    assert type(loaded) is type(tensor)
    parts = loaded.split([300, 400]) if kind == "subclass" else loaded.unbind()
    assert all(torch.equal(part, row) for part, row in zip(parts, rows, strict=True))


def test_two_checkpointers_save_the_same_tensors(
    held: nvmeio.Checkpointer, engine_held: HeldEngine, training: Training, tmp_path: Path
) -> None:
    """A page belongs to one of them; the other one copies it."""
    state = training.state()
    wanted = copy.deepcopy(state)
    first = held.save_sync(state, 1)
    with nvmeio.Checkpointer(tmp_path / "other") as other:
        second = other.save_sync(state, 1)
        averages_in(training)
        other.wait_sync()
        check(other, 1, wanted)
    assert first.protected_bytes > 0 and second.protected_bytes == 0
    engine_held.gate.set()
    held.wait_sync()
    check(held, 1, wanted)


def test_memory_cannot_be_taken_away_meanwhile(
    held: nvmeio.Checkpointer, engine_held: HeldEngine
) -> None:
    """`resize_` and `share_memory_` would free it; afterwards they may."""
    tensor = torch.arange(300_000, dtype=torch.float32)
    wanted = {"a": tensor.clone()}
    held.save_sync({"a": tensor}, 1)
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="cannot move a storage to shared memory"):
        tensor.share_memory_()
    engine_held.gate.set()
    held.wait_sync()
    check(held, 1, wanted)
    tensor.share_memory_()
    other = torch.arange(300_000, dtype=torch.float32)
    held.save_sync({"a": other}, 2)
    held.wait_sync()
    other.untyped_storage().resize_(0)


def test_a_forked_child(
    held: nvmeio.Checkpointer, engine_held: HeldEngine, training: Training
) -> None:
    """The child has the state as it is, writes as it likes, and the parent's save is exact."""

    before = training.weight.detach().numpy().tobytes()

    def write() -> None:
        child = os.fork()
        if child == 0:
            try:  # without torch's threads, which are the parent's
                address, nbytes = training.weight.data_ptr(), training.weight.nbytes
                same = ctypes.string_at(address, nbytes) == before
                ctypes.memset(address, 0, nbytes)
                os._exit(0 if same and not any(ctypes.string_at(address, nbytes)) else 1)
            finally:
                os._exit(2)
        averages_in(training)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    save_and_write(held, engine_held, training.state(), write)


# Memory


@pytest.mark.slow
@pytest.mark.parametrize("memory_bytes", [1, 3 * MIB, None])
def test_what_finds_no_memory_goes_into_a_file(
    memory_bytes: int | None,
    new: Any,
    new_handle: Any,
    engine_held: HeldEngine,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody waits for the drive's turn, and nothing is left of the file."""
    held = new(handle=new_handle(engine_held, block_size=MIB), memory_bytes=memory_bytes)
    state = {str(i): torch.full((MIB,), float(i)) for i in range(80)}
    if memory_bytes is not None:  # less than the least of a user's
        budget = property(lambda _: memory_bytes)
        monkeypatch.setattr(SnapshotMemory, "budget_bytes", budget, raising=False)
    wanted = copy.deepcopy(state)
    held.save_sync(state, 1)
    for tensor in state.values():
        tensor.zero_()
    nameless = [name for name in open_descriptors().values() if name.endswith(" (deleted)")]
    spilled = [name for name in nameless if name.startswith(f"{directory}/")]
    assert len(spilled) == (memory_bytes is not None)
    engine_held.gate.set()
    held.wait_sync()
    check(held, 1, wanted)
    assert names(directory) == ["latest", "step-00000001.pt"]


def test_no_room_at_all_fails_the_save_and_nothing_else(
    new: Any, new_handle: Any, engine_held: HeldEngine, directory: Path, monkeypatch: Any
) -> None:
    held = new(handle=new_handle(engine_held, block_size=MIB))
    state = {str(i): torch.full((MIB,), float(i)) for i in range(20)}
    with monkeypatch.context() as broken:
        broken.setattr(protected.AsideMemory, "take", lambda *_: None)
        saver_of(held).setup.snapshots.directory = "/nowhere"
        held.save_sync(state, 1)
        for tensor in state.values():
            tensor.zero_()
        engine_held.gate.set()
        with pytest.raises(nvmeio.TransferError, match="memory_bytes") as raised:
            held.wait_sync()
    assert raised.value.errno == errno.ENOENT
    saver_of(held).setup.snapshots.directory = str(directory)
    assert held.steps() == []
    held.save_sync(state, 2)
    held.wait_sync()
    check(held, 2, state)


def test_a_full_disk_where_copies_go(
    new_handle: Any, engine_held: HeldEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {str(i): torch.full((MIB,), float(i)) for i in range(4)}  # of 4 MiB each
    with (
        mounted("tmpfs", "none", "size=24m") as folder,
        nvmeio.Checkpointer(folder, keep=1, handle=new_handle(engine_held, block_size=MIB)) as held,
    ):
        with monkeypatch.context() as little:
            little.setattr(protected.AsideMemory, "take", lambda *_: None)
            held.save_sync(state, 1)
            engine_held.wait_until_begun(1)  # and has all of its room
            for tensor in state.values():
                tensor.add_(1)
            engine_held.gate.set()
            with pytest.raises(nvmeio.TransferError, match="memory_bytes") as raised:
                held.wait_sync()
        assert raised.value.errno == errno.ENOSPC
        assert names(folder) == []
        assert [int(tensor.max()) for tensor in state.values()] == [1, 2, 3, 4]
        held.save_sync(state, 2)
        held.wait_sync()
        check(held, 2, state)


# Ways


def test_a_copy_can_be_asked_for(new: Any, training: Training) -> None:
    checkpointer = new(snapshot="copy")
    state = training.state()
    wanted = copy.deepcopy(state)
    report = checkpointer.save_sync(state, 1)
    averages_in(training)
    assert (report.snapshot, report.protected_bytes) == ("copy", 0)
    checkpointer.wait_sync()
    check(checkpointer, 1, wanted)


@pytest.mark.parametrize("wrong", ["fork", None, 3])
def test_another_way_is_refused(wrong: Any, new: Any) -> None:
    with pytest.raises(ValueError, match="'auto', 'protect' or 'copy'"):
        new(snapshot=wrong)


SCRIPT = """
import logging, os, sys, tempfile, torch, nvmeio
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
way = sys.argv[1] if len(sys.argv) > 1 else os.environ["WAY"]
with tempfile.TemporaryDirectory(dir=".") as folder:
    with nvmeio.Checkpointer(folder, snapshot=way) as checkpointer:
        tensor = torch.arange(1 << 20)
        before = tensor.clone()
        report = checkpointer.save_sync({"a": tensor}, 1)
        tensor.zero_()
        checkpointer.wait_sync()
        assert torch.equal(checkpointer.restore()["a"], before)
        print("was", report.snapshot)
"""


@pytest.mark.parametrize(
    ("allowed", "way", "taken"),
    [("user", "auto", "copy"), ("user", "protect", "protect"), ("none", "auto", "copy")],
)
def test_what_the_kernel_allows(allowed: str, way: str, taken: str) -> None:
    """Where a system call of the program's could fail, nothing is protected but on request."""
    found = run_python(SCRIPT, fresh=True, NVMEIO_USERFAULTFD=allowed, WAY=way)
    assert (found.returncode, found.stderr) == (0, "")
    assert f"was {taken}" in found.stdout
    told = f"NVMEIO_USERFAULTFD={allowed}" in found.stdout and "userfaultfd=1" in found.stdout
    assert told == (taken == "copy")


def test_protection_that_cannot_be_had_is_refused() -> None:
    found = run_python(SCRIPT, fresh=True, NVMEIO_USERFAULTFD="none", WAY="protect")
    assert found.returncode == 1
    assert "BackendUnavailableError" in found.stderr and "how to fix it" in found.stderr


def test_guard_is_a_name_that_does_nothing(new: Any, training: Training) -> None:
    with pytest.warns(DeprecationWarning, match="leave the call out"):
        new().guard(training.optimizer)
