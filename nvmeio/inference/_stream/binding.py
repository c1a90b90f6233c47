"""Weights into the modules that show them, and out; their names, for what goes wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from nvmeio.inference._plan.units import Target, Unit
from nvmeio.inference._stream.stand_ins import Elsewhere, Frozen, FrozenElsewhere, is_meta

# Tensors that an error names; a layer is read as one and rarely has more.
_NAMED = 16


def freeze(unit: Unit, device: torch.device) -> None:
    """Let all parameters of a unit need no gradient, and say that they are where it computes."""
    _replace(unit, device, FrozenElsewhere)
    for target in unit.targets:
        if not target.is_buffer:
            target.empty.requires_grad_(False)


def check_frozen(targets: Sequence[Target], shown: Sequence[torch.Tensor] | None = None) -> None:
    """Raise where somebody wants gradients of weights: of what stands for them, or is shown."""
    tensors = [target.empty for target in targets] if shown is None else shown
    for target, tensor in zip(targets, tensors, strict=True):
        if tensor.requires_grad:
            raise RuntimeError(
                f"{target.attribute!r} of a {type(target.module).__name__} requires gradients, and "
                "is read from its checkpoint each time: nobody would have them. Train adapters, or "
                "put a module of your own in its place; requires_grad_(False) takes it back"
            )


def stand_in(unit: Unit, device: torch.device) -> None:
    """Let what computes with a unit's weights while they are on disk be an error.

    They say that they are where it computes: adapters are made there.
    """
    _replace(unit, device, Elsewhere)


def _replace(unit: Unit, device: torch.device, kind: type[Elsewhere]) -> None:
    made: dict[int, Elsewhere] = {}
    for index, target in enumerate(unit.targets):
        own = type(target.empty) is not nn.Parameter and not unit.row_modules
        if target.is_buffer or (own and kind is Elsewhere):
            continue
        if target.weight not in made:
            empty = kind(target.empty.detach(), target.empty.requires_grad)
            empty.on_device = device
            made[target.weight] = empty
        target.module._parameters[target.attribute] = made[target.weight]
        unit.targets[index] = target._replace(empty=made[target.weight])


def count_changes(targets: list[Target]) -> None:
    """Note what stands for parameters as it is, for `check_absent`; batch norm sets its buffers."""
    for index, target in enumerate(targets):
        if not target.is_buffer:
            targets[index] = target._replace(version=_version(target.empty))


def check_absent(targets: Sequence[Target]) -> None:
    """Raise where what stands for weights that are on disk was replaced, or changed in place.

    Such a change (`copy_`, an initialisation, adapters that are merged) would be lost.
    """
    check(targets, [target.empty for target in targets])
    with torch._C.DisableTorchFunctionSubclass():  # else each look goes through Python
        for module, attribute, _, _, empty, version in targets:
            if version is not None and (not is_meta(empty) or _version(empty) != version):
                raise RuntimeError(
                    f"{attribute!r} of a {type(module).__name__} was changed in place after its "
                    "model was streamed, while its bytes are on disk: the weights that are used "
                    "are those of the checkpoint. Change them there, and stream the model anew"
                )


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def install(targets: Sequence[Target], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Let modules show tensors.

    Parameters have the `requires_grad` that they have where they are loaded: torch chooses the
    kernel of a matrix product by it, with autograd off as well.

    Returns:
        What is shown, for each target.

    Raises:
        RuntimeError: Something else was put in the place of a weight.
    """
    check_absent(targets)
    parameters: dict[int, nn.Parameter] = {}
    shown: list[torch.Tensor] = []
    with torch._C.DisableTorchFunctionSubclass():  # as above
        for module, attribute, is_buffer, number, empty, _ in targets:
            if is_buffer:
                module._buffers[attribute] = tensors[number]
                shown.append(tensors[number])
                continue
            if number not in parameters:  # tied parameters are one
                parameters[number] = shown_as(empty, tensors[number])
            module._parameters[attribute] = parameters[number]
            shown.append(parameters[number])
    return shown


def shown_as(parameter: torch.Tensor, data: torch.Tensor) -> nn.Parameter:
    """A parameter like another, with other data: of its class, and with its attributes.

    Servers' kernels are chosen by what was noted on a weight when it was quantised.
    """
    kind = type(parameter) if isinstance(parameter, nn.Parameter) else nn.Parameter
    kind = getattr(kind, "shown", kind)  # not what stands for it
    if issubclass(kind, Frozen):
        data = data.data  # with a version of its own, as autograd looks at it
    made: nn.Parameter = torch.Tensor._make_subclass(kind, data, parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made


def uninstall(targets: Sequence[Target]) -> None:
    """Let them show nothing again."""
    for module, attribute, is_buffer, _, empty, _ in targets:
        shown: dict[str, Any] = module._buffers if is_buffer else module._parameters
        shown[attribute] = empty


def check(targets: Sequence[Target], shown: Sequence[torch.Tensor]) -> None:
    """Raise where modules show something else than they should."""
    for (module, attribute, is_buffer, *_), wanted in zip(targets, shown, strict=True):
        now = (module._buffers if is_buffer else module._parameters).get(attribute)
        if now is not wanted:
            raise RuntimeError(
                f"{attribute!r} of a {type(module).__name__} was replaced after its model was "
                "streamed: the weights that are used are those of the checkpoint. Change them "
                "there, and stream the model anew"
            )


def shows(targets: Sequence[Target], shown: Sequence[torch.Tensor]) -> bool:
    """Whether `check` finds nothing."""
    for (module, attribute, is_buffer, *_), wanted in zip(targets, shown, strict=True):
        tensors: dict[str, Any] = module._buffers if is_buffer else module._parameters
        if tensors.get(attribute) is not wanted:
            return False
    return True


def names_in(unit: Unit, at: int, nbytes: int) -> str:
    """The weights that have bytes in a part of a unit's slot, for messages."""
    found: list[str] = []
    number = 0
    for weight in unit.weights:
        for part in weight.parts:
            start = unit.layout.starts[number]
            number += 1
            if start < at + nbytes and at < start + part.nbytes and weight.name not in found:
                found.append(weight.name)
    named = ", ".join(repr(name) for name in found[:_NAMED])
    return named + (f" and {len(found) - _NAMED} more" if len(found) > _NAMED else "")
