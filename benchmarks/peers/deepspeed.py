"""DeepSpeed's `aio_handle`, with its defaults."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from typing import Any, ClassVar

from _worker import PeerUnavailable

from peers._tensors import TensorPeer

INSTALL = "DS_BUILD_OPS=0 pip install deepspeed==0.19.8"
INSTALL_BUILD = "apt-get install libaio-dev ninja-build g++"


class DeepSpeedPeer(TensorPeer):
    """Its op is compiled at first use and cached by torch: minutes once, then seconds."""

    name: ClassVar[str] = "DeepSpeed"

    def __init__(self) -> None:
        super().__init__()
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ.setdefault("DS_IGNORE_CUDA_DETECTION", "1")
        # ninja installed by pip lies beside the interpreter, which need not be on PATH.
        os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
        try:
            builders: Any = importlib.import_module("deepspeed.ops.op_builder")
        except ImportError as error:
            raise PeerUnavailable(f"cannot be imported ({error})", INSTALL) from error
        if shutil.which("ninja") is None:
            raise PeerUnavailable("its op needs ninja to build", INSTALL_BUILD)
        builder = builders.AsyncIOBuilder()
        if not builder.is_compatible(verbose=False):
            raise PeerUnavailable("its op needs libaio's headers to build", INSTALL_BUILD)
        try:
            self._module = builder.load(verbose=False)
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise PeerUnavailable(f"its op did not build: {reason}", INSTALL_BUILD) from error

    def make_handle(self, **options: Any) -> Any:
        return self._module.aio_handle(**options)
