"""What the fault tests share: bytes, subprocesses, mounts, loop devices."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import Program
from support import collect, random_tensor

import nvmeio
from nvmeio._bindings import ffi, lib
from nvmeio.engines.libaio import LibaioEngine

KIB, MIB = 1 << 10, 1 << 20
NOBODY = 65534

# --- bytes ------------------------------------------------------------------------------------


@functools.lru_cache(64)
def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    """So many bytes that repeat at no block's length; not to be changed."""
    return random_tensor(nbytes, seed)


def aligned(nbytes: int) -> torch.Tensor:
    """A tensor that direct I/O reaches without a bounce, filled with 0xA5."""
    return nvmeio.empty_aligned(nbytes, dtype=torch.uint8).fill_(0xA5)


def misaligned(nbytes: int) -> torch.Tensor:
    """A tensor at an odd address, filled with 0xA5."""
    return aligned(nbytes + 4096)[1 : nbytes + 1]


def end_in_a_forked_child(
    start: Callable[[], nvmeio.Operation], refused: Sequence[Callable[[], object]]
) -> None:
    """In a forked child these calls are refused; in the parent the operation gets to its end."""
    torch.set_num_threads(1)  # OpenMP's do not survive a fork
    operation = start()
    collect()  # the garbage of others is none of the child's business
    child = os.fork()
    if not child:
        try:
            for call in refused:
                with pytest.raises(nvmeio.ClosedError):
                    call()
            del operation
            gc.collect()
            os._exit(0)
        except BaseException:
            os._exit(2)
    assert operation.result(100) == 500_000
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def bytes_of(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def make_file(path: Path, content: torch.Tensor) -> Path:
    """A file written without nvmeio, and on the drive before this returns."""
    with open(path, "wb") as file:
        file.write(bytes_of(content))
        file.flush()
        os.fsync(file.fileno())
    return path


def eventually(condition: Callable[[], object], timeout_s: float = 60.0) -> bool:
    """Whether a condition comes true in time; for what happens beside the test."""
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


def wait_until_asleep(pid: int) -> None:
    """A process's main thread waits for something: look after look it sleeps."""
    asleep = 0
    until = time.monotonic() + 100.0
    while asleep < 20:
        assert time.monotonic() < until, "it does not come to wait for anything"
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        asleep = asleep + 1 if state == "S" else 0
        time.sleep(0.005)


# --- a kernel that misbehaves -----------------------------------------------------------------

_WIDE = ("refuse_offset", "event_offset")
_OFF = {"refuse_offset": -1, "event_offset": -1, "event_opcode": -1, "event_times": -1}
_SWITCHES = (
    "submit_error",
    "submit_error_first",
    "submit_error_every",
    "submit_error_always",
    "submit_at_most",
    "refuse_offset",
    "refuse_direct",
    "short_nbytes",
    "getevents_error",
    "getevents_error_every",
    "getevents_at_most",
    "reverse",
    "hold_every",
    "event_offset",
    "event_opcode",
    "event_every",
    "event_error",
    "event_times",
)


class FaultyKernel:
    """One copy of fakes/faulty_libaio.c: its switches and counters, and handles upon it."""

    def __init__(self, library: Path) -> None:
        self.table = lib.nv_kaio_open(str(library).encode())
        assert self.table != ffi.NULL, ffi.string(lib.nv_kaio_error())
        self._library = ctypes.CDLL(str(library))

    def __getitem__(self, name: str) -> int:
        return self._variable(name).value

    def set(self, **switches: int) -> None:
        """Set switches (and counters); an errno last of all, for it arms the others."""
        for name in sorted(switches, key=lambda name: name.endswith("_error")):
            self._variable(name).value = switches[name]

    def off(self) -> None:
        """From now on behave."""
        for name in _SWITCHES:
            self._variable(name).value = _OFF.get(name, 0)
        self._library.open_gate()

    def close_gate(self) -> None:
        """Let blocks reach the kernel, and keep their completions."""
        self._variable("gate").value = 1

    def open_gate(self) -> None:
        """Hand the completions out."""
        self._library.open_gate()

    @contextmanager
    def handle(self, **parameters: Any) -> Iterator[nvmeio.AioHandle]:
        """A handle on this kernel; behaving again before it is closed, so that it can be."""
        handle = nvmeio.AioHandle(engine=LibaioEngine(self.table), **parameters)
        try:
            yield handle
        except BaseException:
            self.off()
            # A lane that has missed a signal looks up again when it is given something.
            for _ in range(handle.get_intra_op_parallelism()):
                handle.async_pread(torch.empty(1, dtype=torch.uint8), "/proc/self/exe")
            handle.wait(100)
            raise
        finally:
            self.off()
            with contextlib.suppress(nvmeio.TransferError):
                handle.close()

    def _variable(self, name: str) -> Any:
        kind = ctypes.c_longlong if name in _WIDE else ctypes.c_int
        return kind.in_dll(self._library, name)


# --- what a process holds ---------------------------------------------------------------------


def aio_contexts() -> int:
    """AIO contexts of this process: the kernel maps a ring for each."""
    return Path("/proc/self/maps").read_text().count("/[aio]")


def mapped_bytes() -> int:
    """Of this process, memory or not."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- subprocesses -----------------------------------------------------------------------------


def environment(**more: str) -> dict[str, str]:
    """For a child that must import the very nvmeio that is being tested, and this file."""
    root, tests = Path(nvmeio.__file__).parents[1], Path(__file__).parents[1]
    paths = [str(root), str(tests), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **more}


def start_python(
    code: str,
    *arguments: object,
    before: tuple[str, ...] = (),
    options: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
    fresh: bool = False,
    **popen: Any,
) -> subprocess.Popen[str]:
    """A Python that runs this code, behind a command such as strace where `before` names one.

    In a `fresh` one nothing was imported before.
    """
    begin = subprocess.Popen[str] if fresh else Program[str]
    return begin(
        [*before, sys.executable, *options, "-c", textwrap.dedent(code), *map(str, arguments)],
        env=environment(**(env or {})),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **popen,
    )


def run_python(
    code: str, *arguments: object, timeout_s: float = 300.0, **start: Any
) -> subprocess.CompletedProcess[str]:
    """Run code to its end; a process that hangs is killed with its children, and the test fails."""
    process = start_python(code, *arguments, **start)
    return finish(process, timeout_s)


def finish(
    process: subprocess.Popen[str], timeout_s: float = 300.0
) -> subprocess.CompletedProcess[str]:
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"hangs after {timeout_s} s\nstdout: {out}\nstderr: {err}")
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


# --- mounts and loop devices ------------------------------------------------------------------

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting takes root")


def tool(name: str) -> str:
    """The path of a system tool, or skip."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def must(*command: object) -> str:
    """Run a set-up command; what it complains of is why the test is skipped."""
    ran = subprocess.run(
        [tool(str(command[0])), *map(str, command[1:])],
        capture_output=True,
        text=True,
        timeout=300,
    )
    if ran.returncode:
        pytest.skip(f"{' '.join(map(str, command))}: {ran.stderr.strip() or ran.stdout.strip()}")
    return ran.stdout.strip()


@contextmanager
def loop_device(nbytes: int, sector: int = 512) -> Iterator[Path]:
    """A block device over a sparse file, with this logical block size."""
    if os.geteuid() != 0:
        pytest.skip("loop devices take root")
    with tempfile.TemporaryDirectory(prefix="nvmeio-loop-") as folder:
        image = Path(folder, "image")
        with open(image, "wb") as file:
            file.truncate(nbytes)
        device = must("losetup", "--find", "--show", "--sector-size", sector, image)
        try:
            yield Path(device)
        finally:
            subprocess.run([tool("losetup"), "--detach", device], check=True, timeout=300)


@contextmanager
def mounted(kind: str, device: object = "none", options: str = "") -> Iterator[Path]:
    """A file system mounted on a temporary directory, unmounted whatever happens."""
    if os.geteuid() != 0:
        pytest.skip("mounting takes root")
    folder = Path(tempfile.mkdtemp(prefix="nvmeio-mount-"))
    try:
        must("mount", "-t", kind, *(["-o", options] if options else []), device, folder)
        try:
            yield folder
        finally:
            _unmount(folder)
    finally:
        folder.rmdir()


def _unmount(folder: Path) -> None:
    command = [tool("umount"), str(folder)]
    for _ in range(50):  # a descriptor that is just being closed makes it busy
        ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if not ran.returncode:
            return
        time.sleep(0.1)
    subprocess.run([*command[:1], "--lazy", str(folder)], check=True, timeout=300)
    raise RuntimeError(f"{folder} stayed busy, something holds a file open: {ran.stderr.strip()}")


# Small ones: mkfs.xfs insists on 300 MiB, which a sparse image does not take.
_MKFS = {
    "ext4": (("mkfs.ext4", "-q", "-F", "-m", "0"), 64 * MIB),
    "xfs": (("mkfs.xfs", "-q", "-f"), 320 * MIB),
    "btrfs": (("mkfs.btrfs", "-q", "-f"), 256 * MIB),
}


@contextmanager
def formatted(kind: str, sector: int = 512, nbytes: int = 0, options: str = "") -> Iterator[Path]:
    """A file system of this kind on a loop device, mounted."""
    command, smallest = _MKFS[kind]
    with ExitStack() as stack:
        device = stack.enter_context(loop_device(nbytes or smallest, sector))
        must(*command, device)
        yield stack.enter_context(mounted(kind, device, options))
