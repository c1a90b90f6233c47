"""The format of packed models: a safetensors file with names and metadata of ours.

A packed file is a valid safetensors file, one for the whole model. Its tensors have the model's own
names and lie in the order in which they are streamed, a layer's one behind the other, each on a
64-byte boundary and each layer on a page (padding is tensors of bytes). A quantised weight is
several tensors; its entry in the metadata says how to read them. The metadata has a CRC-32 of each
tensor, too (of fused experts, one of each); older files lack them.

Fused experts are an exception: the tensors that hold them have names of their own. One tensor of
bytes [experts, bytes of each] has all that a module's experts have of its weights, an expert's side
by side in whole pages, so that one read brings an expert and one checksum covers it. Experts that
are modules have their own names, and each begins on a page likewise.

A packed model may lie on several drives, each with a part of every layer: its files are opened as
one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from nvmeio._formats import packed_index
from nvmeio._formats.packed_index import SUFFIXES, DrivePart
from nvmeio._formats.safetensors import headers
from nvmeio._formats.safetensors.open_set import FileBytes, SafetensorsSet, StoredTensor
from nvmeio._pages import TENSOR_ALIGNMENT
from nvmeio.errors import IntegrityError, counted
from nvmeio.inference._plan import published
from nvmeio.inference._plan.quantization import Quantised, can_quantise, check_setting
from nvmeio.inference._plan.schemes import Scheme
from nvmeio.inference._plan.slot_layout import (
    ExpertRegion,
    FileExtent,
    FoundWeight,
    WeightPart,
    part_of,
)

LAYOUT = "halves of groups"  # see `quantised`

_REST = "name all directories that nvmeio pack wrote together, in any order, as a list"


class PackedWeight(NamedTuple):
    """A quantised weight: how it is held, and its dtype and shape when it is whole."""

    scheme: Scheme
    dtype: torch.dtype
    shape: tuple[int, ...]

    def stored(self, name: str) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """The tensors that hold it, in their order: name, dtype and shape."""
        parts = self.scheme.stored(self.shape)
        return [(name + own, *part) for own, part in zip(SUFFIXES, parts, strict=False)]


class FusedWeight(NamedTuple):
    """A weight of fused experts: its dtype and shape, and where its parts begin in an expert.

    The parts are those of its scheme, or the weight itself.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    starts: tuple[int, ...]


class PackedExperts(NamedTuple):
    """The experts of a module, each in whole pages, one behind the other.

    Attributes:
        number: How many there are.
        nbytes: Bytes of each.
        fused: The weights that its tensor of bytes holds; none where experts are modules, whose
            tensors have names of their own.
    """

    number: int
    nbytes: int
    fused: dict[str, FusedWeight]


class Packed(NamedTuple):
    """The index of a packed file: its quantised weights, checksums by tensor, and experts.

    `sums` are of each tensor's bytes, in shares of equal length; None where there are none.
    `experts` are by the names of their modules.
    """

    quantised: dict[str, PackedWeight]
    sums: dict[str, tuple[int, ...]] | None
    experts: dict[str, PackedExperts]


def describe(
    quantised: Mapping[str, PackedWeight],
    sums: Mapping[str, Sequence[int]],
    experts: Mapping[str, PackedExperts],
) -> str:
    """The metadata of a packed file; its length does not depend on the checksums."""
    described: dict[str, Any] = {}
    if experts:
        described["experts"] = {
            module: {
                "number": of.number,
                "nbytes": of.nbytes,
                "weights": {
                    name: [headers.NAMES[weight.dtype], weight.shape, weight.starts]
                    for name, weight in of.fused.items()
                },
            }
            for module, of in experts.items()
        }
    return json.dumps(
        {
            "version": packed_index.version_for(
                all(isinstance(weight.scheme, Quantised) for weight in quantised.values()),
                any(of.fused for of in experts.values()),
            ),
            "layout": LAYOUT,
            "sealed": True,
            "quantised": {
                name: {
                    **weight.scheme.described(),
                    "dtype": headers.NAMES[weight.dtype],
                    "shape": list(weight.shape),
                }
                for name, weight in quantised.items()
            },
            **described,
            "crc32": {name: [f"{value:08x}" for value in of] for name, of in sums.items()},
        }
    )


def parse(checkpoint: SafetensorsSet, checksum: bool = True) -> Packed | None:
    """The index of a packed checkpoint; None if it is not packed.

    Raises IntegrityError if it is damaged, or of a later version. `checksum` wants its checksums.
    """
    text = checkpoint.metadata.get(packed_index.KEY)
    if text is None:
        return None
    try:
        described = packed_index.read(text)
        if (layout := described.get("layout", LAYOUT)) != LAYOUT:  # files of before say none
            raise ValueError(f"its weights lie as {layout!r}, not as {LAYOUT!r}")
        found = {
            name: PackedWeight(
                published.described_as(value)
                if "scheme" in value
                else check_setting(value["bits"], value["group_size"]),
                headers.DTYPES[value["dtype"]],
                tuple(int(size) for size in value["shape"]),
            )
            for name, value in described["quantised"].items()
        }
        for name, weight in found.items():
            scheme = weight.scheme
            if isinstance(scheme, Quantised) and not can_quantise(
                weight.shape, weight.dtype, scheme
            ):
                raise ValueError(f"{name!r} of shape {weight.shape} is not of whole groups")
            scheme.stored(weight.shape)
        experts = {
            module: PackedExperts(
                int(of["number"]),
                int(of["nbytes"]),
                {
                    name: FusedWeight(headers.DTYPES[dtype], tuple(shape), tuple(starts))
                    for name, (dtype, shape, starts) in of["weights"].items()
                },
            )
            for module, of in described.get("experts", {}).items()
        }
        entries = {name: stored.entry for name, stored in checkpoint.tensors.items()}
        sums = packed_index.sums_in(described, entries) if checksum else None
        return Packed(found, sums, experts)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as failed:
        raise _bad(checkpoint, f"{type(failed).__name__}: {failed}") from None


def part_of_rank(checkpoint: SafetensorsSet) -> packed_index.PackedPart | None:
    """Which rank's part of a packed model this is; spans count from `base_of`. None for others."""
    part = _part_in(checkpoint)
    return None if isinstance(part, DrivePart) else part


def base_of(checkpoint: SafetensorsSet) -> int:
    """The offset of the first byte behind the header of a packed file."""
    return min((stored.entry.start for stored in checkpoint.tensors.values()), default=0)


def rank_directory(rank: int) -> str:
    """The directory that `pack` writes the part of a rank to."""
    return f"rank-{rank}"


def of_rank(path: str | os.PathLike[str], rank: int | None) -> str | os.PathLike[str]:
    """A rank's part, where the directory has several ranks' parts; else the directory itself.

    ValueError if it has and there is no rank, FileNotFoundError if it lacks this one's.
    """
    if not os.path.isdir(os.path.join(path, rank_directory(0))):
        return path
    if rank is None:
        raise ValueError(
            f"{os.fspath(path)} holds a model in the parts of several ranks: stream it with "
            "process_group= in as many processes, or pack it without --ranks"
        )
    own = os.path.join(path, rank_directory(rank))
    if not os.path.isdir(own):
        raise FileNotFoundError(
            f"{os.fspath(path)} was packed for fewer ranks: it has no {rank_directory(rank)}"
        )
    return own


def part_in(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The file with a rank's part, where a directory holds one; anything else as it is."""
    part = os.path.join(path, packed_index.PART_NAME)
    return part if os.path.isfile(part) else path


def parts_of(checkpoint: SafetensorsSet, packed: Packed) -> dict[str, FoundWeight]:
    """The source of each weight of a packed checkpoint.

    IntegrityError if a part of a quantised weight is missing, or contradicts the setting.
    """
    found = _fused_in(checkpoint, packed)
    taken = {module + packed_index.EXPERTS for module, of in packed.experts.items() if of.fused}

    def part(stored: StoredTensor) -> WeightPart:
        sums = () if packed.sums is None else packed.sums[stored.name]
        return part_of(stored)._replace(sums=sums)

    for name, weight in packed.quantised.items():
        if name in found:
            continue
        parts = []
        for own, dtype, sizes in weight.stored(name):
            if own not in checkpoint.tensors:
                raise _bad(checkpoint, f"it lacks {own!r}")
            made = part(checkpoint.tensors[own])
            if (made.dtype, made.shape) != (dtype, sizes):
                raise _bad(checkpoint, f"{own!r} is {made.dtype} {made.shape}, not {sizes}")
            parts.append(made)
            taken.add(own)
        sources = tuple(own for own, _, _ in weight.stored(name))
        found[name] = FoundWeight(tuple(parts), sources, weight.scheme)
    for name, stored in checkpoint.tensors.items():
        if name not in taken and not name.startswith(packed_index.PADDING):
            found[name] = FoundWeight((part(stored),), (name,))
    return found


def _fused_in(checkpoint: SafetensorsSet, packed: Packed) -> dict[str, FoundWeight]:
    """The weights of fused experts that lie side by side; raises as `parts_of`."""
    found: dict[str, FoundWeight] = {}
    for module, experts in packed.experts.items():
        if not experts.fused:
            continue
        tensor = module + packed_index.EXPERTS
        stored = checkpoint.tensors.get(tensor)
        if stored is None:
            raise _bad(checkpoint, f"it lacks {tensor!r}")
        shape = (experts.number, experts.nbytes)
        if stored.entry.for_torch() != (torch.uint8, shape) or experts.nbytes % TENSOR_ALIGNMENT:
            raise _bad(checkpoint, f"{tensor!r} is {stored.entry.shape}, not {shape}")
        sums = () if packed.sums is None else packed.sums[tensor]
        if len(sums) not in (0, experts.number):
            raise _bad(checkpoint, f"{tensor!r} has {counted(len(sums), 'checksum')}")
        region = ExpertRegion(tensor, stored.file, stored.entry.start, *shape, sums)
        for name, weight in experts.fused.items():
            quantised = packed.quantised.get(name)
            kinds = [(weight.dtype, weight.shape)]
            if quantised is not None:
                kinds = quantised.scheme.stored(quantised.shape)
            if len(kinds) != len(weight.starts):
                raise _bad(checkpoint, f"{name!r} has {counted(len(weight.starts), 'place')}")
            parts = tuple(
                _part_in_region(checkpoint, name, region, *kind, start)
                for kind, start in zip(kinds, weight.starts, strict=True)
            )
            sources = tuple(name for _ in parts)
            scheme = None if quantised is None else quantised.scheme
            found[name] = FoundWeight(parts, sources, scheme)
    return found


def _part_in_region(
    checkpoint: SafetensorsSet,
    name: str,
    region: ExpertRegion,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    start: int,
) -> WeightPart:
    share = math.prod(shape[1:]) * dtype.itemsize
    fits = shape[:1] == (region.number,) and 0 <= start <= start + share <= region.nbytes
    if not fits or start % TENSOR_ALIGNMENT:
        what = f"{dtype} {shape} of {name!r} cannot begin at byte {start} of an expert"
        raise _bad(checkpoint, f"{what} of {region.nbytes} bytes")
    first = region.start + start
    extents = [
        FileExtent(region.file, first + expert * region.nbytes, share, expert * share)
        for expert in range(region.number if share else 0)
    ]
    return WeightPart(dtype, shape, tuple(extents), region=region)


def _bad(checkpoint: SafetensorsSet, what: str) -> IntegrityError:
    return IntegrityError(
        f"{checkpoint.path} is not a valid packed model: {what}; pack it again",
        expected="what nvmeio pack writes",
        found=what,
    )


def open_model(paths: Sequence[str | os.PathLike[str]]) -> SafetensorsSet:
    """The files of a model, or those of all parts of a packed one.

    `paths` is a file, an index or a directory; or a directory of each part, in any order.
    ValueError names the directory if they are not all parts of one model.
    """
    with contextlib.ExitStack() as undo:
        sets = (SafetensorsSet(part_in(path)) for path in paths)
        joined = _joined([undo.enter_context(contextlib.closing(each)) for each in sets])
        undo.pop_all()
    return joined


def _joined(opened: Sequence[SafetensorsSet]) -> SafetensorsSet:
    found = (_part_in(each) for each in opened)
    parts = [part if isinstance(part, DrivePart) else None for part in found]
    if len(opened) == 1 and parts[0] is None:
        return opened[0]
    by_drive: dict[int, SafetensorsSet] = {}
    first, first_part = opened[0], parts[0]
    for each, part in zip(opened, parts, strict=True):
        where = each.path.parent
        if part is None or first_part is None:
            raise ValueError(
                f"{where if part is None else first.path.parent} holds no part of a model that was "
                f"packed into several directories: {_REST}, or one directory by itself"
            )
        if part.drive in by_drive:
            other = by_drive[part.drive].path.parent
            raise ValueError(
                f"{where} and {other} both hold part {part.drive} of {part.drives} of a packed "
                f"model: {_REST}"
            )
        by_drive[part.drive] = each
        if _about(each) != _about(first):
            raise ValueError(
                f"{where} holds part {part.drive} of {part.drives} of another packing than "
                f"{first.path.parent}: {_REST}"
            )
    if first_part is None:
        raise ValueError("the list of directories is empty: name at least one")
    missing = [str(n) for n in range(first_part.drives) if n not in by_drive]
    if missing:
        raise ValueError(
            f"{', '.join(str(each.path.parent) for each in opened)}: of a model packed into "
            f"{counted(first_part.drives, 'directory')} part {', '.join(missing)} is missing: "
            f"{_REST}"
        )
    base, dealing = base_of(first), first_part.dealing

    def spans(start: int, end: int) -> list[FileBytes]:
        dealt = dealing.spans(start - base, end - base)
        return [FileBytes(drive, base + low, base + high) for drive, low, high in dealt]

    whole = by_drive[0]
    whole.take_parts([by_drive[drive] for drive in range(1, first_part.drives)], spans)
    return whole


def _part_in(opened: SafetensorsSet) -> DrivePart | packed_index.PackedPart | None:
    text = opened.metadata.get(packed_index.PART)
    if text is None:
        return None
    try:
        return packed_index.read_part(text)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as failed:
        raise IntegrityError(
            f"{opened.path} is not a valid part of a packed model: {type(failed).__name__}: "
            f"{failed}",
            expected="what nvmeio pack writes",
            found=text[:80],
        ) from None


def _about(opened: SafetensorsSet) -> object:
    """The metadata that is the same in all parts of one packing."""
    metadata = dict(opened.metadata)
    metadata.pop(packed_index.SEAL, None)
    told = json.loads(metadata.pop(packed_index.PART))
    told.pop("drive", None)
    return metadata, told, {name: each.entry for name, each in opened.tensors.items()}
