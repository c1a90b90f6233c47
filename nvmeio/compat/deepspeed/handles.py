"""`aio_handle` and `gds_handle`: the verbs of DeepSpeed's handles, on an `AioHandle`.

Names, parameters and return values are DeepSpeed's; the counting too. An asynchronous transfer is
pending until `wait` has returned it, and a synchronous one waits for all that are pending and
returns their count with its own. `read` and `write` are apart from that: they neither wait for
what is pending nor count.

If DeepSpeed returns -1, aborts the process or reports success for wrong bytes, this raises or
carries out the request; see the table in docs/deepspeed.md.

Source: csrc/aio/py_lib/py_ds_aio.cpp, deepspeed_py_io_handle.cpp and csrc/gds/py_lib/py_ds_gds.cpp
of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from nvmeio import _checks, buffers
from nvmeio._memory import mappings
from nvmeio._memory.tensors import cast_to_byte_tensor as cast_to_byte_tensor
from nvmeio._pages import PAGE_BYTES, round_up
from nvmeio._torch_private import InferenceMode
from nvmeio.errors import BackendUnavailableError, NvmeioError, TransferError
from nvmeio.gds import GdsHandle
from nvmeio.handle import AioHandle, DeepSpeedWords, parallelism
from nvmeio.operation import Operation

if TYPE_CHECKING:
    from typing_extensions import Unpack

FileName = str | bytes | os.PathLike[str] | int

# The alignment of direct I/O that DeepSpeed assumes, and sizes its buffers by; nvmeio itself asks
# the kernel, and also transfers unaligned tensors.
_ALIGNMENT_BYTES = 512

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _async_by_name(method: _Method) -> _Method:
    """Accept the parameter that is called `async` in DeepSpeed, a keyword in Python since 3.7."""

    @functools.wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        if "async" in named:
            named["async_op"] = named.pop("async")
        return method(*arguments, **named)

    return call  # type: ignore[return-value]


class _Handle:
    """The common part of `aio_handle` and `gds_handle`; `_io` moves the bytes."""

    def __init__(
        self,
        block_size: int = 1024 * 1024,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
        **words: Unpack[DeepSpeedWords],
    ) -> None:
        if words:
            intra_op_parallelism = parallelism(type(self), {**words}, intra_op_parallelism)
        self._block_size = block_size
        self._single_submit = _checks.switch("single_submit", single_submit)
        self._overlap_events = _checks.switch("overlap_events", overlap_events)
        self._io = self._opened(
            _whole_pages(block_size),
            queue_depth,
            self._single_submit,
            self._overlap_events,
            intra_op_parallelism,
        )
        self._pending: deque[Operation] = deque()
        self._waiting = threading.Lock()
        self._finished = 0
        self._failures: list[BaseException] = []

    def _opened(self, *settings: Any) -> AioHandle:
        return AioHandle(*settings)

    # --- blocking, apart from the others ------------------------------------------------------

    def read(
        self, buffer: torch.Tensor, filename: FileName, validate: bool, file_offset: int = 0
    ) -> int:
        """Read a file into a tensor, whatever else is pending.

        Args:
            buffer: Destination; its `nbytes` are read.
            filename: A path; an open descriptor will do too.
            validate: Read the span once more through the page cache and compare.
            file_offset: First byte in the file.

        Returns:
            0.

        Raises:
            TransferError: The file cannot be opened or read, or (`ShortTransferError`) ends first.
            IntegrityError: `validate` found a difference.
        """
        self._begin("pread", buffer, filename, file_offset, validate).result()
        return 0

    def write(
        self, buffer: torch.Tensor, filename: FileName, validate: bool, file_offset: int = 0
    ) -> int:
        """Write a tensor to a file, whatever else is pending; as `read`. Returns 0."""
        self._begin("pwrite", buffer, filename, file_offset, validate).result()
        return 0

    # --- blocking or not ----------------------------------------------------------------------

    @_async_by_name
    def pread(
        self,
        buffer: torch.Tensor,
        filename: FileName,
        validate: bool,
        async_op: bool,
        file_offset: int = 0,
    ) -> int:
        """Read a file into a tensor, with all choices.

        Args:
            buffer: As for `read`, like `filename`, `validate` and `file_offset`.
            filename: See `buffer`.
            validate: See `buffer`.
            async_op: Return at once. By position or, as in DeepSpeed, by the name `async`:
                ``pread(buffer, filename, False, **{"async": True})``.
            file_offset: See `buffer`.

        Returns:
            0 if it is asynchronous, else as `wait`.

        Raises:
            TransferError: The file cannot be opened. Other failures too if it is synchronous;
                if it is not, `wait` raises them.
        """
        operation = self._begin("pread", buffer, filename, file_offset, validate)
        return self._submitted(operation, async_op)

    @_async_by_name
    def pwrite(
        self,
        buffer: torch.Tensor,
        filename: FileName,
        validate: bool,
        async_op: bool,
        file_offset: int = 0,
    ) -> int:
        """Write a tensor to a file, with all choices; as `pread`."""
        operation = self._begin("pwrite", buffer, filename, file_offset, validate)
        return self._submitted(operation, async_op)

    def sync_pread(self, buffer: torch.Tensor, filename: FileName, file_offset: int = 0) -> int:
        """Read a file into a tensor, and wait for all that is pending; the count, as `wait`."""
        return self._submitted(self._begin("pread", buffer, filename, file_offset), False)

    def sync_pwrite(self, buffer: torch.Tensor, filename: FileName, file_offset: int = 0) -> int:
        """Write a tensor to a file, and wait for all that is pending; the count, as `wait`."""
        return self._submitted(self._begin("pwrite", buffer, filename, file_offset), False)

    def async_pread(self, buffer: torch.Tensor, filename: FileName, file_offset: int = 0) -> int:
        """Begin to read a file into a tensor; 0. Leave the tensor alone until `wait`."""
        return self._submitted(self._begin("pread", buffer, filename, file_offset), True)

    def async_pwrite(
        self,
        buffer: torch.Tensor,
        filename: FileName | None = None,
        file_offset: int = 0,
        *,
        fd: int | None = None,
    ) -> int:
        """Begin to write a tensor to a file; 0. Leave the tensor as it is until `wait`.

        Args:
            buffer: Source.
            filename: A path, which is created if it is missing and never truncated.
            file_offset: First byte in the file.
            fd: An open descriptor instead of `filename` (in its place, or by name). It stays open,
                and may be closed as soon as the call has returned.
        """
        if (filename is None) == (fd is None):
            raise TypeError("async_pwrite takes either a file name or a descriptor (fd)")
        file = filename if fd is None else fd
        assert file is not None
        return self._submitted(self._begin("pwrite", buffer, file, file_offset), True)

    def wait(self) -> int:
        """Wait for everything that is pending.

        Returns:
            How many transfers were; 0 if none.

        Raises:
            TransferError: The first failure among them; the others are in its attribute `others`.
                Nothing is pending then, and the count begins anew.
        """
        with self._waiting:
            while self._pending:
                # It stays in the queue until it is over, for Ctrl-C may end this wait.
                failure = self._pending[0].exception()
                self._pending.popleft()
                self._finished += 1
                if failure is not None:
                    self._failures.append(failure)
            finished, self._finished = self._finished, 0
            failures, self._failures = self._failures, []
        if failures:
            first = failures[0]
            if isinstance(first, NvmeioError):
                first.others = tuple(failures[1:])
            raise first
        return finished

    # --- the steps of a transfer --------------------------------------------------------------

    def _begin(
        self,
        transfer: Literal["pread", "pwrite"],
        buffer: torch.Tensor,
        filename: FileName,
        file_offset: int,
        validate: bool = False,
    ) -> Operation:
        file = os.fsdecode(filename) if isinstance(filename, bytes) else filename
        mode: Any = contextlib.nullcontext()
        # DeepSpeed writes to the memory itself, whatever autograd or inference mode make of it.
        if transfer == "pread" and isinstance(buffer, torch.Tensor):
            buffer = buffer.detach()
            if buffer.is_inference() and not torch.is_inference_mode_enabled():
                mode = InferenceMode(True)  # of C alone: see `_memory.tensors`
        with mode:
            begun = getattr(self._io, transfer)(buffer, file, bool(validate), True, file_offset)
        assert isinstance(begun, Operation)
        return begun

    def _submitted(self, operation: Operation, async_op: bool) -> int:
        """Count a transfer as pending; what the call that began it returns."""
        if operation.done():
            failure = operation.exception()
            # Only what never began: when a transfer fails is chance, where must not be.
            if isinstance(failure, TransferError) and failure.operation == "open":
                raise failure
        self._pending.append(operation)
        return 0 if async_op else self.wait()

    # --- memory -------------------------------------------------------------------------------

    def new_cpu_locked_tensor(
        self, num_elem: int, example_tenosr: torch.Tensor | torch.dtype
    ) -> torch.Tensor:
        """A 1-D page-locked CPU tensor on huge pages; its bytes are not defined.

        Args:
            num_elem: Number of elements, >= 0.
            example_tenosr: A tensor whose dtype is taken. (Spelled as DeepSpeed spells it.)

        Raises:
            OSError: The limit for locked memory is reached; says which, and how to raise it.
        """
        return buffers.new_locked(num_elem, example_tenosr)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Unlock; False where the tensor is not (any more) one of `new_cpu_locked_tensor`.

        The tensor stays valid: its memory goes with the last view of it.
        """
        return free(tensor)

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Whether all of it is page-locked, by any handle or by torch; true for views as well."""
        return buffers.is_pinned(buffer)

    # --- settings -----------------------------------------------------------------------------

    def get_block_size(self) -> int:
        """Bytes per kernel request, as asked for."""
        return self._block_size

    def get_queue_depth(self) -> int:
        """Requests that a thread keeps in the kernel at most."""
        return self._io.get_queue_depth()

    def get_single_submit(self) -> bool:
        """Whether requests are submitted one at a time."""
        return self._single_submit

    def get_overlap_events(self) -> bool:
        """Whether the queue is refilled as requests complete."""
        return self._overlap_events

    def get_intra_op_parallelism(self) -> int:
        """Number of native threads that share a transfer."""
        return self._io.get_intra_op_parallelism()

    def get_alignment(self) -> int:
        """512 times the parallelism: what DeepSpeed's own code rounds sizes to.

        Nothing here requires it: any size, address and offset is transferred.
        """
        return _ALIGNMENT_BYTES * self.get_intra_op_parallelism()

    @property
    def nvmeio(self) -> AioHandle:
        """The handle behind this one, for its statistics and for `await`."""
        return self._io

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on {self._io!r}, {len(self._pending)} pending>"


class aio_handle(_Handle):
    """DeepSpeed's `aio_handle`: tensors to and from files, with `wait` for what is asynchronous.

    Args:
        block_size: Bytes per kernel request. The kernel is asked for whole multiples of 4096.
        queue_depth: Requests that a thread keeps in the kernel at most.
        single_submit: Submit requests one at a time instead of in batches.
        overlap_events: Refill the queue as requests complete; False refills when it has run empty.
        intra_op_parallelism: Native threads that share a transfer.

    Raises:
        BackendUnavailableError: The kernel gives no more AIO events.
        ValueError, TypeError: A parameter is out of range, or of the wrong type.
    """


class gds_handle(_Handle):
    """DeepSpeed's `gds_handle`: CUDA tensors to and from files through cuFile.

    Parameters as for `aio_handle`; `intra_op_parallelism` is also the number of threads that call
    cuFile. CPU tensors go as they do there.

    Raises:
        BackendUnavailableError: cuFile cannot be had; says why, and what to use instead.
    """

    _io: GdsHandle

    def _opened(self, *settings: Any) -> GdsHandle:
        try:
            return GdsHandle(*settings)
        except BackendUnavailableError as no:
            raise _no_cufile(no) from no

    def new_pinned_device_tensor(self, num_elem: int, example_tenosr: torch.Tensor) -> torch.Tensor:
        """A 1-D CUDA tensor that is registered with cuFile.

        Args:
            num_elem: Number of elements, >= 0.
            example_tenosr: A tensor whose dtype (and CUDA device) is taken.
        """
        return self._io.new_pinned_device_tensor(num_elem, example_tenosr)

    def free_pinned_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Take a tensor of `new_pinned_device_tensor` out of the registration.

        Returns:
            False where it is not registered (any more) by this handle, or transfers in it are
            pending: `wait` for them first.
        """
        return self.unpin_device_tensor(tensor)

    def pin_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Register a CUDA tensor with cuFile; True. False where it is registered already.

        Raises:
            ValueError: It is not contiguous, or empty.
            CuFileError: cuFile refused the memory.
        """
        if not tensor.is_contiguous() or not tensor.numel():
            self._io.pin_device_tensor(tensor)  # says what is wrong
        return _succeeds(self._io.pin_device_tensor, tensor)

    def unpin_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Take a tensor of `pin_device_tensor` out of the registration.

        Returns:
            As `free_pinned_device_tensor`.
        """
        return _succeeds(self._io.unpin_device_tensor, tensor)


def no_cufile() -> BackendUnavailableError | None:
    """Why there can be no `gds_handle` here, and what to use instead; None where there can."""
    try:
        GdsHandle(queue_depth=1, intra_op_parallelism=1).close()
    except BackendUnavailableError as no:
        return _no_cufile(no)
    except ValueError:  # the driver is open, with other settings: it works
        pass
    return None


def _no_cufile(no: BackendUnavailableError) -> BackendUnavailableError:
    return BackendUnavailableError(
        "gds_handle needs cuFile (GPUDirect Storage)",
        attempts=[("cufile", str(no).splitlines()[0]), *no.attempts],
        remedy=f"{no.remedy}. aio_handle moves CUDA tensors too, through host memory; in a "
        'DeepSpeed configuration, "aio": {"use_gds": false}',
    )


def aio_read(
    buffer: torch.Tensor,
    filename: FileName,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Read the beginning of a file into a tensor, on a handle of its own; 0.

    Parameters and errors as for `aio_handle` and its `read`.
    """
    handle = aio_handle(block_size, queue_depth, single_submit, overlap_events)
    with handle.nvmeio:
        return handle.read(buffer, filename, validate)


def aio_write(
    buffer: torch.Tensor,
    filename: FileName,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Write a tensor to the beginning of a file, on a handle of its own; 0.

    Parameters and errors as for `aio_handle` and its `write`.
    """
    handle = aio_handle(block_size, queue_depth, single_submit, overlap_events)
    with handle.nvmeio:
        return handle.write(buffer, filename, validate)


def _whole_pages(block_size: int) -> int:
    """DeepSpeed takes any multiple of 512; nvmeio's blocks are whole pages."""
    if isinstance(block_size, int) and block_size > 0:
        return round_up(block_size, PAGE_BYTES)
    return block_size


def deepspeed_memcpy(dest: torch.Tensor, src: torch.Tensor) -> int:
    """Copy `src` into `dest`, element by element in memory order.

    Args:
        dest: Is filled; any shape.
        src: A tensor of the same dtype, any shape with at least as many elements; the rest is
            ignored.

    Returns:
        0.

    Raises:
        TypeError: The dtypes differ.
        ValueError: `src` has fewer elements than `dest`.
    """
    if dest.dtype != src.dtype:
        raise TypeError(f"cannot copy {src.dtype} into {dest.dtype}: convert it first (src.to)")
    if src.numel() < dest.numel():
        raise ValueError(f"cannot fill {dest.numel()} elements from {src.numel()}: give more")
    # Not within no_grad, which Ctrl-C may leave in force.
    dest.detach().copy_(src.detach().reshape(-1)[: dest.numel()].view(dest.shape))
    return 0


class pin_handle:
    """The source of page-locked memory for DeepSpeed's ``DS_PIN_MEMORY_BACKEND=native``.

    Its tensors are locked but not registered with CUDA, because DeepSpeed registers them itself.
    A second cudaHostRegister of the same memory fails (cudaErrorHostMemoryAlreadyRegistered), and
    the failure would stay behind for the next kernel launch to report.
    """

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """A 1-D page-locked CPU tensor; see `nvmeio.AioHandle.new_cpu_locked_tensor`.

        Args:
            num_elem: Number of elements, >= 0.
            example_tensor: A tensor whose dtype is taken.

        Raises:
            OSError: The limit for locked memory is reached; says which, and how to raise it.
            ValueError: `num_elem` is negative.
        """
        count = _checks.integer("num_elem", num_elem, 0)
        mapping = mappings.Mapping(max(count, 1) * example_tensor.dtype.itemsize)
        mapping.lock()
        mapping.populate()
        return mapping.tensor(0, (count,), example_tensor.dtype)

    def free_cpu_locked_tensor(self, locked_tensor: torch.Tensor) -> bool:
        """Unlock; False where the tensor is not (any more) one of `new_cpu_locked_tensor`."""
        return free(locked_tensor)

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        """`free_cpu_locked_tensor` for the tensor that begins at this address."""
        return mappings.unpin(address)

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Whether all of it is page-locked, by any handle or by torch; true for views as well."""
        return buffers.is_pinned(buffer)


def free(tensor: torch.Tensor) -> bool:
    """Unlock the memory that begins where the tensor does; False where there is none."""
    return _succeeds(buffers.free_pinned, tensor)


def _succeeds(call: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> bool:
    try:
        call(tensor)
    except ValueError:
        return False
    return True
