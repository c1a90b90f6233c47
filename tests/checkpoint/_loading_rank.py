"""The ranks of test_loading_ranks.py: what they do, run by `_rank_program`."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import pickle
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint import _rank_program
from checkpoint._checkpointer_rank import Training
from checkpoint._rank_program import (
    LIMIT_S,
    MIB,
    PATIENCE_S,
    Rank,
    Work,
    own,
    replicated,
    same,
    sync_nothing,
)
from inside import saver_of
from support import nvmeio_threads, spin_until_collected

import nvmeio
from nvmeio._distributed import messages as messages_module
from nvmeio._distributed import shared_spans
from nvmeio._memory import system
from nvmeio._threads.interruptible import Cancelled
from nvmeio.checkpoint._multi_rank import loading_ranks
from nvmeio.testing import FakeEngine

KINDS = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)


def all_kinds() -> dict[str, Any]:
    """Of every dtype, quantised ones too; tied, empty, small ones, and what is no tensor."""
    generator = torch.Generator().manual_seed(7)
    state: dict[str, Any] = {
        str(dtype): torch.randint(0, 255, (1001, 8), generator=generator, dtype=torch.uint8)
        .view(torch.uint8 if dtype is torch.bool else dtype)
        .to(dtype)
        for dtype in KINDS
    }
    rows = torch.randn(64, 100, generator=generator)
    state["quantised"] = torch.quantize_per_tensor(rows, 0.05, 3, torch.qint8)
    state["empty"] = torch.empty(0, 5)
    state["tied"] = state["torch.float32"][7:9]
    state["text"] = {"names": ["a", "b"], "step": 3, "bytes": b"x" * 300_000}
    return state


def few(step: int, large: int) -> dict[str, Any]:
    """So few records that their headers are read through the page cache: all else is storages."""
    rows = torch.randn(531, 517, generator=torch.Generator().manual_seed(step))
    return {"step": step, "rows": rows, "large": torch.full((large,), step, dtype=torch.uint8)}


def bits(value: Any) -> Any:
    """For comparing: NaNs are equal, and quantised ones are what they are made of."""
    if isinstance(value, torch.Tensor):
        plain = value.int_repr() if value.is_quantized else value
        return str(value.dtype), list(value.shape), plain.contiguous().view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {name: bits(each) for name, each in value.items()}
    return value


def handle_of(me: Rank, **options: Any) -> nvmeio.AioHandle:
    return nvmeio.AioHandle(engine=FakeEngine(fail=me._meet), **options)


def written(me: Rank, name: str, state: Any) -> Path:
    """A file that rank 0 has written, once all know that."""
    path = me.notes / name
    if me.rank == 0:
        nvmeio.save(state, path)
    me.meet_others()
    return path


def load(path: Any, **options: Any) -> Any:
    return nvmeio.load(path, process_group=dist.group.WORLD, **{"timeout_s": PATIENCE_S, **options})


def nothing_stays() -> None:
    """Threads and the group of the load are given back."""
    spin_until_collected(lambda: not {t for t in nvmeio_threads() if "exchange" in t.name})


def small_parts() -> None:
    shared_spans.PART_BYTES = 64 << 10


# What ranks do


def shares(me: Rank) -> None:
    """Each byte is read by one rank, an equal part by each."""
    # So few records that rank 0 reads their headers through the page cache
    sizes = (5_000_003, 900_001, 1_300_007, 77, 10_000_019)
    state = {str(size): torch.full((size,), size % 251, dtype=torch.uint8) for size in sizes}
    path = written(me, "state.pt", state)
    for turn, part_bytes in enumerate((16 * MIB, 64 << 10)):
        shared_spans.PART_BYTES = part_bytes
        me.read.clear()
        with handle_of(me) as handle:
            assert same(load(path, handle=handle), state)
        (me.notes / f"read-{turn}-{me.rank}.json").write_text(json.dumps(me.read))
    nothing_stays()


def kinds(me: Rank) -> None:
    """Whatever torch saves, to wherever it is wanted."""
    warnings.simplefilter("ignore")  # torch's own, of quantised tensors
    small_parts()
    state = all_kinds()
    wanted = bits(state)
    path = written(me, "kinds.pt", state)
    found = load(path)
    assert bits(found) == wanted
    assert found["tied"].data_ptr() == found["torch.float32"][7].data_ptr()
    assert bits(load(path, map_location=lambda storage, _: storage)) == wanted
    assert bits(load(path, weights_only=False)) == wanted
    # Each its own device: one wants none of the bytes, the others have them all the same
    plain = written(me, "plain.pt", replicated(1))
    found = load(plain, map_location={"cpu": "meta"} if me.rank == 1 else None)
    if me.rank == 1:
        assert found["rows"].is_meta and found["rows"].shape == (531, 517)
    else:
        assert same(found, replicated(1))
    assert load(plain, map_location="meta")["rows"].is_meta
    with me.raises(ValueError, "on the meta device"):
        load(plain, map_location="meta" if me.rank == 1 else None)
    # What ranks cannot share, each of them reads
    assert bits(load(path, mmap=True)) == wanted
    older = me.notes / "older.pt"
    if me.rank == 0:
        torch.save({"a": torch.ones(5)}, older, _use_new_zipfile_serialization=False)
    me.meet_others()
    assert same(load(older), {"a": torch.ones(5)})
    empty = written(me, "empty.pt", {})
    assert load(empty) == {}
    assert bits(asyncio.run(load_awaited(path))) == wanted


async def load_awaited(path: Path) -> Any:
    return await nvmeio.async_load(path, process_group=dist.group.WORLD, timeout_s=PATIENCE_S)


def chunks(me: Rank) -> None:
    """On the way to a device: through chunks, of which there are few."""
    small_parts()
    state = few(2, 3 * MIB)
    path = written(me, "state.pt", state)
    made: list[int] = []
    new = shared_spans.Stagings

    def chunks_of(*arguments: Any) -> Any:
        made.append(1)
        return new(*arguments)

    shared_spans.Stagings = chunks_of  # type: ignore[assignment, misc]
    if me.rank != 1:  # one of them on the host
        shared_spans.on_host = lambda device: False
    assert same(load(path), state)
    assert made == [1, 1] * (me.rank != 1)  # of what it reads, and of what others send


def fail(me: Rank) -> None:
    """Whichever rank fails, and of what: all raise, say so, and load the next time."""
    small_parts()
    state = few(3, 2 * MIB)
    path = written(me, "state.pt", state)
    last = me.world - 1
    handle = handle_of(me)
    for victim in (0, last):
        hurt = me.rank == victim
        told = f"rank {victim} of {me.world} could not load"
        me.read_errno = errno.EIO if hurt else 0
        with me.raises(nvmeio.TransferError, "EIO", "read for record" if hurt else told) as raised:
            load(path, handle=handle)
        assert raised[0].errno == errno.EIO
        me.read_errno = 0
        assert same(load(path, handle=handle), state)
        memory: Any = system
        check, memory.check_available = memory.check_available, no_memory
        if not hurt:
            memory.check_available = check
        with me.raises(MemoryError if hurt else nvmeio.TransferError, "no memory"):
            load(path, handle=handle)
        memory.check_available = check
        with me.raises(FileNotFoundError, "ENOENT", "nowhere" if hurt else told):
            load(me.notes / "nowhere" if hurt else path, handle=handle)
        with me.raises(TypeError if hurt else nvmeio.TransferError, "pickle_module"):
            load(path, handle=handle, **({"pickle_module": True} if hurt else {}))
        with me.raises((RuntimeError, nvmeio.TransferError), "nodevice"):
            load(path, handle=handle, map_location="nodevice" if hurt else None)
        closed = handle_of(me)
        closed.close()
        with me.raises((nvmeio.ClosedError, nvmeio.TransferError), "closed"):
            load(path, handle=closed if hurt else handle)
        assert same(load(path, handle=handle), state)
    # The group is what it was
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [me.world] * 3
    handle.close()
    nothing_stays()


def no_memory(*_: Any) -> None:
    raise MemoryError("there is no memory")


def files(me: Rank) -> None:
    """Files that differ, damaged ones, and such as nobody should unpickle."""
    state = replicated(4)
    path = written(me, "state.pt", state)
    other = written(me, "other.pt", replicated(5))
    longer = written(me, "longer.pt", replicated(4, MIB))
    for wrong, text in ((other, "other records"), (longer, "bytes, where rank 0 has")):
        with me.raises(nvmeio.IntegrityError, "rank 1 has another file than rank 0", text):
            load(wrong if me.rank == 1 else path)
    cut = me.notes / "cut.pt"
    if me.rank == 0:
        cut.write_bytes(path.read_bytes()[:-100])
    me.meet_others()
    with me.raises(nvmeio.IntegrityError if me.rank == 0 else nvmeio.TransferError, "cut.pt"):
        load(cut)
    unsafe = me.notes / "unsafe.pt"
    if me.rank == 0:
        torch.save({"a": torch.ones(4), "f": Path("/")}, unsafe)
    me.meet_others()
    with me.raises(pickle.UnpicklingError, "weights_only"):
        load(unsafe)
    assert load(unsafe, weights_only=False)["f"] == Path("/")
    for group in (3, "world"):
        with me.raises(TypeError, "process_group must be"):
            nvmeio.load(path, process_group=group)  # type: ignore[arg-type]
    with me.raises(ValueError, "timeout_s must be more than 0"):
        load(path, timeout_s=0)
    # Some ranks of many
    half = dist.new_group([0, 1])
    if me.rank < 2:
        assert same(nvmeio.load(path, process_group=half), state)
    else:
        with me.raises((TypeError, ValueError), "process_group"):
            nvmeio.load(path, process_group=half)
    me.meet_others()
    assert same(load(path), state)


def refused(me: Rank) -> None:
    """What one rank alone is refused leaves the ranks together.

    Each counted its calls for itself: after a call that one rank was refused before it was counted,
    no load of these ranks came about again.
    """
    state = replicated(7)
    path = written(me, "state.pt", state)
    with me.raises(ValueError if me.rank == 0 else nvmeio.TransferError, "timeout_s must be"):
        load(path, **({"timeout_s": 0} if me.rank == 0 else {}))
    assert same(load(path), state)
    if me.rank == 0:  # it cannot tell the others, who give it up
        with me.raises(TypeError, "process_group must be"):
            nvmeio.load(path, process_group="world")  # type: ignore[arg-type]
    else:
        with me.raises(TimeoutError, "rank 0 of", "did not call load"):
            load(path, timeout_s=LIMIT_S)
    me.meet_others()
    assert same(load(path), state)
    if me.rank == 0:  # or who is refused comes again while they wait
        with me.raises(TypeError, "process_group must be"):
            nvmeio.load(path, process_group="world")  # type: ignore[arg-type]
    assert same(load(path), state)
    # A file that one rank does not have is no reason to leave a call out
    with me.raises(TypeError, "process_group must be"):
        nvmeio.load(path, process_group="world")  # type: ignore[arg-type]
    if me.rank != 0:
        with me.raises(FileNotFoundError):
            load(me.notes / "nowhere")
    me.meet_others()
    if me.rank == 0:
        with me.raises(FileNotFoundError, "rank 1 of"):
            load(path)
    assert same(load(path), state)
    # Checkpointers are counted as well
    with me.raises(ValueError, "writers must be") if me.rank == 0 else contextlib.nullcontext():
        me.new(writers=me.world + 1 if me.rank == 0 else "all").close()
    if me.rank == 0:
        me.new().close()
    with me.new() as checkpointer:
        me.saved(checkpointer, 1)
        me.meet_others()


def late(me: Rank) -> None:
    """A rank that does not come is given up by all, and the next load is whole."""
    state = replicated(6)
    path = written(me, "state.pt", state)
    if me.rank == 1:
        me.meet_others()
    with me.raises(TimeoutError, "rank 1 of", "did not call load") as raised:
        load(path, timeout_s=LIMIT_S)
    assert raised[0].errno == errno.ETIMEDOUT
    if me.rank != 1:
        me.meet_others()
    assert same(load(path), state)


def killed(me: Rank, victim: int) -> bool:
    """A rank that dies in the middle of its reads."""
    small_parts()
    path = written(me, "state.pt", few(7, 8 * MIB))
    handle = handle_of(me)
    me.kill_reading = me.rank == victim
    with me.raises(nvmeio.TransferError) as raised:
        load(path, handle=handle, timeout_s=60)
    assert raised[0].errno in (errno.ECONNRESET, errno.ETIMEDOUT), raised
    assert raised[0].operation == "load"
    assert same(nvmeio.load(path, handle=handle), few(7, 8 * MIB))  # by itself
    handle.close()
    return False


def hangs(me: Rank) -> bool:
    """A rank that goes no further is given up."""
    small_parts()
    path = written(me, "state.pt", few(7, 8 * MIB))
    if me.rank == 1:
        me.read_gate = threading.Event()
    handle = handle_of(me)
    if me.rank == 1:
        waiting = threading.Thread(target=lambda: quietly(path, handle), daemon=True)
        waiting.start()
        me.told("given up")
        return False
    with me.raises(nvmeio.TransferError, "no progress for 2.5 s") as raised:
        load(path, handle=handle, timeout_s=LIMIT_S)
    assert raised[0].errno == errno.ETIMEDOUT
    if me.rank == 0:
        me.tell("given up", "")
    return False


def quietly(path: Path, handle: nvmeio.AioHandle) -> None:
    with contextlib.suppress(Exception):
        load(path, handle=handle)


def interrupted(me: Rank) -> None:
    """Ctrl-C on one rank, in the middle of its reads, or while it waits for another one."""
    small_parts()
    state = few(8, 4 * MIB)
    path = written(me, "state.pt", state)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    handle = handle_of(me)
    stopped = cancelled_loads()
    if me.rank == 0:
        me.read_gate = threading.Event()
        pressing = threading.Thread(target=press_when_reading, args=(me, stopped))
        pressing.start()
    with me.raises(KeyboardInterrupt if me.rank == 0 else nvmeio.TransferError) as raised:
        load(path, handle=handle)
    if me.rank == 0:
        pressing.join()
        me.read_gate = None
    else:
        assert "rank 0 of" in str(raised[0]) and "it was cancelled" in str(raised[0]), raised
    me.meet_others()
    if me.rank == 0:  # it waits for rank 1, which has not come
        gather = messages_module.Messages.gather

        def press_and_gather(messages: Any, name: str) -> list[bytes]:
            os.kill(os.getpid(), signal.SIGINT)
            return gather(messages, name)

        messages_module.Messages.gather = press_and_gather  # type: ignore[assignment, method-assign]
        with me.raises(KeyboardInterrupt):
            load(path, handle=handle)
        messages_module.Messages.gather = gather  # type: ignore[assignment, method-assign]
    me.meet_others()
    if me.rank != 0:
        with me.raises(nvmeio.TransferError, "rank 0 of", "it was cancelled"):
            load(path, handle=handle)
    me.meet_others()
    assert same(load(path, handle=handle), state)

    # Between its telling what it sees and its connecting, where others wait for it
    exchange = messages_module.Exchange
    if me.rank == 0:
        messages_module.Exchange = cancelled  # type: ignore[assignment, misc]
    with me.raises(Cancelled if me.rank == 0 else nvmeio.TransferError, within_s=PATIENCE_S - 20):
        load(path, handle=handle)
    messages_module.Exchange = exchange  # type: ignore[misc]
    assert same(load(path, handle=handle), state)

    async def cancel() -> None:
        loading = asyncio.create_task(load_awaited(path))
        if me.rank == 0:
            await asyncio.sleep(0)
            loading.cancel()
        with contextlib.suppress(nvmeio.TransferError):  # or it was just done
            try:
                await loading
            except asyncio.CancelledError:
                assert me.rank == 0
            else:
                assert me.rank != 0

    asyncio.run(cancel())
    assert same(load(path, handle=handle), state)
    handle.close()


def cancelled(*_: Any) -> None:
    """In place of what connects the ranks; the others are on their way to wait in it."""
    time.sleep(0.3)
    raise Cancelled


def cancelled_loads() -> threading.Event:
    """Is set when a load of this process, from now on, has been cancelled on all that it does."""
    found = threading.Event()
    listen = loading_ranks.LoadingRanks.listen

    def note(ranks: Any, call: Any) -> None:
        listen(ranks, call)
        call.then(found.set)

    loading_ranks.LoadingRanks.listen = note  # type: ignore[assignment, method-assign]
    return found


def press_when_reading(me: Rank, cancelled: threading.Event) -> None:
    """The reads go on when the interrupt was seen: so it comes in their middle."""
    assert me.reading.wait(PATIENCE_S)
    os.kill(os.getpid(), signal.SIGINT)
    assert cancelled.wait(PATIENCE_S)
    assert me.read_gate is not None
    me.read_gate.set()


def restore(me: Rank) -> None:
    """A Checkpointer's, of both layouts, recycled, with a step while it saves."""
    training = Training(me)
    with me.new(keep=1) as checkpointer:
        for step in range(1, 5):  # from the third on into a file that was there
            wanted = training.copy()
            checkpointer.save_sync(training.state(), step)
            training.step()
            checkpointer.wait_sync(PATIENCE_S)
            me.meet_others()
            me.read.clear()
            assert same(checkpointer.restore(together=True), wanted)
            if me.layout == "one":
                nbytes = sum(nbytes for _, nbytes in me.read)
                whole = os.stat(me.folder / "latest").st_size
                assert nbytes <= whole // me.world + 64 * 1024, (nbytes, whole)
            me.meet_others()
        assert same(asyncio.run(checkpointer.async_restore(4, together=True)), wanted)
        with me.raises(FileNotFoundError, "there is no step 77"):
            checkpointer.restore(77, together=True)
        me.meet_others()
        if me.rank == 0:  # who looks for the newest finds what rank 0 finds
            os.unlink(me.folder / "latest")
        me.meet_others()
        assert same(checkpointer.restore(together=True), wanted)
        # One rank sees another directory
        if me.rank == 1:
            saver_of(checkpointer).directory = str(me.notes / "elsewhere")
        with me.raises(nvmeio.TransferError, "does not see the same directory") as raised:
            checkpointer.restore(together=True)
        assert raised[0].errno == errno.ESTALE
        saver_of(checkpointer).directory = str(me.folder)
        assert same(checkpointer.restore(together=True), wanted)
        me.meet_others()


def restore_more(me: Rank) -> None:
    """By another number of ranks than have saved: both layouts of `save` by two."""
    for layout in ("one", "per_rank"):
        me.folder = me.notes / layout / "checkpoints"
        with me.new(layout=layout) as checkpointer:
            found = checkpointer.restore(together=True)
            if layout == "one":
                assert same(found, replicated(6))
            else:
                assert same(found, [own(6, rank) for rank in range(2)])
                assert same(checkpointer.restore(rank=1, together=True), own(6, 1))
            me.meet_others()


def replaced(me: Rank) -> None:
    """The checkpoint is gone between rank 0's look and another one's: all look once more."""
    with me.new() as checkpointer:
        for step in (1, 2):
            me.saved(checkpointer, step)
            me.meet_others()
        get = messages_module.Messages.get
        gone: list[str] = []

        def remove_before(messages: Any, name: str, rank: int) -> bytes:
            value = get(messages, name, rank)
            if name == "which" and me.rank == 1 and not gone:
                gone.append("")
                (me.folder / "latest").unlink()
                (me.folder / "step-00000002.pt").unlink()
            return value

        messages_module.Messages.get = remove_before  # type: ignore[assignment, method-assign]
        found = checkpointer.restore(together=True)
        # Who had opened it may have seen that, too; in the end all have the same one.
        assert same(found, replicated(1)) and len(gone) == (me.rank == 1)
        me.meet_others()


WORK: Work = {
    f"load_{work.__name__}": work
    for work in (
        shares,
        kinds,
        chunks,
        fail,
        files,
        refused,
        late,
        killed,
        hangs,
        interrupted,
        restore,
        restore_more,
        replaced,
    )
}


if __name__ == "__main__":
    sync_nothing()
    _rank_program.main(WORK)
