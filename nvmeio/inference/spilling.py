"""`spill`: modules that are in memory, to disk, and streamed from there.

For code that builds and loads a model in its own way (servers that fuse, shard or quantise weights
while they load them): what it made is written once as it is, layer by layer, and its parameters
give up their memory. `stream_model` needs no such step.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from nvmeio import buffers, files
from nvmeio._formats import safetensors_header as headers
from nvmeio._formats.safetensors_set import Checkpoint
from nvmeio._io.handles import handle_for
from nvmeio._storage.private import create
from nvmeio.handle import AioHandle
from nvmeio.inference import _hooks
from nvmeio.inference._budget import check_numbers, share_out
from nvmeio.inference._units import partition
from nvmeio.inference._weights import Weight, part_of
from nvmeio.inference.stream import WeightStream


def spill(
    modules: Sequence[nn.Module],
    directory: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    window: int | None = None,
    resident_bytes: int | None = None,
    handle: AioHandle | None = None,
) -> WeightStream:
    """Write modules' parameters into a file and stream them from it from then on.

    Args:
        modules: Layers, in the order in which they are called; changed in place. Their buffers stay
            where they are.
        directory: Where the file goes; it has no name any more when this returns.
        device: Where the parameters are wanted when a module is called.
        window: As for `stream_model`.
        resident_bytes: As for `stream_model`; None keeps no layer.
        handle: Moves the bytes and stays open; None makes one.

    Returns:
        The stream; closing it ends the use of the modules, and the space on disk is free again.

    Raises:
        TransferError: The disk is full, or failed; the modules are as they were.
        ValueError: There are no modules, a parameter has no memory or is not contiguous,
            `resident_bytes` is too small, or it or `window` is below 1.
        TypeError: One of these two is no int.
    """
    check_numbers(window, resident_bytes)
    if not modules:
        raise ValueError("there are no modules to spill")
    root = nn.ModuleList(modules)
    found = dict(root.named_parameters(remove_duplicate=False))
    for name, parameter in found.items():
        if parameter.is_meta or not parameter.is_contiguous():
            raise ValueError(f"parameter {name!r} is not contiguous, or has no memory")
    path = Path(directory) / f".nvmeio-spill-{secrets.token_hex(4)}.safetensors"
    unique: dict[int, str] = {}
    for name, parameter in found.items():
        unique.setdefault(id(parameter), name)
    with contextlib.ExitStack() as stack:
        mover = stack.enter_context(handle_for(handle, directory))
        stack.callback(path.unlink, missing_ok=True)
        _write(path, {name: found[name].data for name in unique.values()}, mover)
        checkpoint = stack.enter_context(contextlib.closing(Checkpoint(path, mover)))
        weights: dict[int, Weight] = {}
        for key, name in unique.items():
            stored = checkpoint.tensors[name]
            part = part_of(stored)
            weights[key] = Weight(name, part.dtype, part.shape, (part,), None, (name,))
        parts = partition(root, weights, list(modules))
        sizes = [file.size() for file in checkpoint.files]
        for unit in (parts.fixed, *parts.units):
            unit.plan(sizes, own_alignment=False)
            # What stands in a parameter's place keeps its class and attributes (weight loaders and
            # the like), and takes no memory.
            empty: dict[int, torch.Tensor] = {}
            for number, target in enumerate(unit.targets):
                given = target.empty
                shown = empty.setdefault(id(given), _emptied(given))
                unit.targets[number] = target._replace(empty=shown)
        shares = share_out(parts.fixed, parts.units, resident_bytes, window)
        stream = WeightStream(
            parts,
            shares,
            torch.device(device),
            lambda via: Checkpoint(path, via),
            handle,
            path,
        )
    for unit in stream.units:
        for target in unit.targets:
            target.module._parameters[target.attribute] = target.empty  # type: ignore[assignment]
    _hooks.attach(root, stream)
    return stream


def _emptied(parameter: torch.Tensor) -> nn.Parameter:
    data = torch.empty_like(parameter, device="meta")
    empty = nn.Parameter(data, requires_grad=parameter.requires_grad)
    empty.__dict__.update(parameter.__dict__)
    return empty


def _write(path: Path, tensors: dict[str, torch.Tensor], handle: AioHandle) -> None:
    prefix, entries = headers.build(
        [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()], None
    )
    os.close(create(path))  # the weights are the user's own
    with files.open(path, "r+") as file:
        head = buffers.empty_aligned(len(prefix), dtype=torch.uint8)
        head.copy_(torch.frombuffer(bytearray(prefix), dtype=torch.uint8))
        handle.sync_pwrite(head, file, 0)
        for name, tensor in tensors.items():
            if tensor.nbytes:
                handle.sync_pwrite(tensor.detach(), file, entries[name].start)
