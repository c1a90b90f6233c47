"""SwappedModule by GPUDirect Storage: the drive and the device, and no host memory between.

The device is `fake_accelerator`'s, and cuFile a library that reads files into its memory at once,
whatever its streams have still to do there: who does not wait finds other numbers.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_accelerator import EVERY_PACE, Accelerator, Pace, accelerator
from gds._support import ON_NVME, FakeCuFile, compiled, fake_cufile
from inside import held_of, window_in_use
from support import spin_until
from test_module_on_device import (
    LARGEST,
    WIDTH,
    assert_equal,
    device_in_use_bytes,
    in_memory,
    losses_of,
    model,
    swapped,
)
from test_training_on_device import train

import nvmeio
from nvmeio._residency.reader import Fill
from nvmeio.engines.cufile import library
from nvmeio.offload import SwappedModule, SwappedOptimizer, offload
from nvmeio.offload._module import param_store as direct_module
from nvmeio.offload._module import unit_memory


@pytest.fixture(scope="module")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled("fake_cufile.c", tmp_path_factory.mktemp("fakes"))


@pytest.fixture
def cufile(
    fake_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeCuFile]:
    """A libcufile that reaches drives without host memory; others are for it to become."""
    with fake_cufile(fake_library, tmp_path, monkeypatch) as made:
        made.dstatus = made.fflags = ON_NVME
        yield made


@contextlib.contextmanager
def device(
    patch: pytest.MonkeyPatch, compute: Pace = Pace.LAZY, copies: Pace = Pace.LAZY
) -> Iterator[Accelerator]:
    """An accelerator whose memory cuFile reaches."""
    with patch.context() as mine, accelerator(mine, compute, copies) as cuda:
        yield cuda


@pytest.fixture(params=EVERY_PACE, ids=lambda pair: "-".join(p.name.lower() for p in pair))
def cuda(
    request: Any, cufile: FakeCuFile, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Accelerator]:
    """Compute at one pace, copies at another."""
    with device(monkeypatch, *request.param) as made:
        yield made


@pytest.fixture
def late(cufile: FakeCuFile, monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    """Computes as late as it may, and copies at once."""
    with device(monkeypatch, Pace.LAZY, Pace.EAGER) as made:
        yield made


@pytest.fixture
def lazy(cufile: FakeCuFile, monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    with device(monkeypatch) as made:
        yield made


@pytest.fixture
def places(tmp_path: Path) -> Path:
    made = tmp_path / "swap"
    made.mkdir()
    return made


@contextlib.contextmanager
def direct(made: Any, folder: Any, **options: Any) -> Iterator[SwappedModule]:
    with (
        nvmeio.GdsHandle(task_bytes=16384, intra_op_parallelism=2) as handle,
        swapped(made, folder, handle=handle, **options) as module,
    ):
        yield module


def test_losses_and_gradients_equal_those_in_memory_and_nothing_is_copied(
    cuda: Accelerator, cufile: FakeCuFile, places: Path
) -> None:
    losses, gradients = in_memory()
    made = model()
    with direct(made, places) as module:
        begun = cufile.calls
        found = losses_of(module, cuda.tensor)
        assert_equal(cuda, found, losses)
        assert_equal(cuda, [p.grad for p in made.parameters()], gradients)
        assert module.direct
        assert cuda.copies == []
        assert module.resident_bytes == window_in_use(module) == 0
        assert device_in_use_bytes(module) <= module.device_bytes == 2 * LARGEST
        read = sum(size for _, size, _, _ in cufile.noted[begun:])
        assert 2 * 6 * LARGEST < read <= module.bytes_read  # the last may be on their way


def test_a_read_that_does_not_wait_for_computing_shows(
    cufile: FakeCuFile, places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the other tests here rest on."""
    losses, _ = in_memory()

    def hasty(reads: Any, after: Any = None) -> Fill:
        return Fill(reads)

    with device(monkeypatch) as cuda:
        monkeypatch.setattr(unit_memory, "Fill", hasty)
        monkeypatch.setattr(Fill, "on_device", True, raising=False)
        with direct(model(), places) as module:
            found = losses_of(module, cuda.tensor)
            assert not all(
                torch.equal(cuda.value(mine), theirs)
                for mine, theirs in zip(found, losses, strict=True)
            )
        told = cuda.forgive()
        assert told and all("write by cuFile" in each for each in told)


def test_compat_mode_takes_the_way_through_host_memory(
    lazy: Accelerator, cufile: FakeCuFile, places: Path
) -> None:
    losses, _ = in_memory()
    cufile.dstatus = 0
    with direct(model(), places) as module:
        assert not module.direct
        assert_equal(lazy, losses_of(module, lazy.tensor), losses)
        assert module.resident_bytes == 3 * LARGEST
        assert cufile.calls == 0
        assert lazy.copies


@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("masters", [False, True], ids=["fp32", "bf16"])
def test_training_equals_that_in_memory(
    masters: bool, where: str, cufile: FakeCuFile, places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step writes what the next pass reads: nothing stale on either way."""
    dtype = torch.bfloat16 if masters else torch.float32
    options: dict[str, Any] = {
        "master_dtype": torch.float32 if masters else None,
        "gradients": "disk",
        "subgroup_bytes": 40_000,  # parameters begin and end anywhere
        "durable": False,
        "lr": 1e-2,
    }
    theirs = model(3, dtype)
    (places / "theirs").mkdir()
    with SwappedOptimizer(
        torch.optim.AdamW, theirs.parameters(), swap_dir=places / "theirs", **options
    ) as reference:
        wanted = train(theirs, reference, lambda x: x, 2, False)
    ours = model(3, dtype)
    drives = [places / "0", places / "1"]
    for each in drives:
        each.mkdir()
    with (
        device(monkeypatch, Pace.LAZY, Pace.EAGER) as cuda,
        direct(ours, drives) as module,
        SwappedOptimizer(
            torch.optim.AdamW, module.parameters(), swap_dir=drives, device=where, **options
        ) as optimizer,
    ):
        found = train(module, optimizer, cuda.tensor, 2, False)
        for mine, other in zip(found, wanted, strict=True):
            assert torch.equal(cuda.value(mine), other)
        # Where they lie now neighbours are others', and a part is many transfers.
        part = ours[0].parameters()
        with pytest.raises(KeyError), module.gather(*part), torch.no_grad():
            raise KeyError
        with module.gather(*ours[0].parameters()), torch.no_grad():
            for p, other in zip(ours[0].parameters(), theirs[0].parameters(), strict=True):
                p.mul_(2)
                other.mul_(2)
        for evicted in (False, True):
            if evicted:
                module.evict()
            x = torch.randn(3, WIDTH).to(dtype)
            assert torch.equal(cuda.value(module(cuda.tensor(x))), theirs(x))
        for name, tensor in module.state_dict().items():
            assert torch.equal(cuda.value(tensor), theirs.state_dict()[name]), name


def test_parameters_are_changed_within_gather_loaded_and_saved(
    late: Accelerator, places: Path
) -> None:
    ours, theirs = model(), model()
    with torch.no_grad():
        theirs[2].up.weight.mul_(2)
    losses = losses_of(theirs, lambda x: x)
    with direct(ours, places, device_bytes=8 * LARGEST) as module:
        losses_of(module, late.tensor, passes=1)
        weight = ours[2].up.weight
        with pytest.raises(KeyError), module.gather(weight), torch.no_grad():
            weight.zero_()
            raise KeyError
        with module.gather(weight), torch.no_grad():
            weight.mul_(2)
        for evicted in (False, True):
            if evicted:
                module.evict()
            assert_equal(late, losses_of(module, late.tensor), losses)
        x = torch.randn(3, WIDTH)
        before, asked = theirs(x).detach(), module(late.tensor(x)).detach()
        with torch.no_grad():
            for p in theirs.parameters():
                p.mul_(0.5)
        wanted = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
        module.load_state_dict(wanted)
        assert_equal(late, [asked], [before])
        assert_equal(late, losses_of(module, late.tensor), losses_of(theirs, lambda x: x))
        found = module.state_dict()
        assert all(torch.equal(late.value(found[n]), t) for n, t in wanted.items())


def test_a_gather_that_raises_while_a_part_computes_has_not_happened(
    late: Accelerator, places: Path
) -> None:
    losses, _ = in_memory()
    ours = model()
    once: list[None] = []

    def gathers(*_: Any) -> None:
        if not once:
            once.append(None)
            with contextlib.suppress(KeyError), module.gather(ours[2].up.weight), torch.no_grad():
                ours[2].up.weight.zero_()
                raise KeyError

    with direct(ours, places) as module:
        ours[2].register_forward_pre_hook(gathers)
        assert_equal(late, losses_of(module, late.tensor), losses)
        assert once


def test_a_read_that_fails_is_told_and_made_again(
    late: Accelerator, cufile: FakeCuFile, places: Path
) -> None:
    losses, _ = in_memory()
    ours = model()
    with direct(ours, places) as module:
        losses_of(module, late.tensor, passes=1)
        module.evict()
        cufile.result, cufile.result_from = -5044, 3 * LARGEST
        with pytest.raises(nvmeio.TransferError) as failed:
            losses_of(module, late.tensor)
        assert failed.value.errno == errno.EIO
        cufile.result = 0
        for p in ours.parameters():
            p.grad = None
        assert held_of(module) == []
        assert_equal(late, losses_of(module, late.tensor), losses)


def test_an_exception_that_is_kept_keeps_no_room_of_the_window(
    lazy: Accelerator, places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, _ = in_memory()

    def fail(*_: Any) -> Any:
        raise OSError(errno.EMFILE, "no descriptors")

    with direct(model(), places, device_bytes=2 * LARGEST) as module:
        with monkeypatch.context() as patch:
            patch.setattr(direct_module.OrderedReads, "async_pread", fail)
            with pytest.raises(OSError, match="no descriptors") as failed:
                losses_of(module, lazy.tensor)
        assert_equal(lazy, losses_of(module, lazy.tensor), losses)
        assert failed.value.__traceback__ is not None


def test_a_step_of_training_registers_nothing_and_reads_into_registered_memory(
    lazy: Accelerator, cufile: FakeCuFile, places: Path
) -> None:
    """No memory was registered, so that cuFile took all of it through memory of its own."""
    ours = model()
    with (
        direct(ours, places) as module,
        SwappedOptimizer(
            torch.optim.AdamW, module.parameters(), swap_dir=places, durable=False
        ) as optimizer,
    ):

        def iterate() -> None:
            for _ in losses_of(module, lazy.tensor, passes=1):
                optimizer.step()
                optimizer.zero_grad()

        iterate()
        before = cufile.calls
        for _ in range(3):
            iterate()
        with module.gather(ours[2].up.weight), torch.no_grad():  # a write
            ours[2].up.weight.mul_(2)
        module.load_state_dict({name: t.clone() for name, t in module.state_dict().items()})
        assert cufile.calls - before > 3 * 6
        assert (cufile.registrations, cufile.memories, cufile.bounced) == (1, 1, 0)
    assert cufile.memories == 0


def test_units_of_many_sizes_find_room_among_registered_memory(
    lazy: Accelerator, cufile: FakeCuFile, places: Path
) -> None:
    def layers() -> Any:
        torch.manual_seed(0)
        widths = (32, 8, 200, 16, 120, 8, 64, 40, 1, 32)
        return torch.nn.Sequential(*(torch.nn.Linear(*pair) for pair in pairwise(widths)))

    wanted, ours = layers(), layers()
    losses = losses_of(wanted, lambda x: x, passes=5)
    with direct(ours, places, device_bytes=3 * LARGEST, stage_bytes=None) as module:
        assert_equal(lazy, losses_of(module, lazy.tensor, passes=5), losses)
        assert device_in_use_bytes(module) <= 3 * LARGEST
    assert (cufile.registrations, cufile.bounced) == (1, 0)


def test_memory_that_a_tensor_keeps_after_close_is_not_given_away(
    late: Accelerator, cufile: FakeCuFile, places: Path
) -> None:
    ours = model()
    weight = ours[2].up.weight
    wanted = weight.detach().clone()
    with direct(ours, places) as module:
        losses_of(module, late.tensor)
        with module.gather(weight):
            kept = weight.detach()
        before = late.in_use_bytes
    assert cufile.memories == 0
    late.take_back(waits=True)
    assert late.in_use_bytes > before - LARGEST
    assert torch.equal(late.value(kept), wanted)
    del kept
    late.take_back(waits=True)
    assert late.in_use_bytes < before - LARGEST


def test_a_device_that_has_less_than_the_window_is_refused_at_once(
    lazy: Accelerator, places: Path
) -> None:
    losses, _ = in_memory()
    lazy.limit_bytes = lazy.in_use_bytes + LARGEST // 2
    with pytest.raises(MemoryError, match=r"device_bytes=.*lower it"), direct(model(), places):
        pass
    assert list(places.iterdir()) == []
    lazy.limit_bytes = 1 << 28
    with direct(model(), places) as module:
        assert_equal(lazy, losses_of(module, lazy.tensor), losses)


@pytest.mark.parametrize("why", ["cuFile refuses it", "torch maps it in pieces"])
def test_memory_that_cannot_be_registered_is_refused_by_name(
    why: str, lazy: Accelerator, cufile: FakeCuFile, places: Path
) -> None:
    """Libraries that registered such memory have reached its first piece, and the rest failed."""
    if why == "cuFile refuses it":
        cufile.memory_status, error = 5036, r"5036.*memory"
    else:
        lazy.is_expandable, error = True, r"expandable_segments.*AioHandle"
    with pytest.raises((nvmeio.CuFileError, ValueError), match=error), direct(model(), places):
        pass
    assert list(places.iterdir()) == []
    assert (cufile.registrations, cufile.memories, cufile.files) == (0, 0, 0)


def test_an_exception_in_a_hook_leaves_the_module_right(lazy: Accelerator, places: Path) -> None:
    losses, _ = in_memory()
    ours = model()

    def fail(*_: Any) -> None:
        raise KeyError("hook")

    with direct(ours, places) as module:
        hook = ours[3].register_forward_hook(fail)
        with pytest.raises(KeyError):
            losses_of(module, lazy.tensor)
        hook.remove()
        assert held_of(module) == []
        assert_equal(lazy, losses_of(module, lazy.tensor), losses)


def test_an_interrupt_while_the_drive_is_waited_for(
    lazy: Accelerator, cufile: FakeCuFile, places: Path
) -> None:
    losses, _ = in_memory()
    ours = model()

    def interrupt() -> None:
        spin_until(lambda: cufile.together > 0)
        os.kill(os.getpid(), signal.SIGINT)

    with direct(ours, places) as module:
        losses_of(module, lazy.tensor, passes=1)
        module.evict()
        cufile.hold = 1
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            losses_of(module, lazy.tensor)
        thread.join()
        cufile.hold = 0
        for p in ours.parameters():
            p.grad = None
        assert_equal(lazy, losses_of(module, lazy.tensor), losses)
        assert held_of(module) == []


def test_closing_in_the_middle_of_a_pass_leaves_nothing_under_way(
    lazy: Accelerator, cufile: FakeCuFile, places: Path
) -> None:
    ours = model()

    def close(*_: Any) -> None:
        module.close()

    with direct(ours, places) as module:
        ours[2].register_forward_hook(close)
        with pytest.raises(nvmeio.ClosedError):
            losses_of(module, lazy.tensor)
        called = cufile.calls
        with pytest.raises(nvmeio.ClosedError):
            module(lazy.tensor(torch.zeros(3, WIDTH)))
        assert cufile.calls == called
    assert list(places.iterdir()) == []


# DeepSpeed's words


def config(folder: Path, **param: Any) -> dict[str, Any]:
    there = {"device": "nvme", "nvme_path": str(folder)}
    return {
        "offload_optimizer": there,
        "offload_param": {**there, "buffer_count": 2, "buffer_size": LARGEST // 4, **param},
        "aio": {"use_gds": True, "thread_count": 2},
    }


def test_use_gds_means_what_it_says(lazy: Accelerator, cufile: FakeCuFile, places: Path) -> None:
    losses, _ = in_memory(passes=1)
    made = offload(model(), torch.optim.AdamW, config(places), module_device="cuda", lr=1e-2)
    try:
        assert isinstance(made.module, SwappedModule)
        assert made.module.direct
        assert made.module.device_bytes == 2 * LARGEST
        assert cufile.flags[library.ALLOW_COMPAT_MODE] is False
        assert_equal(lazy, losses_of(made.module, lazy.tensor, passes=1), losses)
        made.optimizer.step()
    finally:
        made.close()


def test_use_gds_is_refused_with_the_reason(
    lazy: Accelerator, cufile: FakeCuFile, places: Path
) -> None:
    def refused(match: str, given: dict[str, Any], where: str | None = "cuda") -> None:
        with pytest.raises(ValueError, match=match):
            offload(model(), torch.optim.AdamW, given, module_device=where, lr=1e-2)

    refused("computes on the CPU: give module_device", config(places), None)
    refused("module_device is for offload_param", {"aio": {"use_gds": True}})
    refused("its checksums are computed", {"aio": {"use_gds": True}}, None)
    cufile.dstatus = 0
    refused('cuFile is in mode "compat" here', config(places))
    cufile.open_status = 5011
    refused(r"aio: use_gds: .*cuFile", config(places))
    assert list(places.iterdir()) == []
