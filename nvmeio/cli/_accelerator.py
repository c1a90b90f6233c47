"""GPU memory and GPUDirect Storage: had, or refused with the reason and the remedy."""

from __future__ import annotations

import sys

import torch

from nvmeio.cli.measure import machine
from nvmeio.errors import BackendUnavailableError


def require(gpu: bool, gds: bool, devices: tuple[int, ...] = (0,), asked: str = "--gpu") -> None:
    """Makes sure that what was asked for is there.

    Args:
        gpu: A CUDA device is wanted.
        gds: GPUDirect Storage is.
        devices: Which CUDA devices.
        asked: The flag that wants the device, for the message.

    Raises:
        BackendUnavailableError: It is not; says what was tried, and how to fix it.
    """
    if gds:
        _require_cufile()
    if gpu or gds:
        _require_cuda(devices, asked)


def _as_typed(flag: str) -> str:
    """The flag as the user spelled it: with underscores, where that is how it stands there."""
    underscored = f"--{flag.removeprefix('--').replace('-', '_')}"
    return underscored if underscored in sys.argv else flag


def _require_cuda(devices: tuple[int, ...], asked: str) -> None:
    asked = _as_typed(asked)
    cuda = _cuda()
    if cuda:
        raise BackendUnavailableError(
            f"{asked}: there is no CUDA device to move tensors to and from",
            attempts=[("torch", cuda)],
            remedy=f"leave {asked} away, or install torch with CUDA on a machine with a GPU "
            "(https://pytorch.org/get-started)",
        )
    missing = [d for d in devices if d >= torch.cuda.device_count()]
    if missing:
        raise BackendUnavailableError(
            f"{asked}: there is no CUDA device {missing[0]}",
            attempts=[("torch", f"{torch.cuda.device_count()} CUDA devices, counted from 0")],
            remedy="name one of them: DIR:DEVICE",
        )


def _cuda() -> str:
    """Why there is no CUDA device, or ""."""
    software = machine.software()
    return "" if software.cuda_available else f"{software.torch}: {software.cuda_detail}"


def _require_cufile() -> None:
    attempts = []
    if cuda := _cuda():
        attempts.append(("torch", cuda))
    found = machine.find_cufile()
    if not found.usable:
        attempts.append(("cuFile", found.reason))
    if attempts:
        raise BackendUnavailableError(
            "--gds: GPUDirect Storage cannot be had",
            attempts=attempts,
            remedy="leave --gds away: --gpu alone goes through host memory; "
            "`nvmeio report` tells what of cuFile there is",
        )
