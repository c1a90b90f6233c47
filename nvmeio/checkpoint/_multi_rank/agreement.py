"""The agreement of ranks before anything of a save is written: that they save the same, and who.

They exchange a digest of their layouts, and a rank that differs learns in which way. Some ranks
write a file that all of them have: all, one of each machine, or a given number.
"""

from __future__ import annotations

import itertools
import json
import re
import socket
import struct
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from hashlib import sha256
from typing import Any

from nvmeio._distributed.messages import Messages
from nvmeio._distributed.rank_store import Calls, RankStore, checked_group
from nvmeio._formats.torch_archives import torch_zip
from nvmeio._formats.torch_archives.torch_layout import FileLayout, KnownBytes
from nvmeio._memory import system

# Ranks that save together

_NO_MEMBER = "make no Checkpointer"

# Checkpointers that were made; the first save or restore notices a rank that does not come.
_made = Calls("save", "1/failed", "restore/1/failed")


def being_made(group: Any) -> AbstractContextManager[None]:
    """Surround the making of a Checkpointer, `store_of` at its end: a refused one is counted."""
    return _made.asked(group)


def ranks_of(group: Any) -> int:
    """How many ranks save together. Raises as `store_of`."""
    return 1 if group is None else checked_group(group, _NO_MEMBER)[1]


def store_of(group: Any, directory: str, limit_s: float) -> RankStore:
    """The store of the ranks that save into a directory; `group` None is a process alone.

    The directory is not part of the keys' names: ranks that take directories of their own for a
    shared one are to find that out from each other. Raises as `checked_group`.
    """
    found = _made.begin(group, _NO_MEMBER, directory, limit_s)
    if found is None:
        return RankStore.of_one(directory, "save")
    store, number = found
    return store.within(str(number), directory, "save")


# The saved state

# All that a save may tell; the next one, of which all know then, has rank 0's store forget them.
MESSAGES = (
    *("plan", "agreed", "pieces", "place", "part", "end", "seen", "beat"),
    *("same", "durable", "named"),  # of parts on drives of their own
)


class Disagreement(ValueError):
    """An error that every rank finds by itself, so that no message is needed."""


def agree(
    messages: Messages, before: Messages, path: str, plan: Mapping[str, Any], layout: FileLayout
) -> tuple[list[dict[str, Any]], bool]:
    """Exchange the ranks' plans; forget the messages of the save `before`.

    `plan` is what the ranks are to have in common, and what each says of itself. Returns what each
    of them saves, and whether all but the storages is the same to the last byte.

    Raises:
        Disagreement: They do not save the same; says what differs.
        TransferError: Another rank failed, or gave up.
    """
    plans = messages.agree("plan", {**plan, **fingerprint(layout)})
    before.forget(MESSAGES)  # all have left it
    wrong = explain(plans)
    if wrong is not None:
        raise Disagreement(f"{path}: {wrong}")
    return plans, all(each["pieces"] == plans[0]["pieces"] for each in plans)


def with_pieces_of_first(messages: Messages, layout: FileLayout) -> FileLayout:
    """Take rank 0's pickle, because pickles name each tensor's device and may differ."""
    if messages.rank == 0:
        messages.put("pieces", pieces_to_bytes(layout))
        return layout
    return with_pieces(layout, messages.get("pieces", 0))


_LENGTH = struct.Struct("<Q")

# A tensor's device in the pickle: each rank has a device of its own. A str of the
# pickle's protocols 1 to 3, or of 4 and later; the length stands before it.
_LOCATION = re.compile(rb"(?:X.\x00\x00\x00|\x8c.)([a-z]+):\d+", re.DOTALL)


def fingerprint(layout: FileLayout) -> dict[str, Any]:
    """A small summary that must be the same on all ranks that write one file.

    "pieces" is a digest of all bytes but the storages'; "state" one of the storages' number, order
    and sizes and of the pickle, whatever device each tensor was on; "sizes" one of the storages
    alone; "records" and "nbytes" say how many storages there are, and of how many bytes.
    """
    pieces = sha256()
    for piece in layout.pieces:
        pieces.update(f"{piece.offset} {len(piece.data)} ".encode())
        pieces.update(piece.data)
    sizes = sha256(repr([record.nbytes for record in layout.records]).encode())
    state = sizes.copy()
    state.update(_LOCATION.sub(rb"\1", _pickle_of(layout)))
    return {
        "pieces": pieces.hexdigest(),
        "state": state.hexdigest(),
        "sizes": sizes.hexdigest(),
        "records": len(layout.records),
        "nbytes": layout.data_nbytes,
    }


def _pickle_of(layout: FileLayout) -> bytes:
    starts = [piece.offset for piece in layout.pieces]

    def read(offset: int, nbytes: int) -> bytes:
        """Bytes of one piece; fewer where it ends."""
        piece = layout.pieces[max(bisect_right(starts, offset) - 1, 0)]
        return piece.data[offset - piece.offset : offset - piece.offset + nbytes]

    def read_many(wanted: Sequence[tuple[int, int]]) -> list[bytes]:
        return [read(offset, nbytes) for offset, nbytes in wanted]

    archive = torch_zip.parse(read_many, layout.nbytes, "the skeleton of the checkpoint")
    entry = archive.records()["data.pkl"]
    return read(entry.offset, entry.nbytes)


def explain(plans: Sequence[dict[str, Any]]) -> str | None:
    """The difference between the ranks' plans for one file; None if they save the same."""
    first = plans[0]
    for rank, plan in enumerate(plans[1:], 1):
        for name, what in (
            ("shared", "with shared={}"),
            ("step", "step {}"),
            ("layout", "layout {!r}"),
            ("checksum", "checksum={}"),
            ("writers", "with writers={!r}"),
            ("records", "{} storages"),
            ("nbytes", "{} bytes of storages"),
        ):
            if plan[name] != first[name] and name in _COMPARED[first["layout"]]:
                mine, its = what.format(first[name]), what.format(plan[name])
                return f"rank 0 saves {mine}, rank {rank} {its}"
        if first["layout"] == "one":
            for name, what in (
                ("sizes", "the sizes or the order of its storages"),
                ("state", "its structure, names, shapes, dtypes or other values"),
            ):
                if plan[name] != first[name]:
                    return f"rank {rank}'s state differs from rank 0's in {what}"
    return None


_COMPARED = {
    "one": ("shared", "step", "layout", "checksum", "writers", "records", "nbytes"),
    "per_rank": ("shared", "step", "layout", "checksum"),
}


def pieces_to_bytes(layout: FileLayout) -> bytes:
    """All of a layout but the storages' own bytes, for ranks that have the same storages."""
    told = {
        "nbytes": layout.nbytes,
        "pieces": [(piece.offset, len(piece.data)) for piece in layout.pieces],
        "records": [(record.offset, record.crc_at) for record in layout.records],
    }
    head = json.dumps(told).encode()
    return b"".join([_LENGTH.pack(len(head)), head, *(piece.data for piece in layout.pieces)])


def with_pieces(layout: FileLayout, data: bytes) -> FileLayout:
    """A layout with another rank's `pieces_to_bytes` in place of its own."""
    (length,) = _LENGTH.unpack_from(data)
    at = _LENGTH.size + length
    told = json.loads(data[_LENGTH.size : at])
    pieces: list[KnownBytes] = []
    for offset, nbytes in told["pieces"]:
        pieces.append(KnownBytes(offset, data[at : at + nbytes]))
        at += nbytes
    records = [
        record._replace(offset=offset, crc_at=tuple(crc_at))
        for record, (offset, crc_at) in zip(layout.records, told["records"], strict=True)
    ]
    return FileLayout(told["nbytes"], pieces, records)


# This file belongs to the running kernel, so it is the same in all containers of a machine.
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def checked_writers(writers: str | int, layout: str, ranks: int) -> str | int:
    """Check `writers`: "all", "per_node", or a number, of at most as many as there are."""
    is_text = isinstance(writers, str)
    is_number = isinstance(writers, int) and not isinstance(writers, bool)
    if not (is_number or (is_text and writers in ("all", "per_node"))):
        kind = ValueError if is_text else TypeError
        raise kind(f"writers must be 'all', 'per_node' or a number of ranks, not {writers!r:.80}")
    if isinstance(writers, int) and not 1 <= writers <= ranks:
        raise ValueError(
            f"writers must be 1 to {ranks}, the number of ranks of process_group, not {writers}"
        )
    if layout != "one" and writers != "all":
        raise ValueError(
            f"writers={writers!r} is for layout='one': with {layout!r} each rank has a state of "
            "its own to write"
        )
    return writers


def this_node() -> str:
    """The machine that this process is on, the same text for all its ranks."""
    return system.text_of(_BOOT_ID).strip() or socket.gethostname()


def chosen_writers(writers: str | int, nodes: Sequence[str]) -> list[int]:
    """The ranks that write, ascending, given the node of each; rank 0 is one of them."""
    ranks = len(nodes)
    if writers == "per_node":
        return [rank for rank, each in enumerate(nodes) if each not in nodes[:rank]]
    count = ranks if isinstance(writers, str) else writers
    return [number * ranks // count for number in range(count)]  # far apart: on several nodes


def shares_of_writers(pages: int, ranks: int, writing: Sequence[int]) -> list[tuple[int, int]]:
    """The [start, end) pages of each rank: even ones for those that write, nothing for others."""
    counts = [0] * ranks
    for number, rank in enumerate(writing):
        counts[rank] = pages * (number + 1) // len(writing) - pages * number // len(writing)
    return list(itertools.pairwise([0, *itertools.accumulate(counts)]))
