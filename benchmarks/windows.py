"""How fast a file is read or overwritten through memory that is used again, by its size.

    python benchmarks/windows.py --dir /mnt/nvme
    python benchmarks/windows.py --dir /mnt/nvme --windows 32M,1G --pages huge --rounds 7

Data that is consumed piece by piece needs no more memory than is in flight, and the memory that it
goes over may decide how fast that is: this one reads the same bytes of the same file with the same
blocks and the same depth, into windows of several sizes that are used round and round, once of huge
pages and once of 4 KiB pages. fio does the same work beside it: its queue is as deep as its memory
is large, for it has a block of memory for each request in flight. All take turns; medians, and the
ratio to the largest window of that kind of pages.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import shutil
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from _files import huge_pages, write_file
from peers import fio

import nvmeio
from nvmeio.cli.measure import parse_size
from nvmeio.cli.measure.disk import cpu_seconds, scratch
from nvmeio.cli.measure.worker import order
from nvmeio.files import probe_direct

BLOCK = 1 << 20
DEPTH = 32
WINDOWS = "8M,32M,64M,128M,256M,1G"
PAGES = ("huge", "small")
OPS = ("read", "write")

Key = tuple[str, str, str, int]
Taken = tuple[float, float]  # wall and CPU seconds
Work = Callable[[], Taken]


def window_of(nbytes: int, huge: bool) -> torch.Tensor:
    """Memory of nvmeio's own, so that nothing is copied; every page touched and not zero."""
    tensor = nvmeio.empty_aligned(nbytes, dtype=torch.uint8)
    if not huge:
        libc = ctypes.CDLL(None, use_errno=True)
        for advice in (
            mmap.MADV_NOHUGEPAGE,
            mmap.MADV_DONTNEED,
        ):  # other pages, from the next touch on
            if libc.madvise(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(nbytes), advice):
                code = ctypes.get_errno()
                raise OSError(code, f"madvise({advice}): {os.strerror(code)}")
    return tensor.fill_(1)


def through(
    handle: nvmeio.AioHandle, path: Path, size: int, window: torch.Tensor, write: bool
) -> Taken:
    """All bytes, block by block, each over the part of the window that was used longest ago."""
    blocks = window.split(BLOCK)
    depth = min(DEPTH, len(blocks))
    under_way: deque[nvmeio.Operation] = deque()
    with nvmeio.open(path, "r+" if write else "r") as file:
        start = handle.async_pwrite if write else handle.async_pread
        cpu, began = cpu_seconds(), time.perf_counter()
        for number, offset in enumerate(range(0, size, BLOCK)):
            if len(under_way) == depth:
                under_way.popleft().result()
            under_way.append(start(blocks[number % len(blocks)], file, offset))
        for operation in under_way:
            operation.result()
        return time.perf_counter() - began, cpu_seconds() - cpu


def of_fio(path: Path, size: int, window: int, huge: bool, write: bool) -> Taken:
    setting = fio.Setting("libaio", window // BLOCK, "mmaphuge" if huge else "mmap")
    sample = fio.sequential(path, size, write, setting)
    return sample.seconds, sample.cpu_seconds


def contenders(
    path: Path, options: argparse.Namespace, handle: nvmeio.AioHandle
) -> dict[Key, Work]:
    """By who, verb, kind of pages and size of the window."""
    found: dict[Key, Work] = {}
    for pages in options.pages:
        huge = pages == "huge"
        for window in options.windows:
            memory = window_of(window, huge)
            for op in OPS:
                work = partial(through, handle, path, options.size, memory, op == "write")
                found["nvmeio", op, pages, window] = work
                if options.fio:
                    work = partial(of_fio, path, options.size, window, huge, op == "write")
                    found["fio", op, pages, window] = work
    return found


def main() -> None:
    options = parse()
    if not probe_direct(options.dir).supported:
        sys.exit(f"{options.dir} does not take O_DIRECT; name a directory on a drive: --dir")
    options.fio = shutil.which("fio") is not None
    # fio counts its buffers a little more generously than the blocks in flight.
    largest = max(options.windows) + 8 * BLOCK if options.fio and "huge" in options.pages else 0
    with (
        scratch([options.dir], "windows") as made,
        huge_pages(largest) as refused,
        nvmeio.AioHandle(queue_depth=DEPTH) as handle,
    ):
        if refused:
            print(f"fio has no part in it: {refused}", file=sys.stderr)
            options.fio = False
        path = made[options.dir] / "file"
        write_file(path, options.size)
        os.sync()
        work = contenders(path, options, handle)
        taken: dict[Key, list[Taken]] = {key: [] for key in work}
        for number in range(options.rounds + 1):
            print(f"round {number} of {options.rounds}", file=sys.stderr)
            for key in order(list(work), number, options.rounds + 1):
                figures = work[key]()
                if number:  # the first one is not counted
                    taken[key].append(figures)
    show(options, taken)
    if options.json:
        rows = [
            {"who": key[0], "op": key[1], "pages": key[2], "window": key[3], "wall_and_cpu_s": s}
            for key, s in taken.items()
        ]
        options.json.write_text(json.dumps({"size": options.size, "rows": rows}, indent=1) + "\n")


def show(options: argparse.Namespace, taken: dict[Key, list[Taken]]) -> None:
    print(f"{options.size >> 20} MiB in blocks of 1 MiB, direct, no fsync; {options.rounds} rounds")
    print(f"nvmeio: {DEPTH} in flight at most. fio: as many as the window has blocks.")
    print(f"{'':6} {'':5} {'pages':5} {'window':>8} {'GB/s':>7} {'of largest':>10} {'CPU s':>6}")
    largest = max(options.windows)
    for key, figures in taken.items():
        who, op, pages, window = key
        seconds = statistics.median(wall for wall, _ in figures)
        limit = statistics.median(wall for wall, _ in taken[who, op, pages, largest])
        cpu = statistics.median(cpu for _, cpu in figures)
        print(
            f"{who:6} {op:5} {pages:5} {window >> 20:>4} MiB {options.size / seconds / 1e9:7.2f} "
            f"{limit / seconds:9.2f}x {cpu:6.2f}"
        )


def sizes(text: str) -> list[int]:
    return sorted(parse_size(part) for part in text.split(","))


def kinds(text: str) -> list[str]:
    chosen = text.split(",")
    if not set(chosen) <= set(PAGES):
        raise argparse.ArgumentTypeError(f"pages are {', '.join(PAGES)}, not {text}")
    return chosen


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="where the file goes")
    parser.add_argument("--size", type=parse_size, default=2 << 30, help="of the file (2G)")
    parser.add_argument("--windows", type=sizes, default=WINDOWS, help=f"({WINDOWS})")
    parser.add_argument("--pages", type=kinds, default="huge,small", help="(huge,small)")
    parser.add_argument("--rounds", type=int, default=5, help="(5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
