"""The metadata of a checkpoint's items: from its ``.metadata``, and from torch.save within each.

``.metadata`` is a pickle, of which nothing but DCP's own classes is taken (`load_metadata`):
torch's reader unpickles it without a look, so that its writer can run anything; and it opens
whatever file the pickle names. `Parser` finds where in an item its tensor lies.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from nvmeio._formats.safetensors.shards import is_inside
from nvmeio._formats.sniff import DCP_METADATA
from nvmeio._formats.torch_archives import torch_zip
from nvmeio._memory.tensors import extent
from nvmeio._storage.untrusted import read_small
from nvmeio.errors import IntegrityError, naming

# The classes that planners and writers of torch put there, from torch 2.1 until now.
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed._shard.sharded_tensor.metadata": {"MEM_FORMAT_ENCODING", "TensorProperties"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePath", "PurePosixPath"},  # Python 3.13
    "builtins": {"frozenset", "set"},
}


METADATA_BYTES = 2 << 30  # at most: some hundred bytes for each part of each tensor

_OWN = r"[0-9a-f]{8}_"
_DATA = re.compile(rb"__\d+_(?:" + _OWN.encode() + rb")?\d+\.distcp")
_REPLACING = re.compile(r"__(\d+)_" + _OWN + r"\d+\.distcp")

ReadBytes = Callable[[int, int], bytes]
"""Reads (offset, nbytes) of an item; all of it lies within."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which is not a class of DCP; if you trust its "
            "source, load it with torch's FileSystemReader"
        )


def load_metadata(data: bytes, path: str) -> Metadata:
    """The content of a metadata file; no code of its own is run.

    Args:
        data: All of the file.
        path: Its name, for messages.

    Raises:
        IntegrityError: It is damaged, none, names other classes than DCP's, or names a file outside
            of its directory.
    """
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
    except Exception as wrong:  # unpickling raises whatever it comes upon
        raise IntegrityError(
            f"{path}: not a DCP metadata file, or damaged: {wrong}",
            expected="a pickle of Metadata",
            found=str(wrong),
        ) from wrong
    if not isinstance(metadata, Metadata):
        raise IntegrityError(
            f"{path}: not a DCP metadata file: expected Metadata, found {type(metadata).__name__}",
            expected="Metadata",
            found=type(metadata).__name__,
        )
    places = getattr(metadata, "storage_data", None)
    for index, info in places.items() if isinstance(places, dict) else ():
        name = getattr(info, "relative_path", None)
        if not is_inside(name):
            raise IntegrityError(
                f"{path}: {getattr(index, 'fqn', index)!r} lies outside of the checkpoint, in "
                f"{name!r:.200}",
                expected="a file beside the metadata",
                found=name,
            )
    return metadata


def metadata_path(folder: Path, rank: int | None) -> Path:
    """The metadata file: of all ranks, or of one that saves without the others."""
    return folder / (DCP_METADATA if rank is None else f"__{rank}{DCP_METADATA}")


def replacing(prefix: str, save_id: str) -> str:
    """The same for a save that replaces a checkpoint: no file of that one has such a name."""
    return f"{prefix}{save_id[:8]}_"


def referred_to(path: Path) -> set[str]:
    """The data files that a metadata file names; none if it cannot be read.

    Looked for as text: unpickling runs what the file says.
    """
    try:
        return {name.decode() for name in _DATA.findall(read_small(path, METADATA_BYTES))}
    except OSError:
        return set()


def remove_stale(folder: Path, before: set[str], rank: int | None) -> list[str]:
    """Remove the data files of a replaced checkpoint, and of saves that never ended.

    Args:
        folder: The checkpoint; its new metadata file is in place.
        before: The files that the replaced metadata file named.
        rank: Leave alone the files of other ranks, which may still be saving.

    Returns:
        The names of those that were removed; what cannot be removed is left.
    """
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    kept: set[str] = set()
    for name in names:
        if name.endswith(DCP_METADATA):
            kept |= referred_to(folder / name)
    stale = [
        name
        for name in names
        if name not in kept
        and (name in before or _REPLACING.fullmatch(name))
        and (rank is None or name.startswith(f"__{rank}_"))
    ]
    removed: list[str] = []
    for name in stale:
        with contextlib.suppress(OSError):
            os.unlink(folder / name)
            removed.append(name)
    return removed


class StoredItem(NamedTuple):
    """A tensor that lies in one piece in an item.

    Attributes:
        tensor: A tensor on the meta device: shape, strides and offset within the storage.
        offset: The first byte of the storage in the item.
    """

    tensor: torch.Tensor
    offset: int


class Parser:
    """Reads items, and remembers pickles."""

    def __init__(self) -> None:
        self._known: dict[bytes, torch.Tensor | None] = {}

    def stored(self, read: ReadBytes, nbytes: int, name: str) -> StoredItem | None:
        """The tensor in an item, or None if torch must load the item as a whole.

        Args:
            read: Reads parts of the item.
            nbytes: The item's length.
            name: File and item, for messages.

        Raises:
            IntegrityError: It is not an archive of torch.save, or one that is damaged.
            pickle.UnpicklingError: torch's own refusal of what ``weights_only`` forbids.
        """

        def read_many(wanted: Sequence[tuple[int, int]]) -> list[bytes]:
            return [read(offset, count) for offset, count in wanted]

        records = torch_zip.parse(read_many, nbytes, name).records()
        pickled = records.get("data.pkl")
        if pickled is None:
            raise IntegrityError(
                f"{name}: there is no record 'data.pkl': not written by torch.save",
                expected="data.pkl",
                found=list(records),
            )
        data = [entry for record, entry in records.items() if record.startswith("data/")]
        order = records.get("byteorder")
        if (
            len(data) != 1
            or order is None
            or read(order.offset, order.nbytes) != sys.byteorder.encode()
        ):
            return None
        key = read(pickled.offset, pickled.nbytes)
        if key not in self._known:
            self._known[key] = _described(read, nbytes)
        tensor = self._known[key]
        if tensor is None:
            return None
        entry = data[0]
        expected = tensor.untyped_storage().nbytes()
        if entry.nbytes != expected or _end_of(tensor) > expected:
            raise IntegrityError(
                f"{name}: record {entry.name!r} has another size than its pickle says: expected "
                f"{max(expected, _end_of(tensor))} bytes, found {entry.nbytes}",
                expected=expected,
                found=entry.nbytes,
            )
        return StoredItem(tensor, entry.offset)


def _described(read: ReadBytes, nbytes: int) -> torch.Tensor | None:
    view: io.RawIOBase = _ItemView(read, nbytes)
    try:
        tensor = torch.load(view, map_location="meta", weights_only=True)  # type: ignore[arg-type]
    except NotImplementedError:  # the meta device has no such tensors: quantised ones, say
        return None
    plain = (
        type(tensor) is torch.Tensor
        and tensor.is_meta
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
    return tensor if plain else None


def _end_of(tensor: torch.Tensor) -> int:
    """Bytes of the storage that the tensor reaches to."""
    return (int(tensor.storage_offset()) + extent(tensor)) * tensor.element_size()


class _ItemView(io.RawIOBase):
    """An item as a file for torch.load, which reads no storage for the meta device."""

    def __init__(self, read: ReadBytes, nbytes: int) -> None:
        super().__init__()
        self._read = read
        self._nbytes = nbytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}.get(whence, 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = max(0, min(len(buffer), self._nbytes - self._at))
        buffer[:count] = self._read(self._at, count)
        self._at += count
        return count


class TensorPart(NamedTuple):
    """A part of a tensor, which is one item: all of it, or what one rank had.

    Attributes:
        dtype: The dtype of the tensor.
        whole: The shape of the tensor.
        offsets: The part's first index in each dimension.
        sizes: Its shape.
    """

    dtype: torch.dtype
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        """As Python slices it: "[0:30, 12:24]"; "" for all of the tensor."""
        if self.sizes == self.whole:
            return ""
        spans = (f"{at}:{at + size}" for at, size in zip(self.offsets, self.sizes, strict=False))
        return f"[{', '.join(spans)}]"


class Stored(NamedTuple):
    """The content of a checkpoint.

    Attributes:
        folder: Its directory, with no links on the way.
        version: The version of the metadata file: another file has another.
        metadata: The content of that file.
        items: The items of each data file, by its name; each item's index, and its place.
        parts: The items that are parts of tensors; the others are objects.
    """

    folder: Path
    version: int
    metadata: Metadata
    items: dict[str, list[tuple[MetadataIndex, Any]]]
    parts: dict[MetadataIndex, TensorPart]

    def problems(self) -> Iterator[tuple[str, str]]:
        """Impossible entries of the metadata: the tensor's or object's name, and the error.

        Each part of a tensor has a place, and the parts together are the tensor.
        """
        places = self.metadata.storage_data
        for name, facts in self.metadata.state_dict_metadata.items():
            if not isinstance(facts, TensorStorageMetadata):
                if MetadataIndex(name) not in places:
                    yield name, "the metadata does not say where it lies"
                continue
            for chunk in facts.chunks:
                index = MetadataIndex(name, chunk.offsets)
                if index not in places:
                    part = self.parts[index]
                    yield f"{name}{part}", "the metadata does not say where it lies"
            parts = sum(chunk.sizes.numel() for chunk in facts.chunks)
            if parts != facts.size.numel():
                whole = f"of {facts.size.numel()} elements, {tuple(facts.size)}"
                yield name, f"its parts have {parts} {whole}: a rank's part is missing"


def read_stored(path: Path) -> Stored:
    """Read a metadata file; no code of its own is run.

    Raises:
        TransferError: It cannot be read.
        IntegrityError: It is damaged, or is not DCP's.
    """
    with naming("open", path):
        data = read_small(path, METADATA_BYTES)
    metadata = load_metadata(data, str(path))
    items: dict[str, list[tuple[MetadataIndex, Any]]] = {}
    try:
        for index, info in metadata.storage_data.items():
            items.setdefault(info.relative_path, []).append((index, info))
            if not (isinstance(info.offset, int) and isinstance(info.length, int)):
                raise TypeError(
                    f"the place of {index.fqn!r} is {info.offset!r}, {info.length!r}: not bytes"
                )
        for of_file in items.values():
            of_file.sort(key=lambda item: item[1].offset)
        parts = dict(_parts(metadata))
    except (AttributeError, TypeError, ValueError) as wrong:
        raise IntegrityError(
            f"{path}: the metadata does not say where the items lie: {wrong}",
            expected="a file, an offset and a length for each item",
            found=str(wrong),
        ) from wrong
    folder = Path(os.path.realpath(path.parent))
    return Stored(folder, zlib.crc32(data), metadata, items, parts)


def _parts(metadata: Metadata) -> Iterator[tuple[MetadataIndex, TensorPart]]:
    for name, facts in metadata.state_dict_metadata.items():
        if isinstance(facts, TensorStorageMetadata):
            for chunk in facts.chunks:
                sizes, whole = tuple(chunk.sizes), tuple(facts.size)
                part = TensorPart(facts.properties.dtype, whole, tuple(chunk.offsets), sizes)
                yield MetadataIndex(name, chunk.offsets), part
