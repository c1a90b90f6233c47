"""Collectives of the stand-in's tensors: gloo moves the bytes, when a stream gets there.

A collective is what it is with NCCL: work of the stream that is current, which reads and writes the
device's memory in the order of that stream (`fake_order`), and which ends when every rank's stream
has got there. FSDP2's and DTensor's come here, and none of host memory.

gloo knows by their order which collective of one rank belongs to which of another. So they are
done in the order in which they were asked, whatever streams they are of; nobody may rely on that,
and the clocks know nothing of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_kernels import quietly, span
from torch.utils._pytree import tree_leaves, tree_map

# What they are called, in torch 2.6 to 2.13; the first argument is what is written.
_NAMES = (
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "broadcast",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
)


class Collectives:
    """Those that a rank was asked for, in that order."""

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._last: tuple[Any, int] | None = None  # a stream, and how far it has done it

    def ask(self, stream: Any, work: Callable[[], None]) -> None:
        """Of a stream, which does it behind every one before."""
        with self._cuda.lock:
            before = self._last

            def in_turn() -> None:
                if before is not None:
                    before[0].run_to(before[1])
                work()

            stream.ask(in_turn)
            self._last = stream, stream.asked


def tell_collectives(patch: pytest.MonkeyPatch, cuda: Any) -> None:
    """From now on; `cuda` is the stand-in."""
    for name in _NAMES if dist.is_available() else ():
        if hasattr(dist, name):
            patch.setattr(dist, name, _on_a_stream(cuda, name, getattr(dist, name)))


def _on_a_stream(cuda: Any, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(own)

    def collective(*args: Any, **options: Any) -> Any:
        tensors = [t for t in tree_leaves((args, options)) if isinstance(t, torch.Tensor)]
        if not any(map(cuda.has, tensors)):
            return own(*args, **options)
        assert all(map(cuda.has, tensors)), f"{name}: one tensor is the host's"
        given = signature.bind(*args, **options)
        assert not given.arguments.pop("async_op", False), f"{name}: the stand-in's is none beside"
        written, *read = [t for t in given.arguments.values() if isinstance(t, torch.Tensor)]
        stream = cuda.current_stream(cuda.device_of(written))
        reads = [span(t) for t in read or [written]]
        cuda.order.asked(stream.number, f"{name} on {stream}", reads, [span(written)])
        there_args, there_options = tree_map(
            lambda t: cuda.inside(t.detach()) if isinstance(t, torch.Tensor) else t,
            (given.args, given.kwargs),
        )
        cuda.collectives.ask(stream, lambda: quietly(lambda: own(*there_args, **there_options)))
        return None

    return collective
