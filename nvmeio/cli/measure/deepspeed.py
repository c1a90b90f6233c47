"""DeepSpeed's asynchronous I/O op, had or refused with what is missing."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from typing import Any

import torch

from nvmeio.errors import BackendUnavailableError

INSTALL = "DS_BUILD_OPS=0 pip install deepspeed==0.19.8"
INSTALL_BUILD = "apt-get install libaio-dev ninja-build g++"


def load() -> Any:
    """DeepSpeed's async_io module, compiled at first use (minutes once, then cached by torch).

    Raises:
        BackendUnavailableError: It is not installed or does not build; says what is missing.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    os.environ.setdefault("DS_IGNORE_CUDA_DETECTION", "1")
    # ninja installed by pip lies beside the interpreter, which need not be on PATH.
    os.environ["PATH"] = os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"]))
    try:
        builder = importlib.import_module("deepspeed.ops.op_builder").AsyncIOBuilder()
    except ImportError as error:
        raise _missing(error, INSTALL) from error
    for tool in ("ninja", "c++"):
        if shutil.which(tool) is None:
            raise _missing(f"its op needs {tool} to build", INSTALL_BUILD)
    if not builder.is_compatible(verbose=False):
        raise _missing("its op needs libaio's headers to build", INSTALL_BUILD)
    try:
        return builder.load(verbose=False)
    except Exception as error:
        raise _missing(error, INSTALL_BUILD) from error


def _missing(reason: object, remedy: str) -> BackendUnavailableError:
    first = (str(reason).strip().splitlines() or [repr(reason)])[0]
    return BackendUnavailableError(
        "the engine deepspeed cannot be had", attempts=[("async_io", first)], remedy=remedy
    )
