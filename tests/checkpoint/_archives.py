"""Archives that are wrong on purpose."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch

CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")


def records_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def write_records(path: Path, records: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> None:
    """An archive by Python's zipfile, which has neither padding nor descriptors."""
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in records.items():
            archive.writestr(name, data)


class Directory:
    """The central directory of an archive, to be changed field by field.

    Fields: magic, made by, needed, flags, method, time, date, crc, packed, nbytes, name, extra and
    comment length, disk, attributes, attributes, offset.
    """

    FIELDS = (
        "magic",
        "made_by",
        "needed",
        "flags",
        "method",
        "time",
        "date",
        "crc",
        "packed",
        "nbytes",
        "name_length",
        "extra_length",
        "comment_length",
        "disk",
        "inner",
        "outer",
        "offset",
    )

    def __init__(self, path: Path) -> None:
        self._path = path
        self._data = bytearray(path.read_bytes())
        end = self._data.rindex(b"PK\x05\x06")
        size, self._start = struct.unpack_from("<II", self._data, end + 12)
        self.entries: dict[str, int] = {}
        at = self._start
        while at < self._start + size:
            fields = CENTRAL.unpack_from(self._data, at)
            name = bytes(self._data[at + 46 : at + 46 + fields[10]]).decode()
            self.entries[name] = at
            at += 46 + sum(fields[10:13])

    def get(self, name: str, field: str) -> int:
        fields = CENTRAL.unpack_from(self._data, self.entries[name])
        value: int = fields[self.FIELDS.index(field)]
        return value

    def set(self, name: str, **changes: int) -> None:
        at = self.entries[name]
        fields = list(CENTRAL.unpack_from(self._data, at))
        for field, value in changes.items():
            fields[self.FIELDS.index(field)] = value
        CENTRAL.pack_into(self._data, at, *fields)

    def set_local(self, name: str, offset: int, value: bytes) -> None:
        """Bytes of a local header."""
        at = self.get(name, "offset") + offset
        self._data[at : at + len(value)] = value

    def rename(self, name: str, new: str) -> None:
        """In directory and header; the length stays."""
        for at in (self.entries[name] + 46, self.get(name, "offset") + 30):
            self._data[at : at + len(name)] = new.encode()

    def write(self) -> None:
        self._path.write_bytes(self._data)


def checkpoint_with_pickle(path: Path, data: bytes, storages: dict[str, bytes]) -> None:
    """A checkpoint with this data.pkl and these storages."""
    records = {"archive/data.pkl": data, "archive/byteorder": b"little", "archive/version": b"3\n"}
    write_records(path, records | {f"archive/data/{k}": v for k, v in storages.items()})


def tensor_pickle(key: str = "0", numel: int = 4, shape: tuple[int, ...] = (4,)) -> bytes:
    """A pickle of one float tensor, whose storage is what is said here."""

    class Storage:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            if isinstance(obj, Storage):
                return ("storage", torch.FloatStorage, key, "cpu", numel)
            return None

    class Tensor:
        def __reduce__(self) -> Any:
            rebuild = torch._utils._rebuild_tensor_v2  # type: ignore[attr-defined]
            return rebuild, (Storage(), 0, shape, (1,) * len(shape), False, {})

    buffer = io.BytesIO()
    Pickler(buffer, protocol=2).dump({"a": Tensor()})
    return buffer.getvalue()
