"""`SwappedModule`: a module whose parameters are on the drive, but for a window of memory."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from nvmeio._io.handles import new_handle
from nvmeio.errors import ClosedError
from nvmeio.files import File
from nvmeio.handle import AioHandle
from nvmeio.offload import _checks
from nvmeio.offload._file_tensors import FilePart, file_tensor
from nvmeio.offload._homes import Extent, home_of, set_home
from nvmeio.offload._pipeline import Move, move_all
from nvmeio.offload._ranks import directory_name
from nvmeio.offload._stages import Stage, Unit, find_stages, find_units
from nvmeio.offload._swap_dir import SwapDir
from nvmeio.offload._tensors import is_sharded
from nvmeio.offload._window import Window, over

NAME = "weights"


class _Saved(NamedTuple):
    """What autograd keeps of a tensor over a parameter: where to find it again."""

    unit: Unit
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    parameter: torch.nn.Parameter | None  # that it is a view of; None where it is empty
    version: int  # of the parameter, then


class SwappedModule(torch.nn.Module):
    """A module whose parameters are on the drive outside of a window of memory.

    Before a part of the module runs, its parameters are read; those of the parts that follow are
    begun, in backward in reverse. Autograd keeps the place of a parameter instead of its memory.
    Results are those of the module in memory, bit for bit. Activation checkpointing (either
    kind), tied parameters and shared modules work; buffers stay in memory.

    A parameter that is not in the window is NaN in the right shape, and cannot be written to. Step
    with a `SwappedOptimizer`, which writes the new values to the drive; change them by hand within
    `gather`.

    Args:
        module: With its parameters in memory on the CPU, or on the meta device: then they are
            made part by part, never all at once.
        swap_dir: A directory on a fast drive, made where it is missing (not those above it); a
            subdirectory is made in it and locked.
        resident_bytes: The window. At least the largest part of the module; two or three of them
            let reading and computing overlap.
        stage_bytes: How large a part may be that is brought in as one; None: a quarter of the
            window. A larger module comes child by child, if its forward calls its children.
        init: For parameters on the meta device: called with each module that has some, in the
            order of `modules()`, once they have memory. None: its `reset_parameters`.
        handle: Moves the bytes and stays open; None makes one.

    Raises:
        ValueError: The window cannot hold a part; a buffer is on the meta device; a parameter is on
            a GPU or sharded, or swapped already.
        TypeError: A parameter on the meta device has nobody who makes it.
        TransferError: The directory is missing, full, or in use (EBUSY).

    Cost: the window; a pass forward and one backward read each parameter once each, less
    what stays in the window from one to the other. A parameter under autocast is kept as its
    converted copy for the backward pass, as without this class.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        swap_dir: str | os.PathLike[str],
        resident_bytes: int,
        stage_bytes: int | None = None,
        init: Callable[[torch.nn.Module], object] | None = None,
        handle: AioHandle | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
        _checks.count("resident_bytes", resident_bytes, 4096)
        if stage_bytes is not None:
            _checks.count("stage_bytes", stage_bytes, 1)
        _checks.handle(handle)
        _check_module(module)
        made_by = _materialised(module)
        stages = find_stages(module, stage_bytes or resident_bytes // 4)
        units = find_units(stages)
        _check_budget(module, stages, units, resident_bytes)
        directory = SwapDir(swap_dir, directory_name("parameters"))
        try:
            directory.clean()
            keeper = _Keeper(directory, handle, resident_bytes, units)
        except BaseException:
            directory.release(remove=True)
            raise
        self._keeper = keeper
        self._finalizer = weakref.finalize(self, keeper.close, os.getpid())
        try:
            for unit in units:
                keeper.store(unit, functools.partial(_make, unit, made_by, init))
            for stage in stages:
                _hook(keeper, stage)
        except BaseException:
            self._finalizer()
            raise
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        self._keeper.check_open()
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def gather(self, *parameters: torch.nn.Parameter) -> Iterator[None]:
        """Have parameters in memory within the block, and write them back at its end.

        Args:
            parameters: Which; none stands for all. They must fit into the window together.

        Raises:
            MemoryError: They do not fit.
            TransferError: The drive failed. Where it did so at the end of the block, some of these
                parameters may have changed there and others not: set them again.

        Change them in place within ``torch.no_grad()``. If the block raises, nothing is written,
        and the parameters have their values of before. A `SwappedOptimizer` with master weights
        goes on from those until its `reload_weights` is called.

        This is not a step: a process that is killed while the block ends may leave some parameters
        changed and others not, for one that resumes.
        """
        keeper = self._keeper
        keeper.check_open()
        wanted = {id(p) for p in parameters or self.module.parameters()}
        units = [u for u in keeper.units if wanted & {id(p) for p in u.parameters}]
        pinned: list[Unit] = []
        try:
            for unit in units:
                keeper.window.need(unit, pin=True, computing=False)
                pinned.append(unit)
            try:
                yield
            except BaseException:
                for unit in units:
                    keeper.reread(unit)
                raise
            for unit in units:
                keeper.write(unit)
        finally:
            for unit in pinned:
                keeper.window.unpin(unit)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of the module, under its own names; parameters lie over the file, unread.

        They are valid until the next step. Saving takes no memory for the whole.
        """
        keeper = self._keeper
        keeper.check_open()
        found = self.module.state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", "")
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if prefix + name in found and keeper.has(parameter):
                found[prefix + name] = keeper.on_file(parameter)
        return found

    @torch.no_grad()
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Take over the module's state, part by part.

        Args:
            state_dict: Under the module's own names.
            strict: Names must be the same.
            assign: Not supported: must be False.

        Raises:
            ValueError: `assign`, or a shape differs.
            RuntimeError: Names differ.
            TransferError: The drive failed.

        A `SwappedOptimizer` with master weights goes on from those until its `reload_weights` is
        called.
        """
        if assign:
            raise ValueError("assign=True would put the tensors into memory: leave it out")
        keeper = self._keeper
        keeper.check_open()
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        buffers = dict(self.module.named_buffers(remove_duplicate=False))
        expected = set(self.module.state_dict().keys())
        missing = sorted(expected - state_dict.keys())
        unexpected = sorted(state_dict.keys() - expected)
        if strict and (missing or unexpected):
            raise RuntimeError(f"state_dict: missing {missing}, unexpected {unexpected}")
        given = {id(parameters[n]): t for n, t in state_dict.items() if n in parameters}
        for name, tensor in state_dict.items():
            owner = parameters.get(name, buffers.get(name))
            if owner is not None and tuple(owner.shape) != tuple(tensor.shape):
                raise ValueError(
                    f"{name} has shape {tuple(owner.shape)}, and in the state dict "
                    f"{tuple(tensor.shape)}"
                )
        for name in buffers.keys() & state_dict.keys():
            buffers[name].copy_(state_dict[name])
        for unit in keeper.units:
            if any(id(p) in given for p in unit.parameters):
                keeper.window.need(unit, pin=True, computing=False)
                try:
                    for parameter in unit.parameters:
                        if id(parameter) in given:
                            parameter.copy_(given[id(parameter)])
                    keeper.write(unit)
                finally:
                    keeper.window.unpin(unit)
        return torch.nn.modules.module._IncompatibleKeys(missing, unexpected)

    def evict(self) -> None:
        """Let go of all parameters in memory that are not in use."""
        self._keeper.evict()

    @property
    def resident_bytes(self) -> int:
        """The window, in bytes."""
        return self._keeper.window.budget_bytes

    @property
    def bytes_read(self) -> int:
        """Read from the drive since this was made."""
        return self._keeper.window.read_bytes

    @property
    def pinned(self) -> bool:
        """Whether the window is page-locked; the drive does not need it."""
        return self._keeper.window._pool.locked

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._keeper.closed

    def close(self) -> None:
        """Give back memory and directory. The parameters are gone: save them first. Idempotent.

        Without it the same happens when the object goes, or the process ends. Close a
        `SwappedOptimizer` of these parameters before or after it, as you like.
        """
        self._finalizer()

    def _apply(self, fn: Any, recurse: bool = True) -> SwappedModule:
        raise TypeError(
            "a swapped module cannot be moved or converted (to, half, cuda, …): do so before it is "
            "swapped"
        )

    def __enter__(self) -> SwappedModule:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a swapped module belongs to its process and directory: send state_dict()")

    def __deepcopy__(self, memo: Any) -> SwappedModule:
        raise TypeError("a swapped module cannot be copied: swap another module, in another place")


class _Keeper:
    """The home of the parameters: their file, and the window."""

    def __init__(
        self,
        directory: SwapDir,
        handle: AioHandle | None,
        resident_bytes: int,
        units: Sequence[Unit],
    ) -> None:
        self._directory = directory
        self._own_handle = handle is None
        self.units = list(units)
        self.closed = False
        self._pid = os.getpid()
        self._unit_of = {id(p): unit for unit in units for p in unit.parameters}
        self._elsewhere: dict[int, Callable[[], Sequence[Extent]]] = {}
        self._file: File = directory.allocate(NAME, sum(unit.nbytes for unit in units))
        self._handle = new_handle(directory.path) if handle is None else handle
        try:
            self.window = Window(self._handle, resident_bytes, self._moves)
        except BaseException:
            self._file.close()
            if self._own_handle:
                self._handle.close()
            raise

    def store(self, unit: Unit, make: Callable[[torch.Tensor], None]) -> None:
        """Put a unit on the drive for the first time; `make` fills its memory."""
        keep = [p.data for p in unit.parameters]
        memory = self.window.blank(unit)
        for parameter, value, span in zip(unit.parameters, keep, unit.spans, strict=True):
            if not value.is_meta and value.device.type == "cpu" and value.numel():
                over(memory, span).copy_(value)
            set_home(parameter, self)
        del keep
        make(memory)
        self.write(unit)
        self.window.drop(unit)

    def write(self, unit: Unit) -> None:
        """Write a unit that is in memory to where it lives."""
        memory = self.window.need(unit, computing=False)
        move_all(self._handle, memory, self._moves(unit), writing=True)

    def reread(self, unit: Unit) -> None:
        """Give a unit that is in memory, and was changed there, the values of the drive again."""
        memory = self.window.need(unit, computing=False)
        move_all(self._handle, memory, self._moves(unit), writing=False)

    def _moves(self, unit: Unit) -> list[Move]:
        if not any(id(p) in self._elsewhere for p in unit.parameters):
            return [Move(self._file, unit.file_offset, 0, unit.nbytes)]
        found: list[Move] = []
        for parameter, span in zip(unit.parameters, unit.spans, strict=True):
            size = span.dtype.itemsize
            for extent in self.where(parameter):
                nbytes = (extent.stop - extent.start) * size
                move = Move(
                    extent.file,
                    extent.file_offset,
                    span.offset + extent.start * size,
                    nbytes,
                )
                last = found[-1] if found else None
                if last is not None and _follows(last, move):
                    found[-1] = last._replace(
                        nbytes=move.slot_offset + move.nbytes - last.slot_offset
                    )
                elif nbytes:
                    found.append(move)
        return found

    # Home

    def evict(self) -> None:
        self.window.drop_all()

    def where(self, parameter: torch.Tensor) -> Sequence[Extent]:
        locate = self._elsewhere.get(id(parameter))
        if locate is not None:
            return locate()
        unit = self._unit_of[id(parameter)]
        for each, span in zip(unit.parameters, unit.spans, strict=True):
            if each is parameter:
                return [Extent(self._file, unit.file_offset + span.offset, 0, each.numel())]
        raise KeyError(parameter)

    def relocate(self, parameter: torch.Tensor, locate: Callable[[], Sequence[Extent]]) -> None:
        self._elsewhere[id(parameter)] = locate
        if all(id(p) in self._elsewhere for unit in self.units for p in unit.parameters):
            opened = self._file.acquire(True)
            try:
                os.ftruncate(opened.any_fd(), 0)  # nobody reads it any more
            finally:
                opened.release()

    # Whoever looks

    def has(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._unit_of

    def on_file(self, parameter: torch.Tensor) -> torch.Tensor:
        parts = []
        for extent in self.where(parameter):
            opened = extent.file.acquire(False)
            nbytes = (extent.stop - extent.start) * parameter.dtype.itemsize
            parts.append(FilePart(opened.any_fd(), extent.file_offset, nbytes))
            opened.release()
        return file_tensor(parts, parameter.dtype, tuple(parameter.shape))

    def check_open(self) -> None:
        if self.closed:
            raise ClosedError("the swapped module is closed")
        if os.getpid() != self._pid:
            raise ClosedError("this process was forked from the module's owner: swap one here")

    def close(self, pid: int) -> None:
        if self.closed or os.getpid() != pid:
            return
        self.closed = True
        for unit in self.units:
            for parameter in unit.parameters:
                set_home(parameter, None)
        try:
            self.window.close()
        finally:
            self._file.close()
            if self._own_handle:
                self._handle.close()
            self._directory.release(remove=True)

    # Autograd

    def pack(self, tensor: torch.Tensor, others: Any) -> Any:
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_cpu:
            unit = self.window.unit_at(tensor.untyped_storage().data_ptr())
            if unit is not None:
                offset = int(tensor.storage_offset())
                parameter = _parameter_at(unit, offset * tensor.dtype.itemsize)
                return _Saved(
                    unit,
                    tensor.dtype,
                    offset,
                    tuple(tensor.shape),
                    tuple(tensor.stride()),
                    parameter,
                    0 if parameter is None else parameter._version,
                )
        return tensor if others is None else _Foreign(others[0](tensor))

    def unpack(self, saved: Any, others: Any) -> torch.Tensor:
        if isinstance(saved, _Saved):
            if saved.parameter is not None and saved.parameter._version != saved.version:
                raise RuntimeError(
                    f"a parameter of shape {tuple(saved.parameter.shape)} was changed (by a step, "
                    "within gather or by load_state_dict) after the forward pass that this "
                    "backward belongs to: run forward again. torch refuses the same in memory"
                )
            memory = self.window.need(saved.unit)
            found = torch.empty(0, dtype=saved.dtype)
            with torch.no_grad():
                found.set_(memory.untyped_storage(), saved.offset, saved.size, saved.stride)
            return found
        if isinstance(saved, _Foreign):
            theirs: torch.Tensor = others[1](saved.value)
            return theirs
        kept: torch.Tensor = saved
        return kept


def _parameter_at(unit: Unit, offset: int) -> torch.nn.Parameter | None:
    """The parameter that has this byte of a unit's memory."""
    for parameter, span in zip(unit.parameters, unit.spans, strict=True):
        if span.offset <= offset < span.offset + span.nbytes:
            return parameter
    return None


class _Foreign:
    """What the hooks around ours (of a checkpoint) keep of a tensor."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def _hook(keeper: _Keeper, stage: Stage) -> None:
    """Let a stage's parameters come before its forward and be free to go after it."""
    mine = {id(p) for p in stage.parameters}
    units = [unit for unit in keeper.units if mine & {id(p) for p in unit.parameters}]
    entered: list[tuple[list[Unit], Any]] = []

    def before(module: torch.nn.Module, args: Any) -> None:
        keeper.check_open()
        pinned: list[Unit] = []
        try:
            for unit in units:
                keeper.window.need(unit, pin=True)
                pinned.append(unit)
        except BaseException:
            for unit in pinned:
                keeper.window.unpin(unit)
            raise
        others = _hooks_around()
        saving = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: keeper.pack(tensor, others), lambda saved: keeper.unpack(saved, others)
        )
        saving.__enter__()
        entered.append((pinned, saving))

    def after(module: torch.nn.Module, args: Any, output: Any) -> None:
        if not entered:
            return  # the hook before it raised
        pinned, saving = entered.pop()
        saving.__exit__()
        for unit in pinned:
            keeper.window.unpin(unit)

    stage.module.register_forward_pre_hook(before)
    stage.module.register_forward_hook(after, always_call=True)


def _hooks_around() -> Any:
    """The saved-tensor hooks in force: only the innermost pair is called, so ours calls them."""
    ask: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if ask is None else ask(True)


def _follows(last: Move, move: Move) -> bool:
    """Whether two moves are one: neighbours in the file and in memory, with the same gap."""
    gap = move.file_offset - (last.file_offset + last.nbytes)
    return (
        last.file is move.file
        and 0 <= gap < 4096
        and move.slot_offset - (last.slot_offset + last.nbytes) == gap
    )


# Making


def _check_module(module: torch.nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if is_sharded(parameter):
            raise ValueError(
                f"{name} is sharded: FSDP brings parameters in by itself; swap its optimizer only"
            )
        if parameter.device.type not in ("cpu", "meta"):
            raise ValueError(
                f"{name} is on {parameter.device}: parameters are swapped from the CPU"
            )
        if home_of(parameter) is not None:
            raise ValueError(f"{name} is swapped already, by another SwappedModule")
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            raise ValueError(
                f"the buffer {name} is on the meta device, and nobody could fill it: make buffers "
                "on the CPU (device='cpu' in register_buffer)"
            )


def _materialised(module: torch.nn.Module) -> dict[int, torch.nn.Module]:
    """Replace parameters on the meta device by such on the CPU, without memory yet.

    Returns:
        For each of these, by id, the module that has it, in the order of `modules()`.
    """
    made: dict[int, torch.nn.Parameter] = {}
    owners: dict[int, torch.nn.Module] = {}
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                empty = torch.empty((), dtype=parameter.dtype).expand(parameter.shape)
                made[id(parameter)] = torch.nn.Parameter(empty, parameter.requires_grad)
                owners[id(made[id(parameter)])] = each
            each._parameters[name] = made[id(parameter)]
    return owners


def _make(
    unit: Unit,
    made_by: dict[int, torch.nn.Module],
    init: Callable[[torch.nn.Module], object] | None,
    memory: torch.Tensor,
) -> None:
    """Give those parameters of a unit their first values that were on the meta device."""
    modules = dict.fromkeys(made_by[id(p)] for p in unit.parameters if id(p) in made_by)
    for module in modules:
        if init is not None:
            init(module)
            continue
        reset: Any = getattr(module, "reset_parameters", None)
        if reset is None:
            raise TypeError(
                f"{type(module).__name__} has parameters on the meta device and no "
                "reset_parameters(): give init=, which is called with each such module"
            )
        reset()


def _check_budget(
    module: torch.nn.Module, stages: Sequence[Stage], units: Sequence[Unit], resident_bytes: int
) -> None:
    largest = 0
    which = ""
    for stage in stages:
        mine = {id(p) for p in stage.parameters}
        need = sum(u.nbytes for u in units if mine & {id(p) for p in u.parameters})
        if need > largest:
            largest, which = need, stage.name or type(module).__name__
    if largest > resident_bytes:
        raise ValueError(
            f"resident_bytes={resident_bytes} is too small: {which} alone takes {largest} bytes; "
            f"give at least that, and {3 * largest} to read ahead"
        )
