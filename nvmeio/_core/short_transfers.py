"""Short reads and writes of plain CPU tensors, started with as few calls as possible.

A short transfer is one block at most, of an open `File`, and moves a tensor's own memory.
Alignment, descriptor and the engine's place are the same for all of them in one direction: they
are a `_Way`, which the file keeps. `Core.start` does everything else.
"""

from __future__ import annotations

import asyncio
import errno
from typing import Any, cast

import torch

from nvmeio import files
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

_LAST_OFFSET = OFFSET_MAX - BOUNCE_FROM_BYTES  # beyond that, `Core.start` finds the error
_FLAG_OFFSET = holds.FLAG_OFFSET or 0  # where there is none, nothing goes this way
_running_loop = asyncio._get_running_loop


class _Way:
    """A file prepared for short transfers in one direction through one core.

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

    def __init__(self, engine: Any, opcode: Opcode, most: int, opened: Descriptors) -> None:
        unit, memory_unit = self.alignment = opened.alignment
        self.opcode = opcode
        self.reads = opcode is Opcode.READ
        self.opened = opened
        self.direct = unit > 0
        self.path = opened.path
        self.most = most
        self.most_foreign = min(most, LOOKED_UP_BYTES - 1)
        # Unaligned writes go through the page cache, which `Core.start` does.
        self.mask = max(unit, PAGE_BYTES) - 1 if unit and not self.reads else 0
        fd = opened.direct_fd if self.direct else opened.buffered_fd()
        self.prepare = engine.short_place(opcode, fd, self.direct, unit or 1, memory_unit or 1)


class _ShortRecord(Record):
    """A short transfer of a core; it keeps the storage until the kernel is done."""

    address = nbytes = 0
    holder: ShortRequest | None = None
    is_plain = True

    def __init__(
        self, token: int, way: _Way, file_offset: int, storage: torch.UntypedStorage
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
        """Do it again through the page cache; the refused operation still holds the storage."""
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
            opened.users.discard(self)  # most of what `Descriptors.let_go` does
            if not opened.is_open:
                return self._let_go_of_file()
            self.opened = None
        return None


make_room(
    _ShortRecord, "token", "opcode", "path", "file_offset", "nbytes", "storage", "direct", "waiters"
)


class ShortTransfers:
    """Starts the short transfers of a core in one direction."""

    def __init__(self, core: Core, opcode: Opcode, block_bytes: int) -> None:
        """`core` is one for which `are_cheaper` holds; a block moves at most `block_bytes`."""
        self.core = core
        self._opcode = opcode
        self._reads = opcode is Opcode.READ
        self._most = min(block_bytes, BOUNCE_FROM_BYTES - 1)

    @staticmethod
    def are_cheaper(core: Core) -> bool:
        """Whether a core has cheaper requests for short transfers."""
        known = holds.FLAG_OFFSET is not None and core.planner is transfers.plan
        return known and core.engine.capabilities.short_transfers

    def start(self, tensor: Data, file: File, file_offset: int) -> Record | None:
        """Start a read or write of a tensor's own memory; None if it is not a short one."""
        core, reads = self.core, self._reads
        if core.live.refusal:  # nothing is prepared of an engine that has ended
            return None
        way: _Way | None = file.ways.get(self)
        if way is None or way.alignment is not way.opened.alignment:
            way = self._prepared(file)
        if (
            way is None
            or type(file_offset) is not int
            or not 0 <= file_offset <= _LAST_OFFSET
            or not is_simple(tensor, reads)
        ):
            return None
        nbytes = tensor.nbytes
        if nbytes > way.most_foreign and (
            # Both are checked again once the memory is held. This saves longer ones the detour.
            nbytes > way.most or not tensor.untyped_storage().resizable()
        ):
            return None
        live, queues = core.live, core.queues
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
            if reads:
                record.changed = tensor
            way.opened.hold(record)
            live.records[token] = record  # as `live.add` does it
            if live.refusal:
                live.check_open()
            request.start_at(address, nbytes, file_offset)
        except BaseException:
            core.undo(record)
            raise
        if not token % REAP_EVERY and cq is queues.default:
            core.reaper.reap(cq, True)
        return record

    def _prepared(self, file: File) -> _Way | None:
        """A file's way, made and kept; None where `Core.start` says why it cannot be moved."""
        try:
            with files.in_use(file, not self._reads) as opened:
                way = _Way(self.core.engine, self._opcode, self._most, opened)
        except OSError:
            return None
        known = {others: known for others, known in file.ways.items() if not others.core.released}
        file.ways = {**known, self: way}
        return way
