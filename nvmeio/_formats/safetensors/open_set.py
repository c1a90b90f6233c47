"""The safetensors files of a model, kept open: the places of tensors, and whether they hold."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from nvmeio import files
from nvmeio._files.descriptors import open_error
from nvmeio._formats.safetensors import headers, shards
from nvmeio._formats.safetensors.headers import Header, TensorEntry
from nvmeio._formats.safetensors.shards import as_package
from nvmeio._io.spans import Load, Span
from nvmeio._memory.tensors import aligned_as
from nvmeio._storage.untrusted import Unchanged
from nvmeio._threads.closing import on_error
from nvmeio.errors import IntegrityError, TransferError, with_context
from nvmeio.files import File
from nvmeio.handle import AioHandle


class StoredTensor(NamedTuple):
    """A tensor of the checkpoint: its name, the index of its file, and where it lies there."""

    name: str
    file: int
    entry: TensorEntry


class FileBytes(NamedTuple):
    """Bytes from `start` to `end` of a file, by its index."""

    file: int
    start: int
    end: int


class SafetensorsSet:
    """A safetensors file, an index of shards, or a directory that holds either, kept open.

    The files are opened once, so that one which is replaced or removed while weights are streamed
    goes on being read as it was. `check` notices one that is written to or cut.

    Raises:
        FileNotFoundError: There is no such thing, or an index names a file that is missing.
        IntegrityError: A header or index is malformed, or a file is too short for its tensors.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = shards.find(path)
        self.files: list[File] = []
        self.tensors: dict[str, StoredTensor] = {}
        self.metadata: dict[str, str] = {}
        self._unchanged: list[Unchanged] = []
        self._dealt: Callable[[int, int], list[FileBytes]] | None = None
        with on_error(self.close):
            for shard, names in _parts(self.path):
                self._open(shard, names)

    def _open(self, shard: Path, names: list[str] | None) -> None:
        file = files.open(shard)
        index = len(self.files)
        self.files.append(file)
        self._unchanged.append(Unchanged(file))
        text = _header_text(file)
        try:
            header = headers.parse(text, file.size(), file.path)
        except IntegrityError:
            _check_length(text, file)
            raise
        self.metadata.update(header.metadata)
        if names is None:
            self.tensors |= {
                name: StoredTensor(name, index, entry) for name, entry in header.tensors.items()
            }
            return
        for name in names:
            if name not in header.tensors:
                raise as_package(IntegrityError)(
                    f"{self.path} says that tensor {name!r} is in {file.path}, which lacks it",
                    expected=name,
                    found=sorted(header.tensors)[:20],
                )
            self.tensors[name] = StoredTensor(name, index, header.tensors[name])

    def read(
        self, names: Sequence[str], handle: AioHandle | None, load: Load, device: torch.device
    ) -> dict[str, torch.Tensor]:
        """Read tensors, by name, on to a device; `load` can cancel that.

        Without a handle they are read through the page cache into memory, or on "meta" not at all.

        Raises:
            TypeError: torch has no such dtype; nothing was read.
            MemoryError: They are larger than what is available.
        """
        stored = [self.tensors[name] for name in names]
        for _, _, entry in stored:
            entry.for_torch()
        spans = [
            Span(self.files[file], entry.start, entry.nbytes, repr(name))
            for name, file, entry in stored
        ]
        if handle is None:
            memories = _through_cache(spans, device)
        else:
            memories = load.run(handle, spans, device)
        return {
            name: tensor_on(memory, entry)
            for (name, _, entry), memory in zip(stored, memories, strict=True)
        }

    def take_parts(
        self, others: Iterable[SafetensorsSet], dealt: Callable[[int, int], list[FileBytes]]
    ) -> None:
        """Take over the files of sets with the same layout, each of which holds a part.

        `dealt` says in which files the bytes from one place to another lie; see `spans`.
        """
        for other in others:
            self.files += other.files
            self._unchanged += other._unchanged
            other.files, other._unchanged = [], []
        self._dealt = dealt

    def spans(self, file: int, start: int, end: int) -> list[FileBytes]:
        """The files that hold bytes of a file, in order; at the same offsets."""
        return [FileBytes(file, start, end)] if self._dealt is None else self._dealt(start, end)

    def check(self, index: int, what: str) -> None:
        """Raise IntegrityError, which names `what`, if a file was changed after it was opened."""
        self._unchanged[index].check(what)

    def close(self) -> None:
        """Close all files; transfers in flight keep theirs until they are done."""
        for file in self.files:
            file.close()


def _parts(path: Path) -> list[tuple[Path, list[str] | None]]:
    """The files of a whole or an index, each with the tensors that count; None is all of them."""
    if not shards.is_index(path):
        return [(path, None)]
    # Index and shards of one directory, also if `path` goes through a link that is changed.
    parts = shards.read_index(Path(os.path.realpath(path.parent), path.name))
    for shard, names in parts.items():
        if not shard.exists():
            detail = f"{path} names it for tensor {names[0]!r}, but it is not there"
            raise open_error(errno.ENOENT, str(shard), detail)
    return [*parts.items()]


def _check_length(text: bytes, file: File) -> None:
    """Refuse a file that was cut, and name the first tensor that lacks bytes."""
    size, base = file.size(), headers.LENGTH_BYTES + len(text)
    try:
        described: dict[str, Any] = json.loads(text)
        ends = {
            name: base + int(value["data_offsets"][1])
            for name, value in described.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return
    cut = min(((end, name) for name, end in ends.items() if end > size), default=None)
    if cut is not None:
        raise as_package(IntegrityError)(
            f"{file.path} is truncated: tensor {cut[1]!r} ends at byte {cut[0]}, the file at "
            f"byte {size}",
            expected=cut[0],
            found=size,
        ) from None


# Open files: headers, and tensors on memory that was read

# The bytes of a file that are read at once; most headers are not larger.
_PREFIX_BYTES = 64 << 10


def header_of(file: File) -> Header:
    """The header of an open file; IntegrityError if it is malformed, or does not match the file."""
    return headers.parse(_header_text(file), file.size(), file.path)


def _header_text(file: File) -> bytes:
    """Read through the page cache: a handle takes longer to make than a header to read."""
    size = file.size()
    prefix = files.read_buffered(file, 0, min(size, _PREFIX_BYTES))
    end = headers.LENGTH_BYTES + headers.header_bytes(prefix, size, file.path)
    if end > len(prefix):
        prefix += files.read_buffered(file, len(prefix), end - len(prefix))
    return prefix[headers.LENGTH_BYTES : end]


def _through_cache(spans: Sequence[Span], device: torch.device) -> list[torch.Tensor]:
    """The bytes of each span, through the page cache; spans that adjoin are read with one call."""
    if device.type == "meta":
        return [torch.empty(span.nbytes, dtype=torch.uint8, device=device) for span in spans]
    memories = [aligned_as(span.offset, span.nbytes) for span in spans]
    first = 0
    for last in range(1, len(spans) + 1):
        if last < len(spans) and _adjoin(spans[last - 1], spans[last]):
            continue
        _read_run(spans[first:last], memories[first:last])
        first = last
    # A tensor over a buffer cannot be resized.
    return [
        torch.frombuffer(memory, dtype=torch.uint8)
        if memory.nbytes
        else torch.empty(0, dtype=torch.uint8)
        for memory in memories
    ]


def _adjoin(span: Span, following: Span) -> bool:
    return following.file is span.file and following.offset == span.offset + span.nbytes


def _read_run(spans: Sequence[Span], memories: Sequence[memoryview]) -> None:
    """Read spans that adjoin; where that fails, one by one, so that the error names a tensor."""
    file = cast(File, spans[0].file)
    with contextlib.suppress(TransferError):
        return files.read_into(file, spans[0].offset, memories)
    for span, memory in zip(spans, memories, strict=True):
        try:
            files.read_into(file, span.offset, [memory])
        except TransferError as failed:
            raise with_context(failed, f"read for {span.name}") from failed
    return None


def tensor_on(memory: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """A tensor of the entry's dtype and shape, on the memory that was read for it."""
    dtype, shape = entry.for_torch()
    if math.prod(shape) == 0:
        return torch.empty(0, dtype=dtype, device=memory.device).reshape(shape)
    if memory.device.type == "cpu" and memory.data_ptr() % dtype.itemsize:
        memory = memory.clone()
    tensor = torch.empty(0, dtype=dtype, device=memory.device)
    return tensor.set_(memory.untyped_storage(), 0, shape, ())  # contiguous
