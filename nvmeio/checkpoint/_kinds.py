"""What kind of file a checkpoint is, from its name and its first bytes."""

from __future__ import annotations

import os
from typing import Literal

from nvmeio import files
from nvmeio.checkpoint._opening import read_buffered
from nvmeio.checkpoint._zip import LOCAL_MAGIC
from nvmeio.errors import NvmeioError

Kind = Literal["torch", "torch legacy", "safetensors"]

# torch's magic number as the first pickle of its old format: protocol 2, LONG1, ten bytes.
_LEGACY = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"


class NoCheckpointError(NvmeioError, ValueError):
    """A file that is neither torch's nor safetensors'."""


def kind_of(path: str | os.PathLike[str]) -> Kind:
    """The format of a file.

    Raises:
        NoCheckpointError: It is none that is known.
        TransferError: It cannot be read.
    """
    with files.open(path) as file:
        head = read_buffered(file, 0, min(file.size(), len(_LEGACY)))
    if os.fspath(path).endswith(".safetensors") or head[8:9] == b"{":
        return "safetensors"
    if head.startswith(LOCAL_MAGIC):
        return "torch"
    if head == _LEGACY:
        return "torch legacy"
    raise NoCheckpointError(f"{path} is no checkpoint of torch or safetensors")
