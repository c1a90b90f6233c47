"""vLLM's tiered KV offloading on the drive: in vLLM's interface, or beside a double of it."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from inside import store_of
from integrations import kv_weights
from interrupting import at_places, at_random_times, everywhere

from nvmeio._kv_blocks.table import Table
from nvmeio.errors import BackendUnavailableError
from nvmeio.integrations import vllm_tier
from nvmeio.integrations._serving import kv_identity

pytestmark = pytest.mark.filterwarnings("default")

TIERING = "vllm.v1.kv_offload.tiering.base"
BASE = "vllm.v1.kv_offload.base"
MAPPER = "vllm.v1.kv_offload.file_mapper"
STATS = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics"
CHUNK = 8192
CHUNKS = 16

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        import vllm

        VLLM = bool(vllm)
    except ImportError:
        VLLM = False


def doubles() -> dict[str, ModuleType]:
    """As vLLM 0.32.0 has it, as far as nvmeio reaches into it."""
    tiering, base, mapper = ModuleType(TIERING), ModuleType(BASE), ModuleType(MAPPER)

    class SecondaryTierManager:
        locality = None

        def __init__(
            self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, bp: Any = None
        ) -> None:
            self.tier_type = tier_type

    @dataclass
    class JobResult:
        job_id: int
        success: bool
        successful_keys: Any = None
        transfer_time: Any = None
        transfer_bytes: Any = None

    class LookupResult(Enum):
        MISS = 0
        HIT = 1
        RETRY = 2

    class Medium(str, Enum):
        CPU = "CPU"
        STORAGE = "STORAGE"

    class Locality(str, Enum):
        LOCAL = "LOCAL"
        REMOTE = "REMOTE"

    class RequestOffloadingContext:
        pass

    @dataclass
    class OffloadingEvent:
        keys: list[bytes]
        medium: Any
        removed: bool
        locality: Any = None

    @dataclass(frozen=True)
    class OffloadingCounterMetadata:
        documentation: str
        labelnames: tuple[str, ...] = ()

    @dataclass(frozen=True)
    class OffloadingGaugeMetadata:
        documentation: str
        labelnames: tuple[str, ...] = ()

    class OffloadingConnectorStats:
        def __init__(self) -> None:
            self.counters: dict[str, float] = {}
            self.gauges: dict[str, float] = {}

        def increase_counter(self, name: str, value: float, labelvalues: tuple[str, ...]) -> None:
            assert len(labelvalues) == 1
            self.counters[name] = self.counters.get(name, 0) + value

        def set_gauge(self, name: str, value: float, labelvalues: tuple[str, ...]) -> None:
            assert len(labelvalues) == 1
            self.gauges[name] = value

    class FileMapper:
        rank = 0
        base_path = ""

        @classmethod
        def from_offloading_spec(cls, root_dir: str, offloading_spec: Any, **_: Any) -> Any:
            made = cls()
            name = offloading_spec.config.model.name.replace("/", "_")
            made.base_path = f"{root_dir}/{name}_0123"
            return made

    tiering.SecondaryTierManager = SecondaryTierManager  # type: ignore[attr-defined]
    tiering.JobResult = JobResult  # type: ignore[attr-defined]
    told = (OffloadingEvent, OffloadingCounterMetadata, OffloadingGaugeMetadata)
    for thing in (LookupResult, Medium, Locality, RequestOffloadingContext, *told):
        setattr(base, thing.__name__, thing)
    stats = ModuleType(STATS)
    stats.OffloadingConnectorStats = OffloadingConnectorStats  # type: ignore[attr-defined]
    mapper.FileMapper = FileMapper  # type: ignore[attr-defined]
    return {TIERING: tiering, BASE: base, MAPPER: mapper, STATS: stats}


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """In these tests weights are written by the process that is the server."""
    monkeypatch.setattr(kv_identity, "_began", [])


@pytest.fixture
def interface(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`LookupResult` and the base class: vLLM's own where it is installed."""
    vllm_tier.__dict__.pop("NvmeTier", None)
    if not VLLM:
        for name, module in doubles().items():
            monkeypatch.setitem(sys.modules, name, module)
    else:
        for name in (TIERING, BASE, MAPPER, STATS):
            __import__(name)
    lookup = sys.modules[BASE].LookupResult  # type: ignore[attr-defined]
    yield SimpleNamespace(
        base=sys.modules[TIERING].SecondaryTierManager,  # type: ignore[attr-defined]
        HIT=lookup.HIT,
        MISS=lookup.MISS,
        RETRY=lookup.RETRY,
    )
    vllm_tier.__dict__.pop("NvmeTier", None)


def spec(model: str = "m", replica: int | None = None, **changed: Any) -> Any:
    """What `FileMapper` asks a specification for; of one of two replicas, which.

    `changed` are attributes by their dotted names, "parallel.tp_size" for instance.
    """
    parallel = dict.fromkeys(("tp_size", "pp_size", "pcp_size", "dcp_size", "world_size"), 1)
    parallel["data_parallel_size"] = 1 if replica is None else 2
    parallel["data_parallel_index"] = replica or 0
    config = SimpleNamespace(
        groups=[SimpleNamespace(tokens_per_block=16, layer_names=("a", "b"))],
        parallel=SimpleNamespace(**parallel, rank=0, is_parallelism_agnostic=True),
        model=SimpleNamespace(name=model, dtype="bfloat16"),
        cache=SimpleNamespace(tokens_per_hash=16),
        canonical_layout=False,
        replicated_layout=False,
        kv_cache_layout="LBHNC",
    )
    made = SimpleNamespace(blocks_per_chunk=1, config=config)
    for name, value in changed.items():
        change(made, name, value)
    return made


def change(configuration: Any, name: str, value: Any) -> None:
    """Set an attribute by its dotted name."""
    *between, last = name.split(".")
    for attribute in between:
        configuration = getattr(configuration, attribute)
    setattr(configuration, last, value)


class Primary:
    """The first tier's memory: shared, as vLLM's `SharedOffloadRegion` maps it."""

    def __init__(self, seed: int = 0) -> None:
        self.mapping = mmap.mmap(-1, CHUNK * CHUNKS)
        made = torch.Generator().manual_seed(seed)
        self.whole = torch.randint(0, 256, (CHUNKS, CHUNK), dtype=torch.uint8, generator=made)
        self.mapping[:] = self.whole.numpy().tobytes()
        self.view = memoryview(self.mapping).cast("B", (CHUNKS, CHUNK))

    def chunk(self, number: int) -> bytes:
        return self.mapping[number * CHUNK : (number + 1) * CHUNK]

    def close(self) -> None:
        """As vLLM does: fails where somebody still has the memory."""
        self.view.release()
        self.mapping.close()


@pytest.fixture
def opened(interface: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    made: list[tuple[Any, Primary]] = []

    def open_(
        primary: Primary,
        model: str = "m",
        replica: int | None = None,
        changed: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        standard = {
            "directory": str(tmp_path),
            "capacity_bytes": 1 << 20,
            "weights_id": None if model != "m" else "w",
        }
        kind = vllm_tier.NvmeTier
        assert issubclass(kind, interface.base)
        tier = kind(
            offloading_spec=spec(model, replica, **(changed or {})),
            primary_kv_view=primary.view,
            tier_type="NvmeTier",
            backpressure_detector=None,
            **(standard | options),
        )
        made.append((tier, primary))
        return tier

    yield open_
    for tier, primary in made:
        with contextlib.suppress(ValueError):  # closed by the test
            tier.shutdown()
            primary.close()


def job(number: int, keys: list[bytes], chunks: list[int]) -> Any:
    return SimpleNamespace(job_id=number, keys=keys, chunk_ids=chunks)


def ended(tier: Any) -> list[tuple[int, bool, Any]]:
    store_of(tier).drain()
    return [(r.job_id, r.success, r.successful_keys) for r in tier.get_finished_jobs()]


def test_chunks_come_back_after_a_restart(opened: Callable[..., Any], interface: Any) -> None:
    primary = Primary()
    tier = opened(primary)
    assert tier.lookup(b"a", None) is interface.MISS
    tier.submit_store(job(1, [b"a", b"b"], [3, 5]))
    tier.submit_store(job(2, [b"b", b"c"], [5, 7]))
    assert ended(tier) == [(1, True, None), (2, True, None)]
    assert list(tier.get_finished_jobs()) == []
    assert [tier.lookup(key, None) for key in (b"a", b"x")] == [interface.HIT, interface.MISS]
    tier.shutdown()
    tier.shutdown()
    primary.close()
    other = Primary(1)
    tier = opened(other)
    tier.submit_load(job(9, [b"c", b"a"], [0, 15]))
    ((number, success, keys),) = ended(tier)
    assert (number, success, set(keys)) == (9, True, {b"a", b"c"})
    assert other.chunk(0) == primary.whole[7].numpy().tobytes()
    assert other.chunk(15) == primary.whole[3].numpy().tobytes()
    assert other.chunk(1) == other.whole[1].numpy().tobytes()


def test_a_chunk_on_its_way_is_to_be_asked_for_again(
    opened: Callable[..., Any], interface: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = opened(Primary())
    held: list[Any] = []
    monkeypatch.setattr(store_of(tier), "begin_store", lambda *given: held.append(given))
    tier.submit_store(job(1, [b"a"], [0]))
    assert tier.lookup(b"a", None) is interface.RETRY
    held[0][2]([False])
    assert ended(tier) == [(1, False, None)]
    assert tier.lookup(b"a", None) is interface.MISS


def run(tier: Any, submit: Callable[[Any], None], number: int, chunks: list[int]) -> None:
    """A job from one end to the other, as vLLM's manager follows it."""
    submit(job(number, [bytes([chunk]) for chunk in chunks], chunks))
    store_of(tier).drain()
    results = []
    for result in tier.get_finished_jobs():
        results.append(result)
    assert (number, True) in [(result.job_id, result.success) for result in results]


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="reads 3.11's exception tables")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("interrupts", [at_places, at_random_times])
def test_an_interrupted_submission_is_none_or_goes_on(
    interrupts: Any, opened: Callable[..., Any], interface: Any
) -> None:
    """Chunks that it had announced were on their way for ever, and its end was of no job."""
    primary = Primary()
    tier = opened(primary)
    chunks = [2, 3, 5]

    def work() -> None:
        run(tier, tier.submit_store, 1, chunks)
        assert tier.lookup(bytes([3]), None) is interface.HIT
        run(tier, tier.submit_load, 2, chunks)
        store_of(tier).clear()

    for where in interrupts(work, 120):
        store_of(tier).drain()
        before = [result.job_id for result in tier.get_finished_jobs()]
        assert before in ([], [1], [2]), where  # what was interrupted, if anything, and once
        expected = interface.HIT, interface.MISS
        assert tier.lookup(bytes([3]), None) in expected, where
        store_of(tier).clear()
        assert tier.lookup(bytes([3]), None) is interface.MISS, where
        run(tier, tier.submit_store, 3, chunks)
        primary.mapping[5 * CHUNK : 6 * CHUNK] = bytes(CHUNK)
        run(tier, tier.submit_load, 4, chunks)
        assert primary.chunk(5) == primary.whole[5].numpy().tobytes(), where
        store_of(tier).clear()
    run(tier, tier.submit_store, 5, chunks)
    run(tier, tier.submit_store, 6, [1])
    assert len(tier._storing) <= len(chunks) + 1  # what had ended is forgotten


@pytest.mark.skipif(sys.version_info < (3, 11), reason="reads 3.11's exception tables")
def test_no_end_of_a_job_is_lost_to_an_interrupt(opened: Callable[..., Any]) -> None:
    """vLLM's manager waits until every job was told."""
    tier = opened(Primary())
    told: list[int] = []
    number = 0

    def work() -> None:
        for result in tier.get_finished_jobs():
            told.append(result.job_id)

    for _ in everywhere(work):
        number += 1
        tier.submit_store(job(number, [bytes([number % 16])], [number % 16]))
        store_of(tier).drain()
    work()
    assert told == list(range(1, number + 1))
    assert number


@pytest.mark.skipif(sys.version_info < (3, 11), reason="reads 3.11's exception tables")
def test_opening_and_shutting_down_can_be_interrupted(
    opened: Callable[..., Any], tmp_path: Path
) -> None:
    primary = Primary()
    tier = opened(primary)
    run(tier, tier.submit_store, 1, [1])
    tier.shutdown()

    given = {"directory": str(tmp_path), "capacity_bytes": 1 << 20, "weights_id": "w"}

    def work() -> None:
        vllm_tier.NvmeTier(spec(), primary.view, "n", **given).shutdown()

    for where in at_places(work, 30):
        again = vllm_tier.NvmeTier(spec(), primary.view, "n", **given)
        run(again, again.submit_load, 2, [1])
        assert primary.chunk(1) == primary.whole[1].numpy().tobytes(), where
        again.shutdown()
    primary.close()


def test_a_drive_that_fails_the_table_as_well_ends_every_job(
    opened: Callable[..., Any], interface: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job whose missing chunks could not be forgotten was never told, and vLLM waited."""
    tier = opened(Primary())
    tier.submit_store(job(1, [b"a"], [0]))
    assert ended(tier) == [(1, True, None)]
    with store_of(tier).path.open("r+b") as file:
        file.write(b"damaged")

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "the drive failed")

    monkeypatch.setattr(Table, "empty", fail)
    tier.submit_load(job(2, [b"a"], [4]))
    assert ended(tier) == [(2, False, None)]
    assert tier.lookup(b"a", None) is interface.MISS
    tier.submit_store(job(3, [b"b"], [0]))
    assert ended(tier) == [(3, False, None)]


def test_a_load_that_fails_in_part(opened: Callable[..., Any], interface: Any) -> None:
    """What came is kept; what did not is a miss from then on, and not asked for without end."""
    tier = opened(Primary())
    tier.submit_store(job(1, [b"a", b"b"], [0, 1]))
    ended(tier)
    with store_of(tier).path.open("r+b") as file:
        file.write(b"damaged")
    tier.submit_load(job(2, [b"a", b"x", b"b"], [4, 5, 6]))
    ((_, success, keys),) = ended(tier)
    assert not success
    (kept,) = keys
    assert tier.lookup(kept, None) is interface.HIT
    assert tier.lookup(b"b" if kept == b"a" else b"a", None) is interface.MISS


def test_what_was_used_longest_ago_makes_room(opened: Callable[..., Any], interface: Any) -> None:
    tier = opened(Primary(), capacity_bytes=4 * CHUNK)
    tier.submit_store(job(1, [b"a", b"b", b"c", b"d"], [0, 1, 2, 3]))
    ended(tier)
    tier.touch([b"a"], None)
    tier.submit_store(job(2, [b"e"], [4]))
    assert ended(tier) == [(2, True, None)]
    found = [tier.lookup(key, None) is interface.HIT for key in (b"a", b"b", b"c", b"d", b"e")]
    assert found == [True, True, True, False, True]  # of one job the last first
    tier.submit_store(job(3, [bytes([n]) for n in range(6)], list(range(6))))
    assert ended(tier) == [(3, False, None)]


def events_of(tier: Any) -> list[tuple[bool, list[bytes]]]:
    return [(event.removed, list(event.keys)) for event in tier.take_events()]


def test_vllm_is_told_what_comes_and_goes(opened: Callable[..., Any], interface: Any) -> None:
    """Those that make room and those that are damaged too; vLLM's own tier tells of stores only."""
    published = {"kv_events_config": SimpleNamespace(enable_kv_cache_events=True)}
    primary = Primary()
    options = {"capacity_bytes": 4 * CHUNK, "enable_kv_events": True, "locality": "LOCAL"}
    tier = opened(primary, changed=published, **options)
    tier.submit_store(job(1, [b"a", b"b", b"c", b"d"], [0, 1, 2, 3]))
    ended(tier)
    events = list(tier.take_events())
    assert [(e.removed, list(e.keys)) for e in events] == [(False, [b"a", b"b", b"c", b"d"])]
    assert events[0].medium is sys.modules[BASE].Medium.STORAGE  # type: ignore[attr-defined]
    assert events[0].locality is sys.modules[BASE].Locality.LOCAL  # type: ignore[attr-defined]
    assert events_of(tier) == []
    tier.submit_store(job(2, [b"e"], [4]))
    ended(tier)
    assert events_of(tier) == [(True, [b"d"]), (False, [b"e"])]
    path = tier._store.path
    tier.shutdown()
    with path.open("r+b") as file:  # nothing is right any more
        file.write(b"\1" * (4 * CHUNK))
    tier = opened(Primary(), changed=published, **options)
    tier.submit_load(job(3, [b"a"], [0]))
    assert ended(tier) == [(3, False, None)]
    assert events_of(tier) == [(True, [b"a"])]


def test_events_that_vllm_does_not_publish_are_not_kept(
    opened: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    quiet = {"kv_events_config": SimpleNamespace(enable_kv_cache_events=False)}
    tier = opened(Primary(), changed=quiet, enable_kv_events=True)
    assert "--kv-events-config" in caplog.text
    tier.submit_store(job(1, [b"a"], [0]))
    ended(tier)
    assert list(tier.take_events()) == []
    assert not list(tier._store.path.parent.glob("*.names"))


def test_vllms_metrics_have_what_the_store_counts(opened: Callable[..., Any]) -> None:
    tier = opened(Primary(), capacity_bytes=4 * CHUNK)
    defined = type(tier).build_metric_definitions({})
    tier.submit_store(job(1, [b"a", b"b", b"c", b"d"], [0, 1, 2, 3]))
    tier.submit_store(job(2, [b"e"], [4]))
    ended(tier)
    tier.submit_load(job(3, [b"a", b"x"], [0, 1]))
    ended(tier)

    def counted() -> dict[str, float]:
        stats = tier.get_stats()
        if VLLM:
            values = {
                name: value
                for kind in stats.data.values()
                if isinstance(kind, dict)
                for name, by_label in kind.items()
                for value in (by_label.values() if isinstance(by_label, dict) else [by_label])
            }
        else:
            values = stats.counters | stats.gauges
        assert set(values) <= set(defined)
        return {name.removeprefix("vllm:kv_offload_nvmeio_"): n for name, n in values.items()}

    gauges = {"chunks": 4, "bytes": 4 * CHUNK, "capacity_bytes": 4 * CHUNK, "generation": 0}
    events = {"stored": 5, "loaded": 1, "evicted": 1, "absent": 1}
    assert counted() == gauges | events
    assert counted() == gauges  # counters are what came since
    tier.new_generation()
    assert counted() == gauges | {"generation": 1}


def test_of_a_prompt_the_last_chunks_make_room_first(
    opened: Callable[..., Any], interface: Any
) -> None:
    """Of 10 slots vLLM's CPU tier keeps 6 of 8 chunks usable behind a prompt of 4; here it was 0,
    and is 6 for a prompt that is stored in two jobs as well."""
    tier = opened(Primary(), capacity_bytes=10 * CHUNK)
    first, then = [bytes([n]) for n in range(8)], [bytes([n]) for n in range(20, 24)]
    places = {key: 16 * (n + 1) for n, key in enumerate(first)}
    request = SimpleNamespace(req_id="r", get_offload_key_position=places.get)
    for number, keys in enumerate((first[:5], first[5:])):
        submitted = job(number, keys, list(range(len(keys))))
        submitted.req_context = request
        tier.submit_store(submitted)
    tier.on_request_finished(request)
    assert len(ended(tier)) == 2
    tier.submit_store(job(2, then, list(range(4))))
    assert ended(tier) == [(2, True, None)]
    assert hits(tier, interface, first) == [True] * 6 + [False] * 2
    assert not tier._of_requests


def test_another_model_finds_nothing(opened: Callable[..., Any], interface: Any) -> None:
    tier = opened(Primary())
    tier.submit_store(job(1, [b"a"], [0]))
    ended(tier)
    assert opened(Primary(), "other").lookup(b"a", None) is interface.MISS


def test_replicas_of_one_server_share_a_directory(opened: Callable[..., Any]) -> None:
    """The second one did not start: the first had the store of that name."""
    tiers = [opened(Primary(replica), replica=replica) for replica in (0, 1)]
    for number, tier in enumerate(tiers):
        tier.submit_store(job(number, [b"a"], [3]))
        assert ended(tier) == [(number, True, None)]


def hits(tier: Any, interface: Any, keys: list[bytes]) -> list[bool]:
    return [tier.lookup(key, None) is interface.HIT for key in keys]


def stored(tier: Any, keys: list[bytes]) -> Any:
    tier.submit_store(job(1, keys, list(range(len(keys)))))
    assert ended(tier) == [(1, True, None)]
    return tier


@pytest.mark.parametrize("fingerprint", ["full", "samples"])
@pytest.mark.parametrize("change", kv_weights.CHANGES)
def test_chunks_of_other_weights_at_the_same_path_are_not_found(
    change: str,
    fingerprint: str,
    opened: Callable[..., Any],
    interface: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A restart after fine-tuning in place served 1,024 stale tokens, without a warning."""
    model, keys = kv_weights.made(tmp_path / "model"), [b"a", b"b"]
    options = {"fingerprint": fingerprint}
    stored(opened(Primary(), str(model), **options), keys).shutdown()
    again = opened(Primary(), str(model), **options)
    assert hits(again, interface, keys) == [True, True]
    again.shutdown()
    assert not caplog.records
    kv_weights.change(model, change)
    other = opened(Primary(), str(model), **options)
    assert hits(other, interface, keys) == [False, False]
    assert ["2 blocks were stored with other weights" in each for each in caplog.messages] == [True]
    stored(other, keys[:1]).shutdown()
    caplog.clear()
    assert hits(opened(Primary(), str(model), **options), interface, keys) == [True, False]
    assert not caplog.records


def test_the_same_weights_written_again_are_the_same(
    opened: Callable[..., Any], interface: Any, tmp_path: Path
) -> None:
    model = kv_weights.made(tmp_path / "model")
    stored(opened(Primary(), str(model)), [b"a"]).shutdown()
    kv_weights.made(model)
    assert hits(opened(Primary(), str(model)), interface, [b"a"]) == [True]


def test_chunks_of_weights_that_nobody_can_tell_end_with_the_process(
    opened: Callable[..., Any], interface: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tier = stored(opened(Primary(), "owner/unknown"), [b"a"])
    assert hits(tier, interface, [b"a"]) == [True]
    (said,) = caplog.messages
    assert "there are no files of owner/unknown here" in said
    assert '"weights_id"' in said
    tier.shutdown()
    assert hits(opened(Primary(), "owner/unknown"), interface, [b"a"]) == [False]


def test_weights_that_came_while_the_server_started_are_not_trusted(
    opened: Callable[..., Any],
    interface: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Which of them it had loaded nobody could tell: half of a download, half of a training."""
    model = kv_weights.made(tmp_path / "model")
    began = os.stat(model / "model.safetensors").st_ctime - 1
    monkeypatch.setattr(kv_identity, "_began", [began])
    stored(opened(Primary(), str(model)), [b"a"]).shutdown()
    assert "written to after this server began" in caplog.text
    monkeypatch.setattr(kv_identity, "_began", [began + 2])
    assert hits(opened(Primary(), str(model)), interface, [b"a"]) == [False]


def test_another_seed_of_hashes_finds_nothing(
    opened: Callable[..., Any], interface: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(kv_weights.made(tmp_path / "model"))
    stored(opened(Primary(), model), [b"a"]).shutdown()
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert hits(opened(Primary(), model), interface, [b"a"]) == [False]


def test_what_vllm_is_configured_with_counts(
    opened: Callable[..., Any], interface: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of which it tells a tier the model's name alone: --quantization, --load-format dummy."""
    model = str(kv_weights.made(tmp_path / "model"))

    class VllmConfig:
        lora_config: Any = None

        def __init__(self, settings: str, load_format: str = "auto") -> None:
            self.model_config = SimpleNamespace(
                model=model, revision=None, compute_hash=lambda: settings
            )
            self.load_config = SimpleNamespace(load_format=load_format, download_dir=None)
            self.cache_config = SimpleNamespace(prefix_caching_hash_algo="sha256")
            self.speculative_config = None

    def configured(vllm_config: Any, **options: Any) -> Any:
        return opened(Primary(), model, **options)

    stored(configured(VllmConfig("bf16")), [b"a"]).shutdown()
    for settings, expected in (("fp8", False), ("bf16", True)):
        tier = configured(VllmConfig(settings))
        assert hits(tier, interface, [b"a"]) == [expected]
        tier.shutdown()
    tier = configured(VllmConfig("bf16", "dummy"))
    assert hits(tier, interface, [b"a"]) == [False]
    tier.shutdown()
    assert "--load-format dummy" in caplog.text
    # An adapter may have been trained again, under its name.
    VllmConfig.lora_config = SimpleNamespace(max_loras=1)
    for options, expected in (
        ({}, False),
        ({"weights": model}, False),
        ({"weights_id": "1"}, True),
    ):
        stored(configured(VllmConfig("bf16"), **options), [b"a"]).shutdown()
        tier = configured(VllmConfig("bf16"), **options)
        assert hits(tier, interface, [b"a"]) == [expected]
        tier.shutdown()
    assert "requests may name LoRA adapters" in caplog.text


class VllmConfig:
    """vLLM's configuration, with all that counts in what a tier finds."""

    def __init__(self, model: str) -> None:
        multimodal = SimpleNamespace(mm_processor_kwargs=None, mm_encoder_attn_dtype=None)
        model_config: Any = SimpleNamespace(
            model=model, revision=None, settings="bf16", multimodal_config=multimodal
        )
        model_config.compute_hash = lambda: model_config.settings
        self.model_config = model_config
        self.load_config = SimpleNamespace(load_format="auto", download_dir=None)
        self.cache_config = SimpleNamespace(
            prefix_caching_hash_algo="sha256",
            cache_dtype="auto",
            block_size=16,
            sliding_window=None,
        )
        self.attention_config = SimpleNamespace(backend=None, indexer_kv_dtype="auto")
        self.speculative_config = None
        self.lora_config: Any = None


@dataclass
class FullAttentionSpec:
    """As vLLM's, of which every field gives the bytes of a block a meaning."""

    block_size: int = 16
    num_kv_heads: int = 4
    head_size: int = 8
    dtype: torch.dtype = torch.bfloat16
    kv_quant_mode: int = 0
    page_size_padded: int | None = None
    sliding_window: int | None = None


@dataclass
class MLAAttentionSpec(FullAttentionSpec):
    pass


class KVCacheConfig:
    def __init__(self, attention: FullAttentionSpec) -> None:
        self.kv_cache_groups = [SimpleNamespace(layer_names=["a", "b"], kv_cache_spec=attention)]
        self.kv_tp_replicas = 1


# One setting that gives the bytes of a block their meaning, and another value: of the
# specification that vLLM hands to a tier, of its configuration, of its KV caches' specification.
OF_THE_SPECIFICATION: dict[str, Any] = {
    "config.kv_cache_layout": "LBNHC",
    "config.canonical_layout": True,
    "config.replicated_layout": True,
    "config.model.dtype": "fp8_e4m3",
    "config.cache.tokens_per_hash": 32,
    "config.groups": [SimpleNamespace(tokens_per_block=32, layer_names=("a", "b"))],
    "config.parallel.tp_size": 2,
    "config.parallel.pp_size": 2,
    "config.parallel.pcp_size": 2,
    "config.parallel.dcp_size": 2,
    "config.parallel.world_size": 2,
    "blocks_per_chunk": 2,
}
OF_THE_CONFIGURATION: dict[str, Any] = {
    "model_config.settings": "fp8",
    "cache_config.cache_dtype": "fp8_e5m2",
    "cache_config.block_size": 32,
    "cache_config.sliding_window": 128,
    "cache_config.prefix_caching_hash_algo": "xxhash",
    "attention_config.backend": "FLASHINFER",
    "attention_config.indexer_kv_dtype": "fp8",
    "model_config.multimodal_config.mm_processor_kwargs": {"max_pixels": 7},
    "model_config.multimodal_config.mm_encoder_attn_dtype": "fp8",
}
OF_THE_CACHES: dict[str, Any] = {
    "block_size": 32,
    "num_kv_heads": 2,
    "head_size": 16,
    "dtype": torch.float16,
    "kv_quant_mode": 1,
    "page_size_padded": 4096,
    "sliding_window": 64,
    "attention": MLAAttentionSpec,
}


@pytest.mark.parametrize(
    "setting",
    [
        *OF_THE_SPECIFICATION,
        *OF_THE_CONFIGURATION,
        *OF_THE_CACHES,
        *("vllm's version", "nvmeio's format", "bytes of a chunk", "PYTHONHASHSEED", "shuffled"),
        "the processor of images",
    ],
)
def test_chunks_of_another_meaning_are_not_found(
    setting: str,
    opened: Callable[..., Any],
    interface: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks of one KV cache layout were found under another: 32,576 of 32,768 elements wrong."""
    model, keys = kv_weights.made(tmp_path / "model"), [b"a", b"b"]
    if not VLLM:
        monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "1", raising=False)
    (model / "preprocessor_config.json").write_text('{"size": 224}')

    def started(attention: Any = FullAttentionSpec, **changed: Any) -> Any:
        """A server; the two configurations are found where vLLM has them when it makes a tier."""
        vllm_config = VllmConfig(str(model))
        of_caches = {name: changed.pop(name) for name in OF_THE_CACHES if name in changed}
        kv_cache_config = KVCacheConfig(attention(**of_caches))
        for name in [name for name in changed if name in OF_THE_CONFIGURATION]:
            change(vllm_config, name, changed.pop(name))
        primary = Primary()
        tier = opened(primary, str(model), changed=changed)
        assert vllm_config is not kv_cache_config is not None
        return tier

    stored(started(), keys).shutdown()
    changed: dict[str, Any] = {}
    with monkeypatch.context() as other:
        if setting == "vllm's version":
            other.setattr(sys.modules["vllm"], "__version__", "2")
        elif setting == "nvmeio's format":
            other.setattr(kv_identity, "FORMAT", kv_identity.FORMAT + 1)
        elif setting == "bytes of a chunk":
            other.setattr(sys.modules[__name__], "CHUNK", CHUNK // 2)
        elif setting == "PYTHONHASHSEED":
            other.setenv("PYTHONHASHSEED", "7")
        elif setting == "shuffled":
            other.setenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1")
        elif setting == "the processor of images":
            (model / "preprocessor_config.json").write_text('{"size": 448}')
        else:
            every = OF_THE_SPECIFICATION | OF_THE_CONFIGURATION | OF_THE_CACHES
            changed = {setting: every[setting]}
        tier = started(**changed)
        assert hits(tier, interface, keys) == [False, False]
        tier.shutdown()
    (model / "preprocessor_config.json").write_text('{"size": 224}')
    tier = started()
    expected = setting != "bytes of a chunk"  # the store began anew
    assert hits(tier, interface, keys) == [expected, expected]
    tier.shutdown()


def test_adapters_count_by_their_bytes(
    opened: Callable[..., Any], interface: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM names a block by an adapter's name and path, so the user lists where the files are."""
    model, adapter = kv_weights.made(tmp_path / "model"), kv_weights.adapter(tmp_path / "adapter")

    def started(*adapters: Path, images: Path | None = None) -> Any:
        vllm_config = VllmConfig(str(model))
        by_modality = {"image": str(images)} if images else None
        vllm_config.lora_config = SimpleNamespace(max_loras=1, default_mm_loras=by_modality)
        return opened(Primary(), str(model), adapters=[str(path) for path in adapters])

    for images in (None, adapter):
        listed = [] if images else [adapter]
        stored(started(*listed, images=images), [b"a"]).shutdown()
        tier = started(*listed, images=images)
        assert hits(tier, interface, [b"a"]) == [True]
        tier.shutdown()
        assert "of use to this process only" not in caplog.text
        for change_adapter in kv_weights.ADAPTER_CHANGES:
            change_adapter(adapter)
            tier = started(*listed, images=images)
            assert hits(tier, interface, [b"a"]) == [False], change_adapter
            stored(tier, [b"a"]).shutdown()
    tier = started(tmp_path / "nowhere")
    assert hits(tier, interface, [b"a"]) == [False]
    assert "there are no files of" in caplog.text


def test_a_model_of_a_long_path_has_a_store(opened: Callable[..., Any], tmp_path: Path) -> None:
    """ENAMETOOLONG: the whole path became part of the name of a file."""
    long = tmp_path / ("d" * 240) / ("\N{GREEK SMALL LETTER MU}" * 100)
    other = tmp_path / ("e" * 240) / ("\N{GREEK SMALL LETTER MU}" * 100)
    names = set()
    for model in (long, other):
        model.mkdir(parents=True)
        tier = stored(opened(Primary(), str(kv_weights.made(model))), [b"a"])
        names.add(store_of(tier).path.name)
        tier.shutdown()
    assert all(len(name.encode()) < 200 for name in names)
    if VLLM:  # the double's digest is the same for all models
        assert len(names) == 2


def test_a_reset_of_vllms_caches_reaches_the_tier(
    opened: Callable[..., Any], interface: Any, tmp_path: Path
) -> None:
    """After an update of weights in memory it served chunks of those before."""
    model = str(kv_weights.made(tmp_path / "model"))
    tier = stored(opened(Primary(), model), [b"a", b"b"])
    tier.drain_jobs()  # what vLLM asks a tier for, of reset_prefix_cache(reset_connector=True)
    assert hits(tier, interface, [b"a", b"b"]) == [False, False]
    stored(tier, [b"a"])
    assert hits(tier, interface, [b"a", b"b"]) == [True, False]
    tier.new_generation()  # for whoever updates weights himself
    assert hits(tier, interface, [b"a", b"b"]) == [False, False]
    stored(tier, [b"a"])
    tier.shutdown()
    # The next server has the weights of the files again, with which both were stored before.
    tier = opened(Primary(7), model)
    assert hits(tier, interface, [b"a", b"b"]) == [True, True]
    tier.submit_load(job(5, [b"b"], [9]))
    assert ended(tier) == [(5, True, (b"b",))]


def test_a_capacity_in_words_is_binary(opened: Callable[..., Any]) -> None:
    """As the documents say; it was read as safetensors' shards are, 5% smaller."""
    tier = opened(Primary(), capacity_bytes="1MB")
    assert store_of(tier).usage.capacity_bytes == 1 << 20


def test_what_makes_no_sense_is_refused(opened: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="capacity_bytes: 'much' is not a size"):
        opened(Primary(), capacity_bytes="much")
    with pytest.raises(ValueError, match=r"capacity_bytes must be \d+ or more, for one block"):
        opened(Primary(), capacity_bytes=CHUNK - 1)
    with pytest.raises(ValueError, match="must be one of auto, full, samples, not 'all'"):
        opened(Primary(), fingerprint="all")
    with pytest.raises(ValueError, match='"weights_id" must be a text, not 7'):
        opened(Primary(), weights_id=7)
    with pytest.raises(ValueError, match='"adapters" must be a list of the adapters'):
        opened(Primary(), adapters="/adapters/a")


def test_vllms_factory_takes_the_tier(interface: Any, tmp_path: Path) -> None:
    """By its module path, as in ``--kv-transfer-config``."""
    if not VLLM:
        pytest.skip("vllm is not installed: make serve-vllm")
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    primary = Primary()
    tier = SecondaryTierFactory.create_secondary_tier(
        {
            "type": "NvmeTier",
            "module_path": "nvmeio.integrations.vllm_tier",
            "directory": str(tmp_path),
            "capacity_bytes": "1MB",
            "locality": "LOCAL",
        },
        primary.view,
        spec(),
    )
    assert tier.tier_type == "NvmeTier"
    assert tier.medium.name == "STORAGE"
    tier.on_new_request(None)
    tier.shutdown()
    primary.close()


def test_vllms_manager_stores_and_promotes(interface: Any, tmp_path: Path) -> None:
    """`TieringOffloadingManager` itself above the tier, its first tier smaller than what it saw."""
    if not VLLM:
        pytest.skip("vllm is not installed: make serve-vllm")
    from vllm.v1.kv_offload.base import (
        LookupResult,
        ReqContext,
        ScheduleEndContext,
        make_offload_key,
    )
    from vllm.v1.kv_offload.tiering.manager import (
        CPUPrimaryTierOffloadingManager,
        TieringOffloadingManager,
    )

    primary = Primary()
    region = SimpleNamespace(create_kv_memoryview=lambda: primary.view, cleanup=lambda: None)
    first = CPUPrimaryTierOffloadingManager(num_chunks=CHUNKS, mmap_region=region)
    tier = vllm_tier.NvmeTier(
        spec(), primary.view, "NvmeTier", directory=str(tmp_path), capacity_bytes=1 << 20
    )
    manager = TieringOffloadingManager(first, [tier])
    request = ReqContext(req_id="r")
    keys = [make_offload_key(bytes([n]) * 8, 0) for n in range(CHUNKS)]
    try:
        manager.on_new_request(request)
        prepared = manager.prepare_store(keys, request)
        assert prepared is not None
        chunks = prepared.store_spec.chunk_ids.tolist()
        expected = primary.chunk(chunks[prepared.keys_to_store.index(keys[3])])
        manager.complete_store(keys, request, True)
        store_of(tier).drain()
        manager._process_finished_jobs()
        first.reset_cache()
        assert [tier.lookup(key, request) for key in keys] == [LookupResult.HIT] * CHUNKS
        primary.mapping[:] = bytes(CHUNK * CHUNKS)
        assert manager.lookup(keys[3], request) is LookupResult.HIT_PENDING
        manager.on_schedule_end(ScheduleEndContext((), ()))
        store_of(tier).drain()
        assert manager.lookup(keys[3], request) is LookupResult.HIT
        loaded = [primary.chunk(n) for n in range(CHUNKS) if any(primary.chunk(n))]
        assert loaded == [expected]
        manager.reset_cache()  # as of reset_prefix_cache(reset_connector=True)
        assert [tier.lookup(key, request) for key in keys] == [LookupResult.MISS] * CHUNKS
    finally:
        tier.shutdown()
        primary.close()


def test_vllm_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_tier.__dict__.pop("NvmeTier", None)
    monkeypatch.setitem(sys.modules, TIERING, None)
    with pytest.raises(BackendUnavailableError, match="vllm>="):
        _ = vllm_tier.NvmeTier
