"""What becomes of a tensor while an operation is in flight in it: the storage is kept."""

from __future__ import annotations

import concurrent.futures
import gc
import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from fake_device import fake_device
from support import HeldEngine, bytes_tensor, random_bytes, raw, spin_until_collected

import nvmeio
from nvmeio._memory import holds
from nvmeio.testing import FakeEngine

NBYTES = 65536
DATA = random_bytes(NBYTES)
Make = Callable[..., nvmeio.AioHandle]


class Region(mmap.mmap):
    """Memory whose end can be seen."""


def region_tensor(data: bytes) -> tuple[torch.Tensor, Callable[[], Region | None]]:
    """A tensor of these bytes, and a weak reference to the memory behind it."""
    region = Region(-1, len(data))
    region[:] = data
    return torch.frombuffer(region, dtype=torch.uint8), weakref.ref(region)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "tensors.bin"
    made.write_bytes(DATA)
    return made


# What a caller may do to his tensor


def gives_up_its_data(tensor: torch.Tensor) -> None:
    tensor.data = torch.empty(0, dtype=tensor.dtype)


def takes_another_dtype(tensor: torch.Tensor) -> None:
    tensor.data = tensor.detach().to(torch.float64).to(tensor.dtype).clone()


def is_set_to_another_storage(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.set_(torch.empty(NBYTES, dtype=tensor.dtype))  # type: ignore[call-overload]


CHANGES = [gives_up_its_data, takes_another_dtype, is_set_to_another_storage]
changes = pytest.mark.parametrize("change", CHANGES, ids=lambda change: str(change.__name__))


@contextmanager
def held_handle(kind: str, patch: pytest.MonkeyPatch) -> Iterator[tuple]:  # type: ignore[type-arg]
    """A handle whose operations wait for a gate, and what makes a tensor of its kind of memory."""
    engine = HeldEngine()
    with fake_device(patch) as device:
        device.gate.clear()

        def on_device(tensor: torch.Tensor) -> torch.Tensor:
            return device.take(tensor) if kind.startswith("ring") else tensor

        def open_gates() -> None:
            device.gate.set()
            engine.gate.set()

        with nvmeio.AioHandle(engine=engine, ring_bytes=4 * 4 * 4096) as handle:
            try:
                yield handle, on_device, open_gates
            finally:
                open_gates()


KINDS = ["host", "ring", "staged", "ring-staged"]


@changes
@pytest.mark.parametrize("kind", KINDS)
def test_a_read_goes_into_the_memory_that_it_was_given(
    kind: str, change: Callable[[torch.Tensor], None], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operation kept the tensor alone: its memory was freed, and somebody else's changed."""
    with held_handle(kind, monkeypatch) as (handle, on_device, open_gates):
        whole, region = region_tensor(bytes(2 * NBYTES))
        tensor = on_device(whole)
        tensor = tensor[::2] if "staged" in kind else tensor[:NBYTES]
        operation = handle.async_pread(tensor, path)
        change(tensor)
        after = tensor.clone()
        del whole
        gc.collect()
        memory = region()
        assert memory is not None, "freed while the operation is in flight"
        open_gates()
        assert operation.result() == NBYTES
        step = 2 if "staged" in kind else 1
        assert memory[: step * NBYTES : step] == DATA
        assert torch.equal(tensor, after)


@changes
@pytest.mark.parametrize("kind", KINDS)
def test_a_write_comes_from_the_memory_that_it_was_given(
    kind: str, change: Callable[[torch.Tensor], None], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was allocated in the old memory's place went into the file."""
    path.write_bytes(b"")
    with held_handle(kind, monkeypatch) as (handle, on_device, open_gates):
        tensor, region = region_tensor(DATA)
        tensor = on_device(tensor)
        if "staged" in kind:
            tensor = tensor.view(2, -1).t()
        operation = handle.async_pwrite(tensor, path)
        change(tensor)
        gc.collect()
        assert "staged" in kind or region() is not None, "freed while the operation is in flight"
        others = [torch.full((NBYTES,), 7, dtype=torch.uint8) for _ in range(4)]
        open_gates()
        assert operation.result() == NBYTES
        expected = bytes_tensor(DATA)
        if "staged" in kind:
            expected = expected.view(2, -1).t().contiguous()
        assert path.read_bytes() == raw(expected)
        assert len(others) == 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("writing", [False, True], ids=["read", "write"])
def test_a_dropped_tensor_is_kept(
    kind: str, writing: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_handle(kind, monkeypatch) as (handle, on_device, open_gates):
        tensor, region = region_tensor(DATA)
        tensor = on_device(tensor)
        if "staged" in kind:
            tensor = tensor.view(2, -1).t()
        operation = (handle.async_pwrite if writing else handle.async_pread)(tensor, path)
        del tensor
        gc.collect()
        assert (writing and "staged" in kind) or region() is not None
        open_gates()
        assert operation.result() == NBYTES


def test_memory_goes_with_the_operation(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation that is over, and kept, keeps no memory."""
    with held_handle("host", monkeypatch) as (handle, _, open_gates):
        tensor, region = region_tensor(DATA)
        operation = handle.async_pread(tensor, path)
        del tensor
        open_gates()
        operation.result()
        spin_until_collected(lambda: region() is None)


def test_nobody_elses_memory_is_touched(make_handle: Make, path: Path) -> None:
    """On the real engines: 20 of 20 reads into a tensor that gave up its data hit another one."""
    handle = make_handle(block_size=1 << 20)
    nbytes = 6 << 20
    path.write_bytes(b"\xff" * nbytes)
    for _ in range(20):
        tensor = torch.zeros(nbytes, dtype=torch.uint8)
        operation = handle.async_pread(tensor, path)
        tensor.data = torch.empty(0, dtype=torch.uint8)
        other = torch.full((nbytes,), 7, dtype=torch.uint8)
        assert operation.result() == nbytes
        assert bool((other == 7).all())


def test_a_recorded_read_says_that_its_tensor_was_exchanged(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd records the copy into the tensor itself, which now has other memory."""
    with held_handle("host", monkeypatch) as (handle, _, open_gates):
        tensor = torch.zeros(NBYTES // 4, requires_grad=True) * 1
        operation = handle.async_pread(tensor, path)
        other = torch.zeros(NBYTES // 4)
        tensor.data = other
        open_gates()
        with pytest.raises(RuntimeError, match="given another storage"):
            operation.result()
        assert not other.any()


# Resizing, and moving to shared memory


def free(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def grow(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.resize_(2 * NBYTES)


def share(tensor: torch.Tensor) -> None:
    tensor.share_memory_()


def test_this_torch_is_known() -> None:
    """Storages can be held in every version of torch that the package supports."""
    assert holds.FLAG_OFFSET is not None


@pytest.mark.parametrize("writing", [False, True], ids=["read", "write"])
@pytest.mark.parametrize("change", [free, grow], ids=["free", "grow"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_storage_is_not_resized_in_flight(
    kind: str,
    change: Callable[[torch.Tensor], None],
    writing: bool,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`resize_(0)`, by which libraries free a parameter, freed what the kernel was writing to."""
    with held_handle(kind, monkeypatch) as (handle, on_device, open_gates):
        whole = on_device(torch.zeros(NBYTES, dtype=torch.uint8))
        tensor = whole.view(2, -1).t() if "staged" in kind else whole
        operation = (handle.async_pwrite if writing else handle.async_pread)(tensor, path)
        copied = writing and "staged" in kind
        assert whole.untyped_storage().resizable() == copied
        if not copied:
            with pytest.raises(RuntimeError, match="resiz"):
                change(whole)
        open_gates()
        assert operation.result() == NBYTES
        assert whole.untyped_storage().resizable()
        change(whole)


@pytest.mark.parametrize("writing", [False, True], ids=["read", "write"])
@pytest.mark.parametrize("kind", ["host", "ring"])
def test_a_storage_is_not_moved_to_shared_memory_in_flight(
    kind: str, writing: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`share_memory_` copies, and frees the old memory at once."""
    with held_handle(kind, monkeypatch) as (handle, on_device, open_gates):
        tensor = on_device(torch.zeros(NBYTES, dtype=torch.uint8))
        operation = (handle.async_pwrite if writing else handle.async_pread)(tensor[:4096], path)
        with pytest.raises(RuntimeError, match="in flight"):
            tensor.share_memory_()
        open_gates()
        operation.result()
        tensor.share_memory_()
        assert tensor.is_shared()
        again = handle.async_pread(tensor, path)
        tensor.share_memory_()  # is shared already: nothing moves
        assert again.result() == NBYTES


def test_a_staged_read_follows_its_storage_into_shared_memory(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_handle("host", monkeypatch) as (handle, _, open_gates):
        whole = torch.zeros(2 * NBYTES, dtype=torch.uint8)
        operation = handle.async_pread(whole[::2], path)
        whole.share_memory_()
        open_gates()
        assert operation.result() == NBYTES
        assert raw(whole[::2].contiguous()) == DATA


def test_operations_in_one_storage_hold_it_together(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_handle("host", monkeypatch) as (handle, _, open_gates):
        tensor = torch.zeros(2 * NBYTES, dtype=torch.uint8)
        short = handle.async_pread(tensor[:0], path)
        first = handle.async_pread(tensor[:NBYTES], path)
        with pytest.raises(nvmeio.TransferError):
            handle.sync_pread(tensor, path.parent / "missing")
        assert not tensor.untyped_storage().resizable()
        open_gates()
        assert (short.result(), first.result()) == (0, NBYTES)
        assert tensor.untyped_storage().resizable()


def test_a_hold_ends_with_its_operation_however_that_ends(new_handle: Make, path: Path) -> None:
    engine = HeldEngine(fail={0: 5})
    handle = new_handle(engine, queue_depth=1)
    tensor = torch.zeros(NBYTES, dtype=torch.uint8)
    storage = tensor.untyped_storage()
    failing = handle.async_pread(tensor, path)
    cancelled = handle.async_pread(tensor, path)
    cancelled.cancel()
    engine.gate.set()
    assert isinstance(failing.exception(), nvmeio.TransferError)
    with pytest.raises(concurrent.futures.CancelledError):
        cancelled.result()
    assert storage.resizable()
    with pytest.raises(ValueError, match="file_offset"):
        handle.async_pread(tensor, path, -1)
    with pytest.raises(TypeError, match="file"):
        handle.async_pread(tensor, 1.5)  # type: ignore[arg-type]
    handle.close()
    with pytest.raises(nvmeio.ClosedError):
        handle.async_pread(tensor, path)
    assert storage.resizable()
    free(tensor)


def test_a_storage_that_was_fixed_stays_so(new_handle: Make, path: Path) -> None:
    handle = new_handle(FakeEngine())
    tensor = torch.zeros(NBYTES, dtype=torch.uint8)
    array = tensor.numpy()  # torch does not resize it from now on
    handle.sync_pread(tensor, path)
    assert not tensor.untyped_storage().resizable()
    assert array.tobytes() == DATA


def test_a_child_holds_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with held_handle("host", monkeypatch) as (handle, _, open_gates):
        tensor = torch.zeros(NBYTES, dtype=torch.uint8)
        operation = handle.async_pread(tensor, path)
        child = os.fork()
        if not child:
            os._exit(0 if tensor.untyped_storage().resizable() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not tensor.untyped_storage().resizable()
        open_gates()
        operation.result()
        assert tensor.untyped_storage().resizable()
