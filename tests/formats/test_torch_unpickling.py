"""Plain pickles, which CPython's unpickler makes objects of: which they are, and what it makes."""

from __future__ import annotations

import copyreg
import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint._archives import checkpoint_with_pickle, tensor_pickle
from checkpoint._objects import SAFE, assert_same, noise

import nvmeio
from nvmeio._formats import torch_pickle, torch_unpickling
from nvmeio._formats.torch_unpickling import UnknownTorchError, unpickle
from nvmeio.checkpoint._load import unpickling

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
        data: bytes, storages: Mapping[str, torch.Tensor], restore: torch_unpickling.Restore
    ) -> Any:
        made = unpickle(data, storages, restore)
        lengths.append(len(data))
        return made

    monkeypatch.setattr(torch_unpickling, "unpickle", watched)
    return lengths


@pytest.mark.parametrize("kind", PLAIN)
def test_what_torch_save_writes_of_dense_tensors_is_plain_and_made_the_same(kind: str) -> None:
    state = SAFE[kind]()
    data, storages = saved(state)
    assert torch_pickle.scan(data).plain
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
    ],
)
def test_anything_else_is_not_plain(data: bytes) -> None:
    assert not torch_pickle.scan(data).plain


@pytest.mark.parametrize("where", [None, "cpu", {"cpu": "cpu"}, torch.device("cpu")])
def test_a_load_of_a_plain_pickle_goes_this_way(where: Any, told: list[int], path: Path) -> None:
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
