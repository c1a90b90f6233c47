"""Whether torch.save, which tells a file object little, has written a complete archive."""

from __future__ import annotations

import struct
import sys
from typing import Any

from nvmeio._formats import torch_zip


class ArchiveWatch:
    """Knows when a complete torch archive has been written, from its first and last bytes.

    torch.save says nothing at its end but `flush`, and that after a failure too: it then closes
    the archive behind whatever was written. A failure that came while torch.save ran is being
    handled at that moment, and was not when the first bytes came; and an object that could not be
    pickled leaves an archive that does not begin with ``data.pkl``.
    """

    _HEAD_BYTES = 30 + 256
    _END64 = struct.Struct("<4sQHHIIQQQQ")
    _TAIL_BYTES = _END64.size + 20 + 22  # zip64 end record, locator, end record

    def __init__(self) -> None:
        self._head = b""
        self._tail = b""
        self._handled: BaseException | None = None
        self._begun = False

    def see(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        if not self._begun:
            self._begun = True
            self._handled = sys.exc_info()[1]
        if len(self._head) < self._HEAD_BYTES:
            self._head += bytes(view[: self._HEAD_BYTES - len(self._head)])
        last = bytes(view[-self._TAIL_BYTES :])
        self._tail = (self._tail + last)[-self._TAIL_BYTES :]

    def broken_off(self, nbytes: int) -> bool:
        """Whether torch.save has failed, and now closes the archive of `nbytes` bytes."""
        handled = sys.exc_info()[1]
        if not self._begun or handled is None:
            return False
        return handled is not self._handled or (not self.is_save() and self._ends(nbytes))

    def complete(self, nbytes: int) -> bool:
        """Whether `nbytes` bytes are all of what torch.save writes."""
        return self.is_save() and self._ends(nbytes)

    def is_archive(self) -> bool:
        """Whether it begins as a zip archive does."""
        return self._head.startswith(torch_zip.LOCAL_MAGIC)

    def is_save(self) -> bool:
        """Whether it is torch.save that writes."""
        name_length = int.from_bytes(self._head[26:28], "little")
        name = self._head[30 : 30 + name_length]
        return self._head.startswith(torch_zip.LOCAL_MAGIC) and name.endswith(b"/data.pkl")

    def _ends(self, nbytes: int) -> bool:
        if len(self._tail) < self._TAIL_BYTES or self._tail[-22:-18] != torch_zip.END_MAGIC:
            return False
        magic, *_, size, offset = self._END64.unpack_from(self._tail)
        return bool(magic == torch_zip.END64_MAGIC and offset + size + self._TAIL_BYTES == nbytes)
