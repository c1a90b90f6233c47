"""KV caches of vLLM on the drive: a secondary tier for its tiered offloading.

    vllm serve … --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8000000000,
            "secondary_tiers": [{"type": "NvmeTier", "module_path": "nvmeio.integrations.vllm_tier",
                                 "directory": "/mnt/nvme/kv", "capacity_bytes": "200GB"}]}}'

vLLM hands over chunks of its first tier, in shared memory; they go to a block store
(`nvmeio._kv_blocks`) and back, direct, a whole job at once.

Written for vLLM 0.32.0 (`vllm.v1.kv_offload.tiering.base`, which vLLM calls experimental); see
docs/serving.md.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from itertools import repeat, starmap
from operator import attrgetter
from typing import Any

import torch

from nvmeio import _checks
from nvmeio._kv_blocks.catalog import Change
from nvmeio._kv_blocks.store import BlockStore
from nvmeio.integrations._clients import client, joined, on_demand
from nvmeio.integrations._serving.kv_identity import (
    ServedAdapters,
    ServedModel,
    WeightOptions,
    identity_of,
)

logger = logging.getLogger("nvmeio")

__all__ = ["NvmeTier", "Tier"]  # noqa: F822 (made by __getattr__)

_TIERING = "vllm.v1.kv_offload.tiering.base"
_BASE = "vllm.v1.kv_offload.base"
_MAPPER = "vllm.v1.kv_offload.file_mapper"

_STATS = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics"

_NAME_BYTES = 100
# Bytes of a key, kept whole for events: a hash of up to 64 bytes, and the number of a group.
_KEY_BYTES = 72
# The store's counters, as vLLM's metrics. Queries, hits, bytes and times are counted by vLLM.
_COUNTERS = {
    "stored": "Chunks that were written.",
    "loaded": "Chunks that were read and found right.",
    "evicted": "Chunks that made room for others.",
    "refused": "Chunks that were not stored: no room, or the drive failed.",
    "damaged": "Chunks that were dropped, as their checksum did not fit.",
    "absent": "Chunks that were to be read and had gone.",
}
_GAUGES = {
    "chunks": "Chunks that are there.",
    "bytes": "Bytes of the chunks that are there.",
    "capacity_bytes": "Bytes that chunks may take.",
    "generation": "How often the weights have changed since the start.",
}


def _metric(name: str) -> str:
    return f"vllm:kv_offload_nvmeio_{name}"


# Entries of vLLM's configuration that give keys and values, or their names, their meaning.
_CACHE_SETTINGS = (
    *("cache_dtype", "kv_cache_dtype_skip_layers", "block_size", "sliding_window"),
    *("mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_cache_mode", "mamba_block_size"),
    *("use_replayssm", "use_kda_recoverssm", "prefix_caching_hash_algo"),
)
_ATTENTION_SETTINGS = ("backend", "backend_per_kind", "indexer_kv_dtype", "use_non_causal")
_MULTIMODAL_SETTINGS = (
    *("mm_processor_kwargs", "media_io_kwargs", "mm_hasher_algorithm", "mm_device_do_normalize"),
    *("mm_encoder_attn_backend", "mm_encoder_attn_dtype"),
    *("video_pruning_rate", "video_pruning_method"),
)


class _Job:
    """A submitted job; `ended` when the drive is done with it."""

    def __init__(self, submitted: Any) -> None:
        self.number: int = submitted.job_id
        self.keys: list[bytes] = list(submitted.keys)
        self.began = time.monotonic()
        self.ended = False


class Tier:
    """Chunks of vLLM's first tier on the drive; joined with vLLM's `SecondaryTierManager`.

    Args:
        offloading_spec: vLLM's description of a chunk and its model.
        primary_kv_view: The first tier's memory, a row for each chunk.
        tier_type: The name of this tier in vLLM.
        backpressure_detector: vLLM's, where one is configured.
        directory: On the drive.
        capacity_bytes: A number, or a text such as "200GB" (GiB: sizes are binary).
        locality: "LOCAL" or "REMOTE", for vLLM's events.
        enable_kv_events: Tell vLLM's KV events which chunks came and went, also those that made
            room, if vLLM publishes events at all. Takes 74 bytes a chunk on the drive.
        weights: The directory of the weights' files, if vLLM does not say.
        weights_id: A name for this version of weights and adapters, in place of looking at them.
        adapters: The directories of all LoRA adapters that requests name.
        fingerprint: "auto", "full" or "samples": the way to tell them from others.

    Raises:
        ValueError: `capacity_bytes` is none, or has no room for a chunk; or another option makes no
            sense.
        TransferError: The store cannot be opened: see `nvmeio._kv_blocks.store.BlockStore`.

    Jobs are done in the background; every method returns at once but `drain_jobs` and `shutdown`.
    A submission that is interrupted was not begun, or goes on and is reported.
    """

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        directory: str,
        capacity_bytes: int | str,
        locality: str | None = None,
        enable_kv_events: bool = False,
        weights: str | None = None,
        weights_id: str | None = None,
        adapters: Sequence[str] | None = None,
        fingerprint: str = "auto",
    ) -> None:
        parent: Any = super()
        parent.__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._interface: Any = importlib.import_module(_BASE)
        self._results: Any = importlib.import_module(_TIERING).JobResult
        self._medium = self._interface.Medium.STORAGE
        if locality is not None:
            self.locality = self._interface.Locality(locality)
        assert primary_kv_view.strides is not None
        self._nbytes = primary_kv_view.strides[0]
        # vLLM's own file tier names its directories after most of what makes chunks differ.
        mapper: Any = importlib.import_module(_MAPPER).FileMapper.from_offloading_spec(
            root_dir="",
            offloading_spec=offloading_spec,
            blocks_per_file=offloading_spec.blocks_per_chunk,
            parallel_agnostic=True,
        )
        name = f"vllm-{_end_of(os.path.basename(mapper.base_path))}-r{mapper.rank}"
        # Its scheduler has the tier, for all ranks that compute together; each replica has one.
        parallel = offloading_spec.config.parallel
        if getattr(parallel, "data_parallel_size", 1) > 1:
            name += f"-dp{parallel.data_parallel_index}"
        capacity = _checks.size("capacity_bytes", capacity_bytes, 1)
        said = WeightOptions.of(
            {
                "weights": weights,
                "weights_id": weights_id,
                "adapters": adapters,
                "fingerprint": fingerprint,
            }
        )
        models, trained, settings = _served(offloading_spec)
        settings["bytes of a chunk"] = self._nbytes
        identity = identity_of(models, trained, said, settings, directory)
        self._events: deque[Any] | None = None
        events = getattr(offloading_spec, "kv_events_config", None)
        if _checks.switch("enable_kv_events", enable_kv_events):
            if getattr(events, "enable_kv_cache_events", False):
                self._events = deque()
            else:
                logger.warning(
                    "enable_kv_events is set for NvmeTier, and vLLM publishes no events: start it "
                    "with --kv-events-config '{\"enable_kv_cache_events\": true, …}'"
                )
        told = self._events is not None
        self._store = BlockStore(
            *(directory, name, self._nbytes, capacity),
            identity=identity,
            name_bytes=_KEY_BYTES if told else 0,
            on_change=self._note_changes if told else None,
        )
        self._labels = (name,)
        self._counted = self._store.stats  # when vLLM asked last
        self._view = primary_kv_view.cast("B")
        self._rows: torch.Tensor | None = torch.frombuffer(self._view, dtype=torch.uint8).view(
            -1, self._nbytes
        )
        self._ended: deque[Any] = deque()  # their results
        self._stores_begun: deque[_Job] = deque()
        self._storing: dict[bytes, _Job] = {}
        self._of_requests: dict[str, dict[bytes, int]] = {}  # their chunks, and where each ends

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """HIT, MISS, or RETRY while the chunk is on its way to the drive."""
        result = self._interface.LookupResult
        job = self._storing.get(key)
        on_its_way = job is not None and not job.ended
        if self._store.contains([key])[0]:
            return result.HIT
        return result.RETRY if on_its_way else result.MISS

    def submit_store(self, job_metadata: Any) -> None:
        """Begin to write chunks; those that are there are left as they are."""
        self._forget_stores_that_ended()
        job = _Job(job_metadata)
        ended = partial(self._end, job, False)
        self._store.begin_store(job.keys, self._rows_of(job_metadata), ended)
        # An interrupt before this lets it go on unannounced. Said before, it would leave chunks
        # that are on their way forever.
        self._stores_begun.append(job)
        self._storing.update(dict.fromkeys(job.keys, job))
        self._note(job.keys, getattr(job_metadata, "req_context", None))

    def submit_load(self, job_metadata: Any) -> None:
        """Begin to read chunks."""
        job = _Job(job_metadata)
        self._store.begin_load(job.keys, self._rows_of(job_metadata), partial(self._end_load, job))

    def _rows_of(self, submitted: Any) -> list[torch.Tensor]:
        assert self._rows is not None
        return [self._rows[int(chunk)] for chunk in submitted.chunk_ids]

    def _forget_stores_that_ended(self) -> None:
        begun = self._stores_begun
        while begun and begun[0].ended:  # in the order in which they were begun
            for key in begun[0].keys:
                if self._storing.get(key) is begun[0]:
                    del self._storing[key]
            begun.popleft()

    def _end_load(self, job: _Job, found: list[bool]) -> None:
        try:
            # Were they found again and again, and could never be read, vLLM would ask forever.
            missing = [key for key, there in zip(job.keys, found, strict=True) if not there]
            self._store.remove(missing)
        finally:
            self._end(job, True, found)

    def _end(self, job: _Job, is_load: bool, found: list[bool]) -> None:
        """Report that a job ended; in a thread of the store."""
        there = tuple(key for key, is_there in zip(job.keys, found, strict=True) if is_there)
        result = self._results(
            job_id=job.number,
            success=all(found),
            successful_keys=there or None if is_load else None,
            transfer_time=time.monotonic() - job.began,
            transfer_bytes=len(there) * self._nbytes,
        )
        job.ended = True
        self._ended.append(result)

    def get_finished_jobs(self) -> Iterable[Any]:
        """The jobs that ended since the last call; each is taken when the caller gets to it."""
        # From the one to the other in C: an interrupt loses none, and vLLM waits for all of them.
        return starmap(self._ended.popleft, repeat((), len(self._ended)))

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Chunks that were used: they are evicted last, of one prompt the first one last of all."""
        self._store.touch(list(keys))
        self._note(keys, req_context)

    def _note(self, keys: Collection[bytes], request: Any) -> None:
        position = getattr(request, "get_offload_key_position", None)
        if position is not None:
            known = self._of_requests.setdefault(request.req_id, {})
            known.update((key, position(key) or len(known)) for key in keys)

    def on_request_finished(self, req_context: Any) -> None:
        """Its chunks count as used together, though they were stored one after the other."""
        known = self._of_requests.pop(getattr(req_context, "req_id", ""), {})
        if known:
            in_order = sorted(known, key=known.__getitem__)
            self._store.touch(in_order)

    def on_new_request(self, req_context: Any) -> Any:
        """Nothing that is of interest here."""
        return self._interface.RequestOffloadingContext()

    def _note_changes(self, changes: list[Change]) -> None:
        """Remember what vLLM is to be told; called by the store, in the order of the changes."""
        assert self._events is not None
        for is_stored, group in itertools.groupby(changes, attrgetter("is_stored")):
            names = [change.name for change in group]
            # The store has the first chunk of a prompt last, so that it is evicted last.
            self._events.append((not is_stored, names[::-1] if is_stored else names))

    def take_events(self) -> Iterable[Any]:
        """Chunks that were stored and that went since the last call, in that order."""
        events = self._events
        while events:
            removed, keys = events.popleft()
            yield self._interface.OffloadingEvent(
                keys=keys, medium=self._medium, removed=removed, locality=self.locality
            )

    @classmethod
    def build_metric_definitions(cls, extra_config: Any) -> dict[str, Any]:
        """Counters of `get_stats` for vLLM's Prometheus endpoint, labelled by the store's name."""
        base: Any = importlib.import_module(_BASE)
        kinds = (base.OffloadingCounterMetadata, _COUNTERS), (base.OffloadingGaugeMetadata, _GAUGES)
        return {
            _metric(name): kind(documentation=text, labelnames=("store",))
            for kind, texts in kinds
            for name, text in texts.items()
        }

    def get_stats(self) -> Any:
        """The counts since the last call."""
        made = importlib.import_module(_STATS).OffloadingConnectorStats()
        now, before, usage = self._store.stats, self._counted, self._store.usage
        self._counted = now
        for name in _COUNTERS:
            if grown := getattr(now, name) - getattr(before, name):
                made.increase_counter(_metric(name), grown, self._labels)
        gauges = (now.blocks, usage.nbytes, usage.capacity_bytes, self._store.generation)
        for name, value in zip(_GAUGES, gauges, strict=True):
            made.set_gauge(_metric(name), value, self._labels)
        return made

    def drain_jobs(self) -> None:
        """Wait until nothing is read into or written from the first tier's memory.

        vLLM asks for this where its caches are reset (`reset_prefix_cache(reset_connector=True)`,
        a pause that clears caches, sleep), and for nothing else; weights may be others by then.
        """
        self.new_generation()
        self._store.drain()

    def new_generation(self) -> None:
        """Find no chunk that was stored before: the weights in memory are others now.

        For code of a user's own that changes them; vLLM does not call it.
        """
        self._store.new_generation()

    def shutdown(self) -> None:
        """End begun work; the chunks stay on the drive. Idempotent."""
        self._store.close()
        # Or vLLM could not close the memory.
        self._rows = None
        self._view.release()


def _end_of(name: str) -> str:
    """The end of a long name, whose last letters are a digest of all of it.

    vLLM puts the path of the model in it, and a file's name has 255 bytes at most.
    """
    return name.encode()[-_NAME_BYTES:].decode(errors="ignore")


def _served(offloading_spec: Any) -> tuple[list[ServedModel], ServedAdapters, dict[str, Any]]:
    """The models and adapters whose keys and values are kept, and what gives bytes a meaning."""
    described = offloading_spec.config
    settings = {
        "vllm": getattr(sys.modules.get("vllm"), "__version__", None),
        "seed": os.environ.get("PYTHONHASHSEED"),  # of vLLM's names for blocks
        "shuffled": os.environ.get(
            "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT"
        ),  # its layout is named alike
        "blocks of a chunk": offloading_spec.blocks_per_chunk,
        "layers": [(group.tokens_per_block, group.layer_names) for group in described.groups],
        "dtype": described.model.dtype,
        **_named(described, ("kv_cache_layout", "canonical_layout", "replicated_layout")),
        **_named(described.cache, ("tokens_per_hash",)),
        **_named(described.parallel, ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")),
    }
    caches = _in_callers("KVCacheConfig", "kv_cache_config")
    if caches is not None:
        # Attention, heads, sizes of pages, windows, quantisation: dataclasses, which say it all.
        settings["caches"] = [repr(group.kv_cache_spec) for group in caches.kv_cache_groups]
        settings |= _named(caches, ("kv_tp_replicas",))
    config = _in_callers("VllmConfig", "vllm_config")
    if config is None:
        name = str(described.model.name)
        return [ServedModel(name, is_revision_known=False)], ServedAdapters(), settings
    model, loading = config.model_config, config.load_config
    drafts = getattr(getattr(config, "speculative_config", None), "draft_model_config", None)
    models = [
        ServedModel(
            str(each.model),
            getattr(each, "revision", None),
            getattr(loading, "download_dir", None),
            is_made_up=loading.load_format == "dummy",
        )
        for each in (model, drafts)
        if each is not None
    ]
    settings["models"] = [each.compute_hash() for each in (model, drafts) if each]
    settings |= _named(config.cache_config, _CACHE_SETTINGS)
    settings |= _named(getattr(config, "attention_config", None), _ATTENTION_SETTINGS)
    settings |= _named(getattr(model, "multimodal_config", None), _MULTIMODAL_SETTINGS)
    return models, _adapters_of(getattr(config, "lora_config", None)), settings


def _adapters_of(lora_config: Any) -> ServedAdapters:
    if lora_config is None:
        return ServedAdapters()
    # vLLM tells nobody below its HTTP server of --lora-modules.
    return ServedAdapters(
        list((getattr(lora_config, "default_mm_loras", None) or {}).values()),
        "requests may name LoRA adapters (--enable-lora), and vLLM does not say where their files "
        "are",
    )


def _named(config: Any, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(config, name, None) for name in names}


def _in_callers(kind: str, name: str) -> Any:
    """A configuration of vLLM that is not handed to tiers; None: not found.

    The caller that makes tiers has it at hand: vLLM's connector, or its scheduler.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get(name)
        if type(found).__name__ == kind:
            return found
        frame = frame.f_back
    return None


def _tier() -> Any:
    hint = {
        "wanted": "nvmeio plugs into vLLM as a secondary tier of its KV offloading",
        "remedy": "pip install 'vllm>=0.32'",
    }
    base = client(_TIERING, "SecondaryTierManager", **hint)
    return joined("NvmeTier", Tier, base, medium=client(_BASE, "Medium", **hint).STORAGE)


__getattr__ = on_demand(__name__, "NvmeTier", _tier)
