"""Saving safetensors files: what is refused, the order of tensors, how a set is replaced."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nvmeio._formats import safetensors_header as headers
from nvmeio._formats import safetensors_shards as shards
from nvmeio._formats.safetensors_errors import missing
from nvmeio._formats.torch_layout import FileLayout, KnownBytes, StorageRecord
from nvmeio._formats.torch_writing import padded_nbytes, write_part
from nvmeio._io.inflight import Cancelled, InFlight
from nvmeio._io.long_call import LongCall
from nvmeio._memory import tensors as tensors_module
from nvmeio._storage.durable import sync_directory
from nvmeio._storage.guarded import read_small
from nvmeio._storage.replace import Replacement
from nvmeio.handle import AioHandle


class SaveRequest(NamedTuple):
    """What one `save_safetensors` is to write, checked.

    Attributes:
        tensors: By name.
        path: The file, or the one that shards are named after.
        metadata: Texts to go with them; None for none.
        limit: Bytes of a shard at the most; None for one file.
        shards: Whether a set was asked for: what there was of file or set goes then.
        align: Whether tensors lie on blocks of the drive, rather than as the package puts them.
    """

    tensors: Mapping[str, torch.Tensor]
    path: Path
    metadata: Mapping[str, str] | None
    limit: int | None
    shards: bool
    align: bool


class WrongTensors(TypeError, ValueError):
    """What is no dict of tensors: a wrong type, for which the package raises ValueError."""


class NoMemory(TypeError, NotImplementedError):
    """A tensor without memory: a wrong type, of which torch has no copy."""


def checked(
    tensors: Mapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None,
    max_shard_size: int | str | None,
    align: bool,
) -> SaveRequest:
    """The arguments of `save_safetensors`; raises as it says."""
    _check(tensors)
    texts = _checked_metadata(metadata)
    limit = None if max_shard_size is None else shards.parse_size(max_shard_size)
    if not os.fspath(path):  # Path("") would be the current directory
        raise missing(path)
    target = Path(path)
    target = target / shards.DEFAULT_NAME if target.is_dir() else target
    sets = max_shard_size is not None
    if sets and not target.name.endswith(shards.SUFFIX):
        raise ValueError(
            f"shards are named after the file: {target} must end in {shards.SUFFIX}, "
            "or be a directory"
        )
    return SaveRequest(dict(tensors), target, texts, limit, sets, align)


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
        StorageRecord(name, entry.start, entry.nbytes, _data_of(ordered[name]), ())
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
    """What the new file, or the set of these names, has replaced: nobody may need it any more."""
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


def _check(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse what `safetensors.torch.save_file` refuses, but for tensors that are not contiguous.

    Raises:
        WrongTensors: Not a mapping of names to tensors.
        TypeError: A name is no text, or a dtype one that the format lacks.
        NoMemory: A tensor has no memory.
        ValueError: A tensor is sparse, or named like the metadata.
        RuntimeError: Tensors share memory.
    """
    if not isinstance(tensors, Mapping):
        raise WrongTensors(f"Expected a dict of [str, torch.Tensor] but received {type(tensors)}")
    sparse: list[str] = []
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"the name of a tensor must be a str, not {name!r}")
        if name == "__metadata__":
            raise ValueError(f"{name!r} cannot be a tensor's name: the format uses it for metadata")
        if not isinstance(tensor, torch.Tensor):
            raise WrongTensors(
                f"Key `{name}` is invalid, expected torch.Tensor but received {type(tensor)}"
            )
        if tensor.layout is not torch.strided:
            sparse.append(name)
            continue
        if tensor.dtype not in headers.NAMES:
            raise TypeError(f"{name!r} has dtype {tensor.dtype}, which the format cannot hold")
        if tensor.is_meta:
            raise NoMemory(
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
    _check_shared(tensors)


def _check_shared(tensors: Mapping[str, torch.Tensor]) -> None:
    spans: dict[Any, list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            reach = sum(
                (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
            )
            start = tensor.data_ptr()
            end = start + (reach + 1) * tensor.element_size()
            spans.setdefault(tensor.device, []).append((start, end, name))
    for found in spans.values():
        reached, by = 0, ""
        for start, end, name in sorted(found):
            if start < reached:
                raise RuntimeError(
                    f"{by!r} and {name!r} share memory, which the format cannot say: save one of "
                    "them and tie the other to it after loading, or save a clone()"
                )
            reached, by = max((reached, by), (end, name))


def _checked_metadata(metadata: Mapping[str, str] | None) -> dict[str, str] | None:
    if metadata is None:
        return None
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata must be texts by name, not {metadata!r}")
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"metadata must be texts by name, not {key!r}: {value!r}")
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


def _data_of(tensor: torch.Tensor) -> Any:
    """A tensor's bytes for `StorageRecord.data`; of one that is not contiguous, on demand."""
    dense = tensor.detach()
    if dense.is_contiguous() and not dense.is_conj() and not dense.is_neg():
        return tensors_module.cast_to_byte_tensor(dense)
    return _Copied(dense)


class _Copied:
    """The bytes of a tensor that is not contiguous: copied when the first are asked for.

    The copy is let go with the last of them, so that few exist at a time.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        # torch has no copy for some of the dtypes of one byte.
        self._tensor = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
        self._copy: torch.Tensor | None = None

    def __call__(self, offset: int, nbytes: int) -> torch.Tensor:
        copy = self._copy
        if copy is None:
            dense = self._tensor.resolve_conj().resolve_neg().contiguous()
            copy = self._copy = tensors_module.cast_to_byte_tensor(dense)
        if offset + nbytes == copy.nbytes:
            self._copy = None
        return copy[offset : offset + nbytes]
