"""What SGLang does not tell a storage backend: which weights it serves, and when they change.

Its server arguments are asked for the first. For the second its own hooks are used
(`sglang.srt.plugins.hook_registry`): when its caches are flushed, and when weights in memory are
updated, every backend of this process begins a new generation.

Written for sglang 0.5.23.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import pkgutil
import weakref
from typing import Any

from nvmeio.integrations._kv_identity import Model

logger = logging.getLogger("nvmeio")

_CONTEXT = "sglang.srt.runtime_context"
_HOOKS = "sglang.srt.plugins.hook_registry"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
TARGETS = (
    "sglang.srt.managers.cache_controller.HiCacheController.reset",  # of every flush
    f"{_UPDATER}.update_weights_from_disk",
    f"{_UPDATER}.update_weights_from_tensor",
    f"{_UPDATER}.update_weights_from_ipc",
    f"{_UPDATER}.load_weights_from_distributed",
    f"{_UPDATER}.end_weight_update",  # also of what was written into the memory of weights
)
# Of the server's arguments, which decide what is computed with the same files.
_SETTINGS = (
    *("dtype", "quantization", "kv_cache_dtype", "json_model_override_args", "model_impl"),
    *("quantization_param_path", "torchao_config", "model_loader_extra_config", "load_format"),
    *("speculative_draft_model_quantization",),
)

_backends: weakref.WeakSet[Any] = weakref.WeakSet()
_hooked: list[bool] = []  # in this process, once


def served(model_name: str | None) -> tuple[list[Model], list[Any]]:
    """The models whose keys and values are kept, and what else makes them differ."""
    args: Any = None
    with contextlib.suppress(ImportError, AttributeError, ValueError):  # ValueError: none yet
        args = importlib.import_module(_CONTEXT).get_server_args()
    if args is None:
        return [Model(str(model_name), is_revision_known=False)], []

    def model(path: str, revision: str, load_format: str) -> Model:
        made_up = getattr(args, load_format, None) == "dummy"
        return Model(
            str(getattr(args, path)),
            getattr(args, revision, None),
            getattr(args, "download_dir", None),
            why="its weights are made up (--load-format dummy)" if made_up else "",
        )

    models = [model("model_path", "revision", "load_format")]
    if getattr(args, "speculative_draft_model_path", None):
        named = "speculative_draft_model_path", "speculative_draft_model_revision"
        models.append(model(*named, "speculative_draft_load_format"))
    return models, [(name, getattr(args, name, None)) for name in _SETTINGS]


def replica() -> int | None:
    """Which of a server's replicas this process computes for (``--dp-size``); None: it has one."""
    try:
        found: Any = importlib.import_module(_CONTEXT).get_parallel().dp_rank
    except (ImportError, AttributeError, ValueError, RuntimeError):
        return None
    return found if isinstance(found, int) else None


def tell(backend: Any) -> None:
    """Have SGLang's flushes and updates of weights reach a backend's `new_generation`."""
    _backends.add(backend)
    if not _hooked:
        _hooked.append(True)
        missing = _hook()
        if missing:
            logger.warning(
                "this SGLang does not say when weights change in memory (%s): after an update of "
                "weights ask it for /hicache/storage-backend/clear, or restart it",
                ", ".join(missing),
            )


def _hook() -> list[str]:
    """What cannot be hooked."""
    try:
        hooks: Any = importlib.import_module(_HOOKS)
        registry, after = hooks.HookRegistry, hooks.HookType.AFTER
    except (ImportError, AttributeError):
        return [_HOOKS]
    # One that has hooks of others is not touched again.
    taken = {target for target in TARGETS if hasattr(_resolved(target), "__wrapped__")}
    free = [target for target in TARGETS if target not in taken and _resolved(target)]
    for target in free:
        registry.register(target, _after, after)
    registry.apply_hooks()
    return [
        target
        for target in TARGETS
        if target not in free or not hasattr(_resolved(target), "__wrapped__")
    ]


def _after(_: Any, *args: Any, **named: Any) -> None:
    """Behind each of `TARGETS`, whatever came of it; its result stays what it is."""
    for backend in list(_backends):
        backend.new_generation()


def _resolved(name: str) -> Any:
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return None
