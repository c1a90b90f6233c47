"""SwappedModule on a device equals its module in memory, where what does not wait shows.

Each pass is asked of the device whole before anybody looks at its loss, so whatever the pace of its
streams, a wait that is missing changes the numbers (`fake_accelerator` says how).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_accelerator import DEVICE, EVERY_PACE, Accelerator, Pace, accelerator
from fake_cuda import STREAMS
from inside import held_of, store_of, window_in_use

import nvmeio
from nvmeio._memory import devices
from nvmeio._residency.on_device import DevicePool
from nvmeio.offload import SwappedModule

WIDTH = 32


class Part(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.relu(self.up(x)))


def model(parts: int = 6, dtype: torch.dtype = torch.float32) -> Any:
    """With a buffer, and one part that comes twice."""
    torch.manual_seed(0)
    made = torch.nn.Sequential(*(Part() for _ in range(parts)))
    made.append(made[1])
    made.register_buffer("seen", torch.zeros(()))
    return made.to(dtype)


LARGEST = 36864  # of its parts, in pages


def swapped(made: Any, folder: Path, **options: Any) -> SwappedModule:
    return SwappedModule(
        made,
        swap_dir=folder,
        **{
            "device": "cuda",
            "resident_bytes": 3 * LARGEST,
            "device_bytes": 2 * LARGEST,
            "stage_bytes": LARGEST,
            **options,
        },
    )


# Some parts at a time on the device, or all of them, which then stay there.
WINDOWS = pytest.mark.parametrize("parts", [2, 8], ids=["window", "all"])


def device_in_use_bytes(module: SwappedModule) -> int:
    """What units, and tensors that outlive them, take of the window on the device."""

    def count() -> int:
        store_of(module)._memory.on_device.take_back()
        return store_of(module)._memory.on_device.in_use_bytes

    return store_of(module)._owner.call(count)


def losses_of(
    made: Any, place: Callable[[torch.Tensor], torch.Tensor], passes: int = 2
) -> list[torch.Tensor]:
    """Each asked of the device, and backward behind it, before the next; nothing is looked at."""
    losses = []
    for number in range(passes):
        generator = torch.Generator().manual_seed(number)
        x = place(torch.randn(3, WIDTH, generator=generator))
        loss = made(x).square().mean()
        loss.backward()
        losses.append(loss.detach())
    return losses


def in_memory(passes: int = 2, **options: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    made = model(**options)
    losses = losses_of(made, lambda x: x, passes)
    return losses, [p.grad for p in made.parameters()]


def assert_equal(cuda: Accelerator, found: Any, wanted: Any) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        equal = torch.equal(cuda.value(mine), theirs)
        assert equal  # and no tensor in this line, which pytest would look into


@pytest.fixture(params=EVERY_PACE, ids=lambda pair: "-".join(p.name.lower() for p in pair))
def cuda(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    """Compute at one pace, copies at another."""
    with accelerator(monkeypatch, *request.param) as made:
        yield made


@pytest.fixture
def lazy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    with accelerator(monkeypatch) as made:
        yield made


@WINDOWS
def test_losses_and_gradients_equal_those_in_memory(
    cuda: Accelerator, parts: int, tmp_path: Path
) -> None:
    losses, gradients = in_memory()
    made = model()
    with swapped(made, tmp_path, device_bytes=parts * LARGEST) as module:
        found = losses_of(module, cuda.tensor)
        assert_equal(cuda, found, losses)
        assert_equal(cuda, [p.grad for p in made.parameters()], gradients)
        assert module.device == DEVICE
        assert window_in_use(module) <= module.resident_bytes == 3 * LARGEST
        assert device_in_use_bytes(module) <= module.device_bytes == parts * LARGEST
        assert cuda.has(made.seen)


@pytest.mark.parametrize(
    ("missing", "compute", "copies"),
    [
        ("compute does not wait for copies", Pace.EAGER, Pace.LAZY),
        ("copies do not wait for compute", Pace.LAZY, Pace.EAGER),
        ("memory is read into before it was copied on", Pace.LAZY, Pace.LAZY),
    ],
)
def test_a_missing_wait_shows(
    missing: str, compute: Pace, copies: Pace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What the other tests here rest on."""
    losses, _ = in_memory()

    def forgets(pool: DevicePool, memory: torch.Tensor, source: torch.Tensor) -> Any:
        beside = devices.Beside(pool.device, "parameters")
        beside.copy(memory, source)
        return beside.mark()

    with monkeypatch.context() as patch, accelerator(patch, compute, copies) as cuda:
        if missing == "compute does not wait for copies":
            patch.setattr(devices, "come_after", lambda stream, mark: None)
        elif missing == "copies do not wait for compute":
            patch.setattr(devices.Beside, "follow", lambda self, stream=None: None)
        else:
            patch.setattr(DevicePool, "upload", forgets)
        with swapped(model(), tmp_path) as module:
            found = losses_of(module, cuda.tensor)
            assert not all(
                torch.equal(cuda.value(mine), theirs)
                for mine, theirs in zip(found, losses, strict=True)
            )
        assert cuda.forgive()


def test_memory_of_the_device_is_out_of_the_cpu_s_reach(lazy: Accelerator) -> None:
    there = lazy.tensor(torch.ones(4))
    assert (there + there).sum().item() == 8
    assert not lazy.problems()
    ctypes.string_at(there.data_ptr(), 4)
    told = lazy.forgive()[0]
    assert "the CPU has touched" in told and Path(__file__).name in told
    assert not lazy.problems()


def test_what_both_windows_hold_is_copied_once(lazy: Accelerator, tmp_path: Path) -> None:
    with swapped(model(), tmp_path, resident_bytes=8 * LARGEST, device_bytes=8 * LARGEST) as module:
        losses_of(module, lazy.tensor, passes=3)
        assert len(lazy.copies) == 6
        assert module.bytes_read == 6 * LARGEST


def test_host_memory_saves_reads_and_the_device_s_saves_copies(
    lazy: Accelerator, tmp_path: Path
) -> None:
    with swapped(model(), tmp_path, resident_bytes=8 * LARGEST) as module:
        losses_of(module, lazy.tensor, passes=3)
        assert module.bytes_read == 6 * LARGEST
        assert 6 < len(lazy.copies) <= 6 * 6


@WINDOWS
def test_parameters_are_changed_within_gather(
    cuda: Accelerator, parts: int, tmp_path: Path
) -> None:
    ours, theirs = model(), model()
    with torch.no_grad():
        theirs[2].up.weight.mul_(2)
    losses = losses_of(theirs, lambda x: x)
    with swapped(ours, tmp_path, device_bytes=parts * LARGEST) as module:
        losses_of(module, cuda.tensor, passes=1)
        for p in ours.parameters():
            p.grad = None
        weight = ours[2].up.weight
        with module.gather(weight), torch.no_grad():
            weight.mul_(2)
        module.evict()
        assert_equal(cuda, losses_of(module, cuda.tensor), losses)
        assert_equal(
            cuda, [p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()]
        )


@WINDOWS
def test_a_gather_that_raises_has_not_happened(
    cuda: Accelerator, parts: int, tmp_path: Path
) -> None:
    losses, _ = in_memory()
    ours = model()
    with swapped(ours, tmp_path, device_bytes=parts * LARGEST) as module:
        with pytest.raises(KeyError), module.gather(ours[0].up.weight), torch.no_grad():
            ours[0].up.weight.zero_()
            raise KeyError
        assert_equal(cuda, losses_of(module, cuda.tensor), losses)


@WINDOWS
def test_a_state_is_loaded_and_saved(cuda: Accelerator, parts: int, tmp_path: Path) -> None:
    other = model()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.5)
    wanted = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    losses = losses_of(other, lambda x: x)
    with swapped(model(), tmp_path, device_bytes=parts * LARGEST) as module:
        losses_of(module, cuda.tensor, passes=1)
        for p in module.parameters():
            p.grad = None
        module.load_state_dict({n: cuda.tensor(t) for n, t in wanted.items()})
        assert_equal(cuda, losses_of(module, cuda.tensor), losses)
        found = module.state_dict()
        assert all(torch.equal(cuda.value(found[n]), t) for n, t in wanted.items())


def test_an_exception_in_a_hook_leaves_the_module_right(cuda: Accelerator, tmp_path: Path) -> None:
    losses, gradients = in_memory()
    ours = model()

    def fail(*_: Any) -> None:
        raise KeyError("hook")

    with swapped(ours, tmp_path) as module:
        for where in (3, 1):
            hook = ours[where].register_forward_hook(fail)
            with pytest.raises(KeyError):
                losses_of(module, cuda.tensor)
            hook.remove()
        assert held_of(module) == []
        assert_equal(cuda, losses_of(module, cuda.tensor), losses)
        assert_equal(cuda, [p.grad for p in ours.parameters()], gradients)


def test_a_copy_that_fails_is_told_and_made_again(cuda: Accelerator, tmp_path: Path) -> None:
    losses, _ = in_memory()

    def fail(number: int) -> None:
        if number == 3:
            cuda.before_begin = lambda number: None
            raise RuntimeError("CUDA error: the copy failed")

    cuda.before_begin = fail
    ours = model()
    with swapped(ours, tmp_path) as module:
        with pytest.raises(RuntimeError, match="the copy failed"):
            losses_of(module, cuda.tensor)
        for p in ours.parameters():
            p.grad = None
        assert_equal(cuda, losses_of(module, cuda.tensor), losses)


def test_a_device_that_is_full_is_told_and_used_when_it_is_not(
    lazy: Accelerator, tmp_path: Path
) -> None:
    losses, _ = in_memory()
    ours = model()
    with swapped(ours, tmp_path) as module:
        lazy.limit_bytes = lazy.in_use_bytes + LARGEST // 2
        with pytest.raises(MemoryError, match=r"lower device_bytes, or free other memory"):
            losses_of(module, lazy.tensor)
        lazy.limit_bytes = 1 << 28
        assert_equal(lazy, losses_of(module, lazy.tensor), losses)


def test_a_device_with_less_than_the_budget_gets_fewer_parts_ahead(
    lazy: Accelerator, tmp_path: Path
) -> None:
    ours, theirs = model(), model()
    x = torch.randn(3, WIDTH)
    with swapped(ours, tmp_path, device_bytes=64 * LARGEST) as module, torch.no_grad():
        lazy.limit_bytes = lazy.in_use_bytes + 2 * LARGEST + 30000  # which is no third part
        for _ in range(3):
            assert torch.equal(lazy.value(module(lazy.tensor(x))), theirs(x))


@pytest.mark.parametrize("masters", [False, True], ids=["fp32", "bf16"])
def test_modules_on_the_meta_device_are_made_part_by_part(
    masters: bool, lazy: Accelerator, tmp_path: Path
) -> None:
    dtype = torch.bfloat16 if masters else torch.float32
    with torch.device("meta"):
        made = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(4)))

    def init(module: Any) -> None:
        with torch.no_grad():
            module.weight.fill_(0.5)
            module.bias.fill_(1)

    with swapped(made, tmp_path, init=init) as module:
        x = torch.ones(2, WIDTH, dtype=dtype)
        theirs = torch.nn.Sequential(
            *(torch.nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(4))
        )
        for each in theirs:
            init(each)
        assert_equal(lazy, [module(lazy.tensor(x)).detach()], [theirs(x).detach()])


@WINDOWS
@pytest.mark.parametrize("two", [False, True], ids=["one stream computes", "two streams compute"])
def test_weights_in_use_are_not_given_to_a_stream_of_the_user(
    two: bool, parts: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch hands out 32 streams in turn, so a user has ours, and its memory.

    The window allocated on a side stream and recorded no other one. What was dropped was free for
    that stream at once, though kernels of the computing stream had not read it yet.
    """
    x, theirs = torch.randn(3, WIDTH), model()
    found, kept = [], []
    with accelerator(monkeypatch, Pace.LAZY, Pace.EAGER) as cuda:
        with swapped(model(), tmp_path, device_bytes=parts * LARGEST) as module, torch.no_grad():
            lengths = {unit.nbytes for unit in store_of(module).units}
            computing: list[Any] = [cuda.current_stream()]
            if two:
                computing.append(cuda.Stream(DEVICE))
                computing[1].pace = Pace.LAZY
            for stream in computing:
                with devices.on_stream(stream):
                    found.append(module(cuda.tensor(x)))
        for stream in [cuda.Stream(DEVICE) for _ in range(STREAMS)] * 4:
            with devices.on_stream(stream):
                kept += [devices.empty(nbytes, DEVICE).fill_(0x7F) for nbytes in lengths]
        assert_equal(cuda, found, [theirs(x)] * len(found))


def test_budgets_are_checked_for_each_level(lazy: Accelerator, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"device_bytes=8192 is too small: .* device_bytes=40960"):
        swapped(model(), tmp_path, device_bytes=8192, stage_bytes=LARGEST)
    with pytest.raises(ValueError, match=r"resident_bytes=8192 is too small"):
        swapped(model(), tmp_path, resident_bytes=8192, stage_bytes=LARGEST)
    with swapped(model(), tmp_path, device_bytes=None) as module:
        assert module.device_bytes == 3 * LARGEST
    with swapped(model(), tmp_path, device_bytes="128KiB") as module:
        assert module.device_bytes == 128 << 10


def test_impossible_devices_and_windows_are_refused(tmp_path: Path) -> None:
    made = model()
    with pytest.raises(ValueError, match=r"device_bytes is memory of a CUDA device"):
        SwappedModule(made, swap_dir=tmp_path, resident_bytes="1MiB", device_bytes="1MiB")
    with pytest.raises(ValueError, match=r"device must be the CPU or a CUDA device, not 'meta'"):
        SwappedModule(made, swap_dir=tmp_path, resident_bytes="1MiB", device="meta")
    if not torch.cuda.is_available():
        with pytest.raises(nvmeio.BackendUnavailableError, match=r"there is no such device"):
            SwappedModule(made, swap_dir=tmp_path, resident_bytes="1MiB", device="cuda")
    assert losses_of(made, lambda x: x)
