"""`--help` in a terminal of 80 columns: names are whole, and paragraphs fill the lines."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

import nvmeio
from nvmeio.cli import app, caches

COMMANDS = {info.name or "": info for info in app.registered_commands}
COMMANDS |= {f"cache {info.name}": info for info in caches.app.registered_commands}


def shown(command: str) -> str:
    done = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "80"})
    assert done.exit_code == 0
    return done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_can_be_read(command: str) -> None:
    """Beside wide columns names ended in an ellipsis: "--folder-to-device-mapp…"."""
    words = shown(command)
    found: Any = typer.main.get_command(app)
    for word in command.split():
        found = found.commands[word]
    options = [name for each in found.params for name in each.opts if name.startswith("--")]
    assert [name for name in options if name not in words] == []
    assert not re.search(r"--[\w-]*…", words)


@pytest.mark.parametrize("command", COMMANDS)
def test_lines_break_where_the_terminal_does(command: str) -> None:
    """Paragraphs broke where their source did, and where the terminal ended: a word on a line."""
    lines = [line.strip() for line in shown(command).splitlines()]
    text = inspect.cleandoc(COMMANDS[command].callback.__doc__ or "")  # type: ignore[union-attr]
    for paragraph in text.replace("[bold]", "").replace("[/]", "").split("\n\n"):
        words = " ".join(paragraph.split())
        at = next(number for number, line in enumerate(lines) if line and words.startswith(line))
        while words:
            assert words.startswith(lines[at])
            words = words.removeprefix(lines[at]).strip()
            assert not words or len(lines[at]) + len(words.split()[0]) >= 78
            at += 1


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], *([*c.split(), "--help"] for c in COMMANDS)]
)
def test_help_imports_no_torch(arguments: list[str]) -> None:
    """The first four pages of help did not come within a minute on a loaded machine."""
    code = """
import sys
from nvmeio.cli import main
try:
    main()
except SystemExit as ended:
    print(ended.code, "torch" in sys.modules, "nvmeio._bindings" in sys.modules, file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.stdout
    assert done.stderr.splitlines() == ["0 False False"]


def test_python_runs_the_package_as_the_command() -> None:
    command = [sys.executable, "-m", "nvmeio", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, f"nvmeio {nvmeio.__version__}"), (
        done.stderr
    )
