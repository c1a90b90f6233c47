"""Types of public names, as a user's type checker and editor infer them; never run.

mypy reads this with the tests (`make lint`), pyright with `make editor-check`. Names of submodules
were Any to both where only `import nvmeio` had been said: nothing was completed behind the dot.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from typing_extensions import assert_type

import nvmeio


async def handles(tensor: torch.Tensor, path: Path) -> None:
    with nvmeio.AioHandle(queue_depth=32) as handle:
        assert_type(handle, nvmeio.AioHandle)
        operation = handle.async_pread(tensor, path, 4096)
        assert_type(operation, nvmeio.Operation)
        assert_type(await operation, int)
        assert_type(handle.sync_pwrite(tensor, path), int)
        assert_type(operation.done(), bool)
    with nvmeio.open(path) as file:
        assert_type(file, nvmeio.File)


async def checkpoints(state: dict[str, torch.Tensor], path: str | os.PathLike[str]) -> None:
    nvmeio.save(state, path)
    await nvmeio.async_save(state, path)
    assert_type(nvmeio.load_safetensors(path), dict[str, torch.Tensor])
    with nvmeio.Checkpointer(path, keep=3) as checkpointer:
        assert_type(checkpointer.steps(), list[int])
        assert_type(checkpointer, nvmeio.checkpoint.Checkpointer)


def beyond_memory(model: torch.nn.Module, folder: Path) -> None:
    kind: type[nvmeio.SwappedOptimizer] = nvmeio.offload.SwappedOptimizer
    module: type[nvmeio.SwappedModule] = nvmeio.offload.SwappedModule
    pack: Callable[..., Any] = nvmeio.inference.pack
    del kind, module, pack


def errors(failed: nvmeio.TransferError) -> None:
    assert_type(failed.path, str)
    assert_type(failed.nbytes, int)
    assert isinstance(failed, OSError)
