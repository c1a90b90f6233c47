"""What the pump's C files promise each other and Python, where no engine shows it."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import thread

from nvmeio._bindings import ffi, lib

SHIM = Path(__file__).parents[2] / "native_shim"
COMPILER = shutil.which("cc") or shutil.which("gcc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
WAIT_S = 0.3


@pytest.fixture
def idle_request(tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """An engine without lanes, and a started request, which ends once a lane runs."""
    (tmp_path / "file").write_bytes(bytes(4096))
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    options = ffi.new("nv_options *", {"block_size": 4096, "queue_depth": 1, "lanes": 1})
    engine = lib.nv_engine_new(lib.nv_kaio_open(ffi.NULL), options, ffi.new("int *"))
    if engine == ffi.NULL:
        pytest.skip("the kernel gives no AIO context")
    cq = lib.nv_cq_new(engine)
    request = lib.nv_prepare(engine, cq, 1, 2, -1, fd, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0)
    lib.nv_start(request)
    yield engine, request
    lib.nv_request_free(request)
    lib.nv_cq_free(cq)
    lib.nv_engine_free(engine)
    os.close(fd)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("timeout_s", [1e10, 1e300, float("inf")])
def test_a_wait_of_any_length_sleeps(timeout_s: float, idle_request: tuple[Any, Any]) -> None:
    """Its nanoseconds overflowed: it held the lock and never slept, so that nothing could end."""
    engine, request = idle_request
    ended: list[int] = []
    cpu_s: list[float] = []

    def wait() -> None:
        began = time.thread_time()
        ended.append(lib.nv_wait(request, timeout_s))
        cpu_s.append(time.thread_time() - began)

    with thread(wait):
        time.sleep(WAIT_S)  # not for an order: a wait that does not sleep uses this time
        with thread(lib.nv_lane_run, engine, 0):
            while not lib.nv_is_done(request):
                lib.nv_wait(request, 0.01)
            lib.nv_engine_stop(engine)
    lib.nv_engine_close(engine)
    assert ended == [1]
    assert cpu_s[0] < WAIT_S / 3


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
def test_a_wait_without_a_length_returns_at_once(
    timeout_s: float, idle_request: tuple[Any, Any]
) -> None:
    engine, request = idle_request
    assert lib.nv_wait(request, timeout_s) == 0
    lib.nv_engine_stop(engine)
    with thread(lib.nv_lane_run, engine, 0):
        lib.nv_wait(request, 60)
    lib.nv_engine_close(engine)


def test_each_thread_has_its_own_reason_why_libaio_was_not_loaded(tmp_path: Path) -> None:
    """Another thread's reason was written over it."""
    reasons: dict[str, str] = {}
    both_failed = threading.Barrier(2)

    def fail(name: str) -> None:
        assert lib.nv_kaio_open(str(tmp_path / name).encode()) == ffi.NULL
        both_failed.wait(60)
        reasons[name] = ffi.string(lib.nv_kaio_error()).decode()

    with thread(fail, "one.so"), thread(fail, "other.so"):
        pass
    assert "one.so" in reasons["one.so"]
    assert "other.so" in reasons["other.so"]


@needs_compiler
def test_a_cpu_without_carryless_products_sums_without_them(tmp_path: Path) -> None:
    """nv_copy_crc32 used them on any CPU; the question was its caller's to ask."""
    source = tmp_path / "plain.c"
    source.write_text(
        "int asked;\n"
        "#define __builtin_cpu_supports(feature) (asked++, 0)\n"
        f'#include "{SHIM}/common/copy_crc32.c"\n'
    )
    assert COMPILER is not None
    library = tmp_path / "plain.so"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    plain = ctypes.CDLL(str(library))
    plain.nv_copy_crc32.restype = ctypes.c_uint32
    plain.nv_copy_crc32.argtypes = [ctypes.c_uint64] * 3 + [ctypes.c_uint32]
    content = os.urandom(1000)
    from_, to = ctypes.create_string_buffer(content, 1000), ctypes.create_string_buffer(1000)
    addresses = ctypes.addressof(to), ctypes.addressof(from_)
    assert plain.nv_copy_crc32(*addresses, 1000, 7) == zlib.crc32(content, 7)
    assert to.raw == content
    assert plain.nv_copy_crc32(addresses[1], addresses[1], 1000, 0) == zlib.crc32(content)
    if os.uname().machine == "x86_64":
        assert ctypes.c_int.in_dll(plain, "asked").value > 0


@needs_compiler
@pytest.mark.skipif(shutil.which("nm") is None, reason="there is no nm")
def test_files_of_the_pump_call_only_files_above_them(tmp_path: Path) -> None:
    """In the order of internal.h."""
    header = (SHIM / "pump" / "internal.h").read_text(encoding="utf-8")
    order = header.partition("/* The files in their order")[2]
    names = re.findall(r"(\w+)\.c\b", order)
    assert sorted(names) == sorted(path.stem for path in (SHIM / "pump").glob("*.c"))
    home: dict[str, str] = {}
    calls: dict[str, set[str]] = {}
    for name in names:
        assert COMPILER is not None
        compiled = tmp_path / f"{name}.o"
        source = SHIM / "pump" / f"{name}.c"
        subprocess.run(
            [COMPILER, "-std=c11", "-c", "-o", compiled, source], check=True, timeout=120
        )
        shown = subprocess.run(["nm", compiled], check=True, capture_output=True, text=True)
        symbols = [line.split()[-2:] for line in shown.stdout.splitlines()]
        home |= {symbol: name for kind, symbol in symbols if kind == "T"}
        calls[name] = {symbol for kind, symbol in symbols if kind == "U"}
    upward = {
        (name, symbol, home[symbol])
        for name in names
        for symbol in calls[name] & home.keys()
        if names.index(home[symbol]) > names.index(name)
    }
    assert upward == set()
    assert sum(len(symbols & home.keys()) for symbols in calls.values()) > 30
