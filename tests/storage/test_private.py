"""Private files: nobody else may read them, and nothing planted is followed."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from support import run_python

from nvmeio._storage.durable import allocate, reserve
from nvmeio._storage.untrusted import create, make_private_directory, open_nameless, open_own
from nvmeio.errors import TransferError


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_directory_is_made_for_this_user_only(tmp_path: Path) -> None:
    make_private_directory(tmp_path / "swap")
    assert mode_of(tmp_path / "swap") == 0o700
    (tmp_path / "swap").chmod(0o777)
    make_private_directory(tmp_path / "swap")
    assert mode_of(tmp_path / "swap") == 0o700


def test_a_directory_that_goes_as_it_is_found_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner, interrupted twice, was still removing it in a thread of his: ENOENT."""
    folder = tmp_path / "mine"
    folder.mkdir()
    real = os.open
    refused: list[str] = []

    def removed_first(path: str, *args: int) -> int:
        if not refused:
            refused.append(path)
            folder.rmdir()
        return real(path, *args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", removed_first)
        make_private_directory(folder)
    assert refused == [str(folder)]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with pytest.raises(TransferError, match="ENOENT"):
        make_private_directory(tmp_path / "none" / "mine")


def test_a_link_in_the_place_of_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(0o755)
    (tmp_path / "swap").symlink_to("elsewhere")
    with pytest.raises(TransferError, match="symbolic link"):
        make_private_directory(tmp_path / "swap")
    assert mode_of(tmp_path / "elsewhere") == 0o755


def test_a_directory_of_somebody_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "swap").mkdir(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match="belongs to user"):
        make_private_directory(tmp_path / "swap")
    assert mode_of(tmp_path / "swap") == 0o755


@pytest.mark.parametrize("what", ["link", "dangling", "pipe", "hard link", "directory"])
def test_what_was_planted_is_neither_followed_nor_changed(tmp_path: Path, what: str) -> None:
    victim, planted = tmp_path / "victim", tmp_path / "state.0"
    victim.write_bytes(b"precious")
    if what == "link":
        planted.symlink_to(victim)
    elif what == "dangling":
        planted.symlink_to("nothing")
    elif what == "pipe":
        os.mkfifo(planted)
    elif what == "hard link":
        os.link(victim, planted)
    else:
        planted.mkdir()
    before = mode_of(victim)
    with pytest.raises(TransferError):
        open_own(planted)
    with pytest.raises(FileExistsError):
        create(planted)
    assert victim.read_bytes() == b"precious" and mode_of(victim) == before
    assert not (tmp_path / "nothing").exists()


def test_a_file_of_ours_is_opened_and_becomes_private(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    for expected in (b"", b"12"):
        fd = open_own(path)
        assert os.read(fd, 10) == expected and mode_of(path) == 0o600
        os.pwrite(fd, b"12", 0)
        os.close(fd)
        path.chmod(0o666)


def test_room_is_reserved_and_a_file_never_becomes_smaller(tmp_path: Path) -> None:
    fd = create(tmp_path / "a")
    try:
        for wanted, size in ((10_000, 10_000), (100, 10_000), (0, 10_000)):
            reserve(fd, wanted, "a")
            assert os.fstat(fd).st_size == size
        with pytest.raises(TransferError):
            allocate(fd, 1 << 62, "a")
    finally:
        os.close(fd)


def test_allocating_goes_on_after_a_signal(tmp_path: Path) -> None:
    """One of two copies of this took EINTR for a failure."""
    done = run_python(
        """
        import ctypes, errno, os
        from nvmeio._storage import durable
        calls = []
        class Interrupted:
            def fallocate(self, *args):
                calls.append(args)
                if len(calls) < 3:
                    ctypes.set_errno(errno.EINTR)
                    return -1
                return 0
        durable._libc = Interrupted()
        print(durable.allocate(1, 4096, "x"), len(calls))
        """
    )
    assert (done.stdout.split(), done.stderr) == (["True", "3"], "")


def test_spilled_weights_are_private(tmp_path: Path) -> None:
    from nvmeio.inference.spilling import Spiller

    with Spiller(tmp_path) as spiller:
        spiller.write(torch.nn.Linear(8, 8))
        (shard,) = spiller.path.iterdir()
        assert (mode_of(spiller.path), mode_of(shard)) == (0o700, 0o600)
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_the_place_of_a_file_without_a_name_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between making it and opening it for transfers, where others may write in the directory."""
    others = tmp_path / "others"
    others.write_bytes(b"kept")
    real = tempfile.mkstemp

    def replaced(*args: Any, **named: Any) -> tuple[int, str]:
        fd, name = real(*args, **named)
        os.unlink(name)
        os.symlink(others, name)
        return fd, name

    monkeypatch.setattr(tempfile, "mkstemp", replaced)
    with pytest.raises(TransferError, match="another file was put in the place"):
        open_nameless(tmp_path)
    assert others.read_bytes() == b"kept"
    assert os.listdir(tmp_path) == ["others"]
