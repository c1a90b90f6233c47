"""The real kernel interface, interrupted and refused from outside by strace.

Here nothing stands between the lanes and their system calls but strace, which leaves calls out and
answers for the kernel. Short counts cannot be had this way (what strace claims the kernel has
taken, it has not): they are in test_faulty_kernel.py.
"""

import errno
import shutil
import subprocess
import textwrap

import pytest
from faults._support import MIB, finish, make_file, noise, start_python

from nvmeio import files

pytestmark = pytest.mark.slow

WORK = """
import sys
from pathlib import Path
import nvmeio
from faults._support import aligned, bytes_of, misaligned, noise

folder, engine = Path(sys.argv[1]), sys.argv[2]
content = noise(3 << 20, seed=1)
with nvmeio.AioHandle(64 << 10, 8, engine=engine, intra_op_parallelism=2) as handle:
    for turn, allocate in enumerate((aligned, misaligned)):
        tensor = allocate(3 << 20)
        assert handle.async_pread(tensor, folder / "old").result(100) == 3 << 20
        assert bytes_of(tensor) == bytes_of(content)
        path = folder / f"new-{turn}"
        assert handle.async_pwrite(tensor, path, 1000 * turn).result(100) == 3 << 20
        handle.sync_fsync(path)
        assert path.read_bytes() == bytes(1000 * turn) + bytes_of(content)
    stats = handle.stats
    assert (stats.operations, stats.errors, stats.in_flight) == (6, 0, 0), stats
    print(handle.engine)
"""


@pytest.fixture(scope="session")
def strace():
    """The command, where it is installed and may trace."""
    path = shutil.which("strace")
    if path is None:
        pytest.skip("strace is not installed")
    probe = [path, "-f", "-o", "/dev/null", "-e", "inject=io_submit:error=EAGAIN:when=1", "true"]
    tried = subprocess.run(probe, capture_output=True, text=True, timeout=300)
    if tried.returncode:
        pytest.skip(f"strace cannot trace here: {tried.stderr.strip()}")
    faster = [path, "-f", "--seccomp-bpf", "-o", "/dev/null", "-e", "trace=io_submit", "true"]
    works = subprocess.run(faster, capture_output=True, timeout=300).returncode == 0
    return [path, "-f", "-qq", *(["--seccomp-bpf"] if works else [])]


@pytest.fixture
def traced(strace, tmp_path):
    """Runs Python code under strace with these injections; the run, and what was injected."""

    def run(code, *injections, arguments=(), env=None, paths=()):
        log = tmp_path / "strace.log"
        calls = ",".join(dict.fromkeys(injection.split(":")[0] for injection in injections))
        command = [*strace, "-o", str(log), "-e", f"trace={calls}", "-e", "signal=none"]
        for injection in injections:
            command += ["-e", f"inject={injection}"]
        for path in paths:  # nothing else is touched
            command += ["-P", str(path)]
        process = start_python(
            code,
            tmp_path,
            *arguments,
            before=tuple(command),
            env={"NVMEIO_LIBAIO": "none", **(env or {})},
        )
        ran = finish(process, 100)
        injected = [line for line in log.read_text().splitlines() if "(INJECTED)" in line]
        return ran, injected

    return run


@pytest.mark.parametrize(
    "injections",
    [
        ["io_submit:error=EAGAIN:when=1+3", "fallocate:error=EOPNOTSUPP"],
        ["io_submit:error=EINTR:when=1+2", "fallocate:error=ENOSPC"],
        ["io_submit:retval=0:when=2+3", "io_getevents:error=EINTR:when=1+2"],
        [
            "io_submit:error=EAGAIN:when=2+3",
            "io_getevents:error=EINTR:when=2+3",
            "fallocate:error=EINTR:when=1",
            "pwrite64:error=EINTR:when=1",
        ],
    ],
    ids=" ".join,
)
def test_transient_failures_of_system_calls_are_not_noticed(traced, tmp_path, injections):
    make_file(tmp_path / "old", noise(3 * MIB, seed=1))
    ran, injected = traced(WORK, *injections, arguments=["libaio"])
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "libaio\n", ""), ran
    for injection in injections:
        call = injection.split(":")[0]
        if call == "fallocate" and not files.probe_direct(tmp_path).supported:
            continue  # nothing is allocated beforehand
        assert any(f"{call}(" in line or f"{call} resumed" in line for line in injected), (
            f"{call} was never touched: this tests nothing"
        )


def test_libaio_is_not_disturbed_either(traced, tmp_path):
    """libaio hands the kernel's errors on as they are."""
    make_file(tmp_path / "old", noise(3 * MIB, seed=1))
    ran, injected = traced(
        WORK,
        "io_submit:error=EAGAIN:when=1+3",
        "io_getevents:error=EINTR:when=1+2",
        arguments=["libaio"],
        env={"NVMEIO_LIBAIO": ""},
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "libaio\n", ""), ran
    assert injected


@pytest.mark.parametrize("error", ["ENOSYS", "EPERM"])
def test_kernel_without_aio(traced, tmp_path, error):
    """ "auto" takes the portable engine; "libaio", asked for, is an error that says why."""
    make_file(tmp_path / "old", noise(3 * MIB, seed=1))
    asked = """
        try:
            nvmeio.AioHandle(engine="libaio")
        except nvmeio.BackendUnavailableError as refused:
            print(refused)
    """
    ran, injected = traced(
        WORK + textwrap.dedent(asked), f"io_setup:error={error}", arguments=["auto"]
    )
    assert (ran.returncode, ran.stderr) == (0, ""), ran
    assert ran.stdout.startswith("threads\n")
    assert f"io_setup: {error}" in ran.stdout and "engine='threads'" in ran.stdout
    assert len(injected) >= 2


def test_limit_of_aio_events_that_others_have_used_up(traced, tmp_path):
    """Loads and saves failed, and the first save of a Checkpointer made hours before."""
    code = """
        import logging, os, sys
        import torch
        import nvmeio

        logging.basicConfig(format="%(message).120s", stream=sys.stdout)
        os.chdir(sys.argv[1])
        state = {"a": torch.arange(8_000_000.0)}
        for path in ("a.pt", "b.pt"):
            nvmeio.save(state, path)
        assert torch.equal(nvmeio.load("a.pt")["a"], state["a"])
        with nvmeio.Checkpointer("checkpoints") as checkpointer:
            print("made")
            checkpointer.save_sync(state, 1)
        try:
            nvmeio.AioHandle(engine="libaio")
        except nvmeio.BackendUnavailableError as refused:
            print(str(refused)[:50])
    """
    ran, injected = traced(code, "io_setup:error=EAGAIN")
    assert (ran.returncode, ran.stderr) == (0, ""), ran
    warning, made, refused = ran.stdout.splitlines()
    assert warning.startswith(
        "engine='auto' takes the slower 'threads': the kernel's limit for AIO"
    )
    assert made == "made" and refused.startswith("the kernel's limit for AIO events is reached")
    assert injected


def test_context_that_the_kernel_cannot_allocate_is_an_error(traced, tmp_path):
    """ENOMEM is no reason to fall back silently."""
    code = """
        import nvmeio

        try:
            nvmeio.AioHandle()
        except nvmeio.BackendUnavailableError as refused:
            print(refused)
    """
    ran, _ = traced(code, "io_setup:error=ENOMEM")
    assert (ran.returncode, ran.stderr) == (0, ""), ran
    assert "ENOMEM" in ran.stdout


def test_failing_blocks_are_told_with_errno_and_bytes(traced, tmp_path):
    """A failing io_submit concerns its first block; those after it are asked for again."""
    make_file(tmp_path / "old", noise(3 * MIB, seed=1))
    code = """
        import errno, sys
        from pathlib import Path
        import nvmeio
        from faults._support import aligned, bytes_of

        old = Path(sys.argv[1], "old")
        with nvmeio.AioHandle(64 << 10, 4) as handle:
            failed = handle.async_pread(aligned(3 << 20), old).exception(100)
            assert isinstance(failed, nvmeio.TransferError), failed
            print(failed.errno, failed.transferred)
            again = aligned(3 << 20)
            assert handle.async_pread(again, old).result(100) == 3 << 20
            assert bytes_of(again) == old.read_bytes()
            assert handle.stats.errors == 1 and handle.stats.in_flight == 0
    """
    ran, injected = traced(code, "io_submit:error=EBADF:when=2")
    assert (ran.returncode, ran.stderr) == (0, ""), ran
    number, transferred = map(int, ran.stdout.split())
    assert number == errno.EBADF
    assert 0 < transferred < 3 * MIB and transferred % (64 << 10) == 0
    assert len(injected) == 1


def test_close_that_reports_lost_writes(traced, tmp_path):
    """Network file systems tell of them at close(2): the write has failed then (man 2 close)."""
    code = """
        import sys
        from pathlib import Path
        import nvmeio
        from faults._support import misaligned

        folder = Path(sys.argv[1])
        with nvmeio.AioHandle() as handle:
            failed = handle.async_pwrite(misaligned(5000), folder / "lost").exception(100)
            print(type(failed).__name__, failed.errno, failed.operation, failed.transferred)
            assert handle.sync_pwrite(misaligned(5000), folder / "kept") == 5000
            assert handle.stats.in_flight == 0
    """
    ran, injected = traced(code, "close:error=EIO", paths=[tmp_path / "lost"])
    assert (ran.returncode, ran.stderr) == (0, ""), ran
    assert injected
    assert ran.stdout == f"TransferError {errno.EIO} close 5000\n"
