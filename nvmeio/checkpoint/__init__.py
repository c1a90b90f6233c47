"""Checkpoints: torch and safetensors files through direct I/O.

Reading order for newcomers: `nvmeio._formats` (what a torch checkpoint is, how one is laid out
and written), `nvmeio._storage.replace` (a file into its place), `saving`; then `nvmeio._io.spans`
(many parts of files into memory) and `loading`. Saves in the background: `_directory` (its files),
`_manager` (one save, one after another), `_snapshot` (the state as it was), `_multi_rank` (several
processes), `_restoring` (the way back), behind `checkpointer`; `background` is the same under any
names, `frozen` the snapshot by itself.
`file_objects` serves code that calls torch.save itself, `safetensors` is the other format. Names
are loaded on first use: saving a state needs nothing of the rest.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from nvmeio.checkpoint._manager.job import SaveReport as SaveReport
    from nvmeio.checkpoint.checkpointer import Checkpointer as Checkpointer
    from nvmeio.checkpoint.file_objects import FastFileReader as FastFileReader
    from nvmeio.checkpoint.file_objects import FastFileWriter as FastFileWriter
    from nvmeio.checkpoint.loading import async_load as async_load
    from nvmeio.checkpoint.loading import load as load
    from nvmeio.checkpoint.saving import async_save as async_save
    from nvmeio.checkpoint.saving import save as save

__all__ = [
    "Checkpointer",
    "FastFileReader",
    "FastFileWriter",
    "SaveReport",
    "async_load",
    "async_save",
    "load",
    "save",
]

_LATER = {
    "Checkpointer": "checkpointer",
    "FastFileReader": "file_objects",
    "FastFileWriter": "file_objects",
    "SaveReport": "_manager.job",
    "async_load": "loading",
    "async_save": "saving",
    "load": "loading",
    "save": "saving",
}


def __getattr__(name: str) -> typing.Any:
    if name not in _LATER:
        raise AttributeError(f"module 'nvmeio.checkpoint' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"nvmeio.checkpoint.{_LATER[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
