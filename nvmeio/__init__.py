"""nvmeio: PyTorch tensors saved, loaded and streamed at the speed of an NVMe drive.

    AioHandle          reads and writes tensors; awaited, as futures, or blocking
    save, load         checkpoints, durable; `Checkpointer` saves while training goes on
    stream_model       runs a model that is larger than memory
    SwappedOptimizer   trains with the optimizer's state on the drive; `SwappedModule` the rest
    data.Records       rows of a file by their numbers

    >>> import nvmeio, torch
    >>> nvmeio.save({"weights": torch.ones(1000)}, "model.pt")
    >>> nvmeio.load("model.pt")["weights"].sum()
    tensor(1000.)

The guides are in docs/, and the commands under `nvmeio --help`. Contributors begin with
docs/architecture.md. Names are loaded when they are first asked for: `import nvmeio` imports no
torch.
"""

import importlib
import typing

from nvmeio._threads import interpreter as _interpreter  # noqa: F401 - refuses some Pythons first
from nvmeio.errors import AlignmentError as AlignmentError
from nvmeio.errors import BackendUnavailableError as BackendUnavailableError
from nvmeio.errors import BatchError as BatchError
from nvmeio.errors import ClosedError as ClosedError
from nvmeio.errors import CuFileError as CuFileError
from nvmeio.errors import DeviceTimeoutError as DeviceTimeoutError
from nvmeio.errors import IntegrityError as IntegrityError
from nvmeio.errors import NvmeioError as NvmeioError
from nvmeio.errors import RowsError as RowsError
from nvmeio.errors import ShortTransferError as ShortTransferError
from nvmeio.errors import TransferError as TransferError

if typing.TYPE_CHECKING:
    # The tables below, for type checkers and editors.
    from nvmeio import bound_file as bound_file
    from nvmeio import buffers as buffers
    from nvmeio import checkpoint as checkpoint
    from nvmeio import compat as compat
    from nvmeio import data as data
    from nvmeio import engines as engines
    from nvmeio import errors as errors
    from nvmeio import files as files
    from nvmeio import gds as gds
    from nvmeio import handle as handle
    from nvmeio import inference as inference
    from nvmeio import integrations as integrations
    from nvmeio import offload as offload
    from nvmeio import operation as operation
    from nvmeio import pool as pool
    from nvmeio import progress as progress
    from nvmeio import testing as testing
    from nvmeio import tuned as tuned
    from nvmeio._memory.tensors import cast_to_byte_tensor as cast_to_byte_tensor
    from nvmeio.bound_file import BoundFile as BoundFile
    from nvmeio.buffers import empty_aligned as empty_aligned
    from nvmeio.buffers import empty_pinned as empty_pinned
    from nvmeio.checkpoint import Checkpointer as Checkpointer
    from nvmeio.checkpoint import FastFileReader as FastFileReader
    from nvmeio.checkpoint import FastFileWriter as FastFileWriter
    from nvmeio.checkpoint import async_load as async_load
    from nvmeio.checkpoint import async_save as async_save
    from nvmeio.checkpoint import load as load
    from nvmeio.checkpoint import save as save
    from nvmeio.checkpoint.frozen import FrozenState as FrozenState
    from nvmeio.checkpoint.frozen import snapshot as snapshot
    from nvmeio.checkpoint.lazy_safetensors import safe_open as safe_open
    from nvmeio.checkpoint.safetensors import load_safetensors as load_safetensors
    from nvmeio.checkpoint.safetensors import save_safetensors as save_safetensors
    from nvmeio.engines.base import Counters as Counters
    from nvmeio.files import File as File
    from nvmeio.files import open as open
    from nvmeio.gds import GdsHandle as GdsHandle
    from nvmeio.handle import AioHandle as AioHandle
    from nvmeio.inference import stream_model as stream_model
    from nvmeio.offload import SwappedModule as SwappedModule
    from nvmeio.offload import SwappedOptimizer as SwappedOptimizer
    from nvmeio.operation import Operation as Operation
    from nvmeio.operation import as_future as as_future
    from nvmeio.pool import PinnedPool as PinnedPool

__version__ = "0.3.0"

# Names that are loaded at first use (PEP 562), by where they are.
_LATER = {
    name: module
    for module, names in {
        "nvmeio._memory.tensors": "cast_to_byte_tensor",
        "nvmeio.bound_file": "BoundFile",
        "nvmeio.buffers": "empty_aligned empty_pinned",
        "nvmeio.checkpoint": "Checkpointer FastFileReader FastFileWriter "
        "async_load async_save load save",
        "nvmeio.checkpoint.frozen": "FrozenState snapshot",
        "nvmeio.checkpoint.lazy_safetensors": "safe_open",
        "nvmeio.checkpoint.safetensors": "load_safetensors save_safetensors",
        "nvmeio.engines.base": "Counters",
        "nvmeio.files": "File open",
        "nvmeio.gds": "GdsHandle",
        "nvmeio.handle": "AioHandle",
        "nvmeio.inference": "stream_model",
        "nvmeio.offload": "SwappedModule SwappedOptimizer",
        "nvmeio.operation": "Operation as_future",
        "nvmeio.pool": "PinnedPool",
    }.items()
    for name in names.split()
}
# Public modules: attributes too, without an import of their own.
_NAMES = (
    "bound_file buffers checkpoint compat data engines errors files gds handle inference "
    "integrations offload operation pool progress testing tuned"
)
_MODULES = _NAMES.split()

__all__ = [
    "AioHandle",
    "AlignmentError",
    "BackendUnavailableError",
    "BatchError",
    "BoundFile",
    "Checkpointer",
    "ClosedError",
    "Counters",
    "CuFileError",
    "DeviceTimeoutError",
    "FastFileReader",
    "FastFileWriter",
    "File",
    "FrozenState",
    "GdsHandle",
    "IntegrityError",
    "NvmeioError",
    "Operation",
    "PinnedPool",
    "RowsError",
    "ShortTransferError",
    "SwappedModule",
    "SwappedOptimizer",
    "TransferError",
    "as_future",
    "async_load",
    "async_save",
    "cast_to_byte_tensor",
    "empty_aligned",
    "empty_pinned",
    "load",
    "load_safetensors",
    "open",
    "safe_open",
    "save",
    "save_safetensors",
    "snapshot",
    "stream_model",
]


def __getattr__(name: str) -> typing.Any:
    if name in _MODULES:
        return importlib.import_module(f"nvmeio.{name}")
    if name not in _LATER:
        raise AttributeError(f"module 'nvmeio' has no attribute {name!r}")
    found = getattr(importlib.import_module(_LATER[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES, "__version__"])
