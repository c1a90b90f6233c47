"""Plain Python: a thread pool over `os.preadv` on an O_DIRECT descriptor."""

from __future__ import annotations

import asyncio
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

from _measure import Sample

from peers._loops import block_offsets, read_blocks, run_on_uvloop


class ThreadPoolPeer:
    def random_reads(self, path: str, nbytes: int, count: int, block: int, depth: int) -> Sample:
        offsets = block_offsets(nbytes, count, block)
        buffers = [mmap.mmap(-1, block) for _ in range(depth)]  # page-aligned, as O_DIRECT wants
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)

        async def main() -> Sample:
            loop = asyncio.get_running_loop()
            with ThreadPoolExecutor(depth) as pool:

                async def read(number: int, offset: int) -> int:
                    return await loop.run_in_executor(
                        pool, os.preadv, fd, [buffers[number]], offset
                    )

                return await read_blocks(read, offsets, block, depth)

        try:
            return run_on_uvloop(main())
        finally:
            os.close(fd)
            for buffer in buffers:
                buffer.close()

    def close(self) -> None:
        pass
