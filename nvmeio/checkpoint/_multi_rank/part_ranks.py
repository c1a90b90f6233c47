"""Ranks that load a checkpoint whose parts lie on drives that they do not share.

    all: who has which part?         messages through the store
    rank 0: directory and pickle     asks for ranges of bytes; who has them sends them to all
    all: the storages                _distributed.shared_spans, each byte read by a rank that has it

All but the storages is put into an image of the archive in memory, with holes where storages are,
so that all else sees a file: torch's own refusals of what weights_only forbids, too. A process
alone has all parts, or there is nothing to load.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from nvmeio._distributed.exchange import NoExchange
from nvmeio._distributed.rank_store import RankStore
from nvmeio._distributed.shared_spans import RankSpan
from nvmeio._files.descriptors import open_error
from nvmeio._formats.sniff import open_checkpoint
from nvmeio._formats.torch_archives import torch_zip
from nvmeio._formats.torch_archives.torch_file import is_asked_for
from nvmeio._formats.torch_archives.torch_part import HEAD_BYTES, PartHead, head_of
from nvmeio._io.inflight import InFlight
from nvmeio._io.spans import read_scattered
from nvmeio._threads.closing import on_error
from nvmeio.checkpoint._multi_rank.drives import OwnDrives, Save, Survey
from nvmeio.checkpoint._multi_rank.loading_ranks import LoadingRanks
from nvmeio.errors import IntegrityError, TransferError
from nvmeio.files import File, read_buffered
from nvmeio.handle import AioHandle

# More ranges than this are read through the handle, together.
_FEW = 16


# Rank 0 waits for others no longer than this, until they have read its messages.
PARTING_S = 5.0


class OpenPart(NamedTuple):
    head: PartHead
    file: File


class Cut(NamedTuple):
    """Bytes of the archive, from `offset` on, that lie in one part; `number` is their range's."""

    number: int
    offset: int
    nbytes: int
    source: RankSpan

    @property
    def file(self) -> File:
        assert self.source.file is not None
        return self.source.file

    @property
    def file_offset(self) -> int:
        return self.offset + self.source.shift


class PartRanks(LoadingRanks):
    """The ranks of one load from drives of their own; arguments as for `LoadingRanks`."""

    def survey(self, drives: OwnDrives, **wanted: Any) -> Survey:
        """The parts that all ranks have; ValueError if the ranks want different things."""
        told = self._agree("which", drives.has() | {"wanted": wanted})
        self.is_over = True  # from here to `resume`, all ranks find the same
        if self._messages.rank:
            with contextlib.suppress(TransferError):  # it did not wait for us
                self._messages.put("there", b"")
        else:  # it may have the store, and end its process next
            self._messages.wait_for_others("there", PARTING_S)
        for rank, each in enumerate(told):
            if each["wanted"] != told[0]["wanted"]:
                raise ValueError(
                    f"{self._store.path}: rank 0 restores {told[0]['wanted']}, rank {rank} "
                    f"{each['wanted']}: all ranks call it in the same order, with the same step"
                )
        return Survey(told)

    def resume(self) -> None:
        """Wait for each other again, because all ranks have found that they can go on."""
        self.is_over = self.is_alone

    def _agree(self, name: str, mine: dict[str, Any]) -> list[dict[str, Any]]:
        told = self._messages.agree(name, mine)
        if not self.is_alone:
            self._forget_last()
        return told

    def connect(self, mine: Sequence[OpenPart], path: str, nothing: bool) -> int:
        """See that all parts are there, and who reads which; returns the size of the archive.

        `mine` are this rank's parts of one archive; it wants no bytes if `nothing`. Raises
        IntegrityError if parts contradict each other, ValueError if some ranks want no bytes and
        others do.
        """
        told = self._agree("file", {"heads": [part.head for part in mine], "nothing": nothing})
        self.is_over = True
        if any(each["nothing"] != told[0]["nothing"] for each in told):
            raise ValueError(
                f"{path}: some ranks want all of it on the meta device, and others do not: ranks "
                "that load together all read it, or none"
            )
        self._sources = _sources_of(told, mine, self._messages.rank, path)
        nbytes = PartHead(*next(each["heads"][0] for each in told if each["heads"])).nbytes
        self.resume()
        self._exchange = NoExchange() if self.is_alone else self._messages.exchange(self._stop)
        return nbytes

    def fill(self, image: Image, get_handle: Callable[[], AioHandle]) -> None:
        """Put all but the storages into the image of the archive, on all ranks."""
        exchange = self._exchange
        assert exchange is not None

        def fetch(wanted: Sequence[tuple[int, int]]) -> list[bytes]:
            if exchange.rank == 0:
                exchange.share(json.dumps(wanted).encode(), 0)
            found = self._fetched(wanted, get_handle)
            for (offset, _), data in zip(wanted, found, strict=True):
                image.put(offset, data)
            return found

        if exchange.rank == 0:
            entries = torch_zip.parse(fetch, image.size(), image.path).records().items()
            fetch([(e.offset, e.nbytes) for name, e in entries if is_asked_for(name, e.nbytes)])
            exchange.share(b"[]", 0)
            return
        while wanted := json.loads(exchange.share(None, 0)):
            fetch([(offset, nbytes) for offset, nbytes in wanted])

    def _fetched(
        self, wanted: Sequence[tuple[int, int]], get_handle: Callable[[], AioHandle]
    ) -> list[bytes]:
        """Ranges of the archive, from the ranks that have them."""
        exchange = self._exchange
        assert exchange is not None
        starts = [source.start for source in self._sources]
        cuts: list[Cut] = []
        for number, (offset, nbytes) in enumerate(wanted):
            end = offset + nbytes
            while offset < end:
                source = self._sources[bisect_right(starts, offset) - 1]
                stop = min(end, source.end)
                cuts.append(Cut(number, offset, stop - offset, source))
                offset = stop
        parts: dict[int, bytes] = {}
        with exchange.agreeing():
            mine = [cut for cut in cuts if cut.source.rank == exchange.rank]
            parts[exchange.rank] = b"".join(_read(mine, get_handle))
        for rank in sorted({cut.source.rank for cut in cuts}):
            data = parts[rank] if rank == exchange.rank else None
            parts[rank] = exchange.share(data, rank)
        found = [bytearray() for _ in wanted]
        at = dict.fromkeys(parts, 0)
        for cut in cuts:
            rank = cut.source.rank
            found[cut.number] += parts[rank][at[rank] : at[rank] + cut.nbytes]
            at[rank] += cut.nbytes
        return [bytes(each) for each in found]


def _read(cuts: Sequence[Cut], get_handle: Callable[[], AioHandle]) -> list[bytes]:
    """Read this rank's parts, in the order of the cuts."""
    if len(cuts) <= _FEW:
        return [read_buffered(cut.file, cut.file_offset, cut.nbytes) for cut in cuts]
    found: dict[Cut, bytes] = {}
    for source in dict.fromkeys(cut.source for cut in cuts):
        here = [cut for cut in cuts if cut.source == source]
        places = [(cut.file_offset, cut.nbytes) for cut in here]
        read = read_scattered(get_handle(), here[0].file, places, InFlight(), "headers")
        found.update(zip(here, read, strict=True))
    return [found[cut] for cut in cuts]


def _sources_of(
    told: Sequence[dict[str, Any]], mine: Sequence[OpenPart], own: int, path: str
) -> list[RankSpan]:
    """Which rank reads which part; of several that have it, the one with the least to read.

    `told` has the heads of the parts that each rank has, `mine` those of this one (`own`).
    """
    here = {part.head: part.file for part in mine}
    having: dict[PartHead, list[int]] = {}
    for rank, each in enumerate(told):
        for fields in each["heads"]:
            having.setdefault(PartHead(*fields), []).append(rank)
    heads = sorted(having, key=lambda head: (head.start, head.end))
    loads = [0] * len(told)
    sources: list[RankSpan] = []
    at, nbytes = 0, max((head.nbytes for head in heads), default=0)
    for head in heads:
        if head.start != at or head.nbytes != nbytes:
            break
        rank = min(having[head], key=lambda rank: loads[rank])
        loads[rank] += head.end - head.start
        if head.start < head.end:
            file = here[head] if rank == own else None
            sources.append(RankSpan(head.start, head.end, rank, file, HEAD_BYTES - head.start))
        at = head.end
    if len(having) != len(sources) + sum(h.start == h.end for h in heads) or not 0 < nbytes <= at:
        ranges = ", ".join(f"[{head.start}, {head.end}) of {head.nbytes}" for head in heads)
        raise IntegrityError(
            f"{path}: its parts do not make up the whole: {ranges or 'there are none'}; restore an "
            "earlier step",
            expected=nbytes,
            found=at,
        )
    return sources


class Image(File):
    """An archive in memory that holds only the bytes put into it; errors call it `name`."""

    def __init__(self, nbytes: int, name: str) -> None:
        self._fd = os.memfd_create("nvmeio-archive", os.MFD_CLOEXEC)
        with on_error(os.close, self._fd):
            os.ftruncate(self._fd, nbytes)
            super().__init__(f"/proc/self/fd/{self._fd}")
        self._name = name

    @property
    def path(self) -> str:
        return self._name

    def put(self, offset: int, data: bytes) -> None:
        while data:
            written = os.pwrite(self._fd, data, offset)
            offset, data = offset + written, data[written:]

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        super().close()


def open_part(path: str, save: Save, number: int, opened: contextlib.ExitStack) -> OpenPart:
    """Open a part that will not be recycled meanwhile, and read its description.

    Raises:
        TransferError: It cannot be opened; ESTALE if it was recycled or deleted just now.
        IntegrityError: It is damaged, or another part than its name says.
    """
    try:
        file = opened.enter_context(open_checkpoint(path))
    except FileNotFoundError as gone:
        detail = "it was recycled or deleted while ranks looked for it"
        raise open_error(errno.ESTALE, path, detail) from gone
    head = head_of(file)
    named = save.part(number)
    if head[: len(named)] != named:  # parts of two saves may fit together, and must not be put so
        raise IntegrityError(
            f"{path} holds {head.what}, of save {head.save}, and its name says step {save.step}, "
            f"{save.kind} {number} of {save.parts}, save {save.token}: it was renamed or copied "
            "over; give it the name that it had, or restore another step",
            expected=named,
            found=head[: len(named)],
        )
    return OpenPart(head, file)


def of_one() -> PartRanks:
    """The ranks of parts that this rank has itself: it asks no other one."""
    return PartRanks(RankStore.of_one("", "restore"), 0, 1.0)
