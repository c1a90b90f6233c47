"""GPU memory and GPUDirect Storage: had, or refused with the reason and the remedy."""

from __future__ import annotations

import torch

import nvmeio
from nvmeio.cli import _facts
from nvmeio.errors import BackendUnavailableError


def require(gpu: bool, gds: bool, devices: tuple[int, ...] = (0,)) -> None:
    """Makes sure that what was asked for is there.

    Raises:
        BackendUnavailableError: It is not; says what was tried, and how to mend it.
    """
    if gpu or gds:
        _require_cuda(devices)
    if gds:
        _require_cufile()


def _require_cuda(devices: tuple[int, ...]) -> None:
    software = _facts.software()
    if not software.cuda_available:
        raise BackendUnavailableError(
            "--gpu: there is no CUDA device to move tensors to and from",
            attempts=[("torch", f"{software.torch}: {software.cuda_detail}")],
            remedy="leave --gpu away, or install torch with CUDA on a machine with a GPU "
            "(https://pytorch.org/get-started)",
        )
    missing = [d for d in devices if d >= torch.cuda.device_count()]
    if missing:
        raise BackendUnavailableError(
            f"--gpu: there is no CUDA device {missing[0]}",
            attempts=[("torch", f"{torch.cuda.device_count()} CUDA devices, counted from 0")],
            remedy="name one of them: DIR:DEVICE",
        )


def _require_cufile() -> None:
    found = _facts.find_cufile()
    attempts = [("cuFile", found.reason or f"found at {found.path}")]
    if not hasattr(nvmeio, "GdsHandle"):
        attempts.append(("nvmeio", f"version {nvmeio.__version__} has no cuFile engine"))
    if len(attempts) > 1 or not found.usable:
        raise BackendUnavailableError(
            "--gds: GPUDirect Storage cannot be had",
            attempts=attempts,
            remedy="leave --gds away: --gpu alone goes through host memory; "
            "`nvmeio report` tells what of cuFile there is",
        )
