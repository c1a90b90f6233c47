"""A module that both Lightning packages train, with the drive or without it."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch

PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


@pytest.fixture(params=PACKAGES)
def pl(request: pytest.FixtureRequest) -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages it imports
        pytest.importorskip(request.param, reason=f"{request.param} is not installed")
        return importlib.import_module(PACKAGES[request.param])


def new_module(pl: ModuleType, optimizers: Any = None) -> Any:
    class Module(pl.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(
                torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
            )
            self.losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            (x,) = batch
            loss = (self.net(x).squeeze() - x.sum(1)).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            if optimizers is not None:
                return optimizers(self)
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

        def train_dataloader(self) -> Any:
            data = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
            return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), 16)

    return Module()


def quiet_trainer(pl: ModuleType, epochs: int, plugin: Any, *callbacks: Any) -> Any:
    """A Trainer on the CPU; a plugin of None is Lightning's own."""
    return pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        plugins=[plugin] if plugin is not None else None,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
