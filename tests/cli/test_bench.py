"""`nvmeio bench`: real files, real engines; what it must refuse; that it leaves nothing behind."""

import contextlib
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from programs import Program
from rich.console import Console
from typer.testing import CliRunner, Result

import nvmeio
from nvmeio import tuned
from nvmeio.cli import app, bench
from nvmeio.cli._terminal import Failed, Refused
from nvmeio.cli.bench import engines, report, task
from nvmeio.cli.bench.engines import REFERENCE
from nvmeio.cli.bench.report import Loop, Series
from nvmeio.cli.bench.task import ProcessPool
from nvmeio.cli.bench.workload import Lap, Workload, WorkPlace, disk_needs
from nvmeio.cli.measure import disk, peers, worker
from nvmeio.engines.base import Options
from nvmeio.errors import BackendUnavailableError
from nvmeio.files import probe_direct

ROOT = Path(nvmeio.__file__).parent.parent
MIB = 1 << 20
ODD = 3 * MIB + 5


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def measured(*arguments: object) -> dict[str, Any]:
    done = invoke(*arguments, "--json")
    assert done.exit_code == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def start(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    return Program[str](
        [sys.executable, "-c", "from nvmeio.cli import main; main()", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        **options,
    )


def wait_for(directory: Path, pattern: str, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while not list(directory.glob(pattern)):
        assert process.poll() is None, "it ended before it began"
        assert time.monotonic() < deadline, "nothing was ever written"
        time.sleep(0.02)


# What is measured


def test_json_tells_what_was_measured_and_how(tmp_path: Path) -> None:
    told = measured(tmp_path, "--io-size", "8M", "--loops", 2, "--compare", "threads,python")
    assert told["unit"] == "GB = 10^9 bytes"
    assert told["settings"]["io_size"] == 8 * MIB
    assert told["engine"]["auto"] in ("libaio", "threads")
    series = {(entry["engine"], entry["op"]): entry for entry in told["results"]}
    assert list(series) == [
        (engine, op) for op in ("read", "write") for engine in ("threads", "python", "reference")
    ]
    for entry in series.values():
        assert len(entry["loops"]) == 2 and len(entry["warmup"]) == 1
        end_to_end, task = entry["end_to_end"], entry["task"]
        assert end_to_end["gb_per_s"] == pytest.approx(8 * MIB / end_to_end["latency_s"] / 1e9)
        assert end_to_end["gb_per_s_min"] <= end_to_end["gb_per_s"] <= end_to_end["gb_per_s_max"]
        assert task["latency_s"] <= end_to_end["latency_s"]
        assert task["total_s"] == pytest.approx(sum(max(loop["task_s"]) for loop in entry["loops"]))
        assert 0 < entry["cpu_s_per_gb"] < 1000
        base = series["threads", entry["op"]]["end_to_end"]["gb_per_s"]
        assert entry["ratio"] == pytest.approx(end_to_end["gb_per_s"] / base)
    conditions = "\n".join(told["conditions"])
    assert "with fsync" in conditions
    assert "through the page cache: " in conditions
    assert list(tmp_path.iterdir()) == []


def test_table_names_engines_conditions_and_unit(tmp_path: Path) -> None:
    done = invoke(tmp_path, "--io-size", "4M", "--loops", 1, "--read")
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("read") and "end-to-end GB/s" in lines[0]
    assert [line.split()[0] for line in lines[1:3]] == ["auto", "plain"]
    assert "GB = 10^9 bytes" in done.stdout
    assert "write" not in done.stdout.replace("written", "")
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_narrow_terminal_gets_fewer_columns_and_whole_ones(width: int) -> None:
    """Headings were wrapped letter by letter, and figures cut, in 60 columns."""
    loops = [Loop([s], s, 10**9, 0.5, None, None) for s in (1.0, 2.0, 4.0)]
    series = [Series(name, "read", loops=loops) for name in ("torch_save", "aio_basic", REFERENCE)]
    workload = Workload((WorkPlace(Path("/mnt")),), 10**9)
    result = report.BenchResult(workload, series, ["read"], ("libaio", "it works"), [], "")
    output = StringIO()
    console = Console(file=output, width=width, force_terminal=True, color_system=None)
    report.render(result, console)
    head, first, second = output.getvalue().splitlines()[:3]
    assert "end-to-end GB/s" in head and "0.50" in first
    assert first.split()[0] == "torch_save" and second.split()[0] == "aio_basic"
    assert len(head) <= width
    assert "ratio" in head
    assert ("task ms" in head) is (width == 200)


@pytest.mark.parametrize("name", [n for n in engines.NAMES if n not in ("deepspeed", "fio")])
def test_every_engine_moves_the_right_bytes(tmp_path: Path, name: str) -> None:
    told = measured(
        tmp_path, "--io-size", ODD, "--engine", name, "--loops", 1, "--warmup-loops", 0,
        "--validate", "--no-reference", "--memory", "ordinary", "--fsync",
    )  # fmt: skip
    assert [(entry["engine"], entry["op"]) for entry in told["results"]] == [
        (name, "read"),
        (name, "write"),
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("legacy", [True, False])
def test_torch_engines_write_files_that_torch_loads(tmp_path: Path, legacy: bool) -> None:
    tensor = torch.arange(ODD, dtype=torch.uint8)
    workload = Workload((WorkPlace(tmp_path),), ODD, legacy_save=legacy, staging_bytes=MIB)
    fast, plain = (engines.make(name, workload, 0) for name in ("torch_fast", "torch_save"))
    fast.write(tensor, tmp_path / "fast.pt")
    plain.write(tensor, tmp_path / "plain.pt")
    for path in (tmp_path / "fast.pt", tmp_path / "plain.pt"):
        assert torch.equal(torch.load(path, weights_only=True), tensor)
        assert torch.equal(fast.read(tensor, path), tensor)
    fast.close()


def test_a_row_that_was_cached_has_no_ratio(tmp_path: Path) -> None:
    """Python was twice as fast as the drive, because it read and wrote memory."""
    if not probe_direct(tmp_path).supported:
        pytest.skip(f"{tmp_path} keeps its files in memory")
    asked = [tmp_path, "--io-size", "8M", "--compare", "threads,python", "--loops", 1]
    told = measured(*asked, "--cached")
    ratios = {(row["engine"], row["op"]): row["ratio"] for row in told["results"]}
    assert ratios["python", "read"] is None and ratios["python", "write"] is None
    assert ratios["threads", "read"] == 1.0
    durable = measured(*asked)
    assert all(row["ratio"] is not None for row in durable["results"])
    shown = invoke(*asked, "--cached", "--read")
    assert "cached" in shown.stdout


@pytest.mark.parametrize("op", ["read", "write"])
def test_other_bytes_than_expected_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    move = getattr(engines.Python, op)

    def spoil(self: engines.Python, tensor: torch.Tensor, path: Path) -> torch.Tensor:
        moved = move(self, tensor, path)
        if op == "read":
            tensor[7] += 1
        else:
            with path.open("r+b") as file:
                file.seek(7)
                file.write(bytes([(int(tensor[7]) + 1) % 256]))
        return moved if op == "write" else tensor

    monkeypatch.setattr(engines.Python, op, spoil)
    done = invoke(tmp_path, "--io-size", "1M", "--engine", "python", f"--{op}", "--validate")
    assert done.exit_code == 1
    assert "first difference is at byte 7 of task0.bin" in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_the_page_cache_is_told_of_and_can_be_dropped(tmp_path: Path) -> None:
    if not probe_direct(tmp_path).supported:
        pytest.skip(f"{tmp_path} keeps its files in memory")
    asked = [tmp_path, "--io-size", "8M", "--engine", "python", "--read", "--loops", 2]
    warm, cold = measured(*asked, "--cached"), measured(*asked)
    # Others may need the memory, or look at the drive, meanwhile: a page more or less.
    assert warm["results"][0]["cached_before"] > 0.9
    assert "without --cached reads are cold" in "\n".join(warm["conditions"])
    assert cold["results"][0]["cached_before"] < 0.1
    assert cold["results"][0]["disk_bytes_per_byte"] is None or (
        cold["results"][0]["disk_bytes_per_byte"] > 0.9
    )


@pytest.mark.parametrize("op", ["read", "write"])
def test_different_files_take_no_more_room_than_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    most = 0
    run = engines.Nvmeio.read if op == "read" else engines.Nvmeio.write

    def look(self: engines.Nvmeio, tensor: torch.Tensor, path: Path) -> Any:
        nonlocal most
        value = run(self, tensor, path)
        most = max(most, sum(p.stat().st_size for p in path.parent.iterdir()))
        return value

    monkeypatch.setattr(engines.Nvmeio, op, look)
    flags = ["--different-file-each-iteration", f"--{op}", "--no-reference"]
    measured(tmp_path, "--io-size", "2M", "--loops", 3, *flags)
    workload = Workload((WorkPlace(tmp_path),), 2 * MIB, new_files=True)
    allowed = disk_needs(workload, ["read" if op == "read" else "write"], ["bin"])[tmp_path]
    assert most == (8 * MIB if op == "read" else 2 * MIB)
    assert most <= allowed


def test_tuned_takes_the_stored_setting_and_flags_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    tuned.save(tmp_path, tuned.Tuned(Options(2 * MIB, 8, True, False, 2)))
    flags = ["--tuned", "--queue-depth", 4, "--io-size", "4M", "--read", "--loops", 1]
    settings = measured(tmp_path, *flags)["settings"]
    assert [settings[field] for field in Options._fields] == [2 * MIB, 4, True, False, 2]


# The flags of ds_io

DS_IO = """
    folder folder_to_device_mapping io_size fast_io_size read multi_process block_size queue_depth
    single_submit sequential_requests validate engine loops io_parallel gpu use_gds
    slow_bounce_buffer torch_legacy_save use_accelerator_pin_memory warmup_loops
    include_warmup_time different_file_each_iteration
""".split()  # noqa: SIM905


def test_flags_of_ds_io_work_as_it_spells_them(tmp_path: Path) -> None:
    told = measured(
        "--folder", tmp_path, "--io_size", "4M", "--read", "--multi_process", 1,
        "--block_size", "64K", "--queue_depth", 8, "--single_submit", "--sequential_requests",
        "--validate", "--engine", "aio_handle", "--loops", 1, "--io_parallel", 2,
        "--warmup_loops", 1, "--include_warmup_time", "--different_file_each_iteration",
        "--fast_io_size", "1M", "--torch_legacy_save",
    )  # fmt: skip
    settings = told["settings"]
    assert {name: settings[name] for name in Options._fields} == {
        "block_size": 64 << 10,
        "queue_depth": 8,
        "single_submit": True,
        "overlap_events": False,
        "intra_op_parallelism": 2,
    }
    assert len(told["results"][0]["loops"]) == 2  # the warm-up counts
    assert settings["different_file_each_iteration"] and settings["validate"]


def test_no_flag_of_ds_io_is_unknown() -> None:
    shown = CliRunner().invoke(app, ["bench", "--help"], env={"COLUMNS": "300"}).stdout
    assert [flag for flag in DS_IO if f"--{flag.replace('_', '-')}" not in shown] == []


def test_the_list_of_ds_io_flags_is_whole() -> None:
    source = next(
        (p / "deepspeed/nvme/ds_aio_args.py" for p in map(Path, sys.path)
         if (p / "deepspeed/nvme/ds_aio_args.py").is_file()), None,
    )  # fmt: skip
    if source is None:
        pytest.skip("DeepSpeed is not installed: its flags cannot be looked up")
    named = {part.split("'")[0] for part in source.read_text().split("add_argument('--")[1:]}
    named |= {p.split("'")[0] for p in source.read_text().split("add_argument(\n        '--")[1:]}
    assert named == set(DS_IO)


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (("--gpu",), "--gpu"),
        (("--gds",), "--gds"),
        (("--gpu", "--use_gds"), "--gds"),
        (("--use_accelerator_pin_memory",), "--use-accelerator-pin-memory"),
    ],
)
def test_a_gpu_that_is_not_there_is_unavailable(
    tmp_path: Path, flags: Sequence[str], names: str
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = invoke(tmp_path, "--io-size", "1M", *flags)
    assert done.exit_code == 3
    assert f"not available: {names}" in done.stderr
    assert "how to fix it" in done.stderr


def test_a_refused_flag_is_named_as_it_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was named with dashes, which nobody had typed."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    flags = ["--io-size", "1M", "--use_accelerator_pin_memory"]
    monkeypatch.setattr(sys, "argv", ["nvmeio", "bench", str(tmp_path), *flags])
    done = invoke(tmp_path, *flags)
    assert "not available: --use_accelerator_pin_memory: there is no CUDA" in done.stderr
    assert "leave out --use_accelerator_pin_memory" in done.stderr


@pytest.mark.gpu
def test_tensors_on_a_gpu_go_both_ways(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    for flags in ((), ("--slow-bounce-buffer",)):
        measured(tmp_path, "--gpu", "--io-size", "8M", "--loops", 1, "--validate", *flags)


# Places and processes


def test_places_are_tasks_with_devices(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b:1"
    a.mkdir()
    b.mkdir()
    assert bench.parse_places([f"{a}:3", str(b)], [], 1) == [WorkPlace(a, 3), WorkPlace(b, 1)]
    assert bench.parse_places([], [f"{a}:0", f"{b}:7"], 1) == [WorkPlace(a, 0), WorkPlace(b, 7)]
    assert [p.device for p in bench.parse_places([str(a)], [], 3)] == [0, 1, 2]
    with pytest.raises(typer.BadParameter, match="is not a device"):
        bench.parse_places([f"{a}:x"], [], 1)
    with pytest.raises(typer.BadParameter, match="lacks a device"):
        bench.parse_places([], [str(a)], 1)


def children() -> set[int]:
    """The processes that threads of this one have started, and that have not been waited for."""
    found: set[int] = set()
    for listing in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that ends
            found.update(map(int, listing.read_text().split()))
    return found


def test_processes_start_together_and_one_failure_ends_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hangs, if those that are well wait for one that failed."""
    monkeypatch.setattr(task, "_HEAD_START_S", 0.2)
    workload = Workload((WorkPlace(tmp_path), WorkPlace(tmp_path)), 4 * MIB)
    before = children()
    pool = ProcessPool(workload)
    try:
        pool.open("threads")
        pool.make_files("bin", "read")
        asked = time.perf_counter()
        first, second = pool.run(Lap("threads", "read", 0, 4 * MIB))
        answered = time.perf_counter()
        assert first.seconds > 0 and second.seconds > 0
        # Neither before the moment that both were told; the clock is the machine's.
        for timing in (first, second):
            assert asked + 0.2 <= timing.start_s <= answered
        (tmp_path / "task1.bin").unlink()
        with pytest.raises(Failed, match=r"No such file|task1"):
            pool.run(Lap("threads", "read", 1, 4 * MIB))
        os.kill(min(children() - before), signal.SIGKILL)  # the first one that was made
        with pytest.raises(Failed, match="the process of task 0 ended with signal SIGKILL"):
            pool.run(Lap("threads", "read", 2, 4 * MIB))
    finally:
        pool.close()
    assert not children() - before


# What does not fit, is not there, or makes no sense


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "name a directory"),
        (("{dir}/nowhere",), "does not exist"),
        (("{dir}", "--io-size", "3X"), "'3X' is not a size"),
        (("{dir}", "--io-size", "0"), "not a whole, positive number"),
        (("{dir}", "--engine", "sg"), "no engine is called 'sg'"),
        (("{dir}", "--compare", "auto,auto"), "named twice"),
        (("{dir}", "--compare", "auto", "--engine", "auto"), "leave out --engine"),
        (("{dir}", "--block-size", "1000"), "not a multiple of 4096"),
        (("{dir}", "--queue-depth", "0"), "queue_depth must lie between"),
        (("{dir}", "--loops", "0"), "--loops"),
        (("{dir}", "--memory", "paper"), "aligned, pinned, ordinary"),
        (("{dir}", "--slow-bounce-buffer"), "with --gpu only"),
        (("{dir}", "--tuned"), "nvmeio tune --save"),
        (("{dir}", "--folder-to-device-mapping", "{dir}"), "lacks a device"),
    ],
)
def test_bad_input_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str], complaint: str
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    done = invoke(*(part.format(dir=tmp_path) for part in arguments))
    assert done.exit_code == 2
    assert done.stdout == ""
    assert complaint in unwrapped(done.stderr)


def unwrapped(text: str) -> str:
    """The words of an error box, however wide the terminal was."""
    return " ".join(text.replace("│", " ").split())


def test_a_disk_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type(shutil.disk_usage(tmp_path))(100 * MIB, 60 * MIB, 40 * MIB)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: usage)
    done = invoke(tmp_path, "--io-size", "30M")  # 30 and 30 of the reference; 5 stay free
    assert done.exit_code == 2
    assert "the files need 60 MiB and 5 MiB are to stay free" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_memory_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk.system, "available_bytes", lambda: 300 * MIB)
    with pytest.raises(Refused, match="needs 100 MiB of memory"):
        disk.check_memory(100 * MIB, {tmp_path: 0})
    disk.check_memory(10 * MIB, {tmp_path: 0})
    memory = Path("/dev/shm")
    if memory.is_dir():
        with pytest.raises(Refused, match="needs 60 MiB of memory"):  # files there are memory
            disk.check_memory(10 * MIB, {memory: 50 * MIB})


def test_a_file_system_that_is_full_fails_and_is_cleaned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, tensor: torch.Tensor) -> None:
        path.write_bytes(b"half of it")
        raise nvmeio.TransferError(28, operation="pwrite", path=str(path), nbytes=MIB)

    monkeypatch.setattr("nvmeio.cli.bench.task.write_file", full)
    done = invoke(tmp_path, "--io-size", "1M")
    assert done.exit_code == 1
    assert "failed: [Errno 28] ENOSPC" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_engines_that_are_not_installed_are_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: None)
    done = invoke(tmp_path, "--io-size", "1M", "--engine", "fio")
    assert done.exit_code == 3
    assert "fio: not on PATH" in done.stderr and "apt-get install fio" in done.stderr
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setitem(sys.modules, "deepspeed.ops.op_builder", None)
    with pytest.raises(BackendUnavailableError, match="pip install deepspeed"):
        peers.load_deepspeed()


def test_a_lock_that_a_killed_compile_left_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch waits for it for ever: Ctrl-C while DeepSpeed's op was compiled was enough."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = tmp_path / "async_io"
    assert peers.left_by_a_compile("async_io") == ""  # makes the folder, as torch does
    (folder / "lock").touch()
    assert peers.left_by_a_compile("async_io") == ""  # its compiler may be about to begin
    os.utime(folder / "lock", (0, 0))
    with subprocess.Popen(["cat"], cwd=folder, stdin=subprocess.PIPE):
        assert peers.left_by_a_compile("async_io") == ""  # somebody compiles
    assert peers.left_by_a_compile("async_io") == str(folder / "lock")
    builders: Any = types.ModuleType("deepspeed.ops.op_builder")
    builders.AsyncIOBuilder = lambda: types.SimpleNamespace(
        name="async_io", is_compatible=lambda verbose: True
    )
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
    monkeypatch.setitem(sys.modules, "deepspeed.ops", types.ModuleType("deepspeed.ops"))
    monkeypatch.setitem(sys.modules, "deepspeed.ops.op_builder", builders)
    monkeypatch.setattr(shutil, "which", lambda program: program)
    with pytest.raises(BackendUnavailableError, match=rf"was killed.*\n.*rm {folder}/lock"):
        peers.load_deepspeed()


def test_what_is_missing_is_named_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing at all was measured, because of a peer that nobody had installed."""
    monkeypatch.setattr(shutil, "which", lambda program: None)
    flags = ["--io-size", "1M", "--compare", "fio,auto,python", "--json"]
    done = invoke(tmp_path, *flags)
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    assert [e["engine"] for e in told["results"] if e["op"] == "read"][:2] == ["auto", "python"]
    assert told["results"][0]["ratio"] == 1.0
    line = "not measured: fio: not on PATH (apt-get install fio)"
    assert told["not_measured"] == [line]
    assert line in done.stderr.splitlines()
    strict = invoke(tmp_path, *flags, "--strict")
    assert (strict.exit_code, strict.stdout) == (3, "")
    assert "apt-get install fio" in strict.stderr


def test_a_peer_that_fails_is_left_out_and_ends_in_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: object, tensor: object, path: Path) -> None:
        raise OSError(f"{path.name} is not for me")

    monkeypatch.setattr(engines.Python, "write", fail)
    done = invoke(tmp_path, "--io-size", "1M", "--compare", "auto,python", "--json")
    assert done.exit_code == 1
    told = json.loads(done.stdout)
    shown = [(e["op"], e["engine"]) for e in told["results"] if e["engine"] != "reference"]
    assert shown == [("read", "auto"), ("read", "python"), ("write", "auto")]
    assert "failed: python: task0.bin is not for me" in done.stderr
    strict = invoke(tmp_path, "--io-size", "1M", "--compare", "auto,python", "--strict", "--json")
    assert strict.exit_code == 1
    assert "failed: task0.bin is not for me" in strict.stderr
    assert list(tmp_path.iterdir()) == []


def test_interrupted_it_tells_what_it_has_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C threw hundreds of loops away."""
    write, writes = engines.Nvmeio.write, iter(range(3))

    def interrupt(self: engines.Nvmeio, tensor: torch.Tensor, path: Path) -> None:
        if next(writes, None) is None:
            raise KeyboardInterrupt
        write(self, tensor, path)

    monkeypatch.setattr(engines.Nvmeio, "write", interrupt)
    done = invoke(tmp_path, "--io-size", "1M", "--loops", "5", "--json")
    assert done.exit_code == 130
    told = json.loads(done.stdout)
    assert {e["op"]: len(e["loops"]) for e in told["results"] if e["engine"] == "auto"} == {
        "read": 5,
        "write": 2,
    }
    assert "interrupted after 2 to 5 of 5 loops" in told["conditions"][0]
    assert list(tmp_path.iterdir()) == []


# fio


def test_fio_is_given_the_same_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: "/usr/bin/fio")
    options = Options(MIB, 16, True, False, 2)
    pool = engines.FioPool(Workload((WorkPlace(tmp_path),), 8 * MIB, options=options, fsync=True))
    asked: list[str] = []
    monkeypatch.setattr(peers, "run_fio", lambda _, given: asked.extend(given) or [])
    pool.run(Lap("fio", "write", 0, 8 * MIB))
    for option in (
        "--rw=write", f"--bs={MIB}", f"--size={4 * MIB}", "--iodepth=16",
        "--numjobs=2", f"--offset_increment={4 * MIB}", "--iodepth_batch=1", "--end_fsync=1",
        "--iodepth_batch_complete_min=16",
    ):  # fmt: skip
        assert option in asked
    with pytest.raises(Refused, match="moves whole blocks"):
        engines.FioPool(Workload((WorkPlace(tmp_path),), 9 * MIB, options=options))
    with pytest.raises(Refused, match="--validate cannot look into fio"):
        engines.FioPool(Workload((WorkPlace(tmp_path),), 8 * MIB, validate=True))


def test_fio_finds_the_files_of_a_relative_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fio runs in the files' directory and looked for them below it: it measured other ones, or
    refused ("refusing extend of file"). A colon separates files for it."""
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed (apt-get install fio)")
    (tmp_path / "with:colon").mkdir()
    if not probe_direct(tmp_path).supported:
        pytest.skip(f"no direct I/O in {tmp_path}")
    monkeypatch.chdir(tmp_path)
    for write in ("--read", "--write"):
        told = measured(
            Path("with:colon"), "--io-size", "4M", "--compare", "libaio,fio", "--loops", 1, write
        )
        assert [e["engine"] for e in told["results"][:2]] == ["libaio", "fio"]
    assert list(tmp_path.rglob("*")) == [tmp_path / "with:colon"]


def test_fio_takes_its_turns(tmp_path: Path) -> None:
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed (apt-get install fio)")
    if not probe_direct(tmp_path).supported:
        pytest.skip(f"no direct I/O in {tmp_path}")
    flags = ["--queue-depth", 4, "--io-parallel", 2, "--warmup-loops", 0]
    told = measured(tmp_path, "--io-size", "64M", "--compare", "fio,auto", "--loops", 2, *flags)
    assert [e["engine"] for e in told["results"][:2]] == ["fio", "auto"]
    for entry in told["results"]:
        assert entry["end_to_end"]["gb_per_s"] > 0
    assert "one buffer per block in flight" in "\n".join(told["conditions"])
    assert list(tmp_path.iterdir()) == []


def test_process_that_is_gone_has_written_nothing() -> None:
    no_process = (1 << 22) + 1  # Linux has none of so high a number
    assert peers.written_by(no_process) == 0 <= peers.written_by(os.getpid())


# Turns, and figures made of them


def test_engines_take_turns_and_nobody_always_follows_the_same_one() -> None:
    orders = [worker.order(["auto", "python", "threads"], loop, 8) for loop in range(8)]
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    followers = {(order[i], order[i + 1]) for order in orders for i in range(len(order) - 1)}
    assert all(len([f for f in followers if f[1] == name]) > 1 for name in orders[0])


def test_figures_of_a_series() -> None:
    loops = [Loop([s, s / 2], s * 1.1, 2 * 10**9, 0.5, None, None) for s in (1.0, 2.0, 4.0)]
    series = Series("auto", "read", loops=loops)
    assert series.task_s == 2.0
    assert series.task_gb_per_s == 1.0
    assert series.end_to_end_s == pytest.approx(2.2)
    assert series.gb_per_s == pytest.approx(2 / 2.2)
    assert series.range_gb_per_s == (pytest.approx(2 / 4.4), pytest.approx(2 / 1.1))
    assert series.spread == pytest.approx((2 / 1.1 - 2 / 4.4) / 2 / (2 / 2.2))
    assert series.cpu_s_per_gb == 0.25
    assert series.disk_per_byte is None


def test_patterns_tell_seeds_and_places_apart() -> None:
    tensor = torch.empty(9 * MIB + 3, dtype=torch.uint8)
    disk.fill(tensor, 1)
    assert disk.differs_at(tensor, 1) is None
    assert disk.differs_at(tensor, 2) == 0
    tensor[8 * MIB + 1] ^= 1
    assert disk.differs_at(tensor, 1) == 8 * MIB + 1
    blocks = {bytes(disk.buffer_of(t)) for t in tensor[: 8 * MIB].split(4096)}
    assert len(blocks) == 2048  # no drive finds two alike


# Interrupted, and looked at


@pytest.mark.parametrize(
    ("signum", "status", "flags"),
    [
        (signal.SIGINT, 130, ("--engine", "auto")),
        (signal.SIGTERM, 143, ("--engine", "python", "--multi-process", "2")),
    ],
)
def test_interrupted_it_leaves_no_files(
    tmp_path: Path, signum: signal.Signals, status: int, flags: Sequence[str]
) -> None:
    size = ["--io-size", "32M", "--loops", "100000"]
    process = start(
        "bench", tmp_path, *size, *flags, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    wait_for(tmp_path, ".nvmeio-bench-*/task0.bin", process)
    process.send_signal(signum)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == status, errors
    assert output == ""
    assert "no files are left" in errors
    assert list(tmp_path.iterdir()) == []


def test_progress_is_shown_on_a_terminal_and_stdout_stays_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")  # on a dumb one nothing moves
    near, far = pty.openpty()
    process = start(
        "bench", tmp_path, "--io-size", "8M", "--json", stdout=subprocess.PIPE, stderr=far
    )
    os.close(far)
    seen = b""
    while select.select([near], [], [], 300)[0]:
        try:
            data = os.read(near, 65536)
        except OSError:  # the other end is closed
            break
        seen += data
    output, _ = process.communicate(timeout=300)
    os.close(near)
    assert process.returncode == 0, seen.decode()
    assert json.loads(output)["results"]
    assert "━" in seen.decode()
