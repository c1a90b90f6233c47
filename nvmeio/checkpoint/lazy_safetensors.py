"""Tensors and slices of safetensors files, read when they are asked for: the package's `safe_open`.

Only the bytes of what is asked for are read: of ``slice[:, a:b]`` those of its columns.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple, NoReturn

import torch

from nvmeio import _checks, _memory
from nvmeio._formats.safetensors_files import tensor_on
from nvmeio._formats.safetensors_header import TensorEntry
from nvmeio._formats.safetensors_set import SafetensorsSet
from nvmeio._io.handles import CallHandle
from nvmeio._io.inflight import InFlight
from nvmeio._io.spans import Load, Span
from nvmeio._io.threads import run_interruptible
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

    ::

        with nvmeio.safe_open("model.safetensors", framework="pt", device="cpu") as f:
            weight = f.get_tensor("embedding")
            half = f.get_slice("embedding")[:, :512]

    Args:
        filename: The file; or an index of shards, or a directory that holds either.
        framework: "pt" for torch tensors, "np" for numpy arrays.
        device: Where the tensors shall lie; "cuda:1" and 1 name a GPU, None the host's memory.
        backend: "mmap" and "pread" are the package's and taken; files are read directly whatever it
            says.
        handle: Reads through this handle, which stays open; without one, a handle with the setting
            stored for the file system (`AioHandle.tuned`) lives until the file is closed.

    Raises:
        IntegrityError: The header or index is malformed, or the file too short for it.
        TransferError: The file cannot be opened or read; a `FileNotFoundError` where it is missing.
        ValueError: The framework is another one, or has no tensors on that device.
    """
    return LazyTensors(filename, framework, device, backend=backend, handle=handle)


class LazyTensors:
    """What `safe_open` returns: use it with ``with``, or close it.

    A file that is replaced or removed meanwhile goes on being read as it was; one that is written
    to is noticed (`IntegrityError`).
    """

    def __init__(
        self,
        filename: str | os.PathLike[str],
        framework: str,
        device: str | int | torch.device | None,
        *,
        backend: str | None,
        handle: AioHandle | None,
    ) -> None:
        if framework not in _FRAMEWORKS:
            raise ValueError(
                f"framework {framework!r}: nvmeio has tensors of torch ('pt') and arrays of numpy "
                "('np'); others can be made from these"
            )
        if backend not in (None, "mmap", "pread"):
            raise ValueError(f"backend must be 'mmap', 'pread' or None, not {backend!r}")
        self._is_torch = _FRAMEWORKS[framework]
        self._device = _checks.device("device", "cpu" if device is None else device)
        if not self._is_torch and self._device.type != "cpu":
            raise ValueError(f"numpy has no arrays on {self._device}: leave out device")
        self._filename = os.fspath(filename)
        self._closed = False
        self._set: SafetensorsSet | None = None
        self._handle = CallHandle(handle, filename)
        try:
            run_interruptible(self._open)
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        self._set = SafetensorsSet(self._filename, self._handle.get())

    # What is there

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
        opened = self._tensors()
        entries = {name: self._entry(name) for name in names}
        spans = []
        for name, entry in entries.items():
            entry.for_torch()  # refused before anything is read
            file = opened.files[opened.tensors[name].file]
            spans.append(Span(file, entry.start, entry.nbytes, repr(name)))
        load = Load()

        def read() -> list[torch.Tensor]:
            return load.run(self._handle.get(), spans, self._device)

        memories = run_interruptible(read, load.cancel)
        for index in {opened.tensors[name].file for name in names}:
            opened.check(index, "a tensor")
        return {
            name: self._given(tensor_on(memory, entries[name]), name)
            for name, memory in zip(names, memories, strict=True)
        }

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
            memory = _memory.Mapping(shape[0] * shape[1]).tensor(0, shape, torch.uint8)
            offsets, handle = rows.offsets + entry.start, self._handle.get()
            with flight:
                flight.start(
                    lambda: handle.async_gather(memory, file, offsets),
                    memory.nbytes,
                    label=lambda _: f"read for {label}",
                )
            return memory.to(self._device)

        if not view.numel():
            memory = torch.empty(0, dtype=torch.uint8, device=self._device)
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
            raise ClosedError(f"{self._filename} is closed: open it again with safe_open")
        return self._set

    def _entry(self, name: str) -> TensorEntry:
        stored = self._tensors().tensors.get(name)
        if stored is None:
            raise KeyError(f"{self._filename} does not contain tensor {name!r}")
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

    def __reduce__(self) -> NoReturn:
        _checks.refuse_pickling(
            self,
            "keep its path, and call nvmeio.safe_open in each process (in a dataset, on first use "
            "or in worker_init_fn)",
        )

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<nvmeio.safe_open({self._filename!r}) {state}>"


class LazySlice:
    """A tensor of a file, read where it is indexed: ``slice[2:4, :, ::2]``.

    Indices are those of torch. Integers, slices with a positive step, ``...`` and None read what
    they name (and what lies between rows less than 4 KiB apart); others read the whole tensor.
    """

    def __init__(self, opened: LazyTensors, name: str, entry: TensorEntry) -> None:
        self._opened = opened
        self._name = name
        self._entry = entry

    def get_shape(self) -> list[int]:
        """Its sizes; of "F4", as the format counts them, single elements."""
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        """The format's name of its dtype, such as "BF16"."""
        return self._entry.dtype

    def __getitem__(self, index: Any) -> Any:
        """Read a part; raises as torch does for an index, and as `LazyTensors.get_tensor`."""
        parts = index if isinstance(index, tuple) else (index,)
        if not all(_is_basic(part) for part in parts):
            return self._opened.get_tensor(self._name)[index]
        dtype, shape = self._entry.for_torch()
        view = torch.empty(shape, dtype=dtype, device="meta")[index]
        return self._opened._read_part(self._name, view)

    def __repr__(self) -> str:
        return f"<slice of {self._name!r}: {self._entry.dtype} {self.get_shape()}>"


def _is_basic(part: object) -> bool:
    if part is None or part is Ellipsis or isinstance(part, slice):
        return True
    whole = hasattr(part, "__index__") and not isinstance(part, bool)
    return whole and not getattr(part, "shape", ())  # neither a list nor an array of integers


class _Rows(NamedTuple):
    """A strided part as rows of a file.

    Attributes:
        offsets: Where each begins, in bytes from the tensor's first one.
        nbytes: The length of a row.
        dims: How many of the part's dimensions, the first ones, number the rows.
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
