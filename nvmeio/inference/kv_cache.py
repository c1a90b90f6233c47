"""Past keys and values of idle layers, out of the way: on disk, or in page-locked memory.

A transformers `DynamicCache` whose layers keep only the newest tokens. Older ones are gathered in
blocks of `BLOCK_TOKENS`, written as they fill up, and read back while the layer before computes.
What a layer hands to attention is one tensor of all tokens, equal to what `DynamicCache` would
have.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import importlib
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nvmeio import buffers, files
from nvmeio._io.handles import new_handle
from nvmeio._io.threads import Thread
from nvmeio._plan import PAGE_BYTES
from nvmeio._storage import crc32
from nvmeio.errors import IntegrityError
from nvmeio.handle import AioHandle
from nvmeio.inference._transformers import require
from nvmeio.operation import Operation

# Tokens that are written at once. A layer's newest tokens stay in memory until they are so many.
BLOCK_TOKENS = 64


class _Block(NamedTuple):
    """A run of tokens of one layer: keys and values, [2, batch, heads, tokens, head size]."""

    shape: tuple[int, ...]
    offset: int  # in the file
    room: int  # bytes there, whole pages
    memory: torch.Tensor | None  # the bytes, where they are kept in memory or still being written
    sum: int | None = None  # the CRC-32 of the bytes, of what is in a file


class Store:
    """Where blocks go.

    Args:
        directory: A file in it, which has no name any more once it is open; None keeps the bytes in
            page-locked memory.
        handle: Moves the bytes, and stays open.
        checksum: Compare what comes back from the file with what was put there.

    Attributes:
        written_bytes: Bytes that were put away so far.
        read_bytes: Bytes that were brought back.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        handle: AioHandle | None,
        checksum: bool = True,
    ) -> None:
        self._checksum = checksum
        self.written_bytes = 0
        self.read_bytes = 0
        self._end = 0
        self._free: list[tuple[int, int]] = []  # offset and bytes, ascending, not adjacent
        self._handle = handle
        self._flying: list[Operation] = []
        self._file: files.File | None = None
        if directory is not None:
            descriptor, name = tempfile.mkstemp(prefix=".nvmeio-kv-", dir=directory)
            os.close(descriptor)
            try:
                self._file = files.open(name, "r+")
            finally:
                os.unlink(name)

    def put(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[_Block, Operation | None]:
        """Begin to put tokens away."""
        shape = (2, *keys.shape)
        nbytes = 2 * keys.nbytes
        self.written_bytes += nbytes
        memory = _room(nbytes, keys.device.type == "cuda")
        both = memory[:nbytes].view(keys.dtype).view(shape)
        both[0].copy_(keys)
        both[1].copy_(values)
        if self._file is None or self._handle is None:
            return _Block(shape, 0, 0, memory), None
        offset = self._place(memory.nbytes)
        writing = self._handle.async_pwrite(memory, self._file, offset)
        self._started(writing)
        # While it is written: it only reads the memory.
        found = crc32.of_memory(memory.data_ptr(), nbytes) if self._checksum else None
        return _Block(shape, offset, memory.nbytes, None, found), writing

    def _place(self, nbytes: int) -> int:
        """Where in the file there is room: where blocks were forgotten, or at its end."""
        for number, (offset, room) in enumerate(self._free):
            if room >= nbytes:
                left = [(offset + nbytes, room - nbytes)] if room > nbytes else []
                self._free[number : number + 1] = left
                return offset
        offset, self._end = self._end, self._end + nbytes
        return offset

    def forget(self, blocks: Sequence[_Block]) -> None:
        """Let the room of blocks be written again; nothing of them may be in flight.

        Beam search writes all of a cache anew for each token: without this, the file would grow by
        as much each time.
        """
        free = sorted([*self._free, *((b.offset, b.room) for b in blocks if b.room)])
        self._free = []
        for offset, room in free:
            if self._free and sum(self._free[-1]) == offset:
                offset, room = self._free[-1][0], self._free.pop()[1] + room
            self._free.append((offset, room))

    def _started(self, operation: Operation) -> None:
        # A failure is told by the layer whose tokens they are; the handle need not tell it again.
        left = (o for o in self._flying if not o.done() or o.exception() is not None)
        self._flying = [*left, operation]

    def settle(self) -> None:
        """Wait for whatever was started, wanted or not: it holds descriptors and memory."""
        flying, self._flying = self._flying, []
        for operation in flying:
            with contextlib.suppress(concurrent.futures.CancelledError):
                operation.exception()

    def get(self, block: _Block, memory: torch.Tensor) -> Operation | None:
        """Begin to bring a block back into `memory`; None where it is there at once."""
        self.read_bytes += memory.nbytes
        if block.memory is not None or self._file is None or self._handle is None:
            memory.copy_(block.memory)  # type: ignore[arg-type]
            return None
        reading = self._handle.async_pread(memory, self._file, block.offset)
        self._started(reading)
        return reading

    def check(self, block: _Block, memory: torch.Tensor, what: str) -> None:
        """Compare what came back with what was put away.

        Args:
            block: Which one.
            memory: What is there now.
            what: The block, for the message.

        Raises:
            IntegrityError: They differ.
        """
        found = None if block.sum is None else crc32.of_tensor(memory)
        if found != block.sum and self._file is not None:
            raise IntegrityError(
                f"{self._file.path}: {what}, bytes [{block.offset}, "
                f"{block.offset + memory.nbytes}), is not what was written there: look at "
                "`dmesg` and `smartctl -a`, and start again with a new cache (checksum=False takes "
                "it as it is)",
                expected=f"CRC-32 {block.sum:08x}",
                found=f"{found:08x}",
            )

    def close(self) -> None:
        """Let go of the file, and with it of its blocks."""
        self.settle()
        if self._file is not None:
            self._file.close()


def _room(nbytes: int, for_cuda: bool) -> torch.Tensor:
    whole = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
    if for_cuda:
        with contextlib.suppress(OSError):  # the limit for locked memory
            return buffers.empty_pinned(whole, dtype=torch.uint8)
    return buffers.empty_aligned(whole, dtype=torch.uint8)


class OffloadedLayer:
    """The keys and values of one layer; joined with transformers' `DynamicLayer`.

    Its `keys` and `values` are those of the newest tokens, which are not put away yet.
    """

    keys: Any
    values: Any
    is_initialized: bool
    store: Store
    following: Any = None  # the layer whose blocks are to be read next
    _broken: BaseException | None = None

    def _begin(self) -> None:
        if not hasattr(self, "_blocks"):
            self._blocks: list[_Block] = []
            self._writing: list[Operation] = []
            self._arriving: tuple[torch.Tensor, list[tuple[torch.Tensor, _Block]], list[Any]] | None
            self._arriving = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values, the new ones behind the past ones; `DynamicLayer.update`."""
        self._begin()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)  # type: ignore[attr-defined]
        self.read_ahead()
        if self.following is not None and self.following is not self:
            self.following.read_ahead()
        keys, values = self._all(key_states, value_states)
        start = sum(block.shape[3] for block in self._blocks)
        self._keep(keys[..., start:, :], values[..., start:, :])
        return keys, values

    def read_ahead(self) -> None:
        """Begin to bring the blocks back."""
        self._begin()
        if self._broken is not None:
            raise RuntimeError(
                "past keys and values of this cache were lost when they were written or read: "
                "start again with a new one"
            ) from self._broken
        if self._arriving is not None or not self._blocks:
            return
        while self._writing:  # what was written is read from the file
            self._checked(self._writing.pop(0))
        itemsize = self.keys.element_size()
        sizes = [_nbytes(block.shape) * itemsize for block in self._blocks]
        starts, end = [], 0
        for size in sizes:
            starts.append(end)
            end += -(-size // PAGE_BYTES) * PAGE_BYTES
        memory = _room(end, self.keys.device.type == "cuda")
        pieces, operations = [], []
        for block, start, size in zip(self._blocks, starts, sizes, strict=True):
            whole = -(-size // PAGE_BYTES) * PAGE_BYTES
            operations.append(self.store.get(block, memory[start : start + whole]))
            pieces.append((memory[start : start + size].view(self.keys.dtype), block))
        self._arriving = (memory, pieces, operations)

    def _all(self, *new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.read_ahead()
        arriving, self._arriving = self._arriving, None
        past: list[torch.Tensor] = []
        if arriving is not None:
            _, pieces, operations = arriving
            for operation in operations:
                if operation is not None:
                    operation.exception()
            for operation in operations:
                if operation is not None:
                    self._checked(operation)
            self._compare(pieces)
            past = [memory.view(block.shape) for memory, block in pieces]
        found = []
        for index, kept in enumerate((self.keys, self.values)):
            parts = [block[index].to(kept.device, non_blocking=True) for block in past]
            if kept.numel():
                parts.append(kept)
            if new:
                parts.append(new[index])
            found.append(torch.cat(parts, dim=-2) if parts else kept)
        if arriving is not None and self.keys.device.type == "cuda":
            torch.cuda.current_stream(self.keys.device).synchronize()  # before the memory goes
        return found[0], found[1]

    def _compare(self, pieces: Sequence[tuple[torch.Tensor, _Block]]) -> None:
        token = 0
        for number, (memory, block) in enumerate(pieces):
            end = token + block.shape[3]
            try:
                what = f"block {number} of past keys and values, tokens {token} to {end - 1}"
                self.store.check(block, memory, what)
            except BaseException as failed:
                self._broken = failed
                self.store.settle()
                raise
            token = end

    def _checked(self, operation: Operation) -> None:
        try:
            operation.result()
        except BaseException as failed:
            self._broken = failed
            self.store.settle()
            raise

    def _keep(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """The newest tokens: put whole blocks away, the rest stays."""
        count = keys.shape[-2]
        whole = count // BLOCK_TOKENS * BLOCK_TOKENS
        if whole:
            try:
                block, writing = self.store.put(keys[..., :whole, :], values[..., :whole, :])
            except BaseException as failed:  # other layers have these tokens already
                self._broken = failed
                raise
            self._blocks.append(block)
            if writing is not None:
                self._writing.append(writing)
        # A copy, or the tensor of all tokens would stay with it.
        self.keys, self.values = keys[..., whole:, :].clone(), values[..., whole:, :].clone()

    def _change(self, change: Any) -> None:
        """Bring everything back, change it, put it away again."""
        if self.get_seq_length() == 0:
            return
        keys, values = self._all()
        self.store.forget(self._blocks)
        self._blocks = []
        self._keep(change(keys), change(values))

    def get_seq_length(self) -> int:
        """Tokens in the cache."""
        self._begin()
        if not self.is_initialized or self.keys is None:
            return 0
        newest = self.keys.shape[-2] if self.keys.numel() else 0
        return sum(block.shape[3] for block in self._blocks) + int(newest)

    def reset(self) -> None:
        """Forget everything."""
        self._begin()
        while self._writing:
            self._writing.pop(0).exception()
        for operation in self._arriving[2] if self._arriving is not None else ():
            if operation is not None:
                operation.exception()
        self.store.forget(self._blocks)
        self._blocks, self._arriving, self._broken = [], None, None
        self.keys = self.values = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Forget that many of the newest tokens; a negative number, as transformers has it."""
        if tokens_to_remove > 0:
            raise ValueError("crop takes the number of tokens to remove as a negative number")
        if tokens_to_remove:
            self._change(lambda states: states[..., :tokens_to_remove, :])

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Other sequences in the places of these, for beam search."""
        self._change(lambda states: states.index_select(0, beam_idx.to(states.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence several times."""
        self._change(lambda states: states.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Only some of the sequences."""
        self._change(lambda states: states[indices, ...])

    def offload(self) -> None:
        """Nothing: what can be put away is."""

    def prefetch(self) -> None:
        """As `read_ahead`."""
        self.read_ahead()


def _nbytes(shape: tuple[int, ...]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found


@functools.cache
def _kinds() -> tuple[Any, Any]:
    """The classes, made once: of a cache, and of a layer."""
    utilities: Any = importlib.import_module("transformers.cache_utils")
    cache = type("OffloadedCache", (utilities.DynamicCache,), {"__module__": __name__})
    layer = type(
        "OffloadedDynamicLayer",
        (OffloadedLayer, utilities.DynamicLayer),
        {"__module__": __name__, "_layer_type": None},
    )
    return cache, layer


def new_cache(config: Any, store: Store) -> Any:
    """An empty cache: a transformers `DynamicCache` that puts its layers away in a store.

    Args:
        config: The model's configuration, for the kinds of its layers; those with a sliding
            window are small and stay in memory. None: all layers are of the growing kind.
        store: Where to.

    Raises:
        BackendUnavailableError: transformers is not installed.
    """
    require()
    utilities: Any = importlib.import_module("transformers.cache_utils")
    stock = utilities.DynamicLayer
    cache_kind, layer_kind = _kinds()

    def layer() -> Any:
        made = layer_kind()
        made.store = store
        return made

    cache = utilities.DynamicCache(config=config)
    cache.__class__ = cache_kind
    cache.layers = [layer() if type(given) is stock else given for given in cache.layers]
    if cache.layer_class_to_replicate is stock:
        cache.layer_class_to_replicate = layer
    ours = [made for made in cache.layers if isinstance(made, layer_kind)]
    weakref.finalize(cache, store.close)  # the file goes with the cache, whoever holds the store
    for one, following in zip(ours, ours[1:] + ours[:1], strict=True):
        one.following = following
    return cache


def offload(
    model: Any,
    handle: AioHandle | None,
    device: torch.device,
    where: bool | str | os.PathLike[str],
    checksum: bool = True,
) -> Callable[[], None]:
    """Have a transformers model use such caches wherever it would use a new `DynamicCache`.

    Args:
        model: The model.
        handle: Moves the bytes; None makes one when it is needed.
        device: Of the model.
        where: True: memory for a GPU, a temporary file for a CPU; or a directory.
        checksum: As for `Store`.

    Returns:
        What closes the handle that was made here: at the latest when the model is dropped. Caches
        that used it are of no use any more; a new one makes another.

    Raises:
        TypeError: It is no transformers model.
        FileNotFoundError: There is no such directory.
    """
    if not hasattr(model, "config") or not hasattr(model.config, "get_text_config"):
        raise TypeError("kv_offload works with transformers' models, whose caches it can stand for")
    utilities: Any = importlib.import_module("transformers.cache_utils")
    directory: str | os.PathLike[str] | None = None
    if where is not True:
        if isinstance(where, bool) or not Path(where).is_dir():
            raise FileNotFoundError(f"kv_offload={where!r}: there is no such directory")
        directory = where
    elif device.type == "cpu":
        directory = tempfile.gettempdir()
    mover = _Mover(handle, directory)
    weakref.finalize(model, _finish, mover.close)

    def fresh(config: Any) -> Any:
        return new_cache(config, Store(directory, mover.get(), checksum))

    def before(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        given: Any = named.get("past_key_values")
        config = model.config.get_text_config(decoder=True)
        if type(given) is utilities.EncoderDecoderCache:
            # What comes from the encoder stays: models take it out of the layers themselves.
            if _is_new(given.self_attention_cache, utilities):
                given.self_attention_cache = fresh(config)
        elif given is None:
            wanted = named.get("use_cache", getattr(config, "use_cache", False))
            if wanted and not model.config.is_encoder_decoder:
                named["past_key_values"] = fresh(config)
        elif _is_new(given, utilities):
            named["past_key_values"] = fresh(config)
        return arguments, named

    model.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    return mover.close


def _finish(close: Callable[[], None]) -> None:
    """Close for a model that is dropped, which a thread that this waits for may have noticed."""
    if threading.current_thread().name.startswith("nvmeio"):
        # Where no thread can be had: a handle that is dropped gives back what it has.
        with contextlib.suppress(RuntimeError, MemoryError):
            Thread(close, "nvmeio-close").start()
    else:
        close()


class _Mover:
    """The handle of a model's caches: the caller's, or one that is made when it is needed."""

    def __init__(self, given: AioHandle | None, directory: str | os.PathLike[str] | None) -> None:
        self._given = given
        self._directory = directory
        self._own: AioHandle | None = None
        self._lock = threading.Lock()

    def get(self) -> AioHandle | None:
        """The handle; None where caches are kept in memory."""
        if self._given is not None or self._directory is None:
            return self._given
        with self._lock:
            if self._own is None:
                self._own = new_handle(self._directory)
            return self._own

    def close(self) -> None:
        """Close it, if it was made here."""
        with self._lock:
            own, self._own = self._own, None
        if own is not None:
            own.close()


def _is_new(cache: Any, utilities: Any) -> bool:
    return type(cache) is utilities.DynamicCache and cache.get_seq_length() == 0
