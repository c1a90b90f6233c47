"""How many calls the ten hot ways take: of functions of nvmeio, and of C from within them.

    python benchmarks/calls.py            # count, and compare with benchmarks/calls.json
    python benchmarks/calls.py --check    # the same; status 1 if one grew by more than a tenth
    python benchmarks/calls.py --save     # make these the figures to compare with
    python benchmarks/calls.py --names 20 # and which functions they are

A count of calls (`sys.setprofile`, in all threads) is the same on a busy machine, which a clock's
figure is not: a change that makes a hot way longer is seen before it is merged. Each way runs once
to warm up and five times to be counted; the least counts, since threads that wait for each other
look again now and then. Counts are of one version of Python and torch, and of one engine: those of
others are not compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import nvmeio
from nvmeio._kv_blocks.store import BlockStore
from nvmeio.inference.spilling import spill
from nvmeio.offload import SwappedOptimizer

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "benchmarks" / "calls.json"
OURS = str(Path(nvmeio.__file__).parent)
MOST = 1.1  # times the figure before
TURNS = 5
READS = 64
TENSORS = 200
LAYERS = 12
BLOCK = 4096

# A callable, and how many reads, tensors or layers one call of it moves.
Turn = tuple[Callable[[], object], int]
Way = Callable[[Path], AbstractContextManager[Turn]]
calls: Counter[str] = Counter()
counting = False


def note(frame: FrameType, event: str, what: Any) -> None:
    """For `sys.setprofile`."""
    if not counting or event not in ("call", "c_call"):
        return
    name = frame.f_code.co_filename
    if name.startswith(OURS):
        where = name[len(OURS) + 1 :]
        called = getattr(what, "__qualname__", frame.f_code.co_qualname)
        calls[f"{where}: {called}"] += 1


def reads(how: str) -> Way:
    """Reads of 4 KiB by one coroutine, each awaited."""

    @contextmanager
    def way(folder: Path) -> Iterator[Turn]:
        path = folder / "file"
        path.write_bytes(bytes(READS * BLOCK))
        memory = nvmeio.empty_aligned(BLOCK, dtype=torch.uint8)
        with nvmeio.AioHandle() as handle, nvmeio.open(path) as file, handle.open(path) as bound:

            async def main() -> None:
                for number in range(READS):
                    if how == "handle.open":
                        await bound.pread(memory, number * BLOCK)
                    else:
                        await handle.async_pread(
                            memory, file if how == "nvmeio.open" else path, number * BLOCK
                        )

            loop = asyncio.new_event_loop()
            yield lambda: loop.run_until_complete(main()), READS
            loop.close()

    return way


@contextmanager
def batch(folder: Path) -> Iterator[Turn]:
    """Items of a batch of reads."""
    path = folder / "file"
    path.write_bytes(bytes(TENSORS * BLOCK))
    tensors = [torch.empty(BLOCK, dtype=torch.uint8) for _ in range(TENSORS)]
    with nvmeio.AioHandle() as handle, nvmeio.open(path) as file:
        yield lambda: handle.sync_pread_batch(tensors, file), TENSORS


@contextmanager
def gather(folder: Path) -> Iterator[Turn]:
    """A gather of 1,000 rows."""
    path = folder / "file"
    path.write_bytes(bytes(1000 * 512))
    out, offsets = torch.empty(1000, 512, dtype=torch.uint8), torch.arange(1000) * 512
    with nvmeio.AioHandle() as handle, nvmeio.open(path) as file:
        yield lambda: handle.sync_gather(out, file, file_offsets=offsets), 1


def state() -> dict[str, torch.Tensor]:
    """Tensors of 4 KiB."""
    return {f"tensor.{number}": torch.full((1024,), float(number)) for number in range(TENSORS)}


@contextmanager
def save(folder: Path) -> Iterator[Turn]:
    """Tensors of a save."""
    tensors = state()
    yield lambda: nvmeio.save(tensors, folder / "saved.pt"), TENSORS


@contextmanager
def load(folder: Path) -> Iterator[Turn]:
    """Tensors of a load."""
    nvmeio.save(state(), folder / "saved.pt")
    yield lambda: nvmeio.load(folder / "saved.pt"), TENSORS


@contextmanager
def streamed_layer(folder: Path) -> Iterator[Turn]:
    """Layers of 256 by 256, streamed with a window of two."""
    layers = [torch.nn.Linear(256, 256) for _ in range(LAYERS)]
    rows = torch.zeros(1, 256)

    def forward() -> None:
        with torch.no_grad():
            here = rows
            for layer in layers:
                here = layer(here)

    with closing(spill(layers, folder, window=2)):
        yield forward, LAYERS


@contextmanager
def swapped_step(folder: Path) -> Iterator[Turn]:
    """Tensors of a step of AdamW whose state is on the drive: eight, of 64 KiB."""
    parameters = [torch.nn.Parameter(torch.ones(1 << 14)) for _ in range(8)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = SwappedOptimizer(
        torch.optim.AdamW, parameters, swap_dir=folder, subgroup_bytes=128 << 10, lr=0.1
    )
    with optimizer:
        yield optimizer.step, len(parameters)


@contextmanager
def kv_block(folder: Path) -> Iterator[Turn]:
    """Blocks of 64 KiB, stored and loaded 16 at a time."""
    blocks = [torch.zeros(64 << 10, dtype=torch.uint8) for _ in range(16)]
    names = iter(range(1 << 30))
    with BlockStore(folder, "calls", 64 << 10, 64 << 20) as store:

        def turn() -> None:
            keys = [next(names).to_bytes(8, "little") for _ in blocks]
            assert all(store.store(keys, blocks)) and all(store.load(keys, blocks))

        yield turn, len(blocks)


WAYS: dict[str, Way] = {
    "a read of a file of nvmeio.open": reads("nvmeio.open"),
    "a read of a file of handle.open": reads("handle.open"),
    "a read by path": reads("path"),
    "an item of a batch": batch,
    "a gather of 1,000 rows": gather,
    "a saved tensor": save,
    "a loaded tensor": load,
    "a streamed layer": streamed_layer,
    "a swapped tensor's step": swapped_step,
    "a KV block, stored and loaded": kv_block,
}


def counted(way: Way, names: int) -> float:
    """Calls for one of what a way moves."""
    global counting
    found = []
    with (
        tempfile.TemporaryDirectory(prefix="nvmeio-calls-", dir=ROOT) as made,
        way(Path(made)) as (turn, number),
    ):
        turn()
        for _ in range(TURNS):
            calls.clear()
            sys.setprofile(note)
            counting = True
            try:
                turn()
            finally:
                counting = False
                sys.setprofile(None)
            found.append((calls.total() / number, dict(calls)))
    least, of = min(found, key=lambda each: each[0])
    for name, times in sorted(of.items(), key=lambda each: -each[1])[:names]:
        print(f"  {times / number:8.1f}  {name}")
    return round(least, 1)


def conditions() -> str:
    """Python, torch and engine: counts of others are not compared."""
    with nvmeio.AioHandle() as handle:
        engine = handle.engine
    python = ".".join(map(str, sys.version_info[:2]))
    return f"Python {python}, torch {'.'.join(torch.__version__.split('.')[:2])}, {engine}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="fail if one grew by over a tenth")
    parser.add_argument("--save", action="store_true", help="make these the figures before")
    parser.add_argument("--names", type=int, default=0, help="list so many functions of each")
    parser.add_argument("--only", choices=WAYS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    threading.setprofile(note)  # of the threads that begin from now on
    version = conditions()
    saved = json.loads(FIGURES.read_text()) if FIGURES.exists() else {"calls": {}}
    same = saved.get("version") == version
    if not same and not arguments.save:
        print(f"counted with {saved.get('version')}, and here is {version}: not compared")
    found, grown = {}, []
    for name in [arguments.only] if arguments.only else WAYS:
        found[name] = counted(WAYS[name], arguments.names)
        before = saved["calls"].get(name) if same else None
        print(f"{found[name]:8.1f} calls: {name}" + (f" ({before} before)" if before else ""))
        if before and found[name] > MOST * before:
            grown.append(f"{name}: {before} calls before, {found[name]} now")
    if arguments.save:
        FIGURES.write_text(json.dumps({"version": version, "calls": found}, indent=1) + "\n")
    elif arguments.check and grown:
        raise SystemExit(
            "these hot ways take over a tenth more calls than they did:\n  "
            + "\n  ".join(grown)
            + "\nMake them shorter, or save the new figures and say why: benchmarks/calls.py --save"
        )


if __name__ == "__main__":
    main()
