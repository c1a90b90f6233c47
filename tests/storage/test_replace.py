"""What a replaced file leaves to the new one, and what nobody may put in the way."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import nvmeio
from nvmeio import tuned
from nvmeio._storage import replace
from nvmeio._storage import replace as replace_module
from nvmeio._storage.replace import Replacement, replace_file
from nvmeio.engines.base import Options
from nvmeio.errors import TransferError

USER_OBJ, USER, GROUP_OBJ, GROUP, MASK, OTHER = 1, 2, 4, 8, 16, 32
NOBODY = 0xFFFFFFFF
ACL = "system.posix_acl_access"


def acl_of(*entries: tuple[int, int, int]) -> bytes:
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


# User 4321 may read and write, the owning group nothing; the mask shows as rw in the mode.
SHARED = acl_of(
    (USER_OBJ, 6, NOBODY),
    (USER, 6, 4321),
    (GROUP_OBJ, 0, NOBODY),
    (MASK, 6, NOBODY),
    (OTHER, 0, NOBODY),
)


def set_or_skip(path: Path, name: str, value: bytes) -> None:
    try:
        os.setxattr(path, name, value)
    except OSError as refused:
        pytest.skip(f"no {name} here: {refused}")


def save(path: Path) -> None:
    nvmeio.save({"a": torch.arange(100)}, path)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt"
    path.write_bytes(b"old")
    path.chmod(0o640)
    return path


def test_an_acl_is_carried_over(old: Path) -> None:
    """It was gone, and its mask had become the permission of the owning group."""
    set_or_skip(old, ACL, SHARED)
    assert stat.S_IMODE(old.stat().st_mode) == 0o660
    save(old)
    assert os.getxattr(old, ACL) == SHARED
    assert nvmeio.load(old)["a"].sum() == 4950


def test_an_acl_that_cannot_be_carried_over_leaves_no_more_than_it_granted(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_or_skip(old, ACL, SHARED)
    real = os.setxattr

    def refuse(file: Any, name: str, value: bytes) -> None:
        if name == ACL:
            raise OSError(95, "Operation not supported")
        real(file, name, value)

    monkeypatch.setattr(replace_module.os, "setxattr", refuse)
    save(old)
    assert stat.S_IMODE(old.stat().st_mode) == 0o600
    assert ACL not in os.listxattr(old)


def test_what_the_directory_gives_new_files_is_not_added(tmp_path: Path, old: Path) -> None:
    """A default ACL made the temporary file, and with it the new one, wider than the old one."""
    set_or_skip(tmp_path, "system.posix_acl_default", SHARED)
    save(old)
    assert stat.S_IMODE(old.stat().st_mode) == 0o640
    assert ACL not in os.listxattr(old)


def test_extended_attributes_are_carried_over(old: Path) -> None:
    set_or_skip(old, "user.origin", b"run 17")
    save(old)
    assert os.getxattr(old, "user.origin") == b"run 17"
    assert stat.S_IMODE(old.stat().st_mode) == 0o640


def test_a_group_that_cannot_be_carried_over_loses_its_permissions(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old.chmod(0o664)
    real = os.stat

    def of_another_group(path: Any, **named: Any) -> os.stat_result:
        facts = real(path, **named)
        if os.fspath(path) != str(old):
            return facts
        return os.stat_result((*facts[:5], facts.st_gid + 1, *facts[6:]))

    def refuse(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(replace_module.os, "stat", of_another_group)
    monkeypatch.setattr(replace_module.os, "fchown", refuse)
    with open(old.parent / "new", "w") as new:
        replace_module.take_over(new.fileno(), str(old))
    assert stat.S_IMODE(real(old.parent / "new").st_mode) == 0o644


def test_a_symbolic_link_stays_and_other_names_keep_the_old_file(tmp_path: Path, old: Path) -> None:
    link, other = tmp_path / "link.pt", tmp_path / "other.pt"
    link.symlink_to(old.name)
    os.link(old, other)
    save(link)
    assert link.is_symlink() and nvmeio.load(old)["a"].sum() == 4950
    assert other.read_bytes() == b"old"


def test_a_planted_link_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody who may write in the directory has guessed the temporary file's name."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    names = iter([str(tmp_path / ".a.1-00000000.nvmeio-tmp"), str(tmp_path / ".a.1-1.nvmeio-tmp")])
    monkeypatch.setattr(replace, "temporary_name", lambda *_: next(names))
    os.symlink(victim, tmp_path / ".a.1-00000000.nvmeio-tmp")
    replace_file(tmp_path / "a", [memoryview(b"new")])
    assert victim.read_bytes() == b"precious" and (tmp_path / "a").read_bytes() == b"new"


def test_a_temporary_file_that_cannot_be_locked_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where somebody else had locked it another one was made, and the first one stayed."""
    refused: list[int] = []

    def flock(fd: int, operation: int) -> None:
        if not refused:
            refused.append(fd)
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(replace.fcntl, "flock", flock)
    with Replacement(tmp_path / "a") as replacement:
        replacement.commit()
    assert refused
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_file_put_in_the_place_of_the_temporary_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    real = replace.files.open

    def swapped(path: str, mode: str) -> nvmeio.File:
        os.unlink(path)
        os.symlink(victim, path)
        return real(path, mode)

    monkeypatch.setattr(replace.files, "open", swapped)
    with (
        pytest.raises(TransferError, match="in the place of the temporary one"),
        Replacement(tmp_path / "a") as replacement,
    ):
        _ = replacement.file
    monkeypatch.undo()
    assert victim.read_bytes() == b"precious"


def test_tuned_settings_are_not_written_through_a_link_to_a_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link in the place of tuned.json itself stays, as of every file that is replaced."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "nvmeio").mkdir()
    (tmp_path / "dotfiles.json").write_text('{"format": 1, "file_systems": {}}')
    (tmp_path / "nvmeio" / "tuned.json").symlink_to("../dotfiles.json")
    tuned.save(tmp_path, tuned.Tuned(Options()))
    assert (tmp_path / "nvmeio" / "tuned.json").is_symlink()
    assert tuned.find(tmp_path) is not None
    assert sorted(os.listdir(tmp_path / "nvmeio")) == ["tuned.json"]


# A small file, in one call of the shim


@pytest.fixture(scope="module", params=["sent", "synchronised"])
def faults(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What came of each fault of the C library, where bytes are sent in order, or synchronised."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler (cc, gcc) to build the faulty calls with")
    folder = tmp_path_factory.mktemp("faults")
    library = folder / "faulty_files.so"
    source = Path(__file__).parents[1] / "fakes" / "faulty_files.c"
    flags = ("-std=c11", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-ldl")
    subprocess.run([compiler, "-o", library, source, *flags], check=True, timeout=300)
    files = folder / "files"
    files.mkdir()
    root = Path(nvmeio.__file__).parents[1]
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("_faulty_files.py")), files, request.param],
        env={**os.environ, "PYTHONPATH": str(root), "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return request.param, json.loads(ran.stdout)


def test_the_order_of_a_small_files_steps(faults: Any) -> None:
    """Data durable, or sent where a journal keeps the order; renamed; name durable."""
    way, found = faults
    first = "sync_file_range" if way == "sent" else "fdatasync"
    calls = ["flock", "pwritev", first, "rename", "flock", "fsync"]  # and no fchmod to the same
    assert found["usual"]["calls"] == calls
    assert found["nothing can be sent"]["calls"] == (
        [*calls[:3], "fdatasync", *calls[3:]] if way == "sent" else calls
    )


def test_a_small_file_is_the_old_one_or_the_new_one(faults: Any) -> None:
    for what, result in faults[1].items():
        assert result["names"] == ["file"], what
        assert result["descriptors"] == faults[1]["usual"]["descriptors"], what
        stays = result["error"] and what != "fsync fails"  # that of the directory comes after
        assert result["left"] == ("old" if stays else "new"), what


def test_what_a_small_file_fails_with(faults: Any) -> None:
    way, found = faults
    first = "sync_file_range" if way == "sent" else "fdatasync"
    operations = {"pwritev": "pwrite", first: "fsync", "rename": "rename", "fsync": "fsync"}
    errors = {what: result["error"] for what, result in found.items() if result["error"]}
    assert errors == {
        f"{call} fails": [errno.EIO, operation] for call, operation in operations.items()
    }
    if way == "sent":  # a failed write is told once: an fsync behind would say nothing of it
        assert "fdatasync" not in found["sync_file_range fails"]["calls"]


def test_a_small_file_that_another_save_takes_is_made_anew(faults: Any) -> None:
    for what in ("stolen", "locked by another"):
        calls = faults[1][what]["calls"]
        assert calls.count("flock") > 2 and calls.count("pwritev") == 1, what


def test_a_small_file_with_more_than_a_mode_goes_the_long_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    took: list[str] = []
    real = replace_module._replace_by_steps
    monkeypatch.setattr(
        replace_module,
        "_replace_by_steps",
        lambda path, *how: (took.append(path), real(path, *how)),
    )
    monkeypatch.setattr(replace_module, "is_local", lambda path: True)
    path = tmp_path / "model.pt"
    for mode in (0o644, 0o640, 0o640):
        save(path)
        path.chmod(mode)
    save(path)
    assert not took and stat.S_IMODE(path.stat().st_mode) == 0o640
    set_or_skip(path, "user.origin", b"run 17")
    save(path)
    assert took == [str(path)] and os.getxattr(path, "user.origin") == b"run 17"
    (tmp_path / ".left.1-00000000.nvmeio-tmp").touch()
    path.unlink()
    save(path)
    assert len(took) == 2 and os.listdir(tmp_path) == ["model.pt"]
    monkeypatch.setattr(replace_module, "is_local", lambda path: False)
    save(path)
    assert len(took) == 3 and nvmeio.load(path)["a"].sum() == 4950


def test_a_small_file_that_fails_leaves_no_garbage_that_crashes(tmp_path: Path) -> None:
    """cffi 2.1.1 crashes where an `ffi.from_buffer` of a memoryview is collected in a cycle."""
    program = """
import errno, gc, resource, sys
from nvmeio._storage import replace
replace.is_local = lambda path: True
resource.setrlimit(resource.RLIMIT_FSIZE, (4, 4))
for number in range(20):
    try:
        replace.replace_file(sys.argv[1], [memoryview(b"some bytes")])
    except OSError as failed:
        assert failed.errno == errno.EFBIG and failed.operation == "pwrite"
        failed.itself = failed  # its frames, and what is in them
    gc.collect()
"""
    command = [sys.executable, "-c", program, str(tmp_path / "file")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
