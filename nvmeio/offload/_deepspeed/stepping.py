"""The work of DeepSpeed's engine around a step: gradients are clipped before it."""

from __future__ import annotations

import weakref
from typing import Any

import torch


class Clipping:
    """Clips all gradients before each step of an optimizer.

    Gradients are clipped once: a step that failed, or was interrupted, and is made again finds
    them as they are.

    Attributes:
        norm: The norm of all gradients before they were clipped; None before the first step.
    """

    changes_inputs = True  # of the step that it comes before

    def __init__(self, max_norm: float) -> None:
        self._max_norm = max_norm
        self._clipped: list[tuple[weakref.ref[torch.Tensor], int]] | None = None
        self.norm: torch.Tensor | None = None

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip before each of its steps from now on."""
        optimizer.register_step_pre_hook(self)
        optimizer.register_step_post_hook(self._stepped)

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """The hook before a step."""
        if getattr(optimizer, "grad_scale", None) is not None:
            raise RuntimeError(
                "gradient_clipping would clip gradients that a GradScaler has scaled: leave it "
                "out of the configuration, and call optimizer.clip_grad_norm_(max_norm, "
                "scaler=scaler) before scaler.step(optimizer)"
            )
        gradients = [
            p.grad
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        if self._is_clipped(optimizer, gradients):
            return
        clip = getattr(optimizer, "clip_grad_norm_", None)
        if clip is not None:
            norm = clip(self._max_norm)
        else:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            norm = torch.nn.utils.clip_grad_norm_(parameters, self._max_norm)
        whole = getattr(norm, "full_tensor", None)  # of FSDP2's shards
        self.norm = (norm if whole is None else whole()).detach()
        self._clipped = [(weakref.ref(gradient), gradient._version) for gradient in gradients]

    def _is_clipped(self, optimizer: Any, gradients: list[torch.Tensor]) -> bool:
        """Whether a step that did not happen has clipped these."""
        if self._clipped is None:
            return False
        if getattr(optimizer, "has_gradients_on_disk", False):
            return bool(optimizer.gradients_clipped)
        return len(gradients) == len(self._clipped) and all(
            gradient is reference() and gradient._version == version
            for gradient, (reference, version) in zip(gradients, self._clipped, strict=True)
        )

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._clipped = None
