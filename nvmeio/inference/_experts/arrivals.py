"""The read of one expert: begun, waited for, checked, and converted where that is wanted."""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
from typing import NamedTuple

import torch

from nvmeio._formats.safetensors.open_set import SafetensorsSet
from nvmeio._io.drives import DriveHandles
from nvmeio._threads.closing import on_error
from nvmeio.errors import BatchError, ClosedError, IntegrityError, TransferError, with_context
from nvmeio.handle import AioHandle
from nvmeio.inference._experts.places import Kept
from nvmeio.inference._experts.sets import ExpertReads, PartPlace
from nvmeio.inference._plan.checksums import verify
from nvmeio.inference._plan.quantization import dequantise
from nvmeio.inference._plan.slot_layout import Read
from nvmeio.operation import Operation


class Source(NamedTuple):
    """The files that experts are read from, and the handles that read them."""

    handles: DriveHandles
    checkpoint: SafetensorsSet


class Arrival:
    """An expert on its way; nobody computes with it before `wait` has returned.

    Args:
        source: The files that it is read from.
        places: The memory that it is read into.
        expert: Its number.

    Attributes:
        right: Whether its bytes are there, and equal the packed ones.
    """

    def __init__(self, source: Source, places: Kept, expert: int) -> None:
        self._source = source
        self._places = places
        self._expert = expert
        self._stage: torch.Tensor | None = None
        self._begun: list[tuple[list[Read], Operation]] | None = None
        self._cancelled = False
        self.right = False

    @property
    def begun(self) -> bool:
        """Whether its reads were submitted."""
        return self._begun is not None

    def begin(self) -> None:
        """Submit its reads, once; in the owner's thread, where no interrupt can lose one."""
        if self._begun is not None or self._cancelled:
            return
        begun: list[tuple[list[Read], Operation]] = []
        by_handle: dict[AioHandle, list[tuple[Read, torch.Tensor]]] = {}
        for memory, (reads, _) in self._memories():
            for read in reads:
                handle = self._source.handles.of(self._source.checkpoint.files[read.file])
                by_handle.setdefault(handle, []).append((read, read.part(memory)))
        with on_error(_cancel, begun):
            for handle, items in by_handle.items():
                files = [self._source.checkpoint.files[read.file] for read, _ in items]
                offsets = [read.start for read, _ in items]
                memories = [memory for _, memory in items]
                operation = handle.async_pread_batch(memories, files, offsets)
                begun.append(([read for read, _ in items], operation))
        self._begun = begun

    def wait(self) -> None:
        """Block until its bytes are there and right; raises what kept them away.

        From the thread that computes, or any one that has the experts to itself, once its reads
        have begun. An interrupt leaves it as it is.
        """
        if self.right:
            return
        if self._begun is None or self._cancelled:
            raise ClosedError(f"{self._name} was not read: the call that needed it is over")
        for reads, operation in self._begun:
            failed = operation.exception()
            if isinstance(failed, BatchError):
                _, failed = failed.failures[0]
            if isinstance(failed, TransferError):
                raise with_context(failed, self._name) from failed
            if failed is not None:
                raise failed
            for file in {read.file for read in reads}:
                self._source.checkpoint.check(file, self._name)
        self._verify()
        self._convert()
        self._stage = None
        self.right = True

    def done(self) -> bool:
        """Whether its reads have ended, so that `wait` does not block."""
        return self._begun is not None and all(operation.done() for _, operation in self._begun)

    def cancel(self) -> None:
        """End it; when this returns nothing is written to its memory."""
        self._cancelled = True
        _cancel(self._begun or [])

    @property
    def _name(self) -> str:
        return f"expert {self._expert} of {self._places.experts.name}"

    def _memories(self) -> list[tuple[torch.Tensor, ExpertReads]]:
        """The memories that are read into, each with what brings its bytes."""
        experts, number = self._places.experts, self._expert
        found = [(self._places.region(number), experts.direct[number])]
        if experts.stage_nbytes:
            if self._stage is None:
                self._stage = torch.empty(experts.stage_nbytes, dtype=torch.uint8, device="cpu")
            found.append((self._stage, experts.staged[number]))
        return found

    def _verify(self) -> None:
        files = self._source.checkpoint.files
        for memory, (_, expected) in self._memories():
            try:
                verify(memory, expected, files)
            except IntegrityError as wrong:
                what = f"{self._name}: {wrong}"
                raise IntegrityError(what, expected=wrong.expected, found=wrong.found) from None

    def _convert(self) -> None:
        stage = self._stage
        if stage is None:
            return
        region = self._places.region(self._expert)
        for weight, parts, converted, copied in self._places.experts.weights:
            if converted is None:
                for part, target in zip(parts, copied, strict=bool(copied)):
                    _over(region, target).copy_(_over(stage, part))
                continue
            stored, out = [_over(stage, part) for part in parts], _over(region, converted)
            if weight.quantised is None:
                out.copy_(stored[0])
            else:
                dequantise(stored, weight.quantised, out)


def _cancel(begun: list[tuple[list[Read], Operation]]) -> None:
    for _, operation in begun:
        operation.cancel()
    for _, operation in begun:
        with contextlib.suppress(concurrent.futures.CancelledError):
            operation.exception()


def _over(memory: torch.Tensor, part: PartPlace) -> torch.Tensor:
    nbytes = math.prod(part.shape) * part.dtype.itemsize
    return memory[part.start : part.start + nbytes].view(part.dtype).view(part.shape)
