"""Whether an open file was written to, or cut, since it was opened."""

from __future__ import annotations

import errno
import os

from nvmeio.errors import IntegrityError, TransferError
from nvmeio.files import File


class Unchanged:
    """What a file was like when this was made.

    Args:
        file: Open, and stays so for as long as this is asked.
    """

    def __init__(self, file: File) -> None:
        self._file = file
        self._before = _facts(file)

    def check(self, what: str) -> None:
        """Raise if the file is another by now.

        Args:
            what: What was read from it, for the message.

        Raises:
            IntegrityError: Its size or its time of modification is another.

        Cost: one fstat, about 1 us.
        """
        before, path = self._before, self._file.path
        try:
            now = _facts(self._file)
        except OSError as failed:
            code = failed.errno or errno.EIO
            raise TransferError(code, operation="open", path=path) from failed
        if now != before:
            changed = "its size" if now[0] != before[0] else "its time of modification"
            raise IntegrityError(
                f"{path} changed while weights were streamed from it: {changed} is another than "
                f"when it was opened. What was read for {what} is not used. Write a changed model "
                "under another name, and open that",
                expected=before,
                found=now,
            )


def _facts(file: File) -> tuple[int, int]:
    """What changes when an open file is written to or cut: its size and time of modification."""
    # A file that is replaced or unlinked is still whole for whoever has it open: its link count and
    # with it st_ctime change, so ctime says nothing here.
    opened = file.acquire(False)
    try:
        found = os.fstat(opened.any_fd())
    finally:
        opened.release()
    return found.st_size, found.st_mtime_ns
