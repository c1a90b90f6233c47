"""`nvmeio tune`: on a real drive, with small grids and budgets; the search has tests of its own."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import Program
from typer.testing import CliRunner, Result

import nvmeio
from nvmeio import tuned
from nvmeio.cli import app
from nvmeio.cli._terminal import binary_size, parse_duration, parse_size
from nvmeio.cli.measure.disk import scratch
from nvmeio.cli.tune import page, rig
from nvmeio.cli.tune.result import TunePlan
from nvmeio.cli.tune.rig import Rig
from nvmeio.cli.tune.search import UnusableSetting
from nvmeio.cli.tune.space import DEFAULT, default_grid, load_grid, settings
from nvmeio.engines.base import Options

ROOT = Path(nvmeio.__file__).parent.parent
MIB = 1 << 20
SMALL = {"block_size": ["1M", "64K"], "queue_depth": [4, 128]}


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["tune", *map(str, arguments)])


@pytest.fixture(autouse=True)
def config(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path_factory.mktemp("config")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(directory))
    return directory


@pytest.fixture
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("grid") / "grid.json"
    path.write_text(json.dumps(SMALL))
    return path


def tune(directory: Path, grid: Path, *flags: object) -> dict[str, Any]:
    quick = ["--budget", "2s", "--io-size", "8M", "--sweep-config", grid]
    done = invoke(directory, *quick, *flags)
    assert done.exit_code == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


# The result


def test_stdout_is_what_handles_and_deepspeed_take(tmp_path: Path, grid: Path) -> None:
    told = tune(tmp_path, grid)
    assert list(told) == ["aio"]
    # What DeepSpeed reads (runtime/swap_tensor/constants.py), and of the types it expects: its own
    # tool prints "false", which is true.
    assert {name: type(value) for name, value in told["aio"].items()} == {
        "block_size": int,
        "queue_depth": int,
        "single_submit": bool,
        "overlap_events": bool,
        "intra_op_parallelism": int,
    }
    with nvmeio.AioHandle(**told["aio"]) as handle:
        assert handle.get_queue_depth() == told["aio"]["queue_depth"]
    assert list(tmp_path.iterdir()) == []


def test_deepspeed_reads_the_block_as_it_is(tmp_path: Path, grid: Path) -> None:
    where = [Path(p) / "deepspeed/runtime/swap_tensor/aio_config.py" for p in sys.path]
    if not any(path.is_file() for path in where):
        pytest.skip("DeepSpeed is not installed (pip install deepspeed==0.19.8)")
    (tmp_path / "ds.json").write_text(json.dumps(tune(tmp_path, grid)))
    script = (
        "import json, sys\n"
        "from deepspeed.runtime.swap_tensor.aio_config import get_aio_config\n"
        "print(json.dumps(get_aio_config(json.load(open(sys.argv[1])))))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "ds.json")],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "DS_IGNORE_CUDA_DETECTION": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    read = json.loads(done.stdout.splitlines()[-1])
    asked = json.loads((tmp_path / "ds.json").read_text())["aio"]
    assert read == {**asked, "use_gds": False}


def test_all_that_was_found_is_told_with_json(tmp_path: Path, grid: Path) -> None:
    told = tune(tmp_path, grid, "--json")
    looked_at = told["search"]["looked_at"]  # on a busy machine the budget is for fewer of them
    assert looked_at <= told["search"]["total"] == 4
    assert told["search"]["measurements"] >= looked_at * 2
    assert told["search"]["engine"] in ("libaio", "threads")
    assert len(told["settings"]) <= 4
    assert told["finalists"][0]["aio"] == DEFAULT._asdict()
    chosen = next(f for f in told["finalists"] if f["aio"] == told["aio"])
    rounds = told["best"]["rounds"]  # none, where the budget went into the first measurements
    assert rounds == len(chosen["write_gb_per_s"]) == len(chosen["read_gb_per_s"])
    assert min(chosen["read_gb_per_s"], default=0) <= told["best"]["read_gb_per_s"]
    with nvmeio.AioHandle(**told["aio"]):
        pass


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_budget_that_is_soon_over_ends_with_the_default(
    tmp_path: Path, grid: Path, flags: Sequence[str]
) -> None:
    """It ended with status 0, and said nothing."""
    done = invoke(tmp_path, "--budget", "1ms", "--io-size", "4M", "--sweep-config", grid, *flags)
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["aio"] == DEFAULT._asdict()


def test_people_are_told_on_stderr(tmp_path: Path, grid: Path) -> None:
    done = invoke(tmp_path, "--budget", "1s", "--io-size", "4M", "--sweep-config", grid)
    assert "Best performance (GB/s): read = " in done.stderr
    assert "Chosen: " in done.stderr
    assert f"{tmp_path}: 4 MiB a transfer" in done.stderr.replace("\n", " ")
    assert json.loads(done.stdout)["aio"]


@pytest.mark.parametrize(("flag", "op"), [("--no-read", "write"), ("--no-write", "read")])
def test_one_direction_alone(tmp_path: Path, grid: Path, flag: str, op: str) -> None:
    told = tune(tmp_path, grid, flag, "--json", "--loops", 2)
    assert {name for name in told["best"] if name.endswith("_gb_per_s")} == {
        f"{op}_gb_per_s",
        f"default_{op}_gb_per_s",
    }


def test_save_stores_it_for_handles_bench_and_report(tmp_path: Path, grid: Path) -> None:
    told = tune(tmp_path, grid, "--save", "--json")
    stored = tuned.find(tmp_path)
    assert stored is not None
    assert stored.aio._asdict() == told["aio"]
    assert stored.read_gb_per_s == pytest.approx(told["best"]["read_gb_per_s"], abs=0.001)
    assert stored.nvmeio == nvmeio.__version__
    with nvmeio.AioHandle.tuned(tmp_path / "x.bin") as handle:
        assert handle.get_block_size() == told["aio"]["block_size"]
    report = CliRunner().invoke(app, ["report", "--dir", str(tmp_path), "--json"])
    shown = json.loads(report.stdout)["directories"][0]["tuned"]
    assert shown["aio"] == told["aio"]
    line = next(
        line
        for line in CliRunner().invoke(app, ["report", "--dir", str(tmp_path)]).stdout.splitlines()
        if line.strip().startswith("tuned")
    )
    assert binary_size(stored.aio.block_size) in line
    assert f"read {stored.read_gb_per_s:.2f}" in line


def test_report_says_how_to_tune_and_what_is_wrong_with_the_settings(
    tmp_path: Path, config: Path
) -> None:
    shown = CliRunner().invoke(app, ["report", "--dir", str(tmp_path)]).stdout
    assert f"nvmeio tune --save {tmp_path}" in shown
    (config / "nvmeio").mkdir()
    (config / "nvmeio/tuned.json").write_text("{")
    damaged = CliRunner().invoke(app, ["report", "--dir", str(tmp_path), "--json"])
    assert "tuned.json is not a file of tuned settings" in damaged.stdout
    assert json.loads(damaged.stdout)["problems"][0]["severity"] in ("error", "warning")


def test_every_measurement_is_logged(tmp_path: Path, grid: Path) -> None:
    told = tune(tmp_path, grid, "--log-dir", tmp_path / "logs/new", "--json")
    lines = (tmp_path / "logs/new/measurements.jsonl").read_text().splitlines()
    assert len(lines) == told["search"]["measurements"]
    assert set(json.loads(lines[0])) >= {"op", "nbytes", "seconds", "gb_per_s", "queue_depth"}
    assert json.loads((tmp_path / "logs/new/result.json").read_text()) == told


def test_several_directories_and_the_flags_of_ds_nvme_tune(tmp_path: Path, grid: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    done = invoke(
        "--nvme_dir", tmp_path / "a", tmp_path / "b", "--sweep_config", grid, "--io_size", "4M",
        "--log_dir", tmp_path / "logs", "--loops", 1, "--verbose", "--budget", "1s",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert "in each of 2 directories at once" in done.stderr.replace("\n", " ")
    assert "GB/s" in done.stderr.splitlines()[0]  # --verbose
    assert json.loads((tmp_path / "logs/measurements.jsonl").read_text().splitlines()[-1])
    assert [list((tmp_path / name).iterdir()) for name in ("a", "b")] == [[], []]
    shown = CliRunner().invoke(app, ["tune", "--help"], env={"COLUMNS": "300"}).stdout
    flags = "nvme-dir sweep-config no-read no-write io-size gpu gds flush-page-cache log-dir loops"
    assert [flag for flag in flags.split() if f"--{flag}" not in shown] == []


# Grids


def test_a_grid_of_ds_nvme_tune_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    path.write_text(
        '{"block_size": ["1M", "8M"], "queue_depth": [32, 128], '
        '"sequential_requests": [true, false], "single_submit": [false], "io_parallel": [1, 8]}'
    )
    assert load_grid(path) == {
        "block_size": [MIB, 8 * MIB],
        "queue_depth": [32, 128],
        "single_submit": [False],
        "overlap_events": [False, True],
        "intra_op_parallelism": [1, 8],
    }


def test_the_default_is_tried_even_where_the_grid_has_not_got_it(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    path.write_text('{"queue_depth": [2, 3]}')
    found = settings(load_grid(path))
    assert found[0] == DEFAULT
    assert {setting.queue_depth for setting in found[1:]} == {2, 3}
    assert len(found) == 3
    assert len(settings(default_grid())) >= 360


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "is not valid JSON"),
        ("[1]", "must hold one object of lists"),
        ('{"depth": [1]}', "'depth' is not a parameter"),
        ('{"queue_depth": 4}', "must be a list with something in it"),
        ('{"queue_depth": []}', "must be a list with something in it"),
        ('{"queue_depth": [0]}', "not a number from 1"),
        ('{"queue_depth": [true]}', "not a number from 1"),
        ('{"block_size": ["1X"]}', "is not a size"),
        ('{"block_size": [1000]}', "not a multiple of 4096"),
        ('{"single_submit": ["false"]}', "neither true nor false"),
        (None, "cannot read"),
    ],
)
def test_a_bad_grid_is_a_usage_error(tmp_path: Path, text: str | None, complaint: str) -> None:
    path = tmp_path / "sweep.json"
    if text is not None:
        path.write_text(text)
    done = invoke(tmp_path, "--sweep-config", path)
    assert done.exit_code == 2
    assert complaint in unwrapped(done.stderr)


def unwrapped(text: str) -> str:
    """The words of an error box, however wide the terminal was."""
    return " ".join(text.replace("│", " ").split())


# What does not fit, is not there, or makes no sense


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "name a directory"),
        (("{dir}/nowhere",), "does not exist"),
        (("{dir}", "--no-read", "--no-write"), "leaves nothing to measure"),
        (("{dir}", "--budget", "soon"), "'soon' is not a time"),
        (("{dir}", "--budget", "0s"), "not a positive duration"),
        (("{dir}", "--engine", "fio"), "one of auto, libaio, threads"),
        (("{dir}", "--html", "{dir}/nowhere/page.html"), "is not a directory"),
        (("{dir}", "--io-size", "1P"), "is not a size"),
        (("{dir}", "--io-size", "1000T"), "refused: the files need"),
    ],
)
def test_bad_input_is_a_usage_error(
    tmp_path: Path, arguments: Sequence[str], complaint: str
) -> None:
    done = invoke(*(part.format(dir=tmp_path) for part in arguments))
    assert done.exit_code == 2
    assert done.stdout == ""
    assert complaint in unwrapped(done.stderr)


@pytest.mark.parametrize("flag", ["--gpu", "--gds"])
def test_a_gpu_that_is_not_there_is_unavailable(tmp_path: Path, flag: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = invoke(tmp_path, flag)
    assert done.exit_code == 3
    assert f"not available: {flag}" in done.stderr


def test_the_page_cache_is_dropped_where_that_is_allowed(
    tmp_path: Path, grid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    knob = tmp_path / "drop_caches"
    monkeypatch.setattr(rig, "DROP_CACHES", knob)
    done = invoke(tmp_path, "--flush_page_cache")
    assert done.exit_code == 3
    assert "may not drop the page cache" in done.stderr
    knob.write_text("")
    tune(tmp_path, grid, "--flush-page-cache")
    assert knob.read_text() == "1\n"


def test_interrupted_it_leaves_no_files(tmp_path: Path) -> None:
    process = Program[str](
        [sys.executable, "-c", "from nvmeio.cli import main; main()", "tune", str(tmp_path),
         "--io-size", "32M", "--budget", "60s", "--save"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob(".nvmeio-tune-*/tune.bin")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert output == ""
    assert list(tmp_path.iterdir()) == []
    assert tuned.find(tmp_path) is None


def test_interrupted_it_tells_what_it_has_measured_and_stores_no_guess(tmp_path: Path) -> None:
    """Ctrl-C in the middle of a search threw all of it away."""
    where, logs = tmp_path / "drive", tmp_path / "logs"
    where.mkdir()
    process = Program[str](
        [sys.executable, "-c", "from nvmeio.cli import main; main()", "tune", str(where), "--json",
         "--io-size", "8M", "--budget", "300s", "--save", "--log-dir", str(logs),
         "--html", str(tmp_path / "page.html")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    log = logs / "measurements.jsonl"
    deadline = time.monotonic() + 300
    while not log.is_file() or log.read_text().count("\n") < 12:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    told = json.loads(output)
    assert told["aio"] == DEFAULT._asdict()
    assert told["settings"]
    assert "interrupted before the search came to its end" in errors
    assert json.loads((logs / "result.json").read_text()) == told
    assert "<h2>Conditions</h2>" in (tmp_path / "page.html").read_text()
    assert list(where.iterdir()) == []
    assert tuned.find(where) is None


def test_a_page_that_cannot_be_drawn_costs_nothing_else(
    tmp_path: Path, grid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page came first: an IndexError in it lost the JSON and what was to be stored."""

    def fail(found: object) -> str:
        raise OSError("no space left for it")

    monkeypatch.setattr(page, "render", fail)
    quick = ["--budget", "1s", "--io-size", "4M", "--sweep-config", grid, "--save"]
    done = invoke(tmp_path, *quick, "--html", tmp_path / "page.html")
    assert done.exit_code == 1
    assert "no space left for it" in done.stderr
    stored = tuned.find(tmp_path)
    assert stored is not None
    assert json.loads(done.stdout) == {"aio": stored.aio._asdict()}


def test_a_damaged_file_of_settings_is_named_once_all_is_told(
    tmp_path: Path, grid: Path, config: Path
) -> None:
    (config / "nvmeio").mkdir()
    (config / "nvmeio/tuned.json").write_text("{")
    quick = ["--budget", "1s", "--io-size", "4M", "--sweep-config", grid, "--save"]
    done = invoke(tmp_path, *quick)
    assert done.exit_code == 1
    assert json.loads(done.stdout)["aio"]
    assert "failed: not stored: " in done.stderr and "remove that file" in done.stderr
    assert (config / "nvmeio/tuned.json").read_text() == "{"


def test_without_its_libraries_it_says_how_to_install_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    done = invoke(tmp_path)
    assert done.exit_code == 3
    assert "pip install 'nvmeio[tune]'" in done.stderr
    assert list(tmp_path.iterdir()) == []


# The rig


def plan_of(directory: Path, nbytes: int) -> TunePlan:
    return TunePlan([directory], ["read", "write"], {}, nbytes, budget_s=1.0)


def test_a_setting_that_the_kernel_refuses_is_unusable(tmp_path: Path) -> None:
    limit = int(Path("/proc/sys/fs/aio-max-nr").read_text())
    with (
        scratch([tmp_path], "test") as made,
        # So that a queue of all that the machine has is refused, and never taken from others.
        nvmeio.AioHandle(queue_depth=8, engine="libaio"),
    ):
        measuring = Rig([made[tmp_path]], plan_of(tmp_path, MIB), "libaio")
        measuring.prepare()
        with pytest.raises(UnusableSetting, match="AIO events"):
            measuring.measure(Options(4096, 65536, False, True, limit // 65536 + 1), "read", MIB)
        assert measuring.measure(Options(), "write", MIB) > 0


def test_latencies_are_of_single_blocks_with_the_queue_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()  # a millisecond with each look at the clock, on a busy machine too
    clock = types.SimpleNamespace(perf_counter=lambda: next(ticks) / 1000)
    with scratch([tmp_path], "test") as made:
        measuring = Rig([made[tmp_path]], plan_of(tmp_path, 4 * MIB), "threads")
        measuring.prepare()
        monkeypatch.setattr(rig, "time", clock)
        setting = Options(block_size=64 << 10, queue_depth=8)
        for seconds in (measuring.latencies(setting, op, 0.2) for op in ("read", "write")):
            assert len(seconds) > 16
            assert all(0 < latency < 0.2 for latency in seconds)


# Sizes and times


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4096", 4096), ("64k", 64 << 10), ("1.5M", 3 << 19), ("2GiB", 2 << 30), ("1TB", 1 << 40)],
)
def test_sizes_are_read(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "M", "-1M", "1.5", "1e6", "0"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=repr(text)):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90.0), ("60s", 60.0), ("1.5m", 90.0), ("1h", 3600.0)]
)
def test_times_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds
