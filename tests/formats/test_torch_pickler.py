"""The shorter way to pickle plain tensors: what it gives is torch's, and where torch's is taken."""

from __future__ import annotations

import copyreg
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoint._objects import SAFE

from nvmeio._formats.torch_archives import torch_layout, torch_pickler


def pickled(state: object) -> bytes:
    """What is pickled for a checkpoint."""
    return torch_layout.pickled(state).data


def by_torch(state: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    record: bytes = torch._C.PyTorchFileReader(buffer).get_record("data.pkl")
    return record


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A list that grows with each tensor that takes the shorter way."""
    torch_pickler.agrees()  # by now
    made: list[object] = []
    real = torch_pickler.Typed.__init__

    def count(self: Any, *args: Any) -> None:
        made.append(self)
        real(self, *args)

    monkeypatch.setattr(torch_pickler.Typed, "__init__", count)
    return made


@pytest.mark.parametrize("kind", sorted(SAFE.keys() - {"sizes", "training"}))
def test_the_pickle_is_torchs(kind: str) -> None:
    state = SAFE[kind]()
    assert pickled(state) == by_torch(state)


def test_this_torch_is_known(counted: list[object]) -> None:
    """Were it not, all would be right, and only be slow."""
    assert torch_pickler.agrees()
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    others = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    state: list[Any] = [torch.ones(3, dtype=dtype) for dtype in floats + others]
    state.append(torch.nn.Parameter(torch.ones(2)))
    assert pickled(state) == by_torch(state)
    assert len(counted) == 11


def with_attribute() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.told = "a"  # type: ignore[attr-defined]
    return tensor


def with_hook() -> torch.Tensor:
    tensor = torch.ones(3, requires_grad=True)
    tensor.register_hook(torch.abs)
    return tensor


OTHERS: dict[str, Callable[[], torch.Tensor]] = {
    "attribute": with_attribute,
    "hook": with_hook,
    "conjugate": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "negative": lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
    "newer dtype": lambda: torch.ones(3, dtype=torch.uint16),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.ones(3, device="meta"),
    "buffer": lambda: torch.nn.Buffer(torch.ones(3)),
}


@pytest.mark.parametrize("kind", sorted(OTHERS))
def test_other_tensors_are_pickled_by_torch(kind: str, counted: list[object]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = [OTHERS[kind]()]
        # What a sparse tensor is made of is plain.
        assert pickled(state) == by_torch(state)
    assert len(counted) == (2 if kind == "sparse" else 0)


def test_under_a_mode_torch_pickles(counted: list[object]) -> None:
    state = [torch.ones(3)]
    with torch.device("meta"):
        found = pickled(state)
    assert found == by_torch(state)
    assert not counted


def test_somebody_who_registered_is_asked(
    counted: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(copyreg.dispatch_table, torch.Tensor, lambda tensor: (int, ("7",)))
    state = [torch.ones(3)]
    assert pickled(state) == by_torch(state)
    assert b"7" in pickled(state) and not counted


def test_a_method_that_somebody_replaced_is_called(
    counted: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "__reduce_ex__", lambda self, protocol: (int, ("7",)))
    state = [torch.ones(3)]
    assert pickled(state) == by_torch(state)
    assert not counted


def test_storages_with_a_place_of_their_own_are_torchs(
    counted: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = torch.serialization._package_registry
    monkeypatch.setattr(
        torch.serialization,
        "_package_registry",
        [(0, lambda storage: "elsewhere", lambda storage, place: None), *registry],
    )
    state = [torch.ones(3)]
    assert b"elsewhere" in pickled(state)
    assert not counted


def test_a_torch_that_pickles_otherwise_does_it_itself(
    counted: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_pickler.found_to_agree.cache_clear()
    monkeypatch.setattr(torch_pickler, "_pickle_of", lambda module: object())
    try:
        assert not torch_pickler.agrees()
        state = [torch.ones(3)]
        assert pickled(state) == by_torch(state)
        assert not counted
    finally:
        torch_pickler.found_to_agree.cache_clear()


def test_a_comparison_that_failed_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It failed for want of memory, and every save of the process was slow from then on."""

    def no_memory(module: Any) -> bytes:
        raise MemoryError

    torch_pickler.found_to_agree.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(torch_pickler, "_pickle_of", no_memory)
        assert not torch_pickler.agrees()
    assert torch_pickler.agrees()


def test_one_storage_with_two_dtypes_is_refused_as_by_torch() -> None:
    tensor = torch.ones(4)
    with pytest.raises(RuntimeError, match="different types"):
        pickled([tensor, tensor.view(torch.int32)])
