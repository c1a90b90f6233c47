"""Errors of safetensors files: `except safetensors.SafetensorError` takes them as well.

The package is not needed, and not imported before there is an error.
"""

from __future__ import annotations

import errno
import os
from typing import Any, TypeVar

import torch

from nvmeio import _checks
from nvmeio.errors import BackendUnavailableError, TransferError, as_kind, joined

AnyError = TypeVar("AnyError", bound=BaseException)


def as_package(cls: type[AnyError]) -> type[AnyError]:
    """An error class that is the package's `SafetensorError` as well, where that is installed."""
    package = _package_error()
    return cls if package is None else joined(cls, package)


def failed_save(failed: TransferError) -> TransferError:
    """The failure of a save, as the package's error as well."""
    package = _package_error()
    return failed if package is None else as_kind(failed, package)


def _package_error() -> type[Exception] | None:
    try:
        from safetensors import SafetensorError
    except ImportError:
        return None
    return SafetensorError


def noted(failed: AnyError, remedy: str) -> AnyError:
    """An error in the package's own words, with what to do as a note (from Python 3.11 on)."""
    if hasattr(failed, "add_note"):
        failed.add_note(remedy)
    return failed


class _MissingError(TransferError):
    """There is no such file; in the package's words."""

    def __str__(self) -> str:
        return f"No such file or directory: {self.path}"


def missing(path: str | os.PathLike[str]) -> TransferError:
    """What is raised where there is no such file: a `FileNotFoundError`."""
    failed = _MissingError(errno.ENOENT, operation="open", path=os.fspath(path))
    return noted(failed, "check the path, and that its directory is there")


def device_of(value: Any) -> torch.device:
    """The device that tensors shall lie on; None is the CPU.

    Raises:
        BackendUnavailableError: It is a CUDA device, and there is no such one here.
        RuntimeError: It is no device.
    """
    try:
        return _checks.device("device", "cpu" if value is None else value)
    except BackendUnavailableError:
        raise
    except (RuntimeError, TypeError) as failed:
        raise as_package(RuntimeError)(f"device {value!r}: {failed}") from None
