"""`FastFileWriter` and `FastFileReader`: for code that can only change the file it names."""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import os
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from checkpoint._objects import SAFE, UNSAFE, assert_same, noise
from support import random_bytes, spin_until

import nvmeio
from nvmeio._io.inflight import WriteBehind
from nvmeio._memory import mappings


def names_in(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


# Writing


@pytest.mark.parametrize("kind", ["containers", "sizes", "training", "nothing"])
def test_one_call_is_enough(kind: str, path: Path) -> None:
    """Committed when torch.save is done: nobody closes the writer."""
    wanted = SAFE[kind]()
    torch.save(wanted, nvmeio.FastFileWriter(path))
    assert_same(torch.load(path), wanted)
    assert names_in(path.parent) == [path.name]
    assert zipfile.ZipFile(path).testzip() is None


def test_within_a_with_statement(path: Path) -> None:
    wanted = SAFE["tied"]()
    with nvmeio.FastFileWriter(path) as file:
        torch.save(wanted, file)
        assert file.closed
    assert_same(torch.load(path), wanted)
    with pytest.raises(nvmeio.ClosedError, match="complete"):
        file.write(b"more")


def test_the_legacy_format_wants_a_close(path: Path) -> None:
    """torch.save flushes it half-way, too: only closing tells that it is complete."""
    wanted = {"a": noise(1000), "b": [noise(3)]}
    with nvmeio.FastFileWriter(path) as file:
        torch.save(wanted, file, _use_new_zipfile_serialization=False)
        assert names_in(path.parent) != [path.name]
    assert_same(torch.load(path), wanted)


def test_any_bytes(path: Path) -> None:
    pieces = [random_bytes(n, n) for n in (0, 1, 4095, 4096, 70_000, 40 << 20, 3)]
    with nvmeio.FastFileWriter(path) as file:
        for piece in pieces:
            assert file.write(piece) == len(piece)
        file.flush()
    assert path.read_bytes() == b"".join(pieces)


def test_a_failed_save_leaves_the_old_file(path: Path) -> None:
    """torch.save ends the archive and flushes it all the same."""
    nvmeio.save({"old": 1}, path)
    for state in ({"a": lambda: None}, {"a": noise(1000), "b": Refuses()}):
        with pytest.raises(Exception, match=r"<lambda>|refuses"):
            torch.save(state, nvmeio.FastFileWriter(path))
        assert torch.load(path) == {"old": 1} and names_in(path.parent) == [path.name]


class Refuses:
    def __reduce__(self) -> Any:
        raise RuntimeError("it refuses")


def test_a_save_that_fails_between_its_storages(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvmeio.save({"old": 1}, path)
    writer = nvmeio.FastFileWriter(path)
    take = WriteBehind.write

    def fail_late(stream: WriteBehind, data: Any) -> int:
        if stream.position > 100_000:
            raise RuntimeError("interrupted")
        return take(stream, data)

    monkeypatch.setattr(WriteBehind, "write", fail_late)
    # Ending the archive fails too, and torch raises what failed last.
    with pytest.raises(RuntimeError, match=r"interrupted|unexpected pos"):
        torch.save({"a": noise(30_000), "b": noise(30_000, seed=1)}, writer)
    assert writer.closed
    writer.close()
    assert torch.load(path) == {"old": 1} and names_in(path.parent) == [path.name]


def test_torch_save_raises_what_the_drive_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not torch's own error of an archive that could not be ended."""
    torch.save({"old": 1}, path)
    writer = nvmeio.FastFileWriter(path)
    take = WriteBehind.write

    def full(stream: WriteBehind, data: Any) -> int:
        if stream.position > 100_000:
            raise nvmeio.TransferError(errno.ENOSPC, operation="pwrite", path=str(path))
        return take(stream, data)

    monkeypatch.setattr(WriteBehind, "write", full)
    with pytest.raises(nvmeio.TransferError, match="ENOSPC"):
        torch.save({"a": noise(30_000), "b": noise(30_000, seed=1)}, writer)
    assert writer.closed
    writer.close()
    assert torch.load(path) == {"old": 1} and names_in(path.parent) == [path.name]


def test_other_writers_are_told_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = nvmeio.FastFileWriter(path)

    def full(stream: WriteBehind, data: Any) -> int:
        raise nvmeio.TransferError(errno.ENOSPC, operation="pwrite", path=str(path))

    monkeypatch.setattr(WriteBehind, "write", full)
    for _ in range(2):
        with pytest.raises(nvmeio.TransferError, match="ENOSPC"):
            writer.write(b"text")
    writer.close()
    assert names_in(path.parent) == []


def test_saved_while_another_error_is_handled(path: Path) -> None:
    """The common `except KeyboardInterrupt: torch.save(…)`."""
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        torch.save({"a": 1}, nvmeio.FastFileWriter(path))
        writer = nvmeio.FastFileWriter(path.with_name("b.pt"))
    torch.save({"a": 2}, writer)
    assert torch.load(path) == {"a": 1} and torch.load(path.with_name("b.pt")) == {"a": 2}


def test_a_dropped_writer_replaces_nothing_and_says_so(path: Path) -> None:
    path.write_bytes(b"old")
    writer = nvmeio.FastFileWriter(path)
    writer.write(b"half")
    with pytest.warns(ResourceWarning, match="dropped, not closed") as told:
        del writer
        spin_until(lambda: gc.collect() >= 0 and bool(told.list))
    told.clear()  # a warning keeps what it is about
    spin_until(lambda: gc.collect() >= 0 and names_in(path.parent) == [path.name])
    assert path.read_bytes() == b"old"


def test_an_error_in_the_with_statement_discards(path: Path) -> None:
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError, match="in the body"), nvmeio.FastFileWriter(path) as file:
        file.write(b"half")
        raise RuntimeError("in the body")
    assert path.read_bytes() == b"old" and names_in(path.parent) == [path.name]


def test_what_is_committed_cannot_be_discarded(path: Path) -> None:
    writer = nvmeio.FastFileWriter(path)
    torch.save({"a": 1}, writer)
    writer.discard()
    assert torch.load(path) == {"a": 1} and names_in(path.parent) == [path.name]


def test_an_interrupted_save_gives_its_memory_back(path: Path) -> None:
    """torch's writer never lets go of the traceback of an interrupt within `write`."""
    state = {"weights": noise(1 << 20)}
    gc.collect()
    before = len(mappings.mapped)
    for after in range(3, 12):
        writer = nvmeio.FastFileWriter(path)
        left = [after]

        def trace(frame: FrameType, event: str, _: Any, left: list[int] = left) -> Any:
            if frame.f_code is not WriteBehind.write.__code__:
                return trace if event == "call" else None
            left[0] -= event == "line"
            if not left[0]:
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            with pytest.raises(KeyboardInterrupt):
                torch.save(state, writer)
        finally:
            sys.settrace(None)
        with contextlib.suppress(nvmeio.NvmeioError, OSError, ValueError):
            writer.close()
        del writer
    spin_until(lambda: gc.collect() >= 0 and len(mappings.mapped) <= before)


def test_an_archive_within_other_bytes_is_not_the_end(path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"a": noise(10)}, buffer)
    with nvmeio.FastFileWriter(path) as file:
        file.write(b"header ")
        file.write(buffer.getvalue())
        file.flush()
        assert not file.closed
        file.write(b" trailer")
    assert path.read_bytes() == b"header " + buffer.getvalue() + b" trailer"


def test_its_repr_tells_the_state(path: Path) -> None:
    with nvmeio.FastFileWriter(path) as file:
        file.write(b"abc")
        assert repr(file) == f"<nvmeio.FastFileWriter {str(path)!r} 3 bytes so far>"
    assert repr(file).endswith("closed>")
    with nvmeio.FastFileReader(path) as reader:
        reader.read(2)
        assert repr(reader) == f"<nvmeio.FastFileReader {str(path)!r} at byte 2 of 3>"
    assert repr(reader).endswith("closed>") and reader.closed


def test_the_callers_handle_stays_open(make_handle: Any, path: Path) -> None:
    handle = make_handle()
    wanted = {"a": noise(100_000), "b": noise(3)}
    torch.save(wanted, nvmeio.FastFileWriter(path, handle=handle))
    assert_same(torch.load(nvmeio.FastFileReader(path, handle=handle)), wanted)
    assert not handle.closed and handle.stats.in_flight == 0


# Reading


@pytest.mark.parametrize("kind", SAFE)
def test_torch_load_reads_through_it(kind: str, path: Path) -> None:
    wanted = SAFE[kind]()
    torch.save(wanted, path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated kinds of tensors
        assert_same(torch.load(nvmeio.FastFileReader(path)), wanted)


def test_what_takes_trust_and_the_legacy_format(path: Path) -> None:
    wanted = UNSAFE["user's classes"]()
    for zipped in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sources that it cannot retrieve
            torch.save(wanted, path, _use_new_zipfile_serialization=zipped)
        assert_same(torch.load(nvmeio.FastFileReader(path), weights_only=False), wanted)


def test_it_reads_as_a_file_does(path: Path) -> None:
    data = random_bytes(3_000_000).replace(b"\n", b"x")
    data = data[:1000] + b"\n" + data[1001:2_000_000] + b"\n" + data[2_000_001:]
    path.write_bytes(data)
    with nvmeio.FastFileReader(path) as ours, path.open("rb") as theirs:
        for step in (
            lambda f: f.read(10),
            lambda f: f.seek(-5, os.SEEK_END),
            lambda f: f.read(100),
            lambda f: f.read(),
            lambda f: f.seek(990),
            lambda f: f.readline(),
            lambda f: f.tell(),
            lambda f: f.read(0),
            lambda f: f.seek(5, os.SEEK_CUR),
            lambda f: f.read(1_500_000),
            lambda f: f.readline(),
            lambda f: f.read(None),
            lambda f: f.seek(10_000_000),
            lambda f: f.read(5),
            lambda f: f.readinto(bytearray(8)),
        ):
            assert step(ours) == step(theirs)
        with pytest.raises(ValueError, match="cannot seek"):
            ours.seek(-1)


def test_a_file_that_is_not_there(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        nvmeio.FastFileReader(path)


def test_program_ends_while_a_reader_is_open(tmp_path: Path) -> None:
    """It hung: the reader's handle was closed by a thread, when no thread runs any more."""
    nvmeio.save({"weight": torch.ones(4)}, tmp_path / "model.pt")
    program = """
import sys, nvmeio
reader = nvmeio.FastFileReader(sys.argv[1])
print(reader.seek(4))
"""
    command = [sys.executable, "-c", program, str(tmp_path / "model.pt")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "4\n", "")


@pytest.mark.parametrize("load", [nvmeio.load, nvmeio.FastFileReader])
def test_a_path_of_bytes_is_refused_with_the_remedy(load: Any, tmp_path: Path) -> None:
    """Of a directory, it was "cannot use a string pattern on a bytes-like object"."""
    with pytest.raises(TypeError, match=r"must be a str, not .*; os\.fsdecode"):
        load(os.fsencode(tmp_path))
