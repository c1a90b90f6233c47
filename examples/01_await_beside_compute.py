"""Tensors to and from this drive, awaited beside compute: nvmeio's main job, on real input.

    python examples/01_await_beside_compute.py                       # 2 GiB, in this folder
    python examples/01_await_beside_compute.py --size 512M --dir /mnt/nvme --json

The weights of a transformer are written to a file, and the model is then trained for one step with
only two layers of it in memory: while torch computes on one (forward, later recompute and backward)
the next is read into the other buffer. Every tensor that arrives is compared with what was written.

The same work is done again with Python's own I/O (open, write, fsync, readinto): the same loop, the
same buffers, also one layer ahead, in a thread. Only the transfers differ.

And once more with all layers in memory and nothing to read, which is what the other two would have
to reach.

About the figures: GB is 10^9 bytes. Each way writes a new file of its own, and the clock stops
after fsync. (Python's is written twice and the second time counts: the page cache has memory at
hand then, which a virtual machine may have to ask its host for.) Before it is read, a file is
dropped from the page cache (posix_fadvise), and in training each layer again once it is used, as
if the model did not fit into memory. So all reads are cold for this kernel; a drive or a hypervisor
may have a cache of its own. Compute runs in a thread (asyncio.to_thread), which keeps the event
loop free, on all cores but one. Its batch is chosen so that a layer's forward pass takes about as
long as reading the layer. One run each: `make bench` measures with repeats.
"""

from __future__ import annotations

import asyncio
import ctypes
import io
import json
import math
import mmap
import os
import platform
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import _common
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn
from torch.func import functional_call

import nvmeio

PAGE = 4096
NO_DIRECT = (
    "[yellow]no direct I/O[/].\nnvmeio too goes through the page cache here, and on a file "
    "system in memory\nnothing is cold. `nvmeio report --dir` tells more.\n"
)
Weights = dict[str, torch.Tensor]  # one layer's, by name


class Model:
    """A stack of `torch.nn.TransformerEncoderLayer`, and where each weight lies in the file.

    Every layer is a window of one random vector, each window a little further on. No two pages of
    the file are alike, then, and a layer is checked by comparing it with memory: no checksum, and
    no time spent on making the same random numbers again.
    """

    def __init__(self, size: int, layers: int) -> None:
        wanted = size / layers / 4  # float32 weights in a layer
        width = max(64, round(math.sqrt(wanted / 12) / 64) * 64)
        hidden = max(64, math.ceil((wanted - 4 * width**2) / (2 * width) / 64) * 64)
        self.layers, self.width = layers, width
        self.block = nn.TransformerEncoderLayer(
            width,
            nhead=width // 64,
            dim_feedforward=hidden,
            dropout=0.0,
            batch_first=True,
            norm_first=True,
            bias=False,
            device="meta",  # it has no weights of its own: they come from the file
        )
        self.shapes = {name: weight.shape for name, weight in self.block.named_parameters()}
        self.offsets, self.layer_bytes = {}, 0
        for name, shape in self.shapes.items():  # each tensor begins on a page
            self.offsets[name] = self.layer_bytes
            self.layer_bytes += -(-shape.numel() * 4 // PAGE) * PAGE
        self.nbytes = layers * sum(shape.numel() * 4 for shape in self.shapes.values())
        self._step = 1031 * PAGE // 4
        self._vector = nvmeio.empty_aligned(self.layer_bytes // 4 + layers * self._step)
        self._vector.normal_(std=0.02, generator=torch.Generator().manual_seed(1))

    def weights_in(self, buffer: torch.Tensor) -> Weights:
        """A layer's weights as views of a buffer."""
        return {
            name: buffer[self.offsets[name] // 4 :][: shape.numel()].view(shape)
            for name, shape in self.shapes.items()
        }

    def written(self, layer: int) -> Weights:
        """The layer as it is written, and must come back."""
        return self.weights_in(self._vector[layer * self._step :])


class TrainingStep:
    """Forward through all layers, then backward, with one layer's weights at a time.

    Of the forward pass only each layer's input is kept; backward computes the layer again
    (activation checkpointing). The last layer is visited once.
    """

    def __init__(self, model: Model, tokens: int) -> None:
        self.visits = [(layer, self._forward) for layer in range(model.layers - 1)]
        self.visits += [(layer, self._backward) for layer in reversed(range(model.layers))]
        self._model = model
        self._inputs = [torch.randn(1, tokens, model.width)]
        self._upstream: torch.Tensor | None = None  # the gradient from the layer above
        self.loss = self.squared_norm = 0.0

    def check(self, layer: int, weights: Weights) -> None:
        for name, written in self._model.written(layer).items():
            if not torch.equal(weights[name], written):
                where = f"{name} of layer {layer}"
                raise nvmeio.IntegrityError(
                    f"{where} is not what was written", expected=written, found=weights[name]
                )

    def _forward(self, layer: int, weights: Weights) -> None:
        with torch.no_grad():
            output = functional_call(self._model.block, weights, (self._inputs[layer],))
        self._inputs.append(output)

    def _backward(self, layer: int, weights: Weights) -> None:
        x = self._inputs.pop().requires_grad_()
        leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        output = functional_call(self._model.block, leaves, (x,))
        if self._upstream is None:
            loss = output.square().mean()
            loss.backward()
            self.loss = loss.item()
        else:
            output.backward(self._upstream)
        self._upstream = x.grad
        # An optimizer would come here: see 04_offload_pipeline.py.
        self.squared_norm += sum(leaf.grad.square().sum().item() for leaf in leaves.values())


Tensors = list[tuple[int, torch.Tensor]]  # with their offsets in the file


class Nvmeio:
    """All tensors of a layer at once; each transfer starts when it is called."""

    name = "nvmeio"

    def __init__(self, handle: nvmeio.AioHandle, file: nvmeio.File) -> None:
        self._handle, self._file = handle, file

    async def write(self, tensors: Tensors) -> None:
        await asyncio.gather(*(self._handle.async_pwrite(t, self._file, at) for at, t in tensors))

    async def read(self, tensors: Tensors) -> None:
        await asyncio.gather(*(self._handle.async_pread(t, self._file, at) for at, t in tensors))

    async def fsync(self) -> None:
        await self._handle.fsync(self._file)


class Python:
    """An unbuffered file object (which spares it a copy) in a thread, tensor after tensor."""

    name = "Python"

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self._lock = asyncio.Lock()  # a file object has one position

    async def write(self, tensors: Tensors) -> None:
        async with self._lock:
            await asyncio.to_thread(self._transfer, self._file.write, tensors)

    async def read(self, tensors: Tensors) -> None:
        async with self._lock:
            await asyncio.to_thread(self._transfer, self._file.readinto, tensors)

    async def fsync(self) -> None:
        await asyncio.to_thread(os.fsync, self._file.fileno())

    def _transfer(self, move: Callable[[memoryview], int], tensors: Tensors) -> None:
        for at, tensor in tensors:
            self._file.seek(at)
            # The tensor's own memory, with no need of NumPy.
            rest = memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))
            while rest:
                moved = move(rest)
                if not moved:
                    raise EOFError(f"the file ends before byte {at + tensor.nbytes}")
                rest = rest[moved:]


class InMemory:
    """Nothing to read: the layers are there."""

    name = "in memory"

    async def read(self, tensors: Tensors) -> None:
        pass


async def one_ahead(
    count: int,
    transfer: Callable[[int], Awaitable[None]],
    compute: Callable[[int], None] | None = None,
) -> float:
    """Transfers 0, 1, 2, …, the next one always under way; seconds spent waiting for them.

    While 1 is computed upon, 2 is on its way; it went off once 0 was done with. So two buffers do.
    """
    waiting_s = 0.0
    under_way = [asyncio.ensure_future(transfer(0))]
    try:
        for index in range(count):
            if index + 1 < count:
                under_way.append(asyncio.ensure_future(transfer(index + 1)))
            began = time.perf_counter()
            await under_way[0]
            waiting_s += time.perf_counter() - began
            del under_way[0]
            if compute is not None:
                await asyncio.to_thread(compute, index)
    finally:  # after an error or Ctrl-C there are some
        await stop(*under_way)
    return waiting_s


async def stop(*futures: asyncio.Future[None]) -> None:
    """Cancel, and wait until that has taken effect."""
    for future in futures:
        future.cancel()
    await asyncio.gather(*futures, return_exceptions=True)


async def record_lag(lags_s: list[float]) -> None:
    """How late the event loop is, once a millisecond, until it is cancelled."""
    while True:
        began = time.perf_counter()
        await asyncio.sleep(0.001)
        lags_s.append(time.perf_counter() - began - 0.001)


@dataclass
class Figures:
    """What was measured of one way: seconds, bytes, shares; lag in milliseconds."""

    write_s: float = 0.0
    read_s: float = 0.0
    read_cpu_s: float = 0.0
    cached_before_read: float = 0.0
    train_s: float = 0.0
    train_bytes: int = 0
    computing_s: float = 0.0
    comparing_s: float = 0.0
    reading_s: float = 0.0
    overlapped_s: float = 0.0
    waiting_s: float = 0.0
    lag_ms: dict[str, float] = field(default_factory=dict)
    loss: float = 0.0
    gradient_norm: float = 0.0


class Measurement:
    """The phases, each for one way; both ways use the same two buffers."""

    def __init__(self, model: Model, progress: Progress) -> None:
        self._model, self._progress = model, progress
        self._buffers = [
            model.weights_in(nvmeio.empty_aligned(model.layer_bytes // 4)) for _ in range(2)
        ]

    def _placed(self, layer: int, weights: Weights) -> Tensors:
        start = layer * self._model.layer_bytes
        return [(start + self._model.offsets[name], weight) for name, weight in weights.items()]

    async def write(self, way: Nvmeio | Python, figures: Figures) -> None:
        with self._bar(way, "write", self._model.layers) as layer_done:

            async def write(layer: int) -> None:
                await way.write(self._placed(layer, self._model.written(layer)))
                layer_done()

            began = time.perf_counter()
            await one_ahead(self._model.layers, write)
            await way.fsync()
            figures.write_s = time.perf_counter() - began

    async def read(self, way: Nvmeio | Python, path: Path, figures: Figures) -> None:
        with self._bar(way, "read", self._model.layers) as layer_done:

            async def read(layer: int) -> None:
                await way.read(self._placed(layer, self._buffers[layer % 2]))
                layer_done()

            figures.cached_before_read = drop_from_page_cache(path)
            began, cpu_began = time.perf_counter(), time.process_time()
            await one_ahead(self._model.layers, read)
            figures.read_s = time.perf_counter() - began
            figures.read_cpu_s = time.process_time() - cpu_began

    async def train(
        self, way: Nvmeio | Python | InMemory, path: Path | None, tokens: int, figures: Figures
    ) -> None:
        torch.manual_seed(2)  # both ways get the same batch
        step = TrainingStep(self._model, tokens)
        visits = step.visits
        reading, comparing, computing = [], [], []  # (from, to) of each
        lags_s: list[float] = []
        with self._bar(way, "train", len(visits)) as visit_done:

            async def read(visit: int) -> None:
                began = time.perf_counter()
                await way.read(self._placed(visits[visit][0], self._buffers[visit % 2]))
                reading.append((began, time.perf_counter()))

            def compute(visit: int) -> None:
                layer, work = visits[visit]
                weights = self._buffers[visit % 2] if path else self._model.written(layer)
                began = time.perf_counter()
                if path:
                    step.check(layer, weights)
                compared = time.perf_counter()
                work(layer, weights)
                comparing.append((began, compared))
                computing.append((compared, time.perf_counter()))
                if path:  # or backward would find its layers in the page cache
                    self._forget(path, layer)
                visit_done()

            if path:
                drop_from_page_cache(path)
            clock = asyncio.ensure_future(record_lag(lags_s))
            began = time.perf_counter()
            try:
                figures.waiting_s = await one_ahead(len(visits), read, compute)
                figures.train_s = time.perf_counter() - began
            finally:
                await stop(clock)
        busy, working = _common.busy_s, computing + comparing
        figures.train_bytes = len(visits) * self._model.nbytes // self._model.layers
        figures.computing_s, figures.comparing_s = busy(computing), busy(comparing)
        figures.reading_s = busy(reading)
        figures.overlapped_s = busy(reading) + busy(working) - busy(reading + working)
        figures.lag_ms = percentiles_ms(lags_s)
        figures.loss, figures.gradient_norm = step.loss, math.sqrt(step.squared_norm)

    def _forget(self, path: Path, layer: int) -> None:
        size = self._model.layer_bytes
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), layer * size, size, os.POSIX_FADV_DONTNEED)

    def tokens_for(self, layer_s: float) -> int:
        """The batch whose forward pass through a layer takes about that long."""
        tokens = 1
        while True:
            step, times_s = TrainingStep(self._model, tokens), []
            layer, forward = step.visits[0]
            for _ in range(3):
                began = time.perf_counter()
                forward(layer, self._model.written(layer))
                times_s.append(time.perf_counter() - began)
            if min(times_s) >= 0.75 * layer_s or tokens >= 8192:
                for layer, backward in step.visits[-2:]:  # torch's first ones are slow: not here
                    backward(layer, self._model.written(layer))
                return tokens
            tokens *= 2

    @contextmanager
    def _bar(self, way: Nvmeio | Python | InMemory, what: str, layers: int) -> Any:
        task = self._progress.add_task(f"{what}, {way.name}", total=layers)
        yield lambda: self._progress.advance(task)


async def measure(model: Model, folder: Path, progress: Progress) -> dict[str, Any]:
    """All phases, the two ways in turn."""
    ours, theirs = folder / "nvmeio.weights", folder / "python.weights"
    measurement, a, b, c = Measurement(model, progress), Figures(), Figures(), Figures()
    async with nvmeio.AioHandle() as handle:
        with nvmeio.open(ours, "w") as file, io.FileIO(theirs, "w+") as plain_file:
            way, plain = Nvmeio(handle, file), Python(plain_file)
            await measurement.write(way, a)
            await measurement.write(plain, b)  # so that the page cache has memory at hand
            plain_file.truncate(0)
            await measurement.write(plain, b)
            await measurement.read(way, ours, a)
            await measurement.read(plain, theirs, b)
            tokens = await asyncio.to_thread(measurement.tokens_for, a.read_s / model.layers)
            await measurement.train(InMemory(), None, tokens, c)
            await measurement.train(way, ours, tokens, a)
            await measurement.train(plain, theirs, tokens, b)
            return {
                "versions": f"nvmeio {nvmeio.__version__}, torch {torch.__version__}, "
                f"Python {platform.python_version()}, Linux {platform.release()}",
                "event_loop": type(asyncio.get_running_loop()).__module__.split(".")[0],
                "engine": handle.engine,
                "cores": len(os.sched_getaffinity(0)),
                "torch_threads": torch.get_num_threads(),
                "direct_io_alignment": file.alignment,
                "bytes": model.nbytes,
                "layers": model.layers,
                "layer_visits": 2 * model.layers - 1,
                "tokens": tokens,
                "nvmeio": asdict(a),
                "python": asdict(b),
                "in_memory": asdict(c),
                "nvmeio_stats": handle.stats._asdict(),
                "nvmeio_ways": _common.ways(handle.stats),
            }


def percentiles_ms(lags_s: Sequence[float]) -> dict[str, float]:
    ordered = sorted(1000 * lag for lag in lags_s) or [0.0]
    at = {"median": 0.5, "p99": 0.99, "worst": 1.0}
    return {name: ordered[min(int(len(ordered) * q), len(ordered) - 1)] for name, q in at.items()}


def drop_from_page_cache(path: Path) -> float:
    """Have the kernel forget a file; the share of its pages kept all the same (mincore)."""
    with path.open("r+b") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapping:
            resident = (ctypes.c_ubyte * -(-len(mapping) // mmap.PAGESIZE))()
            first = ctypes.c_ubyte.from_buffer(mapping)
            ctypes.CDLL(None).mincore(ctypes.byref(first), ctypes.c_size_t(len(mapping)), resident)
            del first  # the mapping cannot be closed while this refers to it
    return sum(page & 1 for page in resident) / len(resident)


def show(result: dict[str, Any], console: Console) -> None:
    """The table, and what is needed to judge it."""
    a, b, c = (Figures(**result[way]) for way in ("nvmeio", "python", "in_memory"))
    gb, train_gb = result["bytes"] / 1e9, a.train_bytes / 1e9
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("")
    table.add_column("", style="dim")
    for name in ("nvmeio", "Python", "in memory"):
        table.add_column(name, justify="right")

    def row(what: str, unit: str, *figures: float) -> None:
        table.add_row(what, unit, *(f"{figure:.2f}" for figure in figures))

    row(f"write {gb:.2f} GB, fsync included", "GB/s", gb / a.write_s, gb / b.write_s)
    cached = max(a.cached_before_read, b.cached_before_read)
    cold = "cold" if cached < 0.01 else f"{cached:.0%} of it cached"
    row(f"read {gb:.2f} GB, {cold}", "GB/s", gb / a.read_s, gb / b.read_s)
    row("  CPU time of that", "s", a.read_cpu_s, b.read_cpu_s)
    table.add_row()
    row(f"train, {train_gb:.2f} GB read beside it", "s", a.train_s, b.train_s, c.train_s)
    row("  computing", "s", a.computing_s, b.computing_s, c.computing_s)
    row("  comparing bytes", "s", a.comparing_s, b.comparing_s)
    row("  waiting for a layer", "s", a.waiting_s, b.waiting_s)
    table.add_row()
    row("  reading", "s", a.reading_s, b.reading_s)
    row("  of that, overlapped", "s", a.overlapped_s, b.overlapped_s)
    for name in ("median", "p99", "worst"):
        row(f"  event loop lag, {name}", "ms", *(each.lag_ms[name] for each in (a, b, c)))
    console.print(table)
    same = a.loss == b.loss == c.loss and a.gradient_norm == b.gradient_norm == c.gradient_norm
    console.print(
        f"\nOf nvmeio's reading {a.overlapped_s / a.reading_s:.0%} went on beside compute, of "
        f"Python's {b.overlapped_s / b.reading_s:.0%}.\n"
        f"nvmeio's bytes: {result['nvmeio_ways']}.\n"
        f"Before reading, {cached:.0%} of the file was in the page cache (mincore).\n"
        f"{result['tokens']} tokens; loss {a.loss:.6f}, gradient norm {a.gradient_norm:.6f}"
        f"{', the same in all three' if same else ''}.\n"
        f"{result['engine']} engine, {result['event_loop']}, torch on {result['torch_threads']} of "
        f"{result['cores']} cores. One run; GB is 10^9 bytes."
    )
    console.print(
        f"[green]Verified[/]: all bytes of the {result['layer_visits']} layers read for training, "
        "both ways."
    )


def main() -> None:
    parser = _common.arguments(__doc__)
    parser.add_argument(
        "--size", type=_common.nbytes, default="2G", help="of the weights: 512M, 2G"
    )
    parser.add_argument("--layers", type=int, default=16, help="how many, of equal size")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--keep", action="store_true", help="leave the two files where they are")
    options = parser.parse_args()
    if options.layers < 2 or options.size < options.layers << 18:
        parser.error("at least 2 layers, and at least 256K of --size for each")
    console = Console(stderr=options.json, highlight=False)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
    with _common.scratch(options.dir, int(2.1 * options.size), options.keep) as folder:
        alignment = _common.direct_alignment(folder)
        model = Model(options.size, options.layers)
        console.print(
            f"{model.layers} transformer layers of {model.nbytes / model.layers / 4e6:.1f} M "
            f"float32 weights: {6 * model.layers} tensors, {model.nbytes / 1e9:.2f} GB.\n"
            f"In {options.dir.resolve()}: "
            + (f"direct I/O in units of {alignment} bytes.\n" if alignment else NO_DIRECT)
        )
        with Progress(
            TextColumn("{task.description:<17}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            refresh_per_second=4,  # drawing holds the GIL, and would show as lag
        ) as progress:
            result = _common.run(measure(model, folder, progress))
        if options.json:
            print(json.dumps(result, indent=2))
        else:
            show(result, console)
        if options.keep:
            console.print(f"Kept: {folder}")


if __name__ == "__main__":
    main()
