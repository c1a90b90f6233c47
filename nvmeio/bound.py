"""A file of a handle's: opened once, looked at once, and read and written without naming either."""

from __future__ import annotations

import os
from typing import NoReturn, Protocol

from nvmeio import _checks
from nvmeio._checks import OFFSET_MAX
from nvmeio._core.core import Core
from nvmeio._core.short import ShortWay, start_short
from nvmeio._core.transfers import BOUNCE_FROM_BYTES
from nvmeio._memory.tensors import Data, is_simple
from nvmeio.engines.base import Opcode
from nvmeio.files import File
from nvmeio.operation import Operation

_LAST_OFFSET = OFFSET_MAX - BOUNCE_FROM_BYTES  # beyond that, the long way finds the error


class Handle(Protocol):
    """What is asked of an `AioHandle` here."""

    def async_pread(self, tensor: Data, file: File, file_offset: int = 0) -> Operation:
        """Start reading a file into a tensor."""

    def async_pwrite(self, tensor: Data, file: File, file_offset: int = 0) -> Operation:
        """Start writing a tensor into a file."""

    def get_block_size(self) -> int:
        """Bytes per kernel request."""


class BoundFile(File):
    """A `File` that is read and written through one handle; see `AioHandle.open`.

    It keeps the handle. All that takes a `File` takes it as well, other handles too.
    """

    def __init__(
        self, handle: Handle, core: Core | None, path: str | os.PathLike[str], mode: str
    ) -> None:
        """For `AioHandle.open`; `core` moves plain CPU tensors, if any does."""
        super().__init__(path, mode)
        self._handle = handle
        self._core = core
        self._reading = self._way(Opcode.READ)
        self._writing = None if self._read_only else self._way(Opcode.WRITE)

    def _way(self, opcode: Opcode) -> ShortWay | None:
        core, most = self._core, self._handle.get_block_size()
        return None if core is None else ShortWay.of(core, opcode, self._descriptors, most)

    def pread(self, tensor: Data, file_offset: int = 0) -> Operation:
        """Start reading into a tensor: `AioHandle.async_pread`, in all but what a short one costs.

        Args:
            tensor: Destination, as there.
            file_offset: First byte in the file; any value >= 0.
        """
        way, core = self._reading, self._core
        if (
            way is not None
            and core is not None
            and type(file_offset) is int
            and 0 <= file_offset <= _LAST_OFFSET
            and is_simple(tensor, True)
        ):
            operation = start_short(core, way, tensor, file_offset)
            if operation is not None:
                return operation
        return self._handle.async_pread(tensor, self, file_offset)

    def pwrite(self, tensor: Data, file_offset: int = 0) -> Operation:
        """Start writing a tensor: `AioHandle.async_pwrite`, in all but what a short one costs.

        Args:
            tensor: Source, as there.
            file_offset: First byte in the file; any value >= 0.
        """
        way, core = self._writing, self._core
        if (
            way is not None
            and core is not None
            and type(file_offset) is int
            and 0 <= file_offset <= _LAST_OFFSET
            and is_simple(tensor, False)
        ):
            operation = start_short(core, way, tensor, file_offset)
            if operation is not None:
                return operation
        return self._handle.async_pwrite(tensor, self, file_offset)

    def close(self) -> None:
        """As `File.close`."""
        self._reading = self._writing = None
        super().close()

    def __reduce__(self) -> NoReturn:
        _checks.refuse_pickling(
            self,
            "keep its path, make an AioHandle in each process, and call its open there (in a "
            "dataset, on first use or in worker_init_fn)",
        )
