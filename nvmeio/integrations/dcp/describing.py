"""The contents of a DCP checkpoint: each part of each tensor, and its place. No tensor is read."""

from __future__ import annotations

import math
import os
import pickle
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex

from nvmeio import files
from nvmeio._threads.interruptible import run_interruptible
from nvmeio.checkpoint.describing import Description, RecordFacts, TensorFacts
from nvmeio.errors import IntegrityError, counted
from nvmeio.files import File, read_buffered
from nvmeio.integrations.dcp.checking import Checked
from nvmeio.integrations.dcp.metadata import Parser, Stored, read_stored


def describe(path: str | os.PathLike[str]) -> Description:
    """Look into a DCP checkpoint; nothing of a pickle is run.

    Args:
        path: As for `checking.verify`.

    Returns:
        Its tensors, with a row for each part of one that ranks have shared; its items as records,
        which are objects too.

    Raises:
        TransferError: A file cannot be opened or read.
        IntegrityError: It is damaged.

    Cost: ``.metadata``, and some small reads for each tensor.
    """
    return run_interruptible(lambda: _describe(Path(path)))


def _describe(path: Path) -> Description:
    checked = Checked.of(path)
    stored = read_stored(checked.metadata)
    parser = Parser()
    nbytes = 0
    records: list[RecordFacts] = []
    tensors: list[TensorFacts] = []
    objects: list[str] = []
    for name, items in sorted(stored.items.items()):
        if checked.only not in (None, name):
            continue
        with files.open(stored.folder / name) as file:
            nbytes += file.size()
            for index, info in items:
                label = f"{name}: {index.fqn}"
                records.append(RecordFacts(label, info.offset, info.length, None))
                tensor = _tensor(stored, name, file, index, info, parser)
                if tensor is None:
                    objects.append(index.fqn)
                else:
                    tensors.append(tensor)
    what = f"and {counted(len(objects), 'object')}: {', '.join(objects)}" if objects else ""
    return Description(os.fspath(checked.shown), "dcp", nbytes, records, tensors, [], what)


def _tensor(
    stored: Stored, name: str, file: File, index: MetadataIndex, info: Any, parser: Parser
) -> TensorFacts | None:
    """The part of a tensor that an item is; None for an object."""
    part = stored.parts.get(index)
    if part is None:
        return None
    offset, itemsize = info.offset, part.dtype.itemsize
    label = f"{file.path}: item {index.fqn!r}"
    if info.offset < 0 or info.length < 0 or info.offset + info.length > file.size():
        raise IntegrityError(
            f"{label} lies at bytes [{offset}, {offset + info.length}), and the file has "
            f"{file.size()}",
            expected=offset + info.length,
            found=file.size(),
        )
    if not getattr(info, "transform_descriptors", None):

        def read(at: int, count: int) -> bytes:
            return read_buffered(file, info.offset + at, count)

        try:
            found = parser.stored(read, info.length, label)
        except pickle.UnpicklingError as wrong:
            raise IntegrityError(
                f"{label}: {wrong}", expected="a tensor", found=str(wrong)
            ) from wrong
        if found is not None:
            offset += found.offset + int(found.tensor.storage_offset()) * itemsize
    dtype = str(part.dtype).removeprefix("torch.")
    nbytes = math.prod(part.sizes) * itemsize
    return TensorFacts(f"{index.fqn}{part}", dtype, part.sizes, nbytes, name, offset, "cpu")
