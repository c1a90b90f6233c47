"""caio: asyncio over Linux AIO, io_uring or its own threads, into bytes objects of its own.

Its buffers are not aligned, so O_DIRECT is EINVAL for it: it reads through the page cache,
emptied of the file before each run and told to expect random access.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from typing import Any

from _measure import Sample

from nvmeio.cli.measure.worker import PeerUnavailable
from peers._loops import block_offsets, read_blocks, run_on_uvloop

INSTALL = "pip install caio"
BACKENDS = {
    "aio": "linux_aio_asyncio",
    "uring": "linux_uring_asyncio",
    "thread": "thread_aio_asyncio",
}


class CaioPeer:
    def __init__(self) -> None:
        try:
            self._caio: Any = importlib.import_module("caio")
        except ImportError as error:
            raise PeerUnavailable(f"cannot be imported ({error})", INSTALL) from error

    def backends(self) -> list[str]:
        return [name for name, module in BACKENDS.items() if getattr(self._caio, module, None)]

    def random_reads(
        self, path: str, nbytes: int, count: int, block: int, depth: int, backend: str
    ) -> Sample:
        module = getattr(self._caio, BACKENDS[backend])
        offsets = block_offsets(nbytes, count, block)
        options = {"pool_size": depth} if backend == "thread" else {}
        fd = os.open(path, os.O_RDONLY)

        async def main() -> Sample:
            loop = asyncio.get_running_loop()
            context = module.AsyncioContext(max_requests=depth, loop=loop, **options)
            try:

                async def read(_: int, offset: int) -> int:
                    return len(await context.read(block, fd, offset))

                return await read_blocks(read, offsets, block, depth)
            finally:
                context.close()

        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            return run_on_uvloop(main())
        finally:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def close(self) -> None:
        pass
