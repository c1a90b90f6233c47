"""Saving safetensors files: what is refused, the order of tensors, how a set is replaced."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nvmeio import _tensor
from nvmeio._formats import safetensors_header as headers
from nvmeio._formats import safetensors_shards as shards
from nvmeio._formats.torch_layout import Layout, Piece, Record
from nvmeio._formats.torch_writing import padded_nbytes, write_part
from nvmeio._io.inflight import Cancelled, InFlight
from nvmeio._storage.durable import sync_directory
from nvmeio._storage.replace import Replacement
from nvmeio.handle import AioHandle


class Saving:
    """One `save_safetensors`; the checks are made when it is created."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        path: str | os.PathLike[str],
        metadata: Mapping[str, str] | None,
        max_shard_size: int | str | None,
    ) -> None:
        _check(tensors)
        self._tensors = dict(tensors)
        self._metadata = _checked_metadata(metadata)
        self._sets = max_shard_size is not None
        self._limit = shards.parse_size(max_shard_size) if max_shard_size is not None else None
        given = Path(path)
        self.path = given / shards.DEFAULT_NAME if given.is_dir() else given
        if self._sets and not self.path.name.endswith(shards.SUFFIX):
            raise ValueError(
                f"shards are named after the file: {self.path} must end in {shards.SUFFIX}, "
                "or be a directory"
            )
        self.nbytes = sum(tensor.nbytes for tensor in self._tensors.values())
        self._flight = InFlight()
        self._cancelled = False

    def cancel(self) -> None:
        """Stop soon; from any thread."""
        self._cancelled = True
        self._flight.cancel()

    def run(self, handle: AioHandle) -> None:
        """Write and commit; see `save_safetensors`."""
        sizes = {name: tensor.nbytes for name, tensor in self._tensors.items()}
        groups = shards.split(sizes, self._limit)
        if len(groups) == 1:
            self._replace(handle, self.path, self._layout(groups[0]))
        else:
            self._replace_set(handle, groups)
        if self._sets:
            self._remove_others(len(groups) > 1)

    def _replace(self, handle: AioHandle, path: Path, layout: Layout) -> None:
        with Replacement(path) as replacement:
            replacement.reserve(padded_nbytes(layout))
            write_part(handle, replacement.file, layout, checksum=False, flight=self._flight)
            replacement.truncate(layout.nbytes)
            if self._cancelled:
                raise Cancelled
            replacement.commit()

    # One file

    def _layout(self, names: list[str]) -> Layout:
        ordered = _in_order({name: self._tensors[name] for name in names})
        text, entries = headers.build(
            [(name, tensor.dtype, tensor.shape) for name, tensor in ordered.items()],
            self._metadata,
        )
        records = [
            Record(name, entry.start, entry.nbytes, _data_of(ordered[name]), ())
            for name, entry in entries.items()
            if entry.nbytes
        ]
        nbytes = max((entry.end for entry in entries.values()), default=len(text))
        return Layout(nbytes, [Piece(0, text)], records)

    # A set of shards

    def _replace_set(self, handle: AioHandle, groups: list[list[str]]) -> None:
        directory, stem = self.path.parent, self.path.name.removesuffix(shards.SUFFIX)
        self._names = shards.shard_names(
            stem, len(groups), os.listdir(directory), secrets.token_hex(4)
        )
        index = directory / f"{stem}{shards.INDEX_SUFFIX}"
        text = shards.index_text(zip(self._names, groups, strict=True), self.nbytes)
        made: list[Path] = []
        try:
            for name, group in zip(self._names, groups, strict=True):
                made.append(directory / name)
                self._replace(handle, directory / name, self._layout(group))
            self._replace(handle, index, Layout(len(text), [Piece(0, text)], []))
        except BaseException:
            # The index may be in its place although its directory could not be synchronised.
            if not _holds(index, text):
                for path in made:
                    with contextlib.suppress(OSError):
                        path.unlink()
            raise

    def _remove_others(self, is_set: bool) -> None:
        """What the new file or set has replaced: only now may nobody need it any more."""
        directory, stem = self.path.parent, self.path.name.removesuffix(shards.SUFFIX)
        others = [self.path] if is_set else [directory / f"{stem}{shards.INDEX_SUFFIX}"]
        kept = set(self._names) if is_set else set()
        others += [
            directory / name
            for name in os.listdir(directory)
            if shards.is_shard_of(stem, name) and name not in kept
        ]
        for path in others:  # the index before its shards
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        sync_directory(str(directory))


def _holds(path: Path, text: bytes) -> bool:
    try:
        return path.read_bytes() == text
    except OSError:
        return False


def _check(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse what `safetensors.torch.save_file` refuses, but for tensors that are not contiguous.

    Raises:
        TypeError: Not a mapping of names to tensors with memory of a dtype that the format has.
        ValueError: A tensor is sparse, or named like the metadata.
        RuntimeError: Tensors share memory.
    """
    if not isinstance(tensors, Mapping):
        raise TypeError(f"expected a dict of tensors by name, not {type(tensors).__name__}")
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"the name of a tensor must be a str, not {name!r}")
        if name == "__metadata__":
            raise ValueError(f"{name!r} cannot be a tensor's name: the format uses it for metadata")
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name!r} is not a tensor but a {type(tensor).__name__}")
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"{name!r} is a {tensor.layout} tensor, which the format cannot hold: save its "
                "parts, or tensor.to_dense()"
            )
        if tensor.dtype not in headers.NAMES:
            raise TypeError(f"{name!r} has dtype {tensor.dtype}, which the format cannot hold")
        try:
            _tensor._check(tensor)
        except TypeError as failed:
            raise TypeError(f"{name!r} cannot be saved: {failed}") from None
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


def _checked_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    if metadata is None:
        return {"format": "pt"}  # transformers asks for it
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
    """A tensor's bytes for `Record.data`; of one that is not contiguous, on demand."""
    dense = tensor.detach()
    if dense.is_contiguous() and not dense.is_conj() and not dense.is_neg():
        return _tensor.cast_to_byte_tensor(dense)
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
            copy = self._copy = _tensor.cast_to_byte_tensor(dense)
        if offset + nbytes == copy.nbytes:
            self._copy = None
        return copy[offset : offset + nbytes]
