"""SGLang's hierarchical cache on the drive: in SGLang's interface, or beside a double of it."""

from __future__ import annotations

import json
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from integrations import _sglang_stand_in, kv_weights
from interrupting import at_places, at_random_times
from support import thread

from nvmeio._kv_blocks import transfers
from nvmeio._threads.owner import OwnerThread
from nvmeio.errors import BackendUnavailableError, TransferError
from nvmeio.integrations import sglang_hicache
from nvmeio.integrations._serving import kv_identity

pytestmark = pytest.mark.filterwarnings("default")

MODULE = "sglang.srt.mem_cache.hicache_storage"
PAGE = 4  # tokens


CONTEXT = "sglang.srt.runtime_context"
HOOKS = "sglang.srt.plugins.hook_registry"


def double() -> ModuleType:
    """As sglang 0.5.23 has it, as far as nvmeio reaches into it."""
    module = ModuleType(MODULE)

    class HiCacheStorage:
        def register_mem_pool_host(self, pool: Any) -> None:
            self.mem_pool_host = pool

        def register_mem_host_pool_v2(self, pool: Any, name: str) -> None:
            if not hasattr(self, "registered_pools"):
                self.registered_pools: dict[str, Any] = {}
            self.registered_pools[name] = pool

    class PoolName(str, Enum):
        KV = "kv"
        MAMBA = "mamba"

        def __str__(self) -> str:
            return self.value

    class PoolHitPolicy(str, Enum):
        ALL_PAGES = "all_pages"
        TRAILING_PAGES = "trailing_pages"

    @dataclass
    class PoolTransfer:
        name: Any
        host_indices: Any = None
        keys: Any = None
        hit_policy: Any = PoolHitPolicy.ALL_PAGES

    @dataclass
    class PoolTransferResult:
        kv_hit_pages: int
        extra_pool_hit_pages: dict[Any, int]
        restorable_prefix_pages: Any = None

    for thing in (HiCacheStorage, PoolName, PoolHitPolicy, PoolTransfer, PoolTransferResult):
        setattr(module, thing.__name__, thing)
    return module


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """In these tests weights are written by the process that is the server."""
    monkeypatch.setattr(kv_identity, "_began", [])


@pytest.fixture
def interface(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """SGLang's own where it is installed."""
    sglang_hicache.__dict__.pop("NvmeHiCache", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            __import__(MODULE)
        except ImportError:
            monkeypatch.setitem(sys.modules, MODULE, double())
    yield sys.modules[MODULE]
    sglang_hicache.__dict__.pop("NvmeHiCache", None)


class Pool:
    """A host pool as SGLang's `MHATokenToKVPoolHost` with the layout layer_first."""

    layout = "layer_first"
    page_size = PAGE
    dtype = torch.bfloat16

    def __init__(self, width: int = 16, tokens: int = 256) -> None:
        self.kv_buffer = torch.zeros(2, 3, tokens, width, dtype=self.dtype)
        self.width = width

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        page = self.kv_buffer[:, :, index : index + PAGE]
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(2, 3, PAGE, self.width, dtype=self.dtype).flatten()

    def set_from_flat_data_page(self, index: int, page: torch.Tensor) -> None:
        self.kv_buffer[:, :, index : index + PAGE] = page.reshape(2, 3, PAGE, self.width)


def indices(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


@pytest.fixture
def opened(interface: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def open_(pool: Pool | None = None, **config: Any) -> Any:
        extra = {"directory": str(tmp_path), "capacity_bytes": "4MB", "interface_v1": 1}
        name = config.get("model_name", "m")
        extra |= config.pop("extra", {"weights_id": "w"} if name == "m" else {})
        standard = {
            **{"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0},
            **{"attn_cp_size": 1, "is_mla_model": False, "model_name": "m"},
            "extra_config": extra,
        }
        given = SimpleNamespace(**(standard | config))
        given.is_storage_writer = not given.is_mla_model or given.tp_rank == 0
        backend = sglang_hicache.NvmeHiCache(given, {})
        assert isinstance(backend, interface.HiCacheStorage)
        backend.register_mem_pool_host(pool or Pool())
        made.append(backend)
        return backend

    yield open_
    for backend in made:
        backend.close()


def filled(seed: int = 0, **options: Any) -> Pool:
    pool = Pool(**options)
    pool.kv_buffer.copy_(
        torch.randn(pool.kv_buffer.shape, generator=torch.Generator().manual_seed(seed))
    )
    return pool


def test_pages_come_back_after_a_restart(
    opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = filled()
    monkeypatch.setattr(sglang_hicache, "STAGING_BYTES", 2 * 768)  # two pages a part
    backend = opened(pool)
    assert backend.batch_set_v1(list("abcde"), indices(3, 1, 0, 7, 9)) == [True] * 5
    assert backend.batch_exists(list("abxd")) == 2
    assert backend.exists("e")
    backend.close()
    other = Pool()
    backend = opened(other)
    found = backend.batch_get_v1(list("eaxcdb"), indices(0, 1, 2, 3, 4, 5))
    assert found == [True, True, False, True, True, True]
    for page, source in ((0, 9), (1, 3), (3, 0), (4, 7), (5, 1)):
        assert other.get_data_page(page * PAGE).equal(pool.get_data_page(source * PAGE))
    assert not other.get_data_page(2 * PAGE).any()


class PageFirst(Pool):
    """With the layout page_first: a page is memory of the pool, whole."""

    layout = "page_first"

    def __init__(self) -> None:
        self.kv_buffer = torch.zeros(256, 2, 3, 16, dtype=self.dtype)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        page = self.kv_buffer[index : index + PAGE]
        return page.flatten() if flat else page

    def set_from_flat_data_page(self, index: int, page: torch.Tensor) -> None:
        raise AssertionError("it was read into the pool already")


def test_pages_that_lie_whole_in_the_pool_are_read_into_it(
    opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    none = SimpleNamespace(empty_aligned=lambda *_, **__: pytest.fail("by way of more memory"))
    monkeypatch.setattr(sglang_hicache, "buffers", none)
    pool, other = PageFirst(), PageFirst()
    pool.kv_buffer.normal_()
    backend = opened(pool)
    assert backend.batch_set_v1(list("abc"), indices(3, 1, 7)) == [True] * 3
    backend.close()
    backend = opened(other)
    assert backend.batch_get_v1(list("cxba"), indices(0, 1, 2, 4)) == [True, False, True, True]
    for page, source in ((0, 7), (2, 1), (4, 3)):
        assert other.get_data_page(page * PAGE).equal(pool.get_data_page(source * PAGE))
    assert not other.get_data_page(PAGE).any()


@pytest.mark.parametrize("kind", [Pool, PageFirst])
def test_sglangs_metrics_have_each_transfer(
    kind: type[Pool], opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that were there already are not counted as stored."""
    module = ModuleType("sglang.srt.observability.metrics_collector")

    @dataclass
    class StorageMetrics:
        prefetch_pgs: list[int] = field(default_factory=list)
        backup_pgs: list[int] = field(default_factory=list)
        prefetch_bandwidth: list[float] = field(default_factory=list)
        backup_bandwidth: list[float] = field(default_factory=list)

    module.StorageMetrics = StorageMetrics  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sglang_hicache, "STAGING_BYTES", 2 * 768)  # two pages a part
    backend = opened(kind())
    backend.batch_set_v1(["a", "b"], indices(0, 1))
    backend.batch_set_v1(["a", "b", "c"], indices(0, 1, 2))
    backend.batch_get_v1(["a", "x", "b", "c"], indices(0, 1, 2, 3))
    stats = backend.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([2, 1], [3])
    rates = [*stats.backup_bandwidth, *stats.prefetch_bandwidth]
    assert len(rates) == 3
    assert all(0 < rate < 100 for rate in rates)  # GB/s
    assert backend.get_stats() == StorageMetrics()


def test_memory_that_pages_share_is_not_taken_for_the_pool(opened: Callable[..., Any]) -> None:
    """One that gathers every page into the same room gives the same address again, too."""

    class Gathers(Pool):
        room = torch.empty(0)

        def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
            page = super().get_data_page(index, flat)
            if self.room.shape != page.shape:
                self.room = page.clone()
            return self.room.copy_(page)

    pool = Gathers()
    pool.kv_buffer.copy_(filled().kv_buffer)
    backend = opened(pool)
    assert backend.batch_set_v1(["a"], indices(3)) == [True]
    assert backend.batch_get_v1(["a"], indices(9)) == [True]
    assert pool.get_data_page(9 * PAGE).equal(filled().get_data_page(3 * PAGE))


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="reads 3.11's exception tables")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("interrupts", [at_places, at_random_times])
@pytest.mark.parametrize("version", ["", "_v1", "_v2"])
def test_an_interrupted_batch_can_be_asked_for_again(
    version: str,
    interrupts: Any,
    opened: Callable[..., Any],
    interface: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = filled()
    monkeypatch.setattr(sglang_hicache, "STAGING_BYTES", 768)  # a page a part
    backend = opened(pool)
    backend.register_mem_host_pool_v2(pool, interface.PoolName.KV)
    keys, from_, to = list("abc"), indices(3, 1, 0), indices(9, 7, 5)
    expected = [pool.get_data_page(page * PAGE).clone() for page in (3, 1, 0)]

    def transfer(where: torch.Tensor) -> list[Any]:
        return [interface.PoolTransfer(name=interface.PoolName.KV, host_indices=where, keys=keys)]

    def store() -> Any:
        if version == "_v2":
            return backend.batch_set_v2(transfer(from_))[interface.PoolName.KV] == [True] * 3
        if version == "_v1":
            return backend.batch_set_v1(keys, from_) == [True] * 3
        return backend.batch_set(keys, expected)

    def load() -> list[torch.Tensor]:
        pool.kv_buffer[:, :, 5 * PAGE : 10 * PAGE] = 0
        if version == "":
            return backend.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys])
        if version == "_v2":
            found = backend.batch_get_v2(transfer(to))[interface.PoolName.KV]
        else:
            found = backend.batch_get_v1(keys, to)
        assert found == [True] * 3
        return [pool.get_data_page(page * PAGE) for page in (9, 7, 5)]

    def work() -> None:
        backend.clear()
        store()
        load()

    work()
    for where in interrupts(work, 60):
        assert store(), where
        assert backend.batch_exists(keys) == 3, where
        assert all(a.equal(b) for a, b in zip(load(), expected, strict=True)), where


def test_what_a_read_that_failed_left_behind_touches_no_other_read(
    opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next part was still to be read, into the memory that the next read used as well: a page
    got the bytes of another."""

    class Hooked(Pool):
        def __init__(self) -> None:
            super().__init__()
            self.hooks: list[Callable[[], object]] = []

        def set_from_flat_data_page(self, index: int, page: torch.Tensor) -> None:
            if self.hooks:
                self.hooks.pop(0)()
            super().set_from_flat_data_page(index, page)

    monkeypatch.setattr(sglang_hicache, "STAGING_BYTES", 768)  # a page a part
    owners: dict[str, OwnerThread] = {}

    class Noted(OwnerThread):
        def __init__(self, name: str, closed: str) -> None:
            super().__init__(name, closed)
            owners[name] = self

    monkeypatch.setattr(transfers, "OwnerThread", Noted)
    pool = Hooked()
    pool.kv_buffer.copy_(filled().kv_buffer)
    expected = pool.get_data_page(3 * PAGE).clone()
    backend = opened(pool)
    assert backend.batch_set_v1(list("abcd"), indices(0, 1, 2, 3)) == [True] * 4
    loads = owners["nvmeio-blocks-loads"]
    gate = threading.Event()

    def fail() -> None:
        raise ZeroDivisionError

    def let_go() -> None:
        gate.set()
        loads.call(int)  # behind what the first read left

    pool.hooks = [lambda: loads.post(gate.wait), fail, let_go]

    def read_twice() -> list[bool]:
        with pytest.raises(ZeroDivisionError):
            backend.batch_get_v1(list("abc"), indices(10, 11, 12))
        found: list[bool] = backend.batch_get_v1(["d"], indices(13))
        return found

    try:
        with thread(read_twice) as values:
            pass
    finally:
        gate.set()
    assert values == [[True]]
    assert pool.get_data_page(13 * PAGE).equal(expected)


def test_a_backend_that_is_closed_while_it_reads_ends_the_read(
    opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's prefetching thread waited for an answer that nobody gave."""
    monkeypatch.setattr(sglang_hicache, "STAGING_BYTES", 768)
    backend = opened(filled())
    keys = list("abcdef")
    backend.batch_set_v1(keys, indices(*range(6)))
    copy, copied = backend.mem_pool_host.set_from_flat_data_page, []

    def close_meanwhile(index: int, page: torch.Tensor) -> None:
        copy(index, page)
        copied.append(index)
        backend.close()

    monkeypatch.setattr(backend.mem_pool_host, "set_from_flat_data_page", close_meanwhile)
    assert backend.batch_get_v1(keys, indices(*range(10, 16))) == [True, *[False] * 5]
    assert copied == [10 * PAGE]
    assert backend.batch_set_v1(keys, indices(*range(6))) == [False] * 6


def test_a_page_at_a_time(opened: Callable[..., Any]) -> None:
    """Interface 0, which SGLang takes without "interface_v1"."""
    pool = filled()
    backend = opened(pool)
    assert backend.batch_set(["a", "b"], [pool.get_data_page(0), pool.get_data_page(PAGE)])
    assert backend.set("c", pool.get_data_page(2 * PAGE))
    rooms = [pool.get_dummy_flat_data_page() for _ in range(3)]
    given = backend.batch_get(["b", "x", "c"], rooms)
    assert given[0] is rooms[0]
    assert given[0].equal(pool.get_data_page(PAGE))
    assert given[1] is None
    assert given[2].equal(pool.get_data_page(2 * PAGE))
    assert backend.get("x", rooms[0]) is None


def test_pages_of_several_pools(opened: Callable[..., Any], interface: Any) -> None:
    kv, state = filled(), filled(1, width=8)
    backend = opened(kv)
    backend.register_mem_host_pool_v2(state, interface.PoolName.MAMBA)
    transfer = interface.PoolTransfer
    mamba, policy = interface.PoolName.MAMBA, interface.PoolHitPolicy.TRAILING_PAGES
    assert backend.batch_set_v1(list("abcd"), indices(0, 1, 2, 3)) == [True] * 4
    stored = backend.batch_set_v2(
        [transfer(name=mamba, host_indices=indices(1, 3), keys=["b", "d"])]
    )
    assert stored == {mamba: [True, True]}
    every = backend.batch_exists_v2(list("abcd"), [transfer(name=mamba)])
    assert (every.kv_hit_pages, every.restorable_prefix_pages) == (0, [])
    last = backend.batch_exists_v2(list("abcx"), [transfer(name=mamba, hit_policy=policy)])
    assert (last.kv_hit_pages, last.restorable_prefix_pages) == (2, [2])
    assert last.extra_pool_hit_pages == {interface.PoolName.KV: 3, mamba: 2}
    state.kv_buffer[:, :, 4 : 4 + PAGE] = 0
    expected = filled(1, width=8).get_data_page(PAGE)
    found = backend.batch_get_v2(
        [transfer(name=mamba, host_indices=indices(1, 2), keys=["b", "c"])]
    )
    assert found == {mamba: [True, False]}
    assert state.get_data_page(PAGE).equal(expected)


def test_as_sglangs_own_file_backend_answers(
    opened: Callable[..., Any], interface: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(interface, "HiCacheFile"):
        pytest.skip("sglang is not installed: make serve-sglang")
    pool = filled()
    config = interface.HiCacheStorageConfig(
        **{"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0},
        **{"attn_cp_size": 1, "is_mla_model": False, "model_name": "m"},
        **{"enable_storage_metrics": False, "is_page_first_layout": False},
        extra_config={"directory": str(tmp_path), "capacity_bytes": "4MB", "weights_id": "w"},
    )
    peers = [
        interface.HiCacheFile(config, file_path=str(tmp_path / "file")),
        sglang_hicache.NvmeHiCache(config, {}),
    ]
    said = []
    for backend in peers:
        backend.register_mem_pool_host(pool)
        backend.register_mem_host_pool_v2(pool, interface.PoolName.KV)
        backend.register_mem_host_pool_v2(pool, interface.PoolName.MAMBA)
        kv = interface.PoolTransfer(
            name=interface.PoolName.KV, host_indices=indices(0, 1, 2), keys=list("abc")
        )
        mamba = interface.PoolTransfer(
            name=interface.PoolName.MAMBA,
            host_indices=indices(1),
            keys=["b"],
            hit_policy=interface.PoolHitPolicy.TRAILING_PAGES,
        )
        said.append(
            [
                backend.batch_set_v2([kv, mamba]),
                backend.batch_exists_v2(list("abcd"), [mamba]),
                backend.batch_get_v2([kv, mamba]),
                backend.batch_exists(list("abd")),
            ]
        )
    peers[1].close()
    assert said[0] == said[1]


def test_indices_that_do_not_fit_move_nothing(opened: Callable[..., Any]) -> None:
    backend = opened()
    assert backend.batch_set_v1(["a", "b"], indices(0)) == [False, False]
    assert backend.batch_get_v1(["a"], indices(0, 1)) == [False]
    assert backend.batch_exists(["a"]) == 0


def test_each_rank_has_its_own_pages(opened: Callable[..., Any]) -> None:
    first, second = (opened(filled(rank), tp_rank=rank, tp_size=2) for rank in (0, 1))
    assert first.batch_set_v1(["a"], indices(0)) == [True]
    assert second.batch_exists(["a"]) == 0
    assert second.batch_set_v1(["a"], indices(0)) == [True]
    for rank, backend in enumerate((first, second)):
        assert backend.batch_get_v1(["a"], indices(5)) == [True]
        pool = backend.mem_pool_host
        assert pool.get_data_page(5 * PAGE).equal(filled(rank).get_data_page(0))


def test_with_mla_one_rank_writes_for_all(opened: Callable[..., Any]) -> None:
    first, second = (
        opened(filled(rank), tp_rank=rank, tp_size=2, is_mla_model=True) for rank in (0, 1)
    )
    assert second.batch_exists(["a"]) == 0  # before there is a store
    assert second.batch_set_v1(["a"], indices(0)) == [False]
    assert first.batch_set_v1(["a"], indices(0)) == [True]
    assert second.batch_set_v1(["a"], indices(0)) == [True]
    assert second.batch_get_v1(["a"], indices(5)) == [True]
    assert second.mem_pool_host.get_data_page(5 * PAGE).equal(filled(0).get_data_page(0))
    assert second.clear()
    assert first.batch_exists(["a"]) == 1


def test_another_model_finds_nothing(opened: Callable[..., Any]) -> None:
    opened(filled()).batch_set_v1(["a"], indices(0))
    assert opened(model_name="other").batch_exists(["a"]) == 0
    assert opened(filled(width=8)).batch_exists(["a"]) == 0


def restarted(opened: Callable[..., Any], model: Path, fingerprint: str = "auto") -> Any:
    """A server of these weights."""
    return opened(filled(), model_name=str(model), extra={"fingerprint": fingerprint})


@pytest.mark.parametrize("fingerprint", ["full", "samples"])
@pytest.mark.parametrize("change", kv_weights.CHANGES)
def test_pages_of_other_weights_at_the_same_path_are_not_found(
    change: str,
    fingerprint: str,
    opened: Callable[..., Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A restart after fine-tuning in place served stale tokens, without a warning."""
    model = kv_weights.made(tmp_path / "model")
    backend = restarted(opened, model, fingerprint)
    assert backend.batch_set_v1(["a", "b"], indices(0, 1)) == [True, True]
    backend.close()
    backend = restarted(opened, model, fingerprint)
    assert backend.batch_exists(["a", "b"]) == 2
    backend.close()
    caplog.clear()
    kv_weights.change(model, change)
    backend = restarted(opened, model, fingerprint)
    assert backend.batch_get_v1(["a", "b"], indices(4, 5)) == [False, False]
    assert ["2 blocks were stored with other weights" in each for each in caplog.messages] == [True]


def test_pages_of_weights_that_nobody_can_tell_end_with_the_process(
    opened: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    backend = opened(filled(), model_name="unknown")
    assert backend.batch_set_v1(["a"], indices(0)) == [True]
    assert backend.exists("a")
    backend.close()
    assert "there are no files of unknown here" in caplog.text
    assert not opened(filled(), model_name="unknown").exists("a")


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What SGLang's process has of its own, beside its storage interface."""
    if "sglang.srt.managers.cache_controller" in sys.modules:
        pytest.skip("with SGLang itself, an engine is asked: test_servers_sglang_real.py")
    classes: dict[str, Any] = {}
    for target in sglang_hicache.TARGETS:
        module, kind, method = target.rsplit(".", 2)
        made = classes.setdefault(kind, type(kind, (), {}))
        setattr(made, method, lambda self, *_: True)
        for parent in [module[:n] for n, letter in enumerate(module) if letter == "."] + [module]:
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
            above, _, name = parent.rpartition(".")
            if above:
                monkeypatch.setattr(sys.modules[above], name, sys.modules[parent], raising=False)
        monkeypatch.setattr(sys.modules[module], kind, made, raising=False)
    hooks: Any = ModuleType(HOOKS)
    hooks.HookRegistry, hooks.HookType = _sglang_stand_in.HookRegistry, _sglang_stand_in.HookType
    monkeypatch.setattr(hooks.HookRegistry, "hooks", {}, raising=False)
    monkeypatch.setitem(sys.modules, HOOKS, hooks)
    context: Any = ModuleType(CONTEXT)
    context.args = None
    context.get_server_args = lambda: context.args
    context.get_parallel = lambda: SimpleNamespace(dp_rank=None)
    monkeypatch.setitem(sys.modules, CONTEXT, context)
    monkeypatch.setattr(sglang_hicache, "_hooked", [])
    return classes | {"context": context}


@pytest.mark.parametrize("target", sglang_hicache.TARGETS)
def test_what_changes_weights_in_memory_reaches_the_pages(
    target: str, sglang: dict[str, Any], opened: Callable[..., Any], tmp_path: Path
) -> None:
    """After an update of weights, and a flush, pages of those before were found on the drive."""
    model = kv_weights.made(tmp_path / "model")
    backend = restarted(opened, model)
    assert backend.batch_set_v1(["a", "b"], indices(0, 1)) == [True, True]
    _, kind, method = target.rsplit(".", 2)
    assert getattr(sglang[kind](), method)("anything") is not None  # as without a hook
    assert backend.batch_exists(["a"]) == 0
    assert backend.batch_set_v1(["a"], indices(2)) == [True]
    assert backend.batch_exists(["a", "b"]) == 1
    backend.close()
    assert restarted(opened, model).batch_exists(["a", "b"]) == 2  # of the files' weights


def test_with_mla_a_flush_reaches_those_that_read(opened: Callable[..., Any]) -> None:
    first, second = (
        opened(filled(rank), tp_rank=rank, tp_size=2, is_mla_model=True) for rank in (0, 1)
    )
    first.batch_set_v1(["a"], indices(0))
    assert second.exists("a")
    for backend in (first, second):
        backend.new_generation()
        assert not backend.exists("a")
    first.batch_set_v1(["b"], indices(0))
    assert [second.exists("a"), second.exists("b")] == [False, True]


def test_an_sglang_without_hooks_is_told_of_once(
    opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sglang_hicache, "_hooked", [])
    monkeypatch.setitem(sys.modules, HOOKS, None)
    for _ in range(2):
        opened()
    (said,) = caplog.messages
    assert "does not say when weights change in memory" in said


def test_what_sglang_serves_counts(
    sglang: dict[str, Any], opened: Callable[..., Any], tmp_path: Path
) -> None:
    """Its arguments say where the weights are: backends are told the name that clients use."""
    model, context = kv_weights.made(tmp_path / "model"), sglang["context"]

    def served(**options: Any) -> Any:
        context.args = SimpleNamespace(model_path=str(model), load_format="auto", **options)
        return opened(filled(), model_name="served", extra={})

    backend = served(quantization=None)
    backend.batch_set_v1(["a"], indices(0))
    backend.close()
    for quantization, expected in (("fp8", False), (None, True)):
        backend = served(quantization=quantization)
        assert backend.exists("a") is expected
        backend.close()
    kv_weights.change(model, "one element")
    assert not served(quantization=None).exists("a")


# One setting that gives the bytes of a page their meaning, and another value: of SGLang's
# description of its storage, of a host pool, of the pool of the device, of the server's arguments.
OF_THE_STORAGE: dict[str, Any] = {
    **{"tp_rank": 1, "tp_size": 2, "pp_rank": 1, "pp_size": 2, "attn_cp_rank": 1},
    **{"attn_cp_size": 2, "dcp_rank": 1, "dcp_size": 2, "dp_rank": 1, "is_mla_model": True},
    **{"tp_lcm_size": 4, "should_split_heads": True, "logical_page_size": 8},
}
OF_THE_POOL: dict[str, Any] = {
    **{"layout": "page_first", "dtype": torch.float16, "layer_num": 6, "start_layer": 3},
    **{"head_num": 2, "head_dim": 32, "v_head_dim": 8, "head_group_num": 2, "kv_lora_rank": 16},
    **{"qk_rope_head_dim": 4, "kv_cache_dim": 20, "size_per_token": 7},
    **{"conv_state_shapes": [(4, 2)], "temporal_state_shape": (2, 4)},
}
OF_THE_SERVER: dict[str, Any] = {
    **{"dtype": "float16", "kv_cache_dtype": "fp8_e5m2", "quantization": "fp8"},
    **{"attention_backend": "trtllm_mha", "prefill_attention_backend": "fa4"},
    **{"mamba_ssm_dtype": "float32", "mm_process_config": {"image": {"max_pixels": 7}}},
    "json_model_override_args": '{"rope_theta": 1e6}',
}


@pytest.mark.parametrize(
    "setting",
    [
        *(f"storage: {name}" for name in OF_THE_STORAGE),
        *(f"pool: {name}" for name in OF_THE_POOL),
        *(f"server: {name}" for name in OF_THE_SERVER),
        *("pool: its kind", "pool: the device's dtype", "pool: page_size"),
        *("SGLang's version", "nvmeio's format", "the processor of images"),
    ],
)
def test_pages_of_another_meaning_are_not_found(
    setting: str,
    sglang: dict[str, Any],
    opened: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pages of as many bytes were found though their heads, layers or data types were others."""
    model = kv_weights.made(tmp_path / "model")
    processor = model / "preprocessor_config.json"
    version: Any = ModuleType("sglang.version")
    monkeypatch.setitem(sys.modules, "sglang.version", version)

    def served(what: str) -> Any:
        where, _, name = what.partition(": ")
        version.__version__ = "2" if what == "SGLang's version" else "1"
        processor.write_text(
            json.dumps({"size": 448 if what == "the processor of images" else 224})
        )
        kind = type("Other", (Pool,), {}) if what == "pool: its kind" else Pool
        pool = kind()
        pool.device_pool = SimpleNamespace(dtype=torch.bfloat16)
        if what == "pool: the device's dtype":
            pool.device_pool.dtype = torch.float16
        elif what == "pool: page_size":  # of as many bytes
            pool.page_size = 2 * PAGE
        elif where == "pool" and name in OF_THE_POOL:
            setattr(pool, name, OF_THE_POOL[name])
        given = {name: OF_THE_SERVER[name]} if where == "server" else {}
        sglang["context"].args = SimpleNamespace(
            **{"model_path": str(model), "load_format": "auto"}, **given
        )
        config = {name: OF_THE_STORAGE[name]} if where == "storage" else {}
        number = kv_identity.FORMAT + (what == "nvmeio's format")
        with monkeypatch.context() as other:
            other.setattr(kv_identity, "FORMAT", number)
            backend = opened(pool, model_name="served", extra={}, **config)
            backend.mem_pool_host = pool
            backend._store("kv")
        return backend

    backend = served("")
    assert backend.batch_set_v1(["a"], indices(0)) == [True]
    backend.close()
    backend = served(setting)
    assert not backend.exists("a")
    backend.close()
    backend = served("")
    assert backend.exists("a")
    backend.close()


@pytest.mark.parametrize("form", ["reference", "name=path", "path", "dictionary", "names", "UNO"])
def test_adapters_of_the_server_count_by_their_bytes(
    form: str, sglang: dict[str, Any], opened: Callable[..., Any], tmp_path: Path
) -> None:
    """SGLang names an adapter by its name and path: pages were found after it was trained on."""
    model, adapter = kv_weights.made(tmp_path / "model"), kv_weights.adapter(tmp_path / "a=b")
    lora_paths: dict[str, Any] = {
        "reference": [SimpleNamespace(lora_name="a", lora_path=str(adapter))],
        "name=path": [f"a={adapter}"],
        "path": [str(kv_weights.adapter(tmp_path / "b"))],
        "dictionary": [{"lora_name": "a", "lora_path": str(adapter)}],
        "names": {"a": str(adapter)},
        "UNO": [],
    }
    if form == "path":
        adapter = tmp_path / "b"

    def served(**extra: Any) -> Any:
        sglang["context"].args = SimpleNamespace(
            **{"model_path": str(model), "load_format": "auto", "enable_lora": True},
            lora_paths=lora_paths[form],
            uno_lora_path=str(adapter) if form == "UNO" else None,
        )
        return opened(filled(), model_name="served", extra=extra)

    def found_and_stored(**extra: Any) -> bool:
        backend = served(**extra)
        found: bool = backend.exists("a")
        assert backend.batch_set_v1(["a"], indices(0)) == [True]
        backend.close()
        return found

    assert [found_and_stored(), found_and_stored()] == [False, True]
    for change in kv_weights.ADAPTER_CHANGES:
        change(adapter)
        assert [found_and_stored(), found_and_stored()] == [False, True], change
    # A name of the user's own is for adapters as well, but for those that the user lists.
    assert [found_and_stored(weights_id="1"), found_and_stored(weights_id="1")] == [False, True]
    listed = {"weights_id": "1", "adapters": [str(adapter)]}
    assert [found_and_stored(**listed), found_and_stored(**listed)] == [False, True]
    kv_weights.train(adapter)
    assert found_and_stored(weights_id="1")
    assert not found_and_stored(**listed)


def started(opened: Callable[..., Any], **config: Any) -> Any:
    """As SGLang attaches a backend."""
    backend = opened(filled(), **config)
    backend.on_host_pools_registered()
    return backend


def test_what_cannot_work_is_refused_at_the_start(
    opened: Callable[..., Any], tmp_path: Path
) -> None:
    """A second engine started, stored nothing, and logged a traceback at its first page."""
    first = started(opened)
    assert list((tmp_path / "nvmeio-blocks").glob("*.table"))
    with pytest.raises(TransferError, match="end it, or take another directory"):
        started(opened)
    with pytest.raises(ValueError, match=r"capacity_bytes must be \d+ or more, for one block"):
        started(opened, extra={"weights_id": "w", "capacity_bytes": 10})
    assert first.batch_set_v1(["a"], indices(0)) == [True]


def test_each_replica_has_a_store(opened: Callable[..., Any], sglang: dict[str, Any]) -> None:
    """With --dp-size all but one lost the tier."""
    for replica in (0, 1, 2):
        context = sglang["context"]
        context.get_parallel = lambda replica=replica: SimpleNamespace(dp_rank=replica)
        backend = started(opened)
        assert not backend.exists("a")
        assert backend.batch_set_v1(["a"], indices(replica)) == [True]


def test_of_a_prompt_the_last_pages_make_room_first(opened: Callable[..., Any]) -> None:
    extra = {"weights_id": "w", "capacity_bytes": 10 * 4096}
    backend = opened(filled(), extra=extra)
    assert backend.batch_set_v1(list("abcd"), indices(*range(4))) == [True] * 4
    after = SimpleNamespace(prefix_keys=list("abcd"))
    assert backend.batch_set_v1(list("efgh"), indices(*range(4, 8)), after) == [True] * 4
    assert backend.batch_set_v1(list("wxyz"), indices(*range(8, 12))) == [True] * 4
    assert backend.batch_exists(list("abcdefgh")) == 6


def test_clear_forgets(opened: Callable[..., Any]) -> None:
    backend = opened(filled())
    backend.batch_set_v1(["a"], indices(0))
    assert backend.clear()
    assert not backend.exists("a")
    backend.close()
    assert backend.batch_exists(["a"]) == 0
    assert backend.batch_get_v1(["a"], indices(0)) == [False]


def test_missing_settings_are_named(opened: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="lacks directory and capacity_bytes"):
        opened(extra_config={"backend_name": "nvmeio"})
    with pytest.raises(ValueError, match="capacity_bytes: 'much' is not a size"):
        opened(extra_config={"directory": "/tmp", "capacity_bytes": "much"})


def test_sglang_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    sglang_hicache.__dict__.pop("NvmeHiCache", None)
    monkeypatch.setitem(sys.modules, MODULE, None)
    with pytest.raises(BackendUnavailableError, match="sglang>="):
        _ = sglang_hicache.NvmeHiCache
    with pytest.raises(AttributeError, match="NvmeOther"):
        _ = sglang_hicache.NvmeOther
