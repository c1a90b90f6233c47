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


def using(stream: WeightStream, unit: Unit) -> Callable[..., Any]:
    """What calls a function, given before its arguments, with the weights of a unit."""

    def again(saves: bool, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        running = calls.Running(stream.use(unit), again)
        try:
            kept = saving(stream.origin_of) if saves else None
            try:
                return own(call(*args, **kwargs), unit)
            finally:
                del kept
        finally:
            del running

    return functools.partial(again, True)


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
