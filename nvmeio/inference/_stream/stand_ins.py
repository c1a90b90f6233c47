"""Stand-ins: modules show them in place of weights on disk, and of a base that is not trained.

The place of a weight on disk is taken by a tensor on the meta device, with its shape and dtype. Who
looks at its elements outside of its module's call (an adapter that begins with the norms of a
matrix, a copy of a head) gets a copy, which is read for that and goes with it.

A state dict has a tensor for each such weight, with its shape and dtype, since many look at the
names. `torch.save` would write it without a word, and the loss be found out when it is wanted: so
it refuses that.

An adapter may train a copy of a head or of a norm. The stream's additions to a module (the wrapper
around its call, the refusal of `to`, hooks on its state) belong to that module: a copy that had it
would compute with the original's weights. So a copy is in memory, whole, without these.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from nvmeio._distributed import rank_store
from nvmeio._residency.calls import Origin, saving, version_of
from nvmeio._torch_private import (
    DisableTorchFunctionSubclass,
    disabled_torch_function,
    make_subclass,
    pytree,
)
from nvmeio.errors import an
from nvmeio.inference._plan.units import Target, Unit

ABSENT = "a weight of a streamed model was used outside a call of its module, while it is on disk"
# For a weight that is used within the call of another layer, or by several ranks.
ABSENT_WITHIN = (
    ABSENT + ". Name a module in layers= that is called and holds both; raise resident_bytes until "
    "whole layers fit, if a layer was cut; or give "
    "trainable=True, which reads such a weight each time"
)
# They make a tensor like another one, and look at no elements.
_FACTORIES = {
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
    *("randint_like", "new_empty", "new_zeros", "new_ones", "new_full"),
}
_OPERATORS = "add sub mul truediv floordiv mod pow and or xor lshift rshift"
_IN_PLACE = {"__set__", "__setitem__", *(f"__i{name}__" for name in _OPERATORS.split())}
_CHANGES_NO_ELEMENTS = {"__set__", "requires_grad_", "detach_", "share_memory_"}
_NEEDS_ELEMENTS = object()


NOT_HERE = (
    "a streamed model's weights are on disk, and its state_dict() cannot save them: copy the files "
    "that it streams from, or read them with nvmeio.safe_open or "
    "nvmeio.load_safetensors; adapters can be saved alone"
)
_CHANGED_BY_RANKS = (
    "a weight of a streamed model cannot be changed: it is read from its checkpoint. "
    "DistributedDataParallel writes rank 0's weights over those of the other ranks when it is "
    "made: before that, name the frozen weights and the buffers in its "
    '_set_params_and_buffers_to_ignore_for_model(model, names) (docs/inference.md, "On several '
    'ranks"). If you merge or change weights yourself, do it in a model that is loaded'
)
_OURS = "nvmeio."
# Put into instances by the stream, whatever they are wrapped in by now.
_SEAMS = {"_call_impl", "_apply", "__deepcopy__"}


# Tensors that an error names; a layer is read as one and rarely has more.
_NAMED = 16


def _changes(name: str) -> bool:
    """Whether a function of torch's with this name changes its first argument in place."""
    return name in _IN_PLACE or (name.endswith("_") and not name.startswith("_"))


def refuse_change() -> NoReturn:
    """Raise: somebody changes a weight that is read from its checkpoint each time."""
    if rank_store.several():
        raise RuntimeError(_CHANGED_BY_RANKS)
    raise RuntimeError(
        "a weight of a streamed model cannot be changed, and adapters cannot be merged into it: it "
        "is read from its checkpoint. Save adapters, and merge them into a model that is loaded. "
        "Adapters that begin by changing the base (PiSSA, OLoRA, CorDA, LoftQ, KaSA) are begun "
        "in a model that is loaded: save that base and them, and stream that base"
    )


def _refuse(*_: Any, **__: Any) -> NoReturn:
    """A method that raises: a change in memory would last until the layer is read again."""
    refuse_change()


class WeightOrigin(Origin, Protocol):
    """The origin of a weight that is on disk."""

    def around(self) -> Callable[..., Any] | None:
        """A caller of functions with the weight in place; None if `memory` is to be read."""

    def shown(self) -> torch.Tensor:
        """The tensor that the weight's module shows now."""


class Absent(torch.Tensor):
    """A weight that is on disk, or a tensor made of its shape.

    A product of memory and of a tensor on "meta" is not an error everywhere in torch (2.13): its
    result is what happens to lie in memory.
    """

    source: WeightOrigin | None = None  # None: it cannot be read by itself
    on_device = torch.device("meta")
    frozen = False

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves([args, kwargs])
        with DisableTorchFunctionSubclass():
            if func is torch.result_type:
                return func(*args, **kwargs)
            changed = _changed_by(func, args, kwargs)
            if any(map(on_disk, changed)):
                if not _is_harmless(func) and any(map(_is_kept, changed)):
                    refuse_change()
                return pytree.tree_map(_absent, func(*args, **kwargs))
            if not any(isinstance(leaf, torch.Tensor) and not is_meta(leaf) for leaf in leaves):
                found = _of_shapes(func, args, kwargs, leaves)
                if found is not _NEEDS_ELEMENTS:
                    return found
            around = _around(leaves)
        if around is not None:
            return around(_with_shown, func, tuple(args), kwargs)
        with DisableTorchFunctionSubclass():
            copies = {id(leaf): _read(leaf) for leaf in leaves if on_disk(leaf)}
        args, kwargs = pytree.tree_map(
            lambda leaf: copies.get(id(leaf), leaf), (tuple(args), kwargs)
        )
        return func(*args, **kwargs)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.on_device

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return not self.frozen  # as of `FrozenElsewhere`

    data: Any = property(torch.Tensor.detach, _refuse)


def _set_to_itself(weight: torch.Tensor, source: Any = None, *_: Any) -> torch.Tensor:
    """Torch's parametrisations begin with that; nothing is done, so that the version stays."""
    here = isinstance(source, torch.Tensor) and not is_meta(weight) and not is_meta(source)
    if here and (source.data_ptr(), source.shape) == (weight.data_ptr(), weight.shape):
        return weight
    if on_disk(weight) and on_disk(source) and weight.shape == getattr(source, "shape", None):
        origin = getattr(weight, "source", None)
        if origin is not None and origin is getattr(source, "source", None):
            return weight
    refuse_change()


class Shown(nn.Parameter):
    """A weight that is in its place for a call; its version says whether the call changed it."""

    set_: Any = _set_to_itself

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return _remember(memo, self, self.detach())


class Elsewhere(nn.Parameter):
    """Stands for a weight that is on disk, and says where it, or its rows, will be.

    Models move the ids of tokens to the device of their embedding's weight (Llama 4), and adapters
    are made where the weight beside them is.
    """

    source: WeightOrigin | None = None
    on_device = torch.device("meta")
    is_here = False  # and is shown, packed
    shown: type[nn.Parameter] = Shown  # in its place while it is there
    __torch_function__ = Absent.__torch_function__

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.on_device

    data: Any = property(torch.Tensor.detach, _refuse)

    def now(self) -> torch.Tensor:
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A parameter in memory, which is nobody's but the caller's."""
        return _remember(memo, self, _read(self))


class Frozen(Shown):
    """A weight of a base that is not trained: adapters are, beside it.

    They are made where it says that it is. `data` is what they are merged into.
    """

    data: Any = property(lambda self: self.detach().as_subclass(_Unchanged), _refuse)


# By name: a `__torch_function__` would cost time in each product. `check` finds what goes past it.
for _name in dir(torch.Tensor):
    if _changes(_name) and _name not in _CHANGES_NO_ELEMENTS and _name != "set_":
        setattr(Frozen, _name, _refuse)


class FrozenElsewhere(Frozen, Elsewhere):
    """A frozen weight that is on disk."""

    shown = Frozen
    __torch_function__ = Absent.__torch_function__
    __deepcopy__ = Elsewhere.__deepcopy__
    data = Elsewhere.data

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """Adapters take tensors on "meta" for a model that has no weights yet (DEFT)."""
        return False


def _is_kept(value: object) -> bool:
    """Whether a change of it is refused at once; others are by `check_absent`."""
    return isinstance(value, Frozen) or (isinstance(value, Absent) and value.source is not None)


class _Unchanged(torch.Tensor):
    """A read-only tensor; results that are not views of it are plain tensors."""

    source: Origin | None = None  # of a copy: autograd keeps that, and no memory

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _is_harmless(func) and any(
            isinstance(t, _Unchanged) for t in _changed_by(func, args, kwargs)
        ):
            refuse_change()
        leaves = pytree.tree_leaves([args, kwargs])
        if any(map(on_disk, leaves)):  # this comes first where it is the first argument
            return Absent.__torch_function__(func, types, args, kwargs)
        leaves = [leaf for leaf in leaves if isinstance(leaf, _Unchanged)]
        with DisableTorchFunctionSubclass():
            by_address = {leaf.untyped_storage().data_ptr(): leaf for leaf in leaves}
            kept = _saving(by_address)
            try:
                found = func(*args, **kwargs)
            finally:
                del kept

        def marked(value: Any) -> Any:
            if type(value) is not torch.Tensor or value.layout is not torch.strided:
                return value
            of = None if value.is_meta else by_address.get(value.untyped_storage().data_ptr())
            return value if of is None or not value.nbytes else _look_at(value, of.source)

        with DisableTorchFunctionSubclass():
            return pytree.tree_map(marked, found)

    data: Any = property(torch.Tensor.detach, _refuse)


def on_disk(value: object) -> bool:
    """Whether something stands for a weight that is on disk."""
    return isinstance(value, _STAND_INS)


_STAND_INS = (Absent, Elsewhere)


def is_meta(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory, whatever its attributes say."""
    return on_disk(tensor) or tensor.is_meta


def _absent(value: Any) -> Any:
    if type(value) is torch.Tensor and value.is_meta:
        return value.as_subclass(Absent)
    return value


def _changed_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors that a function changes in place, or would."""
    changed: list[Any] = pytree.tree_leaves(kwargs.get("out"))
    if _changes(getattr(func, "__name__", "")):
        changed += pytree.tree_leaves(args[0] if args else next(iter(kwargs.values()), None))
    return changed


def _is_harmless(func: Any) -> bool:
    return getattr(func, "__name__", "") in _CHANGES_NO_ELEMENTS


def _of_shapes(func: Any, args: Sequence[Any], kwargs: Any, leaves: Sequence[Any]) -> Any:
    """The result of a function on shapes and dtypes; or `_NEEDS_ELEMENTS`."""
    name = getattr(func, "__name__", "")
    weight = next((leaf for leaf in leaves if on_disk(leaf) and leaf.source is not None), None)
    if weight is None:
        return pytree.tree_map(_absent, func(*args, **kwargs))
    if name == "detach":
        found = func(*args, **kwargs).as_subclass(Absent)
        found.source, found.on_device = weight.source, weight.on_device
        found.frozen = not weight.is_meta
        return found
    if name in _FACTORIES:
        return func(*args, **{"device": weight.on_device, **kwargs})
    try:
        found = func(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError):  # there is nothing to copy
        return _NEEDS_ELEMENTS
    has_tensors = any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(found))
    return _NEEDS_ELEMENTS if has_tensors else found


def _around(leaves: Sequence[Any]) -> Any:
    """A caller of functions with the unit of a weight on disk in place; None: read copies.

    In a pass, a module may be called past the layer that it is in (LightGlue), or a weight be used
    without its module.
    """
    for leaf in leaves:
        if on_disk(leaf) and leaf.source is not None and not getattr(leaf, "is_here", False):
            return leaf.source.around()
    return None


def _with_shown(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function with weights that are in place by now."""

    def shown(leaf: Any) -> Any:
        if not on_disk(leaf) or leaf.source is None:
            return leaf
        now = leaf.source.shown()
        if on_disk(now) and not getattr(now, "is_here", False):
            raise RuntimeError(ABSENT_WITHIN)
        return now

    args, kwargs = pytree.tree_map(shown, (args, kwargs))
    return func(*args, **kwargs)


def _read(weight: Any) -> torch.Tensor:
    if isinstance(weight, Elsewhere) and weight.is_here:
        return _look_at(weight.now(), None)
    if weight.source is None:
        raise RuntimeError(ABSENT_WITHIN)
    return _look_at(weight.source.memory(), weight.source)


def _look_at(memory: torch.Tensor, source: Origin | None) -> torch.Tensor:
    found = memory.as_subclass(_Unchanged)
    found.source = source
    return found


def _saving(by_address: dict[int, Any]) -> object:
    """Have autograd keep where copies were read, in the place of the copies."""
    if not torch.is_grad_enabled():
        return None
    sources = {address: leaf.source for address, leaf in by_address.items() if leaf.source}
    return saving(lambda address, *_: sources.get(address)) if sources else None


def _remember(memo: dict[int, Any], weight: nn.Parameter, now: torch.Tensor) -> nn.Parameter:
    with DisableTorchFunctionSubclass():
        made = nn.Parameter(now.detach().clone().as_subclass(torch.Tensor), weight.requires_grad)
    memo[id(weight)] = made
    return made


class WeightOnDisk(torch.Tensor):
    """Shape and dtype of a weight, on the meta device; refuses to be saved or sent."""

    __torch_function__ = disabled_torch_function

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(NOT_HERE)

    def __deepcopy__(self, memo: Any) -> WeightOnDisk:
        return self


def mark_absent(
    names: set[str], module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """A state dict hook: marks those of some attributes' weights that have no memory."""
    for name in names:
        found = state_dict.get(prefix + name)
        if isinstance(found, torch.Tensor) and found.is_meta:
            with DisableTorchFunctionSubclass():
                state_dict[prefix + name] = found.detach().as_subclass(WeightOnDisk)


def allow_copies(module: nn.Module, buffers: Mapping[str, Origin]) -> None:
    """Let `copy.deepcopy` make a module in memory, with those of `buffers` read from disk."""
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
            gone = {k for k, b in value.items() if k in buffers and b is not None and b.is_meta}
            value = {**value, **{k: buffers[k].memory().clone() for k in gone}}
        made.__dict__[name] = copy.deepcopy(value, memo)
    return made


def _is_ours(value: Any) -> bool:
    """Whether a function, a hook or a method in an instance is of a stream."""
    while callable(value) and (isinstance(value, functools.partial) or hasattr(value, "hook")):
        value = value.func if isinstance(value, functools.partial) else value.hook
    if not callable(value) or isinstance(value, (type, nn.Module, torch.Tensor)):
        return False
    return str(getattr(value, "__module__", None)).startswith(_OURS)


def freeze(unit: Unit, device: torch.device) -> None:
    """Let all parameters of a unit need no gradient, and say that they are where it computes."""
    _replace(unit, device, FrozenElsewhere)
    for target in unit.targets:
        if not target.is_buffer:
            target.empty.requires_grad_(False)


def check_frozen(targets: Sequence[Target], shown: Sequence[torch.Tensor] | None = None) -> None:
    """Raise if gradients of weights are requested: of their stand-ins, or of shown tensors."""
    tensors = [target.empty for target in targets] if shown is None else shown
    for target, tensor in zip(targets, tensors, strict=True):
        if tensor.requires_grad:
            raise RuntimeError(
                f"{target.attribute!r} of {an(type(target.module).__name__)} requires gradients, "
                "and is read from its checkpoint, so they would be lost: train adapters, or put a "
                "module of your own in its place (requires_grad_(False) undoes it)"
            )


def stand_in(unit: Unit, device: torch.device) -> None:
    """Let what computes with a unit's weights while they are on disk be an error.

    They say that they are where it computes: adapters are made there.
    """
    _replace(unit, device, Elsewhere)


def _replace(unit: Unit, device: torch.device, kind: type[Elsewhere]) -> None:
    made: dict[int, Any] = {}
    for index, target in enumerate(unit.targets):
        own = type(target.empty) not in (nn.Parameter, torch.Tensor) and not unit.row_modules
        own = own and (target.is_buffer or kind is Elsewhere)
        if own or target.attribute == "num_batches_tracked":  # state dicts get that by batch norm
            continue
        if target.weight not in made:
            with torch.inference_mode(False):  # a model that was made in it is called outside, too
                bare = target.empty.detach()
                bare = bare.clone() if bare.is_inference() else bare
                wanted = target.empty.requires_grad
                empty: Any = bare.as_subclass(Absent) if target.is_buffer else kind(bare, wanted)
            empty.on_device = device
            made[target.weight] = empty
        held: Any = target.module._buffers if target.is_buffer else target.module._parameters
        held[target.attribute] = made[target.weight]
        unit.targets[index] = target._replace(empty=made[target.weight])


def count_changes(targets: list[Target]) -> None:
    """Note what stands for parameters as it is, for `check_absent`; batch norm sets its buffers."""
    for index, target in enumerate(targets):
        if not target.is_buffer:
            targets[index] = target._replace(version=version_of(target.empty))


def check_absent(targets: Sequence[Target]) -> None:
    """Raise where what stands for weights that are on disk was replaced, or changed in place.

    Such a change (`copy_`, an initialisation, adapters that are merged) would be lost.
    """
    with DisableTorchFunctionSubclass():  # else each look goes through Python
        for module, attribute, is_buffer, _, empty, version in targets:
            held: dict[str, Any] = module._buffers if is_buffer else module._parameters
            if held.get(attribute) is not empty:
                check(targets, [target.empty for target in targets])  # which says more
            has_memory = not (isinstance(empty, _STAND_INS) or empty.is_meta)
            if version is None:
                continue
            now = 0 if empty.is_inference() else empty._version  # `version_of`
            if has_memory or now != version:
                if rank_store.several():
                    raise RuntimeError(_CHANGED_BY_RANKS)
                raise RuntimeError(
                    f"{attribute!r} of {an(type(module).__name__)} was changed in place after its "
                    "model was streamed, while its bytes are on disk: the stream uses the weights "
                    "of the checkpoint. Change them there, and stream the model again"
                )


def install(
    targets: Sequence[Target], tensors: Sequence[Any] | Mapping[int, Any]
) -> list[torch.Tensor]:
    """Let modules show tensors, or packed weights; returns the shown tensor of each target.

    Parameters have the `requires_grad` that they have where they are loaded: torch chooses the
    kernel of a matrix product by it, with autograd off as well. RuntimeError if something else was
    put in the place of a weight.
    """
    check_absent(targets)
    parameters: dict[int, nn.Parameter] = {}
    shown: list[torch.Tensor] = []
    try:
        with DisableTorchFunctionSubclass():  # as above
            for module, attribute, is_buffer, number, empty, _ in targets:
                if is_buffer:
                    shown.append(tensors[number].data)
                    module._buffers[attribute] = shown[-1]
                    continue
                if number not in parameters:  # tied parameters are one
                    parameters[number] = shown_as(empty, tensors[number])
                module._parameters[attribute] = parameters[number]
                shown.append(parameters[number])
    except BaseException:
        uninstall(targets)
        raise
    return shown


def shown_as(parameter: torch.Tensor, data: Any) -> nn.Parameter:
    """A parameter like another, with other data: of its class, and with its attributes.

    Servers choose kernels by attributes that a weight got when it was quantised.
    """
    if not isinstance(data, torch.Tensor):
        return data.shown_as(parameter)  # type: ignore[no-any-return]
    own = type(parameter) if isinstance(parameter, nn.Parameter) else nn.Parameter
    kind = getattr(own, "shown", own)  # not what stands for it
    # With a version of its own, as autograd looks at it.
    made: nn.Parameter = make_subclass(kind, data.data, parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made


def uninstall(targets: Sequence[Target]) -> None:
    for module, attribute, is_buffer, _, empty, _ in targets:
        shown: dict[str, Any] = module._buffers if is_buffer else module._parameters
        shown[attribute] = empty


def check(targets: Sequence[Target], shown: Sequence[torch.Tensor]) -> None:
    """Raise if modules show wrong tensors, or a frozen weight was changed."""
    replaced = _replaced(targets, shown, _was_changed)
    if replaced is not None:
        if any(map(_was_changed, shown)):
            refuse_change()
        raise RuntimeError(
            f"{replaced.attribute!r} of {an(type(replaced.module).__name__)} was replaced after "
            "its model was streamed, and the stream uses the weights of the checkpoint. "
            "Change them there, and stream the model again"
        )


def shows(targets: Sequence[Target], shown: Sequence[torch.Tensor]) -> bool:
    """Whether `check` finds nothing."""
    return _replaced(targets, shown, _was_changed) is None


def check_as_read(targets: Sequence[Target], shown: Sequence[torch.Tensor]) -> None:
    """Raise if a call has changed weights that are read or converted again for the next call.

    Not of embeddings with `max_norm`: they scale the same rows again in each call.
    """
    for (module, attribute, is_buffer, *_), wanted in zip(targets, shown, strict=True):
        held: dict[str, Any] = module._buffers if is_buffer else module._parameters
        same = held.get(attribute) is wanted
        if not same or not (wanted.is_inference() or wanted._version == 0):
            break  # it is looked at more closely
    else:
        return
    found = _replaced(targets, shown, _is_lost)
    if found is not None:
        raise RuntimeError(
            f"{found.attribute!r} of {an(type(found.module).__name__)} was changed by its layer's "
            "own call, and the layer's bytes come from the checkpoint again for each call: the "
            "change would be lost. Batch norm changes its buffers in train(): call eval()"
        )


def _replaced(targets: Sequence[Target], shown: Sequence[Any], changed: Any) -> Target | None:
    for target, wanted in zip(targets, shown, strict=True):
        module, attribute, is_buffer, *_ = target
        tensors: dict[str, Any] = module._buffers if is_buffer else module._parameters
        if tensors.get(attribute) is not wanted or changed(wanted, module):
            return target
    return None


def _is_lost(shown: torch.Tensor, module: nn.Module) -> bool:
    lost = version_of(shown) != 0 and not on_disk(shown)  # packed ones have other bytes
    return lost and getattr(module, "max_norm", None) is None


def _was_changed(shown: torch.Tensor, _: nn.Module | None = None) -> bool:
    """Whether a frozen weight was changed past its methods: by `out=`, or through a view of it."""
    return type(shown) is Frozen and version_of(shown) != 0


def names_in(unit: Unit, at: int, nbytes: int) -> str:
    """The weights that have bytes in a part of a unit's slot, for messages."""
    found: list[str] = []
    number = 0
    for weight in unit.weights:
        for part in weight.parts:
            start = unit.layout.starts[number]
            number += 1
            if start < at + nbytes and at < start + part.slot_nbytes and weight.name not in found:
                found.append(weight.name)
    named = ", ".join(repr(name) for name in found[:_NAMED])
    return named + (f" and {len(found) - _NAMED} more" if len(found) > _NAMED else "")
