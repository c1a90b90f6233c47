"""`GdsHandle`: the same verbs, through cuFile straight into GPU memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from nvmeio import _checks, buffers
from nvmeio._core.core import Core, ring_core
from nvmeio._memory import devices, tensors
from nvmeio._memory.tensors import Data
from nvmeio.engines import transfers
from nvmeio.engines.base import Engine, Opcode, end
from nvmeio.engines.cufile import engine as _cufile
from nvmeio.engines.cufile.driver import DriverSettings
from nvmeio.handle import AioHandle, DeepSpeedWords

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["GdsHandle"]

TASK_BYTES_MOST = 1 << 30


class GdsHandle(AioHandle):
    """Moves CUDA tensors between GPU memory and files through cuFile (GPUDirect Storage).

    It has everything that `AioHandle` has. CUDA tensors go through cuFile, registered or not; CPU
    tensors, and the unaligned head and tail of a write, go as they do there. Transfers are ordered
    with the stream that is current at the call: no synchronisation before a write, none after the
    await of a read.

    Which way the bytes really go depends on the machine: see `mode`. cuFile's compat mode moves
    them through host memory, and `stats` counts them as bounced there.

    Args:
        block_size: As for `AioHandle`: for CPU tensors, like `queue_depth`, `single_submit`,
            `overlap_events` and `engine`.
        queue_depth: See `block_size`.
        single_submit: See `block_size`.
        overlap_events: See `block_size`.
        intra_op_parallelism: Threads that call cuFile, and lanes for CPU tensors.
        engine: See `block_size`.
        task_bytes: The most bytes that one call of cuFile moves; a multiple of 4096. 4 to 16 MiB
            are recommended for cuFile.
        allow_compat: False: where direct transfers are not possible they fail, instead of going
            through host memory.
        cpu_tensors: "aio", or "cufile" to have cuFile move host memory as well (from cuFile 1.16
            on). Then a machine without a GPU will do, and `mode` is "host" there.
        timeout_s: How long one call of cuFile may take before its operation fails with ETIMEDOUT.
        max_direct_io_bytes: cuFile's own limit for one direct transfer, a multiple of 4096; None
            leaves it as it is.

    Raises:
        BackendUnavailableError: cuFile cannot be used here, or would hang; says why, and how to
            fix it. Nothing else is used in its place.
        AlignmentError: `block_size` or `task_bytes` is not a multiple of 4096.
        ValueError: Another parameter is out of range, or another handle has opened cuFile's
            driver, of which there is one a process, with other `allow_compat`, `cpu_tensors` or
            `max_direct_io_bytes`.

    Cost: the first handle of a process opens the driver (0.1 to 0.2 s); an AIO context and a
    parked thread a lane, and a thread for each of `intra_op_parallelism`.

    One H100 has run this class, in compat mode. No GPU has run its DMA: that is tested with the
    real libcufile on host memory. See docs/gds.md.

    Examples:
        >>> async with nvmeio.GdsHandle() as handle:
        ...     weights = handle.new_pinned_device_tensor(1 << 28, torch.bfloat16)
        ...     await handle.async_pread(weights, "weights.bin")
    """

    def __init__(
        self,
        block_size: int | str = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = True,
        intra_op_parallelism: int = 4,
        *,
        engine: str | Engine = "auto",
        task_bytes: int | str = _cufile.TASK_BYTES,
        allow_compat: bool = True,
        cpu_tensors: str = "aio",
        timeout_s: float = _cufile.CALL_LIMIT_S,
        max_direct_io_bytes: int | str | None = None,
        **words: Unpack[DeepSpeedWords],
    ) -> None:
        task_bytes = _checks.size("task_bytes", task_bytes)
        _checks.pages("task_bytes", task_bytes, TASK_BYTES_MOST)
        max_direct_io_bytes = _checks.size("max_direct_io_bytes", max_direct_io_bytes)
        if max_direct_io_bytes is not None:
            _checks.pages("max_direct_io_bytes", max_direct_io_bytes, TASK_BYTES_MOST)
        if cpu_tensors not in ("aio", "cufile"):
            raise ValueError(f"cpu_tensors must be 'aio' or 'cufile', not {cpu_tensors!r}")
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)):
            raise TypeError(f"timeout_s must be a number of seconds, not {timeout_s!r}")
        if not 0 < timeout_s < float("inf"):
            raise ValueError(f"timeout_s must be positive and finite, not {timeout_s}")
        self._host_too = cpu_tensors == "cufile"
        settings = DriverSettings(
            needs_cuda=not self._host_too or torch.cuda.is_available(),
            allow_compat=_checks.switch("allow_compat", allow_compat),
            max_direct_io_bytes=max_direct_io_bytes,
        )
        self._gds = _cufile.CuFileEngine(
            devices.new_copier(), settings, task_bytes, float(timeout_s)
        )
        super().__init__(
            block_size,
            queue_depth,
            single_submit,
            overlap_events,
            intra_op_parallelism,
            engine=engine,
            **words,
        )
        try:
            self._gds.start(self._options)
            try:
                self._cores.make_device()  # now, to be closed with the rest
            except BaseException:
                end(self._gds)
                raise
        except BaseException:
            self._cores.host.close()
            raise

    def _device_maker(self, ring_bytes: int) -> Callable[[Core], Core]:
        return functools.partial(_cufile_core, self._gds)

    def _rows_maker(self, ring_bytes: int) -> Callable[[Core], Core] | None:
        # cuFile takes a call for each row.
        return functools.partial(ring_core, self._copier, ring_bytes, self._options)

    def _memory(self, opcode: Opcode, tensor: Data) -> tuple[Core, tensors.Memory]:
        core, memory = super()._memory(opcode, tensor)
        return (self._cores.device if self._host_too else core), memory

    @property
    def _usual_core(self) -> Core | None:
        return None if self._host_too else super()._usual_core

    # --- registered memory ------------------------------------------------------------------

    def new_pinned_device_tensor(
        self, num_elem: int, example_tensor_or_dtype: torch.Tensor | torch.dtype
    ) -> torch.Tensor:
        """A 1-D CUDA tensor that is registered with cuFile; its bytes are not defined.

        Views of it are registered with it. Registration pays for buffers that are used again.

        Args:
            num_elem: Number of elements, >= 0.
            example_tensor_or_dtype: A tensor whose dtype is taken (and whose device, if that is a
                CUDA device; else it is the current one), or the dtype.

        Returns:
            The tensor; in mode "host", one in host memory that is aligned for direct I/O.

        Raises:
            CuFileError: cuFile refused the memory (the GPU's BAR1 may be full).
            ValueError: torch's `expandable_segments` are on.
            torch.cuda.OutOfMemoryError: As `torch.empty` does.
        """
        count = _checks.integer("num_elem", num_elem, 0)
        example = example_tensor_or_dtype
        dtype = buffers.dtype_of(example)
        if self.mode == "host":
            whole = buffers.empty_aligned(max(count, 1), dtype=dtype)
        else:
            device = torch.device("cuda")
            if isinstance(example, torch.Tensor) and example.is_cuda:
                device = example.device
            whole = torch.empty(max(count, 1), dtype=dtype, device=device)
        self._register(whole)
        return whole[:count]

    def free_pinned_device_tensor(self, tensor: torch.Tensor) -> None:
        """Unregister a tensor of `new_pinned_device_tensor`; its memory goes with its last view.

        Raises:
            ValueError: It was not made by this handle, is freed already, or is in use.
            CuFileError: cuFile refused; it counts as unregistered.
        """
        self.unpin_device_tensor(tensor)

    def pin_device_tensor(self, tensor: torch.Tensor) -> None:
        """Register a CUDA tensor's memory with cuFile; it is kept alive until `unpin` or `close`.

        Args:
            tensor: Contiguous, on a CUDA device; in mode "host", on the CPU.

        Raises:
            ValueError: It is not contiguous, empty, or part of it is registered already: views of
                a registered tensor need nothing. Or it is in torch's `expandable_segments`.
            TypeError: It is not on a CUDA device.
            CuFileError: cuFile refused the memory.

        Cost: 8 to 9 us for host memory; pins GPU memory in the GPU's BAR1.
        """
        self._check_device(tensor)
        if not tensor.numel():
            raise ValueError("a tensor without elements has no memory to register: leave it out")
        self._register(tensor)

    def unpin_device_tensor(self, tensor: torch.Tensor) -> None:
        """Undo `pin_device_tensor`.

        Args:
            tensor: The tensor, or any view that begins where it begins.

        Raises:
            ValueError: This handle has registered no memory that begins there, or operations are
                in flight in it.
            CuFileError: cuFile refused; it counts as unregistered.
        """
        self._check_device(tensor)
        self._gds.unregister(_start_of(tensor))

    def _register(self, tensor: torch.Tensor) -> None:
        self._cores.check_open()
        as_bytes = tensors.cast_to_byte_tensor(tensor)
        if devices.is_device(tensor) and devices.is_expandable(tensor):
            raise ValueError(
                "torch maps this memory in pieces, of which libraries have registered the first "
                "alone: leave expandable_segments out of PYTORCH_CUDA_ALLOC_CONF "
                "(PYTORCH_ALLOC_CONF), or use nvmeio.AioHandle"
            )
        self._gds.register(_start_of(tensor), as_bytes.numel(), as_bytes)

    def _check_device(self, tensor: torch.Tensor) -> None:
        tensors.check_tensor(tensor)
        if not devices.is_device(tensor) and not (tensor.is_cpu and self._host_too):
            raise TypeError(
                f"a tensor on {tensor.device} is not a CUDA tensor: page-lock CPU tensors with "
                "new_cpu_locked_tensor"
            )

    # --- properties ---------------------------------------------------------------------------

    @property
    def mode(self) -> str:
        """Which way CUDA tensors go on this machine, at best.

        - "gds": DMA between drive and GPU through the nvidia-fs kernel module.
        - "p2p": DMA between drive and GPU through the kernel's own P2PDMA.
        - "compat": no DMA to the GPU: cuFile goes through host memory.
        - "host": there is no GPU: cuFile moves host memory (``cpu_tensors="cufile"``).

        Whether one particular file is on a file system and drive that can do it, only cuFile
        knows: "gds" and "p2p" fall back to compat mode file by file, unless ``allow_compat`` is
        False.
        """
        return self._gds.mode

    @property
    def engine(self) -> str:
        """The engine for CUDA tensors, "cufile"."""
        return self._gds.name

    def get_task_bytes(self) -> int:
        """Bytes that one call of cuFile moves at most."""
        return self._gds.task_bytes

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return (
            f"<nvmeio.GdsHandle mode={self.mode} task_bytes={self.get_task_bytes()} "
            f"threads={self.get_intra_op_parallelism()} {state}, "
            f"{self._cores.in_flight} in flight>"
        )


def _cufile_core(engine: _cufile.CuFileEngine, host: Core) -> Core:
    return Core(engine, transfers.plan_device, below=host)


def _start_of(tensor: torch.Tensor) -> int:
    """A tensor's address; also of one without elements, for which data_ptr() is 0."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    return tensor.untyped_storage().data_ptr() + start
