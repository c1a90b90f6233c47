"""Files made to hurt: refused with their name, before anything is allocated for them."""

from __future__ import annotations

import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint._archives import (
    Directory,
    checkpoint_with_pickle,
    records_of,
    tensor_pickle,
    write_records,
)
from checkpoint._objects import assert_same, noise
from hypothesis import given, settings
from hypothesis import strategies as st

import nvmeio
from nvmeio import _memory
from nvmeio._reading._spans import Load
from nvmeio.checkpoint import _loading, _pickles

STATE = {"a": noise(1000), "b": noise(5)}


@pytest.fixture
def file(path: Path) -> Path:
    """A checkpoint that is as it should be."""
    torch.save(STATE, path)
    return path


@pytest.fixture
def nothing_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """No storage may be read, no mapping made, nor torch.load asked."""

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("it was allocated for")

    monkeypatch.setattr(Load, "run", refuse)
    monkeypatch.setattr(_memory.Mapping, "__new__", refuse)
    monkeypatch.setattr(_loading._Loading, "_through_torch", refuse)


def record(file: Path, name: str) -> str:
    """A record's full name, which begins with a folder."""
    (found,) = (full for full in Directory(file).entries if full.split("/", 1)[1] == name)
    return found


# The archive


def past_the_end(file: Path) -> None:
    directory = Directory(file)
    name = record(file, "data/0")
    directory.set(name, packed=1 << 20, nbytes=1 << 20)
    directory.write()


def behind_the_directory(file: Path) -> None:
    directory = Directory(file)
    directory.set(record(file, "data/1"), offset=file.stat().st_size - 100)
    directory.write()


def absurd(file: Path) -> None:
    directory = Directory(file)
    directory.set(record(file, "data/0"), packed=0xFFFFFFFE, nbytes=0xFFFFFFFE)
    directory.write()


def overlapping(file: Path) -> None:
    """Two records at one place."""
    directory = Directory(file)
    first, second = record(file, "data/0"), record(file, "data/1")
    directory.set(second, offset=directory.get(first, "offset"))
    directory.write()


def nested(file: Path) -> None:
    """One record within the data of another."""
    directory = Directory(file)
    first, second = record(file, "data/0"), record(file, "data/1")
    both = directory.get(second, "offset") - directory.get(first, "offset") + 50
    directory.set(first, packed=both, nbytes=both)
    directory.write()


def twice(file: Path) -> None:
    directory = Directory(file)
    directory.rename(record(file, "data/1"), record(file, "data/0"))
    directory.write()


def encrypted(file: Path) -> None:
    directory = Directory(file)
    name = record(file, "data/0")
    directory.set(name, flags=directory.get(name, "flags") | 1)
    directory.write()


def compressed(file: Path) -> None:
    write_records(file, records_of(file), zipfile.ZIP_DEFLATED)


def claims_compression(file: Path) -> None:
    directory = Directory(file)
    directory.set(record(file, "data/0"), method=8)
    directory.write()


def two_sizes(file: Path) -> None:
    """What a zip bomb says: little in the file, much once it is out."""
    directory = Directory(file)
    directory.set(record(file, "data/0"), nbytes=1 << 30)
    directory.write()


def other_header(file: Path) -> None:
    """The header has another name than the directory."""
    directory = Directory(file)
    name = record(file, "data/1")
    directory.set_local(name, 30, name.replace("data/1", "data/7").encode())
    directory.write()


def other_size_in_header(file: Path) -> None:
    directory = Directory(file)
    directory.set_local(record(file, "data/1"), 18, struct.pack("<II", 1 << 20, 1 << 20))
    directory.write()


def no_header(file: Path) -> None:
    directory = Directory(file)
    directory.set_local(record(file, "data/1"), 0, b"XXXX")
    directory.write()


def long_extra(file: Path) -> None:
    """Padding that reaches beyond the data."""
    directory = Directory(file)
    last = max(directory.entries, key=lambda name: directory.get(name, "offset"))
    directory.set_local(last, 28, b"\xff\xff")
    directory.write()


def another_disk(file: Path) -> None:
    directory = Directory(file)
    directory.set(record(file, "data/0"), disk=1)
    directory.write()


def appended(file: Path) -> None:
    with file.open("ab") as end:
        end.write(b"\0" * 10)


def prepended(file: Path) -> None:
    """Readers differ on where such an archive begins."""
    data = file.read_bytes()
    file.write_bytes(b"PK\x03\x04" + b"\0" * 60 + data)


def more_entries(file: Path) -> None:
    data = bytearray(file.read_bytes())
    at = data.rindex(b"PK\x06\x06")
    struct.pack_into("<QQ", data, at + 24, 1 << 40, 1 << 40)
    end = data.rindex(b"PK\x05\x06")
    struct.pack_into("<HH", data, end + 8, 0xFFFF, 0xFFFF)
    file.write_bytes(data)


def huge_directory(file: Path) -> None:
    data = bytearray(file.read_bytes())
    at = data.rindex(b"PK\x06\x06")
    struct.pack_into("<Q", data, at + 40, 1 << 62)
    end = data.rindex(b"PK\x05\x06")
    struct.pack_into("<I", data, end + 12, 0xFFFFFFFF)
    file.write_bytes(data)


def two_ends(file: Path) -> None:
    """The end record and its 64-bit kin contradict each other."""
    data = bytearray(file.read_bytes())
    end = data.rindex(b"PK\x05\x06")
    struct.pack_into("<HH", data, end + 8, 1, 1)
    file.write_bytes(data)


def locator_astray(file: Path) -> None:
    data = bytearray(file.read_bytes())
    struct.pack_into("<Q", data, data.rindex(b"PK\x06\x07") + 8, 1 << 63)
    file.write_bytes(data)


def without(*names: str) -> Callable[[Path], None]:
    def spoil(file: Path) -> None:
        records = records_of(file)
        kept = {n: d for n, d in records.items() if n.split("/", 1)[1] not in names}
        write_records(file, kept)

    return spoil


ARCHIVES: dict[str, tuple[Callable[[Path], None], str]] = {
    "past the end": (past_the_end, "past the end"),
    "behind the directory": (behind_the_directory, "past the end"),
    "absurd size": (absurd, "past the end"),
    "overlapping": (overlapping, "overlaps"),
    "nested": (nested, "overlaps"),
    "twice": (twice, "twice"),
    "encrypted": (encrypted, "encrypted"),
    "compressed": (compressed, "compressed"),
    "claims compression": (claims_compression, "compressed"),
    "two sizes": (two_sizes, "two sizes"),
    "another name in the header": (other_header, "another name"),
    "another size in the header": (other_size_in_header, "disagree on its size"),
    "no header": (no_header, "no header"),
    "long extra field": (long_extra, "past the end"),
    "another disk": (another_disk, "another disk"),
    "bytes behind": (appended, "no zip archive|behind the end"),
    "bytes before": (prepended, "zip64 end record is damaged"),
    "absurd number of records": (more_entries, "more records"),
    "absurd directory": (huge_directory, "not where"),
    "two ends": (two_ends, "contradicts"),
    "a locator that leads astray": (locator_astray, "behind itself"),
    "no pickle": (without("data.pkl"), "data.pkl"),
    "a storage is missing": (without("data/1"), "'data/1'"),
}


@pytest.mark.parametrize("kind", ARCHIVES)
@pytest.mark.parametrize("weights_only", [True, False])
def test_an_archive_that_cannot_be(
    kind: str, weights_only: bool, file: Path, nothing_allocated: None
) -> None:
    spoil, says = ARCHIVES[kind]
    spoil(file)
    with pytest.raises(nvmeio.IntegrityError, match=says) as raised:
        nvmeio.load(file, weights_only=weights_only)
    assert str(file) in str(raised.value)


def test_what_is_spoiled_here_was_whole(file: Path) -> None:
    """Were it not, every test above would pass."""
    assert_same(nvmeio.load(file), STATE)
    write_records(file, records_of(file))
    assert_same(nvmeio.load(file), STATE)


def test_cut_off_anywhere(file: Path, nothing_allocated: None) -> None:
    data = file.read_bytes()
    for length in (4, 31, 60, *range(100, len(data), 301), *range(len(data) - 60, len(data), 7)):
        file.write_bytes(data[:length])
        with pytest.raises(nvmeio.IntegrityError):
            nvmeio.load(file)


def test_an_archive_without_records(file: Path, nothing_allocated: None) -> None:
    write_records(file, {})
    file.write_bytes(b"PK\x03\x04" + b"\0" * 26 + file.read_bytes())
    with pytest.raises(nvmeio.IntegrityError):
        nvmeio.load(file)


def test_a_sparse_file_of_a_terabyte(path: Path) -> None:
    """All of it is possible, but there is no such memory: MemoryError, at once."""
    nbytes = 1 << 40
    records = {"archive/data.pkl": tensor_pickle(numel=nbytes // 4), "archive/byteorder": b"little"}
    write_records(path, records)
    whole = path.read_bytes()
    start = whole.index(b"PK\x01\x02")
    name = b"archive/data/0"
    local = struct.pack("<4sHHHHHIIIHH", b"PK\x03\x04", 0, 8, 0, 0, 0, 0, 0, 0, len(name), 0)
    extra = struct.pack("<HHQQ", 1, 16, nbytes, nbytes)
    entry = struct.pack(
        "<4sHHHHHHIIIHHHHHII",
        *(b"PK\x01\x02", 0, 45, 8, 0, 0, 0, 0, 0xFFFFFFFF, 0xFFFFFFFF, len(name), len(extra)),
        *(0, 0, 0, 0, start),
    )
    directory = whole[start : whole.rindex(b"PK\x05\x06")] + entry + name + extra
    at = start + len(local) + len(name) + nbytes + 24
    end = at + len(directory)
    with path.open("r+b") as file:
        file.seek(start)
        file.write(local + name)
        file.seek(at)
        file.write(directory)
        file.write(struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, 3, 3, end - at, at))
        file.write(struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1))
        file.write(struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 3, 3, end - at, 0xFFFFFFFF, 0))
    with pytest.raises(MemoryError, match="available"):
        nvmeio.load(path)


# The pickle


def test_a_storage_of_another_size_than_its_record(path: Path, nothing_allocated: None) -> None:
    for numel, there in ((4, 12), (4, 20), (1 << 60, 16), (0, 16)):
        checkpoint_with_pickle(path, tensor_pickle(numel=numel), {"0": bytes(there)})
        with pytest.raises(nvmeio.IntegrityError, match="another size") as raised:
            nvmeio.load(path)
        assert "'data/0'" in str(raised.value)


def test_a_tensor_larger_than_its_storage(path: Path) -> None:
    """torch.load would grow the storage, to any size that the pickle names."""
    checkpoint_with_pickle(path, tensor_pickle(shape=(1 << 40,)), {"0": bytes(16)})
    with pytest.raises(RuntimeError, match="not resizable"):
        nvmeio.load(path)


PICKLES: dict[str, bytes] = {
    "empty": b"",
    "cut off": tensor_pickle()[:-20],
    "no pickle": b"\xff" * 100,
    "a memo of four billion": b"\x80\x02]r\xfe\xff\xff\xff0",
    "a bytearray of an exabyte": b"\x80\x05\x96" + struct.pack("<Q", 1 << 60) + b".",
    "a text of four gigabytes": b"\x80\x02X\xff\xff\xff\xffabc.",
    "a number of two gigabytes": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "an empty stack": b"\x80\x020.",
    "no mark": b"\x80\x02t.",
    "a persistent id that is a number": b"\x80\x02K\x01Q.",
    "another persistent id": b"\x80\x02(X\x06\x00\x00\x00moduleK\x01K\x02K\x03K\x04tQ.",
    # Tuples of one tuple twice: 2 ** 45 parts for whoever hashes, compares or prints them.
    "a key that doubles": b"\x80\x02}K\x01" + b"2\x86" * 45 + b"K\x01s.",
    "keys that double": b"\x80\x02}(K\x01" + b"2\x86" * 45 + b"K\x01u.",
    "a dict's key that doubles": b"\x80\x02(K\x01" + b"2\x86" * 45 + b"K\x01d.",
    "an element that doubles": b"\x80\x04\x8f(K\x01" + b"2\x86" * 45 + b"\x90.",
    "a frozen element that doubles": b"\x80\x04(K\x01" + b"2\x86" * 45 + b"\x91.",
    "a persistent id that doubles": b"\x80\x02K\x01" + b"2\x86" * 45 + b"Q.",
    "a global's name that doubles": b"\x80\x04K\x01" + b"2\x86" * 45 + b"2\x93.",
    # Python's hash of these has no limit but the stack.
    "a key as deep as it is long": b"\x80\x02}K\x01" + b"\x85" * 200_000 + b"K\x01s.",
    "a persistent id as deep as it is long": b"\x80\x02K\x01" + b"\x85" * 200_000 + b"Q.",
}


@pytest.mark.parametrize("kind", PICKLES)
def test_a_pickle_that_cannot_be(kind: str, path: Path, nothing_allocated: None) -> None:
    checkpoint_with_pickle(path, PICKLES[kind], {})
    with pytest.raises(nvmeio.IntegrityError, match=r"data\.pkl"):
        nvmeio.load(path)


def test_keys_that_are_tuples(path: Path) -> None:
    state = {(1, "a", (2, (3,))): noise(3), "set": {(1, 2), (1, 3)}, "many": {tuple(range(900))}}
    torch.save(state, path)
    assert_same(nvmeio.load(path), state)


def test_a_forbidden_global_after_everything_else(path: Path, nothing_allocated: None) -> None:
    """The tensors come first: none is read before the end of the pickle is known."""
    pickled = tensor_pickle()
    assert pickled.endswith(b"s.")
    harmful = pickled[:-1] + b"X\x01\x00\x00\x00bcposix\nsystem\nX\x04\x00\x00\x00true\x85Rs."
    checkpoint_with_pickle(path, harmful, {"0": bytes(16)})
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        nvmeio.load(path)


def test_scanning_runs_nothing(tmp_path: Path) -> None:
    proof = tmp_path / "it ran"
    command = f"touch '{proof}'".encode()
    harmful = b"cos\nsystem\nX" + struct.pack("<I", len(command)) + command + b"\x85R."
    found = _pickles.scan(harmful)
    assert found.globals == {_pickles.Global("os", "system")} and not proof.exists()
    pickle.loads(harmful)
    assert proof.exists()


# Anything at all


@given(data=st.data())
@settings(max_examples=150)
def test_any_damage_is_told_or_harmless(data: st.DataObject, tmp_path: Path) -> None:
    """Headers, directory, pickle: never a crash, a hang, or an error without a name."""
    path = tmp_path / "damaged.pt"
    whole = whole_file(tmp_path)
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] = data.draw(st.integers(0, 255))
    path.write_bytes(damaged)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            nvmeio.load(path)
        except MemoryError as refused:  # a tensor's own shape, which torch refuses by this
            assert "allocate" in str(refused)
        except (nvmeio.IntegrityError, pickle.UnpicklingError, RuntimeError, ValueError, TypeError):
            pass
        except (
            AssertionError,
            KeyError,
            AttributeError,
            EOFError,
            IndexError,
            NotImplementedError,
        ):
            pass  # torch's own


_WHOLE: list[bytes] = []


def whole_file(folder: Path) -> bytes:
    """Small, so that headers and pickle are most of it."""
    if not _WHOLE:
        torch.save({"a": noise(20), "b": [noise(3), 7], "c": "text"}, folder / "whole.pt")
        _WHOLE.append((folder / "whole.pt").read_bytes())
    return _WHOLE[0]
