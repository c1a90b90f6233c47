"""`nvmeio.load`: what torch.load gives, from the drive's own speed."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import pickle
import re
import struct
import tarfile
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint._objects import (
    SAFE,
    SAVED_DTYPES,
    UNSAFE,
    Holder,
    assert_same,
    assert_tied,
    dtype_id,
    noise,
    of_dtype,
)
from support import HeldEngine, on_every_loop, run_python, spin_until, until

import nvmeio
from nvmeio._formats.sniff import kind_of
from nvmeio._formats.torch_archives import torch_file
from nvmeio._io.spans import Load
from nvmeio._memory import mappings, system
from nvmeio.checkpoint import _unpickling as unpickling
from nvmeio.checkpoint import loading as loading_module


def load(path: Path, *arguments: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated and experimental kinds of tensors
        return nvmeio.load(path, *arguments, **options)


@pytest.fixture(autouse=True)
def through_nvmeio(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test of this module may pass because torch.load stood in, but those that say so."""
    if "stands_in" not in request.fixturenames:
        monkeypatch.setattr(unpickling, "load_through_torch", _not_by_torch)


def _not_by_torch(path: Any, options: Any) -> Any:
    raise AssertionError(f"torch.load stood in for {path}")


def test_a_directory_says_what_loads_the_checkpoints_in_it(tmp_path: Path) -> None:
    """It said "name a file inside the directory", and not which."""
    run, model, other = (str(tmp_path / name) for name in ("run", "model", "other"))
    os.mkdir(model)
    with nvmeio.Checkpointer(run) as checkpointer:
        for step in (1, 2):
            checkpointer.save_sync({"a": torch.ones(3) * step}, step)
    nvmeio.save_safetensors({"a": torch.ones(3)}, f"{model}/model.safetensors")
    os.makedirs(f"{other}/step-00000012")
    for name in ("index.json", "rank-00000.pt"):
        Path(other, "step-00000012", name).touch()
    os.symlink("step-00000012", f"{other}/latest")

    whole = f"nvmeio.Checkpointer({other!r}, read_only=True).restore"
    for read in (nvmeio.load, nvmeio.FastFileReader, nvmeio.load_safetensors, nvmeio.safe_open):
        package = read in (nvmeio.load_safetensors, nvmeio.safe_open)
        error = FileNotFoundError if package else IsADirectoryError
        for directory, call in (
            (run, f"nvmeio.Checkpointer({run!r}, read_only=True).restore()"),
            (run, f"nvmeio.load('{run}/step-00000002.pt')"),
            (other, f"{whole}()"),
            (f"{other}/latest", f"{whole}(step=12)"),
            (model, f"nvmeio.load_safetensors({model!r})"),
        ):
            if not (package and directory == model):
                with pytest.raises(error, match=re.escape(call)):
                    read(directory)
    with pytest.raises(IsADirectoryError, match="name a file inside the directory"):
        nvmeio.load(tmp_path)
    assert torch.equal(nvmeio.load(f"{run}/step-00000002.pt")["a"], torch.ones(3) * 2)


@pytest.fixture(name="stands_in")
def _stands_in() -> None:
    """torch.load may stand in."""


stands_in = pytest.mark.usefixtures("stands_in")


# What stock torch wrote


@pytest.mark.parametrize("kind", SAFE)
def test_reads_what_torch_save_wrote(kind: str, path: Path) -> None:
    wanted = SAFE[kind]()
    torch.save(wanted, path)
    assert_same(load(path), wanted)


@pytest.mark.parametrize("kind", UNSAFE)
def test_reads_what_takes_trust(kind: str, path: Path) -> None:
    wanted = UNSAFE[kind]()
    for save in (torch.save, nvmeio.save):
        save(wanted, path)
        assert_same(load(path, weights_only=False), wanted)


@pytest.mark.parametrize("kind", SAFE)
def test_reads_what_nvmeio_wrote(kind: str, path: Path) -> None:
    wanted = SAFE[kind]()
    nvmeio.save(wanted, path)
    assert_same(load(path), wanted)
    assert_same(load(path, weights_only=False), wanted)


@pytest.mark.parametrize("dtype", SAVED_DTYPES, ids=dtype_id)
def test_every_dtype(dtype: torch.dtype, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = of_dtype(dtype)
        torch.save(wanted, path)
    assert_same(load(path), wanted)


def test_ties_are_tied_again(path: Path) -> None:
    wanted = SAFE["tied"]()
    torch.save(wanted, path)
    assert_tied(load(path))
    assert_tied(load(path, lambda storage, location: storage))


def test_a_file_of_another_byte_order(path: Path) -> None:
    """torch swaps the bytes of each storage; here in the memory that was read into."""
    wanted = {"a": noise(1000), "b": noise(7, dtype=torch.int64), "c": noise(3, dtype=torch.uint8)}
    torch.save(wanted, path)
    with zipfile.ZipFile(path) as old:
        records = {info.filename: old.read(info) for info in old.infolist()}
    swapped = path.with_name("swapped.pt")
    sizes = {"a": 4, "b": 8, "c": 1}
    with zipfile.ZipFile(swapped, "w", zipfile.ZIP_STORED) as new:
        for name, data in records.items():
            if "/data/" in name:
                width = list(sizes.values())[int(name.rsplit("/", 1)[1])]
                pieces = [data[i : i + width][::-1] for i in range(0, len(data), width)]
                data = b"".join(pieces)
            new.writestr(name, b"big" if name.endswith("byteorder") else data)
    assert_same(torch.load(swapped), wanted)
    assert_same(load(swapped), wanted)


def test_a_storage_that_is_no_whole_number_of_elements(path: Path) -> None:
    storage = torch.UntypedStorage(10)
    wanted = torch.empty(0).set_(storage, 0, (2,), (1,)).fill_(7.0)
    torch.save({"a": wanted}, path)
    assert torch.equal(load(path)["a"], wanted)


# Where it goes

PLACES: list[Any] = [
    None,
    "cpu",
    torch.device("cpu"),
    {"cpu": "cpu"},
    {"elsewhere": "cpu"},
    lambda storage, location: storage,
    lambda storage, location: None,
    lambda storage, location: storage.clone(),
]


@pytest.mark.parametrize("place", PLACES)
def test_every_form_of_map_location(place: Any, path: Path) -> None:
    wanted = SAFE["tied"]()
    torch.save(wanted, path)
    found = load(path, place)
    assert_same(found, wanted)
    assert_tied(found)


def test_a_callable_sees_each_storage_once_with_its_bytes(path: Path) -> None:
    wanted = {"a": noise(5), "b": noise(300_000), "a again": noise(5)}
    wanted["a again"] = wanted["a"]
    nvmeio.save(wanted, path)
    seen: list[tuple[int, str, bytes]] = []

    def place(storage: Any, location: str) -> Any:
        seen.append((storage.nbytes(), location, bytes(storage[:20])))
        return storage

    load(path, place)
    first, second = (t.untyped_storage() for t in (wanted["a"], wanted["b"]))
    assert seen == [
        (first.nbytes(), "cpu", bytes(first[:20])),
        (second.nbytes(), "cpu", bytes(second[:20])),
    ]


@pytest.mark.parametrize("place", PLACES[:5])
def test_a_wrapper_subclass_with_a_place(place: Any, path: Path) -> None:
    wanted = UNSAFE["wrapped"]()
    nvmeio.save(wanted, path)
    assert_same(load(path, place, weights_only=False), wanted)


@stands_in
@pytest.mark.parametrize("place", ["meta", torch.device("meta")])
def test_the_meta_device_has_shapes_alone(place: Any, path: Path) -> None:
    nvmeio.save({"a": noise(3, 4), "b": noise(5)}, path)
    found = load(path, place)
    assert found["a"].is_meta and found["a"].shape == (3, 4) and found["b"].is_meta


def test_a_dict_that_leads_to_the_meta_device(path: Path) -> None:
    nvmeio.save({"a": noise(3, 4)}, path)
    assert load(path, {"cpu": "meta"})["a"].is_meta


@stands_in
def test_fake_tensors(path: Path) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    nvmeio.save({"a": noise(3, 4)}, path)
    with FakeTensorMode():
        found = load(path)
    assert found["a"].shape == (3, 4) and type(found["a"]).__name__ == "FakeTensor"


@pytest.mark.parametrize("place", ["cuda", {"cpu": "cuda:0"}, "nowhere"])
def test_a_device_that_is_not_there_is_torchs_error(
    place: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    nvmeio.save({"a": noise(3)}, path)
    with pytest.raises(RuntimeError) as theirs:
        torch.load(path, place)
    monkeypatch.setattr(Load, "run", _nothing_may_be_read)
    with pytest.raises(RuntimeError) as ours:
        load(path, place)
    assert str(ours.value) == str(theirs.value)


def _nothing_may_be_read(self: Any, *arguments: Any) -> Any:
    raise AssertionError("storages were read before it was known that they may be")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_to_and_from_cuda(path: Path) -> None:
    wanted = SAFE["sizes"]()
    there = {name: tensor.cuda() for name, tensor in wanted.items()}
    nvmeio.save(there, path)
    assert zipfile.ZipFile(path).testzip() is None
    for found in (load(path), load(path, "cuda"), torch.load(path)):
        assert all(tensor.is_cuda for tensor in found.values())
        assert_same({name: tensor.cpu() for name, tensor in found.items()}, wanted)
    assert_same(load(path, "cpu"), wanted)
    assert_same(load(path, {"cuda:0": "cpu"}), wanted)
    moved = load(path, lambda storage, location: storage.cuda())
    assert_same({name: tensor.cpu() for name, tensor in moved.items()}, wanted)


# What it lives in


def test_storages_lie_where_they_were_read_to(path: Path) -> None:
    nvmeio.save({"large": noise(3_000_000), "small": noise(10)}, path)
    found = load(path)
    for tensor in found.values():
        assert mappings.mapped.covers(tensor.data_ptr(), tensor.nbytes)


def test_what_is_dropped_is_given_back(path: Path) -> None:
    """A large storage keeps only itself alive, a small one only its arena."""
    nvmeio.save({i: noise(2_500_000, seed=i) for i in range(4)} | {"small": noise(10)}, path)
    gc.collect()
    before = len(mappings.mapped)
    found = load(path)
    spin_until(lambda: gc.collect() >= 0 and len(mappings.mapped) <= before + 5)
    places = {name: tensor.data_ptr() for name, tensor in found.items()}

    def mapped() -> list[Any]:
        gc.collect()
        return [name for name, at in places.items() if mappings.mapped.covers(at, 1)]

    assert mapped() == [0, 1, 2, 3, "small"]
    del found[2]
    spin_until(lambda: mapped() == [0, 1, 3, "small"])
    small = found["small"]
    found.clear()
    spin_until(lambda: mapped() == ["small"])
    assert_same(small, noise(10))
    del small
    spin_until(lambda: mapped() == [])


def test_loaded_tensors_are_ordinary(path: Path) -> None:
    """They may be changed and trained (not grown in place: the memory is nvmeio's)."""
    nvmeio.save({"a": noise(100), "b": noise(100)}, path)
    found = load(path)
    found["a"].zero_()
    parameter = torch.nn.Parameter(found["b"])
    (parameter * 2).sum().backward()
    assert_same(parameter.detach(), noise(100))
    assert parameter.grad is not None


def test_memory_of_save_and_load_is_bounded(tmp_path: Path) -> None:
    """1 GiB: saving adds at most 256 MiB, loading the state and at most 256 MiB."""
    ran = run_python(
        f"""
        import resource, torch, nvmeio, nvmeio.checkpoint
        from nvmeio.checkpoint import saving as _saving
        def peak():
            with open("/proc/self/status") as status:
                return next(int(l.split()[1]) << 10 for l in status if l.startswith("VmHWM"))
        MIB = 1 << 20
        path = "{tmp_path}/big.pt"
        nvmeio.save({{"warm": torch.ones(1000)}}, path); nvmeio.load(path)
        state = {{str(i): torch.full((64 * MIB // 4,), float(i)) for i in range(15)}}
        state.update({{f"s{{i}}": torch.full((16384,), float(i)) for i in range(1024)}})
        before = peak()
        nvmeio.save(state, path)
        print((peak() - before) // MIB)
        del state
        with open("/proc/self/clear_refs", "w") as clear:
            clear.write("5")
        before = peak()
        found = nvmeio.load(path)
        print((peak() - before) // MIB - 1024)
        assert all(bool((found[str(i)] == i).all()) for i in range(15))
        """,
        fresh=True,
    )
    assert ran.returncode == 0, ran.stderr
    saving, loading = map(int, ran.stdout.split())
    (tmp_path / "big.pt").unlink()
    assert saving <= 256 and loading <= 256, ran.stdout


# What is left to torch


@stands_in
def test_the_legacy_format(path: Path) -> None:
    wanted = {"a": noise(1000), "b": [noise(3)]}
    torch.save(wanted, path, _use_new_zipfile_serialization=False)
    assert_same(load(path), wanted)
    assert_same(load(path, "cpu", weights_only=False), wanted)


def test_a_pickle_of_any_size(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy arrays, texts, bytes: what is no tensor is in the pickle."""
    monkeypatch.setattr(torch_file, "_MAX_TEXT_BYTES", 1000)
    pread, preadv = os.pread, os.preadv  # man 2 pread: at most 2,147,479,552 bytes at once
    monkeypatch.setattr(os, "pread", lambda fd, nbytes, at: pread(fd, min(nbytes, 700), at))
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: preadv(fd, [parts[0][:700]], at))
    wanted = {"text": "x" * 10_000 + "end", "a": noise(5)}
    nvmeio.save(wanted, path)
    assert_same(load(path), wanted)


def test_a_pickle_larger_than_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvmeio.save({"text": "x" * (2 << 20)}, path)
    monkeypatch.setattr(system, "_CHECK_BYTES", 1 << 20)
    monkeypatch.setattr(system, "proc_bytes", lambda *_: 1 << 20)
    with pytest.raises(MemoryError, match="available"):
        load(path)


@stands_in
def test_torchscript_is_refused_as_torch_does(path: Path) -> None:
    class Twice(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(Twice()), path)
        with pytest.raises(RuntimeError) as theirs:
            torch.load(path)
        with pytest.raises(RuntimeError) as ours:
            load(path)
        assert str(ours.value) == str(theirs.value)
        module = load(path, weights_only=False)
    assert torch.equal(module(torch.ones(2)), torch.full((2,), 2.0))


@stands_in
@pytest.mark.parametrize("protocol", range(1, pickle.HIGHEST_PROTOCOL + 1))
def test_the_legacy_format_in_any_protocol(protocol: int, path: Path) -> None:
    options = {"_use_new_zipfile_serialization": False, "pickle_protocol": protocol}
    torch.save([noise(3)], path, **options)
    with nvmeio.files.open(path) as file:
        assert kind_of(file) == "torch legacy"
    assert_same(load(path, weights_only=False), [noise(3)])


FOREIGN = {
    "empty": (b"", "is empty"),
    "two letters": (b"PK", "begins with b'PK'; check the path"),
    "a text": (b"no checkpoint at all", "begins with b'no check'; check the path"),
    "a text of opcodes": (b"hello", "begins with b'hello'"),
    "a plain pickle": (pickle.dumps({"a": 1}), "check the path"),
    "zeros": (bytes(10_000), "zeros"),
    "safetensors": (struct.pack("<Q", 2) + b"{}", "load_safetensors"),
}


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("kind", FOREIGN)
def test_a_file_that_is_no_checkpoint(kind: str, weights_only: bool, path: Path) -> None:
    """torch's errors named no file, and advised weights_only=False for a text."""
    content, says = FOREIGN[kind]
    path.write_bytes(content)
    with pytest.raises(EOFError if not content else pickle.UnpicklingError) as raised:
        load(path, weights_only=weights_only)
    assert isinstance(raised.value, nvmeio.errors.NvmeioError)
    assert str(raised.value).startswith(f"{path} is ") and says in str(raised.value)


@stands_in
@pytest.mark.parametrize("content", [b"", b"PK", b"no checkpoint at all"])
def test_other_files_are_of_torchs_type(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    with pytest.raises(Exception) as theirs:
        torch.load(path)
    with pytest.raises(theirs.type):
        load(path)


@stands_in
def test_the_tar_format_is_left_to_torch(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("storages"))
    with pytest.raises(RuntimeError, match="tar"):
        load(path)


@stands_in
@pytest.mark.parametrize("how", ["missing", "other parameters"])
def test_a_torch_without_the_seam(how: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = SAFE["tied"]()
    nvmeio.save(wanted, path)
    if how == "missing":
        monkeypatch.setattr(unpickling, "seam", lambda: None)
    else:
        monkeypatch.setattr(unpickling, "_SEAM", ["zip_file", "something", "new"])
    found = load(path)
    assert_same(found, wanted)
    assert not mappings.mapped.covers(found["big"].data_ptr(), 1)


def test_torch_still_has_the_seam() -> None:
    """Were it gone, loading would fall back to torch.load, and only be slow."""
    assert unpickling.seam() is not None


# What weights_only forbids


def test_a_forbidden_global_is_torchs_error_before_anything_is_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"a": noise(1000), "held": Holder(noise(3))}, path)
    with pytest.raises(pickle.UnpicklingError) as theirs:
        torch.load(path, weights_only=True)
    monkeypatch.setattr(Load, "run", _nothing_may_be_read)
    with pytest.raises(pickle.UnpicklingError) as ours:
        nvmeio.load(path)
    assert str(ours.value) == str(theirs.value)
    with pytest.raises(pickle.UnpicklingError):
        nvmeio.load(path, weights_only=None)  # type: ignore[arg-type]


def test_allowed_globals_are_allowed(path: Path) -> None:
    wanted = {"held": Holder(noise(3))}
    torch.save(wanted, path)
    with torch.serialization.safe_globals([Holder]):
        assert_same(load(path), wanted)


def test_the_environment_may_force_weights_only(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"held": Holder(noise(3))}, path)
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(pickle.UnpicklingError):
        nvmeio.load(path, weights_only=False)


def test_a_pickle_module_needs_trust(path: Path) -> None:
    nvmeio.save({"a": noise(3)}, path)
    with pytest.raises(RuntimeError, match="pickle_module"):
        nvmeio.load(path, pickle_module=pickle)
    assert_same(load(path, weights_only=False, pickle_module=pickle), {"a": noise(3)})
    assert_same(load(path, weights_only=False, encoding="latin1"), {"a": noise(3)})


def test_an_argument_that_torch_does_not_have(path: Path) -> None:
    nvmeio.save({"a": noise(3)}, path)
    with pytest.raises(
        TypeError, match=r"load\(\) got .* 'device'; map_location= says where tensors go"
    ):
        nvmeio.load(path, device="cuda")
    with pytest.raises(TypeError, match=r"load\(\) got an unexpected keyword argument 'strict'$"):
        asyncio.run(nvmeio.async_load(path, strict=True))


# Failures, several at once


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        nvmeio.load(tmp_path / "missing.pt")
    assert isinstance(raised.value, nvmeio.TransferError)
    with pytest.raises(IsADirectoryError):
        nvmeio.load(tmp_path)


def test_a_file_replaced_while_it_is_loaded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it comes from the file that was opened, also what torch looks at again."""
    old = {"a": noise(300_000), "b": noise(4)}
    nvmeio.save(old, path)
    scan = loading_module.scan_pickle

    def replace_first(checkpoint: Any) -> Any:
        nvmeio.save({"other": noise(5)}, path)
        return scan(checkpoint)

    monkeypatch.setattr(loading_module, "scan_pickle", replace_first)
    assert_same(load(path), old)


@on_every_loop
async def test_a_cancelled_load_stops(
    engine_held: HeldEngine, handle_held: nvmeio.AioHandle, path: Path
) -> None:
    torch.save({"a": noise(3_000_000)}, path)
    loading = asyncio.ensure_future(nvmeio.async_load(path, handle=handle_held))
    await until(lambda: engine_held.begun > 0)
    loading.cancel()
    engine_held.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert handle_held.stats.in_flight == 0


@on_every_loop
async def test_many_loads_at_once(tmp_path: Path) -> None:
    wanted = {i: {"a": noise(1000, seed=i), "b": noise(300_000, seed=i)} for i in range(4)}
    async with nvmeio.AioHandle() as handle:
        await asyncio.gather(
            *(nvmeio.async_save(w, tmp_path / str(i), handle=handle) for i, w in wanted.items())
        )
        found = await asyncio.gather(
            *(nvmeio.async_load(tmp_path / str(i), handle=handle) for i in wanted)
        )
    assert_same(dict(enumerate(found)), wanted)
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2", "3"]


# As torch.load takes it


def test_parameters_stand_in_torchs_order(path: Path) -> None:
    nvmeio.save({"a": noise(10)}, path)
    assert_same(nvmeio.load(path, None, pickle, weights_only=False), {"a": noise(10)})
    with pytest.raises(TypeError, match="third parameter is pickle_module"):
        nvmeio.load(path, None, True)


def test_open_file_is_refused_with_the_way_out() -> None:
    with pytest.raises(TypeError, match=r"not BytesIO; for an open file use torch\.load"):
        nvmeio.load(io.BytesIO(b"PK"))  # type: ignore[arg-type]


def test_mmap_maps_the_file(path: Path, stands_in: None) -> None:
    """torch maps it: nothing is read before it is touched."""
    nvmeio.save({"a": noise(100_000)}, path)
    found = nvmeio.load(path, mmap=True)
    assert_same(found, {"a": noise(100_000)})
    assert str(path) in Path("/proc/self/maps").read_text()
    assert_same(nvmeio.load(path, mmap=False), found)


def test_a_mapped_load_is_of_one_file_though_its_link_changes(
    tmp_path: Path, stands_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch got the path and opened it twice: values of one checkpoint, tensors of the next."""
    latest = tmp_path / "latest"
    for step in (1, 2):
        nvmeio.save({"step": step, "a": torch.full((3,), step)}, tmp_path / f"{step}.pt")
    latest.symlink_to("1.pt")
    from_file = torch.UntypedStorage.from_file

    def change_first(*arguments: Any, **options: Any) -> Any:
        latest.unlink()
        latest.symlink_to("2.pt")
        return from_file(*arguments, **options)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", change_first)
    found = nvmeio.load(latest, mmap=True)
    assert found["step"] == 1 and found["a"].tolist() == [1, 1, 1]


def test_fake_mode_makes_fake_tensors(path: Path, stands_in: None) -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    nvmeio.save({"a": noise(100)}, path)
    with FakeTensorMode():
        found = nvmeio.load(path)
    assert isinstance(found["a"], FakeTensor)
    assert found["a"].shape == (100,)


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("share", [0.02, 0.2, 0.5, 0.9])
def test_truncated_legacy_file_is_named(
    share: float, weights_only: bool, path: Path, stands_in: None
) -> None:
    """torch's own errors ("Ran out of input") name no file."""
    torch.save({"a": noise(1000)}, path, _use_new_zipfile_serialization=False)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(nvmeio.NvmeioError, match=r"is truncated") as told:
        nvmeio.load(path, weights_only=weights_only)
    assert str(path) in str(told.value)
    assert isinstance(told.value, EOFError)
