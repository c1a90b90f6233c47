"""Mixtures of experts: which modules are experts, and which experts the tokens of a call go to.

Experts are fused, parameters [experts, ...] of one module that is called with the experts of each
token; or they are modules of their own in a `ModuleList` called "experts", which are called one by
one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeGuard

from torch import nn

from nvmeio._pages import PAGE_BYTES

# A parameter whose share of an expert is smaller (a bias) stays with its layer: reading it by
# itself would cost a round trip for next to nothing.
LEAST_BYTES = 2 * PAGE_BYTES

# The names in transformers' modules of experts for the experts that each token is routed to.
_ROUTING = ("top_k_index", "router_indices")


def fused_experts(module: nn.Module) -> int:
    """How many experts a module computes with that is called with the routing; 0 for another."""
    number = getattr(module, "num_experts", None)
    if not isinstance(number, int) or number < 2 or routing_argument(module.forward) is None:
        return 0
    return number


def is_list_of_experts(module: nn.Module, name: str) -> TypeGuard[nn.ModuleList]:
    """Whether it has several experts that are modules of their own; `name` is within the model."""
    return (
        isinstance(module, nn.ModuleList)
        and len(module) > 1
        and name.rpartition(".")[2] == "experts"
    )


def routing_argument(forward: Callable[..., object]) -> str | None:
    """The argument that has the experts of each token; None if there is none."""
    takes = inspect.signature(forward).parameters
    return next((name for name in _ROUTING if name in takes), None)


def attach(module: nn.Module, compute: Callable[..., Any]) -> None:
    """Have `compute(routing, call, ...)` call a module's forward, behind hooks that may route."""
    call = module.forward
    signature = inspect.signature(call)
    name = routing_argument(call) or ""
    place = list(signature.parameters).index(name)

    def forward(*args: Any, **kwargs: Any) -> Any:
        routing = kwargs[name] if len(args) <= place else args[place]
        return compute(routing, call, *args, **kwargs)

    forward.__signature__ = signature  # type: ignore[attr-defined]
    module.forward = forward
