r"""SGLang with layers on NVMe: an offloader that plugs in through SGLang's own plugin framework.

SGLang loads the entry points of the group ``sglang.srt.plugins``; nvmeio has one, `register`, which
does nothing unless a configuration is named (`read_settings` says what is in it):

    NVMEIO_SGLANG_CONFIG=zero_inference.json python -m sglang.launch_server --model-path … \
        --disable-cuda-graph

How: SGLang hands every list of decoder layers to its offloader (`wrap_modules`), loads the weights,
has them post-processed (fused, repacked, quantised) module by module, and calls `post_init`. SGLang
allocates all layers before it loads any weight, and a checkpoint may bring the weights in any
order, so a layer is not complete before the last one is. Until then layers lie in files that are
mapped (`inference.spilling`), whose pages are written out as they fill. When a layer was
post-processed, it goes into a file in `nvme_path` as it is then, and its memory is given back
before the next one is touched. So the device holds a window of layers and those that are resident,
and the process at no time more of its own than a layer and `PARKED_BYTES`.

Weights of the layers can then be read within their forward only. Weights that SGLang reads
elsewhere stay (`kept_parameters`), and features that cannot work are refused (`sglang_settings`):
at start with the flag that helps (CUDA graphs, whose replay skips Python, and others), weight
updates and exports by a mark that SGLang itself looks for. A draft model is left as SGLang makes
it. Embedding and head stay on the device: SGLang reads their weights without calling them.

Tried with sglang 0.5.23; see docs/serving.md.
"""

from __future__ import annotations

import importlib
import logging
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from nvmeio._io.handles import new_handle
from nvmeio.errors import an
from nvmeio.handle import AioHandle
from nvmeio.inference.spilling import Spiller, park, put_out
from nvmeio.inference.weight_stream import WeightStream
from nvmeio.integrations._clients import client, joined
from nvmeio.integrations._serving.kv_identity import server_begins
from nvmeio.integrations._serving.sglang_settings import (
    TRIED,
    VARIABLE,
    Settings,
    check_layer,
    check_model,
    check_server,
    mark,
    read_settings,
)

__all__ = ["Settings", "new_offloader", "read_settings", "register"]

logger = logging.getLogger("nvmeio")

# Weights that are loaded before the pages they went to are written out.
PARKED_BYTES = 256 << 20

_OFFLOADER = "sglang.srt.utils.offloader"
_TARGET = f"{_OFFLOADER}.create_offloader"
_LOADING = "sglang.srt.model_loader.loader.DefaultModelLoader.load_weights_only"
_PROCESSING = "sglang.srt.model_loader.loader._modules_with_quant_method"


def register() -> None:
    """The plugin: has SGLang create an nvmeio offloader, where `NVMEIO_SGLANG_CONFIG` is set.

    SGLang logs what a plugin raises, and serves without it. So the file is read, and what does not
    work refused, when SGLang asks for the offloader, where an error ends the server.

    Raises:
        BackendUnavailableError: This SGLang has no plugin hooks.
    """
    server_begins()
    path = os.environ.get(VARIABLE)
    if not path:
        return
    hooks = client(
        "sglang.srt.plugins.hook_registry",
        wanted="nvmeio plugs into SGLang through its plugin hooks",
        remedy=TRIED,
    )
    plugin = Plugin(path)
    kinds = hooks.HookType
    hooks.HookRegistry.register(_TARGET, plugin.create, kinds.REPLACE)
    hooks.HookRegistry.register(_LOADING, plugin.load, kinds.AROUND)
    hooks.HookRegistry.register(_PROCESSING, plugin.process, kinds.AROUND)


class Plugin:
    """The plugin for SGLang: one offloader for the model that a process serves.

    Args:
        path: The configuration.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._offloader: Any = None

    def create(self, *_: Any, **__: Any) -> Any:
        """In the place of `create_offloader`, which SGLang calls for each model that it runs.

        Raises:
            FileNotFoundError: As `read_settings`.
            ValueError: As `read_settings`; or SGLang is started with what does not work here.
            BackendUnavailableError: This SGLang lacks what nvmeio plugs into.
        """
        if self._offloader is not None:
            # SGLang runs a draft model behind the model, in the same process, and does not tell
            # its offloader when it is loaded.
            logger.info("nvmeio: the draft model stays on the device; %s is the model's", VARIABLE)
            return importlib.import_module(_OFFLOADER).NoopOffloader()
        settings = read_settings(self._path)
        check_server((_LOADING, _PROCESSING))
        self._offloader = new_offloader(settings)
        return self._offloader

    def load(
        self, original: Callable[..., Any], model: Any, weights: Any, *rest: Any, **named: Any
    ) -> Any:
        """Around the loading of weights."""
        if self._offloader is not None:
            check_model(model)
            weights = self._offloader.loading(weights)
        return original(model, weights, *rest, **named)

    def process(self, original: Callable[..., Any], model: Any) -> Any:
        """Around the list of modules that are post-processed."""
        found = original(model)
        return found if self._offloader is None else self._offloader.processing(found)


def new_offloader(settings: Settings) -> Any:
    """An offloader for SGLang: its `BaseOffloader`, by nvmeio.

    Raises:
        ImportError: SGLang is not installed.
    """
    base = importlib.import_module(_OFFLOADER).BaseOffloader
    return joined("NvmeOffloader", Offloader, base)(settings)


def kept_parameters(layer: nn.Module) -> set[str]:
    """Names of a layer's parameters that SGLang reads outside of its forward.

    These are such that an attribute refers to the same memory as well; and those of MLA's
    `kv_b_proj`, of which SGLang computes two attributes after loading. SGLang's own offloaders keep
    the same ones (`_get_resident_parameter_ids`).
    """
    cached: set[tuple[torch.device, int]] = set()
    kept: set[int] = set()
    for module in layer.modules():
        for value in vars(module).values():
            plain = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
            if plain and not value.is_meta and value.numel():
                cached.add((value.device, value.untyped_storage().data_ptr()))
        projection = getattr(module, "kv_b_proj", None)
        if (
            isinstance(projection, nn.Module)
            and hasattr(module, "w_kc")
            and hasattr(module, "w_vc")
        ):
            kept.update(id(parameter) for parameter in projection.parameters())
    return {
        name
        for name, parameter in layer.named_parameters()
        if id(parameter) in kept
        or (
            not parameter.is_meta
            and parameter.numel()
            and (parameter.device, parameter.untyped_storage().data_ptr()) in cached
        )
    }


class _Layer:
    """A layer between its making and the drive."""

    def __init__(self, module: nn.Module, kept: set[str], parked: mmap.mmap | None) -> None:
        self.module = module
        self.kept = kept
        # Weakly: its tensors hold the mapping, and it ends with them.
        self.parked = None if parked is None else weakref.ref(parked)

    def put_out(self) -> None:
        parked = None if self.parked is None else self.parked()
        if parked is not None:
            put_out(parked)


class Offloader:
    """Has layers written to the drive as they become ready, and streams them from then on.

    Attributes:
        stream: From `post_init` on.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._layers: dict[nn.Module, _Layer] = {}  # in the order in which they are called
        self._device = torch.device("cpu")
        self._handle: AioHandle | None = None
        self._spiller: Spiller | None = None
        self._spilled: set[nn.Module] = set()
        self.stream: WeightStream | None = None

    # Called by SGLang, in this order

    def wrap_modules(
        self, all_modules_generator: Iterable[nn.Module], *_: Any, **__: Any
    ) -> list[nn.Module]:
        """The layers, each out of the device's memory as soon as it is made.

        Raises:
            ValueError: A layer has no memory: its loader makes that later, for all layers. Or it
                reads weights of another one.
            TransferError: The drive has no room for the model.
        """
        modules = []
        for module in all_modules_generator:
            self._take(module)
            modules.append(module)
        return modules

    def loading(self, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """The weights that a model is about to load; loaded ones are written out now and then.

        Raises:
            OSError: The drive failed.
        """
        given = 0
        for name, weight in weights:
            yield name, weight
            given += getattr(weight, "nbytes", 0)
            if given >= PARKED_BYTES:
                self._put_out()
                given = 0
        self._put_out()

    def processing(self, found: Iterable[tuple[nn.Module, Any]]) -> Iterator[tuple[nn.Module, Any]]:
        """The modules that SGLang post-processes, with each layer spilled when its last one was.

        Weights on the drive already are left out: an update of weights, which is refused later,
        requests them.

        Raises:
            ValueError, TypeError, TransferError: As `Spiller.write`.
        """
        layers = {
            module: layer for layer in self._layers.values() for module in layer.module.modules()
        }
        current: _Layer | None = None
        for module, method in found:
            layer = layers.get(module)
            if layer is not None and layer.module in self._spilled:
                continue
            if current is not None and layer is not current:
                self._spill(current)
            current = layer
            yield module, method
        if current is not None:
            self._spill(current)

    def post_init(self) -> None:
        """The model is loaded: write the remaining weights to the drive.

        Raises:
            ValueError: The model has no layers that SGLang's offloaders see; or as `spill`.
            TransferError: The drive is full, or failed.
        """
        if self.stream is not None:
            return
        if not self._layers:
            raise ValueError(
                "this model makes its layers without SGLang's make_layers, and no offloader of "
                f"SGLang sees them: serve it without {VARIABLE}"
            )
        for layer in self._layers.values():
            self._spill(layer)
        self.stream = self._open().stream(
            device=self._device,
            window=self._settings.window,
            resident_bytes=self._settings.resident_bytes,
        )
        stats = self.stream.stats
        logger.info(
            "nvmeio: %d layers on %s: %d bytes are streamed, %d stay, the window has %d",
            len(self._layers),
            self._settings.nvme_path,
            stats.streamed_bytes,
            stats.resident_bytes,
            stats.window_bytes,
        )

    @property
    def forbid_copy_engine_usage(self) -> bool:
        """Asked by SGLang; layers are copied to the GPU while others compute."""
        return False

    # Steps

    def _take(self, module: nn.Module) -> None:
        parameters = dict(module.named_parameters())
        if not parameters:
            return
        check_layer(module)
        if any(parameter.is_meta for parameter in parameters.values()):
            raise ValueError(
                f"{an(type(module).__name__)} is made without memory, which its loader gets for "
                "all layers at once, too late to keep them off the device: use another "
                "--load-format (auto)"
            )
        kept = kept_parameters(module)
        self._device = next(iter(parameters.values())).device
        parked = park(
            [parameter for name, parameter in parameters.items() if name not in kept],
            self._settings.nvme_path,
        )
        layer = self._layers[module] = _Layer(module, kept, parked)
        layer.put_out()

    def _put_out(self) -> None:
        for layer in self._layers.values():
            layer.put_out()

    def _spill(self, layer: _Layer) -> None:
        module = layer.module
        if module in self._spilled:
            return
        kept = layer.kept | kept_parameters(module)
        parameters = dict(module.named_parameters())
        for name in sorted(kept & set(parameters)):
            if parameters[name].device != self._device:
                raise ValueError(
                    f"{name!r} of {an(type(module).__name__)} was given a second name while it was "
                    f"loaded, in host memory, and is wanted on {self._device}: this model cannot "
                    f"be streamed; serve it without {VARIABLE}"
                )
        spiller = self._open()
        spiller.write(module, kept)
        spiller.release(module)
        self._spilled.add(module)
        mark(module)

    def _open(self) -> Spiller:
        if self._spiller is None:
            where = self._settings.nvme_path
            aio = self._settings.aio
            self._handle = AioHandle(**aio) if aio else new_handle(where)
            self._spiller = Spiller(where, self._handle)
        return self._spiller

    # Close

    def close(self) -> None:
        """Stop streaming; the layers cannot be used any more. Idempotent."""
        if self.stream is not None:
            self.stream.close()
        if self._spiller is not None:
            self._spiller.close()
        if self._handle is not None:
            self._handle.close()
            self._handle = None
