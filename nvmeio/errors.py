"""Every error says what failed, where, and how to fix it.

The classes, and what each has beside its message:

    NvmeioError
    ├ ClosedError                           you closed it, or it is the parent's of this fork
    ├ AlignmentError(ValueError)            address, file_offset, nbytes, required
    ├ TransferError(OSError)                errno, operation, path, file_offset, nbytes, transferred
    │  ├ ShortTransferError                 requested, transferred
    │  ├ RowsError                          row, rows, whole, mask()
    │  ├ BatchError                         item, items, whole, failures
    │  └ CuFileError                        cufile_status, cuda_status
    ├ DeviceTimeoutError(RuntimeError)      a device has not done what it was asked
    ├ BackendUnavailableError(RuntimeError) attempts = [(name, reason), …], remedy
    └ IntegrityError                        expected, found
"""

from __future__ import annotations

import copyreg as _copyreg
import difflib
import errno as _errno
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    import torch

_AnyError = TypeVar("_AnyError", bound=BaseException)

# Remedies for the kernel's errors; looked up by errno when a TransferError is worded.
_REMEDIES: dict[int, str] = {
    _errno.ENOENT: "check the path, and that its directory is there",
    _errno.EEXIST: 'open the existing file with mode="r+", or remove it first',
    _errno.EISDIR: "name a file inside the directory",
    _errno.EACCES: "check the permissions of the file and of its directory",
    _errno.EPERM: "check the permissions and attributes (lsattr) of the file",
    _errno.EROFS: "the file system is mounted read-only; choose another directory",
    _errno.EBADF: "the descriptor is closed, or not open for this direction",
    _errno.ENOSPC: "free space on the file system (df -h), or choose another directory",
    _errno.EDQUOT: "the disk quota is used up (quota -s)",
    _errno.EFBIG: "the file size limit is reached (ulimit -f, or the file system's own)",
    _errno.EMFILE: "too many open files: raise `ulimit -n`, or keep one nvmeio.File open",
    _errno.EIO: "the drive reported an error: look at `dmesg` and `smartctl -a`",
    _errno.EINVAL: "the file system refused this offset or size: run `nvmeio report --dir`",
    _errno.ESPIPE: "pipes and sockets have no offsets; use a regular file or block device",
}


class NvmeioError(Exception):
    """Base of every error that nvmeio raises for its own reasons.

    Attributes:
        others: Failures of further operations that were collected with this one
            (`AioHandle.wait`, `drain` and `close` raise the first and attach the rest).
    """

    others: tuple[BaseException, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _copy, (type(self), self.args), self.__dict__


class ClosedError(NvmeioError):
    """The handle, file or pool is closed, or belongs to the parent of this forked process."""


class AlignmentError(NvmeioError, ValueError):
    """A size, offset or address is not a multiple of what direct I/O requires.

    Attributes:
        address: Memory address, or None where memory was not the matter.
        file_offset: Position in the file in bytes, or None.
        nbytes: Length in bytes, or None.
        required: The alignment in bytes that was required.
    """

    def __init__(
        self,
        message: str,
        *,
        required: int,
        address: int | None = None,
        file_offset: int | None = None,
        nbytes: int | None = None,
    ) -> None:
        super().__init__(message)
        self.address = address
        self.file_offset = file_offset
        self.nbytes = nbytes
        self.required = required


class DeviceTimeoutError(NvmeioError, RuntimeError):
    """A device has not finished its work in half an hour.

    Work on that device fails with this from then on. Host memory that the device may still write
    to is kept until the process ends.
    """


class TransferError(NvmeioError, OSError):
    """A transfer failed; an `OSError`, so that `except FileNotFoundError` and friends work too.

    Constructing `TransferError(errno.ENOENT, …)` yields an instance that is also a
    `FileNotFoundError`, as `OSError` itself does it.

    Attributes:
        errno: The kernel's error number.
        operation: "pread" or "pwrite"; else the operation on the file as a whole, such as "open",
            "fsync", "rename", "save", or "register" (memory, with cuFile).
        path: The file as the caller named it.
        file_offset: The first byte of the transfer; 0 if it was about no bytes.
        nbytes: The requested bytes; 0 if it was about none, and the message has no range then.
        transferred: How many of them got through before (and beside) the failure.
    """

    operation: str
    path: str
    file_offset: int
    nbytes: int
    transferred: int
    _detail: str
    _FIELDS: ClassVar[tuple[str, ...]] = (
        "operation",
        "path",
        "file_offset",
        "nbytes",
        "transferred",
    )

    def __new__(
        cls,
        errno: int,
        *,
        operation: str,
        path: str,
        file_offset: int = 0,
        nbytes: int = 0,
        transferred: int = 0,
        detail: str = "",
        _text: str = "",
    ) -> TransferError:
        """An instance that is also the built-in OSError subclass for this errno.

        `_text` says what `detail`, the remedy and the range would.
        """
        name = _errno.errorcode.get(errno, str(errno))
        where = f"{operation} {path}"
        if nbytes and not _text and operation not in ("open", "fsync", "register"):
            where += f" [{file_offset}, {file_offset + nbytes}): {transferred} of {nbytes} bytes"
        remedy = "" if _text or detail else _REMEDIES.get(errno, "")
        text = f"{name}: {_text or detail or os.strerror(errno)}; {where}" + (
            f" ({remedy})" if remedy else ""
        )
        # A class with a __new__ of its own gets everything set here: OSError.__init__ ignores its
        # arguments then. The file name is left out of them, for OSError would print it twice.
        self = super().__new__(_matching_class(cls, errno), errno, text)
        self.filename = path
        self.operation = operation
        self.path = path
        self.file_offset = file_offset
        self.nbytes = nbytes
        self.transferred = transferred
        self._detail = detail
        return self

    def __str__(self) -> str:
        return f"[Errno {self.errno}] {self.strerror}"

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = {name: getattr(self, name) for name in self._FIELDS} | {"detail": self._detail}
        return _rebuild, (_public_class(type(self)), self.errno, arguments), self.__dict__


def errno_of(failed: OSError) -> int:
    """Its number; EIO if it lacks one."""
    return failed.errno or _errno.EIO


def transfer_error(
    failed: OSError, operation: str, path: str | os.PathLike[str], detail: str = "", **about: Any
) -> TransferError:
    """The system's refusal, as an error that names the operation and the file.

    Words of ours that `failed` has in place of the system's stay.
    """
    code = errno_of(failed)
    if not (detail or isinstance(failed, TransferError) or failed.strerror == os.strerror(code)):
        detail = failed.strerror or ""
    about |= {"operation": operation, "path": os.fspath(path), "detail": detail}
    return TransferError(code, **about)


class naming:
    """A with statement whose `OSError`s name the operation and the file: `TransferError`s.

    Those that are such already stay as they are.
    """

    def __init__(self, operation: str, path: str | os.PathLike[str], detail: str = "") -> None:
        self._about = (operation, path, detail)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, failed: BaseException | None, trace: object) -> None:
        if isinstance(failed, OSError) and not isinstance(failed, TransferError):
            operation, path, detail = self._about
            raise transfer_error(failed, operation, path, detail=detail) from failed


class ShortTransferError(TransferError):
    """Fewer bytes exist than were asked for: the file ends inside (or before) the span.

    Attributes:
        transferred: Bytes that the file had from `file_offset` on; they are in the tensor.
    """

    @property
    def requested(self) -> int:
        """Bytes asked for."""
        return self.nbytes


class RowsError(TransferError):
    """Some rows of a gather or scatter could not be moved; the others were.

    Attributes:
        row: The first that failed, by its number.
        errno: Why that one did; ENODATA where the file ends before the row does.
        file_offset: The row's offset in the file.
        nbytes: The length of a row in bytes.
        rows: How many rows there are.
        whole: How many of them are whole: read into their place, or written. Rows that were read in
            one block fail together.
        transferred: Bytes of rows that got through.
    """

    row: int
    rows: int
    whole: int
    _whole_rows: bytes
    _FIELDS = (*TransferError._FIELDS, "row", "rows", "whole", "_whole_rows")

    def __new__(
        cls,
        errno: int,
        *,
        row: int,
        rows: int,
        whole: int,
        _whole_rows: bytes,
        file_offset: int = 0,
        detail: str = "",
        **about: Any,
    ) -> RowsError:
        """As `TransferError`; `_whole_rows` has a byte for each row, which is 1 if it is whole."""
        why = detail or os.strerror(errno)
        if errno == _errno.ENODATA:
            why = detail or "the file ends before the row does"
        elif errno in _REMEDIES and not detail:
            why += f" ({_REMEDIES[errno]})"
        text = (
            f"{why}; row {row} at byte {file_offset}, {whole} of {counted(rows, 'row')} are whole"
        )
        about = {**about, "file_offset": file_offset, "detail": detail}
        self = super().__new__(cls, errno, _text=text, **about)
        assert isinstance(self, RowsError)
        self.row = row
        self.rows = rows
        self.whole = whole
        self._whole_rows = _whole_rows
        return self

    def mask(self) -> torch.Tensor:
        """Which rows are whole: a tensor of `rows` bools."""
        import torch  # this module is loaded before anything else

        return torch.frombuffer(bytearray(self._whole_rows), dtype=torch.bool)


class BatchError(TransferError):
    """Some items of a batch could not be moved; the others were.

    It says of the first of them what `TransferError` says of a transfer, and has what that one
    would have raised by itself as its `__cause__`; those of further ones are in `others` as well.
    If torch refused tensors and no file failed, the first refusal is raised by itself.

    Attributes:
        item: The first that failed, by its number in the batch.
        errno: Why that one did; EIO where its file or drive gave no number.
        items: How many items there are.
        whole: How many of them were moved whole.
        failures: All that failed: ``((number, error), …)``, in the order of their numbers. Those
            that torch refused, after the bytes had come, are behind the others.
        transferred: Bytes of all items that got through.
    """

    item: int
    items: int
    whole: int
    failures: tuple[tuple[int, BaseException], ...]
    _FIELDS = (*TransferError._FIELDS, "items", "whole", "failures")

    def __new__(
        cls,
        errno: int,
        *,
        items: int,
        whole: int,
        failures: Sequence[tuple[int, BaseException]],
        file_offset: int = 0,
        nbytes: int = 0,
        detail: str = "",
        **about: Any,
    ) -> BatchError:
        """As `TransferError`; the first of `failures` is the one that it tells of."""
        item = failures[0][0]
        text = f"{detail or os.strerror(errno)}"
        if errno in _REMEDIES and not detail:
            text += f" ({_REMEDIES[errno]})"
        span = f" [{file_offset}, {file_offset + nbytes})" if nbytes else ""
        text += f"; item {item}{span}, {whole} of {counted(items, 'item')} are whole"
        about = {**about, "file_offset": file_offset, "nbytes": nbytes, "detail": detail}
        self = super().__new__(cls, errno, _text=text, **about)
        assert isinstance(self, BatchError)
        self.items = items
        self.whole = whole
        self.failures = tuple(failures)
        self.item = item
        self.others = tuple(error for _, error in self.failures[1:])
        self.__cause__ = self.failures[0][1]
        return self


class CuFileError(TransferError):
    """cuFile refused or failed.

    Attributes:
        errno: The errno nearest to the status, for code with `except OSError`.
        cufile_status: The status, 5000 and up (CUfileOpError); 0 if cuFile gave only the kernel's
            errno, or if its call did not return in time.
        cuda_status: CUDA's own error number beside status 5011, else 0.
    """

    cufile_status: int
    cuda_status: int
    _FIELDS = (*TransferError._FIELDS, "cufile_status", "cuda_status")

    def __new__(
        cls, errno: int, *, cufile_status: int = 0, cuda_status: int = 0, **about: Any
    ) -> CuFileError:
        """As `TransferError`, with cuFile's own words in `detail`."""
        self = super().__new__(cls, errno, **about)
        assert isinstance(self, CuFileError)
        self.cufile_status = cufile_status
        self.cuda_status = cuda_status
        return self


class BackendUnavailableError(NvmeioError, RuntimeError):
    """No implementation that was asked for can work here.

    Attributes:
        attempts: The attempts and the reason of each failure: ``[(name, reason), …]``.
        remedy: The command or change that fixes it, or "".
    """

    def __init__(
        self, message: str, *, attempts: Sequence[tuple[str, str]] = (), remedy: str = ""
    ) -> None:
        lines = [message, *(f"  {name}: {reason}" for name, reason in attempts)]
        if remedy:
            lines.append(f"  how to fix it: {remedy}")
        super().__init__("\n".join(lines))
        self.attempts = list(attempts)
        self.remedy = remedy


class IntegrityError(NvmeioError):
    """Bytes differ from the expected ones.

    Attributes:
        expected: The expected value.
        found: The value that was found.
    """

    def __init__(self, message: str, *, expected: object, found: object) -> None:
        super().__init__(message)
        self.expected = expected
        self.found = found


# Parts of messages


def an(name: str) -> str:
    """A name with its article, as it is spoken: "an ndarray", "an SGD", "a UserDict"."""
    # The first letter of an abbreviation is spoken by itself.
    spelt = name[:2].isupper() or name[:2] == "nd"
    vowel = name[0].upper() in ("AEFHILMNORSX" if spelt else "AEIO")
    return f"{'an' if vowel else 'a'} {name}"


def counted(number: int, what: str) -> str:
    """Such as "1 record" and "2 records", "2 directories", "2 batches"."""
    if number != 1:
        if what.endswith("y") and what[-2] not in "aeo":
            what = what[:-1] + "ie"
        what += "es" if what.endswith(("ch", "x")) else "s"
    return f"{number} {what}"


def binary_size(nbytes: int) -> str:
    """A size for people, such as 1.5 GiB."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(max(nbytes.bit_length() - 1, 0) // 10, len(units) - 1)
    size = nbytes / 1024**power
    digits = 0 if size >= 100 or size.is_integer() else 1
    return f"{size:.{digits}f} {units[power]}"


def nearest(name: object, known: Iterable[str]) -> str:
    """The known name nearest to an unknown one, as the end of a sentence; "" where none is near.

    Args:
        name: The unknown one.
        known: Those that there are.
    """
    found = difflib.get_close_matches(str(name), list(known), 1)
    return f" (did you mean {found[0]!r}?)" if found else ""


def with_context(failed: TransferError, what: str) -> TransferError:
    """The same failure, with the purpose of the bytes, such as "read for weight 'a'"."""
    arguments = {name: getattr(failed, name) for name in failed._FIELDS}
    code = errno_of(failed)
    words, remedy = failed._detail or os.strerror(code), _REMEDIES.get(code)
    if remedy and not failed._detail:
        what += f"; {remedy}"
    return _rebuild(_public_class(type(failed)), code, arguments | {"detail": f"{words} ({what})"})


def as_kind(failed: TransferError, kind: type[BaseException]) -> TransferError:
    """The same failure, which is an error of another kind as well."""
    arguments = {name: getattr(failed, name) for name in failed._FIELDS}
    cls = joined(_public_class(type(failed)), kind)
    same = _rebuild(cls, errno_of(failed), arguments | {"detail": failed._detail})
    same.__dict__.update(failed.__dict__)
    return same


class _Joined(type):
    """The type of classes that `joined` makes, which no module has under their name.

    pickle finds other classes by their name. It has to find these too: torch's DataLoader sends the
    class of an error from its workers, and waits forever where that fails.
    """


def _made_of(cls: _Joined) -> tuple[Any, ...]:
    return joined, cls.__bases__


_copyreg.pickle(_Joined, _made_of)

_joined: dict[tuple[type, type], type] = {}


def joined(cls: type[_AnyError], other: type[BaseException]) -> type[_AnyError]:
    """`cls`, which is an `other` as well; it has the name of `cls`. Made once for each pair."""
    if issubclass(cls, other):
        return cls
    key = (cls, other)
    if key not in _joined:
        _joined[key] = _Joined(cls.__name__, key, {"__module__": cls.__module__})
    return _joined[key]


def _matching_class(cls: type[TransferError], errno: int) -> type[TransferError]:
    # OSError picks its subclass by errno only when called as OSError itself.
    return joined(cls, type(OSError(errno, "")))


def _public_class(cls: type[TransferError]) -> type[TransferError]:
    """The class without the built-in one that matches its errno."""
    if isinstance(cls, _Joined) and issubclass(cls.__bases__[1], OSError):
        return cls.__bases__[0]
    return cls


def _rebuild(cls: type[TransferError], errno: int, arguments: dict[str, Any]) -> TransferError:
    return cls(errno, **arguments)


def _copy(cls: type[NvmeioError], args: tuple[Any, ...]) -> NvmeioError:
    # Not through __init__, whose keyword arguments are not among args: the state follows.
    return cls.__new__(cls, *args)
