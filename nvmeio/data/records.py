"""`Records`: a file as a sequence of tensors of one shape, read and written in batches."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset

from nvmeio import _checks, files
from nvmeio._io.handles import new_handle
from nvmeio._storage import durable
from nvmeio._threads import interruptible
from nvmeio._threads.closing import ClosingWork, on_error
from nvmeio.data.prefetch import Gather, Prefetch
from nvmeio.engines import transfers
from nvmeio.engines.transfers import FileOffsets
from nvmeio.errors import ClosedError, IntegrityError, counted, naming
from nvmeio.files import File
from nvmeio.handle import AioHandle
from nvmeio.operation import Operation

_MODES = ("r", "r+")


class Records(Dataset[torch.Tensor], ClosingWork):
    """Records of one length in a file: a data set, or a table larger than memory.

    Record i lies at byte ``file_offset + i * stride_bytes``. A batch of any size is one operation:
    its rows are sorted, and near ones are read together (`AioHandle.async_gather`).

    `gather` and `scatter` start at once: await them, or call ``result()``. ``records[i]``,
    ``records[[3, 1, 3]]``, ``records[10:20]`` and ``records[indices] = rows`` block. `prefetch`
    reads the next batches while a loop works on this one.

    It is a `torch.utils.data.Dataset` with ``__getitems__``: a `DataLoader` asks for batches, and
    its workers may be forked or spawned. It is pickled as its path and settings. Each process opens
    the file and a handle at first use. If the file was replaced or shortened by then, that is an
    `IntegrityError`.

    Args:
        path: The file; it has to be there. `Records.create` makes a new one.
        dtype: The dtype of the elements, such as ``torch.uint16`` for tokens. Not a quantised one.
        shape: The shape of one record; ``()`` for a single element.
        file_offset: Bytes before the first record, such as a header. With None there are none, and
            a file that begins as an array of numpy, a safetensors file, a zip archive (torch.save)
            or another with a header is refused. 0 takes its first bytes for records.
        stride_bytes: Bytes from the start of one record to the start of the next; None for a
            record's own length. More leaves room between them. Less makes them overlap, as windows
            over a text do: such records can be read and not written.
        count: How many records there are; None for all of the file, which has to end with one.
        mode: "r" to read, "r+" to write as well.
        handle: Moves the bytes, and stays open. None for one of its own, with the settings that
            `nvmeio tune --save` stored. A forked or spawned process always makes its own.

    Raises:
        TransferError: The file cannot be opened, also as `FileNotFoundError` and the like.
        ValueError: The file does not end with a record, has fewer than `count`, or begins with
            another format's header; or an argument is out of range.
        TypeError: An argument is of the wrong type.

    Several threads, tasks and event loops may use one object at once. Writing a record while it is
    read is a race, as with `pwrite` and `pread`.

    Examples:
        >>> with nvmeio.data.Records("tokens.bin", torch.uint16, (1025,)) as records:
        ...     for batch in records.prefetch(torch.randperm(len(records)).split(64)):
        ...         step(batch.long())
    """

    _work = "a gather or scatter"

    def __init__(
        self,
        path: str | os.PathLike[str],
        dtype: torch.dtype,
        shape: int | Sequence[int] = (),
        *,
        file_offset: int | None = None,
        stride_bytes: int | None = None,
        count: int | None = None,
        mode: str = "r",
        handle: AioHandle | None = None,
    ) -> None:
        start = 0 if file_offset is None else file_offset
        self._layout = layout = record_layout(dtype, shape, start, stride_bytes)
        if mode not in _MODES:
            raise ValueError(f'mode must be "r" or "r+", not {mode!r}')
        if handle is not None and not isinstance(handle, AioHandle):
            raise TypeError(f"handle must be an AioHandle or None, not {type(handle).__name__}")
        self._path = files.absolute_path(path)
        self._mode = mode
        self._closed = False
        self._handle = handle
        self._born = generation()
        self._opened: dict[int, Opened] = {}  # by generation: see `_here`
        with files.open(self._path, mode) as file:
            if file_offset is None:
                _check_raw(file)
            size, self._identity = file.size(), _identity(file)
        self._count = record_count(self._path, layout, size, count)

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        count: int,
        dtype: torch.dtype,
        shape: int | Sequence[int] = (),
        *,
        file_offset: int = 0,
        stride_bytes: int | None = None,
        handle: AioHandle | None = None,
    ) -> Records:
        """A new file of `count` records, all zero, opened for reading and writing.

        Args:
            path: Must not exist yet.
            count: How many records.
            dtype: As for the class, like all below.
            shape: See `dtype`.
            file_offset: See `dtype`.
            stride_bytes: See `dtype`.
            handle: See `dtype`.

        Raises:
            FileExistsError: There is such a file (a `TransferError`, like the next).
            TransferError: There is no room for it on the drive, which is taken now where the file
                system can do that; no file is left then.
            ValueError, TypeError: As for the class.
        """
        layout = record_layout(dtype, shape, file_offset, stride_bytes)
        size = layout.end(_checks.integer("count", count, 0))
        name = files.absolute_path(path)
        interruptible.run_interruptible(lambda: _create(name, size))
        return cls(
            name,
            dtype,
            shape,
            file_offset=file_offset,
            stride_bytes=stride_bytes,
            count=count,
            mode="r+",
            handle=handle,
        )

    # --- batches ------------------------------------------------------------------------------

    def gather(self, indices: FileOffsets, out: torch.Tensor | None = None) -> Gather:
        """Start reading records, in any order, as often as they are named.

        Args:
            indices: N numbers from 0 to ``len(records) - 1``: a tensor, a numpy array, a sequence
                or a range.
            out: The target, of shape (N, *shape) and the records' dtype, on the CPU or a CUDA
                device. None for new memory on the CPU.

        Returns:
            The batch on its way: await it, or call ``result()``, for the tensor.

        Raises:
            IndexError: A number is out of range; negative ones do not count from the end.
            TypeError: They are not integers (a mask is ``mask.nonzero().flatten()``); or `out` is
                no tensor, or of another dtype.
            ValueError: `indices` has more than one dimension; `out` has another shape.
            ClosedError: The records are closed.
            IntegrityError: There is another file by now, or it is shorter.

        It fails with `RowsError` if the file was cut short since, or the drive fails.
        """
        opened, offsets = self._here(), self._offsets(indices)
        shape = (len(offsets), *self._layout.shape)
        if out is None:
            out = torch.empty(shape, dtype=self._layout.dtype)
        else:
            self._check_rows("out", out, shape)
        handle = opened.handle
        operation = handle.async_gather(out, opened.file, file_offsets=offsets, allow_overlap=True)
        return Gather(operation, out, handle)

    def scatter(self, indices: FileOffsets, source: torch.Tensor) -> Operation:
        """Start writing records, each at its number.

        Args:
            indices: As for `gather`, each at most once.
            source: The records to write, of shape (N, *shape) and the records' dtype. Leave it
                unchanged until the operation is done.

        Returns:
            The operation: await it, or call ``result()``. Written is not durable: see `fsync`.

        Raises: As `gather`; ValueError also where records overlap, and TransferError where they
        were opened to be read. The operation fails with ValueError, before anything is written, if
        a number is named twice (sum such rows up first: ``index_add_``), and with `RowsError` if
        some cannot be written; all others are. If the file was cut short since, it becomes longer
        again.
        """
        layout = self._layout
        if layout.stride < layout.nbytes:
            raise ValueError(
                f"records that overlap cannot be written: each has {layout.nbytes} bytes, and the "
                f"next begins {layout.stride} behind its start"
            )
        opened, offsets = self._here(), self._offsets(indices)
        self._check_rows("source", source, (len(offsets), *layout.shape))
        opened.file.check_writable()  # raises now, not in the operation
        return opened.handle.async_scatter(source, opened.file, file_offsets=offsets)

    def prefetch(self, batches: Iterable[FileOffsets], depth: int = 2) -> Prefetch:
        """Read batches ahead of a loop, in order.

        Args:
            batches: The numbers of each batch, as for `gather`: a list of tensors, a generator, a
                `torch.utils.data.BatchSampler`. It is asked for the next when there is room.
            depth: How many batches are in flight, or there, beside the one that the loop has.

        Returns:
            Tensors of shape (N, *shape), for ``async for`` as well as for ``for``.

        Memory: that of ``depth + 1`` batches. A record that is written while it is on its way is a
        race: leave those out that the loop is about to change.
        """
        return Prefetch(self.gather, batches, depth)

    async def fsync(self) -> None:
        """Make written records durable, and those whose write began before this call."""
        opened = self._here()
        await opened.handle.fsync(opened.file)

    def sync_fsync(self) -> None:
        """`fsync`, blocking."""
        opened = self._here()
        opened.handle.sync_fsync(opened.file)

    # --- a sequence, and a data set -----------------------------------------------------------

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[number] for number in range(self._count))

    def __getitem__(self, index: int | slice | FileOffsets) -> torch.Tensor:
        """One record, or for a slice or a batch of numbers a tensor with a dimension more."""
        if _is_number(index):
            return self.gather(_only(index)).result()[0]
        return self.gather(self._numbers(index)).result()

    def __getitems__(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """A batch as a list of records, for a `DataLoader` to collate."""
        return list(self.gather(indices).result().unbind(0))

    def __setitem__(self, index: int | slice | FileOffsets, rows: torch.Tensor) -> None:
        if _is_number(index):
            self._check_rows("a record", rows, self._layout.shape)
            self.scatter(_only(index), rows.unsqueeze(0)).result()
        else:
            self.scatter(self._numbers(index), rows).result()

    def _numbers(self, index: Any) -> FileOffsets:
        return range(*index.indices(self._count)) if isinstance(index, slice) else index

    # --- checks -------------------------------------------------------------------------------

    def _offsets(self, indices: FileOffsets) -> torch.Tensor:
        numbers = transfers.as_integers("indices", indices)
        if numbers.dim() != 1:
            raise ValueError(
                f"indices must have one dimension, not the shape {tuple(numbers.shape)}: flatten() "
                "them, and unflatten() the records"
            )
        if len(numbers):
            low, high = (int(end) for end in torch.aminmax(numbers))
            if low < 0 or high >= self._count:
                at = int(((numbers < 0) | (numbers >= self._count)).nonzero()[0])
                raise IndexError(
                    f"indices[{at}] is {int(numbers[at])}, and the "
                    f"{counted(self._count, 'record')} of "
                    f"{self._path} are numbered from 0"
                )
        return numbers * self._layout.stride + self._layout.file_offset

    def _check_rows(self, name: str, rows: object, shape: tuple[int, ...]) -> None:
        if not isinstance(rows, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, not {type(rows).__name__}")
        if rows.dtype != self._layout.dtype:
            raise TypeError(f"{name} must be of {self._layout.dtype}, not {rows.dtype}")
        if tuple(rows.shape) != shape:
            raise ValueError(f"{name} must have the shape {shape}, not {tuple(rows.shape)}")

    # --- opening and closing ------------------------------------------------------------------

    def _here(self) -> Opened:
        """The files of this process; opened at its first use.

        A forked child's inherited entries stay under the parent's generation. No lock of our
        own: another thread may hold it when this process is forked.
        """
        opened = self._opened.get(generation())
        if opened is None and not self._closed:
            made = self._open()
            opened = self._opened.setdefault(generation(), made)
            if opened is not made:  # another thread was faster
                made.close()
            if self._closed:
                opened.close()
        if opened is None or self._closed:
            raise ClosedError(f"the records of {self._path} are closed: open them again")
        return opened

    def _open(self) -> Opened:
        file = files.open(self._path, self._mode)
        with on_error(file.close):
            self._check_unchanged(file)
            if self._handle is not None and self._born == generation():
                return Opened(file, self._handle, False)
            return Opened(file, new_handle(self._path), True)

    def _check_unchanged(self, file: File) -> None:
        identity = _identity(file)
        # Opened on another machine, the same file may have other numbers.
        if identity.machine == self._identity.machine and identity != self._identity:
            raise IntegrityError(
                f"{self._path} was replaced after these records were opened: make new Records",
                expected=self._identity.inode,
                found=identity.inode,
            )
        held = self._layout.held(file.size())
        if held < self._count:
            raise IntegrityError(
                f"{self._path} was cut short: {held} of {counted(self._count, 'record')} are left",
                expected=self._count,
                found=held,
            )

    def close(self) -> None:
        """Close the file, and a handle of its own once nothing is in flight. Idempotent.

        Raises the first failure that nobody has seen, as `AioHandle.close` does.
        """
        self._closed = True
        opened = self._opened.get(generation())
        if opened is not None:
            opened.close()

    async def aclose(self) -> None:
        """`close`, awaited."""
        self._closed = True
        opened = self._opened.get(generation())
        if opened is not None:
            await opened.aclose()

    def __getstate__(self) -> dict[str, Any]:
        # The handle stays here, and what is open; a copy is open, whatever this one is.
        return {**self.__dict__, "_handle": None, "_opened": {}, "_closed": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._born = generation()
        self._opened = {}

    # --- properties ---------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """The file, as an absolute path."""
        return self._path

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the elements."""
        return self._layout.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one record."""
        return self._layout.shape

    @property
    def record_bytes(self) -> int:
        """The length of a record in bytes."""
        return self._layout.nbytes

    @property
    def handle(self) -> AioHandle:
        """The mover of bytes in this process; opened now, if it is the first use."""
        return self._here().handle

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def __repr__(self) -> str:
        layout = self._layout
        return (
            f"<nvmeio.data.Records {self._path!r} {self._count} x {layout.shape} {layout.dtype} "
            f"mode={self._mode!r} {'closed' if self._closed else 'open'}>"
        )


class _Identity(NamedTuple):
    machine: str
    inode: tuple[int, ...]


def _identity(file: File) -> _Identity:
    """The identity of the open file: its path may be another one's by now.

    A new file often has the number of one that was removed, and another generation.
    """
    number = bytearray(8)
    with files.in_use(file) as opened:
        with contextlib.suppress(OSError):  # where numbers are not used again, as in tmpfs
            fcntl.ioctl(opened.any_fd(), _GET_GENERATION, number)
        return _Identity(os.uname().nodename, (*opened.inode, *number))


_GET_GENERATION = 0x80087601  # FS_IOC_GETVERSION of linux/fs.h


# The first bytes of files that hold more than records, and the way to read them.
_HEADERS = {
    rb"\x93NUMPY": "an array of numpy: give file_offset=numpy.load(path, mmap_mode='r').offset",
    rb"PK\x03\x04": "a zip archive: nvmeio.load reads those of torch.save, numpy.load an .npz",
    rb".{5}\0{3}\{\s*\"[ -~]{16}": "a safetensors file: nvmeio.load_safetensors reads it",
    rb"\x89HDF\r\n\x1a\n": "an HDF5 file: h5py reads it",
    rb"PAR1|ARROW1\0\0": "a file of Parquet or Arrow: pyarrow reads it",
}


def _check_raw(file: File) -> None:
    with files.in_use(file) as opened, naming("pread", file.path):
        head = os.pread(opened.buffered_fd(), 64, 0)
    for magic, what in _HEADERS.items():
        if re.match(magic, head, re.DOTALL):
            raise ValueError(
                f"{file.path} begins as {what}; or, if its first bytes are records nevertheless, "
                "give file_offset=0"
            )


def _is_number(index: object) -> bool:
    return hasattr(index, "__index__") and not getattr(index, "ndim", 0)  # arrays have it too


def _only(index: Any) -> FileOffsets:
    """One number as a batch; the tensor True does not count as one."""
    if isinstance(index, torch.Tensor):
        return index.reshape(1)
    return [_checks.integer("index", index)]


def _create(path: str, size: int) -> None:
    with (
        files.open(path, "x") as file,
        on_error(Path(path).unlink, missing_ok=True),
        files.in_use(file, True) as opened,
    ):
        durable.reserve(opened.any_fd(), size, path)


class RecordLayout(NamedTuple):
    """The places of records."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    file_offset: int
    stride: int

    def end(self, count: int) -> int:
        """The size of a file that holds so many."""
        return self.file_offset + ((count - 1) * self.stride + self.nbytes if count else 0)

    def held(self, size: int) -> int:
        """How many a file of this size holds."""
        return max(0, (size - self.file_offset - self.nbytes) // self.stride + 1)


def record_layout(
    dtype: torch.dtype, shape: int | Sequence[int], file_offset: int, stride_bytes: int | None
) -> RecordLayout:
    """The layout that the arguments describe; TypeError or ValueError if they describe none."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, not {dtype!r:.80}")
    if str(dtype).startswith(("torch.q", "torch.bits")):
        raise TypeError(f"records cannot be of {dtype}: read them as torch.uint8, and view() them")
    sizes = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    sizes = tuple(_checks.integer("a size in shape", each, 1) for each in sizes)
    nbytes = math.prod(sizes) * dtype.itemsize
    stride = nbytes
    if stride_bytes is not None:
        stride = _checks.integer("stride_bytes", stride_bytes, 1)
    return RecordLayout(
        dtype, sizes, nbytes, _checks.integer("file_offset", file_offset, 0), stride
    )


def record_count(path: str, layout: RecordLayout, size: int, count: int | None) -> int:
    """How many records there are, if the file agrees."""
    held = layout.held(size)
    if count is not None:
        if _checks.integer("count", count, 0) > held:
            raise ValueError(
                f"{path} has {size} bytes, which hold {counted(held, 'record')}, not {count}"
            )
        return count
    if size < layout.file_offset:
        raise ValueError(f"file_offset must be at most {size}, where {path} ends")
    over = size - layout.end(held)
    padding = layout.stride - layout.nbytes if held else 0
    if over not in (0, padding):
        raise ValueError(
            f"{path} has {size} bytes: {counted(held, 'record')} of {layout.nbytes} bytes from "
            f"byte {layout.file_offset} on, and {over} bytes more. Check dtype, shape, file_offset "
            f"and stride_bytes; count={held} leaves the rest out"
        )
    return held


# Open files by process: a fork's child has the parent's in memory, and must not use them.


class Opened:
    """The open files of a process.

    Args:
        file: The file.
        handle: The handle that moves its bytes.
        own: Whether the handle is closed with the file.
    """

    def __init__(self, file: File, handle: AioHandle, own: bool) -> None:
        self.file = file
        self.handle = handle
        self.own = own
        _open_here.add(self)

    def close(self) -> None:
        """Close our own file and handle; again if that was interrupted."""
        self.file.close()
        if self.own:
            self.handle.close()

    async def aclose(self) -> None:
        """The same, awaited."""
        self.file.close()
        if self.own:
            await self.handle.aclose()


_generation = 0
_open_here: weakref.WeakSet[Opened] = weakref.WeakSet()
_inherited: list[Opened] = []


def generation() -> int:
    """How many forks lie between this process and the first one."""
    return _generation


def _forked() -> None:
    """In a forked child: the parent's open file is neither used nor closed here.

    Another thread of the parent may have held its locks, and nobody here would let go of them.
    """
    global _generation
    _generation += 1
    _inherited.extend(_open_here)
    _open_here.clear()


os.register_at_fork(after_in_child=_forked)
