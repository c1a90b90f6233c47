"""Files that are read whole: settings, indices, manifests. Regular ones, and no larger than such.

Where others may write, or a link leads elsewhere, one of these names may be a pipe, for which
open(2) waits, or a device that never ends.

Source: man 2 open (O_NONBLOCK on a FIFO), man 7 inode.
"""

from __future__ import annotations

import errno
import os
import stat

SETTINGS_BYTES = 1 << 20
# An index of 100,000 tensors has 10 MB; safetensors has this limit of a header.
INDEX_BYTES = 100_000_000
_CHUNK_BYTES = 1 << 20


def read_small(path: str | os.PathLike[str], most: int) -> bytes:
    """The bytes of a regular file, links followed; never waits for a writer.

    Args:
        path: Its name.
        most: Bytes that such a file has at most.

    Raises:
        OSError: It cannot be opened or read; it is no regular file (EINVAL, or EISDIR); it is
            larger (EFBIG). Says which.
    """
    name = os.fspath(path)
    fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        facts = os.fstat(fd)
        if stat.S_ISDIR(facts.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
        if not stat.S_ISREG(facts.st_mode):
            kind = "a pipe" if stat.S_ISFIFO(facts.st_mode) else "a device or a socket"
            raise OSError(errno.EINVAL, f"it is {kind}, and no regular file: remove it", name)
        data = bytearray()
        while len(data) <= most and facts.st_size <= most:
            chunk = os.read(fd, min(_CHUNK_BYTES, most + 1 - len(data)))
            if not chunk:
                return bytes(data)
            data += chunk
        detail = f"it has {max(facts.st_size, len(data))} bytes, and such a file at most {most}"
        raise OSError(errno.EFBIG, f"{detail}: it is another file, or damaged", name)
    finally:
        os.close(fd)


def detail_of(failed: OSError) -> str:
    """What `read_small` says beside the number; "" where the system said it."""
    plain = failed.errno is None or failed.strerror == os.strerror(failed.errno)
    return "" if plain else str(failed.strerror)
