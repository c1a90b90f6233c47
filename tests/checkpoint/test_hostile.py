"""Files made to hurt: refused with their name, before anything is allocated for them."""

from __future__ import annotations

import itertools
import pickle
import struct
import sys
import warnings
import zipfile
from collections import Counter, OrderedDict
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
from nvmeio._formats.torch_archives import pickle_values, torch_unpickler
from nvmeio._io.spans import Load
from nvmeio._memory import mappings, system
from nvmeio.checkpoint import _unpickling as unpickling
from nvmeio.checkpoint.describing import describe

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
    monkeypatch.setattr(mappings.Mapping, "__new__", refuse)
    monkeypatch.setattr(unpickling, "load_through_torch", refuse)


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


def two_archives(file: Path) -> None:
    """Two of them in one stream; readers differ on which one they take."""
    file.write_bytes(2 * file.read_bytes())


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
    "two archives": (two_archives, "does not end at its locator"),
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


def test_file_loads_before_these_tests_spoil_it(file: Path) -> None:
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


def test_a_sparse_file_of_a_terabyte(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it is possible, but there is no such memory: MemoryError, at once."""
    monkeypatch.setattr(system, "proc_bytes", lambda *_: 1 << 36)  # some machines have more
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


EQUAL = sys.hash_info.modulus
"""An integer whose hash is that of 0, and of all its multiples."""


def pickled_keys(parts: int, value: bytes = b"N", before: bytes = b"", after: bytes = b"") -> bytes:
    """Keys that all have one hash, each with a value: a dict of them takes their square."""
    keys = itertools.product(range(300 if parts == 1 else 33), repeat=parts)
    made = b""
    for key in keys:
        numbers = b"".join(b"\x8a\x0c" + (EQUAL * n).to_bytes(12, "little") for n in key)
        made += before + numbers + (b"\x86" if parts == 2 else b"") + after + value
    return made


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
    "a Counter's key that doubles": b"\x80\x02ccollections\nCounter\n)RK\x01"
    + b"2\x86" * 45
    + b"K\x01s.",
    "an element that doubles": b"\x80\x04\x8f(K\x01" + b"2\x86" * 45 + b"\x90.",
    "a frozen element that doubles": b"\x80\x04(K\x01" + b"2\x86" * 45 + b"\x91.",
    "a persistent id that doubles": b"\x80\x02K\x01" + b"2\x86" * 45 + b"Q.",
    "a global's name that doubles": b"\x80\x04K\x01" + b"2\x86" * 45 + b"2\x93.",
    # Python's hash of these has no limit but the stack.
    "a key as deep as it is long": b"\x80\x02}K\x01" + b"\x85" * 200_000 + b"K\x01s.",
    "keys of one hash": b"\x80\x02}(" + pickled_keys(1) + b"u.",
    "keys of one hash that are tuples": b"\x80\x02}(" + pickled_keys(2) + b"u.",
    "one key of one hash at a time": b"\x80\x02}"
    + b"".join(f"I{EQUAL * n}\nNs".encode() for n in range(200))
    + b".",
    "elements of one hash": b"\x80\x04\x8f(" + pickled_keys(1, b"") + b"\x90.",
    "frozen elements of one hash": b"\x80\x04(" + pickled_keys(2, b"") + b"\x91.",
    "complex numbers of one hash": b"\x80\x02}("
    + b"".join(
        b"cbuiltins\ncomplex\n" + pickle.dumps((-1000003.0 * n, float(n)), 2)[2:-1] + b"RN"
        for n in range(300)
    )
    + b"u.",
    "sizes of one hash, of lists": b"\x80\x02}("
    + pickled_keys(1, b"N", b"ctorch\nSize\n](", b"e\x85R")
    + b"u.",
    "sizes of one hash": b"\x80\x02}(" + pickled_keys(2, b"N", b"ctorch\nSize\n", b"\x85R") + b"u.",
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
    found = torch_unpickler.scan(harmful)
    assert found.globals == {pickle_values.Global("os", "system")} and not proof.exists()
    pickle.loads(harmful)
    assert proof.exists()


# What the pickle calls


def pickled(value: bytes) -> bytes:
    """A dict with this value under "a", in protocol 2."""
    return b"\x80\x02}X\x01\x00\x00\x00a" + value + b"s."


def text(letters: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(letters)) + letters


def view(shape: bytes, storage: bytes = b"FloatStorage") -> bytes:
    """One element, seen in this shape: all strides are 0."""
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\n"
        + storage
        + b"\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQK\x00"
        + shape
        + b"K\x00\x85\x89ccollections\nOrderedDict\n)RtR"
    )


HUGE = b"\x8a\x06\0\0\0\0\x40\0"  # 2 ** 38, as no memory has bytes for
DOUBLED = b"K\x01" + b"q\x05h\x05\x86" * 45
FLOAT = b"ctorch\nfloat32\n"
SEEN = view(HUGE + b"\x85")
CALLS: dict[str, bytes] = {
    "a bytearray": b"cbuiltins\nbytearray\n" + HUGE + b"\x85R",
    "a bytearray of Python 2": b"c__builtin__\nbytearray\n" + HUGE + b"\x85R",
    "a bytearray by its arguments' storage": b"cbuiltins\nbytearray\n"
    + SEEN[SEEN.index(b"(X\x07") : SEEN.index(b"Q") + 1]
    + b"R",
    "a bytearray of a tensor's": b"cbuiltins\nbytearray\n" + SEEN + b"\x85R",
    "a wrapped bytearray": b"ctorch._tensor\n_rebuild_from_type_v2\n(cbuiltins\nbytearray\n"
    b"ctorch\nTensor\n" + HUGE + b"\x85}tR",
    "a bytearray wrapped twice": b"ctorch._tensor\n_rebuild_from_type_v2\n"
    b"(ctorch._tensor\n_rebuild_from_type_v2\nctorch\nTensor\n(cbuiltins\nbytearray\n"
    b"ctorch\nTensor\n" + HUGE + b"\x85}t}tR",
    "a tensor": b"ctorch\nFloatTensor\n" + HUGE + b"\x85R",
    "a tensor of a size": b"ctorch\nTensor\nctorch\nSize\n" + HUGE + b"\x85\x85R\x85R",
    "a new tensor": b"ctorch\nTensor\n" + HUGE + b"\x85\x81",
    "a storage": b"ctorch.storage\nUntypedStorage\n" + HUGE + b"\x85R",
    "a text many times": b"c_codecs\nencode\nq\x01" + text(b"x" * 100_000) + b"q\x02"
    b"X\x06\x00\x00\x00latin1q\x03\x86R" + b"0h\x01h\x02h\x03\x86R" * 30,
    "a slow encoding": b"c_codecs\nencode\n" + text(b"x") + text(b"punycode") + b"\x86R",
    "a set that hashes for weeks": b"cbuiltins\nset\n]" + DOUBLED + b"a\x85R",
    "a Counter that does": b"ccollections\nCounter\n]" + DOUBLED + b"a\x85R",
    "an OrderedDict's key": b"ccollections\nOrderedDict\n]" + DOUBLED + b"K\x01\x86a\x85R",
    "a set of one hash": b"cbuiltins\nset\n](" + pickled_keys(2, b"") + b"e\x85R",
    "a set of a tensor": b"cbuiltins\nset\n" + SEEN + b"\x85R",
    "a shape of a tensor": b"ctorch\nSize\n" + SEEN + b"\x85R",
    "a copy of a view": b"ctorch._utils\n_rebuild_device_tensor_from_cpu_tensor\n("
    + SEEN
    + FLOAT
    + text(b"cpu")
    + b"\x89tR",
    "a copy of a wrapped view": b"ctorch._utils\n_rebuild_device_tensor_from_cpu_tensor\n("
    b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_tensor_v2\n"
    b"ctorch\nTensor\n" + SEEN[SEEN.index(b"((") : -1] + b"}tR" + FLOAT + text(b"cpu") + b"\x89tR",
    "a sparse tensor's indices": b"ctorch._utils\n_rebuild_sparse_tensor\n"
    b"ctorch.serialization\n_get_layout\n"
    + text(b"torch.sparse_coo")
    + b"\x85R("
    + view(b"K\x01" + HUGE + b"\x86", b"LongStorage")
    + view(HUGE + b"\x85")
    + b"K\x01\x85\x89t\x86R",
    "a quantised tensor": b"ctorch._utils\n_rebuild_qtensor\n"
    + SEEN[SEEN.index(b"((") : SEEN.index(b"\x89ccoll")].replace(b"FloatStorage", b"QInt8Storage")
    + b"(ctorch\nper_tensor_affine\nG\x3f\xf0\0\0\0\0\0\0K\x00t\x89"
    b"ccollections\nOrderedDict\n)RtR",
}


@pytest.mark.parametrize("kind", CALLS)
def test_a_call_out_of_all_proportion(kind: str, path: Path, nothing_allocated: None) -> None:
    """torch makes them: bytearray(2**38) filled memory until the process was killed."""
    itemsize = {b"LongStorage": 8, b"QInt8Storage": 1}
    nbytes = next((n for name, n in itemsize.items() if name in CALLS[kind]), 4)
    checkpoint_with_pickle(path, pickled(CALLS[kind]), {"0": bytes(nbytes)})
    for where in (None, "meta"):
        with pytest.raises(pickle.UnpicklingError, match="writes no such call") as raised:
            nvmeio.load(path, where)
        assert str(raised.value).startswith(f"{path}: record 'data.pkl' calls ")
    assert describe(path).forbidden


def test_a_call_before_a_forbidden_global(path: Path, nothing_allocated: None) -> None:
    """torch is asked for its words about the global, and makes all calls before it."""
    calls = CALLS["a bytearray"] + b"0cposix\nsystem\n" + text(b"true") + b"\x85R"
    checkpoint_with_pickle(path, pickled(calls), {"0": bytes(8)})
    with pytest.raises(pickle.UnpicklingError, match="bytearray"):
        nvmeio.load(path)


def test_an_opcode_that_torch_does_not_read(path: Path) -> None:
    """inspect ended in a traceback."""
    checkpoint_with_pickle(path, pickled(b"cposix\nsystem\n0K\x01"), {})
    assert describe(path).forbidden == ["Unsupported operand 48"]
    with pytest.raises(pickle.UnpicklingError, match="posix"):
        nvmeio.load(path)


def test_with_trust_any_call_is_made(path: Path) -> None:
    call = b"cbuiltins\nbytearray\nK\x05\x85R"
    checkpoint_with_pickle(path, pickled(call), {})
    assert nvmeio.load(path, weights_only=False) == {"a": bytearray(5)}


def test_calls_that_double_are_told_in_bounded_time(path: Path) -> None:
    """Were a call's arguments shown with those of the calls in them, it would take forever."""
    doubled = b"cbuiltins\nset\nq\x01)Rq\x02" + b"0h\x01h\x02h\x02\x86\x85Rq\x02" * 60
    doubled += b"0ctorch.storage\nUntypedStorage\nh\x02\x85R"
    checkpoint_with_pickle(path, pickled(doubled), {})
    with pytest.raises(pickle.UnpicklingError, match=r"UntypedStorage\(set\(...\)\)"):
        nvmeio.load(path)


IN_EARNEST: dict[str, Callable[[], Any]] = {
    "bytes": lambda: [bytes(range(256)) * 100, b"x"],
    "bytearrays": lambda: [bytearray(range(256)), bytearray()],
    "sets": lambda: [{1, "two", (3, (4,))}, set(), set(range(10_000))],
    "keys": lambda: [{(n, -n): n, n / 7: n, torch.Size((n,)): n} for n in range(300)],
    "Counter": lambda: Counter({"a": 3, (1, 2): 4}),
    "OrderedDict": lambda: OrderedDict([("a", noise(3)), ((1, 2), 4)]),
    "complex": lambda: [1 + 2j, 3j],
    "sizes": lambda: [torch.Size([3, 4]), torch.Size([])],
    "devices": lambda: torch.device("cpu"),
    "expanded": lambda: noise(1).expand(1000, 1000),
    "a parameter": lambda: torch.nn.Parameter(noise(3, 4)),
    "sparse": lambda: noise(30, 40).to_sparse(),
    "compressed": lambda: noise(30, 40).to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(noise(30), 0.1, 0, torch.qint8),
    "quantised by channel": lambda: torch.quantize_per_channel(
        noise(2000, 2), torch.rand(2000) + 1, torch.zeros(2000), 0, torch.qint8
    ),
    "with attributes": lambda: with_attribute(noise(3)),
}


def with_attribute(tensor: torch.Tensor) -> torch.Tensor:
    tensor.note = {"of": [1, 2, b"bytes"]}  # type: ignore[attr-defined]
    return tensor


@pytest.mark.parametrize("kind", IN_EARNEST)
def test_calls_in_earnest(kind: str, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of experimental and deprecated kinds of tensors
        value = IN_EARNEST[kind]()
        torch.save([value, value], path)
        found = nvmeio.load(path)
        wanted = torch.load(path)
    assert repr(found) == repr(wanted)
    assert describe(path).forbidden == []


# Anything at all


@given(data=st.data())
@settings(max_examples=80)
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


# The devices


@pytest.mark.parametrize("tag", ["nowhere", "cuda:x", "", "cpu:0:1", "ünknown"])
def test_a_location_that_is_no_device_is_told_with_file_and_tag(tag: str, path: Path) -> None:
    """It was torch's own error, without the file: a RuntimeError, of another kind for each tag."""
    torch.save(STATE, path)
    records = records_of(path)
    (name,) = (name for name in records if name.endswith("data.pkl"))
    told, cpu = tag.encode(), b"X\x03\x00\x00\x00cpu"
    assert cpu in records[name]
    records[name] = records[name].replace(cpu, b"X" + struct.pack("<I", len(told)) + told)
    write_records(path, records)
    for where in (None, {"cuda": "cpu"}):
        with pytest.raises(nvmeio.IntegrityError, match="not a device") as failed:
            nvmeio.load(path, map_location=where)
        assert str(path) in str(failed.value)
        assert repr(tag) in str(failed.value)
    assert_same(nvmeio.load(path, map_location="cpu"), STATE)
    assert_same(nvmeio.load(path, map_location={tag: "cpu"}), STATE)
