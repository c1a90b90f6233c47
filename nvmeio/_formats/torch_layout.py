"""From an object to the layout of its checkpoint: every byte of the file, but for the storages'.

An object is pickled in the thread of its user (`pickled`). Then, in any thread, torch writes the
archive around that pickle (`Pickling.layout`) into a sink that keeps what is written and skips the
storages, so the format is torch's by construction: names, padding, end records. What is left is a
list of records, each with its place in the file and the memory that belongs there, and the places
where its CRC-32 stands. No file is touched here.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast

import torch

from nvmeio._formats.torch_pickling import Pickled, PickleModule, Replay, Seen, aligned_storages
from nvmeio._formats.torch_skeleton import (
    Records,
    Sink,
    Skeleton,
    has_seam,
    skeleton_of,
    unknown_torch,
)

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


class Pickling(NamedTuple):
    """An object that was pickled, and will not be asked again.

    Attributes:
        data: The pickle.
        storages: Those of the object, without a copy, by the key of their record.
    """

    data: bytes
    storages: Seen

    def layout(self) -> FileLayout:
        """The layout of what `torch.save` would write; not for a main thread, and once.

        Raises:
            UnknownWriterError: This torch's files look unlike what is known here.

        Cost: 10 us a storage.
        """
        replay: Any = Replay(self.data)
        storages: Any = self.storages
        with aligned_storages(), torch.serialization.skip_data():
            if has_seam():
                skeleton = self._records(replay).skeleton()
            else:
                sink: Any = Sink()
                torch.save(storages, sink, replay)
                skeleton = skeleton_of(sink)
        return layout_of(skeleton, storages)

    def _records(self, replay: Any) -> Records:
        """Those that torch would write: it is asked of the first storage, and not of a thousand."""
        told: Any = Records()
        first = dict(itertools.islice(self.storages.items(), 1))
        torch.serialization._save(  # type: ignore[no-untyped-call]
            first, told, replay, DEFAULT_PROTOCOL, False
        )
        sizes = [(f"data/{key}", storage.nbytes()) for key, storage in self.storages.items()]
        if first and told.sizes[-1:] != sizes[:1]:
            raise unknown_torch(f"a storage's record is {told.sizes[-1]}")
        told.sizes += sizes[1:]
        return cast(Records, told)


def pickled(
    obj: object, pickle_module: Any = pickle, pickle_protocol: int = DEFAULT_PROTOCOL
) -> Pickling:
    """Pickle an object as `torch.save` would; in the thread whose modes its own code must see.

    Raises:
        UnknownWriterError: This torch has no `skip_data`.
        Exception: What pickling the object raises.

    Cost: 8 us a tensor.
    """
    if getattr(torch.serialization, "skip_data", None) is None:
        raise unknown_torch("torch.serialization.skip_data is missing")
    seen: Seen = {}
    watching: Any = PickleModule(pickle_module, seen, ends=True)
    nowhere: Any = io.BytesIO()
    try:
        if pickle_module is pickle and has_seam():
            torch.serialization._save(  # type: ignore[no-untyped-call]
                obj, nowhere, watching, pickle_protocol, False
            )
        else:
            torch.save(obj, nowhere, watching, pickle_protocol)
    except Pickled as ended:
        return Pickling(ended.data, dict(seen))
    finally:
        seen.clear()  # as after an error, which leaves the pickler's class in a cycle
    raise unknown_torch("torch.save pickles nothing")


def plan_layout(obj: object) -> FileLayout:
    """Both at once. The layout holds the object's storages, without a copy, until it is dropped."""
    return pickled(obj).layout()


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
