"""What is left after `kill -9`, a full disk, a failing drive: the old checkpoint or the new one."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint._objects import assert_same, noise
from faults._support import MIB, mounted
from support import run_python, spin_until

import nvmeio
from nvmeio._storage import locks, replace
from nvmeio._threads.interruptible import Cancellation
from nvmeio.testing import FakeEngine

# One process forks writers, kills each at a random moment, and looks at what is left. The writer
# tells through a pipe which saves have returned: none of these may be lost.
KILLING = """
import os, random, signal, sys, time
import torch, nvmeio, nvmeio.checkpoint

folder, turns, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
path = os.path.join(folder, "latest.pt")
moments = random.Random(seed)
SIZES = (3, 300_000, 2_000_000, 4096, 700_001)

def state(step):
    size = SIZES[step % len(SIZES)]
    return {"step": step, "a": torch.full((size,), float(step)), "b": torch.full((7,), step)}

def write_for_ever(step, told):
    while True:
        nvmeio.save(state(step), path)
        os.write(told, step.to_bytes(8, "little"))
        step += 1

torch.set_num_threads(1)
began = time.monotonic()
for step in (2, 1, 0):
    nvmeio.save(state(step), path)
took = (time.monotonic() - began) / 3  # a save, on this machine and as busy as it is
step = killed_within = turn = 0
# At least so many, and until some were within a save: how many are is the machine's affair.
while turn < turns or (killed_within < turns // 10 + 1 and turn < 20 * turns):
    turn += 1
    told, tell = os.pipe()
    writer = os.fork()
    if writer == 0:
        os.close(told)
        try:
            write_for_ever(step + 1, tell)
        finally:
            os._exit(1)
    os.close(tell)
    # After some saves, and so far into the next one.
    saves, returned = moments.randrange(3), b""
    while len(returned) < 8 * saves:
        more = os.read(told, 8 * saves - len(returned))
        assert more, "the writer failed"
        returned += more
    time.sleep(moments.uniform(0, 1.2) * took)
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    while more := os.read(told, 65536):
        returned += more
    os.close(told)
    last = int.from_bytes(returned[-8:], "little") if returned else step
    found = torch.load(path, weights_only=True)
    assert last <= found["step"] <= last + 1, (last, found["step"])
    wanted = state(found["step"])
    assert all(torch.equal(found[k], wanted[k]) for k in ("a", "b"))
    assert found["a"].numel() == wanted["a"].numel()
    step = found["step"]
    left = [name for name in os.listdir(folder) if name != "latest.pt"]
    assert len(left) <= 1 and all(name.endswith(".nvmeio-tmp") for name in left), left
    killed_within += len(left)
nvmeio.save(state(step + 1), path)
assert os.listdir(folder) == ["latest.pt"], os.listdir(folder)
print(step, killed_within)
"""


def kill(folder: Path, turns: int, seed: int) -> tuple[int, int]:
    """How many saves there were, and how many kills left a partial file."""
    script = f"import sys; sys.argv[1:] = [{str(folder)!r}, '{turns}', '{seed}']\n" + KILLING
    ran = run_python(script)
    assert ran.returncode == 0, ran.stderr
    steps, within = map(int, ran.stdout.split())
    return steps, within


def test_killed_at_random_moments(tmp_path: Path) -> None:
    steps, within = kill(tmp_path, 30, 1)
    assert steps > 10 and within > 3, (steps, within)


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(4))
def test_killed_at_200_random_moments(seed: int, tmp_path: Path) -> None:
    steps, within = kill(tmp_path, 50, seed)
    assert steps > 20 and within > 5, (steps, within)


# Leftovers


def leftover(folder: Path, name: str = "a.pt") -> Path:
    path = folder / f".{name}.4194303-0123abcd{replace.SUFFIX}"
    path.write_bytes(b"half of a checkpoint")
    return path


def test_the_next_save_removes_what_dead_writers_left(tmp_path: Path) -> None:
    left = [leftover(tmp_path), leftover(tmp_path, "another.pt")]
    others = [tmp_path / ".a.pt.nvmeio-tmp", tmp_path / "a.pt.1-0123abcd.nvmeio-tmp"]
    for other in others:
        other.write_bytes(b"not ours")
    nvmeio.save({}, tmp_path / "a.pt")
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in others)


def test_a_live_writers_file_is_left_alone(tmp_path: Path) -> None:
    with replace.Replacement(tmp_path / "a.pt") as replacement:
        (temporary,) = os.listdir(tmp_path)
        ran = run_python(
            f"import nvmeio, nvmeio.checkpoint; nvmeio.save({{}}, {str(tmp_path / 'b.pt')!r})"
        )
        assert ran.returncode == 0, ran.stderr
        assert sorted(os.listdir(tmp_path)) == [temporary, "b.pt"]
        assert replace.remove_leftovers(str(tmp_path)) == []
        replacement.commit()
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "b.pt"]


def test_a_leftover_that_is_no_file_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / f".x.1-0123abcd{replace.SUFFIX}"
    folder.mkdir()
    link = tmp_path / f".y.1-0123abcd{replace.SUFFIX}"
    link.symlink_to(folder)
    os.mkfifo(tmp_path / f".z.1-0123abcd{replace.SUFFIX}")
    assert replace.remove_leftovers(str(tmp_path)) == []
    assert len(os.listdir(tmp_path)) == 3


def test_nobody_writes_into_a_file_that_was_taken_for_a_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its making and its locking, another save may remove it: another one is made."""
    become_writer = locks.become_writer
    stolen: list[str] = []

    def steal_first(fd: int) -> bool:
        if not stolen:
            stolen.extend(replace.remove_leftovers(str(tmp_path)))
        return become_writer(fd)

    monkeypatch.setattr(replace, "become_writer", steal_first)
    save_through_file_object({"a": 1}, tmp_path / "a.pt")
    assert len(stolen) == 1 and os.listdir(tmp_path) == ["a.pt"]


# No room


def save(state: Any, path: Path) -> None:
    nvmeio.save(state, path)


def save_through_file_object(state: Any, path: Path) -> None:
    torch.save(state, nvmeio.FastFileWriter(path))


WAYS = {"save": save, "file object": save_through_file_object}


@pytest.mark.parametrize("reserves", [True, False], ids=["known before", "in mid-write"])
@pytest.mark.parametrize("way", WAYS)
def test_disk_full(way: str, reserves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not reserves:  # a file system that cannot allocate ahead
        monkeypatch.setattr(replace.Replacement, "reserve", lambda self, nbytes: None)
    with mounted("tmpfs", "none", "size=24m") as folder:
        path = folder / "a.pt"
        old = {"old": noise(1000)}
        WAYS[way](old, path)
        before = path.read_bytes()
        free = shutil.disk_usage(folder).free
        with pytest.raises(nvmeio.TransferError) as raised:
            WAYS[way]({"new": noise(8 * MIB)}, path)
        assert raised.value.errno == errno.ENOSPC and "df -h" in str(raised.value)
        assert os.listdir(folder) == ["a.pt"] and path.read_bytes() == before
        spin_until(lambda: shutil.disk_usage(folder).free == free)
        WAYS[way]({"new": noise(1000)}, path)


@pytest.mark.parametrize("way", WAYS)
def test_file_size_limit(way: str, tmp_path: Path) -> None:
    """Without root: EFBIG, as a full disk is ENOSPC."""
    write = {
        "save": "nvmeio.save(state, path)",
        "file object": "torch.save(state, nvmeio.FastFileWriter(path))",
    }[way]
    ran = run_python(
        f"""
        import errno, os, resource, torch, nvmeio, nvmeio.checkpoint
        path = {str(tmp_path / "a.pt")!r}
        state = {{"a": torch.ones(1000)}}
        {write}
        before = open(path, "rb").read()
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, resource.RLIM_INFINITY))
        state = {{"a": torch.ones(4 << 20)}}
        try:
            {write}
        except nvmeio.TransferError as failed:
            assert failed.errno == errno.EFBIG and "ulimit -f" in str(failed), failed
        else:
            raise AssertionError("it was written")
        del state
        assert open(path, "rb").read() == before and os.listdir({str(tmp_path)!r}) == ["a.pt"]
        """
    )
    assert (ran.returncode, ran.stderr) == (0, "")


# A drive that fails


@pytest.mark.parametrize("at", [0, 3 * MIB])
@pytest.mark.parametrize("way", ["save", "file object"])
def test_a_failing_write(way: str, at: int, path: Path, new_handle: Any) -> None:
    nvmeio.save({"old": 1}, path)
    handle = new_handle(
        FakeEngine(fail=lambda kind, offset, nbytes: errno.EIO if offset >= at else 0)
    )
    with pytest.raises(nvmeio.TransferError) as raised:
        if way == "save":
            nvmeio.save({"a": noise(2 * MIB)}, path, handle=handle)
        else:
            torch.save({"a": noise(2 * MIB)}, nvmeio.FastFileWriter(path, handle=handle))
    assert raised.value.errno == errno.EIO
    assert os.listdir(path.parent) == [path.name] and torch.load(path) == {"old": 1}
    assert handle.stats.in_flight == 0


@pytest.mark.parametrize("call", ["fdatasync", "rename"])
def test_a_failing_commit(call: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For small files: tests/storage/test_replace.py."""
    save_through_file_object({"old": 1}, path)

    def fail(*arguments: Any) -> None:
        raise OSError(errno.EIO, "the drive is gone")

    with monkeypatch.context() as broken:
        broken.setattr(os, call, fail)
        with pytest.raises(nvmeio.TransferError) as raised:
            save_through_file_object({"new": 1}, path)
    assert raised.value.errno == errno.EIO and str(path) in str(raised.value)
    assert os.listdir(path.parent) == [path.name] and torch.load(path) == {"old": 1}


def test_a_directory_that_cannot_be_synchronised_is_told(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new file is in its place then: whole, but perhaps not after a crash of the machine."""
    nvmeio.save({"old": 1}, path)

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "the drive is gone")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fail)
        with pytest.raises(nvmeio.TransferError, match="fsync"):
            save_through_file_object({"new": 1}, path)
    assert os.listdir(path.parent) == [path.name] and torch.load(path) == {"new": 1}


def test_the_order_of_a_commit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data durable; renamed; name durable."""
    steps: list[str] = []
    for name in ("fdatasync", "rename", "fsync"):
        call = getattr(os, name)

        def note(*arguments: Any, name: str = name, call: Any = call) -> Any:
            steps.append(name)
            return call(*arguments)

        monkeypatch.setattr(os, name, note)
    save_through_file_object({"a": noise(1000)}, path)
    assert steps == ["fdatasync", "rename", "fsync"]


def test_an_object_that_cannot_be_pickled_leaves_the_old_file(path: Path) -> None:
    nvmeio.save({"old": 1}, path)
    with pytest.raises(Exception, match="pickle"):
        nvmeio.save({"a": noise(2 * MIB), "b": lambda: None}, path)
    assert os.listdir(path.parent) == [path.name] and torch.load(path) == {"old": 1}


def test_interrupted(path: Path, new_handle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of the writing."""
    nvmeio.save({"old": noise(4)}, path)

    def interrupt(kind: str, offset: int, nbytes: int) -> int:
        if offset >= MIB and not raised:
            raised.append(True)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            spin_until(cancelled.is_set)  # so nothing more is written before it is noticed
        return 0

    cancel, cancelled = Cancellation.cancel, threading.Event()

    def noting(cancellation: Cancellation) -> None:
        cancel(cancellation)
        cancelled.set()

    monkeypatch.setattr(Cancellation, "cancel", noting)
    raised: list[bool] = []
    handle = new_handle(FakeEngine(fail=interrupt))
    with pytest.raises(KeyboardInterrupt):
        nvmeio.save({"a": noise(4 * MIB)}, path, handle=handle)
    assert raised and handle.stats.in_flight == 0
    assert os.listdir(path.parent) == [path.name]
    assert_same(torch.load(path), {"old": noise(4)})
    assert zipfile.ZipFile(path).testzip() is None
