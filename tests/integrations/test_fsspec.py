"""nvmeio:// through fsspec: whole files, transactions, and distributed checkpoints by URL."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import random_bytes, run_python, spin_until_collected

import nvmeio

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
files = importlib.import_module("nvmeio.integrations.fsspec")

PYPROJECT = Path(nvmeio.__file__).parent.parent / "pyproject.toml"
MiB = 1 << 20


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """As the entry point does where this version is installed."""
    fsspec.register_implementation("nvmeio", files.NvmeFileSystem, clobber=True)
    yield
    files.NvmeFileSystem.clear_instance_cache()


def url(path: Path) -> str:
    return f"nvmeio://{path}"


def test_the_entry_point_leads_here() -> None:
    text = PYPROJECT.read_text(encoding="utf-8")
    section = text.split('[project.entry-points."fsspec.specs"]\n')[1].split("\n[")[0]
    (target,) = re.findall(r'^nvmeio = "(.+)"$', section, re.MULTILINE)
    module, _, name = target.partition(":")
    assert getattr(importlib.import_module(module), name) is files.NvmeFileSystem
    # Where the metadata that is installed is this version's, fsspec finds it by itself.
    points = importlib.metadata.entry_points(group="fsspec.specs", name="nvmeio")
    assert {point.value for point in points} <= {target}


@pytest.mark.parametrize("nbytes", [0, 1, 4097, MiB, MiB + 1, 40 * MiB + 12345])
def test_a_file_comes_back(nbytes: int, tmp_path: Path) -> None:
    data = random_bytes(nbytes)
    path = tmp_path / "file"
    with fsspec.open(url(path), "wb") as file:
        for start in range(0, nbytes, 3 * MiB + 7):
            assert file.tell() == start
            file.write(data[start : start + 3 * MiB + 7])
    assert path.read_bytes() == data
    with fsspec.open(url(path), "rb") as file:
        assert file.read() == data
        file.seek(nbytes // 2)
        assert file.read(100) == data[nbytes // 2 :][:100]
        buffer = bytearray(min(nbytes, 2 * MiB))
        file.seek(-len(buffer), 2)
        assert file.readinto(buffer) == len(buffer)
        assert buffer == data[nbytes - len(buffer) :]
        assert file.read() == b""


def test_text_and_other_modes_work(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with fsspec.open(url(path), "w", encoding="utf-8") as file:
        file.write("eins\nzwei\n")
    with fsspec.open(url(path), "ab") as file:
        file.write("drei größer".encode())
    with fsspec.open(url(path), "r", encoding="utf-8") as file:
        assert list(file) == ["eins\n", "zwei\n", "drei größer"]
    with pytest.raises(FileExistsError), fsspec.open(url(path), "xb"):
        pass


@pytest.mark.parametrize("nbytes", [100, 3 * MiB])
def test_a_file_takes_its_name_when_it_is_closed(nbytes: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with fsspec.open(url(path), "wb") as file:
        file.write(bytes(nbytes))
        file.flush()
        os.fsync(file.fileno())
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == bytes(nbytes)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("nbytes", [100, 3 * MiB])
def test_a_file_that_is_broken_off_leaves_the_old_one(nbytes: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    fs = fsspec.filesystem("nvmeio")
    with pytest.raises(ArithmeticError), fs.open(url(path), "wb") as file:
        file.write(bytes(nbytes))
        raise ArithmeticError
    with pytest.raises(nvmeio.ClosedError):
        file.write(b"more")
    dropped = fs.open(url(path), "wb")
    dropped.write(bytes(nbytes))
    with pytest.warns(ResourceWarning, match="was dropped, not closed") as told:
        del dropped
        spin_until_collected(lambda: bool(told.list))
    assert path.read_bytes() == b"old"
    spin_until_collected(lambda: list(tmp_path.iterdir()) == [path])


def test_a_program_that_ends_with_an_open_file_says_nothing(tmp_path: Path) -> None:
    """Its finalizer met modules that had lost their names, and printed a traceback."""
    path = tmp_path / "file"
    script = f"""
        import nvmeio, fsspec
        file = fsspec.open({url(path)!r}, "wb").open()
        file.write(b"new")
    """
    ran = run_python(script, fresh=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert not path.exists()
    fsspec.open(url(path), "wb").open().close()
    assert list(tmp_path.iterdir()) == [path]


def test_nobody_writes_past_the_buffers(tmp_path: Path) -> None:
    """The descriptor is there for fsync alone; torch's legacy format would write to it."""
    with fsspec.open(url(tmp_path / "file"), "wb") as file:
        file.write(b"one")
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(file.fileno(), b"two")
    assert (tmp_path / "file").read_bytes() == b"one"


@pytest.mark.parametrize("mode", ["wb", "wt", "xb"])
def test_a_compressed_file_is_written_or_refused(mode: str, tmp_path: Path) -> None:
    data, fs = ("text" if "t" in mode else b"data"), fsspec.filesystem("nvmeio")
    with pytest.raises(ValueError, match="nothing would be written: use `with fsspec"):
        fs.open(str(tmp_path / "one.gz"), mode, compression="infer")
    with fsspec.open(url(tmp_path / "two.gz"), mode, compression="infer") as file:
        file.write(data)
    with fs.transaction, fs.open(str(tmp_path / "three.gz"), mode, compression="gzip") as file:
        file.write(data)
    for name in ("two.gz", "three.gz"):
        with fs.open(
            str(tmp_path / name), mode.translate({119: 114, 120: 114}), compression="gzip"
        ) as file:
            assert file.read() == data


def test_a_transaction_closes_what_it_commits(tmp_path: Path) -> None:
    fs, path = fsspec.filesystem("nvmeio"), tmp_path / "file"
    with fs.transaction:
        file = fs.open(str(path), "wb")
        file.write(b"data")
    assert path.read_bytes() == b"data"
    file.close()
    assert path.read_bytes() == b"data"


def test_a_transaction_commits_all_or_nothing(tmp_path: Path) -> None:
    fs = fsspec.filesystem("nvmeio")
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"old")
    with pytest.raises(ArithmeticError), fs.transaction:
        for name in ("a", "b"):
            with fs.open(url(tmp_path / name), "wb") as file:
                file.write(b"new")
        raise ArithmeticError
    assert {path.read_bytes() for path in tmp_path.iterdir()} == {b"old"}
    with fs.transaction:
        for name, nbytes in (("a", 3), ("b", 2 * MiB)):
            with fs.open(url(tmp_path / name), "wb") as file:
                file.write(bytes(nbytes))
        assert {(tmp_path / name).read_bytes() for name in "ab"} == {b"old"}
    assert [(tmp_path / name).stat().st_size for name in "ab"] == [3, 2 * MiB]
    assert len(list(tmp_path.iterdir())) == 2


def test_errors_are_those_of_nvmeio(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        fsspec.open(url(tmp_path / "none"), "rb").open()
    with pytest.raises(nvmeio.TransferError, match="none") as told:
        files.NvmeFileSystem().open(url(tmp_path / "none" / "deeper" / "file"), "wb")
    assert isinstance(told.value, FileNotFoundError)
    deep = tmp_path / "none" / "deeper" / "file"
    with files.NvmeFileSystem(auto_mkdir=True).open(url(deep), "wb") as file:
        file.write(b"x")
    assert deep.read_bytes() == b"x"


def test_names_are_local_paths(tmp_path: Path) -> None:
    fs, path = fsspec.core.url_to_fs(url(tmp_path / "folder"))
    assert isinstance(fs, files.NvmeFileSystem)
    assert path == str(tmp_path / "folder")
    assert fs.unstrip_protocol(path) == url(tmp_path / "folder")
    fs.makedirs(path)
    fs.pipe_file(f"{path}/one", b"1")
    fs.mv(f"{path}/one", url(tmp_path / "folder" / "two"))
    assert fs.ls(path, detail=False) == [f"{path}/two"]
    assert fs.cat_file(f"{path}/two") == b"1"
    fs.rm(path, recursive=True)
    assert not fs.exists(url(tmp_path / "folder"))


def test_a_file_that_is_moved_is_renamed_and_its_names_are_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = files.NvmeFileSystem()
    (tmp_path / "new").mkdir()
    (tmp_path / "one").write_bytes(b"1")
    number, synchronised = (tmp_path / "one").stat().st_ino, []

    def sync(folder: str) -> None:
        assert not (tmp_path / "one").exists()  # it is behind the rename
        synchronised.append(folder)

    monkeypatch.setattr(files, "sync_directory", sync)
    fs.mv(url(tmp_path / "one"), url(tmp_path / "new" / "two"))
    assert (tmp_path / "new" / "two").stat().st_ino == number
    assert sorted(synchronised) == [str(tmp_path), str(tmp_path / "new")]


def test_torch_saves_and_loads_through_it(tmp_path: Path) -> None:
    state = {"w": torch.randn(800, 900), "b": torch.randn(3)}
    with fsspec.open(url(tmp_path / "state.pt"), "wb") as file:
        torch.save(state, file)
    with fsspec.open(url(tmp_path / "state.pt"), "rb") as file:
        found = torch.load(file, weights_only=True)
    assert all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.parametrize("nbytes", [1000, 3 * MiB])
@pytest.mark.parametrize("protocol", ["nvmeio", "file"])
def test_a_file_that_is_read_is_pickled_with_its_position(
    protocol: str, nbytes: int, tmp_path: Path
) -> None:
    """As fsspec's own: dask and Ray send them to workers. A large one could not be pickled."""
    data = random_bytes(nbytes)
    (tmp_path / "file").write_bytes(data)
    fs = fsspec.filesystem(protocol)
    with fs.open(str(tmp_path / "file"), "rb") as file:
        assert file.read(600) == data[:600]
        assert (file.mode, file.size, file.path) == ("rb", nbytes, str(tmp_path / "file"))
        copy = pickle.loads(pickle.dumps(file))
        with copy:
            assert copy.tell() == 600
            assert copy.fs == fs
            assert copy.read() == data[600:]
        assert file.tell() == 600
        assert file.read() == data[600:]


@pytest.mark.parametrize("protocol", ["nvmeio", "file"])
def test_a_file_that_is_written_is_not_pickled(protocol: str, tmp_path: Path) -> None:
    fs = fsspec.filesystem(protocol)
    with fs.open(str(tmp_path / "file"), "wb") as file:
        file.write(b"some")
        with pytest.raises(ValueError, match=r"open.* writ"):
            pickle.dumps(file)
        file.write(b" more")
    assert (tmp_path / "file").read_bytes() == b"some more"


def test_a_file_is_pickled_without_the_handle_of_the_caller(tmp_path: Path) -> None:
    """The handle stays where it is: what is unpickled moves its bytes by one of its own."""
    data = random_bytes(3 * MiB)
    (tmp_path / "file").write_bytes(data)
    with nvmeio.AioHandle() as handle:
        for arguments, named in (((True, handle), {}), ((), {"handle": handle})):
            fs = files.NvmeFileSystem(*arguments, **named, skip_instance_cache=True)
            with fs.open(str(tmp_path / "file"), "rb") as file:
                sent = pickle.dumps(file)
            moved = handle.stats.bytes_read
            with pickle.loads(sent) as copy:
                assert copy.read() == data
                assert copy.fs.auto_mkdir == fs.auto_mkdir
            assert handle.stats.bytes_read == moved


def test_a_handle_of_the_caller_is_used(tmp_path: Path) -> None:
    with nvmeio.AioHandle() as handle:
        fs = files.NvmeFileSystem(handle=handle, skip_instance_cache=True)
        data = random_bytes(5 * MiB)
        fs.pipe_file(str(tmp_path / "file"), data)
        assert handle.stats.bytes_written == len(data)
        assert fs.cat_file(str(tmp_path / "file")) == data
        assert handle.stats.bytes_read >= len(data)
        assert not handle.closed


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_distributed_checkpoints_by_url(tmp_path: Path) -> None:
    """torch's own Fsspec writer and reader, with no other change to the call."""
    pytest.importorskip("torch.distributed.checkpoint._fsspec_filesystem")
    for step in range(2):  # the second one replaces the first
        state: dict[str, Any] = {
            "w": torch.randn(900, 800) + step,
            "b": torch.randn(3),
            "text": f"step {step}",
        }
        dcp.save(state, checkpoint_id=url(tmp_path / "checkpoint"))
        found = {"w": torch.zeros(900, 800), "b": torch.zeros(3), "text": ""}
        dcp.load(found, checkpoint_id=url(tmp_path / "checkpoint"))
        assert torch.equal(found["w"], state["w"])
        assert torch.equal(found["b"], state["b"])
        assert found["text"] == state["text"]
    names = {path.name for path in (tmp_path / "checkpoint").iterdir()}
    assert names == {".metadata", "__0_0.distcp"}
