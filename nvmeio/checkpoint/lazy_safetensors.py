"""Tensors and slices of safetensors files, read when they are asked for: the package's `safe_open`.

Only the bytes of what is asked for are read: of ``slice[:, a:b]`` those of its columns.

Whatever is refused with an error of Python's is refused with one that is the package's
`SafetensorError` as well, where that is installed (`as_package`).
"""

from __future__ import annotations

import operator
import os
from typing import Any, NamedTuple

import torch

from nvmeio._checks import NotPickled
from nvmeio._formats.safetensors.headers import TensorEntry
from nvmeio._formats.safetensors.open_set import SafetensorsSet
from nvmeio._formats.safetensors.shards import as_package, device_of, noted
from nvmeio._io.handles import CallHandle
from nvmeio._io.inflight import InFlight
from nvmeio._io.spans import Load, Span
from nvmeio._memory import mappings
from nvmeio._threads.interruptible import run_interruptible
from nvmeio.errors import ClosedError
from nvmeio.handle import AioHandle

_FRAMEWORKS = {"pt": True, "torch": True, "pytorch": True, "np": False, "numpy": False}

# Rows with less than a block of the drive between them are read with what lies there.
_GAP_BYTES = 4096


def safe_open(
    filename: str | os.PathLike[str],
    framework: str = "pt",
    device: str | int | torch.device | None = "cpu",
    *,
    backend: str | None = None,
    handle: AioHandle | None = None,
) -> LazyTensors:
    """Open a safetensors file, of which tensors are read one by one: as `safetensors.safe_open`.

        with nvmeio.safe_open("model.safetensors", framework="pt", device="cpu") as f:
            weight = f.get_tensor("embedding")
            half = f.get_slice("embedding")[:, :512]

    Args:
        filename: The file; or an index of shards, or a directory that holds either.
        framework: "pt" for torch tensors, "np" for numpy arrays.
        device: The device of the tensors; "cuda:1" and 1 name a GPU, None the host's memory.
        backend: "mmap" and "pread" are the package's and taken; files are read directly whatever it
            says.
        handle: Reads through this handle, which stays open; without one, a handle with the setting
            stored for the file system (`AioHandle.tuned`) lives until the file is closed.

    Raises:
        IntegrityError: The header or index is malformed, or the file too short for it.
        TransferError: The file cannot be opened or read; a `FileNotFoundError` where it is missing.
        ValueError: The framework is another one, or has no tensors on that device.
        RuntimeError: There is no such device.

    These are the package's `SafetensorError` as well, where it raises that and is installed; so are
    a name that is not there (`KeyError`), an index outside of the tensor and a closed file.
    """
    return LazyTensors(filename, framework, device, backend=backend, handle=handle)


class LazyTensors(NotPickled):
    """The result of `safe_open`: use it with ``with``, or close it.

    A file that is replaced or removed meanwhile goes on being read as it was; one that is written
    to is noticed (`IntegrityError`).
    """

    _elsewhere = (
        "keep its path, and call nvmeio.safe_open in each process (in a dataset, on first "
        "use or in worker_init_fn)"
    )

    def __init__(
        self,
        filename: str | os.PathLike[str],
        framework: str,
        device: str | int | torch.device | None,
        *,
        backend: str | None,
        handle: AioHandle | None,
    ) -> None:
        if not isinstance(framework, str):
            raise TypeError(f"framework must be 'pt' or 'np', not {framework!r}")
        if framework not in _FRAMEWORKS:
            raise as_package(ValueError)(
                f"framework {framework!r}: nvmeio has tensors of torch ('pt') and arrays of numpy "
                "('np'); others can be made from these"
            )
        if backend not in (None, "mmap", "pread"):
            raise as_package(ValueError)(
                f"backend must be 'mmap', 'pread' or None, not {backend!r}"
            )
        self._is_torch = _FRAMEWORKS[framework]
        if not self._is_torch and device is not None and not str(device).startswith("cpu"):
            raise as_package(ValueError)(f"numpy has no arrays on {device}: leave out device")
        self._device = device_of(device)
        self._filename = os.fspath(filename)
        self._closed = False
        self._set: SafetensorsSet | None = None
        self._handle = CallHandle(handle, filename)
        try:
            self._set = SafetensorsSet(filename)
        except BaseException:
            self.close()
            raise

    # Queries

    def keys(self) -> list[str]:
        """The names of the tensors, sorted."""
        return sorted(self._tensors().tensors)

    def offset_keys(self) -> list[str]:
        """The names of the tensors, in the order of the file."""
        return list(self._tensors().tensors)

    def metadata(self) -> dict[str, str] | None:
        """The texts that go with the tensors; None where there are none."""
        return dict(self._tensors().metadata) or None

    # Reading

    def get_tensor(self, name: str) -> Any:
        """Read a tensor.

        Args:
            name: One of `keys`.

        Raises:
            KeyError: There is none of this name.
            TransferError: It cannot be read.
            IntegrityError: The file was written to since it was opened.
            TypeError: Its dtype is unknown to this torch, or to numpy.
            MemoryError: It is larger than what is available.
        """
        return self._read([name])[name]

    def get_tensors(self) -> dict[str, Any]:
        """Read all tensors, in the order of the file; raises as `get_tensor`."""
        return self._read(self.offset_keys())

    def get_slice(self, name: str) -> LazySlice:
        """A tensor of which a part is read when it is indexed.

        Args:
            name: One of `keys`.

        Raises:
            KeyError: There is none of this name.
        """
        return LazySlice(self, name, self._entry(name))

    def _read(self, names: list[str]) -> dict[str, Any]:
        opened, load = self._tensors(), Load()
        for name in names:
            self._entry(name)
        found = run_interruptible(
            lambda: opened.read(names, self._handle.get(), load, self._device), load.cancel
        )
        for index in {opened.tensors[name].file for name in names}:
            opened.check(index, "a tensor")
        return {name: self._given(tensor, name) for name, tensor in found.items()}

    def _read_part(self, name: str, view: torch.Tensor) -> Any:
        """A strided part of a tensor, as one on the meta device says."""
        opened, entry = self._tensors(), self._entry(name)
        rows = _rows(view)
        file = opened.files[opened.tensors[name].file]
        label, load, flight = f"a part of {name!r}", Load(), InFlight()

        def one() -> torch.Tensor:
            span = Span(file, entry.start + int(rows.offsets[0]), rows.nbytes, label)
            return load.run(self._handle.get(), [span], self._device)[0]

        def many() -> torch.Tensor:
            shape = (len(rows.offsets), rows.nbytes)
            memory = mappings.Mapping(shape[0] * shape[1]).tensor(0, shape, torch.uint8)
            offsets, handle = rows.offsets + entry.start, self._handle.get()
            with flight:
                flight.start(
                    lambda: handle.async_gather(memory, file, file_offsets=offsets),
                    memory.nbytes,
                    label=lambda _: f"read for {label}",
                )
            return memory.to(self._device)

        if not view.numel() or self._device.type == "meta":
            nbytes = len(rows.offsets) * rows.nbytes if view.numel() else 0
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        elif len(rows.offsets) == 1:
            memory = run_interruptible(one, load.cancel)
        else:
            memory = run_interruptible(many, flight.cancel)
        opened.check(opened.tensors[name].file, label)
        return self._given(_laid_over(memory, view, rows), name)

    def _given(self, tensor: torch.Tensor, name: str) -> Any:
        if self._is_torch:
            return tensor
        try:
            return tensor.numpy()
        except TypeError:
            raise TypeError(
                f"{name!r} has dtype {tensor.dtype}, which numpy lacks: open the file with "
                "framework='pt'"
            ) from None

    def _tensors(self) -> SafetensorsSet:
        if self._closed or self._set is None:
            raise as_package(ClosedError)(
                f"{self._filename} is closed: open it again with safe_open"
            )
        return self._set

    def _entry(self, name: str) -> TensorEntry:
        if not isinstance(name, str):
            raise TypeError(f"a tensor's name must be a str, not {name!r}")
        stored = self._tensors().tensors.get(name)
        if stored is None:
            raise as_package(KeyError)(f"{self._filename} does not contain tensor {name!r}")
        return stored.entry

    # Closing

    def close(self) -> None:
        """Close the file, and the handle if it is its own; reads under way are finished first."""
        self._closed = True
        if self._set is not None:
            self._set.close()
        self._handle.close()

    def __enter__(self) -> LazyTensors:
        self._tensors()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<nvmeio.safe_open({self._filename!r}) {state}>"


class LazySlice:
    """A tensor of a file, read where it is indexed: ``slice[2:4, :, ::2]``.

    Indices of tensors are those of torch. Integers, slices with a positive step, ``...`` and None
    read what they name (and what lies between rows less than 4 KiB apart); others read the whole
    tensor. Arrays of numpy are indexed by these four only, as in the package: what reaches beyond
    the array is refused rather than cut short.
    """

    def __init__(self, opened: LazyTensors, name: str, entry: TensorEntry) -> None:
        self._opened = opened
        self._name = name
        self._entry = entry

    def get_shape(self) -> list[int]:
        """Its sizes, as an index counts them: of "F4" in pairs along the last dimension.

        Raises TypeError for an "F4" of odd size, which torch cannot hold.
        """
        entry = self._entry
        return list(entry.for_torch()[1] if entry.dtype == "F4" else entry.shape)

    def get_dtype(self) -> str:
        """The format's name of its dtype, such as "BF16"."""
        return self._entry.dtype

    def __getitem__(self, index: Any) -> Any:
        """Read a part.

        Raises:
            IndexError, ValueError, TypeError: As torch does for an index, where a tensor is read.
            IndexError: For an array: the index reaches beyond it, or is of another kind.

        And as `LazyTensors.get_tensor`.
        """
        dtype, shape = self._entry.for_torch()
        if not self._opened._is_torch:
            index = _for_numpy(index, shape)
        parts = index if isinstance(index, tuple) else (index,)
        if not all(_is_basic(part) for part in parts):
            return self._opened.get_tensor(self._name)[index]
        view = torch.empty(shape, dtype=dtype, device="meta")[index]
        return self._opened._read_part(self._name, view)

    def __repr__(self) -> str:
        return f"<slice of {self._name!r}: {self._entry.dtype} {list(self._entry.shape)}>"


def _is_basic(part: object) -> bool:
    if part is None or part is Ellipsis or isinstance(part, slice):
        return True
    whole = hasattr(part, "__index__") and not isinstance(part, bool)
    return whole and not getattr(part, "shape", ())  # neither a list nor an array of integers


_WHOLE = "read it with get_tensor and index the array, or open the file with framework='pt'"


def _for_numpy(index: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """An index of an array, as integers, slices, ``...`` and None within its bounds.

    Raises IndexError, in the package's words, for other kinds, or beyond the array.
    """
    if isinstance(index, list):
        if index:
            raise _refused("Non empty lists are not implemented", _WHOLE)
        index = slice(0, 0)
    parts: list[Any] = list(index) if isinstance(index, tuple) else [index]
    dots = [at for at, part in enumerate(parts) if part is Ellipsis]
    if len(dots) > 1:
        raise _refused("Only one ellipsis (...) is allowed in slice index", "leave one out")
    named = sum(part is not None and part is not Ellipsis for part in parts)
    for at in dots:
        parts[at : at + 1] = [slice(None)] * max(len(shape) - named, 0)
    dims = [at for at, part in enumerate(parts) if part is not None]
    for dim, at in enumerate(dims):
        parts[at] = _part_of(parts[at], dim, shape[dim] if dim < len(shape) else 0)
    _check_bounds([parts[at] for at in dims], shape)
    return tuple(parts)


def _part_of(part: Any, dim: int, size: int) -> Any:
    """One part of an index, counted from the beginning."""

    def counted(place: Any) -> int:
        number = operator.index(place)
        if number + size < 0:
            raise _refused(
                f"Invalid index {number} for dimension {dim} of size {size}",
                f"from -{size} on it lies in the array",
            )
        return number + size if number < 0 else number

    if isinstance(part, slice):
        step = 1 if part.step is None else operator.index(part.step)
        if step < 1:
            raise _refused(f"Slice step must be a positive integer, got {step}", _WHOLE)
        start, stop = (None if end is None else counted(end) for end in (part.start, part.stop))
        return slice(start, stop, None if step == 1 else step)
    if not _is_basic(part) and not isinstance(part, bool):
        raise _refused(
            f"Unsupported slice index at position {dim}: expected slice, int, or ellipsis", _WHOLE
        )
    return counted(part)


def _check_bounds(parts: list[Any], shape: tuple[int, ...]) -> None:
    why = "more slicing indexes than dimensions in tensor" if len(parts) > len(shape) else ""
    for dim, (part, size) in reversed(list(enumerate(zip(parts, shape, strict=False)))):
        ends = (part.start or 0, part.stop) if isinstance(part, slice) else (part, part + 1)
        start, stop = ends[0], size if ends[1] is None else ends[1]
        beyond = start if start and start >= size else stop - 1
        if not why and beyond >= size:
            why = f"index {beyond} out of bounds for tensor dimension #{dim} of size {size}"
    if why:
        told = ", ".join(_text(part) for part in parts)
        raise _refused(
            f"Error during slicing [{told}] with shape {list(shape)}: {why}",
            "get_slice(name).get_shape() has its sizes",
        )


def _text(part: Any) -> str:
    if not isinstance(part, slice):
        return str(part)
    ends = ["" if end is None else str(end) for end in (part.start, part.stop)]
    return ":".join(ends if part.step is None else [*ends, str(part.step)])


def _refused(told: str, remedy: str) -> IndexError:
    return noted(as_package(IndexError)(told), remedy)


class _Rows(NamedTuple):
    """A strided part as rows of a file; offsets are in bytes from the tensor's first one.

    The first `dims` of the part's dimensions number the rows.
    """

    offsets: torch.Tensor
    nbytes: int
    dims: int


def _rows(view: torch.Tensor) -> _Rows:
    """The rows to be read: dimensions with small gaps are part of them, from the last one on."""
    itemsize = view.element_size()
    extent, dims = 1, view.dim()
    while dims and (
        view.shape[dims - 1] == 1 or (view.stride(dims - 1) - extent) * itemsize < _GAP_BYTES
    ):
        dims -= 1
        extent += (view.shape[dims] - 1) * view.stride(dims)
    offsets = torch.full((1,), int(view.storage_offset()), dtype=torch.int64, device="cpu")
    for size, stride in zip(view.shape[:dims], view.stride()[:dims], strict=True):
        steps = torch.arange(size, dtype=torch.int64, device="cpu") * stride
        offsets = (offsets[:, None] + steps).flatten()
    return _Rows(offsets * itemsize, extent * itemsize, dims)


def _laid_over(memory: torch.Tensor, view: torch.Tensor, rows: _Rows) -> torch.Tensor:
    """The part, contiguous, over the rows that were read for it, or a copy."""
    itemsize = view.element_size()
    if memory.device.type == "cpu" and memory.data_ptr() % itemsize:
        memory = memory.clone()
    strides, step = list(view.stride()), rows.nbytes // itemsize
    for dim in reversed(range(rows.dims)):
        strides[dim] = step
        step *= view.shape[dim]
    tensor = torch.empty(0, dtype=view.dtype, device=memory.device)
    tensor.set_(memory.untyped_storage(), 0, view.shape, strides)
    if tensor.is_contiguous() and tensor.nbytes == memory.nbytes:
        return tensor
    narrow = tensor.element_size() == 1  # torch has no copy for some of the dtypes of one byte
    dense = tensor.view(torch.uint8) if narrow else tensor
    return dense.clone(memory_format=torch.contiguous_format).view(view.dtype)
