"""The tables of README and docs say what the JSON says, and old ones are named."""

import importlib.util
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"

pytestmark = pytest.mark.skipif(
    not BENCHMARKS.is_dir(), reason="nvmeio is installed without its benchmarks/"
)


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("_figure_tables")


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("figures")


def loaded(program: str) -> Any:
    """A benchmark, whatever else is called like it: tests/checkpoint is a package."""
    spec = importlib.util.spec_from_file_location(
        f"benchmark_{Path(program).stem}", BENCHMARKS / program
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def line(**changes: Any) -> dict[str, Any]:
    return {
        "row": "save",
        "work": "save into a new file",
        "peer": "torch.save",
        "unit": "GB/s",
        "nvmeio": {"median": 3.0, "samples": [3.0]},
        "peer_figure": {"median": 1.5, "samples": [1.5]},
        "ratio": 2.0,
        "note": "",
        **changes,
    }


def report(*lines: dict[str, Any], commit: str = "abc1234567") -> dict[str, Any]:
    return {
        "measured": {"commit": commit, "date": "2026-01-02"},
        "machine": {
            "cpu": "a processor",
            "cores": "2",
            "memory": "4 GiB",
            "file system": "ext4 on /",
            "device": "vda (solid state)",
            "busy before the run": "1% of all cores",
        },
        "options": {"repeats": 3},
        "skipped": [{"name": "fio", "reason": "not installed"}],
        "lines": list(lines),
    }


def test_the_pages_have_the_tables_that_the_json_says(tables: Any) -> None:
    reports = tables.read_reports()
    pages = tables.pages()
    assert ROOT / "README.md" in pages
    assert ROOT / "docs" / "performance.md" in pages
    for page in pages:
        text = page.read_text()
        assert tables.written_into(text, reports) == text, f"{page}: run make tables"


def test_more_is_better_in_every_row(tables: Any) -> None:
    """A time of half the peer's is twice as fast, as a rate of twice the peer's is."""
    time = line(work="a step", unit="s", ratio=0.5)
    text = tables.table("checkpoint", {"checkpoint": report(line(), time)})
    rows = [row for row in text.splitlines() if row.startswith("| save") or "a step" in row]
    assert [row.split("|")[-2].strip() for row in rows] == ["2", "2"]


def test_a_table_says_where_when_and_who_was_not_there(tables: Any) -> None:
    text = tables.table("checkpoint", {"checkpoint": report(line())})
    for said in ("2026-01-02", "abc1234567", "a processor", "fio: not installed"):
        assert said in text


def test_a_missing_peer_leaves_its_cells_empty(tables: Any) -> None:
    missing = line(peer_figure={"median": None, "samples": []}, ratio=None)
    text = tables.table("checkpoint", {"checkpoint": report(missing)})
    assert f"| 3 GB/s | {tables.NOT_MEASURED} |  |" in text


def test_the_headline_takes_the_fastest_of_several_peers(tables: Any) -> None:
    slower = line(peer="torch.save of old", ratio=4.0)
    text = tables.table("headline", {"checkpoint": report(slower, line())})
    row = next(row for row in text.splitlines() if row.startswith("| save 2 GB"))
    assert row.split("|")[-2].strip() == "2"


def test_every_headline_names_a_row_that_is_measured(tables: Any, figures: Any) -> None:
    for pick in tables._picks(tables._HEADLINE):
        part = figures.PARTS[pick.report]
        program = loaded(part.program)
        only = dict(zip(part.arguments[::2], part.arguments[1::2], strict=True)).get("--only")
        assert pick.row in (only.split(",") if only else program.ROWS)


def test_every_part_names_rows_and_code_that_are_there(figures: Any) -> None:
    for name, part in figures.PARTS.items():
        assert (BENCHMARKS / part.program).resolve().is_file()
        for paths in part.code.values():
            for path in paths:
                assert (ROOT / path).exists(), f"{name}: {path}"
        if name != "demo":
            rows = loaded(part.program).ROWS
            assert set(part.code) - {""} <= set(rows)


def test_a_misspelt_marker_is_an_error(tables: Any) -> None:
    with pytest.raises(ValueError, match="marker"):
        tables.written_into("<!-- figures: checkpoint -->\nno end", {})
    with pytest.raises(ValueError, match="no figures are called 'nothing'"):
        tables.written_into("<!-- figures: nothing -->\n<!-- /figures -->", {})


def test_rows_older_than_their_code_are_named(tables: Any, tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        config = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        run = subprocess.run(
            ["git", *config, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return run.stdout.strip()

    git("init", "-q")
    for name in ("saving.py", "loading.py"):
        (tmp_path / name).write_text("first")
    git("add", ".")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "--short=10", "HEAD")
    code = {"save": ["saving.py"], "": ["loading.py"]}
    measured = report(line(), line(row="load"), commit=commit)
    assert tables.stale("checkpoint", measured, code, tmp_path) == []
    (tmp_path / "loading.py").write_text("second")
    git("commit", "-qam", "load: faster")
    (told,) = tables.stale("checkpoint", measured, code, tmp_path)
    assert told.startswith("checkpoint (load): older than ")
    assert told.endswith("load: faster")


def test_figures_of_no_known_commit_are_named(tables: Any, tmp_path: Path) -> None:
    unknown = {**report(line()), "measured": {}}
    assert "does not say" in tables.stale("checkpoint", unknown, {}, tmp_path)[0]
    dirty = report(line(), commit="abc1234567+")
    assert "not committed" in tables.stale("checkpoint", dirty, {}, tmp_path)[0]
    assert "history" in tables.stale("checkpoint", report(line()), {}, tmp_path)[0]


def test_measured_files_are_small_and_named_after_their_part(figures: Any, tables: Any) -> None:
    for path in tables.MEASURED.glob("*.json"):
        assert path.stem in figures.PARTS
        assert path.stat().st_size < 60_000
        assert json.loads(path.read_text())
        assert not re.search(r'[ "]/\w+/\w', path.read_text()), f"{path}: a path of one machine"
