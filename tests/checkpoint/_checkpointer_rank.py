"""The ranks of test_checkpointer_ranks.py: real processes with real gloo groups.

    python _checkpointer_rank.py

A process that imports torch once and then, for each line of JSON that it reads, forks so many
ranks, has each of them run one of the functions below, and prints how they ended. Every rank tells
what is wrong by failing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nvmeio
import nvmeio.checkpoint
from nvmeio._formats import torch_writing
from nvmeio._ranks import messages as ranks_module
from nvmeio._ranks import rank_store as rank_store_module
from nvmeio._threads import interruptible
from nvmeio.checkpoint import checkpointer as checkpointer_module
from nvmeio.checkpoint._manager import job
from nvmeio.checkpoint._manager import saver as saver_module
from nvmeio.checkpoint._ranks import agreement
from nvmeio.checkpoint._snapshot import copies
from nvmeio.testing import FakeEngine

MIB = 1 << 20

# No rank takes longer than this for anything, on a busy machine.
PATIENCE_S = 120.0

# How long a rank may make no progress where one is given up.
LIMIT_S = 2.5


# States


def replicated(step: int, large: int = 0) -> dict[str, Any]:
    """The same on all ranks: storages larger and smaller than a part, ties, Python objects."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randn(531, 517, generator=generator)
    state: dict[str, Any] = {
        "step": step,
        "rows": rows,
        "tied": rows[5:9],
        "small": [torch.randn(i % 7, generator=generator) for i in range(60)],
        "moments": {"m": torch.randn(200_003, generator=generator), "lr": 1e-3},
        "odd": torch.randn(3, generator=generator),
    }
    if large:
        state["large"] = torch.full((large,), step % 251, dtype=torch.uint8)
    return state


def own(step: int, rank: int) -> dict[str, Any]:
    """Another one on each rank, of another size."""
    return {"step": step, "rank": rank, "w": torch.full((50_000 * (rank + 1),), step * 10 + rank)}


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return found.dtype == wanted.dtype and torch.equal(found, wanted)
    if isinstance(wanted, dict):
        return list(found) == list(wanted) and all(same(found[k], wanted[k]) for k in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return bool(found == wanted)


class Rank:
    """What each function below is given."""

    def __init__(self, folder: Path, rank: int, world: int, layout: str, number: int) -> None:
        self.folder = folder / "checkpoints"
        self.notes = folder
        self.rank = rank
        self.world = world
        self.layout = layout
        self.number = number  # of the order
        self.errno = 0  # that every write of this rank meets
        self.kill_at = -1  # the offset whose write kills this rank
        self.written: list[tuple[int, int]] = []
        self.read: list[tuple[int, int]] = []
        self.reading = threading.Event()  # set by the first read
        self.read_gate: threading.Event | None = None  # that every read of this rank waits for
        self.read_errno = 0  # that every read of this rank meets
        self.kill_reading = False  # with its next read

    def state(self, step: int) -> dict[str, Any]:
        return replicated(step) if self.layout == "one" else own(step, self.rank)

    def new(self, **options: Any) -> nvmeio.Checkpointer:
        chosen = {"layout": self.layout, "keep": 2, "timeout_s": PATIENCE_S, **options}
        group = dist.group.WORLD
        if chosen["layout"] == "one" or "handle" not in chosen:
            chosen.setdefault("handle", nvmeio.AioHandle(engine=FakeEngine(fail=self._meet)))
        return nvmeio.Checkpointer(self.folder, process_group=group, **chosen)

    def _meet(self, kind: str, offset: int, nbytes: int) -> int:
        if kind != "pwrite":
            return self._meet_read(offset, nbytes)
        if 0 <= self.kill_at <= offset:
            os.kill(os.getpid(), signal.SIGKILL)
        self.written.append((offset, nbytes))
        return self.errno

    def _meet_read(self, offset: int, nbytes: int) -> int:
        self.read.append((offset, nbytes))
        self.reading.set()
        if self.read_gate is not None:
            self.read_gate.wait(PATIENCE_S)
        if self.kill_reading:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.read_errno

    def saved(self, checkpointer: nvmeio.Checkpointer, step: int) -> None:
        """Save a step, and see that all of it is there on every rank."""
        checkpointer.save_sync(self.state(step), step)
        report = checkpointer.wait_sync(PATIENCE_S)
        assert report is not None and report.durable and report.step == step, report
        assert checkpointer.latest_step() == step
        assert same(checkpointer.restore(), self.state(step))

    @contextlib.contextmanager
    def raises(self, error: Any, *texts: str, within_s: float = PATIENCE_S) -> Iterator[list[Any]]:
        """The body raises this error soon, and it says all of this."""
        began = time.monotonic()
        told: list[Any] = []
        try:
            yield told
        except error as raised:
            assert all(text in str(raised) for text in texts), str(raised)
            told.append(raised)
        else:
            raise AssertionError(f"rank {self.rank} raised nothing")
        assert time.monotonic() - began < within_s, time.monotonic() - began

    def meet_others(self) -> None:
        dist.barrier()

    def tell(self, name: str, text: str) -> None:
        """A note for the others, whole as soon as it is there."""
        (self.notes / f"{name}.new").write_text(text)
        (self.notes / f"{name}.new").rename(self.notes / name)

    def told(self, name: str) -> str:
        """Another rank's note, once it is there."""
        until = time.monotonic() + PATIENCE_S
        while not (self.notes / name).exists():
            assert time.monotonic() < until, f"nobody told {name}"
            time.sleep(0.002)
        return (self.notes / name).read_text()


def set_limit(checkpointer: nvmeio.Checkpointer, timeout_s: float) -> None:
    """From the next save on; those before it are to be in time on the slowest drive."""
    saver = checkpointer._saver
    saver.setup = saver.setup._replace(timeout_s=timeout_s)


def tell_time_by(clock: Callable[[], float]) -> None:
    """Have this rank measure by this clock how long others make no progress."""
    ranks_module.time = types.SimpleNamespace(  # type: ignore[assignment]
        monotonic=clock, sleep=time.sleep
    )


def since_the_end_of(pid: int) -> Callable[[], float]:
    """A clock that stands still while a process lives, so that nobody is given up before."""
    ended: list[float] = []

    def clock() -> float:
        if not ended:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                ended.append(time.monotonic())
        return time.monotonic() - ended[0] if ended else 0.0

    return clock


def sync_nothing() -> None:
    """A busy drive may take seconds, in which a rank makes no progress; here no power is lost."""
    os.fsync = os.fdatasync = lambda fd: None  # type: ignore[assignment]


# What ranks do; those that return False end without meeting the others


def save(me: Rank) -> None:
    """New files, then recycled ones, in every way to save."""
    reports = []
    with me.new(keep=1, overwrite=True) as checkpointer:
        for step in (1, 2):
            me.saved(checkpointer, step)
        me.meet_others()
        for step in (3, 4, 5):  # the background of one beside the next
            state = me.state(step)
            checkpointer.save_sync(state, step)
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.fill_(-1)
            reports.append(checkpointer.wait_sync(PATIENCE_S))
        me.meet_others()  # so that nobody looks while rank 0 begins the next one
        assert checkpointer.steps() == [4, 5] and checkpointer.latest_step() == 5
        assert same(checkpointer.restore(), me.state(5))
        assert same(checkpointer.restore(4), me.state(4))
        me.meet_others()

        async def main() -> None:
            me.written.clear()
            report = await checkpointer.save(me.state(6), 6)
            assert not report.durable and report.step == 6
            durable = await checkpointer.wait()
            assert durable is not None and durable.durable
            assert same(await checkpointer.async_restore(), me.state(6))

        asyncio.run(main())
    if me.layout == "per_rank":
        assert [report.recycled for report in reports] == [True] * 3
    elif me.rank == 0:
        assert [report.recycled for report in reports] == [True] * 3
        assert reports[0].copied_bytes <= reports[0].nbytes // me.world + 8192
    text = json.dumps(me.written)
    (me.notes / f"written-{me.layout}-{me.world}-{me.rank}.json").write_text(text)


class Training:
    """Weights of an optimizer, the same on all ranks with one file; and what else is saved."""

    def __init__(self, me: Rank) -> None:
        value = 1.0 if me.layout == "one" else 1.0 + me.rank
        rows = 700 if me.layout == "one" else 500 + 100 * me.rank
        self.weights = [torch.nn.Parameter(torch.full((rows, 517), value)) for _ in range(5)]
        self.optimizer = torch.optim.SGD(self.weights, lr=1.0, fused=True)
        self.other = torch.ones(5000)

    def step(self) -> None:
        for weight in self.weights:
            weight.grad = torch.full_like(weight, -1)
        self.optimizer.step()
        self.other += 1

    def state(self) -> dict[str, Any]:
        weights: list[torch.Tensor] = [weight.detach() for weight in self.weights]
        return {"weights": weights, "other": self.other}

    def copy(self) -> dict[str, Any]:
        return {
            "weights": [each.clone() for each in self.state()["weights"]],
            "other": self.other.clone(),
        }


def some_write(me: Rank) -> None:
    """Fewer ranks write than there are, and all of it is there; ranks that differ are told."""
    nodes = ["left", "right"]
    agreement.this_node = lambda: nodes[me.rank * 2 // me.world]
    half = me.world // 2
    for number, (writers, writing) in enumerate(
        (("all", range(me.world)), ("per_node", (0, half)), (1, (0,)), (2, (0, half)))
    ):
        with me.new(writers=writers) as checkpointer:
            for step in (number * 4 + 1, number * 4 + 2):
                me.written.clear()
                me.saved(checkpointer, step)
                assert bool(me.written) == (me.rank in writing), (writers, me.written)
            me.meet_others()
    wanted = replicated(15)
    for bad in ("some", 0, me.world + 1, -1):
        with me.raises(ValueError, "writers must be"):
            me.new(writers=bad)
    for wrong in (True, None, 1.5):
        with me.raises(TypeError, "writers must be"):
            me.new(writers=wrong)
    with me.raises(ValueError, "is for layout='one'"):
        me.new(writers=1, layout="per_rank")
    with me.new(writers=1 if me.rank == me.world - 1 else "all") as checkpointer:
        with me.raises(ValueError, "rank 0 saves with writers='all'", "with writers=1"):
            checkpointer.save_sync(wanted, 15)
        me.meet_others()
    # One that fails while it writes nothing, and one that has all of it to write
    with me.new(writers=1) as checkpointer:
        me.errno = errno.EIO if me.rank == 0 else 0
        checkpointer.save_sync(wanted, 15)
        with me.raises(nvmeio.TransferError, "EIO"):
            checkpointer.wait_sync(PATIENCE_S)
        me.errno = 0
        state = {"f": lambda: None} if me.rank == me.world - 1 else wanted
        with me.raises(Exception, "pickle"):
            checkpointer.save_sync(state, 15)
        me.meet_others()
        assert checkpointer.latest_step() == 14
        me.meet_others()
        me.saved(checkpointer, 15)
        me.meet_others()


def protect(me: Rank) -> None:
    """Whoever writes while the ranks do: each file is of the moment when all have called `save`."""
    torch_writing.STAGING_BYTES, torch_writing.STAGINGS = 256 << 10, 1  # little is read at once
    gate = threading.Event()
    handle = nvmeio.AioHandle(block_size=MIB, engine=FakeEngine(hold=gate))
    training = Training(me)
    with me.new(handle=handle) as checkpointer:
        for step in (1, 2, 3):
            gate.clear()
            wanted = training.copy()
            report = checkpointer.save_sync(training.state(), step)
            assert report.guarded_bytes == report.protected_bytes > 0, report
            assert report.copied_bytes <= 20_000, report
            training.step()
            if me.rank == me.world - 1:  # and one of them by hand
                for weight in training.weights:
                    weight.data += 1
                    weight.detach().numpy()[:] -= 1
            gate.set()
            done = checkpointer.wait_sync(PATIENCE_S)
            assert done is not None and done.moved_bytes > 0, done
            me.meet_others()
            assert same(checkpointer.restore(), wanted)
            me.meet_others()
    handle.close()


def shards(me: Rank) -> None:
    """What a rank has of a model of FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch_writing.STAGING_BYTES, torch_writing.STAGINGS = 64 << 10, 1
    model = torch.nn.Linear(512, 512)
    fully_shard(model, mesh=init_device_mesh("cpu", (me.world,)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def train() -> None:
        model(torch.ones(4, 512)).sum().backward()
        optimizer.step()

    def state() -> dict[str, torch.Tensor]:
        weight: Any = model.weight
        moment = optimizer.state[weight]["exp_avg"]
        return {"weight": weight.to_local(), "moment": moment.to_local()}

    train()
    gate = threading.Event()
    handle = nvmeio.AioHandle(engine=FakeEngine(hold=gate))
    with me.new(handle=handle) as checkpointer:
        for step in (1, 2, 3):
            gate.clear()
            wanted = {name: value.detach().clone() for name, value in state().items()}
            report = checkpointer.save_sync(state(), step)
            assert report.protected_bytes == 2 * 512 * 512 * 4 // me.world, report
            train()
            with torch.no_grad():
                model.weight.add_(step == 3)
            gate.set()
            done = checkpointer.wait_sync(PATIENCE_S)
            assert done is not None and done.moved_bytes > 0, done
            assert same(checkpointer.restore(), wanted)
            me.meet_others()
    handle.close()


def stream(me: Rank) -> None:
    """Parts that are larger than the memory, with the CRCs that no part knows alone."""
    handle = nvmeio.AioHandle()
    with me.new(memory_bytes=1, snapshot="copy", handle=handle) as checkpointer:
        for step in (1, 2):
            report = checkpointer.save_sync(replicated(step, 70 * MIB * me.world), step)
            assert report.snapshot_bytes == 64 * MIB < report.copied_bytes, report
            checkpointer.wait_sync(PATIENCE_S)
        me.meet_others()
        assert same(checkpointer.restore(), replicated(2, 70 * MIB * me.world))
    handle.close()


def restore(me: Rank) -> None:
    """By another number of ranks than have saved: `save` of two, both layouts."""
    checkpointer = me.new()
    for layout in ("one", "per_rank"):
        checkpointer._saver.directory = str(me.notes / layout / "checkpoints")
        if layout == "one":
            assert same(checkpointer.restore(), replicated(6))
            assert same(checkpointer.restore(5), replicated(5))
            continue
        found = checkpointer.restore()
        if me.world == 2:
            assert same(found, own(6, me.rank))
        else:
            assert same(found, [own(6, rank) for rank in range(2)])
        for rank in range(2):
            assert same(checkpointer.restore(rank=rank), own(6, rank))
        with me.raises(ValueError, "there is no rank 2: it was saved by 2"):
            checkpointer.restore(rank=2)


def many(me: Rank) -> None:
    """Collectives of the training beside the saves; and the store does not fill up."""
    total = torch.zeros(1000)
    keys = []
    with me.new() as checkpointer:
        for step in range(14):
            checkpointer.save_sync({"total": total}, step)
            total += 1
            dist.all_reduce(total)
            if step in (5, 13):
                checkpointer.wait_sync(PATIENCE_S)
                me.meet_others()
                keys.append(dist.distributed_c10d._get_default_store().num_keys())
                me.meet_others()
        found = checkpointer.restore()["total"] + 1
        assert torch.equal(found * me.world, total)
    assert keys[1] <= keys[0] + 3 * me.world, keys  # gloo's barriers have some of their own


def fail(me: Rank) -> None:
    """Whichever rank fails, and wherever: all raise, and go on with the next save."""
    last = me.world - 1
    with me.new() as checkpointer:
        for step in range(3):
            me.saved(checkpointer, step)
            me.meet_others()
        steps = checkpointer.steps()
        for turn, victim in enumerate({0, last}):
            at = 10 * (turn + 1)
            # A drive that fails
            me.errno = errno.ENOSPC if me.rank == victim else 0
            checkpointer.save_sync(me.state(at), at)
            with me.raises(nvmeio.TransferError, "ENOSPC") as told:
                checkpointer.wait_sync(PATIENCE_S)
            assert told[0].errno == errno.ENOSPC
            if me.rank != victim:
                text = f"rank {victim} of {me.world} could not save"
                assert str(told[0]).count("could not save") == 1 and text in str(told[0]), told
            me.errno = 0
            # A state that cannot be pickled
            state = {"f": lambda: None} if me.rank == victim else me.state(at)
            with me.raises(Exception, "pickle"):
                checkpointer.save_sync(state, at)
            # No memory
            new_arena = copies._new_arena
            if me.rank == victim:
                checkpointer._saver.setup.snapshots.release()
                copies._new_arena = no_memory  # type: ignore[assignment]
            with me.raises((MemoryError, nvmeio.TransferError), "no memory"):
                checkpointer.save_sync(me.state(at), at)
                checkpointer.wait_sync(PATIENCE_S)
            copies._new_arena = new_arena
            me.meet_others()
            assert checkpointer.latest_step() == 2
            assert set(checkpointer.steps()) <= set(steps) and len(checkpointer.steps()) >= 2
            assert same(checkpointer.restore(), me.state(2))
            left = [name for name in os.listdir(me.folder) if name.endswith("tmp")]
            assert not left or me.layout == "per_rank", left
            me.meet_others()
        # The next call raises it, too
        me.errno = errno.EIO if me.rank == last else 0
        checkpointer.save_sync(me.state(77), 77)
        with me.raises(nvmeio.TransferError, "EIO"):
            checkpointer.save_sync(me.state(78), 78)
        me.errno = 0
        me.saved(checkpointer, 78)
        me.meet_others()
        left = [name for name in os.listdir(me.folder) if name.endswith("tmp")]
        assert not left, left


def no_memory(nbytes: int) -> Any:
    raise MemoryError("there is no memory")


def disagree(me: Rank) -> None:
    """Ranks that do not save the same are told how, all of them."""
    last = me.world - 1
    odd = me.rank == last
    with me.new() as checkpointer:
        me.saved(checkpointer, 1)
        me.meet_others()
        with me.raises(ValueError, "rank 0 saves step 2", f"rank {last} step 3"):
            checkpointer.save_sync(me.state(2), 3 if odd else 2)
        me.meet_others()
        if me.layout == "one":
            state = me.state(2)
            other = state | {"more": torch.ones(3)} if odd else state
            with me.raises(ValueError, "storages", f"rank {last}"):
                checkpointer.save_sync(other, 2)
            other = state | {"odd": torch.ones(4 if odd else 3)}
            with me.raises(ValueError, "bytes of storages", f"rank {last}"):
                checkpointer.save_sync(other, 2)
            pair = (torch.ones(2), torch.ones(5))
            with me.raises(ValueError, f"rank {last}'s state differs", "the order"):
                checkpointer.save_sync({"a": pair[odd], "b": pair[not odd]}, 2)
            with me.raises(ValueError, f"rank {last}'s state differs", "structure, names"):
                checkpointer.save_sync({"a": torch.ones(2), "lr": 0.1 if odd else 0.2}, 2)
        me.meet_others()
        assert checkpointer.latest_step() == 1
        me.meet_others()
        me.saved(checkpointer, 2)
        me.meet_others()
    for name, options in (("layout", {"layout": "per_rank"}), ("checksum", {"checksum": False})):
        if name == "layout" and me.layout == "per_rank":
            options = {"layout": "one"}
        with (
            me.new(**(options if odd else {})) as checkpointer,
            me.raises(ValueError, name, f"rank {last}"),
        ):
            checkpointer.save_sync(me.state(3), 3)
        me.meet_others()


def late(me: Rank) -> None:
    """A rank that does not come is given up after the time limit, by all; then all go on."""
    with me.new(timeout_s=LIMIT_S) as checkpointer:
        if me.rank == 1:  # which comes when the others have given up
            me.meet_others()
        with me.raises(nvmeio.TransferError, "rank 1 of", "made no progress for 2.5 s") as told:
            checkpointer.save_sync(me.state(1), 1)
        if me.rank != 1:
            me.meet_others()
        assert isinstance(told[0], TimeoutError) and told[0].errno == errno.ETIMEDOUT
        set_limit(checkpointer, PATIENCE_S)
        me.meet_others()
        me.saved(checkpointer, 1)
        me.meet_others()


def refused(me: Rank) -> None:
    """A Checkpointer that one rank was not given leaves the ranks together, once it was given up.

    What was counted was each rank's own: no save of theirs came about again.
    """
    refusals: list[dict[str, Any]] = [{"process_group": "world"}, {"keep": 0}]
    for step, wrong in enumerate(refusals, 1):
        if me.rank == 0:
            with me.raises((TypeError, ValueError), f"{next(iter(wrong))} must be"):
                nvmeio.Checkpointer(me.folder, **{"process_group": dist.group.WORLD, **wrong})
        elif "keep" not in wrong:  # the others find that out by a save, or by a restore
            with (
                me.new(timeout_s=LIMIT_S) as checkpointer,
                me.raises(TimeoutError, "rank 0 of", "without this process_group"),
            ):
                checkpointer.save_sync(me.state(1), 1)
        else:
            with (
                me.new(timeout_s=LIMIT_S) as checkpointer,
                me.raises(TimeoutError, "rank 0 of", "without this process_group"),
            ):
                checkpointer.restore(together=True)
        me.meet_others()
        with me.new() as checkpointer:
            me.saved(checkpointer, step)
            me.meet_others()
    # Or it comes again while they wait; then nothing is left out
    if me.rank == 0:
        for wrong in (*refusals, {"writers": 9}):
            with me.raises((TypeError, ValueError), f"{next(iter(wrong))} must be"):
                nvmeio.Checkpointer(me.folder, **{"process_group": dist.group.WORLD, **wrong})
    with me.new() as checkpointer:
        me.saved(checkpointer, 3)
        me.meet_others()
    # One without a group, by mistake: the others say so
    if me.rank == 0:
        with nvmeio.Checkpointer(me.folder, 2) as checkpointer:
            checkpointer.save_sync(me.state(4), 4)
    else:
        with (
            me.new(timeout_s=LIMIT_S) as checkpointer,
            me.raises(TimeoutError, "rank 0 of", "without this process_group"),
        ):
            checkpointer.save_sync(me.state(4), 4)
    me.meet_others()
    with me.new() as checkpointer:
        me.saved(checkpointer, 5)
        me.meet_others()


def refused_calls(me: Rank) -> None:
    """What one rank is refused is told to those that wait for it, and the next call is whole."""
    refused: Any = me.rank == 0
    error = (ValueError, TypeError) if refused else nvmeio.TransferError
    with me.new() as checkpointer:
        me.saved(checkpointer, 1)
        me.meet_others()
        bad: list[dict[str, Any]] = [{"step": -1}, {"step": 2.5}, {"step": 2, "progress": 3}]
        for at, wrong in enumerate(bad):
            options: Any = wrong if refused else {"step": 2}
            with me.raises(error, "step" if "progress" not in wrong else "progress"):
                checkpointer.save_sync(me.state(2), **options)

            async def save(at: int = 3 * at + 3, options: Any = options) -> None:
                before = checkpointer.save(me.state(at), at)
                saving = checkpointer.save(me.state(2), **options)
                await before
                await saving

            with me.raises(error, "step" if "progress" not in wrong else "progress"):
                asyncio.run(save())
            me.saved(checkpointer, 3 * at + 4)
            me.meet_others()
        for wrong in ({"rank": -1}, {"step": -1}, {"progress": 3}):
            options = wrong if refused else {}
            with me.raises(error, *wrong):
                checkpointer.restore(**options, together=True)
            with me.raises(error, *wrong):
                asyncio.run(checkpointer.async_restore(**options, together=True))
            assert same(checkpointer.restore(together=True), me.state(10))
        me.meet_others()


def slow(me: Rank) -> None:
    """A rank that is slow is waited for, as long as it gets on.

    On a clock of all ranks, which only its drive moves on: 40 ms with each MiB, 3.2 s in all.
    """
    last = me.world - 1
    ticks, late = me.notes / "ticks", 1.1 * LIMIT_S
    ticks.touch()

    def clock() -> float:
        now = ticks.stat().st_size * 0.04
        if now > late and me.rank != last:
            looked.append(now)
            if len(looked) == 5:  # the look before this one has given up nobody
                me.tell("looked", str(now))
        return now

    def tick(kind: str, offset: int, nbytes: int) -> int:
        if kind == "pwrite" and me.rank == last:
            with ticks.open("ab") as file:
                file.write(b".")
            if clock() > late:
                me.told("looked")  # by who waits for this rank
        return 0

    looked: list[float] = []
    handle = nvmeio.AioHandle(block_size=MIB, queue_depth=1, engine=FakeEngine(fail=tick))
    state = replicated(1, 80 * MIB * me.world)
    with me.new(timeout_s=LIMIT_S, memory_bytes=1, handle=handle) as checkpointer:
        tell_time_by(clock)
        checkpointer.save_sync(state, 1)
        checkpointer.wait_sync(PATIENCE_S)
        assert clock() > late
        assert same(checkpointer.restore(), state)
    handle.close()


def cancel(me: Rank) -> None:
    """Cancelling does not wait for the others, who are told."""

    async def main(checkpointer: nvmeio.Checkpointer) -> None:
        await checkpointer.save(me.state(1), 1)
        await checkpointer.wait()
        me.meet_others()
        for _ in range(2):
            if me.rank == 0:  # it waits for rank 1, which has not called yet
                with me.raises(asyncio.TimeoutError, within_s=PATIENCE_S - 2):
                    await asyncio.wait_for(checkpointer.save(me.state(2), 2), 0.2)
                me.meet_others()
            else:
                me.meet_others()
                with me.raises(nvmeio.TransferError, "rank 0 of", "it was cancelled"):
                    await checkpointer.save(me.state(2), 2)
        # While the save before is written, that is before anything of this one has begun
        await checkpointer.save(me.state(3), 3)
        saving = asyncio.create_task(checkpointer.save(me.state(4), 4))
        if me.rank == 0:
            await asyncio.sleep(0)
            saving.cancel()
            with me.raises(asyncio.CancelledError):
                await saving
        else:
            with me.raises(nvmeio.TransferError, "rank 0 of", "it was cancelled"):
                await saving
                await checkpointer.wait()
        me.meet_others()
        await checkpointer.save(me.state(5), 5)
        await checkpointer.wait()
        me.meet_others()
        assert checkpointer.latest_step() == 5
        assert 4 not in checkpointer.steps()
        assert same(checkpointer.restore(), me.state(5))

    with me.new(timeout_s=2 * PATIENCE_S) as checkpointer:
        asyncio.run(main(checkpointer))


def interrupted(me: Rank) -> None:
    """Ctrl-C on one rank before its thread has the save: the others are told, and do not wait."""

    @contextlib.contextmanager
    def interrupting(owner: Any, name: str, behind: bool) -> Iterator[None]:
        real, left = getattr(owner, name), [me.rank == 0]

        def interrupt(*args: Any, **options: Any) -> Any:
            if behind and left[0]:
                real(*args, **options)
            if left[0]:
                left[0] = False
                raise KeyboardInterrupt
            return real(*args, **options)

        setattr(owner, name, interrupt)
        yield
        setattr(owner, name, real)
        assert not left[0]

    async def save(checkpointer: nvmeio.Checkpointer, step: int) -> None:
        await checkpointer.save(me.state(step), step)

    begins: list[tuple[Any, str, bool]] = [
        (saver_module.SaveCall, "__init__", True),
        (interruptible.Job, "start", False),
    ]
    places = [
        *begins,
        (saver_module.SaveCall, "pickle", False),
        (saver_module.SaveCall, "pickle", True),
        (checkpointer_module, "run_interruptible", False),
        (interruptible.Job, "start", True),
    ]
    error = KeyboardInterrupt if me.rank == 0 else nvmeio.TransferError
    with me.new(timeout_s=2 * PATIENCE_S) as checkpointer:
        for step, (owner, name, behind) in enumerate([*places, *begins]):
            with me.raises(error, "" if me.rank == 0 else "rank 0 of"):
                with interrupting(owner, name, behind):
                    if step < len(places):
                        checkpointer.save_sync(me.state(2 * step), 2 * step)
                    else:
                        asyncio.run(save(checkpointer, 2 * step))
                checkpointer.wait_sync(PATIENCE_S)
            me.saved(checkpointer, 2 * step + 1)
            me.meet_others()


def killed(me: Rank, victim: int, moment: str, writers: str | int = "all") -> bool:
    """One rank is killed in the middle of a save; the others raise, and soon."""
    with contextlib.ExitStack() as stack:
        checkpointer = me.new(writers=writers)
        stack.callback(checkpointer.close)
        if me.rank == victim:
            me.tell("victim", str(os.getpid()))
        for step in range(3):
            me.saved(checkpointer, step)
            me.meet_others()
        sync_nothing()
        set_limit(checkpointer, LIMIT_S)
        tell_time_by(since_the_end_of(int(me.told("victim"))))
        if me.rank == victim:
            if moment == "writing":
                me.kill_at = 0
            elif moment == "committing":
                me.kill_at = -1
                kill_in_commit(me)
            elif moment != "before":
                kill_after_telling(moment)
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        with me.raises(nvmeio.TransferError) as told:
            checkpointer.save_sync(me.state(3), 3)
            checkpointer.wait_sync(PATIENCE_S)
            raise AssertionError("saved")
        assert told[0].errno in (errno.ETIMEDOUT, errno.ECONNRESET), told
        assert f"rank {victim} of" in str(told[0]) or "is gone" in str(told[0]), told
        assert checkpointer.latest_step() == 2
        assert same(checkpointer.restore(), me.state(2))
    return False


def kill_in_commit(me: Rank) -> None:
    """When this rank would make its part durable."""

    def kill(fd: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    os.fdatasync = kill  # type: ignore[assignment]


def kill_after_telling(last: str) -> None:
    """Between two messages: once the others can hear the first one."""
    put = ranks_module.Messages.put

    def tell(self: ranks_module.Messages, name: str, value: bytes) -> None:
        put(self, name, value)
        if name == last:
            os.kill(os.getpid(), signal.SIGKILL)

    ranks_module.Messages.put = tell  # type: ignore[method-assign]


def killed_sometime(me: Rank, victim: int, after_s: float) -> bool:
    """Killed at a random moment; what the others know to be durable is there."""
    killing = threading.Timer(after_s, lambda: os.kill(os.getpid(), signal.SIGKILL))
    name = f"victim-{me.number}"
    if me.rank == victim:
        me.tell(name, str(os.getpid()))
    sync_nothing()
    tell_time_by(since_the_end_of(int(me.told(name))))
    checkpointer = me.new(timeout_s=LIMIT_S)
    step = checkpointer.latest_step() or 0
    try:
        for _ in range(1000):
            if step and me.rank == victim and not killing.is_alive():
                killing.start()  # not before the first is durable, however slow the machine
            checkpointer.save_sync(me.state(step + 1), step + 1)
            checkpointer.wait_sync(PATIENCE_S)
            step += 1
            (me.notes / f"durable-{me.rank}").write_text(str(step))
    except nvmeio.TransferError as failed:
        assert failed.errno in (errno.ETIMEDOUT, errno.ECONNRESET), failed
    else:
        raise AssertionError("it was never killed")
    with contextlib.suppress(nvmeio.TransferError):
        checkpointer.close()
    latest = checkpointer.latest_step()
    assert step <= (latest or 0) <= step + 1, (step, latest)
    if latest is not None:  # the first one was durable before it was killed
        assert same(checkpointer.restore(), me.state(latest))
    return False


def resume(me: Rank) -> None:
    """After what others have left: it is removed, and saving goes on."""
    with me.new() as checkpointer:
        step = checkpointer.latest_step()
        assert step is not None
        assert same(checkpointer.restore(), me.state(step))
        me.meet_others()
        for more in range(1, 5):
            me.saved(checkpointer, step + more)
            me.meet_others()
        left = [name for name in os.listdir(me.folder) if name.endswith("tmp")]
        assert not left, left


def leave(me: Rank) -> bool:
    """Rank 0, which serves the store, ends its process right after it has closed."""
    job._PARTING_S = PATIENCE_S  # it waits as long as the others need to see that it is over
    if me.rank:
        rank_store_module.FIRST_PAUSE_S = rank_store_module.MOST_PAUSE_S = (
            0.5  # who asks late learns late
        )
    with me.new() as checkpointer:
        checkpointer.save_sync(me.state(1), 1)
    assert checkpointer.steps() == [1]
    return False


def subgroups(me: Rank) -> None:
    """Each half saves on its own; who is no member makes no Checkpointer."""
    halves = [[0, 1], [2, 3]]
    groups = [dist.new_group(half) for half in halves]
    mine = me.rank // 2
    folder = me.folder / str(mine)
    me.folder.mkdir(exist_ok=True)
    with nvmeio.Checkpointer(folder, process_group=groups[mine]) as checkpointer:
        for step in range(3 + mine):
            checkpointer.save_sync(replicated(step), step)
        checkpointer.wait_sync(PATIENCE_S)
        assert checkpointer.latest_step() == 2 + mine
        assert same(checkpointer.restore(), replicated(2 + mine))
    with me.raises((TypeError, ValueError), "process_group"):
        nvmeio.Checkpointer(folder, process_group=groups[1 - mine])


def devices(me: Rank) -> None:
    """Each rank's tensors are on a device of its own, as their pickles say: it is one state."""

    def tag(storage: Any) -> str:
        return f"device:{me.rank * 11}"

    def put(storage: Any, location: str) -> Any:
        return storage if location.startswith("device:") else None

    torch.serialization.register_package(1, tag, put)
    with me.new() as checkpointer:
        me.saved(checkpointer, 1)
        me.meet_others()
        data = next(iter(me.folder.glob("step-*"))).read_bytes()
        assert b"device:0" in data and b"device:11" not in data
        me.meet_others()


def busy(me: Rank) -> None:
    """Somebody else saves there: all ranks are told."""
    if me.rank == 0:
        other = nvmeio.Checkpointer(me.folder)
    me.meet_others()
    for restoring in (False, True):
        with (
            me.raises(nvmeio.TransferError, "another Checkpointer") as told,
            me.new() as checkpointer,  # refused to rank 0, and the others hear of it
        ):
            if restoring:
                checkpointer.restore(together=True)
            checkpointer.save_sync(me.state(1), 1)
        assert told[0].errno == errno.EBUSY
        me.meet_others()
    if me.rank == 0:
        other.close()
    with me.new() as checkpointer:
        me.saved(checkpointer, 1)
        me.meet_others()


def anew(me: Rank) -> None:
    """A new run in an old run's directory: all ranks are refused, or none."""
    with me.new() as checkpointer:
        me.saved(checkpointer, 5)
        me.meet_others()
    with me.new() as checkpointer:
        with me.raises(FileExistsError, "step 5 is the latest", "overwrite=True"):
            checkpointer.save_sync(me.state(2), 2)
        me.meet_others()
        assert checkpointer.steps() == [5]
        me.meet_others()
        # One restores, and sends it to the others maybe; from drives of their own it takes all.
        if me.rank == me.world - 1 or checkpointer._saver.setup.drives is not None:
            checkpointer.restore()
        me.saved(checkpointer, 2)
        me.meet_others()
    with me.new(overwrite=me.rank == 0) as checkpointer:
        me.saved(checkpointer, 1)
        me.meet_others()
    with me.new(read_only=me.rank == 0) as checkpointer:
        error = ValueError if me.rank == 0 else nvmeio.TransferError
        with me.raises(error, "read_only=True"):
            checkpointer.save_sync(me.state(9), 9)
        me.meet_others()


def drop(me: Rank) -> bool:
    """The process group is destroyed with a save under way: an error that says so, no hang."""
    checkpointer = me.new()
    checkpointer.save_sync(me.state(1), 1)
    checkpointer.wait_sync(PATIENCE_S)
    me.meet_others()
    set_limit(checkpointer, LIMIT_S)
    if me.rank == 0:
        checkpointer.close()
        dist.destroy_process_group()
        return False
    with me.raises(nvmeio.TransferError):
        checkpointer.save_sync(me.state(2), 2)
    checkpointer.close()
    return False


WORK: dict[str, Callable[..., bool | None]] = {
    work.__name__: work
    for work in (
        save,
        some_write,
        protect,
        shards,
        stream,
        restore,
        many,
        fail,
        disagree,
        late,
        refused,
        refused_calls,
        slow,
        cancel,
        interrupted,
        killed,
        killed_sometime,
        resume,
        leave,
        subgroups,
        devices,
        anew,
        busy,
        drop,
    )
}


# Processes


def run(order: dict[str, Any]) -> dict[str, Any]:
    """Fork ranks (and whoever serves the store), and wait for all of them."""
    folder = Path(order["folder"])
    folder.mkdir(exist_ok=True)
    world, limit_s = order["world"], order["limit_s"]
    port_file = folder / f"port-{order['number']}"
    server = fork(lambda: serve(port_file), folder / "server") if order["store"] == "tcp" else 0
    logs = [folder / f"log-{order['number']}-{rank}" for rank in range(world)]
    ranks = [
        fork(lambda rank=rank: be_rank(order, rank, port_file), log)  # type: ignore[misc]
        for rank, log in enumerate(logs)
    ]
    codes: dict[int, int] = {}
    until = time.monotonic() + limit_s + 5
    while len(codes) < world:
        for pid in ranks:
            if pid not in codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(ended[1])
        if time.monotonic() > until:
            for pid in ranks:
                if pid not in codes:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    if server:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
    return {"codes": [codes[pid] for pid in ranks], "logs": [log.read_text() for log in logs]}


def fork(work: Callable[[], None], log: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # gloo may abort a process that ends in the usual way


def serve(port_file: Path) -> None:
    """The store in a process that is no rank, as torchrun has it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    publish(port_file, store.port)
    signal.pause()


def publish(port_file: Path, port: int) -> None:
    port_file.with_suffix(".new").write_text(str(port))
    port_file.with_suffix(".new").rename(port_file)


def open_store(order: dict[str, Any], rank: int, port_file: Path) -> Any:
    if order["store"] == "file":
        return dist.FileStore(str(port_file) + ".store", order["world"])
    options: Any = {"wait_for_workers": False, "timeout": timedelta(seconds=PATIENCE_S)}
    if order["store"] == "rank 0" and rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, **options)
        publish(port_file, store.port)
        return store
    until = time.monotonic() + PATIENCE_S
    while not port_file.exists():
        assert time.monotonic() < until
        time.sleep(0.005)
    return dist.TCPStore("127.0.0.1", int(port_file.read_text()), is_master=False, **options)


def be_rank(order: dict[str, Any], rank: int, port_file: Path) -> None:
    faulthandler.dump_traceback_later(order["limit_s"], exit=True)
    warnings.simplefilter("error")
    world = order["world"]
    dist.init_process_group(
        "gloo",
        store=open_store(order, rank, port_file),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=PATIENCE_S),
    )
    me = Rank(Path(order["folder"]), rank, world, order["layout"], order["number"])
    if WORK[order["work"]](me, **order["arguments"]) is not False:
        dist.barrier()


def main() -> None:
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    gc.freeze()  # a collection in a rank would look at all of torch's objects, and copy their pages
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
