"""`nvmeio generate`."""

from __future__ import annotations

import json
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
