"""SGLang with layers on NVMe: an offloader that plugs in through SGLang's own plugin framework.

SGLang loads the entry points of the group ``sglang.srt.plugins``; nvmeio has one, `register`, which
does nothing unless a configuration is named::

    NVMEIO_SGLANG_CONFIG=zero_inference.json python -m sglang.launch_server --model-path … \
        --disable-cuda-graph

The file is JSON, and nvmeio's own. (DeepSpeed's fork of SGLang takes a ZeRO-3 configuration with
``--zero-inference-config``; that is another thing.) ::

    {"nvme_path": "/mnt/nvme",
     "resident_bytes": 24000000000,
     "window": 3,
     "aio": {"block_size": 8388608, "queue_depth": 32, "intra_op_parallelism": 8}}

How: SGLang hands every list of decoder layers to its offloader (`wrap_modules`), loads the weights,
    and
calls `post_init`. Until then the layers' parameters are in host memory; then they are written to a
file in `nvme_path`, as SGLang has fused, sharded and quantised them, and streamed from it. So the
GPU holds a window of layers and those that are resident, host memory the whole model once, while it
is loaded. CUDA graphs capture addresses of weights and must be off.

Checked against the interfaces of sglang 0.5.23 (`sglang.srt.plugins.hook_registry`,
`sglang.srt.utils.offloader`). A server has not been run with it: that needs a GPU and SGLang's
kernels.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from nvmeio._io.handles import new_handle
from nvmeio.errors import BackendUnavailableError
from nvmeio.handle import AioHandle
from nvmeio.inference.spilling import spill
from nvmeio.inference.stream import WeightStream

__all__ = ["Settings", "new_offloader", "read_settings", "register"]

VARIABLE = "NVMEIO_SGLANG_CONFIG"
_TARGET = "sglang.srt.utils.offloader.create_offloader"
_AIO = (
    "block_size",
    "queue_depth",
    "single_submit",
    "overlap_events",
    "intra_op_parallelism",
)


class Settings(NamedTuple):
    """What a configuration file says.

    Attributes:
        nvme_path: Directory on the drive.
        resident_bytes: Memory on the device for layers and window; None keeps no layer.
        window: Layers in the window; None takes 3.
        aio: Parameters of `AioHandle`; empty takes those stored for the file system.
    """

    nvme_path: Path
    resident_bytes: int | None
    window: int | None
    aio: dict[str, Any]


def read_settings(path: str | os.PathLike[str]) -> Settings:
    """Read a configuration file.

    Raises:
        FileNotFoundError: It is missing, or `nvme_path` is.
        ValueError: It is not JSON, or has a field that is unknown or of the wrong type.
    """
    text = Path(path).read_text(encoding="utf-8")
    try:
        found: Any = json.loads(text)
    except ValueError as failed:
        raise ValueError(f"{path} is not valid JSON: {failed}") from None
    if not isinstance(found, dict) or not isinstance(found.get("nvme_path"), str):
        raise ValueError(f'{path} must be a JSON object with "nvme_path": a directory on the drive')
    unknown = sorted(set(found) - {"nvme_path", "resident_bytes", "window", "aio"})
    aio = found.get("aio", {})
    if not isinstance(aio, dict):
        raise ValueError(f'{path}: "aio" must be an object, not {aio!r}')
    unknown += sorted(f"aio.{name}" for name in set(aio) - set(_AIO))
    if unknown:
        raise ValueError(f"{path} has unknown fields: {', '.join(unknown)}")
    for name in ("resident_bytes", "window"):
        value = found.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ValueError(f"{path}: {name!r} must be a number, not {value!r}")
    directory = Path(found["nvme_path"])
    if not directory.is_dir():
        raise FileNotFoundError(f"{path}: nvme_path {directory} is no directory")
    return Settings(directory, found.get("resident_bytes"), found.get("window"), aio)


def register() -> None:
    """The plugin: has SGLang create an nvmeio offloader, where `NVMEIO_SGLANG_CONFIG` is set.

    Raises:
        BackendUnavailableError: This SGLang has no plugin hooks.
        FileNotFoundError, ValueError: As `read_settings`.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return
    settings = read_settings(path)
    try:
        hooks: Any = importlib.import_module("sglang.srt.plugins.hook_registry")
    except ImportError as failed:
        raise BackendUnavailableError(
            "nvmeio plugs into SGLang through its plugin hooks",
            attempts=[("sglang.srt.plugins.hook_registry", str(failed))],
            remedy="pip install 'sglang>=0.5.23'",
        ) from failed
    hooks.HookRegistry.register(
        _TARGET, lambda *_, **__: new_offloader(settings), hooks.HookType.REPLACE
    )


def new_offloader(settings: Settings) -> Any:
    """An offloader for SGLang: its `BaseOffloader`, by nvmeio.

    Raises:
        ImportError: SGLang is not installed.
    """
    base: Any = importlib.import_module("sglang.srt.utils.offloader").BaseOffloader
    kind: Any = type("NvmeOffloader", (Offloader, base), {"__doc__": Offloader.__doc__})
    return kind(settings)


class Offloader:
    """Keeps layers in host memory until their weights are loaded, and streams them from then on."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._layers: list[nn.Module] = []
        self._device = torch.device("cpu")
        self._handle: AioHandle | None = None
        self.stream: WeightStream | None = None

    def wrap_modules(
        self, all_modules_generator: Iterable[nn.Module], *_: Any, **__: Any
    ) -> list[nn.Module]:
        """The layers, each moved to host memory as soon as it is made."""
        modules = []
        for module in all_modules_generator:
            first = next(module.parameters(), None)
            if first is not None and not first.is_meta:
                self._device = first.device
                for parameter in module.parameters():
                    parameter.data = parameter.data.to("cpu")
                self._layers.append(module)
            modules.append(module)
        return modules

    def post_init(self) -> None:
        """The weights are loaded: to disk with them."""
        if not self._layers or self.stream is not None:
            return
        where = self._settings.nvme_path
        if self._settings.aio:
            self._handle = AioHandle(**self._settings.aio)
        else:
            self._handle = new_handle(where)
        self.stream = spill(
            self._layers,
            where,
            device=self._device,
            window=self._settings.window,
            resident_bytes=self._settings.resident_bytes,
            handle=self._handle,
        )

    def close(self) -> None:
        """Stop streaming; the layers cannot be used any more."""
        if self.stream is not None:
            self.stream.close()
        if self._handle is not None:
            self._handle.close()
            self._handle = None

    @property
    def forbid_copy_engine_usage(self) -> bool:
        """Asked by SGLang; layers are copied to the GPU while others compute."""
        return False
