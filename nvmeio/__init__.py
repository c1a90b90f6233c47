"""nvmeio: tensors to and from files at the speed of the drive, awaited.

Reading order for newcomers: `errors`, `_plan` (what goes direct), `engines.base` (the contract),
`native_shim/lane.c` (the pump), `operation`, `_core` (who notices an end), `handle`. The map is
docs/architecture.md.
"""

from nvmeio._tensor import cast_to_byte_tensor as cast_to_byte_tensor
from nvmeio.buffers import empty_aligned as empty_aligned
from nvmeio.buffers import empty_pinned as empty_pinned
from nvmeio.engines.base import Counters as Counters
from nvmeio.errors import AlignmentError as AlignmentError
from nvmeio.errors import BackendUnavailableError as BackendUnavailableError
from nvmeio.errors import ClosedError as ClosedError
from nvmeio.errors import IntegrityError as IntegrityError
from nvmeio.errors import NvmeioError as NvmeioError
from nvmeio.errors import ShortTransferError as ShortTransferError
from nvmeio.errors import TransferError as TransferError
from nvmeio.files import File as File
from nvmeio.files import open as open
from nvmeio.handle import AioHandle as AioHandle
from nvmeio.operation import Operation as Operation
from nvmeio.operation import as_future as as_future
from nvmeio.pool import PinnedPool as PinnedPool

__version__ = "0.1.0"

__all__ = [
    "AioHandle",
    "AlignmentError",
    "BackendUnavailableError",
    "ClosedError",
    "Counters",
    "File",
    "IntegrityError",
    "NvmeioError",
    "Operation",
    "PinnedPool",
    "ShortTransferError",
    "TransferError",
    "as_future",
    "cast_to_byte_tensor",
    "empty_aligned",
    "empty_pinned",
    "open",
]
