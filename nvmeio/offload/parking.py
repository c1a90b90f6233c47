"""`park`: a module and its optimizer leave memory for a while, and come back as they were.

For loops in which a trainer and a server take turns on one device. `resume_parked` brings the
state of a process that has died into a module and an optimizer that were made anew.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from nvmeio._checks import NotPickled, Paths, switch
from nvmeio._io.drives import DriveHandles
from nvmeio._io.inflight import InFlight
from nvmeio._io.long_call import profiled
from nvmeio._threads.closing import Closing, do_all
from nvmeio._threads.interruptible import Cancellation, run_interruptible
from nvmeio.errors import ClosedError, IntegrityError, TransferError, an, counted
from nvmeio.handle import AioHandle
from nvmeio.offload._generations.rank_steps import directory_name
from nvmeio.offload._optimizer import arguments
from nvmeio.offload._parking import index, memory
from nvmeio.offload._parking.files import ParkedFile, gathered, place
from nvmeio.offload._parking.index import Index
from nvmeio.offload._parking.members import (
    BUFFERS,
    GRADIENTS,
    KINDS,
    PARAMETERS,
    SHARD,
    STATE,
    Member,
    ParkedStorage,
    check_unused,
    members_of,
    parameters_of,
    storages_of,
)
from nvmeio.offload._parking.memory import ATTRIBUTE, Away, Guard
from nvmeio.offload._swap_files import manifests
from nvmeio.offload._swap_files.swap_dirs import SwapDirs
from nvmeio.offload._swap_files.tensors import like
from nvmeio.offload.module import SwappedModule
from nvmeio.offload.optimizer import SwappedOptimizer


def park(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    swap_dir: Paths,
    handle: AioHandle | None = None,
    checksum: bool = True,
    overwrite: bool = False,
) -> Parked:
    """Write a module and its optimizer to the drive, and give their memory back.

    Parameters, gradients, buffers and the optimizer's state go, each storage once: tied parameters
    and views stay what they are. Storages below 64 KiB stay in memory. `Parked.restore` brings all
    back, into the same objects, bit for bit. Meanwhile parameters are NaN, and these raise
    `RuntimeError`: calling, converting or moving the module, backward of an older call, stepping,
    and state dicts.

    It is written and durable before anything is given back: whatever fails, and after Ctrl-C,
    module and optimizer are as before. A process that is killed later leaves the state to
    `resume_parked`.

    Args:
        module: On the CPU, on a CUDA device, or sharded by FSDP2 on either.
        optimizer: Its optimizer, of any class of torch's; None parks the module alone.
        swap_dir: A directory on a fast drive, made where it is missing (not those above it); a
            locked subdirectory for this rank is made in it. Or a list, as for `SwappedOptimizer`.
        handle: Moves the bytes and stays open; None makes one for each drive, and so does `restore`
            if it is closed by then.
        checksum: Compare what is read with the CRC-32 of what was written. Bytes that went straight
            from and to a device have none.
        overwrite: Remove what a dead process has parked there; without it that is refused.

    Raises:
        TypeError: It is swapped already (`SwappedModule`, `SwappedOptimizer`), a part of it is a
            ScriptModule, or a tensor is sparse or quantized.
        ValueError: A tensor is parked already, on the meta device, or in memory that cannot be
            given back: page-locked, read-only, shared with other processes, in use (by a save or an
            operation), or (on a device) with a view that is not of module or optimizer.
        TransferError: The drive is full or failed; another process (or `Parked`) uses the directory
            (EBUSY), or has left its state there (EEXIST).

    Host memory keeps its addresses, and pages of it go; a view that somebody else has reads as
    zeros meanwhile. A device's memory goes back to torch's allocator, and from there to the device.

    Cost: one pass over all bytes, at the drive's rate, each way. No memory beside 16 MiB.
    """
    if isinstance(module, SwappedModule) or isinstance(optimizer, SwappedOptimizer):
        which = module if isinstance(module, SwappedModule) else optimizer
        raise TypeError(
            f"{type(which).__name__} is on the drive already: call evict() of the module for its "
            "window, and leave the optimizer out"
        )
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch optimizer, not {type(optimizer).__name__}")
    arguments.handle(handle)
    switch("checksum", checksum)
    for name, each in module.named_modules():
        if isinstance(each, torch.jit.ScriptModule):
            raise TypeError(
                f"{name or 'module'} is a ScriptModule, whose calls cannot be refused while it is "
                "parked: park the module that it was made from"
            )
    already = Parked.of(module)
    if already is not None:
        raise ValueError(
            f"the module is parked already, in {already.swap_dir}, entirely or in part: call "
            "restore() of the object that park() returned (or Parked.of(module).restore()) first"
        )
    storages = storages_of(members_of(module, optimizer))
    parked = Parked(handle)
    open_directory = partial(_new_directory, swap_dir, switch("overwrite", overwrite))
    cancellation = Cancellation()
    work = partial(
        parked._park, module, optimizer, storages, open_directory, bool(checksum), cancellation
    )
    try:
        with profiled("park"):
            run_interruptible(work, cancellation.cancel)
    except BaseException:
        # An interrupt may have come once all was away: nobody would have what brings it back.
        run_interruptible(parked._undo)
        raise
    return parked


class Parked(NotPickled, Closing):
    """A module and optimizer that are on the drive, as `park` returns them.

    Use it with ``with``: it is restored at the end of the block, however that ends. The module
    keeps it (`of`). If both are dropped, or the program ends, the state stays on the drive, for
    `resume_parked`.

    Attributes:
        nbytes: How many bytes were written.
        freed_bytes: How many of them left memory.
        park_s: How long that took, in seconds.
        restore_s: How long all calls of `restore` took; 0.0 before the first.
    """

    _elsewhere = "park in the process that restores, or call resume_parked there"

    def __init__(self, handle: AioHandle | None) -> None:
        self._closed = True  # until there is something to close
        self._handle = handle
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._away: list[Away] = []
        self._guard: Guard | None = None
        self._file: ParkedFile | None = None
        self._path, self._paths = "", [""]
        self._resources = contextlib.ExitStack()
        self.nbytes = self.freed_bytes = 0
        self.park_s = self.restore_s = 0.0

    @staticmethod
    def of(module: torch.nn.Module) -> Parked | None:
        """The `Parked` that brings a module back; None if it is not parked."""
        found: Parked | None = module.__dict__.get(ATTRIBUTE)
        return found

    def _park(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        storages: Sequence[ParkedStorage],
        open_directory: Callable[[], SwapDirs],
        checksum: bool,
        cancellation: Cancellation,
    ) -> None:
        """Write all, then give the memory back; in a thread that no interrupt reaches."""
        with self._lock:
            began = time.perf_counter()
            cancellation.check()
            directory = open_directory()
            self._path, self._paths = directory.path, directory.paths
            self._resources.callback(lambda: directory.release(remove=self.restored))
            self._closed = False
            large = [each for each in storages if not each.is_small]
            memory.synchronize(storages)
            together = gathered([each for each in storages if each.is_small])
            bands = place([*large, together])
            self._file = ParkedFile(directory, bands, checksum)
            self._resources.callback(self._file.close)
            with self._moving(cancellation) as (handles, flight):
                self._file.write([*large, together], handles, flight)
            manifest = index.manifest_of(storages, together, module, optimizer)
            manifests.store(directory.path, manifest)
            directory.sync_names()  # the manifest's too: it is what makes the state found
            manifests.mark_durable(directory.path, manifest)
            cancellation.check()
            check_unused(large)  # again: what began meanwhile
            self._guard = Guard(module, optimizer, self, directory.path)
            self._away = [Away(each) for each in large]
            for each in self._away:
                each.leave()
            memory.trim(large)
            self.nbytes = sum(each.nbytes for each in storages)
            self.freed_bytes = sum(each.nbytes for each in large)
            self.park_s = time.perf_counter() - began

    def _undo(self) -> None:
        """After an error or an interrupt: have everything as it was, and nothing on the drive."""
        with self._lock:
            if not self.restored:
                self._bring(KINDS, Cancellation())
            self._away = []
            self._finish()

    def restore(self, *kinds: str) -> None:
        """Bring everything back, or some kinds of it; blocks, other threads run.

        Args:
            kinds: Any of "parameters", "buffers", "gradients" and "state"; none stands for all.
                They are read in the order of use: parameters, buffers, gradients, state. The module
                can be called once its parameters and buffers are back.

        Raises:
            ValueError: There is no such kind.
            ClosedError: It was closed, or belongs to the parent of this forked process.
            TransferError, IntegrityError: The drive failed, or has other bytes. Tensors read by
                then are back, the rest is parked as before, and `restore` may be called again.
            RuntimeError: A tensor was converted, moved, or given other values meanwhile; nothing
                was changed. A device may also have no room (torch.OutOfMemoryError).
            KeyboardInterrupt: As after a failure.

        Once all is back the files are removed. Calling it again does nothing then.
        """
        for kind in kinds:
            arguments.choice("kinds", kind, KINDS)
        if os.getpid() != self._process:
            raise ClosedError("this process was forked from the one that parked: restore there")
        cancellation = Cancellation()
        with profiled("restore"):
            run_interruptible(
                partial(self._restore, kinds or KINDS, cancellation), cancellation.cancel
            )

    def _restore(self, kinds: Sequence[str], cancellation: Cancellation) -> None:
        with self._lock:
            if self._closed:
                if self.restored:
                    return
                raise ClosedError(
                    "this Parked is closed: its state is in "
                    f"{self._path}; make a new module and optimizer, and call "
                    "resume_parked"
                )
            self._bring(kinds, cancellation)
            if self.restored:
                self._finish()

    def _bring(self, kinds: Sequence[str], cancellation: Cancellation) -> None:
        began = time.perf_counter()
        wanted = {
            each.parked: each
            for each in self._away
            if each.parked.away and each.parked.kind in kinds
        }
        for each in wanted.values():
            each.check_unchanged()
        begun: list[Away] = []

        def memory_of(parked: ParkedStorage) -> torch.Tensor:
            begun.append(wanted[parked])
            return wanted[parked].memory()

        def come_back(parked: ParkedStorage) -> None:
            wanted[parked].come_back()

        try:
            with self._moving(cancellation) as (handles, flight):
                self._opened().read(list(wanted), memory_of, come_back, handles, flight)
        finally:
            do_all([each.drop for each in begun if each.parked.away])
            # Restored tensors are the caller's alone: nothing here keeps their memory any longer.
            self._away = [each for each in self._away if each.parked.away]
            left = {each.parked.kind for each in self._away}
            if self._guard is not None and not left & {PARAMETERS, BUFFERS}:
                self._guard.release_module()
            if self._guard is not None and not left:
                self._guard.release()
                self._guard = None
            self.restore_s += time.perf_counter() - began

    @contextlib.contextmanager
    def _moving(self, cancellation: Cancellation) -> Iterator[tuple[DriveHandles, InFlight]]:
        """A handle for as long as the body runs: it has threads and memory."""
        handle = self._handle
        if handle is not None and handle.closed and self._guard is not None:
            handle = None  # parked tensors come back anyway
        handles = DriveHandles(handle, self._paths)
        try:
            flight = InFlight()
            cancellation.then(flight.cancel)
            with flight:
                yield handles, flight
        finally:
            handles.close()

    def _opened(self) -> ParkedFile:
        if self._file is None:
            raise ClosedError("nothing was parked: call park()")
        return self._file

    def _finish(self) -> None:
        self._closed = True
        self._resources.close()

    @property
    def restored(self) -> bool:
        """Whether everything is back in memory, and can be used."""
        return self._guard is None and not any(each.parked.away for each in self._away)

    @property
    def swap_dir(self) -> str:
        """The directory of the state."""
        return self._path

    @property
    def closed(self) -> bool:
        """Whether it was restored or closed."""
        return self._closed

    def close(self) -> None:
        """Leave what is parked to `resume_parked`, and give up its directory. Idempotent.

        Module and optimizer cannot be used any more, unless all was restored before.
        """
        with self._lock:
            if not self._closed and os.getpid() == self._process:
                self._finish()

    def __exit__(self, _: object, exc: BaseException | None, __: object) -> None:
        self.restore()

    def __del__(self) -> None:
        if not self._closed and os.getpid() == self._process:
            warnings.warn(
                f"a Parked was dropped: its state is in {self._path}, and "
                "resume_parked brings it into a new module and optimizer",
                ResourceWarning,
                stacklevel=2,
            )
            self._finish()

    def __repr__(self) -> str:
        state = "restored" if self.restored else "closed" if self._closed else "on the drive"
        return f"<Parked in {self._path}, {self.nbytes / 1e9:.2f} GB, {state}>"


def resume_parked(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    swap_dir: Paths,
    handle: AioHandle | None = None,
) -> None:
    """Bring what a process had parked, before it was killed, into objects that were made anew.

    Args:
        module: A module of the same structure, in memory; sharded alike, by as many ranks.
        optimizer: An optimizer of the same class over the same parameters in the same order,
            without steps; None if none was parked.
        swap_dir: As for `park`.
        handle: As for `park`.

    Raises:
        TransferError: Nothing is parked there (ENOENT); it is in use (EBUSY); the drive failed.
        IntegrityError: It belongs to another module or optimizer (says what differs), or is
            damaged. Then, as after a failing drive, the module may have some values of it, and the
            files are still there.
        TypeError: The optimizer's state has tensors of a class that only the process that parked
            them can bring back.

    The files are removed once all is back. After an interrupt call it again.
    """
    arguments.handle(handle)
    cancellation = Cancellation()
    work = partial(_resume, module, optimizer, swap_dir, handle, cancellation)
    run_interruptible(work, cancellation.cancel)


def _resume(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    swap_dir: Paths,
    handle: AioHandle | None,
    cancellation: Cancellation,
) -> None:
    directory = SwapDirs(swap_dir, directory_name("parked"), resume=True)
    done = False
    with contextlib.ExitStack() as resources:
        resources.callback(lambda: directory.release(remove=done))
        found = index.read(directory.path)
        if found is None:
            done = True  # the index was made just now, or never completed
            raise TransferError(
                errno.ENOENT,
                operation="open",
                path=directory.path,
                detail="nothing is parked there" + directory.hint(),
            )
        handles = DriveHandles(handle, directory.paths)
        resources.callback(handles.close)
        flight = InFlight()
        cancellation.then(flight.cancel)
        resuming = _Resuming(directory, handles, found, flight)
        resources.callback(resuming.close)
        with flight:
            resuming.into(module, optimizer)
        done = True


class _Resuming:
    """Reads an index's storages, one at a time, and gives their tensors to new objects."""

    def __init__(
        self, directory: SwapDirs, handles: DriveHandles, found: Index, flight: InFlight
    ) -> None:
        self._path = directory.path
        self._found = found
        self._handles, self._flight = handles, flight
        names = {where.storage: key for key, where in reversed(found.members.items())}
        self._storages = {
            number: _to_read(*names.get(number, (STATE, "small tensors")), nbytes, sums)
            for number, (nbytes, sums) in enumerate(zip(found.sizes, found.sums, strict=True))
            if number not in found.small
        }
        bands = place(list(self._storages.values()))
        self._file = ParkedFile(directory, bands, checksum=True)
        self._kept: dict[int, torch.Tensor] = {}  # that new tensors lie in

    def close(self) -> None:
        self._file.close()

    def into(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Give everything to new objects; raises IntegrityError if they are others."""
        targets = {
            (each.kind, each.name): each.tensor
            for each in members_of(module, optimizer)
            if each.kind in (PARAMETERS, BUFFERS) and each.name != SHARD
        }
        self._check(targets, module, optimizer)
        together = self._read(len(self._found.sizes) - 1)
        for number, start in self._found.small.items():
            self._kept[number] = together[start : start + self._found.sizes[number]].clone()
        by_storage: dict[int, list[tuple[str, str]]] = {}
        for key in targets.keys() & self._found.members.keys():  # others have no elements
            by_storage.setdefault(self._found.members[key].storage, []).append(key)
        with torch.no_grad():
            for number, keys in by_storage.items():
                memory_here = self._kept.get(number)
                memory_here = self._read(number) if memory_here is None else memory_here
                for key in keys:
                    targets[key].copy_(self._found.members[key].tensor(memory_here))
        parameters = parameters_of(module, optimizer)
        for (kind, name), where in self._found.members.items():
            if kind == GRADIENTS and name in parameters:
                shard = self._tensor(where, parameters[name].device)
                parameters[name].grad = like(parameters[name], shard)
        if optimizer is not None:
            self._fill(optimizer)

    def _check(
        self,
        targets: dict[tuple[str, str], torch.Tensor],
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        stored = {
            key: where
            for key, where in self._found.members.items()
            if key[0] in (PARAMETERS, BUFFERS) and key[1] != SHARD
        }
        for (kind, name), where in stored.items():
            now = targets.get((kind, name))
            if now is None:
                raise self._other(f"it has {name} (of {kind})", "the module has no such tensor")
            if (tuple(now.shape), now.dtype) != (where.shape, where.dtype):
                raise self._other(
                    f"its {name} (of {kind}) is {where.dtype} of shape {where.shape}",
                    f"the module's is {now.dtype} of shape {tuple(now.shape)}",
                )
        for kind, name in targets.keys() - stored.keys():
            if targets[kind, name].numel():
                raise self._other(f"it has no {name} (of {kind})", "the module has")
        groups = [] if optimizer is None else optimizer.param_groups
        count = sum(len(group["params"]) for group in groups)
        if (len(groups), count) != (len(self._found.groups), len(self._found.state)):
            raise self._other(
                f"its optimizer has {counted(len(self._found.groups), 'group')} of "
                f"{counted(len(self._found.state), 'parameter')}",
                f"this one has {len(groups)} of {count}",
            )
        names = index.names_in_order(module, optimizer)
        for number, (theirs, ours) in enumerate(zip(self._found.parameters, names, strict=True)):
            if theirs != ours:
                raise self._other(
                    f"parameter {number} of its optimizer is {theirs}", f"this one's is {ours}"
                )

    def _other(self, stored: str, here: str) -> IntegrityError:
        return IntegrityError(
            f"the state parked in {self._path} belongs to another module or optimizer: {stored}, "
            f"and {here}. Make both as they were when they were parked",
            expected=stored,
            found=here,
        )

    def _fill(self, optimizer: torch.optim.Optimizer) -> None:
        for group, options in zip(optimizer.param_groups, self._found.groups, strict=True):
            group.update(options)
        everything = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter, row in zip(everything, self._found.state, strict=True):
            if row:
                optimizer.state[parameter] = self._decoded(row, parameter)

    def _decoded(self, coded: dict[str, Any], parameter: torch.Tensor) -> Any:
        """A value of the optimizer's state; see `index.coded`."""
        kind, content = next(iter(coded.items()), ("", {}))
        if isinstance(content, dict):
            return {key: self._decoded(each, parameter) for key, each in coded.items()}
        if kind == "tensor":
            where = index.placed(content)  # step counts may be on either
            return self._tensor(where, torch.device("cpu") if where.on_host else parameter.device)
        if kind == "sharded":
            return like(parameter, self._tensor(index.placed(content), parameter.device))
        if kind in ("list", "tuple"):
            values = [self._decoded(each, parameter) for each in content]
            return values if kind == "list" else tuple(values)
        if kind == "other":
            raise TypeError(
                f"the optimizer's state has {an(str(content))}, which only the process that "
                "parked it can bring back: go on from a checkpoint"
            )
        return content

    def _tensor(self, where: index.Place, device: torch.device) -> torch.Tensor:
        """A tensor in memory that it shares with those that it shared it with."""
        if where.storage < 0:
            return torch.empty(where.shape, dtype=where.dtype, device=device)
        if where.storage not in self._kept:
            self._kept[where.storage] = self._read(where.storage)
        kept = self._kept[where.storage]
        if kept.device != device:
            kept = self._kept[where.storage] = kept.to(device)
        return where.tensor(kept)

    def _read(self, number: int) -> torch.Tensor:
        """The bytes of a storage."""
        parked = self._storages[number]
        new = torch.empty(parked.nbytes, dtype=torch.uint8, device="cpu")
        self._file.read([parked], lambda _: new, lambda _: None, self._handles, self._flight)
        return new


def _to_read(kind: str, name: str, nbytes: int, sums: list[int]) -> ParkedStorage:
    nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
    member = Member(kind, name, nothing)
    return ParkedStorage(kind, nothing.untyped_storage(), nbytes, [member], sums=sums)


def _new_directory(swap_dir: Paths, overwrite: bool) -> SwapDirs:
    try:
        return SwapDirs(swap_dir, directory_name("parked"), overwrite=overwrite)
    except TransferError as refused:
        if refused.errno != errno.EEXIST:
            raise
        raise TransferError(
            errno.EEXIST,
            operation="open",
            path=refused.path,
            detail="a process that has ended left a parked state there: resume_parked(module, "
            "optimizer, swap_dir=…) brings it back, overwrite=True removes it; or name another "
            "swap_dir",
        ) from refused
