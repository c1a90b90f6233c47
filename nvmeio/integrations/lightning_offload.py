"""Lightning with optimizer state on the drive: a callback, or an optimizer to return.

    Trainer(callbacks=[SwapOptimizers("/mnt/nvme", master_dtype=torch.float32)])

`configure_optimizers` stays as it is. Works with `lightning` and with `pytorch_lightning`; their
checkpoints hold the state as ever, and each resumes from what the other saved.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

from nvmeio._residency import calls
from nvmeio._storage.durable import make_directory
from nvmeio.integrations._clients import LIGHTNING, joined, lightning_modules
from nvmeio.offload import SwappedOptimizer, follow, swapped_like

__all__ = ["LightningSwappedOptimizer", "SwapOptimizers"]  # noqa: F822


class LightningSwappedOptimizer(SwappedOptimizer):
    """`SwappedOptimizer` for automatic optimization, where Lightning steps with a closure.

    The closure (forward, backward, clipping) is evaluated once, before the step, as torch's Adam
    does it. Return one from `configure_optimizers`, or let `SwapOptimizers` make it.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate the closure, then step; see `SwappedOptimizer.step`.

        Returns:
            The closure's result.
        """
        loss = None
        if closure is not None:
            grad = calls.with_grad()
            try:
                loss = closure()
            finally:
                del grad
        super().step()
        return loss


class _SwapOptimizers:
    """A callback that puts the Trainer's optimizers on the drive when fitting begins.

    Args:
        swap_dir: As for `SwappedOptimizer`; a subdirectory for each optimizer is made in it, or in
            each of them.
        options: Further arguments of `SwappedOptimizer`. With ``overwrite=True`` a fit that was
            killed can be started again, from Lightning's checkpoint; without, it is refused.

    Raises:
        BackendUnavailableError: Neither package is installed.
        ValueError: `Trainer(gradient_clip_val=…)` with gradients on the drive, which Lightning
            cannot reach.

    Attributes:
        optimizers: Those it has made.
    """

    def __init__(
        self, swap_dir: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], **options: Any
    ) -> None:
        super().__init__()
        directories = [swap_dir] if isinstance(swap_dir, (str, os.PathLike)) else swap_dir
        self._swap_dirs = [os.fspath(each) for each in directories]
        self._options = options
        self.optimizers: list[LightningSwappedOptimizer] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self._options.get("gradients") == "disk" and trainer.gradient_clip_val:
            raise ValueError(
                "gradient_clip_val cannot reach gradients on the drive: call clip_grad_norm_ of "
                'the optimizer in on_before_optimizer_step, or leave gradients at "memory"'
            )
        made: list[Any] = []
        for number, optimizer in enumerate(trainer.optimizers):
            if isinstance(optimizer, SwappedOptimizer):
                made.append(optimizer)
                continue
            folders = [os.path.join(each, f"optimizer-{number}") for each in self._swap_dirs]
            for above, folder in zip(self._swap_dirs, folders, strict=True):
                make_directory(above)
                make_directory(folder)
            swapped = swapped_like(
                optimizer, folders, as_class=LightningSwappedOptimizer, **self._options
            )
            for config in trainer.lr_scheduler_configs:
                if config.scheduler.optimizer is optimizer:
                    follow(config.scheduler, swapped)
            made.append(swapped)
            self.optimizers.append(swapped)  # type: ignore[arg-type]
        trainer.optimizers = made

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        for optimizer in self.optimizers:
            optimizer.close()
            for folder in map(os.path.dirname, optimizer.swap_dirs):
                with contextlib.suppress(OSError):  # not empty yet, or another rank was first
                    os.rmdir(folder)
        self.optimizers = []


def __getattr__(name: str) -> Any:
    """`SwapOptimizers`, made when it is first asked for: Lightning is imported then."""
    if name != "SwapOptimizers":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Two packages, two classes of the same name: a Trainer asks for its own.
    bases = tuple(importlib.import_module(each).Callback for each in lightning_modules(LIGHTNING))
    made = joined("SwapOptimizers", _SwapOptimizers, *bases)
    if len(bases) == len(LIGHTNING):
        globals()[name] = made
    return made
