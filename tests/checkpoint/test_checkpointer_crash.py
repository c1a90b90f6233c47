"""What `kill -9` and a full disk leave of a Checkpointer's directory."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint._checkpointers import check_file, names, state_of
from checkpoint._objects import assert_same, noise
from faults._support import MIB, finish, mounted, start_python
from support import HeldEngine, spin_until

import nvmeio
from nvmeio._storage import replace

# One process forks writers, kills each at a random moment, and looks at all that is left. A writer
# saves as fast as it can and tells through a pipe what is durable; it may go back to earlier steps,
# so each state has a count that only grows.
KILLING = """
import os, random, signal, sys, time
import torch, nvmeio, nvmeio.checkpoint

folder, layout, turns, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
moments = random.Random(seed)
KEEP = 2
SIZES = (3, 300_000, 1_500_000, 4096, 700_001)

def state(count, step):
    size = SIZES[count % len(SIZES)]
    return {"count": count, "step": step, "a": torch.full((size,), float(count)),
            "b": torch.full((7,), step)}

def whole(found):
    wanted = state(found["count"], found["step"])
    return list(found) == list(wanted) and all(torch.equal(found[k], wanted[k]) for k in "ab")

def write_for_ever(turn, count, tell):
    options = {"handle": nvmeio.AioHandle(engine="threads")} if turn % 3 else {}
    ckpt = nvmeio.Checkpointer(folder, keep=KEEP, layout=layout, recycle=turn % 5 != 0,
                               overwrite=True, **options)
    step = max((ckpt.latest_step() or 0) + moments.choice((1, 1, 1, 0, -2)), 0)
    while True:
        ckpt.save_sync(state(count, step), step)
        if count % 2:
            report = ckpt.wait_sync()  # else the next save waits
            assert report.durable and report.step == step
            os.write(tell, count.to_bytes(8, "little"))
        else:
            os.write(tell, (count - 1).to_bytes(8, "little"))
        count, step = count + 1, step + 1

torch.set_num_threads(1)
looking = nvmeio.Checkpointer(folder, layout=layout, read_only=True)
began = time.monotonic()
with nvmeio.Checkpointer(folder, keep=KEEP, layout=layout) as first:
    for step in range(KEEP):
        first.save_sync(state(step, step), step)
took = (time.monotonic() - began) / KEEP  # a save, on this machine and as busy as it is
count, within, left_before, turn = KEEP - 1, 0, set(), 0
# At least so many, and until some were within a save: how many are is the machine's affair.
while turn < turns or (within <= turns // 20 and turn < 5 * turns):
    turn += 1
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            moments = random.Random(seed * 1000 + turn)
            write_for_ever(turn, count + 1, tell)
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(tell)
    # After some saves that are durable, and so far into the next one.
    saves, durable = moments.randrange(3), b""
    while len(durable) < 8 * saves:
        more = os.read(told, 8 * saves - len(durable))
        assert more, "the writer failed"
        durable += more
    time.sleep(moments.uniform(0, 1.5) * took)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), "the writer failed"
    durable += os.read(told, 1 << 20)
    os.close(told)
    last = int.from_bytes(durable[-8:], "little") if durable else count

    entries = set(os.listdir(folder))
    steps = sorted(name for name in entries if name.startswith("step-"))
    left = entries - set(steps) - {"latest"}
    assert all(name.endswith(".nvmeio-tmp") for name in left), entries
    assert len(left) <= 2, entries  # a file, and a pointer
    if len(durable) >= 8:
        assert not left & left_before, "the next writer has not removed it"
    assert len(steps) >= KEEP, entries
    pointed = os.readlink(os.path.join(folder, "latest"))
    assert pointed in steps, (pointed, entries)
    for name in steps:
        path = os.path.join(folder, name)
        if layout == "per_rank":
            path = os.path.join(path, "rank-00000.pt")
        found = torch.load(path, weights_only=True)
        assert whole(found) and int(name[5:13]) == found["step"], name
        if name == pointed:
            assert found["count"] >= last, (found["count"], last)
            count = max(count, found["count"])
    if turn % 10 == 0:
        found = looking.restore()
        assert whole(found) and found["step"] == int(pointed[5:13])
    within += bool(left)
    left_before = left

with nvmeio.Checkpointer(folder, keep=KEEP, layout=layout, overwrite=True) as last:
    last.save_sync(state(count + 1, 0), 0)
assert looking.latest_step() == 0 and looking.restore()["count"] == count + 1
assert all(name == "latest" or name.startswith("step-") for name in os.listdir(folder))
print(count, within)
"""


def kill(folder: Path, turns: int, seed: int) -> None:
    """Writers of both layouts, each killed so many times."""
    running = {
        layout: start_python(KILLING, folder / layout, layout, turns, seed)
        for layout in ("one", "per_rank")
    }
    for process in running.values():
        ran = finish(process, 550)
        assert ran.returncode == 0, ran.stderr
        saves, within = map(int, ran.stdout.split())
        assert saves > turns // 5 and within > turns // 20, (saves, within)


def test_killed_at_50_random_moments(tmp_path: Path) -> None:
    kill(tmp_path, 25, 1)


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(2, 7))
def test_killed_at_many_more(seed: int, tmp_path: Path) -> None:
    kill(tmp_path, 200, seed)


# Leftovers


@pytest.mark.parametrize("layout", ["one", "per_rank"])
def test_leftovers_are_removed(layout: str, directory: Path, new: Any) -> None:
    """Files, directories and pointers of dead writers, and nothing else."""
    directory.mkdir()
    end = f"4194303-0123abcd{replace.SUFFIX}"
    (directory / f".step-00000007.pt.{end}").write_bytes(b"half of a checkpoint")
    (directory / f".step-00000007.{end}").mkdir()
    (directory / f".step-00000007.{end}" / "rank-00000.pt").write_bytes(b"half")
    (directory / f".latest.{end}").symlink_to("step-00000007.pt")
    (directory / f".latest.4194302-0123abcd{replace.SUFFIX}").write_text("step-00000007.pt")
    foreign = [
        f".step-mine{replace.SUFFIX}",
        ".latest",
        f".latest.old{replace.SUFFIX}",
        "x.nvmeio-tmp",
    ]
    for name in foreign:
        (directory / name).mkdir()
    (directory / f".step-00000008.{end}").symlink_to(foreign[0])
    (directory / foreign[0] / "file").write_bytes(b"mine")
    checkpointer = new(layout=layout)
    assert checkpointer.steps() == []
    checkpointer.save_sync(state_of(1), 1)
    checkpointer.wait_sync()
    saved = "step-00000001.pt" if layout == "one" else "step-00000001"
    kept = [*foreign, f".step-00000008.{end}", "latest", saved]
    assert names(directory) == sorted(kept)
    assert (directory / foreign[0] / "file").read_bytes() == b"mine"


@pytest.mark.parametrize("layout", ["one", "per_rank"])
def test_what_is_being_written_is_no_leftover(
    layout: str, new: Any, engine_held: HeldEngine, new_handle: Any, directory: Path
) -> None:
    """A plain save into the same directory removes what dead writers left; this one lives."""
    engine_held.gate.set()
    checkpointer = new(keep=1, layout=layout, handle=new_handle(engine_held, block_size=MIB))
    for step in range(2):
        checkpointer.save_sync(state_of(step), step)
    checkpointer.wait_sync()
    for step in (2, 3):  # a recycled file
        engine_held.gate.clear()
        begun = engine_held.begun
        checkpointer.save_sync(state_of(step), step)
        engine_held.wait_until_begun(begun + 1)
        nvmeio.save(state_of(9), directory / "other.pt")
        with pytest.raises(nvmeio.TransferError, match="another Checkpointer"):
            nvmeio.Checkpointer(directory)
        engine_held.gate.set()
        report = checkpointer.wait_sync()
        assert report is not None and report.recycled
    assert checkpointer.steps() == [2, 3]
    check_file(directory / "other.pt", 9)
    assert_same(checkpointer.restore(), state_of(3))


# No room


def reserve_nothing(self: Any, nbytes: int) -> None:
    """A file system that cannot allocate ahead."""


def allocate_nothing(fd: int, nbytes: int, path: str) -> None:
    """The same."""


@pytest.mark.parametrize("reserves", [True, False], ids=["known before", "in mid-write"])
@pytest.mark.parametrize("layout", ["one", "per_rank"])
def test_disk_full(layout: str, reserves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not reserves:
        monkeypatch.setattr(replace.Replacement, "reserve", reserve_nothing)
        monkeypatch.setattr("nvmeio._storage.durable.allocate", allocate_nothing)
    with (
        mounted("tmpfs", "none", "size=24m") as folder,
        nvmeio.Checkpointer(folder, keep=2, layout=layout) as checkpointer,
    ):
        expected: list[int] = []
        for step in range(8):
            free = shutil.disk_usage(folder).free
            if step % 2 == 0:
                checkpointer.save_sync(state_of(step), step)
                checkpointer.wait_sync()
                expected = [*expected[-2:], step]
            else:
                before = whole_bytes(folder)
                checkpointer.save_sync({"new": noise(8 * MIB)}, step)
                with pytest.raises(nvmeio.TransferError) as raised:
                    checkpointer.wait_sync()
                assert raised.value.errno == errno.ENOSPC and "df -h" in str(raised.value)
                expected = expected[-2:]  # the oldest of three was to be overwritten
                after = whole_bytes(folder)
                assert after == {name: before[name] for name in after}
                spin_until(lambda free=free: shutil.disk_usage(folder).free >= free)  # type: ignore[misc]
            assert checkpointer.steps() == expected
            assert checkpointer.latest_step() == expected[-1]
            assert not [name for name in names(folder) if "tmp" in name]
            for each in expected:
                assert_same(checkpointer.restore(each), state_of(each))


def whole_bytes(folder: Path) -> dict[str, bytes]:
    """The contents of all checkpoints, by name."""
    found = {}
    for path in sorted(folder.glob("step-*")):
        found[path.name] = (path / "rank-00000.pt" if path.is_dir() else path).read_bytes()
    return found


def test_disk_full_while_it_streams() -> None:
    """The call itself says so: the state is not all copied then."""
    with (
        mounted("tmpfs", "none", "size=24m") as folder,
        nvmeio.Checkpointer(folder, keep=1, memory_bytes=1, snapshot="copy") as checkpointer,
    ):
        checkpointer.save_sync(state_of(0), 0)
        with pytest.raises(nvmeio.TransferError) as raised:
            checkpointer.save_sync({"new": torch.zeros(25 * MIB)}, 1)
        assert raised.value.errno == errno.ENOSPC
        assert names(folder) == ["latest", "step-00000000.pt"]
        assert_same(checkpointer.restore(), state_of(0))
        checkpointer.save_sync(state_of(2), 2)
