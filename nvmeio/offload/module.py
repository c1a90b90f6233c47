"""`SwappedModule`: a module whose parameters are on the drive, but for a window of memory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nvmeio._checks import NotPickled, Paths
from nvmeio._memory import devices
from nvmeio._threads.closing import Closing
from nvmeio._torch_private import IncompatibleKeys
from nvmeio.gds import GdsHandle
from nvmeio.handle import AioHandle
from nvmeio.offload._module import tiles
from nvmeio.offload._module.param_store import ParamStore, store_of
from nvmeio.offload._module.sharded import Sharded, is_fsdp
from nvmeio.offload._module.stages import ParamUnit, find_stages, find_units
from nvmeio.offload._module.wrapped import attach, watch
from nvmeio.offload._optimizer import arguments
from nvmeio.offload._swap_files.tensors import is_absent, is_sharded, own_strides, sharded_alike
from nvmeio.offload.optimizer import SwappedOptimizer


class SwappedModule(NotPickled, Closing, torch.nn.Module):
    """A module whose parameters are on the drive, and in memory only while they are used.

    Before a part of the module runs, its parameters are read into a window of memory, and those of
    the next parts are read ahead; backward does the same in reverse. Results are those of the
    module in memory, bit for bit. Activation checkpointing (either kind, of modules and of
    functions), tied parameters and shared modules work. Buffers stay in memory.

    Experts of mixtures that no token is routed to are not read: modules in a list called
    "experts", and on the CPU the rows of fused parameters whose module is called with the routing
    (transformers' ``top_k_index``). Such rows are NaN in memory.

    A parameter that is not in the window has its shape and is NaN, and writing to it is refused.
    Step with a `SwappedOptimizer`, which writes the new values to the drive. To change parameters
    by hand, use `gather`.

    A `torch.nn.Linear` that is too large for the window is cut into tiles (`layer.tiles`): smaller
    linear layers, each with some of its rows as parameters of its own. State dicts do not change.
    Each output is the same sum, of which last bits may differ. A layer whose weight another module
    uses too, or whose weight has hooks, is not cut.

    If FSDP2 shards the module (`fully_shard`, on a mesh of CPUs, or of CUDA devices with
    ``offload_policy=CPUOffloadPolicy()``), each rank's shards are on that
    rank's drive, and its parts are the modules that `fully_shard` was called for. FSDP gathers from
    the window and frees what it gathered, as it does in memory. Shards must have memory when the
    module is swapped. If reading a shard fails, this object refuses to go on (`ClosedError`), and
    the other ranks fail in their collective.

    Args:
        module: Its parameters are in memory on the CPU, or on the meta device. In the second case
            they are made part by part, never all at once.
        swap_dir: A directory on a fast drive, made where it is missing (not those above it); a
            subdirectory is made in it and locked. Or a list of them, as for `SwappedOptimizer`.
        resident_bytes: The window in host memory, or a size such as "8G" (GiB). At least the
            largest part of the module (or 64 rows of a linear layer) and the parameters of the
            modules that call it; for training one part more, which backward needs while a
            checkpointed region runs again. With room for yet another part, reading and computing
            overlap.
        stage_bytes: The largest part that is read as one. None: a quarter of the (smaller) window,
            or less if that would not hold what is needed at once. A larger module is read child by
            child, if its forward calls its children. Tiles are no larger either. Not for a module
            that FSDP2 shards.
        device: The device that it computes on: the CPU, or a CUDA device (one H100 has run it,
            docs/gds.md). The host's window is then the way there, and keeps what it has room for;
            copies have a stream of their own, and yours waits for them by events. Buffers are moved
            there, and gradients are made there. Bring inputs there yourself.
        device_bytes: The window on the device, for a CUDA device only. None: three of the largest
            parts, or what is needed at once.
        init: For parameters on the meta device: called with each module that has some, in the
            order of `modules()`, once they have memory. None: its `reset_parameters`.
        handle: Moves the bytes and stays open; None makes one for each drive. With a `GdsHandle`
            whose `mode` is "gds" or "p2p", and a CUDA device, parts go straight between drive and
            device: no window in host memory is taken, whatever `resident_bytes` says, and the
            module's is 0. In its other modes a part goes through host memory, as with any handle.

    Raises:
        BackendUnavailableError: There is no such device.
        ValueError: A window is too small (says what is enough); a buffer is on the meta device; a
            parameter is on another device, swapped already, or sharded otherwise than by
            `fully_shard`.
        TypeError: A parameter is on the meta device, and its module has no `reset_parameters`: pass
            `init`.
        TransferError: The directory is missing, full, or in use (EBUSY).

    Cost: the windows; a pass forward and one backward read each parameter once each, less
    what stays in the window from one to the other. A parameter under autocast is kept as its
    converted copy for the backward pass, as without this class.
    """

    _elsewhere = "send its state_dict(), and swap another module, in another place"

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        swap_dir: Paths,
        resident_bytes: int | str,
        stage_bytes: int | str | None = None,
        device: str | torch.device = "cpu",
        device_bytes: int | str | None = None,
        init: Callable[[torch.nn.Module], object] | None = None,
        handle: AioHandle | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
        resident_bytes = arguments.size("resident_bytes", resident_bytes, 4096)
        if stage_bytes is not None:
            stage_bytes = arguments.size("stage_bytes", stage_bytes, 1)
        arguments.handle(handle)
        there = devices.usable("device", device)
        device_bytes = arguments.device_bytes(device_bytes, there)
        sharded = _sharded_by_fsdp(module, there, stage_bytes)
        if sharded is None:
            _check_parameters(module, there)
        _check_buffers(module, there if sharded is None else None)  # FSDP has moved them
        tiled = tiles.TiledLayers()
        try:
            direct = is_direct(handle, there)
            windows = tiles.Windows(resident_bytes, device_bytes, there, direct)
            if sharded is None:
                most_bytes = tiles.divide(module, tiled, windows, stage_bytes)
            made_by, strides = _materialised(module)
            stages = find_stages(module, most_bytes) if sharded is None else sharded.stages
            units = find_units(stages, strides) if sharded is None else sharded.units
            # FSDP copies a part at a time out of the window.
            need = None if sharded is not None else tiles.needed(module, stages, units)
            device_bytes = windows.checked(tiles.largest(module, units), need)
            store = ParamStore(units, resident_bytes, there, device_bytes, direct)
            self._store = store
            self._sharded = sharded
            self._ending = store.open(swap_dir, handle)
        except BaseException:
            tiled.undo()
            raise
        tiled.keep()
        try:
            for unit in units:
                gathered = store.first(unit)
                try:
                    _make(unit, made_by, init)
                    store.changes.write(gathered)
                finally:
                    del gathered
                store.evict()
            store.go_on_device(handle)
            if sharded is not None:
                sharded.attach(store)
            else:
                devices.move_buffers(module, there)
                for stage in stages:
                    attach(store, stage)
            watch(module)
            _watch_optimizers()
        except BaseException:
            self.close()
            raise
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        self._store.check_open()
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def gather(self, *parameters: torch.nn.Parameter) -> Iterator[None]:
        """A ``with`` block in which parameters are in memory; they are written back at its end.

        Args:
            parameters: Which; none stands for all. They must fit into the window together.

        Raises:
            MemoryError: They do not fit into the window.
            ValueError: One of them is not the module's.
            TransferError: The drive failed. If it failed at the end of the block, some of these
                parameters may have changed there and others not: set them again.

        Change them in place within ``torch.no_grad()``. If the block raises, nothing is written,
        and the parameters have their values of before. A `SwappedOptimizer` with master weights
        goes on from those until its `reload_weights` is called. The optimizer cannot step within
        the block, which would write its own values over the new ones: it raises `RuntimeError`.

        This is not a step: a process that is killed while the block ends may leave some parameters
        changed and others not, for one that resumes.
        """
        store = self._store
        store.check_open()
        self._reshard()
        wanted = {id(p) for p in parameters or self.module.parameters()}
        if wanted - {id(p) for unit in store.units for p in unit.parameters}:
            raise ValueError(
                "gather() takes parameters that this module has now (module.parameters()); those "
                "of a layer in tiles are its tiles': layer.tiles.parameters()"
            )
        gathered = store.changes.gather(
            [u for u in store.units if wanted & {id(p) for p in u.parameters}]
        )
        try:
            yield
            store.changes.write(gathered)
        except BaseException:
            store.changes.undo(gathered)
            raise
        finally:
            del gathered

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's state dict, under its own names. Nothing is read yet.

        Parameters are mapped files, read when they are touched, so saving takes no memory for the
        whole. They are valid until the next step. Gathered ones have their values in memory. The
        state dict of `module` itself, or of a part of it, is the same. For torch.distributed's
        `get_state_dict` pass `module`.
        """
        self._store.check_open()
        self._reshard()
        return self.module.state_dict(*args, **kwargs)

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
        store = self._store
        store.check_open()
        self._reshard()
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        buffers = dict(self.module.named_buffers(remove_duplicate=False))
        wholes = tiles.whole_parameters(self.module)
        expected = set(self.module.state_dict().keys())
        missing = sorted(expected - state_dict.keys())
        unexpected = sorted(state_dict.keys() - expected)
        if strict and (missing or unexpected):
            raise RuntimeError(f"state_dict: missing {missing}, unexpected {unexpected}")
        given = {id(parameters[n]): t for n, t in state_dict.items() if n in parameters}
        for name, tensor in state_dict.items():
            owner: Any = wholes.get(name, parameters.get(name, buffers.get(name)))
            if owner is not None and tuple(owner.shape) != tuple(tensor.shape):
                raise ValueError(
                    f"{name} must have shape {tuple(owner.shape)} in the state dict, "
                    f"not {tuple(tensor.shape)}"
                )
            if owner is not None and not sharded_alike(owner, tensor):
                raise ValueError(
                    f"{name} is sharded otherwise in the state dict than here: load with "
                    "torch.distributed.checkpoint into this module's state_dict(), or give each "
                    "parameter as a DTensor of its device_mesh and placements (distribute_tensor)"
                )
        for name in wholes.keys() & state_dict.keys():
            given |= wholes[name].split(state_dict[name])
        for name in buffers.keys() & state_dict.keys():
            # Not within no_grad, which Ctrl-C may leave in force.
            buffers[name].detach().copy_(state_dict[name].detach())
        for unit in store.units:
            if any(id(p) in given for p in unit.parameters):
                store.changes.load(unit, given)
        return IncompatibleKeys(missing, unexpected)

    def evict(self) -> None:
        """Let go of all parameters in memory that are not in use."""
        self._store.evict()

    @property
    def resident_bytes(self) -> int:
        """The window in host memory, in bytes; 0 where parts do not come through there."""
        return self._store.resident_bytes

    @property
    def device(self) -> torch.device:
        """The device that it computes on."""
        return self._store.device

    @property
    def device_bytes(self) -> int:
        """The window on the device, in bytes; 0 for the CPU, which has no other."""
        return self._store.device_bytes

    @property
    def direct(self) -> bool:
        """Whether parts come to the device straight from the drive; see `handle`."""
        return self._store.direct

    @property
    def bytes_read(self) -> int:
        """Read from the drive since this was made."""
        return self._store.bytes_read

    @property
    def pinned(self) -> bool:
        """Whether the window is page-locked; the drive does not need it."""
        return self._store.locked

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._store.closed

    def close(self) -> None:
        """Give back memory and directory. The parameters are gone: save them first. Idempotent.

        Without it the same happens when the object goes, or the process ends. Close a
        `SwappedOptimizer` of these parameters before or after it, as you like; once that is closed
        and has no master weights, which keep them elsewhere, the module can only be closed.
        """
        self._ending.close()

    def _reshard(self) -> None:
        if self._sharded is not None:
            self._sharded.reshard()

    def __getattr__(self, name: str) -> Any:
        inner = self.__dict__.get("_modules", {}).get("module")
        if inner is None or name == "module" or not hasattr(inner, name):
            return super().__getattr__(name)
        raise AttributeError(
            f"a SwappedModule has no {name!r}; the module within it has: ask for module.{name}. "
            "get_state_dict of torch.distributed.checkpoint, and other code that follows names, "
            "must be given that module"
        )


# Making


_DIRECT_MODES = ("gds", "p2p")


def is_direct(handle: AioHandle | None, device: torch.device) -> bool:
    """Whether parts come to the device by DMA from the drive.

    cuFile's compat mode goes through host memory of its own, with a copy more and nothing kept
    there: the window in host memory is the better way then.
    """
    return isinstance(handle, GdsHandle) and device.type == "cuda" and handle.mode in _DIRECT_MODES


def _sharded_by_fsdp(
    module: torch.nn.Module, device: torch.device, stage_bytes: int | None
) -> Sharded | None:
    if not is_fsdp(module):
        return None
    if device.type != "cpu":
        raise ValueError(
            "the module is sharded by FSDP, which says where it computes: leave out device="
        )
    if stage_bytes is not None:
        raise ValueError(
            "the module is sharded by FSDP, and its parts are those of fully_shard: leave out "
            "stage_bytes, and call fully_shard for smaller parts"
        )
    return Sharded(module)


def _check_stepping(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Refuse a step in the window, which neither the drive nor `state_dict` would know of."""
    groups = () if isinstance(optimizer, SwappedOptimizer) else optimizer.param_groups
    for parameter in (p for g in groups for p in g["params"] if p.grad is not None):
        store = store_of(parameter)
        if store is not None and not store.is_gathered(parameter):
            kind = type(optimizer).__name__
            raise RuntimeError(
                f"{kind} cannot step parameters of a SwappedModule: only the values in memory "
                f"would change. Make a SwappedOptimizer({kind}, module.parameters(), ...) after it"
            )


_watch_optimizers = functools.cache(lambda: register_optimizer_step_pre_hook(_check_stepping))


def _check_parameters(module: torch.nn.Module, device: torch.device) -> None:
    for name, parameter in module.named_parameters():
        if is_sharded(parameter):
            raise ValueError(
                f"{name} is sharded, and not by fully_shard: shard the module with that, or swap "
                "its optimizer only"
            )
        if parameter.device.type not in ("cpu", "meta") and parameter.device != device:
            raise ValueError(
                f"{name} is on {parameter.device}, and the module is to compute on {device}: "
                "have its parameters on the CPU, or on that device"
            )
        if parameter.is_inference() and not parameter.is_meta:
            raise arguments.made_for_inference(name)
        if store_of(parameter) is not None:
            raise ValueError(f"{name} is swapped by another SwappedModule: close that one")
        if is_absent(parameter):
            raise ValueError(
                f"{name} has no values: it was swapped by a SwappedModule that is closed, or could "
                "not be made. Make a new module, or load its parameters"
            )


def _check_buffers(module: torch.nn.Module, device: torch.device | None) -> None:
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            raise ValueError(
                f"the buffer {name} is on the meta device, where it has no value: make buffers "
                "on the CPU (device='cpu' in register_buffer)"
            )
        if device is not None and buffer.device.type != "cpu" and buffer.device != device:
            raise ValueError(
                f"the buffer {name} is on {buffer.device}, and the module is to compute on "
                f"{device}: move it to the CPU first, or to that device"
            )


def _materialised(
    module: torch.nn.Module,
) -> tuple[dict[int, torch.nn.Module], dict[int, tuple[int, ...]]]:
    """Replace parameters on the meta device by such on the CPU, without memory yet.

    Returns, by their id, the module that has each, in the order of `modules()`, and the strides
    that it is to have.
    """
    made: dict[int, torch.nn.Parameter] = {}
    owners: dict[int, torch.nn.Module] = {}
    strides: dict[int, tuple[int, ...]] = {}
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                with torch.inference_mode(False):  # which may be on
                    empty = torch.empty((), dtype=parameter.dtype).expand(parameter.shape)
                    made[id(parameter)] = torch.nn.Parameter(empty, parameter.requires_grad)
                owners[id(made[id(parameter)])] = each
                strides[id(made[id(parameter)])] = own_strides(parameter.detach())
            each._parameters[name] = made[id(parameter)]
    return owners, strides


def _make(
    unit: ParamUnit,
    made_by: dict[int, torch.nn.Module],
    init: Callable[[torch.nn.Module], object] | None,
) -> None:
    """Give a unit's parameters that were on the meta device their first values."""
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
