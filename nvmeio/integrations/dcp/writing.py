"""A save's writes: a file of items, placed one after another and written group after group.

`DataFile` is written, `Skeletons` lays out each item as torch.save would.
`SnapshotStager` stages a state dict, which is copied while training goes on (`nvmeio.snapshot`).
"""

from __future__ import annotations

import functools
import inspect
import io
import math
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import WriteResult

from nvmeio._checks import NotPickled
from nvmeio._formats.torch_archives.torch_layout import (
    FileLayout,
    KnownBytes,
    Sink,
    StorageRecord,
    layout_of,
    plan_layout,
    skeleton_of,
)
from nvmeio._formats.torch_archives.torch_writing import write_part
from nvmeio._io.handles import CallHandle
from nvmeio._io.inflight import InFlight
from nvmeio._memory import tensors
from nvmeio._pages import PAGE_BYTES, round_up
from nvmeio._storage.replace import Replacement
from nvmeio._threads.interruptible import run_interruptible
from nvmeio._torch_private import StorageInfo, is_wrapper_subclass
from nvmeio.checkpoint.frozen import CopyMemory, FrozenState, HowToFreeze
from nvmeio.errors import BackendUnavailableError

# Items are resolved, then written, so many bytes at a time: a planner may make each tensor anew (in
# another dtype, say), and all of them at once could be too much memory. The queue runs empty
# between two groups, which takes about 2 ms of 300.
GROUP_BYTES = 1 << 30

# Records from here on are put on a page boundary, which costs half a page on average.
_ALIGN_FROM_BYTES = 64 << 10

# Torch's alignment of storages within an archive; items keep it in the file.
_ITEM_ALIGNMENT = 64


class DataFile:
    """A file of items, written group after group and then put in its place.

    Args:
        path: The file; one that is there is replaced.
        items: Its items, in its order.

    Attributes:
        flight: The operations in flight, for somebody else to cancel.
    """

    def __init__(self, path: Path, items: Sequence[WriteItem]) -> None:
        self._path = path
        self._items = items
        self.flight = InFlight()
        self._skeletons = Skeletons()
        self._start = 0  # of the group, in whole pages
        self._pieces: list[KnownBytes] = []
        self._records: list[StorageRecord] = []
        self._group_bytes = 0
        self._position = 0  # the first free byte

    def write(
        self,
        handle: CallHandle,
        planner: SavePlanner,
        transforms: Any,
        *,
        checksum: bool,
        durable: bool,
        is_last: bool,
    ) -> list[WriteResult]:
        """Write it; blocks.

        Args:
            handle: Moves the bytes.
            planner: Resolves the items.
            transforms: Torch's, which items go through in memory where there are any.
            checksum: Compute the CRC-32 of every record.
            durable: As for `Replacement.commit`.
            is_last: The handle is not needed any more behind it.

        Raises:
            TransferError: It cannot be written; what was there is as it was.
            Cancelled: `flight` was cancelled; likewise.
        """
        results = []
        end = 0
        with Replacement(os.fspath(self._path)) as replacement:
            for item in self._items:
                results.append(self._add(item, *_resolved(planner, item, transforms)))
                end = self._position
                if self._group_bytes >= GROUP_BYTES:
                    self._flush(handle, replacement, checksum)
            self._flush(handle, replacement, checksum)
            if is_last:
                handle.done()
            replacement.truncate(end)
            replacement.commit(durable)
        return results

    def _add(
        self, item: WriteItem, data: torch.Tensor | io.BytesIO, descriptors: dict[str, Any]
    ) -> WriteResult:
        layout = self._skeletons.layout(data)
        offset, pieces, records = place(layout, item.index.fqn, self._position)
        self._pieces += pieces
        self._records += records
        self._group_bytes += layout.nbytes
        self._position = offset + layout.nbytes
        info = StorageInfo(self._path.name, offset, layout.nbytes, **descriptors)
        return WriteResult(item.index, layout.nbytes, info)

    def _flush(self, handle: CallHandle, replacement: Replacement, checksum: bool) -> None:
        if not self._group_bytes:
            return
        end = round_up(self._position, PAGE_BYTES)
        replacement.reserve(end)
        write_part(
            handle.get(),
            replacement.file,
            FileLayout(end, self._pieces, self._records),
            self._start,
            end,
            checksum=checksum,
            flight=self.flight,
        )
        self._pieces, self._records, self._group_bytes = [], [], 0
        self._start = self._position = end


def _resolved(
    planner: SavePlanner, item: WriteItem, transforms: Any
) -> tuple[torch.Tensor | io.BytesIO, dict[str, Any]]:
    """The data to write: the planner's, or its transformed form in memory."""
    data = planner.resolve_data(item)
    if not getattr(transforms, "extensions", ()):
        return data, {}
    made = io.BytesIO()
    stream, descriptors = transforms.transform_save_stream(item, made)
    if isinstance(data, io.BytesIO):
        stream.write(data.getbuffer())
    else:
        torch.save(own_storage(data.detach().cpu()), stream)
    stream.close()
    return made, {"transform_descriptors": descriptors} if descriptors else {}


class Skeletons:
    """Layouts of items, from skeletons that are made once for each shape and dtype."""

    def __init__(self) -> None:
        self._known: dict[tuple[torch.dtype, torch.Size], FileLayout] = {}

    def layout(self, data: torch.Tensor | io.BytesIO) -> FileLayout:
        """The layout of one item, from its own first byte on.

        Args:
            data: The planner's data: a tensor on any device, or bytes.

        Returns:
            The layout. It holds the data, without a copy; of a tensor that is not contiguous it
            takes one when it is written.

        Cost: 0.5 ms for a new shape, 10 us for a known one.
        """
        if isinstance(data, io.BytesIO):
            return _bytes_layout(data)
        tensor = data.detach()
        if not _is_plain(tensor):
            return _other_layout(tensor)
        try:
            skeleton = self._skeleton(tensor.dtype, tensor.shape)
        except BackendUnavailableError:
            return _saved_layout(tensor)
        if not skeleton.records:
            return skeleton
        record = skeleton.records[0]._replace(data=tensors.bytes_of(tensor))
        return skeleton._replace(records=[record])

    def _skeleton(self, dtype: torch.dtype, shape: torch.Size) -> FileLayout:
        key = (dtype, shape)
        if key not in self._known:
            # Never touched, so it takes address space and no memory.
            hollow = torch.empty(shape, dtype=dtype, device="cpu")
            sink = Sink()
            with torch.serialization.skip_data():  # of a plain tensor, so no code of others is run
                torch.save(hollow, sink)  # type: ignore[arg-type]
            self._known[key] = layout_of(skeleton_of(sink), {"0": hollow.untyped_storage()})
            if hollow.nbytes != sum(record.nbytes for record in self._known[key].records):
                raise BackendUnavailableError(f"a {dtype} tensor is not saved as its bytes")
        return self._known[key]


def place(
    layout: FileLayout, name: str, position: int
) -> tuple[int, list[KnownBytes], list[StorageRecord]]:
    """The place of an item in a file: its first byte, and the bytes to write there.

    Args:
        layout: The item's own.
        name: For error messages.
        position: The first free byte of the file.
    """
    large = [record for record in layout.records if record.nbytes >= _ALIGN_FROM_BYTES]
    if large:
        at = large[0].offset
        offset = round_up(position + at, PAGE_BYTES) - at
    else:
        offset = round_up(position, _ITEM_ALIGNMENT)
    pieces = [KnownBytes(piece.offset + offset, piece.data) for piece in layout.pieces]
    records = [
        StorageRecord(
            name,
            record.offset + offset,
            record.nbytes,
            record.data,
            tuple(at + offset for at in record.crc_at),
        )
        for record in layout.records
    ]
    return offset, pieces, records


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_meta
        and tensor.nbytes == math.prod(tensor.shape) * tensor.dtype.itemsize
    )


def _bytes_layout(data: io.BytesIO) -> FileLayout:
    view = data.getbuffer()
    if not len(view):
        return FileLayout(0, [], [])
    memory = torch.frombuffer(view, dtype=torch.uint8)
    return FileLayout(len(view), [], [StorageRecord("bytes", 0, len(view), memory, ())])


def _other_layout(tensor: torch.Tensor) -> FileLayout:
    """The layout of other tensors (subclasses, quantised, sparse), as torch makes it."""
    tensor = own_storage(tensor.cpu())  # of a view, only what it shows belongs to the item
    try:
        return plan_layout(tensor)
    except BackendUnavailableError:
        return _saved_layout(tensor)


def _saved_layout(tensor: torch.Tensor) -> FileLayout:
    """The layout by saving in memory, for a torch whose skeletons are not known."""
    buffer = io.BytesIO()
    torch.save(own_storage(tensor.cpu()), buffer)
    return _bytes_layout(buffer)


def own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """A copy where the storage has more than the tensor shows, for all of it would be saved."""
    if tensor.layout is not torch.strided or is_wrapper_subclass(tensor):
        return tensor
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def stream_transforms(name: str, extensions: Any) -> Any:
    """Torch's class of this name, made; None in a torch that has no stream transforms.

    Raises:
        BackendUnavailableError: There are `extensions`, but torch does not support them.
    """
    made = getattr(filesystem, name, None)
    if made is not None:
        return made(extensions)
    if extensions:
        raise BackendUnavailableError(
            f"torch {torch.__version__} has no stream transforms", remedy="use torch 2.7 or later"
        )
    return None


class SnapshotStager(NotPickled, AsyncStager):
    """Stages for `dcp.async_save` without holding the training for a copy.

        stager = SnapshotStager()
        future = dcp.async_save(state_dict, storage_writer=writer, async_stager=stager)

    The checkpoint has every byte as it was when `dcp.async_save` was called, whatever writes to the
    state afterwards; for any storage writer. Large tensors in host memory are protected at once,
    and copied in the thread that saves (see `nvmeio.snapshot`); what cannot be protected is copied
    before `async_save` returns. With ``AsyncCheckpointerType.THREAD``. Several ranks pass a group
    of their own, ``process_group=dist.new_group(backend="gloo")``: without it this warns.

    Args:
        snapshot: As `how` of `nvmeio.snapshot`.
        directory: As for `nvmeio.snapshot`.

    Attributes:
        protected_bytes: Bytes that the last `stage` did not copy before it returned.

    Cost: memory of the size of the state, kept for the next save of tensors of the same sizes until
    `close`. A save that begins before the one before has ended takes as much again, meanwhile.
    """

    _elsewhere = (
        "make one in each process; a save by another process (AsyncCheckpointerType.PROCESS) "
        "needs torch's own stager"
    )

    _synchronize_after_execute = False

    def __init__(
        self, snapshot: str = "auto", directory: str | os.PathLike[str] | None = None
    ) -> None:
        self._how = HowToFreeze.checked(snapshot, directory, "snapshot")
        self.protected_bytes = 0
        self._memory = CopyMemory()

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state dict for one save.

        Raises:
            MemoryError: There is no room for it.
        """
        _warn_of_shared_group()
        frozen = run_interruptible(lambda: FrozenState(dict(state_dict), self._memory, self._how))
        self.protected_bytes = frozen.protected_bytes
        return Staged(frozen)

    def synchronize_staging(self) -> None:
        """Nothing is to be waited for: the state may change."""

    def close(self) -> None:
        """Give the memory back, after a save under way. It may stage again."""
        self._memory.release()


def _warn_of_shared_group() -> None:
    """Warn where several ranks save in the background, in the group that they train in.

    A stager is not told of the group: it is read from the caller, `dcp.async_save`.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    frame = inspect.currentframe()
    while frame is not None and not (
        frame.f_code.co_name == "async_save"
        and str(frame.f_globals.get("__name__", "")).startswith("torch.distributed.checkpoint")
    ):
        frame = frame.f_back
    if frame is not None and frame.f_locals.get("process_group", frame) is None:
        warnings.warn(
            "dcp.async_save without process_group= uses the default group at the same time as the "
            "training: their collectives mix, and the job aborts or hangs. Make a "
            'group once, dist.new_group(backend="gloo"), and pass it as process_group=',
            UserWarning,
            stacklevel=3,
        )


class GuardingStager(SnapshotStager):
    """Deprecated: `SnapshotStager`, which needs no optimizers.

    Args:
        optimizers: Not used.
        memory_bytes: Not used.
    """

    def __init__(
        self, *optimizers: torch.optim.Optimizer, memory_bytes: int | str | None = None
    ) -> None:
        warnings.warn(
            "GuardingStager is SnapshotStager now, which needs no optimizers",
            DeprecationWarning,
            stacklevel=2,
        )
        super().__init__()


class Staged(dict[str, Any]):
    """A state dict for one save: access to its content waits until all of it is there."""

    def __init__(self, frozen: FrozenState[dict[str, Any]]) -> None:
        super().__init__(frozen.peek())
        self._frozen = frozen

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "only this process can save this state dict, because its snapshot is in this process's "
            "memory: use "
            "AsyncCheckpointerType.THREAD, or torch's own stager"
        )


def _waiting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wait_first(self: Staged, *arguments: Any) -> Any:
        self._frozen.result()
        return method(self, *arguments)

    return wait_first


# Torch asks for them in the thread that saves.
_LOOKS = ("items", "values", "get", "pop", "popitem", "setdefault", "copy")
for _name in (*_LOOKS, "__getitem__", "__iter__", "__or__"):
    setattr(Staged, _name, _waiting(getattr(dict, _name)))
