"""The tensors in what modules are given and return."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from nvmeio.inference._modules.stand_ins import is_meta
from nvmeio.inference._plan.units import Unit


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Those in arguments or outputs."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def own(output: Any, unit: Unit) -> Any:
    """The output, with a copy in the place of what is a view of a weight that is about to go."""
    if unit.resident:
        return output
    shown = [t.module._parameters.get(t.attribute) for t in unit.targets if not t.is_buffer]
    # Weights of one unit lie in one mapping; converted ones in the room for conversions.
    storages = {t.untyped_storage().data_ptr() for t in shown if t is not None and not is_meta(t)}

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            same = not value.is_meta and value.untyped_storage().data_ptr() in storages
            return value.clone() if same else value
        if isinstance(value, tuple):
            parts = [copied(part) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if isinstance(value, list):
            return [copied(part) for part in value]
        if isinstance(value, dict):  # transformers' outputs are dicts with attributes
            found = copy.copy(value)
            for key, part in value.items():
                found[key] = copied(part)
            return found
        return value

    if not any(
        t.untyped_storage().data_ptr() in storages for t in tensors_in(output) if not t.is_meta
    ):
        return output
    return copied(output)
