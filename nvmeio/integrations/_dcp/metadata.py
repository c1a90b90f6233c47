"""DCP's ``.metadata``: a pickle, of which nothing but DCP's own classes is taken.

torch's reader unpickles it without a look, so that whoever wrote it can run anything; and it opens
whatever file the pickle names.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from nvmeio._formats.safetensors_shards import is_inside
from nvmeio.errors import IntegrityError

# What torch's planners and writers put there, of torch 2.1 and of now.
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed._shard.sharded_tensor.metadata": {"MEM_FORMAT_ENCODING", "TensorProperties"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePath", "PurePosixPath"},  # Python 3.13
    "builtins": {"frozenset", "set"},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which is none of DCP's own classes; where its source is to "
            "be trusted, torch's FileSystemReader makes anything"
        )


def load_metadata(data: bytes, path: str) -> Metadata:
    """What a metadata file says; no code of its own is run.

    Args:
        data: All of the file.
        path: Its name, for messages.

    Raises:
        IntegrityError: It is damaged, none, names other classes than DCP's, or names a file outside
            of its directory.
    """
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
    except Exception as wrong:  # unpickling raises whatever it comes upon
        raise IntegrityError(
            f"{path}: not a DCP metadata file, or damaged: {wrong}",
            expected="a pickle of Metadata",
            found=str(wrong),
        ) from wrong
    if not isinstance(metadata, Metadata):
        raise IntegrityError(
            f"{path}: not a DCP metadata file: expected Metadata, found {type(metadata).__name__}",
            expected="Metadata",
            found=type(metadata).__name__,
        )
    places = getattr(metadata, "storage_data", None)
    for index, info in places.items() if isinstance(places, dict) else ():
        name = getattr(info, "relative_path", None)
        if not is_inside(name):
            raise IntegrityError(
                f"{path}: {getattr(index, 'fqn', index)!r} lies outside of the checkpoint, in "
                f"{name!r:.200}",
                expected="a file beside the metadata",
                found=name,
            )
    return metadata
