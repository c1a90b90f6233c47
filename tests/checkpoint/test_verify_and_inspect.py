"""`nvmeio verify` and `nvmeio inspect`, and what they stand on."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import struct
import warnings
import zipfile
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint._archives import records_of, write_records
from checkpoint._objects import SAFE, UNSAFE, Holder, noise
from rich.console import Console
from support import run_python
from typer.testing import CliRunner, Result

import nvmeio
from nvmeio._formats.sniff import NoCheckpointError
from nvmeio.checkpoint import describing, verifying
from nvmeio.checkpoint.describing import TensorFacts, alignment_of, describe
from nvmeio.checkpoint.verifying import verify
from nvmeio.cli import app, checkpoints
from nvmeio.cli.checkpoints import _table_of_records, _table_of_tensors, checkpoints_in


def run(command: str, *arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [command, *map(str, arguments)])


def flip(path: Path, at: int, mask: int = 0x10) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ mask]))


SAVES = {"nvmeio": nvmeio.save, "torch": torch.save}


# verify


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("kind", [*SAFE, *UNSAFE])
def test_whole_checkpoints_are_whole(save: str, kind: str, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        SAVES[save]({**SAFE, **UNSAFE}[kind](), path)
    verdict = verify(path)
    assert verdict.problems == [] and verdict.unchecked == 0
    assert verdict.records == len(zipfile.ZipFile(path).infolist())


@pytest.mark.parametrize("save", SAVES)
def test_a_flipped_bit_anywhere_in_a_record_is_found(save: str, path: Path) -> None:
    """One byte in 3 of a small file of torch, one in 71 of ours, which is mostly padding."""
    SAVES[save]({"a": noise(20), "b": [noise(3), 7]}, path)
    whole = path.read_bytes()
    end = zipfile.ZipFile(path).start_dir
    starts = [(info.header_offset, info.filename) for info in zipfile.ZipFile(path).infolist()]
    chosen = random.Random(1)
    with nvmeio.AioHandle() as handle:
        for at in range(0, end, 3 if save == "torch" else 71):
            path.write_bytes(whole)
            flip(path, at, 1 << chosen.randrange(8))
            name = [name for start, name in starts if start <= at][-1]
            if at < 4:  # nothing tells any more that it is an archive
                with pytest.raises(NoCheckpointError):
                    verify(path, handle=handle)
                continue
            problems = verify(path, handle=handle).problems
            assert problems, (at, name)
            assert any(name in problem.record + problem.what for problem in problems), (at, name)


def test_a_flipped_bit_in_a_large_record_is_found(path: Path) -> None:
    nvmeio.save({"a": noise(5_000_000), "b": noise(6_000_001, dtype=torch.uint8)}, path)
    entries = zipfile.ZipFile(path).infolist()
    for at in (100_000, 8 << 20, (8 << 20) - 1, 19_999_000, 25_000_000):
        flip(path, at)
        (name,) = {p.record for p in verify(path).problems}
        flip(path, at)
        assert name == [e.filename for e in entries if e.header_offset <= at][-1]
    assert verify(path).problems == []


def test_a_file_cut_off_is_damaged(path: Path) -> None:
    nvmeio.save({"a": noise(300_000)}, path)
    os.truncate(path, 1_000_000)
    (problem,) = verify(path).problems
    assert "truncated" in problem.what


def test_records_without_checksums_are_counted(path: Path) -> None:
    nvmeio.save({"a": noise(300), "b": noise(400), "none": torch.empty(0)}, path, checksum=False)
    verdict = verify(path)
    assert (verdict.unchecked, verdict.problems) == (2, [])
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": noise(300)}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    verdict = verify(path)
    assert (verdict.unchecked, verdict.problems) == (verdict.records, [])


# zlib.crc32 of these four bytes is 0.
ZERO_CRC = torch.tensor([0x9D, 0x0A, 0xD9, 0x6D], dtype=torch.uint8)


@pytest.mark.parametrize("beside", [0, 1])
def test_a_checksum_that_is_0(beside: int, path: Path) -> None:
    """It was taken for none."""
    nvmeio.save([ZERO_CRC, *[noise(300)] * beside], path)
    names = [record.name for record in describe(path).records if record.crc32 is None]
    assert names == []
    done = run("inspect", "--records", path)
    assert re.search(r"archive/data/0 +4 .+ 00000000", done.stdout)
    assert "without" not in done.stdout
    assert (verify(path).unchecked, verify(path).problems) == (0, [])
    if beside:  # alone it cannot be told from one that was not computed
        at = [i.header_offset for i in zipfile.ZipFile(path).infolist() if "data/1" in i.filename]
        flip(path, path.read_bytes().index(bytes(ZERO_CRC.tolist()), 0, at[0]))
        (problem,) = verify(path).problems
        assert problem.record == "archive/data/0" and "should be 0x00000000" in problem.what


def test_archives_that_another_tool_packed(path: Path) -> None:
    """Fields and times of its own are no damage."""
    nvmeio.save({"a": noise(300)}, path)
    write_records(path, records_of(path))
    assert verify(path).problems == []


def test_a_pickle_that_says_something_else_than_the_archive(path: Path) -> None:
    nvmeio.save({"a": noise(300)}, path)
    records = records_of(path)
    write_records(path, {**records, "archive/data/0": bytes(100)})
    (problem,) = verify(path).problems
    assert "another size" in problem.what and "data/0" in problem.what


def test_progress_is_told_to_the_last_byte(path: Path) -> None:
    nvmeio.save({"a": noise(6_000_000)}, path)
    told: list[int] = []
    verify(path, progress=told.append)
    assert sum(told) == path.stat().st_size and len(told) > 2


def test_memory_is_bounded(path: Path) -> None:
    ran = run_python(
        f"""
        import torch, nvmeio, nvmeio.checkpoint
        from nvmeio.checkpoint.verifying import verify
        def peak():
            with open("/proc/self/status") as status:
                return next(int(l.split()[1]) << 10 for l in status if l.startswith("VmHWM"))
        nvmeio.save({{"a": torch.ones(1)}}, {str(path)!r})
        verify({str(path)!r})
        state = {{"a": torch.ones(60 << 20)}}
        nvmeio.save(state, {str(path)!r})
        del state
        with open("/proc/self/clear_refs", "w") as clear:
            clear.write("5")
        before = peak()
        assert not verify({str(path)!r}).problems
        print((peak() - before) >> 20)
        """,
        fresh=True,
    )
    path.unlink()
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) <= 96


# The command


def test_verify_says_whole(path: Path) -> None:
    nvmeio.save({"a": noise(300)}, path)
    done = run("verify", path)
    assert done.exit_code == 0 and done.stderr == ""
    assert re.fullmatch(rf"{re.escape(str(path))}: whole, \d+ records, .+ KiB\n", done.stdout)


def test_verify_names_the_damaged_record(path: Path, tmp_path: Path) -> None:
    nvmeio.save({"a": noise(300), "b": noise(4000)}, path)
    other = tmp_path / "other.pt"
    nvmeio.save({"a": 1}, other)
    at = [i for i in zipfile.ZipFile(path).infolist() if i.filename.endswith("data/1")]
    flip(path, at[0].header_offset + 5000)
    done = run("verify", other, path)
    assert done.exit_code == 1
    assert f"{path}: DAMAGED\n  archive/data/1: its CRC-32 is 0x" in done.stdout
    assert f"{other}: whole" in done.stdout
    told = json.loads(run("verify", "--json", path).stdout)
    assert told["files"][0]["whole"] is False
    assert told["files"][0]["problems"][0]["record"] == "archive/data/1"


def test_verify_of_what_is_none(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no checkpoint")
    torch.save({"a": noise(3)}, tmp_path / "legacy", _use_new_zipfile_serialization=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        torch.jit.save(torch.jit.trace(lambda x: x * 2, torch.ones(2)), str(tmp_path / "script"))
    for name, says in (
        ("text", "no checkpoint"),
        ("legacy", "no checksums"),
        ("script", "TorchScript"),
        ("missing", "No such file"),
    ):
        done = run("verify", tmp_path / name)
        assert (done.exit_code, done.stdout) == (2, "")
        assert says in done.stderr and name in done.stderr


def test_verify_of_a_directory(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert run("verify", empty).exit_code == 2
    (tmp_path / "step-00000001").mkdir()
    for name in ("b.pt", "a.pt", "step-00000001/rank-00000.pt"):
        nvmeio.save({"a": noise(3)}, tmp_path / name)
    (tmp_path / "latest").symlink_to("b.pt")
    (tmp_path / "notes.txt").write_text("text")
    (tmp_path / ".hidden.pt").write_bytes(b"PK\x03\x04 half of a checkpoint")
    done = run("verify", tmp_path)
    assert done.exit_code == 0
    told = [Path(line.split(":")[0]).relative_to(tmp_path) for line in done.stdout.splitlines()]
    assert list(map(str, told)) == ["a.pt", "b.pt", "step-00000001/rank-00000.pt"]


def test_verify_of_a_directory_leaves_out_nothing_that_was_lost(tmp_path: Path) -> None:
    """An empty model.pt was passed over, and so was what could not be read."""
    nvmeio.save({"a": noise(3)}, tmp_path / "a.pt")
    (tmp_path / "b.pt").touch()
    done = run("verify", tmp_path)
    assert done.exit_code == 2
    assert f"{tmp_path / 'a.pt'}: whole" in done.stdout
    assert f"{tmp_path / 'b.pt'} is empty" in done.stderr


def test_links_that_lead_round_in_circles(tmp_path: Path) -> None:
    """Two links to the directory itself: each level was looked at twice, forty levels deep."""
    nvmeio.save({"a": noise(3)}, tmp_path / "a.pt")
    (tmp_path / "below").mkdir()
    for name in ("one", "two", "below/up"):
        (tmp_path / name).symlink_to(tmp_path)
    (tmp_path / "round").symlink_to("round")  # pathlib's own way to resolve it raised RuntimeError
    assert list(checkpoints_in(tmp_path)) == [tmp_path / "a.pt"]


def test_a_file_that_cannot_be_read_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.pt"
    nvmeio.save({"a": noise(3)}, path)

    def fail(*_: Any) -> Any:
        raise nvmeio.TransferError(errno.EIO, operation="open", path=str(path))

    monkeypatch.setattr(checkpoints, "kind_of", fail)
    monkeypatch.setattr(verifying, "kind_of", fail)
    done = run("verify", tmp_path)
    assert done.exit_code == 1 and "cannot be read" in done.stdout


def safetensors_file(path: Path) -> bytes:
    header = json.dumps(
        {"w": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, "__metadata__": {}}
    ).encode()
    whole = struct.pack("<Q", len(header)) + header + bytes(12)
    path.write_bytes(whole)
    return whole


def test_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    whole = safetensors_file(path)
    done = run("verify", path)
    assert done.exit_code == 0 and "whole, 1 tensor," in done.stdout
    assert "structure only" in done.stdout
    (tensor,) = describe(path).tensors
    assert tensor == TensorFacts("w", "BF16", (2, 3), 12, "", len(whole) - 12, "cpu")
    assert "2x3" in run("inspect", path).stdout
    path.write_bytes(whole[:-1])
    assert run("verify", path).exit_code == 1
    assert run("inspect", path).exit_code == 1


@pytest.mark.parametrize("look", ["verify", "inspect"])
def test_one_file_is_looked_at_though_its_link_changes(
    look: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The format was found in one file, and another one by then was checked for it: DAMAGED."""
    nvmeio.save(noise(100), tmp_path / "1")
    nvmeio.save_safetensors({"a": noise(300)}, tmp_path / "2")
    latest = tmp_path / "latest"
    latest.symlink_to("1")
    for module in (verifying, describing):
        kind_of = module.kind_of

        def change_then(found: Any, kind_of: Any = kind_of) -> Any:
            kind = kind_of(found)
            latest.unlink()
            latest.symlink_to("2")
            return kind

        monkeypatch.setattr(module, "kind_of", change_then)
    facts = verify(latest) if look == "verify" else describe(latest)
    assert facts.kind == "torch" and facts.nbytes == (tmp_path / "1").stat().st_size
    assert not getattr(facts, "problems", [])


# inspect


@pytest.mark.parametrize("save", SAVES)
def test_inspect_tells_where_every_tensor_lies(save: str, path: Path) -> None:
    wanted = {"model": SAFE["tied"](), "list": [noise(3, 4, dtype=torch.bfloat16), 5]}
    SAVES[save](wanted, path)
    found = {tensor.name: tensor for tensor in describe(path).tensors}
    reader: Any = torch._C.PyTorchFileReader(str(path))
    assert list(found) == [f"model.{name}" for name in wanted["model"]] + ["list.0"]
    for name, tensor in found.items():
        group, _, key = name.partition(".")
        real: torch.Tensor = wanted["model"][key] if group == "model" else wanted["list"][0]
        assert tensor.dtype == str(real.dtype).removeprefix("torch.")
        assert (tensor.shape, tensor.nbytes) == (tuple(real.shape), real.nbytes)
        start = reader.get_record_offset(tensor.record.split("/", 1)[1])
        assert tensor.offset == start + real.storage_offset() * real.element_size()


def test_inspect_runs_and_reads_nothing(path: Path) -> None:
    nvmeio.save({"held": Holder(noise(300)), "w": UNSAFE["wrapped"]()}, path)
    description = describe(path)
    names = {tensor.name for tensor in description.tensors}
    assert names == {"held.tensor", "w.two.a", "w.two.b", "w.beside"}
    assert any(name.endswith("Holder") for name in description.forbidden)
    assert "weights_only=True refuses it" in run("inspect", path).stdout
    nvmeio.save(SAFE["training"](), path)
    assert describe(path).forbidden == []


def test_inspect_in_json(path: Path) -> None:
    nvmeio.save({"a": noise(300)}, path)
    done = run("inspect", "--json", path)
    told = json.loads(done.stdout)
    assert (done.exit_code, done.stderr) == (0, "")
    assert told["kind"] == "torch" and told["nbytes"] == path.stat().st_size
    (tensor,) = told["tensors"]
    assert tensor["shape"] == [300] and tensor["alignment"] >= 64
    data = [record for record in told["records"] if record["name"] == tensor["record"]]
    assert data[0]["nbytes"] == 1200 and data[0]["crc32"] is not None


def test_inspect_of_a_directory(tmp_path: Path) -> None:
    """It was an error."""
    assert run("inspect", tmp_path).exit_code == 2
    nvmeio.save({"a": noise(3)}, tmp_path / "one.pt")
    nvmeio.save({"b": noise(4), "c": noise(5)}, tmp_path / "two.pt")
    (tmp_path / "notes.txt").write_text("text")
    done = run("inspect", tmp_path)
    assert (done.exit_code, done.stderr) == (0, "")
    assert re.search(r"one\.pt: torch, .+, 1 tensor in 1 storage\n", done.stdout)
    assert re.search(r"two\.pt: torch, .+, 2 tensors in 2 storages\n", done.stdout)
    told = json.loads(run("inspect", "--json", tmp_path).stdout)["files"]
    assert [len(file["tensors"]) for file in told] == [1, 2]
    (tmp_path / "cut.pt").write_bytes(b"PK\x03\x04 half of a checkpoint")
    done = run("inspect", tmp_path)
    assert done.exit_code == 1 and "cut.pt" in done.stderr and "two.pt" in done.stdout


def test_inspect_as_a_table(path: Path) -> None:
    nvmeio.save({"a": noise(300, 2), "b": torch.tensor(1)}, path, checksum=False)
    done = run("inspect", path)
    assert done.exit_code == 0
    assert re.search(r"a +float32 +300x2 +2.3 KiB +\d+ +\d+ (B|KiB) +archive/data/0", done.stdout)
    assert re.search(r"b +int64 +scalar", done.stdout)
    assert "written without checksums" in done.stdout
    done = run("inspect", "--records", path)
    assert re.search(r"archive/data/0 +2400 +\d+ .+none", done.stdout)
    assert re.search(r"archive/data.pkl +\d+ .+[0-9a-f]{8}", done.stdout)


@pytest.mark.parametrize(
    ("content", "status"), [(b"text", 2), (None, 2), (b"PK\x03\x04" + b"x" * 100, 1)]
)
def test_inspect_of_what_cannot_be(content: bytes | None, status: int, path: Path) -> None:
    if content is not None:
        path.write_bytes(content)
    done = run("inspect", path)
    assert (done.exit_code, done.stdout) == (status, "")
    assert path.name in done.stderr


def test_a_pickle_that_doubles_at_every_level(path: Path) -> None:
    """Each tuple holds the one before twice: 2**60 names, were they all told."""
    value: Any = (noise(2),)
    for _ in range(60):
        value = (value, value)
    torch.save(value, path)
    assert len(describe(path).tensors) == 1


def test_a_pickle_as_deep_as_it_is_long(path: Path) -> None:
    """Each level's name has that of all above: the names must not take the square of the file."""
    deep = b"K\x01" + b"\x85" * 100_000
    write_records(path, {"a/data.pkl": b"\x80\x02" + deep + b".", "a/version": b"3\n"})
    assert describe(path).tensors == []


def test_names_do_nothing_to_the_terminal(path: Path) -> None:
    """Brackets are no markup, escapes no colours, colons no pictures: they are the name."""
    names = ["layer[0][/red]", "[bold]x", "\x1b[31mred", "a\nb", "ü", "root:x:0"]
    nvmeio.save({name: noise(2) for name in names}, path)
    done = run("inspect", path)
    assert done.exit_code == 0 and "\x1b" not in done.stdout
    for shown in ("layer[0][/red]", "[bold]x", r"\x1b[31mred", r"a\nb", "ü", "root:x:0"):
        assert f"\n{shown} " in done.stdout.replace("\n ", "\n"), shown
    nvmeio.save_safetensors({name: noise(2) for name in names}, path.with_suffix(".safetensors"))
    done = run("inspect", path.with_suffix(".safetensors"))
    assert done.exit_code == 0 and "layer[0][/red]" in done.stdout
    path.write_text("root:x:0:0:root:/root:/bin/bash")
    assert "begins with b'root:x:0'" in run("verify", path).stderr


def test_alignments() -> None:
    assert [alignment_of(n) for n in (0, 1, 64, 4096, 12288, 1 << 30)] == [
        *(2 << 20, 1, 64, 4096, 4096, 2 << 20)
    ]


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_both_take_several_paths_and_say_the_same_of_what_is_none(
    command: str, tmp_path: Path
) -> None:
    nvmeio.save({"a": noise(3)}, tmp_path / "one.pt")
    nvmeio.save({"b": noise(4)}, tmp_path / "two.pt")
    (tmp_path / "cut.pt").write_bytes(b"PK\x03\x04 half")
    missing, empty = tmp_path / "missing.pt", tmp_path / "empty"
    empty.mkdir()
    done = run(command, tmp_path / "one.pt", missing, empty, tmp_path / "two.pt")
    assert done.exit_code == 2
    assert f"{tmp_path}/one.pt: " in done.stdout and f"{tmp_path}/two.pt: " in done.stdout
    none, gone = done.stderr.splitlines()
    assert none == f"{empty}: it holds no checkpoint"
    assert gone.startswith(f"ENOENT: No such file or directory; open {missing}")
    damaged = run(command, tmp_path / "cut.pt")
    assert damaged.exit_code == 1
    told = (damaged.stdout + damaged.stderr).splitlines()
    assert told[0] == f"{tmp_path}/cut.pt: DAMAGED"
    assert told[1].startswith("  archive: no zip archive: ")


def test_a_narrow_terminal_gets_fewer_columns_and_whole_ones(path: Path) -> None:
    """In 60 columns types, shapes and offsets were cut to "float…", "300x…", "2621…"."""
    name = "model.layers.0.self_attn.q_proj.weight"
    nvmeio.save({name: noise(300, 2)}, path)
    for flags in ([], ["--records"]):
        (description,) = [describe(path)]
        table = _table_of_records if flags else _table_of_tensors
        output = StringIO()
        console = Console(file=output, width=60, force_terminal=True, color_system=None)
        console.print(table(description, 60))
        shown = output.getvalue()
        assert "…" not in shown
        assert max(map(len, shown.splitlines())) <= 60
        assert ("float32" in shown and "300x2" in shown) or flags


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_help_has_an_example_and_the_statuses(command: str) -> None:
    done = run(command, "--help")
    assert done.exit_code == 0
    assert f"nvmeio {command}" in done.stdout and "Exit status" in done.stdout


# An index of safetensors files


def sharded(directory: Path) -> Path:
    """Three files of a tensor each, and their index."""
    state = {name: noise(300) for name in "abc"}
    nvmeio.save_safetensors(state, directory / "model.safetensors", max_shard_size=1300)
    (index,) = directory.glob("*.index.json")
    assert len([*directory.glob("*.safetensors")]) == 3
    return index


def test_the_files_of_an_index_are_there_with_its_tensors(tmp_path: Path) -> None:
    """A missing file, or one of another save, was no damage to verify, which looked at no index."""
    index = sharded(tmp_path)
    for path in (index, tmp_path):
        done = run("verify", path)
        assert done.exit_code == 0, done.output
        assert f"{index}: whole, an index of 3 files, 3 tensors" in done.stdout
    assert len(json.loads(run("inspect", "--json", tmp_path).stdout)["files"]) == 3
    first, second, third = sorted(tmp_path.glob("*.safetensors"))
    held = first.read_bytes()
    first.write_bytes(second.read_bytes())
    third.unlink()
    done = run("verify", tmp_path)
    assert done.exit_code == 1
    assert f"{index}: DAMAGED" in done.stdout
    assert f"{first.name}: lacks 1 tensor that the index says is in it: 'a'" in done.stdout
    assert f"{third.name}: holds 1 tensor of the index, and is not there" in done.stdout
    first.write_bytes(held[:20])
    (problem, _) = verify(index).problems
    assert problem.record == first.name and "not a valid safetensors file" in problem.what


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": {"a": "../b.safetensors"}}'])
def test_an_index_that_is_none_is_damaged(text: str, tmp_path: Path) -> None:
    index = sharded(tmp_path)
    index.write_text(text)
    assert verify(index).problems
    index.unlink()
    with pytest.raises(FileNotFoundError):
        verify(index)
