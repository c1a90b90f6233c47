"""The seam to a model whose adapters are trained over a streamed base.

Autograd keeps places of weights in memory's stead (`_residency.saved`), and backward has them
brought back. The base belongs to its checkpoint: no state dict holds it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Set
from typing import Any

from torch import nn

from nvmeio._residency import calls
from nvmeio._residency.saved import saving
from nvmeio.inference._modules.outputs import own
from nvmeio.inference._plan.units import Unit
from nvmeio.inference.stream import WeightStream


def attach(stream: WeightStream, unit: Unit, module: nn.Module) -> None:
    """Have the call of a unit's module use its weights, and what its checkpointing runs again."""

    def around(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        checkpointing.prepare()
        return with_weights(stream, unit, call, *args, **kwargs)

    checkpointing = calls.Checkpointing(module, functools.partial(with_weights, stream, unit))
    calls.wrap(module, around)


def with_weights(
    stream: WeightStream, unit: Unit, call: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call what needs the weights of a unit."""
    use = stream.use(unit)
    try:
        kept = saving(stream.origin_of)
        try:
            return own(call(*args, **kwargs), unit)
        finally:
            del kept
    finally:
        del use


def whole_pass(stream: WeightStream, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the model."""
    try:
        found = call(*args, **kwargs)
    except Exception:
        stream.end_pass()
        raise
    stream.end_pass()
    return found


def leave_out(module: nn.Module, names: Set[str]) -> None:
    """Have a module's state dict without weights that are the checkpoint's; none misses them."""
    prefixes: list[str] = []

    def saved(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        for name in names:
            state.pop(prefix + name, None)

    def begin(_: nn.Module, __: Any, prefix: str, *___: Any) -> None:
        prefixes[:] = [prefix]

    def loaded(_: nn.Module, incompatible: Any) -> None:
        missing = incompatible.missing_keys
        missing[:] = [key for key in missing if key not in {p + n for p in prefixes for n in names}]

    module.register_state_dict_post_hook(saved)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(begin)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_post_hook(loaded)  # type: ignore[no-untyped-call]
