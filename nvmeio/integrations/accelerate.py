"""accelerate's disk offload, with the weights read ahead by nvmeio.

    from nvmeio.integrations.accelerate import dispatch_model   # in place of accelerate's

or, for `from_pretrained(…, device_map="auto", offload_folder=…)` and everything else that makes
accelerate read weights from disk, one line before it:

    nvmeio.integrations.accelerate.install()

accelerate loads the weights of a module just before its forward, one tensor after another, and
waits for each. It reads a mapping from names to tensors; `NvmeWeights` is one that
begins to read the tensors that are asked for next while the present ones are computed with.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from nvmeio import _checks, files
from nvmeio._formats.safetensors.open_set import header_of
from nvmeio._io.drives import DriveHandles
from nvmeio._memory.mappings import Mapping as MemoryMapping
from nvmeio._pages import PAGE_BYTES, round_down, round_up
from nvmeio._residency.order import Cyclic
from nvmeio._residency.reader import Fill, Reader, WantedBytes
from nvmeio._residency.window import Keeper, LentPool, Slot, Window
from nvmeio._storage.untrusted import INDEX_BYTES, Unchanged, read_object
from nvmeio._threads.closing import do_all, on_error
from nvmeio._threads.owner import OwnerThread
from nvmeio._threads.shutdown import Ending
from nvmeio.errors import ClosedError, IntegrityError, TransferError, with_context
from nvmeio.files import File
from nvmeio.handle import AioHandle

__all__ = ["NvmeWeights", "dispatch_model", "install", "uninstall"]

# The most bytes that are read ahead, and kept for the tensors in use.
WINDOW_BYTES = 512 << 20
_SEAM = "OffloadedWeightsLoader"


class _Place(NamedTuple):
    """A tensor's place in its file, and its dtype there and in use."""

    file: File
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    stored: torch.dtype
    dtype: torch.dtype


class _Reading(Keeper[str, Slot[str]]):
    """Tensors on their way through a window of `budget_bytes`; used by the thread that owns it.

    `places` are in the order that is guessed.
    """

    def __init__(self, places: Mapping[str, _Place], budget_bytes: int, handle: AioHandle) -> None:
        self._places = places
        self._unchanged = {place.file.path: Unchanged(place.file) for place in places.values()}
        self._pool = LentPool(budget_bytes)
        self._reader = Reader(handle)
        self.window: Window[str, Slot[str]] = Window(self._reader, self, Cyclic(list(places)))

    def get(self, name: str) -> torch.Tensor:
        """A tensor as it is stored, whose memory ends with it."""
        # Reads ahead may have failed as well: they are repeated when their tensors are requested.
        with on_error(self.window.drop_ahead):
            slot = self.window.need(name)
        place = self._places[name]
        memory = slot.memory
        self.window.drop(name)  # the tensor alone has it
        if not place.nbytes:
            return torch.empty(place.shape, dtype=place.stored)
        shift = place.offset % PAGE_BYTES
        tensor = memory[shift : shift + place.nbytes]
        if tensor.data_ptr() % place.stored.itemsize:
            tensor = tensor.clone()
        return tensor.view(place.stored).view(place.shape)

    def close(self) -> None:
        """Stop reading; tensors that are in use stay valid."""
        self.window.drop_all()
        self._reader.stop()
        self._pool.close()

    # For the window

    def take(self, unit: str) -> Slot[str] | None:
        return self._pool.take(unit, _pages(self._places[unit]))

    def take_anyway(self, unit: str) -> Slot[str]:
        """Memory of its own: all of the window is in use."""
        nbytes = _pages(self._places[unit])
        memory = MemoryMapping(nbytes).tensor(0, (nbytes,), torch.uint8)
        return Slot(unit, memory, memory)

    def fill(self, slot: Slot[str]) -> Fill:
        """One read, of whole pages."""
        place = self._places[slot.unit]
        start = round_down(place.offset, PAGE_BYTES)
        end = min(start + slot.host.nbytes, place.file.size())
        return Fill(
            [WantedBytes(place.file, start, slot.host[: end - start], 0)] * bool(place.nbytes)
        )

    def check(self, slot: Slot[str]) -> None:
        """Raise if the file was written to."""
        self._unchanged[self._places[slot.unit].file.path].check(f"weight {slot.unit!r}")

    def explain(self, slot: Slot[str], error: BaseException) -> BaseException:
        if isinstance(error, TransferError):
            return with_context(error, f"weight {slot.unit!r}")
        return error


class NvmeWeights(Mapping[str, torch.Tensor]):
    """A weights map for accelerate's hooks: its own `OffloadedWeightsLoader`, with prefetch.

    Args:
        state_dict: Tensors that are in memory, by name; they come first.
        save_folder: The folder that accelerate has offloaded weights to, with their ``index.json``.
        index: The place of each name: ``safetensors_file`` and ``weight_name``, or the dtype
            and shape of ``NAME.dat`` in the folder; by default that of the folder.
        device: The device of the tensors; the CPU by default.
        window_bytes: Memory for tensors in use and on their way, or a size such as "1G" (GiB);
            page-locked where allowed.
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
        window_bytes: int | str = WINDOW_BYTES,
        handle: AioHandle | None = None,
    ) -> None:
        window_bytes = _checks.size("window_bytes", window_bytes)
        if state_dict is None and save_folder is None and index is None:
            raise ValueError("give a state_dict, a save_folder or an index of weights")
        self.state_dict = dict(state_dict or {})
        self.device = device
        self._files: dict[str, File] = {}
        self._places: dict[str, _Place] = {}
        self._reading: _Reading | None = None
        self._owner = OwnerThread("nvmeio-weights-map", "these weights are closed: open them again")
        folder = None if save_folder is None else os.fspath(save_folder)
        self._ending = self._owner.call(self._begin, folder, index, window_bytes, handle)
        self._names = [*self.state_dict, *(n for n in self._places if n not in self.state_dict)]

    def _begin(
        self,
        folder: str | None,
        index: Mapping[str, Mapping[str, Any]] | None,
        window_bytes: int,
        handle: AioHandle | None,
    ) -> Ending:
        with contextlib.ExitStack() as undo:
            undo.callback(self._owner.close)
            opened = self._files  # not this object, which would then never end
            undo.callback(lambda: do_all(file.close for file in opened.values()))
            if index is None and folder is not None:
                index = read_object(os.path.join(folder, "index.json"), INDEX_BYTES)
            first = next((each.get("safetensors_file") for each in (index or {}).values()), None)
            handles = DriveHandles(handle, [first or folder or "."])
            undo.callback(handles.close)
            reader = handles.first
            self._places = self._find(index or {}, folder)
            largest = max((_pages(place) for place in self._places.values()), default=0)
            most = sum(_pages(place) for place in self._places.values())
            room = min(max(window_bytes, 2 * largest), max(most, PAGE_BYTES))
            self._reading = _Reading(self._places, room, reader)
            undo.callback(self._reading.close)
            return Ending(self._owner, undo.pop_all().close)

    # --- what accelerate calls ----------------------------------------------------------------

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        place = self._places[key]
        if self._reading is None:
            raise ClosedError("these weights are closed: open them again")
        tensor = self._owner.call(self._reading.get, key)
        return tensor.to(torch.device("cpu" if self.device is None else self.device), place.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def close(self) -> None:
        """Stop reading and close the files. Tensors that are in use stay valid. Idempotent."""
        self._ending.close()

    @property
    def mispredicted(self) -> int:
        """Tensors that were asked for and not on their way, the very first aside."""
        return 0 if self._reading is None else self._reading.window.mispredicted

    # --- files --------------------------------------------------------------------------------

    def _find(
        self, index: Mapping[str, Mapping[str, Any]], folder: str | None
    ) -> dict[str, _Place]:
        headers: dict[str, Any] = {}
        found: dict[str, _Place] = {}
        for name, about in index.items():
            path = about.get("safetensors_file")
            wanted = getattr(torch, str(about["dtype"])) if "dtype" in about else None
            if path is None:
                if folder is None:
                    raise ValueError(f"{name!r} is in a .dat file: give its save_folder")
                found[name] = self._raw(name, folder, about)
                continue
            path = os.fspath(path)
            if path not in headers:
                headers[path] = header_of(self._open(path)).tensors
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
        nbytes = math.prod(shape) * dtype.itemsize
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


def _pages(place: _Place) -> int:
    start = round_down(place.offset, PAGE_BYTES)
    return max(PAGE_BYTES, round_up(place.offset + place.nbytes - start, PAGE_BYTES))


def dispatch_model(model: Any, *arguments: Any, **named: Any) -> Any:
    """Accelerate's `dispatch_model`, with weights on disk read by nvmeio.

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
