"""Checkpointers and processes: several of them, forked ones, and ends that nobody prepared."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint._checkpointers import (
    names,
    state_of,
)
from checkpoint._objects import assert_same
from support import run_python

import nvmeio


def test_a_file_size_limit(tmp_path: Path) -> None:
    """Without root: EFBIG, as a full disk is ENOSPC."""
    ran = run_python(
        f"""
        import errno, os, resource, torch, nvmeio, nvmeio.checkpoint
        ckpt = nvmeio.Checkpointer({str(tmp_path)!r}, keep=1)
        small, large = {{"a": torch.ones(1000)}}, {{"a": torch.ones(4 << 20)}}
        for step in range(2):
            ckpt.save_sync(small, step)
        ckpt.wait_sync()
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, resource.RLIM_INFINITY))
        for call in (ckpt.wait_sync, lambda: ckpt.save_sync(small, 9), ckpt.close):
            ckpt.save_sync(large, 2)
            try:
                call()
            except nvmeio.TransferError as failed:
                assert failed.errno == errno.EFBIG and "ulimit -f" in str(failed), failed
            else:
                raise AssertionError("it was written")
            assert ckpt.latest_step() == 1 and len(os.listdir(ckpt.directory)) == 2
        assert torch.equal(ckpt.restore()["a"], small["a"])
        """
    )
    assert (ran.returncode, ran.stderr) == (0, "")


# One process ends in several ways, each in a child that was forked after the imports; its standard
# error and exit status tell how it went.
ENDING = """
import asyncio, faulthandler, os, resource, sys, time
import torch, nvmeio, nvmeio.checkpoint
torch.set_num_threads(1)
folder = sys.argv[1]

def state(step):
    return {"step": step, "a": torch.full((3_000_000,), float(step))}

def without_close(ckpt):
    ckpt.save_sync(state(1), 1)

def kept_by_a_cycle(ckpt):
    ckpt.me = ckpt
    ckpt.save_sync(state(1), 1)

def after_an_error(ckpt):
    ckpt.save_sync(state(1), 1)
    raise ArithmeticError("of the program's own")

def from_a_loop(ckpt):
    async def main():
        await ckpt.save(state(1), 1)
    asyncio.run(main())

def streaming(ckpt):
    ckpt.close()
    ckpt = nvmeio.Checkpointer(ckpt.directory, memory_bytes=1, snapshot="copy")
    ckpt.save_sync({"step": 1, "a": torch.ones(30_000_000)}, 1)

def with_a_failure(ckpt):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    ckpt.save_sync(state(1), 1)

def with_a_failure_in_a_cycle(ckpt):
    ckpt.me = ckpt
    with_a_failure(ckpt)

def never_used(ckpt):
    pass

def handle_closed_first(ckpt):
    handle = nvmeio.AioHandle()
    ckpt.close()
    ckpt.me = nvmeio.Checkpointer(ckpt.directory, handle=handle)
    ckpt.me.save_sync(state(1), 1)
    handle.close()

def not_awaited(ckpt):
    async def main():
        ckpt.save(state(1), 1)
    asyncio.run(main())

def not_awaited_without_a_loop(ckpt):
    ckpt.save(state(1), 1)

ways = [without_close, kept_by_a_cycle, after_an_error, from_a_loop, streaming, with_a_failure,
        with_a_failure_in_a_cycle, never_used,
        handle_closed_first, not_awaited, not_awaited_without_a_loop]
children = {}
for way in ways:
    place = os.path.join(folder, way.__name__)
    child = os.fork()
    if child:
        children[way.__name__] = child
        continue
    os.dup2(os.open(place + ".err", os.O_WRONLY | os.O_CREAT), 2)
    faulthandler.dump_traceback_later(240, exit=True)
    ckpt = nvmeio.Checkpointer(place)
    way(ckpt)
    break
else:
    for name, child in children.items():
        print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, int]]]:
    folder = tmp_path_factory.mktemp("ended")
    ran = run_python(f"import sys; sys.argv[1:] = [{str(folder)!r}]\n" + ENDING)
    assert (ran.returncode, ran.stderr) == (0, "")
    codes = dict(line.split() for line in ran.stdout.splitlines())
    yield folder, {name: int(code) for name, code in codes.items()}
    shutil.rmtree(folder)  # 195 MiB


@pytest.mark.parametrize(
    "way",
    [
        "without_close",
        "kept_by_a_cycle",
        "after_an_error",
        "from_a_loop",
        "streaming",
        "handle_closed_first",
        "not_awaited",
        "not_awaited_without_a_loop",
    ],
)
def test_a_program_ends_without_closing(way: str, ended: Any) -> None:
    """No hang, and the last save is whole."""
    folder, codes = ended
    told = (folder / f"{way}.err").read_text()
    if way == "after_an_error":
        assert codes[way] == 1 and told.endswith("ArithmeticError: of the program's own\n")
    elif way == "streaming":
        assert codes[way] == 0 and told.startswith("step 1: 114.4 MiB are more than")
        assert told.count("\n") == 1
    else:
        assert (codes[way], told) == (0, "")
    assert names(folder / way) == ["latest", "step-00000001.pt"]
    assert torch.load(folder / way / "latest")["step"] == 1


@pytest.mark.parametrize("way", ["with_a_failure", "with_a_failure_in_a_cycle"])
def test_a_program_ends_with_a_failed_save(way: str, ended: Any) -> None:
    """Nothing was said: Python does not show a ResourceWarning by default."""
    folder, codes = ended
    assert codes[way] == 120
    told = (folder / f"{way}.err").read_text()
    assert "its result was never awaited" in told or "step 1 was not saved" in told
    assert "Traceback" in told  # raised, not logged only
    assert "EFBIG" in told
    assert names(folder / way) == []


def test_a_program_ends_without_a_save(ended: Any) -> None:
    folder, codes = ended
    assert codes["never_used"] == 0 and (folder / "never_used.err").read_text() == ""
    assert names(folder / "never_used") == []


# Other Checkpointers, other processes


def test_one_checkpointer_saves_into_a_directory(new: Any, directory: Path) -> None:
    """The second one was made all the same, and refused its first save, hours later."""
    first = new()
    for _ in range(2):
        with pytest.raises(nvmeio.TransferError, match=r"another.*read_only=True") as raised:
            new()
        assert raised.value.errno == errno.EBUSY
    first.save_sync(state_of(0), 0)
    first.wait_sync()
    reader = new(read_only=True)
    assert reader.steps() == [0]
    assert_same(reader.restore(), state_of(0))
    first.close()
    second = new()
    second.save_sync(state_of(1), 1)
    second.wait_sync()
    assert reader.steps() == [0, 1]


def test_one_process_saves_into_a_directory(new: Any, directory: Path) -> None:
    checkpointer = new()
    checkpointer.save_sync(state_of(0), 0)
    checkpointer.wait_sync()
    ran = run_python(
        f"""
        import errno, nvmeio, torch
        ckpt = nvmeio.Checkpointer({str(directory)!r}, read_only=True)
        assert torch.equal(ckpt.restore()["a"], torch.zeros(5000))
        try:
            nvmeio.Checkpointer({str(directory)!r})
        except nvmeio.TransferError as busy:
            assert busy.errno == errno.EBUSY and "another Checkpointer" in str(busy), busy
        else:
            raise AssertionError("made")
        """
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert checkpointer.steps() == [0]


FORKING = """
import asyncio, errno, gc, os, signal, sys, threading, time, warnings
import torch, nvmeio, nvmeio.checkpoint
from nvmeio.testing import FakeEngine
warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, about forks beside threads
torch.set_num_threads(1)
folder = sys.argv[1]
state = {"a": torch.arange(500_000)}

def refused(call):
    try:
        call()
    except nvmeio.ClosedError as told:
        assert "forked" in str(told), told
    else:
        raise AssertionError("not refused")

def in_child(work):
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        signal.alarm(300)
        work()
        code = 0
    except BaseException:
        import traceback
        traceback.print_exc()
    finally:
        os._exit(code)

def ended_well(child):
    _, status = os.waitpid(child, 0)
    assert status == 0, status

gate = threading.Event()
gate.set()
handle = nvmeio.AioHandle(engine=FakeEngine(hold=gate))
ckpt = nvmeio.Checkpointer(folder, handle=handle)
ckpt.save_sync(state, 0)
ckpt.wait_sync()
gate.clear()
ckpt.save_sync(state, 1)

def use():
    warnings.simplefilter("error")
    refused(lambda: ckpt.save_sync(state, 2))
    refused(lambda: asyncio.run(ckpt.save(state, 2)))
    refused(ckpt.wait_sync)
    refused(lambda: asyncio.run(ckpt.wait()))
    repr(ckpt)
    assert ckpt.steps() == [0]
    assert torch.equal(ckpt.restore()["a"], state["a"])  # with a handle of its own
    assert torch.equal(asyncio.run(ckpt.async_restore(0))["a"], state["a"])
    try:
        nvmeio.Checkpointer(folder)
    except nvmeio.TransferError as busy:
        assert busy.errno == errno.EBUSY
    else:
        raise AssertionError("two save there")
    with nvmeio.Checkpointer(folder + "-child") as own:
        own.save_sync(state, 5)
    ckpt.close()
    assert ckpt.closed
    asyncio.run(ckpt.aclose())

ended_well(in_child(use))

def drop():
    warnings.simplefilter("error")
    global ckpt
    del ckpt
    gc.collect()

ended_well(in_child(drop))

# A worker that stays: what the parent gives back is free, whoever was forked meanwhile.
worker = in_child(lambda: time.sleep(250))
gate.set()
report = ckpt.wait_sync()
assert report.step == 1 and report.durable
assert torch.equal(ckpt.restore()["a"], state["a"])
ckpt.close()
with nvmeio.Checkpointer(folder, keep=1, handle=handle) as again:
    again.save_sync(state, 2)
    again.save_sync(state, 3)
    assert again.wait_sync().recycled, "the file was locked by the worker"
os.kill(worker, signal.SIGKILL)
os.waitpid(worker, 0)

# A process that is killed, and a child of it that stays.
told, tell = os.pipe()

def parent():
    ckpt = nvmeio.Checkpointer(folder)
    ckpt.save_sync(state, 4)
    ckpt.wait_sync()
    os.write(tell, b"%d " % in_child(lambda: time.sleep(250)))
    time.sleep(250)

killed = in_child(parent)
left = int(os.read(told, 20))
os.kill(killed, signal.SIGKILL)
os.waitpid(killed, 0)
with nvmeio.Checkpointer(folder) as again:
    again.save_sync(state, 5)
assert again.latest_step() == 5
os.kill(left, signal.SIGKILL)
handle.close()
"""


def test_forked_children(directory: Path) -> None:
    """They are refused clearly, and hold nothing that is the parent's.

    A worker kept the lock of the directory, and that of the file which was being written when it
    was forked: nobody could save there until it ended, and that file was not recycled.
    """
    ran = run_python(f"import sys; sys.argv[1:] = [{str(directory)!r}]\n" + FORKING)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_forked_child_drops_a_writer(tmp_path: Path) -> None:
    """It removed the temporary file of its parent."""
    ran = run_python(
        f"""
        import os, torch, nvmeio, nvmeio.checkpoint
        writer = nvmeio.FastFileWriter({str(tmp_path / "a.pt")!r})
        writer.write(b"some")
        child = os.fork()
        if not child:
            try:
                writer.close()
            except nvmeio.ClosedError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        writer.write(b"thing")
        writer.close()
        """
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert (tmp_path / "a.pt").read_bytes() == b"something"
