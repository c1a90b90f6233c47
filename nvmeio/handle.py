"""`AioHandle`: tensors to and from files, awaited."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from nvmeio import _checks, engines, files
from nvmeio import tuned as _tuned
from nvmeio._core import batches
from nvmeio._core.batches import BatchOffsets, FileLike, Files
from nvmeio._core.core import Core, Cores, ring_core
from nvmeio._core.handle_settings import MOST as MOST
from nvmeio._core.handle_settings import DeepSpeedWords as DeepSpeedWords
from nvmeio._core.handle_settings import HandleSettings, checked_options
from nvmeio._core.handle_settings import parallelism as parallelism
from nvmeio._core.records import NAMES, ROWS_NAMES
from nvmeio._core.short_transfers import ShortTransfers
from nvmeio._files.descriptors import Descriptors
from nvmeio._memory import devices
from nvmeio._memory import tensors as tensors_module
from nvmeio._memory.tensors import Data
from nvmeio._threads.closing import ClosingWork, on_error
from nvmeio._threads.interruptible import run_interruptible
from nvmeio.bound_file import BoundFile
from nvmeio.engines import device_ring, transfers
from nvmeio.engines.base import Engine, Opcode, Options, end
from nvmeio.engines.transfers import FileOffsets, row_places
from nvmeio.errors import transfer_error
from nvmeio.operation import Operation

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AioHandle(HandleSettings, ClosingWork):
    """Moves tensors between memory and files, through Linux AIO and O_DIRECT.

    Every transfer is an `Operation` that begins when it is called; await it beside compute, or use
    it as a future. Any CPU tensor works: any size, dtype, address, file offset, contiguous or not
    (others are staged through one contiguous CPU copy). CUDA tensors work as well, through a ring
    of page-locked chunks that keeps the drive and PCIe busy at once. They are ordered with the
    stream that is current at the call: no synchronisation before a write, none after the await of
    a read. A handle may be used from several threads and event loops at once.

    Args:
        block_size: Bytes per kernel request; a positive multiple of 4096, at most 1 GiB.
        queue_depth: Blocks that a lane keeps in the kernel at most.
        single_submit: Hand blocks to the kernel one system call each, instead of in batches. Like
            all switches a bool, or "true" or "false" as tuners print it.
        overlap_events: Refill the queue as blocks complete; False refills when it has run empty.
        intra_op_parallelism: Lanes: native threads with a queue each. Large transfers are split
            over them, small ones take turns. DeepSpeed's names for it, num_threads and
            thread_count, are taken too: ``AioHandle(**config["aio"])``.
        engine: "auto" (Linux AIO, or "threads" if the kernel has no AIO, or none left, which is
            warned of once), "libaio", "threads", or an engine object, e.g.
            `nvmeio.testing.FakeEngine`.
        ring_bytes: Page-locked host memory that CUDA tensors go through, in bytes; 32 KiB or
            more. Taken at the first such transfer, and kept.

    Raises:
        BackendUnavailableError: The engine cannot work here ("libaio" without AIO events left, for
            one).
        AlignmentError: `block_size` is not a multiple of 4096.
        ValueError: Another parameter is out of range.

    Cost: one AIO context and one parked thread a lane. Transfers whose memory or offset is not
    aligned, and those of 1 MiB and more whose memory is not nvmeio's own, use up to 112 MiB (or 4
    blocks) of bounce memory a lane, never more than ``queue_depth * block_size``.

    Examples:
        >>> async with nvmeio.AioHandle() as handle:
        ...     await handle.async_pwrite(tensor, "weights.bin")
        ...     await handle.async_pread(tensor, "weights.bin")
    """

    def __init__(
        self,
        block_size: int | str = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = True,
        intra_op_parallelism: int = 1,
        *,
        engine: str | Engine = "auto",
        ring_bytes: int | str = device_ring.DEFAULT_BYTES,
        **words: Unpack[DeepSpeedWords],
    ) -> None:
        given = (block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism)
        self._options = checked_options(type(self), dict(words), *given)
        ring_bytes = _checks.size("ring_bytes", ring_bytes, device_ring.LEAST_BYTES)
        self._copier = devices.new_copier()
        # By a thread: where an interrupt comes meanwhile, `__del__` finds all of it, or nothing.
        run_interruptible(functools.partial(self._begin, engine, ring_bytes))

    def _begin(self, engine: str | Engine, ring_bytes: int) -> None:
        started = engines.start(engine, self._options)
        with on_error(end, started):
            # Its arguments do not refer to self: in a cycle, a dropped handle would live on.
            self._cores = Cores(
                Core(started), self._device_maker(ring_bytes), self._rows_maker(ring_bytes)
            )
        self._short_reads = self._short(Opcode.READ)
        self._short_writes = self._short(Opcode.WRITE)

    def _short(self, opcode: Opcode) -> ShortTransfers | None:
        """The starter of short transfers of CPU tensors; None if the core lacks one."""
        core = self._usual_core
        if core is None or not ShortTransfers.are_cheaper(core):
            return None
        return ShortTransfers(core, opcode, self._options.block_size)

    @classmethod
    def tuned(cls, path: str | os.PathLike[str], *, engine: str | Engine = "auto") -> AioHandle:
        """A handle with the setting that `nvmeio tune --save` stored for a file system.

        Args:
            path: A file or directory on it; need not exist yet.
            engine: As for the constructor.

        Returns:
            A handle with that setting, or with the defaults where none is stored
            (`nvmeio.tuned.find` tells which).

        Raises:
            ValueError: The file of settings is damaged; says which.
            OSError: It cannot be read, or is not a small regular file; says which.
            BackendUnavailableError: As for the constructor.
        """
        found = _tuned.find(path)
        return cls(*(found.aio if found else Options()), engine=engine)

    def _device_maker(self, ring_bytes: int) -> Callable[[Core], Core]:
        return functools.partial(ring_core, self._copier, ring_bytes, self._options)

    def _rows_maker(self, ring_bytes: int) -> Callable[[Core], Core] | None:
        """The maker of the core of rows in device memory; None if the device's core moves them."""
        return None

    def open(self, path: str | os.PathLike[str], mode: str = "r") -> BoundFile:
        """Open a file to be read and written through this handle.

        Args:
            path: Path of a file or block device.
            mode: As for `nvmeio.open`.

        Returns:
            A file for ``await file.pread(tensor, offset)`` and ``pwrite``, and for all that takes a
            `nvmeio.File`. It keeps the handle; close it, or use it in a with statement.

        Raises:
            ClosedError: The handle is closed.
            TransferError: The open failed.
        """
        self._cores.check_open()
        return BoundFile(self, path, mode)

    # --- transfers ------------------------------------------------------------------------

    def async_pread(self, tensor: Data, file: FileLike, file_offset: int = 0) -> Operation:
        """Start reading a file into a tensor.

        Args:
            tensor: Destination; its `nbytes` are read. Contiguous CPU memory is filled in place,
                CUDA memory through the ring. Or anything with a writable, contiguous buffer: a
                numpy array, a bytearray, a memoryview. It is in use until the operation is done.
            file: A path, an open descriptor (which stays open), or an `nvmeio.File`.
            file_offset: First byte in the file; any value >= 0.

        Returns:
            The operation; its value is the number of bytes read, which is `tensor.nbytes`.

        Raises:
            ClosedError: The handle or the file is closed.
            TypeError: `tensor` has no plain memory, or is a read-only buffer, or one of objects; or
                `file` is not one of the above.
            ValueError: `file_offset` is negative, or the span ends beyond 2**63 - 1; a buffer is
                not contiguous.
            RuntimeError: The tensor may not be changed in place (autograd, inference mode).

        The operation fails with `TransferError` if the file cannot be opened or read, and with
        `ShortTransferError` if it ends before the tensor is full. The tensor's contents are then
        unknown; at the end of a file, a contiguous one begins with the bytes that there were.
        Memory that may not be touched (read-only, or of a mapped file that was cut short) gives
        EFAULT. One case ends the process with SIGBUS, as any access to that memory would: the
        tensor is not contiguous and lies over a mapped file that another program cuts short while
        torch copies into it. Read into a contiguous tensor if that can happen.

        Cost: no copy into memory of `nvmeio.empty_aligned` at an aligned offset. One copy through a
        bounce block (`Operation.bounced_bytes`) for the ends of an unaligned span, for misaligned
        memory, and for 1 MiB and more into memory on small pages, which is faster that way.
        Source: io_submit(2).
        """
        short = self._short_reads
        if short is not None and isinstance(file, files.File):
            record = short.start(tensor, file, file_offset)
            if record is not None:
                return Operation(short.core.watchers, record)
        return self._start(Opcode.READ, tensor, file, file_offset)

    def async_pwrite(self, tensor: Data, file: FileLike, file_offset: int = 0) -> Operation:
        """Start writing a tensor into a file.

        A missing file is created. A file is never truncated: bytes outside of
        [file_offset, file_offset + nbytes) stay as they are. The operation is done when the bytes
        are written. Call `fsync` to make them durable.

        Args:
            tensor: Source; leave it unchanged until the operation is done. One that is not
                contiguous is copied before the call returns. Anything with a contiguous buffer
                will do, also bytes.
            file: A path, an open descriptor (which stays open), or an `nvmeio.File`.
            file_offset: First byte in the file; any value >= 0.

        Returns:
            The operation; its value is the number of bytes written, which is `tensor.nbytes`.

        Raises: As `async_pread`. The operation fails with `TransferError`; ENOSPC and the like say
        how many bytes got through. The span's contents in the file are then unknown, and a file
        that was to grow may already have its new size.
        """
        short = self._short_writes
        if short is not None and isinstance(file, files.File):
            record = short.start(tensor, file, file_offset)
            if record is not None:
                return Operation(short.core.watchers, record)
        return self._start(Opcode.WRITE, tensor, file, file_offset)

    def sync_pread(self, tensor: Data, file: FileLike, file_offset: int = 0) -> int:
        """`async_pread`, blocking; the number of bytes read."""
        return self.async_pread(tensor, file, file_offset).result()

    def sync_pwrite(self, tensor: Data, file: FileLike, file_offset: int = 0) -> int:
        """`async_pwrite`, blocking; the number of bytes written."""
        return self.async_pwrite(tensor, file, file_offset).result()

    def pread(
        self,
        tensor: Data,
        file: FileLike,
        validate: bool = False,
        async_op: bool = False,
        file_offset: int = 0,
    ) -> Operation | int:
        """Read, with all choices; the operation if `async_op`, else the number of bytes read.

        Args:
            tensor: As for `async_pread`, like `file` and `file_offset`.
            file: See `tensor`.
            validate: Afterwards read the span once more through the page cache and compare;
                the operation fails with `IntegrityError` at the first difference.
            async_op: Return the operation instead of blocking.
            file_offset: See `tensor`.

        Cost: `validate` reads everything twice.
        """
        operation = self._start(Opcode.READ, tensor, file, file_offset, validate)
        return operation if async_op else operation.result()

    def pwrite(
        self,
        tensor: Data,
        file: FileLike,
        validate: bool = False,
        async_op: bool = False,
        file_offset: int = 0,
    ) -> Operation | int:
        """Write, with all choices; see `pread`."""
        operation = self._start(Opcode.WRITE, tensor, file, file_offset, validate)
        return operation if async_op else operation.result()

    def read(
        self, tensor: Data, file: FileLike, validate: bool = False, file_offset: int = 0
    ) -> int:
        """`pread`, blocking, by DeepSpeed's name; the number of bytes."""
        return self._start(Opcode.READ, tensor, file, file_offset, validate).result()

    def write(
        self, tensor: Data, file: FileLike, validate: bool = False, file_offset: int = 0
    ) -> int:
        """`pwrite`, blocking, by DeepSpeed's name; the number of bytes."""
        return self._start(Opcode.WRITE, tensor, file, file_offset, validate).result()

    def async_gather(
        self,
        out: torch.Tensor,
        file: FileLike,
        *,
        file_offsets: FileOffsets,
        allow_overlap: bool = False,
    ) -> Operation:
        """Start reading many rows of a file, each from a place of its own.

        Args:
            out: Destination, of shape (N, …): row ``out[i]`` is read from ``file_offsets[i]``. Any
                tensor that `async_pread` takes; rows may be 1 byte long or larger than a block.
            file: A path, an open descriptor (which stays open), or an `nvmeio.File`.
            file_offsets: The first byte of each row in the file, as N integers: a tensor (an int64
                one on the CPU is used as it is: leave it unchanged until the operation is done), a
                numpy array, or a sequence. Any order, any alignment; rows may be repeated, and
                overlap by whole elements. For rows by their numbers: `nvmeio.data.Records`.
            allow_overlap: Accept rows that overlap by a part of an element. They are refused
                otherwise, because row numbers given by mistake for byte offsets look like that.

        Returns:
            The operation; its value is the number of bytes read, which is `out.nbytes`.

        Raises: As `async_pread`; ValueError also where there are not as many offsets as rows, or
        rows overlap by a part of an element.

        The operation fails with `RowsError` if some rows cannot be read, or the file ends before
        them; all others are read. The error names the first of them and knows which rows are whole.
        The contents of the failed rows are undefined.

        Cost: one call, and no Python for each row. Rows are sorted (16 bytes of memory for each, 32
        while sorting). Near rows are read together, up to `block_size`, and each sector once
        (`stats.row_blocks`, `stats.row_bytes_saved`). Rows that are aligned in the file and in
        memory, and far from others, are read in place; others are copied. CUDA tensors go through
        the ring, a chunk of rows at a time, sorted within it: `ring_bytes` of host memory, however
        many rows there are.
        """
        return self._start_rows(Opcode.READ, out, file, file_offsets, allow_overlap)

    def async_scatter(
        self, source: torch.Tensor, file: FileLike, *, file_offsets: FileOffsets
    ) -> Operation:
        """Start writing many rows into a file, each at a place of its own.

        Rows that follow one another in the file are written together. Whole pages of them go
        direct, the rest through the page cache. Bytes between rows stay as they are, also if
        somebody else writes there meanwhile.

        Args:
            source: A tensor of shape (N, …): row ``source[i]`` is written at ``file_offsets[i]``.
                Leave it unchanged until the operation is done.
            file: As for `async_pwrite`: a path is created if it is missing, and never truncated.
            file_offsets: As for `async_gather`, but rows may not overlap.

        Returns:
            The operation; its value is the number of bytes written, which is `source.nbytes`.

        Raises: As `async_gather`. The operation fails with ValueError, before anything is written,
        if two rows overlap, and with `RowsError` if some rows cannot be written; all others are.

        Cost: as `async_gather`. A row that is not a whole page costs a write(2) of its own, and a
        read of its page if the page cache does not hold it.
        """
        return self._start_rows(Opcode.WRITE, source, file, file_offsets)

    def sync_gather(
        self,
        out: torch.Tensor,
        file: FileLike,
        *,
        file_offsets: FileOffsets,
        allow_overlap: bool = False,
    ) -> int:
        """`async_gather`, blocking; the number of bytes read."""
        return self.async_gather(
            out, file, file_offsets=file_offsets, allow_overlap=allow_overlap
        ).result()

    def sync_scatter(
        self, source: torch.Tensor, file: FileLike, *, file_offsets: FileOffsets
    ) -> int:
        """`async_scatter`, blocking; the number of bytes written."""
        return self.async_scatter(source, file, file_offsets=file_offsets).result()

    def async_pread_batch(
        self, tensors: Sequence[Data], files: Files, file_offsets: BatchOffsets = None
    ) -> Operation:
        """Start reading many tensors of any sizes, from one file or many, as one operation.

        Args:
            tensors: A list of what `async_pread` takes; all on CUDA devices, or none.
            files: As many files, or one for all. The same one may be named again.
            file_offsets: The first byte of each tensor in its file: as many integers (a
                tensor, a numpy array, a sequence). None: at the file's first byte, or one behind
                the other if there is one file for all.

        Returns:
            The operation, done when all are; its value is the number of bytes read.

        Raises: As `async_pread`; ValueError also where there are not as many of each.

        The operation fails with `BatchError` if some items cannot be read; all others are read.
        The error describes the first failure, and has all of them.

        Cost: one call into the shim, one completion, and about a third of the Python of as many
        operations. Files given as paths are opened once, and up to 128 at a time (fewer
        where `ulimit -n` is below 1024); the first of them by the call, others in a thread.
        """
        return self._start_batch(Opcode.READ, tensors, files, file_offsets)

    def async_pwrite_batch(
        self, tensors: Sequence[Data], files: Files, file_offsets: BatchOffsets = None
    ) -> Operation:
        """Start writing many tensors of any sizes, to one file or many, as one operation.

        Args: As for `async_pread_batch`. Files are created if missing, and never truncated.

        Returns:
            The operation; its value is the number of bytes written.

        Raises: As `async_pread_batch`; ValueError also if items overlap in one file. If the file
        is given by two names that is not seen, and it is undefined which item remains.
        """
        return self._start_batch(Opcode.WRITE, tensors, files, file_offsets)

    def sync_pread_batch(
        self, tensors: Sequence[Data], files: Files, file_offsets: BatchOffsets = None
    ) -> int:
        """`async_pread_batch`, blocking; the number of bytes read."""
        return self.async_pread_batch(tensors, files, file_offsets).result()

    def sync_pwrite_batch(
        self, tensors: Sequence[Data], files: Files, file_offsets: BatchOffsets = None
    ) -> int:
        """`async_pwrite_batch`, blocking; the number of bytes written."""
        return self.async_pwrite_batch(tensors, files, file_offsets).result()

    def _start_batch(
        self, opcode: Opcode, tensors: Sequence[Data], files: Files, file_offsets: BatchOffsets
    ) -> Operation:
        self._cores.check_open()
        memory_of = functools.partial(self._memory, opcode)
        try:
            found = batches.memories_of(opcode, tensors, memory_of, self._usual_core)
        except OSError as failed:
            raise transfer_error(failed, f"{NAMES[opcode]}_batch", "an item") from failed
        batch = batches.laid_out(opcode, *found[1:], files, file_offsets)
        core = found[0] or self._cores.host
        return Operation(core.watchers, core.start_batch(opcode, batch))

    @property
    def _usual_core(self) -> Core | None:
        return self._cores.host  # CPU tensors go there as they lie

    def _start_rows(
        self,
        opcode: Opcode,
        tensor: torch.Tensor,
        file: FileLike,
        file_offsets: FileOffsets,
        allow_overlap: bool = True,  # of a scatter the engine looks for any
    ) -> Operation:
        self._cores.check_open()
        core, memory = self._rows_memory(opcode, tensor, file)
        try:
            places = row_places(tensor, file_offsets, allow_overlap)
        except BaseException:
            memory.end()
            raise
        offset = 0 if places is None else places.lowest
        return Operation(core.watchers, core.start(opcode, memory, file, offset, None, places))

    def _rows_memory(
        self, opcode: Opcode, tensor: torch.Tensor, file: FileLike
    ) -> tuple[Core, tensors_module.Memory]:
        """The rows' memory, and the core that moves it."""
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"rows lie in a torch.Tensor, not in {type(tensor).__name__}")
        device = devices.is_device(tensor)
        core = self._cores.device_rows if device else self._cores.host
        try:
            return core, self._memory_of(opcode, tensor, device)
        except OSError as failed:
            raise transfer_error(failed, ROWS_NAMES[opcode], str(file)) from failed

    def _start(
        self, opcode: Opcode, tensor: Data, file: FileLike, file_offset: int, validate: bool = False
    ) -> Operation:
        self._cores.check_open()
        try:
            core, memory = self._memory(opcode, tensor)
        except OSError as failed:
            raise transfer_error(failed, NAMES[opcode], str(file)) from failed
        try:
            offset = _checks.file_offset("file_offset", file_offset, memory.nbytes)
            check = transfers.comparison(memory, file, offset) if validate else None
        except BaseException:
            memory.end()
            raise
        return Operation(core.watchers, core.start(opcode, memory, file, offset, check))

    def _memory(self, opcode: Opcode, tensor: Data) -> tuple[Core, tensors_module.Memory]:
        """A tensor's memory, and the core that moves it."""
        if isinstance(tensor, torch.Tensor) and devices.is_device(tensor):
            return self._cores.device, self._memory_of(opcode, tensor, True)
        return self._cores.host, self._memory_of(opcode, tensor, False)

    def _memory_of(self, opcode: Opcode, tensor: Any, device: bool) -> tensors_module.Memory:
        reads = opcode is Opcode.READ
        if device:
            of = tensors_module.device_destination if reads else tensors_module.device_source
            return of(tensor, self._copier)
        return (tensors_module.destination if reads else tensors_module.source)(tensor)

    # --- all operations of the handle -------------------------------------------------------

    def wait(self, timeout: float | None = None) -> int:
        """Block until nothing is in flight.

        Args:
            timeout: Seconds at most; None waits for as long as it takes.

        Returns:
            How many operations have finished since the last `wait` or `drain` (0 if none).

        Raises:
            TransferError: The first failure that nobody has seen yet through `await`, `result` or
                `exception`; the others are in its attribute `others`. Nothing is in flight then.
            concurrent.futures.TimeoutError: Not all done in time; they go on.
        """
        return self._cores.wait_all(timeout)

    async def drain(self) -> int:
        """`wait`, awaited: other tasks run meanwhile. Cancelling it cancels no operation."""
        return await self._cores.drain()

    async def fsync(self, file: FileLike, data_only: bool = False) -> None:
        """Make a file durable: all written bytes, and every write to it started before this call.

        Args:
            file: A path, an open descriptor, or an `nvmeio.File`.
            data_only: Leave out metadata that is not needed to read the data (fdatasync).

        Raises:
            TransferError: The kernel reports that data was lost, or the file cannot be opened.

        A new file's name is durable after an fsync of its directory too (man 2 fsync).
        """
        self._cores.check_open()
        with files.in_use(file, None) as opened:
            await self._cores.writes_to(opened.inode)
            operation = self._sync(data_only, opened)
        await operation

    def sync_fsync(self, file: FileLike, data_only: bool = False) -> None:
        """`fsync`, blocking."""
        self._cores.check_open()
        with files.in_use(file, None) as opened:
            self._cores.wait_for_writes_to(opened.inode)
            operation = self._sync(data_only, opened)
        operation.result()

    def _sync(self, data_only: bool, opened: Descriptors) -> Operation:
        core, opcode = self._cores.host, Opcode.FDATASYNC if data_only else Opcode.FSYNC
        return Operation(core.watchers, core.start_sync(opcode, opened))

    # --- life -------------------------------------------------------------------------------

    def close(self) -> None:
        """Refuse new operations, finish those in flight, release the kernel's resources.

        Raises the first failure that nobody has seen, as `wait` does. It is closed anyway.
        Idempotent. It blocks: use `aclose` in a coroutine.
        """
        self._cores.close()

    async def aclose(self) -> None:
        """`close`, awaited."""
        await self._cores.aclose()

    def __del__(self) -> None:
        cores = getattr(self, "_cores", None)
        if cores is None or cores.released:
            return
        try:
            if cores.in_flight:
                warnings.warn(
                    f"{self!r} was dropped with operations in flight; they are finished in the "
                    "background. Close the handle, or use it in a with statement",
                    ResourceWarning,
                    stacklevel=2,
                    source=self,
                )
        finally:  # warnings may be errors
            cores.abandon()
