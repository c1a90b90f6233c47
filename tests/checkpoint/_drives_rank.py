"""The ranks of test_own_drives.py: each has a directory of its own; run by `_rank_program`."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from checkpoint import _checkpointer_rank, _failing_rank, _rank_program
from checkpoint._rank_program import (
    LIMIT_S,
    MIB,
    PATIENCE_S,
    Rank,
    Work,
    own,
    replicated,
    same,
    set_limit,
    since_the_end_of,
    sync_nothing,
    tell_time_by,
)
from inside import saver_of

import nvmeio
from nvmeio._distributed import messages as messages_module
from nvmeio._storage import locks
from nvmeio.checkpoint import _restoring as restoring
from nvmeio.checkpoint._multi_rank import part_ranks


def with_drives(me: Rank, name: str, layout: str) -> None:
    """From now on this rank saves on a drive of its own."""
    (me.notes / name).mkdir(exist_ok=True)
    me.folder = me.notes / name / f"drive-{me.rank}"
    me.layout = layout
    me.errno, me.kill_at = 0, -1
    new = functools.partial(Rank.new, me)
    me.new = functools.partial(new, shared=False)  # type: ignore[method-assign]


def as_shared(me: Rank, works: Sequence[tuple[str, str]]) -> None:
    """What ranks with one directory do, each on its own drive."""
    for name, layout in works:
        with_drives(me, f"{name}-{layout}", layout)
        _checkpointer_rank.WORK[name](me)
        me.meet_others()


def large(step: int, nbytes: int = 24 * MIB) -> dict[str, Any]:
    """A few storages of odd sizes, that parts end within."""
    sizes = (nbytes // 3 + 5, nbytes // 2 + 77, 90_001, nbytes // 6)
    generator = torch.Generator().manual_seed(step)
    return {
        str(size): torch.randint(0, 255, (size,), generator=generator, dtype=torch.uint8)
        for size in sizes
    }


def shares(me: Rank) -> None:
    """Each byte is written once and read once, by each rank its part."""
    with_drives(me, "shares", "one")
    with me.new() as checkpointer:
        for step in (1, 2):
            me.written.clear()
            checkpointer.save_sync(large(step), step)
            report = checkpointer.wait_sync(PATIENCE_S)
            assert report is not None and os.path.dirname(report.path) == str(me.folder)
        me.read.clear()
        assert same(checkpointer.restore(), large(2))
        assert same(checkpointer.restore(1), large(1))
        counts = {
            "written": sum(nbytes for _, nbytes in me.written),
            "read": sum(nbytes for _, nbytes in me.read) // 2,
        }
    (me.notes / f"shares-{me.world}-{me.rank}.json").write_text(json.dumps(counts))


def mistakes(me: Rank) -> None:
    """Directories that are not what `shared` says, and what does not go together."""
    with_drives(me, "mistakes", "one")
    become_writer = locks.become_writer
    mine = me.folder
    me.folder = me.notes / "same"
    with (
        me.raises(nvmeio.TransferError, "EBUSY", "the same directory", "leave shared=False out"),
        me.new() as checkpointer,  # one of them has its lock
    ):
        checkpointer.save_sync(replicated(1), 1)
    me.meet_others()
    locks.become_writer = lambda fd, must_lock=False: True  # a file system without locks
    with me.new() as checkpointer, me.raises(ValueError, "ranks 0 and 1", "the same directory"):
        checkpointer.save_sync(replicated(1), 1)
    locks.become_writer = become_writer
    me.meet_others()
    assert os.listdir(me.folder) == []
    me.folder = mine
    with me.new(shared=True, keep=1) as checkpointer:  # as it is where nobody says it
        text = "shared=False" if me.rank else "rank 1 of"
        with me.raises(nvmeio.TransferError, "shared=False", text):
            checkpointer.save_sync(replicated(1), 1)
            checkpointer.wait_sync(PATIENCE_S)
        me.meet_others()
        assert checkpointer.steps() == []
    with (
        me.new(shared=me.rank != 0) as checkpointer,
        me.raises(ValueError, "rank 0 saves with shared=False, rank 1 with shared=True"),
    ):
        checkpointer.save_sync(replicated(1), 1)
    me.meet_others()
    with me.new() as checkpointer:
        assert checkpointer.latest_step() is None and checkpointer.steps() == []
        with me.raises(FileNotFoundError, "no rank's drive holds a complete checkpoint yet"):
            checkpointer.restore()
        me.saved(checkpointer, 1)
        with me.raises(ValueError, "rank 0 restores", "rank 1"):
            checkpointer.restore(1 if me.rank == 0 else 2)
        with me.raises(FileNotFoundError, "there is no step 2; what can be restored: step 1"):
            checkpointer.restore(2)
        with me.raises(ValueError, "on the meta device"):
            checkpointer.restore(map_location="meta" if me.rank == 0 else None)
        assert checkpointer.restore(map_location="meta")["rows"].is_meta
        assert same(checkpointer.restore(), me.state(1))
    for layout in ("one", "per_rank"):  # with shared=True nothing is found, and is told why
        there = Rank.new(me, layout=layout)
        with there, me.raises(nvmeio.TransferError, "shared=False"):
            there.restore()
    me.meet_others()


def refused(me: Rank) -> None:
    """As with one directory; and where one rank's torch has no place to put the parts together."""
    with_drives(me, "refused", "one")
    _failing_rank.refused_calls(me)
    with me.new() as checkpointer:
        seam = restoring.seam
        if me.rank == 0:
            restoring.seam = lambda: None
        error = nvmeio.BackendUnavailableError if me.rank == 0 else nvmeio.TransferError
        with me.raises(error, "beneath torch's unpickler"):
            checkpointer.restore()
        restoring.seam = seam
        assert same(checkpointer.restore(), me.state(10))
        assert checkpointer.latest_step() == 10


def early(me: Rank, shared: bool) -> None:
    """A write fails before the last rank has looked whether one has: all are told by `wait`."""
    if not shared:
        with_drives(me, "early", "one")
    check = messages_module.Messages.check

    def check_late(messages: Any) -> None:
        until = time.monotonic() + 1
        while time.monotonic() < until and not (me.notes / "failed").exists():
            time.sleep(0.01)
        check(messages)

    me.errno = errno.ENOSPC if me.rank == 0 else 0
    if me.rank == me.world - 1:
        messages_module.Messages.check = check_late  # type: ignore[assignment, method-assign]
    with me.new() as checkpointer:
        checkpointer.save_sync(me.state(1), 1)
        with me.raises(nvmeio.TransferError, "ENOSPC"):
            checkpointer.wait_sync(PATIENCE_S)
        if me.rank == 0:
            me.tell("failed", "")
    me.meet_others()


def leave(me: Rank) -> bool | None:
    """Rank 0, which serves the store, ends its process when it has told what there is."""
    with_drives(me, "leave", "one")
    part_ranks.PARTING_S = PATIENCE_S
    return _failing_rank.leave(me)


# Other ranks, and other drives, than those that saved


def restore(me: Rank, saved_by: int) -> None:
    """What `save` left on so many drives, by as many ranks as there are, all drives among them."""
    size, rank = me.world, me.rank
    for layout in ("one", "per_rank"):
        drives = [me.notes / f"save-{layout}" / f"drive-{each}" for each in range(saved_by)]
        mine = [drive for each, drive in enumerate(drives) if (each + 1) % size == rank]
        options: Any = {"layout": layout, "shared": False, "timeout_s": PATIENCE_S}
        with nvmeio.Checkpointer(mine, 1, None, dist.group.WORLD, **options) as checkpointer:
            assert checkpointer.steps() == [5, 6] and checkpointer.latest_step() == 6
            if layout == "one":
                assert same(checkpointer.restore(), replicated(6))
                found = checkpointer.restore(5, lambda storage, _: storage)
                assert same(found, replicated(5))
                continue
            states = [own(6, each) for each in range(saved_by)]
            found = checkpointer.restore()
            assert same(found, own(6, rank) if size == saved_by else states)
            assert same(checkpointer.restore(5, rank=1), own(5, 1))
            with me.raises(ValueError, "rank 9 is out of range"):
                checkpointer.restore(rank=9)
        few = nvmeio.Checkpointer(mine[-1], 1, None, dist.group.WORLD, shared=False)
        if len(mine) > 1:
            with me.raises(FileNotFoundError, "is incomplete", "several directories"):
                few.restore()


def lost(me: Rank) -> None:
    """One drive is another one: what cannot be restored is told by name, and all else goes on."""
    with_drives(me, "lost", "one")
    away = me.notes / "away"
    with me.new() as checkpointer:
        for step in (1, 2, 3):
            me.saved(checkpointer, step)
        me.meet_others()
        if me.rank == 1:
            me.folder.rename(away)
        me.meet_others()
        text = "step 3 is incomplete: of parts 0 to 1, no rank has 1; rank 1 of 2 has no part of it"
        for which in (None, 3):
            with me.raises(FileNotFoundError, text, "drive-1", "no other step is complete"):
                checkpointer.restore(which)
        assert checkpointer.steps() == [] and checkpointer.latest_step() is None
        me.meet_others()
        if me.rank == 1:  # as after a crash of the machine between two ranks' renames
            me.folder.mkdir()
            for path in away.glob("step-00000002.*"):
                path.rename(me.folder / path.name)
        me.meet_others()
        assert checkpointer.latest_step() == 2
        assert same(checkpointer.restore(), me.state(2))
        with me.raises(FileNotFoundError, "of parts 0 to 1, no rank has 1", "restored: step 2"):
            checkpointer.restore(3)
        for step in (4, 5, 6, 7):
            me.saved(checkpointer, step)
        me.meet_others()
        assert checkpointer.steps() == [5, 6, 7]
        assert len(os.listdir(me.folder)) == 3, os.listdir(me.folder)  # the remains of 3 are gone
        me.meet_others()
        # A part that is damaged, or cut
        path = next(me.folder.glob("step-00000007.*"))
        whole = path.read_bytes()
        for wrong in (whole[:-4096], whole[:50] + b"x" + whole[51:], b""):
            if me.rank == 1:
                path.write_bytes(wrong)
            me.meet_others()
            error = nvmeio.IntegrityError if me.rank == 1 else nvmeio.TransferError
            with me.raises(error, "drive-1/step-00000007", "" if me.rank else "rank 1 of 2"):
                checkpointer.restore()
            me.meet_others()
        assert same(checkpointer.restore(6), me.state(6))
        # A drive that fails while it is read
        me.read_errno = errno.EIO if me.rank == 1 else 0
        with me.raises(nvmeio.TransferError, "EIO", "" if me.rank else "rank 1 of 2"):
            handle = saver_of(checkpointer).open_handle
            Rank.new(me, shared=False, read_only=True, handle=handle).restore(6)
        me.read_errno = 0
        assert same(checkpointer.restore(6), me.state(6))


def not_named(me: Rank) -> None:
    """A rank that fails after all have said "durable": the others take their names back."""
    rename, tell_all = os.rename, messages_module.Messages.tell_all

    def rename_or_fail(old: Any, new: Any) -> None:
        if os.path.basename(new).startswith("step-00000002"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(old, new)

    def tell_and_fail(messages: Any, name: str, told: Any) -> list[Any]:
        answers = tell_all(messages, name, told)
        if name == "durable":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return answers

    for writers in ("all", 1):
        with_drives(me, f"not-named-{writers}", "one")
        if me.rank == 1:
            os.rename = rename_or_fail if writers == "all" else rename  # type: ignore[assignment]
        with me.new(writers=writers) as checkpointer:
            me.saved(checkpointer, 1)
            me.meet_others()
            if me.rank == 1 and writers == 1:  # which has no part to name
                messages_module.Messages.tell_all = tell_and_fail  # type: ignore[assignment, method-assign]
            with me.raises(OSError) as raised:
                checkpointer.save_sync(me.state(2), 2)
                checkpointer.wait_sync(PATIENCE_S)
            messages_module.Messages.tell_all = tell_all  # type: ignore[method-assign]
            # ECANCELED where rank 1 is too slow to say why
            assert raised[0].errno in (errno.EIO, errno.ECANCELED), raised
            me.meet_others()
            assert not list(me.folder.glob("step-00000002*")), os.listdir(me.folder)
            assert checkpointer.latest_step() == 1 and checkpointer.steps() == [1]
            assert same(checkpointer.restore(), me.state(1))
            me.meet_others()
    os.rename = rename


# Killed


def killed(me: Rank, victim: int, moment: str) -> bool:
    """One rank is killed in the middle of a save; the others raise, and soon."""
    with_drives(me, "killed", "one")
    checkpointer = me.new()
    if me.rank == victim:
        me.tell("victim", str(os.getpid()))
    for step in range(3):
        me.saved(checkpointer, step)
        note_durable(me, step)
    me.meet_others()
    set_limit(checkpointer, LIMIT_S)
    tell_time_by(since_the_end_of(int(me.told("victim"))))
    if me.rank == victim:
        if moment == "writing":
            me.kill_at = 0
        elif moment == "syncing":
            os.fdatasync = die  # type: ignore[assignment]
        else:
            die_renaming(after=moment == "named")
    with me.raises(nvmeio.TransferError) as told:
        checkpointer.save_sync(me.state(3), 3)
        checkpointer.wait_sync(PATIENCE_S)
    assert told[0].errno in (errno.ETIMEDOUT, errno.ECONNRESET), told
    assert f"rank {victim} of" in str(told[0]) or "is gone" in str(told[0]), told
    with contextlib.suppress(nvmeio.TransferError):
        checkpointer.close()
    return False


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_renaming(after: bool) -> None:
    """At the name of the new part: a recycled one gets a temporary name before."""
    rename = os.rename

    def rename_or_die(old: Any, new: Any) -> None:
        if not os.path.basename(new).startswith("step-00000003"):
            return rename(old, new)
        if after:
            rename(old, new)
        die()

    os.rename = rename_or_die  # type: ignore[assignment]


def note_durable(me: Rank, step: int) -> None:
    (me.notes / f"durable-{me.rank}").write_text(str(step))


def killed_sometime(me: Rank, victim: int, after_s: float) -> bool:
    """Killed at a random moment, again and again; each time all go on with the same step."""
    with_drives(me, "sometime", me.layout)
    killing = threading.Timer(after_s, die)
    killing.daemon = True
    if me.rank == victim:
        me.tell(f"victim-{me.number}", str(os.getpid()))
    checkpointer = me.new()
    step = look(me, checkpointer)
    me.meet_others()
    set_limit(checkpointer, LIMIT_S)  # by a clock that stands still while the victim lives
    tell_time_by(since_the_end_of(int(me.told(f"victim-{me.number}"))))
    try:
        for _ in range(1000):
            if step >= 0 and me.rank == victim and not killing.is_alive():
                killing.start()  # not before the first is durable, however slow the machine
            checkpointer.save_sync(me.state(step + 1), step + 1)
            checkpointer.wait_sync(PATIENCE_S)
            step += 1
            note_durable(me, step)
    except nvmeio.TransferError as failed:
        assert failed.errno in (errno.ETIMEDOUT, errno.ECONNRESET), failed
    else:
        raise AssertionError("it was never killed")
    with contextlib.suppress(nvmeio.TransferError):
        checkpointer.close()
    return False


def look(me: Rank, checkpointer: nvmeio.Checkpointer) -> int:
    """The newest step, which is no older than any rank was told of; all that is there is whole."""
    notes = [me.notes / f"durable-{rank}" for rank in range(me.world)]
    durable = max((int(note.read_text() or -1) for note in notes if note.exists()), default=-1)
    latest = checkpointer.latest_step()
    if latest is None:
        assert durable < 0, durable
        return -1
    assert durable <= latest <= durable + 1, (durable, latest)
    for step in checkpointer.steps():
        assert same(checkpointer.restore(step), me.state(step)), step
    return latest


def resume(me: Rank, name: str = "killed", least: int = 0) -> None:
    """After what others have left: it is removed, and saving goes on."""
    with_drives(me, name, me.layout)
    with me.new() as checkpointer:
        step = look(me, checkpointer)
        assert step >= least, step
        me.meet_others()
        for more in range(1, 5):
            me.saved(checkpointer, step + more)
        me.meet_others()
        assert checkpointer.steps() == [step + 2, step + 3, step + 4]
        left = sorted(os.listdir(me.folder))
        assert len(left) == 3 and not any(each.endswith("tmp") for each in left), left


WORK: Work = {
    f"drives_{work.__name__}": work
    for work in (
        as_shared,
        shares,
        mistakes,
        refused,
        early,
        leave,
        restore,
        lost,
        not_named,
        killed,
        killed_sometime,
        resume,
    )
}


if __name__ == "__main__":
    sync_nothing()
    _rank_program.main(WORK)
