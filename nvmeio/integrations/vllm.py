"""vLLM with weights read by nvmeio: ``--load-format nvmeio``.

vLLM loads the entry points of the group ``vllm.general_plugins``; nvmeio has one, `register`, which
makes the format known. Weights of a local directory are read in large direct reads, a bounded
number of bytes ahead, and handed to the model's own `load_weights`. It is a loader: vLLM's
executors capture the addresses of weights, and have no public place where layers could be streamed.

Checked against the interfaces of vllm 0.33.0 (`vllm.model_executor.model_loader`). vLLM itself has
not been run with it: it needs a GPU, or a build of its own for CPUs.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from nvmeio._formats.safetensors_files import tensor_on
from nvmeio._formats.safetensors_set import Checkpoint
from nvmeio._io.handles import handle_for
from nvmeio._io.spans import Span
from nvmeio._io.spans import read as read_spans
from nvmeio.errors import BackendUnavailableError
from nvmeio.handle import AioHandle

__all__ = ["iterate_weights", "register"]

FORMAT = "nvmeio"
# Weights that are read in one go.
GROUP_BYTES = 512 << 20


def iterate_weights(
    directory: str | os.PathLike[str], *, handle: AioHandle | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """All weights of a model directory, by name, in the order of the files.

    Args:
        directory: With safetensors weights: one file or shards with an index.
        handle: Moves the bytes and stays open; None makes one.

    Yields:
        Names and CPU tensors, whose memory goes when the last of about 512 MiB of them goes.

    Raises:
        FileNotFoundError, IntegrityError, TransferError: A file is missing, malformed, written to
            meanwhile, or cannot be read.
    """
    with handle_for(handle, directory) as reader:
        checkpoint = Checkpoint(directory, reader)
        try:
            group: list[str] = []
            nbytes = 0
            for name, stored in checkpoint.tensors.items():
                if group and nbytes + stored.entry.nbytes > GROUP_BYTES:
                    yield from _read(checkpoint, group, reader)
                    group, nbytes = [], 0
                group.append(name)
                nbytes += stored.entry.nbytes
            yield from _read(checkpoint, group, reader)
        finally:
            checkpoint.close()


def _read(
    checkpoint: Checkpoint, names: list[str], reader: AioHandle
) -> Iterator[tuple[str, torch.Tensor]]:
    spans = []
    for name in names:
        stored = checkpoint.tensors[name]
        file = checkpoint.files[stored.file]
        spans.append(Span(file, stored.entry.start, stored.entry.nbytes, repr(name)))
    found = read_spans(reader, spans)
    for name in names:  # before any is handed over
        checkpoint.check(checkpoint.tensors[name].file, repr(name))
    for name, memory in zip(names, found, strict=True):
        yield name, tensor_on(memory, checkpoint.tensors[name].entry)


def register() -> None:
    """The plugin: makes the load format known to vLLM. May be called several times.

    Raises:
        BackendUnavailableError: This vLLM takes no loaders.
    """
    try:
        loading: Any = importlib.import_module("vllm.model_executor.model_loader")
        decorate, base = loading.register_model_loader, loading.BaseModelLoader
    except (ImportError, AttributeError) as failed:
        raise BackendUnavailableError(
            "nvmeio plugs into vLLM as a model loader",
            attempts=[("vllm.model_executor.model_loader", str(failed))],
            remedy="pip install 'vllm>=0.33'",
        ) from failed
    decorate(FORMAT)(
        type("NvmeModelLoader", (Loader, base), {"__doc__": Loader.__doc__, "__module__": __name__})
    )


class Loader:
    """Reads the weights of a local directory through nvmeio; joined with vLLM's own base class."""

    def download_model(self, model_config: Any) -> None:
        """Nothing: a directory of this machine is asked for."""
        _directory_of(model_config)

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Hand every weight to the model's own `load_weights`.

        Raises:
            ValueError: The model says which parameters it was given, and one is missing: it would
                compute with uninitialised memory. As vLLM's default loader, where nothing is
                quantised.
        """
        directory = _directory_of(model_config)
        loaded = model.load_weights(iterate_weights(directory))
        if loaded is None or getattr(model_config, "quantization", None) is not None:
            return
        missing = {name for name, _ in model.named_parameters()} - set(loaded)
        if missing:
            raise ValueError(
                f"following weights were not initialized from the checkpoint in {directory}: "
                f"{', '.join(sorted(missing))}"
            )


def _directory_of(model_config: Any) -> str:
    path = str(getattr(model_config, "model_weights", None) or model_config.model)
    if not os.path.isdir(path):
        raise FileNotFoundError(
            f"{path!r} is no directory of this machine: --load-format nvmeio reads local files; "
            "download the model first (hf download) and name its directory"
        )
    return path
