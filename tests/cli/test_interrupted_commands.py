"""Ctrl-C at any moment of `nvmeio tune` and `nvmeio bench`: no scratch files, and nothing hangs.

A real signal, from a timer, between any two bytecodes of a forked process, which then ends as
every process does: what is left to do is done at exit.
"""

import atexit
import contextlib
import io
import json
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nvmeio.cli import app
from nvmeio.cli._terminal import INTERRUPTED
from nvmeio.cli.measure.disk import scratch

pytestmark = pytest.mark.slow

TRIALS = 8


def in_a_child(work: Callable[[], object], interrupted_after_s: float | None) -> int:
    """The exit status of `work`, that of an interrupt where it let it through."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads: they are idle
        child = os.fork()
    if child:
        deadline = time.monotonic() + 150
        while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.002)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 99
    try:
        torch.set_num_threads(1)  # OpenMP's threads did not come along
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        sys.stdout = sys.stderr = io.TextIOWrapper(io.FileIO(null, "w"))
        try:
            if interrupted_after_s is not None:
                signal.setitimer(signal.ITIMER_REAL, interrupted_after_s)
            status = int(work() or 0)  # type: ignore[call-overload]
        except KeyboardInterrupt:
            status = INTERRUPTED
        with contextlib.suppress(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0)
        atexit._run_exitfuncs()
    finally:
        os._exit(status)


@pytest.mark.parametrize("command", ["tune", "bench"])
def test_an_interrupt_leaves_no_files(
    command: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    grid = tmp_path_factory.mktemp("grid") / "grid.json"
    grid.write_text(json.dumps({"queue_depth": [4, 8], "block_size": ["64K", "1M"]}))
    flags = {
        "tune": ["--budget", "0.5s", "--io-size", "2M", "--sweep-config", str(grid)],
        "bench": ["--io-size", "2M", "--compare", "libaio,python", "--loops", "2"],
    }[command]

    def work() -> object:
        return app([command, str(tmp_path), *flags], standalone_mode=False)

    begun = time.monotonic()
    assert in_a_child(work, None) == 0
    whole = time.monotonic() - begun
    chance = random.Random(0)
    # The first one soon, for the others may be done before theirs: `whole` was busier a moment.
    moments = [0.01 * whole, *(chance.uniform(1e-3, whole) for _ in range(TRIALS))]
    statuses = {in_a_child(work, moment) for moment in moments}
    assert statuses <= {0, INTERRUPTED}
    assert INTERRUPTED in statuses
    assert list(tmp_path.iterdir()) == []


class _Interrupted:
    """In a class that is being made: before Python 3.12 the interrupt becomes a RuntimeError."""

    def __set_name__(self, owner: type, name: str) -> None:
        signal.raise_signal(signal.SIGINT)


def make_a_class(*_: object) -> None:
    type("Made", (), {"attribute": _Interrupted()})


def raise_from(*_: object) -> None:
    raise SystemError("a call returned a result with an exception set") from KeyboardInterrupt()


@pytest.mark.parametrize("step", ["measure.disk.check_directory", "tune.rig.require_libraries"])
@pytest.mark.parametrize("interrupted", [make_a_class, raise_from], ids=lambda f: f.__name__)
@pytest.mark.parametrize("standalone", [True, False])
def test_an_interrupt_is_one_whatever_others_made_of_it(
    step: str,
    interrupted: Callable[..., None],
    standalone: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One moment in some hundred ended a command in RuntimeError, as typer imported pydantic.

    Before the command catches anything, and in what it catches.
    """
    monkeypatch.setattr(f"nvmeio.cli.{step}", interrupted)
    try:
        status = app(["tune", str(tmp_path)], standalone_mode=standalone)
    except SystemExit as ended:
        status = ended.code
    assert status == INTERRUPTED
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_a_command_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes while an interrupt is on its way, too: it says what was lost."""

    def fail(*_: object) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise LookupError("what was measured cannot be told")

    monkeypatch.setattr("nvmeio.cli.tune.rig.require_libraries", fail)
    with pytest.raises(LookupError, match="cannot be told"):
        app(["tune", str(tmp_path)], standalone_mode=False)


@pytest.mark.untraced
def test_an_interrupt_while_files_are_made_or_removed_loses_none(tmp_path: Path) -> None:
    chance = random.Random(1)

    def work() -> None:
        with scratch([tmp_path], "test") as made:
            (made[tmp_path] / "file").touch()

    for _ in range(50):
        assert in_a_child(work, chance.uniform(1e-5, 0.002)) in (0, INTERRUPTED)
    assert list(tmp_path.iterdir()) == []
