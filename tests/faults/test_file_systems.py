"""File systems of every kind, holes, block devices: same bytes, and the way they went in the stats.

Mounted for the test where that can be done (root, loop devices), else skipped with the reason.
"""

import itertools
import os
import random
import subprocess
from contextlib import ExitStack, contextmanager

import pytest
from faults._support import (
    KIB,
    MIB,
    aligned,
    bytes_of,
    eventually,
    formatted,
    loop_device,
    make_file,
    misaligned,
    mounted,
    must,
    noise,
    tool,
)

import nvmeio
from nvmeio._files.system import journal_keeps_order

# Tensor, file offset, length: aligned and not, within a sector, a page, a block and beyond.
SPANS = (
    (aligned, 0, MIB),
    (aligned, 64 * KIB, 192 * KIB),
    (misaligned, 0, MIB),
    (misaligned, 4096, 4096),
    (aligned, 1, MIB),
    (misaligned, 511, 1),
    (misaligned, 512, 512),
    (aligned, 4095, 4098),
    (misaligned, 12345, 543210),
    (misaligned, 64 * KIB - 1, 64 * KIB + 2),
    (aligned, 0, 0),
    (aligned, 3 * MIB + 17, 100 * KIB),
)

DIRECT, BUFFERED = "direct", "buffered"
EITHER = "either"


@contextmanager
def overlay(stack, upper):
    for name in ("lower", "upper", "work"):
        (upper / name).mkdir()
    options = ",".join(f"{name}dir={upper / name}" for name in ("lower", "upper", "work"))
    yield stack.enter_context(mounted("overlay", "overlay", options))


@contextmanager
def _folder(kind):
    with ExitStack() as stack:
        if kind in ("ext4", "xfs", "btrfs"):
            yield stack.enter_context(formatted(kind))
        elif kind in ("ext4-4096", "xfs-4096"):
            yield stack.enter_context(formatted(kind[:-5], sector=4096))
        elif kind == "ext4-journal":  # all data goes through the journal, so none goes direct
            yield stack.enter_context(formatted("ext4", options="data=journal"))
        elif kind == "overlay-ext4":
            upper = stack.enter_context(formatted("ext4"))
            yield stack.enter_context(overlay(stack, upper))
        elif kind == "overlay-tmpfs":
            upper = stack.enter_context(mounted("tmpfs"))
            yield stack.enter_context(overlay(stack, upper))
        else:
            yield stack.enter_context(mounted(kind))


KINDS = {
    "ext4": DIRECT,
    "ext4-4096": DIRECT,
    "xfs": DIRECT,
    "xfs-4096": DIRECT,
    "btrfs": DIRECT,
    "overlay-ext4": DIRECT,
    "ext4-journal": BUFFERED,
    "tmpfs": BUFFERED,
    "ramfs": BUFFERED,
    "overlay-tmpfs": EITHER,  # takes O_DIRECT, and has no drive that it would be direct to
}


@pytest.fixture(params=KINDS)
def file_system(request):
    """A folder on it, and the way that aligned bytes must go."""
    with _folder(request.param) as folder:
        yield folder, KINDS[request.param], request.param


@pytest.mark.parametrize("engine", ["libaio", "threads"])
def test_same_bytes_everywhere(file_system, engine):
    folder, way, kind = file_system
    content = noise(5 * MIB, seed=1)
    with nvmeio.AioHandle(64 * KIB, 16, engine=engine, intra_op_parallelism=2) as handle:
        for turn, (allocate, offset, nbytes) in enumerate(SPANS):
            path = make_file(folder / "file", content)
            tensor = allocate(nbytes)
            reading = handle.async_pread(tensor, path, offset)
            assert reading.result(100) == nbytes
            assert bytes_of(tensor) == bytes_of(content[offset : offset + nbytes])
            tensor.copy_(noise(nbytes, seed=turn + 2))
            writing = handle.async_pwrite(tensor, path, offset)
            assert writing.result(100) == nbytes
            expected = bytearray(bytes_of(content))
            expected[offset : offset + nbytes] = bytes_of(tensor)
            assert path.read_bytes() == expected, (allocate, offset, nbytes)
            for operation in (reading, writing):
                parts = (
                    operation.direct_bytes,
                    operation.bounced_bytes,
                    operation.buffered_bytes,
                )
                assert sum(parts) == nbytes
                if way == BUFFERED:
                    assert parts == (0, 0, nbytes), "the fallback does not show"
            if way == DIRECT:
                assert reading.buffered_bytes == 0
                edges = -offset % 4096 + (offset + nbytes) % 4096
                assert writing.buffered_bytes == (edges if nbytes > edges else nbytes)
                if allocate is aligned and not offset % 4096:
                    assert reading.direct_bytes == nbytes - nbytes % 4096
        stats = handle.stats
    total = sum(nbytes for _, _, nbytes in SPANS)
    assert (stats.bytes_read, stats.bytes_written, stats.errors) == (total, total, 0)
    assert stats.direct_bytes + stats.bounced_bytes + stats.buffered_bytes == 2 * total
    if way != EITHER:
        assert (stats.direct_bytes > 0) == (stats.bounced_bytes > 0) == (way == DIRECT)
    if kind.endswith("-4096"):
        with nvmeio.open(path) as file:
            assert file.alignment == 4096


def test_a_journal_keeps_order_where_sizes_are_logged_before_pages_count_as_written(file_system):
    """There a small save flushes the drive twice, and everywhere four times."""
    folder, _, kind = file_system
    nvmeio.save({"a": noise(KIB)}, folder / "a.pt")
    with open(folder / "a.pt") as file:
        assert journal_keeps_order(file.fileno()) == (kind.partition("-4096")[0] in ("ext4", "xfs"))
    assert nvmeio.load(folder / "a.pt")["a"].equal(noise(KIB))


def test_new_files_grow_to_the_byte(file_system):
    """Preallocation and whole pages leave no trace in a file's size, nor in what lies before."""
    folder, _, _ = file_system
    with nvmeio.AioHandle(64 * KIB, 8) as handle:
        for turn, (allocate, offset, nbytes) in enumerate(SPANS):
            if not nbytes:
                continue
            path = folder / f"new-{turn}"
            tensor = allocate(nbytes).copy_(noise(nbytes, seed=turn))
            assert handle.async_pwrite(tensor, path, offset).result(100) == nbytes
            handle.sync_fsync(path)
            assert path.stat().st_size == offset + nbytes
            assert path.read_bytes() == bytes(offset) + bytes_of(tensor)
            # Appended to: what was there stays.
            assert handle.async_pwrite(tensor, path, offset + nbytes).result(100) == nbytes
            assert path.read_bytes() == bytes(offset) + 2 * bytes_of(tensor)


def test_holes(file_system):
    """Zeros where nothing was written, also beside what is written into a hole."""
    folder, _, _ = file_system
    path = folder / "sparse"
    size = 4 * MIB + 777
    with open(path, "wb") as file:
        file.truncate(size)
        os.pwrite(file.fileno(), b"x" * 100, 2 * MIB - 50)
    with nvmeio.AioHandle(64 * KIB, 8) as handle:
        for allocate in (aligned, misaligned):
            tensor = allocate(size)
            assert handle.async_pread(tensor, path).result(100) == size
            assert bytes_of(tensor) == path.read_bytes()
        patch = misaligned(300 * KIB).copy_(noise(300 * KIB))
        assert handle.async_pwrite(patch, path, MIB - 99).result(100) == 300 * KIB
        expected = bytearray(size)
        expected[2 * MIB - 50 : 2 * MIB + 50] = b"x" * 100
        expected[MIB - 99 : MIB - 99 + 300 * KIB] = bytes_of(patch)
        assert path.read_bytes() == expected
        with pytest.raises(nvmeio.ShortTransferError) as short:
            handle.async_pread(aligned(2 * MIB), path, 3 * MIB).result(100)
        assert short.value.transferred == size - 3 * MIB


def test_neighbours_within_one_page(file_system):
    """Many writers, each with some bytes of the same pages: none undoes another's."""
    folder, _, _ = file_system
    chance = random.Random(3)
    content = noise(256 * KIB, seed=4)
    cuts = sorted({0, 256 * KIB, *(chance.randrange(256 * KIB) for _ in range(150))})
    path = make_file(folder / "shared", noise(256 * KIB, seed=5))
    pieces = list(itertools.pairwise(cuts))
    chance.shuffle(pieces)
    with nvmeio.AioHandle(16 * KIB, 32, intra_op_parallelism=2) as handle:
        for start, stop in pieces:
            tensor = misaligned(stop - start).copy_(content[start:stop])
            handle.async_pwrite(tensor, path, start)
        assert handle.wait(100) == len(pieces)
        handle.sync_fsync(path)
    assert path.read_bytes() == bytes_of(content)


def test_read_only_file_system(tmp_path):
    with ExitStack() as stack:
        device = stack.enter_context(loop_device(64 * MIB))
        must("mkfs.ext4", "-q", "-F", device)
        content = noise(MIB, seed=6)
        with mounted("ext4", device) as folder:
            make_file(folder / "file", content)
        folder = stack.enter_context(mounted("ext4", device, "ro"))
        with nvmeio.AioHandle() as handle:
            tensor = misaligned(MIB)
            assert handle.async_pread(tensor, folder / "file").result(100) == MIB
            assert bytes_of(tensor) == bytes_of(content)
            for name in ("file", "new"):
                with pytest.raises(nvmeio.TransferError, match="read-only") as failed:
                    handle.async_pwrite(tensor, folder / name).result(100)
                assert failed.value.operation == "open"


def test_compressed_read_only_file_system(tmp_path):
    """squashfs has no direct I/O: what would it read into the tensor?"""
    (tmp_path / "tree").mkdir()
    content = noise(3 * MIB + 5, seed=7)
    make_file(tmp_path / "tree" / "file", content)
    tool("mksquashfs")
    must("mksquashfs", tmp_path / "tree", tmp_path / "image", "-quiet", "-no-progress")
    with (
        mounted("squashfs", tmp_path / "image", "loop,ro") as folder,
        nvmeio.AioHandle(64 * KIB) as handle,
    ):
        for allocate, offset, nbytes in SPANS[:10]:
            tensor = allocate(nbytes)
            assert handle.async_pread(tensor, folder / "file", offset).result(100) == nbytes
            assert bytes_of(tensor) == bytes_of(content[offset : offset + nbytes])
        assert handle.stats.buffered_bytes == handle.stats.bytes_read


@pytest.mark.parametrize("sector", [512, 4096])
@pytest.mark.parametrize("engine", ["libaio", "threads"])
def test_block_device(sector, engine):
    """A drive without a file system, as root reads and writes it."""
    with (
        loop_device(8 * MIB, sector) as device,
        nvmeio.AioHandle(64 * KIB, 8, engine=engine) as handle,
        nvmeio.open(device, "r+") as file,
    ):
        assert file.alignment == sector
        content = noise(8 * MIB, seed=8)
        assert handle.async_pwrite(aligned(8 * MIB).copy_(content), file).result(100) == 8 * MIB
        expected = bytearray(bytes_of(content))
        for turn, (allocate, offset, nbytes) in enumerate(SPANS):
            tensor = allocate(nbytes)
            assert handle.async_pread(tensor, file, offset).result(100) == nbytes
            assert bytes_of(tensor) == bytes(expected[offset : offset + nbytes])
            tensor.copy_(noise(nbytes, seed=turn + 9))
            assert handle.async_pwrite(tensor, device, offset).result(100) == nbytes
            expected[offset : offset + nbytes] = bytes_of(tensor)
        handle.sync_fsync(file)
        with open(device, "rb") as plain:
            assert plain.read() == expected
        beyond = handle.async_pread(misaligned(MIB), file, 8 * MIB - 1000).exception(100)
        assert isinstance(beyond, nvmeio.ShortTransferError)
        assert beyond.transferred == 1000
        too_far = handle.async_pwrite(misaligned(MIB), file, 8 * MIB - 4096).exception(100)
        assert isinstance(too_far, nvmeio.TransferError)
        assert too_far.transferred <= 4096
        assert handle.stats.in_flight == 0


def test_mounts_and_loop_devices_are_given_back(request):
    """The fixtures of this file must not litter the machine that runs it."""

    def image_of(device):
        listed = subprocess.run([tool("losetup"), device], capture_output=True, text=True).stdout
        return listed.partition("(")[2].rpartition(")")[0]

    with loop_device(MIB) as device, mounted("tmpfs") as folder:
        image = image_of(device)
        assert image
        assert os.path.ismount(folder)
    assert not folder.exists()
    # The device's number may be another process's by now.
    assert eventually(lambda: image not in image_of(device))
