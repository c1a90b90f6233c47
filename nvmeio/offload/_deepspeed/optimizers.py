"""The optimizer that a configuration names: torch's class, and DeepSpeed's defaults for it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from nvmeio.errors import nearest
from nvmeio.offload._deepspeed.keys import flag, known
from nvmeio.offload._deepspeed.refusals import Refusals

_ADAM = ("adam", "adamw")
# DeepSpeed's own Adam and Adagrad decay nothing unless they are told to; torch's AdamW does.
_ADAM_DEFAULTS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
_ADAGRAD_DEFAULTS = {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0}
# Optimizers that DeepSpeed builds and torch lacks, with a class to pass in their place.
_NOT_OF_TORCH = {
    "lamb": "it has a norm of each matrix. Pass a class that steps each parameter by itself: "
    "offload(module, pytorch_optimizer.Lamb, config=config, lr=…)",
    "lion": "torch has no Lion. Pass a class: offload(module, lion_pytorch.Lion, config=config, "
    "lr=…)",
    "muadam": "it is mup's. Make the groups and pass the class: offload(module, torch.optim.Adam, "
    "config=config, params=lambda module: groups)",
    "muadamw": "it is mup's. Make the groups and pass the class: offload(module, "
    "torch.optim.AdamW, config=config, params=lambda module: groups)",
    "musgd": "it is mup's. Make the groups and pass the class: offload(module, torch.optim.SGD, "
    "config=config, params=lambda module: groups)",
    "muon": "it is two optimizers. Make a SwappedOptimizer(torch.optim.Muon, matrices, …) and a "
    "SwappedOptimizer(torch.optim.AdamW, others, …)",
}
_SECTION = ("type", "params", "legacy_fusion")


class NamedOptimizer(NamedTuple):
    """An optimizer's class, and its arguments by name."""

    optimizer_class: Any
    arguments: dict[str, Any]


def named_optimizer(
    section: Any, given: Mapping[str, Any], refusals: Refusals
) -> NamedOptimizer | None:
    """The class that "optimizer" names, and all its arguments.

    Args:
        section: The section of the config.
        given: The caller's arguments, in place of those that are "auto" or left out.
        refusals: Refused settings are added to it.

    Returns:
        None if something was refused that the class depends on.
    """
    section = known("optimizer", section, _SECTION, refusals)
    with refusals.collect():
        if flag(section, "legacy_fusion", False):
            refusals.add("optimizer: legacy_fusion is for apex. Write false, or leave it out")
    params = section.get("params")
    params = {} if params is None else params
    if not isinstance(params, Mapping):
        refusals.add(f"optimizer: params must be a mapping, not {params!r:.80}")
        return None
    name = section.get("type")
    if not isinstance(name, str):
        refusals.add(
            f'optimizer: type must be the name of an optimizer ("AdamW"), not {name!r:.80}'
        )
        return None
    params = _filled(params, given, refusals)
    if "max_grad_norm" in params:
        value = params.pop("max_grad_norm")
        refusals.add(
            f"optimizer: params: max_grad_norm does not clip. Write it at the top: "
            f'"gradient_clipping": {value}'
        )
    lowered = name.lower()
    if lowered in _ADAM:
        made = _adam(lowered, params, refusals)
    elif lowered == "adagrad":
        _drop_states_dtype(params, refusals)
        made = NamedOptimizer(torch.optim.Adagrad, {**_ADAGRAD_DEFAULTS, **params})
    elif lowered in _NOT_OF_TORCH:
        refusals.add(f'optimizer: "{name}" is not built here: {_NOT_OF_TORCH[lowered]}')
        return None
    else:
        found = getattr(torch.optim, name, None)
        if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
            classes = [k for k, v in vars(torch.optim).items() if isinstance(v, type)]
            refusals.add(
                f"optimizer: unknown type {name!r}{nearest(name, classes)}; write a class of "
                'torch.optim ("AdamW"), or pass one: offload(module, TheClass, config=config)'
            )
            return None
        made = NamedOptimizer(found, params)
    takes = [n for n in inspect.signature(made.optimizer_class).parameters if n != "params"]
    for key in made.arguments.keys() - set(takes):
        refusals.add(
            f"optimizer: params: {made.optimizer_class.__name__} takes no {key!r}"
            f"{nearest(key, takes)}; it takes {', '.join(takes)}"
        )
    return made


def _filled(
    params: Mapping[str, Any], given: Mapping[str, Any], refusals: Refusals
) -> dict[str, Any]:
    """The section's arguments and the caller's together."""
    filled = dict(params)
    for key, value in given.items():
        if key in params and params[key] not in ("auto", value):
            refusals.add(
                f"optimizer: params: {key} is {params[key]!r}, and offload() was given "
                f'{key}={value!r}: leave out one, or write "{key}": "auto"'
            )
        filled[key] = value
    for key in [k for k, v in filled.items() if v == "auto"]:
        del filled[key]
        refusals.add(
            f'optimizer: params: {key} is "auto", which only transformers\' Trainer fills in: '
            f"write the number, or offload(module, config=config, {key}=…)"
        )
    return filled


def _adam(name: str, params: dict[str, Any], refusals: Refusals) -> NamedOptimizer:
    """Adam, which is AdamW to DeepSpeed unless adam_w_mode is false."""
    switches = {"adam_w_mode": True, "torch_adam": False, "bias_correction": True}
    for key, default in switches.items():
        with refusals.collect():
            switches[key] = flag(params, key, default)
        params.pop(key, None)
    params.pop("set_grad_none", None)
    _drop_states_dtype(params, refusals)
    if not switches["bias_correction"]:
        refusals.add(
            "optimizer: params: bias_correction is always on in torch's classes. Write true, or "
            "leave it out"
        )
    decoupled = name == "adamw" or switches["adam_w_mode"]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    defaults = {} if switches["torch_adam"] else _ADAM_DEFAULTS
    return NamedOptimizer(kind, {**defaults, **params})


def _drop_states_dtype(params: dict[str, Any], refusals: Refusals) -> None:
    with refusals.collect():
        if not flag(params, "fp32_optimizer_states", True):
            refusals.add(
                "optimizer: params: fp32_optimizer_states is true wherever masters are. Leave it "
                "out; for state in bf16 leave bf16 out too, and call module.to(torch.bfloat16)"
            )
    params.pop("fp32_optimizer_states", None)
