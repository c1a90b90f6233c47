"""Files that are read whole: pipes, devices and endless ones are refused, and nothing waits."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupting import everywhere
from support import new_descriptors, open_descriptors

import nvmeio
from nvmeio import tuned
from nvmeio._formats.safetensors import shards as safetensors_shards
from nvmeio._storage.untrusted import SETTINGS_BYTES, read_small
from nvmeio.checkpoint import _restoring as restoring
from nvmeio.checkpoint._directory import retention
from nvmeio.checkpoint.safetensors import _holds
from nvmeio.cli.tune import space
from nvmeio.errors import IntegrityError, TransferError
from nvmeio.integrations import accelerate as accelerating
from nvmeio.integrations._serving.sglang_settings import read_settings
from nvmeio.integrations.dcp import metadata
from nvmeio.offload._swap_files import manifests

LIMIT_S = 60


def within_limit(work: Callable[[], Any]) -> Any:
    """Do it in a thread, which hung for ever where a pipe was opened as any file."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((work(), None))
        except BaseException as failed:
            outcome.append((None, failed))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert outcome, "it hangs"
    value, failed = outcome[0]
    if failed is not None:
        raise failed
    return value


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def directory(path: Path) -> None:
    path.mkdir()


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(3 << 30)


HOSTILE = {
    "a pipe": pipe,
    "an endless device": endless,
    "a directory": directory,
    "too large": huge,
}
ERRNO = {
    "a pipe": errno.EINVAL,
    "an endless device": errno.EINVAL,
    "a directory": errno.EISDIR,
    "too large": errno.EFBIG,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_only_a_small_regular_file_is_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    HOSTILE[kind](path)
    with pytest.raises(OSError, match=str(path)) as raised:
        within_limit(lambda: read_small(path, SETTINGS_BYTES))
    assert raised.value.errno == ERRNO[kind]


def test_an_interrupt_leaves_no_descriptor(tmp_path: Path) -> None:
    """Between the open and what closed it one was lost: DCP's reader asks in the main thread."""
    path = tmp_path / "file"
    path.write_bytes(b"x")
    before = open_descriptors()
    places = sum(1 for _ in everywhere(lambda: read_small(path, 1)))
    assert places > 3
    assert new_descriptors(before) == {}


def test_a_file_of_the_most_bytes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for size in (0, 1, 5000):
        path.write_bytes(b"x" * size)
        assert read_small(path, 5000) == b"x" * size
    path.write_bytes(b"x" * 5001)
    with pytest.raises(OSError, match="it has 5001 bytes, and such a file at most 5000"):
        read_small(path, 5000)
    assert read_small("/proc/self/cmdline", 1 << 20)  # whose size is told as 0
    with pytest.raises(OSError, match="at most 1: "):
        read_small("/proc/self/cmdline", 1)


READERS: dict[str, tuple[str, Callable[[Path], Any], type[Exception]]] = {
    "an index of shards": ("i.json", lambda p: safetensors_shards.read_index(p), OSError),
    "an index of ranks": (
        retention.INDEX,
        lambda p: restoring.files_of(str(p.parent)),
        TransferError,
    ),
    "a manifest": (manifests.NAMES[0], lambda p: manifests.read(str(p.parent)), TransferError),
    "an index of accelerate": (
        "index.json",
        lambda p: accelerating.NvmeWeights(save_folder=p.parent),
        OSError,
    ),
    "settings of a server": ("settings.json", lambda p: read_settings(p), OSError),
    "a grid to tune": ("grid.json", lambda p: space.load_grid(p), ValueError),
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("reader", READERS)
def test_who_reads_a_file_whole_says_what_is_there_instead(
    reader: str, kind: str, tmp_path: Path
) -> None:
    """A pipe in the place of one hung its reader, and a link to an endless file took all memory."""
    name, read, error = READERS[reader]
    HOSTILE[kind](tmp_path / name)
    if (reader, kind) == ("an index of shards", "too large"):
        error = IntegrityError
    with pytest.raises(error, match=str(tmp_path)):
        within_limit(lambda: read(tmp_path / name))


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_optional_file_counts_as_missing(kind: str, tmp_path: Path) -> None:
    HOSTILE[kind](tmp_path / "file")
    assert within_limit(lambda: _holds(tmp_path / "file", b"text")) is False
    assert within_limit(lambda: metadata.referred_to(tmp_path / "file")) == set()


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_settings_are_an_error_where_they_are_asked_for(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`AioHandle.tuned` hung on a pipe; loads and saves go on without settings, and say
    once why."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "shared"))
    (tmp_path / "nvmeio").mkdir()
    HOSTILE[kind](tmp_path / "nvmeio" / "tuned.json")
    with pytest.raises(OSError, match=r"tuned\.json"):
        within_limit(lambda: nvmeio.AioHandle.tuned(tmp_path))
    nvmeio.save(torch.ones(21 << 20, dtype=torch.uint8), tmp_path / "file.pt")  # by a handle
    assert nvmeio.load(tmp_path / "file.pt").all()
    told = [record for record in caplog.records if "not using the stored settings" in record.msg]
    assert len(told) == 1
    with pytest.raises(OSError, match=r"tuned\.json"):
        within_limit(lambda: tuned.save(tmp_path, tuned.Tuned(tuned.Options())))


def test_settings_that_this_user_may_not_read_are_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They were left out without a word."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "shared"))

    def refused(path: Path, most: int) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(tuned, "read_small", refused)
    caplog.set_level("INFO", logger="nvmeio")
    for _ in range(2):
        assert tuned.find(tmp_path) is None
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2  # of the user's file and of the shared one
    assert "Permission denied" in told[0]
