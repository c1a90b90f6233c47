"""How saves of protected memory end: awaited, failed, cancelled, dropped; and frozen states."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint._checkpointers import file_of, names
from checkpoint._objects import assert_same
from checkpoint._snapshot_training import SIDE, Training, averages_in, check
from faults._support import MIB
from support import HeldEngine, collect, needs_protection, run_python, spin_until, thread

import nvmeio
from nvmeio.testing import FakeEngine

pytestmark = [needs_protection, pytest.mark.usefixtures("little_staging")]


# Ends


async def test_saves_that_are_awaited(
    held: nvmeio.Checkpointer, engine_held: HeldEngine, training: Training
) -> None:
    wanted = copy.deepcopy(training.state())
    report = await held.save(training.state(), 1)
    assert report.protected_bytes > 0
    averages_in(training)
    engine_held.gate.set()
    await held.wait()
    check(held, 1, wanted)


def test_a_write_that_fails_lets_everybody_go_on(
    new: Any, new_handle: Any, training: Training
) -> None:
    fails = [True]

    def fail(kind: str, offset: int, nbytes: int) -> int:
        return errno.EIO if fails[0] and kind == "pwrite" else 0

    checkpointer = new(handle=new_handle(FakeEngine(fail=fail), block_size=MIB))
    checkpointer.save_sync(training.state(), 1)
    averages_in(training)
    with pytest.raises(nvmeio.TransferError):
        checkpointer.wait_sync()
    fails[0] = False
    wanted = copy.deepcopy(training.state())
    checkpointer.save_sync(training.state(), 2)
    averages_in(training)
    checkpointer.wait_sync()
    check(checkpointer, 2, wanted)


def test_a_handle_that_its_owner_closes(
    directory: Path, new_handle: Any, engine_held: HeldEngine, training: Training
) -> None:
    """What was read stays read; another handle goes on."""
    handle = new_handle(engine_held, block_size=MIB)
    with nvmeio.Checkpointer(directory, handle=handle) as checkpointer:
        wanted = copy.deepcopy(training.state())
        checkpointer.save_sync(training.state(), 1)
        engine_held.wait_until_begun(1)
        with thread(handle.close):
            spin_until(lambda: handle.closed)
            averages_in(training)
            engine_held.gate.set()
        checkpointer.wait_sync()
        check(checkpointer, 1, wanted)


def test_closing_and_dropping_while_it_is_written(
    directory: Path, new_handle: Any, engine_held: HeldEngine, training: Training
) -> None:
    checkpointer = nvmeio.Checkpointer(directory, handle=new_handle(engine_held, block_size=MIB))
    wanted = copy.deepcopy(training.state())
    checkpointer.save_sync(training.state(), 1)
    with pytest.warns(ResourceWarning, match="is being written"):
        del checkpointer
        collect()
    averages_in(training)
    engine_held.gate.set()
    spin_until(lambda: "step-00000001.pt" in names(directory))
    assert_same(torch.load(file_of(directory, 1)), wanted)


async def test_a_cancelled_save_lets_everybody_go_on(
    held: nvmeio.Checkpointer, engine_held: HeldEngine, training: Training
) -> None:
    first = held.save(training.state(), 1)
    await first
    second = asyncio.ensure_future(held.save(training.state(), 2))  # waits for the first one
    await asyncio.sleep(0)
    second.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await second
    wanted = copy.deepcopy(training.state())
    averages_in(training)
    engine_held.gate.set()
    await held.wait()
    check(held, 1, wanted)


def test_a_program_that_ends_at_once(tmp_path: Path) -> None:
    found = run_python(
        """
        import os, torch, nvmeio
        folder = os.environ["FOLDER"]
        child = os.fork()
        if child == 0:
            checkpointer = nvmeio.Checkpointer(folder)
            tensor = torch.arange(4 << 20)
            checkpointer.save_sync({"a": tensor}, 1)
            tensor.zero_()
            raise SystemExit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        loaded = nvmeio.load(os.path.join(folder, "step-00000001.pt"))
        assert torch.equal(loaded["a"], torch.arange(4 << 20))
        """,
        "-W",
        "ignore::ResourceWarning",
        fresh=True,
        FOLDER=str(tmp_path),
    )
    assert (found.returncode, found.stderr) == (0, "")


# A state that somebody else reads


def test_a_frozen_state(training: Training) -> None:
    state = training.state()
    wanted = copy.deepcopy(state)
    frozen = nvmeio.snapshot(state)
    averages_in(training)
    training.optimizer.step()
    with frozen as before:
        assert_same(before, wanted)
    assert frozen.protected_bytes > 0 and frozen.done()
    assert frozen.result() is before


def test_a_frozen_module_and_views() -> None:
    model = torch.nn.Linear(SIDE, SIDE)
    wanted = copy.deepcopy(model)
    frozen = nvmeio.snapshot([model, model.weight.detach()[3:], model.weight])
    model.weight.data.zero_()
    found: Any = frozen.result()
    module, part, weight = found
    assert torch.equal(module.weight, wanted.weight) and module.weight is weight
    assert torch.equal(part, wanted.weight[3:])


async def test_a_frozen_state_is_awaited(training: Training) -> None:
    wanted = copy.deepcopy(training.state())
    frozen = nvmeio.snapshot(training.state())
    averages_in(training)
    assert_same(await frozen, wanted)


def test_freezing_while_a_save_is_written(
    held: nvmeio.Checkpointer, engine_held: HeldEngine, training: Training
) -> None:
    wanted = copy.deepcopy(training.state())
    held.save_sync(training.state(), 1)
    frozen = nvmeio.snapshot(training.state())
    averages_in(training)
    assert frozen.protected_bytes == 0  # it was copied at once
    assert_same(frozen.result(), wanted)
    engine_held.gate.set()
    held.wait_sync()
    check(held, 1, wanted)


def test_threads_that_wrote_are_not_left_waiting(training: Training, new: Any) -> None:
    """Writers in four threads, through several saves: all end, and every file is right."""
    checkpointer = new(keep=2)
    stop = threading.Event()
    numbers = [torch.zeros(300_000) for _ in range(4)]

    def write(tensor: torch.Tensor) -> None:
        while not stop.wait(0.001):
            tensor.data[::1000] += 1

    writers = [threading.Thread(target=write, args=(tensor,)) for tensor in numbers]
    for writer in writers:
        writer.start()
    try:
        for step in range(6):
            wanted = copy.deepcopy(training.state())
            checkpointer.save_sync({"mine": training.state(), "theirs": numbers}, step)
            averages_in(training)
            checkpointer.wait_sync()
            assert_same(checkpointer.restore(step)["mine"], wanted)
    finally:
        stop.set()
        for writer in writers:
            writer.join(60)
    assert not any(writer.is_alive() for writer in writers)
