"""transformers' models without their weights, and how their names map to a checkpoint's.

transformers is imported by the functions here, never by this module. They follow what
`from_pretrained` of transformers 5 does: the class that the configuration names, the dtype, the
tied weights, the buffers that no checkpoint holds, and the renaming and fusing of tensors
(`transformers.conversion_mapping`).
"""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from nvmeio._formats import model_directory
from nvmeio._formats.safetensors.open_set import SafetensorsSet
from nvmeio._storage.untrusted import INDEX_BYTES, read_object
from nvmeio._threads.interruptible import Cancellation, run_interruptible
from nvmeio.errors import BackendUnavailableError, IntegrityError, an, naming
from nvmeio.inference._plan.published import HeldWeight, check_fused
from nvmeio.inference._plan.slot_layout import FoundWeight, concatenated, found_in, stacked

# A forward's argument for its cache: the first since transformers 5.24, the other in older ones and
# in models that bring their own code.
_CACHE_NAMES = ("cache", "past_key_values")
# Each byte of memory that nobody has set. Elements of four bytes: 2e9, or 3e35.
_UNSET = 0x7A


def require() -> Any:
    """The transformers package; BackendUnavailableError says what to install."""
    try:
        transformers: Any = importlib.import_module("transformers")
        importlib.import_module("transformers.core_model_loading")
        importlib.import_module("transformers.conversion_mapping")
    except ImportError as failed:
        raise BackendUnavailableError(
            "a model directory or a configuration needs transformers 5 to become a model",
            attempts=[("transformers", str(failed))],
            remedy='pip install "nvmeio[transformers]", or pass a module on the meta device',
        ) from failed
    return transformers


def cache_utilities() -> Any:
    """The module of caches, of transformers; raises as `require`."""
    require()
    return importlib.import_module("transformers.cache_utils")


def cache_among(named: Mapping[str, Any]) -> tuple[str, Any]:
    """The cache of past keys and values in a forward's named arguments: its name there, and it.

    "" and None if there is none. Models use the first of two. Other modules may call anything
    "cache": only objects that count tokens are one of these.
    """
    for name in _CACHE_NAMES:
        given = named.get(name)
        if given is not None and (name != "cache" or hasattr(given, "get_seq_length")):
            return name, given
    return "", None


def cache_argument(model: nn.Module) -> str:
    """The name of the cache in the arguments of a model's forward."""
    takes = inspect.signature(type(model).forward).parameters
    return next((name for name in _CACHE_NAMES if name in takes), _CACHE_NAMES[-1])


def config_of(directory: str | os.PathLike[str]) -> Any:
    path = os.path.join(directory, "config.json")
    if not os.path.isfile(path):
        raise FileNotFoundError(
            f"{os.fspath(directory)} holds no config.json: name a directory that save_pretrained "
            "wrote, or pass a model on the meta device and checkpoint="
        )
    with naming("read", path):
        described = read_object(path, INDEX_BYTES)  # transformers' own errors do not name the file
    try:
        # Only for classes that transformers has; it would ask at the terminal for others.
        return require().AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except ValueError as failed:
        if "model_type" not in described and "auto_map" not in described:
            # A part of a model: only its class knows what reads its configuration.
            raise ValueError(
                f"{path} names no model_type, so the directory does not say what class of model it "
                "holds. Make the empty model of its class yourself: config = "
                'CLASS.config_class.from_pretrained(directory); with torch.device("meta"): '
                "model = CLASS(config).eval(); then nvmeio.stream_model(model, directory)"
            ) from failed
        if "auto_map" not in described or "trust_remote_code" not in str(failed):
            raise
        raise ValueError(
            f"{os.fspath(directory)} is a model with code of its own (auto_map in its "
            "config.json), which is not run here. If you trust it, make the empty model yourself: "
            "config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=True); "
            'with torch.device("meta"): model = transformers.AutoModelForCausalLM.from_config('
            "config, trust_remote_code=True); then nvmeio.stream_model(model, directory)"
        ) from failed


def empty_model(config: Any, dtype: torch.dtype | None, checkpoint: SafetensorsSet) -> nn.Module:
    """The model of a configuration, its parameters and buffers on the meta device.

    `dtype` is that of the weights; None takes the configuration's, or the one that transformers
    takes for the checkpoint. ValueError if the configuration names no architecture, or if the
    checkpoint is quantised in a way that is not read. One that is read is widened: the model's
    configuration does not name it, as after `from_pretrained`.
    """
    named = model_directory.quantisation_of(config)
    if named is not None and named.is_read:
        config = copy.deepcopy(config)
        del config.quantization_config
    named = named or model_directory.quantisation_in(checkpoint.path)
    if named is not None and not named.is_read:
        model_directory.refuse_quantised(named, checkpoint.path)
    wanted = dtype or config.dtype or model_directory.dtype_of(checkpoint)

    cancellation = Cancellation()

    def made() -> Any:
        with torch.device("meta"), _UntilCancelled(cancellation):
            return _class_of(require(), config)._from_config(config, dtype=wanted)

    # In the main thread an interrupt has left the context on, for all that the program made then.
    model = run_interruptible(made, cancellation.cancel)
    model.tie_weights()
    _to_meta(model)
    _keep_in_float32(model, wanted)
    _not_saved_as_buffers(model, checkpoint)
    return model.eval()  # type: ignore[no-any-return]


class _UntilCancelled(TorchFunctionMode):
    """Has constructors end with `Cancelled` when they make their next tensor.

    A model of 60,000 layers takes a minute to make.
    """

    def __init__(self, cancellation: Cancellation) -> None:
        super().__init__()
        self._cancellation = cancellation

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        self._cancellation.check()
        return func(*args, **(kwargs or {}))


def _to_meta(model: nn.Module) -> None:
    """Move what constructors that name a device or type make on the CPU (DiffLlama's, XLNet's)."""
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        kept = module._non_persistent_buffers_set
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None or tensor.is_meta or (held is module._buffers and name in kept):
                    continue
                if id(tensor) not in moved:
                    empty: torch.Tensor = torch.empty_like(tensor, device="meta")
                    if isinstance(tensor, nn.Parameter):
                        empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
                    moved[id(tensor)] = empty
                held[name] = moved[id(tensor)]  # type: ignore[assignment]


def _not_saved_as_buffers(model: Any, checkpoint: SafetensorsSet) -> None:
    """Turn parameters that a class computes, and `save_pretrained` omits, into buffers (Marian).

    As buffers that no checkpoint holds they are computed with the others; see `compute_buffers`.
    """
    patterns = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_save", None) or ()]
    prefix = f"{model.base_model_prefix}."
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for shared in names.values():
        tails = tuple(name.removeprefix(prefix) for name in shared)
        computed = all(any(p.search(name) for p in patterns) for name in shared)
        if computed and not any(stored.endswith(tails) for stored in checkpoint.tensors):
            for name in shared:
                owner, _, attribute = name.rpartition(".")
                module = model.get_submodule(owner)
                empty = module._parameters.pop(attribute)
                module.register_buffer(attribute, empty.detach(), persistent=False)


def _class_of(transformers: Any, config: Any) -> Any:
    for name in getattr(config, "architectures", None) or ():
        found = getattr(transformers, name, None)
        if found is not None:
            return found
    mapping = transformers.AutoModelForCausalLM._model_mapping
    if type(config) in mapping:
        return mapping[type(config)]
    raise ValueError(
        f"{an(type(config).__name__)} without architectures names no model class: set "
        'config.architectures = ["…"], or pass a model on the meta device'
    )


def _keep_in_float32(model: Any, dtype: torch.dtype) -> None:
    """Keep the float32 modules of a class in that dtype (T5's output projections)."""
    plan = model._get_dtype_plan(dtype) if hasattr(model, "_get_dtype_plan") else {}
    if not plan:
        return
    patterns = {
        re.compile(re.escape(name).replace(r"\*", ".*")): kept for name, kept in plan.items()
    }
    for module_name, module in model.named_modules():
        for attribute, parameter in list(module._parameters.items()):
            name = f"{module_name}.{attribute}"
            for pattern, kept in patterns.items():
                if parameter is not None and pattern.search(name) and parameter.dtype != kept:
                    empty = torch.empty_like(parameter, dtype=kept)
                    module._parameters[attribute] = nn.Parameter(empty, requires_grad=False)


def compute_buffers(model: Any, device: torch.device) -> None:
    """Give real values to the buffers that no checkpoint holds, as `from_pretrained` does."""
    missing = [
        (module, name)
        for module in model.modules()
        for name in module._non_persistent_buffers_set
        if module._buffers.get(name) is not None and module._buffers[name].is_meta
    ]
    if not missing:
        return
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor._is_hf_initialized = True
    computed = _initialised(model, missing, 0)
    again = _initialised(model, missing, 1) if any(map(_is_narrow, computed)) else computed
    for (module, name), value, other in zip(missing, computed, again, strict=True):
        if not torch.equal(value, other) if _is_narrow(value) else _has_unset(value):
            raise ValueError(
                f"buffer {name!r} of {type(module).__name__} is in no checkpoint, and "
                "transformers' initialize_weights() does not set all of it. Set it in "
                "_init_weights of the model's class, or pass a module on the meta device in which "
                "this buffer has its value"
            )
        module._buffers[name] = value.to(device)


_Place = tuple[nn.Module, str]


def _buffer_at(place: _Place) -> torch.Tensor:
    buffer = place[0]._buffers[place[1]]
    assert buffer is not None
    return buffer


def _initialised(model: Any, places: Sequence[_Place], narrow: int) -> list[torch.Tensor]:
    """The buffers at some places as `initialize_weights` leaves them.

    Before, each byte of a narrow one is `narrow`, and of another one `_UNSET`.
    """
    for module, name in places:
        buffer = _buffer_at((module, name))
        memory = torch.empty_like(buffer, device="cpu", memory_format=torch.contiguous_format)
        memory.view(-1).view(torch.uint8).fill_(narrow if _is_narrow(buffer) else _UNSET)
        module._buffers[name] = memory
    owners = {module for module, _ in places}
    for module in model.modules():
        # A module around an owner may compute its buffer (FalconH1Model).
        module._is_hf_initialized = owners.isdisjoint(module.modules())
    model.initialize_weights()
    return [_buffer_at(place) for place in places]


def _is_narrow(buffer: torch.Tensor) -> bool:
    """Whether any bytes may be a value that is meant: two initialisations tell what is set."""
    return buffer.dtype.itemsize < 4 and not buffer.is_floating_point()


def _has_unset(buffer: torch.Tensor) -> bool:
    """Whether some element still has the content of memory that nobody set."""
    elements = buffer.contiguous().view(-1).view(torch.uint8).view(-1, buffer.element_size())
    return bool((elements == _UNSET).all(dim=1).any())


def finish(model: Any, directory: str | os.PathLike[str], name: str) -> None:
    """Set what `from_pretrained` sets on a model of a directory beside its weights."""
    if model.can_generate() and os.path.isfile(os.path.join(directory, "generation_config.json")):
        model.generation_config = require().GenerationConfig.from_pretrained(directory)
    model.config._name_or_path = model.name_or_path = name


def parallel_plan(model: Any, wanted: str | Mapping[str, str], size: int) -> dict[str, str]:
    """Transformers' division of a model over `size` ranks: words by name of module or parameter.

    `wanted` is "auto", or words that take the place of those of the model's own plan. ValueError if
    there is no plan, or one with a word that transformers does not know.
    """
    try:
        distributed: Any = importlib.import_module("transformers.distributed.configuration_utils")
        importlib.import_module("transformers.distributed.tensor_parallel")
        resolve = model._resolve_parallel_plans
    except (ImportError, AttributeError) as failed:
        raise BackendUnavailableError(
            "tp_plan needs transformers' tensor parallelism on device meshes",
            attempts=[("transformers.distributed", str(failed))],
            remedy='pip install "transformers>=5.23", or leave tp_plan= out',
        ) from failed
    given = wanted if isinstance(wanted, str) else dict(wanted)
    plan, _, _ = resolve(distributed.DistributedConfig(tp_size=size, tp_plan=given))
    return dict(plan)


def distribute(model: Any, mesh: Any, plan: Mapping[str, str]) -> None:
    """Let a model on the meta device compute as one of several ranks; see `parallel_plan`."""
    parallel: Any = importlib.import_module("transformers.distributed.tensor_parallel")
    parallel.apply_tensor_parallelism(model, mesh, dict(plan))
    model._tp_size = mesh.size()


def parts_of(
    model: Any, checkpoint: SafetensorsSet, held: Mapping[str, HeldWeight]
) -> tuple[dict[str, list[FoundWeight]], list[str]]:
    """The possible sources of each tensor of a transformers model.

    `held` are the checkpoint's weights. Returns what holds them by the model's name: several where
    the checkpoint has the tensor under several names. Also returns the checkpoint's names that have
    no place in the model, without those that its class says to ignore. IntegrityError if tensors
    that are fused do not fit each other, TypeError if the class converts weights in a way that
    cannot be streamed.
    """
    require()
    loading: Any = importlib.import_module("transformers.core_model_loading")
    mapping: Any = importlib.import_module("transformers.conversion_mapping")
    transforms = mapping.get_model_conversion_mapping(model)
    converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]
    renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    wanted = model.state_dict()
    prefix = model.base_model_prefix
    plain: dict[str, list[HeldWeight]] = {}
    fused: dict[str, dict[str, list[HeldWeight]]] = {}
    unexpected: list[str] = []
    ordered = sorted(held, key=loading.dot_natural_key)
    for name in ordered:
        renamed, pattern = loading.rename_source_key(name, renamings, converters, prefix, wanted)
        if renamed not in wanted and name in wanted:
            renamed, pattern = name, None
        if renamed not in wanted:
            unexpected.append(name)
        elif pattern is None:
            plain.setdefault(renamed, []).append(held[name])
        else:
            fused.setdefault(renamed, {}).setdefault(pattern, []).append(held[name])
    sources = {
        name: [found_in(weight.tensors, weight.scheme) for weight in weights]
        for name, weights in plain.items()
    }
    for name, lists in fused.items():
        found = _fuse(by_pattern[next(iter(lists))], lists, name, checkpoint)
        sources.setdefault(name, []).append(found)
    ignored = [
        re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    ]
    ignored.append(re.compile(r"rotary_emb\.inv_freq$"))  # of old checkpoints; computed nowadays
    return sources, [n for n in unexpected if not any(p.search(n) for p in ignored)]


def _fuse(
    converter: Any, lists: dict[str, list[HeldWeight]], name: str, checkpoint: SafetensorsSet
) -> FoundWeight:
    wanted, merge = converter.source_patterns, ("MergeModulelist", 0)
    steps = [(type(op).__name__, getattr(op, "dim", None)) for op in converter.operations]
    stacks = steps == [merge, ("Concatenate", 1)] or (steps == [merge] and len(wanted) == 1)
    if not stacks and steps != [("Concatenate", 0)]:
        raise TypeError(
            f"{name!r} is made of the checkpoint's tensors by {', '.join(op for op, _ in steps)},"
            " which is more than reading them to a place: load the model once and save it with "
            "save_pretrained(directory, save_original_format=False), which stores what it uses"
        )
    if lists.keys() != set(wanted):
        raise IntegrityError(
            f"{checkpoint.path} lacks tensors of which {name!r} is put together: there are "
            f"{sorted(lists)}, wanted are {wanted}",
            expected=wanted,
            found=sorted(lists),
        )
    ordered = [lists[pattern] for pattern in wanted]
    weights = [weight for of_pattern in ordered for weight in of_pattern]
    check_fused(weights, len(ordered) > 1 or not stacks, name, checkpoint)
    parts = []
    for number in range(len(weights[0].tensors)):  # steps with steps, scales with scales
        tensors = [[weight.tensors[number] for weight in of_pattern] for of_pattern in ordered]
        if stacks:
            parts.append(stacked(tensors, name, checkpoint))
        else:
            in_order = [stored for of_pattern in tensors for stored in of_pattern]
            parts.append(concatenated(in_order, name, checkpoint))
    names = tuple(weight.tensors[0].name for weight in weights)
    return FoundWeight(tuple(parts), names, weights[0].scheme)
