"""What a streamed model's `state_dict()` has for weights that are on disk: nothing that is saved.

The names are looked at by many (who saves an adapter leaves the rest out), so there is a tensor for
each, on the meta device, with its shape and dtype. But `torch.save` writes such a tensor without a
word, and a checkpoint without weights is found out when it is wanted.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

NOT_HERE = (
    "a streamed model's weights are on disk, and its state_dict() has nothing of them to "
    "save: copy the files that it streams from, or read them with nvmeio.safe_open or "
    "nvmeio.load_safetensors; adapters in it are saved by themselves"
)


class WeightOnDisk(torch.Tensor):
    """Shape and dtype of a weight, on the meta device; refuses to be saved or sent."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(NOT_HERE)

    def __deepcopy__(self, memo: Any) -> WeightOnDisk:
        return self


def mark_absent(
    names: set[str], module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """A state dict hook: of these attributes those without memory are marked.

    Args:
        names: Attributes whose weights are streamed.
        module: Theirs.
        state_dict: Changed in place.
        prefix: Of the module's names in it.
    """
    for name in names:
        found = state_dict.get(prefix + name)
        if isinstance(found, torch.Tensor) and found.is_meta:
            with torch._C.DisableTorchFunctionSubclass():
                state_dict[prefix + name] = found.detach().as_subclass(WeightOnDisk)
