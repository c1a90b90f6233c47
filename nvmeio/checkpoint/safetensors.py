"""safetensors files at the speed of the drive: one file, or shards with an index.

Files are what the safetensors package and transformers read and write. Loading reads all tensors
in a few large direct reads into aligned memory (`_io.spans`), or on to a device as they arrive.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nvmeio import _torch_private, files
from nvmeio._files.descriptors import open_error
from nvmeio._formats.safetensors import headers, shards, whole_file
from nvmeio._formats.safetensors.headers import Header
from nvmeio._formats.safetensors.open_set import SafetensorsSet, header_of
from nvmeio._formats.safetensors.shards import device_of, failed_save, missing
from nvmeio._formats.torch_archives.torch_layout import FileLayout, KnownBytes, StorageRecord
from nvmeio._formats.torch_archives.torch_writing import padded_nbytes, write_part
from nvmeio._io.handles import handle_for
from nvmeio._io.inflight import InFlight
from nvmeio._io.long_call import LongCall
from nvmeio._io.spans import Load
from nvmeio._memory import tensors as tensors_module
from nvmeio._memory.tensors import extent, is_simple
from nvmeio._storage.durable import make_directory, sync_directory
from nvmeio._storage.replace import Replacement
from nvmeio._storage.untrusted import read_small
from nvmeio._threads.interruptible import Cancelled, in_thread, run_interruptible
from nvmeio.checkpoint import saving
from nvmeio.errors import TransferError, joined
from nvmeio.handle import AioHandle
from nvmeio.progress import Progress

# A file of up to this is read through the page cache: a handle takes longer to make, and to close.
SMALL_BYTES = 8 << 20


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
            there: ``model.safetensors`` in it. A path that ends in "/" is a directory.
        metadata: Texts to go with the tensors; none by default, as the package. Some readers want
            ``{"format": "pt"}``, transformers before version 5 among them.
        max_shard_size: Bytes, or a text such as "5GB", which is 5 * 10**9 here as in transformers
            ("5GiB" is 5 * 2**30; all other sizes of nvmeio's are binary). More than that goes into
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
        TransferError: The disk is full, the directory cannot be written in or (as a path that ends
            in "/") is not there, the drive failed; the package's `SafetensorError` as well, where
            that is installed.

    After an error: the older file or set is untouched, the parts of the new one are gone.

    Cost: no copy of contiguous CPU tensors but what the handle bounces; one at a time of those
    that are not contiguous.
    """
    wanted = checked(tensors, path, metadata, max_shard_size, align)
    with LongCall("save", path, progress) as call:
        if _is_small(wanted, handle) and _no_modes():
            _save(wanted, None, call)
        else:
            run_interruptible(lambda: _save(wanted, handle, call), call.cancel)


def _no_modes() -> bool:
    """Whether no mode of this thread (fake tensors, inference) would change the result."""
    return not (_torch_private.dispatch_stack_depth() or torch.is_inference_mode_enabled())


def _is_small(wanted: SaveRequest, handle: AioHandle | None) -> bool:
    return handle is None and not wanted.shards and wanted.nbytes <= saving.SMALL_BYTES


def _save(wanted: SaveRequest, handle: AioHandle | None, call: LongCall) -> None:
    try:
        if _is_small(wanted, handle):
            _write_small(wanted, call)
            return
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
        device: The device of the tensors; "cuda:1" and 1 name a GPU, None the CPU, "meta" reads
            headers only.
        handle: Reads through this handle; without one, a handle with the setting stored for the
            file system (`AioHandle.tuned`) lives as long as the call.
        progress: Told how far it is: ``progress(what, done_bytes, total_bytes)``; see
            `nvmeio.progress`.

    Returns:
        Tensors by name, in the order of the file. On the CPU they lie in memory of nvmeio, aligned
        as in the file: small ones share arenas of at most 32 MiB, larger ones share with none.
        Those of a file of at most 8 MiB, without a handle, lie in memory of torch, and share none.

    Raises:
        IntegrityError: A header or index is malformed, or an index names a tensor that its shard
            lacks. Nothing was allocated. The package's `SafetensorError` as well, where that is
            installed; so is the next but one.
        TransferError: A file cannot be opened or read; a `FileNotFoundError` where it is missing.
        TypeError: A tensor's dtype is unknown to this torch.
        MemoryError: More is asked for than is available.

    Cost: no copy on the CPU, unless a tensor lies in the file on an odd address for its dtype; one
    of a file of at most 1 MiB, which is read whole.
    """
    to = device_of(device)
    with LongCall("load", path, progress) as call:
        no_modes = _no_modes()
        found = _load_whole(path, to, handle, call) if no_modes else None
        if found is not None:
            return found
        place, small = _place_of(path, to, handle)
        if small and no_modes:
            return _load(place, small, to, handle, call)  # an interrupt leaves nothing
        return run_interruptible(lambda: _load(place, small, to, handle, call), call.cancel)


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

        def work() -> dict[str, torch.Tensor]:
            found = _load_whole(path, to, handle, call)
            if found is not None:
                return found
            return _load(*_place_of(path, to, handle), to, handle, call)

        return await in_thread(work, call.cancel)


def read_header(path: str | os.PathLike[str]) -> Header:
    """The header of a safetensors file: its tensors by name (dtype, shape, place), metadata.

    Raises:
        IntegrityError: The header is malformed, or does not match the size of the file.
        TransferError: The file cannot be opened or read.
    """
    with files.open(path) as file:
        return header_of(file)


def _place_of(
    path: str | os.PathLike[str], device: torch.device, handle: AioHandle | None
) -> tuple[Path, bool]:
    """The file or index, and whether no handle is needed for it."""
    place = shards.find(path)
    small = handle is None and device.type == "cpu" and not shards.is_index(place)
    return place, device.type == "meta" or (small and place.stat().st_size <= SMALL_BYTES)


def _load_whole(
    path: str | os.PathLike[str], device: torch.device, handle: AioHandle | None, call: LongCall
) -> dict[str, torch.Tensor] | None:
    """All tensors of a file of up to 1 MiB; None where it takes more than one read to say."""
    name = os.fspath(path)
    if handle is not None or device.type != "cpu" or name.endswith(".json"):
        return None
    found = whole_file.read(name)
    if found is not None:
        call.expect(nbytes := sum(tensor.nbytes for tensor in found.values()))
        call.moved(nbytes)
    return found


def _load(
    path: Path, small: bool, device: torch.device, handle: AioHandle | None, call: LongCall
) -> dict[str, torch.Tensor]:
    own = contextlib.nullcontext() if small else handle_for(handle, path)
    # Opened once for header and tensors: a file that replaces it meanwhile is another.
    with own as reader, contextlib.closing(SafetensorsSet(path)) as opened:
        found = opened.read([*opened.tensors], reader, Load(call), device)
    if small:
        call.expect(nbytes := sum(tensor.nbytes for tensor in found.values()))
        call.moved(nbytes)
    return found


# Refusals, the order of tensors, the replacement of a set


class SaveRequest(NamedTuple):
    """The checked request of one `save_safetensors`.

    Attributes:
        tensors: By name.
        path: The file, or the one that shards are named after.
        metadata: Texts to go with them; None for none.
        limit: Bytes of a shard at the most; None for one file.
        shards: Whether a set was asked for: what there was of file or set goes then.
        align: Whether tensors lie on blocks of the drive, rather than as the package puts them.
        nbytes: The bytes of all tensors.
        simple: Whether all of them can be written from where they lie.
    """

    tensors: Mapping[str, torch.Tensor]
    path: Path
    metadata: Mapping[str, str] | None
    limit: int | None
    shards: bool
    align: bool
    nbytes: int
    simple: bool


def checked(
    tensors: Mapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None,
    max_shard_size: int | str | None,
    align: bool,
) -> SaveRequest:
    """The arguments of `save_safetensors`; raises as it says."""
    simple = _check(tensors)
    nbytes = _check_shared(tensors)
    texts = _checked_metadata(metadata)
    limit = None if max_shard_size is None else shards.parse_size(max_shard_size)
    if not os.fspath(path):  # Path("") would be the current directory
        raise missing(path)
    target = Path(path)
    if target.is_dir():
        target = target / shards.DEFAULT_NAME
    elif os.fspath(path).endswith("/"):  # which a Path forgets
        detail = "there is no such directory: make it, or name a file"
        raise failed_save(open_error(errno.EISDIR, os.fspath(path), detail))
    sets = max_shard_size is not None
    if sets and not target.name.endswith(shards.SUFFIX):
        raise ValueError(
            f"{target} is not a directory, and shards are named after a file: make the directory "
            f"first, or name a file that ends in {shards.SUFFIX}"
        )
    return SaveRequest(dict(tensors), target, texts, limit, sets, align, nbytes, simple)


def write(wanted: SaveRequest, handle: AioHandle, call: LongCall) -> None:
    """Write and commit; see `save_safetensors`. Cancelling `call`, from any thread, ends it."""
    groups = shards.split({n: tensor.nbytes for n, tensor in wanted.tensors.items()}, wanted.limit)
    names: list[str] = []
    if len(groups) == 1:
        _replace_all(handle, {wanted.path: layout_of(wanted, groups[0])}, call)
    else:
        names = _replace_set(wanted, groups, handle, call)
    if wanted.shards:
        _remove_others(wanted.path, names)


def _replace_all(handle: AioHandle, layouts: dict[Path, FileLayout], call: LongCall) -> None:
    """Write and commit one file after another."""
    flight = InFlight(finished=call.finished)
    call.then(flight.cancel)
    call.expect(sum(padded_nbytes(layout) for layout in layouts.values()))
    for path, layout in layouts.items():
        _replace(handle, path, layout, flight)


def _replace(handle: AioHandle, path: Path, layout: FileLayout, flight: InFlight) -> None:
    with Replacement(path) as replacement:
        replacement.reserve(padded_nbytes(layout))
        write_part(handle, replacement.file, layout, checksum=False, flight=flight)
        replacement.truncate(layout.nbytes)
        if flight.cancelled:
            raise Cancelled
        replacement.commit()


def _write_small(wanted: SaveRequest, call: LongCall) -> None:
    """Write one file with one call, from where its bytes lie, in this thread."""
    if wanted.simple and not wanted.align:
        ordered = headers.package_order(wanted.tensors)
        text, _ = headers.build(
            [(name, tensor.dtype, tensor.shape) for name, tensor in ordered.items()],
            wanted.metadata,
            headers.PACKAGE_ALIGNMENT,
        )
        saving.write_behind(text, ordered, wanted.path, call)
    else:
        saving.write_small(layout_of(wanted), wanted.path, False, call)


def layout_of(wanted: SaveRequest, names: Sequence[str] | None = None) -> FileLayout:
    """The layout of one file, of some of the tensors; None for all of them."""
    tensors = {name: wanted.tensors[name] for name in names or wanted.tensors}
    ordered = _in_order(tensors) if wanted.align else headers.package_order(tensors)
    text, entries = headers.build(
        [(name, tensor.dtype, tensor.shape) for name, tensor in ordered.items()],
        wanted.metadata,
        headers.DATA_ALIGNMENT if wanted.align else headers.PACKAGE_ALIGNMENT,
    )
    records = [
        StorageRecord(
            name, entry.start, entry.nbytes, tensors_module.bytes_of(ordered[name].detach()), ()
        )
        for name, entry in entries.items()
        if entry.nbytes
    ]
    nbytes = max((entry.end for entry in entries.values()), default=len(text))
    return FileLayout(nbytes, [KnownBytes(0, text)], records)


def _replace_set(
    wanted: SaveRequest, groups: list[list[str]], handle: AioHandle, call: LongCall
) -> list[str]:
    """Write a set of shards, and their index at the end; the shards' names."""
    directory, stem = wanted.path.parent, wanted.path.name.removesuffix(shards.SUFFIX)
    make_directory(directory, wanted=str(wanted.path))
    names = shards.shard_names(stem, len(groups), os.listdir(directory), secrets.token_hex(4))
    index = directory / f"{stem}{shards.INDEX_SUFFIX}"
    nbytes = sum(tensor.nbytes for tensor in wanted.tensors.values())
    text = shards.index_text(zip(names, groups, strict=True), nbytes)
    layouts = {
        directory / name: layout_of(wanted, group)
        for name, group in zip(names, groups, strict=True)
    }
    made = list(layouts)
    layouts[index] = FileLayout(len(text), [KnownBytes(0, text)], [])
    try:
        _replace_all(handle, layouts, call)
    except BaseException:
        # The index may be in its place although its directory could not be synchronised.
        if not _holds(index, text):
            for path in made:
                with contextlib.suppress(OSError):
                    path.unlink()
        raise
    return names


def _remove_others(path: Path, names: list[str]) -> None:
    """Remove the files that the new file, or the set of these names, has replaced."""
    directory, stem = path.parent, path.name.removesuffix(shards.SUFFIX)
    others = [path] if names else [directory / f"{stem}{shards.INDEX_SUFFIX}"]
    others += [
        directory / name
        for name in os.listdir(directory)
        if shards.is_shard_of(stem, name) and name not in names
    ]
    for each in others:  # the index before its shards
        with contextlib.suppress(FileNotFoundError):
            each.unlink()
    sync_directory(str(directory))


def _holds(path: Path, text: bytes) -> bool:
    try:
        return read_small(path, len(text)) == text
    except OSError:
        return False


def _check(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Refuse what `safetensors.torch.save_file` refuses, but for tensors that are not contiguous.

    Returns whether all of them are simple (`_memory.tensors`).

    Raises:
        TypeError: Not a mapping of names to tensors (a ValueError too, as in safetensors).
        TypeError: A name is not text, or a dtype is one that the format lacks.
        NotImplementedError: A tensor has no memory (a TypeError too).
        ValueError: A tensor is sparse, or named like the metadata.
    """
    if not isinstance(tensors, Mapping):
        raise joined(TypeError, ValueError)(
            f"Expected a dict of [str, torch.Tensor] but received {type(tensors)}"
        )
    sparse: list[str] = []
    simple, names = True, headers.NAMES
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"the name of a tensor must be a str, not {name!r}")
        if name == "__metadata__":
            raise ValueError(f"{name!r} cannot be a tensor's name: the format uses it for metadata")
        if is_simple(tensor, False) and tensor.dtype in names:
            continue
        simple = False
        if not isinstance(tensor, torch.Tensor):
            raise joined(TypeError, ValueError)(
                f"Key `{name}` is invalid, expected torch.Tensor but received {type(tensor)}"
            )
        if tensor.layout is not torch.strided:
            sparse.append(name)
            continue
        if tensor.dtype not in headers.NAMES:
            raise TypeError(
                f"{name!r} has {tensor.dtype}, which the format lacks: convert it first"
            )
        if tensor.is_meta:
            if type(tensor).__reduce_ex__ is not torch.Tensor.__reduce_ex__:
                # One that stands for another raises, and says for what.
                tensor.__reduce_ex__(2)  # type: ignore[no-untyped-call]
            raise joined(TypeError, NotImplementedError)(
                f"{name!r} cannot be saved: Cannot copy out of meta tensor; no data! Make one with "
                "torch.empty_like(tensor, device='cpu'), and fill it"
            )
        try:
            tensors_module._check(tensor)
        except TypeError as failed:
            raise TypeError(f"{name!r} cannot be saved: {failed}") from None
    if sparse:
        raise ValueError(
            f"You are trying to save a sparse tensors: `{sparse}` which this library does not "
            "support. You can make it a dense tensor before saving with `.to_dense()` but be aware "
            "this might make a much larger file than needed."
        )
    return simple


def _check_shared(tensors: Mapping[str, torch.Tensor]) -> int:
    """Refuse tensors that share memory, with RuntimeError; returns the bytes of all of them."""
    spans: dict[Any, list[tuple[int, int, str]]] = {}
    total = 0
    for name, tensor in tensors.items():
        nbytes = tensor.nbytes
        if nbytes:
            total += nbytes
            start = tensor.data_ptr()
            if not tensor.is_contiguous():
                nbytes = extent(tensor) * tensor.element_size()
            spans.setdefault(tensor.device, []).append((start, start + nbytes, name))
    for found in spans.values():
        reached, by = 0, ""
        for start, end, name in sorted(found):
            if start < reached:
                raise RuntimeError(
                    f"{by!r} and {name!r} share memory, which the format cannot say: save one of "
                    "them and tie the other to it after loading, or save a clone()"
                )
            if end > reached:
                reached, by = end, name
    return total


def _checked_metadata(metadata: Mapping[str, str] | None) -> dict[str, str] | None:
    if metadata is None:
        return None
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata must be a dict of str to str, not {metadata!r}")
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"metadata must be a dict of str to str, not {key!r}: {value!r}")
    return dict(metadata)


def _in_order(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """In the order of the file: whole blocks first, so that all of them stay aligned.

    The rest goes from wide elements to narrow ones, which keeps each on a multiple of its own.
    """
    block = headers.DATA_ALIGNMENT

    def rank(item: tuple[str, torch.Tensor]) -> int:
        tensor = item[1]
        return -tensor.element_size() if tensor.nbytes % block else -(1 << 10)

    return dict(sorted(tensors.items(), key=rank))
