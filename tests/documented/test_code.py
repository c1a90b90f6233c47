"""What README.md and docs/ show runs as it stands there: Python, commands, JSON."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import typer
from documented import pages
from documented.pages import PAGES, ROOT, Block, blocks
from programs import run_program

import nvmeio.cli

# Far above what they take: only one that hangs comes to that, however busy the machine is.
LIMIT_S = 550
RUNNER = Path(__file__).parent / "run_page.py"

# What a block has that is for several ranks, or for a launcher of them.
_FOR_RANKS = re.compile(
    r"process_group|\bdist\.|torch\.distributed|fully_shard|DistributedDataParallel|DTensor|\bmesh\b"
    r"|local_rank|world_size|per_rank|shared=False|Trainer\(|\branks?\b|torchrun|num_gpus|num_processes"
    r"|tp-size|tensor-parallel|accelerate launch"
)
# Some words of a block: the test that runs it with several ranks, or why there is none.
ELSEWHERE = {
    "deepspeed --num_gpus": "tests/compat/test_deepspeed_training.py::test_two_ranks",
    "--ranks 4": "tests/inference/test_stream_ranks.py"
    "::test_parts_are_verified_and_taken_for_no_whole_model",
    "class Finetuning": "for one rank; docs/inference.md has several: On several ranks",
    "trainer = transformers.Trainer(": "for one rank; On several ranks is below it on the page",
}

needs_docs = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="installed without its docs/")
pytestmark = [pytest.mark.slow, needs_docs, pytest.mark.timeout(600)]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def programs() -> Iterator[tuple[Path, tuple[str, ...], int]]:
    """The blocks of a page that need the same packages and ranks are one program."""
    for page in PAGES:
        run = [block for block in blocks(page, "python") if not block.not_run]
        kinds = dict.fromkeys((block.needs, ranks) for block in run for ranks in block.ranks)
        yield from ((page, needs, ranks) for needs, ranks in kinds)


def name_of_program(page: Path, needs: tuple[str, ...], ranks: int) -> str:
    return f"{name_of(page)}{list(needs) or ''}" + (f" with {ranks} ranks" if ranks > 1 else "")


def sh_commands() -> Iterator[tuple[Block, list[str]]]:
    """The commands of blocks of `sh`, whatever lines they are on, without variables before them."""
    for page in PAGES:
        for block in blocks(page, "sh"):
            text = re.sub(r"(^|\s)#.*$", "", block.code, flags=re.MULTILINE)
            command = ""
            for line in text.replace("\\\n", " ").splitlines():
                command += line + "\n"
                if command.count("'") % 2 == 0:  # or it goes on within quotes
                    for part in command.split("&&"):
                        words = shlex.split(part)
                        while words and re.match(r"[A-Z_]+=", words[0]):
                            words = words[1:]
                        if words:
                            yield block, words
                    command = ""


@pytest.mark.parametrize(
    ("page", "needs", "ranks"),
    [pytest.param(*each, id=name_of_program(*each)) for each in programs()],
)
def test_python_runs(page: Path, needs: tuple[str, ...], ranks: int, tmp_path: Path) -> None:
    missing = [package for package in needs if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed: `make clients` installs it")
    strict = () if needs else ("-W", "error")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}

    def run_rank(rank: int) -> subprocess.CompletedProcess[str]:
        told = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{ranks}"}
        told |= {"LOCAL_WORLD_SIZE": f"{ranks}", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "page"}
        return run_program(
            [sys.executable, *strict, str(RUNNER), str(page), *needs],
            cwd=tmp_path,
            env=environment | (told if ranks > 1 else {}),
            timeout=LIMIT_S,
        )

    with ThreadPoolExecutor(ranks) as pool:
        for ran in pool.map(run_rank, range(ranks)):
            assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
            if not needs:
                assert ran.stderr == ""


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_is_for_several_ranks_runs_with_two(page: Path) -> None:
    """One that no program of several ranks runs says where it is run, or why it is not."""
    for block in blocks(page, "python", "sh"):
        code = re.sub(r"(^|\s)#.*$", "", block.code, flags=re.MULTILINE)
        if not _FOR_RANKS.search(code) or 2 in block.ranks:
            continue
        known = next((said for words, said in ELSEWHERE.items() if words in code), None)
        assert known, f"{block.place}: <!-- ranks: 2 -->, or a line in ELSEWHERE"
        for test in re.findall(r"tests/\S+::\w+", known):
            file, _, name = test.partition("::")
            assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), test


def test_there_is_nothing_in_the_list_that_no_page_shows() -> None:
    shown = "".join(block.code for page in PAGES for block in blocks(page, "python", "sh"))
    assert all(words in shown for words in ELSEWHERE)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_compiles_and_what_is_not_run_has_a_reason(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block.code, block.place, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        assert not block.not_run or len(block.not_run) > 10, block.place


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_json_is_json(page: Path) -> None:
    for block in blocks(page, "json"):
        json.loads(block.code)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_is_in_fences_that_name_its_language(page: Path) -> None:
    """What is only indented would be run by nobody."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"<!-- figures: .*?<!-- /figures -->", "", text, flags=re.DOTALL)  # made
    outside = pages._FENCE.sub("", text)
    languages = {match["language"] for match in pages._FENCE.finditer(text)}
    assert languages <= {"python", "sh", "json", "text"}
    assert "```" not in outside
    if page.name != "architecture.md":  # its tree is drawn, and tests read it
        assert not re.search(r"\n\n {4}(?! *[-*0-9:])", outside)


def test_commands_of_nvmeio_are_understood() -> None:
    group: Any = typer.main.get_command(nvmeio.cli.app)
    seen = 0
    for block, words in sh_commands():
        if words[0] != "nvmeio":
            continue
        command = group.commands.get(words[1])
        assert command is not None, f"{block.place}: {words}"
        try:
            with command.make_context(words[1], words[2:]):
                seen += 1
        except Exception as error:  # typer's own click, or the one that is installed
            said = getattr(error, "format_message", lambda: "")()
            if type(error).__name__ != "Exit":  # of --help
                pytest.fail(f"{block.place}: {shlex.join(words)}: {said or error!r}")
    assert seen > 15


@pytest.mark.parametrize("module", ["nvmeio", "nvmeio.checkpoint", "nvmeio.data", "nvmeio.offload"])
def test_every_public_name_is_in_the_reference(module: str) -> None:
    named = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    listed = set(re.findall(r"\w+", named))
    public = importlib.import_module(module)
    assert {name for name in public.__all__ if not name.startswith("__")} <= listed


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for target in re.findall(r"`make ([a-z][a-z-]*)", page.read_text(encoding="utf-8")):
            assert target in targets, f"{name_of(page)}: make {target}"
    for block, words in sh_commands():
        if words[0] == "make":
            named = {word for word in words[1:] if re.fullmatch("[a-z-]+", word)}
            assert named <= targets, f"{block.place}: {words}"


def test_scripts_exist_with_these_options() -> None:
    """An option is one if the script, or what it is made of, has it in a string."""
    for block, words in sh_commands():
        if not words[0].endswith("python") or words[1] in ("-m", "-c"):
            continue
        script = ROOT / words[1]
        assert script.is_file(), f"{block.place}: {words[1]}"
        sources = "".join(path.read_text(encoding="utf-8") for path in script.parent.rglob("*.py"))
        for option in (word for word in words[2:] if word.startswith("--")):
            name = option.partition("=")[0]
            assert f'"{name}"' in sources or f"{name[2:].replace('-', '_')}" in sources, (
                f"{block.place}: {name}"
            )
