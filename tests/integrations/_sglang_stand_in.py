"""What nvmeio plugs into of SGLang, with its names, signatures and order of calls (0.5.23).

`install` puts it where SGLang would be imported from; `Server` goes the way of a model runner:
plugins, offloader, layers, weights, post-processing, `post_init`.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import pkgutil
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn


class HookType(enum.Enum):
    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


class HookRegistry:
    hooks: dict[str, tuple[Any, HookType]]

    @classmethod
    def register(cls, target: str, hook: Any, hook_type: HookType = HookType.AFTER) -> None:
        cls.hooks[target] = (hook, hook_type)

    @classmethod
    def apply_hooks(cls) -> None:
        """As SGLang's: what cannot be applied is logged."""
        for target, (hook, kind) in cls.hooks.items():
            try:
                where, name = target.rsplit(".", 1)
                owner = pkgutil.resolve_name(where)
                original = getattr(owner, name)
                if hasattr(original, "__wrapped__"):
                    continue
                new: Any = functools.partial(hook, original) if kind is HookType.AROUND else hook
                if kind is HookType.AFTER:
                    new = _followed(original, hook)
                wrapped = _wrapper(original, new)
                is_static = isinstance(owner.__dict__.get(name), staticmethod)
                setattr(owner, name, staticmethod(wrapped) if is_static else wrapped)
            except Exception:
                logging.getLogger(__name__).exception("Failed to apply hooks to %s", target)


def _followed(original: Any, hook: Callable[..., Any]) -> Callable[..., Any]:
    def both(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        other = hook(result, *args, **kwargs)
        return result if other is None else other

    return both


def _wrapper(original: Any, new: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return new(*args, **kwargs)

    return wrapper


class BaseOffloader:
    def wrap_modules(self, generator: Any, *_: Any, **__: Any) -> list[nn.Module]:
        return list(generator)

    def post_init(self) -> None:
        pass

    @property
    def forbid_copy_engine_usage(self) -> bool:
        return False


class NoopOffloader(BaseOffloader):
    pass


def create_offloader() -> BaseOffloader:
    return NoopOffloader()


class Method:
    """A method of quantisation: kernels want the weight transposed, and its scale beside it."""

    def process_weights_after_loading(self, layer: Any) -> None:
        scale = layer.weight.abs().max()
        layer.weight = nn.Parameter((layer.weight / scale).t(), requires_grad=False)
        layer.weight.scale = scale


class Linear(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width), requires_grad=False)
        self.quant_method = Method()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight) * self.weight.scale  # type: ignore[attr-defined]


class Attention(nn.Module):
    """MLA's: two attributes come from `kv_b_proj` after loading, and its forward uses these."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.kv_b_proj = nn.Linear(width, width, bias=False)
        self.w_kc: torch.Tensor | None = None
        self.w_vc: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.w_kc is not None
        return x + self.w_kc.sum()


class PlainAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.kv_b_proj = Linear(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kv_b_proj(x)  # type: ignore[no-any-return]


class Layer(nn.Module):
    ATTENTION: Any = Attention

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = self.ATTENTION(width)
        self.up, self.down = Linear(width), Linear(width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(self.up(self.attention(x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        made = (Layer(width) for _ in range(layers))
        self.layers = nn.ModuleList(_srt("utils.offloader").get_offloader().wrap_modules(made))
        self.lm_head = Linear(width)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, weight in weights:
            parameters[name].data.copy_(weight)
        for layer in self.layers:
            attention: Any = layer.attention
            if isinstance(attention, Attention):
                attention.w_kc, attention.w_vc = (attention.kv_b_proj.weight.data,) * 2

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)  # type: ignore[no-any-return]


def _modules_with_quant_method(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    for _, module in model.named_modules():
        if getattr(module, "quant_method", None) is not None:
            yield module, module.quant_method


class DefaultModelLoader:
    @staticmethod
    def load_weights_and_postprocess(model: Any, weights: Any, target_device: Any) -> None:
        loader = _srt("model_loader.loader").DefaultModelLoader
        loader.load_weights_only(model, weights, target_device)
        loader.postprocess_weights(model, target_device)

    @staticmethod
    def load_weights_only(model: Any, weights: Any, target_device: Any) -> None:
        model.load_weights(weights)

    @staticmethod
    def postprocess_weights(model: Any, target_device: Any) -> None:
        for module, method in _srt("model_loader.loader")._modules_with_quant_method(model):
            method.process_weights_after_loading(module)


def _unsupported_derived_weight_cache_error(model: nn.Module | None = None) -> str | None:
    return _found(model, "_derived_weight_cache_error")


def _found(model: nn.Module | None, name: str) -> str | None:
    modules = () if model is None else model.modules()
    return next((getattr(m, name) for m in modules if getattr(m, name, None) is not None), None)


class WeightExporter:
    def __init__(self, get_model: Callable[[], Any]) -> None:
        self.get_model = get_model

    def _weight_export_unsupported_reason(self) -> str | None:
        return _found(self.get_model(), "_weight_export_error")


def _options(**changed: Any) -> Any:
    """The resolved configuration of a server started with --disable-cuda-graph."""
    values: dict[str, Any] = {
        "get_exec.graph.cuda_graph_config.decode.backend": "disabled",
        "get_exec.graph.cuda_graph_config.prefill.backend": "disabled",
        "get_exec.offload.cpu_offload_gb": 0,
        "get_exec.offload.offload_group_size": -1,
        "get_exec.overlap.enable_two_batch_overlap": False,
        "get_exec.features.enable_memory_saver": False,
        "get_exec.kernel.enable_nvidia_megakernel": False,
        "get_exec.kernel.enable_amd_monokernel": False,
        "get_exec.offload.ple_offload_embedding": None,
        "get_exec.moe.enable_paged_experts": False,
        "get_exec.moe.kt_weight_path": None,
        "get_exec.moe.enable_eplb": False,
        "get_exec.moe.elastic_ep_backend": None,
        "get_flags.capture.enable_torch_compile": False,
        "get_lora.enable_lora": None,
        "get_lora.lora_paths": None,
        "get_disagg.enable_pdmux": False,
        "get_parallel.dwdp_size": 1,
        "get_parallel.tp_size": 1,
        "get_spec.uno_lora_path": None,
        "get_model.remote_instance_weight_loader_start_seed_via_transfer_engine": False,
        "get_model.checkpoint_engine_wait_weights_before_ready": False,
        "get_model.weight_cache_mode": "off",
        "get_model.is_startup_weight_load_overlap": False,
    }
    values.update(changed)
    roots: dict[str, Any] = {}
    for name, value in values.items():
        first, *between, last = name.split(".")
        at = roots.setdefault(first, types.SimpleNamespace())
        for part in between:
            if not hasattr(at, part):
                setattr(at, part, types.SimpleNamespace())
            at = getattr(at, part)
        setattr(at, last, value)
    return {name: (lambda bag=bag: bag) for name, bag in roots.items()}


def _srt(name: str) -> Any:
    return sys.modules[f"sglang.srt.{name}"]


def install(**options: Any) -> None:
    """Put it into `sys.modules`, anew; `options` by "get_exec.graph…" differ from the usual."""
    offloading = {
        "BaseOffloader": BaseOffloader,
        "NoopOffloader": NoopOffloader,
        "create_offloader": create_offloader,
        "instance": NoopOffloader(),
    }
    offloading["get_offloader"] = lambda: _srt("utils.offloader").instance
    loader = type("DefaultModelLoader", (), dict(DefaultModelLoader.__dict__))
    updater = "model_executor.model_runner_components.weight_updater"
    exporter = "model_executor.model_runner_components.weight_exporter"
    contents: dict[str, dict[str, Any]] = {
        "plugins.hook_registry": {
            "HookType": HookType,
            "HookRegistry": type("HookRegistry", (HookRegistry,), {"hooks": {}}),
        },
        "utils.offloader": offloading,
        "model_loader.loader": {
            "DefaultModelLoader": loader,
            "_modules_with_quant_method": _modules_with_quant_method,
        },
        "runtime_context": _options(**options),
        updater: {
            "_unsupported_derived_weight_cache_error": _unsupported_derived_weight_cache_error
        },
        exporter: {"WeightExporter": WeightExporter},
    }
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        del sys.modules[name]
    for name, values in contents.items():
        parts = f"sglang.srt.{name}".split(".")
        for length in range(1, len(parts) + 1):
            full = ".".join(parts[:length])
            if full not in sys.modules:
                module = sys.modules[full] = types.ModuleType(full)
                module.__path__ = []
                if length > 1:
                    setattr(sys.modules[".".join(parts[: length - 1])], parts[length - 1], module)
        vars(sys.modules[f"sglang.srt.{name}"]).update(values)


@contextlib.contextmanager
def installed(**options: Any) -> Iterator[None]:
    """`install`, and what was there before again."""
    before = {n: m for n, m in sys.modules.items() if n.split(".")[0] == "sglang"}
    install(**options)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
            del sys.modules[name]
        sys.modules.update(before)


class Server:
    """One process of a server: a model, and a draft model behind it where it is asked for."""

    def __init__(self, register: Callable[[], None]) -> None:
        registry = _srt("plugins.hook_registry").HookRegistry
        try:  # as `load_plugins`: what a plugin raises is logged, and the server goes on
            register()
        except Exception:
            logging.getLogger(__name__).exception("Failed to execute general plugin")
        registry.apply_hooks()

    def run(
        self, weights: Any, layers: int = 5, width: int = 32, is_draft_worker: bool = False
    ) -> Any:
        """As `ModelRunner`: the offloader, `load_model`, `post_init`."""
        offloading = _srt("utils.offloader")
        offloading.instance = offloading.create_offloader()
        model = Model(layers, width)
        loader = _srt("model_loader.loader").DefaultModelLoader
        loader.load_weights_and_postprocess(model, iter(weights), torch.device("cpu"))
        if not is_draft_worker:
            offloading.instance.post_init()
        return model

    def update(self, model: Any, weights: Any) -> tuple[bool, str]:
        """As `WeightUpdater.update_weights_from_disk`, and the others."""
        updater = _srt("model_executor.model_runner_components.weight_updater")
        error = updater._unsupported_derived_weight_cache_error(model)
        if error is not None:
            return False, error
        loader = _srt("model_loader.loader").DefaultModelLoader
        loader.load_weights_and_postprocess(model, iter(weights), torch.device("cpu"))
        return True, "Succeeded to update model weights."


def checkpoint(layers: int = 5, width: int = 32, seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    """Weights in the order of their names: layer 10 comes before layer 2, the head first."""
    made = torch.Generator().manual_seed(seed)
    names = ["lm_head.weight"]
    for number in range(layers):
        parts = ("attention.kv_b_proj", "up", "down")
        names += [f"layers.{number}.{part}.weight" for part in parts]
    return [(n, torch.randn(width, width, generator=made)) for n in sorted(names)]
