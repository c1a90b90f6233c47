"""The names of torch that nvmeio uses although torch does not document them.

Another release of torch may rename or change any of them, so this is the one place that knows
them. `NAMES` has what is looked up in torch's modules: import it from here under its key. A name
that this torch lacks raises `ImportError`, which says what it was for; `found` gives None instead,
for names that nvmeio does without. `ATTRIBUTES` has what is asked of torch's objects.
`nvmeio report` and the tests ask `missing`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Name(NamedTuple):
    """A private name of torch.

    Attributes:
        path: Its place in torch.
        use: Its use in nvmeio.
        without: The effect if it is missing.
    """

    path: str
    use: str
    without: str


_REFUSED = "a feature that needs it raises ImportError"
_BY_TORCH = "torch saves and loads by itself, slower"

NAMES = {
    # Autograd and modes, entered and left by C alone: Ctrl-C cannot cut them in half.
    "InferenceMode": Name("torch._C._InferenceMode", "leave inference mode", _REFUSED),
    "set_grad_enabled": Name("torch._C._set_grad_enabled", "switch autograd", _REFUSED),
    "push_saved_hooks": Name(
        "torch._C._autograd._push_saved_tensors_default_hooks", "keep places of weights", _REFUSED
    ),
    "pop_saved_hooks": Name(
        "torch._C._autograd._pop_saved_tensors_default_hooks", "undo the above", _REFUSED
    ),
    "top_saved_hooks": Name(
        "torch._C._autograd._top_saved_tensors_default_hooks",
        "call the hooks around ours",
        "hooks around a swapped module's are not called",
    ),
    "graph_task": Name(
        "torch._C._current_graph_task_id",
        "know whether a backward pass runs",
        "a forward in backward counts as a forward of its own",
    ),
    "is_tracing": Name("torch._C._is_tracing", "refuse jit.trace", _REFUSED),
    # Tensors and storages.
    "DisableTorchFunctionSubclass": Name(
        "torch._C.DisableTorchFunctionSubclass", "look at tensors of our own classes", _REFUSED
    ),
    "disabled_torch_function": Name(
        "torch._C._disabled_torch_function_impl", "take calls as torch.Tensor does", _REFUSED
    ),
    "make_subclass": Name("torch.Tensor._make_subclass", "make tensors of our classes", _REFUSED),
    "is_wrapper_subclass": Name(
        "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
        "refuse tensors that wrap others",
        _REFUSED,
    ),
    "has_storage": Name("torch._C._has_storage", "see whether an output is a view", _REFUSED),
    "storage_use_count": Name(
        "torch._C._storage_Use_Count", "see who else has saved activations", _REFUSED
    ),
    "storage_of_weak_pointer": Name(
        "torch.UntypedStorage._new_with_weak_ptr", "find saved activations again", _REFUSED
    ),
    "has_cuda_context": Name(
        "torch._C._cuda_hasPrimaryContext", "lock pages without starting CUDA", _REFUSED
    ),
    "pytree": Name("torch.utils._pytree", "walk through states and arguments", _REFUSED),
    "detect_fake_mode": Name("torch._guards.detect_fake_mode", "load fake tensors", _REFUSED),
    # Archives of torch.save; `has_seam`, `agrees` and `seam` try these before they are relied on.
    "save": Name("torch.serialization._save", "learn an archive's records", _BY_TORCH),
    "load": Name("torch.serialization._load", "load from records in memory", _BY_TORCH),
    "open_zip_writer": Name(
        "torch.serialization._open_zipfile_writer_buffer", "learn an archive's layout", _BY_TORCH
    ),
    "FileReader": Name("torch._C.PyTorchFileReader", "try torch's writer", _BY_TORCH),
    "serialization_settings": Name(
        "torch.serialization._serialization_tls", "see skip_data", "skip_data counts as off"
    ),
    "restore_location": Name(
        "torch.serialization._get_restore_location", "follow map_location", _BY_TORCH
    ),
    "location_taggers": Name(
        "torch.serialization._package_registry", "see whether others tag storages", _BY_TORCH
    ),
    "cpu_tag": Name("torch.serialization._cpu_tag", "know torch's own tagger", _BY_TORCH),
    "weights_only_unpickler": Name(
        "torch._weights_only_unpickler", "unpickle as weights_only=True", _BY_TORCH
    ),
    "storage_names": Name(
        "torch.storage._dtype_to_storage_type_map", "pickle plain tensors", _BY_TORCH
    ),
    "new_dtypes": Name("torch.storage._new_dtypes", "leave newer dtypes to torch", _BY_TORCH),
    "tensor_metadata": Name("torch._C._get_tensor_metadata", "pickle plain tensors", _BY_TORCH),
    "function_stack_depth": Name(
        "torch._C._len_torch_function_stack", "see whether a mode has a say", _BY_TORCH
    ),
    "dispatch_stack_depth": Name(
        "torch._C._len_torch_dispatch_stack", "see whether a mode has a say", _BY_TORCH
    ),
    "rebuild_tensor": Name("torch._utils._rebuild_tensor_v2", "pickle plain tensors", _BY_TORCH),
    "rebuild_parameter": Name(
        "torch._utils._rebuild_parameter", "pickle plain parameters", _BY_TORCH
    ),
    "set_tensor_metadata": Name(
        "torch._utils.set_tensor_metadata", "restore what is conjugated", _BY_TORCH
    ),
    # Products with packed weights.
    "pack_int4": Name(
        "torch.ops.aten._convert_weight_to_int4pack", "lay 4 bits out as torch's product", _REFUSED
    ),
    "int4_product": Name("torch.ops.aten._weight_int4pack_mm", "compare with torch's", _REFUSED),
    # Optimizers and modules.
    "find_non_finite": Name(
        "torch._amp_foreach_non_finite_check_and_unscale_", "know a GradScaler's look", _REFUSED
    ),
    "IncompatibleKeys": Name(
        "torch.nn.modules.module._IncompatibleKeys", "return what load_state_dict does", _REFUSED
    ),
    "global_optimizer_pre_hooks": Name(
        "torch.optim.optimizer._global_optimizer_pre_hooks", "call them before a step", _REFUSED
    ),
    # Distributed checkpoints.
    "StorageInfo": Name(
        "torch.distributed.checkpoint.filesystem._StorageInfo", "write torch's metadata", _REFUSED
    ),
    "StoragePrefix": Name(
        "torch.distributed.checkpoint.filesystem._StoragePrefix", "name files as torch", _REFUSED
    ),
    "narrow_tensor": Name(
        "torch.distributed._shard._utils.narrow_tensor_by_index", "read a part of a shard", _REFUSED
    ),
}


class Attribute(NamedTuple):
    """A private attribute of torch's objects.

    Attributes:
        on: An object that has it, made for the question.
        use: Its use in nvmeio.
    """

    on: Callable[[], object]
    use: str


def _sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])


# Without one of these nothing works that looks at such an object.
ATTRIBUTES = {
    "_apply": Attribute(torch.nn.Module, "convert what is not streamed as the module does"),
    "_backward_hooks": Attribute(lambda: torch.zeros(1), "hand hooks on to a tensor's successor"),
    "_base": Attribute(lambda: torch.zeros(1), "find what a view is of"),
    "_buffers": Attribute(torch.nn.Module, "put weights in and out without __setattr__"),
    "_call_impl": Attribute(torch.nn.Module, "frame a module's call, its hooks included"),
    "_cdata": Attribute(lambda: torch.zeros(1).untyped_storage(), "hold a storage's memory"),
    "_modules": Attribute(torch.nn.Module, "walk through modules as torch does"),
    "_optimizer_load_state_dict_post_hooks": Attribute(_sgd, "call them"),
    "_optimizer_load_state_dict_pre_hooks": Attribute(_sgd, "call them"),
    "_parameters": Attribute(torch.nn.Module, "put weights in and out without __setattr__"),
    "_version": Attribute(lambda: torch.zeros(1), "see that a tensor was changed in place"),
}


def found(key: str) -> Any:
    """A name of `NAMES` as this torch has it; None if it is missing."""
    module, _, name = NAMES[key].path.rpartition(".")
    holder: Any = sys.modules.get(module)
    if holder is not None:  # as nearly always: what a save asks for is not imported anew
        return getattr(holder, name, None)
    try:
        holder = importlib.import_module(module)
    except ImportError:
        outer, _, inner = module.rpartition(".")
        try:
            holder = getattr(importlib.import_module(outer), inner, None)
        except ImportError:
            return None
    return getattr(holder, name, None)


def missing() -> list[str]:
    """Names of the tables above that this torch lacks, each with the effect."""
    without_cuda = torch.version.cuda is None
    keys = set(NAMES) - {"has_cuda_context"} if without_cuda else set(NAMES)
    lacking = [NAMES[key] for key in sorted(keys) if found(key) is None]
    names = [f"{name.path}: {name.without}" for name in lacking]
    attributes = [
        f"{type(holder).__name__}.{key}: {_REFUSED}"
        for key, attribute in ATTRIBUTES.items()
        if not hasattr(holder := attribute.on(), key)
    ]
    return names + attributes


def __getattr__(key: str) -> Any:
    if key not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {key!r}")
    value = found(key)
    if value is None:
        raise ImportError(
            f"torch {torch.__version__} has no {NAMES[key].path}, which nvmeio uses to "
            f"{NAMES[key].use}: install a torch that nvmeio was tested with, 2.6 to 2.13"
        )
    globals()[key] = value  # from now on it costs no call; what may be replaced is asked of `found`
    return value
