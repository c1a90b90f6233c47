"""Several drives at once: plain reads, a swapped step, passes and a streamed model over 1 and N.

    python benchmarks/drives.py --dir /mnt/nvme
    python benchmarks/drives.py --drives 2 --rate 200 --parameters 40e6 --json

The drives are limited to a rate. `--only` chooses one of these.

Needs root: the drives are loop devices over files in `--dir`, with ext4, each of which a control
group limits to `--rate` MB/s in either direction (blkio.throttle of version 1, io.max of version
2). Everything is undone in the end. The drive below must be faster than all of them together.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from _loop_devices import MB, drive, limited, need_root
from peers.inference import write_llama

from nvmeio import empty_aligned, open, stream_model
from nvmeio._io.drives import DriveHandles, StripedFile, Striping
from nvmeio.inference import pack
from nvmeio.offload import SwappedModule, SwappedOptimizer

WIDTH = 1024


def reads(places: Sequence[Path], nbytes: int, repeats: int) -> list[float]:
    """Seconds of reading one striped file, again and again."""
    striping = Striping([1] * len(places), [nbytes])
    memory = empty_aligned(nbytes, dtype=torch.uint8)
    with contextlib.ExitStack() as stack:
        handles = DriveHandles(None, [str(place) for place in places])
        stack.callback(handles.close)
        file = StripedFile([open(place / "reads", "rw") for place in places], striping)
        stack.callback(file.close)

        def move(begin: Any) -> None:
            spans = file.spans(0, nbytes)
            under_way = [begin(memory[s.start :][: s.nbytes], s.file, s.file_offset) for s in spans]
            for operation in under_way:
                operation.result()

        move(handles.async_pwrite)
        return timed(lambda: move(handles.async_pread), repeats)


def steps(places: Sequence[Path], parameters: int, repeats: int) -> list[float]:
    """Seconds of a swapped step of AdamW."""
    weights = [torch.nn.Parameter(torch.ones(1 << 20)) for _ in range(parameters >> 20)]
    for weight in weights:
        weight.grad = torch.full_like(weight, 1e-3)
    optimizer = SwappedOptimizer(
        torch.optim.AdamW, weights, swap_dir=list(places), subgroup_bytes=16 << 20, fused=True
    )
    with optimizer:
        optimizer.step()
        settle: Callable[[], None] = optimizer._opened().store.settle
        settle()
        return timed(optimizer.step, repeats, settle)


def passes(places: Sequence[Path], parameters: int, repeats: int) -> list[float]:
    """Seconds of a forward pass of a module that is read from the drives each time."""
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4 * parameters // WIDTH**2)]
    module = SwappedModule(
        torch.nn.Sequential(*layers), swap_dir=list(places), resident_bytes=24 << 20
    )
    batch = torch.ones(1, WIDTH)
    with module, torch.no_grad():
        return timed(lambda: module(batch), repeats)


def packed(places: Sequence[Path], model: Path) -> list[list[Path]]:
    """A model packed into a directory on the first drive, on the first two, and so on."""
    found = []
    for count in range(1, len(places) + 1):
        found.append([place / f"packed-{count}" for place in places[:count]])
        pack(model, found[-1])
    return found


def streamed(directories: Sequence[Path], repeats: int) -> float:
    """Bytes a second that passes of a streamed model read; one token a pass, little stays."""
    model = stream_model(list(directories), resident_bytes=24 << 20)
    with model.weight_stream as stream, torch.no_grad():
        ids = torch.ones(1, 1, dtype=torch.long)
        model(ids)
        model(ids)  # by now it is known what comes next
        before, began = stream.stats.bytes_read, time.perf_counter()
        for _ in range(2 * repeats):
            model(ids)
        return (stream.stats.bytes_read - before) / (time.perf_counter() - began)


def timed(
    work: Callable[[], object], repeats: int, after: Callable[[], None] = lambda: None
) -> list[float]:
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
        after()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dir", type=Path, default=Path("."), help="where the images lie")
    parser.add_argument("--drives", type=int, default=3)
    parser.add_argument("--rate", type=float, default=60, help="MB/s of each, each way (60)")
    parser.add_argument("--parameters", type=float, default=16e6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=("step", "pass", "stream"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    need_root()
    parameters, repeats = int(options.parameters), options.repeats
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    wanted: list[tuple[str, float]] = []
    with contextlib.ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="nvmeio-drives-", dir=options.dir))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        room = parameters * 48 + (128 << 20)
        made = [stack.enter_context(drive(directory, n, room)) for n in range(options.drives)]
        places = [place for place, _ in made]
        sets: list[list[Path]] = []
        if options.only in (None, "stream"):
            write_llama(directory / "model", 256, 28, 8, "model.safetensors")
            sets = packed(places, directory / "model")
        stack.enter_context(limited([number for _, number in made], int(options.rate * MB)))
        singles = [64 / min(reads([place], 64 * MB >> 12 << 12, 2)) for place in places]
        together = 64 * len(places) / min(reads(places, 64 * len(places) * MB >> 12 << 12, 2))
        found["reads, MB/s"] = {"sum of single": sum(singles), "together": together}
        wanted.append(("≥ 0.95", together / sum(singles)))
        for name, what, measure in (
            ("step", "step, s", steps),
            ("pass", "forward pass, s", passes),
        ):
            if options.only not in (None, name):
                continue
            one = statistics.median(measure(places[:1], parameters, repeats))
            several = statistics.median(measure(places, parameters, repeats))
            found[what] = {"one drive": one, f"{len(places)} drives": several}
            wanted.append((f"≥ {2.8 / 3 * options.drives:.2f}", one / several))
        for directories in sets:
            rate, count = streamed(directories, repeats) / MB, len(directories)
            name = f"streamed from {count}, MB/s"
            found[name] = {"sum of single": sum(singles[:count]), "together": rate}
            wanted.append(("≥ 0.95", rate / sum(singles[:count])))
    if options.json:
        print(json.dumps({"rate_mb_per_s": options.rate, "found": found}, indent=2))
        return
    print(f"{options.drives} loop devices of {options.rate:g} MB/s each way, {parameters:,} fp32")
    for (what, values), (least, ratio) in zip(found.items(), wanted, strict=True):
        told = ", ".join(f"{name} {value:.2f}" for name, value in values.items())
        print(f"{what:21} {told:44} ratio {ratio:.2f} (wanted {least})")


if __name__ == "__main__":
    main()
