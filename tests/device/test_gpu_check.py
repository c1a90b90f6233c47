"""`benchmarks/gpu_check.py` comes to its end on a device: the stand-in, where there is no other."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device import gpu_on_stand_in
from device.gpu_on_stand_in import BENCHMARKS, KIB_64, SIZE
from gds._support import compiled, fake_cufile
from support import left_open

from nvmeio._files.system import find_mount
from nvmeio.engines.cufile import driver
from nvmeio.files import probe_direct

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not BENCHMARKS.is_dir(), reason="nvmeio is installed without its benchmarks/"
    ),
]


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> Any:
    return gpu_on_stand_in.program(monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1500)  # 9 minutes were too few on a busy machine
def test_the_day_comes_to_its_end_and_no_step_is_left_out(gpu_check: Any, tmp_path: Path) -> None:
    """On the stand-in and a fake cuFile. Nobody had run its steps.

    "checkpoint" asked for a snapshot that there is not, "40 streams of the user's" read their
    memory without waiting for them, and "compat mode on the drive" took what another step had left
    behind its bytes for a wrong byte, which ends the day.
    """
    if not probe_direct(tmp_path).supported:
        pytest.skip(f"{tmp_path} does not take O_DIRECT")
    scratch, place, out = (tmp_path / name for name in ("scratch", "place", "out"))
    for folder in (scratch, place):
        folder.mkdir()
    library = compiled("fake_cufile.c", tmp_path)
    python = tmp_path / "python"
    python.write_text(
        f"""#!/bin/sh
test "$1" = benchmarks/gpu_check.py || exec {sys.executable} "$@"
shift
exec {sys.executable} {HERE / "gpu_on_stand_in.py"} {library} {scratch} "$@"
"""
    )
    python.chmod(0o700)
    environment = {**os.environ, "PYTHON": str(python), "TMPDIR": str(tmp_path)}
    environment["GPU_ARGS"] = f"--size {SIZE} --minutes 60"
    environment["PYTHONPATH"] = str(HERE.parent)
    command = ["sh", str(BENCHMARKS / "gpu_day.sh"), str(place), str(out)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=1400, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    names = [f"gpu-{part}.{kind}" for part in "ABCD" for kind in ("json", "md")]
    assert sorted(path.name for path in out.iterdir()) == sorted([*names, "gpu-summary.md"])
    for part in "ABCD":
        results = json.loads((out / f"gpu-{part}.json").read_text())["results"]
        facts = ["facts"] if part == "C" else []  # whether cuFile can be used is asked first
        assert list(results) == [*facts, *gpu_check.steps(True, part)]
        assert not [name for name, each in results.items() if {"skipped", "failed"} & set(each)]
        lines = (out / f"gpu-{part}.md").read_text().count("\n")
        assert lines == 2 + len(results)
        if part == "C":
            assert results["correctness gds"]["mode"] == "p2p"
            assert results["train, gds"]["straight_to_the_device"]
    told = (out / "gpu-summary.md").read_text()
    claims = gpu_check.CLAIMS.values()
    shown, steps = sum(bool(c.shown) for c in claims), sum(bool(c.steps) for c in claims)
    assert told.count("; right here too**") == shown >= 6
    assert told.count("**may go**") == steps - shown == 2, "by DMA (p2p), and experts"
    assert told.count("stays:") == told.count("stays: not in these steps") == len(claims) - steps
    assert "Skipped: nothing." in told
    assert "- passes through host memory / by gds, >= 1: " in told, "of parts B and C"
    assert not list(place.iterdir())


def in_turn(
    gpu_check: Any,
    monkeypatch: pytest.MonkeyPatch,
    report: Path,
    cufile: dict[str, Any] | None = None,
) -> list[Any]:
    """Steps do nothing; what the report has when each begins."""
    seen: list[Any] = []

    def run_nothing(name: str, plan: Any, arguments: Any, directory: Path, limit: float) -> Any:
        seen.append(json.loads(report.read_text())["results"] if report.exists() else {})
        if name == "facts":
            return {"cufile": cufile or {"usable": True}}
        return {"limit": limit}

    monkeypatch.setattr(gpu_check, "run_step", run_nothing)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return seen


def test_the_report_is_written_after_each_step(
    gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was written at the end, and a run that was cut short by a limit left nothing."""
    report = tmp_path / "gpu.json"
    seen = in_turn(gpu_check, monkeypatch, report)
    gpu_check.main(["--dir", str(tmp_path), "--size", str(64 * KIB_64), "--json", str(report)])
    assert [len(results) for results in seen] == list(range(len(gpu_check.steps(True))))


def test_a_cufile_that_cannot_be_used_is_not_asked_again(
    gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's GdsFile was, and might hang for minutes."""
    report = tmp_path / "gpu.json"
    in_turn(gpu_check, monkeypatch, report, {"usable": False, "reason": "it does not open"})
    gpu_check.main(["--dir", str(tmp_path), "--size", str(SIZE), "--json", str(report)])
    results = json.loads(report.read_text())["results"]
    skipped = {name: each["skipped"] for name, each in results.items() if "skipped" in each}
    needing = [name for name, plan in gpu_check.steps(True).items() if plan.needs_cufile]
    assert skipped == dict.fromkeys(needing, "it does not open")
    assert "torch GdsFile" in skipped


def test_a_cufile_that_refuses_files_of_the_drive_cannot_be_used(
    gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the first H100 its driver opened, and then 31 steps failed with 5027."""
    (tmp_path / "own").mkdir()
    with fake_cufile(compiled("fake_cufile.c", tmp_path), tmp_path / "own", monkeypatch):
        monkeypatch.setenv("FAKE_CUFILE", "file_status=5027")
        traps = str(compiled("cufile_traps.c", tmp_path))
        monkeypatch.setenv("LD_PRELOAD", traps)  # for the process that tries it
        monkeypatch.setenv("NVMEIO_TEST_MODULES", str(driver.MODULES))
        step = gpu_check.Step(tmp_path, SIZE, "cpu")
        facts = json.loads(json.dumps(gpu_check.alive.facts(step)))
    assert (facts["cufile"]["driver"], facts["cufile"]["usable"]) == ("opens", False)
    assert "cuFileHandleRegister: cuFile status 5027" in gpu_check.cufile_refusal({"facts": facts})


@pytest.mark.parametrize("version", [1150, 1160])
def test_shared_memory_is_left_out_with_a_cufile_that_knows_none(
    version: int, gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1.15 asks udev for the block device of a file in tmpfs, too, and refuses it (5027)."""
    (tmp_path / "own").mkdir()
    with fake_cufile(compiled("fake_cufile.c", tmp_path), tmp_path / "own", monkeypatch) as cufile:
        cufile.version = version
        step, plans = gpu_check.Step(tmp_path, SIZE, "cpu"), gpu_check.steps(False, "C")
        told = plans["compat mode in shared memory"].work(step)
    assert ("skipped" in told, "checked" in told) == (version < 1160, version >= 1160)


def test_the_summary_knows_of_parts_that_ran_before(
    gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part alone is right about little of what docs say."""
    in_turn(gpu_check, monkeypatch, tmp_path / "none")
    reports, page = [tmp_path / f"{part}.json" for part in "AB"], tmp_path / "summary.md"
    common = ["--dir", str(tmp_path), "--size", str(SIZE), "--summary", str(page)]
    common += ["--with", *map(str, reports)]
    gpu_check.main([*common, "--parts", "A", "--json", str(reports[0])])
    assert "Skipped: nothing" in page.read_text()
    reports[0].write_text(json.dumps({"results": {"facts": {"kernel": "7"}, "a": {"failed": "b"}}}))
    gpu_check.main([*common, "--parts", "B", "--json", str(reports[1])])
    assert "- kernel: 7" in page.read_text() and "- a: b" in page.read_text()


def test_what_matters_most_comes_first_and_all_of_it_in_less_than_seven_minutes(
    gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 256 bytes took 14 minutes, and came before anything about the ring."""
    report = tmp_path / "gpu.json"
    in_turn(gpu_check, monkeypatch, report)
    gpu_check.main(["--dir", str(tmp_path), "--size", str(64 * KIB_64), "--json", str(report)])
    results = json.loads(report.read_text())["results"]
    first = ["facts", "correctness aio", "host to device alone", "aio to page-locked CPU"]
    assert list(results)[:5] == [*first, "aio ring"]
    assert all(0 < result.get("limit", 1) <= 90 for result in list(results.values())[:-1])
    assert list(results)[-1] == "DeepSpeed's handle", "compiles for longer, and keeps none waiting"
    assert 60 * gpu_check.MINUTES < 7 * 60


def test_steps_that_are_not_reached_are_named(
    gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "gpu.json"
    seen = in_turn(gpu_check, monkeypatch, report)
    arguments = ["--dir", str(tmp_path), "--size", str(64 * KIB_64), "--json", str(report)]
    gpu_check.main([*arguments, "--minutes", "0"])
    assert seen == []
    results = json.loads(report.read_text())["results"]
    why = "the share of part A of 0 minutes is over: --minutes"
    assert results["aio ring"] == {"skipped": why, "part": "A"}
    assert set(results) == set(gpu_check.steps(True))


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("import time; time.sleep(600)", {"failed": "not done after 1 s"}),
        ("raise SystemExit('WRONG: it')", {"failed": "status 1: WRONG: it"}),
        ("print('noise'); print('{}')", {}),
    ],
)
def test_a_step_that_hangs_or_fails_is_a_line_in_the_table(
    gpu_check: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    result: dict[str, str],
) -> None:
    program = tmp_path / "program.py"
    program.write_text(code)
    monkeypatch.setattr(gpu_check, "__file__", str(program))
    arguments = argparse.Namespace(size=64 * KIB_64, dry_run=False)
    limit = 1.0 if "sleep" in code else 300.0
    plan = gpu_check.Plan(lambda step: {})
    told = gpu_check.run_step("a step", plan, arguments, tmp_path, limit)
    assert {key: value for key, value in told.items() if key != "errors"} == result


def test_what_a_failed_step_said_is_kept_and_in_no_table(
    gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an error on a machine that is gone, one line was all that was left."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "for number in range(200): print('line', number, file=sys.stderr)\n"
        "def here(): raise ValueError('it')\n"
        "here()\n"
    )
    monkeypatch.setattr(gpu_check, "__file__", str(program))
    arguments = argparse.Namespace(size=64 * KIB_64, dry_run=False)
    plan = gpu_check.Plan(lambda step: {})
    told = gpu_check.run_step("a step", plan, arguments, tmp_path, 300.0)
    assert told["failed"] == "status 1: ValueError: it"
    assert len(told["errors"]) == gpu_check.MOST_ERRORS
    assert told["errors"][-1] == "ValueError: it"
    assert any(line.endswith("in here") for line in told["errors"])
    assert "line 199" in told["errors"] and "line 0" not in told["errors"]
    assert "line 199" not in gpu_check.table({"a step": told})


def test_steps_alone_ask_first_whether_cufile_can_be_used(
    gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "gpu.json"
    in_turn(gpu_check, monkeypatch, report)
    arguments = ["--dir", str(tmp_path), "--size", str(64 * KIB_64), "--json", str(report)]
    gpu_check.main([*arguments, "--only", "torch GdsFile"])
    assert list(json.loads(report.read_text())["results"]) == ["facts", "torch GdsFile"]


def test_parts_and_several_steps_are_chosen(
    gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "gpu.json"
    in_turn(gpu_check, monkeypatch, report)
    arguments = ["--dir", str(tmp_path), "--size", str(64 * KIB_64), "--json", str(report)]
    gpu_check.main([*arguments, "--parts", "BD", "--only", "KV", "64 KiB"])
    results = json.loads(report.read_text())["results"]
    assert {name: result["part"] for name, result in results.items()} == {
        "KV cache": "B",
        "64 KiB reads": "D",
    }
    gpu_check.main([*arguments, "--parts", "A"])
    assert set(json.loads(report.read_text())["results"]) == set(gpu_check.steps(True, "A"))
    with pytest.raises(SystemExit, match="some of A, B, C, D"):
        gpu_check.main([*arguments, "--parts", "E"])


def test_a_wrong_byte_ends_the_run(
    gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "gpu.json"
    begun = in_turn(gpu_check, monkeypatch, report)
    nothing = gpu_check.run_step

    def run(name: str, *given: Any) -> Any:
        found = nothing(name, *given)
        return {"failed": "status 1: WRONG: a byte"} if name == "correctness aio" else found

    monkeypatch.setattr(gpu_check, "run_step", run)
    arguments = ["--dir", str(tmp_path), "--size", str(64 * KIB_64), "--json", str(report)]
    with pytest.raises(SystemExit):
        gpu_check.main(arguments)
    assert len(begun) == 2
    results = json.loads(report.read_text())["results"]
    assert results["stream"]["skipped"] == "correctness aio was wrong: --keep-going"
    with pytest.raises(SystemExit):
        gpu_check.main([*arguments, "--keep-going"])
    assert len(begun) == 2 + len(gpu_check.steps(True))


@pytest.mark.parametrize("reached", [True, False])
def test_torchs_sanitizer_is_told_what_it_would_take_for_a_fault(
    reached: bool, gpu_check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took `new_empty` for a reader of its model, and knew of no event that was polled."""
    from gpu_steps.correctness import without_false_alarms
    from torch.cuda import _sanitizer as sanitizer

    told: list[int] = []
    handler = sanitizer.cuda_sanitizer.dispatch.event_handler
    monkeypatch.setattr(handler, "_handle_event_synchronization", told.append)
    monkeypatch.setattr(torch.cuda.Event, "query", lambda _: reached)
    own = torch.cuda.Event.query
    event: Any = SimpleNamespace(cuda_event=7)
    with without_false_alarms(sanitizer):
        assert torch.cuda.Event.query(event) == reached
        aten = torch.ops.aten
        names = [each.default._schema.name for each in (aten.new_empty, aten.empty_like, aten.mm)]
        assert [bool(sanitizer.FACTORY_FUNCTION_REGEX.match(name)) for name in names] == [1, 1, 0]
        assert sanitizer.FACTORY_FUNCTION_REGEX.match(aten.set_.source_Tensor._schema.name)
    assert told == [7] * reached
    assert torch.cuda.Event.query is own


def test_torchs_sanitizer_numbers_what_one_thread_launches_at_a_time(
    gpu_check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a copy had another number than its stream was noted to have come to: a race, it said."""
    from gpu_steps.correctness import without_false_alarms
    from torch.cuda import _sanitizer as sanitizer

    handler: Any = sanitizer.cuda_sanitizer.dispatch.event_handler
    inside, entered, most = [0], threading.Event(), []

    def launch(wait: bool) -> None:
        inside[0] += 1
        most.append(inside[0])
        if wait:
            entered.set()
            time.sleep(0.2)  # in which the other one would be let in
        inside[0] -= 1

    monkeypatch.setattr(handler, "_handle_kernel_launch", launch)
    with without_false_alarms(sanitizer):
        first = threading.Thread(target=handler._handle_kernel_launch, args=(True,))
        first.start()
        assert entered.wait(60)
        handler._handle_kernel_launch(False)
        first.join(60)
    assert most == [1, 1]
    assert handler._handle_kernel_launch is launch


def test_losses_that_are_no_numbers_are_wrong(gpu_check: Any) -> None:
    """NaN is what memory has that nobody wrote: each comparison with it is false."""
    from gpu_steps.training import compared

    assert compared([1.0, 2.0], [1.0, 2.0], 1e-3) == {"checked": 2, "losses_equal": True}
    assert compared([1.0, 2.001], [1.0, 2.0], 1e-3) == {"checked": 2, "losses_equal": False}
    for losses in ([1.0, 2.01], [1.0, math.nan], [math.nan, 2.0]):
        with pytest.raises(SystemExit, match="WRONG"):
            compared(losses, [1.0, 2.0], 1e-3)


def test_without_a_gpu_each_step_is_told(
    gpu_check: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu_check.main([])
    lines = capsys.readouterr().out.splitlines()
    for name in gpu_check.steps(True):
        (line,) = [line for line in lines if line.startswith(f"  {name:38} ")]
        assert len(line.split(": ", 1)[1]) > 20, line


def test_make_gpu_check_tells_each_step_on_a_machine_without_a_gpu(
    gpu_check: Any, tmp_path: Path
) -> None:
    """As make runs it, in a tree of its own: it must leave nothing behind."""
    if shutil.which("make") is None or not (BENCHMARKS.parent / "Makefile").exists():
        pytest.skip("there is no make, or no Makefile")
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    python = tmp_path / "venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    stamp = tmp_path / "venv" / ".nvmeio-installed"
    stamp.touch()
    os.utime(stamp, (2**32, 2**32))  # newer than what it is made of
    before = set(BENCHMARKS.parent.iterdir())
    command = ["make", "--no-print-directory", "-C", str(BENCHMARKS.parent), "gpu-check"]
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    done = subprocess.run(
        [*command, f"VENV={tmp_path / 'venv'}"],
        env={**environment, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, *lines = done.stdout.splitlines()
    assert first.startswith("No GPU here. With one, these would run")
    parts = [line for line in lines if not line.startswith(" ")]
    assert [part[0] for part in parts] == list("ABCD"), parts
    steps = gpu_check.steps(True)
    assert len(lines) == len(parts) + len(steps)
    for name, plan in steps.items():
        (line,) = [line for line in lines if line.startswith(f"  {name:38} ")]
        told = line[len(f"  {name:38} ") :]
        limit = rf" *{plan.limit_s:.0f} s"
        assert re.match(limit + r"( \(needs cuFile\))?( \w+=[\w:]+)*: \S.{20,}", told), told
        assert ("(needs cuFile)" in told) == plan.needs_cufile
    assert set(BENCHMARKS.parent.iterdir()) == before


def test_the_summary_has_a_line_for_each_page_that_says_no_gpu_has_run_it(gpu_check: Any) -> None:
    """Else a sentence that is not true any more stays where nobody looks."""
    root = BENCHMARKS.parent
    said = re.compile(r"no GPU has run|Not run: any of it on a GPU", re.IGNORECASE)
    texts = {
        str(page.relative_to(root)): page.read_text()
        for page in [root / "README.md", *root.glob("docs/**/*.md")]
    }
    claims = gpu_check.CLAIMS.values()
    not_shown = {page for claim in claims if not claim.shown for page in claim.pages}
    assert not_shown == {page for page, text in texts.items() if said.search(text)}
    shown = {page for claim in claims if claim.shown for page in claim.pages}
    assert {page for page in shown if "H100" not in texts[page]} == set()


def test_each_step_that_a_claim_needs_is_there(gpu_check: Any) -> None:
    needed = {name for claim in gpu_check.CLAIMS.values() for name in claim.steps}
    assert needed <= set(gpu_check.steps(True))


def test_what_pages_say_that_a_gpu_has_run_is_what_was_measured(gpu_check: Any) -> None:
    """In compat mode cuFile's steps were right too, and none of it was DMA."""
    measured = json.loads((BENCHMARKS / "measured" / "gpu" / "h100.json").read_text())
    results = measured["results"]
    assert {result["commit"] for result in results.values()} == set(measured["measured"]["commits"])
    assert results["correctness gds"]["mode"] == "compat"
    for name, claim in gpu_check.CLAIMS.items():
        state = gpu_check.state_of(claim, results)
        if claim.shown:
            assert state == f"shown on {claim.shown}; right here too", name
            assert measured["measured"]["date"] in claim.shown
        else:
            assert state.startswith("stays: "), name


@pytest.mark.parametrize(("mode", "state"), [("compat", "stays: a"), ("gds", "may go")])
def test_only_dma_shows_gpudirect_storage(mode: str, state: str, gpu_check: Any) -> None:
    claim = gpu_check.Claim(("page.md",), ("a",), by_dma=True)
    assert gpu_check.state_of(claim, {"a": {"checked": 1, "mode": mode}}) == state


def test_another_gpu_may_not_show_what_one_has_shown(gpu_check: Any) -> None:
    claim = gpu_check.Claim(("page.md",), ("a", "b"), "one X, 2020-01-01")
    results = {"a": {"checked": 1}, "b": {"failed": "it"}}
    assert gpu_check.state_of(claim, results) == "shown on one X, 2020-01-01; not here: b"


def test_descriptors_of_cudas_driver_are_no_leaks_of_a_test() -> None:
    before = {3: "pipe:[1]", 4: "/tmp/a"}
    driver = {5: "/dev/nvidiactl", 6: "/dev/nvidia0", 7: "/dev/nvidia-caps/nvidia-cap1"}
    leaks = {4: "/tmp/b", 8: "anon_inode:[eventfd]", 9: "pipe:[2]", 10: "/tmp/nvidia0"}
    assert left_open(before, before | driver) == {}
    assert left_open(before, before | driver | leaks) == leaks


def test_the_day_carries_what_nvmeio_needs() -> None:
    """Without typer there were no facts, and without facts part C was left out."""
    head = (BENCHMARKS / "gpu_day.sh").read_text().split("set -u")[0]
    carried = " ".join(line for line in head.splitlines() if "pip download" in line).split()
    project = (BENCHMARKS.parent / "pyproject.toml").read_text()
    needed = re.search(r"^dependencies = \[(.*)\]$", project, re.MULTILINE)
    assert needed is not None
    names = set(re.findall(r'"(\w+)', needed[1])) - {"torch"}
    assert names and names <= set(carried)


def small_tree(tmp_path: Path, program: str) -> Path:
    """gpu_day.sh, with a program in gpu_check.py's place; `given` has what the script gave it."""
    tree = tmp_path / "tree"
    for folder in ("benchmarks", "wheels"):
        (tree / folder).mkdir(parents=True)
    shutil.copy(BENCHMARKS / "gpu_day.sh", tree / "benchmarks")
    for name in ("torch", "nvmeio"):
        (tree / f"{name}.py").write_text("__version__ = '0'")
    (tree / "benchmarks" / "gpu_check.py").write_text(
        "import os, pathlib, sys\ngiven = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n" + program
    )
    return tree


def day_in(tree: Path, tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", str(tree / "benchmarks" / "gpu_day.sh"), str(tmp_path), str(tmp_path / "out")]
    environment = {**os.environ, "PYTHON": sys.executable, "TMPDIR": str(tmp_path), **variables}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("wrong", ["", "B"])
def test_the_day_runs_part_by_part_and_stops_where_one_was_wrong(
    wrong: str, tmp_path: Path
) -> None:
    """From a bare machine: what it cannot import comes out of carried wheels."""
    tree = small_tree(
        tmp_path,
        "import carried_here\n"
        "print(carried_here.word, given['--parts'], given['--minutes'])\n"
        f"told = 'WRONG: it' if given['--parts'] == {wrong!r} else 'right'\n"
        "pathlib.Path(given['--json']).write_text(told)\n"
        "sys.exit(told != 'right')\n",
    )
    with zipfile.ZipFile(tree / "wheels" / "carried_here-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried_here.py", "word = 'carried'")
    done = day_in(tree, tmp_path)
    ran = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("carried")]
    every = [["A", "4"], ["B", "8"], ["C", "6"], ["D", "6"]]
    assert ran == (every[:2] if wrong else every), done.stderr
    assert done.returncode == bool(wrong)
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == [f"gpu-{part}.json" for part, _ in ran]


def test_udev_has_an_entry_of_the_drive_where_there_is_no_udev(tmp_path: Path) -> None:
    """Its database was there and empty: cuFile opened, and refused every file of a drive (5027)."""
    number = tmp_path.stat().st_dev
    mount = find_mount(tmp_path)
    if not os.major(number) or mount is None:
        pytest.skip(f"{tmp_path} is on no block device: udev has no entry of it")
    entry = f"/run/udev/data/b{os.major(number)}:{os.minor(number)}"
    told = f"told = open({entry!r}).read() if os.environ.get('LD_PRELOAD') else ''\n"
    tree = small_tree(tmp_path, told + "pathlib.Path(given['--json']).write_text(told)\n")
    compiled("cufile_traps.c", tree / "wheels")
    script = tree / "benchmarks" / "gpu_day.sh"
    script.write_text(script.read_text().replace("-d /run/udev/data", "-d /run/no-udev"))
    done = day_in(tree, tmp_path, PARTS="C D", LD_PRELOAD="")
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "out" / "gpu-C.json").read_text().splitlines()
    assert lines == ["E:ID_FS_USAGE=filesystem", f"E:ID_FS_TYPE={mount.file_system}"]
    assert (tmp_path / "out" / "gpu-D.json").read_text() == "", "part D needs none"
    assert not list(tmp_path.glob("gpu-day-*"))
