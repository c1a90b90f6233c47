"""`aio_handle` and its sisters: DeepSpeed's interface as its callers know it, and its mistakes."""

from __future__ import annotations

import errno
import inspect
import os
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support import misaligned, random_bytes, random_tensor, raw, run_python

import nvmeio
from nvmeio.compat.deepspeed import aio_handle, aio_read, aio_write, gds_handle, handles
from nvmeio.testing import FakeEngine

PAGE = 4096


def a_tensor(nbytes: int = 3 * PAGE, seed: int = 0) -> torch.Tensor:
    return random_tensor(nbytes, seed)


# What DeepSpeed's callers rely on


def test_constructor_takes_deepspeeds_parameters_by_position() -> None:
    handle = aio_handle(1 << 16, 16, True, True, 3)
    assert handle.get_block_size() == 1 << 16
    assert handle.get_queue_depth() == 16
    assert handle.get_single_submit() is True
    assert handle.get_overlap_events() is True
    assert handle.get_intra_op_parallelism() == 3
    assert handle.get_alignment() == 3 * 512


def test_constructor_has_deepspeeds_names_and_defaults() -> None:
    """And beside them only the names that its configurations use for one of these."""
    *own, others = inspect.signature(aio_handle).parameters.values()
    assert others.kind is inspect.Parameter.VAR_KEYWORD
    assert {p.name: p.default for p in own} == {
        "block_size": 1 << 20,
        "queue_depth": 128,
        "single_submit": False,
        "overlap_events": False,
        "intra_op_parallelism": 1,
    }
    assert inspect.signature(gds_handle) == inspect.signature(aio_handle)
    assert aio_handle(queue_depth=4).get_alignment() == 512


def test_both_handles_have_every_method_of_deepspeeds() -> None:
    shared = {
        *("async_pread", "async_pwrite", "free_cpu_locked_tensor", "get_alignment"),
        *("get_block_size", "get_intra_op_parallelism", "get_overlap_events", "get_queue_depth"),
        *("get_single_submit", "is_pinned", "new_cpu_locked_tensor", "pread", "pwrite", "read"),
        *("sync_pread", "sync_pwrite", "wait", "write"),
    }
    device = {
        *("free_pinned_device_tensor", "new_pinned_device_tensor"),
        *("pin_device_tensor", "unpin_device_tensor"),
    }
    assert shared <= set(dir(aio_handle))
    assert shared | device <= set(dir(gds_handle))


def test_blocking_and_asynchronous_calls_return_what_deepspeeds_do(path: Path) -> None:
    handle, tensor = aio_handle(queue_depth=8), a_tensor()
    assert handle.sync_pwrite(tensor, str(path)) == 1
    assert handle.sync_pread(torch.empty_like(tensor), str(path)) == 1
    assert handle.async_pwrite(tensor, str(path)) == 0
    assert handle.async_pread(torch.empty_like(tensor), str(path) + "", 0) == 0
    assert handle.wait() == 2
    assert handle.write(tensor, str(path), False) == 0
    assert handle.read(tensor, str(path), True) == 0


def test_synchronous_call_waits_for_what_is_pending_and_counts_it(tmp_path: Path) -> None:
    handle, tensor = aio_handle(queue_depth=8), a_tensor()
    for name in ("a", "b"):
        handle.async_pwrite(tensor, str(tmp_path / name))
    assert handle.sync_pwrite(tensor, str(tmp_path / "c")) == 3
    assert handle.wait() == 0


def test_read_and_write_leave_what_is_pending_alone(tmp_path: Path) -> None:
    handle, tensor = aio_handle(queue_depth=8), a_tensor()
    handle.async_pwrite(tensor, str(tmp_path / "a"))
    handle.write(tensor, str(tmp_path / "b"), False)
    handle.read(tensor, str(tmp_path / "b"), False)
    assert handle.wait() == 1


def test_wait_with_nothing_pending_returns_0() -> None:
    assert aio_handle(queue_depth=1).wait() == 0


@pytest.mark.parametrize("how", ["position", "name"])
def test_fourth_parameter_of_pread_is_called_async(path: Path, how: str) -> None:
    handle, tensor = aio_handle(queue_depth=8), a_tensor()
    target = torch.empty_like(tensor)
    for method, buffer in ((handle.pwrite, tensor), (handle.pread, target)):
        if how == "position":
            assert method(buffer, str(path), False, True) == 0
        else:
            named: dict[str, Any] = {"buffer": buffer, "filename": str(path), "validate": True}
            assert method(**named, **{"async": True}, file_offset=0) == 0
        assert handle.wait() == 1
        assert method(buffer, str(path), False, False) == 1
    assert raw(target) == raw(tensor)


def test_pread_without_its_fourth_parameter_is_a_type_error(path: Path) -> None:
    with pytest.raises(TypeError, match="async"):
        aio_handle(queue_depth=1).pread(a_tensor(), str(path), False)  # type: ignore[call-arg]


def test_offsets_are_where_deepspeed_has_them(path: Path) -> None:
    handle = aio_handle(queue_depth=8)
    parts = [a_tensor(PAGE, seed) for seed in range(4)]
    handle.sync_pwrite(parts[0], str(path), 0)
    handle.async_pwrite(parts[1], str(path), PAGE)
    handle.pwrite(parts[2], str(path), False, True, 2 * PAGE)
    handle.write(parts[3], str(path), False, 3 * PAGE)
    assert handle.wait() == 2
    assert path.read_bytes() == b"".join(map(raw, parts))
    got = [torch.empty(PAGE, dtype=torch.uint8) for _ in parts]
    handle.sync_pread(got[0], str(path), 0)
    handle.async_pread(got[1], str(path), PAGE)
    handle.pread(got[2], str(path), False, True, file_offset=2 * PAGE)
    handle.read(got[3], str(path), False, file_offset=3 * PAGE)
    handle.wait()
    assert list(map(raw, got)) == list(map(raw, parts))


@pytest.mark.parametrize("how", ["position", "fd"])
def test_async_pwrite_takes_an_open_descriptor_and_leaves_it_open(path: Path, how: str) -> None:
    handle, first, second = aio_handle(queue_depth=8), a_tensor(seed=1), a_tensor(seed=2)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        for tensor, offset in ((first, 0), (second, first.nbytes)):
            if how == "position":
                assert handle.async_pwrite(tensor, fd, offset) == 0
            else:
                assert handle.async_pwrite(tensor, fd=fd, file_offset=offset) == 0
        assert handle.wait() == 2
        assert os.fstat(fd).st_size == first.nbytes + second.nbytes
    finally:
        os.close(fd)
    assert path.read_bytes() == raw(first) + raw(second)


def test_descriptor_may_be_closed_once_async_pwrite_has_returned(path: Path) -> None:
    handle, tensor = aio_handle(queue_depth=8), a_tensor(1 << 22)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    handle.async_pwrite(tensor, fd)
    os.close(fd)
    assert handle.wait() == 1
    assert path.read_bytes() == raw(tensor)


def test_async_pwrite_wants_a_file_or_a_descriptor(path: Path) -> None:
    handle = aio_handle(queue_depth=1)
    with pytest.raises(TypeError, match="either"):
        handle.async_pwrite(a_tensor())
    with pytest.raises(TypeError, match="either"):
        handle.async_pwrite(a_tensor(), str(path), fd=3)


@pytest.mark.parametrize("kind", [str, os.fsencode, Path])
def test_file_names_of_every_kind(path: Path, kind: Any) -> None:
    handle, tensor = aio_handle(queue_depth=8), a_tensor()
    handle.sync_pwrite(tensor, kind(path))
    assert path.read_bytes() == raw(tensor)


def test_aio_read_and_aio_write(path: Path) -> None:
    tensor, target = a_tensor(), torch.empty(3 * PAGE, dtype=torch.uint8)
    assert aio_write(tensor, str(path), 1 << 16, 8, False, True, True) == 0
    assert aio_read(target, str(path), 1 << 16, 8, True, False, True) == 0
    assert raw(target) == raw(tensor)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("parallelism", [1, 3])
def test_every_setting_moves_the_same_bytes(
    path: Path, parallelism: int, single: bool, overlap: bool
) -> None:
    handle = aio_handle(PAGE, 4, single, overlap, parallelism)
    tensor = a_tensor(100 * PAGE + 17)
    target = torch.empty_like(tensor)
    assert handle.sync_pwrite(tensor, str(path)) == 1
    assert handle.sync_pread(target, str(path)) == 1
    assert raw(target) == raw(tensor)


def test_block_sizes_that_only_deepspeed_takes(path: Path) -> None:
    """A DeepSpeed configuration may have any multiple of 512, nvmeio's engines want whole pages."""
    handle, tensor = aio_handle(1536, 8), a_tensor()
    assert handle.get_block_size() == 1536
    handle.sync_pwrite(tensor, str(path))
    assert path.read_bytes() == raw(tensor)
    with pytest.raises(ValueError, match="block_size"):
        aio_handle(0)


@pytest.mark.parametrize("flag", ["single_submit", "overlap_events"])
def test_switches_as_ds_nvme_tune_prints_them(flag: str) -> None:
    """Its JSON has the strings "true" and "false", of which the second is true to Python."""
    for text, value in (("false", False), ("true", True), (1, True)):
        assert getattr(aio_handle(**{flag: text}), f"get_{flag}")() is value  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=flag):
        aio_handle(**{flag: "no"})  # type: ignore[arg-type]


# Where DeepSpeed's own op returns -1, aborts, or is wrong


def test_missing_file_raises_at_the_call(path: Path) -> None:
    handle = aio_handle(queue_depth=1)
    for call in (handle.async_pread, handle.sync_pread):
        with pytest.raises(FileNotFoundError) as failed:
            call(a_tensor(), str(path))
        assert isinstance(failed.value, nvmeio.TransferError)
    assert handle.wait() == 0


def test_closed_descriptor_raises_at_the_call() -> None:
    with pytest.raises(nvmeio.TransferError) as failed:
        aio_handle(queue_depth=1).async_pwrite(a_tensor(), 987654)
    assert failed.value.errno == errno.EBADF


def test_buffer_larger_than_the_file_raises(path: Path) -> None:
    path.write_bytes(bytes(PAGE))
    handle = aio_handle(queue_depth=1)
    with pytest.raises(nvmeio.ShortTransferError):
        handle.sync_pread(a_tensor(), str(path))
    with pytest.raises(nvmeio.ShortTransferError):
        handle.read(a_tensor(), str(path), False)
    handle.async_pread(a_tensor(), str(path))
    with pytest.raises(nvmeio.ShortTransferError):
        handle.wait()
    assert handle.wait() == 0


def test_failure_of_a_transfer_waits_for_wait_however_early_it_is(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(bytes(PAGE))
    monkeypatch.setattr(handles, "AioHandle", lambda *_: nvmeio.AioHandle(engine=FakeEngine()))
    for _ in range(50):
        handle = aio_handle()
        handle.async_pread(a_tensor(), str(path))
        with pytest.raises(nvmeio.ShortTransferError):
            handle.wait()
        handle.nvmeio.close()


def test_buffer_smaller_than_the_file_is_filled(path: Path) -> None:
    path.write_bytes(random_bytes(3 * PAGE))
    target = torch.empty(PAGE, dtype=torch.uint8)
    assert aio_handle(queue_depth=1).read(target, str(path), True) == 0
    assert raw(target) == random_bytes(3 * PAGE)[:PAGE]


@pytest.mark.parametrize("nbytes", [1, 511, 10_000, 10_001])
@pytest.mark.parametrize("parallelism", [1, 2])
def test_sizes_that_are_no_multiple_of_the_alignment(
    path: Path, nbytes: int, parallelism: int
) -> None:
    handle, tensor = aio_handle(queue_depth=8, intra_op_parallelism=parallelism), a_tensor(nbytes)
    assert handle.sync_pwrite(tensor, str(path)) == 1
    assert path.read_bytes() == raw(tensor)
    target = torch.zeros_like(tensor)
    assert handle.sync_pread(target, str(path)) == 1
    assert raw(target) == raw(tensor)


def test_unaligned_offset_reads_what_is_there(path: Path) -> None:
    data = random_bytes(2 * PAGE)
    path.write_bytes(data)
    target = torch.empty(1024, dtype=torch.uint8)
    aio_handle(queue_depth=8).sync_pread(target, str(path), 100)
    assert raw(target) == data[100:1124]


def test_page_locked_view_at_an_odd_address(path: Path) -> None:
    """ZeRO-3's gradients lie so: DeepSpeed's own op leaves what it reads there as it was."""
    handle = aio_handle(queue_depth=8)
    data = random_bytes(4 * PAGE)
    path.write_bytes(data)
    locked = handle.new_cpu_locked_tensor(8 * PAGE, torch.empty(0, dtype=torch.uint8))
    view = locked[12 : 12 + 4 * PAGE]
    handle.sync_pread(view, str(path))
    assert raw(view) == data


def test_failures_are_raised_by_wait_and_then_forgotten(path: Path) -> None:
    path.write_bytes(bytes(PAGE))
    handle = aio_handle(queue_depth=8)
    for offset in (0, PAGE, 0, 2 * PAGE):
        assert handle.async_pread(torch.empty(PAGE, dtype=torch.uint8), str(path), offset) == 0
    with pytest.raises(nvmeio.ShortTransferError) as failed:
        handle.wait()
    assert failed.value.file_offset == PAGE
    (other,) = failed.value.others
    assert isinstance(other, nvmeio.ShortTransferError)
    assert other.file_offset == 2 * PAGE
    assert handle.wait() == 0


def test_write_that_fails_in_the_middle_raises(path: Path) -> None:
    """DeepSpeed's own op returns success for the part that went through."""
    done = run_python(
        f"""
        import resource, signal, torch
        from nvmeio.compat.deepspeed import aio_handle
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        try:
            aio_handle(queue_depth=8).sync_pwrite(torch.ones(1 << 18), {str(path)!r})
        except OSError as failed:
            print(type(failed).__name__, failed.errno)
        """
    )
    assert done.stdout.split() == ["TransferError", str(errno.EFBIG)], done.stderr


def test_validation_finds_a_difference(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle, tensor = aio_handle(queue_depth=8), a_tensor()
    other = bytearray(raw(tensor))
    other[5000] ^= 1
    path.write_bytes(other)
    target = torch.empty_like(tensor)
    assert handle.pread(target, str(path), True, False) == 1
    original = os.pread

    def pread(fd: int, count: int, offset: int) -> bytes:
        found = bytearray(original(fd, count, offset))
        found[77] ^= 1
        return bytes(found)

    monkeypatch.setattr(os, "pread", pread)
    with pytest.raises(nvmeio.IntegrityError, match="byte 77"):
        handle.read(target, str(path), True)
    handle.pread(target, str(path), True, True)
    with pytest.raises(nvmeio.IntegrityError):
        handle.wait()


def test_interrupted_wait_can_be_taken_up_again(path: Path) -> None:
    """Ctrl-C in wait() loses no transfer and no count."""
    done = run_python(
        f"""
        import os, signal, threading, torch
        from nvmeio.compat.deepspeed import handles
        from nvmeio.testing import FakeEngine
        import nvmeio

        gate = threading.Event()
        io = nvmeio.AioHandle(engine=FakeEngine(hold=gate))
        handles.AioHandle = lambda *_: io
        handle = handles.aio_handle()
        for offset in (0, 4096):
            handle.async_pwrite(torch.ones(4096, dtype=torch.uint8), {str(path)!r}, offset)
        try:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            handle.wait()
        except KeyboardInterrupt:
            print("interrupted")
        gate.set()
        print(handle.wait(), handle.wait())
        io.close()
        """
    )
    assert done.stdout.split() == ["interrupted", "2", "0"], done.stderr


# Tensors of every kind


def test_tensor_that_is_not_contiguous(path: Path) -> None:
    handle = aio_handle(queue_depth=8)
    tensor = torch.arange(8192.0).view(64, 128).t()
    handle.sync_pwrite(tensor, str(path))
    target = torch.zeros(64, 128).t()
    handle.sync_pread(target, str(path))
    assert torch.equal(target, tensor)


def test_memory_of_any_alignment(path: Path) -> None:
    handle = aio_handle(queue_depth=8)
    source, _ = misaligned(5 * PAGE, 3)
    source.copy_(a_tensor(5 * PAGE))
    handle.sync_pwrite(source, str(path))
    target, room = misaligned(5 * PAGE, 65)
    handle.sync_pread(target, str(path))
    assert raw(target) == raw(source)
    assert set(raw(room[:65])) == set(raw(room[65 + 5 * PAGE :])) == {0xA5}


def test_parameter_is_read_as_deepspeed_reads_it(path: Path) -> None:
    """DeepSpeed writes to a parameter's memory without asking autograd, which would refuse."""
    handle = aio_handle(queue_depth=8)
    tensor = torch.randn(1000)
    handle.sync_pwrite(tensor, str(path))
    parameter = torch.nn.Parameter(torch.zeros(1000))
    handle.sync_pread(parameter, str(path))
    assert torch.equal(parameter.detach(), tensor)
    assert parameter.requires_grad
    assert parameter.grad_fn is None


def test_backward_notices_that_a_saved_tensor_was_read_into(path: Path) -> None:
    handle = aio_handle(queue_depth=8)
    handle.sync_pwrite(torch.ones(1000), str(path))
    weight, saved = torch.zeros(1000, requires_grad=True), torch.ones(1000)
    loss = (weight * saved).sum()
    handle.sync_pread(saved, str(path))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_tensor_outside_inference_mode(path: Path) -> None:
    handle = aio_handle(queue_depth=8)
    handle.sync_pwrite(torch.ones(1000), str(path))
    with torch.inference_mode():
        tensor = torch.zeros(1000)
    handle.sync_pread(tensor, str(path))
    assert tensor.is_inference()
    assert bool((tensor == 1).all())
    with torch.inference_mode():
        handle.sync_pread(tensor.zero_(), str(path))
        assert bool((tensor == 1).all())


def test_what_is_no_tensor_is_a_type_error(path: Path) -> None:
    handle = aio_handle(queue_depth=1)
    for call in (handle.async_pread, handle.async_pwrite):
        with pytest.raises(TypeError, match=r"torch\.Tensor"):
            call([1, 2], str(path))  # type: ignore[arg-type]


# Lifetimes


def test_buffer_dropped_before_wait_is_still_written(path: Path) -> None:
    handle = aio_handle(queue_depth=8)
    expected = raw(a_tensor(1 << 22))
    handle.async_pwrite(a_tensor(1 << 22), str(path))
    assert handle.wait() == 1
    assert path.read_bytes() == expected


def test_handle_dropped_with_a_transfer_pending_does_not_abort(path: Path) -> None:
    done = run_python(
        f"""
        import gc, time, torch
        from nvmeio.compat.deepspeed import aio_handle
        handle = aio_handle()
        tensor = torch.ones(1 << 22)
        handle.async_pwrite(tensor, {str(path)!r})
        del handle
        until = time.monotonic() + 100  # a thread that is begun by another one ends it
        while time.monotonic() < until:
            gc.collect()
            with open({str(path)!r}, "rb") as file:
                if file.read() == tensor.numpy().tobytes():
                    break
            time.sleep(0.01)
        """
    )
    assert done.returncode == 0, done.stderr
    assert path.read_bytes() == raw(torch.ones(1 << 22))


def test_several_threads_share_a_handle(tmp_path: Path) -> None:
    handle = aio_handle(queue_depth=8)
    counts: list[int] = []

    def work(number: int) -> None:
        tensor = a_tensor(PAGE, number)
        for turn in range(20):
            handle.async_pwrite(tensor, str(tmp_path / f"{number}-{turn}"))
        counts.append(handle.wait())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(counts) + handle.wait() == 80
    assert all((tmp_path / f"{n}-{t}").stat().st_size == PAGE for n in range(4) for t in range(20))


async def test_blocking_calls_in_a_coroutine(path: Path) -> None:
    """They block the loop, as DeepSpeed's do, and end."""
    handle, tensor = aio_handle(queue_depth=8), a_tensor()
    handle.async_pwrite(tensor, str(path))
    assert handle.sync_pwrite(tensor, str(path)) == 2
    strided = torch.zeros(2 * tensor.numel(), dtype=torch.uint8)[::2]
    handle.async_pread(strided, str(path))
    assert handle.wait() == 1
    assert torch.equal(strided, tensor)
    assert await handle.nvmeio.drain() == 3  # its own count
    await handle.nvmeio.aclose()


def test_forked_child_is_told_to_open_a_handle_of_its_own(path: Path) -> None:
    done = run_python(
        f"""
        import os, warnings, torch, nvmeio
        from nvmeio.compat.deepspeed import aio_handle
        warnings.simplefilter("ignore")
        handle = aio_handle(queue_depth=8)
        tensor = torch.ones(1024)
        if not os.fork():
            try:
                handle.async_pwrite(tensor, {str(path)!r})
            except nvmeio.ClosedError:
                os._exit(aio_handle(queue_depth=8).sync_pwrite(tensor, {str(path)!r}))
            os._exit(9)
        print(os.waitstatus_to_exitcode(os.wait()[1]), handle.sync_pwrite(tensor, {str(path)!r}))
        """
    )
    assert done.stdout.split() == ["1", "1"], done.stderr


def test_statistics_are_within_reach(path: Path) -> None:
    handle = aio_handle(queue_depth=8)
    handle.sync_pwrite(a_tensor(), str(path))
    assert handle.nvmeio.stats.bytes_written == 3 * PAGE
    assert "0 pending" in repr(handle)


# cuFile


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_gds_handle_says_why_not_and_what_to_use() -> None:
    with pytest.raises(nvmeio.BackendUnavailableError, match="needs cuFile") as failed:
        gds_handle()
    assert failed.value.attempts[0][0] == "cufile"
    assert "aio_handle" in failed.value.remedy
    assert isinstance(handles.no_cufile(), RuntimeError)


# The snippets of DeepSpeed's tutorial; 1 GB is 1 MB here, and there is no GPU to take tensors from

SNIPPETS = {
    "blocking write": """
        t=torch.empty(1024**2, dtype=torch.uint8)
        h = AsyncIOBuilder().load().aio_handle()
        assert h.sync_pwrite(t,'test_1MB.pt') == 1
    """,
    "non-blocking write": """
        t=torch.empty(1024**2, dtype=torch.uint8)
        h = AsyncIOBuilder().load().aio_handle()
        h.async_pwrite(t,'test_1MB.pt')
        assert h.wait() == 1
    """,
    "parallel write": """
        t=torch.empty(1024**2, dtype=torch.uint8)
        h = AsyncIOBuilder().load().aio_handle(intra_op_parallelism=4)
        h.async_pwrite(t,'test_1MB.pt')
        assert h.wait() == 1
    """,
    "advanced handle": """
        t=torch.empty(1024**2, dtype=torch.uint8)
        h = AsyncIOBuilder().load().aio_handle(block_size=1048576,
                                               queue_depth=32,
                                               single_submit=False,
                                               overlap_events=True,
                                               intra_op_parallelism=8)
        assert h.sync_pwrite(t,'test_1MB.pt') == 1
        help(AsyncIOBuilder().load().aio_handle())
    """,
    "GDS": """
        t=torch.empty(1024**2, dtype=torch.uint8)
        AsyncIOBuilder().load().aio_handle().sync_pwrite(t,'test_1MB.pt')
        import nvmeio
        try:
            h = GDSBuilder().load().gds_handle()
        except nvmeio.BackendUnavailableError as reason:
            print(reason)
    """,
}


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_tutorial_with_only_its_import_changed(
    snippet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = "import torch\nfrom nvmeio.compat.deepspeed import AsyncIOBuilder, GDSBuilder\n"
    exec(lines + textwrap.dedent(SNIPPETS[snippet]), {})
    assert os.path.getsize("test_1MB.pt") == 1024**2
