"""Runs the Python blocks of one page that need certain packages: run_page.py PAGE [PACKAGE ...].

The current directory is the reader's, and /mnt/ is a folder in it. With RANK and WORLD_SIZE in the
environment it is one of several ranks.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from documented import pages

import nvmeio


def run(code: str, page: Path, line: int, names: dict[str, Any]) -> None:
    """As a cell of a notebook is run: `await` may stand outside of a function."""
    text = "\n" * (line - 1) + code.replace("/mnt/", f"{Path.cwd()}/mnt/")
    made = compile(text, str(page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if made.co_flags & inspect.CO_COROUTINE:
        asyncio.run(eval(made, names))
    else:
        exec(made, names)


def main(page: Path, needs: tuple[str, ...]) -> None:
    import torch

    torch.manual_seed(0)
    Path("mnt/nvme").mkdir(parents=True, exist_ok=True)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{Path.cwd()}/store",
            rank=int(os.environ["RANK"]),
            world_size=world,
        )
    names: dict[str, Any] = {"__name__": "__main__", "nvmeio": nvmeio, "torch": torch}
    for block in pages.blocks(page, "python"):
        if block.needs == needs and world in block.ranks and not block.not_run:
            print(block.place, flush=True)
            run(block.given, block.page, block.line, names)
            run(block.code, block.page, block.line, names)
    if world > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[2:]:  # they warn of what is theirs
        warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), tuple(sys.argv[2:]))
