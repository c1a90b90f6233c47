"""Past keys and values of a prompt, kept on the drive by name: for the next process, or another.

A prefix is a stream of bytes (its tokens, then each layer's keys and values), cut into blocks of
one size in a block store (`nvmeio._kv_blocks`), which is what keeps it after `kill -9`, within its
capacity and apart from other processes. A head, written last, describes the rest: until it is
there, nothing is. It names its blocks by a number of its own, so that one that is saved again
never mixes with what was there.

Each call opens the store and closes it: several processes may use one directory, of which one at a
time saves.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any, Literal

import torch

from nvmeio import _checks
from nvmeio._io.handles import CallHandle
from nvmeio._io.inflight import new_staging
from nvmeio._kv_blocks.store import BlockStore
from nvmeio._residency import calls
from nvmeio.errors import TransferError, an, counted
from nvmeio.handle import AioHandle
from nvmeio.inference import _prefix_format, kv_cache
from nvmeio.inference._plan import transformers
from nvmeio.inference._prefix_format import Head, Layer, cut, states_on

logger = logging.getLogger("nvmeio")

# How long a save waits for another process's.
PATIENCE_S = 60.0
_PAUSE_S = 0.01
_STORE = "transformers-prefixes"


class PrefixCache:
    """Past keys and values of prompts on the drive, for one transformers model.

    Args:
        model: Loaded whole, or streamed; decoders whose caches are `DynamicCache`s.
        directory: On the drive; made where it is missing.
        capacity_bytes: The bytes that the prefixes may take there, or a size such as "64G" (GiB).
            The one that was saved longest ago makes room. With another size than before, the store
            becomes larger or smaller in place; blocks behind its new end are gone.
        handle: Moves the bytes and stays open; None makes one for each call.
        fingerprint: The way to tell the model's weights from others: "samples" looks at 16 blocks
            of 4 KiB of each, so that training and merging are seen, and the change of a few
            elements may not be; "full" reads all of them, at each call of a model in memory.
        weights_id: A name for this version of the weights, in place of looking at them.

    Raises:
        TypeError: It is not such a model.
        ValueError: The capacity has no room for a block, or `fingerprint` is neither of the two.

    Each block has a CRC-32, which is compared. Blocks that are damaged, were written in part, or
    made room for others count as missing. Several processes and threads may use one directory.

    Examples:
        >>> prefixes = PrefixCache(model, "/mnt/nvme/prefixes", capacity_bytes="64G")
        >>> cache = prefixes.load("manual", ids)
        >>> tokens = model.generate(ids, cache=cache, max_new_tokens=32)
    """

    def __init__(
        self,
        model: Any,
        directory: str | os.PathLike[str],
        capacity_bytes: int | str = "16G",
        *,
        handle: AioHandle | None = None,
        fingerprint: Literal["samples", "full"] = "samples",
        weights_id: str | None = None,
    ) -> None:
        transformers.require()
        config = getattr(model, "config", None)
        if not hasattr(config, "get_text_config") or getattr(config, "is_encoder_decoder", False):
            raise TypeError("PrefixCache works with transformers' models that are decoders only")
        self._model = model
        self._directory = directory
        least = _prefix_format.BLOCK_BYTES
        self._capacity: int = _checks.size("capacity_bytes", capacity_bytes, least)
        if fingerprint not in ("samples", "full"):
            raise ValueError(f'fingerprint must be "samples" or "full", not {fingerprint!r}')
        self._handle = handle
        self._fingerprint = fingerprint
        self._weights_id = weights_id
        self._files: tuple[Any, dict[str, _prefix_format.Values]] = (None, {})

    # Saving

    @calls.quietly
    def save(self, name: str, input_ids: torch.Tensor, cache: Any) -> None:
        """Keep a cache's keys and values of a prompt; an older prefix of that name is dropped.

        Args:
            name: The prefix's name. Ranks of a tensor-parallel group take one each.
            input_ids: The prompt, shape (sequences, tokens), not padded. The cache may hold more:
                tokens behind the prompt are not saved.
            cache: The cache of a forward or of `generate`: a `DynamicCache`, or the one of
                `kv_offload`.

        Raises:
            TypeError: A cache, or a layer in it, of another kind.
            ValueError: The cache holds fewer tokens, or other sequences; or a layer with a sliding
                window has lost some of them already; or the capacity is less than it takes.
            TransferError: There is no room on the drive (ENOSPC), a write failed (EIO; the log
                says why), or another process saves for longer than a minute (EBUSY).
        """
        ids = _checked_ids(name, input_ids)
        layers = _layers_of(cache)
        with CallHandle(self._handle, self._directory) as call:
            head = self._head_of(ids, cache, layers, call.get())
            self._check_capacity(head)
            with self._open_to_save(call.get()) as store:
                before = _read_head(store, name)
                self._write(store, name, head, ids, layers)
                if before is not None:
                    store.remove(before.all_blocks(name))

    def _head_of(
        self, ids: torch.Tensor, cache: Any, layers: Sequence[Any], handle: AioHandle
    ) -> Head:
        total, (sequences, tokens) = int(cache.get_seq_length()), ids.shape
        if total < tokens:
            raise ValueError(
                f"the cache holds {total} of {counted(tokens, 'token')}: run the model first"
            )
        described: list[Layer | None] = []
        for number, layer in enumerate(layers):
            if not layer.is_initialized:
                described.append(None)
                continue
            if layer.keys.shape[0] != sequences:
                raise ValueError(
                    f"the cache holds {layer.keys.shape[0]} sequences, and input_ids {sequences}"
                )
            held = layer.keys.shape[-2] if getattr(layer, "is_sliding", False) else total
            if held < total != tokens:
                raise ValueError(
                    f"layer {number} has a sliding window, and of the {counted(total, 'token')} in "
                    f"the cache only the last {held}: save the prefix before tokens are added to it"
                )
            kept = min(held, tokens)
            keys, values = (  # as of the newest tokens, which are there without reading
                (*states.shape[:-2], kept, states.shape[-1])
                for states in (layer.keys, layer.values)
            )
            described.append(Layer(keys, values, layer.keys.dtype))
        known = _prefix_format.configuration(self._model), self._identity(handle)
        return Head(secrets.token_hex(8), *known, (sequences, tokens), tuple(described))

    def _identity(self, handle: AioHandle) -> str:
        if self._weights_id is not None:
            return f"named {self._weights_id}"
        stream = getattr(self._model, "weight_stream", None)
        checkpoint = None if stream is None else stream.checkpoint
        if checkpoint is not None and checkpoint is not self._files[0]:  # opened anew
            found = _prefix_format.of_files(checkpoint, handle, self._fingerprint)
            self._files = (checkpoint, found)
        return _prefix_format.weights(self._model, self._files[1], self._fingerprint)

    def _check_capacity(self, head: Head) -> None:
        least = (len(head.all_blocks("")) + 1) * _prefix_format.BLOCK_BYTES
        if least > self._capacity:
            raise ValueError(
                f"the prefix takes {least} bytes, and capacity_bytes is {self._capacity}: give it "
                "more"
            )

    def _write(
        self, store: BlockStore, name: str, head: Head, ids: torch.Tensor, layers: Sequence[Any]
    ) -> None:
        def write(part: int, memory: torch.Tensor) -> None:
            stored = store.store(head.blocks(name, part), cut(memory))
            if not all(stored):
                raise _failed(store, name, errno.EIO, "writing it failed: the log says why")

        write(0, ids.reshape(-1).view(torch.uint8))
        room = new_staging(max(head.sizes()), torch.device("cpu"))
        for part, (about, layer) in enumerate(zip(head.layers, layers, strict=True), start=1):
            if about is not None:
                memory, kept = room[: sum(about.sizes)], kv_cache.states_of(layer)
                for target, states in zip(states_on(memory, about), kept, strict=True):
                    target.copy_(states[..., : target.shape[-2], :])
                write(part, memory)
        if not all(store.contains(head.all_blocks(name))):  # on a full drive it made room itself
            raise _failed(store, name, errno.ENOSPC, "the drive has no room for it")
        store.remove([name])
        if not all(store.store([name], [head.pack()])):
            raise _failed(store, name, errno.EIO, "writing it failed: the log says why")

    def _open_to_save(self, handle: AioHandle) -> BlockStore:
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self._store(handle, writer=True)
            except TransferError as failed:
                if failed.errno != errno.EBUSY or time.monotonic() > until:
                    raise
            time.sleep(_PAUSE_S)

    def _store(self, handle: AioHandle, writer: bool) -> BlockStore:
        place = (self._directory, _STORE, _prefix_format.BLOCK_BYTES, self._capacity)
        return BlockStore(*place, writer=writer, handle=handle)

    # Loading

    @calls.quietly
    def load(self, name: str, input_ids: torch.Tensor) -> Any:
        """A cache with the saved prefix of a prompt: the model's ``cache=``.

        Args:
            name: The prefix's name.
            input_ids: The prompt that is to be computed, shape (sequences,
                tokens), which begins with the saved tokens. If it ends with them, its last token is
                left to compute: generation begins with the model's output for it.

        Returns:
            A new cache on the model's device, of the kind that the model would begin with (with
            `kv_offload` that of its directory); None: there is no such prefix, or not all of it any
            more, which the log says.

        Raises:
            ValueError: The prefix was saved for other tokens, another model or other weights; or
                would have to be cut where a layer with a sliding window cannot be.
            TransferError: The store cannot be opened.
        """
        ids = _checked_ids(name, input_ids)
        with CallHandle(self._handle, self._directory) as call:
            try:
                store = self._store(call.get(), writer=False)
            except FileNotFoundError:
                return None
            with store:
                head = _read_head(store, name)
                if head is None:
                    return None
                self._check_model(name, head, call.get())
                cache = self._read(store, name, head, ids)
        if cache is None:
            logger.warning("prefix %r is not whole any more: compute it and save it again", name)
        return cache

    def _check_model(self, name: str, head: Head, handle: AioHandle) -> None:
        mine = _prefix_format.configuration(self._model)
        for setting in sorted(head.model.keys() | mine.keys()):
            there, here = head.model.get(setting), mine.get(setting)
            if there != here:
                raise ValueError(
                    f"prefix {name!r} was saved with another model: {setting} was {there!r:.80} "
                    f"and is {here!r:.80}; take another name, or save it again"
                )
        if head.weights != self._identity(handle):
            raise ValueError(
                f"prefix {name!r} was saved with other weights of this model: take another name, "
                "or save it again"
            )

    def _read(self, store: BlockStore, name: str, head: Head, ids: torch.Tensor) -> Any:
        """A cache; None where a block is missing."""
        stream = getattr(self._model, "weight_stream", None)
        device = torch.device(self._model.device if stream is None else stream.device)
        parts = _parts(store, name, head, device)
        saved = next(parts, None)
        if saved is None:
            return None
        usable = _usable(name, saved.view(torch.int64).view(head.ids), ids)
        cache, count = kv_cache.empty_cache(self._model), 0
        for number, (about, memory) in enumerate(zip(head.layers, parts, strict=False)):
            count += 1
            if about is None:
                continue
            states = states_on(memory, about)
            held = about.keys[-2]
            if usable < head.ids[1]:
                if held < head.ids[1]:
                    raise ValueError(
                        f"prefix {name!r} has {head.ids[1]} tokens, of which {usable} are of use "
                        f"here: layer {number} has a sliding window and cannot be cut. Give it a "
                        "prompt that goes on behind it"
                    )
                held = usable
            if held:
                cache.update(*(part[..., :held, :].to(device) for part in states), number)
                layer = cache.layers[number]
                if getattr(layer, "is_sliding", False):
                    layer.cumulative_length = usable  # that it has seen, not those that it has
        return cache if count == len(head.layers) else None

    # Forgetting

    def remove(self, name: str) -> None:
        """Forget a prefix; that there is none is not an error.

        Raises:
            TransferError: As for `save`.
        """
        with (
            CallHandle(self._handle, self._directory) as call,
            self._open_to_save(call.get()) as store,
        ):
            head = _read_head(store, name)
            store.remove([name, *(head.all_blocks(name) if head is not None else ())])

    def __repr__(self) -> str:
        return f"<PrefixCache {os.fspath(self._directory)} of {type(self._model).__name__}>"


def _checked_ids(name: str, ids: torch.Tensor) -> torch.Tensor:
    if not name or "\0" in name:
        raise ValueError(f"{name!r} is not a name for a prefix")
    if ids.dim() != 2 or not ids.numel():
        raise ValueError(f"input_ids must be (sequences, tokens), not {tuple(ids.shape)}")
    return ids.detach().to("cpu", torch.int64).contiguous()


def _layers_of(cache: Any) -> Sequence[Any]:
    utilities = transformers.cache_utilities()
    if not isinstance(cache, utilities.DynamicCache):
        raise TypeError(f"a DynamicCache can be saved, not {an(type(cache).__name__)}")
    known = (utilities.DynamicLayer, utilities.DynamicSlidingWindowLayer)
    for number, layer in enumerate(cache.layers):
        if type(layer) not in known and not isinstance(layer, kv_cache.OffloadedLayer):
            raise TypeError(
                f"layer {number} of the cache is {an(type(layer).__name__)}: a layer of this kind "
                "cannot be saved"
            )
    found: Sequence[Any] = cache.layers
    return found


def _read_head(store: BlockStore, name: str) -> Head | None:
    block = torch.empty(_prefix_format.BLOCK_BYTES, dtype=torch.uint8, device="cpu")
    return Head.unpack(block) if all(store.load([name], [block])) else None


def _parts(
    store: BlockStore, name: str, head: Head, device: torch.device
) -> Iterator[torch.Tensor]:
    """The bytes of each part, up to the first that is missing; the next is read meanwhile.

    They are overwritten with those of the part after the next.
    """
    sizes = head.sizes()
    rooms = [new_staging(max(sizes), device) for _ in range(2)]
    answers: SimpleQueue[list[bool]] = SimpleQueue()

    def begin(part: int) -> torch.Tensor:
        memory = rooms[part % 2][: sizes[part]]
        store.begin_load(head.blocks(name, part), cut(memory), answers.put)
        return memory

    memory = begin(0)
    for part in range(len(sizes)):
        if not all(answers.get()):
            return
        here = memory
        if part + 1 < len(sizes):
            memory = begin(part + 1)
        yield here


def _usable(name: str, saved: torch.Tensor, ids: torch.Tensor) -> int:
    """How many of the saved tokens the prompt begins with, up to its last but one."""
    if saved.shape[0] != ids.shape[0]:
        raise ValueError(
            f"prefix {name!r} is of {saved.shape[0]} sequences, and input_ids of {ids.shape[0]}"
        )
    count = min(saved.shape[1], ids.shape[1])
    differ = (saved[:, :count] != ids[:, :count]).nonzero()
    if len(differ):
        sequence, token = differ[0].tolist()
        raise ValueError(
            f"prefix {name!r} is not what this prompt begins with: token {token} of sequence "
            f"{sequence} was {int(saved[sequence, token])} and is {int(ids[sequence, token])}"
        )
    return min(count, ids.shape[1] - 1)


def _failed(store: BlockStore, name: str, code: int, detail: str) -> TransferError:
    return TransferError(
        code, operation="write", path=os.fspath(store.path), detail=f"prefix {name!r}: {detail}"
    )
