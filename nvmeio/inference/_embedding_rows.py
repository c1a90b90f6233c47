"""Rows of an embedding that stays in its file: those that a pass asks for, and no others."""

from __future__ import annotations

import time

import torch

from nvmeio.errors import RowsError, TransferError, with_context
from nvmeio.inference._resources import Resources
from nvmeio.inference._units import Unit


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
        began = time.perf_counter()
        try:
            resources.handle.sync_gather(found, resources.checkpoint.files[extent.file], offsets)
            resources.checkpoint.check(extent.file, repr(weight.name))
        except TransferError as failed:
            what = f"weight {weight.name!r} of {unit.name}"
            if isinstance(failed, RowsError):
                what = f"row {int(unique[failed.row])} of {what}"
            raise with_context(failed, what) from failed
        self.number += len(found)
        self.nbytes += found.nbytes
        self.waited_s += time.perf_counter() - began
        return found.to(self._device, weight.dtype), places.view(ids.shape).to(self._device)
