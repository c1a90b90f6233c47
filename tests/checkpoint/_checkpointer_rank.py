"""The ranks of test_checkpointer_ranks.py: what they do; run by `_rank_program`."""

from __future__ import annotations

import asyncio
import errno
import json
import threading
from typing import Any

import torch
import torch.distributed as dist
from checkpoint import _failing_rank, _rank_program
from checkpoint._rank_program import MIB, PATIENCE_S, Rank, Work, own, replicated, same
from inside import saver_of

import nvmeio
import nvmeio.checkpoint
from nvmeio._formats.torch_archives import torch_writing
from nvmeio.checkpoint._multi_rank import agreement
from nvmeio.testing import FakeEngine


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
        with me.raises(Exception, "<lambda>"):
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
        saver_of(checkpointer).directory = str(me.notes / layout / "checkpoints")
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
        with me.raises(ValueError, "rank 2 is out of range: ranks 0 to 1"):
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
        if me.rank == me.world - 1 or saver_of(checkpointer).setup.drives is not None:
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


WORK: Work = _failing_rank.WORK | {
    work.__name__: work
    for work in (
        save,
        some_write,
        protect,
        shards,
        stream,
        restore,
        many,
        subgroups,
        devices,
        anew,
        busy,
    )
}

if __name__ == "__main__":
    _rank_program.main(WORK)
