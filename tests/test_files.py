"""Open files: modes, descriptors, alignment, and who closes what."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import (
    HeldEngine,
    bytes_tensor,
    new_descriptors,
    open_descriptors,
    random_bytes,
    raw,
    run_python,
    spin_until,
    spin_until_collected,
)

import nvmeio
from nvmeio import files
from nvmeio._bindings import OwnFds
from nvmeio._core.core import Core
from nvmeio._core.records import LiveRecords
from nvmeio._files import descriptors
from nvmeio._files import descriptors as descriptors_module
from nvmeio._files.descriptors import Alignment, Descriptors
from nvmeio.checkpoint import safetensors
from nvmeio.engines import transfers
from nvmeio.engines.threads import ThreadsRequest
from nvmeio.files import probe_direct

DATA = random_bytes(10_000)


@pytest.fixture
def file(path: Path) -> Path:
    path.write_bytes(DATA)
    return path


@pytest.fixture
def handle(new_handle: object) -> nvmeio.AioHandle:
    assert callable(new_handle)
    made = new_handle("threads")
    assert isinstance(made, nvmeio.AioHandle)
    return made


def opened_on(path: Path) -> int:
    return sum(target == str(path) for target in open_descriptors().values())


# Modes


def test_r_reads_and_does_not_create(handle: nvmeio.AioHandle, file: Path) -> None:
    with nvmeio.open(file) as opened:
        assert (opened.mode, opened.path) == ("r", str(file))
        got = torch.zeros(len(DATA), dtype=torch.uint8)
        assert handle.sync_pread(got, opened) == len(DATA)
        assert raw(got) == DATA
    with pytest.raises(FileNotFoundError):
        nvmeio.open(file.with_name("other"))
    assert not file.with_name("other").exists()


def test_r_plus_writes_what_exists(handle: nvmeio.AioHandle, file: Path) -> None:
    with nvmeio.open(file, "r+") as opened:
        assert opened.size() == len(DATA)
        handle.sync_pwrite(bytes_tensor(b"new"), opened, 1)
        got = torch.zeros(5, dtype=torch.uint8)
        handle.sync_pread(got, opened)
    assert raw(got) == DATA[:1] + b"new" + DATA[4:5]
    with pytest.raises(FileNotFoundError):
        nvmeio.open(file.with_name("other"), "r+")


def test_rw_creates_and_keeps(handle: nvmeio.AioHandle, file: Path) -> None:
    with nvmeio.open(file, "rw") as opened:
        assert opened.size() == len(DATA)
        handle.sync_pwrite(bytes_tensor(b"new"), opened)
    assert file.read_bytes() == b"new" + DATA[3:]
    with nvmeio.open(file.with_name("other"), "rw") as opened:
        assert opened.size() == 0


def test_w_empties(handle: nvmeio.AioHandle, file: Path) -> None:
    with nvmeio.open(file, "w") as opened:
        assert opened.size() == 0
        # An unaligned write opens a second descriptor, which must not empty it again.
        handle.sync_pwrite(torch.ones(9000, dtype=torch.uint8), opened)
        handle.sync_pwrite(torch.ones(9000, dtype=torch.uint8), opened, 9001)
        assert opened.size() == 18_001
    assert file.read_bytes() == b"\1" * 9000 + b"\0" + b"\1" * 9000


def test_x_creates_or_fails(handle: nvmeio.AioHandle, file: Path) -> None:
    with pytest.raises(FileExistsError) as caught:
        nvmeio.open(file, "x")
    assert isinstance(caught.value, nvmeio.TransferError)
    assert file.read_bytes() == DATA
    with nvmeio.open(file.with_name("other"), "x") as opened:
        assert handle.sync_pwrite(torch.ones(9000, dtype=torch.uint8), opened, 1) == 9000
    assert file.with_name("other").stat().st_size == 9001


@pytest.mark.parametrize("mode", ["rb", "r+b", "rb+", "wb", "xb", "brw"])
def test_a_b_means_nothing(file: Path, mode: str) -> None:
    named = file if mode != "xb" else file.with_name("other")
    with nvmeio.open(named, mode) as opened:
        assert opened.mode == mode


@pytest.fixture
def ramfs(tmp_path: Path) -> Iterator[Path]:
    """A file system that refuses O_DIRECT when a file is opened."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    made = tmp_path / "ramfs"
    made.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "ramfs", "ramfs", made], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a ramfs: {mounted.stderr.strip()}")
    yield made
    subprocess.run(["umount", made], check=True)


@pytest.mark.root
@pytest.mark.parametrize("mode", ["rw", "w", "x"])
def test_files_are_created_where_o_direct_is_refused(
    handle: nvmeio.AioHandle, ramfs: Path, mode: str
) -> None:
    """The kernel creates the file and only then refuses: a second O_EXCL found it there."""
    with nvmeio.open(ramfs / "new", mode) as opened:
        assert opened.alignment == 0
        assert handle.sync_pwrite(bytes_tensor(DATA), opened, 3) == len(DATA)
        got = torch.zeros(len(DATA), dtype=torch.uint8)
        assert handle.sync_pread(got, opened, 3) == len(DATA)
    assert raw(got) == DATA
    assert handle.stats.buffered_bytes == 2 * len(DATA)
    with pytest.raises(FileExistsError):
        nvmeio.open(ramfs / "new", "x")


# The life of a File


def test_a_file_closes_its_descriptors(handle: nvmeio.AioHandle, file: Path) -> None:
    assert opened_on(file) == 0
    opened = nvmeio.open(file, "r+")
    assert opened_on(file) == 1
    handle.sync_pwrite(torch.ones(9000, dtype=torch.uint8), opened, 1)
    assert opened_on(file) in (1, 2)  # direct, and buffered for the edges
    opened.close()
    assert opened_on(file) == 0
    assert opened.closed
    opened.close()
    assert opened_on(file) == 0


def test_with_closes_a_file(file: Path) -> None:
    with nvmeio.open(file) as opened:
        assert not opened.closed
    assert opened.closed
    assert opened_on(file) == 0
    with pytest.raises(nvmeio.ClosedError, match="is closed; open it again"):
        opened.size()


def test_a_dropped_file_closes(file: Path) -> None:
    opened = nvmeio.open(file)
    assert opened_on(file) == 1
    del opened
    spin_until_collected(lambda: opened_on(file) == 0)


def test_a_program_that_ends_with_an_open_file_says_nothing(file: Path) -> None:
    """Each file, and each `Records`, that a program left open ended it with a traceback."""
    ran = run_python(
        f"""
        import torch, nvmeio
        opened = nvmeio.open({str(file)!r})
        records = nvmeio.data.Records({str(file)!r}, torch.uint8)
        records[[0]]
        """,
        fresh=True,
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_descriptors_stay_until_the_last_transfer_is_done(file: Path) -> None:
    engine = HeldEngine()
    with nvmeio.AioHandle(engine=engine) as handle:
        opened = nvmeio.open(file)
        operations = [handle.async_pread(torch.zeros(100), opened) for _ in range(3)]
        assert repr(opened) == f"<nvmeio.File {str(file)!r} mode='r' open, 3 in flight>"
        opened.close()
        assert repr(opened) == f"<nvmeio.File {str(file)!r} mode='r' closed, 3 in flight>"
        assert opened_on(file) == 1
        engine.gate.set()
        assert [operation.result(100) for operation in operations] == [400] * 3
    assert opened_on(file) == 0
    assert repr(opened) == f"<nvmeio.File {str(file)!r} mode='r' closed, 0 in flight>"


def test_a_path_is_open_for_its_transfer_only(file: Path) -> None:
    engine = HeldEngine()
    with nvmeio.AioHandle(engine=engine) as handle:
        operation = handle.async_pread(torch.zeros(100), file)
        assert opened_on(file) == 1
        engine.gate.set()
        assert operation.result(100) == 400
        assert opened_on(file) == 0


def test_descriptors_are_not_inherited(file: Path) -> None:
    engine = HeldEngine()
    with nvmeio.AioHandle(engine=engine) as handle, nvmeio.open(file, "r+") as opened:
        handle.async_pwrite(torch.ones(9000, dtype=torch.uint8), opened, 1)
        with open(file, "rb") as mine:
            handle.async_pread(torch.zeros(10), mine.fileno())
        ours = [fd for fd, target in open_descriptors().items() if target == str(file)]
        assert len(ours) >= 2
        assert not any(os.get_inheritable(fd) for fd in ours)
        engine.gate.set()


def test_one_file_for_several_handles_and_threads(file: Path) -> None:
    with (
        nvmeio.open(file) as opened,
        nvmeio.AioHandle(engine="threads") as first,
        nvmeio.AioHandle(engine="threads") as second,
        ThreadPoolExecutor(4) as pool,
    ):

        def read(n: int) -> bytes:
            got = torch.zeros(1000, dtype=torch.uint8)
            (first if n % 2 else second).sync_pread(got, opened, n)
            return raw(got)

        assert list(pool.map(read, range(200))) == [DATA[n : n + 1000] for n in range(200)]


def test_a_file_renamed_or_removed_stays_the_same(handle: nvmeio.AioHandle, file: Path) -> None:
    with nvmeio.open(file, "r+") as opened:
        file.rename(file.with_name("renamed"))
        file.write_bytes(b"another")
        # The second descriptor is opened now, by way of the first and not of the name.
        assert handle.sync_pwrite(bytes_tensor(b"new"), opened, 1) == 3
        assert file.read_bytes() == b"another"
        assert file.with_name("renamed").read_bytes() == DATA[:1] + b"new" + DATA[4:]
        file.with_name("renamed").unlink()
        got = torch.zeros(4, dtype=torch.uint8)
        assert handle.sync_pread(got, opened) == 4
    assert raw(got) == DATA[:1] + b"new"


def test_size_follows_the_file(handle: nvmeio.AioHandle, path: Path) -> None:
    with nvmeio.open(path, "rw") as opened:
        assert opened.size() == 0
        handle.sync_pwrite(torch.zeros(100, dtype=torch.uint8), opened, 5000)
        assert opened.size() == 5100 == path.stat().st_size


# Direct I/O


def test_alignment_is_what_the_kernel_asks_for(direct_path: Path) -> None:
    """Checked by doing it: one unit goes, half a unit does not."""
    direct_path.write_bytes(bytes(1 << 16))
    with nvmeio.open(direct_path) as opened:
        unit = opened.alignment
    assert unit in (512, 1024, 2048, 4096, 65536)
    memory: Any = nvmeio.empty_aligned(1 << 16, dtype=torch.uint8).numpy()
    fd = os.open(direct_path, os.O_RDONLY | os.O_DIRECT)
    try:
        assert os.preadv(fd, [memory[:unit]], unit) == unit
        with pytest.raises(OSError, match="Invalid argument"):
            os.preadv(fd, [memory[:unit]], unit // 2)
    finally:
        os.close(fd)


def test_a_file_without_direct_io_says_so() -> None:
    with nvmeio.open("/proc/self/status") as opened:
        assert opened.alignment == 0
    if os.path.ismount("/dev/shm"):
        assert not probe_direct("/dev/shm").supported
        assert "memory" in probe_direct("/dev/shm").reason


def test_probing_leaves_nothing_behind(tmp_path: Path) -> None:
    support = probe_direct(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert support.supported == bool(support.offset_alignment)
    assert support.supported == (support.reason == "")
    with pytest.raises(FileNotFoundError):
        probe_direct(tmp_path / "missing")


def test_a_refused_direct_transfer_is_repeated_through_the_page_cache(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file system may announce direct I/O and refuse it all the same (EINVAL)."""

    def refuse(kind: str, file_offset: int, nbytes: int) -> int:
        return errno.EINVAL if nbytes % 4096 == 0 and nbytes else 0

    got = torch.zeros(8000, dtype=torch.uint8)
    with (
        nvmeio.AioHandle(engine=nvmeio_fake(refuse)) as handle,
        nvmeio.open(file, "r+") as opened,
    ):
        if not opened.alignment:
            pytest.skip("no direct I/O here to be refused")
        assert handle.sync_pread(got, opened) == 8000
        assert opened.alignment == 0  # from now on buffered
        assert raw(got) == DATA[:8000]
        assert handle.sync_pread(got, opened, 1000) == 8000
        assert raw(got) == DATA[1000:9000]
        stats = handle.stats
    assert (stats.operations, stats.errors, stats.buffered_bytes) == (2, 0, 16_000)
    assert (stats.direct_bytes, stats.bounced_bytes, stats.bytes_read) == (0, 0, 16_000)
    assert [r.getMessage() for r in caplog.records if str(file) in r.getMessage()] == [
        f"{file} refused direct I/O (EINVAL): buffered instead"
    ]


def test_only_the_request_that_ended_is_concluded(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two wait for a transfer that is refused: the slower one ended the second attempt half way."""
    under_way = threading.Event()
    go_on = threading.Event()

    def refuse(kind: str, file_offset: int, nbytes: int) -> int:
        if nbytes % 4096 == 0 and nbytes:
            return errno.EINVAL
        under_way.set()
        assert go_on.wait(100)
        return 0

    with (
        nvmeio.AioHandle(engine=nvmeio_fake(refuse)) as handle,
        nvmeio.open(file) as opened,
    ):
        if not opened.alignment:
            pytest.skip("no direct I/O here to be refused")
        got = torch.zeros(8000, dtype=torch.uint8)
        operation = handle.async_pread(got, opened)
        wait = ThreadsRequest.wait
        slower = threading.current_thread()

        def overtaken(request: ThreadsRequest, timeout_s: float) -> bool:
            ended = wait(request, max(timeout_s, 100.0 if not under_way.is_set() else 0.0))
            if ended and not under_way.is_set() and threading.current_thread() is slower:
                other = threading.Thread(target=operation.done)
                other.start()
                assert under_way.wait(100)
                other.join(100)
            return ended

        monkeypatch.setattr(ThreadsRequest, "wait", overtaken)
        assert not operation.done()
        go_on.set()
        assert operation.result(100) == 8000
        assert raw(got) == DATA[:8000]


def nvmeio_fake(fail: object) -> object:
    from nvmeio.testing import FakeEngine

    return FakeEngine(fail=fail)  # type: ignore[arg-type]


# Descriptors

USER = "the test"


def test_the_last_user_of_a_closed_file_closes_it(file: Path) -> None:
    opened = Descriptors.open(str(file), os.O_RDONLY)
    opened.hold("a user")
    opened.close()
    assert opened_on(file) == 1
    opened.share("another, beside the first")
    opened.let_go("a user")
    assert opened_on(file) == 1
    opened.let_go("another, beside the first")
    assert opened_on(file) == 0
    assert opened.direct_fd == -1
    with pytest.raises(nvmeio.ClosedError):
        opened.hold("a user")


def test_the_inode_is_the_files_whatever_it_is_called(file: Path) -> None:
    link = file.with_name("link")
    link.symlink_to(file)
    there = os.stat(file)
    with open(file, "rb") as mine:
        for named in (str(file), link, mine.fileno()):
            opened = files.acquire(named, USER, None)
            assert opened.inode == (there.st_dev, there.st_ino)
            opened.let_go(USER)


def test_the_buffered_descriptor_is_opened_when_it_is_needed(direct_path: Path) -> None:
    direct_path.write_bytes(DATA)
    opened = Descriptors.open(str(direct_path), os.O_RDWR)
    assert opened_on(direct_path) == 1
    assert fcntl.fcntl(opened.direct_fd, fcntl.F_GETFL) & os.O_DIRECT
    fd = opened.buffered_fd()
    assert opened_on(direct_path) == 2
    assert not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
    assert opened.buffered_fd() == fd
    opened.demote()
    assert opened.alignment == Alignment(0, 0)
    opened.close()
    assert opened_on(direct_path) == 0


@pytest.fixture
def told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that says nothing of direct I/O: it has to be tried."""
    facts = descriptors.file_facts
    unknown = {"memory_alignment": None, "offset_alignment": None}
    monkeypatch.setattr(descriptors, "file_facts", lambda fd: facts(fd)._replace(**unknown))
    monkeypatch.setattr(descriptors_module, "_probed", {})


@pytest.mark.parametrize("step", ["preadv", "open"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOMEM, errno.EMFILE], ids=errno.errorcode.get)
def test_a_trial_that_fails_says_nothing_of_the_device(
    direct_path: Path, told_nothing: None, monkeypatch: pytest.MonkeyPatch, code: int, step: str
) -> None:
    """One EIO, and the whole process went through the page cache from then on, quietly."""
    direct_path.write_bytes(DATA)
    real = OwnFds.open

    def fail(*args: object) -> int:
        if step == "open" and not str(args[2]).startswith("/proc/self/fd"):
            return real(*args)  # type: ignore[arg-type]
        raise OSError(code, os.strerror(code))

    before = open_descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(OwnFds if step == "open" else os, step, fail)
        with open(direct_path, "rb") as mine, pytest.raises(nvmeio.TransferError) as failed:
            files.acquire(mine.fileno() if step == "preadv" else str(direct_path), USER, False)
    assert failed.value.errno == code
    spin_until(lambda: not new_descriptors(before))
    opened = files.acquire(str(direct_path), USER, False)
    assert opened.alignment.offset
    opened.let_go(USER)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_a_device_without_direct_io_is_asked_once(
    direct_path: Path, told_nothing: None, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    direct_path.write_bytes(DATA)
    tried = []

    def refuse(*args: object) -> int:
        tried.append(args)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "preadv", refuse)
    for _ in range(3):
        opened = files.acquire(str(direct_path), USER, False)
        assert opened.alignment == Alignment(0, 0)
        opened.let_go(USER)
    assert len(tried) == 1


def test_a_borrowed_descriptor_stays_the_callers(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY)
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    opened = files.acquire(fd, USER, False)
    assert opened.path == f"{file} (descriptor {fd})"
    assert fd not in (opened.direct_fd, opened.any_fd())
    opened.let_go(USER)
    assert fcntl.fcntl(fd, fcntl.F_GETFL) == flags
    os.close(fd)


def test_a_borrowed_descriptor_may_be_closed_at_once(file: Path) -> None:
    """The operation has descriptors of its own by then; the number may mean another file."""
    engine = HeldEngine()
    got = torch.zeros(len(DATA), dtype=torch.uint8)
    with nvmeio.AioHandle(engine=engine) as handle:
        fd = os.open(file, os.O_RDONLY)
        operation = handle.async_pread(got, fd)
        other = os.open(os.devnull, os.O_RDONLY)
        os.dup2(other, fd)  # closes it, and nobody else gets the number in between
        engine.gate.set()
        assert operation.result(100) == len(DATA)
        os.close(fd)
        os.close(other)
    assert raw(got) == DATA


def test_the_next_file_system_with_a_number_is_tried_anew(
    direct_path: Path, told_nothing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """btrfs after a tmpfs that had its number (st_dev): all of it went through the page cache."""
    direct_path.write_bytes(DATA)

    def alignment() -> int:
        opened = files.acquire(str(direct_path), USER, False)
        opened.let_go(USER)
        return opened.alignment.offset

    fsid = os.statvfs(direct_path).f_fsid
    with monkeypatch.context() as before:
        before.setattr(os, "fstatvfs", lambda fd: SimpleNamespace(f_fsid=fsid + 1))
        before.setattr(descriptors_module, "_try_direct_read", lambda *_: Alignment(0, 0))
        assert alignment() == 0
    assert alignment() > 0
    monkeypatch.setattr(
        descriptors_module, "_try_direct_read", lambda *_: pytest.fail("tried once more")
    )
    assert alignment() > 0


def test_users_keep_it_open_and_the_last_of_them_closes(tmp_path: Path) -> None:
    """Without a lock: whoever lets go last, be it the file or a user, finds that out."""
    path = tmp_path / "file"
    path.write_bytes(b"x")
    opened = Descriptors.open(str(path), os.O_RDONLY)
    one, other = object(), object()
    opened.hold(one)
    opened.hold(other)
    assert opened.users == {one, other}
    opened.let_go(one)
    opened.let_go(one)  # once more does nothing
    opened.close()
    fd = opened.any_fd()
    os.fstat(fd)
    with pytest.raises(nvmeio.ClosedError):
        opened.hold(one)
    assert opened.users == {other}
    opened.let_go(other)
    assert opened.any_fd() == -1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    opened.let_go(other)


def test_a_user_that_is_refused_closes_what_was_left_to_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    opened = Descriptors.open(str(path), os.O_RDONLY)

    class Users(set[object]):
        def add(self, user: object) -> None:
            super().add(user)
            opened.close()  # by another thread: it sees a user, who closes after it

    opened.users = Users()
    with pytest.raises(nvmeio.ClosedError):
        opened.hold(object())
    assert (opened.users, opened.any_fd()) == (set(), -1)


def test_users_that_come_while_it_is_closed_are_refused_or_closed_behind(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    for _ in range(200):
        opened = Descriptors.open(str(path), os.O_RDONLY)
        begin = threading.Barrier(2)

        def hold(opened: Descriptors = opened, begin: threading.Barrier = begin) -> None:
            begin.wait(60)
            with contextlib.suppress(nvmeio.ClosedError):
                opened.hold(begin)
                assert opened.any_fd() >= 0
                opened.let_go(begin)

        thread = threading.Thread(target=hold)
        thread.start()
        begin.wait(60)
        opened.close()
        thread.join(60)
        assert (opened.users, opened.any_fd()) == (set(), -1)


class InterruptedUsers(set[object]):
    """An interrupt comes right after a user has been added, or right before one is removed."""

    def __init__(self, adding: bool) -> None:
        super().__init__()
        self.left = 1
        self._adding = adding

    def _interrupt(self) -> None:
        if self.left:
            self.left -= 1
            raise KeyboardInterrupt

    def add(self, user: object) -> None:
        super().add(user)
        if self._adding:
            self._interrupt()

    def discard(self, user: object) -> None:
        if not self._adding:
            self._interrupt()
        super().discard(user)


def start_batch(handle: nvmeio.AioHandle, file: nvmeio.File) -> object:
    tensors = [torch.zeros(512, dtype=torch.uint8) for _ in range(3)]
    return handle.async_pread_batch(tensors, file, [0, 512, 1024])


def start_large(handle: nvmeio.AioHandle, file: nvmeio.File) -> object:
    return handle.async_pread(torch.zeros(2 << 20, dtype=torch.uint8), file)


def fsync(handle: nvmeio.AioHandle, file: nvmeio.File) -> object:
    return handle.sync_fsync(file)


def read_buffered(_: nvmeio.AioHandle, file: nvmeio.File) -> object:
    return files.read_buffered(file, 0, 100)


STARTS = [start_large, start_batch, fsync, read_buffered]


@pytest.mark.parametrize("start", STARTS)
def test_an_interrupt_leaves_no_user_of_an_open_file(
    start: Callable[[nvmeio.AioHandle, nvmeio.File], object], file: Path
) -> None:
    """Its descriptors stayed open beyond `close`, and its memory was held."""
    with nvmeio.AioHandle() as handle, nvmeio.open(file, "r+") as opened:
        opened._descriptors.users = InterruptedUsers(adding=True)
        with pytest.raises(KeyboardInterrupt):
            start(handle, opened)
        assert opened._descriptors.users == set()
        opened.close()
        assert opened_on(file) == 0


@pytest.mark.parametrize("call", [fsync, read_buffered])
def test_an_interrupt_as_a_user_lets_go_leaves_none(
    call: Callable[[nvmeio.AioHandle, nvmeio.File], object], file: Path
) -> None:
    with nvmeio.AioHandle() as handle, nvmeio.open(file, "r+") as opened:
        opened._descriptors.users = InterruptedUsers(adding=False)
        with contextlib.suppress(KeyboardInterrupt):
            call(handle, opened)
        handle.wait(60)
        assert opened._descriptors.users == set()


@pytest.mark.parametrize(
    ("step", "start"),
    [*(("_submit", start) for start in STARTS[:3]), ("count", start_batch), ("plan_sync", fsync)],
)
def test_an_interrupt_before_the_engine_is_asked_leaves_no_user(
    start: Callable[[nvmeio.AioHandle, nvmeio.File], object],
    step: str,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    holder = {"_submit": Core, "count": LiveRecords, "plan_sync": transfers}[step]
    with nvmeio.AioHandle() as handle, nvmeio.open(file, "r+") as opened:
        with monkeypatch.context() as patch:
            patch.setattr(holder, step, interrupt)
            with pytest.raises(KeyboardInterrupt):
                start(handle, opened)
        assert opened._descriptors.users == set()


@pytest.mark.parametrize("late", [False, True])
def test_what_closing_reports_names_the_file_whoever_closes_it(
    late: bool, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sync that was over before its caller let go of the file lost path and operation."""

    class Lossy:
        def __init__(self) -> None:
            self._fds = OwnFds()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._fds, name)

        def close(self) -> None:
            self._fds.close()
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    start_sync = Core.start_sync

    def ended(core: Core, *args: Any) -> Any:
        record = start_sync(core, *args)
        core.watchers.wait_settled(record, None)
        return record

    monkeypatch.setattr(descriptors, "OwnFds", Lossy)
    if late:
        monkeypatch.setattr(Core, "start_sync", ended)
    with nvmeio.AioHandle() as handle:
        with pytest.raises(nvmeio.TransferError, match=f"close {file}") as lost:
            handle.sync_fsync(file)
        assert lost.value.errno == errno.EIO


# Directories


def _saved_as_stream(path: str) -> None:
    torch.save({"a": torch.ones(3)}, nvmeio.FastFileWriter(path))  # type: ignore[arg-type]


def _written(path: str, handle: nvmeio.AioHandle) -> None:
    handle.sync_pwrite(torch.ones(3), path)


WEIGHTS = {"a": torch.ones(3), "b": torch.ones(3)}
WRITERS: dict[str, Callable[[str, nvmeio.AioHandle], object]] = {
    "save": lambda path, _: nvmeio.save(WEIGHTS, path),
    "save through a handle": lambda path, handle: nvmeio.save(WEIGHTS, path, handle=handle),
    "async_save": lambda path, _: asyncio.run(nvmeio.async_save(WEIGHTS, path)),
    "FastFileWriter": lambda path, _: _saved_as_stream(path),
    "save_safetensors": lambda path, _: nvmeio.save_safetensors(WEIGHTS, path),
    "shards": lambda path, _: nvmeio.save_safetensors(WEIGHTS, path, max_shard_size=16),
    "async_save_safetensors": lambda path, _: asyncio.run(
        safetensors.async_save_safetensors(WEIGHTS, path)
    ),
    "Records.create": lambda path, _: nvmeio.data.Records.create(path, 3, torch.float32),
    "open w": lambda path, _: nvmeio.open(path, "w"),
    "open rw": lambda path, _: nvmeio.open(path, "rw"),
    "open x": lambda path, _: nvmeio.open(path, "x"),
    "handle.open": lambda path, handle: handle.open(path, "w"),
    "pwrite": _written,
}


IN_DIRECTORIES = ("save_safetensors", "shards", "async_save_safetensors")  # model.safetensors


@pytest.mark.parametrize("name", WRITERS)
def test_a_writer_takes_no_directory_for_a_file(
    name: str, handle: nvmeio.AioHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`save_safetensors` and `Records.create` made a file "new"; others said that it exists."""
    monkeypatch.chdir(tmp_path)
    os.mkdir("there")
    for path in ("new/", f"{tmp_path}/new/", "there", "there/"):
        if path.startswith("there") and name in IN_DIRECTORIES:
            continue
        with pytest.raises(IsADirectoryError) as refused:
            WRITERS[name](path, handle)
        assert isinstance(refused.value, nvmeio.TransferError)
        assert re.search(f"{path}.*name a file|name a file.*{path}", str(refused.value))
    assert os.listdir() == ["there"] and not os.listdir("there")
