"""The seam between a model and its stream: wrapped calls, which leave its code as it is.

When adapters are trained over the model, autograd keeps places of weights instead of memory
(`_residency.calls`), and backward has them brought back. The base belongs to its checkpoint: no
state dict holds it.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn import functional

from nvmeio._residency import calls, routing, tiled_linear
from nvmeio._torch_private import has_storage
from nvmeio.errors import ClosedError, IntegrityError
from nvmeio.inference._experts.sets import ExpertSet
from nvmeio.inference._plan.slot_layout import CutSums
from nvmeio.inference._plan.transformers import cache_among
from nvmeio.inference._plan.units import Unit
from nvmeio.inference._stream import stand_ins
from nvmeio.inference.weight_stream import WeightStream


class WeightSource:
    """Reads one of a unit's weights. Refers to the stream weakly, since tensors keep it."""

    def __init__(self, stream: WeightStream, unit: Unit, number: int) -> None:
        self._stream = weakref.ref(stream)
        self._unit = unit
        self._number = number

    def memory(self) -> torch.Tensor:
        """A copy of the weight, laid out alike each time."""
        stream = self._stream()
        if stream is None:
            raise ClosedError("the model that this weight is of is gone: keep the model")
        return stream.weight(self._unit, self._number)

    def around(self) -> Callable[..., Any] | None:
        """A caller of functions with the unit in place; None if `memory` is to be asked.

        In a pass for inference, outside of the calls of other units: one within such a call would
        take their weights away.
        """
        stream = self._stream()
        if stream is None or not stream.in_pass or not self._unit.modules or stream.has_turn():
            return None
        return functools.partial(_computing_with, stream, self._unit)

    def shown(self) -> torch.Tensor:
        """The tensor that the weight's module shows now."""
        target = next(each for each in self._unit.targets if each.weight == self._number)
        held = target.module._buffers if target.is_buffer else target.module._parameters
        found: Any = held[target.attribute]
        return found  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(stand_ins.NOT_HERE)


def attach(model: nn.Module, stream: WeightStream) -> None:
    """Have a model's forward use the stream.

    The model is then the stream's owner: wrappers refer to it, and when the model goes, it is
    closed.
    """
    for unit in stream.units:
        for module in unit.modules:
            calls.wrap(module, _with_weights(stream, unit))
        for linear in unit.tiled:
            _attach_tiles(linear, unit, stream)
        for embedding in unit.row_modules:
            _attach_rows(embedding, unit, stream)
    for experts in stream.experts:
        compute = functools.partial(_with_kept_experts, stream, experts)
        if isinstance(experts.module, nn.ModuleList):
            for number, expert in enumerate(experts.module):
                expert.forward = functools.partial(compute, torch.tensor([number]), expert.forward)
        else:
            routing.attach(experts.module, compute)
    for module in {target.module: None for target in stream.fixed.targets}:
        if module is not model and not stream.trainable:
            calls.wrap(module, _quietly)
    model.register_forward_pre_hook(  # a hook: those before it may set the model's cache
        lambda _, __, named: stream.begin_pass(cache_among(named)[1]), with_kwargs=True
    )
    calls.wrap(model, functools.partial(_whole_pass, stream))
    for module in model.modules():
        if hasattr(module, "save_pretrained"):
            stock: Any = module.save_pretrained
            module.save_pretrained = functools.partial(_save, module, stock)  # type: ignore[assignment]
    streamed: dict[nn.Module, set[str]] = {}
    buffers: dict[nn.Module, dict[str, WeightSource]] = {}
    shown = (stream.fixed, *stream.units, *(experts.unit for experts in stream.experts))
    for unit in shown:
        for target in unit.targets:
            streamed.setdefault(target.module, set()).add(target.attribute)
            source = WeightSource(stream, unit, target.weight)
            if target.is_buffer:
                buffers.setdefault(target.module, {})[target.attribute] = source
            if isinstance(target.empty, (stand_ins.Absent, stand_ins.Elsewhere)):
                target.empty.source = source
        stand_ins.count_changes(unit.targets)
    dtypes = {target.empty.dtype for unit in shown for target in unit.targets}
    for module in model.modules():
        apply = functools.partial(_applied, module, stream.device, dtypes, streamed)
        module._apply = apply  # type: ignore[method-assign]
        stand_ins.allow_copies(module, buffers.get(module, {}))
    for module, attributes in streamed.items():
        names = attributes - {"num_batches_tracked"}  # batch norm brings its own
        hook = functools.partial(_refuse_state, names)
        module.register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]
        if stream.trainable:
            _leave_out(module, names)
        else:
            marking = functools.partial(stand_ins.mark_absent, names)
            module._register_state_dict_hook(marking)  # type: ignore[no-untyped-call]


def _with_weights(stream: WeightStream, unit: Unit) -> Callable[..., Any]:
    """A function that calls its first argument with the weights of a unit."""
    if stream.trainable:
        use = functools.partial(stream.use, unit)
        own = functools.partial(_own, stream, unit)
        return functools.partial(calls.taking(use, stream.origin_of, own), True)
    return functools.partial(_computing_with, stream, unit)


def _computing_with(
    stream: WeightStream, unit: Unit, call: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    _check_grad(repr(unit.name), args, kwargs)
    without: Any = None
    use = stream.use(unit)
    try:
        without = calls.without_grad()
        return _own(stream, unit, call(*args, **kwargs))
    finally:
        del without, use


def _quietly(call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    _check_grad("a part of the model", args, kwargs)
    return calls.quietly(call)(*args, **kwargs)


def _whole_pass(
    stream: WeightStream, call: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    if not stream.trainable:
        _check_grad("the model", args, kwargs)
    without: Any = None
    mark: Any = None
    try:  # an interrupt's traceback that is kept must hold neither
        if not stream.trainable:
            without = calls.without_grad()
            mark = stream.pass_mark()  # ends with this frame
        found = call(*args, **kwargs)
    except Exception:
        stream.end_pass()
        raise
    finally:
        del without, mark
    stream.end_pass()
    return found


def _check_grad(name: str, args: Any, kwargs: Any) -> None:
    if torch.is_grad_enabled() and any(t.requires_grad for t in _tensors_in((args, kwargs))):
        raise RuntimeError(
            f"{name} is streamed for inference and has no gradients: its weights are gone when a "
            "backward pass would need them. Call the model under torch.no_grad()"
        )


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors_in(part)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))


def _own(stream: WeightStream, unit: Unit, output: Any) -> Any:
    """The output, with copies in the place of views of weights that are about to go."""
    if unit.resident and not unit.converted_bytes:
        return output
    storages = stream.as_read(unit)
    if unit.targets and not storages and not stream.trainable:
        raise RuntimeError(
            f"{unit.name!r} called another streamed layer within its own call, which took its "
            "weights away: give stream_model a module that holds both in layers="
        )

    def is_view(tensor: torch.Tensor) -> bool:
        kept = not tensor.is_meta and has_storage(tensor)  # sparse ones have none
        return kept and tensor.untyped_storage().data_ptr() in storages

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.clone() if is_view(value) else value
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

    if type(output) is torch.Tensor:
        return output.clone() if is_view(output) else output
    return copied(output) if any(map(is_view, _tensors_in(output))) else output


def _applied(
    module: nn.Module,
    device: torch.device,
    dtypes: Set[torch.dtype],
    streamed: Mapping[nn.Module, Set[str]],
    fn: Any,
    recurse: bool = True,
) -> nn.Module:
    """Do `to`, `half`, `cuda` and the like to unstreamed tensors; refuse to change the rest.

    `dtypes` are all those of what is `streamed`.
    """
    for dtype in dtypes:
        probe = torch.empty(0, dtype=dtype, device=device)
        cause: Exception | None = None
        try:
            found = fn(probe)
            if found.dtype == dtype and found.device == probe.device:
                continue
            to = f" to {found.dtype} on {found.device}"
        except (RuntimeError, AssertionError) as error:  # no such device, as a rule
            to, cause = f": {error}", error
        raise RuntimeError(
            f"a streamed model cannot be moved or converted ({type(module).__name__}{to}): its "
            "weights are on disk. Give device= and dtype= to stream_model"
        ) from cause
    names, own = streamed.get(module, set()), module.__dict__
    held = [own["_parameters"], own["_buffers"]]
    rest = [{k: v for k, v in each.items() if k not in names} for each in held]
    try:
        own["_parameters"], own["_buffers"] = rest
        # The class's own may look for parameters by name (RNNs).
        apply: Any = (nn.Module if names else type(module))._apply
        apply(module, fn, recurse)
    finally:
        own["_parameters"], own["_buffers"] = held
    for each, changed in zip(held, rest, strict=True):
        each.update(changed)
    return module


def _save(module: nn.Module, call: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
    """Transformers' `save_pretrained`, of adapters and other weights that are here."""
    if not getattr(module, "_hf_peft_config_loaded", False) and "state_dict" not in options:
        found = module.state_dict()
        if not found or any(isinstance(each, stand_ins.WeightOnDisk) for each in found.values()):
            raise TypeError(f"save_pretrained: {stand_ins.NOT_HERE}")
    return call(*args, **options)


def _refuse_state(
    names: set[str], module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Refuse `load_state_dict`, which would be lost for weights on disk."""
    if any(prefix + name in state_dict for name in names):
        raise RuntimeError(
            "a streamed model reads its weights from its checkpoint and takes no others "
            f"({prefix or type(module).__name__!r}). Write them to the checkpoint, and stream the "
            "model again"
        )


def _attach_rows(module: nn.Embedding, unit: Unit, stream: WeightStream) -> None:
    """Have an embedding that is not in memory look its tokens up on the drive."""
    around = _with_weights(stream, unit)

    def forward(input: torch.Tensor) -> Any:
        if unit.resident:
            return around(nn.Embedding.forward, module, input)
        _check(unit, stream)
        rows, places = stream.rows(unit, input)
        return functional.embedding(places, rows)

    module.forward = forward  # type: ignore[method-assign]


def _attach_tiles(module: nn.Linear, unit: Unit, stream: WeightStream) -> None:
    """Have a linear layer that is not in memory compute some of its outputs at a time."""

    def forward(input: torch.Tensor) -> torch.Tensor:
        _check(unit, stream)
        return linear_in_tiles(unit, input, module.bias)

    module.forward = forward  # type: ignore[method-assign]


def linear_in_tiles(unit: Unit, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`torch.nn.functional.linear` with the weight that a unit's tiles are the rows of."""
    failures = _failures(unit)
    output = tiled_linear.compute(
        input, unit.weights[0].shape[0], [_rows(tile, bias) for tile in unit.tiles]
    )
    _check_sums(unit, failures)
    return output


def _rows(tile: Unit, bias: torch.Tensor | None) -> tiled_linear.LinearRows:
    module: Any = tile.modules[0]
    return tiled_linear.LinearRows(module.first, module.last, lambda given: module(given, bias))


def _tile_sums(unit: Unit) -> list[CutSums]:
    """The checksums of the tensors that the tiles are cut from; each once for each tile."""
    parts = (part for tile in unit.tiles for part in tile.weights[0].parts)
    return [part.cut[0] for part in parts if part.cut is not None]


def _failures(unit: Unit) -> int:
    return sum(sums.failures for sums in _tile_sums(unit))


def _check_sums(unit: Unit, failures: int) -> None:
    """Raise where the tiles that were used may not have been right together.

    `failures` is `_failures` from before the first of them was used.
    """
    found = _tile_sums(unit)
    wrong = next((sums for sums in found if not sums.settled), None)
    if wrong is None and _failures(unit) != failures:
        wrong = found[0]  # right by now, and maybe not when it was used
    if wrong is not None:
        raise IntegrityError(
            f"the rows of {unit.weights[0].name!r} differed from the packed ones when they were "
            "read: model.weight_stream.close() and reopen() read them again",
            expected=f"CRC-32 {wrong.whole:08x} of the whole",
            found="another one",
        )


def _check(unit: Unit, stream: WeightStream) -> None:
    """The checks of `WeightStream.use`, for weights that are never in memory as a whole."""
    stand_ins.check_absent(unit.targets)
    if stream.trainable:
        stand_ins.check_frozen(unit.targets)


def _with_kept_experts(
    stream: WeightStream,
    experts: ExpertSet,
    routing: torch.Tensor,
    call: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not stream.trainable:
        _check_grad(repr(experts.name), args, kwargs)
    if hasattr(experts.module, "parametrizations"):  # adapters compute with copies of all experts
        return call(*args, **kwargs)
    if stream.trainable:
        return _with_trained_on_experts(stream, experts, routing, call, args, kwargs)
    use = stream.use_experts(experts, routing)
    try:
        output = calls.quietly(call)(*args, **kwargs)
        stream.experts_used(use)
        return output
    except BaseException:
        stream.spoil()
        raise
    finally:
        del use


def _with_trained_on_experts(
    stream: WeightStream,
    experts: ExpertSet,
    routing: torch.Tensor,
    call: Callable[..., Any],
    args: Any,
    kwargs: Any,
) -> Any:
    """Call experts of which autograd keeps places: backward has them from the cache again."""
    take = functools.partial(stream.use_experts, experts, routing)
    hit = [e for e in torch.unique(routing).tolist() if 0 <= e < experts.number]
    origin_of = functools.partial(stream.origin_of_experts, experts, hit)

    def finished(output: Any) -> Any:
        stream.experts_used()
        return output

    try:
        return calls.taking(take, origin_of, finished)(True, call, *args, **kwargs)
    except BaseException:
        if not calls.in_backward():  # where a region that runs again ends with an exception
            stream.spoil()
        raise


def _leave_out(module: nn.Module, names: Set[str]) -> None:
    """Leave the checkpoint's weights out of a module's state dict; loading does not miss them."""
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
