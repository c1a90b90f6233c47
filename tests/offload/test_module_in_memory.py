"""A swapped module that fits into its window: parts that stay are used without asking the owner."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _gpt import Gpt, loss_of, train
from interrupting import at_places
from support import PATIENCE_S, run_python, spin_until_collected, thread
from torch.profiler import profile

import nvmeio
from nvmeio.offload import SwappedModule, SwappedOptimizer
from nvmeio.testing import FakeEngine

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")

PART = 20480  # of a Linear of 64 x 64, in pages


def gpt(reentrant: bool | None = None) -> Any:
    torch.manual_seed(0)
    return Gpt(reentrant=reentrant)


def stack(count: int = 6) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(count)))


def in_memory(made: torch.nn.Module, folder: Path, **options: Any) -> SwappedModule:
    whole = sum(p.nbytes for p in made.parameters())
    options = {"resident_bytes": 2 * whole + (1 << 20), "stage_bytes": whole // 4, **options}
    return SwappedModule(made, swap_dir=folder, **options)


def gradients(made: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    made.zero_grad()
    made(x).square().sum().backward()
    return [p.grad.clone() for p in made.parameters() if p.grad is not None]


def assert_same(ours: torch.nn.Module, theirs: torch.nn.Module, seed: int = 1) -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed))
    for found, wanted in zip(gradients(ours, x), gradients(theirs, x), strict=True):
        assert found.equal(wanted)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[SwappedModule, torch.nn.Module]]:
    """A stack that was used, so that its parts stay; and its like in memory."""
    with in_memory(stack(), tmp_path, stage_bytes=PART) as module:
        theirs = stack()
        assert_same(module, theirs)
        yield module, theirs


def waits(work: Callable[[], object]) -> int:
    with profile() as found:
        work()
    return sum(event.name.startswith("nvmeio::wait") for event in found.events())


def test_parts_that_stay_wait_for_nobody(tmp_path: Path) -> None:
    ours, theirs = gpt(), gpt()
    with in_memory(ours, tmp_path) as module:
        assert waits(lambda: loss_of(module, 0).backward()) > 0
        assert waits(lambda: loss_of(module, 1).backward()) == 0
        for step in range(2):
            loss_of(theirs, step).backward()
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), name
        module.evict()
        assert ours.blocks[0].up.weight.isnan().all()
        assert waits(lambda: loss_of(module, 2)) > 0


def test_a_part_of_a_smaller_window_is_asked_for(tmp_path: Path) -> None:
    ours, theirs = stack(), stack()
    with in_memory(ours, tmp_path, stage_bytes=PART, resident_bytes=5 * PART) as module:
        for seed in range(3):
            assert_same(module, theirs, seed)
        assert waits(lambda: gradients(module, torch.ones(1, 64))) > 0


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
@pytest.mark.parametrize("masters", [False, True], ids=["fp32", "bf16"])
def test_the_values_of_a_step_are_used(
    reentrant: bool | None, masters: bool, tmp_path: Path
) -> None:
    """With passes between the steps, for parts to stay."""
    ours, theirs = gpt(reentrant), gpt(reentrant)
    options: dict[str, Any] = {"subgroup_bytes": 64 << 10, "durable": False, "lr": 1e-2}
    if masters:
        ours, theirs = ours.to(torch.bfloat16), theirs.to(torch.bfloat16)
        options["master_dtype"] = torch.float32
    with (
        in_memory(ours, tmp_path) as module,
        SwappedOptimizer(
            torch.optim.AdamW, module.parameters(), swap_dir=tmp_path / "ours", **options
        ) as optimizer,
        SwappedOptimizer(
            torch.optim.AdamW, theirs.parameters(), swap_dir=tmp_path / "theirs", **options
        ) as reference,
    ):
        for step in range(4):
            for _ in range(2):
                assert torch.equal(loss_of(module, step), loss_of(theirs, step))
            assert train(module, optimizer, 1, step) == train(theirs, reference, 1, step)


def test_values_of_gather_and_load_are_used(
    pair: tuple[SwappedModule, torch.nn.Module],
) -> None:
    module, theirs = pair
    inner: Any = module.module
    with module.gather(inner[2].weight), torch.no_grad():
        inner[2].weight.mul_(2)
        theirs[2].weight.mul_(2)  # type: ignore[index]
        assert torch.equal(module(torch.ones(1, 64)), theirs(torch.ones(1, 64)))
    assert_same(module, theirs)
    with contextlib.suppress(KeyError), module.gather(inner[3].weight), torch.no_grad():
        inner[3].weight.zero_()
        raise KeyError
    assert_same(module, theirs)
    state = {name: torch.randn_like(p) for name, p in theirs.named_parameters()}
    module.load_state_dict(state)
    theirs.load_state_dict(state)
    assert_same(module, theirs)
    module.evict()
    assert_same(module, theirs)


def test_a_step_between_forward_and_backward_is_refused(tmp_path: Path) -> None:
    ours = stack()
    with (
        in_memory(ours, tmp_path, stage_bytes=PART) as module,
        SwappedOptimizer(
            torch.optim.SGD, module.parameters(), swap_dir=tmp_path, lr=0.1, durable=False
        ) as optimizer,
    ):
        gradients(module, torch.ones(1, 64))
        loss = module(torch.ones(1, 64)).sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match="was changed"):
            loss.backward()


def test_evicting_within_a_call_leaves_what_the_call_uses(
    pair: tuple[SwappedModule, torch.nn.Module],
) -> None:
    module, theirs = pair
    inner: Any = module.module
    seen: list[list[bool]] = []

    def evicts(*_: Any) -> None:
        module.evict()
        seen.append([bool(layer.weight.isnan().all()) for layer in inner])

    hook = inner[2].register_forward_pre_hook(evicts)
    assert_same(module, theirs)
    hook.remove()
    assert seen == [[True, True, False, True, True, True]]
    with thread(module.evict):
        assert_same(module, theirs)


def test_parts_that_stay_make_room_where_tensors_took_it(tmp_path: Path) -> None:
    """Everything would fit, were it not for memory that somebody keeps a tensor over."""
    ours, theirs = stack(8), stack(8)
    with in_memory(ours, tmp_path, stage_bytes=PART, resident_bytes=8 * PART) as module:
        for seed in range(2):
            assert_same(module, theirs, seed)
        with module.gather(ours[0].weight, ours[5].weight):
            kept = [ours[0].weight.data, ours[5].weight.data]
        module.evict()
        for seed in range(2):
            assert_same(module, theirs, seed)
        assert kept[1].equal(theirs[5].weight)
        kept.clear()
        for seed in range(2):
            assert_same(module, theirs, seed)


def test_an_interrupt_that_is_kept_holds_no_old_values(tmp_path: Path) -> None:
    """A traceback keeps the locals of its frames: what they held would outlive the next step."""
    ours, theirs = stack(2), stack(2)
    x = torch.ones(1, 64)
    kept: list[BaseException] = []
    with (
        in_memory(ours, tmp_path, stage_bytes=PART) as module,
        SwappedOptimizer(
            torch.optim.SGD, module.parameters(), swap_dir=tmp_path, lr=0.1, durable=False
        ) as optimizer,
    ):
        reference = torch.optim.SGD(theirs.parameters(), lr=0.1)

        def use() -> None:
            try:
                with torch.no_grad():
                    module(x)
            except KeyboardInterrupt as interrupt:
                kept.append(interrupt)

        for where in at_places(use, 60):
            torch.set_grad_enabled(True)
            for made, steps in ((module, optimizer), (theirs, reference)):
                made.zero_grad()
                made(x).square().mean().backward()
                steps.step()  # type: ignore[attr-defined]
            with torch.no_grad():
                assert module(x).equal(theirs(x)), where
            use()  # for parts to stay
    assert kept


@pytest.mark.parametrize("parts", [2, 8], ids=["window", "all"])
@pytest.mark.parametrize("masters", [False, True], ids=["fp32", "bf16"])
def test_a_pass_beside_a_step_leaves_no_old_values(
    parts: int, masters: bool, tmp_path: Path
) -> None:
    """Of parts that it held when the step began, and of such that it brought meanwhile."""
    ours, theirs = stack(), stack()
    options: dict[str, Any] = {"lr": 0.1, "durable": False, "subgroup_bytes": 32 << 10}
    if masters:
        ours, theirs = ours.to(torch.bfloat16), theirs.to(torch.bfloat16)
        options["master_dtype"] = torch.float32
    x = torch.ones(1, 64, dtype=ours[0].weight.dtype)
    stepping, passing = threading.Event(), threading.Event()

    def pause(kind: str, offset: int, nbytes: int) -> int:
        if kind == "pwrite" and passing.is_set():
            stepping.set()
            assert finished.wait(PATIENCE_S)
        return 0

    finished = threading.Event()

    def within(*_: Any) -> None:
        passing.set()
        assert stepping.wait(PATIENCE_S)

    def compute() -> None:
        with torch.no_grad():
            module(x)
            module(x)
        finished.set()

    with (
        nvmeio.AioHandle(engine=FakeEngine(fail=pause)) as handle,
        in_memory(ours, tmp_path, stage_bytes=PART, resident_bytes=(parts + 2) * PART) as module,
        SwappedOptimizer(
            torch.optim.SGD,
            module.parameters(),
            swap_dir=tmp_path / "ours",
            handle=handle,
            **options,
        ) as optimizer,
        SwappedOptimizer(
            torch.optim.SGD, theirs.parameters(), swap_dir=tmp_path / "theirs", **options
        ) as reference,
    ):
        for made in (module, theirs):
            made(x).square().mean().backward()
        hook = ours[3].register_forward_pre_hook(within)
        with thread(compute):
            assert passing.wait(PATIENCE_S)
            optimizer.step()
        hook.remove()
        reference.step()
        with torch.no_grad():
            assert module(x).equal(theirs(x))


def test_a_part_that_cannot_be_read_again_after_a_step_is_nan_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = stack(), stack()
    x = torch.ones(1, 64)
    failing = threading.Event()

    def fail(kind: str, offset: int, nbytes: int) -> int:
        return errno.EIO if kind == "pread" and failing.is_set() else 0

    with (
        nvmeio.AioHandle(engine=FakeEngine(fail=fail)) as handle,
        in_memory(ours, tmp_path, stage_bytes=PART, handle=handle) as module,
        SwappedOptimizer(
            torch.optim.SGD, module.parameters(), swap_dir=tmp_path, lr=0.1, durable=False
        ) as optimizer,
    ):
        reference = torch.optim.SGD(theirs.parameters(), lr=0.1)
        for made in (module, theirs):
            made(x).square().mean().backward()

        def within(*_: Any) -> None:
            failing.set()
            optimizer.step()
            failing.clear()

        hook = ours[3].register_forward_pre_hook(within)
        with torch.no_grad():
            assert module(x).isnan().all()
        hook.remove()
        reference.step()
        with torch.no_grad():
            assert module(x).equal(theirs(x))
    assert "'3' is NaN until read again" in caplog.text
    assert "Input/output error" in caplog.text


def test_closed_its_parts_are_used_no_more(tmp_path: Path) -> None:
    module = in_memory(stack(), tmp_path / "a", stage_bytes=PART)
    for _ in range(2):
        gradients(module, torch.ones(1, 64))
    module.close()
    with pytest.raises(nvmeio.ClosedError):
        module(torch.ones(1, 64))
    dropped = in_memory(stack(), tmp_path / "b", stage_bytes=PART)
    for _ in range(2):
        gradients(dropped, torch.ones(1, 64))
    del dropped
    spin_until_collected(lambda: not [*(tmp_path / "b").iterdir()])


@pytest.mark.parametrize("end", ["module.close()", "del module", ""])
def test_a_program_ends_with_parts_that_stay(end: str, tmp_path: Path) -> None:
    """Their memory was freed by a thread that the end of the program cut off: it aborted."""
    run_python(
        f"""
        import torch
        from nvmeio.offload import SwappedModule

        layers = [torch.nn.Linear(64, 64) for _ in range(64)]
        module = SwappedModule(
            torch.nn.Sequential(*layers), swap_dir={str(tmp_path)!r}, resident_bytes="16MiB"
        )
        for _ in range(3):
            module(torch.ones(1, 64)).sum().backward()
        {end}
        """
    )
