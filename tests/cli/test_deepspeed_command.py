"""`nvmeio deepspeed`: the command is run as it is, its exit status is the exit status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from programs import run_program

import nvmeio
from nvmeio.compat.deepspeed import installing

ROOT = str(Path(nvmeio.__file__).parent.parent)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_program(
        [sys.executable, "-c", "from nvmeio.cli import main; main()", "deepspeed", *arguments],
        env={**os.environ, "PYTHONPATH": ROOT, **environment},
        timeout=500,
    )


def test_command_gets_its_arguments_and_our_environment() -> None:
    code = "import os, sys; print(sys.argv[1:], os.environ['PYTHONPATH'])"
    for dashes in (["--"], []):
        done = run(*dashes, sys.executable, "-c", code, "--lr", "1", "--", "--help")
        expected = f"['--lr', '1', '--', '--help'] {installing.STARTUP}{os.pathsep}{ROOT}"
        assert done.stdout.strip() == expected, done.stderr


def test_exit_status_is_the_commands() -> None:
    assert run("--", "sh", "-c", "exit 7").returncode == 7
    assert run("--", "sh", "-c", "kill -TERM $$").returncode == -signal.SIGTERM


def test_commands_that_cannot_be_run(tmp_path: Path) -> None:
    missing = run("--", "no-such-command")
    assert (missing.returncode, missing.stdout) == (127, "")
    assert "no-such-command: No such file" in missing.stderr
    assert run("--", str(tmp_path)).returncode == 126
    assert run().returncode == 2


def test_process_stays_the_same() -> None:
    """So that a signal to it reaches the command."""
    done = run("--", sys.executable, "-c", "import os; print(os.getpid(), os.getppid())")
    assert done.stdout.split()[1] == str(os.getpid())


def test_help_has_an_example() -> None:
    text = run("--help").stdout
    assert "nvmeio deepspeed -- python train.py" in text
    assert "Exit status" in text
