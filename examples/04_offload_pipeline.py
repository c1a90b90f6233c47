"""An optimizer whose state lies on the drive: read, compute, write, with three buffers.

    python examples/04_offload_pipeline.py --dir /mnt/nvme

Weights and both moments of Adam are in a file, chunk after chunk. Each chunk is a coroutine that
takes a buffer from a `PinnedPool`, reads, lets torch.optim.Adam step in place, and writes. No
scheduler is needed: all chunks are started at once, the pool's budget lets three of them in, in
order, and a lock for each stage makes them follow each other: one is read, one computed, one
written. With a budget of one buffer the same code does one thing after another, for comparison.
Times are without fsync.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import _common
import torch
from _common import say, verify
from rich.text import Text

import nvmeio

STAGES = {"read": "black on cyan", "compute": "black on yellow", "write": "black on green"}


class Span(NamedTuple):
    buffer: int
    doing: str  # read, compute or write
    start: float
    stop: float


def adam(state: torch.Tensor, gradient: torch.Tensor, steps_done: int) -> None:
    """torch's own optimizer, in place on (weights, first moment, second moment)."""
    weights = torch.nn.Parameter(state[0])  # shares the memory
    weights.grad = gradient
    optimizer = torch.optim.Adam([weights], lr=1e-3)
    moments = {"exp_avg": state[1], "exp_avg_sq": state[2]}
    optimizer.state[weights] = {"step": torch.tensor(float(steps_done)), **moments}
    optimizer.step()


class Offloaded:
    """The state of `len(gradients)` chunks in one file."""

    def __init__(self, handle: nvmeio.AioHandle, file: nvmeio.File, gradients: torch.Tensor):
        self._handle, self._file, self._gradients = handle, file, gradients
        self.chunk_bytes = 3 * gradients[0].nbytes

    async def step(self, buffers: int, steps_done: int) -> list[Span]:
        """One optimizer step over all chunks, with so many buffers."""
        spans: list[Span] = []
        numbers: dict[int, int] = {}  # of buffers, by address
        locks = {doing: asyncio.Lock() for doing in STAGES}

        @asynccontextmanager
        async def stage(doing: str, memory: torch.Tensor) -> AsyncIterator[None]:
            # Operations share the drive fairly: three reads at once would all end together, and
            # leave nothing to compute meanwhile. One at a time, they follow each other.
            async with locks[doing]:
                began = time.perf_counter()
                yield
                number = numbers.setdefault(memory.data_ptr(), len(numbers))
                spans.append(Span(number, doing, began, time.perf_counter()))

        async def chunk(n: int) -> None:
            async with pool.take(self.chunk_bytes) as memory:
                state, at = memory.view(torch.float32).view(3, -1), n * self.chunk_bytes
                async with stage("read", memory):
                    await self._handle.async_pread(state, self._file, at)
                async with stage("compute", memory):
                    await asyncio.to_thread(adam, state, self._gradients[n], steps_done)
                async with stage("write", memory):
                    await self._handle.async_pwrite(state, self._file, at)

        with nvmeio.PinnedPool(buffers * self.chunk_bytes) as pool:
            await asyncio.gather(*map(chunk, range(len(self._gradients))))
        return spans


def show(title: str, spans: list[Span]) -> None:
    """Where the time went, and the first half of it as a picture: a line for each buffer."""
    start, stop = min(span.start for span in spans), max(span.stop for span in spans)
    busy = {doing: _common.busy_s([s[2:] for s in spans if s.doing == doing]) for doing in STAGES}
    times = ", ".join(f"{doing} {busy_s:.2f}" for doing, busy_s in busy.items())
    overlapped_s = sum(busy.values()) - _common.busy_s([span[2:] for span in spans])
    say(title, f"{stop - start:.2f} s: {times}, overlapped {overlapped_s:.2f}")
    columns = _common.console.width - 16
    column_s = (stop - start) / 2 / columns
    for buffer in range(max(span.buffer for span in spans) + 1):
        line = Text(f"{f'buffer {buffer}':>12}  ")
        for column in range(columns):
            now = start + (column + 0.5) * column_s
            here = (s.doing for s in spans if s.buffer == buffer and s.start <= now < s.stop)
            doing = next(here, "")
            line.append(doing[:1] or "·", STAGES.get(doing, "dim"))
        _common.console.print(line)


async def main(folder: Path, chunks: int, elements: int) -> None:
    random = torch.Generator().manual_seed(0)
    gradients = torch.randn(chunks, elements, generator=random)
    reference = nvmeio.empty_aligned(chunks, 3, elements).zero_()  # weights and two moments
    reference[:, 0].normal_(generator=random)

    async with nvmeio.AioHandle() as handle:
        with nvmeio.open(folder / "optimizer.state", "w") as file:
            await handle.async_pwrite(reference, file)
            offloaded = Offloaded(handle, file, gradients)
            say("state", f"{reference.nbytes / 1e6:.0f} MB in {chunks} chunks of "
                f"{offloaded.chunk_bytes / 1e6:.1f} MB")  # fmt: skip
            adam(reference[0].clone(), gradients[0], 0)  # torch's first step is slow
            show("one buffer", await offloaded.step(1, steps_done=0))
            show("three", await offloaded.step(3, steps_done=1))
            result = nvmeio.empty_aligned(*reference.shape)
            await handle.async_pread(result, file)
        ways = _common.ways(handle.stats)

    for step in range(2):
        whole = reference.transpose(0, 1).reshape(3, -1)
        adam(whole, gradients.view(-1), step)
        reference = whole.view(3, chunks, elements).transpose(0, 1)
    verify(torch.equal(result, reference), "the state on the drive equals the one in memory")
    _common.verified(f"two steps on the drive equal two steps in memory, bit for bit; {ways}")


if __name__ == "__main__":
    parser = _common.arguments(__doc__)
    parser.add_argument("--size", type=_common.nbytes, default="512M", help="of the state")
    options = parser.parse_args()
    elements = max(1024, options.size // 24 // 12 // 1024 * 1024)
    with _common.scratch(options.dir, 2 * options.size) as folder:
        _common.run(main(folder, 24, elements))
