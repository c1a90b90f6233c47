"""What autograd keeps of parameters that come and go: where to find them, in place of memory.

While the hooks of `saving` are in force, a tensor that autograd wants to keep is looked at: if it
lies over a unit's memory, its place there is kept instead, and backward has the unit brought back.
Everything else is kept as it would be without, by the hooks around these (of a checkpoint, say).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from nvmeio._residency import calls


class Origin(Protocol):
    """Whose memory a tensor lies over."""

    def memory(self) -> torch.Tensor:
        """The memory, with the same bytes as then, brought back if need be.

        They stay what they are for as long as its storage lives.
        """


class _Place(NamedTuple):
    """Of a tensor over memory that goes."""

    origin: Origin
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class _Foreign:
    """What the hooks around ours keep of a tensor."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def saving(origin_of: Callable[[int, int], Origin | None]) -> calls.Undone:
    """Have autograd keep places, while what this returns lives.

    Args:
        origin_of: Asked of each tensor, with the address at which its storage begins and the byte
            there at which the tensor does. None: it is kept as it is.
    """
    others = calls.saved_tensors_hooks_around()

    def pack(tensor: torch.Tensor) -> Any:
        if _has_memory(tensor):
            offset = int(tensor.storage_offset())
            address = tensor.untyped_storage().data_ptr()
            origin = origin_of(address, offset * tensor.dtype.itemsize)
            if origin is not None:
                size, stride = tuple(tensor.shape), tuple(tensor.stride())
                return _Place(origin, tensor.dtype, offset, size, stride)
        return tensor if others is None else _Foreign(others[0](tensor))

    def unpack(saved: Any) -> torch.Tensor:
        if isinstance(saved, _Place):
            memory = saved.origin.memory()
            found = torch.empty(0, dtype=saved.dtype, device=memory.device)
            with torch.no_grad():
                found.set_(memory.untyped_storage(), saved.offset, saved.size, saved.stride)
            return found
        if isinstance(saved, _Foreign):
            theirs: torch.Tensor = others[1](saved.value)
            return theirs
        kept: torch.Tensor = saved
        return kept

    return calls.saved_tensors_hooks(pack, unpack)


def _has_memory(tensor: torch.Tensor) -> bool:
    plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return plain and tensor.layout is torch.strided and not tensor.is_meta


def in_backward() -> bool:
    """Whether this thread is in the middle of a backward pass."""
    ask: Any = getattr(torch._C, "_current_graph_task_id", None)
    return ask is not None and bool(ask() != -1)
