"""Ctrl-C leaves torch's modes as they were, wherever it comes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nvmeio
from nvmeio._residency import calls
from nvmeio._residency.calls import Place
from nvmeio.compat.deepspeed.handles import deepspeed_memcpy
from nvmeio.offload._swap_files.tensors import local

Call = Callable[[], object]


class Sharded:
    """As much of a DTensor as is looked at."""

    device_mesh = None

    def __init__(self) -> None:
        self._shard = torch.zeros(4, requires_grad=True)

    def to_local(self) -> torch.Tensor:
        return self._shard.view_as(self._shard)


def modes() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def interrupted_in_torch_s_modes(call: Call) -> tuple[bool, bool]:
    """At the first line of Python of torch's own that enters or leaves a mode; the modes then."""

    def interrupt(frame: Any, event: str, arg: object) -> None:
        if frame.f_code.co_filename.endswith("grad_mode.py"):
            names.append(frame.f_code.co_name)
            if frame.f_code.co_name == "__exit__":
                sys.settrace(None)
                raise KeyboardInterrupt

    names: list[str] = []
    kept: BaseException | None = None  # as an interactive session keeps it
    tracing = sys.gettrace()
    sys.settrace(interrupt)
    try:
        call()
    except KeyboardInterrupt as met:
        kept = met
    finally:
        sys.settrace(tracing)
    found = modes()
    del kept
    return found


def transposed_read(path: Path) -> Call:
    path.write_bytes(bytes(64))
    target = torch.ones(4, 4).t()

    def call() -> None:
        with nvmeio.AioHandle() as handle:
            handle.sync_pread(target, path)

    return call


@pytest.mark.parametrize(
    "make",
    [
        lambda path: lambda: local(Sharded()),  # type: ignore[arg-type]
        lambda path: lambda: Place(torch.ones(3)).over(torch.ones(3).untyped_storage()),
        lambda path: lambda: deepspeed_memcpy(torch.zeros(3, requires_grad=True), torch.ones(3)),
        lambda path: calls.quietly(lambda: torch.ones(3)),
        transposed_read,
    ],
    ids=["local", "place", "memcpy", "quietly", "read"],
)
@pytest.mark.parametrize("grad", [False, True])
def test_an_interrupt_leaves_no_mode_in_force(
    make: Callable[[Path], Call], grad: bool, tmp_path: Path
) -> None:
    call = make(tmp_path / "file")
    before = modes()
    try:
        torch.set_grad_enabled(grad)
        assert interrupted_in_torch_s_modes(call) == (grad, False)
    finally:
        torch.set_grad_enabled(before[0])
    assert modes() == before


def test_what_runs_quietly_has_no_autograd() -> None:
    x = torch.ones(3, requires_grad=True)
    assert not calls.quietly(lambda: x * 2)().requires_grad
    with torch.no_grad():
        grad = calls.with_grad()
        assert (x * 2).requires_grad
        del grad
        assert not (x * 2).requires_grad
    assert calls.with_grad() is None
