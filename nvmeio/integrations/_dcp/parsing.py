"""What an item of a tensor is, from the few bytes around its data: a tensor on the meta device.

torch's own unpickler reads the item's pickle, once for each that differs: tensors of one shape and
dtype have the same.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from nvmeio._formats import torch_zip
from nvmeio.errors import IntegrityError

ReadBytes = Callable[[int, int], bytes]
"""Reads (offset, nbytes) of an item; all of it lies within."""


class StoredItem(NamedTuple):
    """A tensor that lies in one piece in an item.

    Attributes:
        tensor: On the meta device: shape, strides and offset within the storage.
        offset: Where the storage begins in the item.
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
            IntegrityError: It is no archive of torch.save, or one that is damaged.
            pickle.UnpicklingError: torch's own refusal of what ``weights_only`` forbids.
        """

        def read_many(wanted: Sequence[tuple[int, int]]) -> list[bytes]:
            return [read(offset, count) for offset, count in wanted]

        archive = torch_zip.parse(read_many, nbytes, name)
        records = archive.records()
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
    tensor = torch.load(view, map_location="meta", weights_only=True)  # type: ignore[arg-type]
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


def extent(tensor: torch.Tensor) -> int:
    """Elements from a tensor's first to its last, both included."""
    if not tensor.numel():
        return 0
    return 1 + sum(
        (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )


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
