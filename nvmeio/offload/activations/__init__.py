"""`SwappedActivations`: tensors that autograd saves for backward, on the drive but for a window."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from nvmeio._checks import NotPickled, Paths
from nvmeio._memory import devices
from nvmeio._residency import calls
from nvmeio._residency.calls import Place, check_unchanged, has_memory, in_backward, kept, unpack
from nvmeio._threads.closing import Closing
from nvmeio._threads.owner import Claim
from nvmeio.handle import AioHandle
from nvmeio.offload._optimizer import arguments
from nvmeio.offload.activations._on_device import DeviceActivations, DeviceStorage
from nvmeio.offload.activations._reads import SavedStorage
from nvmeio.offload.activations._store import ActivationStore

Module = TypeVar("Module", bound=torch.nn.Module)


class SwappedActivations(NotPickled, Closing):
    """Keeps the tensors that autograd saves in forward on the drive until backward needs them.

        with SwappedActivations(swap_dir="/mnt/nvme", resident_bytes="4G") as activations:
            for batch in batches:
                with activations.saving():
                    loss = model(batch)
                loss.backward()
                optimizer.step()

    Tensors are written while forward goes on, and their memory becomes free. They are read ahead of
    backward, the last one first. Gradients are the same as without this class, bit for bit.

    A tensor is written when nobody but autograd has it any more. So parameters, buffers, views of
    them and whatever you hold yourself stay where they are. So do tensors of less than `min_bytes`,
    subclasses (DTensor), sparse and quantised ones, and memory that torch did not allocate.

    Tensors on a CUDA device are copied to page-locked host memory beside the computation, and go to
    the drive from there. Before backward needs them they are copied back. Streams wait for these
    copies; the host waits only if the device holds too much.

    With activation checkpointing (either kind) the inputs of the regions are saved. Gradients may
    accumulate, and graphs may be kept (`retain_graph`, `create_graph`) or dropped. Several threads
    may use one object, each within a block of its own.

    Args:
        swap_dir: A directory on a fast drive, made where it is missing (not those above it), or a
            list of them, one on each drive. The files in it have no name: nothing is left there.
        resident_bytes: Memory for saved tensors. Half of it holds those that were saved last, half
            holds those that are read ahead.
        device_bytes: The same on devices, for all devices together.
        min_bytes: Smaller storages stay in memory.
        checksum: Compare read bytes with the written ones (CRC-32).
        handle: Moves the bytes and stays open; None makes one for each drive.

    Raises:
        TransferError: The directory cannot be used.
        TypeError, ValueError: An argument has another type, or is out of range.

    After an error: if the drive is full (ENOSPC) or fails, tensors stay in memory while there is
    room, with a warning in the log. Then forward raises, and may be run again. If the drive cannot
    be read, `backward` raises `TransferError` or `IntegrityError`, and no gradient is computed from
    those bytes.

    Cost: up to 0.1 ms for each tensor that is saved, and again when backward needs it. The file
    grows by a quarter, at least 64 MiB, when it has no room in a row, and never shrinks.
    """

    _elsewhere = "make one there"

    def __init__(
        self,
        *,
        swap_dir: Paths,
        resident_bytes: int | str = "1G",
        device_bytes: int | str = "1G",
        min_bytes: int | str = "1M",
        checksum: bool = True,
        handle: AioHandle | None = None,
    ) -> None:
        window = arguments.size("resident_bytes", resident_bytes, 8192)
        there = arguments.size("device_bytes", device_bytes, 8192)
        least = arguments.size("min_bytes", min_bytes, 1)
        arguments.handle(handle)
        self._min_bytes = least
        self._store = ActivationStore(window, arguments.switch("checksum", checksum))
        self._on_device = DeviceActivations(self._store, there)
        self._ending = self._store.open(swap_dir, handle)

    def saving(self) -> _Saving:
        """Keep what autograd saves within this block.

        Backward may come within the block or after it. Tensors that backward itself saves
        (`create_graph`) stay in memory. Blocks may be nested; the innermost one applies.

        Raises:
            ClosedError: By the block: it is closed, or another process's.
        """
        return _Saving(self)

    def attach(self, module: Module) -> Module:
        """Have each call of a module be such a block, for trainers that have the loop.

        Args:
            module: Called as ever; returned as it is.
        """
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")

        def around(call: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return call(*args, **kwargs)
            hooks = self._hooks()
            try:
                return call(*args, **kwargs)
            finally:
                del hooks

        calls.wrap(module, around)
        return module

    def _hooks(self) -> calls.Undone:
        self._store.check_open()
        others = calls.saved_tensors_hooks_around()

        def pack(tensor: torch.Tensor) -> Any:
            return _Saved(self, tensor) if self._takes(tensor) else kept(tensor, others)

        return calls.saved_tensors_hooks(pack, unpack)

    def _takes(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or not has_memory(tensor) or in_backward():
            return False
        if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return False
        if isinstance(tensor._base, torch.nn.Parameter):
            return False
        storage = tensor.untyped_storage()
        if devices.is_device(tensor):
            return storage.nbytes() >= self._min_bytes and devices.is_torchs(tensor)
        # Memory that torch did not allocate may change, or be held, by others that nobody sees.
        return (
            storage.device.type == "cpu"
            and storage.nbytes() >= self._min_bytes
            and storage.resizable()
            and not storage.is_shared()
        )

    def close(self) -> None:
        """Give up files and memory. Graphs that were saved here cannot be gone through any more."""
        self._ending.close()

    @property
    def resident_bytes(self) -> int:
        """The window."""
        return self._store.resident_bytes

    @property
    def device_bytes(self) -> int:
        """The window on devices, of all together."""
        return self._on_device.device_bytes

    @property
    def in_memory_bytes(self) -> int:
        """Bytes of saved tensors that are in host memory; others may hold them too."""
        return self._store.in_memory_bytes

    @property
    def on_device_bytes(self) -> int:
        """Bytes of saved tensors that are on devices, as forward left them."""
        return self._on_device.nbytes

    @property
    def on_drive_bytes(self) -> int:
        """Bytes of saved tensors that are on the drive."""
        return self._store.on_drive_bytes

    @property
    def file_bytes(self) -> int:
        """The bytes of the files on all drives; equal steps do not make them grow."""
        return self._store.file_bytes

    @property
    def bytes_written(self) -> int:
        """Written since this was made."""
        return self._store.written_bytes

    @property
    def bytes_read(self) -> int:
        """Read for backward since this was made."""
        return self._store.read_bytes

    def __repr__(self) -> str:
        state = "closed" if self._store.closed else f"{self.bytes_written} bytes written"
        return f"<SwappedActivations, resident_bytes={self.resident_bytes}, {state}>"


class _Saving(BaseException):
    """One block, or one after the other.

    The hooks end when they are dropped, and ``__exit__`` must do that without a bytecode in which
    it could be interrupted: whoever keeps the interrupt would keep its frame, and so the hooks. An
    exception lends it a C function that takes three arguments and drops what was in ``args``. It
    is never raised.
    """

    args: tuple[Any, ...]

    def __init__(self, activations: SwappedActivations) -> None:
        self._activations = activations
        self.args = ()

    def __enter__(self) -> SwappedActivations:
        if self.args and isinstance(self.args[0], calls.Undone):
            raise RuntimeError("a block cannot be entered within itself: call saving() for another")
        self.args = (self._activations._hooks(),)
        return self._activations

    __exit__ = BaseException.__init__


class _Saved:
    """A tensor that autograd keeps, by its place in a saved storage."""

    __slots__ = ("_activations", "_claim", "_place", "_size", "_storage", "_version", "_witness")

    _claim: Claim
    _storage: SavedStorage

    def __init__(self, activations: SwappedActivations, tensor: torch.Tensor) -> None:
        self._activations = activations  # which must not end before
        self._place = Place(tensor)
        self._size = tuple(tensor.shape)
        self._version = tensor._version
        # It has the tensor's version, which others may change, and none of its memory.
        self._witness = tensor.detach()
        self._witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        if devices.is_device(tensor):
            self._storage, self._claim = activations._on_device.save(tensor)
        else:
            self._storage, self._claim = activations._store.save(tensor.untyped_storage())

    def get(self) -> torch.Tensor:
        """The tensor, with the bytes that it had."""
        check_unchanged(self._witness, self._version, self._size)
        self._activations._store.check_open()
        activations, storage = self._activations, self._storage
        if isinstance(storage, DeviceStorage):
            found = self._place.over(activations._on_device.bytes_of(storage))
        else:
            found = self._place.over(activations._store.bytes_of(storage))
        shown = self._witness.detach()  # whose version a change of it is seen by, the next time
        shown.data = found
        return shown
