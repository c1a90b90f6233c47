"""`nvmeio verify` and `nvmeio inspect` of DCP checkpoints, by torch's writers and by ours."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from integrations._dcp_states import every_form
from support import run_ranks
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from typer.testing import CliRunner, Result

import nvmeio
from nvmeio._formats.sniff import NoCheckpointError
from nvmeio.cli import app
from nvmeio.integrations.dcp import NvmeStorageWriter, checking
from nvmeio.integrations.dcp.checking import verify

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]

WRITERS: dict[str, Any] = {"torch": dcp.FileSystemWriter, "nvmeio": NvmeStorageWriter}
both_writers = pytest.mark.parametrize("writer", WRITERS)


def run(command: str, *arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [command, *map(str, arguments)])


def saved(path: Path, writer: str, state: dict[str, Any] | None = None) -> Path:
    """A checkpoint of a large and a small tensor, and of an object."""
    state = state or {"large": torch.randn(700, 600), "small": torch.randn(20), "step": 7}
    dcp.save(state, storage_writer=WRITERS[writer](path))
    return path


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def change_metadata(folder: Path, change: Callable[[Any], None]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


# Whole ones


@both_writers
def test_a_healthy_checkpoint_is_whole(writer: str, tmp_path: Path) -> None:
    """Its data files were taken for torch archives, which none is as a whole: DAMAGED."""
    path = saved(tmp_path / "1", writer, every_form())
    done = run("verify", path)
    assert done.exit_code == 0, done.output
    assert re.fullmatch(
        rf"{re.escape(str(path))}: whole, DCP checkpoint in 1 file, \d+ items, .+ MiB\n",
        done.stdout,
    )
    assert "without" not in done.stdout


@both_writers
def test_zeros_at_the_beginning_are_no_damage(writer: str, tmp_path: Path) -> None:
    """Adam's file began with zeros, before an item on a page: "what a crash has lost", exit 2."""
    model = torch.nn.Linear(200, 200)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 200)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    done = run("verify", saved(tmp_path / "1", writer, state))
    assert done.exit_code == 0, done.output
    done = run("verify", saved(tmp_path / "2", writer, {"zeros": torch.zeros(300, 300)}))
    assert done.exit_code == 0, done.output


def test_files_without_checksums_are_counted(tmp_path: Path) -> None:
    dcp.save(
        {"a": torch.randn(300), "n": 5},
        storage_writer=NvmeStorageWriter(tmp_path / "1", checksum=False),
    )
    done = run("verify", tmp_path / "1")
    assert done.exit_code == 0 and "written without a checksum" in done.stdout
    verdict = verify(tmp_path / "1" / ".metadata")
    assert (verdict.records, verdict.unchecked) == (2, 2 if "2 of them" in done.stdout else 1)


def test_what_a_planner_writes_itself_is_counted(tmp_path: Path) -> None:
    """Its bytes have no checksum, but zeros are what a crash leaves."""
    import io

    class Plain(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            data = super().resolve_data(write_item)
            return io.BytesIO(b"bytes of its own") if isinstance(data, io.BytesIO) else data

    for writer, kind in WRITERS.items():
        folder = tmp_path / writer
        dcp.save({"a": torch.ones(3), "n": 5}, storage_writer=kind(folder), planner=Plain())
        done = run("verify", folder)
        assert done.exit_code == 0 and "(1 of them written without a checksum)" in done.stdout
        (data,) = folder.glob("*.distcp")
        data.write_bytes(data.read_bytes().replace(b"bytes of its own", bytes(16)))
        done = run("verify", folder)
        assert done.exit_code == 1 and "item 'n': it begins with zeros" in done.stdout


@both_writers
def test_several_files_of_one_rank(writer: str, tmp_path: Path) -> None:
    state = {f"w{i}": torch.randn(100, i + 1) for i in range(5)}
    dcp.save(state, storage_writer=WRITERS[writer](tmp_path / "1", thread_count=2))
    done = run("verify", tmp_path / "1")
    assert done.exit_code == 0 and "in 2 files, 5 items" in done.stdout


def test_each_checkpoint_below_a_directory(tmp_path: Path) -> None:
    for number, writer in enumerate(WRITERS):
        saved(tmp_path / f"step-{number}", writer)
    nvmeio.save({"a": 1}, tmp_path / "step-0" / "extra.pt")
    (tmp_path / ".metadata").write_text("of another program")
    done = run("verify", tmp_path)
    assert done.exit_code == 0, done.output
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [
        str(tmp_path / name) for name in ("step-0", "step-0/extra.pt", "step-1")
    ]


def test_a_rank_that_saved_alone(tmp_path: Path) -> None:
    metadata = saved(tmp_path, "nvmeio") / ".metadata"
    metadata.rename(tmp_path / "__0.metadata")
    done = run("verify", tmp_path)
    assert done.exit_code == 0 and f"{tmp_path}/__0.metadata: whole" in done.stdout


@both_writers
def test_one_data_file(writer: str, tmp_path: Path) -> None:
    path = saved(tmp_path, writer) / "__0_0.distcp"
    assert run("verify", path).exit_code == 0
    flip(path, path.stat().st_size // 2)
    done = run("verify", path)
    assert done.exit_code == 1 and f"{path}: DAMAGED" in done.stdout
    shutil.copy(path, tmp_path / "__9_9.distcp")
    done = run("verify", tmp_path / "__9_9.distcp")
    assert done.exit_code == 1 and "names no item in it" in done.stdout


def test_files_of_other_saves_are_named(tmp_path: Path) -> None:
    saved(tmp_path, "torch")
    (tmp_path / "__7_0.distcp").write_bytes(b"half")
    done = run("verify", tmp_path)
    assert done.exit_code == 0 and "(not part of it: __7_0.distcp)" in done.stdout


# Damaged ones


@pytest.mark.slow
@both_writers
def test_a_flipped_bit_anywhere_in_an_item_is_found(writer: str, tmp_path: Path) -> None:
    state = {"a": torch.randn(20), "b": torch.randn(3).bfloat16(), "n": [1, "two"]}
    metadata = dcp.save(state, storage_writer=WRITERS[writer](tmp_path))
    path = tmp_path / "__0_0.distcp"
    whole = path.read_bytes()
    chosen = random.Random(1)
    for index, info in metadata.storage_data.items():
        for at in chosen.sample(range(info.length), 60):
            path.write_bytes(whole)
            flip(path, info.offset + at)
            problems = verify(tmp_path / ".metadata").problems
            if not problems:  # fields that say nothing: of the central directory, of end records
                assert at > whole.index(b"PK\x01\x02", info.offset) - info.offset
                continue
            assert all(f"item '{index.fqn}" in problem.record for problem in problems), at


@both_writers
@pytest.mark.parametrize("name", ["large", "small", "step"])
def test_a_damaged_item_is_named(writer: str, name: str, tmp_path: Path) -> None:
    path = saved(tmp_path, writer) / "__0_0.distcp"
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    (info,) = (i for index, i in metadata.storage_data.items() if index.fqn == name)
    inner = path.read_bytes()[info.offset : info.offset + info.length]
    record = b"data.pkl" if name == "step" else b"data/0"
    flip(path, info.offset + inner.index(record) + 90)
    done = run("verify", tmp_path)
    assert done.exit_code == 1
    assert f"{tmp_path}: DAMAGED\n  __0_0.distcp: item '{name}': " in done.stdout
    told = json.loads(run("verify", "--json", tmp_path).stdout)["files"][0]
    assert (told["whole"], told["kind"]) == (False, "dcp")


@both_writers
def test_what_is_cut_off_or_gone_is_damage(writer: str, tmp_path: Path) -> None:
    path = saved(tmp_path, writer) / "__0_0.distcp"
    os.truncate(path, path.stat().st_size - 1)
    done = run("verify", tmp_path)
    assert done.exit_code == 1 and "and the file has" in done.stdout
    assert run("inspect", tmp_path).exit_code == 1
    path.unlink()
    done = run("verify", tmp_path)
    assert done.exit_code == 1
    assert "__0_0.distcp: it is missing; 3 items are in it" in done.stdout


@both_writers
def test_zeros_in_place_of_a_page_are_found(writer: str, tmp_path: Path) -> None:
    path = saved(tmp_path, writer) / "__0_0.distcp"
    for at in range(0, path.stat().st_size - 4096, 4096 * 50):
        whole = path.read_bytes()
        path.write_bytes(whole[:at] + bytes(4096) + whole[at + 4096 :])
        assert run("verify", tmp_path).exit_code == 1, at
        path.write_bytes(whole)
    assert run("verify", tmp_path).exit_code == 0


def test_a_save_that_did_not_end(tmp_path: Path) -> None:
    saved(tmp_path, "torch")
    (tmp_path / ".metadata").unlink()
    done = run("verify", tmp_path)
    assert done.exit_code == 1
    assert "there is no .metadata beside 1 data file: the save has not ended" in done.stdout
    (tmp_path / ".metadata").touch()
    done = run("verify", tmp_path)
    assert done.exit_code == 1 and "not a DCP metadata file, or damaged" in done.stdout
    assert run("verify", tmp_path / "none" / ".metadata").exit_code == 2


def test_metadata_that_says_something_else(tmp_path: Path) -> None:
    def other_dtype(metadata: Any) -> None:
        metadata.state_dict_metadata["small"].properties.dtype = torch.float64

    def no_place(metadata: Any) -> None:
        index = next(i for i in metadata.storage_data if i.fqn == "large")
        del metadata.storage_data[index]

    def larger(metadata: Any) -> None:
        metadata.state_dict_metadata["large"].size = torch.Size([1400, 600])

    def nowhere(metadata: Any) -> None:
        metadata.storage_data = None

    for number, (change, says) in enumerate(
        (
            (other_dtype, "a tensor of torch.float32 (20,), and the metadata says torch.float64"),
            (no_place, "item 'large': the metadata does not say where it lies"),
            (larger, "item 'large': its parts have 420000 of 840000 elements, (1400, 600)"),
            (nowhere, "the metadata does not say where the items lie"),
        )
    ):
        folder = saved(tmp_path / str(number), "nvmeio")
        change_metadata(folder, change)
        done = run("verify", folder)
        assert done.exit_code == 1 and says in done.stdout, done.stdout


def test_one_that_is_replaced_meanwhile_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of the one before were gone by then, which was no damage."""
    folder = saved(tmp_path / "1", "nvmeio")
    read = checking.read_stored
    calls: list[Path] = []

    def read_then_replace(path: Path) -> Any:
        stored = read(path)
        calls.append(path)
        if len(calls) == 1:
            saved(folder, "nvmeio")
        return stored

    monkeypatch.setattr(checking, "read_stored", read_then_replace)
    assert verify(folder / ".metadata").problems == []
    assert len(calls) > 2


# Ranks


@pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch is built without gloo"
)
@pytest.mark.parametrize("world", [2, 4])
def test_what_ranks_saved_together(world: int, tmp_path: Path) -> None:
    script = Path(__file__).parent / "_dcp_rank.py"
    ended = run_ranks(script, world, tmp_path, "save")
    assert [status for status, _ in ended] == [0] * world, "\n".join(out for _, out in ended)
    for writer in WRITERS:
        folder = tmp_path / writer
        done = run("verify", folder)
        assert done.exit_code == 0 and f"in {world} files" in done.stdout, done.output
        told = json.loads(run("inspect", "--json", folder).stdout)["files"][0]
        rows = [t for t in told["tensors"] if t["name"].startswith("rows[")]
        assert sum(t["shape"][0] for t in rows) == 1031 and len(rows) == world
        for file in sorted(folder.glob("*.distcp")):
            whole = file.read_bytes()
            flip(file, len(whole) // 2)
            done = run("verify", folder)
            assert done.exit_code == 1 and f"  {file.name}: item '" in done.stdout
            file.unlink()
            done = run("verify", folder)
            assert done.exit_code == 1 and f"  {file.name}: it is missing" in done.stdout
            file.write_bytes(whole)


# safetensors, which DCP writes too


@pytest.mark.parametrize("save_distributed", [False, True])
def test_safetensors_of_dcp(save_distributed: bool, tmp_path: Path) -> None:
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path), save_distributed=save_distributed)
    dcp.save({"a": torch.randn(30, 40), "b": torch.zeros(7)}, storage_writer=writer)
    done = run("verify", tmp_path)
    assert done.exit_code == 0 and "2 tensors" in done.stdout
    assert "structure only: the format has no checksums" in done.stdout
    (path,) = tmp_path.glob("*.safetensors")
    os.truncate(path, path.stat().st_size - 1)
    assert run("verify", tmp_path).exit_code == 1


# inspect, and what names the way to load


@both_writers
def test_inspect_shows_where_tensors_lie(writer: str, tmp_path: Path) -> None:
    """An error of zip archives was all that it showed."""
    state: dict[str, Any] = {
        "large": torch.randn(700, 600),
        "half": torch.randn(20).bfloat16(),
        "step": 7,
    }
    folder = saved(tmp_path / "1", writer, state)
    told = json.loads(run("inspect", "--json", folder).stdout)["files"][0]
    data = (folder / "__0_0.distcp").read_bytes()
    for tensor in told["tensors"]:
        wanted = state[tensor["name"]]
        assert tensor["record"] == "__0_0.distcp" and tensor["shape"] == list(wanted.shape)
        raw = data[tensor["offset"] : tensor["offset"] + tensor["nbytes"]]
        assert raw == bytes(wanted.view(torch.uint8).flatten().tolist())
    assert {record["name"] for record in told["records"]} == {f"__0_0.distcp: {k}" for k in state}
    done = run("inspect", folder)
    assert "2 tensors in 2 storages" in done.stdout and "1 object: step" in done.stdout
    assert "without checksums" not in done.stdout


def test_load_of_a_dcp_file_names_what_loads_it(tmp_path: Path) -> None:
    """It said that a zip64 end record was damaged."""
    saved(tmp_path, "torch")
    for name in ("__0_0.distcp", ".metadata"):
        with pytest.raises(NoCheckpointError, match=r"a file of a DCP checkpoint: .*NvmeStorageR"):
            nvmeio.load(tmp_path / name)
    with pytest.raises(IsADirectoryError, match=r"a DCP checkpoint: .*NvmeStorageReader\("):
        nvmeio.load(tmp_path)


def test_a_data_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Its directory was listed first, with an error that named nothing of ours."""
    with pytest.raises(nvmeio.TransferError, match=r"open .*__0_0\.distcp") as raised:
        verify(tmp_path / "none" / "__0_0.distcp")
    assert isinstance(raised.value, FileNotFoundError)
