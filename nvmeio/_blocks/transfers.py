"""The transfers of one batch of blocks, all in flight together."""

from __future__ import annotations

import concurrent.futures
from collections import deque
from collections.abc import Callable

import torch

from nvmeio._io.inflight import MOST_BYTES, MOST_OPERATIONS
from nvmeio.files import File
from nvmeio.handle import AioHandle
from nvmeio.operation import Operation


class Transfers:
    """A bounded number at once; unlike those of a load or save, one may fail by itself.

    Leaving the ``with`` block waits for all.
    """

    def __init__(self, handle: AioHandle, file: File, slot_bytes: int) -> None:
        self._handle = handle
        self._file = file
        self._slot_bytes = slot_bytes
        self._flying: deque[tuple[Operation, Callable[[BaseException | None], object]]] = deque()
        self._nbytes = 0

    def write(
        self, block: torch.Tensor, slot: int, ended: Callable[[BaseException | None], object]
    ) -> None:
        """Begin to write a block into a slot, when there is room for it in flight."""
        self._wait_for_room(block.nbytes)
        begun = self._handle.async_pwrite(block, self._file, slot * self._slot_bytes)
        self._flying.append((begun, ended))

    def read(
        self, block: torch.Tensor, slot: int, ended: Callable[[BaseException | None], object]
    ) -> None:
        """Begin to read a slot into a block, when there is room for it in flight."""
        self._wait_for_room(block.nbytes)
        begun = self._handle.async_pread(block, self._file, slot * self._slot_bytes)
        self._flying.append((begun, ended))

    def _wait_for_room(self, nbytes: int) -> None:
        while self._flying and (
            self._nbytes + nbytes > MOST_BYTES or len(self._flying) >= MOST_OPERATIONS
        ):
            self._finish_first()
        self._nbytes += nbytes

    def _finish_first(self) -> None:
        operation, ended = self._flying.popleft()
        error: BaseException | None
        try:
            error = operation.exception()
        except concurrent.futures.CancelledError as cancelled:
            error = cancelled
        self._nbytes -= operation.nbytes
        ended(error)

    def __enter__(self) -> Transfers:
        return self

    def __exit__(self, *_: object) -> None:
        while self._flying:
            self._finish_first()
