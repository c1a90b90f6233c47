"""The real DeepSpeed with nvmeio in it: its probes, its report, its tools, its file writer."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from _deepspeed_support import (
    ON_NVMEIO,
    ROOT,
    TIME_LIMIT_S,
    Run,
    environment,
    free_port,
    needs_deepspeed,
)

pytestmark = [pytest.mark.slow, needs_deepspeed]


def on_nvmeio(*command: str, **more: str) -> str:
    """Run Python with these arguments under `nvmeio deepspeed`; what it printed."""
    done = subprocess.run(
        [sys.executable, *ON_NVMEIO, *command],
        env=environment() | more,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_fast_file_writer_in_both_formats_and_with_either_buffer(tmp_path: Path) -> None:
    output = Run("save", tmp_path, on_nvmeio=True).finish()
    result = json.loads(output.splitlines()[-1])
    assert result["op"] == "nvmeio.compat.deepspeed.handles"
    assert len(result["done"]) == len(set(result["done"])) == 8


def test_install_from_within(tmp_path: Path) -> None:
    """`install()` by hand, and DeepSpeed's native pinned memory on it."""
    script = tmp_path / "script.py"
    script.write_text(
        """
import gc, sys
import deepspeed, torch
from nvmeio.compat import deepspeed as compat
compat.install()
from deepspeed.ops.aio import AsyncIOBuilder
from deepspeed.ops.op_builder import PinMemoryBuilder, UtilsBuilder
from deepspeed.utils.pin_memory import NativePinnedMemory
assert AsyncIOBuilder().load().aio_handle is compat.aio_handle
assert PinMemoryBuilder().load().pin_handle is compat.pin_handle
assert UtilsBuilder().load().cast_to_byte_tensor(torch.zeros(3)).numel() == 12

pins, handle = NativePinnedMemory(), compat.aio_handle(queue_depth=1)
tensor = pins.pin(torch.arange(1000.0).view(10, 100))
assert tensor.tolist() == torch.arange(1000.0).view(10, 100).tolist()
assert pins.is_pinned(tensor) and handle.is_pinned(tensor[3:])
assert pins.unpin(tensor) and not handle.is_pinned(tensor)
tensor = pins.pin_empty(torch.empty(0), (7,))
address = tensor.data_ptr()
del tensor
gc.collect()
assert not pins._ranges and not pins._handle.free_cpu_locked_tensor_by_ptr(address)
print("everything held", file=sys.stderr)
"""
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    assert "everything held" in done.stderr, done.stderr


def test_probes_say_yes_without_headers_and_compiler() -> None:
    """Where libaio-dev is missing DeepSpeed would not even try."""
    script = (
        "import deepspeed.ops; from deepspeed.ops.op_builder import AsyncIOBuilder; "
        "print(AsyncIOBuilder().is_compatible(), deepspeed.ops.__compatible_ops__['async_io'], "
        "AsyncIOBuilder().load().aio_handle.__module__)"
    )
    # No program can be linked, as if there were nothing to link with.
    output = on_nvmeio("-c", script, LDFLAGS="-Wl,--no-such-option")
    assert output.split()[-3:] == ["True", "True", "nvmeio.compat.deepspeed.handles"]


def test_report_shows_async_io_as_compatible() -> None:
    output = on_nvmeio("-m", "deepspeed.env_report", LDFLAGS="-Wl,--no-such-option")
    (line,) = [line for line in output.splitlines() if line.startswith("async_io")]
    assert "OKAY" in line


def test_example(tmp_path: Path) -> None:
    example = ROOT / "examples" / "10_deepspeed_unchanged.py"
    assert "nvmeio" not in example.read_text().partition('"""\n\n')[2]
    output = on_nvmeio(str(example), "--dir", str(tmp_path), MASTER_PORT=str(free_port()))
    assert "step 4: loss" in output
    assert "done by nvmeio.compat.deepspeed.handles" in output
    assert list(tmp_path.iterdir()) == []


def test_the_example_leaves_nothing_behind_when_it_is_ended(tmp_path: Path) -> None:
    """SIGTERM left its directory, with the swapped files."""
    example = ROOT / "examples" / "10_deepspeed_unchanged.py"
    started = subprocess.Popen(
        [sys.executable, "-u", *ON_NVMEIO, str(example), "--dir", str(tmp_path)],
        env=environment() | {"MASTER_PORT": str(free_port())},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert started.stdout is not None
        first = next((line for line in started.stdout if line.startswith("step 0")), "")
        assert first and list(tmp_path.iterdir())
        started.send_signal(signal.SIGTERM)
        started.communicate(timeout=300)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
    assert started.returncode in (143, -signal.SIGTERM)
    assert list(tmp_path.iterdir()) == []


def test_ds_io_reading_and_writing_at_once(tmp_path: Path) -> None:
    main = (
        "import sys; sys.argv[0] = 'ds_io'; from deepspeed.nvme import ds_io_main; ds_io_main(); "
        "from nvmeio.compat.deepspeed import installed; print('on nvmeio:', installed())"
    )
    options = ["--folder", str(tmp_path), "--io_size", "4M", "--loops", "2"]
    options += ["--multi_process", "2", "--io_parallel", "2", "--validate"]
    with ThreadPoolExecutor() as both:
        writing = both.submit(on_nvmeio, "-c", main, *options)
        reading = both.submit(on_nvmeio, "-c", main, *options, "--read")
    for name, output in (("Write", writing.result()), ("Read", reading.result())):
        assert f"E2E {name} Speed" in output
        assert "on nvmeio: True" in output
