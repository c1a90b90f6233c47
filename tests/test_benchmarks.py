"""The benchmarks of small pieces and of windows work and tell, at sizes that take seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nvmeio.files import probe_direct

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
# Far above what they take: only one that hangs comes to that, however busy the machine is.
LIMIT_S = 550

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not BENCHMARKS.is_dir(), reason="nvmeio is installed without its benchmarks/"
    ),
]


def run(program: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    if not probe_direct(folder).supported:
        pytest.skip(f"{folder} does not take O_DIRECT")
    script = str(BENCHMARKS / program)
    # No PATH: without fio the rest is measured, and fio named.
    return subprocess.run(
        [sys.executable, script, "--dir", str(folder), *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=os.environ | {"PATH": ""},
    )


def test_small_pieces_are_measured_and_files_removed(tmp_path: Path) -> None:
    folder, report = tmp_path / "drive", tmp_path / "report.json"
    folder.mkdir()
    arguments = ["--quick", "--size", "16M", "--repeats", "1", "--only", "zipf"]
    done = run("small.py", folder, *arguments, "--json", str(report))
    assert done.returncode == 0, done.stderr
    assert "3,125" in done.stdout
    told = json.loads(report.read_text())
    assert {line["work"] for line in told["lines"]} == {"the same, Zipf(1.0) over 3,125 rows"}
    assert all(len(line["nvmeio"]["samples"]) == 1 for line in told["lines"])
    assert [peer["name"] for peer in told["skipped"]] == ["fio"]
    assert list(folder.iterdir()) == []


def test_windows_are_measured_and_files_removed(tmp_path: Path) -> None:
    folder, report = tmp_path / "drive", tmp_path / "report.json"
    folder.mkdir()
    arguments = ["--size", "16M", "--windows", "4M,16M", "--pages", "small", "--rounds", "1"]
    done = run("windows.py", folder, *arguments, "--json", str(report))
    assert done.returncode == 0, done.stderr
    rows = json.loads(report.read_text())["rows"]
    assert [(row["who"], row["op"], row["window"] >> 20) for row in rows] == [
        ("nvmeio", "read", 4),
        ("nvmeio", "write", 4),
        ("nvmeio", "read", 16),
        ("nvmeio", "write", 16),
    ]
    assert all(len(row["wall_and_cpu_s"]) == 1 for row in rows)
    assert list(folder.iterdir()) == []
