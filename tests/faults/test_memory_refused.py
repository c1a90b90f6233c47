"""Memory is refused in the middle of a call (RLIMIT_AS): a clear error, and the same bits after it.

Nothing hangs. Once the limit is lifted the same call does what it should, or the object says that
it is broken. Which allocation meets the limit is chance, so this is in `make stress`;
tests/threads/test_threads.py has the refusals that hung something once, one by one.
NVMEIO_MEMORY_SEED repeats a run.
"""

import os
import random
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from faults._support import environment

# So that malloc maps every tensor, and unmaps it: each can be refused.
_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_TOP_PAD_": "0",
}
# A thread's first use of a library's thread-local data, which nobody can refuse (__tls_get_addr).
_GLIBC_GAVE_UP = "cannot allocate memory for thread-local data: ABORT\n"

# Memory comes back after this long at most. CPython 3.11 tries an `except` again and again, holding
# the GIL, until it has an int for the place of the error (Python/ceval.c, `exception_unwind`).
_REFUSED_S = 20


@pytest.mark.stress
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "scenario",
    [
        "step",
        "step-on-disk",
        "passes",
        "passes-on-disk",
        "stream",
        "load",
        "save",
        "checkpointer",
    ],
)
def test_memory_refused_in_mid_call(scenario, tmp_path):
    """A step hung for ever where a new thread got no memory for its first call."""
    tests = Path(__file__).parents[1]
    seed = os.environ.get("NVMEIO_MEMORY_SEED") or random.SystemRandom().randrange(1 << 32)
    print(f"NVMEIO_MEMORY_SEED={seed}")
    command = ["-W", "ignore", "-m", "faults._memory_limit", scenario, tmp_path, seed, "24"]
    with subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=environment(**_MALLOC),
        cwd=tests,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as ran:
        for _ in range(580 // _REFUSED_S):
            try:
                _, stderr = ran.communicate(timeout=_REFUSED_S)
                break
            except subprocess.TimeoutExpired:
                resource.prlimit(ran.pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        else:
            ran.kill()
            pytest.fail("it has not ended after 580 s")
    if ran.returncode == 127 and stderr.endswith(_GLIBC_GAVE_UP):
        pytest.skip(f"glibc ended the process: {stderr.strip()}")
    assert ran.returncode == 0, stderr[-6000:]
