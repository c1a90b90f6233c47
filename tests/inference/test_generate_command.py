"""`nvmeio generate`."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from inference._models import llama, loaded, prompt, saved, tokens, transformers
from typer.testing import CliRunner

from nvmeio.cli import app

IDS = prompt(batch=1)


def run(directory: Path, *arguments: str) -> tuple[int, str, str]:
    ids = ",".join(map(str, IDS[0].tolist()))
    done = CliRunner().invoke(app, ["generate", str(directory), "--ids", ids, *arguments])
    return done.exit_code, done.stdout, done.stderr


def expected(directory: Path, count: int) -> list[int]:
    return tokens(loaded(directory), IDS, count)[0, IDS.shape[1] :].tolist()


def test_tokens_are_those_of_the_loaded_model(tmp_path: Path) -> None:
    saved(llama, tmp_path)
    status, out, errors = run(tmp_path, "--max-new-tokens", "5", "--resident-bytes", "400K")
    assert status == 0, errors
    found = [int(number) for number in out.split()]
    assert found == expected(tmp_path, 5)[: len(found)]
    assert "of weights in memory" in errors


def test_programs_get_one_object(tmp_path: Path) -> None:
    saved(llama, tmp_path)
    status, out, errors = run(tmp_path, "--max-new-tokens", "4", "--json", "--kv-offload")
    assert status == 0, errors
    found = json.loads(out)
    assert found["tokens"] == expected(tmp_path, 4)[: len(found["tokens"])]
    assert found["prompt_tokens"] == IDS.shape[1]
    assert found["bytes_read"] > 0


def test_flags_have_underscores_as_well(tmp_path: Path) -> None:
    """As in DeepSpeed's run_model.py."""
    saved(llama, tmp_path)
    status, out, errors = run(tmp_path, "--max_new_tokens", "2", "--kv_offload", "--dtype", "fp32")
    assert status == 0, errors
    assert 1 <= len(out.split()) <= 2


@pytest.mark.parametrize("terminal", [False, True])
def test_text_goes_in_and_comes_out(terminal: bool, tmp_path: Path) -> None:
    """In a terminal the progress line took brackets in the text for markup: it ended there."""
    tokenizers = pytest.importorskip("tokenizers")
    saved(llama, tmp_path)
    words = {f"[/w{n}]": n for n in range(128)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[/w0]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    done = CliRunner().invoke(
        app,
        ["generate", str(tmp_path), "--prompt", "[/w5] [/w9] [/w30]", "--max-new-tokens", "4"],
        env={"FORCE_COLOR": "1"} if terminal else {},
    )
    assert done.exit_code == 0, done.output
    assert all(word in words for word in done.stdout.split())
    assert done.stdout.split()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ids", "1,x"], "takes numbers"),
        (["--ids", "1,999"], "not within the vocabulary"),
        (["--ids", "1", "--resident-bytes", "100"], "is too small"),
        (["--prompt", "text"], "holds no tokenizer"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    saved(llama, tmp_path)
    done = CliRunner().invoke(app, ["generate", str(tmp_path), *arguments])
    assert done.exit_code == 2, done.output
    assert message in done.stderr.replace("\n", " ")


def test_a_prompt_is_needed(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["generate", str(tmp_path)]).exit_code == 2
    done = CliRunner().invoke(app, ["generate", str(tmp_path), "--ids", "1"])
    assert done.exit_code == 2
    assert "config.json" in done.stderr


def test_a_damaged_file_is_told(tmp_path: Path) -> None:
    saved(llama, tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    status, _, errors = run(tmp_path)
    assert status == 1
    assert "is truncated" in errors


# In a terminal


class Screen:
    """A terminal of 100 columns, as far as rich writes to one: what is on it at the end."""

    _TOKEN = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|\r|\n|\x1b.|[^\x1b\r\n]+")

    def __init__(self, written: str) -> None:
        self._lines, self._row, self._column = [""], 0, 0
        for token in self._TOKEN.finditer(written):
            self._take(token)

    def _take(self, token: re.Match[str]) -> None:
        text, count = token[0], int(token[1]) if (token[1] or "").isdigit() else 0
        if text == "\r":
            self._column = 0
        elif text == "\n":
            self._row, self._column = self._row + 1, 0
            self._lines += [""] * (self._row + 1 - len(self._lines))
        elif token[2] == "A":
            self._row = max(0, self._row - max(1, count))
        elif token[2] == "K":  # 2: the whole line; 0: from here on
            self._lines[self._row] = "" if count else self._lines[self._row][: self._column]
        elif not text.startswith("\x1b"):
            line = self._lines[self._row].ljust(self._column)
            self._lines[self._row] = line[: self._column] + text + line[self._column + len(text) :]
            self._column += len(text)

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self._lines if line.strip()]


def in_terminal(directory: Path, piped: bool) -> tuple[str, list[str]]:
    """What came through stdout, where that is a pipe, and what a terminal shows at the end."""
    ids = ",".join(map(str, IDS[0].tolist()))
    command = [sys.executable, "-m", "nvmeio", "generate", str(directory), "--ids", ids]
    ours, theirs = pty.openpty()
    written: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # EIO: nobody has the terminal any more
            while data := os.read(ours, 1 << 16):
                written.append(data)

    reader = threading.Thread(target=read)
    program = subprocess.Popen(
        [*command, "--max-new-tokens", "6", "--resident-bytes", "400K"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if piped else theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "NO_COLOR": "1"},
        text=True,
    )
    os.close(theirs)
    reader.start()
    try:
        out = program.communicate(timeout=300)[0] or ""
    finally:
        program.kill()
        reader.join(60)
        os.close(ours)
    shown = b"".join(written).decode()
    assert program.returncode == 0, shown
    assert "of 6 tokens" in shown, "no progress was shown"
    return out, Screen(shown).lines


@pytest.mark.parametrize("piped", [False, True])
def test_a_terminal_shows_the_text_and_no_progress_at_the_end(piped: bool, tmp_path: Path) -> None:
    """The bar's last state stayed; and text for a file went to the terminal, through the bar."""
    saved(llama, tmp_path)
    out, lines = in_terminal(tmp_path, piped)
    wanted = " ".join(map(str, expected(tmp_path, 6)))
    assert not [line for line in lines if "of 6 tokens" in line], lines
    if piped:
        assert wanted.startswith(out.strip()) and out.strip()
        assert out.strip() not in "\n".join(lines)
    else:
        text = lines[0]
        assert wanted.startswith(text) and text
    assert "of weights in memory" in "".join(lines), lines
