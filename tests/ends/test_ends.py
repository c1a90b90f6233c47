"""However a program ends, what is on the disk afterwards is what was promised, and it says no more.

For each system a process ends in nine ways (`_programs`), in mid-work and without closing anything.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ends._programs import LOST, ends_of
from interrupts import _checkpoints, _inference, _offload
from interrupts._checkpoints import state
from programs import run_program

import nvmeio
from nvmeio.offload import SwappedModule

pytestmark = pytest.mark.slow

# The status that a shell sees.
STATUS = {"sys.exit": 3, "exception": 1, "ctrl-c": -signal.SIGINT, "sigterm": -signal.SIGTERM}
# Nothing of Python runs at these ends: what is under way is lost, what was complete is not.
AT_ONCE = ("sigterm", "os._exit")
# A daemon thread that computes until the end: it wants the GIL back when there is none, is ended by
# CPython from within torch's C++, and takes the process with it. With torch alone it is the same.
WITH_TORCH = (0, -signal.SIGABRT)
# What a process that ended well has no reason to write.
BAD_WORDS = ("Exception ignored", "Fatal Python error", "may be lost", "Segmentation fault")


def checkpointer(folder: Path, end: str, errors: str) -> None:
    """A save that was under way is finished, or the end says that it was not."""
    made = nvmeio.Checkpointer(folder / "saved", keep=2)
    try:
        latest = made.latest_step()
        assert latest is not None
        _checkpoints.assert_same(made.restore(), state(latest))
        for step in made.steps():
            _checkpoints.assert_same(made.restore(step), state(step))
        finished = latest >= 2 or end in AT_ONCE
        if end == "handle closed first":
            finished = finished or "closed" in errors
        assert finished, errors
        made.save_sync(state(9), 9)  # leftovers are in nobody's way
        made.wait_sync()
    finally:
        made.close()
    names = {path.name for path in (folder / "saved").iterdir()}
    assert not [name for name in names if name.endswith("nvmeio-tmp")], names


def optimizer(folder: Path, end: str, errors: str) -> None:
    """The last complete step is kept, whatever came."""
    made = _offload.net()
    resumed = _offload.resumed(made, folder)
    try:
        assert resumed.resumed
        steps = resumed.generation - 1
        assert steps == 3 or (end == "daemon thread" and steps > 3), steps
        wanted = _offload.InMemory().after(steps)
        _offload.assert_same([p.detach() for p in made.parameters()], wanted, "weights")
    finally:
        resumed.close()


def module(folder: Path, end: str, errors: str) -> None:
    """Parameters that nobody can come back to are removed, at the latest by the next one."""
    if end not in AT_ONCE:
        _nothing_but_locks(folder)
    with SwappedModule(_offload.net(), swap_dir=folder, resident_bytes=24576) as made:
        _offload.loss_of(made, 0).backward()
    _nothing_but_locks(folder)


def _nothing_but_locks(folder: Path) -> None:
    left = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    assert not left, left


def stream(folder: Path, end: str, errors: str) -> None:
    """The file is only read."""
    assert [path.name for path in folder.iterdir()] == ["net.safetensors"]
    found = nvmeio.load_safetensors(folder / "net.safetensors")
    torch.manual_seed(0)
    _checkpoints.assert_same(found, dict(_inference.Net().state_dict()))


def writer(folder: Path, end: str, errors: str) -> None:
    """A file that was not closed is not there: the old one is, and the next save clears up."""
    assert (folder / "file").read_bytes() == b"old"
    if end not in (*AT_ONCE, "daemon thread"):  # which is writing it to the last moment
        assert [path.name for path in folder.iterdir()] == ["file"]
    nvmeio.save(state(1), folder / "file")
    assert [path.name for path in folder.iterdir()] == ["file"]


def dcp(folder: Path, end: str, errors: str) -> None:
    """A checkpoint that was complete is whole; one that was under way is whole or is none."""
    import torch.distributed.checkpoint as checkpoint

    from nvmeio.integrations.dcp import NvmeStorageReader

    for number in (1, 2):
        place = folder / f"saved-{number}"
        if not (place / ".metadata").exists():
            assert number == 2
            continue
        found = _checkpoints.tensors(0)
        checkpoint.load(found, storage_reader=NvmeStorageReader(place), no_dist=True)
        _checkpoints.assert_same(found, _checkpoints.tensors(number))


LEFT: dict[str, Callable[[Path, str, str], None]] = {
    "checkpointer": checkpointer,
    "optimizer": optimizer,
    "module": module,
    "stream": stream,
    "writer": writer,
    "dcp": dcp,
}


def statuses(system: str, folder: Path) -> dict[str, int]:
    """Have programs end; the status of each, and what is not on stderr is in ``folder``."""
    root, tests = Path(nvmeio.__file__).parents[1], Path(__file__).parents[1]
    ran = run_program(
        [sys.executable, "-m", "ends._programs", system, str(folder)],
        env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{tests}", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        timeout=580,
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    reports = {report["end"]: report["status"] for report in map(json.loads, lines)}
    assert reports.keys() == ends_of(system).keys(), ran.stderr
    return reports


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("system", LEFT)
def test_what_is_left(system: str, tmp_path: Path) -> None:
    reports = statuses(system, tmp_path)
    wrong = []
    for end, status in reports.items():
        errors = (tmp_path / f"{end}.errors").read_text()
        try:
            usual = WITH_TORCH if end == "daemon thread" else (STATUS.get(end, 0),)
            assert status in usual, f"status {status}"
            assert not [words for words in BAD_WORDS if words in errors]
            LEFT[system](tmp_path / end, end, errors)
        except Exception as failed:
            wrong.append(f"{end}: {type(failed).__name__}: {failed}\n{errors}")
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("system", LOST)
def test_lost_save_sets_the_exit_status(system: str, tmp_path: Path) -> None:
    """There was a traceback at most, and status 0."""
    reports = statuses(system, tmp_path)
    errors = {end: (tmp_path / f"{end}.errors").read_text() for end in reports}
    # Python forgets that it ends by Ctrl-C where the last steps make a namedtuple, say.
    by_interrupt = reports.pop("ctrl-c")
    assert by_interrupt in (-signal.SIGINT, 120), errors
    assert reports == dict.fromkeys(reports, 120), errors
    assert all("Input/output error" in told for end, told in errors.items() if end != "no stderr")
