"""What direct I/O needs on an open file: told by the kernel, or found by trying it."""

from __future__ import annotations

import errno
import logging
import mmap
import os

from nvmeio._files.mounts import file_system_of
from nvmeio._files.plan import PAGE_BYTES, Alignment
from nvmeio._shim import FileFacts, OwnFds
from nvmeio.errors import TransferError

logger = logging.getLogger("nvmeio")

NO_DIRECT = Alignment(0, 0)
# Files of these live in memory: their O_DIRECT, where accepted, is the page cache all the same.
MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
# What the kernel answers where a file system takes no direct I/O. Anything else (EIO, EMFILE, …) is
# this file's or this moment's, and says nothing of the device.
_REFUSALS = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)

# Where the kernel does not tell (before 6.1, or the file system does not say): found by trying,
# once a file system. Its number alone does not do: where it is no drive's (btrfs, overlay, tmpfs),
# the next one that is mounted may have it.
_probed: dict[tuple[int, int], Alignment] = {}


def alignment_of(fd: int, facts: FileFacts, path: str) -> Alignment:
    """What direct I/O needs on an open file.

    Raises:
        TransferError: It had to be tried, and failed for another reason than that there is none.
    """
    if facts.offset_alignment is not None and facts.memory_alignment is not None:
        return Alignment(facts.offset_alignment, facts.memory_alignment)
    file_system = facts.device, os.fstatvfs(fd).f_fsid
    known = _probed.get(file_system)
    if known is not None:
        return known
    try:
        readable = OwnFds()
        readable.reopen(True, fd, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except PermissionError:
        return Alignment(PAGE_BYTES, PAGE_BYTES)  # unreadable: assume; EINVAL demotes later
    except OSError as failed:
        if failed.errno in _REFUSALS:
            return NO_DIRECT
        raise _not_tried(failed, path, "opened again to try it") from failed
    try:
        known = _probed[file_system] = _try_direct_read(readable.direct, facts.device)
    except OSError as failed:
        raise _not_tried(failed, path, "a direct read was tried") from failed
    finally:
        readable.close()
    return known


def _not_tried(failed: OSError, path: str, detail: str) -> TransferError:
    code = failed.errno or errno.EIO
    return TransferError(code, operation="open", path=path, detail=detail)


def _try_direct_read(fd: int, device: int) -> Alignment:
    if file_system_of(device) in MEMORY_FILE_SYSTEMS:
        return NO_DIRECT
    with mmap.mmap(-1, PAGE_BYTES) as page:
        try:
            os.preadv(fd, [page], 0)
        except OSError as refused:
            if refused.errno not in _REFUSALS:
                raise
            logger.info("no direct I/O on device %x: %s", device, refused)
            return NO_DIRECT
    return Alignment(PAGE_BYTES, PAGE_BYTES)
