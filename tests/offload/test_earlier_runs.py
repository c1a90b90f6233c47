"""What another run has left in a swap directory: gone on with, or refused."""

from __future__ import annotations

import errno
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _offload_models import assert_same_weights, model, train
from support import run_python

import nvmeio
from nvmeio.offload import SwappedModule, SwappedOptimizer, offload
from nvmeio.offload._swap_files import manifests

SMALL: dict[str, Any] = {"subgroup_bytes": 64 << 10}
WAYS_OUT = ("resume=True", 'resume="must"', "overwrite=True")


def swapped(made: Any, folder: Any, **options: Any) -> SwappedOptimizer:
    given = {**SMALL, **options}
    return SwappedOptimizer(torch.optim.Adam, made.parameters(), swap_dir=folder, **given)


def earlier_run(folder: Any, steps: int = 3) -> Any:
    """A run that left its state, as one does that is killed; returns its module."""
    made = model()
    with swapped(made, folder, resume=True) as optimizer:
        train(made, optimizer, steps)
    return made


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "lock"
    }


# Without resume


def test_the_state_of_a_killed_run_is_refused(tmp_path: Path) -> None:
    """A restart that forgot one word, resume=True, removed it without a warning."""
    killed = run_python(
        f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import os, signal, torch
        from _offload_models import model, train
        from nvmeio.offload import SwappedOptimizer
        made = model()
        optimizer = SwappedOptimizer(
            torch.optim.Adam, made.parameters(), swap_dir={str(tmp_path)!r},
            subgroup_bytes=64 << 10)
        train(made, optimizer, 3)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    before = contents(tmp_path)
    made, theirs = model(), model()
    with pytest.raises(FileExistsError) as refused:
        swapped(made, tmp_path)
    assert isinstance(refused.value, nvmeio.TransferError)
    for words in (
        *WAYS_OUT,
        "its state, generation 4 (step 3), written 20",
        str(tmp_path / "optimizer"),
    ):
        assert words in str(refused.value)
    assert contents(tmp_path) == before
    with swapped(made, tmp_path, resume="must") as optimizer:
        assert (optimizer.generation, optimizer.resumed) == (4, True)
        train(made, optimizer, 2, 3)
    train(theirs, torch.optim.Adam(theirs.parameters()), 5)
    assert_same_weights(made, theirs)


def test_overwrite_removes_it(tmp_path: Path) -> None:
    earlier_run(tmp_path)
    made, theirs = model(), model()
    with swapped(made, tmp_path, overwrite=True) as optimizer:
        assert (optimizer.generation, optimizer.resumed) == (1, False)
        train(made, optimizer, 2)
    train(theirs, torch.optim.Adam(theirs.parameters()), 2)
    assert_same_weights(made, theirs)
    assert list(tmp_path.iterdir()) == []


def test_what_made_no_step_is_no_state(tmp_path: Path) -> None:
    """It holds the weights that it was given, which the next run brings too."""
    for directories in (tmp_path, [tmp_path / "a", tmp_path / "b"]):
        earlier_run(directories, steps=0)
        with swapped(model(), directories) as optimizer:
            assert optimizer.generation == 1


def test_ranks_refuse_what_made_no_step_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank may have made the first step, and can only go on with what this one has."""
    earlier_run(tmp_path, steps=0)
    monkeypatch.setattr("nvmeio.offload._swap_files.swap_dirs.several", lambda: True)
    with pytest.raises(FileExistsError, match="its state, generation 1,"):
        swapped(model(), tmp_path)


@pytest.mark.parametrize("damaged", [manifests.NAMES, manifests.NAMES[:1]])
def test_damaged_state_is_refused_too(damaged: tuple[str, ...], tmp_path: Path) -> None:
    """Also where all that is left is the beginning: what is damaged was a step."""
    earlier_run(tmp_path, steps=1)  # generation 2 in the first place, 1 in the other
    for name in damaged:
        path = tmp_path / "optimizer" / name
        path.write_bytes(path.read_bytes()[:-9])
    before = contents(tmp_path)
    with pytest.raises(FileExistsError, match="overwrite=True removes it"):
        swapped(model(), tmp_path)
    assert contents(tmp_path) == before
    with swapped(model(), tmp_path, overwrite=True) as optimizer:
        assert optimizer.generation == 1


def test_a_module_s_own_file_is_no_state(tmp_path: Path) -> None:
    """Nobody can go on from the parameters that a killed process had on the drive."""
    with SwappedModule(model(), swap_dir=tmp_path, resident_bytes=1 << 20) as module:
        kept = (tmp_path / "parameters" / "weights").read_bytes()
        assert module.resident_bytes
    (tmp_path / "parameters").mkdir()
    (tmp_path / "parameters" / "weights").write_bytes(kept)
    SwappedModule(model(), swap_dir=tmp_path, resident_bytes=1 << 20).close()
    assert list(tmp_path.iterdir()) == []


def test_resume_and_overwrite_contradict_each_other(tmp_path: Path) -> None:
    earlier_run(tmp_path)
    before = contents(tmp_path)
    for resume in (True, "must"):
        with pytest.raises(ValueError, match="give one, not both"):
            swapped(model(), tmp_path, resume=resume, overwrite=True)
    with pytest.raises(TypeError, match="resume must be true or false, or 'must', not 'always'"):
        swapped(model(), tmp_path, resume="always")
    assert contents(tmp_path) == before


# With resume


def test_must_raises_where_there_is_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    """A misspelt directory began anew, and was there from then on."""
    earlier_run(tmp_path / "swap")
    for wrong in (tmp_path / "swpa", [tmp_path / "a", tmp_path / "b"]):
        with pytest.raises(FileNotFoundError, match="nothing to go on from: check swap_dir"):
            swapped(model(), wrong, resume="must")
    assert [path.name for path in tmp_path.iterdir()] == ["swap"]
    with swapped(model(), tmp_path / "swap", resume="must") as optimizer:
        assert optimizer.generation == 4


def above(folder: Path, optimizer: str) -> Path:
    """What `swap_dir` of an optimizer says is the directory within the one that it was given."""
    return Path(optimizer)


def other_ranks(folder: Path, optimizer: str) -> Path:
    Path(optimizer).rename(folder / "optimizer-00000-of-00002")
    return folder


@pytest.mark.parametrize("mistake", [above, other_ranks])
def test_a_state_near_by_is_named(
    mistake: Callable[[Path, str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It began anew, with the state of the run beside it or above it."""
    earlier_run(tmp_path)
    wrong = mistake(tmp_path, str(tmp_path / "optimizer"))
    with pytest.raises(FileNotFoundError, match=r"There is a state in .*/optimizer"):
        swapped(model(), wrong, resume="must")
    with caplog.at_level(logging.INFO, "nvmeio"), swapped(model(), wrong, resume=True):
        pass
    (line,) = [each for each in caplog.records if "began in" in each.message]
    assert line.levelno == logging.WARNING
    assert "There is a state in " in line.message


def test_the_log_says_in_one_line_what_became_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    where = str(tmp_path / "optimizer")
    with caplog.at_level(logging.INFO, "nvmeio"):
        earlier_run(tmp_path)
        earlier_run(tmp_path)
        swapped(model(), tmp_path, overwrite=True).close()
        with SwappedOptimizer(
            torch.optim.SGD, model().parameters(), swap_dir=tmp_path, resume=True, lr=1.0
        ):
            pass
        SwappedOptimizer(
            torch.optim.SGD, model().parameters(), swap_dir=tmp_path, resume=True, lr=1.0
        ).close()
    lines = [(each.levelno, each.message) for each in caplog.records if "tmp" in each.message]
    assert [message for _, message in lines] == [
        f"began in {where}: there was nothing to resume",
        f"resumed generation 4 (step 3) from {where}",
        f"began in {where}",
        f"began in {where}: there was nothing to resume",
        f"resumed generation 1 from {where}",
    ]
    assert {level for level, _ in lines} == {logging.INFO}


# A manifest that is not whole


def flipped(data: bytes) -> bytes:
    return data[:-9] + bytes([data[-9] ^ 4]) + data[-8:]


def illegible(data: bytes) -> bytes:
    return data[:8] + b"\0" * (len(data) - 8)


def torn(data: bytes) -> bytes:
    at = data.index(b"D")  # a kill comes before it is durable
    return data[:at] + b"-" + data[at + 1 : len(data) // 2]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flipped, ["(generation 4) is damaged: it was whole when it was made durable"]),
        (torn, ["(generation 4) is damaged, or was cut short by a kill"]),
        (illegible, ["(generation 4, or 2, which would lose nothing) is damaged"]),
    ],
)
def test_a_fall_back_to_the_step_before_is_said(
    damage: Callable[[bytes], bytes],
    words: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It went back by one durable step without a word."""
    earlier_run(tmp_path)
    newest = tmp_path / "optimizer" / manifests.NAMES[0]
    newest.write_bytes(damage(newest.read_bytes()))
    with swapped(model(), tmp_path, resume=True) as optimizer:
        assert optimizer.generation == 3
    (line,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    for part in (*words, str(newest), "resumed from generation 3 (step 2) instead"):
        assert part in line.message


def test_an_older_one_that_is_damaged_is_no_loss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    earlier_run(tmp_path)
    older = tmp_path / "optimizer" / manifests.NAMES[1]
    older.write_bytes(flipped(older.read_bytes()))
    with swapped(model(), tmp_path, resume=True) as optimizer:
        assert optimizer.generation == 4
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


def test_a_step_that_a_loss_of_power_took_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = model()
    with swapped(made, tmp_path, resume=True) as optimizer:
        train(made, optimizer, 2)
    with swapped(made, tmp_path, resume=True, durable=False) as optimizer:
        train(made, optimizer, 1, 2)
    monkeypatch.setattr(manifests, "boot_id", lambda: "another boot")
    with swapped(made, tmp_path, resume=True) as optimizer:
        assert optimizer.generation == 3
    (line,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "(generation 4) had not reached the drive when the machine restarted" in line.message
    assert "resumed from generation 3 (step 2) instead" in line.message


# Several drives


@pytest.fixture
def drives(tmp_path: Path) -> list[Path]:
    return [tmp_path / name for name in ("one", "two", "three")]


def test_the_state_on_several_drives_is_refused(drives: list[Path], tmp_path: Path) -> None:
    earlier_run(drives)
    before = contents(tmp_path)
    for given in (drives[::-1], drives[:2], drives[0], [tmp_path / "new", drives[0]]):
        with pytest.raises(FileExistsError, match="its state, generation 4") as refused:
            swapped(model(), given)
        assert str(drives[0] / "optimizer") in str(refused.value)
    assert {k: v for k, v in contents(tmp_path).items() if "/new/" not in k} == before
    with swapped(model(), drives, resume="must") as optimizer:
        assert optimizer.generation == 4


@pytest.mark.parametrize("away", [False, True])
def test_a_part_of_a_state_is_refused(away: bool, drives: list[Path], tmp_path: Path) -> None:
    """One drive of three, named alone: what lies there is of no use alone, and all are lost."""
    earlier_run(drives)
    before = contents(tmp_path)
    if away:
        drives[0].rename(tmp_path / "away")
    for given in (drives[1], drives[:0:-1]):
        with pytest.raises(FileExistsError, match="a part of its state, which lies in") as refused:
            swapped(model(), given)
        assert all(words in str(refused.value) for words in WAYS_OUT)
    if away:
        (tmp_path / "away").rename(drives[0])
    assert contents(tmp_path) == before
    with swapped(model(), drives, resume=True) as optimizer:
        assert optimizer.generation == 4
    with swapped(model(), drives[1], overwrite=True) as optimizer:
        assert optimizer.generation == 1


def test_what_a_killed_making_left_on_several_drives_is_no_state(
    drives: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files without a generation, on all drives or on one of them."""
    for given in (drives, drives[1], drives[:0:-1]):
        earlier_run(drives)
        for name in manifests.NAMES:
            (drives[0] / "optimizer" / name).unlink()
        with swapped(model(), given) as optimizer:
            assert optimizer.generation == 1


def test_a_damaged_record_is_refused(drives: list[Path]) -> None:
    earlier_run(drives)
    record = drives[1] / "optimizer" / "drives"
    record.write_bytes(b'{"set": ')
    with pytest.raises(FileExistsError, match="record is damaged"):
        swapped(model(), drives[1])
    assert record.exists()


# A config


def test_a_config_has_the_same_words(tmp_path: Path) -> None:
    state = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}

    def trained(**words: Any) -> int:
        made, optimizer = pair = offload(model(), torch.optim.Adam, {**state, **words})
        assert isinstance(optimizer, SwappedOptimizer)
        train(made, optimizer, 2)
        generation = optimizer.generation
        pair.close()
        return generation

    with pytest.raises(FileNotFoundError):
        trained(resume="must")
    assert trained(resume="true") == 3
    with pytest.raises(FileExistsError) as refused:
        trained()
    assert refused.value.errno == errno.EEXIST
    assert trained(resume="must") == 5
    assert trained(overwrite=True) == 3
    assert os.listdir(tmp_path) == []
    for words in ({"resume": "must"}, {"overwrite": True}):
        with pytest.raises(ValueError, match="needs offload_optimizer with device"):
            offload(model(), torch.optim.Adam, words)


def test_what_a_loop_puts_into_a_group_comes_back_with_its_step(tmp_path: Path) -> None:
    """docs/offload.md has it for the number of the step and a GradScaler's state."""
    made = model()
    optimizer = swapped(made, tmp_path, resume=True)
    group = optimizer.param_groups[0]
    for step in range(3):
        group["next_step"], group["scaler"] = step + 1, {"scale": 2.0**step, "_growth": step}
        train(made, optimizer, 1, step)
    group["next_step"] = 4  # no step follows
    optimizer.close()
    with swapped(model(), tmp_path, resume=True) as optimizer:
        (group,) = optimizer.param_groups
        assert (group["next_step"], group["scaler"]) == (3, {"scale": 4.0, "_growth": 2})
