"""The contents of a checkpoint, without loading it: tensors, where each lies, how it is aligned."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch

from nvmeio._formats import packed_index
from nvmeio._formats.packed_index import ExpertsFacts
from nvmeio._formats.safetensors.open_set import header_of
from nvmeio._formats.sniff import Kind, NoCheckpointError, kind_of, open_checkpoint
from nvmeio._formats.torch_archives import pickle_calls, pickle_values
from nvmeio._formats.torch_archives.pickle_values import Global, PickledCall, StorageRef
from nvmeio._formats.torch_archives.torch_file import (
    TorchFile,
    scan_pickle,
    spans_of,
    unsafe_globals,
)
from nvmeio._formats.torch_archives.torch_part import head_of
from nvmeio._formats.torch_archives.torch_zip import Archive, ZipEntry
from nvmeio._io.handles import CallHandle
from nvmeio._io.spans import Load
from nvmeio._storage import crc32
from nvmeio._threads.interruptible import run_interruptible
from nvmeio.files import File, read_buffered

# A record that is read for its checksum where the archive does not say whether it has any.
_FEW_BYTES = 1 << 20


class RecordFacts(NamedTuple):
    """A record of an archive.

    Attributes:
        name: Its name in the archive.
        offset: The offset of its first byte in the file.
        nbytes: Its size.
        crc32: Its CRC-32, or None where none was written.
    """

    name: str
    offset: int
    nbytes: int
    crc32: int | None


class TensorFacts(NamedTuple):
    """A tensor in a checkpoint.

    Attributes:
        name: Its place in the saved object, such as "model.layer.weight"; "" for the object itself.
        dtype: Its dtype in torch's words, without "torch."; the file's own name, if unknown.
        shape: Its shape.
        nbytes: The size of its elements.
        record: The record that its bytes are in; tied tensors have one in common. With DCP, the
            file.
        offset: The offset of its first byte in the file.
        device: The device that it was saved from.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    record: str
    offset: int
    device: str


class Description(NamedTuple):
    """The content of a file.

    Attributes:
        path: The file; the directory of a DCP checkpoint.
        kind: Its format.
        nbytes: Its size.
        records: Its records, in the order of the file; none in safetensors. With DCP, its items,
            which have their checksums within them.
        tensors: Its tensors, in the order of the object.
        forbidden: Imports and calls of its pickle that ``weights_only=True`` refuses.
        what: Which part of a rank on its own drive: it has no records and tensors of its own. Which
            part of a packed model: it has the tensors of the whole. For DCP: its objects.
        experts: The experts of a packed mixture that lie side by side.
    """

    path: str
    kind: Kind | Literal["dcp"]
    nbytes: int
    records: list[RecordFacts]
    tensors: list[TensorFacts]
    forbidden: list[str]
    what: str = ""
    experts: list[ExpertsFacts] = []  # noqa: RUF012 - read only


def describe(path: str | os.PathLike[str]) -> Description:
    """Look into a checkpoint; no tensor is read, and nothing of its pickle is run.

    Raises:
        NoCheckpointError: It is none, or one in torch's format from before its zip files.
        IntegrityError: It is damaged.
        TransferError: It cannot be opened or read.
    """
    return run_interruptible(lambda: _describe(path))


def _describe(path: str | os.PathLike[str]) -> Description:
    with open_checkpoint(path) as file:
        kind = kind_of(file)
        if kind == "safetensors":
            return _of_safetensors(file)
        if kind == "torch legacy":
            raise NoCheckpointError(
                f"{path} is in torch's format from before its zip files, which has no directory"
            )
        if kind == "part":
            return Description(file.path, kind, file.size(), [], [], [], head_of(file).what)
        with CallHandle(None, path) as handle:
            return _of_archive(file, handle)


def _of_archive(file: File, handle: CallHandle) -> Description:
    checkpoint = TorchFile(file, handle.get, Load())
    summed = _is_summed(checkpoint.archive, file)
    records = [_record(entry, summed) for entry in checkpoint.archive.entries]
    if checkpoint.archive.is_script:
        raise NoCheckpointError(f"{file.path} is a TorchScript archive")
    scan = scan_pickle(checkpoint)
    spans_of(checkpoint, file, scan)
    prefix = checkpoint.archive.prefix
    offsets = {key: checkpoint.records[f"data/{key}"].offset for key in scan.storages}
    tensors = [
        _tensor(name, call, ref, f"{prefix}data/{ref.key}", offsets[ref.key])
        for name, call, ref in _tensors_in(scan.value)
    ]
    forbidden = [] if scan.globals <= pickle_values.COMMON_GLOBALS else unsafe_globals(file)
    call = pickle_calls.refused(scan)
    if call is not None:
        forbidden.append(call)
    return Description(file.path, "torch", file.size(), records, tensors, sorted(forbidden))


def _record(entry: ZipEntry, summed: bool) -> RecordFacts:
    crc = entry.crc if summed or entry.crc or not entry.nbytes else None
    return RecordFacts(entry.name, entry.offset, entry.nbytes, crc)


def _is_summed(archive: Archive, file: File) -> bool:
    """Whether the records have CRC-32s.

    If all are 0, the bytes of the smallest tell, if they are few: their sum may be 0.
    """
    if archive.is_summed:
        return True
    filled = [entry for entry in archive.storages() or archive.entries if entry.nbytes]
    least = min(filled, key=lambda entry: entry.nbytes, default=None)
    if least is None:
        return True
    if least.nbytes > _FEW_BYTES:
        return False
    return crc32.of_bytes(read_buffered(file, least.offset, least.nbytes)) == 0


def alignment_of(offset: int) -> int:
    """The largest power of two that divides an offset, at most 2 MiB."""
    return min(offset & -offset, 2 << 20) if offset else 2 << 20


def _of_safetensors(file: File) -> Description:
    header = header_of(file)
    tensors = [
        TensorFacts(name, entry.dtype, entry.shape, entry.nbytes, "", entry.start, "cpu")
        for name, entry in header.tensors.items()
    ]
    what = packed_index.part_in_words(header.metadata)
    experts = packed_index.experts_of(header.metadata)
    return Description(file.path, "safetensors", file.size(), [], tensors, [], what, experts)


# The tensors of a scanned pickle

# A longer name is not joined any further.
_MOST_NAME = 4096


def _tensors_in(value: object) -> Iterator[tuple[str, PickledCall, StorageRef]]:
    """Every call that rebuilds a tensor from a storage: its name, the call, the storage."""
    # An object that occurs twice is examined once: its parts could double at every level.
    seen: set[int] = set()
    waiting: list[tuple[str, object]] = [("", value)]
    while waiting:
        name, value = waiting.pop()
        ref = _storage_of(value) if isinstance(value, PickledCall) else None
        if isinstance(value, PickledCall) and ref is not None:
            yield name, value, ref
        if (
            isinstance(value, (dict, list, tuple, set, frozenset, PickledCall))
            and id(value) not in seen
        ):
            seen.add(id(value))
            waiting += reversed(list(_children(name, value)))


def _storage_of(call: PickledCall) -> StorageRef | None:
    args = call.args
    if isinstance(args, tuple) and args and isinstance(args[0], StorageRef):
        return args[0]
    return None


def _children(name: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield _joined(name, key), item
    elif isinstance(value, (list, tuple)) and not isinstance(value, (Global, StorageRef)):
        for index, item in enumerate(value):
            yield _joined(name, index), item
    elif isinstance(value, (set, frozenset)):
        for item in value:
            yield name, item
    elif isinstance(value, PickledCall):
        # A call's arguments go by its own name: _rebuild_parameter has a tensor in it, and so on.
        for item in value.args if isinstance(value.args, tuple) else ():
            yield name, item
        if value.state is not None:
            yield name, value.state
        for key, item in value.items:
            yield _joined(name, key), item
        for index, item in enumerate(value.elements):
            yield _joined(name, index), item


def _joined(name: str, key: object) -> str:
    if len(name) > _MOST_NAME:  # a hostile pickle: the names of all levels would be its square
        return name
    return f"{name}.{key}" if name else str(key)


def _tensor(name: str, call: PickledCall, ref: StorageRef, record: str, start: int) -> TensorFacts:
    args = call.args if isinstance(call.args, tuple) else ()
    dtype = ref.kind if ref.dtype is None else str(ref.dtype).removeprefix("torch.")
    itemsize = 1 if ref.dtype is None else ref.dtype.itemsize
    if getattr(call.function, "name", "") == "_rebuild_tensor_v3" and len(args) > 6:
        dtype = str(getattr(args[6], "name", dtype))  # of storages that have no kind of their own
    offset = args[1] if len(args) > 1 and isinstance(args[1], int) else 0
    sizes = pickle_values.shape_of(args)
    known = getattr(torch, dtype, None)
    nbytes = math.prod(sizes) * (known.itemsize if isinstance(known, torch.dtype) else itemsize)
    return TensorFacts(name, dtype, sizes, nbytes, record, start + offset * itemsize, ref.location)
