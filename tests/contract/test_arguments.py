"""Bad input: each kind raises one exact type, and says what, where and how to fix it."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import pickle
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import (
    bytes_tensor,
    new_descriptors,
    open_descriptors,
    random_bytes,
    raw,
    run_python,
    spin_until,
)

import nvmeio
from nvmeio.testing import FakeEngine

Make = Callable[..., nvmeio.AioHandle]
DATA = random_bytes(10_000)


@pytest.fixture
def file(path: Path) -> Path:
    path.write_bytes(DATA)
    return path


@pytest.fixture
def one_handle(new_handle: Make) -> nvmeio.AioHandle:
    """What is checked before any engine is asked need not be checked on each of them."""
    return new_handle("threads")


def tensor(nbytes: int = 100) -> torch.Tensor:
    return torch.full((nbytes,), 7, dtype=torch.uint8)


def failure_of(operation: nvmeio.Operation) -> nvmeio.TransferError:
    """The error of an operation: the same from `exception`, `result` and in a copy."""
    failure = operation.exception(100)
    assert isinstance(failure, nvmeio.TransferError)
    with pytest.raises(nvmeio.TransferError) as caught:
        operation.result(100)
    assert caught.value is failure
    copy = pickle.loads(pickle.dumps(failure))
    assert type(copy) is type(failure)
    assert (str(copy), copy.args) == (str(failure), failure.args)
    for name in ("errno", "operation", "path", "filename", "file_offset", "nbytes", "transferred"):
        assert getattr(copy, name) == getattr(failure, name), name
    return failure


# Parameters of the handle


@pytest.mark.parametrize("block_size", [1, 511, 4095, 4097, 10_000, (1 << 20) + 512])
def test_block_size_is_a_multiple_of_4096(block_size: int) -> None:
    with pytest.raises(nvmeio.AlignmentError, match="not a multiple of 4096") as caught:
        nvmeio.AioHandle(block_size)
    assert isinstance(caught.value, ValueError)
    assert (caught.value.nbytes, caught.value.required) == (block_size, 4096)
    assert f"use {-(-block_size // 4096) * 4096}" in str(caught.value)


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("block_size", 0),
        ("block_size", -4096),
        ("block_size", (1 << 30) + 4096),
        ("block_size", 1 << 64),
        ("queue_depth", 0),
        ("queue_depth", -1),
        ("queue_depth", 65537),
        ("intra_op_parallelism", 0),
        ("intra_op_parallelism", -3),
        ("intra_op_parallelism", 1025),
    ],
)
def test_parameters_out_of_range(parameter: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{parameter} must lie between 1 and .*{value}") as caught:
        nvmeio.AioHandle(**{parameter: value})
    assert type(caught.value) is ValueError


@pytest.mark.parametrize("parameter", ["block_size", "queue_depth", "intra_op_parallelism"])
@pytest.mark.parametrize("value", [b"4096", 4096.0, True, None, [4096]], ids=repr)
def test_parameters_of_the_wrong_type(parameter: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"{parameter} must be an int, not "):
        nvmeio.AioHandle(**{parameter: value})


@pytest.mark.parametrize("parameter", ["single_submit", "overlap_events"])
def test_a_switch_says_what_it_says(parameter: str) -> None:
    """The string "false" was taken for True."""
    meanings = [(True, True), (0, False), (np.True_, True), ("false", False), ("TRUE", True)]
    for value, meant in meanings:
        with nvmeio.AioHandle(queue_depth=1, engine="threads", **{parameter: value}) as handle:
            assert getattr(handle, f"get_{parameter}")() is meant


@pytest.mark.parametrize("parameter", ["single_submit", "overlap_events"])
@pytest.mark.parametrize("value", ["no", "", "1", None, 2, []], ids=repr)
def test_anything_else_is_no_switch(parameter: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"{parameter} must be true or false, not"):
        nvmeio.AioHandle(**{parameter: value})


def test_an_engine_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match=r"engine must be one of 'auto', .*, not 'io_uring'"):
        nvmeio.AioHandle(engine="io_uring")


@pytest.mark.parametrize(
    "engine", [None, 3, object(), FakeEngine], ids=["None", "3", "object", "class"]
)
def test_an_engine_that_is_none(engine: Any) -> None:
    with pytest.raises(TypeError, match="engine"):
        nvmeio.AioHandle(engine=engine)


def test_an_engine_serves_one_handle(new_handle: Make) -> None:
    engine = FakeEngine()
    new_handle(engine)
    with pytest.raises(RuntimeError, match="one engine serves one handle"):
        nvmeio.AioHandle(engine=engine)


def test_a_handle_that_cannot_be_made_leaves_nothing_behind() -> None:
    """`nothing_leaks` looks for its threads: the engine had been started already."""

    class NoQueue(FakeEngine):
        def open_completion_queue(self) -> Any:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with pytest.raises(OSError, match="Too many open files"):
        nvmeio.AioHandle(engine=NoQueue())


def test_descriptors_run_out_at_the_first_use_of_a_loop(file: Path) -> None:
    """The file was opened by then, and stayed so."""

    class OneQueue(FakeEngine):
        queues = 0

        def open_completion_queue(self) -> Any:
            self.queues += 1
            if self.queues > 1:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return super().open_completion_queue()

    async def read(handle: nvmeio.AioHandle) -> None:
        before = open_descriptors()
        with pytest.raises(OSError, match="Too many open files"):
            handle.async_pread(tensor(), file)
        spin_until(lambda: not new_descriptors(before))

    with nvmeio.AioHandle(engine=OneQueue()) as handle:
        asyncio.run(read(handle))
        assert handle.wait() == 0
        assert handle.sync_pread(tensor(), file) == 100


# Tensors


@pytest.mark.parametrize("direction", ["async_pread", "async_pwrite", "pread", "sync_pwrite"])
@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("text", "expected a torch.Tensor, or an object with the buffer protocol .*, not str"),
        ([1.0, 2.0], "expected a torch.Tensor, or .* not list"),
        (None, "expected a torch.Tensor, or .* not NoneType"),
        (torch.zeros(3, device="meta"), "meta tensor has no memory"),
        (torch.eye(3).to_sparse(), "sparse_coo tensor has no single memory"),
    ],
    ids=["text", "list", "none", "meta", "sparse"],
)
def test_what_is_no_tensor_with_memory(
    one_handle: nvmeio.AioHandle, file: Path, direction: str, bad: Any, says: str
) -> None:
    with pytest.raises(TypeError, match=says):
        getattr(one_handle, direction)(bad, file)
    assert one_handle.stats.operations == 0
    assert file.read_bytes() == DATA


# Offsets


@pytest.mark.parametrize("direction", ["async_pread", "async_pwrite", "pread", "pwrite"])
@pytest.mark.parametrize("file_offset", [-1, -4096, 1 << 63, 1 << 80])
def test_offsets_out_of_range(
    one_handle: nvmeio.AioHandle, file: Path, direction: str, file_offset: int
) -> None:
    with pytest.raises(ValueError, match=f"file_offset must lie .*, not {file_offset}") as caught:
        getattr(one_handle, direction)(tensor(), file, file_offset=file_offset)
    assert type(caught.value) is ValueError


@pytest.mark.parametrize("direction", ["async_pread", "async_pwrite", "pread", "pwrite"])
@pytest.mark.parametrize("file_offset", ["0", 0.0, None, True], ids=repr)
def test_offsets_of_the_wrong_type(
    one_handle: nvmeio.AioHandle, file: Path, direction: str, file_offset: Any
) -> None:
    with pytest.raises(TypeError, match="file_offset must be an int, not "):
        getattr(one_handle, direction)(tensor(), file, file_offset=file_offset)


@pytest.mark.parametrize("file_offset", [1 << 40, 1 << 62, (1 << 63) - 8192])
def test_a_read_far_behind_the_end(handle: nvmeio.AioHandle, file: Path, file_offset: int) -> None:
    failure = failure_of(handle.async_pread(tensor(), file, file_offset))
    assert isinstance(failure, nvmeio.ShortTransferError)
    assert (failure.file_offset, failure.requested, failure.transferred) == (file_offset, 100, 0)


@pytest.mark.parametrize("file_offset", [1 << 62, (1 << 63) - 8192])
def test_a_write_farther_than_the_file_system_goes(
    handle: nvmeio.AioHandle, file: Path, file_offset: int
) -> None:
    failure = failure_of(handle.async_pwrite(tensor(8000), file, file_offset))
    assert failure.errno == errno.EFBIG
    assert (failure.file_offset, failure.transferred) == (file_offset, 0)
    assert file.read_bytes() == DATA


@pytest.mark.parametrize("direction", ["async_pread", "async_pwrite"])
def test_a_span_that_ends_behind_the_last_possible_byte(
    one_handle: nvmeio.AioHandle, file: Path, direction: str
) -> None:
    """The kernel says EINVAL, as it does where direct I/O does not work; the file keeps it."""
    with nvmeio.open(file, "r+") as opened:
        alignment = opened.alignment
        with pytest.raises(ValueError, match="file_offset"):
            getattr(one_handle, direction)(tensor(8192), opened, (1 << 63) - 4096)
        assert opened.alignment == alignment


# Files that are none


@pytest.mark.parametrize("direction", ["async_pread", "async_pwrite"])
@pytest.mark.parametrize(
    "file", [None, 1.5, True, b"bytes", ["a"], torch.zeros(1)], ids=lambda f: type(f).__name__
)
def test_a_file_of_the_wrong_type(one_handle: nvmeio.AioHandle, direction: str, file: Any) -> None:
    with pytest.raises(TypeError, match="file must be a path, an open descriptor or an nvmeio"):
        getattr(one_handle, direction)(tensor(), file)


@pytest.mark.parametrize("direction", ["async_pread", "async_pwrite"])
def test_a_name_with_a_null_character(one_handle: nvmeio.AioHandle, direction: str) -> None:
    with pytest.raises(ValueError, match="null"):
        getattr(one_handle, direction)(tensor(), "a\0b")
    with pytest.raises(ValueError, match="null"):
        nvmeio.open("a\0b")


def missing(directory: Path) -> Path:
    return directory / "missing.bin"


def in_a_missing_directory(directory: Path) -> Path:
    return directory / "no" / "such" / "directory"


def behind_a_file(directory: Path) -> Path:
    (directory / "plain").write_bytes(b"")
    return directory / "plain" / "below"


def itself(directory: Path) -> Path:
    return directory


def looping(directory: Path) -> Path:
    (directory / "a").symlink_to(directory / "b")
    (directory / "b").symlink_to(directory / "a")
    return directory / "a"


def dangling(directory: Path) -> Path:
    (directory / "link").symlink_to(directory / "no" / "target")
    return directory / "link"


def too_long(directory: Path) -> Path:
    return directory / ("x" * 300)


def pipe(directory: Path) -> Path:
    os.mkfifo(directory / "fifo")
    return directory / "fifo"


def a_socket(directory: Path) -> Path:
    # Names of sockets are short (man 7 unix), those of test directories are not.
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(directory)
        try:
            made.bind("socket")
        finally:
            os.chdir(here)
    return directory / "socket"


def null(_: Path) -> Path:
    return Path("/dev/null")


NOT_FILES: list[tuple[Callable[[Path], Path], str, int, type[OSError]]] = [
    (missing, "async_pread", errno.ENOENT, FileNotFoundError),
    (in_a_missing_directory, "async_pread", errno.ENOENT, FileNotFoundError),
    (in_a_missing_directory, "async_pwrite", errno.ENOENT, FileNotFoundError),
    (behind_a_file, "async_pread", errno.ENOTDIR, NotADirectoryError),
    (behind_a_file, "async_pwrite", errno.ENOTDIR, NotADirectoryError),
    (itself, "async_pread", errno.EISDIR, IsADirectoryError),
    (itself, "async_pwrite", errno.EISDIR, IsADirectoryError),
    (looping, "async_pread", errno.ELOOP, OSError),
    (looping, "async_pwrite", errno.ELOOP, OSError),
    (dangling, "async_pread", errno.ENOENT, FileNotFoundError),
    (dangling, "async_pwrite", errno.ENOENT, FileNotFoundError),
    (too_long, "async_pread", errno.ENAMETOOLONG, OSError),
    (too_long, "async_pwrite", errno.ENAMETOOLONG, OSError),
    (pipe, "async_pread", errno.ESPIPE, OSError),
    (pipe, "async_pwrite", errno.ENXIO, OSError),
    (a_socket, "async_pread", errno.ENXIO, OSError),
    (a_socket, "async_pwrite", errno.ENXIO, OSError),
    (null, "async_pread", errno.ESPIPE, OSError),
    (null, "async_pwrite", errno.ESPIPE, OSError),
]


@pytest.mark.parametrize(
    ("make", "direction", "code", "builtin"),
    NOT_FILES,
    ids=[f"{make.__name__}-{direction}" for make, direction, *_ in NOT_FILES],
)
def test_file_that_cannot_be_opened_fails_the_operation(
    one_handle: nvmeio.AioHandle,
    tmp_path: Path,
    make: Callable[[Path], Path],
    direction: str,
    code: int,
    builtin: type[OSError],
) -> None:
    file = make(tmp_path)
    before = open_descriptors()
    operation = getattr(one_handle, direction)(tensor(), file)
    failure = failure_of(operation)
    spin_until(lambda: not new_descriptors(before))
    assert isinstance(failure, builtin)
    assert issubclass(type(failure), nvmeio.TransferError)
    assert (failure.errno, failure.operation) == (code, "open")
    assert failure.path == failure.filename == str(file)
    assert failure.transferred == 0
    assert errno.errorcode[code] in str(failure)  # what
    assert f"open {file}" in str(failure)  # where
    assert str(failure).count(str(file)) == 1
    assert one_handle.stats.errors == one_handle.stats.operations == 1
    with pytest.raises(builtin) as caught:
        nvmeio.open(file, "r" if direction == "async_pread" else "rw")
    assert isinstance(caught.value, nvmeio.TransferError)
    assert caught.value.operation == "open"
    if make is not pipe:  # one that is open for both directions needs no other end
        assert caught.value.errno == code


def test_messages_say_how_to_mend_it(one_handle: nvmeio.AioHandle, tmp_path: Path) -> None:
    absent = failure_of(one_handle.async_pwrite(tensor(), tmp_path / "no" / "file"))
    assert "check the path, and that its directory is there" in str(absent)
    directory = failure_of(one_handle.async_pread(tensor(), tmp_path))
    assert "name a file inside the directory" in str(directory)
    short = failure_of(one_handle.async_pread(tensor(), os.devnull))
    assert "not a regular file or block device" in str(short)


def test_nothing_is_created_by_a_write_that_fails_to_open(
    one_handle: nvmeio.AioHandle, tmp_path: Path
) -> None:
    failure_of(one_handle.async_pwrite(tensor(), tmp_path / "no" / "file"))
    assert list(tmp_path.iterdir()) == []


# Permissions


@pytest.mark.untraced
def test_no_permission(tmp_path: Path) -> None:
    """As nobody, for root may do anything."""
    done = run_python(
        f"""
        import errno, os, pathlib, pickle, torch, nvmeio
        directory = pathlib.Path({str(tmp_path)!r})
        (directory / "secret").write_bytes(b"x" * 100)
        (directory / "secret").chmod(0o600)
        (directory / "mine").write_bytes(b"x" * 100)
        (directory / "mine").chmod(0o444)
        for above in (directory, *directory.parents):
            if above.owner() == "root" and str(above).startswith("/tmp/pytest"):
                above.chmod(0o755)
        handle = nvmeio.AioHandle(engine="threads")
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        else:
            (directory / "secret").chmod(0)
        for start, name in (
            (handle.async_pread, "secret"),
            (handle.async_pwrite, "secret"),
            (handle.async_pwrite, "mine"),
            (handle.async_pwrite, "new" if os.getuid() == 65534 else "secret"),
        ):
            failure = start(torch.zeros(100), directory / name).exception(100)
            assert isinstance(failure, PermissionError), failure
            assert isinstance(failure, nvmeio.TransferError)
            assert failure.errno == errno.EACCES
            assert failure.path == str(directory / name)
            assert "check the permissions" in str(failure), failure
            assert isinstance(pickle.loads(pickle.dumps(failure)), PermissionError)
            print(name)
        assert handle.sync_pread(torch.zeros(25), directory / "mine") == 100
        handle.close()
        """
    )
    assert done.stderr == ""
    assert done.stdout.split()[:3] == ["secret", "secret", "mine"]
    assert done.returncode == 0


# Descriptors and Files


@pytest.fixture
def descriptors(file: Path) -> Iterator[dict[str, int]]:
    opened = {
        "reading": os.open(file, os.O_RDONLY),
        "writing": os.open(file, os.O_WRONLY),
        "both": os.open(file, os.O_RDWR),
        "appending": os.open(file, os.O_WRONLY | os.O_APPEND),
        "direct": os.open(file, os.O_RDWR | os.O_CLOEXEC),
        "path": os.open(file, os.O_PATH),
        "directory": os.open(file.parent, os.O_RDONLY),
    }
    opened["in"], opened["out"] = os.pipe()
    left, right = socket.socketpair()
    opened["socket"] = left.detach()
    right.close()
    yield opened
    for fd in opened.values():
        os.close(fd)


@pytest.mark.parametrize("fd", [9999, -1, -(1 << 40), 1 << 31, 1 << 40, 1 << 80])
@pytest.mark.parametrize("direction", ["async_pread", "async_pwrite"])
def test_numbers_that_are_no_descriptor(
    one_handle: nvmeio.AioHandle, direction: str, fd: int
) -> None:
    failure = failure_of(getattr(one_handle, direction)(tensor(), fd))
    assert failure.errno == errno.EBADF
    assert failure.path == f"descriptor {fd}"
    assert failure.operation == "open"


def test_a_descriptor_closed_in_between(one_handle: nvmeio.AioHandle, file: Path) -> None:
    low = os.open(file, os.O_RDONLY)
    fd = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 900)  # a number that nobody else is given
    os.close(low)
    assert one_handle.sync_pread(tensor(), fd) == 100
    os.close(fd)
    assert failure_of(one_handle.async_pread(tensor(), fd)).errno == errno.EBADF


@pytest.mark.parametrize(
    ("name", "direction", "code", "says"),
    [
        ("writing", "async_pread", errno.EBADF, "not open for reading"),
        ("appending", "async_pread", errno.EBADF, "not open for reading"),
        ("reading", "async_pwrite", errno.EBADF, "not open for writing"),
        ("directory", "async_pread", errno.EISDIR, "name a file inside"),
        ("in", "async_pread", errno.ESPIPE, "not a regular file"),
        ("out", "async_pwrite", errno.ESPIPE, "not a regular file"),
        ("socket", "async_pread", errno.ESPIPE, "not a regular file"),
        ("socket", "async_pwrite", errno.ESPIPE, "not a regular file"),
        ("path", "async_pwrite", errno.EBADF, "not open for"),
    ],
)
def test_descriptors_that_will_not_do(
    one_handle: nvmeio.AioHandle,
    descriptors: dict[str, int],
    file: Path,
    name: str,
    direction: str,
    code: int,
    says: str,
) -> None:
    fd = descriptors[name]
    before = open_descriptors()
    failure = failure_of(getattr(one_handle, direction)(tensor(), fd))
    spin_until(lambda: not new_descriptors(before))
    assert failure.errno == code
    assert says in str(failure)
    assert failure.path.endswith(f"(descriptor {fd})")
    assert file.read_bytes() == DATA


@pytest.mark.parametrize("name", ["writing", "both", "appending", "direct"])
@pytest.mark.parametrize("file_offset", [0, 5, 4096])
def test_writes_through_a_descriptor_go_where_they_should(
    handle: nvmeio.AioHandle,
    descriptors: dict[str, int],
    file: Path,
    name: str,
    file_offset: int,
) -> None:
    """O_APPEND makes pwrite(2) itself append, wherever it is told to write."""
    fd = descriptors[name]
    flags = os.get_inheritable(fd)
    assert handle.sync_pwrite(tensor(5000), fd, file_offset) == 5000
    assert file.read_bytes() == DATA[:file_offset] + b"\7" * 5000 + DATA[file_offset + 5000 :]
    assert os.lseek(fd, 0, os.SEEK_CUR) == 0  # the caller's position is the caller's
    assert os.get_inheritable(fd) == flags


@pytest.mark.parametrize("name", ["reading", "both", "direct"])
def test_reads_through_a_descriptor(
    handle: nvmeio.AioHandle, descriptors: dict[str, int], name: str
) -> None:
    fd = descriptors[name]
    got = tensor(5000)
    assert handle.sync_pread(got, fd, 123) == 5000
    assert raw(got) == DATA[123:5123]
    assert os.lseek(fd, 0, os.SEEK_CUR) == 0


def test_a_descriptor_of_an_unlinked_file(handle: nvmeio.AioHandle, file: Path) -> None:
    with open(file, "r+b") as opened:
        file.unlink()
        assert handle.sync_pwrite(tensor(6000), opened.fileno(), 10) == 6000
        got = tensor(6010)
        assert handle.sync_pread(got, opened.fileno()) == 6010
    assert raw(got) == DATA[:10] + b"\7" * 6000


def test_a_closed_file(one_handle: nvmeio.AioHandle, file: Path) -> None:
    opened = nvmeio.open(file, "r+")
    opened.close()
    for use in (
        lambda: one_handle.async_pread(tensor(), opened),
        lambda: one_handle.async_pwrite(tensor(), opened),
        lambda: one_handle.sync_fsync(opened),
    ):
        with pytest.raises(nvmeio.ClosedError, match="is closed; open it again") as caught:
            use()
        assert str(file) in str(caught.value)


def test_writing_to_a_file_opened_for_reading(one_handle: nvmeio.AioHandle, file: Path) -> None:
    with nvmeio.open(file) as opened:
        failure = failure_of(one_handle.async_pwrite(tensor(), opened))
    assert failure.errno == errno.EBADF
    assert failure.path == str(file)
    assert 'opened with mode "r"' in str(failure)
    assert file.read_bytes() == DATA


# Short files


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize(
    ("file_offset", "there"),
    [(0, 10_000), (9_900, 100), (9_999, 1), (4_096, 5_904), (10_000, 0), (12_288, 0), (1 << 40, 0)],
)
def test_a_read_past_the_end(
    handle: nvmeio.AioHandle, file: Path, file_offset: int, there: int, contiguous: bool
) -> None:
    got = tensor(12_000) if contiguous else torch.full((12_000, 2), 7, dtype=torch.uint8)[:, 0]
    operation = handle.async_pread(got, file, file_offset)
    failure = failure_of(operation)
    assert type(failure) is nvmeio.ShortTransferError
    assert (failure.requested, failure.transferred) == (12_000, there)
    assert (failure.operation, failure.path) == ("pread", str(file))
    assert (failure.file_offset, failure.nbytes) == (file_offset, 12_000)
    assert operation.transferred == there
    says = f"the file ends at byte {len(DATA)}, " if there else "the file ends before the span"
    assert says in str(failure)
    assert f"{there} of 12000 bytes" in str(failure)
    assert f"[{file_offset}, {file_offset + 12_000})" in str(failure)
    if contiguous:  # the bytes that exist are in the tensor
        assert raw(got)[:there] == DATA[file_offset : file_offset + there]
    if not there:
        assert (got == 7).all()


def test_a_short_read_harms_no_other(handle: nvmeio.AioHandle, file: Path) -> None:
    got = tensor(10_000)
    operations = [handle.async_pread(tensor(20_000), file) for _ in range(5)]
    good = handle.async_pread(got, file)
    assert good.result(100) == 10_000
    assert raw(got) == DATA
    assert all(isinstance(o.exception(100), nvmeio.ShortTransferError) for o in operations)
    assert handle.stats.errors == 5


# Errors of blocks in mid-transfer


@pytest.mark.parametrize("direction", ["async_pread", "async_pwrite"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_block_that_fails(new_handle: Make, path: Path, direction: str, code: int) -> None:
    path.write_bytes(bytes(1 << 18))
    aligned = nvmeio.empty_aligned(1 << 18, dtype=torch.uint8)
    handle = new_handle(FakeEngine(fail={1 << 17: code}), block_size=16384, queue_depth=1)
    failure = failure_of(getattr(handle, direction)(aligned, path))
    assert (failure.errno, failure.nbytes, failure.transferred) == (code, 1 << 18, 1 << 17)
    assert failure.operation == direction.removeprefix("async_")
    assert "131072 of 262144 bytes" in str(failure)
    assert not isinstance(failure, nvmeio.ShortTransferError)
    assert handle.stats.errors == 1
    # Other operations are unaffected, and so is the next.
    assert getattr(handle, direction)(aligned[: 1 << 16], path).result(100) == 1 << 16


# Modes


@pytest.mark.parametrize("mode", ["a", "", "b", "rr", "r+w", "wx", "U", "rt", "+"], ids=repr)
def test_modes_that_do_not_exist(file: Path, mode: str) -> None:
    with pytest.raises(ValueError, match="mode must be one of 'r', 'r\\+', 'rw', 'w', 'x'"):
        nvmeio.open(file, mode)
    assert file.read_bytes() == DATA


@pytest.mark.parametrize("mode", [None, 3, b"r", os.O_RDONLY], ids=repr)
def test_modes_of_the_wrong_type(file: Path, mode: Any) -> None:
    with pytest.raises(TypeError, match="mode"):
        nvmeio.open(file, mode)


@pytest.mark.parametrize("name", [None, 3, 1.5, b"bytes"], ids=repr)
def test_names_of_the_wrong_type(name: Any) -> None:
    with pytest.raises(TypeError):
        nvmeio.open(name)


# Waiting


@pytest.mark.parametrize("timeout", ["1", [1]], ids=repr)
def test_timeouts_of_the_wrong_type(one_handle: nvmeio.AioHandle, file: Path, timeout: Any) -> None:
    operation = one_handle.async_pread(tensor(), file)
    with pytest.raises(TypeError):
        one_handle.wait(timeout)
    with pytest.raises(TypeError):
        operation.result(timeout)
    assert operation.result(100) == 100


# Writing by name


def test_a_written_file_gets_the_usual_permissions(
    one_handle: nvmeio.AioHandle, path: Path
) -> None:
    before = os.umask(0o027)
    try:
        one_handle.sync_pwrite(tensor(), path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_write_through_a_symbolic_link(one_handle: nvmeio.AioHandle, file: Path) -> None:
    link = file.with_name("link")
    link.symlink_to(file)
    one_handle.sync_pwrite(bytes_tensor(b"new"), link)
    assert link.is_symlink()
    assert file.read_bytes() == b"new" + DATA[3:]
