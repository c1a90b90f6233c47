"""The native shim driven without Python: under sanitizers, and under valgrind in `make stress`."""

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("run.sh")
MISSING = 77  # the script's exit status where a tool is not there


@pytest.mark.parametrize(
    "variant",
    [
        "asan",
        pytest.param("tsan", marks=pytest.mark.stress),
        pytest.param("valgrind", marks=pytest.mark.stress),
    ],
)
@pytest.mark.timeout(1500)
def test_shim_is_clean_under(variant, tmp_path):
    """Addresses, leaks, undefined behaviour, data races: in C, where Python would hide them."""
    rounds = "1" if variant == "asan" else "3"
    process = subprocess.Popen(
        ["/bin/sh", SCRIPT, variant],
        env={**os.environ, "ROUNDS": rounds, "TMPDIR": str(tmp_path), "LD_PRELOAD": ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=1490)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        pytest.fail(f"hangs: {output}")
    if process.returncode == MISSING:
        pytest.skip(output.strip().splitlines()[-1])
    assert process.returncode == 0, output
    assert output.count("rounds, direct I/O") == 3, output
    assert output.count("with packed weights") == 1, output
