"""The real libcufile on host memory: every call that opens its driver in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from gds._support import real, real_library

import nvmeio
from nvmeio.engines.cufile import library

pytestmark = pytest.mark.gds

HEADER = """
#include <stddef.h>
#include <stdbool.h>
#include <stdio.h>
#include "cufile.h"
#define AT(type, field) printf("%s.%s %zu\\n", #type, #field, offsetof(type, field))
#define SIZE(type) printf("%s %zu\\n", #type, sizeof(type))
int main(void) {
  SIZE(CUfileError_t); SIZE(CUfileDescr_t); SIZE(CUfileDrvProps_t);
  AT(CUfileError_t, err); AT(CUfileError_t, cu_err);
  AT(CUfileDescr_t, type); AT(CUfileDescr_t, handle); AT(CUfileDescr_t, fs_ops);
  AT(CUfileDrvProps_t, nvfs); AT(CUfileDrvProps_t, fflags);
  AT(CUfileDrvProps_t, max_device_cache_size); AT(CUfileDrvProps_t, per_buffer_cache_size);
  AT(CUfileDrvProps_t, max_device_pinned_mem_size); AT(CUfileDrvProps_t, max_batch_io_size);
  AT(CUfileDrvProps_t, max_batch_io_timeout_msecs);
  printf("opaque %d compat %d parallel %d nvme %d p2p %d\\n", CU_FILE_HANDLE_TYPE_OPAQUE_FD,
         CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE, CUFILE_PARAM_EXECUTION_PARALLEL_IO,
         CU_FILE_NVME_SUPPORTED, CU_FILE_P2P_SUPPORTED);
  return 0;
}
"""
# Sizes and offsets that every version has had.
LAYOUTS = {
    "CUfileError_t": (8, {"err": 0, "cu_err": 4}),
    "CUfileDescr_t": (24, {"type": 0, "handle": 8, "fs_ops": 16}),
    "CUfileDrvProps_t": (
        56,
        {
            "nvfs": 0,
            "fflags": 32,
            "max_device_cache_size": 36,
            "per_buffer_cache_size": 40,
            "max_device_pinned_mem_size": 44,
            "max_batch_io_size": 48,
            "max_batch_io_timeout_msecs": 52,
        },
    ),
}
# The four names of cuda.h that cufile.h uses; none of them is in what is measured.
CUDA = """
#include <stdint.h>
typedef int CUresult;
typedef struct CUstream_st *CUstream;
typedef unsigned long long CUdeviceptr;
"""


def test_symbols_are_there() -> None:
    loaded = library.Library(real_library(), "the test")
    for name in ("cuFileDriverOpen", "cuFileBufRegister", "cuFileDriverGetProperties"):
        assert loaded.has(name)
    assert not loaded.has("cuFileNoSuchCall")
    assert loaded.version >= library.OLDEST
    major, minor = loaded.version_text.split(".")
    assert int(major) * 1000 + int(minor) * 10 == loaded.version


def test_layouts_are_those_of_the_table() -> None:
    ffi = library.declared()
    for name, (size, fields) in LAYOUTS.items():
        assert ffi.sizeof(name) == size
        assert {field: ffi.offsetof(name, field) for field in fields} == fields


def test_layouts_are_those_of_the_header(tmp_path: Path) -> None:
    header = Path(real_library()).parents[1] / "include/cufile.h"
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not header.exists():
        pytest.skip("no C compiler, or a libcufile without its header")
    (tmp_path / "cuda.h").write_text(CUDA)
    (tmp_path / "main.c").write_text(HEADER)
    program = tmp_path / "main"
    subprocess.run(
        [compiler, "-w", f"-I{tmp_path}", f"-I{header.parent}", "-o", program, tmp_path / "main.c"],
        check=True,
        timeout=300,
    )
    lines = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split("\n")
    found = dict(line.rsplit(" ", 1) for line in lines if line and not line.startswith("opaque"))
    for name, (size, fields) in LAYOUTS.items():
        assert int(found[name]) == size
        assert {field: int(found[f"{name}.{field}"]) for field in fields} == fields
    numbers = (library.OPAQUE_FD, library.ALLOW_COMPAT_MODE, library.PARALLEL_IO, 4, 4)
    assert lines[-2] == "opaque {} compat {} parallel {} nvme {} p2p {}".format(*numbers)


def answer(script: str, directory: Path, traps: Path | None) -> dict[str, object]:
    """What a script prints as JSON."""
    done = real(script, directory, traps=traps)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (directory / "cufile.log").exists()
    told: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A directory on the disk, and one in memory, where there is no O_DIRECT."""
    if request.param == "disk":
        return tmp_path
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        pytest.skip("there is no writable /dev/shm")
    made = shared / f"nvmeio-{os.getpid()}-{tmp_path.name}"
    made.mkdir()
    request.addfinalizer(lambda: shutil.rmtree(made))
    return made


def test_round_trips(place: Path, traps: Path) -> None:
    told = answer(
        """
        import asyncio, json, os, random
        import torch, nvmeio
        path = os.environ["DIR"] + "/file"
        generator = torch.Generator().manual_seed(0)
        data = torch.randint(0, 256, (5_000_001,), dtype=torch.uint8, generator=generator)
        shape = [(0, 5_000_001), (1, 5000), (4096, 1 << 20), (77_777, 4_000_000), (12345, 1)]
        wrong = []

        async def main():
            async with nvmeio.GdsHandle(cpu_tensors="cufile", task_bytes=1 << 20) as handle:
                for offset, nbytes in shape:
                    before = open(path, "rb").read() if os.path.exists(path) else b""
                    before = bytearray(before.ljust(offset + nbytes, b"\\0"))
                    before[offset : offset + nbytes] = data[:nbytes].numpy().tobytes()
                    await handle.async_pwrite(data[:nbytes], path, offset)
                    back = torch.zeros(nbytes + 64, dtype=torch.uint8)[3 : nbytes + 3]
                    await handle.async_pread(back, path, offset)
                    if not torch.equal(back, data[:nbytes]) or open(path, "rb").read() != before:
                        wrong.append((offset, nbytes))
                # many at once, in one file and in several
                parts = [data[i * 40_000 : (i + 1) * 40_000] for i in range(60)]
                files = [f"{path}{i % 3}" for i in range(60)]
                spans = zip(parts, files)
                await asyncio.gather(
                    *(handle.async_pwrite(p, f, i * 40_000) for i, (p, f) in enumerate(spans))
                )
                back = [torch.zeros_like(p) for p in parts]
                spans = zip(back, files)
                await asyncio.gather(
                    *(handle.async_pread(p, f, i * 40_000) for i, (p, f) in enumerate(spans))
                )
                if not all(torch.equal(a, b) for a, b in zip(parts, back)):
                    wrong.append("at once")
                # cancelled, then used again
                task = asyncio.create_task(handle.async_pread(back[0], files[0]))
                task.cancel()
                try:
                    await task
                except asyncio.CancelledError:
                    pass
                await handle.async_pread(data.clone(), path)
                short = torch.zeros(6_000_000, dtype=torch.uint8)
                try:
                    await handle.async_pread(short, path)
                except nvmeio.ShortTransferError as failed:
                    found = failed.transferred
                return handle.mode, found, os.path.getsize(path)

        mode, found, size = asyncio.run(main())
        with nvmeio.GdsHandle(cpu_tensors="cufile") as again:  # the driver opens a second time
            again.sync_pread(data, path)
        print(json.dumps({"wrong": wrong, "mode": mode, "short": found == size}))
        """,
        place,
        traps,
    )
    assert told == {"wrong": [], "mode": "host", "short": True}


def test_registered_memory_and_misuse(tmp_path: Path, traps: Path) -> None:
    told = answer(
        """
        import json, os
        import torch, nvmeio
        from nvmeio.engines.cufile.library import CuFileFailure
        path = os.environ["DIR"] + "/file"
        handle = nvmeio.GdsHandle(cpu_tensors="cufile", task_bytes=1 << 20)
        library = handle._gds._library
        told = {}
        whole = handle.new_pinned_device_tensor(3 << 20, torch.uint8)
        whole.copy_(torch.arange(3 << 20).remainder(251))
        handle.sync_pwrite(whole, path)
        view = whole[1000 : 1000 + (1 << 20)]
        expected = view.clone()
        view.zero_()
        handle.sync_pread(view, path, 1000)
        told["view"] = torch.equal(view, expected)
        # An aligned base and an odd offset, at an aligned place in the file: see engine._base.
        odd = whole[64 : 64 + (1 << 20)]
        handle.sync_pwrite(odd, path + "2")
        expected = odd.clone()
        odd.zero_()
        handle.sync_pread(odd, path + "2")
        told["odd"] = torch.equal(odd, expected)

        def status(call, *arguments):
            try:
                call(*arguments)
            except CuFileFailure as failed:
                return failed.status

        told["twice"] = status(library.register_memory, whole.data_ptr(), whole.nbytes)
        handle.free_pinned_device_tensor(whole)
        told["gone"] = status(library.unregister_memory, whole.data_ptr())
        with nvmeio.open(path, "r+") as file:
            handle.sync_pread(whole, file)
            fd = file._descriptors.direct_fd
            fd = fd if fd >= 0 else file._descriptors.buffered_fd()
            told["file twice"] = status(library.register_file, fd)
            known = handle._gds._driver.files._files[fd].handle
            library.unregister_file(known)
            told["after"] = status(library.read, known, whole.data_ptr(), 4096, 0, 0)
            handle._gds._driver.files._files[fd].handle = None
        told["use"] = library._lib.cuFileUseCount()
        handle.close()
        told["closed"] = library._lib.cuFileUseCount()
        print(json.dumps(told))
        """,
        tmp_path,
        traps,
    )
    assert told == {
        "view": True,
        "odd": True,
        "twice": 5023,
        "gone": 5024,
        "file twice": 5028,
        "after": 5027,
        "use": 1,
        "closed": 0,
    }


def test_one_open_file_for_two_handles_and_beyond_the_driver(tmp_path: Path, traps: Path) -> None:
    told = answer(
        """
        import json, os
        import torch, nvmeio
        data = torch.arange(1 << 20, dtype=torch.int32)
        back = torch.zeros_like(data)
        right = []
        with nvmeio.open(os.environ["DIR"] + "/file", "rw") as file:
            for turn in range(2):
                first, second = (nvmeio.GdsHandle(cpu_tensors="cufile") for _ in range(2))
                first.sync_pwrite(data, file)
                second.sync_pread(back.zero_(), file)
                first.close()
                second.sync_pwrite(data, file)
                second.close()
                right.append(torch.equal(back, data))
        print(json.dumps({"right": right, "use": second._gds._library._lib.cuFileUseCount()}))
        """,
        tmp_path,
        traps,
    )
    assert told == {"right": [True, True], "use": 0}


def test_open_that_really_hangs_is_given_up_and_the_process_exits(tmp_path: Path) -> None:
    """Without /proc/modules, with our own check taken out."""
    if Path("/proc/modules").exists():
        pytest.skip("there is a /proc/modules: the driver opens here")
    done = real(
        """
        from pathlib import Path
        import nvmeio
        from nvmeio.engines.cufile import driver, driver as preflight
        preflight.MODULES = Path("/proc/self/status")
        driver.OPEN_LIMIT_S = 0.5
        try:
            nvmeio.GdsHandle(cpu_tensors="cufile")
        except nvmeio.BackendUnavailableError as no:
            print(no)
        """,
        tmp_path,
        traps=None,
    )
    assert done.returncode == 0, done.stderr
    assert "not back after 0.5 s" in done.stdout


def test_refused_where_it_would_hang(tmp_path: Path) -> None:
    if Path("/proc/modules").exists():
        pytest.skip("there is a /proc/modules: the driver opens here")
    with pytest.raises(nvmeio.BackendUnavailableError, match="would never return"):
        nvmeio.GdsHandle(cpu_tensors="cufile")


def test_disk_without_udev_is_explained(tmp_path: Path, traps: Path) -> None:
    if Path("/run/udev/data").is_dir():
        pytest.skip("udev's database is there")
    nowhere = tmp_path / "stand-in/none"
    (tmp_path / "stand-in").mkdir()
    (tmp_path / "stand-in/modules").touch()
    done = real(
        """
        import os, torch, nvmeio
        handle = nvmeio.GdsHandle(cpu_tensors="cufile")
        try:
            handle.sync_pwrite(torch.zeros(4096), os.environ["DIR"] + "/file")
            print("works")
        except nvmeio.CuFileError as failed:
            print(failed.cufile_status, failed)
        """,
        tmp_path,
        traps=None,
        LD_PRELOAD=str(traps),
        NVMEIO_TEST_MODULES=str(tmp_path / "stand-in/modules"),
        NVMEIO_TEST_UDEV=str(nowhere),
    )
    assert done.returncode == 0, done.stderr
    if done.stdout.strip() == "works":
        pytest.skip("the file system of this directory is none that cuFile asks udev about")
    assert done.stdout.startswith("5027")
    assert "/run/udev/data has to be there" in done.stdout
