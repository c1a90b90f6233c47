"""LMCache's L2 adapter on the drive: within LMCache, as `make serve-lmcache` installs it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from integrations import kv_weights

from nvmeio._kv_blocks import catalog
from nvmeio.errors import BackendUnavailableError
from nvmeio.integrations.lmcache import _keys

pytestmark = pytest.mark.filterwarnings("default")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
        from lmcache.v1.distributed.internal_api import L2AdapterListener
        from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

        LMCACHE = True
    except ImportError:
        LMCACHE = False
        L2AdapterListener = object

in_lmcache = pytest.mark.skipif(not LMCACHE, reason="lmcache is not installed: make serve-lmcache")
UNIT = 64 << 10
PATIENCE_S = 30


# Names, without LMCache


LETTERS = st.characters(exclude_categories=["Cs"])  # those that have an encoding


@given(
    st.tuples(
        st.binary(max_size=40),
        st.text(LETTERS, max_size=60),
        st.integers(0, 2**64 - 1),
        st.integers(0, 2**31),
        st.text(LETTERS, max_size=20),
    )
)
def test_a_name_leads_back_to_its_key(fields: tuple[Any, ...]) -> None:
    key = SimpleNamespace(**dict(zip(_keys.Fields._fields, fields, strict=True)))
    name = _keys.name_of(b"p" * _keys.PREFIX_BYTES, key)
    assert _keys.fields_of(name) == fields
    assert name.startswith(b"p" * _keys.PREFIX_BYTES)


def test_shapes_types_and_format_are_the_kind_of_an_object() -> None:
    def kind(shape: list[int], dtype: torch.dtype, fmt: str, several: bool = False) -> int:
        facts = SimpleNamespace(
            shape=torch.Size(shape),
            dtype=dtype,
            shapes=[torch.Size(shape)] * 2 if several else None,
            dtypes=[dtype] * 2 if several else None,
            fmt=SimpleNamespace(name=fmt),
        )
        return _keys.kind_of(SimpleNamespace(metadata=facts))

    same = kind([2, 4, 256, 64], torch.bfloat16, "KV_2LTD")
    assert same == kind([2, 4, 256, 64], torch.bfloat16, "KV_2LTD")
    others = [
        kind([2, 4, 64, 256], torch.bfloat16, "KV_2LTD"),
        kind([2, 4, 256, 64], torch.float16, "KV_2LTD"),
        kind([2, 4, 256, 64], torch.bfloat16, "KV_T2D"),
        kind([2, 4, 256, 64], torch.bfloat16, "KV_2LTD", several=True),
    ]
    assert len({same, *others}) == 5


@pytest.mark.skipif(LMCACHE, reason="lmcache is installed")
def test_without_lmcache_it_says_how_to_get_it() -> None:
    from nvmeio.integrations import lmcache

    with pytest.raises(BackendUnavailableError, match="pip install 'lmcache"):
        _ = lmcache.NvmeL2Adapter


# Within LMCache


class Listener(L2AdapterListener):  # type: ignore[misc, unused-ignore]
    """Notes what it is told, as LMCache's eviction policies do."""

    def __init__(self) -> None:
        self.there: dict[Any, int] = {}
        self.accessed: list[Any] = []
        self.deleted: list[Any] = []

    def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        self.there.update(zip(keys, sizes, strict=True))

    def on_l2_keys_accessed(self, keys: list[Any]) -> None:
        self.accessed += keys

    def on_l2_keys_deleted(self, keys: list[Any]) -> None:
        self.deleted += keys
        for key in keys:
            del self.there[key]


def opened(directory: Path, units: int = 32, **params: Any) -> Any:
    """An adapter as LMCache's server makes it."""
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class

    params = {"weights_id": "w", **params}
    params |= {"directory": str(directory), "capacity_bytes": units * UNIT}
    described = {
        "type": "plugin",
        "module_path": "nvmeio.integrations.lmcache",
        "class_name": "NvmeL2Adapter",
        "adapter_params": {name: value for name, value in params.items() if value is not None},
    }
    config = get_l2_adapter_config_class("plugin").from_dict(described)
    return create_l2_adapter(config, l1_memory_desc=None)


@contextlib.contextmanager
def adapter_in(directory: Path, units: int = 32, **params: Any) -> Iterator[Any]:
    adapter = opened(directory, units, **params)
    try:
        yield adapter
    finally:
        adapter.close()


def key(number: int, model: str = "m", group: int = 0, salt: str = "") -> Any:
    return ObjectKey(number.to_bytes(32, "big"), model, 7, group, salt)


def pattern(seed: int, nbytes: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), generator=made, dtype=torch.uint8)


def memory(data: torch.Tensor, dtype: Any = torch.bfloat16, fmt: str = "KV_2LTD") -> Any:
    facts = MemoryObjMetadata(
        shape=torch.Size([data.nbytes // dtype.itemsize]),
        dtype=dtype,
        address=0,
        phy_size=data.nbytes,
        fmt=MemoryFormat[fmt],
        ref_count=1,
    )
    return TensorMemoryObj(data, facts, parent_allocator=None)


def waited(fd: int, ask: Callable[[], Any]) -> Any:
    """The answer to a task, once its eventfd says that there are any."""
    while (answer := ask()) in (None, {}):
        ready, _, _ = select.select([fd], [], [], PATIENCE_S)
        assert ready, "no answer"
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(fd)
    return answer


def store(adapter: Any, keys: list[Any], blocks: list[torch.Tensor], **how: Any) -> bool:
    task = adapter.submit_store_task(keys, [memory(block, **how) for block in blocks])
    done = waited(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)
    assert done[task].bytes_transferred() in (0, sum(block.nbytes for block in blocks))
    return bool(done[task].is_successful())


def bits(bitmap: Any, keys: list[Any]) -> list[bool]:
    return [bool(bitmap.test(at)) for at in range(len(keys))]


def lookup(adapter: Any, keys: list[Any]) -> list[bool]:
    task = adapter.submit_lookup_and_lock_task(keys, {0: MemoryLayoutDesc([], [])})
    fd = adapter.get_lookup_and_lock_event_fd()
    return bits(waited(fd, lambda: adapter.query_lookup_and_lock_result(task)), keys)


def is_there(adapter: Any, keys: list[Any]) -> list[bool]:
    found = lookup(adapter, keys)
    adapter.submit_unlock(keys)
    return found


def load(adapter: Any, keys: list[Any], rooms: list[torch.Tensor], **how: Any) -> list[bool]:
    task = adapter.submit_load_task(keys, [memory(room, **how) for room in rooms])
    fd = adapter.get_load_event_fd()
    return bits(waited(fd, lambda: adapter.query_load_result(task)), keys)


def loaded(adapter: Any, number: int, nbytes: int = UNIT, **of: Any) -> bool:
    """Whether an object is there; it has the bytes that were stored."""
    room = torch.zeros(nbytes, dtype=torch.uint8)
    (found,) = load(adapter, [key(number, **of)], [room])
    assert not found or room.equal(pattern(number, nbytes))
    return found


def put(adapter: Any, *numbers: int, nbytes: int = UNIT, **of: Any) -> bool:
    keys = [key(number, **of) for number in numbers]
    return store(adapter, keys, [pattern(number, nbytes) for number in numbers])


def everything(adapter: Any, page: int = 3) -> dict[Any, int]:
    found: dict[Any, int] = {}
    token = None
    while True:
        listed = adapter.list_l2_keys(page_size=page, cursor=token)
        assert len(listed.entries) <= page
        found |= {entry.key.to_object_key(): entry.size_bytes for entry in listed.entries}
        token = listed.next_page_token
        if token is None:
            return found


@in_lmcache
def test_objects_of_several_groups_come_back_after_a_restart(tmp_path: Path) -> None:
    sizes = {0: UNIT, 1: 3 * UNIT, 2: UNIT // 2, 3: 5 * UNIT + 64}
    with adapter_in(tmp_path) as adapter:
        for group, nbytes in sizes.items():
            assert put(adapter, group, nbytes=nbytes, group=group, salt="tenant")
    with adapter_in(tmp_path) as adapter:
        for group, nbytes in sizes.items():
            assert is_there(adapter, [key(group, group=group, salt="tenant")]) == [True]
            assert loaded(adapter, group, nbytes, group=group, salt="tenant")
            assert not loaded(adapter, group, nbytes, group=group)
        assert sorted(everything(adapter).values()) == sorted(sizes.values())
        usage = adapter.get_usage()
        assert usage.total_bytes_used == sum(sizes.values())
        assert dict(usage.bytes_by_cache_salt) == {"tenant": sum(sizes.values())}


@in_lmcache
def test_memory_that_is_aligned_to_64_bytes_is_staged(tmp_path: Path) -> None:
    pool = torch.empty(8 * UNIT, dtype=torch.uint8)
    at = -pool.data_ptr() % 4096 + 64
    given, room = pool[at : at + 2 * UNIT], pool[at + 3 * UNIT : at + 5 * UNIT]
    given.copy_(pattern(1, 2 * UNIT))
    with adapter_in(tmp_path) as adapter:
        assert store(adapter, [key(1)], [given])
        assert load(adapter, [key(1)], [room]) == [True]
    assert room.equal(given)


@in_lmcache
def test_another_type_or_format_is_a_miss_and_is_replaced(tmp_path: Path) -> None:
    room = torch.zeros(UNIT, dtype=torch.uint8)
    with adapter_in(tmp_path) as adapter:
        assert put(adapter, 1)
        assert load(adapter, [key(1)], [room], dtype=torch.float8_e4m3fn) == [False]
        assert load(adapter, [key(1)], [room], fmt="KV_T2D") == [False]
        assert loaded(adapter, 1)
        assert store(adapter, [key(1)], [pattern(2, UNIT)], dtype=torch.float16)
        assert not loaded(adapter, 1)
        assert load(adapter, [key(1)], [room], dtype=torch.float16) == [True]
        assert room.equal(pattern(2, UNIT))
        assert everything(adapter) == {key(1): UNIT}
        assert adapter.get_usage().total_bytes_used == UNIT


@in_lmcache
@pytest.mark.parametrize(
    "other",
    [{"weights_id": "v2"}, {"settings": {"attention": "FLASHINFER"}}, {"seed": "1"}],
    ids=str,
)
def test_what_gives_bytes_another_meaning_is_part_of_the_name(
    other: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with adapter_in(tmp_path) as adapter:
        assert put(adapter, 1)
    if "seed" in other:
        monkeypatch.setenv("PYTHONHASHSEED", other.pop("seed"))
    with adapter_in(tmp_path, **other) as adapter:
        assert is_there(adapter, [key(1)]) == [False]
        assert not loaded(adapter, 1)
        assert everything(adapter) == {}
        assert adapter.get_usage().total_bytes_used == 0
        listener = Listener()
        adapter.register_listener(listener)
        assert put(adapter, *range(100, 131))
        assert put(adapter, *range(131, 140))  # the old one makes room, and nobody is told
        assert listener.there == everything(adapter)


@in_lmcache
@pytest.mark.parametrize("what", ["weights", "adapters"])
def test_weights_and_adapters_count_by_their_bytes(what: str, tmp_path: Path) -> None:
    model, trained = tmp_path / "model", tmp_path / "adapter"
    kv_weights.made(model)
    kv_weights.made(trained, seed=5)
    (trained / "adapter_config.json").write_text("{}")
    of = {"weights_id": None, "adapters": [str(trained)]}
    where = {"model": str(model)}
    with adapter_in(tmp_path, **of) as adapter:
        assert put(adapter, 1, **where)
        assert is_there(adapter, [key(1, **where)]) == [True]
    with adapter_in(tmp_path, **of) as adapter:
        assert loaded(adapter, 1, **where)
        assert everything(adapter) == {key(1, **where): UNIT}
    kv_weights.made(model if what == "weights" else trained, seed=9)
    with adapter_in(tmp_path, **of) as adapter:
        assert is_there(adapter, [key(1, **where)]) == [False]
        assert not loaded(adapter, 1, **where)


@in_lmcache
def test_objects_of_unknown_weights_do_not_outlive_the_process(tmp_path: Path, caplog: Any) -> None:
    with adapter_in(tmp_path, weights_id=None) as adapter:
        assert put(adapter, 1, model="a-name-of-no-files")
        assert loaded(adapter, 1, model="a-name-of-no-files")
    assert "of use to this process only" in caplog.text
    with adapter_in(tmp_path, weights_id=None) as adapter:
        assert not loaded(adapter, 1, model="a-name-of-no-files")


@in_lmcache
def test_an_object_stays_between_lookup_and_unlock(tmp_path: Path) -> None:
    listener = Listener()
    with adapter_in(tmp_path, units=8) as adapter:
        adapter.register_listener(listener)
        assert put(adapter, 1, 2)
        assert lookup(adapter, [key(1), key(50)]) == [True, False]
        for number in range(100, 130):
            assert put(adapter, number)
        assert is_there(adapter, [key(1), key(2)]) == [True, False]
        adapter.delete([key(1)])
        assert adapter.report_status()["locked_key_count"] == 1
        assert loaded(adapter, 1)
        adapter.submit_unlock([key(1), key(50), key(60)])
        assert adapter.report_status()["locked_key_count"] == 0
        adapter.delete([key(1)])
        assert is_there(adapter, [key(1)]) == [False]
        assert listener.there == everything(adapter)
        assert adapter.get_usage().total_bytes_used == sum(listener.there.values())
    adapter.submit_unlock([key(1)])  # may not fail


@in_lmcache
def test_a_pin_ends_with_its_process(tmp_path: Path) -> None:
    """Killed between lookup and load, a server leaves nothing that cannot make room."""
    program = textwrap.dedent(
        f"""
        import os, signal, sys
        from pathlib import Path
        sys.path[:0] = {sys.path!r}
        from integrations import test_servers_lmcache as t
        adapter = t.opened(Path({str(tmp_path)!r}), 8)
        assert t.put(adapter, *range(8)) and all(t.lookup(adapter, [t.key(n) for n in range(8)]))
        assert not t.put(adapter, 9)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program], timeout=120, capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    with adapter_in(tmp_path, units=8) as adapter:
        assert all(loaded(adapter, number) for number in range(8))
        assert put(adapter, *range(10, 18))


@in_lmcache
def test_what_is_told_is_what_is_there(tmp_path: Path) -> None:
    """Under evictions of objects of several sizes, while others store and delete."""
    listener = Listener()
    with adapter_in(tmp_path, units=24) as adapter:
        adapter.register_listener(listener)

        def work(first: int) -> None:
            for number in range(first, first + 40):
                task = adapter.submit_store_task(
                    [key(number)], [memory(pattern(number, UNIT * (1 + number % 4)))]
                )
                assert task >= 0
                if number % 5 == 0:
                    adapter.delete([key(number - 2)])

        threads = [threading.Thread(target=work, args=(first,)) for first in (10, 1000)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(PATIENCE_S)
        adapter._store.drain()
        assert listener.there == everything(adapter)
        assert listener.there
        usage = adapter.get_usage()
        assert usage.total_bytes_used == sum(listener.there.values())
        assert usage.total_capacity_bytes == 24 * UNIT
        late = Listener()
        adapter.register_listener(late)
        assert late.there == listener.there
    blocks = tmp_path / "nvmeio-blocks" / "lmcache.blocks"
    assert os.stat(blocks).st_size <= 24 * UNIT


@in_lmcache
def test_files_are_private_and_damage_is_a_miss(tmp_path: Path) -> None:
    with adapter_in(tmp_path) as adapter:
        assert put(adapter, 1, 2)
    files = list((tmp_path / "nvmeio-blocks").iterdir())
    assert {os.stat(file).st_mode & 0o777 for file in files} == {0o600}
    with (tmp_path / "nvmeio-blocks" / "lmcache.blocks").open("r+b") as file:
        file.seek(100)
        file.write(b"damaged")
    listener = Listener()
    with adapter_in(tmp_path) as adapter:
        adapter.register_listener(listener)
        assert sorted(loaded(adapter, number) for number in (1, 2)) == [False, True]
        assert len(listener.there) == len(everything(adapter)) == 1
        assert len(listener.accessed) == 1


@in_lmcache
def test_a_store_that_fails_is_never_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drive that is full, or fails: nothing is stored, and what is there is served."""
    from nvmeio._kv_blocks import transfers

    listener = Listener()
    with adapter_in(tmp_path) as adapter:
        adapter.register_listener(listener)
        assert put(adapter, 1)

        def fail(moved: Any, pieces: list[Any], writing: bool, note: Any) -> dict[int, Any]:
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return {piece.number: full for piece in pieces}

        with monkeypatch.context() as patch:
            patch.setattr(transfers.Transfers, "move", fail)
            assert not put(adapter, 2, 3)
        assert is_there(adapter, [key(2), key(3)]) == [False, False]
        assert listener.there == {key(1): UNIT} == everything(adapter)
        assert loaded(adapter, 1)
        assert put(adapter, 2)


@in_lmcache
def test_a_full_file_system_stores_what_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(catalog, "STEP_BYTES", 4 * UNIT)
    with adapter_in(tmp_path, units=64) as adapter:
        assert put(adapter, *range(4))
        monkeypatch.setattr(catalog, "free_bytes", lambda _: (0, 1 << 40))
        assert put(adapter, *range(4, 8))
        assert is_there(adapter, [key(number) for number in range(8)]).count(True) == 4
        assert all(loaded(adapter, number) for number in range(4, 8))
    assert "stays at 4 blocks" in caplog.text
    assert os.stat(tmp_path / "nvmeio-blocks" / "lmcache.blocks").st_size == 4 * UNIT


@in_lmcache
def test_a_task_that_cannot_be_begun_fails_and_never_raises(tmp_path: Path, caplog: Any) -> None:
    with adapter_in(tmp_path, units=8) as adapter:
        assert not put(adapter, 1, nbytes=9 * UNIT)
        assert not put(adapter, 1, model="m" * 600)
        on_device = SimpleNamespace(raw_data=torch.empty(8, device="meta"))
        task = adapter.submit_load_task([key(1)], [on_device])
        fd = adapter.get_load_event_fd()
        assert bits(waited(fd, lambda: adapter.query_load_result(task)), [key(1)]) == [False]
    assert "L1 memory of the host is needed" in caplog.text
    assert f"1 to {8 * UNIT} are possible" in caplog.text


@in_lmcache
def test_an_error_of_a_listener_harms_nothing(tmp_path: Path) -> None:
    class Failing(Listener):
        def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
            raise RuntimeError("no listener")

    with adapter_in(tmp_path) as adapter:
        adapter.register_listener(Failing())
        assert put(adapter, 1)
        assert loaded(adapter, 1)
        assert adapter.get_usage().total_bytes_used == UNIT


@in_lmcache
@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"directry": "/x"}, "unknown field 'directry'"),
        ({"directory": "/x"}, '"capacity_bytes" is missing'),
        ({"directory": "", "capacity_bytes": 1}, '"directory" must name'),
        ({"directory": "/x", "capacity_bytes": 1}, "capacity_bytes must be"),
        ({"directory": "/x", "capacity_bytes": "1GB", "settings": 3}, '"settings" must be'),
        ({"directory": "/x", "capacity_bytes": "1GB", "fingerprint": "no"}, "fingerprint"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(params: dict[str, Any], message: str) -> None:
    from nvmeio.integrations.lmcache import NvmeL2Adapter

    with pytest.raises(ValueError, match=message):
        NvmeL2Adapter(params)


@in_lmcache
def test_a_capacity_in_words_is_binary(tmp_path: Path) -> None:
    """As the documents say; it was read as safetensors' shards are, 7% smaller."""
    from nvmeio.integrations.lmcache import NvmeL2Adapter

    adapter = NvmeL2Adapter({"directory": str(tmp_path), "capacity_bytes": "4MB"})
    adapter.close()
    assert adapter.get_usage().total_capacity_bytes == 4 << 20


@in_lmcache
def test_cursors_of_others_are_refused(tmp_path: Path) -> None:
    with adapter_in(tmp_path) as adapter:
        with pytest.raises(ValueError, match="must be a number that this call returned"):
            adapter.list_l2_keys(cursor="-1")
        with pytest.raises(ValueError, match="page_size must be 1 or more"):
            adapter.list_l2_keys(page_size=0)
        assert put(adapter, 1, 2)
        assert adapter.list_l2_keys(model_name="other").entries == ()


@in_lmcache
def test_the_benchmark_of_lmcache_verifies_it(tmp_path: Path) -> None:
    described = {
        "type": "plugin",
        "module_path": "nvmeio.integrations.lmcache",
        "class_name": "NvmeL2Adapter",
        "adapter_params": {
            "directory": str(tmp_path),
            "capacity_bytes": "256MB",
            "weights_id": "b",
        },
    }
    command = [
        *(os.path.join(os.path.dirname(sys.executable), "lmcache"), "bench", "l2"),
        *("--l2-adapter", json.dumps(described), "--num-keys", "4", "--in-flight", "4"),
        *("--data-size-kb", "256", "--rounds", "2", "--no-skip-verify"),
        *("--lookup-max-hit-rate", "0.5"),
    ]
    done = subprocess.run(command, timeout=200, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "data verified OK" in done.stdout
    assert "mismatches" not in done.stdout
