"""Copies of modules of a streamed model: in memory, whole, and nothing of the stream's in them.

An adapter may train a copy of a head or of a norm. What the stream has put into a module (the
wrapper around its call, the refusal of `to`, hooks on its state) is of that module: a copy that had
it would compute with the original's weights.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from nvmeio._residency.saved import Origin
from nvmeio.inference._modules.stand_ins import read_buffer

_OURS = "nvmeio."
# Put into instances by the stream, whatever they are wrapped in by now.
_SEAMS = {"_call_impl", "_apply", "__deepcopy__"}


def allow(module: nn.Module, buffers: Mapping[str, Origin]) -> None:
    """Let `copy.deepcopy` of a module make one that is in memory.

    Args:
        module: Of a streamed model.
        buffers: Those that are on disk, and where.
    """
    module.__deepcopy__ = functools.partial(_copy_of, module, buffers)  # type: ignore[assignment]


def _copy_of(module: nn.Module, buffers: Mapping[str, Origin], memo: dict[int, Any]) -> nn.Module:
    own = module.__dict__
    if "weight_stream" in own:
        raise TypeError(
            "a streamed model cannot be copied, since its weights are on disk: call stream_model "
            "again, with a share of the memory for each"
        )
    made = module.__new__(type(module))
    memo[id(module)] = made
    for name, value in own.items():
        if name in _SEAMS or _is_ours(value):
            continue
        if isinstance(value, dict) and name.endswith("_hooks"):
            value = type(value)((k, hook) for k, hook in value.items() if not _is_ours(hook))
        if name == "_buffers":
            value = {
                k: read_buffer(buffers[k]) if k in buffers and b is not None and b.is_meta else b
                for k, b in value.items()
            }
        made.__dict__[name] = copy.deepcopy(value, memo)
    return made


def _is_ours(value: Any) -> bool:
    """Whether a function, a hook or a method in an instance is of a stream."""
    while callable(value) and (isinstance(value, functools.partial) or hasattr(value, "hook")):
        value = value.func if isinstance(value, functools.partial) else value.hook
    if not callable(value) or isinstance(value, (type, nn.Module, torch.Tensor)):
        return False
    return str(getattr(value, "__module__", None)).startswith(_OURS)
