"""accelerate's disk offload, with the weights read ahead by nvmeio.

    from nvmeio.integrations.accelerate import dispatch_model   # in place of accelerate's

or, for `from_pretrained(…, device_map="auto", offload_folder=…)` and everything else that makes
accelerate read weights from disk, one line before it::

    nvmeio.integrations.accelerate.install()

accelerate loads the weights of a module just before its forward, one tensor after another, and
waits for each. What it asks is a mapping from names to tensors; `NvmeWeights` is one that
begins to read the tensors that are asked for next while the present ones are computed with.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import json
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from nvmeio import files
from nvmeio._formats.safetensors_files import header_of
from nvmeio._io.handles import new_handle
from nvmeio._memory import Mapping as MemoryMapping
from nvmeio._plan import PAGE_BYTES
from nvmeio.errors import ClosedError, IntegrityError, TransferError, with_context
from nvmeio.files import File
from nvmeio.handle import AioHandle
from nvmeio.inference._feeder import Feeder, Job, Wanted, finish
from nvmeio.pool import Lease, PinnedPool

__all__ = ["NvmeWeights", "dispatch_model", "install", "uninstall"]

# What is read ahead at most, and kept for the tensors that are in use.
WINDOW_BYTES = 512 << 20
_SEAM = "OffloadedWeightsLoader"


class _Place(NamedTuple):
    """Where a tensor lies, and what it is there and when it is used."""

    file: File
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    stored: torch.dtype
    dtype: torch.dtype


class _Ahead(NamedTuple):
    """A tensor that is on its way."""

    job: Job
    lease: Lease | None
    memory: torch.Tensor  # its pages


class NvmeWeights(Mapping[str, torch.Tensor]):
    """A weights map for accelerate's hooks: its own `OffloadedWeightsLoader`, with prefetch.

    Args:
        state_dict: Tensors that are in memory, by name; they come first.
        save_folder: Where accelerate has offloaded weights to, with their ``index.json``.
        index: For each name where it is: ``safetensors_file`` and ``weight_name``, or the dtype
            and shape of ``NAME.dat`` in the folder; by default that of the folder.
        device: Where tensors are wanted; the CPU by default.
        window_bytes: Memory for tensors in use and on their way; page-locked where allowed.
        handle: Moves the bytes and stays open; None makes one.

    Raises:
        ValueError: Neither weights nor a place to find them were given.
        IntegrityError: The index or a file is malformed, or a file lacks a tensor.
        TransferError: A file cannot be opened.

    A tensor's memory is given back when its last user lets go of it, as accelerate does after each
    forward. Closed by `close`, or when it is dropped.
    """

    def __init__(
        self,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        index: Mapping[str, Mapping[str, Any]] | None = None,
        device: Any = None,
        *,
        window_bytes: int = WINDOW_BYTES,
        handle: AioHandle | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ValueError("a state_dict, a save_folder or an index of weights is needed")
        self.state_dict = dict(state_dict or {})
        self.device = device
        with contextlib.ExitStack() as undo:
            self._files: dict[str, File] = {}
            undo.callback(_close_files, self._files)
            folder = None if save_folder is None else os.fspath(save_folder)
            if index is None and folder is not None:
                index = _index_of(folder)
            reader = undo.enter_context(_reader(handle, folder, index))
            self._places = self._find(index or {}, folder, reader)
            self._facts = {path: _facts(file) for path, file in self._files.items()}
            self._names = [*self.state_dict, *(n for n in self._places if n not in self.state_dict)]
            largest = max((_pages(place) for place in self._places.values()), default=0)
            most = sum(_pages(place) for place in self._places.values())
            room = min(max(window_bytes, 2 * largest), max(most, PAGE_BYTES))
            self._pool = PinnedPool(room)
            undo.callback(self._pool.close)
            self._feeder = Feeder(reader)
            undo.callback(self._feeder.stop)
            self._opened = undo.pop_all()
        self._order = {name: n for n, name in enumerate(self._places)}
        self._after: dict[str, str] = {}
        self._last: str | None = None
        self._ahead: deque[tuple[str, _Ahead]] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self.mispredicted = 0
        self._finalizer = weakref.finalize(self, finish, self._opened.close)

    # --- what accelerate calls ----------------------------------------------------------------

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        place = self._places[key]
        with self._lock:
            if self._closed:
                raise ClosedError("these weights are closed")
            if self._last is not None and self._last != key:
                self._after[self._last] = key
            self._last = key
            ahead = self._take(key)
            self._read_ahead(key)
        try:
            ahead.job.wait()
            self._check(place, key)
        except BaseException as failed:
            self._give_back(ahead)  # Ctrl-C leaves it in flight
            if isinstance(failed, TransferError):
                raise with_context(failed, f"weight {key!r}") from failed
            raise
        tensor = _tensor(ahead, place)
        device = torch.device("cpu" if self.device is None else self.device)
        return tensor.to(device, place.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def close(self) -> None:
        """Stop reading and close the files. Tensors that are in use stay valid. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._drop()
        self._finalizer.detach()
        self._opened.close()

    # --- reading ahead, with the lock held ------------------------------------------------------

    def _take(self, key: str) -> _Ahead:
        """The tensor that is asked for, begun if it is not on its way."""
        if any(name == key for name, _ in self._ahead):
            while True:
                name, ahead = self._ahead.popleft()
                if name == key:
                    return ahead
                self._give_back(ahead)
        if self._after:
            self.mispredicted += 1
        self._drop()
        begun = self._begin(key)
        if begun is not None:
            return begun
        # All of the window is in use: memory of its own.
        place = self._places[key]
        mapping = MemoryMapping(_pages(place))
        memory = mapping.tensor(0, (_pages(place),), torch.uint8)
        return _Ahead(self._job(place, memory), None, memory)

    def _read_ahead(self, key: str) -> None:
        seen = {key, *(name for name, _ in self._ahead)}
        last = self._ahead[-1][0] if self._ahead else key
        for _ in range(len(self._places)):
            last = self._following(last)
            if last in seen:
                return
            seen.add(last)
            begun = self._begin(last)
            if begun is None:
                return
            self._ahead.append((last, begun))

    def _following(self, key: str) -> str:
        known = self._after.get(key)
        if known is not None:
            return known
        names = list(self._order)
        return names[(self._order[key] + 1) % len(names)]

    def _begin(self, key: str) -> _Ahead | None:
        place = self._places[key]
        lease = self._pool.take(_pages(place), timeout=0)
        try:
            memory = lease.__enter__()
        except TimeoutError:
            return None
        return _Ahead(self._job(place, memory), lease, memory)

    def _job(self, place: _Place, memory: torch.Tensor) -> Job:
        start = place.offset // PAGE_BYTES * PAGE_BYTES
        end = min(start + memory.nbytes, place.file.size())
        wanted = [Wanted(place.file, start, memory[: end - start], 0)] if place.nbytes else []
        job = Job(wanted)
        self._feeder.submit(job)
        return job

    def _drop(self) -> None:
        while self._ahead:
            self._give_back(self._ahead.popleft()[1])

    def _give_back(self, ahead: _Ahead) -> None:
        self._feeder.cancel(ahead.job)
        if ahead.lease is not None:
            ahead.lease.__exit__(None, None, None)

    # --- files --------------------------------------------------------------------------------

    def _find(
        self, index: Mapping[str, Mapping[str, Any]], folder: str | None, reader: AioHandle
    ) -> dict[str, _Place]:
        headers: dict[str, Any] = {}
        found: dict[str, _Place] = {}
        for name, about in index.items():
            path = about.get("safetensors_file")
            wanted = getattr(torch, str(about["dtype"])) if "dtype" in about else None
            if path is None:
                if folder is None:
                    raise ValueError(
                        f"{name!r} is in a .dat file, of a save_folder that is not given"
                    )
                found[name] = self._raw(name, folder, about)
                continue
            path = os.fspath(path)
            if path not in headers:
                headers[path] = header_of(self._open(path), reader).tensors
            stored = about.get("weight_name", name)
            entry = headers[path].get(stored)
            if entry is None:
                raise IntegrityError(
                    f"{path} lacks {stored!r}, which the index says is there",
                    expected=stored,
                    found=sorted(headers[path])[:20],
                )
            dtype, shape = entry.for_torch()
            found[name] = _Place(
                self._files[path], entry.start, entry.nbytes, shape, dtype, wanted or dtype
            )
        return found

    def _raw(self, name: str, folder: str, about: Mapping[str, Any]) -> _Place:
        dtype = getattr(torch, str(about["dtype"]))
        shape = tuple(int(size) for size in about["shape"])
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        file = self._open(os.path.join(folder, f"{name}.dat"))
        if file.size() < nbytes:
            raise IntegrityError(
                f"{file.path} is too short for {name!r}", expected=nbytes, found=file.size()
            )
        return _Place(file, 0, nbytes, shape, dtype, dtype)

    def _open(self, path: str) -> File:
        if path not in self._files:
            self._files[path] = files.open(path)
        return self._files[path]

    def _check(self, place: _Place, key: str) -> None:
        if _facts(place.file) != self._facts[place.file.path]:
            raise IntegrityError(
                f"{place.file.path} changed while {key!r} was read from it",
                expected=self._facts[place.file.path],
                found=_facts(place.file),
            )


class _Pages:
    """Given to torch as the memory of a tensor; gives the lease back when torch lets go of it."""

    lease: Lease | None

    def __del__(self) -> None:
        lease, self.lease = getattr(self, "lease", None), None
        if lease is not None:
            lease.__exit__(None, None, None)


@functools.lru_cache(maxsize=256)
def _kind(nbytes: int) -> Any:
    array: Any = ctypes.c_char * nbytes
    return type("_LeasedPages", (_Pages, array), {})


def _tensor(ahead: _Ahead, place: _Place) -> torch.Tensor:
    """The tensor on its pages, which it keeps for as long as its storage lives."""
    if not place.nbytes:
        if ahead.lease is not None:
            ahead.lease.__exit__(None, None, None)
        return torch.empty(place.shape, dtype=place.stored)
    shift = place.offset % PAGE_BYTES
    if ahead.lease is None:
        tensor = ahead.memory[shift : shift + place.nbytes]
    else:
        pages = _kind(ahead.memory.nbytes).from_address(ahead.memory.data_ptr())
        pages.arena = ahead.memory  # the pool's mapping
        pages.lease = ahead.lease
        tensor = torch.frombuffer(pages, dtype=torch.uint8, count=place.nbytes, offset=shift)
    if tensor.data_ptr() % place.stored.itemsize:
        tensor = tensor.clone()
    return tensor.view(place.stored).view(place.shape)


def _pages(place: _Place) -> int:
    start = place.offset // PAGE_BYTES * PAGE_BYTES
    return max(PAGE_BYTES, -(-(place.offset + place.nbytes - start) // PAGE_BYTES) * PAGE_BYTES)


def _facts(file: File) -> tuple[int, int]:
    found = os.fstat(file._descriptors.any_fd())
    return found.st_size, found.st_mtime_ns


def _index_of(folder: str) -> Mapping[str, Mapping[str, Any]]:
    path = os.path.join(folder, "index.json")
    with open(path, encoding="utf-8") as file:
        try:
            index: Mapping[str, Mapping[str, Any]] = json.load(file)
        except ValueError as failed:
            raise IntegrityError(
                f"{path} is not valid JSON: {failed}", expected="JSON", found="not JSON"
            ) from None
    return index


@contextlib.contextmanager
def _reader(
    given: AioHandle | None, folder: str | None, index: Mapping[str, Mapping[str, Any]] | None
) -> Iterator[AioHandle]:
    if given is not None:
        yield given
        return
    first = next((about.get("safetensors_file") for about in (index or {}).values()), None)
    with new_handle(first or folder or ".") as own:
        yield own


def _close_files(opened: dict[str, File]) -> None:
    for file in opened.values():
        file.close()


def dispatch_model(model: Any, *arguments: Any, **named: Any) -> Any:
    """Accelerate's `dispatch_model`, with what is on disk read by nvmeio.

    Parameters, return value and errors are accelerate's; those of `NvmeWeights` come in addition.

    Raises:
        ImportError: accelerate is not installed.
    """
    big_modeling: Any = importlib.import_module("accelerate.big_modeling")
    with _replacing:
        before = getattr(big_modeling, _SEAM)
        setattr(big_modeling, _SEAM, NvmeWeights)
        try:
            return big_modeling.dispatch_model(model, *arguments, **named)
        finally:
            setattr(big_modeling, _SEAM, before)


def install() -> None:
    """Have accelerate read all weights that it offloads to disk through nvmeio. Idempotent.

    Raises:
        ImportError: accelerate is not installed.
    """
    big_modeling: Any = importlib.import_module("accelerate.big_modeling")
    with _replacing:
        if getattr(big_modeling, _SEAM) is not NvmeWeights:
            _stock.append(getattr(big_modeling, _SEAM))
            setattr(big_modeling, _SEAM, NvmeWeights)


def uninstall() -> None:
    """Undo `install`; models that were dispatched before stay as they are."""
    big_modeling: Any = importlib.import_module("accelerate.big_modeling")
    with _replacing:
        if _stock:
            setattr(big_modeling, _SEAM, _stock.pop())


_replacing = threading.RLock()
_stock: list[Any] = []
