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

from nvmeio.integrations._clients import joined, on_demand
from nvmeio.offload import SwappedOptimizer, follow, swapped_like

__all__ = ["NvmeOffloadTrainer", "NvmeOffloadTrainerMixin"]  # noqa: F822


class NvmeOffloadTrainerMixin:
    """Puts the optimizer that a `transformers.Trainer` makes on the drive.

    Args:
        args: The arguments of the Trainer.
        nvme_offload: Arguments of `SwappedOptimizer`; "swap_dir" at least. With "overwrite": True a
            training that was killed can be started again, from the Trainer's checkpoint; without,
            it is refused.
        kwargs: Further arguments of the Trainer.

    Raises:
        TypeError: `nvme_offload` is missing or has no "swap_dir".
    """

    accelerator: Any  # the Trainer's, like these
    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self, *args: Any, nvme_offload: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if nvme_offload is None or "swap_dir" not in nvme_offload:
            raise TypeError("nvme_offload needs a swap_dir: nvme_offload={'swap_dir': '/mnt/nvme'}")
        self._nvme_offload = dict(nvme_offload)
        super().__init__(*args, **kwargs)
        if self._nvme_offload.get("gradients") == "disk":
            # The Trainer clips, and logs the norm, through the accelerator; that would see one
            # gradient only.
            self.accelerator.clip_grad_norm_ = self._clip_grad_norm_

    def _clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        optimizer = self._swapped()
        if optimizer is None:
            raise RuntimeError("the Trainer clips gradients before it has made an optimizer")
        return optimizer.clip_grad_norm_(max_norm, norm_type, scaler=self.accelerator.scaler)

    def _swapped(self) -> SwappedOptimizer | None:
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return optimizer if isinstance(optimizer, SwappedOptimizer) else None

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own optimizer, swapped; a scheduler that it was given with goes on."""
        made = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        if self._swapped() is None:
            self.optimizer = swapped_like(made, **self._nvme_offload)
            if getattr(self.lr_scheduler, "optimizer", None) is made:
                follow(self.lr_scheduler, self.optimizer)
        return self.optimizer

    def close_offload(self) -> None:
        """Give back memory and swap files now, rather than with the Trainer."""
        optimizer = self._swapped()
        if optimizer is not None:
            optimizer.close()


def _trainer() -> Any:
    stock = importlib.import_module("transformers").Trainer
    about = "`transformers.Trainer` with `NvmeOffloadTrainerMixin`."
    return joined("NvmeOffloadTrainer", NvmeOffloadTrainerMixin, stock, doc=about)


__getattr__ = on_demand(__name__, "NvmeOffloadTrainer", _trainer)
