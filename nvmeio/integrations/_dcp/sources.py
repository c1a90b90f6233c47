"""What is written of an item: the planner's data, or what torch's stream transforms make of it."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from nvmeio.errors import BackendUnavailableError
from nvmeio.integrations._dcp.items import own_storage
from nvmeio.integrations._dcp.writing import ItemSpan


class ItemSource:
    """One item on its way into a file, through the stream transforms where there are any."""

    def __init__(self, planner: SavePlanner, item: WriteItem, transforms: Any) -> None:
        self.item = item
        self._planner = planner
        self._transforms = transforms if getattr(transforms, "extensions", ()) else None
        self._descriptors: dict[str, Any] = {}

    def resolve(self) -> torch.Tensor | io.BytesIO:
        """What is written: the planner's data, or what the transforms make of it, in memory."""
        data = self._planner.resolve_data(self.item)
        if self._transforms is None:
            return data
        made = io.BytesIO()
        stream, descriptors = self._transforms.transform_save_stream(self.item, made)
        if isinstance(data, io.BytesIO):
            stream.write(data.getbuffer())
        else:
            torch.save(own_storage(data.detach().cpu()), stream)
        stream.close()
        if descriptors:
            self._descriptors = {"transform_descriptors": descriptors}
        return made

    def written(self, name: str, span: ItemSpan) -> WriteResult:
        """What torch is told of it."""
        info = _StorageInfo(name, span.offset, span.nbytes, **self._descriptors)
        return WriteResult(self.item.index, span.nbytes, info)


def stream_transforms(name: str, extensions: Any) -> Any:
    """Torch's class of this name, made; None in a torch that has no stream transforms.

    Raises:
        BackendUnavailableError: There are `extensions` for a torch that has none.
    """
    made = getattr(filesystem, name, None)
    if made is not None:
        return made(extensions)
    if extensions:
        raise BackendUnavailableError(
            f"torch {torch.__version__} has no stream transforms", remedy="use torch 2.7 or later"
        )
    return None
