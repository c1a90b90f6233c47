"""safetensors files at the speed of the drive: one file, or shards with an index.

Files are what the safetensors package and transformers read and write. Loading reads all tensors
in a few large direct reads into aligned memory (`_spans`), or on to a device as they arrive.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

import torch

from nvmeio import files
from nvmeio._formats import safetensors_shards as shards
from nvmeio._formats.safetensors_errors import as_package, device_of, failed_save
from nvmeio._formats.safetensors_files import header_of, shards_of, tensor_on
from nvmeio._formats.safetensors_header import Header, TensorEntry
from nvmeio._io.handles import handle_for
from nvmeio._io.long_call import LongCall
from nvmeio._io.spans import Load, Span
from nvmeio._threads.jobs import in_thread, run_interruptible
from nvmeio.checkpoint._save.safetensors_save import SaveRequest, checked, write
from nvmeio.errors import IntegrityError, TransferError
from nvmeio.handle import AioHandle
from nvmeio.progress import Progress


def save_safetensors(
    tensors: Mapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    max_shard_size: int | str | None = None,
    align: bool = False,
    handle: AioHandle | None = None,
    progress: Progress | None = None,
) -> None:
    """Save tensors into a safetensors file, or a set of shards: atomically and durably.

    The safetensors package and transformers read what is written.

    Args:
        tensors: By name; any device, contiguous or not. They must not be changed meanwhile.
        path: The file; it is the old one or the new one at every moment. Or a directory that is
            there: ``model.safetensors`` in it.
        metadata: Texts to go with the tensors; none by default, as the package. Some readers want
            ``{"format": "pt"}``, transformers before version 5 among them.
        max_shard_size: Bytes, or a text such as "5GB". If the tensors have more, they go into
            ``NAME-00001-of-00003.safetensors`` and so on, with an index
            ``NAME.safetensors.index.json``; a tensor is never divided. The older file or set of
            this name is removed when the new one is complete: until then it stays whole, and where
            its shards have the same names, the new ones get others.
        align: Pad the header so that the tensors begin on a 4 KiB boundary, those of whole 4 KiB
            first; all readers take that. By default the file has the bytes of
            `safetensors.torch.save_file` (which puts several texts of metadata in any order).
        handle: Writes through this handle; without one, a handle with the setting stored for the
            file system (`AioHandle.tuned`) lives as long as the call.
        progress: Told how far it is: ``progress(what, done_bytes, total_bytes)``; see
            `nvmeio.progress`.

    Raises:
        RuntimeError: Tensors share memory (tied weights): save one of them.
        TypeError: Not tensors by name (a ValueError too, as in the package), a dtype that the
            format lacks, a tensor without memory (a RuntimeError too).
        ValueError: A sparse tensor, an impossible name or size.
        TransferError: The disk is full, the directory cannot be written in, the drive failed; the
            package's `SafetensorError` as well, where that is installed.

    After an error: the older file or set is untouched, the parts of the new one are gone.

    Cost: no copy of contiguous CPU tensors but what the handle bounces; one at a time of those
    that are not contiguous.
    """
    wanted = checked(tensors, path, metadata, max_shard_size, align)
    with LongCall("save", path, progress) as call:
        run_interruptible(lambda: _save(wanted, handle, call), call.cancel)


def _save(wanted: SaveRequest, handle: AioHandle | None, call: LongCall) -> None:
    try:
        with handle_for(handle, wanted.path) as writer:
            write(wanted, writer, call)
    except TransferError as failed:
        raise failed_save(failed) from failed


async def async_save_safetensors(
    tensors: Mapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    max_shard_size: int | str | None = None,
    align: bool = False,
    handle: AioHandle | None = None,
    progress: Progress | None = None,
) -> None:
    """`save_safetensors`, awaited: other tasks run meanwhile, but must not change the tensors.

    Cancelling stops it; `CancelledError` is raised once nothing is in flight and the parts of the
    new file are gone. A save that had reached its last rename is complete.
    """
    wanted = checked(tensors, path, metadata, max_shard_size, align)
    with LongCall("save", path, progress) as call:
        await in_thread(lambda: _save(wanted, handle, call), call.cancel)


def load_safetensors(
    path: str | os.PathLike[str],
    device: str | int | torch.device | None = "cpu",
    *,
    handle: AioHandle | None = None,
    progress: Progress | None = None,
) -> dict[str, torch.Tensor]:
    """Load all tensors of a safetensors file, an index of shards, or a model's directory.

    Args:
        path: A file; an index (``*.safetensors.index.json``), of which exactly the tensors that it
            names are loaded; or a directory that holds either (``model.safetensors`` first).
        device: Where the tensors shall lie; "cuda:1" and 1 name a GPU, None the CPU, "meta" reads
            headers only.
        handle: Reads through this handle; without one, a handle with the setting stored for the
            file system (`AioHandle.tuned`) lives as long as the call.
        progress: Told how far it is: ``progress(what, done_bytes, total_bytes)``; see
            `nvmeio.progress`.

    Returns:
        Tensors by name, in the order of the file. On the CPU they lie in memory of nvmeio, aligned
        as in the file: small ones share arenas of at most 32 MiB, larger ones share with none.

    Raises:
        IntegrityError: A header or index is malformed, or an index names a tensor that its shard
            lacks. Nothing was allocated. The package's `SafetensorError` as well, where that is
            installed; so is the next but one.
        TransferError: A file cannot be opened or read; a `FileNotFoundError` where it is missing.
        TypeError: A tensor's dtype is unknown to this torch.
        MemoryError: More is asked for than is available.

    Cost: no copy on the CPU, unless a tensor lies in the file on an odd address for its dtype.
    """
    to = device_of(device)
    with LongCall("load", path, progress) as call:
        return run_interruptible(lambda: _load(path, to, handle, call), call.cancel)


async def async_load_safetensors(
    path: str | os.PathLike[str],
    device: str | int | torch.device | None = "cpu",
    *,
    handle: AioHandle | None = None,
    progress: Progress | None = None,
) -> dict[str, torch.Tensor]:
    """`load_safetensors`, awaited: other tasks run meanwhile.

    Cancelling stops it; `CancelledError` is raised once nothing is in flight any more.
    """
    to = device_of(device)
    with LongCall("load", path, progress) as call:
        return await in_thread(lambda: _load(path, to, handle, call), call.cancel)


def read_header(path: str | os.PathLike[str]) -> Header:
    """What a safetensors file says of itself: its tensors by name (dtype, shape, place), metadata.

    Raises:
        IntegrityError: The header is malformed, or does not match the size of the file.
        TransferError: The file cannot be opened or read.
    """

    def read() -> Header:
        with files.open(path) as file, handle_for(None, path) as handle:
            return header_of(file, handle)

    return run_interruptible(read)


def _load(
    path: str | os.PathLike[str], device: torch.device, handle: AioHandle | None, call: LongCall
) -> dict[str, torch.Tensor]:
    place = shards.find(path)
    with contextlib.ExitStack() as opened:
        # Opened once for header and tensors: a file that replaces it meanwhile is another.
        parts = [
            (opened.enter_context(files.open(shard)), names) for shard, names in shards_of(place)
        ]
        reader = opened.enter_context(handle_for(handle, place))
        found: dict[str, TensorEntry] = {}
        spans: list[Span] = []
        for file, names in parts:
            tensors = header_of(file, reader).tensors
            for name in tensors if names is None else names:
                if name not in tensors:
                    raise as_package(IntegrityError)(
                        f"{place} says that {name!r} is in {file.path}, which lacks it",
                        expected=name,
                        found=list(tensors),
                    )
                entry = found[name] = tensors[name]
                entry.for_torch()  # refused before anything is read
                spans.append(Span(file, entry.start, entry.nbytes, repr(name)))
        memories = Load(call).run(reader, spans, device)
        return {
            name: tensor_on(memory, found[name])
            for name, memory in zip(found, memories, strict=True)
        }
