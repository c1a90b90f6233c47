"""torch.distributed.checkpoint at the drive's speed: a storage writer and a storage reader.

    import torch.distributed.checkpoint as dcp
    from nvmeio.integrations.dcp import NvmeStorageReader, NvmeStorageWriter

    dcp.save(state_dict, storage_writer=NvmeStorageWriter("checkpoint/1000"))
    dcp.load(state_dict, storage_reader=NvmeStorageReader("checkpoint/1000"))

    stager = SnapshotStager()  # training goes on at once; the state is copied behind it
    dcp.async_save(state_dict, storage_writer=NvmeStorageWriter(…), async_stager=stager)

The checkpoint is that of torch's own FileSystemWriter: a directory with ``.metadata`` and a
``.distcp`` file or more of each rank. FileSystemReader reads what is written here, and
NvmeStorageReader what FileSystemWriter wrote, with any other number of ranks.

`metadata` has what is said of items, `writing` the data files, `reading` what fills tensors.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import os
import pickle
import uuid
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from nvmeio import _checks
from nvmeio._formats.sniff import DCP_DATA
from nvmeio._io.handles import CallHandle
from nvmeio._io.inflight import InFlight
from nvmeio._storage.durable import make_directory
from nvmeio._storage.replace import replace_file
from nvmeio._storage.untrusted import read_small
from nvmeio._threads.interruptible import run_interruptible
from nvmeio._torch_private import StorageInfo, StoragePrefix
from nvmeio.errors import IntegrityError, naming
from nvmeio.handle import AioHandle
from nvmeio.integrations.dcp import metadata as stored
from nvmeio.integrations.dcp.reading import read_items
from nvmeio.integrations.dcp.writing import DataFile, stream_transforms
from nvmeio.integrations.dcp.writing import GuardingStager as GuardingStager
from nvmeio.integrations.dcp.writing import SnapshotStager as SnapshotStager

logger = logging.getLogger("nvmeio")

# torch 2.7 and later have more than one format, and a name for each.
_TORCH_SAVE: Any = getattr(
    getattr(filesystem, "SerializationFormat", None), "TORCH_SAVE", "torch_save"
)

PathLike = str | os.PathLike[str]
Value = TypeVar("Value")


class _InDirectory:
    """The methods that torch asks of a directory's writer and reader alike."""

    path: Path

    @property
    def checkpoint_id(self) -> PathLike:
        """The directory."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        """Whether a checkpoint can be saved there: in a directory that can be written."""
        return bool(FileSystem.validate_checkpoint_id(checkpoint_id))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {os.fspath(self.path)!r}>"


class NvmeStorageWriter(_InDirectory, StorageWriter, BlockingAsyncStager):
    """Writes distributed checkpoints through nvmeio, for `dcp.save` and `dcp.async_save`.

    Each rank writes its tensors with direct I/O, with no copy of them made first, into files whose
    large tensors lie on page boundaries, computing the CRC-32 of every record on the way. A file is
    made durable, then renamed; ``.metadata`` comes last, in the same way. So a checkpoint that is
    there is whole, and one that is saved over another takes its place at once: until then the old
    one is untouched, whatever happens.

    Args:
        path: The directory of the checkpoint; made if it is missing, with those above it, as
            FileSystemWriter does.
        single_file_per_rank: False for a file for each tensor or object.
        sync_files: Make every file durable. False leaves that to the kernel, as torch does: a
            checkpoint is whole whenever a process ends, not where the machine loses power.
        thread_count: Files that a rank writes at the same time; with `single_file_per_rank`, so
            many files are made. One keeps a drive busy.
        per_thread_copy_ahead: Taken and kept; copies ahead of the drive are bounded as under
            Cost.
        cache_staged_state_dict: As for FileSystemWriter: `dcp.async_save` without an
            ``async_stager`` copies into the same memory each time, page-locked for CUDA. Keep the
            writer for all saves then, and give each a ``checkpoint_id``.
        overwrite: Whether a checkpoint that is there may be replaced.
        _extensions: Stream transforms, as for FileSystemWriter. Items go through them in memory.
        serialization_format: ``SerializationFormat.TORCH_SAVE``, the only one there is here.
        checksum: Write the CRC-32 of every record; without, 0 stands in their place.
        handle: Moves the bytes, and stays open; None makes one for each save. A writer with a
            handle cannot be sent to another process (``AsyncCheckpointerType.PROCESS``).

    The arguments are FileSystemWriter's, in its order, and so are the attributes `path`, `fs`,
    `save_id`, `overwrite`, `sync_files` and so on. Like it, this is torch's `BlockingAsyncStager`
    as well, for `dcp.async_save` without an ``async_stager``.

    Raises:
        TypeError: `single_file_per_rank`, `sync_files`, `cache_staged_state_dict` or `overwrite` is
            no bool.
        ValueError: Another serialization format, or a `thread_count` below 1.

    Errors while saving come as torch reports those of any storage, as a `CheckpointException` on
    every rank, whose ``failures`` has the error of each rank that failed: `TransferError` (disk
    full, no permission, a failed drive) or, where `overwrite` is False, RuntimeError.

    Cost: no copy of contiguous tensors; 48 MiB of staging and the handle's bounce memory. Tensors
    on a GPU go through 64 MiB of page-locked memory. New tensors of a planner (in another dtype,
    say) and copies of non-contiguous tensors take up to 1 GiB, or the largest tensor.
    """

    def __init__(
        self,
        path: PathLike,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[Any] | None = None,
        serialization_format: Any = None,
        *,
        checksum: bool = True,
        handle: AioHandle | None = None,
    ) -> None:
        StorageWriter.__init__(self)
        BlockingAsyncStager.__init__(
            self, _checks.switch("cache_staged_state_dict", cache_staged_state_dict)
        )
        if getattr(serialization_format, "value", serialization_format) not in (None, "torch_save"):
            raise ValueError(
                f"serialization_format {serialization_format} is not written here: use "
                "SerializationFormat.TORCH_SAVE, or nvmeio.save_safetensors for the tensors of "
                "one process"
            )
        self.fs = FileSystem()
        self.path = Path(path)
        self.single_file_per_rank = _checks.switch("single_file_per_rank", single_file_per_rank)
        self.sync_files = _checks.switch("sync_files", sync_files)
        self.thread_count = _checks.integer("thread_count", thread_count, 1)
        self.per_thread_copy_ahead = per_thread_copy_ahead
        self.overwrite = _checks.switch("overwrite", overwrite)
        self.transforms: Any = stream_transforms("_StorageWriterTransforms", _extensions)
        self.serialization_format = serialization_format or _TORCH_SAVE
        self._checksum = checksum
        self._handle = handle
        self.save_id = str(uuid.uuid4())
        self.rank: int | None = None
        self.use_collectives = True

    def reset(self, checkpoint_id: PathLike | None = None) -> None:
        """Begin a new checkpoint, at `checkpoint_id` if it is given."""
        if checkpoint_id:
            self.path = Path(checkpoint_id)
        self.save_id = str(uuid.uuid4())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take note of ``rank`` and ``use_collectives``, which torch passes by keyword."""
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the directory, and refuse to overwrite if that is asked for.

        Raises:
            RuntimeError: There is a checkpoint, and `overwrite` is False.
            TransferError: The directory cannot be made.
        """
        make_directory(self.path, above=True, durable=self.sync_files)
        if not self.overwrite and self._exists():
            raise RuntimeError(
                f"Checkpoint already exists and {self.overwrite=}. It is in {self.path}: save into "
                "another directory, or pass overwrite=True, which replaces it at its end"
            )
        return plan if self._own_metadata is None else _with_prefix(plan, self._own_metadata)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank the names of its files, as torch's writer does."""
        return [
            _with_prefix(plan, rank) if plan.storage_data is None else plan
            for rank, plan in enumerate(plans)
        ]

    def _exists(self) -> bool:
        """Whether there is a checkpoint to be replaced."""
        # As torch: of ranks that save each for itself, the first one stands for all.
        ranks = {None if self.use_collectives else 0, self._own_metadata}
        return any(stored.metadata_path(self.path, rank).exists() for rank in ranks)

    @property
    def _own_metadata(self) -> int | None:
        """This rank, if it saves without the others."""
        return None if self.use_collectives else self.rank

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write all items of the plan; done when this returns.

        Raises:
            TransferError: They could not be written; an older checkpoint is as it was.
        """
        prefix: str = plan.storage_data.prefix
        if self._exists():
            # Here, not in the plan: a planner may keep a plan and bring it again for the next save.
            prefix = stored.replacing(prefix, self.save_id)
        files = [
            DataFile(self.path / f"{prefix}{number}{DCP_DATA}", items)
            for number, items in enumerate(self._split(plan.items))
        ]

        def cancel() -> None:
            for file in files:
                file.flight.cancel()

        found = run_interruptible(_as_here(lambda: self._write_files(files, planner)), cancel)
        results: Future[list[WriteResult]] = Future()
        results.set_result(found)
        return results

    def _write_files(self, files: Sequence[DataFile], planner: SavePlanner) -> list[WriteResult]:
        with CallHandle(self._handle, self.path) as handle:
            write = partial(
                DataFile.write,
                handle=handle,
                planner=planner,
                transforms=self.transforms,
                checksum=self._checksum,
                durable=self.sync_files,
                # The handle is made beside the planning, and closed beside the last fsync.
                is_last=len(files) == 1,
            )
            if len(files) <= 1:
                return [result for file in files for result in write(file)]
            workers = min(self.thread_count, len(files))
            with concurrent.futures.ThreadPoolExecutor(workers, "nvmeio-dcp") as pool:
                return [result for each in pool.map(write, files) for result in each]

    def _split(self, items: Sequence[WriteItem]) -> list[list[WriteItem]]:
        """The items of each file: small objects first, then tensors, evenly by size."""
        ordered = sorted(items, key=lambda item: item.type != WriteItemType.BYTE_IO)
        if not self.single_file_per_rank:
            return [[item] for item in ordered]
        if self.thread_count == 1:
            return [ordered] if ordered else []
        files: list[list[WriteItem]] = [[] for _ in range(self.thread_count)]
        sizes = [0] * len(files)
        for item in sorted(ordered, key=_nbytes, reverse=True):
            smallest = sizes.index(min(sizes))
            files[smallest].append(item)
            sizes[smallest] += _nbytes(item) + 1
        return [file for file in files if file]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata, which makes the checkpoint the one that is there.

        Data files of the one that it replaces are removed then.

        Raises:
            TransferError: It could not be written; an older checkpoint is as it was.
        """
        version = getattr(filesystem, "CURRENT_DCP_VERSION", None)  # torch 2.7
        if version is not None:
            metadata.version = version
        metadata.storage_data = {
            result.index: result.storage_data for each in results for result in each
        }
        metadata.storage_meta = self.storage_meta()
        path = stored.metadata_path(self.path, self._own_metadata)
        data = pickle.dumps(metadata)

        def replace() -> list[str]:
            before = stored.referred_to(path)
            replace_file(path, [memoryview(data)], durable=self.sync_files)
            return stored.remove_stale(self.path, before, self._own_metadata)

        removed = run_interruptible(replace)
        if removed:
            logger.info("%s: removed %d files of older saves", self.path, len(removed))

    def storage_meta(self) -> StorageMeta:
        """The identity of this save: the directory, and an id of its own."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)


class NvmeStorageReader(_InDirectory, StorageReader):
    """Reads distributed checkpoints through nvmeio, for `dcp.load`.

    A rank's part of a tensor goes from the drive into the tensor that it loads, in place, if it is
    contiguous in both, with all reads in flight at once. Otherwise (a shard of columns, another
    dtype, a tensor on a GPU) it goes through chunks of 32 MiB.

    The attributes `path`, `fs`, `load_id` and so on are FileSystemReader's.

    Args:
        path: The directory of the checkpoint.
        _extension_registry: As for FileSystemReader, whose stream transforms are read too.
        handle: Moves the bytes, and stays open; None makes one for each load.

    Errors while loading come as torch reports those of any storage, as a `CheckpointException` on
    every rank, whose ``failures`` has the error of each rank that failed: `TransferError` (no such
    file, a failed drive) or `IntegrityError` (a file that is cut off, damaged, or not what
    ``.metadata`` says), with the names of the file and the item. Some tensors are filled by then.

    Only DCP's own classes are unpickled from ``.metadata``, and data files must lie beside it. But
    torch's planners unpickle values that are not tensors with ``weights_only=False``: load what you
    trust.

    Cost: no copy of contiguous tensors on the CPU but what the handle bounces; up to 256 MiB for
    items below 1 MiB, and 128 MiB (page-locked for CUDA) of chunks where those are needed.
    """

    def __init__(
        self, path: PathLike, _extension_registry: Any = None, *, handle: AioHandle | None = None
    ) -> None:
        super().__init__()
        self.fs = FileSystem()
        self.path = Path(path)
        self.transforms: Any = stream_transforms("_StorageReaderTransforms", _extension_registry)
        self.rank: int | None = None
        self.use_collectives = True
        self._extension_registry = _extension_registry
        self._handle = handle
        self.storage_data: dict[MetadataIndex, StorageInfo] = {}
        self._folder, self._version = self.path, 0
        self.load_id = str(uuid.uuid4())

    def reset(self, checkpoint_id: PathLike | None = None) -> None:
        """Begin a new load, from `checkpoint_id` if it is given."""
        self.storage_data = {}
        if checkpoint_id:
            self.path = Path(checkpoint_id)
        self._folder, self._version = self.path, 0
        self.load_id = str(uuid.uuid4())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The content of the checkpoint; of ``rank`` alone, if that is passed by keyword.

        Raises:
            TransferError: There is no checkpoint (also a FileNotFoundError), or it cannot be read.
            IntegrityError: The metadata file is damaged, or none, or names what is not DCP's own or
                lies outside of the checkpoint.
        """
        # The data files are those beside this one, also if `path` is a link that is changed.
        self._folder = Path(os.path.realpath(self.path))
        path = stored.metadata_path(self._folder, kwargs.get("rank"))
        with naming("open", path):
            data = read_small(path, stored.METADATA_BYTES)
        self._version = zlib.crc32(data)
        metadata = stored.load_metadata(data, str(path))
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take note of where each item lies.

        Raises:
            IntegrityError: The metadata does not say.
        """
        if not isinstance(metadata.storage_data, dict):
            raise IntegrityError(
                f"{self.path}: the metadata does not say where the items lie",
                expected="storage_data",
                found=metadata.storage_data,
            )
        self.storage_data = metadata.storage_data
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Tell the coordinator which checkpoint this rank has found."""
        found = (os.fspath(self._folder), self._version)
        return dataclasses.replace(plan, storage_data=found) if self.use_collectives else plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks have found the same checkpoint.

        Raises:
            IntegrityError: They have not: it was replaced, or a link to it changed, meanwhile.
        """
        found = {rank: plan.storage_data for rank, plan in enumerate(plans) if plan.storage_data}
        first = next(iter(found), 0)
        for rank, (folder, version) in found.items():
            if version != found[first][1]:
                raise IntegrityError(
                    f"{self.path}: rank {first} has found the checkpoint in {found[first][0]}, and "
                    f"rank {rank} another one in {folder}: it was replaced while it was opened. "
                    "Load it again, or name a directory that is not replaced meanwhile",
                    expected=found[first],
                    found=(folder, version),
                )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all items of the plan; done when this returns.

        Raises:
            TransferError: A file cannot be opened or read.
            IntegrityError: An item is not what the metadata says.
            ValueError: The planner gives a tensor of another size than the plan says.
        """
        wanted = [(request, self._found(request.storage_index)) for request in plan.items]
        flight = InFlight()

        def read() -> None:
            with CallHandle(self._handle, self.path) as handle:
                read_items(
                    handle.get(), self._folder, wanted, planner, self._extension_registry, flight
                )

        run_interruptible(_as_here(read), flight.cancel)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _found(self, index: MetadataIndex) -> StorageInfo:
        info = self.storage_data.get(index)
        if info is None:
            raise IntegrityError(
                f"{self.path}: the metadata does not say where {index.fqn!r} lies",
                expected=index,
                found=None,
            )
        return info


def _as_here(work: Callable[[], Value]) -> Callable[[], Value]:
    """Run with this thread's torch modes in another one: planners of users may look at them."""
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def run() -> Value:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            return work()

    return run


def _with_prefix(plan: SavePlan, rank: int) -> SavePlan:
    return dataclasses.replace(plan, storage_data=StoragePrefix(f"__{rank}_"))


def _nbytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
