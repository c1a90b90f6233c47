"""Which files a `Checkpointer` makes, recycles and restores, and where `latest` leads."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import itertools
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint._checkpointers import (
    check_file,
    file_of,
    make_link,
    make_text,
    names,
    state_of,
    three_generations,
)
from checkpoint._objects import UNSAFE, assert_same, noise
from faults._support import MIB
from support import PATIENCE_S, HeldEngine, thread, until

import nvmeio
from nvmeio.checkpoint import SaveReport, describing, verifying
from nvmeio.checkpoint._directory import retention
from nvmeio.testing import FakeEngine

# Which files there are


def test_restoring(new: Any, directory: Path) -> None:
    """The latest is the one that was saved last, whatever its number."""
    checkpointer = new(keep=3)
    assert checkpointer.steps() == [] and checkpointer.latest_step() is None
    for step in (5, 100, 50):
        checkpointer.save_sync(state_of(step), step)
    checkpointer.wait_sync()
    assert checkpointer.steps() == [5, 50, 100] and checkpointer.latest_step() == 50
    assert os.readlink(directory / "latest") == "step-00000050.pt"
    assert_same(checkpointer.restore(), state_of(50))
    for step in (5, 50, 100):
        assert_same(checkpointer.restore(step), state_of(step))
    assert_same(torch.load(directory / "latest"), state_of(50))
    assert checkpointer.restore(map_location="meta")["a"].is_meta
    with pytest.raises(FileNotFoundError, match="no step 7; existing steps: 5, 50, 100"):
        checkpointer.restore(7)


async def test_async_restore(new: Any) -> None:
    checkpointer = new()
    for step in (1, 2):
        await checkpointer.save(state_of(step), step)
    await checkpointer.wait()
    assert_same(await checkpointer.async_restore(), state_of(2))
    assert_same(await checkpointer.async_restore(1, "cpu", True), state_of(1))
    with pytest.raises(FileNotFoundError, match="no step 3"):
        await checkpointer.async_restore(3)


def test_restoring_is_careful(new: Any) -> None:
    checkpointer = new()
    checkpointer.save_sync(UNSAFE["user's classes"](), 1)
    checkpointer.wait_sync()
    with pytest.raises(Exception, match="weights_only"):
        checkpointer.restore()
    assert "holder" in checkpointer.restore(weights_only=False)


@pytest.mark.parametrize("missing", [True, False])
def test_nothing_to_restore(missing: bool, new: Any, directory: Path) -> None:
    checkpointer = new(read_only=missing)
    assert checkpointer.steps() == [] and checkpointer.latest_step() is None
    with pytest.raises(FileNotFoundError, match="no complete checkpoint yet"):
        checkpointer.restore()
    with pytest.raises(FileNotFoundError, match="no step 3; existing steps: none"):
        checkpointer.restore(3)
    assert directory.exists() is not missing  # who only restores makes nothing


def test_the_order_of_a_save(
    new: Any, new_handle: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name before its bytes, or a pointer before the name, would not survive a loss of power."""
    events: list[str] = []

    def note_write(kind: str, offset: int, nbytes: int) -> int:
        if kind == "pwrite" and events[-1:] != ["write"]:
            events.append("write")
        return 0

    def kind_of(path: Any) -> str:
        name = os.path.basename(path)
        return "temporary" if name.endswith(".nvmeio-tmp") else name

    checkpointer = new(keep=1, handle=new_handle(FakeEngine(fail=note_write)))
    for step in (0, 1):
        checkpointer.save_sync(state_of(step), step)
    checkpointer.wait_sync()
    real = {name: getattr(os, name) for name in ("fdatasync", "fsync", "rename", "symlink")}

    def rename(source: Any, target: Any) -> None:
        events.append(f"rename {kind_of(source)} to {kind_of(target)}")
        real["rename"](source, target)

    def symlink(source: Any, target: Any) -> None:
        events.append(f"symlink {kind_of(source)}")
        real["symlink"](source, target)

    def noting(name: str) -> Any:
        def note(fd: int) -> None:
            events.append(name)
            real[name](fd)

        return note

    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(os, "symlink", symlink)
    monkeypatch.setattr(os, "fdatasync", noting("fdatasync"))
    monkeypatch.setattr(os, "fsync", noting("fsync"))
    events.clear()
    checkpointer.save_sync(state_of(2), 2)
    checkpointer.wait_sync()
    assert events == [
        "rename step-00000000.pt to temporary",
        "fsync",
        "write",
        "fdatasync",
        "rename temporary to step-00000002.pt",
        "fsync",
        "symlink step-00000002.pt",
        "rename temporary to latest",
        "fsync",
    ]


@pytest.mark.parametrize("recycle", [True, False])
@pytest.mark.parametrize("keep", [1, 3])
def test_so_many_are_whole_at_every_moment(
    keep: int, recycle: bool, new: Any, new_handle: Any, directory: Path
) -> None:
    """Looked at whenever a block is about to be written."""
    wrong: list[str] = []
    moments = itertools.count()
    saved: list[int] = []

    def look(kind: str, offset: int, nbytes: int) -> int:
        if kind != "pwrite":
            return 0
        next(moments)
        whole = sorted(directory.glob("step-*"))
        try:
            for path in whole:
                step = int(path.name[5:13])
                assert_same(torch.load(path), state_of(step))
            assert len(whole) >= min(len(saved), keep), whole
            if saved:
                assert_same(torch.load(directory / "latest"), state_of(saved[-1]))
        except Exception as failed:
            wrong.append(repr(failed))
        return 0

    handle = new_handle(FakeEngine(fail=look))
    checkpointer = new(keep=keep, handle=handle, recycle=recycle)
    for step in range(keep + 4):
        checkpointer.save_sync(state_of(step), step)
        checkpointer.wait_sync()
        saved.append(step)
        most = keep + 1 if recycle else keep
        assert checkpointer.steps() == saved[-most:]
    assert not wrong and next(moments) > keep + 4


def test_a_directory_with_too_many(new: Any, directory: Path) -> None:
    with nvmeio.Checkpointer(directory, keep=6) as many:
        for step in range(7):
            many.save_sync(state_of(step), step)
    checkpointer = new(keep=2)
    assert checkpointer.steps() == list(range(7))  # until the first save
    checkpointer.save_sync(state_of(7), 7)
    checkpointer.wait_sync()
    assert checkpointer.steps() == [5, 6, 7]


def test_a_step_that_is_saved_again(new: Any, directory: Path) -> None:
    checkpointer = new(keep=2)
    for step in (1, 2, 3):
        checkpointer.save_sync(state_of(step), step)
    checkpointer.wait_sync()
    other = {"a": noise(100_000), "other": True}
    checkpointer.save_sync(other, 2)
    report = checkpointer.wait_sync()
    assert report is not None and report.recycled  # the oldest one, not the one it replaces
    assert checkpointer.steps() == [2, 3] and checkpointer.latest_step() == 2
    assert_same(checkpointer.restore(), other)
    check_file(file_of(directory, 3), 3)
    checkpointer.save_sync(state_of(2), 2)
    checkpointer.wait_sync()
    assert checkpointer.steps() == [2, 3]
    check_file(file_of(directory, 2), 2)
    assert names(directory) == ["latest", "step-00000002.pt", "step-00000003.pt"]


def test_foreign_files_are_left_alone(new: Any, directory: Path) -> None:
    directory.mkdir()
    foreign = {
        "notes.txt": b"mine",
        "step-1.pt": b"another manner of names",
        "step-00000001.pt.bak": b"a copy",
        "step-00000002.safetensors": b"another format",
        "step-٠٠٠٠٠٠٠١.pt": b"digits that are not ours",
        ".step-00000001.pt.nvmeio-tmp": b"nobody's temporary file",
        "latest.txt": b"0",
        "rank-00000.pt": b"x",
    }
    for name, data in foreign.items():
        (directory / name).write_bytes(data)
    (directory / "step-00000001").mkdir()
    (directory / "step-00000001" / "weights").write_bytes(b"in a directory")
    (directory / "other").mkdir()
    checkpointer = new(keep=1)
    assert checkpointer.steps() == []
    for step in range(4):
        checkpointer.save_sync(state_of(step), step)
    checkpointer.wait_sync()
    assert checkpointer.steps() == [2, 3]
    for name, data in foreign.items():
        assert (directory / name).read_bytes() == data
    assert (directory / "step-00000001" / "weights").read_bytes() == b"in a directory"
    assert (directory / "other").is_dir()


# Recycling


def test_the_oldest_file_is_overwritten(new: Any, directory: Path) -> None:
    checkpointer = new(keep=2)
    reports = []
    inodes = {}
    for step in range(6):
        checkpointer.save_sync(state_of(step), step)
        reports.append(checkpointer.wait_sync())
        inodes[step] = os.stat(file_of(directory, step)).st_ino
    assert [report.recycled for report in reports] == [False] * 3 + [True] * 3
    assert [inodes[step + 3] for step in range(3)] == [inodes[step] for step in range(3)]
    for step in (3, 4, 5):
        check_file(file_of(directory, step), step)


def test_states_of_changing_size(new: Any, directory: Path, tmp_path: Path) -> None:
    """A smaller one over a larger file, and the reverse: nothing of the old one is left."""
    checkpointer = new(keep=1)
    sizes = [2_000_000, 1, 3_000_001, 70_000, 70_000, 0, 1_500_000, 1023]
    for step, numel in enumerate(sizes):
        checkpointer.save_sync(state_of(step, numel), step)
        report = checkpointer.wait_sync()
        assert report is not None and report.recycled is (step >= 2)
        path = file_of(directory, step)
        nvmeio.save(state_of(step, numel), tmp_path / "fresh.pt")
        facts, fresh = os.stat(path), os.stat(tmp_path / "fresh.pt")
        comment = len(b"nvmeio completed ") + 19  # says when it was completed
        assert facts.st_size == fresh.st_size + comment == report.nbytes
        assert facts.st_blocks * 512 <= facts.st_size + MIB  # what lay behind is given back
        check_file(path, step, numel)
        assert_same(torch.load(path, mmap=True), state_of(step, numel))
        assert_same(nvmeio.load(path), state_of(step, numel))


def test_readers_of_what_is_kept_are_not_disturbed(new: Any, directory: Path) -> None:
    checkpointer = new(keep=2)
    for step in range(3):
        checkpointer.save_sync(state_of(step, 100_000), step)
    checkpointer.wait_sync()
    mapped = {step: torch.load(file_of(directory, step), mmap=True) for step in (1, 2)}
    opened = {step: file_of(directory, step).open("rb") for step in (1, 2)}
    checkpointer.save_sync(state_of(3, 100_000), 3)
    report = checkpointer.wait_sync()
    assert report is not None and report.recycled
    for step in (1, 2):
        assert_same(mapped[step], state_of(step, 100_000))
        with opened[step] as file:
            assert_same(torch.load(file), state_of(step, 100_000))


def one_more(checkpointer: nvmeio.Checkpointer) -> SaveReport:
    checkpointer.save_sync(state_of(3, 100_000), 3)
    report = checkpointer.wait_sync()
    assert report is not None
    assert_same(checkpointer.restore(), state_of(3, 100_000))
    return report


@pytest.mark.parametrize("layout", ["one", "per_rank"])
@pytest.mark.parametrize("load", [torch.load, nvmeio.load])
def test_what_is_mapped_is_not_overwritten(
    layout: str, load: Any, new: Any, directory: Path
) -> None:
    checkpointer = new(keep=1, layout=layout)
    for step in (0, 1):
        checkpointer.save_sync(state_of(step, 100_000), step)
    checkpointer.wait_sync()
    path = file_of(directory, 0)
    if layout == "per_rank":
        path = path.with_suffix("") / "rank-00000.pt"
    mapped = load(path, mmap=True)
    reports = []
    for step in (2, 3, 4):
        checkpointer.save_sync(state_of(step, 100_000), step)
        reports.append(checkpointer.wait_sync().recycled)
    assert_same(mapped, state_of(0, 100_000))
    assert reports == [False, True, True]


def test_what_other_programs_read_is_not_overwritten(new: Any, directory: Path) -> None:
    checkpointer = new(keep=2)
    three_generations(checkpointer)
    with open(file_of(directory, 0), "rb") as oldest:
        assert one_more(checkpointer).recycled is False
        assert_same(torch.load(oldest), state_of(0, 100_000))
    assert checkpointer.steps() == [1, 2, 3]


def test_a_reader_with_a_lock(new: Any, directory: Path) -> None:
    checkpointer = new(keep=2)
    three_generations(checkpointer)
    mapped = torch.load(file_of(directory, 0), mmap=True)
    with open(file_of(directory, 0), "rb") as oldest:
        fcntl.flock(oldest, fcntl.LOCK_SH)
        assert one_more(checkpointer).recycled is False
        assert_same(torch.load(oldest), state_of(0, 100_000))
    assert_same(mapped, state_of(0, 100_000))
    assert checkpointer.steps() == [1, 2, 3]


def test_a_file_object_is_not_recycled_under_its_reader(new: Any, directory: Path) -> None:
    checkpointer = new(keep=2)
    three_generations(checkpointer)
    with nvmeio.FastFileReader(file_of(directory, 0)) as reader:
        checkpointer.save_sync(state_of(9), 9)
        checkpointer.wait_sync()
        assert_same(torch.load(reader), state_of(0, 100_000))


@pytest.mark.parametrize(
    ("module", "call"), [(verifying, verifying.verify), (describing, describing.describe)]
)
def test_what_is_looked_at_is_not_recycled(
    module: Any, call: Any, new: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = new(keep=2)
    three_generations(checkpointer)
    size = file_of(directory, 0).stat().st_size
    make = module.CallHandle

    def later(*arguments: Any) -> Any:
        checkpointer.save_sync({"b": torch.ones(7)}, 9)
        checkpointer.wait_sync()
        return make(*arguments)

    monkeypatch.setattr(module, "CallHandle", later)
    found = call(file_of(directory, 0))
    assert found.nbytes == size
    assert not getattr(found, "problems", [])


def test_a_hard_link(new: Any, directory: Path, tmp_path: Path) -> None:
    checkpointer = new(keep=2)
    three_generations(checkpointer)
    os.link(file_of(directory, 0), tmp_path / "mine.pt")
    assert one_more(checkpointer).recycled is False
    check_file(tmp_path / "mine.pt", 0, 100_000)
    assert checkpointer.steps() == [1, 2, 3]


def test_without_recycling(new: Any, directory: Path) -> None:
    checkpointer = new(keep=3, recycle=False)
    three_generations(checkpointer)
    mapped = torch.load(file_of(directory, 0), mmap=True)
    assert one_more(checkpointer).recycled is False
    assert_same(mapped, state_of(0, 100_000))
    assert checkpointer.steps() == [1, 2, 3]


async def test_a_load_that_is_under_way(
    new: Any, directory: Path, engine_held: HeldEngine, new_handle: Any
) -> None:
    """nvmeio's own readers lock what they read."""
    checkpointer = new(keep=2)
    three_generations(checkpointer)
    reading = asyncio.create_task(
        nvmeio.async_load(file_of(directory, 0), handle=new_handle(engine_held))
    )
    await until(lambda: engine_held.begun > 0)
    assert one_more(checkpointer).recycled is False
    engine_held.gate.set()
    assert_same(await reading, state_of(0, 100_000))


def test_restoring_beside_saves(new: Any) -> None:
    """Over and over, the latest and the oldest: always one that was saved, never a mixture."""
    checkpointer = new(keep=1)
    checkpointer.save_sync(state_of(0, 200_000), 0)
    checkpointer.wait_sync()
    over = threading.Event()
    restored: list[int] = []

    def restore() -> None:
        while not over.is_set():
            found = checkpointer.restore()
            assert_same(found, state_of(found["step"], 200_000))
            restored.append(found["step"])
            with contextlib.suppress(FileNotFoundError):  # recycled between the two
                oldest = checkpointer.steps()[0]
                assert_same(checkpointer.restore(oldest), state_of(oldest, 200_000))

    with thread(restore):
        try:
            step = 0
            deadline = time.monotonic() + PATIENCE_S
            # At least so many, and until three were read: on a busy machine that takes more.
            while step < 40 or (len(set(restored)) < 3 and time.monotonic() < deadline):
                step += 1
                checkpointer.save_sync(state_of(step, 200_000), step)
            checkpointer.wait_sync()
        finally:
            over.set()
    assert restored == sorted(restored) and len(set(restored)) > 2


# The pointer


POINTERS: dict[str, tuple[Callable[[Path], object], int, bool]] = {
    # what is done to it, the step that is the latest then, whether the log says so
    "as it was": (lambda p: None, 2, False),
    "missing": (lambda p: p.unlink(), 2, True),
    "dangling": (lambda p: make_link(p, "step-00000077.pt"), 2, True),
    "to another step": (lambda p: make_link(p, "step-00000001.pt"), 1, False),
    "absolute": (lambda p: make_link(p, str(p.parent / "step-00000001.pt")), 1, False),
    "roundabout": (lambda p: make_link(p, "./../checkpoints/step-00000001.pt"), 1, False),
    "to a directory": (lambda p: make_link(p, "."), 2, True),
    "a text": (lambda p: make_text(p, b"step-00000001.pt\n"), 1, False),
    "garbage": (lambda p: make_text(p, b"\xff\x00\xfe" * 1000), 2, True),
    "empty": (lambda p: make_text(p, b""), 2, True),
    "a pipe": (lambda p: (p.unlink(), os.mkfifo(p)), 2, True),
}


@pytest.mark.parametrize("name", POINTERS)
def test_a_pointer_that_is(
    name: str, new: Any, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where it leads nowhere, the one that was completed last is the latest, and the log says so.

    A pipe of that name made `restore` hang.
    """
    change, wanted, logged = POINTERS[name]
    checkpointer = new(keep=3)
    for step in range(3):
        checkpointer.save_sync(state_of(step), step)
    checkpointer.wait_sync()
    change(directory / "latest")
    caplog.clear()
    assert checkpointer.latest_step() == wanted
    assert ("latest" in caplog.text) is logged
    assert_same(checkpointer.restore(), state_of(wanted))
    checkpointer.save_sync(state_of(9), 9)
    checkpointer.wait_sync()
    assert checkpointer.latest_step() == 9 and os.readlink(directory / "latest")[5:13] == "00000009"


def test_what_the_pointer_names_is_not_recycled(new: Any, directory: Path) -> None:
    """Whoever sets it back wants to go on from there."""
    checkpointer = new(keep=2)
    three_generations(checkpointer)
    make_link(directory / "latest", "step-00000000.pt")
    assert one_more(checkpointer).recycled
    assert checkpointer.steps() == [0, 2, 3]
    check_file(file_of(directory, 0), 0, 100_000)


def test_a_pointer_that_cannot_be_moved(new: Any, directory: Path) -> None:
    """The new checkpoint is there; what `latest` leads to stays the latest."""
    checkpointer = new(keep=2)
    checkpointer.save_sync(state_of(0), 0)
    checkpointer.wait_sync()
    (directory / "latest").unlink()
    (directory / "latest").mkdir()
    checkpointer.save_sync(state_of(1), 1)
    with pytest.raises(IsADirectoryError, match="latest"):
        checkpointer.wait_sync()
    assert [name for name in names(directory) if name.endswith("tmp")] == []
    (directory / "latest").rmdir()
    checkpointer.save_sync(state_of(2), 2)
    checkpointer.wait_sync()
    assert checkpointer.latest_step() == 2


@pytest.mark.parametrize("layout", ["one", "per_rank"])
@pytest.mark.parametrize("how", ["with links", "links followed", "links left out"])
def test_a_copied_directory_has_the_order_of_the_original(
    how: str, layout: str, directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The order was that of modification times, which a copy has of its own.

    A link that had become a copy of its file was read as a name: the warning showed raw bytes.
    """
    with nvmeio.Checkpointer(directory, keep=5, layout=layout) as checkpointer:
        for step in (98, 99, 100):
            checkpointer.save_sync(state_of(step), step)
        checkpointer.restore(99)
        checkpointer.save_sync(state_of(51), 51)  # gone back: the latest has the lowest number
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy, symlinks=how == "with links", copy_function=shutil.copyfile)
    if how == "links left out":
        pointer = copy / "latest"
        shutil.rmtree(pointer) if layout == "per_rank" else pointer.unlink()
    for moment, step in enumerate((100, 51, 98, 99)):  # as they came over the wire
        (name,) = (name for name in os.listdir(copy) if name.startswith(f"step-{step:08d}"))
        path = copy / name / "index.json" if layout == "per_rank" else copy / name
        os.utime(path, (moment, moment))
    with nvmeio.Checkpointer(copy, keep=1, layout=layout) as checkpointer:
        assert checkpointer.latest_step() == 51
        assert_same(checkpointer.restore(), state_of(51))
        warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert all("is missing; going on from step 51" in text for text in warned)
        assert bool(warned) == (how == "links left out")
        checkpointer.save_sync(state_of(52), 52)
        checkpointer.wait_sync()
        assert checkpointer.steps() == [51, 52]  # the oldest went first
    assert os.path.islink(copy / "latest") and len(names(copy)) == 3


@pytest.mark.parametrize("kind", ["checkpoint", "directory", "text"])
def test_a_pointer_that_is_no_copy_of_a_step_is_not_written_over(
    kind: str, directory: Path
) -> None:
    """A copy of ``latest`` alone would have been the only copy of its bytes."""
    directory.mkdir()
    pointer = directory / "latest"
    if kind == "checkpoint":
        nvmeio.save(state_of(7), pointer)
    elif kind == "directory":
        pointer.mkdir()
    else:
        pointer.write_text("notes of mine")
    with pytest.raises(nvmeio.TransferError, match="of which no step is a copy") as refused:
        nvmeio.Checkpointer(directory)
    assert refused.value.errno == errno.EEXIST and pointer.exists()


@pytest.mark.parametrize("text", ["[" * 100_000, "null", "[1]", "{", '{"files": 3}'])
def test_an_index_of_ranks_that_says_nothing_is_named(text: str, directory: Path) -> None:
    """JSON nested that deep was a bare RecursionError."""
    (directory / "step-00000003").mkdir(parents=True)
    (directory / "step-00000003" / "index.json").write_text(text)
    with (
        nvmeio.Checkpointer(directory, read_only=True) as checkpointer,
        pytest.raises(nvmeio.IntegrityError, match=r"step-00000003/index\.json"),
    ):
        checkpointer.restore(3)


def test_a_file_system_without_symbolic_links(
    new: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: str, target: str) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "symlink", refuse)
    checkpointer = new(keep=1)
    for step in range(4):
        checkpointer.save_sync(state_of(step), step)
    checkpointer.wait_sync()
    assert (directory / "latest").read_text() == "step-00000003.pt"
    assert checkpointer.latest_step() == 3 and checkpointer.steps() == [2, 3]
    assert len(names(directory)) == 3


def test_a_damaged_checkpoint_is_told(new: Any, directory: Path) -> None:
    checkpointer = new()
    for step in (1, 2):
        checkpointer.save_sync(state_of(step), step)
    checkpointer.wait_sync()
    os.truncate(file_of(directory, 2), 9000)
    with pytest.raises(nvmeio.IntegrityError, match=r"step-00000002\.pt"):
        checkpointer.restore()
    assert_same(checkpointer.restore(1), state_of(1))


# One file per rank, alone: the protocol of the directory


def test_one_file_per_rank(new: Any, directory: Path) -> None:
    checkpointer = new(keep=2, layout="per_rank")
    reports = []
    for step in range(5):
        checkpointer.save_sync(state_of(step, 1000 * (5 - step)), step)
        reports.append(checkpointer.wait_sync())
    assert [report.recycled for report in reports] == [False] * 3 + [True] * 2
    assert names(directory) == ["latest", *(f"step-{step:08d}" for step in (2, 3, 4))]
    assert names(directory / "step-00000003") == ["index.json", "rank-00000.pt"]
    assert os.readlink(directory / "latest") == "step-00000004"
    for step in (2, 3, 4):
        check_file(directory / f"step-{step:08d}" / "rank-00000.pt", step, 1000 * (5 - step))
        assert_same(checkpointer.restore(step), state_of(step, 1000 * (5 - step)))
        assert_same(checkpointer.restore(step, rank=0), state_of(step, 1000 * (5 - step)))
    with pytest.raises(ValueError, match="rank 1 is out of range: ranks 0 to 0"):
        checkpointer.restore(rank=1)
    with pytest.raises(ValueError, match="rank must be 0 or more"):
        checkpointer.restore(rank=-1)


def test_a_step_of_one_file_per_rank_saved_again(new: Any, directory: Path) -> None:
    checkpointer = new(keep=2, layout="per_rank")
    for step, numel in ((1, 100), (2, 200), (2, 300), (1, 400)):
        checkpointer.save_sync(state_of(step, numel), step)
        checkpointer.wait_sync()
        assert_same(checkpointer.restore(), state_of(step, numel))
    assert names(directory) == ["latest", "step-00000001", "step-00000002"]


def test_a_foreign_directory_is_not_replaced(new: Any, directory: Path) -> None:
    """It was removed, with all that lay in it."""
    (directory / "step-00000001").mkdir(parents=True)
    (directory / "step-00000001" / "mine").write_bytes(b"x")
    checkpointer = new(layout="per_rank")
    checkpointer.save_sync(state_of(1), 1)
    with pytest.raises(FileExistsError, match="no Checkpointer has written"):
        checkpointer.wait_sync()
    assert (directory / "step-00000001" / "mine").read_bytes() == b"x"
    checkpointer.save_sync(state_of(2), 2)
    checkpointer.wait_sync()
    assert checkpointer.steps() == [2]


def test_directories_that_cannot_be_exchanged(
    new: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(one: str, other: str) -> None:
        raise OSError(errno.EINVAL, "not here")

    monkeypatch.setattr("nvmeio._storage.durable.exchange", refuse)
    checkpointer = new(layout="per_rank")
    checkpointer.save_sync(state_of(1), 1)
    checkpointer.save_sync(state_of(1, 7), 1)
    with pytest.raises(nvmeio.TransferError, match="cannot exchange two directories"):
        checkpointer.wait_sync()
    assert_same(checkpointer.restore(), state_of(1))
    assert names(directory) == ["latest", "step-00000001"]


def test_a_directory_that_is_being_read_is_not_recycled(new: Any, directory: Path) -> None:
    checkpointer = new(keep=1, layout="per_rank")
    for step in range(2):
        checkpointer.save_sync(state_of(step), step)
    checkpointer.wait_sync()
    reader = os.open(directory / "step-00000000", os.O_RDONLY)
    try:
        fcntl.flock(reader, fcntl.LOCK_SH)
        checkpointer.save_sync(state_of(2), 2)
        report = checkpointer.wait_sync()
        assert report is not None and report.recycled is False
        check_file(directory / "step-00000000" / "rank-00000.pt", 0)
    finally:
        os.close(reader)
    checkpointer.save_sync(state_of(3), 3)
    checkpointer.wait_sync()
    assert checkpointer.steps() == [2, 3]


def test_a_file_in_a_directory_with_a_link_is_not_overwritten(
    new: Any, directory: Path, tmp_path: Path
) -> None:
    checkpointer = new(keep=1, layout="per_rank")
    for step in range(2):
        checkpointer.save_sync(state_of(step), step)
    checkpointer.wait_sync()
    os.link(directory / "step-00000000" / "rank-00000.pt", tmp_path / "mine.pt")
    checkpointer.save_sync(state_of(2), 2)
    report = checkpointer.wait_sync()
    assert report is not None and report.recycled is False
    check_file(tmp_path / "mine.pt", 0)
    assert checkpointer.steps() == [1, 2]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda p: (p / "index.json").write_text("{"), "damaged"),
        (lambda p: (p / "index.json").write_text('{"files": {}}'), "damaged"),
        (lambda p: (p / "index.json").write_text('{"files": {"../a": 1}}'), "damaged"),
        (lambda p: (p / "index.json").write_text('{"files": [1]}'), "damaged"),
        (lambda p: (p / "rank-00000.pt").unlink(), "found None"),
        (lambda p: os.truncate(p / "rank-00000.pt", 10), "found 10"),
    ],
)
def test_a_damaged_directory_is_told(change: Any, text: str, new: Any, directory: Path) -> None:
    checkpointer = new(layout="per_rank")
    checkpointer.save_sync(state_of(0), 0)
    checkpointer.wait_sync()
    change(directory / "step-00000000")
    with pytest.raises(nvmeio.IntegrityError, match=text):
        checkpointer.restore()


def test_a_checkpoint_that_is_replaced_while_it_is_read(
    new: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of its files could be of the old one, some of the new."""
    from nvmeio.checkpoint import _restoring as restoring

    checkpointer = new(layout="per_rank")
    checkpointer.save_sync(state_of(1, 100), 1)
    checkpointer.wait_sync()
    real = restoring.files_of
    times = [1]

    def replace(path: str) -> list[str]:
        found = real(path)
        if times[0]:
            times[0] -= 1
            checkpointer.save_sync(state_of(1, 200), 1)
            checkpointer.wait_sync()
        return found

    monkeypatch.setattr(restoring, "files_of", replace)
    assert_same(checkpointer.restore(), state_of(1, 200))
    times[0] = 1000
    with pytest.raises(nvmeio.TransferError, match="replaced while it was being read"):
        checkpointer.restore()


def test_layouts_may_follow_each_other(directory: Path) -> None:
    for turn, layout in enumerate(("one", "per_rank", "one")):
        with nvmeio.Checkpointer(directory, keep=1, layout=layout) as checkpointer:
            for step in (2 * turn, 2 * turn + 1):
                checkpointer.save_sync(state_of(step), step)
        assert checkpointer.latest_step() == 2 * turn + 1
        assert_same(checkpointer.restore(), state_of(2 * turn + 1))
        assert len(checkpointer.steps()) == 2


def test_a_step_in_both_layouts(directory: Path) -> None:
    """The one that was completed last is restored."""
    for layout in ("one", "per_rank"):
        with nvmeio.Checkpointer(directory, layout=layout, overwrite=True) as checkpointer:
            checkpointer.save_sync({"layout": layout}, 1)
    assert checkpointer.steps() == [1]
    assert checkpointer.restore() == checkpointer.restore(1) == {"layout": "per_rank"}


@pytest.mark.parametrize("completed_ns", [10**30, -(10**30), 1 << 63])
def test_a_time_that_is_none_does_not_keep_others_from_being_saved(tmp_path, completed_ns):
    """The next save gave its file a time behind it: OverflowError, for good."""
    damaged = tmp_path / "step-00000001"
    damaged.mkdir()
    index = {"format": 1, "step": 1, "completed_ns": completed_ns, "files": {}}
    (damaged / "index.json").write_text(json.dumps(index))
    with nvmeio.Checkpointer(tmp_path, overwrite=True) as checkpointer:
        checkpointer.save_sync({"a": torch.zeros(3)}, 2)
        assert checkpointer.latest_step() == 2
    assert retention.generations(str(tmp_path))[-1].step == 2
