"""A packed model that lies on several drives: its files opened as one, and what is missing."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from nvmeio._formats import packed_index
from nvmeio._formats.packed_drives import DrivePart
from nvmeio._formats.safetensors_set import FileBytes, SafetensorsSet
from nvmeio.errors import IntegrityError
from nvmeio.handle import AioHandle
from nvmeio.inference._packed import format

_REST = "name all directories that nvmeio pack wrote together, in any order, as a list"


def open_model(paths: Sequence[str | os.PathLike[str]], handle: AioHandle) -> SafetensorsSet:
    """The files of a model, or those of all parts of a packed one.

    Args:
        paths: A file, an index or a directory; or a directory of each part, in any order.
        handle: Reads the headers.

    Raises:
        ValueError: They are not all parts of one model. Names the directory.
        FileNotFoundError, IntegrityError: As of `SafetensorsSet`.
    """
    opened: list[SafetensorsSet] = []
    try:
        for path in paths:
            opened.append(SafetensorsSet(format.part_in(path), handle))
        return _joined(opened)
    except BaseException:
        for each in opened:
            each.close()
        raise


def _joined(opened: Sequence[SafetensorsSet]) -> SafetensorsSet:
    parts = [_part_in(each) for each in opened]
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
        raise ValueError("there are no directories")
    missing = [str(n) for n in range(first_part.drives) if n not in by_drive]
    if missing:
        raise ValueError(
            f"{', '.join(str(each.path.parent) for each in opened)}: of a model packed into "
            f"{first_part.drives} directories part {', '.join(missing)} is missing: {_REST}"
        )
    base, dealing = format.base_of(first), first_part.dealing

    def spans(start: int, end: int) -> list[FileBytes]:
        dealt = dealing.spans(start - base, end - base)
        return [FileBytes(drive, base + low, base + high) for drive, low, high in dealt]

    whole = by_drive[0]
    whole.take_parts([by_drive[drive] for drive in range(1, first_part.drives)], spans)
    return whole


def _part_in(opened: SafetensorsSet) -> DrivePart | None:
    text = opened.metadata.get(packed_index.PART)
    if text is None:
        return None
    try:
        part = packed_index.read_part(text)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as failed:
        raise IntegrityError(
            f"{opened.path} is no valid part of a packed model: {type(failed).__name__}: {failed}",
            expected="what nvmeio pack writes",
            found=text[:80],
        ) from None
    return part if isinstance(part, DrivePart) else None


def _about(opened: SafetensorsSet) -> object:
    """What is the same in all parts of one packing."""
    metadata = dict(opened.metadata)
    metadata.pop(packed_index.SEAL, None)
    told = json.loads(metadata.pop(packed_index.PART))
    told.pop("drive", None)
    return metadata, told, {name: each.entry for name, each in opened.tensors.items()}
