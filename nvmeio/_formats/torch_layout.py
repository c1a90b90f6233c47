"""From an object to the layout of its checkpoint: every byte of the file, but for the storages'.

`plan_layout` lets torch itself write the archive into a sink that keeps what is written and skips
the storages, so the format is torch's by construction: names, padding, pickle, end records. What
is left is a list of records, each with its place in the file and the memory that belongs there, and
the places where its CRC-32 stands. No file is touched here.

torch.save is made to skip the storages by `torch.serialization.skip_data`, and to put them on page
boundaries by `torch.utils.serialization.config.save.storage_alignment`. Both are prototypes, and
both would also reach a torch.save that the object's own `__reduce__` makes (skorch and others do,
into a buffer that they then return): it would write a buffer of holes. So both are in force only
before and after the pickling, never during it; the pickler, which torch subclasses, switches.
"""

from __future__ import annotations

import contextlib
import pickle
import struct
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch

from nvmeio._formats import torch_zip
from nvmeio._io.caller import InCaller, at_once
from nvmeio._plan import PAGE_BYTES
from nvmeio._storage import crc32
from nvmeio.errors import BackendUnavailableError

DEFAULT_PROTOCOL = 2  # torch.save's

Data = torch.Tensor | Callable[[int, int], torch.Tensor]
"""A record's bytes: a contiguous 1-D uint8 tensor on any device, or a function of (offset, nbytes)
that returns that part of them as one. The part must stay as it is until the write is done."""


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
) -> FileLayout:
    """The layout of what `torch.save` would write.

    Args:
        obj: What torch.save takes.
        pickle_module: As for torch.save.
        pickle_protocol: As for torch.save.
        in_caller: Has the pickling done in another thread: the user's, who may have changed what
            his objects' own code depends on. The two settings are never in force there.

    Returns:
        The layout. It holds the object's storages, without a copy, until it is dropped.

    Raises:
        BackendUnavailableError: This torch has no `skip_data`, or its files look unlike what is
            known here: save with torch.save itself.
        Exception: What pickling the object raises.

    Cost: the pickling, about 15 us a tensor, and 10 us a storage.
    """
    skip_data = getattr(torch.serialization, "skip_data", None)
    if skip_data is None:
        raise _unknown_torch("torch.serialization.skip_data is missing")
    sink = _Sink()
    seen: dict[str, torch.UntypedStorage] = {}
    switch = _Switch(skip_data)
    watching = _PickleModule(pickle_module, seen, switch, in_caller)
    try:
        with switch:
            torch.save(obj, sink, watching, pickle_protocol)  # type: ignore[arg-type]
        return _layout(sink, dict(seen))
    finally:
        seen.clear()  # the pickler's class lives on in a cycle, and with it `seen`


def _unknown_torch(reason: str) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"torch {torch.__version__} writes checkpoints in a way that is not known here",
        attempts=[("skip_data", reason)],
    )


# What torch writes into


class _Sink:
    """A file for torch.save that keeps what is written, and holes where it seeks over."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._at = 0
        self._starts: list[int] = []
        self._chunks: list[bytearray] = []

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._chunks and self._starts[-1] + len(self._chunks[-1]) == self._at:
            self._chunks[-1] += view
        else:
            self._starts.append(self._at)
            self._chunks.append(bytearray(view))
        self._at += len(view)
        self.nbytes = max(self.nbytes, self._at)
        return len(view)

    def seek(self, offset: int, whence: int = 0) -> int:
        position = offset if whence == 0 else self._at + offset
        if whence not in (0, 1) or position < self._at:
            raise _unknown_torch(f"it seeks to {offset} from {whence} at byte {self._at}")
        self._at = position
        return position

    def tell(self) -> int:
        return self._at

    def flush(self) -> None:
        pass

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes of one chunk; fewer where it ends."""
        index = bisect_right(self._starts, offset) - 1
        if index < 0:
            return b""
        at = offset - self._starts[index]
        return bytes(self._chunks[index][at : at + nbytes])

    def patch(self, offset: int, data: bytes) -> None:
        index = bisect_right(self._starts, offset) - 1
        at = offset - self._starts[index]
        self._chunks[index][at : at + len(data)] = data

    def pieces(self) -> list[KnownBytes]:
        return [
            KnownBytes(start, bytes(chunk))
            for start, chunk in zip(self._starts, self._chunks, strict=True)
        ]


# What watches the pickling

# The alignment is global in torch before 2.10 or so, of the context since. Two saves at once must
# not restore each other's value; no foreign code runs while this is held.
_aligning = threading.RLock()


class _Switch:
    """Puts the two torch settings in force for the body, but not while the pickler works."""

    def __init__(self, skip_data: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._skip_data = skip_data
        self._active: contextlib.ExitStack | None = None

    def on(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_aligned_storages())
            stack.enter_context(self._skip_data())
            self._active = stack.pop_all()

    def off(self) -> None:
        active, self._active = self._active, None
        if active is not None:
            active.close()

    def __enter__(self) -> None:
        self.on()

    def __exit__(self, *error: object) -> None:
        self.off()


def _settings() -> Any:
    """Where torch keeps the alignment of storages; None in a torch that has no choice (2.6)."""
    try:
        from torch.utils.serialization import config
    except ImportError:
        return None
    settings = getattr(config, "save", None)
    return settings if hasattr(settings, "storage_alignment") else None


@contextlib.contextmanager
def _aligned_storages() -> Iterator[None]:
    """torch.save puts storages on page boundaries; where it cannot, nothing changes."""
    settings = _settings()
    if settings is None:
        yield
        return
    with _aligning:
        before = settings.storage_alignment
        settings.storage_alignment = PAGE_BYTES
        try:
            yield
        finally:
            settings.storage_alignment = before


class _PickleModule:
    """The user's pickle module, with a Pickler that notes which storage each record is."""

    def __init__(
        self,
        module: Any,
        seen: dict[str, torch.UntypedStorage],
        switch: _Switch,
        in_caller: InCaller,
    ) -> None:
        self._module = module
        self.Pickler = _watching(module.Pickler, seen, switch, in_caller)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


# Of what a state is made of. The pickler asks torch of each object whether it is a storage: 19
# times for a tensor, and a third of all planning was that.
_NO_STORAGES = frozenset(
    {
        *(dict, list, tuple, set, str, bytes, int, float, bool, type(None), OrderedDict),
        *(torch.Tensor, torch.nn.Parameter, torch.Size, FunctionType, type),
    }
)


def _watching(
    base: Any, seen: dict[str, torch.UntypedStorage], switch: _Switch, in_caller: InCaller
) -> Any:
    no_storages = _NO_STORAGES

    class Pickler(base):  # type: ignore[misc]
        def __init_subclass__(cls, **options: Any) -> None:
            """Torch derives its own pickler from this, and answers `persistent_id` in that."""
            super().__init_subclass__(**options)
            answer = cls.persistent_id

            def persistent_id(self: Any, obj: Any) -> Any:
                if type(obj) in no_storages:
                    return None
                told = answer(self, obj)
                if told is not None:
                    storage = obj if isinstance(obj, torch.UntypedStorage) else obj._untyped_storage
                    seen[told[2]] = storage
                return told

            cls.persistent_id = persistent_id

        def dump(self, obj: Any) -> Any:
            switch.off()
            try:
                return in_caller(super().dump, obj)
            finally:
                switch.on()

    return Pickler


# From what torch wrote to the layout


def _layout(sink: _Sink, storages: dict[str, torch.UntypedStorage]) -> FileLayout:
    def read_many(wanted: Sequence[tuple[int, int]]) -> list[bytes]:
        return [sink.read(offset, nbytes) for offset, nbytes in wanted]

    archive = torch_zip.parse(read_many, sink.nbytes, "the skeleton of the checkpoint")
    records: list[StorageRecord] = []
    for name, entry in archive.records().items():
        crc_at = [entry.crc_at]
        if entry.descriptor:
            if sink.read(entry.offset + entry.nbytes, 4) != torch_zip.DESCRIPTOR_MAGIC:
                raise _unknown_torch(f"record {name!r} has no data descriptor")
            crc_at.insert(0, entry.offset + entry.nbytes + 4)
        storage = storages.pop(name.removeprefix("data/"), None) if name[:5] == "data/" else None
        if storage is None:
            _patch_own(sink, entry, crc_at)
            continue
        if storage.nbytes() != entry.nbytes:
            raise _unknown_torch(
                f"record {name!r} has {entry.nbytes} bytes, its storage {storage.nbytes()}"
            )
        if entry.nbytes:
            records.append(
                StorageRecord(
                    entry.name, entry.offset, entry.nbytes, _bytes_of(storage), tuple(crc_at)
                )
            )
    if storages:
        raise _unknown_torch(f"there is no record for storage {next(iter(storages))}")
    return FileLayout(sink.nbytes, sink.pieces(), records)


def _patch_own(sink: _Sink, entry: torch_zip.ZipEntry, crc_at: list[int]) -> None:
    """The CRC of a record that torch wrote: it leaves them out where the user told it to."""
    data = sink.read(entry.offset, entry.nbytes)
    if len(data) != entry.nbytes:
        raise _unknown_torch(f"record {entry.name!r} was skipped, and is no storage")
    crc = struct.pack("<I", crc32.of_bytes(data))
    for at in crc_at:
        sink.patch(at, crc)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage as a 1-D uint8 tensor, without a copy."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))
