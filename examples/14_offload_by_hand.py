"""Gradient descent over weights on the drive: read, compute, write, from AioHandle alone.

    python examples/14_offload_by_hand.py --dir /mnt/nvme

What `SwappedOptimizer` does, in its simplest form. Weights lie in a file in chunks. Three tensors
take turns: while one is computed on, the next is being read into another, and the last is being
written from the third. Before a tensor is read into again, its write is awaited.
"""

import asyncio
import time
from pathlib import Path

import _common
import torch
from _common import say, verify

import nvmeio


async def descend(handle: nvmeio.AioHandle, file: nvmeio.File, chunks: int, size: int) -> None:
    """One step of x ← x - 0.1 x over all chunks."""
    buffers = [nvmeio.empty_aligned(size) for _ in range(3)]
    reads: dict[int, nvmeio.Operation] = {}
    writes: dict[int, nvmeio.Operation] = {}

    async def begin(n: int) -> None:
        if n < chunks:
            if n - 3 in writes:
                await writes.pop(n - 3)  # the same buffer
            reads[n] = handle.async_pread(buffers[n % 3], file, n * size * 4)

    await begin(0)
    for n in range(chunks):
        await begin(n + 1)
        await reads.pop(n)
        buffer = buffers[n % 3]
        await asyncio.to_thread(buffer.mul_, 0.9)
        writes[n] = handle.async_pwrite(buffer, file, n * size * 4)
    for write in writes.values():
        await write


async def main(folder: Path, chunks: int, size: int) -> None:
    async with nvmeio.AioHandle() as handle:
        with nvmeio.open(folder / "weights", "w") as file:
            start = torch.arange(chunks * size, dtype=torch.float32).view(chunks, size)
            await handle.async_pwrite(start, file)
            began = time.perf_counter()
            for _ in range(3):
                await descend(handle, file, chunks, size)
            taken = time.perf_counter() - began
            result = torch.empty_like(start)
            await handle.async_pread(result, file)
    say("moved", f"{6 * start.nbytes / 1e6:.0f} MB in {taken:.2f} s, in {chunks} chunks")
    verify(torch.equal(result, start * 0.9 * 0.9 * 0.9), "the weights are three steps further")
    _common.verified("three steps over weights on the drive equal three in memory, bit for bit")


if __name__ == "__main__":
    parser = _common.arguments(__doc__)
    parser.add_argument("--size", type=_common.nbytes, default="256M", help="of the weights")
    options = parser.parse_args()
    with _common.scratch(options.dir, 2 * options.size) as folder:
        _common.run(main(folder, 16, max(1024, options.size // 64 // 1024 * 1024)))
