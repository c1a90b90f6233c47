"""The examples run, verify what they did, and leave nothing behind."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import Program, run_program

EXAMPLES = Path(__file__).parents[2] / "examples"
# Far above what they take: only one that hangs comes to that, however busy the machine is.
LIMIT_S = 550

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def command(example: str, folder: Path, *arguments: str) -> list[str]:
    """Warnings are errors there too; one in a destructor still shows on stderr."""
    script = str(EXAMPLES / example)
    return [sys.executable, "-W", "error", script, "--dir", str(folder), *arguments]


# They measure their own memory, or limit it: torch's pages are not to be there before.
ALONE = (
    "12_larger_than_memory.py",
    "13_train_beyond_memory.py",
    "21_park_while_generating.py",
)


def run(example: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    told, environment = command(example, folder, *arguments), os.environ | {"COLUMNS": "80"}
    if example not in ALONE:
        return run_program(told, timeout=LIMIT_S, env=environment)
    return subprocess.run(told, capture_output=True, text=True, timeout=LIMIT_S, env=environment)


# Arguments, and a part of what each prints at 80 columns.
RUNS = {
    "00_first_look.py": (["--size", "32M"], "3 checkpoints, read by torch and by nvmeio"),
    "01_await_beside_compute.py": (["--size", "32M"], "layers read for training, both ways"),
    "02_coroutines.py": ([], "ShortTransferError: [Errno 61] ENODATA"),
    "03_futures.py": ([], "9 operations finished"),
    "04_offload_pipeline.py": (["--size", "48M"], "buffer 2"),
    "05_offsets.py": ([], "layer393.weight in place"),
    "06_page_locked.py": ([], "16 readers"),
    "07_resume_after_kill.py": (["--kills", "1", "--steps", "8", "--saves", "3"], "steps 5, 6, 7"),
    "08_distributed_checkpoint.py": (["--width", "512"], "by 2 ranks"),
    "09_in_place_of_torch_save.py": (["--size", "64M"], "read by torch and by nvmeio"),
    "11_gpu_memory.py": (["--size", "32M"], "came back as they were"),
    "12_larger_than_memory.py": (
        ["--size", "96M", "--memory", "24M", "--tokens", "3"],
        "times the memory",
    ),
    "13_train_beyond_memory.py": (
        # With 50M in 240M, one machine had no room for 16 MB of backward; why is not known.
        ["--parameters", "90M", "--memory", "370M", "--steps", "2"],
        "the drive's endurance",
    ),
    "14_offload_by_hand.py": (["--size", "32M"], "three steps over weights"),
    "15_embedding_beyond_memory.py": (["--size", "24M", "--steps", "6"], "times as long"),
    "16_shuffled_tokens.py": (
        ["--size", "8M", "--epoch", "640", "--workers", "1"],
        "cold and shuffled",
    ),
    "17_prompt_seen_before.py": (
        ["--tokens", "256", "--width", "128", "--layers", "2"],
        "from another process",
    ),
    "18_finetune_beyond_memory.py": (
        ["--width", "128", "--layers", "16", "--steps", "3"],
        "over a base four times the memory",
    ),
    "19_activations_beyond_memory.py": (
        ["--width", "64", "--layers", "6", "--tokens", "1024"],
        "three steps over 6 layers, to the bit",
    ),
    "20_mixture_beyond_memory.py": (
        ["--experts", "32", "--width", "128", "--tokens", "24"],
        "of the experts in memory",
    ),
    "21_park_while_generating.py": (
        ["--width", "256", "--layers", "4", "--rounds", "2"],
        "and another one went on",
    ),
}


# What an example needs beyond `.[dev]`; where it is absent the example is skipped by name.
WITH_TRANSFORMERS = ("12_larger", "17_prompt", "20_mixture")
NEEDS = {name: "transformers" for name in RUNS if name.startswith(WITH_TRANSFORMERS)}


@pytest.mark.parametrize("example", RUNS)
def test_example_verifies_its_work(example: str, tmp_path: Path) -> None:
    needed = NEEDS.get(example)
    if needed and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{example} needs {needed}: `make clients` installs it")
    arguments, telling = RUNS[example]
    ran = run(example, tmp_path, *arguments)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    # Where lines break depends on the figures in them, which are the machine's.
    assert telling in " ".join(ran.stdout.split())
    assert "Verified" in ran.stdout
    assert max(map(len, ran.stdout.splitlines())) <= 80
    assert list(tmp_path.iterdir()) == []


# Needs DeepSpeed: tests/compat/test_deepspeed_installed.py runs it where that is installed.
ELSEWHERE = {"10_deepspeed_unchanged.py"}


def test_every_example_is_run_here() -> None:
    examples = {path.name for path in EXAMPLES.glob("[0-9]*.py")}
    assert RUNS.keys() == examples - ELSEWHERE


def test_demo_prints_nothing_but_json_and_keeps_its_files_when_asked(tmp_path: Path) -> None:
    ran = run("01_await_beside_compute.py", tmp_path, "--size=8M", "--layers=3", "--json", "--keep")
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    assert result["layers"] == 3
    assert result["nvmeio_stats"]["in_flight"] == 0
    assert result["nvmeio"]["loss"] == pytest.approx(result["in_memory"]["loss"])
    files = {path.name: path.stat().st_size for path in tmp_path.glob("nvmeio-demo-*/*")}
    assert files.keys() == {"nvmeio.weights", "python.weights"}
    assert min(files.values()) >= 8 << 20


def test_demo_refuses_what_does_not_fit(tmp_path: Path) -> None:
    ran = run("01_await_beside_compute.py", tmp_path, "--size", "1000000T")
    assert ran.returncode == 1
    assert "GB free" in ran.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_demo_removes_its_files(kind: signal.Signals, tmp_path: Path) -> None:
    started = Program[str](
        command("01_await_beside_compute.py", tmp_path, "--size", "1G"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not list(tmp_path.glob("nvmeio-demo-*/python.weights")):
            assert started.poll() is None, started.communicate()
            time.sleep(0.01)  # polled: nothing else tells that transfers are under way
        started.send_signal(kind)
        _, errors = started.communicate(timeout=LIMIT_S)
    finally:
        started.kill()
    assert started.returncode == 130
    assert errors == "Interrupted; the files are removed.\n"
    assert list(tmp_path.iterdir()) == []
