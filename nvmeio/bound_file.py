"""A file of a handle's: opened once, looked at once, and read and written without naming either."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import Any, Protocol, cast

import torch

from nvmeio._checks import OFFSET_MAX
from nvmeio._core.core import REAP_EVERY, Core
from nvmeio._core.records import Record, make_room
from nvmeio._files.descriptors import Descriptors
from nvmeio._memory import holds
from nvmeio._memory.tensors import LOOKED_UP_BYTES, Data, Memory, is_simple
from nvmeio._pages import PAGE_BYTES
from nvmeio.engines import transfers
from nvmeio.engines.base import Opcode, ShortRequest, Transfer
from nvmeio.engines.transfers import BOUNCE_FROM_BYTES
from nvmeio.errors import TransferError
from nvmeio.files import File
from nvmeio.operation import Operation

_LAST_OFFSET = OFFSET_MAX - BOUNCE_FROM_BYTES  # beyond that, the long way finds the error
_FLAG_OFFSET = holds.FLAG_OFFSET or 0  # where there is none, nothing goes this way
_running_loop = asyncio._get_running_loop


class Handle(Protocol):
    """What is asked of an `AioHandle` here."""

    def async_pread(self, tensor: Data, file: File, file_offset: int = 0) -> Operation:
        """Start reading a file into a tensor."""

    def async_pwrite(self, tensor: Data, file: File, file_offset: int = 0) -> Operation:
        """Start writing a tensor into a file."""

    def get_block_size(self) -> int:
        """Bytes per kernel request."""


class BoundFile(File):
    """A `File` that is read and written through one handle; see `AioHandle.open`.

    It keeps the handle. All that takes a `File` takes it as well, other handles too.
    """

    _elsewhere = (
        "keep its path, make an AioHandle in each process, and call its open there (in a "
        "dataset, on first use or in worker_init_fn)"
    )

    def __init__(
        self, handle: Handle, core: Core | None, path: str | os.PathLike[str], mode: str
    ) -> None:
        """For `AioHandle.open`; `core` moves plain CPU tensors, if any does."""
        super().__init__(path, mode)
        self._handle = handle
        self._core = core
        self._reading = self._way(Opcode.READ)
        self._writing = None if self._read_only else self._way(Opcode.WRITE)

    def _way(self, opcode: Opcode) -> _ShortWay | None:
        core, most = self._core, self._handle.get_block_size()
        return None if core is None else _ShortWay.of(core, opcode, self._descriptors, most)

    def pread(self, tensor: Data, file_offset: int = 0) -> Operation:
        """Start reading into a tensor: `AioHandle.async_pread`, in all but what a short one costs.

        Args:
            tensor: Destination, as there.
            file_offset: First byte in the file; any value >= 0.
        """
        short = _start_short(self._core, self._reading, tensor, file_offset)
        return self._handle.async_pread(tensor, self, file_offset) if short is None else short

    def pwrite(self, tensor: Data, file_offset: int = 0) -> Operation:
        """Start writing a tensor: `AioHandle.async_pwrite`, in all but what a short one costs.

        Args:
            tensor: Source, as there.
            file_offset: First byte in the file; any value >= 0.
        """
        short = _start_short(self._core, self._writing, tensor, file_offset)
        return self._handle.async_pwrite(tensor, self, file_offset) if short is None else short

    def close(self) -> None:
        """As `File.close`."""
        self._reading = self._writing = None
        super().close()


class _ShortWay:
    """What is the same for all short transfers of one file in one direction.

    Attributes:
        opcode: The direction.
        opened: The file.
        alignment: As it was when this was made: the file may turn out to take no direct I/O.
        direct: Whether the kernel may refuse it as direct I/O.
        prepare: Makes the engine's requests.
        reads: Whether it reads.
        most: So many bytes are short.
        most_foreign: The same of memory that torch does not hold.
        mask: Offset and size have none of these bits.
    """

    def __init__(self, engine: Any, opcode: Opcode, opened: Descriptors, most: int) -> None:
        unit, memory_unit = self.alignment = opened.alignment
        self.opcode = opcode
        self.reads = opcode is Opcode.READ
        self.opened = opened
        self.direct = unit > 0
        self.path = opened.path
        self.most = min(most, transfers.BOUNCE_FROM_BYTES - 1)
        self.most_foreign = min(self.most, LOOKED_UP_BYTES - 1)
        # What is written through the page cache beside or instead is another way's.
        self.mask = max(unit, PAGE_BYTES) - 1 if unit and not self.reads else 0
        fd = opened.direct_fd if self.direct else opened.buffered_fd()
        self.prepare = engine.short_place(opcode, fd, self.direct, unit or 1, memory_unit or 1)

    @classmethod
    def of(cls, core: Core, opcode: Opcode, opened: Descriptors, most: int) -> _ShortWay | None:
        """The way, or None if there is none; more than `most` bytes are not short.

        The file is to be kept open for as long as this is used.
        """
        known = holds.FLAG_OFFSET is not None and core.planner is transfers.plan
        if not known or not core.engine.capabilities.short_transfers:
            return None
        return cls(core.engine, opcode, opened, most)


class _ShortRecord(Record):
    """One short transfer of a core; it keeps the storage until the kernel is done."""

    address = nbytes = 0
    holder: ShortRequest | None = None
    is_plain = True

    def __init__(
        self, token: int, way: _ShortWay, file_offset: int, storage: torch.UntypedStorage
    ) -> None:
        self.token = token
        self.opcode = way.opcode
        self.waiters = []
        self.path = way.path
        self.opened = way.opened
        self.file_offset = file_offset
        self.storage: torch.UntypedStorage | None = storage
        self.direct = way.direct

    def goes_on(self, moved: int) -> bool:
        return moved == -errno.EINVAL and self.direct

    def go_on(self) -> tuple[Transfer | list[Transfer] | None, dict[str, int]]:
        """Do it again through the page cache; what was refused still holds the storage."""
        storage, holder = self.storage, self._holder()
        assert storage is not None
        assert holder is not None
        self.holder = holder
        self.memory = Memory(
            self.address, self.nbytes, storage, None, changed=self.changed, foreign=not holder.held
        )
        self.direct = self.is_plain = False  # its end is for `let_go`: the first request's hold
        return super().go_on()

    def _holder(self) -> ShortRequest | None:
        """The request that holds the storage: the first."""
        return self.holder or cast("ShortRequest | None", self.request)

    def uses(self, storage: int) -> bool:
        return self.storage is not None and self.storage._cdata == storage

    def let_go(self) -> TransferError | None:
        holder = self._holder()
        if holder is not None:
            holder.let_go()
        return self.let_go_whole()

    def let_go_whole(self) -> TransferError | None:
        self.storage = self.changed = self.memory = None
        opened = self.opened
        if opened is not None:
            opened.holders.discard(self)  # most of what `let_go` does
            if not opened._users:
                return self._let_go_of_file()
            self.opened = None
        return None

    def _release(self, opened: Descriptors) -> None:
        opened.let_go(self)


make_room(
    _ShortRecord, "token", "opcode", "path", "file_offset", "nbytes", "storage", "direct", "waiters"
)


def _start_short(
    core: Core | None, way: _ShortWay | None, tensor: Data, file_offset: int
) -> Operation | None:
    """Start a short read or write of a tensor's own memory; None if that way is not for it."""
    if (
        way is None
        or core is None
        or type(file_offset) is not int
        or not 0 <= file_offset <= _LAST_OFFSET
        or not is_simple(tensor, way.reads)
    ):
        return None
    live, queues = core.live, core.queues
    if live.refusal or way.alignment is not way.opened.alignment:
        return None
    loop, cq = queues.latest
    if loop is not _running_loop():
        cq = queues.here()
    token, storage = next(live.tokens), tensor.untyped_storage()
    record = _ShortRecord(token, way, file_offset, storage)
    try:
        record.home = cq
        request = way.prepare(cq, token, storage._cdata + _FLAG_OFFSET)
        record.request = request
        # Only now that it is held can nobody change these.
        record.address = address = tensor.data_ptr()
        record.nbytes = nbytes = tensor.nbytes
        most = way.most if request.held else way.most_foreign
        if not 0 < nbytes <= most or (file_offset | nbytes) & way.mask:
            core.withdraw(record)
            return None
        if way.reads:
            record.changed = tensor
        way.opened.hold(record)
        live.records[token] = record  # as `live.add` does it
        if live.refusal:
            live.check_open()
        request.start_at(address, nbytes, file_offset)
    except BaseException:
        try:
            core.withdraw(record)
        except BaseException:  # as in `Core._submit`
            core.withdraw(record)
            raise
        raise
    if not token % REAP_EVERY and cq is queues.default:
        core.reaper.reap(cq, True)
    return Operation(core.watchers, record)
