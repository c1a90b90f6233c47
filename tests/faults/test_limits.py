"""Limits of the kernel and of the process: what is said, and that nothing else suffers."""

import asyncio
import errno
import os
import resource
from pathlib import Path

import pytest
from faults._support import (
    MIB,
    NOBODY,
    aio_contexts,
    aligned,
    bytes_of,
    make_file,
    misaligned,
    needs_root,
    noise,
    run_python,
)
from support import collect, new_descriptors, nvmeio_threads, open_descriptors, spin_until

import nvmeio

AIO_MAX = Path("/proc/sys/fs/aio-max-nr")


def succeeded(ran):
    assert (ran.returncode, ran.stderr) == (0, ""), ran
    return ran.stdout


# --- fs.aio-max-nr ------------------------------------------------------------------------------


@pytest.fixture
def too_many():
    """A number of lanes at the full queue depth that exceeds the limit by one lane."""
    lanes = int(AIO_MAX.read_text()) // 65536 + 1
    if lanes > 64:
        pytest.skip(f"fs.aio-max-nr is {AIO_MAX.read_text().strip()}: too much to use up")
    return lanes


def test_no_aio_events_left(too_many):
    """No reason to take another engine than the one that was asked for."""
    collect()
    descriptors, threads, contexts = open_descriptors(), nvmeio_threads(), aio_contexts()
    with nvmeio.AioHandle(queue_depth=8):
        with pytest.raises(nvmeio.BackendUnavailableError) as refused:
            nvmeio.AioHandle(queue_depth=65536, intra_op_parallelism=too_many, engine="libaio")
        # The lanes that could be set up were taken down.
        spin_until(lambda: aio_contexts() <= contexts + 1)
    said = str(refused.value)
    limit = AIO_MAX.read_text().strip()
    assert f"fs.aio-max-nr = {limit}" in said
    assert f"wanted {65536 * too_many}" in said and f"65536 x {too_many} lanes" in said
    assert "fs.aio-nr = " in said
    assert "sysctl -w fs.aio-max-nr=" in refused.value.remedy
    raised = int(refused.value.remedy.split("aio-max-nr=")[1].split()[0])
    assert raised >= 65536 * too_many
    spin_until(lambda: not nvmeio_threads() - threads)
    spin_until(lambda: not new_descriptors(descriptors))


def test_holders_of_aio_events_are_named(too_many):
    collect()
    before = aio_contexts()
    with (
        nvmeio.AioHandle(queue_depth=8, intra_op_parallelism=3),
        pytest.raises(nvmeio.BackendUnavailableError) as refused,
    ):
        nvmeio.AioHandle(queue_depth=65536, intra_op_parallelism=too_many, engine="libaio")
    who = f"process {os.getpid()} (this process)"
    found = dict(refused.value.attempts)
    comm = Path("/proc/self/comm").read_text().strip()
    assert found[who] == f"{comm}, {before + 3} AIO contexts"


def test_events_are_there_again_after_close():
    """Twice as many handles as would fit at once; each is kept, closed, to the end of the test."""
    depth = min(int(AIO_MAX.read_text()) // 8, 65536)
    kept = []
    for _ in range(16):
        handle = nvmeio.AioHandle(queue_depth=depth)
        handle.close()
        kept.append(handle)


def test_portable_engine_needs_no_aio_events(too_many, tmp_path):
    with nvmeio.AioHandle(65536, 65536, intra_op_parallelism=1, engine="threads") as handle:
        assert handle.sync_pwrite(noise(MIB), tmp_path / "file") == MIB


# --- locked memory ------------------------------------------------------------------------------


@needs_root
@pytest.mark.untraced
def test_memlock_limit_of_an_ordinary_user(tmp_path):
    """Only page-locking is refused; pools, bounce blocks and transfers need none of it."""
    tmp_path.chmod(0o777)
    ran = run_python(
        f"""
        import ctypes, encodings.ascii, errno, os, resource, sys
        import torch
        import nvmeio
        from faults._support import bytes_of, misaligned, noise

        os.chdir(sys.argv[1])  # nobody may come by its parents
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
        os.setgroups([])
        os.setgid({NOBODY})
        os.setuid({NOBODY})
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: else /proc/self stays root's
        with nvmeio.AioHandle() as handle:
            small = handle.new_cpu_locked_tensor(64 << 10, torch.uint8)
            assert handle.is_pinned(small)
            try:
                handle.new_cpu_locked_tensor(64 << 20, torch.uint8)
            except OSError as refused:
                assert refused.errno in (errno.ENOMEM, errno.EAGAIN, errno.EPERM), refused
                said = str(refused)
                assert "RLIMIT_MEMLOCK" in said or "ulimit -l" in said, said
                assert "1 MiB" in said or "1048576" in said or "1024" in said, said
                print(said)
            else:
                raise AssertionError("64 MiB were locked under a limit of 1 MiB")
            wanted = noise(8 << 20)
            tensor = misaligned(8 << 20)
            assert handle.sync_pwrite(wanted, "file") == 8 << 20
            assert handle.sync_pread(tensor, "file") == 8 << 20
            assert bytes_of(tensor) == bytes_of(wanted)
            pool = nvmeio.PinnedPool(32 << 20)
            with pool.take(8 << 20) as taken:
                assert handle.sync_pread(taken, "file") == 8 << 20
                assert bytes_of(taken) == bytes_of(wanted)
                del taken
            pool.close()
            del pool
            handle.free_cpu_locked_tensor(small)
        """,
        tmp_path,
    )
    assert "ulimit" in succeeded(ran)


# --- descriptors --------------------------------------------------------------------------------


@pytest.fixture
def exhaust():
    """Opens descriptors until so many are left, and closes them at the test's end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []

    def take(leave):
        collect()  # what goes later would give its descriptors back in the middle
        highest = max(open_descriptors()) + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 32, hard))
        try:
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        except OSError as refused:
            assert refused.errno == errno.EMFILE
        for _ in range(leave):
            os.close(held.pop())

    def give_back():
        while held:
            os.close(held.pop())
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    take.give_back = give_back  # type: ignore[attr-defined]
    yield take
    give_back()


def test_no_descriptor_left_for_a_path(exhaust, tmp_path):
    path = make_file(tmp_path / "file", noise(MIB))
    tensor = misaligned(MIB)
    with nvmeio.AioHandle() as handle:
        assert handle.sync_pread(tensor, path) == MIB
        with nvmeio.open(path) as file:
            exhaust(leave=0)
            operation = handle.async_pread(tensor, path)
            refused = operation.exception(100)
            # An open file still works: the failure is one operation's.
            assert handle.async_pread(tensor, file).result(100) == MIB
            exhaust.give_back()
        assert isinstance(refused, nvmeio.TransferError)
        assert (refused.errno, refused.operation, refused.path) == (errno.EMFILE, "open", str(path))
        assert "ulimit -n" in str(refused)
        assert handle.sync_pread(tensor, path) == MIB
        assert handle.stats.in_flight == 0


def test_no_descriptor_left_for_the_edges_of_a_write(exhaust, tmp_path):
    """The second descriptor, without O_DIRECT, is the one that is missing."""
    with nvmeio.AioHandle() as handle:
        handle.sync_pwrite(aligned(4096), tmp_path / "warm")
        before = open_descriptors()
        exhaust(leave=1)
        refused = handle.async_pwrite(misaligned(MIB), tmp_path / "file", 1000).exception(100)
        exhaust.give_back()
        if refused is None:
            pytest.skip("no direct I/O here, so one descriptor is enough")
        assert isinstance(refused, nvmeio.TransferError)
        assert refused.errno == errno.EMFILE
        spin_until(lambda: not new_descriptors(before))
        assert handle.sync_pwrite(misaligned(MIB), tmp_path / "file", 1000) == MIB


async def test_no_descriptor_left_for_a_loop(exhaust, tmp_path):
    """A loop's first operation needs an eventfd; the file is given back with the refusal."""
    path = make_file(tmp_path / "file", noise(MIB))
    tensor = misaligned(MIB)
    with nvmeio.AioHandle() as handle:
        with nvmeio.open(path) as file:
            exhaust(leave=0)
            with pytest.raises(OSError, match="ulimit -n") as refused:
                await handle.async_pread(tensor, file)
            exhaust.give_back()
            assert refused.value.errno == errno.EMFILE
            assert await handle.async_pread(tensor, file) == MIB
        assert str(path) not in open_descriptors().values()
        assert handle.stats.in_flight == 0


@pytest.mark.parametrize("leave", [0, 1])
@pytest.mark.parametrize("lanes", [1, 2])
def test_no_descriptor_left_for_a_handle(exhaust, leave, lanes):
    """Whichever of its descriptors is the one that is missing, nothing of the handle stays."""
    nvmeio.AioHandle().close()
    collect()
    before, threads, contexts = open_descriptors(), nvmeio_threads(), aio_contexts()
    refused = []

    def is_refused():
        exhaust(leave=leave)
        try:
            # Made, where a thread has just given back what an earlier test had open.
            nvmeio.AioHandle(intra_op_parallelism=lanes).close()
        except (nvmeio.BackendUnavailableError, OSError) as error:
            refused.append(str(error))
        finally:
            exhaust.give_back()
        return bool(refused)

    spin_until(is_refused)
    assert "EMFILE" in refused[0] or "Too many open files" in refused[0]
    spin_until(lambda: not nvmeio_threads() - threads)
    spin_until(lambda: aio_contexts() <= contexts)
    spin_until(lambda: not new_descriptors(before))
    nvmeio.AioHandle(intra_op_parallelism=lanes).close()


# --- file size ----------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["libaio", "threads"])
def test_file_size_limit_in_mid_write(tmp_path, engine):
    """EFBIG with the bytes below the limit, whether that is aligned or not; others unaffected."""
    make_file(tmp_path / "old", noise(4 * MIB, seed=1))
    ran = run_python(
        """
        import errno, resource, sys
        from pathlib import Path
        import nvmeio
        from faults._support import aligned, bytes_of, misaligned, noise

        engine, folder = sys.argv[1], Path(sys.argv[2])
        mib = 1 << 20
        content = noise(8 * mib, seed=2)
        with nvmeio.AioHandle(block_size=256 << 10, engine=engine) as handle:
            handle.sync_pread(aligned(4096), folder / "old")
            for turn, limit in enumerate((3 * mib, 3 * mib + 4096, 3 * mib + 1234, 4096, 512, 0)):
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
                for name, allocate in (("a", aligned), ("m", misaligned)):
                    path = folder / f"new-{name}-{limit}"
                    read, small = misaligned(4 * mib), misaligned(100)
                    beside = handle.async_pread(read, folder / "old")
                    failing = handle.async_pwrite(allocate(8 * mib).copy_(content), path)
                    behind = handle.async_pread(small, folder / "old", 50)
                    failed = failing.exception(100)
                    assert isinstance(failed, nvmeio.TransferError), failed
                    assert failed.errno == errno.EFBIG, failed
                    assert failed.operation == "pwrite" and failed.path == str(path)
                    assert "ulimit -f" in str(failed)
                    through = failed.transferred
                    if limit % 4096:  # the block in which the limit lies may be refused as a whole
                        assert limit - (256 << 10) < through <= limit, (through, limit, name)
                    else:
                        assert through == limit, (through, limit, name)
                    assert path.read_bytes()[:through] == bytes_of(content[:through])
                    assert path.stat().st_size <= limit
                    assert beside.result(100) == 4 * mib and behind.result(100) == 100
                    assert bytes_of(read) == (folder / "old").read_bytes()
                    assert handle.wait(100) == (4 if turn == 0 and name == "a" else 3)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            assert handle.sync_pwrite(content, folder / "whole") == 8 * mib
            assert (folder / "whole").read_bytes() == bytes_of(content)
            assert handle.stats.in_flight == 0
        """,
        engine,
        tmp_path,
    )
    # A limit within a sector makes the kernel refuse the direct block with EINVAL.
    said = [line for line in ran.stderr.splitlines() if "refused direct I/O" not in line]
    assert (ran.returncode, said) == (0, []), ran


# --- memory -------------------------------------------------------------------------------------


def test_no_memory_left_for_bounce_blocks(tmp_path):
    """They are mapped at their first use; transfers that need none go on."""
    content = noise(4 * MIB, seed=3)
    make_file(tmp_path / "file", content)
    ran = run_python(
        """
        import errno, resource, sys
        import nvmeio
        from faults._support import aligned, bytes_of, misaligned

        path = sys.argv[1]
        good, bad = aligned(4 << 20), misaligned(4 << 20)
        with nvmeio.AioHandle() as handle, nvmeio.open(path) as file:
            if not file.alignment:
                print("no direct I/O")
                sys.exit(0)
            assert handle.sync_pread(good, file) == 4 << 20
            pages = int(open("/proc/self/statm").read().split()[0])
            used = pages * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), resource.RLIM_INFINITY))
            failed = handle.async_pread(bad, file).exception(100)
            assert isinstance(failed, nvmeio.TransferError), failed
            assert failed.errno == errno.ENOMEM, failed
            good.fill_(0)
            assert handle.sync_pread(good, file) == 4 << 20
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
            assert handle.sync_pread(bad, file) == 4 << 20
            assert bytes_of(good) == bytes_of(bad)
        """,
        tmp_path / "file",
    )
    out = succeeded(ran)
    if out:
        pytest.skip(out.strip())


async def test_limits_are_met_by_gather(exhaust, tmp_path):
    """Some of many operations fail to open their file; gather tells each one's fate."""
    paths = [make_file(tmp_path / f"file-{i}", noise(4096, seed=i)) for i in range(12)]
    tensors = [misaligned(4096) for _ in paths]
    with nvmeio.AioHandle() as handle:
        await handle.async_pread(tensors[0], paths[0])
        exhaust(leave=4)
        results = await asyncio.gather(
            *(handle.async_pread(t, p) for t, p in zip(tensors, paths, strict=True)),
            return_exceptions=True,
        )
        exhaust.give_back()
        refused = [r for r in results if isinstance(r, nvmeio.TransferError)]
        assert refused and all(r.errno == errno.EMFILE for r in refused)
        assert len(refused) < 12
        for result, tensor, path in zip(results, tensors, paths, strict=True):
            assert result == 4096 or result in refused
            if result == 4096:
                assert bytes_of(tensor) == path.read_bytes()
        assert handle.stats.in_flight == 0
