"""The one gradient that stays in memory, as a sign of changes to all the others.

Code that knows nothing of the drive works on ``.grad``: GradScaler looks there for infinities and
NaN, ``model.zero_grad()`` sets it to None, torch's clipping multiplies it. One small gradient is
left for them to find. If its parameter had no part in the backward pass (it is frozen, or was not
used), a gradient of zeros stands in for it, which is never stepped.
"""

from __future__ import annotations

import torch

from nvmeio._torch_private import find_non_finite
from nvmeio.offload._optimizer.params import SwappedParam
from nvmeio.offload._swap_files.tensors import local


class GradSentinel:
    """The gradient of one parameter, watched.

    `stands_in` says that ``.grad`` only stands in for a gradient.
    """

    def __init__(self, param: SwappedParam) -> None:
        self.param = param
        self.stands_in = False
        self._held: torch.Tensor | None = None  # the gradient in ``.grad``; keeps its identity
        self._version = 0  # of it: torch counts changes in place
        self._touched = False
        self._clean: torch.Tensor | None = None  # its values, while it is poisoned
        self._announced = False

    # Before and after backward

    def zeroed(self) -> bool:
        """Whether somebody set it to None since it was seen."""
        return self._held is not None and self.param.parameter.grad is None

    def make_way(self) -> None:
        """Called before its gradient is accumulated: into its own values, or into nothing."""
        self.restore()
        self._look()
        if self.stands_in and self.param.parameter.grad is self._held:
            self.param.parameter.grad = None
            self._held, self.stands_in = None, False
        self._announced = True

    def replaced(self) -> bool:
        """Whether the gradient that has just come is a new one, not the old one added to.

        FSDP accumulates by itself and calls no hook before; the same tensor stays then.
        """
        announced, self._announced = self._announced, False
        return not announced and self._held is not None and not self._is_held()

    def arrived(self) -> None:
        """Called when its gradient has come."""
        self.stands_in = False
        self._hold(self.param.parameter.grad)

    def stand_in(self) -> None:
        """Leave something in memory: another gradient has gone to the drive."""
        if self.param.parameter.grad is None:
            zeros = torch.zeros_like(self.param.parameter, requires_grad=False)
            # Minus zero: what is added to it (by FSDP) keeps even the sign of its zeros.
            self.param.parameter.grad = zeros.neg_()
            self.stands_in = True
            self._hold(zeros)

    # For GradScaler

    def poison(self, lost: bool | torch.Tensor) -> None:
        """Become NaN if another gradient is not finite; only a device may know whether one is."""
        gradient = self.param.parameter.grad
        if gradient is None or (self._clean is not None and lost is True):
            return
        self._look()
        if self._clean is None:
            self._clean = gradient.clone()
        mine = local(gradient)
        mine.masked_fill_(torch.as_tensor(lost, device=mine.device), float("nan"))
        self._hold(gradient)

    def restore(self) -> None:
        """Take its own values again."""
        clean, self._clean = self._clean, None
        gradient = self.param.parameter.grad
        if clean is not None and gradient is not None:
            self._look()
            gradient.copy_(clean)
            self._hold(gradient)

    # Queries

    @property
    def gradient(self) -> torch.Tensor | None:
        """Its gradient with its own values; None if it has no gradient."""
        if self.stands_in:
            return None
        return self.param.parameter.grad if self._clean is None else self._clean

    def check(self, scaled: bool) -> None:
        """Raise if somebody changed it since backward: the gradients on the drive do not have that.

        `scaled` says that a GradScaler has looked at it.
        """
        self._look(_versions_of_a_look() if scaled else 0)
        if self._touched:
            raise RuntimeError(
                "gradients are on the drive, and the one that is in memory was changed since "
                "backward: torch.nn.utils.clip_grad_norm_ and whatever else works on .grad does "
                "not reach the others, so nothing was stepped. Call zero_grad(); then clip with "
                'clip_grad_norm_ of the optimizer, or keep gradients="memory"'
            )
        if self._is_held():
            self._hold(self._held)  # so that it may be looked at once more

    def forget(self) -> None:
        """Forget it: all gradients are gone."""
        if self.stands_in and self._is_held():
            self.param.parameter.grad = None
        self._held = self._clean = None
        self.stands_in = self._touched = self._announced = False

    def _look(self, more: int = 0) -> None:
        held = self._held
        if held is None or self.param.parameter.grad is None:
            return
        if not self._is_held() or local(held)._version not in (self._version, self._version + more):
            self._touched = True

    def _hold(self, gradient: torch.Tensor | None) -> None:
        self._held = gradient
        self._version = 0 if gradient is None else local(gradient)._version

    def _is_held(self) -> bool:
        return self.param.parameter.grad is self._held


def _versions_of_a_look() -> int:
    """By how much a GradScaler's look raises a tensor's version."""
    probe = torch.ones(1)
    find_non_finite([probe], torch.zeros(1), torch.ones(1))
    return int(probe._version)
