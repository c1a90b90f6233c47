"""Kinds of memory: which way the bytes of each go, and how fast; page-locking and its limit.

    python examples/06_page_locked.py --dir /mnt/nvme

Any tensor works. Memory from nvmeio is aligned and lies on huge pages, so its bytes go straight
between drive and tensor ("direct"); torch's own lies 64 bytes past a page and goes through aligned
blocks of the engine ("bounced"), overlapped with the drive. Page-locking changes neither. It is for
copies to and from a GPU, and limited: for most users to 8 MiB (`ulimit -l`).
"""

import asyncio
import resource
import statistics
import time
from pathlib import Path

import _common
import torch
from _common import say, verify
from rich.table import Table

import nvmeio


def kinds(handle: nvmeio.AioHandle, elements: int) -> dict[str, torch.Tensor | None]:
    """One tensor of each kind; None where page-locking is refused."""
    try:
        locked = handle.new_cpu_locked_tensor(elements, torch.float32)
    except OSError:
        locked = None
    return {
        "torch.empty": torch.empty(elements),
        "torch.empty, every other": torch.empty(2 * elements)[::2],  # not contiguous
        "empty_aligned": nvmeio.empty_aligned(elements),
        "empty_aligned, shifted by one": nvmeio.empty_aligned(elements + 1)[1:],
        "new_cpu_locked_tensor": locked,
    }


async def compare(handle: nvmeio.AioHandle, file: nvmeio.File, data: torch.Tensor) -> None:
    """Read the same bytes into each kind of memory."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(f"{data.nbytes / 1e6:.0f} MB into")
    table.add_column("address % 4096", justify="right")
    table.add_column("locked")
    table.add_column("way")
    table.add_column("GB/s", justify="right")
    for kind, tensor in kinds(handle, data.numel()).items():
        if tensor is None:
            table.add_row(kind, "", "[yellow]refused[/]", "see below", "")
            continue
        times_s = []
        for _ in range(5):
            tensor.zero_()
            before = handle.stats
            began = time.perf_counter()
            await handle.async_pread(tensor, file)
            times_s.append(time.perf_counter() - began)
        way = _common.ways(handle.stats.since(before))
        verify(torch.equal(tensor, data), f"{kind} holds what was written")
        table.add_row(
            kind,
            str(tensor.data_ptr() % 4096),
            "yes" if handle.is_pinned(tensor) else "no",
            way,
            f"{data.nbytes / 1e9 / statistics.median(times_s):.2f}",
        )
    _common.console.print(table)
    _common.console.print()


def reach_the_limit(handle: nvmeio.AioHandle) -> None:
    """Ask for more page-locked memory than is allowed."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / 2**20:g} MiB"
    elements = (64 << 20) if soft == resource.RLIM_INFINITY else soft + 4096
    try:
        tensor = handle.new_cpu_locked_tensor(elements, torch.uint8)
    except OSError as refused:
        say("memlock", f"the limit is {limit}; for {elements} bytes:")
        say("", f"{type(refused).__name__}: {refused}")
        return
    text = (
        f"the limit is {limit}; this process may lock more all the same (CAP_IPC_LOCK, as root has)"
    )
    say("memlock", "there is no limit" if soft == resource.RLIM_INFINITY else text)
    handle.free_cpu_locked_tensor(tensor)


async def share_a_budget(handle: nvmeio.AioHandle, file: nvmeio.File, data: torch.Tensor) -> None:
    """Sixteen readers, memory for four of them."""
    parts = nvmeio.cast_to_byte_tensor(data).chunk(16)
    most = 0

    async def reader(n: int) -> None:
        nonlocal most
        async with pool.take(parts[n].nbytes) as memory:  # waits its turn
            most = max(most, pool.in_use_bytes)
            await handle.async_pread(memory, file, n * memory.nbytes)
            verify(torch.equal(memory, parts[n]), f"reader {n} has its own part")

    with nvmeio.PinnedPool(data.nbytes // 4) as pool:
        await asyncio.gather(*map(reader, range(16)))
        verify(most <= pool.budget_bytes, "the budget is kept")
        text = f"16 readers of {parts[0].nbytes / 1e6:.1f} MB each took turns in "
        text += f"{pool.budget_bytes / 1e6:.1f} MB, page-locked: {'yes' if pool.locked else 'no'}"
        say("PinnedPool", text)


async def main(folder: Path) -> None:
    data = nvmeio.empty_aligned(16 << 20).normal_()  # 64 MiB
    async with nvmeio.AioHandle() as handle:
        with nvmeio.open(folder / "data.bin", "w") as file:
            await handle.async_pwrite(data, file)
            await compare(handle, file, data)
            reach_the_limit(handle)
            await share_a_budget(handle, file, data)
    _common.verified("every kind of memory holds the same bytes")


if __name__ == "__main__":
    options = _common.arguments(__doc__).parse_args()
    with _common.scratch(options.dir, 300 << 20) as folder:
        _common.run(main(folder))
