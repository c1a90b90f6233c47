"""SwappedActivations: what is written and what is not, drives that fail, and ends."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from inside import store_of
from offload._saved_activations import (
    Doubles,
    assert_same,
    gradients,
    loss_within,
    made,
    small,
)
from support import run_python, spin_until, spin_until_collected
from torch import nn

import nvmeio
from nvmeio._storage import durable
from nvmeio.offload import SwappedActivations
from nvmeio.testing import FakeEngine

# What is written, and what is not


def test_the_window_holds_what_was_saved_last(tmp_path: Path, handle: nvmeio.AioHandle) -> None:
    module, x = made("mlp")
    x = x.repeat(16, 1)
    with small(tmp_path, handle, resident_bytes=8 * x.nbytes) as swapped:
        loss = loss_within(swapped, lambda: module(x).square().mean())
        assert swapped.in_memory_bytes <= 4 * x.nbytes
        spin_until(lambda: swapped.on_drive_bytes >= 6 * x.nbytes)
        loss.backward()
        assert swapped.bytes_read <= swapped.bytes_written


def test_nothing_is_written_where_all_fits(tmp_path: Path, handle: nvmeio.AioHandle) -> None:
    module, x = made("mlp")
    with small(tmp_path, handle, resident_bytes="1M") as swapped:
        loss_within(swapped, lambda: module(x).square().mean()).backward()
        assert (swapped.bytes_written, swapped.file_bytes) == (0, 0)


def filler(swapped: SwappedActivations) -> torch.Tensor:
    """A graph that alone is more than the window holds."""
    module, x = made("mlp")
    with swapped.saving():
        found: torch.Tensor = module(x)
        return found


def test_what_somebody_holds_is_not_written_nor_held_twice(swapped: SwappedActivations) -> None:
    seen: list[int] = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            seen.append(ctx.saved_tensors[0].data_ptr())
            return grads[0]

    weight = nn.Parameter(torch.randn(64, 64))
    held = torch.randn(64, 64) * weight
    with swapped.saving():
        loss: Any = Looks.apply(held)  # type: ignore[no-untyped-call]
        loss = loss + Looks.apply(weight.t())  # type: ignore[no-untyped-call]
    filler(swapped)
    loss.sum().backward()
    assert sorted(seen) == sorted([held.data_ptr(), weight.data_ptr()])


def test_a_storage_is_written_once_however_often_it_is_saved(
    swapped: SwappedActivations,
) -> None:
    start = torch.randn(64, 64, requires_grad=True)
    base = start * 1
    wanted = torch.autograd.grad((base.t() * base[::2].sum(0)).square().sum(), start)[0]
    with swapped.saving():
        again = start * 1
        loss = (again.t() * again[::2].sum(0)).square().sum()
    del again
    filler(swapped)
    spin_until(lambda: swapped.on_drive_bytes == 2 * start.nbytes)  # `again`, and the product
    loss.backward()
    assert start.grad is not None
    assert torch.equal(start.grad, wanted)


def test_what_was_changed_in_place_is_refused(swapped: SwappedActivations) -> None:
    start = torch.randn(64, 64, requires_grad=True)
    with swapped.saving():
        middle = start * 2
        loss = (middle * middle).sum()
    middle.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_change_by_backward_is_refused_in_the_next_one(swapped: SwappedActivations) -> None:
    start = torch.ones(64, 64, requires_grad=True)
    with swapped.saving():
        loss: Any = Doubles.apply(start * 1)  # type: ignore[no-untyped-call]
        loss = loss.sum()
    filler(swapped)
    loss.backward(retain_graph=True)
    assert start.grad is not None
    assert bool((start.grad == 2).all())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward(retain_graph=True)


class Odd(torch.Tensor):
    """Of a user."""


def odd_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    square = torch.randn(64, 64)
    return {
        "complex": torch.randn(64, 64, dtype=torch.complex64),
        "conjugated": torch.randn(64, 64, dtype=torch.complex64).conj(),
        "negated": torch.randn(64, 64, dtype=torch.complex64).conj().imag,
        "bool": square > 0,
        "bfloat16": square.bfloat16(),
        "float8": square.to(torch.float8_e4m3fn),
        "transposed": square.clone().t(),
        "strided": square.clone()[3::5, ::7],
        "expanded": torch.randn(1024).expand(8, 1024),
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(1.5),
        "int64": torch.arange(4096),
        "sparse": square.relu().to_sparse(),
        "subclass": square.clone().as_subclass(Odd),
        "meta": torch.empty(64, 64, device="meta"),
        "numpy": torch.from_numpy(numpy.arange(4096)),
        "channels": torch.randn(2, 8, 8, 8).to(memory_format=torch.channels_last),
    }


@pytest.mark.parametrize("name", odd_tensors())
def test_tensors_of_every_kind_come_back_as_they_were(
    swapped: SwappedActivations, name: str
) -> None:
    found: list[torch.Tensor] = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
            kept = odd_tensors()[name]
            ctx.save_for_backward(kept)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            found.extend(ctx.saved_tensors)
            return grads[0], None

    with swapped.saving():
        loss = Keeps.apply(torch.ones(1, requires_grad=True), name)  # type: ignore[no-untyped-call]
    filler(swapped)
    loss.backward()
    wanted = odd_tensors()[name]
    assert type(found[0]) is type(wanted)
    assert (found[0].dtype, found[0].shape) == (wanted.dtype, wanted.shape)
    assert found[0].layout == wanted.layout
    if name != "meta":
        values = [t.to_dense().to(torch.complex128) for t in (found[0], wanted)]
        assert torch.equal(*values)
    if wanted.layout is torch.strided:
        assert found[0].stride() == wanted.stride()


def test_memory_of_others_is_left_where_it_is(swapped: SwappedActivations) -> None:
    """numpy still has it, and what numpy does to it counts, as without this."""
    start = torch.ones(4096, dtype=torch.float64, requires_grad=True)
    theirs = numpy.ones(4096)
    with swapped.saving():
        loss = (start * torch.from_numpy(theirs)).sum()
    filler(swapped)
    theirs[:] = 3
    loss.backward()
    assert start.grad is not None
    assert bool((start.grad == 3).all())


# Drives


def test_several_drives_share_the_bytes(tmp_path: Path, handle: nvmeio.AioHandle) -> None:
    module, x = made("mlp")
    x = x.repeat(64, 1)
    wanted = gradients(module, lambda: module(x).square().mean().backward())
    folders = [tmp_path / "a", tmp_path / "b"]
    with small(folders, handle, resident_bytes="16K") as swapped:
        found = gradients(
            module, lambda: loss_within(swapped, lambda: module(x).square().mean()).backward()
        )
        assert_same(found, wanted)
        sizes = [os.stat(f"/proc/self/fd/{fd_of(file)}").st_size for file in files_of(swapped)]
        assert min(sizes) > 0
        assert sum(sizes) == swapped.file_bytes
    assert [list(folder.iterdir()) for folder in folders] == [[], []]


def files_of(swapped: SwappedActivations) -> list[nvmeio.File]:
    return store_of(swapped).file.files


def fd_of(file: nvmeio.File) -> int:
    opened = file.acquire("test")
    try:
        return opened.any_fd()
    finally:
        opened.let_go("test")


def test_a_full_drive_is_told_by_forward(
    swapped: SwappedActivations, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = made("mlp")
    wanted = gradients(module, lambda: module(x).square().mean().backward())

    def full(fd: int, nbytes: int, path: str) -> None:
        raise nvmeio.TransferError(errno.ENOSPC, operation="fallocate", path=path, nbytes=nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(durable, "reserve", full)
        with pytest.raises(nvmeio.TransferError, match="or raise resident_bytes=8192") as told:
            loss_within(swapped, lambda: module(x).square().mean())
        assert told.value.errno == errno.ENOSPC
    del told
    found = gradients(
        module, lambda: loss_within(swapped, lambda: module(x).square().mean()).backward()
    )
    assert_same(found, wanted)


def test_a_drive_that_takes_nothing_is_told_by_forward(tmp_path: Path) -> None:
    module, x = made("mlp")
    wanted = gradients(module, lambda: module(x).square().mean().backward())
    fails = {"pwrite": errno.EIO, "pread": 0}
    engine = FakeEngine(fail=lambda kind, *_: fails[kind])
    with nvmeio.AioHandle(engine=engine) as handle, small(tmp_path, handle) as swapped:
        with pytest.raises(nvmeio.TransferError) as told:
            loss_within(swapped, lambda: module(x).square().mean())
        assert told.value.errno == errno.EIO
        del told
        fails["pwrite"] = 0
        found = gradients(
            module, lambda: loss_within(swapped, lambda: module(x).square().mean()).backward()
        )
        assert_same(found, wanted)


@pytest.mark.parametrize("of", ["room", "writes"])
def test_what_cannot_be_written_stays_in_memory_while_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    """Neither this pass nor the next one has lost anything.

    What the error's frames knew stayed until the collector came: the next pass found no room.
    """
    module, x = made("mlp")
    wanted = gradients(module, lambda: module(x).square().mean().backward())

    def full(fd: int, nbytes: int, path: str) -> None:
        raise nvmeio.TransferError(errno.ENOSPC, operation="fallocate", path=path, nbytes=nbytes)

    tried: list[str] = []

    def fail(kind: str, *_: object) -> int:
        tried.append(kind)
        return errno.EIO

    if of == "room":
        monkeypatch.setattr(durable, "reserve", full)
    with (
        nvmeio.AioHandle(engine=FakeEngine(fail=fail)) as handle,
        small(tmp_path, handle, resident_bytes=32 * x.nbytes) as swapped,
        contextlib.ExitStack() as collecting,
    ):
        gc.disable()
        collecting.callback(gc.enable)
        for _ in range(2):
            loss = loss_within(swapped, lambda: module(x).square().mean())
            assert swapped.in_memory_bytes > 8 * x.nbytes  # so some of it should have gone
            spin_until(lambda: not store_of(swapped).writing)
            if of == "writes":
                assert "pwrite" in tried
            assert_same(gradients(module, loss.backward), wanted)
            assert swapped.bytes_written == 0


def test_what_cannot_be_read_is_told_by_backward(tmp_path: Path) -> None:
    module, x = made("mlp")
    engine = FakeEngine(fail=lambda kind, *_: errno.EIO if kind == "pread" else 0)
    with nvmeio.AioHandle(engine=engine) as handle, small(tmp_path, handle) as swapped:
        loss = loss_within(swapped, lambda: module(x).square().mean())
        spin_until(lambda: swapped.on_drive_bytes > 0)
        with pytest.raises(nvmeio.TransferError) as told:
            loss.backward()
        assert told.value.errno == errno.EIO
        assert next(module.parameters()).grad is None


@pytest.mark.parametrize("checksum", [True, False])
def test_bits_that_flip_are_told_by_backward(
    tmp_path: Path, handle: nvmeio.AioHandle, checksum: bool
) -> None:
    module, x = made("mlp")
    wanted = gradients(module, lambda: module(x).square().mean().backward())
    with small(tmp_path, handle, checksum=checksum) as swapped:
        loss = loss_within(swapped, lambda: module(x).square().mean())
        spin_until(lambda: swapped.on_drive_bytes > 0)
        spin_until(lambda: not store_of(swapped).writing)
        for file in files_of(swapped):
            opened = file.acquire("test", True)
            try:
                os.pwrite(opened.buffered_fd(), b"\x01" * 65536, 0)
                os.fsync(opened.buffered_fd())
            finally:
                opened.let_go("test")
        if checksum:
            with pytest.raises(nvmeio.IntegrityError, match="saved activations are not what"):
                loss.backward()
        else:  # so it was these bytes that backward took
            assert any(
                not torch.equal(each, right)
                for each, right in zip(gradients(module, loss.backward), wanted, strict=True)
            )


# Ends


def test_what_is_closed_says_so(swapped: SwappedActivations) -> None:
    module, x = made("mlp")
    loss = loss_within(swapped, lambda: module(x).square().mean())
    swapped.close()
    swapped.close()
    with pytest.raises(nvmeio.ClosedError, match="swapped activations are closed"):
        loss.backward()
    with pytest.raises(nvmeio.ClosedError), swapped.saving():
        pass
    assert "closed" in repr(swapped)


def test_it_lives_as_long_as_its_graphs(tmp_path: Path, handle: nvmeio.AioHandle) -> None:
    module, x = made("mlp")
    wanted = gradients(module, lambda: module(x).square().mean().backward())

    def backward() -> None:
        loss = loss_within(small(tmp_path, handle), lambda: module(x).square().mean())
        loss.backward()

    assert_same(gradients(module, backward), wanted)
    spin_until_collected(
        lambda: not any(t.name == "nvmeio-activations" for t in threading.enumerate())
    )


def test_a_forward_that_raises_leaves_nothing(swapped: SwappedActivations) -> None:
    module, x = made("mlp")
    wanted = gradients(module, lambda: module(x).square().mean().backward())

    def broken() -> torch.Tensor:
        module(x)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loss_within(swapped, broken)
    found = gradients(
        module, lambda: loss_within(swapped, lambda: module(x).square().mean()).backward()
    )
    assert_same(found, wanted)
    spin_until_collected(lambda: swapped.on_drive_bytes + swapped.in_memory_bytes == 0)


def test_a_program_may_end_in_the_middle_and_a_child_is_refused(tmp_path: Path) -> None:
    done = run_python(
        f"""
        import os, torch, nvmeio, warnings
        from nvmeio.offload import SwappedActivations

        warnings.simplefilter("ignore")  # of a fork beside threads

        torch.set_num_threads(1)
        activations = SwappedActivations(
            swap_dir={str(tmp_path)!r}, resident_bytes=8192, min_bytes=1024)
        module = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(6)))
        with activations.saving():
            loss = module(torch.randn(64, 32)).square().mean()
        child = os.fork()
        if not child:
            try:
                loss.backward()
            except nvmeio.ClosedError as told:
                os._exit(7 if "forked" in str(told) else 8)
            os._exit(9)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), activations.on_drive_bytes > 0)
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "7 True\n", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"resident_bytes": 100}, "resident_bytes must be 8192 or more"),
        ({"resident_bytes": "much"}, "is not a size"),
        ({"device_bytes": 100}, "device_bytes must be 8192 or more"),
        ({"min_bytes": 0}, "min_bytes must be 1 or more"),
        ({"checksum": 3}, "checksum must be true or false"),
        ({"handle": 3}, "handle must be an nvmeio.AioHandle"),
        ({"swap_dir": []}, "swap_dir is empty"),
    ],
)
def test_arguments_that_cannot_be_are_refused(
    tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        SwappedActivations(**{"swap_dir": tmp_path, **options})


def test_a_directory_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        SwappedActivations(swap_dir=tmp_path / "no" / "where")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        SwappedActivations(swap_dir=tmp_path / "file")
