"""Modules that are in memory, to disk, and streamed from there.

For code that builds and loads a model in its own way (servers that fuse, shard or quantise weights
while they load them): the result is written once as it is, layer by layer, and its parameters
give up their memory. `stream_model` needs no such step.

`spill` does that with modules that are all there; a `Spiller` takes them one by one, so that a
model is never in memory as a whole. The files lie in a directory of their own until the stream is
made, and have no name from then on. A process that is killed before leaves that directory: the
next one that spills to the same place finds it unlocked, and removes it.

Parameters that have to lie somewhere meanwhile are parked in a mapped file: its pages are not the
process's own, so the kernel can write them to the drive when it needs room. The file has no name;
its blocks are free again when the last tensor on it goes.

Sources: man 2 mmap (MAP_SHARED), man 2 madvise (MADV_DONTNEED), man 2 msync.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets
import tempfile
import weakref
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from nvmeio import _checks, files
from nvmeio._bindings import OwnFds
from nvmeio._formats.safetensors import headers, shards
from nvmeio._formats.safetensors.open_set import SafetensorsSet
from nvmeio._io.handles import handle_for
from nvmeio._memory.tensors import extent
from nvmeio._pages import TENSOR_ALIGNMENT, round_up
from nvmeio._residency.calls import version_of
from nvmeio._storage.durable import make_directory, remove_directory, reserve
from nvmeio._storage.locks import hold, unlock
from nvmeio._storage.untrusted import FILE_MODE, make_private_directory
from nvmeio._threads.closing import Closing, opened
from nvmeio._threads.interruptible import run_interruptible
from nvmeio._torch_private import is_wrapper_subclass, make_subclass
from nvmeio.handle import AioHandle
from nvmeio.inference import _hooks
from nvmeio.inference._plan.budget import check_numbers, share_out
from nvmeio.inference._plan.slot_layout import Weight, part_of
from nvmeio.inference._plan.units import partition
from nvmeio.inference._stream.stand_ins import Elsewhere
from nvmeio.inference.weight_stream import WeightStream

_PREFIX = ".nvmeio-spill-"
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc: man 3 malloc_trim


def spill(
    modules: Sequence[nn.Module],
    directory: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    window: int | None = None,
    resident_bytes: int | str | None = None,
    handle: AioHandle | None = None,
) -> WeightStream:
    """Write modules' parameters into files and stream them from there from then on.

    Args:
        modules: Layers, in the order in which they are called; changed in place. Their buffers stay
            where they are.
        directory: The directory of the files; they have lost their names when this returns.
        device: The device on which a called module needs its parameters.
        window: As for `stream_model`.
        resident_bytes: As for `stream_model`, text included; None keeps no layer.
        handle: Moves the bytes and stays open; None makes one.

    Returns:
        The stream; closing it ends the use of the modules, and the space on disk is free again.

    Raises:
        TransferError: The disk is full, or failed; the modules are as they were.
        ValueError: There are no modules; a parameter has no memory, or holes in it, or is more than
            one tensor; `resident_bytes` is too small, or it or `window` is below 1.
        TypeError: One of these two is not an int; a dtype is unknown to safetensors files.
    """
    resident_bytes = _checks.size("resident_bytes", resident_bytes)
    check_numbers(window, resident_bytes, None)
    if not modules:
        raise ValueError("the list of modules to spill is empty: name at least one")
    with Spiller(directory, handle) as spiller:
        for module in modules:
            spiller.write(module)
        return spiller.stream(device=device, window=window, resident_bytes=resident_bytes)


class _Written(NamedTuple):
    parameter: weakref.ref[torch.Tensor]
    name: str
    order: tuple[int, ...] | None  # of the dimensions in the file, where it is another
    looked: tuple[int, int]  # its version and address, then


class Spiller(Closing):
    """Modules to disk one by one, each as soon as it is ready, and one stream of all in the end.

    Args:
        directory: The directory of the files.
        handle: Moves the bytes and stays open; None makes one.

    Raises:
        TransferError: Nothing can be made there.
    """

    def __init__(self, directory: str | os.PathLike[str], handle: AioHandle | None = None) -> None:
        self._given = handle
        self._modules: list[nn.Module] = []
        self._shards: list[tuple[str, list[str]]] = []
        self._written: dict[int, _Written] = {}
        self._empties: dict[str, nn.Parameter] = {}
        with contextlib.ExitStack() as undo:
            self._mover = undo.enter_context(handle_for(handle, directory))
            make_directory(directory)
            self.path, lock = run_interruptible(lambda: _own_directory(Path(directory)))
            undo.callback(weakref.finalize(self, _remove, self.path, lock, os.getpid()))
            self._undo = undo.pop_all()

    # Verbs

    def write(self, module: nn.Module, keep: Collection[str] = ()) -> None:
        """Write a module's parameters; they stay in memory, for `release` or `stream` to free.

        Args:
            module: Next in the order in which they are called.
            keep: Names of parameters that are to stay as they are.

        Raises:
            TransferError: The disk is full, or failed.
            ValueError: A parameter has no memory, or holes in it, or is more than one tensor.
            TypeError: A dtype is unknown to safetensors files.

        After an error the module is unchanged, and so is everything written before.
        """
        number = len(self._modules)
        found: dict[str, tuple[torch.Tensor, tuple[int, ...] | None]] = {}
        for attribute, parameter in module.named_parameters():
            if attribute in keep or self._record_of(parameter) is not None:
                continue
            name = f"{number}.{attribute}"
            found[name] = (parameter, _order_in_memory(name, parameter))
        if found:
            shard = f"layer-{number:05d}{shards.SUFFIX}"
            tensors = {
                name: each.data if order is None else each.data.permute(order)
                for name, (each, order) in found.items()
            }
            try:
                _write(self.path / shard, tensors, self._mover)
            except BaseException:
                (self.path / shard).unlink(missing_ok=True)
                raise
            self._shards.append((shard, list(tensors)))
        for name, (each, order) in found.items():
            self._written[id(each)] = _Written(weakref.ref(each), name, order, _looks(each))
        self._modules.append(module)

    def release(self, module: nn.Module) -> None:
        """Have a module's parameters that were written give up their memory.

        It cannot be called until `stream` is made. A stand-in for a parameter has its class, shape
        and attributes.

        Raises:
            RuntimeError: A parameter was changed after it was written.
        """
        for owner in module.modules():
            for attribute in list(owner._parameters):
                parameter = owner._parameters[attribute]
                record = None if parameter is None else self._record_of(parameter)
                if parameter is None or record is None or parameter.is_meta:
                    continue
                empty = self._empty(record.name, parameter)
                self._written[id(empty)] = record._replace(
                    parameter=weakref.ref(empty), looked=_looks(empty)
                )
                owner._parameters[attribute] = empty
        parameter = None
        # Weights below 32 MiB come from the heap, where what is free between small things that are
        # not stays with the process: so much as the model has, in the end.
        if _trim is not None:
            _trim(0)

    def stream(
        self,
        *,
        device: str | torch.device = "cpu",
        window: int | None = None,
        resident_bytes: int | str | None = None,
    ) -> WeightStream:
        """Stream the written layers from now on; the files lose their names, and this ends.

        Raises:
            ValueError, TypeError: As `spill`.
            RuntimeError: A parameter was changed after it was written.
            TransferError: A file cannot be read.
        """
        resident_bytes = _checks.size("resident_bytes", resident_bytes)
        there = _checks.device("device", device)
        index = self.path / f"model{shards.INDEX_SUFFIX}"
        with contextlib.closing(self), contextlib.ExitStack() as stack:
            index.write_bytes(shards.index_text(self._shards, 0))
            root = nn.ModuleList(self._modules)
            checkpoint = stack.enter_context(contextlib.closing(SafetensorsSet(index)))
            weights: dict[int, Weight] = {}
            for parameter in root.parameters():
                record = self._record_of(parameter)
                if record is None:
                    continue
                part, shape = part_of(checkpoint.tensors[record.name]), tuple(parameter.shape)
                # Which of the file's dimensions each is.
                order = record.order and tuple(torch.tensor(record.order).argsort().tolist())
                read = (part.dtype, shape, (part,), None, (record.name,), order)
                weights[id(parameter)] = Weight(record.name, *read)
            parts = partition(root, weights, self._modules)
            for unit in (parts.fixed, *parts.units):
                unit.plan(checkpoint, own_alignment=False)
                for number, target in enumerate(unit.targets):
                    empty: Any = self._empty(unit.weights[target.weight].name, target.empty)
                    empty.on_device = there
                    unit.targets[number] = target._replace(empty=empty)
            shares = share_out(parts.fixed, parts.units, resident_bytes, window)
            stream = WeightStream(
                partition=parts,
                shares=shares,
                device=there,
                open_checkpoint=lambda: SafetensorsSet(index),
                handle=self._given,
                paths=[index],
            )
            for module in self._modules:
                self.release(module)
            _hooks.attach(root, stream)
            return stream

    # Steps

    def _record_of(self, parameter: torch.Tensor) -> _Written | None:
        """The record of its file; another object may have got the id of one that is gone."""
        record = self._written.get(id(parameter))
        if record is None or record.parameter() is not parameter:
            return None
        if _looks(parameter) != record.looked:
            raise RuntimeError(
                f"parameter {record.name!r} (the number is the module's) was changed after it was "
                "written, and the change would be lost: write a module when it is ready"
            )
        return record

    def _empty(self, name: str, parameter: torch.Tensor) -> nn.Parameter:
        """A parameter's stand-in; one for all places of a tied one."""
        if name not in self._empties:
            kind = Elsewhere if type(parameter) is nn.Parameter else type(parameter)
            bare = torch.empty_like(parameter, device="meta")
            empty: Any = make_subclass(kind, bare, parameter.requires_grad)
            empty.__dict__.update(parameter.__dict__)
            self._empties[name] = empty
        return self._empties[name]

    # Close

    def close(self) -> None:
        """Remove the files, unless a stream has them. Idempotent.

        Released parameters cannot be used after that.
        """
        self._undo.close()


# Tensors and files


def _order_in_memory(name: str, parameter: torch.Tensor) -> tuple[int, ...] | None:
    """The order of a parameter's dimensions in memory; None if it is contiguous.

    Quantised weights are often transposed: kernels want their columns one behind the other.
    """
    if parameter.is_meta or is_wrapper_subclass(parameter):
        what = "has no memory" if parameter.is_meta else "is more than one tensor"
        raise ValueError(
            f"parameter {name!r} ({type(parameter).__name__}) {what}, and cannot be written: spill "
            "modules after their weights are loaded, and without quantisation by tensor subclasses"
        )
    if parameter.is_contiguous():
        return None
    strides = parameter.stride()
    order = tuple(sorted(range(parameter.dim()), key=lambda number: -strides[number]))
    if not parameter.permute(order).is_contiguous():
        raise ValueError(
            f"parameter {name!r} of shape {tuple(parameter.shape)} and strides {strides} has holes "
            "in its memory, or overlaps itself, and cannot be streamed: give the module a "
            "contiguous copy, or keep the parameter"
        )
    return order


def _looks(parameter: torch.Tensor) -> tuple[int, int]:
    return version_of(parameter), parameter.data_ptr()


def _write(path: Path, tensors: dict[str, torch.Tensor], handle: AioHandle) -> None:
    prefix, entries = headers.build(
        [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()], None
    )
    with files.open(path, "x") as file:  # no descriptor that an interrupt leaves open
        os.chmod(path, FILE_MODE)  # until here its directory lets nobody in
        handle.sync_pwrite(torch.frombuffer(bytearray(prefix), dtype=torch.uint8), file, 0)
        for name, tensor in tensors.items():
            handle.sync_pwrite(tensor.detach(), file, entries[name].start)


# The directory


def _own_directory(parent: Path) -> tuple[Path, OwnFds]:
    """A new directory, and the lock on it for as long as its files have names.

    Dropped at any step, it locks nothing any more, and the next call there removes it.
    """
    _remove_abandoned(parent)
    while True:
        path = parent / f"{_PREFIX}{secrets.token_hex(4)}"
        make_private_directory(path)
        lock = OwnFds()
        try:
            fd = lock.open(False, str(path), os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # another process took it for an abandoned one
        with contextlib.suppress(OSError):  # where there are no locks, nobody removes it either
            fcntl.flock(fd, fcntl.LOCK_EX)
        if path.exists():
            hold(fd)
            return path, lock


def _remove(path: Path, lock: OwnFds, pid: int) -> None:
    if pid == os.getpid():  # the parent's, in a fork of it
        unlock(lock.buffered)  # first: what an interrupt leaves is not locked
        lock.close()
        remove_directory(path)


def _remove_abandoned(parent: Path) -> None:
    """Remove what processes left that were killed: directories of ours that nobody has locked."""
    with contextlib.suppress(OSError):  # errors there are reported when one is made
        for path in parent.glob(f"{_PREFIX}*"):
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            with contextlib.suppress(OSError), opened(path, flags) as lock:
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_directory(path)


def park(parameters: Sequence[torch.Tensor], directory: str | os.PathLike[str]) -> mmap.mmap | None:
    """Move parameters' data into a file.

    Args:
        parameters: Each gets other data, of the same values, shape and strides, in host memory.
        directory: The directory of the file.

    Returns:
        The mapping, for `put_out`; the tensors keep it alive. None where there are no bytes.

    Raises:
        TransferError: The disk has no room for them; they are as they were.
        OSError: The file cannot be made.
    """
    places, end = [], 0
    for parameter in parameters:
        places.append(end)
        end += round_up(extent(parameter) * parameter.itemsize, TENSOR_ALIGNMENT)
    if not end:
        return None
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        # Room that is not there would be a SIGBUS later, when the pages are written out.
        reserve(file.fileno(), end, os.fspath(directory))
        mapping = mmap.mmap(file.fileno(), end)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    for parameter, start in zip(parameters, places, strict=True):
        nbytes = extent(parameter) * parameter.itemsize
        room = memory[start : start + nbytes].view(parameter.dtype)
        data = room.as_strided(parameter.shape, parameter.stride())
        data.copy_(parameter.data)
        parameter.data = data
    return mapping


def put_out(mapping: mmap.mmap) -> None:
    """Write its pages to the drive and let go of them; they come back when they are touched.

    Others may write to the tensors meanwhile.

    Raises:
        OSError: The drive failed; the bytes are lost.
    """
    mapping.flush()
    mapping.madvise(mmap.MADV_DONTNEED)
