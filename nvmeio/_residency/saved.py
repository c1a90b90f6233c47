"""What autograd keeps of a forward pass: of memory that comes and goes, where to find it again.

While the hooks of `saving` are in force, a tensor that autograd wants to keep is looked at: if it
lies over a unit's memory, its place there is kept instead, and backward has the unit brought back.
Everything else is kept as it would be without, by the hooks around these (of a checkpoint, say).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from nvmeio._residency import calls


class Origin(Protocol):
    """Whose memory a tensor lies over."""

    def memory(self) -> torch.Tensor:
        """The memory, with the same bytes as then, brought back if need be.

        They stay what they are for as long as its storage lives.
        """


class Place:
    """Where a tensor lies in its storage."""

    __slots__ = ("_dtype", "_offset", "_stride", "size")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._dtype = tensor.dtype
        self._offset = int(tensor.storage_offset())
        self.size = tuple(tensor.shape)
        self._stride = tuple(tensor.stride())

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The same tensor over a storage with the same bytes."""
        found = torch.empty(0, dtype=self._dtype, device=storage.device)
        return found.set_(storage, self._offset, self.size, self._stride)


class _Elsewhere:
    """A tensor over memory that goes."""

    __slots__ = ("_origin", "_place", "_shown")

    def __init__(self, origin: Origin, tensor: torch.Tensor) -> None:
        self._origin = origin
        self._place = Place(tensor)
        self._shown: torch.Tensor | None = None  # has the version of what was given out, alone

    def get(self) -> torch.Tensor:
        """The tensor, unless what an earlier backward got was changed by it."""
        if self._shown is not None:
            check_unchanged(self._shown, 0, self._place.size)
        found = self._place.over(self._origin.memory().untyped_storage())
        if self._shown is None:
            self._shown = torch.empty(0, dtype=found.dtype, device=found.device)
        shown = self._shown.detach()
        shown.data = found
        return shown


class Kept:
    """A tensor, as autograd keeps it without hooks.

    An output is kept without its history, which has this: a circle through C++ is never freed. And
    torch itself looks for changes only where there are no hooks.
    """

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor if tensor.is_leaf else tensor.detach()
        self._version = tensor._version

    def get(self) -> torch.Tensor:
        """It, unless it was changed."""
        check_unchanged(self._tensor, self._version, tuple(self._tensor.shape))
        return self._tensor


class _Foreign:
    """What the hooks around ours keep of a tensor."""

    __slots__ = ("_unpack", "_value")

    def __init__(self, hooks: Any, tensor: torch.Tensor) -> None:
        pack, self._unpack = hooks
        self._value = pack(tensor)

    def get(self) -> torch.Tensor:
        theirs: torch.Tensor = self._unpack(self._value)
        return theirs


def kept(tensor: torch.Tensor, around: Any) -> Kept | _Foreign:
    """A tensor that is kept as it would be without our hooks; `get` gives it back.

    Args:
        tensor: Which.
        around: The hooks around ours; see `calls.saved_tensors_hooks_around`.
    """
    return Kept(tensor) if around is None else _Foreign(around, tensor)


def check_unchanged(tensor: torch.Tensor, version: int, shape: tuple[int, ...]) -> None:
    """Refuse what was changed in place since it was kept, as torch does without hooks.

    Args:
        tensor: It, or another one that shares its version.
        version: Then.
        shape: Of what was kept.
    """
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: [{str(tensor.dtype)[6:]} {list(shape)}] is at version {tensor._version}; "
            f"expected version {version} instead. Hint: enable anomaly detection to find the "
            "operation that failed to compute its gradient, with "
            "torch.autograd.set_detect_anomaly(True)."
        )


def saving(origin_of: Callable[[int, int], Origin | None]) -> calls.Undone:
    """Have autograd keep places, while what this returns lives.

    Args:
        origin_of: Asked of each tensor, with the address at which its storage begins and the byte
            there at which the tensor does. None: it is kept as it is.
    """
    around = calls.saved_tensors_hooks_around()

    def pack(tensor: torch.Tensor) -> Any:
        if has_memory(tensor):
            offset = int(tensor.storage_offset())
            address = tensor.untyped_storage().data_ptr()
            origin = origin_of(address, offset * tensor.dtype.itemsize)
            if origin is not None:
                return _Elsewhere(origin, tensor)
        return kept(tensor, around)

    return calls.saved_tensors_hooks(pack, unpack)


def unpack(saved: Any) -> torch.Tensor:
    """What backward gets of what was kept."""
    found: torch.Tensor = saved.get()
    return found


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether it is a tensor like any other, over memory that has an address."""
    plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return plain and tensor.layout is torch.strided and not tensor.is_meta


def in_backward() -> bool:
    """Whether this thread is in the middle of a backward pass."""
    ask: Any = getattr(torch._C, "_current_graph_task_id", None)
    return ask is not None and bool(ask() != -1)
