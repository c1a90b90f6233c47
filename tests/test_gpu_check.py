"""`benchmarks/gpu_check.py` comes to its end on a device: the stand-in, where there is no other."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_accelerator import Accelerator, Pace, accelerator
from torch.overrides import TorchFunctionMode

from nvmeio.cli.measure import machine
from nvmeio.files import probe_direct

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
KIB_64 = 1 << 16
OF_OTHERS = {"torch.load", "safetensors", "DeepSpeed's handle"}  # put nothing on the stand-in
# Its tensors say that they are the CPU's, and what asks them that finds the wrong bytes there.
ASKS_TENSORS = {"save", "load and safe_open"}
REFUSED = "its driver does not open here"

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not BENCHMARKS.is_dir(), reason="nvmeio is installed without its benchmarks/"
    ),
]


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program, where a MiB has 64 KiB."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("gpu_check")
    monkeypatch.setattr(module.common, "MIB", KIB_64)
    return module


class OnStandIn(TorchFunctionMode):
    """What torch makes on "cuda", or moves there and back, is in the stand-in's memory."""

    def __init__(self, cuda: Accelerator) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            return self._cuda.tensor(func(*args, **{**kwargs, "device": "cpu"}))
        if func is torch.Tensor.cpu:
            return self._cuda.value(args[0])
        if func is torch.Tensor.to and len(args) > 1 and str(args[1]).startswith("cuda"):
            return args[0] if self._cuda.has(args[0]) else self._cuda.tensor(args[0])
        return func(*args, **kwargs)


class Graph:
    """What is captured is done at once, and once."""

    def replay(self) -> None:
        pass


@pytest.fixture
def on_stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with accelerator(monkeypatch, Pace.EAGER, Pace.EAGER) as cuda, OnStandIn(cuda):
        for name, value in {
            "get_device_name": lambda: "a stand-in",
            "empty_cache": lambda: None,
            "memory_snapshot": list,
            "is_bf16_supported": lambda *given: True,
            "CUDAGraph": Graph,
            "graph": lambda graph: contextlib.nullcontext(),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        yield cuda
    torch.set_num_threads(threads)


def refuse_cufile(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(found: machine.CuFile) -> machine.CuFile:
        return dataclasses.replace(found, usable=False, driver=REFUSED)

    monkeypatch.setattr(machine, "look_into_cufile", refused)


def test_all_steps_of_a_gpu_that_need_no_cufile_come_to_their_end(
    gpu_check: Any, on_stand_in: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody had run them: "checkpoint" asked for a snapshot that there is not."""
    if not probe_direct(tmp_path).supported:
        pytest.skip(f"{tmp_path} does not take O_DIRECT")
    refuse_cufile(monkeypatch)
    report, table = tmp_path / "gpu.json", tmp_path / "gpu.md"

    def run_here(name: str, plan: Any, arguments: Any, directory: Path, limit: float) -> Any:
        if name in OF_OTHERS:
            return {"read": {"gb_per_s": 1.0, "cpu_s_per_gb": 1.0}}
        if name in ASKS_TENSORS:
            return {"checked": 0}
        on_stand_in.take_back(waits=True)
        room = (16 if name == "a full device" else 100) << 20
        on_stand_in.limit_bytes = on_stand_in.in_use_bytes + room
        return json.loads(json.dumps(plan.work(gpu_check.Step(directory, arguments.size, "cuda"))))

    monkeypatch.setattr(gpu_check, "run_step", run_here)
    # Torch calls the stand-in's tensors the CPU's, and so a copy of one is made there.
    monkeypatch.setattr(gpu_check.correctness, "turned_is_right", lambda step, handle: True)
    monkeypatch.setattr(gpu_check.common, "TURNS", 1)
    size, page = str(64 * KIB_64), tmp_path / "summary.md"
    arguments = ["--dir", str(tmp_path), "--size", size, "--minutes", "60"]
    files = ["--json", str(report), "--table", str(table), "--summary", str(page)]
    gpu_check.main([*arguments, *files])
    written = json.loads(report.read_text())
    assert set(written["results"]) == set(gpu_check.steps(True))
    skipped = {name for name, result in written["results"].items() if "skipped" in result}
    assert skipped == {name for name, plan in gpu_check.steps(True).items() if plan.needs_cufile}
    assert "torch GdsFile" in skipped
    assert {written["results"][name]["skipped"] for name in skipped} == {REFUSED}
    assert table.read_text().count("\n") == 2 + len(written["results"])
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["gpu.json", "gpu.md", "summary.md"]
    said = page.read_text()
    assert said.count("**may go**") == len(gpu_check.CLAIMS) - 1
    assert "stays: correctness gds, train, gds" in said


def in_turn(gpu_check: Any, monkeypatch: pytest.MonkeyPatch, report: Path) -> list[Any]:
    """Steps do nothing; what the report has when each begins."""
    seen: list[Any] = []

    def run_nothing(name: str, plan: Any, arguments: Any, directory: Path, limit: float) -> Any:
        seen.append(json.loads(report.read_text())["results"] if report.exists() else {})
        if name == "facts":
            return {"cufile": {"usable": True}}
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
    assert all(0 < result.get("limit", 1) <= 90 for result in results.values())
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
    assert gpu_check.run_step("a step", plan, arguments, tmp_path, limit) == result


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


def test_without_a_gpu_each_step_is_told(
    gpu_check: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu_check.main([])
    lines = capsys.readouterr().out.splitlines()
    for name in gpu_check.steps(True):
        (line,) = [line for line in lines if line.startswith(f"  {name:38} ")]
        assert len(line.split(": ", 1)[1]) > 20, line


@pytest.mark.parametrize("wrong", ["", "B"])
def test_the_day_runs_part_by_part_and_stops_where_one_was_wrong(
    wrong: str, tmp_path: Path
) -> None:
    """From a bare machine: what it cannot import comes out of carried wheels."""
    tree = tmp_path / "tree"
    for folder in ("benchmarks", "wheels"):
        (tree / folder).mkdir(parents=True)
    shutil.copy(BENCHMARKS / "gpu_day.sh", tree / "benchmarks")
    for name in ("torch", "nvmeio"):
        (tree / f"{name}.py").write_text("__version__ = '0'")
    with zipfile.ZipFile(tree / "wheels" / "carried_here-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried_here.py", "word = 'carried'")
    (tree / "benchmarks" / "gpu_check.py").write_text(
        "import carried_here, pathlib, sys\n"
        "given = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
        "print(carried_here.word, given['--parts'], given['--minutes'])\n"
        f"told = 'WRONG: it' if given['--parts'] == {wrong!r} else 'right'\n"
        "pathlib.Path(given['--json']).write_text(told)\n"
        "sys.exit(told != 'right')\n"
    )
    command = ["sh", str(tree / "benchmarks" / "gpu_day.sh"), str(tmp_path), str(tmp_path / "out")]
    environment = {**os.environ, "PYTHON": sys.executable, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    ran = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("carried")]
    every = [["A", "4"], ["B", "8"], ["C", "6"], ["D", "6"]]
    assert ran == (every[:2] if wrong else every), done.stderr
    assert done.returncode == bool(wrong)
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == [f"gpu-{part}.json" for part, _ in ran]
