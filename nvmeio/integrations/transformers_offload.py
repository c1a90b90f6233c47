"""A transformers Trainer whose optimizer state is on the drive.

    from nvmeio.integrations.transformers_offload import NvmeOffloadTrainer as Trainer
    trainer = Trainer(model, args, …, nvme_offload={"swap_dir": "/mnt/nvme"})

Everything else is as ever: schedulers, clipping, accumulation, checkpoints, from which either
resumes. Put `NvmeOffloadTrainerMixin` before another Trainer, such as `NvmeTrainer` of
`nvmeio.integrations.transformers`, to have both.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from nvmeio.offload import SwappedOptimizer
from nvmeio.offload.converting import swapped_like

__all__ = ["NvmeOffloadTrainer", "NvmeOffloadTrainerMixin"]  # noqa: F822


class NvmeOffloadTrainerMixin:
    """Puts the optimizer that a `transformers.Trainer` makes on the drive.

    Args:
        args: Of the Trainer.
        nvme_offload: Arguments of `SwappedOptimizer`; "swap_dir" at least.
        kwargs: Of the Trainer.

    Raises:
        TypeError: `nvme_offload` is missing or has no "swap_dir".
        ValueError: Gradients are to be on the drive, and the Trainer is to clip them
            (``max_grad_norm``), which it cannot.
    """

    def __init__(
        self, *args: Any, nvme_offload: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if nvme_offload is None or "swap_dir" not in nvme_offload:
            raise TypeError("nvme_offload needs a swap_dir: nvme_offload={'swap_dir': '/mnt/nvme'}")
        self._nvme_offload = dict(nvme_offload)
        super().__init__(*args, **kwargs)
        trainer: Any = self
        if self._nvme_offload.get("gradients") == "disk" and trainer.args.max_grad_norm:
            raise ValueError(
                "the Trainer cannot clip gradients on the drive: set max_grad_norm=0 in its "
                'arguments, or leave gradients at "memory"'
            )

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own optimizer, swapped."""
        trainer: Any = self
        made = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        if not isinstance(made, SwappedOptimizer):
            made = trainer.optimizer = swapped_like(made, **self._nvme_offload)
        return made

    def close_offload(self) -> None:
        """Give back memory and swap files now, rather than with the Trainer."""
        trainer: Any = self
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        if isinstance(optimizer, SwappedOptimizer):
            optimizer.close()


def __getattr__(name: str) -> Any:
    """`NvmeOffloadTrainer`, made when it is first asked for: transformers is imported then."""
    if name != "NvmeOffloadTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    stock: Any = importlib.import_module("transformers").Trainer
    made = type(
        "NvmeOffloadTrainer",
        (NvmeOffloadTrainerMixin, stock),
        {
            "__doc__": "`transformers.Trainer` with `NvmeOffloadTrainerMixin`.",
            "__module__": __name__,
        },
    )
    globals()[name] = made
    return made
