"""Plain pickles, which CPython's unpickler makes objects of: which they are, and what it makes."""

from __future__ import annotations

import contextlib
import copyreg
import inspect
import io
import pickle
import struct
import sys
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint._archives import checkpoint_with_pickle, tensor_pickle
from checkpoint._objects import SAFE, assert_same, noise
from hypothesis import given, settings
from hypothesis import strategies as st

import nvmeio
from nvmeio._formats.torch_archives import pickle_values, torch_unpickler
from nvmeio._formats.torch_archives.pickle_values import PickleError
from nvmeio._formats.torch_archives.torch_unpickler import UnknownTorchError, unpickle
from nvmeio.checkpoint import _unpickling as unpickling

PLAIN = ("tied", "odd shapes", "training", "sizes", "many small")


def saved(obj: Any, protocol: int = 2) -> tuple[bytes, dict[str, torch.Tensor]]:
    """The pickle of an object as torch.save makes it, and its storages."""
    file = io.BytesIO()
    torch.save(obj, file, pickle_protocol=protocol)
    with zipfile.ZipFile(file) as archive:
        records = {name.split("/", 1)[1]: archive.read(name) for name in archive.namelist()}
    storages = {
        name.removeprefix("data/"): (
            torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
        )
        for name, data in records.items()
        if name.startswith("data/")
    }
    return records["data.pkl"], storages


def in_place(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
    assert location == "cpu"
    return storage


@pytest.fixture(name="told")
def _told(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the length of each pickle that was made an object of here."""
    lengths: list[int] = []

    def watched(
        data: bytes, storages: Mapping[str, torch.Tensor], restore: torch_unpickler.Restore
    ) -> Any:
        made = unpickle(data, storages, restore)
        lengths.append(len(data))
        return made

    monkeypatch.setattr(torch_unpickler, "unpickle", watched)
    return lengths


@pytest.mark.parametrize("kind", PLAIN)
def test_what_torch_save_writes_of_dense_tensors_is_plain_and_made_the_same(kind: str) -> None:
    state = SAFE[kind]()
    data, storages = saved(state)
    assert torch_unpickler.scan(data).plain
    assert_same(unpickle(data, storages, in_place), state)


def test_what_torch_sets_of_a_tensor_is_set() -> None:
    weight = torch.nn.Parameter(noise(3, 4))
    turned = noise(5, dtype=torch.complex64).conj()
    state = torch.nn.Linear(2, 3).state_dict()
    data, storages = saved({"w": weight, "t": turned, "s": state, "g": noise(2).requires_grad_()})
    file = io.BytesIO()
    torch.save({"w": weight, "t": turned, "s": state, "g": noise(2).requires_grad_()}, file)
    theirs = torch.load(file.seek(0) or file)
    ours = unpickle(data, storages, in_place)
    assert type(ours["s"]) is OrderedDict and vars(ours["s"]) == vars(theirs["s"])
    assert type(ours["w"]) is torch.nn.Parameter and ours["t"].is_conj()
    for a, b in ((ours["g"], theirs["g"]), (ours["t"], theirs["t"]), (ours["w"], theirs["w"])):
        assert a.requires_grad == b.requires_grad and a._version == b._version
        assert type(a._backward_hooks) is type(b._backward_hooks) and not a._backward_hooks
        assert a.is_leaf and a._base is None and torch.equal(a, b)


class _Storage:
    """Pickled as the storage "0"."""


class _Pickler(pickle.Pickler):
    dispatch_table = copyreg.dispatch_table

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return ("storage", torch.FloatStorage, "0", "cpu", 4)
        return None


def pickled(obj: Any, protocol: int = 2) -> bytes:
    file = io.BytesIO()
    _Pickler(file, protocol).dump(obj)
    return file.getvalue()


MEMO_FAR = b"\x80\x02]r" + (1 << 30).to_bytes(4, "little") + b"."


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(saved({"a": noise(3)}, 4)[0], id="another protocol"),
        pytest.param(saved({1, 2})[0], id="a set"),
        pytest.param(saved({"d": torch.float16, "s": torch.Size((1,))})[0], id="other globals"),
        pytest.param(pickled([_Storage()]), id="a storage as a value"),
        pytest.param(pickled([torch._utils._rebuild_tensor_v2]), id="a function as a value"),
        pytest.param(MEMO_FAR, id="a place in the memo that takes gigabytes"),
        pytest.param(b"\x80\x02]0N.", id="an opcode that torch does not read"),
        pytest.param(b"\x80\x02ccollections\nOrderedDict\n)RK\x01b.", id="a state that is no dict"),
        pytest.param(pickled([(n, n + 1) for n in range(1001)]), id="very many tuples"),
    ],
)
def test_anything_else_is_not_plain(data: bytes) -> None:
    assert not torch_unpickler.scan(data).plain


def text(letters: str) -> bytes:
    return b"X" + struct.pack("<I", len(letters)) + letters.encode()


OD = b"ccollections\nOrderedDict\n"
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
PARAMETER = b"ctorch._utils\n_rebuild_parameter\n"
KIND = b"ctorch\nFloatStorage\n"
STORAGE = b"(" + text("storage") + KIND + text("0") + text("cpu") + b"K\x04tQ"
ARGUMENTS = b"(" + STORAGE + b"K\x00K\x04\x85K\x01\x85\x89" + OD + b")Rt"
TENSOR = REBUILD + ARGUMENTS + b"R"
DOUBLED = b"K\x01\x85q\x05" + b"h\x05h\x05\x86q\x05" * 45

# What is done to the names that a plain pickle may have, and is no part of one.
ATTACKS: dict[str, bytes] = {
    "REDUCE copies a dict": OD + b"}" + text("a") + b"Ns\x85R",
    "REDUCE copies what the memo has": b"}q\x01(" + OD + b"h\x01\x85Rt",
    "REDUCE of a class of storages": KIND + b"K\x05\x85R",
    "REDUCE of a class of storages without arguments": KIND + b")R",
    "REDUCE without arguments of what makes tensors": REBUILD + b")R",
    "REDUCE of what makes tensors with those of a parameter": REBUILD
    + TENSOR
    + b"\x88"
    + OD
    + b")R\x87R",
    "REDUCE of what makes parameters with those of a tensor": PARAMETER + ARGUMENTS + b"R",
    "REDUCE of an OrderedDict with those of a tensor": OD + ARGUMENTS + b"R",
    "REDUCE of a tensor": TENSOR + b"q\x09h\x09)R",
    "REDUCE with hooks that are a tensor": TENSOR + b"q\x09" + TENSOR.replace(OD, b"h\x09"),
    "NEWOBJ of an OrderedDict": OD + b")\x81",
    "NEWOBJ of a class of storages": KIND + b"K\x05\x85\x81",
    "NEWOBJ of what makes tensors": REBUILD + b")\x81",
    "NEWOBJ_EX of an OrderedDict": OD + b")}" + text("a") + b"Ns\x92",
    "NEWOBJ_EX of a class of storages": KIND + b")}\x92",
    "OBJ of an OrderedDict": b"(" + OD + b"o",
    "OBJ of a class of storages": b"(" + KIND + b"K\x05o",
    "INST of an OrderedDict": b"(icollections\nOrderedDict\n",
    "INST of a class of storages": b"(K\x05itorch\nFloatStorage\n",
    "BUILD of what makes tensors": REBUILD + b"}" + text("__code__") + b"Nsb",
    "BUILD of a class of storages": KIND + b"}" + text("dtype") + b"Nsb",
    "BUILD of the class OrderedDict": OD + b"}" + text("copy") + b"Nsb",
    "BUILD of a tensor": TENSOR + b"}" + text("data") + b"Nsb",
    "BUILD of a list": b"]}" + text("append") + b"Nsb",
    "BUILD with slots": OD + b")RN}" + text("__class__") + b"Ns\x86b",
    "BUILD that brings its own __setstate__": OD
    + b")R}"
    + text("__setstate__")
    + REBUILD
    + b"sb}"
    + text("a")
    + b"Nsb",
    "SETITEM of a tensor": TENSOR + b"K\x00K\x01s",
    "APPEND to a tensor": TENSOR + b"K\x00a",
    "a registered extension": b"\x82\x01",
    "a class of storages that is none": TENSOR.replace(KIND, b"ctorch\nEvilStorage\n"),
    "a name of another module": TENSOR.replace(b"ctorch._utils", b"cposix._utils"),
    "a storage of fewer parts": TENSOR.replace(text("cpu"), b""),
    "a storage of no class": TENSOR.replace(KIND, text("FloatStorage")),
    "a storage whose key is a dict": b"}q\x01" + TENSOR.replace(text("0"), b"h\x01"),
    "a storage of fewer elements than none": TENSOR.replace(b"K\x04tQ", b"J\xff\xff\xff\xfftQ"),
    "a storage in the memo": STORAGE + b"q\x03",
    "a function out of the memo": TENSOR.replace(REBUILD, REBUILD + b"q\x02") + b"h\x02\x86",
    "a function out of the memo, by a long name": TENSOR.replace(REBUILD, REBUILD + b"q\x02")
    + b"j\x02\0\0\0\x86",
    "a tensor's arguments out of the memo": TENSOR[:-1] + b"q\x02Rh\x02\x86",
    "a storage's id out of the memo": TENSOR.replace(b"tQ", b"tq\x02Q") + b"h\x02\x86",
    "a key that doubles": b"}" + DOUBLED + b"Ns",
    "keys that double": b"}(" + DOUBLED + b"Nu",
    "a key as deep as it is long": b"}K\x01" + b"\x85" * 200_000 + b"Ns",
    "a place in the memo of gigabytes": b"]r\xff\xff\xff\x3f",
    "a place in the memo of megabytes": b"]r\0\0\x40\0",
    "a place in the memo of a long text": text("x" * 300) + b"r\xff\xff\xff\x3f",
    "a text of gigabytes": b"X\xff\xff\xff\xffabc",
    "a number of gigabytes": b"\x8b\xff\xff\xff\x7f",
    "an end in the middle": b"].]",
    "letters that could each begin a name": text("c" * 1_000_000) + b"0]",
}


HASHED = {"a key that doubles", "keys that double", "a key as deep as it is long"}


@pytest.mark.parametrize("kind", ATTACKS)
def test_what_is_done_to_the_allowed_names_beside_making_tensors_is_not_plain(
    kind: str, path: Path
) -> None:
    """CPython's unpickler would call, build and hash whatever the pickle says."""
    data = b"\x80\x02" + ATTACKS[kind] + b"."
    assert torch_unpickler.scan_plain(data) is None
    checkpoint_with_pickle(path, data, {"0": bytes(16)})
    # torch hashes those for weeks, or ends by a fault of the stack.
    theirs = None if kind in HASHED else outcome(torch.load, path)
    ours = outcome(nvmeio.load, path)
    assert ours == theirs or ours.startswith("raised ")


def outcome(load: Callable[[Path], Any], path: Path) -> str:
    try:
        return repr(load(path))
    except Exception as error:
        return f"raised {type(error).__name__}"


def test_keys_that_are_compared_deeper_than_the_stack_goes_are_no_pickle() -> None:
    """The RecursionError escaped: what is compared are two keys of one hash."""
    equal = sys.hash_info.modulus  # hashed as 0 is
    keys = (b"\x8a\x08" + (n * equal).to_bytes(8, "little") + b"\x85" * 490 for n in (0, 1))
    data = b"\x80\x02}(" + b"N".join(keys) + b"Nu."
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 200)
    try:
        quick = torch_unpickler.scan_plain(data)
        with contextlib.suppress(PickleError):
            pickle_values.scan(data)
    finally:
        sys.setrecursionlimit(limit)
    assert quick is None or sys.version_info >= (3, 12)  # has another stack for it


def test_the_parts_of_these_attacks_are_plain_by_themselves() -> None:
    """So it is what is done to them that is not."""
    for part in (TENSOR, OD + b")R", OD + b")R}" + text("a") + b"Nsb", TENSOR + b"K\x01\x86"):
        assert torch_unpickler.scan_plain(b"\x80\x02" + part + b".") is not None, part


@given(data=st.data())
@settings(max_examples=200)
def test_a_damaged_pickle_is_not_plain_or_says_what_the_slow_way_reads(data: st.DataObject) -> None:
    whole, _ = saved(BEFORE_DAMAGE)
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(2, len(damaged) - 2))
        damaged[at] = data.draw(st.sampled_from(range(256)) | st.sampled_from(list(whole)))
    quick = torch_unpickler.scan_plain(bytes(damaged))
    if quick is not None:
        slow = pickle_values.scan(bytes(damaged))
        assert quick.storages == slow.storages and quick.globals == slow.globals


BEFORE_DAMAGE = {
    "a": noise(20),
    "b": [noise(3), torch.nn.Parameter(noise(2)), (1, 2.5), ("x", (None, True))],
    "c": torch.nn.Linear(2, 3).state_dict(),
}


def test_what_is_read_only_in_texts_costs_next_to_nothing() -> None:
    """Where each letter could begin a name, 8 MB kept the interpreter for more than a second."""

    def cpu_s(letter: bytes) -> float:
        data = b"\x80\x02" + text(letter.decode() * 2_000_000) + b"."
        spent: list[float] = []
        for _ in range(5):
            began = time.process_time()
            assert torch_unpickler.is_plain(data)
            spent.append(time.process_time() - began)
        return min(spent)

    least = cpu_s(b"-")
    assert all(cpu_s(letter) < 20 * least + 0.02 for letter in (b"c", b"t", b"\n"))


def test_a_pickle_of_very_many_bytes_is_not_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython's unpickler lets no other thread run."""
    data, _ = saved([1, 2, 3])
    assert torch_unpickler.scan_plain(data) is not None
    monkeypatch.setattr(torch_unpickler, "_MOST_BYTES", len(data) - 1)
    assert torch_unpickler.scan_plain(data) is None


@pytest.mark.parametrize("where", [None, "cpu", {"cpu": "cpu"}, torch.device("cpu")])
def test_a_load_of_a_torch_pickle_goes_this_way(where: Any, told: list[int], path: Path) -> None:
    state = {"a": noise(10), "b": [noise(3), 1.5, None]}
    torch.save(state, path)
    assert_same(nvmeio.load(path, where), state)
    assert len(told) == 1


def test_what_only_torch_does_is_left_to_torch(told: list[int], path: Path) -> None:
    state = {"a": noise(10)}
    torch.save(state, path)
    assert_same(nvmeio.load(path, lambda storage, location: storage), state)
    assert_same(nvmeio.load(path, weights_only=False), state)
    assert_same(nvmeio.load(path, encoding="latin-1"), state)
    with torch.serialization.skip_data():
        assert nvmeio.load(path)["a"].shape == (10,)
    assert told == []


def test_a_tensor_larger_than_its_storage_is_torchs_error(path: Path) -> None:
    """The unpickler in C raises it first; what the caller sees is of torch's own."""
    checkpoint_with_pickle(path, tensor_pickle(shape=(1000,)), {"0": bytes(16)})
    with pytest.raises(RuntimeError, match="resize"):
        nvmeio.load(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.delattr(torch._weights_only_unpickler, "_get_allowed_globals"),
        lambda m: m.setattr(torch._weights_only_unpickler, "_get_allowed_globals", dict),
    ],
)
def test_a_torch_that_is_not_known_unpickles_by_itself(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, storages = saved({"a": noise(3)})
    change(monkeypatch)
    with pytest.raises(UnknownTorchError):
        unpickle(data, storages, in_place)


def test_a_torch_without_its_own_way_to_restore_still_loads(
    told: list[int], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"a": noise(10)}
    torch.save(state, path)

    def refuse(*arguments: Any) -> Any:
        raise UnknownTorchError

    monkeypatch.setattr(unpickling, "_unpickle_plain", refuse)
    assert_same(nvmeio.load(path), state)
    assert told == []
