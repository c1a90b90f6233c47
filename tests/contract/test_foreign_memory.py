"""Memory that neither torch nor nvmeio allocated: what may not be touched is EFAULT, no crash.

In processes of their own: before, most cases ended theirs.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from support import random_bytes, run_python

NBYTES = 3 << 20
CASES = [
    (engine, nbytes, shift)
    for engine in ("auto", "threads")
    for nbytes, shift in ((4096, 0), (5000, 100), ((1 << 20) + 4096, 0))
]

COMMON = """
    import ctypes, errno, mmap, os, sys, warnings
    import torch
    import nvmeio

    warnings.simplefilter("ignore")  # torch warns of memory that is not writable
    libc = ctypes.CDLL(None, use_errno=True)

    def over(region, strided=False):
        whole = torch.frombuffer(region, dtype=torch.uint8)
        return whole[: 2 * nbytes : 2] if strided else whole[shift : shift + nbytes]

    def expect_fault(start):
        try:
            moved = start()
        except nvmeio.TransferError as failed:
            assert failed.errno == errno.EFAULT, failed
            return
        sys.exit(f"{moved} bytes were moved")
"""

READ_ONLY = """
    with open(path, "rb") as file:
        region = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    with nvmeio.AioHandle(engine=engine) as handle:
        for strided in (False, True):
            tensor = over(region, strided)
            before = tensor.contiguous().numpy().tobytes()
            for offset in (0, 3):
                expect_fault(lambda: handle.sync_pread(tensor, path, offset))
            assert tensor.contiguous().numpy().tobytes() == before
            assert handle.sync_pwrite(tensor, f"{path}.copy") == nbytes
            assert open(f"{path}.copy", "rb").read() == before
            os.unlink(f"{path}.copy")
"""

NO_ACCESS = """
    region = mmap.mmap(-1, 4 << 20)
    tensors = [over(region, strided) for strided in (False, True)]
    address = ctypes.addressof(ctypes.c_char.from_buffer(region))
    assert libc.mprotect(ctypes.c_void_p(address), 4 << 20, 0) == 0
    with nvmeio.AioHandle(engine=engine) as handle:
        for tensor in tensors:
            for offset in (0, 3):
                expect_fault(lambda: handle.sync_pwrite(tensor, f"{path}.copy", offset))
                expect_fault(lambda: handle.sync_pread(tensor, path, offset))
"""

CUT_SHORT = """
    with open(f"{path}.mapped", "w+b") as file:
        file.truncate(4 << 20)
        region = mmap.mmap(file.fileno(), 4 << 20)
        tensors = [over(region, strided) for strided in (False, True)]
        file.truncate(4096 if shift or nbytes > 8192 else 0)
    with nvmeio.AioHandle(engine=engine) as handle:
        for tensor in tensors:
            for offset in (0, 3):
                expect_fault(lambda: handle.sync_pwrite(tensor, f"{path}.copy", offset))
                expect_fault(lambda: handle.sync_pread(tensor, path, offset))
"""

WHOLE = """
    region = mmap.mmap(-1, 4 << 20)
    data = open(path, "rb").read()
    with nvmeio.AioHandle(engine=engine) as handle:
        for strided in (False, True):
            tensor = over(region, strided)
            for offset in (0, 3):
                assert handle.sync_pread(tensor, path, offset) == nbytes
                assert tensor.contiguous().numpy().tobytes() == data[offset : offset + nbytes]
                assert handle.sync_pwrite(tensor, f"{path}.copy", offset) == nbytes
                with open(f"{path}.copy", "rb") as copy:
                    assert copy.read()[offset:] == tensor.contiguous().numpy().tobytes()
                os.unlink(f"{path}.copy")
"""


@pytest.mark.parametrize(
    "script",
    [READ_ONLY, NO_ACCESS, CUT_SHORT, WHOLE],
    ids=["read-only", "no-access", "cut-short", "whole"],
)
def test_the_kernel_answers(script: str, tmp_path: Path) -> None:
    """The copy from a bounce block into read-only memory was a SIGSEGV from 1 MiB on."""
    (tmp_path / "data").write_bytes(random_bytes(NBYTES))
    lines = textwrap.dedent(COMMON) + f"directory, cases = {str(tmp_path)!r}, {CASES}\n"
    lines += "path = f'{directory}/data'\nfor engine, nbytes, shift in cases:\n"
    done = run_python(lines + textwrap.indent(textwrap.dedent(script), "    "))
    assert done.returncode == 0, done.stderr[-2000:]
