"""Weights into the modules that show them, and out; their names, for what goes wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from nvmeio.inference._units import Target, Unit

# Tensors that an error names; a layer is read as one and rarely has more.
_NAMED = 16


class _Absent(torch.Tensor):
    """What is made of a weight that is on disk: it cannot be computed with.

    A product of memory and of a tensor on "meta" is no error everywhere in torch (2.13): it is what
    happens to lie in memory.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if _is_harmless(func, args) or not any(map(_is_there, tree_leaves([args, kwargs]))):
                return tree_map(_absent, func(*args, **kwargs))
        raise RuntimeError(
            "a weight of a streamed model is used, and is on disk: what uses it does not call the "
            "module that it belongs to. Name that module's parent in layers=; where a layer was "
            "cut to fit into resident_bytes, give so many that whole layers fit"
        )


def _is_harmless(func: Any, args: Sequence[Any]) -> bool:
    """It asks for dtypes alone, or changes what stands for a weight: `check_absent` tells of it."""
    name = getattr(func, "__name__", "")
    in_place = name == "__set__" or (name.endswith("_") and not name.endswith("__"))
    return func is torch.result_type or (in_place and isinstance(args[0], (_Absent, _Elsewhere)))


def _is_there(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_meta


def _absent(value: Any) -> Any:
    if type(value) is torch.Tensor and value.is_meta:
        return value.as_subclass(_Absent)
    return value


class _Elsewhere(nn.Parameter):
    """Stands for a weight that is on disk, and says where it, or its rows, will be.

    Models move the ids of tokens to the device of their embedding's weight (Llama 4).
    """

    _where = torch.device("meta")
    _shown: type[nn.Parameter] = nn.Parameter  # in its place while it is there
    __torch_function__ = _Absent.__torch_function__

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._where


class _Frozen(nn.Parameter):
    """A weight of a base that is not trained: adapters are, beside it.

    They are made where it says that it is. `data` is what they are merged into.
    """

    @property
    def data(self) -> torch.Tensor:
        return self.detach().as_subclass(_Unchanged)

    @data.setter
    def data(self, _: torch.Tensor) -> None:
        _refuse_change()


class _FrozenElsewhere(_Frozen, _Elsewhere):
    """The same, on disk."""

    _shown = _Frozen
    __torch_function__ = _Absent.__torch_function__


class _Unchanged(torch.Tensor):
    """What can be looked at only; operations give plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __iadd__(self, *_: object) -> torch.Tensor:
        _refuse_change()

    __isub__ = __imul__ = __itruediv__ = copy_ = clone = __iadd__  # type: ignore[assignment]


def _refuse_change() -> NoReturn:
    raise RuntimeError(
        "a weight of a streamed model cannot be changed, and adapters cannot be merged into it: it "
        "is read from its checkpoint. Save the adapters, and merge them into a model that is loaded"
    )


def freeze(unit: Unit, device: torch.device) -> None:
    """Let all parameters of a unit need no gradient, and say that they are where it computes."""
    _replace(unit, device, _FrozenElsewhere)
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
    """Let what uses a unit's weights while they are on disk be an error.

    Its embeddings, which may never be in memory, name the device of the model.
    """
    _replace(unit, device if unit.row_modules else torch.device("meta"), _Elsewhere)


def _replace(unit: Unit, device: torch.device, kind: type[_Elsewhere]) -> None:
    made: dict[int, _Elsewhere] = {}
    for index, target in enumerate(unit.targets):
        own = type(target.empty) is not nn.Parameter and not unit.row_modules
        if target.is_buffer or (own and kind is _Elsewhere):
            continue
        if target.weight not in made:
            empty = kind(target.empty.detach(), target.empty.requires_grad)
            empty._where = device
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
    for module, attribute, _, _, empty, version in targets:
        if version is not None and (not empty.is_meta or _version(empty) != version):
            raise RuntimeError(
                f"{attribute!r} of a {type(module).__name__} was changed in place after its model "
                "was streamed, while its bytes are on disk: the weights that are used are those of "
                "the checkpoint. Change them there, and stream the model anew"
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
    kind = getattr(kind, "_shown", kind)  # not what stands for it
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
