"""A script that used torch.save and torch.load: what changes, and what that brings.

    python examples/09_in_place_of_torch_save.py --dir /mnt/nvme --size 1G

Three ways in, from one line to none that knows nvmeio:

    nvmeio.save(state, path)                         in place of torch.save(state, path)
    torch.save(state, nvmeio.FastFileWriter(path))   where torch.save must stay
    torch.load(path)                                 everywhere: the files are torch's own

A load of more than 8 MiB makes a handle and closes it, with its threads and its bounce memory. To
load many files, make one handle and give it to each: `nvmeio.load(path, handle=handle)`.

What was saved is durable and replaces the old file at once, whichever of them it was.
"""

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _common
import torch
from _common import say, verify
from torch import nn

import nvmeio


def make_state(nbytes: int) -> dict[str, Any]:
    """A model and its Adam after a step, with tied weights."""
    width = 1024
    layers = max(2, nbytes // (12 * width * width))
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    model[-1].weight = model[0].weight
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = parameter.detach() / 100
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}


def tensors(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in tensors(value)]
    return (
        [tensor for value in state for tensor in tensors(value)] if isinstance(state, list) else []
    )


def same(first: Any, second: Any) -> bool:
    return all(map(torch.equal, tensors(first), tensors(second)))


def with_fsync(state: Any, path: Path) -> None:
    """torch.save leaves the bytes in the page cache: a loss of power would lose them."""
    torch.save(state, path)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def timed(nbytes: int, ways: dict[str, Callable[[], Any]], rounds: int = 3) -> dict[str, Any]:
    """The median of each way, by turns: one run of each would show what else the drive did."""
    times: dict[str, list[float]] = {label: [] for label in ways}
    results: dict[str, Any] = {}
    for _ in range(rounds):
        for label, work in ways.items():
            began = time.perf_counter()
            results[label] = work()
            times[label].append(time.perf_counter() - began)
    for label, taken in times.items():
        took = statistics.median(taken)
        say(label, f"{took:.2f} s, {nbytes / took / 1e9:.2f} GB/s")
    return results


def cold(path: Path) -> Path:
    """The next read of the file comes from the drive."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


def main(folder: Path, size: int) -> None:
    state = make_state(size)
    plain, fast, written = (folder / f"{n}.pt" for n in ("torch", "nvmeio", "writer"))
    nbytes = sum({t.data_ptr(): t.nbytes for t in tensors(state)}.values())

    def through_a_writer() -> None:
        with nvmeio.FastFileWriter(written) as file:
            torch.save(state, file)

    say("saving", f"{nbytes / 1e9:.2f} GB, durable; the median of three")
    timed(
        nbytes,
        {
            "torch": lambda: with_fsync(state, plain),
            "nvmeio": lambda: nvmeio.save(state, fast),
            "writer": through_a_writer,
        },
    )

    say("loading", "cold, each from the file of the other")
    with nvmeio.AioHandle() as handle:
        reading = {
            "torch": lambda: torch.load(cold(fast)),
            "nvmeio": lambda: nvmeio.load(cold(plain)),
            "one handle": lambda: nvmeio.load(cold(plain), handle=handle),
        }
        loaded = timed(nbytes, reading)
    verify(same(loaded["torch"], state), "torch.load reads what nvmeio saved")
    verify(same(loaded["nvmeio"], state), "nvmeio.load reads what torch saved")
    with nvmeio.FastFileReader(written) as file:
        verify(same(torch.load(file), state), "torch.load reads through nvmeio")
    model = loaded["nvmeio"]["model"]
    first, last = model["0.weight"], list(model.values())[-2]
    verify(first.data_ptr() == last.data_ptr(), "tied weights are tied again")
    _common.verified("three files, read by torch and by nvmeio, equal bit for bit")


if __name__ == "__main__":
    parser = _common.arguments(__doc__)
    parser.add_argument("--size", type=_common.nbytes, default="256M", help="of the state (256M)")
    options = parser.parse_args()
    with _common.scratch(options.dir, 4 * options.size) as folder:
        main(folder, options.size)
