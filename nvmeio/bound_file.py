"""A file of a handle's, which is read and written without naming the handle."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

from nvmeio.files import File
from nvmeio.operation import Operation

if TYPE_CHECKING:
    from nvmeio._memory.tensors import Data


class Handle(Protocol):
    """The part of an `AioHandle` that is used here."""

    def async_pread(self, tensor: Data, file: File, file_offset: int = 0) -> Operation:
        """Start reading a file into a tensor."""

    def async_pwrite(self, tensor: Data, file: File, file_offset: int = 0) -> Operation:
        """Start writing a tensor into a file."""


class BoundFile(File):
    """A `File` that is read and written through one handle; see `AioHandle.open`.

    It keeps the handle. All that takes a `File` takes it as well, other handles too.
    """

    _elsewhere = (
        "keep its path, make an AioHandle in each process, and call its open there (in a "
        "dataset, on first use or in worker_init_fn)"
    )

    def __init__(self, handle: Handle, path: str | os.PathLike[str], mode: str) -> None:
        """For `AioHandle.open`."""
        super().__init__(path, mode)
        self._handle = handle

    def pread(self, tensor: Data, file_offset: int = 0) -> Operation:
        """Start reading into a tensor: `AioHandle.async_pread`.

        Args:
            tensor: Destination, as there.
            file_offset: First byte in the file; any value >= 0.
        """
        return self._handle.async_pread(tensor, self, file_offset)

    def pwrite(self, tensor: Data, file_offset: int = 0) -> Operation:
        """Start writing a tensor: `AioHandle.async_pwrite`.

        Args:
            tensor: Source, as there.
            file_offset: First byte in the file; any value >= 0.
        """
        return self._handle.async_pwrite(tensor, self, file_offset)
