"""An embedding table on the drive, trained with sparse updates: gather, compute, scatter.

    python examples/15_embedding_beyond_memory.py --dir /mnt/nvme
    python examples/15_embedding_beyond_memory.py --dir /mnt/nvme --size 8G --no-memory

Each record of the table is a row of the embedding and, beside it, what Adagrad keeps of that row:
together a page, so that they are written without the page cache. A batch needs few of the rows.
While one is computed on, those of the next are read, and those of the last are written. Rows that
the next batch shares with these two come from memory: in the file they are about to change.

The same is then trained in memory, by `torch.nn.EmbeddingBag` and torch's own sparse Adagrad, and
every bit of table and optimizer state compared; and once more without anything at once.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import _common
import torch
from _common import say, verify

import nvmeio
from nvmeio.data import Records

torch.sparse.check_sparse_tensor_invariants.disable()  # torch warns where nobody has chosen

WIDTH = 512  # floats of a row; as many of Adagrad: a page of 4096 bytes
BAGS, WORDS = 256, 8  # in each batch


class Run(NamedTuple):
    losses: list[float]
    seconds: float
    waited_s: float = 0.0


class Model(torch.nn.Module):
    """What stands on the table, and stays in memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1)
        )

    def loss(self, words: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        bags = torch.nn.functional.embedding_bag(words, table, mode="mean", sparse=True)
        return self.layers(bags).square().mean()


def make_batches(rows: int, steps: int) -> list[torch.Tensor]:
    """Word numbers as in a text: few words often, most of them seldom."""
    generator = torch.Generator().manual_seed(2)
    shape = (steps, BAGS, WORDS)
    spread = torch.rand(shape, generator=generator, dtype=torch.float64)
    return list((rows**spread).long().sub_(1).mul_(7919).remainder_(rows).unbind(0))


def adagrad(rows: torch.Tensor, sums: torch.Tensor) -> torch.optim.Adagrad:
    """torch's own, in place on a table in memory, whole or in part; both of shape (N, WIDTH)."""
    weights = torch.nn.Parameter(rows)  # shares the memory
    optimizer = torch.optim.Adagrad([weights], lr=0.05)
    optimizer.state[weights] = {"step": torch.tensor(0.0), "sum": sums}
    return optimizer


def sparse_step(model: Model, words: torch.Tensor, optimizer: torch.optim.Adagrad) -> float:
    """One step: Adagrad on the rows that the words name, gradient descent on the model."""
    (weights,) = optimizer.param_groups[0]["params"]
    optimizer.zero_grad()
    model.zero_grad()
    loss = model.loss(words, weights)
    loss.backward()
    optimizer.step()
    torch.optim.SGD(model.parameters(), lr=0.05).step()
    return float(loss.detach())


async def changing(
    records: Records, wanted: Sequence[torch.Tensor], beside: bool, waits: list[float]
) -> AsyncIterator[torch.Tensor]:
    """The records of each batch, as the batches before it left them, to be changed in place.

    Args:
        records: The table.
        wanted: For each batch the numbers of its records, sorted, each once.
        beside: Read and write beside the caller's work; else one after the other.
        waits: Gets the seconds that were waited.
    """
    # Memory that is used again and again: new tensors of this size cost more than the reads.
    arriving, *rooms = torch.empty(4, max(map(len, wanted)), 2, WIDTH)
    none = torch.empty(0, dtype=torch.int64)
    # What the file does not have yet: records of the last two batches, the newest first.
    recent = [(none, rooms[0][:0])] * 2
    writing: nvmeio.Operation | None = None

    async def waited(awaitable: Awaitable[Any]) -> Any:
        began = time.perf_counter()
        value = await awaitable
        waits.append(time.perf_counter() - began)
        return value

    def begin(numbers: torch.Tensor) -> tuple[torch.Tensor, nvmeio.data.Gather]:
        known = torch.isin(numbers, torch.cat([each for each, _ in recent]))
        unknown = numbers[~known]
        return known, records.gather(unknown, out=arriving[: len(unknown)])

    known, reading = begin(wanted[0])
    for number, numbers in enumerate(wanted):
        rows = rooms[number % 3][: len(numbers)]
        rows[~known] = await waited(reading)
        for before, left in reversed(recent):  # the newest last
            here = torch.isin(numbers, before)
            rows[here] = left[torch.searchsorted(before, numbers[here])]
        recent = [(numbers, rows), recent[0]]
        last = number + 1 == len(wanted)
        if beside and not last:
            known, reading = begin(wanted[number + 1])
        yield rows
        if writing is not None:
            await waited(writing)
        writing = records.scatter(numbers, rows)
        if not beside:
            await waited(writing)
            if not last:
                recent = [(none, rows[:0])] * 2
                known, reading = begin(wanted[number + 1])
    if writing is not None:
        await waited(writing)


async def train_on_drive(records: Records, batches: list[torch.Tensor], beside: bool) -> Run:
    model, losses, waits = Model(), [], []
    unique = [torch.unique(words, return_inverse=True) for words in batches]
    # Weights and sums apart, each contiguous: torch's sparse Adagrad takes no others.
    apart = torch.empty(2, max(len(numbers) for numbers, _ in unique), WIDTH)
    began = time.perf_counter()
    places = iter(inverse for _, inverse in unique)
    async for rows in changing(records, [numbers for numbers, _ in unique], beside, waits):
        weights, sums = parts = apart[:, : len(rows)].copy_(rows.transpose(0, 1))
        step = asyncio.to_thread(sparse_step, model, next(places), adagrad(weights, sums))
        losses.append(await step)
        rows.copy_(parts.transpose(0, 1))
    return Run(losses, time.perf_counter() - began, sum(waits))


def train_in_memory(table: torch.Tensor, batches: list[torch.Tensor]) -> Run:
    """On all of it, (2, rows, WIDTH), in place."""
    model, optimizer = Model(), adagrad(table[0], table[1])
    began = time.perf_counter()
    losses = [sparse_step(model, words, optimizer) for words in batches]
    return Run(losses, time.perf_counter() - began)


def initial(count: int) -> Iterator[tuple[range, torch.Tensor]]:
    """The records that training begins with, some at a time."""
    generator = torch.Generator().manual_seed(3)
    for first in range(0, count, 4096):
        numbers = range(first, min(first + 4096, count))
        rows = torch.zeros(len(numbers), 2, WIDTH)
        rows[:, 0].normal_(generator=generator)
        yield numbers, rows


async def fill(records: Records) -> None:
    for numbers, rows in initial(len(records)):
        await records.scatter(numbers, rows)


async def is_same(records: Records, table: torch.Tensor) -> bool:
    parts = torch.arange(len(records)).split(4096)
    async with records.prefetch(parts) as batches:
        at = iter(parts)
        async for rows in batches:
            numbers = next(at)
            if not torch.equal(rows[:, 0], table[0, numbers]):
                return False
            if not torch.equal(rows[:, 1], table[1, numbers]):
                return False
    return True


async def main(folder: Path, count: int, steps: int, memory: bool) -> None:
    batches = make_batches(count, steps)
    path = folder / "table"
    async with Records.create(path, count, torch.float32, (2, WIDTH)) as records:
        await fill(records)
        await train_on_drive(records, batches[:2], beside=True)  # torch warms up
        await fill(records)
        one_by_one = await train_on_drive(records, batches, beside=False)
        await fill(records)
        before = records.handle.stats
        run = await train_on_drive(records, batches, beside=True)
        moved = records.handle.stats
        rows = [len(torch.unique(words)) for words in batches]
        held = 4 * max(rows) * records.record_bytes
        say("table", f"{count} rows of 4 KiB, {path.stat().st_size / 1e6:.0f} MB on the drive")
        say("batches", f"{steps}, of {min(rows)} to {max(rows)} different rows each")
        say("in memory", f"{held / 1e6:.0f} MB of rows at most, whatever the size of the table")
        say(
            "on the drive",
            f"{1000 * run.seconds / steps:.1f} ms a step, {1000 * run.waited_s / steps:.1f} of "
            f"that waiting; {(moved.bytes_read - before.bytes_read) / 1e6:.0f} MB read, "
            f"{(moved.bytes_written - before.bytes_written) / 1e6:.0f} MB written",
        )
        say(
            "one by one",
            f"{1000 * one_by_one.seconds / steps:.1f} ms a step, "
            f"{1000 * one_by_one.waited_s / steps:.1f} of that waiting: "
            f"{one_by_one.seconds / run.seconds:.2f} times as long",
        )
        verify(run.losses == one_by_one.losses, "both runs have the same losses")
        if not memory:
            _common.verified("the losses are those of reading and writing one after the other")
            return
        table = torch.empty(2, count, WIDTH)
        for numbers, initially in initial(count):
            table[:, numbers.start : numbers.stop] = initially.transpose(0, 1)
        whole = train_in_memory(table, batches)
        say("all of it", f"{1000 * whole.seconds / steps:.1f} ms a step with the table in memory")
        verify(run.losses == whole.losses, "the losses are those of the table in memory")
        verify(await is_same(records, table), "each row is that of the table in memory")
    _common.verified("weights and Adagrad's sums are those of a table in memory, bit for bit")


if __name__ == "__main__":
    parser = _common.arguments(__doc__)
    parser.add_argument("--size", type=_common.nbytes, default="512M", help="of the table")
    parser.add_argument("--steps", type=int, default=40, help="batches to train on")
    parser.add_argument(
        "--no-memory", action="store_true", help="leave out the comparison, which needs --size"
    )
    options = parser.parse_args()
    if options.size < 4096 or options.steps < 1:
        parser.error("at least one row of 4K, and one step")
    with _common.scratch(options.dir, options.size) as folder:
        count = options.size // (8 * WIDTH)
        _common.run(main(folder, count, options.steps, not options.no_memory))
