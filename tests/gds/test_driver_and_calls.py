"""The driver behind a handle, cancelled and hanging calls, devices; on a fake libcufile."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import fake_cuda
from fake_device import FakeDevice
from gds._support import PAGE, TASK, FakeCuFile, room
from inside import cufile_of, leave_host_memory, record_of
from support import (
    bytes_tensor,
    on_every_loop,
    random_bytes,
    raw,
    run_python,
    spin_until,
)

import nvmeio
from nvmeio._files.descriptors import Descriptors
from nvmeio.engines.base import Options
from nvmeio.engines.cufile import driver, engine, registry
from nvmeio.engines.cufile import driver as driver_module
from nvmeio.engines.cufile import library as library_module

# The driver


def test_driver_is_open_while_a_handle_is(
    new_gds: Callable[..., nvmeio.GdsHandle], fake: FakeCuFile
) -> None:
    first, second = new_gds(), new_gds()
    assert (fake.opens, fake.closes) == (1, 0)
    first.close()
    first.close()
    assert fake.closes == 0
    second.close()
    assert (fake.opens, fake.closes) == (1, 1)
    new_gds().close()
    assert (fake.opens, fake.closes) == (2, 2)


def test_parameters_are_set_before_the_open(
    new_gds: Callable[..., nvmeio.GdsHandle], fake: FakeCuFile
) -> None:
    handle = new_gds(allow_compat=False, max_direct_io_bytes=8 << 20)
    assert fake.flags == {1: False, 4: False}  # no compat mode, no threads of its own
    assert fake.max_direct_io == 8192
    with pytest.raises(ValueError, match="one setting for all"):
        new_gds()
    handle.close()
    new_gds()
    assert fake.flags == {1: True, 4: False}


@pytest.mark.parametrize("why_not", [None, "nvidia-fs", "the user's variable"])
def test_p2pdma_is_switched_on_where_nothing_speaks_against_it(
    why_not: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is off by default, so that without nvidia-fs all went through host memory."""
    monkeypatch.delenv(driver.P2PDMA_VARIABLE, raising=False)
    monkeypatch.setattr(driver, "NVIDIA_FS", tmp_path)
    if why_not == "nvidia-fs":
        (tmp_path / "version").write_text("GDS Version: 1.16.0.49\nversion: 2.26")
    elif why_not is not None:
        monkeypatch.setenv(driver.P2PDMA_VARIABLE, "false")
    asked: dict[int, bool] = {}

    class Loaded:
        path, version, version_text = "libcufile", 1200, "1.20"

        def set_flag(self, parameter: int, value: bool) -> int:
            asked[parameter] = value
            return 0

        def open_driver(self) -> tuple[int, int]:
            return 0, 0

        close_driver = open_driver

        properties = p2p_flags = staticmethod(lambda: None)

    fake_cuda(monkeypatch)
    monkeypatch.setattr(driver, "preflight_problem", lambda: ("", "", ""))
    monkeypatch.setattr(library_module, "load", Loaded)
    opened = driver.Driver()
    opened.acquire(driver.DriverSettings(True, True, None))
    assert asked.get(library_module.USE_PCIP2PDMA) == (None if why_not else True)
    opened.release()
    asked.clear()
    opened.acquire(driver.DriverSettings(False, True, None))
    assert asked and library_module.USE_PCIP2PDMA not in asked  # of host memory
    opened.release()


def test_log_does_not_go_to_the_working_directory(
    new_gds: Callable[..., nvmeio.GdsHandle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("CUFILE_LOGFILE_PATH", raising=False)
    assert driver.log_path() == str(tmp_path / "state/nvmeio/cufile.log")
    assert (tmp_path / "state/nvmeio").is_dir()
    new_gds()
    assert "CUFILE_LOGFILE_PATH" not in os.environ


def test_log_of_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert driver.log_path() == os.devnull


@pytest.mark.parametrize(
    ("nvfs", "status", "feature", "mode"),
    [
        ("2.26", 1 << 4, 0, "gds"),
        ("", 1 << 4, 1 << 4, "p2p"),
        ("", 0, 7, "compat"),
        ("2.26", 0, 0, "compat"),
    ],
)
def test_mode_says_which_way_bytes_go(nvfs: str, status: int, feature: int, mode: str) -> None:
    properties = driver.Properties(2 if nvfs else 0, status, feature)
    assert driver.mode_of(properties, nvfs) == mode
    assert driver.mode_of(None, nvfs) == "compat"
    # From 1.16 on it says so itself; the bits of the status may be old ones.
    assert driver.mode_of(properties, nvfs, 1) == mode
    assert driver.mode_of(properties, nvfs, 0) == mode.replace("p2p", "compat")


def test_handle_tells_its_mode_and_settings(gds: nvmeio.GdsHandle) -> None:
    assert (gds.mode, gds.engine, gds.get_task_bytes()) == ("host", "cufile", TASK)
    assert gds.get_intra_op_parallelism() == 4
    assert "mode=host" in repr(gds)
    gds.close()
    assert "closed" in repr(gds)


def test_driver_that_refuses(new_gds: Callable[..., nvmeio.GdsHandle], fake: FakeCuFile) -> None:
    fake.open_status, fake.open_cuda = 5011, 999
    with pytest.raises(nvmeio.BackendUnavailableError, match="5011, the CUDA driver failed") as no:
        new_gds()
    assert "(CUDA error 999)" in str(no.value)
    assert "AioHandle" in no.value.remedy
    fake.open_status = 0
    new_gds()


def test_driver_that_somebody_else_has_opened_is_left_open(
    new_gds: Callable[..., nvmeio.GdsHandle], fake: FakeCuFile, path: Path
) -> None:
    fake.open_status = 5026
    handle = new_gds()
    handle.sync_pwrite(room(TASK), path)
    handle.close()
    assert fake.closes == 0


@pytest.mark.parametrize(("version", "word"), [(1100, "1.10 is too old"), (1140, "from 1.16 on")])
def test_library_that_is_too_old(
    new_gds: Callable[..., nvmeio.GdsHandle], fake: FakeCuFile, version: int, word: str
) -> None:
    fake.version = version
    with pytest.raises(nvmeio.BackendUnavailableError, match=word):
        new_gds()
    assert fake.opens == 0


def test_library_that_is_none(
    new_gds: Callable[..., nvmeio.GdsHandle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = tmp_path / "no-library.so"
    wrong.write_text("nonsense")
    monkeypatch.setenv("NVMEIO_CUFILE", str(wrong))
    with pytest.raises(nvmeio.BackendUnavailableError, match=r"no-library\.so"):
        new_gds()
    monkeypatch.setenv("NVMEIO_CUFILE", str(tmp_path / "gone.so"))
    with pytest.raises(nvmeio.BackendUnavailableError, match=r"names .*gone\.so, no file"):
        new_gds()
    monkeypatch.delenv("NVMEIO_CUFILE")
    monkeypatch.setattr(library_module, "library_candidates", lambda: iter(()))
    with pytest.raises(nvmeio.BackendUnavailableError, match="pip install nvidia-cufile"):
        new_gds()


def test_without_a_gpu_it_says_what_to_use_instead(fake: FakeCuFile) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(nvmeio.BackendUnavailableError, match="no GPU memory") as no:
        nvmeio.GdsHandle()
    assert "AioHandle" in no.value.remedy
    assert 'cpu_tensors="cufile"' in no.value.remedy
    assert fake.opens == 0


def test_kernel_without_modules_is_refused_before_anything_hangs(
    new_gds: Callable[..., nvmeio.GdsHandle],
    fake: FakeCuFile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver_module, "MODULES", tmp_path / "nowhere")
    with pytest.raises(nvmeio.BackendUnavailableError, match="would never return"):
        new_gds()
    assert fake.opens == 0


def test_nvidia_fs_without_its_device_is_refused(
    new_gds: Callable[..., nvmeio.GdsHandle], fake: FakeCuFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver_module.MODULES.write_text("nvidia_fs 323584 0 - Live 0x0000000000000000\n")
    monkeypatch.setattr(driver_module, "DEVICES", driver_module.MODULES.parent)
    with pytest.raises(nvmeio.BackendUnavailableError, match="standard input"):
        new_gds()
    assert fake.opens == 0
    (driver_module.MODULES.parent / "nvidia-fs0").touch()
    new_gds()


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"task_bytes": 5000}, nvmeio.AlignmentError, "not a multiple of 4096; use 8192"),
        ({"task_bytes": 0}, ValueError, "task_bytes must lie between"),
        ({"task_bytes": 1.5}, TypeError, "task_bytes must be an int"),
        ({"max_direct_io_bytes": 0}, ValueError, "max_direct_io_bytes must lie"),
        ({"max_direct_io_bytes": 1}, nvmeio.AlignmentError, "not a multiple of 4096; use 4096"),
        ({"cpu_tensors": "host"}, ValueError, "must be 'aio' or 'cufile'"),
        ({"timeout_s": 0}, ValueError, "positive and finite"),
        ({"timeout_s": float("inf")}, ValueError, "positive and finite"),
        ({"timeout_s": None}, TypeError, "number of seconds"),
        ({"intra_op_parallelism": 0}, ValueError, "intra_op_parallelism"),
        ({"block_size": 100}, nvmeio.AlignmentError, "block_size 100"),
    ],
)
def test_parameters_out_of_range(
    new_gds: Callable[..., nvmeio.GdsHandle],
    fake: FakeCuFile,
    options: dict[str, Any],
    error: type[Exception],
    match: str,
) -> None:
    with pytest.raises(error, match=match):
        new_gds(**options)
    assert fake.opens == 0


# Cancelling, closing


@on_every_loop
async def test_cancelled_read_waits_for_its_call_and_starts_no_other(
    new_gds: Callable[..., nvmeio.GdsHandle], fake: FakeCuFile, path: Path
) -> None:
    gds = new_gds(intra_op_parallelism=1)
    path.write_bytes(random_bytes(9 * TASK))
    fake.hold = 1
    tensor = room(9 * TASK)
    reading = asyncio.create_task(gds.async_pread(tensor, path))
    while fake.together != 1:
        await asyncio.sleep(0.001)
    reading.cancel()
    await asyncio.sleep(0.01)
    assert not reading.done()
    fake.hold = 0
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert fake.calls == 1
    assert gds.stats.cancelled == 1
    assert await gds.async_pread(tensor, path) == 9 * TASK
    assert raw(tensor) == path.read_bytes()


def test_close_finishes_what_is_in_flight(gds: nvmeio.GdsHandle, path: Path) -> None:
    data = random_bytes(50 * TASK)
    writing = gds.async_pwrite(bytes_tensor(data), path)
    gds.close()
    assert writing.done()
    assert path.read_bytes() == data
    with pytest.raises(nvmeio.ClosedError):
        gds.async_pread(room(1), path)


def test_fsync_waits_for_the_writes(gds: nvmeio.GdsHandle, fake: FakeCuFile, path: Path) -> None:
    path.touch()
    fake.hold = 1
    writing = gds.async_pwrite(room(TASK), path)

    def let_go() -> None:
        fake.hold = 0

    timer = threading.Timer(0.05, let_go)
    timer.start()
    gds.sync_fsync(path)
    assert writing.done()
    timer.join()


def test_statistics(gds: nvmeio.GdsHandle, fake: FakeCuFile, path: Path) -> None:
    gds.sync_pwrite(room(3 * TASK), path)
    gds.sync_pread(room(3 * TASK), path)
    stats = gds.stats
    assert (stats.bytes_read, stats.bytes_written, stats.operations) == (3 * TASK, 3 * TASK, 2)
    # Nothing here is DMA to a device, and nothing says so.
    assert stats.direct_bytes == 0
    assert stats.bounced_bytes + stats.buffered_bytes == 6 * TASK


def test_after_fork_the_child_is_told(gds: nvmeio.GdsHandle, fake: FakeCuFile, path: Path) -> None:
    gds.sync_pwrite(room(TASK), path)
    closes = fake.closes
    child = os.fork()
    if not child:
        code = 1
        try:
            gds.async_pread(room(TASK), path)
        except nvmeio.ClosedError:
            try:
                nvmeio.GdsHandle(cpu_tensors="cufile")
            except nvmeio.BackendUnavailableError as no:
                gds.close()
                code = 7 if "spawn" in no.remedy and fake.closes == closes else 3
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_threads_that_cannot_be_had_leave_nothing_behind(
    new_gds: Callable[..., nvmeio.GdsHandle], fake: FakeCuFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "nvmeio-cufile-2":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            new_gds()
    assert (fake.opens, fake.closes) == (1, 1)
    spin_until(lambda: not [t for t in threading.enumerate() if "nvmeio-cufile" in t.name])
    new_gds()


def test_without_assertions_the_driver_is_closed_too(fake_library: Path, tmp_path: Path) -> None:
    script = """
        import ctypes, os, nvmeio
        from pathlib import Path
        from nvmeio.engines.cufile import driver as preflight
        preflight.MODULES = Path("/proc/self/status")
        nvmeio.GdsHandle(cpu_tensors="cufile").close()
        fake = ctypes.CDLL(os.environ["NVMEIO_CUFILE"])
        print(ctypes.c_long.in_dll(fake, "closes").value)
    """
    done = run_python(script, "-O", NVMEIO_CUFILE=str(fake_library))
    assert (done.returncode, done.stdout.split()) == (0, ["1"]), done.stderr


def test_cpu_tensors_go_the_aio_way(
    on_device: nvmeio.GdsHandle, device: FakeDevice, fake: FakeCuFile, path: Path
) -> None:
    data = random_bytes(5 * TASK)
    on_device.sync_pwrite(bytes_tensor(data), path)
    assert fake.calls == 0
    tensor = device.take(room(5 * TASK))
    on_device.sync_pread(tensor, path)
    assert fake.calls == 5
    assert raw(tensor) == data
    with pytest.raises(TypeError, match="is not a CUDA tensor"):
        on_device.pin_device_tensor(torch.zeros(4))


def test_device_memory_is_touched_when_the_stream_gets_there(
    on_device: nvmeio.GdsHandle, device: FakeDevice, fake: FakeCuFile, path: Path
) -> None:
    device.work.clear()
    tensor = device.take(room(2 * TASK))
    writing = on_device.async_pwrite(tensor, path)
    host = on_device.async_pwrite(room(8), path, 10 * TASK)
    assert host.result() == 8
    time.sleep(0.02)
    assert (fake.calls, writing.done()) == (0, False)
    tensor.fill_(7)
    device.work.set()
    assert writing.result() == 2 * TASK
    assert path.read_bytes()[: 2 * TASK] == bytes([7]) * 2 * TASK


@pytest.mark.parametrize("writing", [False, True], ids=["read", "write"])
def test_a_tensor_that_gives_up_its_data_is_kept(
    gds: nvmeio.GdsHandle, fake: FakeCuFile, path: Path, writing: bool
) -> None:
    """cuFile went on with memory that had been freed."""
    data = random_bytes(65536)
    path.write_bytes(bytes(65536) if writing else data)
    tensor = torch.zeros(65536, dtype=torch.uint8)
    storage = tensor.untyped_storage()
    if writing:
        tensor.copy_(bytes_tensor(data))
    fake.hold = 1
    operation = (gds.async_pwrite if writing else gds.async_pread)(tensor, path)
    with pytest.raises(RuntimeError, match="resizable"):
        storage.resize_(0)
    tensor.data = torch.empty(0, dtype=torch.uint8)
    others = [torch.full((65536,), 7, dtype=torch.uint8) for _ in range(4)]
    fake.hold = 0
    assert operation.result() == 65536
    assert path.read_bytes() == data
    assert raw(tensor.set_(storage)) == data  # type: ignore[call-overload]
    assert all(bool((other == 7).all()) for other in others)
    assert storage.resizable()


def test_waiting_for_one_stream_holds_up_no_other(
    on_device: nvmeio.GdsHandle, device: FakeDevice, path: Path
) -> None:
    path.write_bytes(bytes(2 * TASK))
    ready, device.work = device.work, threading.Event()
    late = [on_device.async_pread(device.take(room(2 * TASK)), path) for _ in range(9)]
    device.work, blocked = ready, device.work
    assert on_device.sync_pread(device.take(room(TASK)), path) == TASK
    late[0].cancel()
    spin_until(late[0].done)
    blocked.set()
    assert [each.result() for each in late[1:]] == [2 * TASK] * 8


@pytest.mark.parametrize(("offset", "direct"), [(0, 2 * TASK), (PAGE, 2 * TASK), (PAGE - 8, 0)])
def test_only_aligned_tasks_count_as_direct(
    new_gds: Callable[..., nvmeio.GdsHandle],
    device: FakeDevice,
    direct_path: Path,
    offset: int,
    direct: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a file offset that is none of a page's, no task is aligned in file and memory at once."""
    monkeypatch.setattr(driver.Driver, "mode", lambda *_: "gds")
    on_device = new_gds()
    leave_host_memory(on_device)
    tensor = device.take(nvmeio.empty_aligned(2 * TASK, dtype=torch.uint8))
    writing = on_device.async_pwrite(tensor, direct_path, offset)
    writing.result()
    assert (writing.direct_bytes, writing.transferred) == (direct, 2 * TASK)


def test_edges_of_device_writes_go_by_the_host(
    on_device: nvmeio.GdsHandle, device: FakeDevice, direct_path: Path
) -> None:
    data = random_bytes(3 * TASK)
    direct_path.write_bytes(b"\xee" * 4 * TASK)
    on_device.sync_pwrite(device.tensor(bytes_tensor(data)), direct_path, 100)
    expected = b"\xee" * 100 + data + b"\xee" * (TASK - 100)
    assert direct_path.read_bytes() == expected
    assert [what for what, _ in device.log] == ["download", "download"]


def test_tensors_that_are_not_contiguous(
    on_device: nvmeio.GdsHandle, device: FakeDevice, path: Path
) -> None:
    whole = torch.arange(8 * PAGE, dtype=torch.int32).reshape(64, -1)
    path.write_bytes(raw(whole.t().contiguous()))
    back = device.take(torch.zeros(64, 8 * PAGE // 64, dtype=torch.int32)).t()
    on_device.pread(back, path, validate=True)
    assert torch.equal(back, whole.t())


# Calls that hang


def test_call_that_hangs_is_timed_out(
    new_gds: Callable[..., nvmeio.GdsHandle], fake: FakeCuFile, path: Path
) -> None:
    gds = new_gds(timeout_s=0.2, intra_op_parallelism=2)
    path.write_bytes(bytes(9 * TASK))
    with nvmeio.open(path) as file:
        fake.hold = 1
        tensor = gds.new_pinned_device_tensor(9 * TASK, torch.uint8)
        with pytest.raises(nvmeio.CuFileError, match="has not returned within") as failed:
            gds.sync_pread(tensor, file)
        assert failed.value.errno == errno.ETIMEDOUT
        assert isinstance(failed.value, TimeoutError)
        with pytest.raises(ValueError, match="in flight"):
            gds.unpin_device_tensor(tensor)
    assert fake.files == 1  # closed, and open all the same for the calls that have not returned
    # All threads are lost: nothing is left to wait for.
    with pytest.raises(nvmeio.CuFileError, match="an earlier call"):
        gds.sync_pread(room(8), path)
    cufile_of(gds).call_limit_s = 200.0  # from now on a busy machine is no call that hangs
    fake.hold = 0
    spin_until(lambda: fake.files == 0)

    def answers() -> bool:
        with contextlib.suppress(nvmeio.CuFileError):
            return gds.sync_pread(room(8), path) == 8
        return False

    spin_until(answers)
    gds.unpin_device_tensor(tensor)


def test_one_thread_that_hangs_leaves_the_others_at_work(
    new_gds: Callable[..., nvmeio.GdsHandle], fake: FakeCuFile, path: Path
) -> None:
    gds = new_gds(timeout_s=0.2, intra_op_parallelism=2)
    path.write_bytes(bytes(TASK))
    fake.hold = 1
    memory = room(TASK).untyped_storage()
    stuck = gds.async_pread(torch.empty(0, dtype=torch.uint8).set_(memory), path)
    spin_until(lambda: fake.together == 1)
    assert isinstance(stuck.exception(), TimeoutError)
    assert not memory.resizable()  # the call may still write to it
    cufile_of(gds).call_limit_s = 200.0  # from now on a busy machine is no call that hangs
    # Whoever comes now would wait with it, were it not for the other thread.
    beside = gds.async_pread(room(TASK), path)
    spin_until(lambda: fake.together == 2)
    fake.hold = 0
    assert beside.result() == TASK
    spin_until(memory.resizable)


def test_call_given_up_that_returns_ends_its_transfer_once(
    new_gds: Callable[..., nvmeio.GdsHandle],
    device: FakeDevice,
    fake: FakeCuFile,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gds = new_gds(intra_op_parallelism=2)
    leave_host_memory(gds)
    cufile_of(gds)._workers[0]._mover._needs_cuda = True
    path.write_bytes(bytes(9 * TASK))
    let_in = threading.Event()
    monkeypatch.setattr(device, "enter", lambda _: let_in.wait() if fake.together else None)
    fake.hold = 1
    other = gds.async_pread(device.take(room(TASK)), path)
    spin_until(lambda: fake.together == 1)
    given_up = gds.async_pread(device.take(room(9 * TASK)), path)
    spin_until(lambda: len(_workers_on(gds, given_up)) == 1)
    (worker,) = _workers_on(gds, given_up)
    with cufile_of(gds).condition:
        cufile_of(gds)._give_up(worker)
    assert isinstance(given_up.exception(), TimeoutError)
    let_in.set()
    spin_until(lambda: not worker.lost)
    fake.hold = 0
    assert other.result() == TASK
    assert gds.stats.operations == 2
    gds.close()
    assert fake.closes == 1


def _workers_on(gds: nvmeio.GdsHandle, operation: nvmeio.Operation) -> list[Any]:
    return [
        worker
        for worker in cufile_of(gds)._workers
        if worker.task is not None and worker.task.request is record_of(operation).request
    ]


def test_call_that_returns_says_nothing_of_another_handles(
    new_gds: Callable[..., nvmeio.GdsHandle], fake: FakeCuFile
) -> None:
    new_gds()
    held = engine.DRIVER
    held.hangs("one call")
    held.hangs("another call")
    held.returned()
    with pytest.raises(nvmeio.BackendUnavailableError, match="one call"):
        new_gds()
    held.returned()
    new_gds()


def test_close_does_not_wait_for_a_call_that_hangs(
    new_gds: Callable[..., nvmeio.GdsHandle], fake: FakeCuFile, path: Path
) -> None:
    gds = new_gds(timeout_s=0.2)
    path.write_bytes(bytes(TASK))
    fake.hold = 1
    reading = gds.async_pread(room(TASK), path)
    with pytest.raises(nvmeio.CuFileError, match="has not returned"):
        gds.close()
    assert reading.done()
    assert fake.closes == 0  # not below a call that is still in there
    with pytest.raises(nvmeio.BackendUnavailableError, match="start a new process"):
        new_gds()


def test_open_that_hangs(
    new_gds: Callable[..., nvmeio.GdsHandle], fake: FakeCuFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "OPEN_LIMIT_S", 0.1)
    fake.open_hold = 1
    for _ in range(2):
        with pytest.raises(nvmeio.BackendUnavailableError, match="not back after") as no:
            new_gds()
        assert "nvmeio report" in no.value.remedy or "new process" in no.value.remedy
    assert fake.opens == 1
    fake.open_hold = 0


def test_close_of_the_driver_that_hangs(
    new_gds: Callable[..., nvmeio.GdsHandle], fake: FakeCuFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "CLOSE_LIMIT_S", 0.1)
    gds = new_gds()
    fake.close_hold = 1
    gds.close()
    fake.close_hold = 0


@pytest.mark.parametrize("what", ["hold", "close_hold", "open_hold"])
def test_process_exits_whatever_hangs(fake_library: Path, tmp_path: Path, what: str) -> None:
    script = """
        import sys, torch, nvmeio
        from nvmeio.engines.cufile import driver, engine, driver as preflight
        from pathlib import Path
        preflight.MODULES = Path("/proc/self/status")
        driver.CLOSE_LIMIT_S = engine.EXIT_LIMIT_S = 0.3
        if "WHAT" == "open_hold":
            driver.OPEN_LIMIT_S = 0.3
        try:
            handle = nvmeio.GdsHandle(cpu_tensors="cufile")
        except nvmeio.BackendUnavailableError as no:
            print("refused" if "not back" in str(no) else no)
        else:
            Path(sys.argv[0] + "DIR/file").write_bytes(bytes(40960))
            reading = handle.async_pread(torch.zeros(10240), "DIR/file")
            print("started")
    """
    script = script.replace('sys.argv[0] + "DIR', '"DIR').replace("DIR", str(tmp_path))
    script = script.replace("WHAT", what)
    began = time.monotonic()
    done = run_python(script, NVMEIO_CUFILE=str(fake_library), FAKE_CUFILE=f"{what}=1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["refused" if what == "open_hold" else "started"]
    assert time.monotonic() - began < 300


def test_engine_serves_one_handle(gds: nvmeio.GdsHandle) -> None:
    with pytest.raises(RuntimeError, match="one engine serves one handle"):
        cufile_of(gds).start(Options())
    assert isinstance(cufile_of(gds), engine.CuFileEngine)


def test_a_file_that_the_collector_lets_go_while_another_is_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for a lock that its own thread had, and every transfer after it waited, too."""
    gone: list[int] = []

    class Library:
        def register_file(self, fd: int) -> int:
            return fd

        def unregister_file(self, handle: int) -> None:
            gone.append(handle)

    library: Any = Library()
    for name in ("dropped", "kept"):
        (tmp_path / name).write_bytes(bytes(PAGE))
    dropped, kept = (nvmeio.open(tmp_path / name) for name in ("dropped", "kept"))
    files, going, staying = registry.Files(), dropped.acquire("test"), kept.acquire("test")
    number = going.any_fd()
    files.handle(library, going, number)
    going.let_go("test")
    before_close = Descriptors.before_close

    def collecting(descriptors: Descriptors, *work: Any) -> None:
        dropped.close()
        before_close(descriptors, *work)

    monkeypatch.setattr(Descriptors, "before_close", collecting)
    registering = threading.Thread(
        target=files.handle, args=(library, staying, staying.any_fd()), daemon=True
    )
    registering.start()
    spin_until(lambda: not registering.is_alive())
    assert gone == [number]
    staying.let_go("test")
    kept.close()
    assert len(gone) == 2
