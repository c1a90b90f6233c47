"""What a read by a coroutine costs: instructions of the loop's thread, counted by callgrind.

    python benchmarks/instructions.py                    # or: make bench-instructions
    python benchmarks/instructions.py --functions 40     # and where they go

2,000 reads of 4 KiB by 32 coroutines on uvloop (or asyncio's loop, where that is missing), of a
file that is in memory, through `handle.open`, through `nvmeio.open`, and by its path, which each
read then opens. Unlike times, figures are
the same on a busy machine, but for one or two in a hundred; they depend on how Python was built.
Needs valgrind. `--python` names another interpreter, which has torch and cffi.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

COUNT = 2000
DEPTH = 32
BLOCK = 4096
WAYS = ("handle.open", "nvmeio.open", "path")


def reads(way: str, path: str) -> None:
    """In a process under callgrind, which counts nothing before the reads."""
    import torch

    import nvmeio

    try:
        from uvloop import new_event_loop
    except ImportError:
        from asyncio import new_event_loop

    async def main() -> None:
        async with nvmeio.AioHandle(queue_depth=DEPTH) as handle:
            opened = handle.open(path) if way == "handle.open" else nvmeio.open(path)
            memory = nvmeio.empty_aligned(DEPTH * BLOCK, dtype=torch.uint8)
            slices = list(memory.split(BLOCK))

            async def some(number: int, count: int) -> None:
                mine = slices[number]
                if way == "handle.open":
                    for turn in range(count):
                        await opened.pread(mine, BLOCK * ((turn * 37 + number) % 1024))
                    return
                file = path if way == "path" else opened
                for turn in range(count):
                    await handle.async_pread(mine, file, BLOCK * ((turn * 37 + number) % 1024))

            await asyncio.gather(*(some(number, 8) for number in range(DEPTH)))
            control("on")
            await asyncio.gather(*(some(number, COUNT // DEPTH) for number in range(DEPTH)))
            control("off")
            opened.close()

    loop = new_event_loop()
    loop.run_until_complete(main())
    loop.close()


def control(state: str) -> None:
    subprocess.run(
        ["callgrind_control", f"--instr={state}", str(os.getpid())],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def counted(way: str, python: str, functions: int) -> None:
    """One run, and what it counted."""
    with tempfile.TemporaryDirectory(prefix="nvmeio-instructions-") as made:
        path, out = Path(made, "file"), Path(made, "out")
        path.write_bytes(os.urandom(1024 * BLOCK))
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--separate-threads=yes"]
        command += [f"--callgrind-out-file={out}", python, __file__, "--way", way, "--file"]
        done = subprocess.run([*command, str(path)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"the reads failed: {done.stderr[-2000:]}")
        total, loop = 0, None
        for found in Path(made).glob("out*-01"):  # the main thread's, a file for each turn of it
            for line in found.read_text(errors="replace").splitlines():
                if re.match(r"(summary|totals): ", line):
                    number = int(line.split()[1])
                    if line.startswith("totals") and number > total:
                        total, loop = number, found
        each = COUNT // DEPTH * DEPTH
        print(f"{way}: {total / each:,.0f} instructions a read", flush=True)
        if functions and loop is not None:
            shown = subprocess.run(
                ["callgrind_annotate", str(loop)], capture_output=True, text=True, check=True
            )
            lines = [line for line in shown.stdout.splitlines() if "%)" in line and ":" in line]
            for line in lines[:functions]:
                number = int(line.split()[0].replace(",", ""))
                print(f"  {number / each:8,.0f}  {line.split('%)', 1)[1].strip()[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--functions", type=int, default=0, help="list so many C functions")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--only", choices=WAYS)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        reads(arguments.way, arguments.file)
        return
    if shutil.which("valgrind") is None:
        raise SystemExit("valgrind is not there: apt-get install valgrind")
    for way in WAYS:
        if arguments.only in (None, way):
            counted(way, arguments.python, arguments.functions)


if __name__ == "__main__":
    main()
