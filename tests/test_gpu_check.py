"""`benchmarks/gpu_check.py` comes to its end on a device: the stand-in, where there is no other."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
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
OF_OTHERS = {"torch.load", "safetensors"}  # put nothing on the stand-in
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
    monkeypatch.setattr(module, "MIB", KIB_64)
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


@pytest.fixture
def on_stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with accelerator(monkeypatch, Pace.EAGER, Pace.EAGER) as cuda, OnStandIn(cuda):
        monkeypatch.setattr(torch.cuda, "Stream", lambda device=0: cuda.Stream(device))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a stand-in")
        yield cuda
    torch.set_num_threads(threads)


def refuse_cufile(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(found: machine.CuFile) -> machine.CuFile:
        return dataclasses.replace(found, usable=False, driver=REFUSED)

    monkeypatch.setattr(machine, "look_into_cufile", refused)


@pytest.mark.usefixtures("on_stand_in")
def test_all_steps_of_a_gpu_that_need_no_cufile_come_to_their_end(
    gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody had run them: "checkpoint" asked for a snapshot that there is not."""
    if not probe_direct(tmp_path).supported:
        pytest.skip(f"{tmp_path} does not take O_DIRECT")
    refuse_cufile(monkeypatch)
    report, table = tmp_path / "gpu.json", tmp_path / "gpu.md"

    def run_here(name: str, arguments: Any, directory: Path, limit: float) -> Any:
        if name in OF_OTHERS:
            return {"read": {"gb_per_s": 1.0, "cpu_s_per_gb": 1.0}}
        step = gpu_check.Step(directory, arguments.size, "cuda")
        return json.loads(json.dumps(gpu_check.steps(True)[name].work(step)))

    monkeypatch.setattr(gpu_check, "run_step", run_here)
    # Torch calls the stand-in's tensors the CPU's, and so a copy of one is made there.
    monkeypatch.setattr(gpu_check, "turned_is_right", lambda step, handle: True)
    size = str(64 * KIB_64)
    gpu_check.main(
        ["--dir", str(tmp_path), "--size", size, "--json", str(report), "--table", str(table)]
    )
    written = json.loads(report.read_text())
    assert set(written["results"]) == set(gpu_check.steps(True))
    skipped = {name for name, result in written["results"].items() if "skipped" in result}
    assert skipped == {name for name, plan in gpu_check.steps(True).items() if plan.needs_cufile}
    assert "torch GdsFile" in skipped
    assert {written["results"][name]["skipped"] for name in skipped} == {REFUSED}
    assert table.read_text().count("\n") == 2 + len(written["results"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu.json", "gpu.md"]


def in_turn(gpu_check: Any, monkeypatch: pytest.MonkeyPatch, report: Path) -> list[Any]:
    """Steps do nothing; what the report has when each begins."""
    seen: list[Any] = []

    def run_nothing(name: str, arguments: Any, directory: Path, limit: float) -> Any:
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
    assert results["aio ring"] == {"skipped": "0 minutes are over: --minutes"}
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
    assert gpu_check.run_step("a step", arguments, tmp_path, limit) == result


def test_steps_alone_ask_first_whether_cufile_can_be_used(
    gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "gpu.json"
    in_turn(gpu_check, monkeypatch, report)
    arguments = ["--dir", str(tmp_path), "--size", str(64 * KIB_64), "--json", str(report)]
    gpu_check.main([*arguments, "--only", "torch GdsFile"])
    assert list(json.loads(report.read_text())["results"]) == ["facts", "torch GdsFile"]
