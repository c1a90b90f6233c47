"""What a Checkpointer looks at before it saves anything: its directory, and what is in it."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from checkpoint._checkpointers import names, state_of
from checkpoint._objects import assert_same
from faults._support import mounted

import nvmeio

OLD = (100, 101, 102)
KINDS: dict[str, dict[str, Any]] = {
    "one": {},
    "per_rank": {"layout": "per_rank"},
    "own drives": {"shared": False},
}


@pytest.fixture(params=KINDS)
def old(request: Any, directory: Path) -> dict[str, Any]:
    """An old run's directory; how its checkpoints were saved."""
    options = KINDS[request.param]
    with nvmeio.Checkpointer(directory, keep=2, **options) as checkpointer:
        for step in OLD:
            checkpointer.save_sync(state_of(step), step)
    return options


def begin_anew(checkpointer: nvmeio.Checkpointer) -> None:
    for step in range(3):
        checkpointer.save_sync(state_of(step), step)
        checkpointer.wait_sync()


# A new run in the directory of an old one


def test_a_run_that_begins_anew_in_an_old_directory_is_refused(
    old: dict[str, Any], directory: Path
) -> None:
    """Its saves 0, 1, 2 took the old run's checkpoints one after the other, without a word."""
    before = names(directory)
    with nvmeio.Checkpointer(directory, keep=2, **old) as checkpointer:
        for step in (0, 102):
            with pytest.raises(FileExistsError, match=r"step 102 is.*overwrite=True") as told:
                checkpointer.save_sync(state_of(step), step)
            assert isinstance(told.value, nvmeio.TransferError)
            assert checkpointer.wait_sync() is None
        assert names(directory) == before
        assert_same(checkpointer.restore(102), state_of(102))


async def test_a_save_that_is_awaited_is_refused_too(new: Any) -> None:
    with new() as first:
        first.save_sync(state_of(5), 5)
    with new() as checkpointer:
        with pytest.raises(FileExistsError):
            await checkpointer.save(state_of(5), 5)
        assert checkpointer.steps() == [5]


def test_a_later_step_goes_on_and_so_does_all_after_it(
    old: dict[str, Any], directory: Path
) -> None:
    with nvmeio.Checkpointer(directory, keep=2, **old) as checkpointer:
        with pytest.raises(FileExistsError):
            checkpointer.save_sync(state_of(7), 7)
        for step in (103, 7):  # who saves goes back as he likes
            checkpointer.save_sync(state_of(step), step)
            checkpointer.wait_sync()
        assert checkpointer.latest_step() == 7


def test_who_says_so_begins_anew(old: dict[str, Any], directory: Path) -> None:
    with nvmeio.Checkpointer(directory, keep=2, overwrite=True, **old) as checkpointer:
        begin_anew(checkpointer)
        assert checkpointer.latest_step() == 2 and checkpointer.steps() == [0, 1, 2]


@pytest.mark.parametrize("step", [None, 101])
def test_who_restores_goes_on_from_there(
    step: int | None, old: dict[str, Any], directory: Path
) -> None:
    """Back to 101 with 102 there, or on from the latest with steps counted anew."""
    with nvmeio.Checkpointer(directory, keep=2, **old) as checkpointer:
        found = checkpointer.restore(step)
        assert found["step"] == (step or 102)
        checkpointer.save_sync(state_of(1), 1)
        checkpointer.wait_sync()
        assert checkpointer.latest_step() == 1


def test_an_awaited_restore_counts_as_one(new: Any) -> None:
    with new() as first:
        first.save_sync(state_of(5), 5)
    with new() as checkpointer:
        asyncio.run(checkpointer.async_restore())
        checkpointer.save_sync(state_of(2), 2)
        checkpointer.wait_sync()
        assert checkpointer.latest_step() == 2


def test_a_restore_that_fails_does_not(new: Any, directory: Path) -> None:
    with new() as first:
        first.save_sync(state_of(5), 5)
    path = directory / "step-00000005.pt"
    os.truncate(path, path.stat().st_size - 100)
    with new() as checkpointer:
        with pytest.raises(nvmeio.IntegrityError):
            checkpointer.restore()
        with pytest.raises(FileExistsError):
            checkpointer.save_sync(state_of(0), 0)


def test_a_failed_save_is_no_way_around(new: Any, directory: Path) -> None:
    """What cannot be pickled was not saved: the next one is looked at as the first."""
    with new() as first:
        first.save_sync(state_of(5), 5)
    with new() as checkpointer:
        with pytest.raises(Exception, match="<lambda>"):
            checkpointer.save_sync({"f": lambda: None}, 6)
        with pytest.raises(FileExistsError):
            checkpointer.save_sync(state_of(0), 0)


# A directory that cannot be saved into


def refused(directory: Path, code: int, **options: Any) -> str:
    with pytest.raises(nvmeio.TransferError) as told:
        nvmeio.Checkpointer(directory, **options)
    assert told.value.errno == code
    return str(told.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="to mount takes root")
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_a_file_system_that_is_mounted_read_only(options: dict[str, Any]) -> None:
    """It was told by the first save, hours later."""
    with mounted("tmpfs", "tmpfs", "ro") as folder:
        assert "read_only=True" in refused(folder, errno.EROFS, **options)
        refused(folder / "below", errno.EROFS, **options)
        for path in (folder, folder / "below"):
            with nvmeio.Checkpointer(path, read_only=True, **options) as reader:
                assert reader.steps() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="to be somebody else takes root")
def test_a_directory_of_somebody_else() -> None:
    folder = Path(tempfile.mkdtemp(prefix="nvmeio-readonly-"))
    try:
        folder.chmod(0o755)
        os.seteuid(65534)
        try:
            assert "read_only=True" in refused(folder, errno.EACCES)
            refused(folder / "below", errno.EACCES)
        finally:
            os.seteuid(0)
        assert names(folder) == []
        nvmeio.Checkpointer(folder).close()  # nothing is left of those
    finally:
        shutil.rmtree(folder)


def test_making_one_leaves_nothing_but_the_directory(directory: Path) -> None:
    with nvmeio.Checkpointer(directory):
        assert names(directory) == []


def test_a_directory_that_somebody_saves_into(new: Any, directory: Path) -> None:
    with new() as first:
        assert "close it" in refused(directory, errno.EBUSY)
        link = directory.with_name("link")
        link.symlink_to(directory)
        refused(link, errno.EBUSY)
        first.save_sync(state_of(1), 1)
    new().close()  # what was refused holds nothing


def test_dropped_checkpointer_releases_its_directory(directory: Path) -> None:
    """Never used, used, and kept by a cycle until Python collects it."""
    dropped = nvmeio.Checkpointer(directory)
    del dropped
    dropped = nvmeio.Checkpointer(directory)
    dropped.save_sync(state_of(0), 0)
    dropped.wait_sync()
    del dropped
    gc.disable()
    try:
        kept = nvmeio.Checkpointer(directory)
        vars(kept)["itself"] = kept
        del kept
        with nvmeio.Checkpointer(directory) as another:
            another.save_sync(state_of(1), 1)
    finally:
        gc.enable()


def test_one_that_only_restores_does_nothing_to_the_directory(new: Any, directory: Path) -> None:
    with new(read_only=True) as reader:
        assert not directory.exists() and reader.latest_step() is None
        with new() as writer:
            writer.save_sync(state_of(1), 1)
            writer.wait_sync()
            assert_same(reader.restore(), state_of(1))
        # A killed writer's, which the next one that saves removes
        (directory / ".step-00000002.pt.1-aa.nvmeio-tmp").write_bytes(b"half")
        before = names(directory)
        assert_same(reader.restore(), state_of(1))
        with new() as writer:  # the lock is free
            assert names(directory) == before
        with pytest.raises(ValueError, match="read_only=True"):
            reader.save_sync(state_of(2), 2)
        assert reader.steps() == [1]
    assert names(directory) == before
