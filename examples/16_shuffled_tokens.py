"""A text of tokens on the drive, its samples in random order: a data set for training.

    python examples/16_shuffled_tokens.py --dir /mnt/nvme --size 4G

Each epoch reads samples from all over a file that does not fit into memory. The usual data set maps
the file (np.memmap) and copies each sample out of it: one page fault after the other, each waiting
for the drive. `nvmeio.data.Records` reads a batch as one operation. Here are, over the same samples
in the same order, each with a file that the page cache has forgotten:

- a loop over the map, and a `DataLoader` with workers over it;
- the same loader over `Records`, which its workers open themselves;
- a loop with the batches prefetched, with no worker at all.

The map's page faults read what lies around each sample as well, so a file that fits into memory is
all there after a while, and the map as fast as memory. That is not what is compared.
"""

import asyncio
import functools
import os
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import _common
import torch
from _common import say, verify
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

import nvmeio
from nvmeio.data import Records

try:
    import numpy
except ImportError:  # torch maps files too
    numpy = None

CONTEXT = 1024  # tokens that a sample begins with; it has one more, to be predicted
BATCH = 64


class Mapped(Dataset):
    """The usual way."""

    def __init__(self, path: Path, samples: int) -> None:
        self.path, self.samples = path, samples
        self.tokens = None

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, number: int) -> torch.Tensor:
        if self.tokens is None:  # in each worker
            self.tokens = map_file(self.path, self.samples * CONTEXT + 1)
        first = number * CONTEXT
        # A copy, as in any training loop: what is mapped is read when it is touched.
        return self.tokens[first : first + CONTEXT + 1].clone()


def map_file(path: Path, tokens: int) -> torch.Tensor:
    if numpy is None:
        return torch.from_file(str(path), shared=True, size=tokens, dtype=torch.int16)
    return torch.from_numpy(numpy.memmap(path, numpy.int16, mode="r+", shape=(tokens,)))


class InOrder(Sampler):
    """Numbers that were shuffled before, so that all ways read the same."""

    def __init__(self, order: torch.Tensor) -> None:
        self.order = order

    def __iter__(self):
        return iter(self.order.tolist())

    def __len__(self) -> int:
        return len(self.order)


def open_records(path: Path) -> Records:
    """Samples overlap by the token that one predicts last and the next begins with."""
    return Records(path, torch.int16, CONTEXT + 1, stride_bytes=2 * CONTEXT)


def write_tokens(path: Path, samples: int) -> None:
    generator = torch.Generator().manual_seed(1)
    at = 0
    with nvmeio.AioHandle() as handle, nvmeio.open(path, "w") as file:
        for first in range(0, samples, 8192):
            count = CONTEXT * min(8192, samples - first) + (first + 8192 >= samples)
            part = torch.randint(0, 32000, (count,), dtype=torch.int16, generator=generator)
            at += handle.sync_pwrite(part, file, at)
        handle.sync_fsync(file)


def forget(path: Path) -> None:
    """Out of the page cache; pages that some process has mapped stay there."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def digest(batch: torch.Tensor, place: int) -> int:
    """Of what there is, and of its order."""
    first = batch[:, 0].long() * torch.arange(1, len(batch) + 1)
    return (int(batch.sum()) + int(first.sum())) * (2 * place + 1)


def consume(batches: Iterable[torch.Tensor]) -> int:
    return sum(digest(batch, place) for place, batch in enumerate(batches))


def loader(dataset: Dataset, order: torch.Tensor, workers: int, whole: bool) -> DataLoader:
    """Of batches; with `whole` the data set gives one as one tensor."""
    batches = BatchSampler(InOrder(order), BATCH, drop_last=False)
    if whole:
        return DataLoader(dataset, batch_size=None, sampler=batches, num_workers=workers)
    return DataLoader(dataset, batch_sampler=batches, num_workers=workers)


def main(folder: Path, samples: int, epoch: int, workers: int) -> None:
    path = folder / "tokens"
    write_tokens(path, samples)
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(2))[:epoch]
    say("file", f"{samples} samples of {CONTEXT} tokens, {path.stat().st_size / 1e6:.0f} MB")
    say("read", f"{len(order)} of them, in random order, {BATCH} to a batch")
    rates: dict[str, float] = {}
    digests: list[int] = []

    def measure(name: str, run: Callable[[], int]) -> None:
        forget(path)
        began = time.perf_counter()
        digests.append(run())
        rates[name] = len(order) / (time.perf_counter() - began)

    with open_records(path) as records:

        def loop() -> int:
            mapped = Mapped(path, samples)  # unmapped with the loop, or the next would not be cold
            parts = (order[at : at + BATCH] for at in range(0, len(order), BATCH))
            return consume(torch.stack([mapped[n] for n in part.tolist()]) for part in parts)

        async def prefetched() -> int:
            total = place = 0
            async with records.prefetch(order.split(BATCH), depth=4) as batches:
                async for batch in batches:
                    total += digest(batch, place)
                    place += 1
            return total

        records[[0]]  # opened before time is taken
        measure("map, a loop", loop)
        measure("nvmeio, prefetched", lambda: asyncio.run(prefetched()))
        for name, dataset in (("map", Mapped(path, samples)), ("nvmeio", records)):
            batches = loader(dataset, order, workers, whole=dataset is records)
            measure(f"{name}, {workers} workers", functools.partial(consume, batches))
    what = "torch.from_file" if numpy is None else "np.memmap"
    for name, rate in rates.items():
        say(name.split(",")[0], f"{name.split(', ')[1]}: {rate:,.0f} samples/s")
    gain = rates["nvmeio, prefetched"] / rates["map, a loop"]
    beside = rates[f"nvmeio, {workers} workers"] / rates[f"map, {workers} workers"]
    say("gain", f"{gain:.1f} times {what} in a loop, cold and shuffled; with workers {beside:.1f}")
    verify(len(set(digests)) == 1, "all ways read the same tokens in the same order")
    _common.verified("each way read the same samples in the same order")


if __name__ == "__main__":
    parser = _common.arguments(__doc__)
    parser.add_argument("--size", type=_common.nbytes, default="1G", help="of the file")
    parser.add_argument("--epoch", type=int, default=20_000, help="samples to read, at most")
    parser.add_argument("--workers", type=int, default=2, help="of the loaders")
    options = parser.parse_args()
    # Python warns of forking where there are threads; torch's loaders do, and nvmeio's stay here.
    warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)
    torch.set_num_threads(1)  # there is next to nothing to compute
    samples = options.size // (2 * CONTEXT)
    if samples < BATCH or options.epoch < BATCH:
        parser.error(f"{BATCH} samples of {2 * CONTEXT} bytes at least")
    with _common.scratch(options.dir, options.size) as folder:
        main(folder, samples, options.epoch, options.workers)
