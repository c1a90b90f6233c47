"""What makes a safetensors file a packed one: names and metadata. No I/O here.

A packed file is a valid safetensors file, one for the whole model. Its tensors have the model's own
names and lie in the order in which they are streamed, a layer's one behind the other, each on a
64-byte boundary and each layer on a page (padding is tensors of bytes). A quantised weight is three
tensors; its entry in the metadata says how to read them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

import torch

from nvmeio._formats import safetensors_header as headers
from nvmeio._formats.safetensors_set import Checkpoint
from nvmeio.errors import IntegrityError
from nvmeio.inference._quant import Quantised, can_quantise, check_setting
from nvmeio.inference._weights import Part, part_of

KEY = "nvmeio.pack"
VERSION = 1
PADDING = "nvmeio.padding."
SUFFIXES = (".nvmeio_steps", ".nvmeio_scales", ".nvmeio_minima")


class PackedWeight(NamedTuple):
    """How a quantised weight is described: its setting, and what it is when it is whole."""

    setting: Quantised
    dtype: torch.dtype
    shape: tuple[int, ...]


class Found(NamedTuple):
    """What a packed file holds for one weight."""

    parts: tuple[Part, ...]
    sources: tuple[str, ...]
    quantised: PackedWeight | None


def describe(quantised: Mapping[str, PackedWeight]) -> str:
    """The metadata of a packed file."""
    return json.dumps(
        {
            "version": VERSION,
            "quantised": {
                name: {
                    "bits": weight.setting.bits,
                    "group_size": weight.setting.group_size,
                    "dtype": headers.NAMES[weight.dtype],
                    "shape": list(weight.shape),
                }
                for name, weight in quantised.items()
            },
        }
    )


def parse(checkpoint: Checkpoint) -> dict[str, PackedWeight] | None:
    """The quantised weights of a packed checkpoint; None if it is not packed.

    Raises:
        IntegrityError: Its metadata is damaged, or of a later version.
    """
    text = checkpoint.metadata.get(KEY)
    if text is None:
        return None
    try:
        described = json.loads(text)
        if described["version"] != VERSION:
            raise _bad(checkpoint, f"it is of version {described['version']}, not {VERSION}")
        found = {
            name: PackedWeight(
                check_setting(value["bits"], value["group_size"]),
                headers.DTYPES[value["dtype"]],
                tuple(int(size) for size in value["shape"]),
            )
            for name, value in described["quantised"].items()
        }
        for name, weight in found.items():
            if not can_quantise(weight.shape, weight.dtype, weight.setting):
                raise ValueError(f"{name!r} of shape {weight.shape} is not of whole groups")
        return found
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as failed:
        raise _bad(checkpoint, f"{type(failed).__name__}: {failed}") from None


def parts_of(checkpoint: Checkpoint, quantised: Mapping[str, PackedWeight]) -> dict[str, Found]:
    """For each weight of a packed checkpoint, what it is read from.

    Raises:
        IntegrityError: A part of a quantised weight is missing, or not what the setting says.
    """
    found: dict[str, Found] = {}
    taken: set[str] = set()
    for name, weight in quantised.items():
        setting, shape = weight.setting, weight.shape
        wanted = (
            (torch.uint8, setting.packed_shape(shape)),
            (torch.float32, setting.groups_shape(shape)),
            (torch.float32, setting.groups_shape(shape)),
        )
        parts = []
        for suffix, (dtype, sizes) in zip(SUFFIXES, wanted, strict=True):
            stored = checkpoint.tensors.get(name + suffix)
            if stored is None:
                raise _bad(checkpoint, f"it lacks {name + suffix!r}")
            part = part_of(stored)
            if (part.dtype, part.shape) != (dtype, sizes):
                raise _bad(checkpoint, f"{stored.name!r} is {part.dtype} {part.shape}, not {sizes}")
            parts.append(part)
            taken.add(stored.name)
        found[name] = Found(tuple(parts), tuple(name + suffix for suffix in SUFFIXES), weight)
    for name, stored in checkpoint.tensors.items():
        if name not in taken and not name.startswith(PADDING):
            found[name] = Found((part_of(stored),), (name,), None)
    return found


def _bad(checkpoint: Checkpoint, what: str) -> IntegrityError:
    return IntegrityError(
        f"{checkpoint.path} is no valid packed model: {what}; pack it again",
        expected="what nvmeio pack writes",
        found=what,
    )
