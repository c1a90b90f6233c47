"""The benchmarks of small pieces and of windows work and tell, at sizes that take seconds."""

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nvmeio.cli._terminal import Failed
from nvmeio.files import probe_direct

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# Far above what they take: only one that hangs comes to that, however busy the machine is.
LIMIT_S = 550

pytestmark = [
    pytest.mark.slow,
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


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_file_systems_are_looked_at_and_unmounted(tmp_path: Path) -> None:
    mounts = Path("/proc/self/mounts").read_text()
    script = str(BENCHMARKS / "filesystems.py")
    done = subprocess.run(
        [sys.executable, script, "--dir", str(tmp_path), "--json", "--only", "tmpfs,ext4"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["place"] for row in rows] == ["tmpfs", "ext4"]
    tried = [row for row in rows if "untried" not in row]
    if not tried:
        pytest.skip(f"nothing can be mounted here: {rows}")
    for row in tried:
        assert (row["saves"], row["second"]) == ("right", "refused")
        assert row["full"] == "No space left on device; the old file stays"
        in_memory = row["place"] == "tmpfs"
        assert row["direct"].startswith("no: ") == in_memory
        assert row["cached"] == (1.0 if in_memory else 0.0)
    assert Path("/proc/self/mounts").read_text() == mounts
    assert list(tmp_path.iterdir()) == []


def test_a_step_is_drawn_with_every_turn_and_files_removed(tmp_path: Path) -> None:
    done = run("step_timeline.py", tmp_path, "--size", "192M", "--subgroup", "48M", "--steps", "1")
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line.split()[-1] for line in done.stdout.splitlines() if line.strip()}
    for kind in ("verify", "compute", "seal"):
        assert set("abcd") <= set(lines[kind]), done.stdout
    assert "the drive has nothing to do" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("report", [BENCHMARKS / "measured" / "small.json"], ids=str)
def test_what_was_measured_is_what_is_drawn(report: Path) -> None:
    """`make plots` was forgotten if not. Of a time, less is better: the picture has its inverse."""
    svg = BENCHMARKS.parent / "docs" / "images" / f"measured-{report.stem}.svg"
    drawn = set(re.findall(r">(\d+(?:\.\d\d)?)</text>", svg.read_text()))
    told = json.loads(report.read_text())["lines"]
    less = {"s", "ms", "s/GiB"}
    ratios = [1 / line["ratio"] if line["unit"] in less else line["ratio"] for line in told]
    assert {f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}" for ratio in ratios} <= drawn


# DeepSpeed's run_model.py

RUN_MODEL = """
    --model tiny --loops 2 --batch-size 3 --prompt-len 7 --gen-len 5 --local_rank 0 --pin-memory 0
    --disk-offload --kv-offload --offload-dir ~/offload --log-file auto --verbose 2 --quant_bits 4
    --quant_group_size 32
""".split()  # noqa: SIM905


@pytest.fixture
def run_model(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("inference_rows.run_model")


@pytest.mark.parametrize("spell", [("-", "-"), ("_", "-"), ("-", "_")])
def test_flags_of_run_model_are_taken_in_both_spellings(
    run_model: Any, spell: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "offload").mkdir()
    arguments = [
        f"--{flag[2:].replace(*spell)}" if flag.startswith("--") else flag for flag in RUN_MODEL
    ]
    options = run_model._parse([*arguments, "--resident_bytes=4096"], None)
    assert (options.quant_bits, options.quant_group_size, options.gen_len) == (4, 32, 5)
    assert options.dir == Path("~/offload").expanduser()
    assert options.disk_offload and options.kv_offload
    assert (options.log_file, options.verbose, options.resident_bytes) == ("auto", 2, 4096)


@pytest.mark.parametrize("flag", ["--use_gds", "--pin_kv_cache", "--async_kv_offload"])
def test_flags_of_run_model_that_are_not_done_are_refused(
    run_model: Any, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run_model._parse(["--model", "tiny", flag], None)
    assert f"{flag}: " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run_model._parse(["--model", "tiny", "--local_rank", "1"], None)
    assert "--local_rank: one process" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--batch_size", "0"), "--batch-size: at least 1, not 0"),
        (("--gen-len=-2",), "--gen-len: at least 1, not -2"),
        (("--quant_bits", "4", "--offload-dir", "missing"), "missing is not a directory"),
    ],
)
def test_values_of_run_model_that_make_no_sense_are_told_before_anything_is_written(
    run_model: Any, flags: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run_model._parse(["--model", "tiny", *flags], None)
    assert told in capsys.readouterr().err


def test_the_log_of_run_model_has_a_name_and_the_figures(
    run_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = run_model._parse([*RUN_MODEL, "--quant_bits", "16"], None)
    run_model._write_log(options, {"where": "disk", "total, tokens/s": 1.5})
    (log,) = tmp_path.iterdir()
    assert log.name == "nvmeio-tiny-bs3-prompt7-gen5-disk.log"
    assert log.read_text() == "where: disk\ntotal, tokens/s: 1.5\n"


def test_the_check_for_gpus_runs_without_one(tmp_path: Path) -> None:
    """Its steps that compute; on the CPU they say nothing of a GPU, but that they work."""
    done = run(
        "gpu_check.py",
        tmp_path,
        *("--dry-run", "--only", "train, gradients on", "--table", str(tmp_path / "table.md")),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = (tmp_path / "table.md").read_text()
    assert "losses_equal True, weights_equal 48 of 48" in table
    assert table.count("\n") == 3


_ENDED = """
import os, signal, sys
sys.path[:0] = [sys.argv[1]]
from _program import Program, Row
from _lines import Line

def measured(session):
    return [Line("first", "work", "peer", "GB/s", [1.0], [2.0])]

def ended(session):
    os.kill(os.getpid(), int(sys.argv[2]))

rows = {name: Row(name, measure, lambda size, quick: 0)
        for name, measure in {"first": measured, "second": ended, "third": measured}.items()}
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as shells have it for what is in the background
sys.exit(Program("A test.", rows, (), 4096, 4096).run(sys.argv[3:]))
"""


def ends_in_its_second_row(directory: Path, by: signal.Signals) -> int:
    """The exit status of a benchmark of three rows, of which the first was kept."""
    if not probe_direct(directory).supported:
        pytest.skip(f"{directory} does not take O_DIRECT")
    to = directory / "result.json"
    options = ["--dir", str(directory), "--json", str(to)]
    ran = subprocess.run(
        [sys.executable, "-c", _ENDED, str(BENCHMARKS), str(int(by)), *options],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert [line["row"] for line in json.loads(to.read_text())["lines"]] == ["first"], ran.stderr
    return ran.returncode


def test_rows_that_were_measured_stay_where_the_next_one_never_ends(tmp_path: Path) -> None:
    """`make figures` interrupts what takes too long, and then kills it: all figures were lost."""
    assert ends_in_its_second_row(tmp_path, signal.SIGKILL) == -signal.SIGKILL


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM], ids=lambda by: by.name)
def test_a_benchmark_in_the_background_can_be_interrupted(
    by: signal.Signals, tmp_path: Path
) -> None:
    """It was killed in place of that, and left its files."""
    assert ends_in_its_second_row(tmp_path, by) == 130
    assert [each.name for each in tmp_path.iterdir()] == ["result.json"]


@pytest.fixture
def fio(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the benchmarks that runs fio."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("peers.fio")


@pytest.mark.parametrize("ends", [True, False])
def test_fio_beside_other_work(
    fio: Any, ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has begun when the body does, and is gone behind it; one that fails says why."""
    program = tmp_path / "fio"
    program.write_text(
        "#!/bin/sh\n" + ("echo bad option >&2; exit 1" if ends else "exec sleep 600")
    )
    program.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda _: str(program))
    pids: list[int] = []

    def written_by(pid: int) -> int:
        pids.append(pid)
        return 0 if ends else len(pids)

    monkeypatch.setattr(fio.peers, "written_by", written_by)
    if ends:
        with (
            pytest.raises(Failed, match="fio: bad option"),
            fio.beside(tmp_path / "file", []),
        ):
            raise AssertionError("it has written nothing")
        return
    with fio.beside(tmp_path / "file", []) as written:
        assert written() > 0
    with pytest.raises(ProcessLookupError):  # waited for, too
        os.kill(pids[0], 0)
