"""A few bytes at each of many places of a file, by direct reads of the pages that they lie in.

One gather reads all pages, without any Python for each: 10,000 headers of a checkpoint took 0.4 s
as spans with tensors of their own, and take 0.05 s so.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from nvmeio._files.plan import PAGE_BYTES
from nvmeio._io.inflight import InFlight
from nvmeio._memory import mappings
from nvmeio.files import File
from nvmeio.handle import AioHandle


def read_scattered(
    handle: AioHandle,
    file: File,
    places: Sequence[tuple[int, int]],
    flight: InFlight,
    what: str,
) -> list[bytes]:
    """The bytes at each place; blocks.

    Args:
        handle: Moves them.
        file: Open for reading.
        places: (offset, nbytes) of each, within whole pages of the file, in any order.
        flight: What is in flight, for somebody else to cancel; nothing is after this returns.
        what: They are, for errors.

    Raises:
        TransferError: They cannot be read, or the file was cut.
        MemoryError: There is no memory for the pages.
        Cancelled: `flight.cancel` was called.
    """
    pages: set[int] = set()
    for offset, nbytes in places:
        first, last = offset // PAGE_BYTES, (offset + nbytes - 1) // PAGE_BYTES
        pages.add(first)
        if last > first:
            pages.update(range(first + 1, last + 1))
    ordered = sorted(pages)
    rows = {page: row for row, page in enumerate(ordered)}
    mapping = mappings.Mapping(len(ordered) * PAGE_BYTES)
    base = mapping.address - mapping.base
    out = mapping.tensor(0, (len(ordered), PAGE_BYTES), torch.uint8)
    begin = partial(handle.async_gather, out, file, torch.tensor(ordered) * PAGE_BYTES)
    with flight:
        flight.start(begin, out.nbytes, None, lambda _: f"read for {what}")
    found: list[bytes] = []
    for offset, nbytes in places:
        page, within = divmod(offset, PAGE_BYTES)
        at = base + rows[page] * PAGE_BYTES + within
        found.append(mapping[at : at + nbytes])
    return found
