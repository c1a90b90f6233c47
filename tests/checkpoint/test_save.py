"""`nvmeio.save`: every kind of object, in a file that everybody else reads."""

from __future__ import annotations

import asyncio
import io
import math
import os
import pickle
import stat
import tempfile
import threading
import warnings
import zipfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from checkpoint._objects import (
    SAFE,
    SAVED_DTYPES,
    UNSAFE,
    assert_same,
    assert_tied,
    dtype_id,
    noise,
    of_dtype,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from support import HeldEngine, on_every_loop, run_python, until

import nvmeio
from nvmeio._formats.torch_archives import torch_layout, torch_pickler
from nvmeio._io.long_call import LongCall
from nvmeio._storage import crc32
from nvmeio._threads.interruptible import Cancelled
from nvmeio.checkpoint import saving as saving_module


def names_in(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def torch_load(path: Path, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated and experimental kinds of tensors
        return torch.load(path, **options)


# What stock torch reads


@pytest.mark.parametrize("kind", SAFE)
def test_stock_torch_reads_it(kind: str, path: Path) -> None:
    wanted = SAFE[kind]()
    nvmeio.save(wanted, path)
    assert_same(torch_load(path, weights_only=True), wanted)
    assert_same(torch_load(path, weights_only=True, mmap=True, map_location="cpu"), wanted)
    assert zipfile.ZipFile(path).testzip() is None
    assert names_in(path.parent) == [path.name]


@pytest.mark.parametrize("kind", UNSAFE)
def test_stock_torch_reads_what_takes_trust(kind: str, path: Path) -> None:
    wanted = UNSAFE[kind]()
    nvmeio.save(wanted, path)
    assert_same(torch_load(path, weights_only=False), wanted)
    assert zipfile.ZipFile(path).testzip() is None


@pytest.mark.parametrize("dtype", SAVED_DTYPES, ids=dtype_id)
def test_every_dtype(dtype: torch.dtype, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = of_dtype(dtype)
        nvmeio.save(wanted, path)
        assert_same(torch_load(path), wanted)
        assert_same(nvmeio.load(path), wanted)


def test_what_was_tied_is_tied_and_written_once(path: Path) -> None:
    wanted = SAFE["tied"]()
    nvmeio.save(wanted, path)
    assert_tied(torch_load(path))
    distinct = {t.untyped_storage().data_ptr() for t in wanted.values() if torch.is_tensor(t)}
    records = [i for i in zipfile.ZipFile(path).infolist() if "/data/" in i.filename]
    assert len(records) == len(distinct)


@given(data=st.data())
@settings(max_examples=25)
def test_any_sizes_come_back(data: st.DataObject, tmp_path: Path) -> None:
    sizes = data.draw(
        st.lists(
            st.one_of(
                st.integers(0, 70),
                st.integers(0, 20_000),
                st.integers((1 << 20) - 5000, (1 << 20) + 9000),
                st.just(5 << 20),
            ),
            max_size=12,
        )
    )
    wanted = [noise(size, dtype=torch.uint8, seed=i) for i, size in enumerate(sizes)]
    nvmeio.save(wanted, tmp_path / "any.pt")
    assert_same(torch_load(tmp_path / "any.pt"), wanted)
    assert zipfile.ZipFile(tmp_path / "any.pt").testzip() is None


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_pickle_protocol(protocol: int, path: Path) -> None:
    wanted = {"a": noise(1000), "holder": UNSAFE["user's classes"]()}
    nvmeio.save(wanted, path, pickle_protocol=protocol)
    assert_same(torch_load(path, weights_only=False), wanted)


def test_a_pickle_module_of_the_users(path: Path) -> None:
    class Tagging:
        __name__ = "tagging"
        load, loads, Unpickler = pickle.load, pickle.loads, pickle.Unpickler
        seen: ClassVar[list[type]] = []

        class Pickler(pickle.Pickler):
            def reducer_override(self, obj: Any) -> Any:
                Tagging.seen.append(type(obj))
                return NotImplemented

    nvmeio.save({"a": noise(10)}, path, Tagging())
    assert torch.Tensor in Tagging.seen
    assert_same(torch_load(path), {"a": noise(10)})


def test_a_pickler_that_a_program_puts_in_its_place(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one of the first save was kept: torch uses what is there."""
    nvmeio.save({"a": noise(10)}, path)

    class Telling(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            return (str, ("replaced",)) if type(obj) is complex else NotImplemented

    monkeypatch.setattr(pickle, "Pickler", Telling)
    nvmeio.save({"a": noise(10), "b": 1j}, path)
    monkeypatch.undo()
    assert torch_load(path, weights_only=False)["b"] == "replaced"
    nvmeio.save({"b": 1j}, path)
    assert torch_load(path, weights_only=False) == {"b": 1j}


def test_the_file_is_what_torch_would_write_but_for_the_alignment(
    path: Path, tmp_path: Path
) -> None:
    wanted = SAFE["training"]()
    nvmeio.save(wanted, path)
    torch.save(wanted, tmp_path / "torch.pt")
    ours, theirs = zipfile.ZipFile(path), zipfile.ZipFile(tmp_path / "torch.pt")
    for own, stock in zip(ours.infolist(), theirs.infolist(), strict=True):
        name = own.filename.split("/", 1)[1]
        assert name == stock.filename.split("/", 1)[1]
        if name not in (".storage_alignment", ".data/serialization_id"):
            assert ours.read(own) == theirs.read(stock)


@pytest.mark.parametrize(("elements", "unit"), [(300_000, 64), (2 << 20, 4096)])
def test_storages_begin_on_pages_where_they_are_read_direct(
    elements: int, unit: int, path: Path
) -> None:
    nvmeio.save({"a": noise(100), "b": noise(elements), "c": noise(3)}, path)
    reader: Any = torch._C.PyTorchFileReader(str(path))
    offsets = [reader.get_record_offset(f"data/{key}") for key in range(3)]
    assert math.gcd(*offsets) % unit == 0
    assert (offsets[1] - offsets[0] < 4096) == (unit == 64)


def test_a_small_file_has_the_size_of_torch_s(path: Path) -> None:
    state = {str(number): torch.full((16,), float(number)) for number in range(100)}
    nvmeio.save(state, path)
    theirs = io.BytesIO()
    torch.save(state, theirs)
    assert path.stat().st_size == len(theirs.getvalue())


def test_without_checksums(path: Path) -> None:
    wanted = SAFE["sizes"]()
    nvmeio.save(wanted, path, checksum=False)
    assert_same(torch_load(path), wanted)
    crcs = {i.CRC for i in zipfile.ZipFile(path).infolist() if "/data/" in i.filename}
    assert crcs == {0}


def test_checksums_are_right_where_torch_leaves_them_out(path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        nvmeio.save({"a": noise(1000)}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert zipfile.ZipFile(path).testzip() is None


def test_an_object_that_saves_within_its_pickle(path: Path) -> None:
    """skip_data was in force while the object was pickled: the inner file had holes for tensors."""
    wanted = UNSAFE["saves within"]()
    nvmeio.save(wanted, path)
    assert_same(torch_load(path, weights_only=False), wanted)
    assert_same(nvmeio.load(path, weights_only=False), wanted)


def test_nothing_of_torch_that_saves_or_loads_is_patched() -> None:
    found = run_python(
        """
        import os, pickle, tempfile, torch
        modules = (pickle, torch.serialization, torch.storage, torch._weights_only_unpickler)
        before = [(module, dict(vars(module))) for module in modules]
        classes = [(kind, dict(vars(kind))) for kind in (torch.storage.TypedStorage, torch.Tensor)]
        save, load = torch.save, torch.load
        import nvmeio
        with tempfile.TemporaryDirectory(dir=".") as folder:
            path = os.path.join(folder, "a.pt")
            nvmeio.save({"a": torch.ones(5), "b": torch.nn.Linear(2, 2).state_dict()}, path)
            nvmeio.load(path)
            with nvmeio.Checkpointer(os.path.join(folder, "many")) as checkpointer:
                checkpointer.save_sync({"a": torch.ones(99999)}, 1)
        assert (torch.save, torch.load) == (save, load)
        for owner, names in before + classes:
            changed = [name for name, what in names.items() if vars(owner).get(name) is not what]
            assert not changed, (owner, changed)
        """,
        fresh=True,
    )
    assert (found.returncode, found.stderr) == (0, "")


def test_torch_is_left_as_it_was(path: Path) -> None:
    from torch.utils.serialization import config

    nvmeio.save({"a": noise(10)}, path)
    with pytest.raises(RuntimeError, match="refuses"):
        nvmeio.save({"a": noise(10), "b": Refuses()}, path)
    assert config.save.storage_alignment == 64
    buffer = io.BytesIO()
    torch.save({"a": noise(1000)}, buffer)
    buffer.seek(0)
    assert_same(torch.load(buffer), {"a": noise(1000)})


class Refuses:
    def __reduce__(self) -> Any:
        raise RuntimeError("it refuses to be pickled")


@pytest.mark.parametrize("name", ["skip_data", "config"])
def test_a_torch_without_the_interfaces(
    name: str, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """torch 2.6 aligns to 64 bytes; without skip_data everything goes through torch.save."""
    if name == "skip_data":
        monkeypatch.delattr(torch.serialization, "skip_data")
    else:
        monkeypatch.setattr(torch_pickler, "save_settings", lambda: None)
    wanted = {"sizes": SAFE["sizes"](), "tied": SAFE["tied"]()}
    nvmeio.save(wanted, path)
    found = torch_load(path)
    assert_same(found, wanted)
    assert_tied(found["tied"])
    assert zipfile.ZipFile(path).testzip() is None
    assert ("torch.save" in caplog.text) == (name == "skip_data")
    assert names_in(path.parent) == [path.name]


def test_torch_still_has_the_interfaces_that_save_rests_on(path: Path) -> None:
    """Were one gone, saving would fall back to torch.save, and only be slow."""
    layout = torch_layout.plan_layout({"a": noise(3 << 20)})
    assert [record.name for record in layout.records] == ["archive/data/0"]
    assert torch_pickler.save_settings() is not None
    assert layout.records[0].offset % 4096 == 0


@pytest.mark.parametrize("where", ["meta", "cpu"])
def test_under_a_default_device(where: str, path: Path) -> None:
    wanted = {"a": noise(1000), "b": noise(500_000)}
    with torch.device(where):
        nvmeio.save(wanted, path)
        found = nvmeio.load(path)
    assert_same(found, wanted)


def test_meta_tensors(path: Path) -> None:
    wanted = {"a": torch.empty(3, device="meta"), "b": noise(3)}
    nvmeio.save(wanted, path)
    found = nvmeio.load(path)
    assert found["a"].device.type == "meta" and found["a"].shape == (3,)
    assert_same(found["b"], wanted["b"])


def test_inference_tensors(path: Path) -> None:
    with torch.inference_mode():
        wanted = {"a": torch.arange(1000.0), "b": torch.arange(1_000_000.0)}
        nvmeio.save(wanted, path)
    found = torch_load(path)
    assert torch.equal(found["a"], wanted["a"]) and torch.equal(found["b"], wanted["b"])


def test_what_was_mapped_from_the_file_itself_may_be_saved_over_it(path: Path) -> None:
    wanted = SAFE["sizes"]()
    nvmeio.save(wanted, path)
    mapped = torch_load(path, mmap=True)
    nvmeio.save(mapped, path)
    assert_same(torch_load(path), wanted)
    assert_same(mapped, wanted)


# Where it goes


def test_a_smaller_checkpoint_replaces_a_larger_one(path: Path) -> None:
    nvmeio.save({"a": noise(2_000_000)}, path)
    nvmeio.save({"a": noise(3)}, path)
    assert_same(torch_load(path), {"a": noise(3)})
    assert path.stat().st_size < 100_000


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_mode_of_a_new_file_is_that_of_torch_save(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        nvmeio.save({}, tmp_path / "ours")
        torch.save({}, tmp_path / "theirs")
    finally:
        os.umask(before)
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "theirs").stat().st_mode


def test_mode_of_an_old_file_stays(path: Path) -> None:
    path.write_bytes(b"old")
    path.chmod(0o640)
    nvmeio.save({}, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize("exists", [True, False])
def test_a_symbolic_link_stays(exists: bool, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "real.pt", tmp_path / "link.pt"
    if exists:
        target.write_bytes(b"old")
    link.symlink_to(target)
    nvmeio.save({"a": 1}, link)
    assert link.is_symlink() and torch_load(target) == {"a": 1}
    assert names_in(tmp_path / "there") == ["real.pt"]


def test_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    nvmeio.save({"a": 1}, "here.pt")
    assert nvmeio.load("here.pt") == {"a": 1}


def test_a_name_of_full_length(tmp_path: Path) -> None:
    for name in ("n" * 255, "ü" * 127):
        nvmeio.save({"a": 1}, tmp_path / name)
        assert nvmeio.load(tmp_path / name) == {"a": 1}
    assert len(names_in(tmp_path)) == 2


def test_targets_that_are_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for target, error in (
        (tmp_path, IsADirectoryError),
        (f"{tmp_path}/new/", IsADirectoryError),  # became a file called "new"
        (tmp_path / "missing" / "two" / "a.pt", FileNotFoundError),
        (tmp_path / "pipe", nvmeio.TransferError),
        ("/dev/null", nvmeio.TransferError),
        (tmp_path / "loop", nvmeio.TransferError),
        ("", nvmeio.TransferError),
    ):
        with pytest.raises(error) as raised:
            nvmeio.save({"a": noise(3)}, target)
        assert isinstance(raised.value, nvmeio.TransferError) and str(target) in str(raised.value)
    assert names_in(tmp_path) == ["loop", "pipe"]
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_arguments_of_the_wrong_kind(path: Path) -> None:
    with pytest.raises(TypeError, match="FastFileWriter"):
        nvmeio.save({}, io.BytesIO())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="fsdecode"):
        nvmeio.save({}, os.fsencode(path))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="null character"):
        nvmeio.save({}, "a\0b")


@pytest.mark.untraced
def test_a_directory_or_file_that_may_not_be_written() -> None:
    """As nobody: root may write anywhere.

    Not below pytest's folder, which every pytest that begins on the machine makes its user's alone.
    """
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody who may not write here")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        if not all(above.stat().st_mode & 0o001 for above in Path(folder).parents):
            pytest.skip(f"nobody may look into {folder}")
        check_as_nobody(Path(folder))


def check_as_nobody(folder: Path) -> None:
    locked, own = folder / "locked", folder / "own"
    locked.mkdir(mode=0o755)
    own.mkdir()
    (own / "a.pt").write_bytes(b"old")
    (own / "a.pt").chmod(0o444)
    own.chmod(0o777)
    ran = run_python(
        f"""
        import os
        import nvmeio
        nvmeio.save  # imported while it may be
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
        for path, what in (("{locked}/a.pt", "must be writable"), ("{own}/a.pt", "permissions")):
            try:
                nvmeio.save({{"a": 1}}, path)
            except nvmeio.TransferError as refused:
                assert isinstance(refused, PermissionError) and what in str(refused), refused
            else:
                raise AssertionError(path)
        """
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert names_in(locked) == [] and (own / "a.pt").read_bytes() == b"old"


# Small ones


def test_a_small_state_makes_no_handle_and_no_thread(path: Path) -> None:
    """In place of torch.save it is slower where most people try it first, if it makes these."""
    state = {"a": noise(1000), "b": noise(3), "c": torch.zeros(0)}
    ran = run_python(
        f"""
        import sys, threading, torch
        import nvmeio
        from nvmeio._storage import replace
        replace.is_local = lambda path: True
        state = {{"a": torch.ones(1000)}}
        nvmeio.save(state, {str(path)!r})
        def begun(*arguments, **named):
            raise AssertionError("a thread")
        threading.Thread.start = begun
        from nvmeio._threads import threads
        threads.start = replace.run_interruptible = begun
        nvmeio.save(state, {str(path)!r})
        assert "nvmeio.handle" not in sys.modules
        assert not [name for name in sys.modules if name.startswith("nvmeio.engines")]
        """
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    nvmeio.save(state, path)
    assert_same(torch.load(path), state)
    assert names_in(path.parent) == [path.name]


@pytest.mark.parametrize("nbytes", [0, 1, 1 << 20, saving_module.SMALL_BYTES])
@pytest.mark.parametrize("checksum", [True, False])
def test_files_of_either_way_are_the_same(nbytes: int, checksum: bool, path: Path) -> None:
    """Small states are copied together, and others go through a handle, as with the caller's."""
    state = {"a": noise(nbytes, dtype=torch.uint8), "b": [noise(5), noise(4096)], "name": "n"}
    nvmeio.save(state, path, checksum=checksum)
    with nvmeio.AioHandle() as handle:
        nvmeio.save(state, path.with_name("b.pt"), checksum=checksum, handle=handle)
    assert path.read_bytes() == path.with_name("b.pt").read_bytes()


# Several at once, handles


def test_two_saves_at_once_of_one_file(path: Path) -> None:
    """Whichever is renamed last stays; both are whole."""
    states = [{"a": noise(300_000, seed=i), "b": noise(10, seed=i)} for i in range(2)]
    for _ in range(5):
        threads = [threading.Thread(target=nvmeio.save, args=(s, path)) for s in states]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = torch_load(path)
        which = 0 if torch.equal(found["b"], states[0]["b"]) else 1
        assert_same(found, states[which])
        assert names_in(path.parent) == [path.name]


def test_many_threads_save_and_torch_saves_beside(tmp_path: Path) -> None:
    """The settings of torch that a save needs are nobody else's."""
    wanted = {"a": noise(1000), "b": noise(400_000)}
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(4):
                path = tmp_path / f"{number}-{turn}"
                (torch.save if number % 2 else nvmeio.save)(wanted, path)
                assert_same(torch_load(path), wanted)
                assert zipfile.ZipFile(path).testzip() is None
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_the_callers_handle_stays_open(make_handle: Any, path: Path) -> None:
    """On every engine, one that moves little at a time included."""
    handle = make_handle()
    wanted = SAFE["sizes"]()
    nvmeio.save(wanted, path, handle=handle)
    assert_same(nvmeio.load(path, handle=handle), wanted)
    assert handle.stats.in_flight == 0 and not handle.closed
    assert zipfile.ZipFile(path).testzip() is None


# Awaited


@on_every_loop
async def test_saved_and_loaded_beside_the_loop(
    engine_held: HeldEngine, handle_held: nvmeio.AioHandle, path: Path
) -> None:
    wanted = {"a": noise(2_000_000), "b": noise(7)}

    async def beside(work: Coroutine[Any, Any, Any]) -> Any:
        engine_held.gate.clear()
        begun = engine_held.begun
        under_way = asyncio.ensure_future(work)
        await until(lambda: engine_held.begun > begun)
        for _ in range(5):  # the loop goes on while the drive is at work
            await asyncio.sleep(0.001)
        assert not under_way.done()
        engine_held.gate.set()
        return await under_way

    await beside(nvmeio.async_save(wanted, path, handle=handle_held))
    assert_same(await beside(nvmeio.async_load(path, handle=handle_held)), wanted)


@on_every_loop
async def test_a_cancelled_save_leaves_the_old_file(
    engine_held: HeldEngine, handle_held: nvmeio.AioHandle, path: Path
) -> None:
    nvmeio.save({"old": 1}, path)
    saving = asyncio.ensure_future(
        nvmeio.async_save({"a": noise(3_000_000)}, path, handle=handle_held)
    )
    await until(lambda: engine_held.begun > 0)
    saving.cancel()
    engine_held.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await saving
    assert names_in(path.parent) == [path.name]
    assert torch_load(path) == {"old": 1}
    assert handle_held.stats.in_flight == 0


@on_every_loop
async def test_a_save_cancelled_before_it_began(path: Path) -> None:
    saving = asyncio.ensure_future(nvmeio.async_save({"a": noise(3)}, path))
    saving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saving
    assert names_in(path.parent) == []


def test_cancelled_between_the_last_write_and_the_rename(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = LongCall("save", path)
    truncate = saving_module.Replacement.truncate

    def late(self: Any, nbytes: int) -> None:
        truncate(self, nbytes)
        stop.cancel()

    monkeypatch.setattr(saving_module, "LongCall", lambda *_: stop)
    monkeypatch.setattr(saving_module.Replacement, "truncate", late)
    large = {"a": noise(saving_module.SMALL_BYTES + 1, dtype=torch.uint8)}
    with pytest.raises(Cancelled):
        nvmeio.save(large, path)
    assert names_in(path.parent) == []


def test_cancelled_before_a_small_file_is_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = LongCall("save", path)
    of_bytes = crc32.of_bytes

    def late(memory: memoryview) -> int:
        stop.cancel()
        return of_bytes(memory)

    monkeypatch.setattr(saving_module, "LongCall", lambda *_: stop)
    monkeypatch.setattr(crc32, "of_bytes", late)
    with pytest.raises(Cancelled):
        nvmeio.save({"a": noise(10)}, path)
    assert names_in(path.parent) == []


def test_damaged_settings_lose_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that `nvmeio tune --save` stored: told, and not used."""
    config = tmp_path / "config"
    (config / "nvmeio").mkdir(parents=True)
    (config / "nvmeio" / "tuned.json").write_text("{")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(config))
    state = {"a": noise(saving_module.SMALL_BYTES + 1, dtype=torch.uint8)}
    nvmeio.save(state, tmp_path / "a.pt")
    assert "not using the stored settings" in caplog.text and "tuned.json" in caplog.text
    assert torch.equal(nvmeio.load(tmp_path / "a.pt")["a"], state["a"])


def test_a_missing_directory_is_made_one_level(tmp_path: Path) -> None:
    """As swap directories and those of Checkpointers are."""
    nvmeio.save({"a": 1}, tmp_path / "made" / "a.pt")
    assert nvmeio.load(tmp_path / "made" / "a.pt") == {"a": 1}
    with pytest.raises(FileNotFoundError, match=r"one does not exist either.*\(mkdir -p\)"):
        nvmeio.save({"a": 1}, tmp_path / "one" / "two" / "a.pt")
    assert not (tmp_path / "one").exists()
