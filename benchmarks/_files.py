"""Files that a benchmark reads and overwrites, and the huge pages that fio borrows."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from nvmeio.cli.measure import disk

BLOCK = 8 << 20
HUGE_PAGE = 2 << 20
NR_HUGEPAGES = Path("/proc/sys/vm/nr_hugepages")


def write_file(path: Path, nbytes: int) -> None:
    """Allocate a file in one go and write every byte of it directly; `os.sync()` comes after.

    Overwrites then find written blocks, as all contenders do, and the layout owes nothing to
    any of them. Incompressible bytes, since the drive of a virtual machine may look at zeros.
    """
    with mmap.mmap(-1, BLOCK) as block:
        block.write(incompressible())
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            if nbytes:
                os.posix_fallocate(fd, 0, nbytes)
            view = memoryview(block)
            try:
                for offset in range(0, nbytes, BLOCK):
                    os.pwrite(fd, view[: min(BLOCK, nbytes - offset)], offset)
            finally:
                view.release()
        finally:
            os.close(fd)


@lru_cache
def incompressible() -> bytes:
    """One block of bytes that no drive can take a short cut with."""
    return random.Random(0).randbytes(BLOCK)


def remove(*paths: Path) -> None:
    """Delete, and let the file system finish (journal, discard) before anybody is timed."""
    for path in paths:
        path.unlink(missing_ok=True)
    os.sync()


def drop_from_cache(*paths: Path) -> None:
    """The next read of a file, or of those in a directory, comes from the drive."""
    for file in _all_files(paths):
        disk.drop_from_cache(file)


def bring_into_cache(*paths: Path) -> None:
    """The page cache holds a file, or those in a directory, as far as there is memory."""
    block = bytearray(BLOCK)
    for file in _all_files(paths):
        with open(file, "rb", buffering=0) as opened:
            while opened.readinto(block):
                pass


def _all_files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                yield file


@contextmanager
def huge_pages(nbytes: int) -> Iterator[str | None]:
    """Have that many bytes of hugetlb pages free meanwhile.

    Yields:
        None when they are there, else the reason why not. What was reserved before is put back.
    """
    needed = -(-nbytes // HUGE_PAGE)
    before = int(NR_HUGEPAGES.read_text()) if NR_HUGEPAGES.exists() else 0
    missing = needed - disk.free_huge_pages()
    try:
        if missing > 0:
            try:
                NR_HUGEPAGES.write_text(str(before + missing))
            except OSError as error:
                yield f"cannot reserve huge pages ({error.strerror})"
                return
        free = disk.free_huge_pages()
        yield None if free >= needed else f"only {free} of {needed} huge pages could be had"
    finally:
        if missing > 0 and os.access(NR_HUGEPAGES, os.W_OK):
            NR_HUGEPAGES.write_text(str(before))
