"""A handle's settings by DeepSpeed's names; its page-locked memory; its own description."""

from __future__ import annotations

import inspect
from typing import Any, TypedDict

import torch

from nvmeio import _checks, buffers
from nvmeio._checks import NotPickled
from nvmeio._core.core import Cores
from nvmeio._pages import PAGE_BYTES
from nvmeio.engines.base import Counters, Options
from nvmeio.errors import nearest

# The largest settings. Linux moves at most 2 GiB - 4 KiB per iocb (man 2 read, NOTES).
MOST = {"block_size": 1 << 30, "queue_depth": 65536, "intra_op_parallelism": 1024}


class DeepSpeedWords(TypedDict, total=False):
    """Other names of `intra_op_parallelism`, as DeepSpeed's tuner and configurations say."""

    num_threads: int
    thread_count: int


class HandleSettings(NotPickled):
    """The part of a handle that moves nothing."""

    _elsewhere = (
        "keep its settings, and make one in each process (in a dataset, on first use or in "
        "worker_init_fn)"
    )

    _options: Options
    _cores: Cores

    def get_block_size(self) -> int:
        """Bytes per kernel request."""
        return self._options.block_size

    def get_queue_depth(self) -> int:
        """Blocks a lane keeps in the kernel at most."""
        return self._options.queue_depth

    def get_single_submit(self) -> bool:
        """Whether blocks are submitted one at a time."""
        return self._options.single_submit

    def get_overlap_events(self) -> bool:
        """Whether the queue is refilled as blocks complete."""
        return self._options.overlap_events

    def get_intra_op_parallelism(self) -> int:
        """Number of lanes."""
        return self._options.intra_op_parallelism

    def get_alignment(self) -> int:
        """Bytes: addresses, sizes and offsets that are multiples of it need no bounce or edge."""
        return PAGE_BYTES

    # --- memory -----------------------------------------------------------------------------

    def new_cpu_locked_tensor(
        self, num_elem: int, example_tensor_or_dtype: torch.Tensor | torch.dtype
    ) -> torch.Tensor:
        """A 1-D page-locked tensor on huge pages, aligned for direct I/O.

        Args:
            num_elem: Number of elements, >= 0.
            example_tensor_or_dtype: A tensor whose dtype is taken, or the dtype.

        Raises:
            OSError: The limit for locked memory is reached; says which, and how to raise it.

        Page-locking matters for copies to and from a GPU, and if the process used CUDA before the
        tensor was made (`nvmeio.empty_pinned`). Transfers of this handle are as fast with
        `nvmeio.empty_aligned`.
        """
        return buffers.new_locked(num_elem, example_tensor_or_dtype)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> None:
        """Unlock a tensor of `new_cpu_locked_tensor` now; its memory goes with its last view.

        Raises:
            ValueError: It was not made by `new_cpu_locked_tensor`, or is freed already.
        """
        buffers.free_pinned(tensor)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in page-locked memory, of this handle, another, or CUDA."""
        return buffers.is_pinned(tensor)

    # --- properties ---------------------------------------------------------------------------

    @property
    def stats(self) -> Counters:
        """Counters since the handle was made: bytes, operations, ways they went, errors."""
        return self._cores.counters()

    @property
    def engine(self) -> str:
        """The name of the engine in use."""
        return self._cores.host.engine.name

    @property
    def closed(self) -> bool:
        """Whether operations are refused."""
        return self._cores.closed

    def __repr__(self) -> str:
        o = self._options
        state = "closed" if self._cores.closed else "open"
        return (
            f"<nvmeio.{type(self).__name__} {self.engine} block_size={o.block_size} "
            f"queue_depth={o.queue_depth} lanes={o.intra_op_parallelism} {state}, "
            f"{self._cores.in_flight} in flight>"
        )


def checked_options(
    kind: type[HandleSettings],
    words: dict[str, Any],
    block_size: int | str,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    lanes: int,
) -> Options:
    """Check a handle's arguments, and make its options.

    `kind` is the handle's class, for messages; `words` are other names of `lanes`.

    Raises:
        TypeError: There is no such argument, or one of another type.
        ValueError: One is out of range, or two names say different numbers.
        AlignmentError: `block_size` is not a multiple of 4096.
    """
    if words:
        lanes = parallelism(kind, words, lanes)
    block_size = _checks.size("block_size", block_size)
    _checks.pages("block_size", block_size, MOST["block_size"])
    return Options(
        block_size,
        _checks.integer("queue_depth", queue_depth, 1, MOST["queue_depth"]),
        _checks.switch("single_submit", single_submit),
        _checks.switch("overlap_events", overlap_events),
        _checks.integer("intra_op_parallelism", lanes, 1, MOST["intra_op_parallelism"]),
    )


def parallelism(kind: type[Any], words: dict[str, Any], given: int) -> int:
    """`intra_op_parallelism` of a handle's class, or what `DeepSpeedWords` say it is.

    Raises TypeError for an unknown word, naming the nearest; ValueError if two say different
    numbers.
    """
    takes = inspect.signature(kind).parameters
    known = list(DeepSpeedWords.__annotations__)
    for name in words:
        if name == "use_gds":
            raise TypeError(f"{kind.__name__} takes no use_gds: nvmeio.GdsHandle is that")
        if name not in known:
            likely = nearest(name, [*takes, *known])
            raise TypeError(f"{kind.__name__} takes no {name}{likely}")
    numbers = set(words.values())
    if given != takes["intra_op_parallelism"].default:
        numbers.add(given)
    if len(numbers) > 1:
        raise ValueError(f"{' and '.join(words)} and intra_op_parallelism are the same: give one")
    return int(_checks.integer("num_threads", numbers.pop(), 1, MOST["intra_op_parallelism"]))
