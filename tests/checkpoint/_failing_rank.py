"""What ranks of test_checkpointer_ranks.py do where a save fails; run by `_checkpointer_rank`."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from checkpoint._rank_program import (
    LIMIT_S,
    MIB,
    PATIENCE_S,
    Rank,
    Work,
    replicated,
    same,
    set_limit,
    since_the_end_of,
    sync_nothing,
    tell_time_by,
)
from inside import saver_of

import nvmeio
import nvmeio.checkpoint
from nvmeio._distributed import messages as ranks_module
from nvmeio._distributed import rank_store as rank_store_module
from nvmeio._memory import mappings
from nvmeio._threads import interruptible
from nvmeio.checkpoint import checkpointer as checkpointer_module
from nvmeio.checkpoint._manager import job
from nvmeio.checkpoint._manager import saver as saver_module
from nvmeio.testing import FakeEngine


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
            with me.raises(Exception, "<lambda>"):
                checkpointer.save_sync(state, at)
            # No memory
            populate = mappings.Mapping.populate
            if me.rank == victim:
                saver_of(checkpointer).setup.snapshots.release()
                mappings.Mapping.populate = no_memory  # type: ignore[assignment, method-assign]
            with me.raises((MemoryError, nvmeio.TransferError), "no memory"):
                checkpointer.save_sync(me.state(at), at)
                checkpointer.wait_sync(PATIENCE_S)
            mappings.Mapping.populate = populate  # type: ignore[method-assign]
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


def no_memory(mapping: mappings.Mapping) -> None:
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
    job.PARTING_S = PATIENCE_S  # it waits as long as the others need to see that it is over
    if me.rank:
        rank_store_module.FIRST_PAUSE_S = rank_store_module.MOST_PAUSE_S = (
            0.5  # who asks late learns late
        )
    with me.new() as checkpointer:
        checkpointer.save_sync(me.state(1), 1)
    assert checkpointer.steps() == [1]
    return False


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


WORK: Work = {
    work.__name__: work
    for work in (
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
        drop,
    )
}
