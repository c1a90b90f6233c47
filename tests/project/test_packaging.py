"""What is published: one version in all places, and every file that a recipe names is there."""

from __future__ import annotations

import hashlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import nvmeio

ROOT = Path(__file__).parents[2]


def test_one_version_everywhere() -> None:
    """The change log begins with its section: not released yet, or with a date."""
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    when = r" - (unreleased|20\d\d-\d\d-\d\d)"
    assert re.fullmatch(re.escape(nvmeio.__version__) + when, headings[0])
    recipe = (ROOT / "packaging" / "conda" / "meta.yaml").read_text()
    assert f'{{% set version = "{nvmeio.__version__}" %}}' in recipe


def test_the_change_log_has_a_line_an_entry() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    entries = lines[next(n for n, line in enumerate(lines) if line.startswith("## ")) :]
    assert [line for line in entries if len(line) > 160] == []
    assert all(not line or line.startswith(("#", "- ")) or line.endswith(".") for line in entries)


def test_the_recipe_asks_for_what_the_package_asks_for() -> None:
    names = {"torch": "pytorch", "isal": "python-isal"}
    project = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^dependencies = \[(.*)\]$", project, re.MULTILINE)
    assert listed is not None
    recipe = (ROOT / "packaging" / "conda" / "meta.yaml").read_text()
    run = recipe.partition("  run:\n")[2].partition("\n\n")[0]
    wanted = [re.split("(?=>=)", each) for each in re.findall(r'"([^"]+)"', listed[1])]
    for name, least in wanted:
        assert f"- {names.get(name, name)} {least}" in run
    assert len(re.findall(r"^    - ", run, re.MULTILINE)) == len(wanted) + 1  # and Python


def filled_recipe(archive: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / ".ci" / "conda_recipe"), str(archive)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_recipe_is_published_with_the_sum_of_its_archive(tmp_path: Path) -> None:
    archive = tmp_path / f"nvmeio-{nvmeio.__version__}.tar.gz"
    archive.write_bytes(b"the archive")
    filled = filled_recipe(archive)
    assert filled.returncode == 0, filled.stderr
    assert f"  sha256: {hashlib.sha256(b'the archive').hexdigest()}\n" in filled.stdout
    assert "0" * 64 not in filled.stdout
    other = archive.rename(tmp_path / "nvmeio-9.9.9.tar.gz")
    assert filled_recipe(other).returncode == 1
    release = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    publish = release.partition("\n  publish:\n")[2]
    assert publish.index(".ci/conda_recipe dist/") < publish.index("gh-action-pypi-publish")


def test_what_the_dockerfile_copies_is_there_and_not_ignored() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    kept = (ROOT / ".dockerignore").read_text().split()
    copied = [
        source
        for line in lines
        if line.startswith("COPY ") and "--from" not in line
        for source in shlex.split(line)[1:-1]
    ]
    assert copied
    for source in copied:
        assert (ROOT / source).exists() and f"!{source}" in kept, source
    shown = re.findall(r"/(examples/\w+\.py)", lines[-1])
    demo = (ROOT / "Makefile").read_text().partition("\ndemo: ")[2].partition("\n\n")[0]
    assert shown == re.findall(r"examples/\w+\.py", demo)


@pytest.mark.parametrize("name", ["ci.yml", "release.yml"])
def test_workflows_name_targets_and_files_that_there_are(name: str) -> None:
    text = (ROOT / ".github" / "workflows" / name).read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"run: make ([a-z-]+)", text):
        assert f"\n{target}: " in makefile, target
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    jobs = yaml.safe_load(text)["jobs"]
    for job in jobs.values():
        assert {
            *([job["needs"]] if isinstance(job.get("needs"), str) else job.get("needs", []))
        } <= {*jobs}
