"""Objects of every kind that torch.save takes, and how to tell whether one came back."""

from __future__ import annotations

import ctypes
import io
import math
import warnings
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import torch
from support import ALL_DTYPES, QUANTISED, SUB_BYTE, dtype_id, make_tensor, random_bytes

Pair = namedtuple("Pair", "first second")


class Plain(torch.Tensor):
    """A subclass that keeps torch's own memory."""


class Holder:
    """A class of the user's."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.name = "held"


class SavesWithin:
    """Saves its own tensor within its pickle, as skorch's nets do."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __getstate__(self) -> dict[str, bytes]:
        buffer = io.BytesIO()
        torch.save(self.tensor, buffer)
        return {"saved": buffer.getvalue()}

    def __setstate__(self, state: dict[str, bytes]) -> None:
        self.tensor = torch.load(io.BytesIO(state["saved"]))


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    return make_tensor(dtype, random_bytes(nbytes, seed)).reshape(shape)


def containers() -> Any:
    return {
        "list": [noise(3), [noise(4), (noise(5), {"deep": noise(6)})]],
        "ordered": OrderedDict(b=noise(7), a=1),
        "plain": (1, 2.5, True, None, "text ü", b"bytes", 1 << 70, -1, float("inf"), 1j),
        "set": {1, 2, 3},
        3: {"empty": {}, "nothing": [], "no": ()},
        "shape": torch.Size([1, 2]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
    }


def tied() -> Any:
    base = noise(1000, 3)
    big = noise(700_001)
    return {
        "base": base,
        "again": base,
        "rows": base[5:7],
        "transposed": base.t(),
        "every other": base[::2, 1],
        "big": big,
        "big's end": big[-3:],
        "expanded": noise(1).expand(50),
        "parameter": torch.nn.Parameter(base),
    }


def odd_shapes() -> Any:
    return {
        "empty": torch.empty(0),
        "empty 2d": torch.empty(3, 0, 2),
        "scalar": torch.tensor(3.5),
        "one byte": noise(1, dtype=torch.uint8),
        "channels last": noise(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "requires grad": noise(3).requires_grad_(),
        "conjugate": noise(4, dtype=torch.complex64).conj(),
        "negative": noise(4, dtype=torch.complex64).imag.neg(),
        "negated view": torch._neg_view(noise(4)),
        "shared": noise(9).share_memory_(),
    }


def sparse() -> Any:
    dense = torch.eye(6) * torch.arange(6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the layouts are in beta
        return {
            "coo": dense.to_sparse(),
            "uncoalesced": torch.sparse_coo_tensor([[0, 0]], noise(2), (3,)),
            "csr": dense.to_sparse_csr(),
            "csc": dense.to_sparse_csc(),
            "bsr": dense.to_sparse_bsr((2, 2)),
        }


def quantised() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates them
        return {
            "per tensor": torch.quantize_per_tensor(torch.randn(5, 3), 0.1, 3, torch.quint8),
            "per channel": torch.quantize_per_channel(
                torch.randn(4, 600), torch.rand(4), torch.zeros(4, dtype=torch.long), 0, torch.qint8
            ),
        }


def training() -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(50, 60), torch.nn.BatchNorm1d(60))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for _ in range(2):
        model(torch.randn(8, 50)).square().sum().backward()
        optimizer.step()
        schedule.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "rng": torch.get_rng_state(),
        "step": 2,
    }


def sizes() -> Any:
    """Around every boundary that matters: pages, bodies, chunks, stagings."""
    edges = (4096, 1 << 20, (1 << 20) + 4096, 4 << 20, 16 << 20)
    counts = sorted({max(edge + d, 1) for edge in edges for d in (-4097, -1, 0, 1, 4095)})
    return {count: noise(count, dtype=torch.uint8, seed=count) for count in counts}


def many_small() -> Any:
    return {f"layer.{i}": noise(i % 7, seed=i) for i in range(700)}


def subclassed() -> Any:
    return {"plain": noise(5).as_subclass(Plain), "parameter": torch.nn.Parameter(noise(3))}


def wrapped() -> Any:
    from torch.testing._internal.two_tensor import TwoTensor

    return {"two": TwoTensor(noise(5), noise(5, seed=1)), "beside": noise(2)}


def user_classes() -> Any:
    return {
        "holder": Holder(noise(300)),
        "pair": Pair(noise(2), noise(3)),
        "module": torch.nn.Linear(30, 40),
        "default": defaultdict(list, a=[noise(2)]),
    }


def saves_within() -> Any:
    return {"outer": noise(2000), "net": SavesWithin(noise(1500, seed=3)), "after": noise(2001)}


def storages() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TypedStorage is deprecated
        return {"untyped": noise(10).untyped_storage(), "typed": noise(11).storage()}


SAFE: dict[str, Callable[[], Any]] = {
    "containers": containers,
    "tied": tied,
    "odd shapes": odd_shapes,
    "sparse": sparse,
    "quantised": quantised,
    "training": training,
    "sizes": sizes,
    "many small": many_small,
    "nothing": dict,
    "a tensor": lambda: noise(3),
    "a number": lambda: 7,
}
UNSAFE: dict[str, Callable[[], Any]] = {
    "subclassed": subclassed,
    "wrapped": wrapped,
    "user's classes": user_classes,
    "saves within": saves_within,
    "storages": storages,
}


def of_dtype(dtype: torch.dtype) -> Any:
    return {"a": make_tensor(dtype, random_bytes(96)), "b": make_tensor(dtype, random_bytes(8192))}


SAVED_DTYPES = [dtype for dtype in ALL_DTYPES if dtype not in SUB_BYTE]

__all__ = ["QUANTISED", "SAFE", "SAVED_DTYPES", "UNSAFE", "dtype_id", "of_dtype"]


# Comparing


def assert_same(found: Any, wanted: Any, where: str = "it") -> None:
    """The same types, values, bytes, shapes and strides."""
    if isinstance(wanted, torch.UntypedStorage):  # torch itself brings it back as a typed one
        found = getattr(found, "_untyped_storage", found)
    assert type(found) is type(wanted), where
    if isinstance(wanted, torch.Tensor):
        _assert_same_tensor(found, wanted, where)
    elif isinstance(wanted, torch.UntypedStorage):
        assert bytes_of_storage(found) == bytes_of_storage(wanted), where
    elif isinstance(wanted, torch.storage.TypedStorage):
        assert_same(found._untyped_storage, wanted._untyped_storage, where)
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted), where
        for key, value in wanted.items():
            assert_same(found[key], value, f"{where}[{key!r}]")
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted), where
        for index, value in enumerate(wanted):
            assert_same(found[index], value, f"{where}[{index}]")
    elif isinstance(wanted, torch.nn.Module):
        assert_same(found.state_dict(), wanted.state_dict(), where)
    elif isinstance(wanted, (Holder, SavesWithin)):
        assert_same(vars(found), vars(wanted), where)
    else:
        assert found == wanted, where


def _assert_same_tensor(found: torch.Tensor, wanted: torch.Tensor, where: str) -> None:
    for name in ("dtype", "shape", "layout", "requires_grad", "device"):
        assert getattr(found, name) == getattr(wanted, name), (where, name)
    if hasattr(wanted, "__tensor_flatten__"):
        for name in wanted.__tensor_flatten__()[0]:
            assert_same(getattr(found, name), getattr(wanted, name), f"{where}.{name}")
        return
    if wanted.layout is not torch.strided:
        assert torch.equal(found.to_dense(), wanted.to_dense()), where
        return
    assert found.stride() == wanted.stride(), where
    assert (found.is_conj(), found.is_neg()) == (wanted.is_conj(), wanted.is_neg()), where
    if wanted.is_quantized:
        assert found.qscheme() == wanted.qscheme(), where
        assert torch.equal(found.int_repr(), wanted.int_repr()) or wanted.dtype in (
            torch.quint4x2,
            torch.quint2x4,
        ), where
    start = wanted.storage_offset() * wanted.element_size()
    assert found.storage_offset() == wanted.storage_offset(), where
    storages = found.untyped_storage(), wanted.untyped_storage()
    assert bytes_of_storage(storages[0])[start:] == bytes_of_storage(storages[1])[start:], where


def bytes_of_storage(storage: torch.UntypedStorage) -> bytes:
    return ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""


def assert_tied(found: dict[str, Any]) -> None:
    """`tied` came back with its ties."""
    base = found["base"].untyped_storage().data_ptr()
    for name in ("again", "rows", "transposed", "every other", "parameter"):
        assert found[name].untyped_storage().data_ptr() == base, name
    assert found["big"].untyped_storage().data_ptr() == (
        found["big's end"].untyped_storage().data_ptr()
    )
