"""GPU memory to and from a file: through host memory, and through cuFile where there is one.

    python examples/11_gpu_memory.py --dir /mnt/nvme

The verbs are the same, and so is the order of things: a transfer comes after what the current CUDA
stream was asked before it, and nothing needs to be synchronised after an await. `AioHandle` takes
CUDA tensors through a ring of page-locked chunks; `GdsHandle` has cuFile (GPUDirect Storage) move
them, and its `mode` says which way that really is. Without a GPU the tensors lie in host memory.
"""

import asyncio
import time
from pathlib import Path

import _common
import torch
from _common import say, verify

import nvmeio

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"


async def there_and_back(handle: nvmeio.AioHandle, path: Path, elements: int) -> None:
    """Compute, write, read, compute: nobody synchronises in between."""
    tensor = torch.zeros(elements, device=DEVICE)
    for _ in range(10):
        tensor += 1  # kernels that may still be running when the write is asked for
    began = time.perf_counter()
    await handle.async_pwrite(tensor, path)
    written = time.perf_counter()
    back = torch.empty_like(tensor)
    await handle.async_pread(back, path)
    read = time.perf_counter()
    verify(bool((back == 10).all()), "what was computed came back")
    say(type(handle).__name__, f"write {tensor.nbytes / 1e9 / (written - began):.2f} GB/s")
    say("", f"read {tensor.nbytes / 1e9 / (read - written):.2f} GB/s")
    say("", f"way: {_common.ways(handle.stats)}")


async def registered(handle: nvmeio.GdsHandle, path: Path, elements: int) -> None:
    """Memory that is used again and again is worth registering with cuFile; views go with it."""
    buffer = handle.new_pinned_device_tensor(elements, torch.float32)
    half = elements // 2
    await asyncio.gather(
        handle.async_pread(buffer[:half], path),
        handle.async_pread(buffer[half:], path, 4 * half),
    )
    verify(bool((buffer == 10).all()), "both halves are in the registered buffer")
    handle.free_pinned_device_tensor(buffer)
    say("registered", "two reads into views of one registered buffer")


async def main(folder: Path, elements: int) -> None:
    say("device", torch.cuda.get_device_name() if HAS_GPU else "none: host memory stands in")
    async with nvmeio.AioHandle() as handle:
        await there_and_back(handle, folder / "aio.bin", elements)
    try:
        gds = nvmeio.GdsHandle(cpu_tensors="aio" if HAS_GPU else "cufile")
    except nvmeio.BackendUnavailableError as no:
        say("GdsHandle", "cannot be had here")
        for name, reason in no.attempts:
            say("", f"{name}: {reason}")
    else:
        async with gds:
            say("mode", gds.mode)
            await there_and_back(gds, folder / "gds.bin", elements)
            await registered(gds, folder / "gds.bin", elements)
    _common.verified(f"{4 * elements / 1e6:.0f} MB on {DEVICE} came back as they were")


if __name__ == "__main__":
    parser = _common.arguments(__doc__)
    parser.add_argument("--size", type=_common.nbytes, default="256M", help="bytes (256M)")
    options = parser.parse_args()
    with _common.scratch(options.dir, 3 * options.size) as folder:
        _common.run(main(folder, options.size // 4))
