"""The seam between a model and its stream: forward hooks, which leave its code as it is."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from nvmeio.inference._units import Unit
from nvmeio.inference.stream import WeightStream


def attach(model: nn.Module, stream: WeightStream) -> None:
    """Have a model's forward use the stream.

    The model is then the stream's owner: hooks refer to it, and when the model goes, it is closed.
    """
    for unit in stream.units:
        for module in unit.modules:
            _attach_to(module, unit, stream)
        for embedding in unit.row_modules:
            _attach_rows(embedding, unit, stream)
        if unit.experts is not None:
            _attach_experts(unit.experts.module, unit, stream)
    model.register_forward_pre_hook(_beginning(stream), prepend=True, with_kwargs=True)
    model.register_forward_hook(_ending(stream), always_call=True)


def _attach_to(module: nn.Module, unit: Unit, stream: WeightStream) -> None:
    def before(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and any(t.requires_grad for t in _tensors((arguments, named))):
            raise RuntimeError(
                f"{unit.name!r} is streamed for inference and has no gradients: its weights are "
                "gone "
                "when a backward pass would need them. Call the model under torch.no_grad()"
            )
        stream.enter(unit, sys._getframe(1))

    def after(_: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
        kept = _own(output, unit)
        stream.leave(unit)
        return kept

    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    module.register_forward_hook(after, always_call=True)


def _attach_rows(module: nn.Embedding, unit: Unit, stream: WeightStream) -> None:
    """An embedding that is not in memory looks its tokens up on the drive."""

    def forward(input: torch.Tensor) -> torch.Tensor:
        if unit.resident:
            stream.enter(unit)
            try:
                return nn.Embedding.forward(module, input)
            finally:
                stream.leave(unit)
        rows, places = stream.rows(unit, input)
        return functional.embedding(places, rows)

    module.forward = forward  # type: ignore[method-assign]


def _attach_experts(module: nn.Module, unit: Unit, stream: WeightStream) -> None:
    def before(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        routed = named["top_k_index"] if "top_k_index" in named else arguments[1]
        stream.need_experts(unit, routed)

    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)


def _beginning(stream: WeightStream) -> Any:
    def before(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        stream.begin_pass(named.get("past_key_values"))

    return before


def _ending(stream: WeightStream) -> Any:
    def after(_: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        stream.end_pass()

    return after


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _own(output: Any, unit: Unit) -> Any:
    """The output, with a copy in the place of what is a view of a weight that is about to go."""
    if unit.resident:
        return None
    shown = [t.module._parameters.get(t.attribute) for t in unit.targets if not t.is_buffer]
    # Weights of one unit lie in one mapping; converted ones in the room for conversions.
    storages = {t.untyped_storage().data_ptr() for t in shown if t is not None and not t.is_meta}

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
        t.untyped_storage().data_ptr() in storages for t in _tensors(output) if not t.is_meta
    ):
        return None
    return copied(output)
