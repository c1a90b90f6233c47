"""From an object to the layout of its checkpoint: every byte of the file, but for the storages'.

`plan_layout` lets torch itself write the archive into a sink that keeps what is written and skips
the storages, so the format is torch's by construction: names, padding, pickle, end records. What
is left is a list of records, each with its place in the file and the memory that belongs there, and
the places where its CRC-32 stands. No file is touched here.

How the pickling is watched, and made quicker, is in `torch_pickling`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from nvmeio._formats.torch_pickling import PickleModule, Seen, Switch
from nvmeio._formats.torch_skeleton import (
    KeptSkeleton,
    Records,
    Sink,
    Skeleton,
    has_seam,
    skeleton_of,
    unknown_torch,
)
from nvmeio._threads.caller import InCaller, at_once

DEFAULT_PROTOCOL = 2  # torch.save's


class ReadOnce(Protocol):
    """Bytes that can be copied from where they are kept, each once and in order."""

    def read(self, offset: int, nbytes: int, to: int, crc: int | None) -> int:
        """Copy bytes to an address.

        Args:
            offset: Of the first one.
            nbytes: How many.
            to: Where to.
            crc: A CRC-32 to go on with; None for no sum.

        Returns:
            The CRC-32; any number where none was asked for.
        """
        ...


Data = torch.Tensor | Callable[[int, int], torch.Tensor] | ReadOnce
"""A record's bytes: a contiguous 1-D uint8 tensor on any device, a function of (offset, nbytes)
that returns that part of them as one, or what copies them. A part that is returned must stay as it
is until the write is done."""


class StorageRecord(NamedTuple):
    """A storage's place in the file.

    Attributes:
        name: Within the archive, such as "archive/data/0".
        offset: Of its first byte in the file; a multiple of 4096, with torch 2.6 and 2.7 of 64.
        nbytes: Its size in bytes.
        data: Its bytes.
        crc_at: Offsets in the file of the little-endian 32-bit places that hold its CRC-32.
    """

    name: str
    offset: int
    nbytes: int
    data: Data
    crc_at: tuple[int, ...]

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + self.nbytes


class KnownBytes(NamedTuple):
    """Some of the bytes that are known when the file is planned: all but the storages."""

    offset: int
    data: bytes

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + len(self.data)


class FileLayout(NamedTuple):
    """A checkpoint file before it is written.

    Attributes:
        nbytes: The size of the file.
        pieces: Everything but the storages, in the order of the file, disjoint; with the CRCs of
            all records that are not storages.
        records: The storages, in the order of the file, disjoint from the pieces.
    """

    nbytes: int
    pieces: list[KnownBytes]
    records: list[StorageRecord]

    @property
    def data_nbytes(self) -> int:
        """Bytes of all storages."""
        return sum(record.nbytes for record in self.records)


def plan_layout(
    obj: object,
    pickle_module: Any = pickle,
    pickle_protocol: int = DEFAULT_PROTOCOL,
    in_caller: InCaller = at_once,
    kept: KeptSkeleton | None = None,
) -> FileLayout:
    """The layout of what `torch.save` would write.

    Args:
        obj: What torch.save takes.
        pickle_module: As for torch.save.
        pickle_protocol: As for torch.save.
        in_caller: Has the pickling done in another thread: the user's, who may have changed what
            his objects' own code depends on. The two settings are never in force there.
        kept: What the save before this one left; one save at a time.

    Returns:
        The layout. It holds the object's storages, without a copy, until it is dropped.

    Raises:
        BackendUnavailableError: This torch has no `skip_data`, or its files look unlike what is
            known here: save with torch.save itself.
        Exception: What pickling the object raises.

    Cost: the pickling, about 8 us a tensor, and 15 us a storage; 3 us a storage with `kept`.
    """
    skip_data = getattr(torch.serialization, "skip_data", None)
    if skip_data is None:
        raise unknown_torch("torch.serialization.skip_data is missing")
    seen: Seen = {}
    switch = Switch(skip_data)
    watching: Any = PickleModule(pickle_module, seen, switch, in_caller)
    try:
        with switch:
            if pickle_module is pickle and has_seam():
                told: Any = Records()
                torch.serialization._save(  # type: ignore[no-untyped-call]
                    obj, told, watching, pickle_protocol, False
                )
                return layout_of((kept or KeptSkeleton()).skeleton(told), dict(seen))
            sink = Sink()
            torch.save(obj, sink, watching, pickle_protocol)  # type: ignore[arg-type]
        return layout_of(skeleton_of(sink), dict(seen))
    finally:
        seen.clear()  # the pickler's class lives on in a cycle, and with it `seen`


def layout_of(skeleton: Skeleton, storages: Seen) -> FileLayout:
    """A skeleton with the memory that belongs into its holes, by the key of each."""
    records: list[StorageRecord] = []
    for name, offset, nbytes, crc_at, is_hole in skeleton.entries:
        _, data, key = name.rpartition("/data/")
        storage = storages.pop(key, None) if data else None
        if storage is None:
            if is_hole:
                raise unknown_torch(f"record {name!r} was skipped, and is no storage")
            continue
        if storage.nbytes() != nbytes:
            raise unknown_torch(
                f"record {name!r} has {nbytes} bytes, its storage {storage.nbytes()}"
            )
        if nbytes:
            records.append(StorageRecord(name, offset, nbytes, _bytes_of(storage), crc_at))
    if storages:
        raise unknown_torch(f"there is no record for storage {next(iter(storages))}")
    pieces = [KnownBytes(start, piece) for start, piece in skeleton.pieces]
    return FileLayout(skeleton.nbytes, pieces, records)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage as a 1-D uint8 tensor, without a copy."""
    if storage.device.type == "cpu":
        return _EMPTY.data.set_(storage)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


_EMPTY = torch.empty(0, dtype=torch.uint8, device="cpu")
