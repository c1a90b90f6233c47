"""A plain torch pickle into its object, by CPython's own unpickler.

torch's ``weights_only`` unpickler is written in Python: 100 us a tensor. A pickle that was found
plain (`torch_pickle.Scan`) has nothing that it would refuse: it refers to the functions and classes
of `COMMON_GLOBALS` only, calls no others, and does nothing but put dicts, lists, tuples, numbers,
texts and dense tensors together. Of that the unpickler written in C makes the same object.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nvmeio._formats.pickle_values import REBUILD

Restore = Callable[[torch.UntypedStorage, str], torch.UntypedStorage]


class UnknownTorchError(Exception):
    """This torch is not as it is known here: let it unpickle itself."""


def unpickle(data: bytes, storages: Mapping[str, torch.Tensor], restore: Restore) -> Any:
    """The object of a plain pickle.

    Args:
        data: The pickle, scanned, and found plain.
        storages: The bytes of all storages that it refers to, by key, on whatever device.
        restore: What torch makes of a storage and the location that it was saved from.

    Raises:
        UnknownTorchError: torch has no table of what it allows, or not all of this in it.
        Exception: A tensor cannot be as it says; torch's own unpickler tells how.

    Cost: 15 us a tensor.
    """
    return _Unpickler(data, storages, restore).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, storages: Mapping[str, torch.Tensor], restore: Restore) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._storages = storages
        self._restore = restore
        self._loaded: dict[str, _Loaded] = {}
        self._allowed = _allowed()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == REBUILD:
            return _rebuilt
        try:
            return self._allowed[f"{module}.{name}"]
        except KeyError:
            raise UnknownTorchError(f"torch does not allow {module}.{name}") from None

    def persistent_load(self, told: Any) -> Any:
        _, kind, key, location, numel = told
        known = self._loaded.get(key)
        if known is not None:
            return known
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        data = self._storages[key]
        if data.nbytes != numel * dtype.itemsize:
            raise ValueError(f"storage {key} has {data.nbytes} bytes, not {numel} of {dtype}")
        loaded = (self._restore(data.untyped_storage(), location), dtype)
        if data.nbytes:  # torch makes one that is empty anew each time
            self._loaded[key] = loaded
        return loaded


_Loaded = tuple[torch.UntypedStorage, torch.dtype]


def _rebuilt(
    loaded: _Loaded,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    hooks: OrderedDict[Any, Any],
    metadata: dict[str, bool] | None = None,
) -> torch.Tensor:
    """As `torch._utils._rebuild_tensor_v2`, which looks for a fake mode three times."""
    storage, dtype = loaded
    tensor = torch.empty((0,), dtype=dtype, device=storage.device)
    tensor.set_(storage, offset, size, stride)
    if requires_grad:
        tensor.requires_grad = True
    if metadata:
        set_metadata: Any = torch._utils.set_tensor_metadata
        set_metadata(tensor, metadata)
    tensor._backward_hooks = hooks
    return tensor


def _allowed() -> Mapping[str, Any]:
    """What torch's own unpickler makes of the names that it allows."""
    unpickler: Any = getattr(torch, "_weights_only_unpickler", None)
    ask = getattr(unpickler, "_get_allowed_globals", None)
    if ask is None or not hasattr(torch._utils, "set_tensor_metadata"):
        raise UnknownTorchError("no table of allowed globals")
    found: Mapping[str, Any] = ask()
    return found
