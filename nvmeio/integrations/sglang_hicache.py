r"""KV caches of SGLang on the drive: a storage backend for its hierarchical cache.

    python -m sglang.launch_server --model-path … --enable-hierarchical-cache \
        --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
            "backend_name": "nvmeio", "module_path": "nvmeio.integrations.sglang_hicache",
            "class_name": "NvmeHiCache", "interface_v1": 1,
            "directory": "/mnt/nvme/kv", "capacity_bytes": "200GB"}'

Pages lie in block stores (`nvmeio._kv_blocks`): one for each rank and kind of page, or one that all
ranks read where their pages are the same (MLA). `capacity_bytes` is for each rank. With
``interface_v1`` whole batches go through memory that is used again; without it SGLang allocates
every page that it reads.

Written for sglang 0.5.23 (`sglang.srt.mem_cache.hicache_storage`); see docs/serving.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import itertools
import json
import logging
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import torch

from nvmeio import _checks, buffers
from nvmeio._kv_blocks.store import BlockStore
from nvmeio._pages import PAGE_BYTES, round_up
from nvmeio._threads.closing import members
from nvmeio.errors import ClosedError
from nvmeio.integrations._clients import client, joined, on_demand, resolved
from nvmeio.integrations._serving.kv_identity import (
    ServedAdapters,
    ServedModel,
    WeightOptions,
    identity_of,
)

__all__ = ["HiCache", "NvmeHiCache"]  # noqa: F822 (made by __getattr__)

logger = logging.getLogger("nvmeio")

_CONTEXT = "sglang.srt.runtime_context"
_HOOKS = "sglang.srt.plugins.hook_registry"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
TARGETS = (
    "sglang.srt.managers.cache_controller.HiCacheController.reset",  # of every flush
    f"{_UPDATER}.update_weights_from_disk",
    f"{_UPDATER}.update_weights_from_tensor",
    f"{_UPDATER}.update_weights_from_ipc",
    f"{_UPDATER}.load_weights_from_distributed",
    f"{_UPDATER}.end_weight_update",  # also of what was written into the memory of weights
)
# The server's arguments that change the results with the same files.
_SETTINGS = (
    *("dtype", "quantization", "kv_cache_dtype", "json_model_override_args", "model_impl"),
    *("quantization_param_path", "torchao_config", "model_loader_extra_config", "load_format"),
    *("speculative_draft_model_quantization", "speculative_draft_kv_cache_dtype"),
    *("speculative_algorithm", "modelopt_quant", "model_config_parser", "context_length"),
    *("attention_backend", "prefill_attention_backend", "decode_attention_backend"),
    *("prefill_kv_cache_dequant_dtype", "dsa_prefill_backend", "dsa_decode_backend"),
    *("dsv4_prefill_backend", "dsv4_attn_backend", "enable_deepseek_v4_fp4_indexer"),
    *("qsa_indexer_dtype", "c128_page_size", "enable_page_major_kv_layout"),
    *("mamba_backend", "mamba_ssm_dtype", "enable_int8_mamba_checkpoint", "linear_attn_backend"),
    *("mm_attention_backend", "mm_process_config", "image_processor_backend"),
    *("disable_fast_image_processor",),
)
# A host pool's attributes for the layout of a page; each kind of pool has some of them.
_GEOMETRY = (
    *("layout", "dtype", "page_size", "layer_num", "target_layer_num", "start_layer", "end_layer"),
    *("head_num", "head_dim", "v_head_dim", "head_group_num", "element_dim", "token_stride_size"),
    *("kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "dsa_kv_cache_store_fp8"),
    *("indexer_dtype", "indexer_page_stride_size", "conv_dtype", "temporal_dtype"),
    *("conv_state_shapes", "temporal_state_shape", "size_per_token", "layout_dim"),
    *("dcp_size", "dcp_rank"),
)
# Entries of SGLang's storage configuration for the division of a page among ranks.
_DIVISION = (
    *("tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "dcp_rank"),
    *("dcp_size", "tp_lcm_size", "should_split_heads", "logical_page_size", "is_mla_model"),
)

_backends: weakref.WeakSet[Any] = weakref.WeakSet()
_hooked: list[bool] = []  # in this process, once

_METRICS = "sglang.srt.observability.metrics_collector"
_INTERFACE = "sglang.srt.mem_cache.hicache_storage"
_KV = "kv"
_MAMBA = "mamba"
# Pages on their way between drive and pool, twice: one part is read while the other is copied.
STAGING_BYTES = 32 << 20


class HiCache:
    """Pages of SGLang's host pools on the drive; joined with SGLang's `HiCacheStorage`.

    Args:
        storage_config: SGLang's; its `extra_config` has "directory" (on the drive) and
            "capacity_bytes" (a number, or "200GB", which is 200 GiB), for each rank. It may have
            "weights", "weights_id", "adapters" and "fingerprint", as vLLM's tier.
        kwargs: Arguments of SGLang's factory; they are ignored.

    Raises:
        ValueError: One of the two is missing or makes no sense.

    Any thread may call it; once it is closed, what is asked for is not there.
    """

    mem_pool_host: Any
    registered_pools: dict[Any, Any]

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        extra = storage_config.extra_config or {}
        missing = [name for name in ("directory", "capacity_bytes") if name not in extra]
        if missing:
            raise ValueError(
                f"--hicache-storage-backend-extra-config lacks {' and '.join(missing)}: "
                'for instance {"directory": "/mnt/nvme/kv", "capacity_bytes": "200GB", …}'
            )
        self._config = storage_config
        self._directory = str(extra["directory"])
        self._capacity = _checks.size("capacity_bytes", extra["capacity_bytes"], 1)
        models, trained, settings = served(storage_config.model_name)
        said = WeightOptions.of(extra)
        self._identity = identity_of(models, trained, said, settings, self._directory)
        self._generations = 0
        self._lock = threading.Lock()
        self._stores: dict[str, BlockStore] = {}
        self._stagings: dict[str, list[torch.Tensor]] = {}
        self._views: dict[str, tuple[Any, bool]] = {}
        # Whether it was a read, pages, GB/s.
        self._transfers: deque[tuple[bool, int, float]] = deque(maxlen=1000)
        self._closed = False
        tell(self)

    # Pools and their stores

    def _pool(self, name: str) -> Any:
        return self.mem_pool_host if name == _KV else self.registered_pools[name]

    def _pools(self) -> dict[str, Any]:
        others = getattr(self, "registered_pools", {})
        return {_KV: self.mem_pool_host} | {str(name): pool for name, pool in others.items()}

    def _store(self, name: str) -> BlockStore | None:
        """The store of a pool's pages; None for a reader's where its writer has not begun."""
        with self._lock:
            if self._closed:
                return None
            if name not in self._stores:
                store = self._opened(name)
                if store is None:
                    return None
                self._stores[name] = store
            store = self._stores[name]
            while store.generation < self._generations:
                store.new_generation()
            return store

    def on_host_pools_registered(self) -> None:
        """All pools are known; SGLang ends where this raises.

        Raises:
            ValueError: `capacity_bytes` has no room for a page of each pool.
            TransferError: A store cannot be opened: there is no room, another server writes it.
        """
        for name in self._pools():
            self._store(name)

    def _opened(self, name: str) -> BlockStore | None:
        # Every pool has as many slots as the others: a page of one is of no use without theirs.
        sizes = {each: _page_bytes(pool) for each, pool in self._pools().items()}
        nbytes = sizes[name]
        config = self._config
        # MLA's pages are the same in all ranks of a tensor-parallel group, and one rank writes
        # them.
        shared = config.is_mla_model and name != _MAMBA
        writer = not shared or bool(getattr(config, "is_storage_writer", config.tp_rank == 0))
        slot_bytes = {each: round_up(n, PAGE_BYTES) for each, n in sizes.items()}
        share = self._capacity * slot_bytes[name] // sum(slot_bytes.values())
        pool = self._pool(name)
        identity = json.dumps(
            [
                *(config.model_name, config.tp_size, config.pp_rank, config.pp_size),
                *(config.attn_cp_rank, config.attn_cp_size, getattr(config, "dcp_rank", 0)),
                *(getattr(config, "dcp_size", 1), getattr(config, "dp_rank", 0)),
                *(str(getattr(pool, "layout", "")), str(getattr(pool, "dtype", ""))),
                *(getattr(pool, "page_size", 1), nbytes),
                # The first replica's is that of a server without others.
                *([f"replica {number}"] if (number := replica()) else []),
            ]
        )
        rank = "all" if shared else config.tp_rank
        digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
        try:
            return BlockStore(
                self._directory,
                f"sglang-{digest}-{name}-{rank}",
                nbytes,
                share,
                writer=writer,
                identity=self._identity_in(pool, shared),
            )
        except FileNotFoundError:
            if writer:
                raise
            return None

    def _identity_in(self, pool: Any, shared: bool) -> str | None:
        """The identity of a pool's pages: the models, and the layout of the bytes."""
        if self._identity is None:
            return None
        division = _named(self._config, _DIVISION)
        if shared:
            del division["tp_rank"]
        device = getattr(pool, "device_pool", None)
        kinds = {
            "kinds": [type(pool).__name__, type(device).__name__],
            "dtype on the device": getattr(device, "dtype", None),
        }
        meaning = [self._identity, division, kinds, _named(pool, _GEOMETRY)]
        return json.dumps(meaning, default=str, sort_keys=True)

    # Interface 0: tensors of single pages

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """A page into `target_location`; None where it is not there."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        """Pages into tensors; None for each that is not there."""
        store, found = self._store(_KV), [False] * len(keys)
        with contextlib.suppress(ClosedError):
            if store is not None:
                found = store.load(keys, [_bytes_of(target) for target in target_locations])
        return [
            target if there else None for target, there in zip(target_locations, found, strict=True)
        ]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store a page; whether it is there."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: Sequence[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store pages; whether all are there."""
        store = self._store(_KV)
        if store is None or not store.is_writer:
            return self.batch_exists(keys) == len(keys)
        with contextlib.suppress(ClosedError):
            return all(store.store(keys, [_bytes_of(value) for value in values]))
        return False

    def exists(self, key: str) -> bool:
        """Whether a page is there."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """How many pages, from the first on, are there."""
        return _leading(self._contains(_KV, keys))

    # Interfaces 1 and 2: pages of host pools

    def batch_get_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Pages into the host pool; for each, whether it is there."""
        return self._moved(self._read, _KV, keys, host_indices)

    def batch_set_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Store pages of the host pool; for each, whether it is there."""
        before = getattr(extra_info, "prefix_keys", None) or []
        return self._moved(self._write, _KV, keys, host_indices, before)

    def batch_get_v2(
        self, transfers: Sequence[Any], extra_info: Any = None
    ) -> dict[Any, list[bool]]:
        """`batch_get_v1` for several pools."""
        return {
            t.name: self._moved(self._read, str(t.name), t.keys, t.host_indices) for t in transfers
        }

    def batch_set_v2(
        self, transfers: Sequence[Any], extra_info: Any = None
    ) -> dict[Any, list[bool]]:
        """`batch_set_v1` for several pools."""
        return {
            t.name: self._moved(self._write, str(t.name), t.keys, t.host_indices) for t in transfers
        }

    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> Any:
        """The longest prefix that every pool can restore, as its policy asks; as `HiCacheFile`."""
        interface: Any = importlib.import_module(_INTERFACE)
        pages = self.batch_exists(keys)
        hits: dict[Any, int] = {interface.PoolName.KV: pages} if pages else {}
        restorable = list(range(1, pages + 1))
        for transfer in pool_transfers or []:
            if not restorable:
                break
            there = self._contains(str(transfer.name), keys)
            possible = _restorable(there[:pages], transfer, interface.PoolHitPolicy)
            if possible:
                hits[transfer.name] = max(possible)
            restorable = [count for count in restorable if count in possible]
        return interface.PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def _contains(self, name: str, keys: Sequence[str]) -> list[bool]:
        store = self._store(name)
        with contextlib.suppress(ClosedError):
            if store is not None:
                return store.contains(keys)
        return [False] * len(keys)

    def _moved(
        self,
        move: Callable[..., Iterator[list[bool]]],
        name: str,
        keys: Sequence[str] | None,
        indices: torch.Tensor | None,
        *more: Any,
    ) -> list[bool]:
        """The answer of `move` for each page; False for pages that it does not reach."""
        keys = keys or []
        store, starts = self._store(name), _starts(self._pool(name), keys, indices)
        found: list[bool] = []
        with contextlib.suppress(ClosedError):
            if store is not None and starts is not None:
                for part in move(name, store, keys, starts, *more):
                    found += part
        return found + [False] * (len(keys) - len(found))

    def get_stats(self) -> Any:
        """Pages and GB/s of each transfer since the last call, for SGLang's storage metrics.

        Pages that were there already are not counted. At most the last thousand transfers since the
        previous call.
        """
        made = importlib.import_module(_METRICS).StorageMetrics()
        for _ in range(len(self._transfers)):
            is_read, pages, rate = self._transfers.popleft()
            (made.prefetch_pgs if is_read else made.backup_pgs).append(pages)
            (made.prefetch_bandwidth if is_read else made.backup_bandwidth).append(rate)
        return made

    def _timed(
        self,
        move: Callable[[Sequence[str], Sequence[torch.Tensor]], list[bool]],
        keys: Sequence[str],
        pages: Sequence[torch.Tensor],
    ) -> list[bool]:
        """Load or store pages, and note how many and how fast."""
        began = time.perf_counter()
        found = move(keys, pages)
        nbytes = sum(page.nbytes for page in itertools.compress(pages, found))
        self._note(move.__name__ == "load", sum(found), nbytes, began)
        return found

    def _note(self, is_read: bool, pages: int, nbytes: int, began: float) -> None:
        if pages:
            took = max(time.perf_counter() - began, 1e-9)
            self._transfers.append((is_read, pages, nbytes / took / 1e9))

    def _write(
        self,
        name: str,
        store: BlockStore,
        keys: Sequence[str],
        starts: list[int],
        before: Sequence[str] = (),
    ) -> Iterator[list[bool]]:
        pool, there = self._pool(name), store.contains(keys)
        if not store.is_writer:  # another rank writes the same pages
            yield there
            return
        for first, last in _parts(len(keys), store.block_bytes):
            new = [n for n in range(first, last) if not there[n]]
            pages = [_bytes_of(pool.get_data_page(starts[n], flat=True)) for n in new]
            there_now = self._timed(store.store, [keys[n] for n in new], pages)
            stored = dict(zip(new, there_now, strict=True))
            yield [stored.get(n, True) for n in range(first, last)]
        if before or any(there) or len(keys) * store.block_bytes > STAGING_BYTES:
            store.touch([*before, *keys])  # as one: the last makes room first

    def _read(
        self, name: str, store: BlockStore, keys: Sequence[str], starts: list[int]
    ) -> Iterator[list[bool]]:
        pool = self._pool(name)
        if self._gives_views(name, pool):
            pages = [_bytes_of(pool.get_data_page(start, flat=True)) for start in starts]
            yield self._timed(store.load, keys, pages)
        else:
            yield from self._read_and_copied(name, store, keys, starts)

    def _gives_views(self, name: str, pool: Any) -> bool:
        known = self._views.get(name)
        if known is None or known[0] is not pool:
            known = self._views[name] = (pool, _gives_views(pool))
        return known[1]

    def _read_and_copied(
        self, name: str, store: BlockStore, keys: Sequence[str], starts: list[int]
    ) -> Iterator[list[bool]]:
        """Read each part while the one before is copied into the pool."""
        pool, nbytes = self._pool(name), store.block_bytes
        parts = list(_parts(len(keys), nbytes))
        stagings = self._staging(name, nbytes, parts)
        answers: SimpleQueue[list[bool]] = SimpleQueue()
        began, moved = time.perf_counter(), 0

        def blocks_of(number: int) -> tuple[Sequence[str], list[torch.Tensor]]:
            first, last = parts[number]
            rows = stagings[number % len(stagings)]
            return keys[first:last], [rows[n - first, :nbytes] for n in range(first, last)]

        for number, (first, last) in enumerate(parts):
            there = answers.get() if number else store.load(*blocks_of(0))
            moved += sum(there)
            if number + 1 < len(parts):
                store.begin_load(*blocks_of(number + 1), answers.put)
            rows = stagings[number % len(stagings)]
            for n in range(first, last):
                if there[n - first]:
                    page = rows[n - first, :nbytes].view(pool.dtype)
                    pool.set_from_flat_data_page(starts[n], page)
            yield there
        self._note(True, moved, moved * nbytes, began)
        self._stagings[name] = stagings

    def _staging(self, name: str, nbytes: int, parts: list[tuple[int, int]]) -> list[torch.Tensor]:
        """Memory for two parts; it is given back once all is copied.

        Not where that raised, or was interrupted: the part behind is still read into it.
        """
        most = max((last - first for first, last in parts), default=0)
        count = min(len(parts), 2)
        kept = self._stagings.pop(name, [])
        if len(kept) < count or (kept and len(kept[0]) < most):
            rows = (max(most, 1), round_up(nbytes, PAGE_BYTES))
            kept = [buffers.empty_aligned(rows, dtype=torch.uint8) for _ in range(count)]
        return kept

    # Life

    def new_generation(self) -> None:
        """Find no page that was stored before: the weights in memory are others now."""
        self._generations += 1  # each store follows when it is asked next

    def clear(self) -> bool:
        """Forget all pages of this rank."""
        for name in self._pools():
            store = self._store(name)
            if store is not None and store.is_writer:
                store.clear()
        return True

    def close(self) -> None:
        """Close the stores; their files stay."""
        with self._lock:
            self._closed = True
            stores, self._stores = list(self._stores.values()), {}
        for store in stores:
            store.close()
        self._stagings.clear()


def _named(described: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(described, name, None) for name in names}


def _page_bytes(pool: Any) -> int:
    # Not of its dummy page, which would be page-locked to be counted.
    nbytes: int = pool.get_data_page(0, flat=True).nbytes
    return nbytes


def _gives_views(pool: Any) -> bool:
    """Whether the tensor that a pool gives as a page is its own memory.

    A page then lies at one place, whenever it is asked for, and another elsewhere.
    """
    starts = (0, 0, getattr(pool, "page_size", 1) or 1)
    one, again, other = (pool.get_data_page(start, flat=True) for start in starts)
    return bool(
        one.nbytes
        and one.data_ptr() == again.data_ptr()
        and one.data_ptr() + one.nbytes <= other.data_ptr()
        and one.is_contiguous()
        and not one.is_inference()
    )


def _bytes_of(page: torch.Tensor) -> torch.Tensor:
    return page.reshape(-1).view(torch.uint8)


def _starts(pool: Any, keys: Sequence[str], indices: torch.Tensor | None) -> list[int] | None:
    """The index of each page's first token; None where there are not as many."""
    page_size = getattr(pool, "page_size", 1) or 1
    if indices is None or indices.numel() != len(keys) * page_size:
        logger.error(
            "%d pages of %d tokens were asked for with %d indices: none is moved",
            *(len(keys), page_size, 0 if indices is None else indices.numel()),
        )
        return None
    starts: list[int] = indices[::page_size].tolist()
    return starts


def _parts(count: int, nbytes: int) -> Iterator[tuple[int, int]]:
    step = max(STAGING_BYTES // nbytes, 1)
    for first in range(0, count, step):
        yield first, min(first + step, count)


def _leading(there: Sequence[bool]) -> int:
    """How many, from the first on, are True."""
    return sum(1 for _ in itertools.takewhile(bool, there))


def _restorable(there: list[bool], transfer: Any, policies: Any) -> set[int]:
    """The lengths of prefixes that a pool can restore."""
    if transfer.hit_policy == policies.ALL_PAGES:
        return set(range(1, _leading(there) + 1))
    if transfer.hit_policy == policies.TRAILING_PAGES:
        trailing = max(1, len(transfer.keys) if transfer.keys else 1)
        return {
            length
            for length in range(1, len(there) + 1)
            if all(there[max(0, length - trailing) : length])
        }
    raise ValueError(f"unsupported pool hit policy: {transfer.hit_policy}")


def _backend() -> Any:
    base = client(
        _INTERFACE,
        "HiCacheStorage",
        wanted="nvmeio plugs into SGLang as a storage backend of its hierarchical cache",
        remedy="pip install 'sglang>=0.5.23'",
    )
    return joined("NvmeHiCache", HiCache, base)


__getattr__ = on_demand(__name__, "NvmeHiCache", _backend)


def served(
    model_name: str | None,
) -> tuple[list[ServedModel], ServedAdapters, dict[str, Any]]:
    """The models and adapters whose keys and values are kept, and the settings that count."""
    version = {"sglang": getattr(sys.modules.get("sglang.version"), "__version__", None)}
    args: Any = None
    with contextlib.suppress(ImportError, AttributeError, ValueError):  # ValueError: none yet
        args = importlib.import_module(_CONTEXT).get_server_args()
    if args is None:
        unknown = ServedModel(str(model_name), is_revision_known=False)
        return [unknown], ServedAdapters(), version

    def model(path: str, revision: str, load_format: str) -> ServedModel:
        return ServedModel(
            str(getattr(args, path)),
            getattr(args, revision, None),
            getattr(args, "download_dir", None),
            is_made_up=getattr(args, load_format, None) == "dummy",
        )

    models = [model("model_path", "revision", "load_format")]
    if getattr(args, "speculative_draft_model_path", None):
        named = "speculative_draft_model_path", "speculative_draft_model_revision"
        models.append(model(*named, "speculative_draft_load_format"))
    return models, ServedAdapters(_adapter_paths(args)), _named(args, _SETTINGS) | version


def _adapter_paths(args: Any) -> list[str]:
    """The directories of the adapters that the server is started with.

    Pages of an adapter that is loaded later have names of their own, made of a random number.
    """
    named = getattr(args, "lora_paths", None) or []
    if isinstance(named, dict):
        paths = list(named.values())
    else:
        paths = [_adapter_path(entry) for entry in named]
    draft = getattr(args, "uno_lora_path", None)
    return [*paths, *([draft] if draft else [])]


def _adapter_path(entry: Any) -> str:
    """The path in an entry of ``--lora-paths``: a reference, a dictionary, PATH or NAME=PATH."""
    if isinstance(entry, str):
        return entry.split("=", 1)[-1]
    path: str = entry["lora_path"] if isinstance(entry, dict) else entry.lora_path
    return path


def replica() -> int | None:
    """Which of a server's replicas this process computes for (``--dp-size``); None: it has one."""
    try:
        found: Any = importlib.import_module(_CONTEXT).get_parallel().dp_rank
    except (ImportError, AttributeError, ValueError, RuntimeError):
        return None
    return found if isinstance(found, int) else None


def tell(backend: Any) -> None:
    """Have SGLang's flushes and updates of weights reach a backend's `new_generation`."""
    _backends.add(backend)
    if not _hooked:
        _hooked.append(True)
        missing = _hook()
        if missing:
            logger.warning(
                "this SGLang does not say when weights change in memory (%s): after an update of "
                "weights ask it for /hicache/storage-backend/clear, or restart it",
                ", ".join(missing),
            )


def _hook() -> list[str]:
    """Hook the targets; returns those that cannot be hooked."""
    try:
        hooks: Any = importlib.import_module(_HOOKS)
        registry, after = hooks.HookRegistry, hooks.HookType.AFTER
    except (ImportError, AttributeError):
        return [_HOOKS]
    # One that has hooks of others is not touched again.
    taken = {target for target in TARGETS if hasattr(resolved(target), "__wrapped__")}
    free = [target for target in TARGETS if target not in taken and resolved(target)]
    for target in free:
        registry.register(target, _after, after)
    registry.apply_hooks()
    return [
        target
        for target in TARGETS
        if target not in free or not hasattr(resolved(target), "__wrapped__")
    ]


def _after(_: Any, *args: Any, **named: Any) -> None:
    """Called after each of `TARGETS`, also where it failed; keeps its result."""
    for backend in members(_backends):
        backend.new_generation()
