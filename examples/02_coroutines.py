"""Transfers as coroutines: gather, a TaskGroup, a timeout, a cancelled read, an error.

    python examples/02_coroutines.py --dir /mnt/nvme

An operation starts when it is called, not when it is awaited, and goes wherever asyncio takes a
coroutine. Cancelling one, by a timeout or a failing neighbour, waits until the kernel has let go of
the memory: after it the tensor is yours again.
"""

import asyncio
import sys
import time
from pathlib import Path

import _common
import torch
from _common import say, verify

import nvmeio


async def save_and_load(handle: nvmeio.AioHandle, folder: Path) -> None:
    """Eight tensors at once, each in a file of its own."""
    tensors = [torch.randn(n + 1, 1 << 19) for n in range(8)]  # 2 to 17 MB
    back = [torch.empty_like(tensor) for tensor in tensors]
    paths = [folder / f"{n}.bin" for n in range(8)]

    began = time.perf_counter()
    writes = [handle.async_pwrite(t, path) for t, path in zip(tensors, paths, strict=True)]
    submitted_ms = 1e3 * (time.perf_counter() - began)  # under way, and nothing was awaited yet
    nbytes = sum(await asyncio.gather(*writes))
    done_ms = 1e3 * (time.perf_counter() - began)
    say("gather", f"8 writes started in {submitted_ms:.1f} ms, all {nbytes / 1e6:.0f} MB done "
        f"after {done_ms:.0f} ms")  # fmt: skip

    if sys.version_info >= (3, 11):
        async with asyncio.TaskGroup() as group:
            for tensor, path in zip(back, paths, strict=True):
                group.create_task(handle.async_pread(tensor, path))
    else:
        await asyncio.gather(*map(handle.async_pread, back, paths))
    verify(all(map(torch.equal, tensors, back)), "what was read equals what was written")
    say("TaskGroup", "read back, equal bit for bit")


async def time_out(handle: nvmeio.AioHandle, path: Path, tensor: torch.Tensor) -> None:
    """A read that is given 5 ms, and what becomes of its buffer."""
    read = handle.async_pread(tensor, path)
    began = time.perf_counter()
    try:
        await asyncio.wait_for(read, 0.005)
        say("timeout", "a fast drive: it was done in time")
    except asyncio.TimeoutError:  # the built-in TimeoutError, from Python 3.11 on
        say(
            "timeout",
            f"given 5 ms for {tensor.nbytes / 1e6:.0f} MB. The kernel finished what it had in its "
            f"queue: {read.transferred / 1e6:.0f} MB, {1e3 * (time.perf_counter() - began):.0f} ms "
            "after the start. A smaller queue_depth lets go sooner.",
        )
    tensor.fill_(7)  # ours again
    await asyncio.sleep(0.1)
    verify(bool((tensor == 7).all()), "nobody writes into the buffer of a cancelled read")


async def cancel(handle: nvmeio.AioHandle, path: Path, tensor: torch.Tensor) -> None:
    """A task that reads, cancelled from outside."""

    async def reader() -> None:
        try:
            await handle.async_pread(tensor, path)
        except asyncio.CancelledError:
            say("cancel", "the reader was cancelled; its buffer is free, the handle goes on")
            raise

    task = asyncio.create_task(reader())
    await asyncio.sleep(0.002)
    task.cancel()
    await asyncio.wait([task])


async def fail(handle: nvmeio.AioHandle, path: Path, tensor: torch.Tensor) -> None:
    """Two reads, one of them past the end of the file."""
    too_far = path.stat().st_size - 100
    good, bad = await asyncio.gather(
        handle.async_pread(tensor, path),
        handle.async_pread(torch.empty(1024), path, file_offset=too_far),
        return_exceptions=True,
    )
    verify(good == tensor.nbytes, "a failure beside it does not disturb a read")
    verify(isinstance(bad, nvmeio.ShortTransferError), "reading past the end is an error")
    say("error", f"{type(bad).__name__}: {bad}")
    say("", f"requested={bad.requested}, transferred={bad.transferred}, errno={bad.errno}")


async def main(folder: Path) -> None:
    async with nvmeio.AioHandle() as handle:
        await save_and_load(handle, folder)
        tensor, path = nvmeio.empty_aligned(1 << 26), folder / "big.bin"  # 256 MiB of float32
        await handle.async_pwrite(tensor.normal_(), path)
        written = tensor.clone()
        await time_out(handle, path, tensor)
        await cancel(handle, path, tensor)
        await fail(handle, path, tensor)
        verify(torch.equal(tensor, written), "the last read is complete")
        stats = handle.stats
        verify(stats.in_flight == 0, "nothing is left in flight")
        _common.verified(
            f"{stats.operations} operations, {stats.cancelled} cancelled, {stats.errors} failed, "
            f"none in flight; every byte as it should be ({_common.ways(stats)})"
        )


if __name__ == "__main__":
    options = _common.arguments(__doc__).parse_args()
    with _common.scratch(options.dir, 500 << 20) as folder:
        _common.run(main(folder))
