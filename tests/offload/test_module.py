"""SwappedModule equals its module in memory, within a window of memory that it does not leave."""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import pickle
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from _gpt import Block, Gpt, loss_of, train
from inside import held_of, window_in_use
from support import Turns, run_python
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import nvmeio
from nvmeio.offload import SwappedModule, SwappedOptimizer
from nvmeio.testing import FakeEngine

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


def gpt(reentrant: bool | None = None, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return Gpt(reentrant=reentrant).to(dtype)


def nbytes_of(made: Any) -> int:
    return sum(p.nbytes for p in made.parameters())


def swapped(made: Any, folder: Path, **options: Any) -> SwappedModule:
    """With a window of half of it."""
    whole = nbytes_of(made)
    return SwappedModule(
        made,
        swap_dir=folder,
        **{"resident_bytes": whole // 2 + 65536, "stage_bytes": whole // 4, **options},
    )


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
@pytest.mark.parametrize("masters", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("gradients", ["memory", "disk"])
def test_training_equals_that_in_memory(
    reentrant: bool | None, masters: bool, gradients: str, tmp_path: Path
) -> None:
    dtype = torch.bfloat16 if masters else torch.float32
    ours, theirs = gpt(reentrant, dtype), gpt(reentrant, dtype)
    (tmp_path / "theirs").mkdir()
    options: dict[str, Any] = {
        "master_dtype": torch.float32 if masters else None,
        "subgroup_bytes": 64 << 10,
        "durable": False,
        "lr": 1e-2,
    }
    with (
        swapped(ours, tmp_path) as module,
        SwappedOptimizer(
            torch.optim.AdamW,
            module.parameters(),
            swap_dir=tmp_path,
            gradients=gradients,
            **options,
        ) as optimizer,
        SwappedOptimizer(
            torch.optim.AdamW, theirs.parameters(), swap_dir=tmp_path / "theirs", **options
        ) as reference,
    ):
        assert train(module, optimizer, 6) == train(theirs, reference, 6)
        found, wanted = module.state_dict(), theirs.state_dict()
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(found[name], tensor), name
        assert window_in_use(module) <= module.resident_bytes


def test_gradients_and_outputs_equal_those_in_memory(tmp_path: Path) -> None:
    """Without an optimizer, and with one part of the graph used twice."""
    ours, theirs = gpt(), gpt()
    with swapped(ours, tmp_path) as module:
        for made in (module, theirs):
            (loss_of(made, 0) + loss_of(made, 1)).backward()
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), name
        with torch.no_grad():
            assert torch.equal(loss_of(module, 2), loss_of(theirs, 2))


def test_what_is_on_the_drive_is_not_in_memory(tmp_path: Path) -> None:
    ours = gpt()
    with swapped(ours, tmp_path) as module:
        module.evict()
        weight = ours.blocks[0].up.weight
        assert weight.shape == (128, 32)
        assert weight.untyped_storage().nbytes() == 4
        assert weight.isnan().all()
        with pytest.raises(RuntimeError):  # torch's: its elements share their memory
            weight.data.add_(1)


def test_each_parameter_is_read_once_a_pass(tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(12)))
    whole = nbytes_of(made)
    one = whole // 12
    with SwappedModule(
        made, swap_dir=tmp_path, resident_bytes=4 * 24576, stage_bytes=one
    ) as module:
        x = torch.randn(2, 64)
        module(x).sum().backward()
        start = module.bytes_read
        module(x).sum().backward()
        read = module.bytes_read - start
        window = module.resident_bytes
        pages = 12 * 20480
        # Both ways, less what the window still has when the direction turns.
        assert 2 * pages - 2 * window <= read <= 2 * pages


def test_a_window_for_everything_reads_everything_once(tmp_path: Path) -> None:
    ours = gpt()
    with swapped(ours, tmp_path, resident_bytes=2 * nbytes_of(ours) + (1 << 20)) as module:
        for step in range(3):
            loss_of(module, step).backward()
        assert module.bytes_read <= 1.2 * nbytes_of(ours)


def test_parameters_are_changed_within_gather(tmp_path: Path) -> None:
    ours, theirs = gpt(), gpt()
    with swapped(ours, tmp_path) as module:
        weight, tied = ours.blocks[2].up.weight, ours.head.weight
        with module.gather(weight, tied), torch.no_grad():
            weight.mul_(2)
            tied.add_(1)
        module.evict()
        with torch.no_grad():
            theirs.blocks[2].up.weight.mul_(2)
            theirs.head.weight.add_(1)
        assert torch.equal(loss_of(module, 0), loss_of(theirs, 0))
        with pytest.raises(MemoryError, match="too small"), module.gather():
            pass
        assert torch.equal(loss_of(module, 1), loss_of(theirs, 1))


def test_a_gather_that_raised_has_been_undone_when_its_block_is_over(tmp_path: Path) -> None:
    """In a part that is held, which computes next and asks nobody for its values again."""
    ours, theirs = gpt(), gpt()
    weight = ours.blocks[2].up.weight
    seen: list[torch.Tensor] = []

    def gathers(*_: Any) -> None:
        for _number in range(20):
            with contextlib.suppress(KeyError), module.gather(weight), torch.no_grad():
                weight.zero_()
                raise KeyError
            seen.append(weight.detach().clone())

    with swapped(ours, tmp_path) as module:
        ours.blocks[2].up.register_forward_pre_hook(gathers)
        loss = loss_of(module, 0)
        assert all(torch.equal(each, theirs.blocks[2].up.weight) for each in seen)
        assert torch.equal(loss, loss_of(theirs, 0))


def test_a_drive_that_failed_and_is_well_again_is_told_of_once(tmp_path: Path) -> None:
    """What was read ahead, and failed as well, is read again."""
    ours, theirs = gpt(), gpt()
    fails = {"pread": 0}
    with (
        nvmeio.AioHandle(engine=FakeEngine(fail=lambda kind, *_: fails.get(kind, 0))) as handle,
        swapped(ours, tmp_path, handle=handle) as module,
    ):
        loss_of(module, 0)
        module.evict()
        fails["pread"] = errno.EIO
        with pytest.raises(nvmeio.TransferError):
            loss_of(module, 0)
        fails["pread"] = 0
        assert torch.equal(loss_of(module, 0), loss_of(theirs, 0))


class _Factors(torch.nn.Module):
    def __init__(self, *lengths: int) -> None:
        super().__init__()
        ones = (torch.nn.Parameter(torch.ones(length)) for length in lengths)
        self.factors = torch.nn.ParameterList(ones)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for factor in self.factors:
            x = x * factor.sum()
        return x


def test_what_is_gathered_is_written_beside_the_parameters_of_others(tmp_path: Path) -> None:
    """Between two parameters of one part the optimizer's file has one of another part.

    All three are in one page, so that the first two come by one read.
    """
    first, second = _Factors(25, 1 << 15), _Factors(1)
    both = torch.nn.Sequential(first, second)
    small, large, other = first.factors[0], first.factors[1], second.factors[0]
    with (
        SwappedModule(
            both, swap_dir=tmp_path, resident_bytes=1 << 20, stage_bytes=nbytes_of(first)
        ) as module,
        SwappedOptimizer(
            torch.optim.SGD, [small, other, large], swap_dir=tmp_path, lr=0.0
        ) as optimizer,
    ):
        module(torch.ones(2)).sum().backward()
        optimizer.step()
        with module.gather(small):
            pass  # it is in the window from here on
        with module.gather(other), torch.no_grad():
            other.fill_(5)
        with module.gather(small), torch.no_grad():
            small.fill_(2)
        found = module.state_dict()
        assert found["1.factors.0"].tolist() == [5]
        assert found["0.factors.0"].tolist() == [2] * 25
        assert found["0.factors.1"].tolist() == [1] * len(large)


@pytest.mark.parametrize("gradients", ["memory", "disk"])
def test_a_step_within_gather_is_refused(gradients: str, tmp_path: Path) -> None:
    """The end of the block would write the values of before over those of the step."""
    ours, theirs = gpt(), gpt()
    with (
        swapped(ours, tmp_path) as module,
        SwappedOptimizer(
            torch.optim.AdamW,
            module.parameters(),
            swap_dir=tmp_path,
            gradients=gradients,
            durable=False,
        ) as optimizer,
    ):
        plain = torch.optim.AdamW(theirs.parameters())
        loss_of(module, 0).backward()
        loss_of(theirs, 0).backward()
        state = optimizer.state_dict()
        with module.gather(ours.head.weight):
            with pytest.raises(RuntimeError, match="outside of the block"):
                optimizer.step()
            with pytest.raises(RuntimeError, match="outside of the block"):
                optimizer.load_state_dict(state)
        optimizer.step()
        plain.step()
        assert torch.equal(loss_of(module, 1), loss_of(theirs, 1))


def test_state_dicts_go_both_ways(tmp_path: Path) -> None:
    ours, theirs = gpt(), gpt()
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(0.01)
    with swapped(ours, tmp_path) as module:
        told = module.load_state_dict(theirs.state_dict())
        assert not told.missing_keys
        assert torch.equal(loss_of(module, 0), loss_of(theirs, 0))
        plain = gpt()
        plain.load_state_dict(module.state_dict())
        assert torch.equal(loss_of(plain, 1), loss_of(theirs, 1))
        short = dict(list(theirs.state_dict().items())[:3])
        with pytest.raises(RuntimeError, match="missing"):
            module.load_state_dict(short)
        with pytest.raises(ValueError, match="shape"):
            module.load_state_dict({"norm.weight": torch.zeros(3)}, strict=False)
        with pytest.raises(ValueError, match="assign"):
            module.load_state_dict(theirs.state_dict(), assign=True)


def test_the_module_within_answers_from_the_drive(tmp_path: Path) -> None:
    """Its own state_dict was NaN, a copy of it computed with the original's parameters."""
    ours, theirs = gpt(), gpt()
    wanted = theirs.state_dict()
    with swapped(ours, tmp_path, resident_bytes=2 * nbytes_of(theirs)) as module:
        module.evict()
        found = ours.state_dict()
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        found = get_model_state_dict(ours)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        with pytest.raises(AttributeError, match=r"ask for module\.\w+"):
            get_model_state_dict(module)
        twice = {name: value * 2 for name, value in wanted.items()}
        for refused in (
            lambda: ours.load_state_dict(twice),
            lambda: ours.half(),
            lambda: ours.blocks[0].to(torch.float64),
            lambda: copy.deepcopy(ours),
            lambda: copy.deepcopy(next(ours.parameters())),
            lambda: torch.save(ours, tmp_path / "whole.pt"),
            lambda: ForkingPickler.dumps(list(ours.parameters())),  # of torch.multiprocessing
        ):
            with pytest.raises(TypeError, match="SwappedModule"):
                refused()
        assert all(torch.equal(module.state_dict()[name], wanted[name]) for name in wanted)
        with module.gather():
            with pytest.raises(TypeError, match="assign"):
                ours.load_state_dict(twice, assign=True)
            ours.load_state_dict(twice)
            assert all(torch.equal(ours.state_dict()[name], twice[name]) for name in wanted)
        module.evict()
        assert all(torch.equal(ours.state_dict()[name], twice[name]) for name in wanted)
    for refused in (ours.state_dict, lambda: copy.deepcopy(ours)):
        with pytest.raises(nvmeio.ClosedError, match="no values"):
            refused()
    ours.to_empty(device="cpu").load_state_dict(twice)
    torch.save(dict(ours.named_parameters()), tmp_path / "parameters.pt")
    loaded = torch.load(tmp_path / "parameters.pt")  # with nothing of nvmeio's in it
    assert all(torch.equal(loaded[name], each) for name, each in ours.named_parameters())
    assert torch.equal(copy.deepcopy(ours).state_dict()["norm.weight"], twice["norm.weight"])


def test_parameters_of_one_element_that_are_gone_are_known(tmp_path: Path) -> None:
    """Strides do not tell them, so their NaN was saved and sent, and swapped again."""
    ours = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.PReLU())
    ours.register_parameter("scale", torch.nn.Parameter(torch.tensor(2.0)))
    count = torch.nn.Parameter(torch.tensor([3]), requires_grad=False)
    ours.register_parameter("count", count)
    SwappedModule(ours, swap_dir=tmp_path, resident_bytes="1MiB").close()
    for refused in (
        ours[0].state_dict,
        ours[1].state_dict,
        lambda: pickle.dumps(ours[1]),
        lambda: ForkingPickler.dumps(ours.scale),
        lambda: copy.deepcopy(count),
    ):
        with pytest.raises(nvmeio.ClosedError, match="no values"):
            refused()
    with pytest.raises(ValueError, match="no values"):
        SwappedModule(ours[1], swap_dir=tmp_path, resident_bytes="1MiB")
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.fill_(4)
    assert all(bool((value == 4).all()) for value in ours.state_dict().values())


@pytest.mark.parametrize("masters", [False, True])
def test_loaded_weights_reach_the_optimizer(masters: bool, tmp_path: Path) -> None:
    dtype = torch.bfloat16 if masters else torch.float32
    ours, other = gpt(dtype=dtype), gpt(dtype=dtype)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.25)
    (tmp_path / "theirs").mkdir()
    options: dict[str, Any] = {"master_dtype": torch.float32 if masters else None, "lr": 1e-2}
    with (
        swapped(ours, tmp_path) as module,
        SwappedOptimizer(
            torch.optim.Adam, module.parameters(), swap_dir=tmp_path, **options
        ) as optimizer,
        SwappedOptimizer(
            torch.optim.Adam, other.parameters(), swap_dir=tmp_path / "theirs", **options
        ) as reference,
    ):
        module.load_state_dict(other.state_dict())
        optimizer.reload_weights()
        assert train(module, optimizer, 3) == train(other, reference, 3)


def test_a_module_is_made_on_the_drive(tmp_path: Path) -> None:
    """From the meta device, part by part, with the values that it would have had in memory."""

    def make() -> Any:
        return torch.nn.Sequential(
            torch.nn.Linear(64, 96),
            torch.nn.GELU(),
            torch.nn.Linear(96, 64),
            torch.nn.LayerNorm(64),
        )

    torch.manual_seed(3)
    theirs = make()
    with torch.device("meta"):
        ours = make()
    torch.manual_seed(3)
    with SwappedModule(
        ours, swap_dir=tmp_path, resident_bytes=128 << 10, stage_bytes=28 << 10
    ) as module:
        for name, tensor in theirs.state_dict().items():
            assert torch.equal(module.state_dict()[name], tensor), name
    with torch.device("meta"):
        again = make()

    def ones(one: torch.nn.Module) -> None:
        for parameter in one.parameters(recurse=False):
            torch.nn.init.ones_(parameter)

    with SwappedModule(again, swap_dir=tmp_path, resident_bytes=128 << 10, init=ones) as module:
        assert all(bool((t == 1).all()) for t in module.state_dict().values())


def test_a_resumed_training_goes_on_with_its_parameters(tmp_path: Path) -> None:
    options: dict[str, Any] = {"swap_dir": tmp_path, "resume": True, "lr": 1e-2}
    first, second, theirs = gpt(), gpt(), gpt()
    with (
        swapped(first, tmp_path) as module,
        SwappedOptimizer(torch.optim.Adam, module.parameters(), **options) as optimizer,
    ):
        train(module, optimizer, 3)
    with (
        swapped(second, tmp_path) as module,
        SwappedOptimizer(torch.optim.Adam, module.parameters(), **options) as optimizer,
    ):
        assert optimizer.resumed
        losses = train(module, optimizer, 3, 3)
    reference = torch.optim.Adam(theirs.parameters(), lr=1e-2)
    train(theirs, reference, 3)
    assert losses == train(theirs, reference, 3, 3)


LIMITED = """
    import resource, sys, threading, torch, json, nvmeio
    sys.path.insert(0, {tests!r})
    torch.set_num_threads(1)
    threading.stack_size(1 << 20)  # stacks are addresses too, and there are more on a busy machine
    from nvmeio.offload import SwappedModule, SwappedOptimizer

    def make():
        return torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(24)))

    def train(module, optimizer):
        losses = []
        for step in range(2):
            x = torch.randn(2, 1024, generator=torch.Generator().manual_seed(step))
            loss = module(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def rss():
        with open("/proc/self/status") as file:
            return next(int(l.split()[1]) << 10 for l in file if l.startswith("RssAnon"))

    make()[0](torch.ones(1, 1024)).sum().backward()  # what torch itself takes
    warm = torch.nn.Parameter(torch.ones(8)); warm.grad = torch.ones(8)
    torch.optim.Adam([warm], fused=True).step()
    if {limited}:
        with torch.device("meta"):
            made = make()
        with open("/proc/self/statm") as file:
            mapped = int(file.read().split()[0]) * 4096
        # Anonymous and file mappings alike: whatever is more than this is refused by the kernel.
        resource.setrlimit(resource.RLIMIT_AS, (mapped + {limit}, mapped + {limit}))
        before = rss()
        torch.manual_seed(0)
        handle = nvmeio.AioHandle(queue_depth=8)  # whose ring is small then
        module = SwappedModule(
            made, swap_dir={folder!r}, resident_bytes=24 << 20, handle=handle)
        optimizer = SwappedOptimizer(torch.optim.Adam, module.parameters(), swap_dir={folder!r},
            gradients="disk", subgroup_bytes=4 << 20, fused=True, handle=handle)
        state = 16 * sum(p.numel() for p in module.parameters())
        assert state >= 4 * {limit}, state
        losses = train(module, optimizer)
        budget = module.resident_bytes + optimizer.plan.memory_bytes
        print(json.dumps([losses, rss() - before, budget]))
        optimizer.close(); module.close(); handle.close()
    else:
        torch.manual_seed(0)
        made = make()
        print(json.dumps([train(made, torch.optim.Adam(made.parameters(), fused=True)), 0, 0]))
"""


def test_a_model_of_four_times_the_memory_trains(tmp_path: Path) -> None:
    """100 MB of parameters and 400 MB of state, with gradients, in 96 MiB of address space."""

    results = []
    for limited in (True, False):
        done = run_python(
            LIMITED.format(
                tests=str(Path(__file__).parent),
                limited=limited,
                limit=96 << 20,
                folder=str(tmp_path),
            ),
            MALLOC_ARENA_MAX="1",
            MALLOC_MMAP_THRESHOLD_="65536",
        )
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout))
    (ours, grown, budget), (theirs, _, _) = results
    assert ours == theirs
    assert grown <= budget * 1.05 + (8 << 20)  # and one gradient, activations, Python objects


# Bad input and faults


def test_modules_that_cannot_be_swapped(tmp_path: Path) -> None:
    ours = gpt()
    with swapped(ours, tmp_path), pytest.raises(ValueError, match="swapped by another"):
        swapped(ours, tmp_path)
    meta = torch.nn.BatchNorm1d(4, device="meta")
    with pytest.raises(ValueError, match="buffer running_mean"):
        SwappedModule(meta, swap_dir=tmp_path, resident_bytes=1 << 20)
    nobody = torch.nn.PReLU(device="meta")
    nobody.reset_parameters = None  # type: ignore[method-assign,assignment]
    with pytest.raises(TypeError, match="give init="):
        SwappedModule(nobody, swap_dir=tmp_path, resident_bytes=1 << 20)
    with pytest.raises(TypeError):
        SwappedModule(3, swap_dir=tmp_path, resident_bytes=1 << 20)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_two_modules_cannot_have_one_directory(tmp_path: Path) -> None:
    with swapped(gpt(), tmp_path), pytest.raises(nvmeio.TransferError) as told:
        swapped(gpt(), tmp_path)
    assert told.value.errno == errno.EBUSY


def test_a_read_that_fails_is_raised_and_may_be_tried_again(tmp_path: Path) -> None:
    failing = Turns()

    def fail(kind: str, offset: int, nbytes: int) -> int:
        return errno.EIO if kind == "pread" and failing.take() else 0

    ours, theirs = gpt(), gpt()
    with (
        nvmeio.AioHandle(engine=FakeEngine(fail=fail)) as handle,
        swapped(ours, tmp_path, handle=handle) as module,
    ):
        failing.left = 1
        with pytest.raises(nvmeio.TransferError):
            loss_of(module, 0)
        loss = loss_of(module, 0)
        assert torch.equal(loss, loss_of(theirs, 0))
        module.evict()
        failing.left = 1
        with pytest.raises(nvmeio.TransferError):
            loss.backward()


def test_an_error_in_forward_lets_the_parameters_go(tmp_path: Path) -> None:
    ours = gpt()
    with swapped(ours, tmp_path) as module:
        with pytest.raises(IndexError):
            module(torch.tensor([[10_000]]))
        assert held_of(module) == []
        loss_of(module, 0).backward()


def test_tensors_that_outlive_their_unit_keep_their_bytes(tmp_path: Path) -> None:
    """Nothing is ever read into memory that a tensor still looks at."""
    torch.manual_seed(0)
    made = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(12)))
    first = made[0].weight.detach().clone()
    with SwappedModule(
        made, swap_dir=tmp_path, resident_bytes=4 * 24576, stage_bytes=20480
    ) as module:
        with module.gather(made[0].weight):
            kept = made[0].weight.data
        for _ in range(3):
            module(torch.ones(1, 64)).sum().backward()
        assert torch.equal(kept, first)
        held = [kept]
        with pytest.raises(MemoryError, match="held by"):
            for layer in made:
                with module.gather(layer.weight):
                    held.append(layer.weight.data)
        held.clear()
        del kept
        module(torch.ones(1, 64))


def test_an_optimizer_that_is_closed_takes_the_parameters_along(tmp_path: Path) -> None:
    with swapped(gpt(), tmp_path) as module:
        with SwappedOptimizer(torch.optim.AdamW, module.parameters(), swap_dir=tmp_path):
            loss_of(module, 0).backward()
        module.evict()
        with pytest.raises(nvmeio.ClosedError, match="of a SwappedOptimizer that is closed"):
            loss_of(module, 0)
        with pytest.raises(nvmeio.ClosedError, match="of a SwappedOptimizer that is closed"):
            module.state_dict()
        with pytest.raises(nvmeio.ClosedError, match="of a SwappedOptimizer that is closed"):
            SwappedOptimizer(torch.optim.AdamW, module.parameters(), swap_dir=tmp_path)


def test_it_is_neither_copied_nor_pickled_and_closed_for_good(tmp_path: Path) -> None:
    module = swapped(gpt(), tmp_path)
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(module)
    with pytest.raises(TypeError, match="another place"):
        copy.deepcopy(module)
    module.close()
    module.close()
    assert module.closed
    with pytest.raises(nvmeio.ClosedError):
        loss_of(module, 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("how", ["trace", "export"])
def test_what_would_keep_its_parameters_is_refused(how: str, tmp_path: Path) -> None:
    """They were NaN in what it made, without a word."""
    x = torch.randn(2, 32)
    export: dict[str, Any] = {
        "trace": lambda module: torch.jit.trace(module, (x,)),
        "export": lambda module: torch.export.export(module, (x,)),
    }
    made = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    with SwappedModule(made, swap_dir=tmp_path, resident_bytes="1M") as module:
        with pytest.raises(RuntimeError, match="cannot be traced or exported"):
            export[how](module)
        module(x).sum().backward()


def test_blocks_come_whole(tmp_path: Path) -> None:
    """A module that reaches into its children must find their parameters there."""
    torch.manual_seed(0)
    ours, theirs = Block(32), Block(32)
    theirs.load_state_dict(ours.state_dict())
    with SwappedModule(
        ours, swap_dir=tmp_path, resident_bytes=128 << 10, stage_bytes=17 << 10
    ) as module:
        x = torch.randn(1, 3, 32)
        assert torch.equal(module(x), theirs(x))


def test_reading_ahead_leaves_the_room_of_what_is_wanted_now(tmp_path: Path) -> None:
    """A tied weight comes first and last, and with what is between it takes the whole window."""
    first, last = torch.nn.Embedding(300, 64), torch.nn.Linear(64, 300, bias=False)
    last.weight = first.weight
    between = [torch.nn.Linear(64, 2560, bias=False), torch.nn.Linear(2560, 64, bias=False)]
    with SwappedModule(
        torch.nn.Sequential(first, *between, last), swap_dir=tmp_path, resident_bytes=716 << 10
    ) as module:
        for _ in range(2):
            module(torch.arange(9)).sum().backward()


def test_a_module_that_was_made_for_inference_is_refused(tmp_path: Path) -> None:
    """Its first pass failed: "Inference tensors do not track version counter"."""
    with torch.inference_mode():
        made = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    match = r"0\.weight was made in torch.inference_mode\(\).*copy.deepcopy\(model\)"
    with pytest.raises(ValueError, match=match):
        SwappedModule(made, swap_dir=tmp_path, resident_bytes="1M")
    module = SwappedModule(copy.deepcopy(made), swap_dir=tmp_path, resident_bytes="1M")
    with torch.inference_mode():
        module.load_state_dict({name: torch.ones(p.shape) for name, p in made.named_parameters()})
    assert module(torch.ones(4)).tolist() == [21.0] * 4
    module(torch.ones(4)).sum().backward()
    module.close()


@pytest.mark.parametrize("inside", [False, True])
def test_a_module_without_memory_may_be_made_for_inference(inside: bool, tmp_path: Path) -> None:
    """Swapped in that mode, its parameters could not be used outside."""
    with torch.inference_mode(), torch.device("meta"):
        made = torch.nn.Linear(4, 4)
    with torch.inference_mode(inside):
        module = SwappedModule(made, swap_dir=tmp_path, resident_bytes="1M")
    module(torch.ones(4)).sum().backward()
    module.close()
