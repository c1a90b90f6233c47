"""The error hierarchy: classes, attributes, wording, pickling."""

from __future__ import annotations

import copy
import errno
import pickle
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
from support import run_python
from torch._utils import ExceptionWrapper

import nvmeio
from nvmeio import errors
from nvmeio.errors import (
    AlignmentError,
    BackendUnavailableError,
    ClosedError,
    DeviceTimeoutError,
    IntegrityError,
    NvmeioError,
    ShortTransferError,
    TransferError,
    naming,
)

BUILTINS = {
    errno.ENOENT: FileNotFoundError,
    errno.EEXIST: FileExistsError,
    errno.EACCES: PermissionError,
    errno.EPERM: PermissionError,
    errno.EISDIR: IsADirectoryError,
    errno.ENOTDIR: NotADirectoryError,
    errno.EAGAIN: BlockingIOError,
    errno.EINTR: InterruptedError,
    errno.ETIMEDOUT: TimeoutError,
    errno.EPIPE: BrokenPipeError,
}
PLAIN = [errno.EIO, errno.ENOSPC, errno.EFBIG, errno.EBADF, errno.EINVAL, errno.EROFS, 9999]


def transfer_error(code: int, kind: type[TransferError] = TransferError) -> TransferError:
    return kind(code, operation="pread", path="/x/y", file_offset=100, nbytes=1000, transferred=10)


# Classes


def test_the_tree() -> None:
    assert issubclass(NvmeioError, Exception)
    for kind, also in (
        (ClosedError, NvmeioError),
        (AlignmentError, ValueError),
        (TransferError, OSError),
        (ShortTransferError, TransferError),
        (BackendUnavailableError, RuntimeError),
        (DeviceTimeoutError, RuntimeError),
        (IntegrityError, NvmeioError),
    ):
        assert issubclass(kind, NvmeioError)
        assert issubclass(kind, also)
        assert getattr(nvmeio, kind.__name__) is kind


@pytest.mark.parametrize(("code", "builtin"), BUILTINS.items(), ids=errno.errorcode.get)
def test_the_matching_builtin(code: int, builtin: type[OSError]) -> None:
    error = transfer_error(code)
    assert isinstance(error, builtin)
    assert isinstance(error, TransferError)
    assert type(error).__name__ == "TransferError"
    assert type(error) is type(transfer_error(code))  # one class, not one for each error
    assert type(OSError(code, "")) is builtin
    with pytest.raises(builtin):
        raise error


@pytest.mark.parametrize("code", PLAIN)
def test_errors_without_a_builtin_of_their_own(code: int) -> None:
    assert type(transfer_error(code)) is TransferError


@pytest.mark.parametrize("kind", [TransferError, ShortTransferError])
@pytest.mark.parametrize("code", [*BUILTINS, *PLAIN])
def test_attributes(kind: type[TransferError], code: int) -> None:
    error = transfer_error(code, kind)
    assert isinstance(error, kind)
    assert (error.errno, error.operation, error.path) == (code, "pread", "/x/y")
    assert (error.file_offset, error.nbytes, error.transferred) == (100, 1000, 10)
    assert error.filename == "/x/y"
    assert error.others == ()
    assert error.strerror is not None


def test_a_short_transfer_tells_both_counts() -> None:
    error = transfer_error(errno.ENODATA, ShortTransferError)
    assert isinstance(error, ShortTransferError)
    assert (error.requested, error.transferred) == (1000, 10)


# Wording


def test_a_message_says_what_where_and_how() -> None:
    text = str(transfer_error(errno.ENOSPC))
    assert text == (
        "[Errno 28] ENOSPC: No space left on device; pread /x/y [100, 1100): 10 of 1000 bytes "
        "(free space on the file system (df -h), or choose another directory)"
    )


def test_an_open_has_no_span() -> None:
    text = str(TransferError(errno.ENOENT, operation="open", path="/x/y"))
    assert "open /x/y (check the path" in text
    assert "[0, 0)" not in text
    assert text.count("/x/y") == 1


@pytest.mark.parametrize("operation", ["save", "rename", "truncate", "close", "mkdir", "pread"])
def test_error_about_no_bytes_shows_no_span(operation: str) -> None:
    """A failed rename said "[0, 0): 0 of 0 bytes"."""
    text = str(TransferError(errno.EROFS, operation=operation, path="/x/y"))
    assert f"; {operation} /x/y (" in text
    assert "bytes" not in text


def test_a_detail_takes_the_place_of_the_usual_words() -> None:
    text = str(TransferError(errno.EBADF, operation="open", path="p", detail="of the wrong kind"))
    assert text == "[Errno 9] EBADF: of the wrong kind; open p"


REMEDIES = {
    errno.ENOENT: "check the path, and that its directory is there",
    errno.EEXIST: 'open the existing file with mode="r+"',
    errno.EISDIR: "name a file inside the directory",
    errno.EACCES: "check the permissions of the file",
    errno.EPERM: "check the permissions and attributes (lsattr)",
    errno.EROFS: "mounted read-only; choose another directory",
    errno.EBADF: "closed, or not open for this direction",
    errno.ENOSPC: "free space on the file system (df -h)",
    errno.EDQUOT: "the disk quota is used up (quota -s)",
    errno.EFBIG: "the file size limit is reached (ulimit -f",
    errno.EMFILE: "too many open files: raise `ulimit -n`",
    errno.EIO: "the drive reported an error: look at `dmesg`",
    errno.EINVAL: "refused this offset or size: run `nvmeio report",
    errno.ESPIPE: "use a regular file or block device",
}


@pytest.mark.parametrize("kind", [TransferError, ShortTransferError])
def test_a_failure_says_for_what_it_was(kind: type[TransferError]) -> None:
    """It stays of its class, and keeps its fields and how to fix it."""
    error = errors.with_context(transfer_error(errno.EIO, kind), "read for weight 'a'")
    assert type(error) is kind
    assert (error.errno, error.file_offset, error.transferred) == (errno.EIO, 100, 10)
    assert f"(read for weight 'a'; {REMEDIES[errno.EIO]}" in str(error)
    missing = errors.with_context(
        TransferError(errno.ENOENT, operation="open", path="p"), "weight 'a'"
    )
    assert isinstance(missing, FileNotFoundError)
    gone = TransferError(errno.EBADF, operation="open", path="p", detail="in words")
    assert "EBADF: in words (weight 'a'); open p" in str(errors.with_context(gone, "weight 'a'"))


def test_an_unknown_number_is_told_as_it_is() -> None:
    assert "9999: Unknown error 9999" in str(transfer_error(9999))


@pytest.mark.parametrize(("code", "remedy"), REMEDIES.items())
def test_remedies_are_told(code: int, remedy: str) -> None:
    assert remedy in str(transfer_error(code))


# Pickling and copying: errors cross processes in torch.distributed and multiprocessing


@pytest.mark.parametrize("kind", [TransferError, ShortTransferError])
@pytest.mark.parametrize("code", [*BUILTINS, *PLAIN])
@pytest.mark.parametrize("how", ["pickle", "copy", "deepcopy"])
def test_copies_are_equal(kind: type[TransferError], code: int, how: str) -> None:
    error = kind(
        code,
        operation="pwrite",
        path="/x/y",
        file_offset=1,
        nbytes=2,
        transferred=1,
        detail="in words",
    )
    made = {
        "pickle": lambda: pickle.loads(pickle.dumps(error)),
        "copy": lambda: copy.copy(error),
        "deepcopy": lambda: copy.deepcopy(error),
    }[how]()
    assert made is not error
    assert type(made) is type(error)
    assert (str(made), repr(made), made.args) == (str(error), repr(error), error.args)
    assert made.__dict__ == error.__dict__
    assert (made.errno, made.filename) == (error.errno, error.filename)


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EACCES, errno.EIO])
def test_an_error_leaves_a_worker_of_a_data_loader(code: int) -> None:
    """The class of FileNotFoundErrors could not be pickled: the DataLoader waited for ever."""
    try:
        raise transfer_error(code)
    except TransferError as failed:
        wrapped = ExceptionWrapper(where="in a worker")
        kind = type(failed)
    sent = pickle.loads(ForkingPickler.dumps(wrapped))
    assert sent.exc_type is kind
    with pytest.raises(RuntimeError, match=r"TransferError: \[Errno"):
        sent.reraise()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_pickle_protocol(protocol: int) -> None:
    error = transfer_error(errno.ENOENT)
    made = pickle.loads(pickle.dumps(error, protocol))
    assert isinstance(made, FileNotFoundError)
    assert str(made) == str(error)


def test_the_other_errors_are_copied_too() -> None:
    alignment = AlignmentError("odd", required=512, address=3, file_offset=5, nbytes=7)
    made = pickle.loads(pickle.dumps(alignment))
    assert (str(made), made.__dict__) == ("odd", alignment.__dict__)
    backend = BackendUnavailableError("none", attempts=[("a", "b")], remedy="c")
    made = pickle.loads(pickle.dumps(backend))
    assert (str(made), made.__dict__) == (str(backend), backend.__dict__)
    integrity = IntegrityError("bad", expected=b"1", found=b"2")
    made = pickle.loads(pickle.dumps(integrity))
    assert (str(made), made.__dict__) == ("bad", integrity.__dict__)
    closed = pickle.loads(pickle.dumps(ClosedError("closed")))
    assert str(closed) == "closed"


def test_the_others_of_a_failure_are_copied_too() -> None:
    error = transfer_error(errno.ENOENT)
    error.others = (transfer_error(errno.EIO), transfer_error(errno.EACCES))
    made = pickle.loads(pickle.dumps(error))
    assert [type(other) for other in made.others] == [type(other) for other in error.others]
    closed = ClosedError("closed")
    closed.others = (error,)
    assert str(pickle.loads(pickle.dumps(closed)).others[0]) == str(error)


def test_an_error_crosses_a_process() -> None:
    done = run_python(
        """
        import errno, pickle, torch, nvmeio
        with nvmeio.AioHandle(engine="threads") as handle:
            error = handle.async_pread(torch.zeros(250), "/no/such/file").exception(100)
        print(pickle.dumps(error).hex())
        """
    )
    assert done.stderr == ""
    error = pickle.loads(bytes.fromhex(done.stdout))
    assert isinstance(error, TransferError)
    assert isinstance(error, FileNotFoundError)
    assert error.path == error.filename == "/no/such/file"


# The others


def test_alignment_error() -> None:
    error = AlignmentError("odd", required=512, address=3, file_offset=5, nbytes=7)
    assert (error.required, error.address, error.file_offset, error.nbytes) == (512, 3, 5, 7)
    error = AlignmentError("odd", required=512)
    assert (error.address, error.file_offset, error.nbytes) == (None, None, None)


def test_backend_unavailable_error_lists_every_attempt() -> None:
    error = BackendUnavailableError(
        "nothing works", attempts=[("libaio", "no file"), ("kernel", "no call")], remedy="make it"
    )
    assert str(error).splitlines() == [
        "nothing works",
        "  libaio: no file",
        "  kernel: no call",
        "  how to fix it: make it",
    ]
    assert error.attempts == [("libaio", "no file"), ("kernel", "no call")]
    assert error.remedy == "make it"
    assert BackendUnavailableError("plain").attempts == []


def test_integrity_error() -> None:
    error = IntegrityError("bytes differ", expected=b"a", found=b"b")
    assert (str(error), error.expected, error.found) == ("bytes differ", b"a", b"b")


def test_items_that_failed() -> None:
    first = nvmeio.TransferError(errno.ENOSPC, operation="pwrite_batch", path="/x/y")
    second = nvmeio.ClosedError("closed")
    error = nvmeio.BatchError(
        errno.ENOSPC,
        items=5,
        whole=3,
        failures=[(2, first), (4, second)],
        operation="pwrite_batch",
        path="/x/y",
        file_offset=800,
        nbytes=100,
        transferred=200,
    )
    assert error.__cause__ is first
    again = [pickle.loads(pickle.dumps(error)), copy.copy(error), errors.with_context(error, "a")]
    for each in (error, *again):
        assert isinstance(each, nvmeio.BatchError)
        assert (each.errno, each.item, each.items, each.whole) == (errno.ENOSPC, 2, 5, 3)
        assert (each.file_offset, each.nbytes, each.transferred) == (800, 100, 200)
        assert [(item, type(failure)) for item, failure in each.failures] == [
            (2, nvmeio.TransferError),
            (4, nvmeio.ClosedError),
        ]
        assert [type(other) for other in each.others] == [nvmeio.ClosedError]
        assert "item 2 [800, 900), 3 of 5 items are whole; pwrite_batch /x/y" in str(each)
    assert "free space" in str(error)


def test_rows_that_failed() -> None:
    error = nvmeio.RowsError(
        errno.EIO,
        row=2,
        rows=3,
        whole=2,
        _whole_rows=b"\1\1\0",
        operation="gather",
        path="/x/y",
        file_offset=800,
        nbytes=100,
        transferred=200,
    )
    again = [pickle.loads(pickle.dumps(error)), copy.copy(error), errors.with_context(error, "a")]
    for each in (error, *again):
        assert isinstance(each, nvmeio.RowsError)
        assert (each.errno, each.row, each.rows, each.whole) == (errno.EIO, 2, 3, 2)
        assert (each.file_offset, each.nbytes, each.transferred) == (800, 100, 200)
        assert each.mask().tolist() == [True, True, False]
        assert "row 2 at byte 800, 2 of 3 rows are whole; gather /x/y" in str(each)
    assert "smartctl" in str(error)


def test_what_the_system_refuses_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(FileNotFoundError) as raised, naming("open", missing, "look elsewhere"):
        missing.read_bytes()
    error = raised.value
    assert isinstance(error, TransferError)
    assert (error.operation, error.path, error.errno) == ("open", str(missing), errno.ENOENT)
    assert "look elsewhere" in str(error)
    with pytest.raises(FileNotFoundError) as again, naming("rename", tmp_path):
        raise error
    assert again.value is error  # named already
    with pytest.raises(KeyError), naming("open", missing):
        {}["x"]
