"""Past keys and values of idle layers, out of the way: on disk, or in page-locked memory.

A transformers `DynamicCache` whose layers keep only the newest tokens. Older ones are gathered in
blocks of `BLOCK_TOKENS`, written as they fill up, and read back while the layer before computes.
A layer hands one tensor of all tokens to attention, equal to the one of `DynamicCache`.

Blocks lie in a file without a name, or in memory (`KVStore`).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch

from nvmeio import _checks
from nvmeio._checks import Paths
from nvmeio._files.descriptors import MEMORY_FILE_SYSTEMS
from nvmeio._files.system import file_system_of
from nvmeio._io.drives import LEAST_CHUNK_BYTES, DriveHandles, ScratchFile
from nvmeio._io.inflight import new_staging
from nvmeio._memory import devices
from nvmeio._pages import PAGE_BYTES, round_up
from nvmeio._storage import crc32
from nvmeio._storage.durable import make_directory
from nvmeio._threads.threads import Thread
from nvmeio.errors import IntegrityError
from nvmeio.handle import AioHandle
from nvmeio.inference._plan.transformers import cache_among, cache_argument, cache_utilities
from nvmeio.inference._prefix_format import Layer, states_on
from nvmeio.operation import Operation

# Tokens that are written at once. A layer's newest tokens stay in memory until they are so many.
BLOCK_TOKENS = 64

# Bytes of memory that blocks share: page-locking it takes 8 to 16 ms.
_SHARED_BYTES = 16 << 20

# Bytes on each drive of a file over several: all drives at once bring back blocks of a few of
# these.
_BAND_BYTES = 4 * LEAST_CHUNK_BYTES

# Functions that make an empty cache from the configuration of a model with `kv_offload`.
_makers: weakref.WeakKeyDictionary[Any, Callable[[Any], Any]] = weakref.WeakKeyDictionary()


class OffloadedLayer:
    """The keys and values of one layer; joined with transformers' `DynamicLayer`.

    Its `keys` and `values` are those of the newest tokens, which are not put away yet.
    """

    keys: Any
    values: Any
    is_initialized: bool
    store: KVStore
    following: Any = None  # the layer whose blocks are to be read next
    _broken: BaseException | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.blocks: list[KVBlock] = []
        self._writing: list[Operation] = []
        self._arriving: tuple[list[tuple[torch.Tensor, KVBlock]], list[Operation]] | None = None
        super().__init__(*args, **kwargs)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values, the new ones behind the past ones; `DynamicLayer.update`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)  # type: ignore[attr-defined]
        self.read_ahead()
        if self.following is not None and self.following is not self:
            self.following.read_ahead()
        keys, values = self.states(key_states, value_states)
        start = sum(block.tokens for block in self.blocks)
        self._keep(keys[..., start:, :], values[..., start:, :])
        return keys, values

    def read_ahead(self) -> None:
        """Begin to bring the blocks back."""
        if self._broken is not None:
            raise RuntimeError(
                "past keys and values of this cache were lost when they were written or read: "
                "start again with a new one"
            ) from self._broken
        if self._arriving is not None or not self.blocks:
            return
        while self._writing:  # written blocks are read from the file
            with self._breaking():
                self._writing.pop(0).result()
        sizes = [sum(block.about.sizes) for block in self.blocks]
        rooms = [round_up(size, PAGE_BYTES) for size in sizes]
        kept = [block.memory for block in self.blocks if block.memory is not None]
        if not kept:
            staging = new_staging(sum(rooms), devices.device_of(self.keys))
            kept = list(staging.split_with_sizes(rooms))
        pieces: list[tuple[torch.Tensor, KVBlock]] = []
        operations: list[Operation] = []
        for block, room, size in zip(self.blocks, kept, sizes, strict=True):
            operations += self.store.get(block, room)
            pieces.append((room[:size], block))
        self._arriving = (pieces, operations)

    def states(self, *new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values, and new ones behind them."""
        self.read_ahead()
        arriving, self._arriving = self._arriving, None
        past: list[tuple[torch.Tensor, torch.Tensor]] = []
        if arriving is not None:
            pieces, operations = arriving
            for operation in operations:
                operation.exception()
            with self._breaking():
                for operation in operations:
                    operation.result()
                self._compare(pieces)
            past = [states_on(memory, block.about) for memory, block in pieces]
        found = []
        for index, kept in enumerate((self.keys, self.values)):
            parts = [block[index].to(kept.device, non_blocking=True) for block in past]
            if kept.numel():
                parts.append(kept)
            if new:
                parts.append(new[index])
            found.append(torch.cat(parts, dim=-2) if parts else kept)
        if arriving is not None:
            devices.now(devices.device_of(self.keys)).wait()  # before the memory is others'
        return found[0], found[1]

    def _compare(self, pieces: Sequence[tuple[torch.Tensor, KVBlock]]) -> None:
        token = 0
        for number, (memory, block) in enumerate(pieces):
            end = token + block.tokens
            what = f"block {number} of past keys and values, tokens {token} to {end - 1}"
            self.store.check(block, memory, what)
            token = end

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        """End this cache if the block fails."""
        try:
            yield
        except BaseException as failed:
            self._broken = failed
            self.store.settle()
            raise

    def _keep(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keep the newest tokens: put whole blocks away, the rest stays."""
        count = keys.shape[-2]
        whole = count // BLOCK_TOKENS * BLOCK_TOKENS
        if whole:
            try:
                block, writing = self.store.put(keys[..., :whole, :], values[..., :whole, :])
            except BaseException as failed:  # other layers have these tokens already
                self._broken = failed
                raise
            self.blocks.append(block)
            self._writing += writing
        # A copy, or the tensor of all tokens would stay with it.
        self.keys, self.values = keys[..., whole:, :].clone(), values[..., whole:, :].clone()

    def _change(self, change: Any) -> None:
        """Bring everything back, change it, put it away again."""
        if self.get_seq_length() == 0:
            return
        keys, values = self.states()
        self.store.forget(self.blocks)
        self.blocks = []
        self._keep(change(keys), change(values))

    def get_seq_length(self) -> int:
        """Tokens in the cache."""
        if not self.is_initialized or self.keys is None:
            return 0
        newest = self.keys.shape[-2] if self.keys.numel() else 0
        return sum(block.tokens for block in self.blocks) + int(newest)

    def reset(self) -> None:
        """Forget everything."""
        while self._writing:
            self._writing.pop(0).exception()
        for operation in self._arriving[1] if self._arriving is not None else ():
            operation.exception()
        self.store.forget(self.blocks)
        self.blocks, self._arriving, self._broken = [], None, None
        self.keys = self.values = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Forget that many of the newest tokens; a negative number, as transformers has it."""
        if tokens_to_remove > 0:
            raise ValueError("crop takes the number of tokens to remove with a minus: give -n")
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
        """Do nothing: all that can be offloaded already is."""

    def prefetch(self) -> None:
        """As `read_ahead`."""
        self.read_ahead()


def states_of(layer: Any) -> tuple[Any, Any]:
    """The keys and values of all tokens in a layer of any cache."""
    return layer.states() if isinstance(layer, OffloadedLayer) else (layer.keys, layer.values)


def _all_states(cache: Any) -> Iterator[tuple[Any, ...]]:
    """As of a `DynamicCache`, which others are made from."""
    for layer in cache.layers:
        window = getattr(layer, "_sliding_window_tensor", None)
        yield (*(states_of(layer) if layer.is_initialized else (None, None)), window)


@functools.cache
def _kinds() -> tuple[Any, Any]:
    """The classes of a cache and of a layer, made once."""
    utilities = cache_utilities()
    own = {"__module__": __name__, "__iter__": _all_states}
    cache = type("OffloadedCache", (utilities.DynamicCache,), own)
    layer = type(
        "OffloadedDynamicLayer",
        (OffloadedLayer, utilities.DynamicLayer),
        {"__module__": __name__, "_layer_type": None},
    )
    return cache, layer


def new_cache(config: Any, store: KVStore) -> Any:
    """An empty cache: a transformers `DynamicCache` that puts its layers away in a store.

    Args:
        config: The model's configuration, for the kinds of its layers; those with a sliding
            window are small and stay in memory. None: all layers are of the growing kind.
        store: The place of the blocks.

    Raises:
        BackendUnavailableError: transformers is not installed.
    """
    return _offloaded(cache_utilities().DynamicCache(config=config), store)


def _offloaded(cache: Any, store: KVStore) -> Any:
    """Have an empty `DynamicCache`, which somebody may hold, put its layers away."""
    stock = cache_utilities().DynamicLayer
    cache_kind, layer_kind = _kinds()

    def layer() -> Any:
        made = layer_kind()
        made.store = store
        return made

    cache.__class__ = cache_kind
    cache.layers = [layer() if type(given) is stock else given for given in cache.layers]
    if cache.layer_class_to_replicate is stock:
        cache.layer_class_to_replicate = layer
    ours = [made for made in cache.layers if isinstance(made, layer_kind)]
    weakref.finalize(cache, store.close)  # the file goes with the cache, even if still held
    for one, following in zip(ours, ours[1:] + ours[:1], strict=True):
        one.following = following
    return cache


def _temporary_directory() -> str:
    """The system's; ValueError if it is in memory, where keys and values would stay."""
    directory = tempfile.gettempdir()
    kind = file_system_of(os.stat(directory).st_dev)
    if kind in MEMORY_FILE_SYSTEMS:
        raise ValueError(
            f"kv_offload=True puts keys and values into {directory}, which is in memory ({kind}): "
            'name a directory on a drive, kv_offload="/mnt/nvme", or set TMPDIR to one'
        )
    return directory


def offload(
    model: Any,
    handle: AioHandle | None,
    device: torch.device,
    where: Literal[True] | Paths,
    checksum: bool = True,
) -> Callable[[], None]:
    """Have a transformers model use such caches wherever it would use a new `DynamicCache`.

    Args:
        model: The model.
        handle: Moves the bytes; None makes one when it is needed.
        device: The device of the model.
        where: True: memory for a GPU, for a CPU a file in the system's temporary directory; or a
            directory, or one on each of several drives, made where it is missing, one level.
        checksum: As for `KVStore`.

    Returns:
        A function that closes the handle that was made here, which the end of the model does at the
        latest. Caches that used the handle fail from then on; a new cache makes another.

    Raises:
        TypeError: It is not a transformers model.
        TransferError: There is no such directory, and it cannot be made.
        ValueError: The system's temporary directory is in memory.
    """
    if not hasattr(model, "config") or not hasattr(model.config, "get_text_config"):
        raise TypeError("kv_offload is for transformers' models and their caches: leave it out")
    utilities = cache_utilities()
    directories: list[str] = []
    if where is not True:
        directories = _checks.directory_paths("kv_offload", where)
        for each in directories:
            make_directory(each)
    elif device.type == "cpu":
        directories = [_temporary_directory()]
    mover = _Mover(handle, directories)
    weakref.finalize(model, _finish, mover.close)

    def store() -> KVStore:
        return KVStore(directories, mover.get(), checksum)

    def before(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        _, given = cache_among(named)
        if type(given) is utilities.EncoderDecoderCache:
            # The encoder's keys and values stay: models take them out of the layers themselves.
            given = given.self_attention_cache
        if given is None:
            config = model.config.get_text_config(decoder=True)
            wanted = named.get("use_cache", getattr(config, "use_cache", False))
            if wanted and not model.config.is_encoder_decoder:
                named.pop("past_key_values", None)  # None by its old name
                named[cache_argument(model)] = new_cache(config, store())
        elif type(given) is utilities.DynamicCache and given.get_seq_length() == 0:
            _offloaded(given, store())  # itself: its owner goes on with it
        return arguments, named

    model.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    _makers[model] = lambda config: new_cache(config, store())
    return mover.close


def empty_cache(model: Any) -> Any:
    """The cache that a transformers model would begin with: of this module, with `kv_offload`."""
    utilities = cache_utilities()
    config = model.config.get_text_config(decoder=True)
    maker = _makers.get(model)
    return utilities.DynamicCache(config=config) if maker is None else maker(config)


def _finish(close: Callable[[], None]) -> None:
    """Close for a model that is dropped; a thread that this waits for may have noticed that."""
    if threading.current_thread().name.startswith("nvmeio"):
        # If no thread can be started, dropping the handle releases its resources.
        with contextlib.suppress(RuntimeError, MemoryError):
            Thread(close, "nvmeio-close").start()
    else:
        close()


class _Mover:
    """The handles of a model's caches: the caller's, or their own, made when they are needed."""

    def __init__(self, given: AioHandle | None, directories: Sequence[str]) -> None:
        self._given = given
        self._directories = directories
        self._own: DriveHandles | None = None
        self._lock = threading.Lock()

    def get(self) -> DriveHandles | None:
        """The handles; None where caches are kept in memory."""
        if not self._directories:
            return None
        with self._lock:
            if self._own is None:
                self._own = DriveHandles(self._given, self._directories)
            return self._own

    def close(self) -> None:
        """Close those that were made here."""
        with self._lock:
            own, self._own = self._own, None
        if own is not None:
            own.close()


class KVBlock(NamedTuple):
    """A run of tokens of one layer: keys and values, [batch, heads, tokens, head size] each."""

    about: Layer
    offset: int  # in the file
    room: int  # bytes there, whole pages
    memory: torch.Tensor | None  # the bytes, where they are kept in memory
    sum: int | None = None  # the CRC-32 of the bytes, of what is in a file

    @property
    def tokens(self) -> int:
        """How many they are."""
        return self.about.keys[-2]


class KVStore:
    """The place of blocks.

    Args:
        directory: A file in it, which has no name any more once it is open; None keeps the bytes in
            page-locked memory. Or one on each of several drives, which get parts of the bytes in
            proportion to how fast they are.
        handle: Moves the bytes, and stays open.
        checksum: Compare bytes that come back from the file with those written there.

    Attributes:
        written_bytes: Bytes that were put away so far.
        read_bytes: Bytes that were brought back.
        file: Has the blocks; None where they stay in memory.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None,
        handle: AioHandle | DriveHandles | None,
        checksum: bool = True,
    ) -> None:
        self._checksum = checksum
        self.written_bytes = 0
        self.read_bytes = 0
        one = directory is None or isinstance(directory, (str, os.PathLike))
        given: Any = [directory] if one else directory
        directories = [os.fspath(each) for each in given if each is not None]
        if isinstance(handle, AioHandle):
            handle = DriveHandles(handle, directories)
        self._handles = handle
        self._flying: list[Operation] = []
        self._left = torch.empty(0, dtype=torch.uint8)  # of the memory that blocks share
        self.file = ScratchFile(directories, _BAND_BYTES, 0) if directories else None

    def _begun(self, memory: torch.Tensor, place: int, writing: bool) -> list[Operation]:
        """Begin to move bytes from a place of the file on."""
        begun: list[Operation] = []
        if self.file is None or self._handles is None:
            raise RuntimeError("there is no file")
        begin = self._handles.async_pwrite if writing else self._handles.async_pread
        for span in self.file.spans(place, memory.nbytes):
            operation = begin(span.part(memory), span.file, span.file_offset)
            self._started(operation)
            begun.append(operation)
        return begun

    def put(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[KVBlock, list[Operation]]:
        """Begin to put tokens away."""
        about = Layer(tuple(keys.shape), tuple(values.shape), keys.dtype)
        nbytes = sum(about.sizes)
        self.written_bytes += nbytes
        memory = self._room(round_up(nbytes, PAGE_BYTES), devices.device_of(keys))
        for kept, states in zip(states_on(memory[:nbytes], about), (keys, values), strict=True):
            kept.copy_(states)
        if self.file is None:
            return KVBlock(about, 0, 0, memory), []
        place = self.file.take(memory.nbytes)
        writing = self._begun(memory, place, writing=True)
        # While it is written: it only reads the memory.
        found = crc32.of_memory(memory.data_ptr(), nbytes) if self._checksum else None
        return KVBlock(about, place, memory.nbytes, None, found), writing

    def _room(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Memory for a block: on its way to the file, or to stay, where many share one."""
        if self.file is not None or device.type != "cuda":
            return new_staging(nbytes, device)
        if self._left.nbytes < nbytes:
            self._left = new_staging(max(nbytes, _SHARED_BYTES), device)
        memory, self._left = self._left[:nbytes], self._left[nbytes:]
        return memory

    def forget(self, blocks: Sequence[KVBlock]) -> None:
        """Let the room of blocks be written again; nothing of them may be in flight.

        Beam search writes all of a cache anew for each token: without this, the file would grow by
        as much each time.
        """
        for block in blocks:
            if self.file is not None and block.room:
                self.file.give_back(block.offset, block.room)

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

    def get(self, block: KVBlock, memory: torch.Tensor) -> list[Operation]:
        """Begin to bring a block back into `memory`; nothing where it has never gone."""
        self.read_bytes += memory.nbytes
        if block.memory is not None:
            return []
        return self._begun(memory, block.offset, writing=False)

    def check(self, block: KVBlock, memory: torch.Tensor, what: str) -> None:
        """Compare the bytes that came back with the stored ones.

        Args:
            block: Which one.
            memory: The memory that holds it now.
            what: The block, for the message.

        Raises:
            IntegrityError: They differ.
        """
        found = None if block.sum is None else crc32.of_tensor(memory)
        if found != block.sum and self.file is not None:
            raise IntegrityError(
                f"{self.file.describe(block.offset, memory.nbytes)}: {what}, is not what was "
                "written there: look at `dmesg` and `smartctl -a`, and start again with a new "
                "cache (checksum=False takes it as it is)",
                expected=f"CRC-32 {block.sum:08x}",
                found=f"{found:08x}",
            )

    def close(self) -> None:
        """Let go of the file, and with it of its blocks."""
        self.settle()
        if self.file is not None:
            self.file.close()
