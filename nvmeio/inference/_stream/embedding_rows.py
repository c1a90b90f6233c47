"""Rows of an embedding that stays in its file: those that a pass asks for, and no others."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from nvmeio._formats.safetensors_set import SafetensorsSet
from nvmeio.errors import RowsError, TransferError, with_context
from nvmeio.inference._plan.slot_layout import FileExtent
from nvmeio.inference._plan.units import Unit
from nvmeio.inference._stream.resources import Resources


class EmbeddingRows:
    """Reads rows, and counts them.

    Args:
        device: Where they are wanted.

    Attributes:
        number: Rows that were read.
        nbytes: Bytes of them.
        waited_s: How long that took, in seconds.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.number = 0
        self.nbytes = 0
        self.waited_s = 0.0

    def read(
        self, resources: Resources, unit: Unit, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of a unit's only weight, each once, and for each id its number among them.

        Args:
            resources: Of the stream.
            unit: Whose weight it is.
            ids: Numbers of rows.

        Raises:
            IndexError: An id is out of range, as of torch's own embedding.
            TransferError, IntegrityError: As for `WeightStream.use`.
        """
        weight = unit.weights[0]
        part = weight.parts[0]
        unique, places = torch.unique(ids.reshape(-1).cpu(), return_inverse=True)
        rows, width = weight.shape
        if unique.numel() and not 0 <= int(unique[0]) <= int(unique[-1]) < rows:
            raise IndexError(
                f"index out of range: {weight.name!r} has {rows} rows, ids are "
                f"{int(unique[0])} to {int(unique[-1])}"
            )
        extent = part.extents[0]
        offsets = extent.offset + unique * (width * part.dtype.itemsize)
        found = torch.empty(len(unique), width, dtype=part.dtype, device="cpu")
        checkpoint, row_of = resources.checkpoint, None
        began = time.perf_counter()
        try:
            for file, chosen in _by_file(checkpoint, extent, offsets):
                row_of = chosen
                self._gather(resources, file, found, offsets, chosen)
                checkpoint.check(file, repr(weight.name))
        except TransferError as failed:
            what = f"weight {weight.name!r} of {unit.name}"
            if isinstance(failed, RowsError):
                row = failed.row if row_of is None else int(row_of[failed.row])
                what = f"row {int(unique[row])} of {what}"
            raise with_context(failed, what) from failed
        self.number += len(found)
        self.nbytes += found.nbytes
        self.waited_s += time.perf_counter() - began
        return found.to(self._device, weight.dtype), places.view(ids.shape).to(self._device)

    def _gather(
        self,
        resources: Resources,
        file: int,
        found: torch.Tensor,
        offsets: torch.Tensor,
        chosen: torch.Tensor | None,
    ) -> None:
        """Read the rows at some of the places; None: at all of them."""
        source = resources.checkpoint.files[file]
        handle = resources.handles.of(source)
        if chosen is None:
            handle.sync_gather(found, source, offsets)
            return
        rows = torch.empty(len(chosen), *found.shape[1:], dtype=found.dtype, device="cpu")
        handle.sync_gather(rows, source, offsets[chosen])
        found[chosen] = rows


def _by_file(
    checkpoint: SafetensorsSet, extent: FileExtent, offsets: torch.Tensor
) -> Iterator[tuple[int, torch.Tensor | None]]:
    """Which rows are read from which file; None: all. A row lies where it begins."""
    spans = checkpoint.spans(extent.file, extent.offset, extent.offset + extent.nbytes)
    if len(spans) == 1:
        yield spans[0].file, None
        return
    starts = torch.tensor([span.start for span in spans])
    files = torch.tensor([span.file for span in spans])
    of_rows = files[torch.searchsorted(starts, offsets, right=True) - 1]
    for file in torch.unique(of_rows).tolist():
        yield file, torch.nonzero(of_rows == file).reshape(-1)
