"""Many tensors in one file, at any offset, and one of them replaced where it lies.

    python examples/05_offsets.py --dir /mnt/nvme

The tensors are packed byte after byte, of all sizes and dtypes, so hardly any begins where direct
I/O could begin. All are written at once nevertheless, though neighbours share disk blocks: of each,
whole pages go by direct I/O through an aligned block of the engine ("bounced"), the edges through
the page cache ("buffered"), and no byte outside of it is touched.
"""

import asyncio
import json
import random
import time
from pathlib import Path

import _common
import torch
from _common import say, verify

import nvmeio

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64)


class TensorFile:
    """Tensors one after another, then an index as JSON, then its length in 8 bytes."""

    def __init__(self, handle: nvmeio.AioHandle, file: nvmeio.File) -> None:
        self._handle, self._file = handle, file
        self.index: dict[str, dict] = {}

    async def write(self, tensors: dict[str, torch.Tensor]) -> None:
        end = 0
        for name, tensor in tensors.items():
            self.index[name] = {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "at": end,
            }
            end += tensor.nbytes
        index = json.dumps(self.index).encode()
        trailer = torch.frombuffer(
            bytearray(index + len(index).to_bytes(8, "little")), dtype=torch.uint8
        )
        await asyncio.gather(
            *(self.update(name, tensor) for name, tensor in tensors.items()),
            self._handle.async_pwrite(trailer, self._file, end),
        )

    async def load_index(self) -> None:
        size = self._file.size()
        length = torch.empty(1, dtype=torch.int64)
        await self._handle.async_pread(length, self._file, size - 8)
        index = torch.empty(int(length), dtype=torch.uint8)
        await self._handle.async_pread(index, self._file, size - 8 - index.nbytes)
        self.index = json.loads(bytes(index.tolist()))

    def update(self, name: str, tensor: torch.Tensor) -> nvmeio.Operation:
        """Write a tensor of the same shape and dtype where the old one lies."""
        return self._handle.async_pwrite(tensor, self._file, self.index[name]["at"])

    async def read(self, name: str) -> torch.Tensor:
        entry = self.index[name]
        tensor = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        await self._handle.async_pread(tensor, self._file, entry["at"])
        return tensor


def some_tensor(dtype: torch.dtype, nbytes: int) -> torch.Tensor:
    """Random bytes as a tensor; bool holds 0 and 1 only."""
    elements = max(1, nbytes // dtype.itemsize)
    if dtype is torch.bool:
        return torch.randint(2, (elements,), dtype=dtype)
    return torch.randint(256, (elements * dtype.itemsize,), dtype=torch.uint8).view(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit: as bytes, for NaN is not equal to itself."""
    return torch.equal(*nvmeio.cast_to_byte_tensor([a, b]))


async def main(folder: Path) -> None:
    random.seed(0)
    path = folder / "tensors.bin"
    tensors = {
        f"layer{n}.weight": some_tensor(random.choice(DTYPES), int(2 ** random.uniform(0, 20)))
        for n in range(1000)
    }
    async with nvmeio.AioHandle() as handle:
        with nvmeio.open(path, "w") as file:
            packed = TensorFile(handle, file)
            began = time.perf_counter()
            await packed.write(tensors)
            took_ms = 1e3 * (time.perf_counter() - began)
            on_block = sum(entry["at"] % 4096 == 0 for entry in packed.index.values())
            text = f"{len(tensors)} tensors of 1 byte to 1 MiB, {file.size() / 1e6:.1f} MB, "
            text += f"{took_ms:.0f} ms; {on_block} of them begin on a page"
            say("written", f"{text} ({_common.ways(handle.stats)})")

        with nvmeio.open(path, "r+") as file:
            packed = TensorFile(handle, file)
            await packed.load_index()
            began = time.perf_counter()
            back = await asyncio.gather(*map(packed.read, packed.index))
            took_ms = 1e3 * (time.perf_counter() - began)
            verify(list(packed.index) == list(tensors), "the index comes back")
            verify(all(map(same, back, tensors.values())), "all tensors come back")
            say("read", f"all of them, {took_ms:.0f} ms")

            name, old = max(tensors.items(), key=lambda item: item[1].nbytes)
            start = packed.index[name]["at"]
            stop = start + old.nbytes
            before = path.read_bytes()
            new = some_tensor(old.dtype, old.nbytes)
            await packed.update(name, new)
            after = path.read_bytes()
            verify(same(await packed.read(name), new), "the new tensor is there")
            verify(before[:start] == after[:start], "what lies before stays")
            verify(before[stop:] == after[stop:], "what lies after stays")
            say("updated", f"{name} in place, bytes [{start}, {stop}) of {len(after)}")
    _common.verified(
        f"{len(tensors)} tensors, bit for bit; beside the updated one no byte has changed"
    )


if __name__ == "__main__":
    options = _common.arguments(__doc__).parse_args()
    with _common.scratch(options.dir, 200 << 20) as folder:
        _common.run(main(folder))
