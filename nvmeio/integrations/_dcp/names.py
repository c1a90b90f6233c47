"""The files of a distributed checkpoint: their names, the metadata file, and what is left over.

A checkpoint is what its metadata file refers to. A new one takes the place of an old one in the
same directory at the moment that its metadata file is renamed: until then its data files have
names of their own, so that nothing the old one refers to is touched. After that, data files that
no metadata file refers to are removed.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from nvmeio._storage.guarded import read_small

METADATA = ".metadata"
METADATA_BYTES = 2 << 30  # at most: some hundred bytes for each part of each tensor
SUFFIX = ".distcp"

_OWN = r"[0-9a-f]{8}_"
_DATA = re.compile(rb"__\d+_(?:" + _OWN.encode() + rb")?\d+\.distcp")
_REPLACING = re.compile(r"__(\d+)_" + _OWN + r"\d+\.distcp")


def metadata_path(folder: Path, rank: int | None) -> Path:
    """The metadata file: of all ranks, or of one that saves without the others."""
    return folder / (METADATA if rank is None else f"__{rank}{METADATA}")


def prefix(rank: int) -> str:
    """What a rank's data files begin with, as torch has it."""
    return f"__{rank}_"


def replacing(prefix: str, save_id: str) -> str:
    """The same for a save that replaces a checkpoint: no file of that one has such a name."""
    return f"{prefix}{save_id[:8]}_"


def referred_to(path: Path) -> set[str]:
    """The data files that a metadata file names; none if it cannot be read.

    Looked for as text: unpickling runs what the file says.
    """
    try:
        return {name.decode() for name in _DATA.findall(read_small(path, METADATA_BYTES))}
    except OSError:
        return set()


def remove_stale(folder: Path, before: set[str], rank: int | None) -> list[str]:
    """Remove the data files of a replaced checkpoint, and of saves that never ended.

    Args:
        folder: The checkpoint; its new metadata file is in place.
        before: What the replaced metadata file named.
        rank: Leave alone what other ranks have written, which may be saving still.

    Returns:
        The names of those that were removed; what cannot be removed is left.
    """
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    kept: set[str] = set()
    for name in names:
        if name.endswith(METADATA):
            kept |= referred_to(folder / name)
    stale = [
        name
        for name in names
        if name not in kept
        and (name in before or _REPLACING.fullmatch(name))
        and (rank is None or name.startswith(f"__{rank}_"))
    ]
    removed: list[str] = []
    for name in stale:
        with contextlib.suppress(OSError):
            os.unlink(folder / name)
            removed.append(name)
    return removed
