"""Tensors as memory: address and length of what a transfer moves, and what must happen after.

The common case, a contiguous CPU tensor, costs nothing: its own memory is read and written.
Everything else (non-contiguous, lazily conjugated, a device that nvmeio knows nothing about) goes
through a contiguous CPU copy of itself, made before a write and copied back after a read.

CUDA tensors have their own pair, `device_source` and `device_destination`: the memory stays on the
device, and whatever copy there must be is made there.

Whatever else has the buffer protocol (numpy arrays, bytearray, memoryview, mmap) is taken as the
tensor of bytes that lies over it (`_over_buffer`), which holds the object's export until the
operation is done: a bytearray cannot be resized meanwhile.
"""

from __future__ import annotations

import ctypes
import errno
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nvmeio._bindings import copy_foreign, ffi, memory_at
from nvmeio._memory import devices, holds, mappings
from nvmeio._memory.devices import Copier, Mark
from nvmeio._torch_private import InferenceMode, is_wrapper_subclass
from nvmeio.errors import an

if TYPE_CHECKING:
    from typing import TypeAlias, TypeGuard

    from typing_extensions import Buffer

# Memory that a transfer takes: a tensor, or anything with the buffer protocol.
Data: TypeAlias = "torch.Tensor | Buffer"

# Entered and left by C alone: `torch.inference_mode` is Python, which Ctrl-C may cut in half.
_inference_mode: Any = InferenceMode
_CPU = torch.device("cpu")
_STRIDED = torch.strided
LOOKED_UP_BYTES = 64 << 10

_new = tuple.__new__
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
# A tensor of these types has `nbytes` bytes in memory. Parts of complex numbers have the types of
# the second kind, and may be still to be negated.
_PLAIN_DTYPES = frozenset(
    {torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool}
)
_FLOATS = frozenset({torch.float16, torch.float32, torch.float64})


class Memory(NamedTuple):
    """A transfer's memory.

    Attributes:
        address: First byte.
        nbytes: Length in bytes.
        keep: The storage behind it, to be kept until the kernel is done: the tensor may be given
            another one meanwhile.
        copy_back: Moves what was read through a copy into the tensor; else None.
        device: Device memory as a 1-D uint8 tensor of `nbytes`; None for host memory.
        ready: From when on device memory may be touched; None for at once.
        changed: The tensor that a read changes without torch's knowledge; else None.
        foreign: Neither torch nor nvmeio allocated it, so it may be read-only or end early.
        held: The hold on the tensor's storage. Last, so that it goes before what it holds.
    """

    address: int
    nbytes: int
    keep: torch.UntypedStorage
    copy_back: Callable[[], None] | None
    device: torch.Tensor | None = None
    ready: Mark | None = None
    changed: torch.Tensor | None = None
    foreign: bool = False
    held: Any = None

    def end(self) -> None:
        """Let the storage be resized again, because the kernel is done with it."""
        holds.end(self.held)

    def read(self, start: int, nbytes: int) -> bytes:
        """Bytes as they are once the device is done; OSError (EFAULT) if they are gone."""
        if self.device is None:
            if not self.foreign:
                return ctypes.string_at(self.address + start, nbytes)
            copied = bytearray(nbytes)
            copy_foreign(copied, self.address + start, nbytes, False)
            return bytes(copied)
        host = self.device[start : start + nbytes].cpu()
        return ctypes.string_at(host.data_ptr(), nbytes)


# Takes a tuple of all fields: half as expensive as a call with them.
_new_memory = functools.partial(tuple.__new__, Memory)


def source(tensor: Data) -> Memory:
    """The memory to write to a file: the tensor's own if it is contiguous, else a copy.

    Raises:
        TypeError: Neither a tensor nor a buffer, or one without plain memory (sparse, meta, a
            wrapper subclass; objects).
        ValueError: A buffer is not contiguous.
    """
    if not isinstance(tensor, torch.Tensor):
        return _in_place(_over_buffer(tensor, writable=False), None)
    if not _is_plain(tensor):
        _check(tensor)
        _check_access(tensor, writing=False)
        tensor = _copyable(tensor.detach()).resolve_conj().resolve_neg().contiguous().cpu()
    return _in_place(tensor, None)


def destination(tensor: Data) -> Memory:
    """The memory to read into, with autograd's rules for an in-place change (`Tensor.copy_`).

    Raises as `source`, TypeError if a buffer is read-only, and RuntimeError as `copy_` would: for a
    leaf that requires grad outside `torch.no_grad`, an inference tensor outside
    `torch.inference_mode`.
    """
    if not isinstance(tensor, torch.Tensor):
        return _in_place(_over_buffer(tensor, writable=True), None)
    if _is_plain(tensor) and not tensor.requires_grad and not tensor.is_inference():
        return _in_place(tensor, tensor)
    _check(tensor)
    _check_writable(tensor)
    grad = torch.is_grad_enabled()
    if _is_plain(tensor) and (tensor.is_inference() or not grad):
        return _in_place(tensor, tensor)
    staging, copy_back = _staged(tensor, _CPU)
    return Memory(
        staging.data_ptr(),
        _nbytes(staging),
        staging.untyped_storage(),
        copy_back,
        held=holds.hold(tensor.untyped_storage()),
    )


def _over_buffer(given: Buffer, writable: bool) -> torch.Tensor:
    """The bytes of an object with the buffer protocol, as a tensor that holds its export."""
    try:
        view = memoryview(given)
    except TypeError:
        raise TypeError(
            "expected a torch.Tensor, or an object with the buffer protocol (a numpy array, a "
            f"bytearray, a memoryview), not {type(given).__name__}"
        ) from None
    except ValueError as refused:  # numpy's, of dtypes that the protocol has no letter for
        raise TypeError(f"{refused}: pass array.view(numpy.uint8), the same memory") from refused
    kind = type(given).__name__
    if "O" in view.format:
        raise TypeError(f"{an(kind)} of Python objects holds addresses, not data: pickle it")
    if writable and view.readonly:
        raise TypeError(f"cannot read into {an(kind)}: its memory is read-only")
    if not view.c_contiguous:
        raise ValueError(
            f"{an(kind)} of shape {view.shape} and strides {view.strides} is not contiguous: "
            "numpy.ascontiguousarray copies it"
        )
    if not view.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    # A cffi buffer counts as writable whatever it lies over: torch warns of those that are not.
    return torch.frombuffer(ffi.buffer(ffi.from_buffer(view)), dtype=torch.uint8)


def _in_place(tensor: torch.Tensor, changed: torch.Tensor | None) -> Memory:
    """A contiguous CPU tensor's own memory."""
    storage = tensor.untyped_storage()
    held = holds.hold(storage)
    address = tensor.data_ptr()
    nbytes = _nbytes(tensor) if tensor.is_quantized else tensor.nbytes
    foreign = held is None and _is_foreign(storage, address, nbytes)
    # Not by Memory(): its __new__ is a function of Python's, as long as all that is done here.
    return _new(Memory, (address, nbytes, storage, None, None, None, changed, foreign, held))


def in_place(tensors: Sequence[Data], reading: bool) -> tuple[list[Memory | None], Any]:
    """The memory of each tensor that is used where it lies, else None; and one hold for all."""
    # For thousands of tensors: no call that can be spared. Checks that are left out for a plain
    # tensor are not needed: torch reports the bytes of all but quantized ones right.
    found: list[Memory | None] = [None] * len(tensors)
    plain: list[int] = []
    storages: dict[int, torch.UntypedStorage] = {}
    for item, tensor in enumerate(tensors):
        if (
            isinstance(tensor, torch.Tensor)
            and _is_plain(tensor)
            and not devices.is_device(tensor)
            and not (
                tensor.is_inference() or tensor.is_quantized or (reading and tensor.requires_grad)
            )
        ):
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage
            plain.append(item)
            found[item] = _new_memory(
                (
                    tensor.data_ptr(),
                    tensor.nbytes,
                    storage,
                    None,
                    None,
                    None,
                    tensor if reading else None,
                    False,
                    None,
                )
            )
    held, not_held = holds.hold_all(list(storages.values()))
    if not_held:
        known = list(storages)
        others = {known[i] for i in not_held}
        for i in plain:
            memory = found[i]
            assert memory is not None
            if memory.keep._cdata in others:
                foreign = _is_foreign(memory.keep, memory.address, memory.nbytes)
                found[i] = memory._replace(foreign=foreign)
    return found, held


def _is_foreign(storage: torch.UntypedStorage, address: int, nbytes: int) -> bool:
    """Whether neither torch nor nvmeio allocated the memory, for one that is not held."""
    if storage.resizable():  # by torch's allocator, in a torch whose storages cannot be held
        return False
    # Short memory of nvmeio's is not looked up: the kernel copies that as fast.
    return nbytes < LOOKED_UP_BYTES or not mappings.owns(address, nbytes)


def device_source(tensor: torch.Tensor, copier: Copier) -> Memory:
    """The device memory to write to a file: the tensor's own if it is contiguous, else a copy.

    It may be read after what the current stream was asked so far, the copy included. Raises
    TypeError if it has no plain memory (sparse, a wrapper subclass).
    """
    _check(tensor)
    if not _is_dense(tensor):
        tensor = _copyable(tensor.detach()).resolve_conj().resolve_neg().contiguous()
    return _on_device(tensor, copier, held=holds.hold(tensor.untyped_storage()))


def device_destination(tensor: torch.Tensor, copier: Copier) -> Memory:
    """The device memory to read into, with autograd's rules as for `destination`.

    A tensor that is not contiguous is read into a contiguous one on the same device, and copied
    from there; the copy is over before the operation is.
    """
    _check(tensor)
    _check_writable(tensor)
    if _is_dense(tensor) and (
        not tensor.requires_grad or tensor.is_inference() or not torch.is_grad_enabled()
    ):
        return _on_device(tensor, copier, changed=tensor, held=holds.hold(tensor.untyped_storage()))
    staging, copy_back = _staged(tensor, tensor.device)
    device = tensor.device
    return _on_device(
        staging,
        copier,
        lambda: copier.finish(device, copy_back),
        held=holds.hold(tensor.untyped_storage()),
    )


def _on_device(
    tensor: torch.Tensor,
    copier: Copier,
    copy_back: Callable[[], None] | None = None,
    changed: torch.Tensor | None = None,
    held: Any = None,
) -> Memory:
    # Copied to and from in threads that know nothing of the caller's inference mode: there, an
    # alias made in that mode could not be written to.
    with _inference_mode(False):
        as_bytes = _as_bytes(tensor)
    return Memory(
        tensor.data_ptr(),
        as_bytes.numel(),
        tensor.untyped_storage(),
        copy_back,
        as_bytes,
        copier.now(tensor.device),
        changed,
        held=held,
    )


def _staged(tensor: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, Callable[[], None]]:
    """Contiguous memory to read into in a tensor's place, and the step that copies it there."""
    inference = tensor.is_inference()
    storage = tensor.untyped_storage()
    # An alias keeps its storage, whatever the tensor is given meanwhile. Only where autograd is to
    # record the copy it has to go into the tensor itself.
    recorded = tensor.requires_grad and torch.is_grad_enabled()
    target = tensor if recorded else _copyable(tensor.detach())
    staging = torch.empty_like(
        target.detach(), device=device, memory_format=torch.contiguous_format
    )
    staging = staging.resolve_conj().resolve_neg()

    def copy_back() -> None:
        if recorded and tensor.untyped_storage()._cdata != storage._cdata:
            raise RuntimeError(
                "the tensor was given another storage while it was read into, so the data was "
                "dropped"
            )
        _check_access(target, writing=True)
        # Outside of inference mode grad is enabled: what is not to be recorded is detached.
        with _inference_mode(inference):
            target.copy_(staging)

    return staging, copy_back


def _check_access(tensor: torch.Tensor, writing: bool) -> None:
    """Raise OSError (EFAULT) if foreign CPU memory is read-only, or its file was cut short."""
    if tensor.device.type != "cpu":
        return
    storage = tensor.untyped_storage()
    held = holds.hold(storage)
    known = holds.is_torchs(storage, held)
    holds.end(held)
    if not known and not mappings.accessible(*mappings.span(tensor), writing):
        what = "written to" if writing else "read"
        raise OSError(errno.EFAULT, f"the tensor's memory cannot be {what}")


def _check_writable(tensor: torch.Tensor) -> None:
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            "cannot read into an inference tensor outside torch.inference_mode(): "
            "enter the mode, or read into tensor.clone()"
        )
    if tensor.requires_grad and torch.is_grad_enabled() and tensor.is_leaf:
        raise RuntimeError(
            "cannot read into a leaf tensor that requires grad: "
            "wrap the call in torch.no_grad(), or read into tensor.detach()"
        )


def cast_to_byte_tensor(
    tensor: torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor, ...],
) -> Any:
    """Zero-copy aliases as bytes.

    Args:
        tensor: A contiguous tensor of any shape and dtype, on CPU or CUDA; or a list of them.

    Returns:
        A 1-D uint8 tensor of `tensor.nbytes` elements that shares the memory; for a list, a list.

    Raises:
        ValueError: A tensor is not contiguous (or lazily conjugated), so no alias can exist.
        TypeError: Not a tensor, or one without plain memory.

    Cost: no copy, no allocation of data.
    """
    if isinstance(tensor, (list, tuple)):
        return [cast_to_byte_tensor(each) for each in tensor]
    _check(tensor)
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not "
            "contiguous and has no byte alias; call .contiguous() first, which copies"
        )
    return _as_bytes(tensor)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    start = tensor.storage_offset() * tensor.element_size()
    alias = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return alias.set_(tensor.untyped_storage(), start, (_nbytes(tensor),), (1,))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor | Callable[[int, int], torch.Tensor]:
    """A tensor's bytes, to be read once: where they lie, or by parts of a copy (`_Copied`)."""
    return cast_to_byte_tensor(tensor) if _is_dense(tensor) else _Copied(tensor).part


class _Copied:
    """The bytes of a tensor that is not contiguous: copied when the first are asked for.

    The copy is let go with the last of them, so that few exist at a time.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = _copyable(tensor)
        self._copy: torch.Tensor | None = None

    def part(self, offset: int, nbytes: int) -> torch.Tensor:
        """Bytes [offset, offset + nbytes); asked for in order, once."""
        copy = self._copy
        if copy is None:
            dense = self._tensor.resolve_conj().resolve_neg().contiguous()
            copy = self._copy = cast_to_byte_tensor(dense)
        if offset + nbytes == copy.nbytes:
            self._copy = None  # parts in flight hold it
        return copy[offset : offset + nbytes]


def aligned_as(offset: int, nbytes: int) -> memoryview:
    """New memory, aligned for 64 bytes where those of a file are: torch's kernels look at that."""
    skip = offset % 64
    room = torch.empty(skip + nbytes, dtype=torch.uint8, device="cpu")
    return memory_at(room.data_ptr() + skip, nbytes, keep=room)


def touch(tensor: torch.Tensor) -> None:
    """Tell autograd that the tensor was changed in place, as `copy_` does.

    A backward pass that had saved the tensor then raises instead of computing with other bytes.
    """
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in _PLAIN_TYPES and tensor.is_cpu and _is_dense(tensor)


def is_simple(tensor: Any, reading: bool) -> TypeGuard[torch.Tensor]:
    """Whether its memory can be moved as it lies, without asking torch for anything."""
    # The same as above with fewer calls, each of which takes 0.1 us; for the most common ones.
    return (
        type(tensor) in _PLAIN_TYPES
        and tensor.is_cpu
        and tensor.layout is _STRIDED
        and tensor.is_contiguous()
        and ((dtype := tensor.dtype) in _PLAIN_DTYPES or (dtype in _FLOATS and not tensor.is_neg()))
        and not (reading and (tensor.requires_grad or tensor.is_inference()))
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    # Looking for a bit lets go of the GIL.
    plain = tensor.layout is _STRIDED and tensor.is_contiguous()
    return plain and (tensor.dtype in _PLAIN_DTYPES or not (tensor.is_conj() or tensor.is_neg()))


def _copyable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, as bytes where its elements are bytes: torch cannot copy int1 to uint7."""
    if tensor.element_size() > 1 or tensor.is_quantized:
        return tensor
    return tensor.view(torch.uint8)


def _nbytes(tensor: torch.Tensor) -> int:
    nbytes: int = tensor.nbytes
    if tensor.is_quantized:  # quint4x2 and quint2x4 pack several elements into a byte
        start = tensor.storage_offset() * tensor.element_size()
        nbytes = min(nbytes, int(tensor.untyped_storage().nbytes()) - int(start))
    return nbytes


def extent(tensor: torch.Tensor) -> int:
    """Elements from a tensor's first to its last, both included."""
    if not tensor.numel():
        return 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * step for size, step in pairs)


def check_tensor(tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"expected a torch.Tensor, not {type(tensor).__name__}")


def _check(tensor: torch.Tensor) -> None:
    check_tensor(tensor)
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"a {tensor.layout} tensor has no single memory; transfer its indices() and values()"
        )
    if tensor.is_meta:
        raise TypeError(
            "a meta tensor has no memory; make one with torch.empty_like(tensor, device='cpu')"
        )
    if is_wrapper_subclass(tensor):
        raise TypeError(
            f"{type(tensor).__name__} wraps other tensors and has no memory of its own; "
            "transfer the inner tensors (for a DTensor, its to_local())"
        )
